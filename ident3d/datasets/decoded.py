"""Decoded pictures, kept once for all workers and epochs; and the mean and std of their pixels."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import context, reduction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ident3d.datasets.decoding import check_memory, map_decoded
from ident3d.datasets.serving import Array, Statistics
from ident3d.errors import DatasetError
from ident3d.files import write_json
from ident3d.home import cache_home
from ident3d.schema import from_plain, to_plain

if TYPE_CHECKING:
    from ident3d.datasets.pictures import Pictures

__all__ = [
    "DecodedStore",
    "Shape",
    "computed_statistics",
    "decode_into",
    "folders",
    "in_memory",
    "shape_of",
    "stem_of",
]

Shape = tuple[int, int, int, int]
"""(P, 3, H, W)."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class DecodedStore:
    """All pictures of a split, decoded, mapped read-only: fork and spawn workers look at the same memory.

    With `cache="disk"` they are in a file, in the dataset's folder `.decoded`, or in the cache folder where that cannot
    be written. It is made once, by all cores; any process that opens the dataset later maps it, and the kernel keeps of
    it what fits into memory. The file gets its name, and then its header, when it is whole. When it is opened, its size
    and a spread of its pictures are compared with the header, and what differs is decoded again. Files of other choices
    of samples are left beside it; deleting the folder is always safe.

    With `cache="ram"` they are in memory, which no limit on /dev/shm touches, for this process and the workers that it
    starts. A dataset that is pickled for any other process decodes its pictures as they are asked for.

    Args:
        fd: of the file or memory; the store closes it.
        shape: (P, 3, H, W).
        damaged: the numbers of pictures that did not decode, and in words why.
        path: of the file; None for memory.

    Attributes:
        pixels: uint8 (P, 3, H, W), read-only; P is the dataset's `picture_count`.
        damaged, path: as given.
    """

    _fd = -1

    def __init__(self, fd: int, shape: Shape, damaged: dict[int, str], path: Path | None) -> None:
        mapped = mmap.mmap(fd, math.prod(shape), mmap.MAP_SHARED, mmap.PROT_READ)
        self._fd, self.damaged, self.path = fd, damaged, path
        self.pixels: UInt8[Array, "pictures 3 height width"] = np.frombuffer(mapped, np.uint8).reshape(shape)

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def nbytes(self) -> int:
        """Bytes of all pictures."""
        return self.pixels.nbytes

    def fill(
        self,
        data: Pictures,
        out: UInt8[Array, "n 3 height width"],
        places: Sequence[int],
        *,
        positive: bool = False,
    ) -> list[int]:
        """Copy pictures of samples into `out`, one after the other; see `Pictures.fill`."""
        numbers = data.picture_numbers(np.asarray(places, np.int64), positive=positive)
        kept = list(range(len(numbers)))
        if self.damaged:
            wanted = numbers.tolist()
            kept = [k for k in kept if wanted[k] not in self.damaged]
            for number in wanted:
                if number in self.damaged:
                    data.skip(DatasetError(self.damaged[number]))
            numbers = numbers[kept]
        # The numbers are in range; mode="raise" would copy into a buffer first.
        np.take(self.pixels, numbers, axis=0, out=out[: len(kept)], mode="clip")
        return kept

    def picture(self, data: Pictures, place: int, *, positive: bool = False) -> UInt8[Tensor, "3 height width"]:
        """A copy of one picture.

        Raises:
            DatasetError: it is damaged.
        """
        number = int(data.picture_numbers(np.array([place]), positive=positive)[0])
        if number in self.damaged:
            raise DatasetError(self.damaged[number])
        return torch.from_numpy(self.pixels[number].copy())

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound here, since the module's names are gone when the interpreter ends.
        if self._fd >= 0:
            close(self._fd)

    def __copy__(self) -> DecodedStore:
        return self  # nothing in it ever changes

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodedStore:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.pixels.shape
        if self.path is not None:
            return _from_file, (self.path, shape, self.damaged)
        if context.get_spawning_popen() is not None:
            return _from_descriptor, (reduction.DupFd(self._fd), shape, self.damaged)
        return _lost, ("they are in the memory of another process",)


def _from_descriptor(fd: Any, shape: Shape, damaged: dict[int, str]) -> DecodedStore:
    return DecodedStore(fd.detach(), shape, damaged, None)


def _from_file(path: Path, shape: Shape, damaged: dict[int, str]) -> DecodedStore | None:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        _lost(f"{path}: {error.strerror}")
        return None
    if os.fstat(fd).st_size != math.prod(shape):
        os.close(fd)
        _lost(f"{path}: has another size by now")
        return None
    return DecodedStore(fd, shape, damaged, path)


def _lost(why: str) -> None:
    warnings.warn(f"no decoded pictures here ({why}): each is decoded when it is asked for", stacklevel=2)


def shape_of(data: Pictures) -> Shape:
    """The shape of all its decoded pictures."""
    return data.picture_count, 3, data.resolution, data.resolution


def folders(data: Pictures) -> tuple[Path, ...]:
    """Where files of decoded pictures may be, in order of preference."""
    return data.derived / ".decoded", cache_home() / "decoded"


def stem_of(data: Pictures) -> str:
    """What the names of a split's files begin with."""
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', data.split)}-{data.fingerprint()[:16]}"


def in_memory(data: Pictures) -> DecodedStore:
    """The decoded pictures of a dataset in memory that all workers share.

    Raises:
        DatasetError: too little memory, or (with `on_error="raise"`) a damaged picture.
    """
    shape = shape_of(data)
    what, instead = f"{data.root}: {shape[0]:,} decoded pictures", "open it with cache='disk', or without a cache"
    check_memory(math.prod(shape), what, instead)
    fd = _memory()
    try:
        damaged, _ = decode_into(data, fd)
        return DecodedStore(fd, shape, damaged, None)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in FULL:
            raise DatasetError(f"{what} find no room in memory ({error.strerror}); {instead}") from None
        raise


def _memory() -> int:
    """A file that is in memory alone, or without memfd_create (macOS) one without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ident3d")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def decode_into(data: Pictures, fd: int) -> tuple[dict[int, str], Array]:
    """Decode all pictures into a file.

    Returns:
        The numbers of those that are damaged, with the reason; and the CRC-32 of each, little-endian uint32 (P,).

    Raises:
        DatasetError: a damaged picture, with `on_error="raise"`.
        OSError: the file does not take them.
    """
    damaged: dict[int, str] = {}
    checksums: list[int] = []

    def work(start: int, block: Array, bad: dict[int, str]) -> tuple[dict[int, str], list[int]]:
        view, offset = memoryview(block.reshape(-1).data), start * block[0].nbytes
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
        return bad, [zlib.crc32(picture) for picture in block]

    for bad, found in map_decoded(data, work, doing=f"decoding {data.split}"):
        damaged |= bad
        checksums += found
    return damaged, np.array(checksums, "<u4")


@dataclass(frozen=True)
class _Pixels:
    """Exact sums over the pixels of a split, as they are kept beside its decoded pictures.

    Attributes:
        fingerprint: of the split.
        pixels: how many there are a channel; those of damaged pictures are left out.
        sums: of uint8 values, a channel.
        squares: sums of their squares, a channel.
        damaged: how many pictures were left out.
    """

    fingerprint: str
    pixels: int
    sums: tuple[int, int, int]
    squares: tuple[int, int, int]
    damaged: int

    @property
    def statistics(self) -> Statistics:
        """Mean and std a channel, in [0, 1]."""
        n = self.pixels
        mean = [first / n / 255 for first in self.sums]
        pairs = zip(self.sums, self.squares, strict=True)
        std = [math.sqrt((second * n - first**2) / n**2) / 255 for first, second in pairs]
        return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


def computed_statistics(data: Pictures) -> Statistics:
    """Mean and std per channel over all pixels of a split, positives of its samples' own included, in [0, 1].

    From exact integer sums, of one pass; they are kept beside the decoded pictures, or where those would be. Damaged
    pictures are left out, with `on_error="skip"`.

    Raises:
        DatasetError: a damaged picture with `on_error="raise"`, or no other.
    """
    name = f"{stem_of(data)}.pixels.json"
    for folder in folders(data):
        with suppress(OSError, ValueError):
            kept = from_plain(_Pixels, json.loads((folder / name).read_text()))
            usable = kept.pixels and not (kept.damaged and data.on_error == "raise")
            if usable and kept.fingerprint == data.fingerprint():
                return kept.statistics
    found = _count(data)
    if not found.pixels:
        raise DatasetError(f"{data.root}: every picture is damaged; {data.remedy}")
    for folder in folders(data):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / name, to_plain(found))
            break
    return found.statistics


def _count(data: Pictures) -> _Pixels:
    def work(start: int, block: Array, bad: dict[int, str]) -> tuple[Array, int]:
        sums = np.zeros((2, 3), np.int64)
        for number, picture in enumerate(block, start):
            if number not in bad:
                # Row by row: a row's sum of squares fits 32 bits, and is added up faster than in 64.
                sums[0] += picture.sum(axis=2, dtype=np.uint32).sum(axis=1, dtype=np.int64)
                squares = np.multiply(picture, picture, dtype=np.uint16)
                sums[1] += squares.sum(axis=2, dtype=np.uint32).sum(axis=1, dtype=np.int64)
        return sums, len(bad)

    total, damaged = np.zeros((2, 3), np.int64), 0
    for sums, bad in map_decoded(data, work, doing=f"mean and std of {data.split}"):
        total, damaged = total + sums, damaged + bad
    (r, g, b), (r2, g2, b2) = total.tolist()
    pixels = (data.picture_count - damaged) * data.resolution**2
    return _Pixels(data.fingerprint(), pixels, (r, g, b), (r2, g2, b2), damaged)

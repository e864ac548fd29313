"""What a shard holds, as a pure function of its bytes: checksum, offsets, pixel sums, and what is wrong with it."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.codecs import decode
from ident3d.files import npy_bytes, sync_folder
from ident3d.shards.tar import END, Sample, key_of, member_bytes, scan_samples

__all__ = [
    "EXTENSIONS",
    "PAIR_EXTENSIONS",
    "PICTURES",
    "BadSample",
    "ShardSummary",
    "check_sample",
    "extensions_of",
    "file_sha256",
    "map_file",
    "members_of",
    "sample_bytes",
    "summarise",
    "write_index",
    "write_rows",
]

EXTENSIONS = ("png", "latents.npy")
PAIR_EXTENSIONS = (*EXTENSIONS, "pair.png", "pair.latents.npy")
"""The members of a rendered sample; those of one that holds a positive pair."""

PICTURES = ("png", "webp")
"""The formats of stored pictures, by extension."""

EXTRAS = ("json", "txt")
"""What a sample may hold besides: its categorical factors by name, and a text about it."""


IEND = bytes.fromhex("0000000049454e44ae426082")
"""The chunk that ends every PNG."""


class BadSample(ValueError):
    """A sample whose bytes are not what its index asks for; the text says which part and how."""


@dataclass(frozen=True)
class ShardSummary:
    """What the manifest and the index need to know of a shard.

    Attributes:
        samples: how many it holds.
        bytes: its size.
        sha256: of all its bytes.
        offsets: per sample and member (in their order): byte offset and size.
        sums: sum of all pixels, per channel, of uint8 values.
        squares: sum of their squares, per channel.
    """

    samples: int
    bytes: int
    sha256: str
    offsets: tuple[tuple[tuple[int, int], ...], ...]
    sums: tuple[int, int, int]
    squares: tuple[int, int, int]


@contextmanager
def map_file(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, mapped read-only; empty for an empty file."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield memoryview(b"")
            return
        with mmap(file.fileno(), 0, access=ACCESS_READ) as mapped, memoryview(mapped) as view:
            yield view


def file_sha256(path: Path) -> str:
    """The sha256 of a file, as 64 hex digits, in constant memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def members_of(*, pairs: bool = False, picture: str = "png", extras: Sequence[str] = ()) -> tuple[str, ...]:
    """The extensions of a sample's members, in order: picture, latents, those of its positive, what it holds besides.

    Args:
        pairs: whether it holds a positive.
        picture: one of `PICTURES`.
        extras: of `EXTRAS`, in that order.
    """
    own = (picture, "latents.npy")
    return (*own, *(f"pair.{extension}" for extension in own), *extras) if pairs else (*own, *extras)


def is_layout(members: Sequence[str], *, pairs: bool) -> bool:
    """Whether these are the members of samples that this format knows."""
    extras = [extension for extension in EXTRAS if extension in members]
    return any(tuple(members) == members_of(pairs=pairs, picture=p, extras=extras) for p in PICTURES)


def extensions_of(latents: NDArray[np.float32]) -> tuple[str, ...]:
    """The members of rendered samples with such latents: (n, 10) for one picture each, (n, 2, 10) for a pair."""
    return EXTENSIONS if latents.ndim == 2 else PAIR_EXTENSIONS


def sample_bytes(index: int, contents: Sequence[bytes], members: Sequence[str] | None = None) -> bytes:
    """All bytes of sample `index` in its shard, with headers.

    Args:
        index: in the split.
        contents: what its members hold: a picture and its latents, for a pair the same of the positive, then extras.
        members: their extensions; by default those of a rendered sample.
    """
    key = key_of(index)
    if members is None:
        members = EXTENSIONS if len(contents) == len(EXTENSIONS) else PAIR_EXTENSIONS
    named = zip(members, contents, strict=True)
    return b"".join(member_bytes(f"{key}.{extension}", data) for extension, data in named)


def check_sample(
    data: memoryview, sample: Sample, index: int, latent: NDArray[np.float32] | None, resolution: int
) -> NDArray[np.uint8]:
    """The pixels of a sample that is what sample `index` must be, shape (pictures, H, W, 3).

    Args:
        data: the shard's bytes.
        sample: where the sample lies in them.
        index: the index in the split that it must bear.
        latent: the latents that it must hold, shape (d,), or (2, d) for a pair; None where they are not known.
        resolution: its side in pixels.

    Raises:
        BadSample: another key, another latent, a picture that does not decode (every chunk's CRC is checked, so any
            altered byte of it shows) or is of another size.
    """
    if sample.key != key_of(index):
        raise BadSample(f"misnumbered: holds {sample.key} where {key_of(index)} belongs")
    contents = {e: bytes(data[m.offset : m.offset + m.size]) for e, m in sample.members.items()}
    stored = [content for extension, content in contents.items() if extension.endswith("latents.npy")]
    if latent is not None and stored != [npy_bytes(row) for row in np.atleast_2d(latent)]:
        raise BadSample("latents differ from the split's latents")
    pictures = [content for extension, content in contents.items() if extension.endswith(PICTURES)]
    pixels = np.stack([_check_picture(encoded, resolution) for encoded in pictures])
    if bytes(data[sample.start : sample.end]) != sample_bytes(index, list(contents.values()), list(contents)):
        raise BadSample("tar headers or padding are altered")
    return pixels


def _ends_whole(encoded: bytes) -> bool:
    """Whether nothing follows the picture: decoders look no further than its end."""
    if encoded[:4] == b"RIFF":
        return len(encoded) == int.from_bytes(encoded[4:8], "little") + 8
    return encoded.endswith(IEND)


def _check_picture(encoded: bytes, resolution: int) -> NDArray[np.uint8]:
    if not _ends_whole(encoded):
        raise BadSample("picture does not decode: it does not end as a PNG or WebP does")
    try:
        pixels = decode(encoded)
    except (OSError, SyntaxError, ValueError) as error:
        raise BadSample(f"picture does not decode: {error}") from None
    if pixels.shape != (resolution, resolution, 3):
        raise BadSample(f"picture has shape {pixels.shape}, expected {(resolution, resolution, 3)}")
    return pixels


def summarise(
    path: Path, start: int, latents: NDArray[np.float32], resolution: int, members: tuple[str, ...] | None = None
) -> ShardSummary:
    """Read a finished shard whole and check every sample of it.

    Args:
        path: the shard.
        start: the index of its first sample in the split.
        latents: the latents of its samples, shape (n, d), or (n, 2, d) for pairs.
        resolution: the pictures' side in pixels.
        members: the extensions of a sample's members; by default those of rendered samples.

    Raises:
        BadSample: samples missing or too many, no end marker, or a sample that `check_sample` refuses.
    """
    sums = np.zeros(3, np.int64)
    squares = np.zeros(3, np.int64)
    offsets = []
    with map_file(path) as data:
        end = 0
        for i, sample in enumerate(scan_samples(data, members or extensions_of(latents))):
            if i >= len(latents):
                raise BadSample(f"holds more than the {len(latents)} samples that belong in it")
            pixels = check_sample(data, sample, start + i, latents[i], resolution)
            # The squares of uint8 fit uint16; their sum over a picture needs 64 bits.
            sums += pixels.sum(axis=(0, 1, 2), dtype=np.int64)
            squares += np.square(pixels.astype(np.uint16)).sum(axis=(0, 1, 2), dtype=np.int64)
            offsets.append(tuple((m.offset, m.size) for m in sample.members.values()))
            end = sample.end
        if len(offsets) < len(latents):
            raise BadSample(f"holds {len(offsets)} whole samples of {len(latents)}")
        if bytes(data[end:]) != END:
            raise BadSample("does not end as a whole archive does")
        digest = hashlib.sha256(data).hexdigest()
        size = len(data)
    r, g, b = (int(x) for x in sums)
    r2, g2, b2 = (int(x) for x in squares)
    return ShardSummary(len(offsets), size, digest, tuple(offsets), (r, g, b), (r2, g2, b2))


def write_rows(path: Path, shape: tuple[int, ...], dtype: Any, blocks: Iterable[NDArray[Any]]) -> str:
    """Write a .npy piece by piece, whole or not at all; returns its sha256.

    Args:
        path: the file.
        shape: of the array.
        dtype: of the array.
        blocks: its rows, in order.

    Raises:
        ValueError: the blocks are of another shape, or together not as many rows.
    """
    part, digest, rows = path.with_name(f".{path.name}.part"), hashlib.sha256(), 0
    header = io.BytesIO()
    description = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, description)  # type: ignore[no-untyped-call]
    try:
        with open(part, "wb") as file:
            file.write(header.getvalue())
            digest.update(header.getvalue())
            for block in blocks:
                if block.shape[1:] != shape[1:]:
                    raise ValueError(f"{path}: rows of shape {block.shape[1:]}, expected {shape[1:]}")
                data = np.ascontiguousarray(block, dtype)
                file.write(data.data)
                digest.update(data.data)
                rows += len(block)
            if rows != shape[0]:
                raise ValueError(f"{path}: {rows} rows, expected {shape[0]}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # also of what makes the blocks
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return digest.hexdigest()


def write_index(path: Path, samples: int, members: int, summaries: Iterable[ShardSummary]) -> str:
    """Write index.npy shard by shard, whole or not at all; returns its sha256. One summary is held at a time.

    Args:
        path: the file.
        samples: of the split.
        members: of a sample.
        summaries: of all shards, in order.

    Raises:
        ValueError: the shards hold other samples than so many.
    """
    blocks = (np.array(s.offsets, np.int64).reshape(s.samples, members, 2) for s in summaries)
    return write_rows(path, (samples, members, 2), np.int64, blocks)

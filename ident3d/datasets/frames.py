"""Where published pictures lie: numbered files in a folder, or frames of one array in an .npz."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import UInt8
from tqdm import tqdm

from ident3d.codecs import MAX_PIXELS
from ident3d.datasets.layouts import ROUNDING
from ident3d.datasets.serving import Array
from ident3d.errors import DatasetError
from ident3d.files import sync_folder
from ident3d.home import cache_home

__all__ = ["Archive", "Frames", "NumberedPictures"]

BLOCK = 1 << 22
"""Bytes of frames, or of a file, held at once."""
SHOWN = 3
"""Files named in a message before the rest is counted."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def check_side(width: int, height: int, where: object) -> int:
    """The side of a picture.

    Raises:
        DatasetError: not square, or absurdly large.
    """
    if width != height or not 0 < width * height <= MAX_PIXELS:
        raise DatasetError(f"{where}: is {width} x {height} px, expected a square of at most {MAX_PIXELS:,} pixels")
    return width


class NumberedPictures:
    """The pictures <number>.png of a folder, for the numbers 0 to N - 1, whatever the zeros before them.

    The folder is listed once; of a name only its length is kept.

    Args:
        folder: where they are.
        count: N, by the arrays.
        whose: the array that says so, for messages.

    Raises:
        DatasetError: no such folder; a number that is missing, past the end, or there twice.
    """

    def __init__(self, folder: Path, count: int, whose: str) -> None:
        self.folder, self.count = folder, count
        lengths, beyond, twice = bytearray(count), [], []
        for name in _listing(folder):
            stem, _, suffix = name.rpartition(".")
            if suffix != "png" or not (stem.isascii() and stem.isdigit()):
                continue
            number = int(stem)
            if number >= count:
                beyond.append(name)
            elif lengths[number]:
                twice.append(name)
            else:
                lengths[number] = len(stem)
        self._lengths = bytes(lengths)
        if beyond or twice or 0 in lengths:
            self._refuse(sorted(beyond), sorted(twice), whose)

    def _refuse(self, beyond: Sequence[str], twice: Sequence[str], whose: str) -> None:
        digits = math.ceil(math.log10(max(self.count, 2)))
        gone = [f"{number:0{digits}d}.png" for number, length in enumerate(self._lengths) if not length]
        found = self.count - len(gone) + len(beyond) + len(twice)
        parts = (("missing", gone), ("past the end", beyond), ("there under another name too", twice))
        complaints = "; ".join(f"{what}: {_some(names)}" for what, names in parts if names)
        raise DatasetError(
            f"{self.folder}: {found:,} pictures, but {whose} has {self.count:,} rows; {complaints}; unpack or fetch "
            "the dataset again"
        )

    def path(self, number: int) -> Path:
        """The picture of a number, 0 to N - 1."""
        return self.folder / f"{number:0{self._lengths[number]}d}.png"

    def side(self) -> int:
        """The pictures' side in pixels, by the header of the first that has one.

        Raises:
            DatasetError: not square, absurdly large, or no PNG among the first.
        """
        for number in range(min(self.count, 16)):  # one damaged picture is no reason to refuse all
            head = b""
            with suppress(OSError), open(self.path(number), "rb") as file:
                head = file.read(24)
            if len(head) == 24 and head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR":
                width, height = struct.unpack(">II", head[16:])
                return check_side(width, height, self.path(number))
        raise DatasetError(f"{self.folder}: none of its first pictures is a PNG; unpack or fetch the dataset again")

    def stamp(self) -> str:
        """A digest of all sizes and times of change; of 250,000 files it takes about a second."""
        state = np.zeros((self.count, 2), np.int64)
        for number in range(self.count):
            with suppress(OSError):
                found = self.path(number).stat()
                state[number] = found.st_size, found.st_mtime_ns
        return hashlib.sha256(state.data).hexdigest()


def _listing(folder: Path) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry.name for entry in entries)
    except OSError as error:
        raise DatasetError(f"{folder}: cannot be listed ({error.strerror or error})") from None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@dataclass(frozen=True)
class Member:
    """An array in an .npz.

    Attributes:
        info: its entry in the zip.
        shape: of the array.
        dtype: of the array.
        start: bytes before the first element.
    """

    info: zipfile.ZipInfo
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int

    @classmethod
    def parse(cls, info: zipfile.ZipInfo, stream: zipfile.ZipExtFile) -> Member:
        """Of the header that a stream begins with.

        Raises:
            ValueError: no header, or not of numbers in C order, or not of what follows.
        """
        major = np.lib.format.read_magic(stream)[0]  # type: ignore[no-untyped-call]
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)  # type: ignore[no-untyped-call]
        if dtype.kind not in "biuf":
            raise ValueError(f"{dtype} is no type of numbers")
        if fortran and len(shape) > 1:
            raise ValueError(
                "in Fortran order, which cannot be read piece by piece; save numpy.ascontiguousarray of it"
            )
        found = cls(info, shape, dtype, stream.tell())
        if min(shape, default=0) < 0 or found.start + math.prod(shape) * dtype.itemsize != info.file_size:
            raise ValueError(f"{info.file_size:,} bytes for {dtype} {shape}")
        return found


class Archive:
    """The arrays of an .npz, each read when it is asked for, and its checksum compared.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Member, zipfile.ZipExtFile]]:
        """A member and its bytes past the header. What is raised in the block is taken for the file's fault."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                names = [found.removesuffix(".npy") for found in archive.namelist()]
                if name not in names:
                    raise DatasetError(f"{self.path}: has no array {name}; it has {', '.join(names) or 'none'}")
                with cast("zipfile.ZipExtFile", archive.open(f"{name}.npy")) as stream:
                    yield Member.parse(archive.getinfo(f"{name}.npy"), stream), stream
        except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error) as error:
            raise DatasetError(f"{self.path}: {name} cannot be read ({error}); fetch it again") from None

    def member(self, name: str) -> Member:
        """What an array is, by its header.

        Raises:
            DatasetError: no such array, or not one that can be read.
        """
        with self._opened(name) as (member, _):
            return member

    def read(self, name: str, shape: tuple[int | None, ...], expected: str) -> Array:
        """A whole array.

        Args:
            name: of the array.
            shape: that it must have; None for a length that may be any.
            expected: the same in words.

        Raises:
            DatasetError: no such array, damaged, or of another shape.
        """
        with self._opened(name) as (member, stream):
            lengths = member.shape if len(member.shape) == len(shape) else ()
            if not lengths or any(b not in (a, None) for a, b in zip(lengths, shape, strict=True)):
                raise DatasetError(f"{self.path}: {name} is {member.dtype} {member.shape}, expected {expected}")
            data = bytearray(stream.read())
        return np.frombuffer(data, member.dtype).reshape(member.shape)

    def blocks(self, name: str) -> Iterator[Array]:
        """An array in pieces of its first axis.

        Raises:
            DatasetError: no such array, or damaged, which shows at the end.
        """
        with self._opened(name) as (member, stream):
            each = math.prod(member.shape[1:]) * member.dtype.itemsize
            count = max(1, BLOCK // max(each, 1))
            for start in range(0, member.shape[0], count):
                n = min(count, member.shape[0] - start)
                data = stream.read(n * each)
                if len(data) < n * each:
                    raise EOFError("it ends early")
                yield np.frombuffer(data, member.dtype).reshape(n, *member.shape[1:])

    def offset(self, member: Member) -> int:
        """Where the elements of an uncompressed member begin in the file."""
        with open(self.path, "rb") as file:
            file.seek(member.info.header_offset)
            name, extra = struct.unpack("<HH", file.read(30)[26:])
        return member.info.header_offset + 30 + int(name) + int(extra) + member.start


class Frames:
    """The pictures of the array `imgs`, (N, side, side, 3 or more), one at a time.

    One that is stored uncompressed as uint8 is read in place, once its checksum was compared. All others are unpacked,
    once and piece by piece, into a file of uint8 in the cache folder.

    Args:
        path: the .npz.

    Attributes:
        count: N.
        side: in pixels.
        checksum: CRC-32 of the array, by the zip's table.

    Raises:
        DatasetError: no such array, damaged, not of pictures, or no room in the cache folder.
    """

    def __init__(self, path: Path) -> None:
        archive = Archive(path)
        member = archive.member("imgs")
        self.path, self.checksum = path, member.info.CRC
        self.count, self.side, self.channels = _dimensions(member, path)
        in_place = member.info.compress_type == zipfile.ZIP_STORED and member.dtype == np.uint8
        kept = self._kept(member, "checked" if in_place else "rgb")
        if in_place:
            self._file, self._offset = path, archive.offset(member)
            _check_once(archive, kept)
        else:
            self._file, self._offset, self.channels = kept, 0, 3
            _unpack(archive, member, kept)

    def _kept(self, member: Member, suffix: str) -> Path:
        """The file in the cache that stands for this state of the .npz."""
        found = self.path.stat()
        state = f"{found.st_size} {found.st_mtime_ns} {member.info.CRC} {member.shape} {member.dtype}"
        return cache_home() / "frames" / f"{_digest(str(self.path.resolve()))}-{_digest(state)}.{suffix}"

    def read(self, index: int, out: UInt8[Array, "side side 3"] | None = None) -> UInt8[Array, "side side 3"]:
        """Frame `index`, 0 to N - 1.

        Raises:
            DatasetError: the file is gone or was cut off.
        """
        target = np.empty((self.side, self.side, 3), np.uint8) if out is None else out
        direct = self.channels == 3 and target.flags.c_contiguous
        buffer = target if direct else np.empty((self.side, self.side, self.channels), np.uint8)
        try:
            fd = os.open(self._file, os.O_RDONLY)
            try:
                got = os.preadv(fd, [buffer.data], self._offset + index * buffer.nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise DatasetError(f"{self._file}: {error.strerror or error}; open the dataset again") from None
        if got < buffer.nbytes:
            raise DatasetError(f"{self._file}: ends within frame {index}; open the dataset again")
        if not direct:
            target[...] = buffer[..., :3]
        return target


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _dimensions(member: Member, path: Path) -> tuple[int, int, int]:
    """N, side and channels of pictures."""
    what = f"{path}: imgs is {member.dtype} {member.shape}"
    if len(member.shape) != 4 or member.shape[3] < 3:
        raise DatasetError(f"{what}, expected (N, side, side, 3 or more): consecutive frames")
    if member.dtype != np.uint8 and member.dtype.kind != "f":
        raise DatasetError(f"{what}, expected uint8, or floats from 0 to 1")
    count, height, width, channels = member.shape
    return count, check_side(width, height, f"{path}, imgs"), channels


def _check_once(archive: Archive, kept: Path) -> None:
    """Compare the checksum of `imgs`, unless the file `kept` says that it was found right."""
    if kept.exists():
        return
    for _ in archive.blocks("imgs"):
        pass
    with suppress(OSError):  # where nothing can be kept, it is compared again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
        _drop_outgrown(kept)


def _unpack(archive: Archive, member: Member, kept: Path) -> None:
    """Write `imgs` into the file `kept` as uint8 RGB, unless it is there. Processes that want it wait for the first."""
    size = math.prod(member.shape[:3]) * 3
    part = kept.with_name(f".{kept.name}.part")
    try:
        if _is_whole(kept, size):
            return
        kept.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(kept.parent).free
        if free < size:
            raise OSError(errno.ENOSPC, f"{size / 1e9:,.2f} GB are needed, {free / 1e9:,.2f} GB are free")
        with open(part, "ab") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_whole(kept, size):
                _write_frames(archive, member, file)
                os.replace(part, kept)
        part.unlink(missing_ok=True)
        sync_folder(kept.parent)
        _drop_outgrown(kept)
    except OSError as error:
        full = "no room to unpack the frames into: " if error.errno in FULL else "the frames cannot be unpacked: "
        raise DatasetError(
            f"{kept.parent}: {full}{error.strerror or error}; IDENT3D_HOME moves the cache folder"
        ) from None


def _is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _write_frames(archive: Archive, member: Member, file: BufferedWriter) -> None:
    file.truncate(0)
    try:
        with tqdm(total=member.shape[0], desc=f"unpacking {archive.path.name}", unit="frame", disable=None) as bar:
            for block in archive.blocks("imgs"):
                file.write(_rgb(block, archive.path).data)
                bar.update(len(block))
        file.flush()
        os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            file.truncate(0)  # its room is given back; its name stays, for others may wait for its lock
        raise


def _rgb(block: Array, path: Path) -> UInt8[Array, "n side side 3"]:
    """Frames as uint8 RGB."""
    colours = block[..., :3]
    if colours.dtype != np.uint8:
        low, high = colours.min(), colours.max()
        if not (low >= -ROUNDING and high <= 1 + ROUNDING):
            raise DatasetError(f"{path}: imgs is {block.dtype} from {low:g} to {high:g}, expected 0 to 1, or uint8")
        colours = np.rint(255 * np.clip(colours.astype(np.float64), 0, 1)).astype(np.uint8)
    return np.ascontiguousarray(colours)


def _drop_outgrown(kept: Path) -> None:
    """Remove what was kept of earlier states of the same .npz."""
    for old in kept.parent.glob(f"{kept.name.partition('-')[0]}-*"):
        if old != kept:
            old.unlink(missing_ok=True)

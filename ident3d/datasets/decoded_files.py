"""Decoded pictures in a file: made once, by one process, whole or absent, and checked when it is opened."""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import math
import os
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from ident3d.datasets.decoded import DecodedStore, decode_into, folders, in_memory, shape_of, stem_of
from ident3d.datasets.decoding import gigabytes
from ident3d.datasets.serving import Array
from ident3d.errors import DatasetError
from ident3d.files import sync_folder, write_json
from ident3d.schema import from_plain, to_plain

if TYPE_CHECKING:
    from ident3d.datasets.pictures import Pictures

__all__ = ["on_disk", "open_store"]

FORMAT = 1
SPREAD = 64
"""Pictures whose checksums are compared when a file is opened."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def open_store(data: Pictures, cache: str) -> DecodedStore:
    """The decoded pictures of a dataset; decoded now where no earlier call has.

    Args:
        data: the dataset.
        cache: `ram` or `disk`.

    Raises:
        DatasetError: no room for them, or (with `on_error="raise"`) a damaged picture.
    """
    if cache == "ram":
        return in_memory(data)
    return on_disk(data)


def on_disk(data: Pictures) -> DecodedStore:
    """The decoded pictures of a dataset in a file; decoded now where no earlier call has.

    Raises:
        DatasetError: no room for it, or (with `on_error="raise"`) a damaged picture.
    """
    files = [_StoreFile(data, folder) for folder in folders(data)]
    for file in files:
        store, complaint = file.look()
        if store is not None:
            return store
        if complaint:
            warnings.warn(f"{file.path}: {complaint}; decoded again", stacklevel=4)
    refused = []
    for file in files:
        try:
            file.prepare()
        except OSError as error:
            refused.append(f"{file.folder} ({error.strerror or error})")
            continue
        with file.lock():
            store, _ = file.look()  # another process may have decoded them meanwhile
            return store or file.build()
    raise DatasetError(f"no folder for decoded pictures can be written: {', '.join(refused)}; set IDENT3D_HOME")


@dataclass(frozen=True)
class _Header:
    """What a file of decoded pictures holds, written beside it when it is whole.

    Attributes:
        format: of the two files.
        fingerprint: of the split.
        shape: (P, 3, H, W).
        crc32: of each picture, little-endian uint32 in base64.
        damaged: by number, pictures that did not decode, and in words why.
    """

    format: int
    fingerprint: str
    shape: tuple[int, int, int, int]
    crc32: str
    damaged: dict[str, str]


class _StoreFile:
    """The file of one dataset's decoded pictures in one folder."""

    def __init__(self, data: Pictures, folder: Path) -> None:
        self.data, self.folder, self.stem = data, folder, stem_of(data)
        self.path, self.header_path = folder / f"{self.stem}.u8", folder / f"{self.stem}.json"
        self._lock_path = folder / f".{self.stem}.lock"
        self.need = math.prod(shape_of(data))

    def look(self) -> tuple[DecodedStore | None, str]:
        """The store, or None with what is wrong with the file, or with nothing where there is none."""
        try:
            header = from_plain(_Header, json.loads(self.header_path.read_text()))
            checksums = np.frombuffer(base64.b64decode(header.crc32, validate=True), "<u4")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None, ""
        except (OSError, ValueError) as error:
            return None, f"its header is damaged ({error})"
        if (header.format, header.fingerprint, header.shape) != (FORMAT, self.data.fingerprint(), shape_of(self.data)):
            return None, "it is of other pictures"
        known = {str(number) for number in range(header.shape[0])} if header.damaged else set()
        if len(checksums) != header.shape[0] or not known.issuperset(header.damaged):
            return None, "its header is damaged"
        return self._map({int(number): text for number, text in header.damaged.items()}, checksums)

    def _map(self, damaged: dict[int, str], checksums: Array) -> tuple[DecodedStore | None, str]:
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            return None, error.strerror or str(error)
        size = os.fstat(fd).st_size
        if size != self.need:
            os.close(fd)
            return None, f"it has {size:,} bytes of {self.need:,}"
        store = DecodedStore(fd, shape_of(self.data), damaged, self.path)
        for number in np.unique(np.linspace(0, len(store) - 1, SPREAD).astype(int)).tolist():
            if zlib.crc32(store.pixels[number]) != checksums[number]:
                return None, f"its picture {number} is not as it was written"
        if self._mended(damaged):
            return None, "pictures that were damaged are mended by now"
        return store, ""

    def _mended(self, damaged: dict[int, str]) -> bool:
        """Whether any picture that did not decode does so now.

        Raises:
            DatasetError: it does not, with `on_error="raise"`.
        """
        for number in damaged:
            positive, place = divmod(number, len(self.data))
            try:
                self.data.pixels(place, positive=bool(positive))
            except DatasetError:
                if self.data.on_error == "raise":
                    raise
            else:
                return True
        return False

    def build(self) -> DecodedStore:
        """Decode all pictures into the file. The lock must be held.

        Raises:
            DatasetError: no room, or (with `on_error="raise"`) a damaged picture.
        """
        self.header_path.unlink(missing_ok=True)
        for left in (self.path, *self.folder.glob(f".{self.stem}.*.part")):  # of builds that were killed
            left.unlink(missing_ok=True)
        if self.need > self._free():
            raise self._full("")
        part = self.folder / f".{self.stem}.{os.getpid()}.part"
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                damaged, checksums = decode_into(self.data, fd)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(part, self.path)
            sync_folder(self.folder)
            crc32 = base64.b64encode(checksums.tobytes()).decode()
            texts = {str(number): text for number, text in damaged.items()}
            write_json(
                self.header_path,
                to_plain(_Header(FORMAT, self.data.fingerprint(), shape_of(self.data), crc32, texts)),
            )
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._full(f" ({error.strerror or error})") from None
            raise
        return DecodedStore(os.open(self.path, os.O_RDONLY), shape_of(self.data), damaged, self.path)

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _full(self, why: str) -> DatasetError:
        others = sum(path.stat().st_size for path in self.folder.glob("*.u8"))
        beside = f" (other decoded pictures there, which may be deleted, take {gigabytes(others)})" if others else ""
        return DatasetError(
            f"{self.path}: cannot be written{why}: {len(self.data):,} samples need {gigabytes(self.need)} decoded, "
            f"{gigabytes(self._free())} are free{beside}; make room, or open the dataset without cache='disk'"
        )

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            OSError: it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_path.touch()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the file against other processes; wait for the one that is at it."""
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if sys.stderr.isatty():
                    tqdm.write(f"{self.path}: waiting for another process that decodes the same", file=sys.stderr)
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield
        finally:
            os.close(fd)

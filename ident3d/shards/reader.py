"""Random access to members of shards by offset: no unpacking, safe under threads, fork and spawn."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import DatasetError
from ident3d.files import read_npy
from ident3d.shards.location import SplitFiles
from ident3d.shards.manifest import SplitEntry
from ident3d.shards.summary import map_file, write_rows
from ident3d.shards.tar import Sample, scan_samples

__all__ = ["SplitReader", "index_blocks", "member_offsets", "rebuild_index", "write_rebuilt_index"]

MAX_OPEN = 512
"""Shards kept open; past that a shard is opened and closed for each read, which costs some microseconds."""


def index_blocks(files: SplitFiles, split: SplitEntry) -> Iterator[NDArray[np.int64]]:
    """The rows of a split's index, one array a shard, read off the shards' headers: (samples, members, 2).

    Raises:
        DatasetError: a shard that is absent or does not hold the samples that the manifest gives it.
    """
    for shard in split.shards:
        path = files.path(shard.name, shard.sha256, shard.bytes)
        if not path.is_file():
            raise DatasetError(f"{path}: missing; run `ident3d verify --repair` on the dataset")
        with map_file(path) as data:
            samples = list(scan_samples(data, split.members))
        if len(samples) != shard.samples:
            raise DatasetError(
                f"{path}: holds {len(samples)} whole samples of {shard.samples}; "
                "run `ident3d verify --repair` on the dataset"
            )
        yield member_offsets(samples)


def member_offsets(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Where the members of samples lie: (samples, members, 2), byte offset and size."""
    places = [(m.offset, m.size) for sample in samples for m in sample.members.values()]
    return np.array(places, np.int64).reshape(len(samples), -1, 2)


def rebuild_index(files: SplitFiles, split: SplitEntry) -> NDArray[np.int64]:
    """The whole index of a split, read off the shards' headers: (N, members, 2), byte offset and size.

    Raises:
        DatasetError: see `index_blocks`.
    """
    index, done = np.empty((split.samples, len(split.members), 2), np.int64), 0
    for block in index_blocks(files, split):
        index[done : done + len(block)] = block
        done += len(block)
    return index


def write_rebuilt_index(path: Path, files: SplitFiles, split: SplitEntry) -> str:
    """Write index.npy as the shards' headers have it, shard by shard; returns its sha256.

    Raises:
        DatasetError: see `index_blocks`.
    """
    return write_rows(path, (split.samples, len(split.members), 2), np.int64, index_blocks(files, split))


class SplitReader:
    """The encoded pictures of one split, by index.

    Opens no shard until the first read of it, and pickles without handles. Reads are positional (`pread`), so processes
    that share a descriptor after a fork do not disturb each other.

    Args:
        files: the split's.
        split: its entry in the manifest.

    Raises:
        DatasetError: an index that is damaged, or absent and not to be rebuilt from the shards.
    """

    def __init__(self, files: SplitFiles, split: SplitEntry) -> None:
        self.files = files
        self.split = split
        self._open()

    def _open(self) -> None:
        # Mapped, so that workers share one copy of it.
        self._index = self._load_index()
        self._files: dict[int, int] = {}

    def _load_index(self) -> NDArray[np.int64]:
        path = self.files.path("index.npy", self.split.index_sha256)
        expected = (self.split.samples, len(self.split.members), 2)
        try:
            index = read_npy(path, mapped=True)
        except FileNotFoundError:
            return rebuild_index(self.files, self.split)
        except (OSError, ValueError) as error:
            raise DatasetError(f"{path}: damaged ({error}); delete it, or run `ident3d verify --repair`") from None
        if index.shape != expected or index.dtype != np.int64:
            raise DatasetError(f"{path}: has shape {index.shape}, expected {expected}; run `ident3d verify --repair`")
        return index

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "split": self.split}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound here, since the module's names are gone when the interpreter ends.
        for fd in self.__dict__.get("_files", {}).values():
            close(fd)

    def __len__(self) -> int:
        return self.split.samples

    def where(self, index: int) -> str:
        """The sample in words, for messages: file and key."""
        shard = self.split.shards[index // self.split.shard_size]
        return f"{self.files.text(shard.name)}, sample {index:09d}"

    def picture(self, index: int, *, positive: bool = False) -> bytes:
        """The encoded picture of sample `index`, or that of its positive; see `read`."""
        return self.read(index, 2 if positive else 0)

    def read(self, index: int, member: int) -> bytes:
        """A member of sample `index`, 0 to len - 1.

        Args:
            index: in the split.
            member: its number among the split's `members`.

        Raises:
            DatasetError: the index points outside the shard, or the shard is absent or ends before the member does.
        """
        offset, size = self._index[index, member].tolist()
        shard = index // self.split.shard_size
        if not 0 <= offset <= offset + size <= self.split.shards[shard].bytes:
            name = self.split.shards[shard].name
            raise DatasetError(
                f"{self.files.text('index.npy')}: sample {index} is said to lie outside {name}; "
                "delete the file, or run `ident3d verify --repair`"
            )
        fd = self._files.get(shard)
        data = self._first_read(shard, size, offset) if fd is None else os.pread(fd, size, offset)
        if len(data) != size:
            raise DatasetError(f"{self.where(index)}: the shard is truncated; run `ident3d verify --repair`")
        return data

    def _first_read(self, shard: int, size: int, offset: int) -> bytes:
        entry = self.split.shards[shard]
        path = self.files.path(entry.name, entry.sha256, entry.bytes)
        try:
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            remedy = "run `ident3d verify --repair` on the dataset"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = f"allow this process more (ulimit -n): each split keeps up to {MAX_OPEN} shards open"
            raise DatasetError(f"{path}: {error.strerror}; {remedy}") from None
        try:
            data = os.pread(fd, size, offset)
        except OSError:
            os.close(fd)
            raise
        # Another thread may have opened the same shard meanwhile: the first one stays.
        if len(self._files) >= MAX_OPEN or self._files.setdefault(shard, fd) != fd:
            os.close(fd)
        return data

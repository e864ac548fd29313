"""Grids of points in files: for as many points as a disk holds.

A file is a header, the points cell by cell, their numbers, and a table: the grid's bounds and where each cell begins.
It is mapped, so opening it reads the header, the table and a few points, and processes that search it share its pages.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.datasets.cells import Cells, Rows
from ident3d.datasets.grid_build import CELL, Built, build_grid, write_at
from ident3d.datasets.grid_search import Search
from ident3d.files import sync_folder

__all__ = ["GridFile", "drop_stale", "file_bytes", "write_grid"]

Array = NDArray[Any]

MAGIC = b"ident3d grid 1\n"

HEAD = 2**16
"""Bytes before the points."""

CHECKED = 256
"""Points that are compared with the samples when a file is opened."""

STALE = 86_400
"""Seconds after which a file that nobody wrote into is no longer being built. A build writes all the time, but for its
first third."""


class GridFile:
    """A file of points to be searched, mapped.

    Opening it checks what it begins with and its table by a checksum, its size, and 256 points, spread evenly over the
    file, with their numbers against the samples. The other points and numbers have no checksum, since it would take
    reading them all: that some of them are damaged, or that samples which are not among the 256 were changed, is not
    noticed, and wrong neighbours may be found.

    Args:
        path: the file.
        header: what it must begin with: what its points depend on, in a line.
        rows: the points that it was built from.
        samples: how many these are.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, or not of these points; the text says which.
    """

    def __init__(self, path: Path, header: bytes, rows: Rows, samples: int) -> None:
        with open(path, "rb") as file:
            facts, table = _read_head(file, header, os.fstat(file.fileno()).st_size)
            self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.cells = Cells(_split(table["low"], table["slabs"]), _split(table["high"], table["slabs"]))
        self.starts, self.middle = table["starts"], table["middle"]
        self.reach, self.norm = float(table["reach"]), float(table["norm"])
        kept, width = int(self.starts[-1]), self.cells.dim + 2
        self.points = np.frombuffer(self.mapped, np.float32, kept * width, HEAD).reshape(kept, width)
        self.order = np.frombuffer(self.mapped, np.dtype(facts["order"]), kept, facts["order_at"])
        places = np.unique(np.linspace(0, kept - 1, CHECKED).astype(np.int64))
        numbers = self.order[places]
        if not ((numbers >= 0) & (numbers < samples)).all() or not np.array_equal(
            self.points[places, :-2], rows(numbers)
        ):
            raise ValueError("belongs to other latents or settings, or is damaged")

    def search(
        self, queries: NDArray[np.float32], exclude: NDArray[np.int64] | None = None, threads: int | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The nearest point of each query; of points equally far, the one of the least number: see `GridIndex.search`.

        Args:
            queries: float32 (n, d).
            exclude: for each query, a point that does not count, or -1.
            threads: that share the work; by default one a core.
        """
        if not len(queries):
            return np.empty(0), np.empty(0, np.int64)
        return Search(self, queries, exclude).run(threads)

    def expect(self, start: int, stop: int) -> None:
        """Have the system read points ahead that are needed soon, from place `start` to before `stop`."""
        if hasattr(mmap, "MADV_WILLNEED") and stop > start:
            row = self.points.itemsize * self.points.shape[1]
            first = (HEAD + start * row) // mmap.PAGESIZE * mmap.PAGESIZE
            self.mapped.madvise(mmap.MADV_WILLNEED, first, HEAD + stop * row - first)


def file_bytes(samples: int, dim: int) -> int:
    """What a file of so many points of so many dimensions takes, but for its table, which is some MB at most."""
    return HEAD + samples * (4 * (dim + 2) + _number(samples).itemsize)


def drop_stale(folder: Path, pattern: str) -> None:
    """Remove what builds that were killed left behind. The lock of the folder must be held.

    A file that is being built is named by its host and process. It goes where the host is this one and the process is
    gone, or where nothing was written into it for a day. On network mounts a lock may hold for one host alone, so
    files of others are kept until then.

    Args:
        folder: where the files are.
        pattern: of the names that they were to have.
    """
    for part in folder.glob(f".{pattern}.*part"):
        named = re.search(r"\.([^.]*)\.(\d+)\.part$", part.name)
        with suppress(OSError):  # gone, or of another user: no reason to build nothing
            stale = time.time() - part.stat().st_mtime > STALE
            if stale or (named and named[1] == _host() and not _alive(int(named[2]))):
                part.unlink()


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def _number(samples: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if samples < 2**31 else np.int64)


def write_grid(
    path: Path, header: bytes, rows: Rows, samples: int, advance: Callable[[int], object], cell: int = CELL
) -> None:
    """Build a file of points; `path` is absent or as it was until all is written.

    What builds of the same file left that were killed is removed first: see `drop_stale`.

    Args:
        path: the file.
        header: what its points depend on, in a line.
        rows: the points, float32, finite.
        samples: how many there are.
        advance: told of points that were gone through, each three times.
        cell: points a cell, about.

    Raises:
        OSError: the file cannot be written; no room for it is found before it is begun.
    """
    dim, number = rows(slice(0, 1)).shape[1], _number(samples)
    order_at, table_at = HEAD + samples * 4 * (dim + 2), file_bytes(samples, dim)
    drop_stale(path.parent, escape(path.name))
    free = shutil.disk_usage(path.parent).free
    if free < table_at:
        raise OSError(errno.ENOSPC, f"it needs {table_at / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    part = path.with_name(f".{path.name}.{_host()}.{os.getpid()}.part")
    try:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            built = build_grid(fd, (HEAD, order_at), rows, samples, advance, cell)
            table = _table(built)
            facts = {"order": number.str, "order_at": order_at, "table_at": table_at, "table": len(table)}
            head = MAGIC + header + json.dumps(facts).encode() + b"\n"
            head += hashlib.sha256(head + table).hexdigest().encode() + b"\n"
            if len(head) > HEAD:
                raise ValueError(f"a header of {len(head)} bytes: expected {HEAD} at most")
            write_at(fd, np.frombuffer(table, np.uint8), table_at)
            write_at(fd, np.frombuffer(head, np.uint8), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _table(built: Built) -> bytes:
    cells, file = built.cells, io.BytesIO()
    np.savez(
        file,
        slabs=np.array([len(bounds) for bounds in cells.low]),
        low=np.concatenate(cells.low),
        high=np.concatenate(cells.high),
        starts=built.starts,
        middle=built.middle,
        reach=built.reach,
        norm=built.norm,
    )
    return file.getvalue()


def _read_head(file: io.BufferedReader, header: bytes, size: int) -> tuple[dict[str, Any], dict[str, Array]]:
    """What the header says of the file, and the table.

    Raises:
        ValueError: the file is damaged, or of other points.
    """
    head = file.read(HEAD)
    if not head.startswith(MAGIC):
        raise ValueError("not an index that this ident3d wrote")
    if not head.startswith(header, len(MAGIC)):
        raise ValueError("belongs to other latents or settings")
    start = len(MAGIC) + len(header)
    stop = head.find(b"\n", start) + 1
    try:
        facts = json.loads(head[start:stop])
        if size != facts["table_at"] + facts["table"]:
            raise ValueError
        file.seek(facts["table_at"])
        table = file.read(facts["table"])
        if hashlib.sha256(head[:stop] + table).hexdigest().encode() != head[stop : stop + 64]:
            raise ValueError
        with np.load(io.BytesIO(table)) as arrays:
            return facts, dict(arrays)
    except (ValueError, TypeError, KeyError):
        raise ValueError("damaged") from None


def _split(bounds: Array, slabs: Array) -> list[Array]:
    return np.split(bounds, np.cumsum(slabs)[:-1])

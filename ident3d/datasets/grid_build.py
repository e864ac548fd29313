"""Points put in the order of a grid's cells, in a file, however many: for `ident3d.datasets.grid_files`.

They are read twice, a piece at a time: to count what each cell holds, and to send each point to its bucket, a run of
cells in the file whose size is then known. At last each bucket is sorted where it lies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.datasets.cells import Cells, Rows, distinct

__all__ = ["CELL", "Built", "build_grid", "write_at"]

Array = NDArray[Any]

CELL = 1700
"""Points a cell, about: fewer make more steps in Python, more make more of comparing."""

MOST_CELLS = 50_000
"""Cells that are aimed at, at most. NumPy sorts 16-bit numbers in linear time."""

PIECE_BYTES = 2**25
"""Of points held at once; about ten times as much is used while they are sorted."""


@dataclass(frozen=True)
class Built:
    """What a file of points has to be known with them.

    Attributes:
        cells: the grid.
        starts: where each cell's points begin among all; the last is where they end, int64 (cells + 1,).
        middle: a point in the middle of them, float32 (d,).
        reach: the largest distance of any point from it.
        norm: the largest distance of any point from the origin.
    """

    cells: Cells
    starts: Array
    middle: Array
    reach: float
    norm: float


def write_at(fd: int, array: Array, at: int) -> int:
    """Write an array's bytes at a place of a file, and return the place after them."""
    left = np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
    while len(left):
        done = os.pwrite(fd, left, at)
        at, left = at + done, left[done:]
    return at


def build_grid(
    fd: int,
    places: tuple[int, int],
    rows: Rows,
    samples: int,
    advance: Callable[[int], object],
    cell: int = CELL,
) -> Built:
    """Write points in the order of their cells, and their numbers.

    A point is written as (x, |x - middle|^2, 1), float32: see `grid_search`. Of equal points the first two are kept.

    Args:
        fd: of a file open for reading and writing.
        places: where in it the points go and where their numbers, int32 or, of 2^31 and more samples, int64. There must
            be room for `samples` of each.
        rows: the points, float32, finite.
        samples: how many there are, at least 1.
        advance: told of points that were gone through, each three times.
        cell: points a cell, about.
    """
    return _Build(fd, places, rows, samples, advance, cell).run()


class _Build:
    def __init__(
        self, fd: int, places: tuple[int, int], rows: Rows, samples: int, advance: Callable[[int], object], cell: int
    ) -> None:
        self.fd, self.rows, self.samples, self.advance = fd, rows, samples, advance
        self.points_at, self.order_at = places
        self.cells, self.middle = Cells.over(rows, samples, max(1, min(samples // cell, MOST_CELLS)))
        self.width = self.cells.dim + 2
        self.number = np.dtype(np.int32 if samples < 2**31 else np.int64)
        self.piece = max(1, PIECE_BYTES // (4 * self.width))
        self.reach = self.norm = 0.0

    def run(self) -> Built:
        counts = self._count()
        starts = np.concatenate([[0], np.cumsum(counts)])
        # Buckets are runs of cells of about a piece: each holds the cells that begin in it.
        firsts = np.flatnonzero(np.diff(starts[:-1] // self.piece, prepend=-1))
        firsts = np.append(firsts, self.cells.count)
        self._scatter(starts, firsts)
        counts = self._sort(starts, firsts)
        starts = np.concatenate([[0], np.cumsum(counts)])
        return Built(self.cells, starts, self.middle, self.reach, self.norm)

    def _pieces(self) -> Iterator[tuple[int, Array, Array]]:
        """The points in order: where each piece begins, the points, and the same dimension by dimension."""
        for start in range(0, self.samples, self.piece):
            points = self.rows(slice(start, min(start + self.piece, self.samples)))
            yield start, points, np.array(points.T, order="C")  # a copy, which may be written into
            self.advance(len(points))

    def _count(self) -> Array:
        """How many points each cell has; their bounds are noted on the way."""
        counts = np.zeros(self.cells.count, np.int64)
        least = np.full(self.cells.dim, np.inf, np.float32)
        most = -least
        for _, _, columns in self._pieces():
            counts += np.bincount(self.cells.of(columns), minlength=len(counts))
            least, most = np.minimum(least, columns.min(axis=1)), np.maximum(most, columns.max(axis=1))
            self.norm = max(self.norm, _longest(columns))
            columns -= self.middle[:, None]
            self.reach = max(self.reach, _longest(columns))
        self.cells.fit(least, most)
        return counts

    def _scatter(self, starts: Array, firsts: Array) -> None:
        """Append each piece's points to their buckets."""
        ends = starts[firsts]
        for start, points, columns in self._pieces():
            bucket = np.searchsorted(firsts, self.cells.of(columns), side="right") - 1
            order = np.argsort(bucket.astype(np.min_scalar_type(len(firsts))), kind="stable")
            wide = np.ones((len(points), self.width), np.float32)
            wide[:, :-2] = points
            columns -= self.middle[:, None]
            wide[:, -2] = np.einsum("ij,ij->j", columns, columns)
            wide, numbers = wide.take(order, axis=0), (order + start).astype(self.number)
            edges = np.concatenate([[0], np.cumsum(np.bincount(bucket, minlength=len(firsts) - 1))])
            for k in np.flatnonzero(np.diff(edges)).tolist():
                self._write(int(ends[k]), wide[edges[k] : edges[k + 1]], numbers[edges[k] : edges[k + 1]])
                ends[k] += edges[k + 1] - edges[k]

    def _sort(self, starts: Array, firsts: Array) -> Array:
        """Sort each bucket by cells, without repetitions: later ones move up. Gives what each cell has left."""
        counts = np.zeros(self.cells.count, np.int64)
        end = 0
        for first, last in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
            wide, numbers = self._bucket(int(starts[first]), int(starts[last]))
            code = self.cells.of(np.ascontiguousarray(wide[:, :-2].T)) - first
            order = np.argsort(code.astype(np.min_scalar_type(last - first)), kind="stable")
            counts[first:last] = np.bincount(code, minlength=last - first)
            self._write(end, wide.take(order, axis=0), numbers.take(order))
            end += len(order)
        return counts

    def _bucket(self, start: int, stop: int) -> tuple[Array, Array]:
        """The points of a bucket and their numbers, in order, without repetitions.

        Where a cell is much larger than others, its points are mostly repetitions, which go first.
        """
        parts = []
        for begin in range(start, stop, self.piece):
            count = min(self.piece, stop - begin)
            wide = self._read(self.points_at, begin, (count, self.width), np.dtype(np.float32))
            numbers = self._read(self.order_at, begin, (count,), self.number)
            parts.append(_without_repetitions(wide, numbers))
            self.advance(count)
        if len(parts) < 2:
            return parts[0] if parts else (np.zeros((0, self.width), np.float32), np.zeros(0, self.number))
        return _without_repetitions(np.concatenate([w for w, _ in parts]), np.concatenate([n for _, n in parts]))

    def _read(self, base: int, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = np.empty(shape, dtype)
        left, at = array.data.cast("B"), base + begin * array[:1].nbytes
        while len(left):
            done = os.preadv(self.fd, [left], at)
            if not done:
                raise OSError(f"the file being built ends at byte {at}: it was truncated")
            at, left = at + done, left[done:]
        return array

    def _write(self, at: int, wide: Array, numbers: Array) -> None:
        write_at(self.fd, wide, self.points_at + at * 4 * self.width)
        write_at(self.fd, numbers, self.order_at + at * self.number.itemsize)


def _longest(columns: Array) -> float:
    return float(np.sqrt(np.einsum("ij,ij->j", columns, columns).max()))


def _without_repetitions(wide: Array, numbers: Array) -> tuple[Array, Array]:
    kept = distinct(wide[:, :-2])
    return (wide, numbers) if len(kept) == len(wide) else (wide[kept], numbers[kept])

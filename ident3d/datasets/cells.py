"""The cells of a grid over points: each dimension is cut into slabs that hold about as many points each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import NDArray

__all__ = ["Cells", "Rows", "distinct", "two_groups"]

Array = NDArray[Any]
Rows = Callable[[Any], Float32[Array, "n d"]]
"""Points by a slice or by their numbers."""

PLACES, RUN = 4096, 64
"""Where points are looked at for the slabs, and how many at each place: a quarter of a million in all."""

FEW = 8
"""Bounds that are compared one by one; more are searched."""


class Cells:
    """A grid. Cells that share the slabs of the first group of dimensions have numbers that follow each other.

    Args:
        low: lower bounds of each dimension's slabs, ascending.
        high: their upper bounds.

    Attributes:
        low, high: as given.
        groups: the dimensions that are divided, in two groups of about as many cells.
        rows, columns: cells along the first group and along the second.
    """

    def __init__(self, low: Sequence[Float32[Array, " _"]], high: Sequence[Float32[Array, " _"]]) -> None:
        self.low, self.high = list(low), list(high)
        self.groups = two_groups([len(bounds) for bounds in self.low])
        self.rows, self.columns = (int(np.prod(self.slabs(k), dtype=np.int64)) for k in (0, 1))

    @classmethod
    def over(cls, rows: Rows, samples: int, cells: int) -> tuple[Cells, Float32[Array, " d"]]:
        """A grid of about so many cells for points, and a point in their middle, both from some of the points.

        The outermost slabs are unbounded: see `fit`. Dimensions are cut once more in turn, the one with the widest
        slabs first, but into no more slabs than they have values: the cuts go to those that have more.
        """
        places = min(PLACES, -(-samples // RUN))
        starts = np.linspace(0, max(0, samples - RUN), places).astype(np.int64).tolist()
        some = np.concatenate([rows(slice(start, min(start + RUN, samples))) for start in starts])
        spread = some.std(axis=0, dtype=np.float64)
        values = [np.unique(column, return_counts=True) for column in some.T]
        most = np.array([len(different) for different, _ in values])
        counts = np.ones(some.shape[1], np.int64)
        while counts.prod() * 1.2 < cells and (counts < most).any():
            counts[np.argmax(np.where(counts < most, spread / counts, -1))] += 1
        low, high, infinity = [], [], np.array([np.inf], np.float32)
        for (different, times), count in zip(values, counts.tolist(), strict=True):
            edges = _edges(different, times, count)
            low.append(np.concatenate([-infinity, edges]))
            high.append(np.concatenate([edges, infinity]))
        return cls(low, high), some.mean(axis=0, dtype=np.float64).astype(np.float32)

    @property
    def dim(self) -> int:
        """Dimensions of the points."""
        return len(self.low)

    @property
    def count(self) -> int:
        """How many cells there are."""
        return self.rows * self.columns

    def slabs(self, group: int) -> list[int]:
        """How many slabs each dimension of a group has."""
        return [len(self.low[i]) for i in self.groups[group]]

    def fit(self, least: Float32[Array, " d"], most: Float32[Array, " d"]) -> None:
        """Bound the outermost slabs, by the least and the largest of the points' values."""
        for i in range(self.dim):
            self.low[i][0], self.high[i][-1] = least[i], most[i]

    def of(self, columns: Float32[Array, "d n"]) -> Int64[Array, " n"]:
        """The cells of points, or those that points beyond the outermost slabs are nearest to.

        Args:
            columns: the points' values, dimension by dimension.
        """
        code = np.zeros(columns.shape[1], np.int64)
        for i in (*self.groups[0], *self.groups[1]):
            edges = self.low[i][1:]
            code *= len(edges) + 1
            if len(edges) > FEW:
                code += np.searchsorted(edges, columns[i], side="right")
            else:
                code += sum((columns[i] >= edge for edge in edges), np.zeros(columns.shape[1], np.uint8))
        return code

    def gaps(self, columns: Float32[Array, "d n"]) -> list[Float32[Array, "_ n"]]:
        """Squared distances of points to the slabs, for each dimension."""
        return [
            np.maximum(np.maximum(low[:, None] - values, values - high[:, None]), 0) ** 2
            for low, high, values in zip(self.low, self.high, columns, strict=True)
        ]


def _edges(values: Float32[Array, " n"], times: Int64[Array, " n"], count: int) -> Float32[Array, " _"]:
    """Where to cut a dimension into so many slabs, of about as many points each and none of them empty.

    Each edge is the least value of its slab. A value that many points share fills a slab, and the others share what is
    left: equal quantiles would be one edge, and at the least value an edge of no points.

    Args:
        values: that the points have, ascending.
        times: how many points have each.
        count: slabs, 1 to n.
    """
    before = np.concatenate([[0.0], np.cumsum(times)])
    edges, start = np.empty(count - 1, np.int64), 0
    for left in range(count, 1, -1):
        wanted = before[start] + (before[-1] - before[start]) / left
        place = int(np.searchsorted(before, wanted))
        place -= int(before[place] - wanted > wanted - before[place - 1])
        start = edges[count - left] = min(max(place, start + 1), len(values) - left + 1)
    return values[edges]


def two_groups(counts: list[int]) -> tuple[list[int], list[int]]:
    """The dimensions that are divided, in two groups of about as many cells: distances to all cells are then sums of
    one entry of each of two short tables."""
    groups: tuple[list[int], list[int]] = ([], [])
    sizes = [1, 1]
    for i in sorted(range(len(counts)), key=lambda i: -counts[i]):
        if counts[i] > 1:
            k = int(sizes[1] < sizes[0])
            groups[k].append(i)
            sizes[k] *= counts[i]
    return groups


def distinct(points: NDArray[np.float32]) -> NDArray[np.int64]:
    """Indices of the points without repetitions, but for two of each: one may be excluded.

    Thousands of equal points, as few-valued factors make them, would all be candidates of the same queries.
    """
    bits = np.ascontiguousarray(points).view(np.uint32).astype(np.uint64)
    odd = np.random.default_rng(0).integers(2**63, size=bits.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    hashed = (bits * odd).sum(axis=1, dtype=np.uint64)
    order = np.argsort(hashed, kind="stable")
    alike = np.flatnonzero(hashed[order[1:]] == hashed[order[:-1]])
    kept = np.ones(len(points), bool)
    # Others of the same hash, should there ever be any, stand between equal ones: then all are kept.
    if (points[order[alike + 1]] == points[order[alike]]).all():
        kept[order[np.flatnonzero(hashed[order[2:]] == hashed[order[:-2]]) + 2]] = False
    return np.flatnonzero(kept)

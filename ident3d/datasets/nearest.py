"""Exact nearest neighbours of many queries at once, in the few dimensions that latents have.

The points are sorted into the cells of a grid. A query looks into its own cell first; the distance found there rules
out every cell that is farther away. What is left, about 4% of 250,000 uniform points in ten dimensions, is compared
cell by cell: all queries that need a cell against all its points, as one product of matrices. So the work per query
is small, and it is done where a processor is fastest. FAISS has no exact index that looks at less than everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.datasets.cells import distinct, two_groups

__all__ = ["Best", "GridIndex"]

Array = NDArray[Any]

CELL = 240
"""Points a cell, about: fewer make more work of choosing cells, more make more of comparing."""

BUFFER = 1_000_000
"""Products held at once: 4 MB, about a processor core's cache."""

MANY = 2_000_000
"""Candidates held at once."""


class GridIndex:
    """Points to be searched.

    Args:
        points: float32 (N, d), finite, N at least 1.
        cell: points a cell, about.
    """

    def __init__(self, points: NDArray[np.float32], cell: int = CELL) -> None:
        samples, kept = len(points), distinct(points)
        points = points[kept]
        n, self.dim = points.shape
        self.slabs = _slabs(points, max(1, n // cell))
        self.groups = two_groups([len(low) for low, _ in self.slabs])
        code = self._cell_of_points(points)
        order = np.argsort(code, kind="stable")
        self.order = kept[order]
        self.cells = self.columns * self.rows
        self.starts = np.searchsorted(code[order], np.arange(self.cells + 1))
        self.place_of = np.full(samples, -1, np.int64)
        self.place_of[self.order] = np.arange(n)
        self._fill(points[order])

    @property
    def rows(self) -> int:
        """Cells along the first group of dimensions."""
        return int(np.prod([len(self.slabs[i][0]) for i in self.groups[0]], dtype=np.int64))

    @property
    def columns(self) -> int:
        """Cells along the second."""
        return int(np.prod([len(self.slabs[i][0]) for i in self.groups[1]], dtype=np.int64))

    def _cell_of_points(self, points: NDArray[np.float32]) -> NDArray[np.int64]:
        code = np.zeros(len(points), np.int64)
        for i in (*self.groups[0], *self.groups[1]):
            low, _ = self.slabs[i]
            code = code * len(low) + np.searchsorted(low[1:], points[:, i], side="right")
        return code

    def _fill(self, ordered: NDArray[np.float32]) -> None:
        """The points cell by cell, each as a column (x, |x|^2, 1).

        So (-2 q, 1, -limit) times it is below 0 where |q - x|^2 - |q|^2 is below the limit: the product of matrices
        compares as well, and what is left is to look for signs.
        """
        self.middle = ordered.mean(axis=0, dtype=np.float64).astype(np.float32)
        self.sorted = ordered
        moved = self.sorted - self.middle
        squares = np.einsum("ij,ij->i", moved, moved)
        self.reach = float(np.sqrt(squares.max()))
        self.blocks = []
        for start, stop in zip(self.starts[:-1], self.starts[1:], strict=True):
            block = np.ones((self.dim + 2, stop - start), np.float32)
            block[:-2], block[-2] = moved[start:stop].T, squares[start:stop]
            self.blocks.append(block)

    def places_of(self, points: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where points stand among the sorted ones; -1 for none."""
        return np.where(points < 0, -1, self.place_of[points])

    def search(
        self, queries: NDArray[np.float32], exclude: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The nearest point of each query; of points equally far, the one of the least index.

        Candidates are found in float32 with a margin for its rounding, and compared in float64.

        Args:
            queries: float32 (n, d).
            exclude: for each query, a point that does not count, or -1.

        Returns:
            Squared distances, float64 (n,), and indices, int64 (n,); inf and -1 where there is no point.
        """
        if not len(queries):
            return np.empty(0), np.empty(0, np.int64)
        return _Search(self, queries, exclude).run()


def _slabs(points: NDArray[np.float32], cells: int) -> list[tuple[Array, Array]]:
    """The lower and upper bounds of each dimension's slabs, which hold about as many points each.

    Dimensions are halved in turn, the one with the widest slabs first, while there are to be more cells.
    """
    spread = points.std(axis=0, dtype=np.float64)
    counts = np.ones(points.shape[1], np.int64)
    while counts.prod() * 1.42 < cells:
        widest = int(np.argmax(spread / counts))
        if spread[widest] == 0:
            break
        counts[widest] *= 2
    slabs = []
    for i, count in enumerate(counts.tolist()):
        ranked = np.sort(points[:, i])
        # Values that repeat can make equal bounds: the slab between them is empty, which does no harm.
        edges = ranked[np.arange(1, count) * len(ranked) // count]
        slabs.append((np.concatenate([ranked[:1], edges]), np.concatenate([edges, ranked[-1:]])))
    return slabs


class Best:
    """The nearest points that a search has found so far.

    Args:
        queries: how many there are.

    Attributes:
        distance: squared, float64 (queries,); inf where none is found.
        found: numbers of the points, int64 (queries,); -1 where none is found.
    """

    def __init__(self, queries: int) -> None:
        self.distance = np.full(queries, np.inf)
        self.found = np.full(queries, -1, np.int64)

    def offer(
        self, queries: NDArray[np.int64], found: NDArray[np.int64], distance: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Keep what is nearer, or as near and of a lesser number.

        Args:
            queries: which each candidate is of, several of one too.
            found: the candidates.
            distance: theirs, squared.

        Returns:
            The queries that have a nearest point now that they did not have, each once, and its squared distance.
        """
        better = np.flatnonzero(distance <= self.distance[queries])
        queries, found, distance = queries[better], found[better], distance[better]
        nearer = (distance < self.distance[queries]) | (found < self.found[queries])
        queries, found, distance = queries[nearer], found[nearer], distance[nearer]
        # The first of each query's candidates, by distance and then by index.
        ranked = np.lexsort((found, distance, queries))
        ranked = ranked[np.diff(queries[ranked], prepend=-1) != 0]
        queries, distance = queries[ranked], distance[ranked]
        self.distance[queries], self.found[queries] = distance, found[ranked]
        return queries, distance


class _Search:
    """One call of `GridIndex.search`. Queries are put in the order of their own cells, so that those which need the
    same cell lie near each other in memory."""

    def __init__(self, index: GridIndex, queries: NDArray[np.float32], exclude: NDArray[np.int64] | None) -> None:
        n = len(queries)
        self.index, self.queries = index, queries
        first, second = (self.table(group) for group in index.groups)
        home = self.home(first, second)
        # NumPy sorts 16-bit numbers in linear time.
        self.rank = np.argsort(home.astype(np.uint16) if index.cells < 2**16 else home, kind="stable")
        self.homes = np.searchsorted(home[self.rank], np.arange(index.cells + 1))
        self.first, self.second = first[:, self.rank], second[:, self.rank]
        self.queries = queries.take(self.rank, axis=0)
        self.exclude = np.full(n, -1, np.int64) if exclude is None else index.places_of(exclude[self.rank])
        moved = self.queries - index.middle
        self.square = np.einsum("ij,ij->i", moved, moved)
        self.factors = np.ones((n, index.dim + 2), np.float32)
        self.factors[:, :-2], self.factors[:, -1] = -2 * moved, -np.inf
        # Bounds the rounding of a float32 product of d + 1 terms, each at most (reach + |q|)^2.
        reach = index.reach + float(np.sqrt(self.square.max(initial=0)))
        self.margin = np.float32((index.dim + 4) * 2.0**-23 * reach**2)
        self.best = Best(n)
        self.products = np.empty(BUFFER, np.float32)
        self.signs = np.zeros(BUFFER + 8, bool)
        self.hits: list[tuple[Array, Array]] = []
        self.gathered = 0

    def table(self, group: list[int]) -> Array:
        """Squared distances of all queries to the slabs of a group of dimensions, (cells of the group, n)."""
        table = np.zeros((1, len(self.queries)), np.float32)
        for i in group:
            low, high = self.index.slabs[i]
            q = self.queries[:, i]
            gap = np.maximum(np.maximum(low[:, None] - q, q - high[:, None]), 0) ** 2
            table = (table[:, None] + gap[None]).reshape(-1, len(q))
        return table

    def home(self, first: Array, second: Array) -> Array:
        """The nearest cell of each query that is not empty."""
        home: Array = first.argmin(0) * len(second) + second.argmin(0)
        sizes = np.diff(self.index.starts)
        for q in np.flatnonzero(sizes[home] == 0):
            gaps = (first[:, q, None] + second[None, :, q]).ravel()
            gaps[sizes == 0] = np.inf
            home[q] = gaps.argmin()
        return home

    def run(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        for cell in np.flatnonzero(np.diff(self.homes)).tolist():
            self.each_part(self.compare_home, cell, np.arange(self.homes[cell], self.homes[cell + 1]))
        self.improve()
        columns = len(self.second)
        for a, far in enumerate(self.first):
            room = self.square - self.factors[:, -1] + self.margin - far
            some = np.flatnonzero(room >= 0)
            room, rest = room[some], self.second[:, some]
            for b in range(columns):
                near = np.flatnonzero(rest[b] <= room)
                if len(near):
                    self.each_part(self.compare, a * columns + b, some[near])
            self.improve()
        back = np.empty_like(self.rank)
        back[self.rank] = np.arange(len(back))
        return self.best.distance[back], self.best.found[back]

    def each_part(self, compare: Callable[[int, Array, Array], None], cell: int, chosen: Array) -> None:
        """Compare some queries with all points of a cell, as many at a time as the buffer holds."""
        size = self.index.blocks[cell].shape[1]
        if size > len(self.products):
            self.products, self.signs = np.empty(size, np.float32), np.zeros(size + 8, bool)
        step = len(self.products) // size if size else 0
        for start in range(0, len(chosen) if size else 0, max(1, step)):
            part = chosen[start : start + step]
            compare(cell, part, self.products[: len(part) * size].reshape(len(part), size))
            if self.gathered > MANY:
                self.improve()

    def gather(self, queries: Array, places: Array) -> None:
        """Keep candidates until there are enough to go through at once."""
        self.hits.append((queries, places))
        self.gathered += len(queries)

    def compare_home(self, cell: int, chosen: Array, product: Array) -> None:
        """Queries that have seen no point yet: the nearest of the cell, or one within the margin of it, bounds the
        distance. The cell is looked at again with all others."""
        np.dot(self.factors[chosen, :-1], self.index.blocks[cell][:-1], out=product)
        start = self.index.starts[cell]
        exclude = self.exclude[chosen] - start
        own = np.flatnonzero((exclude >= 0) & (exclude < product.shape[1]))
        product[own, exclude[own]] = np.inf
        self.gather(chosen, start + product.argmin(axis=1))

    def compare(self, cell: int, chosen: Array, product: Array) -> None:
        """Queries that may have a nearer point in the cell."""
        np.dot(self.factors.take(chosen, axis=0), self.index.blocks[cell], out=product)
        signs = self.signs[: -(-product.size // 8) * 8]
        signs[product.size :] = False
        np.less_equal(product.ravel(), 0, out=signs[: product.size])
        # Eight at a time: hardly any is set.
        words = np.flatnonzero(signs.view(np.uint64) != 0)
        if len(words):
            hits = (8 * words[:, None] + np.arange(8))[signs.reshape(-1, 8)[words]]
            rows = hits // product.shape[1]
            self.gather(chosen[rows], self.index.starts[cell] + hits - rows * product.shape[1])

    def improve(self) -> None:
        """Go through the candidates that gathered, and keep what is nearer than what was found before."""
        if not self.hits:
            return
        queries, places = (np.concatenate(part) for part in zip(*self.hits, strict=True))
        self.hits.clear()
        self.gathered = 0
        allowed = np.flatnonzero(places != self.exclude[queries])
        queries, places = queries[allowed], places[allowed]
        gaps = self.queries.take(queries, axis=0).astype(np.float64)
        gaps -= self.index.sorted.take(places, axis=0)
        distance = np.einsum("ij,ij->i", gaps, gaps)
        changed, least = self.best.offer(queries, self.index.order[places], distance)
        # Rounded up, so that no point at the same distance is lost.
        self.factors[changed, -1] = self.square[changed] - least - 2 * self.margin

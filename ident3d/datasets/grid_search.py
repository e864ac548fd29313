"""The nearest of points in a file, for many queries at once, in threads.

As in `ident3d.datasets.nearest`, a query looks into its own cell first, and the distance found there rules out every
cell that is farther away; what is left is compared cell by cell. Points lie in the file as rows (x, |x - m|^2, 1), m
in their middle, so that a cell's rows are a factor of a product of matrices as they are: (-2 (q - m), 1, -limit) times
a row is at most 0 where |q - x|^2 is at most the best distance so far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ident3d.datasets.cells import Cells
from ident3d.datasets.nearest import MANY, Best
from ident3d.workers import cores

__all__ = ["Grid", "Search"]

Array = NDArray[Any]

PART = 2**16
"""Points of a cell that are compared at once, at most."""

PRODUCTS = 2**19
"""Products held at once, about: 2 MB."""

MANY_QUERIES = 1024
"""Queries that are compared at once, at most."""

BLAS_ALONE = 2**18
"""Multiplications in a product of matrices up to which OpenBLAS starts no threads of its own, which would contend."""

TABLE = 2**22
"""Distances of queries to cells that are held at once."""


@runtime_checkable
class Grid(Protocol):
    """Points in the order of their cells: see `grid_files.GridFile`."""

    cells: Cells
    starts: Array
    middle: Array
    reach: float
    norm: float
    points: Array
    order: Array

    def expect(self, start: int, stop: int) -> None:
        """Points of these places are needed soon."""


class Search:
    """One search. Queries are put in the order of their own cells, so that those which need the same cell lie near
    each other in memory.

    Args:
        grid: the points.
        queries: float32 (n, d).
        exclude: for each query, the number of a point that does not count, or -1.
    """

    def __init__(self, grid: Grid, queries: NDArray[np.float32], exclude: NDArray[np.int64] | None) -> None:
        n = len(queries)
        self.grid, self.cells, self.starts = grid, grid.cells, grid.starts
        home = self._home(queries)
        self.rank = np.argsort(home.astype(np.min_scalar_type(self.cells.count)), kind="stable")
        self.home = home[self.rank]
        self.queries = queries.take(self.rank, axis=0)
        self.exclude = np.full(n, -1, np.int64) if exclude is None else exclude[self.rank]
        self.gaps = self.cells.gaps(np.ascontiguousarray(self.queries.T))
        moved = self.queries - grid.middle
        # |q - x|^2 = |q - m|^2 + 2 (q - m).m - 2 (q - m).x + |x - m|^2
        self.shift = np.einsum("ij,ij->i", moved, moved + 2 * grid.middle, dtype=np.float64)
        self.factors = np.ones((n, self.cells.dim + 2), np.float32)
        self.factors[:, :-2], self.factors[:, -1] = -2 * moved, 0
        # Bounds the rounding of a float32 product of d + 2 terms: of the sum of their sizes.
        far = float(np.sqrt(np.einsum("ij,ij->i", moved, moved).max()))
        norm = grid.norm + float(np.linalg.norm(grid.middle))
        size = far**2 + 2 * far * norm + grid.reach**2 + (far + grid.reach) ** 2
        self.margin = (self.cells.dim + 4) * 2.0**-23 * size
        self.room = np.full(n, np.inf, np.float32)
        self.best = Best(n)
        self.lock = threading.Lock()

    def _home(self, queries: Array) -> Array:
        """Each query's own cell, or the nearest one with two points or more: one may be excluded."""
        home = self.cells.of(np.ascontiguousarray(queries.T))
        sizes = np.diff(self.starts)
        poor = sizes < min(2, sizes.max())
        lost, first, which = np.unique(home[poor[home]], return_index=True, return_inverse=True)
        if len(lost):
            # Queries of one cell are near each other: the first speaks for all.
            some = np.flatnonzero(poor[home])
            gaps = self.cells.gaps(np.ascontiguousarray(queries[some[first]].T))
            for k in range(len(lost)):
                tables = [self._table(group, gaps, slice(k, k + 1)) for group in (0, 1)]
                distance = (tables[0] + tables[1].T).ravel()
                distance[poor] = np.inf
                lost[k] = distance.argmin()
            home[some] = lost[which.reshape(-1)]
        return home

    def _table(self, group: int, gaps: list[Array], some: Array | slice) -> Array:
        """Squared distances of some queries to the slabs of a group of dimensions, (cells of the group, queries)."""
        table = np.zeros_like(gaps[0][:1, some])
        for i in self.cells.groups[group]:
            table = (table[:, None] + gaps[i][:, some][None]).reshape(-1, table.shape[1])
        return table

    def run(self, threads: int | None = None) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Squared distances and numbers of the nearest points, in the order of the queries.

        They do not depend on the threads: these share what they find only to rule out more.
        """
        threads = max(1, min(threads or cores(), self.cells.rows))
        self._share(self._first_row, threads)
        self.factors[self.best.found < 0, -1] = -np.inf  # the excluded point was alone there: any point may be it
        self._share(self._row, threads)
        back = np.empty_like(self.rank)
        back[self.rank] = np.arange(len(back))
        return self.best.distance[back], self.best.found[back]

    def _share(self, work: Callable[[int, _Candidates], None], threads: int) -> None:
        """Go through the rows of cells, in the order that they lie in the file."""
        rows = iter(range(self.cells.rows))

        def go() -> None:
            candidates = _Candidates(self)
            for row in rows:
                work(row, candidates)
                candidates.improve()

        if threads == 1:
            go()
            return
        with ThreadPoolExecutor(threads) as pool:
            try:
                for future in [pool.submit(go) for _ in range(threads)]:
                    future.result()
            finally:
                for _ in rows:  # after an error or Ctrl-C there is nothing left to do for the others
                    pass

    def _first_row(self, row: int, candidates: _Candidates) -> None:
        """Queries that have seen no point yet: the nearest of their own cell bounds the distance."""
        first = row * self.cells.columns
        edges = np.searchsorted(self.home, np.arange(first, first + self.cells.columns + 1))
        self._columns(row, edges, np.arange(edges[0], edges[-1]), candidates.nearest)

    def _row(self, row: int, candidates: _Candidates) -> None:
        """Queries that may have a nearer point in cells of a row."""
        room = self.room.copy()
        slabs = np.unravel_index(row, self.cells.slabs(0)) if self.cells.groups[0] else ()
        for i, slab in zip(self.cells.groups[0], slabs, strict=True):
            room -= self.gaps[i][slab]
        near = np.flatnonzero(room >= 0)
        step = max(1, TABLE // self.cells.columns)
        for start in range(0, len(near), step):
            some = near[start : start + step]
            hits = np.flatnonzero(self._table(1, self.gaps, some) <= room[some])
            edges = np.searchsorted(hits, len(some) * np.arange(self.cells.columns + 1))
            self._columns(row, edges, some[hits % len(some)], candidates.within)

    def _columns(self, row: int, edges: Array, chosen: Array, compare: Callable[[Array, int, int], None]) -> None:
        """Compare the cells of a row each with its queries: `chosen` between the `edges` of its column."""
        needed = np.flatnonzero(np.diff(edges))
        first = row * self.cells.columns
        if 2 * len(needed) > self.cells.columns:
            self.grid.expect(int(self.starts[first]), int(self.starts[first + self.cells.columns]))
        edges = edges - edges[0]
        for column in needed.tolist():
            queries = chosen[edges[column] : edges[column + 1]]
            begin, end = int(self.starts[first + column]), int(self.starts[first + column + 1])
            for start in range(begin, end, PART):
                stop = min(end, start + PART)
                step = max(1, min(MANY_QUERIES, PRODUCTS // (stop - start)))
                for k in range(0, len(queries), step):
                    compare(queries[k : k + step], start, stop)

    def improve(self, queries: Array, places: Array) -> None:
        """Go through candidates, in float64, and keep what is nearer than what was found before."""
        found = self.grid.order[places].astype(np.int64)
        allowed = np.flatnonzero(found != self.exclude[queries])
        queries, found = queries[allowed], found[allowed]
        gaps = self.queries.take(queries, axis=0).astype(np.float64)
        gaps -= self.grid.points.take(places[allowed], axis=0)[:, :-2]
        distance = np.einsum("ij,ij->i", gaps, gaps)
        with self.lock:
            changed, least = self.best.offer(queries, found, distance)
            # Rounded up, so that no point at the same distance is lost.
            self.factors[changed, -1] = self.shift[changed] - least - 2 * self.margin
            self.room[changed] = least + 3 * self.margin


class _Candidates:
    """What one thread has found and not yet gone through."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.hits: list[tuple[Array, Array]] = []
        self.gathered = 0
        self.products = np.empty(PRODUCTS + PART, np.float32)
        self.signs = np.empty(PRODUCTS + PART, bool)

    def _product(self, queries: Array, start: int, stop: int) -> tuple[Array, int]:
        """The queries' factors times the points of some places, (runs, queries, points of a run), in a buffer.

        Returns:
            The product, and the place of its first point.
        """
        points, count, width = self.search.grid.points, stop - start, self.search.factors.shape[1]
        runs = -(-count // max(1, BLAS_ALONE // (len(queries) * width)))
        run = -(-count // runs)
        # The last run may reach into the next cell, or at the file's end the first into the one before: no harm.
        if runs * run > len(points):
            runs, run = 1, count
        start = min(start, len(points) - runs * run)
        factor = points[start : start + runs * run].reshape(runs, run, width).transpose(0, 2, 1)
        size = runs * len(queries) * run
        if size > len(self.products):
            self.products, self.signs = np.empty(size, np.float32), np.empty(size, bool)
        product = self.products[:size].reshape(runs, len(queries), run)
        np.matmul(self.search.factors.take(queries, axis=0), factor, out=product)
        return product, start

    def nearest(self, queries: Array, start: int, stop: int) -> None:
        """The nearest point of each run, or one within the margin of it."""
        product, start = self._product(queries, start, stop)
        runs = start + product.shape[2] * np.arange(len(product))[:, None]
        least = product.argmin(axis=2)
        number = self.search.grid.order[runs + least]
        run, query = np.nonzero(number == self.search.exclude[queries])
        if len(run):
            product[run, query, least[run, query]] = np.inf
            least[run, query] = product[run, query].argmin(axis=1)
        self.gather(np.tile(queries, len(product)), (runs + least).ravel())

    def within(self, queries: Array, start: int, stop: int) -> None:
        """All points that are as near as the best so far."""
        product, start = self._product(queries, start, stop)
        hits = np.flatnonzero(np.less_equal(product.ravel(), 0, out=self.signs[: product.size]))
        if len(hits):
            above, point = np.divmod(hits, product.shape[2])
            run, query = np.divmod(above, product.shape[1])
            self.gather(queries[query], start + run * product.shape[2] + point)

    def gather(self, queries: Array, places: Array) -> None:
        """Keep candidates until there are enough to go through at once."""
        self.hits.append((queries, places))
        self.gathered += len(queries)
        if self.gathered > MANY:
            self.improve()

    def improve(self) -> None:
        """Go through what gathered."""
        if self.hits:
            queries, places = (np.concatenate(part) for part in zip(*self.hits, strict=True))
            self.hits.clear()
            self.gathered = 0
            self.search.improve(queries, places)

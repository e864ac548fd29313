"""From a drawn z~ to the nearest stored sample: exactly, or by an approximate index of FAISS.

`exact` is `ident3d.datasets.nearest`, made for this: at 250,000 samples it is faster than either approximate index and
ready in a tenth of a second, so it needs no cache. From two millions on it is `ident3d.datasets.grid_files`: built
once, and searched where it lies, in a mapped file. `hnsw` is a graph of small worlds. `ivf` is the inverted file over
an HNSW quantiser that Zimmermann et al. 2021 match with. Both are built in one thread, since a graph that several
threads build differs from run to run, and so would the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from ident3d.conditionals import columns_of
from ident3d.datasets.index_cache import IndexCache
from ident3d.datasets.nearest import GridIndex
from ident3d.datasets.serving import Array
from ident3d.errors import SpecError
from ident3d.factors import Factors
from ident3d.spaces import per_dimension

__all__ = ["MATCHES", "Metric", "Nearest", "make_index"]

MATCHES = ("exact", "hnsw", "ivf")
LEAST_WEIGHT = 1e-9

ON_DISK = 2_000_000
"""Samples from which on the exact index is kept in a file where there is a folder for it; it is then the faster."""

DEFAULTS = {
    "exact": {},
    "hnsw": {"neighbours": 16, "ef_construction": 40, "ef_search": 64},
    "ivf": {"lists": 0, "probes": 64, "neighbours": 32},
}
"""The options of each index; `lists` 0 stands for 4 sqrt(N), as FAISS advises."""

Nearest = Callable[[Float32[Array, "n d"], Int64[Array, " n"] | None], tuple[Float64[Array, " n"], Int64[Array, " n"]]]
"""Squared distance and index of each query's nearest sample, but for the one that is excluded."""


@dataclass(frozen=True)
class Metric:
    """The distance that pairs are matched by: sum over the chosen columns of weight (z~_i - z_i)^2.

    Attributes:
        columns: of the latents.
        weights: one a column, above 0.
    """

    columns: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(
        cls,
        dim: int,
        table: Factors | None,
        factors: Sequence[str | int] | None,
        weights: Mapping[str | int, float] | Sequence[float] | None,
    ) -> Metric:
        """From what a user names.

        Args:
            dim: how many columns the latents have.
            table: their names, if they have any.
            factors: names or numbers of the columns that count; all by default.
            weights: by name or number, 1 for those not named; or a sequence, one for each of `factors`.

        Raises:
            SpecError: no factor, an unknown one, one named twice; a weight that is not above 0, or for a factor that
                does not count.
        """
        columns = tuple(range(dim)) if factors is None else columns_of(factors, table)
        if not columns:
            raise SpecError("factors is empty; expected the factors that the distance is over")
        if any(isinstance(c, bool) or not 0 <= c < dim for c in columns) or len(set(columns)) < len(columns):
            raise SpecError(f"factors={list(columns)!r}: expected different numbers from 0 to {dim - 1}")
        if isinstance(weights, Mapping):
            named = dict(zip(columns_of(tuple(weights), table, "weights"), weights.values(), strict=True))
            for column in named:
                if column not in columns:
                    raise SpecError(f"weights={dict(weights)!r}: column {column} is not among the factors that count")
            weights = [named.get(c, 1.0) for c in columns]
        values = per_dimension("weights", 1.0 if weights is None else weights, len(columns))
        if not all(LEAST_WEIGHT <= w <= 1 / LEAST_WEIGHT for w in values):
            raise SpecError(f"weights={list(values)!r}: expected 1e-9 to 1e9; to ignore a factor, leave it out")
        return cls(columns, values)

    def coordinates(self, latents: Float32[Array, "n dim"]) -> Float32[Array, "n d"]:
        """The columns that count, scaled so that the metric is the plain distance between rows: at no cost where these
        are all columns as they are."""
        if self.columns == tuple(range(latents.shape[1])) and set(self.weights) == {1.0}:
            return np.ascontiguousarray(latents, np.float32)
        return np.ascontiguousarray(latents[:, self.columns] * np.sqrt(np.array(self.weights)), np.float32)


def _load_faiss() -> Any:
    try:
        return import_module("faiss")
    except ImportError as error:
        raise SpecError(
            f"match='hnsw' and 'ivf' need FAISS ({error}): pip install 'ident3d[faiss]', or use match='exact'"
        ) from None


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def check_match(match: str, options: Mapping[str, int] | None) -> dict[str, int]:
    """The options of an index, complete.

    Raises:
        SpecError: an unknown index or option, or a value that is not a whole number of at least 1; FAISS is absent.
    """
    if match not in MATCHES:
        raise SpecError(f"match={match!r}: expected one of {', '.join(MATCHES)}")
    known: dict[str, int] = dict(DEFAULTS[match])
    for name, value in (options or {}).items():
        if name not in known:
            raise SpecError(f"match_options: {match!r} has no {name!r}; it has {', '.join(known) or 'none'}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"match_options: {name} = {value!r}, expected a whole number of at least 1")
        known[name] = value
    if match != "exact":
        _load_faiss()
    return known


def make_index(
    latents: Float32[Array, "samples dim"],
    metric: Metric,
    match: str,
    options: Mapping[str, int] | None = None,
    cache: IndexCache | None = None,
) -> Nearest:
    """An index over stored latents, built or read from the cache.

    Args:
        latents: of all samples.
        metric: what is near.
        match: one of MATCHES.
        options: of that index: see DEFAULTS.
        cache: where FAISS indices are kept, and grids over `ON_DISK` samples and more.

    Raises:
        SpecError: an unknown index or option; FAISS is absent.
        DatasetError: a grid over too many samples for memory cannot be kept in the cache.
    """
    complete = check_match(match, options)
    settings = {"columns": metric.columns, "weights": metric.weights}
    if match == "exact":
        grid = None
        if cache is not None and len(latents) >= ON_DISK:
            grid = cache.grid(settings, lambda chosen: metric.coordinates(latents[chosen]), len(latents))
        return GridIndex(metric.coordinates(latents)).search if grid is None else grid.search
    points = metric.coordinates(latents)
    faiss = _load_faiss()
    make = _make_hnsw if match == "hnsw" else _make_ivf

    def build() -> Any:
        with _one_thread(faiss):
            return make(faiss, points, complete)

    index = build() if cache is None else cache.get(match, {"options": complete, **settings}, build)
    # Where FAISS reads them: an attribute of another name on the index would be taken without effect.
    if match == "hnsw":
        index.hnsw.efSearch = complete["ef_search"]
    else:
        index.nprobe = complete["probes"]
        faiss.downcast_index(index.quantizer).hnsw.efSearch = 2 * complete["probes"]
    return _FaissSearch(index, points)


def _make_hnsw(faiss: Any, points: Array, options: dict[str, int]) -> Any:
    index = faiss.IndexHNSWFlat(points.shape[1], options["neighbours"])
    index.hnsw.efConstruction = options["ef_construction"]
    index.add(points)
    return index


def _make_ivf(faiss: Any, points: Array, options: dict[str, int]) -> Any:
    n, dim = points.shape
    # FAISS asks for 39 points a list to place its centre.
    lists = max(1, min(options["lists"] or int(4 * math.sqrt(n)), n // 39))
    quantiser = faiss.IndexHNSWFlat(dim, options["neighbours"])
    index = faiss.IndexIVFFlat(quantiser, dim, lists)
    index.own_fields = True
    # As good for search as FAISS's 25 rounds over all points, at a third of the time.
    index.cp.niter, index.cp.max_points_per_centroid = 10, 64
    quantiser.this.disown()
    index.train(points)
    index.add(points)
    return index


class _FaissSearch:
    def __init__(self, index: Any, points: Array) -> None:
        self.index, self.points = index, points
        self.exact: GridIndex | None = None

    def __call__(self, queries: Array, exclude: Array | None = None) -> tuple[Array, Array]:
        k = 1 if exclude is None else 2
        distance, found = self.index.search(queries, k)
        first = np.zeros(len(queries), np.intp) if exclude is None else (found[:, 0] == exclude).astype(np.intp)
        rows = np.arange(len(queries))
        best, place = distance[rows, first].astype(np.float64), found[rows, first].astype(np.int64)
        lost = np.flatnonzero(place < 0)
        if len(lost):  # the graph's search ended before it met another sample
            self.exact = self.exact or GridIndex(self.points)
            best[lost], place[lost] = self.exact.search(queries[lost], None if exclude is None else exclude[lost])
        return best, place

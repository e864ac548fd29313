"""Positive pairs: which stored samples form them.

The positive of an anchor z is a z~ drawn from a conditional. Where only stored samples can be served, z~ is replaced by
the nearest of them, as in Zimmermann et al. 2021 (appendix A.4); how much that changes, `ident3d.pair_report` tells.
Datasets rendered with `--pairs` hold each z~ itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from ident3d.conditionals import conditional as parse_conditional
from ident3d.datasets.batches import BatchStream, generator_of
from ident3d.datasets.groups import GroupedNearest, groups_of
from ident3d.datasets.index_cache import MANY_SAMPLES, IndexCache
from ident3d.datasets.matching import Metric, Nearest, check_match, make_index
from ident3d.datasets.serving import Array
from ident3d.distributions import Distribution
from ident3d.errors import SpecError
from ident3d.factors import Factors
from ident3d.spaces import Box, Real, Space

__all__ = ["QUERIES", "Matches", "PairSampler", "RenderedPairs", "latents_of", "table_of"]

QUERIES = 65_536
"""Pairs matched at once: enough for the exact index to be at its fastest, and half a second's work."""

MANY_QUERIES = 262_144
"""Pairs matched at once of `MANY_SAMPLES` and more: each of their grid's cells then serves more queries."""

PIECE = 2**17
"""Latents that are checked at once."""

FOLD = 64
"""Rows of latents that are taken as one where extremes are sought."""


def latents_of(data: Any) -> Float32[Array, "samples dim"]:
    """The latents of a dataset, or an array of them, as float32 on the CPU: mapped ones stay mapped.

    Raises:
        SpecError: neither, or not an array (N, d) of numbers with N at least 2.
    """
    found = getattr(data, "latents", data)
    if isinstance(found, Tensor):
        found = found.detach().cpu().float().numpy()
    if not isinstance(found, np.ndarray):
        raise SpecError(f"{type(data).__name__}: expected a dataset with .latents, or an array (N, d)")
    if found.ndim != 2 or found.dtype.kind not in "fiu" or not found.shape[1]:
        raise SpecError(f"latents are {found.dtype} {found.shape}: expected numbers (N, d)")
    if len(found) < 2:
        raise SpecError(f"{len(found)} sample{'s'[: len(found) != 1]}: pairs need at least 2")
    return np.ascontiguousarray(found, np.float32)  # a plain array: indexing a memmap costs microseconds a read


def law_of(data: Any, latents: Float32[Array, "samples dim"], law: str | Distribution) -> Distribution:
    """The conditional over a dataset's latents.

    A dataset's latents lie in the unit cube. An array's lie in the space of the law, or for a text in the unit cube.

    Raises:
        SpecError: an unknown conditional; latents that are NaN or outside the space.
    """
    table = table_of(data)
    space: Space = Box(latents.shape[1])
    if table is None and isinstance(law, Distribution):
        space = law.space
    made = parse_conditional(law, space, table)
    _check(made, latents)
    return made


def _check(law: Distribution, latents: Float32[Array, "samples dim"]) -> None:
    """Refuse latents outside the space, a piece at a time.

    Raises:
        SpecError: NaN, outside the space, or of another dimension.
    """
    for start in range(0, len(latents), PIECE):
        piece = latents[start : start + PIECE]
        if start and isinstance(law.space, (Box, Real)):
            # Where the least and the largest values are inside, all are; ten times as fast as row by row.
            least, most = _extremes(piece)
            if bool(law.space.contains(torch.from_numpy(np.stack([least, most]))).all()):
                continue
        try:
            law.check(torch.from_numpy(np.array(piece)))  # torch shares no memory that is read-only
        except SpecError as error:
            raise SpecError(f"{error}, counted from row {start:,}" if start else str(error)) from None


def _extremes(piece: Float32[Array, "n dim"]) -> tuple[Float32[Array, " dim"], Float32[Array, " dim"]]:
    """The least and the largest value of each column; NaN where there is one."""
    rest, dim = len(piece) % FOLD, piece.shape[1]
    # Rows side by side: NumPy goes along short rows slowly.
    folded = piece[rest:].reshape(-1, FOLD * dim)

    def of(extreme: Any) -> Any:
        parts = [extreme(folded, axis=0).reshape(FOLD, dim)] if len(folded) else []
        return extreme(np.concatenate([piece[:rest], *parts]), axis=0)

    with np.errstate(invalid="ignore"):
        return of(np.min), of(np.max)


def table_of(data: Any) -> Factors | None:
    """The names of a dataset's latents, where it has any."""
    table = getattr(data, "factors", None)
    return table if isinstance(table, Factors) else None


def held_columns(data: Any) -> list[int]:
    """The columns of factors that the scene holds: z~ has them from z."""
    return [column for column, factor in enumerate(table_of(data) or ()) if factor.frozen is not None]


def draw_around(
    z: Float[Tensor, "n dim"], law: Distribution, held: Sequence[int], generator: torch.Generator
) -> Float[Tensor, "n dim"]:
    """One z~ for each z from a conditional, but for the columns that are held."""
    wanted = law.around(z, generator=generator, check=False)
    wanted[:, held] = z[:, held]
    return wanted


def default_cache(data: Any) -> Path | None:
    """Beside the dataset, for one behind a URL in the cache folder; nowhere for an array."""
    root = getattr(data, "derived", getattr(data, "root", None))
    return Path(root) / ".pairs" if root is not None else None


@dataclass(frozen=True)
class Matches:
    """Anchors, the z~ drawn for them, and the stored samples that stand for these.

    Attributes:
        anchors: int64 (n,).
        wanted: the z~ as drawn, float32 (n, d).
        positives: int64 (n,).
        distance: between z~ and its positive, in the metric of the match, float64 (n,).
    """

    anchors: Array
    wanted: Array
    positives: Array
    distance: Array


class PairSampler(BatchStream):
    """Batches of (anchor, positive) index pairs: a `batch_sampler` over any dataset with latents.

    Anchors are drawn uniformly from the stored samples, with replacement. For a whole block of batches at once, z~ is
    drawn from the conditional around each anchor's latent and matched to the nearest stored sample. Batch k of a seed
    is always the same: across restarts, ranks, workers, and whatever was asked for before.

    Args:
        data: a dataset with `.latents`, or the array (N, d) itself.
        conditional: p(z~ | z), as a text such as `normal(scale=0.05)` (see `ident3d.conditional`) or as a distribution.
            Scales are in the latents' units: for datasets of ident3d, those of the unit cube.
        batch_size: pairs a batch.
        seed: what the batches are drawn from.
        match: `exact`, or by FAISS `hnsw` or `ivf`.
        factors: names, or for an array numbers, of the factors that the distance is over; all by default.
        weights: of the squared differences, by name or number (1 for the others) or one for each of `factors`.
        allow_self: whether the anchor may be its own positive.
        within: categorical factors that z~ shares with z, such as `["class"]`: by default all that the dataset has,
            with `()` none.
        batches: batches a rank and epoch; by default as many as there are samples for.
        rank: of this process; from torch.distributed where that is initialised.
        world_size: how many processes there are.
        cache: where FAISS indices are kept, and the exact index of 2 million samples or more, which is then searched
            where it lies: 52 bytes a sample in ten dimensions, or 212 in every process where it cannot be kept.
            Beside the dataset by default, nowhere for an array.
        match_options: `neighbours`, `ef_construction`, `ef_search` for hnsw; `lists`, `probes`, `neighbours` for ivf.

    Raises:
        SpecError: an unknown conditional, parameter, factor or match; latents with NaN or outside the space; fewer than
            two samples, in all or in a group; FAISS is asked for and absent.
        DatasetError: when batches are asked for: the exact index of 25 million samples or more cannot be kept.

    Example:
        >>> latents = torch.rand(1000, 10, generator=torch.Generator().manual_seed(0))
        >>> sampler = PairSampler(latents, "normal(scale=0.05)", batch_size=4, seed=0)
        >>> len(sampler), len(sampler.batch(0)), sampler.batch(7) == sampler.batch(7)
        (250, 4, True)
    """

    def __init__(
        self,
        data: Any,
        conditional: str | Distribution,
        *,
        batch_size: int,
        seed: int = 0,
        match: str = "exact",
        factors: Sequence[str | int] | None = None,
        weights: Mapping[str | int, float] | Sequence[float] | None = None,
        allow_self: bool = False,
        within: Sequence[str] | None = None,
        batches: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        cache: str | Path | None = None,
        match_options: Mapping[str, int] | None = None,
    ) -> None:
        check_match(match, match_options)
        self.latents = latents_of(data)
        self.law = law_of(data, self.latents, conditional)
        self.metric = Metric.of(self.latents.shape[1], table_of(data), factors, weights)
        self.match, self.match_options, self.allow_self = match, match_options, allow_self
        self.groups = groups_of(data, within)
        if self.groups is not None and not allow_self:
            self.groups.check()
        # The manifest's checksum is of the file: latents that are a copy of it may have been written into.
        entry = None if self.latents.flags.writeable else getattr(data, "entry", None)
        self._known = getattr(entry, "latents_sha256", None)
        self._cache = Path(cache) if cache is not None else default_cache(data)
        self._held = held_columns(data)
        split, table = getattr(data, "split", None), table_of(data)
        self._label = split if isinstance(split, str) else "array"
        self._names = None if table is None else table.names
        self._nearest: Nearest | None = None
        self._grouped: GroupedNearest | None = None
        self._block: tuple[int, list[list[tuple[int, int]]]] = (-1, [])
        self._block_rank = -1
        plain = self.metric == Metric.of(self.latents.shape[1], None, None, None)
        special = ("" if plain else f" by {self.metric}") + (", itself allowed" if allow_self else "")
        special += f" within {', '.join(self.groups.names)}" if self.groups else ""
        self.kind = f"{self.law.text}, {match} of {len(self.latents)} samples{special}"
        super().__init__(
            len(self.latents), batch_size=batch_size, seed=seed, batches=batches, rank=rank, world_size=world_size
        )

    def nearest(self) -> Nearest:
        """The index, built or read when it is first needed."""
        if self._nearest is None:
            self._nearest = self._index(self._label, self.latents, self._known)
        return self._nearest

    def _index(self, label: str, latents: Float32[Array, "samples dim"], known: str | None = None) -> Nearest:
        cache = None if self._cache is None else IndexCache(self._cache, label, latents, self._names, known)
        return make_index(latents, self.metric, self.match, self.match_options, cache)

    def find(
        self, wanted: Float32[Array, "n dim"], anchors: Int64[Array, " n"]
    ) -> tuple[Float64[Array, " n"], Int64[Array, " n"]]:
        """Squared distance and number of the stored sample that is nearest to each z~, among those allowed.

        Args:
            wanted: the z~.
            anchors: the samples that they were drawn around.
        """
        queries = self.metric.coordinates(wanted)
        if self.groups is None:
            return self.nearest()(queries, None if self.allow_self else anchors)
        groups = self.groups
        if self._grouped is None:
            self._grouped = GroupedNearest(
                self.groups, lambda group, rows: self._index(f"{self._label}-{groups.label(group)}", self.latents[rows])
            )
        return self._grouped(queries, anchors, allow_self=self.allow_self)

    def draw(self, number: int) -> tuple[Int64[Tensor, " batch"], Float[Tensor, "batch dim"]]:
        """The anchors of a batch and a z~ for each, before any matching."""
        generator = generator_of("pairs", self.seed, number)
        anchors = torch.randint(len(self.latents), (self.batch_size,), generator=generator)
        z = torch.from_numpy(self.latents[anchors.numpy()])
        return anchors, draw_around(z, self.law, self._held, generator)

    def match_batches(self, numbers: Sequence[int]) -> Matches:
        """Several batches, one after the other, in one search.

        Args:
            numbers: of the batches.
        """
        drawn = [self.draw(number) for number in numbers]
        anchors = torch.cat([a for a, _ in drawn]).numpy()
        wanted = torch.cat([w for _, w in drawn]).numpy()
        square, positives = self.find(wanted, anchors)
        return Matches(anchors, wanted, positives, np.sqrt(square))

    def batch(self, number: int) -> list[tuple[int, int]]:
        """Batch `number`: `batch_size` pairs (anchor, positive)."""
        first, block = self._block
        step, rank = divmod(number, self.world_size)
        if not first <= step < first + len(block) or rank != self._block_rank:
            # One that is asked for out of order comes alone; what follows it is expected to be asked for as well.
            in_order = step == first + len(block) and rank == self._block_rank
            left = self.batches - step % self.batches
            at_once = QUERIES if len(self.latents) < MANY_SAMPLES else MANY_QUERIES
            count = min(left, max(1, at_once // self.batch_size)) if in_order else 1
            matches = self.match_batches([(step + i) * self.world_size + rank for i in range(count)])
            pairs = list(zip(matches.anchors.tolist(), matches.positives.tolist(), strict=True))
            size = self.batch_size
            first, block = step, [pairs[i : i + size] for i in range(0, len(pairs), size)]
            self._block, self._block_rank = (first, block), rank
        return block[step - first]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_nearest": None, "_grouped": None, "_block": (-1, [])}


class RenderedPairs(BatchStream):
    """Batches of pairs (i, i): sample i with its own z~, rendered; i uniform over the samples.

    Args:
        samples: how many there are.
        series: batch_size, seed, batches, rank, world_size, as for `PairSampler`.
    """

    kind = "rendered"

    def batch(self, number: int) -> list[tuple[int, int]]:
        """Batch `number`: `batch_size` pairs (i, i)."""
        generator = generator_of("rendered pairs", self.seed, number)
        drawn = torch.randint(self.samples, (self.batch_size,), generator=generator).tolist()
        return [(i, i) for i in drawn]

"""What a user really gets for the conditional that was asked for: requested against realised positive pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.spatial.distance import cdist  # type: ignore[import-untyped]
from scipy.stats import ks_2samp, wasserstein_distance  # type: ignore[import-untyped]

from ident3d.checks import whole
from ident3d.datasets.batches import generator_of
from ident3d.datasets.matching import Metric
from ident3d.datasets.pairs import Matches, PairSampler, draw_around, held_columns, latents_of, law_of, table_of
from ident3d.datasets.serving import Array
from ident3d.distributions import Distribution
from ident3d.errors import SpecError

__all__ = [
    "FactorReport",
    "Histogram",
    "PairReport",
    "Spread",
    "Usage",
    "pair_report",
]

BATCH = 1024
BINS = 60
MOST_PAIRS = 10_000_000
RECALL_QUERIES = 1000
FIDELITIES = (1.0, 0.5, 0.1)
DOMINATES = 0.5
"""Matching dominates where it moves z~ by more than this share of the step that was asked for."""


@dataclass(frozen=True)
class Histogram:
    """Densities over equal bins.

    Attributes:
        edges: of the bins, one more than there are bins.
        requested: density of what was asked for.
        realised: density of what was served.
    """

    edges: tuple[float, ...]
    requested: tuple[float, ...]
    realised: tuple[float, ...]


@dataclass(frozen=True)
class FactorReport:
    """One factor of z~ - z, in the latents' units.

    Attributes:
        name: the factor's name, or its column's number.
        requested_std: standard deviation of the step that was asked for.
        realised_std: of the step that was served.
        wasserstein: the Wasserstein-1 distance between the two distributions.
        ks: their Kolmogorov-Smirnov statistic, 0 (equal) to 1.
        histogram: both.
    """

    name: str
    requested_std: float
    realised_std: float
    wasserstein: float
    ks: float
    histogram: Histogram


@dataclass(frozen=True)
class Spread:
    """Five quantiles of a length."""

    q05: float
    q25: float
    median: float
    q75: float
    q95: float

    @classmethod
    def of(cls, values: Float[Array, " n"]) -> Spread:
        """From a sample."""
        return cls(*(float(q) for q in np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])))


@dataclass(frozen=True)
class Usage:
    """How often the stored samples serve as positives.

    Attributes:
        mean: times a sample.
        most: times the most used one.
        never: share of samples that no pair uses.
        never_if_even: the same if each positive were a uniform choice.
        counts: how many samples are used 0, 1, 2, ... times; the last entry holds all that are used more often.
    """

    mean: float
    most: int
    never: float
    never_if_even: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class PairReport:
    """Requested against realised pairs of one dataset and conditional.

    Lengths are Euclidean in the metric of the match: over its factors, with its weights.

    Attributes:
        dataset: whose pairs these are.
        samples: how many are stored.
        conditional: p(z~ | z), as a text.
        match: exact, hnsw, ivf, or rendered.
        pairs: how many were drawn for the report.
        seed: what they were drawn from.
        metric_factors: the factors that the distance is over.
        metric_weights: their weights.
        factors: each factor's distributions.
        step: |z~ - z| as asked for.
        realised_step: |positive - z| as served.
        matching: |positive - z~|, how far the match moves z~.
        matching_to_step: the median of `matching` over the median of `step`; None where that step is 0.
        distances: histograms of `step` (requested) and of `matching`, or for rendered pairs of `realised_step`.
        anchor_share: share of z~ whose nearest sample, were it allowed, is the anchor itself.
        usage: how often samples serve.
        recall: share of positives that brute force finds as well; None for rendered pairs.
        recall_queries: of how many.
        needed: estimated number of samples at which `matching_to_step` falls to the fidelity, by fidelity.
        warnings: what a user should know before using these pairs.
    """

    dataset: str
    samples: int
    conditional: str
    match: str
    pairs: int
    seed: int
    metric_factors: tuple[str, ...]
    metric_weights: tuple[float, ...]
    factors: tuple[FactorReport, ...]
    step: Spread
    realised_step: Spread
    matching: Spread
    matching_to_step: float | None
    distances: Histogram
    anchor_share: float
    usage: Usage
    recall: float | None
    recall_queries: int
    needed: dict[str, float]
    warnings: tuple[str, ...]


def pair_report(
    data: Any,
    conditional: str | Distribution | None = None,
    *,
    match: str = "exact",
    factors: Sequence[str | int] | None = None,
    weights: Mapping[str | int, float] | Sequence[float] | None = None,
    pairs: int = 100_000,
    seed: int = 0,
    **options: Any,
) -> PairReport:
    """Draw pairs as training would, and compare them with what was asked for.

    Args:
        data: a dataset with `.latents`, or the array (N, d) itself.
        conditional: p(z~ | z); None for the pairs that the dataset was rendered with.
        match: exact, hnsw or ivf.
        factors: that the distance is over.
        weights: in the distance.
        pairs: how many to draw, 1,000 to 10 million; matched ones are drawn in whole batches of 1,024.
        seed: what they are drawn from.
        options: cache, match_options and allow_self of `PairSampler`.

    Raises:
        SpecError: what `PairSampler` refuses; no conditional, and no rendered pairs.

    Example:
        >>> latents = torch.rand(2000, 10, generator=torch.Generator().manual_seed(0))
        >>> report = pair_report(latents, "normal(scale=0.05)", pairs=4096)
        >>> report.matching_to_step > 1, len(report.warnings) > 0
        (True, True)
    """
    pairs, seed = whole("pairs", pairs, 1000), whole("seed", seed, 0)
    if pairs > MOST_PAIRS:
        raise SpecError(f"pairs = {pairs}: expected at most {MOST_PAIRS:,}")
    if conditional is None:
        asked = {"match": None if match == "exact" else match, "factors": factors, "weights": weights, **options}
        given = [name for name, value in asked.items() if value is not None]
        if given:
            raise SpecError(f"{', '.join(given)}: for matched pairs, but no conditional is given")
        law, latents, metric, matches = _rendered(data, pairs, seed)
        match, recall, served = "rendered", None, data.pair_latents[matches.positives]
    else:
        sampler = PairSampler(
            data, conditional, batch_size=BATCH, seed=seed, match=match, factors=factors, weights=weights, **options
        )
        law, latents, metric = sampler.law, sampler.latents, sampler.metric
        matches = sampler.match_batches(range(-(-pairs // BATCH)))
        recall, served = _recall(sampler, matches), latents[matches.positives]
    return _summarise(data, law, latents, metric, matches, served, match, recall, seed)


def _rendered(data: Any, pairs: int, seed: int) -> tuple[Distribution, Array, Metric, Matches]:
    """The rendered pairs of a dataset, beside fresh draws around the same z."""
    if not getattr(getattr(data, "entry", None), "pairs", ""):
        raise SpecError(
            "conditional: missing; this dataset holds no rendered pairs, so say what p(z~ | z) is asked for"
        )
    # The conditional is over all factors, of which the dataset at hand may have chosen some.
    whole_data = type(data)(data.root, data.split)
    law = law_of(whole_data, whole_data.latents, data.entry.pairs)
    generator = generator_of("pair report", seed)
    anchors = torch.randint(len(data), (pairs,), generator=generator).numpy()
    z = torch.from_numpy(whole_data.latents[anchors])
    drawn = draw_around(z, law, held_columns(whole_data), generator).numpy()
    latents, wanted = latents_of(data), np.ascontiguousarray(drawn[:, data.factors.columns])
    metric = Metric.of(latents.shape[1], table_of(data), None, None)
    return law, latents, metric, Matches(anchors, wanted, anchors, np.zeros(pairs))


def _recall(sampler: PairSampler, matches: Matches) -> float:
    """Share of positives that are as near as the nearest found by comparing with every sample, in float64."""
    metric, groups = sampler.metric, sampler.groups
    queries = metric.coordinates(matches.wanted[:RECALL_QUERIES]).astype(np.float64)
    chosen, anchors = matches.positives[: len(queries)], matches.anchors[: len(queries)]
    best, found = np.full(len(queries), np.inf), np.full(len(queries), np.inf)
    # A piece of the samples at a time, and of the queries: neither all points nor all distances need fit memory.
    piece = max(1, 8_000_000 // len(queries))
    for start in range(0, len(sampler.latents), piece):
        points = metric.coordinates(sampler.latents[start : start + piece]).astype(np.float64)
        distance = cdist(queries, points, "sqeuclidean")
        if groups is not None:
            distance[groups.ids[anchors, None] != groups.ids[start : start + piece]] = np.inf
        if not sampler.allow_self:
            own = np.flatnonzero((anchors >= start) & (anchors < start + len(points)))
            distance[own, anchors[own] - start] = np.inf
        here = np.flatnonzero((chosen >= start) & (chosen < start + len(points)))
        found[here] = distance[here, chosen[here] - start]
        best = np.minimum(best, distance.min(axis=1))
    return float((found <= best).mean())


def _histogram(requested: Array, realised: Array, low: float, high: float) -> Histogram:
    edges = np.linspace(low, high, BINS + 1) if high > low else np.linspace(low - 0.5, low + 0.5, BINS + 1)
    width = edges[1] - edges[0]
    one, two = (np.histogram(x, edges)[0] / (len(x) * width) for x in (requested, realised))
    return Histogram(tuple(edges.tolist()), tuple(one.tolist()), tuple(two.tolist()))


def _factor(name: str, requested: Array, realised: Array) -> FactorReport:
    widest = float(np.quantile(np.abs(np.concatenate([requested, realised])), 0.999))
    return FactorReport(
        name=name,
        requested_std=float(requested.std()),
        realised_std=float(realised.std()),
        wasserstein=float(wasserstein_distance(requested, realised)),
        ks=float(ks_2samp(requested, realised, method="asymp").statistic),
        histogram=_histogram(requested, realised, -widest, widest),
    )


def _usage(positives: Array, samples: int) -> Usage:
    times = np.bincount(positives, minlength=samples)
    mean = len(positives) / samples
    longest = int(max(10, math.ceil(mean + 5 * math.sqrt(mean))))
    counts = np.bincount(np.minimum(times, longest), minlength=longest + 1)
    return Usage(
        mean, int(times.max()), float((times == 0).mean()), math.exp(-mean), tuple(int(c) for c in counts.tolist())
    )


def _summarise(
    data: Any,
    law: Distribution,
    latents: Array,
    metric: Metric,
    matches: Matches,
    served: Array,
    match: str,
    recall: float | None,
    seed: int,
) -> PairReport:
    table = table_of(data)
    names = table.names if table is not None else tuple(map(str, range(latents.shape[1])))
    z, wanted = latents[matches.anchors], matches.wanted
    step, realised, moved = (
        np.linalg.norm(metric.coordinates(a).astype(np.float64) - metric.coordinates(b), axis=1)
        for a, b in ((wanted, z), (served, z), (served, wanted))
    )
    asked, given = wanted.astype(np.float64) - z, served.astype(np.float64) - z
    rendered = match == "rendered"
    if rendered:
        moved = np.zeros_like(moved)
    shown = realised if rendered else moved
    samples = len(latents)
    spread, far = Spread.of(step), Spread.of(moved)
    ratio = far.median / spread.median if spread.median else None
    # A column at a time: a copy of all would be as large as the dataset's latents.
    free = sum(bool(latents[:, column].max() > latents[:, column].min()) for column in metric.columns)
    report = PairReport(
        dataset=_name(data),
        samples=samples,
        conditional=law.text,
        match=match,
        pairs=len(wanted),
        seed=seed,
        metric_factors=tuple(names[c] for c in metric.columns),
        metric_weights=metric.weights,
        factors=tuple(_factor(n, asked[:, i], given[:, i]) for i, n in enumerate(names)),
        step=spread,
        realised_step=Spread.of(realised),
        matching=far,
        matching_to_step=ratio,
        distances=_histogram(step, shown, 0.0, float(max(step.max(), shown.max()))),
        anchor_share=0.0 if rendered else float((step <= moved).mean()),
        usage=_usage(matches.positives, samples),
        recall=recall,
        recall_queries=0 if rendered else min(RECALL_QUERIES, len(wanted)),
        needed={} if rendered or ratio is None else {f"{f:g}": samples * (ratio / f) ** free for f in FIDELITIES},
        warnings=(),
    )
    return replace(report, warnings=tuple(_warnings(report)))


def _name(data: Any) -> str:
    manifest = getattr(data, "manifest", None)
    if manifest is None:
        return type(data).__name__
    return f"{manifest.name}, split {data.split}"


def _warnings(r: PairReport) -> list[str]:
    found = []
    if r.match != "rendered" and (r.matching_to_step is None or r.matching_to_step > DOMINATES):
        times = "" if r.matching_to_step is None else f"{r.matching_to_step:.2g} times "
        found.append(
            f"Matching dominates: the nearest of {r.samples:,} samples lies {r.matching.median:.3g} from z~, "
            f"{times}the step of {r.step.median:.3g} that {r.conditional} asks for, so these "
            "pairs follow the stored samples and not the conditional; render exact pairs with "
            f'`ident3d render ... --pairs "{r.conditional}"`, or ask for larger steps or fewer factors.'
        )
    if r.recall is not None and r.recall < 0.999:
        found.append(
            f"The index misses: {r.match} finds the nearest sample for {r.recall:.2%} of {r.recall_queries:,} z~; "
            "use match='exact'."
        )
    even = r.usage.never_if_even
    if r.match != "rendered" and r.usage.never > even + 0.1:
        found.append(
            f"Samples are used unevenly: {r.usage.never:.0%} of them are never a positive, where {even:.0%} would be "
            "by chance."
        )
    return found

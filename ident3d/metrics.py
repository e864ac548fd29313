"""How well codes recover the factors that pictures were made from: R2, MCC, DCI, and bootstrap intervals.

All take codes (n, codes) and factors (n, factors), arrays or tensors, one row a sample, and refuse what has no score.
Both may be of any float or integer dtype and on any device; a single column may be given as (n,).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from ident3d.checks import whole
from ident3d.dci import DCIScore, dci, dci_task, entropy_scores
from ident3d.errors import SpecError
from ident3d.factors import FactorTable
from ident3d.scoring import (
    Array,
    Halves,
    Names,
    Numbers,
    Rows,
    Score,
    Task,
    columns_of,
    explained,
    from_first,
    halves_of,
    need_rows,
)

__all__ = ["DCIScore", "Intervals", "MCCScore", "R2Score", "bootstrap", "dci", "entropy_scores", "mcc", "r2"]

CORRELATIONS = ("pearson", "spearman")
CONSTANT_CODES = ("error", "zero")
LEAST = 10
"""Rows: over fewer, the best of three codes of pure noise correlates with a factor by about 0.5."""


@dataclass(frozen=True)
class R2Score(Score):
    """The coefficient of determination of a linear map from codes to factors.

    Attributes:
        mean: over factors, each weighing the same; `float(score)`.
        per_factor: at most 1; below 0 where the map is worse than the factor's mean.
        names: of the factors.
    """

    mean: float
    per_factor: tuple[float, ...]
    names: tuple[str, ...]

    def __float__(self) -> float:
        return self.mean

    def headline(self) -> dict[str, float]:
        """The mean, and each factor's score by its name."""
        return {"mean": self.mean, **dict(zip(self.names, self.per_factor, strict=True))}


@dataclass(frozen=True)
class MCCScore(Score):
    """The mean correlation coefficient.

    Attributes:
        mean: over factors, 0 to 1; `float(score)`.
        per_factor: magnitude of the correlation of each factor with its code.
        names: of the factors.
        assignment: the number of each factor's code.
        signs: of those correlations, -1, 0 or 1.
        matrix: all correlations with their signs, factors x codes.
        correlation: `pearson` or `spearman`.
        constant_codes: numbers of the codes that are constant and count as uncorrelated.
    """

    mean: float
    per_factor: tuple[float, ...]
    names: tuple[str, ...]
    assignment: tuple[int, ...]
    signs: tuple[int, ...]
    matrix: tuple[tuple[float, ...], ...]
    correlation: str
    constant_codes: tuple[int, ...]

    def __float__(self) -> float:
        return self.mean

    def headline(self) -> dict[str, float]:
        """The mean, and each factor's score by its name."""
        return {"mean": self.mean, **dict(zip(self.names, self.per_factor, strict=True))}


@dataclass(frozen=True)
class Intervals(Score):
    """Bootstrap intervals of the numbers of a score.

    Attributes:
        names: `mean` and the factors, or for `dci` what it consists of.
        estimate: the score over all rows.
        low: the lower end.
        high: the upper end.
        level: share of the resamples between the two.
        samples: how many resamples.
        seed: what they were drawn from.
    """

    names: tuple[str, ...]
    estimate: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    level: float
    samples: int
    seed: int

    def __getitem__(self, name: str) -> tuple[float, float]:
        """(low, high) of the number called `name`.

        Raises:
            SpecError: none is called so.
        """
        if name not in self.names:
            raise SpecError(f"no interval of {name!r}; expected one of {', '.join(self.names)}")
        column = self.names.index(name)
        return self.low[column], self.high[column]

    def headline(self) -> dict[str, float]:
        """The score over all rows."""
        return dict(zip(self.names, self.estimate, strict=True))


def r2(
    codes: Numbers, factors: Numbers | FactorTable, *, names: Names | None = None, shuffle: int | None = None
) -> R2Score:
    """R2 of the best linear map: identifiability up to affine maps (Zimmermann et al. 2021, section A.3).

    A linear map with intercept is fitted by least squares from codes to factors on the first half of the rows, and
    scored on the second: per factor 1 - sum (z - f)^2 / sum (z - mean z)^2, sums and mean over the second half. It does
    not change with any invertible affine map of the codes, nor with the scale or offset of a factor. Codes that repeat
    each other or are constant do no harm while one varies: of the maps that fit equally well, the smallest on
    standardised codes is taken.

    Rows are taken to be independent. Those of a video are not, and neighbours in both halves would flatter the score:
    leave them in order. Those that are sorted by a factor are to be mixed: `shuffle`.

    Args:
        codes: (n, codes), array or tensor; at least 2 (codes + 2) rows, and 10.
        factors: (n, factors) likewise, or a dataset's table of factors, of which the latents are scored.
        names: of the factors' columns: texts, or a `Factors` such as `data.factors`, from which periodic factors are
            known; "0", "1", ... by default. With a table as factors, the names of those to score, by default all.
        shuffle: seed of a permutation of the rows before they are halved; None leaves them in order.

    Raises:
        SpecError: no real numbers, NaN, infinity, shapes that disagree, too few rows; a factor that is categorical, is
            periodic, or is constant over a half (its std at most 4 roundings, in the dtype given, of its largest
            magnitude); codes that all are constant.

    Example:
        >>> z = np.random.default_rng(0).random((1000, 2))
        >>> codes = z @ [[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]] + 5
        >>> score = r2(codes, z, names=["object_x", "object_hue"])
        >>> round(float(score), 6), score.names
        (1.0, ('object_x', 'object_hue'))
    """
    return _r2_task(codes, factors, names=names, shuffle=shuffle).point()


def _r2_task(
    codes: Numbers, factors: Numbers | FactorTable, *, names: Names | None = None, shuffle: int | None = None
) -> Task[R2Score]:
    made, target = columns_of(codes, factors, names)

    def evaluate(fit: Rows, scored: Rows) -> R2Score:
        halves = Halves.of(made, target, fit, scored)
        weights = np.linalg.lstsq(halves.fit_codes, halves.fit_factors, rcond=None)[0]
        per_factor = explained(halves.scored_factors, halves.scored_codes @ weights)
        return R2Score(float(per_factor.mean()), tuple(per_factor.tolist()), target.names)

    return Task(halves_of(made, shuffle, LEAST), evaluate)


def mcc(
    codes: Numbers,
    factors: Numbers | FactorTable,
    *,
    names: Names | None = None,
    correlation: str = "pearson",
    constant_codes: str = "error",
) -> MCCScore:
    """Mean correlation coefficient: identifiability up to permutations (Hyvarinen & Morioka 2016).

    Each factor is assigned a code of its own such that the sum of |correlation| over factors is greatest, and the score
    is the mean of those |correlation|. It does not change with the order, signs, scales and offsets of codes and
    factors; by Spearman's correlation (ranks, means of ranks for ties), nor with any strictly monotone map of one.

    There may be more codes than factors; the codes left over count for nothing. For KITTI Masks, Zimmermann et al. 2021
    (section A.3) and Klindt et al. 2021 pad the factors with columns of noise until there are as many as codes, match
    all of them, and average over the true ones. The noise's correlations, some 1 / sqrt(n) each, then have a say in
    the matching, so that a true factor may lose its code where two codes are about as good, and the score depends on
    the noise drawn. Here it does not: the match is the best for the true factors, and the score never the lower.

    Among many codes the best of them correlates with any factor by chance, by some sqrt(2 log(codes) / n).

    Args:
        codes: (n, codes), array or tensor; at least 10 rows, and as many codes as factors.
        factors: (n, factors) likewise, or a dataset's table of factors.
        names: of the factors; see `r2`.
        correlation: `pearson` or `spearman`.
        constant_codes: `error`, or `zero` to count a constant code, whose correlation is undefined, as uncorrelated:
            for encoders that leave some codes unused, such as a VAE whose posterior has collapsed. The result says
            which.

    Raises:
        SpecError: no real numbers, NaN, infinity, shapes that disagree, too few rows; fewer codes than factors; a
            factor that is categorical, periodic or constant; a constant code, unless it is to count as 0; codes that
            all are constant; an unknown option.

    Example:
        >>> z = np.random.default_rng(0).random((1000, 2))
        >>> score = mcc(np.stack([z[:, 1], -z[:, 0] ** 3], axis=1), z, correlation="spearman")
        >>> round(float(score), 6), score.assignment, score.signs
        (1.0, (1, 0), (-1, 1))
    """
    return _mcc_task(codes, factors, names=names, correlation=correlation, constant_codes=constant_codes).point()


def _mcc_task(
    codes: Numbers,
    factors: Numbers | FactorTable,
    *,
    names: Names | None = None,
    correlation: str = "pearson",
    constant_codes: str = "error",
) -> Task[MCCScore]:
    for option, value, known in (
        ("correlation", correlation, CORRELATIONS),
        ("constant_codes", constant_codes, CONSTANT_CODES),
    ):
        if value not in known:
            raise SpecError(f"{option} = {value!r}: expected one of {', '.join(known)}")
    made, target = columns_of(codes, factors, names)
    if made.width < target.width:
        raise SpecError(
            f"{made.width} codes for {target.width} factors: expected at least one code a factor; "
            "choose as many factors, or score with r2"
        )
    need_rows(made, LEAST, "below which noise alone scores high")

    ranked = correlation == "spearman"
    numbers = tuple(_levels(columns.values) if ranked else columns.values for columns in (target, made))

    def evaluate(rows: Rows) -> MCCScore:
        target.require_varying(rows, "all rows", "leave it out")
        made.require_one_varying(rows, "all rows")
        if constant_codes == "error":
            made.require_varying(rows, "all rows", "leave it out, or count it as uncorrelated: constant_codes='zero'")
        unused = made.constant(rows)
        z, code = (_unit(_ranks(part[rows]) if ranked else part[rows]) for part in numbers)
        matrix = np.clip(z.T @ np.where(unused, 0, code), -1, 1)
        return _matched(matrix, target.names, correlation, unused)

    return Task((np.arange(len(made)),), evaluate)


def _levels(values: Float64[Array, "n columns"]) -> Int64[Array, "n columns"]:
    """The number of each value among the different ones of its column, in ascending order."""
    return np.stack([np.unique(column, return_inverse=True)[1] for column in values.T], axis=1)


def _ranks(levels: Int64[Array, "n columns"]) -> Float64[Array, "n columns"]:
    """The rank of each value in its column, the mean rank for ties. From levels, no resample is sorted again."""
    counts = [np.bincount(column) for column in levels.T]
    ranks = [np.cumsum(count) - (count - 1) / 2 for count in counts]
    return np.stack([rank[column] for rank, column in zip(ranks, levels.T, strict=True)], axis=1)


def _unit(values: Float64[Array, "n columns"]) -> Float64[Array, "n columns"]:
    """Each column centred, and of length 1 where it varies."""
    (values,) = from_first(values)
    centred = values - values.mean(axis=0)
    norm = np.linalg.norm(centred, axis=0)
    unit: Array = np.divide(centred, norm, out=np.zeros_like(centred), where=norm > 0)
    return unit


def _matched(
    matrix: Float64[Array, "factors codes"], names: tuple[str, ...], correlation: str, unused: Bool[Array, " codes"]
) -> MCCScore:
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    rows, assignment = linear_sum_assignment(np.abs(matrix), maximize=True)
    chosen = matrix[rows, assignment]
    return MCCScore(
        mean=float(np.abs(chosen).mean()),
        per_factor=tuple(np.abs(chosen).tolist()),
        names=names,
        assignment=tuple(assignment.tolist()),
        signs=tuple(np.sign(chosen).astype(int).tolist()),
        matrix=tuple(map(tuple, matrix.tolist())),
        correlation=correlation,
        constant_codes=tuple(np.flatnonzero(unused).tolist()),
    )


def bootstrap(
    score: Callable[..., Score],
    codes: Numbers,
    factors: Numbers | FactorTable,
    *,
    samples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    **options: Any,
) -> Intervals:
    """Percentile intervals of a score over resampled rows (Efron & Tibshirani 1993, chapter 13).

    Each resample draws as many rows as there are, with replacement, and goes through the whole score again, map and
    match included: where two codes are about as good for a factor of `mcc`, the interval of this factor spans both.
    For `r2` and `dci` each half is resampled by itself: a row that stood in both would be scored by a map that has seen
    it. The penalties of `dci`'s lasso stay those of the rows as given, since cross-validation over repeated rows would
    choose them too small; its forests grow anew, which takes minutes for a hundred resamples.

    The interval tells how far the score depends on the rows at hand, which are taken to be independent; it says nothing
    about another training of the encoder. As a mean of magnitudes, MCC of codes that tell nothing is biased upwards,
    in resamples more so: near 0 its interval lies too high. Likewise R2 lies a little too low in resamples where the
    rows are not many times the codes, as a third of them are left out of each fit.

    Args:
        score: `r2`, `mcc` or `dci`.
        codes: as for it.
        factors: as for it.
        samples: how many resamples; enough that one lies beyond each end, 2 / (1 - level).
        level: share of the resamples within the interval, above 0 and below 1.
        seed: what they are drawn from, 0 or more.
        options: the score's.

    Raises:
        SpecError: another score; an option out of range; what the score refuses, over all rows or in a resample, such
            as one that drew a factor's rare values not once.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> z = generator.random((500, 3))
        >>> intervals = bootstrap(r2, z + 0.1 * generator.standard_normal((500, 3)), z, samples=200)
        >>> low, high = intervals["mean"]
        >>> low < intervals.estimate[0] < high, high - low < 0.05
        (True, True)
    """
    tasks: tuple[tuple[Any, Callable[..., Task[Any]]], ...] = ((r2, _r2_task), (mcc, _mcc_task), (dci, dci_task))
    made = [make(codes, factors, **options) for known, make in tasks if known is score]
    if not made:
        raise SpecError(f"score = {score!r}: expected r2, mcc or dci")
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise SpecError(f"level = {level!r}: expected a number above 0 and below 1")
    # Rounded, as 2 / (1 - 0.95) is 39.99...
    samples, seed = whole("samples", samples, int(np.ceil(round(2 / (1 - level), 6)))), whole("seed", seed)
    estimate = made[0].point().headline()
    generator = np.random.default_rng(seed)
    draws = np.empty((samples, len(estimate)))
    for k in range(samples):
        strata = [rows[generator.integers(len(rows), size=len(rows))] for rows in made[0].strata]
        try:
            draws[k] = list(made[0].evaluate(*strata).headline().values())
        except SpecError as error:
            raise SpecError(f"resample {k} of {samples:,}: {error}") from None
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0).tolist()
    return Intervals(tuple(estimate), tuple(estimate.values()), tuple(low), tuple(high), float(level), samples, seed)

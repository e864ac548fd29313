"""All scores of an encoder's codes in one: R2, MCC by both correlations, DCI; and as a table for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ident3d.baselines.table_formats import Sheet, to_text
from ident3d.ceilings import Ceiling
from ident3d.checks import whole
from ident3d.errors import SpecError
from ident3d.metrics import DCIScore, MCCScore, R2Score, dci, mcc, r2
from ident3d.scoring import Names, Numbers

__all__ = ["DCI_ROWS", "Evaluation", "evaluate_codes", "evaluation_text", "limits_of", "percent", "scores_text"]

DCI_ROWS = 10_000
"""The most samples that DCI is computed from, so that its cross-validation takes seconds on one core."""


@dataclass(frozen=True)
class Evaluation:
    """The scores of codes.

    Attributes:
        r2: of a linear map from all codes.
        mcc: by Pearson's correlation.
        mcc_spearman: by Spearman's.
        dci: by a lasso, or None where it was not asked for or has no value.
        no_dci: why it has none; "" otherwise.
    """

    r2: R2Score
    mcc: MCCScore
    mcc_spearman: MCCScore
    dci: DCIScore | None
    no_dci: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The factors', in order."""
        return self.mcc.names

    def headline(self) -> dict[str, float]:
        """Means over factors as fractions: r2, mcc, mcc_spearman; with DCI its three as well."""
        found = {"r2": self.r2.mean, "mcc": self.mcc.mean, "mcc_spearman": self.mcc_spearman.mean}
        if self.dci is not None:
            for name in ("disentanglement", "completeness", "informativeness"):
                found[name] = getattr(self.dci, name)
        return found

    def per_factor(self) -> dict[str, tuple[float, ...]]:
        """r2, mcc and mcc_spearman of each factor, as fractions."""
        return {
            "r2": self.r2.per_factor,
            "mcc": self.mcc.per_factor,
            "mcc_spearman": self.mcc_spearman.per_factor,
        }

    def to_plain_dci(self) -> dict[str, Any]:
        """All of DCI, importances included, as dicts, lists and numbers for JSON; why not, where there is none."""
        absent = {"absent": self.no_dci} if self.no_dci else {}
        return absent if self.dci is None else self.dci.as_dict()


def evaluate_codes(
    codes: Numbers, latents: Numbers, names: Names, *, with_dci: bool = True, seed: int = 0
) -> Evaluation:
    """R2, MCC and DCI of codes, as Zimmermann et al. 2021 (section A.3) take R2 and MCC.

    R2 fits a linear map on the first half of the rows and scores it on the second, in the order given: rows that are
    sorted are to be mixed before. MCC is over all rows; a constant code counts as uncorrelated with everything. DCI is
    that of a lasso, over at most 10,000 rows: where there are more, as many are drawn at random and keep their order.

    Args:
        codes: (n, codes), array or tensor of real numbers; at least as many codes as factors.
        latents: (n, factors) likewise, a row a sample, such as those in the unit cube; no score depends on their scale.
        names: of the factors, a text or a `Factor` each.
        with_dci: DCI takes seconds and scikit-learn; without it, `dci` of the result is None.
        seed: what DCI's rows are drawn from, where not all are taken.

    Raises:
        SpecError: what `ident3d.metrics.r2`, `mcc` and `dci` refuse: NaN, shapes that disagree, too few rows, fewer
            codes than factors, a constant factor, codes that all are constant. What `dci` alone refuses (fewer than two
            factors, codes that tell nothing, no scikit-learn) leaves the others and is kept in words.

    Example:
        >>> z = np.random.default_rng(0).random((1000, 2))
        >>> found = evaluate_codes(np.stack([-z[:, 1], z[:, 0] ** 2], axis=1), z, ["object_x", "object_hue"])
        >>> {name: round(score, 2) for name, score in found.headline().items() if name.startswith(("r2", "mcc"))}
        {'r2': 0.97, 'mcc': 0.98, 'mcc_spearman': 1.0}
    """
    seed = whole("seed", seed)
    linear = r2(codes, latents, names=names)
    pearson, spearman = (
        mcc(codes, latents, names=names, correlation=kind, constant_codes="zero") for kind in ("pearson", "spearman")
    )
    found, why = None, ""
    if with_dci:
        count = len(codes)
        if count > DCI_ROWS:
            rows = np.sort(np.random.default_rng(seed).choice(count, DCI_ROWS, replace=False))
            codes, latents = codes[rows], latents[rows]
        try:
            found = dci(codes, latents, names=names)
        except SpecError as error:
            why = str(error)
    return Evaluation(linear, pearson, spearman, found, why)


def evaluation_text(evaluation: Evaluation, ceilings: Sequence[Ceiling] | None = None) -> str:
    """The table of `scores_text` of an evaluation."""
    return scores_text(evaluation.names, evaluation.r2.per_factor, evaluation.mcc.per_factor, ceilings)


def scores_text(
    names: Sequence[str], r2: Sequence[float], mcc: Sequence[float], ceilings: Sequence[Ceiling] | None = None
) -> str:
    """A table for a terminal, in percent: a line a factor, and one of the means.

    Args:
        names: of the factors.
        r2: of each.
        mcc: |correlation| of each with its code.
        ceilings: what a perfect encoder reaches, from `ident3d.ceilings`; found by the factors' names. They stand in
            two more columns where any is below 1; a factor that has none may reach 1.

    Returns:
        Lines, the last ended.
    """
    best = limits_of(names, ceilings)
    headings = ["factor", "R2", "MCC"]
    notes = ["In percent. MCC: |correlation| of the factor and the code matched to it."]
    scores = [(*each, statistics.fmean(each)) for each in (r2, mcc)]
    rows = [[name, *map(percent, pair)] for name, *pair in zip((*names, "mean"), *scores, strict=True)]
    if best:
        headings += ["ceiling R2", "ceiling |corr|"]
        notes += [
            "Ceiling: the most that any encoder can reach on pictures it was not trained on, as they do not tell all "
            "of the factor; 100 where blank."
        ]
        for row in rows[:-1]:
            known = best.get(row[0])
            row += ["", ""] if known is None else [percent(known.r2), percent(known.mcc)]
        for attribute in ("r2", "mcc"):
            each = [getattr(best[name], attribute) if name in best else 1.0 for name in names]
            rows[-1].append(percent(statistics.fmean(each)))
    sheet = Sheet("", tuple(headings), tuple(map(tuple, rows)), right=frozenset(range(1, 5)), remarks=tuple(notes))
    return to_text(sheet).lstrip()


def limits_of(names: Sequence[str], ceilings: Sequence[Ceiling] | None) -> Mapping[str, Ceiling]:
    """By name, the ceilings of these factors that are below 1."""
    return {c.name: c for c in ceilings or () if c.name in names and c.r2 < 1}


def percent(fraction: float) -> str:
    """A fraction in percent with two digits."""
    return f"{round(100 * fraction, 2) + 0.0:.2f}"  # + 0.0: no minus before a zero

"""A figure of learned codes against true factors, a panel a factor."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from ident3d.baselines.evaluation import Evaluation, limits_of, percent
from ident3d.ceilings import Ceiling
from ident3d.errors import SpecError
from ident3d.scoring import Columns, Names, Numbers, columns_of, from_first

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["POINTS", "code_figure"]

Array = np.ndarray[Any, np.dtype[Any]]

POINTS = 2000
"""The most samples that are drawn: more would hide how dense they lie."""
COLUMNS = 5
OUTSIDE = 1e-6
"""How far outside the unit interval float rounding may leave a latent."""


def code_figure(
    codes: Numbers,
    latents: Numbers,
    names: Names,
    evaluation: Evaluation,
    *,
    title: str,
    ceilings: Sequence[Ceiling] | None = None,
) -> Figure:
    """A panel a factor: the true factor (x) against the code that MCC matched to it (y), a point a sample.

    Codes are of any sign and scale. So each is multiplied by the sign of its correlation, and then shifted and scaled
    to the factor's mean and standard deviation over all samples: a perfect code lies on the diagonal, one that tells
    nothing fills the square. A code that is constant is drawn at the factor's mean.

    Args:
        codes: (n, codes), array or tensor.
        latents: (n, factors) likewise, in the unit cube.
        names: of the factors.
        evaluation: of these codes, from `evaluate_codes`.
        title: what was trained on what; a line or more above all.
        ceilings: what a perfect encoder reaches; found by the factors' names. Intervals in which pictures are alike are
            shaded.

    Returns:
        At most 2,000 samples a panel, evenly spaced among the rows.

    Raises:
        SpecError: codes or latents that are not those of the evaluation by their numbers or names, that are not finite,
            or latents outside the unit cube.
    """
    from matplotlib.figure import Figure

    made, target = columns_of(codes, latents, names)
    _check(made, target, evaluation)
    truth = np.ldexp(target.values, target.exponent)
    if truth.min() < -OUTSIDE or truth.max() > 1 + OUTSIDE:
        raise SpecError(
            f"latents from {truth.min():.4g} to {truth.max():.4g}: expected the unit cube, 0 to 1; "
            "raw coordinates in [-1, 1] become latents by (raw + 1) / 2"
        )
    drawn = np.unique(np.linspace(0, len(truth) - 1, min(len(truth), POINTS)).astype(int))
    best = limits_of(evaluation.names, ceilings)
    columns = min(COLUMNS, target.width)
    rows = -(-target.width // columns)
    width = max(5.5, 2.5 * columns)
    above = textwrap.fill(title, int(9 * width), replace_whitespace=False)
    texts = _notes(made, target, len(drawn), shaded=bool(best))
    below = "\n".join(textwrap.fill(text, int(15 * width)) for text in texts)
    lines = above.count("\n") + below.count("\n") + 4
    figure = Figure(figsize=(width, 2.7 * rows + 0.17 * lines), layout="constrained")
    figure.suptitle(above, fontsize=11, parse_math=False)
    figure.supxlabel(f"true factor, in the unit interval\n\n{below}", fontsize=8.5)
    figure.supylabel("learned code, rescaled", fontsize=8.5)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[target.width :]:
        ax.set_axis_off()
    for j, ax in enumerate(axes.flat[: target.width]):
        y = _shown_code(made, evaluation, j, truth[:, j])
        _panel(ax, truth[drawn, j], y[drawn], evaluation, j, best.get(evaluation.names[j]))
    return figure


def _check(codes: Columns, factors: Columns, evaluation: Evaluation) -> None:
    score = evaluation.mcc
    if factors.names != score.names:
        raise SpecError(f"names = {list(factors.names)}: expected those of the evaluation, {list(score.names)}")
    if codes.width != len(score.matrix[0]):
        raise SpecError(f"{codes.width} codes: expected {len(score.matrix[0])}, those of the evaluation")


def _notes(codes: Columns, factors: Columns, drawn: int, *, shaded: bool) -> list[str]:
    """What a reader must know, a line or more each."""
    unmatched = codes.width - factors.width
    none = f" {unmatched} of {codes.width} codes {'is' if unmatched == 1 else 'are'} matched to none."
    texts = [
        f"{drawn:,} of {len(codes):,} samples, a point each. Codes are shifted and scaled to the mean and spread of "
        "their factor, and flipped where they run against it; dashed: a perfect code.",
        "Each factor is matched with one code of its own (numbered from 0), so that the mean of |corr| over factors, "
        f"which is MCC, is greatest.{none if unmatched else ''}",
        "|corr|: correlation of the factor and its code. R2: of a linear map from all codes to the factor.",
    ]
    if shaded:
        texts.append(
            "Shaded: pictures are the same for several values of the factor, which no encoder can tell apart. At best: "
            "what a perfect encoder would reach."
        )
    return texts


def _shown_code(codes: Columns, evaluation: Evaluation, j: int, truth: Float64[Array, " n"]) -> Float64[Array, " n"]:
    """The code of factor j with the factor's sign, mean and standard deviation."""
    score = evaluation.mcc
    number = score.assignment[j]
    if number in score.constant_codes:
        return np.full(len(truth), truth.mean())
    (values,) = from_first(codes.values[:, [number]])
    centred = values[:, 0] - values[:, 0].mean()
    # The sign of a correlation of exactly 0 is neither.
    found: Array = truth.mean() + (score.signs[j] or 1) * centred / centred.std() * truth.std()
    return found


def _panel(
    ax: Axes,
    x: Float64[Array, " drawn"],
    y: Float64[Array, " drawn"],
    evaluation: Evaluation,
    j: int,
    ceiling: Ceiling | None,
) -> None:
    score = evaluation.mcc
    lines = [
        score.names[j],
        f"|corr| {percent(score.per_factor[j])}%, R2 {percent(evaluation.r2.per_factor[j])}%",
    ]
    if ceiling is not None:
        lines.append(f"at best {percent(ceiling.mcc)}%, {percent(ceiling.r2)}%")
        for low, high in ceiling.alike:
            ax.axvspan(low, high, color="tab:orange", alpha=0.2, linewidth=0)
    ax.plot([0, 1], [0, 1], "--", color="0.5", linewidth=1)
    ax.plot(x, y, ".", color="tab:blue", alpha=0.3, markersize=3, markeredgewidth=0, rasterized=True)
    low, high = min(0.0, float(y.min())), max(1.0, float(y.max()))
    margin = 0.04 * (high - low)
    ax.set_xlim(-0.04, 1.04)
    ax.set_ylim(low - margin, high + margin)
    ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    ax.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    ax.tick_params(labelsize=7)
    number = score.assignment[j]
    how = "constant" if number in score.constant_codes else "sign flipped" if score.signs[j] < 0 else ""
    ax.set_ylabel(f"code {number}{f', {how}' if how else ''}", fontsize=8, labelpad=3)
    ax.set_box_aspect(1)
    ax.set_title("\n".join(lines), fontsize=8, parse_math=False)

"""How sparsely latents move: histograms of their transitions, and the shape of the law that fits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Real

from ident3d.baselines.figure_parts import framed, unit_of, vector
from ident3d.datasets.kitti_masks import FRAME_SECONDS, KittiMasks
from ident3d.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["fitted_shape", "transition_figure"]

Array = np.ndarray[Any, np.dtype[Any]]

SHAPES = (0.1, 20.0)
"""Between which a shape is sought."""
SHOWN = 0.998
"""Share of the steps that a histogram spans, but for what its outermost bins take in besides."""
NEGLIGIBLE = 1e-9
"""Below which share of the largest value a rounding is none."""

DATA, LAPLACE, NORMAL = "0.72", "tab:blue", "tab:red"


def fitted_shape(values: Real[Array, " n"], *, rounding: float = 0.0) -> float:
    """The shape beta of the generalised normal law about 0 that fits best by maximum likelihood.

    Its density is p(x) = beta / (2 alpha Gamma(1 / beta)) e^{-(|x| / alpha)^beta} (Nadarajah 2005, A generalized normal
    distribution): beta 1 is Laplace, 2 normal, large ones uniform; the smaller, the sharper the peak and the heavier
    the tails. Given beta, the likelihood is greatest at alpha^beta = beta mean |x|^beta, where log p is on average

        log(beta / 2) - log Gamma(1 / beta) - log alpha - 1 / beta.

    This is maximised over beta from 0.1 to 20. Values of exactly 0 let it grow beyond all bounds as beta goes to 0,
    towards a point mass there. So where there are peaks between the ends the highest of them is taken, and an end only
    where there is none.

    Values that were rounded, such as numbers of pixels, are taken as spread evenly over the interval that is rounded
    to them, of width `rounding`: for |x|^beta stands its mean over that interval.

    Args:
        values: (n,), not all of them 0.
        rounding: the unit to whose multiples the values were rounded; 0 for values that were not.

    Returns:
        beta, 0.1 to 20; at an end, the best shape may lie beyond.

    Raises:
        SpecError: no values, another shape than (n,), NaN or infinity, all of them 0, or a rounding below 0.
    """
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]

    size = np.abs(vector("values", values))
    if not (math.isfinite(rounding) and rounding >= 0):
        raise SpecError(f"rounding = {rounding!r}: expected a finite number of at least 0")
    if not (largest := size.max()):
        raise SpecError(f"all of {len(size):,} values are 0: expected values that vary, as no law has a shape there")

    def surprise(shape: float) -> float:
        return _surprise(size / largest, rounding / largest, float(shape))

    grid = np.geomspace(*SHAPES, 25)
    heights = np.array([surprise(shape) for shape in grid])
    valleys = 1 + np.flatnonzero((heights[1:-1] <= heights[:-2]) & (heights[1:-1] <= heights[2:]))
    if not len(valleys):
        return float(grid[heights.argmin()])
    k = int(valleys[heights[valleys].argmin()])
    found = minimize_scalar(surprise, bounds=(grid[k - 1], grid[k + 1]), method="bounded", options={"xatol": 1e-4})
    return float(found.x)


def _surprise(size: Float64[Array, " n"], rounding: float, shape: float) -> float:
    """The mean of -log p over |x|, 0 to 1, at the best scale."""
    if rounding > NEGLIGIBLE:
        low, high = np.maximum(size - rounding / 2, 0), size + rounding / 2
        # Around 0 one half of the interval stands for both, which have the same sizes.
        powers = (high ** (shape + 1) - low ** (shape + 1)) / ((shape + 1) * (high - low))
    else:
        powers = size**shape
    log_scale = math.log(shape * powers.mean()) / shape
    return math.lgamma(1 / shape) + log_scale + 1 / shape - math.log(shape / 2)


def transition_figure(data: KittiMasks, max_delta_ts: Sequence[int] = (1, 5)) -> Figure:
    """Histograms of z~ - z on a logarithmic scale, a column a latent, a row a distance (Klindt et al. 2021).

    Each stands beside the Laplace law of its mean absolute value and the normal law of its root mean square, both about
    0. On this scale the first is a tent and the second a parabola, and steps are sparse where a peak at 0 and tails
    stand out above the parabola. Titles give the shape of `fitted_shape` and the excess kurtosis, which is 3 for
    Laplace and 0 for normal laws. Bins are alike to both sides of 0, and take in as many whole pixels each where a
    latent is a number of pixels. They span 99.8% of the steps; each panel says how many are left out.

    Args:
        data: the masks.
        max_delta_ts: how many frames of 0.05 s a positive is at most later, one a row.

    Raises:
        SpecError: no distance, or one out of range.
    """
    moved = [data.transitions(m).astype(np.float64) for m in max_delta_ts]
    if not moved:
        raise SpecError(f"max_delta_ts = {max_delta_ts!r}: expected at least one, such as 1")
    texts = [
        f"Steps z~ - z from {len(data.anchors):,} frames, each to every later one within the time given. On this "
        "logarithmic scale a Laplace law is a tent and a Normal law a parabola; both have their centre at 0 and the "
        "data's mean absolute or standard deviation. Steps are sparse, mostly small and now and then large, where a "
        "sharp peak at 0 and heavy tails stand out above the parabola.",
        "β: shape of the generalised Normal law that fits best by maximum likelihood: 1 is Laplace, 2 is Normal, below "
        "1 is sparser than Laplace. Excess kurtosis: 3 for Laplace, 0 for Normal.",
    ]
    figure = framed(10.5, 2.9 * len(moved) + 0.3, f"{data.title}: how sparsely the latents move", texts)
    axes = figure.subplots(len(moved), len(data.factors), squeeze=False)
    for row, steps, m in zip(axes, moved, max_delta_ts, strict=True):
        later = f"{FRAME_SECONDS:.2f} s" if m == 1 else f"{FRAME_SECONDS:.2f} to {FRAME_SECONDS * m:.2f} s"
        for ax, column, factor in zip(row, steps.T, data.factors, strict=True):
            known = "it never moves"
            if column.any():
                rounding = 1.0 if factor.target == "mask.area" else 0.0
                known = _histogram(ax, column, unit_of(factor), rounding=rounding)
            ax.set_title(f"{factor.name}, {later} later\n{known}", fontsize=9)
    handles, names = next((pair for ax in axes.flat if (pair := ax.get_legend_handles_labels())[0]), ([], []))
    axes[0, 0].legend(handles, names, fontsize=8, loc="upper right", frameon=False, handlelength=1.2, borderaxespad=0.1)
    return figure


def _histogram(ax: Axes, steps: Float64[Array, " n"], unit: str, *, rounding: float) -> str:
    """Draw a panel of steps, and say what is known of their law."""
    from scipy.stats import kurtosis  # type: ignore[import-untyped]

    edges = _edges(np.abs(steps), rounding)
    counts, x = np.histogram(steps, edges)[0], np.linspace(edges[0], edges[-1], 801)
    one = 1 / (len(steps) * float(edges[1] - edges[0]))
    scale, std = np.abs(steps).mean(), math.sqrt(np.square(steps).mean())
    laplace = np.exp(-np.abs(x) / scale) / (2 * scale)
    normal = np.exp(-np.square(x / std) / 2) / (math.sqrt(2 * math.pi) * std)
    ax.stairs(counts * one, edges, baseline=one / 2, fill=True, color=DATA, label="data")
    ax.plot(x, laplace, color=LAPLACE, linewidth=1.5, label="Laplace")
    ax.plot(x, normal, "--", color=NORMAL, linewidth=1.5, label="Normal")
    ax.set_yscale("log")
    # From half a step in a bin, so that a single one shows.
    ax.set_ylim(one / 2, 2 * max(counts.max() * one, laplace.max()))
    ax.set_xlim(edges[0], edges[-1])
    outside = len(steps) - int(counts.sum())
    ax.set_xlabel(f"step in {unit} ({100 * outside / len(steps):.2g}% lie beyond)", fontsize=8.5)
    ax.set_ylabel(f"density per {unit}", fontsize=8.5)
    ax.tick_params(labelsize=8)
    shape = fitted_shape(steps, rounding=rounding)
    end = "at most " if shape <= SHAPES[0] else "at least " if shape >= SHAPES[1] else ""
    return f"β {end or '= '}{shape:.2f}, excess kurtosis {kurtosis(steps):.1f}"


def _edges(size: Float64[Array, " n"], rounding: float) -> Float64[Array, " edges"]:
    """Edges of bins that are alike to both sides of 0, and hold as many multiples of `rounding` each."""
    # A whisker more than the largest to be shown, so that rounding cannot leave it out.
    reach = (1 + 1e-9) * float(np.quantile(size, SHOWN, method="higher") or size.max())
    wide = reach / (0.5 + min(30, max(5, round(len(size) ** (1 / 3)))))
    if rounding:
        wide = rounding * (2 * math.floor(wide / rounding / 2) + 1)
    side = max(0, math.ceil(reach / wide - 0.5))
    found: Array = wide * (np.arange(-side, side + 2) - 0.5)
    return found

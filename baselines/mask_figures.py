"""Figures of masks: a sequence beside its codes, and what a decoder makes of its codes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32, Float64, Int64, Real, UInt8

from ident3d.baselines.evaluation import percent
from ident3d.baselines.figure_parts import framed, unit_of, vector
from ident3d.checks import whole
from ident3d.datasets.kitti_masks import FRAME_SECONDS, KittiMasks
from ident3d.datasets.silhouettes import SIDE
from ident3d.errors import SpecError
from ident3d.metrics import MCCScore
from ident3d.scoring import Columns, Numbers, columns_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["sequence_figure", "traversal_figure"]

Array = np.ndarray[Any, np.dtype[Any]]
Decode = Callable[[Float64[Array, "n dim"]], Real[Array, "n 64 64"]]

LABEL = 40
"""Characters to a line of a row's label."""
MASKS = 12
"""The most masks of a strip."""
CODE = "tab:orange"


def sequence_figure(
    data: KittiMasks,
    sequence: int,
    codes: Numbers,
    score: MCCScore,
    scored: tuple[Numbers, Numbers],
    *,
    title: str,
) -> Figure:
    """A sequence over time: a strip of its masks, and each factor beside the code that MCC matched to it.

    Codes are of any sign and scale. So each is mapped to its factor by the straight line that fits best over all
    samples that were scored (least squares), not over the sequence shown: a perfect code lies on the factor, one that
    tells nothing near the factor's mean over those samples, and an offset within the sequence is an error that shows.

    Args:
        data: the masks.
        sequence: the number of the one to show, 0 to len(data.sequences) - 2.
        codes: (frames, dim) of the sequence's frames, array or tensor.
        score: of the scored samples, from `mcc`.
        scored: codes (n, dim) and latents (n, 3) of the samples that `score` is of.
        title: what was trained; a line or more above all. The data and the sequence are named below it.

    Returns:
        At most 12 masks, evenly spaced in time from the first frame on.

    Raises:
        SpecError: no such sequence, or one of a single frame; codes of another number of frames; codes or factors that
            are not those of the score by their numbers or names; values that are not finite.
    """
    if whole("sequence", sequence, 0) >= len(data.sequences) - 1:
        raise SpecError(f"sequence = {sequence}: expected 0 to {len(data.sequences) - 2}, those of {data.title}")
    start, stop = data.sequences[sequence : sequence + 2].tolist()
    if stop - start < 2:
        raise SpecError(
            f"sequence = {sequence} is a single frame: expected one of at least 2, as time is what is shown"
        )
    own = Columns.of("code", codes, None)
    if len(own) != stop - start:
        raise SpecError(f"{len(own):,} rows of codes: expected {stop - start:,}, the frames of sequence {sequence}")
    shown = _mapped(own, score, scored, data.factors.names)
    what = f"{data.title}, sequence {sequence}: {stop - start} frames in {FRAME_SECONDS * (stop - start - 1):.2f} s"
    text = (
        "Masks: at the dotted times. Each code is the one that MCC matched to the factor, numbered from 0, mapped to "
        f"the factor by a straight line: the least-squares fit over all {len(scored[0]):,} scored samples, not over "
        "this sequence. |corr|: their correlation over the same samples."
    )
    figure = framed(10.0, 6.4, f"{title}\n{what}", [text], "time since the sequence's first frame, in s")
    axes = figure.subplots(1 + len(data.factors), 1, sharex=True, height_ratios=[0.75] + [1] * len(data.factors))
    frames = np.arange(0, stop - start, math.ceil((stop - start - 1) / (MASKS - 1)))
    _strip(axes[0], data.masks[start:stop], frames)
    for j, ax in enumerate(axes[1:]):
        _course(ax, data.latents[start:stop, j], shown[:, j], frames)
        ax.set_title(f"{data.factors[j].name}: {data.factors[j].drives}. {_matched(score, j)}", fontsize=9, loc="left")
        ax.set_ylabel(f"{data.factors[j].name} in {unit_of(data.factors[j])}", fontsize=8.5)
    axes[1].legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.12), ncols=2, frameon=False, borderaxespad=0.1)
    return figure


def _mapped(
    own: Columns, score: MCCScore, scored: tuple[Numbers, Numbers], names: tuple[str, ...]
) -> Float64[Array, "frames factors"]:
    """Each factor's code in the sequence, mapped to the factor by the line that fits best over all scored samples."""
    made, target = columns_of(*scored, names)
    if score.names != names:
        raise SpecError(f"score of {list(score.names)}: expected one of the factors {list(names)}, in this order")
    for kind, width in (("codes", own.width), ("scored codes", made.width)):
        if width != len(score.matrix[0]):
            raise SpecError(f"{width} {kind}: expected {len(score.matrix[0])}, those of the score")
    here, there, truth = (np.ldexp(part.values, part.exponent) for part in (own, made, target))
    constant = made.constant(np.arange(len(made)))
    shown = np.empty((len(own), len(names)))
    for j, number in enumerate(score.assignment):
        middle, centre = truth[:, j].mean(), there[:, number].mean()
        x = there[:, number] - centre
        slope = 0.0 if constant[number] else x @ (truth[:, j] - middle) / (x @ x)
        shown[:, j] = middle + slope * (here[:, number] - centre)
    return shown


def _matched(score: MCCScore, j: int) -> str:
    """The code of factor j, and how well it fits."""
    number = score.assignment[j]
    how = ", constant" if number in score.constant_codes else ", sign flipped" if score.signs[j] < 0 else ""
    return f"Code {number}{how}: {score.correlation.capitalize()}'s |corr| {percent(score.per_factor[j])}%"


def _strip(ax: Axes, masks: UInt8[Array, "frames 64 64"], frames: Int64[Array, " shown"]) -> None:
    """Masks of these frames, which are evenly spaced, each at its time on an axis to the last frame."""
    apart, last = FRAME_SECONDS * int(frames[1]), FRAME_SECONDS * (len(masks) - 1)
    low, high = -apart / 2, max(last + apart / 8, FRAME_SECONDS * int(frames[-1]) + apart / 2)
    ax.set_xlim(low, high)
    ax.set_axis_off()
    share = 0.94 * apart / (high - low)
    for frame in frames:
        at = FRAME_SECONDS * int(frame)
        inset = ax.inset_axes(((at - low) / (high - low) - share / 2, 0.0, share, 1.0))
        inset.imshow(masks[frame], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        inset.set_title(f"{at:.2f} s", fontsize=8, pad=2)
        inset.set_xticks([])
        inset.set_yticks([])


def _course(
    ax: Axes, truth: Float32[Array, " frames"], code: Float64[Array, " frames"], frames: Int64[Array, " shown"]
) -> None:
    time = FRAME_SECONDS * np.arange(len(truth))
    ax.plot(time, truth, color="black", linewidth=1.6, label="true factor")
    ax.plot(time, code, color=CODE, linewidth=1.3, label="learned code, mapped by a straight line")
    for at in time[frames]:
        ax.axvline(at, color="0.75", linestyle=":", linewidth=0.8, zorder=0)
    ax.tick_params(labelsize=8)


def traversal_figure(
    decode: Decode,
    start: Real[Array, " dim"],
    spread: Real[Array, " dim"],
    labels: Sequence[str],
    *,
    title: str,
    reach: float = 2.0,
    steps: int = 9,
) -> Figure:
    """What a decoder makes of each code: a row a code, from low to high, all other codes held.

    Args:
        decode: from codes, float64 (n, dim), to the probabilities of pixels, (n, 64, 64); called once.
        start: (dim,), where codes are held, such as those of a mask.
        spread: (dim,), of each code the standard deviation that it is moved by, 0 or more.
        labels: of the rows, one a code.
        title: what was trained on what; a line or more above all.
        reach: how many standard deviations to go to either side, above 0.
        steps: pictures a row, at least 2; where they are odd, the one in the middle is the start.

    Raises:
        SpecError: a value out of range, numbers of codes that disagree, values that are not finite, or a decoder that
            returns something else than probabilities of this shape.
    """
    centre, scale = vector("start", start), vector("spread", spread)
    _check_rows(centre, scale, labels)
    if isinstance(reach, bool) or not 0 < reach < math.inf:
        raise SpecError(f"reach = {reach!r}: expected a finite number above 0")
    offsets = np.linspace(-reach, reach, whole("steps", steps, 2))
    pictures = _decoded(decode, centre, scale, offsets)
    text = (
        f"Each row moves one code from {reach:g} standard deviations (sd) below the start to {reach:g} above; the "
        "other codes stay. Grey: the probability that the decoder gives each pixel of being part of the mask, black 0, "
        "white 1. A row in which nothing changes belongs to a code that is not in use."
    )
    names = ["\n".join(textwrap.fill(line, LABEL) for line in label.split("\n")) for label in labels]
    longest = max(len(line) for name in names for line in name.split("\n"))
    figure = framed(max(6.0, 0.77 * steps + 0.07 * longest + 0.2), 0.76 * len(names) + 0.3, title, [text])
    axes = figure.subplots(len(names), steps, squeeze=False)
    for row, name, strip in zip(axes, names, pictures, strict=True):
        for ax, picture in zip(row, strip, strict=True):
            ax.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
        row[0].set_ylabel(name, fontsize=8.5, rotation=0, ha="right", va="center", labelpad=4, parse_math=False)
    for k, ax in enumerate(axes[0]):
        moved = f"{offsets[k]:+.3g} sd".replace("-", "\N{MINUS SIGN}")
        ax.set_title("start" if 2 * k + 1 == steps else moved, fontsize=8.5)
    return figure


def _check_rows(start: Float64[Array, " dim"], spread: Float64[Array, " other"], labels: Sequence[str]) -> None:
    for name, count in (("spread", len(spread)), ("labels", len(labels))):
        if count != len(start):
            raise SpecError(f"{name} has {count} entries: expected {len(start)}, one a code, as start has")
    if (spread < 0).any():
        raise SpecError(f"spread of code {int(spread.argmin())} is {spread.min():g}: expected at least 0")


def _decoded(
    decode: Decode, start: Float64[Array, " dim"], spread: Float64[Array, " dim"], offsets: Float64[Array, " steps"]
) -> Float64[Array, "dim steps 64 64"]:
    """The pictures of each code at each offset."""
    dim, steps = len(start), len(offsets)
    codes = np.tile(start, (dim, steps, 1))
    codes[np.arange(dim), :, np.arange(dim)] += spread[:, None] * offsets
    found = np.asarray(decode(codes.reshape(-1, dim)), dtype=np.float64)
    if found.shape != (dim * steps, SIDE, SIDE):
        raise SpecError(f"decode returned shape {found.shape}: expected ({dim * steps}, {SIDE}, {SIDE})")
    if not ((found >= 0) & (found <= 1)).all():
        raise SpecError(
            f"decode returned {found.min():.4g} to {found.max():.4g}: expected probabilities, 0 to 1; of logits, take "
            "the sigmoid"
        )
    return found.reshape(dim, steps, SIDE, SIDE)

"""Figures of datasets and scenes; each function returns a matplotlib Figure."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ident3d.errors import DatasetError, SpecError
from ident3d.factors import Factors
from ident3d.render.pictures import render_latents
from ident3d.scenes import load_scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ident3d.datasets.pair_report import Histogram, PairReport
    from ident3d.datasets.pictures import Pictures

__all__ = ["check_figure_path", "contact_sheet", "latent_traversal", "pair_fidelity", "sample_figure", "save_figure"]

SUFFIXES = (".png", ".pdf", ".svg")
USAGE_BARS = 20


def check_figure_path(path: Path) -> None:
    """Refuse a path that no figure can be saved at, before any long work.

    Raises:
        SpecError: another suffix than .png, .pdf or .svg, or a folder that is not there.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SpecError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise SpecError(f"{path}: the folder {path.absolute().parent} is not there; make it first")


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure at 150 dots an inch.

    Raises:
        DatasetError: the disk is full or the folder cannot be written.
    """
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be written: {error.strerror or error}") from None


def contact_sheet(data: Pictures, rows: int = 4, columns: int = 8) -> Figure:
    """The first rows x columns pictures, each over a strip of bars: its latents in the unit interval.

    Args:
        data: a dataset without transforms.
        rows: rows of the grid, at least 1.
        columns: columns of the grid, at least 1.

    Raises:
        SpecError: rows or columns below 1 or absurdly many.
    """
    if not (1 <= rows <= 100 and 1 <= columns <= 100):
        raise SpecError(f"rows = {rows}, columns = {columns}: expected 1 to 100")
    count = min(len(data), rows * columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.2 * columns, 1.55 * rows), layout="constrained")
    ratios = [1.0, 0.24] * rows
    axes = figure.subplots(2 * rows, columns, height_ratios=ratios, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    for i in range(count):
        picture, latents = data.sample(i)
        row, column = divmod(i, columns)
        axes[2 * row, column].imshow(np.asarray(picture).transpose(1, 2, 0))
        axes[2 * row, column].set_title(str(i), fontsize=6, pad=1)
        bars = axes[2 * row + 1, column]
        bars.bar(np.arange(len(latents)), latents, width=0.8, color=_colours(data.factors))
        bars.set_ylim(0, 1)
        bars.set_axis_on()
        bars.set_xticks([])
        bars.set_yticks([])
    lines = [
        f"{data.name}, split {data.split}: {count} of {len(data):,} samples, {data.resolution} px, {data.origin}",
        f"bars: latents from 0 to 1, in the order {', '.join(data.factors.names)} "
        "(blue: position, orange: rotation, green: light, purple: hue)",
    ]
    wrapped = [part for line in lines for part in textwrap.wrap(line, width=max(40, 19 * columns))]
    figure.set_figheight(1.55 * rows + 0.2 + 0.15 * len(wrapped))
    figure.suptitle("\n".join(wrapped), fontsize=8)
    return figure


def sample_figure(data: Pictures, index: int) -> Figure:
    """One sample: its picture, its factors as bars with their values, its labels and its text.

    Args:
        data: a dataset of pictures; its transforms are left aside.
        index: 0 to N - 1.

    Raises:
        DatasetError: the picture is absent or damaged.
    """
    picture, latents, table = data.picture(index), data.latents[index], data.factors
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.25])
    left.imshow(picture.permute(1, 2, 0).numpy())
    left.set_axis_off()
    places = np.arange(len(table))
    right.barh(places, latents, color=_colours(table))
    shown = {"unit interval": "", "Blender units": ""}  # the axis says it; a length needs no name beside the others
    values = [f"{f.value(float(u)):.3g} {shown.get(f.unit, f.unit)}" for f, u in zip(table, latents, strict=True)]
    names = [f"{f.name}  {value}" for f, value in zip(table, values, strict=True)]
    right.set_yticks(places, names, fontsize=8)
    right.invert_yaxis()
    right.set_xlim(0, 1)
    right.set_xlabel("latent, in the unit interval", fontsize=8)
    right.tick_params(axis="x", labelsize=8)
    lines = [f"{data.name}, split {data.split}, sample {index}"]
    kinds = [f"{kind.name}: {kind.labels[table[kind.name][index]]}" for kind in table.categorical]
    lines += [", ".join(kinds)] if kinds else []
    lines += textwrap.wrap(f"“{data.text(index)}”", 90) if data.has_text else []
    figure.suptitle("\n".join(lines), fontsize=9)
    return figure


def _colours(factors: Factors) -> list[str]:
    """One colour a kind of factor: positions, rotations, light and hues are told apart at a glance."""
    kinds = {"object.location": "tab:blue", "object.rotation": "tab:orange"}
    hue, other = "tab:purple", "tab:green"
    return [hue if f.target.endswith(".hue") else kinds.get(f.target.rsplit(".", 1)[0], other) for f in factors]


def latent_traversal(
    scene: str | Path = "3dident",
    *,
    steps: int = 7,
    resolution: int = 128,
    quality: str = "standard",
    at: float = 0.5,
    blender_python: str | None = None,
) -> Figure:
    """A column a factor, from low (top) to high (bottom), all other factors held (figure 2 of Zimmermann et al. 2021).

    Args:
        scene: a bundled scene or the path of a .toml.
        steps: pictures a factor, 2 to 50.
        resolution: side of each picture in pixels.
        quality: draft, standard or paper.
        at: where the others are held, in [0, 1]; frozen factors stay where the scene holds them.
        blender_python: an interpreter that has bpy, numpy and Pillow, if not this one.

    Raises:
        SpecError: an unknown scene or quality, or values out of range.
        RenderError: Blender is absent or failed.
    """
    if not 2 <= steps <= 50:
        raise SpecError(f"steps = {steps}: expected 2 to 50")
    if not 0 <= at <= 1:
        raise SpecError(f"at = {at}: expected a point of the unit interval, 0 to 1")
    spec = load_scene(scene).spec
    factors = [f for f in spec.factor_table if f.frozen is None]
    base = np.full(len(spec.factor_table), at, np.float32)
    for column, held in spec.frozen.items():
        base[column] = held
    values = np.linspace(0.0, 1.0, steps, dtype=np.float32)
    u = np.tile(base, (steps, len(factors), 1))
    for j, factor in enumerate(factors):
        u[:, j, factor.column] = values
    pictures = render_latents(
        u.reshape(-1, len(base)), scene=scene, resolution=resolution, quality=quality, blender_python=blender_python
    )
    figure = Figure(figsize=(1.15 * len(factors) + 0.4, 1.1 * steps + 1.0), layout="constrained")
    axes = figure.subplots(steps, len(factors), squeeze=False)
    for ax, picture in zip(axes.flat, pictures, strict=True):
        ax.imshow(picture)
        ax.set_xticks([])
        ax.set_yticks([])
    for j, factor in enumerate(factors):
        span = f"{factor.low:.3g} to {factor.high:.3g}"
        axes[0, j].set_title(f"{factor.name}\n{span}\n{factor.unit}", fontsize=7)
    for i, value in enumerate(values):
        axes[i, 0].set_ylabel(f"u = {value:.2f}", fontsize=7)
    texts = [f"{spec.factor_table[column].name} at {u:g}" for column, u in spec.frozen.items()]
    always = f" (the scene holds {', '.join(texts)})" if texts else ""
    figure.suptitle(f"{spec.name}: one factor a column, all others held at u = {at:g}{always}", fontsize=9)
    return figure


def pair_fidelity(report: PairReport) -> Figure:
    """Requested against realised pairs: a panel a factor, the lengths of step and match, and how often samples serve.

    Args:
        report: from `ident3d.pair_report`.
    """
    columns = min(5, max(4, len(report.factors)))
    rows = -(-len(report.factors) // columns) + 1
    warnings = "\n".join(line for text in report.warnings for line in textwrap.wrap(text, width=36 * columns))
    figure = Figure(figsize=(2.5 * columns, 2.1 * rows + 0.8 + 0.2 * warnings.count("\n")), layout="constrained")
    how = "rendered" if report.match == "rendered" else f"matched ({report.match})"
    title = [
        f"{report.dataset}: {report.pairs:,} pairs of {report.samples:,} samples, {report.conditional}, {how}",
        "A panel a factor: the step from z to its positive, grey as requested, blue as served "
        "(W: Wasserstein distance, KS: Kolmogorov-Smirnov statistic)",
    ]
    wrapped = [line for text in title for line in textwrap.wrap(text, width=30 * columns)]
    figure.set_figheight(figure.get_figheight() + 0.2 * (len(wrapped) - 2))
    figure.suptitle("\n".join(wrapped), fontsize=9)
    figure.supxlabel(warnings, fontsize=9, color="tab:red")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, factor in zip(axes.flat, report.factors, strict=False):
        _compare(ax, factor.histogram)
        counted = factor.name in report.metric_factors
        note = "" if counted or report.match == "rendered" else " (not matched)"
        ax.set_title(f"{factor.name}{note}\nW {factor.wasserstein:.3g}, KS {factor.ks:.2f}", fontsize=8)
    _compare(axes[-1, 0], report.distances)
    lengths = "length of the step" if report.match == "rendered" else "lengths: requested step (grey),\nmatch (blue)"
    axes[-1, 0].set_title(lengths, fontsize=8)
    _usage_panel(axes[-1, 1], report)
    axes[-1, 2].text(0.0, 1.0, _numbers(report), fontsize=8, va="top", transform=axes[-1, 2].transAxes)
    return figure


def _compare(ax: Axes, histogram: Histogram) -> None:
    edges = np.array(histogram.edges)
    ax.set_axis_on()
    ax.stairs(histogram.requested, edges, fill=True, color="0.75")
    highest = max(*histogram.requested, *histogram.realised)
    ax.stairs(histogram.realised, edges, color="tab:blue", linewidth=1.2)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(0, 1.05 * highest or 1)
    ax.set_yticks([])
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.tick_params(labelsize=7)


def _usage_panel(ax: Axes, report: PairReport) -> None:
    counts = np.array(report.usage.counts)
    times = np.arange(len(counts))
    even = np.exp(times * np.log(report.usage.mean) - report.usage.mean - np.cumsum(np.log(np.maximum(times, 1))))
    # Few samples are positives hundreds of times: a bar for each number would be too thin to see.
    width = -(-len(counts) // USAGE_BARS)
    starts = times[::width]
    ax.set_axis_on()
    ax.bar(starts, np.add.reduceat(counts, starts) / counts.sum(), color="tab:blue", width=0.8 * width)
    ax.plot(starts, np.add.reduceat(even, starts), color="0.4", marker=".", markersize=3, linewidth=0.8)
    ax.set_title("times a sample is the positive\n(grey: if chosen evenly)", fontsize=8)
    every = max(1, (len(starts) - 1) // 5)
    shown = starts[: len(starts) - 1 - every // 2 : every]
    ax.set_xticks([*shown, starts[-1]], [*map(str, shown), f"{starts[-1]}+"])
    ax.set_yticks([])
    ax.tick_params(labelsize=7)


def _numbers(r: PairReport) -> str:
    lines = [f"requested step: median {r.step.median:.3g}", f"served step: median {r.realised_step.median:.3g}"]
    if r.match == "rendered":
        return "\n".join([*lines, "each z~ was rendered:", "nothing is matched"])
    lines += [f"match moves z~ by: median {r.matching.median:.3g}"]
    if r.matching_to_step is not None:
        lines += [f"    = {r.matching_to_step:.2g} times the step"]
    lines += [
        f"nearest is the anchor itself: {r.anchor_share:.1%}",
        f"never a positive: {r.usage.never:.0%} of samples",
    ]
    lines += [f"recall against brute force: {r.recall:.4f}"]
    lines += ["samples needed for a match of"] if r.needed else []
    lines += [f"    {fidelity} times the step: {samples:.1e}" for fidelity, samples in r.needed.items()]
    return "\n".join(lines)

"""Learning curves of presets side by side, and how many fewer steps one takes than another to the same score."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ident3d.baselines.paper import mlp_row
from ident3d.baselines.results import Result
from ident3d.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SpeedUp", "curve_of", "curves_figure", "speed_ups", "steps_to"]

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SpeedUp:
    """A preset's steps to the best score that `paper` reached, beside those that `paper` took.

    Attributes:
        row: of the paper's tables.
        preset: the one that is compared.
        score: r2 or mcc, what the row is scored by.
        level: the best mean score over seeds that the `paper` run reached, a fraction.
        paper_steps: after how many steps it first did.
        steps: after how many the preset first had it, interpolated between evaluations; None if it never had.
        at_once: it had it at its first evaluation already, so that `steps` is an upper bound.
    """

    row: str
    preset: str
    score: str
    level: float
    paper_steps: float
    steps: float | None
    at_once: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times fewer steps."""
        return None if self.steps is None else self.paper_steps / self.steps


def curve_of(result: Result, score: str) -> Curve:
    """(step, mean over seeds) of each evaluation that has the score."""
    points = [(point.get("step"), point.get(score)) for point in result.curve]
    return tuple(
        (int(step), statistics.fmean(values))
        for step, values in points
        if isinstance(step, int) and isinstance(values, list) and values and None not in values
    )


def steps_to(curve: Curve, level: float) -> float | None:
    """After how many steps a curve first has a level, by straight lines between evaluations; None if it never has.

    A curve that begins above the level is said to have it at its first evaluation, not before.
    """
    for i, (step, value) in enumerate(curve):
        if value >= level:
            if i == 0:
                return float(step)
            before, below = curve[i - 1]
            return before + (step - before) * (level - below) / (value - below)
    return None


def _by_row(results: Sequence[Result]) -> dict[str, dict[str, Result]]:
    """The unsupervised runs of rows, by row and preset.

    Raises:
        SpecError: none has a curve, or two are of one row and preset.
    """
    found: dict[str, dict[str, Result]] = {}
    for result in results:
        if result.experiment != "mlp" or result.row is None or result.preset is None:
            continue
        if result.settings.get("mode") != "unsupervised":
            continue
        runs = found.setdefault(result.row, {})
        if result.preset in runs:
            raise SpecError(f"row {result.row}, preset {result.preset}: two results; give a folder with one of them")
        runs[result.preset] = result
    if not found:
        raise SpecError("no unsupervised result of a row and a preset: expected at least one, e.g. of rows 1.1 and 2.1")
    return {row: found[row] for row in sorted(found, key=lambda r: tuple(map(int, r.split("."))))}


def speed_ups(results: Sequence[Result]) -> list[SpeedUp]:
    """Each preset beside `paper`, for the rows that have both.

    Args:
        results: at most one of each row and preset.

    Raises:
        SpecError: no result that could be compared, or two of a row and preset.
    """
    lines = []
    for row, runs in _by_row(results).items():
        score = mlp_row(row).score
        if "paper" not in runs:
            continue
        paper = curve_of(runs["paper"], score)
        level = max((value for _, value in paper), default=0.0)
        reached = steps_to(paper, level) or 0.0
        for preset, result in runs.items():
            if preset != "paper":
                curve = curve_of(result, score)
                at_once = bool(curve) and curve[0][1] >= level
                lines.append(SpeedUp(row, preset, score, level, reached, steps_to(curve, level), at_once))
    return lines


def curves_figure(results: Sequence[Result]) -> Figure:
    """A panel a row: score against steps for each preset, with the paper's score as a line.

    Args:
        results: at most one of each row and preset.

    Raises:
        SpecError: no result that could be drawn, or two of a row and preset.
    """
    from matplotlib.figure import Figure

    rows = _by_row(results)
    ratios = {(line.row, line.preset): line for line in speed_ups(results)}
    figure = Figure(figsize=(5.2 * len(rows), 4.2), layout="constrained")
    panels = figure.subplots(1, len(rows), squeeze=False)[0]
    for axes, (row, runs) in zip(panels, rows.items(), strict=True):
        _draw_row(axes, row, runs, ratios)
    return figure


def _draw_row(axes: Axes, row: str, runs: Mapping[str, Result], ratios: Mapping[tuple[str, str], SpeedUp]) -> None:
    published = mlp_row(row)
    colours = {"paper": "tab:gray", "fast": "tab:blue", "quick": "tab:green"}
    for preset, result in sorted(runs.items()):
        curve = curve_of(result, published.score)
        label = f"{preset}, batch {result.settings['batch']:,}: {result.steps:,} steps in {result.wall_s / 60:.0f} min"
        colour = colours.get(preset, "tab:orange")
        axes.plot([s for s, _ in curve], [100 * v for _, v in curve], "-", color=colour, label=label)
        line = ratios.get((row, preset))
        if line is not None and line.steps is not None and line.ratio is not None:
            axes.plot([line.steps, line.paper_steps], [100 * line.level] * 2, ":", color="black", linewidth=1)
            text = f"same score in {'at least ' if line.at_once else ''}{line.ratio:.0f} times fewer steps"
            place = (line.paper_steps, 100 * line.level)
            axes.annotate(text, place, (0, 4), textcoords="offset points", ha="right", fontsize=9)
    if published.unsupervised is not None:
        text = f"the paper, 300,000 steps: {published.unsupervised.mean}"
        axes.axhline(published.unsupervised.mean, color="tab:red", linestyle="--", linewidth=1, label=text)
    axes.set_xscale("log")
    axes.set_ylim(0, 103)
    axes.set_xlabel("training steps")
    axes.set_ylabel(f"{published.score.upper()} (%)")
    about = f"{published.space}, {published.conditional}; model {published.model_space}, {published.model}"
    axes.set_title(f"row {row}: {about}", fontsize=10)
    axes.legend(loc="lower right", fontsize=8)

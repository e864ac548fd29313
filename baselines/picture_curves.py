"""Learning curves of encoders of pictures: R2 and MCC on test pictures, a line a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ident3d.baselines.curves import curve_of
from ident3d.baselines.results import Result
from ident3d.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["picture_curves_figure", "run_label"]

LABELS = {"r2": "mean R2 over factors (%)", "mcc": "MCC (%)"}


def run_label(result: Result) -> str:
    """What a run of the experiment 3dident is, in a line."""
    settings, data = result.settings, result.settings["data"]
    what = settings["mode"]
    if what == "unsupervised":
        law = "" if settings["pairs"] != "matched" else f" by {settings['conditional']}"
        what = f"contrastive, {settings['pairs']} pairs{law}"
    return f"{what}: {data['samples']:,} x {data['resolution']} px, batch {settings['batch']}"


def picture_curves_figure(results: Sequence[Result]) -> Figure:
    """R2 and MCC against steps, side by side; runs that were evaluated once at most are left out.

    Args:
        results: of the experiment 3dident.

    Raises:
        SpecError: none of them has a curve.
    """
    from matplotlib.figure import Figure

    runs = [run for run in results if run.experiment == "3dident" and len(curve_of(run, "r2")) > 1]
    if not runs:
        raise SpecError("no learning curve: expected results of `ident3d-baselines 3dident` with several evaluations")
    runs.sort(key=lambda run: (run_label(run), run.finished))
    figure = Figure(figsize=(10.4, 5.0), layout="constrained")
    for axes, (score, label) in zip(figure.subplots(1, 2), LABELS.items(), strict=True):
        for run in runs:
            curve = curve_of(run, score)
            text = f"{run_label(run)}; {run.steps:,} steps in {run.wall_s / 60:.0f} min, seed {run.seeds[0]}"
            axes.plot([s for s, _ in curve], [100 * v for _, v in curve], marker=".", linewidth=1.2, label=text)
        axes.set_xlabel("training steps")
        axes.set_ylabel(f"{label}, test pictures")
        axes.set_ylim(0, 103)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    handles, texts = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", fontsize=9, frameon=False)
    return figure

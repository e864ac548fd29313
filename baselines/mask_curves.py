"""Learning curves on KITTI Masks: MCC against steps, a panel a distance in time, a line a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ident3d.baselines.curves import curve_of
from ident3d.baselines.results import Result
from ident3d.datasets.kitti_masks import FRAME_SECONDS
from ident3d.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["kitti_label", "mask_curves_figure"]

COLOURS = {"SlowVAE": "black", "beta-VAE": "tab:gray", "laplace": "tab:blue", "normal": "tab:red"}
STYLES = {"unbounded": "-", "box": "--", "sphere": ":"}


def kitti_label(result: Result) -> str:
    """What a run of the experiment kitti is, without its distance in time."""
    model, settings = _model(result), result.settings
    return model if settings["model"] == "slowvae" else f"contrastive, {model}, {settings['model_space']}"


def _model(result: Result) -> str:
    settings = result.settings
    if settings["model"] == "slowvae":
        return "beta-VAE" if settings["gamma"] == 0 else "SlowVAE"
    return str(settings["conditional"])


def mask_curves_figure(results: Sequence[Result]) -> Figure:
    """MCC by Spearman's correlation against steps: the mean over seeds, and a thin line a seed.

    Args:
        results: of the experiment kitti, all on the same data; those evaluated once at most are left out.

    Raises:
        SpecError: none of them has a curve, or they are on different data.
    """
    from matplotlib.figure import Figure

    runs = [run for run in results if run.experiment == "kitti" and len(curve_of(run, "mcc_spearman")) > 1]
    if not runs:
        raise SpecError("no learning curve: expected results of `ident3d-baselines kitti` with several evaluations")
    titles = list(dict.fromkeys(str(run.extra["title"]) for run in runs))
    if len(titles) > 1:
        raise SpecError(f"results on {' and on '.join(titles)}: expected the same data; give a folder of one")
    distances = sorted({run.settings["max_delta_t"] for run in runs})
    figure = Figure(figsize=(max(7.0, 5.2 * len(distances)), 5.2), layout="constrained")
    figure.suptitle(titles[0], fontsize=11, parse_math=False)
    handles: dict[str, Line2D] = {}
    for axes, distance in zip(figure.subplots(1, len(distances), squeeze=False)[0], distances, strict=True):
        of_panel = [run for run in runs if run.settings["max_delta_t"] == distance]
        for run in sorted(of_panel, key=lambda run: (kitti_label(run), run.finished)):
            handles.setdefault(kitti_label(run), _draw(axes, run))
        mean = FRAME_SECONDS * (distance + 1) / 2
        axes.set_title(f"positives {mean:g} s later on average (max_delta_t {distance})", fontsize=10)
        axes.set_xlabel("training steps")
        axes.set_ylabel("MCC by Spearman's correlation (%)")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    low = min(ax.get_ylim()[0] for ax in figure.axes)
    for axes in figure.axes:
        axes.set_ylim(max(0, low), 101)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _draw(axes: Axes, run: Result) -> Line2D:
    colour, style = COLOURS.get(_model(run), "tab:green"), STYLES[run.settings["model_space"]]
    points = [point for point in run.curve if isinstance(point.get("mcc_spearman"), list)]
    for k in range(len(run.seeds)):
        own = [(p["step"], 100 * p["mcc_spearman"][k]) for p in points if p["mcc_spearman"][k] is not None]
        axes.plot(*zip(*own, strict=True), style, color=colour, linewidth=0.6, alpha=0.35)
    mean = curve_of(run, "mcc_spearman")
    return axes.plot([s for s, _ in mean], [100 * v for _, v in mean], style, color=colour, linewidth=1.8)[0]

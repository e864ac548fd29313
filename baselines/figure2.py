"""R2 against the concentration of a marginal that is not uniform, for a fixed conditional.

Theorem 2 of Zimmermann et al. 2021 takes latents that are uniform on the sphere. Their sweep asks how far that can be
left: z is drawn from vMF(kappa) around a pole, z~ from vMF around z with a concentration that is held. Once the
marginal is more concentrated than the conditional, the negatives lie no further from an anchor than its positive.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ident3d.baselines.mlp import run_mlp
from ident3d.baselines.mlp_settings import MLPSettings
from ident3d.baselines.results import Result
from ident3d.baselines.training import RunOptions
from ident3d.distributions import number
from ident3d.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CONCENTRATIONS", "sweep", "sweep_figure", "sweep_settings"]

CONCENTRATIONS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Of the marginal; 0 is the uniform law."""


def sweep_settings(
    start: MLPSettings, concentrations: Sequence[float] = CONCENTRATIONS, conditional: float = 10.0
) -> dict[float, MLPSettings]:
    """The settings of each point of the sweep.

    Args:
        start: preset and changes; its spaces, laws and model are replaced.
        concentrations: kappa of the marginal, 0 for the uniform law.
        conditional: kappa of the conditional.

    Raises:
        SpecError: fewer than two concentrations, one twice, one below 0 or out of the law's range.
    """
    points = tuple(float(kappa) for kappa in concentrations)
    if len(points) < 2 or len(set(points)) < len(points) or not all(0 <= kappa < math.inf for kappa in points):
        raise SpecError(f"concentrations = {list(concentrations)}: expected at least two different ones, 0 or above")
    if not 0 <= conditional < math.inf:
        raise SpecError(f"conditional = {conditional}: expected a finite concentration")
    laws = {kappa: "uniform" if kappa == 0 else f"vmf({number(kappa)})" for kappa in sorted(points)}
    held = f"vmf({number(conditional)})"
    return {
        kappa: dataclasses.replace(
            start, space="sphere", marginal=law, conditional=held, model_space="sphere", model="vmf"
        )
        for kappa, law in laws.items()
    }


def sweep(
    points: dict[float, MLPSettings],
    seeds: Sequence[int],
    out: Path,
    *,
    preset: str | None = None,
    device: str = "auto",
    options: RunOptions | None = None,
) -> dict[float, Result]:
    """Run all points, each in a folder of its own under `out`; those that are finished are read.

    Raises:
        Ident3DError: as `run_mlp`.
        Stopped: Ctrl-C or SIGTERM; the same call goes on.
    """
    return {
        kappa: run_mlp(
            settings, seeds, out=out / f"marginal-{number(kappa)}", device=device, options=options, preset=preset
        )
        for kappa, settings in points.items()
    }


def sweep_figure(results: dict[float, Result]) -> Figure:
    """R2 in percent against the marginal's concentration, a point a seed, with a line at the conditional's.

    Args:
        results: of `sweep`, by concentration.
    """
    from matplotlib.figure import Figure

    one = next(iter(results.values()))
    held = one.settings["conditional"]
    kappas = sorted(results)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for kappa in kappas:
        scores = [100 * score for score in results[kappa].scores["r2"]]
        axes.plot([kappa] * len(scores), scores, "o", color="tab:blue", alpha=0.4, markersize=4)
    means = [100 * statistics.mean(results[kappa].scores["r2"]) for kappa in kappas]
    axes.plot(kappas, means, "-", color="tab:blue", label=f"mean of {len(one.seeds)} seeds")
    axes.axvline(
        float(held.removeprefix("vmf(").removesuffix(")")), color="tab:red", linestyle="--", label=f"conditional {held}"
    )
    # 0, the uniform law, has no place on a logarithmic axis.
    axes.set_xscale("symlog", linthresh=min([k for k in kappas if k > 0], default=1.0), linscale=0.5)
    axes.set_xticks(kappas, ["uniform" if kappa == 0 else number(kappa) for kappa in kappas])
    axes.minorticks_off()
    axes.set_xlim(kappas[0] - 0.2 * min(1.0, kappas[1]), 1.4 * kappas[-1])
    axes.set_ylim(min(0.0, *means) - 3, 103)
    axes.set_xlabel("concentration of the marginal vMF(kappa)")
    axes.set_ylabel("R2 of a linear map to the latents (%)")
    axes.set_title(
        f"Identifiability on the sphere of R^{one.settings['dim']} when latents are not uniform\n"
        f"batch {one.settings['batch']:,}, {one.steps:,} steps",
        fontsize=10,
    )
    axes.legend(loc="lower left")
    return figure

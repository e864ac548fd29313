"""The sweep of the marginal's concentration: its settings, going on, its figure."""

from __future__ import annotations

import dataclasses
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ident3d.baselines import mlp
from ident3d.baselines.figure2 import CONCENTRATIONS, sweep, sweep_figure, sweep_settings
from ident3d.baselines.mlp import MLPTask
from ident3d.baselines.mlp_settings import MLPSettings, preset_settings
from ident3d.baselines.training import RunOptions, Stopped
from ident3d.errors import DatasetError, SpecError

QUIET = RunOptions(quiet=True)


def tiny(steps: int = 4, **changes: Any) -> MLPSettings:
    start = preset_settings("quick")
    sizes: dict[str, Any] = {"dim": 3, "batch": 64, "samples": 256, "candidates": 50, "widths": (10, 30, 10)}
    return dataclasses.replace(
        start, **{**sizes, "training": dataclasses.replace(start.training, steps=steps), **changes}
    )


def test_only_the_marginal_differs() -> None:
    start = tiny(model_space="unbounded", model="normal")
    points = sweep_settings(start, conditional=25)
    assert tuple(points) == CONCENTRATIONS
    assert [points[kappa].laws()[0].text for kappa in (0, 3, 300)] == ["uniform()", "vmf(kappa=3)", "vmf(kappa=300)"]
    same = {dataclasses.replace(settings, marginal="uniform") for settings in points.values()}
    assert same == {
        dataclasses.replace(start, space="sphere", conditional="vmf(25)", model_space="sphere", model="vmf")
    }


def test_points_are_in_order_whatever_was_given() -> None:
    assert list(sweep_settings(tiny(), [10, 0, 0.5])) == [0, 0.5, 10]
    assert sweep_settings(tiny(), [10, 0.5])[0.5].marginal == "vmf(0.5)"


@pytest.mark.parametrize("wrong", [[], [1], [1, 1], [0, -1], [math.nan, 1], [1, math.nan], [1, math.inf], [0.0, -0.0]])
def test_other_concentrations_are_refused(wrong: list[float]) -> None:
    with pytest.raises(SpecError):
        sweep_settings(tiny(), wrong)


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf])
def test_other_conditionals_are_refused(wrong: float) -> None:
    with pytest.raises(SpecError):
        sweep_settings(tiny(), [0, 1], wrong)


def test_a_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = sweep_settings(tiny(), [0, 30])
    losses = MLPTask.losses

    def signalled(self: MLPTask, step: int) -> Any:
        if self.of.marginal != "uniform":
            signal.raise_signal(signal.SIGINT)
        return losses(self, step)

    monkeypatch.setattr(MLPTask, "losses", signalled)
    with pytest.raises(Stopped, match="SIGINT after step 1 of 4"):
        sweep(points, [0, 1], tmp_path, device="cpu", options=QUIET)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["marginal-0", "marginal-30"]
    trained: list[str] = []
    run = mlp._run

    def counted(settings: MLPSettings, *args: Any) -> Any:
        trained.append(settings.marginal)
        return run(settings, *args)

    monkeypatch.setattr(mlp, "_run", counted)
    results = sweep(points, [0, 1], tmp_path, device="cpu", options=QUIET)
    assert trained == ["vmf(30)"]
    assert list(results) == [0, 30]
    assert sweep(points, [0, 1], tmp_path, device="cpu", options=QUIET) == results
    assert trained == ["vmf(30)"]
    with pytest.raises(DatasetError, match=r"another run.*conditional: vmf\(10\) there, vmf\(20\) asked"):
        sweep(sweep_settings(tiny(), [0, 30], 20), [0, 1], tmp_path, device="cpu", options=QUIET)


def test_the_figure_shows_each_seed_the_mean_and_the_conditional(tmp_path: Path) -> None:
    points = sweep_settings(tiny(), [0, 2, 50], 7.5)
    results = sweep(points, [0, 1], tmp_path, device="cpu", options=QUIET)
    figure = sweep_figure(results)
    (axes,) = figure.axes
    *seeds, mean, held = axes.lines
    for line, (kappa, result) in zip(seeds, results.items(), strict=True):
        assert np.asarray(line.get_xdata()).tolist() == [kappa, kappa]
        assert np.asarray(line.get_ydata()).tolist() == pytest.approx([100 * score for score in result.scores["r2"]])
    assert np.asarray(mean.get_xdata()).tolist() == [0, 2, 50]
    middle = [50 * sum(result.scores["r2"]) for result in results.values()]
    assert np.asarray(mean.get_ydata()).tolist() == pytest.approx(middle)
    assert np.asarray(held.get_xdata()).tolist() == [7.5, 7.5]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["uniform", "2", "50"]
    low, high = axes.get_ylim()
    assert low < min(0, *middle)
    assert high > 100
    title = axes.get_title()
    assert "R^3" in title
    assert "batch 64, 4 steps" in title
    figure.savefig(tmp_path / "figure.png")


@pytest.mark.slow
def test_r2_collapses_where_the_marginal_is_the_narrower_one(tmp_path: Path) -> None:
    faster = dataclasses.replace(tiny(150).training, learning_rate=1e-2, scale_learning_rate=3e-2)
    start = tiny(batch=256, training=faster)
    results = sweep(sweep_settings(start, [0, 300], 10), [0], tmp_path, device="cpu", options=QUIET)
    uniform, narrow = (results[kappa].scores["r2"][0] for kappa in (0, 300))
    assert uniform > 0.95
    assert narrow < uniform - 0.1

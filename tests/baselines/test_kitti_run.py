"""Runs on KITTI Masks: exact resume, what a result tells, what is learned, mistakes that come before the folder."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ident3d.baselines import kitti_masks
from ident3d.baselines.kitti_masks import run_kitti
from ident3d.baselines.kitti_settings import KittiSettings
from ident3d.baselines.kitti_task import KittiTask
from ident3d.baselines.results import Result, load_result
from ident3d.baselines.runs import RunFolder
from ident3d.baselines.training import RunOptions, Stopped, TrainingSettings
from ident3d.datasets.kitti_masks import KITTI_FACTORS, KittiMasks
from ident3d.errors import DatasetError, SpecError, TrainingError
from ident3d.schema import to_plain

CPU = torch.device("cpu")
QUIET = RunOptions(log_every=2, evaluate_every=4, checkpoint_every=3, quiet=True)
SEEDS = (4, 0)
KINDS: dict[str, dict[str, Any]] = {
    "laplace": {},
    "box": {"model_space": "box", "magnitude": 3.0, "parametrisation": "log"},
    "slowvae": {"model": "slowvae"},
}
UNDISTURBED = KittiTask.losses


@functools.cache
def silhouettes(max_delta_t: int = 1, seed: int = 0) -> KittiMasks:
    """Twenty sequences of up to 30 frames."""
    return KittiMasks(synthetic=True, sequences=20, frames=30, max_delta_t=max_delta_t, seed=seed)


def tiny(steps: int = 6, **changes: Any) -> KittiSettings:
    training = TrainingSettings(steps, learning_rate=1e-3, **changes.pop("training", {}))
    return KittiSettings(**{"dim": 3, "batch": 8, "samples": 64, "training": training, **changes})


def run(settings: KittiSettings, out: Path | None = None, seeds: Sequence[int] = SEEDS, **more: Any) -> Result:
    given: dict[str, Any] = {"data": silhouettes(settings.max_delta_t), "device": "cpu", "options": QUIET, **more}
    return run_kitti(settings, given.pop("data"), seeds, out=out, **given)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have tests of their own, and take longer than these trainings."""
    monkeypatch.setattr(kitti_masks, "run_figures", lambda *of: iter(()))


# Exact resume.


def state_of(folder: Path) -> dict[str, Any]:
    state = RunFolder(folder).load_checkpoint(CPU)
    assert state is not None
    return state


def without_seconds(folder: Path) -> str:
    """All that a finished run leaves, but for times: numbers as they are written, in full."""
    state = state_of(folder)
    weights = {name: value.numpy().tobytes() for name, value in state["model"].items()}
    kept = state["optimizer"]["state"]
    moments = [kept[k][name].numpy().tobytes() for k in kept for name in ("exp_avg", "exp_avg_sq")]
    assert len(moments) >= 2 * len(weights)
    result = to_plain(load_result(folder))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for part in (*lines, *result["curve"], result):
        for name in ("seconds", "wall_s", "finished"):
            part.pop(name, None)
    return repr((weights, moments, result, lines))


def stopping(monkeypatch: pytest.MonkeyPatch, at: int, number: int = signal.SIGTERM) -> None:
    """A signal comes within a step."""

    def signalled(self: KittiTask, step: int) -> Tensor:
        if step == at:
            os.kill(os.getpid(), number)
        return UNDISTURBED(self, step)

    monkeypatch.setattr(KittiTask, "losses", signalled)


@pytest.mark.parametrize("kind", [*KINDS, "bf16"])
def test_stopped_and_continued_is_as_undisturbed(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: before the first checkpoint, and past one and a line of the log."""
    course = {"schedule": "cosine", "warmup": 0.3, "precision": "bf16" if kind == "bf16" else "float32"}
    settings = tiny(max_delta_t=5, training=course, **KINDS.get(kind, {}))
    run(settings, tmp_path / "a")
    for at, number in ((0, signal.SIGTERM), (4, signal.SIGINT)):
        stopping(monkeypatch, at, number)
        words = f"{signal.Signals(number).name} after step {at + 1} of 6; the same command goes on from"
        with pytest.raises(Stopped, match=words):
            run(settings, tmp_path / "b")
        assert state_of(tmp_path / "b")["step"] == at + 1
        assert not (tmp_path / "b" / "result.json").exists()
    monkeypatch.setattr(KittiTask, "losses", UNDISTURBED)
    run(settings, tmp_path / "b")
    assert without_seconds(tmp_path / "b") == without_seconds(tmp_path / "a")


# Results.


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_tells_all(tmp_path: Path, kind: str) -> None:
    settings = tiny(**KINDS[kind])
    result = run(settings, tmp_path, row="3.1", preset="quick")
    assert load_result(tmp_path) == result
    assert (result.experiment, result.row, result.preset, result.seeds) == ("kitti", "3.1", "quick", SEEDS)
    facts = {"name": "synthetic-silhouettes", "synthetic": True, "sequences": 20, "seed": 0, "latents": None}
    assert result.settings == {**to_plain(settings), "data": {**facts, "frames": len(silhouettes().masks)}}
    assert result.scores.keys() == result.per_factor.keys() == {"mcc_spearman", "mcc", "r2"}
    for name, values in result.scores.items():
        assert np.shape(result.per_factor[name]) == (2, 3)
        assert np.mean(result.per_factor[name], axis=1) == pytest.approx(values)
    assert result.extra["factors"] == ["centre_y", "centre_x", "area"] == list(KITTI_FACTORS.names)
    assert result.extra["title"] == "KITTI Masks (SYNTHETIC silhouettes, seed 0)"
    assert np.shape(result.extra["scales"]) == {"laplace": (2, 0), "box": (2, 3), "slowvae": (0,)}[kind]
    assert [point["step"] for point in result.curve] == [4, 6]
    last = {name: list(values) for name, values in result.scores.items()}
    assert {name: result.curve[-1][name] for name in last} == last
    assert (result.steps, result.device.split()[0]) == (6, "cpu")
    assert {"python", "torch", "numpy", "ident3d"} <= result.versions.keys()
    assert result.wall_s > 0


def test_scores_are_those_of_the_kept_weights(tmp_path: Path) -> None:
    settings = tiny(samples=100)
    result, task = run(settings, tmp_path), KittiTask(settings, silhouettes(), SEEDS, CPU)
    untrained = task.scores()
    task.model.load_state_dict(state_of(tmp_path)["model"])
    task.model.eval()
    assert {name: list(values) for name, values in result.scores.items()} == task.scores() != untrained


def test_a_finished_run_is_read_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tiny(), tmp_path, preset="quick")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir() if p.name != ".lock"}
    monkeypatch.setattr(kitti_masks, "train", lambda *args: pytest.fail("trained"))
    assert run(tiny(), tmp_path, preset="quick") == first
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = run(tiny(2), seeds=[1])
    assert list(tmp_path.iterdir()) == []
    assert run(tiny(2), seeds=[1]).scores == first.scores != run(tiny(2), seeds=[2]).scores


def test_another_runs_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"batch": 9}, {}, "batch: 8 there, 9 asked"),
        ({"conditional": "normal"}, {}, "conditional: laplace there, normal asked"),
        ({"model_space": "box"}, {}, "model_space: unbounded there, box asked"),
        ({"max_delta_t": 5}, {}, "max_delta_t: 1 there, 5 asked"),
        ({"training": {"warmup": 0.5}}, {}, r"training\.warmup: 0\.0 there, 0\.5 asked"),
        ({}, {"seeds": [0, 4]}, r"seeds: \[4, 0\] there, \[0, 4\] asked"),
        ({}, {"data": silhouettes(seed=1)}, r"data\.seed: 0 there, 1 asked"),
    ]
    stopping(monkeypatch, at=2)
    with pytest.raises(Stopped):
        run(tiny(), tmp_path)
    monkeypatch.setattr(KittiTask, "losses", UNDISTURBED)
    for finished in (False, True):
        if finished:
            run(tiny(), tmp_path)
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".lock"}
        for changes, more, words in asked:
            with pytest.raises((TrainingError, DatasetError), match=f"choose another folder.*{words}"):
                run(tiny(**changes), tmp_path, **more)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".lock"} == before
    with pytest.raises(DatasetError, match=r"row: None there, 3\.2 asked"):
        run(tiny(), tmp_path, row="3.2")


# What is learned.


def test_contrastive_training_finds_factors() -> None:
    """Untrained encoders have 0.35 to 0.45 of these factors, those of three seeds had 0.7 to 0.84 after 50 steps."""
    settings = tiny(60, max_delta_t=5, dim=10, batch=32, samples=200)
    untrained = KittiTask(settings, silhouettes(5), [0], CPU).scores()
    result = run(settings, seeds=[0], options=RunOptions(log_every=5, evaluate_every=5, quiet=True))
    assert result.scores["mcc_spearman"][0] > untrained["mcc_spearman"][0] + 0.15
    first, last = result.curve[0]["loss"][0], result.curve[-1]["loss"][0]
    # Of codes that are all alike, the loss is the logarithm of a denominator of 33 ones.
    assert first < math.log(33) + 0.1
    assert last < first - 0.7


@pytest.mark.parametrize("gamma", [0.0, 10.0])
def test_slowvae_learns_to_draw(gamma: float) -> None:
    settings = tiny(15, model="slowvae", gamma=gamma)
    curve = run(settings, seeds=[0], options=RunOptions(log_every=5, evaluate_every=5, quiet=True)).curve
    assert curve[-1]["loss"][0] < 0.6 * curve[0]["loss"][0]


# Mistakes, before training.


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        ({"steps": 0}, {}, "steps = 0: expected at least 1"),
        ({"samples": 100_000}, {}, r"samples = 100000: KITTI Masks .* has \d+ masks"),
        ({"batch": 5000}, {}, r"batch_size = 5000: expected at most \d+, as many as there are anchors"),
        ({}, {"data": silhouettes(5)}, "data of max_delta_t = 5, settings of 1"),
        ({}, {"device": "banana"}, "device = 'banana'"),
        ({}, {"seeds": []}, "at least one seed"),
        ({}, {"seeds": [0, 0]}, "each seed once"),
        ({}, {"seeds": [-1]}, "seed = -1"),
        ({"training": {"precision": "tf32"}}, {}, "precision = tf32 on cpu: expected a CUDA device"),
    ],
    ids=str,
)
def test_mistakes_come_before_the_runs_folder(
    changes: dict[str, Any], more: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KittiTask, "losses", lambda self, step: pytest.fail("trained"))
    with pytest.raises(SpecError, match=words):
        run(tiny(**changes), tmp_path / "run", **more)
    assert list(tmp_path.iterdir()) == []


def test_masks_with_a_transform_are_refused(tmp_path: Path) -> None:
    data = KittiMasks(synthetic=True, sequences=4, frames=30, transform=torch.Tensor.float)
    with pytest.raises(SpecError, match="transform, target_transform: for items"):
        run(tiny(samples=64, batch=4), tmp_path / "run", data=data)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KittiTask, "losses", lambda self, step: pytest.fail("trained"))
    (tmp_path / "file").write_text("mine")
    for out, words in ((tmp_path, "holds something else"), (tmp_path / "file", "cannot be kept there")):
        with pytest.raises(DatasetError, match=words):
            run(tiny(), out)

"""Encoders of pictures: each kind of training end to end, exact resume, what is learned, mistakes that come first."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from ident3d import Ident3D, metrics
from ident3d.baselines import threedident, threedident_scoring
from ident3d.baselines.evaluation import evaluate_codes
from ident3d.baselines.results import Result, load_result
from ident3d.baselines.runs import RunFolder
from ident3d.baselines.threedident import ThreeDIdentTask, run_threedident
from ident3d.baselines.threedident_data import open_splits
from ident3d.baselines.threedident_scoring import encode, load_encoder
from ident3d.baselines.threedident_settings import Encoding, ThreeDIdentSettings
from ident3d.baselines.training import RunOptions, Stopped, TrainingSettings
from ident3d.ceilings import Ceiling, ceilings
from ident3d.errors import DatasetError, SpecError, TrainingError
from ident3d.scenes import load_scene
from ident3d.schema import to_plain

pytest.importorskip("torchvision")

CPU = torch.device("cpu")
QUIET = RunOptions(log_every=2, evaluate_every=4, checkpoint_every=3, quiet=True)
SHOWN = ("object_x", "object_y", "object_z")
KINDS: dict[str, dict[str, Any]] = {
    "supervised": {"mode": "supervised"},
    "matched": {"conditional": "normal(0.1)"},
    "exact": {"pairs": "exact", "conditional": "laplace(scale=0.05)", "model": "laplace"},
    "augmented": {"pairs": "augmented", "model": "vmf", "encoding": Encoding(space="sphere")},
    "identity": {"mode": "identity"},
}
UNDISTURBED = ThreeDIdentTask.losses
TRAINED = [kind for kind in KINDS if kind != "identity"]


def coloured(latent: NDArray[np.float32], index: int, resolution: int) -> NDArray[np.uint8]:
    """A picture that shows the first three factors plainly: one is its red, one its green, one its blue."""
    noise = np.random.default_rng([21, index]).uniform(-8, 8, (resolution, resolution, 3))
    pixels: NDArray[np.uint8] = np.clip(30 + 195 * latent[:3].astype(np.float64) + noise, 0, 255).astype(np.uint8)
    return pixels


def network(name: str, weights: None = None, num_classes: int = 1) -> nn.Sequential:
    """In place of torchvision's: what is tested here does not depend on the kind, and milliseconds a step do."""
    layers = [nn.Conv2d(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.BatchNorm2d(64)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


@functools.cache
def ceilings_of_scene(name: str) -> tuple[Ceiling, ...]:
    return ceilings(load_scene(name).spec)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small network; the ceilings of a scene are computed once, not for every run."""
    monkeypatch.setattr("torchvision.models.get_model", network)
    monkeypatch.setattr(threedident_scoring, "ceilings", lambda spec: ceilings_of_scene(spec.name))


@pytest.fixture
def no_dci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the score that takes longer than these trainings."""
    monkeypatch.setattr(threedident_scoring, "evaluate_codes", functools.partial(evaluate_codes, with_dci=False))


@pytest.fixture(scope="module")
def fabricate(make_dataset: Callable[..., Path]) -> Iterator[Callable[..., Path]]:
    """`make_dataset`, with the pictures of `coloured`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_dataset.__globals__, "make_pixels", coloured)
        yield make_dataset


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, fabricate: Callable[..., Path]) -> Path:
    """192 pairs for training, 60 test pictures, 16 px. Read it, never write into it."""
    root = tmp_path_factory.mktemp("shown") / "data"
    fabricate(root, {"train": 192}, 96, pairs="laplace(scale=0.05)")
    return fabricate(root, {"test": 60}, 60)


def tiny(kind: str = "matched", steps: int = 10, **changes: Any) -> ThreeDIdentSettings:
    training = TrainingSettings(steps, learning_rate=1e-2, **changes.pop("training", {}))
    start = ThreeDIdentSettings(factors=SHOWN, batch=32, samples=64, training=training)
    return dataclasses.replace(start, **{**KINDS[kind], **changes})


def run(settings: ThreeDIdentSettings, data: Path, out: Path | None = None, seed: int = 4, **more: Any) -> Result:
    result = run_threedident(settings, data, seed, out=out, device="cpu", **{"options": QUIET, **more})
    assert result is not None
    return result


def state_of(folder: Path) -> dict[str, Any]:
    state = RunFolder(folder).load_checkpoint(CPU)
    assert state is not None
    return state


def without_seconds(folder: Path) -> str:
    """All that a finished run leaves, but for times: numbers as they are written, in full."""
    state = state_of(folder)
    moments = [state["optimizer"]["state"][k][name].tolist() for k in range(3) for name in ("exp_avg", "exp_avg_sq")]
    weights = {name: value.tolist() for name, value in state["model"].items()}
    result = to_plain(load_result(folder))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for part in (*lines, *result["curve"], result):
        for name in ("seconds", "wall_s", "finished"):
            part.pop(name, None)
    return repr((weights, moments, result, lines))


def stopping(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A signal comes within a step."""

    def signalled(self: ThreeDIdentTask, step: int) -> torch.Tensor:
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return UNDISTURBED(self, step)

    monkeypatch.setattr(ThreeDIdentTask, "losses", signalled)


# End to end.


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_all_there_is_to_know(tmp_path: Path, shown: Path, kind: str) -> None:
    settings = tiny(kind, samples=500)
    result = run(settings, shown, tmp_path, row="4.1", preset="quick")
    assert {p.name for p in tmp_path.iterdir()} == {".lock", "checkpoint.pt", "log.jsonl", "result.json", "codes.png"}
    assert load_result(tmp_path) == result
    assert (tmp_path / "codes.png").read_bytes().startswith(b"\x89PNG")
    steps = 0 if kind == "identity" else 10
    assert (result.experiment, result.row, result.preset, result.seeds) == ("3dident", "4.1", "quick", (4,))
    assert result.steps == steps
    training = dataclasses.replace(settings.training, steps=steps)
    facts = open_splits(shown, settings).facts()
    assert result.settings == {**to_plain(dataclasses.replace(settings, training=training)), "data": facts}
    assert (facts["factors"], facts["samples"], facts["resolution"]) == ([*SHOWN], 192, 16)
    assert [point["step"] for point in result.curve] == ([0] if kind == "identity" else [4, 8, 10])
    assert "torchvision" in result.versions
    assert result.extra["factors"] == [*SHOWN]
    assert result.extra["ranks"] == 1
    scale = {"unbounded": 0, "box": 3, "sphere": 1}[settings.encoding.space]
    assert np.size(result.extra["scales"]) == scale
    dci = result.extra["dci"]
    assert np.shape(dci["importance"]) == (3, 3)
    assert dci["names"] == [*SHOWN]
    assert result.extra["ceiling"] == {name: [1.0, 1.0] for name in SHOWN}


@pytest.mark.parametrize("kind", ["supervised", "identity"])
@pytest.mark.usefixtures("no_dci")
def test_scores_are_those_of_the_kept_encoder(tmp_path: Path, shown: Path, kind: str) -> None:
    """Of all test pictures, and of all training pictures where there are no more than are to be scored."""
    result = run(tiny(kind, samples=500), shown, tmp_path)
    stored = load_encoder(tmp_path, CPU)
    assert not stored.encoder.training
    for prefix, split, n in (("", "test", 60), ("train_", "train", 192)):
        data = Ident3D(shown, split)
        with torch.no_grad():
            codes = stored.encoder(torch.stack([data[i][0] for i in range(n)])).numpy()
        latents = data.latents[:, :3]
        for name, correlation in (("mcc", "pearson"), ("mcc_spearman", "spearman")):
            score = metrics.mcc(codes, latents, correlation=correlation)
            assert result.per_factor[prefix + name][0] == pytest.approx(score.per_factor, abs=1e-4)
            assert result.scores[prefix + name][0] == pytest.approx(score.mean, abs=1e-4)
        if split == "test":  # of training pictures, the order is random, and so is what is fitted
            assert result.per_factor["r2"][0] == pytest.approx(metrics.r2(codes, latents).per_factor, abs=1e-3)
        assert np.mean(result.per_factor[f"{prefix}r2"][0]) == pytest.approx(result.scores[f"{prefix}r2"][0])
    point = result.curve[-1]  # of as many test pictures, in their order
    assert (point["r2"], point["mcc"]) == (list(result.scores["r2"]), list(result.scores["mcc"]))
    fewer = run(tiny(kind, samples=64), shown)
    assert fewer.scores["mcc"] == result.scores["mcc"]
    assert fewer.scores["train_mcc"] != result.scores["train_mcc"]


@pytest.mark.usefixtures("no_dci")
def test_ceilings_are_those_of_the_scene(tmp_path: Path, fabricate: Callable[..., Path]) -> None:
    data = fabricate(tmp_path / "data", {"train": 64, "test": 30}, 64, scene="3dident-v1")
    names = ("object_hue", "object_x", "spotlight_hue", "ground_hue")
    result = run(tiny("identity", factors=names), data, tmp_path / "run")
    best = {c.name: c for c in ceilings_of_scene("3dident-v1")}
    assert result.settings["data"]["scene"] == "3dident-v1"
    assert result.extra["ceiling"] == {name: [best[name].r2, best[name].mcc] for name in names}
    assert result.extra["ceiling"]["object_hue"] == pytest.approx([0.963, 0.981], abs=1e-3)
    assert result.extra["ceiling"]["object_x"] == [1, 1]


# Exact resume.

CONTINUED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{kind: (kind, {}, {}) for kind in TRAINED},
    "chunked": ("matched", {"chunk": 9}, {}),
    "bf16": ("exact", {"training": {"precision": "bf16", "schedule": "cosine", "warmup": 0.3}}, {}),
    "supervised from disk": ("supervised", {}, {"cache": "disk"}),
}


@pytest.mark.usefixtures("no_dci")
@pytest.mark.parametrize("case", CONTINUED)
def test_stopped_and_continued_is_as_undisturbed(
    tmp_path: Path, shown: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the first epoch and in the second, past a checkpoint and a line of the log; epochs are 6 steps."""
    kind, changes, more = CONTINUED[case]
    settings = tiny(kind, **changes)
    data = shutil.copytree(shown, tmp_path / "data")
    run(settings, data, tmp_path / "a", **more)
    for at in (0, 6):
        stopping(monkeypatch, at)
        with pytest.raises(Stopped, match=f"SIGTERM after step {at + 1} of 10; the same command goes on from"):
            run(settings, data, tmp_path / "b", **more)
        assert state_of(tmp_path / "b")["step"] == at + 1
        assert not (tmp_path / "b" / "result.json").exists()
        monkeypatch.setattr(ThreeDIdentTask, "losses", UNDISTURBED)
    run(settings, data, tmp_path / "b", **more)
    assert without_seconds(tmp_path / "b") == without_seconds(tmp_path / "a")


@pytest.mark.usefixtures("no_dci")
def test_equal_data_elsewhere_go_on(tmp_path: Path, shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping(monkeypatch, 3)
    with pytest.raises(Stopped):
        run(tiny(), shown, tmp_path / "run")
    monkeypatch.setattr(ThreeDIdentTask, "losses", UNDISTURBED)
    result = run(tiny(), shutil.copytree(shown, tmp_path / "moved"), tmp_path / "run")
    assert run(tiny(), shown, tmp_path / "run") == result


def test_a_finished_run_is_read_not_trained(tmp_path: Path, shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tiny(), shown, tmp_path, preset="quick")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir() if p.name != ".lock"}
    monkeypatch.setattr(threedident, "train", lambda *args: pytest.fail("trained"))
    assert run(tiny(), shown, tmp_path, preset="quick") == first
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before


@pytest.mark.usefixtures("no_dci")
def test_another_runs_folder_is_refused(
    tmp_path: Path, shown: Path, fabricate: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = fabricate(tmp_path / "other", {"train": 192, "test": 60}, 96, seed=8)
    asked: list[tuple[dict[str, Any], Path, int, str]] = [
        ({"batch": 30}, shown, 4, "batch: 32 there, 30 asked"),
        ({"tau": 0.5}, shown, 4, "tau: 1.0 there, 0.5 asked"),
        ({"training": {"warmup": 0.5}}, shown, 4, "training.warmup: 0.0 there, 0.5 asked"),
        ({"encoding": Encoding(magnitude=2.0)}, shown, 4, "encoding.magnitude: 1.0 there, 2.0 asked"),
        ({"factors": SHOWN[:2]}, shown, 4, "factors: "),
        ({}, shown, 5, r"seeds: \[4\] there, \[5\] asked"),
        ({}, other, 4, r"data\.latents: "),
    ]
    folder = tmp_path / "run"
    stopping(monkeypatch, at=2)
    with pytest.raises(Stopped):
        run(tiny(), shown, folder)
    monkeypatch.setattr(ThreeDIdentTask, "losses", UNDISTURBED)
    for finished in (False, True):
        if finished:
            run(tiny(), shown, folder)
        before = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"}
        for changes, data, seed, words in asked:
            with pytest.raises((TrainingError, DatasetError), match=f"choose another folder.*{words}"):
                run(tiny(**changes), data, folder, seed)
        assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"} == before
    with pytest.raises(DatasetError, match=r"row: None there, 4\.1 asked"):
        run(tiny(), shown, folder, row="4.1")


# What is learned.


def learned(kind: str, shown: Path, steps: int = 100, **changes: Any) -> Result:
    training = {"scale_learning_rate": 1e-2, "schedule": "cosine", "warmup": 0.1, **changes.pop("training", {})}
    settings = tiny(kind, steps, **{"batch": 48, "training": training, **changes})
    return run(settings, shown, options=dataclasses.replace(QUIET, evaluate_every=50))


FIVE = Encoding(magnitude=5.0, parametrisation="log")


@pytest.mark.usefixtures("no_dci")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_supervised_finds_what_pictures_show(shown: Path, precision: str) -> None:
    result = learned("supervised", shown, encoding=Encoding(space="unbounded"), training={"precision": precision})
    assert min(result.per_factor["r2"][0]) > 0.9
    assert min(result.per_factor["train_r2"][0]) > 0.9
    assert result.curve[-1]["loss"][0] < 0.03


@pytest.mark.usefixtures("no_dci")
@pytest.mark.parametrize("changes", [{}, {"chunk": 12}, {"training": {"precision": "bf16"}}], ids=str)
def test_exact_pairs_beat_an_untrained_encoder(shown: Path, changes: dict[str, Any]) -> None:
    untrained = run(tiny("identity"), shown)
    result = learned("exact", shown, encoding=FIVE, **changes)
    assert result.scores["r2"][0] > untrained.scores["r2"][0] + 0.1
    assert result.scores["mcc"][0] > untrained.scores["mcc"][0] + 0.1
    assert result.scores["r2"][0] > 0.8


@pytest.mark.usefixtures("no_dci")
def test_matched_pairs_find_what_they_are_matched_over(shown: Path) -> None:
    names = ("object_z", "object_x")
    result = learned("matched", shown, factors=names, conditional="normal(0.05)", encoding=FIVE)
    assert result.extra["factors"] == [*names]
    assert min(result.per_factor["r2"][0]) > 0.8


@pytest.mark.usefixtures("no_dci")
def test_a_code_is_of_the_factor_in_its_place(tmp_path: Path, shown: Path) -> None:
    names = ("object_z", "object_x")
    settings = tiny("supervised", 100, factors=names, batch=48, encoding=Encoding(space="unbounded"))
    run(settings, shown, tmp_path)
    codes, latents = encode(load_encoder(tmp_path, CPU).encoder, Ident3D(shown, "test", factors=names))
    assert np.abs(codes - latents).mean() < 0.1
    assert np.abs(codes - latents[:, ::-1]).mean() > 0.2


def test_a_single_factor_is_scored_without_dci(tmp_path: Path, shown: Path) -> None:
    result = run(tiny("supervised", factors=("object_y",)), shown, tmp_path)
    assert np.shape(result.per_factor["r2"]) == (1, 1)
    assert "importance" not in result.extra["dci"]


@pytest.mark.usefixtures("no_dci")
def test_seeds_change_what_is_learned_and_nothing_else_does(shown: Path) -> None:
    one, again, other = (run(tiny(), shown, seed=seed) for seed in (1, 1, 2))
    assert (one.scores, one.extra) == (again.scores, again.extra)
    assert one.scores != other.scores


# Mistakes, before training.


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreeDIdentTask, "losses", lambda self, step: pytest.fail("trained"))


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"steps": 0}, {}, "steps = 0: expected at least 1"),
        ({}, {"device": "banana"}, "device = 'banana'"),
        ({}, {"seed": -1}, "seed = -1"),
        ({}, {"cache": "tape"}, "cache = 'tape'"),
        ({"pairs": "augmented"}, {"cache": "device"}, "cache = device with pairs = augmented"),
        ({"training": {"precision": "tf32"}}, {}, "precision = tf32 on cpu: expected a CUDA device"),
        ({"conditional": "vmf(10)"}, {}, "vmf over"),
        ({"encoding": Encoding("resnet17")}, {}, "encoder = 'resnet17': expected a classifier"),
    ],
    ids=str,
)
def test_mistakes_come_before_training(changes: Any, options: Any, words: str, shown: Path, tmp_path: Path) -> None:
    given = {"device": "cpu", "options": QUIET, **options}
    with pytest.raises(SpecError, match=words):
        run_threedident(tiny(**changes), shown, out=tmp_path / "run", **given)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.usefixtures("untrained")
def test_too_few_test_pictures_are_refused(tmp_path: Path, shown: Path, fabricate: Callable[..., Path]) -> None:
    few = fabricate(tmp_path / "few", {"test": 9}, 9)
    with pytest.raises((SpecError, DatasetError), match=r"9 .*expected at least"):
        run(tiny("supervised"), shown, tmp_path / "run", test_data=few)


@pytest.mark.usefixtures("no_dci")
def test_a_damaged_picture_is_named_or_left_out(tmp_path: Path, shown: Path) -> None:
    data = shutil.copytree(shown, tmp_path / "data")
    shard = data / "train" / "train-000001.tar"
    bytes_ = bytearray(shard.read_bytes())
    place = bytes_.index(b"IDAT") + 40
    bytes_[place : place + 8] = bytes(8)
    shard.write_bytes(bytes_)
    with pytest.raises(DatasetError, match=r"train-000001\.tar"):
        run(tiny("supervised"), data, tmp_path / "run")
    with pytest.warns(UserWarning, match=r"train-000001\.tar"):
        result = run(tiny("supervised"), data, tmp_path / "run", on_error="skip")
    assert result.steps == 10

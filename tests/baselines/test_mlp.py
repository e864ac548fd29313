"""The synthetic benchmark: seeds are their own, runs go on exactly, factors are found, mistakes come first."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ident3d.baselines import mlp
from ident3d.baselines.devices import precision_context
from ident3d.baselines.mlp import MLPTask, run_mlp
from ident3d.baselines.mlp_settings import MLPSettings, preset_settings, row_settings
from ident3d.baselines.results import Result, load_result
from ident3d.baselines.runs import RunFolder
from ident3d.baselines.training import RunOptions, Stopped, train
from ident3d.errors import BusyError, DatasetError, SpecError, TrainingError
from ident3d.metrics import mcc, r2
from ident3d.schema import to_plain

CPU = torch.device("cpu")
QUIET = RunOptions(log_every=5, evaluate_every=10, checkpoint_every=4, quiet=True)
SIZES: dict[str, Any] = {"dim": 3, "batch": 32, "samples": 200, "candidates": 50, "widths": (10, 20, 10)}
SPHERE: dict[str, Any] = {"space": "sphere", "conditional": "vmf(10)", "model_space": "sphere", "model": "vmf"}


def tiny(preset: str = "quick", steps: int = 12, **changes: Any) -> MLPSettings:
    start = preset_settings(preset)
    training = dataclasses.replace(start.training, steps=steps, **changes.pop("training", {}))
    return dataclasses.replace(start, training=training, **{**SIZES, **changes})


def without_seconds(folder: Path) -> str:
    """All that a finished run leaves, but for times: numbers as they are written, in full."""
    state = RunFolder(folder).load_checkpoint(CPU)
    assert state is not None
    weights = {name: value.tolist() for name, value in state["model"].items()}
    result = to_plain(load_result(folder))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for part in (*lines, *result["curve"], result):
        for name in ("seconds", "wall_s", "finished"):
            part.pop(name, None)
    return repr((weights, result, lines))


def stopping(monkeypatch: pytest.MonkeyPatch, at: int, number: int = signal.SIGTERM) -> None:
    """A signal comes within a step."""
    losses = MLPTask.losses

    def signalled(self: MLPTask, step: int) -> torch.Tensor:
        if step == at:
            os.kill(os.getpid(), number)
        return losses(self, step)

    monkeypatch.setattr(MLPTask, "losses", signalled)


# Exact resume.


@pytest.mark.parametrize("mode", ["unsupervised", "supervised"])
@pytest.mark.parametrize("laws", [{}, SPHERE], ids=["box", "sphere"])
@pytest.mark.parametrize("preset", ["paper", "quick"])
def test_stopped_and_continued_is_as_undisturbed(
    tmp_path: Path, mode: str, laws: dict[str, Any], preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(preset, mode=mode, **laws)
    run_mlp(settings, [4, 1], out=tmp_path / "a", device="cpu", options=QUIET)
    stopping(monkeypatch, at=6)
    with pytest.raises(Stopped, match="SIGTERM after step 7 of 12; the same command goes on from"):
        run_mlp(settings, [4, 1], out=tmp_path / "b", device="cpu", options=QUIET)
    assert not (tmp_path / "b" / "result.json").exists()
    monkeypatch.undo()
    run_mlp(settings, [4, 1], out=tmp_path / "b", device="cpu", options=QUIET)
    assert without_seconds(tmp_path / "b") == without_seconds(tmp_path / "a")
    assert {p.name for p in (tmp_path / "b").iterdir()} == {".lock", "checkpoint.pt", "log.jsonl", "result.json"}


def test_killed_and_continued_is_as_undisturbed(tmp_path: Path) -> None:
    code = (
        "import test_mlp as t, pytest; from pathlib import Path; m = pytest.MonkeyPatch(); t.stopping(m, 9, 9);"
        f"t.run_mlp(t.tiny(), [4, 1], out=Path({str(tmp_path / 'b')!r}), device='cpu', options=t.QUIET)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (RunFolder(tmp_path / "b").load_checkpoint(CPU) or {})["step"] == 8
    for folder in ("a", "b"):
        run_mlp(tiny(), [4, 1], out=tmp_path / folder, device="cpu", options=QUIET)
    assert without_seconds(tmp_path / "b") == without_seconds(tmp_path / "a")


def test_a_finished_run_is_read_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_mlp(tiny(), [0], out=tmp_path, device="cpu", options=QUIET, preset="quick")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir() if p.name != ".lock"}
    monkeypatch.setattr(mlp, "_run", lambda *args: pytest.fail("trained"))
    assert run_mlp(tiny(), [0], out=tmp_path, device="cpu", options=QUIET, preset="quick") == first
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before


# Seeds.


@pytest.mark.parametrize("laws", [{}, SPHERE, {"space": "unbounded", "marginal": "normal(1)"}], ids=["box", "s", "r"])
def test_a_seed_is_the_same_alone_and_beside_others(laws: dict[str, Any]) -> None:
    together = MLPTask(tiny(**laws), [7, 0, 3], CPU)
    state = together.model.state_dict()
    for k, seed in enumerate([7, 0, 3]):
        alone = MLPTask(tiny(**laws), [seed], CPU)
        assert torch.equal(alone.mixing.weights[:, 0], together.mixing.weights[:, k])
        assert torch.equal(alone.truth[0], together.truth[k])
        for one, beside in zip(alone.pairs(5), together.pairs(5), strict=True):
            assert torch.equal(one[0], beside[k])
        for name, value in alone.model.state_dict().items():
            # The whitening is computed from observations, in the order that suits the batch.
            torch.testing.assert_close(value[0], state[name][k], rtol=1e-4, atol=1e-5)
            assert "encoder" not in name or torch.equal(value[0], state[name][k])


def test_scores_are_the_same_alone_and_beside_others() -> None:
    settings = tiny(steps=30)
    together = run_mlp(settings, [5, 2, 9], device="cpu", options=QUIET)
    for k, seed in enumerate([5, 2, 9]):
        alone = run_mlp(settings, [seed], device="cpu", options=QUIET)
        for name in ("r2", "mcc", "mcc_spearman"):
            assert alone.scores[name][0] == pytest.approx(together.scores[name][k], abs=1e-3)
    assert len(set(together.scores["r2"])) == 3


def test_pairs_are_functions_of_seed_and_step_alone() -> None:
    task, other = MLPTask(tiny(), [0, 1], CPU), MLPTask(tiny(mode="supervised", layers=1), [0, 1], CPU)
    before = torch.get_rng_state()
    first = [task.pairs(step) for step in (3, 4)]
    torch.rand(5)
    again = [other.pairs(step) for step in (3, 4)]
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    torch.set_rng_state(before)
    distinct = [*first[0], *first[1]]
    flat = [points[s] for points in distinct for s in range(2)]
    assert all(not torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i])


# What is learned.


def learned(seeds: Sequence[int] = (0,), steps: int = 150, **changes: Any) -> Result:
    faster = {"learning_rate": 1e-2, "scale_learning_rate": 3e-2}
    wide = {"batch": 256, "samples": 512, "widths": (10, 50, 50, 10), "training": faster}
    settings = tiny(steps=steps, **{**wide, **changes})
    return run_mlp(settings, seeds, device="cpu", options=dataclasses.replace(QUIET, evaluate_every=75))


@pytest.mark.parametrize(
    ("laws", "mcc_too"),
    [({}, True), (SPHERE, False), ({"model_space": "unbounded"}, True)],
    ids=["box", "sphere", "unbounded"],
)
def test_factors_are_found(laws: dict[str, Any], mcc_too: bool) -> None:
    result = learned(**laws)
    assert result.scores["r2"][0] > 0.93
    assert result.scores["mcc"][0] > (0.9 if mcc_too else 0)
    assert result.curve[0]["r2"][0] > 0.5
    assert result.curve[-1]["loss"][0] < 5


@pytest.mark.parametrize("laws", [{}, SPHERE], ids=["box", "sphere"])
def test_supervised_finds_each_factor_in_its_place(laws: dict[str, Any]) -> None:
    result = learned(mode="supervised", **laws)
    assert min(result.per_factor["r2"][0]) > 0.97
    assert result.scores["mcc"][0] > 0.97
    assert result.curve[-1]["loss"][0] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("row", ["1.2", "1.9", "1.11", "2.1", "2.3", "2.6"])
def test_rows_are_learned_by_seeds_side_by_side(row: str) -> None:
    of_row = row_settings(row, "quick")
    names = ("space", "marginal", "conditional", "model_space", "model")
    result = learned([0, 1], 400, **{name: getattr(of_row, name) for name in names})
    assert min(result.scores[{"1": "r2", "2": "mcc"}[row[0]]]) > 0.9


@pytest.mark.parametrize("laws", [{}, SPHERE], ids=["box", "sphere"])
def test_bf16_learns(laws: dict[str, Any]) -> None:
    faster = {"learning_rate": 1e-2, "scale_learning_rate": 3e-2, "precision": "bf16"}
    assert learned(training=faster, **laws).scores["r2"][0] > 0.9


def test_bf16_is_for_the_hidden_layers_alone() -> None:
    """Observations rounded to three digits would be noise to the whitening, the size of a pair's distance."""
    dtypes: dict[str, list[torch.dtype]] = {"mixing": [], "whitening": [], "hidden": [], "output": []}
    task = MLPTask(tiny(), [0], CPU)
    assert task.encoder is not None
    parts = {"mixing": task.mixing, "whitening": task.model[0], "hidden": task.encoder.layers[0]}  # type: ignore[index]
    for name, part in {**parts, "output": task.encoder.output}.items():
        part.register_forward_hook(lambda module, given, made, name=name: dtypes[name].append(made.dtype))
    with precision_context("bf16", CPU):
        losses = task.losses(0)
    assert losses.dtype == torch.float32
    assert dtypes == {
        **{name: [torch.float32] for name in ("mixing", "whitening", "output")},
        "hidden": [torch.bfloat16],
    }


def test_torchs_own_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        run_mlp(tiny(steps=2), [0], device="cpu", options=QUIET)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.slow
def test_compiled_is_as_not_compiled(tmp_path: Path) -> None:
    settings = tiny(steps=8)
    plain = run_mlp(settings, [0, 1], device="cpu", options=QUIET)
    # In a process of its own: torch.compile cannot look through the checks of shapes that tests put in.
    code = f"""
from pathlib import Path
from ident3d.baselines.mlp import run_mlp
from ident3d.baselines.mlp_settings import MLPSettings
from ident3d.baselines.training import RunOptions, TrainingSettings
options = RunOptions(quiet=True, compile=True)
run_mlp({settings!r}, [0, 1], out=Path({str(tmp_path)!r}), device="cpu", options=options)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load_result(tmp_path).scores["r2"] == pytest.approx(plain.scores["r2"], abs=1e-3)
    assert all("_orig_mod" not in name for name in (RunFolder(tmp_path).load_checkpoint(CPU) or {})["model"])


# Modes and scores.


def test_identity_scores_the_observations(tmp_path: Path) -> None:
    settings = tiny(mode="identity", steps=50)
    result = run_mlp(settings, [3, 0], out=tmp_path, device="cpu", options=QUIET)
    task = MLPTask(settings, [3, 0], CPU)
    x, z = task.mixing(task.truth), task.truth
    for k in range(2):
        assert result.scores["r2"][k] == pytest.approx(float(r2(x[k], z[k])))
        assert result.scores["mcc"][k] == pytest.approx(float(mcc(x[k], z[k])))
        assert result.scores["mcc_spearman"][k] == pytest.approx(float(mcc(x[k], z[k], correlation="spearman")))
    assert (result.steps, len(result.curve), list(task.model.parameters())) == (0, 1, [])
    assert 0 < min(result.scores["mcc"]) < max(result.scores["r2"]) <= 1
    assert run_mlp(settings, [3, 0], out=tmp_path, device="cpu", options=QUIET) == result


def test_the_losses_are_those_of_the_settings() -> None:
    """InfoNCE of the representations, as written out, over (seeds, batch); the mean squared error of the latents."""
    task = MLPTask(tiny(batch=6, tau=0.7, model="gennorm(3)"), [0, 1], CPU)
    z, positives = task.pairs(2)
    f = [task.model(task.mixing(points)).detach().double().numpy() for points in (z, positives)]
    expected = []
    for x, y in zip(*f, strict=True):
        near = np.exp(-(np.abs(x - y) ** 3).sum(1) / 0.7)
        far = np.exp(-(np.abs(x[:, None] - x[None]) ** 3).sum(2) / 0.7).sum(1)
        expected.append(float(-np.log(near / (near + far)).mean()))
    assert task.losses(2).tolist() == pytest.approx(expected, rel=1e-4)
    supervised = MLPTask(tiny(batch=6, mode="supervised"), [0, 1], CPU)
    error = supervised.model(supervised.mixing(z)) - z
    assert supervised.losses(2).tolist() == pytest.approx(error.square().mean((1, 2)).tolist())


def test_the_switches_of_the_loss_reach_it() -> None:
    """Both leave terms of the denominator out."""
    whole, *fewer = (tiny(), tiny(include_self=False), tiny(positive_in_denominator=False))
    assert all(MLPTask(of, [0], CPU).losses(0).item() < MLPTask(whole, [0], CPU).losses(0).item() for of in fewer)


def test_a_result_tells_all(tmp_path: Path) -> None:
    settings = tiny(model_space="sphere", model="vmf", space="sphere", conditional="normal(0.05)")
    result = run_mlp(settings, [0, 1], out=tmp_path, device="cpu", options=QUIET, row="1.4", preset="quick")
    assert load_result(tmp_path) == result
    assert (result.row, result.preset, result.seeds, result.steps) == ("1.4", "quick", (0, 1), 12)
    assert result.settings == to_plain(settings)
    assert [len(rows) for rows in result.per_factor["mcc"]] == [3, 3]
    assert np.mean(result.per_factor["r2"], axis=1) == pytest.approx(result.scores["r2"])
    assert [point["step"] for point in result.curve] == [10, 12]
    assert result.curve[-1]["r2"] == list(result.scores["r2"])
    assert np.shape(result.extra["scales"]) == (2, 1)
    assert np.shape(result.extra["mixing"]["conditions"]) == (2, 3)
    assert result.wall_s > 0
    assert run_mlp(settings, [0], device="cpu", options=QUIET).wall_s > 0


# Mistakes, before training.


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MLPTask, "losses", lambda self, step: pytest.fail("trained"))


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"steps": 0}, {}, "steps = 0: expected at least 1"),
        ({}, {"device": "banana"}, "device = 'banana'"),
        ({}, {"seeds": []}, "at least one seed"),
        ({}, {"seeds": [0, 0]}, "each seed once"),
        ({}, {"seeds": [-1]}, "seed = -1"),
        ({"training": {"precision": "tf32"}}, {}, "precision = tf32 on cpu: expected a CUDA device"),
        ({"layers": 0}, {}, "layers = 0"),
        ({"candidates": 0}, {}, "candidates = 0"),
        ({"widths": (10, 0)}, {}, "width = 0"),
    ],
)
def test_mistakes_come_before_training(changes: Any, options: Any, words: str, tmp_path: Path) -> None:
    given = {"seeds": [0], "device": "cpu", **options}
    with pytest.raises(SpecError, match=words):
        run_mlp(tiny(**changes), given.pop("seeds"), out=tmp_path / "run", options=QUIET, **given)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.usefixtures("untrained")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_that_is_absent_leaves_nothing(tmp_path: Path) -> None:
    for settings, device in ((tiny(), "cuda"), (tiny(training={"precision": "tf32"}), "auto")):
        with pytest.raises(SpecError):
            run_mlp(settings, [0], out=tmp_path / "run", device=device, options=QUIET)
    assert list(tmp_path.iterdir()) == []


def test_another_runs_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping(monkeypatch, at=2)
    with pytest.raises(Stopped):
        run_mlp(tiny(), [0], out=tmp_path, device="cpu", options=QUIET)
    other = tiny(batch=33, training={"learning_rate": 0.5})
    for finished in (False, True):
        if finished:
            monkeypatch.undo()
            run_mlp(tiny(), [0], out=tmp_path, device="cpu", options=QUIET)
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".lock"}
        with pytest.raises((TrainingError, DatasetError)) as caught:
            run_mlp(other, [0, 1], out=tmp_path, device="cpu", options=QUIET)
        for words in ("batch: 32 there, 33 asked", "training.learning_rate: 0.003 there, 0.5 asked"):
            assert words in str(caught.value)
        assert "seeds: [0] there, [0, 1] asked" in str(caught.value)
        assert "choose another folder" in str(caught.value)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".lock"} == before


@pytest.mark.usefixtures("untrained")
def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out, words in ((tmp_path, "holds something else"), (tmp_path / "file", "cannot be kept there")):
        with pytest.raises(DatasetError, match=words):
            run_mlp(tiny(), [0], out=out, device="cpu", options=QUIET)
    run = RunFolder(tmp_path / "run")
    with run.lock(), pytest.raises(BusyError, match="is at work in it"):
        run_mlp(tiny(), [0], out=run.path, device="cpu", options=QUIET)
    run.checkpoint.write_text("damaged")
    with pytest.raises(TrainingError, match="a damaged checkpoint"):
        run_mlp(tiny(), [0], out=run.path, device="cpu", options=QUIET)
    run.result.write_text("{}")
    with pytest.raises(DatasetError, match=r"result\.json"):
        run_mlp(tiny(), [0], out=run.path, device="cpu", options=QUIET)


def test_what_diverges_is_named(tmp_path: Path) -> None:
    """Bounds beyond float32: at the second step, or after the last one."""
    for steps, words in (
        (3, "step 1: the loss of seed 0 is not finite"),
        (1, "after step 1: no scores: codes: .* not finite"),
    ):
        settings = tiny(steps=steps, training={"scale_learning_rate": 1e4, "warmup": 0.0})
        with pytest.raises(TrainingError, match=words):
            run_mlp(settings, [0], out=tmp_path / str(steps), device="cpu", options=QUIET)
        assert not (tmp_path / str(steps) / "checkpoint.pt").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_gpu_learns(precision: Any) -> None:
    settings = tiny(steps=150, batch=512, samples=512, training={"learning_rate": 1e-2, "precision": precision})
    task = MLPTask(settings, [0, 1], torch.device("cuda"))
    assert min(train(task, settings.training, QUIET).curve[-1]["r2"]) > 0.85

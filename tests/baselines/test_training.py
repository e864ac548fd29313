"""The trainer, on a toy: stopped and continued gives what undisturbed gives; what is not finite is named."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ident3d.baselines.runs import RunFolder
from ident3d.baselines.training import RunOptions, Stopped, Task, Trained, TrainingSettings, train
from ident3d.datasets.batches import generator_of
from ident3d.errors import SpecError, TrainingError

STEPS = 23
SETTINGS = TrainingSettings(STEPS, 0.05, scale_learning_rate=0.01, schedule="cosine", warmup=0.2)
OPTIONS = RunOptions(log_every=5, evaluate_every=10, checkpoint_every=4, quiet=True)
TRUE = torch.tensor([1.0, -2.0, 0.5])
Hook = Callable[["Line"], Tensor | None]


class Weights(nn.Module):
    """w and a scale of each seed; `unused` gets no gradient."""

    def __init__(self, seeds: int) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3).repeat(seeds, 1))
        self.scale = nn.Parameter(torch.ones(seeds, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.bmm(x, self.weight.unsqueeze(2)).squeeze(2) * self.scale
        return y


class Line(Task):
    """Linear regression; `at` holds what is done at a step, and what it returns is added to the losses."""

    def __init__(self, seeds: tuple[int, ...] = (3, 8), at: Mapping[int, Hook] | None = None, **of: Any) -> None:
        self.seeds, self.device, self.of = seeds, torch.device("cpu"), of
        self.at = {} if at is None else at
        self.weights = Weights(len(seeds))
        self.model = self.weights
        self.modes: set[tuple[str, bool, bool]] = set()

    def losses(self, step: int) -> Tensor:
        self.modes.add(("losses", self.model.training, torch.is_grad_enabled()))
        x = torch.stack([torch.randn(16, 3, generator=generator_of("line", s, step)) for s in self.seeds])
        losses: Tensor = (self.model(x) - x @ TRUE).square().mean(1)
        extra = self.at[step](self) if step in self.at else None
        return losses if extra is None else losses + extra

    def scores(self) -> dict[str, list[float]]:
        self.modes.add(("scores", self.model.training, torch.is_grad_enabled()))
        off = (self.weights.weight * self.weights.scale - TRUE).square().sum(1)
        return {"r2": (1 - off / TRUE.square().sum()).tolist(), "mcc": [0.5] * len(self.seeds)}

    def settings(self) -> dict[str, Any]:
        return {"task": "line", "seeds": list(self.seeds), "of": self.of}

    def scale_parameters(self) -> list[nn.Parameter]:
        return [self.weights.scale]


def kill(number: int) -> Hook:
    return lambda task: os.kill(os.getpid(), number)


def state_of(task: Line, trained: Trained, folder: Path) -> str:
    """All that a run leaves, but for the seconds, as a text that is equal for equal bits."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k != "seconds"} for line in [*lines, *trained.curve]]
    return repr(([(k, v.tolist()) for k, v in task.model.state_dict().items()], kept))


def undisturbed(folder: Path, settings: TrainingSettings = SETTINGS, options: RunOptions = OPTIONS) -> str:
    task = Line()
    return state_of(task, train(task, settings, options, RunFolder(folder)), folder)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [0, 4, 6, 9, 20, STEPS - 1])
def test_stopped_and_continued_is_as_undisturbed(tmp_path: Path, at: int, number: int, schedule: Any) -> None:
    settings = TrainingSettings(STEPS, 0.05, scale_learning_rate=0.01, schedule=schedule, warmup=0.2)
    task = Line(at={at: kill(number)})
    words = f"after step {at + 1} of 23; the same command goes on from {tmp_path / 'b'}"
    with pytest.raises(Stopped, match=words) as stop:
        train(task, settings, OPTIONS, RunFolder(tmp_path / "b"))
    assert str(stop.value).startswith(signal.Signals(number).name)
    again = Line()
    trained = train(again, settings, OPTIONS, RunFolder(tmp_path / "b"))
    assert state_of(again, trained, tmp_path / "b") == undisturbed(tmp_path / "a", settings)


def test_many_stops_and_uneven_intervals_change_nothing(tmp_path: Path) -> None:
    options = RunOptions(log_every=7, evaluate_every=3, checkpoint_every=5, quiet=True)
    for at in (1, 2, 8, 15):
        with pytest.raises(Stopped):
            train(Line(at={at: kill(signal.SIGINT)}), SETTINGS, options, RunFolder(tmp_path / "b"))
    task = Line()
    trained = train(task, SETTINGS, options, RunFolder(tmp_path / "b"))
    assert state_of(task, trained, tmp_path / "b") == undisturbed(tmp_path / "a", options=options)


@pytest.mark.parametrize("at", [2, 11])
def test_killed_and_continued_is_as_undisturbed(tmp_path: Path, at: int) -> None:
    """Killed before the first checkpoint, and after the second, with lines of the log past it."""
    options = RunOptions(log_every=2, evaluate_every=5, checkpoint_every=4, quiet=True)
    code = (
        "from pathlib import Path; from test_training import *;"
        f"train(Line(at={{{at}: kill(9)}}), SETTINGS, {options!r}, RunFolder(Path({str(tmp_path / 'b')!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=False)
    assert done.returncode == -signal.SIGKILL
    log = tmp_path / "b" / "log.jsonl"
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()][-1] > at // 4 * 4
    with open(log, "a") as file:
        file.write('{"step": 3, "lo')
    task = Line()
    trained = train(task, SETTINGS, options, RunFolder(tmp_path / "b"))
    assert state_of(task, trained, tmp_path / "b") == undisturbed(tmp_path / "a", options=options)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    before = undisturbed(tmp_path)
    checkpoint = (tmp_path / "checkpoint.pt").read_bytes()

    def refuse(task: Line) -> None:
        raise AssertionError("trained")

    task = Line(at=dict.fromkeys(range(STEPS), refuse))
    assert state_of(task, train(task, SETTINGS, OPTIONS, RunFolder(tmp_path)), tmp_path) == before
    assert (tmp_path / "checkpoint.pt").read_bytes() == checkpoint


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    def twice(task: Line) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt) as stop:
        train(Line(at={9: twice}), SETTINGS, OPTIONS, RunFolder(tmp_path))
    assert not isinstance(stop.value, Stopped)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    state = RunFolder(tmp_path).load_checkpoint("cpu")
    assert state is not None
    assert state["step"] == 8


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = train(Line(), SETTINGS, OPTIONS)
    assert [point["step"] for point in trained.curve] == [10, 20, 23]
    assert trained.seconds > 0
    with pytest.raises(Stopped, match="SIGTERM after step 3 of 23; nothing is kept"):
        train(Line(at={2: kill(signal.SIGTERM)}), SETTINGS, OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_it_trains_in_threads_too() -> None:
    """Signals belong to the main thread."""
    curves: list[Any] = []
    thread = threading.Thread(target=lambda: curves.append(train(Line(), SETTINGS, OPTIONS).curve))
    thread.start()
    thread.join()
    assert curves[0][-1]["r2"] == train(Line(), SETTINGS, OPTIONS).curve[-1]["r2"]


def test_a_line_is_learned_and_logged(tmp_path: Path) -> None:
    task = Line()
    trained = train(task, TrainingSettings(300, 0.05), RunOptions(100, 150, 1000, quiet=True), RunFolder(tmp_path))
    assert min(trained.curve[-1]["r2"]) > 0.999
    assert task.modes == {("losses", True, True), ("scores", False, False)}
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], "r2" in line) for line in lines] == [
        *[(100, False), (150, False), (150, True), (200, False), (300, False), (300, True)]
    ]
    assert lines[0]["learning_rate"] == 0.05
    assert all(len(line["loss"]) == 2 for line in lines)
    assert lines[-1]["loss"][0] < lines[0]["loss"][0] / 100
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert trained.seconds >= lines[-1]["seconds"] - 0.001


def test_a_logged_loss_is_the_mean_since_the_last_line(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Watched(Line):
        def losses(self, step: int) -> Tensor:
            losses = super().losses(step)
            seen.append(losses.detach().clone())
            return losses

    train(Watched(), SETTINGS, RunOptions(5, 8, 100, quiet=True), RunFolder(tmp_path))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "r2" not in line] == [5, 8, 10, 15, 16, 20, 23]
    last = 0
    for line, before in zip(lines, [{}, *lines], strict=False):
        if "r2" in line:
            assert (line["step"], line["loss"]) == (before["step"], before["loss"])
        else:
            expected = torch.stack(seen[last : line["step"]]).mean(0)
            torch.testing.assert_close(torch.tensor(line["loss"]), expected)
            last = line["step"]


def test_zero_steps_are_one_evaluation(tmp_path: Path) -> None:
    trained = train(Line(), TrainingSettings(0), OPTIONS, RunFolder(tmp_path))
    (point,) = trained.curve
    assert set(point) == {"step", "r2", "mcc", "seconds"}
    assert point["step"] == 0
    again = train(Line(), TrainingSettings(0), OPTIONS, RunFolder(tmp_path))
    assert again.curve == trained.curve
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_seeds_do_not_see_each_other() -> None:
    beside, alone = Line((3, 8)), Line((8,))
    for task in (beside, alone):
        train(task, SETTINGS, OPTIONS)
    assert torch.equal(beside.weights.weight[1:], alone.weights.weight)


@pytest.mark.parametrize(("rate", "moved"), [(None, True), (0.0, False), (0.01, True)])
def test_scales_have_a_rate_of_their_own(rate: float | None, moved: bool) -> None:
    task = Line()
    train(task, TrainingSettings(1, 0.05, scale_learning_rate=rate), OPTIONS)
    assert (not torch.equal(task.weights.scale, torch.ones(2, 1))) == moved
    if moved:  # the first step of Adam is as long as its rate
        step = (task.weights.scale - 1).abs()
        torch.testing.assert_close(step, torch.full((2, 1), rate or 0.05), rtol=1e-3, atol=0)


# What is not finite.


def bad_loss(task: Line) -> Tensor:
    return torch.tensor([0.0, math.nan])


def bad_gradient(task: Line) -> Tensor:
    """0, with a gradient of 1 / 0 times 0."""
    return (task.weights.scale * 0).sqrt().sum(1)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (bad_loss, "step 10: the loss of seed 8 is not finite"),
        (lambda task: torch.tensor([math.inf, math.nan]), "step 10: the loss of seed 3 is not finite"),
        (bad_gradient, "step 10: the losses are finite, the gradient of scale is not"),
    ],
)
def test_what_is_not_finite_stops_the_run(tmp_path: Path, bad: Hook, words: str) -> None:
    with pytest.raises(TrainingError) as caught:
        train(Line(at={10: bad}), SETTINGS, OPTIONS, RunFolder(tmp_path))
    assert str(caught.value).startswith(words)
    assert f"the last good checkpoint is that of step 8, {tmp_path / 'checkpoint.pt'}" in str(caught.value)
    state = RunFolder(tmp_path).load_checkpoint("cpu")
    assert state is not None
    assert state["step"] == 8
    assert all(bool(v.isfinite().all()) for v in state["model"].values())
    task = Line()  # the trouble gone, it goes on from there
    trained = train(task, SETTINGS, OPTIONS, RunFolder(tmp_path))
    assert state_of(task, trained, tmp_path) == undisturbed(tmp_path / "a")


@pytest.mark.parametrize(("kept", "words"), [(True, "there is no checkpoint before it"), (False, "no checkpoint is")])
def test_what_is_not_finite_before_any_checkpoint(tmp_path: Path, kept: bool, words: str) -> None:
    folder = RunFolder(tmp_path) if kept else None
    with pytest.raises(TrainingError, match=f"step 1: .*{words}"):
        train(Line(at={1: bad_loss}), SETTINGS, OPTIONS, folder)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_stop_keeps_no_bad_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="step 5: the loss of seed 8"):
        train(Line(at={5: bad_loss, 6: kill(signal.SIGTERM)}), SETTINGS, OPTIONS, RunFolder(tmp_path))
    assert (RunFolder(tmp_path).load_checkpoint("cpu") or {})["step"] == 4


# Settings and options.


def test_the_course_of_the_learning_rate(tmp_path: Path) -> None:
    constant, cosine = TrainingSettings(100), TrainingSettings(100, schedule="cosine", warmup=0.1)
    assert {constant.factor(k) for k in range(100)} == {1.0}
    factors = [cosine.factor(k) for k in range(100)]
    assert factors[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert factors[10] == 1
    assert factors[55] == pytest.approx(0.5)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0 < factors[-1] < 1e-3
    assert all(0 < TrainingSettings(n, schedule="cosine", warmup=0.99).factor(n - 1) <= 1 for n in (1, 2, 9, 60))
    train(Line(), SETTINGS, RunOptions(1, quiet=True), RunFolder(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert rates == [0.05 * SETTINGS.factor(k) for k in range(STEPS)]


@pytest.mark.parametrize(
    "wrong",
    [
        *[{"steps": v} for v in (-1, 1.5, True, 10**10, math.nan)],
        *[{"learning_rate": v} for v in (-1e-4, math.inf, math.nan)],
        *[{"scale_learning_rate": v} for v in (-1e-4, math.inf)],
        *[{"warmup": v} for v in (-0.1, 1.0, math.nan)],
        {"schedule": "linear"},
        {"precision": "fp8"},
    ],
    ids=str,
)
def test_other_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(wrong))} = "):
        TrainingSettings(**{"steps": 10, **wrong})


@pytest.mark.parametrize("name", ["log_every", "evaluate_every", "checkpoint_every"])
@pytest.mark.parametrize("value", [0, -5, 2.5, True])
def test_other_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"{name} = {value}: expected a whole number of at least 1"):
        RunOptions(**{name: value})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_tells_loss_and_scores_on_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for quiet, kind in ((False, Terminal), (True, Terminal), (False, io.StringIO)):
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        train(Line(), SETTINGS, RunOptions(5, 10, quiet=quiet))
        shown[quiet, kind] = stream.getvalue()
    assert shown.pop((False, Terminal)).count("23/23") >= 1
    assert set(shown.values()) == {""}
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    train(Line(), SETTINGS, RunOptions(5, 10))
    assert all(word in stream.getvalue() for word in ("loss=", "r2=", "mcc=0.5"))


# TensorBoard.


def test_tensorboard_is_named_where_it_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SpecError, match="pip install tensorboard"):
        train(Line(), SETTINGS, RunOptions(tensorboard=True, quiet=True), RunFolder(tmp_path))
    with pytest.raises(SpecError, match="expected a folder"):
        train(Line(), SETTINGS, RunOptions(tensorboard=True, quiet=True))


def test_events_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    backend = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    train(Line(), SETTINGS, RunOptions(5, 10, tensorboard=True, quiet=True), RunFolder(tmp_path))
    events = backend.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss/seed3", "loss/seed8", "r2/seed3", "mcc/seed8"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("r2/seed3")] == [10, 20, 23]

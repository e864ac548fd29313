"""Patience: a training whose loss falls no longer stops at an evaluation that can be told beforehand."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ident3d.baselines.runs import RunFolder
from ident3d.baselines.training import RunOptions, Stopped, Task, Trained, TrainingSettings, train
from ident3d.errors import SpecError
from ident3d.schema import from_plain, to_plain

OPTIONS = RunOptions(log_every=2, evaluate_every=2, checkpoint_every=3, quiet=True)
STEPS = 40


class Course(Task):
    """Losses that are given, a mean for each evaluation; the weight moves by Adam's step each time."""

    def __init__(self, means: Sequence[float], at: int | None = None, seeds: tuple[int, ...] = (0,)) -> None:
        self.seeds, self.device = seeds, torch.device("cpu")
        self.means, self.at = list(means), at
        self.line = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.line.weight)
        self.model = self.line
        self.taken: list[int] = []

    def losses(self, step: int) -> Tensor:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        self.taken.append(step)
        # Twice a mean and nothing, so that no single loss is a mean.
        mean = self.means[min(step // 2, len(self.means) - 1)]
        weight = self.line.weight.sum()
        return torch.full((len(self.seeds),), 2.0 * mean * (step % 2)) + (weight - weight.detach())

    def scores(self) -> dict[str, list[float]]:
        return {"r2": [self.line.weight.item()] * len(self.seeds)}

    def settings(self) -> dict[str, Any]:
        return {"task": "course", "means": self.means}


def settings(patience: int | None, steps: int = STEPS, **others: Any) -> TrainingSettings:
    return TrainingSettings(steps, 0.01, patience=patience, **others)


def without_seconds(trained: Trained) -> list[dict[str, Any]]:
    return [{name: value for name, value in point.items() if name != "seconds"} for point in trained.curve]


# Means by evaluation, patience, and the evaluation after which it stops (None: never).
CASES: list[tuple[list[float], int, int | None]] = [
    ([5, 4, 3, 3, 3, 3], 1, 4),  # as low is not lower
    ([5, 4, 3, 3, 3, 3], 2, 5),
    ([5, 4, 3, 3, 3, 3], 3, 6),
    ([5, 4, 4.5, 3.9, 4, 4, 4], 1, 3),
    ([5, 4, 4.5, 3.9, 4, 4, 4], 2, 6),  # a rise that is made up for in time
    ([5, 4, 4.5, 4.4, 4.3, 4.2], 3, 5),  # falling, but not below the least
    ([1, 2], 1, 2),
    ([7], 2, 3),  # from the first on
    ([5, 5, 5, 4, 4], 3, 7),
    ([20 - k for k in range(20)], 1, None),
    ([k % 2 - k / 10 for k in range(20)], 2, None),
    ([7], 19, 20),  # with the last evaluation
    ([7], 20, None),
]


@pytest.mark.parametrize(("means", "patience", "last"), CASES)
def test_it_stops_after_the_evaluation_that_is_one_too_many(
    tmp_path: Path, means: list[float], patience: int, last: int | None
) -> None:
    task = Course(means)
    trained = train(task, settings(patience), OPTIONS, RunFolder(tmp_path))
    steps = STEPS if last is None else 2 * last
    assert task.taken == list(range(steps))
    assert [point["step"] for point in trained.curve] == list(range(2, steps + 1, 2))
    # What is kept is of the steps taken.
    assert trained.curve[-1]["r2"] == [pytest.approx(-0.01 * steps, rel=1e-3)] == task.scores()["r2"]
    state = RunFolder(tmp_path).load_checkpoint("cpu")
    assert state is not None
    assert state["step"] == steps
    assert torch.equal(state["model"]["weight"], task.line.weight)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == steps


def test_without_patience_all_steps_are_taken() -> None:
    for means in ([7], [1, 2, 3]):
        assert train(Course(means), settings(None), OPTIONS).curve[-1]["step"] == STEPS


@pytest.mark.parametrize("fall", [lambda k: 20 - k, lambda k: 1 / (k + 1)], ids=["line", "decay"])
def test_while_the_loss_falls_it_has_no_effect(tmp_path: Path, fall: Callable[[int], float]) -> None:
    means, found = [fall(k) for k in range(20)], []
    for patience in (None, 1, 3):
        made, folder = settings(patience, schedule="cosine"), RunFolder(tmp_path / str(patience))
        found.append(without_seconds(train(Course(means), made, OPTIONS, folder)))
    assert len(found[0]) == 20
    assert found[0] == found[1] == found[2]


def test_a_stop_changes_nothing_before_it() -> None:
    patient, plain = (without_seconds(train(Course([5, 4, 4]), settings(p), OPTIONS)) for p in (2, None))
    assert len(patient) == 4
    assert patient == plain[:4]


@pytest.mark.parametrize("at", [0, 3, 6, 8])
def test_stopped_and_continued_it_stops_at_the_same_step(tmp_path: Path, at: int) -> None:
    means = [5, 4, 3, 3.5, 3]
    undisturbed = train(Course(means), settings(2), OPTIONS, RunFolder(tmp_path / "a"))
    assert undisturbed.curve[-1]["step"] == 10
    with pytest.raises(Stopped, match=f"after step {at + 1} of 40"):
        train(Course(means, at=at), settings(2), OPTIONS, RunFolder(tmp_path / "b"))
    task = Course(means)
    went_on = train(task, settings(2), OPTIONS, RunFolder(tmp_path / "b"))
    assert task.taken == list(range(at + 1, 10))
    assert without_seconds(went_on) == without_seconds(undisturbed)
    logs = [
        [{**json.loads(line), "seconds": 0} for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("a", "b")
    ]
    assert logs[0] == logs[1]


def test_a_run_that_has_stopped_is_not_trained_again(tmp_path: Path) -> None:
    before = train(Course([7]), settings(2), OPTIONS, RunFolder(tmp_path))
    checkpoint = (tmp_path / "checkpoint.pt").read_bytes()
    task = Course([7])
    again = train(task, settings(2), OPTIONS, RunFolder(tmp_path))
    assert task.taken == []
    assert without_seconds(again) == without_seconds(before)
    assert again.curve[-1]["step"] == 6
    assert (tmp_path / "checkpoint.pt").read_bytes() == checkpoint


def test_seeds_side_by_side_stop_when_their_sum_falls_no_longer() -> None:
    class Two(Course):
        """The second seed falls when the first has come to its end."""

        def losses(self, step: int) -> Tensor:
            loss = super().losses(step)
            return torch.stack([loss[0], loss[1] * 0 + max(10 - step, 0)])

    trained = train(Two([3], seeds=(0, 1)), settings(1), OPTIONS)
    # The second's means are 9.5, 7.5, ..., 1.5 over steps 8 and 9, and then 0 twice.
    assert [point["loss"][1] for point in trained.curve] == [9.5, 7.5, 5.5, 3.5, 1.5, 0.0, 0.0]


def test_few_steps_are_evaluated_once_and_end() -> None:
    for steps, points in ((0, [0]), (1, [1]), (3, [2, 3])):
        trained = train(Course([7]), settings(1, steps=steps), OPTIONS)
        assert [point["step"] for point in trained.curve] == points


@pytest.mark.parametrize("patience", [0, -1, 1.5, True, math.inf, math.nan, "3"])
def test_other_values_are_refused(patience: Any) -> None:
    with pytest.raises(SpecError, match=f"patience = {patience!r}: expected a whole number of at least 1"):
        TrainingSettings(10, patience=patience)


def test_patience_is_a_setting_that_results_keep() -> None:
    for patience in (None, 1, 20):
        made = TrainingSettings(10, patience=patience)
        assert to_plain(made)["patience"] == patience
        assert from_plain(TrainingSettings, to_plain(made)) == made

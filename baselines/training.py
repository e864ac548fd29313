"""The trainer that all baselines share.

A `Task` says what is trained: a model, the losses of a step, the scores. `train` does the rest: learning rates, number
formats, the log, evaluations, checkpoints, resuming, and stopping where numbers are no longer finite. A step is a
function of its number and of what was learned before it, so that a run that was stopped and continued gives the numbers
of one that was not.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ident3d.baselines.allocation import keep_freed_memory
from ident3d.baselines.devices import check_precision, precision_context
from ident3d.baselines.finite import FiniteWatch
from ident3d.baselines.ranks import agree, any_rank, average_gradients, is_first, mean_over_ranks, world_size
from ident3d.baselines.runs import RunFolder, differences
from ident3d.baselines.signals import Stop, stop_signals
from ident3d.baselines.training_settings import RunOptions, TrainingSettings
from ident3d.errors import SpecError, TrainingError

__all__ = ["Curve", "RunOptions", "Stopped", "Task", "Trained", "TrainingSettings", "train"]

Curve = list[dict[str, Any]]


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during a training; its text says what is kept and how to go on."""


class Task(ABC):
    """What is trained.

    With several ranks (see `ranks`), each has the same model and losses of its own share of the batch; the trainer
    takes the mean of their losses and gradients.

    Attributes:
        model: its parameters are learned; its state goes into checkpoints.
        seeds: of the runs that are trained side by side; their losses must not depend on each other.
        device: where the model lies.
    """

    model: nn.Module
    seeds: tuple[int, ...]
    device: torch.device

    @abstractmethod
    def losses(self, step: int) -> Tensor:
        """The loss of each seed at a step, (seeds,), a function of the step and the model's state."""

    @abstractmethod
    def scores(self) -> dict[str, list[float]]:
        """Scores of the model as it is, a value a seed. Called without gradients, the model in evaluation mode, by the
        first rank."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All that the numbers depend on, as JSON: a run's folder of other settings is refused."""

    def scale_parameters(self) -> list[nn.Parameter]:
        """The parameters that `scale_learning_rate` is for."""
        return []


@dataclass
class Trained:
    """What a training gives.

    Attributes:
        curve: a point each evaluation: step, the mean loss since the last line of the log, and the scores, a value
            a seed.
        seconds: time spent, the stopped parts of a run included.
    """

    curve: Curve = field(default_factory=list)
    seconds: float = 0.0


def train(task: Task, settings: TrainingSettings, options: RunOptions, folder: RunFolder | None = None) -> Trained:
    """Train a task's model, or go on where the same call stopped.

    Args:
        task: what is trained.
        settings: how long and how fast.
        options: what is done beside.
        folder: where checkpoints and the log are kept, held by the caller's lock; nothing is kept if None.

    Raises:
        SpecError: a number format that the device does not have.
        TrainingError: a loss or gradient that is not finite; a damaged checkpoint, or one of another run.
        Stopped: Ctrl-C or SIGTERM; the state is kept.
    """
    check_precision(settings.precision, task.device)
    if task.device.type == "cpu":
        keep_freed_memory()
    run = _Run(task, settings, options, folder)
    run.resume()
    agree({"the checkpoint's step": run.step})  # where ranks do not share the folder, only some find it
    with run, stop_signals() as stop, precision_context("float32", task.device):
        while run.step < settings.steps and not run.stalled():
            run.take(run.step)
            if run.asked_to(stop):
                run.stopped(stop.asked or "a signal to another rank")
        if not run.trained.curve or run.trained.curve[-1]["step"] != run.step:
            run.evaluate()
        run.save()
    return run.trained


class _Run:
    """A training in progress."""

    def __init__(self, task: Task, settings: TrainingSettings, options: RunOptions, folder: RunFolder | None) -> None:
        self.task, self.settings, self.options, self.folder = task, settings, options, folder
        self.step, self.trained = 0, Trained()
        self.saved: int | None = None
        self.optimizer = _adam(task, settings)
        self.watch = FiniteWatch(task.model, task.seeds)
        self._sum: Tensor | None = None
        self._counted, self._loss = 0, [math.nan] * len(task.seeds)
        self._shown: dict[str, str] = {}
        self._ranks = world_size()
        self._writer = _event_writer(folder) if options.tensorboard and is_first() else None
        if options.compile:
            task.model.compile()

    def __enter__(self) -> None:
        hidden = True if self.options.quiet or not is_first() else None
        self._bar: tqdm[Any] = tqdm(total=self.settings.steps, initial=self.step, unit=" steps", disable=hidden)
        self._began = time.monotonic() - self.trained.seconds

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()

    def resume(self) -> None:
        """Go on from the folder's checkpoint, if it has one.

        Raises:
            TrainingError: it is of another run, or damaged.
        """
        if self.folder is None:
            return
        state = self.folder.load_checkpoint(self.task.device)
        if state is None:
            if is_first():
                self.folder.cut_log(-1)  # of a run that was killed before its first checkpoint
            return
        unlike = differences(state["settings"], self.task.settings())
        if unlike:
            raise TrainingError(
                f"{self.folder.path}: holds another run; choose another folder, or the same settings. They differ in "
                + "; ".join(unlike)
            )
        self.task.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = self.saved = int(state["step"])
        self.trained = Trained(list(state["curve"]), float(state["seconds"]))
        self._sum, self._counted, self._loss = state.get("since_log", (None, 0, self._loss))
        if is_first():
            self.folder.cut_log(self.step)

    def take(self, step: int) -> None:
        """One step, and what is due after it."""
        factor = self.settings.factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * factor
        self.task.model.train()
        self.optimizer.zero_grad()
        with precision_context(self.settings.precision, self.task.device):
            losses = self.task.losses(step)
        with precision_context("tf32" if self.settings.precision == "tf32" else "float32", self.task.device):
            losses.sum().backward()  # type: ignore[no-untyped-call]
        average_gradients(self.task.model.parameters())
        kept = mean_over_ranks(losses)
        self.watch.note(step, kept)
        self.optimizer.step()
        self.step = step + 1
        self._sum = kept if self._sum is None else self._sum + kept
        self._counted += 1
        self._bar.update()
        self._after()

    def stalled(self) -> bool:
        """Whether the loss has not fallen for as many evaluations as patience lasts."""
        patience, losses = self.settings.patience, [sum(point["loss"]) for point in self.trained.curve]
        return patience is not None and len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])

    def asked_to(self, stop: Stop) -> bool:
        """Whether to stop now. Ranks, which get signals at different steps, ask each other where a log is due."""
        if self._ranks == 1:
            return stop.asked is not None
        return self._log_due() and any_rank(stop.asked is not None, self.task.device)

    def _log_due(self) -> bool:
        return self.step % self.options.log_every == 0 or self._evaluation_due()

    def _evaluation_due(self) -> bool:
        return self.step % self.options.evaluate_every == 0 or self.step == self.settings.steps

    def _after(self) -> None:
        options, due = self.options, self._evaluation_due()
        if self._log_due():
            self._log()
        if due:
            self.evaluate()
        if self.step % options.checkpoint_every == 0:
            self.save()

    def _log(self) -> None:
        self.check()
        assert self._sum is not None
        self._loss = (self._sum / self._counted).tolist()
        self._sum, self._counted = None, 0
        rate = self.optimizer.param_groups[0]["lr"]
        seconds = round(self._seconds(), 3)
        self._write({"step": self.step, "loss": self._loss, "learning_rate": rate, "seconds": seconds})
        self._show(loss=self._loss)

    def check(self) -> None:
        """Stop where a number was not finite.

        Raises:
            TrainingError: at which step, what, and which checkpoint is good.
        """
        trouble = self.watch.trouble()
        if trouble is not None:
            raise self._diverged(trouble)

    def _diverged(self, trouble: str) -> TrainingError:
        if self.folder is None:
            kept = "no checkpoint is kept"
        elif self.saved is None:
            kept = "there is no checkpoint before it"
        else:
            kept = f"the last good checkpoint is that of step {self.saved}, {self.folder.checkpoint}"
        return TrainingError(f"{trouble}; {kept}. A lower learning rate may help, or float32 in place of bf16")

    def evaluate(self) -> None:
        """Score the model, and note it."""
        self.check()
        self.task.model.eval()
        try:
            with torch.no_grad():
                scores = self.task.scores() if is_first() else {}
        except SpecError as error:  # a step may leave a model whose codes overflow before a loss does
            raise self._diverged(f"after step {self.step}: no scores: {error}") from None
        point = {"step": self.step, "loss": self._loss, **scores, "seconds": round(self._seconds(), 3)}
        if self.step == 0:
            point.pop("loss")
        self.trained.curve.append(point)
        self._write(point)
        self._show(**scores)

    def save(self) -> None:
        """Keep the state, unless it is kept already."""
        self.trained.seconds = self._seconds()
        if self.folder is None or self.saved == self.step:
            return
        self.check()
        if not is_first():  # which has the same state
            self.saved = self.step
            return
        self.folder.save_checkpoint(
            {
                "settings": self.task.settings(),
                "step": self.step,
                "model": self.task.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "curve": self.trained.curve,
                "since_log": (self._sum, self._counted, self._loss),
                "seconds": self.trained.seconds,
            }
        )
        self.saved = self.step

    def stopped(self, signal_name: str) -> None:
        """Keep the state and stop.

        Raises:
            Stopped: always.
        """
        self.save()
        where = "nothing is kept" if self.folder is None else f"the same command goes on from {self.folder.path}"
        raise Stopped(f"{signal_name} after step {self.step} of {self.settings.steps}; {where}")

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _write(self, line: dict[str, Any]) -> None:
        if self.folder is not None and is_first():
            self.folder.append(line)
        if self._writer is not None:
            for name, values in line.items():
                for seed, value in zip(self.task.seeds, values if isinstance(values, list) else [], strict=False):
                    self._writer.add_scalar(f"{name}/seed{seed}", value, line["step"])

    def _show(self, **values: list[float]) -> None:
        self._shown |= {name: f"{sum(v) / len(v):.4g}" for name, v in values.items() if v}
        self._bar.set_postfix(self._shown, refresh=False)


def _adam(task: Task, settings: TrainingSettings) -> torch.optim.Adam:
    scales = task.scale_parameters()
    among = {id(p) for p in scales}
    others = [p for p in task.model.parameters() if id(p) not in among]
    rate = settings.learning_rate
    own = rate if settings.scale_learning_rate is None else settings.scale_learning_rate
    groups = [{"params": p, "lr": r, "base": r} for p, r in ((others, rate), (scales, own)) if p]
    # A model without parameters is not trained, and torch refuses an optimiser of nothing.
    return torch.optim.Adam(groups or [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate, "base": rate}])


def _event_writer(folder: RunFolder | None) -> Any:
    if folder is None:
        raise SpecError("tensorboard = True: expected a folder for the run")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise SpecError("tensorboard = True: it is not installed; pip install tensorboard") from None
    return SummaryWriter(str(folder.path / "tensorboard"))

"""How long and how fast a model is trained, and what a run does beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ident3d.baselines.devices import Precision
from ident3d.checks import one_of, whole
from ident3d.errors import SpecError

__all__ = ["RunOptions", "TrainingSettings", "seeds_of"]

MAX_STEPS = 10**9


@dataclass(frozen=True)
class TrainingSettings:
    """How long and how fast a model is trained, by Adam.

    Attributes:
        steps: how many.
        learning_rate: of all parameters but the scales.
        scale_learning_rate: of the model space's radius or bounds; that of the others by default.
        schedule: the learning rates' course: constant, or falling to 0 along half a cosine.
        warmup: the share of the steps over which they first rise from 0.
        precision: of products of matrices: float32, tf32 (CUDA) or bf16.
        patience: stop after so many evaluations in a row without a training loss below the least before them; None to
            take all steps. The loss knows no factors, so that nothing of the scores enters. It is the mean since the
            last line of the log: with patience, `log_every` and `evaluate_every` of RunOptions decide where to stop.
    """

    steps: int
    learning_rate: float = 1e-4
    scale_learning_rate: float | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: float = 0.0
    precision: Precision = "float32"
    patience: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or not 0 <= self.steps <= MAX_STEPS:
            raise SpecError(f"steps = {self.steps!r}: expected 0 to {MAX_STEPS:,}")
        for name in ("learning_rate", "scale_learning_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < math.inf:
                raise SpecError(f"{name} = {rate!r}: expected a finite number of at least 0")
        one_of("schedule", self.schedule, ("constant", "cosine"))
        one_of("precision", self.precision, get_args(Precision))
        if not 0 <= self.warmup < 1:
            raise SpecError(f"warmup = {self.warmup!r}: expected a share of the steps, from 0 to below 1")
        if self.patience is not None:
            whole("patience", self.patience, 1)

    def factor(self, step: int) -> float:
        """What the learning rates are multiplied by at a step, counted from 0."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return (step + 1) / warm
        if self.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm)))


@dataclass(frozen=True)
class RunOptions:
    """What a run does beside training; its numbers do not depend on it, but for where `patience` ends it.

    Attributes:
        log_every: steps from one line of the log to the next.
        evaluate_every: steps from one evaluation to the next; the last step is always followed by one.
        checkpoint_every: steps from one checkpoint to the next.
        compile: compile the model with torch.compile.
        tensorboard: write events for TensorBoard as well.
        quiet: no progress bar. There is none either where stderr is no terminal.
    """

    log_every: int = 100
    evaluate_every: int = 1000
    checkpoint_every: int = 1000
    compile: bool = False
    tensorboard: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in ("log_every", "evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"{name} = {value!r}: expected a whole number of at least 1")


def seeds_of(count: int, first: int = 0) -> range:
    """Seeds by their number.

    Raises:
        SpecError: fewer than one, or negative ones.
    """
    if count < 1 or first < 0:
        raise SpecError(f"seeds = {count} from {first}: expected at least 1, from 0 or above")
    return range(first, first + count)

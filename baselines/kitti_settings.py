"""What a KITTI Masks experiment is: the settings, the presets, and the rows of table 3 as settings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ident3d.baselines.model_loss import check_model_space
from ident3d.baselines.paper import SpaceName, kitti_row
from ident3d.baselines.training_settings import TrainingSettings
from ident3d.checks import one_of, whole
from ident3d.datasets.kitti_masks import FRAME_SECONDS, MAX_DELTA_T
from ident3d.errors import SpecError

__all__ = ["PRESETS", "KittiSettings", "Model", "Preset", "delta_t_of", "preset_settings", "row_settings", "what_of"]

Model = Literal["contrastive", "slowvae"]
Preset = Literal["paper", "quick"]


@dataclass(frozen=True)
class KittiSettings:
    """All that a result depends on, but for the data, the seeds and the device.

    Attributes:
        model: contrastive, or slowvae (Klindt et al. 2021).
        conditional: of contrastive models, the law that the loss assumes: laplace, normal, gennorm(P) or vmf, the
            L^p distance to the power p = 1, 2, P or the dot product.
        model_space: where representations live; unbounded for slowvae.
        max_delta_t: a positive is 1 to so many frames of 0.05 s later, each as likely; 1 and 5 in the paper.
        dim: how many codes; 10 in the paper, for three factors.
        tau: the loss's temperature.
        include_self: leave each anchor among its own negatives, as published.
        positive_in_denominator: whether the positive's term stands in the loss's denominator.
        magnitude: the radius or bounds of the model space at first.
        parametrisation: whether the parameters are the radius or bounds themselves, or their logarithms.
        beta: of slowvae, the weight of the KL to the standard normal.
        gamma: of slowvae, the weight of the KL to the transition prior; 0 makes it a beta-VAE of weight beta / 2.
        rate: of slowvae's transition prior, a Laplace law.
        batch: pairs a step: 32, the paper's batch of 64 masks.
        samples: masks that are scored.
        training: steps, learning rates and schedule.

    Raises:
        SpecError: a value out of range, or a model that does not admit the space.
    """

    model: Model = "contrastive"
    conditional: str = "laplace"
    model_space: SpaceName = "unbounded"
    max_delta_t: int = 1
    dim: int = 10
    tau: float = 1.0
    include_self: bool = True
    positive_in_denominator: bool = True
    magnitude: float = 1.0
    parametrisation: Literal["linear", "log"] = "linear"
    beta: float = 1.0
    gamma: float = 10.0
    rate: float = 6.0
    batch: int = 32
    samples: int = 10_000
    training: TrainingSettings = field(default_factory=lambda: TrainingSettings(steps=300_000))

    def __post_init__(self) -> None:
        one_of("model", self.model, get_args(Model))
        one_of("model_space", self.model_space, get_args(SpaceName))
        one_of("parametrisation", self.parametrisation, ("linear", "log"))
        for name, least in (("max_delta_t", 1), ("dim", 3), ("batch", 2), ("samples", 64)):
            whole(name, getattr(self, name), least)
        if self.max_delta_t > MAX_DELTA_T:
            raise SpecError(f"max_delta_t = {self.max_delta_t}: expected at most {MAX_DELTA_T} frames")
        for name, zero in (("tau", False), ("magnitude", False), ("beta", True), ("gamma", True), ("rate", False)):
            value = getattr(self, name)
            fits = not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < math.inf
            if not fits or (value == 0 and not zero):
                raise SpecError(f"{name} = {value!r}: expected a finite number {'of at least' if zero else 'above'} 0")
        if self.model == "contrastive":
            check_model_space(self.conditional, self.model_space, "conditional")
        elif self.model_space != "unbounded":
            raise SpecError(
                f"model_space = {self.model_space} with model = slowvae: its codes are normal variables, which are "
                "unbounded; leave the option out"
            )
        elif self.conditional != "laplace":
            raise SpecError(
                f"conditional = {self.conditional} with model = slowvae: its transition prior is a Laplace law; leave "
                "the option out"
            )


def delta_t_of(mean_dt_s: float) -> int:
    """max_delta_t of a mean distance: of 1, ..., m frames, each as likely, it is (m + 1) / 2.

    The ends of sequences, where positives are nearer, do not count.

    Args:
        mean_dt_s: in seconds; 0.05 and 0.15 in the paper.

    Raises:
        SpecError: none of 0.05, 0.075, 0.1, ...

    Example:
        >>> delta_t_of(0.05), delta_t_of(0.15)
        (1, 5)
    """
    number = isinstance(mean_dt_s, int | float) and not isinstance(mean_dt_s, bool)
    steps = 2 * mean_dt_s / FRAME_SECONDS - 1 if number else math.nan
    if not (0.5 < steps < MAX_DELTA_T + 0.5 and abs(steps - round(steps)) < 1e-6):
        raise SpecError(
            f"mean_dt = {mean_dt_s!r}: expected 0.05, 0.075, 0.1, ... seconds, the mean of 1 to max_delta_t frames of "
            "0.05 s, max_delta_t at least 1; the paper has 0.05 and 0.15"
        )
    return round(steps)


PRESETS: dict[str, KittiSettings] = {
    "paper": KittiSettings(),
    "quick": KittiSettings(
        magnitude=7.0,
        parametrisation="log",
        training=TrainingSettings(
            steps=12_000,
            learning_rate=1e-3,
            scale_learning_rate=1e-2,
            schedule="cosine",
            warmup=0.03,
            precision="bf16",
        ),
    ),
}


def preset_settings(preset: str) -> KittiSettings:
    """The settings that a preset starts from.

    `paper` is section A.3 to the letter. `quick` is the same models and losses for a twenty-fifth of the steps: the
    box's bounds learned as logarithms from 7, at a rate of their own, a learning rate ten times as high that falls
    along a cosine, products in bfloat16.

    Raises:
        SpecError: an unknown preset.
    """
    one_of("preset", preset, tuple(PRESETS))
    return PRESETS[preset]


def row_settings(row: str, preset: str, **changes: Any) -> KittiSettings:
    """The settings of a row of table 3.

    Args:
        row: 3.1 to 3.10.
        preset: paper or quick.
        changes: fields of KittiSettings that differ.

    Raises:
        SpecError: an unknown row or preset.
    """
    published = kitti_row(row)
    of_row: dict[str, Any] = {
        "model": "slowvae" if published.model == "slowvae" else "contrastive",
        "model_space": published.model_space,
        "max_delta_t": delta_t_of(published.mean_dt_s),
    }
    if published.model != "slowvae":
        of_row["conditional"] = published.model
    return dataclasses.replace(preset_settings(preset), **{**of_row, **changes})


def what_of(settings: KittiSettings) -> str:
    """An experiment in a line."""
    model = "SlowVAE" if settings.model == "slowvae" else f"contrastive, {settings.conditional}"
    if settings.model == "slowvae" and settings.gamma == 0:
        model = "beta-VAE"
    return f"{model}, {settings.model_space}, max_delta_t {settings.max_delta_t}"

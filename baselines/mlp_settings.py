"""What an MLP experiment is: the settings, the presets, and the rows of tables 1 and 2 as settings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ident3d.baselines.model_loss import check_model_space, loss_power
from ident3d.baselines.paper import MLPRow, SpaceName, mlp_row
from ident3d.baselines.training_settings import TrainingSettings
from ident3d.checks import one_of
from ident3d.conditionals import conditional
from ident3d.distributions import Distribution, GeneralizedNormal, Laplace, Normal, Uniform
from ident3d.errors import SpecError
from ident3d.spaces import Box, Real, Space, Sphere
from ident3d.von_mises_fisher import VonMisesFisher

__all__ = ["PRESETS", "MLPSettings", "preset_settings", "row_settings"]

Mode = Literal["unsupervised", "supervised", "identity"]
Preset = Literal["paper", "fast", "quick"]
MAX_DIM, MAX_BATCH = 1000, 2**20


@dataclass(frozen=True)
class MLPSettings:
    """All that a result depends on, but for the seeds and the device.

    Attributes:
        mode: what trains the encoder: positive pairs, the true latents (mean squared error), or nothing: the
            observations themselves are scored.
        dim: N, the number of latents and of observed numbers.
        space: where latents live: sphere, box ([0, 1]^N) or unbounded.
        marginal: p(z): uniform, normal(SCALE), laplace(SCALE), gennorm(SCALE, BETA) or vmf(KAPPA).
        conditional: p(z~ | z), as ident3d.conditional reads it, e.g. laplace(0.05).
        model_space: where representations live.
        model: the conditional that the loss assumes: vmf (the dot product), laplace, normal or gennorm(P), the L^p
            distance to the power p = 1, 2, P.
        tau: the temperature.
        include_self: leave each anchor among its own negatives, as published.
        positive_in_denominator: whether the positive's term stands in the loss's denominator.
        layers: linear layers of the mixing.
        candidates: matrices drawn for each one that the mixing takes.
        widths: units of the encoder's hidden layers, in multiples of N.
        init: the encoder's initial weights: torch's uniform ones, or He et al. 2015.
        whiten: a fixed affine map before the encoder that whitens observations, estimated from 20,000 of them. The
            encoder's first layer could hold it: the set of functions is the same.
        magnitude: the radius or bounds of the model space at first.
        parametrisation: whether the parameters are the radius or bounds themselves, or their logarithms.
        batch: B, pairs a step.
        samples: latents that are scored.
        training: steps, learning rates and schedule.
    """

    mode: Mode = "unsupervised"
    dim: int = 10
    space: SpaceName = "box"
    marginal: str = "uniform"
    conditional: str = "laplace(0.05)"
    model_space: SpaceName = "box"
    model: str = "laplace"
    tau: float = 1.0
    include_self: bool = True
    positive_in_denominator: bool = True
    layers: int = 3
    candidates: int = 25_000
    widths: tuple[int, ...] = (10, 50, 50, 50, 50, 10)
    init: Literal["torch", "he"] = "torch"
    whiten: bool = False
    magnitude: float = 1.0
    parametrisation: Literal["linear", "log"] = "linear"
    batch: int = 6144
    samples: int = 4096
    training: TrainingSettings = field(default_factory=lambda: TrainingSettings(steps=300_000))

    def __post_init__(self) -> None:
        for name, least, most in (("dim", 1, MAX_DIM), ("batch", 2, MAX_BATCH), ("samples", 64, 10**7)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise SpecError(f"{name} = {value!r}: expected {least} to {most:,}")
        if self.samples < 2 * (self.dim + 2):
            raise SpecError(f"samples = {self.samples}: expected at least {2 * (self.dim + 2)} for dim = {self.dim}")
        for name in ("tau", "magnitude"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise SpecError(f"{name} = {value!r}: expected a finite number above 0")
        for name, kinds in (("mode", Mode), ("space", SpaceName), ("model_space", SpaceName)):
            one_of(name, getattr(self, name), get_args(kinds))
        one_of("init", self.init, ("torch", "he"))
        one_of("parametrisation", self.parametrisation, ("linear", "log"))
        # Made once here, so that what cannot be is refused before anything is drawn.
        self.laws()
        check_model_space(self.model, self.model_space)

    def latent_space(self) -> Space:
        """Where latents live."""
        kinds: dict[str, type[Space]] = {"sphere": Sphere, "box": Box, "unbounded": Real}
        return kinds[self.space](self.dim)  # type: ignore[call-arg]

    def laws(self) -> tuple[Distribution, Distribution]:
        """Marginal and conditional.

        Raises:
            SpecError: a law that the space does not admit.
        """
        space = self.latent_space()
        # A marginal's text may leave out the parentheses of uniform().
        text = "uniform()" if self.marginal == "uniform" else self.marginal
        try:
            marginal = conditional(text, space)
        except SpecError as error:
            raise SpecError(f"marginal: {str(error).removeprefix('conditional ')}") from None
        if not isinstance(marginal, Uniform | Normal | Laplace | GeneralizedNormal | VonMisesFisher):
            raise SpecError(f"marginal {self.marginal!r}: expected uniform, normal, laplace, gennorm or vmf")
        return marginal, conditional(self.conditional, space)

    def power(self) -> float | None:
        """p of the loss's distance; None for the dot product.

        Raises:
            SpecError: another model.
        """
        return loss_power(self.model)


def preset_settings(preset: str) -> MLPSettings:
    """The settings that a preset starts from.

    `paper` is section A.3 to the letter. `fast` is the same model and loss, started and driven so that it needs far
    fewer steps: observations whitened, He et al.'s initial weights, the radius or bounds learned as logarithms at a
    rate of their own, a learning rate thirty times as high that falls along a cosine. `quick` is `fast` with a
    smaller batch and fewer steps, for two CPU cores.

    Raises:
        SpecError: an unknown preset.
    """
    if preset not in PRESETS:
        raise SpecError(f"preset = {preset!r}: expected {', '.join(PRESETS)}")
    return PRESETS[preset]


_FAST = MLPSettings(
    init="he",
    whiten=True,
    parametrisation="log",
    training=TrainingSettings(
        steps=20_000, learning_rate=3e-3, scale_learning_rate=1e-2, schedule="cosine", warmup=0.03
    ),
)
PRESETS: dict[str, MLPSettings] = {
    "paper": MLPSettings(),
    "fast": _FAST,
    "quick": dataclasses.replace(_FAST, batch=1024, training=dataclasses.replace(_FAST.training, steps=3500)),
}


def row_settings(row: str, preset: str, **changes: Any) -> MLPSettings:
    """The settings of a row of table 1 or 2.

    Args:
        row: such as 1.1 or 2.10.
        preset: paper, fast or quick.
        changes: fields of MLPSettings that differ.

    Raises:
        SpecError: an unknown row or preset.
    """
    published: MLPRow = mlp_row(row)
    names = ("space", "marginal", "conditional", "model_space", "model")
    of_row = {name: getattr(published, name) for name in names}
    return dataclasses.replace(preset_settings(preset), **{**of_row, **changes})

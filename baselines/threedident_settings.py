"""What a 3DIdent experiment is: the settings, the presets, and the rows of tables 4 and 5 as settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ident3d.baselines.model_loss import check_model_space
from ident3d.baselines.paper import SpaceName, threedident_row
from ident3d.baselines.training_settings import TrainingSettings
from ident3d.checks import one_of, whole
from ident3d.errors import SpecError

__all__ = ["PRESETS", "Encoding", "Mode", "Pairs", "Preset", "ThreeDIdentSettings", "preset_settings", "row_settings"]

Mode = Literal["unsupervised", "supervised", "identity"]
Pairs = Literal["matched", "exact", "augmented"]
Preset = Literal["paper", "fast", "quick"]


@dataclass(frozen=True)
class Encoding:
    """The encoder of pictures.

    Attributes:
        network: a classifier of torchvision by its name, with N * 10 outputs in place of the classes.
        space: where representations live: unbounded, box or sphere.
        magnitude: the radius or bounds at first.
        parametrisation: whether the parameters are the radius or bounds themselves, or their logarithms.
    """

    network: str = "resnet18"
    space: SpaceName = "box"
    magnitude: float = 1.0
    parametrisation: Literal["linear", "log"] = "linear"

    def __post_init__(self) -> None:
        one_of("model_space", self.space, get_args(SpaceName))
        one_of("parametrisation", self.parametrisation, ("linear", "log"))
        if isinstance(self.magnitude, bool) or not 0 < self.magnitude < float("inf"):
            raise SpecError(f"magnitude = {self.magnitude!r}: expected a finite number above 0")


@dataclass(frozen=True)
class ThreeDIdentSettings:
    """All that a result depends on, but for the data, the seed and the device.

    Attributes:
        mode: what trains the encoder: positive pairs, the true latents (mean squared error), or nothing: an encoder
            with its initial weights is scored.
        pairs: matched: z~ is drawn and the nearest stored sample taken; exact: those that the dataset was rendered
            with; augmented: two of SimCLR's views of one picture.
        conditional: of matched pairs, p(z~ | z) as ident3d.conditional reads it, in units of the unit cube. Exact pairs
            have the conditional that they were rendered with.
        match: how the nearest sample is found: exact, or by FAISS hnsw or ivf.
        allow_self: whether a sample may be its own match. By default not: at the published size it is the nearest one
            of nearly every z~.
        factors: those that the encoder is to find, by name; None for all that the scene does not hold. Matched pairs
            are drawn and matched over these alone, so that all others change at random within a pair.
        encoding: the encoder and the space that it maps to.
        model: the conditional that the loss assumes: vmf (the dot product), laplace, normal or gennorm(P), the L^p
            distance to the power p = 1, 2, P.
        tau: the temperature.
        include_self: leave each anchor among its own negatives, as published.
        positive_in_denominator: whether the positive's term stands in the loss's denominator.
        batch: B, pairs (or pictures, where supervised) a step, over all ranks.
        chunk: pairs of a rank that go through the encoder at once; representations of all are kept, activations of one
            chunk, so that every negative still counts. Batch normalisation sees a chunk at a time. None for all.
        samples: training samples that are scored, drawn at random; of the test set all are.
        training: steps, learning rates and schedule.

    Raises:
        SpecError: a value out of range, or a loss that the model space does not admit.
    """

    mode: Mode = "unsupervised"
    pairs: Pairs = "matched"
    conditional: str = "normal(0.05)"
    match: Literal["exact", "hnsw", "ivf"] = "exact"
    allow_self: bool = False
    factors: tuple[str, ...] | None = None
    encoding: Encoding = field(default_factory=Encoding)
    model: str = "normal"
    tau: float = 1.0
    include_self: bool = True
    positive_in_denominator: bool = True
    batch: int = 512
    chunk: int | None = None
    samples: int = 25_000
    training: TrainingSettings = field(default_factory=lambda: TrainingSettings(steps=200_000))

    def __post_init__(self) -> None:
        for name, kinds in (("mode", Mode), ("pairs", Pairs), ("match", Literal["exact", "hnsw", "ivf"])):
            one_of(name, getattr(self, name), get_args(kinds))
        whole("batch", self.batch, 2)
        whole("samples", self.samples, 64)
        if self.chunk is not None:
            whole("chunk", self.chunk, 1)
            if self.mode == "supervised":
                raise SpecError(f"chunk = {self.chunk} with mode = supervised: for pairs; take a smaller batch instead")
        if isinstance(self.tau, bool) or not 0 < self.tau < float("inf"):
            raise SpecError(f"tau = {self.tau!r}: expected a finite number above 0")
        if self.mode == "unsupervised":
            check_model_space(self.model, self.encoding.space)


_FAST = ThreeDIdentSettings(
    encoding=Encoding(magnitude=7.0, parametrisation="log"),
    training=TrainingSettings(
        steps=20_000, learning_rate=5e-4, scale_learning_rate=1e-2, schedule="cosine", warmup=0.03, precision="bf16"
    ),
)
PRESETS: dict[str, ThreeDIdentSettings] = {
    "paper": ThreeDIdentSettings(),
    "fast": _FAST,
    "quick": dataclasses.replace(_FAST, batch=128, training=dataclasses.replace(_FAST.training, steps=2_000)),
}


def preset_settings(preset: str) -> ThreeDIdentSettings:
    """The settings that a preset starts from.

    `paper` is section A.3 to the letter. `fast` is the same model and loss for a tenth of the steps: the radius or
    bounds learned as logarithms from 7, at a rate of their own, a learning rate five times as high that falls along a
    cosine, products in bfloat16. `quick` is `fast` with smaller batches and fewer steps, for two CPU cores and 64 px.

    Raises:
        SpecError: an unknown preset.
    """
    one_of("preset", preset, tuple(PRESETS))
    return PRESETS[preset]


def row_settings(row: str, preset: str, **changes: Any) -> ThreeDIdentSettings:
    """The settings of a row of table 4, which table 5 shares.

    Args:
        row: 4.1 to 4.5.
        preset: paper, fast or quick.
        changes: fields of ThreeDIdentSettings that differ.

    Raises:
        SpecError: an unknown row or preset.
    """
    published = threedident_row(row)
    start = preset_settings(preset)
    of_row: dict[str, Any] = {
        "encoding": dataclasses.replace(start.encoding, space=published.model_space),
        "model": published.model,
    }
    if published.conditional == "augmentations":
        of_row["pairs"] = "augmented"
    else:
        of_row["conditional"] = f"{published.conditional}(0.05)"
    return dataclasses.replace(start, **{**of_row, **changes})

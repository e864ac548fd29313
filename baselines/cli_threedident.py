"""The commands of 3DIdent's encoders: `ident3d-baselines 3dident` and `predict`."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from tyro.conf import FlagCreatePairsOff, arg

from ident3d.baselines.devices import Precision, resolve_device
from ident3d.baselines.paper import SpaceName
from ident3d.baselines.threedident_settings import Pairs, Preset, ThreeDIdentSettings, preset_settings, row_settings
from ident3d.errors import DatasetError, SpecError
from ident3d.files import write_atomic

__all__ = ["Predict", "ThreeDIdent", "settings_of"]

SCALES = {"normal": "normal(0.05)", "laplace": "laplace(0.05)", "gennorm": "gennorm(0.05, 3)"}
"""Conditionals by name alone: 0.05 of the unit cube, and for gennorm the power 3, as in the paper's experiments."""


@dataclass(frozen=True)
class ThreeDIdent:
    """Train an encoder of pictures: a row of tables 4 and 5, or a combination of your own; or evaluate one.

    The same command goes on where it was stopped. What is not given is as the preset has it.

    Attributes:
        data: a dataset of shards (its folder or its URL), or a published one in its own layout.
        row: a row of the paper's tables, 4.1 to 4.5; or name the pieces.
        preset: paper: section A.3 to the letter; fast: a tenth of the steps, in bfloat16; quick: minutes to an hour on
            two CPU cores, at 64 px.
        seed: of the initial weights and the batches.
        out: the run's folder; by default runs/3dident/NAME, where NAME tells data, row or pieces, mode, preset, seed.
        test_data: where the test split is, if not there.
        mode: what trains the encoder: positive pairs, the true latents, or nothing (initial weights are scored); or
            evaluate: score the encoder of a checkpoint.
        checkpoint: for evaluate: a run's folder, or its checkpoint.pt.
        pairs: matched to the nearest stored sample, exact (rendered with the data), or augmented (SimCLR's views).
        conditional: of matched pairs: normal, laplace, gennorm, or with a scale in the unit cube: normal(0.05), ...
        match: how the nearest sample is found; hnsw and ivf by FAISS.
        allow_self: whether a sample may be its own positive.
        factors: those that the encoder is to find; by default all that the scene does not hold.
        encoder: a classifier of torchvision by name: resnet18, resnet50, ...
        model_space: where representations live.
        model: the conditional that the loss assumes: vmf, laplace, normal or gennorm(P).
        steps: training steps.
        batch: pairs a step, over all ranks.
        chunk: pairs that go through the encoder at once, for little memory; every negative still counts.
        samples: training pictures that are scored.
        learning_rate: of Adam.
        scale_learning_rate: of the model space's radius or bounds.
        schedule: constant, or a cosine that falls to 0.
        warmup: share of the steps over which learning rates rise from 0.
        patience: stop after so many evaluations without a lower training loss.
        tau: the loss's temperature.
        include_self: whether each anchor is among its own negatives, as published.
        positive_in_denominator: whether the positive's term stands in the loss's denominator.
        precision: of products of matrices.
        device: auto, cpu, cuda, cuda:N or mps.
        cache: where decoded pictures are kept.
        skip_damaged: leave damaged pictures out, in place of an error.
        compile: compile the encoder with torch.compile.
        log_every: steps from one line of the log to the next.
        evaluate_every: steps from one evaluation to the next.
        checkpoint_every: steps from one checkpoint to the next.
        tensorboard: write events for TensorBoard as well.
        quiet: no progress bar.
    """

    data: Annotated[str, arg(metavar="DATASET")]
    row: Annotated[str | None, arg(metavar="4.R")] = None
    preset: Preset = "fast"
    seed: int = 0
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    test_data: Annotated[str | None, arg(metavar="DATASET")] = None
    mode: Literal["unsupervised", "supervised", "identity", "evaluate"] = "unsupervised"
    checkpoint: Annotated[Path | None, arg(metavar="C")] = None
    pairs: Pairs | None = None
    conditional: str | None = None
    match: Literal["exact", "hnsw", "ivf"] | None = None
    allow_self: bool | None = None
    factors: Annotated[tuple[str, ...] | None, arg(metavar="NAME ...")] = None
    encoder: str | None = None
    model_space: SpaceName | None = None
    model: str | None = None
    steps: int | None = None
    batch: int | None = None
    chunk: int | None = None
    samples: int | None = None
    learning_rate: float | None = None
    scale_learning_rate: float | None = None
    schedule: Literal["constant", "cosine"] | None = None
    warmup: float | None = None
    patience: int | None = None
    tau: float | None = None
    include_self: bool | None = None
    positive_in_denominator: bool | None = None
    precision: Precision | None = None
    device: str = "auto"
    cache: Literal["auto", "device", "disk"] = "auto"
    skip_damaged: FlagCreatePairsOff[bool] = False
    compile: FlagCreatePairsOff[bool] = False
    log_every: int = 100
    evaluate_every: int = 1000
    checkpoint_every: int = 1000
    tensorboard: FlagCreatePairsOff[bool] = False
    quiet: FlagCreatePairsOff[bool] = False

    def run(self) -> None:
        """Train, and print the scores."""
        if self.mode == "evaluate":
            self.evaluate()
            return
        if self.checkpoint is not None:
            raise SpecError(f"checkpoint = {self.checkpoint}: for --mode evaluate; a run goes on by itself")
        from ident3d.baselines.evaluation import scores_text
        from ident3d.baselines.threedident import run_threedident
        from ident3d.baselines.training_settings import RunOptions
        from ident3d.ceilings import Ceiling

        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunOptions)}
        out = Path("runs/3dident", self.name()) if self.out is None else self.out
        result = run_threedident(
            settings_of(self),
            self.data,
            self.seed,
            test_data=self.test_data,
            out=out,
            device=self.device,
            cache=self.cache,
            options=RunOptions(**options),
            row=self.row,
            preset=self.preset,
            on_error="skip" if self.skip_damaged else "raise",
        )
        if result is None:  # of a rank that is not the first
            return
        names, limits = result.extra["factors"], result.extra["ceiling"] or {}
        known = [Ceiling(name, *limits[name]) for name in names if name in limits]
        for part, prefix in (("test set", ""), ("random training pictures", "train_")):
            r2, mcc = (result.per_factor[prefix + name][0] for name in ("r2", "mcc"))
            print(f"{part}:\n{scores_text(names, r2, mcc, known)}")
        print(f"{out / 'result.json'}: {result.steps:,} steps in {result.wall_s:,.0f} s on {result.device}")
        print(f"{out / 'codes.png'}: codes against factors")

    def evaluate(self) -> None:
        """Score the encoder of a checkpoint, and print its table."""
        if self.checkpoint is None:
            raise SpecError("mode = evaluate: expected --checkpoint, a run's folder or its checkpoint.pt")
        from ident3d.baselines.threedident_scoring import evaluate_checkpoint

        texts = evaluate_checkpoint(
            self.checkpoint,
            self.data,
            test_data=self.test_data,
            out=self.out,
            device=resolve_device(self.device),
            network=self.encoder,
            samples=25_000 if self.samples is None else self.samples,
            on_error="skip" if self.skip_damaged else "raise",
        )
        print("\n".join(texts))

    def name(self) -> str:
        """The default folder's name."""
        pieces = [self.pairs, self.conditional, self.model_space, self.model, self.encoder, *(self.factors or ())]
        what = self.row or "-".join(p for p in pieces if p) or "normal-box"
        data = self.data if "://" in self.data else str(Path(self.data).resolve())
        return f"{Path(data).name}-{what}-{self.mode}-{self.preset}-seed{self.seed}"


@dataclass(frozen=True)
class Predict:
    """Write the codes of a dataset's pictures as .npy: float32 (N, codes), row i that of sample i.

    Attributes:
        checkpoint: a 3dident run's folder, or its checkpoint.pt.
        data: a dataset of shards (its folder or its URL), or a published one in its own layout.
        split: train, val or test.
        out: the file to write.
        device: auto, cpu, cuda, cuda:N or mps.
    """

    checkpoint: Annotated[Path, arg(metavar="C")]
    data: Annotated[str, arg(metavar="DATASET")]
    split: str = "test"
    out: Annotated[Path, arg(metavar="FILE.npy")] = Path("codes.npy")
    device: str = "auto"

    def run(self) -> None:
        """Encode, write, and say where."""
        from ident3d.baselines.threedident_data import open_split
        from ident3d.baselines.threedident_scoring import encode, load_encoder

        if self.out.suffix != ".npy":
            raise SpecError(f"{self.out}: expected a name that ends in .npy")
        if not self.out.absolute().parent.is_dir():
            raise SpecError(f"{self.out}: the folder {self.out.absolute().parent} is not there; make it first")
        stored = load_encoder(self.checkpoint, resolve_device(self.device))
        data = open_split(self.data, self.split)
        stored.check(data)
        codes, _ = encode(stored.encoder, data)
        buffer = io.BytesIO()
        np.save(buffer, codes)
        try:
            write_atomic(self.out, buffer.getvalue())
        except OSError as error:
            raise DatasetError(f"{self.out}: cannot be written: {error.strerror or error}") from None
        count, dim = codes.shape
        print(f"{self.out.absolute()}: {count:,} codes of {dim} numbers, trained to find {', '.join(stored.names)}")


def settings_of(command: ThreeDIdent) -> ThreeDIdentSettings:
    """A preset or a row, with what a command's options change of it."""
    given = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}
    given = {name: value for name, value in given.items() if value is not None}
    start = preset_settings(command.preset) if command.row is None else row_settings(command.row, command.preset)
    space = given.get("model_space", "unbounded" if command.mode == "supervised" else start.encoding.space)
    changes: dict[str, Any] = {name: value for name, value in given.items() if hasattr(start, name)}
    if "conditional" in changes:
        changes["conditional"] = SCALES.get(changes["conditional"], changes["conditional"])
    if changes.get("model") == "gennorm":
        changes["model"] = "gennorm(3)"
    of_training = {name: value for name, value in given.items() if hasattr(start.training, name)}
    changes["training"] = dataclasses.replace(start.training, **of_training)
    changes["encoding"] = dataclasses.replace(
        start.encoding, space=space, network=given.get("encoder", start.encoding.network)
    )
    return dataclasses.replace(start, **changes)

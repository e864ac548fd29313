"""Codes and scores of trained encoders, as tables 4 and 5 give them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from ident3d.baselines.code_figure import code_figure
from ident3d.baselines.evaluation import Evaluation, evaluate_codes, evaluation_text
from ident3d.baselines.picture_encoder import PictureEncoder, picture_encoder
from ident3d.baselines.runs import read_checkpoint
from ident3d.baselines.threedident_data import open_split
from ident3d.baselines.threedident_settings import ThreeDIdentSettings
from ident3d.ceilings import Ceiling, ceilings, scene_of
from ident3d.checks import whole
from ident3d.datasets.batches import generator_of
from ident3d.datasets.blocks import ahead
from ident3d.datasets.dataset import PictureDataset
from ident3d.errors import DatasetError, SpecError, TrainingError
from ident3d.figures import save_figure
from ident3d.files import write_json
from ident3d.schema import from_plain
from ident3d.workers import cores

__all__ = ["GLANCE", "Scored", "StoredEncoder", "ceilings_of", "encode", "evaluate_checkpoint", "load_encoder", "score"]

Array = np.ndarray[Any, np.dtype[Any]]
SCORES = ("r2", "mcc", "mcc_spearman")
AT_ONCE = 256
"""Pictures that are encoded at once where nothing is learned."""
GLANCE = 4096
"""Test pictures that evaluations during training score at most; at the end all of them are."""


def ceilings_of(data: PictureDataset) -> tuple[Ceiling, ...] | None:
    """What a perfect encoder could reach on a dataset, for each of its columns; None where its scene is unknown."""
    scene = scene_of(data)
    if scene is None:
        return None
    known = {ceiling.name: ceiling for ceiling in ceilings(scene)}
    return tuple(known[name] for name in data.columns.names if name in known)


def encode(encoder: nn.Module, data: PictureDataset, rows: Array | None = None) -> tuple[Array, Array]:
    """Codes of a split's pictures, and the latents that go with them.

    Args:
        encoder: maps uint8 pictures to codes, on its own device; used in evaluation mode, in float32.
        data: the split, without transforms. Damaged pictures are left out where it skips them.
        rows: the samples, in order; all by default.

    Returns:
        Codes float32 (n, dim) and latents float32 (n, factors).

    Raises:
        DatasetError: a damaged picture.
    """
    rows = np.arange(len(data)) if rows is None else rows
    jobs = [rows[start : start + AT_ONCE] for start in range(0, len(rows), AT_ONCE)]
    device = next(encoder.parameters()).device
    was_training = encoder.training
    encoder.eval()
    codes, latents = [], []
    with torch.no_grad(), closing(ahead(lambda job: data.pictures(job.tolist()), jobs, cores(), cores() + 1)) as made:
        for job, (pictures, kept) in zip(jobs, made, strict=True):
            if kept:
                codes.append(encoder(pictures.to(device)).float().cpu().numpy())
                latents.append(data.latents[job[kept]])
    encoder.train(was_training)
    if not codes:
        raise DatasetError(f"{data.root}, split {data.split}: no picture could be decoded")
    return np.concatenate(codes), np.concatenate(latents)


@dataclass(frozen=True)
class Scored:
    """An encoder's codes on both splits, and their scores.

    Attributes:
        test: over all test pictures.
        train: over random training pictures; None where there are none.
        codes: of the test pictures, (n, dim).
        latents: of the test pictures, (n, factors).
    """

    test: Evaluation
    train: Evaluation | None
    codes: Array
    latents: Array

    def scores(self) -> dict[str, float]:
        """By name, as fractions; those on training pictures begin with train_."""
        found = {name: getattr(self.test, name).mean for name in SCORES}
        return found | {f"train_{name}": getattr(self.train, name).mean for name in SCORES if self.train is not None}

    def per_factor(self) -> dict[str, tuple[float, ...]]:
        """The same for each factor."""
        on_train = {} if self.train is None else self.train.per_factor()
        return self.test.per_factor() | {f"train_{name}": values for name, values in on_train.items()}

    def figure(self, test: PictureDataset, title: str) -> Figure:
        """Codes of test pictures against factors, a panel a factor."""
        names = test.columns.names
        return code_figure(self.codes, self.latents, names, self.test, title=title, ceilings=ceilings_of(test))


def score(encoder: nn.Module, train: PictureDataset | None, test: PictureDataset, samples: int) -> Scored:
    """Scores as the paper's tables 4 and 5 give them: all test pictures, and random training pictures.

    Args:
        encoder: maps uint8 pictures to codes.
        train: training pictures, if there are any.
        test: test pictures, of the same factors.
        samples: training pictures, 25,000 in the paper; all where there are fewer.

    Raises:
        SpecError: codes that have no score.
    """
    names = test.columns.names
    codes, latents = encode(encoder, test)
    on_test, on_train = evaluate_codes(codes, latents, names), None
    if train is not None:
        some = torch.randperm(len(train), generator=generator_of("3dident", "train scores"))[:samples]
        on_train = evaluate_codes(*encode(encoder, train, some.numpy()), names)
    return Scored(on_test, on_train, codes, latents)


@dataclass(frozen=True)
class StoredEncoder:
    """An encoder of a checkpoint, and what it was trained as.

    Attributes:
        encoder: on the device that was asked for, in evaluation mode.
        settings: of its training.
        names: of the factors that it was to find.
        resolution: side of its pictures in pixels.
        step: how many steps it had taken.
    """

    encoder: PictureEncoder
    settings: ThreeDIdentSettings
    names: tuple[str, ...]
    resolution: int
    step: int

    def check(self, data: PictureDataset) -> None:
        """Refuse pictures of another size than it was trained on.

        Raises:
            SpecError: they are.
        """
        if data.resolution != self.resolution:
            raise SpecError(
                f"{data.root}: pictures of {data.resolution} px; this encoder was trained on {self.resolution} px"
            )


def load_encoder(path: Path, device: torch.device, *, network: str | None = None) -> StoredEncoder:
    """The encoder of a run.

    Args:
        path: a checkpoint, or the folder of a run that holds one.
        device: where to.
        network: the architecture that is expected, if one is.

    Raises:
        TrainingError: absent, damaged, or the checkpoint of another experiment.
        SpecError: a checkpoint of another architecture.
    """
    path = path / "checkpoint.pt" if path.is_dir() else path
    state = read_checkpoint(path, device)
    if state is None:
        raise TrainingError(f"{path}: no checkpoint is there; give the folder of a 3dident run, or its checkpoint.pt")
    kept = state["settings"]
    if kept.get("experiment") != "3dident":
        raise TrainingError(
            f"{path}: the checkpoint of another experiment; expected one of `ident3d-baselines 3dident`"
        )
    facts = kept["data"]
    names = set(ThreeDIdentSettings.__dataclass_fields__)
    settings = from_plain(ThreeDIdentSettings, {name: value for name, value in kept.items() if name in names})
    if network is not None and network != settings.encoding.network:
        raise SpecError(f"encoder = {network}: {path} holds a {settings.encoding.network}; leave the option out")
    blank = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    encoder = picture_encoder(
        settings.encoding, len(facts["factors"]), statistics=blank, side=facts["resolution"], seed=0
    )
    encoder.load_state_dict(state["model"])
    encoder.to(device).eval()
    return StoredEncoder(encoder, settings, tuple(facts["factors"]), facts["resolution"], state["step"])


def evaluate_checkpoint(
    path: Path,
    data: str | Path,
    *,
    test_data: str | Path | None = None,
    out: Path | None = None,
    device: torch.device,
    network: str | None = None,
    samples: int = 25_000,
    on_error: str = "raise",
) -> list[str]:
    """Score a run's encoder on a dataset, its own or another.

    Args:
        path, device, network: as for `load_encoder`.
        data, test_data: of whose training split random samples are scored, where it has one, and all test pictures.
        out: a folder for codes.png and evaluation.json; nothing is written if None.
        samples: training pictures.
        on_error: raise at a damaged picture, or skip it.

    Returns:
        Tables of scores as text.

    Raises:
        SpecError, TrainingError: as for `load_encoder`; factors that the data lack; pictures of another size.
        DatasetError: no test split, a damaged one, or a folder that cannot be written.
    """
    whole("samples", samples, 64)
    if out is not None and (out / "checkpoint.pt").exists():
        raise SpecError(f"out = {out}: the folder of a run, whose own files would be replaced; choose another")
    stored = load_encoder(path, device, network=network)
    test = open_split(data if test_data is None else test_data, "test", stored.names, on_error=on_error)
    stored.check(test)
    train, why = None, ""
    try:
        train = open_split(data, "train", stored.names, on_error=on_error)
        stored.check(train)
    except DatasetError as error:
        why = str(error)
    scored = score(stored.encoder, train, test, samples)
    limits = ceilings_of(test)
    texts = [f"test, {len(scored.codes):,} pictures, after {stored.step:,} steps", evaluation_text(scored.test, limits)]
    if scored.train is not None:
        texts += [f"train, {samples:,} random pictures at most", evaluation_text(scored.train, limits)]
    else:
        texts += [f"no training scores: {why}"]
    if out is not None:
        texts += _write(scored, test, out, f"{stored.settings.mode}, {test.name}, {stored.step:,} steps")
    return texts


def _write(scored: Scored, test: PictureDataset, out: Path, title: str) -> list[str]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        plain = {"scores": scored.scores(), "per_factor": scored.per_factor(), "dci": scored.test.to_plain_dci()}
        write_json(out / "evaluation.json", {**plain, "factors": list(test.columns.names)})
    except OSError as error:
        raise DatasetError(f"{out}: cannot be written: {error.strerror or error}") from None
    save_figure(scored.figure(test, title), out / "codes.png")
    return [str(out / "evaluation.json"), str(out / "codes.png")]

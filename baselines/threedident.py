"""An encoder of 3DIdent's pictures, trained on positive pairs or on the true latents (tables 4 and 5).

Zimmermann et al. 2021, section 4.4 and A.3. Data-parallel over the GPUs of a machine or several:
`torchrun --nproc-per-node K -m ident3d.baselines.threedident --data DATASET ...`, with the options of
`ident3d-baselines 3dident`. Every rank has its part of each batch; negatives and batch normalisation's statistics are
those of the whole batch, so that the number of ranks does not change what is learned.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ident3d.baselines.batch_norm import global_batch_norm
from ident3d.baselines.devices import check_precision, device_name
from ident3d.baselines.model_loss import model_loss
from ident3d.baselines.picture_encoder import PictureEncoder, encode_in_chunks, picture_encoder
from ident3d.baselines.ranks import agree, is_first, joined, rank, same_weights, world_size
from ident3d.baselines.results import Result, stored_result, versions
from ident3d.baselines.runs import RunFolder, flat
from ident3d.baselines.threedident_data import Cache, Splits, StepBatches, check_cache, open_splits
from ident3d.baselines.threedident_scoring import GLANCE, ceilings_of, encode, score
from ident3d.baselines.threedident_settings import ThreeDIdentSettings
from ident3d.baselines.training import RunOptions, Task, Trained, train
from ident3d.checks import whole
from ident3d.datasets.batches import generator_of
from ident3d.errors import SpecError, TrainingError
from ident3d.figures import save_figure
from ident3d.metrics import mcc, r2
from ident3d.schema import to_plain

__all__ = ["ThreeDIdentTask", "run_threedident"]


class ThreeDIdentTask(Task):
    """A 3DIdent experiment as the trainer sees it.

    Args:
        settings: what is trained.
        splits: on what.
        seed: of the initial weights and the batches.
        device: where all of it happens.
        cache: where pictures are kept, see `StepBatches`.
        quiet: no progress bar while pictures are decoded.

    Attributes:
        encoder: f.
        model: the same.

    Raises:
        SpecError: an encoder that is unknown or does not take the pictures; what `StepBatches` refuses.
        DatasetError: a damaged picture, or one of another size.
    """

    def __init__(
        self,
        settings: ThreeDIdentSettings,
        splits: Splits,
        seed: int,
        device: torch.device,
        *,
        cache: Cache = "auto",
        quiet: bool = False,
    ) -> None:
        self.of, self.splits, self.seeds, self.device = settings, splits, (seed,), device
        self.facts = splits.facts()
        self.encoder: PictureEncoder = _encoder(settings, splits, seed).to(device)
        self.model: nn.Module = self.encoder
        if world_size() > 1:
            self.model = global_batch_norm(self.encoder)
            same_weights(self.model)
        self._batches: StepBatches | None = None
        if settings.mode != "identity":
            self._batches = StepBatches(
                splits.train, settings, seed=seed, device=device, cache=cache, quiet=quiet or not is_first()
            )
        test = splits.test
        generator = generator_of("3dident", "glance", 0)
        some = torch.randperm(len(test), generator=generator)[:GLANCE].sort().values
        self._glance = some.numpy()

    def losses(self, step: int) -> Tensor:
        """InfoNCE of a step's pairs, or the mean squared error of its latents: (1,)."""
        # Dropout draws from torch's global generators, which are put back.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            number = generator_of("3dident", "step", self.seeds[0], step, rank()).initial_seed()
            torch.default_generator.manual_seed(number)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(number)
            return self._losses(step)

    def _losses(self, step: int) -> Tensor:
        assert self._batches is not None
        of = self.of
        pictures, positive, z = self._batches.at(step)
        if of.mode == "supervised":
            error: Tensor = (self.model(pictures) - z).square().mean()
            return error.unsqueeze(0)
        x, x_positive = encode_in_chunks(self.model, pictures, positive, of.chunk)
        loss = model_loss(
            of.model,
            x,
            x_positive,
            tau=of.tau,
            include_self=of.include_self,
            positive_in_denominator=of.positive_in_denominator,
            gather=world_size() > 1,
        )
        return loss.unsqueeze(0)

    def scores(self) -> dict[str, list[float]]:
        """R2 and MCC on test pictures, at most 4,096 of them."""
        codes, latents = encode(self.encoder, self.splits.test, self._glance)
        found = {"r2": r2(codes, latents).mean, "mcc": mcc(codes, latents, constant_codes="zero").mean}
        return {name: [mean] for name, mean in found.items()}

    def settings(self) -> dict[str, Any]:
        """Settings, data and seed."""
        return {"experiment": "3dident", **settings_and_data(self.of, self.facts), "seeds": list(self.seeds)}

    def scale_parameters(self) -> list[nn.Parameter]:
        """The model space's radius or bounds."""
        return self.encoder.output.scale_parameters()


def settings_and_data(settings: ThreeDIdentSettings, facts: dict[str, Any]) -> dict[str, Any]:
    """What a result says of both, as JSON."""
    return {**to_plain(settings), "data": facts}


def run_threedident(
    settings: ThreeDIdentSettings,
    data: str | Path,
    seed: int = 0,
    *,
    test_data: str | Path | None = None,
    out: Path | None = None,
    device: str = "auto",
    cache: Cache = "auto",
    options: RunOptions | None = None,
    row: str | None = None,
    preset: str | None = None,
    on_error: str = "raise",
) -> Result | None:
    """Run an experiment, or go on where the same call stopped; give what it came to.

    Under torchrun, a call a rank, of which all but the first give None; see `ident3d.baselines.ranks`.

    Args:
        settings: what is trained.
        data: a folder of shards or of a published dataset, or a URL.
        seed: of the initial weights and the batches.
        test_data: where the test split is, if not there.
        out: the run's folder, which gets result.json and codes.png; nothing is kept if None.
        device: auto, cpu, cuda, cuda:N or mps.
        cache: where decoded pictures are kept: device, disk, or auto.
        options: what is done beside training.
        row: the row of table 4 that the settings are of, for the result.
        preset: the preset that they are of, for the result.
        on_error: raise at a damaged picture, or skip it.

    Raises:
        SpecError: a value out of range; data that cannot be trained on so; a device that is absent; ranks
            that disagree.
        DatasetError: no such dataset, a damaged one, or a folder that holds something else, or another run.
        TrainingError: numbers that are not finite, a damaged checkpoint, or one of another run.
        BusyError: another run is at work in the folder.
        Stopped: Ctrl-C or SIGTERM; the state is kept.
    """
    options, seed = RunOptions() if options is None else options, whole("seed", seed)
    if settings.mode == "identity":
        settings = dataclasses.replace(settings, training=dataclasses.replace(settings.training, steps=0))
    elif settings.training.steps < 1:
        raise SpecError(f"steps = {settings.training.steps}: expected at least 1 where an encoder is trained")
    with joined(device) as where:
        check_precision(settings.training.precision, where)
        check_cache(settings, cache)
        splits = open_splits(data, settings, test_data=test_data, on_error=on_error)
        splits.check_scored(settings.samples)
        _agree(settings, options, seed, splits)
        _encoder(settings, splits, seed)  # what cannot be made is refused before the folder is
        folder = None if out is None else RunFolder(out)
        about = {"row": row, "preset": preset}
        with _peers(), nullcontext() if folder is None or not is_first() else folder.lock():
            asked = {**about, **settings_and_data(settings, splits.facts()), "seeds": [seed]}
            there = None if folder is None else stored_result(folder.path, asked)
            agree({"whether the run is finished": there is not None})
            if there is not None:
                return there if is_first() else None
            task = ThreeDIdentTask(settings, splits, seed, where, cache=cache, quiet=options.quiet)
            trained = train(task, settings.training, options, folder)
            return _result(task, trained, folder, about)


def _encoder(settings: ThreeDIdentSettings, splits: Splits, seed: int) -> PictureEncoder:
    return picture_encoder(
        settings.encoding,
        len(splits.names),
        statistics=splits.train.statistics(),
        side=splits.train.resolution,
        seed=seed,
    )


def _agree(settings: ThreeDIdentSettings, options: RunOptions, seed: int, splits: Splits) -> None:
    """Refuse ranks that would not train the same: those that differ in when they exchange numbers wait for ever.

    Raises:
        SpecError: on all ranks, naming what differs.
    """
    facts = {"seed": seed, **flat(settings_and_data(settings, splits.facts()))}
    agree(facts | {name: getattr(options, name) for name in ("log_every", "evaluate_every", "checkpoint_every")})


@contextmanager
def _peers() -> Iterator[None]:
    """Within, say in a line that another rank is gone, whose own text says why.

    Raises:
        TrainingError: it is.
    """
    try:
        yield
    except RuntimeError as error:
        if world_size() == 1 or not any(text in str(error) for text in ("Connection closed", "Connection reset")):
            raise
        raise TrainingError(f"rank {rank()}: another rank stopped, and says why; this one stops too") from None


def _result(task: ThreeDIdentTask, trained: Trained, folder: RunFolder | None, about: dict[str, Any]) -> Result | None:
    """Score the encoder, and write what came of it; the first rank does."""
    if not is_first():
        return None
    scored = score(task.encoder, task.splits.train, task.splits.test, task.of.samples)
    limits = ceilings_of(task.splits.train)
    scales = task.encoder.output.scales().tolist()
    result = Result(
        experiment="3dident",
        **about,
        settings=settings_and_data(task.of, task.facts),
        seeds=task.seeds,
        scores={name: (value,) for name, value in scored.scores().items()},
        per_factor={name: (values,) for name, values in scored.per_factor().items()},
        extra={
            "factors": list(task.splits.names),
            "ceiling": None if limits is None else {c.name: [c.r2, c.mcc] for c in limits},
            "dci": scored.test.to_plain_dci(),
            "scales": scales,
            "ranks": world_size(),
        },
        curve=tuple(trained.curve),
        steps=trained.curve[-1]["step"],
        device=device_name(task.device),
        versions=versions("torchvision"),
        wall_s=round(trained.seconds, 3),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    if folder is not None:
        what = f"{task.of.mode}, {task.facts['name']}, {result.steps:,} steps"
        save_figure(scored.figure(task.splits.test, what), folder.path / "codes.png")
        result.save(folder.path)
    return result


def main(args: list[str] | None = None) -> None:
    """The command `ident3d-baselines 3dident`, for torchrun."""
    from ident3d.baselines.cli import main as command

    command(["3dident", *(sys.argv[1:] if args is None else args)])


if __name__ == "__main__":
    main()

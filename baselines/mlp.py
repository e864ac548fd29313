"""The synthetic benchmark: latents, an invertible MLP that mixes them, an MLP that unmixes them (tables 1 and 2).

Zimmermann et al. 2021, section 4.1 and A.3. Several seeds, each with its own mixing, encoder and pairs, are trained
side by side.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ident3d.baselines.devices import check_precision, device_name, resolve_device
from ident3d.baselines.encoders import MLPEncoder, mlp_encoder
from ident3d.baselines.kept import kept_result
from ident3d.baselines.mixing import InvertibleMLP, invertible_mlp
from ident3d.baselines.mlp_settings import MLPSettings
from ident3d.baselines.model_loss import model_loss
from ident3d.baselines.outputs import output_normalisation
from ident3d.baselines.results import Result, versions
from ident3d.baselines.runs import RunFolder
from ident3d.baselines.training import RunOptions, Task, Trained, train
from ident3d.baselines.whitening import Whitening
from ident3d.datasets.batches import generator_of
from ident3d.errors import SpecError
from ident3d.metrics import mcc, r2
from ident3d.schema import to_plain

__all__ = ["MLPTask", "run_mlp"]

WHITENING_SAMPLES = 20_000


class MLPTask(Task):
    """An MLP experiment as the trainer sees it.

    Batch k of a seed is a function of (seed, k, settings) and of the kind of device.

    Args:
        settings: what is trained.
        seeds: one a run.
        device: where all of it happens.

    Attributes:
        mixing: g, a matrix a seed and layer.
        model: the whitening, if any, and the encoder; of the mode `identity`, nothing.
    """

    def __init__(self, settings: MLPSettings, seeds: Sequence[int], device: torch.device) -> None:
        self.of, self.seeds, self.device = settings, tuple(seeds), device
        self.marginal, self.conditional = settings.laws()
        self.mixing: InvertibleMLP = invertible_mlp(
            settings.dim, seeds=self.seeds, layers=settings.layers, candidates=settings.candidates, device=device
        )
        self.encoder: MLPEncoder | None = None
        self.model: nn.Module = nn.Identity()
        if settings.mode != "identity":
            self.encoder = self._encoder()
            steps = [Whitening(self.mixing(self._marginal("whitening", WHITENING_SAMPLES)))] if settings.whiten else []
            self.model = nn.Sequential(*steps, self.encoder).to(device)
        # The scored latents are the same at every evaluation.
        self.truth = self._marginal("scores", settings.samples)

    def _encoder(self) -> MLPEncoder:
        of = self.of
        output = output_normalisation(
            of.model_space,
            of.dim,
            len(self.seeds),
            magnitude=of.magnitude,
            parametrisation=of.parametrisation,
        )
        return mlp_encoder(
            of.dim, of.dim, seeds=self.seeds, widths=of.widths, init=of.init, output=output, device=self.device
        )

    def _marginal(self, what: object, count: int) -> Tensor:
        generators = [generator_of("mlp", what, seed, device=self.device) for seed in self.seeds]
        return torch.stack([self.marginal.sample(count, generator=g) for g in generators])

    def pairs(self, step: int) -> tuple[Tensor, Tensor]:
        """The latents z and z~ of a step, both (seeds, batch, dim)."""
        z, positives = [], []
        for seed in self.seeds:
            g = generator_of("mlp", "pairs", seed, step, device=self.device)
            z.append(self.marginal.sample(self.of.batch, generator=g))
            # Looking whether z lies in its own space would make a GPU wait.
            positives.append(self.conditional.around(z[-1], generator=g, check=False))
        return torch.stack(z), torch.stack(positives)

    def _observed(self, z: Tensor) -> Tensor:
        # In half precision, the noise of the observations would be as large as a pair's distance.
        with torch.autocast(self.device.type, enabled=False):
            x: Tensor = self.mixing(z)
        return x

    def losses(self, step: int) -> Tensor:
        """InfoNCE of a step's pairs, or the mean squared error of its z, a value a seed."""
        of = self.of
        z, positives = self.pairs(step)
        if of.mode == "supervised":
            error = self.model(self._observed(z)) - z
            squared: Tensor = error.square().mean((1, 2))
            return squared
        representations = self.model(self._observed(torch.cat([z, positives], 1)))
        x, x_positive = representations.split(of.batch, 1)
        return model_loss(
            of.model,
            x,
            x_positive,
            tau=of.tau,
            include_self=of.include_self,
            positive_in_denominator=of.positive_in_denominator,
        )

    def codes(self) -> Tensor:
        """Representations of the scored latents, (seeds, samples, dim)."""
        with torch.no_grad():
            codes: Tensor = self.model(self.mixing(self.truth))
        return codes

    def scores(self) -> dict[str, list[float]]:
        """R2 and MCC of each seed, as fractions."""
        detailed = self.detailed_scores()
        return {name: [float(score) for score in per_seed] for name, per_seed in detailed.items()}

    def detailed_scores(self) -> dict[str, list[Any]]:
        """R2, MCC by Pearson's and by Spearman's correlation, of each seed."""
        pairs = list(zip(self.codes().cpu(), self.truth.cpu(), strict=True))
        # An encoder may leave a code unused for a while; it then counts as uncorrelated.
        kinds = {"mcc": "pearson", "mcc_spearman": "spearman"}
        return {
            "r2": [r2(f, z) for f, z in pairs],
            **{name: [mcc(f, z, correlation=k, constant_codes="zero") for f, z in pairs] for name, k in kinds.items()},
        }

    def settings(self) -> dict[str, Any]:
        """Settings and seeds."""
        return {**to_plain(self.of), "seeds": list(self.seeds)}

    def scale_parameters(self) -> list[nn.Parameter]:
        """The model space's radius or bounds."""
        return [] if self.encoder is None else self.encoder.output.scale_parameters()


def run_mlp(
    settings: MLPSettings,
    seeds: Sequence[int],
    *,
    out: Path | None = None,
    device: str = "auto",
    options: RunOptions | None = None,
    row: str | None = None,
    preset: str | None = None,
) -> Result:
    """Run an experiment, or go on where the same call stopped; give what it came to.

    Args:
        settings: what is trained.
        seeds: one a run; they are trained side by side.
        out: the run's folder, which gets result.json; nothing is kept if None.
        device: auto, cpu, cuda, cuda:N or mps.
        options: what is done beside training.
        row: the row of a table that the settings are of, for the result.
        preset: the preset that they are of, for the result.

    Raises:
        SpecError: a value out of range, a device that is absent.
        DatasetError: a folder that holds something else, or another run.
        TrainingError: numbers that are not finite, a damaged checkpoint, or one of another run.
        BusyError: another run is at work in the folder.
        Stopped: Ctrl-C or SIGTERM; the state is kept.
    """
    options = RunOptions() if options is None else options
    if settings.mode == "identity":
        settings = dataclasses.replace(settings, training=dataclasses.replace(settings.training, steps=0))
    elif settings.training.steps < 1:
        raise SpecError(f"steps = {settings.training.steps}: expected at least 1 where an encoder is trained")
    where = resolve_device(device)
    check_precision(settings.training.precision, where)
    asked = {"row": row, "preset": preset, **to_plain(settings), "seeds": list(seeds)}
    return kept_result(out, asked, lambda folder: _run(settings, seeds, where, options, folder, row, preset))


def _run(
    settings: MLPSettings,
    seeds: Sequence[int],
    device: torch.device,
    options: RunOptions,
    folder: RunFolder | None,
    row: str | None,
    preset: str | None,
) -> Result:
    task = MLPTask(settings, seeds, device)
    trained: Trained = train(task, settings.training, options, folder)
    task.model.eval()
    detailed = task.detailed_scores()
    extra: dict[str, Any] = {"mixing": task.mixing.describe()}
    if task.encoder is not None:
        extra["scales"] = task.encoder.output.scales().tolist()
    return Result(
        experiment="mlp",
        row=row,
        preset=preset,
        settings=to_plain(settings),
        seeds=tuple(seeds),
        scores={name: tuple(float(s) for s in per_seed) for name, per_seed in detailed.items()},
        per_factor={name: tuple(tuple(s.per_factor) for s in per_seed) for name, per_seed in detailed.items()},
        extra=extra,
        curve=tuple(trained.curve),
        steps=trained.curve[-1]["step"],
        device=device_name(device),
        versions=versions(),
        wall_s=round(trained.seconds, 3),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )

"""An experiment on KITTI Masks as the trainer sees it: pairs, losses, codes, scores (table 3)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from ident3d.baselines.kitti_settings import KittiSettings
from ident3d.baselines.mask_networks import MaskEncoder
from ident3d.baselines.mixing import check_seeds
from ident3d.baselines.model_loss import model_loss
from ident3d.baselines.outputs import OutputNormalisation, output_normalisation
from ident3d.baselines.slowvae import SlowVAE, SlowVAETerms
from ident3d.baselines.training import Task
from ident3d.datasets.batches import generator_of
from ident3d.datasets.kitti_masks import KittiMasks
from ident3d.errors import SpecError
from ident3d.metrics import MCCScore, mcc, r2
from ident3d.schema import to_plain

__all__ = ["KittiTask", "StepPairs", "check_data", "settings_and_data"]

Array = np.ndarray[Any, np.dtype[Any]]

AHEAD = 64
"""Steps whose frames are chosen at once, so that a GPU is sent numbers once and need not wait each time."""
AT_ONCE = 500
"""Masks that are encoded at once where nothing is learned."""


class StepPairs:
    """The pairs of each step, of each seed those of `data.pairs(batch, seed)`.

    Args:
        data: the masks.
        batch: pairs a step.
        seeds: one a series.
        device: where the masks are held and cut.

    Attributes:
        masks: uint8 (frames, 64, 64), all of them, on the device.

    Raises:
        SpecError: more pairs than there are.
    """

    def __init__(self, data: KittiMasks, batch: int, seeds: Sequence[int], device: torch.device) -> None:
        self._series = [data.pairs(batch, seed=seed, rank=0, world_size=1) for seed in seeds]
        self.masks: UInt8[Tensor, "frames 64 64"] = torch.from_numpy(data.masks).to(device)
        self._block, self._frames = -1, torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> UInt8[Tensor, "seeds masks 1 64 64"]:
        """The masks of a step: all anchors, then all positives in the same order."""
        block, place = divmod(step, AHEAD)
        if block != self._block:
            steps = range(block * AHEAD, (block + 1) * AHEAD)
            chosen = [torch.stack([torch.cat(series.frames(k)) for series in self._series]) for k in steps]
            self._frames, self._block = self._sent(torch.stack(chosen)), block
        frames = self._frames[place]
        if self.masks.device.type == "cpu":
            # By numpy: where cores are busy, torch's threads wait for each other far longer than the copy takes.
            return torch.from_numpy(self.masks.numpy().take(frames.numpy(), axis=0)).unsqueeze(2)
        return self.masks[frames].unsqueeze(2)

    def _sent(self, frames: Tensor) -> Tensor:
        device = self.masks.device
        return frames.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else frames.to(device)


class KittiTask(Task):
    """An experiment on KITTI Masks as the trainer sees it.

    Args:
        settings: what is trained.
        data: the masks, with the settings' max_delta_t.
        seeds: one a run.
        device: where all of it happens.

    Attributes:
        model: of contrastive models the encoder, else a `SlowVAE`; maps masks to the codes that are scored.
        scored: numbers of the frames that are scored, in the order in which they are, the same for all seeds.

    Raises:
        SpecError: settings that the data do not fit.
    """

    model: MaskEncoder | SlowVAE

    def __init__(self, settings: KittiSettings, data: KittiMasks, seeds: Sequence[int], device: torch.device) -> None:
        check_data(settings, data)
        self.of, self.data, self.seeds, self.device = settings, data, check_seeds(seeds), device
        self.pairs = StepPairs(data, settings.batch, self.seeds, device)
        self.model = _model(settings, self.seeds).to(device)
        self.scored = _scored(settings, data)
        self._latents = data.latents[self.scored]

    def losses(self, step: int) -> Tensor:
        """InfoNCE of a step's pairs, or SlowVAE's loss of their frames: (seeds,)."""
        of, masks = self.of, self.pairs.at(step)
        if isinstance(self.model, SlowVAE):
            return self._terms(self.model, masks, step).loss(of.beta, of.gamma)
        x, positive = self.model(masks).chunk(2, 1)
        return model_loss(
            of.conditional,
            x,
            positive,
            tau=of.tau,
            include_self=of.include_self,
            positive_in_denominator=of.positive_in_denominator,
        )

    def _terms(self, model: SlowVAE, masks: Tensor, key: object) -> SlowVAETerms:
        shape = (masks.shape[1], self.of.dim)
        generators = [generator_of("kitti", "noise", seed, key, device=self.device) for seed in self.seeds]
        noise = torch.stack([torch.randn(shape, generator=g, device=self.device) for g in generators])
        return model.terms(masks, noise, self.of.rate)

    def codes(self, frames: Int64[Array, " masks"] | None = None) -> Float[Tensor, "seeds masks dim"]:
        """Codes of frames by their numbers, on the CPU; by default of those that are scored."""
        rows = self.scored if frames is None else frames
        with torch.no_grad():
            parts = [
                self.model(self.for_each_seed(self.masks(rows[start : start + AT_ONCE]))).float().cpu()
                for start in range(0, len(rows), AT_ONCE)
            ]
        return torch.cat(parts, 1)

    def masks(self, frames: Int64[Array, " masks"]) -> UInt8[Tensor, "masks 1 64 64"]:
        """Masks by the numbers of their frames, on the device."""
        return self.pairs.masks[torch.from_numpy(frames).to(self.device)].unsqueeze(1)

    def for_each_seed(self, same: Tensor) -> Tensor:
        """What all seeds are to get, (...), as (seeds, ...)."""
        return same.expand(len(self.seeds), *same.shape)

    def matched(self, codes: Float[Tensor, "seeds masks dim"]) -> list[MCCScore]:
        """The table's score of each seed: MCC by Spearman's correlation of ten codes against three factors.

        The paper adds seven factors of noise before it matches codes with factors. Here the factors choose among all
        codes, which gives the greatest sum over the factors themselves.
        """
        return [self._mcc(of_seed, "spearman") for of_seed in codes]

    def _mcc(self, codes: Tensor, correlation: Literal["pearson", "spearman"]) -> MCCScore:
        # An encoder may leave a code unused for a while; it then counts as uncorrelated.
        return mcc(
            codes,
            self._latents,
            names=self.data.factors.names,
            correlation=correlation,
            constant_codes="zero",
        )

    def scores(self) -> dict[str, list[float]]:
        """MCC by Spearman's and Pearson's correlation and R2 of each seed, as fractions."""
        detailed = self.detailed_scores(self.codes())
        return {name: [float(score) for score in per_seed] for name, per_seed in detailed.items()}

    def detailed_scores(self, codes: Float[Tensor, "seeds masks dim"]) -> dict[str, list[Any]]:
        """The same, with each factor's."""
        return {
            "mcc_spearman": self.matched(codes),
            "mcc": [self._mcc(of_seed, "pearson") for of_seed in codes],
            "r2": [r2(of_seed, self._latents, names=self.data.factors.names) for of_seed in codes],
        }

    def settings(self) -> dict[str, Any]:
        """Settings, data and seeds."""
        return {"experiment": "kitti", **settings_and_data(self.of, self.data), "seeds": list(self.seeds)}

    def scale_parameters(self) -> list[nn.Parameter]:
        """The model space's bounds."""
        return [] if self.output is None else self.output.scale_parameters()

    @property
    def output(self) -> OutputNormalisation | None:
        """What brings codes into the model space; None of slowvae."""
        return None if isinstance(self.model, SlowVAE) else self.model.output


def _model(settings: KittiSettings, seeds: Sequence[int]) -> MaskEncoder | SlowVAE:
    if settings.model == "slowvae":
        return SlowVAE(settings.dim, seeds)
    output = output_normalisation(
        settings.model_space,
        settings.dim,
        len(seeds),
        magnitude=settings.magnitude,
        parametrisation=settings.parametrisation,
    )
    return MaskEncoder(settings.dim, seeds=seeds, output=output)


def _scored(settings: KittiSettings, data: KittiMasks) -> Int64[Array, " masks"]:
    order = torch.randperm(len(data.masks), generator=generator_of("kitti", "scores"))
    return order[: settings.samples].numpy()


def check_data(settings: KittiSettings, data: KittiMasks) -> None:
    """Refuse masks that an experiment cannot be run on.

    Raises:
        SpecError: another max_delta_t than the settings', fewer masks than are to be scored, or a constant latent.
    """
    if data.max_delta_t != settings.max_delta_t:
        raise SpecError(
            f"data of max_delta_t = {data.max_delta_t}, settings of {settings.max_delta_t}: expected the same"
        )
    if settings.samples > len(data.masks):
        raise SpecError(
            f"samples = {settings.samples}: {data.title} has {len(data.masks)} masks; ask for at most as many"
        )
    for factor, column in zip(data.factors, data.latents[_scored(settings, data)].T, strict=True):
        if (column == column[0]).all():
            raise SpecError(
                f"{data.title}: {factor.name} is {column[0]:g} in all masks that are scored: no code can match it"
            )


def data_facts(data: KittiMasks) -> dict[str, Any]:
    """What a result says of its data, as JSON."""
    return {
        "name": "synthetic-silhouettes" if data.synthetic else "kitti-masks",
        "synthetic": data.synthetic,
        "sequences": len(data.sequences) - 1,
        "frames": len(data.masks),
        "seed": data.seed if data.synthetic else None,
        # Silhouettes are a function of the numbers above.
        "latents": None if data.synthetic else hashlib.sha256(data.latents.tobytes()).hexdigest()[:16],
    }


def settings_and_data(settings: KittiSettings, data: KittiMasks) -> dict[str, Any]:
    """What a result says of both, as JSON."""
    return {**to_plain(settings), "data": data_facts(data)}

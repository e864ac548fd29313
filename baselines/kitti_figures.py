"""The figures that a run on KITTI Masks leaves in its folder, of its first seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ident3d.baselines.kitti_settings import what_of
from ident3d.baselines.kitti_task import KittiTask
from ident3d.baselines.mask_figures import Array, sequence_figure, traversal_figure
from ident3d.baselines.slowvae import SlowVAE, normal_kl
from ident3d.baselines.transition_figure import transition_figure
from ident3d.metrics import MCCScore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["run_figures"]

LOOKED_AT = 2000
"""Scored masks from which the spread of a code and its KL are taken."""


def run_figures(task: KittiTask, codes: Float[Tensor, "seeds masks dim"], steps: int) -> Iterator[tuple[str, Figure]]:
    """The figures by their file names.

    Args:
        task: trained, its model in evaluation mode.
        codes: of the masks that are scored, as `task.codes()` gives them.
        steps: how long it was trained.

    Yields:
        transitions.png: how sparse the motion is, at the paper's two distances and the run's own; sequence.png: factors
        and codes over the longest sequence; of slowvae traversal.png: what each code does to a mask.
    """
    data, score = task.data, task.matched(codes[:1])[0]
    title = f"{what_of(task.of)}: {steps:,} steps, seed {task.seeds[0]}"
    yield "transitions.png", transition_figure(data, sorted({1, 5, task.of.max_delta_t}))
    longest = int(np.diff(data.sequences).argmax())
    own = task.codes(np.arange(*data.sequences[longest : longest + 2]))[0]
    scored = (codes[0].numpy(), data.latents[task.scored])
    yield "sequence.png", sequence_figure(data, longest, own.numpy(), score, scored, title=title)
    if isinstance(task.model, SlowVAE):
        yield "traversal.png", _traversal(task, task.model, score, f"{title}, on {data.title}")


def _traversal(task: KittiTask, model: SlowVAE, score: MCCScore, title: str) -> Figure:
    masks = task.masks(task.scored[:LOOKED_AT])
    with torch.no_grad():
        mean, log_variance = (part[0].float().cpu() for part in model.posterior(task.for_each_seed(masks)))
    spent = normal_kl(mean, log_variance).mean(0).tolist()

    def decode(z: Array) -> Array:
        with torch.no_grad():
            given = torch.as_tensor(z, dtype=torch.float32, device=task.device)
            logits: Tensor = model.decode(task.for_each_seed(given))[0, :, 0]
        probabilities: Array = logits.float().sigmoid().cpu().numpy()
        return probabilities

    labels = [f"code {k}{_factor_of(score, k)}\nKL {kl:.2f} nats" for k, kl in enumerate(spent)]
    # From a mask as they come: the mean of all codes need not be near any.
    spread = mean.std(0)
    usual = int(((mean - mean.mean(0)) / spread.clamp_min(1e-9)).square().sum(1).argmin())
    return traversal_figure(decode, mean[usual].numpy(), spread.numpy(), labels, title=title)


def _factor_of(score: MCCScore, code: int) -> str:
    if code not in score.assignment:
        return ""
    j = score.assignment.index(code)
    return f": {score.names[j]} {100 * score.per_factor[j]:.0f}%"

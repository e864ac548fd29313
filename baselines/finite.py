"""A watch on a training's numbers that does not make a GPU wait."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["FiniteWatch"]


class FiniteWatch:
    """Notes the first step at which a loss or a gradient is not finite; looked at now and then.

    Args:
        model: what is trained.
        seeds: of the runs side by side, in the order of the losses.
    """

    def __init__(self, model: nn.Module, seeds: tuple[int, ...]) -> None:
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._seeds = seeds
        self._first: Tensor | None = None

    def note(self, step: int, losses: Tensor) -> None:
        """Look at a step's losses (seeds,), and at the gradients, before the step is taken."""
        seen = losses.detach()
        # Those without a gradient count, so that the number of a norm is that of its name.
        grads = [seen.new_zeros(()) if p.grad is None else p.grad for p in self._parameters]
        norms = torch.stack([torch.linalg.vector_norm(grad) for grad in grads] or [seen.new_zeros(())])
        bad_loss, bad_grad = ~torch.isfinite(seen), ~torch.isfinite(norms)
        # (step, a loss?, which): -1 while all is well.
        found = torch.stack(
            [
                torch.where(bad_loss.any() | bad_grad.any(), step, -1),
                bad_loss.any().long(),
                torch.where(bad_loss.any(), bad_loss.long().argmax(), bad_grad.long().argmax()),
            ]
        )
        self._first = found if self._first is None else torch.where(self._first[0] < 0, found, self._first)

    def trouble(self) -> str | None:
        """What was not finite first, and when; None if all was. Waits for a GPU."""
        if self._first is None:
            return None
        step, loss, which = (int(v) for v in self._first.tolist())
        if step < 0:
            return None
        if loss:
            return f"step {step}: the loss of seed {self._seeds[which]} is not finite"
        return f"step {step}: the losses are finite, the gradient of {self._names[which]} is not"

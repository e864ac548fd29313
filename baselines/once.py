"""Functions that have a first derivative and no second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["once"]


class _Refused(torch.autograd.Function):
    """The identity, whose derivative is refused."""

    @staticmethod
    def forward(ctx: Any, flow: Tensor, *inputs: Tensor) -> Tensor:
        return flow.view_as(flow)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("the negatives of InfoNCE are differentiable once, not twice")


def once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward pass of a torch.autograd.Function that must not be differentiated, out of autocast.

    torch's `once_differentiable` refuses a second derivative only where the incoming gradient has a history: a loss of
    which this is the only part that depends on the inputs would get a second derivative of 0 in silence.

    Args:
        backward: (ctx, grad) to gradients; the inputs are among ctx.saved_tensors.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            flows = backward(ctx, grad)
        if not torch.is_grad_enabled():
            return flows
        inputs = [v for v in ctx.saved_tensors if v.requires_grad]
        return tuple(None if flow is None else _Refused.apply(flow, grad, *inputs) for flow in flows)

    return guarded

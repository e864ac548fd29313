"""Contrastive losses: InfoNCE with an L^p distance, a dot product, or both over parts of the dimensions.

For anchors x_i with positives x~_i and a score s, the loss of Zimmermann et al. 2021 (section 3, equation 1; settings
in A.3) is the mean over i of

    -log( e^{s(x_i, x~_i)} / (e^{s(x_i, x~_i)} + sum_j e^{s(x_i, x_j)}) ),

where the negatives x_j are the batch's anchors. Three switches choose between the forms in use:

- `include_self`: the published code sums over all j, so that each anchor is a negative of itself; the clean form leaves
  j = i out.
- `positive_in_denominator`: as above (SimCLR, the published code), or without the positive's own term (the form whose
  limit theorem 1 takes).
- `gather`: negatives are the anchors of all ranks of torch.distributed.

No matrix of B x B scores is held, forward or backward (`ident3d.baselines.negatives`). All losses take (batch, dim) or
(seeds, batch, dim), several independent runs side by side, and return one value a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from ident3d.baselines.negatives import log_sum_exp_scores
from ident3d.baselines.terms import Term
from ident3d.errors import SpecError
from ident3d.spaces import per_dimension

__all__ = ["DotPart", "LpPart", "dot_infonce", "lp_infonce", "product_infonce"]

Temperature = float | Sequence[float] | Tensor
Reduction = Literal["mean", "none"]


@dataclass(frozen=True)
class LpPart:
    """Dimensions of a product that are compared by minus sum_k |x_k - y_k|^p / tau_k.

    Attributes:
        dim: how many dimensions.
        p: the power, at least 1.
        tau: the temperature, above 0: one number, or one a dimension.

    Raises:
        SpecError: another value.
    """

    dim: int
    p: float
    tau: Temperature = 1.0

    def __post_init__(self) -> None:
        _check_part(self.dim, self.tau)
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 1 <= self.p < math.inf:
            raise SpecError(f"p = {self.p!r}: expected a finite number of at least 1")


@dataclass(frozen=True)
class DotPart:
    """Dimensions of a product that are compared by sum_k x_k y_k / tau_k.

    Attributes:
        dim: how many dimensions.
        tau: the temperature, above 0: one number, or one a dimension.

    Raises:
        SpecError: another value.
    """

    dim: int
    tau: Temperature = 1.0

    def __post_init__(self) -> None:
        _check_part(self.dim, self.tau)


def _check_part(dim: int, tau: Temperature) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise SpecError(f"a part of {dim!r} dimensions: expected at least 1")
    if not isinstance(tau, Tensor):
        values: Sequence[float] = per_dimension("tau", tau, dim)
    elif tau.ndim > 1 or tau.numel() not in (1, dim):
        raise SpecError(f"tau of shape {tuple(tau.shape)}: expected one number, or {dim}")
    else:
        # One that is learned lies on its device, and looking at it would make that wait.
        values = tau.detach().flatten().tolist() if tau.device.type == "cpu" else []
    if not all(0 < value < math.inf for value in values):
        raise SpecError(f"tau = {tau!r}: expected finite numbers above 0")


def lp_infonce(
    anchors: Float[Tensor, "*seeds batch dim"],
    positives: Float[Tensor, "*seeds batch dim"],
    *,
    p: float,
    tau: Temperature = 1.0,
    include_self: bool = True,
    positive_in_denominator: bool = True,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Float[Tensor, "*shape"]:
    """InfoNCE with the L^p distance to the power p: s(x, y) = -sum_k |x_k - y_k|^p / tau_k.

    It matches conditionals exp(-sum_k |z_k - z~_k|^p / s^p) on boxes and on R^N (theorems 3 and 5): Laplace for p = 1,
    Normal for p = 2, generalised normal for others.

    Args:
        anchors: representations of x, also the negatives. float16 and bfloat16 are computed in float32.
        positives: representations of x~, row i that of anchor i.
        p: the power, at least 1.
        tau: the temperature, above 0: one number, or one a dimension; a tensor may be learned.
        include_self: leave each anchor among its own negatives, as published.
        positive_in_denominator: whether the positive's term stands in the denominator.
        gather: take the anchors of all ranks as negatives; every rank has as many. Gradients reach the other ranks'
            anchors, so that the mean of the ranks' gradients is that of the whole batch.
        reduction: "mean" over the batch, or "none".

    Returns:
        In nats: one value a run, (*seeds,), or (*seeds, batch) without reduction.

    Raises:
        SpecError: p below 1, tau not above 0, shapes that differ, fewer than two anchors, integers.

    Example:
        >>> x = torch.rand(64, 10, generator=torch.Generator().manual_seed(0))
        >>> lp_infonce(x, x + 0.01, p=1)
        tensor(1.6460)
    """
    parts = [LpPart(_dim_of(anchors), p, tau)]
    return _infonce(anchors, positives, parts, include_self, positive_in_denominator, gather, reduction)


def dot_infonce(
    anchors: Float[Tensor, "*seeds batch dim"],
    positives: Float[Tensor, "*seeds batch dim"],
    *,
    tau: Temperature = 1.0,
    include_self: bool = True,
    positive_in_denominator: bool = True,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Float[Tensor, "*shape"]:
    """InfoNCE with the dot product: s(x, y) = sum_k x_k y_k / tau_k.

    On the sphere it matches von Mises-Fisher conditionals (theorem 2): with tau = 1 and a sphere of radius r, those of
    concentration r^2. Representations are taken as they are, not normalised.

    Args:
        anchors: representations of x, also the negatives.
        positives: representations of x~, row i that of anchor i.
        tau: the temperature, above 0: one number, or one a dimension; a tensor may be learned.
        include_self: leave each anchor among its own negatives, as published.
        positive_in_denominator: whether the positive's term stands in the denominator.
        gather: take the anchors of all ranks as negatives.
        reduction: "mean" over the batch, or "none".

    Returns:
        In nats: one value a run, (*seeds,), or (*seeds, batch) without reduction.

    Raises:
        SpecError: tau not above 0, shapes that differ, fewer than two anchors, integers.
    """
    parts = [DotPart(_dim_of(anchors), tau)]
    return _infonce(anchors, positives, parts, include_self, positive_in_denominator, gather, reduction)


def product_infonce(
    anchors: Float[Tensor, "*seeds batch dim"],
    positives: Float[Tensor, "*seeds batch dim"],
    *,
    parts: Sequence[LpPart | DotPart],
    include_self: bool = True,
    positive_in_denominator: bool = True,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Float[Tensor, "*shape"]:
    """InfoNCE over a product space: the score is the sum of the parts' scores.

    For latents of which some live on a sphere and others in a box, with independent conditionals: their log densities
    add, and so do the scores that match them.

    Args:
        anchors: representations of x, also the negatives; the parts' dimensions side by side.
        positives: representations of x~, row i that of anchor i.
        parts: what compares the first dimensions, the next, and so on.
        include_self: leave each anchor among its own negatives, as published.
        positive_in_denominator: whether the positive's term stands in the denominator.
        gather: take the anchors of all ranks as negatives.
        reduction: "mean" over the batch, or "none".

    Returns:
        In nats: one value a run, (*seeds,), or (*seeds, batch) without reduction.

    Raises:
        SpecError: no part, parts of other dimensions in sum, or as for the other losses.

    Example:
        >>> x = torch.rand(64, 5, generator=torch.Generator().manual_seed(0))
        >>> product_infonce(x, x + 0.01, parts=[DotPart(3), LpPart(2, p=1, tau=0.05)])
        tensor(1.1711)
    """
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, LpPart | DotPart) for part in parts):
        raise SpecError(f"parts = {parts!r}: expected at least one LpPart or DotPart")
    return _infonce(anchors, positives, parts, include_self, positive_in_denominator, gather, reduction)


def _infonce(
    anchors: Tensor,
    positives: Tensor,
    parts: Sequence[LpPart | DotPart],
    include_self: bool,
    positive_in_denominator: bool,
    gather: bool,
    reduction: Reduction,
) -> Tensor:
    _check_pairs(anchors, positives, parts, gather, reduction)
    # Scores subtract numbers that are nearly equal: half precision would lose them.
    with torch.autocast(anchors.device.type, enabled=False):
        wide = torch.promote_types(anchors.dtype, torch.float32)
        anchors, positives = anchors.to(wide), positives.to(wide)
        rows = anchors.reshape(-1, *anchors.shape[-2:])
        centre = rows.detach().mean(1, keepdim=True)
        x, terms = _tempered(rows, parts, centre)
        x_positive, _ = _tempered(positives.reshape(rows.shape), parts, centre)
        gathered, offset = _gathered(rows) if gather else (None, 0)
        if not include_self and max(rows.shape[1], 0 if gathered is None else gathered.shape[1]) < 2:
            raise SpecError("a batch of 1 over all ranks: expected at least 2, since anchors need others as negatives")
        others = None if gathered is None else _tempered(gathered, parts, centre)[0]
        positive = _scores(x, x_positive, terms).view(anchors.shape[:-1])
        negatives = log_sum_exp_scores(x, others, terms, None if include_self else offset).view(positive.shape)
        # Not log(a + b) - log(a): where the loss is small, that is a difference of nearly equal numbers.
        loss = -logsigmoid(positive - negatives) if positive_in_denominator else negatives - positive
    return loss.mean(-1) if reduction == "mean" else loss


def _dim_of(anchors: Tensor) -> int:
    """Dimensions of representations.

    Raises:
        SpecError: no tensor, or one without a batch.
    """
    if not isinstance(anchors, Tensor) or anchors.ndim < 2:
        what = f"a tensor of shape {tuple(anchors.shape)}" if isinstance(anchors, Tensor) else repr(type(anchors))
        raise SpecError(f"anchors: {what}; expected a tensor (batch, dim) or (seeds, batch, dim)")
    return int(anchors.shape[-1])


def _check_pairs(x: Tensor, y: Tensor, parts: Sequence[LpPart | DotPart], gather: bool, reduction: Reduction) -> None:
    if x.ndim not in (2, 3) or x.shape != y.shape:
        raise SpecError(
            f"anchors of shape {tuple(x.shape)}, positives of {tuple(y.shape)}: expected the same, (batch, dim) or "
            "(seeds, batch, dim)"
        )
    if not x.is_floating_point() or x.dtype != y.dtype:
        raise SpecError(f"anchors of {x.dtype}, positives of {y.dtype}: expected the same floating-point type")
    if x.ndim == 3 and x.shape[0] == 0:
        raise SpecError(f"anchors of shape {tuple(x.shape)}: expected at least one run")
    if x.shape[-2] < 2 and not gather:
        raise SpecError(f"a batch of {x.shape[-2]}: expected at least 2, since negatives are the batch's other anchors")
    dim = sum(part.dim for part in parts)
    if dim != x.shape[-1]:
        raise SpecError(f"parts of {dim} dimensions in all, representations of {x.shape[-1]}: expected as many")
    if reduction not in ("mean", "none"):
        raise SpecError(f'reduction = {reduction!r}: expected "mean" or "none"')


def _tempered(x: Tensor, parts: Sequence[LpPart | DotPart], centre: Tensor) -> tuple[Tensor, tuple[Term, ...]]:
    """x scaled so that all temperatures are 1: by tau^(-1/p), or tau^(-1/2) where both sides of a product get it."""
    terms: list[Term] = []
    pieces: list[Tensor] = []
    start = 0
    for part in parts:
        p = part.p if isinstance(part, LpPart) else None
        piece = x[..., start : start + part.dim]
        if not (isinstance(part.tau, int | float) and part.tau == 1):
            tau = torch.as_tensor(part.tau, dtype=x.dtype, device=x.device)
            if p is not None:
                # Distances do not see where the origin is, but points far from it would lose digits when scaled.
                piece = piece - centre[..., start : start + part.dim]
            piece = piece * tau.pow(-1 / (2 if p is None else p))
        terms.append(Term(start, start + part.dim, None if p is None else float(p)))
        pieces.append(piece)
        start += part.dim
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)), tuple(terms)


def _scores(x: Tensor, y: Tensor, terms: tuple[Term, ...]) -> Tensor:
    """s(x_i, y_i), row by row."""
    total = x.new_zeros(x.shape[:-1])
    for term in terms:
        a, b = x[..., term.start : term.stop], y[..., term.start : term.stop]
        total = total + ((a * b).sum(-1) if term.p is None else -(a - b).abs().pow(term.p).sum(-1))
    return total


def _gathered(rows: Tensor) -> tuple[Tensor | None, int]:
    """The anchors of all ranks, and where this rank's begin; None where there is one rank.

    Raises:
        SpecError: torch.distributed is not initialised.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise SpecError(
            "gather=True: expected torch.distributed to be initialised, as torchrun and init_process_group do"
        )
    if distributed.get_world_size() == 1:
        return None, 0
    gathered: Tensor = _AllGather.apply(rows)
    return gathered, distributed.get_rank() * rows.shape[1]


class _AllGather(torch.autograd.Function):
    """(seeds, ranks * batch, dim). Not torch.distributed.nn's, deprecated since 2.15: its backward pass receives into
    tensors laid out as the gradient, whose rows it so scrambles where that is not contiguous."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        pieces = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(pieces, rows)
        return torch.cat(pieces, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total)
        return total.chunk(torch.distributed.get_world_size(), 1)[torch.distributed.get_rank()]

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
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ident3d.baselines.negatives import log_sum_exp_scores
from ident3d.baselines.terms import Term
from ident3d.errors import SpecError

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
    if isinstance(tau, Tensor):
        # A temperature that is learned lies on its device, and looking at it would wait for that.
        known = tau.detach().flatten().tolist() if tau.device.type == "cpu" else []
        count = tau.shape[-1] if tau.ndim else 1
    else:
        many = not isinstance(tau, int | float)
        known = list(tau) if many else [tau]  # type: ignore[arg-type]
        count = len(known) if many else 1
    if not all(isinstance(t, int | float) and not isinstance(t, bool) and 0 < t < math.inf for t in known):
        raise SpecError(f"tau = {tau!r}: expected finite numbers above 0")
    if count not in (1, dim):
        raise SpecError(f"tau has {count} values; expected one, or {dim}")


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
    parts = [LpPart(anchors.shape[-1] if anchors.ndim else 0, p, tau)]
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
    parts = [DotPart(anchors.shape[-1] if anchors.ndim else 0, tau)]
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
    if not parts or not all(isinstance(part, LpPart | DotPart) for part in parts):
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
        x, terms = _tempered(anchors.to(wide), parts)
        x_positive, _ = _tempered(positives.to(wide), parts)
        positive = _scores(x, x_positive, terms)
        rows = x.reshape(-1, *x.shape[-2:])
        others, offset = _gathered(rows) if gather else (None, 0)
        negatives = log_sum_exp_scores(rows, others, terms, None if include_self else offset).view(positive.shape)
        if positive_in_denominator:
            negatives = torch.logaddexp(positive, negatives)
        loss = negatives - positive
    return loss.mean(-1) if reduction == "mean" else loss


def _check_pairs(x: Tensor, y: Tensor, parts: Sequence[LpPart | DotPart], gather: bool, reduction: Reduction) -> None:
    if x.ndim not in (2, 3) or x.shape != y.shape:
        raise SpecError(
            f"anchors of shape {tuple(x.shape)}, positives of {tuple(y.shape)}: expected the same, (batch, dim) or "
            "(seeds, batch, dim)"
        )
    if not x.is_floating_point() or x.dtype != y.dtype:
        raise SpecError(f"anchors of {x.dtype}, positives of {y.dtype}: expected the same floating-point type")
    if x.shape[-2] < 2 and not gather:
        raise SpecError(f"a batch of {x.shape[-2]}: expected at least 2, since negatives are the batch's other anchors")
    dim = sum(part.dim for part in parts)
    if dim != x.shape[-1]:
        raise SpecError(f"parts of {dim} dimensions in all, representations of {x.shape[-1]}: expected as many")
    if reduction not in ("mean", "none"):
        raise SpecError(f'reduction = {reduction!r}: expected "mean" or "none"')


def _tempered(x: Tensor, parts: Sequence[LpPart | DotPart]) -> tuple[Tensor, tuple[Term, ...]]:
    """x scaled so that all temperatures are 1: by tau^(-1/p), or tau^(-1/2) where both sides of a product get it."""
    terms: list[Term] = []
    pieces: list[Tensor] = []
    start = 0
    for part in parts:
        p = part.p if isinstance(part, LpPart) else None
        piece = x[..., start : start + part.dim]
        if isinstance(part.tau, Tensor) or part.tau != 1:
            tau = torch.as_tensor(part.tau, dtype=x.dtype, device=x.device)
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
    from torch.distributed.nn.functional import all_gather

    pieces = all_gather(rows.contiguous())  # type: ignore[no-untyped-call]
    return torch.cat(pieces, 1), distributed.get_rank() * rows.shape[1]

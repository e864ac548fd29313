"""The negatives' part of InfoNCE, log sum_j exp(s_ij), without its matrix of scores.

Scores are made a tile at a time, in the difference form (so that near points keep their digits), and made again in the
backward pass: memory is a few tiles, whatever the batch. Where the negatives are the anchors themselves, s_ij = s_ji:
each tile above the diagonal serves its rows and its columns, half the work of a full pass.

On a CUDA device `ident3d.baselines.fused` does the same in one kernel where Triton is installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ident3d.baselines.once import once
from ident3d.baselines.terms import Term

__all__ = ["log_sum_exp_scores"]

TILE_CPU = 768 * 768
"""Scores a tile on the CPU: its three buffers stay in the caches (tried 256^2 to 1,024^2 on Zen 5)."""
TILE_DEVICE = 4096 * 4096
LEAST_SUM = 1e-30
"""Sums of exponentials below this have lost float32's digits, and are made again with a maximum a row."""


def log_sum_exp_scores(
    x: Float[Tensor, "seeds rows dim"],
    y: Float[Tensor, "seeds columns dim"] | None,
    terms: tuple[Term, ...],
    skip: int | None = None,
) -> Float[Tensor, "seeds rows"]:
    """log sum_j exp(s(x_i, y_j)), differentiable once in x and y.

    Args:
        x: the anchors, float32 or float64.
        y: what they are compared with; None for the anchors themselves.
        terms: how; the score is the sum over terms.
        skip: leave out column i + skip of row i, its own copy.
    """
    if x.device.type == "cuda":
        from ident3d.baselines.fused import fused_log_sum_exp, is_fusible

        if is_fusible(x, terms):
            return fused_log_sum_exp(x, y, terms, skip)
    if y is None and skip in (None, 0):
        result: Tensor = _Square.apply(x, terms, skip is not None)
    else:
        result = _Rectangle.apply(x, x if y is None else y, terms, skip)
    return result


class _Scores:
    """Tiles of scores between x and y, and what flows back through them.

    Coordinates are kept a row a dimension, so that each pass over a tile reads along memory.
    """

    def __init__(self, x: Tensor, y: Tensor, terms: tuple[Term, ...]) -> None:
        self.terms = terms
        self.x, self.y = (v.permute(2, 0, 1).contiguous() for v in (x, y))
        self.same = x is y
        budget = (TILE_CPU if x.device.type == "cpu" else TILE_DEVICE) // x.shape[0]
        side = max(64, math.isqrt(budget))
        self.rows, self.columns = _even(x.shape[1], side), _even(y.shape[1], side)
        self._buffers = [x.new_empty(x.shape[0], self.rows, self.columns) for _ in range(3)]

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of each tile, row after row; above the diagonal alone where x is y."""
        for i in range(0, self.x.shape[2], self.rows):
            for j in range(i if self.same else 0, self.y.shape[2], self.columns):
                yield slice(i, i + self.rows), slice(j, j + self.columns)

    def _room(self, rows: slice, columns: slice) -> list[Tensor]:
        t, u = self.x[0, :, rows].shape[1], self.y[0, :, columns].shape[1]
        return [buffer[:, :t, :u] for buffer in self._buffers]

    def scores(self, rows: slice, columns: slice) -> Tensor:
        """s_ij of a tile, in a buffer that the next tile uses again."""
        total, step, other = self._room(rows, columns)
        total.zero_()
        for term in self.terms:
            if term.p is None:
                x, y = self.x[term.start : term.stop, :, rows], self.y[term.start : term.stop, :, columns]
                total.baddbmm_(x.permute(1, 2, 0), y.permute(1, 0, 2))
                continue
            for k in range(term.start, term.stop):
                torch.sub(self.x[k, :, rows, None], self.y[k, :, None, columns], out=step)
                _subtract_power(total, step, other, term.p)
        return total

    def flow_back(self, rows: slice, columns: slice, weights: Tensor, grad_x: Tensor, grad_y: Tensor) -> None:
        """Add sum_j w_ij ds_ij/dx_i to grad_x and sum_i w_ij ds_ij/dy_j to grad_y, both (dim, seeds, points)."""
        _, step, other = self._room(rows, columns)
        for term in self.terms:
            part = slice(term.start, term.stop)
            if term.p is None or term.p == 2:
                self._flow_linear(part, rows, columns, weights, grad_x, grad_y, dot=term.p is None)
                continue
            for k in range(term.start, term.stop):
                torch.sub(self.x[k, :, rows, None], self.y[k, :, None, columns], out=step)
                _slope(step, other, term.p).mul_(weights)
                grad_x[k, :, rows].sub_(step.sum(2), alpha=term.p)
                grad_y[k, :, columns].add_(step.sum(1), alpha=term.p)

    def _flow_linear(
        self, part: slice, rows: slice, columns: slice, weights: Tensor, grad_x: Tensor, grad_y: Tensor, dot: bool
    ) -> None:
        """Where ds/dx is linear in x and y, the sums over a tile are products of matrices."""
        x, y = self.x[part, :, rows].permute(1, 2, 0), self.y[part, :, columns].permute(1, 2, 0)
        if dot:
            to_x, to_y = weights @ y, weights.mT @ x
        else:
            # About a middle, so that points far from the origin lose no digits.
            middle = x.mean(1, keepdim=True)
            x, y = x - middle, y - middle
            to_x = 2 * (weights @ y - x * weights.sum(2).unsqueeze(2))
            to_y = 2 * (weights.mT @ x - y * weights.sum(1).unsqueeze(2))
        grad_x[part, :, rows] += to_x.permute(2, 0, 1)
        grad_y[part, :, columns] += to_y.permute(2, 0, 1)


def _even(count: int, most: int) -> int:
    """The least side that needs no more tiles than `most` would."""
    return math.ceil(count / math.ceil(count / most)) if count else 1


def _subtract_power(total: Tensor, step: Tensor, other: Tensor, p: float) -> None:
    """total -= |step|^p, in place."""
    if p == 1:
        total.sub_(step.abs_())
    elif p == 2:
        total.addcmul_(step, step, value=-1)
    elif p == 3:
        torch.mul(step, step, out=other)
        total.addcmul_(other, step.abs_(), value=-1)
    else:
        total.sub_(step.abs_().pow_(p))


def _slope(step: Tensor, other: Tensor, p: float) -> Tensor:
    """|step|^(p - 1) sign(step), in place: the derivative of |step|^p / p, 0 at 0."""
    if p == 1:
        return torch.sign(step, out=step)
    if p == 3:
        return step.mul_(torch.abs(step, out=other))
    torch.abs(step, out=other).pow_(p - 1)
    return step.sign_().mul_(other)


def _shift(x: Tensor, terms: tuple[Term, ...]) -> Tensor:
    """An upper bound of all scores, (seeds, 1, 1): distances are at most 0, and x . y at most the greatest |x|^2."""
    bound = x.new_zeros(len(x), 1, 1)
    for term in terms:
        if term.p is None:
            bound += x[:, :, term.start : term.stop].square().sum(2, keepdim=True).amax(1, keepdim=True)
    return bound


class _Square(torch.autograd.Function):
    """The anchors against themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: tuple[Term, ...], skip: bool) -> Tensor:
        shift = _shift(x, terms)
        sums = torch.zeros_like(x[:, :, 0])
        for rows, columns, e in _exponentials(_Scores(x, x, terms), shift, skip):
            sums[:, rows] += e.sum(2)
            if columns != rows:
                sums[:, columns] += e.sum(1)
        ctx.terms, ctx.skip = terms, skip
        # False for NaN as well, which the careful way hands on.
        ctx.sound = bool((sums > LEAST_SUM).all()) and bool(torch.isfinite(sums).all())
        lse = sums.log() + shift[:, :, 0] if ctx.sound else _lse_by_rows(_Rows(x, x, terms), 0 if skip else None)
        ctx.save_for_backward(x, lse, shift)
        return lse

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, lse, shift = ctx.saved_tensors
        if not ctx.sound:
            by_x, by_y = _backward_by_rows(_Rows(x, x, ctx.terms), grad, lse, 0 if ctx.skip else None)
            return by_x + by_y, None, None
        tiles = _Scores(x, x, ctx.terms)
        flow = torch.zeros_like(tiles.x)
        u = grad * torch.exp(shift[:, :, 0] - lse)
        # A distance to itself has derivative 0; its weight, often nearly 1, would hide the others' digits.
        skip = ctx.skip or all(term.p is not None for term in ctx.terms)
        for rows, columns, e in _exponentials(tiles, shift, skip):
            if columns == rows:
                e.mul_(u[:, rows, None])
            else:
                e.mul_(torch.add(u[:, rows, None], u[:, None, columns], out=tiles._room(rows, columns)[1]))
            tiles.flow_back(rows, columns, e, flow, flow)
        return flow.permute(1, 2, 0), None, None


def _exponentials(tiles: _Scores, shift: Tensor, skip: bool) -> Iterator[tuple[slice, slice, Tensor]]:
    """exp(s - shift) of each tile, with its place; with `skip`, 0 on the diagonal."""
    for rows, columns in tiles.tiles():
        e = tiles.scores(rows, columns).sub_(shift).exp_()
        if skip and rows == columns:
            e.diagonal(dim1=1, dim2=2).zero_()
        yield rows, columns, e


class _Rows(_Scores):
    """All tiles, the square's lower half included."""

    def __init__(self, x: Tensor, y: Tensor, terms: tuple[Term, ...]) -> None:
        super().__init__(x, y, terms)
        self.same = False

    def masked(self, rows: slice, columns: slice, skip: int | None) -> Tensor:
        """Scores of a tile, -inf where a row meets its own copy."""
        s = self.scores(rows, columns)
        if skip is not None:
            offset = rows.start + skip - columns.start
            if -s.shape[1] < offset < s.shape[2]:
                s.diagonal(offset, dim1=1, dim2=2).fill_(-math.inf)
        return s


def _lse_by_rows(tiles: _Rows, skip: int | None) -> Tensor:
    """With the greatest score of each row so far, so that nothing overflows or vanishes."""
    lse = tiles.x.new_full(tiles.x.shape[1:], -math.inf)
    for rows, columns in tiles.tiles():
        lse[:, rows] = torch.logaddexp(lse[:, rows], torch.logsumexp(tiles.masked(rows, columns, skip), 2))
    return lse


def _backward_by_rows(tiles: _Rows, grad: Tensor, lse: Tensor, skip: int | None) -> tuple[Tensor, Tensor]:
    grad_x, grad_y = torch.zeros_like(tiles.x), torch.zeros_like(tiles.y)
    # A row without any negative has no gradient; -inf less -inf would be NaN.
    lse = lse.clamp(min=torch.finfo(lse.dtype).min)
    for rows, columns in tiles.tiles():
        w = tiles.masked(rows, columns, skip).sub_(lse[:, rows, None]).exp_().mul_(grad[:, rows, None])
        tiles.flow_back(rows, columns, w, grad_x, grad_y)
    return grad_x.permute(1, 2, 0), grad_y.permute(1, 2, 0)


class _Rectangle(torch.autograd.Function):
    """Anchors against other points, such as those of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, terms: tuple[Term, ...], skip: int | None) -> Tensor:
        lse = _lse_by_rows(_Rows(x, y, terms), skip)
        ctx.terms, ctx.skip = terms, skip
        ctx.save_for_backward(x, y, lse)
        return lse

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y, lse = ctx.saved_tensors
        grad_x, grad_y = _backward_by_rows(_Rows(x, y, ctx.terms), grad, lse, ctx.skip)
        return grad_x, grad_y, None, None

"""The Triton kernels of `ident3d.baselines.fused`. Importing this module needs Triton.

A program serves a block of points of one seed and walks over the points that they meet, a tile at a time. Tiles lie
(other points, own points) with one warp a program: each thread then holds whole columns of the tile, so that maxima and
sums over the other points need no exchange between threads.

Loops over dimensions are loops at run time, one a term: unrolled, the compiler fetches all dimensions at once and runs
out of registers.

Points come as (dim, seeds, points), contiguous. `starts`, `stops` and `powers` describe the terms; the power 0 stands
for the dot product.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["flow_kernel", "lse_kernel"]

COUNTS = ["own_points", "other_points", "share", "skip"]
"""Of these, every value uses the same compiled kernel."""


@triton.jit  # type: ignore[untyped-decorator]
def _scores(
    own: tl.tensor,
    other: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    own_points: tl.tensor,
    other_points: tl.tensor,
    seeds: tl.tensor,
    starts: tl.constexpr,
    stops: tl.constexpr,
    powers: tl.constexpr,
    own_block: tl.constexpr,
    other_block: tl.constexpr,
) -> tl.tensor:
    """s of a tile, (other points, own points); `own` and `other` point at their seed's first dimension."""
    total = tl.zeros((other_block, own_block), own.dtype.element_ty)
    for t in tl.static_range(len(powers)):
        for k in range(starts[t], stops[t]):
            a = tl.load(own + k * seeds * own_points + i, mask=i < own_points, other=0)[None, :]
            b = tl.load(other + k * seeds * other_points + j, mask=j < other_points, other=0)[:, None]
            if powers[t] == 0:
                total += a * b
            elif powers[t] == 1:
                total -= tl.abs(a - b)
            elif powers[t] == 2:
                total -= (a - b) * (a - b)
            elif powers[t] == 3:
                total -= (a - b) * (a - b) * tl.abs(a - b)
            else:
                # At a = b this is exp2(-inf), which is 0.
                total -= tl.exp2(powers[t] * tl.log2(tl.abs(a - b)))
    return total


@triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator]
def lse_kernel(
    own: tl.tensor,
    other: tl.tensor,
    out: tl.tensor,
    own_points: tl.tensor,
    other_points: tl.tensor,
    share: tl.tensor,
    skip: tl.tensor,
    skips: tl.constexpr,
    starts: tl.constexpr,
    stops: tl.constexpr,
    powers: tl.constexpr,
    own_block: tl.constexpr,
    other_block: tl.constexpr,
) -> None:
    """log sum_j exp(s_ij) over a share of the other points, into out, (shares, seeds, own points).

    Args:
        own: the anchors.
        other: what they are compared with.
        out: the result.
        own_points: how many anchors a seed.
        other_points: how many others a seed.
        share: how many others a program walks over.
        skip: with `skips`, i + skip is left out for anchor i.
        skips: whether anything is left out.
        starts: the first dimension of each term.
        stops: one past its last.
        powers: its power, or 0.
        own_block: anchors a program, a power of 2.
        other_block: others a tile, a power of 2.
    """
    seed = tl.program_id(1).to(tl.int64)
    seeds = tl.num_programs(1).to(tl.int64)
    split = tl.program_id(2)
    own += seed * own_points
    other += seed * other_points
    i = tl.program_id(0) * own_block + tl.arange(0, own_block)
    greatest = tl.full((own_block,), -float("inf"), own.dtype.element_ty)
    total = tl.zeros((own_block,), own.dtype.element_ty)
    for start in range(split * share, tl.minimum((split + 1) * share, other_points), other_block):
        j = start + tl.arange(0, other_block)
        s = _scores(own, other, i, j, own_points, other_points, seeds, starts, stops, powers, own_block, other_block)
        keep = (j < other_points)[:, None]
        if skips:
            keep &= j[:, None] != (i + skip)[None, :]
        s = tl.where(keep, s, -float("inf"))
        before = greatest
        greatest = tl.maximum(before, tl.max(s, 0))
        # Infinite where all scores so far are left out: inf - inf would be NaN.
        base = tl.where(tl.abs(greatest) == float("inf"), 0.0, greatest)
        total = total * tl.exp(before - base) + tl.sum(tl.exp(s - base[None, :]), 0)
    base = tl.where(tl.abs(greatest) == float("inf"), 0.0, greatest)
    tl.store(out + (split * seeds + seed) * own_points + i, base + tl.log(total), mask=i < own_points)


@triton.jit  # type: ignore[untyped-decorator]
def _flow(a: tl.tensor, b: tl.tensor, weights: tl.tensor, power: tl.constexpr) -> tl.tensor:
    """The sum over the other points b of w ds/da in one dimension."""
    if power == 0:
        flow = tl.sum(weights * b, 0)
    elif power == 1:
        # Two sums, so that each comparison feeds a multiply-add.
        flow = tl.sum(weights * (b > a).to(weights.dtype), 0) - tl.sum(weights * (b < a).to(weights.dtype), 0)
    elif power == 2:
        flow = 2 * tl.sum(weights * (b - a), 0)
    elif power == 3:
        flow = 3 * tl.sum(weights * ((b - a) * tl.abs(b - a)), 0)
    else:
        size = tl.exp2((power - 1) * tl.log2(tl.abs(b - a)))
        flow = power * tl.sum(weights * tl.where(b > a, size, -size), 0)
    return flow


@triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator]
def flow_kernel(
    own: tl.tensor,
    other: tl.tensor,
    own_lse: tl.tensor,
    own_grad: tl.tensor,
    other_lse: tl.tensor,
    other_grad: tl.tensor,
    out: tl.tensor,
    own_points: tl.tensor,
    other_points: tl.tensor,
    share: tl.tensor,
    skip: tl.tensor,
    dim: tl.constexpr,
    as_anchors: tl.constexpr,
    as_others: tl.constexpr,
    skips: tl.constexpr,
    starts: tl.constexpr,
    stops: tl.constexpr,
    powers: tl.constexpr,
    own_block: tl.constexpr,
    other_block: tl.constexpr,
    dim_block: tl.constexpr,
) -> None:
    """The gradient that flows to own points from a share of the others, into out, (shares, dim, seeds, own points).

    Since s is symmetric, own points may be the anchors, what anchors are compared with, or both at once: nothing is
    added up between programs, and results do not depend on their order.

    Args:
        own: the points whose gradient this is.
        other: the points that they meet.
        own_lse: the own points' result, read if they are anchors; inf for -inf, so that nothing flows there.
        own_grad: the gradient of it.
        other_lse: the other points' result, likewise.
        other_grad: the gradient of it.
        out: the result.
        own_points: how many own points a seed.
        other_points: how many others a seed.
        share: how many others a program walks over.
        skip: with `skips`, what is left out for anchor i is i + skip.
        dim: how many dimensions.
        as_anchors: whether own points are anchors, to which each s_ij flows with grad_i exp(s_ij - lse_i).
        as_others: whether own points are what anchors are compared with.
        skips: whether anything is left out.
        starts: the first dimension of each term.
        stops: one past its last.
        powers: its power, or 0.
        own_block: own points a program, a power of 2.
        other_block: others a tile, a power of 2.
        dim_block: dim or more, a power of 2.
    """
    seed = tl.program_id(1).to(tl.int64)
    seeds = tl.num_programs(1).to(tl.int64)
    split = tl.program_id(2)
    own += seed * own_points
    other += seed * other_points
    i = tl.program_id(0) * own_block + tl.arange(0, own_block)
    dims = tl.arange(0, dim_block)[:, None]
    flow = tl.zeros((dim_block, own_block), own.dtype.element_ty)
    if as_anchors:
        i_lse = tl.load(own_lse + seed * own_points + i, mask=i < own_points, other=float("inf"))
        i_grad = tl.load(own_grad + seed * own_points + i, mask=i < own_points, other=0)
    for start in range(split * share, tl.minimum((split + 1) * share, other_points), other_block):
        j = start + tl.arange(0, other_block)
        s = _scores(own, other, i, j, own_points, other_points, seeds, starts, stops, powers, own_block, other_block)
        weights = tl.zeros_like(s)
        if as_anchors:
            keep = (j < other_points)[:, None]
            if skips:
                keep &= j[:, None] != (i + skip)[None, :]
            weights += tl.where(keep, i_grad[None, :] * tl.exp(s - i_lse[None, :]), 0.0)
        if as_others:
            # Beyond the last point, exp(s - inf) is 0.
            j_lse = tl.load(other_lse + seed * other_points + j, mask=j < other_points, other=float("inf"))
            j_grad = tl.load(other_grad + seed * other_points + j, mask=j < other_points, other=0)
            part = j_grad[:, None] * tl.exp(s - j_lse[:, None])
            if skips:
                part = tl.where((j + skip)[:, None] != i[None, :], part, 0.0)
            weights += part
        for t in tl.static_range(len(powers)):
            for k in range(starts[t], stops[t]):
                a = tl.load(own + k * seeds * own_points + i, mask=i < own_points, other=0)[None, :]
                b = tl.load(other + k * seeds * other_points + j, mask=j < other_points, other=0)[:, None]
                flow += tl.where(dims == k, _flow(a, b, weights, powers[t])[None, :], 0.0)
    place = ((split * dim + dims) * seeds + seed) * own_points + i[None, :]
    tl.store(out + place, flow, mask=(dims < dim) & (i < own_points)[None, :])

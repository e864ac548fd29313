"""`log_sum_exp_scores` on a CUDA device: one Triton kernel forward, one or two backward, and no matrix of scores.

Each program keeps a block of anchors and walks over what they are compared with, a tile of scores at a time, under the
greatest score so far (the online softmax of FlashAttention: Dao et al. 2022, section 3.1). The backward pass makes the
scores again. Scores take the difference form in the type of the input; no TF32, no atomic additions: on one kind of
device, the same input gives the same bits.
"""

from __future__ import annotations

import functools
import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ident3d.baselines.once import once
from ident3d.baselines.terms import Term

__all__ = ["fused_log_sum_exp", "is_fusible"]

MOST_DIMS = 64
"""The gradient of a point lies in one thread's registers."""
MOST_SEEDS = 65_535
"""CUDA's limit for a grid's second axis."""
PROGRAMS = 4096
"""Programs to aim for: by its registers, an H100 holds some 1,200 at once, and unequal ends should not show. A number
of its own, not the device's, since it decides how sums are split, and so their last bits."""
LEAST_SHARE = 256
"""The fewest columns for which a program is worth starting."""


def is_fusible(x: Float[Tensor, "seeds rows dim"], terms: tuple[Term, ...]) -> bool:
    """Whether `fused_log_sum_exp` serves this input; else the tiled form does.

    Args:
        x: the anchors.
        terms: how they are compared; any number of terms, any p.
    """
    return (
        x.device.type == "cuda"
        and x.dtype in (torch.float32, torch.float64)
        and 1 <= x.shape[2] <= MOST_DIMS
        and x.shape[0] <= MOST_SEEDS
        and all(0 <= term.start <= term.stop <= x.shape[2] for term in terms)
        and _runs_on(x.device)
    )


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Whether kernels compile and run there: Triton needs a C compiler and Python's headers at run time as well."""
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (7, 0):
        return False
    try:
        _log_sum_exp(torch.zeros(1, 1, 2, device=device), torch.zeros(1, 1, 2, device=device), (Term(0, 1, 1),), None)
        torch.cuda.synchronize(device)
    except Exception as problem:  # whatever it is, there is another way to the result
        warnings.warn(
            f"Triton is installed but does not run on {device} ({type(problem).__name__}: {problem}); losses take the "
            "tiled form there, which is slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def fused_log_sum_exp(
    x: Float[Tensor, "seeds rows dim"],
    y: Float[Tensor, "seeds columns dim"] | None,
    terms: tuple[Term, ...],
    skip: int | None = None,
) -> Float[Tensor, "seeds rows"]:
    """log sum_j exp(s(x_i, y_j)), differentiable once in x and y; -inf, with gradient 0, where no j is left.

    Args:
        x: the anchors, float32 or float64, as `is_fusible` accepts them. With TRITON_INTERPRET=1 in the environment,
            on the CPU as well.
        y: what they are compared with, of the same type and device; None for the anchors themselves.
        terms: how; the score is the sum over terms.
        skip: leave out column i + skip of row i.
    """
    result: Tensor = _Fused.apply(x, y, terms, skip)
    return result


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, terms: tuple[Term, ...], skip: int | None) -> Tensor:
        points = _by_dimension(x)
        lse = _log_sum_exp(points, points if y is None else _by_dimension(y), terms, skip)
        ctx.terms, ctx.skip = terms, skip
        ctx.save_for_backward(x, y, lse)
        return lse

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y, lse = ctx.saved_tensors
        anchors = _by_dimension(x)
        # Where no score counts, exp(s - inf) lets nothing flow.
        weighting = lse.masked_fill(lse == -math.inf, math.inf), grad.contiguous()
        if y is None:
            return _gradient(anchors, anchors, weighting, weighting, ctx.terms, ctx.skip), None, None, None
        others = _by_dimension(y)
        to_x = to_y = None
        if ctx.needs_input_grad[0]:
            to_x = _gradient(anchors, others, weighting, None, ctx.terms, ctx.skip)
        if ctx.needs_input_grad[1]:
            to_y = _gradient(others, anchors, None, weighting, ctx.terms, ctx.skip)
        return to_x, to_y, None, None


def _by_dimension(x: Tensor) -> Tensor:
    """(dim, seeds, points): the points of a block lie side by side in each dimension."""
    return x.permute(2, 0, 1).contiguous()


@dataclass(frozen=True)
class _Launch:
    """How many programs there are, and what each of them does.

    Attributes:
        grid: programs along own points, seeds and shares of the others.
        share: other points a program, whole tiles.
        own_block: own points a program.
        other_block: other points a tile.
    """

    grid: tuple[int, int, int]
    share: int
    own_block: int
    other_block: int

    @classmethod
    def of(cls, own: Tensor, other: Tensor) -> _Launch:
        """For the others to be split into as many shares as it takes to keep a device busy.

        Blocks are the largest of those tried that leave 8 warps or more of the backward kernel on a processor and spill
        nothing, or a few values in products and in float64 beyond 32 dimensions (ptxas for sm_90): two own points a
        thread up to 16 dimensions, one beyond and in float64.
        """
        dim, seeds, points = own.shape
        narrow = own.dtype == torch.float32
        own_block = 64 if narrow and dim <= 16 else 32
        other_block = 32 if narrow else 16
        blocks = math.ceil(points / own_block)
        splits = min(PROGRAMS // max(blocks * seeds, 1), other.shape[2] // LEAST_SHARE)
        tiles = math.ceil(other.shape[2] / other_block)
        share = other_block * max(math.ceil(tiles / max(splits, 1)), 1)
        return cls((blocks, seeds, max(math.ceil(other.shape[2] / share), 1)), share, own_block, other_block)

    @property
    def splits(self) -> int:
        """Shares of the other points."""
        return self.grid[2]

    def start(self, kernel: Any, own: Tensor, other: Tensor, *tensors: Tensor, **constants: Any) -> None:
        """Run a kernel on own and other points."""
        if 0 in self.grid:
            return
        # Triton starts kernels on the current device, whatever the tensors' own.
        with torch.cuda.device(own.device) if own.device.type == "cuda" else nullcontext():
            kernel[self.grid](
                own,
                other,
                *tensors,
                own.shape[2],
                other.shape[2],
                self.share,
                own_block=self.own_block,
                other_block=self.other_block,
                num_warps=1,
                # Multiply-adds; Triton 3.9 warns of a change of default where it is left open.
                enable_fp_fusion=True,
                **constants,
            )


def _constants(terms: tuple[Term, ...], skip: int | None) -> dict[str, Any]:
    """What both kernels are told of the scores."""
    return {
        "skip": skip or 0,
        "skips": skip is not None,
        "starts": tuple(term.start for term in terms),
        "stops": tuple(term.stop for term in terms),
        "powers": tuple(0.0 if term.p is None else float(term.p) for term in terms),
    }


def _log_sum_exp(own: Tensor, other: Tensor, terms: tuple[Term, ...], skip: int | None) -> Tensor:
    """(seeds, own points) from (dim, seeds, points)."""
    from ident3d.baselines.fused_kernels import lse_kernel

    launch = _Launch.of(own, other)
    parts = own.new_empty(launch.splits, *own.shape[1:])
    launch.start(lse_kernel, own, other, parts, **_constants(terms, skip))
    return parts[0] if launch.splits == 1 else torch.logsumexp(parts, 0)


def _gradient(
    own: Tensor,
    other: Tensor,
    as_anchors: tuple[Tensor, Tensor] | None,
    as_others: tuple[Tensor, Tensor] | None,
    terms: tuple[Term, ...],
    skip: int | None,
) -> Tensor:
    """(seeds, own points, dim): what flows to own points.

    Args:
        own: the points, (dim, seeds, points).
        other: those that they meet.
        as_anchors: the own points' result and its gradient; None if they are no anchors.
        as_others: the other points' result and its gradient; None if those are no anchors.
        terms: the score.
        skip: what is left out.
    """
    from ident3d.baselines.fused_kernels import flow_kernel

    launch = _Launch.of(own, other)
    parts = own.new_empty(launch.splits, *own.shape)
    launch.start(
        flow_kernel,
        own,
        other,
        *(as_anchors or (own, own)),  # a place to point at, not read
        *(as_others or (own, own)),
        parts,
        **_constants(terms, skip),
        dim=len(own),
        as_anchors=as_anchors is not None,
        as_others=as_others is not None,
        dim_block=1 << (len(own) - 1).bit_length(),
    )
    return (parts[0] if launch.splits == 1 else parts.sum(0)).permute(1, 2, 0)

"""The invertible multi-layer perceptron g that mixes latents into observations: x = g(z).

    g(z) = W_L a(W_{L-1} ... a(W_1 z)),   a(y) = y where y >= 0, slope * y elsewhere

(a) Settings of the paper (Zimmermann et al. 2021, section A.3): L = 3 square layers without bias, slope 0.2, columns of
L2 norm 1, each matrix the best conditioned of 25,000 candidates with entries uniform in [-1, 1].

Vectors are columns: a matrix is (out, in), x = W z, and its columns are W[:, j]. Several mixings, one a seed, stand
in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ident3d.checks import whole
from ident3d.datasets.batches import generator_of
from ident3d.errors import SpecError

__all__ = ["InvertibleMLP", "MixingDescription", "best_conditioned", "invertible_mlp"]

CHUNK_BYTES = 48 * 2**20
"""Bytes of candidates scored at once. What is drawn, normalised and worked on by LAPACK is held beside each other:
some four times as much."""


class MixingDescription(TypedDict):
    """What a manifest or a log tells about mixings, as plain numbers."""

    dim: int
    layers: int
    slope: float
    conditions: list[list[float]]


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Seeds, one for each of the models that stand in one batch.

    Raises:
        SpecError: none, one twice, or one that is not a whole number of at least 0.
    """
    if not isinstance(seeds, Sequence) or isinstance(seeds, str | bytes) or not seeds:
        raise SpecError(f"seeds = {seeds!r}: expected at least one seed in a sequence")
    checked = tuple(whole("seed", seed, 0) for seed in seeds)
    if len(set(checked)) != len(checked):
        raise SpecError(f"seeds = {list(checked)}: expected each seed once")
    return checked


def check_batch(x: Tensor, seeds: int, dim: int) -> None:
    """Refuse what is not a batch of so many seeds and dimensions.

    Raises:
        SpecError: a tensor of another shape.
    """
    if x.ndim != 3 or (x.shape[0], x.shape[2]) != (seeds, dim):
        raise SpecError(f"tensor of shape {tuple(x.shape)}: expected (seeds, batch, dim) = ({seeds}, batch, {dim})")


def check_slope(slope: float) -> float:
    """The slope of a leaky ReLU. It has an inverse for slopes above 0 alone.

    Raises:
        SpecError: not a finite number above 0.
    """
    if isinstance(slope, bool) or not isinstance(slope, int | float) or not 0 < slope < math.inf:
        raise SpecError(f"slope = {slope!r}: expected a finite number above 0")
    return float(slope)


def best_conditioned(dim: int, candidates: int, *, generator: torch.Generator) -> Float[Tensor, "dim dim"]:
    """The best conditioned of several random square matrices (section A.3).

    Entries are uniform in [-1, 1]; columns W[:, j] are scaled to an L2 norm of 1; of these matrices the one of the
    least condition number s_max / s_min is taken, the first among equals.

    Args:
        dim: rows and columns, at least 1.
        candidates: how many are drawn, at least 1. The first ones are the same however many follow.
        generator: of the CPU.

    Returns:
        The matrix, in float64.
    """
    least, best = math.inf, torch.empty(0)
    chunk = max(1, CHUNK_BYTES // (8 * dim * dim))
    for start in range(0, candidates, chunk):
        many = min(chunk, candidates - start)
        w = torch.rand(many, dim, dim, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
        w /= torch.linalg.vector_norm(w, dim=1, keepdim=True)
        s = torch.linalg.svdvals(w)
        conditions = s[:, 0] / s[:, -1]
        first = int(conditions.argmin())
        if start == 0 or float(conditions[first]) < least:
            least, best = float(conditions[first]), w[first].clone()
    return best


class InvertibleMLP(nn.Module):
    """Mixings g of several seeds; nothing in them is trained. `invertible_mlp` draws them.

    Args:
        weights: of each layer and seed a square matrix (out, in) of full rank.
        slope: of the leaky ReLU between layers, above 0; there is none after the last layer.

    Attributes:
        weights: the buffer (layers, seeds, dim, dim).
        slope: as given.

    Raises:
        SpecError: weights of another shape or not finite, or a slope that is not finite and above 0.

    Example:
        >>> g = invertible_mlp(4, seeds=[0, 1], candidates=100)
        >>> z = torch.linspace(0, 1, 24).reshape(2, 3, 4)
        >>> torch.allclose(g.inverse(g(z)), z, atol=1e-4)
        True
    """

    weights: Float[Tensor, "layers seeds dim dim"]

    def __init__(self, weights: Float[Tensor, "layers seeds dim dim"], *, slope: float = 0.2) -> None:
        super().__init__()
        shape = tuple(weights.shape)
        if len(shape) != 4 or shape[2] != shape[3] or 0 in shape or not bool(torch.isfinite(weights).all()):
            raise SpecError(
                f"weights of shape {shape}: expected finite ones of (layers, seeds, dim, dim), each above 0"
            )
        self.slope = check_slope(slope)
        self.register_buffer("weights", weights.detach())

    @property
    def seeds(self) -> int:
        """How many mixings stand side by side."""
        return int(self.weights.shape[1])

    @property
    def dim(self) -> int:
        """How many latents, and as many observed numbers."""
        return int(self.weights.shape[2])

    def forward(self, z: Float[Tensor, "seeds batch dim"]) -> Float[Tensor, "seeds batch dim"]:
        """Observations x = g(z), of each seed by its own mixing.

        Raises:
            SpecError: another shape.
        """
        check_batch(z, self.seeds, self.dim)
        first, *others = self.weights
        x = torch.bmm(z, first.mT)
        for w in others:
            x = torch.bmm(functional.leaky_relu(x, self.slope), w.mT)
        return x

    def inverse(self, x: Float[Tensor, "seeds batch dim"]) -> Float[Tensor, "seeds batch dim"]:
        """Latents z for which g(z) = x: a linear system a layer, and 1 / slope where y < 0.

        Raises:
            SpecError: another shape.
        """
        check_batch(x, self.seeds, self.dim)
        first, *others = self.weights
        z = x
        for w in reversed(others):
            z = functional.leaky_relu(torch.linalg.solve(w, z.mT).mT, 1 / self.slope)
        solved: Tensor = torch.linalg.solve(first, z.mT)
        return solved.mT

    @property
    def conditions(self) -> Float[Tensor, "seeds layers"]:
        """Condition numbers s_max / s_min of the matrices, 1 or more, in float64 on the CPU. It waits for a GPU."""
        s: Tensor = torch.linalg.svdvals(self.weights.detach().cpu().double())
        return (s[..., 0] / s[..., -1]).T

    def describe(self) -> MixingDescription:
        """Sizes, slope and condition numbers (seeds, layers) as plain numbers, for JSON."""
        return {
            "dim": self.dim,
            "layers": int(self.weights.shape[0]),
            "slope": self.slope,
            "conditions": self.conditions.tolist(),
        }

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"dim={self.dim}, seeds={self.seeds}, layers={self.weights.shape[0]}, slope={self.slope}"


def invertible_mlp(
    dim: int,
    *,
    seeds: Sequence[int],
    layers: int = 3,
    slope: float = 0.2,
    candidates: int = 25_000,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> InvertibleMLP:
    """Draw the mixing of each seed. The defaults are (a) the settings of the paper (section A.3).

    Layer k of a seed is a function of (seed, dim, k, candidates) alone, whatever other seeds, how many layers and which
    device: it is drawn and chosen on the CPU in float64, then rounded to `dtype`.

    Args:
        dim: how many latents, at least 1. The paper has 10.
        seeds: one a mixing, each at least 0.
        layers: linear layers, at least 1.
        slope: of the leaky ReLU between them, above 0.
        candidates: matrices drawn for each one taken, at least 1.
        device: where the mixings go.
        dtype: of the matrices.

    Returns:
        Mixings in the order of the seeds.

    Raises:
        SpecError: a value out of range, no seed, or a seed twice.
    """
    dim, layers = whole("dim", dim, 1), whole("layers", layers, 1)
    seeds, slope, candidates = check_seeds(seeds), check_slope(slope), whole("candidates", candidates, 1)
    drawn = [
        torch.stack(
            [best_conditioned(dim, candidates, generator=generator_of("mixing", seed, dim, k)) for seed in seeds]
        )
        for k in range(layers)
    ]
    return InvertibleMLP(torch.stack(drawn).to(device=device, dtype=dtype), slope=slope)

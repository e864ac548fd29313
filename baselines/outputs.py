"""What brings an encoder's outputs into the model space: R^N, a sphere or a box, or several side by side.

(a) Settings of the paper (Zimmermann et al. 2021, section A.3): the sphere's radius and the box's bounds are learned
and start at 1. They serve several seeds in one batch, tensors (seeds, batch, dim), and single networks, (batch, dim).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ident3d.baselines.mixing import check_batch
from ident3d.checks import one_of, whole
from ident3d.errors import SpecError
from ident3d.spaces import per_dimension

__all__ = [
    "BoxOutput",
    "OutputNormalisation",
    "Parametrisation",
    "ProductOutput",
    "SphereOutput",
    "Unbounded",
    "output_normalisation",
]

Parametrisation = Literal["linear", "log"]

LEAST_NORM = 1e-6
"""Vectors shorter than this are scaled as if they had this norm: it bounds the gradient at the origin by its inverse.
With torch's 1e-12, one such vector would drown all others in an optimiser's averages."""


class OutputNormalisation(nn.Module, ABC):
    """What brings an encoder's outputs into a space, along their last dimension.

    Attributes:
        dim: how many outputs.
        seeds: how many encoders stand side by side, on tensors (seeds, batch, dim); None for one, on (..., dim).
    """

    def __init__(self, dim: int, seeds: int | None = None) -> None:
        super().__init__()
        self.dim = whole("dim", dim, 1)
        self.seeds = None if seeds is None else whole("seeds", seeds, 1)

    def forward(self, y: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Points of the space.

        Raises:
            SpecError: a tensor of another shape.
        """
        if self.seeds is not None:
            check_batch(y, self.seeds, self.dim)
        elif y.ndim == 0 or y.shape[-1] != self.dim:
            raise SpecError(f"outputs of shape {tuple(y.shape)}: expected (..., {self.dim})")
        return self.normalised(y)

    @abstractmethod
    def normalised(self, y: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """What `forward` does once the shape is known."""

    def scale_parameters(self) -> list[nn.Parameter]:
        """What is learned of the magnitudes, for a parameter group and learning rate of their own."""
        return list(self.parameters())

    def scales(self) -> Float[Tensor, "*seeds numbers"]:
        """A copy of the magnitudes on the CPU, for logs: radius or bounds, not their logarithms; none if unbounded."""
        return torch.empty((0,) if self.seeds is None else (self.seeds, 0), dtype=torch.float32)


class Unbounded(OutputNormalisation):
    """All of R^dim: outputs as they are; `dim` of them, 1 or more, of `seeds` encoders or of one (None)."""

    def normalised(self, y: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """The outputs themselves."""
        return y


class ScaledOutput(OutputNormalisation):
    """Outputs times magnitudes, a radius or bounds, of each seed its own.

    Attributes:
        value: (seeds, numbers), or (numbers,) without seeds: the magnitudes themselves in the linear parametrisation
            (as published; nothing keeps them above 0), their logarithms in the other, which stay positive and move by
            shares. A parameter if learnable, else a buffer.

    Raises:
        SpecError: a magnitude that is not above 0, or another parametrisation.
    """

    value: Tensor

    def __init__(
        self,
        dim: int,
        seeds: int | None,
        initial: Sequence[float],
        *,
        learnable: bool,
        parametrisation: Parametrisation,
    ) -> None:
        super().__init__(dim, seeds)
        one_of("parametrisation", parametrisation, get_args(Parametrisation))
        if not all(v > 0 for v in initial):
            raise SpecError(f"magnitudes {list(initial)}: expected numbers above 0")
        self.parametrisation = parametrisation
        value = torch.tensor([math.log(v) if parametrisation == "log" else v for v in initial], dtype=torch.float32)
        value = value if self.seeds is None else value.repeat(self.seeds, 1)
        if learnable:
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value)

    def magnitude(self) -> Float[Tensor, "*seeds numbers"]:
        """The magnitudes as they are now, with their gradients."""
        return self.value.exp() if self.parametrisation == "log" else self.value

    def scaled(self, y: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Points times the magnitudes."""
        r = self.magnitude()
        return y * (r if self.seeds is None else r.unsqueeze(1))

    def scales(self) -> Float[Tensor, "*seeds numbers"]:
        """A copy of the magnitudes on the CPU."""
        return self.magnitude().detach().cpu().clone()


class SphereOutput(ScaledOutput):
    """The sphere of radius r: r y / max(||y||, 1e-6), so that gradients at the origin are finite (section A.3).

    Args:
        dim: how many outputs, at least 2.
        seeds: how many encoders stand side by side, each with a radius of its own; None for one.
        radius: r at first, above 0.
        learnable: whether r is a parameter.
        parametrisation: whether the parameter is r or log r.

    Raises:
        SpecError: a value out of range.
    """

    def __init__(
        self,
        dim: int,
        seeds: int | None = None,
        *,
        radius: float = 1.0,
        learnable: bool = True,
        parametrisation: Parametrisation = "linear",
    ) -> None:
        initial = per_dimension("radius", radius, 1)
        dim = whole("dim of a sphere", dim, 2)
        super().__init__(dim, seeds, initial, learnable=learnable, parametrisation=parametrisation)

    def normalised(self, y: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Each point moved along its ray."""
        return self.scaled(functional.normalize(y, dim=-1, eps=LEAST_NORM))


class BoxOutput(ScaledOutput):
    """The box from 0 to b: b_i / (1 + exp(-y_i)) in each dimension i (section A.3).

    Args:
        dim: how many outputs, at least 1.
        seeds: how many encoders stand side by side, each with bounds of its own; None for one.
        bound: b at first, one for all dimensions or one each, above 0.
        learnable: whether b is a parameter.
        parametrisation: whether the parameter is b or log b.

    Raises:
        SpecError: a value out of range.
    """

    def __init__(
        self,
        dim: int,
        seeds: int | None = None,
        *,
        bound: float | Sequence[float] = 1.0,
        learnable: bool = True,
        parametrisation: Parametrisation = "linear",
    ) -> None:
        initial = per_dimension("bound", bound, whole("dim", dim, 1))
        super().__init__(dim, seeds, initial, learnable=learnable, parametrisation=parametrisation)

    def normalised(self, y: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Each coordinate between 0 and its bound."""
        return self.scaled(torch.sigmoid(y))


class ProductOutput(OutputNormalisation):
    """Several spaces side by side: the first outputs go into the first, the next into the second, and so on.

    Args:
        parts: at least one, all of the same seeds.

    Raises:
        SpecError: no part, or parts of different seeds.

    Example:
        >>> output = ProductOutput([SphereOutput(3), BoxOutput(2, bound=4.0)])
        >>> output(torch.tensor([[3.0, 0.0, 4.0, 0.0, 0.0]])).tolist(), output.scales().tolist()
        ([[0.6000000238418579, 0.0, 0.800000011920929, 2.0, 2.0]], [1.0, 4.0, 4.0])
    """

    def __init__(self, parts: Sequence[OutputNormalisation]) -> None:
        if not parts or not all(isinstance(part, OutputNormalisation) for part in parts):
            raise SpecError(f"parts = {parts!r}: expected at least one output normalisation")
        if len({part.seeds for part in parts}) > 1:
            raise SpecError(f"parts of seeds {[part.seeds for part in parts]}: expected the same in all")
        super().__init__(sum(part.dim for part in parts), parts[0].seeds)
        self.parts = nn.ModuleList(parts)
        self._dims = [part.dim for part in parts]

    def normalised(self, y: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Each part's outputs in its space."""
        pieces = torch.split(y, self._dims, dim=-1)
        return torch.cat([part(piece) for part, piece in zip(self.parts, pieces, strict=True)], dim=-1)

    def scales(self) -> Float[Tensor, "*seeds numbers"]:
        """The magnitudes of the parts, one after the other."""
        return torch.cat([part.scales() for part in self.parts if isinstance(part, OutputNormalisation)], dim=-1)


def output_normalisation(
    space: str,
    dim: int,
    seeds: int | None = None,
    *,
    magnitude: float = 1.0,
    learnable: bool = True,
    parametrisation: Parametrisation = "linear",
) -> OutputNormalisation:
    """The output normalisation of a model space's name in the paper's tables.

    Args:
        space: "unbounded", "sphere" or "box". The first has no use for the last three arguments.
        dim: how many outputs.
        seeds: how many encoders stand side by side; None for one without that dimension.
        magnitude: the radius or all bounds at first, above 0.
        learnable: whether they are parameters.
        parametrisation: whether the parameters are the magnitudes or their logarithms.

    Raises:
        SpecError: another space, or a value out of range.
    """
    one_of("space", space, ("unbounded", "sphere", "box"))
    if space == "sphere":
        return SphereOutput(dim, seeds, radius=magnitude, learnable=learnable, parametrisation=parametrisation)
    if space == "box":
        return BoxOutput(dim, seeds, bound=magnitude, learnable=learnable, parametrisation=parametrisation)
    return Unbounded(dim, seeds)

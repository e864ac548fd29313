"""Spaces that latents live in: membership, projection, uniform sampling.

Zimmermann et al. 2021 use three: the unit hypersphere (section 3), a box and the whole of R^N (section 4).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ident3d.errors import SpecError

__all__ = ["Box", "Product", "Real", "Space", "Sphere", "per_dimension"]

MAX_DIM = 100_000


def per_dimension(name: str, value: float | Sequence[float], dim: int) -> tuple[float, ...]:
    """One finite number a dimension, from one for all or a sequence of `dim`.

    Raises:
        SpecError: not a number, NaN or infinite, or another count of them; the text names `name`.
    """
    many = isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0
    given = list(value) if many else [value] * dim  # type: ignore[arg-type]
    try:
        if isinstance(value, str | bytes) or any(isinstance(v, str | bytes | bool) for v in given):
            raise TypeError
        values = tuple(float(v) for v in given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise SpecError(f"{name} = {value!r}: expected a number, or one a dimension") from None
    if len(values) != dim:
        raise SpecError(f"{name} has {len(values)} values; expected one, or {dim}")
    if not all(map(math.isfinite, values)):
        raise SpecError(f"{name} = {value!r}: expected finite numbers")
    return values


class Space(ABC):
    """A set of points of R^dim.

    Attributes:
        dim: how many coordinates a point has.
    """

    dim: int

    def _set_dim(self, dim: int, least: int) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int) or not least <= dim <= MAX_DIM:
            raise SpecError(f"{type(self).__name__} of dimension {dim!r}: expected {least} to {MAX_DIM:,}")
        self.dim = dim

    @abstractmethod
    def contains(self, x: Float[Tensor, "*batch dim"], atol: float = 1e-5) -> Bool[Tensor, "*batch"]:
        """Which points lie in the space, or within `atol` of it in each coordinate. NaN lies in none."""

    @abstractmethod
    def project(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """The nearest points of the space.

        Raises:
            SpecError: a point that has no nearest one.
        """

    @abstractmethod
    def uniform(
        self, n: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n dim"]:
        """`n` points drawn uniformly, on the generator's device.

        Raises:
            SpecError: there is no uniform distribution on the space.
        """

    @abstractmethod
    def centre(self) -> tuple[float, ...]:
        """The point that a marginal is centred on where none is named."""


class Box(Space):
    """The points between two corners, both included; by default the unit cube, the coordinate of all latents.

    Args:
        dim: how many coordinates.
        low: the least value, one for all coordinates or one each.
        high: the greatest.

    Raises:
        SpecError: a bound that is not finite, or low not below high.

    Example:
        >>> Box(2).contains(torch.tensor([[0.5, 1.0], [0.5, 1.5]]))
        tensor([ True, False])
    """

    def __init__(self, dim: int, low: float | Sequence[float] = 0.0, high: float | Sequence[float] = 1.0) -> None:
        self._set_dim(dim, 1)
        self.low = per_dimension("low", low, dim)
        self.high = per_dimension("high", high, dim)
        if not all(a < b for a, b in zip(self.low, self.high, strict=True)):
            raise SpecError(f"box from {low} to {high}: expected low below high")

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Low and high as tensors (dim,) of a tensor's device and dtype."""
        return like.new_tensor(self.low), like.new_tensor(self.high)

    def contains(self, x: Float[Tensor, "*batch dim"], atol: float = 1e-5) -> Bool[Tensor, "*batch"]:
        """Which points lie in the box."""
        low, high = self.bounds(x)
        return ((x >= low - atol) & (x <= high + atol)).all(-1)

    def project(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Each coordinate cut to the bounds."""
        return torch.clamp(x, *self.bounds(x))

    def uniform(
        self, n: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n dim"]:
        """`n` points drawn uniformly."""
        u = torch.rand(n, self.dim, generator=generator, device=generator.device, dtype=dtype)
        low, high = self.bounds(u)
        return self.project(low + u * (high - low))

    def centre(self) -> tuple[float, ...]:
        """The middle."""
        return tuple((a + b) / 2 for a, b in zip(self.low, self.high, strict=True))

    def __repr__(self) -> str:
        low, high = (v[0] if len(set(v)) == 1 else v for v in (self.low, self.high))
        return f"Box({self.dim})" if (low, high) == (0.0, 1.0) else f"Box({self.dim}, {low}, {high})"


class Sphere(Space):
    """The hypersphere: points of R^dim at a distance of `radius` from the origin.

    Args:
        dim: how many coordinates, at least 2.
        radius: above 0.

    Raises:
        SpecError: another dimension or radius.
    """

    def __init__(self, dim: int, radius: float = 1.0) -> None:
        self._set_dim(dim, 2)
        (self.radius,) = per_dimension("radius", radius, 1)
        if self.radius <= 0:
            raise SpecError(f"radius = {radius}: expected a number above 0")

    def contains(self, x: Float[Tensor, "*batch dim"], atol: float = 1e-5) -> Bool[Tensor, "*batch"]:
        """Which points lie on the sphere, to `atol` of the radius."""
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
        return (norm - self.radius).abs() <= atol * self.radius

    def project(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Each point moved along its ray; the origin has none.

        Raises:
            SpecError: a point that is the origin.
        """
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if bool((norm == 0).any()):
            raise SpecError("the origin has no nearest point on a sphere")
        return x * (self.radius / norm)

    def uniform(
        self, n: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n dim"]:
        """`n` points drawn uniformly: normal vectors, projected."""
        return self.project(torch.randn(n, self.dim, generator=generator, device=generator.device, dtype=dtype))

    def centre(self) -> tuple[float, ...]:
        """The pole: the first axis."""
        return (self.radius, *(0.0,) * (self.dim - 1))

    def __repr__(self) -> str:
        return f"Sphere({self.dim})" if self.radius == 1 else f"Sphere({self.dim}, {self.radius})"


class Real(Space):
    """All of R^dim. It has no uniform distribution."""

    def __init__(self, dim: int) -> None:
        self._set_dim(dim, 1)

    def contains(self, x: Float[Tensor, "*batch dim"], atol: float = 1e-5) -> Bool[Tensor, "*batch"]:
        """Which points are finite."""
        return torch.isfinite(x).all(-1)

    def project(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """The points themselves."""
        return x

    def uniform(
        self, n: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n dim"]:
        """Refused.

        Raises:
            SpecError: always.
        """
        raise SpecError(f"{self!r} has no uniform distribution; choose a Box, a Sphere, or another law")

    def centre(self) -> tuple[float, ...]:
        """The origin."""
        return (0.0,) * self.dim

    def __repr__(self) -> str:
        return f"Real({self.dim})"


class Product(Space):
    """Several spaces side by side: the first coordinates lie in the first, the next in the second, and so on.

    Args:
        parts: at least one space.

    Raises:
        SpecError: no part.

    Example:
        >>> space = Product(Box(3), Sphere(2))
        >>> space.dim, space.contains(torch.tensor([0.5, 0.5, 0.5, 0.6, 0.8]))
        (5, tensor(True))
    """

    def __init__(self, *parts: Space) -> None:
        if not parts or not all(isinstance(part, Space) for part in parts):
            raise SpecError(f"Product of {parts!r}: expected at least one space")
        self.parts = parts
        self._set_dim(sum(part.dim for part in parts), 1)

    def split(self, x: Float[Tensor, "*batch dim"]) -> tuple[Tensor, ...]:
        """The coordinates of each part."""
        return torch.split(x, [part.dim for part in self.parts], dim=-1)

    def contains(self, x: Float[Tensor, "*batch dim"], atol: float = 1e-5) -> Bool[Tensor, "*batch"]:
        """Which points lie in their space in every part."""
        inside = [part.contains(y, atol) for part, y in zip(self.parts, self.split(x), strict=True)]
        return torch.stack(inside).all(0)

    def project(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Each part projected on its space."""
        return torch.cat([part.project(y) for part, y in zip(self.parts, self.split(x), strict=True)], dim=-1)

    def uniform(
        self, n: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n dim"]:
        """`n` points drawn uniformly, each part by itself."""
        return torch.cat([part.uniform(n, generator=generator, dtype=dtype) for part in self.parts], dim=-1)

    def centre(self) -> tuple[float, ...]:
        """The centres of the parts."""
        return tuple(itertools.chain.from_iterable(part.centre() for part in self.parts))

    def __repr__(self) -> str:
        return f"Product({', '.join(map(repr, self.parts))})"

"""Distributions of latents, each usable as a marginal p(z) or as a conditional p(z~ | z) around z.

On a box, laws are truncated to it coordinate by coordinate through the exact inverse of the distribution function:
z~ = z + s F^-1(F(a) + u (F(b) - F(a))) for uniform u, where a and b are the box's bounds around z in units of the
scale s. Nothing is rejected or clipped, so nothing is biased, and one uniform number gives one coordinate. On a sphere,
Normal, Laplace and GeneralizedNormal draw in R^N and project (the rows of table 1 in Zimmermann et al. 2021 that
violate the assumptions). The von Mises-Fisher law is in `ident3d.von_mises_fisher`; laws made of others are in
`ident3d.conditionals`.

Random numbers come from the `torch.Generator` that each call is given, on its device; no global generator is read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ident3d.errors import SpecError
from ident3d.quantiles import GeneralizedNormalLaw, LaplaceLaw, NormalLaw, StandardLaw
from ident3d.spaces import Box, Product, Real, Space, Sphere, per_dimension

__all__ = ["Distribution", "GeneralizedNormal", "Laplace", "Normal", "Uniform", "exact_uniforms", "number"]

LEAST_SHARE = 1e-9
"""The least share of a law that a box may hold: past it, float64 no longer resolves what is inside."""


def exact_uniforms(*shape: int, generator: torch.Generator) -> Tensor:
    """Uniform numbers strictly between 0 and 1, in float64 (float32 where the device has none), on the generator's
    device."""
    dtype = torch.float32 if generator.device.type == "mps" else torch.float64
    u = torch.rand(*shape, generator=generator, device=generator.device, dtype=dtype)
    eps = torch.finfo(dtype).eps
    return u.clamp_(eps / 4, 1 - eps / 2)


def number(value: float) -> str:
    """A number as short as it can be written without loss."""
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


class Distribution(ABC):
    """A law over a space.

    Attributes:
        space: where it lives.
        uniforms: how many uniform numbers `from_uniforms` takes a point; 0 where it cannot.
        shared: columns in which z~ is z itself, bit by bit.
        centred: whether the law has a centre of its own, which only a marginal has a use for.
    """

    space: Space
    uniforms: int = 0
    shared: tuple[int, ...] = ()
    centred: bool = False

    @property
    @abstractmethod
    def text(self) -> str:
        """The law as `ident3d.conditional` reads it, e.g. `laplace(scale=0.05)`. Equal laws have equal texts."""

    @property
    def loc(self) -> tuple[float, ...]:
        """The point that the marginal is centred on."""
        return self.space.centre()

    def sample(
        self, n: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n dim"]:
        """`n` points from the law as a marginal, on the generator's device.

        Args:
            n: how many.
            generator: where the random numbers come from.
            dtype: of the result.
        """
        centre = torch.tensor(self.loc, device=generator.device, dtype=dtype)
        return self.around(centre.expand(n, -1), generator=generator, check=False)

    @abstractmethod
    def around(
        self, z: Float[Tensor, "n dim"], *, generator: torch.Generator, check: bool = True
    ) -> Float[Tensor, "n dim"]:
        """One z~ for each z, from the law as a conditional.

        Args:
            z: the points, on the generator's device.
            generator: where the random numbers come from.
            check: look whether z lies in the space. On a GPU that waits for the device; a training loop whose z come
                from the space anyway can leave it out.

        Raises:
            SpecError: a z that is NaN or outside the space, or of another dimension.
        """

    def from_uniforms(self, z: Float[Tensor, "n dim"], u: Float[Tensor, "n uniforms"]) -> Float[Tensor, "n dim"]:
        """One z~ for each z as a function of uniform numbers: the conditional, without a generator.

        Args:
            z: the points.
            u: numbers strictly between 0 and 1, of float64, on the same device.

        Raises:
            SpecError: the law has no such function.
        """
        raise SpecError(f"{self.text}: cannot be drawn from a fixed number of uniform numbers")

    def log_prob(self, x: Float[Tensor, "n dim"], z: Float[Tensor, "*n dim"] | None = None) -> Float[Tensor, " n"]:
        """Log density at x, in nats, normalised over the space.

        Args:
            x: points; -inf outside a box.
            z: what the conditional is around; the marginal's centre if None.

        Raises:
            SpecError: the density has no closed form.
        """
        raise SpecError(f"{self.text} over {self.space!r}: its density has no closed form")

    def check(self, z: Tensor) -> None:
        """Refuse points that are not of the space.

        Raises:
            SpecError: NaN, outside the space, or of another dimension.
        """
        if z.ndim != 2 or z.shape[1] != self.space.dim:
            raise SpecError(f"latents of shape {tuple(z.shape)}: expected (n, {self.space.dim}) for {self.space!r}")
        inside = self.space.contains(z)
        if not bool(inside.all()):
            row = int((~inside).nonzero()[0])
            values = ", ".join(f"{v:g}" for v in z[row].tolist())
            raise SpecError(f"latents outside {self.space!r}: row {row} is ({values})")

    def __repr__(self) -> str:
        return f"{self.text} over {self.space!r}"


class Uniform(Distribution):
    """The uniform law of a space; as a conditional it forgets z.

    Args:
        space: a Box, a Sphere or a Product of them.

    Raises:
        SpecError: a space that has none.
    """

    def __init__(self, space: Space) -> None:
        if not _bounded(space):
            raise SpecError(f"uniform over {space!r}: there is no such law; choose a Box or a Sphere")
        self.space = space
        self.uniforms = space.dim if isinstance(space, Box) else 0

    @property
    def text(self) -> str:
        """`uniform()`."""
        return "uniform()"

    def around(
        self, z: Float[Tensor, "n dim"], *, generator: torch.Generator, check: bool = True
    ) -> Float[Tensor, "n dim"]:
        """One z~ for each z, independent of it."""
        if check:
            self.check(z)
        return self.space.uniform(len(z), generator=generator, dtype=z.dtype)

    def from_uniforms(self, z: Float[Tensor, "n dim"], u: Float[Tensor, "n uniforms"]) -> Float[Tensor, "n dim"]:
        """z~ = low + u (high - low)."""
        if not isinstance(self.space, Box):
            return super().from_uniforms(z, u)
        low, high = self.space.bounds(u)
        return self.space.project((low + u * (high - low)).to(z.dtype))

    def log_prob(self, x: Float[Tensor, "n dim"], z: Float[Tensor, "*n dim"] | None = None) -> Float[Tensor, " n"]:
        """Minus the log of the space's volume (for a sphere: of its surface)."""
        value = x.new_full(x.shape[:-1], -_log_volume(self.space))
        return value.masked_fill(~_inside(self.space, x), -math.inf)


def _bounded(space: Space) -> bool:
    return all(map(_bounded, space.parts)) if isinstance(space, Product) else isinstance(space, Box | Sphere)


def _inside(space: Space, x: Tensor) -> Tensor:
    """Membership without tolerance, but on spheres, where rounding alone leads off them."""
    if isinstance(space, Product):
        return torch.stack([_inside(part, y) for part, y in zip(space.parts, space.split(x), strict=True)]).all(0)
    return space.contains(x, 0.0 if isinstance(space, Box) else 1e-5)


def _log_volume(space: Space) -> float:
    if isinstance(space, Product):
        return sum(_log_volume(part) for part in space.parts)
    if isinstance(space, Box):
        return sum(math.log(b - a) for a, b in zip(space.low, space.high, strict=True))
    assert isinstance(space, Sphere)
    d = space.dim
    return math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2) + (d - 1) * math.log(space.radius)


class _Located(Distribution):
    """A symmetric law with independent coordinates, a scale each, around a point.

    Args:
        space: a Box (the law is truncated to it), a Sphere (it is projected) or Real.
        scale: one for all coordinates or one each, in the space's units, above 0.
        loc: the marginal's centre; by default the middle of the box, the pole of the sphere, the origin.

    Raises:
        SpecError: a scale that is not above 0 and finite; a law that leaves less than 1e-9 of its mass in the box.
    """

    name = ""

    def __init__(
        self, space: Space, scale: float | Sequence[float], loc: Sequence[float] | None, law: StandardLaw
    ) -> None:
        if not isinstance(space, Box | Sphere | Real):
            raise SpecError(f"{self.name} over {space!r}: expected a Box, a Sphere or Real; for a Product see Joint")
        self.space, self._law = space, law
        self.scale = per_dimension("scale", scale, space.dim)
        if min(self.scale) <= 0:
            raise SpecError(f"scale = {scale!r}: expected numbers above 0")
        self._centre = None if loc is None else per_dimension("loc", loc, space.dim)
        self.centred = loc is not None
        if not isinstance(space, Sphere):
            self.uniforms = space.dim
        if isinstance(space, Box):
            bottom, top, _ = self._share(torch.tensor(self.loc, dtype=torch.float64))
            if not float((top - bottom).min()) >= LEAST_SHARE:
                raise SpecError(f"{self!r} around {self.loc}: all of its mass lies outside the box; mend scale or loc")

    @property
    def loc(self) -> tuple[float, ...]:
        """The point that the marginal is centred on."""
        return self.space.centre() if self._centre is None else self._centre

    def _parameters(self) -> dict[str, str]:
        scale = [number(s) for s in self.scale]
        return {"scale": scale[0] if len(set(scale)) == 1 else f"({', '.join(scale)})"}

    @property
    def text(self) -> str:
        """The law and its parameters."""
        loc = {} if self._centre is None else {"loc": f"({', '.join(map(number, self._centre))})"}
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in {**self._parameters(), **loc}.items())})"

    def _scale(self, like: Tensor) -> Tensor:
        return like.new_tensor(self.scale)

    def _share(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """F at the box's two ends, for the law around z reflected so that the box's bulk is negative, where F is
        precise; and where it was reflected."""
        assert isinstance(self.space, Box)
        low, high = self.space.bounds(z)
        scale = self._scale(z)
        a, b = (low - z) / scale, (high - z) / scale
        flip = a + b > 0
        return self._law.cdf(torch.where(flip, -b, a)), self._law.cdf(torch.where(flip, -a, b)), flip

    def sample(
        self, n: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n dim"]:
        """`n` points around `loc`, which may lie outside a box."""
        u = exact_uniforms(n, self.space.dim, generator=generator)
        return self._move(u.new_tensor(self.loc).expand_as(u), u).to(dtype)

    def around(
        self, z: Float[Tensor, "n dim"], *, generator: torch.Generator, check: bool = True
    ) -> Float[Tensor, "n dim"]:
        """One z~ for each z: truncated to a box, projected on a sphere."""
        if check:
            self.check(z)
        u = exact_uniforms(len(z), self.space.dim, generator=generator)
        # A z that lies outside by its rounding must not lead to the far end of a box.
        return self._move(self.space.project(z.to(u.dtype)), u).to(z.dtype)

    def from_uniforms(self, z: Float[Tensor, "n dim"], u: Float[Tensor, "n uniforms"]) -> Float[Tensor, "n dim"]:
        """z~ = z + s F^-1(u), on a box with F truncated to it."""
        if isinstance(self.space, Sphere):
            return super().from_uniforms(z, u)
        return self._move(self.space.project(z.to(u.dtype)), u).to(z.dtype)

    def _move(self, centre: Tensor, u: Tensor) -> Tensor:
        if not isinstance(self.space, Box):
            return self.space.project(centre + self._scale(u) * self._law.quantile(u))
        bottom, top, flip = self._share(centre)
        part = u * (top - bottom)
        p = torch.where(flip, top - part, bottom + part).clamp(max=1 - torch.finfo(u.dtype).eps / 2)
        t = self._law.quantile(p)
        # Rounding alone can lead past the bounds.
        return self.space.project(centre + self._scale(u) * torch.where(flip, -t, t))

    def log_prob(self, x: Float[Tensor, "n dim"], z: Float[Tensor, "*n dim"] | None = None) -> Float[Tensor, " n"]:
        """The sum over coordinates of log p((x - z) / s) - log s, less the log of the mass in the box."""
        if isinstance(self.space, Sphere):
            return super().log_prob(x, z)
        x64 = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
        centre = x64.new_tensor(self.loc).expand_as(x64) if z is None else self.space.project(z.to(x64.dtype))
        scale = self._scale(x64)
        density = self._law.log_density((x64 - centre) / scale) - torch.log(scale)
        if isinstance(self.space, Box):
            bottom, top, _ = self._share(centre)
            density = density - torch.log(top - bottom)
            low, high = self.space.bounds(x)
            density = torch.where((x >= low) & (x <= high), density, -math.inf)
        return density.sum(-1).to(x.dtype)


class Normal(_Located):
    """Normal: p(z~ | z) proportional to exp(-sum_i (z~_i - z_i)^2 / (2 s_i^2)) in the space.

    Args:
        space: a Box (truncated), a Sphere (projected) or Real.
        scale: the standard deviation before truncation, one for all coordinates or one each.
        loc: the marginal's centre.

    Raises:
        SpecError: a scale that is not above 0 and finite; a law that leaves less than 1e-9 of its mass in the box.

    Example:
        >>> law = Normal(Box(10), scale=0.05)
        >>> z = law.space.uniform(4, generator=torch.Generator().manual_seed(0))
        >>> law.around(z, generator=torch.Generator().manual_seed(1)).shape
        torch.Size([4, 10])
    """

    name = "normal"

    def __init__(self, space: Space, scale: float | Sequence[float], loc: Sequence[float] | None = None) -> None:
        super().__init__(space, scale, loc, NormalLaw())


class Laplace(_Located):
    """Laplace: p(z~ | z) proportional to exp(-sum_i |z~_i - z_i| / s_i) in the space.

    Args:
        space: a Box (truncated), a Sphere (projected) or Real.
        scale: s, one for all coordinates or one each.
        loc: the marginal's centre.

    Raises:
        SpecError: a scale that is not above 0 and finite; a law that leaves less than 1e-9 of its mass in the box.
    """

    name = "laplace"

    def __init__(self, space: Space, scale: float | Sequence[float], loc: Sequence[float] | None = None) -> None:
        super().__init__(space, scale, loc, LaplaceLaw())


class GeneralizedNormal(_Located):
    """Generalised normal: p(z~ | z) proportional to exp(-sum_i (|z~_i - z_i| / s_i)^beta) in the space.

    beta = 1 is Laplace of the same scale; beta = 2 is Normal of standard deviation s / sqrt(2). `GenNorm(3)` in the
    paper's tables 1 and 2 has beta = 3.

    Args:
        space: a Box (truncated), a Sphere (projected) or Real.
        scale: s, one for all coordinates or one each.
        beta: the power, 0.2 to 100.
        loc: the marginal's centre.

    Raises:
        SpecError: a scale that is not above 0 and finite, another beta; a law that leaves less than 1e-9 of its mass in
            the box.
    """

    name = "gennorm"

    def __init__(
        self, space: Space, scale: float | Sequence[float], beta: float = 3.0, loc: Sequence[float] | None = None
    ) -> None:
        (self.beta,) = per_dimension("beta", beta, 1)
        if not 0.2 <= self.beta <= 100:
            raise SpecError(f"beta = {beta!r}: expected 0.2 to 100")
        super().__init__(space, scale, loc, GeneralizedNormalLaw(self.beta))

    def _parameters(self) -> dict[str, str]:
        return {**super()._parameters(), "beta": number(self.beta)}

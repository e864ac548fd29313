"""The von Mises-Fisher law: the conditional for which contrastive learning on a sphere is proved to identify the
latents (Zimmermann et al. 2021, theorem 2)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ident3d.distributions import Distribution, exact_uniforms, number
from ident3d.errors import SpecError
from ident3d.spaces import Sphere, per_dimension

__all__ = ["VonMisesFisher"]

MIN_KAPPA, MAX_KAPPA = 1e-6, 1e6


class VonMisesFisher(Distribution):
    """von Mises-Fisher: p(z~ | z) = C_N(kappa) exp(kappa z . z~ / r^2) on a sphere of radius r in R^N.

    Draws are exact in every dimension and for every kappa: a point uniform on the sphere is moved towards z along its
    great circle and kept with the probability that makes the law exact, or drawn again (the rejection sampler of
    G. Ulrich 1984 and A. T. A. Wood 1994, in a form without Beta variates). More than 0.6 of the proposals are kept.

    Args:
        space: a Sphere.
        kappa: concentration, 1e-6 to 1e6; the smaller, the nearer to uniform.
        loc: the marginal's centre, a point of the sphere; the pole by default.

    Raises:
        SpecError: another space or kappa, or a loc off the sphere.

    Example:
        >>> law = VonMisesFisher(Sphere(10), kappa=1)
        >>> z = law.space.uniform(4, generator=torch.Generator().manual_seed(0))
        >>> law.around(z, generator=torch.Generator().manual_seed(1)).shape
        torch.Size([4, 10])
    """

    def __init__(self, space: Sphere, kappa: float, loc: tuple[float, ...] | None = None) -> None:
        if not isinstance(space, Sphere):
            raise SpecError(f"vmf over {space!r}: expected a Sphere")
        self.space: Sphere = space
        (self.kappa,) = per_dimension("kappa", kappa, 1)
        if not MIN_KAPPA <= self.kappa <= MAX_KAPPA:
            raise SpecError(f"kappa = {kappa!r}: expected {MIN_KAPPA:g} to {MAX_KAPPA:g}")
        self._centre = None if loc is None else per_dimension("loc", loc, space.dim)
        self.centred = loc is not None
        self.check(torch.tensor([self.loc], dtype=torch.float64))

    @property
    def loc(self) -> tuple[float, ...]:
        """The point that the marginal is centred on."""
        return self.space.centre() if self._centre is None else self._centre

    @property
    def text(self) -> str:
        """`vmf(kappa=...)`."""
        loc = "" if self._centre is None else f", loc=({', '.join(map(number, self._centre))})"
        return f"vmf(kappa={number(self.kappa)}{loc})"

    def around(
        self, z: Float[Tensor, "n dim"], *, generator: torch.Generator, check: bool = True
    ) -> Float[Tensor, "n dim"]:
        """One z~ for each z."""
        if check:
            self.check(z)
        pole = z.to(torch.float32 if z.device.type == "mps" else torch.float64)
        pole = pole / torch.linalg.vector_norm(pole, dim=-1, keepdim=True)
        drawn = torch.empty_like(pole)
        left = torch.arange(len(z), device=z.device)
        while len(left):
            points, kept = self._propose(pole[left], generator)
            drawn[left[kept]] = points[kept]
            left = left[~kept]
        return self.space.project(drawn).to(z.dtype)

    def _propose(self, pole: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A proposal for each pole, and which of them are kept.

        With y the cosine between a uniform point and the pole, (1 - y) / 2 has the Beta((N-1)/2, (N-1)/2) law that the
        sampler asks for, and the rest of the point gives the direction, uniform and independent of y. What is near 0
        where kappa is large, 1 - cosine, is computed as such.
        """
        d, kappa = pole.shape[-1], self.kappa
        b = (d - 1) / (2 * kappa + math.hypot(2 * kappa, d - 1))
        most = (1 - b) / (1 + b)
        normal = torch.randn(pole.shape, generator=generator, device=pole.device, dtype=pole.dtype)
        along = (normal * pole).sum(-1, keepdim=True)
        across = normal - along * pole
        cosine = along / torch.linalg.vector_norm(normal, dim=-1, keepdim=True)
        beta = (1 - cosine) / 2
        below_one = 2 * b * beta / (1 - (1 - b) * beta)  # 1 - w, with w the cosine of z~ and z
        u = exact_uniforms(len(pole), 1, generator=generator).to(pole.dtype)
        # kappa (w - x0) + (d - 1) (log(1 - x0 w) - log(1 - x0^2)), with x0 = (1 - b) / (1 + b), rearranged for w near 1
        gap = 2 * b / (1 + b)  # 1 - x0
        weight = kappa * (gap - below_one) + (d - 1) * torch.log((gap + most * below_one) / (gap * (1 + most)))
        across = across / torch.linalg.vector_norm(across, dim=-1, keepdim=True)
        points = (1 - below_one) * pole + torch.sqrt(below_one * (2 - below_one)) * across
        kept = (torch.log(u) <= weight).squeeze(-1) & torch.isfinite(points).all(-1)
        # A pole that is no number gives none: proposals for it would never end.
        return points, kept | ~torch.isfinite(pole).all(-1)

    def log_prob(self, x: Float[Tensor, "n dim"], z: Float[Tensor, "*n dim"] | None = None) -> Float[Tensor, " n"]:
        """kappa cos(x, z) + log C_N(kappa), the density with respect to the sphere's surface."""
        x64 = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
        centre = x64.new_tensor(self.loc) if z is None else z.to(x64.dtype)
        # kappa (cos - 1) through the chord, which keeps its precision where x is near z.
        chord = ((x64 - centre) ** 2).sum(-1) / self.space.radius**2
        return (self._log_norm() - self.kappa * chord / 2).to(x.dtype)

    def _log_norm(self) -> float:
        """log C_N(kappa) + kappa - (N - 1) log r.

        C_N(kappa) = kappa^v / ((2 pi)^(v + 1) I_v(kappa)), v = N/2 - 1; the power series of I_v has positive terms
        alone, so it is summed as it stands, in logarithms.
        """
        v = self.space.dim / 2 - 1
        # The terms peak near m = kappa / 2 and fall off as a normal law of variance below kappa.
        m = torch.arange(int(self.kappa / 2 + 12 * math.sqrt(self.kappa) + 60), dtype=torch.float64)
        terms = 2 * m * math.log(self.kappa / 2) - torch.lgamma(m + 1) - torch.lgamma(m + v + 1)
        log_bessel_less_power = float(torch.logsumexp(terms, 0)) - v * math.log(2)  # log(I_v(kappa) / kappa^v)
        surface = (self.space.dim - 1) * math.log(self.space.radius)
        return self.kappa - (v + 1) * math.log(2 * math.pi) - log_bessel_less_power - surface

"""The von Mises-Fisher law against its closed forms and SciPy's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats  # type: ignore[import-untyped]
from torch import Tensor

from ident3d.distributions import Uniform
from ident3d.errors import SpecError
from ident3d.spaces import Box, Product, Real, Space, Sphere
from ident3d.von_mises_fisher import VonMisesFisher

N = 20_000
F64 = torch.float64
DIMS = [2, 3, 10, 100]
KAPPAS = [1e-3, 1.0, 10.0, 1e4]
every_dim = pytest.mark.parametrize("dim", DIMS)
every_kappa = pytest.mark.parametrize("kappa", KAPPAS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pole(dim: int) -> Tensor:
    """A point of the unit sphere that is on no axis."""
    return Sphere(dim).project(torch.linspace(1, -0.4, dim, dtype=F64))


def drawn(dim: int, kappa: float, n: int = N) -> tuple[Tensor, Tensor]:
    """A point, and draws around it."""
    z = pole(dim)
    return z, VonMisesFisher(Sphere(dim), kappa).around(z.expand(n, -1), generator=seeded(dim))


def gaps(x: Tensor, z: Tensor) -> Tensor:
    """1 - cosine, to relative precision."""
    return ((x - z) ** 2).sum(-1) / 2


def agrees(x: Tensor, cdf: Callable[..., object]) -> bool:
    return float(stats.kstest(x.numpy(), cdf).pvalue) > 1e-4


def surface(dim: int) -> float:
    """The log of the unit sphere's surface in R^dim."""
    return math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)


@every_kappa
@every_dim
def test_the_mean_cosine_is_the_ratio_of_bessel_functions(dim: int, kappa: float) -> None:
    z, x = drawn(dim, kappa)
    gap = gaps(x, z)
    expected = 1 - special.ive(dim / 2, kappa) / special.ive(dim / 2 - 1, kappa)
    assert abs(float(gap.mean()) - expected) < 4.5 * float(gap.std()) / math.sqrt(N)


@every_kappa
@every_dim
def test_the_angle_to_z_has_its_law_in_every_dimension(dim: int, kappa: float) -> None:
    # Its density is proportional to exp(kappa (cos a - 1)) sin(a)^(d-2); beyond the bound nothing is left.
    bound = min(math.pi, 12 * math.sqrt((dim + 10) / kappa))
    a = np.linspace(0, bound, 200_001)
    with np.errstate(divide="ignore"):
        log = -2 * kappa * np.sin(a / 2) ** 2 + (dim - 2) * np.log(np.sin(a)) if dim > 2 else kappa * (np.cos(a) - 1)
    density = np.exp(log - log[np.isfinite(log)].max())
    cdf = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    z, x = drawn(dim, kappa)
    angle = 2 * torch.asin(torch.sqrt(gaps(x, z) / 2))
    assert agrees(angle, lambda t: np.interp(t, a, cdf / cdf[-1]))


@pytest.mark.parametrize("kappa", [1e-6, *KAPPAS, 1e6])
def test_on_the_sphere_in_three_dimensions_the_cosine_has_its_closed_form(kappa: float) -> None:
    z, x = drawn(3, kappa)
    assert agrees(gaps(x, z), lambda g: np.expm1(-kappa * g) / np.expm1(-2 * kappa))


@pytest.mark.parametrize("kappa", [1e-6, *KAPPAS])
def test_on_the_circle_it_is_the_von_mises_law(kappa: float) -> None:
    z, x = drawn(2, kappa)
    angle = torch.atan2(z[0] * x[:, 1] - z[1] * x[:, 0], x @ z)
    assert agrees(angle, stats.vonmises(kappa).cdf)


@pytest.mark.parametrize("dim", [2, 3, 50])
def test_far_apart_from_uniform_it_is_a_normal_law_in_the_tangent_plane(dim: int) -> None:
    z, x = drawn(dim, 1e6)
    assert agrees(2e6 * gaps(x, z), stats.chi2(dim - 1).cdf)


@every_kappa
@pytest.mark.parametrize("dim", [3, 10, 100])
def test_the_direction_from_z_is_uniform_and_independent_of_the_angle(dim: int, kappa: float) -> None:
    z, x = drawn(dim, kappa)
    across = x - (x @ z)[:, None] * z
    across = across / torch.linalg.vector_norm(across, dim=-1, keepdim=True)
    # Its mean is 0 and its covariance that of the tangent plane, to 6 standard errors since there are 100^2 of them.
    spread = 1 / (dim - 1)
    assert across.mean(0).abs().max() < 6 * math.sqrt(spread / N)
    flat = torch.eye(dim, dtype=F64) - z[:, None] * z
    error = across.T @ across / N - flat * spread
    assert error.abs().max() < 6 * math.sqrt(2 / N) * spread
    gap = gaps(x, z)
    towards = ((gap - gap.mean())[:, None] * across).mean(0) / (gap.std() * math.sqrt(spread))
    assert towards.abs().max() < 6 / math.sqrt(N)


@every_kappa
def test_in_three_dimensions_the_compass_angle_is_uniform(kappa: float) -> None:
    z, x = drawn(3, kappa)
    east = Sphere(3).project(torch.linalg.cross(z, torch.tensor([0.0, 0.0, 1.0], dtype=F64)))
    north = torch.linalg.cross(z, east)
    assert agrees(torch.atan2(x @ east, x @ north), stats.uniform(-math.pi, 2 * math.pi).cdf)


@every_dim
def test_each_row_is_drawn_around_its_own_point(dim: int) -> None:
    space = Sphere(dim)
    z = space.uniform(N, generator=seeded(1), dtype=F64)
    x = VonMisesFisher(space, 10.0).around(z, generator=seeded(2))
    gap = gaps(x, z)
    expected = 1 - special.ive(dim / 2, 10) / special.ive(dim / 2 - 1, 10)
    assert abs(float(gap.mean()) - expected) < 4.5 * float(gap.std()) / math.sqrt(N)
    # Those that a first proposal fits and those drawn again are mixed without order.
    order = torch.arange(N, dtype=F64)
    assert abs(float(torch.corrcoef(torch.stack([order, gap]))[0, 1])) < 5 / math.sqrt(N)
    # Around uniform points the law is symmetrical, so what comes out is uniform again.
    half = (dim - 1) / 2
    assert agrees((x[:, 0] + 1) / 2, stats.beta(half, half).cdf)


@every_kappa
@every_dim
def test_the_density_is_that_of_scipy(dim: int, kappa: float) -> None:
    z, x = drawn(dim, kappa, 200)
    x = torch.cat([x, z[None], -z[None], Sphere(dim).uniform(200, generator=seeded(), dtype=F64)])
    expected = stats.vonmises_fisher.logpdf(x.numpy(), z.numpy(), kappa)
    found = VonMisesFisher(Sphere(dim), kappa).log_prob(x, z.expand(len(x), -1))
    assert found.dtype == F64
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-8)


@every_kappa
@every_dim
def test_the_density_integrates_to_one_over_the_sphere(dim: int, kappa: float) -> None:
    # In polar coordinates around z, ring by ring.
    bound = min(math.pi, 12 * math.sqrt((dim + 10) / kappa))
    a = (torch.arange(100_000, dtype=F64) + 0.5) * (bound / 100_000)
    z = torch.zeros(dim, dtype=F64)
    z[0] = 1
    x = torch.zeros(len(a), dim, dtype=F64)
    x[:, 0], x[:, 1] = torch.cos(a), torch.sin(a)
    rings = surface(dim - 1) + (dim - 2) * torch.log(torch.sin(a)) if dim > 2 else torch.full_like(a, math.log(2))
    for radius in (1.0, 2.5):
        law = VonMisesFisher(Sphere(dim, radius), kappa)
        log = law.log_prob(radius * x, radius * z.expand_as(x)) + (dim - 1) * math.log(radius) + rings
        assert float(log.exp().sum()) * bound / len(a) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("dim", "kappa"), [(2, 1e6), (1000, 1e6), (1000, 1e-6), (10_000, 100.0)])
def test_the_extremes_are_drawn_and_have_a_finite_density(dim: int, kappa: float) -> None:
    space = Sphere(dim)
    law = VonMisesFisher(space, kappa)
    z = space.uniform(200, generator=seeded())
    x = law.around(z, generator=seeded(1))
    assert space.contains(x, 1e-6).all()
    assert torch.isfinite(law.log_prob(x, z)).all()
    # The differential: kappa times the difference of the cosines.
    difference = law.log_prob(x.double(), z.double()) - law.log_prob(-x.double(), z.double())
    torch.testing.assert_close(difference, 2 * kappa * (x.double() * z.double()).sum(-1), rtol=1e-4, atol=1e-4)


@every_dim
def test_the_least_concentration_is_all_but_uniform(dim: int) -> None:
    space = Sphere(dim)
    x = space.uniform(100, generator=seeded(), dtype=F64)
    torch.testing.assert_close(
        VonMisesFisher(space, 1e-6).log_prob(x), Uniform(space).log_prob(x), rtol=1e-6, atol=2e-6
    )


@every_kappa
@pytest.mark.parametrize("space", [Sphere(2), Sphere(3, 2.5), Sphere(10)], ids=repr)
def test_no_draw_leaves_the_sphere(space: Sphere, kappa: float) -> None:
    z = space.uniform(1_000_000 // space.dim, generator=seeded(1))
    z[:2] = torch.tensor(space.centre())  # the pole and its opposite
    z[1] *= -1
    x = VonMisesFisher(space, kappa).around(z, generator=seeded(2))
    assert x.dtype == torch.float32
    assert space.contains(x, 1e-6).all()


@pytest.mark.parametrize("radius", [0.01, 2.5, 1e4])
def test_the_radius_scales_draws_and_density(radius: float) -> None:
    unit, other = VonMisesFisher(Sphere(4), 5.0), VonMisesFisher(Sphere(4, radius), 5.0)
    z = unit.space.uniform(100, generator=seeded(), dtype=F64)
    x, scaled = unit.around(z, generator=seeded(1)), other.around(radius * z, generator=seeded(1))
    torch.testing.assert_close(scaled, radius * x, rtol=1e-9, atol=1e-9 * radius)
    torch.testing.assert_close(other.log_prob(scaled, radius * z), unit.log_prob(x, z) - 3 * math.log(radius))


def test_the_marginal_is_around_its_centre_and_the_pole_by_default() -> None:
    z = tuple(pole(3).tolist())
    law = VonMisesFisher(Sphere(3), 20.0, z)
    assert law.loc == z
    x = law.sample(N, generator=seeded(), dtype=F64)
    assert agrees(gaps(x, pole(3)), lambda g: np.expm1(-20 * g) / np.expm1(-40))
    torch.testing.assert_close(law.log_prob(x), law.log_prob(x, pole(3).expand(N, -1)))
    assert VonMisesFisher(Sphere(3, 2), 1).loc == (2.0, 0.0, 0.0)


def test_a_law_shows_its_concentration_and_its_centre() -> None:
    assert repr(VonMisesFisher(Sphere(3), 10.0)) == "vmf(kappa=10) over Sphere(3)"
    assert VonMisesFisher(Sphere(2), 0.5, (0.0, 1.0)).text == "vmf(kappa=0.5, loc=(0, 1))"


@pytest.mark.parametrize("kappa", [0, -1.0, 9e-7, 1.1e6, math.nan, math.inf, "strong", None])
def test_a_concentration_out_of_range_is_refused(kappa: Any) -> None:
    with pytest.raises(SpecError, match=re.escape(f"kappa = {kappa!r}: expected")):
        VonMisesFisher(Sphere(3), kappa)


@pytest.mark.parametrize("space", [Box(3), Real(3), Product(Sphere(3))], ids=repr)
def test_it_is_over_a_sphere_only(space: Space) -> None:
    with pytest.raises(SpecError, match=re.escape(f"vmf over {space!r}: expected a Sphere")):
        VonMisesFisher(space, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loc", "words"),
    [
        ((1.0, 1.0, 0.0), "latents outside Sphere(3): row 0 is (1, 1, 0)"),
        ((0.0, 0.0, 0.0), "latents outside Sphere(3): row 0 is (0, 0, 0)"),
        ((1.0, 0.0), "loc has 2 values; expected one, or 3"),
        ((math.nan, 0.0, 1.0), "expected finite numbers"),
    ],
)
def test_a_centre_off_the_sphere_is_refused(loc: tuple[float, ...], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        VonMisesFisher(Sphere(3), 1.0, loc)


def test_it_takes_no_fixed_count_of_uniform_numbers() -> None:
    law = VonMisesFisher(Sphere(3), 1.0)
    assert law.uniforms == 0
    with pytest.raises(SpecError, match=r"vmf\(kappa=1\): cannot be drawn from a fixed number of uniform numbers"):
        law.from_uniforms(torch.tensor([[1.0, 0.0, 0.0]]), torch.full((1, 3), 0.5, dtype=F64))

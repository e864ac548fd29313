"""The located laws and the uniform one against SciPy's: draws, densities, truncation, projection."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from ident3d.distributions import Distribution, GeneralizedNormal, Laplace, Normal, Uniform, exact_uniforms, number
from ident3d.errors import SpecError
from ident3d.spaces import Box, Product, Real, Space, Sphere

N = 20_000
F64 = torch.float64
KINDS = ["normal", "laplace", "gennorm 0.5", "gennorm 1", "gennorm 1.5", "gennorm 3", "gennorm 8"]
every_kind = pytest.mark.parametrize("kind", KINDS)

# One coordinate for each order of magnitude of the scale, in units of the box: 0.05, 1e-4, 2.5 and 0.6.
BOX = Box(4, (0, 0, -1, 2), (1, 1, 3, 2.5))
SCALE = (0.05, 1e-4, 10.0, 0.3)
# Where z lies between the bounds: at them, near one, in the middle.
FRACTIONS = [0.0, 0.02, 0.5, 1.0]
every_place = pytest.mark.parametrize("fraction", FRACTIONS)


def make(
    kind: str, space: Space, scale: float | Sequence[float], loc: Sequence[float] | None = None
) -> Normal | Laplace | GeneralizedNormal:
    name, *beta = kind.split()
    if beta:
        return GeneralizedNormal(space, scale, float(beta[0]), loc)
    return Normal(space, scale, loc) if name == "normal" else Laplace(space, scale, loc)


def reference(kind: str) -> Any:
    name, *beta = kind.split()
    return getattr(stats, {"normal": "norm"}.get(name, name))(*map(float, beta))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def at(fraction: float, space: Box = BOX) -> Tensor:
    """The point of a box that lies this far between its corners."""
    low, high = (torch.tensor(v, dtype=F64) for v in (space.low, space.high))
    return space.project(low + fraction * (high - low))


def agrees(x: Tensor, cdf: Callable[..., object]) -> bool:
    return float(stats.kstest(x.double().numpy(), cdf).pvalue) > 1e-4


class Truncated:
    """SciPy's law around z in units of s, cut to the bounds."""

    def __init__(self, kind: str, z: Any, s: float, low: float, high: float) -> None:
        self.law, self.z, self.s, self.bounds = reference(kind), z, s, (low, high)
        self.bottom, self.top = (self.law.cdf((v - z) / s) for v in self.bounds)

    def cdf(self, x: Any) -> Any:
        return (self.law.cdf((np.clip(x, *self.bounds) - self.z) / self.s) - self.bottom) / (self.top - self.bottom)

    def logpdf(self, x: Any) -> Any:
        return self.law.logpdf((x - self.z) / self.s) - np.log(self.s) - np.log(self.top - self.bottom)


def columns(kind: str, z: Tensor, space: Box = BOX, scale: Sequence[float] = SCALE) -> list[Truncated]:
    parts = zip(z.tolist(), scale, space.low, space.high, strict=True)
    return [Truncated(kind, *part) for part in parts]


@every_place
@every_kind
def test_draws_in_a_box_have_the_truncated_law_of_scipy(kind: str, fraction: float) -> None:
    z = at(fraction)
    x = make(kind, BOX, SCALE).around(z.expand(N, -1), generator=seeded(11))
    for i, expected in enumerate(columns(kind, z)):
        assert agrees(x[:, i], expected.cdf), f"coordinate {i}"


@every_place
def test_normal_draws_in_a_box_have_the_law_of_truncnorm(fraction: float) -> None:
    z = at(fraction)
    law = Normal(BOX, SCALE)
    x = law.around(z.expand(N, -1), generator=seeded(12))
    total = np.zeros(N)
    for i, (c, s, low, high) in enumerate(zip(z.tolist(), SCALE, BOX.low, BOX.high, strict=True)):
        expected = stats.truncnorm((low - c) / s, (high - c) / s, c, s)
        assert agrees(x[:, i], expected.cdf)
        total += expected.logpdf(x[:, i].numpy())
    np.testing.assert_allclose(law.log_prob(x, z.expand(N, -1)).numpy(), total, rtol=1e-8)


@every_place
@every_kind
def test_uniform_numbers_are_inverted_exactly(kind: str, fraction: float) -> None:
    z = at(fraction)
    u = torch.cat([torch.logspace(-9, -3, 50, dtype=F64), torch.linspace(0.002, 0.998, 997, dtype=F64)])
    u = torch.cat([u, 1 - u[:50].flip(0)])[:, None].expand(-1, 4)
    x = make(kind, BOX, SCALE).from_uniforms(z.expand(len(u), -1), u)
    for i, expected in enumerate(columns(kind, z)):
        np.testing.assert_allclose(expected.cdf(x[:, i].numpy()), u[:, i].numpy(), atol=1e-9)
    assert (x.diff(dim=0) > 0).all()


@every_kind
def test_no_more_than_rounding_is_found_at_a_wall(kind: str) -> None:
    # Rejection by clipping would put up to half of the draws there.
    for fraction in (0.0, 0.001, 0.999, 1.0):
        z = at(fraction).float().expand(N, -1)
        x = make(kind, BOX, SCALE).around(z, generator=seeded(5))
        low, high = BOX.bounds(x)
        assert ((x == low) | (x == high)).double().mean(0).max() < 1e-3


@every_kind
def test_draws_on_the_whole_line_have_the_law_of_scipy(kind: str) -> None:
    z = torch.tensor([0.0, -3.0, 1e3, 2.0], dtype=F64)
    x = make(kind, Real(4), SCALE).around(z.expand(N, -1), generator=seeded(3))
    for i, scale in enumerate(SCALE):
        assert agrees((x[:, i] - z[i]) / scale, reference(kind).cdf)


@every_kind
@pytest.mark.parametrize("space", [BOX, Real(4)], ids=["box", "real"])
def test_coordinates_and_rows_are_drawn_independently(kind: str, space: Space) -> None:
    law = make(kind, space, SCALE)
    # As uniform numbers, since some of the laws have heavy tails.
    ranks = law.sample(N, generator=seeded(4), dtype=F64).argsort(0).argsort(0).double()
    assert (torch.corrcoef(ranks.T) - torch.eye(4)).abs().max() < 5 / math.sqrt(N)
    following = torch.corrcoef(torch.cat([ranks[1:], ranks[:-1]], dim=1).T)[:4, 4:]
    assert following.abs().max() < 5 / math.sqrt(N)


@every_kind
def test_each_row_is_drawn_around_its_own_point(kind: str) -> None:
    space = Box(2, -1, 2)
    z = space.uniform(N, generator=seeded(1), dtype=F64)
    x = make(kind, space, (0.2, 3.0)).around(z, generator=seeded(2))
    for i, s in enumerate((0.2, 3.0)):
        u = Truncated(kind, z[:, i].numpy(), s, -1, 2).cdf(x[:, i].numpy())
        assert agrees(torch.from_numpy(u), stats.uniform.cdf)


@every_kind
@pytest.mark.parametrize("side", ["inside", "at the wall", "below", "above"])
def test_the_marginal_has_the_law_around_its_centre_even_outside_the_box(kind: str, side: str) -> None:
    # So far from the box that it holds between 1e-8 and 1e-6 of the law.
    away = -0.1 * reference(kind).ppf(1e-7)
    loc = {"inside": 0.3, "at the wall": 1.0, "below": -away, "above": 1 + away}[side]
    law = make(kind, Box(1), 0.1, [loc])
    x = law.sample(N, generator=seeded(8), dtype=F64)
    # SciPy's distribution functions are precise below the centre alone, so what lies above it is mirrored.
    sign = 1 if loc > 0.5 else -1
    mirrored = Truncated(kind, sign * loc, 0.1, min(0, sign), max(0, sign))
    assert agrees(sign * x[:, 0], mirrored.cdf)
    expected = mirrored.logpdf(sign * x[:, 0].numpy())
    np.testing.assert_allclose(law.log_prob(x).numpy(), expected, rtol=1e-8, atol=1e-8)


@every_kind
def test_the_default_centre_is_the_middle_of_the_box_and_the_origin_of_the_line(kind: str) -> None:
    assert make(kind, BOX, 1).loc == (0.5, 0.5, 1.0, 2.25)
    assert make(kind, Real(2), 1).loc == (0.0, 0.0)
    assert make(kind, Sphere(3, 2), 1).loc == (2.0, 0.0, 0.0)
    law, loc = make(kind, Box(2), 0.1, (0.2, 0.9)), torch.tensor([[0.2, 0.9]], dtype=F64)
    x = law.sample(100, generator=seeded(), dtype=F64)
    assert torch.equal(x, law.around(loc.repeat(100, 1), generator=seeded()))
    assert torch.equal(law.sample(100, generator=seeded()), x.float())
    torch.testing.assert_close(law.log_prob(x), law.log_prob(x, loc.expand(100, -1)))


@every_place
@every_kind
def test_the_density_in_a_box_is_that_of_scipy(kind: str, fraction: float) -> None:
    z = at(fraction)
    law = make(kind, BOX, SCALE)
    x = law.around(z.expand(500, -1), generator=seeded(6))
    expected = sum(c.logpdf(x[:, i].numpy()) for i, c in enumerate(columns(kind, z)))
    np.testing.assert_allclose(law.log_prob(x, z.expand(500, -1)).numpy(), expected, rtol=1e-9, atol=1e-9)


@every_kind
def test_the_density_on_the_whole_line_is_that_of_scipy(kind: str) -> None:
    law, z = make(kind, Real(4), SCALE), torch.tensor([0.0, -3.0, 1e3, 2.0], dtype=F64)
    x = law.around(z.expand(500, -1), generator=seeded(6))
    expected = reference(kind).logpdf(((x - z) / torch.tensor(SCALE)).numpy()).sum(-1) - np.log(SCALE).sum()
    # 1e3 is known to 1e-13, which is 1e-14 in units of its scale.
    np.testing.assert_allclose(law.log_prob(x, z.expand(500, -1)).numpy(), expected, rtol=1e-6, atol=1e-6)


@every_place
@every_kind
def test_the_density_in_a_box_integrates_to_one(kind: str, fraction: float) -> None:
    space, cells = Box(1, -1, 2), 200_000
    middles = (-1 + 3 * (torch.arange(cells, dtype=F64) + 0.5) / cells)[:, None]
    for scale in (0.02, 0.3, 50.0):
        density = make(kind, space, scale).log_prob(middles, at(fraction, space).expand(cells, 1)).exp()
        assert float(density.sum()) * 3 / cells == pytest.approx(1, abs=2e-4)


@every_kind
def test_outside_the_box_there_is_no_density(kind: str) -> None:
    law, z = make(kind, Box(2), 0.1), torch.full((6, 2), 0.5, dtype=F64)
    above = math.nextafter(1.0, 2.0)
    outside = [[0.5, above], [-5e-324, 0.5], [2.0, 2.0], [math.nan, 0.5], [math.inf, 0.5], [-1e-6, 0.5]]
    assert (law.log_prob(torch.tensor(outside, dtype=F64), z) == -math.inf).all()
    assert (Uniform(Box(2)).log_prob(torch.tensor(outside, dtype=F64)) == -math.inf).all()
    corners = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=F64)
    assert (Uniform(Box(2)).log_prob(corners) == 0).all()
    assert (make(kind, Box(2), 1).log_prob(corners, z[:3]) > -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "uniform"])
def test_a_million_numbers_from_corners_walls_and_within_stay_inside(kind: str, dtype: torch.dtype) -> None:
    n = 500_000 if dtype == torch.float32 else 50_000
    space = Box(2, (-0.3, 0), (0.1, 1))
    low, high = torch.tensor(space.low, dtype=dtype), torch.tensor(space.high, dtype=dtype)
    lot = torch.randint(0, 4, (n, 2), generator=seeded(1))
    z = space.uniform(n, generator=seeded(2), dtype=dtype)
    z = torch.where(lot == 0, low, torch.where(lot == 1, high, z))
    law = Uniform(space) if kind == "uniform" else make(kind, space, (0.05, 1e-3))
    # And the least and the greatest number that exact_uniforms gives, with which rounding can lead past a bound.
    ends = torch.where(lot[: n // 20] % 2 == 0, 2.0**-54, 1 - 2.0**-53).to(F64)
    for x in (law.around(z, generator=seeded(3)), law.from_uniforms(z[: n // 20], ends)):
        assert x.dtype == dtype
        assert ((x >= low) & (x <= high)).all()


@pytest.mark.parametrize("kind", ["normal", "laplace", "gennorm 0.5", "gennorm 3", "gennorm 50", "gennorm 100"])
@pytest.mark.parametrize("scale", [100.0, 500.0, 1000.0, 1e6])
def test_a_law_much_wider_than_the_box_is_all_but_uniform(kind: str, scale: float) -> None:
    law = make(kind, Box(1), scale)
    assert agrees(law.sample(N, generator=seeded(), dtype=F64)[:, 0], stats.uniform(0, 1).cdf)
    assert law.log_prob(torch.tensor([[0.0], [0.3], [1.0]], dtype=F64)).abs().max() < 0.1


@every_kind
def test_a_point_outside_by_its_rounding_leads_to_no_other_wall(kind: str) -> None:
    law = make(kind, Box(1), 1e-7)
    for dtype in (torch.float32, F64):
        z = torch.tensor([[-9e-6], [1 + 9e-6]], dtype=dtype)
        x = law.around(z, generator=seeded())
        assert (x - z).abs().max() < 1.5e-5
        assert law.space.contains(x, 0.0).all()
        assert torch.isfinite(law.log_prob(x, z)).all()


def test_uniform_numbers_next_to_zero_and_one_lead_to_their_own_ends_of_the_law() -> None:
    u = torch.tensor([[1e-300], [1e-17], [2.0**-54], [1 - 2.0**-53]], dtype=F64)
    x = Normal(Box(1), 0.01).from_uniforms(torch.full((4, 1), 0.1, dtype=F64), u)
    found = stats.truncnorm(-10, 90, 0.1, 0.01).cdf(x.numpy())
    np.testing.assert_allclose(found, u.numpy(), atol=2.0**-52)
    assert ((x > 0) & (x < 1)).all()


@every_kind
def test_projected_draws_lie_on_the_sphere(kind: str) -> None:
    for space in (Sphere(2), Sphere(3, 2.5), Sphere(10)):
        z = space.uniform(N, generator=seeded(1))
        for scale in (1e-6, 0.1, 10.0):
            x = make(kind, space, scale).around(z, generator=seeded(2))
            assert space.contains(x, 1e-6).all()
            if scale == 1e-6 and kind != "gennorm 0.5":  # whose tails reach 200 scales
                assert (x - z).abs().max() < 1e-4


@pytest.mark.parametrize("scale", [0.1, 0.7, 5.0])
def test_the_angle_of_projected_normal_draws_has_its_closed_form(scale: float) -> None:
    # The projected normal law on a circle; m is the distance of its mean from the origin, in scales.
    m = 1 / scale
    angles = np.linspace(-np.pi, np.pi, 20_001)
    c = m * np.cos(angles)
    density = np.exp(-(m**2) / 2) / (2 * np.pi) + c * stats.norm.cdf(c) * stats.norm.pdf(m * np.sin(angles))
    cdf = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2) * (angles[1] - angles[0])])
    assert cdf[-1] == pytest.approx(1, abs=1e-6)
    pole = torch.tensor([0.6, 0.8], dtype=F64)
    x = Normal(Sphere(2), scale).around(pole.expand(N, -1), generator=seeded(7))
    angle = torch.atan2(pole[0] * x[:, 1] - pole[1] * x[:, 0], x @ pole)
    assert agrees(angle, lambda t: np.interp(t, angles, cdf))


@every_kind
def test_projected_laws_have_no_closed_density_and_take_no_fixed_count_of_numbers(kind: str) -> None:
    law = make(kind, Sphere(3), 0.1)
    x = law.space.uniform(2, generator=seeded())
    with pytest.raises(SpecError, match=re.escape(f"{law.text} over Sphere(3): its density has no closed form")):
        law.log_prob(x, x)
    assert law.uniforms == 0
    with pytest.raises(SpecError, match="cannot be drawn from a fixed number of uniform numbers"):
        law.from_uniforms(x, torch.full((2, 3), 0.5, dtype=F64))


def test_uniform_numbers_are_never_zero_or_one_and_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    u = exact_uniforms(200_000, 2, generator=seeded())
    assert u.dtype == F64
    assert agrees(u[:, 0], stats.uniform.cdf)
    # One in 2^53 is 0 as it is drawn.
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=F64))
    u = exact_uniforms(3, generator=seeded())
    assert ((u > 0) & (u < 1)).all()
    assert torch.isfinite(make("normal", Real(3), 1).from_uniforms(torch.zeros(1, 3), u[None])).all()


def test_numbers_are_written_as_short_as_they_can_be_read_back() -> None:
    assert [number(v) for v in (3, 3.0, -0.0, 0.05, 1e-7, 1e16)] == ["3", "3", "0", "0.05", "1e-07", "1e+16"]
    for value in (0.1 + 0.2, 1 / 3, 1e-300, 123456789.125):
        assert float(number(value)) == value


@every_kind
@pytest.mark.parametrize("space", [Box(2), Sphere(2), Real(2)], ids=repr)
@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (0, "scale = 0: expected numbers above 0"),
        (-0.5, "scale = -0.5: expected numbers above 0"),
        ((0.1, 0.0), "scale = (0.1, 0.0): expected numbers above 0"),
        (math.inf, "scale = inf: expected finite numbers"),
        ((0.1, 0.1, 0.1), "scale has 3 values; expected one, or 2"),
        ("12", "scale = '12': expected a number, or one a dimension"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(kind: str, space: Space, scale: Any, words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        make(kind, space, scale)


@pytest.mark.parametrize("beta", [0, 0.19, 101, -2, math.nan, math.inf, "3"])
def test_a_power_out_of_range_is_refused(beta: Any) -> None:
    with pytest.raises(SpecError, match=re.escape(f"beta = {beta!r}: expected")):
        GeneralizedNormal(Box(2), 0.1, beta)


@pytest.mark.parametrize(
    ("scale", "loc"),
    [(1e12, None), (0.01, (0.5, -50.0)), (0.01, (90.0, 0.5)), (0.05, (0.5, -1.92)), (0.05, (2.1, 0.5))],
)
@pytest.mark.parametrize("kind", ["normal", "laplace", "gennorm 3"])
def test_a_law_that_leaves_nothing_in_the_box_is_refused(kind: str, scale: float, loc: Sequence[float] | None) -> None:
    with pytest.raises(SpecError, match=rf"scale={number(scale)}.*all of its mass lies outside the box"):
        make(kind, Box(2), scale, loc)
    make(kind, Real(2), scale, loc)  # which has no walls


@every_kind
def test_a_box_must_hold_a_billionth_of_the_law(kind: str) -> None:
    for mass in (1.05e-9, 0.95e-9):
        away = -reference(kind).ppf(mass)
        with nullcontext() if mass > 1e-9 else pytest.raises(SpecError, match="lies outside the box"):
            make(kind, Box(1, 0, 1e6), 1.0, [-away])


@every_kind
def test_a_centre_that_cannot_be_is_refused(kind: str) -> None:
    with pytest.raises(SpecError, match="loc has 1 values; expected one, or 2"):
        make(kind, Box(2), 0.1, [0.5])
    with pytest.raises(SpecError, match=r"loc = .*nan.*: expected finite numbers"):
        make(kind, Box(2), 0.1, [0.5, math.nan])


@every_kind
def test_a_located_law_over_a_product_is_refused(kind: str) -> None:
    with pytest.raises(SpecError, match=re.escape("over Product(Box(1), Sphere(2)): expected a Box, a Sphere or Real")):
        make(kind, Product(Box(1), Sphere(2)), 0.1)


def test_a_law_shows_its_text_and_its_space() -> None:
    laws: list[Distribution] = [
        Normal(Box(2), (0.1, 0.2), (0.5, 1)),
        Laplace(Real(1), 3),
        GeneralizedNormal(Box(2), 0.5),
        Uniform(Box(2)),
    ]
    assert list(map(repr, laws)) == [
        "normal(scale=(0.1, 0.2), loc=(0.5, 1)) over Box(2)",
        "laplace(scale=3) over Real(1)",
        "gennorm(scale=0.5, beta=3) over Box(2)",
        "uniform() over Box(2)",
    ]

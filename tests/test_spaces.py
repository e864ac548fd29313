"""Spaces as laws: what lies in them, the nearest point, the uniform distribution."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from ident3d.distributions import Uniform
from ident3d.errors import SpecError
from ident3d.spaces import Box, Product, Real, Space, Sphere, per_dimension

N = 20_000
F64 = torch.float64
BOXES = [Box(3), Box(2, -1, 3), Box(3, (0, -1, 2), (0.1, 5, 2.5))]
SPHERES = [Sphere(2), Sphere(3), Sphere(10), Sphere(4, 2.5)]
PRODUCTS = [Product(Box(3), Sphere(3, 2)), Product(Sphere(2), Box(1), Product(Box(2, -1, 1)))]
BOUNDED: list[Space] = [*BOXES, *SPHERES, *PRODUCTS]
SPACES: list[Space] = [*BOUNDED, Real(3)]
DTYPES = [torch.float32, torch.float64]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def anywhere(dim: int, n: int = 1000, dtype: torch.dtype = torch.float64) -> Tensor:
    """Points of all directions, most of them in none of the spaces."""
    return 4 * torch.randn(n, dim, generator=seeded(9), dtype=dtype)


def agrees(x: Tensor, cdf: Callable[..., object]) -> bool:
    return float(stats.kstest(x.double().numpy(), cdf).pvalue) > 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("space", BOUNDED, ids=repr)
def test_what_a_space_draws_lies_in_it(space: Space, dtype: torch.dtype) -> None:
    x = space.uniform(N, generator=seeded(), dtype=dtype)
    assert x.shape == (N, space.dim)
    assert x.dtype == dtype
    assert space.contains(x, 0.0 if isinstance(space, Box) else 1e-6).all()


@pytest.mark.parametrize("space", BOXES, ids=repr)
def test_a_box_is_filled_uniformly_in_each_coordinate(space: Box) -> None:
    x = space.uniform(N, generator=seeded())
    for i, (low, high) in enumerate(zip(space.low, space.high, strict=True)):
        assert agrees(x[:, i], stats.uniform(low, high - low).cdf)
    off_diagonal = torch.corrcoef(x.T) - torch.eye(space.dim)
    assert off_diagonal.abs().max() < 5 / math.sqrt(N)


@pytest.mark.parametrize("space", SPHERES, ids=repr)
def test_each_coordinate_of_a_uniform_point_of_a_sphere_has_its_beta_law(space: Sphere) -> None:
    half = (space.dim - 1) / 2
    x = space.uniform(N, generator=seeded())
    for i in range(space.dim):
        assert agrees((x[:, i] / space.radius + 1) / 2, stats.beta(half, half).cdf)


def test_the_angle_of_a_uniform_point_of_a_circle_is_uniform() -> None:
    x = Sphere(2).uniform(N, generator=seeded())
    assert agrees(torch.atan2(x[:, 1], x[:, 0]), stats.uniform(-math.pi, 2 * math.pi).cdf)


def test_the_parts_of_a_product_are_drawn_uniformly_and_independently() -> None:
    space = Product(Box(2, -1, 1), Sphere(3))
    x = space.uniform(N, generator=seeded())
    for i in range(5):  # by Archimedes, a coordinate of the sphere in three dimensions is uniform too
        assert agrees(x[:, i], stats.uniform(-1, 2).cdf)
    assert (torch.corrcoef(x.T) - torch.eye(5)).abs().max() < 5 / math.sqrt(N)


@pytest.mark.parametrize("space", BOUNDED, ids=repr)
def test_the_seed_alone_decides_what_is_drawn(space: Space) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = space.uniform(50, generator=seeded(3))
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert torch.equal(space.uniform(50, generator=seeded(3)), first)
    assert not torch.equal(space.uniform(50, generator=seeded(4)), first)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_a_projection_lies_in_the_space_and_stays_where_it_is(space: Space) -> None:
    x = space.project(anywhere(space.dim))
    assert space.contains(x, 1e-12).all()
    torch.testing.assert_close(space.project(x), x, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("space", BOUNDED, ids=repr)
def test_a_projection_is_the_nearest_point(space: Space) -> None:
    x = anywhere(space.dim, 200)
    others = space.uniform(2000, generator=seeded(), dtype=torch.float64)
    distance = torch.linalg.vector_norm(x - space.project(x), dim=-1)
    assert (torch.cdist(x, others).min(-1).values >= distance - 1e-9).all()


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_lies_in_no_space(space: Space, value: float) -> None:
    x = torch.tensor(space.centre()).repeat(space.dim, 1)
    assert space.contains(x).all()
    assert not space.contains(x + torch.diag(torch.full((space.dim,), value))).any()


def test_a_point_a_little_outside_is_inside_as_far_as_the_tolerance_goes() -> None:
    x = torch.tensor([[1.0, 0.5], [1 + 5e-6, 0.5], [0.5, -5e-6], [1.001, 0.5]], dtype=torch.float64)
    assert Box(2).contains(x).tolist() == [True, True, True, False]
    assert Box(2).contains(x, 0.0).tolist() == [True, False, False, False]
    assert Box(2).contains(x, 0.01).all()
    on = torch.tensor([[3.0, 4.0], [3.0, 4.00001], [3.0, 4.001]], dtype=torch.float64)
    assert Sphere(2, 5.0).contains(on).tolist() == [True, True, False]
    # For a sphere the tolerance is a share of the radius.
    for radius in (1e-4, 1e4):
        scaled = radius * torch.tensor([[0.6, 0.8], [0.60003, 0.8]], dtype=torch.float64)
        assert Sphere(2, radius).contains(scaled).tolist() == [True, False]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_membership_has_the_shape_of_the_batch(space: Space) -> None:
    x = space.project(anywhere(space.dim, 6))
    assert space.contains(x[0]).shape == ()
    assert space.contains(x.reshape(2, 3, space.dim)).shape == (2, 3)
    assert space.contains(x[:0]).shape == (0,)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_the_centre_lies_in_the_space_and_the_text_makes_it_again(space: Space) -> None:
    assert space.contains(torch.tensor(space.centre(), dtype=torch.float64), 1e-12)
    names = {"Box": Box, "Sphere": Sphere, "Real": Real, "Product": Product}
    again = eval(repr(space), names)
    assert type(again) is type(space)
    assert repr(again) == repr(space)
    assert again.centre() == space.centre()


def test_a_product_splits_into_the_coordinates_of_its_parts() -> None:
    space = Product(Box(3), Sphere(2))
    x = torch.tensor([[0.1, 0.2, 0.3, 0.6, 0.8]])
    assert [part.tolist() for part in space.split(x)] == [x[:, :3].tolist(), x[:, 3:].tolist()]
    assert not space.contains(torch.tensor([[0.1, 0.2, 0.3, 0.6, 0.9], [0.1, 0.2, 1.3, 0.6, 0.8]])).any()


def test_the_origin_has_no_nearest_point_on_a_sphere() -> None:
    points = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    with pytest.raises(SpecError, match="origin has no nearest point"):
        Sphere(2).project(points)
    with pytest.raises(SpecError, match="origin has no nearest point"):
        Product(Box(2), Sphere(2)).project(torch.cat([points, points], dim=-1))


def test_the_whole_of_space_has_no_uniform_distribution() -> None:
    with pytest.raises(SpecError, match=re.escape("Real(3) has no uniform distribution")):
        Real(3).uniform(1, generator=seeded())


@pytest.mark.parametrize(
    ("space", "volume"),
    [
        (Box(3), 1.0),
        (Box(2, (-1, 0), (3, 0.5)), 2.0),
        (Sphere(2, 3.0), 6 * math.pi),
        (Sphere(3, 0.5), math.pi),
        (Sphere(4), 2 * math.pi**2),
        (Product(Box(1, 0, 2), Sphere(3)), 8 * math.pi),
    ],
    ids=repr,
)
def test_the_uniform_density_is_one_over_the_volume_and_forgets_z(space: Space, volume: float) -> None:
    law = Uniform(space)
    z, x = (space.uniform(50, generator=seeded(seed), dtype=F64) for seed in (0, 1))
    np.testing.assert_allclose(law.log_prob(x).numpy(), -math.log(volume), rtol=1e-14, atol=1e-14)
    assert torch.equal(law.log_prob(x, z), law.log_prob(x))
    assert (law.log_prob(2 * x + 9) == -math.inf).all()
    assert torch.equal(law.around(z, generator=seeded(2)), law.around(x, generator=seeded(2)))


def test_uniform_numbers_fill_the_box_in_order() -> None:
    law = Uniform(Box(4, (0, 0, -1, 2), (1, 1, 3, 2.5)))
    u = torch.tensor([[0.25] * 4, [0.5] * 4], dtype=F64)
    x = law.from_uniforms(torch.zeros(2, 4), u)
    torch.testing.assert_close(x, torch.tensor([[0.25, 0.25, 0.0, 2.125], [0.5, 0.5, 1.0, 2.25]]))
    for space in (Sphere(3), Product(Box(1))):
        with pytest.raises(SpecError, match="cannot be drawn from a fixed number"):
            Uniform(space).from_uniforms(torch.zeros(1, space.dim), u)


def test_the_uniform_density_ends_at_a_box_and_has_a_tolerance_on_a_sphere_alone() -> None:
    x = torch.tensor([[1 + 5e-6, 0.6, 0.8], [1.0, 0.6, 0.8 + 5e-6], [1.0, 0.6, 0.81]], dtype=F64)
    assert torch.isfinite(Uniform(Product(Box(1), Sphere(2))).log_prob(x)).tolist() == [False, True, False]


@pytest.mark.parametrize("space", [Real(2), Product(Box(1), Real(1)), Product(Box(1), Product(Real(2)))], ids=repr)
def test_a_uniform_law_over_the_whole_line_is_refused(space: Space) -> None:
    with pytest.raises(SpecError, match=re.escape(f"uniform over {space!r}: there is no such law")):
        Uniform(space)


@pytest.mark.parametrize("dim", [0, -1, True, 2.0, "3", None, 100_001])
@pytest.mark.parametrize("kind", [Box, Sphere, Real])
def test_a_dimension_that_cannot_be_is_refused(kind: Callable[[object], Space], dim: object) -> None:
    with pytest.raises(SpecError, match=re.escape(f"of dimension {dim!r}")):
        kind(dim)


def test_a_sphere_needs_two_dimensions() -> None:
    with pytest.raises(SpecError, match="Sphere of dimension 1: expected 2 to 100,000"):
        Sphere(1)


def test_a_product_of_too_many_dimensions_is_refused() -> None:
    with pytest.raises(SpecError, match="Product of dimension 100001: expected 1 to 100,000"):
        Product(Box(100_000), Real(1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Box(2, 1, 0), "box from 1 to 0: expected low below high"),
        (lambda: Box(2, (0, 1), (1, 1)), "box from (0, 1) to (1, 1): expected low below high"),
        (lambda: Box(2, -math.inf, 1), "low = -inf: expected finite numbers"),
        (lambda: Box(2, 0, math.nan), "high = nan: expected finite numbers"),
        (lambda: Box(3, (0, 0), 1), "low has 2 values; expected one, or 3"),
        (lambda: Box(2, "wide", 1), "low = 'wide': expected a number"),  # type: ignore[arg-type]
        (lambda: Box(2, None, 1), "low = None: expected a number"),  # type: ignore[arg-type]
        (lambda: Sphere(3, 0), "radius = 0: expected a number above 0"),
        (lambda: Sphere(3, -1), "radius = -1: expected a number above 0"),
        (lambda: Sphere(3, math.inf), "radius = inf: expected finite numbers"),
        (lambda: Product(), "Product of (): expected at least one space"),
        (lambda: Product(Box(1), 3), "Product of (Box(1), 3): expected at least one space"),  # type: ignore[arg-type]
    ],
)
def test_a_space_that_cannot_be_is_refused(make: Callable[[], Space], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        make()


def test_one_number_a_dimension_comes_from_one_or_from_a_sequence_of_any_kind() -> None:
    assert per_dimension("s", 2, 3) == (2.0, 2.0, 2.0)
    for many in ([1, 2, 3], (1.0, 2.0, 3.0), np.array([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0])):
        assert per_dimension("s", many, 3) == (1.0, 2.0, 3.0)  # type: ignore[arg-type]
    assert per_dimension("s", np.float32(0.5), 2) == per_dimension("s", torch.tensor(0.5), 2) == (0.5, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        "12",
        b"12",
        "0.5",
        True,
        None,
        {},
        1j,
        10**400,
        (0.5, True),
        ("1", "2"),
        (0.5, None),
        ((1,), (2,)),
        (0.5, 10**400),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_number_is_refused_be_it_one_or_in_a_sequence(value: object) -> None:
    # A text or bytes of as many characters as dimensions is a sequence, and of digits alone it reads as numbers.
    with pytest.raises(SpecError, match=re.escape(f"s = {value!r}: expected a number, or one a dimension")):
        per_dimension("s", value, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, (0.5, math.nan)])
def test_what_is_no_finite_number_is_refused(value: float | tuple[float, ...]) -> None:
    with pytest.raises(SpecError, match=re.escape(f"s = {value!r}: expected finite numbers")):
        per_dimension("s", value, 2)


@pytest.mark.parametrize("value", [(), (0.5,), (0.5, 0.5, 0.5)])
def test_another_count_of_numbers_than_dimensions_is_refused(value: tuple[float, ...]) -> None:
    with pytest.raises(SpecError, match=f"s has {len(value)} values; expected one, or 2"):
        per_dimension("s", value, 2)

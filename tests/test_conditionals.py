"""Conditionals from texts, laws made of others, and what holds for every law."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from ident3d.conditionals import Change, Joint, Share, columns_of, conditional
from ident3d.distributions import Distribution, GeneralizedNormal, Laplace, Normal, Uniform, exact_uniforms
from ident3d.errors import SpecError
from ident3d.factors import FACTORS, Factors
from ident3d.spaces import Box, Product, Real, Space, Sphere
from ident3d.von_mises_fisher import VonMisesFisher

N = 20_000
F64 = torch.float64
BOX, SPHERE, REAL = Box(10), Sphere(10), Real(10)
SCALES = "scale=(0.05, 0.1, 0.2, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 1)"
TEXTS: list[tuple[str, Space]] = [
    *(
        (text, space)
        for space in (BOX, SPHERE, REAL)
        for text in ("normal(scale=0.05)", "laplace(scale=0.05)", "gennorm(scale=0.05, beta=3)", f"normal({SCALES})")
    ),
    ("laplace(scale=10)", BOX),
    ("gennorm(scale=1e-05, beta=0.5)", BOX),
    (f"gennorm({SCALES}, beta=1.5)", BOX),
    ("uniform()", BOX),
    ("uniform()", SPHERE),
    ("share(object_hue)", BOX),
    ("share(object_hue, object_x)", BOX),
    ("change(k=1)", BOX),
    ("change(k=10)", BOX),
    ("vmf(kappa=10)", SPHERE),
    ("vmf(kappa=0.5)", SPHERE),
]
MADE = [conditional(text, space, FACTORS) for text, space in TEXTS]
LAWS = [
    *MADE,
    Uniform(Product(Box(3), Sphere(2))),
    Joint(Uniform(Box(3)), Normal(Sphere(2), 0.1), Laplace(Real(1), 2), VonMisesFisher(Sphere(4), 3)),
]
every_law = pytest.mark.parametrize("law", LAWS, ids=repr)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(space: Space, n: int, dtype: torch.dtype = torch.float32, seed: int = 100) -> Tensor:
    """Points of any space, those of the whole line from a normal law."""
    if isinstance(space, Product):
        return torch.cat([points(part, n, dtype, seed + i) for i, part in enumerate(space.parts)], dim=-1)
    if isinstance(space, Real):
        return torch.randn(n, space.dim, generator=seeded(seed), dtype=dtype)
    return space.uniform(n, generator=seeded(seed), dtype=dtype)


def agrees(x: Tensor) -> bool:
    return float(stats.kstest(x.double().numpy(), "uniform").pvalue) > 1e-4


@every_law
def test_the_seed_alone_decides_what_is_drawn(law: Distribution) -> None:
    z = points(law.space, 50)
    given = z.clone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first, marginal = law.around(z, generator=seeded(3)), law.sample(50, generator=seeded(3))
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert torch.equal(law.around(z, generator=seeded(3)), first)
        assert torch.equal(law.sample(50, generator=seeded(3)), marginal)
    assert torch.equal(law.around(z, generator=seeded(3), check=False), first)
    assert not torch.equal(law.around(z, generator=seeded(4)), first)
    generator = seeded(3)
    assert not torch.equal(law.around(z, generator=generator), law.around(z, generator=generator))
    assert torch.equal(z, given)


@every_law
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_draws_have_the_shape_and_type_of_z_and_lie_in_the_space(law: Distribution, dtype: torch.dtype) -> None:
    z = points(law.space, 1000, dtype)
    for x in (law.around(z, generator=seeded()), law.sample(1000, generator=seeded(), dtype=dtype)):
        assert x.shape == z.shape
        assert x.dtype == dtype
        assert law.space.contains(x, 1e-6).all()
    assert law.around(z[:0], generator=seeded()).shape == (0, law.space.dim)
    assert law.sample(0, generator=seeded(), dtype=dtype).dtype == dtype


# Not the uniform law, whose numbers are drawn in the type asked for.
@pytest.mark.parametrize("law", [law for law in MADE if not isinstance(law, Uniform)], ids=repr)
def test_float32_and_float64_get_the_same_numbers_to_rounding(law: Distribution) -> None:
    z = points(law.space, 500)
    x, exact = law.around(z, generator=seeded()), law.around(z.double(), generator=seeded())
    torch.testing.assert_close(x.double(), exact, rtol=1e-5, atol=1e-5)


@every_law
def test_latents_that_are_not_of_the_space_are_refused(law: Distribution) -> None:
    z = points(law.space, 4)
    for column in {0, law.space.dim - 1}:
        for value in (math.nan, math.inf):
            spoilt = z.clone()
            spoilt[2, column] = value
            with pytest.raises(SpecError, match=rf"latents outside .*: row 2 is \(.*{value}.*\)"):
                law.around(spoilt, generator=seeded())
    if not isinstance(law.space, Real):
        with pytest.raises(SpecError, match=r"latents outside .*: row 0 is \(9, 9, "):
            law.around(torch.full_like(z, 9.0), generator=seeded())
    for wrong in (z[:, 1:], torch.cat([z, z], dim=1), z[0], z[None]):
        with pytest.raises(SpecError, match=re.escape(f"shape {tuple(wrong.shape)}: expected (n, {law.space.dim})")):
            law.around(wrong, generator=seeded())


BITWISE = [
    *(law for law in LAWS if law.uniforms),
    *(GeneralizedNormal(Box(3), 0.1, beta) for beta in (0.2, 1.5, 4.0, 8.0)),
    conditional("uniform()", Box(10, -0.3, 0.7)),
    conditional("change(k=3)", BOX),
]


@pytest.mark.parametrize("law", BITWISE, ids=repr)
def test_a_row_is_the_same_bit_by_bit_alone_and_among_others(law: Distribution) -> None:
    z, u = points(law.space, 503, F64), exact_uniforms(503, law.uniforms, generator=seeded())
    together = law.from_uniforms(z, u)
    alone = [law.from_uniforms(z[i : i + 1], u[i : i + 1]) for i in range(503)]
    assert torch.equal(together, torch.cat(alone))
    order = torch.randperm(503, generator=seeded(1))
    assert torch.equal(law.from_uniforms(z[order], u[order]), together[order])
    assert torch.equal(law.around(z, generator=seeded()), law.around(z.clone(), generator=seeded()))


def test_shared_factors_stay_bit_by_bit_and_the_others_are_uniform_and_independent() -> None:
    law = conditional("share(object_hue, object_x, ground_hue)", BOX, FACTORS)
    assert law.shared == (7, 0, 9)
    z = points(BOX, N)
    x = law.around(z, generator=seeded())
    assert torch.equal(x[:, [0, 7, 9]], z[:, [0, 7, 9]])
    fresh = [1, 2, 3, 4, 5, 6, 8]
    assert all(agrees(x[:, i]) for i in fresh)
    correlations = torch.corrcoef(torch.cat([z, x[:, fresh]], dim=1).T) - torch.eye(17)
    assert correlations.abs().max() < 5 / math.sqrt(N)


@pytest.mark.parametrize("k", [1, 2, 5, 10])
def test_exactly_k_factors_change_and_each_equally_often(k: int) -> None:
    z = points(BOX, N, F64)
    x = Change(BOX, k).around(z, generator=seeded(k))
    changed = x != z
    assert (changed.sum(1) == k).all()
    assert torch.equal(x[~changed], z[~changed])
    counts = changed.sum(0).double()
    assert (counts - N * k / 10).abs().max() < 5 * math.sqrt(N * (k / 10) * (1 - k / 10)) + 1e-9
    for i in range(10):
        assert agrees(x[changed[:, i], i])
        pair = torch.stack([z[changed[:, i], i], x[changed[:, i], i]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(float(counts[i]))
    # And each set of two equally often: C(8, k - 2) of the C(10, k) sets hold both.
    share = k * (k - 1) / 90
    for i, j in itertools.combinations(range(10), 2):
        both = float((changed[:, i] & changed[:, j]).sum())
        assert abs(both - N * share) <= 5 * math.sqrt(N * share * (1 - share)) + 1e-9


def test_factors_that_a_scene_holds_never_change() -> None:
    held = Factors(dataclasses.replace(f, frozen=0.5) if f.column in (1, 7) else f for f in FACTORS)
    z = points(BOX, N)
    changed = conditional("change(k=2)", BOX, held).around(z, generator=seeded()) != z
    assert (changed.sum(1) == 2).all()
    counts = changed.sum(0).double()
    assert counts[[1, 7]].tolist() == [0, 0]
    assert (counts[[0, 2, 3, 4, 5, 6, 8, 9]] - N / 4).abs().max() < 5 * math.sqrt(N * 3 / 16)
    every = conditional("change(k=8)", BOX, held).around(z, generator=seeded()) != z
    assert every.sum(1).eq(8).all()
    with pytest.raises(SpecError, match="change of k = 9 factors: expected 1 to 8"):
        conditional("change(k=9)", BOX, held)


@pytest.mark.parametrize("law", [Share(Box(2, -1, 3), [1]), Change(Box(2, -1, 3), 1)], ids=repr)
def test_what_is_drawn_anew_fills_a_box_of_any_bounds_but_has_no_density(law: Distribution) -> None:
    z = points(law.space, N, F64)
    x = law.around(z, generator=seeded())
    assert agrees((x[x != z] + 1) / 4)
    with pytest.raises(SpecError, match=re.escape(f"{law.text} over Box(2, -1.0, 3.0): its density has no closed")):
        law.log_prob(x, z)


def test_a_joint_law_is_its_parts_side_by_side() -> None:
    parts = (Uniform(Box(3)), Laplace(Box(2, -1, 1), 0.2), VonMisesFisher(Sphere(3), 4), Normal(Real(1), 2))
    law = Joint(*parts)
    assert law.text == "joint(uniform(), laplace(scale=0.2), vmf(kappa=4), normal(scale=2))"
    assert repr(law.space) == "Product(Box(3), Box(2, -1.0, 1.0), Sphere(3), Real(1))"
    assert law.loc == (0.5, 0.5, 0.5, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    z = points(law.space, N, F64)
    x = law.around(z, generator=seeded())
    pieces = list(zip(parts, law.space.split(x), law.space.split(z), strict=True))
    expected = sum((part.log_prob(y, c) for part, y, c in pieces), torch.zeros(N, dtype=F64))
    torch.testing.assert_close(law.log_prob(x, z), expected)
    alone = sum((part.log_prob(y) for part, y, _ in pieces), torch.zeros(N, dtype=F64))
    torch.testing.assert_close(law.log_prob(x), alone)
    generator = seeded()
    assert torch.equal(x, torch.cat([part.around(c, generator=generator) for part, _, c in pieces], dim=-1))
    x[0, 0], x[1, 4] = 1.5, -1.5
    assert (law.log_prob(x, z)[:2] == -math.inf).all()
    for none in ((), (3,), (Uniform(Box(1)), Box(1))):
        with pytest.raises(SpecError, match=re.escape(f"Joint of {none!r}: expected at least one law")):
            Joint(*none)
    with pytest.raises(SpecError, match=r"share\(0\) over Box\(2\): its density has no closed form"):
        Joint(Uniform(Box(1)), Share(Box(2), [0])).log_prob(torch.zeros(1, 3))


def test_a_joint_law_shares_the_columns_that_its_parts_share() -> None:
    law = Joint(Uniform(Box(2)), Share(Box(3), [0]), Change(Box(2), 1), Joint(Share(Box(3), [2, 1])))
    assert law.shared == (2, 9, 8)
    z = points(law.space, 100)
    same = (law.around(z, generator=seeded()) == z).double().mean(0)
    assert (same == 1).nonzero().flatten().tolist() == [2, 8, 9]


@pytest.mark.parametrize(("text", "space"), TEXTS, ids=str)
def test_a_text_makes_the_law_that_has_this_text(text: str, space: Space) -> None:
    law = conditional(text, space, FACTORS)
    assert law.text == text
    assert law.space is space
    again = conditional(law.text, space, FACTORS)
    z = points(space, 100)
    assert torch.equal(again.around(z, generator=seeded()), law.around(z, generator=seeded()))
    assert conditional(law, space) is law


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("  laplace (\n scale =0.05 )\t", "laplace(scale=0.05)"),
        ("laplace(0.05)", "laplace(scale=0.05)"),
        ("laplace(scale=[.05,.05,.05])", "laplace(scale=0.05)"),
        ("laplace(scale=[1,2.0,.5])", "laplace(scale=(1, 2, 0.5))"),
        ("gennorm(beta=3,scale=1)", "gennorm(scale=1, beta=3)"),
        ("gennorm(scale=1)", "gennorm(scale=1, beta=3)"),
        ("uniform( )", "uniform()"),
        ("share( object_z,'object_x' )", "share(object_z, object_x)"),
        ("share(2, object_x)", "share(object_z, object_x)"),
        ("change(k = 2)", "change(k=2)"),
        ("change(2)", "change(k=2)"),
    ],
)
def test_a_law_can_be_written_in_several_ways(written: str, text: str) -> None:
    assert conditional(written, Box(3), FACTORS.select(["object_x", "object_y", "object_z"])).text == text


def test_factors_are_found_by_their_place_in_the_table_given() -> None:
    few = FACTORS.select(["ground_hue", "object_x", "object_y"])
    assert conditional("share(object_x)", Box(3), few).shared == (1,)
    assert conditional("share(0, 2)", Box(3)).text == "share(0, 2)"
    assert (columns_of(["object_y", 0], few), columns_of([], few)) == ((2, 0), ())
    with pytest.raises(SpecError, match=r"factors='object_x': expected a list of names, e\.g\. \['object_x'\]"):
        columns_of("object_x", few)
    with pytest.raises(SpecError, match="unknown factor 'object_hue'; expected one of ground_hue, object_x"):
        conditional("share(object_hue)", Box(3), few)
    with pytest.raises(SpecError, match="'object_x' given for an array, whose columns have no names"):
        conditional("share(object_x)", BOX)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gauss(scale=0.1)", "unknown law 'gauss'; expected one of normal(scale=0.05)"),
        ("normal", "not of the form name(parameter=value)"),
        ("", "invalid syntax"),
        ("normal(scale=0.05", "was never closed"),
        ("normal(scale=0.05); uniform()", "invalid syntax"),
        ("normal()", "missing 1 required positional argument: 'scale'"),
        ("change()", "missing 1 required positional argument: 'k'"),
        ("normal(scale=0.05, beta=3)", "unexpected keyword argument 'beta'"),
        ("uniform(3)", "positional arguments"),
        ("uniform(space=3)", "multiple values for argument 'space'"),
        ("normal(scale=0)", "scale = 0: expected numbers above 0"),
        ("normal(scale=nan)", "scale = 'nan': expected a number"),
        ("normal(scale='1234567891')", "scale = '1234567891': expected a number"),
        ("normal(scale=b'1234567891')", "scale = b'1234567891': expected a number"),
        ("normal(scale=True)", "scale = True: expected a number"),
        ("normal(scale=1" + "0" * 400 + ")", "000: expected a number"),
        ("normal(scale=0.1, scale=0.2)", "a parameter is given twice"),
        ("uniform(**{'a': 1})", "unexpected keyword argument '**'"),
        ("gennorm(scale=0.1, beta='3')", "beta = '3': expected a number"),
        ("normal(scale=1e999)", "scale = inf: expected finite numbers"),
        ("normal(scale=1e12)", "all of its mass lies outside the box"),
        ("normal(scale=(0.1, 0.2))", "scale has 2 values; expected one, or 10"),
        ("gennorm(scale=1, beta=0)", "beta = 0: expected 0.2 to 100"),
        ("vmf(kappa=10)", "vmf over Box(10): expected a Sphere"),
        ("share()", "share of no factor"),
        ("share(object_x, 0)", "share of columns [0, 0]: one is named twice"),
        (f"share({', '.join(FACTORS.names)})", "share of all 10 factors"),
        ("share(10)", "share of columns [10]: expected whole numbers from 0 to 9"),
        ("share(-1)", "share of columns [-1]: expected whole numbers from 0 to 9"),
        ("share(-99)", "share of columns [-99]: expected whole numbers from 0 to 9"),
        ("share(True)", "share: True is neither a name nor a column's number"),
        ("share(1.5)", "share: 1.5 is neither a name nor a column's number"),
        ("share(1e999)", "share: inf is neither a name nor a column's number"),
        ("change(k=0)", "change of k = 0 factors: expected 1 to 10"),
        ("change(k=11)", "change of k = 11 factors: expected 1 to 10"),
        ("change(k=True)", "change of k = True factors: expected 1 to 10"),
        ("change(k=1.5)", "change of k = 1.5 factors: expected 1 to 10"),
        ("__import__('os')", "unknown law '__import__'"),
        ("__import__('os').system('true')", "not of the form name(parameter=value)"),
        ("normal(scale=__import__('os'))", "__import__('os') is not a number, a list of numbers or a name"),
        ("normal(*[0.1])", "*[0.1] is not a number, a list of numbers or a name"),
        ("normal(" + "(" * 490 + "1" + ")" * 490 + ")", "expected one of normal(scale=0.05)"),
        ("normal(\0)", "null bytes"),
    ],
    ids=lambda value: str(value)[:40].replace("\0", "0"),
)
def test_a_text_that_cannot_be_is_refused_and_quoted(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)) as refusal:
        conditional(text, BOX, FACTORS)
    assert str(refusal.value).startswith(f"conditional {text!r}: ")


@pytest.mark.parametrize(
    ("law", "space"),
    [
        ("normal(scale=0.1, loc=(0.25, 0.75))", Box(2)),
        (VonMisesFisher(Sphere(2), 1.0, (0.0, 1.0)), Sphere(2)),
        (Joint(Normal(Box(2), 0.1, (0.1, 0.1))), Product(Box(2))),
        (Joint(Uniform(Box(1)), Joint(Laplace(Real(1), 1, (0,)))), Product(Box(1), Product(Real(1)))),
    ],
    ids=str,
)
def test_a_conditional_has_no_centre_of_its_own(law: str | Distribution, space: Space) -> None:
    text = law if isinstance(law, str) else law.text
    with pytest.raises(SpecError, match=re.escape(f"conditional {text}: it is centred on each z; leave out loc")):
        conditional(law, space)


@pytest.mark.parametrize(
    ("text", "space", "words"),
    [
        ("uniform()", REAL, "uniform over Real(10)"),
        ("vmf(kappa=0)", SPHERE, "kappa = 0: expected 1e-06"),
        *((f"{law}(1)", space, f"{law} over {space!r}: ") for law in ("share", "change") for space in (SPHERE, REAL)),
    ],
)
def test_a_text_that_does_not_fit_its_space_is_refused(text: str, space: Space, words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        conditional(text, space, FACTORS)


@pytest.mark.parametrize(
    ("law", "space"),
    [
        (Normal(Box(3), 0.1), BOX),
        (Normal(Box(2, -1, 1), 0.1), Box(2)),
        (Joint(Uniform(Box(2))), Box(2)),
    ],
    ids=repr,
)
def test_a_made_law_over_another_space_is_refused(law: Distribution, space: Space) -> None:
    with pytest.raises(SpecError, match=re.escape(f"conditional {law!r}: the latents live in {space!r}")):
        conditional(law, space)


@pytest.mark.parametrize("law", [0.05, None, Normal])
def test_what_is_no_law_is_refused(law: Any) -> None:
    with pytest.raises(SpecError, match=re.escape(f"conditional {law!r}: expected one of")):
        conditional(law, BOX)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_law
def test_draws_on_a_gpu_stay_there_and_follow_the_same_law(law: Distribution) -> None:
    z = points(law.space, N)
    on_gpu = z.cuda()
    x = law.around(on_gpu, generator=torch.Generator("cuda").manual_seed(1))
    assert x.device == on_gpu.device
    assert x.dtype == z.dtype
    assert law.space.contains(x, 1e-6).all()
    assert torch.equal(law.around(on_gpu, generator=torch.Generator("cuda").manual_seed(1)), x)
    assert law.sample(3, generator=torch.Generator("cuda").manual_seed(1)).is_cuda
    # By coordinate, since the devices draw different numbers: the same law all the same.
    here = law.around(z, generator=seeded())
    for i in range(law.space.dim):
        assert stats.ks_2samp((x.cpu() - z)[:, i].numpy(), (here - z)[:, i].numpy()).pvalue > 1e-5
    if law.uniforms:
        z, u = z.double(), exact_uniforms(N, law.uniforms, generator=seeded())
        torch.testing.assert_close(law.from_uniforms(z.cuda(), u.cuda()).cpu(), law.from_uniforms(z, u))

"""Losses against a plain form that holds all scores, the laws that they obey, and what they refuse."""

from __future__ import annotations

import doctest
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ident3d.baselines import losses, negatives
from ident3d.baselines.losses import DotPart, LpPart, dot_infonce, lp_infonce, product_infonce
from ident3d.errors import SpecError

Temperature = float | Sequence[float] | Tensor
Parts = list[tuple[int, float | None, Temperature]]
"""Dimensions, p (None for the dot product) and temperature of each part."""

SCORES: dict[str, tuple[tuple[int, float | None], ...]] = {
    "p1": ((3, 1),),
    "p1.5": ((3, 1.5),),
    "p2": ((4, 2),),
    "p3": ((3, 3.0),),
    "p4": ((3, 4),),
    "dot": ((5, None),),
    "product": ((3, None), (2, 1)),
    "three": ((1, 2), (3, None), (2, 1.5)),
}
DISTANCES = ["p1", "p1.5", "p2", "p3", "p4"]
TEMPERATURES: dict[str, Callable[[int], Temperature]] = {
    "one": lambda dim: 1.0,
    "scalar": lambda dim: 0.3,
    "many": lambda dim: [0.5 + 0.3 * k for k in range(dim)],
    "learned": lambda dim: torch.tensor(0.7, dtype=torch.float64, requires_grad=True),
    "learned, many": lambda dim: torch.linspace(0.4, 1.2, dim, dtype=torch.float64).requires_grad_(),
}
FLAGS = [
    {"include_self": include_self, "positive_in_denominator": positive}
    for include_self, positive in itertools.product((True, False), repeat=2)
]
each_score = pytest.mark.parametrize("name", SCORES)
each_flags = pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "-".join(k for k, v in f.items() if v) or "neither")


@pytest.fixture(autouse=True)
def many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negatives, "TILE_CPU", 64 * 64)


def parts_of(name: str, tau: str = "one") -> Parts:
    return [(dim, p, TEMPERATURES[tau](dim)) for dim, p in SCORES[name]]


def pairs(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Anchors and positives, the same numbers in each precision, to what it holds."""
    dim, generator = sum(dim for dim, _ in SCORES[name]), torch.Generator().manual_seed(0)
    x, step = torch.randn(2, *shape, dim, dtype=torch.float64, generator=generator)
    return x.to(dtype), (x + 0.3 * step).to(dtype)


def ours(x: Tensor, y: Tensor, parts: Parts, **options: Any) -> Tensor:
    """By the function for such parts."""
    if len(parts) > 1:
        made = [DotPart(dim, tau) if p is None else LpPart(dim, p, tau) for dim, p, tau in parts]
        return product_infonce(x, y, parts=made, **options)
    _, p, tau = parts[0]
    return dot_infonce(x, y, tau=tau, **options) if p is None else lp_infonce(x, y, p=p, tau=tau, **options)


def score(x: Tensor, y: Tensor, parts: Parts) -> Tensor:
    total, start = x.new_zeros(()), 0
    for dim, p, tau in parts:
        a, b = x[..., start : start + dim], y[..., start : start + dim]
        total = total + ((a * b if p is None else -(a - b).abs().pow(p)) / torch.as_tensor(tau, dtype=x.dtype)).sum(-1)
        start += dim
    return total


def plain(
    x: Tensor, y: Tensor, parts: Parts, *, include_self: bool = True, positive_in_denominator: bool = True
) -> Tensor:
    """The formula as it stands, a value an item; holds (batch, batch, dim)."""
    positive, s = score(x, y, parts), score(x.unsqueeze(-2), x.unsqueeze(-3), parts)
    if not include_self:
        s = s.masked_fill(torch.eye(s.shape[-1], dtype=torch.bool), -math.inf)
    if positive_in_denominator:
        s = torch.cat([positive.unsqueeze(-1), s], -1)
    return torch.logsumexp(s, -1) - positive


def off_by(found: Tensor, expected: Tensor, least_unit: float = 0.0) -> float:
    """The greatest difference, in units of the greatest number expected."""
    assert found.shape == expected.shape
    unit = max(least_unit, float(expected.detach().abs().max())) or 1.0
    return float((found.detach() - expected.detach()).abs().max()) / unit


def assert_agrees(x: Tensor, y: Tensor, parts: Parts, flags: dict[str, bool], least_unit: float = 1.0) -> None:
    """In value and in all gradients, those of learned temperatures included, with float64 on the same numbers."""
    exact_parts: Parts = [
        (dim, p, tau.detach().clone().requires_grad_() if isinstance(tau, Tensor) else tau) for dim, p, tau in parts
    ]
    leaves, exact = (
        [v.requires_grad_() for v in both] + [tau for *_, tau in of if isinstance(tau, Tensor)]
        for both, of in (((x.clone(), y.clone()), parts), ((x.double(), y.double()), exact_parts))
    )
    found = ours(leaves[0], leaves[1], parts, reduction="none", **flags)
    expected = plain(exact[0], exact[1], exact_parts, **flags)
    upstream = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    value, gradient = (1e-5, 1e-4) if x.dtype == torch.float32 else (1e-12, 1e-10)
    assert found.dtype == x.dtype
    assert off_by(found, expected, least_unit) <= value
    gradients = torch.autograd.grad(found, leaves, upstream.to(x.dtype))
    for a, b in zip(gradients, torch.autograd.grad(expected, exact, upstream), strict=True):
        assert off_by(a, b) <= gradient


def test_the_plain_form_is_the_formula() -> None:
    x, y = pairs("product", 4)
    for flags in FLAGS:
        for i, found in enumerate(plain(x, y, [(3, None, 0.5), (2, 3.0, [2.0, 0.7])], **flags).tolist()):

            def s(a: Tensor, b: Tensor) -> float:
                product = sum(float(a[k]) * float(b[k]) / 0.5 for k in range(3))
                return product - sum(abs(float(a[k] - b[k])) ** 3 / tau for k, tau in ((3, 2.0), (4, 0.7)))

            own = math.exp(s(x[i], y[i]))
            total = sum(math.exp(s(x[i], x[j])) for j in range(4) if j != i or flags["include_self"])
            total += own if flags["positive_in_denominator"] else 0
            assert found == pytest.approx(-math.log(own / total), abs=1e-12)


def test_examples() -> None:
    results = doctest.testmod(losses)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", TEMPERATURES)
@each_flags
@each_score
def test_the_plain_form_agrees(name: str, flags: dict[str, bool], tau: str, dtype: torch.dtype) -> None:
    assert_agrees(*pairs(name, 151, dtype=dtype), parts_of(name, tau), flags)


@pytest.mark.parametrize("shape", [(2,), (1, 3), (3, 151)])
@each_flags
@each_score
def test_the_plain_form_agrees_with_other_shapes(name: str, flags: dict[str, bool], shape: tuple[int, ...]) -> None:
    x, y = pairs(name, *shape, dtype=torch.float32)
    assert_agrees(x / 2, y / 2, parts_of(name, "many"), flags)


@pytest.mark.parametrize("tau", ["one", "scalar"])
@pytest.mark.parametrize("name", DISTANCES)
def test_far_from_the_origin(name: str, tau: str) -> None:
    x, y = pairs(name, 151, dtype=torch.float32)
    assert_agrees(x + 1e3, y + 1e3, parts_of(name, tau), FLAGS[0])


@each_flags
@each_score
def test_far_apart(name: str, flags: dict[str, bool]) -> None:
    x, y = pairs(name, 151, dtype=torch.float32)
    assert_agrees(30 * x, 30 * y, parts_of(name), flags)


@pytest.mark.parametrize("tau", ["scalar", "learned, many"])
@each_flags
@each_score
def test_gradients_are_those_of_finite_differences(name: str, flags: dict[str, bool], tau: str) -> None:
    x, y = (v.requires_grad_() for v in pairs(name, 2, 4))
    parts = parts_of(name, tau)
    taus = [t.detach().double().requires_grad_() for *_, t in parts if isinstance(t, Tensor)]

    def run(x: Tensor, y: Tensor, *taus: Tensor) -> Tensor:
        given: Parts = [(dim, p, t) for (dim, p, _), t in zip(parts, taus, strict=True)] if taus else parts
        return ours(x, y, given, reduction="none", **flags)

    assert torch.autograd.gradcheck(run, (x, y, *taus))


def test_two_items_by_hand() -> None:
    x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [2.0]])

    def found(p: float, **flags: bool) -> list[float]:
        result: list[float] = lp_infonce(x, y, p=p, reduction="none", include_self=False, **flags).tolist()
        return result

    assert found(2) == pytest.approx([math.log1p(math.exp(-3)), math.log1p(math.exp(-4))])
    assert found(1) == pytest.approx([math.log1p(math.exp(-1)), math.log1p(math.exp(-2))])
    assert found(3, positive_in_denominator=False) == pytest.approx([-7, -8])
    assert dot_infonce(x, y, include_self=False).item() == pytest.approx((math.log(2) + math.log1p(math.exp(-4))) / 2)


@each_flags
@pytest.mark.parametrize("name", DISTANCES)
def test_equal_scores_leave_a_choice_among_all(name: str, flags: dict[str, bool]) -> None:
    x = pairs(name, 1)[0].expand(151, -1)
    among = 150 + sum(flags.values())
    assert ours(x, x, parts_of(name), **flags).item() == pytest.approx(math.log(among))


@each_score
def test_no_loss_is_below_zero_and_no_distance_below_log_2(name: str) -> None:
    x, y = pairs(name, 151)
    least = math.log(2) if name in DISTANCES else 0.0
    assert bool((ours(x, y, parts_of(name), reduction="none") >= least).all())
    if name in DISTANCES:  # reached where positives coincide and all else is far
        assert ours(1e6 * x, 1e6 * x, parts_of(name)).item() == pytest.approx(least)
        assert ours(1e6 * x, 1e6 * x, parts_of(name), include_self=False).item() == 0


@pytest.mark.parametrize("scale", [6, 8])
def test_small_losses_keep_their_digits(scale: float) -> None:
    x, y = pairs("p2", 20, dtype=torch.float32)
    assert lp_infonce(scale * x, scale * x + y, p=2, include_self=False) < 1e-3
    parts, flags = parts_of("p2"), {"include_self": False, "positive_in_denominator": True}
    assert_agrees(scale * x, scale * x + y, parts, flags, least_unit=0)


@each_flags
@each_score
def test_order_does_not_matter(name: str, flags: dict[str, bool]) -> None:
    x, y = pairs(name, 2, 151)
    order = torch.randperm(151, generator=torch.Generator().manual_seed(1))
    found = ours(x[:, order], y[:, order], parts_of(name), reduction="none", **flags)
    torch.testing.assert_close(found, ours(x, y, parts_of(name), reduction="none", **flags)[:, order])


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_do_not_see_where_the_origin_is(name: str) -> None:
    (x, y), by = pairs(name, 151), torch.arange(sum(dim for dim, _ in SCORES[name]))
    found = ours(x + by, y + by, parts_of(name, "many"), reduction="none")
    torch.testing.assert_close(found, ours(x, y, parts_of(name, "many"), reduction="none"))


@pytest.mark.parametrize("name", ["p2", "dot"])
def test_rotations_change_nothing(name: str) -> None:
    x, y = pairs(name, 151)
    turn, _ = torch.linalg.qr(pairs(name, x.shape[-1])[0])
    torch.testing.assert_close(ours(x @ turn, y @ turn, parts_of(name)), ours(x, y, parts_of(name)))


def test_on_a_sphere_the_dot_product_is_half_the_squared_distance() -> None:
    x, y = (torch.nn.functional.normalize(v, dim=-1) for v in pairs("dot", 151))
    for flags in FLAGS:
        distance = ours(x, y, [(5, 2, 0.4)], **flags)
        torch.testing.assert_close(ours(x, y, [(5, None, 0.2)], **flags), distance)


@each_flags
@each_score
def test_seeds_side_by_side_are_seeds_alone(name: str, flags: dict[str, bool]) -> None:
    x, y = pairs(name, 3, 151)
    found = ours(x, y, parts_of(name, "many"), **flags)
    assert found.shape == (3,)
    alone = [ours(a, b, parts_of(name, "many"), **flags) for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(found, torch.stack(alone))
    items = ours(x, y, parts_of(name, "many"), reduction="none", **flags)
    assert items.shape == (3, 151)
    torch.testing.assert_close(found, items.mean(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_score
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    x, y = (v.requires_grad_() for v in pairs(name, 151, dtype=dtype))
    loss = ours(x, y, parts_of(name, "scalar"))
    assert loss.dtype == torch.float32
    wide = [v.detach().float().requires_grad_() for v in (x, y)]
    expected = ours(wide[0], wide[1], parts_of(name, "scalar"))
    assert torch.equal(loss, expected)
    gradients, wanted = torch.autograd.grad(loss, (x, y)), torch.autograd.grad(expected, wide)
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("backward_inside", [False, True])
@each_score
def test_autocast_changes_nothing(name: str, backward_inside: bool) -> None:
    x, y = (v.requires_grad_() for v in pairs(name, 151, dtype=torch.float32))
    expected = ours(x, y, parts_of(name))
    (wanted,) = torch.autograd.grad(expected, x, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(x, y, parts_of(name))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward_inside):
            (grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(loss, expected)
    assert torch.equal(grad, wanted)


@each_score
def test_without_gradients_values_are_the_same(name: str) -> None:
    x, y = (v.requires_grad_() for v in pairs(name, 151))
    with torch.no_grad():
        loss = ours(x, y, parts_of(name))
    assert not loss.requires_grad
    assert torch.equal(loss, ours(x, y, parts_of(name)))


@pytest.mark.parametrize("positive_in_denominator", [True, False])
@pytest.mark.parametrize("name", ["p2", "dot"])
def test_a_second_derivative_is_refused(name: str, positive_in_denominator: bool) -> None:
    x, y = pairs(name, 8)
    loss = ours(x.requires_grad_(), y, parts_of(name), positive_in_denominator=positive_in_denominator)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|twice"):
        (grad.square().sum() + x.sum()).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ["p2", "dot", "product"])
def test_in_the_positives_alone_there_is_a_second_derivative(name: str) -> None:
    x, y = pairs(name, 5)
    if name == "product":  # |x - y| has none
        y[:, 3:] = x[:, 3:] + 1
    assert torch.autograd.gradgradcheck(lambda y: ours(x, y, parts_of(name)), y.requires_grad_())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        *(({"p": p}, f"p = {p}: expected a finite number of at least 1") for p in (0.99, 0, -1, math.nan, math.inf)),
        *(({"p": p}, "expected a finite number of at least 1") for p in (True, None, "2")),
        *(({"tau": tau}, "expected finite numbers above 0") for tau in (0, -0.1)),
        *(({"tau": tau}, "tau = .*expected") for tau in (math.nan, math.inf, True, "ab")),
        *(({"tau": tau}, "expected finite numbers above 0") for tau in ([1.0, 0.0], torch.tensor([1.0, -1.0]))),
        ({"tau": [1.0] * 3}, "tau has 3 values; expected one, or 2"),
        ({"tau": torch.ones(3)}, r"tau of shape \(3,\): expected one number, or 2"),
        ({"tau": []}, "tau has 0 values"),
        *(({"tau": tau}, "tau") for tau in (None, {0.5: 1}, torch.ones(4, 2))),
        ({"reduction": "sum"}, "reduction = 'sum'"),
        ({"x": torch.ones(1, 2)}, "a batch of 1: expected at least 2"),
        ({"x": torch.ones(3, 1, 2)}, "a batch of 1: expected at least 2"),
        ({"x": torch.ones(0, 2)}, "a batch of 0: expected at least 2"),
        *(({"x": torch.ones(shape)}, r"expected .*\(batch, dim\)") for shape in ((2,), (1, 1, 4, 2))),
        ({"x": torch.ones(0, 4, 2)}, "at least one run"),
        *(({"y": torch.ones(shape)}, r"anchors of shape \(4, 2\)") for shape in ((4, 3), (3, 2), (1, 4, 2))),
        ({"x": torch.ones(4, 2, dtype=torch.int64)}, "floating-point"),
        ({"x": torch.ones(4, 2, dtype=torch.complex64)}, "floating-point"),
        ({"y": torch.ones(4, 2, dtype=torch.float64)}, "anchors of torch.float32, positives of torch.float64"),
        ({"x": torch.ones(4, 0)}, "a part of 0 dimensions"),
        ({"gather": True}, "expected torch.distributed to be initialised"),
    ],
)
def test_bad_input_is_refused(wrong: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"x": torch.ones(4, 2), "p": 1, **wrong}
    x = given.pop("x")
    y = given.pop("y", x)
    with pytest.raises(SpecError, match=text):
        lp_infonce(x, y, **given)
    if "p" not in wrong:
        with pytest.raises(SpecError, match=text):
            dot_infonce(x, y, **{name: value for name, value in given.items() if name != "p"})


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([], "expected at least one LpPart or DotPart"),
        (None, "expected at least one LpPart or DotPart"),
        ([DotPart(2), 2], "expected at least one LpPart or DotPart"),
        ([DotPart(2)], "parts of 2 dimensions in all, representations of 5"),
        ([DotPart(2), LpPart(4, 1)], "parts of 6 dimensions in all, representations of 5"),
    ],
)
def test_bad_parts_are_refused(parts: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        product_infonce(torch.ones(4, 5), torch.ones(4, 5), parts=parts)


@pytest.mark.parametrize("dim", [0, -1, 2.0, True, None])
def test_a_part_has_dimensions(dim: Any) -> None:
    for make in (lambda: DotPart(dim), lambda: LpPart(dim, 2)):
        with pytest.raises(SpecError, match=f"a part of {dim} dimensions"):
            make()

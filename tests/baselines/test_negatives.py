"""The tiled log-sum-exp of scores against a plain form that holds them all, far out as well, and its memory.

Run as a script with the name of a case, it prints the bytes that the case needs above its inputs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ident3d.baselines import negatives
from ident3d.baselines.negatives import log_sum_exp_scores
from ident3d.baselines.terms import Term

MEASURED_BATCH = 4096
"""Where a matrix of scores would take 67 MB, and a tensor of differences 671 MB."""
LEAST_TILE = 64 * 64
SCORES: dict[str, tuple[tuple[int, float | None], ...]] = {
    "p1": ((3, 1.0),),
    "p1.5": ((3, 1.5),),
    "p2": ((4, 2.0),),
    "p3": ((3, 3.0),),
    "p4": ((3, 4.0),),
    "dot": ((5, None),),
    "product": ((3, None), (2, 1.0)),
    "three": ((1, 2.0), (3, None), (1, 1.5)),
}
DISTANCES = [name for name in SCORES if name.startswith("p") and name != "product"]
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-12, 1e-10)}
"""Of values and of gradients."""


@pytest.fixture
def many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negatives, "TILE_CPU", LEAST_TILE)


def terms_of(name: str) -> tuple[Term, ...]:
    stops = [sum(dim for dim, _ in SCORES[name][: i + 1]) for i in range(len(SCORES[name]))]
    return tuple(Term(stop - dim, stop, p) for stop, (dim, p) in zip(stops, SCORES[name], strict=True))


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """The same points in each precision, to what it holds."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def points(name: str, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return normal(*shape, terms_of(name)[-1].stop, dtype=dtype, seed=seed)


def plain_scores(x: Tensor, y: Tensor, terms: tuple[Term, ...]) -> Tensor:
    s = x.new_zeros(x.shape[0], x.shape[1], y.shape[1])
    for term in terms:
        a, b = x[:, :, None, term.start : term.stop], y[:, None, :, term.start : term.stop]
        s = s + ((a * b).sum(-1) if term.p is None else -(a - b).abs().pow(term.p).sum(-1))
    return s


def plain(x: Tensor, y: Tensor, terms: tuple[Term, ...], skip: int | None) -> Tensor:
    """All scores at once."""
    s = plain_scores(x, y, terms)
    if skip is not None:
        left_out = torch.ones(s.shape[1:], dtype=torch.bool).tril(skip).triu(skip)
        s = s.masked_fill(left_out, -math.inf)
    return torch.logsumexp(s, -1)


def off_by(found: Tensor, expected: Tensor) -> float:
    """The greatest difference, in units of the greatest number expected where that is above 1."""
    assert found.shape == expected.shape
    unit = max(1.0, float(expected.detach().abs().max()))
    return float((found.detach() - expected.detach()).abs().max()) / unit


def differences(x: Tensor, y: Tensor | None, terms: tuple[Term, ...], skip: int | None) -> list[float]:
    """Of the value and each gradient, from the plain form in float64 on the same numbers."""
    given = [v.detach().clone().requires_grad_() for v in (x, y) if v is not None]
    exact = [v.detach().double().requires_grad_() for v in given]
    lse = log_sum_exp_scores(given[0], given[1] if len(given) == 2 else None, terms, skip)
    expected = plain(exact[0], exact[-1], terms, skip)
    upstream = normal(*lse.shape, dtype=x.dtype, seed=5)
    lse.backward(upstream)  # type: ignore[no-untyped-call]
    expected.backward(upstream.double())  # type: ignore[no-untyped-call]
    assert lse.dtype == x.dtype
    found = [off_by(lse, expected)]
    for a, b in zip(given, exact, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype == x.dtype
        found.append(off_by(a.grad, b.grad))
    return found


def assert_agrees(
    x: Tensor,
    terms: tuple[Term, ...],
    y: Tensor | None = None,
    skip: int | None = None,
    tolerance: tuple[float, float] | None = None,
) -> None:
    value, gradient = tolerance or TOLERANCE[x.dtype]
    found = differences(x, y, terms, skip)
    assert found[0] <= value, found
    assert all(off <= gradient for off in found[1:]), found


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("skip", [None, 0])
@pytest.mark.parametrize("name", SCORES)
def test_anchors_against_themselves(name: str, skip: int | None, seeds: int, dtype: torch.dtype) -> None:
    x = points(name, seeds, 151, dtype=dtype)
    assert len(list(negatives._Scores(x, x, terms_of(name)).tiles())) == 6
    assert_agrees(x, terms_of(name), skip=skip)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "skip"), [(151, 90, None), (90, 270, 90), (70, 140, 70), (40, 50, 3)])
@pytest.mark.parametrize("name", SCORES)
def test_anchors_against_others(name: str, rows: int, columns: int, skip: int | None, dtype: torch.dtype) -> None:
    x, y = points(name, 2, rows, dtype=dtype), points(name, 2, columns, dtype=dtype, seed=1)
    assert_agrees(x, terms_of(name), y, skip)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("skip", [-200, -64, -1, 1, 63, 64, 200])
def test_a_skip_is_found_in_whatever_tile(skip: int) -> None:
    assert_agrees(points("p1", 1, 140), terms_of("p1"), points("p1", 1, 150, seed=1), skip)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 767, 768, 769])
def test_batches_about_the_size_of_a_tile(count: int) -> None:
    assert_agrees(points("p2", 1, count, dtype=torch.float32), terms_of("p2"))
    if count > 1:
        assert_agrees(points("dot", 1, count, dtype=torch.float32), terms_of("dot"), skip=0)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [None, 0])
@pytest.mark.parametrize("scale", [30.0, 1e2, 1e3])
@pytest.mark.parametrize("name", DISTANCES)
def test_far_apart_where_sums_vanish(name: str, scale: float, skip: int | None, dtype: torch.dtype) -> None:
    x = scale * points(name, 1, 151, dtype=dtype)
    assert_agrees(x, terms_of(name), skip=skip)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("scale", [3.0, 10.0, 20.0])
@pytest.mark.parametrize("name", DISTANCES)
def test_a_small_gradient_keeps_its_digits_beside_self(name: str, scale: float) -> None:
    x = (scale * points(name, 1, 151, dtype=torch.float32)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(log_sum_exp_scores(x, None, terms_of(name)).sum(), x)
    (expected,) = torch.autograd.grad(plain(exact, exact, terms_of(name), None).sum(), exact)
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [None, 0])
@pytest.mark.parametrize("name", ["dot", "product", "three"])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_products_in_the_hundreds_do_not_overflow(
    name: str, skip: int | None, spread: float, dtype: torch.dtype
) -> None:
    x = points(name, 2, 151)
    x = (20.0 * torch.nn.functional.normalize(x, dim=-1) * spread ** normal(2, 151, 1).tanh()).to(dtype)
    assert float(plain_scores(x.double(), x.double(), terms_of(name)).max()) > 300
    assert_agrees(x, terms_of(name), skip=skip)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [None, 0])
@pytest.mark.parametrize("name", ["p1", "p2", "p3", "dot", "product"])
def test_one_point_far_from_the_others(name: str, skip: int | None, dtype: torch.dtype) -> None:
    x = points(name, 2, 151, dtype=dtype)
    x[1, 70] *= 40 / x[1, 70].norm()
    assert_agrees(x, terms_of(name), skip=skip)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1e2, 1e3])
@pytest.mark.parametrize("name", DISTANCES)
def test_far_from_the_origin(name: str, offset: float, dtype: torch.dtype) -> None:
    x = points(name, 2, 151, dtype=dtype) + offset
    y = points(name, 2, 151, dtype=dtype, seed=1) + offset
    tolerance = (1e-5, 1e-4 if dtype == torch.float32 else 1e-10)
    assert_agrees(x, terms_of(name), skip=0, tolerance=tolerance)
    assert_agrees(x, terms_of(name), y, tolerance=tolerance)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("name", DISTANCES)
def test_two_clusters_far_apart(name: str) -> None:
    x = points(name, 1, 151, dtype=torch.float32)
    x[:, ::2] += 1e2
    assert_agrees(x, terms_of(name))


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [None, 0])
@pytest.mark.parametrize("name", SCORES)
def test_points_that_coincide(name: str, skip: int | None, dtype: torch.dtype) -> None:
    half = points(name, 1, 75, dtype=dtype)
    assert_agrees(torch.cat([half, half, half[:, :1]], 1), terms_of(name), skip=skip)


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("skip", [None, 0])
@pytest.mark.parametrize("name", DISTANCES)
def test_all_points_one_have_no_gradient(name: str, skip: int | None) -> None:
    x = points(name, 1, 1).expand(1, 151, -1).clone().requires_grad_()
    lse = log_sum_exp_scores(x, None, terms_of(name), skip)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(151 if skip is None else 150)))
    (grad,) = torch.autograd.grad(lse.sum(), x)
    assert float(grad.abs().max()) < 1e-15


@pytest.mark.usefixtures("many_tiles")
@pytest.mark.parametrize("skip", [None, 0])
@pytest.mark.parametrize("name", SCORES)
def test_the_fast_and_the_careful_way_agree(name: str, skip: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, terms = points(name, 2, 151).requires_grad_(), terms_of(name)
    upstream = normal(2, 151, seed=5)
    ways = []
    for least in (0.0, math.inf):
        monkeypatch.setattr(negatives, "LEAST_SUM", least)
        lse = log_sum_exp_scores(x, None, terms, skip)
        assert lse.grad_fn is not None
        assert lse.grad_fn.sound == (least == 0)  # type: ignore[attr-defined]
        ways.append((lse, *torch.autograd.grad(lse, x, upstream)))
    for fast, careful in zip(*ways, strict=True):
        assert off_by(fast, careful) < 1e-12


@pytest.mark.parametrize("distance", [8.0, 8.2, 8.3, 8.4, 9.3, 9.4, 10.0])
def test_sums_just_above_and_below_the_least(distance: float) -> None:
    # exp(-8.3^2) is about LEAST_SUM; exp(-9.35^2), the least normal number of float32.
    x = torch.tensor([[[0.0], [distance], [2 * distance + 0.01]]])
    assert_agrees(x, (Term(0, 1, 2.0),), skip=0)


@pytest.mark.parametrize("skip", [None, 0])
def test_nan_is_handed_on(skip: int | None) -> None:
    x = points("p2", 2, 10)
    x[1, 3, 0] = math.nan
    lse = log_sum_exp_scores(x, None, terms_of("p2"), skip)
    assert bool(lse[0].isfinite().all())
    assert bool(lse[1, 3].isnan())


@pytest.mark.parametrize("least", [0.0, math.inf])
@pytest.mark.parametrize("skip", [None, 0])
@pytest.mark.parametrize("name", SCORES)
def test_gradients_are_those_of_finite_differences(
    name: str, skip: int | None, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(negatives, "LEAST_SUM", least)
    x, y, terms = points(name, 2, 5).requires_grad_(), points(name, 2, 4, seed=1).requires_grad_(), terms_of(name)
    assert torch.autograd.gradcheck(lambda x: log_sum_exp_scores(x, None, terms, skip), (x,))
    assert torch.autograd.gradcheck(lambda x, y: log_sum_exp_scores(x, y, terms, skip), (x, y))


@pytest.mark.parametrize("upstream_varies", [True, False])
@pytest.mark.parametrize("count", [None, 4])
def test_a_second_derivative_is_refused(count: int | None, upstream_varies: bool) -> None:
    x, terms = points("p2", 1, 5).requires_grad_(), terms_of("p2")
    lse = log_sum_exp_scores(x, None if count is None else points("p2", 1, count, seed=1), terms)
    (grad,) = torch.autograd.grad((lse.square() if upstream_varies else lse).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|twice"):
        (grad.sum() + x.sum()).backward()  # type: ignore[no-untyped-call]


def test_a_layout_changes_nothing() -> None:
    x, terms = points("product", 2, 30), terms_of("product")
    expected = log_sum_exp_scores(x, None, terms)
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not turned.is_contiguous()
    assert torch.equal(log_sum_exp_scores(turned, None, terms), expected)


def test_sides_of_tiles_are_even() -> None:
    assert [negatives._even(n, 64) for n in (0, 1, 64, 65, 151, 6144)] == [1, 1, 64, 33, 51, 64]


def run_case(name: str, batch: int) -> None:
    x = torch.rand(1, batch, 10, generator=torch.Generator().manual_seed(0))
    cases: dict[str, Callable[[], Tensor]] = {
        "p1": lambda: log_sum_exp_scores(x.requires_grad_(), None, (Term(0, 10, 1.0),)),
        "product, skip": lambda: log_sum_exp_scores(
            x.requires_grad_(), None, (Term(0, 5, None), Term(5, 10, 2.0)), skip=0
        ),
        "far apart": lambda: log_sum_exp_scores((100 * x).requires_grad_(), None, (Term(0, 10, 3.0),), skip=0),
        "others": lambda: log_sum_exp_scores(x.requires_grad_(), x.detach().clone(), (Term(0, 10, 3.0),), skip=0),
        "matrix": lambda: (x[0, :, :1] * x[0, :, 0]).requires_grad_(),
    }
    cases[name]().sum().backward()  # type: ignore[no-untyped-call]


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def main() -> None:
    torch.set_num_threads(1)
    above = {}
    for name in ("matrix", "p1", "product, skip", "far apart", "others"):
        run_case(name, 64)  # what is made once: threads, kernels
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        run_case(name, MEASURED_BATCH)
        above[name] = resident("VmHWM") - before
    print(json.dumps(above))


def test_memory_stays_far_below_a_matrix_of_scores() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as problem:
        pytest.skip(f"peaks of memory cannot be measured here: {problem}")
    done = subprocess.run([sys.executable, "-W", "error", __file__], stdout=subprocess.PIPE, text=True, check=True)
    above = json.loads(done.stdout)
    matrix = 4 * MEASURED_BATCH**2
    assert above.pop("matrix") > 0.9 * matrix  # or nothing is being measured
    assert all(used < 0.5 * matrix for used in above.values()), above


if __name__ == "__main__":
    main()

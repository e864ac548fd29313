"""What all scores take alike, and what they refuse."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch
from score_cases import Array, N, factors_of, noise, noisy, refused, rotation

from ident3d.factors import FACTORS, Categorical, Factors, FactorTable
from ident3d.metrics import dci, mcc, r2

SCORES: list[Callable[..., Any]] = [r2, mcc, dci]
score_of_each = pytest.mark.parametrize("score", SCORES, ids=lambda score: score.__name__)


@score_of_each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_score_as_arrays(score: Callable[..., Any], dtype: torch.dtype) -> None:
    codes, z = (torch.from_numpy(x).to(dtype).requires_grad_() for x in noisy(n=200))
    expected = score(codes.detach().double().numpy(), z.detach().double().numpy())
    assert score(codes, z) == expected
    assert score(codes, z.detach().double().numpy()) == expected


@score_of_each
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.float16, np.float32, np.longdouble])
def test_any_real_dtype_scores_as_float64(score: Callable[..., Any], dtype: Any) -> None:
    codes, z = (np.clip(100 * x + 20, 0, 120).astype(dtype) for x in noisy(n=200))
    assert score(codes, z) == score(codes.astype(np.float64), z.astype(np.float64))
    if dtype is np.int8:
        assert score(torch.from_numpy(codes), torch.from_numpy(z)) == score(codes, z)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_gpu_score_as_arrays() -> None:
    codes, z = noisy()
    assert r2(torch.from_numpy(codes).cuda(), torch.from_numpy(z).cuda()) == r2(codes, z)


@pytest.mark.parametrize("score", [r2, mcc])
def test_a_single_column_needs_no_second_axis(score: Callable[..., Any]) -> None:
    codes, z = noisy(dim=1)
    assert score(codes[:, 0], z[:, 0]) == score(codes, z)


@score_of_each
def test_no_memory_order_or_input_is_touched(score: Callable[..., Any]) -> None:
    codes, z = noisy(n=200)
    before = codes.copy(), z.copy()
    assert score(np.asfortranarray(codes), z[::1]) == score(codes, z)
    np.testing.assert_array_equal((codes, z), before)


@score_of_each
def test_names_come_with_the_result_which_is_frozen_and_plain(score: Callable[..., Any]) -> None:
    codes, z = noisy(n=200)
    chosen = FACTORS.select(["object_x", "object_hue", "ground_hue"])
    result = score(codes, z, names=chosen)
    assert result == score(codes, z, names=list(chosen.names))
    assert result.names == chosen.names
    assert score(codes, z).names == ("0", "1", "2")
    with pytest.raises(FrozenInstanceError):
        result.names = ()
    plain = result.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["names"] == list(chosen.names)


def table(n: int = N) -> FactorTable:
    latents = np.random.default_rng(5).random((n, 10), np.float32)
    kinds = (Categorical("class", ("teapot", "hare")),)
    return FactorTable(FACTORS, latents, kinds, np.zeros((n, 1), np.int64))


@score_of_each
def test_a_table_of_factors_scores_as_its_latents(score: Callable[..., Any]) -> None:
    made = table(200)
    codes = made.latents[:, [7, 0]] @ rotation(20)
    assert score(codes, made, names=["object_hue", "object_x"]) == score(
        codes, made.latents[:, [7, 0]], names=["object_hue", "object_x"]
    )
    with refused("factor class is categorical: its numbers have no order"):
        score(codes, made)
    with refused("factor class is categorical"):
        score(codes, made, names=["object_hue", "class"])
    with refused("unknown factor 'hue'; expected one of object_x, object_y"):
        score(codes, made, names=["hue"])
    plain = FactorTable(FACTORS.select(["object_hue", "object_x"]), made.latents[:, [7, 0]])
    assert score(codes, plain).names == ("object_hue", "object_x")


@score_of_each
def test_categorical_and_periodic_factors_are_refused_by_name(score: Callable[..., Any]) -> None:
    codes, z = noisy(dim=2)
    hue = replace(FACTORS.get("object_hue"), periodic=True)
    with refused(
        "factor object_hue is periodic: its two ends are the same, which no score here knows; pass cos and sin"
    ):
        score(codes, z, names=Factors([FACTORS[0], hue]))
    with refused("factor object_hue is periodic"):
        score(codes, FactorTable(Factors([FACTORS[0], hue]), z.astype(np.float32)))
    with refused("factor class is categorical: its numbers have no order, which every score here asks for; leave it"):
        score(codes, z, names=["object_x", Categorical("class", ("teapot", "hare"))])


ROWS = 60


def changed(row: int, column: int, value: float) -> Array:
    z = factors_of(n=ROWS)
    z[row, column] = value
    return z


MASKED: Any = np.ma.masked_less(noise(0, ROWS), 0)  # type: ignore[no-untyped-call]
REFUSALS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("60 rows of codes, 59 of factors; expected one row a sample", noise(0, ROWS), factors_of(n=ROWS - 1), {}),
    ("codes of shape (60, 3, 1): expected (n,) or (n, codes)", noise(0, ROWS)[..., None], factors_of(n=ROWS), {}),
    ("codes of shape (): expected (n,)", 3.0, factors_of(n=ROWS), {}),
    ("factors of shape (60, 0): expected (n,) or (n, factors)", noise(0, ROWS), np.zeros((ROWS, 0)), {}),
    (
        "codes: 1 of 180 values are not finite, the first nan at row 7, column 2",
        changed(7, 2, np.nan),
        noise(0, 60),
        {},
    ),
    ("factors: 1 of 180 values are not finite, the first inf at row 7", noise(0, ROWS), changed(7, 2, np.inf), {}),
    ("(factor hue)", noise(0, ROWS), changed(0, 1, -np.inf), {"names": ["x", "hue", "y"]}),
    ("codes of dtype complex128: expected an array or tensor of floats", noise(0, ROWS) * 1j, factors_of(n=ROWS), {}),
    ("codes of dtype object: expected", noise(0, ROWS).astype(object), factors_of(n=ROWS), {}),
    ("codes of dtype <U4: expected", np.full((ROWS, 3), "blue"), factors_of(n=ROWS), {}),
    ("codes of dtype bool: expected", noise(0, ROWS) > 0, factors_of(n=ROWS), {}),
    ("codes of torch.bool: expected", torch.ones(ROWS, 3) > 0, factors_of(n=ROWS), {}),
    ("codes of torch.complex64: expected", torch.ones(ROWS, 3) * 1j, factors_of(n=ROWS), {}),
    ("codes: expected an array or tensor of floats or whole numbers (", [[1.0], [1.0, 2.0]], factors_of(n=ROWS), {}),
    ("codes: some values are masked", MASKED, factors_of(n=ROWS), {}),
    ("9 rows: expected at least ", noise(0, 9), factors_of(n=9), {}),
    ("0 rows: expected at least ", noise(0, 0), factors_of(n=0), {}),
    ("names has 2 entries for 3 columns of factors: a, b", noise(0, ROWS), factors_of(n=ROWS), {"names": ["a", "b"]}),
    ("names = 'abc': expected a list of names", noise(0, ROWS), factors_of(n=ROWS), {"names": "abc"}),
    ("names = 'object_x': expected a list", noise(0, ROWS), table(ROWS), {"names": "object_x"}),
    ("names = 5: expected a list of names", noise(0, ROWS), factors_of(n=ROWS), {"names": 5}),
    ("names holds 5: expected names", noise(0, ROWS), factors_of(n=ROWS), {"names": ["a", "b", 5]}),
    ("expected at least one, and none twice", noise(0, ROWS), factors_of(n=ROWS), {"names": ["a", "b", "a"]}),
    ("a factor is called 'mean'", noise(0, ROWS), factors_of(n=ROWS), {"names": ["a", "b", "mean"]}),
    ("holds no values; pass the latents as factors, and this as names", noise(0, ROWS), FACTORS, {}),
    ("every code is constant over ", np.full((ROWS, 3), 0.1), factors_of(n=ROWS), {}),
    ("factor hue is constant over ", noise(0, ROWS), factors_of(n=ROWS) * [1, 0, 1], {"names": ["x", "hue", "y"]}),
]


@score_of_each
@pytest.mark.parametrize(("text", "codes", "factors", "options"), REFUSALS, ids=[case[0][:40] for case in REFUSALS])
def test_refusals_of_all(
    score: Callable[..., Any], text: str, codes: Any, factors: Any, options: dict[str, Any]
) -> None:
    if score is dci:
        pytest.importorskip("sklearn")
    with refused(text):
        score(codes, factors, **options)


@pytest.mark.parametrize(
    ("score", "options", "text"),
    [
        (mcc, {"correlation": "kendall"}, "correlation = 'kendall': expected one of pearson, spearman"),
        (mcc, {"correlation": None}, "correlation = None: expected one of pearson, spearman"),
        (mcc, {"constant_codes": "drop"}, "constant_codes = 'drop': expected one of error, zero"),
        (r2, {"shuffle": True}, "shuffle = True: expected a whole number of at least 0"),
        (r2, {"shuffle": -1}, "shuffle = -1: expected a whole number of at least 0"),
        (dci, {"shuffle": 0.5}, "shuffle = 0.5: expected a whole number of at least 0"),
        (dci, {"regressor": "ridge"}, "regressor = 'ridge': expected one of lasso, forest"),
        (dci, {"alpha": 0.0}, "alpha = 0.0: expected a number above 0"),
        (dci, {"alpha": math.nan}, "alpha = nan: expected a number above 0"),
        (dci, {"alpha": 0.1, "regressor": "forest"}, "alpha = 0.1: expected a number above 0, and with regressor="),
        (dci, {"trees": 0}, "trees = 0: expected a whole number of at least 1"),
        (dci, {"random_state": None}, "random_state = None: expected a whole number"),
        (dci, {"alpha": 2.0}, "no code is of importance to any factor, so that no entropy is defined; try a smaller"),
    ],
)
def test_options_out_of_range(score: Callable[..., Any], options: dict[str, Any], text: str) -> None:
    pytest.importorskip("sklearn")
    with refused(text):
        score(*noisy(), **options)


def test_rows_are_to_be_more_than_a_linear_map_has_numbers() -> None:
    codes, z = noise(0, 25, 11), factors_of(n=26)
    with refused("25 rows: expected at least 26, half of them to fit a map from 11 codes, half to score it"):
        r2(codes, z[:25])
    assert r2(noise(0, 26, 11), z).mean < 1
    with refused("19 rows: expected at least 20"):
        dci(noise(0, 19), z[:19])


@pytest.mark.parametrize("half", ["fitted", "scored"])
def test_a_factor_constant_over_one_half_is_refused_and_shuffling_mends_it(half: str) -> None:
    codes, z = noisy()
    z[slice(N // 2) if half == "fitted" else slice(N // 2, N), 1] = 0.25
    with refused(
        f"factor 1 is constant over the half that is {half} (0.25), where no score is defined; leave it out, or"
    ):
        r2(codes, z)
    assert len(r2(codes, z, shuffle=0).per_factor) == 3


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [0.3, -7e3, 2e-3, 0.0])
@pytest.mark.parametrize("n", [60, 60_000])
def test_a_constant_with_roundings_is_constant(dtype: Any, value: float, n: int) -> None:
    jitter = 1 + np.finfo(dtype).eps * np.random.default_rng(0).integers(-2, 3, n)
    codes, z = noisy(n=n)
    z = z.astype(dtype)
    z[:, 1] = (value * jitter).astype(dtype)
    with refused("factor 1 is constant"):
        mcc(codes, z)
    # Not so where it varies by more than its dtype rounds.
    z[:, 1] = ((value or 1) * (1 + 20 * (jitter - 1))).astype(dtype)
    assert len(mcc(codes, z).per_factor) == 3


@pytest.mark.parametrize("score", [r2, mcc])
def test_an_offset_much_larger_than_the_spread_is_no_constant_in_float64(score: Callable[..., Any]) -> None:
    codes, z = noisy()
    np.testing.assert_allclose(score(codes + 1e9, z + 1e8).per_factor, score(codes, z).per_factor, rtol=1e-5)


def test_scipy_and_scikit_learn_and_torch_load_when_used() -> None:
    code = (
        "import sys, numpy as np; from ident3d.metrics import r2; z = np.random.rand(50, 2); r2(z, z); "
        "print([m for m in ('torch', 'scipy', 'sklearn', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

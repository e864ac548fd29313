"""R2, MCC and bootstrap as laws: what they ignore, what they fall for, brute force and scikit-learn."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]
from score_cases import Array, N, factors_of, noise, noisy, refused, rotation

from ident3d.errors import SpecError
from ident3d.metrics import Intervals, bootstrap, mcc, r2

SEEDS = range(4)
CORRELATIONS = ["pearson", "spearman"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [N, N + 1])
def test_r2_is_that_of_scikit_learn_on_the_same_halves(seed: int, n: int) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    metrics = pytest.importorskip("sklearn.metrics")
    codes, z = noisy(seed, n)
    model = linear_model.LinearRegression().fit(codes[: n // 2], z[: n // 2])
    expected = metrics.r2_score(z[n // 2 :], model.predict(codes[n // 2 :]), multioutput="raw_values")
    score = r2(codes, z)
    np.testing.assert_allclose(score.per_factor, expected, rtol=1e-10)
    assert float(score) == score.mean == pytest.approx(expected.mean(), rel=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", [1e-200, 1e-6, 1.0, 1e9, 1e200])
def test_r2_ignores_any_invertible_affine_map(seed: int, scale: float) -> None:
    codes, z = noisy(seed)
    mapped = (codes @ noise(seed + 7, 3, 3) + 5 * noise(seed + 8, 1)) * np.array([1, scale, 1])
    np.testing.assert_allclose(r2(mapped, z).per_factor, r2(codes, z).per_factor, rtol=1e-6)
    np.testing.assert_allclose(r2(codes, z * [-3, scale, 1] + [1, 0, 9]).per_factor, r2(codes, z).per_factor, rtol=1e-6)


def test_r2_of_an_affine_map_is_1_and_noise_lowers_it_to_0() -> None:
    z = factors_of()
    assert float(r2(z @ noise(3, 3, 3) + 1, z)) == pytest.approx(1, abs=1e-12)
    falling = [float(r2(z + scale * noise(5), z)) for scale in (0, 0.1, 0.3, 1, 100)]
    assert falling == sorted(falling, reverse=True)
    assert -0.1 < falling[-1] < 0.1


def test_r2_by_hand() -> None:
    """The fitted half gives f = x; the scored half holds errors of 0 and +-1 about it, and a mean of 4."""
    x = np.array([0, 1, 2, 3, 4, 2, 3, 4, 5, 6.0])
    z = np.array([0, 1, 2, 3, 4, 2, 4, 4, 4, 6.0])
    # SSE = 1 + 1; SST = 4 + 0 + 0 + 0 + 4.
    assert float(r2(x, z)) == pytest.approx(1 - 2 / 8, abs=1e-12)


def test_r2_is_not_cut_at_0() -> None:
    x = np.tile(np.linspace(0, 1, 10), 2)
    assert float(r2(x, np.concatenate([x[:10], -x[10:]]))) < -1


def test_r2_fits_the_first_half_and_scores_the_second_unless_rows_are_shuffled() -> None:
    codes, z = noisy()
    wrong = np.concatenate([z[: N // 2], noise(4)[N // 2 :]])
    assert float(r2(codes, z)) > 0.5
    assert float(r2(codes, wrong)) < 0.2
    order = np.random.default_rng(7).permutation(N)
    assert r2(codes, z, shuffle=7) == r2(codes[order], z[order])
    assert r2(codes, z, shuffle=7) != r2(codes, z, shuffle=8)


def test_r2_takes_codes_that_repeat_each_other_or_are_constant() -> None:
    codes, z = noisy()
    wide = np.concatenate([codes, codes[:, ::-1], np.full((N, 2), 0.3), codes.sum(axis=1, keepdims=True)], axis=1)
    np.testing.assert_allclose(r2(wide, z).per_factor, r2(codes, z).per_factor, rtol=1e-9)


def test_a_code_that_varies_over_the_scored_half_alone_is_no_use() -> None:
    codes, z = noisy()
    rounding = 0.3 * (1 + np.finfo(np.float64).eps * (np.arange(N) % 3))
    late = np.where(np.arange(N) < N // 2, rounding, noise(2)[:, 0])
    np.testing.assert_allclose(r2(np.column_stack([codes, late]), z).per_factor, r2(codes, z).per_factor, rtol=1e-9)


@pytest.mark.parametrize("correlation", CORRELATIONS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_mcc_of_a_permutation_with_signs_and_scales_is_1(order: tuple[int, ...], correlation: str) -> None:
    z = factors_of()
    signs = np.array([1, -1, -1])
    score = mcc((z * signs * [2, 1e-3, 1e9] + 3)[:, order], z, correlation=correlation)
    assert float(score) == pytest.approx(1, abs=1e-12)
    assert [order[code] for code in score.assignment] == [0, 1, 2]
    assert score.signs == tuple(signs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_mcc_is_the_best_of_all_assignments(seed: int, correlation: str) -> None:
    codes = np.concatenate([noisy(seed, dim=4, scale=1)[0], noise(seed + 5, dim=1)], axis=1)
    z = factors_of(seed, dim=4)
    function = stats.pearsonr if correlation == "pearson" else stats.spearmanr
    every = np.array([[function(factor, code).statistic for code in codes.T] for factor in z.T])
    score = mcc(codes, z, correlation=correlation)
    np.testing.assert_allclose(score.matrix, every, atol=1e-12)
    best = max(np.abs(every[range(4), choice]).mean() for choice in itertools.permutations(range(5), 4))
    assert float(score) == pytest.approx(best, abs=1e-12)
    np.testing.assert_allclose(score.per_factor, np.abs(every[range(4), list(score.assignment)]), atol=1e-12)
    np.testing.assert_array_equal(score.signs, np.sign(every[range(4), list(score.assignment)]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_mcc_ignores_order_sign_scale_and_offset(seed: int, correlation: str) -> None:
    codes, z = noisy(seed)
    order = np.random.default_rng(seed).permutation(3)
    mapped = (codes * [-1e-8, 2, 1e6] + [1e-8, -3, 0])[:, order]
    before, after = (mcc(x, z, correlation=correlation) for x in (codes, mapped))
    np.testing.assert_allclose(after.per_factor, before.per_factor, rtol=1e-9)
    assert tuple(order[list(after.assignment)]) == before.assignment


@pytest.mark.parametrize("monotone", [np.exp, lambda x: -(x**3), lambda x: np.exp(30 * x), np.arctan])
def test_spearman_ignores_monotone_maps_and_pearson_does_not(monotone: Callable[[Array], Array]) -> None:
    codes, z = noisy()
    assert mcc(monotone(codes), z, correlation="spearman").per_factor == pytest.approx(
        mcc(codes, z, correlation="spearman").per_factor, abs=1e-12
    )
    assert float(mcc(monotone(codes), z)) < float(mcc(codes, z)) - 1e-3


def test_spearman_shares_ranks_among_ties() -> None:
    generator = np.random.default_rng(0)
    codes, z = generator.integers(0, 4, (50, 2)), generator.integers(0, 3, (50, 2))
    expected = [[stats.spearmanr(factor, code).statistic for code in codes.T] for factor in z.T]
    np.testing.assert_allclose(mcc(codes, z, correlation="spearman").matrix, expected, atol=1e-12)


@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_mcc_falls_for_rotation_and_noise_where_r2_sees_noise_alone(correlation: str) -> None:
    z = factors_of(dim=2, n=5000)
    falling = [float(mcc(z @ rotation(angle), z, correlation=correlation)) for angle in (0, 15, 30, 45)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(math.sqrt(0.5), abs=0.03)
    assert float(r2(z @ rotation(45), z)) == pytest.approx(1, abs=1e-12)
    assert float(mcc(noise(3, 5000, 2), z, correlation=correlation)) < 0.05


def test_mcc_by_hand() -> None:
    """Correlations of columns of +-1 and 0, counted on paper; the greedy match 1 + 0 loses to the best one."""
    a = np.array([1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1.0])
    b = np.array([1, 1, 1, -1, -1, -1, 1, 1, 1, -1, -1, -1.0])
    codes = np.stack([a, a + b], axis=1)
    score = mcc(codes, np.stack([a, a + b], axis=1)[:, ::-1])
    assert score.assignment == (1, 0)
    root = math.sqrt(0.5)
    np.testing.assert_allclose(score.matrix, [[root, 1], [1, root]], atol=1e-12)
    # Factors a and b: |corr| is 1 and root with a, 0 and root with b. 1 + root beats root + 0.
    score = mcc(codes, np.stack([a, b], axis=1))
    np.testing.assert_allclose(score.matrix, [[1, root], [0, root]], atol=1e-12)
    assert float(score) == pytest.approx((1 + root) / 2, abs=1e-12)


def test_the_match_is_the_best_sum_and_no_greedy_one() -> None:
    """Greedy would take the best pair, factor 0 with code 0, and leave factor 1 with next to nothing."""
    z = factors_of(dim=2)
    codes = np.stack([z[:, 0] + 0.9 * z[:, 1], z[:, 0] + 0.2 * noise(1)[:, 0]], axis=1)
    score = mcc(codes, z)
    assert score.assignment == (1, 0)


@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_wider_codes_leave_some_over(correlation: str) -> None:
    z = factors_of()
    wide = np.concatenate([noise(1, dim=4), z[:, ::-1], noise(2, dim=3)], axis=1)
    score = mcc(wide, z, correlation=correlation)
    assert score.assignment == (6, 5, 4)
    assert float(score) == pytest.approx(1)
    assert np.shape(score.matrix) == (3, 10)


def test_constant_codes_are_refused_or_count_as_0() -> None:
    codes, z = noisy()
    unused = np.insert(codes, 1, 0.3, axis=1)
    with refused("code 1 is constant over all rows (0.3), where no score is defined; leave it out, or count it as unc"):
        mcc(unused, z)
    score = mcc(unused, z, constant_codes="zero")
    assert score.constant_codes == (1,)
    assert score.per_factor == pytest.approx(mcc(codes, z).per_factor)
    assert np.asarray(score.matrix)[:, 1].tolist() == [0, 0, 0]
    assert mcc(codes, z).constant_codes == ()
    # A code that is constant but for its last digit does not count by that digit.
    unused[:, 1] = np.where(z[:, 0] > 0.5, 0.3, np.nextafter(0.3, 1))
    assert mcc(unused, z, constant_codes="zero") == score
    # Where a factor is left with a constant code, it counts as 0.
    collapsed = codes.copy()
    collapsed[:, 0] = 7
    assert 0 in mcc(collapsed, z, constant_codes="zero", correlation="spearman").per_factor
    assert 0 in mcc(collapsed, z, constant_codes="zero").signs


@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_padding_with_noise_never_scores_higher(correlation: str) -> None:
    """The published way for KITTI Masks, written plainly: ten codes, three factors, seven columns of noise."""
    z = factors_of(n=200)
    codes = np.concatenate([z + 2 * noise(1, 200), z + 2 * noise(2, 200), noise(3, 200, 4)], axis=1)
    score = mcc(codes, z, correlation=correlation)
    padded = mcc(codes, np.concatenate([z, noise(4, 200, 7)], axis=1), correlation=correlation)
    published = float(np.mean(padded.per_factor[:3]))
    assert published <= float(score) < published + 0.05


def test_fewer_codes_than_factors_have_no_match() -> None:
    codes, z = noisy()
    with refused(
        "2 codes for 3 factors: expected at least one code a factor; choose as many factors, or score with r2"
    ):
        mcc(codes[:, :2], z)
    assert len(r2(codes[:, :2], z).per_factor) == 3


@pytest.mark.parametrize("options", [{}, {"correlation": "spearman"}], ids=CORRELATIONS)
def test_mcc_intervals_hold_the_score_and_narrow_with_n(options: dict[str, Any]) -> None:
    widths = []
    for n in (100, 1600):
        codes, z = noisy(n=n)
        found = bootstrap(mcc, codes, z, samples=200, **options)
        low, high = found["mean"]
        assert 0 < low < float(mcc(codes, z, **options)) < high < 1
        assert found.estimate == (float(mcc(codes, z, **options)), *mcc(codes, z, **options).per_factor)
        assert found.names == ("mean", "0", "1", "2")
        widths.append(high - low)
    assert 2.5 < widths[0] / widths[1] < 6.5  # by 1 / sqrt(n), 4


def test_r2_intervals_hold_the_score_and_narrow_with_n() -> None:
    widths = []
    for n in (200, 3200):
        codes, z = noisy(n=n)
        found = bootstrap(r2, codes, z, samples=200, shuffle=3)
        assert found.headline() == r2(codes, z, shuffle=3).headline()
        low, high = found["mean"]
        assert low < float(r2(codes, z, shuffle=3)) < high < 1
        widths.append(high - low)
    assert 2.5 < widths[0] / widths[1] < 6.5


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Of 60 samples from a law whose correlation is known, 90% are to hold it: 54, and 46 to 60 within 4 sigma."""
    truth, held = 0.6, 0
    for seed in range(60):
        z = noise(seed, 150, 1)
        low, high = bootstrap(mcc, truth * z + 0.8 * noise(seed + 500, 150, 1), z, samples=100, level=0.9)["mean"]
        held += low < truth < high
    assert held >= 45


def test_halves_are_resampled_apart() -> None:
    """Codes tell nothing in the half that is fitted, and all in the other: a map that had seen it would score 0.25."""
    z = factors_of(n=4000, dim=1)
    codes = np.concatenate([factors_of(9, 2000, 1), z[2000:]])
    assert bootstrap(r2, codes, z, samples=50)["mean"][1] < 0.15


def test_intervals_depend_on_the_seed_alone() -> None:
    codes, z = noisy(n=100)
    one = bootstrap(mcc, codes, z, samples=50, seed=1)
    assert one == bootstrap(mcc, codes, z, samples=50, seed=1)
    assert one != bootstrap(mcc, codes, z, samples=50, seed=2)
    assert json.loads(json.dumps(one.as_dict()))["low"] == list(one.low)
    assert (one.samples, one.seed, one.level) == (50, 1, 0.95)


def test_a_higher_level_gives_a_wider_interval() -> None:
    codes, z = noisy(n=100)
    (low, high), (lower, higher) = (bootstrap(mcc, codes, z, samples=300, level=p)["mean"] for p in (0.5, 0.99))
    assert lower < low < high < higher


def test_perfect_codes_have_an_interval_at_1() -> None:
    z = factors_of(n=100)
    found: Intervals = bootstrap(mcc, z, z, samples=50)
    np.testing.assert_allclose(found["mean"], 1, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"samples": 39}, "samples = 39: expected a whole number of at least 40"),
        ({"samples": 199, "level": 0.99}, "samples = 199: expected a whole number of at least 200"),
        ({"samples": 100.0}, "samples = 100.0: expected a whole number"),
        ({"level": 1}, "level = 1: expected a number above 0 and below 1"),
        ({"level": "0.9"}, "level = '0.9': expected a number"),
        ({"seed": None}, "seed = None: expected a whole number"),
        ({"correlation": "kendall"}, "correlation = 'kendall'"),
    ],
)
def test_bootstraps_refused(options: dict[str, Any], text: str) -> None:
    with refused(text):
        bootstrap(mcc, *noisy(), **options)


@pytest.mark.parametrize("score", [max, "r2", None, []])
def test_other_scores_have_no_bootstrap(score: Any) -> None:
    with refused("expected r2, mcc or dci"):
        bootstrap(score, *noisy())


def test_a_resample_without_a_score_is_refused() -> None:
    codes, z = noisy(n=50)
    z[:, 1] = 0
    z[3, 1] = 1
    with pytest.raises(SpecError, match=r"^resample \d+ of 100: factor 1 is constant over all rows \(0\)"):
        bootstrap(mcc, codes, z, samples=100)

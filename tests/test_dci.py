"""DCI: permutations, rotations, split codes, entropies by hand, and scikit-learn itself."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from score_cases import Array, N, factors_of, noise, noisy, refused, rotation

from ident3d.errors import SpecError
from ident3d.metrics import bootstrap, dci, entropy_scores, r2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("regressor", ["lasso", "forest"])
def test_dci_of_a_permutation_is_1(order: tuple[int, ...], regressor: str) -> None:
    pytest.importorskip("sklearn")
    z = factors_of()
    score = dci(-3 * z[:, order] + 1, z, regressor=regressor, trees=20)
    assert min(score.disentanglement, score.completeness, score.informativeness) > 0.98
    assert score.nrmse < 0.1
    assert np.argmax(score.importance, axis=1).tolist() == [order.index(j) for j in range(3)]


@pytest.mark.parametrize("regressor", ["lasso", "forest"])
def test_dci_of_a_rotation_is_low_though_it_is_informative(regressor: str) -> None:
    pytest.importorskip("sklearn")
    z = factors_of(dim=2)
    score = dci(z @ rotation(45), z, regressor=regressor, trees=20)
    assert max(score.disentanglement, score.completeness) < 0.05
    assert score.informativeness > 0.9


def test_disentanglement_and_completeness_tell_different_things() -> None:
    pytest.importorskip("sklearn")
    z = factors_of(n=6000, dim=2)
    # Each factor split over two codes: every code tells of one factor, no factor is told by one code.
    split = np.concatenate([z + 0.3 * noise(1, 6000, 2), z + 0.3 * noise(2, 6000, 2)], axis=1)
    score = dci(split, z, alpha=0.05)
    assert score.disentanglement > 0.95
    assert 0.4 < score.completeness < 0.6  # shares of a half: 1 - log 2 / log 4


def test_dci_importance_is_the_lasso_of_scikit_learn_on_standardised_halves() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    codes, z = noisy()
    half = N // 2
    x, y = ((a - a[:half].mean(axis=0)) / a[:half].std(axis=0) for a in (codes, z))
    models = [linear_model.Lasso(0.1).fit(x[:half], factor) for factor in y[:half].T]
    score = dci(codes * [1, 1e5, -2], z * [1e-7, 1, 1], alpha=0.1)
    np.testing.assert_allclose(score.importance, [np.abs(model.coef_) for model in models], atol=1e-3)
    np.testing.assert_allclose(score.r2, [m.score(x[half:], f) for m, f in zip(models, y[half:].T, strict=True)], 1e-3)
    assert score.alphas == (0.1, 0.1, 0.1)


def test_without_a_penalty_dci_is_as_informative_as_r2() -> None:
    pytest.importorskip("sklearn")
    codes, z = noisy()
    score = dci(codes, z, alpha=1e-9)
    np.testing.assert_allclose(score.r2, r2(codes, z).per_factor, atol=1e-3)
    np.testing.assert_allclose(score.nrmse_per_factor, np.sqrt(1 - np.array(score.r2)))
    assert score.nrmse == pytest.approx(np.mean(score.nrmse_per_factor))
    assert score.informativeness == pytest.approx(np.mean(score.r2))
    assert not hasattr(score, "__float__")


@pytest.mark.parametrize("regressor", ["lasso", "forest"])
def test_dci_draws_nothing_but_from_its_seed(regressor: str) -> None:
    pytest.importorskip("sklearn")
    codes, z = noisy(n=200)
    first = dci(codes, z, regressor=regressor, trees=5)
    assert dci(codes, z, regressor=regressor, trees=5) == first
    assert (dci(codes, z, regressor=regressor, trees=5, random_state=1) == first) == (regressor == "lasso")
    assert dci(codes, z, regressor=regressor, trees=5, shuffle=1) != first


def test_a_constant_code_is_of_no_importance_to_dci() -> None:
    pytest.importorskip("sklearn")
    codes, z = noisy()
    score = dci(np.insert(codes, 0, 0.3, axis=1), z, alpha=0.01)
    plain = dci(codes, z, alpha=0.01)
    assert [row[0] for row in score.importance] == [0, 0, 0]
    assert (score.per_code[0], score.code_weights[0]) == (0, 0)
    assert score.disentanglement == pytest.approx(plain.disentanglement)
    assert score.r2 == pytest.approx(plain.r2)


def test_entropies_by_hand() -> None:
    matrix = np.array([[2.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    disentanglement, weights, completeness = entropy_scores(matrix)
    np.testing.assert_allclose(disentanglement, [1, 1, 1])
    np.testing.assert_allclose(weights, [0.5, 0.25, 0.25])
    np.testing.assert_allclose(completeness, [1, 1 - math.log(2) / math.log(3)])

    # Code 0 tells of both factors as 3 : 1, code 1 of factor 1 alone, code 2 of none.
    disentanglement, weights, completeness = entropy_scores(np.array([[3.0, 0.0, 0.0], [1.0, 4.0, 0.0]]))
    quarter = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    np.testing.assert_allclose(disentanglement, [1 - quarter, 1, 0], atol=1e-15)
    np.testing.assert_allclose(weights, [0.5, 0.5, 0])
    fifth = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8)) / math.log(3)
    np.testing.assert_allclose(completeness, [1, 1 - fifth])

    # Evenly spread importances score 0, and so does a factor that nothing tells of.
    np.testing.assert_allclose(entropy_scores(np.ones((3, 4)))[0], 0, atol=1e-15)
    np.testing.assert_allclose(entropy_scores(np.array([[1.0, 1.0], [0.0, 0.0]]))[2], [0, 0], atol=1e-15)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_entropies_know_shares_only(scale: float) -> None:
    matrix = np.abs(noise(0, 3, 4))
    for one, two in zip(entropy_scores(matrix), entropy_scores(matrix * scale), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-12)


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        (np.ones(3), "importance of shape (3,): expected (factors, codes), at least 2 of each"),
        (np.ones((1, 3)), "importance of shape (1, 3)"),
        (-np.ones((2, 3)), "importance: expected finite numbers of at least 0"),
        (np.full((2, 3), np.nan), "importance: expected finite numbers"),
        (np.zeros((2, 3)), "no code is of importance to any factor"),
    ],
)
def test_matrices_without_entropies(matrix: Array, text: str) -> None:
    with refused(text):
        entropy_scores(matrix)


@pytest.mark.parametrize("which", [0, 1])
def test_entropies_over_one_are_refused(which: int) -> None:
    inputs = list(noisy())
    inputs[which] = inputs[which][:, :1]
    with refused(f"dci of 1 {('code', 'factor')[which]}: expected at least 2"):
        dci(*inputs)


def test_a_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SpecError, match=r"^dci needs scikit-learn \(.*\): pip install 'ident3d\[baselines\]'$"):
        dci(*noisy())


@pytest.mark.parametrize("options", [{}, {"regressor": "forest", "trees": 3}])
def test_dci_intervals_are_of_each_of_its_numbers(options: dict[str, Any]) -> None:
    pytest.importorskip("sklearn")
    codes, z = noisy(n=100)
    found = bootstrap(dci, codes, z, samples=40, **options)
    assert found.names == ("disentanglement", "completeness", "informativeness", "nrmse")
    assert found.headline() == dci(codes, z, **options).headline()
    assert all(low < high for low, high in map(found.__getitem__, found.names))
    with refused("no interval of 'mean'; expected one of disentanglement, completeness"):
        found["mean"]

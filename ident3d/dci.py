"""Disentanglement, completeness and informativeness of codes, for factors that are continuous."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from ident3d.checks import whole
from ident3d.errors import SpecError
from ident3d.factors import FactorTable
from ident3d.scoring import (
    Array,
    Columns,
    Halves,
    Names,
    Numbers,
    Rows,
    Score,
    Task,
    columns_of,
    explained,
    halves_of,
)

__all__ = ["DCIScore", "dci", "entropy_scores"]

REGRESSORS = ("lasso", "forest")
LEAST = 20
"""Rows: five folds of two in the half that is fitted."""
FOLDS = 5
MOST_STEPS = 10_000


@dataclass(frozen=True)
class DCIScore(Score):
    """Disentanglement, completeness and informativeness: `dci` says how each is defined.

    Attributes:
        disentanglement: 0 to 1, mean over codes by their weights: does a code tell of one factor only?
        completeness: 0 to 1, mean over factors: is a factor told by one code only?
        informativeness: R2 on the half that is scored, mean over factors; at most 1, and below 0 where predictions are
            worse than the mean.
        nrmse: the root mean squared error on that half over that of predicting its mean, mean over factors; the
            original's informativeness, 0 at best.
        per_code: each code's disentanglement; 0 for a code of no importance, whose weight is 0.
        code_weights: each code's share of all importance.
        per_factor: each factor's completeness; 0 for a factor that no code is of importance to.
        r2: each factor's informativeness.
        nrmse_per_factor: each factor's.
        importance: of each code to each factor, factors x codes: the transpose of the paper's R.
        names: of the factors.
        regressor: `lasso` or `forest`.
        alphas: each factor's lasso penalty; none for the forest.
    """

    disentanglement: float
    completeness: float
    informativeness: float
    nrmse: float
    per_code: tuple[float, ...]
    code_weights: tuple[float, ...]
    per_factor: tuple[float, ...]
    r2: tuple[float, ...]
    nrmse_per_factor: tuple[float, ...]
    importance: tuple[tuple[float, ...], ...]
    names: tuple[str, ...]
    regressor: str
    alphas: tuple[float, ...]

    def headline(self) -> dict[str, float]:
        """The four means by name."""
        return {name: getattr(self, name) for name in ("disentanglement", "completeness", "informativeness", "nrmse")}


def dci(
    codes: Numbers,
    factors: Numbers | FactorTable,
    *,
    names: Names | None = None,
    regressor: str = "lasso",
    alpha: float | None = None,
    trees: int = 100,
    random_state: int = 0,
    shuffle: int | None = None,
) -> DCIScore:
    """Disentanglement, completeness and informativeness (Eastwood & Williams 2018, section 2).

    A regressor a factor is fitted on the first half of the rows. With R_ij the importance of code i to factor j that
    it reports, P_ij = R_ij / sum_k R_ik over factors and Q_ij = R_ij / sum_k R_kj over codes:

    - disentanglement of code i is 1 - H(P_i.), the entropy taken to the base of the number of factors; their mean
      weighs code i with sum_j R_ij / sum_kj R_kj,
    - completeness of factor j is 1 - H(Q_.j), to the base of the number of codes; factors weigh the same,
    - informativeness of factor j is R2 of its prediction on the second half. The original reports the normalised
      error sqrt(1 - R2) instead, here `nrmse`.

    Codes and factors are standardised on the half that is fitted; a code that is constant there gets importance 0.

    - `lasso`: R_ij is the magnitude of the coefficient. The penalty is the best of 100 in cross-validation over 5
      unmixed folds of that half; as cross-validation prefers small ones, tiny coefficients remain, which lower
      disentanglement and completeness a little.
    - `forest`: R_ij is the mean decrease of variance in a random forest, which sums to 1 a factor. The original chooses
      the depth of the trees by validation; here they grow in full.

    Read informativeness first: entropies know shares only, so that where nothing can be predicted the few coefficients
    that noise leaves to a lasso can score a disentanglement near 1. Scores of different regressors do not compare.

    Args:
        codes: (n, codes), array or tensor, at least two codes.
        factors: (n, factors) likewise, at least two factors, or a dataset's table of factors.
        names: of the factors; see `ident3d.metrics.r2`.
        regressor: `lasso` or `forest`.
        alpha: the lasso's penalty in place of cross-validation, above 0, on standardised factors; above 1 no
            coefficient survives.
        trees: of each forest.
        random_state: seed of the forest; the lasso draws nothing.
        shuffle: as for `ident3d.metrics.r2`.

    Returns:
        The score; it depends on nothing but the arguments (and the version of scikit-learn).

    Raises:
        SpecError: scikit-learn is absent; an option out of range; what `ident3d.metrics.r2` refuses; fewer than two
            codes or factors, or than 20 rows; no code of importance to any factor.

    Example:
        >>> z = np.random.default_rng(0).random((500, 3))
        >>> score = dci(z[:, [2, 0, 1]], z)
        >>> round(score.disentanglement, 3), round(score.completeness, 3), round(score.informativeness, 3)
        (1.0, 1.0, 1.0)
    """
    return dci_task(
        codes,
        factors,
        names=names,
        regressor=regressor,
        alpha=alpha,
        trees=trees,
        random_state=random_state,
        shuffle=shuffle,
    ).point()


def dci_task(
    codes: Numbers,
    factors: Numbers | FactorTable,
    *,
    names: Names | None = None,
    regressor: str = "lasso",
    alpha: float | None = None,
    trees: int = 100,
    random_state: int = 0,
    shuffle: int | None = None,
) -> Task[DCIScore]:
    """`dci`, checked and ready to be evaluated over any rows. The lasso's penalties are chosen here, once."""
    if regressor not in REGRESSORS:
        raise SpecError(f"regressor = {regressor!r}: expected one of {', '.join(REGRESSORS)}")
    if alpha is not None and (regressor != "lasso" or not 0 < alpha < math.inf):
        raise SpecError(f"alpha = {alpha!r}: expected a number above 0, and with regressor='lasso' only")
    trees, random_state = whole("trees", trees, 1), whole("random_state", random_state)
    made, target = columns_of(codes, factors, names)
    for columns in (made, target):
        if columns.width < 2:
            raise SpecError(f"dci of 1 {columns.kind}: expected at least 2, as the entropy over one is always 0")
    strata = halves_of(made, shuffle, LEAST)
    halves = Halves.of(made, target, *strata)
    alphas: tuple[float, ...] = ()
    if regressor == "lasso":
        alphas = _chosen_alphas(halves) if alpha is None else (float(alpha),) * target.width

    def evaluate(fit: Rows, scored: Rows) -> DCIScore:
        importance, per_factor = _fitted(Halves.of(made, target, fit, scored), _models(alphas, trees, random_state))
        return _score(importance, per_factor, target, regressor, alphas)

    return Task(strata, evaluate)


def entropy_scores(
    importance: Float64[Array, "factors codes"],
) -> tuple[Float64[Array, " codes"], Float64[Array, " codes"], Float64[Array, " factors"]]:
    """Disentanglement of each code, its weight, and completeness of each factor, from any matrix of importances.

    Args:
        importance: of each code to each factor, 0 or more; at least 2 x 2.

    Raises:
        SpecError: another shape, a number that is negative or not finite, or zeros alone.

    Example:
        >>> disentanglement, weights, completeness = entropy_scores(np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
        >>> disentanglement, weights, completeness.round(3)
        (array([1., 1., 1.]), array([0.25, 0.25, 0.5 ]), array([0.369, 1.   ]))
    """
    importance = np.asarray(importance, dtype=np.float64)
    if importance.ndim != 2 or min(importance.shape) < 2:
        raise SpecError(f"importance of shape {importance.shape}: expected (factors, codes), at least 2 of each")
    if not (np.isfinite(importance).all() and importance.min() >= 0):
        raise SpecError("importance: expected finite numbers of at least 0")
    if not importance.any():
        raise SpecError("no code is of importance to any factor, so that no entropy is defined; try a smaller alpha")
    importance = importance / importance.max()
    return _peakedness(importance.T), importance.sum(axis=0) / importance.sum(), _peakedness(importance)


def _peakedness(weights: Float64[Array, "rows columns"]) -> Float64[Array, " rows"]:
    """1 - entropy of each row's shares, to the base of the number of columns; 0 for a row of zeros."""
    total = weights.sum(axis=1, keepdims=True)
    share = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(axis=1) / math.log(weights.shape[1])
    found: Array = np.where(total[:, 0] > 0, np.clip(1 - entropy, 0, 1), 0)
    return found


def _sklearn() -> tuple[Any, Any]:
    """Its linear models and its ensembles."""
    try:
        from sklearn import ensemble, linear_model  # type: ignore[import-untyped]
    except ImportError as error:
        raise SpecError(f"dci needs scikit-learn ({error}): pip install 'ident3d[baselines]'") from None
    return linear_model, ensemble


def _chosen_alphas(halves: Halves) -> tuple[float, ...]:
    """The lasso penalty of each factor that predicts best in cross-validation."""
    model = _sklearn()[0].LassoCV(cv=FOLDS, fit_intercept=False, max_iter=MOST_STEPS)
    return tuple(float(model.fit(halves.fit_codes, factor).alpha_) for factor in halves.fit_factors.T)


def _models(alphas: tuple[float, ...], trees: int, random_state: int) -> Callable[[int], Any]:
    """An unfitted model by the factor's number."""
    linear_model, ensemble = _sklearn()
    if alphas:
        return lambda j: linear_model.Lasso(alphas[j], fit_intercept=False, max_iter=MOST_STEPS)
    return lambda j: ensemble.RandomForestRegressor(trees, random_state=random_state)


def _fitted(
    halves: Halves, model_of: Callable[[int], Any]
) -> tuple[Float64[Array, "factors codes"], Float64[Array, " factors"]]:
    """Importances, and R2 of each factor on the half that is scored."""
    importance, predicted = [], []
    for j, factor in enumerate(halves.fit_factors.T):
        model = model_of(j).fit(halves.fit_codes, factor)
        found: Array = model.coef_ if hasattr(model, "coef_") else model.feature_importances_
        importance.append(np.abs(found))
        predicted.append(model.predict(halves.scored_codes))
    return np.stack(importance), explained(halves.scored_factors, np.stack(predicted, axis=1))


def _score(
    importance: Array, per_factor: Array, factors: Columns, regressor: str, alphas: tuple[float, ...]
) -> DCIScore:
    per_code, weights, completeness = entropy_scores(importance)
    errors = np.sqrt(np.maximum(1 - per_factor, 0))
    return DCIScore(
        disentanglement=float(per_code @ weights),
        completeness=float(completeness.mean()),
        informativeness=float(per_factor.mean()),
        nrmse=float(errors.mean()),
        per_code=tuple(per_code.tolist()),
        code_weights=tuple(weights.tolist()),
        per_factor=tuple(completeness.tolist()),
        r2=tuple(per_factor.tolist()),
        nrmse_per_factor=tuple(errors.tolist()),
        importance=tuple(map(tuple, importance.tolist())),
        names=factors.names,
        regressor=regressor,
        alphas=alphas,
    )

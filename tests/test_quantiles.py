"""The laws on the real line against SciPy's, far out in the tails too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from ident3d.quantiles import GeneralizedNormalLaw, LaplaceLaw, NormalLaw, StandardLaw

BETAS = [0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 8.0, 30.0, 100.0]
PAIRS: list[tuple[StandardLaw, Any]] = [
    (NormalLaw(), stats.norm()),
    (LaplaceLaw(), stats.laplace()),
    *((GeneralizedNormalLaw(beta), stats.gennorm(beta)) for beta in BETAS),
]
IDS = ["normal", "laplace", *(f"gennorm-{beta:g}" for beta in BETAS)]
LAWS = [law for law, _ in PAIRS]
every_law = pytest.mark.parametrize("law", LAWS, ids=IDS)
every_pair = pytest.mark.parametrize(("law", "reference"), PAIRS, ids=IDS)

TAIL = torch.tensor([10.0**-e for e in (300, 250, 200, 100, 50, 30, 20, 16, 12, 8, 5, 3, 2)], dtype=torch.float64)
BULK = torch.linspace(0.02, 0.48, 24, dtype=torch.float64)
P = torch.cat([TAIL, BULK])


def close(found: Tensor, expected: Any, rtol: float, atol: float = 0.0) -> None:
    torch.testing.assert_close(found, torch.as_tensor(np.asarray(expected)), rtol=rtol, atol=atol)


@every_pair
def test_quantiles_are_those_of_scipy_as_far_out_as_float64_goes(law: StandardLaw, reference: Any) -> None:
    close(law.quantile(P), reference.ppf(P.numpy()), rtol=1e-12)


@every_pair
def test_the_distribution_function_is_that_of_scipy_to_relative_precision(law: StandardLaw, reference: Any) -> None:
    t = law.quantile(P)
    close(law.cdf(t), reference.cdf(t.numpy()), rtol=1e-10)
    close(law.cdf(-t), reference.cdf(-t.numpy()), rtol=1e-14)


@every_pair
def test_the_density_is_that_of_scipy(law: StandardLaw, reference: Any) -> None:
    t = torch.linspace(-1.5, 1.5, 301, dtype=torch.float64)
    # 1.5 to the power of 100 is 4e17, so the precision is a relative one.
    close(law.log_density(t), reference.logpdf(t.numpy()), rtol=1e-13, atol=1e-13)


@every_law
def test_a_quantile_leads_back_to_its_probability(law: StandardLaw) -> None:
    # d log p / d log t = beta t^beta near t: rounding t alone costs that much, 7e4 for beta = 100 at 1e-300.
    close(law.cdf(law.quantile(P)), P, rtol=1e-10)
    upper = 1 - torch.cat([P[P > 1e-9], torch.tensor([1e-12], dtype=torch.float64)])
    close(law.cdf(law.quantile(upper)), upper, rtol=1e-15, atol=1e-15)


@every_law
def test_a_probability_leads_back_to_its_quantile(law: StandardLaw) -> None:
    t = law.quantile(P)
    close(law.quantile(law.cdf(t)), t, rtol=1e-12)


@every_law
def test_the_quantiles_on_both_sides_of_the_middle_mirror_each_other(law: StandardLaw) -> None:
    p = torch.arange(1, 512, dtype=torch.float64) / 1024  # 1 - p is exact
    assert torch.equal(law.quantile(p), -law.quantile(1 - p))
    assert law.quantile(torch.tensor([0.5], dtype=torch.float64)).item() == 0
    assert law.cdf(torch.zeros(1, dtype=torch.float64)).item() == 0.5


@every_law
def test_quantiles_grow_with_the_probability(law: StandardLaw) -> None:
    p = torch.cat([P.sort().values, torch.linspace(0.5, 1 - 1e-9, 500, dtype=torch.float64)])
    assert (law.quantile(p).diff() > 0).all()
    t = law.quantile(p)
    assert (law.cdf(t).diff() > 0).all()


@every_law
def test_the_density_is_the_slope_of_the_distribution_function(law: StandardLaw) -> None:
    t = torch.tensor([-1.2, -0.7, -0.31, 0.4, 0.9], dtype=torch.float64)
    h = 1e-6
    slope = (law.cdf(t + h) - law.cdf(t - h)) / (2 * h)
    close(torch.exp(law.log_density(t)), slope, rtol=1e-4, atol=1e-8)


@every_law
def test_what_is_far_away_has_no_mass_and_never_turns_into_nan(law: StandardLaw) -> None:
    far = torch.tensor([-math.inf, -1e300, -1e30, 1e30, 1e300, math.inf], dtype=torch.float64)
    expected = [0.0] * 3 + [1.0] * 3
    # With beta = 0.2, exp(-(1e30)^0.2) is about 1e-434283.
    assert law.cdf(far).tolist() == expected


def test_beta_one_is_laplace_and_beta_two_is_normal() -> None:
    one, two = GeneralizedNormalLaw(1.0), GeneralizedNormalLaw(2.0)
    close(one.quantile(P), LaplaceLaw().quantile(P), rtol=1e-12)
    close(two.quantile(P), NormalLaw().quantile(P) / math.sqrt(2), rtol=1e-12)
    t = torch.linspace(-5, 5, 101, dtype=torch.float64)
    close(one.log_density(t), LaplaceLaw().log_density(t), rtol=1e-14, atol=1e-14)
    close(two.log_density(t), NormalLaw().log_density(t * math.sqrt(2)) + math.log(2) / 2, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("beta", BETAS)
def test_random_probabilities_are_inverted_whatever_their_neighbours_in_the_batch(beta: float) -> None:
    # The inversion goes on until the last of a batch has settled: those that settled first must not drift.
    law = GeneralizedNormalLaw(beta)
    p = torch.rand(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp_(1e-12, 1 - 1e-12)
    alone = law.quantile(p)
    together = law.quantile(torch.cat([p, P]))[: len(p)]
    assert torch.equal(together, alone)
    # Within 6e-4 of 0, t^100 is no number of float64, and SciPy's quantile is 0.
    seen = (p - 0.5).abs() > 1e-3
    close(alone[seen], stats.gennorm(beta).ppf(p[seen].numpy()), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("beta", [beta for beta in BETAS if beta >= 8])
def test_near_the_middle_where_the_power_underflows_the_law_is_flat(beta: float) -> None:
    law = GeneralizedNormalLaw(beta)
    t = torch.logspace(-15, -3, 100, dtype=torch.float64)
    p = 0.5 - t / (2 * math.gamma(1 + 1 / beta))
    close(law.cdf(-t), p, rtol=1e-15)
    close(law.quantile(p), (2 * p - 1) * math.gamma(1 + 1 / beta), rtol=1e-14)


@every_law
def test_a_value_is_the_same_bit_by_bit_alone_and_among_others(law: StandardLaw) -> None:
    # An odd count, since vectors of numbers and those left over may be rounded differently.
    p = torch.rand(1003, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp_(1e-12, 1 - 1e-12)
    for function, given in ((law.quantile, p), (law.cdf, law.quantile(p)), (law.log_density, law.quantile(p))):
        assert torch.equal(function(given), torch.cat([function(one) for one in torch.split(given, 1)]))


@every_law
def test_the_shape_is_kept_down_to_no_number_at_all(law: StandardLaw) -> None:
    p = torch.full((2, 3, 4), 0.3, dtype=torch.float64)
    assert law.quantile(p).shape == law.cdf(p).shape == law.log_density(p).shape == p.shape
    assert law.quantile(p[:0]).shape == (0, 3, 4)
    assert law.quantile(p).dtype == torch.float64

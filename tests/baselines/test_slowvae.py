"""SlowVAE's terms against numerical integrals and torch.distributions, and what holds of its loss and its model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from scipy import integrate  # type: ignore[import-untyped]
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Independent, Laplace, Normal, kl_divergence

from ident3d.baselines.slowvae import (
    SlowVAE,
    SlowVAETerms,
    bernoulli_nll,
    folded_mean,
    normal_kl,
    slowvae_terms,
    transition_kl,
)
from ident3d.errors import SpecError

WIDTH = 12.0
"""Half the range of integrals, in standard deviations: a normal variable goes beyond it with probability 4e-33."""
MEANS = (0.0, 1e-6, 0.3, -0.3, 1.0, -4.0, 7.0)
RATES = (0.2, 1.0, 6.0, 40.0)
STANDARD = Normal(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
LEAST_TRANSITION = 0.5 + math.log(2 / math.pi)
"""Over all arguments. E|d| grows with |m - m'| and s', so the least is at 0 of both, where E|d| = s sqrt(2 / pi). Of
lambda s sqrt(2 / pi) - log(lambda / 2) - log(2 pi e s^2) / 2 the derivative is 0 at s = sqrt(pi / 2) / lambda."""


def wide(*values: float) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def normal(mean: Tensor, log_variance: Tensor) -> Normal:
    return Normal(mean, (log_variance / 2).exp())


def log_prob(law: Distribution, x: Tensor) -> Tensor:
    found: Tensor = law.log_prob(x)
    return found


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.3


def expectation(f: Callable[[float], float], kink: float = 0.0) -> float:
    """Of f(t) for a standard normal t, where f is smooth but for a kink.

    Asked for to 1e-11, some orders below the 1e-8 that tests ask for: so nested integrals may be off by many times it.
    """

    def weighted(t: float) -> float:
        return math.exp(-t * t / 2) / math.sqrt(2 * math.pi) * f(t)

    breaks = sorted({0.0, kink} if abs(kink) < WIDTH else {0.0})  # at 0: a narrow peak is not to be missed
    value, off = integrate.quad(weighted, -WIDTH, WIDTH, points=breaks, epsabs=1e-11, epsrel=1e-11, limit=200)
    assert off <= 1e-9 * max(1.0, abs(value))
    return float(value)


# The terms against integrals


@pytest.mark.parametrize("log_variance", [-20.0, -3.0, 0.0, 0.5, 4.0])
@pytest.mark.parametrize("mean", MEANS)
def test_the_normal_kl_is_its_integral(mean: float, log_variance: float) -> None:
    s = math.exp(log_variance / 2)
    integral = expectation(lambda t: (mean + s * t) ** 2 / 2 - t * t / 2 - log_variance / 2)
    m, v = wide(mean, log_variance)
    found = normal_kl(m, v)
    assert found.item() == pytest.approx(integral, rel=1e-8, abs=1e-8)
    torch.testing.assert_close(found, kl_divergence(normal(m, v), STANDARD), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("log_variance", [1e-3, -1e-3, 1e-2, 1.0])
def test_the_normal_kl_keeps_its_digits_in_float32(log_variance: float) -> None:
    """Of a value near 0. With exp() - 1 a tenth of it would be lost."""
    found = normal_kl(torch.zeros(()), torch.tensor(log_variance))
    torch.testing.assert_close(found.double(), normal_kl(*wide(0.0, log_variance)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("variance", [1e-8, 1e-3, 0.5, 1.0, 30.0])
def test_the_folded_mean_is_its_integral(variance: float) -> None:
    s = math.sqrt(variance)
    for mean in (*MEANS, 50 * s, -50 * s, s, -2 * s, 5 * s):
        integral = expectation(lambda t, m=mean: abs(m + s * t), -mean / s)  # type: ignore[misc]
        # For the least standard deviation, 1e-4, the integral's 1e-11 is 1e-7 of the value.
        assert folded_mean(*wide(mean, variance)).item() == pytest.approx(integral, rel=1e-9, abs=1e-11)
        found = folded_mean(torch.tensor(mean), torch.tensor(variance))
        assert found.item() == pytest.approx(integral, rel=1e-5)


def transition(numbers: Sequence[float], rate: float, dtype: torch.dtype = torch.float64) -> float:
    m, v, m_before, v_before = (torch.tensor(x, dtype=dtype) for x in numbers)
    return transition_kl(m, v, m_before, v_before, rate).item()


def transition_integral(mean: float, log_variance: float, before: float, log_variance_before: float, r: float) -> float:
    """The double integral over z' and z of log q(z) - log p(z | z'), by the densities alone."""
    s, s_before = math.exp(log_variance / 2), math.exp(log_variance_before / 2)

    def kl(t_before: float) -> float:
        z_before = before + s_before * t_before

        def log_ratio(t: float) -> float:
            log_q = -t * t / 2 - math.log(s) - math.log(2 * math.pi) / 2
            return log_q - (math.log(r / 2) - r * abs(mean + s * t - z_before))

        return expectation(log_ratio, (z_before - mean) / s)

    return expectation(kl, (mean - before) / s_before)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("log_variance", [-5.0, -0.7, 1.5])
def test_the_transition_kl_is_its_double_integral(log_variance: float, rate: float) -> None:
    for (mean, before), log_variance_before in product([(0.4, 0.4), (0.3, -0.2), (-2.0, 1.5)], [-6.0, 0.0, 2.0]):
        arguments = mean, log_variance, before, log_variance_before
        integral = transition_integral(*arguments, rate)
        assert transition(arguments, rate) == pytest.approx(integral, rel=1e-8, abs=1e-8)
        assert transition(arguments, rate, torch.float32) == pytest.approx(integral, rel=1e-5, abs=1e-5)


# Laws of the transition


@pytest.mark.parametrize("rate", RATES)
def test_the_transition_kl_is_not_below_its_least_value(rate: float) -> None:
    m, v, m_before, v_before = randn(4, 20_000) * torch.tensor([[1.0], [3.0], [1.0], [3.0]])
    found = transition_kl(m, v - 2 * math.log(rate), m_before, v_before - 2 * math.log(rate), rate)
    assert bool((found >= LEAST_TRANSITION).all())
    least = transition((0.7, math.log(math.pi / 2) - 2 * math.log(rate), 0.7, -80.0), rate)
    assert least == pytest.approx(LEAST_TRANSITION, abs=1e-12)


@pytest.mark.parametrize("rate", RATES)
def test_symmetries_of_the_transition_kl(rate: float) -> None:
    m, v, m_before, v_before = randn(4, 500)
    found = transition_kl(m, v, m_before, v_before, rate)
    assert torch.equal(transition_kl(-m, v, -m_before, v_before, rate), found)
    assert torch.equal(transition_kl(m_before, v, m, v_before, rate), found)
    torch.testing.assert_close(transition_kl(m + 3, v, m_before + 3, v_before, rate), found)
    # In another unit of length it is the same.
    log_unit = math.log(5.0)
    scaled = transition_kl(5 * m, v + 2 * log_unit, 5 * m_before, v_before + 2 * log_unit, rate / 5)
    torch.testing.assert_close(scaled, found)
    # Backwards in time only the entropy is another's.
    torch.testing.assert_close(transition_kl(m_before, v_before, m, v, rate), found + (v - v_before) / 2)


def test_the_transition_kl_agrees_with_a_monte_carlo_estimate() -> None:
    """Within 5 standard errors: one of these 40 would be farther off for one seed in 40,000, and the seed is fixed."""
    m, v, m_before, v_before = randn(4, 10)
    for rate in RATES:
        noise, noise_before = randn(2, 50_000, 10, seed=3)
        z = m + (v / 2).exp() * noise
        z_before = m_before + (v_before / 2).exp() * noise_before
        ratios = log_prob(normal(m, v), z) - log_prob(Laplace(z_before, 1 / rate), z)
        off = (ratios.mean(0) - transition_kl(m, v, m_before, v_before, rate)).abs()
        assert bool((off <= 5 * ratios.std(0) / math.sqrt(len(ratios))).all())


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_rate_that_is_not_above_0_is_refused(rate: float) -> None:
    with pytest.raises(SpecError, match=rf"rate = {rate}: expected a finite number above 0"):
        transition((0.0, 0.0, 0.0, 0.0), rate)
    with pytest.raises(SpecError, match=rf"rate = {rate}: expected a finite number above 0"):
        slowvae_terms(randn(1, 2, 1, 64, 64), bits(1, 2, 1, 64, 64), randn(1, 2, 3), randn(1, 2, 3), rate)


# Gradients


@pytest.mark.parametrize("rate", [1.0, 6.0])
def test_gradients_are_those_of_finite_differences(rate: float) -> None:
    m, v, m_before, v_before = randn(4, 6)
    m_before[:2] = m[:2]
    inputs = tuple(x.clone().requires_grad_() for x in (m, v, m_before, v_before))
    assert torch.autograd.gradcheck(lambda m, v, m_2, v_2: transition_kl(m, v, m_2, v_2, rate), inputs)
    assert torch.autograd.gradcheck(normal_kl, inputs[:2])
    assert torch.autograd.gradcheck(lambda m, v: folded_mean(m, v.exp()), inputs[:2])


@pytest.mark.parametrize(("log_variance", "before"), list(product((-20.0, 0.0, 20.0), repeat=2)))
def test_values_and_gradients_at_extreme_variances(log_variance: float, before: float) -> None:
    """Float32 against float64, where no gradient of a mean is above the rate."""
    steps = torch.tensor([0.0, 1e-6, -1e-3, 1.0, -50.0, 1e4])
    found = []
    for dtype in (torch.float32, torch.float64):
        m = steps.to(dtype).requires_grad_()
        v, v_before = (torch.full_like(m, x).detach().requires_grad_() for x in (log_variance, before))
        value = transition_kl(m, v, torch.zeros_like(m), v_before, 6.0)
        gradients = torch.autograd.grad(value.sum(), (m, v, v_before))
        own = torch.autograd.grad(normal_kl(m, v).sum(), (m, v))
        found.append([x.detach().double() for x in (value, *gradients, *own)])
        assert all(bool(x.isfinite().all()) for x in found[-1])
        assert float(gradients[0].abs().max()) <= 6 * (1 + 1e-6)
        assert gradients[0][0] == 0  # where nothing moves
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


# Pixels


def test_the_nll_is_the_sum_over_pixels_of_log_probabilities() -> None:
    logits, masks = 3 * randn(3, 1, 64, 64), bits(3, 1, 64, 64)
    for own_logits, mask, found in zip(logits, masks, bernoulli_nll(logits, masks).tolist(), strict=True):
        total = 0.0
        for x, on in zip(own_logits.flatten().tolist(), mask.flatten().tolist(), strict=True):
            p = 1 / (1 + math.exp(-x))
            total -= math.log(p if on else 1 - p)
        # 1 - p is rounded at 1e-16, and p is at most 1 - 1e-6 here: 1e-10 of a logarithm.
        assert found == pytest.approx(total, rel=1e-10)


def test_masks_may_be_of_any_type() -> None:
    logits, masks = randn(2, 1, 64, 64, dtype=torch.float32), bits(2, 1, 64, 64)
    expected = bernoulli_nll(logits, masks.float())
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16):
        found = bernoulli_nll(logits, masks.to(dtype))
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_extreme_logits_are_finite(dtype: torch.dtype) -> None:
    """Each pixel that is certain and wrong costs its logit, each that is right nothing."""
    masks = bits(2, 1, 64, 64)
    right = (200.0 * masks - 100).to(dtype).requires_grad_()
    assert bernoulli_nll(right, masks).tolist() == [pytest.approx(0, abs=1e-30)] * 2
    wrong = bernoulli_nll(-right, masks)
    assert wrong.tolist() == [100.0 * 64**2] * 2
    (gradient,) = torch.autograd.grad(wrong.sum(), right)
    assert torch.equal(gradient, torch.where(masks, 1, -1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, masks = randn(2, 1, 64, 64, dtype=dtype).requires_grad_(), bits(2, 1, 64, 64)
    found = bernoulli_nll(logits, masks)
    assert found.dtype == torch.float32
    assert torch.equal(found, bernoulli_nll(logits.float(), masks))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bernoulli_nll(logits, masks), found)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.dtype == dtype
    assert bernoulli_nll(logits.double(), masks).dtype == torch.float64


# The loss


def batch(seeds: int = 2, frames: int = 6, dim: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, masks, means and logarithms of variances of made-up frames."""
    shape = seeds, frames, 1, 64, 64
    return randn(*shape), bits(*shape), randn(seeds, frames, dim, seed=1), randn(seeds, frames, dim, seed=2)


def of(terms: SlowVAETerms) -> tuple[Tensor, Tensor, Tensor]:
    return terms.reconstruction, terms.normal, terms.transition


def test_the_terms_are_those_of_a_loop_over_frames() -> None:
    logits, masks, means, log_variances = batch()
    found = slowvae_terms(logits, masks, means, log_variances, 6.0)
    for seed in range(2):
        totals = [0.0, 0.0, 0.0]
        for k, partner in ((0, 3), (1, 4), (2, 5), (3, 0), (4, 1), (5, 2)):
            m, v = means[seed, k], log_variances[seed, k]
            m_before, v_before = means[seed, partner], log_variances[seed, partner]
            totals[0] -= float(log_prob(Bernoulli(logits=logits[seed, k]), masks[seed, k].double()).sum()) / 6
            totals[1] += float(kl_divergence(normal(m, v), STANDARD).sum()) / 6
            totals[2] += float(transition_kl(m, v, m_before, v_before, 6.0).sum()) / 6
        assert [x[seed].item() for x in of(found)] == pytest.approx(totals, rel=1e-10)


@pytest.mark.parametrize(
    ("order", "same"),
    [
        ([3, 4, 5, 0, 1, 2], True),  # positives first: both ways in time
        ([0, 4, 2, 3, 1, 5], True),  # of one pair alone
        ([2, 0, 1, 5, 3, 4], True),  # the pairs in another order
        ([0, 1, 2, 4, 5, 3], False),  # other pairs
    ],
)
def test_who_pairs_with_whom_matters_but_not_the_order(order: list[int], same: bool) -> None:
    logits, masks, m, v = batch()
    found = slowvae_terms(logits, masks, m, v, 6.0)
    other = slowvae_terms(logits[:, order], masks[:, order], m[:, order], v[:, order], 6.0)
    torch.testing.assert_close(of(other)[:2], of(found)[:2], rtol=1e-12, atol=0)
    assert torch.allclose(other.transition, found.transition, rtol=1e-12) is same


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("frames", [1, 3, 7])
def test_an_odd_number_of_frames_is_refused(frames: int) -> None:
    with pytest.raises(SpecError, match=f"{frames} frames: expected an even number"):
        slowvae_terms(*batch(frames=frames), 6.0)
    with pytest.raises(SpecError, match=f"{frames} frames: expected an even number"):
        SlowVAE(2, [0]).terms(bits(1, frames, 1, 64, 64), torch.zeros(1, frames, 2), 6.0)


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0])
def test_without_gamma_it_is_the_loss_of_a_beta_vae(beta: float) -> None:
    logits, masks, m, v = batch()
    kl = kl_divergence(Independent(normal(m, v), 1), Independent(STANDARD.expand(m.shape), 1))  # type: ignore[no-untyped-call]
    log_likelihood = log_prob(Independent(Bernoulli(logits=logits), 3), masks.double())
    found = slowvae_terms(logits, masks, m, v, 6.0).loss(beta, 0.0)
    assert found.shape == (2,)
    # Of each pair, one frame has the standard normal prior.
    torch.testing.assert_close(found, 2 * (beta / 2 * kl - log_likelihood).mean(1), rtol=1e-12, atol=0)


def test_each_term_has_its_weight() -> None:
    terms = SlowVAETerms(*torch.tensor([[2.0, 20.0], [3.0, 30.0], [5.0, 50.0]]))
    assert terms.loss(7.0, 11.0).tolist() == [2 * 2 + 7 * 3 + 11 * 5, 10 * (2 * 2 + 7 * 3 + 11 * 5)]


def test_the_terms_bound_the_evidence_as_closely_as_the_posterior_is_true() -> None:
    """-log p(x_1, x_2) + KL(q(z_1) q(z_2) || p(z_1, z_2 | x_1, x_2)), on a grid for a linear decoder of one latent.

    For a pair, the mean of both orders in time: that is twice a frame's reconstruction and once each of the KLs. At the
    prior's kink the trapezoidal rule over steps of h is off by some h^2 lambda^2 / 12 = 4e-5.
    """
    h, rate = 0.02, 1.1
    z = torch.arange(-6, 6 + h / 2, h, dtype=torch.float64)
    slope, offset = 0.03 * randn(1, 64, 64), randn(1, 64, 64, seed=1) - 1
    logits, masks = offset + slope * z.reshape(-1, 1, 1, 1), bits(2, 1, 64, 64)
    nll = torch.stack([bernoulli_nll(logits, mask.expand_as(logits)) for mask in masks])
    log_prior = log_prob(STANDARD, z)[:, None] + log_prob(Laplace(z[:, None], 1 / rate), z)
    log_likelihood = -nll[0][:, None] - nll[1]
    log_joint = torch.stack([log_prior + log_likelihood, log_prior.T + log_likelihood]) + 2 * math.log(h)
    log_evidence = log_joint.logsumexp((1, 2), keepdim=True)
    for seed in range(10):
        m, v = randn(2, 2, seed=seed) * 0.5 - torch.tensor([[0.0], [1.0]])
        log_q = (-((z - m[:, None]) ** 2) / (2 * v.exp()[:, None])).log_softmax(1)
        log_both = log_q[0][:, None] + log_q[1]
        gap = (log_both.exp() * (log_both - log_joint + log_evidence)).sum((1, 2)).mean()
        assert gap > 0
        terms = slowvae_terms(logits[None, :2], masks[None], m[None, :, None], v[None, :, None], rate)
        bound = 2 * (log_q.exp() * nll).sum(1).mean() + terms.normal + terms.transition
        assert bound.item() == pytest.approx((gap - log_evidence.mean()).item(), rel=0, abs=1e-4)

"""Whitening as laws: mean 0 and covariance 1 of each seed, an affine map that a linear layer can hold."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch import Tensor

from ident3d.baselines import whitening
from ident3d.baselines.encoders import mlp_encoder
from ident3d.baselines.whitening import Whitening
from ident3d.errors import SpecError


def skewed(samples: int = 2000, dim: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Observations of three seeds, of different means and covariances."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(3, samples, dim, generator=g, dtype=torch.float64)
    mix = torch.randn(3, dim, dim, generator=g, dtype=torch.float64) * torch.logspace(-2, 1, dim)
    return (x @ mix + 10 * torch.randn(3, 1, dim, generator=g, dtype=torch.float64)).to(dtype)


def test_examples() -> None:
    results = doctest.testmod(whitening)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-2), (torch.float64, 1e-9)])
def test_mean_0_and_covariance_1(dtype: torch.dtype, atol: float) -> None:
    x = skewed(dtype=dtype)
    y = Whitening(x)(x)
    assert y.dtype == dtype
    for seed in y:
        torch.testing.assert_close(seed.mean(0), torch.zeros(4, dtype=dtype), atol=atol, rtol=0)
        torch.testing.assert_close(torch.cov(seed.T), torch.eye(4, dtype=dtype), atol=atol, rtol=0)


def test_it_is_the_symmetric_root() -> None:
    """Of all whitening maps the one nearest to the identity: C^(-1/2) is symmetric."""
    x = skewed(dtype=torch.float64)
    fixed = Whitening(x)
    torch.testing.assert_close(fixed.root, fixed.root.mT)
    for s in range(3):
        torch.testing.assert_close(torch.linalg.inv(fixed.root[s] @ fixed.root[s]), torch.cov(x[s].T))


def test_a_seed_is_whitened_by_its_own_observations() -> None:
    x = skewed()
    together = Whitening(x)(x)
    for s in range(3):
        alone = x[s : s + 1]
        torch.testing.assert_close(Whitening(alone)(alone)[0], together[s], rtol=1e-4, atol=1e-4)


def test_the_first_layer_of_an_encoder_can_hold_it() -> None:
    x = skewed(dtype=torch.float64)
    fixed = Whitening(x)
    encoder = mlp_encoder(4, 2, seeds=[0, 1, 2], widths=(3, 3)).double()
    expected = encoder(fixed(x)).detach()
    first = encoder.layers[0]
    with torch.no_grad():  # W R (x - m) + b = (W R) x + (b - W R m)
        weight, bias = first.get_parameter("weight"), first.get_parameter("bias")
        weight.copy_(weight @ fixed.root.mT)
        bias.sub_((weight @ fixed.mean.mT).squeeze(2))
    torch.testing.assert_close(encoder(x).detach(), expected)


def test_it_is_fixed_and_travels_with_the_state() -> None:
    x = skewed()
    fixed = Whitening(x)
    assert list(fixed.parameters()) == []
    assert set(fixed.state_dict()) == {"mean", "root"}
    other = Whitening(x.flip(0))
    other.load_state_dict(fixed.state_dict())
    assert torch.equal(other(x), fixed(x))
    inputs = x.clone().requires_grad_()
    fixed(inputs).square().sum().backward()
    assert inputs.grad is not None
    assert bool(inputs.grad.isfinite().all())


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_too_few_samples_are_refused(samples: int) -> None:
    with pytest.raises(SpecError, match=f"whitening from {samples} samples of 4 dimensions: expected more"):
        Whitening(skewed(samples))
    Whitening(skewed(5))


def test_observations_that_do_not_vary_are_refused() -> None:
    words = "the observations do not vary in some direction; train without it"
    x = skewed()
    for bad in (torch.ones_like(x), torch.cat([x[..., :3], x[..., :1]], -1)):
        with pytest.raises(SpecError, match=words):
            Whitening(bad)
    x[1, :, 2] = 0  # a single seed is enough
    with pytest.raises(SpecError, match=words):
        Whitening(x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_device_changes_nothing() -> None:
    x = skewed()
    there = Whitening(x.cuda())
    assert there.root.is_cuda
    assert torch.equal(there.root.cpu(), Whitening(x).root)

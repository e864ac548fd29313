"""SlowVAE's encoders and decoders side by side: codes, samples, seeds, training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ident3d.baselines.slowvae import SlowVAE, SlowVAETerms, slowvae_terms
from ident3d.datasets.silhouettes import make_silhouettes


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.3


def of(terms: SlowVAETerms) -> tuple[Tensor, Tensor, Tensor]:
    return terms.reconstruction, terms.normal, terms.transition


def silhouettes(pairs: int = 5) -> Tensor:
    """Synthetic masks (1, 2 pairs, 1, 64, 64): anchors, then the next frame of each."""
    sequences, _ = make_silhouettes(3, seed=1, frames=20)
    anchors = np.concatenate([sequence[:-1] for sequence in sequences])[:pairs]
    positives = np.concatenate([sequence[1:] for sequence in sequences])[:pairs]
    return torch.from_numpy(np.concatenate([anchors, positives])).reshape(1, -1, 1, 64, 64)


def model(dim: int) -> SlowVAE:
    """Of two seeds, with posteriors that differ from each other more than untrained ones do."""
    made = SlowVAE(dim, [0, 1])
    with torch.no_grad():
        for parameter in made.encoder.linear.parameters():
            parameter.mul_(20)
    return made


def test_shapes_and_codes() -> None:
    """Codes are the posteriors' means, the first half of the encoder's numbers."""
    vae, masks = model(4), bits(2, 6, 1, 64, 64)
    mean, log_variance = vae.posterior(masks)
    assert mean.shape == log_variance.shape == (2, 6, 4)
    assert torch.equal(torch.cat([mean, log_variance], -1), vae.encoder(masks))
    assert torch.equal(vae(masks), mean)
    assert vae.decode(mean).shape == masks.shape
    terms = vae.terms(masks, torch.zeros(2, 6, 4), 6.0)
    assert [x.shape for x in (*of(terms), terms.loss(1.0, 10.0))] == [(2,)] * 4


def test_what_is_decoded_is_a_sample_of_the_posterior() -> None:
    vae, masks, noise = model(3), bits(2, 4, 1, 64, 64), randn(2, 4, 3, dtype=torch.float32)
    given: list[Tensor] = []
    vae.decoder.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    terms = vae.terms(masks, noise, 2.0)
    mean, log_variance = vae.posterior(masks)
    assert float(log_variance.detach().abs().max()) > 0.3
    torch.testing.assert_close((given[0] - mean) / noise, log_variance.exp().sqrt(), rtol=1e-4, atol=1e-4)
    expected = slowvae_terms(vae.decode(given[0]), masks, mean, log_variance, 2.0)
    torch.testing.assert_close(of(terms), of(expected))
    vae.terms(masks, torch.zeros_like(noise), 2.0)
    assert torch.equal(given[-1], mean)


def test_what_training_calls_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, compiled = model(3), list[tuple[nn.Module, tuple[str, ...], dict[str, bool]]]()
    monkeypatch.setattr(nn.Module, "compile", lambda module, *args, **options: compiled.append((module, args, options)))
    vae.compile("some", dynamic=False)
    assert compiled == [(part, ("some",), {"dynamic": False}) for part in (vae.encoder, vae.decoder)]


def gradients(vae: SlowVAE) -> list[Tensor]:
    found = [parameter.grad for parameter in vae.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def test_a_seed_does_not_depend_on_those_beside_it() -> None:
    seeds, masks, noise = (4, 0, 11), bits(3, 4, 1, 64, 64), randn(3, 4, 3, dtype=torch.float32)
    together = SlowVAE(3, seeds)
    terms = together.terms(masks, noise, 6.0)
    terms.loss(1.0, 10.0).sum().backward()  # type: ignore[no-untyped-call]
    for k, seed in enumerate(seeds):
        alone = SlowVAE(3, [seed])
        for mine, ours in zip(alone.parameters(), together.parameters(), strict=True):
            assert torch.equal(mine[0], ours[k])
        own = alone.terms(masks[k : k + 1], noise[k : k + 1], 6.0)
        torch.testing.assert_close([x[0] for x in of(own)], [x[k] for x in of(terms)])
        own.loss(1.0, 10.0).sum().backward()  # type: ignore[no-untyped-call]
        for a, b in zip(gradients(alone), gradients(together), strict=True):
            assert bool(a.any())
            torch.testing.assert_close(a[0], b[k], rtol=1e-4, atol=1e-5)


def test_under_autocast_the_terms_are_float32() -> None:
    vae, masks, noise = model(3), silhouettes(3).repeat(2, 1, 1, 1, 1), randn(2, 6, 3, dtype=torch.float32)
    expected = vae.terms(masks, noise, 6.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = vae.terms(masks, noise, 6.0)
    for a, b in zip(of(found), of(expected), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.02, atol=0)  # bfloat16 has 8 bits, and errors of pixels add up


@pytest.mark.parametrize("gamma", [0.0, 10.0])
def test_training_lowers_the_loss_of_every_seed(gamma: float) -> None:
    masks = silhouettes().repeat(2, 1, 1, 1, 1)
    vae, generator = SlowVAE(3, [0, 1]), torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(vae.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        noise = torch.randn(2, masks.shape[1], 3, generator=generator)
        loss = vae.terms(masks, noise, 6.0).loss(1.0, gamma)
        losses.append(loss.detach())
        optimiser.zero_grad()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert bool((losses[-1] < 0.7 * losses[0]).all())

"""SlowVAE: a variational autoencoder of neighbouring frames whose latents move sparsely.

Klindt et al. 2021 (Towards Nonlinear Disentanglement in Natural Data with Temporal Sparse Coding, section 3 and
appendix), the state of the art that Zimmermann et al. 2021 compare with on KITTI Masks (table 3).

The model of two frames x_1, x_2 with latents z_1, z_2 in R^N is

    p(z_1) = Normal(0, I),   p(z_2 | z_1) = prod_i (lambda / 2) e^{-lambda |z_2i - z_1i|},   p(x | z) = Bernoulli,

and the posterior of each frame is q(z | x) = Normal(m(x), diag s(x)^2), independent of the other's. Its evidence lower
bound, with weights beta and gamma, is

    E_q[log p(x_1 | z_1) + log p(x_2 | z_2)] - beta KL(q(z_1) || p(z_1)) - gamma E_{q(z_1)} KL(q(z_2) || p(z_2 | z_1)).

The last term in closed form: KL(q || p) = -H(q) - E_q[log p], where H of a normal law is (1/2) log(2 pi e s^2) and

    -E[log p(z_2 | z_1)] = -log(lambda / 2) + lambda E|z_2 - z_1|    in each dimension.

Under both posteriors z_2 - z_1 is normal with mean d = m_2 - m_1 and variance v = s_1^2 + s_2^2, and the mean absolute
value of such a variable (the folded normal law) is sqrt(2 v / pi) e^{-d^2 / 2v} + d erf(d / sqrt(2 v)). So nothing is
sampled but what is decoded.

Both ways in time: the prior is symmetric, so either frame may be the first. The loss is the negative bound of a pair,
averaged over both orders: with terms that are means over the two frames,

    2 reconstruction + beta normal + gamma transition.

With gamma = 0 it is that of a beta-VAE (Higgins et al. 2017) whose weight is beta / 2, as one frame of the two has a
standard normal prior: beta = 2 makes it a plain VAE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional

from ident3d.baselines.mask_networks import MaskDecoder, MaskEncoder
from ident3d.errors import SpecError

__all__ = ["SlowVAE", "SlowVAETerms", "bernoulli_nll", "folded_mean", "normal_kl", "slowvae_terms", "transition_kl"]


def normal_kl(mean: Float[Tensor, "*shape"], log_variance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """KL(Normal(m, s^2) || Normal(0, 1)) = (m^2 + s^2 - 1 - log s^2) / 2 in nats, element by element.

    Args:
        mean: m.
        log_variance: log s^2.
    """
    # expm1: where s is near 1, s^2 - 1 would lose its digits.
    return 0.5 * (mean.square() + torch.expm1(log_variance) - log_variance)


def folded_mean(mean: Float[Tensor, "*shape"], variance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """E|d| of a normal variable d with this mean and variance (above 0), element by element."""
    ratio = mean / (2 * variance).sqrt()
    return (2 * variance / math.pi).sqrt() * torch.exp(-ratio.square()) + mean * torch.erf(ratio)


def transition_kl(
    mean: Float[Tensor, "*shape"],
    log_variance: Float[Tensor, "*shape"],
    mean_before: Float[Tensor, "*shape"],
    log_variance_before: Float[Tensor, "*shape"],
    rate: float,
) -> Float[Tensor, "*shape"]:
    """E over z' ~ Normal(m', s'^2) of KL(Normal(m, s^2) || Laplace(z', rate)) in nats, element by element.

    Args:
        mean: m, of the frame that is taken as the later one.
        log_variance: log s^2.
        mean_before: m', of its partner.
        log_variance_before: log s'^2.
        rate: lambda of the density (lambda / 2) e^{-lambda |z - z'|}, above 0.

    Raises:
        SpecError: a rate that is not above 0.
    """
    if not 0 < rate < math.inf:
        raise SpecError(f"rate = {rate!r}: expected a finite number above 0")
    moved = folded_mean(mean - mean_before, log_variance.exp() + log_variance_before.exp())
    entropy = 0.5 * (log_variance + math.log(2 * math.pi * math.e))
    return rate * moved - math.log(rate / 2) - entropy


def bernoulli_nll(
    logits: Float[Tensor, "*batch 1 64 64"], masks: Shaped[Tensor, "*batch 1 64 64"]
) -> Float[Tensor, "*batch"]:
    """-log p(x | z) in nats: summed over the pixels, each Bernoulli with the logits that were decoded.

    Args:
        logits: of the pixels; half precision is computed in float32.
        masks: 0 and 1, of any type.
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    each = functional.binary_cross_entropy_with_logits(wide, masks.to(wide.dtype), reduction="none")
    return each.sum((-3, -2, -1))


@dataclass(frozen=True)
class SlowVAETerms:
    """The terms of the loss, each (seeds,): means over the frames of a batch, in nats.

    Attributes:
        reconstruction: -log p(x | z).
        normal: KL to the standard normal, summed over the latents.
        transition: KL to the transition from the partner, summed over the latents.
    """

    reconstruction: Float[Tensor, " seeds"]
    normal: Float[Tensor, " seeds"]
    transition: Float[Tensor, " seeds"]

    def loss(self, beta: float, gamma: float) -> Float[Tensor, " seeds"]:
        """The negative evidence lower bound of a pair, averaged over both orders in time, weighted."""
        return 2 * self.reconstruction + beta * self.normal + gamma * self.transition


def slowvae_terms(
    logits: Float[Tensor, "seeds frames 1 64 64"],
    masks: Shaped[Tensor, "seeds frames 1 64 64"],
    mean: Float[Tensor, "seeds frames dim"],
    log_variance: Float[Tensor, "seeds frames dim"],
    rate: float,
) -> SlowVAETerms:
    """The terms of a batch of pairs.

    Args:
        logits: decoded from one sample of each frame's posterior.
        masks: the frames: all anchors, then all positives in the same order.
        mean, log_variance: of the posteriors.
        rate: of the transition prior.

    Raises:
        SpecError: an odd number of frames, or a rate that is not above 0.
    """
    if mean.shape[1] % 2:
        raise SpecError(f"{mean.shape[1]} frames: expected an even number, anchors and then their positives")
    # Each half's partners are the other half: both ways in time.
    mean_before, log_variance_before = (torch.cat(part.chunk(2, 1)[::-1], 1) for part in (mean, log_variance))
    return SlowVAETerms(
        bernoulli_nll(logits, masks).mean(1),
        normal_kl(mean, log_variance).sum(-1).mean(1),
        transition_kl(mean, log_variance, mean_before, log_variance_before, rate).sum(-1).mean(1),
    )


class SlowVAE(nn.Module):
    """Encoders and decoders of several seeds side by side.

    Args:
        dim: N, how many latents.
        seeds: one a pair of encoder and decoder.

    Attributes:
        encoder: masks to means and logarithms of variances.
        decoder: latents to logits of pixels.
    """

    def __init__(self, dim: int, seeds: Sequence[int]) -> None:
        super().__init__()
        self.dim = dim
        self.encoder = MaskEncoder(2 * dim, seeds=seeds)
        self.decoder = MaskDecoder(dim, seeds=seeds)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile encoder and decoder, which a training calls, in place of this module."""
        self.encoder.compile(*args, **options)
        self.decoder.compile(*args, **options)

    def posterior(
        self, masks: Shaped[Tensor, "seeds frames 1 64 64"]
    ) -> tuple[Float[Tensor, "seeds frames dim"], Float[Tensor, "seeds frames dim"]]:
        """Means and logarithms of variances of q(z | x)."""
        mean, log_variance = self.encoder(masks).split(self.dim, -1)
        return mean, log_variance

    def forward(self, masks: Shaped[Tensor, "seeds frames 1 64 64"]) -> Float[Tensor, "seeds frames dim"]:
        """The codes that are scored: the posteriors' means."""
        return self.posterior(masks)[0]

    def decode(self, z: Float[Tensor, "seeds frames dim"]) -> Float[Tensor, "seeds frames 1 64 64"]:
        """Logits of pixels."""
        logits: Tensor = self.decoder(z)
        return logits

    def terms(
        self,
        masks: Shaped[Tensor, "seeds frames 1 64 64"],
        noise: Float[Tensor, "seeds frames dim"],
        rate: float,
    ) -> SlowVAETerms:
        """The loss's terms of a batch of pairs.

        Args:
            masks: all anchors, then all positives in the same order.
            noise: standard normal, by which the posteriors are sampled.
            rate: of the transition prior.
        """
        mean, log_variance = self.posterior(masks)
        z = mean + (0.5 * log_variance).exp() * noise
        return slowvae_terms(self.decode(z), masks, mean, log_variance, rate)

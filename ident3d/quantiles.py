"""The symmetric laws of scale 1 on the real line, in float64: distribution function, its inverse, density.

    Normal        p(t) = exp(-t^2 / 2) / sqrt(2 pi)
    Laplace       p(t) = exp(-|t|) / 2
    generalised   p(t) = exp(-|t|^beta) beta / (2 Gamma(1 / beta))

Everything is computed on the negative half, where the distribution function is small and keeps its relative precision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["GeneralizedNormalLaw", "LaplaceLaw", "NormalLaw", "StandardLaw"]

MAX_STEPS = 100
"""Newton's method takes 5 to 12 steps; with bisection as its fall-back it ends within 60."""


class StandardLaw(ABC):
    """A symmetric law of scale 1. Arguments and results are float tensors of one shape."""

    @abstractmethod
    def cdf(self, t: Tensor) -> Tensor:
        """P(T <= t); relative precision for t < 0."""

    @abstractmethod
    def quantile(self, p: Tensor) -> Tensor:
        """The t with P(T <= t) = p, for p in (0, 1)."""

    @abstractmethod
    def log_density(self, t: Tensor) -> Tensor:
        """log p(t)."""


class NormalLaw(StandardLaw):
    """The standard normal law."""

    def cdf(self, t: Tensor) -> Tensor:
        """P(T <= t)."""
        # erfc, unlike torch.special.ndtr, keeps its relative precision far out.
        return torch.erfc(-t / math.sqrt(2)) / 2

    def quantile(self, p: Tensor) -> Tensor:
        """The inverse of `cdf`."""
        t: Tensor = torch.special.ndtri(p)
        return t

    def log_density(self, t: Tensor) -> Tensor:
        """log p(t)."""
        return -0.5 * t**2 - 0.5 * math.log(2 * math.pi)


class LaplaceLaw(StandardLaw):
    """The Laplace law of scale 1 (variance 2)."""

    def cdf(self, t: Tensor) -> Tensor:
        """P(T <= t)."""
        tail = 0.5 * torch.exp(-t.abs())
        return torch.where(t < 0, tail, 1 - tail)

    def quantile(self, p: Tensor) -> Tensor:
        """The inverse of `cdf`."""
        return torch.where(p < 0.5, torch.log(2 * p), -torch.log(2 * (1 - p)))

    def log_density(self, t: Tensor) -> Tensor:
        """log p(t)."""
        return -t.abs() - math.log(2)


class GeneralizedNormalLaw(StandardLaw):
    """The generalised normal law of scale 1: |T|^beta has the Gamma(1 / beta) law.

    Args:
        beta: the power, above 0; 1 is the Laplace law, 2 the normal law of variance 1/2.
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.log_norm = math.lgamma(1 + 1 / beta)

    def _power(self, s: Tensor) -> Tensor:
        """s^beta. torch.pow rounds differently in and outside of its vectors, so a value would depend on its place."""
        return torch.exp(self.beta * torch.log(s))

    def _tail(self, s: Tensor) -> Tensor:
        """P(|T| > s) for s >= 0. Near 0, where s^beta underflows, the density is flat."""
        power = self._power(s)
        tail = torch.igammac(torch.full_like(s, 1 / self.beta), power)
        return torch.where(power < torch.finfo(s.dtype).eps / 16, 1 - s * math.exp(-self.log_norm), tail)

    def cdf(self, t: Tensor) -> Tensor:
        """P(T <= t)."""
        tail = 0.5 * self._tail(t.abs())
        return torch.where(t < 0, tail, 1 - tail)

    def quantile(self, p: Tensor) -> Tensor:
        """The inverse of `cdf`: Newton's method on log P(|T| > s) = log q, kept in a bracket by bisection.

        The start lies below the root since P(|T| <= s) <= s / Gamma(1 + 1 / beta). The bracket's upper end is
        Chernoff's bound on the tail of a Gamma law.
        """
        q = 2 * torch.minimum(p, 1 - p)
        low = torch.zeros_like(q)
        high = (4 / self.beta - 2 * torch.log(q)) ** (1 / self.beta)
        s = torch.minimum((1 - q) * math.exp(self.log_norm), high)
        precision = 512 * torch.finfo(q.dtype).eps
        settled = torch.zeros_like(q, dtype=torch.bool)
        for _ in range(MAX_STEPS):
            tail = self._tail(s)
            low, high = torch.where(tail >= q, s, low), torch.where(tail <= q, s, high)
            slope = torch.exp(-self._power(s) - self.log_norm)
            following = s + torch.log(tail / q) * tail / slope
            inside = (following >= low) & (following <= high)  # False for NaN, where the tail underflows
            following = torch.where(inside, following, (low + high) / 2)
            # What has settled stays, so that no value depends on what else is in the batch.
            following = torch.where(settled, s, following)
            settled |= (following - s).abs() <= precision * (1 + following)
            s = following
            if bool(settled.all()):
                break
        return torch.where(p < 0.5, -s, s)

    def log_density(self, t: Tensor) -> Tensor:
        """log p(t)."""
        return -self._power(t.abs()) - math.log(2) - self.log_norm

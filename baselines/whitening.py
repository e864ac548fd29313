"""A fixed affine map that whitens observations before an encoder."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ident3d.errors import SpecError

__all__ = ["Whitening"]


class Whitening(nn.Module):
    """x -> C^(-1/2) (x - m), of each seed by the mean m and covariance C of its own observations.

    Deep layers of leaky ReLUs learn slowest along the directions of least variance, which a mixing makes small. The
    map is fixed before training; an encoder's first linear layer could hold it, so the set of functions stays the same.

    Args:
        x: observations (seeds, samples, dim), more samples than dimensions.

    Raises:
        SpecError: too few samples, or observations that do not vary in some direction.

    Example:
        >>> x = torch.randn(1, 1000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.1])
        >>> torch.cov(Whitening(x)(x)[0].T).diagonal()
        tensor([1.0000, 1.0000, 1.0000])
    """

    mean: Tensor
    root: Tensor

    def __init__(self, x: Float[Tensor, "seeds samples dim"]) -> None:
        super().__init__()
        _, samples, dim = x.shape
        if samples <= dim:
            raise SpecError(f"whitening from {samples} samples of {dim} dimensions: expected more samples")
        # On the CPU in float64: a device may have neither float64 nor eigh.
        wide = x.detach().cpu().double()
        mean = wide.mean(1, keepdim=True)
        covariance = (wide - mean).mT @ (wide - mean) / (samples - 1)
        values, vectors = torch.linalg.eigh(covariance)
        if not bool((values > 1e-12 * values[:, -1:]).all()):
            raise SpecError("whitening: the observations do not vary in some direction; train without it")
        root = vectors @ (values.rsqrt().unsqueeze(2) * vectors.mT)
        self.register_buffer("mean", mean.to(x))
        self.register_buffer("root", root.to(x))

    def forward(self, x: Float[Tensor, "seeds batch dim"]) -> Float[Tensor, "seeds batch dim"]:
        """Whitened observations."""
        # In half precision, what it raises would be noise.
        with torch.autocast(x.device.type, enabled=False):
            return torch.bmm(x - self.mean, self.root)

"""Encoders f that learn to invert a mixing, and what shapes their outputs into a space.

(a) Settings of the paper (Zimmermann et al. 2021, section A.3): six hidden layers of N * (10, 50, 50, 50, 50, 10)
units, leaky ReLU of slope 0.01, then N outputs, which `ident3d.baselines.outputs` brings into a space.

Several encoders, one a seed, stand in one batch: tensors are (seeds, batch, dim).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ident3d.baselines.mixing import check_batch, check_seeds, check_slope
from ident3d.baselines.outputs import (
    BoxOutput,
    OutputNormalisation,
    ProductOutput,
    SphereOutput,
    Unbounded,
    output_normalisation,
)
from ident3d.checks import one_of, whole
from ident3d.datasets.batches import generator_of
from ident3d.errors import SpecError

__all__ = [
    "BatchedLinear",
    "BoxOutput",
    "MLPEncoder",
    "OutputNormalisation",
    "ProductOutput",
    "SphereOutput",
    "Unbounded",
    "mlp_encoder",
    "output_normalisation",
]

Init = Literal["torch", "he"]

WIDTHS = (10, 50, 50, 50, 50, 10)
"""Units of the hidden layers in multiples of the inputs (section A.3)."""


class BatchedLinear(nn.Module):
    """Linear layers of several seeds side by side: y = W x + b, of each seed by its own W (out, in) and b.

    Initial weights by `init`, where n is `dim_in`:
        "torch": W and b uniform in +-1 / sqrt(n), as torch.nn.Linear has them.
        "he": W normal of variance 2 / (n (1 + slope^2)), b = 0 (He et al. 2015, section 2.2): the variance of y is that
            of the values before the leaky ReLU that x has passed.

    A seed's weights are a function of (seed, key, init, dim_in, dim_out, slope) alone, whatever other seeds.

    Args:
        dim_in: inputs, at least 1.
        dim_out: outputs, at least 1.
        seeds: one a layer, each at least 0.
        key: the layer's name among those of a network, so that each has weights of its own.
        init: "torch" or "he".
        slope: for "he", of the leaky ReLU that the inputs have passed; 1 if they have passed none.

    Attributes:
        weight: the parameter (seeds, out, in).
        bias: the parameter (seeds, out).

    Raises:
        SpecError: a value out of range, no seed, or a seed twice.
    """

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        seeds: Sequence[int],
        key: object = "linear",
        init: Init = "torch",
        slope: float = 1.0,
    ) -> None:
        super().__init__()
        self.dim_in, self.dim_out = whole("dim_in", dim_in, 1), whole("dim_out", dim_out, 1)
        one_of("init", init, get_args(Init))
        seeds, std = check_seeds(seeds), math.sqrt(2 / (dim_in * (1 + check_slope(slope) ** 2)))
        weights = torch.empty(len(seeds), dim_out, dim_in, dtype=torch.float32)
        biases = torch.zeros(len(seeds), dim_out, dtype=torch.float32)
        for seed, w, b in zip(seeds, weights, biases, strict=True):
            generator = generator_of("weights", key, seed)
            if init == "he":
                w.normal_(0, std, generator=generator)
                continue
            for drawn in (w, b):
                drawn.uniform_(-1 / math.sqrt(dim_in), 1 / math.sqrt(dim_in), generator=generator)
        self.weight, self.bias = nn.Parameter(weights), nn.Parameter(biases)

    def forward(self, x: Float[Tensor, "seeds batch in"]) -> Float[Tensor, "seeds batch out"]:
        """Outputs of each seed's layer.

        Raises:
            SpecError: another shape.
        """
        check_batch(x, self.weight.shape[0], self.dim_in)
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)
        layers = zip(x.unbind(), self.weight.unbind(), self.bias.unbind(), strict=True)
        return torch.stack([_linear_on_cpu(*layer) for layer in layers])


def _linear_on_cpu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """W x + b for rows of x, as a convolution over a picture of one row whose pixels are the batch.

    torch has MKL multiply matrices and oneDNN convolve. On an AMD processor (Zen 5), oneDNN's 1 x 1 convolution is
    twice as fast as MKL's product, forward and backward, and 2.6 times as fast as its batched product.
    """
    pixels = x.unsqueeze(0).unsqueeze(0).permute(0, 3, 1, 2)
    y = functional.conv2d(pixels, w.unsqueeze(-1).unsqueeze(-1), b)
    return y.permute(0, 2, 3, 1).reshape(len(x), len(w))


class MLPEncoder(nn.Module):
    """Encoders f of several seeds: linear layers with leaky ReLUs between them, then an output normalisation.

    Args:
        layers: linear layers that fit each other, at least one.
        output: what follows the last of them, of as many dimensions and seeds.
        slope: of the leaky ReLUs, above 0.

    Raises:
        SpecError: no layer, an output that does not fit the last one, or a slope out of range.
    """

    def __init__(self, layers: Sequence[BatchedLinear], output: OutputNormalisation, *, slope: float = 0.01) -> None:
        super().__init__()
        if not layers:
            raise SpecError("layers = []: expected at least one")
        seeds, dim = layers[-1].bias.shape
        if (output.dim, output.seeds) != (dim, seeds):
            raise SpecError(f"output of dim {output.dim}, seeds {output.seeds}: expected dim {dim}, seeds {seeds}")
        self.layers, self.output, self.slope = nn.ModuleList(layers), output, check_slope(slope)

    def forward(self, x: Float[Tensor, "seeds batch in"]) -> Float[Tensor, "seeds batch latents"]:
        """Representations f(x) in the output's space. Another shape is refused with a SpecError."""
        *hidden, last = self.layers
        y = x
        for layer in hidden:
            y = functional.leaky_relu(layer(y), self.slope)
        # In half precision a representation would be known to some percent of its space, a step of the pairs.
        with torch.autocast(x.device.type, enabled=False):
            representations: Tensor = self.output(last(y.to(last.get_parameter("weight").dtype)))
        return representations


def mlp_encoder(
    dim_in: int,
    dim_out: int,
    *,
    seeds: Sequence[int],
    widths: Sequence[int] = WIDTHS,
    slope: float = 0.01,
    init: Init = "torch",
    output: OutputNormalisation | None = None,
    device: torch.device | str | None = None,
) -> MLPEncoder:
    """Encoders with the initial weights of each seed. The defaults are (a) the settings of the paper (section A.3).

    Args:
        dim_in: observed numbers, at least 1.
        dim_out: representations' dimensions, at least 1.
        seeds: one an encoder, each at least 0.
        widths: units of the hidden layers in multiples of `dim_in`; none for a linear map.
        slope: of the leaky ReLUs, above 0.
        init: of the weights: "torch" or "he"; see `BatchedLinear`.
        output: the output normalisation, made for as many seeds; `Unbounded` if None.
        device: where the encoders and their output go.

    Raises:
        SpecError: a value out of range, no seed, a seed twice, or an output that does not fit.
    """
    units = [whole("dim_in", dim_in, 1), *(dim_in * whole("width", w, 1) for w in widths), whole("dim_out", dim_out, 1)]
    passed = [1.0, *[slope] * len(widths)]
    seeds = check_seeds(seeds)
    output = Unbounded(dim_out, len(seeds)) if output is None else output
    layers = [
        BatchedLinear(a, b, seeds=seeds, key=f"encoder/{k}", init=init, slope=passed[k])
        for k, (a, b) in enumerate(itertools.pairwise(units))
    ]
    return MLPEncoder(layers, output, slope=slope).to(device)

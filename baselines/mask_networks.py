"""The convolutional networks of KITTI Masks: SlowVAE's encoder and its mirror, of several seeds side by side.

Klindt et al. 2021 (table of architectures in the appendix), after Burgess et al. 2018; Zimmermann et al. 2021, section
A.3: convolutions of 32, 32, 64, 64 and 256 channels with kernels of 4 x 4, the first four of stride 2, ReLU after each,
and a linear layer to the codes. Masks are 64 x 64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional

from ident3d.baselines.encoders import BatchedLinear
from ident3d.baselines.mixing import check_seeds
from ident3d.baselines.outputs import OutputNormalisation
from ident3d.checks import whole
from ident3d.datasets.batches import generator_of
from ident3d.datasets.silhouettes import SIDE
from ident3d.errors import SpecError

__all__ = ["MaskDecoder", "MaskEncoder", "SeedConv"]

KERNEL = 4
CHANNELS = (1, 32, 32, 64, 64, 256)


class SeedConv(nn.Module):
    """A convolution of each seed, or a transposed one, with kernels of 4 x 4.

    Initial weights and biases are uniform in +-1 / sqrt(n), n the inputs of an output (of a transposed one, the outputs
    of an input), as torch's layers have them; a seed's are a function of (seed, key, shape) alone.

    Args:
        dim_in: channels of the input.
        dim_out: channels of the output.
        seeds: one a convolution.
        key: the layer's name among those of a network.
        stride: 2 for half (or twice) the size, with a padding of 1; 1 for no padding.
        transposed: whether it is the transposed one.

    Attributes:
        weight: the parameter (seeds, out, in, 4, 4), or (seeds, in, out, 4, 4) if transposed.
        bias: the parameter (seeds, out).
    """

    def __init__(
        self, dim_in: int, dim_out: int, *, seeds: Sequence[int], key: str, stride: int, transposed: bool = False
    ) -> None:
        super().__init__()
        self.stride, self.padding, self.transposed = stride, 1 if stride == 2 else 0, transposed
        shape = (dim_in, dim_out) if transposed else (dim_out, dim_in)
        bound = 1 / math.sqrt(shape[1] * KERNEL**2)
        weight = torch.empty(len(seeds), *shape, KERNEL, KERNEL, dtype=torch.float32)
        bias = torch.empty(len(seeds), dim_out, dtype=torch.float32)
        for seed, *drawn in zip(seeds, weight, bias, strict=True):
            generator = generator_of("weights", key, seed)
            for values in drawn:
                values.uniform_(-bound, bound, generator=generator)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def each(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of each seed."""
        return list(zip(self.weight.unbind(), self.bias.unbind(), strict=True))

    def grouped(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of all seeds as groups of one convolution."""
        return self.weight.flatten(0, 1), self.bias.flatten()

    def forward(self, x: Tensor, parameters: tuple[Tensor, Tensor], groups: int) -> Tensor:
        """The convolution by given parameters, (batch, groups * channels, height, width) to the same."""
        if self.transposed:
            return functional.conv_transpose2d(x, *parameters, self.stride, self.padding, groups=groups)
        return functional.conv2d(x, *parameters, self.stride, self.padding, groups=groups)


def _channels_last(x: Tensor) -> Tensor:
    """The order of memory that convolutions on the CPU are fastest in, and half precision on a GPU.

    Of one channel or one pixel torch's own `contiguous` sees no difference between the orders, and the layers to come
    would go on in the other.
    """
    _, c, h, w = x.shape
    if c == 1 or h == w == 1:
        return x.contiguous().as_strided(x.shape, (c * h * w, 1, w * c, c))
    return x.contiguous(memory_format=torch.channels_last)


def _run(layers: Sequence[SeedConv], x: Tensor, parameters: Sequence[tuple[Tensor, Tensor]], groups: int) -> Tensor:
    """Layers with ReLU between them."""
    x = _channels_last(x)
    for k, (layer, own) in enumerate(zip(layers, parameters, strict=True)):
        x = layer(x if k == 0 else x.relu_(), own, groups)
    return x


def side_by_side(layers: Sequence[SeedConv], x: Float[Tensor, "seeds batch c h w"]) -> Tensor:
    """Layers of several seeds on the inputs of each, (seeds, batch, channels, height, width)."""
    if x.device.type == "cpu":
        # Here groups of one convolution take 1.6 times as long as one seed after the other.
        each = zip(*(layer.each() for layer in layers), strict=True)
        return torch.stack([_run(layers, part, own, 1) for part, own in zip(x, each, strict=True)])
    y = _run(layers, x.transpose(0, 1).flatten(1, 2), [layer.grouped() for layer in layers], len(x))
    return y.reshape(len(y), len(x), -1, *y.shape[2:]).transpose(0, 1)


class MaskEncoder(nn.Module):
    """f: masks to codes.

    The last layer and the output are computed in float32 whatever the rest is: bfloat16 tells 256 places of the unit
    interval apart.

    Args:
        dim_out: how many numbers a mask gets.
        seeds: one an encoder, each at least 0.
        output: the output normalisation, made for as many seeds; none for the numbers as they are.

    Raises:
        SpecError: no seed, a seed twice, or an output that does not fit.
    """

    def __init__(self, dim_out: int, *, seeds: Sequence[int], output: OutputNormalisation | None = None) -> None:
        super().__init__()
        seeds, dim_out = check_seeds(seeds), whole("dim_out", dim_out, 1)
        if output is not None and (output.dim, output.seeds) != (dim_out, len(seeds)):
            raise SpecError(
                f"output of dim {output.dim}, seeds {output.seeds}: expected dim {dim_out}, seeds {len(seeds)}"
            )
        self.convolutions = nn.ModuleList(
            SeedConv(a, b, seeds=seeds, key=f"masks/encoder/{k}", stride=1 if b == CHANNELS[-1] else 2)
            for k, (a, b) in enumerate(itertools.pairwise(CHANNELS))
        )
        self.linear = BatchedLinear(CHANNELS[-1], dim_out, seeds=seeds, key="masks/encoder/linear")
        self.output = output

    def forward(self, masks: Shaped[Tensor, "seeds batch 1 64 64"]) -> Float[Tensor, "seeds batch codes"]:
        """Codes of masks of 0 and 1, of any type.

        Raises:
            SpecError: another shape.
        """
        if masks.ndim != 5 or masks.shape[0] != len(self.linear.bias) or masks.shape[2:] != (1, SIDE, SIDE):
            raise SpecError(
                f"masks of shape {tuple(masks.shape)}: expected ({len(self.linear.bias)}, batch, 1, {SIDE}, {SIDE})"
            )
        x = masks.to(self.linear.weight.dtype)
        hidden = side_by_side(list(self.convolutions), x).flatten(2).relu()  # type: ignore[arg-type]
        with torch.autocast(masks.device.type, enabled=False):
            codes: Tensor = self.linear(hidden.to(self.linear.weight.dtype))
            return codes if self.output is None else self.output(codes)


class MaskDecoder(nn.Module):
    """The encoder's mirror: latents to logits of pixels.

    Args:
        dim_in: how many latents.
        seeds: one a decoder, each at least 0.

    Raises:
        SpecError: no seed, or a seed twice.
    """

    def __init__(self, dim_in: int, *, seeds: Sequence[int]) -> None:
        super().__init__()
        seeds, channels = check_seeds(seeds), CHANNELS[::-1]
        self.linear = BatchedLinear(dim_in, channels[0], seeds=seeds, key="masks/decoder/linear")
        self.convolutions = nn.ModuleList(
            SeedConv(
                *(a, b), seeds=seeds, key=f"masks/decoder/{k}", stride=1 if a == CHANNELS[-1] else 2, transposed=True
            )
            for k, (a, b) in enumerate(itertools.pairwise(channels))
        )

    def forward(self, z: Float[Tensor, "seeds batch latents"]) -> Float[Tensor, "seeds batch 1 64 64"]:
        """Logits. Another shape is refused with a SpecError."""
        hidden: Tensor = self.linear(z).relu()
        return side_by_side(list(self.convolutions), hidden[..., None, None])  # type: ignore[arg-type]

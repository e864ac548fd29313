"""The encoder of pictures: a network of torchvision with N * 10 outputs, leaky ReLU, a linear layer to N, and the model
space (Zimmermann et al. 2021, section A.3).
"""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ident3d.baselines.batch_norm import frozen_statistics
from ident3d.baselines.outputs import OutputNormalisation, output_normalisation
from ident3d.baselines.threedident_settings import Encoding
from ident3d.datasets.batches import generator_of
from ident3d.datasets.serving import Statistics
from ident3d.errors import SpecError

__all__ = ["PictureEncoder", "encode_in_chunks", "picture_encoder"]

WIDTH = 10
"""Outputs of the network, in multiples of N."""


class PictureEncoder(nn.Module):
    """f: uint8 pictures (n, 3, H, W) to representations, float32 (n, dim).

    Pictures are normalised by the mean and standard deviation that it holds, so that a checkpoint needs nothing else.
    The last layer and the model space are computed in float32 whatever the rest is, since bfloat16 tells 256 places of
    the unit interval apart.

    Args:
        network: a classifier with `WIDTH * dim` outputs.
        output: what brings the outputs into the model space; its `dim` is N.
        statistics: mean and std of the training pictures' pixels, per channel, in [0, 1].
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, output: OutputNormalisation, statistics: Statistics) -> None:
        super().__init__()
        for name, values in zip(("mean", "std"), statistics, strict=True):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).reshape(1, 3, 1, 1))
        self.network, self.output = network, output
        self.linear = nn.Linear(WIDTH * output.dim, output.dim)

    def forward(self, pictures: Tensor) -> Tensor:
        """Representations, (n, dim).

        Raises:
            TypeError: a network with several outputs.
        """
        x = ((pictures / 255 - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        hidden = self.network(x)
        if not isinstance(hidden, Tensor):
            raise TypeError(f"it gives a {type(hidden).__name__}, not a tensor")
        with torch.autocast(pictures.device.type, enabled=False):
            y = self.linear(nn.functional.leaky_relu(hidden.float()))
            f: Tensor = self.output(y)
        return f


def picture_encoder(encoding: Encoding, dim: int, *, statistics: Statistics, side: int, seed: int) -> PictureEncoder:
    """An encoder with its initial weights, on the CPU.

    Args:
        encoding: which.
        dim: N, how many factors.
        statistics: mean and std of the training pictures' pixels, per channel, in [0, 1].
        side: of the pictures, in pixels.
        seed: what the weights are drawn from.

    Raises:
        SpecError: torchvision has no such classifier, or it does not take pictures of this size.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if encoding.network not in known:
        raise SpecError(
            f"encoder = {encoding.network!r}: expected a classifier of torchvision {torchvision.__version__}, such as "
            f"resnet18, resnet50 or convnext_tiny; it has {len(known)}: torchvision.models.list_models()"
        )
    output = output_normalisation(
        encoding.space, dim, magnitude=encoding.magnitude, parametrisation=encoding.parametrisation
    )
    # torchvision draws initial weights from the global generator, which is put back.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of how some will be initialised one day
        torch.default_generator.manual_seed(generator_of("encoder", seed).initial_seed())
        network = torchvision.models.get_model(encoding.network, weights=None, num_classes=WIDTH * dim)
        encoder = PictureEncoder(network, output, statistics)
        _check_side(encoder, encoding.network, side)
    return encoder.to(memory_format=torch.channels_last)


def _check_side(encoder: PictureEncoder, name: str, side: int) -> None:
    """Refuse a network that does not map pictures of a size to one tensor.

    Raises:
        SpecError: it does not.
    """
    trial = copy.deepcopy(encoder)  # whose averages may move
    pictures = torch.zeros(2, 3, side, side, dtype=torch.uint8)
    for training in (False, True):
        try:
            with torch.no_grad():
                trial.train(training)(pictures)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SpecError(
                f"encoder = {name!r} does not encode pictures of {side} x {side} px ({why}); expected one whose output "
                "is one tensor, and that takes this size: resnet18 does"
            ) from None


def encode_in_chunks(encoder: nn.Module, x: Tensor, positive: Tensor, chunk: int | None) -> tuple[Tensor, Tensor]:
    """Representations of pairs, with gradients but with the activations of one chunk at a time.

    Those of a chunk are computed again in the backward pass. The loss sees all representations at once, and so all
    negatives (gradient caching, Gao et al. 2021, arXiv 2101.06983).

    Args:
        encoder: maps pictures to representations.
        x: the anchors' pictures (n, 3, H, W).
        positive: the positives'.
        chunk: pairs at once; None for all, with nothing computed twice.

    Returns:
        Representations of anchors and positives, both (n, dim).
    """
    if chunk is None or chunk >= len(x):
        first, second = encoder(torch.cat([x, positive])).chunk(2)
        return first, second
    pieces = [
        checkpoint(encoder, torch.cat(pair), use_reentrant=False, context_fn=lambda: _once(encoder)).chunk(2)
        for pair in zip(torch.split(x, chunk), torch.split(positive, chunk), strict=True)
    ]
    anchors, positives = zip(*pieces, strict=True)
    return torch.cat(anchors), torch.cat(positives)


def _once(encoder: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first pass, and of the second, which must not count in batch normalisation's averages again."""
    return nullcontext(), frozen_statistics(encoder)

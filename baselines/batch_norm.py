"""Batch normalisation (Ioffe and Szegedy 2015, arXiv 1502.03167) over the batches of all ranks, and with its running
statistics held still.

For the C channels of x of shape (N, C, ...), y = (x - mean) / sqrt(var + eps) * weight + bias, where mean and variance
are those over all but the channels. Over ranks r with n_r values a channel, they come of the ranks' own (Chan, Golub
and LeVeque 1983, equation 2.1):

    mean = sum_r n_r mean_r / n,    n var = sum_r (n_r var_r + n_r (mean_r - mean)^2).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ident3d.baselines.ranks import world_size
from ident3d.errors import SpecError

__all__ = ["GlobalBatchNorm", "frozen_statistics", "global_batch_norm"]


class GlobalBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d and 3d, in training with the mean and variance of all ranks' batches together.

    It is nn.SyncBatchNorm for the CPU, which that refuses. Options, state and evaluation are those of nn.BatchNorm2d,
    and so is all else where there is one rank. Batches may be of other sizes on other ranks, and empty. Forward and
    backward each exchange 2 C numbers, so that all ranks take both, and take their layers in the same order.

    Statistics of float16 and bfloat16 are computed in float32. Running variances are unbiased over all ranks' values.
    Derivatives are of first order.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise SpecError(
                f"a batch of shape {tuple(input.shape)}: expected (batch, {self.num_features}, ...), as the layer has "
                f"{self.num_features} channels"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch.

        Args:
            input: (batch, channels, ...).

        Returns:
            Of the same shape, dtype and memory format.

        Raises:
            SpecError: another shape, or a single value a channel over all ranks.
        """
        self._check_input_dim(input)
        if not self.training or world_size() == 1:
            return super().forward(input)
        return self._over_ranks(input)

    def _over_ranks(self, x: Tensor) -> Tensor:
        mean, squares, count = _statistics(x)
        if count < 2:
            raise SpecError(f"a batch of {count} values a channel over all ranks: expected more than 1 in training")
        self._track(mean, squares / (count - 1))
        wide = torch.promote_types(x.dtype, torch.float32)
        inverse = (squares / count + self.eps).rsqrt()
        y: Tensor = _Normalise.apply(x, self.weight, self.bias, mean.to(wide), inverse.to(wide), count)
        return y

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Let the running statistics follow, as nn.BatchNorm2d's do."""
        if not self.track_running_stats:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1 / float(self.num_batches_tracked)
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None and factor is not None:
                running.mul_(1 - factor).add_(now, alpha=factor)


def _shaped(values: Tensor, x: Tensor) -> Tensor:
    """(C,) as what broadcasts over (N, C, ...)."""
    return values.view(1, -1, *[1] * (x.ndim - 2))


def _over(x: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [k for k in range(x.ndim) if k != 1]


@torch.no_grad()
def _statistics(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Of all ranks: the mean (C,) and the sum of squares about it (C,), in float64, and how many values a channel has.

    The ranks' numbers are gathered, not summed: means have to be known before the squares about their mean.
    """
    channels, own_count = x.shape[1], x.numel() // x.shape[1]
    # An empty batch has no mean; as 0 it counts for nothing below.
    rough = x.sum(_over(x), dtype=torch.promote_types(x.dtype, torch.float32)) / max(own_count, 1)
    centred = x - _shaped(rough, x)
    # What rounding left of the mean: where that is large, it would be seen in the variance.
    rest = centred.sum(_over(x)).double() / max(own_count, 1)
    squares = centred.square_().sum(_over(x)).double() - own_count * rest.square()
    own = torch.cat([rough + rest, squares, rest.new_tensor([own_count])])
    pieces = [torch.empty_like(own) for _ in range(world_size())]
    distributed.all_gather(pieces, own)
    means, squares, counts = torch.split(torch.stack(pieces), [channels, channels, 1], 1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return mean, (squares + counts * (means - mean).square()).sum(0), int(count)


class _Normalise(torch.autograd.Function):
    """y of the statistics given; backward takes into account that these depend on the x of all ranks.

    With x^ = (x - mean) * inverse and g = dL/dy, where L is the sum of the ranks' losses and E the mean over all ranks'
    values: dL/dx = (g - E g - x^ E(g x^)) * inverse * weight (Ioffe and Szegedy 2015, section 3). Gradients of weight
    and bias are this rank's, as those of other parameters are.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, count: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.bias_dtype = count, None if bias is None else bias.dtype
        y = (x - _shaped(mean, x)).mul_(_shaped(inverse if weight is None else inverse * weight, x))
        if bias is not None:
            y.add_(_shaped(bias, x))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        normalised = (x - _shaped(mean, x)).mul_(_shaped(inverse, x))
        sums = torch.stack([grad.sum(_over(x), dtype=mean.dtype), (grad * normalised).sum(_over(x))])
        grad_weight = None if weight is None else sums[1].to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            means = sums.clone()
            distributed.all_reduce(means)
            means /= ctx.count
            grad_x = grad - _shaped(means[0], x) - normalised.mul_(_shaped(means[1], x))
            grad_x = grad_x.mul_(_shaped(inverse if weight is None else inverse * weight, x)).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def global_batch_norm(module: nn.Module) -> nn.Module:
    """Replace batch normalisation by one with the statistics of all ranks' batches.

    Parameters, buffers and the names of the state stay, so that checkpoints fit before and after. Call it before
    module.compile(). Hooks on the layers themselves are not taken along, as by torch.

    Args:
        module: its nn.BatchNorm1d, 2d and 3d are replaced: by nn.SyncBatchNorm where the module lies on CUDA, else by
            `GlobalBatchNorm`. Move it to its device first.

    Returns:
        The module itself; or what replaces it, if it is such a layer.

    Raises:
        SpecError: a batch normalisation of another class, lazy ones too; nothing is replaced then.
    """
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and not isinstance(m, _GLOBAL)]
    for layer in layers:
        if type(layer) not in plain:
            raise SpecError(
                f"a {type(layer).__name__}: expected nn.BatchNorm1d, 2d or 3d, whose statistics can be those of all "
                "ranks; a lazy one becomes one with its first batch"
            )
    on_cuda = any(tensor.is_cuda for tensor in chain(module.parameters(), module.buffers()))
    made: dict[nn.Module, nn.Module] = {layer: _synced(layer) if on_cuda else _global(layer) for layer in layers}
    # Torch's own conversion of a whole module leaves out a layer's second name.
    for path, child in list(module.named_modules(remove_duplicate=False)):
        if path and child in made:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, made[child])
    return made.get(module, module)


_GLOBAL = (nn.SyncBatchNorm, GlobalBatchNorm)


def _synced(layer: _BatchNorm) -> _BatchNorm:
    made: _BatchNorm = nn.SyncBatchNorm.convert_sync_batchnorm(layer)  # type: ignore[no-untyped-call]
    return made


def _global(layer: _BatchNorm) -> _BatchNorm:
    made = GlobalBatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    if layer.affine:
        made.weight, made.bias = layer.weight, layer.bias
    made.running_mean, made.running_var = layer.running_mean, layer.running_var
    made.num_batches_tracked = layer.num_batches_tracked
    return made.train(layer.training)


def frozen_statistics(module: nn.Module) -> AbstractContextManager[None]:
    """Within, batch normalisation in training mode normalises by its batch, but its running statistics stay.

    For activations that are computed a second time, whose batch would count twice otherwise: as the second of the
    contexts that torch.utils.checkpoint takes by `context_fn`. It may be entered again, and within itself.

    Args:
        module: its nn.BatchNorm1d, 2d and 3d, nn.SyncBatchNorm and `GlobalBatchNorm` are meant.
    """
    return _Frozen([m for m in module.modules() if isinstance(m, _BatchNorm)])


class _Frozen(AbstractContextManager[None]):
    """Layers that track statistics in copies for a while.

    Not by track_running_stats = False: a layer then saves fewer tensors for its backward pass, and
    torch.utils.checkpoint refuses a second pass that saves others than the first. Not by a momentum of 0 either: by a
    batch that is not finite, it makes NaN of the statistics.
    """

    def __init__(self, layers: list[_BatchNorm]) -> None:
        self._layers = layers
        self._before: list[list[tuple[_BatchNorm, str, Tensor]]] = []

    def __enter__(self) -> None:
        kept = [(layer, name, buffer) for layer in self._layers for name, buffer in layer.named_buffers(recurse=False)]
        self._before.append(kept)
        for layer, name, buffer in kept:
            setattr(layer, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for layer, name, buffer in self._before.pop():
            setattr(layer, name, buffer)

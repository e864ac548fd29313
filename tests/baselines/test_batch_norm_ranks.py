"""Batch normalisation over two ranks is that of one process with the whole batch.

Run as a script, this file is one of two ranks; each prints what it found.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rank_processes import RANKS, meet, meeting_in
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from ident3d.baselines.batch_norm import GlobalBatchNorm, frozen_statistics, global_batch_norm
from ident3d.baselines.losses import lp_infonce
from ident3d.baselines.ranks import average_gradients, mean_over_ranks


@dataclass(frozen=True)
class Case:
    """A step of a small network on two ranks.

    Attributes:
        dtype: of weights and pictures.
        options: of the batch normalisation.
        channels_last: the memory format of pictures and weights.
        checkpointed: activations are computed again in the backward pass.
        include_self: as for the losses.
    """

    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = ()
    channels_last: bool = False
    checkpointed: bool = False
    include_self: bool = False


CASES = {
    "float64": Case(),
    "float32": Case(torch.float32),
    "with itself": Case(include_self=True),
    "cumulative": Case(options=(("momentum", None),)),
    "other momentum": Case(options=(("momentum", 0.7), ("eps", 0.1))),
    "no affine": Case(options=(("affine", False),)),
    "no tracking": Case(options=(("track_running_stats", False),)),
    "channels last": Case(channels_last=True),
    "checkpointed": Case(checkpointed=True),
    "checkpointed, cumulative": Case(options=(("momentum", None),), checkpointed=True),
    "float32, channels last, checkpointed": Case(torch.float32, channels_last=True, checkpointed=True),
}


def network(case: Case) -> nn.Module:
    """Without biases that batch normalisation or the loss takes away, whose gradients are 0 but for rounding."""
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6, **dict(case.options)),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, bias=False),
        nn.BatchNorm2d(5, **dict(case.options)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 16, 7, bias=False),
        nn.BatchNorm1d(7, **dict(case.options)),
        nn.Tanh(),
        nn.Linear(7, 4, bias=False),
    )
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net.to(case.dtype)


def off(a: Tensor, b: Tensor, largest: float | None = None) -> float:
    """How far off a is, relative to the largest of b, or to what is given."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return float((a - b).abs().max()) / (float(b.abs().max()) if largest is None else largest)


def step(net: nn.Module, x: Tensor, y: Tensor, case: Case, gather: bool) -> Tensor:
    """Gradients and running statistics of a loss, which is returned."""
    pictures = torch.cat([x, y])
    if case.channels_last:
        pictures = pictures.contiguous(memory_format=torch.channels_last)
    contexts = lambda: (nullcontext(), frozen_statistics(net))  # noqa: E731
    f = checkpoint(net, pictures, use_reentrant=False, context_fn=contexts) if case.checkpointed else net(pictures)
    loss = lp_infonce(*f.chunk(2), p=1, tau=0.7, include_self=case.include_self, gather=gather)
    torch.autograd.backward(loss)
    return loss.detach()


def differences(case: Case, rank: int) -> dict[str, float]:
    """Of two steps on the ranks from those of one process with the whole batch and nn.BatchNorm."""
    generator = torch.Generator().manual_seed(1)
    whole, batch = network(case), 6
    ours = global_batch_norm(copy.deepcopy(whole))
    if case.channels_last:
        # Not the whole: torch sums float32 so that it loses digits there (2.15, on the CPU).
        ours.to(memory_format=torch.channels_last)
    assert sum(isinstance(m, GlobalBatchNorm) for m in ours.modules()) == 3
    found = {}
    own = slice(rank * batch, (rank + 1) * batch)
    for number in range(2):
        x, noise = (torch.randn(RANKS * batch, 3, 8, 8, generator=generator, dtype=case.dtype) for _ in range(2))
        # Ranks whose statistics differ.
        x[batch:] = 3 * x[batch:] + 1
        y = x + 0.3 * noise
        for net in (whole, ours):
            net.zero_grad()
        expected = step(whole, x, y, Case(case.dtype, include_self=case.include_self), gather=False)
        loss = mean_over_ranks(step(ours, x[own], y[own], case, gather=True))
        average_gradients(ours.parameters())
        found[f"loss {number}"] = off(loss, expected)
        # Of the whole network: within a parameter, terms that cancel leave little more than float32's rounding.
        largest = max(float(q.grad.abs().max()) for q in whole.parameters() if q.grad is not None)
        for (name, p), q in zip(ours.named_parameters(), whole.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert q.grad.abs().max() > largest / 1000
            found[f"gradient of {name} {number}"] = off(p.grad, q.grad, largest)
        for (name, a), b in zip(ours.named_buffers(), whole.buffers(), strict=True):
            found[f"{name} {number}"] = off(a, b)
    return found


SIZES = {"unequal": (3, 5), "one empty": (0, 4), "the other empty": (4, 0), "one value a rank": (1, 1)}


def unequal(sizes: tuple[int, int], rank: int, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """As `differences`, of one layer on ranks with batches of other sizes."""
    generator = torch.Generator().manual_seed(2)
    x, weights = (torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    own = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], sum(sizes))
    whole = nn.BatchNorm1d(4, dtype=torch.promote_types(dtype, torch.float32))
    ours = global_batch_norm(copy.deepcopy(whole))
    all_x, own_x = x.clone().requires_grad_(), x[own].clone().requires_grad_()
    expected, got = whole(all_x), ours(own_x)
    (expected * weights).sum().backward()
    (got * weights[own]).sum().backward()
    assert all_x.grad is not None
    assert own_x.grad is not None
    found = {"value": got - expected[own], "gradient": own_x.grad - all_x.grad[own]}
    for (name, p), q in zip(ours.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        distributed.all_reduce(p.grad)
        found[name] = p.grad - q.grad
    for (name, a), b in zip(ours.named_buffers(), whole.buffers(), strict=True):
        found[name] = a - b
    return {name: float(d.detach().abs().max()) if d.numel() else 0.0 for name, d in found.items()}


def far_apart(rank: int) -> list[float]:
    """Mean and variance in float32 of ranks at 10 000 and at 10 001, less the true ones, relative."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(RANKS, 500, 1, generator=generator, dtype=torch.float64).mul(0.1).add(10_000).float()
    x[1] += 1
    layer = GlobalBatchNorm(1, momentum=1.0)
    layer(x[rank])
    assert layer.running_mean is not None
    assert layer.running_var is not None
    truth = x.double().flatten()
    return [float(layer.running_mean / truth.mean() - 1), float(layer.running_var / truth.var() - 1)]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(rank: int, meeting: str) -> None:
    meet(rank, meeting)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = {
            "off": {name: differences(case, rank) for name, case in CASES.items()},
            "unequal": {name: unequal(sizes, rank) for name, sizes in SIZES.items()},
            "bfloat16": unequal((3, 5), rank, torch.bfloat16),
            "far apart": far_apart(rank),
            "one value": refusal(lambda: GlobalBatchNorm(2)(torch.zeros(1 - rank, 2))),
            "torch's": refusal(lambda: nn.SyncBatchNorm(2)(torch.zeros(3, 2))),
        }
    print(json.dumps({**found, "warnings": sorted({str(w.message) for w in given})}), flush=True)
    distributed.barrier()
    # Now and then Gloo's threads (torch 2.15) abort a process that ends in the usual way.
    os._exit(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks finds."""
    printed = meeting_in(tmp_path_factory.mktemp("ranks"), __file__)
    return [json.loads(text) for text in printed]


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_one_process_with_the_whole_batch(name: str, found: list[dict[str, Any]]) -> None:
    bound = 1e-10 if CASES[name].dtype == torch.float64 else 1e-5
    for each in found:
        assert {what: value for what, value in each["off"][name].items() if not value < bound} == {}


@pytest.mark.parametrize("name", SIZES)
def test_ranks_may_have_batches_of_other_sizes(name: str, found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["unequal"][name].keys() >= {"value", "gradient", "weight", "bias", "running_mean", "running_var"}
        assert max(each["unequal"][name].values()) < 1e-12


def test_bfloat16_is_normalised_in_float32(found: list[dict[str, Any]]) -> None:
    for each in found:
        rounded = {"value", "gradient"}
        assert max(each["bfloat16"][name] for name in rounded) < 2**-7
        assert max(value for name, value in each["bfloat16"].items() if name not in rounded) < 2e-6


def test_statistics_keep_their_digits_far_from_0(found: list[dict[str, Any]]) -> None:
    for each in found:
        mean, variance = each["far apart"]
        assert abs(mean) < 1e-7
        assert abs(variance) < 1e-6


def test_a_single_value_over_all_ranks_is_refused_on_all(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["one value"].startswith("SpecError: a batch of 1 values a channel over all ranks")


def test_torch_has_none_for_the_cpu(found: list[dict[str, Any]]) -> None:
    """If this fails, GlobalBatchNorm may go."""
    assert all("SyncBatchNorm expected input tensor to be on GPU" in each["torch's"] for each in found)


def test_nothing_warns(found: list[dict[str, Any]]) -> None:
    assert [each["warnings"] for each in found] == [[], []]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

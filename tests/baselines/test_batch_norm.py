"""Batch normalisation over ranks is that of one process with the whole batch; statistics that are held still.

Run as a script, this file is one of two ranks; each prints what it found.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from ident3d.baselines import batch_norm
from ident3d.baselines.batch_norm import GlobalBatchNorm, frozen_statistics, global_batch_norm
from ident3d.baselines.losses import lp_infonce
from ident3d.baselines.ranks import average_gradients, mean_over_ranks
from ident3d.errors import SpecError

RANKS = 2
PATIENCE_S = 300


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
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timedelta(minutes=2)
    )
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
    meeting = (tmp_path_factory.mktemp("ranks") / "meeting").as_uri()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", __file__, str(rank), meeting], stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * RANKS
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


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another rank had the same batch, and did the same."""

    def gather(pieces: list[Tensor], own: Tensor) -> None:
        for piece in pieces:
            piece.copy_(own)

    def double(tensor: Tensor) -> None:
        tensor.mul_(2)

    monkeypatch.setattr(batch_norm, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather", gather)
    monkeypatch.setattr(distributed, "all_reduce", double)


OPTIONS = [
    {"affine": affine, "track_running_stats": track, "momentum": momentum, "eps": eps}
    for affine, track, momentum, eps in product((True, False), (True, False), (0.1, None, 0.0), (1e-5, 0.5))
]
LAYERS = [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (6,)), (nn.BatchNorm2d, (3, 4)), (nn.BatchNorm3d, (2, 3, 2))]


def pair_of_layers(kind: Any, dtype: torch.dtype, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """One of torch with weights and statistics at random, and ours of it."""
    generator = torch.Generator().manual_seed(4)
    plain: nn.Module = kind(3, **options, dtype=dtype)
    for tensor in [*plain.parameters(), *(b for b in plain.buffers() if b.is_floating_point())]:
        tensor.data.uniform_(0.5, 2, generator=generator)
    return plain, global_batch_norm(copy.deepcopy(plain))


def same(a: Tensor | None, b: Tensor | None, exactly: bool) -> None:
    assert a is not None
    assert b is not None
    if exactly:
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    else:
        torch.testing.assert_close(a, b)


def assert_alike(ours: nn.Module, plain: nn.Module, x: Tensor, copies: int = 1) -> None:
    """Values, gradients and states over two batches, where the layer of torch has `copies` of each in one."""
    exactly = copies == 1
    for number in range(2):
        a, b = (torch.cat([x + number] * times).requires_grad_() for times in (1, copies))
        upon = torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape).mul(9).cos()
        got, expected = ours(a), plain(b)
        same(got, expected[: len(x)], exactly)
        got.backward(upon)
        expected.backward(torch.cat([upon] * copies))
        assert a.grad is not None
        assert b.grad is not None
        same(a.grad, b.grad[: len(x)], exactly)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        same(p.grad * copies, q.grad, exactly)
    same_states(ours, plain, exactly)


def same_states(ours: nn.Module, plain: nn.Module, exactly: bool = True) -> None:
    a, b = ours.state_dict(), plain.state_dict()
    assert list(a) == list(b)
    for name in a:
        same(a[name], b[name], exactly)


def batch(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 3, *shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize(("kind", "shape"), LAYERS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_over_ranks_all_options_are_those_of_torch(kind: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    for dtype in (torch.float64, torch.float32):
        plain, ours = pair_of_layers(kind, dtype, options)
        assert isinstance(ours, GlobalBatchNorm)
        assert_alike(ours, plain, batch(shape, dtype), copies=2)


@pytest.mark.parametrize(("kind", "shape"), LAYERS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_rank_is_torch(kind: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    plain, ours = pair_of_layers(kind, torch.float32, options)
    assert_alike(ours, plain, batch(shape, torch.float32))


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_evaluation_is_torch(options: dict[str, Any]) -> None:
    plain, ours = pair_of_layers(nn.BatchNorm2d, torch.float32, options)
    plain.eval()
    ours.eval()
    assert_alike(ours, plain, batch((3, 4), torch.float32))


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_are_those_of_finite_differences(affine: bool) -> None:
    ours = GlobalBatchNorm(3, affine=affine, track_running_stats=False, dtype=torch.float64)
    x = batch((2,)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: ours(x), (x, *ours.parameters()))


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_gradients_that_are_not_asked_for(frozen: str) -> None:
    ours = GlobalBatchNorm(3, dtype=torch.float64)
    tensors = {"x": batch((2,)).requires_grad_(), "weight": ours.weight, "bias": ours.bias}
    tensors[frozen].requires_grad_(False)
    ours(tensors["x"]).square().sum().backward()
    assert {name for name, t in tensors.items() if t.grad is None} == {frozen}


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_torchs(dtype: torch.dtype) -> None:
    plain, ours = pair_of_layers(nn.BatchNorm2d, torch.float32, {})
    assert_alike(ours, plain, batch((6, 7), dtype), copies=2)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision(dtype: torch.dtype) -> None:
    plain, ours = pair_of_layers(nn.BatchNorm2d, dtype, {})
    x = batch((6, 7), dtype)
    # Torch rounds weight / std to the dtype before it multiplies by it: two roundings of values up to 8.
    torch.testing.assert_close(ours(x), plain(torch.cat([x, x]))[: len(x)], rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert all(b.dtype == dtype for b in ours.buffers() if b.is_floating_point())


@pytest.mark.usefixtures("twins")
def test_under_autocast_layers_between_halves_keep_float32() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    ours = global_batch_norm(copy.deepcopy(net))
    x = batch((6, 7), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = net(torch.cat([x, x]))[: len(x)], ours(x)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected)
    # As bfloat16 they would be off by 2^-9.
    torch.testing.assert_close(ours.state_dict()["1.running_var"], net.state_dict()["1.running_var"], rtol=1e-6, atol=0)
    got.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in ours.parameters())


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize(
    ("kind", "shape", "memory_format"),
    [(nn.BatchNorm2d, (3, 4), torch.channels_last), (nn.BatchNorm3d, (2, 3, 4), torch.channels_last_3d)],
)
def test_memory_formats_are_kept(kind: Any, shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    x = batch(shape).contiguous(memory_format=memory_format).requires_grad_()
    y = GlobalBatchNorm(3, dtype=torch.float64)(x)
    # As it is handed on: .grad would be laid out as x by torch.
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    for tensor in (y, grad):
        assert tensor.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("shape", [(3,), (5, 4), (5, 2, 3), (5, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_other_shapes_are_refused(shape: tuple[int, ...], training: bool) -> None:
    with pytest.raises(SpecError, match=r"a batch of shape .*: expected \(batch, 3, \.\.\.\)"):
        GlobalBatchNorm(3).train(training)(torch.zeros(shape))


def test_weights_and_buffers_stay_as_they_are() -> None:
    def made() -> nn.ModuleDict:
        several = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm3d(4, momentum=None))
        return nn.ModuleDict({"a": several, "b": nn.BatchNorm2d(5)})

    net = made()
    net["b"].eval()
    net["b"].weight.requires_grad_(False)
    tensors = dict([*net.named_parameters(), *net.named_buffers()])
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert global_batch_norm(net) is net
    after = dict([*net.named_parameters(), *net.named_buffers()])
    assert list(tensors) == list(after)
    assert all(tensors[name] is after[name] for name in tensors)
    assert list(net.state_dict()) == list(state)
    assert [m.training for m in net.modules() if isinstance(m, GlobalBatchNorm)] == [True, True, False]
    assert [m.momentum for m in net.modules() if isinstance(m, GlobalBatchNorm)] == [0.1, None, 0.1]
    net.load_state_dict(state)
    made().load_state_dict(net.state_dict())


def test_a_layer_with_two_names_stays_one() -> None:
    layer = nn.BatchNorm1d(3)
    inner = nn.Sequential(layer, nn.ReLU())
    net = nn.Sequential(layer, inner, layer)
    global_batch_norm(net)
    assert isinstance(net[0], GlobalBatchNorm)
    assert net[0] is net[2] is inner[0]


def test_a_second_time_changes_nothing() -> None:
    net = global_batch_norm(nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3)))
    layers = list(net.children())
    assert list(global_batch_norm(net).children()) == layers
    assert isinstance(layers[1], nn.SyncBatchNorm)


def test_other_batch_normalisations_are_refused() -> None:
    class Own(nn.BatchNorm2d):
        pass

    for other in (Own(3), nn.LazyBatchNorm2d()):
        net = nn.Sequential(nn.BatchNorm1d(3), other)
        with pytest.raises(SpecError, match=f"a {type(other).__name__}: expected nn.BatchNorm1d, 2d or 3d"):
            global_batch_norm(net)
        assert type(net[0]) is nn.BatchNorm1d


def test_on_cuda_it_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    state = net.state_dict()
    global_batch_norm(net)
    assert type(net[0]) is nn.SyncBatchNorm
    assert list(net.state_dict()) == list(state)
    assert type(global_batch_norm(nn.BatchNorm1d(3))) is nn.SyncBatchNorm


BATCH_NORMS = [nn.BatchNorm2d, nn.SyncBatchNorm, GlobalBatchNorm]


@pytest.fixture(params=["one rank", "twins"])
def one_or_two_ranks(request: pytest.FixtureRequest) -> None:
    if request.param == "twins":
        request.getfixturevalue("twins")


@pytest.mark.usefixtures("one_or_two_ranks")
@pytest.mark.parametrize("kind", BATCH_NORMS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_frozen_statistics_stay(kind: Any, momentum: float | None, value: float) -> None:
    layer = kind(3, momentum=momentum)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), layer)
    x = batch((4, 4), torch.float32)
    net(x)
    before = {name: (b, b.clone()) for name, b in net.named_buffers()}
    assert float(before["1.num_batches_tracked"][1]) == 1
    x[0, 0, 0, 0] = value
    freeze = frozen_statistics(net)
    outputs = []
    for _ in range(2):  # as a graph that is kept is gone through twice
        with freeze, freeze:
            outputs.append(net(x))
    for name, b in net.named_buffers():
        assert b is before[name][0]
        assert torch.equal(b, before[name][1])
    outputs.append(net(x))
    assert float(layer.num_batches_tracked) == 2
    for y in outputs:
        torch.testing.assert_close(y, outputs[-1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", BATCH_NORMS)
def test_frozen_statistics_are_those_of_evaluation(kind: Any) -> None:
    layer = kind(3)
    layer(batch((4, 4), torch.float32))
    x = torch.ones(1, 3, 2, 2)
    expected = layer.eval()(x)
    with frozen_statistics(layer):
        assert torch.equal(layer(x), expected)


def test_layers_without_statistics_may_be_frozen() -> None:
    layer = nn.BatchNorm2d(3, track_running_stats=False)
    x = batch((4, 4), torch.float32)
    with frozen_statistics(nn.Sequential(layer, nn.ReLU())):
        y = layer(x)
    assert torch.equal(y, layer(x))


def test_statistics_thaw_after_an_error() -> None:
    layer = nn.BatchNorm2d(3)
    with pytest.raises(ZeroDivisionError), frozen_statistics(layer):
        raise ZeroDivisionError
    layer(batch((4, 4), torch.float32))
    assert layer.state_dict()["num_batches_tracked"] == 1


def no_context(module: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def after_backward(kind: Any, momentum: float | None, second: Callable[[nn.Module], Any] | None) -> dict[str, Tensor]:
    """Gradients and buffers of a network whose two halves are checkpointed, if there is a context for the second pass;
    each half has batch normalisation, and the first takes two batches."""
    torch.manual_seed(0)
    halves = [
        nn.Sequential(nn.Conv2d(3, 3, 1), kind(3, momentum=momentum), nn.ReLU(), nn.Conv2d(3, 3, 1), kind(3))
        for _ in range(2)
    ]

    def through(half: nn.Module, x: Tensor) -> Tensor:
        if second is None:
            return half(x)  # type: ignore[no-any-return]
        contexts = lambda: (nullcontext(), second(half))  # noqa: E731
        y: Tensor = checkpoint(half, x, use_reentrant=False, context_fn=contexts)
        return y

    x = batch((4, 4), torch.float32)
    middle = torch.cat([through(halves[0], x), through(halves[0], 2 * x + 1)])
    loss = through(halves[1], middle).square().sum()
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    net = nn.Sequential(*halves)
    return {**{name: p.grad for name, p in net.named_parameters() if p.grad is not None}, **dict(net.named_buffers())}


@pytest.mark.usefixtures("one_or_two_ranks")
@pytest.mark.parametrize("kind", BATCH_NORMS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_checkpoints_count_a_batch_once(kind: Any, momentum: float | None) -> None:
    expected = after_backward(kind, momentum, None)
    got = after_backward(kind, momentum, frozen_statistics)
    assert list(got) == list(expected)
    assert len(got) == 2 * (8 + 6)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    # And it takes the context to do so.
    twice = after_backward(kind, momentum, no_context)
    assert not torch.equal(twice["0.1.running_mean"], expected["0.1.running_mean"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

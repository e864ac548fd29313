"""Batch normalisation over ranks, in one process: torch's layers and options; statistics that are held still."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from ident3d.baselines import batch_norm
from ident3d.baselines.batch_norm import GlobalBatchNorm, frozen_statistics, global_batch_norm
from ident3d.errors import SpecError


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

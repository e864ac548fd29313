"""Joining the ranks of torch.distributed: the environment that they are started with, and a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn

from ident3d.baselines import ranks
from ident3d.baselines.ranks import (
    agree,
    any_rank,
    average_gradients,
    is_first,
    joined,
    mean_over_ranks,
    rank,
    same_weights,
    world_size,
)
from ident3d.errors import SpecError

CPU = torch.device("cpu")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without what torchrun sets, to be given some of it."""
    for name in (*ranks.LAUNCHED, *ranks.MEETING, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def launched(environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Rank 3 of 4, the second of two on its machine, where a process group is made of nothing."""
    numbers = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in {**numbers, "MASTER_ADDR": "localhost"}.items():
        environment.setenv(name, str(value))
    return environment


@pytest.fixture
def calls(launched: pytest.MonkeyPatch) -> list[Any]:
    """What torch is asked for, on a machine of two GPUs."""
    made: list[Any] = []
    initialised = [False]

    def init(backend: str, **options: Any) -> None:
        initialised[0] = True
        made.append((backend, options["rank"], options["world_size"]))

    def destroy() -> None:
        initialised[0] = False
        made.append("destroyed")

    launched.setattr(distributed, "init_process_group", init)
    launched.setattr(distributed, "destroy_process_group", destroy)
    launched.setattr(distributed, "is_initialized", lambda: initialised[0])
    launched.setattr(distributed, "is_nccl_available", lambda: True)
    launched.setattr(torch.cuda, "is_available", lambda: True)
    launched.setattr(torch.cuda, "device_count", lambda: 2)
    launched.setattr(torch.cuda, "set_device", made.append)
    return made


@pytest.mark.usefixtures("environment")
def test_a_single_process_has_nothing_to_exchange() -> None:
    with joined("cpu") as device:
        assert device == CPU
        assert not distributed.is_initialized()
        assert (rank(), world_size(), is_first()) == (0, 1, True)
        assert [any_rank(flag, device) for flag in (True, False)] == [True, False]
        agree({"seed": 1})
        p = torch.zeros(2, requires_grad=True)
        average_gradients([p])
        assert p.grad is None
        p.grad = torch.ones(2)
        average_gradients([p])
        assert p.grad.tolist() == [1, 1]
        mean = mean_over_ranks(p)
        assert torch.equal(mean, p)
        assert not mean.requires_grad
        assert mean.data_ptr() != p.data_ptr()
        layer = nn.Linear(2, 2)
        before = layer.weight.clone()
        same_weights(layer)
        assert torch.equal(layer.weight, before)


@pytest.mark.usefixtures("environment")
def test_without_torchrun_devices_are_named_as_ever() -> None:
    with pytest.raises(SpecError, match="device = 'banana': expected auto, cpu"), joined("banana"):
        pass


def test_the_address_alone_is_no_launch(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MASTER_ADDR", "node1")
    environment.setenv("MASTER_PORT", "29500")
    with joined("cpu"):
        assert not distributed.is_initialized()


@pytest.mark.parametrize("name", [*ranks.LAUNCHED, *ranks.MEETING])
def test_a_part_of_the_environment_is_refused(name: str, calls: list[Any], launched: pytest.MonkeyPatch) -> None:
    launched.delenv(name)
    with pytest.raises(SpecError, match=f"but not {name}: expected all .*; start with torchrun, or unset"):
        joined("cpu").__enter__()
    assert calls == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RANK", "one", "RANK = 'one': expected a whole number"),
        ("RANK", "-1", "RANK = '-1': expected a whole number"),
        ("RANK", "4", "RANK = 4, WORLD_SIZE = 4"),
        ("WORLD_SIZE", "0", "RANK = 3, WORLD_SIZE = 0"),
        ("LOCAL_RANK", "2", "LOCAL_RANK = 2, LOCAL_WORLD_SIZE = 2"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE = 5"),
    ],
)
def test_numbers_out_of_range_are_refused(
    name: str, value: str, text: str, calls: list[Any], launched: pytest.MonkeyPatch
) -> None:
    launched.setenv(name, value)
    with pytest.raises(SpecError, match=text):
        joined("cpu").__enter__()
    assert calls == []


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_each_rank_takes_its_own_gpu(device: str, calls: list[Any]) -> None:
    own = torch.device("cuda", 1)
    with joined(device) as given:
        assert given == own
        assert calls == [own, ("nccl", 3, 4)]
    assert calls[2:] == ["destroyed"]


def test_without_gpus_auto_is_the_cpu(calls: list[Any], launched: pytest.MonkeyPatch) -> None:
    launched.setattr(torch.cuda, "is_available", lambda: False)
    launched.setattr(torch.backends.mps, "is_available", lambda: True)
    with joined("auto") as given:
        assert given == CPU
    assert calls == [("gloo", 3, 4), "destroyed"]


def test_the_group_is_destroyed_after_an_error(calls: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError), joined("cpu"):
        raise ZeroDivisionError
    assert calls == [("gloo", 3, 4), "destroyed"]


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cuda:1", "device = 'cuda:1' with several ranks: expected cuda"),
        ("mps", "device = 'mps' with several ranks: expected cpu or cuda"),
        ("banana", "device = 'banana': expected auto"),
    ],
)
def test_devices_that_ranks_cannot_name(device: str, text: str, calls: list[Any]) -> None:
    with pytest.raises(SpecError, match=text):
        joined(device).__enter__()
    assert calls == []


@pytest.mark.parametrize("device", ["cuda", "auto"])
@pytest.mark.parametrize("told", [True, False])
def test_more_ranks_than_gpus_are_refused(
    device: str, told: bool, calls: list[Any], launched: pytest.MonkeyPatch
) -> None:
    launched.setattr(torch.cuda, "device_count", lambda: 1)
    if not told:
        launched.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(SpecError, match=f"device = '{device}': 2 ranks on this machine, which has 1 GPUs"):
        joined(device).__enter__()
    assert calls == []


def test_a_torch_without_nccl_is_refused(calls: list[Any], launched: pytest.MonkeyPatch) -> None:
    launched.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(SpecError, match="without NCCL; choose cpu"):
        joined("cuda").__enter__()
    assert calls == []


def test_a_torch_without_distributed_is_refused(launched: pytest.MonkeyPatch) -> None:
    launched.setattr(distributed, "is_available", lambda: False)
    with pytest.raises(SpecError, match=r"without torch\.distributed; start one process"):
        joined("cpu").__enter__()


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [("gloo", "auto", "cpu"), ("nccl", "auto", "cuda:1"), ("nccl", "cuda", "cuda:1"), ("undefined", "auto", "cuda:1")],
)
def test_the_device_in_a_group_of_the_caller(
    backend: str, device: str, expected: str, calls: list[Any], launched: pytest.MonkeyPatch
) -> None:
    launched.setattr(distributed, "is_initialized", lambda: True)
    launched.setattr(distributed, "get_backend", lambda: backend)
    launched.setattr(torch.cuda, "current_device", lambda: 1)
    with joined(device) as given:
        assert given == torch.device(expected)
    assert calls == []


def test_the_cpu_in_a_group_of_gpus_is_refused(calls: list[Any], launched: pytest.MonkeyPatch) -> None:
    launched.setattr(distributed, "is_initialized", lambda: True)
    launched.setattr(distributed, "get_backend", lambda: "nccl")
    with pytest.raises(SpecError, match="device = 'cpu': the process group is one of NCCL; choose cuda"):
        joined("cpu").__enter__()
    assert calls == []

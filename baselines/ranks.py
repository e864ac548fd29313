"""What training on several processes needs of torch.distributed. In a single process, nothing of it does anything.

Every function that exchanges something waits for all ranks: they call the same ones in the same order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ident3d.baselines.devices import resolve_device
from ident3d.checks import whole
from ident3d.datasets.batches import ranks_of
from ident3d.errors import SpecError

__all__ = [
    "agree",
    "any_rank",
    "average_gradients",
    "is_first",
    "joined",
    "mean_over_ranks",
    "rank",
    "same_weights",
    "world_size",
]

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What only a process that torchrun started has in its environment; some clusters set the next two for all."""

MEETING = ("MASTER_ADDR", "MASTER_PORT")

TIMEOUT = timedelta(hours=1)
"""How long a rank waits for the others. NCCL's own 10 minutes are short where one rank scores and the others wait."""

BUCKET_BYTES = 64 * 2**20
"""Most that gradients are copied into at once; a single larger parameter goes by itself."""


@contextmanager
def joined(device: str) -> Iterator[torch.device]:
    """Within, this process is one of those that torchrun started, if it did; yields the device that it computes on.

    A process group that the caller made is used, and left as it is. One that is made here is destroyed afterwards, also
    on errors. GPUs exchange by NCCL, CPUs by Gloo.

    Args:
        device: by name. With torchrun: `cpu`; `cuda`, GPU i for the machine's rank i; or `auto`, CUDA where there is
            any. Without it: as for `resolve_device`.

    Raises:
        SpecError: an unknown or absent device; with ranks, a numbered GPU or Apple's; more ranks on this machine than
            GPUs; an environment with only a part of what torchrun sets, or with numbers out of range.
    """
    launch = _launch()
    available = distributed.is_available()
    if available and distributed.is_initialized():
        yield _device_in_group(device)
    elif launch is None:
        yield resolve_device(device)
    elif not available:
        raise SpecError("torchrun's environment: this torch is built without torch.distributed; start one process")
    else:
        made = _device_of_rank(device, launch)
        if made.type == "cuda":
            torch.cuda.set_device(made)
        distributed.init_process_group(
            "nccl" if made.type == "cuda" else "gloo",
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=TIMEOUT,
        )
        try:
            yield made
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()


@dataclass(frozen=True)
class _Launch:
    """What torchrun's environment says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def _launch() -> _Launch | None:
    """The environment of torchrun, or None where there is none.

    Raises:
        SpecError: a part of it, since processes that each train alone would pass for one training.
    """
    given = [name for name in LAUNCHED if name in os.environ]
    if not given:
        return None
    absent = [name for name in (*LAUNCHED, *MEETING) if name not in os.environ]
    if absent:
        raise SpecError(
            f"the environment has {', '.join(given)}, but not {', '.join(absent)}: expected all that torchrun sets; "
            f"start with torchrun, or unset {', '.join(given)}"
        )
    number, size, local = (_number(name) for name in LAUNCHED)
    # Older launchers do not say how many ranks a machine has; there are at least those up to this one.
    local_size = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else local + 1
    if not (number < size and local < local_size <= size):
        raise SpecError(
            f"RANK = {number}, WORLD_SIZE = {size}, LOCAL_RANK = {local}, LOCAL_WORLD_SIZE = {local_size}: expected "
            "ranks below the sizes, as torchrun sets them"
        )
    return _Launch(number, size, local, local_size)


def _number(name: str) -> int:
    text = os.environ[name]
    return whole(name, int(text) if text.isdecimal() else text)


def _kind(device: str) -> str:
    """`cpu` or `cuda`: what a rank may name.

    Raises:
        SpecError: another device, or none of the kind.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "mps":
        raise SpecError("device = 'mps' with several ranks: expected cpu or cuda, Apple's GPU exchanges nothing")
    made = resolve_device(device)
    if made.type == "cuda" and made.index is not None:
        raise SpecError(f"device = {device!r} with several ranks: expected cuda, of which each rank takes its own GPU")
    return made.type


def _device_of_rank(device: str, launch: _Launch) -> torch.device:
    if _kind(device) == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if launch.local_world_size > gpus:
        raise SpecError(
            f"device = {device!r}: {launch.local_world_size} ranks on this machine, which has {gpus} GPUs; expected a "
            "GPU for each: start fewer with torchrun --nproc-per-node, or choose cpu"
        )
    if not distributed.is_nccl_available():
        raise SpecError(f"device = {device!r} with several ranks: this torch is built without NCCL; choose cpu")
    return torch.device("cuda", launch.local_rank)


def _device_in_group(device: str) -> torch.device:
    """A device for the process group that the caller made, who has also chosen this process's GPU."""
    gloo, nccl = (distributed.get_backend() == name for name in ("gloo", "nccl"))
    kind = ("cpu" if gloo else "cuda" if nccl else _kind(device)) if device == "auto" else _kind(device)
    if kind == "cpu" and nccl:
        raise SpecError(f"device = {device!r}: the process group is one of NCCL; choose cuda")
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def rank() -> int:
    """This process's number, from 0; 0 in a single process."""
    return ranks_of(None, None)[0]


def world_size() -> int:
    """How many processes train together; 1 in a single process."""
    return ranks_of(None, None)[1]


def is_first() -> bool:
    """Whether this is the process that writes: rank 0, or a single one."""
    return rank() == 0


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Put the mean over ranks into the gradient of every parameter.

    A rank whose loss did not reach a parameter counts as a gradient of 0. A parameter that no rank's loss reached stays
    without a gradient, as in a single process, so that optimisers leave it alone.

    Args:
        parameters: the same on all ranks, in the same order. Those that require no gradient are passed over, and one
            that comes twice counts once.
    """
    ranks = world_size()
    if ranks == 1:
        return
    for bucket in _buckets(dict.fromkeys(p for p in parameters if p.requires_grad)):
        # Behind the gradients, whether they are there: that costs no further exchange, and is read only where one is
        # absent, since reading makes a GPU wait.
        present = bucket[0].new_tensor([float(p.grad is not None) for p in bucket])
        grads = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
        flat = torch.cat([*grads, present])
        distributed.all_reduce(flat)
        flat /= ranks
        means = torch.split(flat, [*(p.numel() for p in bucket), len(bucket)])
        for k, p in enumerate(bucket):
            if p.grad is not None:
                p.grad.copy_(means[k].view(p.shape))
            elif means[-1][k]:
                p.grad = torch.empty_like(p).copy_(means[k].view(p.shape))


def _buckets(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters of one dtype and device together, of `BUCKET_BYTES` at most; alike on all ranks."""
    done: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for p in parameters:
        kind, size = (p.dtype, p.device), p.numel() * p.element_size()
        bucket, filled = filling.get(kind, ([], 0))
        if not bucket or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            done.append(bucket)
        bucket.append(p)
        filling[kind] = (bucket, filled + size)
    return done


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean over ranks of a tensor of floating-point numbers, a new one without a gradient.

    Args:
        tensor: of the same shape and dtype on all ranks.
    """
    mean = tensor.detach().clone(memory_format=torch.contiguous_format)
    if world_size() > 1:
        distributed.all_reduce(mean)
        mean /= world_size()
    return mean


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank. Waits for a GPU.

    Args:
        flag: this rank's.
        device: that `joined` gave.
    """
    if world_size() == 1:
        return flag
    highest = torch.tensor(int(flag), device=device)
    distributed.all_reduce(highest, distributed.ReduceOp.MAX)
    return bool(highest)


def agree(facts: Mapping[str, Any]) -> None:
    """Refuse ranks that differ in what has to be the same, on every one of them.

    Args:
        facts: by name, what JSON can hold.

    Raises:
        SpecError: facts that differ, each with the ranks' values; on this rank alone, a fact that JSON cannot hold.
    """
    own = {name: _as_json(name, value) for name, value in facts.items()}
    if world_size() == 1:
        return
    all_facts: list[dict[str, str]] = [{} for _ in range(world_size())]
    distributed.all_gather_object(all_facts, own)
    differing = []
    for name in dict.fromkeys(name for each in all_facts for name in each):
        holders: dict[str, list[str]] = {}
        for number, each in enumerate(all_facts):
            holders.setdefault(each.get(name, "absent"), []).append(str(number))
        if len(holders) > 1:
            values = (f"{v} on rank{'s' * (len(on) > 1)} {', '.join(on)}" for v, on in holders.items())
            differing.append(f"{name}: {'; '.join(values)}")
    if differing:
        raise SpecError(
            f"ranks differ in {' | '.join(differing)}. Expected the same on all: start each with the same options, on "
            "the same data"
        )


def _as_json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise SpecError(f"fact {name} = {value!r}: expected what JSON can hold ({error})") from None


def same_weights(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0.

    Raises:
        SpecError: on every rank, tensors that differ in name, shape or dtype.
    """
    if world_size() == 1:
        return
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    agree({name: [str(t.dtype), *t.shape] for name, t in tensors.items()})
    with torch.no_grad():
        for tensor in tensors.values():
            # What is sent is the memory: layouts that differ, such as channels_last on one rank, would be scrambled.
            sent = tensor.contiguous()
            distributed.broadcast(sent, 0)
            tensor.copy_(sent)

"""Ranks of torch.distributed: what two of them exchange.

Run as a script, this file is one of two ranks, which prints what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_processes import PATIENCE_S, RANKS, launched
from torch import Tensor, distributed, nn

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


def text_of(facts: dict[str, Any]) -> str:
    """What `agree` says."""
    try:
        agree(facts)
    except SpecError as error:
        return str(error)
    return "agreed"


def parameters_with_gradients(number: int) -> dict[str, Tensor]:
    """Parameters of which not all have a gradient on every rank; the gradients of rank r are 1 + 2 r."""
    made = {
        "both": torch.zeros(3),
        "transposed": torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "second only": torch.zeros(2),
        "first only": torch.zeros(2, dtype=torch.float64),
        "neither": torch.zeros(2),
        "frozen": torch.zeros(2),
        "double": torch.zeros(2, dtype=torch.float64),
        "empty": torch.zeros(0),
    }
    for name, p in made.items():
        p.requires_grad_(name != "frozen")
        here = {"second only": number == 1, "first only": number == 0, "neither": False, "frozen": False}
        if here.get(name, True):
            p.grad = torch.full_like(p, 1.0 + 2 * number)
    # In the order of rows, whatever lies in memory.
    order = torch.arange(24.0).view(2, 3, 2, 2) * (1 + 2 * number)
    made["transposed"].grad = order if number else order.contiguous(memory_format=torch.channels_last)
    return made


def averaged(number: int, bucket_bytes: int) -> dict[str, Any]:
    """Gradients after averaging, and how often ranks exchanged."""
    made = parameters_with_gradients(number)
    with (
        patch.object(ranks, "BUCKET_BYTES", bucket_bytes),
        patch.object(distributed, "all_reduce", wraps=distributed.all_reduce) as exchange,
    ):
        average_gradients([*made.values(), made["both"]])
    grads = {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in made.items()}
    return {"calls": exchange.call_count, "grads": grads}


def weights(number: int) -> dict[str, Any]:
    """A module's state after `same_weights`, and what it says of other shapes."""
    torch.manual_seed(number)
    module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
    if number == 1:
        module.to(memory_format=torch.channels_last)
        module(torch.randn(5, 3, 4, 4))
    before = {name: t.flatten().tolist() for name, t in module.state_dict().items()}
    same_weights(module)
    after = {name: t.flatten().tolist() for name, t in module.state_dict().items()}
    try:
        same_weights(nn.Linear(3, 4 + number))
        other = "the same"
    except SpecError as error:
        other = str(error)
    return {"before": before, "after": after, "other": other}


def exchanged(device: torch.device) -> dict[str, Any]:
    """What this rank has after each kind of exchange."""
    number = rank()
    nan = float("nan")
    more = {"more": 3} if number else {}
    with joined("cpu") as again:  # the group is there already, and stays
        nested = again == device
    x = torch.arange(6.0).view(2, 3).t() + 10 * number
    # The same rows on all ranks, whatever lies in memory.
    x = x if number else x.contiguous()
    return {
        "rank": [number, world_size(), is_first()],
        "nested": nested and distributed.is_initialized(),
        "gradients": averaged(number, ranks.BUCKET_BYTES),
        "small buckets": averaged(number, 8),
        "mean": mean_over_ranks(x.requires_grad_()).tolist(),
        "mean needs a gradient": mean_over_ranks(x).requires_grad,
        "kept": x.tolist(),
        "any": [any_rank(flag, device) for flag in (number == 0, number == 1, True, False)],
        "agreed": text_of({"seed": 1, "scale": nan, "both": [1, {"a": None, "b": 2}]}),
        "differ": text_of({"seed": number, "size": 5, "kind": {"b": 1, "a": "xy"[number]}, **more}),
        "weights": weights(number),
    }


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            with joined("cpu") as device:
                found = exchanged(device) | {"device": str(device)}
                if rank() == 0:
                    raise ZeroDivisionError
                began = time.monotonic()
                any_rank(True, device)  # rank 0 never gets here
        except (ZeroDivisionError, RuntimeError) as error:
            found["error"] = type(error).__name__
            found["group afterwards"] = distributed.is_initialized()
    found["waited_s"] = time.monotonic() - began if found["rank"][0] else 0
    found["warnings"] = sorted({str(warning.message) for warning in given})
    print(json.dumps(found), flush=True)
    # Now and then Gloo's threads (torch 2.15) abort a process that ends in the usual way.
    os._exit(0)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each of two ranks finds, in torchrun's environment."""
    return [json.loads(text) for text in launched(__file__)]


def test_ranks_are_numbered(found: list[dict[str, Any]]) -> None:
    assert [each["rank"] for each in found] == [[0, 2, True], [1, 2, False]]
    assert [each["device"] for each in found] == ["cpu", "cpu"]


def test_a_group_that_is_there_is_used_and_left(found: list[dict[str, Any]]) -> None:
    assert all(each["nested"] for each in found)


@pytest.mark.parametrize("buckets", ["gradients", "small buckets"])
def test_gradients_become_their_mean(buckets: str, found: list[dict[str, Any]]) -> None:
    expected = {
        "both": [2.0] * 3,
        "transposed": [2.0 * k for k in range(24)],
        "second only": [1.5] * 2,
        "first only": [0.5] * 2,
        "neither": None,
        "frozen": None,
        "double": [2.0] * 2,
        "empty": [],
    }
    for each in found:
        assert each[buckets]["grads"] == expected


def test_gradients_of_a_dtype_go_together_up_to_a_size(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["gradients"]["calls"] == 2
        # Of 8 bytes: those of 3, 24, 2 and 2 floats, 2 and 2 doubles; what is empty goes with what is full.
        assert each["small buckets"]["calls"] == 6


def test_the_mean_of_a_tensor(found: list[dict[str, Any]]) -> None:
    for number, each in enumerate(found):
        assert each["mean"] == [[5.0, 8.0], [6.0, 9.0], [7.0, 10.0]]
        assert not each["mean needs a gradient"]
        assert each["kept"][0] == [10.0 * number, 3 + 10.0 * number]


def test_a_flag_of_any_rank(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["any"] == [True, True, True, False]


def test_ranks_that_agree(found: list[dict[str, Any]]) -> None:
    assert [each["agreed"] for each in found] == ["agreed"] * RANKS


def test_ranks_that_differ_are_all_told_in_what(found: list[dict[str, Any]]) -> None:
    text = (
        'ranks differ in seed: 0 on rank 0; 1 on rank 1 | kind: {"a": "x", "b": 1} on rank 0; {"a": "y", "b": 1} on '
        "rank 1 | more: absent on rank 0; 3 on rank 1. Expected the same on all: start each with the same options, on "
        "the same data"
    )
    assert [each["differ"] for each in found] == [text] * RANKS


def test_weights_become_those_of_the_first_rank(found: list[dict[str, Any]]) -> None:
    first, second = (each["weights"] for each in found)
    assert first["after"] == first["before"] == second["after"]
    for name in ("0.weight", "0.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert second["before"][name] != second["after"][name]


def test_weights_of_other_shapes_are_refused_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert (
            'ranks differ in weight: ["torch.float32", 4, 3] on rank 0; ["torch.float32", 5, 3] on rank 1'
            in (each["weights"]["other"])
        )


def test_an_error_ends_the_group_and_the_others_do_not_wait(found: list[dict[str, Any]]) -> None:
    assert [each["group afterwards"] for each in found] == [False, False]
    assert [each["error"] == "ZeroDivisionError" for each in found] == [True, False]
    assert found[1]["waited_s"] < 30


def test_nothing_warns(found: list[dict[str, Any]]) -> None:
    assert [each["warnings"] for each in found] == [[], []]


@pytest.mark.parametrize("fact", [object(), {1: "a", "b": 2}])
def test_facts_that_json_cannot_hold(fact: object) -> None:
    with pytest.raises(SpecError, match=r"fact kind = .*: expected what JSON can hold"):
        agree({"kind": fact})


@pytest.mark.slow
def test_torchrun_starts_ranks(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "from ident3d.baselines.ranks import any_rank, joined, rank, world_size\n"
        "from pathlib import Path\n"
        "with joined('cpu') as device:\n"
        "    text = f'{world_size()} {any_rank(rank() == 1, device)}'\n"
        f"    Path(r'{tmp_path}', f'found-{{rank()}}').write_text(text)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    torchrun = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _, complaint = torchrun.communicate(timeout=PATIENCE_S)
    finally:
        torchrun.terminate()  # not kill: it ends its ranks with itself
        torchrun.wait()
    assert torchrun.returncode == 0, complaint
    assert [(tmp_path / f"found-{k}").read_text() for k in range(2)] == ["2 True", "2 True"]


if __name__ == "__main__":
    main()

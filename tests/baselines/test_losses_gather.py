"""Losses whose negatives come from all ranks: the mean over ranks is the loss of the whole batch.

Run as a script, this file is one of two ranks; the first prints how far off each case was.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rank_processes import RANKS, meet, meeting_in
from torch import Tensor, distributed

from ident3d.baselines import negatives
from ident3d.baselines.losses import DotPart, LpPart, dot_infonce, lp_infonce, product_infonce
from ident3d.errors import SpecError


@dataclass(frozen=True)
class Case:
    """A loss of two ranks.

    Attributes:
        score: "p1", "p2", "dot" or "product".
        include_self: as for the losses.
        positive_in_denominator: as for the losses.
        batch: anchors a rank.
        seeds: runs side by side; None for a tensor without them.
        double: float64.
    """

    score: str
    include_self: bool = True
    positive_in_denominator: bool = True
    batch: int = 70
    seeds: int | None = None
    double: bool = True


CASES = {
    **{
        f"{score}, self {include_self}, positive {positive}": Case(score, include_self, positive)
        for score in ("p1", "p2", "dot", "product")
        for include_self in (True, False)
        for positive in (True, False)
    },
    "single precision": Case("product", include_self=False, double=False),
    "seeds": Case("product", include_self=False, seeds=3),
    "one anchor a rank": Case("p2", batch=1),
    "one anchor a rank, others": Case("dot", include_self=False, batch=1),
}


def loss_of(x: Tensor, y: Tensor, tau: Tensor, case: Case, gather: bool) -> Tensor:
    """Summed over seeds."""
    parts: list[DotPart | LpPart] = [DotPart(2, tau[0]), LpPart(2, 3, tau[1:])]
    losses: dict[str, Callable[..., Tensor]] = {
        "p1": functools.partial(lp_infonce, p=1, tau=tau[0]),
        "p2": functools.partial(lp_infonce, p=2, tau=tau[1]),
        "dot": functools.partial(dot_infonce, tau=tau[2]),
        "product": functools.partial(product_infonce, parts=parts),
    }
    return losses[case.score](
        x,
        y,
        include_self=case.include_self,
        positive_in_denominator=case.positive_in_denominator,
        gather=gather,
    ).sum()


def differences(case: Case, rank: int) -> list[float]:
    """Of the loss and the gradients of a shared encoder and temperature: the ranks' mean from the whole batch."""
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float64 if case.double else torch.float32
    shape = (RANKS * case.batch, 3) if case.seeds is None else (case.seeds, RANKS * case.batch, 3)
    z, step = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    encoder = torch.randn(3, 4, generator=generator, dtype=dtype).requires_grad_()
    tau = torch.tensor([0.6, 0.8, 1.1], dtype=dtype, requires_grad=True)
    own = slice(rank * case.batch, (rank + 1) * case.batch)

    def run(part: slice, gather: bool) -> list[Tensor]:
        x, y = z[..., part, :] @ encoder, (z + 0.3 * step)[..., part, :] @ encoder
        loss = loss_of(x, y, tau, case, gather)
        grads = torch.autograd.grad(loss, (encoder, tau), allow_unused=True, materialize_grads=True)
        return [loss.detach(), *grads]

    found, whole = run(own, gather=True), run(slice(None), gather=False)
    for value in found:
        distributed.all_reduce(value)
    return [float((a / RANKS - b).abs().max() / b.abs().max()) for a, b in zip(found, whole, strict=True)]


def main(rank: int, meeting: str) -> None:
    negatives.TILE_CPU = 64 * 64
    meet(rank, meeting)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        results = {name: differences(case, rank) for name, case in CASES.items()}
    if rank == 0:
        print(json.dumps({"off": results, "warnings": sorted({str(warning.message) for warning in given})}), flush=True)
    distributed.barrier()
    # Now and then Gloo's threads (torch 2.15) abort a process that ends in the usual way.
    os._exit(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks find."""
    printed = meeting_in(tmp_path_factory.mktemp("ranks"), __file__)
    result: dict[str, Any] = json.loads(printed[0])
    return result


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.distributed says of itself when there is one rank; a real group would stay in this process."""
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)


@pytest.mark.parametrize("name", CASES)
def test_the_mean_loss_is_that_of_the_whole_batch(name: str, found: dict[str, Any]) -> None:
    assert found["off"][name][0] < (1e-12 if CASES[name].double else 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_mean_gradients_are_those_of_the_whole_batch(name: str, found: dict[str, Any]) -> None:
    encoder, temperature = found["off"][name][1:]
    assert max(encoder, temperature) < (1e-10 if CASES[name].double else 1e-5)


def test_gathering_warns_of_nothing(found: dict[str, Any]) -> None:
    assert found["warnings"] == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("include_self", [True, False])
def test_one_rank_is_a_single_process(include_self: bool) -> None:
    x = torch.rand(20, 4, generator=torch.Generator().manual_seed(0))
    for p in (1, 2):
        alone = lp_infonce(x, x + 0.1, p=p, include_self=include_self)
        assert torch.equal(lp_infonce(x, x + 0.1, p=p, include_self=include_self, gather=True), alone)


@pytest.mark.usefixtures("one_rank")
def test_one_anchor_on_one_rank_is_refused() -> None:
    x = torch.rand(1, 4)
    with pytest.raises(SpecError, match="at least 2"):
        lp_infonce(x, x + 0.1, p=1, include_self=False, gather=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

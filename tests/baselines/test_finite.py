"""The watch names the first step, and the seed or the parameter, that was not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ident3d.baselines.finite import FiniteWatch

SEEDS = (4, 7, 9)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def with_gradients(net: nn.Module, bad: str | None = None, value: float = math.nan) -> nn.Module:
    for name, p in net.named_parameters():
        p.grad = torch.ones_like(p)
        if name == bad:
            p.grad.view(-1)[-1] = value
    return net


def losses(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def test_nothing_is_flagged_while_all_is_finite() -> None:
    net = model()
    watch = FiniteWatch(net, SEEDS)
    assert watch.trouble() is None
    for step in range(5):
        watch.note(step, losses(1e30, 0, -1e30))  # without gradients as well
        with_gradients(net)
        watch.note(step, losses(1, 2, 3))
    assert watch.trouble() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_loss_is_named_by_its_seed(bad: float, place: int) -> None:
    net = with_gradients(model())
    watch = FiniteWatch(net, SEEDS)
    watch.note(11, losses(1, 2, 3))
    values = [1.0, 2.0, 3.0]
    values[place] = bad
    watch.note(12, losses(*values))
    assert watch.trouble() == f"step 12: the loss of seed {SEEDS[place]} is not finite"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "1.bias"])
def test_a_gradient_is_named_by_its_parameter(bad: float, name: str) -> None:
    net = model()
    watch = FiniteWatch(net, SEEDS)
    with_gradients(net, name, bad)
    watch.note(0, losses(1, 2, 3))
    assert watch.trouble() == f"step 0: the losses are finite, the gradient of {name} is not"


def test_parameters_without_gradients_do_not_shift_the_names() -> None:
    net = with_gradients(model(), "1.weight")
    net.get_parameter("0.weight").requires_grad_(False)
    net.get_parameter("0.bias").grad = None
    watch = FiniteWatch(net, SEEDS)
    watch.note(3, losses(1, 2, 3))
    assert watch.trouble() == "step 3: the losses are finite, the gradient of 1.weight is not"


def test_a_loss_comes_before_its_gradients() -> None:
    net = with_gradients(model(), "0.weight")
    watch = FiniteWatch(net, SEEDS)
    watch.note(3, losses(1, 2, math.nan))
    assert watch.trouble() == "step 3: the loss of seed 9 is not finite"


def test_the_first_step_counts() -> None:
    net = with_gradients(model())
    watch = FiniteWatch(net, SEEDS)
    watch.note(0, losses(1, 2, 3))
    watch.note(1, losses(1, math.nan, 3))
    with_gradients(net, "0.bias")
    watch.note(2, losses(math.nan, math.nan, math.nan))
    with_gradients(net)
    watch.note(3, losses(1, 2, 3))
    for _ in range(2):
        assert watch.trouble() == "step 1: the loss of seed 7 is not finite"


def test_a_gradient_too_long_for_its_norm_is_not_finite() -> None:
    net = with_gradients(model(), "1.bias")
    for p in net.parameters():
        p.grad = torch.full_like(p, 3e38)
    watch = FiniteWatch(net, SEEDS)
    watch.note(6, losses(1, 2, 3))
    assert watch.trouble() == "step 6: the losses are finite, the gradient of 0.weight is not"


def test_models_without_parameters() -> None:
    watch = FiniteWatch(nn.Identity(), SEEDS)
    watch.note(0, losses(1, 2, 3))
    assert watch.trouble() is None
    watch.note(1, losses(1, math.inf, 3))
    assert watch.trouble() == "step 1: the loss of seed 7 is not finite"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu() -> None:
    net = with_gradients(model().cuda(), "1.weight")
    watch = FiniteWatch(net, SEEDS)
    watch.note(2, losses(1, 2, 3).cuda())
    assert watch.trouble() == "step 2: the losses are finite, the gradient of 1.weight is not"

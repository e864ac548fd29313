"""Training in bfloat16: every step sees the weights that the step before it left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ident3d.baselines.devices import precision_context
from ident3d.baselines.training import RunOptions, Task, TrainingSettings, train
from ident3d.datasets.batches import generator_of

CPU = torch.device("cpu")
TRUE = torch.tensor([[1.0, -2.0, 0.5, 3.0]])


class Regression(Task):
    """A linear layer, which autocast would keep a copy of."""

    def __init__(self) -> None:
        self.seeds, self.device = (0,), CPU
        self.model = nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()

    def losses(self, step: int) -> Tensor:
        x = torch.randn(64, 4, generator=generator_of("regression", step))
        error: Tensor = (self.model(x).float() - x @ TRUE.T).square().mean()
        return error.unsqueeze(0)

    def scores(self) -> dict[str, list[float]]:
        return {"r2": [0.0]}

    def settings(self) -> dict[str, Any]:
        return {}


def test_what_was_learned_is_seen_by_the_next_step() -> None:
    task = Regression()
    settings = TrainingSettings(steps=300, learning_rate=0.05, precision="bf16")
    curve = train(task, settings, RunOptions(log_every=100, evaluate_every=100, quiet=True)).curve
    # With the first step's weights in every product, the loss stays at sum TRUE^2 = 14 and the weights walk past TRUE.
    assert curve[-1]["loss"][0] < 0.01
    torch.testing.assert_close(task.model.get_parameter("weight").detach(), TRUE, atol=0.05, rtol=0)


def test_a_context_within_another_sees_changed_weights() -> None:
    layer = nn.Linear(1, 1, bias=False)
    seen = []
    with precision_context("float32", CPU):
        for value in (1.0, 2.0):
            with torch.no_grad():
                layer.weight.fill_(value)
            with precision_context("bf16", CPU):
                seen.append(float(layer(torch.ones(1, 1)).detach()))
    assert seen == [1.0, 2.0]

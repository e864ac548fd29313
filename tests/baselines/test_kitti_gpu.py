"""KITTI Masks on a GPU: all seeds in one convolution give what one after the other gives on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ident3d.baselines.devices import precision_context
from ident3d.baselines.kitti_settings import KittiSettings
from ident3d.baselines.kitti_task import KittiTask
from ident3d.baselines.training import RunOptions, TrainingSettings, train
from ident3d.datasets.kitti_masks import KittiMasks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

MODELS = [
    KittiSettings(samples=100),
    KittiSettings(samples=100, conditional="normal", model_space="box"),
    KittiSettings(samples=100, model="slowvae"),
]


@pytest.fixture(scope="module")
def data() -> KittiMasks:
    return KittiMasks(synthetic=True, sequences=20, frames=30)


@pytest.mark.parametrize("settings", MODELS, ids=["laplace", "normal-box", "slowvae"])
def test_losses_and_gradients_are_those_of_the_cpu(
    settings: KittiSettings, data: KittiMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        task = KittiTask(settings, data, [0, 1], device)
        # Noise that is drawn on a GPU is another.
        randn = torch.Generator().manual_seed(0)
        noise = torch.randn(2, 64, 10, generator=randn)
        drawn = iter(noise.to(device))
        monkeypatch.setattr(torch, "randn", lambda *_, drawn=drawn, **__: next(drawn))
        with precision_context("float32", device):
            losses = task.losses(0)
            losses.sum().backward()  # type: ignore[no-untyped-call]
        monkeypatch.undo()
        gradients: list[Any] = [p.grad for p in task.model.parameters()]
        found.append((losses.detach().cpu(), [grad.cpu() for grad in gradients]))
    (here, own), (there, others) = found
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
    for a, b in zip(own, others, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-3 * float(a.abs().max()))


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("settings", MODELS, ids=["laplace", "normal-box", "slowvae"])
def test_a_training_runs_in_every_precision(settings: KittiSettings, precision: Any, data: KittiMasks) -> None:
    training = TrainingSettings(steps=100, learning_rate=1e-3, precision=precision)
    task = KittiTask(dataclasses.replace(settings, training=training), data, [0, 1], torch.device("cuda"))
    with torch.no_grad():
        before = task.losses(0).sum()
    trained = train(task, training, RunOptions(quiet=True, log_every=20))
    assert sum(trained.curve[-1]["loss"]) < float(before)

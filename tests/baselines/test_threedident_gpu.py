"""Encoders of pictures on a GPU: the numbers of the CPU, pictures and batches on the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from ident3d.baselines.threedident import ThreeDIdentTask
from ident3d.baselines.threedident_data import open_splits
from ident3d.baselines.threedident_settings import Mode, ThreeDIdentSettings
from ident3d.baselines.training_settings import TrainingSettings

pytest.importorskip("torchvision")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SETTINGS = ThreeDIdentSettings(
    batch=8, factors=("object_x", "object_y"), samples=64, training=TrainingSettings(steps=4, learning_rate=1e-3)
)


@pytest.mark.parametrize("mode", ["unsupervised", "supervised"])
def test_the_loss_and_its_gradients_are_those_of_the_cpu(fabricated: Path, mode: Mode) -> None:
    settings = dataclasses.replace(SETTINGS, mode=mode)
    found = []
    for device in (CPU, CUDA):
        task = ThreeDIdentTask(settings, open_splits(fabricated, settings), 0, device, quiet=True)
        losses = task.losses(3)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        found.append((losses.detach().cpu(), task.encoder.linear.weight.grad.cpu()))  # type: ignore[union-attr]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("cache", ["device", "disk"])
def test_batches_arrive_on_the_device(fabricated: Path, cache: str) -> None:
    settings = dataclasses.replace(SETTINGS, training=dataclasses.replace(SETTINGS.training, precision="bf16"))
    splits = open_splits(fabricated, settings)
    task = ThreeDIdentTask(settings, splits, 0, CUDA, cache="device" if cache == "device" else "disk", quiet=True)
    losses = task.losses(0)
    assert losses.device == CUDA
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.device == CUDA for p in task.model.parameters())

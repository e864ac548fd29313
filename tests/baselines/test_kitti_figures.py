"""The figures of a run on KITTI Masks: which there are, and that each says what it is of."""

from __future__ import annotations

import re

import pytest
import torch

from ident3d.baselines.kitti_figures import run_figures
from ident3d.baselines.kitti_settings import KittiSettings
from ident3d.baselines.kitti_task import KittiTask
from ident3d.datasets.kitti_masks import KittiMasks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data() -> KittiMasks:
    return KittiMasks(synthetic=True, sequences=20, frames=30)


def test_contrastive_models_leave_no_traversal(data: KittiMasks) -> None:
    task = KittiTask(KittiSettings(samples=200), data, [3, 4], CPU)
    figures = dict(run_figures(task, task.codes(), 12))
    assert list(figures) == ["transitions.png", "sequence.png"]
    assert data.title in figures["transitions.png"].get_suptitle()
    title = figures["sequence.png"].get_suptitle()
    assert "contrastive, laplace" in title
    assert "12 steps, seed 3" in title
    assert data.title in title
    longest = int(max(data.sequences[1:] - data.sequences[:-1]))
    assert f"{longest} frames" in title


def test_slowvae_is_traversed_code_by_code(data: KittiMasks) -> None:
    task = KittiTask(KittiSettings(model="slowvae", samples=200, dim=4), data, [0, 1], CPU)
    task.model.eval()
    figures = dict(run_figures(task, task.codes(), 5))
    assert list(figures)[-1] == "traversal.png"
    figure = figures["traversal.png"]
    assert "SlowVAE" in figure.get_suptitle()
    assert "SYNTHETIC" in figure.get_suptitle()
    labels = [ax.get_ylabel() for ax in figure.axes if ax.get_ylabel()]
    assert [re.match(r"code (\d)", label)[1] for label in labels] == ["0", "1", "2", "3"]  # type: ignore[index]
    score = task.matched(task.codes()[:1])[0]
    named = [any(name in label for name in data.factors.names) for label in labels]
    assert named == [k in score.assignment for k in range(4)]
    assert all(re.search(r"KL \d+\.\d\d nats", label.replace("\n", " ")) for label in labels)

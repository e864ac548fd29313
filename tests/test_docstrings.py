"""The examples in docstrings run as written, beside a dataset called `teapots`."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

MODULES = [
    "factors",
    "scene",
    "spaces",
    "distributions",
    "von_mises_fisher",
    "conditionals",
    "metrics",
    "dci",
    "ceilings",
    "baselines.evaluation",
    "baselines.kitti_settings",
    "baselines.losses",
    "baselines.mixing",
    "baselines.outputs",
    "baselines.whitening",
    "conversion.dataset",
    "datasets.blocks",
    "datasets.device",
    "datasets.ident3d",
    "datasets.loader",
    "datasets.kitti_masks",
    "datasets.streaming",
    "datasets.pairs",
    "datasets.pair_report",
    "shards.remote",
]


def run(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"ident3d.{module}"))
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str, fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teapots").symlink_to(fabricated)
    monkeypatch.chdir(tmp_path)
    run(module)


@pytest.mark.render
def test_examples_that_render() -> None:
    run("render.pictures")


def test_no_example_is_left_out() -> None:
    package = Path(importlib.import_module("ident3d").__file__ or "").parent
    # rglob does not follow the link to the baselines' folder.
    files = [*package.rglob("*.py"), *(package / "baselines").glob("*.py")]
    found = {str(p.relative_to(package).with_suffix("")).replace("/", ".") for p in files if ">>>" in p.read_text()}
    assert found == {*MODULES, "render.pictures"}

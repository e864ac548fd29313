"""A dataset in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ident3d.errors import DatasetError
from ident3d.factors import FACTORS
from ident3d.shards.info import info_text
from ident3d.shards.manifest import read_manifest


def test_everything_that_tells_datasets_apart_is_said(fabricated: Path) -> None:
    text = info_text(fabricated)
    manifest = read_manifest(fabricated)
    assert text.splitlines()[0] == f"{fabricated}: 3dident, 16 x 16 px"
    assert "split train: 24 samples in 5 shards" in text
    assert "split test: 6 samples in 2 shards" in text
    assert "latents drawn uniformly, seed 3" in text
    settings = ", ".join(f"{key} {value}" for key, value in manifest.render.items())
    assert "samples" in manifest.render
    assert f"quality draft: {settings}" in text
    assert manifest.versions["ident3d"] in text
    assert manifest.versions["blender"] in text
    assert manifest.scene is not None
    assert manifest.scene.digest in text
    for split in manifest.splits.values():
        mean, std = (" ".join(f"{x:.4f}" for x in values) for values in (split.mean, split.std))
        assert f"mean {mean}, std {std}" in text


def test_the_factors_stand_in_columns(fabricated: Path) -> None:
    lines = info_text(fabricated).splitlines()[-11:]
    assert lines[0].split() == ["column", "factor", "range", "unit", "drives"]
    starts = {line.index(row[4]) for line, row in zip(lines[1:], FACTORS.table(), strict=True)}
    assert starts == {lines[0].index("drives")}
    assert not any(line != line.rstrip() for line in lines)


def test_given_latents_are_told_from_drawn_ones(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    latents = np.full((4, 10), 0.5, np.float32)
    root = make_dataset(tmp_path / "data", {"train": 4}, latents=latents)
    assert "latents given by the user" in info_text(root)


def test_no_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no dataset\.json in it"):
        info_text(tmp_path)

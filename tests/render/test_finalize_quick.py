"""`ident3d finalize --quick` believes what was noted of each shard; without it every byte is read again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ident3d import DatasetError, RenderOptions, finalize, render_part
from ident3d.shards.verify import verify_dataset

pytestmark = pytest.mark.render


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    root = tmp_path / "d"
    options = {"resolution": 16, "quality": "draft", "shard_size": 3, "quiet": True, "workers": 1}
    assert render_part(RenderOptions(root, 6, shards="0-1", **options)) == []  # type: ignore[arg-type]
    return root


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)


def test_quick_makes_the_same_dataset(parts: Path) -> None:
    kept = shutil.copytree(parts, parts.with_name("kept"))
    one, other = finalize(parts), finalize(kept, quick=True)
    assert one == other
    assert (parts / "dataset.json").read_bytes() == (kept / "dataset.json").read_bytes()
    assert verify_dataset(kept) == []


def test_an_altered_shard_is_refused_unless_quick(parts: Path) -> None:
    flip(parts / "train" / "train-000001.tar")
    with pytest.raises(DatasetError, match=r"--shards 1$"):
        finalize(parts)
    assert not (parts / "dataset.json").exists()


def test_quick_leaves_it_to_verify(parts: Path) -> None:
    flip(parts / "train" / "train-000001.tar")
    finalize(parts, quick=True)
    assert {problem.shard for problem in verify_dataset(parts)} == {1}


def test_quick_sees_a_shard_of_another_size(parts: Path) -> None:
    os.truncate(parts / "train" / "train-000001.tar", 2048)
    with pytest.raises(DatasetError, match=r"--shards 1$"):
        finalize(parts, quick=True)

"""`verify --repair`: just what is damaged is rendered again, and every byte comes back."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from ident3d import DatasetError, Ident3D, RenderError, RenderOptions, render_dataset
from ident3d.render.repair import repair_dataset
from ident3d.shards.verify import verify_dataset

pytestmark = pytest.mark.render


@pytest.fixture
def dataset(rendered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rendered, tmp_path / "data"))


def files(root: Path) -> dict[str, bytes]:
    found = (p for p in sorted(root.rglob("*")) if p.is_file() and ".render" not in p.parts)
    return {str(p.relative_to(root)): p.read_bytes() for p in found}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def test_one_damaged_picture_costs_one_picture(dataset: Path, rendered: Path) -> None:
    flip(dataset / "train" / "train-000001.tar", 800)
    problems = verify_dataset(dataset)
    assert any(p.sample == 4 for p in problems)
    lines = repair_dataset(dataset, problems)
    assert lines == ["train/train-000001.tar: 1 of 4 samples rendered again"]
    assert files(dataset) == files(rendered)
    assert verify_dataset(dataset) == []


@pytest.mark.parametrize("damage", ["missing", "truncated", "swapped", "header", "empty"])
def test_damaged_shards_come_back(dataset: Path, rendered: Path, damage: str) -> None:
    shard = dataset / "train" / "train-000002.tar"
    data = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(data[: len(data) // 2])
    elif damage == "swapped":
        shard.write_bytes((dataset / "train" / "train-000000.tar").read_bytes())
    elif damage == "header":
        flip(shard, 5)
    else:
        shard.write_bytes(b"")
    problems = verify_dataset(dataset)
    assert problems
    repair_dataset(dataset, problems)
    assert files(dataset) == files(rendered)


def test_many_random_flips(dataset: Path, rendered: Path) -> None:
    moment = random.Random(2)
    for split, shard in (("train", 0), ("train", 1), ("test", 0)):
        path = dataset / split / f"{split}-{shard:06d}.tar"
        flip(path, moment.randrange(path.stat().st_size))
    for name in ("latents.npy", "index.npy"):
        path = dataset / "train" / name
        flip(path, moment.randrange(path.stat().st_size))
    repair_dataset(dataset, verify_dataset(dataset))
    assert files(dataset) == files(rendered)


def test_latents_and_index_come_back_without_blender(dataset: Path, rendered: Path, tmp_path: Path) -> None:
    (dataset / "train" / "latents.npy").unlink()
    flip(dataset / "test" / "index.npy", 200)
    lines = repair_dataset(dataset, verify_dataset(dataset))
    assert sorted(lines) == ["test/index.npy: written again", "train/latents.npy: written again"]
    assert files(dataset) == files(rendered)


def test_own_latents_come_back_from_the_shards(tmp_path: Path) -> None:
    u = np.random.default_rng(3).random((4, 10)).astype(np.float32)
    np.save(tmp_path / "u.npy", u)
    root = tmp_path / "d"
    render_dataset(
        RenderOptions(root, latents=tmp_path / "u.npy", resolution=16, quality="draft", shard_size=2, quiet=True)
    )
    (root / "train" / "latents.npy").unlink()
    repair_dataset(root, verify_dataset(root))
    np.testing.assert_array_equal(Ident3D(root).latents, u)
    (root / "train" / "latents.npy").unlink()
    (root / "train" / "train-000001.tar").unlink()
    with pytest.raises(DatasetError, match="cannot be drawn again"):
        repair_dataset(root, verify_dataset(root))


def test_a_left_over_shard_is_set_aside(dataset: Path, rendered: Path) -> None:
    (dataset / "train" / "train-000009.tar").write_bytes(b"who knows")
    repair_dataset(dataset, verify_dataset(dataset))
    assert (dataset / "train" / "train-000009.tar.left-over").read_bytes() == b"who knows"
    assert verify_dataset(dataset) == []


def test_a_damaged_scene_cannot_be_repaired(dataset: Path) -> None:
    (dataset / "scene" / "newell-teapot.json").write_text("{}")
    with pytest.raises(DatasetError, match="its scene is damaged"):
        repair_dataset(dataset, verify_dataset(dataset))


def test_nothing_is_lost_when_blender_is_absent(dataset: Path, tmp_path: Path) -> None:
    shard = dataset / "train" / "train-000001.tar"
    flip(shard, 800)
    before = shard.read_bytes()
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    with pytest.raises(RenderError):
        repair_dataset(dataset, verify_dataset(dataset), str(fake))
    assert shard.read_bytes() == before


def test_a_full_disk_is_told_as_such(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ident3d.render import repair

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "latents.npy")

    (dataset / "train" / "index.npy").unlink()
    monkeypatch.setattr(repair, "write_latents", full)
    with pytest.raises(RenderError, match=r"latents.npy: No space left on device; what is finished stays"):
        repair_dataset(dataset, verify_dataset(dataset))


def test_an_interrupted_repair_goes_on(dataset: Path, rendered: Path) -> None:
    """The state that a kill in the middle of a repair leaves: the damaged shard set aside, its successor begun."""
    shard = dataset / "train" / "train-000001.tar"
    flip(shard, len(shard.read_bytes()) - 3000)
    shard.rename(shard.with_name(f".{shard.name}.damaged"))
    lines = repair_dataset(dataset, verify_dataset(dataset))
    assert lines == ["train/train-000001.tar: 1 of 4 samples rendered again"]
    assert files(dataset) == files(rendered)

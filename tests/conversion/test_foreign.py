"""Converted shards in the libraries that people use already, with no code of ours between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ident3d import Ident3D

# webdataset leaves each shard to the garbage collector to close.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar:ResourceWarning"),
    pytest.mark.filterwarnings(
        r"ignore:Exception ignored in.* <_io\.FileIO name=.*\.tar:pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(autouse=True)
def _collect_here() -> Iterator[None]:
    """Let shards that webdataset left open be closed where the filter above is in force."""
    yield
    gc.collect()


def check(data: Ident3D, index: int, sample: Any) -> None:
    """A sample as another library gives it, of Multimodal3DIdent as WebP."""
    picture, text, latents = data[index]
    np.testing.assert_array_equal(np.asarray(sample["webp"].convert("RGB")), picture.numpy().transpose(1, 2, 0))
    np.testing.assert_array_equal(np.asarray(sample["latents.npy"], np.float32), latents.numpy())
    assert sample["txt"] == text
    names = [kind.name for kind in data.categorical]
    assert sample["json"] == {name: str(data.factors.labels(name)[index]) for name in names}


def test_webdataset(published: dict[str, Path], run: Callable[..., Path], tmp_path: Path) -> None:
    import webdataset

    root = run(published["multimodal3dident"], tmp_path / "out", format="webp")
    data, shards = Ident3D(root), [str(p) for p in sorted((root / "train").glob("*.tar"))]
    samples = list(webdataset.WebDataset(shards, shardshuffle=False).decode("pil"))
    assert [sample["__key__"] for sample in samples] == [f"{i:09d}" for i in range(20)]
    for i, sample in enumerate(samples):
        check(data, i, sample)


@pytest.mark.slow
def test_hugging_face(
    published: dict[str, Path], run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True, raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    root = run(published["multimodal3dident"], tmp_path / "out", format="webp")
    data = Ident3D(root)
    files = {"train": str(root / "train" / "*.tar")}
    by_files = datasets.load_dataset("webdataset", data_files=files, split="train")
    by_card = datasets.load_dataset(str(root))["train"]
    for rows in (by_files, by_card):
        assert len(rows) == 20
        for row in rows:
            check(data, int(row["__key__"]), row)

"""The shards in the libraries that people use already, with no code of ours between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hugging Face datasets, off the net and with a cache of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True, raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def check(data: Ident3D, index: int, picture: Any, latents: Any) -> None:
    expected, u = data[index]
    pixels = np.asarray(picture)
    np.testing.assert_array_equal(pixels, expected.numpy().transpose(1, 2, 0))
    np.testing.assert_array_equal(np.asarray(latents, np.float32), u.numpy())


@pytest.mark.parametrize("split", ["train", "test"])
def test_webdataset_reads_the_shards(fabricated: Path, split: str) -> None:
    import webdataset

    data = Ident3D(fabricated, split)
    urls = [str(p) for p in sorted((fabricated / split).glob("*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("pil"))
    assert [s["__key__"] for s in samples] == [f"{i:09d}" for i in range(len(data))]
    for i, sample in enumerate(samples):
        assert sample["latents.npy"].dtype == np.float32
        check(data, i, sample["png"], sample["latents.npy"])


def test_webdataset_makes_tuples_by_the_members_names(fabricated: Path) -> None:
    import webdataset

    url = str(fabricated / "train" / "train-{000000..000004}.tar")
    pairs = list(webdataset.WebDataset(url, shardshuffle=False).decode("rgb8").to_tuple("png", "latents.npy"))
    data = Ident3D(fabricated)
    assert len(pairs) == len(data)
    for i, (picture, latents) in enumerate(pairs):
        check(data, i, picture, latents)


def check_pair(data: Ident3D, index: int, sample: Any) -> None:
    x, positive, z, z_positive = data.pair(index)
    for expected, u, prefix in ((x, z, ""), (positive, z_positive, "pair.")):
        pixels = np.asarray(sample[f"{prefix}png"])
        np.testing.assert_array_equal(pixels, expected.numpy().transpose(1, 2, 0))
        np.testing.assert_array_equal(np.asarray(sample[f"{prefix}latents.npy"], np.float32), u.numpy())


def test_webdataset_reads_pairs(fabricated_pairs: Path) -> None:
    import webdataset

    data = Ident3D(fabricated_pairs)
    urls = [str(p) for p in sorted((fabricated_pairs / "train").glob("*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("pil"))
    assert [s["__key__"] for s in samples] == [f"{i:09d}" for i in range(24)]
    for i, sample in enumerate(samples):
        members = [key for key in sample if not key.startswith("__")]
        assert members == ["png", "latents.npy", "pair.png", "pair.latents.npy"]
        check_pair(data, i, sample)
    names = ("png", "pair.png", "latents.npy", "pair.latents.npy")
    tuples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple(*names))
    for i, values in enumerate(tuples):
        check_pair(data, i, dict(zip(names, values, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_reads_pairs(fabricated_pairs: Path, hub: Any, streaming: bool) -> None:
    files = {"train": str(fabricated_pairs / "train" / "*.tar")}
    rows = list(hub.load_dataset("webdataset", data_files=files, split="train", streaming=streaming))
    data = Ident3D(fabricated_pairs)
    assert [int(row["__key__"]) for row in rows] == list(range(24))
    for i, row in enumerate(rows):
        check_pair(data, i, row)


def test_by_its_card_a_split_of_pairs_is_a_configuration_of_its_own(fabricated_pairs: Path, hub: Any) -> None:
    single = hub.load_dataset(str(fabricated_pairs), "default")
    pairs = hub.load_dataset(str(fabricated_pairs), "pairs")
    assert (list(single), list(pairs)) == (["test"], ["train"])
    assert {"png", "latents.npy", "pair.png", "pair.latents.npy"} <= set(pairs["train"].column_names)
    assert "pair.png" not in single["test"].column_names


def check_rows(data: Ident3D, rows: Any) -> None:
    assert len(rows) == len(data)
    for row in rows:
        check(data, int(row["__key__"]), row["png"], row["latents.npy"])
    assert sorted(rows["__key__"]) == [f"{i:09d}" for i in range(len(data))]


@pytest.mark.slow
def test_hugging_face_reads_the_shards(fabricated: Path, hub: Any) -> None:
    files = {split: str(fabricated / split / "*.tar") for split in ("train", "test")}
    loaded = hub.load_dataset("webdataset", data_files=files)
    assert set(loaded) == {"train", "test"}
    for split in loaded:
        check_rows(Ident3D(fabricated, split), loaded[split])


@pytest.mark.slow
def test_hugging_face_reads_the_folder_by_its_card(fabricated: Path, hub: Any) -> None:
    loaded = hub.load_dataset(str(fabricated))
    assert set(loaded) == {"train", "test"}
    for split in loaded:
        check_rows(Ident3D(fabricated, split), loaded[split])


@pytest.mark.slow
def test_hugging_face_streams_the_shards(fabricated: Path, hub: Any) -> None:
    files = {"test": str(fabricated / "test" / "*.tar")}
    rows = list(hub.load_dataset("webdataset", data_files=files, split="test", streaming=True))
    data = Ident3D(fabricated, "test")
    assert [int(row["__key__"]) for row in rows] == list(range(6))
    for i, row in enumerate(rows):
        check(data, i, row["png"], row["latents.npy"])

"""Random access to pictures: by offset, by many threads and processes, from damaged and many shards."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ident3d.shards.reader
from ident3d.errors import DatasetError
from ident3d.shards.location import Location, SplitFiles
from ident3d.shards.manifest import read_manifest
from ident3d.shards.reader import SplitReader, index_blocks, rebuild_index, write_rebuilt_index


def reader_of(root: Path, split: str = "train") -> SplitReader:
    return SplitReader(SplitFiles(Location(root), split), read_manifest(root).splits[split])


def stored_pictures(root: Path, split: str = "train") -> list[bytes]:
    found = []
    for path in sorted((root / split).glob("*.tar")):
        with tarfile.open(path) as tar:
            found += [tar.extractfile(m).read() for m in tar.getmembers()[::2]]  # type: ignore[union-attr]
    return found


def test_every_picture_is_the_stored_one(fabricated: Path) -> None:
    reader, stored = reader_of(fabricated), stored_pictures(fabricated)
    assert len(reader) == len(stored) == 24
    for i in np.random.default_rng(0).permutation(24).tolist():
        assert reader.picture(i) == stored[i]


def test_a_sample_is_named_by_file_and_key(fabricated: Path) -> None:
    reader = reader_of(fabricated)
    assert reader.where(0) == f"{fabricated}/train/train-000000.tar, sample 000000000"
    assert reader.where(4) == f"{fabricated}/train/train-000000.tar, sample 000000004"
    assert reader.where(5) == f"{fabricated}/train/train-000001.tar, sample 000000005"
    assert reader.where(23) == f"{fabricated}/train/train-000004.tar, sample 000000023"


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_rebuilt_index_is_the_written_one(fabricated: Path, split: str) -> None:
    index = rebuild_index(SplitFiles(Location(fabricated), split), read_manifest(fabricated).splits[split])
    written = np.load(fabricated / split / "index.npy")
    np.testing.assert_array_equal(index, written)
    assert index.dtype == written.dtype


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_index_is_written_again_as_it_was(damaged: Path, split: str) -> None:
    path, entry = damaged / split / "index.npy", read_manifest(damaged).splits[split]
    whole = path.read_bytes()
    path.write_bytes(b"")
    assert write_rebuilt_index(path, SplitFiles(Location(damaged), split), entry) == entry.index_sha256
    assert path.read_bytes() == whole


def test_an_index_is_read_shard_by_shard(damaged: Path) -> None:
    files, entry = SplitFiles(Location(damaged), "train"), read_manifest(damaged).splits["train"]
    (damaged / "train" / "train-000002.tar").unlink()
    blocks, stored = index_blocks(files, entry), np.load(damaged / "train" / "index.npy")
    np.testing.assert_array_equal(next(blocks), stored[:5])
    np.testing.assert_array_equal(next(blocks), stored[5:10])
    with pytest.raises(DatasetError, match=r"train-000002\.tar: missing"):
        next(blocks)
    with pytest.raises(DatasetError, match=r"train-000002\.tar: missing"):
        write_rebuilt_index(damaged / "train" / "index.npy", files, entry)
    np.testing.assert_array_equal(np.load(damaged / "train" / "index.npy"), stored)
    assert not (damaged / "train" / ".index.npy.part").exists()


def test_an_absent_index_is_rebuilt(damaged: Path) -> None:
    (damaged / "train" / "index.npy").unlink()
    reader = reader_of(damaged)
    assert [reader.picture(i) for i in range(24)] == stored_pictures(damaged)
    assert not (damaged / "train" / "index.npy").exists()  # a dataset may lie on a read-only disk


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"\x93NUMPY", b"PK\x03\x04 no archive"],
    ids=["empty", "text", "torn header", "broken archive"],
)
def test_a_damaged_index_is_refused_by_name(damaged: Path, content: bytes) -> None:
    (damaged / "train" / "index.npy").write_bytes(content)
    with pytest.raises(DatasetError, match=r"train/index\.npy: damaged .*ident3d verify --repair"):
        reader_of(damaged)


def test_an_index_of_another_split_is_refused(damaged: Path) -> None:
    shutil.copy(damaged / "test" / "index.npy", damaged / "train" / "index.npy")
    with pytest.raises(DatasetError, match=r"index\.npy: has shape \(6, 2, 2\), expected \(24, 2, 2\)"):
        reader_of(damaged)


def test_an_index_of_another_type_is_refused(damaged: Path) -> None:
    np.save(damaged / "train" / "index.npy", np.zeros((24, 2, 2), np.float64))
    with pytest.raises(DatasetError, match=r"index\.npy: has"):
        reader_of(damaged)


@pytest.mark.parametrize(
    "entry", [(-1, 100), (100, -1), (2**62, 100), (100, 2**62), (10**6, 100), (-(2**63), 2**63 - 1)]
)
def test_an_index_that_points_nowhere_is_a_damaged_dataset(damaged: Path, entry: tuple[int, int]) -> None:
    index = np.load(damaged / "train" / "index.npy")
    index[7, 0] = entry
    np.save(damaged / "train" / "index.npy", index)
    reader = reader_of(damaged)
    with pytest.raises(DatasetError, match=r"train-000001\.tar"):
        reader.picture(7)


def test_a_truncated_shard_names_the_first_sample_it_lacks(damaged: Path) -> None:
    path = damaged / "train" / "train-000001.tar"
    os.truncate(path, path.stat().st_size // 2)
    reader = reader_of(damaged)
    reader.picture(5)
    with pytest.raises(DatasetError, match=r"train-000001\.tar, sample 000000009: the shard is truncated"):
        reader.picture(9)
    # Also where the shard is open already.
    with pytest.raises(DatasetError, match="sample 000000009: the shard is truncated"):
        reader.picture(9)
    reader.picture(10)


def test_a_missing_shard_is_named(damaged: Path) -> None:
    (damaged / "train" / "train-000002.tar").unlink()
    reader = reader_of(damaged)
    reader.picture(0)
    with pytest.raises(DatasetError, match=r"train-000002\.tar: No such file.*ident3d verify --repair"):
        reader.picture(12)


@pytest.mark.parametrize("change", ["missing", "truncated", "altered"])
def test_an_index_cannot_be_rebuilt_from_damaged_shards(damaged: Path, change: str) -> None:
    (damaged / "train" / "index.npy").unlink()
    path = damaged / "train" / "train-000003.tar"
    if change == "missing":
        path.unlink()
    elif change == "truncated":
        os.truncate(path, 5000)
    else:
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"train-000003\.tar: (missing|holds \d whole samples of 5)"):
        reader_of(damaged)


def test_nothing_is_open_before_the_first_read_and_all_is_closed_after(
    fabricated: Path, open_shards: Callable[[], list[str]]
) -> None:
    before = open_shards()
    reader = reader_of(fabricated)
    assert open_shards() == before
    reader.picture(0)
    reader.picture(1)
    reader.picture(20)
    assert len(open_shards()) == len(before) + 2
    del reader
    gc.collect()
    assert open_shards() == before


def test_a_pickled_reader_holds_no_handle_and_opens_none(
    fabricated: Path, open_shards: Callable[[], list[str]]
) -> None:
    reader = reader_of(fabricated)
    first = reader.picture(3)
    before = open_shards()
    again = pickle.loads(pickle.dumps(reader))
    assert open_shards() == before
    assert again.picture(3) == first
    assert reader.picture(3) == first


def test_threads_read_side_by_side(fabricated: Path, open_shards: Callable[[], list[str]]) -> None:
    stored = stored_pictures(fabricated)
    order = np.random.default_rng(1).integers(0, 24, 2000).tolist()
    for _ in range(5):  # a fresh reader each time: the first reads race to open the shards
        reader, before = reader_of(fabricated), len(open_shards())
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(reader.picture, order)) == [stored[i] for i in order]
        assert len(open_shards()) - before == 5
        del reader


def _read_all(reader: SplitReader, order: list[int], out: multiprocessing.SimpleQueue[list[bytes]]) -> None:
    out.put([reader.picture(i) for i in order])


def test_processes_that_share_a_descriptor_do_not_disturb_each_other(fabricated: Path) -> None:
    context = multiprocessing.get_context("fork")
    reader, stored = reader_of(fabricated), stored_pictures(fabricated)
    for i in range(24):
        reader.picture(i)
    order = np.random.default_rng(2).integers(0, 24, 1000).tolist()
    out: multiprocessing.SimpleQueue[list[bytes]] = context.SimpleQueue()
    children = [context.Process(target=_read_all, args=(reader, order, out)) for _ in range(2)]
    for child in children:
        child.start()
    mine = [reader.picture(i) for i in order]
    results = [out.get() for _ in children]
    for child in children:
        child.join()
    assert mine == results[0] == results[1] == [stored[i] for i in order]


def test_more_shards_than_may_be_open(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_dataset: Callable[..., Path],
    open_shards: Callable[[], list[str]],
) -> None:
    monkeypatch.setattr(ident3d.shards.reader, "MAX_OPEN", 3)
    root = make_dataset(tmp_path / "data", {"train": 10}, shard_size=1, resolution=8)
    reader, stored, before = reader_of(root), stored_pictures(root), len(open_shards())
    for i in [*range(10), *reversed(range(10))]:
        assert reader.picture(i) == stored[i]
        assert len(open_shards()) - before <= 3

"""Decoded pictures in memory and on disk: the same pixels as without, for whoever asks; and their statistics."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ident3d import DatasetError, Ident3D
from ident3d.datasets import decoded
from ident3d.datasets.decoded import computed_statistics
from ident3d.datasets.pictures import Pictures
from ident3d.shards.summary import EXTENSIONS
from ident3d.shards.tar import scan_samples

KINDS = ("ram", "disk")
BAD = 7
"""The sample that `broken` damages: the third of the second shard."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def broken(damaged: Path) -> Path:
    """A dataset with one picture that does not decode."""
    path = damaged / "train" / "train-000001.tar"
    content = bytearray(path.read_bytes())
    at = list(scan_samples(bytes(content), EXTENSIONS))[BAD - 5].members["png"]
    content[at.offset + 60 : at.offset + 90] = bytes(30)
    path.write_bytes(content)
    return damaged


@pytest.fixture
def pairs(fabricated_pairs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(fabricated_pairs, tmp_path / "pairs")


@pytest.fixture
def frames(damaged: Path) -> Path:
    """A dataset whose samples are frames in order of time."""
    manifest = json.loads((damaged / "dataset.json").read_text())
    manifest["splits"]["train"]["consecutive"] = True
    (damaged / "dataset.json").write_text(json.dumps(manifest))
    return damaged


def all_pictures(data: Pictures, *, positive: bool = False) -> torch.Tensor:
    count = data.pair_count if positive else len(data)
    return torch.stack([data.picture(i, positive=positive) for i in range(count)])


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many pictures were decoded since it was last asked."""
    seen: list[int] = []
    plain = Pictures.pixels

    def counted(self: Pictures, *args: Any, **options: Any) -> Any:
        seen.append(1)
        return plain(self, *args, **options)

    monkeypatch.setattr(Pictures, "pixels", counted)

    def count() -> int:
        found = len(seen)
        seen.clear()
        return found

    return count


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_those_without_a_cache(damaged: Path, kind: str, decodes: Callable[[], int]) -> None:
    plain = Ident3D(damaged)
    pictures = all_pictures(plain)
    decodes()
    data = Ident3D(damaged, cache=kind)
    assert decodes() == 24
    assert torch.equal(all_pictures(data), pictures)
    places = [3, 3, 23, 0]
    served, kept = data.pictures(places)
    assert kept == [0, 1, 2, 3]
    assert served.is_contiguous()
    assert torch.equal(served, pictures[places])
    assert torch.equal(data[-1][0], pictures[23])
    np.testing.assert_array_equal(data[5][1], plain.latents[5])
    x, *_ = next(iter(data.pairs("normal(scale=0.1)", batch_size=6, seed=2)))
    truth, *_ = next(iter(plain.pairs("normal(scale=0.1)", batch_size=6, seed=2, threads=0)))
    assert decodes() == 12  # those of the plain one
    assert torch.equal(x, truth)


@pytest.mark.parametrize("kind", KINDS)
def test_positives_are_cached_as_well(pairs: Path, kind: str, decodes: Callable[[], int]) -> None:
    plain, data = Ident3D(pairs), Ident3D(pairs, cache=kind)
    assert decodes() == 48
    assert torch.equal(all_pictures(data), all_pictures(plain))
    assert torch.equal(all_pictures(data, positive=True), all_pictures(plain, positive=True))
    for mine, truth in zip(data.pair(5), plain.pair(5), strict=True):
        assert torch.equal(mine, truth)
    for mine, truth in zip(data.pairs(batch_size=8), plain.pairs(batch_size=8), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, truth, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_of_frames_none_is_stored_twice(frames: Path, kind: str, decodes: Callable[[], int]) -> None:
    plain, data = Ident3D(frames), Ident3D(frames, cache=kind)
    assert decodes() == 24 == data.picture_count
    assert torch.equal(all_pictures(data, positive=True), all_pictures(plain)[1:])
    for mine, truth in zip(data.pairs(batch_size=8), plain.pairs(batch_size=8), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, truth, strict=True))
    with pytest.raises(IndexError, match="no next one"):
        data.pair(23)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_look_at_the_same_memory(damaged: Path, kind: str, start: str) -> None:
    pictures = all_pictures(Ident3D(damaged))
    data = Ident3D(damaged, cache=kind)
    for shard in (damaged / "train").glob("*.tar"):
        shard.unlink()  # so that nobody can decode
    loader = DataLoader(data, batch_size=5, num_workers=2, multiprocessing_context=start)
    assert torch.equal(torch.cat([x for x, _ in loader]), pictures)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_does_to_a_picture_is_not_seen_by_the_next(damaged: Path, kind: str) -> None:
    pictures = all_pictures(Ident3D(damaged))
    data = Ident3D(damaged, cache=kind, transform=lambda x: x.zero_())
    assert not data[3][0].any()
    assert not any(x.any() for x, _ in data.__getitems__([1, 2, 3]))
    data.picture(3).zero_()
    data.pictures([1, 2])[0].zero_()
    assert torch.equal(all_pictures(data), pictures)
    assert data.store is not None
    with pytest.raises(ValueError, match="read-only"):
        data.store.pixels[0] = 0


def test_a_copy_in_the_same_process_shares_the_store(damaged: Path) -> None:
    data = Ident3D(damaged, cache="ram")
    for copied in (copy.copy(data), copy.deepcopy(data)):
        assert copied.store is data.store
        assert torch.equal(copied[4][0], data[4][0])


def test_a_pickled_dataset_finds_the_file_and_does_without_the_memory(damaged: Path) -> None:
    on_disk, in_memory = Ident3D(damaged, cache="disk"), Ident3D(damaged, cache="ram")
    found = pickle.loads(pickle.dumps(on_disk))
    assert found.store is not None
    assert torch.equal(found[4][0], on_disk[4][0])
    with pytest.warns(UserWarning, match="no decoded pictures here .*memory of another process"):
        found = pickle.loads(pickle.dumps(in_memory))
    assert found.store is None
    assert torch.equal(found[4][0], in_memory[4][0])
    dumped = pickle.dumps(on_disk)
    assert isinstance(on_disk.store, decoded.DecodedStore)
    assert on_disk.store.path is not None
    on_disk.store.path.unlink()
    with pytest.warns(UserWarning, match="no decoded pictures here .*No such file"):
        assert pickle.loads(dumped).store is None
    assert torch.equal(on_disk[4][0], in_memory[4][0])  # what is mapped stays


def test_descriptors_are_given_back(damaged: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for kind in KINDS:
        data = Ident3D(damaged, cache=kind)
        del data
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_memory_is_refused_where_there_is_none(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ident3d.datasets.decoding.available_memory", lambda: 18_000)
    with pytest.raises(DatasetError, match=r"24 decoded pictures need 0.018 MB of memory, 0.018 MB .*cache='disk'"):
        Ident3D(damaged, cache="ram")
    Ident3D(damaged, "test", cache="ram")  # 6 pictures


def test_memory_that_runs_out_is_told(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(DatasetError, match=r"no room in memory \(Cannot allocate memory\); open it with cache='disk'"):
        Ident3D(damaged, cache="ram")


def test_without_memfd_an_unnamed_file_does(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    data = Ident3D(damaged, cache="ram")
    assert torch.equal(all_pictures(data), all_pictures(Ident3D(damaged)))


# Damaged pictures


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_picture_stops_the_building(broken: Path, kind: str) -> None:
    with pytest.raises(DatasetError, match=f"train-000001.tar, sample {BAD:09d}: the picture does not decode"):
        Ident3D(broken, cache=kind)
    assert not list(broken.glob(".decoded/*.u8"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_picture_is_left_out_and_counted(broken: Path, kind: str) -> None:
    with pytest.warns(UserWarning, match=f"left out: .*sample {BAD:09d}: the picture does not decode") as told:
        data = Ident3D(broken, cache=kind, on_error="skip")
    assert len(told) == 1
    assert data.skipped == 0
    plain = Ident3D(broken)
    with pytest.warns(UserWarning, match=f"sample {BAD:09d}"):
        served, kept = data.pictures([6, BAD, 8, BAD])
    assert kept == [0, 2]
    assert torch.equal(served, torch.stack([plain.picture(6), plain.picture(8)]))
    assert data.skipped == 2
    with pytest.raises(DatasetError, match=f"sample {BAD:09d}"):
        data[BAD]


def test_a_damaged_picture_is_known_to_those_who_open_the_file_later(broken: Path, fabricated: Path) -> None:
    with pytest.warns(UserWarning, match="left out"):
        Ident3D(broken, cache="disk", on_error="skip")
    data = Ident3D(broken, cache="disk", on_error="skip")
    with pytest.warns(UserWarning, match=f"sample {BAD:09d}"), pytest.raises(DatasetError, match="every sample"):
        data.__getitems__([BAD])
    with pytest.raises(DatasetError, match=f"sample {BAD:09d}"):
        Ident3D(broken, cache="disk")
    shutil.copy(fabricated / "train" / "train-000001.tar", broken / "train")
    with pytest.warns(UserWarning, match="mended by now; decoded again"):
        data = Ident3D(broken, cache="disk")
    assert torch.equal(all_pictures(data), all_pictures(Ident3D(fabricated)))


# Statistics


def numpy_statistics(pictures: torch.Tensor) -> tuple[Any, Any]:
    pixels = pictures.permute(1, 0, 2, 3).reshape(3, -1).numpy() / 255
    return pixels.mean(axis=1), pixels.std(axis=1)


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_statistics_are_those_of_all_pixels(damaged: Path, pairs: Path, kind: str) -> None:
    for root in (damaged, pairs):
        data = Ident3D(root, cache=kind)
        pictures = all_pictures(data)
        if data.has_pairs:
            pictures = torch.cat([pictures, all_pictures(data, positive=True)])
        mean, std = computed_statistics(data)
        np.testing.assert_allclose((mean, std), numpy_statistics(pictures), rtol=1e-12)
        assert (mean, std) == (data.mean, data.std)  # as the manifest has them


def test_statistics_are_computed_once(damaged: Path, decodes: Callable[[], int]) -> None:
    first = computed_statistics(Ident3D(damaged))
    assert decodes() == 24
    assert computed_statistics(Ident3D(damaged)) == first
    assert decodes() == 0
    (kept,) = damaged.glob(".decoded/*.pixels.json")
    for content in ("{", json.dumps({**json.loads(kept.read_text()), "fingerprint": "other"})):
        kept.write_text(content)
        assert computed_statistics(Ident3D(damaged)) == first
        assert decodes() == 24


def test_statistics_of_a_cached_split_decode_nothing(damaged: Path, decodes: Callable[[], int]) -> None:
    data = Ident3D(damaged, cache="disk")
    decodes()
    computed_statistics(data)
    assert decodes() == 0


def test_statistics_leave_damaged_pictures_out(broken: Path, fabricated: Path) -> None:
    with pytest.warns(UserWarning, match=f"left out: .*{BAD:09d}"):
        mean, std = computed_statistics(Ident3D(broken, on_error="skip"))
    whole = all_pictures(Ident3D(fabricated))
    truth = numpy_statistics(torch.cat([whole[:BAD], whole[BAD + 1 :]]))
    np.testing.assert_allclose((mean, std), truth, rtol=1e-12)
    assert computed_statistics(Ident3D(broken, on_error="skip")) == (mean, std)
    with pytest.raises(DatasetError, match=f"sample {BAD:09d}"):
        computed_statistics(Ident3D(broken))
    for shard in (broken / "train").glob("*.tar"):
        shard.write_bytes(b"")
    shutil.rmtree(broken / ".decoded")
    with pytest.warns(UserWarning, match="truncated"), pytest.raises(DatasetError, match="every picture is damaged"):
        computed_statistics(Ident3D(broken, on_error="skip"))


def test_statistics_need_no_place_to_be_kept(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "folders", lambda _: (damaged / "dataset.json" / "here",))
    data = Ident3D(damaged)
    assert computed_statistics(data) == (data.mean, data.std)


def test_names_of_files_are_plain(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Ident3D(damaged)
    monkeypatch.setattr(Ident3D, "fingerprint", lambda _: 64 * "a")
    data.split = "../../val set"
    assert re.fullmatch(r"\.\._\.\._val_set-[0-9a-f]{16}", decoded.stem_of(data))

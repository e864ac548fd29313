"""The manifest: read back as written, and refused with the reason where it cannot be."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ident3d.errors import DatasetError
from ident3d.factors import FACTORS
from ident3d.scenes import load_scene
from ident3d.shards.manifest import (
    FORMAT,
    NAME,
    ShardEntry,
    ShardTally,
    read_manifest,
    shard_name,
    write_manifest,
)
from ident3d.shards.summary import ShardSummary, file_sha256, summarise, write_index, write_rows


def test_a_manifest_says_what_the_dataset_is(fabricated: Path) -> None:
    m = read_manifest(fabricated)
    assert (m.format, m.name, m.resolution, m.quality, m.device) == (FORMAT, "3dident", 16, "draft", "CPU")
    assert m.factor_table == FACTORS
    assert m.scene is not None
    assert m.scene.digest == load_scene("3dident").digest
    assert list(m.splits) == ["train", "test"]
    train = m.splits["train"]
    assert (train.samples, train.shard_size, train.seed, train.latents) == (24, 5, 3, "drawn")
    assert [s.samples for s in train.shards] == [5, 5, 5, 5, 4]


def test_every_checksum_and_size_is_that_of_the_file(fabricated: Path) -> None:
    for name, split in read_manifest(fabricated).splits.items():
        folder = fabricated / name
        assert file_sha256(folder / "latents.npy") == split.latents_sha256
        assert file_sha256(folder / "index.npy") == split.index_sha256
        for number, shard in enumerate(split.shards):
            assert shard.name == shard_name(name, number)
            assert (folder / shard.name).stat().st_size == shard.bytes
            assert file_sha256(folder / shard.name) == shard.sha256


@pytest.mark.parametrize("split", ["train", "test"])
def test_pixel_statistics_are_numpys_over_all_pixels(fabricated: Path, split: str) -> None:
    import tarfile

    pictures = []
    for path in sorted((fabricated / split).glob("*.tar")):
        with tarfile.open(path) as tar:
            pictures += [np.array(Image.open(tar.extractfile(m))) for m in tar.getmembers()[::2]]  # type: ignore[arg-type]
    pixels = np.stack(pictures) / 255
    entry = read_manifest(fabricated).splits[split]
    np.testing.assert_allclose(entry.mean, pixels.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(entry.std, pixels.std(axis=(0, 1, 2)), rtol=1e-9)
    # The mean of each picture's own std, which is smaller, is what it must not be.
    assert (np.array(entry.std) > pixels.std(axis=(1, 2)).mean(axis=0)).all()


def statistics(summary: ShardSummary, resolution: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    tally = ShardTally(str)
    assert list(tally.through([summary])) == [summary]
    return tally.statistics(resolution)


def test_statistics_of_many_pixels_lose_no_digit() -> None:
    # 10^9 samples of 224 px, half of them 100 and half 101: in floats the difference of squares would vanish.
    n = 10**9 * 224**2 // 2
    sums, squares = 100 * n + 101 * n, 100**2 * n + 101**2 * n
    summary = ShardSummary(10**9, 1, 64 * "0", (), (sums,) * 3, (squares,) * 3)
    mean, std = statistics(summary, 224)
    assert mean == pytest.approx((100.5 / 255,) * 3, rel=1e-14)
    assert std == pytest.approx((0.5 / 255,) * 3, rel=1e-12)


def test_pictures_of_one_colour_have_no_deviation() -> None:
    summary = ShardSummary(3, 1, 64 * "0", (), (3 * 64 * 7,) * 3, (3 * 64 * 49,) * 3)
    assert statistics(summary, 8) == ((7 / 255,) * 3, (0.0,) * 3)


def test_the_index_lists_every_member_in_order(fabricated: Path, tmp_path: Path) -> None:
    latents = np.load(fabricated / "test" / "latents.npy")
    paths = sorted((fabricated / "test").glob("*.tar"))
    summaries = [summarise(paths[0], 0, latents[:5], 16), summarise(paths[1], 5, latents[5:], 16)]
    write_index(tmp_path / "index.npy", 6, 2, summaries)
    index = np.load(tmp_path / "index.npy")
    assert index.dtype == np.int64
    assert index.shape == (6, 2, 2)
    np.testing.assert_array_equal(index, np.load(fabricated / "test" / "index.npy"))
    np.testing.assert_array_equal(index[5], summaries[1].offsets[0])


def test_an_index_is_written_shard_by_shard_and_one_is_held_at_a_time(fabricated: Path, tmp_path: Path) -> None:
    latents = np.load(fabricated / "train" / "latents.npy")
    held: list[weakref.ref[ShardSummary]] = []

    def summaries() -> Iterator[ShardSummary]:
        for k, path in enumerate(sorted((fabricated / "train").glob("*.tar"))):
            assert sum(ref() is not None for ref in held) <= 1
            found = summarise(path, 5 * k, latents[5 * k : 5 * k + 5], 16)
            held.append(weakref.ref(found))
            yield found
            del found

    tally = ShardTally(lambda shard: shard_name("train", shard))
    digest = write_index(tmp_path / "index.npy", 24, 2, tally.through(summaries()))
    entry = read_manifest(fabricated).splits["train"]
    assert (tmp_path / "index.npy").read_bytes() == (fabricated / "train" / "index.npy").read_bytes()
    assert digest == entry.index_sha256
    assert tuple(tally.shards) == entry.shards
    assert tally.statistics(16) == (entry.mean, entry.std)


@pytest.mark.parametrize("samples", [23, 25])
def test_an_index_of_other_samples_than_were_said_is_not_written(tmp_path: Path, samples: int) -> None:
    summaries = [ShardSummary(n, 0, "", n * (((0, 1), (2, 3)),), (0, 0, 0), (0, 0, 0)) for n in (20, 4)]
    (tmp_path / "index.npy").write_bytes(b"old")
    with pytest.raises(ValueError, match=f"24 rows, expected {samples}"):
        write_index(tmp_path / "index.npy", samples, 2, summaries)
    assert [p.name for p in tmp_path.iterdir()] == ["index.npy"]
    assert (tmp_path / "index.npy").read_bytes() == b"old"


def test_rows_are_written_as_numpy_saves_them(tmp_path: Path) -> None:
    array = np.arange(70, dtype=np.float64).reshape(7, 5, 2)
    digest = write_rows(tmp_path / "a.npy", (7, 5, 2), np.float32, (array[i : i + 3] for i in (0, 3, 6)))
    np.save(tmp_path / "b.npy", array.astype(np.float32))
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    assert digest == file_sha256(tmp_path / "b.npy")
    with pytest.raises(ValueError, match=r"rows of shape \(5,\), expected \(5, 2\)"):
        write_rows(tmp_path / "c.npy", (7, 5, 2), np.float32, [array[..., 0]])
    assert not list(tmp_path.glob("*c.npy*"))


def test_a_manifest_is_read_as_it_was_written(fabricated: Path, tmp_path: Path) -> None:
    manifest = read_manifest(fabricated)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert (tmp_path / NAME).read_bytes() == (fabricated / NAME).read_bytes()


def test_shard_names_sort_as_numbers() -> None:
    assert shard_name("train", 3) == "train-000003.tar"
    assert shard_name("val", 123456) == "val-123456.tar"


def plain(root: Path) -> Any:
    return json.loads((root / NAME).read_text())


def put(root: Path, data: object) -> None:
    (root / NAME).write_text(json.dumps(data))


def test_a_newer_format_asks_for_a_newer_ident3d(damaged: Path) -> None:
    # A newer format may hold anything: the version is looked at first.
    put(damaged, {"format": FORMAT + 1, "whatever": []})
    with pytest.raises(DatasetError, match=f"format {FORMAT + 1}; this ident3d reads up to {FORMAT}: pip install -U"):
        read_manifest(damaged)


@pytest.mark.parametrize("version", [0, -1, "1", 1.5, None, True])
def test_a_format_that_never_was_is_refused(damaged: Path, version: object) -> None:
    put(damaged, {**plain(damaged), "format": version})
    with pytest.raises(DatasetError, match=f"{NAME}: .*format"):
        read_manifest(damaged)


def paths_of(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of nested tables, of lists the first element."""
    if isinstance(data, list):
        return paths_of(data[0], (*path, 0)) if data else []
    if not isinstance(data, dict):
        return []
    return [p for key, value in data.items() for p in ((*path, key), *paths_of(value, (*path, key)))]


# A split may be absent, and so may what has a default; render settings are kept as they were.
OPTIONAL = {"splits", "members", "pairs", "pair_latents_sha256", "periodic", "frozen", "train", "test"}
OPTIONAL |= {"categories", "categories_sha256", "extras", "consecutive", "skipped", "source"}


def test_any_missing_key_is_refused_by_name(damaged: Path) -> None:
    whole, checked, missed = plain(damaged), 0, []
    for path in paths_of(whole):
        if path[-1] in OPTIONAL or (path[0] == "render" and len(path) > 1):
            continue
        data = json.loads(json.dumps(whole))
        table = data
        for step in path[:-1]:
            table = table[step]
        del table[path[-1]]
        put(damaged, data)
        try:
            read_manifest(damaged)
        except DatasetError as error:
            checked += "not a manifest: " in str(error) and str(path[-1]) in str(error)
        else:
            missed.append(".".join(map(str, path)))
    assert missed == []
    assert checked > 30


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "not a manifest: expected a table|not a manifest: the file"),
        (b'"text"', "not a manifest"),
        (b"{}", "not a manifest: format: missing"),
    ],
)
def test_what_is_no_manifest_is_refused(damaged: Path, content: bytes, words: str) -> None:
    (damaged / NAME).write_bytes(content)
    with pytest.raises(DatasetError, match=f"{re.escape(str(damaged / NAME))}: ({words})"):
        read_manifest(damaged)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(resolution="16"), "resolution: expected a whole number"),
        (lambda d: d["splits"]["train"].update(samples=24.0), "splits.train.samples: expected a whole number"),
        (lambda d: d["splits"]["train"]["shards"][1].pop("sha256"), "splits.train.shards[1].sha256: missing"),
        (
            lambda d: d["splits"]["train"]["shards"][2].update(sha256=64 * "g"),
            f"splits.train.shards[2]: sha256 = '{64 * 'g'}': expected 64 hexadecimal digits",
        ),
        (
            lambda d: d["splits"]["train"]["shards"][4].update(name="../x.tar"),
            "splits.train.shards[4]: name = '../x.tar': expected a plain file name",
        ),
        (lambda d: d["splits"]["train"]["shards"][0].update(bytes=0), "splits.train.shards[0]: bytes = 0: expected 1"),
        (lambda d: d["splits"]["train"]["shards"][0].update(bytes=1.0), "shards[0].bytes: expected a whole number"),
        (lambda d: d["splits"]["train"]["shards"][3].update(x=1), "splits.train.shards[3].x: unknown key"),
        (lambda d: d["splits"]["train"]["shards"].pop(), "shards: expected 5 of 5 samples, 24 in all"),
        (lambda d: d["splits"]["train"]["shards"].clear(), "shards: expected 5 of 5 samples, 24 in all"),
        (lambda d: d["splits"]["train"]["shards"][1].update(samples=4), "shards: expected 5 of 5 samples, 24 in all"),
        (lambda d: d["splits"]["train"]["shards"][4].update(samples=5), "shards: expected 5 of 5 samples, 24 in all"),
        (lambda d: d["splits"]["train"].update(samples=10**18), "shards: expected 200000000000000000 of 5 samples"),
        (
            lambda d: d["splits"]["train"]["shards"][3].update(name="train-000001.tar"),
            "shards: two of the same name",
        ),
        (lambda d: d["splits"]["train"].update(mean=[0.5, 0.5]), "splits.train.mean: expected a list of 3"),
        (lambda d: d["factors"][0].update(extra=1), "factors[0].extra: unknown key"),
        (lambda d: d.update(later=1), "later: unknown key"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(damaged: Path, change: Callable[[Any], object], words: str) -> None:
    data = plain(damaged)
    change(data)
    put(damaged, data)
    with pytest.raises(DatasetError, match=re.escape(words)):
        read_manifest(damaged)


def test_no_folder_an_empty_one_and_an_unfinished_render_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such folder; expected a dataset made by `ident3d render`"):
        read_manifest(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="no such folder"):
        read_manifest(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=f"no {NAME} in it"):
        read_manifest(tmp_path / "empty")
    # What a finished render leaves in its working folder: its manifest must have been lost since.
    (tmp_path / "lost" / ".render" / "logs").mkdir(parents=True)
    with pytest.raises(DatasetError, match=f"no {NAME} in it"):
        read_manifest(tmp_path / "lost")
    (tmp_path / "begun" / ".render" / "train").mkdir(parents=True)
    (tmp_path / "begun" / ".render" / "train" / "plan.json").write_text("{}")
    with pytest.raises(DatasetError, match="is not finished; run the same `ident3d render` again"):
        read_manifest(tmp_path / "begun")


def test_frozen_factors_are_kept(fabricated: Path, tmp_path: Path) -> None:
    manifest = read_manifest(fabricated)
    held = dataclasses.replace(manifest.factors[0], frozen=0.25)
    write_manifest(tmp_path, dataclasses.replace(manifest, factors=(held, *manifest.factors[1:])))
    assert read_manifest(tmp_path).factor_table[0].frozen == 0.25


def test_a_shards_entry_holds_no_table_and_pickles() -> None:
    entry = ShardEntry("a.tar", 1, 2, 64 * "0")
    assert not hasattr(entry, "__dict__")
    assert pickle.loads(pickle.dumps(entry)) == entry

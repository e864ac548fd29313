"""Shards whose samples hold positive pairs: four members, of which a cut or a flipped bit costs one sample."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from ident3d.codecs import encode_png
from ident3d.errors import DatasetError
from ident3d.render.draws import draw_latents
from ident3d.shards.location import Location, SplitFiles
from ident3d.shards.manifest import NAME, SplitEntry, read_manifest, write_manifest
from ident3d.shards.reader import SplitReader, rebuild_index
from ident3d.shards.salvage import find_samples, good_pictures
from ident3d.shards.summary import (
    EXTENSIONS,
    PAIR_EXTENSIONS,
    BadSample,
    check_sample,
    extensions_of,
    file_sha256,
    summarise,
)
from ident3d.shards.tar import BLOCK, END, Sample, scan_samples
from ident3d.shards.verify import verify_dataset
from ident3d.shards.writer import ShardWriter, part_path, valid_prefix

pytestmark = pytest.mark.usefixtures("no_fsync")

START, COUNT, SIDE = 8, 3, 8
LATENTS = np.stack([draw_latents(0, split, START, START + COUNT, {}) for split in ("train", "test")], axis=1)


PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 2, SIDE, SIDE, 3), dtype=np.uint8)
PICTURES = [(encode_png(own), encode_png(pair)) for own, pair in PIXELS]


def write(path: Path) -> int:
    """Write the shard to its end; returns how many samples were found in place."""
    writer = ShardWriter(path, START, LATENTS, SIDE)
    kept = writer.done
    for pictures in PICTURES[kept:]:
        writer.append(*pictures)
    writer.finish()
    return kept


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("pairs") / "train-000000.tar"
    write(path)
    return path.read_bytes()


def samples(data: bytes) -> list[Sample]:
    return list(scan_samples(data, PAIR_EXTENSIONS))


def regions(sample: Sample) -> dict[str, range]:
    """The bytes of a sample by what they are."""
    found = {}
    for extension, m in sample.members.items():
        found[f"header of {extension}"] = range(m.offset - BLOCK, m.offset)
        found[extension] = range(m.offset, m.offset + m.size)
        found[f"padding of {extension}"] = range(m.offset + m.size, m.end)
    return found


REGIONS = [f"{what}{extension}" for extension in PAIR_EXTENSIONS for what in ("header of ", "", "padding of ")]


def test_the_latents_shape_says_which_members_there_are() -> None:
    assert extensions_of(LATENTS) == PAIR_EXTENSIONS == ("png", "latents.npy", "pair.png", "pair.latents.npy")
    assert extensions_of(LATENTS[:, 0]) == EXTENSIONS == ("png", "latents.npy")


def test_the_shard_holds_what_was_written(whole: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    assert list(files) == [f"{i:09d}.{e}" for i in range(START, START + COUNT) for e in PAIR_EXTENSIONS]
    for i in range(COUNT):
        for k, prefix in enumerate(("", "pair.")):
            key = f"{START + i:09d}.{prefix}"
            assert files[f"{key}png"] == PICTURES[i][k]
            stored = np.load(io.BytesIO(files[f"{key}latents.npy"]))
            assert (stored.dtype, stored.shape) == (np.float32, (10,))
            np.testing.assert_array_equal(stored, LATENTS[i, k])


def test_a_summary_is_what_tarfile_and_numpy_say(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "train-000000.tar"
    path.write_bytes(whole)
    summary = summarise(path, START, LATENTS, SIDE)
    with tarfile.open(path) as tar:
        members = [(m.offset_data, m.size) for m in tar]
    assert [o for s in summary.offsets for o in s] == members
    assert {len(s) for s in summary.offsets} == {4}
    assert (summary.samples, summary.bytes) == (COUNT, len(whole))
    assert summary.sha256 == hashlib.sha256(whole).hexdigest()
    wide = PIXELS.astype(np.int64)
    assert summary.sums == tuple(wide.sum(axis=(0, 1, 2, 3)).tolist())
    assert summary.squares == tuple((wide**2).sum(axis=(0, 1, 2, 3)).tolist())


@pytest.mark.parametrize("pictures", [(), PICTURES[0][:1], PICTURES[0] * 2])
def test_a_pair_is_two_pictures_and_nothing_else_is_written(tmp_path: Path, pictures: tuple[bytes, ...]) -> None:
    writer = ShardWriter(tmp_path / "train-000000.tar", START, LATENTS, SIDE)
    with pytest.raises(ValueError, match="zip"):
        writer.append(*pictures)
    writer.close()
    assert writer.part.read_bytes() == b""


def test_a_pair_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bytes) -> None:
    writes: list[int] = []
    write_to = os.write

    def counting(fd: int, data: bytes) -> int:
        writes.append(len(data))
        return write_to(fd, data)

    monkeypatch.setattr(os, "write", counting)
    write(tmp_path / "train-000000.tar")
    assert np.cumsum(writes).tolist() == [*(s.end for s in samples(whole)), len(whole)]


@pytest.mark.parametrize("region", REGIONS)
def test_a_cut_anywhere_keeps_what_is_whole_and_nothing_else(tmp_path: Path, whole: bytes, region: str) -> None:
    path = tmp_path / "train-000000.tar"
    ends = [s.end for s in samples(whole)]
    for number, sample in enumerate(samples(whole)):
        span = regions(sample)[region]
        cuts = {span.start, span.start + 1, (span.start + span.stop) // 2, span.stop - 1, span.stop}
        for cut in sorted(cuts):
            kept = number + (cut == sample.end)
            part_path(path).write_bytes(whole[:cut])
            assert valid_prefix(part_path(path), START, LATENTS, SIDE) == (kept, ends[kept - 1] if kept else 0)
            path.write_bytes(whole[:cut])
            assert good_pictures(path, START, LATENTS, SIDE) == dict(enumerate(PICTURES[:kept]))
            with pytest.raises(BadSample):
                summarise(path, START, LATENTS, SIDE)
            assert write(path) == kept, f"cut at {cut}"
            assert path.read_bytes() == whole, f"cut at {cut}"


def test_a_cut_in_the_end_marker_keeps_every_pair(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "train-000000.tar"
    for missing in (1, BLOCK, len(END) - 1):
        part_path(path).write_bytes(whole[:-missing])
        assert write(path) == COUNT
        assert path.read_bytes() == whole


@pytest.mark.parametrize("region", REGIONS)
def test_a_broken_region_costs_its_sample_alone(tmp_path: Path, whole: bytes, region: str) -> None:
    path = tmp_path / "damaged"
    for lost, sample in enumerate(samples(whole)):
        span = regions(sample)[region]
        if len(span) == 0:
            continue
        middle = (span.start + span.stop) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0x55]) + whole[middle + 1 :])
        expected = {i: pictures for i, pictures in enumerate(PICTURES) if i != lost}
        assert good_pictures(path, START, LATENTS, SIDE) == expected


def test_pairs_are_found_where_blocks_were_lost_or_put_between(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "damaged"
    second = samples(whole)[1].members["pair.png"].offset - BLOCK
    path.write_bytes(whole[:second] + whole[second + BLOCK :])  # without the header of the second picture
    assert good_pictures(path, START, LATENTS, SIDE) == {0: PICTURES[0], 2: PICTURES[2]}
    begin = samples(whole)[1].start
    path.write_bytes(whole[:begin] + b"\x55" * (3 * BLOCK) + whole[begin:])
    assert good_pictures(path, START, LATENTS, SIDE) == dict(enumerate(PICTURES))


@pytest.mark.parametrize("extension", PAIR_EXTENSIONS)
def test_any_altered_byte_of_a_member_is_seen(whole: bytes, extension: str) -> None:
    sample = samples(whole)[1]
    unseen = []
    for at in regions(sample)[extension]:
        altered = bytearray(whole)
        altered[at] ^= 1 << at % 8
        try:
            check_sample(memoryview(bytes(altered)), sample, START + 1, LATENTS[1], SIDE)
        except BadSample:
            continue
        unseen.append(at)
    assert unseen == []


def test_a_good_pair_gives_the_pixels_of_both(whole: bytes) -> None:
    for i, sample in enumerate(samples(whole)):
        for latents in (LATENTS[i], None):
            pixels = check_sample(memoryview(whole), sample, START + i, latents, SIDE)
            np.testing.assert_array_equal(pixels, PIXELS[i])


def test_latents_of_a_pair_in_the_wrong_places_are_seen(tmp_path: Path, whole: bytes) -> None:
    sample = samples(whole)[0]
    wrong = [LATENTS[0, ::-1], LATENTS[1], LATENTS[0, [0, 0]], LATENTS[0, [1, 1]], LATENTS[0, 0], LATENTS[0, [1]]]
    for latents in wrong:
        with pytest.raises(BadSample, match="latents differ"):
            check_sample(memoryview(whole), sample, START, latents, SIDE)
    path = tmp_path / "x.tar"
    path.write_bytes(whole)
    assert valid_prefix(path, START, LATENTS[:, ::-1], SIDE) == (0, 0)
    assert good_pictures(path, START, LATENTS[:, ::-1], SIDE) == {}


def test_pairs_and_single_samples_are_not_taken_for_each_other(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(whole)
    single = np.ascontiguousarray(LATENTS[:, 0])
    assert len(list(scan_samples(whole, EXTENSIONS))) < COUNT
    assert valid_prefix(path, START, single, SIDE)[0] < COUNT
    with pytest.raises(BadSample):
        summarise(path, START, single, SIDE)
    writer = ShardWriter(tmp_path / "y.tar", START, single, SIDE)
    for own, _ in PICTURES:
        writer.append(own)
    writer.finish()
    assert samples((tmp_path / "y.tar").read_bytes()) == []
    assert valid_prefix(tmp_path / "y.tar", START, LATENTS, SIDE) == (0, 0)
    assert find_samples(memoryview((tmp_path / "y.tar").read_bytes()), START, COUNT, PAIR_EXTENSIONS) == {}


def decoded(root: Path, split: str) -> NDArray[np.uint8]:
    """Every picture of a split, by tarfile and Pillow alone."""
    pictures = []
    for path in sorted((root / split).glob("*.tar")):
        with tarfile.open(path) as tar:
            pictures += [np.array(Image.open(tar.extractfile(m))) for m in tar if m.name.endswith("png")]  # type: ignore[arg-type]
    return np.stack(pictures)


@pytest.mark.parametrize(("split", "pictures"), [("train", 48), ("test", 6)])
def test_pixel_statistics_are_numpys_over_every_picture(fabricated_pairs: Path, split: str, pictures: int) -> None:
    pixels = decoded(fabricated_pairs, split) / 255
    assert len(pixels) == pictures
    entry = read_manifest(fabricated_pairs).splits[split]
    np.testing.assert_allclose(entry.mean, pixels.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(entry.std, pixels.std(axis=(0, 1, 2)), rtol=1e-9)


def test_the_index_has_four_members_and_can_be_rebuilt(fabricated_pairs: Path) -> None:
    folder, files = fabricated_pairs / "train", SplitFiles(Location(fabricated_pairs), "train")
    entry = read_manifest(fabricated_pairs).splits["train"]
    index = np.load(folder / "index.npy")
    assert (index.dtype, index.shape) == (np.int64, (24, 4, 2))
    for shard in range(5):
        with tarfile.open(folder / f"train-{shard:06d}.tar") as tar:
            expected = [(m.offset_data, m.size) for m in tar]
        np.testing.assert_array_equal(index[5 * shard : 5 * shard + 5].reshape(-1, 2), expected)
    np.testing.assert_array_equal(rebuild_index(files, entry), index)
    assert np.load(fabricated_pairs / "test" / "index.npy").shape == (6, 2, 2)
    reader, pictures = SplitReader(files, entry), decoded(fabricated_pairs, "train")
    for i in range(24):
        for k in (0, 1):
            got = np.array(Image.open(io.BytesIO(reader.picture(i, positive=bool(k)))))
            np.testing.assert_array_equal(got, pictures[2 * i + k])


def test_the_manifest_says_what_the_samples_hold(fabricated_pairs: Path, tmp_path: Path) -> None:
    manifest = read_manifest(fabricated_pairs)
    train, test = manifest.splits["train"], manifest.splits["test"]
    assert (train.pairs, train.members) == ("laplace(scale=0.05)", PAIR_EXTENSIONS)
    assert train.pair_latents_sha256 == file_sha256(fabricated_pairs / "train" / "pair.latents.npy")
    assert (test.pairs, test.members, test.pair_latents_sha256) == ("", EXTENSIONS, "")
    assert not (fabricated_pairs / "test" / "pair.latents.npy").exists()
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert verify_dataset(fabricated_pairs) == []


def test_a_manifest_from_before_there_were_pairs_is_read(fabricated: Path, tmp_path: Path) -> None:
    data = json.loads((fabricated / NAME).read_text())
    for split in data["splits"].values():
        for key in ("pairs", "members", "pair_latents_sha256"):
            del split[key]
    (tmp_path / NAME).write_text(json.dumps(data))
    assert read_manifest(tmp_path) == read_manifest(fabricated)


@pytest.mark.parametrize(
    "change",
    [
        lambda split: split.update(pairs=""),
        lambda split: split.update(members=list(EXTENSIONS)),
        lambda split: split.update(members=[*PAIR_EXTENSIONS[2:], *EXTENSIONS]),
        lambda split: split.update(members=[]),
        lambda split: split.pop("pairs"),
        lambda split: split.pop("members"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    fabricated_pairs: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    data = json.loads((fabricated_pairs / NAME).read_text())
    change(data["splits"]["train"])
    (tmp_path / NAME).write_text(json.dumps(data))
    with pytest.raises(DatasetError, match=re.escape("not a manifest: splits.train: members = ")):
        read_manifest(tmp_path)


def test_every_file_of_the_pairs_is_verified(fabricated_pairs: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(fabricated_pairs, root)
    path = root / "train" / "pair.latents.npy"
    good = path.read_bytes()
    path.unlink()
    assert [str(p) for p in verify_dataset(root)] == ["train/pair.latents.npy: missing"]
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert [str(p) for p in verify_dataset(root)] == [
        "train/pair.latents.npy: altered: sha256 differs from the manifest's"
    ]
    # Latents that are whole and in accord with the manifest, but not with the shards: each sample tells.
    np.save(path, np.load(root / "train" / "latents.npy"))
    manifest = read_manifest(root)
    entry: SplitEntry = dataclasses.replace(manifest.splits["train"], pair_latents_sha256=file_sha256(path))
    write_manifest(root, dataclasses.replace(manifest, splits={**manifest.splits, "train": entry}))
    problems = verify_dataset(root)
    assert [p.sample for p in problems] == list(range(24))
    assert {p.detail for p in problems} == {"latents differ from the split's latents"}

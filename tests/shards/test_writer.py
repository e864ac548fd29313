"""Writing a shard: whatever an interrupted writer left, the next one ends with the bytes of an undisturbed one."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ident3d.codecs import encode_png
from ident3d.render.draws import draw_latents
from ident3d.shards.summary import EXTENSIONS, summarise
from ident3d.shards.tar import BLOCK, END, scan_samples
from ident3d.shards.writer import ShardWriter, part_path, valid_prefix

pytestmark = pytest.mark.usefixtures("no_fsync")

START, COUNT, SIDE = 8, 3, 8
LATENTS = draw_latents(0, "train", START, START + COUNT, {})


PICTURES = [
    encode_png(np.random.default_rng(i).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) for i in range(COUNT)
]


def write(path: Path) -> int:
    """Write the shard to its end; returns how many samples were found in place."""
    writer = ShardWriter(path, START, LATENTS, SIDE)
    kept = writer.done
    for picture in PICTURES[kept:]:
        writer.append(picture)
    writer.finish()
    return kept


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("writer") / "train-000000.tar"
    write(path)
    return path.read_bytes()


def sample_ends(whole: bytes) -> list[int]:
    return [s.end for s in scan_samples(whole, EXTENSIONS)]


def regions(whole: bytes) -> dict[str, list[range]]:
    """The bytes of a shard by what they are."""
    found: dict[str, list[range]] = {"header": [], "picture": [], "latents": [], "padding": []}
    for sample in scan_samples(whole, EXTENSIONS):
        for name, extension in (("picture", EXTENSIONS[0]), ("latents", EXTENSIONS[1])):
            m = sample.members[extension]
            found["header"].append(range(m.offset - BLOCK, m.offset))
            found[name].append(range(m.offset, m.offset + m.size))
            found["padding"].append(range(m.offset + m.size, m.end))
    return found


def test_a_shard_appears_when_whole_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "train-000000.tar"
    writer = ShardWriter(path, START, LATENTS, SIDE)
    for picture in PICTURES:
        assert not path.exists()
        assert list(tmp_path.glob("*.tar")) == []
        writer.append(picture)
    assert not path.exists()
    writer.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["train-000000.tar"]


def test_the_shard_holds_what_was_written(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "train-000000.tar"
    path.write_bytes(whole)
    summary = summarise(path, START, LATENTS, SIDE)
    assert summary.samples == COUNT
    assert [s.key for s in scan_samples(whole, EXTENSIONS)] == ["000000008", "000000009", "000000010"]
    for (at, size), picture in zip((s[0] for s in summary.offsets), PICTURES, strict=True):
        assert whole[at : at + size] == picture
    for (at, size), latent in zip((s[1] for s in summary.offsets), LATENTS, strict=True):
        np.testing.assert_array_equal(np.load(io.BytesIO(whole[at : at + size])), latent)


def test_a_sample_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bytes) -> None:
    writes: list[int] = []
    write_to = os.write

    def counting(fd: int, data: bytes) -> int:
        writes.append(len(data))
        return write_to(fd, data)

    monkeypatch.setattr(os, "write", counting)
    write(tmp_path / "train-000000.tar")
    assert np.cumsum(writes).tolist() == [*sample_ends(whole), len(whole)]


def test_a_short_write_is_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bytes) -> None:
    write_to = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write_to(fd, bytes(data)[:100]))
    write(tmp_path / "train-000000.tar")
    assert (tmp_path / "train-000000.tar").read_bytes() == whole


def test_every_sample_already_in_place_is_kept(tmp_path: Path, whole: bytes) -> None:
    ends = [0, *sample_ends(whole)]
    for kept, end in enumerate(ends):
        path = tmp_path / "train-000000.tar"
        part_path(path).write_bytes(whole[:end])
        assert write(path) == kept
        assert path.read_bytes() == whole
        path.unlink()


def test_a_cut_at_any_byte_is_mended(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "train-000000.tar"
    ends = sample_ends(whole)
    blocks = {at + d for at in range(0, len(whole), BLOCK) for d in (-1, 0, 1)}
    for cut in sorted({*range(0, len(whole) + 1, 3), *blocks, len(whole)} & {*range(len(whole) + 1)}):
        part_path(path).write_bytes(whole[:cut])
        kept = write(path)
        assert kept == sum(end <= cut for end in ends), f"cut at {cut}"
        assert path.read_bytes() == whole, f"cut at {cut}"


@pytest.mark.parametrize("region", ["header", "picture", "latents", "padding"])
def test_a_flipped_bit_is_mended(tmp_path: Path, whole: bytes, region: str) -> None:
    path = tmp_path / "train-000000.tar"
    left: list[int] = []
    for at in [i for r in regions(whole)[region][2:] for i in r]:
        data = bytearray(whole[: -len(END)])
        data[at] ^= 1 << at % 8
        part_path(path).write_bytes(data)
        write(path)
        if path.read_bytes() != whole:
            left.append(at)
    assert left == [], f"flips in the {region} that stay in the finished shard"


@pytest.mark.parametrize(
    "wreck",
    [
        lambda whole: bytes(len(whole)),
        lambda whole: whole[:100] + bytes(len(whole)),
        lambda whole: b"noise" * 999,
        lambda whole: whole + whole,
        lambda whole: whole[: -len(END)] + whole[: -len(END)],
        lambda whole: whole[BLOCK:],
        lambda whole: b"",
    ],
    ids=["zeros", "torn to zeros", "noise", "twice", "twice without an end", "first block lost", "empty"],
)
def test_what_is_no_prefix_of_the_shard_is_cut_off(
    tmp_path: Path, whole: bytes, wreck: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "train-000000.tar"
    part_path(path).write_bytes(wreck(whole))
    write(path)
    assert path.read_bytes() == whole


def test_samples_of_another_run_are_not_kept(tmp_path: Path, whole: bytes) -> None:
    part = tmp_path / "x.part"
    part.write_bytes(whole)
    assert valid_prefix(part, START, LATENTS, SIDE) == (COUNT, sample_ends(whole)[-1])
    others = draw_latents(1, "train", START, START + COUNT, {})
    mixed = np.concatenate([LATENTS[:1], others[1:]])
    assert valid_prefix(part, START, others, SIDE) == (0, 0)
    assert valid_prefix(part, START, mixed, SIDE) == (1, sample_ends(whole)[0])
    assert valid_prefix(part, START + 1, LATENTS, SIDE) == (0, 0)
    assert valid_prefix(part, START, LATENTS, 2 * SIDE) == (0, 0)
    assert valid_prefix(part, START, LATENTS[:2], SIDE) == (2, sample_ends(whole)[1])
    assert valid_prefix(tmp_path / "absent", START, LATENTS, SIDE) == (0, 0)


def test_closing_leaves_what_is_there_for_the_next_writer(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "train-000000.tar"
    writer = ShardWriter(path, START, LATENTS, SIDE)
    writer.append(PICTURES[0])
    writer.close()
    writer.close()
    assert not path.exists()
    assert write(path) == 1
    assert path.read_bytes() == whole


def test_an_unfinished_shard_gets_no_name(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "train-000000.tar", START, LATENTS, SIDE)
    writer.append(PICTURES[0])
    with pytest.raises(ValueError, match=r"train-000000\.tar holds 1 samples of 3"):
        writer.finish()
    writer.close()
    assert list(tmp_path.glob("*.tar")) == []


def test_a_part_is_no_shard_to_any_reader() -> None:
    part = part_path(Path("/data/train/train-000000.tar"))
    assert part.parent == Path("/data/train")
    assert part.name.startswith(".")
    assert part.suffix != ".tar"

"""What a shard holds, from its bytes alone, and what is wrong with a sample."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from ident3d.codecs import decode
from ident3d.shards.summary import (
    EXTENSIONS,
    BadSample,
    ShardSummary,
    check_sample,
    file_sha256,
    map_file,
    summarise,
)
from ident3d.shards.tar import END, Sample, member_bytes, scan_samples

START, STOP, SIDE = 5, 10, 16


@pytest.fixture(scope="module")
def shard(fabricated: Path) -> Path:
    return fabricated / "train" / "train-000001.tar"


@pytest.fixture(scope="module")
def latents(fabricated: Path) -> NDArray[np.float32]:
    array: NDArray[np.float32] = np.load(fabricated / "train" / "latents.npy")[START:STOP]
    return array


def encode(pixels: NDArray[np.uint8], form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def test_a_summary_is_what_tarfile_pillow_and_numpy_say(shard: Path, latents: NDArray[np.float32]) -> None:
    summary = summarise(shard, START, latents, SIDE)
    with tarfile.open(shard) as tar:
        members = tar.getmembers()
        pixels = [np.array(Image.open(tar.extractfile(m))) for m in members[::2]]  # type: ignore[arg-type]
    assert summary.samples == 5
    assert summary.bytes == shard.stat().st_size
    assert summary.sha256 == hashlib.sha256(shard.read_bytes()).hexdigest()
    assert [o for s in summary.offsets for o in s] == [(m.offset_data, m.size) for m in members]
    every = np.stack(pixels).astype(np.int64)
    assert summary.sums == tuple(every.sum(axis=(0, 1, 2)).tolist())
    assert summary.squares == tuple((every**2).sum(axis=(0, 1, 2)).tolist())


def test_sums_of_white_pictures_do_not_overflow(tmp_path: Path) -> None:
    # 300 x 300 of 255: past 2^32 in squares, and past 2^16 in each pixel's square of a narrower type.
    side, u = 300, np.zeros((1, 10), np.float32)
    data = member_bytes("000000000.png", encode(np.full((side, side, 3), 255, np.uint8)))
    buffer = io.BytesIO()
    np.save(buffer, u[0])
    path = tmp_path / "white.tar"
    path.write_bytes(data + member_bytes("000000000.latents.npy", buffer.getvalue()) + END)
    summary = summarise(path, 0, u, side)
    assert summary.sums == (255 * side**2,) * 3
    assert summary.squares == (255**2 * side**2,) * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:-1], "does not end as a whole archive does"),
        (lambda d: d + bytes(512), "does not end as a whole archive does"),
        (lambda d: d[: -len(END)], "does not end as a whole archive does"),
        (lambda d: d[: len(d) // 2], "holds 2 whole samples of 5"),
        (lambda d: b"", "holds 0 whole samples of 5"),
        (lambda d: d[: -len(END)] + d, "holds more than the 5 samples that belong in it"),
    ],
)
def test_a_shard_that_is_not_whole_is_refused(
    tmp_path: Path, shard: Path, latents: NDArray[np.float32], change: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(change(shard.read_bytes()))
    with pytest.raises(BadSample, match=re.escape(message)):
        summarise(path, START, latents, SIDE)


def test_a_shard_of_other_samples_is_refused(shard: Path, latents: NDArray[np.float32]) -> None:
    with pytest.raises(BadSample, match="misnumbered: holds 000000005 where 000000006 belongs"):
        summarise(shard, START + 1, latents, SIDE)
    with pytest.raises(BadSample, match="latents differ"):
        summarise(shard, START, latents[::-1], SIDE)
    with pytest.raises(BadSample, match=r"picture has shape \(16, 16, 3\), expected \(32, 32, 3\)"):
        summarise(shard, START, latents, 32)


def first_sample(data: bytes) -> Sample:
    return next(scan_samples(data, EXTENSIONS))


def test_a_good_sample_gives_its_pixels(shard: Path, latents: NDArray[np.float32]) -> None:
    data = shard.read_bytes()
    sample = first_sample(data)
    pixels = check_sample(memoryview(data), sample, START, latents[0], SIDE)
    assert pixels.shape == (1, SIDE, SIDE, 3)
    at = sample.members["png"]
    np.testing.assert_array_equal(pixels[0], np.array(Image.open(io.BytesIO(data[at.offset : at.offset + at.size]))))
    np.testing.assert_array_equal(check_sample(memoryview(data), sample, START, None, SIDE), pixels)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_any_altered_byte_of_a_member_is_seen(shard: Path, latents: NDArray[np.float32], extension: str) -> None:
    data = shard.read_bytes()
    sample = first_sample(data)
    member = sample.members[extension]
    unseen = []
    for at in range(member.size):
        altered = bytearray(data)
        altered[member.offset + at] ^= 1 << at % 8
        try:
            check_sample(memoryview(bytes(altered)), sample, START, latents[0], SIDE)
        except BadSample:
            continue
        unseen.append(at - member.size)
    assert unseen == []


@pytest.mark.parametrize("keep", [0, 7, 8, 20, 33, 60, 200, -12, -1])
def test_a_cut_picture_is_seen(shard: Path, keep: int) -> None:
    data = shard.read_bytes()
    sample = first_sample(data)
    at = sample.members["png"]
    picture = data[at.offset : at.offset + at.size][:keep]
    other = member_bytes(at.name, picture) + member_bytes(sample.members["latents.npy"].name, b"")
    with pytest.raises(BadSample, match="picture does not decode"):
        check_sample(memoryview(other), first_sample(other), START, None, SIDE)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "I;16"])
def test_every_mode_decodes_to_three_channels(mode: str) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (4, 6), dtype=np.uint8)
    picture = Image.fromarray(grey).convert(mode) if mode != "I;16" else Image.fromarray(grey.astype(np.uint16))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    pixels = decode(buffer.getvalue())
    assert pixels.shape == (4, 6, 3)
    assert pixels.dtype == np.uint8
    assert pixels.flags.writeable


def test_an_rgb_picture_decodes_to_its_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    np.testing.assert_array_equal(decode(encode(pixels)), pixels)


def test_the_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 5000])
def test_a_mapped_file_is_its_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with map_file(tmp_path / "a") as data:
        assert bytes(data) == content


def test_a_summary_can_be_compared_and_kept(shard: Path, latents: NDArray[np.float32]) -> None:
    first, second = (summarise(shard, START, latents, SIDE) for _ in range(2))
    assert first == second
    assert isinstance(hash(first), int)
    assert isinstance(first, ShardSummary)

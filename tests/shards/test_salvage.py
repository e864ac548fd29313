"""What is found again in a shard that is broken in places."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ident3d.shards.salvage import find_samples, good_pictures
from ident3d.shards.summary import EXTENSIONS
from ident3d.shards.tar import BLOCK, Sample, scan_samples

START, COUNT, SIDE = 10, 5, 16


@pytest.fixture(scope="module")
def data(fabricated: Path) -> bytes:
    return (fabricated / "train" / "train-000002.tar").read_bytes()


@pytest.fixture(scope="module")
def latents(fabricated: Path) -> NDArray[np.float32]:
    array: NDArray[np.float32] = np.load(fabricated / "train" / "latents.npy")[START : START + COUNT]
    return array


def samples(data: bytes) -> list[Sample]:
    return list(scan_samples(data, EXTENSIONS))


def pictures(data: bytes) -> dict[int, tuple[bytes, ...]]:
    spans = [s.members["png"] for s in samples(data)]
    return {i: (data[m.offset : m.offset + m.size],) for i, m in enumerate(spans)}


def salvaged(tmp_path: Path, data: bytes, latents: NDArray[np.float32]) -> dict[int, tuple[bytes, ...]]:
    path = tmp_path / "damaged"
    path.write_bytes(data)
    return good_pictures(path, START, latents, SIDE)


def test_a_whole_shard_gives_all(tmp_path: Path, data: bytes, latents: NDArray[np.float32]) -> None:
    assert find_samples(memoryview(data), START, COUNT) == dict(enumerate(samples(data)))
    assert salvaged(tmp_path, data, latents) == pictures(data)


@pytest.mark.parametrize("lost", range(COUNT))
@pytest.mark.parametrize("part", ["png header", "png", "latents header", "latents", "all"])
def test_one_broken_sample_costs_no_other(
    tmp_path: Path, data: bytes, latents: NDArray[np.float32], lost: int, part: str
) -> None:
    sample = samples(data)[lost]
    png, npy = sample.members["png"], sample.members["latents.npy"]
    at, size = {
        "png header": (png.offset - BLOCK, BLOCK),
        "png": (png.offset + 60, 8),
        "latents header": (npy.offset - BLOCK, BLOCK),
        "latents": (npy.offset + 130, 8),
        "all": (png.offset - BLOCK, sample.end - png.offset + BLOCK),
    }[part]
    broken = data[:at] + b"\xaa" * size + data[at + size :]
    expected = {i: p for i, p in pictures(data).items() if i != lost}
    assert salvaged(tmp_path, broken, latents) == expected


@pytest.mark.parametrize("length", [0, 100, 3000, 6000, 10_000])
def test_a_cut_shard_gives_what_is_before_the_cut(
    tmp_path: Path, data: bytes, latents: NDArray[np.float32], length: int
) -> None:
    whole = [i for i, s in enumerate(samples(data)) if s.end <= length]
    assert list(salvaged(tmp_path, data[:length], latents)) == whole


def test_samples_are_found_where_blocks_were_lost_or_put_between(
    tmp_path: Path, data: bytes, latents: NDArray[np.float32]
) -> None:
    second = samples(data)[1]
    at = second.members["png"].offset
    expected = {i: p for i, p in pictures(data).items() if i != 1}
    assert salvaged(tmp_path, data[:at] + data[at + BLOCK :], latents) == expected
    # Before a header: nothing of any sample is hurt.
    start = at - BLOCK
    assert salvaged(tmp_path, data[:start] + b"\x55" * (3 * BLOCK) + data[start:], latents) == pictures(data)


def test_samples_in_another_order_are_found_by_their_numbers(
    tmp_path: Path, data: bytes, latents: NDArray[np.float32]
) -> None:
    ends = [0, *(s.end for s in samples(data))]
    pieces = [data[a:b] for a, b in pairwise(ends)]
    assert salvaged(tmp_path, b"".join(pieces[::-1]), latents) == pictures(data)


def test_samples_that_belong_elsewhere_are_not_taken(
    tmp_path: Path, fabricated: Path, data: bytes, latents: NDArray[np.float32]
) -> None:
    other = (fabricated / "train" / "train-000001.tar").read_bytes()
    assert salvaged(tmp_path, other, latents) == {}
    assert salvaged(tmp_path, other + data, latents) == pictures(data)


def test_the_first_of_two_copies_counts(data: bytes) -> None:
    once = find_samples(memoryview(data), START, COUNT)
    assert find_samples(memoryview(data + data), START, COUNT) == once


def test_an_empty_shard_has_no_samples() -> None:
    assert find_samples(memoryview(b""), 0, 5) == {}
    assert find_samples(memoryview(bytes(4 * BLOCK)), 0, 0) == {}

"""Tar members: the same bytes every time, read by tarfile, and scanned however the archive ends."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest

from ident3d.shards.tar import BLOCK, END, Member, Sample, key_of, member_bytes, scan_members, scan_samples

CONTENTS = [
    ("000000000.png", b"p" * 700),
    ("000000000.npy", b""),
    ("000000001.png", b"q" * 512),
    ("000000001.npy", b"z"),
]
ARCHIVE = b"".join(member_bytes(name, data) for name, data in CONTENTS) + END
EXT = ("png", "npy")


def test_tarfile_reads_the_archive() -> None:
    with tarfile.open(fileobj=io.BytesIO(ARCHIVE)) as tar:
        members = tar.getmembers()
        for info, (name, data) in zip(members, CONTENTS, strict=True):
            file = tar.extractfile(info)
            assert file is not None
            assert (info.name, file.read()) == (name, data)


def test_no_field_of_a_header_differs_between_runs() -> None:
    with tarfile.open(fileobj=io.BytesIO(ARCHIVE)) as tar:
        for info in tar:
            assert (info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode) == (0, 0, 0, "", "", 0o644)
            assert info.isreg()
    assert member_bytes("a.png", b"x") == member_bytes("a.png", b"x")


def test_the_format_is_plain_ustar() -> None:
    header = member_bytes("a.png", b"x")[:BLOCK]
    assert header[257:265] == b"ustar\x0000"


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1024])
def test_a_member_fills_whole_blocks(size: int) -> None:
    data = member_bytes("a.png", b"x" * size)
    assert len(data) == BLOCK * (1 + -(-size // BLOCK))
    assert set(data[BLOCK + size :]) <= {0}


def test_a_scan_agrees_with_tarfile() -> None:
    with tarfile.open(fileobj=io.BytesIO(ARCHIVE)) as tar:
        expected = [Member(info.name, info.offset_data, info.size) for info in tar]
    assert list(scan_members(ARCHIVE)) == expected
    assert list(scan_members(memoryview(ARCHIVE))) == expected


def test_samples_are_members_of_one_key_in_order() -> None:
    first, second = scan_samples(ARCHIVE, EXT)
    assert (first.key, list(first.members)) == ("000000000", ["png", "npy"])
    assert first.members["png"] == Member("000000000.png", BLOCK, 700)
    assert (second.key, second.end) == ("000000001", len(ARCHIVE) - len(END))
    assert second.members["npy"].end == second.end


def test_an_extension_may_hold_dots() -> None:
    data = member_bytes("7.png", b"x") + member_bytes("7.latents.npy", b"y")
    (sample,) = scan_samples(data, ("png", "latents.npy"))
    assert list(sample.members) == ["png", "latents.npy"]


@pytest.mark.parametrize("length", range(0, len(ARCHIVE) + 1, 64))
def test_a_cut_archive_gives_its_whole_members_and_no_more(length: int) -> None:
    whole = list(scan_members(ARCHIVE))
    assert list(scan_members(ARCHIVE[:length])) == [m for m in whole if m.end <= length]
    samples = list(scan_samples(ARCHIVE, EXT))
    assert list(scan_samples(ARCHIVE[:length], EXT)) == [s for s in samples if s.end <= length]


@pytest.mark.parametrize(
    "names",
    [
        ["0.npy", "0.png"],
        ["0.png", "0.png"],
        ["0.png", "1.npy"],
        ["0.png", "0.other"],
        ["0.jpg", "0.npy"],
        ["png", "npy"],
    ],
)
def test_members_that_make_no_sample_end_the_scan(names: list[str]) -> None:
    good = member_bytes("9.png", b"") + member_bytes("9.npy", b"")
    bad = b"".join(member_bytes(name, b"x") for name in names)
    assert [s.key for s in scan_samples(good + bad + good, EXT)] == ["9"]


def test_what_is_no_regular_file_ends_the_scan() -> None:
    folder = tarfile.TarInfo("folder")
    folder.type = tarfile.DIRTYPE
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
    first = member_bytes("0.png", b"x")
    for info in (folder, link):
        assert [m.name for m in scan_members(first + info.tobuf() + first)] == ["0.png"]


@pytest.mark.parametrize("at", range(BLOCK))
def test_a_flipped_byte_in_a_header_never_passes_for_another_member(at: int) -> None:
    data = bytearray(ARCHIVE)
    data[at] ^= 0xFF
    found = list(scan_members(bytes(data)))
    # Either the header is refused, or the byte means nothing and the members are as they were.
    assert found in ([], list(scan_members(ARCHIVE)))


def test_noise_is_no_archive() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        assert list(scan_members(generator.bytes(4 * BLOCK))) == []


@pytest.mark.parametrize(("index", "key"), [(0, "000000000"), (123, "000000123"), (10**9 - 1, "999999999")])
def test_keys_have_nine_digits_and_sort_as_numbers(index: int, key: str) -> None:
    assert key_of(index) == key


def test_a_moved_sample_keeps_all_but_its_place() -> None:
    sample = Sample("7", {"png": Member("7.png", 512, 10), "npy": Member("7.npy", 1536, 3)})
    moved = sample.moved(1024)
    assert moved.members == {"png": Member("7.png", 1536, 10), "npy": Member("7.npy", 2560, 3)}
    assert moved.end == sample.end + 1024

"""The restricted unpickler: a small file may cost neither much memory, nor much time, nor Python's stack."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ident3d.datasets.safe_pickle import load_plain_pickle
from ident3d.errors import DatasetError


def load(path: Path, stored: bytes) -> Any:
    path.write_bytes(stored)
    return load_plain_pickle(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.pickle"


@pytest.mark.parametrize("as_key", [b"}%bK\x01s.", b"\x8f(%b\x90.", b"(%b\x91.", b"cbuiltins\nfrozenset\n(](%betR."])
def test_deep_tuples_are_refused_before_they_are_hashed(as_key: bytes, file: Path) -> None:
    # Python's own load recurses in C over these, and is killed.
    nested = b")" + b"\x85" * 1_000_000
    memoised = b")\x94" + b"".join(b"h%c\x85\x94" % k for k in range(200))
    for deep in (nested, memoised):
        with pytest.raises(DatasetError, match="more than 32 containers"):
            load(file, as_key % deep)


def test_containers_that_are_shared_exponentially_are_visited_once(file: Path) -> None:
    levels = b"".join(b"](h%ch%ce\x94" % (k, k) for k in range(30))
    value = load(file, b"]\x94" + levels + b".")
    for _ in range(30):
        assert value[0] is value[1]
        value = value[0]
    assert value == []


TEXT = b"X" + struct.pack("<I", 200_000) + b"a" * 200_000 + b"\x94"
BOMBS = {
    "a text encoded again and again": b"](" + TEXT + b"c_codecs\nencode\n\x94X\x06\x00\x00\x00latin1\x94"
    + b"h\x01h\x00h\x02\x86R" * 5000 + b"e.",
    "a list made a set again and again": b"](]("
    + b"".join(b"M" + struct.pack("<H", k) for k in range(10_000))
    + b"e\x94cbuiltins\nset\n\x94"
    + b"h\x01h\x00\x85R" * 1000
    + b"e.",
    "a length of bytes far past the end": b"\x8e" + struct.pack("<Q", 2**40) + b"abc.",
    "a length of bytes past all memory": b"\x96" + struct.pack("<Q", 2**62) + b"abc.",
    "a length of a text": b"\x8d" + struct.pack("<Q", 2**63 - 1) + b"abc.",
    "a length of a number": b"\x8b" + struct.pack("<i", 2**31 - 1) + b"abc.",
    "a length of a frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"K\x01.",
}  # fmt: skip


AGAIN = "it unpacks to more than its own size"


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_takes_little_memory(name: str, file: Path) -> None:
    file.write_bytes(BOMBS[name])
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match=AGAIN if "again" in name else "damaged, cut short or no pickle"):
            load_plain_pickle(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100e6

"""Files that are whole or absent."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from ident3d.files import npy_bytes, sync_folder, write_atomic, write_json


def test_a_file_is_written_and_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.bin", b"one")
    assert (tmp_path / "a.bin").read_bytes() == b"one"
    write_atomic(tmp_path / "a.bin", b"other")
    assert (tmp_path / "a.bin").read_bytes() == b"other"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_keeps_the_old_file_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    write_atomic(tmp_path / "a.bin", b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "a.bin", b"new")
    assert (tmp_path / "a.bin").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    synced, replaced = os.fsync, os.replace

    def fsync(fd: int) -> None:
        steps.append("folder" if Path(f"/proc/self/fd/{fd}").resolve() == tmp_path.resolve() else "file")
        synced(fd)

    def replace(a: Path, b: Path) -> None:
        steps.append("rename")
        replaced(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_atomic(tmp_path / "a.bin", b"x")
    assert steps == ["file", "rename", "folder"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "no" / "a.bin", b"x")
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "no")


def test_json_keeps_the_order_of_keys_and_every_digit(tmp_path: Path) -> None:
    data = {"b": [1, 0.1 + 0.2], "a": {"z": "é", "y": None}}
    write_json(tmp_path / "a.json", data)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == data
    assert text.index('"b"') < text.index('"a"') < text.index('"z"') < text.index('"y"')
    assert text.endswith("}\n")


@pytest.mark.parametrize("array", [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 2), np.int64)])
def test_npy_bytes_are_a_npy_file(array: np.ndarray) -> None:  # type: ignore[type-arg]
    loaded = np.load(io.BytesIO(npy_bytes(array)), allow_pickle=False)
    np.testing.assert_array_equal(loaded, array)
    assert loaded.dtype == array.dtype
    assert npy_bytes(array) == npy_bytes(array.copy())


def test_npy_bytes_never_pickle() -> None:
    with pytest.raises(ValueError, match="Object arrays"):
        npy_bytes(np.array([None]))

"""Files of decoded pictures: made once, whole or absent, checked; what a kill or a full disk leaves is none of them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from ident3d import DatasetError, Ident3D
from ident3d.datasets.pictures import Pictures

fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def on_pixels(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Have something happen before a sample is decoded."""
    plain = Pictures.pixels

    def install(event: Callable[[int], None]) -> None:
        def pixels(self: Pictures, index: int, *args: Any, **options: Any) -> Any:
            event(index)
            return plain(self, index, *args, **options)

        monkeypatch.setattr(Pictures, "pixels", pixels)

    return install


def refuse(index: int) -> None:
    raise AssertionError(f"sample {index} was decoded again")


def all_pictures(root: Path, cache: str = "none") -> torch.Tensor:
    return Ident3D(root, cache=cache).pictures(range(24))[0]


def names(root: Path) -> list[str]:
    """What is in the folder of decoded pictures: by suffix."""
    return sorted(path.suffix for path in (root / ".decoded").iterdir())


def stored(root: Path) -> tuple[Path, Path]:
    """The file of pictures, and its header."""
    (pictures,), (header,) = root.glob(".decoded/*.u8"), root.glob(".decoded/train-*.json")
    return pictures, header


WHOLE = [".json", ".lock", ".u8"]


def test_a_split_is_decoded_once(damaged: Path, on_pixels: Any) -> None:
    truth = all_pictures(damaged)
    assert torch.equal(all_pictures(damaged, "disk"), truth)
    assert names(damaged) == WHOLE
    on_pixels(refuse)
    assert torch.equal(all_pictures(damaged, "disk"), truth)
    with pytest.raises(AssertionError, match="decoded again"):
        Ident3D(damaged, "test", cache="disk")  # another split


def test_another_choice_of_pictures_has_a_file_of_its_own(damaged: Path, fabricated: Path, make_dataset: Any) -> None:
    Ident3D(damaged, cache="disk")
    shutil.move(damaged / ".decoded", damaged.parent / "kept")
    shutil.rmtree(damaged)
    make_dataset(damaged, {"train": 24}, seed=4)
    shutil.move(damaged.parent / "kept", damaged / ".decoded")
    assert torch.equal(all_pictures(damaged, "disk"), all_pictures(damaged))
    assert not torch.equal(all_pictures(damaged, "disk"), all_pictures(fabricated))
    assert len(list(damaged.glob(".decoded/*.u8"))) == 2


def _open_and_count(root: Path, connection: Connection) -> None:
    count = []
    plain = Pictures.pixels

    def slow(self: Pictures, *args: Any, **options: Any) -> Any:
        count.append(1)
        time.sleep(0.01)
        return plain(self, *args, **options)

    Pictures.pixels = slow  # type: ignore[method-assign]
    data = Ident3D(root, cache="disk")
    decoded = len(count)
    connection.send((decoded, torch.equal(data.pictures(range(24))[0], all_pictures(root))))


def test_of_processes_that_open_it_at_once_one_decodes(damaged: Path) -> None:
    ends = [fork.Pipe() for _ in range(3)]
    processes = [fork.Process(target=_open_and_count, args=(damaged, child)) for _, child in ends]
    for process in processes:
        process.start()
    found = [parent.recv() for parent, _ in ends]
    for process in processes:
        process.join()
    assert sorted(count for count, _ in found) == [0, 0, 24]
    assert all(right for _, right in found)


def _die_at(root: Path, number: int) -> None:
    plain = Pictures.pixels

    def pixels(self: Pictures, index: int, *args: Any, **options: Any) -> Any:
        if index == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, index, *args, **options)

    Pictures.pixels = pixels  # type: ignore[method-assign]
    Ident3D(root, cache="disk")


def test_a_build_that_is_killed_leaves_nothing_that_looks_finished(damaged: Path) -> None:
    process = fork.Process(target=_die_at, args=(damaged, 17))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert names(damaged) == [".lock", ".part"]
    assert torch.equal(all_pictures(damaged, "disk"), all_pictures(damaged))
    assert names(damaged) == WHOLE


def test_a_build_that_is_killed_before_its_header_is_made_again(damaged: Path, on_pixels: Any) -> None:
    Ident3D(damaged, cache="disk")
    pictures, header = stored(damaged)
    header.unlink()
    pictures.write_bytes(b"")
    assert torch.equal(all_pictures(damaged, "disk"), all_pictures(damaged))
    assert names(damaged) == WHOLE


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_build_leaves_nothing(damaged: Path, on_pixels: Any, error: type[BaseException]) -> None:
    def interrupt(index: int) -> None:
        if index == 11:
            raise error

    on_pixels(interrupt)
    with pytest.raises(error):
        Ident3D(damaged, cache="disk")
    assert names(damaged) == [".lock"]


def change_picture(pictures: Path, header: Path) -> None:
    content = bytearray(pictures.read_bytes())
    content[20 * 768 + 5] ^= 1
    pictures.write_bytes(content)


def cut(pictures: Path, header: Path) -> None:
    os.truncate(pictures, 24 * 768 - 1)


def remove(pictures: Path, header: Path) -> None:
    pictures.unlink()


def spoil_header(pictures: Path, header: Path) -> None:
    header.write_text(header.read_text()[:40])


def edit(**fields: Any) -> Callable[[Path, Path], None]:
    def change(pictures: Path, header: Path) -> None:
        header.write_text(json.dumps({**json.loads(header.read_text()), **fields}))

    return change


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (change_picture, "its picture 20 is not as it was written"),
        (cut, "it has 18,431 bytes of 18,432"),
        (remove, "No such file"),
        (spoil_header, r"its header is damaged \("),
        (edit(crc32="AAAA"), "its header is damaged"),
        (edit(crc32="?"), r"its header is damaged \("),
        (edit(damaged={"-1": "no"}), "its header is damaged"),
        (edit(damaged={"24": "no"}), "its header is damaged"),
        (edit(format=2), "it is of other pictures"),
        (edit(fingerprint="0"), "it is of other pictures"),
        (edit(shape=[24, 3, 8, 32]), "it is of other pictures"),
        (edit(more=1), "unknown key"),
    ],
)
def test_a_file_that_is_not_what_its_header_says_is_made_again(
    damaged: Path, damage: Callable[[Path, Path], None], complaint: str
) -> None:
    truth = all_pictures(damaged, "disk")
    damage(*stored(damaged))
    with pytest.warns(UserWarning, match=f"train-[0-9a-f]*.u8: .*{complaint}.*; decoded again"):
        found = all_pictures(damaged, "disk")
    assert torch.equal(found, truth)
    assert torch.equal(all_pictures(damaged, "disk"), truth)
    assert names(damaged) == WHOLE


# Room


def test_a_disk_without_room_is_refused_before_the_work(
    damaged: Path, on_pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ident3D(damaged, "test", cache="disk")
    on_pixels(refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 9000))
    with pytest.raises(
        DatasetError, match=r"24 samples need 0.018 MB decoded, 0.009 MB are free \(other .* 0.005 MB\)"
    ):
        Ident3D(damaged, cache="disk")
    assert not list(damaged.glob(".decoded/train-*"))
    assert Ident3D(damaged, "test", cache="disk").store is not None  # nothing lost


def test_a_disk_that_fills_up_is_told(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        if offset >= 5000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(fd, data[: 5000 - offset], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        DatasetError, match=r"\(No space left on device\): 24 samples need 0.018 MB decoded, .* are free"
    ):
        Ident3D(damaged, cache="disk")
    assert names(damaged) == [".lock"]


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[None]:
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}"]
    if os.geteuid() or subprocess.run(["mount", *options, "tmpfs", path], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_really_full_disk_loses_nothing(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(damaged / ".decoded", 5 * 4096):
        Ident3D(damaged, "test", cache="disk")
        with pytest.raises(DatasetError, match=r"24 samples need 0.018 MB decoded"):
            Ident3D(damaged, cache="disk")
        monkeypatch.setattr("ident3d.datasets.decoded_files._StoreFile._free", lambda _: 10**9)
        with pytest.raises(DatasetError, match="No space left on device"):
            Ident3D(damaged, cache="disk")
        assert [
            path for path in (damaged / ".decoded").iterdir() if "train" in path.name and path.suffix != ".lock"
        ] == []
        assert Ident3D(damaged, "test", cache="disk")[0][0].any()


# Places


def test_without_a_writable_folder_the_cache_folder_is_taken(damaged: Path, home: Path, on_pixels: Any) -> None:
    truth = all_pictures(damaged)
    (damaged / ".decoded").write_bytes(b"")  # no folder can be made there, even by root
    assert torch.equal(all_pictures(damaged, "disk"), truth)
    assert len(list((home / "decoded").glob("*.u8"))) == 1
    on_pixels(refuse)
    assert torch.equal(all_pictures(damaged, "disk"), truth)
    home.rename(home.with_name("gone"))
    home.write_bytes(b"")
    with pytest.raises(
        DatasetError, match=r"no folder .* can be written: .*\.decoded \(.*home/decoded \(.*IDENT3D_HOME"
    ):
        Ident3D(damaged, cache="disk")


def test_where_there_are_no_locks_it_works_without(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    assert torch.equal(all_pictures(damaged, "disk"), all_pictures(damaged))

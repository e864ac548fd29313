"""Locks: one holder at a time, over processes, released however the holder ends."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ident3d.errors import BusyError, SpecError
from ident3d.locks import allow_files, file_lock

BUSY = "the folder: process {process} is at work"
HOLDER = """
import sys
from pathlib import Path
from ident3d.locks import file_lock
with file_lock(Path(sys.argv[1]), "busy") as fd:
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with file_lock(path, BUSY) as fd:
        assert os.fstat(fd).st_ino == path.stat().st_ino
        assert path.read_text() == f"{os.getpid()}\n"
        with pytest.raises(BusyError) as caught, file_lock(path, BUSY):
            pass
        assert str(caught.value) == f"the folder: process {os.getpid()} is at work"
        assert path.read_text() == f"{os.getpid()}\n"
    with file_lock(path, BUSY), file_lock(tmp_path / "other", BUSY):
        pass


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="no locks on this file system"), file_lock(tmp_path / "lock", BUSY) as fd:
        assert fd >= 0


def test_shared_holders_keep_out_one_that_wants_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path, BUSY, shared=True) as one, file_lock(path, BUSY, shared=True) as other:
        assert one != other
        with pytest.raises(BusyError), file_lock(path, BUSY):
            pass
    with file_lock(path, BUSY), pytest.raises(BusyError), file_lock(path, BUSY, shared=True):
        pass


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    threading.Timer(0.3, lambda: holder.communicate("")).start()
    with file_lock(tmp_path / "lock", BUSY, wait=60):
        assert holder.wait(60) == 0


def test_more_files_than_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    allow_files(1000)
    allow_files(2000)
    assert asked == [(2000, 4096)]
    with pytest.raises(SpecError, match="5000 open files are needed, and this system allows 4096"):
        allow_files(5000)


def test_an_error_within_releases_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), file_lock(tmp_path / ".lock", BUSY):
        raise KeyError
    with file_lock(tmp_path / ".lock", BUSY):
        pass


def test_braces_of_the_text_stay(tmp_path: Path) -> None:
    """A folder's name may hold any."""
    path = tmp_path / ".lock"
    with file_lock(path, ""), pytest.raises(BusyError) as caught, file_lock(path, "{a}/{0}/{: busy"):
        pass
    assert str(caught.value) == "{a}/{0}/{: busy"


def test_a_holder_that_did_not_say_its_name(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with file_lock(path, BUSY):
        os.truncate(path, 0)
        with pytest.raises(BusyError, match="process unknown is at work"), file_lock(path, BUSY):
            pass


def test_what_an_earlier_holder_wrote_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text("123456789012345\n")
    with file_lock(path, BUSY):
        assert path.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_kernel_releases_it_when_the_holder_dies(tmp_path: Path, number: int) -> None:
    path = tmp_path / ".lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"process {holder.pid} is at work"), file_lock(path, BUSY):
            pass
        holder.send_signal(number)
        assert holder.wait() == -number
    with file_lock(path, BUSY):
        pass


def test_a_child_that_inherits_the_descriptor_holds_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with file_lock(path, BUSY) as fd:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[fd])
    with child, pytest.raises(BusyError), file_lock(path, BUSY):
        pass
    with file_lock(path, BUSY):
        pass

"""The allocator: what it is asked for, where there is none to ask, and that freed memory stays."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from ident3d.baselines.allocation import keep_freed_memory

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
MIB = 2**20


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    """The answer is remembered: what a test pretends must not be."""
    keep_freed_memory.cache_clear()
    yield
    keep_freed_memory.cache_clear()


class Library:
    """A C library with a mallopt that answers, and keeps what it was asked."""

    def __init__(self, answer: Callable[[int], int]) -> None:
        self.asked: list[tuple[int, int]] = []
        self._answer = answer

    def mallopt(self, parameter: int, value: int) -> int:
        self.asked.append((parameter, value))
        return self._answer(parameter)


def pretend(monkeypatch: pytest.MonkeyPatch, system: str, library: object) -> None:
    def load(name: str | None) -> object:
        assert name is None
        if isinstance(library, Exception):
            raise library
        return library

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(ctypes, "CDLL", load)


def test_asking_twice_is_as_asking_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(lambda parameter: 1)
    pretend(monkeypatch, "linux", library)
    assert keep_freed_memory() is True
    once = list(library.asked)
    assert keep_freed_memory() is True
    assert library.asked == once


def test_what_is_asked_is_what_glibc_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers of malloc.h: trim threshold -1, top pad -2, mmap threshold -3, which is at most 32 MiB."""
    library = Library(lambda parameter: 1)
    pretend(monkeypatch, "linux", library)
    keep_freed_memory()
    asked = dict(library.asked)
    assert asked.keys() == {-1, -2, -3}
    assert asked[-3] == 32 * MIB
    assert asked[-3] < asked[-1] < 2**31  # a C int
    assert 0 < asked[-2] < 2**31


@pytest.mark.parametrize("refused", [-1, -2, -3])
def test_an_allocator_that_refuses_any_of_it_did_not_take_it(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "linux", Library(lambda parameter: int(parameter != refused)))
    assert keep_freed_memory() is False


@pytest.mark.parametrize("system", ["darwin", "win32", "freebsd14"])
def test_other_systems_are_not_asked(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(lambda parameter: 1)
    pretend(monkeypatch, system, library)
    assert keep_freed_memory() is False
    assert library.asked == []


@pytest.mark.parametrize("library", [object(), OSError("no such file")], ids=["without mallopt", "not loaded"])
def test_other_c_libraries_have_none_to_ask(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "linux", library)
    assert keep_freed_memory() is False


@GLIBC
def test_glibc_takes_it() -> None:
    assert keep_freed_memory() is True


RESIDENT = """
import sys
from pathlib import Path
import numpy as np
from ident3d.baselines.allocation import keep_freed_memory

def resident():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident()
array = np.ones(2**20)
held = resident()
del array
print(held - before, held - resident())
"""


@GLIBC
@pytest.mark.parametrize("keep", [False, True])
def test_freed_memory_stays_where_it_is_asked_to(keep: bool) -> None:
    """8 MiB, in a process of its own: how much more is resident with them, and how much less once they are freed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    command = [sys.executable, "-c", RESIDENT, "keep" if keep else "leave"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    taken, given_back = map(float, done.stdout.split())
    assert taken > 6
    assert given_back < 1 if keep else given_back > 6

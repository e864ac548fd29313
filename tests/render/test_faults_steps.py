"""Renders and repairs that are struck at every single change they make to the file system.

`tests/data/struck_render.py` does it. Blender is stood in for, so that these run without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

DRIVER = Path(__file__).resolve().parents[1] / "data" / "struck_render.py"
pytestmark = pytest.mark.slow

Strikes = list[dict[str, Any]]

SOME = 1 if os.environ.get("IDENT3D_ALL_STRIKES") else 3
"""Of the longer series every third change is struck; with the variable set, all: some minutes more."""


@cache
def strikes(task: str, kind: str, where: str, first: int = 1, every: int = 1) -> Strikes:
    """What became of each; no step may leave a traceback, a damaged dataset, or one that cannot be gone on with."""
    with TemporaryDirectory() as folder:
        return played(folder, task, kind, where, first, every)


def played(folder: str, task: str, kind: str, where: str, first: int, every: int) -> Strikes:
    command = [sys.executable, str(DRIVER), task, kind, where, folder, str(first), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for strike in found:
        assert strike["status"] != 1, strike["said"]
        assert strike["state"] in ("whole", "unfinished"), strike
        assert strike["again"] == [], strike
        assert strike["same"], strike
        assert strike["verified"] == [], strike
    return found


def struck(found: Strikes) -> set[str]:
    return {strike["struck"] for strike in found}


@pytest.mark.parametrize(("task", "pictures"), [("first", 1), ("second", 2)])
def test_a_render_killed_at_any_change(task: str, pictures: int) -> None:
    found = strikes(task, "kill", "parent", every=1 if task == "first" else SOME)
    names = ("plan.json", "scene.toml", "index.npy", "README.md", "dataset.json")
    assert task != "first" or struck(found) >= {f"replace .{name}.part {name}" for name in names}
    assert {strike["status"] for strike in found} == {-9}
    # One in flight in the one worker.
    assert all(strike["pictures"] <= pictures for strike in found)


@pytest.mark.parametrize("task", ["first", "second"])
def test_what_a_killed_render_leaves_is_cleared_away(task: str) -> None:
    found = strikes(task, "kill", "parent", every=1 if task == "first" else SOME)
    assert [strike for strike in found if strike["left"]] == []


def test_a_render_in_parts_killed_at_some_changes() -> None:
    assert {strike["status"] for strike in strikes("parts", "kill", "parent", every=3 * SOME)} == {-9}


def test_a_worker_killed_at_any_change() -> None:
    found = strikes("second", "kill", "worker")
    assert struck(found) >= {"write", "fsync", "replace .train-000000.tar.part train-000000.tar"}
    # The render goes on by itself.
    assert {strike["status"] for strike in found} == {0}
    # A pair, the one in flight. A shard that has got its name is not rendered again.
    assert [strike for strike in found if strike["pictures"] > 2] == []


@pytest.mark.parametrize("task", ["repair", "elsewhere"])
def test_a_repair_killed_at_any_change(task: str) -> None:
    whole = task == "repair"
    found = strikes(task, "kill", "parent") if whole else strikes(task, "kill", "parent", every=5 * SOME)
    assert not whole or struck(found) >= {
        "replace train-000000.tar .train-000000.tar.damaged",
        "replace .index.npy.part index.npy",
        "unlink .train-000000.tar.damaged",
    }


def test_a_repair_of_own_latents_killed_at_any_change() -> None:
    """The rows of latents.npy are in the shards, which a repair moves: it must find them again."""
    strikes("own", "kill", "parent", every=SOME)


def test_what_a_killed_repair_leaves_is_cleared_away() -> None:
    assert [strike for strike in strikes("repair", "kill", "parent") if strike["left"]] == []


@pytest.mark.parametrize("task", ["second", "repair"])
def test_killed_twice_in_a_row(task: str) -> None:
    strikes(task, "kill", "twice", 2, 5 * SOME)


@pytest.mark.parametrize(
    ("task", "where"),
    [("first", "parent"), ("second", "worker"), ("parts", "parent"), ("repair", "parent"), ("own", "parent")],
)
def test_a_disk_that_is_full_from_any_change_on(task: str, where: str) -> None:
    found = strikes(task, "full", where, every={"repair": 2, "parts": 4}.get(task, 1) * SOME)
    # A user's trouble, told as such.
    assert {strike["status"] for strike in found} == {2}
    for strike in found:
        assert "No space left on device" in strike["said"]

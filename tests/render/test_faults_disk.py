"""Folders that cannot be written and disks that fill up, through the command line. Blender is stood in for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

STAND_IN = Path(__file__).resolve().parents[1] / "data" / "stand_in_worker.py"
OPTIONS = "--samples 12 --resolution 16 --quality draft --shard-size 1 --workers 2 --quiet"
PAGE = 4096
ENDING = ("train/index.npy", "train/latents.npy", "README.md")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `ident3d render` or `verify` with a worker that needs no Blender."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -E ] && shift\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)

    def run(action: str, root: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        words = [*OPTIONS.split(), *options] if action == "render" else ["--quiet", *options]
        command = [sys.executable, "-m", "ident3d", action, str(root), *words, "--blender-python", str(python)]
        environment = {**os.environ, **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def files(root: Path) -> dict[str, bytes]:
    found = (p for p in sorted(root.rglob("*")) if p.is_file() and ".render" not in p.parts)
    return {str(p.relative_to(root)): p.read_bytes() for p in found}


def half_rendered(run: Run, root: Path, report: Path) -> None:
    """Some shards of a render that a full disk stopped."""
    done = run("render", root, STAND_IN_STRIKE=json.dumps([12, "full", str(report)]))
    assert done.returncode == 2, done.stderr
    assert list(root.glob("train/*.tar"))
    assert not (root / "dataset.json").exists()


def remount(disk: Path, mode: str) -> None:
    command = ["mount", "-o", f"remount,{mode}", str(disk)]
    deadline = time.monotonic() + 60
    # A worker that has just been killed may still hold a file open.
    while subprocess.run(command, capture_output=True, check=False).returncode and time.monotonic() < deadline:
        time.sleep(0.05)
    mounted = next(
        line.split() for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == str(disk)
    )
    assert mode in mounted[3].split(",")


def refused(done: subprocess.CompletedProcess[str], root: Path) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"{root}: cannot be written: Read-only file system" in done.stderr


def test_a_render_into_a_read_only_folder(run: Run, disk: Path, tmp_path: Path) -> None:
    half_rendered(run, disk / "half", tmp_path / "report")
    before = files(disk / "half")
    remount(disk, "ro")
    refused(run("render", disk / "new"), disk / "new")
    refused(run("render", disk / "half"), disk / "half")
    remount(disk, "rw")
    assert files(disk / "half") == before
    assert run("render", disk / "half").returncode == 0
    assert run("render", disk / "new").returncode == 0
    assert files(disk / "half") == files(disk / "new")


def test_a_read_only_dataset_is_checked_and_not_repaired(run: Run, disk: Path) -> None:
    root = disk / "d"
    assert run("render", root).returncode == 0
    whole = files(root)
    remount(disk, "ro")
    assert run("render", root).returncode == 0  # nothing to do
    assert run("verify", root, "--repair").returncode == 0
    remount(disk, "rw")
    (root / "train" / "train-000003.tar").write_bytes(whole["train/train-000004.tar"])
    remount(disk, "ro")
    refused(run("verify", root, "--repair"), root)
    remount(disk, "rw")
    assert run("verify", root, "--repair").returncode == 0
    assert files(root) == whole


def leave_free(disk: Path, pages: int) -> Path:
    """Fill a disk up to so many pages; returns the file that fills it."""
    ballast = disk / "ballast"
    state = os.statvfs(disk)
    ballast.write_bytes(bytes(max(0, state.f_bavail * state.f_frsize - pages * PAGE)))
    return ballast


def told(done: subprocess.CompletedProcess[str]) -> None:
    """A full disk is a user's trouble."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr or "make room" in done.stderr


def test_a_disk_without_a_free_page(run: Run, disk: Path) -> None:
    ballast = leave_free(disk, 0)
    told(run("render", disk / "d"))
    ballast.unlink()
    assert run("render", disk / "d").returncode == 0


@pytest.mark.slow
def test_a_disk_that_fills_up_at_any_file_of_the_end(run: Run, disk: Path, tmp_path: Path) -> None:
    """All shards are there; then page after page more is free for the summaries, the index, the card, the manifest."""
    root, before = disk / "d", tmp_path / "before"
    reached: list[set[str]] = []  # what of the ending was in place when the disk was full
    assert run("render", before).returncode == 0
    whole = files(before)
    for name in ("dataset.json", *ENDING):
        (before / name).unlink()
    for pages in range(200):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root)
        ballast = leave_free(disk, pages)
        done = run("render", root)
        ballast.unlink()
        if not done.returncode:
            break
        told(done)
        assert not (root / "dataset.json").exists()
        there = {name for name in ENDING if (root / name).exists()}
        if there not in reached:
            reached.append(there)
            assert run("render", root).returncode == 0
            assert files(root) == whole
    assert files(root) == whole
    assert any("train/index.npy" in there for there in reached), "nothing was hit past the index"
    assert run("verify", root).returncode == 0

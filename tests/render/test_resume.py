"""Kills, interrupts, crashes and full disks: nothing is lost, and the dataset ends byte for byte the same."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ident3d import RenderError, RenderOptions, render_dataset
from ident3d.shards.tar import scan_samples
from ident3d.shards.verify import verify_dataset

SAMPLES = 24
# At a tenth of a second a picture there is time to strike in the middle, on a busy machine too.
COMMAND = ["--samples", str(SAMPLES), "--resolution", "64", "--quality", "standard", "--shard-size", "6", "--quiet"]


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "ident3d", "render", str(out), *COMMAND]


def files(root: Path) -> dict[str, bytes]:
    found = (p for p in sorted(root.rglob("*")) if p.is_file() and ".render" not in p.parts)
    return {str(p.relative_to(root)): p.read_bytes() for p in found}


def stored(root: Path) -> int:
    """Whole samples on disk, in finished shards and in parts."""
    count = 0
    for path in [*root.glob("train/*.tar"), *root.glob("train/.*.tar.part")]:
        with contextlib.suppress(FileNotFoundError):  # it has got its final name since it was listed
            count += len(list(scan_samples(path.read_bytes(), ("png", "latents.npy"))))
    return count


def wait_for(root: Path, samples: int, process: subprocess.Popen[str]) -> None:
    """Until so many samples are on disk, or the render ends."""
    while process.poll() is None and stored(root) < samples:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("undisturbed") / "d"
    subprocess.run(command(root), check=True, capture_output=True)
    return files(root)


@pytest.mark.render
@pytest.mark.parametrize("at", [0, 1, 7, 12, 18, 23])
def test_kill_of_the_group_loses_the_pictures_in_flight_alone(
    tmp_path: Path, undisturbed: dict[str, bytes], at: int
) -> None:
    process = subprocess.Popen(command(tmp_path / "d"), start_new_session=True, text=True)
    wait_for(tmp_path / "d", at, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = stored(tmp_path / "d")
    assert kept >= at
    subprocess.run(command(tmp_path / "d"), check=True, capture_output=True)
    assert files(tmp_path / "d") == undisturbed
    # Each sample that was whole at the kill was kept: a log line a picture tells how many were rendered afterwards.
    logs = (tmp_path / "d" / ".render" / "logs").glob("train-worker-*.log")
    rendered = sum(log.read_text().count("Saved: ") for log in logs)
    assert rendered <= SAMPLES + 2 + 2  # one in flight a worker, and one that was rendered but not yet written


@pytest.mark.render
@pytest.mark.slow
def test_kills_again_and_again(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    moment = random.Random(3)
    for _ in range(6):
        process = subprocess.Popen(command(tmp_path / "d"), start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=moment.uniform(0.2, 1.6))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    subprocess.run(command(tmp_path / "d"), check=True, capture_output=True)
    assert files(tmp_path / "d") == undisturbed


@pytest.mark.render
def test_kill_of_the_parent_ends_the_workers_and_frees_the_folder(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    process = subprocess.Popen(command(tmp_path / "d"), start_new_session=True, text=True)
    wait_for(tmp_path / "d", 3, process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while True:  # the lock ends with the last worker
        again = subprocess.run(command(tmp_path / "d"), capture_output=True, text=True, check=False)
        if again.returncode == 0 or time.monotonic() > deadline:
            break
        assert "another render" in again.stderr
    assert again.returncode == 0
    assert files(tmp_path / "d") == undisturbed


@pytest.mark.render
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    process = subprocess.Popen(
        command(tmp_path / "d"),
        start_new_session=True,
        text=True,
        stderr=subprocess.PIPE,
        # A shell starts background jobs with SIGINT ignored, and the tests may run in one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for(tmp_path / "d", 4, process)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert f"of {SAMPLES} pictures are stored" in said
    assert "run the same command to go on" in said
    subprocess.run(command(tmp_path / "d"), check=True, capture_output=True)
    assert files(tmp_path / "d") == undisturbed


@pytest.mark.render
def test_a_killed_worker_is_replaced(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    process = subprocess.Popen(command(tmp_path / "d"), start_new_session=True, text=True)
    wait_for(tmp_path / "d", 3, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for tasks in Path(f"/proc/{process.pid}/task").iterdir():
        children += (tasks / "children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert process.wait(timeout=120) == 0
    assert files(tmp_path / "d") == undisturbed


@pytest.mark.render
def test_damage_between_two_calls_is_rendered_again(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    process = subprocess.Popen(command(tmp_path / "d"), start_new_session=True, text=True)
    wait_for(tmp_path / "d", 13, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = sorted((tmp_path / "d" / "train").glob("*.tar"))
    assert finished
    with open(finished[0], "r+b") as file:  # one flipped byte in a shard that claims to be done
        file.seek(1500)
        byte = file.read(1)[0]
        file.seek(1500)
        file.write(bytes([byte ^ 1]))
    subprocess.run(command(tmp_path / "d"), check=True, capture_output=True)
    assert files(tmp_path / "d") == undisturbed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 144 KiB: enough for the plan and a part of the pictures."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=144k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.render
def test_full_disk_midway(small_disk: Path, undisturbed: dict[str, bytes]) -> None:
    done = subprocess.run(command(small_disk / "d"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr
    assert "run the same command to go on" in done.stderr
    assert not (small_disk / "d" / "dataset.json").exists()
    assert stored(small_disk / "d") > 0
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    subprocess.run(command(small_disk / "d"), check=True, capture_output=True)
    assert files(small_disk / "d") == undisturbed


@pytest.mark.render
def test_a_sample_that_crashes_blender_is_named_and_the_others_finish(tmp_path: Path) -> None:
    # The worker runs under a stand-in interpreter whose Blender aborts on one Cycles seed.
    from ident3d.render.draws import cycles_seeds

    seed = int(cycles_seeds(0, "train", 4, 5)[0])
    crash = Path(__file__).parents[1] / "data" / "crashing_worker.py"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -E ] && shift\nexec {sys.executable} {crash} {seed} "$@"\n')
    python.chmod(0o755)
    options = RenderOptions(
        tmp_path / "d", 8, resolution=16, quality="draft", shard_size=4, quiet=True, blender_python=str(python)
    )
    with pytest.raises(RenderError, match=r"(?s)though tried again; all else is stored:\nsample 4 of shard 1.*SIGABRT"):
        render_dataset(options)
    assert (tmp_path / "d" / "train" / "train-000000.tar").exists()
    assert not (tmp_path / "d" / "train" / "train-000001.tar").exists()
    rest = (tmp_path / "d" / "train" / ".train-000001.tar.rest").read_bytes()
    assert [s.key for s in scan_samples(rest, ("png", "latents.npy"))] == ["000000005", "000000006", "000000007"]
    whole = RenderOptions(tmp_path / "d", 8, resolution=16, quality="draft", shard_size=4, quiet=True)
    for log in (tmp_path / "d" / ".render" / "logs").iterdir():
        log.unlink()
    render_dataset(whole)
    logs = (tmp_path / "d" / ".render" / "logs").iterdir()
    assert sum(log.read_text().count("Saved: ") for log in logs) == 1  # the others were kept
    assert not list((tmp_path / "d" / "train").glob(".*"))
    assert verify_dataset(tmp_path / "d") == []
    render_dataset(dataclasses.replace(whole, out=tmp_path / "undisturbed"))
    assert files(tmp_path / "d") == files(tmp_path / "undisturbed")

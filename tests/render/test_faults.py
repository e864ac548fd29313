"""Signals to a render, and clocks that jump: nothing is lost, and the dataset ends byte for byte the same."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from ident3d import BusyError
from ident3d.render.folder import RenderFolder
from ident3d.shards.tar import scan_samples

SAMPLES = 24
# At a tenth of a second a picture there is time to strike in the middle, on a busy machine too.
OPTIONS = f"--samples {SAMPLES} --resolution 64 --quality standard --shard-size 6 --workers 2"
pytestmark = pytest.mark.render


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "ident3d", "render", str(out), *OPTIONS.split(), *options]


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


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    found = []
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def wait_until_gone(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)


def wait_until_free(root: Path) -> None:
    """Until nobody holds the folder: a worker that was just being started looks for its parent a moment later."""
    while True:
        with contextlib.suppress(BusyError), RenderFolder(root).lock():
            return
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("undisturbed") / "d"
    subprocess.run(command(root, "--quiet"), check=True, capture_output=True)
    return files(root)


@pytest.mark.parametrize("at", [None, 4])
def test_sigterm_ends_a_render_as_ctrl_c_does(tmp_path: Path, undisturbed: dict[str, bytes], at: int | None) -> None:
    """What `kill`, systemd, Slurm and a machine that goes down send; before the first picture, and in the middle."""
    root = tmp_path / "d"
    process = subprocess.Popen(command(root, "--quiet"), start_new_session=True, text=True, stderr=subprocess.PIPE)
    while process.poll() is None and (stored(root) < at if at else not workers_of(process)):
        time.sleep(0.01)
    workers = workers_of(process)
    assert workers
    process.send_signal(signal.SIGTERM)  # to the parent alone
    _, said = process.communicate(timeout=60)
    wait_until_gone(workers)
    wait_until_free(root)
    assert process.returncode == 143
    assert "Traceback" not in said
    assert "run the same command to go on" in said
    if at:
        assert f"of {SAMPLES} pictures are stored" in said
    kept = stored(root)
    assert kept >= (at or 0)
    subprocess.run(command(root, "--quiet"), check=True, capture_output=True)
    assert files(root) == undisturbed


def test_a_stopped_worker_dies_with_its_parent(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """A process that is stopped, or hangs, reads no end of its input: only a signal frees the folder of it."""
    root = tmp_path / "d"
    process = subprocess.Popen(command(root, "--quiet"), start_new_session=True, text=True)
    while process.poll() is None and stored(root) < 3:
        time.sleep(0.01)
    workers = workers_of(process)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_until_gone(workers)
    subprocess.run(command(root, "--quiet"), check=True, capture_output=True)
    assert files(root) == undisturbed


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t jump(void) {
    long seconds = 0;
    FILE *file = fopen(getenv("CLOCK_JUMP"), "r");
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
        fclose(file);
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that shifts the wall clock of a process, Blender's too, by the seconds in the file CLOCK_JUMP."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("no C compiler, which makes the library that shifts the clock")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    build = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / "clock.so"), str(folder / "clock.c"), "-ldl"]
    subprocess.run(build, check=True, capture_output=True)
    return folder / "clock.so"


def drain(terminal: int, said: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the other side is closed
        while data := os.read(terminal, 4096):
            said.append(data)


@pytest.mark.parametrize("seconds", [-3600, 365 * 86400])
def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, undisturbed: dict[str, bytes], clock: Path, seconds: int
) -> None:
    root, jump = tmp_path / "d", tmp_path / "jump"
    environment = {**os.environ, "LD_PRELOAD": str(clock), "CLOCK_JUMP": str(jump)}
    terminal, theirs = pty.openpty()  # for a terminal there is a progress bar, which measures time
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    process = subprocess.Popen(command(root), start_new_session=True, text=True, stderr=theirs, env=environment)
    os.close(theirs)
    said: list[bytes] = []
    reader = threading.Thread(target=drain, args=(terminal, said))
    reader.start()
    while process.poll() is None and stored(root) < 6:
        time.sleep(0.01)
    (tmp_path / "new").write_text(str(seconds))
    os.replace(tmp_path / "new", jump)
    assert stored(root) < SAMPLES
    see = [sys.executable, "-c", "import time; print(time.time())"]
    there = float(subprocess.run(see, env=environment, capture_output=True, check=True).stdout)
    assert abs(there - seconds - time.time()) < 600
    status = process.wait()
    reader.join()
    os.close(terminal)
    assert status == 0
    assert b"Traceback" not in b"".join(said)
    assert f"{SAMPLES}/{SAMPLES}".encode() in b"".join(said)
    assert files(root) == undisturbed

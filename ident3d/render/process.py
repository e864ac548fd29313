"""A worker process seen from the user's side: start it, send commands, read events; and what to do when Blender is
not there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ident3d.errors import RenderError, SpecError
from ident3d.render.worker import Setup

__all__ = ["LIBRARIES", "WorkerDied", "WorkerProcess", "blender_python"]

START_SECONDS = 1800.0
"""How long a worker may take to start: a GPU's kernels are compiled once a machine, which takes minutes."""

SLICE = 5.0
"""Seconds waited at a time."""

LIBRARIES = "libx11-6 libxrender1 libxfixes3 libxi6 libxkbcommon0 libsm6 libice6 libgl1"
"""Debian's names of the shared libraries that bpy loads."""

WORKER_ENVIRONMENT = "python3.11 -m venv blender-env && blender-env/bin/pip install 'bpy==4.5.*' numpy Pillow"
VARIABLE = "IDENT3D_BLENDER_PYTHON"


class WorkerDied(RenderError):
    """A worker ended without saying why: Blender crashed, or the process was killed; or it hangs."""


def blender_python(option: str | None) -> str:
    """The interpreter that workers run under: the option, else IDENT3D_BLENDER_PYTHON, else this one.

    Raises:
        RenderError: the interpreter named is not an executable file.
    """
    chosen = option or os.environ.get(VARIABLE)
    if not chosen:
        return sys.executable
    path = Path(chosen).expanduser()
    if not path.is_file() or not os.access(path, os.X_OK):
        source = "--blender-python" if option else VARIABLE
        raise RenderError(f"{source} = {chosen!r}: no such program; expected the python of an environment with bpy")
    return str(path)


def _how_to_get_bpy(python: str) -> str:
    version = sys.version_info
    if python == sys.executable and version[:2] in ((3, 11), (3, 13)):
        return "install it with: pip install 'ident3d[render]'"
    here = f"Python {version[0]}.{version[1]} has no bpy wheel; " if python == sys.executable else ""
    return (
        f"{here}make an environment for it and name its interpreter:\n"
        f"    {WORKER_ENVIRONMENT}\n"
        f"    export {VARIABLE}=$PWD/blender-env/bin/python   # or --blender-python PATH"
    )


def _explain_import(python: str, message: str) -> str:
    library = re.search(r"(lib[\w.+-]+\.so[.\d]*): cannot open shared object", message)
    if library:
        return (
            f"Blender cannot start under {python}: the shared library {library[1]} is absent. "
            f"On Debian or Ubuntu: apt-get install {LIBRARIES}"
        )
    missing = re.search(r"No module named '([\w.]+)'", message)
    if missing and missing[1] != "bpy":
        return f"{python} has no {missing[1]}; a render worker needs: {python} -m pip install bpy numpy Pillow"
    if missing:
        return f"{python} has no bpy (Blender as a module); {_how_to_get_bpy(python)}"
    return f"Blender cannot be imported under {python}: {message}"


class _Lines:
    """The lines of a pipe, with an end to the waiting."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.fd = pipe.fileno()
        self.held = b""
        self.poll = select.poll()
        self.poll.register(self.fd, select.POLLIN)

    def read(self, seconds: float | None) -> bytes | None:
        """The next line; what is left without its end where the pipe ended; None after so many seconds of nothing."""
        while b"\n" not in self.held:
            if seconds is not None and not self._wait(seconds):
                return None
            data = os.read(self.fd, 1 << 16)
            if not data:
                return self.held
            self.held += data
        line, _, self.held = self.held.partition(b"\n")
        return line + b"\n"

    def _wait(self, seconds: float) -> bool:
        left = seconds
        while left > 0:
            if self.poll.poll(1000 * min(left, SLICE)):
                return True
            # Counted by slices, not by a clock: while the machine sleeps or the job is stopped, workers are as well.
            left -= SLICE
        return False


class WorkerProcess:
    """One worker: started, set up, and ready for commands.

    Args:
        python: the interpreter to run it under.
        setup: scene and settings.
        log: the file that takes what Blender prints; appended to.
        keep_open: file descriptors that the worker inherits, which keeps their locks held while it lives.
        picture_seconds: a worker that takes longer than this for one sample hangs; None for no limit.

    Attributes:
        blender: Blender's version.
        device: what renders.
        gpus: how many GPUs of that kind there are; 0 for the CPU.
        model: the GPU's name; empty for the CPU.
        warning: why the CPU renders where a GPU was looked for, or nothing.

    Raises:
        RenderError: no bpy there, a library absent, or Blender failed at start.
        SpecError: a mesh that Blender cannot use.
    """

    def __init__(
        self,
        python: str,
        setup: Setup,
        log: Path,
        keep_open: tuple[int, ...] = (),
        picture_seconds: float | None = None,
    ) -> None:
        self.python = python
        self.log = log
        self.picture_seconds = picture_seconds
        # A foreign interpreter must not see this one's PYTHONPATH.
        flags = [] if python == sys.executable else ["-E"]
        worker = Path(__file__).with_name("worker.py")
        with open(log, "ab") as sink:
            self._log_start = sink.tell()
            self._process = subprocess.Popen(
                [python, *flags, str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                pass_fds=keep_open,
            )
        assert self._process.stdout is not None
        self._lines = _Lines(self._process.stdout)
        try:
            self.send(asdict(setup))
            ready = self.read(START_SECONDS, "to start")
        except BaseException:
            self.kill()
            raise
        self.blender: str = ready["blender"]
        self.device: str = ready["device"]
        self.gpus: int = ready["gpus"]
        self.model: str = ready["model"]
        self.warning: str = ready["warning"]

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def send(self, command: dict[str, Any]) -> None:
        """Send one command.

        Raises:
            WorkerDied: nobody is there to take it.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.read()  # an error event, or the news of its death: either raises
            raise self._died() from None

    def read(self, seconds: float | None = None, what: str = "for one sample (--picture-seconds)") -> dict[str, Any]:
        """The next event.

        Args:
            seconds: how long to wait for it; None for ever.
            what: what takes so long, for the message.

        Raises:
            WorkerDied: the worker is gone, or says nothing for so long.
            RenderError, SpecError: the worker reported an error.
        """
        line = self._lines.read(seconds)
        if line is None:
            raise WorkerDied(f"the render worker (process {self.pid}) took more than {seconds:g} seconds {what}")
        if not line.endswith(b"\n"):
            raise self._died()
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "error":
            raise self._error(event)
        return event

    def until(self, *last: str) -> Iterator[dict[str, Any]]:
        """Events up to and including the first of a name in `last`."""
        seconds = None
        while True:
            event = self.read(seconds)
            yield event
            if event["event"] in last:
                return
            # Blender may hang; what comes between two samples is the disk's.
            seconds = self.picture_seconds if event["event"] == "start" else None

    def kill(self) -> None:
        """End the process at once and reap it. What it wrote stays."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _died(self) -> WorkerDied:
        status = self._process.wait()
        how = f"with status {status}"
        if status < 0:
            how = f"of signal {signal.Signals(-status).name}"
        words = " ".join(_last_lines(self.log, self._log_start)) or "nothing"
        return WorkerDied(
            f"the render worker ({shlex.quote(self.python)}) died {how}; its log {self.log} says: {words}"
        )

    def _error(self, event: dict[str, Any]) -> Exception:
        message = event["message"]
        if event["kind"] == "import":
            return RenderError(_explain_import(self.python, message))
        if event["kind"] == "sample":
            return WorkerDied(f"Blender failed: {message}; its log is {self.log}")
        if event["kind"] == "spec":
            return SpecError(message)
        if event["kind"] == "os":
            return RenderError(f"{message}; what is finished stays: make room, then run the same command to go on")
        if event["kind"] == "render":
            return RenderError(message)
        return RenderError(f"rendering failed: {event['type']}: {message}; log: {self.log}")


def _last_lines(path: Path, start: int, count: int = 3) -> list[str]:
    """The last lines of a log, of those that this process wrote."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    text = data[start if start <= len(data) else 0 :].decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-count:]

"""Kill this process, or fill its disk, at the n-th change that it makes to the file system."""

from __future__ import annotations

import builtins
import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOMY = ("replace", "rename", "ftruncate", "unlink", "remove", "rmdir")
"""Changes that succeed on a full disk too."""

GREEDY = ("fsync", "mkdir")


class Strike:
    """What happens at the n-th change.

    Args:
        step: n, from 1.
        kind: `kill`, by SIGKILL before the change, a write being torn; or `full`, from then on nothing new fits.
        report: the file that takes what was struck.
    """

    def __init__(self, step: int, kind: str, report: Path) -> None:
        self.left, self.kind, self.report = step, kind, report
        self.lock = threading.Lock()
        self.open, self.write, self.write_bytes = builtins.open, os.write, Path.write_bytes

    def due(self, name: str, *what: object) -> bool:
        """Count a change; whether it is struck."""
        with self.lock:
            self.left -= 1
            if self.left == 0:
                words = " ".join([name, *(Path(w).name for w in what if isinstance(w, str | Path))])
                with self.open(self.report, "w") as file:
                    file.write(words)
        return self.left <= 0

    def fall(self, *what: object) -> None:
        """The process ends, or the disk is full."""
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        path = next((os.fspath(w) for w in what if isinstance(w, str | Path)), None)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def guarded(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, counted."""

        def guard(*args: Any, **options: Any) -> Any:
            if self.due(name, *args):
                self.fall(*args)
            return change(*args, **options)

        return guard

    def torn_write(self, fd: int, data: Any) -> int:
        """A write of which a third reaches the disk."""
        if not self.due("write"):
            return self.write(fd, data)
        if self.kind == "kill" or self.left == 0:
            some = self.write(fd, bytes(data)[: len(data) // 3])
            if self.kind == "full":
                return some
        self.fall()
        return 0

    def torn_file(self, path: Path, data: bytes) -> int:
        """A file that is written to a third."""
        if self.due("write_bytes", path):
            self.write_bytes(path, data[: len(data) // 3])
            self.fall(path)
        return self.write_bytes(path, data)

    def torn_open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """Opened for writing, the file is made and stays empty."""
        if mode[0] in "wax" and self.due("open", file):
            if self.kind == "kill":
                self.open(file, mode, *args, **options).close()
            self.fall(file)
        return self.open(file, mode, *args, **options)

    def arm(self) -> None:
        """Begin to count."""
        for name in GREEDY + (ROOMY if self.kind == "kill" else ()):
            setattr(os, name, self.guarded(name, getattr(os, name)))
        os.write = self.torn_write
        builtins.open = self.torn_open
        Path.write_bytes = lambda path, data: self.torn_file(path, bytes(data))  # type: ignore[method-assign,assignment]

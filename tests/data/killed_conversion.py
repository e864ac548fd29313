"""Conversions killed at random moments, until one ends: `python killed_conversion.py SEED OPTIONS...`.

Each try is a fork that SIGKILLs itself at the n-th change that it makes to the file system, n drawn from SEED; a write
that is struck leaves a part of its bytes. OPTIONS are `name=value` of ConvertOptions. Prints how many were killed.
"""

from __future__ import annotations

import builtins
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from ident3d.conversion import ConvertOptions, convert

OPERATIONS = ("replace", "fsync", "ftruncate", "unlink", "mkdir", "sync", "rmdir")


class Countdown:
    """Kills the process when it has been counted down."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def step(self) -> bool:
        """Whether the change that comes now is the last."""
        self.steps -= 1
        return self.steps <= 0

    def guard(self, module: Any, name: str) -> None:
        """Count the calls of a function."""
        original = getattr(module, name)

        def guarded(*args: Any, **options: Any) -> Any:
            if self.step():
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        setattr(module, name, guarded)


def strike(steps: int) -> None:
    """Make this process kill itself."""
    countdown = Countdown(steps)
    for name in OPERATIONS:
        countdown.guard(os, name)
    countdown.guard(builtins, "open")
    write, write_bytes = os.write, Path.write_bytes

    def torn_write(fd: int, data: Any) -> int:
        if countdown.step():
            write(fd, bytes(data)[: len(data) // 3])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, data)

    def torn_file(path: Path, data: bytes) -> int:
        if countdown.step():
            write_bytes(path, data[: len(data) // 3])
            os.kill(os.getpid(), signal.SIGKILL)
        return write_bytes(path, data)

    os.write = torn_write
    Path.write_bytes = torn_file  # type: ignore[method-assign,assignment]


def main() -> None:
    """Try until a conversion ends."""
    moment = random.Random(int(sys.argv[1]))
    options: dict[str, Any] = dict(option.split("=", 1) for option in sys.argv[2:])
    if "shard_size" in options:
        options["shard_size"] = int(options["shard_size"])
    killed = 0
    while True:
        steps = moment.randint(1, 90)
        child = os.fork()
        if not child:
            strike(steps)
            try:
                convert(ConvertOptions(**options, quiet=True, workers=2))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(3)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status >= 0:
            print(killed)
            sys.exit(status)
        killed += 1


if __name__ == "__main__":
    main()

"""Locks on folders that several processes may want to write."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ident3d.errors import BusyError

__all__ = ["file_lock"]


@contextmanager
def file_lock(path: Path, busy: str) -> Iterator[int]:
    """Hold a file against others; gives the descriptor, which children may inherit.

    The lock is the kernel's, so it ends with the last process that holds the descriptor, however it ends.

    Args:
        path: the file, made if absent; it names the process that holds it.
        busy: the error's text, in which `{process}` is replaced.

    Raises:
        BusyError: another holds it.
    """
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "unknown"
            raise BusyError(busy.replace("{process}", who)) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()

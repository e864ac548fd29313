"""Locks on folders that several processes may want to write."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ident3d.errors import BusyError, SpecError

__all__ = ["allow_files", "file_lock"]


PAUSE = 0.1
"""Seconds between two tries."""

UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems without locks answer, such as Lustre mounted without them."""


@contextmanager
def file_lock(path: Path, busy: str, *, shared: bool = False, wait: float = 0) -> Iterator[int]:
    """Hold a file against others; gives the descriptor, which children may inherit.

    The lock is the kernel's, so it ends with the last process that holds the descriptor, however it ends.

    Args:
        path: the file, made if absent; it names the process that took it last.
        busy: the error's text, in which `{process}` is replaced.
        shared: hold it together with others that do so, against those that want it alone.
        wait: seconds to wait for it.

    Raises:
        BusyError: another holds it.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with open(path, "a+") as file:
        left = wait
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in UNSUPPORTED:
                    warnings.warn(
                        f"{path}: no locks on this file system; let no two processes do the same", stacklevel=3
                    )
                    break
                if not isinstance(error, BlockingIOError):
                    raise
                if left <= 0:
                    file.seek(0)
                    who = file.read().strip() or "unknown"
                    raise BusyError(busy.replace("{process}", who)) from None
                time.sleep(PAUSE)
                left -= PAUSE
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()


def allow_files(count: int) -> None:
    """Let this process, and those that it starts, have so many files open, as far as the system permits.

    Raises:
        SpecError: it permits fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SpecError(f"{count} open files are needed, and this system allows {hard}; give fewer shards at a time")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))

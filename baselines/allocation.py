"""Memory that a training on the CPU frees and takes again at every step."""

from __future__ import annotations

import ctypes
import functools
import sys

__all__ = ["keep_freed_memory"]

# Numbers of mallopt's parameters, in glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
MAX_THRESHOLD = 32 * 2**20
"""The most that glibc takes; larger tensors go back to the system as ever."""


@functools.cache
def keep_freed_memory() -> bool:
    """Have this process keep the memory of freed tensors of up to 32 MiB, in place of giving it back to the system.

    By default glibc maps each tensor of some hundred KiB anew, and the system clears its pages at first touch: a step
    of a convolutional network on two threads took 1.5 to 1.9 times as long. The process keeps at most its peak, and at
    most 2 GiB past what it uses.

    Returns:
        Whether the allocator took it: glibc's does; macOS and musl have others.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    asked = ((M_MMAP_THRESHOLD, MAX_THRESHOLD), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 * 2**20))
    taken = [mallopt(parameter, value) == 1 for parameter, value in asked]
    return all(taken)

"""How many workers a machine is given."""

from __future__ import annotations

import os

from ident3d.errors import SpecError

__all__ = ["cores", "count_workers"]

MAX_WORKERS = 1024


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_workers(workers: str | int) -> int | None:
    """The number of workers that an option names, None for `auto`.

    Raises:
        SpecError: neither `auto` nor a number from 1 to 1,024.
    """
    if workers == "auto":
        return None
    try:
        count = int(workers)
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_WORKERS:
        raise SpecError(f"workers = {workers}: expected auto, or 1 to {MAX_WORKERS:,}")
    return count

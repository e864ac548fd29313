"""All pictures of a dataset decoded once, by threads, and whether there is memory for what is made of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from tqdm import tqdm

from ident3d.datasets.blocks import Blocks, ahead
from ident3d.datasets.serving import Array
from ident3d.errors import DatasetError
from ident3d.workers import cores

if TYPE_CHECKING:
    from ident3d.datasets.pictures import Pictures

__all__ = ["available_memory", "check_memory", "gigabytes", "map_decoded"]

BLOCK_BYTES = 1 << 22
"""Of decoded pictures handed on at once."""

R = TypeVar("R")

Decode = Callable[[int, int], tuple[Array, dict[int, str]]]


def map_decoded(
    data: Pictures, work: Callable[[int, Array, dict[int, str]], R], *, doing: str, quiet: bool = False
) -> Iterator[R]:
    """What `work` gives for each block of the dataset's pictures, in order; positives of their own come last.

    Args:
        data: decoded by threads where it has no store.
        work: called by the same threads, several at once and in any order, with the number of a block's first picture;
            the block, uint8 (n, 3, H, W), which is only lent, and read-only where there is a store; and those numbers
            in it that are of damaged pictures, hence black, with the reason.
        doing: what the progress bar says; there is one on a terminal.
        quiet: no progress bar.

    Raises:
        DatasetError: a damaged picture, with `on_error="raise"`; else there is a warning for each.
    """
    count, side = data.picture_count, data.resolution
    step = max(1, BLOCK_BYTES // (3 * side * side))
    threads = cores()
    blocks = Blocks(keep=threads)
    decode = _from_store(data) or _decoder(data, blocks)

    def job(start: int) -> tuple[R, dict[int, str], int]:
        stop = min(start + step, count)
        block, bad = decode(start, stop)
        return work(start, block, bad), bad, stop - start

    disable = True if quiet else None
    with (
        tqdm(total=count, desc=doing, unit=" pictures", disable=disable, unit_scale=True) as bar,
        closing(ahead(job, range(0, count, step), threads, 2 * threads)) as results,
    ):
        for result, bad, n in results:
            for text in bad.values():
                warnings.warn(f"left out: {text}", stacklevel=2)
            bar.update(n)
            yield result


def _from_store(data: Pictures) -> Decode | None:
    store = data.store
    if store is None:
        return None

    def look(start: int, stop: int) -> tuple[Array, dict[int, str]]:
        return store.pixels[start:stop], {n: text for n, text in store.damaged.items() if start <= n < stop}

    return look


def _decoder(data: Pictures, blocks: Blocks) -> Decode:
    def decode(start: int, stop: int) -> tuple[Array, dict[int, str]]:
        side, bad = data.resolution, {}
        block = blocks.empty((stop - start, 3, side, side), torch.uint8).numpy()
        for number in range(start, stop):
            positive, place = divmod(number, len(data))
            try:
                pixels = data.pixels(place, positive=bool(positive))
            except DatasetError as error:
                if data.on_error == "raise":
                    raise
                bad[number] = str(error)
                block[number - start] = 0
                continue
            block[number - start] = pixels.transpose(2, 0, 1)
        return block, bad

    return decode


def gigabytes(count: int) -> str:
    """Bytes in words."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.3f} MB"


def check_memory(need: int, what: str, instead: str) -> None:
    """Refuse what does not fit into memory, rather than be killed half way.

    Args:
        need: in bytes.
        what: needs it.
        instead: what to do.

    Raises:
        DatasetError: less is available.
    """
    free = available_memory()
    if free is not None and need > free:
        raise DatasetError(f"{what} need {gigabytes(need)} of memory, {gigabytes(free)} are available; {instead}")


def available_memory(system: Path = Path("/")) -> int | None:
    """Bytes that this process may still take, by the kernel and by its control groups; None where nothing says so.

    Args:
        system: where `proc` and `sys` are.
    """
    found = []
    with suppress(OSError, ValueError, LookupError):
        found.append(_fields(system / "proc/meminfo")["MemAvailable"] * 1024)
    with suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                    found += _group_room(system / mount, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                found += _group_room(system / "sys/fs/cgroup/memory", path, *names)
    return max(0, min(found)) if found else None


def _fields(path: Path) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}


def _group_room(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """What the group and those above it leave. Of a container's, the path may not be there, but the mount's top is."""
    inner = mount / path.lstrip("/")
    for folder in (inner, *inner.parents):
        with suppress(OSError, ValueError, LookupError):
            most, used = (int((folder / name).read_text()) for name in (limit, usage))
            yield most - used + _fields(folder / "memory.stat").get(reclaimable, 0)
        if folder == mount:
            return

"""Memory for batches, and what fills it fast: recycled blocks, normalisation piece by piece, work done ahead.

A page that a process touches for the first time costs the kernel many times what copying into it costs; a batch of 256
pictures of 224 px has nine thousand of them as uint8, and four times as many as float32. So blocks are used again.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from ident3d.datasets.serving import Array

__all__ = ["Blocks", "ahead", "normalize_into", "pieces"]

PIECE_BYTES = 1 << 21
"""Of float32 normalised at once: stays in a core's cache over the three passes, and holds the GIL rarely."""

T = TypeVar("T")
R = TypeVar("R")


class _Lease:
    """Holds a block while any array or tensor in it lives: numpy and torch keep a view's ultimate owner alive."""

    def __init__(self, block: Array, free: deque[Array]) -> None:
        self.__array_interface__ = block.__array_interface__
        self._block, self._free = block, free

    def __del__(self) -> None:
        self._free.append(self._block)


class Blocks:
    """Tensors whose memory is used again once nobody holds them, nor any view of them. Safe under threads.

    Args:
        keep: blocks kept while nobody uses them.
        pinned: page-locked; torch recycles such memory itself: it knows which copies to a GPU are still under way.

    Example:
        >>> blocks = Blocks(keep=2)
        >>> first = blocks.empty((4, 3, 8, 8), torch.uint8)
        >>> address = first.data_ptr()
        >>> del first
        >>> blocks.empty((2, 3, 8, 8), torch.uint8).data_ptr() == address
        True
    """

    def __init__(self, keep: int, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._free: deque[Array] = deque(maxlen=keep)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the CPU that holds anything, contiguous."""
        if self.pinned:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        need = math.prod(shape) * dtype.itemsize
        block = self._fitting(need)
        if block is None:
            block = np.empty(max(need, 1), np.uint8)
        owned: Array = np.asarray(_Lease(block, self._free))
        return torch.from_numpy(owned[:need]).view(dtype).reshape(tuple(shape))

    def _fitting(self, need: int) -> Array | None:
        """A free block, or None; those too small or far too large are let go."""
        with contextlib.suppress(IndexError):
            while True:
                block = self._free.pop()
                if need <= block.nbytes <= max(4 * need, PIECE_BYTES):
                    return block
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, (self._free.maxlen,), {"pinned": self.pinned}


def pieces(pictures: int, picture_bytes: int) -> Iterator[slice]:
    """Pictures in runs of about `PIECE_BYTES`, at least one each.

    Args:
        pictures: how many.
        picture_bytes: of one, as float32.
    """
    step = max(1, PIECE_BYTES // max(picture_bytes, 1))
    for start in range(0, pictures, step):
        yield slice(start, min(start + step, pictures))


def normalize_into(
    out: Float32[Array, "n 3 height width"],
    pictures: UInt8[Array, "n 3 height width"],
    affine: tuple[Float32[Tensor, "3 1 1"], Float32[Tensor, "3 1 1"]],
) -> None:
    """x * scale + shift, rounded after each of the two as torch does it on any device.

    Args:
        out: where to, C-contiguous.
        pictures: the x.
        affine: scale and shift, as of `Serving.affine`.
    """
    n, _, height, width = out.shape
    scale, shift = (x.reshape(3, 1).numpy() for x in affine)
    target, source = (x.reshape(n, 3, height * width) for x in (out, pictures))
    for piece in pieces(n, 4 * 3 * height * width):
        part = target[piece]
        np.copyto(part, source[piece])
        part *= scale
        part += shift


def ahead(make: Callable[[T], R], jobs: Iterable[T], threads: int, depth: int) -> Generator[R]:
    """What `make` gives for each job, in their order, made by threads before it is asked for.

    Whatever is raised by a job is raised at its turn. Closing the iterator waits for the jobs under way, and no longer.

    Args:
        make: called by any thread, several at once.
        jobs: taken as results are asked for.
        threads: how many; 0 to make each result when it is asked for.
        depth: results made or under way at most.
    """
    if threads == 0:
        yield from map(make, jobs)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="ident3d") as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(make, job))
                if len(waiting) >= depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

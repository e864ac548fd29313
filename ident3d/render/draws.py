"""Random numbers keyed by (seed, split, index): sample i is the same whoever renders it, wherever, in any order.

Philox is counter-based: the stream of key (seed, split) can be entered at any block. Sample i owns the twelve 64-bit
words from 12 i on; the first ten are its latent, the eleventh its Cycles seed.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["cycles_seeds", "draw_latents"]

WORDS = 12
BLOCK = 4  # words that Philox-4x64 makes per step of its counter


def _words(seed: int, split: str, start: int, stop: int) -> NDArray[np.uint64]:
    key = np.frombuffer(hashlib.blake2b(f"ident3d/{seed}/{split}".encode(), digest_size=16).digest(), "<u8")
    stream = np.random.Philox(key=key)
    stream.advance(start * WORDS // BLOCK)
    return stream.random_raw((stop - start) * WORDS).reshape(-1, WORDS)


def draw_latents(seed: int, split: str, start: int, stop: int, frozen: dict[int, float]) -> NDArray[np.float32]:
    """The latents of samples start to stop - 1, uniform in the unit cube, float32 (stop - start, 10).

    Args:
        seed: any whole number of at least 0.
        split: the split's name.
        start: the first sample.
        stop: one past the last.
        frozen: column -> u, for the factors that the scene holds.
    """
    # 24 bits: the most that float32 holds exactly, so that no draw rounds up to 1.
    u = (_words(seed, split, start, stop)[:, :10] >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    for column, held in frozen.items():
        u[:, column] = held
    return u


def cycles_seeds(seed: int, split: str, start: int, stop: int) -> NDArray[np.int64]:
    """The Cycles seeds of samples start to stop - 1, in [0, 2^31), shape (stop - start,)."""
    return (_words(seed, split, start, stop)[:, 10] >> np.uint64(33)).astype(np.int64)

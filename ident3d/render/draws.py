"""Random numbers keyed by (seed, split, index): sample i is the same whoever renders it, wherever, in any order.

Philox is counter-based: the stream of key (seed, split) can be entered at any block. Sample i owns the twelve 64-bit
words from 12 i on; the first ten are its latent, the eleventh its Cycles seed, the twelfth that of its positive. What
the positive's latent is drawn from has a stream of its own.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["PAIR_UNIFORMS", "cycles_seeds", "draw_latents", "draw_uniforms"]

WORDS = 12
PAIR_UNIFORMS = 24  # of which a conditional on ten factors takes 20 at most
BLOCK = 4  # words that Philox-4x64 makes per step of its counter


def _words(stream: str, words: int, start: int, stop: int) -> NDArray[np.uint64]:
    key = np.frombuffer(hashlib.blake2b(f"ident3d/{stream}".encode(), digest_size=16).digest(), "<u8")
    philox = np.random.Philox(key=key)
    philox.advance(start * words // BLOCK)
    return philox.random_raw((stop - start) * words).reshape(-1, words)


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
    u = (_words(f"{seed}/{split}", WORDS, start, stop)[:, :10] >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    for column, held in frozen.items():
        u[:, column] = held
    return u


def cycles_seeds(seed: int, split: str, start: int, stop: int, picture: int = 0) -> NDArray[np.int64]:
    """The Cycles seeds of samples start to stop - 1, in [0, 2^31), shape (stop - start,).

    Args:
        seed, split, start, stop: as for `draw_latents`.
        picture: 0 for the samples' own pictures, 1 for their positives'.
    """
    return (_words(f"{seed}/{split}", WORDS, start, stop)[:, 10 + picture] >> np.uint64(33)).astype(np.int64)


def draw_uniforms(seed: int, split: str, start: int, stop: int) -> NDArray[np.float64]:
    """What the positives of samples start to stop - 1 are drawn from, uniform and strictly between 0 and 1.

    Args:
        seed, split, start, stop: as for `draw_latents`.

    Returns:
        float64 (stop - start, PAIR_UNIFORMS).
    """
    # 52 bits and a half: the most for which neither end rounds to 0 or 1.
    words = _words(f"{seed}/{split}/pairs", PAIR_UNIFORMS, start, stop) >> np.uint64(12)
    return (words.astype(np.float64) + 0.5) * 2.0**-52

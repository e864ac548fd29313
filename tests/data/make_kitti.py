"""Fabricate a tiny pickle in the structure of KITTI Masks: `python tests/data/make_kitti.py OUT`.

As the published one, it refers to `numpy.bool`, the alias that numpy 1.24 removed. The masks are rectangles, so that
their centres of mass and areas are known without measuring.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["FILE", "LENGTHS", "fabricate", "make_kitti"]

FILE = "kitti_peds_v2.pickle"
LENGTHS = (5, 2, 12, 2, 3)
# The text "b1" as protocols 1 to 3 write it, and a reference to numpy.bool in its place.
TEXT, ALIAS = b"X\x02\x00\x00\x00b1", b"cnumpy\nbool\n"


def fabricate(lengths: Sequence[int] = LENGTHS) -> tuple[list[NDArray[np.bool_]], list[NDArray[np.float32]]]:
    """Masks, bool (T, 64, 64), and latents, float32 (T, 3), of sequences of these lengths."""
    masks, latents = [], []
    for k, length in enumerate(lengths):
        rng = np.random.default_rng([64, k])
        pictures, rows = np.zeros((length, 64, 64), bool), np.zeros((length, 3), np.float32)
        for t in range(length):
            (top, left), (height, width) = rng.integers(0, 40, 2), rng.integers(3, 24, 2)
            pictures[t, top : top + height, left : left + width] = True
            rows[t] = top + (height - 1) / 2, left + (width - 1) / 2, height * width
        masks.append(pictures)
        latents.append(rows)
    return masks, latents


def make_kitti(root: Path, lengths: Sequence[int] = LENGTHS) -> Path:
    """Write the pickle into the folder `root`, which need not exist; returns the pickle's path."""
    masks, latents = fabricate(lengths)
    stored = pickle.dumps({"pedestrians": masks, "pedestrians_latents": latents}, protocol=3)
    assert stored.count(TEXT) == 1
    root.mkdir(parents=True, exist_ok=True)
    path = root / FILE
    path.write_bytes(stored.replace(TEXT, ALIAS))
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/data/make_kitti.py OUT")
    print(make_kitti(Path(sys.argv[1])))

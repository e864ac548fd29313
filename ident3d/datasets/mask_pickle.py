"""The published pickle of KITTI Masks, read without trust: its structure, shapes and numbers are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from ident3d.datasets.safe_pickle import load_plain_pickle
from ident3d.datasets.serving import Array
from ident3d.datasets.silhouettes import SIDE
from ident3d.errors import DatasetError

__all__ = ["FILE", "read_sequences"]

FILE = "kitti_peds_v2.pickle"
MASKS, LATENTS = "pedestrians", "pedestrians_latents"
COUNT = 3
"""Latents of a mask: row and column of the centre of mass, and area."""


def read_sequences(path: Path) -> tuple[list[Array], list[Array]]:
    """The published pickle: masks (T, 64, 64) of 0 and 1, and latents, float32 (T, 3), of each sequence.

    Raises:
        DatasetError: it is damaged or not of the published structure.
    """
    held = load_plain_pickle(path)
    if not isinstance(held, dict) or not {MASKS, LATENTS} <= set(held):
        what = f"a dict of {list(held)[:5]!r:.200}" if isinstance(held, dict) else f"a {type(held).__name__}"
        raise DatasetError(f"{path}: holds {what}; expected a dict of {MASKS!r} and {LATENTS!r}, as {FILE} does")
    masks, latents = held[MASKS], held[LATENTS]
    if not (isinstance(masks, list) and isinstance(latents, list) and 0 < len(masks) == len(latents)):
        counts = " and ".join(f"{len(x)} in a list" if isinstance(x, list) else _described(x) for x in (masks, latents))
        raise DatasetError(f"{path}: {MASKS} and {LATENTS} are {counts}: expected two lists of as many arrays, not 0")
    for k, found in enumerate(masks):
        _check_masks(f"{path}: {MASKS}[{k}]", found)
    # One array may stand in the list many times over.
    if (total := sum(found.size for found in masks)) > path.stat().st_size:
        raise DatasetError(f"{path}: its masks have {total:,} pixels, more than the file has bytes; fetch it again")
    where = f"{path}: {LATENTS}"
    return masks, [_checked_latents(f"{where}[{k}]", found, len(masks[k])) for k, found in enumerate(latents)]


def _described(found: Any) -> str:
    return f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__


def _check_masks(where: str, found: Any) -> None:
    if not isinstance(found, np.ndarray) or found.ndim != 3 or found.shape[1:] != (SIDE, SIDE):
        raise DatasetError(f"{where} is {_described(found)}: expected booleans (T, {SIDE}, {SIDE})")
    if len(found) < 2:
        frames = "1 frame" if len(found) else "no frames"
        raise DatasetError(f"{where} has {frames}: expected at least 2, the frames of a pair; leave the sequence out")
    if found.dtype != bool and not ((found == 0) | (found == 1)).all():
        odd = found[(found != 0) & (found != 1)][0]
        raise DatasetError(f"{where} is {found.dtype} and holds {odd}: expected booleans, or 0 and 1")


def _checked_latents(where: str, found: Any, frames: int) -> Float32[Array, "frames 3"]:
    if not isinstance(found, np.ndarray) or found.dtype == bool or found.shape != (frames, COUNT):
        raise DatasetError(f"{where} is {_described(found)}: expected numbers ({frames}, {COUNT}), a row a mask")
    with np.errstate(over="ignore"):
        latents: Array = found.astype(np.float32)
    if not np.isfinite(latents).all():
        row = int(np.flatnonzero(~np.isfinite(latents).all(1))[0])
        raise DatasetError(f"{where}, row {row} is {found[row].tolist()}: expected finite numbers")
    return latents

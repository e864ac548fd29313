"""The latents of a split: drawn from the seed, or the user's own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import SpecError
from ident3d.render.draws import draw_latents
from ident3d.scene import SceneSpec, check_latents

__all__ = ["DRAWN", "array_sha256", "load_user_latents", "split_latents"]

DRAWN = "drawn"


def array_sha256(array: NDArray[Any]) -> str:
    """The sha256 of an array's elements in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def load_user_latents(path: Path, spec: SceneSpec) -> NDArray[np.float32]:
    """Latents from the user's .npy, float32 (N, 10), checked against the unit cube and the scene's frozen factors.

    Raises:
        SpecError: no such file, not a .npy of numbers, or an array that `check_latents` refuses.
    """
    if not path.is_file():
        raise SpecError(f"latents {path}: no such file; expected a .npy of shape (N, 10) in the unit cube")
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SpecError(f"latents {path}: not a .npy file of numbers: {error}") from None
    if not isinstance(array, np.ndarray):
        raise SpecError(f"latents {path}: expected one array (.npy), got an archive of several (.npz)")
    try:
        u = check_latents(array, spec)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    if not len(u):
        raise SpecError(f"latents {path}: holds no sample")
    return u


def split_latents(
    seed: int, split: str, samples: int, spec: SceneSpec, given: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """All latents of a split, float32 (samples, 10): the given ones, else drawn."""
    return draw_latents(seed, split, 0, samples, spec.frozen) if given is None else given

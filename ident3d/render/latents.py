"""The latents of a split: drawn from the seed, or the user's own."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import SpecError
from ident3d.factors import FACTORS
from ident3d.files import read_npy
from ident3d.render.draws import draw_latents
from ident3d.render.plan import RenderPlan
from ident3d.scene import SceneSpec, check_latents

__all__ = ["DRAWN", "array_sha256", "load_user_latents", "write_latents"]

Latents = NDArray[np.float32]

DRAWN = "drawn"
PIECE = 1_000_000


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
    if zipfile.is_zipfile(path):
        raise SpecError(f"latents {path}: expected one array (.npy), got an archive of several (.npz)")
    try:
        u = check_latents(read_npy(path), spec)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"latents {path}: {error}") from None
    if not len(u):
        raise SpecError(f"latents {path}: holds no sample")
    return u


def write_latents(path: Path, plan: RenderPlan, spec: SceneSpec, given: Latents | None) -> Latents:
    """Write all latents of a split to a .npy, the given ones or else drawn; returns it mapped, float32 (samples, 10).

    Drawn ones are made and written piece by piece: a split can be larger than memory.
    """
    with open(path, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (plan.samples, len(FACTORS))}
        np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
        for start in range(0, plan.samples, PIECE):
            stop = min(plan.samples, start + PIECE)
            file.write((drawn(plan, spec, start, stop) if given is None else given[start:stop]).tobytes())
        file.flush()
        os.fsync(file.fileno())
    return read_npy(path, mapped=True)


def drawn(plan: RenderPlan, spec: SceneSpec, start: int, stop: int) -> Latents:
    """The drawn latents of samples start to stop - 1 of a plan."""
    return draw_latents(plan.seed, plan.split, start, stop, spec.frozen)

"""The latents of a split, drawn from the seed or the user's own, and those of its positives."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import SpecError
from ident3d.factors import FACTORS
from ident3d.files import read_npy
from ident3d.render.draws import PAIR_UNIFORMS, draw_latents, draw_uniforms
from ident3d.render.plan import RenderPlan
from ident3d.scene import SceneSpec, check_latents

__all__ = ["DRAWN", "load_user_latents", "pair_law", "stored_rows", "write_latents"]

if TYPE_CHECKING:
    from ident3d.distributions import Distribution

Latents = NDArray[np.float32]

DRAWN = "drawn"
PIECE = 1_000_000
PAIR_PIECE = 50_000


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


def write_latents(folder: Path, plan: RenderPlan, spec: SceneSpec, given: Latents | None) -> tuple[Latents, ...]:
    """Write all latents of a split to latents.npy, the given ones or else drawn, and to pair.latents.npy, unless it is
    there, those of the positives where the plan has any. They are made and written piece by piece: a split can be
    larger than memory.

    Returns:
        What was written, mapped, each float32 (samples, 10).
    """

    def own(start: int, stop: int) -> Latents:
        return drawn(plan, spec, start, stop) if given is None else given[start:stop]

    latents = _write(folder / "latents.npy", plan.samples, PIECE, own)
    if not plan.pairs:
        return (latents,)
    kept = folder / "pair.latents.npy"
    if kept.is_file() and (there := read_npy(kept, mapped=True)).shape == latents.shape:
        # What shards were rendered from; another version of torch could round otherwise.
        return latents, there
    law = pair_law(plan.pairs, spec)

    def positives(start: int, stop: int) -> Latents:
        return draw_positives(law, plan, spec, start, np.array(latents[start:stop]))

    return latents, _write(kept, plan.samples, PAIR_PIECE, positives)


def _write(path: Path, samples: int, piece: int, rows: Callable[[int, int], Latents]) -> Latents:
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (samples, len(FACTORS))}
        np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
        for start in range(0, samples, piece):
            file.write(rows(start, min(samples, start + piece)).tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    return read_npy(path, mapped=True)


def pair_law(text: str, spec: SceneSpec) -> Distribution:
    """The conditional that a scene's positives are drawn from.

    Raises:
        SpecError: an unknown conditional, or one that cannot be drawn in the unit cube.
    """
    from ident3d.conditionals import conditional
    from ident3d.spaces import Box

    law = conditional(text, Box(len(FACTORS)), spec.factor_table)
    if not 0 < law.uniforms <= PAIR_UNIFORMS:
        raise SpecError(f"pairs {text!r}: cannot be drawn in the unit cube")
    return law


def draw_positives(law: Distribution, plan: RenderPlan, spec: SceneSpec, start: int, latents: Latents) -> Latents:
    """The z~ of samples from `start` on, whose z are given; factors that the scene holds stay as they are."""
    import torch

    u = draw_uniforms(plan.seed, plan.split, start, start + len(latents))[:, : law.uniforms]
    positives: Latents = law.from_uniforms(torch.from_numpy(latents), torch.from_numpy(u)).numpy()
    for column in spec.frozen:
        positives[:, column] = latents[:, column]
    return positives


def stored_rows(arrays: Sequence[Latents], start: int, stop: int) -> Latents:
    """Some samples' latents as shards are given them: (n, 10), or with those of the positives (n, 2, 10)."""
    rows = [np.array(array[start:stop]) for array in arrays]
    return rows[0] if len(rows) == 1 else np.stack(rows, axis=1)


def drawn(plan: RenderPlan, spec: SceneSpec, start: int, stop: int) -> Latents:
    """The drawn latents of samples start to stop - 1 of a plan."""
    return draw_latents(plan.seed, plan.split, start, stop, spec.frozen)

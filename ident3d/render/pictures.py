"""Pictures of given latents as an array, without any dataset."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ident3d.errors import SpecError
from ident3d.render.plan import MAX_RESOLUTION, MIN_RESOLUTION
from ident3d.render.process import WorkerProcess, blender_python
from ident3d.render.quality import quality as quality_settings
from ident3d.render.worker import Setup
from ident3d.scene import check_latents
from ident3d.scenes import load_scene
from ident3d.workers import cores

__all__ = ["render_latents"]


def render_latents(
    u: ArrayLike,
    *,
    scene: str | os.PathLike[str] = "3dident",
    resolution: int = 224,
    quality: str = "standard",
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
    blender_python: str | None = None,
) -> NDArray[np.uint8]:
    """Render latents.

    Args:
        u: points of the unit cube, shape (N, 10), or (10,) for one.
        scene: a bundled scene's name, or the path of a .toml.
        resolution: side in pixels, 8 to 4096.
        quality: draft, standard or paper.
        seed: picture i takes the Cycles seed `seed + i`, modulo 2^31.
        device: auto, cpu, optix, cuda, hip, metal or oneapi.
        threads: CPU threads; all cores by default.
        blender_python: an interpreter that has bpy, numpy and Pillow, if not this one.

    Returns:
        sRGB pixels, uint8 (N, H, W, 3).

    Raises:
        SpecError: latents, scene, quality or resolution that cannot be.
        RenderError: Blender is absent or failed.

    Example:
        >>> render_latents([0.5] * 10, resolution=16, quality="draft").shape
        (1, 16, 16, 3)
    """
    found = load_scene(Path(scene) if not isinstance(scene, str) else scene)
    latents = check_latents(np.atleast_2d(np.asarray(u)), found.spec)
    if not MIN_RESOLUTION <= resolution <= MAX_RESOLUTION:
        raise SpecError(f"resolution = {resolution}: expected {MIN_RESOLUTION} to {MAX_RESOLUTION}")
    setup = Setup(
        scene=found.text,
        mesh=str(found.mesh_path),
        settings=asdict(quality_settings(quality)),
        resolution=resolution,
        device=device,
        threads=threads or cores(),
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "pictures.npy")
        _render(latents, setup, seed, out, Path(folder), blender_python)
        return np.asarray(np.load(out), dtype=np.uint8)


def _render(latents: NDArray[np.float32], setup: Setup, seed: int, out: Path, folder: Path, python: str | None) -> None:
    shape = (len(latents), setup.resolution, setup.resolution, 3)
    np.lib.format.open_memmap(out, mode="w+", dtype=np.uint8, shape=shape).flush()  # type: ignore[no-untyped-call]
    worker = WorkerProcess(blender_python(python), setup, folder / "worker.log")
    try:
        for i, latent in enumerate(latents):
            command: dict[str, Any] = {
                "out": str(out),
                "index": i,
                "latent": latent.tolist(),
                "seed": (seed + i) % 2**31,
            }
            worker.send({"picture": command})
            for _ in worker.until("picture"):
                pass
    finally:
        worker.kill()

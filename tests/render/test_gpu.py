"""Rendering on a GPU: the same pictures as on the CPU but for noise, by one worker a GPU, named in the manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ident3d import RenderError, RenderOptions, render_dataset, render_latents
from ident3d.render.draws import draw_latents
from ident3d.shards.verify import verify_dataset

pytestmark = [pytest.mark.gpu, pytest.mark.render]
KINDS = ("optix", "cuda", "hip", "metal", "oneapi")


@pytest.fixture(scope="module")
def device() -> str:
    """The first kind of GPU that Blender finds here."""
    for kind in KINDS:
        try:
            render_latents([0.5] * 10, resolution=16, quality="draft", device=kind)
        except RenderError as error:
            if "finds none" not in str(error):
                raise
            continue
        return kind
    pytest.skip("Blender finds no GPU on this machine")


def test_the_pictures_are_the_cpus_but_for_noise(device: str) -> None:
    u = draw_latents(0, "train", 0, 8, {})
    pictures = [render_latents(u, resolution=64, device=kind).astype(np.float64) for kind in ("cpu", device)]
    noisy = render_latents(u, resolution=64, device="cpu", seed=1000).astype(np.float64)

    def psnr(other: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
        square = ((pictures[0] - other) ** 2).mean(axis=(1, 2, 3))
        return float(np.median(10 * np.log10(255**2 / np.maximum(square, 1e-12))))

    # Other Cycles seeds differ by noise alone; another device must not differ by more.
    assert psnr(pictures[1]) > psnr(noisy) - 1


def test_auto_takes_the_gpu_and_the_manifest_names_it(tmp_path: Path, device: str) -> None:
    options = {"resolution": 16, "quality": "draft", "shard_size": 2, "quiet": True}
    manifest = render_dataset(RenderOptions(tmp_path / "a", 8, **options))  # type: ignore[arg-type]
    assert manifest.device == device.upper()
    assert manifest.versions["gpu"]
    assert verify_dataset(tmp_path / "a") == []
    again = render_dataset(RenderOptions(tmp_path / "b", 8, workers=3, **options))  # type: ignore[arg-type]
    assert [s.sha256 for s in again.splits["train"].shards] == [s.sha256 for s in manifest.splits["train"].shards]

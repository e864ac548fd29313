"""Fabricate a valid dataset without Blender: `python tests/data/make_dataset.py OUT`.

Shards, index, manifest and card come from the package's own writers; only the pictures are made up. Each is a smooth
pattern that the latents move, plus noise keyed by the index, so that no two samples are alike and none compresses to
nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ident3d.codecs import encode_png
from ident3d.files import array_sha256
from ident3d.render.finish import finish_split, save_scene
from ident3d.render.folder import RenderFolder
from ident3d.render.latents import DRAWN, stored_rows, write_latents
from ident3d.render.plan import RenderPlan
from ident3d.render.quality import quality
from ident3d.scenes import load_scene
from ident3d.shards.manifest import shard_name
from ident3d.shards.summary import ShardSummary, summarise
from ident3d.shards.writer import ShardWriter

__all__ = ["make_dataset", "make_pixels"]

SAMPLES = {"train": 24, "test": 6}


def make_pixels(latent: NDArray[np.float32], index: int, resolution: int) -> NDArray[np.uint8]:
    """The made-up picture of sample `index`, uint8 (resolution, resolution, 3)."""
    y, x = np.mgrid[:resolution, :resolution] / resolution
    u = latent.astype(np.float64)
    noise = np.random.default_rng([20, index]).uniform(-12, 12, (resolution, resolution, 3))
    channels = [np.sin(2 * np.pi * (u[c] * x + u[c + 3] * y + u[c + 6])) + u[9] - 0.5 for c in range(3)]
    pixels: NDArray[np.uint8] = np.clip(127.5 + 70 * np.stack(channels, axis=-1) + noise, 0, 255).astype(np.uint8)
    return pixels


def make_dataset(
    root: Path,
    samples: Mapping[str, int] = SAMPLES,
    shard_size: int = 5,
    resolution: int = 16,
    seed: int = 3,
    *,
    scene: str | Path = "3dident",
    latents: NDArray[np.float32] | None = None,
    pairs: str = "",
) -> Path:
    """Write a whole dataset into the folder `root`, which need not exist; returns `root`.

    Args:
        root: the dataset's folder.
        samples: how many of which split.
        shard_size: samples a shard.
        resolution: the pictures' side in pixels.
        seed: what the latents are drawn from.
        scene: the scene that it claims to show.
        latents: in place of drawn ones, for every split: (N, 10).
        pairs: the conditional of positive pairs.
    """
    found = load_scene(scene)
    folder = RenderFolder(root)
    folder.create()
    save_scene(root, found)
    for split, count in samples.items():
        plan = RenderPlan(
            scene=found.spec.name,
            scene_digest=found.digest,
            split=split,
            samples=count,
            seed=seed,
            latents=DRAWN if latents is None else array_sha256(latents),
            resolution=resolution,
            quality="draft",
            settings=quality("draft"),
            shard_size=shard_size,
            device="CPU",
            blender="0.0.0 (none)",
            pairs=pairs,
        )
        folder.save_plan(plan)
        u = write_latents(folder.work(split), plan, found.spec, latents)
        (root / split).mkdir()
        summaries = [_write_shard(plan, shard, root / split, u) for shard in range(plan.shards)]
        finish_split(folder, found, plan, summaries)
    return root


def _write_shard(plan: RenderPlan, shard: int, folder: Path, u: Sequence[NDArray[np.float32]]) -> ShardSummary:
    start, stop = plan.bounds(shard)
    path, rows = folder / shard_name(plan.split, shard), stored_rows(u, start, stop)
    writer = ShardWriter(path, start, rows, plan.resolution)
    for index in range(start, stop):
        pictures = [make_pixels(array[index], index + k * plan.samples, plan.resolution) for k, array in enumerate(u)]
        writer.append(*map(encode_png, pictures))
    writer.finish()
    return summarise(path, start, rows, plan.resolution)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/data/make_dataset.py OUT")
    print(make_dataset(Path(sys.argv[1])))

"""Datasets of any length out of a few pictures, for benchmarks: sample i has picture i modulo their number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ident3d.codecs import decode
from ident3d.files import write_json
from ident3d.render.finish import finish_split, save_scene
from ident3d.render.folder import RenderFolder
from ident3d.render.latents import DRAWN, stored_rows, write_latents
from ident3d.render.plan import RenderPlan, ShardJob
from ident3d.render.quality import quality
from ident3d.scenes import load_scene
from ident3d.schema import to_plain
from ident3d.shards.manifest import write_manifest
from ident3d.shards.summary import ShardSummary, map_file, members_of
from ident3d.shards.tar import scan_samples
from ident3d.shards.writer import ShardWriter

__all__ = ["begin", "fabricate", "fill"]

Latents = tuple[NDArray[np.float32], ...]


def begin(root: Path, samples: int, shard_size: int, resolution: int) -> tuple[RenderFolder, RenderPlan, Latents]:
    """A render of one split, train, that has been begun, and its latents.

    Args:
        root: its folder, which need not exist.
        samples: how many.
        shard_size: samples a shard.
        resolution: side of the pictures in pixels.
    """
    scene, folder = load_scene("3dident"), RenderFolder(root)
    plan = RenderPlan(
        scene=scene.spec.name,
        scene_digest=scene.digest,
        split="train",
        samples=samples,
        seed=0,
        latents=DRAWN,
        resolution=resolution,
        quality="draft",
        settings=quality("draft"),
        shard_size=shard_size,
        device="CPU",
        blender="0.0.0 (none)",
    )
    folder.create()
    save_scene(root, scene)
    folder.save_plan(plan)
    latents = write_latents(folder.work("train"), plan, scene.spec, None)
    (root / "train").mkdir()
    return folder, plan, latents


def fill(
    folder: RenderFolder,
    plan: RenderPlan,
    latents: Latents,
    pictures: Sequence[bytes],
    form: str = "png",
    *,
    keep: bool = False,
) -> Iterator[ShardSummary]:
    """Write all shards, and give their summaries; `keep` puts these where a render's workers do.

    Args:
        folder, plan, latents: from `begin`.
        pictures: encoded; sample i has picture i modulo their number.
        form: of the pictures, png or webp.
        keep: write the summaries too.
    """
    decoded = np.stack([decode(picture) for picture in pictures]).reshape(len(pictures), -1, 3).astype(np.int64)
    sums = np.stack([decoded.sum(axis=1), np.square(decoded).sum(axis=1)], axis=1)
    members = members_of(picture=form)
    for shard in range(plan.shards):
        job = ShardJob.of(plan, shard, folder.root / "train", folder.work("train"))
        writer = ShardWriter(
            Path(job.path), job.start, stored_rows(latents, job.start, job.stop), plan.resolution, members
        )
        for index in range(job.start, job.stop):
            writer.append(pictures[index % len(pictures)])
        writer.finish()
        summary = _summary(Path(job.path), members, sums[np.arange(job.start, job.stop) % len(pictures)])
        if keep:
            write_json(Path(job.sidecar), to_plain(summary))
        yield summary


def fabricate(
    root: Path, pictures: Sequence[bytes], samples: int, shard_size: int, resolution: int, form: str = "png"
) -> Path:
    """A dataset with one split, train, by the package's own writers; returns its folder.

    Args:
        root: its folder, which need not exist.
        pictures: encoded.
        samples: how many.
        shard_size: samples a shard.
        resolution: side of the pictures in pixels.
        form: of the pictures, png or webp.
    """
    folder, plan, latents = begin(root, samples, shard_size, resolution)
    manifest = finish_split(folder, load_scene("3dident"), plan, fill(folder, plan, latents, pictures, form))
    entry = replace(manifest.splits["train"], members=members_of(picture=form))
    write_manifest(root, replace(manifest, splits={"train": entry}))
    return root


def _summary(path: Path, members: tuple[str, ...], sums: NDArray[np.int64]) -> ShardSummary:
    """What the manifest needs of a shard, without decoding each picture again; their sums and squares, (n, 2, 3)."""
    with map_file(path) as data:
        offsets = tuple(tuple((m.offset, m.size) for m in s.members.values()) for s in scan_samples(data, members))
        digest = hashlib.sha256(data).hexdigest()
        size = len(data)
    (r, g, b), (r2, g2, b2) = sums.sum(axis=0).tolist()
    return ShardSummary(len(sums), size, digest, offsets, (r, g, b), (r2, g2, b2))

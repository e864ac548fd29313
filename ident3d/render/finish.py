"""From finished shards to a dataset: index, latents, card and manifest."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ident3d._version import __version__
from ident3d.files import npy_bytes, write_atomic
from ident3d.render.folder import RenderFolder
from ident3d.render.plan import SPLITS, RenderPlan, ShardJob
from ident3d.scenes import Scene
from ident3d.schema import to_plain
from ident3d.shards.card import card_text
from ident3d.shards.manifest import (
    FORMAT,
    Manifest,
    SceneRecord,
    ShardEntry,
    SplitEntry,
    index_array,
    pixel_statistics,
    shard_name,
    write_manifest,
)
from ident3d.shards.summary import EXTENSIONS, PAIR_EXTENSIONS, ShardSummary, file_sha256
from ident3d.shards.workfolder import trusted_summary

__all__ = ["finished_summary", "finish_split", "latent_files", "save_scene", "split_entry"]


def finished_summary(job: ShardJob, latents: NDArray[np.float32], resolution: int) -> ShardSummary | None:
    """The summary of a shard that is in place, or None where it must be rendered: see `trusted_summary`.

    Args:
        job: the shard's.
        latents: of its samples, (n, 10), or (n, 2, 10) for pairs.
        resolution: the pictures' side in pixels.
    """
    return trusted_summary(Path(job.path), Path(job.sidecar), job.start, latents, resolution)


def save_scene(root: Path, scene: Scene) -> None:
    """Keep the spec's text and its mesh with the dataset, so that it can be repaired and varied."""
    folder = root / "scene"
    folder.mkdir(exist_ok=True)
    write_atomic(folder / "scene.toml", scene.text.encode())
    write_atomic(folder / scene.mesh_path.name, scene.mesh_path.read_bytes())


def latent_files(plan: RenderPlan) -> tuple[str, ...]:
    """The files of a split's latents."""
    return ("latents.npy", "pair.latents.npy") if plan.pairs else ("latents.npy",)


def split_entry(plan: RenderPlan, folder: Path, work: Path, summaries: Sequence[ShardSummary]) -> SplitEntry:
    """Put the latents (from the folder `work`) and index.npy into a split's folder; returns its manifest entry."""
    for name in latent_files(plan):
        os.replace(work / name, folder / name)
    write_atomic(folder / "index.npy", npy_bytes(index_array(summaries)))
    members = PAIR_EXTENSIONS if plan.pairs else EXTENSIONS
    mean, std = pixel_statistics(summaries, plan.resolution, len(members) // 2)
    shards = [ShardEntry(shard_name(plan.split, k), s.samples, s.bytes, s.sha256) for k, s in enumerate(summaries)]
    return SplitEntry(
        samples=plan.samples,
        shard_size=plan.shard_size,
        seed=plan.seed,
        latents=plan.latents,
        latents_sha256=file_sha256(folder / "latents.npy"),
        index_sha256=file_sha256(folder / "index.npy"),
        mean=mean,
        std=std,
        shards=tuple(shards),
        pairs=plan.pairs,
        members=members,
        pair_latents_sha256=file_sha256(folder / "pair.latents.npy") if plan.pairs else "",
    )


def finish_split(
    folder: RenderFolder,
    scene: Scene,
    plan: RenderPlan,
    summaries: Sequence[ShardSummary],
) -> Manifest:
    """Write all that makes finished shards a dataset, the manifest last, and clear the split's working files."""
    entry = split_entry(plan, folder.root / plan.split, folder.work(plan.split), summaries)
    base = folder.manifest() or Manifest(
        format=FORMAT,
        name=plan.scene,
        resolution=plan.resolution,
        quality=plan.quality,
        device=plan.device,
        render=to_plain(plan.settings),
        versions={"ident3d": __version__, "blender": plan.blender},
        scene=SceneRecord(plan.scene, plan.scene_digest, scene.mesh_path.name),
        factors=tuple(scene.spec.factor_table),
    )
    splits = {**base.splits, plan.split: entry}
    # In the order train, val, test whatever was rendered first: the bytes depend on what is there alone.
    ordered = {name: splits[name] for name in SPLITS if name in splits}
    manifest = dataclasses.replace(base, splits=ordered)
    write_atomic(folder.root / "README.md", card_text(manifest).encode())
    write_manifest(folder.root, manifest)
    shutil.rmtree(folder.work(plan.split))
    return manifest

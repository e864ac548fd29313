"""From finished shards to a dataset: index, latents, card and manifest."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ident3d._version import __version__
from ident3d.files import sync_folder, write_atomic
from ident3d.render.folder import RenderFolder
from ident3d.render.plan import SPLITS, RenderPlan, ShardJob
from ident3d.scenes import Scene
from ident3d.schema import to_plain
from ident3d.shards.card import card_text
from ident3d.shards.manifest import (
    FORMAT,
    Manifest,
    SceneRecord,
    ShardTally,
    SplitEntry,
    shard_name,
    write_manifest,
)
from ident3d.shards.summary import EXTENSIONS, PAIR_EXTENSIONS, ShardSummary, file_sha256, write_index
from ident3d.shards.workfolder import trusted_summary

__all__ = ["finished_summary", "finish_split", "gpus_folder", "latent_files", "save_scene", "split_entry"]


def finished_summary(
    job: ShardJob, latents: NDArray[np.float32], resolution: int, *, quick: bool = False
) -> ShardSummary | None:
    """The summary of a shard that is in place, or None where it must be rendered: see `trusted_summary`.

    Args:
        job: the shard's.
        latents: of its samples, (n, 10), or (n, 2, 10) for pairs.
        resolution: the pictures' side in pixels.
        quick: believe the sidecar of a shard of the right size.
    """
    return trusted_summary(Path(job.path), Path(job.sidecar), job.start, latents, resolution, quick=quick)


def save_scene(root: Path, scene: Scene) -> None:
    """Keep the spec's text and its mesh with the dataset, so that it can be repaired and varied."""
    folder = root / "scene"
    folder.mkdir(exist_ok=True)
    write_atomic(folder / "scene.toml", scene.text.encode())
    write_atomic(folder / scene.mesh_path.name, scene.mesh_path.read_bytes())


def latent_files(plan: RenderPlan) -> tuple[str, ...]:
    """The files of a split's latents."""
    return ("latents.npy", "pair.latents.npy") if plan.pairs else ("latents.npy",)


def _place(source: Path, target: Path) -> None:
    """Give a file a second name, or where the file system has no links a copy: the first is still needed if this
    process is killed before the manifest is written."""
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)
    if target.exists() and target.samefile(source):
        return  # renaming one name of a file to another of its names does nothing, and leaves both
    try:
        os.link(source, part)
    except OSError:
        shutil.copyfile(source, part)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
    os.replace(part, target)
    sync_folder(target.parent)


def split_entry(plan: RenderPlan, folder: Path, work: Path, summaries: Iterable[ShardSummary]) -> SplitEntry:
    """Put the latents (from the folder `work`) and index.npy into a split's folder; returns its manifest entry.

    Args:
        plan: of the split.
        folder: the split's.
        work: where its latents are.
        summaries: of all its shards, in order; each is let go of before the next is asked for.
    """
    members = PAIR_EXTENSIONS if plan.pairs else EXTENSIONS
    tally = ShardTally(lambda shard: shard_name(plan.split, shard))
    index = write_index(folder / "index.npy", plan.samples, len(members), tally.through(summaries))
    for name in latent_files(plan):
        _place(work / name, folder / name)
    mean, std = tally.statistics(plan.resolution, len(members) // 2)
    return SplitEntry(
        samples=plan.samples,
        shard_size=plan.shard_size,
        seed=plan.seed,
        latents=plan.latents,
        latents_sha256=file_sha256(folder / "latents.npy"),
        index_sha256=index,
        mean=mean,
        std=std,
        shards=tuple(tally.shards),
        pairs=plan.pairs,
        members=members,
        pair_latents_sha256=file_sha256(folder / "pair.latents.npy") if plan.pairs else "",
    )


def gpus_folder(work: Path) -> Path:
    """Where those that render a split leave the names of their GPUs, as empty files."""
    return work / "gpus"


def finish_split(
    folder: RenderFolder,
    scene: Scene,
    plan: RenderPlan,
    summaries: Iterable[ShardSummary],
) -> Manifest:
    """Write all that makes finished shards a dataset, the manifest last, and clear the split's working files."""
    work = folder.work(plan.split)
    entry = split_entry(plan, folder.root / plan.split, work, summaries)
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
    gpus = {path.name for path in gpus_folder(work).glob("*")}
    gpus |= set(filter(None, base.versions.get("gpu", "").split(", ")))
    if gpus:
        base = dataclasses.replace(base, versions={**base.versions, "gpu": ", ".join(sorted(gpus))})
    splits = {**base.splits, plan.split: entry}
    # In the order train, val, test whatever was rendered first: the bytes depend on what is there alone.
    ordered = {name: splits[name] for name in SPLITS if name in splits}
    manifest = dataclasses.replace(base, splits=ordered)
    write_atomic(folder.root / "README.md", card_text(manifest).encode())
    write_manifest(folder.root, manifest)
    shutil.rmtree(work, ignore_errors=True)  # the same command, begun since, clears it too
    return manifest

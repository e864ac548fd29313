"""`ident3d verify --repair`: render again just what is damaged, and put every byte back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ident3d.errors import DatasetError
from ident3d.files import array_sha256, read_npy
from ident3d.render.crew import Crew, CrewOptions
from ident3d.render.executors import run_shards
from ident3d.render.finish import latent_files, split_entry
from ident3d.render.folder import RenderFolder, plan_of
from ident3d.render.latents import DRAWN, stored_rows, write_latents
from ident3d.render.plan import RenderPlan, ShardJob
from ident3d.render.process import blender_python
from ident3d.scene import SceneSpec
from ident3d.shards.location import Location, SplitFiles
from ident3d.shards.manifest import Manifest, read_manifest, shard_name, write_manifest
from ident3d.shards.reader import write_rebuilt_index
from ident3d.shards.salvage import find_samples
from ident3d.shards.summary import ShardSummary, file_sha256, map_file, summarise
from ident3d.shards.verify import Problem, load_latents
from ident3d.shards.writer import part_path

__all__ = ["repair_dataset"]

PREFIX = "repair-"
LATENTS = ("latents.npy", "pair.latents.npy")


def repair_dataset(
    root: Path, problems: Sequence[Problem], python: str | None = None, *, quiet: bool = True
) -> list[str]:
    """Mend what `verify_dataset` found; returns a line for each thing done.

    Good samples of a damaged shard are kept and the others rendered again from the dataset's own scene, seed and
    settings, which on the same kind of machine gives the same bytes. Where it does not (another Blender, another
    processor), the manifest gets the new checksums and a line says so.

    Args:
        root: the dataset's folder.
        problems: from `verify_dataset`.
        python: an interpreter that has bpy, numpy and Pillow, if not this one.
        quiet: no progress bar.

    Raises:
        DatasetError: the scene that the dataset keeps is damaged, or the user's own latents are lost.
        RenderError: Blender is absent or failed, or the disk is full.
    """
    manifest = read_manifest(root)
    leftovers = _leftovers(root, manifest, problems)
    if not problems and not leftovers:
        return []
    if manifest.scene is None or manifest.source is not None:
        raise DatasetError(
            f"{root}: was converted, not rendered, so it cannot be repaired here; convert it again from its source"
        )
    broken_scene = [p for p in problems if not p.split]
    if broken_scene:
        raise DatasetError(f"{root}: cannot be repaired, since its scene is damaged: {broken_scene[0]}")
    folder = RenderFolder(root)
    folder.create()
    lines: list[str] = []
    with folder.disk_errors(), folder.lock() as lock:
        for path in leftovers:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for split in manifest.splits:
            mine = [p for p in problems if p.split == split]
            if mine:
                repair = _SplitRepair(folder, manifest, split, mine, blender_python(python), lock, quiet)
                lines += repair.run()
                manifest = read_manifest(root)
    return lines


def _leftovers(root: Path, manifest: Manifest, problems: Sequence[Problem]) -> list[Path]:
    """What a killed repair left: its working folders, and damaged shards whose repair was done."""
    broken = {p.file for p in problems}
    shards = [f"{split}/{shard.name}" for split, entry in manifest.splits.items() for shard in entry.shards]
    parts = [root / split / f".{name}.part" for split in manifest.splits for name in (*LATENTS, "index.npy")]
    kept = [_damaged(root / shard) for shard in shards if shard not in broken]
    return [path for path in (*(root / RenderFolder.HIDDEN).glob(f"{PREFIX}*"), *parts, *kept) if path.exists()]


def _damaged(path: Path) -> Path:
    return path.with_name(f".{path.name}.damaged")


class _SplitRepair:
    def __init__(
        self,
        folder: RenderFolder,
        manifest: Manifest,
        split: str,
        problems: Sequence[Problem],
        python: str,
        lock: int,
        quiet: bool,
    ) -> None:
        self.folder, self.manifest, self.split, self.problems = folder, manifest, split, problems
        self.python, self.lock, self.quiet = python, lock, quiet
        assert manifest.scene is not None
        self.scene = manifest.scene
        self.plan: RenderPlan = plan_of(manifest, split)
        self.members = manifest.splits[split].members
        self.target = folder.root / split
        self.target.mkdir(exist_ok=True)
        self.scene_path = folder.root / "scene" / "scene.toml"
        self.spec = SceneSpec.from_toml(self.scene_path.read_text(encoding="utf-8"))

    def run(self) -> list[str]:
        lines = list(self.remove_left_over())
        damaged = sorted({p.shard for p in self.problems if p.shard is not None})
        with tempfile.TemporaryDirectory(dir=self.folder.hidden, prefix=PREFIX) as name:
            work = Path(name)
            self.keep_positives(work)
            latents = write_latents(work, self.plan, self.spec, self.given_latents())
            for salvage in (True, False):
                wrong = [k for k in damaged if not self.intact(k)]
                if wrong:
                    lines += self.render(wrong, work, salvage=salvage)
            lines += self.settle(latents, work, damaged)
        for shard in damaged:
            self.damaged_path(shard).unlink(missing_ok=True)
        return lines

    def damaged_path(self, shard: int) -> Path:
        """Where a damaged shard is kept until its repair is done, so that an interrupted repair loses nothing."""
        return _damaged(self.target / shard_name(self.split, shard))

    def intact(self, shard: int) -> bool:
        entry = self.manifest.splits[self.split].shards[shard]
        path = self.target / entry.name
        return path.is_file() and file_sha256(path) == entry.sha256

    def remove_left_over(self) -> Iterator[str]:
        for p in self.problems:
            if p.detail.startswith("left over"):
                # Set aside, not deleted: it may be the user's.
                path = self.folder.root / p.file
                os.replace(path, path.with_name(path.name + ".left-over"))
                yield f"{p.file}: renamed to {path.name}.left-over"

    def given_latents(self) -> NDArray[np.float32] | None:
        """The user's own latents, as stored or else collected from the shards; None where they were drawn."""
        if self.plan.latents == DRAWN:
            return None
        stored = load_latents(self.target / "latents.npy", self.manifest.splits[self.split].latents_sha256)
        return self.latents_from_shards() if stored is None else stored

    def keep_positives(self, work: Path) -> None:
        """Take the positives' latents as they are stored, where they are good; else they are drawn again."""
        stored = self.target / "pair.latents.npy"
        if self.plan.pairs and load_latents(stored, self.manifest.splits[self.split].pair_latents_sha256) is not None:
            shutil.copyfile(stored, work / stored.name)

    def latents_from_shards(self) -> NDArray[np.float32]:
        rows: dict[int, NDArray[np.float32]] = {}
        for shard, entry in enumerate(self.manifest.splits[self.split].shards):
            start, _ = self.plan.bounds(shard)
            # An interrupted repair has left the damaged shard under the first name; the second goes before it.
            for path in (self.damaged_path(shard), self.target / entry.name):
                if not path.is_file():
                    continue
                with map_file(path) as data:
                    for place, sample in find_samples(data, start, entry.samples, self.members).items():
                        at = sample.members["latents.npy"]
                        with contextlib.suppress(ValueError):
                            rows[start + place] = read_npy(bytes(data[at.offset : at.offset + at.size]))
        if len(rows) < self.plan.samples:
            lost = next(i for i in range(self.plan.samples) if i not in rows)
            raise DatasetError(
                f"{self.target}/latents.npy is damaged, and so is the sample {lost} that held its row; "
                "restore that file: these latents were the user's own and cannot be drawn again"
            )
        latents = np.stack([rows[i] for i in range(self.plan.samples)])
        if array_sha256(latents) != self.plan.latents:
            raise DatasetError(
                f"{self.target}/latents.npy is damaged, and so are the shards' copies; restore that file"
            )
        return latents

    def render(self, shards: list[int], work: Path, *, salvage: bool) -> Iterator[str]:
        rendered: list[int] = []
        options = CrewOptions(device=self.plan.device.lower(), blender_python=self.python)
        text, mesh = self.scene_path.read_text(encoding="utf-8"), self.scene_path.with_name(self.scene.mesh)
        # Before anything is moved: Blender may be absent.
        crew = Crew(options, self.plan, text, mesh, self.folder.logs, "repair-worker", (self.lock,))
        try:
            jobs = [self.job(shard, work, salvage) for shard in shards]
        except BaseException:
            crew.close()
            raise
        with tqdm(total=len(shards), unit="shard", disable=True if self.quiet else None) as bar:

            def on_event(event: dict[str, Any]) -> None:
                if event["event"] == "picture" and not event["kept"]:
                    rendered.append(event["index"])
                bar.update(event["event"] == "shard")

            failures = run_shards(crew.executor(), jobs, on_event)
        if failures:
            raise DatasetError(f"shard {failures[0].shard} cannot be rendered again: {failures[0].message}")
        for shard in shards:
            start, stop = self.plan.bounds(shard)
            count = sum(start <= i < stop for i in rendered)
            yield f"{self.split}/{shard_name(self.split, shard)}: {count} of {stop - start} samples rendered again"

    def job(self, shard: int, work: Path, salvage: bool) -> ShardJob:
        job = ShardJob.of(self.plan, shard, self.target, work)
        path, damaged = Path(job.path), self.damaged_path(shard)
        if not salvage:
            for wrong in (part_path(path), path):  # what this machine cannot go on from; the damaged one is kept
                wrong.unlink(missing_ok=True)
            return job
        if path.is_file():
            os.replace(path, damaged)
        return dataclasses.replace(job, salvage=str(damaged)) if damaged.is_file() else job

    def summaries(self, latents: Sequence[NDArray[np.float32]]) -> Iterator[ShardSummary]:
        """The shards as they are now."""
        for shard in range(self.plan.shards):
            start, stop = self.plan.bounds(shard)
            path = self.target / shard_name(self.split, shard)
            yield summarise(path, start, stored_rows(latents, start, stop), self.plan.resolution)

    def settle(self, latents: Sequence[NDArray[np.float32]], work: Path, damaged: Sequence[int]) -> Iterator[str]:
        """Put latents, index and manifest in order with the shards as they are now."""
        entry = self.manifest.splits[self.split]
        wrong = {p.file.rpartition("/")[2] for p in self.problems}
        files = [name for name in (*latent_files(self.plan), "index.npy") if name in wrong]
        yield from (f"{self.split}/{name}: written again" for name in files)
        if all(self.intact(k) for k in damaged):
            for name in files:
                if name == "index.npy":
                    write_rebuilt_index(self.target / name, SplitFiles(Location(self.folder.root), self.split), entry)
                else:
                    os.replace(work / name, self.target / name)
            return
        changed = split_entry(self.plan, self.target, work, self.summaries(latents))
        splits = {**self.manifest.splits, self.split: changed}
        write_manifest(self.folder.root, dataclasses.replace(self.manifest, splits=splits))
        yield f"{self.split}: this machine renders other bytes than the first one did; the manifest has them now"

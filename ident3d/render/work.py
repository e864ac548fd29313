"""One split on its way from a plan to finished shards: what of it lies on disk, and what is still to be done."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import DatasetError, SpecError
from ident3d.files import read_npy
from ident3d.locks import allow_files, file_lock
from ident3d.render.crew import Crew, CrewOptions
from ident3d.render.executors import Executor, Failure, Outcome, run_shards
from ident3d.render.finish import finish_split, finished_summary, gpus_folder, latent_files, save_scene
from ident3d.render.folder import RenderFolder
from ident3d.render.latents import stored_rows, write_latents
from ident3d.render.plan import RenderPlan, ShardJob, sidecar_name
from ident3d.render.progress import Progress
from ident3d.render.states import Recorder, states_folder
from ident3d.scenes import Scene, load_scene
from ident3d.shards.manifest import Manifest, shard_name
from ident3d.shards.summary import ShardSummary
from ident3d.workers import cores

__all__ = ["LOCK_SECONDS", "SplitWork", "make_crew", "missing_shards", "ranges"]

OTHER_FILES = 256
"""Files that a process opens besides the locks of shards."""

LOCK_SECONDS = 60
"""How long a part waits for what an earlier process lets go of: one that Slurm has requeued may still be dying."""


class SplitWork:
    """A split in progress: its plan, scene and latents are on disk.

    Args:
        folder: the dataset's.
        scene: what is rendered.
        plan: which samples, in which shards.
        latents: of the samples, and with pairs of their positives, mapped.

    Attributes:
        folder, scene, plan: as given.
        jobs: one a shard.
    """

    def __init__(
        self, folder: RenderFolder, scene: Scene, plan: RenderPlan, latents: Sequence[NDArray[np.float32]]
    ) -> None:
        self.folder, self.scene, self.plan, self._latents = folder, scene, plan, latents
        self.target, self.work = folder.root / plan.split, folder.work(plan.split)
        self.jobs = [ShardJob.of(plan, k, self.target, self.work) for k in range(plan.shards)]

    @classmethod
    def begin(
        cls, folder: RenderFolder, scene: Scene, plan: RenderPlan, given: NDArray[np.float32] | None
    ) -> SplitWork:
        """Everything that workers and later calls need, on disk before the first picture."""
        folder.save_plan(plan)
        save_scene(folder.root, scene)
        (folder.root / plan.split).mkdir(exist_ok=True)
        return cls(folder, scene, plan, write_latents(folder.work(plan.split), plan, scene.spec, given))

    @classmethod
    def open(cls, folder: RenderFolder, split: str) -> SplitWork:
        """A split that has been begun.

        Raises:
            DatasetError: no such split is in progress there, or what was prepared for it is damaged.
        """
        plan = folder.saved_plans(RenderPlan).get(split)
        if plan is None:
            raise DatasetError(
                f"{folder.root}: no render of split {split} is in progress there; begin one with "
                "`ident3d render OUT --samples N`"
            )
        again = "run the first command again, which puts it in order"
        latents = []
        for name in latent_files(plan):
            path = folder.work(split) / name
            try:
                rows = read_npy(path, mapped=True)
            except (OSError, ValueError) as error:
                raise DatasetError(f"{path}: missing or damaged ({error}); {again}") from None
            if rows.shape[0] != plan.samples:
                raise DatasetError(f"{path}: holds {rows.shape[0]} rows, expected {plan.samples}; {again}")
            latents.append(rows)
        scene = load_scene(folder.root / "scene" / "scene.toml")
        if scene.digest != plan.scene_digest:
            raise DatasetError(f"{folder.root}/scene: not the scene of the plan; {again}")
        return cls(folder, scene, plan, latents)

    def summary(self, job: ShardJob, *, quick: bool = False) -> ShardSummary | None:
        """What is known of a shard that is in place, or None where it must be rendered. All of it is read; if `quick`,
        what was noted when it was written is believed, where its size is the same."""
        latents = stored_rows(self._latents, job.start, job.stop)
        return finished_summary(job, latents, self.plan.resolution, quick=quick)

    def unfinished(self, shards: Iterable[int] | None = None) -> list[ShardJob]:
        """The jobs, of all shards or of some, that are not in place."""
        chosen = self.jobs if shards is None else [self.jobs[k] for k in shards]
        with ThreadPoolExecutor(cores()) as pool:
            there = list(pool.map(lambda job: self.summary(job) is not None, chosen))
        return [job for job, whole in zip(chosen, there, strict=True) if not whole]

    def missing(self) -> list[int]:
        """The shards that are not there, by their names alone."""
        return missing_shards(self.plan, self.folder.root)

    def crew(self, options: CrewOptions, keep_open: tuple[int, ...], name: str) -> Crew:
        """Workers of this machine for this split, of the device that its plan names.

        Args:
            options: what they are told; of another device only where they name one.
            keep_open: file descriptors that they inherit.
            name: what the names of their logs begin with.

        Raises:
            SpecError: another device or version of Blender than the plan's.
        """
        if options.device == "auto":
            options = dataclasses.replace(options, device=self.plan.device.lower())
        crew = make_crew(options, self.plan, self.scene, self.folder, keep_open, name)
        wrong = [
            f"{name}: {there} there, {here} here"
            for name, there, here in (
                ("device", self.plan.device, crew.first.device),
                ("blender", self.plan.blender, crew.first.blender),
            )
            if there != here
        ]
        if wrong:
            crew.close()
            raise SpecError(f"{self.folder.root}: its pictures are rendered otherwise:\n  " + "\n  ".join(wrong))
        self.note_gpu(crew.first.model)
        return crew

    def note_gpu(self, model: str) -> None:
        """Note that a GPU of this model renders here, for the manifest."""
        if model:
            folder = gpus_folder(self.work)
            folder.mkdir(exist_ok=True)
            (folder / re.sub(r"[^\w .()-]", "_", model)).touch()

    def run(
        self, todo: Sequence[ShardJob], executor: Executor, progress: Progress, *, record: bool = True
    ) -> list[Failure]:
        """Run shards that are not in place; returns what failed.

        Args:
            todo: their jobs.
            executor: what renders them.
            progress: told of each picture.
            record: write the shards' states; not where those that render them do.
        """
        recorder = Recorder(self.work, self.jobs) if record else None

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "note":
                progress.note(event["text"])
            elif event["event"] == "picture":
                place = event["index"] - self.jobs[event["shard"]].start
                progress.picture(event["shard"], place, kept=event["kept"])
            if recorder is not None:
                recorder.event(event)

        def on_outcome(outcome: Outcome) -> None:
            if recorder is not None:
                recorder.outcome(outcome)

        try:
            return run_shards(executor, todo, on_event, on_outcome)
        finally:
            if recorder is not None:
                recorder.close()

    def progress(self, todo: Sequence[ShardJob], among: Sequence[ShardJob], *, quiet: bool) -> Progress:
        """A progress bar over some shards, of which `todo` are not in place."""
        total = sum(job.stop - job.start for job in among)
        stored = total - sum(job.stop - job.start for job in todo)
        return Progress(total, stored, "pairs" if self.plan.pairs else "pictures", quiet=quiet)

    @contextmanager
    def hold(self, shards: Sequence[int], wait: float = LOCK_SECONDS) -> Iterator[tuple[int, ...]]:
        """Hold some shards against others that render parts of the same split; gives the locks' descriptors.

        Raises:
            BusyError: another process renders one of them.
            SpecError: more shards than this process may have files open.
        """
        allow_files(len(shards) + OTHER_FILES)
        locks = states_folder(self.work)
        locks.mkdir(exist_ok=True)
        with ExitStack() as stack:
            held = []
            for shard in shards:
                busy = f"{self.folder.root}: shard {shard} is being rendered by another process ({{process}})"
                held.append(stack.enter_context(file_lock(locks / f"{shard:06d}.lock", busy, wait=wait)))
            yield tuple(held)

    def finish(self, *, quick: bool = False) -> Manifest:
        """Write all that makes the finished shards a dataset, the manifest last.

        Args:
            quick: do not read the shards again.

        Raises:
            DatasetError: shards that are not there, or damaged.
        """
        missing = self.missing()
        if missing:
            raise self._unfinished(missing)
        return finish_split(self.folder, self.scene, self.plan, self._summaries(quick))

    def _summaries(self, quick: bool) -> Iterator[ShardSummary]:
        """The summaries of all shards, in order, some at a time: those of a large split are larger than memory.

        What was noted of a shard that is damaged is deleted, so that others who go by names render it again.
        """
        threads, damaged = cores(), []
        with ThreadPoolExecutor(threads) as pool:  # hashing releases the interpreter lock
            for first in range(0, len(self.jobs), 4 * threads):
                some = self.jobs[first : first + 4 * threads]
                found = pool.map(lambda job: self.summary(job, quick=quick), some)
                for job, summary in zip(some, found, strict=True):
                    if summary is None:
                        Path(job.sidecar).unlink(missing_ok=True)
                        damaged.append(job.shard)
                    elif not damaged:
                        yield summary
        if damaged:
            raise self._unfinished(damaged)

    def _unfinished(self, shards: list[int]) -> DatasetError:
        root, split = self.folder.root, self.plan.split
        option = "" if split == "train" else f" --split {split}"
        return DatasetError(
            f"{root}: {len(shards)} of {self.plan.shards} shards of split {split} are missing or damaged; run the same "
            f"command again, or: ident3d render {root}{option} --shards {ranges(shards)}"
        )


def missing_shards(plan: RenderPlan, root: Path) -> list[int]:
    """The shards of a split in progress that are not there, by the names of the files alone."""
    target, work = root / plan.split, root / RenderFolder.HIDDEN / plan.split
    there = {entry.name for folder in (target, work) if folder.is_dir() for entry in os.scandir(folder)}
    missing = []
    for shard in range(plan.shards):
        name = shard_name(plan.split, shard)
        if name not in there or sidecar_name(name) not in there:
            missing.append(shard)
    return missing


def make_crew(
    options: CrewOptions,
    plan: RenderPlan,
    scene: Scene,
    folder: RenderFolder,
    keep_open: tuple[int, ...],
    name: str = "",
) -> Crew:
    """Workers for a plan, whose device may not be known yet."""
    return Crew(options, plan, scene.text, scene.mesh_path, folder.logs, name or f"{plan.split}-worker", keep_open)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as a short text, such as `3-7,12`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)

"""`ident3d render`: from options to a finished dataset, or to a folder that the same command finishes later."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from tyro.conf import FlagCreatePairsOff, Positional, arg

from ident3d.errors import DatasetError, RenderError, SpecError
from ident3d.files import array_sha256
from ident3d.render.executors import run_local
from ident3d.render.finish import finish_split, finished_summary, save_scene
from ident3d.render.folder import RenderFolder
from ident3d.render.latents import DRAWN, load_user_latents, pair_law, stored_rows, write_latents
from ident3d.render.plan import RenderPlan, ShardJob, auto_shard_size
from ident3d.render.process import WorkerProcess, blender_python
from ident3d.render.progress import Progress
from ident3d.render.quality import quality
from ident3d.render.worker import Setup
from ident3d.scenes import Scene, load_scene
from ident3d.schema import to_plain
from ident3d.shards.manifest import Manifest
from ident3d.shards.summary import ShardSummary
from ident3d.workers import cores, count_workers

__all__ = ["Interrupted", "RenderOptions", "render_dataset"]

DEVICE_NAMES = ("auto", "cpu", "optix", "cuda", "hip", "metal", "oneapi")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a render; its text says what is stored and how to go on."""


@dataclass(frozen=True)
class RenderOptions:
    """What to render, and how. Checked when made, so that a mistake costs no rendering.

    Attributes:
        out: the dataset's folder: new, empty, or one that this render began.
        scene: a bundled scene's name, or the path of a .toml.
        split: train, val or test.
        samples: pictures; may be omitted with `latents`.
        seed: what latents and Cycles seeds are drawn from, 0 or more.
        resolution: side in pixels, 8 to 4096.
        quality: draft, standard or paper (512 samples, as published).
        workers: processes, or `auto`: one a core, or one a GPU.
        device: auto, cpu, optix, cuda, hip, metal or oneapi.
        shard_size: samples a shard; by default 1,000, fewer for small splits.
        latents: a .npy of your own latents, (N, 10) in the unit cube, in place of drawn ones.
        pairs: render a positive pair a sample: a second picture, of a z~ drawn around z from this conditional, e.g.
            laplace(scale=0.05), normal(scale=0.05), gennorm(scale=0.05, beta=3), share(object_hue) or change(k=1).
        blender_python: an interpreter that has bpy, numpy and Pillow, if not this one.
        quiet: no progress bar.
    """

    out: Positional[Annotated[Path, arg(metavar="OUT")]]
    samples: Annotated[int | None, arg(metavar="N")] = None
    scene: str = "3dident"
    split: str = "train"
    seed: int = 0
    resolution: int = 224
    quality: str = "standard"
    workers: Annotated[str | int, arg(metavar="auto|N")] = "auto"
    device: str = "auto"
    shard_size: Annotated[int | None, arg(metavar="N")] = None
    latents: Annotated[Path | None, arg(metavar="FILE.npy")] = None
    pairs: Annotated[str | None, arg(metavar="CONDITIONAL")] = None
    blender_python: Annotated[str | None, arg(metavar="PATH")] = None
    quiet: FlagCreatePairsOff[bool] = False

    def __post_init__(self) -> None:
        if self.device not in DEVICE_NAMES:
            raise SpecError(f"device {self.device!r}: expected one of {', '.join(DEVICE_NAMES)}")
        count_workers(self.workers)
        # Texts will do for paths, from Python too.
        object.__setattr__(self, "out", Path(self.out))
        if self.latents is not None:
            object.__setattr__(self, "latents", Path(self.latents))
        if self.samples is None and self.latents is None:
            raise SpecError("samples: missing; say how many pictures, or give latents")

    def plan(self, scene: Scene, latents: NDArray[np.float32] | None) -> RenderPlan:
        """The plan that these options ask for; device and Blender's version are not known yet.

        Raises:
            SpecError: a value out of range.
        """
        samples = self.samples if latents is None else len(latents)
        assert samples is not None
        if self.samples not in (None, samples):
            raise SpecError(
                f"samples = {self.samples}, but {self.latents} holds {samples} latents; give one of the two"
            )
        return RenderPlan(
            scene=scene.spec.name,
            scene_digest=scene.digest,
            split=self.split,
            samples=samples,
            seed=self.seed,
            latents=DRAWN if latents is None else array_sha256(latents),
            resolution=self.resolution,
            quality=self.quality,
            settings=quality(self.quality),
            shard_size=auto_shard_size(samples) if self.shard_size is None else self.shard_size,
            device="",
            blender="",
            pairs="" if self.pairs is None else pair_law(self.pairs, scene.spec).text,
        )


def least_bytes(plan: RenderPlan) -> int:
    """What a sample takes on disk at the very least: for each picture two tar headers, the latents, a quarter byte a
    pixel."""
    return (3 * 512 + plan.resolution**2 // 4) * (2 if plan.pairs else 1)


def render_dataset(options: RenderOptions) -> Manifest:
    """Render one split into a dataset, going on where an earlier call with the same options stopped.

    Returns:
        The dataset's manifest, when every sample of the split is in place.

    Raises:
        SpecError: options that cannot be, or that differ from what the folder was begun with.
        DatasetError: a folder that is something else or cannot be written.
        BusyError: another render is at work there.
        RenderError: Blender is absent or failed, or the disk is full. What is finished stays.
        Interrupted: Ctrl-C. What is finished stays.
    """
    scene = load_scene(options.scene)
    given = None if options.latents is None else load_user_latents(options.latents, scene.spec)
    plan = options.plan(scene, given)
    python = blender_python(options.blender_python)
    folder = RenderFolder(options.out)
    folder.check(plan, ignore=("device", "blender"))
    manifest = _already_done(folder, plan)
    if manifest is not None:
        return manifest
    folder.create()
    with folder.lock() as lock, folder.disk_errors():
        return _Render(options, scene, plan, given, folder, python, lock).run()


def _already_done(folder: RenderFolder, plan: RenderPlan) -> Manifest | None:
    manifest = folder.manifest()
    if manifest is None or plan.split not in manifest.splits:
        return None
    for shard in manifest.splits[plan.split].shards:
        path = folder.root / plan.split / shard.name
        if not path.is_file() or path.stat().st_size != shard.bytes:
            raise DatasetError(f"{path}: missing or of another size; run: ident3d verify {folder.root} --repair")
    return manifest


class _Render:
    """One call of `render_dataset`, past the checks and under the lock."""

    def __init__(
        self,
        options: RenderOptions,
        scene: Scene,
        plan: RenderPlan,
        given: NDArray[np.float32] | None,
        folder: RenderFolder,
        python: str,
        lock: int,
    ) -> None:
        self.options, self.scene, self.plan, self.given = options, scene, plan, given
        self.folder, self.python, self.lock = folder, python, lock
        self.workers = count_workers(options.workers) or cores()
        self.setup = Setup(
            scene=scene.text,
            mesh=str(scene.mesh_path),
            settings=to_plain(plan.settings),
            resolution=plan.resolution,
            device=options.device,
            threads=max(1, cores() // self.workers),
        )

    def spawn(self, number: int) -> WorkerProcess:
        log = self.folder.logs / f"{self.plan.split}-worker-{number}.log"
        return WorkerProcess(self.python, dataclasses.replace(self.setup, gpu=number), log, (self.lock,))

    def run(self) -> Manifest:
        self.check_disk()
        first = self.spawn(0)
        try:
            self.plan = dataclasses.replace(self.plan, device=first.device, blender=first.blender)
            self.folder.check(self.plan)
            if first.gpus and count_workers(self.options.workers) is None:
                self.workers = first.gpus
            jobs = self.prepare()
            self.render(jobs, first)
        finally:
            first.kill()
        summaries = [self.summary(job) for job in jobs]
        missing = [job.path for job, summary in zip(jobs, summaries, strict=True) if summary is None]
        if missing:
            raise RenderError(f"{missing[0]}: damaged since it was written; run the same command to render it again")
        whole = [summary for summary in summaries if summary is not None]
        return finish_split(self.folder, self.scene, self.plan, whole)

    def prepare(self) -> list[ShardJob]:
        """Everything that workers and later calls need, on disk before the first picture."""
        self.folder.save_plan(self.plan)
        save_scene(self.folder.root, self.scene)
        target, work = self.folder.root / self.plan.split, self.folder.work(self.plan.split)
        target.mkdir(exist_ok=True)
        self.latents = write_latents(work, self.plan, self.scene.spec, self.given)
        return [ShardJob.of(self.plan, k, target, work) for k in range(self.plan.shards)]

    def check_disk(self) -> None:
        """Refuse what cannot fit, rather than find out after days."""
        there = sum(p.stat().st_size for p in self.folder.root.glob(f"{self.plan.split}/*") if p.is_file())
        need = self.plan.samples * least_bytes(self.plan) - there
        free = shutil.disk_usage(self.folder.root).free
        if need > free:
            raise RenderError(
                f"{self.folder.root}: {self.plan.samples:,} samples need at least {need / 1e9:,.2f} GB more, "
                f"{free / 1e9:,.2f} GB are free; make room or render fewer"
            )

    def summary(self, job: ShardJob) -> ShardSummary | None:
        return finished_summary(job, stored_rows(self.latents, job.start, job.stop), self.plan.resolution)

    def render(self, jobs: list[ShardJob], first: WorkerProcess) -> None:
        """Render every shard that is not in place yet, with a progress bar."""
        todo = [job for job in jobs if self.summary(job) is None]
        stored = self.plan.samples - sum(job.stop - job.start for job in todo)
        unit = "pairs" if self.plan.pairs else "pictures"
        with Progress(self.plan.samples, stored, unit, quiet=self.options.quiet) as progress:

            def on_event(event: dict[str, Any]) -> None:
                if event["event"] == "picture":
                    start = jobs[event["shard"]].start
                    progress.picture(event["shard"], event["index"] - start, kept=event["kept"])

            try:
                failures = run_local(todo, self.workers, first, self.spawn, on_event)
            except KeyboardInterrupt:
                raise Interrupted(
                    f"interrupted: {progress.done} of {self.plan.samples} {unit} are stored in {self.folder.root}; "
                    "run the same command to go on"
                ) from None
        if failures:
            lines = [f"sample {f.sample} of shard {f.shard}: {f.message}" for f in failures]
            raise RenderError("Blender crashed twice on the same sample; all others are stored:\n" + "\n".join(lines))

"""What a user asks of a render: which pictures, by which workers, through which executor."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from ident3d.errors import SpecError
from ident3d.files import array_sha256
from ident3d.render.crew import RECYCLE, CrewOptions
from ident3d.render.latents import DRAWN, pair_law
from ident3d.render.plan import RenderPlan, auto_shard_size
from ident3d.render.quality import quality
from ident3d.scenes import Scene

__all__ = ["EXECUTORS", "RenderOptions", "SlurmOptions", "parse_shards"]

EXECUTORS = ("local", "slurm")

LEAST_MEMORY = 0.5
"""Gigabytes that a worker needs in a job: Blender holds some 0.3."""

OURS = {"job-name", "array", "output", "error", "open-mode", "signal", "requeue", "no-requeue"}
OURS |= {"time", "cpus-per-task", "mem", "partition", "account", "qos", "constraint"}
"""Options of sbatch that ident3d sets: others there would be lost, or jobs would not be found again."""

Lines = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")]


@dataclass(frozen=True)
class SlurmOptions:
    """What Slurm is asked for, with `--executor slurm`; what is left out is the cluster's default.

    Attributes:
        partition: (slurm) where jobs go.
        time: (slurm) minutes that a job may take. One that needs longer is requeued and goes on where it stopped.
        cpus: (slurm) cores a job, which renders as many shards at a time; with GPUs, their helpers.
        gpus: (slurm) GPUs a job, one shard at a time each; they need `--device optix` or another that the nodes have.
        mem: (slurm) gigabytes a job.
        max_jobs: (slurm) how many jobs of one submission may run at a time.
        job_shards: (slurm) shards a job; by default one a worker, and more where that would make over 1,000 jobs.
        account: (slurm) whom the time is charged to.
        qos: (slurm) quality of service.
        constraint: (slurm) features that nodes must have.
        sbatch: (slurm) KEY or KEY=VALUE, any other option of sbatch, such as exclusive or gres=gpu:a100:2 (then --gpus
            says just how many workers a job has); may be given several times.
        setup: (slurm) a line of shell before the job's own, such as `module load X` or `export A=B`; may be given
            several times.
        srun: (slurm) an argument of srun, such as --container-image=FILE.sqsh; may be given several times.
        node_python: (slurm) the command that starts Python on a node, where it is not this one; e.g. `apptainer exec
            image.sif python`.
    """

    partition: Annotated[str | None, arg(metavar="NAME")] = None
    time: Annotated[int, arg(metavar="MINUTES")] = 60
    cpus: int = 4
    gpus: int = 0
    mem: Annotated[float | None, arg(metavar="GB")] = None
    max_jobs: int = 50
    job_shards: Annotated[int | None, arg(metavar="N")] = None
    account: Annotated[str | None, arg(metavar="NAME")] = None
    qos: Annotated[str | None, arg(metavar="NAME")] = None
    constraint: Annotated[str | None, arg(metavar="TEXT")] = None
    sbatch: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY[=VALUE]")] = ()
    setup: Lines = ()
    srun: Lines = ()
    node_python: Annotated[str | None, arg(metavar="COMMAND")] = None

    def __post_init__(self) -> None:
        for name, least in (("time", 1), ("cpus", 1), ("gpus", 0), ("max_jobs", 1), ("job_shards", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value <= 10**6:
                raise SpecError(f"{name.replace('_', '-')} = {value}: expected {least} or more")
        if self.mem is not None and not 0 < self.mem < 1e6:
            raise SpecError(f"mem = {self.mem}: expected gigabytes")
        if self.mem is not None and self.mem / self.workers < LEAST_MEMORY:
            raise SpecError(
                f"mem = {self.mem}: each of a job's {self.workers} workers would get {self.mem / self.workers:.2g} GB, "
                f"expected {LEAST_MEMORY} or more; ask for more memory, or for fewer cores or GPUs"
            )
        for text in self.sbatch:
            if not re.fullmatch(r"[a-z][a-z0-9-]*(=.*)?", text):
                raise SpecError(
                    f"sbatch {text!r}: expected an option of sbatch as key or key=value, such as exclusive or nice=100"
                )
            if text.split("=")[0] in OURS:
                raise SpecError(f"sbatch {text!r}: set by ident3d; use its own option where there is one")
        for text in (*self.setup, *self.srun):
            if "\n" in text:
                raise SpecError(f"{text!r}: expected one line")

    @property
    def workers(self) -> int:
        """Workers a job."""
        return self.gpus or self.cpus

    @property
    def sbatch_options(self) -> dict[str, str | bool]:
        """What `sbatch` asks for, by option: True where it has no value."""
        split = [text.partition("=") for text in self.sbatch]
        return {key: value if equals else True for key, equals, value in split}

    @property
    def gpus_per_node(self) -> int | None:
        """The GPUs to ask for, or nothing where there are none or `sbatch` asks for them, by their kind say."""
        given = self.sbatch_options
        theirs = "gpus" in given or "gpus-per-node" in given or "gpu" in str(given.get("gres", ""))
        return None if theirs else self.gpus or None


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
        shards: just these, e.g. 3-7 or 0,4,9-12, and no manifest: `ident3d finalize` writes it when all are there.
            Several such calls may work on one folder at a time. Without `samples`, the plan is the one that is there.
        executor: local, or slurm: jobs of a cluster render, this process looks on.
        slurm: what Slurm is asked for.
        picture_seconds: a worker that takes longer for one sample is replaced; by default some 20 times what it should.
        recycle: pictures after which a worker is replaced, 0 for never.
        worker_memory: gigabytes that a worker may come to hold before it is replaced; by default its share.
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
    shards: Annotated[str | None, arg(metavar="A-B,C")] = None
    executor: str = "local"
    slurm: Annotated[SlurmOptions, arg(name="", prefix_name=False)] = field(default_factory=SlurmOptions)
    picture_seconds: Annotated[float | None, arg(metavar="SECONDS")] = None
    recycle: Annotated[int, arg(metavar="PICTURES")] = RECYCLE
    worker_memory: Annotated[float | None, arg(metavar="GB")] = None

    def __post_init__(self) -> None:
        self.crew()
        if self.executor not in EXECUTORS:
            raise SpecError(f"executor {self.executor!r}: expected one of {', '.join(EXECUTORS)}")
        if self.shards is not None:
            parse_shards(self.shards)
        if self.executor == "slurm":
            self._check_slurm()
        elif self.slurm != SlurmOptions():
            wrong = [f.name for f in fields(SlurmOptions) if getattr(self.slurm, f.name) != f.default]
            raise SpecError(f"{', '.join(wrong).replace('_', '-')}: only with --executor slurm")
        # Texts will do for paths, from Python too.
        object.__setattr__(self, "out", Path(self.out))
        if self.latents is not None:
            object.__setattr__(self, "latents", Path(self.latents))
        if self.samples is None and self.latents is None:
            self.check_planned()

    def _check_slurm(self) -> None:
        if self.shards is not None:
            raise SpecError("shards, executor: --shards renders here; leave out one of the two")
        if self.workers != "auto":
            raise SpecError(
                f"workers = {self.workers}: with --executor slurm a job has one a core or GPU; use --cpus or --gpus"
            )
        if self.slurm.gpus and self.device in ("auto", "cpu"):
            raise SpecError(
                f"gpus = {self.slurm.gpus}, device {self.device!r}: name what the nodes have, e.g. --device optix, "
                "since this machine cannot tell"
            )
        if not self.slurm.gpus and self.device not in ("auto", "cpu"):
            raise SpecError(f"device {self.device!r}: jobs without --gpus have none; add --gpus, or leave out --device")

    def check_planned(self) -> None:
        """Refuse to go by the plan that a folder holds where something else is asked for besides.

        Raises:
            SpecError: samples are missing; options that only a new plan could heed.
        """
        if self.shards is None:
            raise SpecError("samples: missing; say how many pictures, or give latents")
        free = ("scene", "seed", "resolution", "quality", "shard_size", "pairs")
        for option in fields(RenderOptions):
            if option.name in free and getattr(self, option.name) != option.default:
                name, value = option.name.replace("_", "-"), getattr(self, option.name)
                raise SpecError(f"{name} = {value}: the folder's plan decides it; leave it out, or give --samples too")

    def crew(self) -> CrewOptions:
        """The part of the options that workers are started by."""
        return CrewOptions(**{f.name: getattr(self, f.name) for f in fields(CrewOptions) if hasattr(self, f.name)})

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


def parse_shards(text: str, count: int | None = None) -> list[int]:
    """The numbers in a text such as `3-7` or `0,4,9-12`, ascending.

    Args:
        text: numbers and ranges of them, both ends included.
        count: how many shards there are, where that is known.

    Raises:
        SpecError: something else, or a shard that is not there.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise SpecError(f"shards {text!r}: expected numbers and ranges, such as 3-7 or 0,4,9-12")
        first, last = int(match[1]), int(match[2] or match[1])
        if count is not None and last >= count:
            raise SpecError(f"shards {text!r}: the split has shards 0 to {count - 1}")
        found.update(range(first, last + 1) if count is not None else (first, last))
    return sorted(found)

"""The worker processes of one machine: how many, of which interpreter and device, and when each is replaced."""

from __future__ import annotations

import dataclasses
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from ident3d.errors import SpecError
from ident3d.render.local import LocalExecutor
from ident3d.render.plan import RenderPlan
from ident3d.render.process import WorkerProcess, blender_python
from ident3d.render.worker import Setup
from ident3d.schema import to_plain
from ident3d.workers import cores, count_workers

__all__ = ["Crew", "CrewOptions"]

DEVICE_NAMES = ("auto", "cpu", "optix", "cuda", "hip", "metal", "oneapi")

RECYCLE = 10_000
"""Pictures after which a worker is replaced where the user names no number."""


LEAST_MB = 500
"""Megabytes below which no limit makes sense: Blender takes 300 before its first picture."""


@dataclass(frozen=True)
class CrewOptions:
    """What workers are told.

    Attributes:
        workers: processes, or `auto`: one a core, or one a GPU.
        device: auto, cpu, optix, cuda, hip, metal or oneapi.
        blender_python: an interpreter that has bpy, numpy and Pillow; None for this one.
        picture_seconds: a worker that takes longer for one sample is taken to hang and is replaced; None for some 20
            times what a core takes, and five minutes besides.
        recycle: pictures after which a worker is replaced, 0 for never.
        worker_memory: gigabytes that a worker may come to hold before it is replaced; None for its share of the
            machine's memory.
        threads: CPU threads a worker; None for its share of the cores.
    """

    workers: str | int = "auto"
    device: str = "auto"
    blender_python: str | None = None
    picture_seconds: float | None = None
    recycle: int = RECYCLE
    worker_memory: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.device not in DEVICE_NAMES:
            raise SpecError(f"device {self.device!r}: expected one of {', '.join(DEVICE_NAMES)}")
        count_workers(self.workers)
        if self.picture_seconds is not None and not 0 < self.picture_seconds < 1e9:
            raise SpecError(f"picture_seconds = {self.picture_seconds}: expected a number above 0")
        if self.recycle < 0:
            raise SpecError(f"recycle = {self.recycle}: expected 1 or more, or 0 for never")
        if self.worker_memory is not None and not LEAST_MB <= 1000 * self.worker_memory < 1e9:
            raise SpecError(f"worker_memory = {self.worker_memory}: expected gigabytes, at least {LEAST_MB / 1000}")

    def seconds(self, plan: RenderPlan) -> float:
        """The time limit of a sample: a core takes about 1.2 microseconds a pixel and Cycles sample."""
        if self.picture_seconds is not None:
            return self.picture_seconds
        return (300 + 25e-6 * plan.resolution**2 * plan.settings.samples) * (2 if plan.pairs else 1)

    def megabytes(self, workers: int) -> int:
        """The memory that each of so many workers may hold."""
        if self.worker_memory is not None:
            return int(1000 * self.worker_memory)
        share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**6 // workers
        return max(2 * LEAST_MB, share)


class Crew:
    """Starts the workers of a plan. The first shows which device there is, and the others must have the same.

    Args:
        options: what they are told.
        plan: what is rendered.
        scene: the text of the scene's spec.
        mesh: its mesh.
        logs: a folder for what Blender prints.
        name: what the logs' names begin with.
        keep_open: file descriptors that workers inherit, which keeps their locks held while they live.

    Attributes:
        first: the first worker.
        count: how many there are to be.

    Raises:
        RenderError: no such interpreter; Blender is absent or failed at its start.
    """

    def __init__(
        self,
        options: CrewOptions,
        plan: RenderPlan,
        scene: str,
        mesh: Path,
        logs: Path,
        name: str,
        keep_open: tuple[int, ...],
    ) -> None:
        self.python = blender_python(options.blender_python)
        self.logs, self.name, self.keep_open = logs, name, keep_open
        self.seconds = options.seconds(plan)
        wanted = count_workers(options.workers)
        self.count = wanted or cores()
        self.setup = Setup(
            scene=scene,
            mesh=str(mesh),
            settings=to_plain(plan.settings),
            resolution=plan.resolution,
            device=options.device,
            threads=options.threads or max(1, cores() // self.count),
            pictures=options.recycle,
            memory_mb=options.megabytes(self.count),
        )
        self.first = self.spawn(0)
        if self.first.warning:
            warnings.warn(self.first.warning, stacklevel=2)
        if wanted is None and self.first.gpus:
            self.count = self.first.gpus
        self.setup = dataclasses.replace(
            self.setup,
            # A GPU that fails later must not make the others' pictures a CPU's.
            device=self.first.device.lower(),
            threads=options.threads or max(1, cores() // self.count),
            memory_mb=options.megabytes(self.count),
        )

    def spawn(self, number: int) -> WorkerProcess:
        """Start the worker of a number."""
        setup = dataclasses.replace(self.setup, gpu=number)
        return WorkerProcess(self.python, setup, self._log(number), self.keep_open, self.seconds)

    def executor(self) -> LocalExecutor:
        """An executor of this crew, which ends the workers when it is closed."""
        return LocalExecutor(self.count, self.spawn, self.first)

    def remove_logs(self) -> None:
        """Delete what Blender printed: where all went well nobody needs it."""
        for number in range(self.count):
            self._log(number).unlink(missing_ok=True)

    def _log(self, number: int) -> Path:
        return self.logs / f"{self.name}-{number}.log"

    def close(self) -> None:
        """End the first worker, which no executor may have taken."""
        self.first.kill()

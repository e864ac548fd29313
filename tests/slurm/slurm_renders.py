"""Renders through the cluster of these tests, whose workers can be held up, and the same ones without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gated import Gated, Picture, files

from ident3d import RenderOptions, render_dataset
from ident3d.render.folder import RenderFolder
from ident3d.render.plan import RenderPlan
from ident3d.render.slurm_queue import Round, Rounds

# As `ident3d`, with looks at the queue in quick succession; jobs that have nothing left to do may take ENDING seconds.
QUICK = """\
import os, ident3d.render.slurm as s
s.PAUSES, s.ENDING = (0.3,), int(os.environ.get("ENDING", "30"))
from ident3d.cli import main
main()
"""
BLENDER = "blender"


class SlurmRender(Gated):  # type: ignore[misc]
    """A render of shards of 4 samples at 16 px.

    Args:
        cluster: where.
        folder: for all that is written.
        samples: how many.
        worker: `gated`, or `blender` for the real one.
        pairs: as in RenderOptions.
    """

    def __init__(
        self, cluster: Any, folder: Path, samples: int = 16, worker: str = "gated", pairs: str | None = None
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self.process: subprocess.Popen[str] | None = None
        self.root = folder / "d"
        super().__init__(folder / "control", samples)
        python = self.python if worker == "gated" else None
        self.options = RenderOptions(
            self.root, samples, resolution=16, quality="draft", shard_size=4, pairs=pairs, blender_python=python
        )
        self.prefix = Rounds(self.root, self.root, "train").prefix

    @property
    def words(self) -> list[str]:
        """The options of the render, whatever renders it."""
        words = f"--samples {self.options.samples} --resolution 16 --quality draft --shard-size 4".split()
        if self.options.pairs:
            words += ["--pairs", self.options.pairs]
        if self.options.blender_python:
            words += ["--blender-python", self.options.blender_python]
        return words

    def command(self, *options: str) -> list[str]:
        """The command line of the render."""
        return [sys.executable, "-c", QUICK, "render", str(self.root), *self.words, *options]

    def start(self, *options: str, **variables: str) -> subprocess.Popen[str]:
        """Begin it on the cluster: 2 jobs of 1 core at a time, unless options say otherwise."""
        slurm = ["--executor", "slurm", "--cpus", "1", "--time", "5", "--max-jobs", "2"]
        self.process = subprocess.Popen(
            self.command(*slurm, *options),
            env={**self.cluster.environment, **variables},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # A shell starts background jobs with SIGINT ignored, and the tests may run in one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        return self.process

    def run(self, *options: str, status: int = 0, **variables: str) -> str:
        """Run it on the cluster; what it says."""
        return self.end(self.start(*options, **variables), status)

    def end(self, process: subprocess.Popen[str], status: int = 0) -> str:
        """Wait for a process that must end with a status and without a traceback; what it says."""
        said = "".join(process.communicate(timeout=300))
        assert process.returncode == status, said
        assert "Traceback" not in said
        return said

    def here(self, *words: str, status: int = 0) -> str:
        """Run another command of ident3d on the same folder, outside of all jobs; what it says."""
        action, *options = words
        command = [sys.executable, "-m", "ident3d", action, str(self.root), *options]
        done = subprocess.run(command, env=self.cluster.environment, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        assert done.returncode == status, said
        assert "Traceback" not in said
        return said

    def wait_for(self, pictures: int) -> list[Picture]:
        """Wait until so many pictures have been begun."""
        self.wait_until(lambda: len(self.pictures()) >= pictures, f"{pictures} pictures are begun")
        begun: list[Picture] = self.pictures()
        return begun

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait for anything while the render goes on."""

        def happened_yet() -> bool:
            # Asked first: what happened may have ended it.
            ended = self.process is not None and self.process.poll() is not None
            if happened():
                return True
            assert self.process is None or not ended, "".join(self.process.communicate())
            return False

        self.cluster.wait_until(happened_yet, what)

    def close(self) -> None:
        """End what has not ended."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def queue(self) -> dict[str, str]:
        """The state of this render's jobs by id, ended ones included. The cluster has had other tests' too."""
        lines = self.cluster.run("squeue", "--noheader", "--array", "--states=all", "--format=%j|%i|%T").splitlines()
        found = [line.split("|") for line in lines]
        return {job: state for name, job, state in found if name.startswith(self.prefix)}

    def arrays(self) -> set[str]:
        """The numbers of the arrays of this render, ended ones included."""
        return {job.split("_")[0] for job in self.queue()}

    def job_states(self) -> set[str]:
        """The states of this render's jobs, ended ones included."""
        return set(self.queue().values())

    def job_processes(self, job: str) -> list[int]:
        """The processes that submitit runs a job's task in."""
        found = self.cluster.processes(job).items()
        return [pid for pid, command in found if "submitit.core._submit" in command and "srun" not in command]

    def rounds(self) -> list[Round]:
        """What was submitted, in order."""
        return Rounds(self.root / ".render" / "train", self.root, "train").read()

    def plan(self) -> RenderPlan:
        """The plan of the render in progress."""
        return RenderFolder(self.root).plans()["train"]

    def shards(self) -> list[int]:
        """The shards that are in place."""
        return [int(path.stem.removeprefix("train-")) for path in sorted(self.root.glob("train/train-*.tar"))]

    def check(self) -> None:
        """The dataset is whole, and the same byte for byte as one that is rendered here without any trouble."""
        assert "dataset.json" in files(self.root)
        self.here("verify", "--quiet")
        local = self.folder / "local"
        python = Gated(self.folder / "free").python if self.options.blender_python else None
        render_dataset(replace(self.options, out=local, blender_python=python, workers=1, quiet=True))
        assert files(self.root) == files(local)
        assert list((self.root / ".render").glob("train*")) == []

"""Run a render worker without Blender that can be held up: `gated_worker.py CONTROL WORKER.py`.

Pictures are noise, a function of their Cycles seed. Files in the folder CONTROL say what becomes of them:

- `pictures` gets a line when one is begun: its seed, the Slurm job, the process. Each is one write, so that no kill
  takes it back.
- `gate` holds a number: while it is there, each process renders so many pictures and waits at the next.
- `crash`, `fail` and `hang` hold seeds: at those the process aborts, Blender says that it cannot, or nothing happens.
- `stop` holds seeds at which the process is stopped as by SIGSTOP; the first to come to one removes the file.
- `ballast` holds the megabytes of memory that a picture leaves behind.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTROL, WORKER = Path(sys.argv[1]), sys.argv[2]
LOG = os.open(CONTROL / "pictures", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
JOB = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ.get("SLURM_JOB_ID", "none"))
TASK = os.environ.get("SLURM_ARRAY_TASK_ID", "none")


def numbers(name: str) -> list[int]:
    """What a file of the folder says; nothing where it is absent."""
    try:
        return [int(word) for word in (CONTROL / name).read_text().split()]
    except FileNotFoundError:
        return []


class Renderer:
    """In place of Blender's."""

    device, gpus, model, warning = "CPU", 0, "", ""

    def __init__(self, spec: object, mesh: Path, settings: object, resolution: int, *_: object, **__: object) -> None:
        self.resolution, self.begun = resolution, 0
        self.ballast: list[bytes] = []

    def render(self, params: object, seed: int) -> NDArray[np.uint8]:
        """A picture's noise, when the files allow it."""
        os.write(LOG, f"{seed} {JOB}_{TASK} {os.getpid()}\n".encode())
        while (gate := numbers("gate")) and self.begun >= gate[0]:
            time.sleep(0.02)
        self.begun += 1
        if seed in numbers("crash"):
            os.abort()
        if seed in numbers("fail"):
            raise RuntimeError("Error: Out of memory in CUDA queue")
        while seed in numbers("hang"):
            signal.pause()
        if seed in numbers("stop"):
            (CONTROL / "stop").unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        self.ballast += [b"x" * (megabytes * 10**6) for megabytes in numbers("ballast")]
        return np.random.default_rng(seed).integers(0, 256, (self.resolution, self.resolution, 3), np.uint8)


def main() -> None:
    """Run the worker."""
    blender: Any = types.ModuleType("ident3d.render.blender")
    blender.Renderer = Renderer
    bpy: Any = types.ModuleType("bpy")
    bpy.app = types.SimpleNamespace(version_string="0.0.0 (stand-in)", tempdir=str(CONTROL / "no-tempdir"))
    sys.modules |= {"bpy": bpy, blender.__name__: blender}
    sys.argv = [WORKER]
    sys.path[0] = str(Path(WORKER).parent)
    runpy.run_path(WORKER, run_name="__main__")


if __name__ == "__main__":
    main()

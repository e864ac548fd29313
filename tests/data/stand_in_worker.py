"""Run a render worker without Blender, whose pictures are noise: `stand_in_worker.py WORKER.py`.

A picture is a function of its Cycles seed, of what it shows and of STAND_IN_MACHINE (another machine renders other
bytes). With STAND_IN_LOG, each picture is a line in that file. With STAND_IN_STRIKE, as JSON `[step, kind, report]`,
the first worker that comes to it is struck: see `strikes.py`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from strikes import Strike  # type: ignore[import-not-found]

MACHINE = int(os.environ.get("STAND_IN_MACHINE", "0"))
LOG = os.environ.get("STAND_IN_LOG")
append = open  # before it is counted


class Renderer:
    """In place of Blender's."""

    device, gpus, model, warning = "CPU", 0, "", ""

    def __init__(self, spec: object, mesh: Path, settings: object, resolution: int, *_: object, **__: object) -> None:
        self.resolution = resolution

    def render(self, params: object, seed: int) -> NDArray[np.uint8]:
        """A picture's noise."""
        if LOG:
            with append(LOG, "a") as log:
                log.write(f"{seed}\n")
        key = [seed, zlib.crc32(repr(params).encode()), MACHINE]
        return np.random.default_rng(key).integers(0, 256, (self.resolution, self.resolution, 3), np.uint8)


class App:
    """In place of `bpy.app`."""

    tempdir = "/nowhere/of/the/stand-in"

    @property
    def version_string(self) -> str:
        """Blender's version. A worker tells it when it is ready: from then on its changes are counted."""
        if "STAND_IN_STRIKE" in os.environ:
            step, kind, report = json.loads(os.environ["STAND_IN_STRIKE"])
            if not Path(f"{report}.armed").exists():
                Path(f"{report}.armed").touch()
                Strike(step, kind, Path(report)).arm()
        return "0.0.0 (stand-in)"


def main() -> None:
    """Run the worker."""
    worker = sys.argv[1]
    blender: Any = types.ModuleType("ident3d.render.blender")
    blender.Renderer = Renderer
    bpy: Any = types.ModuleType("bpy")
    bpy.app = App()
    sys.modules |= {"bpy": bpy, blender.__name__: blender}
    sys.argv = [worker]
    sys.path[0] = str(Path(worker).parent)
    runpy.run_path(worker, run_name="__main__")


if __name__ == "__main__":
    main()

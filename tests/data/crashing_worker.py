"""Run a render worker whose Blender aborts on one Cycles seed: `crashing_worker.py SEED WORKER.py`."""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SEED, WORKER = int(sys.argv[1]), sys.argv[2]


class Finder:
    """Patches the renderer as it is imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name != "ident3d.render.blender":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def patched(module: ModuleType) -> None:
            execute(module)
            render = module.Renderer.render
            module.Renderer.render = lambda self, p, seed: os.abort() if seed == SEED else render(self, p, seed)

        spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder)
sys.argv = [WORKER]
sys.path.insert(0, str(Path(WORKER).parent))
runpy.run_path(WORKER, run_name="__main__")

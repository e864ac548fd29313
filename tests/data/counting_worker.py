"""Run a render worker that counts its pictures: `counting_worker.py LOG WORKER.py`.

LOG gets a line with the Cycles seed when a picture is begun. The line is one write, so that no kill takes it back.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

LOG, WORKER = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), sys.argv[2]


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

            def counted(self: object, params: object, seed: int) -> Any:
                os.write(LOG, f"{seed}\n".encode())
                return render(self, params, seed)

            module.Renderer.render = counted

        spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder)
sys.argv = [WORKER]
sys.path.insert(0, str(Path(WORKER).parent))
runpy.run_path(WORKER, run_name="__main__")

"""ident3d: image datasets whose generating factors are known exactly.

The public names load when first used, so that `import ident3d` costs nothing and pulls in neither torch nor bpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ident3d._version import __version__

if TYPE_CHECKING:
    from ident3d.datasets.ident3d import Ident3D
    from ident3d.datasets.streaming import Ident3DStream
    from ident3d.errors import BusyError, DatasetError, Ident3DError, RenderError, SpecError
    from ident3d.factors import FACTORS, Factor, Factors
    from ident3d.render.dataset import RenderOptions, render_dataset
    from ident3d.render.pictures import render_latents
    from ident3d.scene import SceneParams, SceneSpec, scene_params
    from ident3d.scenes import bundled_scenes, load_scene

__all__ = [
    "__version__",
    "bundled_scenes",
    "BusyError",
    "DatasetError",
    "Factor",
    "FACTORS",
    "Factors",
    "Ident3D",
    "Ident3DError",
    "Ident3DStream",
    "load_scene",
    "render_dataset",
    "render_latents",
    "RenderError",
    "RenderOptions",
    "scene_params",
    "SceneParams",
    "SceneSpec",
    "SpecError",
]

_HOMES = {
    "datasets.ident3d": ("Ident3D",),
    "datasets.streaming": ("Ident3DStream",),
    "errors": ("BusyError", "DatasetError", "Ident3DError", "RenderError", "SpecError"),
    "factors": ("FACTORS", "Factor", "Factors"),
    "render.dataset": ("RenderOptions", "render_dataset"),
    "render.pictures": ("render_latents",),
    "scene": ("SceneParams", "SceneSpec", "scene_params"),
    "scenes": ("bundled_scenes", "load_scene"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"ident3d.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ident3d' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

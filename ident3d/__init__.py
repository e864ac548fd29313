"""ident3d: image datasets whose generating factors are known exactly.

The public names load when first used, so that `import ident3d` costs nothing and pulls in neither torch nor bpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ident3d._version import __version__

if TYPE_CHECKING:
    from ident3d.conditionals import Change, Joint, Share, conditional
    from ident3d.conversion.dataset import convert
    from ident3d.conversion.options import ConvertOptions
    from ident3d.datasets.download import download
    from ident3d.datasets.ident3d import Ident3D
    from ident3d.datasets.kitti_masks import KittiMasks
    from ident3d.datasets.pair_loader import pair_loader
    from ident3d.datasets.pair_report import PairReport, pair_report
    from ident3d.datasets.pairs import PairSampler
    from ident3d.datasets.published import Causal3DIdent, Multimodal3DIdent, TemporalCausal3DIdent, ThreeDIdent
    from ident3d.datasets.streaming import Ident3DStream
    from ident3d.datasets.views import simclr
    from ident3d.distributions import Distribution, GeneralizedNormal, Laplace, Normal, Uniform
    from ident3d.errors import (
        BusyError,
        DatasetError,
        DownloadError,
        Ident3DError,
        RenderError,
        SpecError,
        TrainingError,
    )
    from ident3d.factors import FACTORS, Categorical, Factor, Factors, FactorTable
    from ident3d.hub import pull, push
    from ident3d.metrics import dci, mcc, r2
    from ident3d.render.dataset import finalize, render_dataset, render_part
    from ident3d.render.options import RenderOptions, SlurmOptions
    from ident3d.render.pictures import render_latents
    from ident3d.scene import SceneParams, SceneSpec, scene_params
    from ident3d.scenes import bundled_scenes, load_scene
    from ident3d.spaces import Box, Product, Real, Space, Sphere
    from ident3d.von_mises_fisher import VonMisesFisher

__all__ = [
    "__version__",
    "Box",
    "bundled_scenes",
    "BusyError",
    "Categorical",
    "Causal3DIdent",
    "Change",
    "conditional",
    "convert",
    "ConvertOptions",
    "DatasetError",
    "dci",
    "Distribution",
    "download",
    "DownloadError",
    "Factor",
    "FACTORS",
    "Factors",
    "FactorTable",
    "finalize",
    "GeneralizedNormal",
    "Ident3D",
    "Ident3DError",
    "Ident3DStream",
    "Joint",
    "KittiMasks",
    "Laplace",
    "load_scene",
    "mcc",
    "Multimodal3DIdent",
    "Normal",
    "pair_loader",
    "pair_report",
    "PairReport",
    "PairSampler",
    "Product",
    "pull",
    "push",
    "r2",
    "Real",
    "render_dataset",
    "render_latents",
    "render_part",
    "RenderError",
    "RenderOptions",
    "scene_params",
    "SceneParams",
    "SceneSpec",
    "Share",
    "simclr",
    "Space",
    "SpecError",
    "SlurmOptions",
    "Sphere",
    "TemporalCausal3DIdent",
    "ThreeDIdent",
    "TrainingError",
    "Uniform",
    "VonMisesFisher",
]

_HOMES = {
    "conversion.dataset": ("convert",),
    "conversion.options": ("ConvertOptions",),
    "conditionals": ("Change", "conditional", "Joint", "Share"),
    "datasets.download": ("download",),
    "datasets.ident3d": ("Ident3D",),
    "datasets.kitti_masks": ("KittiMasks",),
    "datasets.pair_report": ("pair_report", "PairReport"),
    "datasets.pair_loader": ("pair_loader",),
    "datasets.pairs": ("PairSampler",),
    "datasets.published": ("Causal3DIdent", "Multimodal3DIdent", "TemporalCausal3DIdent", "ThreeDIdent"),
    "datasets.streaming": ("Ident3DStream",),
    "datasets.views": ("simclr",),
    "distributions": ("Distribution", "GeneralizedNormal", "Laplace", "Normal", "Uniform"),
    "errors": (
        "BusyError",
        "DatasetError",
        "DownloadError",
        "Ident3DError",
        "RenderError",
        "SpecError",
        "TrainingError",
    ),
    "factors": ("Categorical", "FACTORS", "Factor", "Factors", "FactorTable"),
    "hub": ("pull", "push"),
    "metrics": ("dci", "mcc", "r2"),
    "render.dataset": ("finalize", "render_dataset", "render_part"),
    "render.options": ("RenderOptions", "SlurmOptions"),
    "render.pictures": ("render_latents",),
    "scene": ("SceneParams", "SceneSpec", "scene_params"),
    "scenes": ("bundled_scenes", "load_scene"),
    "spaces": ("Box", "Product", "Real", "Space", "Sphere"),
    "von_mises_fisher": ("VonMisesFisher",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"ident3d.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ident3d' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

"""Making pictures: plans, Blender in processes of its own, and the way from a plan to a finished dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ident3d.render.dataset import finalize, render_dataset, render_part
    from ident3d.render.options import RenderOptions, SlurmOptions
    from ident3d.render.pictures import render_latents

__all__ = ["RenderOptions", "SlurmOptions", "finalize", "render_dataset", "render_latents", "render_part"]


def __getattr__(name: str) -> Any:
    # Lazy, since a worker imports this package where neither tqdm nor anything else of the user's is installed.
    if name == "render_latents":
        from ident3d.render.pictures import render_latents

        return render_latents
    if name in ("finalize", "render_dataset", "render_part"):
        from ident3d.render import dataset

        return getattr(dataset, name)
    if name in ("RenderOptions", "SlurmOptions"):
        from ident3d.render import options

        return getattr(options, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Published layouts to shards with a manifest, shards to other shards, and shards back to the published layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ident3d.conversion.dataset import convert
    from ident3d.conversion.options import ConvertOptions

__all__ = ["ConvertOptions", "convert"]


def __getattr__(name: str) -> Any:
    # Lazy: the command line reads the options' fields without torch.
    if name == "convert":
        from ident3d.conversion.dataset import convert

        return convert
    if name == "ConvertOptions":
        from ident3d.conversion.options import ConvertOptions

        return ConvertOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

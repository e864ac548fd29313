"""What reads a URL."""

from __future__ import annotations

from ident3d.errors import SpecError
from ident3d.network.hub_source import HubSource
from ident3d.network.sources import FsspecSource, HttpSource, Source

__all__ = ["source_of"]


def source_of(url: str) -> Source:
    """What reads a URL.

    Raises:
        SpecError: a URL that nothing here reads; says what is missing.
    """
    if url == "hf://datasets" or url.startswith("hf://datasets/"):
        return HubSource(url)
    if url.lower().startswith("hf://") and not url.startswith(("hf://spaces/", "hf://models/")):
        raise SpecError(f"{url}: expected hf://datasets/user/name")
    if url.partition("://")[0].lower() in ("http", "https"):
        return HttpSource(url)
    return FsspecSource(url)

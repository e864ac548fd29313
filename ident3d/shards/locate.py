"""From a path or a URL to where a dataset's files lie."""

from __future__ import annotations

import os
from pathlib import Path

from ident3d.shards.location import Location, is_url
from ident3d.shards.remote import RemoteLocation

__all__ = ["locate"]


def locate(root: str | os.PathLike[str]) -> Location:
    """The location of a path or URL.

    Raises:
        SpecError: a URL of a kind that fsspec does not know, or whose package is not installed.
    """
    if is_url(root):
        return RemoteLocation(str(root))
    return Location(Path(root))

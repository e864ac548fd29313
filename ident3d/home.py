"""Where ident3d keeps what it can fetch or make again, and whether it may use the network."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

from ident3d.errors import SpecError

__all__ = ["cache_home", "offline"]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def cache_home() -> Path:
    """The cache folder, which need not exist: `IDENT3D_HOME` where that is set, else the platform's."""
    given = os.environ.get("IDENT3D_HOME", "")
    return Path(given).expanduser() if given else user_cache_path("ident3d", appauthor=False)


def offline() -> bool:
    """Whether `IDENT3D_OFFLINE` forbids the network.

    Raises:
        SpecError: a value that is neither yes nor no.
    """
    given = os.environ.get("IDENT3D_OFFLINE", "").strip().lower()
    if given not in _TRUE + _FALSE:
        raise SpecError(f"IDENT3D_OFFLINE={given!r}: expected one of {', '.join((*_TRUE, *_FALSE[1:]))}")
    return given in _TRUE

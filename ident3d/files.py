"""Files that are whole or absent: write beside, fsync, rename, fsync the folder."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["npy_bytes", "sync_folder", "write_atomic", "write_json"]


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that `path` holds the old content or all of the new, never a part."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, data: Any) -> None:
    """`write_atomic` of JSON with sorted keys left as given, two spaces deep."""
    write_atomic(path, (json.dumps(data, indent=2) + "\n").encode())


def npy_bytes(array: NDArray[Any]) -> bytes:
    """The bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()

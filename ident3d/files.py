"""Files that are whole or absent: write beside, fsync, rename, fsync the folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["array_sha256", "npy_bytes", "read_npy", "sync_folder", "write_atomic", "write_json"]


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
    """`write_atomic` of JSON, keys in the order given, two spaces deep."""
    write_atomic(path, (json.dumps(data, indent=2) + "\n").encode())


def read_npy(source: Path | bytes, *, mapped: bool = False) -> NDArray[Any]:
    """The array of a .npy file, or of its bytes.

    `numpy.load` guesses at archives and pickles, raises whatever their parsers raise, and leaves the file open then.

    Args:
        source: the file, or its content.
        mapped: map a file's array read-only instead of reading it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a .npy of numbers, or a damaged one.
    """
    with open(source, "rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        try:
            if mapped:
                version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
                old = version == (1, 0)
                read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
                header = read(file)  # type: ignore[no-untyped-call]
                shape, fortran, dtype = header
                if dtype.hasobject or fortran:
                    raise ValueError("not an array of numbers in C order")
                view = np.memmap(file, dtype, "r", file.tell(), shape) if 0 not in shape else np.zeros(shape, dtype)
                return np.asarray(view)  # plain: indexing a memmap costs microseconds a read
            array: NDArray[Any] = np.lib.format.read_array(file)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ValueError(f"not a .npy file of numbers: {error}") from None
    return array


def npy_bytes(array: NDArray[Any]) -> bytes:
    """The bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def array_sha256(array: NDArray[Any]) -> str:
    """The sha256 of an array's elements in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()

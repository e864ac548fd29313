"""Indices kept beside the dataset that they were built from, so that they are built once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.files import array_sha256, write_atomic

__all__ = ["IndexCache"]

MAGIC = b"ident3d index 1\n"


class IndexCache:
    """FAISS indices of one array of latents, in a folder.

    A file is named by the hash of all that its index depends on, and begins with the same in words and a checksum of
    what follows. One that is damaged, or was built from other latents, is built again, with a warning. Processes that
    want the same index at once wait for the first to build it.

    Args:
        folder: made when first needed.
        label: of whose latents these are, e.g. the split.
        latents: float32 (N, d).
        names: of their columns. Under the same label, names and settings a file of other latents is one that the
            dataset has outgrown. None where that cannot be told, as for arrays.
    """

    def __init__(
        self, folder: Path, label: str, latents: NDArray[np.float32], names: tuple[str, ...] | None = None
    ) -> None:
        self.folder, self.label, self.names = folder, label, names
        self.latents = {"latents": array_sha256(latents), "shape": list(latents.shape)}

    def path(self, match: str, settings: Mapping[str, Any]) -> Path:
        """The file of an index with these settings."""
        return self.folder / f"{self._stem(match, settings)}-{_digest(self.latents)}.faiss"

    def _stem(self, match: str, settings: Mapping[str, Any]) -> str:
        return f"{self.label}-{match}-{_digest({'names': self.names, **settings})}"

    def get(self, match: str, settings: Mapping[str, Any], build: Callable[[], Any]) -> Any:
        """The index, read or else built and kept.

        Args:
            match: the kind of index.
            settings: what it depends on besides the latents; plain data.
            build: makes it.
        """
        path = self.path(match, settings)
        header = json.dumps({**self.latents, "match": match, **settings}, sort_keys=True).encode() + b"\n"
        index, complaint = _look(path, header)
        if index is not None:
            return index
        if complaint:
            warnings.warn(f"{path}: {complaint}; built again", stacklevel=4)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _lock(self.folder):
                index = _look(path, header)[0]  # another process may have built it meanwhile
                if index is not None:
                    return index
                index = build()
                write_atomic(path, _encode(index, header))
                self._drop_outgrown(path, f"{self._stem(match, settings)}-*.faiss")
        except OSError as error:
            warnings.warn(
                f"{self.folder}: the index cannot be kept there ({error.strerror or error}), so every run builds it; "
                "name another folder with cache=",
                stacklevel=4,
            )
        return build() if index is None else index

    def _drop_outgrown(self, path: Path, siblings: str) -> None:
        for old in self.folder.glob(siblings) if self.names is not None else ():
            if old != path:
                warnings.warn(f"{old}: belongs to other latents than are stored now; built again", stacklevel=5)
                old.unlink(missing_ok=True)


def _look(path: Path, header: bytes) -> tuple[Any, str]:
    """The index in a file, and None where there is none that will do, with what is wrong with the file."""
    try:
        return _read(path, header), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError) as error:
        return None, str(error)


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def _encode(index: Any, header: bytes) -> bytes:
    import faiss

    payload = faiss.serialize_index(index).tobytes()
    return MAGIC + header + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def _read(path: Path, header: bytes) -> Any:
    """The index in a file.

    Raises:
        ValueError: the file is damaged, or not of this index; the text says which.
    """
    import faiss

    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise ValueError("not an index that this ident3d wrote")
    if not data.startswith(header, len(MAGIC)):
        raise ValueError("belongs to other latents or settings")
    start = len(MAGIC) + len(header)
    payload = memoryview(data)[start + 65 :]
    if hashlib.sha256(payload).hexdigest().encode() + b"\n" != data[start : start + 65]:
        raise ValueError("damaged")
    try:
        return faiss.deserialize_index(np.frombuffer(payload, np.uint8))
    except RuntimeError as error:
        raise ValueError(f"of another FAISS ({error})") from None


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

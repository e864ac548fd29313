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

from ident3d.files import write_atomic

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
    """

    def __init__(self, folder: Path, label: str, latents: NDArray[np.float32]) -> None:
        self.folder, self.label = folder, label
        digest = hashlib.sha256(np.ascontiguousarray(latents).data).hexdigest()
        self.latents = {"latents": digest, "shape": list(latents.shape)}

    def path(self, match: str, settings: Mapping[str, Any]) -> Path:
        """The file of an index with these settings."""
        return self.folder / f"{self._stem(match, settings)}-{_digest(self.latents)}.faiss"

    def _stem(self, match: str, settings: Mapping[str, Any]) -> str:
        return f"{self.label}-{match}-{_digest(settings)}"

    def get(self, match: str, settings: Mapping[str, Any], build: Callable[[], Any]) -> Any:
        """The index, read or else built and kept.

        Args:
            match: the kind of index.
            settings: what it depends on besides the latents; plain data.
            build: makes it.
        """
        path = self.path(match, settings)
        header = json.dumps({**self.latents, "match": match, **settings}, sort_keys=True).encode() + b"\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _lock(self.folder):
                return self._get(path, header, build, f"{self._stem(match, settings)}-*.faiss")
        except OSError as error:
            warnings.warn(
                f"{self.folder}: the index cannot be kept there ({error.strerror or error}), so every run builds it; "
                "name another folder with cache=",
                stacklevel=4,
            )
            return build()

    def _get(self, path: Path, header: bytes, build: Callable[[], Any], siblings: str) -> Any:
        if path.is_file():
            try:
                return _read(path, header)
            except ValueError as error:
                warnings.warn(f"{path}: {error}; built again", stacklevel=6)
        stale = [p for p in self.folder.glob(siblings) if p != path]
        for old in stale:
            warnings.warn(f"{old}: belongs to other latents than are stored now; built again", stacklevel=6)
        index = build()
        write_atomic(path, _encode(index, header))
        for old in stale:
            old.unlink(missing_ok=True)
        return index


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
    return faiss.deserialize_index(np.frombuffer(payload, np.uint8))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

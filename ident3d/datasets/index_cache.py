"""Indices kept beside the dataset that they were built from, so that they are built once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ident3d.datasets.cells import Rows
from ident3d.datasets.grid_build import CELL
from ident3d.datasets.grid_files import GridFile, write_grid
from ident3d.files import array_sha256, write_atomic

__all__ = ["IndexCache"]

MAGIC = b"ident3d index 1\n"

Index = TypeVar("Index")


class IndexCache:
    """Indices of one array of latents, in a folder: FAISS's, and grids of points too many for memory.

    A file is named by the hash of all that its index depends on, and begins with the same in words and a checksum: of
    all that follows, or for a grid, which is not read as a whole, of its table. One that is damaged, or was built from
    other latents, is built again, with a warning. Processes that want the same index at once wait for the first to
    build it.

    Args:
        folder: made when first needed.
        label: of whose latents these are, e.g. the split.
        latents: float32 (N, d).
        names: of their columns. Under the same label, names and settings a file of other latents is one that the
            dataset has outgrown. None where that cannot be told, as for arrays.
        known: a checksum of the file that the latents are columns of, where there is one. It spares grids the hashing
            of all latents, which are compared with the file's points at some places instead.
    """

    def __init__(
        self,
        folder: Path,
        label: str,
        latents: NDArray[np.float32],
        names: tuple[str, ...] | None = None,
        known: str | None = None,
    ) -> None:
        self.folder, self.label, self.names, self.known = folder, label, names, known
        self._array = latents

    @cached_property
    def latents(self) -> dict[str, Any]:
        """What tells these latents from others; hashing them takes some seconds for 100 million."""
        return {"latents": array_sha256(self._array), "shape": list(self._array.shape)}

    def path(self, match: str, settings: Mapping[str, Any]) -> Path:
        """The file of a FAISS index with these settings."""
        return self.folder / f"{self._stem(match, settings)}-{_digest(self.latents)}.faiss"

    def _stem(self, match: str, settings: Mapping[str, Any]) -> str:
        return f"{self.label}-{match}-{_digest({'names': self.names, **settings})}"

    def get(self, match: str, settings: Mapping[str, Any], build: Callable[[], Any]) -> Any:
        """The FAISS index, read or else built and kept.

        Args:
            match: the kind of index.
            settings: what it depends on besides the latents; plain data.
            build: makes it.
        """
        path, header = self.path(match, settings), _header(self.latents, match, settings)

        def make() -> Any:
            index = build()
            # A disk that is full is no reason to build it twice.
            with self._unkept():
                write_atomic(path, _encode(index, header))
            return index

        index = self._find(path, lambda: _read(path, header), make)
        return build() if index is None else index

    def grid(self, settings: Mapping[str, Any], rows: Rows, samples: int) -> GridFile | None:
        """The grid over points, mapped from its file, which is built first where there is none.

        Args:
            settings: what the points depend on besides the latents; plain data.
            rows: the points.
            samples: how many there are.

        Returns:
            The grid, or None where it cannot be kept.
        """
        known = {"file": self.known, "shape": list(self._array.shape)} if self.known else self.latents
        settings = {**settings, "cell": CELL}
        path = self.folder / f"{self._stem('exact', settings)}-{_digest(known)}.grid"
        header = _header(known, "exact", settings)

        def read() -> GridFile:
            return GridFile(path, header, rows, samples)

        def make() -> GridFile:
            bar: tqdm[Any]
            # None: no bar where stderr is no terminal.
            with tqdm(total=3 * samples, desc=path.name, unit=" points", unit_scale=True, disable=None) as bar:
                write_grid(path, header, rows, samples, bar.update)
            return read()

        return self._find(path, read, make)

    def _find(self, path: Path, read: Callable[[], Index], make: Callable[[], Index]) -> Index | None:
        """What a file holds, or else what is made, with its file; None where files cannot be kept."""
        index, complaint = _look(read)
        if index is not None:
            return index
        if complaint:
            warnings.warn(f"{path}: {complaint}; built again", stacklevel=5)
        with self._unkept():
            self.folder.mkdir(parents=True, exist_ok=True)
            with _lock(self.folder):
                index = _look(read)[0]  # another process may have built it meanwhile
                if index is None:
                    index = make()
                    self._drop_outgrown(path)
        return index

    @contextmanager
    def _unkept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            warnings.warn(
                f"{self.folder}: the index cannot be kept there ({error.strerror or error}), so every run builds it; "
                "name another folder with cache=",
                stacklevel=7,
            )

    def _drop_outgrown(self, path: Path) -> None:
        stem = path.name.rpartition("-")[0]
        for old in self.folder.glob(f"{stem}-*{path.suffix}") if self.names is not None else ():
            if old != path:
                warnings.warn(f"{old}: belongs to other latents than are stored now; built again", stacklevel=6)
                old.unlink(missing_ok=True)


def _header(latents: Mapping[str, Any], match: str, settings: Mapping[str, Any]) -> bytes:
    return json.dumps({**latents, "match": match, **settings}, sort_keys=True).encode() + b"\n"


def _look(read: Callable[[], Index]) -> tuple[Index | None, str]:
    """The index in a file, and None where there is none that will do, with what is wrong with the file."""
    try:
        return read(), ""
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

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
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ident3d.datasets.cells import Rows
from ident3d.datasets.decoding import gigabytes
from ident3d.datasets.grid_build import CELL
from ident3d.datasets.grid_files import GridFile, drop_stale, file_bytes, write_grid
from ident3d.errors import DatasetError
from ident3d.files import array_sha256, write_atomic

__all__ = ["MANY_SAMPLES", "IndexCache"]

MAGIC = b"ident3d index 1\n"

MANY_SAMPLES = 25_000_000
"""Samples from which on a grid is searched in a file or not at all: in ten dimensions every process would need 5 GB."""

Index = TypeVar("Index")


class IndexCache:
    """Indices of one array of latents, in a folder: FAISS's, and grids of points too many for memory.

    A file is named by the hash of all that its index depends on, and begins with the same in words and a checksum. One
    that is found to be damaged, or built from other latents, is built again, with a warning. Processes that want the
    same index at once wait for the first to build it; on some network mounts only those of one host do.

    Of a FAISS index the checksum is of all that follows. A grid is not read as a whole: when it is opened, its size is
    checked, by the checksum its beginning and its table, and against the latents 256 of its points with their numbers.
    The rest of its points are not checked: damage among them alone is not noticed, and may give wrong neighbours.

    Args:
        folder: made when first needed.
        label: of whose latents these are, e.g. the split.
        latents: float32 (N, d).
        names: of their columns. Under the same label, names and settings a file of other latents is one that the
            dataset has outgrown. None where that cannot be told, as for arrays.
        known: a checksum of the file that the latents are mapped from, where they are. It stands for them in the names
            of grids, and spares hashing all of them. It is not compared with them: where they differ from the file that
            it is of, only the 256 points tell, and a change of a few latents is not noticed. Leave it out for latents
            that may have been written into.
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

        Raises:
            DatasetError: it cannot be kept, and there are `MANY_SAMPLES` or more.
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

        dim = rows(slice(0, 1)).shape[1]
        return self._find(path, read, make, lambda why: self._in_memory(why, samples, dim))

    def _in_memory(self, why: str, samples: int, dim: int) -> str:
        """What it means that a grid is made in memory.

        Raises:
            DatasetError: too much.
        """
        memory = gigabytes(samples * (16 * dim + 52))  # of `GridIndex` while it is made
        if samples < MANY_SAMPLES:
            return f"so every process builds it in {memory} of memory"
        raise DatasetError(
            f"{self.folder}: the index of {samples:,} samples cannot be kept there ({why}). Its file takes "
            f"{gigabytes(file_bytes(samples, dim))}; without it every process would need {memory} of memory. Name "
            "another folder with that much room with cache=, or make room in this one"
        )

    def _find(
        self,
        path: Path,
        read: Callable[[], Index],
        make: Callable[[], Index],
        unkept: Callable[[str], str] | None = None,
    ) -> Index | None:
        """What a file holds, or else what is made, with its file; None where files cannot be kept."""
        index, complaint = _look(read)
        if index is not None:
            return index
        if complaint:
            warnings.warn(f"{path}: {complaint}; built again", stacklevel=5)
        with self._unkept(unkept):
            self.folder.mkdir(parents=True, exist_ok=True)
            with _lock(self.folder):
                index = _look(read)[0]  # another process may have built it meanwhile
                if index is None:
                    self._drop_outgrown(path)  # first: the new one may need their room
                    index = make()
        return index

    @contextmanager
    def _unkept(self, instead: Callable[[str], str] | None = None) -> Iterator[None]:
        """Warn where a file cannot be written; `instead` puts in words what happens then, or raises, of the reason."""
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            then = "so every run builds it" if instead is None else instead(why)
            warnings.warn(
                f"{self.folder}: the index cannot be kept there ({why}), {then}; name another folder with cache=",
                stacklevel=7,
            )

    def _drop_outgrown(self, path: Path) -> None:
        if self.names is None:
            return
        pattern = f"{escape(path.name.rpartition('-')[0])}-*{path.suffix}"
        if path.suffix == ".grid":
            drop_stale(self.folder, pattern)
        for old in self.folder.glob(pattern):
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

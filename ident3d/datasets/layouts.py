"""The published layouts on disk: where a split is, and its arrays and tables, checked as they are read.

What is read here was downloaded, so nothing is believed: no pickles, no names taken from a file as a path, and every
array's shape and range compared with what the layout says.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np
from jaxtyping import Float32, Float64, Int64

from ident3d.datasets.serving import Array
from ident3d.errors import DatasetError
from ident3d.files import read_npy

__all__ = [
    "Layout",
    "SplitFiles",
    "TextLines",
    "check_latents",
    "is_there",
    "read_named",
    "read_numbers",
    "unit_cube",
    "whole_numbers",
]

MANIFEST = "dataset.json"
ROUNDING = 1e-6
"""How far outside the unit interval float rounding may leave a latent."""


@dataclass(frozen=True)
class Layout:
    """What a published dataset's folder looks like from outside.

    Attributes:
        name: as `ident3d download` knows it.
        title: as its paper writes it.
        places: of each split, what its folder or file may be called.
        marks: names in a split's folder, or arrays in its .npz, of which any one tells this layout from the others.
        public: whether `ident3d download` knows a record of it.
    """

    name: str
    title: str
    places: Mapping[str, tuple[str, ...]]
    marks: tuple[str, ...]
    public: bool = True

    def split_name(self, given: str) -> str:
        """A split as we call it; the layout's own name is taken too, e.g. `trainset`."""
        for split, places in self.places.items():
            if given in (place.removesuffix(".npz") for place in places):
                return split
        return given

    def place(self, base: Path, split: str) -> Path | None:
        """The folder or file of a split in `base`, where there is one."""
        found = (base / place for place in self.places.get(split, ()))
        return next((path for path in found if is_there(path)), None)

    def is_split(self, base: Path, split: str) -> bool:
        """Whether `base` holds a split that bears this layout's marks."""
        path = self.place(base, split)
        if path is None or is_there(base / MANIFEST):
            return False
        return any(mark in _arrays_in(path) if path.is_file() else is_there(path / mark) for mark in self.marks)

    def splits_of(self, base: Path) -> tuple[str, ...]:
        """The splits in `base` itself."""
        return tuple(split for split in self.places if self.is_split(base, split))

    def bases(self, root: Path) -> list[Path]:
        """The folders that hold splits of this layout: `root` itself, or else those directly in it."""
        return [root] if self.splits_of(root) else [base for base in _folders(root) if self.splits_of(base)]

    def base(self, root: Path, split: str) -> Path | None:
        """The folder that holds the split: `root`, or the one folder in it that does; None where there is none.

        Raises:
            DatasetError: several do.
        """
        found = [base for base in self.bases(root) if self.is_split(base, split)]
        if len(found) > 1:
            shown = ", ".join(base.name for base in found)
            raise DatasetError(
                f"{root}: split {split!r} of {self.title} is in several of its folders: {shown}; name one"
            )
        if found:
            return found[0]
        # Without its marks it can still be told by its name, and what is missing can then be named.
        named = [base for base in [root] if self.place(base, split)]
        named = named or [base for base in _folders(root) if self.place(base, split)]
        return named[0] if len(named) == 1 and not is_there(named[0] / MANIFEST) else None

    def wanted(self) -> str:
        """What is looked for, for messages."""
        place = self.places["train"][0]
        return f"{place} that holds {self.marks[0]}" if place.endswith(".npz") else f"{place}/{self.marks[0]}"

    def remedy(self, root: Path) -> str:
        """How to come by the files, for messages."""
        if self.public:
            return f"to fetch {self.title}: download=True, or `ident3d download {self.name} --root {root}`"
        return f"ident3d knows no record to download {self.title} from; put its files there"

    def not_there(self, root: Path, split: str) -> DatasetError:
        """The error of a split that was not found."""
        if not root.is_dir():
            return DatasetError(f"{root}: no such folder (root={str(root)!r}); {self.remedy(root)}")
        if is_there(root / MANIFEST):
            return DatasetError(f"{root}: holds {MANIFEST}: a dataset in ident3d's own format; open it with Ident3D")
        have = {name for base in self.bases(root) for name in self.splits_of(base)}
        if have:
            shown = ", ".join(name for name in self.places if name in have)
            return DatasetError(f"{root}: no split {split!r} of {self.title}; it has {shown}; {self.remedy(root)}")
        expected = " or ".join(self.places.get(split, ("a split called " + ", ".join(self.places),)))
        return DatasetError(
            f"{root}: no split {split!r} of {self.title}: looked there and in each folder in it for {expected}; "
            f"{self.remedy(root)}"
        )


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder, as far as we may look."""
    return os.access(path, os.F_OK)


def _folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
    except OSError:
        return []
    return [root / name for name in sorted(names)]


def _arrays_in(path: Path) -> set[str]:
    try:
        with ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, BadZipFile, ValueError, NotImplementedError):
        return set()


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split.

    Attributes:
        layout: of the dataset.
        root: as the user gave it, for messages.
        path: the split's folder, or its .npz.
    """

    layout: Layout
    root: Path
    path: Path

    def absent(self, names: Iterable[str]) -> list[str]:
        """Those of the files that are not there."""
        return [name for name in names if not is_there(self.path / name)]

    def missing(self, name: str = "") -> DatasetError:
        """The error of a file that is not there."""
        path = self.path / name if name else self.path
        return DatasetError(f"{path}: missing (root={str(self.root)!r}); {self.layout.remedy(self.root)}")

    def array(self, name: str, width: int) -> Array:
        """An array (N, width) of floats, as stored and mapped.

        Raises:
            DatasetError: absent, damaged, or of another shape or type.
        """
        path = self.path / name
        try:
            try:
                found: Array = read_npy(path, mapped=True)
            except ValueError:  # in Fortran order, or of a later version of the format: such are read as a whole
                found = read_npy(path)
        except FileNotFoundError:
            raise self.missing(name) from None
        except (OSError, ValueError) as error:
            raise DatasetError(f"{path}: cannot be read ({error}); {self.layout.remedy(self.root)}") from None
        check_latents(found, width, path)
        return found

    def checksum(self, names: Iterable[str]) -> str:
        """One checksum of several files."""
        digest = hashlib.sha256()
        for name in names:
            try:
                with open(self.path / name, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError:
                raise self.missing(name) from None
        return digest.hexdigest()


def check_latents(found: Array, width: int, where: object) -> None:
    """Refuse what is no array (N, width) of floats.

    Raises:
        DatasetError: says what it is.
    """
    if found.dtype.kind == "f" and found.ndim == 2 and found.shape[1] == width:
        return
    if found.ndim == 2 and found.shape[1] == width + 1:
        raise DatasetError(
            f"{where}: holds {found.dtype} {found.shape}: the periodic variant of 3DIdent, 3 columns of positions and "
            f"a point on the sphere S^7; ident3d reads the published one, (N, {width})"
        )
    raise DatasetError(f"{where}: holds {found.dtype} {found.shape}, expected float32 or float64 (N, {width})")


def unit_cube(
    raw: Array, low: float | Sequence[float], high: float | Sequence[float], names: Sequence[str], where: object
) -> Float32[Array, "samples factors"]:
    """Latents in the unit cube, (raw - low) / (high - low), computed in float64.

    Args:
        raw: (N, d).
        low: what 0 stands for, one for all or one a column.
        high: what 1 stands for.
        names: of the columns, for messages.
        where: the file, for messages.

    Raises:
        DatasetError: a value that is NaN, or outside by more than rounding; the text names the first.
    """
    bottom, top = np.asarray(low, np.float64), np.asarray(high, np.float64)
    u: Float64[Array, "samples factors"] = (raw.astype(np.float64) - bottom) / (top - bottom)
    bad = ~((u >= -ROUNDING) & (u <= 1 + ROUNDING))
    if bad.any():
        row, column = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
        a, b = (float(np.broadcast_to(x, u.shape[1:])[column]) for x in (bottom, top))
        more = f" ({int(bad.sum()):,} such values)" if bad.sum() > 1 else ""
        raise DatasetError(
            f"{where}: sample {row}, {names[column]}: {raw[row, column]!s}, expected {a:.6g} to {b:.6g}{more}"
        )
    return np.clip(u, 0, 1).astype(np.float32)


def _header(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return [name.strip() for name in next(csv.reader(file), [])]
    except (OSError, ValueError, csv.Error) as error:
        raise DatasetError(f"{path}: cannot be read ({error})") from None


def read_numbers(path: Path, names: Sequence[str]) -> Float64[Array, "samples names"]:
    """Columns of a .csv by the names in its first line, in the order asked for.

    A name matches a column that is called so, or else so after any prefix: `object_color`, `image/object_color`.

    Raises:
        DatasetError: cannot be read; a column that is absent or there twice; a cell that is no number.
    """
    header, columns = _header(path), []
    for name in names:
        ending = re.compile(rf".*[^0-9a-z]{re.escape(name)}", re.IGNORECASE)
        hits = [k for k, found in enumerate(header) if found.lower() == name]
        hits = hits or [k for k, found in enumerate(header) if ending.fullmatch(found)]
        if len(hits) != 1:
            what = f"several columns are called {name}" if hits else f"no column is called {name}"
            raise DatasetError(f"{path}: {what}, whatever its prefix; there are {', '.join(header) or 'none'}")
        columns += hits
    try:
        with open(path, encoding="utf-8-sig", newline="") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there are no rows, which the caller says better
            next(file)
            found = np.loadtxt(file, np.float64, comments=None, delimiter=",", usecols=columns, ndmin=2, quotechar='"')
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: {error}") from None
    return found.reshape(-1, len(names))


def read_named(path: Path, count: int) -> dict[str, Array]:
    """All columns of a .csv by name, each (N,): int64, else float64, else texts.

    Raises:
        DatasetError: cannot be read, is not rectangular, or has another number of rows than `count`.
    """
    header = _header(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row][1:]
    except (OSError, ValueError, csv.Error) as error:
        raise DatasetError(f"{path}: cannot be read ({error})") from None
    if len(rows) != count or any(len(row) != len(header) for row in rows):
        raise DatasetError(f"{path}: expected {count:,} rows of {len(header)} cells, found {len(rows):,} rows")
    columns = zip(*rows, strict=True) if rows else ((),) * len(header)
    return {name: _typed(column) for name, column in zip(header, columns, strict=True)}


def _typed(cells: Sequence[str]) -> Array:
    texts = np.array(cells, dtype=np.str_)
    for dtype in (np.int64, np.float64):
        try:
            return texts.astype(dtype)
        except (ValueError, OverflowError):
            continue
    return texts


def whole_numbers(values: Array, counts: Sequence[int], names: Sequence[str], where: object) -> Int64[Array, "n names"]:
    """Columns of numbers of labels as int64.

    Args:
        values: (N, d).
        counts: how many labels each column has.
        names: of the columns, for messages.
        where: the file, for messages.

    Raises:
        DatasetError: a value that is no whole number, or of no label; the text names the first.
    """
    top = np.array(counts)
    bad = ~((values >= 0) & (values < top) & (values == np.floor(values)))
    if bad.any():
        row, column = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
        value = f"{values[row, column]:g}"
        raise DatasetError(f"{where}: sample {row}, {names[column]}: {value}, expected 0 to {counts[column] - 1}")
    return values.astype(np.int64)


class TextLines:
    """The lines of a text file, one a sample, held as bytes and decoded one at a time.

    Args:
        path: the file, in UTF-8.
        count: how many lines there must be.

    Raises:
        DatasetError: cannot be read, or another number of lines.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        try:
            self._bytes = path.read_bytes()
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read ({error.strerror or error})") from None
        ends = np.flatnonzero(np.frombuffer(self._bytes, np.uint8) == ord("\n"))
        if self._bytes and not self._bytes.endswith(b"\n"):
            ends = np.append(ends, len(self._bytes))
        if len(ends) != count:
            raise DatasetError(f"{path}: has {len(ends):,} lines, expected {count:,}: one a sample")
        self._ends = ends

    def __getitem__(self, index: int) -> str:
        """Line `index` without its end.

        Raises:
            DatasetError: not UTF-8.
        """
        start = int(self._ends[index - 1]) + 1 if index else 0
        line = self._bytes[start : int(self._ends[index])].removesuffix(b"\r")
        try:
            return line.decode("utf-8" if index else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise DatasetError(f"{self.path}: line {index + 1} is not UTF-8 ({error})") from None

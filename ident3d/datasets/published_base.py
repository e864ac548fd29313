"""What the readers of published datasets have in common: finding the files, serving numbered pictures, copies."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ident3d.datasets.dataset import PictureDataset
from ident3d.datasets.frames import NumberedPictures
from ident3d.datasets.layouts import Layout, SplitFiles
from ident3d.datasets.serving import Array, Statistics, Transform
from ident3d.errors import DatasetError
from ident3d.factors import FACTORS, Factors
from ident3d.home import cache_home

__all__ = ["CLASSES", "Normalize", "PictureFolders", "Published", "Root", "joined"]

CLASSES = ("teapot", "hare", "dragon", "cow", "armadillo", "horse", "head")
"""Of Causal3DIdent and Multimodal3DIdent, by number."""

Root = str | os.PathLike[str]
Normalize = bool | Sequence[Sequence[float]]


def joined(parts: Sequence[Array]) -> Array:
    """Arrays as one, of their own type where they have it in common; a single one is not copied."""
    same = len({part.dtype for part in parts}) == 1
    return parts[0] if len(parts) == 1 else np.concatenate(parts, dtype=parts[0].dtype if same else None)


class Published(PictureDataset):
    """What the published datasets have in common; open one of its subclasses.

    Args:
        root: the folder that holds the split's folder, or the one above it.
        split: train, val or test, or the layout's own name for it.
        transform: applied to the picture, a uint8 tensor (3, H, W).
        target_transform: applied to the latents, a float32 tensor (factors,).
        download: fetch the dataset into `root` where its files are absent.
        factors: names of the factors wanted, in the order wanted; all by default.
        cache: `none`, or decoded pictures in `ram` or on `disk`: see `DecodedStore`.
        normalize: give pictures as float32, (x / 255 - mean) / std: by the training split's statistics, or by (mean,
            std) as given.
        on_error: `raise` at a damaged picture, or `skip` it: count it, warn of it, and leave it out of its batch.

    Attributes:
        title: of the dataset, as its paper writes it.
        splits: those that were published.
        url: where.
        citation: the paper to cite.
        license: on the Hub's list, or `unknown`: see `url`.
        folder: the folder that holds the splits.
        raw_latents: as stored, in the published coordinate and type.

    Raises:
        DatasetError: a file that is absent, damaged, or disagrees with the others; the text names it.
        DownloadError: files that cannot be fetched.
        SpecError: an unknown factor, or an option out of range.
    """

    layout: ClassVar[Layout]
    title: ClassVar[str]
    splits: ClassVar[tuple[str, ...]]
    url: ClassVar[str]
    citation: ClassVar[str]
    license: ClassVar[str] = "unknown"
    table: ClassVar[Factors] = FACTORS
    reloaded: ClassVar[tuple[str, ...]] = ("latents", "categories", "_raw")
    """Attributes that a pickle leaves out: its receiver reads them again."""

    _raw: list[Array]

    def __init__(
        self,
        root: Root,
        split: str = "train",
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        download: bool = False,
        *,
        factors: Iterable[str] | None = None,
        cache: str = "none",
        normalize: Normalize = False,
        on_error: str = "raise",
    ) -> None:
        super().__init__(transform, target_transform, normalize, on_error)
        self.name, self.root = self.title, Path(root)
        self.columns = self.table.select(factors)
        self.split = self.layout.split_name(split)
        self.folder, self.files = self._find(download)
        self._load()
        if not len(self):
            raise DatasetError(f"{self.files.path}: holds no samples")
        self._open_pictures()
        self.derived = self._writable()
        self._fingerprint = ""
        self.open_cache(cache)

    def _find(self, download: bool) -> tuple[Path, SplitFiles]:
        """The folder of the splits, and this split's files, all there."""
        for fetch in (download, False):
            base = self.layout.base(self.root, self.split)
            place = base and self.layout.place(base, self.split)
            files = SplitFiles(self.layout, self.root, place or self.root)
            absent = files.absent(self._needed(files.path)) if place else ()
            if base and place and not absent:
                return base, files
            if fetch:
                from ident3d.datasets.download import download as fetch_record

                fetch_record(self.layout.name, self.root, splits=(self.split,), quiet=False)
        raise self._missing(files, absent[0]) if absent else self.layout.not_there(self.root, self.split)

    def _missing(self, files: SplitFiles, name: str) -> DatasetError:
        return files.missing(name)

    def _writable(self) -> Path:
        """The folder for what is computed from the dataset: its own, or where that cannot be written, in the cache."""
        if os.access(self.folder, os.W_OK):
            return self.folder
        return cache_home() / "derived" / hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]

    @abstractmethod
    def _needed(self, path: Path) -> Sequence[str]:
        """The files that the split must have, relative to its place."""

    @abstractmethod
    def _load(self) -> None:
        """Read the arrays: when opened, and again where a pickle is unpacked."""

    @abstractmethod
    def _open_pictures(self) -> None:
        """Find the pictures and their side."""

    @abstractmethod
    def extras(self) -> dict[str, Array | bytes]:
        """What a conversion keeps besides: by file name, an array as it was stored, or a file's content."""

    @classmethod
    def splits_in(cls, root: Root) -> tuple[str, ...]:
        """The splits of this dataset that are in a folder, or in the one folder in it that holds any.

        Raises:
            DatasetError: several folders in it do.
        """
        bases = cls.layout.bases(Path(root))
        if len(bases) > 1:
            shown = ", ".join(base.name for base in bases)
            raise DatasetError(f"{root}: {cls.title} is in several of its folders: {shown}; name one")
        return cls.layout.splits_of(bases[0]) if bases else ()

    @property
    def raw_latents(self) -> Array:
        """The continuous latents as stored, (N, d): type and coordinate are the published ones."""
        return joined(self._raw)

    @property
    def origin(self) -> str:
        """Where the pictures come from, in a line."""
        return f"{self.title} as published"

    def _sibling(self, split: str) -> Published:
        """Another split of the same choice of samples, without transforms."""
        return type(self)(self.folder, split, on_error=self.on_error)

    def reference_statistics(self) -> Statistics:
        """Mean and std of the training split's pixels where that is here, else of this one's."""
        if self.split != "train" and self.layout.is_split(self.folder, "train"):
            return self._sibling("train").statistics()
        return self.statistics()

    def _describe(self) -> list[str]:
        """Lines of `repr` that one dataset alone has."""
        return []

    def __repr__(self) -> str:
        side = self.resolution
        factors = ", ".join((*self.columns.names, *(kind.name for kind in self.categorical)))
        lines = [
            f"{type(self).__name__}, split {self.split!r}: {len(self):,} samples of {side} x {side} px",
            f"    root: {self.files.path}",
            f"    {self.origin}",
            f"    factors: {factors}",
            *(f"    {line}" for line in self._describe()),
        ]
        shown = ("transform", "target_transform")
        lines += [f"    {name}: {t!r}" for name in shown if (t := getattr(self, name)) is not None]
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.reloaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()


class PictureFolders(Published):
    """Pictures in numbered files, in one folder or several: what all layouts but the temporal one have in common."""

    _pictures: list[NumberedPictures]
    _starts: list[int]

    def _number(self, parts: Sequence[tuple[str, int, str]]) -> None:
        """Find the pictures: of each folder its name, how many they must be, and the array that says so."""
        self._pictures = [NumberedPictures(self.files.path / name, count, whose) for name, count, whose in parts]
        self._starts = np.cumsum([0, *(found.count for found in self._pictures[:-1])]).tolist()
        self.resolution = next(found for found in self._pictures if found.count).side()

    def _path(self, index: int) -> Path:
        part = bisect_right(self._starts, index) - 1
        return self._pictures[part].path(index - self._starts[part])

    def where(self, index: int) -> str:
        """The sample in words, for messages: its file."""
        return str(self._path(index))

    def read(self, index: int, *, positive: bool = False) -> bytes:
        """The picture's file as it is.

        Raises:
            DatasetError: it is absent or cannot be read, or a positive is asked for: samples hold none.
        """
        if positive:
            raise DatasetError(f"{self.where(index)}: published samples hold no positives")
        path = self._path(index)
        try:
            return path.read_bytes()
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read ({error.strerror or error}); {self.remedy}") from None

    def fingerprint(self) -> str:
        """A checksum of the arrays, and of all pictures' names, sizes and times of change."""
        if not self._fingerprint:
            parts = [self.files.checksum(self._arrays()), *(found.stamp() for found in self._pictures)]
            self._fingerprint = hashlib.sha256(" ".join(parts).encode()).hexdigest()
        return self._fingerprint

    @abstractmethod
    def _arrays(self) -> Sequence[str]:
        """The files that the latents come from."""

"""The published datasets, read in place as they were downloaded and unpacked.

They are used like `Ident3D`: item i is (picture, latents), the picture a uint8 tensor (3, H, W), the latents a float32
tensor in the unit cube. A transform is given that tensor, so torchvision's v2 transforms work as they are; the old
`ToTensor`, which expects a PIL image, is not needed.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from ident3d.datasets.layouts import MANIFEST, Layout, SplitFiles, is_there, unit_cube
from ident3d.datasets.multimodal import Multimodal3DIdent
from ident3d.datasets.published_base import CLASSES, Normalize, PictureFolders, Published, Root, joined
from ident3d.datasets.records import RECORDS
from ident3d.datasets.serving import Array, Transform
from ident3d.datasets.temporal import TemporalCausal3DIdent
from ident3d.errors import DatasetError, SpecError
from ident3d.factors import Categorical

__all__ = [
    "Causal3DIdent",
    "Multimodal3DIdent",
    "TemporalCausal3DIdent",
    "ThreeDIdent",
    "detect_layout",
    "open_published",
]

_PART = (("images", ""), ("raw_latents", ".npy"), ("latents", ".npy"))


class _Parts(PictureFolders):
    """Files as 3DIdent has them, once or once a class: images<suffix>, raw_latents<suffix>.npy, latents<suffix>.npy."""

    reloaded = (*Published.reloaded, "_published")
    _published: list[Array]

    def _suffixes(self, path: Path) -> list[str]:
        return [""]

    def _needed(self, path: Path) -> Sequence[str]:
        return [f"{name}{s}{end}" for s in self._suffixes(path) for name, end in _PART]

    def _load(self) -> None:
        suffixes, width = self._suffixes(self.files.path), len(self.table)
        self._raw = [self.files.array(f"raw_latents{s}.npy", width) for s in suffixes]
        self._published = [self.files.array(f"latents{s}.npy", width) for s in suffixes]
        for s, raw, published in zip(suffixes, self._raw, self._published, strict=True):
            if len(raw) != len(published):
                path = self.files.path / f"latents{s}.npy"
                raise DatasetError(f"{path}: has {len(published):,} rows, but raw_latents{s}.npy has {len(raw):,}")
        parts = [
            unit_cube(raw, -1.0, 1.0, self.table.names, self.files.path / f"raw_latents{s}.npy")
            for s, raw in zip(suffixes, self._raw, strict=True)
        ]
        self.latents = np.ascontiguousarray(np.concatenate(parts)[:, self.columns.columns])
        self.categories = np.zeros((len(self.latents), 0), np.int64)

    def _open_pictures(self) -> None:
        suffixes = self._suffixes(self.files.path)
        parts = zip(suffixes, self._raw, strict=True)
        self._number([(f"images{s}", len(raw), f"raw_latents{s}.npy") for s, raw in parts])

    @property
    def published_latents(self) -> Array:
        """The latents as the renderer used them, (N, 10), as stored: Blender units and radians."""
        return joined(self._published)

    def extras(self) -> dict[str, Array | bytes]:
        """What a conversion keeps besides: raw_latents.npy, and latents.npy as published_latents.npy."""
        kept: dict[str, Array | bytes] = {}
        for s, raw, published in zip(self._suffixes(self.files.path), self._raw, self._published, strict=True):
            kept |= {f"raw_latents{s}.npy": raw, f"published_latents{s}.npy": published}
        return kept

    def _arrays(self) -> Sequence[str]:
        return [f"raw_latents{s}.npy" for s in self._suffixes(self.files.path)]


class ThreeDIdent(_Parts):
    """3DIdent, one split: item i is (picture, latents); 250,000 and 25,000 pictures of 224 x 224 px.

    Of Zimmermann et al. 2021 (Contrastive Learning Inverts the Data Generating Process, ICML; appendix A.4): one teapot
    under a spotlight.

    `root` holds `{train,test}/{images/*.png, raw_latents.npy, latents.npy}`, or one folder that does, e.g. `3dident`.
    The latents are ten factors in the unit cube, u = (raw + 1) / 2 of the published raw coordinate; `data.factors` has
    their physical ranges in Blender units and radians. A third of the object's hues cannot be told from the published
    pictures: the scene `3dident-v1` says why.

    Args:
        root, split, transform, target_transform, download, factors, cache, normalize, on_error: as for `Published`; a
            transform is given a uint8 tensor (3, H, W).

    Attributes:
        latents: float32 (N, 10), in the unit cube.
        raw_latents: (N, 10) in [-1, 1] as stored, mapped.
        published_latents: (N, 10) as the renderer used them, mapped.

    Raises:
        DatasetError: a file that is absent, damaged, or disagrees with the others; latents that are not (N, 10) in
            [-1, 1]. The text names file, finding and what was expected.
        DownloadError: with `download=True`, files that cannot be fetched.
        SpecError: an unknown factor, or an option out of range.
    """

    title, url, citation = (RECORDS["3dident"].title, RECORDS["3dident"].page, RECORDS["3dident"].citation)
    splits = ("train", "test")
    layout = Layout("3dident", title, {s: (s,) for s in ("train", "val", "test")}, ("raw_latents.npy", "latents.npy"))


class Causal3DIdent(_Parts):
    """Causal3DIdent, one split: item i is (picture, latents); 250,000 and about 25,000 pictures of 224 x 224 px.

    Of von Kügelgen et al. 2021 (Self-Supervised Learning with Data Augmentations Provably Isolates Content from Style,
    NeurIPS): seven classes of objects; class and latents depend on each other.

    `root` holds `{trainset,testset}/{raw_latents_K.npy, latents_K.npy, images_K/*.png}` for the classes K = 0 to 6:
    teapot, hare, dragon, cow, armadillo, horse, head. Samples of class 0 come first, then those of 1, and so on;
    classes whose files are all absent are left out. Positive pairs share their class unless `within=()` is asked for.

    Args:
        root, split, transform, target_transform, download, factors, cache, normalize, on_error: as for `Published`;
            `trainset` and `testset` are splits, too.
        classes: names or numbers of the classes wanted; all that are there by default.

    Attributes:
        latents: float32 (N, 10), in the unit cube: the factors of 3DIdent, u = (raw + 1) / 2.
        categories: int64 (N, 1): the class, 0 to 6.
        classes: the names of the classes that are served.
        raw_latents: (N, 10) in [-1, 1] as stored; put together from the classes when asked for.
        published_latents: (N, 10) as the renderer used them.

    Raises:
        DatasetError, DownloadError, SpecError: as for `ThreeDIdent`; a class that is asked for and absent.
    """

    title, url = RECORDS["causal3dident"].title, RECORDS["causal3dident"].page
    citation = RECORDS["causal3dident"].citation
    splits = ("train", "test")
    layout = Layout(
        "causal3dident",
        title,
        {s: (f"{s}set", s) for s in ("train", "val", "test")},
        tuple(f"{name}_{k}{end}" for k in range(len(CLASSES)) for name, end in _PART[1:]),
    )
    categorical = (Categorical("class", CLASSES, "shape of the object"),)

    def __init__(
        self,
        root: Root,
        split: str = "train",
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        download: bool = False,
        *,
        classes: Iterable[str | SupportsIndex] | None = None,
        factors: Iterable[str] | None = None,
        cache: str = "none",
        normalize: Normalize = False,
        on_error: str = "raise",
    ) -> None:
        self._asked = _class_numbers(classes)
        options: dict[str, Any] = {"factors": factors, "cache": cache, "normalize": normalize, "on_error": on_error}
        super().__init__(root, split, transform, target_transform, download, **options)

    def _suffixes(self, path: Path) -> list[str]:
        return [f"_{k}" for k in (self._asked or _classes_in(path) or [0])]

    def _missing(self, files: SplitFiles, name: str) -> DatasetError:
        there = ", ".join(CLASSES[k] for k in _classes_in(files.path)) or "none"
        return DatasetError(f"{files.missing(name)}; classes that are there: {there}")

    def _load(self) -> None:
        super()._load()
        numbers = [int(s[1:]) for s in self._suffixes(self.files.path)]
        self.classes = tuple(CLASSES[k] for k in numbers)
        self.categories = np.repeat(np.array(numbers, np.int64), [len(raw) for raw in self._raw])[:, None]

    def _writable(self) -> Path:
        # Indices of some classes' latents must not take the place of those of all.
        folder = super()._writable()
        return folder / f".classes-{'-'.join(map(str, self._asked))}" if self._asked else folder

    def _sibling(self, split: str) -> Published:
        return type(self)(self.folder, split, classes=self._asked, on_error=self.on_error)

    def _describe(self) -> list[str]:
        return [f"classes: {', '.join(self.classes)}"]


def _classes_in(path: Path) -> list[int]:
    """The classes of which any file is there."""
    return [k for k in range(len(CLASSES)) if any(is_there(path / f"{name}_{k}{end}") for name, end in _PART)]


def _class_numbers(classes: Iterable[str | SupportsIndex] | None) -> list[int] | None:
    if classes is None:
        return None
    if isinstance(classes, str):
        raise SpecError(f"classes={classes!r}: expected a list of names or numbers, e.g. [{classes!r}]")
    numbers = [_class_number(given) for given in classes]
    if not numbers or len(set(numbers)) < len(numbers):
        raise SpecError(f"classes={[CLASSES[k] for k in numbers]}: expected at least one class, and none twice")
    return sorted(numbers)


def _class_number(given: object) -> int:
    if isinstance(given, str) and given in CLASSES:
        return CLASSES.index(given)
    if (
        isinstance(given, SupportsIndex)
        and not isinstance(given, bool)
        and operator.index(given) in range(len(CLASSES))
    ):
        return operator.index(given)
    shown = ", ".join(f"{k} {name}" for k, name in enumerate(CLASSES))
    raise SpecError(f"classes: {given!r} is none; expected names or numbers out of {shown}")


READERS: tuple[type[Published], ...] = (ThreeDIdent, Causal3DIdent, Multimodal3DIdent, TemporalCausal3DIdent)


def detect_layout(root: Root) -> type[Published] | None:
    """The class that reads a folder, or the one folder in it that holds a published dataset; None where none does.

    Raises:
        DatasetError: it holds several datasets.
    """
    folder = Path(root)
    found = [(base, reader) for reader in READERS for base in reader.layout.bases(folder)]
    found = [(base, reader) for base, reader in found if base == folder] or found
    if len({reader for _, reader in found}) > 1:
        shown = ", ".join(f"{reader.title} in {base.name}" for base, reader in found)
        raise DatasetError(f"{root}: holds several published datasets: {shown}; name the folder of one")
    return found[0][1] if found else None


def open_published(root: Root, split: str = "train", **options: Any) -> Published:
    """A split of whichever published dataset a folder holds.

    Args:
        root: the folder, or the one above it.
        split: train, val or test.
        options: as for its class.

    Raises:
        DatasetError: it holds none or several; whatever its class raises.
    """
    reader = detect_layout(root)
    if reader is not None:
        return reader(root, split, **options)
    if not Path(root).is_dir():
        raise DatasetError(f"{os.fspath(root)}: no such folder")
    if is_there(Path(root) / MANIFEST):
        raise DatasetError(f"{root}: holds {MANIFEST}: a dataset in ident3d's own format; open it with Ident3D")
    looked = ", ".join(f"{reader.layout.wanted()} ({reader.title})" for reader in READERS)
    raise DatasetError(f"{root}: none of the published layouts: looked there and in each folder in it for {looked}")

"""From shards back to a published layout: one split, that appears under its name when it is whole."""

from __future__ import annotations

import math
import os
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ident3d.codecs import decode
from ident3d.conversion.encoding import BadPicture, encode
from ident3d.conversion.plan import SHARDS, ConversionPlan
from ident3d.conversion.sources import Extra, ShardSource, Source
from ident3d.conversion.workers import Workers
from ident3d.datasets.layouts import Layout
from ident3d.datasets.published import (
    Causal3DIdent,
    Multimodal3DIdent,
    TemporalCausal3DIdent,
    ThreeDIdent,
)
from ident3d.errors import DatasetError
from ident3d.factors import FACTORS
from ident3d.files import npy_bytes, sync_folder, write_atomic

__all__ = ["PublishedSplit", "computed_arrays", "published_layout"]

LAYOUTS = {
    reader.layout.name: reader.layout
    for reader in (ThreeDIdent, Causal3DIdent, Multimodal3DIdent, TemporalCausal3DIdent)
}
FILE_BLOCK = 4096
"""What a file takes is a multiple of this on most file systems."""

TIME = (1980, 1, 1, 0, 0, 0)
"""Of the members of an .npz: none, so that equal arrays are equal bytes."""


def published_layout(source: Source) -> Layout:
    """The published layout that a dataset in shards can be written in.

    Raises:
        DatasetError: none, or it is in one already.
    """
    root = source.data.root
    if not isinstance(source, ShardSource):
        raise DatasetError(f"{root}: is in a published layout already; expected a dataset in shards (dataset.json)")
    record = source.data.manifest.source
    if record is not None and record.layout != SHARDS:
        if record.layout not in LAYOUTS:
            raise DatasetError(f"{root}: was converted from {record.layout!r}, a layout that this ident3d cannot write")
        return LAYOUTS[record.layout]
    table = [(f.name, f.low, f.high) for f in source.data.columns]
    if table != [(f.name, f.low, f.high) for f in FACTORS] or source.data.categorical:
        names = ", ".join((*source.data.columns.names, *(kind.name for kind in source.data.categorical)))
        raise DatasetError(
            f"{root}: has no published layout: 3DIdent's holds its ten factors over their published ranges and nothing "
            f"else, this one has {names}; `ident3d info` shows their ranges"
        )
    return LAYOUTS["3dident"]


class PublishedSplit:
    """Writes one split in a published layout.

    All grows in a hidden folder and is moved to its name when it is whole. What an earlier call wrote there is read
    and compared with what belongs there, not trusted, so that no file need be synced by itself: of 250,000 that would
    take hours. All are synced at once before the folder gets its name.

    Args:
        source: the split.
        plan: the conversion's.
        out: the folder of the result.
        work: the split's working folder.
        workers: threads that encode and write.

    Attributes:
        place: the folder or file that the split becomes.
        tree: the hidden folder that it grows in.
        done: samples that are written.
    """

    def __init__(self, source: ShardSource, plan: ConversionPlan, out: Path, work: Path, workers: Workers) -> None:
        self.source, self.plan, self.workers = source, plan, workers
        self.layout = published_layout(source)
        self.place = out / self.layout.places[plan.split][0]
        self.tree = work / "tree"
        self.done = 0
        self.form = "keep-png" if plan.format == "keep" and source.stored_as == "png" else "png"

    def size(self, index: int) -> int:
        """The bytes that a sample takes.

        Raises:
            DatasetError: it is damaged.
        """
        if self.layout.name == TemporalCausal3DIdent.layout.name:
            return 3 * self.plan.resolution**2
        size = len(encode(self.source.data.read(index), self.form, self.plan.resolution).data)
        return -(-size // FILE_BLOCK) * FILE_BLOCK

    def run(self, bar: tqdm[Any]) -> None:
        """Write the split.

        Raises:
            DatasetError: a damaged sample, or an array that a conversion kept is absent or altered.
            OSError: the disk is full.
        """
        if self.source.pairs:
            warnings.warn(
                f"{self.source.data.root}, split {self.plan.split}: the published layout has no place for positives; "
                "the anchors alone are written",
                stacklevel=5,
            )
        self.tree.mkdir(exist_ok=True)
        if self.layout.name == TemporalCausal3DIdent.layout.name:
            made = self.tree / self.place.name
            self.write_npz(made, bar)
        else:
            made = self.tree / "split"
            self.write_folder(made, bar)
            os.sync()
        os.replace(made, self.place)
        sync_folder(self.place.parent)

    def write_folder(self, folder: Path, bar: tqdm[Any]) -> None:
        """Pictures in numbered files, and the arrays."""
        for name, content in self.arrays().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / name, content if isinstance(content, bytes) else npy_bytes(content))
        names = PictureNames(self.source, self.layout)
        for name in names.folders:
            (folder / name).mkdir(exist_ok=True)
        expected = range(self.plan.samples)
        for index, future in self.workers.in_order(lambda i: self.write_picture(i, folder / names[i]), expected):
            future.result()
            self.done = index + 1
            bar.update()

    def write_picture(self, index: int, path: Path) -> None:
        """One picture, unless it is there.

        Raises:
            DatasetError: it is damaged.
        """
        stored = self.source.data.read(index)
        if path.exists() and self.is_same(path, stored):
            return
        try:
            path.write_bytes(encode(stored, self.form, self.plan.resolution).data)
        except BadPicture as error:
            raise self.damaged(index, error) from None

    def is_same(self, path: Path, stored: bytes) -> bool:
        """Whether a file that an earlier call wrote is what belongs there."""
        there = path.read_bytes()
        if self.form == "keep-png":
            return there == stored
        try:
            return np.array_equal(decode(there), decode(stored))
        except (OSError, SyntaxError, ValueError):
            return False

    def damaged(self, index: int, error: Exception) -> DatasetError:
        """The error of a damaged sample."""
        return DatasetError(
            f"{self.source.data.where(index)}: {error}; {self.source.data.remedy}, then run the same command to go on"
        )

    def arrays(self) -> dict[str, Extra]:
        """The arrays and tables of the layout, by their path in the split's folder or their name in its .npz.

        Raises:
            DatasetError: one that the conversion kept is absent or altered.
        """
        record = self.source.data.manifest.source
        if record is None or record.layout == SHARDS:
            return computed_arrays(self.source.data.latents)
        kept = self.source.extras()
        match self.layout.name:
            case Multimodal3DIdent.layout.name:
                names = {"latents_image.csv": "latents_image.csv", "latents_text.csv": "latents_text.csv"}
                names["text/text_raw.txt"] = "text_raw.txt"
            case TemporalCausal3DIdent.layout.name:
                names = {name: f"{name}.npy" for name in ("raw_latents", "shape_latents", "interventions")}
            case _:
                names = {name.removeprefix("published_"): name for name in kept}
        missing = [name for name in names.values() if name not in kept]
        if missing or not names:
            raise DatasetError(
                f"{self.source.data.root}: split {self.plan.split} holds no {', '.join(missing) or 'arrays'} among its "
                "extras; convert its source again"
            )
        return {name: kept[found] for name, found in names.items()}

    def write_npz(self, path: Path, bar: tqdm[Any]) -> None:
        """Frames and arrays in one file, frame by frame; what an earlier call wrote is begun again."""
        side, count = self.plan.resolution, self.plan.samples
        with open(path, "wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, array in self.arrays().items():
                    assert not isinstance(array, bytes)
                    with _member(archive, name) as stream:
                        stream.write(npy_bytes(array))
                with _member(archive, "imgs") as stream:
                    header = {"descr": "|u1", "fortran_order": False, "shape": (count, side, side, 3)}
                    np.lib.format.write_array_header_1_0(stream, header)  # type: ignore[no-untyped-call]
                    for frame in self.frames():
                        stream.write(frame.tobytes())
                        self.done += 1
                        bar.update()
            file.flush()
            os.fsync(file.fileno())

    def frames(self) -> Iterator[NDArray[np.uint8]]:
        """All frames, in order.

        Raises:
            DatasetError: one is damaged.
        """
        for _, future in self.workers.in_order(self.source.data.pixels, range(self.plan.samples)):
            yield future.result()


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(zipfile.ZipInfo(f"{name}.npy", TIME), "w", force_zip64=True)


class PictureNames:
    """The files of a split's pictures, by number, relative to its folder.

    Args:
        source: the split.
        layout: whose.

    Attributes:
        folders: that they lie in, those without a picture too.
    """

    def __init__(self, source: ShardSource, layout: Layout) -> None:
        count = len(source.data)
        self._suffixes, self._part, self._number = [""], np.zeros(count, np.int64), np.arange(count)
        self.folders = ["images"]
        if layout.name == Causal3DIdent.layout.name:
            # Numbered within their class, in the order in which the samples come.
            self._part = source.data.categories[:, 0]
            self._suffixes = [f"_{k}" for k in range(len(source.data.categorical[0].labels))]
            for k in range(len(self._suffixes)):
                mine = self._part == k
                self._number[mine] = np.arange(mine.sum())
            self.folders = [f"images{s}" for s in self._suffixes if f"raw_latents{s}.npy" in source.entry.extras]
        counts = np.bincount(self._part, minlength=len(self._suffixes)).tolist()
        self._digits = [math.ceil(math.log10(max(n, 2))) for n in counts]

    def __getitem__(self, index: int) -> str:
        part = int(self._part[index])
        return f"images{self._suffixes[part]}/{int(self._number[index]):0{self._digits[part]}d}.png"


def computed_arrays(latents: NDArray[np.float32]) -> dict[str, Extra]:
    """The arrays of 3DIdent for latents that were drawn here.

    raw = 2 u - 1 as float32 where u comes back from it for every element, as of drawn latents (multiples of 2^-24);
    else as float64. The other array is raw times half the factor's range, in float32, as in the published files.
    """
    raw = 2 * latents.astype(np.float64) - 1
    short = raw.astype(np.float32)
    half = np.array([f.high for f in FACTORS], np.float32)
    if np.array_equal(((short.astype(np.float64) + 1) / 2).astype(np.float32), latents):
        return {"raw_latents.npy": short, "latents.npy": short * half}
    return {"raw_latents.npy": raw, "latents.npy": (raw * half).astype(np.float32)}

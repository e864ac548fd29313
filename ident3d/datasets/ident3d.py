"""Ident3D: a rendered dataset as a torch dataset with random access."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from ident3d.errors import DatasetError
from ident3d.factors import Factors
from ident3d.files import read_npy
from ident3d.shards.manifest import Manifest, SplitEntry, read_manifest
from ident3d.shards.reader import SplitReader
from ident3d.shards.summary import decode

if TYPE_CHECKING:
    from ident3d.datasets.streaming import Ident3DStream

__all__ = ["Ident3D", "to_tensor"]

Transform = Callable[[Any], Any]
Array = np.ndarray[Any, Any]


def to_tensor(pixels: UInt8[Array, "height width 3"]) -> UInt8[Tensor, "3 height width"]:
    """Pixels as a torch picture: channels first, uint8, the same memory."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


class Ident3D(Dataset[tuple[Any, Any]]):
    """One split of a dataset made by `ident3d render`; item i is (picture, latents).

    The picture is a uint8 tensor (3, H, W), the latents a float32 tensor (factors,) in the unit cube. Pictures are read
    from the shards by offset; nothing is unpacked. Safe under fork and spawn workers; pickles without open handles.

    Args:
        root: the dataset's folder.
        split: train, val or test.
        transform: applied to the picture.
        target_transform: applied to the latents.
        factors: names of the factors wanted, in the order wanted; all ten by default.

    Attributes:
        root, split, transform, target_transform: as given.
        manifest: what the dataset is (`dataset.json`).
        factors: the factors in the targets' columns.
        latents: all latents of the split, float32 (N, factors). Reading them decodes nothing.

    Raises:
        DatasetError: no dataset there, an unfinished or damaged one, a newer format, or no such split.
        SpecError: an unknown factor.

    Example:
        >>> data = Ident3D("demo/64px", factors=["object_x", "object_hue"])  # doctest: +SKIP
        >>> picture, latents = data[0]  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        factors: Iterable[str] | None = None,
    ) -> None:
        self.root = Path(root)
        self.split = split
        self.transform = transform
        self.target_transform = target_transform
        self.manifest: Manifest = read_manifest(self.root)
        if split not in self.manifest.splits:
            have = ", ".join(self.manifest.splits)
            raise DatasetError(f"{self.root}: no split {split!r}; it has {have}")
        self.factors: Factors = self.manifest.factor_table.select(factors)
        self._reader = SplitReader(self.root / split, self.entry)
        self.latents: Float[Array, "samples factors"] = self._load_latents()

    @property
    def entry(self) -> SplitEntry:
        """The split's entry in the manifest: sample count, checksums, pixel statistics."""
        return self.manifest.splits[self.split]

    @property
    def mean(self) -> tuple[float, float, float]:
        """Mean of all pixels of the split per channel, in [0, 1]."""
        return self.entry.mean

    @property
    def std(self) -> tuple[float, float, float]:
        """Standard deviation over all pixels of the split per channel, in [0, 1]."""
        return self.entry.std

    def _load_latents(self) -> Float[Array, "samples factors"]:
        path = self.root / self.split / "latents.npy"
        try:
            stored = read_npy(path, mapped=True)
        except (OSError, ValueError) as error:
            raise DatasetError(f"{path}: missing or damaged ({error}); run `ident3d verify --repair`") from None
        columns = self.manifest.factor_table
        if stored.shape != (self.entry.samples, len(columns)) or stored.dtype != np.float32:
            expected = f"float32 ({self.entry.samples}, {len(columns)})"
            raise DatasetError(f"{path}: holds {stored.dtype} {stored.shape}, expected {expected}")
        return np.ascontiguousarray(stored[:, self.factors.columns])

    def __len__(self) -> int:
        return self.entry.samples

    def __getitem__(self, index: SupportsIndex) -> tuple[Any, Any]:
        """Sample `index`; negative indices count from the end.

        Raises:
            IndexError: no such sample.
            DatasetError: its shard is absent or truncated, or its picture does not decode; the text names the file.
        """
        place = operator.index(index)
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        picture: Any = self._picture(place)
        target: Any = torch.from_numpy(self.latents[place].copy())
        if self.transform is not None:
            picture = self.transform(picture)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return picture, target

    def _picture(self, index: int) -> UInt8[Tensor, "3 height width"]:
        data = self._reader.picture(index)
        try:
            return to_tensor(decode(data))
        except (OSError, SyntaxError, ValueError) as error:
            where = self._reader.where(index)
            raise DatasetError(
                f"{where}: the picture does not decode ({error}); run `ident3d verify --repair`"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["latents"]  # read again by the receiver, rather than copied to every worker
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.latents = self._load_latents()

    def stream(self, *, shuffle: bool = True, seed: int = 0, buffer: int = 1000) -> Ident3DStream:
        """The same samples as an IterableDataset that reads whole shards in order: see `Ident3DStream`."""
        from ident3d.datasets.streaming import Ident3DStream

        return Ident3DStream(self, shuffle=shuffle, seed=seed, buffer=buffer)

    def __repr__(self) -> str:
        m = self.manifest
        shards = f"{len(self.entry.shards)} shard{'s' if len(self.entry.shards) > 1 else ''}"
        lines = [
            f"Ident3D {m.name!r}, split {self.split!r}: {len(self):,} samples of {m.resolution} x {m.resolution} px",
            f"    root: {self.root} ({shards}, {sum(s.bytes for s in self.entry.shards) / 1e6:,.1f} MB)",
            f"    rendered: quality {m.quality}, Blender {m.versions['blender']}, {m.device}, seed {self.entry.seed}",
            f"    factors: {', '.join(self.factors.names)}",
        ]
        lines += [f"    {name}: {t!r}" for name in ("transform", "target_transform") if (t := getattr(self, name))]
        return "\n".join(lines)

"""Ident3D: a rendered dataset as a torch dataset with random access."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from jaxtyping import Float
from torch.utils.data import Dataset

from ident3d.datasets.split import Array, ShardedSplit, Transform
from ident3d.errors import DatasetError
from ident3d.files import read_npy
from ident3d.shards.reader import SplitReader

if TYPE_CHECKING:
    from ident3d.datasets.batches import PairLoader
    from ident3d.datasets.streaming import Ident3DStream
    from ident3d.distributions import Distribution

__all__ = ["Ident3D"]


class Ident3D(ShardedSplit, Dataset[tuple[Any, Any]]):
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
        pair_latents: those of the positives, likewise, where the split was rendered with `--pairs`; else None.

    Raises:
        DatasetError: no dataset there, an unfinished or damaged one, a newer format, or no such split.
        SpecError: an unknown factor.

    Example:
        >>> data = Ident3D("teapots", factors=["object_x", "object_hue"])
        >>> picture, latents = data[0]
        >>> picture.shape, latents.shape, data.latents.shape
        (torch.Size([3, 16, 16]), torch.Size([2]), (24, 2))
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        factors: Iterable[str] | None = None,
    ) -> None:
        super().__init__(root, split, transform, target_transform, factors)
        self._reader = SplitReader(self.folder, self.entry)
        self._load_latents()

    def _load_latents(self) -> None:
        self.latents: Float[Array, "samples factors"] = self._read_latents("latents.npy")
        self.pair_latents: Float[Array, "samples factors"] | None = None
        if self.has_pairs:
            self.pair_latents = self._read_latents("pair.latents.npy")

    def _read_latents(self, name: str) -> Float[Array, "samples factors"]:
        path = self.folder / name
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
        place = self._place(index)
        return self.item(self._reader.picture(place), self.latents[place].copy(), lambda: self._reader.where(place))

    def _place(self, index: SupportsIndex) -> int:
        place = operator.index(index)
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        return place

    @property
    def has_pairs(self) -> bool:
        """Whether each sample holds a positive pair, rendered with `--pairs`."""
        return bool(self.entry.pairs)

    def pair(self, index: SupportsIndex) -> tuple[Any, Any, Any, Any]:
        """The positive pair (x, x~, z, z~) that sample `index` was rendered with.

        Raises:
            IndexError: no such sample.
            DatasetError: the split was not rendered with pairs, or what `__getitem__` raises.
        """
        if self.pair_latents is None:
            raise DatasetError(f"{self.folder}: holds no pairs; they come from `ident3d render --pairs CONDITIONAL`")
        place = self._place(index)
        x, z = self[place]
        encoded, latents = self._reader.picture(place, member=2), self.pair_latents[place].copy()
        positive, z_positive = self.item(encoded, latents, lambda: f"{self._reader.where(place)}, positive")
        return x, positive, z, z_positive

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["latents"], state["pair_latents"]  # read again by the receiver, not copied to every worker
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load_latents()

    def stream(self, *, shuffle: bool = True, seed: int = 0, buffer: int = 1000) -> Ident3DStream:
        """The same samples as an IterableDataset that reads whole shards in order: see `Ident3DStream`."""
        from ident3d.datasets.streaming import Ident3DStream

        return Ident3DStream(
            self.root,
            self.split,
            self.transform,
            self.target_transform,
            self.factors.names,
            shuffle=shuffle,
            seed=seed,
            buffer=buffer,
        )

    def pairs(
        self, conditional: str | Distribution | None = None, *, batch_size: int, seed: int = 0, **options: Any
    ) -> PairLoader:
        """A DataLoader of positive pairs (x, x~, z, z~), the same for the same seed: see `pair_loader`.

        Args:
            conditional: p(z~ | z), e.g. `normal(scale=0.05)`: z~ is matched to the nearest stored sample. None for the
                pairs that the dataset was rendered with, or with `share`, `change` or `views`.
            batch_size: pairs a batch.
            seed: what the batches are drawn from.
            options: `share=["object_hue"]`, `change=1` or `views=ident3d.simclr(64)`; `match="hnsw"` and other options
                of `PairSampler`; num_workers and other options of DataLoader.

        Raises:
            SpecError: no pairs to serve, or what `PairSampler` refuses.

        Example:
            >>> pairs = Ident3D("teapots").pairs("laplace(scale=0.05)", batch_size=8, seed=1)
            >>> x, positive, z, z_positive = next(iter(pairs))
            >>> x.shape, z.shape
            (torch.Size([8, 3, 16, 16]), torch.Size([8, 10]))
        """
        from ident3d.datasets.pairs import pair_loader

        return pair_loader(self, conditional, batch_size=batch_size, seed=seed, **options)

    def __repr__(self) -> str:
        return f"Ident3D {self.describe()}"

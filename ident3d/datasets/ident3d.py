"""Ident3D: a rendered or converted dataset as a torch dataset with random access."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int64

from ident3d.datasets.dataset import PictureDataset
from ident3d.datasets.serving import Array, Transform
from ident3d.datasets.split import ShardedSplit
from ident3d.errors import DatasetError
from ident3d.files import read_npy
from ident3d.shards.reader import SplitReader

if TYPE_CHECKING:
    from ident3d.datasets.streaming import Ident3DStream

__all__ = ["MAPPED_BYTES", "Ident3D"]

MAPPED_BYTES = 1 << 30
"""Latents and categories of more bytes are mapped from their files, read-only, and not copied into memory.

Smaller ones are copied, since torch warns when it is given an array that is read-only, and a user may write into them.
"""


class Ident3D(ShardedSplit, PictureDataset):
    """One split of a dataset made by `ident3d render` or `ident3d convert`; item i is (picture, latents).

    The picture is a uint8 tensor (3, H, W), the latents a float32 tensor (factors,) in the unit cube. Where samples
    have a text (converted from Multimodal3DIdent), item i is (picture, text, latents). Pictures are read from the
    shards by offset; nothing is unpacked. Safe under fork and spawn workers; pickles without open handles.

    Args:
        root: the dataset's folder, or its URL (`hf://datasets/user/name`, `https://...`, `s3://...`): shards are
            fetched whole when they are first needed, checked, and kept in the cache folder.
        split: train, val or test.
        transform: applied to the picture.
        target_transform: applied to the latents.
        factors: names of the factors wanted, in the order wanted; all by default.
        cache: `none`, or decoded pictures in `ram` or on `disk`, so that no epoch decodes: see `DecodedStore`.
        normalize: give pictures as float32, (x / 255 - mean) / std: by the training split's statistics, which the
            manifest has, or by (mean, std) as given.
        on_error: `raise` at a damaged picture, or `skip` it: count it, warn of it, and leave it out of its batch.

    Attributes:
        root, split, transform, target_transform, normalize, on_error: as given.
        manifest: what the dataset is (`dataset.json`).
        latents: all latents of the split, float32 (N, factors). Reading them decodes nothing. Past 1 GB they are mapped
            from their file, read-only, and take no memory until they are read; a choice of factors, or another order
            of them, is a copy in memory at any size, 4 bytes a number.
        categories: numbers of labels, int64 (N, categorical factors); most datasets have none.
        factors: the factors, and by name all samples' values: see `FactorTable`.
        pair_latents: those of the positives, where the split was rendered with `--pairs`, kept as `latents` are. Of
            frames in order of time those of the next frame, the last one's own in its place, always a copy. Else None.

    Raises:
        DatasetError: no dataset there, an unfinished or damaged one, a newer format, or no such split.
        DownloadError: a URL that cannot be read.
        SpecError: an unknown factor, or an option out of range.

    Example:
        >>> data = Ident3D("teapots", factors=["object_x", "object_hue"])
        >>> picture, latents = data[0]
        >>> picture.shape, latents.shape, data.latents.shape
        (torch.Size([3, 16, 16]), torch.Size([2]), (24, 2))
        >>> pairs = Ident3D("teapots").pairs("laplace(scale=0.05)", batch_size=8, seed=1)
        >>> x, positive, z, z_positive = next(iter(pairs))
        >>> x.shape, z.shape
        (torch.Size([8, 3, 16, 16]), torch.Size([8, 10]))
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        factors: Iterable[str] | None = None,
        *,
        cache: str = "none",
        normalize: bool | Sequence[Sequence[float]] = False,
        on_error: str = "raise",
    ) -> None:
        PictureDataset.__init__(self, transform, target_transform, normalize, on_error)
        ShardedSplit.__init__(self, root, split, factors)
        self._reader = SplitReader(self.files, self.entry)
        self.consecutive = self.entry.consecutive
        self._load_arrays()
        self.open_cache(cache)

    def _load_arrays(self) -> None:
        entry = self.entry
        self.latents: Float[Array, "samples factors"] = self._latents("latents.npy", entry.latents_sha256)
        self.pair_latents: Float[Array, "samples factors"] | None = None
        if entry.pairs:
            self.pair_latents = self._latents("pair.latents.npy", entry.pair_latents_sha256)
        elif entry.consecutive:
            self.pair_latents = np.concatenate([self.latents[1:], self.latents[-1:]])
        self.categories: Int64[Array, "samples categorical"] = np.zeros((entry.samples, 0), np.int64)
        if self.categorical:
            stored = self._read_array("categories.npy", entry.categories_sha256, np.int64, len(self.categorical))
            self.categories = stored if stored.nbytes > MAPPED_BYTES else np.array(stored)

    def _latents(self, name: str, sha256: str) -> Float[Array, "samples factors"]:
        stored = self._read_array(name, sha256, np.float32, len(self.manifest.factor_table))
        if stored.nbytes > MAPPED_BYTES and np.array_equal(self.columns.columns, np.arange(stored.shape[1])):
            return stored
        return np.take(stored, self.columns.columns, axis=1)

    def _read_array(self, name: str, sha256: str, dtype: type[np.generic], width: int) -> Array:
        path, shown = self.files.path(name, sha256), self.files.text(name)
        try:
            stored: Array = read_npy(path, mapped=True)
        except (OSError, ValueError) as error:
            raise DatasetError(f"{shown}: missing or damaged ({error}); {self.remedy}") from None
        if stored.shape != (self.entry.samples, width) or stored.dtype != dtype:
            expected = f"{np.dtype(dtype)} ({self.entry.samples}, {width})"
            raise DatasetError(f"{shown}: holds {stored.dtype} {stored.shape}, expected {expected}")
        return stored

    def where(self, index: int) -> str:
        """The sample in words, for messages: its shard and key."""
        return self._reader.where(index)

    def read(self, index: int, *, positive: bool = False) -> bytes:
        """The encoded picture of sample `index`, 0 to N - 1, or of its positive.

        Raises:
            DatasetError: its shard is absent or truncated.
        """
        if positive and self.entry.consecutive:
            return self._reader.picture(index + 1)
        return self._reader.picture(index, positive=positive)

    def fingerprint(self) -> str:
        """The checksums of all shards, in one."""
        digest = hashlib.sha256()
        for shard in self.entry.shards:
            digest.update(shard.sha256.encode())
        return digest.hexdigest()

    @property
    def has_text(self) -> bool:
        """Whether each sample has a text."""
        return "txt" in self.entry.members

    def text(self, index: int) -> str:
        """The text about sample `index`, where `has_text`."""
        return self._reader.read(index, self.entry.members.index("txt")).decode()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("latents", "pair_latents", "categories"):
            del state[name]  # read again by the receiver, not copied to every worker
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load_arrays()

    def stream(self, *, shuffle: bool = True, seed: int = 0, buffer: int = 1000) -> Ident3DStream:
        """The same samples as an IterableDataset that reads whole shards in order: see `Ident3DStream`."""
        from ident3d.datasets.streaming import Ident3DStream

        return Ident3DStream(
            self.root,
            self.split,
            self.transform,
            self.target_transform,
            self.columns.names,
            normalize=self.normalize,
            on_error=self.on_error,
            shuffle=shuffle,
            seed=seed,
            buffer=buffer,
        )

    def __repr__(self) -> str:
        return f"Ident3D {self.describe()}"

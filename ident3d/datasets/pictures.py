"""Pictures with known factors, by index: what rendered, converted and published datasets have in common."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from ident3d.codecs import decode
from ident3d.datasets.blocks import normalize_into
from ident3d.datasets.serving import Array, Serving, to_tensor
from ident3d.errors import DatasetError
from ident3d.factors import Categorical, Factors, FactorTable

__all__ = ["Pictures", "Store", "sample_of"]


class Store(Protocol):
    """Decoded pictures, wherever they are kept.

    Attributes:
        pixels: all of them, uint8 (pictures, 3, H, W).
        damaged: what is wrong with those that could not be decoded, by number.
    """

    pixels: Array
    damaged: dict[int, str]

    def fill(
        self, data: Any, out: UInt8[Array, "n 3 height width"], places: Sequence[int], *, positive: bool = False
    ) -> list[int]:
        """Put pictures of samples into `out`; see `Pictures.fill`."""

    def picture(self, data: Any, place: int, *, positive: bool = False) -> UInt8[Tensor, "3 height width"]:
        """One picture, the caller's to write into."""


class Pictures(Serving, Dataset[tuple[Any, ...]]):
    """A split of N pictures with their latents; item i is (picture, latents), or (picture, text, latents).

    A subclass sets the attributes below and gives `read` (or `pixels`) and `where`. How samples become items and
    batches is here; what is built on them, from caches to figures, is in `PictureDataset`.

    Attributes:
        name: of the dataset, in words.
        root: its folder or URL.
        split: which part of it.
        resolution: side of the pictures in pixels.
        latents: float32 (N, factors), in the unit cube. Reading them decodes nothing.
        categories: int64 (N, categorical factors): numbers of labels.
        columns: the factors of the latents' columns.
        categorical: the categorical factors.
        pair_latents: those of the positives that samples hold, float32 (N, factors), or None.
        consecutive: whether samples are frames in order of time, so that the positive of sample i is sample i + 1.
        store: the decoded pictures, where they are cached.
        derived: the folder that may keep what is computed from the dataset.
    """

    name: str
    root: Any
    split: str
    resolution: int
    latents: Float[Array, "samples factors"]
    categories: Int64[Array, "samples categorical"]
    columns: Factors
    categorical: tuple[Categorical, ...] = ()
    pair_latents: Float[Array, "samples factors"] | None = None
    derived: Path
    store: Store | None = None
    consecutive = False

    @abstractmethod
    def where(self, index: int) -> str:
        """The sample in words, for messages: its file and number."""

    def read(self, index: int, *, positive: bool = False) -> bytes:
        """The encoded picture of sample `index`, 0 to N - 1, or of the positive that it holds.

        Raises:
            DatasetError: it is absent or cannot be read.
        """
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A text that changes when the split's pictures do: what caches of it are named by."""
        raise NotImplementedError

    def text(self, index: int) -> str:
        """The text about sample `index`, where `has_text`."""
        raise NotImplementedError

    @property
    def has_text(self) -> bool:
        """Whether each sample has a text."""
        return False

    @property
    def origin(self) -> str:
        """Where the pictures come from, in a line."""
        return ""

    @property
    def remedy(self) -> str:
        """What to do about a damaged sample."""
        return "fetch it again, or leave such samples out with on_error='skip'"

    @property
    def factors(self) -> FactorTable:
        """The factors with all samples' values: by position a `Factor`, by name a column, categorical ones included."""
        return FactorTable(self.columns, self.latents, self.categorical, self.categories)

    @property
    def has_pairs(self) -> bool:
        """Whether samples come with a positive of their own."""
        return self.pair_latents is not None

    @property
    def pair_count(self) -> int:
        """How many samples come with a positive of their own, from the first on."""
        if not self.has_pairs:
            return 0
        return len(self) - 1 if self.consecutive else len(self)

    def __len__(self) -> int:
        return len(self.latents)

    def pixels(
        self, index: int, out: UInt8[Array, "height width 3"] | None = None, *, positive: bool = False
    ) -> UInt8[Array, "height width 3"]:
        """The decoded picture of sample `index`, 0 to N - 1.

        Args:
            index: of the sample.
            out: where to put it.
            positive: the positive's that the sample holds, in place of its own.

        Raises:
            DatasetError: it is absent, does not decode, or has another size; the text names file and sample.
        """
        encoded = self.read(index, positive=positive)
        try:
            found = decode(encoded, out)
        except (OSError, SyntaxError, ValueError) as error:
            what = f"{self.where(index)}{', positive' if positive else ''}"
            raise DatasetError(f"{what}: the picture does not decode ({error}); {self.remedy}") from None
        side = self.resolution
        if found.shape != (side, side, 3):
            raise DatasetError(
                f"{self.where(index)}: the picture is {found.shape[1]} x {found.shape[0]} px, expected {side} x {side}"
            )
        return found

    def place(self, index: SupportsIndex) -> int:
        """An index as a number from 0 to N - 1; negative ones count from the end.

        Raises:
            IndexError: no such sample.
        """
        place = operator.index(index)
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        return place

    @property
    def picture_count(self) -> int:
        """How many pictures there are: the samples', and then the positives' that they hold besides."""
        return 2 * len(self) if self.has_pairs and not self.consecutive else len(self)

    def picture_numbers(self, places: Int64[Array, " n"], *, positive: bool = False) -> Int64[Array, " n"]:
        """The numbers of samples' pictures, or of their positives', among all pictures: 0 to `picture_count` - 1."""
        return places + (1 if self.consecutive else len(self)) if positive else places

    def fill(
        self, out: UInt8[Array, "n 3 height width"], places: Sequence[int], *, positive: bool = False
    ) -> list[int]:
        """Put decoded pictures of samples into `out`, one after the other. Any thread may.

        Args:
            out: C-contiguous, a picture for each of `places`.
            places: 0 to N - 1 each.
            positive: the positives' that the samples hold, in place of their own.

        Returns:
            Their positions in `places`: all, but for those that were skipped. `out` holds as many.

        Raises:
            DatasetError: as for `pixels`, with `on_error="raise"`.
        """
        if self.store is not None:
            return self.store.fill(self, out, places, positive=positive)
        kept: list[int] = []
        for k, place in enumerate(places):
            try:
                pixels = self.pixels(place, positive=positive)
            except DatasetError as error:
                self.skip(error)
                continue
            out[len(kept)] = pixels.transpose(2, 0, 1)
            kept.append(k)
        return kept

    def pictures(
        self, places: Sequence[int], *, positive: bool = False
    ) -> tuple[UInt8[Tensor, "n 3 height width"], list[int]]:
        """Decoded pictures of samples, contiguous, and their positions in `places`; see `fill`."""
        side = self.resolution
        block = np.empty((len(places), 3, side, side), np.uint8)
        kept = self.fill(block, places, positive=positive)
        return torch.from_numpy(block[: len(kept)]), kept

    def picture(self, place: int, *, positive: bool = False) -> UInt8[Tensor, "3 height width"]:
        """One decoded picture.

        Raises:
            DatasetError: as for `pixels`, even with `on_error="skip"`: there is no batch to leave it out of.
        """
        if self.store is not None:
            return self.store.picture(self, place, positive=positive)
        return to_tensor(self.pixels(place, positive=positive))

    def sample(self, index: SupportsIndex) -> tuple[Any, Any]:
        """Sample `index` as (picture, latents), transformed; for an item without its text.

        Raises:
            IndexError: no such sample.
            DatasetError: its picture is absent or damaged.
        """
        place = self.place(index)
        return self.finish_picture(self.picture(place)), self.finish_latents(self.latents[place].copy())

    def numbered_samples(self, places: Sequence[int], *, positive: bool = False) -> dict[int, tuple[Any, Any]]:
        """Several samples as by `sample`, by their position in `places`; those that were skipped are absent.

        Args:
            places: 0 to N - 1 each.
            positive: the positives that the samples hold, in place of themselves.
        """
        pictures, kept = self.pictures(places, positive=positive)
        stored = self.pair_latents if positive else self.latents
        assert stored is not None
        rows = stored[[places[k] for k in kept]]  # a copy
        targets = [self.finish_latents(row) for row in rows]
        if self.transform is None and self.normalize is not False:
            block = torch.empty(pictures.shape)
            normalize_into(block.numpy(), pictures.numpy(), self.affine)  # as `normalized`, but in pieces: faster here
            pictures = block
        served = list(pictures.unbind())
        if self.transform is not None:
            served = [self.finish_picture(picture) for picture in served]
        return dict(zip(kept, zip(served, targets, strict=True), strict=True))

    def item(self, place: int, picture: Any, target: Any) -> tuple[Any, ...]:
        """What `data[place]` is, of its finished parts."""
        return (picture, self.text(place), target) if self.has_text else (picture, target)

    def __getitem__(self, index: SupportsIndex) -> tuple[Any, ...]:
        """Sample `index`; negative indices count from the end.

        Raises:
            IndexError: no such sample.
            DatasetError: its picture is absent or damaged; the text names the file.
        """
        return self.item(self.place(index), *self.sample(index))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[tuple[Any, ...]]:
        """Several samples at once, as DataLoader asks for a batch: cut from one block of memory.

        Raises:
            DatasetError: a damaged picture; with `on_error="skip"` only where no sample of the batch is left.
        """
        places = [self.place(i) for i in indices]
        samples = self.numbered_samples(places)
        if places and not samples:
            raise DatasetError(f"{self.root}: every sample of a batch is damaged, the first {self.where(places[0])}")
        return [self.item(places[k], *sample) for k, sample in samples.items()]

    def pair(self, index: SupportsIndex) -> tuple[Any, Any, Any, Any]:
        """The positive pair (x, x~, z, z~) that sample `index` holds.

        Raises:
            IndexError: no such sample, or the last of consecutive frames.
            DatasetError: the samples hold no pairs, or what `sample` raises.
        """
        if self.pair_latents is None:
            raise DatasetError(
                f"{self.root}, split {self.split!r}: holds no pairs; `ident3d render --pairs` makes some"
            )
        place = self.place(index)
        if self.consecutive and place == len(self) - 1:
            raise IndexError(f"index {index}: the last of {len(self)} frames has no next one")
        x, z = self.sample(place)
        positive = self.finish_picture(self.picture(place, positive=True))
        return x, positive, z, self.finish_latents(self.pair_latents[place].copy())


def sample_of(data: Any, index: int) -> tuple[Any, Any]:
    """(picture, latents) of any dataset's sample: what items of ours may hold besides is left aside."""
    found: tuple[Any, Any] = data.sample(index) if isinstance(data, Pictures) else data[index]
    return found

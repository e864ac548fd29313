"""What the datasets over shards have in common: which split, and how a stored sample becomes an item."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ident3d.errors import DatasetError
from ident3d.factors import Factors
from ident3d.shards.manifest import Manifest, SplitEntry, read_manifest
from ident3d.shards.summary import decode

__all__ = ["Array", "ShardedSplit", "Transform", "to_tensor"]

Array = np.ndarray[Any, np.dtype[Any]]
Transform = Callable[[Any], Any]


def to_tensor(pixels: UInt8[Array, "height width 3"]) -> UInt8[Tensor, "3 height width"]:
    """Pixels as a torch picture: channels first, uint8, the same memory."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


class ShardedSplit:
    """One split of a dataset, its transforms and its choice of factors.

    Args:
        root: the dataset's folder.
        split: train, val or test.
        transform: applied to the picture, a uint8 tensor (3, H, W).
        target_transform: applied to the latents, a float32 tensor (factors,).
        factors: names of the factors wanted, in the order wanted; all ten by default.

    Attributes:
        manifest: what the dataset is (`dataset.json`).
        factors: the factors in the targets' columns.

    Raises:
        DatasetError: no dataset there, an unfinished one, a newer format, or no such split.
        SpecError: an unknown factor.
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

    @property
    def folder(self) -> Path:
        """The folder of the split's shards."""
        return self.root / self.split

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

    def item(self, encoded: bytes, latents: Float[Array, " factors"], where: Callable[[], str]) -> tuple[Any, Any]:
        """A stored sample as (picture, latents), transformed.

        Args:
            encoded: the picture's bytes.
            latents: of the chosen factors.
            where: names the sample, should its picture not decode.

        Raises:
            DatasetError: the picture does not decode.
        """
        try:
            picture: Any = to_tensor(decode(encoded))
        except (OSError, SyntaxError, ValueError) as error:
            raise DatasetError(
                f"{where()}: the picture does not decode ({error}); run `ident3d verify --repair`"
            ) from None
        target: Any = torch.from_numpy(latents)
        if self.transform is not None:
            picture = self.transform(picture)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return picture, target

    def describe(self) -> str:
        """The split in some lines, for `repr`."""
        m, shards = self.manifest, self.entry.shards
        count = f"{len(shards)} shard{'s' if len(shards) > 1 else ''}"
        lines = [
            f"{m.name!r}, split {self.split!r}: {self.entry.samples:,} samples of {m.resolution} x {m.resolution} px",
            f"    root: {self.root} ({count}, {sum(s.bytes for s in shards) / 1e6:,.1f} MB)",
            f"    rendered: quality {m.quality}, Blender {m.versions['blender']}, {m.device}, seed {self.entry.seed}",
            f"    factors: {', '.join(self.factors.names)}",
        ]
        lines += [f"    positive pairs: rendered, {self.entry.pairs}"] if self.entry.pairs else []
        lines += [f"    {name}: {t!r}" for name in ("transform", "target_transform") if (t := getattr(self, name))]
        return "\n".join(lines)

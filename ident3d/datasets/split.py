"""What the datasets over shards have in common: which split of what, and its description."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ident3d.datasets.serving import Statistics
from ident3d.errors import DatasetError
from ident3d.factors import Factors
from ident3d.shards.locate import locate
from ident3d.shards.location import SplitFiles, is_url
from ident3d.shards.manifest import Manifest, SplitEntry

__all__ = ["ShardedSplit"]


class ShardedSplit:
    """One split of a dataset in shards, and a choice of its factors.

    Args:
        root: the dataset's folder, or its URL (`hf://datasets/user/name`, `https://...`, `s3://...`): then each file is
            fetched when it is first needed, checked, and kept in the cache folder.
        split: train, val or test.
        factors: names of the factors wanted, in the order wanted; all by default.

    Attributes:
        manifest: what the dataset is (`dataset.json`).
        columns: the factors in the targets' columns.

    Raises:
        DatasetError: no dataset there, an unfinished one, a newer format, or no such split.
        DownloadError: a URL that cannot be read.
        SpecError: an unknown factor.
    """

    def __init__(
        self, root: str | os.PathLike[str], split: str = "train", factors: Iterable[str] | None = None
    ) -> None:
        self.location = locate(root)
        self.root: Path | str = self.location.text if is_url(root) else Path(root)
        self.split = split
        self.manifest: Manifest = self.location.manifest()
        if split not in self.manifest.splits:
            have = ", ".join(self.manifest.splits)
            raise DatasetError(f"{self.root}: no split {split!r}; it has {have}")
        self.files = SplitFiles(self.location, split)
        self.columns: Factors = self.manifest.factor_table.select(factors)
        self.categorical = self.manifest.categories
        self.name, self.resolution = self.manifest.name, self.manifest.resolution
        self.derived = self.location.derived

    @property
    def origin(self) -> str:
        """Where the pictures come from, in a line."""
        return self.manifest.origin

    @property
    def entry(self) -> SplitEntry:
        """The split's entry in the manifest: sample count, checksums, pixel statistics."""
        return self.manifest.splits[self.split]

    def statistics(self) -> Statistics:
        """Mean and std per channel over all pixels of the split, in [0, 1], as the manifest has them."""
        return self.entry.mean, self.entry.std

    def reference_statistics(self) -> Statistics:
        """Those of the training split, where there is one: what `normalize=True` stands for."""
        entry = self.manifest.splits.get("train", self.entry)
        return entry.mean, entry.std

    @property
    def remedy(self) -> str:
        """What to do about a damaged sample."""
        if self.manifest.source is not None:
            return "run `ident3d verify`, and convert or fetch it again"
        return "run `ident3d verify --repair`"

    def describe(self) -> str:
        """The split in some lines, for `repr`."""
        m, shards = self.manifest, self.entry.shards
        count = f"{len(shards)} shard{'s' if len(shards) > 1 else ''}"
        seed = f", seed {self.entry.seed}" if m.scene else ""
        lines = [
            f"{m.name!r}, split {self.split!r}: {self.entry.samples:,} samples of {m.resolution} x {m.resolution} px",
            f"    root: {self.root} ({count}, {sum(s.bytes for s in shards) / 1e6:,.1f} MB)",
            f"    {self.origin}{seed}",
            f"    factors: {', '.join((*self.columns.names, *(c.name for c in self.categorical)))}",
        ]
        lines += [f"    positive pairs: rendered, {self.entry.pairs}"] if self.entry.pairs else []
        lines += ["    positive pairs: neighbours in time"] if self.entry.consecutive else []
        lines += [
            f"    {name}: {t!r}" for name in ("transform", "target_transform") if (t := getattr(self, name, None))
        ]
        return "\n".join(lines)

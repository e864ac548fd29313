"""The shards of a dataset in order, as an IterableDataset: sequential reads, built on the webdataset library."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data import IterableDataset

from ident3d.codecs import decode
from ident3d.datasets.serving import Serving, Transform, to_tensor
from ident3d.datasets.split import ShardedSplit
from ident3d.errors import DatasetError, SpecError
from ident3d.files import read_npy

__all__ = ["Ident3DStream"]


class Ident3DStream(ShardedSplit, Serving, IterableDataset[tuple[Any, ...]]):
    """A split shard by shard; yields the same (picture, latents) as `Ident3D`, each exactly once an epoch.

    Shards are split over the ranks of torch.distributed and then over the DataLoader's workers: a rank or worker with
    no shard yields nothing. Ranks can get unequal numbers of samples, where the shards do not divide evenly. Call
    `set_epoch` before each epoch, as with DistributedSampler; workers that persist hear of it too.

    Args:
        root, split, transform, target_transform, factors: as for `Ident3D`. From a URL, a shard is fetched whole when
            its turn comes, and kept.
        normalize, on_error: as for `Ident3D`; what is skipped is left out of the stream.
        shuffle: shuffle the shards by (seed, epoch), and samples within a window.
        seed: what both orders are drawn from.
        buffer: the window in samples; 0 leaves the order within a shard as stored.

    Raises:
        DatasetError: no dataset there, an unfinished one, a newer format, or no such split; on iteration, a shard
            that is damaged or short of samples.
        SpecError: an unknown factor, a negative seed or buffer.

    Example:
        >>> stream = Ident3DStream("teapots", seed=3)
        >>> stream.set_epoch(1)
        >>> sum(1 for picture, latents in stream)
        24
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        factors: Iterable[str] | None = None,
        *,
        normalize: bool | Sequence[Sequence[float]] = False,
        on_error: str = "raise",
        shuffle: bool = True,
        seed: int = 0,
        buffer: int = 1000,
    ) -> None:
        if seed < 0 or buffer < 0:
            raise SpecError(f"seed = {seed}, buffer = {buffer}: expected 0 or more")
        Serving.__init__(self, transform, target_transform, normalize, on_error)
        ShardedSplit.__init__(self, root, split, factors)
        self.shuffle = shuffle
        self.seed = seed
        self.buffer = buffer
        # In shared memory, so that persistent workers see a change made in the main process.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration yields."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, 0 or more: the order of shards and samples follows from (seed, epoch).

        Raises:
            SpecError: a negative epoch.
        """
        if epoch < 0:
            raise SpecError(f"epoch = {epoch}: expected 0 or more")
        self._epoch.fill_(epoch)

    def shard_names(self) -> list[str]:
        """All shards, in the order of this epoch."""
        shards = self.entry.shards
        order = np.arange(len(shards))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(len(shards))
        return [shards[k].name for k in order]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        stages: list[Any] = [
            webdataset.SimpleShardList(self.shard_names()),
            webdataset.split_by_node,
            webdataset.split_by_worker,
            self._samples,
        ]
        if self.shuffle and self.buffer > 1:
            rank, _, worker, _ = webdataset.utils.pytorch_worker_info()
            seed = int(np.random.SeedSequence([self.seed, self.epoch, rank, worker]).generate_state(1)[0])
            stages.append(webdataset.detshuffle(self.buffer, initial=self.buffer, seed=seed))
        for sample in webdataset.DataPipeline(*stages):
            try:
                item = self._item(sample)
            except DatasetError as error:
                self.skip(error)
                continue
            yield item

    def _samples(self, shards: Iterator[dict[str, str]]) -> Iterator[dict[str, Any]]:
        """The samples of each shard, as webdataset groups them.

        Opened here: webdataset would take a path for a URL, and leave the file to the garbage collector. Counted here:
        tarfile takes a damaged header for the end of the archive, and samples would be missing in silence.

        Raises:
            DatasetError: a shard that cannot be read or does not hold its samples.
        """
        entries = {shard.name: shard for shard in self.entry.shards}
        for shard in shards:
            entry, count = entries[Path(shard["url"]).name], 0
            path = self.files.path(entry.name, entry.sha256, entry.bytes)
            try:
                with open(path, "rb") as file:
                    members = webdataset.tariterators.tar_file_expander([{"url": str(path), "stream": file}])
                    for sample in webdataset.tariterators.group_by_keys(members):
                        yield sample
                        count += 1
            except (OSError, ValueError, tarfile.TarError) as error:
                raise DatasetError(f"{path}: cannot be read ({error}); {self.remedy}") from error
            if count != entry.samples:
                raise DatasetError(f"{path}: holds {count} whole samples of {entry.samples}; {self.remedy}")

    def _item(self, sample: dict[str, Any]) -> tuple[Any, ...]:
        def where() -> str:
            return f"{sample.get('__url__')}, sample {sample.get('__key__')}"

        try:
            encoded, latents = sample[self.entry.members[0]], read_npy(sample["latents.npy"])[self.columns.columns]
            texts = (sample["txt"].decode(),) if "txt" in self.entry.members else ()
        except (LookupError, ValueError) as error:
            raise DatasetError(f"{where()}: damaged ({error}); {self.remedy}") from None
        try:
            pixels = decode(encoded)
        except (OSError, SyntaxError, ValueError) as error:
            raise DatasetError(f"{where()}: the picture does not decode ({error}); {self.remedy}") from None
        return self.finish_picture(to_tensor(pixels)), *texts, self.finish_latents(latents)

    def __repr__(self) -> str:
        order = f"shuffled by seed {self.seed}, window {self.buffer}" if self.shuffle else "in order"
        return f"Ident3DStream {self.describe()}\n    epoch {self.epoch}, {order}"

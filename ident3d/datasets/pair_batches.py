"""Whole batches of pairs, made ahead by threads: matched, read, normalised."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ident3d.datasets.batches import BatchStream
from ident3d.datasets.blocks import Blocks, ahead
from ident3d.datasets.loader import ready_pictures
from ident3d.errors import DatasetError

if TYPE_CHECKING:
    from ident3d.datasets.pictures import Pictures

__all__ = ["PairBatches"]

Pairs = Sequence[tuple[int, int]]


class PairBatches:
    """Batches [x, x~, z, z~] of a dataset of ours; of a pair with a damaged picture that is skipped, nothing is left.

    Args:
        data: what to serve.
        rendered: positives are those that the samples hold.
        threads: that read and normalise; one more matches the next block of pairs.
        at_once: pairs that are matched in one go.
        pin_memory: in page-locked memory, where there is a GPU.
    """

    def __init__(self, data: Pictures, *, rendered: bool, threads: int, at_once: int, pin_memory: bool) -> None:
        self.data, self.rendered, self.threads, self.at_once = data, rendered, threads, at_once
        self.blocks = Blocks(2 * (threads + 3), pinned=pin_memory and torch.cuda.is_available())

    def __call__(self, stream: BatchStream) -> Generator[list[Any]]:
        """The rest of the epoch."""
        with (
            closing(ahead(stream.batch, stream.numbers(), 1, 2 + self.at_once // stream.batch_size)) as matched,
            closing(ahead(self.ready, matched, self.threads, self.threads + 1)) as made,
        ):
            for pairs, anchors, positives in made:
                yield self.finished(pairs, anchors, positives)

    def ready(self, pairs: Pairs) -> tuple[Pairs, Tensor, Tensor]:
        """What any thread may do of a batch: reading, decoding, normalising."""
        anchors, first = ready_pictures(self.data, [i for i, _ in pairs], self.blocks)
        positives, second = ready_pictures(self.data, [j for _, j in pairs], self.blocks, positive=self.rendered)
        if len(first) == len(second) == len(pairs):
            return pairs, anchors, positives
        whole = sorted({*first} & {*second})
        if not whole:
            raise DatasetError(f"{self.data.root}: every pair of a batch has a damaged picture")
        anchors, positives = anchors[[first.index(k) for k in whole]], positives[[second.index(k) for k in whole]]
        return [pairs[k] for k in whole], anchors, positives

    def finished(self, pairs: Pairs, anchors: Tensor, positives: Tensor) -> list[Any]:
        """The rest: the user's transforms, which may not be fit for threads."""
        data = self.data
        held = data.pair_latents if self.rendered else data.latents
        assert held is not None
        rows = [table[places] for table, places in zip((data.latents, held), np.array(pairs).T, strict=True)]
        pictures: list[Any] = [anchors, positives]
        latents: list[Any] = [torch.from_numpy(z) for z in rows]
        if data.transform is not None:
            pictures = [default_collate([data.finish_picture(x) for x in block.unbind()]) for block in pictures]
        if data.target_transform is not None:
            latents = [default_collate([data.finish_latents(row) for row in z]) for z in rows]
        if self.blocks.pinned:
            latents = [x.pin_memory() if isinstance(x, Tensor) else x for x in latents]
        return [*pictures, *latents]

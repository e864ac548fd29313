"""What is built on pictures with known factors: caches, loaders, pairs, devices, statistics, figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from ident3d.datasets.pictures import Pictures
from ident3d.datasets.serving import Statistics
from ident3d.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ident3d.datasets.batches import PairLoader
    from ident3d.datasets.device import DeviceSplit
    from ident3d.datasets.loader import PictureLoader
    from ident3d.distributions import Distribution

__all__ = ["CACHES", "PictureDataset"]

CACHES = ("none", "ram", "disk")


class PictureDataset(Pictures):
    """The base of all datasets of pictures. A subclass calls `open_cache` when it can serve; see `Pictures`."""

    def open_cache(self, cache: str) -> None:
        """Open the decoded pictures, decoding them first where no earlier call has: see `DecodedStore`.

        Raises:
            SpecError: no such kind of cache.
            DatasetError: no room for it, or (with `on_error="raise"`) a damaged picture.
        """
        if cache not in CACHES:
            raise SpecError(f"cache = {cache!r}: expected {', '.join(CACHES)}")
        self.cache = cache
        if cache != "none":
            from ident3d.datasets.decoded_files import open_store

            self.store = open_store(self, cache)
        if self.normalize is not False:
            _ = self.affine  # statistics are computed here once, not in every worker

    @property
    def mean(self) -> tuple[float, float, float]:
        """Mean of all pixels of the split per channel, in [0, 1]; decodes them all where no file holds it yet."""
        return self.statistics()[0]

    @property
    def std(self) -> tuple[float, float, float]:
        """Standard deviation over all pixels of the split per channel, in [0, 1]."""
        return self.statistics()[1]

    def statistics(self) -> Statistics:
        """Mean and std per channel over all pixels of the split (not the mean of each picture's std), in [0, 1]."""
        from ident3d.datasets.decoded import computed_statistics

        return computed_statistics(self)

    def reference_statistics(self) -> Statistics:
        """The mean and std that `normalize=True` stands for."""
        return self.statistics()

    def loader(self, batch_size: int, *, seed: int = 0, shuffle: bool = True, **options: Any) -> PictureLoader:
        """Batches (pictures, latents) of the whole split, each sample once an epoch: see `PictureLoader`."""
        from ident3d.datasets.loader import PictureLoader

        return PictureLoader(self, batch_size, seed=seed, shuffle=shuffle, **options)

    def to_device(self, device: str | torch.device, *, quiet: bool = False) -> DeviceSplit:
        """All pictures and latents on a device, decoded, where batches and pairs are gathered: see `DeviceSplit`."""
        from ident3d.datasets.device import DeviceSplit

        return DeviceSplit(self, device, quiet=quiet)

    def pairs(
        self, conditional: str | Distribution | None = None, *, batch_size: int, seed: int = 0, **options: Any
    ) -> PairLoader:
        """A DataLoader of positive pairs (x, x~, z, z~), the same for the same seed: see `pair_loader`.

        Args:
            conditional: p(z~ | z), e.g. `normal(scale=0.05)`: z~ is matched to the nearest stored sample. None for the
                pairs that the samples hold, or with `share`, `change` or `views`.
            batch_size: pairs a batch.
            seed: what the batches are drawn from.
            options: `share=["object_hue"]`, `change=1` or `views=ident3d.simclr(64)`; `match="hnsw"`, `within=()` and
                other options of `PairSampler`; `threads` that make batches ahead, 2 by default, or in their place
                num_workers and other options of DataLoader.

        Raises:
            SpecError: no pairs to serve, or what `PairSampler` refuses.
        """
        from ident3d.datasets.pair_loader import pair_loader

        return pair_loader(self, conditional, batch_size=batch_size, seed=seed, **options)

    def plot(self, index: SupportsIndex = 0) -> Figure:
        """Sample `index` as a figure: the picture, its factors, its text.

        Raises:
            IndexError: no such sample.
        """
        from ident3d.figures import sample_figure

        return sample_figure(self, self.place(index))

"""Pairs without a conditional: two random views of one picture (SimCLR; the last row of the paper's table 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from ident3d.datasets.batches import BatchStream, generator_of
from ident3d.datasets.pictures import sample_of
from ident3d.errors import SpecError

__all__ = ["ViewItems", "ViewStream", "simclr"]


def simclr(resolution: int, strength: float = 1.0) -> Callable[[Any], Any]:
    """SimCLR's random transform, for uint8 pictures (3, H, W): crop, flip, colours, grey, blur.

    T. Chen et al. 2020, A Simple Framework for Contrastive Learning of Visual Representations, appendix A: a crop of
    8% to all of the area, scaled back; a flip; with probability 0.8 brightness, contrast and saturation by up to 0.8
    and hue by up to 0.2 of their range; grey with probability 0.2; with probability 0.5 a Gaussian blur of sigma 0.1
    to 2 over a tenth of the side.

    Args:
        resolution: side of the result in pixels, at least 8.
        strength: of the change of colours, 0 to 1.

    Raises:
        SpecError: a value out of range, or torchvision is absent.
    """
    if isinstance(resolution, bool) or not isinstance(resolution, int) or resolution < 8:
        raise SpecError(f"resolution = {resolution!r}: expected a whole number of at least 8")
    if not 0 <= strength <= 1:
        raise SpecError(f"strength = {strength}: expected 0 to 1")
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise SpecError(f"simclr needs torchvision ({error}): pip install 'ident3d[baselines]'") from None
    colours = v2.ColorJitter(0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength)
    width = max(3, resolution // 10 | 1)
    transform: Callable[[Any], Any] = v2.Compose(
        [
            v2.RandomResizedCrop(resolution, scale=(0.08, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([colours], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([v2.GaussianBlur(width, sigma=(0.1, 2.0))], p=0.5),
        ]
    )
    return transform


class ViewStream(BatchStream):
    """Batches of (sample, key): samples uniform, and a key that the two views are drawn from.

    Args:
        samples: how many samples there are.
        series: batch_size, seed, batches, rank, world_size, as for `PairSampler`.
    """

    kind = "views"

    def batch(self, number: int) -> list[tuple[int, int]]:
        """Batch `number`."""
        generator = generator_of("views", self.seed, number)
        drawn = torch.randint(self.samples, (self.batch_size,), generator=generator).tolist()
        keys = torch.randint(2**62, (self.batch_size,), generator=generator).tolist()
        return list(zip(drawn, keys, strict=True))


class ViewItems(Dataset[tuple[Any, Any, Any, Any]]):
    """Items (x, x~, z, z): two views of one picture.

    Transforms of torchvision draw from torch's global generator. It is seeded from the item's key while they run, and
    then put back, so that an item is the same in every worker and the caller's random numbers stay as they were.

    Args:
        data: item i is (picture, latents).
        views: the random transform.
    """

    def __init__(self, data: Any, views: Callable[[Any], Any]) -> None:
        if not callable(views):
            raise SpecError(f"views={views!r}: expected a transform, e.g. ident3d.simclr(64)")
        self.data, self.views = data, views

    def __getitem__(self, place: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
        index, key = place
        picture, latents = sample_of(self.data, index)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would seed the generators of GPUs as well.
            torch.default_generator.manual_seed(key)
            first, second = self.views(picture), self.views(picture)
        return first, second, latents, latents

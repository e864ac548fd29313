"""A whole split on a device, where batches and pairs are gathered: no decoding, no workers, no copies of pictures."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from ident3d.datasets.batches import BatchStream, Deliveries
from ident3d.datasets.blocks import Blocks, ahead
from ident3d.datasets.decoding import check_memory, gigabytes, map_decoded
from ident3d.datasets.loader import EpochBatches, EpochOrder, Job
from ident3d.datasets.pair_loader import MATCHING, SERIES, pair_loader
from ident3d.datasets.pairs import QUERIES
from ident3d.datasets.serving import Array
from ident3d.distributions import Distribution
from ident3d.errors import DatasetError, SpecError
from ident3d.workers import cores

if TYPE_CHECKING:
    from ident3d.datasets.pictures import Pictures

__all__ = ["DeviceBatches", "DevicePairs", "DeviceSplit", "fits"]


class DeviceSplit:
    """All pictures and latents of a split on a device, decoded.

    Batches have the samples, the order and the values that `data.loader` and `data.pairs` give for the same arguments,
    as tensors on the device; they are normalised there. Transforms are made for one picture on the CPU: a dataset that
    has any is refused; apply your own to the batches.

    Args:
        data: the split.
        device: such as `cuda`; any that torch knows.
        quiet: no progress bar.

    Attributes:
        data: as given.
        device: as torch calls it.
        pictures: uint8 (P, 3, H, W): the samples' and then those of the positives that they hold.
        latents: float32 (N, factors).
        pair_latents: of the positives that the samples hold, or None.

    Raises:
        SpecError: no such device, or the dataset has a transform.
        DatasetError: the device has not so much memory left, or (with `on_error="raise"`) a damaged picture.

    Example:
        >>> from ident3d import Ident3D
        >>> split = Ident3D("teapots").to_device("cpu")
        >>> x, positive, z, z_positive = next(iter(split.pairs("normal(scale=0.05)", batch_size=8, seed=1)))
        >>> x.shape, z.shape, len(split), split.nbytes
        (torch.Size([8, 3, 16, 16]), torch.Size([8, 10]), 24, 19392)
    """

    def __init__(self, data: Pictures, device: str | torch.device, *, quiet: bool = False) -> None:
        if data.transform is not None or data.target_transform is not None:
            raise SpecError(
                "transform, target_transform: made for one sample on the CPU; open the dataset without them, and apply "
                "transforms to the batches on the device"
            )
        self.data, self.device = data, _device(device)
        self._affine = tuple(x.to(self.device) for x in data.affine) if data.normalize is not False else None
        shape = data.picture_count, 3, data.resolution, data.resolution
        _check_room(data, self.device, int(np.prod(shape)))
        try:
            self.pictures: UInt8[Tensor, "pictures 3 height width"] = torch.empty(
                shape, dtype=torch.uint8, device=self.device
            )
        except RuntimeError as error:
            raise DatasetError(f"{self.device}: {shape[0]:,} decoded pictures do not fit ({error})") from None
        self.latents: Float[Tensor, "samples factors"] = torch.from_numpy(data.latents.copy()).to(self.device)
        self.pair_latents: Float[Tensor, "samples factors"] | None = None
        if data.pair_latents is not None:
            self.pair_latents = torch.from_numpy(data.pair_latents.copy()).to(self.device)
        self._damaged = self._load(quiet)

    def _load(self, quiet: bool) -> dict[int, str]:
        blocks = Blocks(keep=cores(), pinned=self.device.type == "cuda")

        def work(start: int, block: Array, bad: dict[int, str]) -> dict[int, str]:
            staged = blocks.empty(block.shape, torch.uint8)
            np.copyto(staged.numpy(), block)
            self.pictures[start : start + len(block)].copy_(staged, non_blocking=True)
            return bad

        damaged: dict[int, str] = {}
        for bad in map_decoded(self.data, work, doing=f"{self.data.split} to {self.device}", quiet=quiet):
            damaged |= bad
        return damaged

    def __len__(self) -> int:
        return len(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes that the pictures and latents take on the device."""
        held = (self.pictures, self.latents, self.pair_latents)
        return sum(x.nbytes for x in held if x is not None)

    def gather(self, numbers: Int64[Tensor, " n"]) -> Tensor:
        """Pictures by their numbers, which are on the device: uint8, or float32 where the dataset normalises."""
        found = self.pictures.index_select(0, numbers)
        if self._affine is None:
            return found
        scale, shift = self._affine
        return torch.mul(found, scale).add_(shift)

    def whole(self, *numbers: Int64[Array, " n"]) -> list[int]:
        """The positions at which no picture is damaged; the others are counted and reported.

        Args:
            numbers: of pictures; position k has the k-th of each.

        Raises:
            DatasetError: none is left.
        """
        kept = list(range(len(numbers[0])))
        if self._damaged:
            rows = np.stack(numbers, axis=1).tolist()
            for number in (n for row in rows for n in row if n in self._damaged):
                self.data.skip(DatasetError(self._damaged[number]))
            kept = [k for k in kept if not any(n in self._damaged for n in rows[k])]
        if not kept:
            raise DatasetError(f"{self.data.root}: a batch has nothing but damaged pictures")
        return kept

    def send(self, rows: Int64[Array, "rows n"]) -> Int64[Tensor, "rows n"]:
        """Indices, on the device."""
        sent = torch.from_numpy(rows)
        if self.device.type == "cuda":
            sent = sent.pin_memory()  # without which non_blocking blocks
        return sent.to(self.device, non_blocking=True)

    def pairs(
        self, conditional: str | Distribution | None = None, *, batch_size: int, seed: int = 0, **options: Any
    ) -> DevicePairs:
        """Positive pairs (x, x~, z, z~): the batches of `data.pairs` with the same arguments.

        Args:
            conditional, batch_size, seed: as for `Pictures.pairs`.
            options: `share`, `change`, `divide`, and those of the series and of the matching. There are no workers, and
                no views.

        Raises:
            SpecError: another option, or what `data.pairs` refuses.
        """
        unknown = sorted(set(options) - {*MATCHING, *SERIES, "share", "change", "divide"})
        if unknown:
            raise SpecError(f"{', '.join(unknown)}: not an option of pairs on a device; use data.pairs for that")
        loader = pair_loader(self.data, conditional, batch_size=batch_size, seed=seed, **options)
        rendered = conditional is None and options.get("share") is options.get("change") is None
        return DevicePairs(self, loader.stream, rendered=rendered)

    def loader(self, batch_size: int, *, seed: int = 0, shuffle: bool = True, **options: Any) -> DeviceBatches:
        """Batches (pictures, latents), each sample once an epoch: those of `data.loader` with the same arguments.

        Args:
            batch_size, seed, shuffle: as for `PictureLoader`.
            options: `drop_last`, `rank`, `world_size`.

        Raises:
            SpecError: another option, or a value out of range.
        """
        unknown = sorted(set(options) - {"drop_last", "rank", "world_size"})
        if unknown:
            raise SpecError(f"{', '.join(unknown)}: not an option of batches on a device; use data.loader for that")
        order = EpochOrder(len(self), batch_size=batch_size, seed=seed, shuffle=shuffle, **options)
        return DeviceBatches(self, order)


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SpecError(f"device = {device!r}: {error}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"device = {device!r}: torch finds no GPU here")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def fits(data: Pictures, device: str | torch.device) -> bool:
    """Whether a device has room for all pictures of a split, decoded."""
    try:
        _check_room(data, _device(device), 3 * data.picture_count * data.resolution**2)
    except DatasetError:
        return False
    return True


def _check_room(data: Pictures, device: torch.device, need: int) -> None:
    """Refuse what does not fit, before anything is decoded."""
    what = f"{data.root}: {data.picture_count:,} decoded pictures"
    if device.type == "cpu":
        check_memory(need, what, "serve them from cache='disk'")
    if device.type == "cuda":
        # What torch holds without using it, it gives as well.
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if need > free:
            raise DatasetError(
                f"{what} need {gigabytes(need)} on {device}, {gigabytes(free)} are free; serve them from cache='disk'"
            )


class DevicePairs(Deliveries):
    """Positive pairs on a device, batch by batch; resumed like the `PairLoader` that gives the same.

    The pairs of a block of batches are matched in a thread, while those of the block before are served.

    Args:
        split: where they are gathered.
        stream: which they are.
        rendered: positives are those that the samples hold.
    """

    def __init__(self, split: DeviceSplit, stream: BatchStream, *, rendered: bool) -> None:
        self.split, self.stream = split, stream
        self._rendered = rendered
        self._step = stream.step

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Generator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        stream = self.stream
        stream.step = self._step
        depth = 2 + QUERIES // stream.batch_size
        with closing(ahead(self._indices, stream.numbers(), 1, depth)) as batches:
            for indices in batches:
                self._step += 1
                yield self._gathered(indices)

    def _indices(self, number: int) -> Int64[Array, "3 n"]:
        """The samples of anchors and positives, and the numbers of the positives' pictures."""
        anchors, positives = np.array(self.stream.batch(number), np.int64).T
        pictures = self.split.data.picture_numbers(positives, positive=self._rendered)
        return np.stack([anchors, positives, pictures])

    def _gathered(self, indices: Int64[Array, "3 n"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        split = self.split
        kept = split.whole(indices[0], indices[2])
        anchors, positives, pictures = split.send(indices if len(kept) == indices.shape[1] else indices[:, kept])
        latents = split.pair_latents if self._rendered else split.latents
        assert latents is not None
        x, positive = split.gather(anchors), split.gather(pictures)
        return x, positive, split.latents.index_select(0, anchors), latents.index_select(0, positives)


class DeviceBatches(EpochBatches):
    """Batches on a device, each sample once an epoch; resumed like the `PictureLoader` that gives the same.

    Args:
        split: where they are gathered.
        order: which they are.
    """

    def __init__(self, split: DeviceSplit, order: EpochOrder) -> None:
        super().__init__(order)
        self.split = split

    def batches(self, jobs: Sequence[Job]) -> Generator[tuple[Any, ...]]:
        """The batches of some jobs, in order, each gathered when it is asked for."""
        split, data = self.split, self.split.data
        for job in jobs:
            places = job.places[split.whole(job.places)]
            (index,) = split.send(places[None])
            pictures, latents = split.gather(index), split.latents.index_select(0, index)
            yield (pictures, [data.text(k) for k in places.tolist()], latents) if data.has_text else (pictures, latents)

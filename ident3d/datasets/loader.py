"""Batches of whole splits, each sample once an epoch: made ahead by threads, or by processes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from ident3d.checks import whole
from ident3d.datasets.batches import generator_of, ranks_of
from ident3d.datasets.blocks import Blocks, ahead, normalize_into, pieces
from ident3d.datasets.serving import Array
from ident3d.errors import DatasetError, SpecError

if TYPE_CHECKING:
    from ident3d.datasets.pictures import Pictures

__all__ = ["EpochBatches", "EpochOrder", "Job", "PictureLoader", "ready_pictures"]

Position = tuple[int, int]
"""An epoch, and how many of its samples all ranks together have had."""


_scratch = Blocks(keep=8)
"""Some pictures of uint8 a thread, on their way to float32."""


class Job(NamedTuple):
    """A batch to be made.

    Attributes:
        epoch: that it belongs to.
        places: its samples, int64 (n,).
        then: where the order stands after it.
    """

    epoch: int
    places: Array
    then: Position


class EpochOrder:
    """Which samples are in which batch: all of them once an epoch, in an order that (seed, epoch) decides.

    The ranks take turns: of `batch_size * world_size` samples in a row, each has its part. What is left at the end of
    an epoch is shared out evenly, so that all ranks have as many batches, unless fewer samples are left than ranks.

    Args:
        samples: how many there are.
        batch_size: samples a batch, at least 1.
        seed: 0 or more.
        shuffle: in another order each epoch; else as stored.
        drop_last: leave out what does not fill a batch of every rank.
        rank: this process among `world_size`; both are taken from torch.distributed where it is initialised.
        world_size: how many processes there are.

    Raises:
        SpecError: a value out of range, or no batch at all.

    Example:
        >>> order = EpochOrder(5, batch_size=2, shuffle=False)
        >>> [job.places.tolist() for job in order.jobs((0, 0))]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.samples, self.shuffle, self.drop_last = samples, bool(shuffle), bool(drop_last)
        self.batch_size, self.seed = whole("batch_size", batch_size, 1), whole("seed", seed, 0)
        self.rank, self.world_size = ranks_of(rank, world_size)
        self._round = self.batch_size * self.world_size
        if not len(self):
            raise SpecError(
                f"batch_size = {batch_size}, world_size = {self.world_size}: {samples:,} samples fill no batch of "
                f"rank {self.rank}; take smaller ones"
            )

    def __len__(self) -> int:
        rest = 0 if self.drop_last else self.samples % self._round
        return self.samples // self._round + (rest > self.rank)

    def permutation(self, epoch: int) -> Int64[Array, " samples"]:
        """All samples, in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.samples)
        generator = generator_of("pictures", self.seed, epoch)
        found: Array = torch.randperm(self.samples, generator=generator).numpy()
        return found

    def jobs(self, position: Position) -> list[Job]:
        """This rank's batches in the rest of an epoch."""
        epoch, seen = position
        order = self.permutation(epoch)
        parts: list[tuple[Array, int]] = []
        for start in range(seen, self.samples, self._round):
            part = order[start : start + self._round]
            if len(part) == self._round:
                mine = part[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
            else:
                mine = np.array_split(part, self.world_size)[self.rank][: 0 if self.drop_last else None]
            if len(mine):
                parts.append((mine, start + len(part)))
        ends: list[Position] = [*((epoch, stop) for _, stop in parts[:-1]), (epoch + 1, 0)]
        return [Job(epoch, mine, then) for (mine, _), then in zip(parts, ends, strict=False)]

    def state(self, position: Position) -> dict[str, Any]:
        """A position, as plain data."""
        epoch, seen = position
        return {**self._identity(), "epoch": epoch, "seen": seen}

    def position(self, state: Any) -> Position:
        """The position of a state, on any number of ranks.

        Raises:
            SpecError: the state of another order, or of something else.
        """
        if not isinstance(state, Mapping):
            raise SpecError(f"state {state!r}: expected what state_dict() gave")
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise SpecError(f"state of {name} = {state.get(name)!r}; these batches have {mine!r}")
        return whole("state: epoch", state.get("epoch"), 0), whole("state: seen", state.get("seen"), 0)

    def _identity(self) -> dict[str, Any]:
        names = ("samples", "batch_size", "seed", "shuffle", "drop_last")
        return {"kind": "pictures", **{name: getattr(self, name) for name in names}}


class EpochBatches:
    """Batches by an `EpochOrder`. Their state counts what was delivered, not what was made ahead.

    Each pass yields what is left of the epoch, and the next pass is the next epoch.

    Args:
        order: which samples are in which batch.
    """

    def __init__(self, order: EpochOrder) -> None:
        self.order = order
        self._position: Position = (0, 0)

    def batches(self, jobs: Sequence[Job]) -> Generator[tuple[Any, ...]]:
        """The batches of some jobs, in order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Generator[tuple[Any, ...]]:
        jobs = self.order.jobs(self._position)
        if not jobs:  # the other ranks had the last batch of the epoch
            self._position = (self._position[0] + 1, 0)
        with closing(self.batches(jobs)) as made:
            for job, batch in zip(jobs, made, strict=True):
                self._position = job.then
                yield batch

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position[0]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. There is no need to: passes follow each other by themselves.

        Raises:
            SpecError: a negative epoch.
        """
        self._position = whole("epoch", epoch, 0), 0

    def state_dict(self) -> dict[str, Any]:
        """Where the deliveries stand, as plain data. `load_state_dict` goes on there."""
        return self.order.state(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a `state_dict` was taken, on any number of ranks.

        Raises:
            SpecError: the state of other batches.
        """
        self._position = self.order.position(state)


def ready_pictures(
    data: Pictures, places: Sequence[int], blocks: Blocks, *, positive: bool = False
) -> tuple[Tensor, list[int]]:
    """Pictures of samples as far as no transform is needed: uint8, or normalised where nothing comes before that.

    Args:
        data: the dataset.
        places: 0 to N - 1 each.
        blocks: where the memory is taken from.
        positive: the positives that the samples hold, in place of themselves.

    Returns:
        Pictures (n, 3, H, W), and their positions in `places`: those that were skipped are absent.
    """
    n, side = len(places), data.resolution
    if data.transform is not None or data.normalize is False:
        block = blocks.empty((n, 3, side, side), torch.uint8)
        kept = data.fill(block.numpy(), places, positive=positive)
        return block[: len(kept)], kept
    affine = data.affine
    block, kept = blocks.empty((n, 3, side, side), torch.float32), []
    for piece in pieces(n, 4 * 3 * side**2):
        scratch = _scratch.empty((piece.stop - piece.start, 3, side, side), torch.uint8).numpy()
        found = data.fill(scratch, places[piece], positive=positive)
        done = len(kept)
        normalize_into(block[done : done + len(found)].numpy(), scratch[: len(found)], affine)
        kept += [piece.start + k for k in found]
    return block[: len(kept)], kept


class _Raw(NamedTuple):
    """A batch as a thread makes it: pictures as of `ready_pictures`, their samples, their texts."""

    pictures: Tensor
    places: list[int]
    texts: list[str]


class _Batches:
    """Makes batches of jobs. All that a worker process is sent."""

    def __init__(self, data: Pictures, seed: int, blocks: Blocks) -> None:
        self.data, self.seed, self.blocks = data, seed, blocks

    def raw(self, job: Job) -> _Raw:
        """What any thread may do of a batch: reading, decoding, normalising."""
        data, wanted = self.data, job.places.tolist()
        pictures, kept = ready_pictures(data, wanted, self.blocks)
        if not kept:
            raise DatasetError(f"{data.root}: every sample of a batch is damaged, the first {data.where(wanted[0])}")
        places = [wanted[k] for k in kept]
        return _Raw(pictures, places, [data.text(place) for place in places] if data.has_text else [])

    def finish(self, job: Job, raw: _Raw) -> tuple[Any, ...]:
        """The rest: the user's transforms, which may not be fit for threads."""
        data, pictures = self.data, raw.pictures
        rows = data.latents[raw.places]
        latents: Any = torch.from_numpy(rows)
        if data.target_transform is not None:
            latents = default_collate([data.finish_latents(row) for row in rows])
        if data.transform is not None:
            pictures = default_collate(self._transformed(job.epoch, raw))
        if self.blocks.pinned and isinstance(latents, Tensor):
            latents = latents.pin_memory()
        return (pictures, raw.texts, latents) if data.has_text else (pictures, latents)

    def _transformed(self, epoch: int, raw: _Raw) -> list[Any]:
        """Random transforms draw from torch's global generator; see `ViewItems`."""
        served = []
        with torch.random.fork_rng(devices=[]):
            for place, picture in zip(raw.places, raw.pictures.unbind(), strict=True):
                torch.default_generator.manual_seed(generator_of("transform", self.seed, epoch, place).initial_seed())
                served.append(self.data.finish_picture(picture))
        return served

    def __getitems__(self, job: Job) -> tuple[Any, ...]:
        return self.finish(job, self.raw(job))


class _Jobs:
    """The jobs of the next pass, as a DataLoader's `batch_sampler`."""

    def __init__(self) -> None:
        self.jobs: Sequence[Job] = ()

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


def _as_it_is(batch: Any) -> Any:
    return batch


class PictureLoader(EpochBatches):
    """Batches (pictures, latents) of a dataset, each sample once an epoch; with texts, (pictures, texts, latents).

    Pictures are contiguous, (n, 3, H, W): uint8, or float32 where the dataset normalises. Batches are the same for the
    same seed, whatever makes them. Threads share what the dataset has in memory, and put each batch where it stays;
    `num_workers` processes are for transforms in Python that take long: what they make is copied between processes.
    Random transforms draw from torch's global generator, which is seeded for each sample by (seed, epoch, index) while
    they run, and then put back.

    Args:
        data: what to serve; its transforms and its normalisation apply.
        batch_size: samples a batch.
        seed: what the order is drawn from.
        shuffle: in another order each epoch; else as stored.
        drop_last: leave out what does not fill a batch of every rank.
        threads: make batches ahead; 0 to make each when it is asked for.
        num_workers: processes in place of threads.
        pin_memory: in page-locked memory, for fast copies to a GPU; without one this changes nothing.
        rank: this process among `world_size`; both are taken from torch.distributed where it is initialised.
        world_size: how many processes there are.
        options: of the DataLoader that runs the processes: persistent_workers, multiprocessing_context, ...

    Raises:
        SpecError: a value out of range, or an option that is decided here.

    Example:
        >>> from ident3d import Ident3D
        >>> loader = Ident3D("teapots").loader(batch_size=10, seed=1)
        >>> [tuple(pictures.shape) for pictures, latents in loader]
        [(10, 3, 16, 16), (10, 3, 16, 16), (4, 3, 16, 16)]
    """

    def __init__(
        self,
        data: Pictures,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        threads: int = 2,
        num_workers: int = 0,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        order = EpochOrder(
            len(data),
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        super().__init__(order)
        self.data, self.batch_size = data, batch_size
        self.threads, self.num_workers = whole("threads", threads, 0), whole("num_workers", num_workers, 0)
        pinned = pin_memory and torch.cuda.is_available()
        self._depth = self.threads + 1
        self._batches = _Batches(data, seed, Blocks(self._depth + 2, pinned=pinned and not num_workers))
        self._jobs = _Jobs()
        self._processes = self._dataloader(pinned, options)

    def _dataloader(self, pinned: bool, options: dict[str, Any]) -> DataLoader[Any] | None:
        taken = {"sampler", "batch_sampler", "collate_fn", "generator", "dataset"} & set(options)
        if taken or (options and not self.num_workers):
            why = "decided here" if taken else "of processes, but num_workers = 0"
            raise SpecError(f"{', '.join(sorted(taken or options))}: {why}")
        if not self.num_workers:
            return None
        batches, jobs = cast(Any, self._batches), cast(Any, self._jobs)
        return DataLoader(
            batches,
            batch_sampler=jobs,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            pin_memory=pinned,
            # Without one, DataLoader draws its workers' seeds from torch's global generator.
            generator=generator_of("loader", self.order.seed),
            **options,
        )

    def batches(self, jobs: Sequence[Job]) -> Generator[tuple[Any, ...]]:
        """The batches of some jobs, in order, made ahead."""
        if self._processes is not None:
            self._jobs.jobs = jobs
            yield from self._processes
            return
        make = self._batches
        with closing(ahead(make.raw, jobs, self.threads, self._depth)) as raws:
            for job, raw in zip(jobs, raws, strict=True):
                yield make.finish(job, raw)

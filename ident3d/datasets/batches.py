"""Batches that are numbered: batch k of a seed is always the same, whoever asks, whenever, on whatever rank."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from ident3d.checks import whole
from ident3d.errors import SpecError

__all__ = ["BatchStream", "Deliveries", "DividedStream", "PairLoader", "generator_of", "ranks_of"]

MAX_BATCH = 10**7


def generator_of(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that is a function of a key, such as (what, seed, number), and of the kind of device."""
    text = "/".join(str(part) for part in ("ident3d", *key))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size as given, or where neither is, of torch.distributed.

    Raises:
        SpecError: one without the other, or out of range.
    """
    if rank is None and world_size is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    if rank is None or world_size is None:
        raise SpecError(f"rank = {rank}, world_size = {world_size}: expected both, with 0 <= rank < world_size")
    rank, world_size = whole("rank", rank, 0), whole("world_size", world_size, 1)
    if rank >= world_size:
        raise SpecError(f"rank = {rank}, world_size = {world_size}: expected both, with 0 <= rank < world_size")
    return rank, world_size


class BatchStream(Sampler[list[tuple[int, int]]]):
    """An endless series of batches, numbered from 0, cut into epochs; to be a DataLoader's `batch_sampler`.

    With several ranks, rank r of W gets batches r, r + W, r + 2 W, ... Each pass yields what is left of the epoch,
    and the next pass is the next epoch, so that no batch comes twice.

    Args:
        samples: how many samples there are.
        batch_size: pairs a batch, at least 1.
        seed: 0 or more.
        batches: batches a rank and epoch; by default one anchor a sample, over all ranks.
        rank: this process among `world_size`; both are taken from torch.distributed where it is initialised.
        world_size: how many processes there are.

    Attributes:
        step: how many batches this rank has handed out.
        kind: what the pairs are, in words; a state of other pairs is refused.

    Raises:
        SpecError: a value out of range.
    """

    kind = "pairs"

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        seed: int,
        batches: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.samples = samples
        self.batch_size, self.seed = whole("batch_size", batch_size, 1), whole("seed", seed, 0)
        if self.batch_size > MAX_BATCH:
            raise SpecError(f"batch_size = {batch_size}: expected at most {MAX_BATCH:,}")
        self.rank, self.world_size = ranks_of(rank, world_size)
        default = max(1, samples // (self.batch_size * self.world_size))
        self.batches = default if batches is None else whole("batches", batches, 1)
        self.step = 0

    @abstractmethod
    def batch(self, number: int) -> list[tuple[int, int]]:
        """Batch `number` of the series, of all ranks': a function of the seed and the number alone."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.step // self.batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. There is no need to: passes follow each other by themselves.

        Raises:
            SpecError: a negative epoch.
        """
        self.step = whole("epoch", epoch, 0) * self.batches

    def numbers(self) -> list[int]:
        """This rank's batches in the rest of the epoch."""
        rest = self.batches - self.step % self.batches
        return [(self.step + k) * self.world_size + self.rank for k in range(rest)]

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for _ in range(self.batches - self.step % self.batches):
            number = self.step * self.world_size + self.rank
            self.step += 1
            yield self.batch(number)

    def state_dict(self) -> dict[str, Any]:
        """Where the series stands, as plain data. `load_state_dict` goes on there."""
        return {
            "kind": self.kind,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "next": self.step * self.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a `state_dict` was taken, on any number of ranks.

        Raises:
            SpecError: the state of other pairs, another seed or batch size, or of something else.
        """
        if not isinstance(state, Mapping):
            raise SpecError(f"state {state!r}: expected what state_dict() gave")
        for name in ("kind", "seed", "batch_size"):
            if state.get(name) != getattr(self, name):
                raise SpecError(f"state of {name} = {state.get(name)!r}; this series has {getattr(self, name)!r}")
        self.step = -(-whole("state: next", state.get("next"), 0) // self.world_size)


class DividedStream(BatchStream):
    """A series whose every batch is cut over the ranks: rank r of W gets the r-th of W equal parts of each.

    So the ranks together have the batches that one process has.

    Args:
        stream: the batches of all ranks together, of rank 0 in a world of 1.
        rank: of this process.
        world_size: how many processes there are.

    Raises:
        SpecError: batches that do not divide evenly.
    """

    def __init__(self, stream: BatchStream, rank: int, world_size: int) -> None:
        if stream.batch_size % world_size:
            raise SpecError(
                f"batch_size = {stream.batch_size} over {world_size} ranks: expected a multiple of {world_size}"
            )
        self.kind, self._all = f"{stream.kind}, divided", stream
        size = stream.batch_size // world_size
        self._mine = slice(rank * size, (rank + 1) * size)
        super().__init__(
            stream.samples, batch_size=size, seed=stream.seed, batches=stream.batches, rank=0, world_size=1
        )

    def batch(self, number: int) -> list[tuple[int, int]]:
        """This rank's part of batch `number`."""
        return self._all.batch(number)[self._mine]


class Deliveries:
    """Where a `BatchStream` stands by the batches that were delivered, not those that were made ahead.

    Attributes:
        stream: which batches there are.
    """

    stream: BatchStream
    _step: int

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; see `BatchStream.set_epoch`."""
        self.stream.set_epoch(epoch)
        self._step = self.stream.step

    def state_dict(self) -> dict[str, Any]:
        """Where the deliveries stand, as plain data."""
        return {**self.stream.state_dict(), "next": self._step * self.stream.world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a `state_dict` was taken, by any loader of the same pairs.

        Raises:
            SpecError: the state of another series.
        """
        self.stream.load_state_dict(state)
        self._step = self.stream.step


class PairLoader(Deliveries, DataLoader[Any]):
    """A DataLoader over a `BatchStream`. Its state counts the batches that were delivered, not those that workers
    fetched ahead.

    Args:
        dataset: items by pairs of numbers.
        stream: which items, in batches.
        made: gives what is left of an epoch, in place of what a DataLoader does.
        options: of DataLoader: num_workers, pin_memory, ...

    Raises:
        SpecError: an option that the stream decides.
    """

    def __init__(
        self,
        dataset: Any,
        stream: BatchStream,
        *,
        made: Callable[[BatchStream], Generator[Any]] | None = None,
        **options: Any,
    ) -> None:
        taken = {"batch_sampler", "sampler", "shuffle", "drop_last"} & set(options)
        if taken:
            raise SpecError(
                f"{', '.join(sorted(taken))}: not an option of pairs, which decide their batches themselves"
            )
        self.stream, self._made = stream, made
        # Without one, DataLoader draws its workers' seeds from torch's global generator.
        options.setdefault("generator", generator_of("loader", stream.seed))
        super().__init__(dataset, batch_sampler=stream, **options)
        self._step = stream.step

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.stream.step = self._step
        if self._made is None:
            for batch in super().__iter__():
                self._step += 1
                yield batch
            return
        with closing(self._made(self.stream)) as batches:
            for batch in batches:
                self._step += 1
                yield batch

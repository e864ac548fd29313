"""A DataLoader of positive pairs of any kind: matched, rendered, or two views of one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from ident3d.checks import whole
from ident3d.conditionals import columns_of, share_of
from ident3d.conditionals import conditional as parse_conditional
from ident3d.datasets.batches import BatchStream, DividedStream, PairLoader, ranks_of
from ident3d.datasets.pair_batches import PairBatches
from ident3d.datasets.pairs import QUERIES, PairSampler, RenderedPairs, latents_of, table_of
from ident3d.datasets.pictures import Pictures, sample_of
from ident3d.datasets.views import ViewItems, ViewStream
from ident3d.distributions import Distribution
from ident3d.errors import DatasetError, SpecError
from ident3d.spaces import Box

__all__ = ["MATCHING", "SERIES", "pair_loader"]


class _PairItems(Dataset[tuple[Any, Any, Any, Any]]):
    """Items (x, x~, z, z~) by pairs of indices. All that a worker is sent.

    A batch of a dataset of ours is fetched at once; of a pair with a damaged picture that is skipped, nothing is left.
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, pair: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
        (x, z), (positive, z_positive) = (sample_of(self.data, i) for i in pair)
        return x, positive, z, z_positive

    def __getitems__(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[Any, Any, Any, Any]]:
        if not isinstance(self.data, Pictures):
            return [self[pair] for pair in pairs]
        anchors = self.data.numbered_samples([i for i, _ in pairs])
        positives = self._positives([j for _, j in pairs])
        whole = [k for k in range(len(pairs)) if k in anchors and k in positives]
        if not whole:
            raise DatasetError(f"{self.data.root}: every pair of a batch has a damaged picture")
        return [(anchors[k][0], positives[k][0], anchors[k][1], positives[k][1]) for k in whole]

    def _positives(self, places: Sequence[int]) -> dict[int, tuple[Any, Any]]:
        found: dict[int, tuple[Any, Any]] = self.data.numbered_samples(places)
        return found


class _RenderedItems(_PairItems):
    def __getitem__(self, pair: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
        items: tuple[Any, Any, Any, Any] = self.data.pair(pair[0])
        return items

    def _positives(self, places: Sequence[int]) -> dict[int, tuple[Any, Any]]:
        found: dict[int, tuple[Any, Any]] = self.data.numbered_samples(places, positive=True)
        return found


MATCHING = ("match", "factors", "weights", "allow_self", "within", "cache", "match_options")
SERIES = ("batches", "rank", "world_size")


def pair_loader(
    data: Any,
    conditional: str | Distribution | None = None,
    *,
    batch_size: int,
    seed: int = 0,
    share: Sequence[str | int] | None = None,
    change: int | None = None,
    views: Callable[[Any], Any] | None = None,
    divide: bool = False,
    **options: Any,
) -> PairLoader:
    """A DataLoader of positive pairs (x, x~, z, z~), batch by batch.

    One of three kinds: matched by a conditional (or its short forms `share` and `change`); two `views` of one picture;
    and where nothing is asked for, the pairs that the dataset was rendered with.

    Args:
        data: a dataset with `.latents` whose item i is (picture, latents).
        conditional: p(z~ | z); see `PairSampler`.
        batch_size: pairs a batch.
        seed: what the batches are drawn from.
        share: factors that z~ shares with z; all others are drawn again.
        change: how many factors z~ differs in.
        views: a random transform, e.g. `ident3d.simclr(64)`: both pictures are it, applied to one picture twice.
        divide: cut each batch over the ranks, in place of dealing out whole ones: `batch_size` is then that of all
            ranks together, and together they have the batches of one process.
        options: batches, rank, world_size of the series, and match, factors, weights, allow_self, within, cache,
            match_options of the matching, as for `PairSampler`; threads that make batches ahead (2 by default; 0 for
            none); all others go to DataLoader: num_workers, ... in place of threads.

    Raises:
        SpecError: no pairs to serve, or more than one kind asked for; what `PairSampler` refuses.
    """
    asked = {"conditional": conditional, "share": share, "change": change, "views": views}
    kinds = [name for name, value in asked.items() if value is not None]
    if len(kinds) > 1:
        raise SpecError(f"{' and '.join(kinds)}: expected one kind of pairs")
    matching = {name: options.pop(name) for name in MATCHING if name in options}
    series: dict[str, Any] = {"batch_size": batch_size, "seed": seed}
    series |= {name: options.pop(name) for name in SERIES if name in options}
    ranks = ranks_of(series.get("rank"), series.get("world_size")) if divide else (0, 1)
    if divide:
        series |= {"rank": 0, "world_size": 1}
    if matching and (not kinds or views is not None):
        raise SpecError(f"{', '.join(matching)}: for matched pairs, but no conditional is given")
    if views is None and isinstance(data, Pictures):
        options["made"] = _threads(data, options, rendered=not kinds)
    stream = _stream(data, conditional, share, change, views, series, matching)
    if ranks[1] > 1:
        stream = DividedStream(stream, *ranks)
    items = ViewItems(data, views) if views is not None else _PairItems(data) if kinds else _RenderedItems(data)
    return PairLoader(items, stream, **options)


def _stream(
    data: Any,
    conditional: str | Distribution | None,
    share: Sequence[str | int] | None,
    change: int | None,
    views: Callable[[Any], Any] | None,
    series: dict[str, Any],
    matching: dict[str, Any],
) -> BatchStream:
    """Which samples are in which batch."""
    if views is not None:
        return ViewStream(len(data), **series)
    if conditional is None and share is None and change is None:
        if not getattr(data, "has_pairs", False):
            raise SpecError("conditional: missing; these samples hold no positives of their own, so say what z~ is")
        return RenderedPairs(getattr(data, "pair_count", len(data)), **series)
    law = conditional if conditional is not None else _short_form(data, share, change)
    return PairSampler(data, law, **series, **matching)


def _threads(data: Pictures, options: dict[str, Any], *, rendered: bool) -> PairBatches | None:
    """What makes batches by threads; None where the options ask for what a DataLoader does otherwise."""
    asked = options.pop("threads", None)
    others = sorted(name for name in set(options) - {"pin_memory"} if options[name])
    if asked and others:
        raise SpecError(f"threads = {asked}: not together with {', '.join(others)}")
    threads = whole("threads", (0 if others else 2) if asked is None else asked, 0)
    if not threads:
        return None
    pin_memory = bool(options.get("pin_memory"))
    return PairBatches(data, rendered=rendered, threads=threads, at_once=QUERIES, pin_memory=pin_memory)


def _short_form(data: Any, share: Sequence[str | int] | None, change: int | None) -> Distribution:
    dim, table = latents_of(data).shape[1], table_of(data)
    if share is None:
        return parse_conditional(f"change(k={change!r})", Box(dim), table)
    return share_of(Box(dim), *columns_of(share, table, "share"), factors=table)

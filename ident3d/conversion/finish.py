"""From converted shards to a dataset: arrays, index, what was published besides, card and manifest."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d._version import __version__
from ident3d.conversion.plan import ConversionFolder
from ident3d.conversion.sources import Extra, ShardSource, Source
from ident3d.conversion.to_shards import ShardConversion, places_before
from ident3d.errors import DatasetError
from ident3d.factors import Categorical
from ident3d.files import array_sha256, write_atomic, write_json
from ident3d.render.plan import SPLITS
from ident3d.schema import from_plain, to_plain
from ident3d.shards.card import card_text
from ident3d.shards.manifest import (
    FORMAT,
    Manifest,
    ShardTally,
    SplitEntry,
    write_manifest,
)
from ident3d.shards.pull import fetch_scene
from ident3d.shards.remote import RemoteLocation
from ident3d.shards.summary import ShardSummary, file_sha256, write_index, write_rows

__all__ = ["clear", "finish_dataset", "finish_split", "missing_shard", "save_entry", "saved_entry"]

PIECE = 1 << 16
"""Rows of an array held at once."""


def _kept_rows(conversion: ShardConversion, array: NDArray[Any]) -> Iterable[NDArray[Any]]:
    for start in range(0, conversion.samples, PIECE):
        yield array[conversion.skipped.sources(start, min(conversion.samples, start + PIECE))]


def finish_split(conversion: ShardConversion) -> SplitEntry:
    """Write what makes a split of its finished shards; returns its entry in the manifest.

    Raises:
        DatasetError: a shard that was altered since it was written.
    """
    source, plan, target = conversion.source, conversion.plan, conversion.target
    data, count, width = source.data, conversion.samples, len(source.data.columns)
    shards = -(-count // plan.shard_size)
    tally = ShardTally(lambda shard: conversion.path(shard).name)
    summaries = tally.through(_summary(conversion, shard) for shard in range(shards))
    sums = {"latents": write_rows(target / "latents.npy", (count, width), "<f4", _kept_rows(conversion, data.latents))}
    if source.pairs:
        assert data.pair_latents is not None
        rows = _kept_rows(conversion, data.pair_latents)
        sums["pairs"] = write_rows(target / "pair.latents.npy", (count, width), "<f4", rows)
    if data.categorical:
        rows = _kept_rows(conversion, data.categories)
        sums["kinds"] = write_rows(target / "categories.npy", (count, len(data.categorical)), "<i8", rows)
    sums["index"] = write_index(target / "index.npy", count, len(conversion.members), summaries)
    extras = {name: _write_extra(conversion, name, extra) for name, extra in source.extras().items()}
    mean, std = tally.statistics(plan.resolution, 2 if source.pairs else 1)
    return SplitEntry(
        samples=count,
        shard_size=plan.shard_size,
        seed=source.seed,
        latents=_kept_word(conversion),
        latents_sha256=sums["latents"],
        index_sha256=sums["index"],
        mean=mean,
        std=std,
        shards=tuple(tally.shards),
        pairs=source.pairs,
        members=conversion.members,
        pair_latents_sha256=sums.get("pairs", ""),
        categories_sha256=sums.get("kinds", ""),
        extras=extras,
        consecutive=source.consecutive,
        skipped=_left_out(conversion),
    )


def _kept_word(conversion: ShardConversion) -> str:
    """The manifest's word on where the latents come from: drawn ones without some rows are no longer what was drawn."""
    source = conversion.source
    if source.kept_latents == "published" or not len(conversion.skipped):
        return source.kept_latents
    return array_sha256(source.data.latents[conversion.skipped.sources(0, conversion.samples)])


def _left_out(conversion: ShardConversion) -> tuple[int, ...]:
    """What was left out of the first source, now and by earlier conversions, by the indices there."""
    earlier = conversion.source.left_out
    now = places_before(earlier, np.array(conversion.skipped.indices, np.int64))
    return tuple(sorted([*earlier, *now.tolist()]))


def _summary(conversion: ShardConversion, shard: int) -> ShardSummary:
    return from_plain(ShardSummary, json.loads(conversion.sidecar(shard).read_text(encoding="utf-8")))


def _write_extra(conversion: ShardConversion, name: str, extra: Extra) -> str:
    """Keep a published array or table, without the rows of samples that were left out; returns its sha256."""
    path = conversion.target / name
    kept = np.ones(conversion.plan.samples, bool)
    kept[list(conversion.skipped.indices)] = False
    part = re.search(r"_(\d+)\.npy$", name)
    if part:  # of one class
        kept = kept[conversion.source.data.categories[:, 0] == int(part[1])]
    if isinstance(extra, bytes):
        write_atomic(path, extra if kept.all() else _kept_lines(extra, kept, header=name.endswith(".csv")))
        return file_sha256(path)
    rows: NDArray[Any] = extra if kept.all() else extra[kept]
    return write_rows(path, rows.shape, rows.dtype, (rows[i : i + PIECE] for i in range(0, len(rows), PIECE)))


def _kept_lines(content: bytes, kept: NDArray[np.bool_], *, header: bool) -> bytes:
    lines = io.BytesIO(content).readlines()  # which end with \n alone, unlike those of splitlines
    rows = lines[header:]
    return b"".join([*lines[:header], *(line for line, keep in zip(rows, kept, strict=False) if keep)])


def _merged(first: Sequence[Categorical], second: Sequence[Categorical]) -> tuple[Categorical, ...]:
    """The categorical factors of two splits: one may know only the first of the other's labels.

    Raises:
        DatasetError: they differ otherwise.
    """
    merged = []
    for a, b in zip(first, second, strict=True):
        long, short = (a, b) if len(a.labels) >= len(b.labels) else (b, a)
        if a.name != b.name or long.labels[: len(short.labels)] != short.labels:
            raise DatasetError(f"splits have different categorical factors: {a.name} {a.labels}, {b.name} {b.labels}")
        merged.append(long)
    return tuple(merged)


def save_entry(work: Path, entry: SplitEntry) -> None:
    """Keep the entry of a finished split until all that were asked for are finished."""
    write_json(work / "entry.json", to_plain(entry))


def saved_entry(work: Path) -> SplitEntry | None:
    """The entry that `save_entry` kept, or None."""
    try:
        saved = json.loads((work / "entry.json").read_text(encoding="utf-8"))
        return from_plain(SplitEntry, saved)
    except (OSError, ValueError):
        return None


def missing_shard(folder: Path, entry: SplitEntry) -> Path | None:
    """The first shard of a split that is absent or of another size."""
    for shard in entry.shards:
        path = folder / shard.name
        if not path.is_file() or path.stat().st_size != shard.bytes:
            return path
    return None


def finish_dataset(folder: ConversionFolder, sources: dict[str, Source], *, kept: bool) -> Manifest:
    """Write card and manifest of finished splits, the manifest last, and clear their working files.

    Args:
        folder: of the result.
        sources: of the splits that are new.
        kept: whether the pictures' bytes were kept.
    """
    first = next(iter(sources.values()))
    there = folder.manifest()
    splits = dict(there.splits) if there else {}
    categories = there.categories if there else first.data.categorical
    for split, source in sources.items():
        entry = saved_entry(folder.work(split))
        assert entry is not None
        splits[split] = entry
        categories = _merged(categories, source.data.categorical)
    versions = {"ident3d": __version__}
    if isinstance(first, ShardSource):
        versions = first.data.manifest.versions
        _keep_scene(folder.root, first)
    ordered = {name: splits[name] for name in (*SPLITS, *splits) if name in splits}
    manifest = Manifest(
        format=FORMAT,
        resolution=first.data.resolution,
        versions=versions,
        factors=tuple(first.data.columns),
        splits=ordered,
        categories=categories,
        **first.record(altered=not kept or any(split.skipped for split in splits.values())),
    )
    write_atomic(folder.root / "README.md", card_text(manifest).encode())
    write_manifest(folder.root, manifest)
    for split in sources:
        clear(folder.work(split))
    return manifest


def clear(work: Path) -> None:
    """Remove a split's working files, but for its plan, by which the same command finds all done, and another none."""
    for path in work.iterdir():
        if path.name != "plan.json":
            path.unlink() if path.is_file() else shutil.rmtree(path)


def _keep_scene(root: Path, source: ShardSource) -> None:
    manifest, location = source.data.manifest, source.data.location
    if manifest.scene is None:
        return
    (root / "scene").mkdir(exist_ok=True)
    if isinstance(location, RemoteLocation):  # which keeps files by their checksums; these have one together
        fetch_scene(location.source, root, manifest)
        return
    for name in ("scene.toml", manifest.scene.mesh):
        write_atomic(root / "scene" / name, location.path(f"scene/{name}").read_bytes())

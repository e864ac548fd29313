"""`ident3d convert`: from options to a converted dataset, or to a folder that the same command finishes later."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ident3d.conversion.encoding import KEEP
from ident3d.conversion.finish import clear, finish_dataset, finish_split, missing_shard, save_entry, saved_entry
from ident3d.conversion.options import ConvertOptions
from ident3d.conversion.plan import PUBLISHED, ConversionFolder, ConversionPlan
from ident3d.conversion.sources import ShardSource, Source, open_source, splits_of
from ident3d.conversion.to_published import PublishedSplit, published_layout
from ident3d.conversion.to_shards import ShardConversion, Skipped
from ident3d.conversion.workers import Workers
from ident3d.errors import DatasetError
from ident3d.render.dataset import Interrupted
from ident3d.render.plan import MAX_SAMPLES, auto_shard_size
from ident3d.shards.manifest import Manifest

__all__ = ["convert"]

SHOWN = 5
"""Samples left out that are named before the rest is counted."""

PROBES = 8
"""Samples whose size is taken for that of all."""


def convert(options: ConvertOptions) -> Path:
    """Convert a dataset, going on where an earlier call with the same options stopped.

    To shards: every published array and table is kept beside the samples, so that the way back gives them bit for bit.
    Pictures are streamed; a process killed at any moment leaves nothing that the next call would mistake for whole.

    Args:
        options: what, and into what.

    Returns:
        The folder of the result.

    Raises:
        SpecError: options that cannot be, or that differ from what the folder was begun with.
        DatasetError: a source that is none, or damaged (the text names file and sample), has changed since the
            conversion began, or has no published layout; a folder that is something else; a full disk. What is finished
            stays, and the same call goes on.
        BusyError: another conversion is at work there.
        Interrupted: Ctrl-C. What is finished stays.

    Example:
        >>> from ident3d import ConvertOptions, convert
        >>> str(convert(ConvertOptions("teapots", "teapots-webp", format="webp", quiet=True)))
        'teapots-webp'
    """
    there = splits_of(options.src)
    names = options.splits or there
    for name in names:
        if name not in there:
            raise DatasetError(f"{options.src}: no split {name!r}; it has {', '.join(there)}")
    sources = {name: open_source(options.src, name) for name in names}
    plans = {name: _plan(options, name, source) for name, source in sources.items()}
    folder = ConversionFolder(options.out)
    for plan in plans.values():
        folder.check(plan)
    folder.create()
    with folder.lock(), folder.disk_errors():
        for plan in plans.values():
            folder.check(plan)  # again: another may have begun meanwhile
        conversion = _Conversion(options, sources, plans, folder)
        if options.to == PUBLISHED:
            conversion.to_published()
        else:
            conversion.to_shards()
    return options.out


def _plan(options: ConvertOptions, split: str, source: Source) -> ConversionPlan:
    count = len(source.data)
    if count > MAX_SAMPLES:
        raise DatasetError(f"{options.src}: {count:,} samples; a dataset holds up to {MAX_SAMPLES:,} a split")
    size, layout = 0, source.layout
    if options.to == PUBLISHED:
        layout = published_layout(source).name
    elif options.shard_size is not None:
        size = options.shard_size
    else:
        size = source.entry.shard_size if isinstance(source, ShardSource) else auto_shard_size(count)
    return ConversionPlan(
        to=options.to,
        layout=layout,
        dataset=source.identity,
        source=source.fingerprint(),
        split=split,
        samples=count,
        resolution=source.data.resolution,
        format=options.format,
        shard_size=size,
    )


class _Conversion:
    """One call of `convert`, past the checks and under the lock."""

    def __init__(
        self,
        options: ConvertOptions,
        sources: dict[str, Source],
        plans: dict[str, ConversionPlan],
        folder: ConversionFolder,
    ) -> None:
        self.options, self.sources, self.plans, self.folder = options, sources, plans, folder
        self.begun = set(folder.saved_plans(ConversionPlan))

    def to_shards(self) -> None:
        """Write the shards of all splits, then the manifest."""
        manifest, out = self.folder.manifest(), self.options.out
        todo = [split for split in self.plans if not self.is_done(split, manifest)]
        for split in todo:
            self.begin(split, out / split)
        reasons: list[str] = []
        with Workers(self.options.count) as workers:
            for split in todo:
                if not self.is_finished(split):
                    self.shards_of(split, workers)
                reasons += Skipped(self.folder.work(split)).reasons.values()
        if todo:
            finish_dataset(
                self.folder, {split: self.sources[split] for split in todo}, kept=self.options.format == KEEP
            )
        if reasons:
            shown = "".join(f"\n  {reason}" for reason in reasons[:SHOWN])
            more = f"\n  and {len(reasons) - SHOWN:,} more" if len(reasons) > SHOWN else ""
            what = "damaged samples were" if len(reasons) > 1 else "damaged sample was"
            warnings.warn(f"{out}: {len(reasons):,} {what} left out:{shown}{more}", stacklevel=3)

    def to_published(self) -> None:
        """Write each split in the published layout, one after the other."""
        with Workers(self.options.count) as workers:
            for split, plan in self.plans.items():
                source = self.sources[split]
                assert isinstance(source, ShardSource)
                job = PublishedSplit(source, plan, self.options.out, self.folder.work(split), workers)
                if split not in self.begun or not job.place.exists():
                    self.begin(split, job.place)
                    self.run(job, [job.tree])
                clear(self.folder.work(split))

    def begin(self, split: str, place: Path) -> None:
        """Keep a split's plan, unless an earlier call did.

        Raises:
            DatasetError: something else is where its files belong.
        """
        if split in self.begun:
            return
        if place.exists():
            raise DatasetError(f"{place}: is there already, and not of this conversion; choose another folder")
        self.folder.save(split, self.plans[split])

    def is_done(self, split: str, manifest: Manifest | None) -> bool:
        """Whether a split is in the manifest already.

        Raises:
            DatasetError: it is, but a shard is gone or was cut.
        """
        if manifest is None or split not in manifest.splits or split not in self.begun:
            return False
        gone = missing_shard(self.options.out / split, manifest.splits[split])
        if gone:
            raise DatasetError(f"{gone}: missing or of another size; convert into another folder")
        clear(self.folder.work(split))
        return True

    def is_finished(self, split: str) -> bool:
        """Whether an earlier call finished a split, while others were still to come."""
        entry = saved_entry(self.folder.work(split))
        return entry is not None and missing_shard(self.options.out / split, entry) is None

    def shards_of(self, split: str, workers: Workers) -> None:
        """Write the shards of one split, and keep its entry for the manifest."""
        source, plan = self.sources[split], self.plans[split]
        target, work = self.options.out / split, self.folder.work(split)
        target.mkdir(exist_ok=True)
        job = ShardConversion(source, plan, target, work, workers, skip=self.options.on_error == "skip")
        self.run(job, [target])
        save_entry(work, finish_split(job))

    def run(self, job: ShardConversion | PublishedSplit, folders: Sequence[Path]) -> None:
        """Do a split's long work, with a progress bar.

        Raises:
            Interrupted: Ctrl-C.
        """
        self.check_disk(job, folders)
        split, total = job.plan.split, job.plan.samples
        disable = True if self.options.quiet else None  # None: where stderr is no terminal
        bar: tqdm[Any]
        with tqdm(total=total, desc=split, unit=" samples", disable=disable, smoothing=0.05) as bar:
            try:
                job.run(bar)
            except KeyboardInterrupt:
                raise Interrupted(
                    f"interrupted: {job.done:,} of {total:,} samples of split {split} are done in {self.options.out}; "
                    "run the same command to go on"
                ) from None

    def check_disk(self, job: ShardConversion | PublishedSplit, folders: Sequence[Path]) -> None:
        """Refuse what will not fit, rather than find out after hours: by the size of some samples."""
        sizes = []
        for index in np.linspace(0, job.plan.samples - 1, PROBES).astype(int).tolist():
            with contextlib.suppress(DatasetError):  # a damaged one is met in its turn
                sizes.append(job.size(index))
        there = sum(p.stat().st_blocks * 512 for folder in folders for p in folder.rglob("*") if p.is_file())
        need = 0.9 * job.plan.samples * float(np.mean(sizes or [0])) - there
        free = shutil.disk_usage(self.options.out).free
        if need > free:
            raise DatasetError(
                f"{self.options.out}: split {job.plan.split} needs about {need / 1e9:,.2f} GB more, "
                f"{free / 1e9:,.2f} GB are free; make room, or convert elsewhere"
            )

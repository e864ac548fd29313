"""Checking a dataset on disk against its manifest: every byte, and every picture."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ident3d.errors import SpecError
from ident3d.files import npy_bytes, read_npy
from ident3d.scene import SceneSpec
from ident3d.shards.manifest import Manifest, SplitEntry, read_manifest
from ident3d.shards.reader import member_offsets
from ident3d.shards.salvage import find_samples
from ident3d.shards.summary import BadSample, check_sample, file_sha256, map_file
from ident3d.shards.tar import Sample

__all__ = [
    "Listed",
    "Problem",
    "SplitCheck",
    "load_latents",
    "progress_bar",
    "scene_problems",
    "other_sums",
    "verify_dataset",
]

MOST_SAMPLES = 10_000
"""So many damaged samples are listed; past them, of each shard the number alone. A billion could be damaged."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        file: relative to the dataset's folder.
        detail: what is wrong with it.
        split: the split that it belongs to, empty for the scene.
        shard: the shard's number, or None for another file.
        sample: the sample's index in the split, or None where it is the file as a whole.
    """

    file: str
    detail: str
    split: str = ""
    shard: int | None = None
    sample: int | None = None

    def __str__(self) -> str:
        where = self.file if self.sample is None else f"{self.file}, sample {self.sample}"
        return f"{where}: {self.detail}"


def verify_dataset(root: Path, *, quick: bool = False, quiet: bool = True) -> list[Problem]:
    """Everything that is wrong with a dataset; an empty list where all is well.

    Finds files that are missing, left over, truncated or altered (size, sha256), and within shards samples that are
    missing, misnumbered, do not decode, or hold other latents than latents.npy. Of more than 10,000 damaged samples,
    those past are counted by shard. Arrays are mapped, and results kept for damage alone: memory does not grow with
    the dataset.

    Args:
        root: the dataset's folder.
        quick: checksums alone; by default every picture is decoded too.
        quiet: no progress bar; there is none either where stderr is no terminal.

    Raises:
        DatasetError: no dataset there, or a manifest that cannot be read: there is nothing to check against.
    """
    manifest = read_manifest(root)
    problems = scene_problems(root, manifest)
    total = sum(len(split.shards) for split in manifest.splits.values())
    listed = Listed()
    with progress_bar(total, quiet) as bar:
        for name, split in manifest.splits.items():
            check = SplitCheck(root, manifest, name, quick=quick)
            problems += check.file_problems()
            problems += check.left_over()
            for found in check.shards(range(len(split.shards))):
                bar.update()
                problems += listed.shortened(found)
    return problems


def load_latents(path: Path, sha256: str) -> NDArray[np.float32] | None:
    """A split's latents.npy or pair.latents.npy, mapped, or None where it is not what the manifest's checksum says."""
    if not path.is_file() or file_sha256(path) != sha256:
        return None
    return read_npy(path, mapped=True)


def progress_bar(total: int, quiet: bool) -> tqdm[Any]:
    """A bar of shards; none where stderr is no terminal."""
    return tqdm(total=total, unit="shard", disable=True if quiet else None)


class Listed:
    """Counts the damaged samples that are listed one by one."""

    def __init__(self) -> None:
        self.left = MOST_SAMPLES

    def shortened(self, found: list[Problem]) -> list[Problem]:
        """The problems of a shard, or past `MOST_SAMPLES` their number."""
        samples = [p for p in found if p.sample is not None]
        if len(samples) <= self.left:
            self.left -= len(samples)
            return found
        more = samples[self.left]
        rest = Problem(more.file, f"{len(samples) - self.left:,} more samples are damaged", more.split, more.shard)
        shown = [*(p for p in found if p.sample is None), *samples[: self.left], rest]
        self.left = 0
        return shown


def scene_problems(root: Path, manifest: Manifest) -> list[Problem]:
    """What is wrong with the scene that a dataset keeps."""
    if manifest.scene is None:
        return []
    spec, mesh = root / "scene" / "scene.toml", root / "scene" / manifest.scene.mesh
    missing = [Problem(f"scene/{p.name}", "missing") for p in (spec, mesh) if not p.is_file()]
    if missing:
        return missing
    try:
        digest = SceneSpec.from_toml(spec.read_text(encoding="utf-8")).digest(mesh.read_bytes())
    except (SpecError, OSError, UnicodeDecodeError) as error:
        return [Problem("scene/scene.toml", f"altered: {error}")]
    if digest != manifest.scene.digest:
        return [Problem("scene", "altered: spec and mesh are not those that the pictures were rendered from")]
    return []


def other_sums(entry: SplitEntry) -> dict[str, str]:
    """The files of a split besides its shards, and their checksums."""
    sums = {"latents.npy": entry.latents_sha256, "index.npy": entry.index_sha256}
    if entry.pairs:
        sums["pair.latents.npy"] = entry.pair_latents_sha256
    if entry.categories_sha256:
        sums["categories.npy"] = entry.categories_sha256
    return sums | entry.extras


def _tars(folder: Path) -> dict[str, int]:
    """The sizes of the shards in a folder, by name: one listing, which costs less than to look for each."""
    sizes = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".tar"):
                with suppress(OSError):  # a link to nowhere
                    sizes[entry.name] = entry.stat().st_size if entry.is_file() else -1
    return {name: size for name, size in sizes.items() if size >= 0}


class SplitCheck:
    """The checks of one split.

    Args:
        root: the dataset's folder.
        manifest: its manifest.
        split: the split's name.
        quick: decode no picture of a shard whose checksum is right.
        sampled: take the arrays' word on their shape alone, and compare their rows with the shards that are read.
    """

    def __init__(self, root: Path, manifest: Manifest, split: str, *, quick: bool, sampled: bool = False) -> None:
        self.root, self.manifest, self.split, self.quick, self.sampled = root, manifest, split, quick, sampled
        self.entry = manifest.splits[split]
        self.sizes = _tars(root / split)
        self.arrays: dict[str, NDArray[Any]] = {}

    def problem(self, name: str, detail: str, shard: int | None = None, sample: int | None = None) -> Problem:
        """A problem of this split."""
        return Problem(f"{self.split}/{name}", detail, self.split, shard, sample)

    def file_problems(self) -> Iterator[Problem]:
        """Of the files besides the shards; maps the good arrays, which the shards are compared with."""
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            name: ((self.entry.samples, len(self.manifest.factors)), np.float32)
            for name in ("latents.npy", "pair.latents.npy")
        }
        shapes["index.npy"] = ((self.entry.samples, len(self.entry.members), 2), np.int64)
        shapes["categories.npy"] = ((self.entry.samples, len(self.manifest.categories)), np.int64)
        for name, expected in other_sums(self.entry).items():
            path = self.root / self.split / name
            if not path.is_file():
                yield self.problem(name, "missing")
            elif not self.sampled and file_sha256(path) != expected:
                yield self.problem(name, "altered: sha256 differs from the manifest's")
            elif name in shapes:
                try:
                    array = read_npy(path, mapped=True)
                except (OSError, ValueError) as error:
                    yield self.problem(name, f"altered: {error}")
                    continue
                shape, dtype = shapes[name]
                if (array.shape, array.dtype) == (shape, dtype):
                    self.arrays[name] = array
                else:
                    yield self.problem(
                        name, f"altered: holds {array.dtype} {array.shape}, expected {np.dtype(dtype)} {shape}"
                    )

    def left_over(self) -> Iterator[Problem]:
        """Shards that the manifest does not name."""
        for name in sorted(self.sizes.keys() - {shard.name for shard in self.entry.shards}):
            yield self.problem(name, "left over: the manifest names no such shard")

    def wrong_sizes(self) -> Iterator[tuple[int, Problem]]:
        """Shards that are missing or of another size, by number."""
        for number, shard in enumerate(self.entry.shards):
            found = self.size_problem(number, self.sizes.get(shard.name))
            if found is not None:
                yield number, found

    def size_problem(self, number: int, size: int | None) -> Problem | None:
        """What a shard's size says, None for one that is not there."""
        shard = self.entry.shards[number]
        if size is None:
            return self.problem(shard.name, "missing", number)
        if size == shard.bytes:
            return None
        word = "truncated" if size < shard.bytes else "longer than written"
        return self.problem(shard.name, f"{word}: {size} bytes of {shard.bytes}", number)

    def shards(self, numbers: Iterable[int]) -> Iterator[list[Problem]]:
        """What is wrong with some shards, in order."""
        # Threads suffice: hashing and decoding release the interpreter lock.
        workers = os.cpu_count() or 1
        with ThreadPoolExecutor(max_workers=workers) as pool:
            yield from _in_order(pool, lambda number: list(self.shard_problems(number)), numbers, 4 * workers)

    def shard_problems(self, number: int) -> Iterator[Problem]:
        """All that is wrong with a shard; the first problem is of the file as a whole, if any is."""
        shard = self.entry.shards[number]
        if shard.name not in self.sizes:
            yield self.problem(shard.name, "missing", number)
            return
        with map_file(self.root / self.split / shard.name) as data:
            altered = self.size_problem(number, len(data))
            if altered is None and hashlib.sha256(data).hexdigest() != shard.sha256:
                altered = self.problem(shard.name, "altered: sha256 differs from the manifest's", number)
            if altered is not None:
                yield altered
            elif self.quick and not self.sampled:
                return
            start = number * self.entry.shard_size
            found = find_samples(data, start, shard.samples, self.entry.members)
            if altered is None and self.sampled:  # then the arrays are wrong where they differ
                yield from self.row_problems(data, number, found)
            if altered is not None or not self.quick:
                rows = None if altered is None and self.sampled else self.rows(start, start + shard.samples)
                yield from self.sample_problems(data, number, found, rows)

    def rows(self, start: int, stop: int) -> NDArray[np.float32] | None:
        """What some samples must hold, (n, d), or (n, 2, d) for pairs; None where it is not known."""
        names = ["latents.npy", "pair.latents.npy"] if self.entry.pairs else ["latents.npy"]
        if not all(name in self.arrays for name in names):
            return None
        parts = [np.array(self.arrays[name][start:stop]) for name in names]
        return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)

    def row_problems(self, data: memoryview, number: int, found: dict[int, Sample]) -> Iterator[Problem]:
        """Arrays that hold other rows than a good shard does."""
        shard, start = self.entry.shards[number], number * self.entry.shard_size
        samples = [found[place] for place in sorted(found)]
        if len(samples) != shard.samples:
            return  # told sample by sample
        stop = start + shard.samples
        different = f"altered: rows {start} to {stop - 1} differ from what {shard.name} holds"
        index = self.arrays.get("index.npy")
        if index is not None and not np.array_equal(index[start:stop], member_offsets(samples)):
            yield self.problem("index.npy", different)
        for name in ("latents.npy", "pair.latents.npy"):
            if name not in self.arrays:
                continue
            members = [sample.members[name] for sample in samples]
            stored = (data[m.offset : m.offset + m.size] for m in members)
            if any(a != npy_bytes(row) for a, row in zip(stored, self.arrays[name][start:stop], strict=True)):
                yield self.problem(name, different)

    def sample_problems(
        self, data: memoryview, number: int, found: dict[int, Sample], rows: NDArray[np.float32] | None
    ) -> Iterator[Problem]:
        """What is wrong with the samples of a shard.

        Args:
            data: its bytes.
            number: of the shard.
            found: the whole samples in it, by place.
            rows: the latents that they must hold, where they are known.
        """
        shard, start = self.entry.shards[number], number * self.entry.shard_size
        for place in range(shard.samples):
            index = start + place
            if place not in found:
                detail = "missing, misnumbered or torn: no whole sample of this number"
                yield self.problem(shard.name, detail, number, index)
                continue
            try:
                latent = None if rows is None else rows[place]
                check_sample(data, found[place], index, latent, self.manifest.resolution)
            except BadSample as error:
                yield self.problem(shard.name, str(error), number, index)


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[int], list[Problem]], numbers: Iterable[int], ahead: int
) -> Iterator[list[Problem]]:
    """`pool.map`, which would hold a future for each of a million shards."""
    waiting: deque[Future[list[Problem]]] = deque()
    for number in numbers:
        waiting.append(pool.submit(work, number))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()

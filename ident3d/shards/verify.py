"""Checking a dataset on disk against its manifest: every byte, and every picture."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ident3d.errors import SpecError
from ident3d.files import read_npy
from ident3d.scene import SceneSpec
from ident3d.shards.manifest import Manifest, ShardEntry, SplitEntry, read_manifest
from ident3d.shards.salvage import find_samples
from ident3d.shards.summary import BadSample, check_sample, file_sha256, map_file

__all__ = ["Problem", "load_latents", "verify_dataset"]


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
    missing, misnumbered, do not decode, or hold other latents than latents.npy.

    Args:
        root: the dataset's folder.
        quick: checksums alone; by default every picture is decoded too.
        quiet: no progress bar; there is none either where stderr is no terminal.

    Raises:
        DatasetError: no dataset there, or a manifest that cannot be read: there is nothing to check against.
    """
    manifest = read_manifest(root)
    problems = _scene_problems(root, manifest)
    total = sum(len(split.shards) for split in manifest.splits.values())
    bar: tqdm[Any]
    with tqdm(total=total, unit="shard", disable=True if quiet else None) as bar:
        for name in manifest.splits:
            problems += _split_problems(root, manifest, name, quick, bar)
    return problems


def load_latents(path: Path, sha256: str) -> NDArray[np.float32] | None:
    """A split's latents.npy or pair.latents.npy, or None where it is not what the manifest's checksum says."""
    if not path.is_file() or file_sha256(path) != sha256:
        return None
    return read_npy(path)


def _stored_latents(folder: Path, entry: SplitEntry) -> NDArray[np.float32] | None:
    """What the samples of a split must hold, (N, 10), or (N, 2, 10) for pairs."""
    latents = load_latents(folder / "latents.npy", entry.latents_sha256)
    if latents is None or not entry.pairs:
        return latents
    positives = load_latents(folder / "pair.latents.npy", entry.pair_latents_sha256)
    return None if positives is None else np.stack([latents, positives], axis=1)


def _scene_problems(root: Path, manifest: Manifest) -> list[Problem]:
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


def _split_problems(root: Path, manifest: Manifest, split: str, quick: bool, bar: tqdm[Any]) -> Iterator[Problem]:
    entry = manifest.splits[split]
    sums = {"latents.npy": entry.latents_sha256, "index.npy": entry.index_sha256}
    if entry.pairs:
        sums["pair.latents.npy"] = entry.pair_latents_sha256
    if entry.categories_sha256:
        sums["categories.npy"] = entry.categories_sha256
    sums |= entry.extras
    for name, expected in sums.items():
        path = root / split / name
        if not path.is_file():
            yield Problem(f"{split}/{name}", "missing", split)
        elif file_sha256(path) != expected:
            yield Problem(f"{split}/{name}", "altered: sha256 differs from the manifest's", split)
    known = {shard.name for shard in entry.shards}
    for path in sorted((root / split).glob("*.tar")):
        if path.name not in known:
            yield Problem(f"{split}/{path.name}", "left over: the manifest names no such shard", split)
    latents = _stored_latents(root / split, entry)

    def check(number: int) -> list[Problem]:
        return list(_shard_problems(root, manifest, split, number, latents, quick))

    # Threads suffice: hashing and decoding release the interpreter lock.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for found in pool.map(check, range(len(entry.shards))):
            bar.update()
            yield from found


def _shard_problems(
    root: Path,
    manifest: Manifest,
    split: str,
    number: int,
    latents: NDArray[np.float32] | None,
    quick: bool,
) -> Iterator[Problem]:
    shard = manifest.splits[split].shards[number]
    path, file = root / split / shard.name, f"{split}/{shard.name}"
    if not path.is_file():
        yield Problem(file, "missing", split, number)
        return
    with map_file(path) as data:
        if len(data) != shard.bytes:
            word = "truncated" if len(data) < shard.bytes else "longer than written"
            yield Problem(file, f"{word}: {len(data)} bytes of {shard.bytes}", split, number)
            altered = True
        else:
            altered = hashlib.sha256(data).hexdigest() != shard.sha256
            if altered:
                yield Problem(file, "altered: sha256 differs from the manifest's", split, number)
        if altered or not quick:
            start = number * manifest.splits[split].shard_size
            members = manifest.splits[split].members
            for sample, detail in _sample_problems(data, shard, start, latents, manifest.resolution, members):
                yield Problem(file, detail, split, number, sample)


def _sample_problems(
    data: memoryview,
    shard: ShardEntry,
    start: int,
    latents: NDArray[np.float32] | None,
    resolution: int,
    members: tuple[str, ...],
) -> Iterator[tuple[int, str]]:
    found = find_samples(data, start, shard.samples, members)
    for place in range(shard.samples):
        index = start + place
        if place not in found:
            yield index, "missing, misnumbered or torn: no whole sample of this number"
            continue
        try:
            check_sample(data, found[place], index, None if latents is None else latents[index], resolution)
        except BadSample as error:
            yield index, str(error)

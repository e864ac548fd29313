"""The manifest `dataset.json`: what a dataset is, where it came from, and the checksum of every shard."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import DatasetError, SpecError
from ident3d.factors import Factor, Factors
from ident3d.files import write_json
from ident3d.schema import from_plain, to_plain
from ident3d.shards.summary import EXTENSIONS, PAIR_EXTENSIONS, ShardSummary

__all__ = [
    "FORMAT",
    "Manifest",
    "SceneRecord",
    "ShardEntry",
    "SplitEntry",
    "index_array",
    "pixel_statistics",
    "read_manifest",
    "shard_name",
    "write_manifest",
]

FORMAT = 1
NAME = "dataset.json"


@dataclass(frozen=True)
class ShardEntry:
    """One shard: its file name, how many samples it holds, its size and checksum."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitEntry:
    """One split.

    Attributes:
        samples: how many in all.
        shard_size: samples a shard; the last may hold fewer.
        seed: what latents (where drawn) and Cycles seeds were drawn from.
        latents: `drawn`, or the sha256 of the array that the user gave (float32, C order).
        pairs: the conditional that each sample's z~ was drawn from, or empty where samples hold no pair.
        members: the extensions of a sample's members, in order.
        latents_sha256: of the file latents.npy.
        pair_latents_sha256: of the file pair.latents.npy, or empty.
        index_sha256: of the file index.npy.
        mean: per channel, of all pixels, in [0, 1].
        std: per channel, over all pixels (not the mean of each picture's).
        shards: in order.
    """

    samples: int
    shard_size: int
    seed: int
    latents: str
    latents_sha256: str
    index_sha256: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    shards: tuple[ShardEntry, ...]
    pairs: str = ""
    members: tuple[str, ...] = EXTENSIONS
    pair_latents_sha256: str = ""

    def __post_init__(self) -> None:
        expected = PAIR_EXTENSIONS if self.pairs else EXTENSIONS
        if self.members != expected:
            raise SpecError(f"members = {list(self.members)}: expected {list(expected)}")
        if bool(self.pairs) != bool(self.pair_latents_sha256):
            raise SpecError(f"pair_latents_sha256 = {self.pair_latents_sha256!r}, but pairs = {self.pairs!r}")


@dataclass(frozen=True)
class SceneRecord:
    """The scene that a dataset was rendered from; its text and mesh are kept in the dataset's folder `scene/`.

    Attributes:
        name: the spec's name.
        digest: sha256 of all that the pictures depend on (`SceneSpec.digest`).
        mesh: the mesh's file name in `scene/`.
    """

    name: str
    digest: str
    mesh: str


@dataclass(frozen=True)
class Manifest:
    """A dataset. `render` holds the render settings as they were resolved, `versions` those of ident3d and Blender."""

    format: int
    name: str
    resolution: int
    quality: str
    device: str
    render: dict[str, Any]
    versions: dict[str, str]
    scene: SceneRecord
    factors: tuple[Factor, ...]
    splits: dict[str, SplitEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise SpecError(f"format = {self.format}: expected {FORMAT}")
        for program in ("ident3d", "blender"):
            if program not in self.versions:
                raise SpecError(f"versions.{program}: missing; expected a text")

    @property
    def factor_table(self) -> Factors:
        """The ten factors, as the scene drives them."""
        return Factors(self.factors)


def shard_name(split: str, shard: int) -> str:
    """The file name of a shard, e.g. `train-000003.tar`."""
    return f"{split}-{shard:06d}.tar"


def read_manifest(root: Path) -> Manifest:
    """Read the manifest of the dataset in folder `root`.

    Raises:
        DatasetError: no folder, no manifest (an unfinished render is told apart), not JSON, not the format, or a
            newer version of it.
    """
    path = root / NAME
    if not root.is_dir():
        raise DatasetError(f"{root}: no such folder; expected a dataset made by `ident3d render`")
    if not path.is_file():
        if any((root / ".render").glob("*/plan.json")):
            raise DatasetError(f"{root}: its render is not finished; run the same `ident3d render` again to go on")
        raise DatasetError(f"{root}: no {NAME} in it; expected a dataset made by `ident3d render`")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from None
    version = data.get("format") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise DatasetError(f"{path}: format {version}; this ident3d reads up to {FORMAT}: pip install -U ident3d")
    try:
        return from_plain(Manifest, data)
    except SpecError as error:
        raise DatasetError(f"{path}: not a manifest: {error}") from None


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest atomically."""
    write_json(root / NAME, to_plain(manifest))


def index_array(summaries: Sequence[ShardSummary]) -> NDArray[np.int64]:
    """The content of index.npy: for every sample and member, its byte offset and size in its shard, (N, members, 2)."""
    return np.concatenate([np.array(s.offsets, np.int64) for s in summaries])


def pixel_statistics(
    summaries: Sequence[ShardSummary], resolution: int, pictures: int = 1
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and std per channel over all pixels, in [0, 1], from exact integer sums; so many pictures a sample."""
    pixels = sum(s.samples for s in summaries) * pictures * resolution**2
    mean, std = [], []
    for channel in range(3):
        first = sum(s.sums[channel] for s in summaries)
        second = sum(s.squares[channel] for s in summaries)
        mean.append(first / pixels / 255)
        std.append(math.sqrt((second * pixels - first**2) / pixels**2) / 255)
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])

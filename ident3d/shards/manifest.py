"""The manifest `dataset.json`: what a dataset is, where it came from, and the checksum of every shard."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ident3d.errors import DatasetError, SpecError
from ident3d.factors import Categorical, Factor, Factors
from ident3d.files import write_json
from ident3d.schema import from_plain, to_plain
from ident3d.shards.summary import EXTENSIONS, ShardSummary, is_layout

__all__ = [
    "FORMAT",
    "Manifest",
    "SceneRecord",
    "ShardEntry",
    "ShardTally",
    "SourceRecord",
    "SplitEntry",
    "parse_manifest",
    "read_manifest",
    "shard_name",
    "write_manifest",
]

FORMAT = 1
NAME = "dataset.json"


_is_name = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,199}").fullmatch
_is_sha256 = re.compile("[0-9a-f]{64}").fullmatch


def _check_name(where: str, name: str) -> None:
    """Manifests come from strangers, and their names become paths."""
    if not _is_name(name):
        raise SpecError(f"{where} = {name!r}: expected a plain file name")


def _check_sha256(where: str, digest: str, *, empty: bool = False) -> None:
    if not _is_sha256(digest) and not (empty and not digest):
        raise SpecError(f"{where} = {digest!r}: expected 64 hexadecimal digits")


@dataclass(frozen=True, slots=True)  # slots: there can be a million of them
class ShardEntry:
    """One shard: its file name, how many samples it holds, its size and checksum."""

    name: str
    samples: int
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_sha256("sha256", self.sha256)
        if self.bytes < 1:
            raise SpecError(f"bytes = {self.bytes}: expected 1 or more")

    def __reduce__(self) -> tuple[Any, ...]:
        return (ShardEntry, (self.name, self.samples, self.bytes, self.sha256))


@dataclass(frozen=True)
class SplitEntry:
    """One split.

    Attributes:
        samples: how many in all.
        shard_size: samples a shard; the last may hold fewer.
        seed: what latents (where drawn) and Cycles seeds were drawn from.
        latents: `drawn`, `published` for a converted dataset, or the sha256 of the array that the user gave (float32, C
            order).
        pairs: the conditional that each sample's z~ was drawn from, or empty where samples hold no pair.
        members: the extensions of a sample's members, in order.
        latents_sha256: of the file latents.npy.
        pair_latents_sha256: of the file pair.latents.npy, or empty.
        index_sha256: of the file index.npy.
        mean: per channel, of all pixels, in [0, 1].
        std: per channel, over all pixels (not the mean of each picture's).
        shards: in order.
        categories_sha256: of the file categories.npy, or empty where there are no categorical factors.
        extras: files besides, which a conversion keeps, by name in the split's folder: their sha256.
        consecutive: whether the samples are frames in order of time, so that neighbours are positive pairs.
        skipped: samples of the source that a conversion left out, since they were damaged; by their index there.
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
    categories_sha256: str = ""
    extras: dict[str, str] = field(default_factory=dict)
    consecutive: bool = False
    skipped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not is_layout(self.members, pairs=bool(self.pairs)):
            raise SpecError(f"members = {list(self.members)}: expected [png, latents.npy] or others of the format")
        for name, digest in self.extras.items():
            _check_name("extras", name)
            _check_sha256(f"extras.{name}", digest)
        for name in ("latents_sha256", "index_sha256"):
            _check_sha256(name, getattr(self, name))
        for name in ("pair_latents_sha256", "categories_sha256"):
            _check_sha256(name, getattr(self, name), empty=True)
        if bool(self.pairs) != bool(self.pair_latents_sha256):
            raise SpecError(f"pair_latents_sha256 = {self.pair_latents_sha256!r}, but pairs = {self.pairs!r}")

    def check_shards(self) -> None:
        """Refuse shards that are not those of the samples: readers find sample i in shard i // shard_size.

        Raises:
            SpecError: other counts, or two of the same name.
        """
        if self.samples < 1 or self.shard_size < 1:
            raise SpecError(f"samples = {self.samples}, shard_size = {self.shard_size}: expected 1 or more")
        whole, rest = divmod(self.samples, self.shard_size)
        count = whole + bool(rest)
        last = rest or self.shard_size
        fit = len(self.shards) == count and self.shards[-1].samples == last
        if not fit or any(shard.samples != self.shard_size for shard in self.shards[:-1]):
            raise SpecError(f"shards: expected {count} of {self.shard_size} samples, {self.samples} in all")
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise SpecError("shards: two of the same name")


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

    def __post_init__(self) -> None:
        _check_name("mesh", self.mesh)


@dataclass(frozen=True)
class SourceRecord:
    """What a dataset was converted from.

    Attributes:
        layout: of a published dataset on disk, e.g. `3dident`, or `shards`.
        title: in words.
        license: its licence on the Hub's list, e.g. `cc-by-4.0`, or `unknown`.
        citation: whom to cite.
    """

    layout: str
    title: str
    license: str
    citation: str


@dataclass(frozen=True)
class Manifest:
    """A dataset: rendered here (`scene`), converted from a published one (`source`), or rendered and then altered by a
    conversion (both).

    Attributes:
        format: of this file.
        name: the dataset's.
        resolution: the pictures' side in pixels.
        quality: the name of the render settings, or empty.
        device: what rendered, or empty.
        render: the render settings as they were resolved.
        versions: those of ident3d and, where it rendered, Blender.
        scene: what was rendered, or None.
        factors: one a column of the latents.
        splits: by name.
        categories: the categorical factors, one a column of categories.npy.
        source: what was converted, or None.
    """

    format: int
    name: str
    resolution: int
    quality: str
    device: str
    render: dict[str, Any]
    versions: dict[str, str]
    scene: SceneRecord | None
    factors: tuple[Factor, ...]
    splits: dict[str, SplitEntry] = field(default_factory=dict)
    categories: tuple[Categorical, ...] = ()
    source: SourceRecord | None = None

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise SpecError(f"format = {self.format}: expected {FORMAT}")
        for split in self.splits:
            _check_name("splits", split)
        if self.resolution < 1:
            raise SpecError(f"resolution = {self.resolution}: expected 1 or more")
        if self.scene is None and self.source is None:
            raise SpecError("scene, source: expected one of the two at least")
        for program in ("ident3d", "blender") if self.scene else ("ident3d",):
            if program not in self.versions:
                raise SpecError(f"versions.{program}: missing; expected a text")

    @property
    def factor_table(self) -> Factors:
        """The factors, as the scene drives them, one a column of the latents."""
        return Factors(self.factors)

    @property
    def origin(self) -> str:
        """Where the pictures come from, in a line."""
        if self.source is not None:
            return f"converted from {self.source.title}"
        return f"rendered: quality {self.quality}, Blender {self.versions['blender']}, {self.device}"


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
        for hidden, command in ((".render", "render"), (".convert", "convert")):
            if any((root / hidden).glob("*/plan.json")):
                raise DatasetError(f"{root}: is not finished; run the same `ident3d {command}` again to go on")
        raise DatasetError(
            f"{root}: no {NAME} in it; expected a dataset made by `ident3d render` or `ident3d convert`; released sets "
            "open with ident3d.ThreeDIdent and its like"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from None
    return parse_manifest(data, str(path))


def parse_manifest(content: bytes, path: str) -> Manifest:
    """The manifest in some bytes.

    Args:
        content: of dataset.json.
        path: where it came from, for messages.

    Raises:
        DatasetError: not JSON, not the format, or a newer version of it.
    """
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from None
    version = data.get("format") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise DatasetError(f"{path}: format {version}; this ident3d reads up to {FORMAT}: pip install -U ident3d")
    try:
        manifest = from_plain(Manifest, data)
        for split in manifest.splits.values():
            split.check_shards()
        return manifest
    except SpecError as error:
        raise DatasetError(f"{path}: not a manifest: {error}") from None


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest atomically."""
    write_json(root / NAME, to_plain(manifest))


class ShardTally:
    """What a split's entry in the manifest holds of its shards, taken off their summaries as they go by.

    A summary has the place of each member; those of 100 million samples would fill tens of GB as Python's numbers.

    Args:
        name: the file name of a shard, by its number.

    Attributes:
        shards: their entries, in order.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        self.shards: list[ShardEntry] = []
        self._name = name
        self._samples, self._sums, self._squares = 0, [0, 0, 0], [0, 0, 0]

    def through(self, summaries: Iterable[ShardSummary]) -> Iterator[ShardSummary]:
        """The same summaries, counted on the way."""
        for s in summaries:
            self.shards.append(ShardEntry(self._name(len(self.shards)), s.samples, s.bytes, s.sha256))
            self._count(s)
            yield s

    def _count(self, summary: ShardSummary) -> None:
        self._samples += summary.samples
        for channel in range(3):
            self._sums[channel] += summary.sums[channel]
            self._squares[channel] += summary.squares[channel]

    def statistics(
        self, resolution: int, pictures: int = 1
    ) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Mean and std per channel over all pixels so far, in [0, 1], from exact integer sums; so many pictures a
        sample."""
        pixels = self._samples * pictures * resolution**2
        mean = tuple(first / pixels / 255 for first in self._sums)
        both = zip(self._sums, self._squares, strict=True)
        std = tuple(math.sqrt((second * pixels - first**2) / pixels**2) / 255 for first, second in both)
        return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])

"""What is converted: a published layout or a dataset in shards, as samples, arrays and a description."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.conversion.encoding import KEEP, Stored
from ident3d.conversion.plan import SHARDS
from ident3d.datasets.ident3d import Ident3D
from ident3d.datasets.pictures import Pictures
from ident3d.datasets.published import Multimodal3DIdent, TemporalCausal3DIdent, detect_layout
from ident3d.datasets.published_base import Published
from ident3d.errors import DatasetError
from ident3d.files import read_npy
from ident3d.schema import to_plain
from ident3d.shards.locate import locate
from ident3d.shards.location import is_url
from ident3d.shards.manifest import NAME, Manifest, SourceRecord, SplitEntry
from ident3d.shards.summary import PICTURES, file_sha256, members_of

__all__ = ["Extra", "PublishedSource", "ShardSource", "Source", "open_source", "splits_of"]

Extra = NDArray[Any] | bytes
"""What a split holds besides its samples: an array as stored, or a file's content."""


@dataclass(frozen=True)
class Source:
    """One split of what is converted.

    Attributes:
        data: its samples.
        layout: a published layout's name, or `shards`.
    """

    data: Pictures
    layout: str

    @property
    def consecutive(self) -> bool:
        """Whether the samples are frames in order of time."""
        return False

    @property
    def pairs(self) -> str:
        """The conditional that each sample's own positive was drawn from, or empty."""
        return ""

    @property
    def seed(self) -> int:
        """What latents were drawn from."""
        return 0

    @property
    def kept_latents(self) -> str:
        """The manifest's word on where the latents come from."""
        return "published"

    @property
    def left_out(self) -> tuple[int, ...]:
        """Samples that were left out before, by their indices in what was converted first."""
        return ()

    @property
    def stored_as(self) -> str:
        """The format that pictures have where they are kept."""
        return "png"

    @property
    def identity(self) -> str:
        """What all splits of the source have in common."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A checksum of all that the split holds but its pictures: a mended picture must not change it."""
        digest = hashlib.sha256()
        for name, extra in self.extras().items():
            kind = "" if isinstance(extra, bytes) else f"{extra.dtype.str} {extra.shape}"
            digest.update(f"{name} {kind} ".encode())
            digest.update(extra if isinstance(extra, bytes) else np.ascontiguousarray(extra).data)
        return digest.hexdigest()

    def extras(self) -> dict[str, Extra]:
        """Files that the split holds besides, by name, as they were published.

        Raises:
            DatasetError: one is absent or not what it was.
        """
        return {}

    def record(self, *, altered: bool) -> dict[str, Any]:
        """The fields of a manifest that tell where the pictures come from.

        Args:
            altered: pictures were encoded anew, or samples left out.
        """
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The sample in words, for messages: its file and number."""
        return self.data.where(index)

    def form(self, wanted: str) -> str:
        """What pictures are encoded as: see `encode`."""
        return f"keep-{self.stored_as}" if wanted == KEEP else wanted

    def members(self, wanted: str) -> tuple[str, ...]:
        """The extensions of a sample's members in shards."""
        picture = self.form(wanted).removeprefix("keep-")
        kinds = ["json"] if self.data.categorical else []
        texts = ["txt"] if self.data.has_text else []
        return members_of(pairs=bool(self.pairs), picture=picture, extras=[*kinds, *texts])

    def stored(self, index: int) -> list[Stored]:
        """A sample's picture, and that of its positive where it holds one.

        Raises:
            DatasetError: it cannot be read.
        """
        found: list[Stored] = [self.data.read(index)]
        return [*found, self.data.read(index, positive=True)] if self.pairs else found

    def rest(self, index: int) -> list[bytes]:
        """A sample's members after its pictures: categorical factors as JSON, text.

        Raises:
            DatasetError: the text cannot be read.
        """
        found = []
        if self.data.categorical:
            numbers = zip(self.data.categorical, self.data.categories[index].tolist(), strict=True)
            labels = {kind.name: kind.labels[number] for kind, number in numbers}
            found.append(json.dumps(labels).encode())
        if self.data.has_text:
            found.append(self.data.text(index).encode())
        return found

    def latents(self, places: Any) -> NDArray[np.float32]:
        """The latents of some samples as shards are given them: (n, d), or with those of the positives (n, 2, d)."""
        rows: NDArray[np.float32] = self.data.latents[places]
        if not self.pairs:
            return rows
        assert self.data.pair_latents is not None
        return np.stack([rows, self.data.pair_latents[places]], axis=1)


@dataclass(frozen=True)
class PublishedSource(Source):
    """A split of a published layout."""

    data: Published

    @property
    def consecutive(self) -> bool:
        """Whether the samples are frames in order of time."""
        return isinstance(self.data, TemporalCausal3DIdent)

    @property
    def identity(self) -> str:
        """The title."""
        return self.data.title

    def where(self, index: int) -> str:
        """The sample in words, for messages: its file and number."""
        place = self.data.where(index)
        return place if self.consecutive else f"{place}, sample {index}"

    def stored(self, index: int) -> list[Stored]:
        """A sample's picture: its file, or a frame's pixels."""
        return [self.data.pixels(index)] if self.consecutive else super().stored(index)

    def extras(self) -> dict[str, Extra]:
        """The published arrays and tables."""
        found: dict[str, Extra] = dict(self.data.extras())
        if isinstance(self.data, Multimodal3DIdent):
            # The samples hold their lines; the file itself has ends of lines of its own.
            found["text_raw.txt"] = (self.data.files.path / "text" / "text_raw.txt").read_bytes()
        return found

    def record(self, *, altered: bool) -> dict[str, Any]:
        """The fields of a manifest that tell where the pictures come from."""
        data = self.data
        source = SourceRecord(data.layout.name, data.title, data.license, data.citation)
        return {"name": data.title, "source": source, "quality": "", "device": "", "render": {}, "scene": None}


@dataclass(frozen=True)
class ShardSource(Source):
    """A split of a dataset in shards, rendered or converted."""

    data: Ident3D

    @property
    def entry(self) -> SplitEntry:
        """The split's entry in the manifest."""
        return self.data.entry

    @property
    def consecutive(self) -> bool:
        """Whether the samples are frames in order of time."""
        return self.entry.consecutive

    @property
    def pairs(self) -> str:
        """The conditional that each sample's own positive was drawn from, or empty."""
        return self.entry.pairs

    @property
    def seed(self) -> int:
        """What latents were drawn from."""
        return self.entry.seed

    @property
    def kept_latents(self) -> str:
        """The manifest's word on where the latents come from."""
        return self.entry.latents

    @property
    def left_out(self) -> tuple[int, ...]:
        """Samples that were left out before, by their indices in what was converted first."""
        return self.entry.skipped

    @property
    def stored_as(self) -> str:
        """The format that pictures have where they are kept."""
        return next(p for p in PICTURES if p == self.entry.members[0])

    @property
    def identity(self) -> str:
        """Its name, and a checksum of its manifest without the splits."""
        shared = dataclasses.replace(self.data.manifest, splits={}, categories=())
        return f"{shared.name} {_checksum(shared)[:16]}"

    def fingerprint(self) -> str:
        """A checksum of the split's entry in the manifest, which has those of all its files."""
        return _checksum(self.entry)

    def extras(self) -> dict[str, Extra]:
        """The files that the split keeps besides.

        Raises:
            DatasetError: one is absent or altered.
        """
        found: dict[str, Extra] = {}
        for name, sha256 in self.entry.extras.items():
            path = self.data.files.path(name, sha256)
            if not path.is_file() or file_sha256(path) != sha256:
                raise DatasetError(
                    f"{self.data.files.text(name)}: missing or altered: the manifest has another sha256; "
                    "convert its source again"
                )
            found[name] = read_npy(path, mapped=True) if name.endswith(".npy") else path.read_bytes()
        return found

    def record(self, *, altered: bool) -> dict[str, Any]:
        """The fields of a manifest that tell where the pictures come from: its own.

        A rendered dataset that was altered says that it was converted, so that nobody puts rendered PNGs in the place
        of what is there now as a repair. One whose every byte was kept is still what a render makes, and can be mended.
        """
        m = self.data.manifest
        fields = {name: getattr(m, name) for name in ("quality", "device", "render", "scene")}
        return {"name": m.name, "source": _rendered(m) if altered and m.source is None else m.source, **fields}


def _checksum(record: object) -> str:
    return hashlib.sha256(json.dumps(to_plain(record), sort_keys=True).encode()).hexdigest()


def _rendered(m: Manifest) -> SourceRecord:
    return SourceRecord(
        layout=SHARDS,
        title=f"{m.name} ({m.origin})",
        license="unknown",
        citation="R. Zimmermann, Y. Sharma, S. Schneider, M. Bethge, W. Brendel, Contrastive Learning Inverts the Data "
        "Generating Process, ICML 2021",
    )


def splits_of(src: Path | str) -> tuple[str, ...]:
    """The splits of what lies at a path or URL, in order.

    Raises:
        DatasetError: none of the layouts, and no dataset in shards.
        DownloadError: a URL that cannot be read.
    """
    if is_url(src) or (Path(src) / NAME).exists():
        return tuple(locate(src).manifest().splits)
    if not Path(src).is_dir():
        raise DatasetError(f"{src}: no such folder; expected a published dataset, or one in shards")
    layout = detect_layout(src)
    if layout is None:
        raise DatasetError(
            f"{src}: none of the layouts that ident3d knows; expected a folder of 3DIdent, Causal3DIdent, "
            f"Multimodal3DIdent or Temporal Causal3DIdent, or a dataset in shards ({NAME})"
        )
    return tuple(layout.splits_in(src))


def open_source(src: Path | str, split: str) -> Source:
    """One split of what lies at a path or URL.

    Raises:
        DatasetError: no such split, or one that is damaged.
    """
    if is_url(src) or (Path(src) / NAME).exists():
        return ShardSource(Ident3D(src, split), SHARDS)
    layout = detect_layout(src)
    assert layout is not None
    data = layout(src, split)
    return PublishedSource(data, data.layout.name)

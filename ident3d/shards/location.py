"""Where a dataset's files lie: in a folder, or behind a URL, with a local copy of each file that was needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ident3d.shards.manifest import Manifest, read_manifest

__all__ = ["Location", "SplitFiles", "is_url"]


class Location:
    """A dataset's folder.

    Args:
        root: the folder.

    Attributes:
        text: the folder or URL as the user gave it, for messages.
        root: the folder; for a URL, a local one that holds no shards.
        derived: where what is computed from the dataset may be kept.
    """

    def __init__(self, root: Path) -> None:
        self.text = str(root)
        self.root = root
        self.derived = root

    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            DatasetError: no dataset there, an unfinished one, or a newer format.
        """
        return read_manifest(self.root)

    def path(self, name: str, sha256: str = "", size: int = -1) -> Path:
        """A file of the dataset, which for a folder need not be there.

        Args:
            name: relative to the dataset's root, e.g. `train/latents.npy`.
            sha256: its checksum; a remote file is checked against it.
            size: its size in bytes, or -1 where that is not known.

        Raises:
            DownloadError: a remote file that cannot be had.
        """
        return self.root / name


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split."""

    location: Location
    split: str

    def path(self, name: str, sha256: str = "", size: int = -1) -> Path:
        """A file of the split's folder; see `Location.path`."""
        return self.location.path(f"{self.split}/{name}", sha256, size)

    def text(self, name: str) -> str:
        """A file of the split's folder, for messages."""
        return f"{self.location.text}/{self.split}/{name}"


def is_url(root: str | os.PathLike[str]) -> bool:
    """Whether a dataset's root is a URL, such as `hf://datasets/user/name`, and not a path."""
    return isinstance(root, str) and "://" in root

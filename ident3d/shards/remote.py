"""A dataset behind a URL: its manifest read when it is opened, each other file fetched whole when first needed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath

from ident3d.errors import DatasetError, DownloadError
from ident3d.files import write_atomic
from ident3d.home import cache_home, offline
from ident3d.network import transfer
from ident3d.network.fetch import disk_errors
from ident3d.network.http import Broken, Unusable
from ident3d.network.sources import Source
from ident3d.network.transfer import download, is_sha256, patiently, read_whole
from ident3d.network.urls import source_of
from ident3d.shards.location import Location
from ident3d.shards.manifest import Manifest, parse_manifest

__all__ = ["MANIFEST", "RemoteLocation", "fetch_manifest", "parse_manifest"]

MANIFEST = "dataset.json"
MANIFEST_BYTES = 1 << 28
"""The most that is believed to be a manifest: more than a million shards."""


class RemoteLocation(Location):
    """A dataset behind a URL.

    The manifest is read anew each time the dataset is opened, and a copy of it kept; on the Hub, the branch's present
    commit is settled on then. Other files are fetched whole, once, and kept under their checksum in the cache folder,
    so that datasets which share a shard share its copy. Nothing is open between calls: safe under fork and spawn.

    Args:
        url: `hf://datasets/user/name[@revision][/folder]`, `https://...`, `s3://...`, or another that fsspec knows.

    Raises:
        SpecError: a URL that nothing here reads, or whose package is not installed.

    Example:
        >>> location = RemoteLocation("https://example.org/data/teapots/")
        >>> location.text
        'https://example.org/data/teapots'
    """

    def __init__(self, url: str) -> None:
        super().__init__(Path())
        self.text = url if url.endswith("://") else url.rstrip("/")
        self.source: Source = source_of(self.text)
        home, key = cache_home().absolute(), hashlib.sha256(self.text.encode()).hexdigest()[:16]
        self.root = home / "manifests" / key
        self.derived = home / "derived" / key
        self.shards = home / "shards"

    def manifest(self) -> Manifest:
        """The manifest as it is now; where the network is forbidden, the copy that the last time left.

        Raises:
            DatasetError: what is there is no manifest, or of a newer format.
            DownloadError: nothing there, no leave to read it, no network, or no copy while the network is forbidden.
        """
        kept = self.root / MANIFEST
        forbidden = self._forbidden()
        if forbidden:
            if kept.is_file():
                return parse_manifest(kept.read_bytes(), str(kept))
            raise DownloadError(
                f"{self.text}: {forbidden} forbids the network, and it was never opened before with IDENT3D_HOME as "
                f"it is now ({self.root.parent.parent}); open it once with the network"
            )
        hint = f"; IDENT3D_OFFLINE=1 uses the copy that was kept when it was last opened ({kept})"
        data = fetch_manifest(self.source, hint if kept.is_file() else "")
        manifest = parse_manifest(data, self.source.address(MANIFEST))
        with disk_errors(kept):
            self.root.mkdir(parents=True, exist_ok=True)
            if not kept.is_file() or kept.read_bytes() != data:
                write_atomic(kept, data)
        return manifest

    def path(self, name: str, sha256: str = "", size: int = -1) -> Path:
        """The local copy of a file, fetched first where there is none.

        Args:
            name: relative to the dataset's root, e.g. `train/latents.npy`.
            sha256: its checksum; a file without one is refused.
            size: its size in bytes, or -1 where that is not known.

        Raises:
            DownloadError: it cannot be had, or is another than the manifest says.
            DatasetError: the manifest gives it no checksum, or an impossible name.
        """
        address = f"{self.text}/{name}"
        if not is_sha256(sha256):
            raise DatasetError(f"{address}: the manifest gives it the sha256 {sha256!r}, expected 64 digits")
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise DatasetError(f"{address}: not a name within the dataset")
        suffix = PurePosixPath(name).suffix
        suffix = suffix if re.fullmatch(r"\.[A-Za-z0-9]{1,16}", suffix) else ""
        path = self.shards / sha256[:2] / f"{sha256}{suffix}"
        forbidden = self._forbidden()
        if forbidden and not (path.is_file() and size in (-1, path.stat().st_size)):
            raise DownloadError(
                f"{address}: not among the files that are kept ({path}), and {forbidden} forbids the network"
            )
        download(self.source, name, path, sha256=sha256, size=size, trust=True)
        return path

    def _forbidden(self) -> str:
        if not self.source.networked:
            return ""
        return "IDENT3D_OFFLINE" if offline() else self.source.forbidden

    def __repr__(self) -> str:
        return f"RemoteLocation({self.text!r})"


def fetch_manifest(source: Source, hint: str = "") -> bytes:
    """The bytes of a dataset's manifest, once the source has settled on one state of its files.

    Args:
        source: the dataset's folder.
        hint: what else to do where there is no network.

    Raises:
        DownloadError: it cannot be had.
    """
    patience = transfer.PATIENCE
    try:
        patiently(lambda: source.pin(patience), patience)
        return read_whole(source, MANIFEST, MANIFEST_BYTES)
    except Broken as why:
        raise DownloadError(f"{source.address(MANIFEST)}: {why}{hint}") from None
    except Unusable as why:
        expected = ". Expected the folder of a dataset that ident3d made" if "no such file" in str(why) else ""
        raise DownloadError(f"{source.address(MANIFEST)}: {why}{expected}") from None

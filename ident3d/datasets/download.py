"""Published datasets by name: fetched, checked, unpacked, and put where their readers look, in that order."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from ident3d.datasets.records import Record, RemoteFile, find_record
from ident3d.errors import DatasetError, DownloadError, SpecError
from ident3d.files import sync_folder
from ident3d.home import cache_home
from ident3d.home import offline as offline_by_environment
from ident3d.network.fetch import disk_errors, fetch, locked
from ident3d.network.http import Broken, Patience, Unusable, check_url, get
from ident3d.network.unpack import unpack

__all__ = ["download"]

# The record's listing is a nicety: not worth a long wait.
LISTING_S = 15.0


def download(
    name: str,
    root: str | Path | None = None,
    *,
    mirrors: Sequence[str] = (),
    offline: bool | None = None,
    splits: Sequence[str] | None = None,
    keep: bool = False,
    quiet: bool = True,
    patience: Patience | None = None,
) -> Path:
    """Bring a published dataset into a folder, in its published layout; what is there already is left as it is.

    An archive is fetched into the cache (`IDENT3D_HOME`, by default e.g. `~/.cache/ident3d`), beneath `downloads`,
    unpacked in a hidden folder beside its place, and renamed into it when it is whole, so that an interrupted call
    leaves nothing that looks finished; the next call goes on. Once it is unpacked it is removed, unless `keep`. An
    archive that you put there yourself is checked like a fetched one, used and not removed. Two processes that want
    the same set at once fetch it once.

    Args:
        name: 3dident, causal3dident, multimodal3dident or kitti-masks; a reader's name does too.
        root: made where it is not there; `datasets` in the cache by default.
        mirrors: base URLs that are tried first, in this order: a file is at `<mirror>/<its name>`.
        offline: never use the network; None: as `IDENT3D_OFFLINE` says.
        splits: just the files that bring these; all by default. What shares a file comes together.
        keep: leave archives in the cache.
        quiet: no progress bar, no notes on stderr.
        patience: how often and how long a server is asked.

    Returns:
        The root.

    Raises:
        SpecError: an unknown name, split or kind of URL.
        DownloadError: the files cannot be had, are not what was published, or do not fit on the disk.
        DatasetError: an archive is bad, or something else is in the set's place.
    """
    record = find_record(name)
    mirrors = tuple(_mirror(url) for url in ([mirrors] if isinstance(mirrors, str) else mirrors))
    files = _wanted(record, splits)
    folder = (cache_home() / "datasets" if root is None else Path(root)).expanduser()
    online = not (offline_by_environment() if offline is None else offline)
    job = _Job(record, folder, mirrors, online, keep, quiet, patience or Patience())
    with disk_errors(folder):
        missing = [file for file in files if not job.has(file)]
    job.check_offline(missing)
    if missing:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / f".{record.name}.lock", quiet=quiet):
                for file in missing:
                    if not job.has(file):  # another process may have brought it meanwhile
                        job.bring(file)
    return folder


def _mirror(url: str) -> str:
    check_url(url)
    if urlsplit(url).query or urlsplit(url).fragment:
        raise SpecError(f"{url!r}: expected a mirror's base URL, to which /NAME is added: no '?' or '#'")
    return url.rstrip("/")


def _wanted(record: Record, splits: Sequence[str] | None) -> tuple[RemoteFile, ...]:
    """The files that bring some splits."""
    if splits is None:
        return record.files
    asked = [splits] if isinstance(splits, str) else list(splits)
    known = [split for file in record.files for split in file.splits]
    for split in asked:
        if split not in known:
            expected = f"expected some of {', '.join(known)}" if known else "it comes whole; leave them out"
            raise SpecError(f"{split!r}: not a split of {record.title}; {expected}")
    if not asked:
        raise SpecError(f"no split of {record.title} is named; name some, or leave them out to have all")
    return tuple(file for file in record.files if set(file.splits) & set(asked))


@dataclass(frozen=True)
class _Job:
    """One call of `download`."""

    record: Record
    root: Path
    mirrors: tuple[str, ...]
    online: bool
    keep: bool
    quiet: bool
    patience: Patience

    def place(self, file: RemoteFile) -> Path:
        """Where a file's content belongs: 3dident/train, but train where the root is that 3dident already."""
        for sibling in self.record.files:
            tail = sibling.place.partition("/")[2]
            if tail and not _lacks(self.root / tail, sibling):
                return self.root / file.place.partition("/")[2]
        return self.root / file.place

    def has(self, file: RemoteFile) -> bool:
        """Whether a file's content is in its place. It gets there by one rename, so what is there is whole."""
        place = self.place(file)
        if len(self.record.files) == 1 and file.holds and not _lacks(self.root, file):
            return True  # the root is that m3di already
        if not place.exists() or (file.holds and place.is_dir() and not any(place.iterdir())):
            return False
        lack = _lacks(place, file)
        if lack or place.is_dir() != bool(file.holds):
            what = f"lacks {lack[0]}" if lack else "is a folder where a file is expected"
            raise DatasetError(f"{place}: {what}, so it is not {self.record.title}; move it away or name another root")
        return True

    def archive(self, file: RemoteFile) -> Path:
        """Where a file is fetched to: a set that needs no unpacking straight to its place."""
        return cache_home() / "downloads" / self.record.name / file.name if file.holds else self.place(file)

    def check_offline(self, missing: list[RemoteFile]) -> None:
        """Refuse to go on without a network where something would have to be fetched."""
        for file in () if self.online else missing:
            archive = self.archive(file)
            if not archive.exists():
                looked = f"{self.place(file)}" + (f" nor, packed, at {archive}" if file.holds else "")
                raise DownloadError(
                    f"{file.name} of {self.record.title} is not at {looked}, and the network is not used (offline, or "
                    f"IDENT3D_OFFLINE); bring it from {self.record.url(file)} and put it at {archive}"
                )

    def bring(self, file: RemoteFile) -> None:
        """Fetch a file, and unpack it where it is an archive."""
        if not file.holds:
            self.fetch(file)
            return
        archive, place = self.archive(file), self.place(file)
        work = place.parent / f".{file.name}.unpacking"
        archive.parent.mkdir(parents=True, exist_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)  # of a call that was killed
        # Held while it is unpacked: a process with another root would remove the archive.
        with locked(archive.with_name(f".{file.name}.use"), quiet=self.quiet):
            ours = archive.with_name(f".{file.name}.fetched")
            if self.fetch(file):
                ours.touch()
            try:
                work.mkdir()
                unpack(archive, work, quiet=self.quiet)
                _put(_found(work, file, archive), place)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            if ours.exists():
                ours.unlink()
                if not self.keep:
                    archive.unlink()

    def fetch(self, file: RemoteFile) -> bool:
        """Fetch a file; whether it had to be."""
        source = f"by ident3d's table; compare {self.record.page}"
        if file.md5 is None and self.online:
            file, source = _listed(self.record, file, self.patience), f"by {self.record.api}"
        urls = [f"{mirror}/{quote(file.name)}" for mirror in self.mirrors] + [self.record.url(file)]
        return fetch(
            urls if self.online else [],
            self.archive(file),
            md5=file.md5,
            size=file.size,
            source=source,
            unpacked_in=self.place(file).parent if file.holds else None,
            patience=self.patience,
            quiet=self.quiet,
        )


def _lacks(folder: Path, file: RemoteFile) -> list[str]:
    return [name for name in file.holds if not (folder / name).exists()]


def _listed(record: Record, file: RemoteFile, patience: Patience) -> RemoteFile:
    """With the md5 and the size that the record's own listing states, where it can be had."""
    brief = replace(patience, connect_s=min(patience.connect_s, LISTING_S), silence_s=LISTING_S)
    try:
        with get(record.api, brief, {"Accept": "application/json"}) as response:
            entry = next(entry for entry in response.json()["files"] if entry["key"] == file.name)
            size, (kind, _, digest) = int(entry["size"]), str(entry["checksum"]).partition(":")
    except (Broken, Unusable, OSError, ValueError, TypeError, LookupError, StopIteration):
        return file  # a page of an error has none of these
    known = kind == "md5" and re.fullmatch(r"[0-9a-fA-F]{32}", digest)
    return replace(file, md5=digest if known else None, size=size)


def _found(work: Path, file: RemoteFile, archive: Path) -> Path:
    """The folder of an unpacked archive that holds what it should; archives differ in the folders around it."""
    level = [work]
    for _ in range(4):
        for folder in level:
            if not _lacks(folder, file):
                return folder
        level = [folder for above in level for folder in sorted(above.iterdir()) if folder.is_dir()]
    there = sorted(path.name for path in work.iterdir())[:5]
    raise DatasetError(
        f"{archive}: holds no folder with {', '.join(file.holds[:4])}{', ...' if len(file.holds) > 4 else ''}; its top "
        f"is {', '.join(there) or 'empty'}; the layout has changed, or it is another archive: it is left there"
    )


def _put(folder: Path, place: Path) -> None:
    """Give an unpacked folder its name, once all of it is on the disk."""
    os.sync()  # one call: a quarter of a million fsyncs take minutes
    os.replace(folder, place)
    sync_folder(place.parent)

"""One file of a dataset, from a source to the disk: resumed, and checked while it is written."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from ident3d.errors import DownloadError
from ident3d.files import sync_folder
from ident3d.network.fetch import disk_errors, locked
from ident3d.network.http import Broken, Changed, Patience, Unusable
from ident3d.network.sources import Source

__all__ = ["PATIENCE", "check_room", "download", "is_sha256", "patiently", "read_whole"]

T = TypeVar("T")

PATIENCE = Patience()
"""How often and how long servers are asked."""

CHUNK = 1 << 20
# So many new bytes show that asking again gets somewhere.
PROGRESS = 1 << 20


def patiently(ask: Callable[[], T], patience: Patience) -> T:
    """What `ask` returns, asked again while the server may yet answer.

    Raises:
        Unusable: as `ask` raises it.
        Broken: the last of them, with how often was asked.
    """
    tries = _Tries(patience)
    while True:
        try:
            return ask()
        except Broken as broken:
            tries.pause(broken)


class _Tries:
    """How often was asked in vain, and for how long to wait before the next time."""

    def __init__(self, patience: Patience) -> None:
        self.patience, self.count = patience, 0

    def pause(self, broken: Broken) -> None:
        """Wait before the next try.

        Raises:
            Broken: there is to be none.
        """
        self.count += 1
        wait = max(self.patience.pause_s * 2 ** (self.count - 1), broken.wait_s)
        if self.count >= self.patience.attempts:
            raise Broken(f"{broken} (asked {self.count} times)") from broken
        if broken.wait_s > self.patience.longest_s:
            raise Broken(f"{broken}; it asks to be left alone for {broken.wait_s:,.0f} s") from broken
        self.patience.sleep(min(wait, self.patience.longest_s))


def read_whole(source: Source, name: str, limit: int, patience: Patience | None = None) -> bytes:
    """A small file's bytes.

    Args:
        source: where it is.
        name: relative to the source's folder.
        limit: the most bytes that are believed to be one.
        patience: how often to ask.

    Raises:
        Unusable: it is not to be had, or larger.
        Broken: the server does not answer.
    """
    patience = patience or PATIENCE

    def ask() -> bytes:
        data = bytearray()
        with source.open(name, 0, patience) as (answer, pieces):
            for piece in pieces:
                data += piece
                if len(data) > limit:
                    raise Unusable(f"is larger than {limit:,} bytes: not what it should be")
        if answer.total not in (None, len(data)):
            raise Broken(f"broke off after {len(data):,} of {answer.total:,} bytes")
        return bytes(data)

    return patiently(ask, patience)


def check_room(folder: Path, need: int, what: str) -> None:
    """Refuse what cannot fit before it is fetched.

    Args:
        folder: where it is to go.
        need: bytes.
        what: for the message.

    Raises:
        DownloadError: says how much is needed and free.
    """
    free = shutil.disk_usage(folder).free
    if need > free:
        raise DownloadError(
            f"{folder}: the disk is full: {what} needs {need / 1e9:,.2f} GB more there, {free / 1e9:,.2f} GB are free; "
            "make room, or name another folder (IDENT3D_HOME moves the cache)"
        )


def download(
    source: Source,
    name: str,
    path: Path,
    *,
    sha256: str = "",
    size: int = -1,
    trust: bool = False,
    patience: Patience | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Bring a file to `path`, unless it is there already.

    What has arrived is kept in `.NAME.part` and built on by the next call. A second process that wants the same file
    waits for the first.

    Args:
        source: where it is.
        name: relative to the source's folder.
        path: its folder is made where it is not there.
        sha256: expected, 64 digits; empty where nobody knows: then nothing is resumed or believed to be there.
        size: expected, in bytes, or -1.
        trust: take a file that is there for the right one by its size, without reading it.
        patience: how often to ask.
        progress: told of bytes that have come, or were there; less than 0 where some must come again.

    Raises:
        DownloadError: it is not to be had, is another file, or the disk does not take it; the text says which.
    """
    with disk_errors(path):
        if trust and _looks_right(path, size):
            progress(path.stat().st_size)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock")):
            if _looks_right(path, size) and (trust or (sha256 and _sha256(path) == sha256)):
                progress(path.stat().st_size)
                return
            _Transfer(source, name, path, sha256, size, patience or PATIENCE, progress).run()


def _looks_right(path: Path, size: int) -> bool:
    return path.is_file() and size in (-1, path.stat().st_size)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Transfer:
    """One file under way."""

    file: BinaryIO

    def __init__(
        self,
        source: Source,
        name: str,
        path: Path,
        sha256: str,
        size: int,
        patience: Patience,
        progress: Callable[[int], None],
    ) -> None:
        self.source, self.name, self.path, self.sha256, self.size = source, name, path, sha256, size
        self.patience, self.progress = patience, progress
        self.part = path.with_name(f".{path.name}.part")
        self.have, self.digest = 0, hashlib.sha256()

    def run(self) -> None:
        try:
            with open(self.part, "r+b" if self.part.exists() else "w+b") as self.file:
                self._restore()
                resumed = self.have > 0
                self._bring()
                if resumed and self._problem():
                    # What lay there before may be at fault, so the server gets the benefit of the doubt.
                    self._restart()
                    self._bring()
                problem = self._problem()
                if not problem:
                    self.file.flush()
                    os.fsync(self.file.fileno())
            if problem:
                self.part.unlink()
                raise DownloadError(
                    f"{self.source.address(self.name)}: {problem}; what came was thrown away. Try again later, or ask "
                    "whoever keeps it: the file and the manifest beside it do not belong together"
                )
        except (Unusable, Broken) as why:
            if not self.have:
                self.part.unlink(missing_ok=True)
            kept = f"; {self.have:,} bytes are kept: the same again goes on from there" if self.have else ""
            raise DownloadError(f"{self.source.address(self.name)}: {why}{kept}") from None
        os.replace(self.part, self.path)
        sync_folder(self.path.parent)

    def _restore(self) -> None:
        """Take up what an earlier call left, if the checksum can tell later that it was right."""
        there = os.fstat(self.file.fileno()).st_size
        if not self.sha256 or (self.size >= 0 and there > self.size):
            return self._restart()
        while piece := self.file.read(CHUNK):
            self._count(piece)
        return None

    def _restart(self) -> None:
        self.progress(-self.have)
        self.file.seek(0)
        self.file.truncate()
        self.have, self.digest = 0, hashlib.sha256()

    def _count(self, piece: bytes) -> None:
        self.digest.update(piece)
        self.have += len(piece)
        self.progress(len(piece))

    def _bring(self) -> None:
        """Ask until the part is whole."""
        tries, mark = _Tries(self.patience), self.have
        while True:
            try:
                return self._ask()
            except Broken as broken:
                if isinstance(broken, Changed):
                    self._restart()
                if self.have >= mark + PROGRESS:
                    tries, mark = _Tries(self.patience), self.have
                tries.pause(broken)

    def _ask(self) -> None:
        if self.have == self.size:
            return
        with self.source.open(self.name, self.have, self.patience) as (answer, pieces):
            if answer.start != self.have:
                self._restart()
            if self.size >= 0 and answer.total not in (None, self.size):
                raise Unusable(f"is {answer.total:,} bytes there, expected {self.size:,}")
            total = self.size if self.size >= 0 else answer.total
            check_room(self.path.parent, (total or 0) - self.have, self.name)
            for piece in pieces:
                self.file.write(piece)
                self._count(piece)
                if total is not None and self.have > total:
                    self._restart()
                    raise Unusable(f"sends more than the {total:,} bytes that it should have")
        if total is not None and self.have < total:
            raise Broken(f"broke off after {self.have:,} of {total:,} bytes")

    def _problem(self) -> str:
        found = self.digest.hexdigest()
        if self.sha256 and found != self.sha256:
            return f"its sha256 is {found}, expected {self.sha256}"
        return ""


def is_sha256(text: str) -> bool:
    """Whether a text is a checksum, and nothing that could be a path."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None

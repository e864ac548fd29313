"""One file over HTTP: resumed where it broke off, from mirrors where there are any, checked before it gets its name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ident3d.errors import DownloadError
from ident3d.files import sync_folder, write_json
from ident3d.network.http import Answer, Broken, Changed, Patience, Unusable, body, check_url, get, shown, understand

__all__ = ["disk_errors", "fetch", "locked"]

# So many new bytes show that asking again gets somewhere.
PROGRESS = 1 << 20
FULL = {errno.ENOSPC, errno.EDQUOT}
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


class _WrongContent(Unusable):
    """What came is not the file that was asked for."""


def fetch(
    urls: Sequence[str],
    path: Path,
    *,
    md5: str | None = None,
    size: int | None = None,
    source: str = "as given",
    unpacked_in: Path | None = None,
    patience: Patience | None = None,
    quiet: bool = True,
) -> bool:
    """Bring a file to `path`, unless it is there already and right.

    What has arrived is kept in `.NAME.part` beside `path`, with `.NAME.part.json` on what it is part of, and built on
    by the next call, until the file is whole, its size and md5 are right, and it is renamed. A second process that
    wants the same file waits for the first. Without an md5 the file is taken as it came, with a warning that names
    the md5 it has.

    Args:
        urls: http or https, in the order they are to be tried; none to only check what is there.
        path: its folder is made where it is not there.
        md5: expected, 32 hexadecimal digits; None where nobody knows.
        size: expected, in bytes; None where nobody knows.
        source: who says so; for the errors.
        unpacked_in: a folder that the content will be unpacked in: there must be room for that too.
        patience: how often and how long a server is asked.
        quiet: no progress bar, no notes on stderr.

    Returns:
        Whether it was fetched; False where it was there.

    Raises:
        SpecError: a URL that is neither http nor https.
        DownloadError: no URL gave the file, or the disk did not take it; the text says why and what to do.
    """
    for url in urls:
        check_url(url)
    transfer = _Transfer(path, md5, size, source, unpacked_in, patience or Patience(), quiet)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock"), quiet=quiet):
            if transfer.is_there(replaceable=bool(urls)):
                return False
            transfer.run(urls)
    return True


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full or failing disk, told as such.

    Args:
        path: what the block works on, for errors that do not say.

    Raises:
        DownloadError: in place of an OSError of the block.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if error.errno in FULL:
            hint = "what has arrived is kept: make room, then run the same again to go on"
        else:
            hint = "name a folder that can be written (IDENT3D_HOME moves the cache)"
        raise DownloadError(f"{where}: {error.strerror or error}; {hint}") from None


@contextmanager
def locked(path: Path, *, quiet: bool = True) -> Iterator[None]:
    """Hold a lock file against other processes; wait for the one that holds it. The kernel frees it with the process.

    Args:
        path: made, and removed at the end.
        quiet: do not say on stderr that it waits.
    """
    fd = _acquire(path, quiet)
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)  # while it is held: whoever waits for it then sees that it is gone
        finally:
            with contextlib.suppress(OSError):  # a child forked meanwhile holds the same lock; no locks there
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _acquire(path: Path, quiet: bool) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"{path.parent}: waiting for another process that downloads the same", quiet)
                fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass  # gone between the two looks
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in NO_LOCKS:
                warnings.warn(f"{path.parent}: no locks there; do not download the same twice at once", stacklevel=4)
                return fd
            os.close(fd)
            raise
        os.close(fd)


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        tqdm.write(text, file=sys.stderr)


class _Transfer:
    """One call of `fetch`."""

    def __init__(
        self,
        path: Path,
        md5: str | None,
        size: int | None,
        source: str,
        unpacked_in: Path | None,
        patience: Patience,
        quiet: bool,
    ) -> None:
        self.path, self.md5, self.size, self.source = path, md5.lower() if md5 else None, size, source
        self.unpacked_in, self.patience, self.quiet = unpacked_in, patience, quiet
        self.part = path.with_name(f".{path.name}.part")
        self.state_path = path.with_name(f".{path.name}.part.json")
        self.bar: tqdm[Any]

    def is_there(self, *, replaceable: bool) -> bool:
        """Whether the file is there and right. One that is wrong is replaced once the right one has come."""
        if not self.path.exists():
            return False
        problem = "not a file" if not self.path.is_file() else self._judge(self.path)
        if not problem:
            self._drop()  # brought by hand meanwhile: a part has no more use
            return True
        text = f"{self.path}: not the published file: {problem}"
        if not replaceable or not self.path.is_file():
            raise DownloadError(f"{text}; put the right one there, or remove it to have it fetched")
        warnings.warn(f"{text}; fetched anew", stacklevel=4)
        return False

    def run(self, urls: Sequence[str]) -> None:
        """Try the URLs one after another."""
        complaints = []
        with tqdm(
            desc=self.path.name, unit="B", unit_scale=True, unit_divisor=1024, disable=True if self.quiet else None
        ) as self.bar:
            for url in urls:
                try:
                    return self._from(url)
                except Unusable as why:
                    complaints.append(f"\n  {shown(url)}: {why}")
                    _say(f"{shown(url)}: {why}", self.quiet)
        kept = max((known.start for url in urls if (known := self._known(url))), default=0)
        raise DownloadError(
            f"{self.path.name} could not be fetched:{''.join(complaints) or ' no URL was given'}\n"
            + (f"{kept:,} bytes have arrived and are kept: the same call goes on from there. " if kept else "")
            + "Try again later, name a mirror (mirrors=, --mirror URL), or "
            + (f"bring {shown(urls[-1])} from elsewhere and " if urls else "")
            + f"put it at {self.path}"
        )

    def _from(self, url: str) -> None:
        resumed = self._known(url) is not None
        self._bring(url)
        try:
            self._finish()
        except _WrongContent as why:
            if not resumed:
                raise
            # What lay there before this call may be at fault, so the server gets the benefit of the doubt.
            _say(f"{shown(url)}: {why}; fetched anew", self.quiet)
            self._bring(url)
            self._finish()

    def _bring(self, url: str) -> None:
        """Ask until the part is whole."""
        known = self._known(url)
        furthest, tries = known.start if known else 0, 0
        while True:
            try:
                return self._ask(url)
            except Broken as broken:
                have = self._have()
                if have >= furthest + PROGRESS:
                    furthest, tries = have, 0
                tries += 1
                pause = min(self.patience.pause_s * 2 ** (tries - 1), self.patience.longest_s)
                wait = max(pause, broken.wait_s)
                if tries >= self.patience.attempts:
                    raise Unusable(f"{broken} (asked {tries} times)") from None
                if wait > self.patience.longest_s:
                    raise Unusable(f"{broken}; it asks to be left alone for {wait:,.0f} s") from None
                _say(f"{shown(url)}: {broken}; asked again in {wait:.0f} s", self.quiet)
                self.patience.sleep(wait)

    def _known(self, url: str) -> Answer | None:
        """What the part is a part of, and how much of it there is, where it can be built on."""
        try:
            state = json.loads(self.state_path.read_bytes())
            origin, etag, date, total = (state[name] for name in ("url", "etag", "last_modified", "size"))
            have = self.part.stat().st_size
        except (OSError, ValueError, TypeError, LookupError):
            return None
        sound = type(total) in (int, type(None)) and all(isinstance(text, str | None) for text in (etag, date))
        if not sound or not 0 < have <= (have if total is None else total):
            return None
        same = origin == shown(url)
        known = Answer(have, total, etag, date) if same else Answer(have, total)  # a validator is its server's own
        return known if known.validator or self.md5 else None  # without either, nobody would notice a splice

    def _have(self) -> int:
        return self.part.stat().st_size if self.part.is_file() else 0

    def _drop(self) -> None:
        self.part.unlink(missing_ok=True)
        self.state_path.unlink(missing_ok=True)

    def _ask(self, url: str) -> None:
        """One request; returns once the part is whole."""
        known = self._known(url)
        headers = {}
        if known:
            if known.start == known.total:
                return  # the last call ended before it could check
            headers["Range"] = f"bytes={known.start}-"
            if known.validator:
                headers["If-Range"] = known.validator
        with get(url, self.patience, headers) as response:
            try:
                answer = understand(response, known, packed=self.path.suffix == ".gz")
            except Changed:
                self._drop()
                raise
            if self.size is not None and answer.total not in (None, self.size):
                raise Unusable(f"has {answer.total:,} bytes, expected {self.size:,} ({self.source})")
            if answer.total is None:
                answer = replace(answer, total=self.size)
                if answer.total is None and self.md5 is None and not response.headers.get("Transfer-Encoding"):
                    raise Unusable("says no length, and no checksum is known: a half file would pass for a whole one")
            self._check_room(answer.total)
            self._take(url, response, answer)

    def _take(self, url: str, response: Any, answer: Answer) -> None:
        """Write a body into the part."""
        at, total = answer.start, answer.total
        self.bar.reset(total)
        self.bar.initial = self.bar.n = at
        self.bar.refresh()
        with open(self.part, "ab" if at else "wb") as file:
            if not at:  # once the part is empty: an old part beside a new state would be spliced
                validators = {"etag": answer.etag, "last_modified": answer.last_modified}
                write_json(self.state_path, {"url": shown(url), **validators, "size": total})
            for block in body(response):
                file.write(block)
                at += len(block)
                self.bar.update(len(block))
                if total is not None and at > total:
                    break
        if total is not None and at < total:
            raise Broken(f"broke off after {at:,} of {total:,} bytes")
        if total is not None and at > total:
            self._drop()
            raise _WrongContent(f"sends more than the {total:,} bytes that it should have")

    def _check_room(self, total: int | None) -> None:
        """Refuse what cannot fit before it is fetched."""
        if total is None:
            return
        folder = self.path.parent
        need = {folder: total - self._have()}
        if self.unpacked_in is not None:
            same = self.unpacked_in.stat().st_dev == folder.stat().st_dev
            need[folder if same else self.unpacked_in] = total + (need[folder] if same else 0)
        for place, count in need.items():
            free = shutil.disk_usage(place).free
            if count > free:
                raise DownloadError(
                    f"{place}: {self.path.name} ({total / 1e9:,.2f} GB) needs {count / 1e9:,.2f} GB more there"
                    f"{' to arrive and be unpacked' if self.unpacked_in else ''}, {free / 1e9:,.2f} GB are free; make "
                    "room, name another root, or move the cache by IDENT3D_HOME"
                )

    def _judge(self, path: Path) -> str:
        """What is wrong with a file; empty where nothing is."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            return f"it has {size:,} bytes, expected {self.size:,} ({self.source})"
        if size == 0:
            return "it is empty"
        found = self._md5_of(path)
        if self.md5 is None:
            warnings.warn(
                f"{self.path}: nobody states a checksum for it, so it is taken as it is; its md5 is {found}: compare "
                "it where you can",
                stacklevel=5,
            )
        elif found != self.md5:
            return f"its md5 is {found}, expected {self.md5} ({self.source})"
        return ""

    def _md5_of(self, path: Path) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        disable = True if self.quiet else None
        with (
            open(path, "rb") as file,
            tqdm(
                total=path.stat().st_size, desc=f"checking {self.path.name}", unit="B", unit_scale=True, disable=disable
            ) as bar,
        ):
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                bar.update(len(chunk))
        return digest.hexdigest()

    def _finish(self) -> None:
        """Give the part its name, if it is right."""
        problem = self._judge(self.part)
        if problem:
            self._drop()
            raise _WrongContent(problem)
        with open(self.part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.part, self.path)
        self.state_path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

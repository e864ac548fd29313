"""Files below a URL, one at a time and from any byte on: over HTTP, or through fsspec."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from ident3d.errors import SpecError
from ident3d.network.http import Answer, Broken, Patience, Unusable, body, check_url, get, shown, understand

__all__ = ["FsspecSource", "HttpSource", "Opened", "Source"]

Opened = tuple[Answer, Iterator[bytes]]
"""What is about to come of a file, and its bytes."""

PIECE = 1 << 20
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
}
"""What fsspec needs for protocols that are asked for often."""


class Source(ABC):
    """The files below one URL. Holds nothing open, so that it pickles and forks.

    Args:
        url: of a folder, without a slash at its end.

    Attributes:
        text: the URL.
        networked: whether reading it needs the network.
    """

    networked = True

    def __init__(self, url: str) -> None:
        self.text = url

    def pin(self, patience: Patience) -> None:  # noqa: B027 - most sources have no revisions
        """Settle on one state of the files, where the server keeps several.

        Raises:
            Unusable: there is nothing there to read.
            Broken: no answer.
        """

    @property
    def forbidden(self) -> str:
        """The setting, besides IDENT3D_OFFLINE, that forbids to read this source; or empty."""
        return ""

    @abstractmethod
    def address(self, name: str) -> str:
        """A file's own URL, for messages: without a password."""

    @abstractmethod
    def open(self, name: str, start: int, patience: Patience) -> AbstractContextManager[Opened]:
        """A file from byte `start` on; a server may begin at 0 instead, as the answer says.

        Args:
            name: relative to the source's folder, parts separated by `/`.
            start: its first byte that is wanted.
            patience: how long to wait.

        Raises:
            Unusable: it is not to be had, however often it is asked for.
            Broken: not to be had for now; the bytes raise it too.
        """


class HttpSource(Source):
    """Files on a web server. What the URL holds after a `?`, as signed URLs do, goes with every request.

    Args:
        url: http or https.

    Raises:
        SpecError: not the URL of a web server.
    """

    def __init__(self, url: str) -> None:
        check_url(url)
        super().__init__(url)

    def url(self, name: str) -> str:
        """What to ask for."""
        parts = urlsplit(self.text)
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}", fragment=""))

    def address(self, name: str) -> str:
        """The URL without password and query, either of which may be secret."""
        return shown(self.url(name)).partition("?")[0]

    def headers(self) -> dict[str, str]:
        """Besides those of every request."""
        return {}

    def explain(self, response: Any) -> None:
        """Refuse an answer with what is known of this server.

        Raises:
            Unusable: says why.
        """
        if response.status_code in (401, 403):
            raise Unusable(f"HTTP {response.status_code} {response.reason}: it lets nobody read this without leave")

    @contextmanager
    def open(self, name: str, start: int, patience: Patience) -> Iterator[Opened]:
        """See `Source.open`."""
        known = Answer(start, None) if start else None
        headers = self.headers() | ({"Range": f"bytes={start}-"} if start else {})
        with get(self.url(name), patience, headers) as response:
            self.explain(response)
            yield understand(response, known, packed=False), body(response)


class FsspecSource(Source):
    """Files wherever fsspec reads: `s3://`, `gs://`, `memory://`, chains such as `simplecache::s3://`.

    Args:
        url: any that fsspec knows. Keys and endpoints come from where its package looks for them.

    Raises:
        SpecError: an unknown protocol, or one whose package is not installed.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        import fsspec  # type: ignore[import-untyped]

        protocols = [link.partition("://")[0] for link in url.split("::")]
        self.networked = not {"file", "local", "memory"} >= set(protocols)
        for protocol in protocols:
            try:
                fsspec.get_filesystem_class(protocol or "none")
            except ImportError as error:
                package = PACKAGES.get(protocol)
                raise SpecError(f"{url}: {error}" + (f": pip install {package}" if package else "")) from None
            except ValueError:
                raise SpecError(
                    f"{url}: unknown protocol {protocol!r}; expected a folder, or a URL such as "
                    "hf://datasets/user/name, https://..., s3://..."
                ) from None

    def address(self, name: str) -> str:
        """The first link of the chain names the file."""
        return f"{shown(self.text) if '@' in self.text else self.text}/{name}"

    @contextmanager
    def open(self, name: str, start: int, patience: Patience) -> Iterator[Opened]:
        """See `Source.open`; the file system has its own idea of how long to wait."""
        with closing(self._opened(name, start)) as file:
            size = getattr(file, "size", None)
            yield Answer(start, size if isinstance(size, int) else None), self._pieces(file)

    def _opened(self, name: str, start: int) -> Any:
        import fsspec

        try:
            # Asked for anew each time: fsspec keeps one file system a process and thread, so that none crosses a fork.
            files, root = fsspec.core.url_to_fs(self.text)
            files.invalidate_cache()  # of listings, which would hide that a file has changed
            file = files.open(f"{root.rstrip('/')}/{name}", "rb")
            if start:
                file.seek(start)
        except Exception as error:
            raise self._understood(error) from error
        return file

    def _pieces(self, file: Any) -> Iterator[bytes]:
        while True:
            try:
                piece: bytes = file.read(PIECE)
            except Exception as error:
                raise self._understood(error) from error
            if not piece:
                return
            yield piece

    def _understood(self, error: Exception) -> Exception:
        """Packages raise what theirs raise; what is surely final is told apart from what may pass."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError):
            hint = "; a dataset on the Hub is hf://datasets/user/name" if self.text.startswith("hf://") else ""
            return Unusable(f"no such file there{hint}")
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            return Unusable(f"it may not be read ({text}); are the keys set that its package looks for?")
        final = (ValueError, TypeError, AttributeError, NotImplementedError, ImportError, IsADirectoryError)
        return Unusable(text) if isinstance(error, final) else Broken(text)


def _forget_loop() -> None:
    """In a forked child: have fsspec start a loop of its own. Those up to 2025.3 wait for the parent's for ever."""
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is not None:
        asyn.loop[0] = asyn.iothread[0] = None
        asyn.reset_lock()


os.register_at_fork(after_in_child=_forget_loop)

"""One request for a file, or for what is missing of it: what is asked, and what the answer means."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ident3d.errors import SpecError

__all__ = ["Answer", "Broken", "Changed", "Patience", "Unusable", "body", "check_url", "get", "shown", "understand"]

# Some urllib3 forget what they have read of a block when the connection breaks, so small ones.
BLOCK = 1 << 16
PASSING = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Patience:
    """How often and how long one server is asked before the next one is.

    Attributes:
        attempts: in a row that bring less than a megabyte.
        pause_s: before the second of them; doubles from one to the next.
        longest_s: the longest pause. A server that asks for a longer one is left alone.
        connect_s: the longest wait for a connection.
        silence_s: the longest wait for the next byte.
        sleep: pauses for so many seconds.
    """

    attempts: int = 5
    pause_s: float = 1.0
    longest_s: float = 120.0
    connect_s: float = 15.0
    silence_s: float = 60.0
    sleep: Callable[[float], None] = time.sleep


class Unusable(Exception):
    """This URL will not give the file, however often it is asked; the text says why."""


class Broken(Exception):
    """This URL may give the file, or more of it, when asked again."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Changed(Broken):
    """What the server has is not what the part was taken from."""


@dataclass(frozen=True)
class Answer:
    """A body that is about to come.

    Attributes:
        start: the byte of the file that it begins with.
        total: bytes of the whole file, or None where the server does not say.
        etag: the file's ETag.
        last_modified: the file's date, as the server writes it.
    """

    start: int
    total: int | None
    etag: str | None = None
    last_modified: str | None = None

    @property
    def validator(self) -> str | None:
        """What If-Range takes: a weak ETag may stand for other bytes, so it does not do."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.last_modified


def check_url(url: str) -> None:
    """Refuse what is not the URL of a web server.

    Raises:
        SpecError: says so.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or re.search(r"[\x00-\x20\x7f]", url):
        raise SpecError(f"{shown(url)!r}: expected a URL that begins with https:// or http:// and names a server")


def shown(url: str) -> str:
    """A URL without the user and password that it may hold."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _as_given(request: Any) -> Any:
    """Leaves a request's own Authorization: without it, requests would prefer what ~/.netrc says of the host."""
    return request


@contextmanager
def get(url: str, patience: Patience, headers: dict[str, str]) -> Iterator[Any]:
    """The response to a GET, its body still to come.

    Args:
        url: http or https; redirects are followed, but not from https to http.
        patience: the longest waits.
        headers: besides those of every request.

    Raises:
        Unusable: no answer that asking again could change.
        Broken: no answer.
    """
    import requests
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

    from ident3d._version import __version__

    # Bytes as they are: ranges count those, not the ones that a packed body unpacks to.
    every = {"User-Agent": f"ident3d/{__version__}", "Accept-Encoding": "identity"}
    host = urlsplit(url).hostname
    try:
        response = requests.get(
            url,
            headers={**every, **headers},
            stream=True,
            timeout=(patience.connect_s, patience.silence_s),
            auth=_as_given if "Authorization" in headers else None,
        )
    except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
        reason = error.args[0] if error.args else error
        reason = getattr(reason, "reason", None) or reason  # what made urllib3 give up
        if "CERTIFICATE_VERIFY_FAILED" in str(reason):
            raise Unusable(f"{host} cannot be trusted: {reason}") from None
        if isinstance(reason, NewConnectionError | ConnectTimeoutError):
            raise Broken(f"no connection to {host} ({reason}); is this machine offline?") from None
        raise Broken(f"no answer from {host} ({reason})") from None
    except (requests.RequestException, ValueError) as error:
        raise Unusable(f"{type(error).__name__}: {error}") from None
    with response:
        hops = [hop.url for hop in (*response.history, response)]
        if url.startswith("https:") and not all(hop.startswith("https:") for hop in hops):
            raise Unusable(f"leads from https to http ({shown(hops[-1])}), where anyone between can change it")
        yield response


def understand(response: Any, known: Answer | None, *, packed: bool) -> Answer:
    """What comes with a response.

    Args:
        response: of `get`.
        known: where a range was asked for: its start, and what the bytes before it were taken from.
        packed: whether a body that the server calls packed is the file itself, as some do of .gz files.

    Raises:
        Unusable: not the file, and asking again will not change that.
        Broken: not the file, for now.
        Changed: another file than `known`.
    """
    code, told = response.status_code, response.headers
    status = f"HTTP {code} {response.reason or ''}".rstrip()
    if code in PASSING:
        raise Broken(status, _retry_after(told.get("Retry-After", "")))
    if code == 416 and known:
        raise Changed("it has no bytes past those that are here: begun anew")
    if code not in (200, 206) or (code == 206 and not known):
        raise Unusable(status + (": no such file there" if code in (404, 410) else ""))
    encoding = told.get("Content-Encoding", "identity").lower()
    if encoding != "identity" and not packed:
        raise Unusable(f"sends it packed by {encoding}, though asked not to")
    if told.get("Content-Type", "").lower().startswith("text/html"):
        raise Unusable("answers with a web page in place of the file (a login, or a network's portal?)")
    etag, date = told.get("ETag"), told.get("Last-Modified")
    if code == 200 or known is None:
        length = told.get("Content-Length", "")
        whole = re.fullmatch(r"\d{1,18}", length) and "Transfer-Encoding" not in told
        return Answer(0, int(length) if whole else None, etag, date)
    match = re.fullmatch(r"bytes (\d{1,18})-\d+/(\d{1,18}|\*)", told.get("Content-Range", "").strip())
    if match is None or int(match[1]) != known.start:
        raise Changed("it serves another range than was asked for: begun anew")
    total = known.total if match[2] == "*" else int(match[2])
    if known.total not in (None, total) or (known.etag and etag and known.etag != etag):
        raise Changed("the file has changed there: begun anew")
    return Answer(known.start, total, etag, date)


def body(response: Any) -> Iterator[bytes]:
    """The bytes of a body, as they are sent.

    Raises:
        Broken: the connection broke.
    """
    from urllib3.exceptions import HTTPError

    try:
        yield from response.raw.stream(BLOCK, decode_content=False)
    except (HTTPError, OSError) as error:
        raise Broken(f"broke off ({error.args[0] if error.args else error})") from None


def _retry_after(text: str) -> float:
    """Seconds to wait, of a Retry-After that gives seconds or a date; 0 where it gives neither."""
    if re.fullmatch(r"\d{1,9}", text.strip()):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0

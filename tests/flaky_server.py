"""A web server on this machine that fails in the ways that servers and networks do, and counts what it sends."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hit:
    """A request, and how many bytes of body it was sent."""

    path: str
    range: str | None
    if_range: str | None
    sent: int = 0


@dataclass(frozen=True)
class Reply:
    """How one request for a path is answered, unlike the usual.

    Attributes:
        code: sent without a body where it is not None.
        headers: besides the usual, or in their place.
        stop: bytes of body after which the connection is closed, or held while `gate` is shut.
        gate: waited for after `stop` bytes.
        ranges: whether a range that is asked for is served.
        body: in place of the file.
        length: whether Content-Length is told.
        strict: whether If-Range is looked at.
    """

    code: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    stop: int | None = None
    gate: threading.Event | None = None
    ranges: bool = True
    body: bytes | None = None
    length: bool = True
    strict: bool = True


class Site:
    """The server's files, what it does next for each path, and what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.etags: dict[str, str | None] = {}
        self.plans: dict[str, list[Reply]] = defaultdict(list)
        self.hits: list[Hit] = []
        self.asked = threading.Event()
        self.url = ""

    def add(self, path: str, content: bytes, *plan: Reply) -> str:
        """Serve content at a path, the first times as planned; its URL."""
        self.files[path] = content
        self.plans[path] += plan
        return self.url + path

    def sent(self, path: str) -> list[int]:
        return [hit.sent for hit in self.hits if hit.path == path]

    def etag(self, path: str, content: bytes) -> str | None:
        return self.etags.get(path, f'"{hashlib.md5(content).hexdigest()}"')


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        site: Site = self.server.site
        path = self.path.partition("?")[0]
        hit = Hit(path, self.headers.get("Range"), self.headers.get("If-Range"))
        site.hits.append(hit)
        site.asked.set()
        plan = site.plans[path].pop(0) if site.plans[path] else Reply()
        content = plan.body if plan.body is not None else site.files.get(path)
        if plan.code is not None or content is None:
            self.start(plan.code or 404, {"Content-Length": "0", **plan.headers})
            return
        etag = site.etag(path, content)
        headers = {"Accept-Ranges": "bytes"} | ({"ETag": etag} if etag else {})
        start, code = 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", hit.range or "")
        if asked and plan.ranges and (not plan.strict or hit.if_range in (None, etag)):
            start, code = int(asked[1]), 206
            if start >= len(content):
                self.start(416, {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"})
                return
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if plan.length:
            headers["Content-Length"] = str(len(content) - start)
        self.start(code, headers | plan.headers)
        self.send(content[start:], plan, hit)

    def start(self, code: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, rest: bytes, plan: Reply, hit: Hit) -> None:
        stop = len(rest) if plan.stop is None else plan.stop
        self.wfile.write(rest[:stop])
        self.wfile.flush()
        hit.sent = min(stop, len(rest))
        if plan.gate is not None:
            plan.gate.wait(60)
            if plan.gate.is_set() and plan.stop is not None:
                self.wfile.write(rest[stop:])
                hit.sent = len(rest)
        self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    site: Site

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: those who ask go away in mid-answer here."""


@contextmanager
def serving() -> Iterator[Site]:
    """A server for as long as the block lasts."""
    site = Site()
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.site, site.url = site, f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield site
        finally:
            for plans in site.plans.values():
                for plan in plans:
                    if plan.gate:
                        plan.gate.set()
            server.shutdown()
            thread.join()

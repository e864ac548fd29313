"""A server of plain files on this machine, which answers ranges, counts what is asked, and fails on demand."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["FileServer", "Handler", "Server"]


class Handler(BaseHTTPRequestHandler):
    """Answers what its server's `answer` says."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Silence: the tests look at `asked`."""

    def do(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._chunks())
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        with self.server.guard:
            self.server.asked.append(f"{self.command} {path}")
            status = self.server.fail(self.command, path)
        if status:
            return self.reply(status, b'{"error": "on demand"}')
        self.server.answer(self, path, parse_qs(parts.query), body)
        return None

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do  # noqa: N815 - the names that http.server calls

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def reply(self, status: int, data: bytes = b"", kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def reply_json(self, data: Any, status: int = 200, **headers: str) -> None:
        self.reply(status, json.dumps(data).encode(), **headers)

    def reply_file(self, data: bytes, name: str, **headers: str) -> None:
        """A file or the range of it that was asked for; broken off where the server is told to."""
        total, start, status = len(data), 0, 200
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match and self.server.ranges:
            start, end = int(match[1]), int(match[2] or total - 1)
            if start >= total:
                return self.reply(416, Content_Range=f"bytes */{total}")
            data, status = data[start : end + 1], 206
            headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{total}"
        self.server.served.append((name, start))
        with self.server.guard:
            limits = self.server.breaks.get(name, [])
            limit = limits.pop(0) if limits else None
        if limit is None or limit >= len(data):
            return self.reply(status, data, "application/octet-stream", **headers)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data[:limit])
        self.wfile.flush()
        self.close_connection = True
        return None


class Server(ThreadingHTTPServer):
    """A server on a free port of 127.0.0.1, until the `with` ends.

    Attributes:
        asked: the requests, as `GET /path`.
        served: files whose bytes were sent, each with the byte that they began with.
        fail: gives a status instead of an answer, from method and path; 0 for an answer.
        breaks: by file, after how many bytes its next answers break off.
        ranges: whether ranges are honoured.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.guard = threading.Lock()
        self.asked: list[str] = []
        self.served: list[tuple[str, int]] = []
        self.fail: Callable[[str, str], int] = lambda method, path: 0
        self.breaks: dict[str, list[int]] = {}
        self.ranges = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, handler: Handler, path: str, query: dict[str, list[str]], body: bytes) -> None:
        raise NotImplementedError

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no matter."""

    @contextmanager
    def running(self) -> Iterator[Any]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()

    def count(self, what: str) -> int:
        """How many requests contain a text."""
        with self.guard:
            return sum(what in line for line in self.asked)


class FileServer(Server):
    """The files of a folder, at the server's root."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def answer(self, handler: Handler, path: str, query: dict[str, list[str]], body: bytes) -> None:
        file = self.root / path.lstrip("/")
        if not file.is_file():
            return handler.reply(404)
        return handler.reply_file(file.read_bytes(), path.lstrip("/"))

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flaky_server import Reply, Site, serving

from ident3d.errors import DownloadError, SpecError
from ident3d.network import fetch as module
from ident3d.network.fetch import disk_errors, fetch, locked
from ident3d.network.http import BLOCK, Patience

CONTENT = random.Random(0).randbytes(5 * BLOCK + 123)
OTHER = random.Random(1).randbytes(len(CONTENT))
STOP = 3 * BLOCK  # a multiple: some urllib3 forget a block that breaks off


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as site:
        yield site


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def patience(pauses: list[float]) -> Patience:
    return Patience(sleep=pauses.append, connect_s=5.0, silence_s=5.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "set.tar"


def listing(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def leave_part(site: Site, path: Path, patience: Patience) -> None:
    """What a call leaves that broke off after three blocks."""
    url = site.add("/set.tar", CONTENT, Reply(stop=STOP))
    with pytest.raises(DownloadError, match=r"196,608 bytes have arrived and are kept"):
        fetch([url], path, md5=md5(CONTENT), patience=Patience(attempts=1, sleep=patience.sleep))
    assert listing(path) == [".set.tar.part", ".set.tar.part.json"]
    site.hits.clear()


class TestWhole:
    def test_is_fetched_then_left_alone(self, site: Site, path: Path) -> None:
        url = site.add("/set.tar", CONTENT)
        assert fetch([url], path, md5=md5(CONTENT).upper(), size=len(CONTENT))
        assert path.read_bytes() == CONTENT
        assert listing(path) == ["set.tar"]
        assert not fetch([url], path, md5=md5(CONTENT))
        assert len(site.hits) == 1

    def test_without_a_checksum_warns_and_names_what_came(self, site: Site, path: Path) -> None:
        with pytest.warns(UserWarning, match=md5(CONTENT)):
            fetch([site.add("/set.tar", CONTENT)], path)
        assert path.read_bytes() == CONTENT

    @pytest.mark.parametrize("reply", [Reply(length=False), Reply(length=False, stop=BLOCK)])
    def test_without_a_length_or_a_checksum_is_refused(self, site: Site, path: Path, reply: Reply) -> None:
        with pytest.raises(DownloadError, match="says no length"):
            fetch([site.add("/set.tar", CONTENT, reply)], path)

    def test_without_a_length_is_checked(self, site: Site, path: Path, patience: Patience) -> None:
        url = site.add("/set.tar", CONTENT, Reply(length=False, stop=STOP), Reply(length=False))
        with pytest.raises(DownloadError, match="its md5 is"):
            fetch([url], path, md5=md5(CONTENT), patience=patience)
        assert fetch([url], path, md5=md5(CONTENT), patience=patience)

    def test_redirects_are_followed(self, site: Site, path: Path, patience: Patience) -> None:
        end = site.add("/end.tar", CONTENT, Reply(stop=STOP))
        url = site.add("/set.tar", b"", *[Reply(302, {"Location": end})] * 2)
        assert fetch([url], path, md5=md5(CONTENT), patience=patience)
        assert [hit.range for hit in site.hits if hit.path == "/end.tar"] == [None, f"bytes={3 * BLOCK}-"]

    def test_one_that_is_wrong_is_replaced_or_reported(self, site: Site, path: Path) -> None:
        path.parent.mkdir()
        path.write_bytes(OTHER)
        with pytest.raises(DownloadError, match=rf"{md5(OTHER)}, expected {md5(CONTENT)} \(a friend\)"):
            fetch([], path, md5=md5(CONTENT), source="a friend")
        assert path.read_bytes() == OTHER
        with pytest.warns(UserWarning, match="not the published file"):
            assert fetch([site.add("/set.tar", CONTENT)], path, md5=md5(CONTENT))
        assert path.read_bytes() == CONTENT


class TestResumed:
    def test_within_a_call(self, site: Site, path: Path, patience: Patience, pauses: list[float]) -> None:
        url = site.add("/set.tar", CONTENT, Reply(stop=STOP), Reply(stop=STOP - 2 * BLOCK))
        fetch([url], path, md5=md5(CONTENT), patience=patience)
        assert path.read_bytes() == CONTENT
        assert [hit.range for hit in site.hits] == [None, f"bytes={3 * BLOCK}-", f"bytes={4 * BLOCK}-"]
        assert site.hits[1].if_range == f'"{md5(CONTENT)}"'
        assert pauses == [1, 2]

    def test_by_the_next_call(self, site: Site, path: Path, patience: Patience) -> None:
        leave_part(site, path, patience)
        assert fetch([site.url + "/set.tar"], path, md5=md5(CONTENT))
        assert path.read_bytes() == CONTENT
        assert site.sent("/set.tar") == [len(CONTENT) - 3 * BLOCK]
        assert listing(path) == ["set.tar"]

    def test_from_another_mirror_where_the_checksum_tells(self, site: Site, path: Path, patience: Patience) -> None:
        leave_part(site, path, patience)
        assert fetch([site.add("/b/set.tar", CONTENT)], path, md5=md5(CONTENT))
        assert [(hit.range, hit.if_range) for hit in site.hits] == [(f"bytes={3 * BLOCK}-", None)]

    @pytest.mark.parametrize("lost", [".set.tar.part.json", ".set.tar.part"])
    def test_not_where_a_half_of_what_is_kept_is_lost(
        self, site: Site, path: Path, patience: Patience, lost: str
    ) -> None:
        leave_part(site, path, patience)
        path.with_name(lost).unlink()
        assert fetch([site.url + "/set.tar"], path, md5=md5(CONTENT))
        assert site.sent("/set.tar") == [len(CONTENT)]

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"url": 1}', '{"url": "u", "etag": 3, "last_modified": 0}', "\0"]
    )
    def test_not_by_notes_that_are_damaged(self, site: Site, path: Path, patience: Patience, text: str) -> None:
        leave_part(site, path, patience)
        path.with_name(".set.tar.part.json").write_text(text)
        assert fetch([site.url + "/set.tar"], path, md5=md5(CONTENT))
        assert site.sent("/set.tar") == [len(CONTENT)]

    def test_not_where_the_server_ignores_ranges(self, site: Site, path: Path, patience: Patience) -> None:
        leave_part(site, path, patience)
        site.plans["/set.tar"] = [Reply(ranges=False)]
        assert fetch([site.url + "/set.tar"], path, md5=md5(CONTENT))
        assert path.read_bytes() == CONTENT

    def test_not_where_the_part_is_larger_than_the_whole(self, site: Site, path: Path, patience: Patience) -> None:
        leave_part(site, path, patience)
        path.with_name(".set.tar.part").write_bytes(CONTENT + OTHER)
        assert fetch([site.url + "/set.tar"], path, md5=md5(CONTENT))
        assert site.sent("/set.tar") == [len(CONTENT)]

    @pytest.mark.parametrize("strict", [True, False])
    def test_not_where_the_file_has_changed(self, site: Site, path: Path, patience: Patience, strict: bool) -> None:
        """Without a checksum nothing else would tell; `strict` servers look at If-Range, others do not."""
        leave_part(site, path, patience)
        site.files["/set.tar"] = OTHER
        site.plans["/set.tar"] = [Reply(strict=strict)]
        with pytest.warns(UserWarning, match=md5(OTHER)):
            fetch([site.url + "/set.tar"], path, patience=patience)
        assert path.read_bytes() == OTHER

    @pytest.mark.parametrize("etag", [None, 'W/"weak"'])
    def test_not_where_nothing_would_tell_a_change(
        self, site: Site, path: Path, patience: Patience, etag: str | None
    ) -> None:
        site.etags["/set.tar"] = etag
        url = site.add("/set.tar", CONTENT, Reply(stop=STOP))
        with pytest.warns(UserWarning, match="nobody states"):
            fetch([url], path, patience=patience)
        assert [hit.range for hit in site.hits] == [None, None]

    def test_by_date_where_the_etag_is_weak(self, site: Site, path: Path, patience: Patience) -> None:
        site.etags["/set.tar"] = 'W/"weak"'
        dated = {"Last-Modified": "Sat, 21 Nov 2026 00:00:00 GMT"}
        url = site.add("/set.tar", CONTENT, Reply(stop=STOP, headers=dated), Reply(strict=False, headers=dated))
        fetch([url], path, md5=md5(CONTENT), patience=patience)
        assert site.hits[1].if_range == dated["Last-Modified"]

    def test_a_part_goes_when_the_whole_is_brought_by_hand(self, site: Site, path: Path, patience: Patience) -> None:
        leave_part(site, path, patience)
        path.write_bytes(CONTENT)
        assert not fetch([site.url + "/set.tar"], path, md5=md5(CONTENT))
        assert listing(path) == ["set.tar"]

    def test_a_whole_part_is_just_checked(self, site: Site, path: Path, patience: Patience) -> None:
        leave_part(site, path, patience)
        path.with_name(".set.tar.part").write_bytes(CONTENT)
        assert fetch([site.url + "/set.tar"], path, md5=md5(CONTENT))
        assert not site.hits

    def test_a_part_past_the_end_begins_anew(self, site: Site, path: Path, patience: Patience) -> None:
        leave_part(site, path, patience)
        notes = path.with_name(".set.tar.part.json")
        notes.write_text(json.dumps(json.loads(notes.read_text()) | {"size": None}))
        path.with_name(".set.tar.part").write_bytes(CONTENT + b"more")
        assert fetch([site.url + "/set.tar"], path, md5=md5(CONTENT), patience=patience)
        assert path.read_bytes() == CONTENT

    def test_on_a_damaged_part_is_fetched_anew(self, site: Site, path: Path, patience: Patience) -> None:
        leave_part(site, path, patience)
        path.with_name(".set.tar.part").write_bytes(bytes(3 * BLOCK))
        assert fetch([site.url + "/set.tar"], path, md5=md5(CONTENT), patience=patience)
        assert site.sent("/set.tar") == [len(CONTENT) - 3 * BLOCK, len(CONTENT)]

    def test_after_ctrl_c(self, site: Site, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(response: Any) -> Iterator[bytes]:
            yield CONTENT[:BLOCK]
            raise KeyboardInterrupt

        url = site.add("/set.tar", CONTENT)
        with monkeypatch.context() as patch:
            patch.setattr(module, "body", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fetch([url], path, md5=md5(CONTENT))
        assert listing(path) == [".set.tar.part", ".set.tar.part.json"]
        assert fetch([url], path, md5=md5(CONTENT))
        assert site.hits[-1].range == f"bytes={BLOCK}-"


class TestAskedAgain:
    @pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
    def test_what_passes(self, site: Site, path: Path, patience: Patience, pauses: list[float], code: int) -> None:
        fetch([site.add("/set.tar", CONTENT, *[Reply(code)] * 3)], path, md5=md5(CONTENT), patience=patience)
        assert pauses == [1, 2, 4]

    def test_as_late_as_the_server_asks(self, site: Site, path: Path, patience: Patience, pauses: list[float]) -> None:
        replies = [Reply(429, {"Retry-After": text}) for text in ("7", formatdate(usegmt=True), "soon", "-3")]
        fetch([site.add("/set.tar", CONTENT, *replies)], path, md5=md5(CONTENT), patience=patience)
        assert pauses == [7, 2, 4, 8]

    @pytest.mark.parametrize("late", ["3600", formatdate(4e9, usegmt=True)])
    def test_not_where_it_asks_for_too_much(
        self, site: Site, path: Path, patience: Patience, pauses: list[float], late: str
    ) -> None:
        url = site.add("/set.tar", CONTENT, Reply(429, {"Retry-After": late}))
        with pytest.raises(DownloadError, match="left alone for"):
            fetch([url], path, md5=md5(CONTENT), patience=patience)
        assert pauses == []

    def test_not_for_ever(self, site: Site, path: Path, patience: Patience, pauses: list[float]) -> None:
        url = site.add("/set.tar", CONTENT, *[Reply(503)] * 9)
        with pytest.raises(DownloadError, match=r"HTTP 503 Service Unavailable \(asked 5 times\)"):
            fetch([url], path, patience=patience)
        assert pauses == [1, 2, 4, 8]

    def test_for_as_long_as_it_gets_on(
        self, site: Site, path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "PROGRESS", BLOCK)
        url = site.add("/set.tar", CONTENT, *[Reply(stop=BLOCK)] * 5)
        fetch([url], path, md5=md5(CONTENT), patience=Patience(attempts=2, sleep=pauses.append))
        assert pauses == [1] * 5

    def test_no_connection_names_the_host_and_the_way_out(
        self, path: Path, patience: Patience, pauses: list[float]
    ) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}/set.tar"
            with pytest.raises(DownloadError, match=r"no connection to 127.0.0.1 .*offline") as caught:
                fetch([url], path, patience=patience)
        assert f"put it at {path}" in str(caught.value)
        assert "--mirror" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert len(pauses) == 4

    def test_a_server_without_tls(self, site: Site, path: Path, patience: Patience) -> None:
        with pytest.raises(DownloadError, match=r"no answer from 127.0.0.1 .*SSL"):
            fetch([site.url.replace("http:", "https:") + "/set.tar"], path, patience=patience)


class TestRefused:
    def test_404_names_the_url_and_goes_to_the_next(self, site: Site, path: Path, pauses: list[float]) -> None:
        missing, there = site.url + "/missing/set.tar", site.add("/set.tar", CONTENT)
        with pytest.raises(DownloadError, match=f"{missing}: HTTP 404 Not Found: no such file there"):
            fetch([missing], path)
        assert fetch([missing, there], path, md5=md5(CONTENT))
        assert pauses == []

    def test_wrong_bytes_go_and_the_next_mirror_is_asked(self, site: Site, path: Path) -> None:
        bad, good = site.add("/bad.tar", OTHER), site.add("/set.tar", CONTENT)
        with pytest.raises(DownloadError, match=rf"its md5 is {md5(OTHER)}, expected {md5(CONTENT)} \(a friend\)"):
            fetch([bad], path, md5=md5(CONTENT), source="a friend")
        assert listing(path) == []
        assert fetch([bad, good], path, md5=md5(CONTENT))

    def test_a_wrong_size_is_seen_before_it_is_fetched(self, site: Site, path: Path) -> None:
        with pytest.raises(DownloadError, match=r"327,803 bytes, expected 9 \(a friend\)"):
            fetch([site.add("/set.tar", CONTENT)], path, size=9, source="a friend")
        assert listing(path) == []

    def test_what_does_not_end_is_cut(self, site: Site, path: Path) -> None:
        with pytest.raises(DownloadError, match="sends more than the 9 bytes"):
            fetch([site.add("/set.tar", CONTENT, Reply(length=False))], path, size=9)
        assert listing(path) == []

    @pytest.mark.parametrize(
        ("reply", "complaint"),
        [
            (Reply(headers={"Content-Type": "text/html; charset=utf-8"}), "web page"),
            (Reply(headers={"Content-Encoding": "gzip"}), "packed by gzip"),
            (Reply(headers={"Content-Length": "0"}, body=b""), "empty"),
            (Reply(403), "HTTP 403"),
            (Reply(204), "HTTP 204"),
            (Reply(206, {"Content-Range": "bytes 5-6/7"}), "HTTP 206"),
            (Reply(302, {"Location": "ftp://127.0.0.1/set.tar"}), "InvalidSchema"),
            (Reply(302, {"Location": "/set.tar"}), "HTTP 404|TooManyRedirects"),
        ],
    )
    def test_answers_that_are_not_the_file(self, site: Site, path: Path, reply: Reply, complaint: str) -> None:
        url = site.add("/set.tar", b"", *[reply] * (40 if reply.headers.get("Location") == "/set.tar" else 1))
        with pytest.raises(DownloadError, match=complaint):
            fetch([url], path)
        assert not path.exists()

    @pytest.mark.parametrize("url", ["", "set.tar", "ftp://a/b", "file:///etc/passwd"])
    def test_other_urls(self, path: Path, url: str) -> None:
        with pytest.raises(SpecError, match="expected a URL that begins with https"):
            fetch([url], path)
        assert not path.parent.exists()


class TestDisk:
    @pytest.mark.parametrize(("unpacked", "needs"), [(False, "0.00 GB more"), (True, "arrive and be unpacked")])
    def test_room_is_looked_for_first(
        self, site: Site, path: Path, monkeypatch: pytest.MonkeyPatch, unpacked: bool, needs: str
    ) -> None:
        usage = SimpleNamespace(free=2 * len(CONTENT) - 1 if unpacked else len(CONTENT) - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda where: usage)
        with pytest.raises(DownloadError, match=needs):
            fetch([site.add("/set.tar", CONTENT)], path, unpacked_in=path.parents[1] if unpacked else None)
        assert listing(path) == []

    def test_a_full_disk_keeps_what_came(
        self, site: Site, tmp_path: Path, patience: Patience, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        size = f"size={4 * BLOCK}"
        if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], capture_output=True).returncode:
            pytest.skip("this user may not mount a small disk")
        try:
            usage = SimpleNamespace(free=1 << 40)
            monkeypatch.setattr(shutil, "disk_usage", lambda where: usage)
            url = site.add("/set.tar", CONTENT)
            with pytest.raises(DownloadError, match="No space left on device; what has arrived is kept: make room"):
                fetch([url], disk / "set.tar", md5=md5(CONTENT), patience=patience)
            assert (disk / ".set.tar.part").stat().st_size >= 2 * BLOCK
            subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
            assert fetch([url], disk / "set.tar", md5=md5(CONTENT), patience=patience)
            assert sum(site.sent("/set.tar")[1:]) < len(CONTENT)
        finally:
            subprocess.run(["umount", disk], check=True)

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("")
        with pytest.raises(DownloadError, match="cache: File exists; name a folder that can be written"):
            fetch([], tmp_path / "cache" / "set.tar")

    def test_errors_that_name_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(DownloadError, match=f"{tmp_path}: Input/output error"), disk_errors(tmp_path):
            raise OSError(5, "Input/output error")


def test_locks_leave_nothing_and_wait_for_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "lock"
    with locked(lock):
        waiting = os.fork()
        if not waiting:
            with locked(lock, quiet=False):
                os._exit(7 if lock.exists() else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]) == 7
    with locked(lock):
        pass
    assert not lock.exists()


def test_nothing_is_printed_but_what_went_wrong(
    site: Site, path: Path, patience: Patience, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch([site.add("/set.tar", CONTENT, Reply(503))], path, md5=md5(CONTENT), patience=patience, quiet=False)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"{site.url}/set.tar: HTTP 503 Service Unavailable; asked again in 1 s\n"

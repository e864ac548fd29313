from __future__ import annotations

import io
import time
from email.utils import formatdate
from typing import Any

import pytest
import requests

from ident3d.errors import SpecError
from ident3d.network.http import Answer, Broken, Changed, Patience, Unusable, check_url, get, shown, understand

KNOWN = Answer(10, 100, '"a"')


def response(code: int, **headers: str) -> requests.Response:
    made = requests.Response()
    made.status_code, made.reason, made.raw = code, "Told", io.BytesIO()
    made.headers.update({name.replace("_", "-"): text for name, text in headers.items()})
    return made


class TestUrls:
    @pytest.mark.parametrize(
        "url",
        [
            "",
            "a",
            "ftp://a",
            "file:///a",
            "http://",
            "https://[",
            "http://a:x/",
            "http://a:0/",
            "http://a b/",
            "http:a",
        ],
    )
    def test_others_are_refused(self, url: str) -> None:
        with pytest.raises(SpecError, match="expected a URL that begins with https"):
            check_url(url)

    @pytest.mark.parametrize("url", ["http://a", "https://me:secret@a.org:8443/b?c", "http://[::1]:80/", "HTTP://A/"])
    def test_a_web_server(self, url: str) -> None:
        check_url(url)

    def test_passwords_are_not_shown(self) -> None:
        assert shown("https://me:secret@host:8/x?y") == "https://host:8/x?y"
        with pytest.raises(SpecError) as caught:
            check_url("ftp://me:secret@host/")
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("hop", ["http://example.org/x", "http://[::1]/"])
    def test_from_https_to_http(self, monkeypatch: pytest.MonkeyPatch, hop: str) -> None:
        for history in ([], [hop]):
            last = response(200)
            last.url = "https://example.org/x" if history else hop
            last.history = [response(302) for _ in history]
            for earlier in last.history:
                earlier.url = hop
            monkeypatch.setattr(requests, "get", lambda *args, last=last, **more: last)
            with pytest.raises(Unusable, match="from https to http"), get("https://example.org/x", Patience(), {}):
                pass

    @pytest.mark.parametrize(
        ("error", "kind", "says"),
        [
            (requests.exceptions.SSLError("CERTIFICATE_VERIFY_FAILED: self-signed"), Unusable, "cannot be trusted"),
            (requests.exceptions.SSLError("EOF"), Broken, "no answer"),
            (requests.ReadTimeout("slow"), Broken, "no answer"),
            (requests.TooManyRedirects("round and round"), Unusable, "TooManyRedirects"),
            (requests.exceptions.InvalidHeader("odd"), Unusable, "InvalidHeader"),
        ],
    )
    def test_no_answer(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], says: str
    ) -> None:
        def fail(*args: Any, **more: Any) -> None:
            raise error

        monkeypatch.setattr(requests, "get", fail)
        with pytest.raises(kind, match=says), get("https://example.org/x", Patience(), {}):
            pass


class TestUnderstood:
    @pytest.mark.parametrize(
        ("headers", "answer"),
        [
            ({"Content_Length": "7", "ETag": '"b"'}, Answer(0, 7, '"b"')),
            ({"Content_Length": "7", "Transfer_Encoding": "chunked"}, Answer(0, None)),
            ({"Content_Length": "9" * 5000}, Answer(0, None)),
            ({"Last_Modified": "then"}, Answer(0, None, None, "then")),
        ],
    )
    def test_a_whole_file(self, headers: dict[str, str], answer: Answer) -> None:
        for known in (None, KNOWN):
            assert understand(response(200, **headers), known, packed=False) == answer

    @pytest.mark.parametrize("total", ["100", "*"])
    def test_the_rest_of_one(self, total: str) -> None:
        answer = understand(response(206, Content_Range=f"bytes 10-99/{total}", ETag='"a"'), KNOWN, packed=False)
        assert answer == KNOWN

    @pytest.mark.parametrize(
        ("told", "etag"),
        [
            ("bytes 0-99/100", '"a"'),
            ("bytes 11-99/100", '"a"'),
            ("bytes 10-98/99", '"a"'),
            ("bytes 10-99/100", '"b"'),
            ("", '"a"'),
            ("bytes */100", '"a"'),
            ("items 10-99/100", '"a"'),
        ],
    )
    def test_the_rest_of_another(self, told: str, etag: str) -> None:
        with pytest.raises(Changed, match="begun anew"):
            understand(response(206, Content_Range=told, ETag=etag), KNOWN, packed=False)

    def test_a_packed_body_may_be_the_file(self) -> None:
        packed = response(200, Content_Encoding="gzip", Content_Length="7")
        assert understand(packed, None, packed=True).total == 7
        with pytest.raises(Unusable, match="packed by gzip"):
            understand(packed, None, packed=False)

    @pytest.mark.parametrize("code", [400, 401, 403, 404, 410, 416, 501, 204, 206, 304])
    def test_what_will_not_change(self, code: int) -> None:
        with pytest.raises(Unusable, match=f"HTTP {code} Told"):
            understand(response(code), None, packed=False)

    @pytest.mark.parametrize(
        ("text", "least", "most"),
        [
            ("", 0, 0),
            ("12", 12, 12),
            (" 12 ", 12, 12),
            ("1.5", 0, 0),
            ("-1", 0, 0),
            ("9" * 40, 0, 0),
            (formatdate(0, usegmt=True), 0, 0),
            ("in 1000 s", 900, 1000),
        ],
    )
    def test_when_to_ask_again(self, text: str, least: float, most: float) -> None:
        text = formatdate(time.time() + 1000, usegmt=True) if text == "in 1000 s" else text
        with pytest.raises(Broken) as caught:
            understand(response(429, Retry_After=text), None, packed=False)
        assert least <= caught.value.wait_s <= most

    def test_a_weak_etag_vouches_for_nothing(self) -> None:
        assert Answer(0, None, '"a"', "then").validator == '"a"'
        assert Answer(0, None, 'W/"a"', "then").validator == "then"
        assert Answer(0, None, 'W/"a"').validator is None

"""Damaged pictures: no codec lets pass what Pillow refuses."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_cases import (
    CHANNELS,
    DAMAGE,
    SIGNATURE,
    TEXT,
    WEBPS,
    by_plain_pillow,
    chunk,
    encoded,
    every_codec,
    header,
    png,
    png_with_text,
    random_png,
    random_rows,
    same,
    shaded,
    verdict,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from ident3d import codecs
from ident3d.codecs import decode, encode_png, encode_webp, forced_codec

# Damage.


@pytest.mark.parametrize("make", [lambda: encode_png(shaded(6, 7)), png_with_text], ids=["RGB", "RGBA with text"])
def test_no_altered_bit_of_a_png_passes(
    codec: str, make: Callable[[], bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    good = make()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DAMAGE):
            decode(bytes(bad))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("form", [(8, 3), (1, 0), (16, 6)])
def test_no_altered_bit_of_a_png_of_pillows_passes(codec: str, form: tuple[int, int]) -> None:
    good = random_png(np.random.default_rng(5), form, (4, 3))
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DAMAGE):
            decode(bytes(bad))


def test_no_altered_bit_of_a_real_png_passes(codec: str, reference_renders: Path) -> None:
    good = (reference_renders / "0000.png").read_bytes()
    for bit in np.random.default_rng(6).integers(0, 8 * len(good), 200).tolist():
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DAMAGE):
            decode(bytes(bad))


def test_no_truncated_picture_passes(codec: str) -> None:
    pixels = shaded(9, 8)
    for good in (encode_png(pixels), png_with_text(), encoded(pixels, "PNG", "P"), encode_webp(pixels)):
        for size in range(len(good)):
            with pytest.raises(DAMAGE):
                decode(good[:size])


@pytest.mark.parametrize("kind", ["lossless", "lossless, alpha", "lossless, metadata", "lossy", "animated"])
def test_altered_webps_have_pillows_verdict(codec: str, kind: str) -> None:
    good = WEBPS[kind](shaded(9, 8))
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        if b"VP8X" in bad and any(bad[26:27] + bad[29:30]):
            continue  # more pixels than a test need take memory for
        assert same(verdict(decode, bytes(bad)), verdict(by_plain_pillow, bytes(bad))), bit


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), colour=st.sampled_from([2, 6]), changes=st.integers(1, 4))
def test_altered_data_with_right_crcs_has_pillows_verdict(seed: int, colour: int, changes: int) -> None:
    """What a broken writer might leave: nothing but the codecs themselves can tell."""
    rng = np.random.default_rng(seed)
    rows = bytearray(random_rows(rng, 6, 5, 8 * CHANNELS[colour]))
    packed = bytearray(zlib.compress(rows, int(rng.integers(0, 10))))
    for _ in range(changes):
        match int(rng.integers(4)):
            case 0 if packed:
                packed[rng.integers(len(packed))] ^= 1 << int(rng.integers(8))
            case 1:
                del packed[rng.integers(len(packed) + 1) :]
            case 2:
                packed += rng.bytes(3)
            case _:
                rows[rng.integers(len(rows))] = rng.integers(256)
                packed = bytearray(zlib.compress(rows))
    data = png(header(6, 5, 8, colour), chunk(b"IDAT", bytes(packed)))
    expected = verdict(by_plain_pillow, data)
    for name in every_codec():
        with forced_codec(name):
            assert same(verdict(decode, data), expected), name


@pytest.mark.parametrize(
    "data",
    {
        "nothing": b"",
        "noise": bytes(range(256)),
        "signature": SIGNATURE,
        "no data": png(header(2, 2)),
        "empty data": png(header(2, 2), chunk(b"IDAT")),
        "no header": SIGNATURE + chunk(b"IDAT", zlib.compress(bytes(14))) + chunk(b"IEND"),
        "end only": SIGNATURE + chunk(b"IEND"),
        "no width": png(header(0, 2), chunk(b"IDAT", zlib.compress(bytes(2)))),
        "no height": png(header(2, 0), chunk(b"IDAT", zlib.compress(b""))),
        "filter method": png(header(2, 2, 8, 2, 0, 1, 0), chunk(b"IDAT", zlib.compress(bytes(14)))),
        "depth": png(header(2, 2, 5, 2), chunk(b"IDAT", zlib.compress(bytes(14)))),
        "colour": png(header(2, 2, 8, 5), chunk(b"IDAT", zlib.compress(bytes(14)))),
        "filter": png(header(2, 2), chunk(b"IDAT", zlib.compress(b"\5" + bytes(13)))),
        "too few rows": png(header(2, 2), chunk(b"IDAT", zlib.compress(bytes(13)))),
        "no zlib": png(header(2, 2), chunk(b"IDAT", bytes(20))),
        "data apart": png(header(2, 2), chunk(b"IDAT", zlib.compress(bytes(14))[:4]), TEXT, chunk(b"IDAT")),
        "packed text": png(header(2, 2), chunk(b"zTXt", b"a\0\7b"), chunk(b"IDAT", zlib.compress(bytes(14)))),
        "gamma": png(header(2, 2), chunk(b"gAMA", b"\0"), chunk(b"IDAT", zlib.compress(bytes(14)))),
        "webp": b"RIFF\x04\0\0\0WEBP",
        "webp, cut": encode_webp(np.zeros((4, 4, 3), np.uint8))[:29],
    }.items(),
    ids=lambda item: item[0],
)
def test_what_is_no_picture_is_refused(codec: str, data: tuple[str, bytes], capfd: pytest.CaptureFixture[str]) -> None:
    assert verdict(by_plain_pillow, data[1]) is None
    with pytest.raises(DAMAGE):
        decode(data[1])
    assert capfd.readouterr() == ("", "")


def test_data_past_the_rows_is_ignored_as_pillow_ignores_it(codec: str) -> None:
    rows = random_rows(np.random.default_rng(1), 2, 2, 24)
    for packed in (zlib.compress(rows + b"more"), zlib.compress(rows) + b"more"):
        data = png(header(2, 2), chunk(b"IDAT", packed)) + b"and more"
        np.testing.assert_array_equal(decode(data), by_plain_pillow(data))


def test_every_error_says_what_is_wrong(codec: str) -> None:
    good = encode_png(shaded(9, 8))
    with pytest.raises(ValueError, match=r"cut short.* 60 bytes.* 33 "):
        decode(good[:60])
    with pytest.raises(ValueError, match="wrong CRC of its chunk b'IDAT' at byte 33"):
        decode(good[:50] + bytes([good[50] ^ 1]) + good[51:])
    with pytest.raises(ValueError, match="goes on"):
        decode(good[:-1])


def huge_webp(kind: bytes, content: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 12 + len(content)) + b"WEBP" + kind + struct.pack("<I", len(content)) + content


BOMBS = {
    "PNG": png(header(100_000, 100_000), chunk(b"IDAT", zlib.compress(bytes(1000)))),
    "PNG, palette": png(header(100_000, 100_000, 8, 3), chunk(b"PLTE", bytes(3)), chunk(b"IDAT", b"x")),
    "PNG, past the limit": png(header(codecs.MAX_PIXELS + 1, 1), chunk(b"IDAT", zlib.compress(bytes(10**6)))),
    "PNG, past what its data can hold": png(header(9000, 9000), chunk(b"IDAT", zlib.compress(bytes(10**6)))),
    "WebP, lossless": huge_webp(b"VP8L", b"\x2f" + (0x0FFFFFFF).to_bytes(4, "little") + bytes(20)),
    "WebP, lossy": huge_webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a\xff\x3f\xff\x3f" + bytes(20)),
    "WebP, extended": huge_webp(b"VP8X", b"\0\0\0\0" + b"\xff\xff\xff" * 2 + bytes(20)),
    "BMP": b"BM" + struct.pack("<IIIIiiHH", 0, 0, 54, 40, 100_000, 100_000, 1, 24) + bytes(99),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_are_refused_before_memory_is_taken(codec: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(codecs, "_target", refuse)
    monkeypatch.setattr(Image.Image, "load", refuse)
    with pytest.raises(ValueError, match=r"pixels|bomb"):
        decode(BOMBS[kind])


def test_pillows_leniency_is_not_obeyed(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other packages set this for the whole process."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    good = encode_png(shaded(30, 30))
    for size in (40, len(good) // 2, len(good) - 1):
        with pytest.raises(DAMAGE):
            decode(good[:size])

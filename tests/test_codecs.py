"""Pictures from bytes and to bytes: every kind, every damage, every codec against plain Pillow."""

from __future__ import annotations

import importlib.util
import io
import mmap
import os
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFile

from ident3d import codecs
from ident3d.codecs import codec_name, decode, encode_png, encode_webp, forced_codec
from ident3d.errors import Ident3DError, SpecError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
FORMS = [(depth, colour) for colour, depths in DEPTHS.items() for depth in depths]
DAMAGE = (OSError, SyntaxError, ValueError)
HAVE_IMAGECODECS = importlib.util.find_spec("imagecodecs") is not None


@pytest.fixture(params=codecs.CODECS)
def codec(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each codec in turn."""
    if request.param == "imagecodecs" and not HAVE_IMAGECODECS:
        pytest.skip("imagecodecs is absent")
    with forced_codec(request.param):
        yield request.param


def every_codec() -> list[str]:
    return [name for name in codecs.CODECS if name == "pillow" or HAVE_IMAGECODECS]


def by_plain_pillow(data: bytes) -> NDArray[np.uint8]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as picture:
            return np.array(picture.convert("RGB"))


def verdict(function: Callable[[bytes], NDArray[np.uint8]], data: bytes) -> NDArray[np.uint8] | None:
    """The pixels, or None for a refusal."""
    try:
        return function(data)
    except DAMAGE:
        return None
    except Exception:
        assert function is by_plain_pillow, "raises something that callers do not catch"
        return None


def same(a: NDArray[np.uint8] | None, b: NDArray[np.uint8] | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(header: bytes, *chunks: bytes) -> bytes:
    return b"".join((SIGNATURE, chunk(b"IHDR", header), *chunks, chunk(b"IEND")))


def header(width: int, height: int, depth: int = 8, colour: int = 2, *methods: int) -> bytes:
    compression, filters, interlace = methods or (0, 0, 0)
    return struct.pack(">IIBBBBB", width, height, depth, colour, compression, filters, interlace)


def random_rows(rng: np.random.Generator, width: int, height: int, bits: int) -> bytes:
    """Filtered rows of any content: each begins with the number of a filter."""
    size = (width * bits + 7) // 8
    if width == 0 or height == 0:
        return b""
    return b"".join(bytes([rng.integers(5)]) + rng.bytes(size) for _ in range(height))


def random_png(
    rng: np.random.Generator,
    form: tuple[int, int],
    side: tuple[int, int],
    *extra: bytes,
    interlace: int = 0,
    parts: int = 1,
) -> bytes:
    """A PNG of random rows.

    Args:
        rng: what is random.
        form: bit depth and colour type.
        side: width and height.
        extra: chunks before the data.
        interlace: 1 for Adam7.
        parts: how many chunks hold the data.
    """
    depth, colour = form
    width, height = side
    bits = depth * CHANNELS[colour]
    passes = [(0, 0, 1, 1)]
    if interlace:
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    rows = b"".join(random_rows(rng, -((x - width) // dx), -((y - height) // dy), bits) for x, y, dx, dy in passes)
    packed = zlib.compress(rows)
    cuts = sorted(rng.integers(0, len(packed) + 1, parts - 1).tolist())
    contents = [packed[a:b] for a, b in zip([0, *cuts], [*cuts, len(packed)], strict=True)]
    palette = [chunk(b"PLTE", rng.bytes(3 * 2**depth))] if colour == 3 else []
    data = [chunk(b"IDAT", content) for content in contents]
    return png(header(width, height, depth, colour, 0, 0, interlace), *palette, *extra, *data)


def shaded(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Something like a render: smooth, with a little noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    ramp = np.stack([3 * x + y, 2 * y, x + 2 * y], axis=-1) * 255 // (4 * max(height, width))
    noisy: NDArray[np.uint8] = np.clip(ramp + rng.integers(-3, 4, ramp.shape), 0, 255).astype(np.uint8)
    return noisy


def encoded(pixels: NDArray[Any], kind: str, mode: str | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(buffer, kind, **options)
    return buffer.getvalue()


def opaque(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)])


def with_alpha(pixels: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    alpha = np.random.default_rng(seed).integers(0, 256, pixels.shape[:2], np.uint8)
    alpha[: len(alpha) // 2] = 0
    return np.dstack([pixels, alpha])


TEXT = chunk(b"tEXt", b"Comment\0teapot")

# Every kind of picture, the same pixels.


@pytest.mark.parametrize("interlace", [0, 1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", [(1, 1), (5, 3), (3, 9), (17, 16)])
def test_every_form_of_png_has_pillows_pixels(
    codec: str, form: tuple[int, int], side: tuple[int, int], interlace: int
) -> None:
    rng = np.random.default_rng([*form, *side])
    data = random_png(rng, form, side, interlace=interlace, parts=2)
    pixels = decode(data)
    assert pixels.dtype == np.uint8
    assert pixels.flags.writeable
    np.testing.assert_array_equal(pixels, by_plain_pillow(data))


METADATA = {
    "gamma": chunk(b"gAMA", struct.pack(">I", 100000)),
    "linear": chunk(b"gAMA", struct.pack(">I", 220000)) + chunk(b"cHRM", bytes(32)),
    "srgb": chunk(b"sRGB", b"\0"),
    "profile": chunk(b"iCCP", b"x\0\0" + zlib.compress(b"not a profile")),
    "text": TEXT * 12,
    "packed text": chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"teapot")),
    "sideways": chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),
    "density": chunk(b"pHYs", struct.pack(">IIB", 2835, 1, 1)),
    "significant bits": chunk(b"sBIT", b"\5\5\5"),
    "background": chunk(b"bKGD", b"\0\1\0\2\0\3"),
    "transparent colour": chunk(b"tRNS", bytes(6)),
    "suggested palette": chunk(b"PLTE", bytes(range(30))),
    "unknown": chunk(b"teAp", b"ot"),
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("colour", [2, 6])
def test_metadata_changes_no_pixel(codec: str, name: str, colour: int, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    bare = random_png(rng, (8, colour), (7, 5))
    before = bare[:33] + METADATA[name] + bare[33:]
    np.testing.assert_array_equal(decode(before), decode(bare))
    np.testing.assert_array_equal(decode(before), by_plain_pillow(before))
    if name not in ("transparent colour", "suggested palette"):
        after = bare[:-12] + METADATA[name] + bare[-12:]
        np.testing.assert_array_equal(decode(after), decode(bare))
    assert capfd.readouterr() == ("", "")


def test_text_cannot_pose_as_a_header(codec: str) -> None:
    """Pillow keeps text and header fields in one dict, and takes text of this name for interlacing."""
    bare = random_png(np.random.default_rng(1), (8, 2), (16, 9))
    posing = bare[:33] + chunk(b"tEXt", b"interlace\0yes") + bare[33:]
    np.testing.assert_array_equal(decode(posing), decode(bare))


@pytest.mark.parametrize("alphas", [b"\0", b"\xff\0\xff", bytes(range(0, 160, 10))])
@pytest.mark.parametrize("depth", [1, 4, 8])
def test_palettes_with_transparency(codec: str, depth: int, alphas: bytes) -> None:
    data = random_png(np.random.default_rng(depth), (depth, 3), (9, 6), chunk(b"tRNS", alphas[: 2**depth]))
    np.testing.assert_array_equal(decode(data), by_plain_pillow(data))


@pytest.mark.parametrize("form", [(1, 0), (8, 0), (16, 0), (16, 2)])
def test_transparent_colours(codec: str, form: tuple[int, int]) -> None:
    data = random_png(np.random.default_rng(4), form, (9, 6), chunk(b"tRNS", bytes(2 * CHANNELS[form[1]])))
    np.testing.assert_array_equal(decode(data), by_plain_pillow(data))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    form=st.sampled_from(FORMS),
    side=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    interlace=st.sampled_from([0, 0, 0, 1]),
    parts=st.integers(1, 6),
    extra=st.lists(st.sampled_from(["gamma", "srgb", "text", "sideways", "unknown", "packed text"]), max_size=3),
)
def test_any_png_has_pillows_pixels(
    seed: int, form: tuple[int, int], side: tuple[int, int], interlace: int, parts: int, extra: list[str]
) -> None:
    rng = np.random.default_rng(seed)
    data = random_png(rng, form, side, *(METADATA[name] for name in extra), interlace=interlace, parts=parts)
    expected = by_plain_pillow(data)
    for name in every_codec():
        with forced_codec(name):
            np.testing.assert_array_equal(decode(data), expected)


def test_rows_beyond_one_stored_block(codec: str) -> None:
    """Deflate stores at most 65,535 bytes a block, and Pillow reads as many at a time."""
    for colour in (2, 6):
        data = random_png(np.random.default_rng(3), (8, colour), (301, 260), parts=5)
        np.testing.assert_array_equal(decode(data), by_plain_pillow(data))


WEBPS = {
    "lossless": lambda p: encode_webp(p),
    "lossless, fast": lambda p: encoded(p, "WEBP", lossless=True, method=0),
    "lossless, alpha": lambda p: encoded(with_alpha(p), "WEBP", lossless=True, exact=True),
    "lossless, alpha, not exact": lambda p: encoded(with_alpha(p), "WEBP", lossless=True),
    "lossless, opaque alpha": lambda p: encoded(opaque(p), "WEBP", lossless=True),
    "lossless, metadata": lambda p: encoded(p, "WEBP", lossless=True, exif=b"Exif\0\0MM\0*", icc_profile=b"none"),
    "lossy": lambda p: encoded(p, "WEBP", quality=60),
    "lossy, alpha": lambda p: encoded(with_alpha(p), "WEBP", quality=60),
    "animated": lambda p: encoded(
        p, "WEBP", lossless=True, save_all=True, append_images=[Image.fromarray(255 - p)], duration=40
    ),
    "animated, alpha": lambda p: encoded(
        with_alpha(p), "WEBP", save_all=True, append_images=[Image.fromarray(with_alpha(255 - p))], duration=40
    ),
}


@pytest.mark.parametrize("kind", WEBPS)
@pytest.mark.parametrize("side", [(1, 1), (13, 8), (64, 64), (31, 70)])
def test_every_webp_has_pillows_pixels(codec: str, kind: str, side: tuple[int, int]) -> None:
    data = WEBPS[kind](shaded(*side))
    np.testing.assert_array_equal(decode(data), by_plain_pillow(data))


@pytest.mark.parametrize("kind", ["JPEG", "BMP", "GIF", "TIFF", "PPM"])
def test_other_formats_are_pillows(codec: str, kind: str) -> None:
    data = encoded(shaded(12, 15), kind)
    np.testing.assert_array_equal(decode(data), by_plain_pillow(data))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pngs_that_pillow_writes(codec: str, mode: str) -> None:
    data = encoded(shaded(20, 11)[..., 0].astype(np.uint16) * 257, "PNG") if mode == "I;16" else None
    data = data or encoded(shaded(20, 11), "PNG", mode, optimize=True)
    np.testing.assert_array_equal(decode(data), by_plain_pillow(data))


def test_the_first_frame_of_an_animated_png(codec: str) -> None:
    frames = [Image.fromarray(shaded(9, 9, seed)) for seed in range(3)]
    for options in ({}, {"default_image": True}):
        buffer = io.BytesIO()
        frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:], **options)
        np.testing.assert_array_equal(decode(buffer.getvalue()), by_plain_pillow(buffer.getvalue()))


def test_renders_of_the_released_generator(codec: str, reference_renders: Path) -> None:
    for path in sorted(reference_renders.glob("*.png")):
        expected = by_plain_pillow(path.read_bytes())
        np.testing.assert_array_equal(decode(path.read_bytes()), expected)
        np.testing.assert_array_equal(decode(encoded(opaque(expected), "PNG")), expected)


# Views and places for the pixels.


@pytest.mark.parametrize("kind", ["PNG", "PNG, alpha", "PNG, grey", "WEBP", "JPEG"])
def test_pixels_go_where_they_are_told(codec: str, kind: str) -> None:
    pixels = shaded(10, 14)
    data = {
        "PNG": lambda: encode_png(pixels),
        "PNG, alpha": lambda: encoded(with_alpha(pixels), "PNG"),
        "PNG, grey": lambda: encoded(pixels, "PNG", "L"),
        "WEBP": lambda: encode_webp(pixels),
        "JPEG": lambda: encoded(pixels, "JPEG"),
    }[kind]()
    expected = by_plain_pillow(data)
    batch = np.zeros((3, 10, 14, 3), np.uint8)
    place = batch[1]
    assert decode(data, place) is place
    np.testing.assert_array_equal(batch[1], expected)
    assert not batch[[0, 2]].any()
    for view in (memoryview(data), memoryview(bytearray(data)), memoryview(b"ab" + data + b"c")[2:-1]):
        np.testing.assert_array_equal(decode(view), expected)
        np.testing.assert_array_equal(decode(view, out=np.ones_like(expected)), expected)
    spread = bytes(byte for byte in data for _ in range(2))
    np.testing.assert_array_equal(decode(memoryview(spread)[::2]), expected)


def unwritable() -> NDArray[np.uint8]:
    array = np.zeros((10, 14, 3), np.uint8)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((10, 14), np.uint8),
        np.zeros((10, 14, 4), np.uint8),
        np.zeros((14, 10, 3), np.uint8),
        np.zeros((1, 10, 14, 3), np.uint8),
        np.zeros((10, 14, 3), np.int8),
        np.zeros((10, 14, 3), np.float32),
        np.zeros((10, 28, 3), np.uint8)[:, ::2],
        np.zeros((3, 10, 14), np.uint8).transpose(1, 2, 0),
        np.asfortranarray(np.zeros((10, 14, 3), np.uint8)),
        unwritable(),
    ],
    ids=lambda out: f"{out.dtype}-{out.shape}-{out.strides}-{out.flags.writeable}",
)
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_a_place_that_does_not_fit_is_refused(codec: str, out: NDArray[Any], kind: str) -> None:
    data = encode_webp(shaded(10, 14)) if kind == "WEBP" else encoded(shaded(10, 14), kind)
    with pytest.raises(ValueError, match="out "):
        decode(data, out)
    assert not out.any()


def test_an_error_does_not_keep_a_map_open(tmp_path: Path) -> None:
    data = encode_png(shaded(8, 8))
    (tmp_path / "a").write_bytes(b"12345" + data[:-20] + b"\0" * 20)
    with open(tmp_path / "a", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(mapped)
        with pytest.raises(DAMAGE) as caught:
            decode(view[5:])
        view.release()
        mapped.close()  # a BufferError if the traceback still held a slice
        assert caught.value.__traceback__ is not None


# Damage.


def png_with_text(seed: int = 0) -> bytes:
    """As the released generator writes them: RGBA and text."""
    data = encoded(with_alpha(shaded(6, 7, seed)), "PNG")
    return data[:33] + METADATA["sideways"] + METADATA["density"] + chunk(b"tEXt", b"Frame\0001") + data[33:]


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


# Encoders.


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), side=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_encoders_lose_nothing(seed: int, side: tuple[int, int]) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (*side, 3), np.uint8) & np.uint8(seed % 256)
    for encode in (encode_png, encode_webp):
        data = encode(pixels)
        assert data == encode(pixels.copy())
        for name in every_codec():
            with forced_codec(name):
                np.testing.assert_array_equal(decode(data), pixels)


@pytest.mark.parametrize("side", [(1, 1), (32, 32), (224, 224)])
def test_pngs_are_the_bytes_that_datasets_of_0_1_hold(side: tuple[int, int]) -> None:
    """A render that goes on, or a repair, must leave the bytes that its manifest has the checksums of."""
    assert encode_png(shaded(*side)) == encoded(shaded(*side), "PNG")


def test_pngs_hold_nothing_but_the_picture() -> None:
    assert encode_png(np.full((1, 1, 3), 7, np.uint8)) == png(header(1, 1), chunk(b"IDAT", zlib.compress(b"\0\7\7\7")))


def test_webps_are_three_quarters_of_the_best_png(reference_renders: Path) -> None:
    pictures = [by_plain_pillow(path.read_bytes()) for path in sorted(reference_renders.glob("*.png"))]
    webp = sum(len(encode_webp(pixels)) for pixels in pictures)
    best = sum(len(encoded(pixels, "PNG", optimize=True, compress_level=9)) for pixels in pictures)
    assert webp <= 0.72 * best


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3)),
        np.zeros((1, 20_000, 3), np.uint8),
    ],
    ids=["grey", "RGBA", "floats", "too wide"],
)
def test_what_cannot_be_a_webp_is_refused(pixels: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"pixels|encod"):
        encode_webp(pixels)


# The choice of codecs.


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has decoded nothing yet, and whose environment does not say."""
    monkeypatch.delenv(codecs.VARIABLE, raising=False)
    monkeypatch.setattr(codecs, "_backend", None)


def pixels_are_right() -> bool:
    pictures = [shaded(12, 9), shaded(5, 30)]
    return all(np.array_equal(decode(encode(p)), p) for p in pictures for encode in (encode_png, encode_webp))


@pytest.mark.usefixtures("undecided")
@pytest.mark.skipif(not HAVE_IMAGECODECS, reason="imagecodecs is absent")
def test_imagecodecs_is_taken_where_it_is() -> None:
    import imagecodecs

    assert codec_name() == f"imagecodecs {imagecodecs.__version__}"
    assert pixels_are_right()


@pytest.mark.usefixtures("undecided")
def test_pillow_is_taken_where_imagecodecs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    assert codec_name() == f"Pillow {PIL.__version__}"
    assert pixels_are_right()


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", every_codec())
def test_the_variable_forces_a_codec(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(codecs.VARIABLE, name)
    assert codec_name().lower().startswith(name)
    assert pixels_are_right()


@pytest.mark.usefixtures("undecided")
def test_an_empty_variable_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = codec_name()
    monkeypatch.setenv(codecs.VARIABLE, "")
    assert codec_name() == fastest


@pytest.mark.usefixtures("undecided")
def test_a_codec_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"'libpng'.*imagecodecs or pillow"), forced_codec("libpng"):
        pass
    monkeypatch.setenv(codecs.VARIABLE, "Pillow")
    with pytest.raises(SpecError, match=r"IDENT3D_CODEC is 'Pillow'"):
        codec_name()
    with pytest.raises(Ident3DError, match=r"IDENT3D_CODEC is 'Pillow'") as caught:
        decode(encode_png(shaded(4, 4)))
    # Callers take these for a damaged picture.
    assert not isinstance(caught.value, DAMAGE)


@pytest.mark.usefixtures("undecided")
def test_a_forced_codec_that_is_absent_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(SpecError, match=r"ident3d\[codecs\]"), forced_codec("imagecodecs"):
        pass
    assert pixels_are_right()


def test_a_forced_codec_is_so_inside_only() -> None:
    before = codec_name()
    with suppress(KeyError), forced_codec("pillow"):
        assert codec_name() == f"Pillow {PIL.__version__}"
        raise KeyError
    assert codec_name() == before


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("not in this build")


def do_nothing(*_: Any, **__: Any) -> bytes:
    return b""


@pytest.mark.usefixtures("undecided")
@pytest.mark.skipif(not HAVE_IMAGECODECS, reason="imagecodecs is absent")
@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({}, "Pillow {pillow}"),
        ({"webp_decode": "real"}, "Pillow {pillow} (PNG), imagecodecs 1.2 (WebP)"),
        ({"webp_decode": do_nothing, "spng_decode": do_nothing}, "Pillow {pillow}"),
        (
            {"deflate_decode": "real", "deflate_encode": "real", "deflate_crc32": "real", "spng_decode": "real"}
            | {"webp_decode": fail},
            "imagecodecs 1.2 (PNG), Pillow {pillow} (WebP)",
        ),
    ],
)
def test_a_build_that_lacks_parts_is_used_for_the_others(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], name: str
) -> None:
    import imagecodecs

    stub = {part: getattr(imagecodecs, part) if found == "real" else found for part, found in parts.items()}
    monkeypatch.setitem(sys.modules, "imagecodecs", SimpleNamespace(__version__="1.2", **stub))
    assert codec_name() == name.format(pillow=PIL.__version__)
    assert pixels_are_right()


@pytest.mark.skipif(not HAVE_IMAGECODECS, reason="imagecodecs is absent")
def test_pillow_mends_what_a_codec_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    import imagecodecs

    with forced_codec("imagecodecs"):
        for part in ("spng_decode", "webp_decode", "deflate_decode"):
            with monkeypatch.context() as patch:
                patch.setattr(imagecodecs, part, fail)
                assert pixels_are_right()


@pytest.mark.skipif(not HAVE_IMAGECODECS, reason="imagecodecs is absent")
def test_fast_paths_are_taken(monkeypatch: pytest.MonkeyPatch, reference_renders: Path) -> None:
    monkeypatch.setattr(codecs, "_by_pillow", fail)
    real = (reference_renders / "0000.png").read_bytes()
    with forced_codec("imagecodecs"):
        for data in (real, png_with_text(), encode_png(shaded(9, 5)), encode_webp(shaded(9, 5))):
            decode(data)


# Threads and processes.


def test_threads_decode_at_once(codec: str) -> None:
    pictures = [shaded(40, 40, seed) for seed in range(8)]
    data = [encode(pixels) for pixels in pictures for encode in (encode_png, encode_webp)]
    with ThreadPoolExecutor(4) as pool:
        for k, pixels in enumerate(pool.map(decode, data * 8)):
            np.testing.assert_array_equal(pixels, pictures[k % len(data) // 2])


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_nothing_is_imported_before_it_is_needed() -> None:
    script = """
import sys
import ident3d.codecs
print(*(name for name in ("PIL", "imagecodecs", "torch", "torchvision") if name in sys.modules))
"""
    assert run(script) == ""


@pytest.mark.parametrize("name", every_codec())
def test_forked_processes_decode(name: str) -> None:
    script = """
import os, sys
import numpy as np
from ident3d.codecs import codec_name, decode, encode_png, encode_webp
pixels = np.arange(30 * 20 * 3, dtype=np.uint8).reshape(30, 20, 3)
data = [encode_png(pixels), encode_webp(pixels)]
right = lambda: all((decode(x) == pixels).all() for x in data)
assert right()
child = os.fork()
if child == 0:
    os._exit(0 if right() else 1)
assert os.waitpid(child, 0)[1] == 0
print(codec_name().split()[0].lower())
"""
    assert run(script, IDENT3D_CODEC=name) == name

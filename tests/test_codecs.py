"""Pictures from bytes: every kind, by every codec, against plain Pillow."""

from __future__ import annotations

import io
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_cases import (
    CHANNELS,
    DAMAGE,
    FORMS,
    METADATA,
    WEBPS,
    by_plain_pillow,
    chunk,
    encoded,
    every_codec,
    opaque,
    random_png,
    shaded,
    with_alpha,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from ident3d.codecs import decode, encode_png, encode_webp, forced_codec

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
    kinds: dict[str, Callable[[], bytes]] = {
        "PNG": lambda: encode_png(pixels),
        "PNG, alpha": lambda: encoded(with_alpha(pixels), "PNG"),
        "PNG, grey": lambda: encoded(pixels, "PNG", "L"),
        "WEBP": lambda: encode_webp(pixels),
        "JPEG": lambda: encoded(pixels, "JPEG"),
    }
    data = kinds[kind]()
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

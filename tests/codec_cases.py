"""Pictures made by hand, byte by byte, and plain Pillow's verdict on them: for the tests of codecs."""

from __future__ import annotations

import importlib.util
import io
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ident3d import codecs
from ident3d.codecs import encode_webp

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
FORMS = [(depth, colour) for colour, depths in DEPTHS.items() for depth in depths]
DAMAGE = (OSError, SyntaxError, ValueError)
HAVE_IMAGECODECS = importlib.util.find_spec("imagecodecs") is not None


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

WEBPS: dict[str, Callable[[NDArray[np.uint8]], bytes]] = {
    "lossless": lambda p: encode_webp(p),
    "lossless, fast": lambda p: encoded(p, "WEBP", lossless=True, method=0),
    "lossless, alpha": lambda p: encoded(with_alpha(p), "WEBP", lossless=True, exact=True),
    "lossless, alpha, not exact": lambda p: encoded(with_alpha(p), "WEBP", lossless=True),
    "lossless, opaque alpha": lambda p: encoded(opaque(p), "WEBP", lossless=True),
    "lossless, metadata": lambda p: encoded(p, "WEBP", lossless=True, exif=b"Exif\0\0MM\0*", icc_profile=b"none"),
    "lossy": lambda p: encoded(p, "WEBP", quality=60),
    "lossy, alpha": lambda p: encoded(with_alpha(p), "WEBP", quality=60),
    "animated": lambda p: encoded(
        p, "WEBP", lossless=True, save_all=True, append_images=[Image.fromarray(~p)], duration=40
    ),
    "animated, alpha": lambda p: encoded(
        with_alpha(p), "WEBP", save_all=True, append_images=[Image.fromarray(with_alpha(~p))], duration=40
    ),
}


def png_with_text(seed: int = 0) -> bytes:
    """As the released generator writes them: RGBA and text."""
    data = encoded(with_alpha(shaded(6, 7, seed)), "PNG")
    return data[:33] + METADATA["sideways"] + METADATA["density"] + chunk(b"tEXt", b"Frame\0001") + data[33:]

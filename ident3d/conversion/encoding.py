"""One picture from one encoding to another without the loss of a pixel, checked on the way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ident3d.codecs import decode, encode_png, encode_webp

__all__ = ["FORMATS", "KEEP", "BadPicture", "Encoded", "Stored", "encode", "stored_format"]

KEEP = "keep"
FORMATS = (KEEP, "png", "webp")

Stored = bytes | NDArray[np.uint8]
"""A picture as its source has it: an encoded one, or pixels (H, W, 3)."""

_ENCODERS = {"png": encode_png, "webp": encode_webp}
_IEND = bytes.fromhex("0000000049454e44ae426082")
_VALUES = np.arange(256, dtype=np.int64)


class BadPicture(ValueError):
    """A picture that cannot be taken over; the text says what is wrong with it."""


@dataclass(frozen=True)
class Encoded:
    """A picture as it is to be stored.

    Attributes:
        data: its bytes.
        sums: of all pixels, per channel, of uint8 values.
        squares: sums of their squares.
    """

    data: bytes
    sums: tuple[int, int, int]
    squares: tuple[int, int, int]


def stored_format(data: bytes | memoryview) -> str:
    """`png` or `webp` by a picture's first bytes, or empty for anything else."""
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    return "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""


def encode(stored: Stored, form: str, resolution: int) -> Encoded:
    """A picture in the format wanted: the very bytes where they are of that format and to be kept, else encoded anew.

    Args:
        stored: the picture.
        form: `png` or `webp`, or `keep-png` or `keep-webp` to keep encoded bytes, which must be of that format.
        resolution: its side in pixels.

    Raises:
        BadPicture: it does not decode, is damaged, of another size, or to be kept and of another format.
    """
    pixels = _pixels(stored, resolution)
    wanted = form.removeprefix("keep-")
    if wanted != form and isinstance(stored, bytes):
        _check_kept(stored, wanted)
        data = stored
    else:
        data = _ENCODERS[wanted](pixels)
        if not np.array_equal(decode(data), pixels):
            raise RuntimeError(f"the {wanted} encoder of this machine's Pillow is not lossless")
    sums, squares = _pixel_sums(pixels)
    return Encoded(data, sums, squares)


def _pixels(stored: Stored, resolution: int) -> NDArray[np.uint8]:
    if isinstance(stored, bytes):
        try:
            pixels = decode(stored)
        except (OSError, SyntaxError, ValueError) as error:
            raise BadPicture(f"the picture does not decode ({error})") from None
    else:
        pixels = stored
    height, width = pixels.shape[:2]
    if (height, width) != (resolution, resolution):
        raise BadPicture(f"the picture is {width} x {height} px, expected {resolution} x {resolution}")
    return pixels


def _check_kept(data: bytes, wanted: str) -> None:
    """Refuse what a reader of shards would refuse of the same bytes."""
    found = stored_format(data)
    if found != wanted:
        raise BadPicture(f"the picture is no {wanted.upper()}, so its bytes cannot be kept; say --format png or webp")
    whole = data.endswith(_IEND) if wanted == "png" else len(data) == int.from_bytes(data[4:8], "little") + 8
    if not whole:
        raise BadPicture("the picture's file goes on past its end")


def _pixel_sums(pixels: NDArray[np.uint8]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Sums of values and of their squares per channel: from the histogram, ten times as fast as from the pixels."""
    counts = np.array(Image.fromarray(pixels).histogram(), np.int64).reshape(3, 256)
    r, g, b = (counts @ _VALUES).tolist()
    r2, g2, b2 = (counts @ _VALUES**2).tolist()
    return (r, g, b), (r2, g2, b2)

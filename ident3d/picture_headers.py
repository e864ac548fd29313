"""What PNG and WebP say of themselves before a pixel is decoded: their size, whether they are whole, and whether every
decoder must decode them alike."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from typing import NamedTuple

__all__ = [
    "CHUNK",
    "CRC",
    "HEADER_SIZE",
    "IDAT_CRC",
    "IHDR",
    "IEND",
    "MAX_PIXELS",
    "PlainPng",
    "SIGNATURE",
    "WebpHeader",
    "check_size",
    "plain_png",
    "webp_header",
]

MAX_PIXELS = 89_478_485
"""Larger pictures are refused before memory is taken for them; where Pillow's own warning begins."""

SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADER_SIZE = 33
"""Signature and IHDR."""

IEND = bytes.fromhex("0000000049454e44ae426082")
IDAT_CRC = zlib.crc32(b"IDAT")
CHUNK = struct.Struct(">I4s")
CRC = struct.Struct(">I")
IHDR = struct.Struct(">IIBBBBB")
_PLAIN_FORMS = {(8, 2, 0, 0, 0): 3, (8, 6, 0, 0, 0): 4}
"""Bit depth, colour type, compression, filter and interlace methods of RGB and RGBA: their channels."""

_SILENT_CHUNKS = {
    b"tEXt": 0,
    b"eXIf": 0,
    b"tIME": 0,
    b"oFFs": 0,
    b"bKGD": 0,
    b"sBIT": 0,
    b"sRGB": 1,
    b"gAMA": 4,
    b"pHYs": 9,
    b"cHRM": 32,
}
"""Chunks for which Pillow neither changes a pixel nor refuses a picture, given so many bytes in them."""

_MAX_INFLATION = 1032
"""Deflate's bound: 258 bytes of two bits."""


class PlainPng(NamedTuple):
    """A PNG of 8-bit RGB or RGBA, not interlaced, whose pixels nothing but its IDAT chunks decides.

    Attributes:
        width: in pixels.
        height: in pixels.
        channels: 3 or 4.
        spans: begin and end of the content of each IDAT chunk; the chunks follow each other.
    """

    width: int
    height: int
    channels: int
    spans: list[tuple[int, int]]


class WebpHeader(NamedTuple):
    """The size of a WebP, and whether it is lossless, without alpha and nothing but the picture."""

    width: int
    height: int
    plain: bool


def check_size(width: int, height: int) -> None:
    """Refuse a picture of more than MAX_PIXELS.

    Raises:
        ValueError: it says that it has more.
    """
    if width * height > MAX_PIXELS:
        raise ValueError(f"the picture says that it has {width} x {height} pixels; {MAX_PIXELS} are the most")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of the content of each chunk of a PNG, to its IEND.

    Raises:
        ValueError: cut short, or a chunk is not what its CRC was made of.
    """
    kind = b""
    position = len(SIGNATURE)
    view = memoryview(data)
    while kind != b"IEND":
        begin = position + 8
        size, kind = CHUNK.unpack_from(data, position) if begin <= len(data) else (0, b"")
        end = begin + size
        if end + 4 > len(data):
            raise ValueError(f"PNG is cut short: it has {len(data)} bytes, its chunk at {position} goes on")
        if zlib.crc32(view[position + 4 : end]) != CRC.unpack_from(data, end)[0]:
            raise ValueError(f"PNG is damaged: wrong CRC of its chunk {kind!r} at byte {position}")
        yield kind, begin, end
        position = end + 4


def plain_png(data: bytes) -> PlainPng | None:
    """What a PNG that any decoder must decode alike says of itself; None for another.

    Raises:
        ValueError: cut short, damaged or too large.
    """
    (first, begin, end), *others = _chunks(data)
    if first != b"IHDR" or end - begin != IHDR.size:
        return None
    width, height, *form = IHDR.unpack_from(data, begin)
    check_size(width, height)
    channels = _PLAIN_FORMS.get(tuple(form))
    if channels is None or width == 0 or height == 0:
        return None
    spans: list[tuple[int, int]] = []
    previous = b""
    for kind, begin, end in others[:-1]:
        if kind == b"IDAT":
            if spans and previous != b"IDAT":
                return None
            spans.append((begin, end))
        elif end - begin < _SILENT_CHUNKS.get(kind, sys.maxsize):
            return None
        previous = kind
    if not spans or others[-1][1:] != (len(data) - 4, len(data) - 4):
        return None
    if height * (1 + width * channels) > _MAX_INFLATION * sum(end - begin for begin, end in spans):
        raise ValueError(f"PNG is cut short: no {len(data)} bytes can hold {width} x {height} pixels")
    return PlainPng(width, height, channels, spans)


def webp_header(data: bytes) -> WebpHeader | None:
    """What a WebP says of itself; None if it is none, or so short that only Pillow need look at it."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    riff, size = (int.from_bytes(data[i : i + 4], "little") for i in (4, 16))
    match data[12:16]:
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            alpha_or_later_version = bits >> 28
            whole = len(data) == riff + 8 == 20 + size + size % 2
            return WebpHeader(
                (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1, plain=whole and not alpha_or_later_version
            )
        case b"VP8 ":
            width, height = (int.from_bytes(data[i : i + 2], "little") & 0x3FFF for i in (26, 28))
            return WebpHeader(width, height, plain=False)
        case b"VP8X":
            width, height = (int.from_bytes(data[i : i + 3], "little") + 1 for i in (24, 27))
            return WebpHeader(width, height, plain=False)
    return None

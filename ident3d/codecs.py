"""Pictures from bytes and to bytes: the fastest codec that is installed, the same pixels and the same verdict from any.

Pillow reads everything. imagecodecs, where it is installed, takes over the two kinds that datasets are made of, where
its pixels cannot differ: PNG of 8-bit RGB or RGBA that is not interlaced, and lossless WebP without alpha. Whatever
one of its codecs refuses goes to Pillow, which has the last word.

Such a PNG is decoded in two steps. libdeflate inflates it, three times as fast as zlib, and checks its Adler-32;
libspng then sees a picture made here of the header and the inflated rows, stored uncompressed, and only undoes the row
filters. That takes a quarter less time than libspng alone, and no codec ever sees metadata: gamma, profiles and text
can neither change a pixel nor make anything print or crash.

Alpha is dropped, as Pillow's `convert("RGB")` drops it; EXIF orientation and colour profiles are not applied.

Imports nothing but numpy until a picture is decoded or encoded: Blender's interpreter has no more than bpy, numpy and
Pillow. Any number of threads may call every function here at once, and all codecs release the GIL while they work.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import Ident3DError, SpecError
from ident3d.picture_headers import (
    CHUNK,
    CRC,
    HEADER_SIZE,
    IDAT_CRC,
    IEND,
    IHDR,
    MAX_PIXELS,
    SIGNATURE,
    PlainPng,
    check_size,
    plain_png,
    webp_header,
)

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CODECS", "MAX_PIXELS", "VARIABLE", "codec_name", "decode", "encode_png", "encode_webp", "forced_codec"]

VARIABLE = "IDENT3D_CODEC"
"""The environment variable that forces a codec; read when the first picture of the process is decoded."""

CODECS = ("imagecodecs", "pillow")
"""What may be forced."""

# Each is one pixel, (1, 2, 3): if imagecodecs does not decode it so, it lacks a part or its functions have changed.
_PNG_PROBE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c494441547801636064620600000e0007c5ec582b0000000049454e44ae426082"
)
_WEBP_PROBE = bytes.fromhex("5249464620000000574542505650384c140000002f00000000075081540820000a9afec78888fe07")


class _Backend(NamedTuple):
    """What decodes here: imagecodecs or None, and which formats it was seen to decode right."""

    imagecodecs: Any
    png: bool
    webp: bool


_backend: _Backend | None = None  # chosen when first needed; threads that choose at the same time choose the same


def decode(data: bytes | memoryview, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """The pixels of an encoded picture: PNG, WebP or whatever else Pillow reads; the first frame of several.

    More is refused than Pillow refuses: a PNG must go on to its IEND, and the CRC of each chunk must be right, so that
    no altered bit passes. WebP has no checksums: of it only what libwebp cannot decode is refused.

    Args:
        data: the picture.
        out: where the pixels go, uint8 of the picture's shape (H, W, 3), C-contiguous; a new array by default. It may
            hold a part of the picture when anything is raised.

    Returns:
        RGB, shape (H, W, 3): `out` where it was given.

    Raises:
        OSError, SyntaxError, ValueError: not a picture, not a whole one, a damaged one, or one of more than MAX_PIXELS;
            an `out` of another shape, type or layout.
        Ident3DError: IDENT3D_CODEC cannot be obeyed.
    """
    data = bytes(data)  # a copy of a view: the traceback of an error must not keep the caller's map from closing
    if out is not None:
        _check_out(out)
    backend = _backend or _choose_once()
    if data.startswith(SIGNATURE):
        return _decode_png(data, out, backend)
    if header := webp_header(data):
        check_size(header.width, header.height)
        if header.plain and backend.webp:
            target = _target(out, header.width, header.height)
            if _webp_into(target, data, backend.imagecodecs):
                return target
    return _by_pillow(data, out)


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG without metadata, so that equal pixels are equal bytes.

    Rows are filtered by Sub or Up, whichever leaves less. Undoing the Paeth filter, which other encoders prefer, takes
    most of the time that decoding takes: these pictures decode twice as fast, in no more bytes.

    Args:
        pixels: RGB, uint8 (H, W, 3).

    Raises:
        ValueError: another shape or type.
    """
    _check_pixels(pixels)
    height, width, _ = pixels.shape
    differences = np.empty((2, height, width, 3), np.uint8)  # to the left, and to the row above, modulo 256
    differences[:, :] = pixels
    differences[0, :, 1:] -= pixels[:, :-1]
    differences[1, 1:] -= pixels[:-1]
    left = np.abs(differences.view(np.int8).astype(np.int16)).sum(axis=(2, 3))
    above = (left[1] < left[0]).astype(np.uint8)
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = 1 + above
    rows[:, 1:] = np.where(above[:, None, None], differences[1], differences[0]).reshape(height, -1)
    packer = zlib.compressobj(6, memLevel=9)
    packed = packer.compress(rows.tobytes()) + packer.flush()
    header = _chunk(b"IHDR", IHDR.pack(width, height, 8, 2, 0, 0, 0))
    return SIGNATURE + header + _chunk(b"IDAT", packed) + IEND


def _chunk(kind: bytes, content: bytes) -> bytes:
    return CHUNK.pack(len(content), kind) + content + CRC.pack(zlib.crc32(content, zlib.crc32(kind)))


def _check_pixels(pixels: NDArray[np.uint8]) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"pixels are {pixels.dtype} of shape {pixels.shape}, expected uint8 of shape (H, W, 3)")


def encode_webp(pixels: NDArray[np.uint8]) -> bytes:
    """A lossless WebP without any metadata, so that equal pixels are equal bytes, given the same libwebp.

    Args:
        pixels: RGB, shape (H, W, 3), no side over 16,383 pixels.

    Raises:
        ValueError: pixels of another type or shape, or too many.
    """
    from PIL import Image

    _check_pixels(pixels)
    buffer = io.BytesIO()
    # 0.70 to 0.75 of the bytes of the smallest PNG at 224 px, in 60 ms. Method 4 takes half the time, but misses 0.75
    # where few samples leave noise; quality 100 wins another 4% for ten times as long.
    Image.fromarray(pixels).save(buffer, "WEBP", lossless=True, exact=True, method=5, quality=90)
    return buffer.getvalue()


def codec_name() -> str:
    """What decodes PNG and WebP here, with its version: "imagecodecs 2026.1.14" or "Pillow 12.0.0".

    Raises:
        SpecError: IDENT3D_CODEC cannot be obeyed.
    """
    import PIL

    backend = _backend or _choose(os.environ.get(VARIABLE))
    pillow = f"Pillow {PIL.__version__}"
    if not (backend.png or backend.webp):
        return pillow
    fast = f"imagecodecs {backend.imagecodecs.__version__}"
    if backend.png and backend.webp:
        return fast
    return f"{fast} (PNG), {pillow} (WebP)" if backend.png else f"{pillow} (PNG), {fast} (WebP)"


@contextmanager
def forced_codec(name: str) -> Iterator[None]:
    """Decode by one codec inside a `with`, in every thread of this process: for tests and benchmarks.

    Args:
        name: "imagecodecs" or "pillow". What imagecodecs might decode to other pixels is Pillow's in any case.

    Raises:
        SpecError: another name, or imagecodecs cannot be imported.
    """
    global _backend
    before = _backend
    _backend = _choose(name)
    try:
        yield
    finally:
        _backend = before


def _choose_once() -> _Backend:
    global _backend
    try:
        _backend = _choose(os.environ.get(VARIABLE))
    except SpecError as error:
        # A SpecError is a ValueError, and callers take those for damaged pictures, which a repair would replace.
        raise Ident3DError(str(error)) from None
    return _backend


def _choose(name: str | None) -> _Backend:
    """The backend of that name; the fastest here for none."""
    if name and name not in CODECS:
        raise SpecError(f"{VARIABLE} is {name!r}, expected {' or '.join(CODECS)}; without it the fastest is taken")
    if name == "pillow":
        return _Backend(None, png=False, webp=False)
    try:
        import imagecodecs
    except Exception as error:  # built for another numpy, it raises whatever its parts come upon
        if name:
            raise SpecError(f"{name} cannot be imported ({error}): pip install 'ident3d[codecs]'") from None
        return _Backend(None, png=False, webp=False)
    pixel = np.zeros((2, 1, 1, 3), np.uint8)
    plain = plain_png(_PNG_PROBE)
    assert plain is not None
    png = _png_into(pixel[0], _PNG_PROBE, plain, imagecodecs) and pixel[0].tolist() == [[[1, 2, 3]]]
    webp = _webp_into(pixel[1], _WEBP_PROBE, imagecodecs) and pixel[1].tolist() == [[[1, 2, 3]]]
    return _Backend(imagecodecs, png, webp)


def _check_out(out: NDArray[np.uint8]) -> None:
    flags = out.flags
    if out.dtype != np.uint8 or out.ndim != 3 or out.shape[2] != 3 or not (flags.c_contiguous and flags.writeable):
        raise ValueError(
            f"out is {out.dtype} of shape {out.shape}, strides {out.strides}, "
            f"{'writable' if flags.writeable else 'read-only'}; expected writable, C-contiguous uint8 of (H, W, 3)"
        )


def _target(out: NDArray[np.uint8] | None, width: int, height: int) -> NDArray[np.uint8]:
    """`out` if it fits the picture, or a new array."""
    if out is None:
        return np.empty((height, width, 3), np.uint8)
    if out.shape != (height, width, 3):
        raise ValueError(f"out has shape {out.shape}, the picture {(height, width, 3)}")
    return out


def _decode_png(data: bytes, out: NDArray[np.uint8] | None, backend: _Backend) -> NDArray[np.uint8]:
    plain = plain_png(data)
    if plain is None:
        return _by_pillow(data, out)
    target = _target(out, plain.width, plain.height)
    if backend.png and _png_into(target, data, plain, backend.imagecodecs):
        return target
    # Pillow spends more on a dozen text chunks than on the pixels of 64 x 64.
    bare = b"".join((data[:HEADER_SIZE], data[plain.spans[0][0] - 8 : plain.spans[-1][1] + 4], IEND))
    return _by_pillow(bare, target)


def _png_into(target: NDArray[np.uint8], data: bytes, plain: PlainPng, codecs: Any) -> bool:
    """Decode by imagecodecs; False if it cannot, the target then holds anything."""
    width, height, channels, spans = plain
    size = height * (1 + width * channels)
    packed = b"".join([data[begin:end] for begin, end in spans])
    try:
        rows = codecs.deflate_decode(packed, out=size)
        if len(rows) != size:
            return False
        stored = codecs.deflate_encode(rows, level=0)
        crc = CRC.pack(codecs.deflate_crc32(stored, IDAT_CRC))
        picture = b"".join((data[:HEADER_SIZE], CHUNK.pack(len(stored), b"IDAT"), stored, crc, IEND))
        if channels == 3:
            codecs.spng_decode(picture, out=target)
        else:
            pixels = codecs.spng_decode(picture)
            for channel in range(3):  # a third of the time that one copy of [..., :3] takes
                target[..., channel] = pixels[..., channel]
    except Exception:  # of the codecs' many classes; Pillow tells what is wrong
        return False
    return True


def _webp_into(target: NDArray[np.uint8], data: bytes, codecs: Any) -> bool:
    """Decode by imagecodecs; False if it cannot, the target then holds anything."""
    try:
        codecs.webp_decode(data, out=target)
    except Exception:  # Pillow tells what is wrong
        return False
    return True


def _by_pillow(data: bytes, out: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    from PIL.Image import open as open_picture

    try:
        with open_picture(io.BytesIO(data)) as picture:
            check_size(*picture.size)
            picture.load()
            # RGBA is packed as RGB below; convert() would write it once more.
            rgb = picture if picture.mode in ("RGB", "RGBA") else _to_rgb(picture)
            packed = rgb.tobytes("raw", "RGB")
    except (OSError, SyntaxError, ValueError, MemoryError):
        raise
    except Exception as error:  # DecompressionBombError, EOFError, zlib.error: callers know the three above
        raise ValueError(f"{type(error).__name__}: {error}") from error
    target = _target(out, *rgb.size)
    target[...] = np.frombuffer(packed, np.uint8).reshape(target.shape)
    return target


def _to_rgb(picture: Image) -> Image:
    picture.info.pop("transparency", None)  # about which convert() would warn; it does not change a pixel
    return picture.convert("RGB")

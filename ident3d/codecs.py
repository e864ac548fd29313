"""Pictures to bytes and back."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def decode(data: bytes, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as picture:
        found = np.array(picture if picture.mode == "RGB" else picture.convert("RGB"))
    if out is not None:
        if out.shape != found.shape:
            raise ValueError("shape")
        out[...] = found
        return out
    return found


def _encode(pixels: Any, kind: str, **options: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def encode_png(pixels: Any) -> bytes:
    return _encode(pixels, "PNG")


def encode_webp(pixels: Any) -> bytes:
    return _encode(pixels, "WEBP", lossless=True, exact=True, quality=80, method=4)

"""Bytes of the same pictures as PNG and as lossless WebP: python benchmarks/bytes_on_disk.py DATASET [--samples N].

PNG at its best compression is Pillow's with `optimize=True, compress_level=9`. Every WebP is decoded and compared.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
from PIL import Image

from ident3d import Ident3D
from ident3d.codecs import decode, encode_png, encode_webp


def best_png(pixels: np.ndarray) -> bytes:  # type: ignore[type-arg]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True, compress_level=9)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--samples", type=int, default=96)
    args = parser.parse_args()
    data = Ident3D(args.dataset)
    sizes = {"as stored": 0, "PNG at its best": 0, "PNG of ident3d": 0, "lossless WebP": 0}
    count = min(args.samples, len(data))
    for index in range(count):
        pixels = data.pixels(index)
        webp = encode_webp(pixels)
        assert np.array_equal(decode(webp), pixels)
        found = (len(data.read(index)), len(best_png(pixels)), len(encode_png(pixels)), len(webp))
        sizes = {name: total + size for (name, total), size in zip(sizes.items(), found, strict=True)}
    print(f"{data.name}, {count} pictures of {data.resolution} px, {data.origin}")
    for name, total in sizes.items():
        print(f"{name:16} {total / count:9,.0f} bytes a picture, {total / sizes['PNG at its best']:.3f}")


if __name__ == "__main__":
    main()

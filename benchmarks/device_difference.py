"""How far the pictures of two devices differ: python benchmarks/device_difference.py [--devices cpu optix cuda].

The same samples (latents and Cycles seeds) are rendered by each device; each is compared with the first: PSNR of each
picture (median and least), the largest difference of a pixel in 8-bit steps, the share of pixels that differ at all and
by more than 4, and pictures/s of either. The same is told of the first device against itself, with other Cycles
seeds: what noise alone makes. Exit status 2 where a device is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d import RenderError, render_latents
from ident3d.render.draws import draw_latents

Pictures = NDArray[np.uint8]


def compare(one: Pictures, other: Pictures) -> dict[str, float]:
    """In numbers; pictures uint8 (n, H, W, 3)."""
    gap = np.abs(one.astype(np.int16) - other)
    square = (gap.astype(np.float64) ** 2).mean(axis=(1, 2, 3))
    psnr = 10 * np.log10(255**2 / np.maximum(square, 1e-12))
    return {
        "psnr_median": float(np.median(psnr)),
        "psnr_least": float(psnr.min()),
        "largest": int(gap.max()),
        "differ": float((gap.max(axis=-1) > 0).mean()),
        "differ_by_more_than_4": float((gap.max(axis=-1) > 4).mean()),
    }


def main() -> None:
    """Render on each device, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="+", default=["cpu", "optix", "cuda"])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--resolution", type=int, default=224)
    parser.add_argument("--quality", default="standard")
    parser.add_argument("--out", type=Path, help="a .json to write")
    args = parser.parse_args()
    u = draw_latents(0, "train", 0, args.samples, {})
    options: dict[str, Any] = {"resolution": args.resolution, "quality": args.quality}
    found: dict[str, Any] = {}
    first: Pictures | None = None
    for device in args.devices:
        try:
            render_latents(u[:1], device=device, **options)  # kernels are compiled once a machine
            began = time.perf_counter()
            pictures = render_latents(u, device=device, **options)
        except RenderError as error:
            print(f"{device}: {error}")
            found[device] = {"error": str(error)}
            continue
        found[device] = {"pictures_per_s": args.samples / (time.perf_counter() - began)}
        if first is None:
            first = pictures
            noise = compare(first, render_latents(u, device=device, seed=10**6, **options))
            found[f"{device}, other Cycles seeds"] = noise
        else:
            found[device] |= compare(first, pictures)
    print(json.dumps(found, indent=2))
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(2 if any("error" in value for value in found.values()) else 0)


if __name__ == "__main__":
    main()

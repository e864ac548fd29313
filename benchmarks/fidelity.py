"""PSNR of `3dident-v1` against pictures of the released generator, at 224 px.

python benchmarks/fidelity.py REFERENCE [--quality standard paper] [--seeds 3]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from ident3d import render_latents


def psnr(a: np.ndarray, b: np.ndarray) -> float:  # type: ignore[type-arg]
    """Peak signal-to-noise ratio of 8-bit pictures over all channels, in dB."""
    return float(10 * np.log10(255**2 / np.mean((a.astype(float) - b.astype(float)) ** 2)))


def main() -> None:
    """Print mean and worst PSNR for each quality and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--quality", nargs="+", default=["draft", "standard"])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    raw = np.load(args.reference / "raw_latents.npy")
    known = [np.array(Image.open(args.reference / f"{i:04d}.png").convert("RGB")) for i in range(len(raw))]
    for quality in args.quality:
        for seed in range(args.seeds):
            pictures = render_latents((raw + 1) / 2, scene="3dident-v1", quality=quality, seed=1000 * seed)
            values = [psnr(a, b) for a, b in zip(pictures, known, strict=True)]
            each = " ".join(f"{v:.1f}" for v in values)
            print(
                f"{quality:9} seed {1000 * seed:4}: mean {np.mean(values):.2f} dB, worst {min(values):.2f} dB ({each})"
            )


if __name__ == "__main__":
    main()

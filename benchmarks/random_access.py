"""`Ident3D.__getitem__` beside decoding the same bytes alone: python benchmarks/random_access.py DATASET.

Both decode by the same function into the same kind of tensor. Blocks of the two alternate, and the ratio is taken block
by block, over the same samples in the same random order.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from ident3d import Ident3D
from ident3d.codecs import decode
from ident3d.datasets.serving import to_tensor


def main() -> None:
    """Print microseconds a sample of both, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--split", default="train")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=31)
    args = parser.parse_args()
    data = Ident3D(args.dataset, split=args.split)
    order = np.random.default_rng(0).integers(len(data), size=args.samples).tolist()
    encoded = [data._reader.picture(i) for i in order]
    item, alone = [], []
    for _ in range(args.blocks):
        began = time.perf_counter()
        for i in order:
            data[i]
        middle = time.perf_counter()
        for picture in encoded:
            to_tensor(decode(picture))
        alone.append((time.perf_counter() - middle) / len(order))
        item.append((middle - began) / len(order))
    ratios = [a / b for a, b in zip(item, alone, strict=True)]
    print(
        f"{data.manifest.resolution} px: __getitem__ {1e6 * median(item):.0f} us, "
        f"decoding alone {1e6 * median(alone):.0f} us, ratio {median(ratios):.3f} "
        f"(from {min(ratios):.3f} to {max(ratios):.3f} over {args.blocks} blocks)"
    )


if __name__ == "__main__":
    main()

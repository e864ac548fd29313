"""A DataLoader of pairs beside the same loader without pairing: python benchmarks/pair_loader.py DATASET.

The dataset's pictures stand for 250,000 samples with latents of their own, so that matching searches as many as the
published data have, while pictures are read and decoded as always. Epochs of the two loaders alternate.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, RandomSampler

from ident3d import Ident3D, pair_loader


class Many(Dataset[tuple[Any, Any]]):
    """So many samples; sample i has the picture of i modulo the dataset's length."""

    def __init__(self, data: Ident3D, samples: int) -> None:
        self.data = data
        self.latents = np.random.default_rng(0).random((samples, 10), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.data[index % len(self.data)][0], self.latents[index]


def pictures_a_second(loader: DataLoader[Any], pictures: int) -> float:
    """Of one epoch, from its first batch on: starting the workers is not what is compared."""
    batches = iter(loader)
    next(batches)
    began = time.perf_counter()
    count = sum(1 for _ in batches)
    return count * pictures / (time.perf_counter() - began)


def main() -> None:
    """Print pictures a second of both, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--samples", type=int, default=250_000)
    parser.add_argument("--batch-size", type=int, default=256, help="pairs, so twice as many pictures")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--match", default="exact")
    args = parser.parse_args()
    data = Many(Ident3D(args.dataset), args.samples)
    pairs = pair_loader(
        data,
        "normal(scale=0.05)",
        batch_size=args.batch_size,
        batches=args.batches,
        match=args.match,
        num_workers=args.workers,
    )
    both = 2 * args.batch_size
    order = RandomSampler(data, replacement=True, num_samples=args.batches * both)
    plain: DataLoader[Any] = DataLoader(data, batch_size=both, sampler=order, num_workers=args.workers)
    with_pairs, without = [], []
    for _ in range(args.rounds):
        without.append(pictures_a_second(plain, both))
        with_pairs.append(pictures_a_second(pairs, both))
    ratios = [a / b for a, b in zip(with_pairs, without, strict=True)]
    print(
        f"{data.data.manifest.resolution} px, {args.workers} workers, {args.match}: pairs {median(with_pairs):,.0f} "
        f"pictures/s, plain {median(without):,.0f}, ratio {median(ratios):.3f} "
        f"(from {min(ratios):.3f} to {max(ratios):.3f} over {args.rounds} rounds)"
    )


if __name__ == "__main__":
    main()

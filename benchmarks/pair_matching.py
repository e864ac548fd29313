"""Matching positive pairs: python benchmarks/pair_matching.py.

250,000 uniform latents in ten dimensions, Normal(0.05), one thread. The usual way (draw one z~, search one by FAISS's
IndexFlatL2) beside `PairSampler`, in blocks that alternate; recall against IndexFlatL2 on 4,096 queries.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # read when numpy and FAISS are imported

import faiss  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from ident3d import PairSampler  # noqa: E402
from ident3d.datasets.pairs import QUERIES  # noqa: E402

CHECKED = 4096


def resident_mb() -> float:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def one_by_one(sampler: PairSampler, flat: faiss.IndexFlatL2, count: int, neighbours: int) -> float:
    """Pairs a second of the usual way: one neighbour, or two so that the anchor can be left out."""
    generator = torch.Generator().manual_seed(0)
    began = time.perf_counter()
    for _ in range(count):
        anchor = int(torch.randint(len(sampler.latents), (1,), generator=generator))
        z = torch.from_numpy(sampler.latents[anchor : anchor + 1])
        wanted = sampler.law.around(z, generator=generator, check=False)
        flat.search(wanted.numpy(), neighbours)
    return count / (time.perf_counter() - began)


def in_batches(sampler: PairSampler, start: int, count: int) -> float:
    """Pairs a second of the sampler, as a DataLoader asks for them. `count` batches are what it matches at once."""
    sampler.batch(start)  # the first of a series comes alone
    began = time.perf_counter()
    for number in range(start + 1, start + 1 + count):
        sampler.batch(number)
    return count * sampler.batch_size / (time.perf_counter() - began)


def recall(sampler: PairSampler, flat: faiss.IndexFlatL2) -> float:
    """Share of positives that brute force finds as well."""
    matches = sampler.match_batches(range(CHECKED // sampler.batch_size))
    _, found = flat.search(matches.wanted, 2)
    best = np.where(found[:, 0] == matches.anchors, found[:, 1], found[:, 0])
    return float((best == matches.positives).mean())


def main() -> None:
    """Print the index's cost, pairs a second, their ratio and recall."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=250_000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    latents = np.random.default_rng(0).random((args.samples, 10), dtype=np.float32)
    flat = faiss.IndexFlatL2(10)
    flat.add(latents)
    with tempfile.TemporaryDirectory() as cache:

        def make(match: str) -> tuple[PairSampler, str]:
            before = resident_mb()
            seconds = []
            for _ in range(2):
                began = time.perf_counter()
                sampler = PairSampler(
                    latents,
                    "normal(scale=0.05)",
                    batch_size=args.batch_size,
                    match=match,
                    cache=cache,
                    batches=10**6,  # so that no epoch ends within a block
                )
                sampler.nearest()
                seconds.append(time.perf_counter() - began)
            return sampler, (
                f"ready in {seconds[0]:.2f} s, again in {seconds[1]:.2f} s, {resident_mb() - before:.0f} MB at most"
            )

        samplers = {match: make(match) for match in ("exact", "hnsw", "ivf")}
    batches = QUERIES // args.batch_size
    rates: dict[str, list[float]] = {name: [] for name in samplers}
    single: dict[int, list[float]] = {1: [], 2: []}
    for r in range(args.rounds):
        for neighbours, values in single.items():
            values.append(one_by_one(samplers["exact"][0], flat, 500, neighbours))
        for match, (sampler, _) in samplers.items():
            rates[match].append(in_batches(sampler, 2 * r * batches, batches))
    print(f"{args.samples:,} x 10, one thread, medians of {args.rounds} alternating blocks")
    for neighbours, values in single.items():
        print(f"one by one, search {neighbours}: {median(values):,.0f} pairs/s")
    for match, values in rates.items():
        times = " and ".join(
            f"{median([v / one for v, one in zip(values, base, strict=True)]):.0f}" for base in single.values()
        )
        sampler, cost = samplers[match]
        print(
            f"{match:5} {median(values):9,.0f} pairs/s, {times} times one by one, "
            f"recall@1 {recall(sampler, flat):.4f}; {cost}"
        )


if __name__ == "__main__":
    main()

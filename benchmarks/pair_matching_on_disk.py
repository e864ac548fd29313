"""Matching positive pairs of a split too large for memory: python benchmarks/pair_matching_on_disk.py.

100 million uniform latents in ten dimensions, Normal(0.05), from a mapped .npy of 4 GB, which is made where there is
none; the index takes 5.2 GB more. Build and open times, memory that is no page of a file, milliseconds a batch as
`PairSampler` hands them out, and the share of matches that brute force over all samples finds as well.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d import PairSampler
from ident3d.datasets import matching
from ident3d.files import read_npy

DIM, PIECE = 10, 2**20


class Peak:
    """The largest anonymous resident memory of this process within a `with` block, in MB; looked at every 20 ms."""

    def __enter__(self) -> Peak:
        self.mb, self._stop = anonymous_mb(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.mb = max(self.mb, anonymous_mb())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


def anonymous_mb() -> float:
    """Resident memory that is no page of a file."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3


def draw(path: Path, samples: int) -> None:
    """Write uniform latents to a .npy."""
    rng = np.random.default_rng(0)
    made = np.lib.format.open_memmap(path, "w+", np.float32, (samples, DIM))  # type: ignore[no-untyped-call]
    for start in range(0, samples, PIECE):
        made[start : start + PIECE] = rng.random((min(PIECE, samples - start), DIM), np.float32)
    made.flush()


def brute_force(latents: NDArray[np.float32], wanted: NDArray[np.float32], anchors: NDArray[np.int64]) -> NDArray[Any]:
    """The nearest sample of each z~ that is not its anchor, in float64 where float32 leaves a doubt."""
    best, found = np.full(len(wanted), np.inf), np.full(len(wanted), -1, np.int64)
    for start in range(0, len(latents), PIECE):
        piece = latents[start : start + PIECE]
        for i, query in enumerate(wanted):
            rough = piece - query
            near = np.einsum("ij,ij->i", rough, rough)
            own = anchors[i] - start
            if 0 <= own < len(piece):
                near[own] = np.inf
            some = np.flatnonzero(near <= min(near.min(), best[i]) * (1 + 1e-5))
            exact = ((piece[some].astype(np.float64) - query) ** 2).sum(axis=1)
            if len(some) and exact.min() < best[i]:
                best[i], found[i] = exact.min(), start + some[exact.argmin()]
    return found


def sampler_of(latents: NDArray[np.float32], folder: Path, batch_size: int, name: str) -> PairSampler:
    """Pairs of a split whose latents' checksum is at hand, as a dataset's is."""
    data = SimpleNamespace(latents=latents, root=folder, split="train", entry=SimpleNamespace(latents_sha256=name))
    return PairSampler(data, "normal(scale=0.05)", batch_size=batch_size, batches=10**9)


def main() -> None:
    """Print what building, opening and searching take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, default=Path("pair_matching_on_disk"))
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--checked", type=int, default=64)
    args = parser.parse_args()
    matching.ON_DISK = min(matching.ON_DISK, args.samples)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"latents_{args.samples}.npy"
    if not path.exists():
        draw(path, args.samples)
    latents = read_npy(path, mapped=True)
    print(f"{args.samples:,} x {DIM}, {latents.nbytes / 1e9:.2f} GB")
    for turn in ("ready in", "again in"):
        with Peak() as peak:
            began = time.perf_counter()
            sampler = sampler_of(latents, args.folder, args.batch_size, path.name)
            checked = time.perf_counter()
            sampler.nearest()
            opened = time.perf_counter()
        print(
            f"latents checked in {checked - began:.2f} s; index {turn} {opened - checked:.3f} s; "
            f"{peak.mb:.0f} MB at most"
        )
    began = time.perf_counter()
    sampler.batch(0)  # the first of a series comes alone
    print(f"first batch in {time.perf_counter() - began:.2f} s")
    number = 1
    for _ in range(args.blocks):
        with Peak() as peak:
            began, busy = time.perf_counter(), time.process_time()
            sampler.batch(number)
            count = len(sampler._block[1])
            for k in range(number, number + count):
                sampler.batch(k)
            seconds, busy = time.perf_counter() - began, time.process_time() - busy
        number += count
        print(
            f"block of {count * args.batch_size:,} pairs in {seconds:.2f} s, {1e3 * seconds / count:.1f} ms a batch of "
            f"{args.batch_size}; {busy:.2f} s of processor time, {peak.mb:.0f} MB at most"
        )
    matches = sampler.match_batches(range(number, number - (-args.checked // args.batch_size)))
    some = slice(0, args.checked)
    truth = brute_force(latents, matches.wanted[some], matches.anchors[some])
    print(f"{(truth == matches.positives[some]).mean():.4f} of {len(truth)} matches are those of brute force")


if __name__ == "__main__":
    main()

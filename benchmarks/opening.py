"""What opening a large dataset costs: python benchmarks/opening.py [DATASET].

Without DATASET, one of 250,000 samples in 250 shards is made of one picture of 8 px, which takes a minute. It is opened
in fresh processes, so that nothing is warm but the kernel's cache of files. Importing torch is told apart: it takes
more time and memory than all else. What a DataLoader's worker has of its own, pages that no other process maps, is
compared with what one has that serves an empty dataset, under both ways to start them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from fabricated import fabricate

from ident3d.codecs import encode_png

OPEN = """
import json, sys, time
from opening import resident_mb
import torch
import torch.utils.data
imported = resident_mb()
from ident3d import Ident3D
began = time.perf_counter()
data = Ident3D(sys.argv[1])
seconds = time.perf_counter() - began
opened = resident_mb()
data[len(data) - 1]
print(json.dumps({"torch": imported, "opened": opened, "read": resident_mb(), "seconds": seconds}))
"""


class Nothing:
    """As long as a dataset, and holds nothing."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 0


def resident_mb(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def own_mb(pid: int) -> float:
    """Resident memory of a process that no other maps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def worker_mb(data: Any, start: str, samples: int) -> float:
    """What the only worker of a DataLoader has of its own, when it has served so many samples in random order."""
    from torch.utils.data import DataLoader, RandomSampler

    order = RandomSampler(data, num_samples=samples)
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": start, "persistent_workers": True}
    loader: DataLoader[Any] = DataLoader(data, batch_size=100, sampler=order, **options)
    batches = iter(loader)
    for _ in batches:
        pass
    return own_mb(batches._workers[0].pid)  # type: ignore[attr-defined]


def main() -> None:
    """Print time and memory of opening, and the memory of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", nargs="?", type=Path)
    parser.add_argument("--samples", type=int, default=250_000)
    parser.add_argument("--shards", type=int, default=250)
    parser.add_argument("--read", type=int, default=20_000, help="samples that each worker serves")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = args.dataset
        if root is None:
            pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
            began = time.perf_counter()
            root = fabricate(Path(folder) / "data", [encode_png(pixels)], args.samples, args.samples // args.shards, 8)
            print(f"made {args.samples:,} samples in {args.shards} shards in {time.perf_counter() - began:.0f} s")
        show_opening(root, args.rounds)
        show_workers(root, args.read)


def show_opening(root: Path, rounds: int) -> None:
    """Print what opening takes, in fresh processes."""
    command = [sys.executable, "-c", OPEN, str(root)]
    here = Path(__file__).parent
    found = [
        json.loads(subprocess.run(command, cwd=here, check=True, capture_output=True).stdout) for _ in range(rounds)
    ]
    middle = {name: median(run[name] for run in found) for name in found[0]}
    print(
        f"opening: {middle['seconds']:.3f} s; resident {middle['opened']:.0f} MB, of which importing torch "
        f"{middle['torch']:.0f} MB, ident3d and the open dataset {middle['opened'] - middle['torch']:.1f} MB; "
        f"{middle['read'] - middle['torch']:.1f} MB when a picture has been read"
    )


def show_workers(root: Path, samples: int) -> None:
    """Print what a worker has of its own."""
    from ident3d import Ident3D

    data = Ident3D(root)
    for start in ("fork", "spawn"):
        with_data, without = (worker_mb(served, start, samples) for served in (data, Nothing(len(data))))
        print(
            f"worker by {start}: {with_data:.1f} MB of its own after {samples:,} samples; one of an empty dataset "
            f"{without:.1f} MB, so {with_data - without:.1f} MB are the dataset's"
        )


if __name__ == "__main__":
    main()

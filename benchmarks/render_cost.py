"""What a picture costs: seconds, bytes and memory, by resolution and by Cycles samples; and what more workers bring.

python benchmarks/render_cost.py [--resolutions 32 64 128 224 448] [--samples 2 8 64 512] [--pictures 8] [--out FILE]

One worker of one thread, pinned to one core, renders the scene 3dident for every resolution (8 samples, as `standard`)
and for every number of samples (224 px); the first picture of a worker, which builds the scene and loads the denoiser,
is told apart as its start. Then as many workers as there are cores render together, each pinned to its own. The line
that is fitted, seconds = a + b pixels + c pixels samples, is what docs/scaling.md computes with.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ident3d.codecs import encode_png
from ident3d.render.draws import draw_latents
from ident3d.render.process import WorkerProcess
from ident3d.render.quality import quality
from ident3d.render.worker import Setup
from ident3d.scenes import load_scene


@dataclass
class Cost:
    """One setting's: seconds to the first picture, seconds a picture after it (median), bytes (mean), memory."""

    resolution: int
    samples: int
    start: float
    seconds: float
    bytes: int
    memory_mb: int


class Pinned:
    """A worker of one thread on one core, and the array that it renders into."""

    def __init__(self, resolution: int, samples: int, core: int, folder: Path) -> None:
        scene = load_scene("3dident")
        settings = dataclasses.replace(quality("standard"), samples=samples)
        self.out = folder / f"{resolution}-{samples}-{core}.npy"
        shape = (1, resolution, resolution, 3)
        np.lib.format.open_memmap(self.out, mode="w+", dtype=np.uint8, shape=shape).flush()  # type: ignore[no-untyped-call]
        setup = Setup(scene.text, str(scene.mesh_path), asdict(settings), resolution, "cpu", threads=1)
        began, before = time.perf_counter(), os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})  # inherited by the process started now
        try:
            self.worker = WorkerProcess(sys.executable, setup, folder / "log")
        finally:
            os.sched_setaffinity(0, before)
        self.render(0)
        self.start = time.perf_counter() - began

    def render(self, index: int) -> float:
        """Render one sample; its seconds."""
        latent = draw_latents(0, "train", index, index + 1, {})[0].tolist()
        began = time.perf_counter()
        self.worker.send({"picture": {"out": str(self.out), "index": 0, "latent": latent, "seed": index}})
        for _ in self.worker.until("picture"):
            pass
        return time.perf_counter() - began

    def memory_mb(self) -> int:
        """Resident memory."""
        lines = Path(f"/proc/{self.worker.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("VmRSS"))


def cost(resolution: int, samples: int, pictures: int, folder: Path) -> Cost:
    """Measure one setting."""
    pinned = Pinned(resolution, samples, min(os.sched_getaffinity(0)), folder)
    seconds, sizes = [], []
    for index in range(1, pictures + 1):
        seconds.append(pinned.render(index))
        sizes.append(len(encode_png(np.array(np.load(pinned.out)[0]))))
    found = Cost(resolution, samples, pinned.start, median(seconds), round(float(np.mean(sizes))), pinned.memory_mb())
    pinned.worker.kill()
    print(
        f"{resolution:5} px {samples:4} samples: {found.seconds:8.3f} s a picture, {found.bytes:7} bytes, "
        f"{found.memory_mb:5} MB, start {found.start:.1f} s",
        flush=True,
    )
    return found


def together(pictures: int, folder: Path) -> dict[str, float]:
    """Pictures/s of 1, 2, 4, ... workers on as many cores, over those of one; in turn, median of three rounds."""
    cores = sorted(os.sched_getaffinity(0))
    crew = [Pinned(224, 8, core, folder) for core in cores]
    counts = [2**k for k in range(len(cores).bit_length()) if 2**k <= len(cores)]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(3):
        for count in counts:
            threads = [
                threading.Thread(target=lambda p: [p.render(i) for i in range(1, pictures + 1)], args=(p,))
                for p in crew[:count]
            ]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rates[count].append(count * pictures / (time.perf_counter() - began))
    for pinned in crew:
        pinned.worker.kill()
    ratios = {str(c): median(a / b for a, b in zip(rates[c], rates[1], strict=True)) for c in counts}
    for count, ratio in ratios.items():
        print(f"{count} workers on {count} cores: {ratio:.2f} times the pictures/s of one", flush=True)
    return ratios


def fit(costs: list[Cost]) -> dict[str, float]:
    """The line seconds = a + b pixels + c pixels samples, fitted by relative errors."""
    pixels = np.array([c.resolution**2 for c in costs], float)
    work = pixels * [c.samples for c in costs]
    seconds = np.array([c.seconds for c in costs])
    columns = np.stack([np.ones(len(costs)), pixels, work], axis=1) / seconds[:, None]
    (a, b, c), *_ = np.linalg.lstsq(columns, np.ones(len(costs)), rcond=None)
    worst = float(np.abs(columns @ [a, b, c] - 1).max())
    print(f"seconds = {a:.4f} + {b:.3g} pixels + {c:.3g} pixels samples; within {worst:.0%} of each", flush=True)
    return {"a": float(a), "b": float(b), "c": float(c), "worst": worst}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[32, 64, 128, 224, 448])
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 8, 64, 512])
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a .json to write")
    args = parser.parse_args()
    settings = dict.fromkeys([*((r, 8) for r in args.resolutions), *((224, s) for s in args.samples)])
    with tempfile.TemporaryDirectory() as name:
        costs = [cost(r, s, args.pictures if s <= 64 else 2, Path(name)) for r, s in settings]
        found = {"costs": [asdict(c) for c in costs], "fit": fit(costs), "workers": together(args.pictures, Path(name))}
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

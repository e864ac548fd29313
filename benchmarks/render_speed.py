"""Pictures/s of the qualities beside each other, and of two workers beside one, in one run.

python benchmarks/render_speed.py [--resolution 224] [--rounds 3] [--pictures 12] [--paper-pictures 2]

Qualities: one worker of one thread, pinned to one core, in turn: `paper`, then `standard` and `draft`, and again; the
first picture of a worker (which builds the scene and loads the denoiser) is not counted, as in a long render.
Workers: the same shards rendered by one worker and by two, each pinned to a core of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np

from ident3d.render.draws import draw_latents
from ident3d.render.process import WorkerProcess
from ident3d.render.quality import quality
from ident3d.render.worker import Setup
from ident3d.scenes import load_scene


class Pinned:
    """A worker of one thread on one core, and the array that it renders into."""

    def __init__(self, name: str, resolution: int, core: int, folder: Path) -> None:
        scene = load_scene("3dident")
        self.out = folder / f"{name}-{core}.npy"
        shape = (1, resolution, resolution, 3)
        np.lib.format.open_memmap(self.out, mode="w+", dtype=np.uint8, shape=shape).flush()  # type: ignore[no-untyped-call]
        setup = Setup(scene.text, str(scene.mesh_path), asdict(quality(name)), resolution, "cpu", threads=1)
        # Affinity is inherited by the process started now.
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            self.worker = WorkerProcess(sys.executable, setup, folder / "log")
        finally:
            os.sched_setaffinity(0, before)
        self.render(0, 1)

    def render(self, start: int, stop: int) -> float:
        """Render samples start to stop - 1; the seconds a picture."""
        latents = draw_latents(0, "train", start, stop, {})
        began = time.perf_counter()
        for i, u in enumerate(latents):
            self.worker.send({"picture": {"out": str(self.out), "index": 0, "latent": u.tolist(), "seed": start + i}})
            for _ in self.worker.until("picture"):
                pass
        return (time.perf_counter() - began) / len(latents)


def compare_qualities(args: argparse.Namespace, folder: Path) -> None:
    """Seconds a picture of each quality, in turn, and the ratios to paper of each round."""
    core = min(os.sched_getaffinity(0))
    workers = {name: Pinned(name, args.resolution, core, folder) for name in ("paper", "standard", "draft")}
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for r in range(args.rounds):
        for name, worker in workers.items():
            count = args.paper_pictures if name == "paper" else args.pictures
            seconds[name].append(worker.render(1 + r * count, 1 + (r + 1) * count))
    for name, worker in workers.items():
        worker.worker.kill()
        ratios = [p / s for p, s in zip(seconds["paper"], seconds[name], strict=True)]
        each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        print(f"{name:9} {median(seconds[name]):8.3f} s a picture; {median(ratios):6.1f} times paper ({each})")


def compare_workers(args: argparse.Namespace, folder: Path) -> None:
    """Pictures/s of two pinned workers together, against one of them alone, in turn."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("two workers: this machine has one core")
        return
    pair = [Pinned("standard", args.resolution, core, folder) for core in cores]
    ratios = []
    for r in range(args.rounds):
        alone = 1 / pair[r % 2].render(1, 1 + args.pictures)
        began = time.perf_counter()
        threads = [threading.Thread(target=w.render, args=(1, 1 + args.pictures)) for w in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        both = 2 * args.pictures / (time.perf_counter() - began)
        ratios.append(both / alone)
    for worker in pair:
        worker.worker.kill()
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"two workers, one core each: {median(ratios):.2f} times the pictures/s of one ({each})")


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolution", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=12)
    parser.add_argument("--paper-pictures", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare_workers(args, Path(folder))
        compare_qualities(args, Path(folder))


if __name__ == "__main__":
    main()

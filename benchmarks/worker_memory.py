"""A worker's resident size as it renders: python benchmarks/worker_memory.py [--pictures 1000] [--resolution 64]."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ident3d.render.draws import draw_latents
from ident3d.render.plan import ShardJob
from ident3d.render.process import WorkerProcess
from ident3d.render.quality import quality
from ident3d.render.worker import Setup
from ident3d.scenes import load_scene


def resident_mib(pid: int) -> float:
    """The resident size of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no resident size")


def main() -> None:
    """Render shards of 100 and print the size after each hundred, and its growth from picture 100 on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--quality", default="standard")
    args = parser.parse_args()
    scene = load_scene("3dident")
    setup = Setup(scene.text, str(scene.mesh_path), asdict(quality(args.quality)), args.resolution, "cpu", threads=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "latents.npy", draw_latents(0, "train", 0, args.pictures, {}))
        worker = WorkerProcess(sys.executable, setup, folder / "log")
        sizes = {}
        for shard in range(args.pictures // 100):
            path, sidecar = str(folder / f"{shard}.tar"), str(folder / f"{shard}.json")
            latents = str(folder / "latents.npy")
            job = ShardJob(shard, path, 100 * shard, 100 * (shard + 1), latents, "train", 0, sidecar)
            worker.send({"shard": asdict(job)})
            for _ in worker.until("shard"):
                pass
            sizes[100 * (shard + 1)] = resident_mib(worker.pid)
            print(f"picture {100 * (shard + 1):5}: {sizes[100 * (shard + 1)]:.1f} MiB", flush=True)
        worker.kill()
    first, last = sizes[100], sizes[max(sizes)]
    print(f"growth from picture 100 to picture {max(sizes)}: {100 * (last / first - 1):+.2f}%")


if __name__ == "__main__":
    main()

"""A long render, watched: python benchmarks/soak.py [--pictures 5000] [--recycle 2000] [--out FOLDER].

`ident3d render` of so many pictures of 64 px runs as a command; once a second its process and its workers are asked for
their resident memory and open files, and the logs for their size. Printed, and with --out kept as soak.json and
soak.png: all of them in the first tenth of the run and in the last, and how much each worker grew in its own life, its
start left out. With --recycle 0 workers live for the whole run.
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

from ident3d.shards.verify import verify_dataset

YOUNG = 5.0
"""Seconds for which a worker is taken to be starting."""


def children(pid: int) -> list[int]:
    """The processes that a process has started, from any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def state(pid: int) -> tuple[float, int]:
    """Resident memory in MB, and the number of open files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    memory = next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS"))
    return memory, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def watch(process: subprocess.Popen[bytes], root: Path) -> list[dict[str, Any]]:
    """What there was to see, once a second, until the process ended."""
    seen: list[dict[str, Any]] = []
    born: dict[int, float] = {}
    began = time.monotonic()
    while process.poll() is None:
        time.sleep(1)
        now = time.monotonic() - began
        try:
            workers = {}
            for pid in children(process.pid):
                if now - born.setdefault(pid, now) >= YOUNG:
                    workers[pid] = state(pid)
            parent = state(process.pid)
        except (OSError, StopIteration):
            continue  # one has ended just now
        logs = sum(p.stat().st_size for p in root.glob(".render/logs/*"))
        seen.append({"seconds": now, "parent": parent, "workers": workers, "logs": logs})
    return seen


def growth(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the first and the last tenth of what was seen."""
    tenth = max(1, len(seen) // 10)
    # The first samples have no worker that is past its start.
    whole = [s for s in seen if s["workers"]]
    if not whole:
        sys.exit("too short: no worker lived for longer than its start takes; render more pictures")
    ends = {"first": whole[:tenth], "last": whole[-tenth:]}
    found: dict[str, Any] = {}
    for name, part in ends.items():
        found[name] = {
            "parent_mb": round(median(s["parent"][0] for s in part), 1),
            "parent_files": median(s["parent"][1] for s in part),
            "worker_mb": round(median(m for s in part for m, _ in s["workers"].values()), 1),
            "worker_files": median(f for s in part for _, f in s["workers"].values()),
        }
    found["largest"] = {
        "parent_mb": round(max(s["parent"][0] for s in seen), 1),
        "worker_mb": round(max(m for s in whole for m, _ in s["workers"].values()), 1),
        "logs_mb": round(max(s["logs"] for s in seen) / 1e6, 2),
    }
    found["workers"] = len({pid for s in seen for pid in s["workers"]})
    found["worker_growth_mb"] = [round(own_growth(seen, pid), 2) for pid in {p: 0 for s in seen for p in s["workers"]}]
    return found


def own_growth(seen: list[dict[str, Any]], pid: int) -> float:
    """How many MB a worker grew in its life, start left out: a line fitted through all that was seen of it."""
    at = np.array([(s["seconds"], s["workers"][pid][0]) for s in seen if pid in s["workers"]])
    if len(at) < 3:
        return 0.0
    slope = np.polyfit(at[:, 0], at[:, 1], 1)[0]
    return float(slope * (at[-1, 0] - at[0, 0]))


def draw(seen: list[dict[str, Any]], path: Path) -> None:
    """Memory and open files over the run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    minutes = np.array([s["seconds"] for s in seen]) / 60
    for axis, which, label in ((above, 0, "resident memory (MB)"), (below, 1, "open files")):
        axis.plot(minutes, [s["parent"][which] for s in seen], color="black", label="the command itself")
        pids = list(dict.fromkeys(pid for s in seen for pid in s["workers"]))
        for n, pid in enumerate(pids):
            at = [(s["seconds"] / 60, s["workers"][pid][which]) for s in seen if pid in s["workers"]]
            axis.plot(*zip(*at, strict=True), color=f"C{n % 10}", label="workers, a colour each" if n == 0 else None)
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    above.legend(loc="center right")
    below.set_xlabel("minutes")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Render, watch, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--recycle", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="a folder for soak.json and soak.png")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "d")
        command = [sys.executable, "-m", "ident3d", "render", str(root), "--samples", str(args.pictures)]
        command += ["--resolution", str(args.resolution), "--recycle", str(args.recycle), "--shard-size", "250"]
        process = subprocess.Popen([*command, "--quiet"])
        seen = watch(process, root)
        problems = verify_dataset(root, quick=True) if process.returncode == 0 else ["not finished"]
    found = {"pictures": args.pictures, "minutes": round(seen[-1]["seconds"] / 60, 1), **growth(seen)}
    found["problems"] = len(problems)
    print(json.dumps(found, indent=2))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "soak.json").write_text(json.dumps(found, indent=2) + "\n")
        draw(seen, args.out / "soak.png")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

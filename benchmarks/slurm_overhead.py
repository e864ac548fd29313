"""What Slurm adds to the time of rendering: python benchmarks/slurm_overhead.py [--shards 6] [--shard-size 900].

The same shards are rendered by workers of one command (`ident3d render OUT --shards 0-N`) and by jobs of one core each
(`--executor slurm`), as many at a time; with --repeats, in turns. A folder is watched meanwhile, so that it is known
when the first picture of a shard was begun and when the shard was there. Per job that is: from its submission, or from
the end of the shard that had its place before, to its first picture. That is compared with the same of a local worker,
which goes from one shard to the next. What is added to shards of --minutes is extrapolated: it does not depend on their
length.

Without SLURM_CONF in the environment, a Slurm of one node is started on this machine, as for the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.02
TARGET = 0.03
"""The share of the wall time that Slurm may add, for shards of ten minutes."""


@dataclass(frozen=True)
class Run:
    """One render of all shards; times are in seconds from the start of the command.

    Attributes:
        engine: local or slurm.
        wall: until the command ended.
        submitted: when jobs were submitted; 0 for local.
        begun: when each shard's first picture was begun, ascending.
        finished: when each shard was there, ascending.
        each: how long each shard took.
    """

    engine: str
    wall: float
    submitted: float
    begun: list[float]
    finished: list[float]
    each: list[float]

    def gaps(self, places: int) -> list[float]:
        """How long each place stood idle before a shard that was not its first."""
        free = self.finished[: len(self.begun) - places]
        return [begun - ended for begun, ended in zip(self.begun[places:], free, strict=True)]


def command(root: Path, options: argparse.Namespace, engine: str) -> list[str]:
    """The render by one of the two."""
    size, count = options.shard_size, options.shards
    words = [sys.executable, "-m", "ident3d", "render", str(root), "--samples", str(size * count)]
    words += ["--shard-size", str(size), "--resolution", str(options.resolution), "--quality", options.quality]
    if engine == "local":
        return [*words, "--quiet", "--shards", f"0-{count - 1}", "--workers", str(options.places)]
    return [*words, "--quiet", "--executor", "slurm", "--cpus", "1", "--time", "120", "--max-jobs", str(options.places)]


def watch(root: Path, options: argparse.Namespace, engine: str, environment: dict[str, str]) -> Run:
    """Render all shards, and look on."""
    begun: dict[str, float] = {}
    finished: dict[str, float] = {}
    submitted = 0.0
    start = time.monotonic()
    process = subprocess.Popen(command(root, options, engine), env=environment, stdout=subprocess.DEVNULL)
    running = True
    while running:
        running = process.poll() is None
        now = time.monotonic() - start
        for name in [path.name for path in root.glob("train/*")]:
            if name.startswith(".train-") and name.endswith(".tar.part"):
                begun.setdefault(name[1:-5], now)
            elif name.startswith("train-"):
                finished.setdefault(name, now)
        if not submitted and (root / ".render" / "train" / "slurm" / "round-0000.json").exists():
            submitted = now
        time.sleep(POLL_S)
    wall = time.monotonic() - start
    if process.returncode or len(finished) != options.shards or begun.keys() != finished.keys():
        raise SystemExit(f"{engine}: ended with {process.returncode}, {len(finished)} shards")
    each = [finished[name] - begun[name] for name in sorted(finished)]
    return Run(engine, wall, submitted, sorted(begun.values()), sorted(finished.values()), each)


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """The environment of a cluster: the one that is there, or one of this machine."""
    if "SLURM_CONF" in os.environ:
        yield dict(os.environ)
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from slurm_cluster import SlurmCluster

    with tempfile.TemporaryDirectory(prefix="slurm-overhead-") as folder, SlurmCluster(Path(folder)) as cluster:
        yield cluster.environment


def told(local: list[Run], jobs: list[Run], options: argparse.Namespace) -> dict[str, float]:
    """The figures, in seconds a shard where nothing else is said."""
    places, count = options.places, options.shards
    local_each, job_each = (mean([s for run in runs for s in run.each]) for runs in (local, jobs))
    local_gap, job_gap = (median([s for run in runs for s in run.gaps(places)]) for runs in (local, jobs))
    local_first, job_first = (median([s for run in runs for s in run.begun[:places]]) for runs in (local, jobs))
    start = median([run.begun[k] - run.submitted for run in jobs for k in range(places)])
    # From the first picture to the last: all that comes with a number of shards, and nothing that comes once.
    local_span, job_span = (mean([run.finished[-1] - run.begun[0] for run in runs]) for runs in (local, jobs))
    measured = places * (job_span - local_span) / count
    added = max(job_gap - local_gap, measured)
    return {
        "a shard's rendering, local": local_each,
        "a shard's rendering, job": job_each,
        "from one shard to the next, local": local_gap,
        "from one job's shard to the next job's": job_gap,
        "from submission to the first picture": start,
        "once: command to first picture, local": local_first,
        "once: command to first picture, jobs": job_first,
        "once: last shard to the end of the command, local": mean([run.wall - run.finished[-1] for run in local]),
        "once: last shard to the end of the command, jobs": mean([run.wall - run.finished[-1] for run in jobs]),
        "first picture to last shard, all shards, local": local_span,
        "first picture to last shard, all shards, jobs": job_span,
        "added by Slurm to a shard, by what is between shards": job_gap - local_gap,
        "added by Slurm to a shard, by all shards": measured,
        f"percent of a shard of {local_each:.0f} s, measured": 100 * measured / local_each,
        f"percent of a shard of {options.minutes:g} minutes, extrapolated": 100 * added / (60 * options.minutes),
    }


def main() -> None:
    """Run both, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--shard-size", type=int, default=900, help="samples; some 90 seconds at 64 px")
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--quality", default="standard")
    parser.add_argument("--places", type=int, default=2, help="workers, or jobs at a time")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10, help="the shard's length to extrapolate to")
    parser.add_argument("--out", type=Path, help="keep all times as JSON")
    options = parser.parse_args()
    if options.shards <= options.places:
        parser.error("--shards: more than --places, so that a place has a second one")
    runs: dict[str, list[Run]] = {"local": [], "slurm": []}
    with slurm() as environment, tempfile.TemporaryDirectory(prefix="slurm-overhead-") as folder:
        for repeat in range(options.repeats):
            for engine in ("local", "slurm") if repeat % 2 == 0 else ("slurm", "local"):
                runs[engine].append(watch(Path(folder) / f"{engine}-{repeat}", options, engine, environment))
                print(f"{engine}: {runs[engine][-1].wall:.1f} s", flush=True)
    figures = told(runs["local"], runs["slurm"], options)
    for name, value in figures.items():
        print(f"{name:62s} {value:9.2f}")
    share = list(figures.values())[-1] / 100
    print(f"goal: at most {100 * TARGET:.0f}%: {'reached' if share <= TARGET else 'missed'}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        asked = {name: value for name, value in vars(options).items() if name != "out"}
        kept = {"options": asked, "figures": figures, "runs": [asdict(run) for some in runs.values() for run in some]}
        options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Renders killed at random moments and run again: python benchmarks/kills.py [--kills 50] [--finish 10] [--out FILE].

Of a worker, of the parent and of the whole process group in turn, by SIGKILL. The moment is uniform over the duration
of an undisturbed render, start and end included; those of --finish strike between the last shard and the end. After
each, the same command is run until it is done, and the dataset is compared byte for byte with the undisturbed one and
checked by `ident3d verify`. A picture that was begun more than once is needless where more than those in flight were:
one for a worker's death, one a worker for the others. Exit status 1 where any dataset differed or was not clean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("worker", "parent", "group")
SHARD_SIZE, WORKERS = 6, 2


@dataclass(frozen=True)
class Kill:
    """One kill, and what became of it.

    Attributes:
        kind: worker, parent or group.
        aimed: uniform, or finish.
        moment: seconds from the start, or from the last shard.
        hit: what was on disk: nothing, plan, pictures, all shards, manifest.
        stored: whole pictures on disk at that moment, in finished shards.
        commands: how often the command was run in all.
        again: pictures that were begun more than once.
        needless: of these, those that were not in flight.
        identical: whether the dataset is the undisturbed one, byte for byte.
        clean: whether `ident3d verify` finds nothing.
        left: hidden files that an undisturbed render does not leave.
    """

    kind: str
    aimed: str
    moment: float
    hit: str
    stored: int
    commands: int
    again: int
    needless: int
    identical: bool
    clean: bool
    left: list[str]


class Renders:
    """The same small render, run in folders of its own.

    Args:
        folder: for all that is written.
        samples: pictures of 16 px.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        self.folder, self.samples = folder, samples
        self.log, self.python = folder / "begun", folder / "python"
        worker = ROOT / "tests" / "data" / "counting_worker.py"
        self.python.write_text(
            f'#!/bin/sh\n[ "$1" = -E ] && shift\nexec "{sys.executable}" "{worker}" "{self.log}" "$@"\n'
        )
        self.python.chmod(0o755)

    @property
    def shards(self) -> int:
        """How many shards there will be."""
        return -(-self.samples // SHARD_SIZE)

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """The command, in a process group of its own."""
        options = f"--samples {self.samples} --resolution 16 --quality draft --shard-size {SHARD_SIZE} --quiet"
        command = [sys.executable, "-m", "ident3d", "render", str(out), *options.split(), "--workers", str(WORKERS)]
        return subprocess.Popen(
            [*command, "--blender-python", str(self.python)],
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def finish(self, out: Path, tries: int = 60) -> int:
        """Run the command until it is done; returns how often. A folder that is still held does not count."""
        runs = 0
        for _ in range(tries):
            process = self.start(out)
            said = process.communicate()[1].decode(errors="replace")
            runs += "another render" not in said
            if process.returncode == 0:
                return runs
        raise SystemExit(f"{out}: not done after {tries} tries: {said}")

    def begun_again(self) -> int:
        """Pictures that were begun more than once since the last call."""
        counts = Counter(self.log.read_text().split()) if self.log.exists() else Counter()
        self.log.unlink(missing_ok=True)
        return sum(count - 1 for count in counts.values())

    def undisturbed(self, out: Path) -> tuple[float, float]:
        """Render once; returns the seconds it took, and those of it between the last shard and the end."""
        begin = time.monotonic()
        process = self.start(out)
        last = begin
        while process.poll() is None:
            if len(list(out.glob("train/*.tar"))) < self.shards:
                last = time.monotonic()
            time.sleep(0.0005)
        process.communicate()
        if process.returncode:
            raise SystemExit(f"{out}: the undisturbed render ended with status {process.returncode}")
        self.log.unlink(missing_ok=True)
        end = time.monotonic()
        return end - begin, end - last


def members(root: Path) -> tuple[dict[str, bytes], set[str]]:
    """The dataset's files, and the names of hidden ones."""
    paths = {str(p.relative_to(root)): p for p in sorted(root.rglob("*")) if p.is_file()}
    hidden = {name for name in paths if any(part.startswith(".") for part in Path(name).parts)}
    return {name: path.read_bytes() for name, path in paths.items() if name not in hidden}, hidden


def workers_of(pid: int) -> list[int]:
    """The processes that a process started."""
    children = []
    with contextlib.suppress(OSError):  # it ends while it is looked at
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    return children


def where(out: Path, shards: int) -> tuple[str, int]:
    """What a strike hit, by what is on disk; how many shards are finished."""
    finished = len(list(out.glob("train/*.tar")))
    if (out / "dataset.json").exists():
        return "manifest", finished
    if finished == shards:
        return "all shards", finished
    if finished or list(out.glob("train/.*.part")):
        return "pictures", finished
    return ("plan" if (out / ".render" / "train" / "plan.json").exists() else "nothing"), finished


def strike(process: subprocess.Popen[bytes], kind: str, chance: random.Random) -> bool:
    """Kill, at once; whether anything was there to be killed."""
    if process.poll() is not None:
        return False
    if kind == "worker":
        workers = workers_of(process.pid)
        if not workers:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(workers), signal.SIGKILL)
    elif kind == "parent":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    return True


def wait_until(process: subprocess.Popen[bytes], out: Path, aimed: str, moment: float, shards: int) -> None:
    """Until the moment of a strike, or the end of the process."""
    begin = time.monotonic()
    while process.poll() is None:
        if aimed == "finish" and len(list(out.glob("train/*.tar"))) < shards:
            begin = time.monotonic()
        elif time.monotonic() - begin >= moment:
            return
        time.sleep(0.0005)


def one_kill(renders: Renders, kind: str, aimed: str, moment: float, whole: Path, chance: random.Random) -> Kill | None:
    """One kill and what became of it; None where there was nothing to kill at that moment."""
    out = renders.folder / "killed"
    shutil.rmtree(out, ignore_errors=True)
    renders.begun_again()
    process = renders.start(out)
    wait_until(process, out, aimed, moment, renders.shards)
    hit, finished = where(out, renders.shards)
    struck = strike(process, kind, chance)
    process.communicate()
    if not struck:
        return None
    ended = kind == "worker" and process.returncode == 0
    commands = 1 + (0 if ended else renders.finish(out))
    again = renders.begun_again()
    files, hidden = members(out)
    expected, normal = members(whole)
    checked = subprocess.run(
        [sys.executable, "-m", "ident3d", "verify", str(out), "--quiet"], cwd=ROOT, capture_output=True, check=False
    )
    return Kill(
        kind=kind,
        aimed=aimed,
        moment=round(moment, 4),
        hit=hit,
        stored=finished * SHARD_SIZE,
        commands=commands,
        again=again,
        needless=max(0, again - (1 if kind == "worker" else WORKERS)),
        identical=files == expected,
        clean=checked.returncode == 0,
        left=sorted(hidden - normal),
    )


def all_kills(renders: Renders, counts: dict[str, int], seed: int) -> list[Kill]:
    """So many kills of each aim, the kinds in turn. One that finds nothing to kill is drawn again."""
    whole = renders.folder / "whole"
    renders.undisturbed(whole)  # what is read for the first time takes longer
    shutil.rmtree(whole)
    duration, ending = renders.undisturbed(whole)
    print(f"undisturbed: {duration:.2f} s, of which {1000 * ending:.0f} ms after the last shard", flush=True)
    chance = random.Random(seed)
    kills: list[Kill] = []
    for aimed, number in counts.items():
        # A worker has nothing to do once all shards are there.
        kinds = KINDS if aimed == "uniform" else KINDS[1:]
        for k in range(number):
            kill = None
            while kill is None:
                moment = chance.uniform(0, duration if aimed == "uniform" else ending)
                kill = one_kill(renders, kinds[k % len(kinds)], aimed, moment, whole, chance)
            kills.append(kill)
            if not (kill.identical and kill.clean) or kill.needless or kill.left:
                print(kill, flush=True)
    return kills


def report(kills: list[Kill]) -> None:
    """Print the tables."""
    columns = (f"{name:>{width}}" for name, width in [("kills", 5), ("identical", 9), ("verified", 8)])
    print(f"\n{'killed':8} {'aimed':8}", *columns, f"{'rendered twice':>14} {'needless':>8}")
    for aimed in ("uniform", "finish"):
        for kind in KINDS:
            some = [kill for kill in kills if (kill.kind, kill.aimed) == (kind, aimed)]
            if some:
                identical, clean = sum(k.identical for k in some), sum(k.clean for k in some)
                again, needless = sum(k.again for k in some), sum(k.needless for k in some)
                print(f"{kind:8} {aimed:8} {len(some):5} {identical:9} {clean:8} {again:14} {needless:8}")
    hits = Counter((kill.hit, kill.kind) for kill in kills)
    print(f"\n{'on disk at the kill':20}" + "".join(f" {kind:>6}" for kind in KINDS))
    for hit in ("nothing", "plan", "pictures", "all shards", "manifest"):
        print(f"{hit:20}" + "".join(f" {hits[hit, kind]:6}" for kind in KINDS))
    left = sum(bool(kill.left) for kill in kills)
    print(f"\nhidden files left over: after {left} of {len(kills)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--finish", type=int, default=10, help="kills between the last shard and the end, besides")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        renders = Renders(Path(name), args.samples)
        kills = all_kills(renders, {"uniform": args.kills, "finish": args.finish}, args.seed)
    report(kills)
    identical = sum(kill.identical and kill.clean for kill in kills)
    print(f"{identical} of {len(kills)} ended in the identical dataset; {time.monotonic() - begin:.0f} s")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {"kills": args.kills, "finish": args.finish, "samples": args.samples, "seed": args.seed}
        found = {**settings, "identical": identical, "of": len(kills), "each": [asdict(kill) for kill in kills]}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(identical < len(kills))


if __name__ == "__main__":
    main()

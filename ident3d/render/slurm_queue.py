"""Which of a split's Slurm jobs there are, and what Slurm says of them.

What was submitted is written down before it is, and jobs are found again by their name: so a process that submits may
end at any moment, and the next one knows which shards are in good hands.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ident3d.errors import SpecError
from ident3d.files import write_json
from ident3d.schema import from_plain, to_plain

__all__ = [
    "Job",
    "Round",
    "Rounds",
    "array_limit",
    "arrays_left",
    "in_hand",
    "in_words",
    "job_states",
    "log_end",
    "outside_of_jobs",
    "own_jobs",
    "read_queue",
    "reasons",
]

OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"}
OVER |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
"""Slurm's words for jobs that have ended."""

MOST_JOBS = 1000
"""Jobs of one submission: more make Slurm slow, and the default of its MaxArraySize forbids them."""

HIDDEN = {"SBATCH_JOB_NAME", "SBATCH_ARRAY_INX", "SBATCH_SIGNAL", "SBATCH_NO_REQUEUE", "SBATCH_REQUEUE"}
HIDDEN |= {"SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_TIMELIMIT"}
"""The user's defaults for sbatch that would overrule what jobs are found and requeued by."""


@dataclass(frozen=True)
class Round:
    """What was submitted at one time: an array of jobs.

    Attributes:
        name: of the array, which no other has.
        groups: the shards of each of its jobs.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Job:
    """A job as Slurm shows it.

    Attributes:
        state: in Slurm's words, such as PENDING.
        reason: why it waits or ended.
        id: such as 12_3.
    """

    state: str
    reason: str
    id: str

    @property
    def over(self) -> bool:
        """Whether it has ended. A job that Slurm has requeued has not."""
        return self.state in OVER

    @property
    def waits(self) -> bool:
        """Whether it has not begun, or not again since it was requeued."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


class Rounds:
    """The rounds of a split, in files.

    Args:
        work: the folder of the split's plan.
        root: the dataset's folder.
        split: the split's name.
    """

    def __init__(self, work: Path, root: Path, split: str) -> None:
        self.folder = work / "slurm"
        digest = hashlib.sha256(f"{root.resolve()}/{split}".encode()).hexdigest()
        self.prefix = f"ident3d-{digest[:10]}"

    def read(self) -> list[Round]:
        """All rounds, in order. One that cannot be read was never submitted."""
        found = []
        for path in sorted(self.folder.glob("round-*.json")) if self.folder.is_dir() else ():
            try:
                found.append(from_plain(Round, json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, SpecError):
                continue
        return found

    def add(self, groups: tuple[tuple[int, ...], ...]) -> Round:
        """A new round, written down.

        Its name is random in part: Slurm may still know jobs of a folder that has been deleted and begun again.
        """
        self.folder.mkdir(exist_ok=True)
        number = 0
        while (path := self.folder / f"round-{number:04d}.json").exists():
            number += 1
        made = Round(f"{self.prefix}-{number:04d}-{secrets.token_hex(3)}", groups)
        write_json(path, to_plain(made))
        return made


def read_queue(rounds: list[Round]) -> dict[tuple[str, int], Job] | None:
    """The jobs of some rounds by the round's name and their place in it; None where Slurm does not answer.

    Slurm forgets a job some minutes after its end. One that is not there is over.
    """
    if not rounds:
        return {}
    names = ",".join(r.name for r in rounds)
    # An array's waiting jobs would be one line without -r.
    lines = _ask("squeue", "-h", "-r", "-t", "all", "-n", names, "-o", "%j|%K|%T|%r|%i")
    if lines is None:
        return None
    found: dict[tuple[str, int], Job] = {}
    for line in lines:
        name, place, state, reason, number = line.split("|", 4)
        found[name, int(place) if place.isdigit() else 0] = Job(state, reason, number)
    return found


def in_hand(rounds: list[Round], queue: dict[tuple[str, int], Job]) -> dict[int, tuple[str, int]]:
    """The shards of jobs that wait or run, those that are finished included: by number, the job's key in the queue."""
    found: dict[int, tuple[str, int]] = {}
    for made in rounds:
        for place, group in enumerate(made.groups):
            job = queue.get((made.name, place))
            if job is not None and not job.over:
                found.update(dict.fromkeys(group, (made.name, place)))
    return found


def job_states(
    queue: dict[tuple[str, int], Job], hands: dict[int, tuple[str, int]], begun: Iterable[int]
) -> Counter[str]:
    """How many shards in jobs' hands run, wait, or wait again after they had been begun."""
    begun = set(begun)
    return Counter(_state(queue[place], begun=shard in begun) for shard, place in hands.items())


def reasons(
    queue: dict[tuple[str, int], Job], hands: dict[int, tuple[str, int]], begun: Iterable[int]
) -> dict[str, str]:
    """Why most shards that wait do so, in Slurm's words, by their state as `job_states` has it."""
    begun = set(begun)
    told: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for shard, place in hands.items():
        job = queue[place]
        if job.waits and job.reason not in ("", "None"):
            told[_state(job, begun=shard in begun)][job.reason] += 1
    return {state: found.most_common(1)[0][0] for state, found in told.items()}


def _state(job: Job, *, begun: bool) -> str:
    return "running" if not job.waits else "requeued" if begun else "pending"


def in_words(counts: Mapping[str, int], why: Mapping[str, str]) -> str:
    """Counts of shards by state, such as `3 running, 2 pending (Priority)`."""
    names = [name for name in ("running", "pending", "requeued", "failed") if counts.get(name)]
    return ", ".join(f"{counts[name]} {name}" + (f" ({why[name]})" if name in why else "") for name in names)


def own_jobs() -> set[str] | None:
    """The ids of all jobs of this user that are not over, such as 12_3; None where Slurm does not answer."""
    lines = _ask("squeue", "-h", "-r", "-u", str(os.getuid()), "-o", "%i")
    return None if lines is None else set(lines)


def arrays_left(queue: dict[tuple[str, int], Job]) -> list[str]:
    """The numbers of the arrays of which some jobs are not over, for scancel."""
    return sorted({job.id.split("_")[0] for job in queue.values() if not job.over}, key=int)


def array_limit() -> int:
    """How many jobs an array may have here."""
    for line in _ask("scontrol", "show", "config") or ():
        key, _, value = line.partition("=")
        if key.strip() == "MaxArraySize" and value.strip().isdigit():
            return max(1, min(MOST_JOBS, int(value) - 1))
    return MOST_JOBS


@contextmanager
def outside_of_jobs() -> Iterator[None]:
    """Hide what Slurm tells of the job that this process may be part of: its own jobs would take it for theirs. Hide
    also what would overrule the options that jobs are submitted with."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    hidden = HIDDEN | {name for name in os.environ if name.startswith("SLURM_") and name not in kept}
    mine = {name: os.environ[name] for name in hidden if name in os.environ}
    for name in mine:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(mine)


def log_end(log: Path, lines: int = 3) -> str:
    """The last words of a job's log, without Slurm's own."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "nothing"
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join([line for line in said if not line.startswith(("srun: ", "slurmstepd: "))][-lines:]) or "nothing"


def _ask(*command: str) -> list[str] | None:
    # The user's own defaults for squeue could hide jobs or add columns.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=plain)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None

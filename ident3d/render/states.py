"""What is going on in each shard, told in files: whoever renders writes them, whoever asks reads them.

They serve to look on, from other processes and other machines. Whether a shard is finished is decided by the shard
itself, so a state that is lost or late costs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ident3d.errors import SpecError
from ident3d.render.executors import Failure, Outcome
from ident3d.render.plan import ShardJob
from ident3d.schema import from_plain, to_plain

__all__ = ["Recorder", "ShardState", "read_states", "states_folder"]

INTERVAL = 2.0
"""Seconds between two writings of a state, at least."""

MOST_TEXT = 2000


@dataclass(frozen=True)
class ShardState:
    """A shard that somebody is, or was, at work on.

    Attributes:
        shard: its number.
        state: `running` or `failed`; a finished shard has no state.
        done: samples in place.
        samples: of the shard.
        rendered: samples rendered, in all attempts together.
        attempts: how many processes have begun to work on it.
        host: the machine of the last.
        pid: its process there.
        job: its Slurm job, or empty.
        updated: when this was written, in seconds since 1970, by that machine's clock.
        failures: what could not be rendered.
    """

    shard: int
    state: str
    done: int
    samples: int
    rendered: int
    attempts: int
    host: str
    pid: int
    job: str
    updated: float
    failures: tuple[Failure, ...] = ()


def states_folder(work: Path) -> Path:
    """Where the states of a split lie, beside its plan."""
    return work / "states"


def read_states(work: Path) -> dict[int, ShardState]:
    """The states of a split's shards, by number. One that cannot be read is left out: it is being replaced."""
    found = {}
    folder = states_folder(work)
    for path in folder.glob("*.json") if folder.is_dir() else ():
        try:
            state = from_plain(ShardState, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, SpecError):
            continue
        found[state.shard] = state
    return found


def slurm_job() -> str:
    """The Slurm job that this process is part of, as `12_3` in an array; empty outside."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


class Recorder:
    """Writes the states of the shards that this process renders.

    Args:
        work: the folder of the split's plan.
        jobs: the shards.
    """

    def __init__(self, work: Path, jobs: Iterable[ShardJob]) -> None:
        self.folder = states_folder(work)
        self.folder.mkdir(exist_ok=True)
        self.jobs = {job.shard: job for job in jobs}
        before = read_states(work)
        self.rendered = {shard: state.rendered for shard, state in before.items()}
        self.attempts = {shard: state.attempts for shard, state in before.items()}
        self.states: dict[int, ShardState] = {}
        self.there: defaultdict[int, set[int]] = defaultdict(set)
        self.written: dict[int, float] = {}

    def event(self, event: dict[str, Any]) -> None:
        """Note what a worker reports."""
        if event["event"] not in ("start", "picture"):
            return
        shard = event["shard"]
        state = self.states.get(shard) or self._begin(shard)
        if event["event"] == "picture":
            # Of a shard that is begun again, the samples in place are told one by one.
            self.there[shard].add(event["index"])
            done, rendered = len(self.there[shard]), state.rendered + (not event["kept"])
            state = dataclasses.replace(state, done=done, rendered=rendered)
        self.states[shard] = state
        if time.monotonic() - self.written.get(shard, -INTERVAL) >= INTERVAL:
            self._write(state)

    def outcome(self, outcome: Outcome) -> None:
        """Note the end of a shard."""
        state = self.states.pop(outcome.shard, None) or self._begin(outcome.shard)
        self.there.pop(outcome.shard, None)
        if outcome.failures:
            failures = tuple(dataclasses.replace(f, message=f.message[-MOST_TEXT:]) for f in outcome.failures)
            self._write(dataclasses.replace(state, state="failed", failures=failures))
        else:
            self._path(outcome.shard).unlink(missing_ok=True)

    def close(self) -> None:
        """Write what was not yet."""
        for state in self.states.values():
            self._write(state)

    def _begin(self, shard: int) -> ShardState:
        job = self.jobs[shard]
        return ShardState(
            shard=shard,
            state="running",
            done=0,
            samples=job.stop - job.start,
            rendered=self.rendered.get(shard, 0),
            attempts=self.attempts.get(shard, 0) + 1,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=slurm_job(),
            updated=time.time(),
        )

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:06d}.json"

    def _write(self, state: ShardState) -> None:
        """Without fsync: a state that is lost with the power is no loss."""
        self.written[state.shard] = time.monotonic()
        path = self._path(state.shard)
        part = path.with_suffix(f".{os.getpid()}.part")
        text = json.dumps(to_plain(dataclasses.replace(state, updated=time.time())))
        with contextlib.suppress(OSError):  # nor is one that cannot be written; what matters will say so itself
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)

"""Shards as jobs of a Slurm cluster, through submitit.

A job is given some shards and renders them as `ident3d render OUT --shards` does. What has become of them is seen from
the shards, their states and Slurm's queue, so nothing depends on the process that submitted: it may end and be started
again.
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ident3d.errors import Ident3DError, RenderError, SpecError
from ident3d.locks import file_lock
from ident3d.render.crew import CrewOptions
from ident3d.render.executors import Failure, OnEvent, Outcome
from ident3d.render.folder import RenderFolder
from ident3d.render.options import SlurmOptions
from ident3d.render.plan import ShardJob
from ident3d.render.slurm_queue import (
    Job,
    Round,
    Rounds,
    array_limit,
    arrays_left,
    in_hand,
    in_words,
    job_states,
    log_end,
    outside_of_jobs,
    read_queue,
    reasons,
)
from ident3d.render.states import ShardState, read_states, states_folder
from ident3d.render.work import SplitWork, missing_shards

__all__ = ["SlurmExecutor", "SlurmTask", "check_slurm"]

ATTEMPTS = 3
"""Jobs that may end without a shard, and without a further picture of it, before it is given up."""

PAUSES = (0.5, 1, 2, 4, 8)
"""Seconds between two looks at the queue, the last for all that follow."""

LATE = 2
"""Looks for which a shard whose job has ended may still be on its way through a network file system."""

SIGNAL_SECONDS = 60
"""How long before its time limit a job is told to requeue itself."""

MOST_WORDS = 160
"""Letters of a refusal that fit behind a progress bar."""

ENDING = 30
"""Seconds that jobs whose shards are all there may take to end; then they are cancelled."""

TIMEOUTS = 1000
"""How often a job may requeue itself: each time it goes on where it stopped, if it had come further."""


def check_slurm() -> None:
    """Refuse to begin where Slurm cannot be reached.

    Raises:
        SpecError: no submitit, or no Slurm.
    """
    if find_spec("submitit") is None:
        raise SpecError("executor slurm: submitit is absent; pip install 'ident3d[slurm]'")
    for program in ("sbatch", "srun", "squeue"):
        if shutil.which(program) is None:
            raise SpecError(
                f"executor slurm: no {program} on this machine; run this on a node that submits jobs, or "
                "`ident3d render OUT --shards A-B` by any other scheduler"
            )


@dataclass(frozen=True)
class SlurmTask:
    """What a job does. submitit pickles it, and calls it on the node.

    Attributes:
        root: the dataset's folder.
        split: the split.
        shards: which to render.
        crew: by which workers.
        done: samples of these shards that were in place when the job was last requeued; before that, -1.
    """

    root: str
    split: str
    shards: tuple[int, ...]
    crew: CrewOptions
    done: int = -1

    def __call__(self) -> list[str]:
        """Render; returns what failed, in words."""
        from ident3d.render.dataset import render_shards, sigterm_stops

        folder = RenderFolder(Path(self.root))
        # In place of submitit's handler, with which a cancelled job would stay until it is killed.
        with sigterm_stops():
            try:
                failures = render_shards(folder, self.split, self.shards, self.crew, quiet=True)
            except Ident3DError as error:
                raise SystemExit(f"ident3d: {error}") from None  # words for the job's log, from where they are told
        return [str(failure) for failure in failures]

    def checkpoint(self) -> Any:
        """What to submit when the time is up: the same, which goes on where this stopped.

        Nothing where it came no further than the last time: then the job ends, and counts as one that failed.
        """
        done = self._in_place()
        if done <= self.done:
            return None
        return importlib.import_module("submitit.helpers").DelayedSubmission(dataclasses.replace(self, done=done))

    def _in_place(self) -> int:
        """How many samples of the shards are on disk."""
        folder = RenderFolder(Path(self.root))
        plan = folder.plans().get(self.split)
        if plan is None:
            return 0
        missing, states = set(missing_shards(plan, folder.root)), read_states(folder.work(self.split))
        done = 0
        for shard in self.shards:
            start, stop = plan.bounds(shard)
            if shard not in missing:
                done += stop - start
            elif shard in states:
                done += states[shard].done
        return done


class SlurmExecutor:
    """An `Executor` whose shards are rendered by jobs; see the module.

    Args:
        work: the split in progress.
        slurm: what Slurm is asked for.
        crew: what workers are told.
    """

    def __init__(self, work: SplitWork, slurm: SlurmOptions, crew: CrewOptions) -> None:
        self.work, self.slurm = work, slurm
        self.crew = dataclasses.replace(
            crew,
            workers=slurm.workers,
            device=work.plan.device.lower(),
            threads=max(1, slurm.cpus // slurm.workers),
            worker_memory=crew.worker_memory or (slurm.mem and slurm.mem / slurm.workers),
        )
        self.rounds = Rounds(work.work, work.folder.root, work.plan.split)
        self.jobs: dict[int, ShardJob] = {}
        self.attempts: Counter[int] = Counter()
        self.reached: dict[int, int] = {}
        self.late: Counter[int] = Counter()
        self.seen: dict[int, Job] = {}
        self.failed = 0
        self.unsent: list[Round] = []

    @staticmethod
    @contextmanager
    def hold(folder: RenderFolder, split: str) -> Iterator[None]:
        """Hold a split against other processes that would submit it too.

        Raises:
            BusyError: another does.
        """
        busy = f"{folder.root}: another process ({{process}}) submits it to Slurm and waits; look on with --status"
        with file_lock(folder.hidden / f"slurm-{split}.lock", busy):
            yield

    def unfinished(self) -> list[ShardJob]:
        """The jobs of shards that are not in place. Jobs check what they find there, so names decide here."""
        return [self.work.jobs[shard] for shard in self.work.missing()]

    def submit(self, job: ShardJob) -> None:
        """Take a shard; see `Executor`."""
        self.jobs[job.shard] = job

    def close(self) -> None:
        """Jobs go on without this process."""

    def outcomes(self, on_event: OnEvent) -> Iterator[Outcome]:
        """Submit what no job has in hand, and look on until all has come to an end; see `Executor`.

        Raises:
            RenderError: Slurm refuses the jobs.
            KeyboardInterrupt: Ctrl-C; its text says how to end the jobs, which go on.
        """
        waiting = set(self.jobs)
        try:
            rounds = self.rounds.read()
            queue = read_queue(rounds)
            if queue is None:
                raise RenderError("squeue does not answer; is Slurm up? Run the same command again when it is")
            self._add(waiting - set(in_hand(rounds, queue)))
            self._send()
            for look in range(10**9):
                time.sleep(PAUSES[min(look, len(PAUSES) - 1)])
                for outcome in self._look(waiting, on_event):
                    waiting.discard(outcome.shard)
                    self.failed += bool(outcome.failures)
                    yield outcome
                if not waiting:
                    self._let_end(on_event)
                    return
        except KeyboardInterrupt as stop:
            if cancel := self._cancel():
                stop.args = (f"its jobs go on; to end them: {cancel}",)
            raise

    def _look(self, waiting: set[int], on_event: OnEvent) -> Iterator[Outcome]:
        rounds = self.rounds.read()
        queue = read_queue(rounds)  # before the shards: a job that has just ended has left what it finished
        missing = set(self.work.missing())
        for shard in sorted(waiting - missing):
            on_event(_picture(self.jobs[shard], self.jobs[shard].stop - self.jobs[shard].start))
            yield Outcome(shard)
        states = read_states(self.work.work)
        for shard in waiting & missing & set(states):
            if states[shard].done:
                on_event(_picture(self.jobs[shard], states[shard].done))
        if queue is None:
            on_event(_note("Slurm does not answer"))
            return
        hands = {shard: place for shard, place in in_hand(rounds, queue).items() if shard in missing}
        self.seen |= {shard: queue[place] for shard, place in hands.items()}
        on_event(_note(self._words(queue, hands, states)))
        again = []
        for shard in hands:
            self.late.pop(shard, None)
        for shard in sorted((waiting & missing) - set(hands) - self._held_back(queue)):
            self.late[shard] += 1
            if self.late[shard] <= LATE:
                continue
            failures = self._why(shard, rounds, queue)
            if failures:
                yield Outcome(shard, failures)
            else:
                again.append(shard)
        self._add(again)
        try:
            self._send()
        except RenderError as error:  # slurmctld may be on its way up again, and all else goes on
            on_event(_note(f"{' '.join(str(error).split())[:MOST_WORDS]}; trying again"))

    def _words(
        self, queue: dict[tuple[str, int], Job], hands: dict[int, tuple[str, int]], states: dict[int, ShardState]
    ) -> str:
        counts = job_states(queue, hands, states)
        counts["failed"] = self.failed
        return in_words(counts, reasons(queue, hands, states))

    def _held_back(self, queue: dict[tuple[str, int], Job]) -> set[int]:
        """The shards of rounds that Slurm refused, and does not know: an answer that was late may have been a yes."""
        names = {name for name, _ in queue}
        self.unsent = [made for made in self.unsent if made.name not in names]
        return {shard for made in self.unsent for group in made.groups for shard in group}

    def _why(self, shard: int, rounds: list[Round], queue: dict[tuple[str, int], Job]) -> tuple[Failure, ...]:
        """Why a shard is not there though no job has it in hand; nothing where another job is to try."""
        state = read_states(self.work.work).get(shard)
        if state is not None and state.state == "failed":
            return state.failures
        last = None
        for made in rounds:
            for place, group in enumerate(made.groups):
                if shard in group:
                    last = queue.get((made.name, place))
        if last is None and shard in self.seen and self.seen[shard].waits:
            # Slurm remembers jobs that have run for some minutes, but not one that was cancelled before.
            last = dataclasses.replace(self.seen[shard], state="CANCELLED")
        if last is not None and last.state == "CANCELLED":
            words = f"its job {last.id} was cancelled; run the same command to submit it again"
            return (Failure(shard, None, words),)
        done = state.done if state is not None else 0
        if done > self.reached.get(shard, 0):
            self.reached[shard] = done
            self.attempts[shard] = 0
        self.attempts[shard] += 1
        if self.attempts[shard] < ATTEMPTS:
            return ()
        ended, logs = "of which Slurm tells no more", self.rounds.folder / "jobs"
        if last is not None:
            log = logs / f"{last.id}_0_log.out"
            ended = f"the last, {last.id}, as {last.state} ({last.reason}); its log says: {log_end(log)}"
        return (Failure(shard, None, f"{ATTEMPTS} jobs ended without it, {ended}; their logs are in {logs}"),)

    def _add(self, shards: Iterable[int]) -> None:
        """Make a new round of shards, to be sent."""
        chosen = sorted(shards)
        if not chosen:
            return
        states = read_states(self.work.work)
        for shard in chosen:
            self.late[shard] = 0
            self.seen.pop(shard, None)
            if (state := states.get(shard)) is not None and state.state == "failed":
                (states_folder(self.work.work) / f"{shard:06d}.json").unlink(missing_ok=True)
        each = max(self.slurm.job_shards or self.slurm.workers, -(-len(chosen) // array_limit()))
        groups = tuple(tuple(chosen[k : k + each]) for k in range(0, len(chosen), each))
        self.unsent.append(self.rounds.add(groups))

    def _send(self) -> None:
        """Submit the rounds that have not been.

        Raises:
            RenderError: Slurm refuses one, which stays to be sent.
        """
        while self.unsent:
            made = self.unsent[0]
            submit_round(made, self.rounds.folder / "jobs", self._tasks(made.groups), self.slurm)
            del self.unsent[0]

    def _tasks(self, groups: tuple[tuple[int, ...], ...]) -> list[SlurmTask]:
        root = str(self.work.folder.root.resolve())
        return [SlurmTask(root, self.work.plan.split, group, self.crew) for group in groups]

    def _let_end(self, on_event: OnEvent) -> None:
        """Wait for the jobs to end, which have nothing left to do: their files are removed when the dataset is made."""
        left: list[str] = []
        looks = 0
        while looks < ENDING:
            queue = read_queue(self.rounds.read())
            if queue is None:  # which does not say that no jobs are left
                on_event(_note("all shards are there, but Slurm does not answer whether its jobs have ended"))
            elif left := arrays_left(queue):
                looks += 1
            else:
                return
            time.sleep(1)
        subprocess.run(["scancel", *left], capture_output=True, check=False)

    def _cancel(self) -> str:
        """The command that ends all jobs, or nothing where none is left."""
        rounds = self.rounds.read()
        queue = read_queue(rounds)
        if queue is None:
            return "; ".join(f"scancel --name={made.name}" for made in rounds)
        return " ".join(["scancel", *left]) if (left := arrays_left(queue)) else ""


def submit_round(made: Round, folder: Path, tasks: list[SlurmTask], slurm: SlurmOptions) -> None:
    """Submit an array of jobs.

    Raises:
        RenderError: sbatch refused it, in its own words.
    """
    submitit = importlib.import_module("submitit")
    utils = importlib.import_module("submitit.core.utils")
    options: dict[str, Any] = {
        "job_name": made.name,
        "time": slurm.time,
        "cpus_per_task": slurm.cpus,
        "array_parallelism": slurm.max_jobs,
        "signal_delay_s": min(SIGNAL_SECONDS, 15 * slurm.time),
        "stderr_to_stdout": True,
        "setup": list(slurm.setup) or None,
        # Since Slurm 22.05 a step has one core, whatever its job has, unless it asks as well.
        "srun_args": [f"--cpus-per-task={slurm.cpus}", *slurm.srun],
        # A job whose node dies goes on elsewhere, whatever the cluster's default.
        "additional_parameters": {"requeue": True, **slurm.sbatch_options},
        "gpus_per_node": slurm.gpus_per_node,
        "mem": f"{int(1000 * slurm.mem)}M" if slurm.mem else None,
    }
    options |= {name: getattr(slurm, name) for name in ("partition", "account", "qos", "constraint")}
    executor = submitit.SlurmExecutor(folder, max_num_timeout=TIMEOUTS, python=slurm.node_python)
    executor.update_parameters(**{name: value for name, value in options.items() if value is not None})
    try:
        with outside_of_jobs(), executor.batch():
            for task in tasks:
                executor.submit(task)
    except (utils.FailedJobError, utils.FailedSubmissionError) as error:
        for left in (*folder.glob(".submission_file_*.sh"), *folder.glob(f"{32 * '[0-9a-f]'}.pkl")):
            if not left.is_symlink():  # what submitit wrote for jobs that there are not
                left.unlink(missing_ok=True)
        raise RenderError(f"Slurm refused the jobs: {str(error).strip()}") from None


def _note(text: str) -> dict[str, Any]:
    return {"event": "note", "text": text}


def _picture(job: ShardJob, done: int) -> dict[str, Any]:
    return {"event": "picture", "shard": job.shard, "index": job.start + done - 1, "kept": False}

"""What the process that submits, --status and a job at its time limit make of Slurm's answers. No cluster is used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ident3d.render.slurm as slurm_module
from ident3d import RenderError, RenderOptions, load_scene
from ident3d.render.crew import CrewOptions
from ident3d.render.executors import Failure, Outcome
from ident3d.render.folder import RenderFolder
from ident3d.render.options import SlurmOptions
from ident3d.render.plan import RenderPlan, ShardJob, sidecar_name
from ident3d.render.slurm import SlurmExecutor, SlurmTask, submit_round
from ident3d.render.slurm_queue import Round
from ident3d.render.states import ShardState
from ident3d.render.status import status_text
from ident3d.render.work import missing_shards
from ident3d.shards.manifest import shard_name

SHARDS = 4


class Cluster:
    """A split of 4 shards of 4 samples, an executor of it, and a squeue and sbatch that answer as they are told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer, self.refusal = folder / "answer", folder / "refusal"
        self.answer.touch()
        (folder / "bin").mkdir()
        self._program(folder / "bin" / "squeue", f"exec cat {self.answer}")
        self._program(folder / "bin" / "scontrol", "exit 1")
        self._program(folder / "bin" / "scancel", f'echo "$@" >> {folder}/cancelled')
        self._program(folder / "bin" / "sbatch", f"cat {self.refusal} >&2; exit 1")
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(slurm_module, "submit_round", self._submit)
        monkeypatch.setattr(slurm_module, "time", SimpleNamespace(sleep=self._sleep))  # subprocess sleeps too
        self.root = folder / "d"
        self.asleep: list[Callable[[], None]] = []
        options = RenderOptions(self.root, 4 * SHARDS, shard_size=4)
        self.plan: RenderPlan = replace(options.plan(load_scene("3dident"), None), device="CPU", blender="5.0")
        self.render = RenderFolder(self.root)
        self.render.create()
        self.render.save_plan(self.plan)
        self.work = self.render.work("train")
        jobs = [ShardJob.of(self.plan, k, self.work, self.work) for k in range(SHARDS)]
        work: Any = SimpleNamespace(work=self.work, folder=self.render, plan=self.plan, jobs=jobs)
        work.missing = lambda: missing_shards(self.plan, self.root)
        self.executor = SlurmExecutor(work, SlurmOptions(cpus=2), CrewOptions())
        for job in jobs:
            self.executor.submit(job)
        self.sent: list[Round] = []
        self.refuses = False
        self.notes: list[str] = []

    @staticmethod
    def _program(path: Path, script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def _submit(self, made: Round, *others: Any) -> None:
        if self.refuses:
            raise RenderError("Slurm refused the jobs: Unable to contact\n slurm controller")
        self.sent.append(made)

    def _sleep(self, seconds: float) -> None:
        if self.asleep:
            self.asleep.pop(0)()

    def says(self, *jobs: tuple[Round, int, str, str]) -> None:
        """What squeue shows: round, place, state and reason."""
        lines = [f"{made.name}|{k}|{state}|{reason}|7_{k}\n" for made, k, state, reason in jobs]
        self.answer.write_text("".join(lines))

    def finish(self, *shards: int) -> None:
        for shard in shards:
            name = shard_name("train", shard)
            (self.work / name).touch()
            (self.work / sidecar_name(name)).touch()
            (self.work / "states" / f"{shard:06d}.json").unlink(missing_ok=True)

    def state(self, shard: int, done: int, state: str = "running") -> None:
        (self.work / "states").mkdir(exist_ok=True)
        failures = (Failure(shard, None, "no"),) if state == "failed" else ()
        found = ShardState(shard, state, done, 4, done, 1, "elsewhere", 1, "7_0", 0.0)
        plain = {**found.__dict__, "failures": [failure.__dict__ for failure in failures]}
        (self.work / "states" / f"{shard:06d}.json").write_text(json.dumps(plain))

    def look(self, waiting: set[int]) -> list[Outcome]:
        """One look of the executor; `notes` has its words."""
        return list(self.executor._look(waiting, self.event))

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "note":
            self.notes.append(event["text"])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_a_live_job_has_only_those_shards_in_hand_that_it_has_not_finished(cluster: Cluster) -> None:
    made = cluster.executor.rounds.add(((0, 1, 2, 3),))
    cluster.says((made, 0, "RUNNING", "None"))
    cluster.finish(0, 1, 2)
    assert "\n  4 shards: 3 finished, 1 running\n" in status_text(cluster.root)
    assert [outcome.shard for outcome in cluster.look({0, 1, 2, 3})] == [0, 1, 2]
    assert cluster.notes == ["1 running"]


def test_what_jobs_wait_for(cluster: Cluster) -> None:
    made = cluster.executor.rounds.add(((0,), (1,), (2,), (3,)))
    waits = [(made, 0, "PENDING", "Priority"), (made, 1, "PENDING", "PartitionTimeLimit")]
    cluster.says(*waits, (made, 2, "PENDING", "PartitionTimeLimit"), (made, 3, "RUNNING", "None"))
    assert "4 shards: 0 finished, 1 running, 3 pending (PartitionTimeLimit)\n" in f"{status_text(cluster.root)}\n"
    cluster.look({0, 1, 2, 3})
    cluster.state(0, 2)
    cluster.says(waits[0], *[(made, k, "PENDING", "None") for k in (1, 2, 3)])
    cluster.look({0, 1, 2, 3})
    assert cluster.notes == ["1 running, 3 pending (PartitionTimeLimit)", "3 pending, 1 requeued (Priority)"]


def test_shards_that_failed_are_counted(cluster: Cluster) -> None:
    made = cluster.executor.rounds.add(((0, 1), (2, 3)))
    cluster.says(*[(made, k, "RUNNING", "None") for k in range(2)])

    def fail() -> None:
        cluster.state(0, 1, "failed")
        cluster.state(1, 1, "failed")
        cluster.says((made, 1, "RUNNING", "None"))
        cluster.asleep.append(end)

    def end() -> None:
        assert len(cluster.notes) < 9, cluster.notes
        if "failed" in cluster.notes[-1]:
            cluster.finish(2, 3)
            cluster.says()
        else:
            cluster.asleep.append(end)

    cluster.asleep.append(fail)
    outcomes = list(cluster.executor.outcomes(cluster.event))
    assert [(outcome.shard, bool(outcome.failures)) for outcome in outcomes] == [
        (0, True),
        (1, True),
        (2, False),
        (3, False),
    ]
    assert "2 running, 2 failed" in cluster.notes


def test_looks_without_a_job_count_only_in_a_row(cluster: Cluster) -> None:
    """A queue that shows a job only at times, as while it is requeued, does not add up to its loss."""
    made = cluster.executor.rounds.add(((0,),))
    for _ in range(5):
        cluster.says()
        for _ in range(slurm_module.LATE):
            cluster.look({0})
        cluster.says((made, 0, "RUNNING", "None"))
        cluster.look({0})
    assert cluster.sent == []
    cluster.says()
    for _ in range(slurm_module.LATE + 1):
        cluster.look({0})
    assert [again.groups for again in cluster.sent] == [((0,),)]


def test_a_refusal_in_the_middle_is_tried_again(cluster: Cluster) -> None:
    """As often as it takes, with the same round; it costs the shards no attempt."""
    cluster.executor.rounds.add(((0, 1),))
    cluster.refuses = True
    for _ in range(slurm_module.LATE + 5):
        assert cluster.look({0, 1}) == []
    assert cluster.notes[-1] == "Slurm refused the jobs: Unable to contact slurm controller; trying again"
    assert len(cluster.executor.rounds.read()) == 2
    cluster.refuses = False
    cluster.look({0, 1})
    assert cluster.sent == cluster.executor.rounds.read()[1:]
    assert cluster.executor.attempts == {0: 1, 1: 1}
    cluster.says((cluster.sent[0], 0, "RUNNING", "None"))
    cluster.look({0, 1})
    assert len(cluster.sent) == 1


def test_a_refusal_that_was_none_is_not_tried_again(cluster: Cluster) -> None:
    """sbatch may lose patience with a slurmctld that takes the jobs nevertheless."""
    cluster.executor.rounds.add(((0, 1),))
    cluster.refuses = True
    for _ in range(slurm_module.LATE + 1):
        cluster.look({0, 1})
    cluster.refuses = False
    cluster.says((cluster.executor.rounds.read()[1], 0, "PENDING", "Priority"))
    cluster.look({0, 1})
    assert cluster.sent == []
    assert cluster.notes[-1] == "2 pending (Priority)"


def test_the_first_refusal_ends_it(cluster: Cluster) -> None:
    cluster.refuses = True
    with pytest.raises(RenderError, match="Slurm refused the jobs"):
        list(cluster.executor.outcomes(cluster.event))


def test_a_refusal_leaves_no_files(cluster: Cluster, tmp_path: Path) -> None:
    cluster.refusal.write_text("sbatch: error: no such account\n")
    cluster._program(tmp_path / "bin" / "srun", "true")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "12_0_submitted.pkl").touch()
    tasks = [SlurmTask(str(cluster.root), "train", (k,), CrewOptions()) for k in range(2)]
    for some in (tasks, tasks[:1]):
        with pytest.raises(RenderError, match=r"Slurm refused the jobs: .*no such account"):
            submit_round(Round("x", ((0,), (1,))), jobs, some, SlurmOptions())
    assert [path.name for path in jobs.iterdir()] == ["12_0_submitted.pkl"]


def test_a_queue_that_does_not_answer_is_waited_for_at_the_end(cluster: Cluster) -> None:
    made = cluster.executor.rounds.add(((0, 1, 2, 3),))
    cluster.finish(0, 1, 2, 3)
    cluster.answer.unlink()
    many = slurm_module.ENDING + 5
    cluster.asleep = [lambda: None] * many
    cluster.asleep += [lambda: cluster.says((made, 0, "COMPLETING", "None")), lambda: cluster.says()]
    cluster.executor._let_end(cluster.event)
    assert cluster.asleep == []
    words = "all shards are there, but Slurm does not answer whether its jobs have ended"
    assert cluster.notes == [words] * (many + 1)
    assert not (cluster.answer.parent / "cancelled").exists()


def test_a_job_is_requeued_only_while_it_comes_further(cluster: Cluster) -> None:
    """Finished shards count whole, others as far as they are; those of other jobs do not."""
    task = SlurmTask(str(cluster.root), "train", (0, 1, 2), CrewOptions())
    first = task.checkpoint().function
    assert first == replace(task, done=0)
    assert first.checkpoint() is None
    cluster.finish(3)
    assert first.checkpoint() is None
    cluster.state(1, 3)
    second = first.checkpoint().function
    assert second == replace(task, done=3)
    assert second.checkpoint() is None
    cluster.finish(1)
    cluster.state(2, 1)
    third = second.checkpoint().function
    assert third.done == 5
    assert third.checkpoint() is None

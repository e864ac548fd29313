"""Renders through a real Slurm, and what befalls their jobs: each ends as the same render without it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from slurm_cluster import SlurmCluster
from slurm_renders import BLENDER, SlurmRender

NewRender = Callable[..., SlurmRender]
pytestmark = pytest.mark.slurm


@pytest.mark.render
def test_pairs_by_several_jobs_with_options_of_every_kind(cluster: SlurmCluster, new: NewRender) -> None:
    render = new(12, BLENDER, "laplace(scale=0.05)")
    seen = render.folder / "seen"
    options = ["--setup", "export SEEN=yes", "--setup", f"echo $SEEN $SLURM_JOB_NAME >> {seen}"]
    options += ["--sbatch", "comment=a word", "--sbatch", "nice=7", "--srun=--label", "--srun=--chdir=/"]
    process = render.start(*options, "--gpus", "0", "--mem", "1.5", "--partition", "other", "--worker-memory", "8")
    jobs = render.root / ".render" / "train" / "slurm" / "jobs"
    render.wait_until(lambda: bool(list(jobs.glob("*_submission.sh"))), "jobs are there")
    (script,) = jobs.glob("*_submission.sh")
    array, lines = script.name.removesuffix("_submission.sh"), script.read_text().splitlines()
    told = cluster.job(f"{array}_0")
    render.end(process)
    for line in (
        "#SBATCH --array=0-2%2",
        "#SBATCH --comment='a word'",
        "#SBATCH --cpus-per-task=1",
        "#SBATCH --mem=1500M",
        "#SBATCH --nice=7",
        "#SBATCH --partition=other",
        "#SBATCH --requeue",
        "#SBATCH --time=5",
        "export SEEN=yes",
    ):
        assert line in lines
    assert not any("gpus" in line for line in lines)
    (command,) = (line for line in lines if line.startswith("srun"))
    assert " --cpus-per-task=1 --label --chdir=/ " in command
    assert told | {"Partition": "other", "Requeue": "1", "TimeLimit": "00:05:00", "Comment": "a"} == told
    assert [line.split()[0] for line in seen.read_text().splitlines()] == ["yes"] * 3
    assert set(render.queue()) == {f"{array}_{k}" for k in range(3)}
    assert render.job_states() == {"COMPLETED"}
    render.check()


def test_jobs_run_at_once_and_render_each_sample_once(cluster: SlurmCluster, new: NewRender) -> None:
    """A job of two cores renders two shards at a time; all jobs have begun before any picture is done."""
    render = new(32)
    render.hold(0)
    process = render.start("--cpus", "2", "--max-jobs", "3")
    begun = render.wait_for(6)
    assert len({p.job for p in begun}) == 3
    assert len({p.pid for p in begun}) == 6
    assert len(render.queue()) == 4
    render.go()
    said = render.end(process)
    assert "32 pictures of split train in 8 shards" in said
    assert render.again() == []
    assert render.job_states() == {"COMPLETED"}
    render.check()
    assert render.run() == said  # nothing to do
    assert len(render.queue()) == 4


def test_a_cancelled_job_is_named_and_all_others_finish(cluster: SlurmCluster, new: NewRender) -> None:
    render = new()
    render.hold(2)
    process = render.start()
    begun = render.wait_for(6)
    victim = begun[-1]
    cluster.run("scancel", victim.job)
    cluster.wait_for(victim.job, "CANCELLED")
    render.go()
    said = render.end(process, status=2)
    shard = victim.sample // 4
    assert f"shard {shard}: its job {victim.job} was cancelled; run the same command to submit it again" in said
    assert said.count("shard ") == 1
    assert render.shards() == [k for k in range(4) if k != shard]
    assert len(render.rounds()) == 1
    status = render.here("render", "--status")
    assert f"14 of 16 samples\n  4 shards: 3 finished, 1 stopped\n  shard {shard}: 2 of 4 samples (stopped" in status
    render.run()
    assert render.again() == [4 * shard + 2]  # the one in flight
    render.check()


def test_jobs_cancelled_before_they_begin_stay_cancelled(cluster: SlurmCluster, new: NewRender) -> None:
    """Slurm forgets them at once. The submitting process must not take that for a fault."""
    render = new(12)
    render.hold(2)
    process = render.start("--max-jobs", "1")
    (running,) = {p.job for p in render.wait_for(3)}
    render.wait_until(lambda: len(render.queue()) == 3, "all jobs are there")
    array = running.split("_")[0]
    waiting = sorted({f"{array}_{k}" for k in range(3)} - {running})
    cluster.run("scancel", *waiting)
    render.go()
    said = render.end(process, status=2)
    for job in waiting:
        assert f"its job {job} was cancelled" in said
    assert len(render.rounds()) == 1
    assert len(render.shards()) == 1
    render.run()
    assert render.again() == []
    render.check()


def test_a_killed_worker_is_replaced_inside_its_job(cluster: SlurmCluster, new: NewRender) -> None:
    render = new()
    render.hold(2)
    process = render.start()
    victim = render.wait_for(6)[-1]
    os.kill(victim.pid, signal.SIGKILL)
    render.wait_for(7)  # the sample in flight, by the next process
    render.go()
    render.end(process)
    assert render.again() == [victim.sample]
    assert {p.job for p in render.pictures() if p.sample == victim.sample} == {victim.job}
    assert render.job_states() == {"COMPLETED"}
    render.check()


def test_a_killed_job_is_submitted_again(cluster: SlurmCluster, new: NewRender) -> None:
    render = new()
    render.hold(2)
    process = render.start()
    victim = render.wait_for(6)[-1]
    (pid,) = render.job_processes(victim.job)
    os.kill(pid, signal.SIGKILL)
    cluster.wait_for(victim.job, "FAILED")
    render.wait_until(lambda: len(render.rounds()) == 2, "it is submitted again")
    assert render.rounds()[1].groups == ((victim.sample // 4,),)
    render.go()
    render.end(process)
    assert render.again() == [victim.sample]
    assert render.job_states() == {"COMPLETED", "FAILED"}
    render.check()


def test_a_drained_node_holds_up_what_has_not_begun(cluster: SlurmCluster, new: NewRender) -> None:
    render = new()
    render.hold(2)
    process = render.start()
    render.wait_for(6)
    status = render.here("render", "--status")
    assert re.search(r" of 16 samples\n  4 shards: 0 finished, 2 running, 2 pending \(\w+\)\n", status)
    cluster.drain()
    render.go()
    render.wait_until(lambda: len(render.shards()) == 2, "the jobs that ran have ended")
    render.wait_until(lambda: render.job_states() == {"COMPLETED", "PENDING"}, "the others wait")
    status = render.here("render", "--status")
    assert re.search(r"8 of 16 samples\n  4 shards: 2 finished, 2 pending \(.+\)\n  missing: shards 2-3\n", status)
    assert process.poll() is None
    cluster.resume()
    render.end(process)
    assert render.again() == []
    assert len(render.queue()) == 4
    render.check()


def test_a_job_past_its_time_limit_goes_on_where_it_stopped(cluster: SlurmCluster, new: NewRender) -> None:
    render = new(4)
    render.hold(2)
    process = render.start("--time", "1")
    (job,) = {p.job for p in render.wait_for(3)}
    render.wait_until(lambda: cluster.job(job)["Restarts"] == "1", "it is requeued")
    render.wait_until(lambda: render.job_states() == {"PENDING"}, "it waits to be started again")
    status = render.here("render", "--status")
    assert "2 of 4 samples\n  1 shards: 0 finished, 1 requeued" in status
    assert f"\n  shard 0: 2 of 4 samples (job {job} PENDING" in status
    render.end(process)  # each process may render two pictures: just what is left
    assert render.again() == [2]
    assert {p.job for p in render.pictures()} == {job} == set(render.queue())
    render.check()


def test_the_node_dies_and_comes_back(cluster: SlurmCluster, new: NewRender) -> None:
    render = new(12)
    render.hold(2)
    process = render.start()
    jobs = {p.job for p in render.wait_for(6)}
    cluster.kill_node()
    status = render.here("render", "--status")
    assert re.search(r" of 12 samples\n  3 shards: 0 finished, 1 pending( \(.+\))?, 2 requeued( \(.+\))?\n", status)
    cluster.restart_node()
    render.wait_until(lambda: len(render.shards()) == 2, "what had begun is finished")
    render.go()
    render.end(process)
    assert render.again() == [2, 6]
    assert {cluster.job(job)["Restarts"] for job in jobs} == {"1"}
    assert len(render.queue()) == 3
    render.check()


def test_a_sample_that_crashes_blender_is_named_and_the_others_finish(cluster: SlurmCluster, new: NewRender) -> None:
    render = new(12)
    render.tell("crash", render.seed(5))
    said = render.run("--job-shards", "2", status=2)
    assert "all else is stored:\nsample 5 of shard 1: the render worker" in said
    assert "SIGABRT" in said
    assert render.shards() == [0, 2]
    assert render.again() == [5]  # in a fresh process
    assert render.job_states() == {"COMPLETED"}
    status = render.here("render", "--status")
    assert "11 of 12 samples\n  3 shards: 2 finished, 1 failed\n  failed: sample 5 of shard 1: the render" in status
    render.tell("crash", 0)
    render.run("--job-shards", "2")
    assert render.again() == [5, 5]
    render.check()


def test_jobs_that_fail_at_once_are_given_up_with_their_words(cluster: SlurmCluster, new: NewRender) -> None:
    """A node that cannot render: its jobs are tried thrice."""
    render = new(8)
    said = render.run("--setup", "export IDENT3D_BLENDER_PYTHON=/nowhere", "--node-python", "false", status=2)
    assert len(render.rounds()) == 3
    assert "shard 0: 3 jobs ended without it" in said
    assert "FAILED (NonZeroExitCode)" in said
    assert render.here("render", "--status").endswith("2 shards: 0 finished, 2 not begun\n")
    python = render.control / "python"
    script = python.read_text()
    python.write_text('#!/bin/sh\n[ -n "$SLURM_JOB_ID" ] && echo no Blender here >&2 && exit 7\n' + script)
    said = render.run(status=2)
    assert "with status 7; its log" in said
    assert "no Blender here" in said
    python.write_text(script)
    render.run()
    assert render.again() == []
    render.check()

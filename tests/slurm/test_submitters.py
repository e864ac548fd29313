"""What becomes of a render on Slurm whose submitting process ends, is refused, or meets another."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from gated import Gated
from slurm_cluster import SlurmCluster
from slurm_renders import SlurmRender

NewRender = Callable[..., SlurmRender]
pytestmark = pytest.mark.slurm


def counting_squeue(folder: Path) -> tuple[str, Path]:
    """A PATH on which squeue notes its calls, and fails while there is a file `silent`; and the file of a line each."""
    calls = folder / "calls"
    squeue = folder / "bin" / "squeue"
    squeue.parent.mkdir()
    fail = f"[ -e {folder}/silent ] && exit 1"
    squeue.write_text(f'#!/bin/sh\necho call >> {calls}\n{fail}\nexec {shutil.which("squeue")} "$@"\n')
    squeue.chmod(0o755)
    calls.touch()
    return f"{squeue.parent}:{os.environ['PATH']}", calls


def test_a_killed_submitter_is_started_again(cluster: SlurmCluster, new: NewRender) -> None:
    """It takes over what is at work, and submits nothing twice."""
    render = new()
    render.hold(2)
    first = render.start()
    begun = render.wait_for(6)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    status = render.here("render", "--status")
    assert re.search(r" of 16 samples\n  4 shards: 0 finished, 2 running, 2 pending \(\w+\)\n  shard 0: ", status)
    path, calls = counting_squeue(render.folder)
    second = render.start(PATH=path)
    render.wait_until(lambda: len(calls.read_text().splitlines()) > 3, "it looks at the queue")
    assert {p.job for p in render.pictures()} == {p.job for p in begun}
    render.go()
    render.end(second)
    assert len(render.arrays()) == 1
    assert render.again() == []
    render.check()


def test_jobs_end_without_their_submitter_and_it_finds_their_work(cluster: SlurmCluster, new: NewRender) -> None:
    render = new()
    render.hold(2)
    first = render.start()
    render.wait_for(6)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    render.go()
    cluster.wait_until(lambda: render.job_states() == {"COMPLETED"}, "all jobs have ended")
    status = render.here("render", "--status")
    assert f"16 of 16 samples\n  4 shards: 4 finished\n  all shards are there: ident3d finalize {render.root}" in status
    render.here("finalize")
    assert render.again() == []
    render.check()
    assert render.here("render", "--status").endswith("split train: finished, 16 samples in 4 shards\n")
    assert "16 pictures of split train in 4 shards" in render.run()


def test_shards_damaged_since_they_were_rendered(cluster: SlurmCluster, new: NewRender) -> None:
    """Jobs are asked for what is missing by name. What turns out damaged when all are there must count as missing."""
    render = new()
    render.hold(2)
    first = render.start()
    render.wait_for(6)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    render.go()
    cluster.wait_until(lambda: render.job_states() == {"COMPLETED"}, "all jobs have ended")
    for shard in (1, 3):
        path = render.root / "train" / f"train-00000{shard}.tar"
        data = bytearray(path.read_bytes())
        data[700] ^= 4
        path.write_bytes(data)
    said = render.run(status=2)
    assert "2 of 4 shards of split train are missing or damaged; run the same command again" in said
    assert f"ident3d render {render.root} --shards 1,3\n" in said
    render.run()
    assert render.again() == [4, 5, 6, 7, 12, 13, 14, 15]
    render.check()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_submitter_says_how_to_end_its_jobs(
    cluster: SlurmCluster, new: NewRender, sign: signal.Signals
) -> None:
    """Of two rounds, one of which is the second try of a shard."""
    render = new(12)
    render.hold(2)
    process = render.start()
    victim = render.wait_for(6)[-1]
    (pid,) = render.job_processes(victim.job)
    os.kill(pid, signal.SIGKILL)
    render.wait_until(lambda: len(render.rounds()) == 2, "the job is submitted again")
    render.wait_until(lambda: len(render.arrays()) == 2, "Slurm has it")
    os.killpg(process.pid, sign)
    said = render.end(process, status=128 + sign)
    assert re.search(r"interrupted: \d of 12 pictures are stored in .*; run the same command to go on; its jobs", said)
    command = re.search(r"its jobs go on; to end them: (scancel( \d+)+)\n", said)
    assert command is not None
    assert set(command[1].split()[1:]) == render.arrays()
    assert "RUNNING" in render.job_states()
    cluster.run(*command[1].split())
    cluster.wait_until(lambda: cluster.processes() == {}, "the jobs are gone")
    assert not {"RUNNING", "PENDING"} & render.job_states()
    status = render.here("render", "--status")
    assert re.search(r"3 shards: 0 finished, \d stopped", status)
    assert re.search(r"shard 0: \d of 4 samples \(stopped, was job \d+_\d+ on", status)
    render.go()
    render.run()
    assert {2, 6} <= set(render.again()) <= {2, 6, 10}  # what was in flight
    render.check()


def test_a_partition_that_is_not_there(cluster: SlurmCluster, new: NewRender) -> None:
    render = new(8)
    said = render.run("--partition", "nowhere", status=2)
    assert "Slurm refused the jobs: " in said
    assert "invalid partition specified: nowhere" in said
    assert "2 shards: 0 finished, 2 not begun" in render.here("render", "--status")
    said = render.run("--sbatch", "gibberish=1", status=2)
    assert "unrecognized option '--gibberish=1'" in said
    render.run("--partition", "other")
    assert len(render.arrays()) == 1
    render.check()


def test_a_controller_that_does_not_answer(cluster: SlurmCluster, new: NewRender) -> None:
    """At the first start, and with jobs that may be at work: nothing is submitted that could be there already."""
    render = new(8)
    silent = render.folder / "slurm.conf"
    text = re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", cluster.config.read_text())
    silent.write_text(re.sub(r"MessageTimeout=\d+", "MessageTimeout=1", text))
    (render.folder / "plugstack.conf").touch()
    said = render.run(status=2, SLURM_CONF=str(silent))
    assert "Unable to contact slurm controller" in said
    render.hold(2)
    process = render.start()
    render.wait_for(6)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = render.rounds()
    said = render.run(status=2, SLURM_CONF=str(silent))
    assert "squeue does not answer; is Slurm up? Run the same command again when it is" in said
    assert render.rounds() == before
    process = render.start()
    render.go()
    render.end(process)
    assert len(render.arrays()) == 1
    assert render.again() == []
    render.check()


def test_a_controller_that_does_not_answer_for_a_while(cluster: SlurmCluster, new: NewRender) -> None:
    render = new(12)
    render.hold(2)
    path, calls = counting_squeue(render.folder)
    process = render.start(PATH=path)
    render.wait_for(6)
    (render.folder / "silent").touch()
    before = len(calls.read_text().splitlines())
    render.wait_until(lambda: len(calls.read_text().splitlines()) > before + 5, "it has asked some times in vain")
    (render.folder / "silent").unlink()
    render.go()
    render.end(process)
    assert len(render.queue()) == 3
    assert render.again() == []
    render.check()


def test_others_at_the_same_folder(cluster: SlurmCluster, new: NewRender) -> None:
    """A second submitter and a whole render here are refused; a part by hand is as good as a job's."""
    render = new(12)
    render.hold(2)
    process = render.start("--max-jobs", "1")
    assert {p.sample for p in render.wait_for(3)} == {0, 1, 2}
    said = render.here("render", *render.words, "--executor", "slurm", status=2)
    assert f"another process ({process.pid}) submits it to Slurm and waits; look on with --status" in said
    said = render.here("render", *render.words, status=2)
    assert re.search(r"another render \(process \d+\) is at work in it", said)
    assert f"another process ({process.pid}) submits it to Slurm and waits" in render.here("finalize", status=2)
    free = Gated(render.folder / "by-hand").python
    render.here("render", "--shards", "2", "--blender-python", free)
    assert render.shards() == [2]
    assert len(render.pictures()) == 3
    render.go()
    render.end(process)
    assert {p.sample // 4 for p in render.pictures()} == {0, 1}
    assert render.job_states() == {"COMPLETED"}
    render.check()


def test_jobs_end_before_their_files_are_removed(cluster: SlurmCluster, new: NewRender) -> None:
    """Shards are there before the jobs that rendered them have ended."""
    render = new(8)
    render.run("--setup", "trap 'sleep 2' EXIT")
    assert render.job_states() == {"COMPLETED"}
    render.check()


def test_jobs_that_have_nothing_left_to_do_are_cancelled(cluster: SlurmCluster, new: NewRender) -> None:
    """What a job waits for has been rendered by hand, and it could wait for days."""
    render = new(8)
    render.hold(2)
    process = render.start("--max-jobs", "1", ENDING="3")
    (job,) = {p.job for p in render.wait_for(3)}
    cluster.drain()
    render.here("render", "--shards", "1", "--blender-python", Gated(render.folder / "by-hand").python)
    render.go()
    render.end(process)
    cluster.wait_for(job, "COMPLETED")
    assert "PENDING" not in render.job_states()
    render.check()


def test_submitted_from_inside_a_job(cluster: SlurmCluster, new: NewRender) -> None:
    """What Slurm tells the outer job must not reach the inner ones: an array's task that submits one job, and more."""
    render = new(4)
    words = render.command("--executor", "slurm", "--cpus", "2", "--time", "5", "--mem", "1")
    said = render.folder / "said"
    command = " ".join(f"'{word}'" for word in words)
    outer = cluster.submit(command, "--array=3", "--mem-per-cpu=100M", "--cpus-per-task=1", f"--output={said}")
    render.wait_until(lambda: cluster.queue()[f"{outer}_3"] not in ("PENDING", "RUNNING", "COMPLETING"), "it has ended")
    assert "4 pictures of split train in 1 shards" in said.read_text()
    assert {p.job for p in render.pictures()} == render.arrays()
    render.check()


def test_a_folder_that_is_deleted_and_begun_again(cluster: SlurmCluster, new: NewRender) -> None:
    """Slurm still knows the jobs of the first render."""
    render = new(8)
    render.run()
    shutil.rmtree(render.root)
    (render.control / "pictures").unlink()
    render.run()
    assert len(render.arrays()) == 2
    assert render.again() == []
    render.check()

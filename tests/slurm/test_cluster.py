"""The cluster that the other tests here stand on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from slurm_cluster import LINKS, SlurmCluster, running

pytestmark = pytest.mark.slurm


def test_runs_a_command(cluster: SlurmCluster) -> None:
    assert cluster.run("srun", "hostname").strip() == os.uname().nodename


def test_tasks_of_an_array_run_at_once(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Each task waits until all have begun."""
    wait = "until [ $(ls | wc -l) = 4 ]; do sleep 0.05; done"
    job = cluster.submit(
        f"touch $SLURM_ARRAY_TASK_ID; {wait}", "--array=0-3", f"--chdir={tmp_path}", "--output=/dev/null"
    )
    for task in range(4):
        assert cluster.wait_for(f"{job}_{task}", "COMPLETED", "FAILED") == "COMPLETED"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_one_task_is_cancelled(cluster: SlurmCluster) -> None:
    job = cluster.submit("sleep 1000", "--array=0-1", "--output=/dev/null")
    for task in range(2):
        cluster.wait_for(f"{job}_{task}", "RUNNING")
    cluster.run("scancel", f"{job}_1")
    cluster.wait_for(f"{job}_1", "CANCELLED")
    assert cluster.queue()[f"{job}_0"] == "RUNNING"
    cluster.wait_until(lambda: not cluster.processes(f"{job}_1"), "the task's processes are gone")


def test_a_killed_process_fails_its_job(cluster: SlurmCluster) -> None:
    job = cluster.submit("exec sleep 1000", "--output=/dev/null")
    cluster.wait_until(lambda: "sleep 1000" in cluster.processes(job).values(), "the process runs")
    (pid,) = (pid for pid, command in cluster.processes(job).items() if command == "sleep 1000")
    os.kill(pid, signal.SIGKILL)
    cluster.wait_for(job, "FAILED")
    assert cluster.job(job)["ExitCode"] == "0:9"


def test_a_drained_node_starts_nothing_until_it_is_resumed(cluster: SlurmCluster) -> None:
    running = cluster.submit("sleep 1000", "--output=/dev/null")
    cluster.wait_for(running, "RUNNING")
    cluster.drain()
    waiting = cluster.submit("true", "--output=/dev/null")
    assert cluster.node_state() == "draining"
    cluster.wait_until(lambda: cluster.job(waiting)["Reason"] not in ("None", "Priority"), "Slurm says why it waits")
    assert cluster.queue() | {running: "RUNNING", waiting: "PENDING"} == cluster.queue()
    cluster.resume()
    cluster.wait_for(waiting, "COMPLETED")


def test_the_node_dies_with_its_jobs_and_comes_back(cluster: SlurmCluster) -> None:
    job = cluster.submit("sleep 1000", "--output=/dev/null")
    cluster.wait_for(job, "RUNNING")
    cluster.kill_node()
    assert cluster.processes() == {}
    cluster.restart_node()
    cluster.wait_for(job, "RUNNING")
    assert cluster.job(job)["Restarts"] == "1"


def test_leaves_nothing_behind(cluster: SlurmCluster, tmp_path: Path) -> None:
    """In a folder too deep for sockets, while another cluster runs; one of a job's processes has left its session."""
    deep = tmp_path.joinpath(*["a-name-of-some-length"] * 6)
    with pytest.raises(KeyboardInterrupt), SlurmCluster(deep) as second:  # noqa: PT012 - what is raised is the last line
        job = second.submit("setsid sleep 1000 & sleep 1001", "--output=/dev/null")
        sleeping = {"sleep 1000", "sleep 1001"}
        second.wait_until(lambda: sleeping <= set(second.processes(job).values()), "both processes run")
        assert {Path(command.split()[0]).name for command in at_work(second)} >= {"munged", "slurmctld", "slurmd"}
        raise KeyboardInterrupt
    assert at_work(second) == []
    assert [link for link in Path(LINKS).glob("slurm-*/at") if link.resolve() == deep] == []
    assert cluster.node_state() == "idle"


def at_work(cluster: SlurmCluster) -> list[str]:
    return [
        command for _, environment, command in running() if f"SLURM_CONF={cluster.config}" in environment.split("\0")
    ]

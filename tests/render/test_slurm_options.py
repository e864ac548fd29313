"""What may be asked of Slurm, what is kept of its jobs, and what is told where it is absent. No cluster is used."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ident3d import RenderOptions, SpecError
from ident3d.render.crew import CrewOptions
from ident3d.render.options import SlurmOptions, parse_shards
from ident3d.render.slurm import SlurmTask, check_slurm, submit_round
from ident3d.render.slurm_queue import (
    Job,
    Round,
    Rounds,
    array_limit,
    arrays_left,
    in_hand,
    log_end,
    outside_of_jobs,
    own_jobs,
    read_queue,
)
from ident3d.render.work import ranges

Fake = Callable[[str, str], None]

SET_HERE = ["job-name", "array", "output", "error", "open-mode", "signal", "requeue", "no-requeue", "time"]
SET_HERE += ["cpus-per-task", "mem", "partition", "account", "qos", "constraint"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"time": 0}, "time = 0: expected 1 or more"),
        ({"time": -5}, "time = -5: expected 1 or more"),
        ({"cpus": 0}, "cpus = 0: expected 1 or more"),
        ({"gpus": -1}, "gpus = -1: expected 0 or more"),
        ({"max_jobs": 0}, "max-jobs = 0: expected 1 or more"),
        ({"job_shards": 0}, "job-shards = 0: expected 1 or more"),
        ({"mem": 0.0}, "mem = 0.0: expected gigabytes"),
        ({"mem": float("nan")}, "mem = nan: expected gigabytes"),
        ({"mem": 1.9}, "mem = 1.9: each of a job's 4 workers would get 0.47 GB, expected 0.5 or more"),
        ({"mem": 0.9, "gpus": 2}, "mem = 0.9: each of a job's 2 workers would get 0.45 GB"),
        ({"sbatch": ("--comment=x",)}, "sbatch '--comment=x': expected an option of sbatch as key or key=value"),
        ({"sbatch": ("nice=1", "exclusive\n")}, "sbatch 'exclusive\\n': expected"),
        ({"sbatch": ("nice=1", "--exclusive")}, "sbatch '--exclusive': expected"),
        ({"sbatch": ("=1",)}, "sbatch '=1': expected"),
        ({"setup": ("module load X\nrm x",)}, "expected one line"),
        ({"srun": ("--a\n--b",)}, "expected one line"),
    ],
)
def test_slurm_options_out_of_range(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        SlurmOptions(**change)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"executor": "kubernetes"}, "executor 'kubernetes': expected one of local, slurm"),
        ({"shards": "0-1"}, "shards, executor: --shards renders here; leave out one of the two"),
        ({"slurm": SlurmOptions(gpus=1)}, "gpus = 1, device 'auto': name what the nodes have"),
        ({"slurm": SlurmOptions(gpus=2), "device": "cpu"}, "gpus = 2, device 'cpu': name what the nodes have"),
        ({"device": "optix"}, "device 'optix': jobs without --gpus have none"),
        ({"samples": None}, "samples: missing"),
        ({"workers": 3}, "workers = 3: with --executor slurm a job has one a core or GPU; use --cpus or --gpus"),
    ],
)
def test_options_that_do_not_go_with_slurm(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        RenderOptions(**{"out": tmp_path / "d", "samples": 8, "executor": "slurm", **change})
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", SET_HERE)
def test_options_of_sbatch_that_are_set_here(key: str) -> None:
    for text in (key, f"{key}=x"):
        with pytest.raises(SpecError) as caught:
            SlurmOptions(sbatch=("nice=1", text))
        assert str(caught.value) == f"sbatch {text!r}: set by ident3d; use its own option where there is one"


@pytest.mark.parametrize(
    ("sbatch", "lines"),
    [
        ((), {"--gpus-per-node=2"}),
        (("gres=scratch:10",), {"--gres=scratch:10", "--gpus-per-node=2"}),
        (("gres=gpu:a100:2",), {"--gres=gpu:a100:2"}),
        (("gpus-per-node=a100:2",), {"--gpus-per-node=a100:2"}),
        (("gpus=a100:2", "exclusive"), {"--gpus=a100:2", "--exclusive"}),
        (("exclusive", "comment=a=b c"), {"--exclusive", "--comment='a=b c'", "--gpus-per-node=2"}),
    ],
)
def test_what_sbatch_is_told(fake: Fake, tmp_path: Path, sbatch: tuple[str, ...], lines: set[str]) -> None:
    said = tmp_path / "said"
    fake("srun", "true")
    fake("sbatch", f"cat $1 > {said}; echo Submitted batch job 12")
    (tmp_path / "jobs").mkdir()
    options = SlurmOptions(gpus=2, sbatch=sbatch)
    tasks = [SlurmTask(str(tmp_path), "train", (k,), CrewOptions()) for k in range(2)]
    submit_round(Round("a-0", ((0,), (1,))), tmp_path / "jobs", tasks, options)
    told = {line.removeprefix("#SBATCH ") for line in said.read_text().splitlines() if line.startswith("#SBATCH ")}
    names = ("--gpus", "--gres", "--exclusive", "--comment")
    assert {line for line in told if line.startswith(names)} == lines
    assert {"--requeue", "--job-name=a-0"} <= told
    assert options.workers == 2


def test_options_of_slurm_without_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="partition, max-jobs: only with --executor slurm"):
        RenderOptions(tmp_path / "d", 8, slurm=SlurmOptions(partition="x", max_jobs=3))


@pytest.mark.parametrize(("gpus", "cpus", "workers"), [(0, 3, 3), (2, 8, 2)])
def test_a_job_has_a_worker_for_each_core_or_gpu(gpus: int, cpus: int, workers: int) -> None:
    assert SlurmOptions(gpus=gpus, cpus=cpus).workers == workers


@pytest.mark.parametrize(
    ("text", "count", "numbers"),
    [
        ("3", None, [3]),
        ("3-7", 8, [3, 4, 5, 6, 7]),
        ("0,4,9-12", 13, [0, 4, 9, 10, 11, 12]),
        ("5-6,1,6,0-2", 7, [0, 1, 2, 5, 6]),
        (" 1 , 2-2 ", 3, [1, 2]),
        ("0-999999999", None, [0, 999_999_999]),  # not a list of them all
    ],
)
def test_shards_by_text(text: str, count: int | None, numbers: list[int]) -> None:
    assert parse_shards(text, count) == numbers


@pytest.mark.parametrize("text", ["", ",", "a", "3-", "-3", "7-3", "1,,2", "1.5", "1-2-3", "1;2", "1234567890"])
def test_what_names_no_shards(text: str) -> None:
    with pytest.raises(SpecError, match="expected numbers and ranges, such as 3-7 or 0,4,9-12"):
        parse_shards(text)


def test_a_shard_that_is_not_there() -> None:
    with pytest.raises(SpecError, match="shards '2-4': the split has shards 0 to 3"):
        parse_shards("2-4", 4)


@pytest.mark.parametrize("text", ["0", "3-7", "0,2,4", "0-1,3,5-9", "7,9"])
def test_ranges_are_what_is_parsed(text: str) -> None:
    assert ranges(parse_shards(text, 10)) == text


def test_rounds_are_found_again_and_never_share_a_name(tmp_path: Path) -> None:
    work = tmp_path / ".render" / "train"
    work.mkdir(parents=True)
    rounds = Rounds(work, tmp_path, "train")
    assert rounds.read() == []
    made = [rounds.add(((0, 1), (2,))), rounds.add(((2,),))]
    assert Rounds(work, tmp_path, "train").read() == made
    assert made[0].groups == ((0, 1), (2,))
    (work / "slurm" / "round-0002.json").write_text('{"name": "torn')
    assert rounds.read() == made
    third = rounds.add(((3,),))
    assert rounds.read() == [*made, third]
    others = [
        Rounds(work, tmp_path / "elsewhere", "train").prefix,
        Rounds(work, tmp_path, "test").prefix,
    ]
    assert rounds.prefix not in others
    for path in (work / "slurm").iterdir():
        path.unlink()
    assert rounds.add(((0, 1), (2,))).name not in [r.name for r in [*made, third]]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts a program in place of one of Slurm's: a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return make


ROUNDS = [Round("a-0", ((0, 1), (2,), (3,))), Round("a-1", ((2,),))]


def test_the_queue_is_read(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    monkeypatch.setenv("SQUEUE_FORMAT2", "JobID")
    asked = tmp_path / "asked"
    lines = [
        "a-0|0|RUNNING|None|7_0",
        "a-0|1|FAILED|NonZeroExitCode|7_1",
        "a-0|2|PENDING|Nodes required for job are DOWN, DRAINED|7_2",
        "a-1|N/A|PENDING|BeginTime|9",  # an array of one is a plain job
    ]
    fake("squeue", f'echo "$@" > {asked}; env | grep SQUEUE_ >> {asked}\ncat <<EOF\n{chr(10).join(lines)}\nEOF')
    queue = read_queue(ROUNDS)
    assert queue is not None
    assert queue["a-0", 2] == Job("PENDING", "Nodes required for job are DOWN, DRAINED", "7_2")
    assert queue["a-1", 0] == Job("PENDING", "BeginTime", "9")
    assert asked.read_text() == "-h -r -t all -n a-0,a-1 -o %j|%K|%T|%r|%i\n"
    assert in_hand(ROUNDS, queue) == {0: ("a-0", 0), 1: ("a-0", 0), 3: ("a-0", 2), 2: ("a-1", 0)}
    assert arrays_left(queue) == ["7", "9"]
    del queue["a-1", 0]
    assert 2 not in in_hand(ROUNDS, queue)


def test_no_rounds_need_no_queue(fake: Fake) -> None:
    fake("squeue", "exit 1")
    assert read_queue([]) == {}


@pytest.mark.parametrize("script", ["exit 1", "echo 'a-0|0|RUNNING|None|7_0'; exit 1"])
def test_a_queue_that_does_not_answer_is_not_an_empty_one(fake: Fake, script: str) -> None:
    fake("squeue", script)
    assert read_queue(ROUNDS) is None
    assert own_jobs() is None


def test_a_queue_that_answers_with_nothing(fake: Fake) -> None:
    fake("squeue", "true")
    assert read_queue(ROUNDS) == {}
    assert own_jobs() == set()


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED"])
def test_jobs_that_have_not_ended(state: str) -> None:
    assert not Job(state, "None", "1").over


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_jobs_that_have_ended(state: str) -> None:
    assert Job(state, "None", "1").over
    assert not Job(state, "None", "1").waits


@pytest.mark.parametrize(
    ("script", "limit"),
    [
        ("echo 'MaxArraySize            = 501'", 500),
        ("echo 'MaxArraySize            = 4000001'", 1000),
        ("echo 'MaxArraySize = 1'", 1),
        ("echo 'Something = 3'", 1000),
        ("exit 1", 1000),
    ],
)
def test_how_many_jobs_an_array_may_have(fake: Fake, script: str, limit: int) -> None:
    fake("scontrol", script)
    assert array_limit() == limit


def test_a_part_of_slurm_is_absent(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("sbatch", "true")
    fake("squeue", "true")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(SpecError, match=r"executor slurm: no srun on this machine; run this on a node that submits"):
        check_slurm()


def test_no_slurm_here_through_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = [sys.executable, "-m", "ident3d", "render", str(tmp_path / "d"), "--samples", "4", "--executor", "slurm"]
    environment = {**os.environ, "PATH": str(tmp_path / "bin")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("ident3d: executor slurm: no sbatch on this machine; run this on a node that submits")
    assert "`ident3d render OUT --shards A-B` by any other scheduler" in done.stderr
    assert not (tmp_path / "d").exists()


def test_no_submitit_through_the_command_line(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['submitit'] = None\nfrom ident3d.cli import main; main()"
    command = [sys.executable, "-c", hide, "render", str(tmp_path / "d"), "--samples", "4", "--executor", "slurm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "ident3d: executor slurm: submitit is absent; pip install 'ident3d[slurm]'\n"
    assert not (tmp_path / "d").exists()


def test_the_job_that_submits_is_hidden_from_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    overruling = ["JOB_NAME", "ARRAY_INX", "SIGNAL", "NO_REQUEUE", "REQUEUE", "OPEN_MODE", "OUTPUT", "ERROR"]
    overruling.append("TIMELIMIT")
    names = ["SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_MEM_PER_CPU", "SLURM_CONF", "SBATCH_ACCOUNT"]
    for name in (*names, *(f"SBATCH_{word}" for word in overruling)):
        monkeypatch.setenv(name, "x")
    before = dict(os.environ)
    with outside_of_jobs():
        assert {name for name in os.environ if name.startswith("SLURM_")} == {"SLURM_CONF"}
        assert {name for name in os.environ if name.startswith("SBATCH_")} == {"SBATCH_ACCOUNT"}
    assert dict(os.environ) == before


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "7_0_log.out"
    assert log_end(log) == "nothing"
    log.write_text("a\nb\n\nc\nident3d: no Blender\nsrun: error: task 0: Exited\nslurmstepd: error: x\n")
    assert log_end(log) == "b c ident3d: no Blender"


def test_a_task_that_cannot_render_ends_with_words(tmp_path: Path) -> None:
    (tmp_path / ".render" / "logs").mkdir(parents=True)
    task = SlurmTask(str(tmp_path), "train", (0,), CrewOptions())
    with pytest.raises(SystemExit, match=r"ident3d: .*no render of split train is in progress there"):
        task()
    assert task.checkpoint().function == dataclasses.replace(task, done=0)

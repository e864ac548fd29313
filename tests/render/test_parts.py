"""Shards rendered by hand, as under any scheduler, the dataset that is made of them, and what is told on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gated import Gated, files

from ident3d import BusyError, DatasetError, RenderOptions, SpecError, render_dataset
from ident3d.render.dataset import finalize, render_part
from ident3d.render.finish import gpus_folder
from ident3d.render.folder import RenderFolder
from ident3d.render.status import status_text
from ident3d.render.work import SplitWork
from ident3d.shards.verify import verify_dataset

SAMPLES = 16
WORDS = f"--samples {SAMPLES} --resolution 16 --quality draft --shard-size 4 --workers 1 --quiet".split()
PATIENCE_S = 120


@pytest.fixture
def worker(tmp_path: Path) -> Gated:
    return Gated(tmp_path / "control")


@pytest.fixture
def whole(tmp_path: Path, worker: Gated) -> RenderOptions:
    """A render of four shards; not begun."""
    return RenderOptions(
        tmp_path / "d",
        SAMPLES,
        resolution=16,
        quality="draft",
        shard_size=4,
        workers=1,
        quiet=True,
        blender_python=worker.python,
    )


def part(whole: RenderOptions, shards: str) -> RenderOptions:
    """Some shards, by the plan that is there."""
    return RenderOptions(whole.out, shards=shards, workers=1, quiet=True, blender_python=whole.blender_python)


def undisturbed(whole: RenderOptions) -> dict[str, bytes]:
    control = whole.out.with_name("free")
    root = whole.out.with_name("undisturbed")
    render_dataset(replace(whole, out=root, shards=None, blender_python=Gated(control).python))
    return files(root)  # type: ignore[no-any-return]


def start(whole: RenderOptions, *options: str) -> subprocess.Popen[str]:
    assert whole.blender_python
    command = [sys.executable, "-m", "ident3d", "render", str(whole.out), *options]
    command += ["--blender-python", whole.blender_python]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def wait_until(happened: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes if p.poll()]
        time.sleep(0.02)


def said_by(process: subprocess.Popen[str], status: int = 0) -> str:
    said = "".join(process.communicate())
    assert process.returncode == status, said
    return said


@pytest.mark.render
def test_parts_make_what_a_whole_render_makes(tmp_path: Path) -> None:
    pairs = RenderOptions(
        tmp_path / "d",
        8,
        resolution=16,
        quality="draft",
        shard_size=2,
        pairs="laplace(scale=0.05)",
        workers=1,
        quiet=True,
    )
    assert render_part(replace(pairs, shards="2-3")) == [0, 1]
    assert render_part(RenderOptions(pairs.out, shards="0,2", quiet=True)) == [1]
    assert render_part(replace(pairs, shards="1")) == []
    finalize(pairs.out)
    render_dataset(replace(pairs, out=tmp_path / "whole"))
    assert files(pairs.out) == files(tmp_path / "whole")
    assert verify_dataset(pairs.out) == []
    assert render_part(replace(pairs, shards="0")) == []  # finished


def test_two_parts_at_once_that_both_begin(worker: Gated, whole: RenderOptions) -> None:
    """Neither finds a plan; each renders its own shards, at the same time."""
    worker.hold(1)
    processes = [start(whole, *WORDS, "--shards", shards) for shards in ("0-1", "2-3")]
    wait_until(lambda: len(worker.pictures()) == 4, *processes)
    assert {p.sample for p in worker.pictures()} == {0, 1, 8, 9}
    worker.go()
    for process, shards in zip(processes, ("0-1", "2-3"), strict=True):
        assert f"shards {shards} of split train are finished; " in said_by(process)
    assert worker.again() == []
    assert "4 shards: 4 finished\n  all shards are there: ident3d finalize" in status_text(whole.out)
    finalize(whole.out)
    assert files(whole.out) == undisturbed(whole)


def test_parts_that_overlap(worker: Gated, whole: RenderOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for a while, then is refused; another that waits long enough renders what is left."""
    worker.hold(1)
    first = start(whole, *WORDS, "--shards", "0-2")
    wait_until(lambda: len(worker.pictures()) == 2, first)
    hold = SplitWork.hold
    with monkeypatch.context() as patch:
        patch.setattr(SplitWork, "hold", lambda work, shards: hold(work, shards, wait=0.3))
        with pytest.raises(BusyError, match=rf"shard 2 is being rendered by another process \({first.pid}\)"):
            render_part(part(whole, "2-3"))
    second = start(whole, "--workers", "1", "--shards", "2-3")
    worker.go()
    assert "are finished; " in said_by(first)
    assert "all are there: ident3d finalize" in said_by(second)
    assert worker.again() == []
    finalize(whole.out)
    assert files(whole.out) == undisturbed(whole)


def test_a_whole_render_and_a_part_keep_out_of_each_others_way(worker: Gated, whole: RenderOptions) -> None:
    worker.hold(1)
    first = start(whole, *WORDS, "--shards", "0")
    wait_until(lambda: len(worker.pictures()) == 2, first)
    with pytest.raises(BusyError, match=r"another render \(process \d+\) is at work in it"):
        render_dataset(whole)
    with pytest.raises(BusyError, match=r"another render \(process \d+\) is at work in it"):
        finalize(whole.out)
    worker.go()
    said_by(first)
    render_dataset(whole)
    assert worker.again() == []
    assert files(whole.out) == undisturbed(whole)


def test_a_part_without_a_plan(whole: RenderOptions) -> None:
    with pytest.raises(DatasetError, match=r"no render of split train is in progress there; begin one with"):
        render_part(part(whole, "0"))
    said = said_by(start(whole, "--shards", "0"), status=2)
    assert "Traceback" not in said
    assert not whole.out.exists()


def test_a_part_of_a_split_that_has_fewer_shards(whole: RenderOptions) -> None:
    render_part(replace(whole, shards="0"))
    with pytest.raises(SpecError, match="shards '3-4': the split has shards 0 to 3"):
        render_part(part(whole, "3-4"))


def test_a_part_with_other_options_than_the_plans(worker: Gated, whole: RenderOptions) -> None:
    render_part(replace(whole, shards="0"))
    with pytest.raises(SpecError, match=r"rendered otherwise; repeat the first command(.|\n)*seed: 0 there, 1 asked"):
        render_part(replace(whole, shards="1", seed=1))
    with pytest.raises(SpecError, match=r"resolution = 32: the folder's plan decides it; leave it out, or give --sam"):
        replace(part(whole, "1"), resolution=32)
    assert len(worker.pictures()) == 4


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("blender", "9.9.9", r"blender: 9.9.9 there, 0.0.0 \(stand-in\) here"), ("device", "OPTIX", "OPTIX there, CPU")],
)
def test_a_machine_that_renders_other_bytes(
    worker: Gated, whole: RenderOptions, field: str, value: str, words: str
) -> None:
    render_part(replace(whole, shards="0"))
    path = whole.out / ".render" / "train" / "plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, field: value}))
    with pytest.raises(SpecError, match=rf"its pictures are rendered otherwise:\n  .*{words}"):
        render_part(part(whole, "1"))
    assert len(worker.pictures()) == 4
    path.write_text(json.dumps(plan))
    render_part(part(whole, "1"))


def test_finalize_names_what_is_missing_and_what_is_damaged(worker: Gated, whole: RenderOptions) -> None:
    render_part(replace(whole, shards="0,2"))
    with pytest.raises(DatasetError, match=r"2 of 4 shards of split train are missing or damaged(.|\n)*--shards 1,3$"):
        finalize(whole.out)
    done = subprocess.run(
        [sys.executable, "-m", "ident3d", "finalize", str(whole.out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--shards 1,3\n" in done.stderr
    render_part(part(whole, "1,3"))
    for shard, at in ((0, 700), (3, 1500)):
        path = whole.out / "train" / f"train-00000{shard}.tar"
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
    assert not (whole.out / "dataset.json").exists()
    with pytest.raises(DatasetError, match=r"2 of 4 shards of split train are missing or damaged(.|\n)*--shards 0,3$"):
        finalize(whole.out)
    assert "4 shards: 2 finished, 2 not begun\n  missing: shards 0,3" in status_text(whole.out)
    render_part(part(whole, "0,3"))
    finalize(whole.out)
    assert worker.again() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert files(whole.out) == undisturbed(whole)


def test_finalize_twice(whole: RenderOptions) -> None:
    render_part(replace(whole, shards="0-3"))
    manifest = finalize(whole.out)
    made = {path: path.stat().st_mtime_ns for path in whole.out.rglob("*") if path.is_file()}
    assert finalize(whole.out) == manifest
    assert {path: path.stat().st_mtime_ns for path in whole.out.rglob("*") if path.is_file()} == made
    with pytest.raises(DatasetError, match="no render of split test is in progress there"):
        finalize(whole.out, "test")


@pytest.mark.parametrize("at", ["write_index", "_place", "card_text", "write_manifest", "shutil.rmtree"])
def test_finalize_is_killed(whole: RenderOptions, at: str) -> None:
    render_part(replace(whole, shards="0-3"))
    kill = f"import os, ident3d.render.finish as f; f.{at} = lambda *a, **b: os.kill(os.getpid(), 9)"
    command = [sys.executable, "-c", f"{kill}; f.shutil\nfrom ident3d.cli import main; main()", "finalize"]
    done = subprocess.run([*command, str(whole.out)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (whole.out / "dataset.json").exists() == (at == "shutil.rmtree")
    finalize(whole.out)
    assert files(whole.out) == undisturbed(whole)
    assert not (whole.out / ".render" / "train").exists()


def test_the_manifest_names_the_gpus_of_all_parts(whole: RenderOptions) -> None:
    """Those that render leave files: here of two machines."""
    for split in ("train", "test"):
        render_part(replace(whole, split=split, shards="0-3"))
        gpus = gpus_folder(whole.out / ".render" / split)
        gpus.mkdir(exist_ok=True)
        (gpus / "NVIDIA H200").touch()
        (gpus / f"A {split}").touch()
        manifest = finalize(whole.out, split)
    assert manifest.versions["gpu"] == "A test, A train, NVIDIA H200"
    assert verify_dataset(whole.out) == []


def test_the_status_of_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(DatasetError, match="no render there, finished or in progress"):
            status_text(folder)
    command = [sys.executable, "-m", "ident3d", "render", str(tmp_path), "--status"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"ident3d: {tmp_path}: no render there, finished or in progress\n"


def test_the_status_on_the_way(worker: Gated, whole: RenderOptions) -> None:
    """Of parts that are finished, at work, killed, failed; and of a finished split beside one in progress."""
    root = whole.out
    render_part(replace(whole, shards="0"))
    assert status_text(root).splitlines() == [
        f"{root}, split train: 4 of 16 samples",
        "  4 shards: 1 finished, 3 not begun",
        "  missing: shards 1-3",
    ]
    worker.hold(1)
    process = start(whole, "--workers", "1", "--shards", "1-2")
    wait_until(lambda: len(worker.pictures()) == 6, process)
    host = os.uname().nodename
    text = status_text(root)
    assert "  4 shards: 1 finished, 1 running, 2 not begun\n" in text
    assert f" of 4 samples (running, process {process.pid} on {host})\n  missing: shards 1-3" in text
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    text = status_text(root)
    assert "  4 shards: 1 finished, 1 stopped, 2 not begun\n" in text
    assert f" of 4 samples (stopped, was process {process.pid} on {host})\n  missing: shards 1-3" in text
    worker.go()
    worker.tell("crash", worker.seed(13))
    said = said_by(start(whole, "--workers", "1", "--shards", "3"), status=2)
    assert "all else is stored:\nsample 13 of shard 3: the render worker" in said
    text = status_text(root)
    assert "  4 shards: 1 finished, 1 failed, 1 stopped, 1 not begun\n" in text
    assert "\n  failed: sample 13 of shard 3: the render worker" in text
    (worker.control / "crash").unlink()
    render_dataset(whole)
    assert status_text(root) == f"{root}, split train: finished, 16 samples in 4 shards"
    render_part(replace(whole, split="test", shards="0-1"))
    assert status_text(root).splitlines()[1:] == [
        f"{root}, split test: 8 of 16 samples",
        "  4 shards: 2 finished, 2 not begun",
        "  missing: shards 2-3",
    ]
    assert files(root).keys() >= undisturbed(whole).keys()
    assert RenderFolder(root).plans().keys() == {"train", "test"}

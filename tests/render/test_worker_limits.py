"""Workers that hang, crash, grow or are worn out are replaced; what a render needs of the machine is told before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gated import Gated, files

from ident3d import RenderError, RenderOptions, SpecError, render_dataset
from ident3d.render import local
from ident3d.render.crew import CrewOptions
from ident3d.render.disk import LEAST, check_disk, predicted_bytes
from ident3d.render.folder import plan_of
from ident3d.shards.manifest import read_manifest
from ident3d.shards.tar import scan_samples
from ident3d.shards.verify import verify_dataset


@pytest.fixture
def worker(tmp_path: Path) -> Gated:
    return Gated(tmp_path / "control")


@pytest.fixture
def options(tmp_path: Path, worker: Gated) -> RenderOptions:
    """12 samples in shards of 4, by one worker."""
    return RenderOptions(
        tmp_path / "d",
        12,
        resolution=16,
        quality="draft",
        shard_size=4,
        workers=1,
        quiet=True,
        blender_python=worker.python,
    )


def undisturbed(options: RenderOptions) -> dict[str, bytes]:
    root, control = options.out.with_name("undisturbed"), options.out.with_name("free")
    render_dataset(RenderOptions(
        root, options.samples, resolution=16, quality="draft", shard_size=4, workers=1, quiet=True,
        blender_python=Gated(control).python,
    ))  # fmt: skip
    return files(root)  # type: ignore[no-any-return]


def test_a_worker_that_hangs_at_a_sample(worker: Gated, options: RenderOptions) -> None:
    """A fresh process tries again; then the sample is named, and all others are stored."""
    worker.tell("hang", worker.seed(5))
    words = r"all else is stored:\nsample 5 of shard 1: the render worker \(process \d+\) took more than 3 seconds for"
    with pytest.raises(RenderError, match=words) as caught:
        render_dataset(replace(options, picture_seconds=3))
    assert str(caught.value).count("\n") == 1
    assert "(--picture-seconds)" in str(caught.value)
    assert worker.again() == [5]
    assert len({p.pid for p in worker.pictures() if p.sample == 5}) == 2
    stored = [options.out / "train" / f".train-000001.tar.{end}" for end in ("part", "rest")]
    keys = [[s.key for s in scan_samples(path.read_bytes(), ("png", "latents.npy"))] for path in stored]
    assert keys == [["000000004"], ["000000006", "000000007"]]
    (worker.control / "hang").unlink()
    render_dataset(options)
    assert worker.again() == [5, 5]
    assert files(options.out) == undisturbed(options)


def test_a_worker_that_is_stopped_by_a_signal(worker: Gated, options: RenderOptions) -> None:
    worker.tell("stop", worker.seed(6))
    render_dataset(replace(options, picture_seconds=3))
    assert worker.again() == [6]
    assert files(options.out) == undisturbed(options)
    assert verify_dataset(options.out) == []


def test_samples_that_crash_every_process(
    worker: Gated, options: RenderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past some a shard is given up, past more in all no further one is begun: then it is not the samples."""
    monkeypatch.setattr(local, "MOST_LEFT_OUT", 2)
    monkeypatch.setattr(local, "MOST_FAILED", 3)
    worker.tell("crash", *(worker.seed(k) for k in (0, 1, 4, 5, 6, 8)))
    with pytest.raises(RenderError) as caught:
        render_dataset(options)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [
        "sample 0 of shard 0",
        "sample 1 of shard 0",
        "sample 4 of shard 1",
        "sample 5 of shard 1",
        "shards 2",
    ]
    assert lines[1].endswith("; the rest of the shard was not tried")
    assert lines[-1] == "shards 2: not begun, after too many failures"
    assert worker.again() == [0, 1, 4, 5]
    assert {p.sample for p in worker.pictures()} == {0, 1, 4, 5}
    (worker.control / "crash").unlink()
    render_dataset(options)
    assert files(options.out) == undisturbed(options)


def test_a_sample_that_blender_refuses(worker: Gated, options: RenderOptions) -> None:
    """An error that Blender tells of is no worse than a crash: tried again, then named, and all others are there."""
    worker.tell("fail", worker.seed(5))
    with pytest.raises(RenderError, match=r"\nsample 5 of shard 1: Blender failed: RuntimeError: Error: Out of memory"):
        render_dataset(options)
    assert worker.again() == [5]
    (worker.control / "fail").unlink()
    render_dataset(options)
    assert worker.again() == [5, 5]
    assert files(options.out) == undisturbed(options)


def test_workers_are_replaced_after_a_number_of_pictures(worker: Gated, options: RenderOptions) -> None:
    render_dataset(replace(options, recycle=3))
    pids = [p.pid for p in worker.pictures()]
    assert list(Counter(pids).values()) == [3, 3, 3, 3]
    assert worker.again() == []
    assert files(options.out) == undisturbed(options)


@pytest.mark.render
def test_recycling_with_blender(tmp_path: Path, rendered: Path) -> None:
    options = RenderOptions(tmp_path / "d", 12, seed=7, resolution=32, quality="draft", shard_size=4, quiet=True)
    render_dataset(replace(options, recycle=5, workers=1))
    for name in ("train-000000.tar", "train-000001.tar", "train-000002.tar", "index.npy"):
        assert (tmp_path / "d" / "train" / name).read_bytes() == (rendered / "train" / name).read_bytes()
    assert len(list((tmp_path / "d" / ".render" / "logs").iterdir())) == 1


@pytest.mark.parametrize(("megabytes", "most"), [(150, 4), (500, 1)])
def test_workers_that_grow_are_replaced(worker: Gated, options: RenderOptions, megabytes: int, most: int) -> None:
    """Where every process is past its limit at its first picture, each renders that one."""
    worker.tell("ballast", megabytes)
    render_dataset(replace(options, worker_memory=0.5))
    counts = Counter(p.pid for p in worker.pictures()).values()
    assert max(counts) <= most
    assert len(counts) >= 12 / most
    assert most == 1 or max(counts) > 1
    assert worker.again() == []
    assert files(options.out) == undisturbed(options)


def test_a_workers_share_of_the_memory() -> None:
    whole = CrewOptions().megabytes(1)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**6
    assert CrewOptions().megabytes(4) == whole // 4
    assert CrewOptions(worker_memory=1.5).megabytes(4) == 1500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"picture_seconds": 0.0}, "picture_seconds = 0.0: expected a number above 0"),
        ({"picture_seconds": float("nan")}, "picture_seconds = nan"),
        ({"recycle": -1}, "recycle = -1: expected 1 or more, or 0 for never"),
        ({"worker_memory": 0.01}, "worker_memory = 0.01: expected gigabytes, at least 0.5"),
    ],
)
def test_limits_out_of_range(change: dict[str, float], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        CrewOptions(**change)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_the_time_a_sample_may_take_follows_its_pixels(rendered: Path) -> None:
    plan = plan_of(read_manifest(rendered), "train")
    small, large = CrewOptions().seconds(plan), CrewOptions().seconds(replace(plan, resolution=1024))
    assert 300 < small < large
    # 1.2 microseconds a pixel and sample is what a core takes; twenty times that must be allowed.
    assert large > 20 * 1.2e-6 * 1024**2 * plan.settings.samples
    assert CrewOptions().seconds(replace(plan, pairs="laplace(scale=0.05)")) == 2 * small
    assert CrewOptions(picture_seconds=7).seconds(plan) == 7


@pytest.mark.render
@pytest.mark.parametrize(("resolution", "quality", "pairs"), [
    (32, "draft", None), (32, "standard", None), (64, "draft", None), (64, "standard", "laplace(scale=0.05)"),
])  # fmt: skip
def test_the_disk_that_a_render_needs(tmp_path: Path, resolution: int, quality: str, pairs: str | None) -> None:
    options = RenderOptions(
        tmp_path / "d", 32, resolution=resolution, quality=quality, shard_size=16, pairs=pairs, quiet=True
    )
    plan = plan_of(render_dataset(options), "train")
    taken = sum(path.stat().st_size for path in (tmp_path / "d" / "train").iterdir())
    assert predicted_bytes(plan) == pytest.approx(taken, rel=0.25)
    assert predicted_bytes(replace(plan, samples=3200)) == pytest.approx(100 * taken, rel=0.25)


def test_too_little_disk_is_refused_and_little_is_warned_of(
    fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(plan_of(read_manifest(fabricated), "train"), samples=1_000_000)
    need = predicted_bytes(plan)

    def check(free: float, root: Path = tmp_path) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free)))
        return check_disk(root, plan)

    said = check(1.2 * need)
    assert said == f"{tmp_path}: 1,000,000 samples will need about {need / 1e9:,.2f} GB more, " + said.split(", ")[-1]
    for free in (need, (LEAST + 0.01) * need):
        with pytest.warns(UserWarning, match="make room, or a full disk may stop this render"):
            check(free)
    with pytest.raises(RenderError, match="GB are free; make room or render fewer"):
        check((LEAST - 0.01) * need)
    # What is stored already needs no more.
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train-000000.tar").touch()
    os.truncate(tmp_path / "train" / "train-000000.tar", need // 2)
    check(0.6 * need)


@pytest.mark.render
def test_a_gpu_that_cycles_cannot_use(tmp_path: Path) -> None:
    """The CPU renders, and a warning says so, once."""
    if Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "ident3d", "render", str(tmp_path / "d"), "--samples", "8"]
    command += ["--resolution", "16", "--quality", "draft", "--workers", "2", "--quiet"]
    for variables, count in (({"CUDA_VISIBLE_DEVICES": "0"}, 1), ({"CUDA_VISIBLE_DEVICES": ""}, 0)):
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        environment = {**os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0
        warning = "ident3d: warning: there is a GPU, but none that Cycles can use; rendering on the CPU\n"
        assert done.stderr == count * warning
        assert read_manifest(tmp_path / "d").device == "CPU"


@pytest.mark.render
def test_blender_leaves_no_temporary_folders(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "ident3d", "render", str(tmp_path / "d"), "--samples", "12"]
    command += ["--resolution", "16", "--quality", "draft", "--workers", "2", "--recycle", "3", "--quiet"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    subprocess.run(command, env=environment, check=True)
    assert list((tmp_path / "tmp").iterdir()) == []

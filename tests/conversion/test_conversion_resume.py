"""Kills, interrupts and full disks: nothing is lost, and the result ends byte for byte the same."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ident3d import BusyError, DatasetError, SpecError
from ident3d.conversion import ConvertOptions, convert
from ident3d.conversion.plan import ConversionFolder
from ident3d.render.dataset import Interrupted
from ident3d.shards.verify import verify_dataset
from ident3d.shards.writer import ShardWriter

Make = Callable[..., Path]
Content = Callable[[Path], dict[str, bytes]]

DRIVER = Path(__file__).resolve().parents[1] / "data" / "killed_conversion.py"


def strike(seed: int, **options: Any) -> int:
    """Convert with kills; returns how many there were."""
    command = [sys.executable, str(DRIVER), str(seed), *(f"{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "form", "seed"), [("3dident", "keep", 1), ("multimodal3dident", "webp", 2)])
def test_kills_on_the_way_to_shards(
    published: dict[str, Path], run: Make, content: Content, tmp_path: Path, layout: str, form: str, seed: int
) -> None:
    run(published[layout], tmp_path / "whole", format=form, shard_size=5)
    killed = strike(seed, src=published[layout], out=tmp_path / "out", format=form, shard_size=5)
    assert killed >= 3
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert verify_dataset(tmp_path / "out") == []


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "seed"), [("causal3dident", 3), ("temporal-causal3dident", 4)])
def test_kills_on_the_way_back(
    published: dict[str, Path], run: Make, content: Content, tmp_path: Path, layout: str, seed: int
) -> None:
    shards = run(published[layout], tmp_path / "shards", format="webp")
    run(shards, tmp_path / "whole", to="published")
    killed = strike(seed, src=shards, out=tmp_path / "out", to="published")
    assert killed >= (3 if layout == "causal3dident" else 0)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.slow
def test_kills_while_damaged_samples_are_left_out(
    threedident: Path, run: Make, content: Content, tmp_path: Path
) -> None:
    for number in (0, 3, 4, 11, 19):
        (threedident / "train" / "images" / f"{number:02d}.png").write_bytes(b"no picture")
    with pytest.warns(UserWarning, match="5 damaged samples were"):
        run(threedident, tmp_path / "whole", shard_size=4, on_error="skip")
    killed = strike(5, src=threedident, out=tmp_path / "out", shard_size=4, on_error="skip")
    assert killed >= 3
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(make_published: ModuleType, run: Make, content: Content, tmp_path: Path) -> None:
    source = make_published.make_threedident(tmp_path / "source", {"train": 300}, side=64)
    code = "import sys; from ident3d.conversion import *; convert(ConvertOptions(*sys.argv[1:], format='webp'))"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts background jobs with SIGINT ignored, and the tests may run in one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while child.poll() is None and not list((tmp_path / "out").glob("train/*.tar")):
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGINT)  # its encoder processes get it too
    _, said = child.communicate(timeout=60)
    assert "Interrupted: interrupted: " in said
    assert "of 300 samples of split train are done" in said
    assert not (tmp_path / "out" / "dataset.json").exists()
    run(source, tmp_path / "out", format="webp")
    run(source, tmp_path / "whole", format="webp")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def fail_after(monkeypatch: pytest.MonkeyPatch, samples: int, error: BaseException) -> None:
    """Let the writers of shards fail once, after so many samples."""
    append, left = ShardWriter.append, [samples]

    def failing(self: ShardWriter, *pictures: bytes, **options: Any) -> None:
        if not left[0]:
            left[0] = -1
            raise error
        left[0] -= 1
        append(self, *pictures, **options)

    monkeypatch.setattr(ShardWriter, "append", failing)


def test_what_is_done_is_not_done_again(
    published: dict[str, Path], run: Make, content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = published["3dident"], tmp_path / "out"
    run(source, tmp_path / "whole", shard_size=6)
    fail_after(monkeypatch, 8, KeyboardInterrupt())
    with pytest.raises(Interrupted, match=r"interrupted: 8 of 20 samples of split train are done in .*out; "):
        run(source, out, shard_size=6)
    monkeypatch.undo()
    first = (out / "train" / "train-000000.tar").stat().st_mtime_ns
    written: list[int] = []
    append = ShardWriter.append

    def counted(self: ShardWriter, *pictures: bytes, **options: Any) -> None:
        written.append(1)
        append(self, *pictures, **options)

    monkeypatch.setattr(ShardWriter, "append", counted)
    run(source, out, shard_size=6)
    assert len(written) == 12 + 12  # of train, and test
    assert (out / "train" / "train-000000.tar").stat().st_mtime_ns == first
    assert content(out) == content(tmp_path / "whole")


def test_a_full_disk_midway(
    published: dict[str, Path], run: Make, content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(published["3dident"], tmp_path / "whole")
    fail_after(monkeypatch, 9, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(DatasetError, match=r"No space left on device; what is finished stays: mend it, then"):
        run(published["3dident"], tmp_path / "out")
    monkeypatch.undo()
    run(published["3dident"], tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("to", ["shards", "published"])
def test_a_disk_that_is_really_full(
    published: dict[str, Path], run: Make, content: Content, small_disk: Path, tmp_path: Path, monkeypatch: Any, to: str
) -> None:
    source = published["3dident"] if to == "shards" else run(published["3dident"], tmp_path / "shards")
    run(source, tmp_path / "whole", to=to)
    with pytest.raises(DatasetError, match=r"needs about 0\.00 GB more, 0\.00 GB are free; make room"):
        run(source, small_disk / "out", to=to)
    # What the estimate lets pass is told when it happens.
    monkeypatch.setattr("ident3d.conversion.dataset._Conversion.check_disk", lambda *_: None)
    with pytest.raises(DatasetError, match="No space left on device"):
        run(source, small_disk / "out", to=to)
    assert not (small_disk / "out" / "dataset.json").exists()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    run(source, small_disk / "out", to=to)
    assert content(small_disk / "out") == content(tmp_path / "whole")


def test_a_shard_altered_between_two_calls_is_written_again(
    published: dict[str, Path], run: Make, content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(published["3dident"], tmp_path / "whole")
    fail_after(monkeypatch, 13, KeyboardInterrupt())
    with pytest.raises(Interrupted):
        run(published["3dident"], tmp_path / "out")
    monkeypatch.undo()
    with open(tmp_path / "out" / "train" / "train-000000.tar", "r+b") as file:
        file.seek(1500)
        file.write(b"\0\0\0\0")
    run(published["3dident"], tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_sample_left_out_before_shards_that_were_finished(
    threedident: Path, run: Make, content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(monkeypatch, 14, KeyboardInterrupt())
    with pytest.raises(Interrupted):
        run(threedident, tmp_path / "out", shard_size=4)
    monkeypatch.undo()
    (tmp_path / "out" / "train" / "train-000001.tar").unlink()
    (threedident / "train" / "images" / "06.png").write_bytes(b"")
    for out in ("out", "whole"):
        with pytest.warns(UserWarning, match=r"06.png, sample 6"):
            run(threedident, tmp_path / out, shard_size=4, on_error="skip")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_finished_split_is_kept_while_another_fails(threedident: Path, run: Make, tmp_path: Path) -> None:
    picture = threedident / "test" / "images" / "05.png"
    content = picture.read_bytes()
    picture.write_bytes(content[:-20])
    with pytest.raises(DatasetError, match=r"test/images/05.png, sample 5: .*5 samples are done"):
        run(threedident, tmp_path / "out")
    assert not (tmp_path / "out" / "dataset.json").exists()
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "train").iterdir()}
    picture.write_bytes(content)
    run(threedident, tmp_path / "out")
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "train").iterdir()}
    assert verify_dataset(tmp_path / "out") == []


def test_again_and_nothing_is_left_to_do(published: dict[str, Path], run: Make, tmp_path: Path) -> None:
    shards = run(published["3dident"], tmp_path / "shards")
    back = run(shards, tmp_path / "back", to="published")
    for source, out, to in ((published["3dident"], shards, "shards"), (shards, back, "published")):
        times = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and ".convert" not in p.parts}
        assert run(source, out, to=to) == out
        assert times == {p: p.stat().st_mtime_ns for p in times}
        assert [p.name for p in sorted((out / ".convert").rglob("*")) if p.is_file()] == ["lock", *["plan.json"] * 2]


def test_one_conversion_at_a_time(published: dict[str, Path], run: Make, tmp_path: Path) -> None:
    folder = ConversionFolder(tmp_path / "out")
    folder.create()
    with folder.lock(), pytest.raises(BusyError, match=f"another conversion .process {os.getpid()}. is at work in it"):
        run(published["3dident"], tmp_path / "out")


def test_a_different_plan_is_refused_with_the_differences(
    published: dict[str, Path], run: Make, tmp_path: Path
) -> None:
    out = run(published["3dident"], tmp_path / "out", splits=("train",))
    with pytest.raises(SpecError, match=r"holds the same split, converted otherwise.*\n  format: keep there, webp"):
        run(published["3dident"], out, format="webp")
    with pytest.raises(SpecError, match=r"holds its split train, converted otherwise.*\n  format: keep there, webp"):
        run(published["3dident"], out, format="webp", splits=("test",))
    with pytest.raises(SpecError, match=r"(?s)layout: 3dident there, temporal-causal3dident asked"):
        convert(ConvertOptions(published["temporal-causal3dident"], out, quiet=True))


def test_a_plan_that_cannot_be_read_is_named(published: dict[str, Path], run: Make, tmp_path: Path) -> None:
    out = run(published["3dident"], tmp_path / "out")
    (out / ".convert" / "train" / "plan.json").write_text('{"to": 3}')
    with pytest.raises(DatasetError, match=r"plan.json: not a plan that this ident3d can read: to: expected a text"):
        run(published["3dident"], out)


def test_a_result_that_was_damaged_is_not_called_done(published: dict[str, Path], run: Make, tmp_path: Path) -> None:
    out = run(published["3dident"], tmp_path / "out")
    (out / "test" / "test-000001.tar").unlink()
    with pytest.raises(DatasetError, match=r"test-000001.tar: missing or of another size; convert into another folder"):
        run(published["3dident"], out)

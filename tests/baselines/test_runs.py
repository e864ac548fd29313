"""A run's folder: checkpoints are whole or refused, the log is cut, nobody else's files are touched."""

from __future__ import annotations

import errno
import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ident3d.baselines import runs
from ident3d.baselines.runs import RunFolder, differences
from ident3d.errors import BusyError, DatasetError, TrainingError

STATE: dict[str, Any] = {
    "settings": {"dim": 3, "training": {"steps": 10}, "seeds": [0, 1], "none": None},
    "step": 7,
    "model": {"weight": torch.arange(200.0), "bias": torch.tensor([1e-30, 2.0])},
    "curve": [{"step": 5, "loss": [0.1, float("nan")]}],
}


def text(state: dict[str, Any]) -> str:
    """Equal for equal bits."""
    tensors = {name: value.tolist() for name, value in state["model"].items()}
    return repr([tensors, *(state[name] for name in ("settings", "step", "curve"))])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """With a checkpoint."""
    made = RunFolder(tmp_path / "deep" / "run")
    made.save_checkpoint(STATE)
    return made


def test_a_checkpoint_is_read_as_it_was(folder: RunFolder) -> None:
    loaded = folder.load_checkpoint("cpu")
    assert loaded is not None
    assert text(loaded) == text(STATE)
    assert [p.name for p in folder.path.iterdir()] == ["checkpoint.pt"]
    folder.save_checkpoint({**STATE, "step": 8})
    assert (folder.load_checkpoint(torch.device("cpu")) or {})["step"] == 8


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).load_checkpoint("cpu") is None
    assert list(tmp_path.iterdir()) == []


def damage(data: bytes, how: str) -> bytes:
    middle = len(data) // 2
    if how == "a byte of the weights":
        place = data.index(torch.arange(200.0).numpy().tobytes()) + 401
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    return {
        "empty": b"",
        "text": b"not a checkpoint\n",
        "half": data[:middle],
        "the end": data[:-1],
        "the beginning": data[1:],
        "zeros": bytes(len(data)),
        "zeros in the middle": data[: middle - 99] + bytes(198) + data[middle + 99 :],
    }[how]


@pytest.mark.parametrize(
    "how",
    ["empty", "text", "half", "the end", "the beginning", "zeros", "zeros in the middle", "a byte of the weights"],
)
def test_a_damaged_checkpoint_is_named(folder: RunFolder, how: str) -> None:
    folder.checkpoint.write_bytes(damage(folder.checkpoint.read_bytes(), how))
    with pytest.raises(TrainingError) as caught:
        folder.load_checkpoint("cpu")
    line = str(caught.value)
    assert line.startswith(f"{folder.checkpoint}: a damaged checkpoint (")
    assert line.endswith("); remove it to begin again from step 0")
    assert "\n" not in line


def test_no_flipped_byte_changes_a_number(folder: RunFolder) -> None:
    """It is refused, or it was of no account."""
    data = folder.checkpoint.read_bytes()
    chosen = random.Random(0)
    refused = 0
    for _ in range(150):
        place, bit = chosen.randrange(len(data)), 1 << chosen.randrange(8)
        folder.checkpoint.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        try:
            loaded = folder.load_checkpoint("cpu")
        except TrainingError:
            refused += 1
        else:
            assert loaded is not None
            assert text(loaded) == text(STATE), place
    assert refused > 50


def test_a_checkpoint_runs_no_code(folder: RunFolder, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"format": 1, "step": Evil()}, folder.checkpoint)
    with pytest.raises(TrainingError, match="a damaged checkpoint"):
        folder.load_checkpoint("cpu")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("other", [{"format": 2}, {"step": 3}, [1, 2], torch.zeros(3)], ids=str)
def test_a_checkpoint_of_another_version_is_refused(folder: RunFolder, other: object) -> None:
    torch.save(other, folder.checkpoint)
    with pytest.raises(TrainingError, match="not of this version of ident3d; choose another folder"):
        folder.load_checkpoint("cpu")


def test_another_archive_is_refused(folder: RunFolder) -> None:
    with zipfile.ZipFile(folder.checkpoint, "w") as archive:
        archive.writestr("holiday.txt", "sun")
    with pytest.raises(TrainingError, match="a damaged checkpoint"):
        folder.load_checkpoint("cpu")


def fail(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_checkpoint_before(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TrainingError, match=r"checkpoint.pt: not written: No space left on device; the one before it"):
        folder.save_checkpoint({**STATE, "step": 8})
    loaded = folder.load_checkpoint("cpu")
    assert loaded is not None
    assert text(loaded) == text(STATE)
    assert [p.name for p in folder.path.iterdir()] == ["checkpoint.pt"]


def test_a_full_disk_stops_the_log(folder: RunFolder) -> None:
    folder.log.symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"log.jsonl: not written: No space left on device"):
        folder.append({"step": 1})


def test_a_kill_while_writing_leaves_the_checkpoint_before(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.save_checkpoint({**STATE, "step": 8})
    monkeypatch.undo()
    again = RunFolder(folder.path)  # what was being written does not stand in the way
    assert (again.load_checkpoint("cpu") or {})["step"] == 7
    again.save_checkpoint({**STATE, "step": 8})
    assert [p.name for p in folder.path.iterdir()] == ["checkpoint.pt"]


# The log.


def steps(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in folder.log.read_text().splitlines()]


def test_lines_are_added_and_cut(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.cut_log(3)  # nothing to cut
    assert list(tmp_path.iterdir()) == []
    for step in (0, 5, 10, 10, 15, 20):
        folder.append({"step": step, "loss": [1.0]})
    folder.cut_log(10)
    assert steps(folder) == [0, 5, 10, 10]
    folder.append({"step": 15})
    assert steps(folder) == [0, 5, 10, 10, 15]
    folder.cut_log(-1)
    assert folder.log.read_text() == ""


@pytest.mark.parametrize(
    "end",
    ['{"step": 6, "lo', '{"step": 6', "\0" * 40, "\xff\xfe\n", "{}\n", "[6]\n", "6\n", '{"step": null}\n', "\n\n"],
)
def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path, end: str) -> None:
    folder = RunFolder(tmp_path)
    folder.append({"step": 5})
    with open(folder.log, "ab") as file:
        file.write(end.encode("latin1"))
    folder.cut_log(10)
    assert folder.log.read_text() == '{"step": 5}\n'


def test_a_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log.write_text('{"step": 5}')
    folder.cut_log(10)
    folder.append({"step": 6})
    assert steps(folder) == [5, 6]


# The folder.


@pytest.mark.parametrize("name", ["thesis.tex", "checkpoint", ".git", "results"])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(DatasetError) as caught:
        RunFolder(tmp_path)
    assert str(caught.value) == f"{tmp_path}: holds something else ({name}); expected a new or an empty folder"


def test_a_run_s_own_files_are_no_others(tmp_path: Path) -> None:
    for name in (*runs.NAMES, ".checkpoint.pt.part", ".result.json.part"):
        (tmp_path / name).touch()
    RunFolder(tmp_path)


@pytest.mark.parametrize("below", ["", "below", "below/deeper"])
def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DatasetError, match="a run cannot be kept there"):
        RunFolder(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_made_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError, match="/proc/run: a run cannot be kept there"):
        RunFolder(Path("/proc/run"))
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write where others may not
    with pytest.raises(DatasetError, match="cannot be written"):
        RunFolder(tmp_path)


def test_one_run_a_folder(tmp_path: Path) -> None:
    one, other = RunFolder(tmp_path), RunFolder(tmp_path)
    with one.lock():
        with pytest.raises(BusyError) as caught, other.lock():
            pass
        assert str(caught.value) == f"{tmp_path}: another run (process {os.getpid()}) is at work in it"
    with other.lock():
        pass


# Differences.


@pytest.mark.parametrize(
    ("there", "asked", "lines"),
    [
        (STATE["settings"], STATE["settings"], []),
        ({}, {}, []),
        ({"dim": 3}, {"dim": 4}, ["dim: 3 there, 4 asked"]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ["a.b.c: 1 there, 2 asked"]),
        ({"a": 1}, {"b": 2}, ["a: 1 there, None asked", "b: None there, 2 asked"]),
        ({"a": {"b": 1}}, {"a": None}, ["a: {'b': 1} there, None asked"]),
        ({"seeds": [0, 1]}, {"seeds": [0, 2]}, ["seeds: [0, 1] there, [0, 2] asked"]),
    ],
)
def test_differences(there: dict[str, Any], asked: dict[str, Any], lines: list[str]) -> None:
    assert differences(there, asked) == lines

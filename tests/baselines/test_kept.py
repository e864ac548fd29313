"""A run's result: made once and read afterwards, refused where it is another run's, not kept without a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ident3d.baselines.kept import kept_result
from ident3d.baselines.results import Result, load_result
from ident3d.baselines.runs import RunFolder
from ident3d.errors import BusyError, DatasetError, TrainingError

ASKED: dict[str, Any] = {
    "row": "3.2",
    "preset": "quick",
    "dim": 3,
    "training": {"steps": 20, "warmup": 0.5},
    "seeds": [0, 1],
}


class Maker:
    """Makes a result; says of each time in which folder."""

    def __init__(self) -> None:
        self.folders: list[RunFolder | None] = []

    def __call__(self, folder: RunFolder | None) -> Result:
        self.folders.append(folder)
        return Result(
            experiment="kitti",
            row=ASKED["row"],
            preset=ASKED["preset"],
            settings={name: ASKED[name] for name in ("dim", "training")},
            seeds=tuple(ASKED["seeds"]),
            scores={"mcc_spearman": (0.9, 0.8)},
            steps=20,
            device="cpu (Example CPU, 2 threads)",
            versions={},
            wall_s=float(len(self.folders)),
            finished="2026-01-31T12:00:00+00:00",
        )


@pytest.fixture
def make() -> Maker:
    return Maker()


def refuse(folder: RunFolder | None) -> Result:
    pytest.fail("made")


def test_a_result_is_made_once_and_read_afterwards(tmp_path: Path, make: Maker) -> None:
    out = tmp_path / "some" / "run"
    first = kept_result(out, ASKED, make)
    (folder,) = make.folders
    assert folder is not None
    assert folder.path == out
    assert load_result(out) == first
    written = (out / "result.json").stat()
    assert kept_result(out, ASKED, refuse) == first
    assert (out / "result.json").stat().st_mtime_ns == written.st_mtime_ns


def test_without_a_folder_nothing_is_kept(tmp_path: Path, make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = [kept_result(None, ASKED, make) for _ in range(2)]
    assert make.folders == [None, None]
    assert [result.wall_s for result in results] == [1, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"row": None}, r"row: 3\.2 there, None asked"),
        ({"preset": "paper"}, "preset: quick there, paper asked"),
        ({"dim": 10}, "dim: 3 there, 10 asked"),
        ({"training": {"steps": 20, "warmup": 0.0}}, r"training\.warmup: 0\.5 there, 0\.0 asked"),
        ({"seeds": [1, 0]}, r"seeds: \[0, 1\] there, \[1, 0\] asked"),
        ({"tau": 1.0}, r"tau: None there, 1\.0 asked"),
    ],
    ids=str,
)
def test_the_result_of_another_run_is_refused(changes: dict[str, Any], words: str, tmp_path: Path, make: Maker) -> None:
    kept_result(tmp_path, ASKED, make)
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(DatasetError, match=f"holds the result of another run; choose another folder.* {words}$"):
        kept_result(tmp_path, {**ASKED, **changes}, refuse)
    assert (tmp_path / "result.json").read_bytes() == before


def test_a_damaged_result_is_refused_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(DatasetError, match=r"result\.json: damaged or not a result"):
        kept_result(tmp_path, ASKED, refuse)
    assert (tmp_path / "result.json").read_text() == "{"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    with pytest.raises(DatasetError, match=r"holds something else \(letters\.txt\)"):
        kept_result(tmp_path, ASKED, refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


@pytest.mark.parametrize("finished", [False, True])
def test_a_folder_that_is_locked_is_busy(finished: bool, tmp_path: Path, make: Maker) -> None:
    if finished:
        kept_result(tmp_path, ASKED, make)
    with (
        RunFolder(tmp_path).lock(),
        pytest.raises(BusyError, match=rf"another run \(process {os.getpid()}\) is at work in it"),
    ):
        kept_result(tmp_path, ASKED, refuse)
    assert (tmp_path / "result.json").exists() == finished


def test_the_folder_is_locked_until_the_result_is_there(tmp_path: Path, make: Maker) -> None:
    def tried(folder: RunFolder | None) -> Result:
        with pytest.raises(BusyError):
            kept_result(tmp_path, ASKED, refuse)
        return make(folder)

    kept_result(tmp_path, ASKED, tried)
    with RunFolder(tmp_path).lock():  # free again
        assert load_result(tmp_path).scores == {"mcc_spearman": (0.9, 0.8)}


@pytest.mark.parametrize("failure", [TrainingError("not finite"), KeyboardInterrupt()], ids=["error", "stop"])
def test_a_run_that_fails_leaves_no_result_and_no_lock(failure: BaseException, tmp_path: Path, make: Maker) -> None:
    def fail(folder: RunFolder | None) -> Result:
        raise failure

    with pytest.raises(type(failure)):
        kept_result(tmp_path, ASKED, fail)
    assert not (tmp_path / "result.json").exists()
    assert kept_result(tmp_path, ASKED, make) == load_result(tmp_path)

"""The command line: a mistake is one line on stderr and exit status 2, before anything is made."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from ident3d.cli import main


def run(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ident3d", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["render"], "required"),
        (["render", "OUT"], "samples: missing"),
        (["render", "OUT", "--samples", "ten"], "--samples"),
        (["render", "OUT", "--samples", "0"], "samples = 0: expected 1"),
        (["render", "OUT", "--samples", "4", "--scene", "kettle"], "unknown scene"),
        (["render", "OUT", "--samples", "4", "--quality", "best"], "expected one of draft, standard, paper"),
        (["render", "OUT", "--samples", "4", "--split", "all"], "expected one of train, val, test"),
        (["render", "OUT", "--samples", "4", "--workers", "0"], "workers = 0"),
        (["render", "OUT", "--samples", "4", "--blender-python", "/nowhere"], "no such program"),
        (["render", "OUT", "--samples", "4", "--colour", "red"], "--colour"),
        (["paint", "OUT"], "paint"),
        (["scenes", "show"], "expected a name"),
        (["scenes", "show", "kettle"], "unknown scene"),
        (["scenes", "hide"], "hide"),
        (["info", "OUT"], "no such folder"),
        (["verify", "OUT"], "no such folder"),
        (["figure", "contact", "OUT", "sheet.png"], "no such folder"),
        (["figure", "contact", "OUT", "sheet.txt"], "expected a name that ends in .png"),
        (["figure", "traversal", "none/sheet.png"], "make it first"),
        (["figure", "traversal", "sheet.png", "--steps", "1"], "steps = 1: expected 2 to 50"),
        (["figure", "traversal", "sheet.png", "--at", "2"], "at = 2.0"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    args: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(args)
    said = capsys.readouterr()
    assert end.value.code == 2
    assert words in said.err + said.out
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []


def test_scenes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["scenes"])
    assert end.value.code == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["3dident", "3dident-v1"]
    with pytest.raises(SystemExit):
        main(["scenes", "show", "3dident-v1"])
    assert 'hues = "as-published"' in capsys.readouterr().out


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m ident3d scenes show 3dident | head -1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


@pytest.mark.render
def test_info_and_verify(rendered: Path, tmp_path: Path) -> None:
    said = run("info", str(rendered))
    assert said.returncode == 0
    for words in ("split train: 12 samples in 3 shards", "split test: 4 samples", "object_hue", "quality draft"):
        assert words in said.stdout
    assert run("verify", str(rendered)).returncode == 0
    damaged = tmp_path / "d"
    shutil.copytree(rendered, damaged)
    (damaged / "test" / "test-000000.tar").unlink()
    for args in ([], ["--quick"]):
        said = run("verify", str(damaged), *args)
        assert said.returncode == 1
        assert "test/test-000000.tar: missing" in said.stdout
    said = run("verify", str(damaged), "--repair")
    assert said.returncode == 0
    assert "4 of 4 samples rendered again" in said.stdout
    assert (damaged / "test" / "test-000000.tar").read_bytes() == (rendered / "test" / "test-000000.tar").read_bytes()


@pytest.mark.render
def test_the_progress_bar_is_for_terminals(tmp_path: Path) -> None:
    command = ["render", str(tmp_path / "a"), "--samples", "2", "--resolution", "16", "--quality", "draft"]
    assert run(*command).stderr == ""
    for quiet in (False, True):
        command[1] = str(tmp_path / f"terminal-{quiet}")
        master, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 100))  # on a terminal without width there is no room for a bar
        arguments = [sys.executable, "-m", "ident3d", *command, *(["--quiet"] if quiet else [])]
        subprocess.run(arguments, stderr=terminal, stdout=subprocess.PIPE, check=True)
        os.write(terminal, b".")  # marks the end
        shown = ""
        while not shown.endswith("."):
            shown += os.read(master, 100_000).decode()
        os.close(master)
        os.close(terminal)
        if quiet:
            assert shown == "."
        else:
            assert "2/2" in shown
            assert "picture" in shown


@pytest.mark.render
def test_the_same_command_again_has_nothing_to_do(tmp_path: Path) -> None:
    command = ["render", str(tmp_path / "a"), "--samples", "2", "--resolution", "16", "--quality", "draft"]
    assert run(*command).returncode == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*") if p.is_file()}
    # No Blender is started for it: this interpreter has none.
    said = run(*command, "--blender-python", "/bin/true")
    assert said.returncode == 0
    assert "2 pictures of split train" in said.stdout
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*") if p.is_file()} == before
    (tmp_path / "a" / "train" / "train-000000.tar").unlink()
    said = run(*command)
    assert said.returncode == 2
    assert "ident3d verify" in said.stderr


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text('{"format": 99}')
    for args in (["info", str(tmp_path)], ["verify", str(tmp_path)], ["render", str(tmp_path), "--samples", "4"]):
        said = run(*args)
        assert said.returncode == 2
        assert "format 99; this ident3d reads up to 1" in said.stderr
        assert "Traceback" not in said.stderr

"""The command line: a mistake is one line on stderr and exit status 2, before anything is made."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import ident3d
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
        (["pairs"], "required"),
        (["pairs", "OUT", "--conditional", "uniform()"], "no such folder"),
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


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr says of a mistake: one line. Nothing else may be said."""
    with pytest.raises(SystemExit) as end:
        main(args)
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("ident3d: ")
    return line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("foo(1)", "unknown law 'foo'"),
        ("", "conditional ''"),
        ("laplace", "not of the form name(parameter=value)"),
        ("laplace(", "expected one of"),
        ("laplace()", "missing"),
        ("laplace(scale=0)", "scale = 0: expected numbers above 0"),
        ("laplace(scale=-1)", "expected numbers above 0"),
        ("laplace(scale=[0.1, 0.2])", "scale"),
        ("laplace(scale=0.1, beta=2)", "beta"),
        ("gennorm(scale=0.1, beta=0)", "beta = 0"),
        ("normal(scale=0.1, loc=0.5)", "loc"),
        ("vmf(kappa=10)", "vmf"),
        ("share()", "share of no factor"),
        ("share(colour)", "unknown factor 'colour'"),
        ("change(k=0)", "change of k = 0 factors: expected 1 to 10"),
        ("change(k=11)", "change of k = 11 factors: expected 1 to 10"),
        ("__import__('os').getcwd()", "not of the form"),
        ("normal(scale=open('x'))", "is not a number"),
    ],
)
def test_a_bad_conditional_is_refused_before_anything_is_made(
    tmp_path: Path, fabricated: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["render", str(tmp_path / "d"), "--samples", "4", "--pairs", text], capsys)
    assert words in line
    line = refused(["pairs", str(fabricated), "--conditional", text, "--out", str(tmp_path / "report")], capsys)
    assert words in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--pairs", "10"], "pairs = 10: expected a whole number of at least 1000"),
        (["--match", "best"], "match='best': expected one of exact, hnsw, ivf"),
        (["--factors", "object_x", "colour"], "unknown factor 'colour'"),
        (["--factors", "object_x", "object_x"], "factors=[0, 0]: expected different numbers"),
        (["--seed", "-1"], "seed = -1"),
        (["--split", "val"], "no split 'val'; it has train, test"),
        (["--out", "file"], "the report cannot be written there"),
        (["--out", "file/below"], "the report cannot be written there"),
    ],
)
def test_mistakes_of_a_report_leave_nothing_behind(
    tmp_path: Path,
    fabricated: Path,
    args: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    assert words in refused(["pairs", str(fabricated), "--conditional", "uniform()", *args], capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_report_needs_a_conditional_where_no_pairs_were_rendered(
    tmp_path: Path, fabricated_pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "report")]
    line = refused(["pairs", str(fabricated_pairs), "--split", "test", *out], capsys)
    assert "conditional: missing" in line
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_pairs_is_written_and_its_warnings_printed(tmp_path: Path, fabricated: Path) -> None:
    args = ["--conditional", "laplace(0.01)", "--match", "exact", "--out", "my/report", "--pairs", "2000"]
    factors = ["--factors", "object_x", "object_hue"]
    said = run("pairs", str(fabricated), *args, *factors, cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    folder = tmp_path / "my" / "report"
    lines = said.stdout.splitlines()
    assert lines[:2] == [str(folder / "report.json"), str(folder / "report.png")]
    report = json.loads((folder / "report.json").read_text())
    assert lines[2:] == [f"warning: {warning}" for warning in report["warnings"]]
    assert any("laplace(scale=0.01)" in line for line in lines[2:])
    assert (report["conditional"], report["match"], report["samples"]) == ("laplace(scale=0.01)", "exact", 24)
    assert report["metric_factors"] == ["object_x", "object_hue"]
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_of_rendered_pairs_needs_no_conditional(
    tmp_path: Path, fabricated_pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["pairs", str(fabricated_pairs), "--pairs", "1000", "--out", str(tmp_path / "r")])
    assert end.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert (report["conditional"], report["match"]) == ("laplace(scale=0.05)", "rendered")


def test_info_and_the_card_speak_of_pairs(
    fabricated_pairs: Path, fabricated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for root in (fabricated_pairs, fabricated):
        with pytest.raises(SystemExit) as end:
            main(["info", str(root)])
        assert end.value.code == 0
        said[root] = capsys.readouterr().out
    assert said[fabricated_pairs].count("positive pairs, each sample with its own z~ from laplace(scale=0.05)") == 1
    assert "pairs" not in said[fabricated]
    card = (fabricated_pairs / "README.md").read_text()
    assert card.count("are positive pairs") == 1
    for words in ("split train are positive pairs", "`laplace(scale=0.05)`", "`pair.png`", "`pair.latents.npy`"):
        assert words in card
    assert "pair.png" not in (fabricated / "README.md").read_text()
    # The line that shows how to load them does.
    (code,) = re.findall(r"`(ident3d\.Ident3D\(.*batch_size=64\))`", card)
    loader = eval(code.replace("PATH", str(fabricated_pairs)), {"ident3d": ident3d})
    assert len(next(iter(loader))) == 4


@pytest.mark.render
def test_render_with_pairs_and_the_same_command_again(tmp_path: Path) -> None:
    command = ["render", str(tmp_path / "a"), "--samples", "2", "--resolution", "16", "--quality", "draft"]
    for text in ("change(k=1)", " change( 1 )"):
        said = run(*command, "--pairs", text)
        assert (said.returncode, said.stderr) == (0, "")
        assert said.stdout == f"{tmp_path / 'a'}: 2 pairs of split train in 1 shards\n"
    said = run(*command, "--pairs", "change(k=2)")
    assert said.returncode == 2
    assert "pairs: change(k=1) there, change(k=2) asked" in said.stderr
    assert "Traceback" not in said.stderr
    assert run("verify", str(tmp_path / "a")).returncode == 0


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

"""`ident3d-baselines`: scores are printed, the same command goes on, a mistake is one line and exit status 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ident3d.baselines import mlp
from ident3d.baselines.cli import main
from ident3d.baselines.mlp import MLPTask
from ident3d.baselines.mlp_settings import row_settings
from ident3d.baselines.results import load_result
from ident3d.baselines.runs import RunFolder
from ident3d.schema import to_plain

PROGRAM = [sys.executable, "-c", "from ident3d.baselines.cli import main; main()"]
TINY = ["--dim", "2", "--batch", "32", "--steps", "6", "--seeds", "2", "--device", "cpu"]
PIECES = ["--space", "box", "--marginal", "uniform", "--model-space", "box", "--model", "laplace"]
Capture = pytest.CaptureFixture[str]


def call(args: list[str], capsys: Capture) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(args)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return end.value.code, said.out, said.err


def refused(args: list[str], capsys: Capture) -> str:
    """What stderr says of a mistake: one line. Nothing else may be said."""
    status, out, err = call(args, capsys)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("ident3d-baselines: ")
    return line


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, in which `runs` would be made."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results: row 2.1, identity, two seeds. Read it, never write into it."""
    root = tmp_path_factory.mktemp("results")
    with pytest.raises(SystemExit):
        main(["mlp", "--row", "2.1", "--mode", "identity", *TINY, "--quiet", "--out", str(root / "run")])
    return root


# mlp


def test_scores_are_printed_and_kept(here: Path, capsys: Capture) -> None:
    status, out, err = call(["mlp", "--row", "2.1", "--preset", "quick", *TINY], capsys)
    assert (status, err) == (0, "")
    folder = here / "runs" / "mlp" / "2.1-unsupervised-quick"
    result = load_result(folder)
    first, second, last = out.splitlines()
    for line, name in ((first, "r2"), (second, "mcc")):
        a, b = (f"{100 * score:.2f}" for score in result.scores[name])
        assert line == f"{name.upper():4}{result.percent(name)} %  (seeds 0 to 1: {a}, {b})"
    assert last.startswith(f"{folder.relative_to(here) / 'result.json'}: 6 steps in ")
    assert (result.row, result.preset, result.seeds) == ("2.1", "quick", (0, 1))
    assert result.settings["training"]["steps"] == 6
    assert call(["mlp", "--row", "2.1", "--preset", "quick", *TINY], capsys)[1] == out


def test_pieces_by_name_are_those_of_the_row(here: Path, capsys: Capture) -> None:
    assert call(["mlp", *PIECES, "--conditional", "laplace(0.05)", *TINY, "--out", "a"], capsys)[0] == 0
    assert call(["mlp", "--row", "2.1", *TINY, "--out", "b"], capsys)[0] == 0
    pieces, row = load_result(here / "a"), load_result(here / "b")
    assert (pieces.settings, pieces.scores) == (row.settings, row.scores)
    assert (pieces.row, row.row) == (None, "2.1")


def test_options_reach_the_settings(here: Path, capsys: Capture) -> None:
    options = ["--tau", "0.5", "--learning-rate", "0.01", "--scale-learning-rate", "0.02", "--precision", "bf16"]
    switches = [
        "--include-self",
        "False",
        "--positive-in-denominator",
        "False",
        "--mode",
        "supervised",
        "--first-seed",
        "3",
    ]
    assert call(["mlp", "--row", "1.2", *TINY, *options, *switches, "--out", "a"], capsys)[0] == 0
    result = load_result(here / "a")
    expected = to_plain(row_settings("1.2", "fast"))
    training = {"steps": 6, "learning_rate": 0.01, "scale_learning_rate": 0.02, "precision": "bf16"}
    changed = {"dim": 2, "batch": 32, "tau": 0.5, "include_self": False, "positive_in_denominator": False}
    assert result.settings == {
        **expected,
        **changed,
        "mode": "supervised",
        "training": {**expected["training"], **training},
    }
    assert result.seeds == (3, 4)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["--row", "1.10", "--mode", "identity"], "1.10-identity-fast"),
        (["--mode", "identity", "--preset", "paper"], "box-identity-paper"),
        (
            ["--mode", "identity", "--space", "sphere", "--conditional", "vmf(3)", "--model-space", "sphere"],
            "sphere-vmf(3)-sphere-identity-fast",
        ),
    ],
)
def test_the_default_folder_tells_what_it_is(args: list[str], name: str, here: Path, capsys: Capture) -> None:
    assert call(["mlp", *args, *TINY], capsys)[0] == 0
    assert [p.name for p in (here / "runs" / "mlp").iterdir()] == [name]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--row", "3.1"], "row = '3.1': expected one of 1.1, 1.2"),
        (["--row", "2.1", "--conditional", "vmf(10)"], "vmf over Box(10): expected a Sphere"),
        ([*PIECES, "--conditional", "vmf(10)"], "vmf over Box(10): expected a Sphere"),
        ([*PIECES, "--conditional", "laplace(-1)"], "expected numbers above 0"),
        ([*PIECES, "--conditional", "banana(1)"], "unknown law 'banana'"),
        (["--row", "2.1", "--marginal", "cauchy(1)"], "marginal: 'cauchy(1)': unknown law"),
        (["--row", "2.1", "--model", "gennorm(0.5)"], "gennorm(P) with P of at least 1"),
        (["--row", "2.1", "--model", "vmf"], "the dot product needs a sphere"),
        (["--row", "2.1", "--tau", "0"], "tau = 0.0: expected a finite number above 0"),
        (["--row", "2.1", "--tau", "-1"], "tau = -1.0"),
        (["--row", "2.1", "--tau", "nan"], "tau = nan"),
        (["--row", "2.1", "--batch", "1"], "batch = 1: expected 2 to"),
        (["--row", "2.1", "--steps", "-5"], "steps = -5: expected 0 to"),
        (["--row", "2.1", "--steps", "0"], "steps = 0: expected at least 1"),
        (["--row", "2.1", "--dim", "0"], "dim = 0"),
        (["--row", "1.1", "--dim", "1"], "Sphere of dimension 1"),
        (["--row", "2.1", "--learning-rate", "inf"], "learning_rate = inf"),
        (["--row", "2.1", "--seeds", "0"], "seeds = 0 from 0: expected at least 1"),
        (["--row", "2.1", "--first-seed", "-1"], "seeds = 5 from -1"),
        (["--row", "2.1", "--log-every", "0"], "log_every = 0: expected a whole number"),
        (["--row", "2.1", "--checkpoint-every", "-1"], "checkpoint_every = -1"),
        (["--row", "2.1", "--device", "banana"], "device = 'banana': expected auto, cpu, cuda"),
        (["--row", "2.1", "--device", "cpu", "--precision", "tf32"], "precision = tf32 on cpu"),
    ],
)
def test_mistakes_leave_nothing_behind(args: list[str], words: str, here: Path, capsys: Capture) -> None:
    assert words in refused(["mlp", *args], capsys)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["mlp", "--row", "2.1", "--preset", "slow"], "slow"),
        (["mlp", "--row", "2.1", "--mode", "guess"], "guess"),
        (["mlp", "--space", "torus"], "torus"),
        (["mlp", "--row", "2.1", "--precision", "fp8"], "fp8"),
        (["mlp", "--row", "2.1", "--steps", "many"], "many"),
        (["mlp", "--row", "2.1", "--colour", "red"], "--colour"),
        (["table"], "required"),
        (["table", "one", "--results", "."], "one"),
        (["figure"], "required"),
        (["paint"], "paint"),
        ([], "ident3d-baselines"),
    ],
)
def test_arguments_that_are_none_of_these(args: list[str], words: str, here: Path, capsys: Capture) -> None:
    status, out, err = call(args, capsys)
    assert status == 2
    assert words in out + err
    assert list(here.iterdir()) == []


def test_help(capsys: Capture) -> None:
    for args in ([], ["mlp"], ["table"], ["figure"]):
        status, out, _ = call([*args, "--help"], capsys)
        assert status == 0
        assert "ident3d-baselines" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_that_is_absent(here: Path, capsys: Capture) -> None:
    assert "has no GPU that torch can use" in refused(["mlp", "--row", "2.1", "--device", "cuda"], capsys)
    assert list(here.iterdir()) == []


def test_tensorboard_that_is_absent(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for name in [n for n in sys.modules if n.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "pip install tensorboard" in refused(["mlp", "--row", "2.1", *TINY, "--tensorboard"], capsys)


def test_folders_of_others(here: Path, finished: Path, capsys: Capture) -> None:
    command = ["mlp", "--row", "2.1", *TINY, "--out"]
    (here / "file").write_text("mine")
    assert "holds something else (file); expected a new or an empty folder" in refused([*command, "."], capsys)
    assert "a run cannot be kept there" in refused([*command, "file"], capsys)
    assert "/proc/run: a run cannot be kept there" in refused([*command, "/proc/run"], capsys)
    shutil.copytree(finished / "run", "other")
    line = refused([*command, "other"], capsys)
    assert "holds the result of another run; choose another folder" in line
    assert "mode: identity there, unsupervised asked" in line
    assert (here / "file").read_text() == "mine"


@pytest.mark.parametrize("damage", ["half", "flipped", "empty", "text"])
def test_a_damaged_checkpoint(damage: str, here: Path, finished: Path, capsys: Capture) -> None:
    run = shutil.copytree(finished / "run", here / "run")
    (run / "result.json").unlink()
    path = run / "checkpoint.pt"
    data = bytearray(path.read_bytes())
    place = data.index(b"identity")
    flipped = bytes(data[:place]) + b"I" + bytes(data[place + 1 :])
    path.write_bytes({"half": bytes(data[:500]), "flipped": flipped, "empty": b"", "text": b"hello"}[damage])
    line = refused(["mlp", "--row", "2.1", "--mode", "identity", *TINY, "--out", "run"], capsys)
    assert "run/checkpoint.pt: a damaged checkpoint (" in line
    assert line.endswith("remove it to begin again from step 0")
    path.unlink()
    assert call(["mlp", "--row", "2.1", "--mode", "identity", *TINY, "--out", "run"], capsys)[0] == 0


def test_two_runs_in_one_folder(here: Path, capsys: Capture) -> None:
    with RunFolder(here / "run").lock():
        line = refused(["mlp", "--row", "2.1", *TINY, "--out", "run"], capsys)
    assert f"another run (process {os.getpid()}) is at work in it" in line


def test_numbers_that_are_not_finite(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = MLPTask.losses
    monkeypatch.setattr(MLPTask, "losses", lambda self, step: losses(self, step) + (torch.nan if step == 4 else 0))
    line = refused(["mlp", "--row", "2.1", *TINY, "--checkpoint-every", "2", "--out", "run"], capsys)
    assert "step 4: the loss of seed 0 is not finite; the last good checkpoint is that of step 4, run/che" in line


def test_ctrl_c_in_a_process_of_its_own_and_going_on(here: Path) -> None:
    """The same command twice, stopped once, gives what it gives undisturbed."""
    code = (
        "import os; from ident3d.baselines.mlp import MLPTask; losses = MLPTask.losses\n"
        "def stopping(self, step):\n    if step == 3:\n        os.kill(os.getpid(), 2)\n    return losses(self, step)\n"
        "MLPTask.losses = stopping\nfrom ident3d.baselines.cli import main; main()"
    )
    command = ["mlp", "--row", "2.1", *TINY, "--log-every", "5"]
    stopped = subprocess.run(
        [sys.executable, "-c", code, *command, "--out", "b"], capture_output=True, text=True, check=False
    )
    assert (stopped.returncode, stopped.stdout) == (130, "")
    told = "ident3d-baselines: SIGINT after step 4 of 6; the same command goes on from b"
    assert stopped.stderr.split() == told.split()
    for folder in ("a", "b"):
        done = subprocess.run([*PROGRAM, *command, "--out", folder], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    a, b = (load_result(here / folder) for folder in ("a", "b"))
    assert (a.scores, a.extra) == (b.scores, b.extra)
    losses = [json.loads((here / folder / "log.jsonl").read_text().splitlines()[0])["loss"] for folder in ("a", "b")]
    assert losses[0] == losses[1]


def test_a_mistake_in_a_process_of_its_own() -> None:
    done = subprocess.run([*PROGRAM, "mlp", "--row", "9.9"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ident3d-baselines: row = '9.9': expected one of 1.1")
    assert done.stderr.count("\n") == 1


# table and figure


def test_a_table_is_printed_and_written(here: Path, finished: Path, capsys: Capture) -> None:
    status, printed, err = call(["table", "2", "--results", str(finished)], capsys)
    assert (status, err) == (0, "")
    assert load_result(finished / "run").percent("mcc") in printed
    assert "46.55±1.34" in printed
    for name, start in (("t.md", b"#"), ("t.png", b"\x89PNG")):
        status, out, _ = call(["table", "2", "--results", str(finished), "--out", name], capsys)
        assert (status, out) == (0, f"{printed}{here / name}\n")
        assert start in (here / name).read_bytes()[:400]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["9"], "table = 9: expected one of 1, 2"),
        (["0"], "table = 0"),
        (["2", "--out", "t.docx"], ".docx"),
        (["2", "--out", "none/t.md"], "none"),
    ],
)
def test_tables_that_cannot_be_made(args: list[str], words: str, here: Path, finished: Path, capsys: Capture) -> None:
    status, _, err = call(["table", *args, "--results", str(finished)], capsys)
    assert status == 2
    assert words in err
    assert list(here.iterdir()) == []


def test_a_table_of_no_results(here: Path, capsys: Capture) -> None:
    assert "none: not there" in refused(["table", "1", "--results", "none"], capsys)
    assert "holds no result.json" in refused(["table", "1", "--results", "."], capsys)
    (here / "result.json").write_text("{")
    assert "damaged or not a result" in refused(["table", "1", "--results", "."], capsys)


FIGURE = ["figure", "2", "--dim", "3", "--steps", "3", "--batch", "32", "--seeds", "2", "--device", "cpu", "--quiet"]


def test_figure_2_and_going_on(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*FIGURE, "--concentrations", "30", "0", "--conditional", "5"]
    status, out, err = call(command, capsys)
    assert (status, err) == (0, "")
    folder = here / "runs" / "figure-2"
    assert sorted(p.name for p in folder.iterdir()) == ["figure-2.png", "marginal-0", "marginal-30"]
    zero, thirty, path = out.splitlines()
    assert zero == f"marginal 0: R2 {load_result(folder / 'marginal-0').percent('r2')} %"
    assert thirty == f"marginal 30: R2 {load_result(folder / 'marginal-30').percent('r2')} %"
    assert path == str(folder / "figure-2.png")
    assert load_result(folder / "marginal-30").settings["conditional"] == "vmf(5)"
    monkeypatch.setattr(mlp, "_run", lambda *args: pytest.fail("trained"))
    assert call(command, capsys) == (0, out, "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["figure", "3"], "figure 3: expected 2"),
        ([*FIGURE, "--concentrations", "1"], "at least two different ones"),
        ([*FIGURE, "--concentrations", "1", "-1"], "at least two different ones"),
        ([*FIGURE, "--concentrations", "1", "inf"], "at least two different ones"),
        ([*FIGURE, "--conditional", "-5"], "-5"),
        ([*FIGURE, "--conditional", "nan"], "nan"),
        ([*FIGURE, "--seeds", "0"], "seeds = 0"),
        ([*FIGURE, "--dim", "1"], "Sphere of dimension 1"),
    ],
)
def test_figures_that_cannot_be_made(args: list[str], words: str, here: Path, capsys: Capture) -> None:
    assert words in refused(args, capsys)
    assert list(here.iterdir()) == []


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: MLPTask, step: int) -> torch.Tensor:
        raise ZeroDivisionError

    monkeypatch.setattr(MLPTask, "losses", broken)
    with pytest.raises(ZeroDivisionError):
        main(["mlp", "--row", "2.1", *TINY])

"""`ident3d-baselines kitti`: what it prints and keeps, what it calls synthetic; a mistake is one line and status 2."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ident3d.baselines import kitti_masks
from ident3d.baselines.cli import main
from ident3d.baselines.cli_kitti import Kitti, row_of, settings_of
from ident3d.baselines.kitti_settings import PRESETS, KittiSettings, row_settings
from ident3d.baselines.kitti_task import KittiTask
from ident3d.baselines.paper import KITTI_ROWS
from ident3d.baselines.results import Result, load_result
from ident3d.baselines.runs import RunFolder
from ident3d.datasets.kitti_masks import KittiMasks
from ident3d.datasets.mask_pickle import FILE
from ident3d.schema import to_plain

ROOT = Path(__file__).resolve().parents[2]
MAKE = runpy.run_path(str(ROOT / "tests" / "data" / "make_kitti.py"))
ROWS = [row.row for row in KITTI_ROWS]
LENGTHS = (40, 2, 30, 19)
SIZES = ["--dim", "3", "--batch", "4", "--samples", "64"]
TINY = ["--steps", "2", *SIZES, "--seeds", "1", "--precision", "float32", "--device", "cpu"]
SYNTHETIC = "KITTI Masks (SYNTHETIC silhouettes, seed 0)"
UNDISTURBED = KittiTask.losses
Capture = pytest.CaptureFixture[str]


def call(args: list[Any], capsys: Capture) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return end.value.code, said.out, said.err


def refused(args: list[Any], capsys: Capture) -> str:
    """What stderr says of a mistake: one line. Nothing else may be said."""
    status, out, err = call(args, capsys)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("ident3d-baselines: ")
    return line


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, in which `runs` would be made; neither cache nor network can be reached from it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("IDENT3D_OFFLINE", "1")
    return folder


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked of `KittiMasks`; silhouettes are some 400 masks, and runs draw no figures."""
    asked: list[dict[str, Any]] = []

    def smaller(root: Path | None = None, **options: Any) -> KittiMasks:
        asked.append(options if root is None else {"root": root, **options})
        size: dict[str, Any] = {"sequences": 20, "frames": 30} if options.get("synthetic") else {}
        return KittiMasks(root, **options, **size)

    monkeypatch.setattr("ident3d.datasets.kitti_masks.KittiMasks", smaller)
    monkeypatch.setattr(kitti_masks, "run_figures", lambda *of: iter(()))
    return asked


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KittiTask, "losses", lambda self, step: pytest.fail("trained"))


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fabricated pickle of 91 masks. Read it, never write into it."""
    made: Path = MAKE["make_kitti"](tmp_path_factory.mktemp("kitti") / "data", LENGTHS)
    return made.parent


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, pickled: Path) -> Path:
    """A run's folder, of row 3.2 on the fabricated pickle. Read it, never write into it."""
    out = tmp_path_factory.mktemp("results") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kitti_masks, "run_figures", lambda *of: iter(()))
        with pytest.raises(SystemExit) as end:
            main(["kitti", "--data", str(pickled), "--row", "3.2", *TINY, "--quiet", "--out", str(out)])
    assert end.value.code == 0
    return out


# What works.


def test_a_run_on_the_pickle(here: Path, pickled: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["kitti", "--data", pickled / FILE, *TINY, "--seeds", "2", "--first-seed", "3"]
    status, out, err = call(command, capsys)
    assert (status, err) == (0, "")
    folder = here / "runs" / "kitti" / "contrastive-quick"
    result = load_result(folder)
    first, *scores, last = out.splitlines()
    assert first == "contrastive, laplace, unbounded, max_delta_t 1, on KITTI Masks (row 3.2)"
    for line, (name, label) in zip(
        scores, {"mcc_spearman": "MCC (Spearman)", "mcc": "MCC (Pearson)", "r2": "R2"}.items(), strict=True
    ):
        a, b = (f"{100 * score:.1f}" for score in result.scores[name])
        assert line.split() == f"{label} {result.percent(name)} % (seeds 3 to 4: {a}, {b})".split()
    assert last.startswith(f"{folder.relative_to(here) / 'result.json'}: 2 steps in ")
    assert "SYNTHETIC" not in out + (folder / "result.json").read_text()
    facts = {"name": "kitti-masks", "synthetic": False, "sequences": 4, "frames": 91, "seed": None}
    assert len(result.settings["data"].pop("latents")) == 16
    assert (result.settings["data"], result.extra["title"]) == (facts, "KITTI Masks")
    assert (result.row, result.preset, result.seeds) == ("3.2", "quick", (3, 4))
    monkeypatch.setattr(kitti_masks, "train", lambda *args: pytest.fail("trained"))
    assert call(command, capsys) == (0, out, "")


def test_a_run_on_silhouettes_says_so(here: Path, capsys: Capture, opened: list[dict[str, Any]]) -> None:
    status, out, err = call(["kitti", "--synthetic", "--row", "3.6", *TINY], capsys)
    assert (status, err) == (0, "")
    assert opened == [{"synthetic": True, "max_delta_t": 5}]
    assert out.splitlines()[0] == f"SlowVAE, unbounded, max_delta_t 5, on {SYNTHETIC} (row 3.6)"
    result = load_result(here / "runs" / "kitti" / "3.6-quick-synthetic")
    assert (result.settings["data"]["name"], result.settings["data"]["synthetic"]) == ("synthetic-silhouettes", True)
    assert (result.settings["data"]["seed"], result.extra["title"]) == (0, SYNTHETIC)


@pytest.mark.parametrize(
    ("args", "name", "row"),
    [
        (
            ["--model", "contrastive", "--conditional", "laplace", "--model-space", "box", "--mean-dt", "0.15"],
            "contrastive-laplace-box-0.15s-quick",
            "3.8",
        ),
        (["--model", "slowvae", "--max-delta-t", "1", "--preset", "paper"], "slowvae-1frames-paper", "3.1"),
        (["--conditional", "normal"], "normal-quick", "3.4"),
        (["--mean-dt", "0.1"], "0.1s-quick", None),
        (["--conditional", "gennorm", "--model-space", "box"], "gennorm-box-quick", None),
        (["--conditional", "vmf", "--model-space", "sphere"], "vmf-sphere-quick", None),
        (["--row", "3.10", "--preset", "paper"], "3.10-paper", "3.10"),
    ],
)
def test_a_folder_tells_what_it_is_and_the_result_its_row(
    args: list[str], name: str, row: str | None, here: Path, pickled: Path, capsys: Capture
) -> None:
    status, out, _ = call(["kitti", "--data", pickled, *args, *TINY], capsys)
    assert status == 0
    (folder,) = (here / "runs" / "kitti").iterdir()
    assert (folder.name, load_result(folder).row) == (name, row)
    assert out.splitlines()[0].endswith("on KITTI Masks" + (f" (row {row})" if row else ""))


def test_options_reach_the_settings(here: Path, pickled: Path, capsys: Capture) -> None:
    numbers = {"learning_rate": 0.01, "scale_learning_rate": 0.02, "warmup": 0.5}
    words = {"schedule": "constant", "precision": "bf16"}
    of_loss = {"tau": 0.5, "include_self": False, "positive_in_denominator": False}
    of_vae = {"beta": 2.0, "gamma": 0.0, "rate": 3.0}
    command = ["kitti", "--data", pickled, "--row", "3.8", *TINY, "--out", "a"]
    for name, value in {**numbers, **words, **of_loss, **of_vae}.items():
        command += ["--" + name.replace("_", "-"), value]
    assert call(command, capsys)[0] == 0
    expected = to_plain(row_settings("3.8", "quick"))
    training = {**expected["training"], "steps": 2, **numbers, **words}
    changed = {"dim": 3, "batch": 4, "samples": 64, **of_loss, **of_vae, "training": training}
    settings = {name: value for name, value in load_result(here / "a").settings.items() if name != "data"}
    assert settings == {**expected, **changed}


def test_the_pickle_is_fetched_where_that_is_asked(
    here: Path, pickled: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the cache folder, or into that which is given."""
    asked: list[tuple[str, Path]] = []

    def download(name: str, root: Path) -> Path:
        asked.append((name, root))
        return shutil.copytree(pickled, root)

    module = ModuleType("ident3d.datasets.download")
    module.download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ident3d.datasets.download", module)
    for args, root in (([], here.parent / "cache" / "datasets"), (["--data", "given"], Path("given"))):
        command = ["kitti", "--download", *args, *TINY, "--out", f"run{len(args)}"]
        assert call(command, capsys)[0] == 0
        assert asked == [("kitti-masks", root)]
        call(command, capsys)
        assert len(asked) == 1
        asked.clear()


def test_all_rows_and_their_table(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the fourth row, gone on with, and then only read."""
    command = ["kitti", "--synthetic", "--row", "all", *TINY]

    def signalled(self: KittiTask, step: int) -> torch.Tensor:
        if (self.of.conditional, self.of.model_space) == ("normal", "unbounded"):
            os.kill(os.getpid(), signal.SIGINT)
        return UNDISTURBED(self, step)

    monkeypatch.setattr(KittiTask, "losses", signalled)
    status, _, err = call(command, capsys)
    assert status == 130
    out = Path("runs", "kitti", "all-quick-synthetic")
    assert f"SIGINT after step 1 of 2; the same command goes on from {out / '3.4'}" in err
    assert sorted(path.name for path in out.iterdir()) == ["3.1", "3.2", "3.3", "3.4"]
    monkeypatch.setattr(KittiTask, "losses", UNDISTURBED)

    status, printed, err = call(command, capsys)
    assert (status, err) == (0, "")
    assert {path.name for path in out.iterdir()} == {*ROWS, "table-3.md"}
    results = {row: load_result(out / row) for row in ROWS}
    for row, result in results.items():
        changes = {"dim": 3, "batch": 4, "samples": 64}
        of_row = to_plain(row_settings(row, "quick", **changes, training=PRESETS["quick"].training))
        of_row["training"] |= {"steps": 2, "precision": "float32"}
        assert (result.row, result.settings) == (row, {**of_row, "data": result.settings["data"]})
        assert result.settings["data"]["synthetic"] is True
        assert f"on {SYNTHETIC} (row {row})\n" in printed
        assert printed.count(result.percent("mcc_spearman")) >= 2  # beside the run, and in the table
    table = printed[printed.index("Table 3") :]
    assert "SYNTHETIC" in table.split("\n\n")[0]
    assert table.endswith(f"\n{(here / out / 'table-3.md')}\n")
    written = (out / "table-3.md").read_text()
    assert "SYNTHETIC" in written.splitlines()[0]
    assert all(results[row].percent("mcc_spearman") in written for row in ROWS)

    monkeypatch.setattr(kitti_masks, "train", lambda *args: pytest.fail("trained"))
    assert call(command, capsys) == (0, printed, "")
    assert (out / "table-3.md").read_text() == written
    assert call(["table", "3", "--results", out], capsys)[1] == table[: table.rindex(str(here))]


def test_masks_are_opened_once_for_each_distance(
    pickled: Path, finished: Path, capsys: Capture, opened: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []
    one = load_result(finished)

    def instead(settings: KittiSettings, data: KittiMasks, *_: Any, row: str, **of: Any) -> Result:
        ran.append((row, data.max_delta_t))
        return dataclasses.replace(one, row=row, settings={**to_plain(settings), "data": one.settings["data"]})

    monkeypatch.setattr(kitti_masks, "run_kitti", instead)
    assert call(["kitti", "--data", pickled, "--row", "all", *TINY, "--out", "."], capsys)[0] == 0
    assert ran == [(row, 1 if int(row[2:]) <= 5 else 5) for row in ROWS]
    assert sorted(options["max_delta_t"] for options in opened) == [1, 5]


# Rows.


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("row", ROWS)
def test_a_rows_settings_are_of_the_row(row: str, preset: Any) -> None:
    assert row_of(row_settings(row, preset)) == row
    assert row_of(row_settings(row, preset, dim=4, batch=7, tau=0.5, gamma=1.0)) == row
    if row_settings(row, preset).model == "slowvae":
        assert row_of(row_settings(row, preset, gamma=0.0)) is None  # a beta-VAE
    assert settings_of(Kitti(row=row, preset=preset), row) == row_settings(row, preset)
    published = next(found for found in KITTI_ROWS if found.row == row)
    slow = published.model == "slowvae"
    pieces: dict[str, Any] = {"model": "slowvae"} if slow else {"conditional": published.model}
    pieces |= {"model_space": published.model_space, "mean_dt": published.mean_dt_s}
    assert row_of(settings_of(Kitti(**pieces), None)) == row


@pytest.mark.parametrize(
    "changes",
    [{"max_delta_t": 3}, {"model_space": "sphere"}, {"conditional": "gennorm(3)"}, {"conditional": "gennorm(1)"}],
    ids=str,
)
def test_other_settings_are_of_no_row(changes: dict[str, Any]) -> None:
    assert row_of(row_settings("3.2", "quick", **changes)) is None


# Mistakes.


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "expected --data, kitti_peds_v2.pickle or its folder; --download to fetch it; or --synthetic"),
        (["--row", "all"], "expected --data"),
        (["--synthetic", "--data", "."], "synthetic = True with data or download"),
        (["--synthetic", "--download"], "synthetic = True with data or download"),
        (["--download"], "IDENT3D_OFFLINE"),
        (["--data", "."], f"{FILE}: not there; `ident3d download kitti-masks --root .`"),
        (["--data", "none"], f"none/{FILE}: not there"),
        (["--data", "none.pickle"], "none.pickle: not there"),
        (["--synthetic", "--mean-dt", "0.01"], "mean_dt = 0.01: expected 0.05, 0.075"),
        (["--synthetic", "--mean-dt", "0.06"], "mean_dt = 0.06: expected 0.05, 0.075"),
        (["--synthetic", "--mean-dt", "nan"], "mean_dt = nan: expected 0.05, 0.075"),
        (["--synthetic", "--max-delta-t", "0"], "max_delta_t = 0: expected a whole number of at least 1"),
        (["--synthetic", "--max-delta-t", "1001"], "max_delta_t = 1001: expected at most 1000 frames"),
        (["--synthetic", "--mean-dt", "0.15", "--max-delta-t", "5"], "mean_dt = 0.15, max_delta_t = 5: expected one"),
        (["--synthetic", "--row", "3.11"], "row = '3.11': expected one of 3.1, "),
        (["--synthetic", "--row", "2.1"], "row = '2.1': expected one of 3.1, "),
        (["--synthetic", "--row", "3.1", "--model", "slowvae"], "model = slowvae with row = 3.1: a row has its own"),
        (["--synthetic", "--row", "3.2", "--mean-dt", "0.05"], "mean_dt = 0.05 with row = 3.2"),
        (["--synthetic", "--row", "all", "--model-space", "box"], "model_space = box with row = all"),
        (["--synthetic", "--model", "slowvae", "--model-space", "box"], "model_space = box with model = slowvae"),
        (["--synthetic", "--model", "slowvae", "--conditional", "normal"], "conditional = normal with model = slowvae"),
        (["--synthetic", "--conditional", "vmf"], "the dot product needs a sphere"),
        (
            ["--synthetic", "--conditional", "banana"],
            "conditional = 'banana': expected vmf, laplace, normal or gennorm",
        ),
        (["--synthetic", "--conditional", "gennorm(0.5)"], "gennorm(P) with P of at least 1"),
        (["--synthetic", "--samples", "9999"], f"samples = 9999: {SYNTHETIC} has 397 masks; ask for at most as many"),
        (["--synthetic", "--row", "all", "--samples", "9999"], "samples = 9999"),
        (["--synthetic", "--samples", "63"], "samples = 63: expected a whole number of at least 64"),
        (["--synthetic", "--batch", "5000"], "batch_size = 5000: expected at most 377, as many as there are anchors"),
        (["--synthetic", "--batch", "1"], "batch = 1: expected a whole number of at least 2"),
        (["--synthetic", "--dim", "2"], "dim = 2: expected a whole number of at least 3"),
        (["--synthetic", "--tau", "0"], "tau = 0.0: expected a finite number above 0"),
        (["--synthetic", "--gamma", "-1"], "gamma = -1.0: expected a finite number of at least 0"),
        (["--synthetic", "--rate", "inf"], "rate = inf"),
        (["--synthetic", "--steps", "0"], "steps = 0: expected at least 1"),
        (["--synthetic", "--row", "all", "--steps", "-5"], "steps = -5: expected 0 to"),
        (["--synthetic", "--learning-rate", "nan"], "learning_rate = nan"),
        (["--synthetic", "--warmup", "1"], "warmup = 1.0"),
        (["--synthetic", "--seeds", "0"], "seeds = 0 from 0: expected at least 1"),
        (["--synthetic", "--first-seed", "-1"], "seeds = 1 from -1"),
        (["--synthetic", "--device", "nope"], "device = 'nope': expected auto, cpu, cuda"),
        (["--synthetic", "--precision", "tf32"], "precision = tf32 on cpu"),
        (["--synthetic", "--log-every", "0"], "log_every = 0: expected a whole number"),
        (["--synthetic", "--checkpoint-every", "-1"], "checkpoint_every = -1"),
    ],
    ids=str,
)
def test_mistakes_leave_nothing_behind(args: list[str], words: str, here: Path, capsys: Capture) -> None:
    assert words in refused(["kitti", *TINY, *args], capsys)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "simclr"], "simclr"),
        (["--model-space", "torus"], "torus"),
        (["--preset", "fast"], "fast"),
        (["--precision", "fp8"], "fp8"),
        (["--mean-dt", "soon"], "soon"),
        (["--max-delta-t", "1.5"], "1.5"),
        (["--synthetic", "yes"], "yes"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_arguments_that_are_none_of_these(args: list[str], words: str, here: Path, capsys: Capture) -> None:
    status, out, err = call(["kitti", *args], capsys)
    assert status == 2
    assert words in out + err
    assert list(here.iterdir()) == []


def test_help_says_what_silhouettes_are(capsys: Capture) -> None:
    status, out, _ = call(["kitti", "--help"], capsys)
    assert status == 0
    said = " ".join(out.replace("│", " ").split())
    assert "are not KITTI Masks and are called synthetic in every output" in said
    assert "--mean-dt SECONDS" in said


class Foreign:
    """An object of no numpy and no builtin type."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made by a pickle",)


def masks(*lengths: int, side: int = 64) -> list[Any]:
    return [np.ones((n, side, side), bool) for n in lengths]


def latents(*lengths: int) -> list[Any]:
    return [np.ones((n, 3), np.float32) for n in lengths]


def held(of_masks: Any, of_latents: Any) -> Callable[[], bytes]:
    return lambda: pickle.dumps({"pedestrians": of_masks, "pedestrians_latents": of_latents}, 4)


PICKLES: list[tuple[Callable[[], bytes], str]] = [
    (lambda: b"", "damaged, cut short or no pickle"),
    (lambda: b"hello", "damaged, cut short or no pickle"),
    (lambda: held(masks(90), latents(90))()[:9000], "damaged, cut short or no pickle"),
    (lambda: pickle.dumps([1, 2]), "holds a list; expected a dict of 'pedestrians'"),
    (lambda: pickle.dumps({"pedestrians": []}), "holds a dict of ['pedestrians']; expected"),
    (held([*masks(90), Foreign()], latents(90, 1)), "it refers to 'posix.mkdir'; only numpy arrays"),
    (held([], []), "are 0 in a list and 0 in a list"),
    (held(masks(90, 0), latents(90, 0)), "pedestrians[1] has no frames: expected at least 2, the frames of a pair"),
    (held(masks(1, 1), latents(1, 1)), "pedestrians[0] has 1 frame: expected at least 2, the frames of a pair"),
    (held(masks(50, 40, side=32), latents(50, 40)), "pedestrians[0] is bool (50, 32, 32): expected booleans (T, 64, 6"),
    (held(masks(90), latents(89)), "pedestrians_latents[0] is float32 (89, 3): expected numbers (90, 3)"),
    (held(masks(50, 40), latents(50, 40)), "KITTI Masks: centre_y is 1 in all masks that are scored"),
    (held(masks(90), [np.full((90, 3), math.nan, np.float32)]), "row 0 is [nan, nan, nan]: expected finite numbers"),
]


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(("write", "words"), PICKLES, ids=range(len(PICKLES)))
def test_pickles_that_cannot_be_used(
    write: Callable[[], bytes], words: str, here: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / FILE).write_bytes(write())
    line = refused(["kitti", "--data", tmp_path, *TINY], capsys)
    assert words in line
    assert f"{tmp_path / FILE}" in line or "KITTI Masks: " in words
    assert list(here.iterdir()) == []


def test_other_masks_are_another_run(here: Path, capsys: Capture, tmp_path: Path) -> None:
    lists = MAKE["fabricate"](LENGTHS)
    for name, shift in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        moved = [latents + shift for latents in lists[1]]
        (tmp_path / name / FILE).write_bytes(pickle.dumps({"pedestrians": lists[0], "pedestrians_latents": moved}))
    assert call(["kitti", "--data", tmp_path / "a", *TINY, "--out", "run"], capsys)[0] == 0
    assert "holds the result of another run" in refused(
        ["kitti", "--data", tmp_path / "b", *TINY, "--out", "run"], capsys
    )


def test_folders_of_others(here: Path, pickled: Path, finished: Path, capsys: Capture) -> None:
    command = ["kitti", "--data", pickled, "--row", "3.2", *TINY, "--out"]
    (here / "file").write_text("mine")
    assert "holds something else (file); expected a new or an empty folder" in refused([*command, "."], capsys)
    assert "a run cannot be kept there" in refused([*command, "file"], capsys)
    shutil.copytree(finished, here / "run")
    assert call([*command, "run"], capsys)[0] == 0
    line = refused([*command, "run", "--steps", "3"], capsys)
    assert "run: holds the result of another run; choose another folder. training.steps: 2 there, 3 asked" in line
    line = refused(["kitti", "--synthetic", *command[3:], "run"], capsys)
    assert "data.synthetic: False there, True asked" in line
    with RunFolder(here / "busy").lock():
        assert f"another run (process {os.getpid()}) is at work in it" in refused([*command, "busy"], capsys)
    assert (here / "file").read_text() == "mine"

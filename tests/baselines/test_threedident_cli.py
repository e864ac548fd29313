"""`ident3d-baselines 3dident` and `predict`: what they print and write; a mistake is one line and exit status 2."""

from __future__ import annotations

import functools
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ident3d import Ident3D
from ident3d.baselines import threedident, threedident_scoring
from ident3d.baselines.cli import main
from ident3d.baselines.results import load_result
from ident3d.baselines.runs import RunFolder
from ident3d.baselines.threedident import ThreeDIdentTask
from ident3d.baselines.threedident_scoring import encode, load_encoder
from ident3d.baselines.threedident_settings import row_settings
from ident3d.ceilings import Ceiling, ceilings
from ident3d.scenes import load_scene
from ident3d.schema import to_plain

pytest.importorskip("torchvision")

ROOT = Path(__file__).resolve().parents[2]
MAKE = runpy.run_path(str(ROOT / "tests" / "data" / "make_published.py"))
FACTORS = ("object_hue", "object_x")
TINY = ["--steps", "3", "--batch", "8", "--samples", "64", "--factors", *FACTORS, "--device", "cpu", "--quiet"]
ROW = ["3dident", "--row", "4.1", "--preset", "quick", *TINY]
Capture = pytest.CaptureFixture[str]
Maker = Callable[..., Path]


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


def network(name: str, weights: None = None, num_classes: int = 1) -> nn.Sequential:
    """In place of torchvision's, whatever the name."""
    layers = [nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


@functools.cache
def ceilings_of_scene(name: str) -> tuple[Ceiling, ...]:
    return ceilings(load_scene(name).spec)


def prepare(patch: pytest.MonkeyPatch) -> None:
    """A small network; the ceilings of a scene are computed once."""
    patch.setattr("torchvision.models.get_model", network)
    patch.setattr(threedident_scoring, "ceilings", lambda spec: ceilings_of_scene(spec.name))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, in which `runs` would be made."""
    prepare(monkeypatch)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, make_dataset: Maker) -> Path:
    """64 + 30 pictures of 16 px without pairs, of a scene with ceilings. Read it, never write into it."""
    return make_dataset(tmp_path_factory.mktemp("made") / "data", {"train": 64, "test": 30}, 64, scene="3dident-v1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Path]:
    """A folder with a run of row 4.1, one that is supervised, and one of mlp. Read it, never write into it."""
    root = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        mlp = ["mlp", "--row", "2.1", "--mode", "identity", "--dim", "2", "--batch", "32", "--seeds", "1", "--quiet"]
        commands = {
            "run": [*ROW, "--data", str(data)],
            "supervised": [*ROW, "--mode", "supervised", "--data", str(data)],
            "mlp": [*mlp, "--device", "cpu"],
        }
        for name, command in commands.items():
            with pytest.raises(SystemExit) as end:
                main([*command, "--out", str(root / name)])
            assert end.value.code == 0
        yield root


# 3dident


def test_scores_are_printed_and_kept(here: Path, data: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = call([*ROW, "--data", data], capsys)
    assert (status, err) == (0, "")
    folder = here / "runs" / "3dident" / "data-4.1-unsupervised-quick-seed0"
    result = load_result(folder)
    assert (result.row, result.preset, result.seeds, result.steps) == ("4.1", "quick", (0,), 3)
    for name in ("r2", "mcc", "train_r2", "train_mcc"):
        assert f"{100 * result.scores[name][0]:.2f}" in out
        assert all(f"{100 * score:.2f}" in out for score in result.per_factor[name][0])
    assert "96.3" in out  # the ceiling of object_hue
    assert f"{folder.relative_to(here) / 'result.json'}: 3 steps in " in out
    assert str(folder.relative_to(here) / "codes.png") in out
    monkeypatch.setattr(threedident, "train", lambda *args: pytest.fail("trained"))
    assert call([*ROW, "--data", data], capsys) == (0, out, "")


def test_options_reach_the_settings(here: Path, data: Path, capsys: Capture) -> None:
    command = ["3dident", "--data", data, "--row", "4.2", "--preset", "paper", *TINY, "--out", "a"]
    numbers = {"learning_rate": 0.01, "scale_learning_rate": 0.02, "warmup": 0.5, "patience": 9}
    words = {"schedule": "cosine", "precision": "bf16"}
    of_loss = {"tau": 0.5, "include_self": False, "positive_in_denominator": False, "allow_self": True, "chunk": 3}
    for name, value in {**numbers, **words, **of_loss}.items():
        command += ["--" + name.replace("_", "-"), value]
    command += ["--seed", 3, "--model", "gennorm", "--conditional", "gennorm", "--model-space", "unbounded"]
    status, _, err = call([*command, "--encoder", "resnet34", "--match", "hnsw"], capsys)
    assert (status, err) == (0, "")
    result = load_result(here / "a")
    expected = to_plain(row_settings("4.2", "paper"))
    changed = {"batch": 8, "samples": 64, "factors": [*FACTORS], "match": "hnsw", **of_loss}
    laws = {"model": "gennorm(3)", "conditional": "gennorm(0.05, 3)"}
    encoding = {**expected["encoding"], "space": "unbounded", "network": "resnet34"}
    training = {**expected["training"], "steps": 3, **numbers, **words}
    settings = {k: v for k, v in result.settings.items() if k != "data"}
    assert settings == {**expected, **changed, **laws, "encoding": encoding, "training": training}
    assert result.seeds == (3,)


@pytest.mark.parametrize(
    ("args", "name", "space"),
    [
        (["--mode", "supervised"], "data-object_hue-object_x-supervised-fast-seed0", "unbounded"),
        (["--mode", "supervised", "--row", "4.2"], "data-4.2-supervised-fast-seed0", "unbounded"),
        (["--mode", "supervised", "--row", "4.2", "--model-space", "box"], "data-4.2-supervised-fast-seed0", "box"),
        (["--pairs", "augmented", "--seed", "2"], "data-augmented-object_hue-object_x-unsupervised-fast-seed2", "box"),
        (["--mode", "identity", "--row", "4.5"], "data-4.5-identity-fast-seed0", "sphere"),
    ],
)
def test_the_default_folder_tells_what_it_is(
    args: list[str], name: str, space: str, here: Path, data: Path, capsys: Capture
) -> None:
    """And an encoder that is supervised is unbounded, if not told otherwise."""
    assert call(["3dident", "--data", data, *TINY, *args], capsys)[0] == 0
    (folder,) = (here / "runs" / "3dident").iterdir()
    assert folder.name == name
    assert load_result(folder).settings["encoding"]["space"] == space


def test_tables_4_and_5_show_the_runs(finished: Path, capsys: Capture) -> None:
    run, supervised = (load_result(finished / name) for name in ("run", "supervised"))
    for number, prefix in ((4, ""), (5, "train_")):
        status, out, err = call(["table", number, "--results", finished], capsys)
        assert (status, err) == (0, "")
        for result in (run, supervised):
            assert result.percent(f"{prefix}r2") in out
            assert result.percent(f"{prefix}mcc") in out


def test_published_pictures_are_learned_from_and_encoded(here: Path, capsys: Capture) -> None:
    published = MAKE["make_threedident"](here.parent, {"train": 64, "test": 24})
    assert call([*ROW, "--data", published, "--out", "run"], capsys)[0] == 0
    result = load_result(here / "run")
    assert (result.settings["data"]["name"], result.settings["data"]["scene"]) == ("3DIdent", "3dident-v1")
    assert call(["predict", "--checkpoint", "run", "--data", published, "--split", "train"], capsys)[0] == 0
    assert np.load("codes.npy").shape == (64, 2)


# evaluate


@pytest.mark.parametrize("what", ["run", "run/checkpoint.pt"])
def test_a_checkpoint_is_evaluated(what: str, here: Path, data: Path, finished: Path, capsys: Capture) -> None:
    command = ["3dident", "--mode", "evaluate", "--checkpoint", finished / what, "--data", data, "--device", "cpu"]
    status, out, err = call([*command, "--samples", "64", "--out", "scores"], capsys)
    assert (status, err) == (0, "")
    result = load_result(finished / "run")
    for name in ("r2", "mcc", "train_r2", "train_mcc"):
        assert all(f"{100 * score:.2f}" in out for score in result.per_factor[name][0])
    assert "96.3" in out
    assert sorted(p.name for p in (here / "scores").iterdir()) == ["codes.png", "evaluation.json"]
    found = json.loads((here / "scores" / "evaluation.json").read_text())
    assert found["factors"] == [*FACTORS]
    assert found["scores"] == pytest.approx({name: values[0] for name, values in result.scores.items()}, abs=1e-6)
    assert found["dci"].keys() == result.extra["dci"].keys()
    assert call([*command, "--samples", "64", "--encoder", "resnet18"], capsys)[0] == 0


def test_without_a_training_split_test_scores_are_given(
    here: Path, finished: Path, make_dataset: Maker, capsys: Capture
) -> None:
    other = make_dataset(here.parent / "other", {"test": 24}, 24, seed=9)
    command = ["3dident", "--mode", "evaluate", "--checkpoint", finished / "run", "--data", other, "--device", "cpu"]
    status, out, _ = call(command, capsys)
    assert status == 0
    assert "test, 24 pictures, after 3 steps" in out
    assert "no training scores: " in out
    assert list(here.iterdir()) == []


def test_an_evaluation_leaves_the_run_as_it_is(here: Path, data: Path, finished: Path, capsys: Capture) -> None:
    """Also where its folder is given for both."""
    shutil.copytree(finished / "run", here / "run")
    before = {path.name: path.read_bytes() for path in (here / "run").iterdir()}
    command = ["3dident", "--mode", "evaluate", "--checkpoint", "run", "--data", data, "--device", "cpu"]
    call([*command, "--samples", "64", "--out", "run"], capsys)
    assert call([*ROW, "--data", data, "--out", "run"], capsys)[0] == 0
    assert {name: (here / "run" / name).read_bytes() for name in before} == before


# predict


@pytest.mark.parametrize(("split", "n"), [("test", 30), ("train", 64)])
def test_codes_are_those_of_the_encoder(
    split: str, n: int, here: Path, data: Path, finished: Path, capsys: Capture
) -> None:
    command = ["predict", "--checkpoint", finished / "run", "--data", data, "--split", split, "--device", "cpu"]
    status, out, err = call([*command, "--out", "it.npy"], capsys)
    assert (status, err) == (0, "")
    assert out == f"{here / 'it.npy'}: {n} codes of 2 numbers, trained to find object_hue, object_x\n"
    codes = np.load(here / "it.npy")
    assert (codes.dtype, codes.shape) == (np.float32, (n, 2))
    stored, samples = load_encoder(finished / "run", torch.device("cpu")), Ident3D(data, split)
    np.testing.assert_array_equal(codes, encode(stored.encoder, samples)[0])
    with torch.no_grad():
        alone = torch.cat([stored.encoder(samples[i][0][None]) for i in range(n)])
    np.testing.assert_allclose(codes, alone.numpy(), rtol=1e-4, atol=1e-5)
    assert len(np.unique(codes, axis=0)) == n
    assert call(command, capsys)[0] == 0
    np.testing.assert_array_equal(np.load("codes.npy"), codes)


# Mistakes


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreeDIdentTask, "losses", lambda self, step: pytest.fail("trained"))


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data", "nowhere"], "nowhere: no such folder"),
        (["--data", "."], "none of the published layouts"),
        (["--test-data", "nowhere"], "nowhere: no such folder"),
        (["--factors", "object_x", "banana"], "banana"),
        (["--batch", "65"], "batch = 65, but"),
        (["--batch", "1"], "batch = 1"),
        (["--samples", "5"], "samples = 5"),
        (["--pairs", "exact"], "holds no pairs"),
        (["--conditional", "vmf(10)"], "vmf over"),
        (["--conditional", "banana"], "banana"),
        (["--conditional", "normal(-1)"], "expected"),
        (["--conditional", "normal(nan)"], "nan"),
        (["--model", "vmf"], "model = vmf in model_space = box: the dot product needs a sphere"),
        (["--model", "banana"], "model = 'banana'"),
        (["--encoder", "resnet17"], "encoder = 'resnet17': expected a classifier of torchvision"),
        (["--steps", "0"], "steps = 0: expected at least 1"),
        (["--steps", "-1"], "steps = -1"),
        (["--learning-rate", "-0.1"], "learning_rate = -0.1"),
        (["--tau", "0"], "tau = 0.0"),
        (["--chunk", "0"], "chunk = 0"),
        (["--patience", "0"], "patience = 0"),
        (["--warmup", "1"], "warmup = 1.0"),
        (["--seed", "-1"], "seed = -1"),
        (["--row", "4.9"], "row = '4.9': expected one of 4.1"),
        (["--device", "banana"], "device = 'banana'"),
        (["--precision", "tf32"], "precision = tf32 on cpu"),
        (["--log-every", "0"], "log_every = 0"),
        (["--checkpoint", "run"], "for --mode evaluate"),
        (["--mode", "evaluate"], "expected --checkpoint"),
        (["--cache", "device", "--pairs", "augmented"], "cache = device with pairs = augmented"),
    ],
    ids=str,
)
def test_mistakes_leave_nothing_behind(args: list[str], words: str, here: Path, data: Path, capsys: Capture) -> None:
    assert words in refused([*ROW, "--data", data, *args], capsys)
    assert list(here.iterdir()) == []


@pytest.mark.usefixtures("untrained")
def test_a_dataset_without_a_test_split(here: Path, make_dataset: Maker, capsys: Capture) -> None:
    alone = make_dataset(here.parent / "alone", {"train": 64}, 64)
    assert "alone: no split 'test'; it has train" in refused([*ROW, "--data", alone], capsys)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_pictures_of_unequal_sizes(split: str, here: Path, capsys: Capture) -> None:
    """One is of 17 x 16 px; test pictures are first decoded where they are scored."""
    published = MAKE["make_threedident"](here.parent, {"train": 64, "test": 24})
    path = sorted((published / split / "images").iterdir())[7]
    Image.open(path).resize((17, 16)).save(path)
    line = refused([*ROW, "--data", published], capsys)
    assert f"{path}: the picture is 17 x 16 px, expected 16 x 16" in line
    assert split == "test" or not list(here.rglob("log.jsonl"))


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_checkpoints_that_cannot_be_used(command: str, here: Path, data: Path, finished: Path, capsys: Capture) -> None:
    start = ["3dident", "--mode", "evaluate"] if command == "evaluate" else ["predict"]
    start += ["--data", str(data), "--device", "cpu", "--checkpoint"]
    assert "no checkpoint is there" in refused([*start, "nowhere"], capsys)
    assert "no checkpoint is there" in refused([*start, "."], capsys)
    assert "the checkpoint of another experiment" in refused([*start, finished / "mlp"], capsys)
    whole = (finished / "run" / "checkpoint.pt").read_bytes()
    place = whole.index(b"object_hue")
    for content in (b"", b"hello", whole[: len(whole) // 2], whole[:place] + b"O" + whole[place + 1 :]):
        (here / "bad.pt").write_bytes(content)
        assert "bad.pt: a damaged checkpoint (" in refused([*start, "bad.pt"], capsys)
    torch.save({"weights": torch.zeros(2)}, here / "bad.pt")
    assert "bad.pt: not of this version" in refused([*start, "bad.pt"], capsys)
    assert [path.name for path in here.iterdir()] == ["bad.pt"]


def test_an_encoder_of_another_architecture(data: Path, finished: Path, capsys: Capture) -> None:
    command = ["3dident", "--mode", "evaluate", "--data", data, "--checkpoint", finished / "run"]
    line = refused([*command, "--encoder", "resnet50"], capsys)
    assert "encoder = resnet50: " in line
    assert "holds a resnet18; leave the option out" in line


@pytest.mark.parametrize("command", [["3dident", "--mode", "evaluate"], ["predict"]], ids=["evaluate", "predict"])
def test_data_that_an_encoder_was_not_made_for(
    command: list[str], here: Path, finished: Path, make_dataset: Maker, capsys: Capture
) -> None:
    large = make_dataset(here.parent / "large", {"train": 24, "test": 24}, 24, resolution=32)
    args = [*command, "--checkpoint", finished / "run", "--data"]
    assert "pictures of 32 px; this encoder was trained on 16 px" in refused([*args, large], capsys)
    assert "nowhere: no such folder" in refused([*args, "nowhere"], capsys)
    assert list(here.iterdir()) == []


def test_an_evaluation_over_factors_that_the_data_lack(here: Path, finished: Path, capsys: Capture) -> None:
    other = MAKE["make_multimodal3dident"](here.parent)
    line = refused(["3dident", "--mode", "evaluate", "--checkpoint", finished / "run", "--data", other], capsys)
    assert "object_x" in line


def test_files_that_codes_cannot_go_to(here: Path, data: Path, finished: Path, capsys: Capture) -> None:
    command = ["predict", "--checkpoint", finished / "run", "--data", data, "--out"]
    assert "codes.txt: expected a name that ends in .npy" in refused([*command, "codes.txt"], capsys)
    assert "make it first" in refused([*command, "none/codes.npy"], capsys)
    (here / "folder.npy").mkdir()
    assert "folder.npy: cannot be written" in refused([*command, "folder.npy"], capsys)
    assert "no split 'val'" in refused([*command, "codes.npy", "--split", "val"], capsys)
    assert [path.name for path in here.iterdir()] == ["folder.npy"]


def test_folders_of_others(here: Path, data: Path, finished: Path, capsys: Capture) -> None:
    command = [*ROW, "--data", data, "--out"]
    (here / "file").write_text("mine")
    assert "holds something else (file); expected a new or an empty folder" in refused([*command, "."], capsys)
    assert "a run cannot be kept there" in refused([*command, "file"], capsys)
    for name in ("supervised", "mlp"):
        shutil.copytree(finished / name, here / name)
        assert "holds the result of another run; choose another folder" in refused([*command, name], capsys)
    with RunFolder(here / "run").lock():
        assert f"another run (process {os.getpid()}) is at work in it" in refused([*command, "run"], capsys)


def test_a_mistake_in_a_process_of_its_own() -> None:
    """The module is the command, for torchrun."""
    command = [sys.executable, "-m", "ident3d.baselines.threedident", "--data", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ident3d-baselines: nowhere: no such folder")
    assert done.stderr.count("\n") == 1

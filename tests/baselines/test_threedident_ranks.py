"""Encoders of pictures on two ranks learn what one rank does; ranks that disagree stop, all of them.

Run as a script, this file is one of two ranks: it runs all cases in one process group, and prints what it found.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ident3d.baselines import threedident_scoring
from ident3d.baselines.evaluation import evaluate_codes
from ident3d.baselines.picture_encoder import picture_encoder
from ident3d.baselines.ranks import joined, rank
from ident3d.baselines.results import Result, load_result
from ident3d.baselines.runs import RunFolder
from ident3d.baselines.threedident import ThreeDIdentTask, run_threedident
from ident3d.baselines.threedident_settings import Encoding, ThreeDIdentSettings
from ident3d.baselines.training import RunOptions, Stopped, TrainingSettings
from ident3d.errors import Ident3DError

RANKS = 2
PATIENCE_S = 300
STEPS = 4
CPU = torch.device("cpu")
LOSSES = ThreeDIdentTask.losses
FACTORS = ("object_x", "object_y", "ground_hue")
LAW = "laplace(scale=0.05)"
EQUAL: dict[str, dict[str, Any]] = {
    "matched": {},
    "supervised": {"mode": "supervised", "encoding": Encoding(space="unbounded")},
    "exact": {"pairs": "exact", "conditional": LAW, "model": "laplace", "encoding": Encoding("small")},
    "augmented": {"pairs": "augmented", "model": "vmf", "encoding": Encoding("small", "sphere")},
}
"""The first two with resnet18."""
SMALL: dict[str, Any] = {"mode": "supervised", "encoding": Encoding("small", "unbounded")}
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch": ({"batch": 8}, {"batch": 12}),
    "tau": ({"tau": 1.0}, {"tau": 0.5}),
    "training": ({}, {"training": TrainingSettings(STEPS + 1)}),
    "odd": ({"batch": 7}, {"batch": 7}),
    "odd, pairs": ({"batch": 9, "mode": "unsupervised"}, {"batch": 9, "mode": "unsupervised"}),
}
"""Settings of either rank."""


def network(name: str, real: Callable[..., nn.Module], **of: Any) -> nn.Module:
    """Torchvision's, and one that is called small."""
    if name != "small":
        return real(name, **of)
    # Biases before batch normalisation would have gradients of nothing but rounding.
    layers = [nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.BatchNorm1d(8), nn.Linear(8, of["num_classes"]))


def prepare(patch: pytest.MonkeyPatch) -> None:
    """Make `small` known, let Adam make no steps of rounding; leave out what takes long, and one rank does."""
    import torchvision

    known = [*torchvision.models.list_models(module=torchvision.models), "small"]
    patch.setattr(torchvision.models, "list_models", lambda **of: known)
    patch.setattr(torchvision.models, "get_model", functools.partial(network, real=torchvision.models.get_model))
    patch.setattr(torch.optim, "Adam", functools.partial(torch.optim.Adam, eps=1e-3))
    patch.setattr(threedident_scoring, "evaluate_codes", functools.partial(evaluate_codes, with_dci=False))
    patch.setattr(threedident_scoring, "ceilings", lambda spec: ())


def train(data: Path, out: Path, changes: dict[str, Any], seed: int = 2) -> Result | None:
    training = TrainingSettings(STEPS, learning_rate=1e-4, scale_learning_rate=1e-3)
    start = ThreeDIdentSettings(factors=FACTORS, conditional="normal(0.1)", batch=16, samples=64, training=training)
    options = RunOptions(log_every=1, evaluate_every=3, checkpoint_every=1000, quiet=True)
    return run_threedident(dataclasses.replace(start, **changes), data, seed, out=out, device="cpu", options=options)


def stopped(data: Path, out: Path, at: int, here: bool = True) -> str:
    """Train, with a signal to this process within a step; what is said."""

    def signalled(self: ThreeDIdentTask, step: int) -> Tensor:
        if step == at and here:
            os.kill(os.getpid(), signal.SIGTERM)
        return LOSSES(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreeDIdentTask, "losses", signalled)
        try:
            train(data, out, SMALL)
        except Stopped as stop:
            return str(stop)
    return "finished"


def refused(*args: Any, **more: Any) -> str:
    """What is said of a mistake; nothing may be trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreeDIdentTask, "losses", lambda self, step: pytest.fail("trained"))
        try:
            train(*args, **more)
        except Ident3DError as error:
            return str(error)
    return "accepted"


def cases(folder: Path) -> dict[str, Any]:
    """All that this rank is asked for, in the order that the other rank has, too."""
    data, mine = folder / "data", folder / ("other" if rank() else "data")
    nothing = {}
    for name, changes in EQUAL.items():
        nothing[name] = train(data, folder / "two" / name, changes) is None
    nothing["again"] = train(data, folder / "two" / "matched", {}) is None
    nothing["continued"] = train(data, folder / "one, then two", SMALL) is None
    mistakes = {
        name: refused(data, folder / "mistake", {**SMALL, **either[rank()]}) for name, either in MISTAKES.items()
    }
    mistakes["seed"] = refused(data, folder / "mistake", SMALL, seed=rank())
    mistakes["data"] = refused(mine, folder / "mistake", SMALL)
    mistakes["folder"] = refused(data, folder / "two" / "matched", {"tau": 0.5})
    said = stopped(data, folder / "two, then one", at=1, here=rank() == 1)
    return {"gave nothing": nothing, "mistakes": mistakes, "stopped": said}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    written: list[str] = []

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and Path(args[0]).is_relative_to(folder):
            written.extend([args[0]] * bool(args[2] & (os.O_WRONLY | os.O_RDWR)))

    sys.addaudithook(audit)
    with warnings.catch_warnings(record=True) as given, pytest.MonkeyPatch.context() as patch, joined("cpu"):
        warnings.simplefilter("always")
        prepare(patch)
        found = cases(folder)
    found["warnings"] = sorted({str(warning.message) for warning in given})
    print(json.dumps({**found, "written": sorted(set(written))}), flush=True)
    # Now and then Gloo's threads (torch 2.15) abort a process that ends in the usual way.
    os._exit(0)


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Path]) -> Iterator[Path]:
    """Two datasets of the same size; runs of one rank, one of them stopped."""
    pytest.importorskip("torchvision")
    root = tmp_path_factory.mktemp("ranks")
    for name, seed in (("data", 3), ("other", 4)):
        make_dataset(root / name, {"train": 64}, 64, seed=seed, pairs=LAW)
        make_dataset(root / name, {"test": 24}, 24, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        for name, changes in {**EQUAL, "small": SMALL}.items():
            train(root / "data", root / "one" / name, changes)
        assert "SIGTERM after step 2 of 4" in stopped(root / "data", root / "one, then two", at=1)
    yield root
    shutil.rmtree(root)  # a checkpoint of resnet18 takes 134 MB


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks finds, in torchrun's environment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **{name: str(v) for name, v in {**shared, "RANK": k, "LOCAL_RANK": k}.items()}},
        )
        for k in range(RANKS)
    ]
    try:
        printed = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * RANKS
    return [json.loads(text.splitlines()[-1]) for text in printed]


def weights_of(folder: Path) -> dict[str, Tensor]:
    state = RunFolder(folder).load_checkpoint(CPU)
    assert state is not None
    weights: dict[str, Tensor] = state["model"]
    return weights


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def shares_off(one: Path, two: Path, changes: dict[str, Any]) -> dict[str, float]:
    """Of weights and of running statistics: how far apart two runs are, as a share of how far the first came."""
    found, other = weights_of(one), weights_of(two)
    blank = ((0.5,) * 3, (0.5,) * 3)
    start = picture_encoder(changes.get("encoding", Encoding()), 3, statistics=blank, side=16, seed=2).state_dict()
    assert list(found) == list(other) == list(start)
    kinds: dict[str, list[str]] = {"running": [], "weights": []}
    for name in found:
        if name not in ("mean", "std") and "num_batches" not in name:
            kinds["running" if "running" in name else "weights"].append(name)

    def distance(to: dict[str, Tensor], names: list[str]) -> float:
        return float(torch.cat([(found[name].double() - to[name].double()).flatten() for name in names]).norm())

    return {kind: distance(other, names) / distance(start, names) for kind, names in kinds.items()}


def assert_equal(one: Path, two: Path, changes: dict[str, Any]) -> None:
    """Two runs have learned the same, but for float32's rounding.

    Sums over a batch are rounded otherwise where it is cut, by some 1e-7 of them; steps carry that on. Adam would make
    whole steps of what is nothing but rounding; with its epsilon at 1e-3 (see `prepare`), two ranks are as far from one
    as that is from itself with its batches in another order: 1e-5 of what was learned, 1e-3 where rounding takes a ReLU
    across 0. Statistics of a part of a batch, or gradients that are not their mean, change 0.05 and more.
    """
    for a, b in zip(lines_of(one), lines_of(two), strict=True):
        assert (a["step"], "r2" in a) == (b["step"], "r2" in b)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    off = shares_off(one, two, changes)
    assert off["weights"] < 0.02
    assert off["running"] < 5e-3
    results = load_result(one), load_result(two)
    assert results[0].settings == results[1].settings
    for name, values in results[0].scores.items():
        if "spearman" not in name:  # two codes that change places count
            assert values == pytest.approx(results[1].scores[name], abs=0.03)
            assert results[0].per_factor[name][0] == pytest.approx(results[1].per_factor[name][0], abs=0.05)
    curves = [[(point["step"], *point["mcc"]) for point in result.curve] for result in results]
    assert [step for step, _ in curves[0]] == [3, 4]
    assert curves[0] == [(step, pytest.approx(score, abs=0.02)) for step, score in curves[1]]


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_learn_what_one_does(name: str, folder: Path, found: list[dict[str, Any]]) -> None:
    assert found
    one, two = (folder / ranks / name for ranks in ("one", "two"))
    assert_equal(one, two, EQUAL[name])
    assert [load_result(path).extra["ranks"] for path in (one, two)] == [1, 2]


def test_a_run_goes_on_with_more_ranks_and_with_fewer(folder: Path, found: list[dict[str, Any]]) -> None:
    assert found[1]["stopped"].startswith("SIGTERM after step 2 of 4; the same command goes on from ")
    assert found[0]["stopped"].startswith("a signal to another rank after step 2 of 4; the same command goes on from ")
    two_then_one = folder / "two, then one"
    assert not (two_then_one / "result.json").exists()
    train(folder / "data", two_then_one, SMALL)
    for path, ranks in ((two_then_one, 1), (folder / "one, then two", 2)):
        assert load_result(path).extra["ranks"] == ranks
        assert_equal(folder / "one" / "small", path, SMALL)


def test_the_first_rank_alone_writes(folder: Path, found: list[dict[str, Any]]) -> None:
    assert {str(folder / "two" / name / "codes.png") for name in EQUAL} < set(found[0]["written"])
    assert found[1]["written"] == []


@pytest.mark.parametrize("name", [*EQUAL, "continued", "again"])
def test_the_first_rank_alone_gives_the_result(name: str, found: list[dict[str, Any]]) -> None:
    """Also of a run that is finished."""
    assert [each["gave nothing"][name] for each in found] == [False, True]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("batch", [r"ranks differ in .*batch\W+8\b", r"\b12 on rank 1|batch\W+12\b"]),
        ("tau", [r"ranks differ in .*tau\W+1\.0\b", r"\b0\.5 on rank 1|tau\W+0\.5\b"]),
        ("training", [r"ranks differ in .*steps\W+4\b", r"\b5 on rank 1|steps\W+5\b"]),
        ("seed", ["ranks differ in seed: 0 on rank 0; 1 on rank 1"]),
        ("data", ["ranks differ in .*data.*latents", "on the same data"]),
        ("odd", ["batch = 7 over 2 ranks: expected a multiple"]),
        ("odd, pairs", ["batch = 9 over 2 ranks: expected a multiple"]),
        ("folder", ["holds the result of another run; .*tau: 1.0 there, 0.5 asked"]),
    ],
)
def test_all_ranks_are_told_of_a_mistake_before_training(
    name: str, words: list[str], found: list[dict[str, Any]]
) -> None:
    first, second = (each["mistakes"][name] for each in found)
    assert first == second
    for pattern in words:
        assert re.search(pattern, first), first


def test_nothing_warns(found: list[dict[str, Any]]) -> None:
    assert [each["warnings"] for each in found] == [[], []]


@pytest.mark.slow
def test_torchrun_starts_the_command(folder: Path, tmp_path: Path) -> None:
    """With an encoder of torchvision's that is quickly written."""
    options = ["--data", str(folder / "data"), "--mode", "supervised", "--encoder", "shufflenet_v2_x0_5"]
    options += ["--factors", *FACTORS, "--steps", "2", "--batch", "8", "--samples", "64", "--device", "cpu", "--quiet"]
    # In bfloat16, a gradient of this network on maps of 1 x 1 was once not finite, on a CPU and a busy machine.
    options += ["--precision", "float32"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run += ["-m", "ident3d.baselines.threedident", *options, "--out", str(tmp_path / "run")]
    torchrun = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, complaint = torchrun.communicate(timeout=PATIENCE_S)
    finally:
        torchrun.terminate()  # not kill: it ends its ranks with itself
        torchrun.wait()
    assert torchrun.returncode == 0, complaint
    assert printed.count("result.json: 2 steps") == 1
    result = load_result(tmp_path / "run")
    assert (result.steps, result.extra["ranks"]) == (2, 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

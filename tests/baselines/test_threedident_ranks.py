"""Encoders of pictures on two ranks learn what one rank does; ranks that disagree stop, all of them.

Run as a script, this file is one of two ranks: it runs all cases in one process group, and prints what it found.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
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
STEPS = 6
CPU = torch.device("cpu")
LOSSES = ThreeDIdentTask.losses
FACTORS = ("object_x", "object_y", "ground_hue")
EQUAL: dict[str, dict[str, Any]] = {
    "matched": {},
    "supervised": {"mode": "supervised", "encoding": Encoding(space="unbounded")},
    "exact": {"pairs": "exact", "model": "laplace", "include_self": False, "encoding": Encoding("small")},
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
    layers = [nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.BatchNorm1d(8), nn.Linear(8, of["num_classes"]))


def prepare(patch: pytest.MonkeyPatch) -> None:
    """Make `small` known; leave out what takes longest and is the first rank's alone."""
    import torchvision

    known = [*torchvision.models.list_models(module=torchvision.models), "small"]
    patch.setattr(torchvision.models, "list_models", lambda **of: known)
    patch.setattr(torchvision.models, "get_model", functools.partial(network, real=torchvision.models.get_model))
    patch.setattr(threedident_scoring, "evaluate_codes", functools.partial(evaluate_codes, with_dci=False))
    patch.setattr(threedident_scoring, "ceilings", lambda spec: ())


def train(data: Path, out: Path, changes: dict[str, Any], seed: int = 2) -> Result | None:
    training = TrainingSettings(STEPS, learning_rate=1e-3, scale_learning_rate=1e-2)
    start = ThreeDIdentSettings(factors=FACTORS, conditional="normal(0.1)", batch=8, samples=64, training=training)
    options = RunOptions(log_every=1, evaluate_every=4, checkpoint_every=1000, quiet=True)
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
    said = stopped(data, folder / "two, then one", at=3, here=rank() == 1)
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
def folder(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Path]) -> Path:
    """Two datasets of the same size; runs of one rank, one of them stopped."""
    pytest.importorskip("torchvision")
    root = tmp_path_factory.mktemp("ranks")
    for name, seed in (("data", 3), ("other", 4)):
        make_dataset(root / name, {"train": 32}, 32, seed=seed, pairs="laplace(scale=0.05)")
        make_dataset(root / name, {"test": 24}, 24, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        for name, changes in {**EQUAL, "small": SMALL}.items():
            train(root / "data", root / "one" / name, changes)
        assert "SIGTERM after step 3 of 6" in stopped(root / "data", root / "one, then two", at=2)
    return root


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


def shares_off(name: str, folder: Path) -> dict[str, float]:
    """Of weights and of running statistics: how far two ranks are from one, as a share of how far that one came."""
    one, two = (weights_of(folder / ranks / name) for ranks in ("one", "two"))
    encoding = EQUAL[name].get("encoding", Encoding())
    start = picture_encoder(encoding, 3, statistics=((0.5,) * 3, (0.5,) * 3), side=16, seed=2).state_dict()
    assert list(one) == list(two) == list(start)

    def share(names: list[str]) -> float:
        apart, came = (
            torch.cat([(one[n].double() - other[n].double()).flatten() for n in names]).norm() for other in (two, start)
        )
        return float(apart / came)

    running = [n for n in one if "running" in n]
    return {"running": share(running), "weights": share([n for n in one if "num_batches" not in n and n not in (*running, "mean", "std")])}


@pytest.mark.parametrize("name", EQUAL)
def test_x(name: str, folder: Path, found: list[dict[str, Any]]) -> None:
    print(name, shares_off(name, folder))
    for a, b in zip(lines_of(folder/"one"/name), lines_of(folder/"two"/name), strict=True):
        print(a, b)
    one, two = (load_result(folder / ranks / name) for ranks in ("one", "two"))
    print(one.scores, two.scores)
    print(json.dumps(found,indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

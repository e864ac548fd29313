"""A split on a device: the batches and pairs that loaders give, gathered there."""

from __future__ import annotations

import json
import shutil
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ident3d import DatasetError, Ident3D, SpecError
from ident3d.datasets import device as module
from ident3d.datasets.device import DeviceSplit

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def only_where_there_is_a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")


@pytest.fixture(scope="module")
def pairs(fabricated_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(fabricated_pairs, tmp_path_factory.mktemp("device") / "pairs")


@pytest.fixture
def frames(damaged: Path) -> Path:
    """A dataset whose samples are frames in order of time."""
    manifest = json.loads((damaged / "dataset.json").read_text())
    manifest["splits"]["train"]["consecutive"] = True
    (damaged / "dataset.json").write_text(json.dumps(manifest))
    return damaged


def equal(mine: Any, truth: Any, device: str = "cpu") -> bool:
    """Whether batches hold the same, and theirs lie on the device."""
    return len(mine) == len(truth) and all(
        x.device.type == device and torch.equal(x.cpu(), y) for x, y in zip(mine, truth, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", ["none", "ram"])
def test_pictures_and_latents_are_there(pairs: Path, device: str, cache: str) -> None:
    data = Ident3D(pairs, cache=cache)
    split = data.to_device(device, quiet=True)
    assert len(split) == 24
    assert split.device.type == split.pictures.device.type == device
    assert torch.equal(split.pictures[:24].cpu(), data.pictures(range(24))[0])
    assert torch.equal(split.pictures[24:].cpu(), data.pictures(range(24), positive=True)[0])
    np.testing.assert_array_equal(split.latents.cpu().numpy(), data.latents)
    assert split.pair_latents is not None
    assert data.pair_latents is not None
    np.testing.assert_array_equal(split.pair_latents.cpu().numpy(), data.pair_latents)
    assert split.nbytes == 48 * 768 + 2 * 24 * 10 * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("conditional", "options"),
    [
        ("normal(scale=0.1)", {}),
        ("normal(scale=0.1)", {"batches": 5, "rank": 1, "world_size": 2, "factors": ["object_x", "object_hue"]}),
        ("laplace(scale=0.1)", {"allow_self": True, "weights": {"object_x": 2.0}}),
        (None, {"change": 2}),
        (None, {"share": ["object_hue"]}),
        (None, {}),
    ],
)
def test_pairs_are_those_of_the_loader(
    pairs: Path, device: str, normalize: bool, conditional: str | None, options: dict[str, Any]
) -> None:
    data = Ident3D(pairs, normalize=normalize)
    loader = data.pairs(conditional, batch_size=5, seed=4, **options)
    mine = data.to_device(device, quiet=True).pairs(conditional, batch_size=5, seed=4, **options)
    assert len(mine) == len(loader)
    for _ in range(2):  # epochs
        assert all(equal(a, b, device) for a, b in zip(mine, loader, strict=True))
    mine.set_epoch(1)
    loader.set_epoch(1)
    assert equal(next(iter(mine)), next(iter(loader)), device)


def test_pairs_of_frames_are_those_of_the_loader(frames: Path) -> None:
    data = Ident3D(frames)
    split = data.to_device("cpu", quiet=True)
    assert len(split.pictures) == 24
    batches = zip(split.pairs(batch_size=5, seed=4), data.pairs(batch_size=5, seed=4), strict=True)
    assert all(equal(a, b) for a, b in batches)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("options", [{}, {"drop_last": True, "rank": 0, "world_size": 2}])
def test_batches_are_those_of_the_loader(
    fabricated: Path, device: str, normalize: bool, options: dict[str, Any]
) -> None:
    data = Ident3D(fabricated, normalize=normalize)
    mine, loader = (x.loader(7, seed=2, **options) for x in (data.to_device(device, quiet=True), data))
    assert len(mine) == len(loader)
    for epoch in range(2):
        assert mine.epoch == loader.epoch == epoch
        assert all(equal(a, b, device) for a, b in zip(mine, loader, strict=True))
    mine.set_epoch(1)
    loader.set_epoch(1)
    assert equal(next(iter(mine)), next(iter(loader)), device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_done_to_a_batch_stays_in_it(fabricated: Path, device: str) -> None:
    split = Ident3D(fabricated).to_device(device, quiet=True)
    pictures, latents = split.pictures.clone(), split.latents.clone()
    for batch in (next(iter(split.loader(7))), next(iter(split.pairs("normal(scale=0.1)", batch_size=7)))):
        for x in batch:
            x.zero_()
    assert torch.equal(split.pictures, pictures)
    assert torch.equal(split.latents, latents)


def test_texts_come_along(fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ident3D, "has_text", True)
    monkeypatch.setattr(Ident3D, "text", lambda self, index: f"number {index}")
    data = Ident3D(fabricated)
    for mine, truth in zip(data.to_device("cpu").loader(7), data.loader(7), strict=True):
        assert equal(mine[::2], truth[::2])
        assert mine[1] == truth[1]


# Going on


@pytest.mark.parametrize("kind", ["loader", "pairs"])
@pytest.mark.parametrize("stop", [1, 4])
def test_states_go_on_here_and_there(fabricated: Path, kind: str, stop: int) -> None:
    data = Ident3D(fabricated)
    split = data.to_device("cpu", quiet=True)

    def batches(source: Any) -> Any:
        if kind == "loader":
            return source.loader(6, seed=3)
        return source.pairs("normal(scale=0.1)", batch_size=6, seed=3)

    whole = batches(data)
    truth = [*whole, *whole]
    for first, second in ((split, data), (data, split), (split, split)):
        begun, went_on = batches(first), batches(second)
        served = list(islice(begun, stop))
        state = json.loads(json.dumps(begun.state_dict()))
        went_on.load_state_dict(state)
        served += list(went_on)
        assert all(equal(a, b) for a, b in zip(served, truth, strict=False))
        assert len(served) == (4 if stop < 4 else 8)


def test_a_pass_that_is_left_leaves_no_thread_and_is_gone_on_with(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    pairs = data.to_device("cpu", quiet=True).pairs("normal(scale=0.1)", batch_size=6, seed=3)
    batches = iter(pairs)
    next(batches)
    batches.close()
    assert not any(thread.name.startswith("ident3d") for thread in threading.enumerate())
    truth = list(data.pairs("normal(scale=0.1)", batch_size=6, seed=3))
    assert all(equal(a, b) for a, b in zip(pairs, truth[1:], strict=True))


def test_the_state_of_others_is_refused(fabricated: Path) -> None:
    split = Ident3D(fabricated).to_device("cpu", quiet=True)
    pairs, batches = split.pairs("normal(scale=0.1)", batch_size=6), split.loader(6)
    with pytest.raises(SpecError, match="state of kind"):
        pairs.load_state_dict(batches.state_dict())
    with pytest.raises(SpecError, match="state of kind"):
        batches.load_state_dict(pairs.state_dict())


# Damaged pictures


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("cache", ["none", "ram"])
def test_damaged_pictures_are_left_out(damaged: Path, cache: str) -> None:
    (damaged / "train" / "train-000001.tar").unlink()  # samples 5 to 9
    data = Ident3D(damaged, cache=cache, on_error="skip")
    split = data.to_device("cpu", quiet=True)
    mine, truth = list(split.loader(8, seed=1)), list(data.loader(8, seed=1, threads=1))
    assert data.skipped == 2 * 5
    assert sum(len(x) for x, _ in mine) == 19
    assert all(equal(a, b) for a, b in zip(mine, truth, strict=True))
    mine, truth = (list(x.pairs("normal(scale=0.2)", batch_size=12, seed=1)) for x in (split, data))
    assert all(equal(a, b) for a, b in zip(mine, truth, strict=True))
    with pytest.raises(DatasetError, match="nothing but damaged pictures"):
        list(split.loader(5, shuffle=False))


def test_a_damaged_picture_is_refused(damaged: Path) -> None:
    (damaged / "train" / "train-000001.tar").unlink()
    with pytest.raises(DatasetError, match=r"train-000001\.tar"):
        Ident3D(damaged).to_device("cpu", quiet=True)


# What is refused


def test_transforms_of_single_pictures_are_refused(fabricated: Path) -> None:
    given: list[dict[str, Any]] = [{"transform": torch.abs}, {"target_transform": torch.abs}]
    for options in given:
        with pytest.raises(SpecError, match="transform, target_transform: made for one sample on the CPU"):
            Ident3D(fabricated, **options).to_device("cpu")


def test_other_options_are_refused(fabricated: Path) -> None:
    split = Ident3D(fabricated).to_device("cpu", quiet=True)
    with pytest.raises(SpecError, match="num_workers: not an option of pairs on a device; use"):
        split.pairs("normal(scale=0.1)", batch_size=4, num_workers=2)
    with pytest.raises(SpecError, match="views: not an option of pairs on a device"):
        split.pairs(batch_size=4, views=torch.abs)
    with pytest.raises(SpecError, match="threads: not an option of batches on a device; use"):
        split.loader(4, threads=2)
    with pytest.raises(SpecError, match="conditional: missing"):
        split.pairs(batch_size=4)
    with pytest.raises(SpecError, match="batch_size = 0"):
        split.loader(0)


def test_devices_that_there_are_not_are_refused(fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Ident3D(fabricated)
    with pytest.raises(SpecError, match="device = 'gpu'"):
        data.to_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match="device = 'cuda:1': torch finds no GPU here"):
        data.to_device("cuda:1")


def test_a_device_without_room_is_refused(fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Ident3D(fabricated)
    monkeypatch.setattr("ident3d.datasets.decoding.available_memory", lambda: 18_000)
    with pytest.raises(DatasetError, match=r"24 decoded pictures need 0\.018 MB of memory, .* serve them from cache"):
        data.to_device("cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10_000, 20_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1_000)
    with pytest.raises(DatasetError, match=r"need 0\.018 MB on cuda:0, 0\.014 MB are free; serve them from cache"):
        module._check_room(data, torch.device("cuda", 0), 18_432)


def test_memory_that_torch_does_not_give_is_told(fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    data = Ident3D(fabricated)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(DatasetError, match=r"cpu: 24 decoded pictures do not fit \(out of memory\)"):
        data.to_device("cpu")


def test_every_kind_of_device_will_do(fabricated: Path) -> None:
    split = DeviceSplit(Ident3D(fabricated, normalize=True), "meta", quiet=True)
    x, positive, z, _ = next(iter(split.pairs("normal(scale=0.1)", batch_size=4)))
    assert x.device.type == positive.device.type == z.device.type == "meta"
    assert x.shape == (4, 3, 16, 16)
    assert x.dtype == torch.float32

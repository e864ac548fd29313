"""The batches of a training: each a function of its step, from a device as from disk, and the ranks' together."""

from __future__ import annotations

import dataclasses
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ident3d import Ident3D, PairSampler, ThreeDIdent
from ident3d.baselines import threedident_data as module
from ident3d.baselines.threedident_data import StepBatches, open_split
from ident3d.baselines.threedident_settings import ThreeDIdentSettings, preset_settings
from ident3d.datasets.dataset import PictureDataset
from ident3d.datasets.loader import EpochOrder
from ident3d.datasets.pairs import RenderedPairs
from ident3d.errors import DatasetError, SpecError

# torch's workers, on Python 3.12 and later.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

MAKE = runpy.run_path(str(Path(__file__).resolve().parents[1] / "data" / "make_published.py"))
CPU = torch.device("cpu")
SIZE = 6  # of a batch, so that an epoch of 24 samples has four
KINDS: dict[str, dict[str, Any]] = {
    "supervised": {"mode": "supervised"},
    "matched": {"pairs": "matched", "conditional": "laplace(0.1)"},
    "exact": {"pairs": "exact"},
    "augmented": {"pairs": "augmented"},
}
HELD = [name for name in KINDS if name != "augmented"]
PLACES = [(kind, cache) for kind in KINDS for cache in ("device", "disk") if (kind, cache) != ("augmented", "device")]
Step = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of its own, and views made by this process: starting others takes longer than all else."""
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "cores", lambda: 0)


@pytest.fixture(scope="module")
def root(fabricated_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 samples that hold pairs, in a folder of their own."""
    return shutil.copytree(fabricated_pairs, tmp_path_factory.mktemp("steps") / "data")


def some(kind: str, **changes: Any) -> ThreeDIdentSettings:
    return dataclasses.replace(preset_settings("quick"), **{"batch": SIZE, **KINDS[kind], **changes})


def batches(
    data: Path | PictureDataset, kind: str, cache: Any = "device", seed: int = 5, **changes: Any
) -> StepBatches:
    found = Ident3D(data) if isinstance(data, Path) else data
    return StepBatches(found, some(kind, **changes), seed=seed, device=CPU, cache=cache, quiet=True)


def kept(step: Step) -> Step:
    """A copy: memory may be used again."""
    return step[0].clone(), step[1].clone(), step[2].clone()


def in_order(of: StepBatches, count: int) -> list[Step]:
    return [kept(of.at(k)) for k in range(count)]


def same(one: Step, other: Step) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


# What a step is


@pytest.mark.parametrize(("kind", "cache"), [(kind, cache) for kind, cache in PLACES if kind != "augmented"])
def test_a_step_has_the_samples_of_its_batch(root: Path, kind: str, cache: str) -> None:
    data = Ident3D(root)
    order = EpochOrder(24, batch_size=SIZE, seed=5, drop_last=True)
    streams: dict[str, Any] = {
        "matched": lambda: PairSampler(data, "laplace(scale=0.1)", batch_size=SIZE, seed=5),
        "exact": lambda: RenderedPairs(24, batch_size=SIZE, seed=5),
    }
    of = batches(root, kind, cache)
    for step in range(6):
        x, positive, z = of.at(step)
        assert (x.dtype, x.shape, z.dtype) == (torch.uint8, (SIZE, 3, 16, 16), torch.float32)
        if kind == "supervised":
            anchors = order.jobs((step // 4, step % 4 * SIZE))[0].places.tolist()
            assert torch.equal(positive, x)
        else:
            anchors, others = (list(row) for row in zip(*streams[kind]().batch(step), strict=True))
            assert torch.equal(positive, data.pictures(others, positive=kind == "exact")[0])
        assert torch.equal(x, data.pictures(anchors)[0])
        np.testing.assert_array_equal(z, data.latents[anchors])


def test_augmented_are_two_views_of_the_pictures(root: Path) -> None:
    data = Ident3D(root)
    x, positive, z = batches(root, "augmented", "disk").at(0)
    assert x.shape == positive.shape == (SIZE, 3, 16, 16)
    assert x.dtype == torch.uint8
    assert all(not torch.equal(a, b) for a, b in zip(x, positive, strict=True))
    assert all((data.latents == row).all(axis=1).any() for row in z.numpy())


@pytest.mark.parametrize("cache", ["device", "disk"])
@pytest.mark.parametrize(("batch", "steps", "served"), [(6, 4, 24), (5, 4, 20), (24, 1, 24), (13, 1, 13)])
def test_supervised_epochs_have_each_sample_once(root: Path, cache: str, batch: int, steps: int, served: int) -> None:
    data = Ident3D(root)
    number = {row.tobytes(): k for k, row in enumerate(data.latents)}
    of = batches(root, "supervised", cache, batch=batch)
    orders = []
    for epoch in range(3):
        rows = torch.cat([of.at(epoch * steps + k)[2] for k in range(steps)]).numpy()
        orders.append([number[row.tobytes()] for row in rows])
        assert len(set(orders[-1])) == len(orders[-1]) == served
    assert orders[0] != orders[1] != orders[2]


def test_options_of_the_pairs_are_those_of_the_settings(root: Path) -> None:
    near: dict[str, Any] = {"conditional": "normal(0.0001)"}
    own = batches(root, "matched", allow_self=True, **near).at(0)
    assert torch.equal(own[0], own[1])
    other = batches(root, "matched", **near).at(0)
    assert not any(torch.equal(a, b) for a, b in zip(other[0], other[1], strict=True))
    assert not same(kept(batches(root, "matched", seed=6).at(0)), kept(batches(root, "matched").at(0)))
    settings = some("matched", match="hnsw", allow_self=True, tau=2.0)
    expected = {"conditional": "laplace(0.1)", "batch_size": SIZE, "match": "hnsw", "allow_self": True}
    assert module.pairs_of(settings) == expected
    assert module.pairs_of(some("exact", match="hnsw")) == {"batch_size": SIZE}


def test_the_factors_that_are_chosen_are_matched_alone(root: Path) -> None:
    data = Ident3D(root, factors=["object_hue", "object_x"])
    _, _, z = batches(data, "matched").at(0)
    sampler = PairSampler(data.latents, "laplace(scale=0.1)", batch_size=SIZE, seed=5)
    np.testing.assert_array_equal(z, data.latents[[i for i, _ in sampler.batch(0)]])


# A function of the step


@pytest.mark.parametrize(("kind", "cache"), PLACES)
def test_steps_may_be_asked_for_in_any_order(root: Path, kind: str, cache: str) -> None:
    truth = in_order(batches(root, kind, cache), 10)
    assert not any(same(truth[k], truth[k + 1]) for k in range(9))
    of = batches(root, kind, cache)
    for step in (7, 8, 0, 3, 3, 4, 9, 2, 1, 4):  # over the ends of epochs at 4 and 8
        assert same(of.at(step), truth[step]), step
    for step in (5, 8):
        assert same(batches(root, kind, cache).at(step), truth[step]), step


@pytest.mark.parametrize("kind", HELD)
def test_device_and_disk_give_the_same(root: Path, kind: str) -> None:
    one, other = (in_order(batches(root, kind, cache), 9) for cache in ("device", "disk"))
    assert all(same(a, b) for a, b in zip(one, other, strict=True))


def test_views_are_the_same_whatever_makes_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = in_order(batches(root, "augmented", "disk"), 6)
    monkeypatch.setattr(module, "cores", lambda: 2)
    of = batches(root, "augmented", "disk")
    for step in (0, 1, 5):
        assert same(of.at(step), truth[step])


@pytest.mark.parametrize("kind", KINDS)
def test_the_callers_random_numbers_are_neither_read_nor_advanced(root: Path, kind: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    truth = in_order(batches(root, kind, "disk"), 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(same(a, b) for a, b in zip(in_order(batches(root, kind, "disk"), 2), truth, strict=True))


@pytest.mark.parametrize(("kind", "cache"), PLACES)
def test_the_ranks_have_the_batch_of_one(root: Path, kind: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = in_order(batches(root, kind, cache), 6)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    ranks = []
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        ranks.append(in_order(batches(root, kind, cache), 6))
        assert same(batches(root, kind, cache).at(5), ranks[-1][5])
    for step, truth in enumerate(whole):
        parts = [rank[step] for rank in ranks]
        assert all(len(x) == 2 for part in parts for x in part)
        together = (torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
        assert same((*together, torch.cat([part[2] for part in parts])), truth)


# Where pictures are kept


def test_auto_keeps_pictures_where_there_is_room(
    fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(fabricated, tmp_path / "data")
    data = Ident3D(root)
    truth = in_order(batches(data, "matched", "auto"), 2)
    assert data.store is None
    assert not (root / ".decoded").exists()
    monkeypatch.setattr(module, "fits", lambda data, device: False)
    assert all(same(a, b) for a, b in zip(in_order(batches(data, "matched", "auto"), 2), truth, strict=True))
    assert data.store is not None
    assert list((root / ".decoded").iterdir())
    views = Ident3D(root)
    monkeypatch.setattr(module, "fits", lambda data, device: True)
    batches(views, "augmented", "auto").at(0)
    assert views.store is not None


def test_pictures_that_are_decoded_already_are_taken(root: Path) -> None:
    data = Ident3D(root, cache="ram")
    store = data.store
    assert same(batches(data, "matched", "disk").at(0), batches(root, "matched", "disk").at(0))
    assert data.store is store


LAYOUTS = ["threedident", "causal3dident", "multimodal3dident", "temporal"]


@pytest.mark.parametrize("cache", ["device", "disk"])
@pytest.mark.parametrize("kind", ["supervised", "matched"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_published_layout_is_trained_on(tmp_path: Path, layout: str, kind: str, cache: str) -> None:
    """One has texts, which training leaves aside."""
    data = open_split(MAKE[f"make_{layout}"](tmp_path), "train")
    x, positive, z = batches(data, kind, cache).at(1)
    assert x.shape == positive.shape == (SIZE, 3, data.resolution, data.resolution)
    stored = {row.tobytes() for row in data.latents}
    assert z.shape == (SIZE, data.latents.shape[1])
    assert all(row.tobytes() in stored for row in z.numpy())


# What is refused


@pytest.mark.parametrize(("kind", "cache"), PLACES)
def test_a_damaged_picture_is_told_before_the_first_batch(
    damaged: Path, make_dataset: Callable[..., Path], kind: str, cache: str, tmp_path: Path
) -> None:
    folder = damaged if kind != "exact" else make_dataset(tmp_path / "pairs", {"train": 24}, pairs="normal(scale=0.1)")
    shard = folder / "train" / "train-000004.tar"  # of the last samples
    data = bytearray(shard.read_bytes())
    start = data.rindex(b"\x89PNG") + 50
    data[start : start + 100] = bytes(100)
    shard.write_bytes(data)
    with pytest.raises(DatasetError, match=r"train-000004\.tar.*decode"):
        batches(folder, kind, cache)


@pytest.mark.parametrize("cache", ["device", "disk"])
def test_a_picture_of_another_size_is_told_before_the_first_batch(tmp_path: Path, cache: str) -> None:
    folder = MAKE["make_threedident"](tmp_path)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "train" / "images" / "17.png")
    with pytest.raises(DatasetError, match=r"17\.png: the picture is 8 x 8 px, expected 16 x 16"):
        batches(ThreeDIdent(folder), "matched", cache)


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("cache", ["device", "disk"])
@pytest.mark.parametrize("kind", ["supervised", "matched"])
def test_damaged_pictures_are_left_out_where_that_is_asked_for(damaged: Path, kind: str, cache: str) -> None:
    (damaged / "train" / "train-000001.tar").unlink()  # samples 5 to 9
    data = Ident3D(damaged, on_error="skip")
    of = batches(data, kind, cache, batch=12)
    sizes = [len(of.at(k)[0]) for k in range(4)]
    assert min(sizes) < 12
    if kind == "supervised":
        assert sizes[0] + sizes[1] == sizes[2] + sizes[3] == 19
    assert data.skipped > 0


@pytest.mark.parametrize(
    ("conditional", "words"), [("banana(3)", "banana"), ("vmf(1)", "vmf"), ("share(object_hat)", "object_hat")]
)
def test_what_pairs_refuse_is_refused(root: Path, conditional: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        batches(root, "matched", conditional=conditional)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    with pytest.raises(SpecError, match="batch = 6 over 4 ranks: expected a multiple"):
        batches(root, kind, "disk")


def test_other_caches_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="cache = 'ram': expected one of auto, device, disk"):
        batches(root, "matched", "ram")
    with pytest.raises(SpecError, match="cache = device with pairs = augmented: views are made on the CPU; choose"):
        batches(root, "augmented", "device")
    monkeypatch.setattr("ident3d.datasets.decoding.available_memory", lambda: 1_000)
    with pytest.raises(DatasetError, match=r"48 decoded pictures need .* serve them from cache='disk'"):
        batches(root, "matched", "device")

"""Divided pairs: the ranks' parts of each batch are together the batch of one process, stopped and continued too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ident3d import Ident3D, SpecError, pair_loader, simclr
from ident3d.datasets.batches import DividedStream
from ident3d.datasets.device import fits
from ident3d.datasets.pairs import RenderedPairs

# torch's workers, on Python 3.12 and later.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

Batch = tuple[Tensor, ...]
KINDS: dict[str, dict[str, Any]] = {
    "matched": {"conditional": "normal(scale=0.1)"},
    "share": {"share": ["object_hue"], "allow_self": True},
    "rendered": {},
    "views": {"views": simclr(16)},
}
ON_DEVICE = [name for name in KINDS if name != "views"]
SIZE = 12  # pairs a batch, so that an epoch of 24 samples has two


@pytest.fixture(scope="module")
def data(fabricated_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Ident3D:
    """24 samples that hold pairs, in a folder of their own."""
    return Ident3D(shutil.copytree(fabricated_pairs, tmp_path_factory.mktemp("divided") / "data"))


def endless(loader: Any) -> Iterator[Batch]:
    """All epochs, one after the other."""
    while True:
        yield from (tuple(batch) for batch in loader)


def first(loader: Any, count: int) -> list[Batch]:
    return list(islice(endless(loader), count))


def together(parts: list[list[Batch]]) -> list[Batch]:
    """The ranks' parts of each step, one below the other."""
    return [tuple(torch.cat(rows) for rows in zip(*step, strict=True)) for step in zip(*parts, strict=True)]


def assert_same(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert len(a) == len(b) == 4
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def divided(source: Any, kind: str, rank: int, world_size: int, **options: Any) -> Any:
    series: dict[str, Any] = {"batch_size": SIZE, "seed": 5, "divide": True, "rank": rank, "world_size": world_size}
    return source.pairs(**{**KINDS[kind], **series, **options})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3, SIZE])
def test_the_ranks_have_the_batches_of_one_process(data: Ident3D, kind: str, world_size: int) -> None:
    whole = data.pairs(**KINDS[kind], batch_size=SIZE, seed=5)
    ranks = [divided(data, kind, rank, world_size) for rank in range(world_size)]
    assert {len(loader) for loader in ranks} == {len(whole)} == {2}
    parts = [first(loader, 5) for loader in ranks]
    assert all(len(x) == SIZE // world_size for part in parts for batch in part for x in batch)
    assert_same(together(parts), first(whole, 5))


@pytest.mark.parametrize("kind", ON_DEVICE)
@pytest.mark.parametrize("world_size", [2, 3])
def test_so_they_have_on_a_device(data: Ident3D, kind: str, world_size: int) -> None:
    split = data.to_device("cpu", quiet=True)
    ranks = [divided(split, kind, rank, world_size) for rank in range(world_size)]
    assert {len(loader) for loader in ranks} == {2}
    whole = data.pairs(**KINDS[kind], batch_size=SIZE, seed=5)
    assert_same(together([first(loader, 7) for loader in ranks]), first(whole, 7))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("matched", {"threads": 0}), ("matched", {"num_workers": 2}), ("views", {"num_workers": 1})],
    ids=str,
)
def test_whatever_makes_them_the_parts_are_the_same(data: Ident3D, kind: str, options: dict[str, Any]) -> None:
    assert_same(first(divided(data, kind, 1, 3, **options), 3), first(divided(data, kind, 1, 3), 3))


def test_so_are_those_of_any_object_with_latents() -> None:
    """Item i is (i, z), so that a pair tells its samples."""

    class Table:
        latents = torch.rand(60, 3, generator=torch.Generator().manual_seed(0)).numpy()

        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> tuple[int, Tensor]:
            return index, torch.from_numpy(self.latents[index])

    def loader(**options: Any) -> Any:
        return pair_loader(Table(), "normal(scale=0.1)", batch_size=8, batches=3, seed=1, **options)

    ranks = [first(loader(divide=True, rank=rank, world_size=2), 5) for rank in range(2)]
    assert_same(together(ranks), first(loader(), 5))


def test_batches_an_epoch_are_those_of_one_process(data: Ident3D) -> None:
    loader = divided(data, "matched", 1, 2, batches=5)
    assert len(loader) == len(list(loader)) == 5
    assert_same(first(loader, 2), first(divided(data, "matched", 1, 2), 7)[5:])
    loader.set_epoch(3)
    assert_same(first(loader, 1), first(divided(data, "matched", 1, 2), 16)[15:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_stopped_and_continued_is_as_undisturbed(data: Ident3D, kind: str, stop: int) -> None:
    truth = first(divided(data, kind, 1, 3), 6)
    begun = divided(data, kind, 0, 3)
    passes = endless(begun)
    for _ in range(stop):
        next(passes)
    state = json.loads(json.dumps(begun.state_dict()))
    assert state["next"] == stop
    went_on = divided(data, kind, 1, 3)  # the state is that of all ranks
    went_on.load_state_dict(state)
    assert_same(first(went_on, 6 - stop), truth[stop:])
    if kind in ON_DEVICE:
        there = divided(data.to_device("cpu", quiet=True), kind, 1, 3)
        there.load_state_dict(state)
        assert_same(first(there, 6 - stop), truth[stop:])


def test_the_state_of_others_is_refused(data: Ident3D) -> None:
    loader, whole = divided(data, "matched", 0, 2), data.pairs("normal(scale=0.1)", batch_size=6, seed=5)
    for mine, other in ((loader, whole), (whole, loader)):
        with pytest.raises(SpecError, match=r"state of kind = 'normal.*; this series has 'normal"):
            mine.load_state_dict(other.state_dict())
    with pytest.raises(SpecError, match="state of batch_size = 4; this series has 6"):
        loader.load_state_dict(divided(data, "matched", 0, 3).state_dict())
    with pytest.raises(SpecError, match="state of seed = 6; this series has 5"):
        loader.load_state_dict(divided(data, "matched", 0, 2, seed=6).state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_divides_nothing(data: Ident3D, kind: str) -> None:
    plain = data.pairs(**KINDS[kind], batch_size=SIZE, seed=5)
    given: list[dict[str, Any]] = [{}, {"rank": 0, "world_size": 1}]
    for options in given:
        loader = data.pairs(**KINDS[kind], batch_size=SIZE, seed=5, divide=True, **options)
        assert loader.state_dict() == plain.state_dict()
        assert_same(first(loader, 3), first(plain, 3))
        plain.set_epoch(0)


def test_ranks_are_those_of_torch_distributed(data: Ident3D, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = first(divided(data, "matched", 2, 4), 3)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    for source in (data, data.to_device("cpu", quiet=True)):
        assert_same(first(source.pairs("normal(scale=0.1)", batch_size=SIZE, seed=5, divide=True), 3), truth)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_do_not_divide_are_refused(data: Ident3D, kind: str) -> None:
    words = "batch_size = 12 over 5 ranks: expected a multiple of 5"
    with pytest.raises(SpecError, match=words):
        divided(data, kind, 0, 5)
    with pytest.raises(SpecError, match=words):
        DividedStream(RenderedPairs(30, batch_size=12, seed=0), 0, 5)
    if kind in ON_DEVICE:
        with pytest.raises(SpecError, match=words):
            divided(data.to_device("cpu", quiet=True), kind, 0, 5)


@pytest.mark.parametrize("series", [{"rank": 1}, {"world_size": 2}, {"rank": 2, "world_size": 2}], ids=str)
def test_ranks_that_there_are_not_are_refused(data: Ident3D, series: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="expected both, with 0 <= rank < world_size"):
        data.pairs("normal(scale=0.1)", batch_size=SIZE, divide=True, **series)


# Room on a device


@pytest.mark.parametrize(("split", "need"), [("train", 48 * 768), ("test", 6 * 768)])  # pairs have two pictures each
def test_what_fits_is_what_the_device_takes(
    data: Ident3D, split: str, need: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Ident3D(data.root, split)
    monkeypatch.setattr("ident3d.datasets.decoding.available_memory", lambda: need)
    assert fits(part, "cpu")
    assert part.to_device("cpu", quiet=True).pictures.nbytes == need
    monkeypatch.setattr("ident3d.datasets.decoding.available_memory", lambda: need - 1)
    assert not fits(part, "cpu")
    monkeypatch.setattr("ident3d.datasets.decoding.available_memory", lambda: None)  # where nothing says so
    assert fits(part, torch.device("cpu"))


def test_what_fits_on_a_gpu_counts_what_torch_holds(data: Ident3D, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    free = {torch.device("cuda", 0): 0, torch.device("cuda", 1): 30_000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 90_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 8_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 8_000 - 6_864)
    assert fits(data, "cuda")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 8_000 - 6_863)
    assert not fits(data, "cuda")
    assert not fits(data, "cuda:0")


def test_what_fits_elsewhere_is_not_known_and_no_device_is_refused(data: Ident3D) -> None:
    assert fits(data, "meta")
    with pytest.raises(SpecError, match="device = 'gpu'"):
        fits(data, "gpu")

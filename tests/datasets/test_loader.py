"""Batches of a whole split: each sample once an epoch, the same whoever makes them, resumed where they stopped."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ident3d import DatasetError, Ident3D, SpecError
from ident3d.datasets.blocks import Blocks
from ident3d.datasets.loader import EpochOrder, PictureLoader, ready_pictures

MAKERS: tuple[dict[str, Any], ...] = (
    {"threads": 0},
    {"threads": 1},
    {"threads": 3},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
)


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


# The order


def in_a_row(batches: list[list[int]]) -> list[int]:
    return [place for batch in batches for place in batch]


def places(order: EpochOrder, position: tuple[int, int] = (0, 0)) -> list[list[int]]:
    return [job.places.tolist() for job in order.jobs(position)]


@settings(deadline=None, max_examples=200)
@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_each_sample_comes_once_an_epoch(
    samples: int, batch_size: int, world_size: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "seed": 1, "shuffle": shuffle, "drop_last": drop_last}
    ranks = []
    for rank in range(world_size):
        try:
            ranks.append(EpochOrder(samples, **options, rank=rank, world_size=world_size))
        except SpecError:
            assert samples < (batch_size * world_size if drop_last else world_size)
    batches = [places(order, (epoch, 0)) for order in ranks]
    served = sorted(place for each in batches for place in in_a_row(each))
    assert len(set(served)) == len(served)
    assert [len(each) for each in batches] == [len(order) for order in ranks]
    if drop_last:
        assert len(served) == samples - samples % (batch_size * world_size)
        assert all(len(batch) == batch_size for each in batches for batch in each)
        assert len({len(order) for order in ranks}) <= 1
    else:
        assert served == list(range(samples))
        assert all(1 <= len(batch) <= batch_size for each in batches for batch in each)
        rest = samples % (batch_size * world_size)
        assert len({len(order) for order in ranks}) == 1 or 0 < rest < world_size


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    order = EpochOrder(50, batch_size=8, seed=3)
    first = places(order)
    assert places(EpochOrder(50, batch_size=8, seed=3)) == first
    assert places(order, (1, 0)) != first
    assert places(EpochOrder(50, batch_size=8, seed=4)) != first
    assert in_a_row(places(EpochOrder(50, batch_size=20, seed=3))) == in_a_row(first)
    assert in_a_row(places(EpochOrder(50, batch_size=8, shuffle=False), (1, 0))) == list(range(50))


def test_the_global_generators_are_left_alone(fabricated: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    data = Ident3D(fabricated, transform=lambda x: x + torch.randint(2, (1,), dtype=torch.uint8))
    for maker in MAKERS:
        list(PictureLoader(data, 7, **maker))
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_of_an_order_may_change_within_an_epoch() -> None:
    alone = EpochOrder(24, batch_size=4, seed=1, rank=0, world_size=1)
    job = alone.jobs((0, 0))[1]
    assert job.then == (0, 8)
    ranks = [EpochOrder(24, batch_size=4, seed=1, rank=rank, world_size=3) for rank in range(3)]
    rest = [place for order in ranks for place in in_a_row(places(order, job.then))]
    assert sorted(rest) == sorted(alone.permutation(0)[8:].tolist())


# Batches


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cache", ["none", "ram"])
def test_batches_are_the_items_in_order(fabricated: Path, cache: str, normalize: bool) -> None:
    data = Ident3D(fabricated, cache=cache, normalize=normalize)
    items = [data[i] for i in range(24)]
    for maker in MAKERS:
        loader = data.loader(7, seed=5, **maker)
        assert len(loader) == 4
        for epoch in range(2):
            assert loader.epoch == epoch
            batches = list(loader)
            assert [len(x) for x, _ in batches] == [7, 7, 7, 3]
            assert all(x.is_contiguous() for x, _ in batches)
            for (x, z), wanted in zip(batches, places(loader.order, (epoch, 0)), strict=True):
                assert torch.equal(x, torch.stack([items[i][0] for i in wanted]))
                assert torch.equal(z, torch.stack([items[i][1] for i in wanted]))


@pytest.mark.slow
def test_spawned_workers_make_the_same(fabricated: Path) -> None:
    data = Ident3D(fabricated, cache="ram")
    truth = list(data.loader(7))
    batches = list(data.loader(7, num_workers=2, multiprocessing_context="spawn"))
    assert all(same(a, b) for a, b in zip(batches, truth, strict=True))


def test_positives_are_made_ready_as_well(fabricated_pairs: Path) -> None:
    for normalize in (False, True):
        data = Ident3D(fabricated_pairs, normalize=normalize)
        pictures, kept = ready_pictures(data, [5, 2], Blocks(keep=1), positive=True)
        assert kept == [0, 1]
        assert torch.equal(pictures, torch.stack([data.pair(5)[1], data.pair(2)[1]]))


def jitter(picture: torch.Tensor) -> torch.Tensor:
    """In place, random, and of another size and type."""
    picture.add_(torch.randint(100, (3, 1, 1), dtype=torch.uint8))
    return picture[:, :8].float()


def test_random_transforms_are_the_same_whoever_makes_them(fabricated: Path) -> None:
    data = Ident3D(fabricated, cache="ram", transform=jitter, target_transform=lambda z: {"latents": 2 * z})
    first = [(x, z["latents"]) for x, z in data.loader(7, seed=2)]
    assert first[0][0].shape == (7, 3, 8, 16)
    for maker in MAKERS:
        loader = data.loader(7, seed=2, **maker)
        again = [(x, z["latents"]) for x, z in loader]
        assert all(same(a, b) for a, b in zip(again, first, strict=True))
        assert not same([next(iter(loader))[0]], [first[0][0]])  # another epoch
    other = {tuple(z): x for x, z in _singly(data.loader(5, seed=2, rank=1, world_size=3))}
    mine = {tuple(z): x for x, z in _singly(data.loader(7, seed=2))}
    assert other
    assert all(torch.equal(x, mine[z]) for z, x in other.items())  # whatever its batch is, and on whatever rank


def _singly(loader: PictureLoader) -> Iterator[tuple[torch.Tensor, list[float]]]:
    for x, z in loader:
        yield from zip(x, z["latents"].tolist(), strict=True)


def test_a_transform_comes_before_the_normalisation(fabricated: Path) -> None:
    data = Ident3D(fabricated, transform=lambda x: x.flip(-1), normalize=True)
    whole = Ident3D(fabricated, normalize=True)
    for (x, _), (truth, _) in zip(data.loader(7), whole.loader(7), strict=True):
        assert torch.equal(x, truth.flip(-1))


def test_texts_come_along(fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ident3D, "has_text", True)
    monkeypatch.setattr(Ident3D, "text", lambda self, index: f"number {index}")
    data = Ident3D(fabricated)
    for maker in MAKERS:
        loader = data.loader(7, **maker)
        for (x, texts, z), wanted in zip(loader, places(loader.order), strict=True):
            assert texts == [f"number {i}" for i in wanted]
            assert torch.equal(x, data.pictures(wanted)[0])
            np.testing.assert_array_equal(z.numpy(), data.latents[wanted])


def test_batches_that_are_kept_do_not_change(fabricated: Path) -> None:
    data = Ident3D(fabricated, cache="ram")
    loader = data.loader(2, seed=1)
    kept = [x for x, _ in islice(loader, 6)]
    copies = [x.clone() for x in kept]
    list(loader)
    list(loader)
    assert same(kept, copies)
    before = data.latents.copy()
    for x, z in loader:
        x.zero_()
        z.zero_()
    np.testing.assert_array_equal(data.latents, before)
    assert all(x.any() for x, _ in loader)


# Damaged pictures


@pytest.fixture
def broken(damaged: Path) -> Path:
    """Samples 5 to 9 are gone."""
    (damaged / "train" / "train-000001.tar").unlink()
    return damaged


@pytest.mark.parametrize("maker", MAKERS)
def test_a_damaged_picture_stops_at_its_batch(broken: Path, maker: dict[str, Any]) -> None:
    loader = Ident3D(broken).loader(2, shuffle=False, **maker)
    served = []
    with pytest.raises(DatasetError, match=r"train-000001\.tar"):
        served += list(loader)
    assert loader.state_dict()["seen"] == 4


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cache", ["none", "ram"])
def test_damaged_pictures_are_left_out(broken: Path, cache: str, normalize: bool) -> None:
    data = Ident3D(broken, cache=cache, on_error="skip", normalize=normalize)
    for count, maker in enumerate(({"threads": 0}, {"threads": 1}, {"num_workers": 1}), 1):
        batches = list(data.loader(8, shuffle=False, **maker))
        assert [len(x) for x, _ in batches] == [5, 6, 8]
        kept = [*range(5), *range(10, 24)]
        assert torch.equal(torch.cat([x for x, _ in batches]), torch.stack([data[i][0] for i in kept]))
        np.testing.assert_array_equal(torch.cat([z for _, z in batches]).numpy(), data.latents[kept])
        assert data.skipped == 5 * count
    with pytest.raises(DatasetError, match=r"every sample of a batch is damaged, the first .*000000005"):
        list(data.loader(5, shuffle=False))


# Going on


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5])
def test_a_state_goes_on_after_the_batches_that_were_delivered(
    fabricated: Path, maker: dict[str, Any], stop: int
) -> None:
    data = Ident3D(fabricated, cache="ram")
    whole = data.loader(7, seed=2)
    truth = [*whole, *whole, *whole]
    loader = data.loader(7, seed=2, **maker)
    served: list[Any] = []
    while len(served) < stop:
        served += islice(loader, stop - len(served))
    state = json.loads(json.dumps(loader.state_dict()))
    again = data.loader(7, seed=2)
    again.load_state_dict(state)
    assert again.epoch == stop // 4
    rest = list(again)
    assert len(rest) == 4 - stop % 4
    rest += list(again)
    assert all(same(a, b) for a, b in zip([*served, *rest], truth, strict=False))
    # The loader itself goes on there too, where it was left.
    assert all(same(a, b) for a, b in zip(loader, truth[stop:], strict=False))


def test_a_pass_that_is_left_leaves_no_threads(fabricated: Path) -> None:
    loader = Ident3D(fabricated).loader(2)
    batches = iter(loader)
    next(batches)
    batches.close()
    assert not any(thread.name.startswith("ident3d") for thread in threading.enumerate())


def test_set_epoch_goes_to_its_start(fabricated: Path) -> None:
    data = Ident3D(fabricated, cache="ram")
    loader = data.loader(7, seed=2)
    first, second = list(loader), list(loader)
    next(iter(loader))
    loader.set_epoch(1)
    assert all(same(a, b) for a, b in zip(loader, second, strict=True))
    loader.set_epoch(0)
    assert all(same(a, b) for a, b in zip(loader, first, strict=True))
    with pytest.raises(SpecError, match="epoch = -1"):
        loader.set_epoch(-1)


def test_a_rank_without_a_last_batch_goes_on_with_the_others(fabricated: Path) -> None:
    data = Ident3D(fabricated, cache="ram")  # 24 = 23 + 1, and the one is for rank 0
    ranks = [data.loader(1, rank=rank, world_size=23) for rank in (0, 1)]
    assert [len(loader) for loader in ranks] == [2, 1]
    for loader in ranks:
        assert len(list(loader)) == len(loader)
        assert loader.epoch == 1
    state = {**ranks[0].state_dict(), "epoch": 0, "seen": 23}
    ranks[1].load_state_dict(state)
    assert list(ranks[1]) == []
    assert ranks[1].epoch == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "state of seed = 2; these batches have 0"),
        ({"batch_size": 8}, "batch_size"),
        ({"samples": 25}, "samples"),
        ({"shuffle": False}, "shuffle"),
        ({"drop_last": True}, "drop_last"),
        ({"kind": "pairs"}, "kind"),
        ({"seen": -1}, "state: seen"),
        ({"epoch": None}, "state: epoch"),
    ],
)
def test_the_state_of_other_batches_is_refused(fabricated: Path, change: dict[str, Any], message: str) -> None:
    loader = Ident3D(fabricated).loader(7)
    with pytest.raises(SpecError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(SpecError, match="state of kind = None"):
        loader.load_state_dict({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": 7, "seed": -1}, "seed = -1"),
        ({"batch_size": 7, "threads": -1}, "threads = -1"),
        ({"batch_size": 7, "num_workers": -2}, "num_workers = -2"),
        ({"batch_size": 7, "timeout": 3}, "timeout: of processes, but num_workers = 0"),
        ({"batch_size": 7, "num_workers": 1, "sampler": None}, "sampler: decided here"),
        ({"batch_size": 7, "rank": 0}, "rank = 0"),
        ({"batch_size": 25, "drop_last": True}, "24 samples fill no batch of rank 0"),
        ({"batch_size": 1, "rank": 24, "world_size": 25}, "24 samples fill no batch of rank 24"),
    ],
)
def test_options_out_of_range_are_refused(fabricated: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Ident3D(fabricated).loader(**options)

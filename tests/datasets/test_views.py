"""Views: two random views of one picture, a function of the item's key, drawn beside the caller's random numbers."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from ident3d import Ident3D, pair_loader, simclr
from ident3d.datasets.views import ViewItems, ViewStream
from ident3d.errors import SpecError

pytest.importorskip("torchvision")

Delivered = list[tuple[Tensor, Tensor, Tensor, Tensor]]


def deliver(loader: Any) -> Delivered:
    return [tuple(batch) for batch in loader]


def assert_same(one: Delivered, other: Delivered) -> None:
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def noise(picture: Tensor) -> Tensor:
    """A random transform that shows the random numbers it got."""
    return torch.rand(4)


class Flat:
    """Item i is (a picture of one colour, i)."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 20, 24), 5 * index, dtype=torch.uint8), index


@pytest.mark.parametrize("resolution", [8, 16, 33])
def test_views_are_pictures_of_the_resolution_asked(fabricated: Path, resolution: int) -> None:
    loader = Ident3D(fabricated).pairs(views=simclr(resolution), batch_size=6)
    x, positive, _, _ = next(iter(loader))
    for pictures in (x, positive):
        assert (pictures.dtype, pictures.shape) == (torch.uint8, (6, 3, resolution, resolution))


def test_both_views_differ_and_are_the_same_for_the_same_key(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    items, again = ViewItems(data, simclr(16)), ViewItems(data, simclr(16))
    seen = set()
    for key in range(20):
        x, positive, _, _ = items[3, key]
        assert not torch.equal(x, positive)
        other_x, other_positive, _, _ = again[3, key]
        assert torch.equal(x, other_x)
        assert torch.equal(positive, other_positive)
        seen |= {x.numpy().tobytes(), positive.numpy().tobytes()}
    assert len(seen) > 35


def test_both_latents_are_those_of_the_picture(fabricated: Path) -> None:
    data = Ident3D(fabricated, factors=["object_hue", "object_x"])
    for k, (_, _, z, z_positive) in enumerate(deliver(data.pairs(views=simclr(16), batch_size=6, seed=2))):
        expected = data.latents[[i for i, _ in ViewStream(24, batch_size=6, seed=2).batch(k)]]
        np.testing.assert_array_equal(z, expected)
        np.testing.assert_array_equal(z_positive, expected)


def test_views_are_of_the_sample_that_was_drawn() -> None:
    (batch,) = deliver(pair_loader(Flat(), batch_size=30, batches=1, views=simclr(8, strength=0.0)))
    x, positive, i, j = batch
    assert torch.equal(i, j)
    for pictures in (x, positive):
        # Grey of a grey may be rounded down.
        assert (pictures.int() - 5 * i[:, None, None, None]).abs().max() <= 1


def test_samples_are_uniform_and_keys_all_different() -> None:
    stream = ViewStream(40, batch_size=100, seed=1)
    drawn = [item for k in range(100) for item in stream.batch(k)]
    assert stats.chisquare(np.bincount([i for i, _ in drawn], minlength=40)).pvalue > 1e-3
    assert len({key for _, key in drawn}) == len(drawn)


def test_the_callers_random_numbers_stay_as_they_were(fabricated: Path) -> None:
    items = ViewItems(Ident3D(fabricated), simclr(16))
    torch.manual_seed(5)
    expected = torch.rand(6)
    torch.manual_seed(5)
    got = []
    for key in range(6):
        got.append(torch.rand(1))
        items[0, key]
    assert torch.equal(torch.cat(got), expected)


def test_the_callers_random_numbers_stay_as_they_were_where_a_transform_fails() -> None:
    def failing(picture: Tensor) -> Tensor:
        torch.rand(3)
        raise ValueError("no such view")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="no such view"):
        ViewItems(Flat(), failing)[0, 1]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_callers_random_numbers_are_not_read() -> None:
    items = ViewItems(Flat(), noise)
    expected = items[0, 9]
    torch.manual_seed(torch.initial_seed() + 1)
    first, second, _, _ = items[0, 9]
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])
    assert not torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "context"), [(1, "fork"), (3, "fork"), (2, "spawn")])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_items_are_the_same_whatever_the_workers(fabricated: Path, workers: int, context: str) -> None:
    data = Ident3D(fabricated)
    torch.manual_seed(1)
    expected = data.pairs(views=simclr(16), batch_size=4, seed=3)
    torch.manual_seed(2)
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context, "persistent_workers": True}
    got = data.pairs(views=simclr(16), batch_size=4, seed=3, **options)
    for _ in range(2):
        assert_same(deliver(got), deliver(expected))


def test_a_transform_of_the_dataset_comes_before_the_views(fabricated: Path) -> None:
    data = Ident3D(fabricated, transform=lambda p: p[:, :10, :10])
    seen = []

    def look(picture: Tensor) -> Tensor:
        seen.append(tuple(picture.shape))
        return picture

    x, positive, _, _ = ViewItems(data, look)[2, 0]
    assert seen == [(3, 10, 10)] * 2
    assert torch.equal(x, data[2][0])
    assert torch.equal(x, positive)


def test_strength_0_leaves_the_colours_but_for_grey() -> None:
    picture = torch.zeros(3, 16, 16, dtype=torch.uint8)
    picture[0], picture[1] = 200, 50
    torch.manual_seed(0)
    plain, strong = simclr(16, strength=0.0), simclr(16)

    def colours(transform: Any) -> set[tuple[int, ...]]:
        return {tuple(transform(picture)[:, 0, 0].tolist()) for _ in range(100)}

    assert len(colours(plain)) == 2
    assert (200, 50, 0) in colours(plain)
    assert len(colours(strong)) > 50


def test_the_transform_pickles() -> None:
    picture = torch.randint(256, (3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made = []
    for transform in (simclr(12), pickle.loads(pickle.dumps(simclr(12)))):
        torch.manual_seed(3)
        made.append(transform(picture))
    assert torch.equal(*made)


@pytest.mark.parametrize("resolution", [7, 0, -16])
def test_a_resolution_below_8_is_refused(resolution: int) -> None:
    with pytest.raises(SpecError, match=f"resolution = {resolution}: expected a whole number of at least 8"):
        simclr(resolution)


@pytest.mark.parametrize("strength", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_strength_out_of_range_is_refused(strength: float) -> None:
    with pytest.raises(SpecError, match=f"strength = {strength}: expected 0 to 1"):
        simclr(16, strength)


def test_without_torchvision_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SpecError, match=r"simclr needs torchvision .*: pip install 'ident3d\[baselines\]'"):
        simclr(16)
    (batch,) = deliver(pair_loader(Flat(), batch_size=3, batches=1, views=noise))  # other views need none
    assert batch[0].shape == (3, 4)

"""Streams: every sample exactly once an epoch whoever reads, in an order that (seed, epoch) decide."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ident3d import Ident3D, Ident3DStream
from ident3d.errors import DatasetError, SpecError
from ident3d.shards.summary import EXTENSIONS
from ident3d.shards.tar import END, Sample, scan_samples

# webdataset leaves each shard to the garbage collector to close, and torch finds three workers many on two cores.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar:ResourceWarning"),
    pytest.mark.filterwarnings(
        r"ignore:Exception ignored in.* <_io\.FileIO name=.*\.tar:pytest.PytestUnraisableExceptionWarning"
    ),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

SHARD = "train-000002.tar"  # samples 10 to 14


@pytest.fixture(autouse=True)
def _collect_here() -> Iterator[None]:
    """Let shards that webdataset left open be closed where the filter above is in force."""
    yield
    gc.collect()


def indices(data: Ident3D, items: Any) -> list[int]:
    """Which samples these are, by their latents, which no two share."""
    numbers = {row.tobytes(): i for i, row in enumerate(data.latents)}
    return [numbers[latents.numpy().tobytes()] for _, latents in items]


def load(stream: Ident3DStream, workers: int, context: str | None = None) -> list[tuple[Tensor, Tensor]]:
    loader: Any = DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context)
    return list(loader)


def test_without_shuffling_the_order_is_the_stored_one_and_items_are_equal(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    items = list(data.stream(shuffle=False))
    assert indices(data, items) == list(range(24))
    for (picture, latents), i in zip(items, range(24), strict=True):
        expected = data[i]
        assert torch.equal(picture, expected[0])
        assert torch.equal(latents, expected[1])
        assert (picture.dtype, latents.dtype) == (torch.uint8, torch.float32)


def test_transforms_and_factors_apply(fabricated: Path) -> None:
    data = Ident3D(
        fabricated,
        transform=lambda p: p.float() / 255,
        target_transform=lambda u: 2 * u - 1,
        factors=["object_hue", "object_x"],
    )
    for i, (picture, raw) in enumerate(data.stream(shuffle=False)):
        assert torch.equal(picture, data[i][0])
        assert torch.equal(raw, data[i][1])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_every_sample_comes_exactly_once_an_epoch(fabricated: Path, workers: int, shuffle: bool) -> None:
    data = Ident3D(fabricated)
    stream = data.stream(shuffle=shuffle, seed=1)
    for epoch in range(2):
        stream.set_epoch(epoch)
        assert sorted(indices(data, load(stream, workers))) == list(range(24))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_share_the_samples_without_gap_or_overlap(
    fabricated: Path, monkeypatch: pytest.MonkeyPatch, world: int, workers: int
) -> None:
    # Five shards: with seven ranks some have none.
    data, seen = Ident3D(fabricated), Counter[int]()
    monkeypatch.setenv("WORLD_SIZE", str(world))
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        seen.update(indices(data, load(data.stream(seed=2), workers)))
    assert seen == Counter(range(24))


@pytest.mark.slow
def test_more_workers_than_shards_leave_some_idle(fabricated: Path) -> None:
    data = Ident3D(fabricated, "test")
    assert sorted(indices(data, load(data.stream(), 3))) == list(range(6))


@pytest.mark.slow
def test_spawned_workers_stream_what_forked_ones_do(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    stream = data.stream(seed=5)
    stream.set_epoch(3)
    assert indices(data, load(stream, 2, "spawn")) == indices(data, load(stream, 2, "fork"))


def test_the_order_follows_from_seed_and_epoch_alone(fabricated: Path) -> None:
    data = Ident3D(fabricated)

    def order(seed: int, epoch: int) -> tuple[int, ...]:
        stream = data.stream(seed=seed)
        stream.set_epoch(epoch)
        return tuple(indices(data, stream))

    orders = {(seed, epoch): order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    assert {key: order(*key) for key in orders} == orders


def test_global_generators_are_left_alone(fabricated: Path) -> None:
    # Python's own is not looked at: beartype, which checks shapes in the tests, draws from it.
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    list(Ident3D(fabricated).stream())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]  # noqa: NPY002


def test_shards_are_permuted_by_seed_and_epoch(fabricated: Path) -> None:
    stream = Ident3D(fabricated).stream(seed=4)
    names = {f"train-{k:06d}.tar" for k in range(5)}
    orders = []
    for epoch in range(6):
        stream.set_epoch(epoch)
        orders.append(tuple(stream.shard_names()))
        assert set(orders[-1]) == names
        assert tuple(stream.shard_names()) == orders[-1]
    assert len(set(orders)) > 3
    plain = Ident3D(fabricated).stream(shuffle=False)
    assert plain.shard_names() == sorted(names)


def test_without_a_window_samples_keep_their_order_within_a_shard(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    order = indices(data, data.stream(buffer=0))
    shards = [i // 5 for i in order]
    assert shards == sorted(shards, key=shards.index)
    assert all(a < b for a, b in pairwise(order) if a // 5 == b // 5)
    windowed = indices(data, data.stream(buffer=24))
    assert [i // 5 for i in windowed] != sorted((i // 5 for i in windowed), key=[i // 5 for i in windowed].index)


def test_iterating_twice_gives_the_same_epoch_twice(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    stream = data.stream()
    assert indices(data, stream) == indices(data, stream)
    assert stream.epoch == 0


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_set_epoch_reaches_workers_that_persist(fabricated: Path, context: str) -> None:
    data = Ident3D(fabricated)
    stream = data.stream(seed=1)
    loader: Any = DataLoader(
        stream, batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context=context
    )
    orders = []
    for epoch in (0, 1, 7, 0):
        stream.set_epoch(epoch)
        orders.append(indices(data, loader))
        fresh = data.stream(seed=1)
        fresh.set_epoch(epoch)
        assert orders[-1] == indices(data, load(fresh, 2))
    assert orders[0] == orders[3]
    assert len({tuple(o) for o in orders}) == 3


def test_a_stream_batches_in_a_loader(fabricated: Path) -> None:
    loader: Any = DataLoader(Ident3D(fabricated).stream(), batch_size=10)
    assert [tuple(pictures.shape) for pictures, _ in loader] == [(10, 3, 16, 16), (10, 3, 16, 16), (4, 3, 16, 16)]


@pytest.mark.parametrize("name", ["with space", "a{0..2}b", "100%20", "data:2", "#1?x=y", "pipe:cat"])
def test_any_name_of_a_folder_will_do(
    fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # webdataset takes what stands before a colon for a scheme, and what follows `pipe:` for a command.
    (tmp_path / name).symlink_to(fabricated)
    monkeypatch.chdir(tmp_path)
    data = Ident3D(name, "test")
    assert indices(data, data.stream(shuffle=False)) == list(range(6))


def members(data: bytes) -> list[Sample]:
    return list(scan_samples(data, EXTENSIONS))


def zeroed(data: bytes, at: int, size: int) -> bytes:
    return data[:at] + bytes(size) + data[at + size :]


def altered(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


DAMAGE: dict[str, Any] = {
    "missing": None,
    "empty": lambda d: b"",
    "cut within a picture": lambda d: d[: members(d)[2].members["png"].offset + 100],
    "cut between picture and latents": lambda d: d[: members(d)[2].members["png"].end],
    "cut between samples": lambda d: d[: members(d)[2].end],
    "ended between samples": lambda d: d[: members(d)[2].end] + END,
    "cut within a header": lambda d: d[: members(d)[2].end + 100],
    "first header": lambda d: altered(d, 3),
    "a later header": lambda d: altered(d, members(d)[2].members["png"].offset - 510),
    "a header of latents": lambda d: altered(d, members(d)[2].members["latents.npy"].offset - 510),
    "a picture": lambda d: zeroed(d, members(d)[2].members["png"].offset, 100),
    "magic of latents": lambda d: altered(d, members(d)[2].members["latents.npy"].offset),
    "header of latents": lambda d: zeroed(d, members(d)[2].members["latents.npy"].offset + 20, 60),
    "noise": lambda d: b"\xaa" * len(d),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_is_named_and_nothing_is_skipped_in_silence(damaged: Path, kind: str) -> None:
    path, change = damaged / "train" / SHARD, DAMAGE[kind]
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DatasetError, match=SHARD):
        list(Ident3D(damaged).stream(shuffle=False))


@pytest.mark.slow  # torch waits five seconds for a worker that raised
def test_an_error_in_a_worker_still_names_the_shard(damaged: Path) -> None:
    path = damaged / "train" / SHARD
    path.write_bytes(DAMAGE["a picture"](path.read_bytes()))
    with pytest.raises(DatasetError, match=SHARD):
        load(Ident3D(damaged).stream(shuffle=False), 1)


def test_no_shard_stays_open_after_an_epoch(fabricated: Path, open_shards: Callable[[], list[str]]) -> None:
    before = open_shards()
    list(Ident3D(fabricated).stream())
    assert open_shards() == before


@pytest.mark.parametrize("options", [{"seed": -1}, {"buffer": -1}])
def test_bad_options_are_refused(fabricated: Path, options: dict[str, int]) -> None:
    with pytest.raises(SpecError, match="expected 0 or more"):
        Ident3D(fabricated).stream(**options)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="epoch = -1"):
        Ident3D(fabricated).stream().set_epoch(-1)


def test_repr_says_what_comes_next(fabricated: Path) -> None:
    stream = Ident3D(fabricated).stream(seed=3, buffer=100)
    stream.set_epoch(2)
    assert repr(stream).startswith("Ident3DStream '3dident', split 'train'")
    assert repr(stream).endswith("epoch 2, shuffled by seed 3, window 100")
    assert "in order" in repr(Ident3D(fabricated).stream(shuffle=False))

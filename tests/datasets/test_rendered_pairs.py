"""Datasets whose samples hold their positive pair: served as stored, with no matching."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import ident3d.datasets.pairs
from ident3d import Ident3D, PairSampler
from ident3d.errors import DatasetError, SpecError
from ident3d.shards.summary import PAIR_EXTENSIONS
from ident3d.shards.tar import scan_samples

Pair = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]


def stored(root: Path) -> list[Pair]:
    """The pairs (x, x~, z, z~) of split train by tarfile, Pillow and numpy alone; pixels (H, W, 3)."""
    pairs = []
    for path in sorted((root / "train").glob("*.tar")):
        with tarfile.open(path) as tar:
            files = {m.name: io.BytesIO(tar.extractfile(m).read()) for m in tar}  # type: ignore[union-attr]
        for key in sorted({name.split(".")[0] for name in files}):
            x, positive = (np.array(Image.open(files[f"{key}.{e}"])) for e in ("png", "pair.png"))
            pairs.append((x, positive, np.load(files[f"{key}.latents.npy"]), np.load(files[f"{key}.pair.latents.npy"])))
    return pairs


@pytest.fixture(scope="module")
def truth(fabricated_pairs: Path) -> list[Pair]:
    return stored(fabricated_pairs)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail whoever builds an index or draws from a conditional."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("matched")

    monkeypatch.setattr(ident3d.datasets.pairs, "make_index", never)
    monkeypatch.setattr(PairSampler, "__init__", never)


def check(pair: Any, expected: Pair) -> None:
    x, positive, z, z_positive = pair
    assert (x.dtype, positive.dtype, z.dtype, z_positive.dtype) == (torch.uint8,) * 2 + (torch.float32,) * 2
    np.testing.assert_array_equal(x.numpy().transpose(1, 2, 0), expected[0])
    np.testing.assert_array_equal(positive.numpy().transpose(1, 2, 0), expected[1])
    np.testing.assert_array_equal(z.numpy(), expected[2])
    np.testing.assert_array_equal(z_positive.numpy(), expected[3])


@pytest.mark.parametrize("kind", ["fabricated_pairs", pytest.param("rendered_pairs", marks=pytest.mark.render)])
def test_every_pair_is_the_stored_one(kind: str, request: pytest.FixtureRequest) -> None:
    root: Path = request.getfixturevalue(kind)
    data, expected = Ident3D(root), stored(root)
    assert data.has_pairs is True
    assert len(data) == len(expected) == {"fabricated_pairs": 24, "rendered_pairs": 8}[kind]
    for i, pair in enumerate(expected):
        check(data.pair(i), pair)
        check(data.pair(i - len(data)), pair)
        assert not np.array_equal(pair[0], pair[1])
        assert not np.array_equal(pair[2], pair[3])
    assert data.pair_latents is not None
    assert data.pair_latents.dtype == np.float32
    np.testing.assert_array_equal(data.pair_latents, np.stack([z for *_, z in expected]))
    np.testing.assert_array_equal(data.latents, np.stack([z for *_, z, _ in expected]))


def test_items_are_those_of_z(fabricated_pairs: Path, truth: list[Pair]) -> None:
    data = Ident3D(fabricated_pairs)
    for i, (x, _, z, _) in enumerate(truth):
        picture, latents = data[i]
        np.testing.assert_array_equal(picture.numpy().transpose(1, 2, 0), x)
        np.testing.assert_array_equal(latents.numpy(), z)


# webdataset leaves each shard to the garbage collector to close.
@pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar:ResourceWarning")
@pytest.mark.filterwarnings(
    r"ignore:Exception ignored in.* <_io\.FileIO name=.*\.tar:pytest.PytestUnraisableExceptionWarning"
)
def test_a_stream_yields_the_picture_and_latents_of_z(fabricated_pairs: Path, truth: list[Pair]) -> None:
    data = Ident3D(fabricated_pairs)
    for (picture, latents), (x, _, z, _) in zip(data.stream(shuffle=False), truth, strict=True):
        np.testing.assert_array_equal(picture.numpy().transpose(1, 2, 0), x)
        np.testing.assert_array_equal(latents.numpy(), z)
    shuffled = {latents.numpy().tobytes() for _, latents in data.stream(seed=1)}
    assert shuffled == {z.tobytes() for *_, z, _ in truth}
    gc.collect()  # here, where the filter is in force


@pytest.mark.parametrize("index", [24, -25, 10**9])
def test_an_index_out_of_range_is_an_index_error(fabricated_pairs: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} is out of range for 24 samples"):
        Ident3D(fabricated_pairs).pair(index)


def test_a_choice_of_factors_holds_for_both_latents(fabricated_pairs: Path, truth: list[Pair]) -> None:
    data = Ident3D(fabricated_pairs, factors=["object_hue", "object_x"])
    assert data.pair_latents is not None
    assert data.pair_latents.shape == (24, 2)
    assert data.pair_latents.flags.c_contiguous
    for i in (0, 13, 23):
        x, positive, z, z_positive = truth[i]
        check(data.pair(i), (x, positive, z[[7, 0]], z_positive[[7, 0]]))
        np.testing.assert_array_equal(data.pair_latents[i], z_positive[[7, 0]])


class Negative:
    """A transform that pickles, for spawned workers."""

    def __call__(self, picture: Tensor) -> Tensor:
        return 255 - picture


class Raw:
    """Likewise, of latents: from the unit cube to [-1, 1]."""

    def __call__(self, latents: Tensor) -> Tensor:
        return 2 * latents - 1


def test_transforms_apply_to_both_pictures_and_both_latents(fabricated_pairs: Path, truth: list[Pair]) -> None:
    data = Ident3D(fabricated_pairs, transform=Negative(), target_transform=Raw())
    for i in (0, 9):
        x, positive, z, z_positive = truth[i]
        check(data.pair(i), (255 - x, 255 - positive, 2 * z - 1, 2 * z_positive - 1))
    np.testing.assert_array_equal(data.latents, np.stack([z for *_, z, _ in truth]))


def test_pairs_are_the_users_to_write_into(fabricated_pairs: Path, truth: list[Pair]) -> None:
    data = Ident3D(fabricated_pairs)
    for tensor in data.pair(3):
        tensor.zero_()
    check(data.pair(3), truth[3])


def numbers(truth: list[Pair], z: Tensor) -> list[int]:
    """Which samples these are, by their latents, which no two share."""
    known = {pair[2].tobytes(): i for i, pair in enumerate(truth)}
    return [known[row.numpy().tobytes()] for row in z]


@pytest.mark.usefixtures("no_index")
def test_a_loader_serves_whole_pairs_without_matching(fabricated_pairs: Path, truth: list[Pair]) -> None:
    loader = Ident3D(fabricated_pairs).pairs(batch_size=5, seed=3)
    assert len(loader) == 4
    seen = []
    for batch in loader:
        assert [tensor.shape for tensor in batch] == [(5, 3, 16, 16), (5, 3, 16, 16), (5, 10), (5, 10)]
        for row, i in enumerate(numbers(truth, batch[2])):
            check([tensor[row] for tensor in batch], truth[i])
            seen.append(i)
    again = [i for batch in Ident3D(fabricated_pairs).pairs(batch_size=5, seed=3) for i in numbers(truth, batch[2])]
    other = [i for batch in Ident3D(fabricated_pairs).pairs(batch_size=5, seed=4) for i in numbers(truth, batch[2])]
    assert seen == again
    assert seen != other
    assert len(set(seen)) > 8


def batches(loader: Any) -> Iterator[tuple[Tensor, ...]]:
    for batch in loader:
        yield tuple(batch)


@pytest.mark.slow
@pytest.mark.usefixtures("no_index")
@pytest.mark.parametrize(("workers", "context"), [(2, "fork"), (2, "spawn")])
def test_workers_serve_the_same_pairs(fabricated_pairs: Path, workers: int, context: str) -> None:
    data = Ident3D(fabricated_pairs, transform=Negative(), factors=["object_y", "object_x"])
    data.pair(0)  # so that a shard is open when the workers start
    alone = list(batches(data.pairs(batch_size=4, seed=1)))
    loader = data.pairs(batch_size=4, seed=1, num_workers=workers, multiprocessing_context=context)
    for got, expected in zip(batches(loader), alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_state_goes_on_where_it_was_taken(fabricated_pairs: Path, workers: int) -> None:
    data = Ident3D(fabricated_pairs)
    whole = [batch[2] for batch in data.pairs(batch_size=4, seed=1, batches=10)]
    loader = data.pairs(batch_size=4, seed=1, batches=10, num_workers=workers)
    through = iter(loader)
    got = [next(through)[2] for _ in range(3)]
    state = loader.state_dict()
    del through
    assert state == {"kind": "rendered", "seed": 1, "batch_size": 4, "next": 3}
    fresh = data.pairs(batch_size=4, seed=1, batches=10, num_workers=workers)
    fresh.load_state_dict(state)
    got += [batch[2] for batch in fresh]
    assert all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))
    with pytest.raises(SpecError, match="state of kind = 'rendered'"):
        data.pairs("normal(scale=0.1)", batch_size=4, seed=1, batches=10).load_state_dict(state)


def test_ranks_share_the_series_of_pairs(fabricated_pairs: Path) -> None:
    data = Ident3D(fabricated_pairs)
    alone = [batch[2] for batch in data.pairs(batch_size=4, seed=1, batches=6)]
    ranks = [data.pairs(batch_size=4, seed=1, batches=2, rank=rank, world_size=3) for rank in range(3)]
    shared = [batch[2] for step in zip(*ranks, strict=True) for batch in step]
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_pairs_that_were_rendered_can_be_matched_all_the_same(fabricated_pairs: Path, truth: list[Pair]) -> None:
    data = Ident3D(fabricated_pairs)
    for options in ({"conditional": "normal(scale=0.1)"}, {"share": ["object_hue"]}, {"change": 1}):
        x, positive, z, z_positive = next(iter(data.pairs(batch_size=6, **options)))
        for row, (i, j) in enumerate(zip(numbers(truth, z), numbers(truth, z_positive), strict=True)):
            assert i != j
            np.testing.assert_array_equal(x[row].numpy().transpose(1, 2, 0), truth[i][0])
            np.testing.assert_array_equal(positive[row].numpy().transpose(1, 2, 0), truth[j][0])


@pytest.mark.parametrize("option", [{"match": "exact"}, {"factors": ["object_x"]}, {"allow_self": True}])
def test_options_of_a_matching_are_refused_where_nothing_is_matched(
    fabricated_pairs: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(option))}: for matched pairs, but no conditional is given"):
        Ident3D(fabricated_pairs).pairs(batch_size=4, **option)


def test_a_split_without_pairs_says_so(fabricated_pairs: Path) -> None:
    data = Ident3D(fabricated_pairs, "test")
    assert data.has_pairs is False
    assert data.pair_latents is None
    message = f"{fabricated_pairs}, split 'test': holds no pairs; `ident3d render --pairs` makes some"
    with pytest.raises(DatasetError, match=re.escape(message)):
        data.pair(0)
    with pytest.raises(SpecError, match="conditional: missing; these samples hold no positives of their own"):
        data.pairs(batch_size=4)
    assert "positive pairs" not in repr(data)
    assert len(next(iter(data.pairs("normal(scale=0.1)", batch_size=2)))) == 4


def test_repr_names_the_pairs(fabricated_pairs: Path) -> None:
    assert "\n    positive pairs: rendered, laplace(scale=0.05)" in repr(Ident3D(fabricated_pairs))


@pytest.mark.parametrize("duplicate", [lambda d: pickle.loads(pickle.dumps(d)), copy.deepcopy, copy.copy])
def test_a_copy_is_small_and_serves_the_same(
    fabricated_pairs: Path, truth: list[Pair], duplicate: Callable[[Ident3D], Ident3D]
) -> None:
    data = Ident3D(fabricated_pairs)
    for i in range(24):
        data.pair(i)
    text = pickle.dumps(data)
    assert len(text) < 10_000
    assert data.pair_latents is not None
    for array in (data.latents, data.pair_latents):
        assert array[3:5].tobytes() not in text
    again = duplicate(data)
    assert again.pair_latents is not None
    np.testing.assert_array_equal(again.pair_latents, data.pair_latents)
    check(again.pair(23), truth[23])
    del again
    gc.collect()
    check(data.pair(0), truth[0])


def test_a_pickle_of_a_split_without_pairs_has_none(fabricated_pairs: Path) -> None:
    again = pickle.loads(pickle.dumps(Ident3D(fabricated_pairs, "test")))
    assert again.pair_latents is None
    assert not again.has_pairs


def test_a_fresh_process_serves_pairs_without_faiss(fabricated_pairs: Path) -> None:
    code = f"""
import sys
import ident3d
loader = ident3d.Ident3D({str(fabricated_pairs)!r}).pairs(batch_size=4)
print(sum(len(z) for _, _, z, _ in loader), [m for m in ("faiss", "bpy", "webdataset") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "24 []"


@pytest.fixture
def damaged(fabricated_pairs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(fabricated_pairs, tmp_path / "damaged")


def test_a_damaged_picture_of_a_positive_is_named(damaged: Path, truth: list[Pair]) -> None:
    path = damaged / "train" / "train-000001.tar"
    content = bytearray(path.read_bytes())
    member = list(scan_samples(bytes(content), PAIR_EXTENSIONS))[2].members["pair.png"]
    content[member.offset : member.offset + member.size] = bytes(member.size)
    path.write_bytes(content)
    data = Ident3D(damaged)
    with pytest.raises(DatasetError, match=r"sample 000000007, positive: the picture does not decode"):
        data.pair(7)
    np.testing.assert_array_equal(data[7][0].numpy().transpose(1, 2, 0), truth[7][0])
    check(data.pair(8), truth[8])


def test_a_truncated_shard_is_named(damaged: Path) -> None:
    path = damaged / "train" / "train-000001.tar"
    whole = path.read_bytes()
    at = list(scan_samples(whole, PAIR_EXTENSIONS))[4].members["pair.png"]
    path.write_bytes(whole[: at.offset + 10])
    data = Ident3D(damaged)
    assert data[9][0].any()
    with pytest.raises(DatasetError, match=r"train-000001\.tar, sample 000000009: the shard is truncated"):
        data.pair(9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing or damaged"),
        (b"text", "missing or damaged"),
        (np.zeros((23, 10), np.float32), r"holds float32 \(23, 10\), expected float32 \(24, 10\)"),
        (np.zeros((24, 10)), r"holds float64 \(24, 10\), expected float32 \(24, 10\)"),
    ],
    ids=["missing", "text", "shorter", "float64"],
)
def test_damaged_latents_of_pairs_are_named(damaged: Path, content: Any, message: str) -> None:
    path = damaged / "train" / "pair.latents.npy"
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(DatasetError, match=rf"train/pair\.latents\.npy: {message}"):
        Ident3D(damaged)
    assert len(Ident3D(damaged, "test")) == 6


def test_an_index_of_single_samples_is_refused_and_a_lost_one_is_rebuilt(damaged: Path, truth: list[Pair]) -> None:
    path = damaged / "train" / "index.npy"
    index = np.load(path)
    np.save(path, index[:, :2])
    with pytest.raises(DatasetError, match=r"index\.npy: has shape \(24, 2, 2\), expected \(24, 4, 2\)"):
        Ident3D(damaged)
    path.unlink()
    check(Ident3D(damaged).pair(17), truth[17])

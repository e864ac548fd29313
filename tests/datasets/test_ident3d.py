"""Ident3D: the stored samples, by index, in any process, and a word on whatever is wrong."""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Subset

import ident3d.datasets.pictures
from ident3d import Ident3D
from ident3d.errors import DatasetError, SpecError
from ident3d.factors import FACTORS
from ident3d.shards.summary import EXTENSIONS
from ident3d.shards.tar import scan_samples

Item = tuple[NDArray[np.uint8], NDArray[np.float32]]


def stored(root: Path, split: str = "train") -> list[Item]:
    """The samples of a split by tarfile, Pillow and numpy alone: pixels (H, W, 3) and latents."""
    items = []
    for path in sorted((root / split).glob("*.tar")):
        with tarfile.open(path) as tar:
            files = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
        for key in sorted({name.split(".")[0] for name in files}):
            pixels = np.array(Image.open(io.BytesIO(files[f"{key}.png"])))
            items.append((pixels, np.load(io.BytesIO(files[f"{key}.latents.npy"]))))
    return items


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_item_is_the_stored_sample(fabricated: Path, split: str) -> None:
    data, expected = Ident3D(fabricated, split), stored(fabricated, split)
    assert len(data) == len(expected)
    for i, (pixels, latents) in enumerate(expected):
        picture, target = data[i]
        assert isinstance(picture, Tensor)
        assert isinstance(target, Tensor)
        assert (picture.dtype, picture.shape) == (torch.uint8, (3, 16, 16))
        assert (target.dtype, target.shape) == (torch.float32, (10,))
        np.testing.assert_array_equal(picture.numpy().transpose(1, 2, 0), pixels)
        np.testing.assert_array_equal(target.numpy(), latents)


def test_latents_are_those_of_the_items(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    assert data.latents.dtype == np.float32
    assert data.latents.shape == (24, 10)
    np.testing.assert_array_equal(data.latents, np.stack([u for _, u in stored(fabricated)]))


def test_latents_and_len_decode_nothing_and_open_no_shard(
    fabricated: Path, monkeypatch: pytest.MonkeyPatch, open_shards: Callable[[], list[str]]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ident3d.datasets.pictures, "decode", never)
    monkeypatch.setattr("ident3d.shards.reader.SplitReader.picture", never)
    before = open_shards()
    data = Ident3D(fabricated)
    assert data.latents.shape == (24, 10)
    assert len(data) == 24
    assert open_shards() == before


def test_items_are_the_users_to_write_into(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    before = data.latents.copy()
    picture, target = data[2]
    picture.zero_()
    target.zero_()
    again, latents = data[2]
    assert again.any()
    assert latents.any()
    np.testing.assert_array_equal(data.latents, before)


@pytest.fixture
def mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of any size are mapped, as those past 1 GB are."""
    monkeypatch.setattr("ident3d.datasets.ident3d.MAPPED_BYTES", 0)


def is_mapped(array: Any) -> bool:
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


def test_small_arrays_are_the_users_own(fabricated_pairs: Path) -> None:
    data = Ident3D(fabricated_pairs)
    for array in (data.latents, data.pair_latents):
        assert array is not None
        assert array.flags.writeable
        assert not is_mapped(array)


def test_large_arrays_are_mapped_and_serve_the_same(fabricated_pairs: Path, request: pytest.FixtureRequest) -> None:
    copied = Ident3D(fabricated_pairs)
    request.getfixturevalue("mapping")
    data = Ident3D(fabricated_pairs)
    for mine, theirs in ((data.latents, copied.latents), (data.pair_latents, copied.pair_latents)):
        assert mine is not None
        assert theirs is not None
        assert is_mapped(mine)
        assert not mine.flags.writeable
        np.testing.assert_array_equal(mine, theirs)
    for a, b in zip(data[7] + data.pair(7), copied[7] + copied.pair(7), strict=True):
        assert torch.equal(a, b)
    for target in (data[7][1], data.pair(7)[3]):
        target.zero_()  # a copy, the user's own
    np.testing.assert_array_equal(data.latents, copied.latents)


@pytest.mark.usefixtures("mapping")
def test_what_is_built_on_mapped_latents_warns_of_nothing(fabricated_pairs: Path) -> None:
    data = Ident3D(fabricated_pairs)
    assert len(next(iter(DataLoader(data, batch_size=8)))[1]) == 8
    assert len(next(iter(data.loader(8)))[1]) == 8
    assert len(next(iter(data.pairs(batch_size=8)))[3]) == 8
    assert len(next(iter(data.pairs("normal(scale=0.1)", batch_size=8)))[3]) == 8
    split = data.to_device("cpu", quiet=True)
    assert torch.equal(split.latents, torch.from_numpy(data.latents.copy()))
    assert data.factors["object_x"].shape == (24,)


@pytest.mark.usefixtures("mapping")
def test_mapped_latents_are_opened_again_by_who_unpickles_them(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    text = pickle.dumps(data)
    assert data.latents[3:5].tobytes() not in text
    again = pickle.loads(text)
    assert is_mapped(again.latents)
    np.testing.assert_array_equal(again.latents, data.latents)


@pytest.mark.usefixtures("mapping")
@pytest.mark.parametrize("names", [["object_hue", "object_x"], [*FACTORS.names[:9]], [*reversed(FACTORS.names)]])
def test_a_choice_of_factors_is_a_copy_at_any_size(fabricated: Path, names: list[str]) -> None:
    data = Ident3D(fabricated, factors=names)
    assert data.latents.flags.writeable
    assert data.latents.flags.c_contiguous
    np.testing.assert_array_equal(data.latents, Ident3D(fabricated).latents[:, FACTORS.select(names).columns])
    assert is_mapped(Ident3D(fabricated, factors=FACTORS.names).latents)


def test_the_fingerprint_is_that_of_all_checksums_in_order(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    sums = "".join(shard.sha256 for shard in data.entry.shards)
    assert data.fingerprint() == hashlib.sha256(sums.encode()).hexdigest()


def test_negative_indices_count_from_the_end(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    for i in (-1, -24):
        assert torch.equal(data[i][0], data[24 + i][0])
        assert torch.equal(data[i][1], data[24 + i][1])


@pytest.mark.parametrize("index", [24, 25, -25, 10**9])
def test_an_index_out_of_range_is_an_index_error(fabricated: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} is out of range for 24 samples"):
        Ident3D(fabricated)[index]


def test_numpy_integers_are_indices(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    for i in np.argsort(data.latents[:, 0])[:3]:
        assert torch.equal(data[i][1], torch.from_numpy(data.latents[i]))


def test_iteration_ends_after_the_last_sample(fabricated: Path) -> None:
    data = Ident3D(fabricated, "test")
    items = list(data)  # type: ignore[call-overload]
    assert len(items) == 6
    np.testing.assert_array_equal(torch.stack([u for _, u in items]).numpy(), data.latents)


def test_a_subset_of_factors_in_the_order_asked(fabricated: Path) -> None:
    names = ["object_hue", "object_x", "ground_hue"]
    data, whole = Ident3D(fabricated, factors=names), Ident3D(fabricated)
    assert data.factors.names == tuple(names)
    assert data.latents.shape == (24, 3)
    assert data.latents.flags.c_contiguous
    np.testing.assert_array_equal(data.latents, whole.latents[:, [7, 0, 9]])
    np.testing.assert_array_equal(data[5][1], whole[5][1][[7, 0, 9]])
    assert torch.equal(data[5][0], whole[5][0])


def test_all_factors_by_default(fabricated: Path) -> None:
    assert Ident3D(fabricated).factors == FACTORS


@pytest.mark.parametrize("factors", [["colour"], [], "object_x", ["object_x", "object_x"]])
def test_a_choice_of_factors_that_cannot_be_is_refused(fabricated: Path, factors: list[str]) -> None:
    with pytest.raises(SpecError, match="factor"):
        Ident3D(fabricated, factors=factors)


def test_an_unknown_split_is_refused_with_those_there_are(fabricated: Path) -> None:
    with pytest.raises(DatasetError, match=re.escape(f"{fabricated}: no split 'val'; it has train, test")):
        Ident3D(fabricated, "val")


def test_transforms_are_applied_each_to_its_own(fabricated: Path) -> None:
    data = Ident3D(fabricated, transform=lambda p: p.float() / 255, target_transform=lambda u: 2 * u - 1)
    plain = Ident3D(fabricated)
    picture, raw = data[4]
    assert torch.equal(picture, plain[4][0].float() / 255)
    assert torch.equal(raw, 2 * plain[4][1] - 1)
    np.testing.assert_array_equal(data.latents, plain.latents)


def test_a_root_may_be_text(fabricated: Path) -> None:
    assert torch.equal(Ident3D(str(fabricated))[0][0], Ident3D(fabricated)[0][0])


@pytest.mark.parametrize("name", ["with space", "a{0..2}b", "100%20", "data:2", "#1?x=y", "pipe:cat"])
def test_any_name_of_a_folder_will_do(
    fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).symlink_to(fabricated)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(Ident3D(name, "test")[5][0], Ident3D(fabricated, "test")[5][0])


def test_repr_says_what_it_is(fabricated: Path) -> None:
    text = repr(Ident3D(fabricated, factors=["object_x", "object_hue"], transform=torch.nn.Identity()))
    assert text.startswith("Ident3D '3dident', split 'train': 24 samples of 16 x 16 px")
    assert f"root: {fabricated} (5 shards, 0.1 MB)" in text
    assert "quality draft" in text
    assert "seed 3" in text
    assert "factors: object_x, object_hue" in text
    assert "transform: Identity()" in text
    assert "target_transform" not in text


def test_statistics_normalise_the_pixels(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    pixels = torch.stack([data[i][0] for i in range(24)]).double() / 255
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (data.mean, data.std))
    normal = (pixels - mean) / std
    assert normal.mean(dim=(0, 2, 3)).abs().max() < 1e-9
    assert (normal.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-9


class Negative:
    """A transform that pickles, for spawned workers."""

    def __call__(self, picture: Tensor) -> Tensor:
        return 255 - picture


def batches(data: Any, workers: int, context: str | None) -> list[tuple[Tensor, Tensor]]:
    loader: Any = DataLoader(data, batch_size=7, num_workers=workers, multiprocessing_context=context)
    return [(pictures, latents) for pictures, latents in loader]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (2, "spawn")])
def test_a_loader_gives_the_same_batches_in_the_same_order(fabricated: Path, workers: int, context: str | None) -> None:
    data = Ident3D(fabricated, transform=Negative(), factors=["object_y", "object_x"])
    data[0]  # so that a shard is open when the workers start
    expected = [data[i] for i in range(24)]
    for _ in range(2):
        got = batches(data, workers, context)
        assert [len(u) for _, u in got] == [7, 7, 7, 3]
        assert torch.equal(torch.cat([p for p, _ in got]), torch.stack([p for p, _ in expected]))
        assert torch.equal(torch.cat([u for _, u in got]), torch.stack([u for _, u in expected]))


def test_torchs_samplers_and_subsets_work(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(data, batch_size=24, sampler=sampler)
    ((_, latents),) = loader
    assert not np.array_equal(latents, data.latents)
    np.testing.assert_array_equal(np.sort(latents, axis=0), np.sort(data.latents, axis=0))
    part = Subset(data, [23, 0])
    np.testing.assert_array_equal(part[0][1], data.latents[23])


@pytest.mark.parametrize(
    "duplicate", [lambda d: pickle.loads(pickle.dumps(d)), copy.deepcopy, copy.copy], ids=["pickle", "deepcopy", "copy"]
)
def test_a_copy_serves_the_same_and_the_original_goes_on(
    fabricated: Path, duplicate: Callable[[Ident3D], Ident3D]
) -> None:
    data = Ident3D(fabricated, factors=["object_hue"], transform=Negative())
    data[0]
    again = duplicate(data)
    assert (len(again), again.split, again.factors) == (24, "train", data.factors)
    np.testing.assert_array_equal(again.latents, data.latents)
    for i in (0, 23):
        assert torch.equal(again[i][0], data[i][0])
    del again
    gc.collect()
    assert data[1][0].any()


def test_a_pickle_is_small_and_opens_nothing(fabricated: Path, open_shards: Callable[[], list[str]]) -> None:
    first = open_shards()
    data = Ident3D(fabricated)
    for i in range(24):
        data[i]
    before = open_shards()
    assert len(before) == len(first) + 5
    text = pickle.dumps(data)
    assert data.latents[3:5].tobytes() not in text
    assert len(text) < 10_000
    again = pickle.loads(text)
    assert open_shards() == before
    again[0]
    assert len(open_shards()) == len(before) + 1
    del data, again
    gc.collect()
    assert open_shards() == first


def test_a_damaged_picture_names_file_and_sample(damaged: Path) -> None:
    path = damaged / "train" / "train-000001.tar"
    content = bytearray(path.read_bytes())
    member = list(scan_samples(bytes(content), EXTENSIONS))[2].members["png"]
    content[member.offset : member.offset + member.size] = bytes(member.size)
    path.write_bytes(content)
    data = Ident3D(damaged)
    data[6]
    with pytest.raises(
        DatasetError, match=r"train-000001\.tar, sample 000000007: the picture does not decode"
    ) as caught:
        data[7]
    assert "ident3d verify --repair" in str(caught.value)
    data[8]


def test_no_flipped_bit_of_a_picture_is_more_than_a_damaged_dataset(damaged: Path) -> None:
    path = damaged / "train" / "train-000000.tar"
    whole = path.read_bytes()
    member = next(scan_samples(whole, EXTENSIONS)).members["png"]
    data, refused, served = Ident3D(damaged), 0, 0
    for at in range(member.size):
        altered = bytearray(whole)
        altered[member.offset + at] ^= 1 << at % 8
        path.write_bytes(altered)  # the same file, which the reader holds open
        try:
            picture, _ = data[0]
        except DatasetError as error:
            refused += "sample 000000000" in str(error)
        else:
            served += picture.shape[0] == 3
    assert refused + served == member.size
    assert refused > member.size // 2


# numpy says so itself when a header is odd enough to look like one of Python 2.
@pytest.mark.filterwarnings("ignore:Reading `.npy` or `.npz` file required additional header parsing:UserWarning")
@pytest.mark.parametrize("name", ["latents.npy", "index.npy"])
def test_no_flipped_bit_of_a_header_is_more_than_a_damaged_dataset(damaged: Path, name: str) -> None:
    path = damaged / "test" / name
    whole = path.read_bytes()
    escaped: set[str] = set()
    for bit in range(8 * 128):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            data = Ident3D(damaged, "test")
        except Exception as error:
            if not (isinstance(error, DatasetError) and name in str(error)):
                escaped.add(type(error).__name__)
        else:
            assert data.latents.shape == (6, 10)
    assert escaped == set()


@pytest.mark.parametrize(
    "content",
    [None, b"", b"text", b"PK\x03\x04 no archive"],
    ids=["missing", "empty", "text", "broken archive"],
)
def test_damaged_latents_are_named(damaged: Path, content: bytes | None) -> None:
    path = damaged / "train" / "latents.npy"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"train/latents\.npy: missing or damaged"):
        Ident3D(damaged)


@pytest.mark.parametrize("array", [np.zeros((23, 10), np.float32), np.zeros((24, 10)), np.zeros((24, 9), np.float32)])
def test_latents_of_another_shape_or_type_are_named(damaged: Path, array: NDArray[Any]) -> None:
    np.save(damaged / "train" / "latents.npy", array)
    with pytest.raises(DatasetError, match=r"latents\.npy: holds float\d\d \(\d+, \d+\), expected float32 \(24, 10\)"):
        Ident3D(damaged)


def test_a_dataset_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such folder"):
        Ident3D(tmp_path / "nowhere")
    (tmp_path / ".render" / "train").mkdir(parents=True)
    (tmp_path / ".render" / "train" / "plan.json").write_text("{}")
    with pytest.raises(DatasetError, match="not finished"):
        Ident3D(tmp_path)


def test_frozen_factors_are_constant_columns(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    from ident3d.scenes import scene_text

    spec = tmp_path / "mine.toml"
    spec.write_text(scene_text("3dident").replace("range = [-3.0, 3.0] }", "range = [-3.0, 3.0], frozen = 0.25 }", 1))
    data = Ident3D(make_dataset(tmp_path / "data", {"train": 6}, scene=spec, resolution=8))
    assert data.factors.get("object_x").frozen == 0.25
    np.testing.assert_array_equal(data.latents[:, 0], 0.25)
    assert len(np.unique(data.latents[:, 1])) == 6

"""Published datasets in use: pairs, workers, damaged pictures left out, figures."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader

from ident3d.datasets.pairs import PairSampler
from ident3d.datasets.published import Causal3DIdent, Multimodal3DIdent, TemporalCausal3DIdent, ThreeDIdent
from ident3d.datasets.published_base import Published
from ident3d.errors import DatasetError, SpecError

ROOT = Path(__file__).resolve().parents[2]
MAKE = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "data" / "make_published.py")))
MAKERS: dict[type[Published], Callable[..., Path]] = {
    ThreeDIdent: MAKE.make_threedident,
    Causal3DIdent: MAKE.make_causal3dident,
    Multimodal3DIdent: MAKE.make_multimodal3dident,
    TemporalCausal3DIdent: MAKE.make_temporal,
}
READERS = list(MAKERS)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    """Opens a dataset's training split in a folder of its own."""

    def make(reader: type[Published], **options: Any) -> Published:
        if not (tmp_path / "data").exists():
            MAKERS[reader](tmp_path / "data")
        return reader(tmp_path / "data", **options)

    return make


@pytest.mark.parametrize("match", ["exact", "hnsw"])
@pytest.mark.parametrize("reader", READERS)
def test_pairs_stay_within_the_categorical_factors(
    opened: Callable[..., Any], reader: type[Published], match: str
) -> None:
    data = opened(reader)
    pairs = [
        pair
        for k in range(8)
        for pair in PairSampler(data, "normal(scale=0.1)", batch_size=16, seed=1, match=match).batch(k)
    ]
    anchors, positives = np.array(pairs).T
    assert (anchors != positives).all()
    np.testing.assert_array_equal(data.categories[anchors], data.categories[positives])
    crossing = PairSampler(data, "normal(scale=0.1)", batch_size=128, seed=1, match=match, within=())
    anchors, positives = np.array(crossing.batch(0)).T
    assert (data.categories[anchors] != data.categories[positives]).any() == bool(data.categorical)


@pytest.mark.parametrize("reader", READERS)
def test_a_loader_of_pairs_serves_them(opened: Callable[..., Any], reader: type[Published]) -> None:
    data = opened(reader)
    loader = data.pairs("normal(scale=0.1)", batch_size=8, seed=1)
    x, positive, z, z_positive = next(iter(loader))
    side, d = data.resolution, len(data.columns)
    assert (x.shape, positive.shape) == ((8, 3, side, side), (8, 3, side, side))
    assert (z.shape, z_positive.shape) == ((8, d), (8, d))
    for latents, pictures in ((z, x), (z_positive, positive)):
        for row, picture in zip(latents, pictures, strict=True):
            place = int(np.flatnonzero((data.latents == row.numpy()).all(axis=1))[0])
            assert torch.equal(data.sample(place)[0], picture)


def test_a_group_of_one_has_no_pair(tmp_path: Path) -> None:
    MAKE.make_causal3dident(tmp_path, ["train"], {0: 4, 5: 1})
    with pytest.raises(SpecError, match="only one sample has class = 5"):
        Causal3DIdent(tmp_path).pairs("normal(scale=0.1)", batch_size=4)
    Causal3DIdent(tmp_path).pairs("normal(scale=0.1)", batch_size=4, within=())


def test_frames_are_paired_with_the_next(opened: Callable[..., Any]) -> None:
    data = opened(TemporalCausal3DIdent)
    assert data.has_pairs
    assert (len(data), data.pair_count) == (20, 19)
    for i in (0, 18, -2):
        x, positive, z, z_positive = data.pair(i)
        assert torch.equal(x, data[i][0])
        assert torch.equal(positive, data[i % 20 + 1][0])
        np.testing.assert_array_equal(z, data.latents[i])
        np.testing.assert_array_equal(z_positive, data.latents[i % 20 + 1])
    for i in (19, -1):
        with pytest.raises(IndexError, match="the last of 20 frames has no next one"):
            data.pair(i)
    assert data.interventions.shape == (19, 12)


def test_batches_of_frames_and_the_next(opened: Callable[..., Any]) -> None:
    data = opened(TemporalCausal3DIdent, factors=["object_x", "object_hue"])
    seen = set()
    for x, positive, z, z_positive in data.pairs(batch_size=16, seed=2, batches=8):
        places = [int(np.flatnonzero((data.latents == row.numpy()).all(axis=1))[0]) for row in z]
        np.testing.assert_array_equal(z_positive, data.latents[np.array(places) + 1])
        for k, place in enumerate(places):
            assert torch.equal(x[k], data[place][0])
            assert torch.equal(positive[k], data[place + 1][0])
        seen |= set(places)
    assert seen == set(range(19))


@pytest.mark.parametrize("reader", READERS[:3])
def test_samples_without_a_positive_hold_no_pairs(opened: Callable[..., Any], reader: type[Published]) -> None:
    data = opened(reader)
    assert (data.has_pairs, data.pair_count) == (False, 0)
    with pytest.raises(DatasetError, match="holds no pairs"):
        data.pair(0)
    with pytest.raises(SpecError, match="conditional: missing"):
        data.pairs(batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("reader", READERS)
def test_workers_serve_the_same(opened: Callable[..., Any], reader: type[Published], context: str) -> None:
    data = opened(reader)
    data[0]
    expected = [data[i] for i in range(len(data))]
    loader: Any = DataLoader(data, batch_size=7, num_workers=2, multiprocessing_context=context)
    batches = list(loader)
    assert torch.equal(torch.cat([batch[0] for batch in batches]), torch.stack([item[0] for item in expected]))
    assert torch.equal(torch.cat([batch[-1] for batch in batches]), torch.stack([item[-1] for item in expected]))
    if data.has_text:
        assert [text for batch in batches for text in batch[1]] == [item[1] for item in expected]


@pytest.mark.parametrize("reader", READERS[:3])
def test_a_damaged_picture_is_named_or_left_out_and_counted(
    opened: Callable[..., Any], reader: type[Published]
) -> None:
    data = opened(reader)
    expected = [data[i] for i in range(8)]
    path = Path(data.where(3))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"{path}: the picture does not decode"):
        data[3]
    patient = opened(reader, on_error="skip")
    with pytest.warns(UserWarning, match=rf"left out: {path}: the picture does not decode"):
        items = patient.__getitems__(range(8))
    assert patient.skipped == 1
    kept = [item for i, item in enumerate(expected) if i != 3]
    for item, other in zip(items, kept, strict=True):
        assert len(item) == len(other)
        assert torch.equal(item[0], other[0])
        assert item[1] == other[1] if data.has_text else torch.equal(item[1], other[1])


def test_a_picture_that_went_missing_is_left_out_too(opened: Callable[..., Any]) -> None:
    data = opened(ThreeDIdent, on_error="skip")
    Path(data.where(0)).unlink()
    with pytest.warns(UserWarning, match=r"00\.png: cannot be read"):
        assert len(data.__getitems__([0, 1])) == 1


@pytest.mark.parametrize("reader", READERS)
def test_normalisation_is_by_the_training_split_where_there_is_one(
    opened: Callable[..., Any], reader: type[Published], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def statistics(self: Published) -> Any:
        asked.append((self.split, len(self)))
        return (0.5,) * 3, (0.25,) * 3

    monkeypatch.setattr(reader, "statistics", statistics)
    train = opened(reader)
    picture = opened(reader, split="test", normalize=True)[0][0]
    assert picture.dtype == torch.float32
    assert asked == [("train", len(train))]
    if reader is Causal3DIdent:
        opened(reader, split="test", classes=["hare"]).reference_statistics()
        assert asked[-1] == ("train", 5)
    MAKERS[reader](
        tmp_path / "alone", **({"splits": ["test"]} if reader is Causal3DIdent else {"samples": {"test": 12}})
    )
    reader(tmp_path / "alone", "test").reference_statistics()
    assert asked[-1][0] == "test"


@pytest.mark.parametrize("cache", ["ram", "disk"])
@pytest.mark.parametrize("reader", READERS)
def test_decoded_pictures_are_the_same(opened: Callable[..., Any], reader: type[Published], cache: str) -> None:
    plain, data = opened(reader), opened(reader, cache=cache)
    for i in range(len(plain)):
        assert torch.equal(data[i][0], plain[i][0])
    if data.has_pairs:
        assert torch.equal(data.pair(18)[1], plain[19][0])


def test_v2_transforms_work_on_the_tensors(opened: Callable[..., Any]) -> None:
    v2: Any = pytest.importorskip("torchvision.transforms.v2")
    data = opened(ThreeDIdent, transform=v2.Compose([v2.Resize(8), v2.ToDtype(torch.float32, scale=True)]))
    picture: Tensor = data[0][0]
    assert (picture.dtype, picture.shape) == (torch.float32, (3, 8, 8))
    assert 0 <= picture.min() < picture.max() <= 1


@pytest.mark.parametrize("reader", READERS)
def test_a_sample_can_be_plotted(opened: Callable[..., Any], reader: type[Published], tmp_path: Path) -> None:
    figure = opened(reader).plot(2)
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "sample.png")
    with pytest.raises(IndexError):
        opened(reader).plot(1000)

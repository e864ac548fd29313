"""What all datasets of pictures share: batches, transforms, normalisation, damaged samples, figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.utils.data import DataLoader, Subset

from ident3d import DatasetError, Ident3D, SpecError
from ident3d.shards.summary import EXTENSIONS
from ident3d.shards.tar import scan_samples

BAD = 7
"""The sample that `broken` damages: the third of the second shard."""


@pytest.fixture
def broken(damaged: Path) -> Path:
    """A dataset with one picture that does not decode."""
    path = damaged / "train" / "train-000001.tar"
    content = bytearray(path.read_bytes())
    at = list(scan_samples(bytes(content), EXTENSIONS))[BAD - 5].members["png"]
    content[at.offset + 60 : at.offset + 90] = bytes(30)
    path.write_bytes(content)
    return damaged


def plain(root: Path, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    data = Ident3D(root, split)
    items = [data[i] for i in range(len(data))]
    return torch.stack([x for x, _ in items]), torch.stack([z for _, z in items])


def test_a_batch_is_the_items_one_by_one(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    pictures, latents = plain(fabricated)
    indices = np.random.default_rng(0).integers(-24, 24, 50).tolist()
    batch = data.__getitems__(indices)
    assert torch.equal(torch.stack([x for x, _ in batch]), pictures[indices])
    assert torch.equal(torch.stack([z for _, z in batch]), latents[indices])
    with pytest.raises(IndexError, match="index 24 is out of range for 24 samples"):
        data.__getitems__([0, 24])
    assert data.__getitems__([]) == []


def test_items_of_a_batch_share_nothing_with_the_dataset(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    before = data.latents.copy()
    for picture, target in data.__getitems__([1, 1, 2]):
        picture.zero_()
        target.zero_()
    assert data[1][0].any()
    np.testing.assert_array_equal(data.latents, before)


def test_transforms_are_applied_to_each_item_of_a_batch(fabricated: Path) -> None:
    def transform(picture: torch.Tensor) -> torch.Tensor:
        assert picture.dtype == torch.uint8
        assert picture.shape == (3, 16, 16)
        return picture[:, :8, :8].float()

    data = Ident3D(fabricated, transform=transform, target_transform=lambda z: 2 * z)
    pictures, latents = plain(fabricated)
    for picture, target in (data[3], *data.__getitems__([3, 3])):
        assert torch.equal(picture, pictures[3, :, :8, :8].float())
        assert torch.equal(target, 2 * latents[3])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subset_in_a_loader_gives_its_samples(fabricated: Path, workers: int) -> None:
    pictures, latents = plain(fabricated)
    order = [5, 3, 17, 0, 23]
    batches = list(DataLoader(Subset(Ident3D(fabricated), order), batch_size=2, num_workers=workers))
    assert torch.equal(torch.cat([x for x, _ in batches]), pictures[order])
    assert torch.equal(torch.cat([z for _, z in batches]), latents[order])


# Normalisation


def expected(root: Path, mean: Any, std: Any) -> torch.Tensor:
    mean, std = (torch.tensor(x, dtype=torch.float64).reshape(3, 1, 1) for x in (mean, std))
    truth: torch.Tensor = ((plain(root)[0].double() / 255 - mean) / std).float()
    return truth


def test_pictures_are_normalised_by_the_training_split(fabricated: Path) -> None:
    train = Ident3D(fabricated, normalize=True)
    truth = expected(fabricated, train.mean, train.std)
    singly = torch.stack([train[i][0] for i in range(24)])
    together = torch.stack([x for x, _ in train.__getitems__(list(range(24)))])
    assert torch.equal(singly, together)
    torch.testing.assert_close(singly, truth, rtol=1e-5, atol=1e-6)
    assert abs(float(singly.mean())) < 1e-5
    torch.testing.assert_close(singly.double().std(dim=(0, 2, 3), unbiased=False), torch.ones(3, dtype=torch.float64))
    test = Ident3D(fabricated, "test", normalize=True)
    assert test.mean != train.mean
    pixels = test.picture(0).double() / 255
    truth = (pixels - torch.tensor(train.mean).reshape(3, 1, 1)) / torch.tensor(train.std).reshape(3, 1, 1)
    torch.testing.assert_close(test[0][0].double(), truth, rtol=1e-5, atol=1e-5)


def test_pictures_are_normalised_by_what_is_given(fabricated: Path) -> None:
    given = ((0.5, 0.25, 0.0), (0.1, 0.2, 1.0))
    data = Ident3D(fabricated, normalize=given)
    torch.testing.assert_close(
        torch.stack([x for x, _ in data.__getitems__(list(range(24)))]),
        expected(fabricated, *given),
        rtol=1e-5,
        atol=1e-6,
    )
    x, positive, _, _ = next(iter(data.pairs("normal(scale=0.1)", batch_size=4)))
    assert x.dtype == positive.dtype == torch.float32


def test_a_transform_comes_before_the_normalisation(fabricated: Path) -> None:
    data = Ident3D(fabricated, transform=lambda x: x.flip(-1), normalize=True)
    whole = Ident3D(fabricated, normalize=True)
    for index in (0, 9):
        assert torch.equal(data[index][0], whole[index][0].flip(-1))
        assert torch.equal(data.__getitems__([index])[0][0], whole[index][0].flip(-1))


@pytest.mark.parametrize("transform", [lambda x: x.float(), lambda x: x.numpy(), lambda x: x[0]])
def test_a_transform_that_leaves_nothing_to_normalise_is_refused(fabricated: Path, transform: Any) -> None:
    data = Ident3D(fabricated, transform=transform, normalize=True)
    with pytest.raises(SpecError, match=r"transform gives .*: normalize=True expects uint8 \(3, H, W\)"):
        data[0]
    with pytest.raises(SpecError, match="transform gives"):
        data.__getitems__([0, 1])


@pytest.mark.parametrize(
    "normalize",
    [
        ((0.0, 0.0, 0.0), (1.0, 1.0)),
        ((0.0, 0.0, 0.0), (1.0, 0.0, 1.0)),
        ((0.0, 0.0, float("nan")), (1.0, 1.0, 1.0)),
        (),
    ],
)
def test_a_normalisation_that_is_none_is_refused(fabricated: Path, normalize: Any) -> None:
    with pytest.raises(SpecError, match="normalize = "):
        Ident3D(fabricated, normalize=normalize)


def test_a_normalisation_of_another_type_is_refused(fabricated: Path) -> None:
    """In a process of its own, where no hook checks types before the code does."""
    script = f"""
import ident3d
for given in ("train", 1, (1, 2, 3), {{"mean": 0}}, None):
    try:
        ident3d.Ident3D({str(fabricated)!r}, normalize=given)
    except ident3d.SpecError as error:
        print(error)
"""
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split(":")[0] for line in told] == [
        "normalize = 'train'",
        "normalize = 1",
        "normalize = (1, 2, 3)",
        "normalize = {'mean'",
        "normalize = None",
    ]


# Damaged pictures


def test_a_damaged_picture_is_named(broken: Path) -> None:
    data = Ident3D(broken)
    named = re.escape(f"{broken}/train/train-000001.tar, sample {BAD:09d}: the picture does not decode (")
    for ask in (lambda: data[BAD], lambda: data.__getitems__([1, BAD]), lambda: data.plot(BAD)):
        with pytest.raises(DatasetError, match=f"{named}.*run `ident3d verify --repair`"):
            ask()
    assert len(data.__getitems__([1, 2])) == 2
    assert data.skipped == 0


def test_a_damaged_picture_is_left_out_of_its_batch(broken: Path) -> None:
    data = Ident3D(broken, on_error="skip")
    pictures, latents = plain_without(broken)
    with pytest.warns(UserWarning, match=f"left out: .*sample {BAD:09d}"):
        batch = data.__getitems__([6, BAD, 8])
    assert torch.equal(torch.stack([x for x, _ in batch]), torch.stack([pictures[6], pictures[8]]))
    assert torch.equal(torch.stack([z for _, z in batch]), torch.stack([latents[6], latents[8]]))
    assert data.skipped == 1
    with pytest.raises(DatasetError, match=f"sample {BAD:09d}"):
        data[BAD]
    with pytest.warns(UserWarning, match="left out"), pytest.raises(DatasetError, match="every sample of a batch"):
        data.__getitems__([BAD, BAD])


def plain_without(root: Path) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    data = Ident3D(root)
    items = {i: data[i] for i in range(24) if i != BAD}
    return {i: x for i, (x, _) in items.items()}, {i: z for i, (_, z) in items.items()}


@pytest.mark.filterwarnings("ignore:left out")
def test_what_workers_skip_is_counted_by_the_main_process(broken: Path) -> None:
    data = Ident3D(broken, on_error="skip")
    batches = list(DataLoader(data, batch_size=6, num_workers=2))
    assert [len(x) for x, _ in batches] == [6, 5, 6, 6]
    assert data.skipped == 1


@pytest.mark.filterwarnings("ignore:left out")
def test_a_pair_with_a_damaged_picture_is_left_out(broken: Path) -> None:
    data, whole = Ident3D(broken, on_error="skip"), Ident3D(broken)
    loader = data.pairs("normal(scale=0.1)", batch_size=16, seed=1, batches=8)
    stream, hurt = loader.stream, 0
    for number, (x, positive, z, z_positive) in enumerate(loader):
        pairs = [(i, j) for i, j in stream.batch(number) if BAD not in (i, j)]
        hurt += 16 - len(pairs)
        assert len(x) == len(positive) == len(z) == len(z_positive) == len(pairs)
        for k, (i, j) in enumerate(pairs):
            assert torch.equal(x[k], whole[i][0])
            assert torch.equal(positive[k], whole[j][0])
            np.testing.assert_array_equal(z[k].numpy(), whole.latents[i])
            np.testing.assert_array_equal(z_positive[k].numpy(), whole.latents[j])
    assert 0 < hurt <= data.skipped


def test_a_stream_leaves_a_damaged_picture_out(broken: Path) -> None:
    stream = Ident3D(broken, on_error="skip").stream(shuffle=False)
    with pytest.warns(UserWarning, match=f"left out: .*{BAD:09d}"):
        found = list(stream)
    assert len(found) == 23
    assert stream.skipped == 1
    with pytest.raises(DatasetError, match=f"{BAD:09d}"):
        list(Ident3D(broken).stream(shuffle=False))


def test_a_file_that_is_gone_is_skipped_too(damaged: Path) -> None:
    os.unlink(damaged / "train" / "train-000002.tar")  # noqa: PTH108
    data = Ident3D(damaged, on_error="skip")
    with pytest.warns(UserWarning, match=r"train-000002.tar: No such file"):
        assert len(data.__getitems__(list(range(24)))) == 19
    assert data.skipped == 5


def test_another_word_for_on_error_is_refused(fabricated: Path) -> None:
    with pytest.raises(SpecError, match="on_error = 'ignore': expected raise or skip"):
        Ident3D(fabricated, on_error="ignore")
    with pytest.raises(SpecError, match="cache = 'disc': expected none, ram, disk"):
        Ident3D(fabricated, cache="disc")


def test_a_plot_shows_the_picture_and_its_factors(fabricated: Path) -> None:
    data = Ident3D(fabricated, factors=["object_x", "object_hue"])
    figure = data.plot(-1)
    assert isinstance(figure, Figure)
    assert "sample 23" in figure.get_suptitle()
    picture, bars = figure.axes
    np.testing.assert_array_equal(np.asarray(picture.images[0].get_array()), data[23][0].permute(1, 2, 0).numpy())
    np.testing.assert_allclose(
        [bar.get_width() for bar in bars.patches if isinstance(bar, Rectangle)], data.latents[23]
    )
    assert [label.get_text().split()[0] for label in bars.get_yticklabels()] == ["object_x", "object_hue"]
    with pytest.raises(IndexError):
        data.plot(24)

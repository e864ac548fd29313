"""The published datasets: every sample as it lies on disk, latents in the unit cube, and all that was stored kept."""

from __future__ import annotations

import copy
import csv
import inspect
import os
import pickle
import re
import runpy
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ident3d.datasets.published import (
    Causal3DIdent,
    Multimodal3DIdent,
    TemporalCausal3DIdent,
    ThreeDIdent,
    open_published,
)
from ident3d.datasets.published_base import Published
from ident3d.errors import DatasetError, SpecError
from ident3d.factors import FACTORS

ROOT = Path(__file__).resolve().parents[2]
MAKE = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "data" / "make_published.py")))
MAKERS: dict[type[Published], Callable[..., Path]] = {
    ThreeDIdent: MAKE.make_threedident,
    Causal3DIdent: MAKE.make_causal3dident,
    Multimodal3DIdent: MAKE.make_multimodal3dident,
    TemporalCausal3DIdent: MAKE.make_temporal,
}
READERS = list(MAKERS)
SIDES = {reader: 64 if reader is TemporalCausal3DIdent else 16 for reader in READERS}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Published], Path]:
    """A root of every dataset. Read it, never write into it."""
    made = {reader: tmp_path_factory.mktemp(reader.__name__) for reader in READERS}
    for reader, root in made.items():
        MAKERS[reader](root)
    return made


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 samples that the released generator made, where they are at hand."""
    archive = ROOT.parent / "shared" / "data" / "3dident64_test.tar"
    if not archive.is_file():
        pytest.skip(f"{archive.name}: samples of the released generator are not beside the project")
    root = tmp_path_factory.mktemp("real")
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
    return root


def files_in(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}


def expected(reader: type[Published], root: Path) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.float64]]]:
    """The samples of `test` by Pillow, numpy and csv alone: pixels, and latents in the unit cube."""
    if reader is ThreeDIdent:
        yield from folder_of(root / "3dident" / "test" / "images", np.load(root / "3dident/test/raw_latents.npy"))
    elif reader is Causal3DIdent:
        for k in (0, 1, 4):
            yield from folder_of(root / f"testset/images_{k}", np.load(root / f"testset/raw_latents_{k}.npy"))
    elif reader is Multimodal3DIdent:
        with open(root / "m3di" / "test" / "latents_image.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        names = ["alpharot", "betarot", "gammarot", "color"]
        columns = [f"object_{n}" for n in names] + ["spotlight_pos", "spotlight_color", "background_color"]
        u = np.array([[float(row[c]) for c in columns] for row in rows])
        yield from folder_of(root / "m3di" / "test" / "images", 2 * u - 1)
    else:
        arrays = np.load(root / "test.npz")
        raw = arrays["raw_latents"].astype(np.float64)
        u = np.concatenate([(raw[:, :3] + 2) / 4, raw[:, 3:] / (2 * np.pi)], axis=1)
        yield from zip(arrays["imgs"][..., :3], u, strict=True)


def folder_of(images: Path, raw: NDArray[Any]) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.float64]]]:
    for path, row in zip(sorted(images.iterdir()), (raw.astype(np.float64) + 1) / 2, strict=True):
        yield np.array(Image.open(path))[..., :3], row


@pytest.mark.parametrize("reader", READERS)
def test_every_item_is_the_sample_on_disk(roots: dict[Any, Path], reader: type[Published]) -> None:
    data, side = reader(roots[reader], "test"), SIDES[reader]
    samples = list(expected(reader, roots[reader]))
    assert len(data) == len(samples)
    for i, (pixels, u) in enumerate(samples):
        picture, latents = data[i][0], data[i][-1]
        assert isinstance(picture, Tensor)
        assert (picture.dtype, picture.shape) == (torch.uint8, (3, side, side))
        assert (latents.dtype, latents.shape) == (torch.float32, (len(data.columns),))
        np.testing.assert_array_equal(picture.numpy().transpose(1, 2, 0), pixels)
        np.testing.assert_array_equal(latents.numpy(), u.astype(np.float32))
    np.testing.assert_array_equal(data.latents, np.stack([u for _, u in samples]).astype(np.float32))
    assert torch.equal(data[-1][0], data[len(data) - 1][0])


@pytest.mark.parametrize("reader", READERS)
def test_what_was_stored_is_kept_bit_for_bit(roots: dict[Any, Path], reader: type[Published]) -> None:
    root, data = roots[reader], reader(roots[reader], "test")
    kept = data.extras()
    if isinstance(data, ThreeDIdent):
        stored = {f"{new}.npy": np.load(root / f"3dident/test/{old}.npy") for new, old in MOVED}
        np.testing.assert_array_equal(data.raw_latents, stored["raw_latents.npy"])
        np.testing.assert_array_equal(data.published_latents, stored["published_latents.npy"])
        assert data.raw_latents.dtype == np.float32
        assert isinstance(data.raw_latents.base, np.memmap)
    elif isinstance(data, Causal3DIdent):
        stored = {f"{new}_{k}.npy": np.load(root / f"testset/{old}_{k}.npy") for new, old in MOVED for k in (0, 1, 4)}
        np.testing.assert_array_equal(
            data.raw_latents, np.concatenate([stored[f"raw_latents_{k}.npy"] for k in CAUSAL])
        )
        assert data.raw_latents.dtype == np.float64
    elif isinstance(data, TemporalCausal3DIdent):
        arrays = np.load(root / "test.npz")
        stored = {f"{name}.npy": arrays[name] for name in ("raw_latents", "shape_latents", "interventions")}
        np.testing.assert_array_equal(data.raw_latents, arrays["raw_latents"])
        np.testing.assert_array_equal(data.interventions, arrays["interventions"])
    else:
        stored = {name: (root / "m3di" / "test" / name).read_bytes() for name in kept}
        assert set(kept) == {"latents_image.csv", "latents_text.csv"}
    assert set(kept) == set(stored)
    for name, content in stored.items():
        found = kept[name]
        assert type(found) is type(content) or isinstance(found, np.ndarray)
        if isinstance(found, np.ndarray):
            assert (found.dtype, found.shape) == (content.dtype, content.shape)
            assert found.tobytes() == content.tobytes()
        else:
            assert found == content


MOVED = (("raw_latents", "raw_latents"), ("published_latents", "latents"))
CAUSAL = (0, 1, 4)


def test_physical_values_are_those_of_the_renderer(roots: dict[Any, Path]) -> None:
    data = ThreeDIdent(roots[ThreeDIdent])
    for column, name in enumerate(FACTORS.names):
        np.testing.assert_allclose(data.factors[name], data.published_latents[:, column], atol=1e-6)


def test_causal_samples_come_class_by_class(roots: dict[Any, Path]) -> None:
    data = Causal3DIdent(roots[Causal3DIdent])
    assert data.classes == ("teapot", "hare", "armadillo")
    assert data.factors.labels("class").tolist() == ["teapot"] * 6 + ["hare"] * 5 + ["armadillo"] * 4
    np.testing.assert_array_equal(data.factors["class"], [0] * 6 + [1] * 5 + [4] * 4)
    assert data.where(6).endswith("trainset/images_1/00000.png")
    assert data.where(14).endswith("trainset/images_4/00003.png")


@pytest.mark.parametrize("classes", [["armadillo", "teapot"], [4, 0], [np.int64(4), "teapot"]])
def test_classes_can_be_chosen(roots: dict[Any, Path], classes: list[Any]) -> None:
    data, whole = Causal3DIdent(roots[Causal3DIdent], classes=classes), Causal3DIdent(roots[Causal3DIdent])
    rows = [*range(6), *range(11, 15)]
    np.testing.assert_array_equal(data.latents, whole.latents[rows])
    assert data.categories[:, 0].tolist() == [0] * 6 + [4] * 4
    assert torch.equal(data[6][0], whole[11][0])
    assert data.derived != whole.derived
    assert data.fingerprint() != whole.fingerprint()


@pytest.mark.parametrize("classes", [[], ["cat"], [7], [True], ["hare", 1], [-1]])
def test_classes_that_are_none_are_refused(roots: dict[Any, Path], classes: list[Any]) -> None:
    with pytest.raises(SpecError, match="class"):
        Causal3DIdent(roots[Causal3DIdent], classes=classes)
    with pytest.raises(SpecError, match=re.escape("['hare']")):
        Causal3DIdent(roots[Causal3DIdent], classes="hare")


def test_a_class_that_is_not_there_is_named_with_those_that_are(roots: dict[Any, Path]) -> None:
    with pytest.raises(DatasetError, match=r"images_2: missing .* classes that are there: teapot, hare, armadillo"):
        Causal3DIdent(roots[Causal3DIdent], classes=["dragon"])


def test_texts_come_with_their_pictures(roots: dict[Any, Path]) -> None:
    data, without = Multimodal3DIdent(roots[Multimodal3DIdent]), Multimodal3DIdent(roots[Multimodal3DIdent], text=False)
    lines = (roots[Multimodal3DIdent] / "m3di/train/text/text_raw.txt").read_text().splitlines()
    assert [data[i][1] for i in range(20)] == lines
    assert data.has_text
    assert not without.has_text
    assert len(without[0]) == 2
    with pytest.raises(DatasetError, match="text=False"):
        without.text(0)
    assert "a text with each sample" in repr(data)


def test_tables_of_multimodal_samples_are_kept_by_name(roots: dict[Any, Path]) -> None:
    data = Multimodal3DIdent(roots[Multimodal3DIdent])
    words = data.text_latents
    assert words["object_color_name"].dtype.kind == "U"
    assert (words["object_color_index"].dtype, words["text_phrasing"].shape) == (np.dtype(np.int64), (20,))
    assert all(word in data.text(i) for i, word in enumerate(words["object_color_name"]))
    np.testing.assert_array_equal(data.image_latents["object_color"], data.raw_latents[:, 3])
    assert data.raw_latents.dtype == np.float64
    assert data.factors.labels("object_shape").tolist() == ["teapot", "hare"] * 10
    assert data.factors.labels("object_xpos").tolist() == ["0", "1", "2"] * 6 + ["0", "1"]
    assert data.factors.get("object_hue").unit == "unit interval"
    np.testing.assert_allclose(data.factors["object_hue"], data.raw_latents[:, 3], atol=1e-7)


@pytest.mark.parametrize("prefix", ["image_", "latents/", "X."])
def test_columns_are_found_whatever_their_prefix_and_order(tmp_path: Path, prefix: str) -> None:
    order = np.random.default_rng(0).permutation(11).tolist()
    MAKE.make_multimodal3dident(tmp_path / "a", {"test": 12})
    MAKE.make_multimodal3dident(tmp_path / "b", {"test": 12}, prefix=prefix, order=order)
    plain, other = (Multimodal3DIdent(tmp_path / name, "test") for name in "ab")
    np.testing.assert_array_equal(plain.latents, other.latents)
    np.testing.assert_array_equal(plain.categories, other.categories)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ">f4"])
@pytest.mark.parametrize("digits", [None, 5, 1])
def test_types_and_zeros_before_numbers_may_vary(tmp_path: Path, dtype: Any, digits: int | None) -> None:
    MAKE.make_threedident(tmp_path / "a", {"test": 12}, dtype=dtype, digits=digits, channels=3)
    MAKE.make_causal3dident(tmp_path / "b", ["test"], dtype=dtype, digits=digits)
    for data in (ThreeDIdent(tmp_path / "a", "test"), Causal3DIdent(tmp_path / "b", "testset")):
        assert data.raw_latents.dtype == dtype
        assert data.latents.dtype == np.float32
        np.testing.assert_allclose(data.latents, (data.raw_latents + 1) / 2, atol=1e-7)
        pixels = MAKE.make_pixels(0 if isinstance(data, ThreeDIdent) else 40, 2, 16)
        place = 2 if isinstance(data, ThreeDIdent) else 13
        np.testing.assert_array_equal(data[place][0].numpy().transpose(1, 2, 0), pixels)


def test_real_pictures_are_read_as_pillow_reads_them(real: Path) -> None:
    data = ThreeDIdent(real, "test")
    before = files_in(real)
    assert (len(data), data.resolution) == (1000, 64)
    assert data.origin == "3DIdent as published"
    for i in (0, 17, 999):
        path = real / "3dident64" / "test" / "images" / f"{i:03d}.png"
        rgba = Image.open(path)
        assert rgba.mode == "RGBA"
        np.testing.assert_array_equal(data[i][0].numpy().transpose(1, 2, 0), np.array(rgba)[..., :3])
        assert data.where(i) == str(path)
        assert data.read(i) == path.read_bytes()
    for column in range(10):
        assert abs(data.latents[:, column].mean() - 0.5) < 0.04
    np.testing.assert_allclose(data.factors["object_x"], data.published_latents[:, 0], atol=1e-5)
    assert files_in(real) == before


@pytest.mark.parametrize("reader", READERS)
def test_factors_are_chosen_in_the_order_asked(roots: dict[Any, Path], reader: type[Published]) -> None:
    names = ["ground_hue", "object_alpha"]
    data, whole = reader(roots[reader], factors=names), reader(roots[reader])
    assert data.factors.names == tuple(names)
    np.testing.assert_array_equal(data.latents, whole.latents[:, [whole.factors.names.index(n) for n in names]])
    assert data.raw_latents.shape == whole.raw_latents.shape
    with pytest.raises(SpecError, match="unknown factor"):
        reader(roots[reader], factors=["colour"])


def test_angles_of_frames_are_periodic_and_positions_are_not() -> None:
    assert [f.periodic for f in TemporalCausal3DIdent.table] == [False] * 3 + [True] * 7
    assert [f.high for f in TemporalCausal3DIdent.table] == [2.0] * 3 + [2 * np.pi] * 7


@pytest.mark.parametrize("reader", READERS)
def test_a_pickle_is_small_and_serves_the_same(roots: dict[Any, Path], reader: type[Published]) -> None:
    data = reader(roots[reader])
    text = pickle.dumps(data)
    assert data.latents[3:5].tobytes() not in text
    assert data.raw_latents[3:5].tobytes() not in text
    for again in (pickle.loads(text), copy.deepcopy(data), copy.copy(data)):
        np.testing.assert_array_equal(again.latents, data.latents)
        np.testing.assert_array_equal(again.categories, data.categories)
        assert torch.equal(again[3][0], data[3][0])
        assert repr(again) == repr(data)
        assert again.fingerprint() == data.fingerprint()


@pytest.mark.parametrize("reader", READERS)
def test_fingerprints_change_with_the_pictures_alone(tmp_path: Path, reader: type[Published]) -> None:
    MAKERS[reader](tmp_path / "data")
    first, other = reader(tmp_path / "data").fingerprint(), reader(tmp_path / "data", "test").fingerprint()
    assert reader(tmp_path / "data").fingerprint() == first
    assert first != other
    if reader is TemporalCausal3DIdent:
        MAKE.make_temporal(tmp_path / "data", {"train": 21})
    else:
        path = Path(reader(tmp_path / "data").where(4))
        content = path.read_bytes()
        path.write_bytes(content)
        os.utime(path, ns=(0, 0))
    assert reader(tmp_path / "data").fingerprint() != first


@pytest.mark.parametrize("reader", READERS)
def test_opening_writes_nothing_beside_the_data(tmp_path: Path, reader: type[Published]) -> None:
    MAKERS[reader](tmp_path / "data")
    before = files_in(tmp_path / "data")
    data = reader(tmp_path / "data")
    data[0]
    repr(data)
    data.fingerprint()
    assert files_in(tmp_path / "data") == before
    assert data.derived == data.folder


def test_what_is_derived_goes_to_the_cache_where_the_data_cannot_be_written(
    roots: dict[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    data = ThreeDIdent(roots[ThreeDIdent])
    assert data.derived.parent == tmp_path / "home" / "derived"
    assert not data.derived.exists()
    assert ThreeDIdent(roots[ThreeDIdent] / "3dident", "test").derived == data.derived


@pytest.mark.parametrize("reader", READERS)
def test_repr_says_what_it_is(roots: dict[Any, Path], reader: type[Published]) -> None:
    text = repr(reader(roots[reader], "test", transform=torch.nn.Identity()))
    side = SIDES[reader]
    assert re.match(rf"{reader.__name__}, split 'test': \d+ samples of {side} x {side} px\n", text)
    assert str(roots[reader]) in text
    assert f"{reader.title} as published" in text
    assert "transform: Identity()" in text
    assert "object_alpha" in text


@pytest.mark.parametrize("reader", READERS)
def test_transforms_and_normalisation_are_applied(roots: dict[Any, Path], reader: type[Published]) -> None:
    plain = reader(roots[reader])
    data = reader(roots[reader], transform=lambda x: 255 - x, target_transform=lambda z: 2 * z - 1)
    assert torch.equal(data[2][0], 255 - plain[2][0])
    assert torch.equal(data[2][-1], 2 * plain[2][-1] - 1)
    data = reader(roots[reader], normalize=((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    torch.testing.assert_close(data[2][0], (plain[2][0] / 255 - 0.5) / 0.25)


@pytest.mark.parametrize("reader", READERS)
def test_every_class_says_where_it_comes_from(reader: type[Published]) -> None:
    assert reader.url.startswith("https://")
    assert re.search(r"20\d\d$", reader.citation)
    assert set(reader.splits) <= set(reader.layout.places)
    assert reader.license


@pytest.mark.parametrize("reader", READERS)
def test_signatures_begin_as_torchvisions_do(reader: type[Published]) -> None:
    found = inspect.signature(reader).parameters
    assert list(found)[:5] == ["root", "split", "transform", "target_transform", "download"]
    rest = {name for name, parameter in found.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert {"factors", "cache", "normalize", "on_error"} <= rest
    assert len(found) == 5 + len(rest)


def test_open_published_passes_options_on(roots: dict[Any, Path]) -> None:
    data = open_published(roots[Causal3DIdent], "test", classes=["hare"], factors=["object_x"])
    assert isinstance(data, Causal3DIdent)
    assert data.latents.shape == (5, 1)

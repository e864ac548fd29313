"""Published layouts to shards and back: every pixel, array and text is what it was."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

import numpy as np
import pytest

from ident3d import Ident3D
from ident3d.conversion.encoding import stored_format
from ident3d.datasets.published import Causal3DIdent, ThreeDIdent, open_published
from ident3d.shards.manifest import read_manifest
from ident3d.shards.verify import verify_dataset

LAYOUTS = ("3dident", "causal3dident", "multimodal3dident", "temporal-causal3dident")
FORMATS = ("keep", "png", "webp")


@pytest.fixture(scope="module")
def converted(
    published: dict[str, Path], run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """The shards of a layout in a format, made once."""
    root = tmp_path_factory.mktemp("converted")

    def make(layout: str, form: str) -> Path:
        out = root / f"{layout}-{form}"
        return out if out.exists() else run(published[layout], out, format=form)

    return make


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_serve_what_the_reader_serves(
    published: dict[str, Path], converted: Callable[[str, str], Path], layout: str, form: str
) -> None:
    root = converted(layout, form)
    assert verify_dataset(root) == []
    for split in read_manifest(root).splits:
        ours, theirs = Ident3D(root, split), open_published(published[layout], split)
        assert len(ours) == len(theirs)
        assert ours.pair_count == theirs.pair_count
        np.testing.assert_array_equal(ours.latents, theirs.latents)
        np.testing.assert_array_equal(ours.categories, theirs.categories)
        assert ours.factors.to_dict().keys() == theirs.factors.to_dict().keys()
        assert ours.mean == pytest.approx(theirs.mean, abs=1e-9)
        assert ours.std == pytest.approx(theirs.std, abs=1e-9)
        assert stored_format(ours.read(0)) == ("webp" if form == "webp" else "png")
        for i in range(len(theirs)):
            a, b = ours[i], theirs[i]
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                assert x == y if isinstance(x, str) else bool((x == y).all())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_way_back_gives_every_array_bit_for_bit(
    published: dict[str, Path],
    converted: Callable[[str, str], Path],
    run: Callable[..., Path],
    same_published: Callable[[Any, Any], None],
    tmp_path: Path,
    layout: str,
    form: str,
) -> None:
    back = run(converted(layout, form), tmp_path / "back", to="published")
    source = published[layout]
    for split in read_manifest(converted(layout, form)).splits:
        same_published(open_published(source, split), open_published(back, split))
    for path in [*source.rglob("*.npy"), *source.rglob("*.csv"), *source.rglob("*.txt")]:
        assert (back / path.relative_to(source)).read_bytes() == path.read_bytes()
    if form == "keep":
        pictures = {p.read_bytes() for p in source.rglob("*.png")}
        assert {p.read_bytes() for p in back.rglob("*.png")} == pictures


def test_files_get_the_published_names(
    published: dict[str, Path], converted: Callable[[str, str], Path], run: Callable[..., Path], tmp_path: Path
) -> None:
    def files(root: Path) -> list[str]:
        found = (p.relative_to(root) for p in sorted(root.rglob("*")) if p.is_file())
        return [str(p) for p in found if not p.parts[0].startswith(".")]  # caches

    names = {n: files(run(converted(n, "keep"), tmp_path / n, to="published")) for n in LAYOUTS}
    assert names["3dident"] == files(published["3dident"])
    assert names["temporal-causal3dident"] == ["test.npz", "train.npz"]
    assert "trainset/images_4/0.png" in names["causal3dident"]
    assert "val/text/text_raw.txt" in names["multimodal3dident"]
    with np.load(tmp_path / "temporal-causal3dident" / "train.npz") as arrays:
        assert {name: arrays[name].shape for name in arrays} == {
            "raw_latents": (20, 10),
            "shape_latents": (20, 2),
            "interventions": (19, 12),
            "imgs": (20, 16, 16, 3),
        }


def test_members_of_a_sample(converted: Callable[[str, str], Path]) -> None:
    def members(layout: str) -> dict[str, bytes]:
        with tarfile.open(converted(layout, "webp") / "train" / "train-000000.tar") as archive:
            found = [m for m in archive if m.name.startswith("000000001.")]
            return {m.name: cast(IO[bytes], archive.extractfile(m)).read() for m in found}

    assert list(members("3dident")) == ["000000001.webp", "000000001.latents.npy"]
    assert members("causal3dident")["000000001.json"] == b'{"class": "teapot"}'
    found = members("multimodal3dident")
    assert list(found) == [f"000000001.{e}" for e in ("webp", "latents.npy", "json", "txt")]
    assert found["000000001.txt"].startswith(b"A hare of ")


def test_shards_to_shards_and_back_keep_the_source(
    converted: Callable[[str, str], Path], run: Callable[..., Path], content: Any, tmp_path: Path
) -> None:
    first = converted("multimodal3dident", "keep")
    webp = run(first, tmp_path / "webp", format="webp")
    assert verify_dataset(webp) == []
    a, b = read_manifest(first), read_manifest(webp)
    assert (a.source, a.categories, a.name) == (b.source, b.categories, b.name)
    assert a.splits["val"].extras == b.splits["val"].extras
    assert a.splits["val"].mean == b.splits["val"].mean
    # Equal pixels are equal bytes of the encoder, whatever they were read from.
    assert content(converted("multimodal3dident", "webp")) == content(webp)


def test_a_second_split_joins_the_first(
    published: dict[str, Path],
    converted: Callable[[str, str], Path],
    run: Callable[..., Path],
    content: Any,
    tmp_path: Path,
) -> None:
    source = published["temporal-causal3dident"]
    run(source, tmp_path / "out", splits=("test",))
    assert list(read_manifest(tmp_path / "out").splits) == ["test"]
    run(source, tmp_path / "out", splits=("train",))
    assert content(tmp_path / "out") == content(converted("temporal-causal3dident", "keep"))


def test_labels_that_one_split_alone_has(make_published: ModuleType, run: Callable[..., Path], tmp_path: Path) -> None:
    kinds = np.stack([np.zeros(5, int), [0, 1, 2, 0, 0]], axis=1)
    source = make_published.make_temporal(tmp_path / "source", {"train": 5}, side=8, shape_latents=kinds)
    make_published.make_temporal(source, {"test": 4}, side=8)
    out = run(source, tmp_path / "out")
    assert read_manifest(out).categories[1].labels == ("0", "1", "2")
    assert Ident3D(out, "test").factors.labels("material").tolist() == ["0"] * 4


def test_one_sample_and_a_class_without_any(
    make_published: ModuleType, run: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_published.make_threedident(tmp_path / "a", {"train": 1}, digits=1)
    back = run(run(source, tmp_path / "b"), tmp_path / "c", to="published")
    assert (back / "train" / "images" / "0.png").is_file()
    assert len(ThreeDIdent(back)) == 1

    source = make_published.make_causal3dident(tmp_path / "d", ("train",), {2: 3})
    (source / "trainset" / "images_5").mkdir()
    for name in ("raw_latents_5.npy", "latents_5.npy"):
        np.save(source / "trainset" / name, np.zeros((0, 10)))
    back = run(run(source, tmp_path / "e"), tmp_path / "f", to="published")
    assert Causal3DIdent(back).classes == ("dragon", "horse")


@pytest.mark.parametrize("form", FORMATS)
def test_pictures_of_the_released_generator(
    real: Path, run: Callable[..., Path], same_published: Any, tmp_path: Path, form: str
) -> None:
    shards = run(real, tmp_path / "shards", format=form)
    assert verify_dataset(shards) == []
    source, data = ThreeDIdent(real, "test"), Ident3D(shards, "test")
    np.testing.assert_array_equal(data.latents, source.latents)
    assert all(bool((data[i][0] == source[i][0]).all()) for i in range(60))
    back = run(shards, tmp_path / "back", to="published")
    same_published(source, ThreeDIdent(back, "test"))
    if form == "keep":
        for path in (p for p in real.rglob("*") if p.is_file()):
            assert (back / path.relative_to(real)).read_bytes() == path.read_bytes()

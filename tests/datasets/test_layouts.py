"""Published layouts: found wherever they may lie, and whatever is wrong with them is named."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ident3d.datasets.layouts import TextLines, read_named, read_numbers, unit_cube
from ident3d.datasets.published import (
    Causal3DIdent,
    Multimodal3DIdent,
    TemporalCausal3DIdent,
    ThreeDIdent,
    detect_layout,
    open_published,
)
from ident3d.datasets.published_base import Published
from ident3d.errors import DatasetError, DownloadError

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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Published], Path]:
    """The folder with the splits of every dataset. Read it, never write into it."""
    return {reader: MAKERS[reader](tmp_path_factory.mktemp("made") / reader.__name__) for reader in READERS}


@pytest.fixture
def copy_of(made: dict[type[Published], Path], tmp_path: Path) -> Callable[[type[Published]], Path]:
    """A copy of a dataset, to be damaged."""
    return lambda reader: shutil.copytree(made[reader], tmp_path / "copy")


@pytest.mark.parametrize("reader", READERS)
def test_a_root_may_be_the_folder_or_the_one_above(made: Any, tmp_path: Path, reader: type[Published]) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above" / "anything").symlink_to(made[reader])
    (tmp_path / "above" / "notes").mkdir()
    (tmp_path / "above" / "notes" / "train").mkdir()
    for root in (made[reader], tmp_path / "above", str(tmp_path / "above")):
        assert detect_layout(root) is reader
        assert reader.splits_in(root) == ("train", "test")
        data = open_published(root, "test")
        assert isinstance(data, reader)
        np.testing.assert_array_equal(data.latents, reader(made[reader], "test").latents)


def test_splits_have_the_layouts_own_names_too(made: Any) -> None:
    assert Causal3DIdent(made[Causal3DIdent], "trainset").split == "train"
    assert ThreeDIdent(made[ThreeDIdent]).split == "train"
    for split in ("val", "trainset", "../test", "", "Train"):
        with pytest.raises(
            DatasetError, match=rf"no split '{re.escape(split)}' of 3DIdent; it has train, test; to fetch"
        ):
            ThreeDIdent(made[ThreeDIdent], split)


def test_two_datasets_of_a_kind_are_told_apart_by_the_user(made: Any, tmp_path: Path) -> None:
    for name in ("3dident", "3dident64"):
        shutil.copytree(made[ThreeDIdent], tmp_path / "data" / name)
    with pytest.raises(
        DatasetError, match=r"data: split 'train' of 3DIdent is in several .*: 3dident, 3dident64; name"
    ):
        ThreeDIdent(tmp_path / "data")
    with pytest.raises(DatasetError, match="in several"):
        ThreeDIdent.splits_in(tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "3dident64" / "train")
    assert ThreeDIdent(tmp_path / "data").folder == tmp_path / "data" / "3dident"


def test_datasets_of_all_kinds_may_lie_beside_each_other(made: Any, tmp_path: Path) -> None:
    for reader in READERS:
        (tmp_path / reader.__name__).symlink_to(made[reader])
    for reader in READERS:
        assert reader(tmp_path, "test").folder.name == reader.__name__
    with pytest.raises(DatasetError, match=r"several published datasets: 3DIdent in ThreeDIdent, Causal3DIdent in"):
        detect_layout(tmp_path)


def test_what_is_none_of_the_layouts_is_said_with_what_was_looked_for(tmp_path: Path, fabricated: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "cat.png").write_bytes(b"")
    (tmp_path / "train.npz").write_bytes(b"no archive")
    assert detect_layout(tmp_path) is None
    with pytest.raises(DatasetError, match=r"none of the published layouts.*train/raw_latents\.npy \(3DIdent\), train"):
        open_published(tmp_path)
    with pytest.raises(DatasetError, match="no such folder"):
        open_published(tmp_path / "nowhere")
    for opened in (open_published, ThreeDIdent):
        with pytest.raises(DatasetError, match=r"holds dataset\.json.* open it with Ident3D"):
            opened(fabricated)
    assert detect_layout(fabricated) is None
    assert detect_layout(fabricated.parent) is None


@pytest.mark.parametrize("reader", READERS)
def test_a_root_without_the_dataset_is_named_with_the_way_to_it(tmp_path: Path, reader: type[Published]) -> None:
    with pytest.raises(DatasetError) as caught:
        reader(tmp_path)
    assert f"{tmp_path}: no split 'train' of {reader.title}" in str(caught.value)
    if reader is not TemporalCausal3DIdent:
        assert f"download=True, or `ident3d download {reader.layout.name} --root {tmp_path}`" in str(caught.value)
    with pytest.raises(DatasetError, match=r"nowhere: no such folder \(root='.*nowhere'\)"):
        reader(tmp_path / "nowhere")


NEEDED = [
    (ThreeDIdent, "test/raw_latents.npy"),
    (ThreeDIdent, "test/latents.npy"),
    (ThreeDIdent, "test/images"),
    (Causal3DIdent, "testset/raw_latents_1.npy"),
    (Causal3DIdent, "testset/latents_4.npy"),
    (Causal3DIdent, "testset/images_0"),
    (Multimodal3DIdent, "test/latents_image.csv"),
    (Multimodal3DIdent, "test/latents_text.csv"),
    (Multimodal3DIdent, "test/text/text_raw.txt"),
    (Multimodal3DIdent, "test/images"),
]


@pytest.mark.parametrize(("reader", "name"), NEEDED)
def test_a_missing_file_is_named(copy_of: Callable[..., Path], reader: type[Published], name: str) -> None:
    root = copy_of(reader)
    path = root / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with pytest.raises(DatasetError) as caught:
        reader(root, "test")
    assert f"{path}: missing (root='{root}')" in str(caught.value)
    assert f"ident3d download {reader.layout.name} --root {root}" in str(caught.value)
    if name.startswith("test/text"):
        Multimodal3DIdent(root, "test", text=False)


def test_without_both_arrays_the_folder_is_still_told_by_its_name(copy_of: Callable[..., Path]) -> None:
    root = copy_of(ThreeDIdent)
    for name in ("raw_latents.npy", "latents.npy"):
        (root / "test" / name).unlink()
    with pytest.raises(DatasetError, match=r"test/raw_latents\.npy: missing"):
        ThreeDIdent(root.parent, "test")


@pytest.mark.parametrize("reader", READERS[:3])
def test_download_is_called_where_files_are_absent_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: type[Published]
) -> None:
    calls = []

    def download(name: str, root: Path, *, splits: tuple[str, ...], quiet: bool) -> None:
        assert not quiet
        assert splits == ("test",)  # nobody who wants the test split waits for the training split
        calls.append((name, root))
        MAKERS[reader](root)

    module = ModuleType("ident3d.datasets.download")
    module.download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ident3d.datasets.download", module)
    for _ in range(2):
        assert len(reader(tmp_path / "new", "test", download=True)) > 0
    assert calls == [(reader.layout.name, tmp_path / "new")]
    with pytest.raises(DatasetError, match="no split 'val'"):
        reader(tmp_path / "new", "val")
    assert len(calls) == 1


def test_a_dataset_without_a_record_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, root: Path, *, splits: tuple[str, ...], quiet: bool) -> None:
        raise DownloadError(f"{name}: no public record")

    module = ModuleType("ident3d.datasets.download")
    module.download = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ident3d.datasets.download", module)
    with pytest.raises(DownloadError, match="temporal-causal3dident: no public record"):
        TemporalCausal3DIdent(tmp_path, download=True)


ARRAYS = [
    (np.zeros((12, 11), np.float32), r"periodic variant.*\(N, 10\)"),
    (np.zeros((12, 9), np.float32), r"float32 \(12, 9\), expected float32 or float64 \(N, 10\)"),
    (np.zeros(12, np.float32), r"float32 \(12,\), expected"),
    (np.zeros((12, 10), np.int64), r"int64 \(12, 10\), expected"),
    (np.zeros((0, 10), np.float32), r"latents\.npy: has 12 rows, but raw_latents\.npy has 0$"),
    (np.zeros((11, 10), np.float32), r"latents\.npy: has 12 rows, but raw_latents\.npy has 11"),
    (np.full((12, 10), np.nan, np.float32), r"sample 0, object_x: nan, expected -1 to 1 \(120 such values\)"),
    (np.eye(12, 10, dtype=np.float64) * 1.5, r"sample 0, object_x: 1\.5, expected -1 to 1 \(10 such values\)"),
    (np.array([{}] * 12), "cannot be read"),
]


@pytest.mark.parametrize(("array", "text"), ARRAYS)
def test_arrays_that_cannot_be_are_named(copy_of: Callable[..., Path], array: Any, text: str) -> None:
    root = copy_of(ThreeDIdent)
    np.save(root / "test" / "raw_latents.npy", array)
    with pytest.raises(DatasetError, match=text) as caught:
        ThreeDIdent(root, "test")
    assert "latents.npy" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 no archive", b"\x93NUMPY\x01\x00"])
def test_damaged_arrays_are_named(copy_of: Callable[..., Path], content: bytes) -> None:
    root = copy_of(Causal3DIdent)
    (root / "testset" / "raw_latents_1.npy").write_bytes(content)
    with pytest.raises(DatasetError, match=r"raw_latents_1\.npy: cannot be read .* fetch"):
        Causal3DIdent(root, "test")


def test_arrays_in_fortran_order_are_read(copy_of: Callable[..., Path]) -> None:
    root = copy_of(ThreeDIdent)
    plain = ThreeDIdent(root, "test")
    np.save(root / "test" / "raw_latents.npy", np.asfortranarray(plain.raw_latents))
    np.testing.assert_array_equal(ThreeDIdent(root, "test").latents, plain.latents)


def test_rounding_past_the_bounds_is_cut_and_no_more() -> None:
    raw = np.array([[-1 - 1e-7, 1 + 1e-7]])
    np.testing.assert_array_equal(unit_cube(raw, -1.0, 1.0, ["a", "b"], "x"), [[0, 1]])
    with pytest.raises(DatasetError, match=r"x: sample 0, b: 1\.00001, expected -1 to 1$"):
        unit_cube(np.array([[0, 1.00001]]), -1.0, 1.0, ["a", "b"], "x")
    with pytest.raises(DatasetError, match=r"sample 1, b: inf, expected 0 to 6\.28319"):
        unit_cube(np.array([[0, 1], [0, np.inf]]), [-2.0, 0.0], [2.0, 2 * np.pi], ["a", "b"], "x")


TABLES = [
    (lambda t: t.replace("object_color", "colour"), "no column is called object_color.*object_shape, object_xpos"),
    (lambda t: t.replace("spotlight_pos", "a_object_color").replace("object_color,a", "b_object_color,a"), "several"),
    (lambda t: t.replace("object_xpos", "object_shape"), "several columns are called object_shape"),
    (lambda t: t.replace("\n0,", "\n7,", 1), r"object_shape: 7, expected 0 to 6"),
    (lambda t: t.replace("\n0,", "\n0.5,", 1), r"object_shape: 0\.5, expected 0 to 6"),
    (lambda t: t.replace("\n0,", "\nteapot,", 1), "teapot"),
    (lambda t: t.replace("\n0,", "\n,", 1), "convert"),
    (
        lambda t: "\n".join(t.splitlines()[:-1]),
        r"images: 12 pictures, but latents_image\.csv has 11 rows; past the end",
    ),
    (lambda t: t.splitlines()[0], "holds no samples|12 lines, expected 0"),
    (lambda _: "", "there are none"),
    (lambda t: t.replace(",0.0,0.", ",0.0,1.", 1), r"object_alpharot: 1\.\d+, expected 0 to 1"),
]


@pytest.mark.parametrize(("change", "text"), TABLES)
@pytest.mark.parametrize("texts", [True, False])
def test_tables_that_cannot_be_are_named(
    copy_of: Callable[..., Path], change: Callable[[str], str], text: str, texts: bool
) -> None:
    root = copy_of(Multimodal3DIdent)
    path = root / "test" / "latents_image.csv"
    before = path.read_text().replace("\r\n", "\n")
    assert change(before) != before
    path.write_text(change(before))
    with pytest.raises(DatasetError, match=text if not texts or "pictures" not in text else "12 lines, expected 11"):
        Multimodal3DIdent(root, "test", text=texts)


def test_a_table_may_have_quotes_blank_lines_a_mark_and_more_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes('\ufeff"","Object_Shape" ,"note","x:b"\r\n0,"3","a, b",0.5\r\n\r\n1,4,c,1e-3\r\n'.encode())
    np.testing.assert_array_equal(read_numbers(path, ["b", "object_shape"]), [[0.5, 3], [0.001, 4]])
    named = read_named(path, 2)
    assert list(named) == ["", "Object_Shape", "note", "x:b"]
    assert named["note"].tolist() == ["a, b", "c"]
    with pytest.raises(DatasetError, match=r"expected 3 rows of 4 cells, found 2 rows"):
        read_named(path, 3)


def test_texts_are_one_line_a_sample_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "text_raw.txt"
    lines = ["ein grüner Hase", "", "a\x0bb\u2028c\x85d", "last"]
    path.write_bytes("\r\n".join(lines).encode())
    assert [TextLines(path, 4)[i] for i in range(4)] == lines
    path.write_bytes(("\n".join(lines) + "\n").encode("utf-8-sig"))
    assert [TextLines(path, 4)[i] for i in range(4)] == lines
    with pytest.raises(DatasetError, match=r"text_raw\.txt: has 4 lines, expected 5"):
        TextLines(path, 5)
    path.write_bytes(b"good\nb\xffd\n")
    assert TextLines(path, 2)[0] == "good"
    with pytest.raises(DatasetError, match="line 2 is not UTF-8"):
        TextLines(path, 2)[1]

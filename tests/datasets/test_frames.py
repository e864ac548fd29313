"""Numbered pictures and frames of an .npz: opened cheaply, found by their numbers, and checked."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import runpy
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ident3d.datasets.frames import Archive, Frames, NumberedPictures
from ident3d.datasets.published import Causal3DIdent, TemporalCausal3DIdent, ThreeDIdent
from ident3d.errors import DatasetError

ROOT = Path(__file__).resolve().parents[2]
MAKE = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "data" / "make_published.py")))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures 00.png to 11.png."""
    MAKE.make_threedident(tmp_path, {"test": 12})
    return tmp_path / "3dident" / "test" / "images"


def test_a_picture_that_is_missing_is_named(folder: Path) -> None:
    (folder / "07.png").unlink()
    text = r"images: 11 pictures, but raw_latents\.npy has 12 rows; missing: 07\.png; unpack or fetch"
    with pytest.raises(DatasetError, match=text):
        ThreeDIdent(folder.parent.parent, "test")


def test_pictures_past_the_end_and_twice_are_named(folder: Path) -> None:
    for name in ("12.png", "100000000000000000000000.png", "007.png"):
        shutil.copy(folder / "00.png", folder / name)
    with pytest.raises(
        DatasetError, match=r"15 pictures.*past the end: 100000.*, 12\.png; there under another.*07\.png"
    ):
        ThreeDIdent(folder.parent.parent, "test")


def test_of_many_that_are_missing_some_are_named_and_the_rest_counted(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(DatasetError, match=r": 0 pictures, .* missing: 00\.png, 01\.png, 02\.png and 9 more"):
        ThreeDIdent(folder.parent.parent, "test")


def test_what_is_no_numbered_picture_is_left_aside(folder: Path) -> None:
    for name in ("._00.png", "preview.png", "Thumbs.db", "00.png.part", "-1.png", "٣.png"):
        (folder / name).write_bytes(b"")
    (folder / "12").mkdir()
    assert len(ThreeDIdent(folder.parent.parent, "test")) == 12


def test_zeros_before_the_number_may_differ_from_picture_to_picture(folder: Path) -> None:
    expected = ThreeDIdent(folder.parent.parent, "test")
    pictures = [expected[i][0] for i in range(12)]
    (folder / "03.png").rename(folder / "3.png")
    (folder / "11.png").rename(folder / "00011.png")
    data = ThreeDIdent(folder.parent.parent, "test")
    assert all(torch.equal(data[i][0], pictures[i]) for i in range(12))
    assert data.where(11) == str(folder / "00011.png")


def test_a_listing_of_many_is_small_and_fast(tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(b"")
    for i in range(20_000):
        os.link(tmp_path / "first", tmp_path / f"{i:06d}.png")
    tracemalloc.start()
    pictures = NumberedPictures(tmp_path, 20_000, "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000
    assert pictures.path(19_999).name == "019999.png"


@pytest.mark.parametrize(
    ("size", "text"),
    [((16, 17), r"00\.png: is 16 x 17 px, expected a square"), ((20_000, 20_000), "20000 x 20000")],
)
def test_pictures_that_are_not_square_or_absurd_are_refused(folder: Path, size: tuple[int, int], text: str) -> None:
    picture = bytearray((folder / "00.png").read_bytes())
    picture[16:24] = size[0].to_bytes(4) + size[1].to_bytes(4)
    (folder / "00.png").write_bytes(picture)
    with pytest.raises(DatasetError, match=text):
        ThreeDIdent(folder.parent.parent, "test")


def test_the_side_is_that_of_the_first_picture_that_has_one(folder: Path) -> None:
    (folder / "00.png").write_bytes(b"damaged")
    data = ThreeDIdent(folder.parent.parent, "test")
    assert data.resolution == 16
    with pytest.raises(DatasetError, match=r"00\.png: the picture does not decode"):
        data[0]
    for path in folder.iterdir():
        path.write_bytes(b"")
    with pytest.raises(DatasetError, match="none of its first pictures is a PNG"):
        ThreeDIdent(folder.parent.parent, "test")


def test_a_picture_of_another_size_or_gone_is_named_when_it_is_read(folder: Path) -> None:
    data = ThreeDIdent(folder.parent.parent, "test")
    Image.new("RGB", (8, 8)).save(folder / "05.png")
    (folder / "06.png").unlink()
    with pytest.raises(DatasetError, match=r"05\.png: .*8 x 8 px"):
        data[5]
    with pytest.raises(DatasetError, match=r"06\.png: cannot be read \(No such file"):
        data[6]
    with pytest.raises(DatasetError, match="no positives"):
        data.read(0, positive=True)


def test_an_empty_class_is_no_hindrance(tmp_path: Path) -> None:
    MAKE.make_causal3dident(tmp_path, ["test"], {1: 3})
    for name in ("raw_latents_0", "latents_0"):
        np.save(tmp_path / "testset" / f"{name}.npy", np.zeros((0, 10)))
    (tmp_path / "testset" / "images_0").mkdir()
    data = Causal3DIdent(tmp_path, "test")
    assert data.categories[:, 0].tolist() == [1, 1, 1]
    assert data.where(0).endswith("images_1/00000.png")


def frames_of(path: Path) -> Any:
    return np.load(path)["imgs"]


@pytest.mark.parametrize("channels", [3, 4, 5])
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, np.float16, ">f4"])
def test_frames_are_those_of_the_array(tmp_path: Path, channels: int, compressed: bool, dtype: Any) -> None:
    def write(channel_count: int, kind: Any) -> Path:
        options = {"channels": channel_count, "compressed": compressed, "dtype": kind}
        made: Path = MAKE.make_temporal(tmp_path, {"test": 9}, **options)
        return made

    if channels == 5:  # Pillow is not asked here: depth or segmentation may come behind the colours
        pixels = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 5), dtype=np.uint8)
        shown = pixels if dtype == np.uint8 else (pixels / 255).astype(dtype)
        MAKE.make_temporal(tmp_path, {"test": 9}, compressed=compressed, imgs=shown)
    else:
        pixels = frames_of(write(channels, np.uint8) / "test.npz")
        write(channels, dtype)
    found = Frames(tmp_path / "test.npz")
    assert (found.count, found.side) == (9, pixels.shape[1])
    block = np.empty((2, *pixels.shape[1:3], 3), np.uint8)
    for i in (0, 4, 8):
        np.testing.assert_array_equal(found.read(i), pixels[i, ..., :3])
        np.testing.assert_array_equal(found.read(i, block[1]), pixels[i, ..., :3])
        np.testing.assert_array_equal(found.read(i, block[1, :, ::-1])[:, ::-1], pixels[i, :, ::-1, :3])


def test_compressed_frames_are_unpacked_once(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MAKE.make_temporal(tmp_path, {"test": 9})
    Frames(tmp_path / "test.npz")
    (kept,) = (home / "frames").iterdir()
    assert (kept.suffix, kept.stat().st_size) == (".rgb", 9 * 64 * 64 * 3)
    blocks = Archive.blocks
    monkeypatch.setattr(Archive, "blocks", lambda *_: pytest.fail("unpacked again"))
    Frames(tmp_path / "test.npz")
    monkeypatch.setattr(Archive, "blocks", blocks)
    kept.write_bytes(b"cut off")
    np.testing.assert_array_equal(Frames(tmp_path / "test.npz").read(8), frames_of(tmp_path / "test.npz")[8, ..., :3])
    MAKE.make_temporal(tmp_path, {"test": 8})
    Frames(tmp_path / "test.npz")
    (other,) = (home / "frames").iterdir()
    assert other != kept


def test_stored_frames_are_read_in_place_and_checked_once(tmp_path: Path, home: Path) -> None:
    MAKE.make_temporal(tmp_path, {"test": 9}, compressed=False)
    path = tmp_path / "test.npz"
    expected = frames_of(path)
    data = Frames(path)
    (mark,) = (home / "frames").iterdir()
    assert (mark.suffix, mark.stat().st_size) == (".checked", 0)
    content = bytearray(path.read_bytes())
    content[content.index(expected[4].tobytes()) + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"test\.npz: imgs cannot be read \(Bad CRC-32"):
        Frames(path)
    path.write_bytes(content[:3000])
    with pytest.raises(DatasetError, match="ends within frame 4"):
        data.read(4)


def test_a_flipped_bit_of_compressed_frames_is_found(tmp_path: Path, home: Path) -> None:
    MAKE.make_temporal(tmp_path, {"test": 9})
    path = tmp_path / "test.npz"
    content = bytearray(path.read_bytes())
    for at in (500, 40_000, 90_000):
        damaged = bytearray(content)
        damaged[at] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"test\.npz: imgs cannot be read"):
            Frames(path)
    assert not list((home / "frames").glob("*.rgb"))


def test_unpacking_takes_no_more_memory_for_more_frames(tmp_path: Path) -> None:
    frames = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None, None], (4000, 64, 64, 3))
    np.savez_compressed(tmp_path / "test.npz", imgs=frames)
    tracemalloc.start()
    found = Frames(tmp_path / "test.npz")
    found.read(3999)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6 < frames.size


def test_a_full_disk_is_said_before_and_while_it_is_written(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MAKE.make_temporal(tmp_path, {"test": 9})
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DatasetError, match=r"no room to unpack the frames.* 0\.00 GB are free; IDENT3D_HOME"):
        Frames(tmp_path / "test.npz")
    monkeypatch.setattr(shutil, "disk_usage", usage)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DatasetError, match="no room to unpack the frames into: No space left"):
        Frames(tmp_path / "test.npz")
    assert sum(path.stat().st_size for path in (home / "frames").iterdir()) == 0
    monkeypatch.undo()
    monkeypatch.setenv("IDENT3D_HOME", str(home))
    assert Frames(tmp_path / "test.npz").count == 9


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "file"))
    MAKE.make_temporal(tmp_path / "a", {"test": 9})
    MAKE.make_temporal(tmp_path / "b", {"test": 9}, compressed=False)
    with pytest.raises(DatasetError, match=r"the frames cannot be unpacked: .*IDENT3D_HOME"):
        Frames(tmp_path / "a" / "test.npz")
    assert Frames(tmp_path / "b" / "test.npz").count == 9


def _open(path: Path, home: str) -> int:
    os.environ["IDENT3D_HOME"] = home
    return int(Frames(path).read(5).sum())


@pytest.mark.slow
def test_processes_may_unpack_the_same_at_once(tmp_path: Path, home: Path) -> None:
    MAKE.make_temporal(tmp_path, {"test": 300})
    with multiprocessing.get_context("fork").Pool(4) as pool:
        sums = pool.starmap(_open, [(tmp_path / "test.npz", str(home))] * 8)
    assert set(sums) == {int(frames_of(tmp_path / "test.npz")[5, ..., :3].sum())}
    assert len(list((home / "frames").iterdir())) == 1


FRAMES = np.zeros((12, 64, 64, 3), np.uint8)
BAD = [
    ({"imgs": None}, "has no array imgs; it has raw_latents, shape_latents, interventions"),
    ({"interventions": None}, "has no array interventions"),
    ({"imgs": FRAMES[..., :2]}, r"imgs is uint8 \(12, 64, 64, 2\), expected \(N, side, side, 3 or more\)"),
    ({"imgs": FRAMES[:, None]}, r"imgs is uint8 \(12, 1, 64, 64, 3\), expected"),
    ({"imgs": FRAMES[:, :32]}, "is 64 x 32 px, expected a square"),
    ({"imgs": FRAMES.astype(np.int32)}, "imgs is int32 .*, expected uint8, or floats from 0 to 1"),
    ({"imgs": FRAMES + np.float32(255)}, "imgs is float32 from 255 to 255, expected 0 to 1, or uint8"),
    ({"imgs": FRAMES + np.float32(np.nan)}, "imgs is float32 from nan to nan"),
    ({"imgs": np.asfortranarray(FRAMES)}, "Fortran order"),
    ({"imgs": np.array([{}])}, "no type of numbers"),
    ({"imgs": FRAMES[:11]}, "imgs has 11 frames, but raw_latents 12 rows"),
    ({"raw_latents": np.zeros((12, 9))}, r"raw_latents: holds float64 \(12, 9\), expected"),
    ({"raw_latents": np.zeros((12, 11))}, "periodic variant"),
    ({"raw_latents": np.full((12, 10), 3.0)}, "raw_latents: sample 0, object_x: 3.0, expected -2 to 2"),
    ({"raw_latents": np.full((12, 10), -0.5)}, "sample 0, object_alpha: -0.5, expected 0 to 6.28319"),
    ({"shape_latents": np.zeros((12, 1))}, r"shape_latents is float64 \(12, 1\), expected \(12, 2\)"),
    ({"shape_latents": np.full((12, 2), 7)}, "shape_latents: sample 0, shape: 7, expected 0 to 6"),
    ({"shape_latents": np.full((12, 2), 0.5)}, "shape: 0.5, expected 0 to 6"),
    ({"interventions": np.zeros((12, 12))}, r"interventions is \(12, 12\), expected \(11, 12\)"),
]


@pytest.mark.parametrize(("changes", "text"), BAD)
def test_arrays_of_frames_that_cannot_be_are_named(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    MAKE.make_temporal(tmp_path, {"test": 12}, **changes)
    with pytest.raises(DatasetError, match=text) as caught:
        TemporalCausal3DIdent(tmp_path, "test")
    assert str(tmp_path / "test.npz") in str(caught.value)


@pytest.mark.parametrize("change", [lambda b: b[:-30], lambda b: b[:100], lambda b: b"text", lambda b: b""])
def test_a_file_that_is_no_npz_is_named(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    MAKE.make_temporal(tmp_path, {"test": 12})
    path = tmp_path / "test.npz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DatasetError, match=re.escape(str(path))):
        TemporalCausal3DIdent(tmp_path, "test")

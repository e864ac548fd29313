"""What a conversion refuses, what it names, and what it leaves out when it is asked to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ident3d import DatasetError, Ident3D, SpecError
from ident3d.conversion import ConvertOptions
from ident3d.conversion.to_shards import Skipped
from ident3d.datasets.published import Causal3DIdent, Multimodal3DIdent, ThreeDIdent
from ident3d.render.dataset import Interrupted
from ident3d.shards.manifest import read_manifest
from ident3d.shards.verify import verify_dataset
from ident3d.shards.writer import ShardWriter

Make = Callable[..., Path]


def picture(source: Path, number: int, split: str = "train") -> Path:
    return source / split / "images" / f"{number:02d}.png"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "tfrecord"}, r"to = 'tfrecord': expected shards, published"),
        ({"format": "jpeg"}, r"format = 'jpeg': expected keep, png, webp"),
        ({"on_error": "ignore"}, r"on_error = 'ignore': expected raise, skip"),
        ({"splits": "train"}, r"splits = 'train': expected names, e\.g\. \('train',\)"),
        ({"splits": ()}, r"splits = \(\): expected names"),
        ({"shard_size": 0}, r"shard_size = 0: expected 1 to 100,000"),
        ({"workers": "all"}, r"workers = all: expected auto, or 1 to 1,024"),
        ({"workers": 0}, r"workers = 0: expected auto, or 1 to 1,024"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ConvertOptions(tmp_path / "a", tmp_path / "b", **options)


@pytest.mark.parametrize("out", [".", "out", ".."])
def test_the_source_is_never_written_into(tmp_path: Path, out: str) -> None:
    with pytest.raises(SpecError, match="expected a folder apart from src"):
        ConvertOptions(tmp_path, tmp_path / out)


def test_a_folder_of_something_else(tmp_path: Path, run: Make) -> None:
    (tmp_path / "holiday").mkdir()
    (tmp_path / "holiday" / "beach.png").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"holiday: none of the layouts that ident3d knows; expected a folder"):
        run(tmp_path / "holiday", tmp_path / "out")
    with pytest.raises(DatasetError, match=r"absent: no such folder; expected a published dataset, or one in shards"):
        run(tmp_path / "absent", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_that_holds_something_else(published: dict[str, Path], tmp_path: Path, run: Make) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DatasetError, match=r"out: holds something else \(notes.txt, \.\.\.\); expected a new or"):
        run(published["3dident"], tmp_path / "out")
    run(published["3dident"], tmp_path / "begun", splits=("train",))
    (tmp_path / "begun" / "test").mkdir()
    with pytest.raises(DatasetError, match=r"begun/test: is there already, and not of this conversion"):
        run(published["3dident"], tmp_path / "begun", splits=("test",))


def test_a_split_that_is_not_there(published: dict[str, Path], tmp_path: Path, run: Make) -> None:
    with pytest.raises(DatasetError, match=r"no split 'val'; it has train, test"):
        run(published["3dident"], tmp_path / "out", splits=("train", "val"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], r"latents.npy: has 20 rows, but raw_latents.npy has 19"),
        (lambda raw: raw[:, :9], r"raw_latents.npy: holds float32 \(20, 9\), expected float32 or float64 \(N, 10\)"),
        (lambda raw: raw * 3, r"raw_latents.npy: sample 0, object_\w+: .*, expected -1 to 1 \(\d+ such values\)"),
        (lambda raw: np.where(np.arange(10) == 7, np.nan, raw), r"sample 0, object_hue: nan, expected -1 to 1"),
    ],
)
def test_arrays_that_are_wrong(threedident: Path, tmp_path: Path, run: Make, change: Any, message: str) -> None:
    path = threedident / "train" / "raw_latents.npy"
    np.save(path, change(np.load(path)).astype(np.float32))
    with pytest.raises(DatasetError, match=message):
        run(threedident, tmp_path / "out")


def test_pictures_that_are_fewer_than_the_rows(threedident: Path, tmp_path: Path, run: Make) -> None:
    picture(threedident, 11).unlink()
    with pytest.raises(DatasetError, match=r"images: 19 pictures, but raw_latents.npy has 20 rows; missing: 11.png"):
        run(threedident, tmp_path / "out")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def resize(path: Path) -> None:
    Image.new("RGB", (16, 12)).save(path)


def prolong(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def recode(path: Path) -> None:
    with Image.open(path) as found:
        found.convert("RGB").save(path, "WEBP", lossless=True)


DAMAGE = [
    (cut, "the picture does not decode"),
    (flip, "the picture does not decode"),
    (resize, r"the picture is 16 x 12 px, expected 16 x 16"),
    (prolong, r"the picture's file goes on past its end"),
    (recode, r"the picture is no PNG, so its bytes cannot be kept; say --format png or webp"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_picture_is_named_and_what_was_done_stays(
    threedident: Path, tmp_path: Path, run: Make, content: Any, damage: Any, message: str
) -> None:
    whole = run(threedident, tmp_path / "whole", shard_size=4)
    before = picture(threedident, 13).read_bytes()
    damage(picture(threedident, 13))
    with pytest.raises(DatasetError, match=rf"train/images/13.png, sample 13: {message}.*; 13 samples are done: "):
        run(threedident, tmp_path / "out", shard_size=4)
    assert len(list((tmp_path / "out" / "train").glob("*.tar"))) == 3
    picture(threedident, 13).write_bytes(before)
    assert content(run(threedident, tmp_path / "out", shard_size=4)) == content(whole)


@pytest.mark.parametrize("damage", [prolong, recode])
def test_encoded_anew_the_format_of_a_picture_does_not_matter(
    threedident: Path, tmp_path: Path, run: Make, damage: Any
) -> None:
    expected = ThreeDIdent(threedident).pixels(13)
    damage(picture(threedident, 13))
    np.testing.assert_array_equal(Ident3D(run(threedident, tmp_path / "out", format="png")).pixels(13), expected)


def test_a_picture_that_is_not_square(threedident: Path, tmp_path: Path, run: Make) -> None:
    for number in range(20):
        resize(picture(threedident, number))
    with pytest.raises(DatasetError, match=r"00.png: is 16 x 12 px, expected a square"):
        run(threedident, tmp_path / "out")


def test_damaged_samples_are_left_out_and_counted(threedident: Path, tmp_path: Path, run: Make) -> None:
    source, left_out = ThreeDIdent(threedident), (0, 5, 6, 19)
    pixels = [source.pixels(i) for i in range(20)]
    for number in left_out:
        cut(picture(threedident, number))
    with pytest.warns(UserWarning, match=r"(?s)out: 4 damaged samples were left out:.*00.png.*05.png.*06.png.*19.png"):
        out = run(threedident, tmp_path / "out", on_error="skip", shard_size=5)
    assert verify_dataset(out) == []
    data, kept = Ident3D(out), [i for i in range(20) if i not in left_out]
    assert data.entry.skipped == left_out
    assert [shard.samples for shard in data.entry.shards] == [5, 5, 5, 1]
    np.testing.assert_array_equal(data.latents, source.latents[kept])
    for i, k in enumerate(kept):
        np.testing.assert_array_equal(data.pixels(i), pixels[k])
    # The arrays that are kept have the rows of what is kept, so that the way back is whole.
    back = ThreeDIdent(run(out, tmp_path / "back", to="published"))
    np.testing.assert_array_equal(back.published_latents, source.published_latents[kept])
    assert read_manifest(out).splits["test"].skipped == ()


def test_left_out_of_a_class_and_of_a_table(make_published: ModuleType, tmp_path: Path, run: Make) -> None:
    causal = make_published.make_causal3dident(tmp_path / "a", ("train",))
    raw = Causal3DIdent(causal).raw_latents
    cut(causal / "trainset" / "images_1" / "00002.png")  # sample 8: class 0 has 6
    with pytest.warns(UserWarning, match="1 damaged sample was left out"):
        back = Causal3DIdent(run(run(causal, tmp_path / "b", on_error="skip"), tmp_path / "c", to="published"))
    np.testing.assert_array_equal(back.raw_latents, np.delete(raw, 8, axis=0))

    multi = make_published.make_multimodal3dident(tmp_path / "d", {"train": 6})
    source = Multimodal3DIdent(multi)
    texts = [source.text(i) for i in (0, 1, 3, 4, 5)]
    cut(multi / "train" / "images" / "2.png")
    with pytest.warns(UserWarning, match="1 damaged sample was left out"):
        text = Multimodal3DIdent(run(run(multi, tmp_path / "e", on_error="skip"), tmp_path / "f", to="published"))
    assert [text.text(i) for i in range(5)] == texts
    np.testing.assert_array_equal(text.raw_latents, np.delete(source.raw_latents, 2, axis=0))


def test_raise_first_and_skip_then_goes_on(threedident: Path, tmp_path: Path, run: Make, content: Any) -> None:
    cut(picture(threedident, 9))
    with pytest.warns(UserWarning, match="1 damaged sample was left out"):
        run(threedident, tmp_path / "whole", on_error="skip", shard_size=4)
    with pytest.raises(DatasetError, match="or leave such samples out with --on-error skip"):
        run(threedident, tmp_path / "out", shard_size=4)
    first = (tmp_path / "out" / "train" / "train-000001.tar").stat().st_mtime_ns
    with pytest.warns(UserWarning, match="1 damaged sample was left out"):
        run(threedident, tmp_path / "out", on_error="skip", shard_size=4)
    assert (tmp_path / "out" / "train" / "train-000001.tar").stat().st_mtime_ns == first
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_skip_first_and_raise_then_says_what_was_left_out(
    threedident: Path, tmp_path: Path, run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(picture(threedident, 9))
    append = ShardWriter.append

    def interrupted(self: ShardWriter, *pictures: bytes, **options: Any) -> None:
        if self.start + self.done == 14:
            raise KeyboardInterrupt
        append(self, *pictures, **options)

    monkeypatch.setattr(ShardWriter, "append", interrupted)
    with pytest.raises(Interrupted, match="15 of 20 samples"):
        run(threedident, tmp_path / "out", on_error="skip")
    monkeypatch.undo()
    with pytest.raises(DatasetError, match=r"an earlier call left damaged samples out \(1\), the first: .*09.png"):
        run(threedident, tmp_path / "out")
    with pytest.warns(UserWarning, match="1 damaged sample was left out"):
        run(threedident, tmp_path / "out", on_error="skip")


def test_every_sample_is_damaged(threedident: Path, tmp_path: Path, run: Make) -> None:
    for number in range(12):
        prolong(picture(threedident, number, "test"))
    with pytest.raises(DatasetError, match=r"every sample of split test is damaged"):
        run(threedident, tmp_path / "out", on_error="skip", shard_size=5)


def test_frames_are_not_left_out(published: dict[str, Path], tmp_path: Path, run: Make, monkeypatch: Any) -> None:
    from ident3d.datasets.published import TemporalCausal3DIdent

    pixels = TemporalCausal3DIdent.pixels

    def damaged(self: Any, index: int, *args: Any, **options: Any) -> Any:
        if index == 7:
            raise DatasetError("frame 7: gone")
        return pixels(self, index, *args, **options)

    monkeypatch.setattr(TemporalCausal3DIdent, "pixels", damaged)
    with pytest.raises(DatasetError, match=r"frame 7: gone; it cannot be left out: its frames are in order of time"):
        run(published["temporal-causal3dident"], tmp_path / "out", on_error="skip")


def test_a_source_that_has_changed_is_refused(threedident: Path, tmp_path: Path, run: Make) -> None:
    shutil.copytree(threedident, tmp_path / "first")
    picture(threedident, 13).write_bytes(b"")
    with pytest.raises(DatasetError, match=r"13.png, sample 13"):
        run(threedident, tmp_path / "out", shard_size=4)
    # Other arrays.
    raw = np.load(threedident / "train" / "raw_latents.npy")
    np.save(threedident / "train" / "raw_latents.npy", raw[::-1])
    with pytest.raises(SpecError, match=r"holds the same split, converted otherwise.*\n  source: has changed since"):
        run(threedident, tmp_path / "out", shard_size=4)
    # The same arrays, other pictures.
    np.save(threedident / "train" / "raw_latents.npy", raw)
    shutil.copyfile(picture(threedident, 1), picture(threedident, 0))
    with pytest.raises(DatasetError, match=r"train-000000.tar: holds another picture than .*00.png, which has changed"):
        run(threedident, tmp_path / "out", shard_size=4)
    # The first shard's first sample as it was, but not the last one's, which is not finished.
    shutil.copyfile(picture(tmp_path / "first", 0), picture(threedident, 0))
    shutil.copyfile(picture(threedident, 1), picture(threedident, 12))
    with pytest.raises(DatasetError, match=r"train-000003.tar.part: holds another picture than .*12.png"):
        run(threedident, tmp_path / "out", shard_size=4)


def test_a_list_of_samples_left_out_that_was_torn(tmp_path: Path) -> None:
    skipped = Skipped(tmp_path)
    for index in (3, 9, 4):
        skipped.add(index, f"sample {index}")
    with open(skipped.path, "ab") as file:
        file.write(b'[12, "sam')
    again = Skipped(tmp_path)
    assert again.indices == (3, 4, 9)
    again.add(5, "sample 5")
    assert Skipped(tmp_path).reasons == {3: "sample 3", 9: "sample 9", 4: "sample 4", 5: "sample 5"}
    assert again.sources(0, 8).tolist() == [0, 1, 2, 6, 7, 8, 10, 11]

"""Whatever is wrong with a dataset is found and named by file and sample."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ident3d.errors import DatasetError
from ident3d.shards.summary import EXTENSIONS, file_sha256
from ident3d.shards.tar import BLOCK, END, Sample, member_bytes, scan_samples
from ident3d.shards.verify import Problem, load_latents, verify_dataset

SHARD = "train/train-000001.tar"  # samples 5 to 9


def samples(data: bytes) -> list[Sample]:
    return list(scan_samples(data, EXTENSIONS))


def rewrite(root: Path, change: Callable[[bytes], bytes], file: str = SHARD) -> None:
    (root / file).write_bytes(change((root / file).read_bytes()))


def flip(at: int, bit: int = 3) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]

    return change


def found(root: Path, *, quick: bool = False) -> set[tuple[str, int | None]]:
    return {(p.file, p.sample) for p in verify_dataset(root, quick=quick)}


@pytest.mark.parametrize("quick", [False, True])
def test_nothing_is_wrong_with_a_good_dataset(fabricated: Path, quick: bool) -> None:
    assert verify_dataset(fabricated, quick=quick) == []


def test_the_scene_that_a_user_made_verifies_too(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    from ident3d.scenes import scene_text

    spec = tmp_path / "mine.toml"
    spec.write_text(scene_text("3dident").replace("range = [-3.0, 3.0] }", "range = [-1, 1], frozen = 0.1 }", 1))
    root = make_dataset(tmp_path / "data", {"train": 3, "val": 2}, scene=spec, resolution=8)
    assert verify_dataset(root) == []


def test_a_missing_shard(damaged: Path) -> None:
    (damaged / SHARD).unlink()
    assert verify_dataset(damaged) == [Problem(SHARD, "missing", "train", 1)]


def test_a_missing_split(damaged: Path) -> None:
    shutil.rmtree(damaged / "test")
    files = ["latents.npy", "index.npy", "test-000000.tar", "test-000001.tar"]
    assert found(damaged) == {(f"test/{name}", None) for name in files}


@pytest.mark.parametrize("quick", [False, True])
def test_a_truncated_shard_names_the_samples_it_lacks(damaged: Path, quick: bool) -> None:
    cut = samples((damaged / SHARD).read_bytes())[2].end + 700
    os.truncate(damaged / SHARD, cut)
    problems = verify_dataset(damaged, quick=quick)
    assert found(damaged, quick=quick) == {(SHARD, None), (SHARD, 8), (SHARD, 9)}
    assert problems[0].detail.startswith(f"truncated: {cut} bytes of ")
    assert {p.shard for p in problems} == {1}


def test_an_emptied_shard(damaged: Path) -> None:
    os.truncate(damaged / SHARD, 0)
    assert found(damaged) == {(SHARD, None), *((SHARD, i) for i in range(5, 10))}


def test_a_shard_that_lost_its_end_marker_or_grew(damaged: Path) -> None:
    rewrite(damaged, lambda d: d[: -len(END)])
    assert found(damaged) == {(SHARD, None)}
    rewrite(damaged, lambda d: d + bytes(4 * BLOCK))
    (problem,) = verify_dataset(damaged)
    assert problem.detail.startswith("longer than written")


def place(data: bytes, part: str) -> int:
    """An offset within sample 7 of the shard."""
    png, npy = (samples(data)[2].members[e] for e in EXTENSIONS)
    return {
        "png name": png.offset - BLOCK + 4,
        "png header": png.offset - BLOCK + 130,
        "picture": png.offset + png.size // 2,
        "picture signature": png.offset + 1,
        "npy name": npy.offset - BLOCK + 12,
        "npy header": npy.offset - BLOCK + 130,
        "npy magic": npy.offset + 2,
        "latents": npy.offset + npy.size - 5,
    }[part]


@pytest.mark.parametrize(
    "part",
    ["png name", "png header", "picture", "picture signature", "npy name", "npy header", "npy magic", "latents"],
)
@pytest.mark.parametrize("quick", [False, True])
def test_a_flipped_bit_in_a_sample_names_the_sample(damaged: Path, part: str, quick: bool) -> None:
    at = place((damaged / SHARD).read_bytes(), part)
    rewrite(damaged, flip(at))
    assert found(damaged, quick=quick) == {(SHARD, None), (SHARD, 7)}


def test_a_flipped_bit_in_the_padding_names_the_file(damaged: Path) -> None:
    data = (damaged / SHARD).read_bytes()
    member = samples(data)[2].members["latents.npy"]
    rewrite(damaged, flip(member.end - 1))
    assert (SHARD, None) in found(damaged)


def test_swapped_samples_name_the_file(damaged: Path) -> None:
    def swap(data: bytes) -> bytes:
        first, second = samples(data)[:2]
        return data[first.end : second.end] + data[: first.end] + data[second.end :]

    rewrite(damaged, swap)
    assert (SHARD, None) in found(damaged)


def renamed(data: bytes, old: int, new: int) -> bytes:
    pieces = []
    for sample in samples(data):
        key = f"{new:09d}" if sample.key == f"{old:09d}" else sample.key
        for extension, m in sample.members.items():
            pieces.append(member_bytes(f"{key}.{extension}", data[m.offset : m.offset + m.size]))
    return b"".join(pieces) + END


def test_a_renumbered_sample_names_the_number_that_is_gone(damaged: Path) -> None:
    rewrite(damaged, lambda d: renamed(d, 7, 70))
    assert found(damaged) == {(SHARD, None), (SHARD, 7)}


def test_a_sample_under_anothers_number_is_found_by_its_latents(damaged: Path) -> None:
    def exchange(data: bytes) -> bytes:
        return renamed(renamed(renamed(data, 7, 70), 8, 7), 70, 8)

    rewrite(damaged, exchange)
    details = {(p.sample, p.detail) for p in verify_dataset(damaged) if p.sample}
    assert details == {(i, "latents differ from the split's latents") for i in (7, 8)}


def test_shards_under_each_others_names(damaged: Path) -> None:
    a, b = damaged / SHARD, damaged / "train/train-000002.tar"
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    expected = {(SHARD, i) for i in (None, *range(5, 10))} | {
        ("train/train-000002.tar", i) for i in (None, *range(10, 15))
    }
    assert found(damaged) == expected


def test_a_left_over_shard(damaged: Path) -> None:
    shutil.copy(damaged / SHARD, damaged / "train" / "train-000009.tar")
    (problem,) = verify_dataset(damaged)
    assert problem.file == "train/train-000009.tar"
    assert problem.detail.startswith("left over")
    assert problem.shard is None


@pytest.mark.parametrize("name", ["latents.npy", "index.npy"])
@pytest.mark.parametrize("quick", [False, True])
def test_a_split_file_that_is_missing_or_altered(damaged: Path, name: str, quick: bool) -> None:
    rewrite(damaged, flip(200), f"train/{name}")
    (problem,) = verify_dataset(damaged, quick=quick)
    assert (problem.file, problem.split) == (f"train/{name}", "train")
    assert problem.detail.startswith("altered")
    (damaged / "train" / name).unlink()
    assert verify_dataset(damaged, quick=quick) == [Problem(f"train/{name}", "missing", "train")]


def test_altered_latents_blame_no_sample(damaged: Path) -> None:
    latents = np.load(damaged / "train" / "latents.npy")
    np.save(damaged / "train" / "latents.npy", latents[::-1])
    assert found(damaged) == {("train/latents.npy", None)}


def test_a_shard_is_still_checked_where_the_latents_are_lost(damaged: Path) -> None:
    (damaged / "train" / "latents.npy").unlink()
    rewrite(damaged, flip(place((damaged / SHARD).read_bytes(), "picture")))
    assert found(damaged) == {("train/latents.npy", None), (SHARD, None), (SHARD, 7)}


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("scene/scene.toml", lambda d: d.replace(b"power = 0.5", b"power = 0.6"), "scene: altered"),
        ("scene/scene.toml", lambda d: d[:200], "scene/scene.toml: altered"),
        ("scene/scene.toml", lambda d: b"\xff" + d, "scene/scene.toml: altered"),
        ("scene/newell-teapot.json", lambda d: d + b" ", "scene: altered"),
    ],
)
def test_an_altered_scene(damaged: Path, file: str, change: Callable[[bytes], bytes], words: str) -> None:
    rewrite(damaged, change, file)
    (problem,) = verify_dataset(damaged)
    assert str(problem).startswith(words)
    assert problem.split == ""


@pytest.mark.parametrize("name", ["scene.toml", "newell-teapot.json"])
def test_a_missing_scene(damaged: Path, name: str) -> None:
    (damaged / "scene" / name).unlink()
    assert verify_dataset(damaged) == [Problem(f"scene/{name}", "missing")]


def test_comments_of_the_scene_may_change(damaged: Path) -> None:
    rewrite(damaged, lambda d: b"# mine\n" + d, "scene/scene.toml")
    assert verify_dataset(damaged) == []


def test_all_that_is_wrong_is_listed_at_once(damaged: Path) -> None:
    (damaged / "train" / "index.npy").unlink()
    (damaged / "test" / "test-000001.tar").unlink()
    rewrite(damaged, flip(place((damaged / SHARD).read_bytes(), "picture")))
    assert found(damaged) == {
        ("train/index.npy", None),
        ("test/test-000001.tar", None),
        (SHARD, None),
        (SHARD, 7),
    }


@pytest.mark.parametrize("quick", [False, True])
def test_a_hundred_random_bit_flips_are_all_found(damaged: Path, quick: bool) -> None:
    files = [p for split in ("train", "test") for p in sorted((damaged / split).iterdir())]
    sizes = np.array([p.stat().st_size for p in files])
    generator = np.random.default_rng(12)
    for _ in range(100):
        path = files[generator.choice(len(files), p=sizes / sizes.sum())]
        whole = path.read_bytes()
        path.write_bytes(flip(int(generator.integers(len(whole))), int(generator.integers(8)))(whole))
        problems = verify_dataset(damaged, quick=quick)
        path.write_bytes(whole)
        assert str(path.relative_to(damaged)) in {p.file for p in problems}
    assert verify_dataset(damaged, quick=quick) == []


def test_past_some_damaged_samples_a_shard_gives_their_number(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ident3d.shards.verify.MOST_SAMPLES", 7)
    for number in (0, 1, 3):
        os.truncate(damaged / f"train/train-00000{number}.tar", 0)
    problems = verify_dataset(damaged)
    assert [(p.shard, p.sample) for p in problems if p.split == "train"] == [
        *((0, i) for i in (None, 0, 1, 2, 3, 4)),
        *((1, i) for i in (None, 5, 6, None)),
        (3, None),
        (3, None),
    ]
    assert [p.detail for p in problems if "more" in p.detail] == [
        "3 more samples are damaged",
        "5 more samples are damaged",
    ]


@pytest.mark.parametrize("name", ["latents.npy", "index.npy"])
@pytest.mark.parametrize("content", [b"no array", None], ids=["text", "of another shape"])
def test_an_array_that_is_none_whatever_its_checksum_is_a_problem(
    damaged: Path, name: str, content: bytes | None
) -> None:
    path = damaged / "train" / name
    digest = file_sha256(path)
    np.save(path, np.zeros((3, 3))) if content is None else path.write_bytes(content)
    rewrite(damaged, lambda d: d.replace(digest.encode(), file_sha256(path).encode()), "dataset.json")
    (problem,) = verify_dataset(damaged)
    assert str(problem).startswith(f"train/{name}: altered: ")


def test_links_to_shards_are_followed(damaged: Path, tmp_path: Path) -> None:
    shutil.move(damaged / SHARD, tmp_path / "elsewhere.tar")
    (damaged / SHARD).symlink_to(tmp_path / "elsewhere.tar")
    assert verify_dataset(damaged) == []
    (tmp_path / "elsewhere.tar").unlink()
    assert verify_dataset(damaged) == [Problem(SHARD, "missing", "train", 1)]
    (damaged / SHARD).unlink()
    (damaged / SHARD).mkdir()
    assert verify_dataset(damaged) == [Problem(SHARD, "missing", "train", 1)]


def test_a_problem_in_words() -> None:
    assert str(Problem("train/x.tar", "missing", "train", 0)) == "train/x.tar: missing"
    assert str(Problem("train/x.tar", "gone", "train", 0, 7)) == "train/x.tar, sample 7: gone"


def test_without_a_manifest_there_is_nothing_to_check_against(damaged: Path) -> None:
    (damaged / "dataset.json").unlink()
    with pytest.raises(DatasetError, match=str(damaged)):
        verify_dataset(damaged)


def test_latents_are_given_only_where_the_checksum_agrees(damaged: Path) -> None:
    from ident3d.shards.manifest import read_manifest

    path, digest = damaged / "train" / "latents.npy", read_manifest(damaged).splits["train"].latents_sha256
    latents = load_latents(path, digest)
    assert latents is not None
    np.testing.assert_array_equal(latents, np.load(io.BytesIO((damaged / "train/latents.npy").read_bytes())))
    rewrite(damaged, flip(300), "train/latents.npy")
    assert load_latents(path, digest) is None
    (damaged / "train/latents.npy").unlink()
    assert load_latents(path, digest) is None


def test_no_bar_unless_asked_and_on_a_terminal(fabricated: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verify_dataset(fabricated)
    verify_dataset(fabricated, quiet=False)
    assert capfd.readouterr() == ("", "")

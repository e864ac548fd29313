"""Indices beside the dataset: built once, read ever after, and never trusted where they are damaged or of others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ident3d import Ident3D, PairSampler
from ident3d.datasets import index_cache, matching
from ident3d.datasets.index_cache import IndexCache
from ident3d.shards.verify import verify_dataset

pytest.importorskip("faiss")

LAW = "normal(scale=0.05)"
Builds = list[str]


def uniform(n: int = 120, dim: int = 4, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((n, dim), np.float32)


def sampler(data: Any, match: str = "hnsw", **options: Any) -> PairSampler:
    return PairSampler(data, LAW, batch_size=16, match=match, **options)


def kept(folder: Path) -> list[str]:
    """The indices in a folder. But for the lock there is nothing else."""
    names = sorted(p.name for p in folder.iterdir())
    indices = [n for n in names if n.endswith(".faiss")]
    assert names == sorted([*indices, "lock"])
    return indices


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    """The indices that were built, one by one."""
    made: Builds = []

    def count(match: str) -> Callable[..., Any]:
        make = getattr(matching, f"_make_{match}")

        def counted(*args: Any) -> Any:
            made.append(match)
            return make(*args)

        return counted

    for match in ("hnsw", "ivf"):
        monkeypatch.setattr(matching, f"_make_{match}", count(match))
    return made


@pytest.mark.parametrize("match", ["hnsw", "ivf"])
def test_the_first_builds_and_every_later_one_reads(tmp_path: Path, builds: Builds, match: str) -> None:
    latents = uniform()
    uncached = sampler(latents, match).batch(0)
    assert builds == [match]
    for _ in range(3):
        again = sampler(latents, match, cache=tmp_path / "not" / "yet" / "made")
        assert [again.batch(0), again.batch(0)] == [uncached, uncached]
    assert builds == [match, match]
    assert len(kept(tmp_path / "not" / "yet" / "made")) == 1


@pytest.mark.parametrize("match", ["hnsw", "ivf"])
def test_an_index_that_was_read_is_searched_as_the_built_one(tmp_path: Path, match: str) -> None:
    options = {"hnsw": {"ef_search": 31}, "ivf": {"probes": 3}}[match]
    built, read = (sampler(uniform(3000), match, cache=tmp_path, match_options=options) for _ in range(2))
    assert [built.batch(k) for k in range(20)] == [read.batch(k) for k in range(20)]
    index: Any = read.nearest()
    assert index.index.hnsw.efSearch == 31 if match == "hnsw" else index.index.nprobe == 3


def test_exact_matching_keeps_nothing(tmp_path: Path, fabricated: Path) -> None:
    sampler(uniform(), "exact", cache=tmp_path / "here").batch(0)
    sampler(Ident3D(fabricated), "exact").batch(0)
    assert not (tmp_path / "here").exists()
    assert not (fabricated / ".pairs").exists()


def test_an_array_has_no_cache_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: Builds) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        sampler(uniform()).batch(0)
    assert builds == ["hnsw", "hnsw"]
    assert list(tmp_path.iterdir()) == []
    sampler(uniform(), cache="named").batch(0)
    assert len(kept(tmp_path / "named")) == 1


def test_a_dataset_keeps_its_indices_beside_it_and_stays_valid(damaged: Path, builds: Builds) -> None:
    whole = damaged
    for split in ("train", "test"):
        for _ in range(2):
            sampler(Ident3D(whole, split)).batch(0)
    assert builds == ["hnsw", "hnsw"]
    names = kept(whole / ".pairs")
    assert [n.split("-")[:2] for n in names] == [["test", "hnsw"], ["train", "hnsw"]]
    assert verify_dataset(whole) == []


def test_a_datasets_cache_may_be_elsewhere(fabricated: Path, tmp_path: Path) -> None:
    sampler(Ident3D(fabricated), cache=tmp_path / "cache").batch(0)
    assert len(kept(tmp_path / "cache")) == 1
    assert not (fabricated / ".pairs").exists()


OTHERS: list[dict[str, Any]] = [
    {},
    {"factors": [1, 2]},
    {"factors": [2, 1]},
    {"weights": [1.0, 1.0, 1.0, 2.0]},
    {"match_options": {"neighbours": 8}},
    {"match_options": {"ef_construction": 50}},
    {"match": "ivf"},
    {"match": "ivf", "match_options": {"lists": 2}},
]


def test_other_settings_make_other_files(tmp_path: Path, builds: Builds) -> None:
    for count, options in enumerate(OTHERS, start=1):
        sampler(uniform(), cache=tmp_path, **options).batch(0)
        assert len(kept(tmp_path)) == count
    assert len(builds) == len(OTHERS)
    for options in OTHERS:
        assert sampler(uniform(), cache=tmp_path, **options).batch(0) == sampler(uniform(), **options).batch(0)
    assert len(builds) == 2 * len(OTHERS)  # those without a cache alone


def test_what_is_drawn_makes_no_other_file(tmp_path: Path, builds: Builds) -> None:
    for law, seed, allow_self in ((LAW, 0, False), ("uniform()", 0, False), (LAW, 1, False), (LAW, 0, True)):
        PairSampler(uniform(), law, batch_size=3, seed=seed, match="hnsw", allow_self=allow_self, cache=tmp_path).batch(
            0
        )
    assert len(kept(tmp_path)) == 1
    assert builds == ["hnsw"]


def test_arrays_keep_their_indices_side_by_side(tmp_path: Path, builds: Builds) -> None:
    # Two arrays in one folder are no versions of one dataset.
    for _ in range(2):
        for seed in (0, 1):
            assert sampler(uniform(seed=seed), cache=tmp_path).batch(0) == sampler(uniform(seed=seed)).batch(0)
    assert len(kept(tmp_path)) == 2
    assert len(builds) == 4 + 2


def test_choices_of_factors_keep_their_indices_side_by_side(damaged: Path, builds: Builds) -> None:
    for factors in [["object_x", "object_y"], ["object_hue", "object_z"]] * 2:
        sampler(Ident3D(damaged, factors=factors)).batch(0)
    assert len(kept(damaged / ".pairs")) == len(builds) == 2


def test_latents_of_another_shape_but_the_same_bytes_are_others(tmp_path: Path) -> None:
    sampler(uniform(120, 4), cache=tmp_path).batch(0)
    other = uniform(120, 4).reshape(240, 2)
    assert IndexCache(tmp_path, "array", uniform(120, 4)).path("hnsw", {}) != IndexCache(tmp_path, "array", other).path(
        "hnsw", {}
    )


def test_a_dataset_whose_latents_changed_is_told_of(damaged: Path) -> None:
    sampler(Ident3D(damaged)).batch(0)
    (stale,) = kept(damaged / ".pairs")
    np.save(damaged / "train" / "latents.npy", uniform(24, 10, seed=5))
    with pytest.warns(UserWarning, match=f"{stale}: belongs to other latents"):
        got = sampler(Ident3D(damaged)).batch(0)
    assert got == sampler(uniform(24, 10, seed=5)).batch(0)
    assert stale not in kept(damaged / ".pairs")


def spoilt(tmp_path: Path, content: Callable[[bytes], bytes]) -> tuple[Path, bytes]:
    """A cache whose file is altered: its path, and the content as it was."""
    sampler(uniform(), cache=tmp_path).batch(0)
    (name,) = kept(tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content(whole))
    return tmp_path / name, whole


def assert_mended(path: Path, whole: bytes, word: str) -> None:
    """A reader warns, naming the file, serves the right pairs, and leaves a good file."""
    expected = sampler(uniform()).batch(0)
    with pytest.warns(UserWarning, match=f"^{re.escape(str(path))}: {word}; built again$") as caught:
        assert sampler(uniform(), cache=path.parent).batch(0) == expected
    assert len(caught) == 1
    assert path.read_bytes() == whole
    assert kept(path.parent) == [path.name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampler(uniform(), cache=path.parent).batch(0) == expected


def header_length(whole: bytes) -> int:
    """Of the two lines before the checksum."""
    return whole.index(b"\n", whole.index(b"\n") + 1) + 1


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "not an index that this ident3d wrote"),
    "text": (lambda _: b"hello\n", "not an index that this ident3d wrote"),
    "a bare FAISS index": (lambda w: w[header_length(w) + 65 :], "not an index that this ident3d wrote"),
    "another format": (lambda w: w.replace(b"index 1\n", b"index 2\n", 1), "not an index that this ident3d wrote"),
    "header alone": (lambda w: w[: header_length(w)], "damaged"),
    "checksum torn": (lambda w: w[: header_length(w) + 30], "damaged"),
    "no payload": (lambda w: w[: header_length(w) + 65], "damaged"),
    "half": (lambda w: w[: len(w) // 2], "damaged"),
    "last byte lost": (lambda w: w[:-1], "damaged"),
    "longer": (lambda w: w + b"\0", "damaged"),
    "header of other options": (
        lambda w: w.replace(b'"ef_search": 64', b'"ef_search": 65', 1),
        "belongs to other latents or settings",
    ),
    "header of other latents": (
        lambda w: re.sub(rb'"latents": "....', b'"latents": "0000', w, count=1),
        "belongs to other latents or settings",
    ),
    "header lost": (lambda w: w[: w.index(b"{")] + w[header_length(w) :], "belongs to other latents or settings"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_or_foreign_file_is_built_again_with_a_warning(tmp_path: Path, kind: str) -> None:
    alter, word = DAMAGE[kind]
    assert_mended(*spoilt(tmp_path, alter), word)


def test_the_file_of_other_settings_under_this_name_is_not_taken(tmp_path: Path) -> None:
    sampler(uniform(), cache=tmp_path / "other", factors=[0, 1]).batch(0)
    (other,) = (tmp_path / "other").glob("*.faiss")
    content = other.read_bytes()
    assert_mended(*spoilt(tmp_path / "this", lambda _: content), "belongs to other latents or settings")


def test_no_flipped_bit_is_overlooked(tmp_path: Path, builds: Builds) -> None:
    sampler(uniform(30), cache=tmp_path).batch(0)
    (path,) = tmp_path.glob("*.faiss")
    whole = path.read_bytes()
    edge = header_length(whole) + 65
    places = [*range(0, edge, 5), *range(edge, len(whole), len(whole) // 50), len(whole) - 1]
    for i, at in enumerate(places):
        altered = bytearray(whole)
        altered[at] ^= 1 << i % 8
        path.write_bytes(altered)
        with pytest.warns(UserWarning, match="; built again$"):
            sampler(uniform(30), cache=tmp_path).batch(0)
        assert path.read_bytes() == whole
    assert len(builds) == 1 + len(places)


def test_a_file_says_what_its_index_is_of(tmp_path: Path) -> None:
    sampler(uniform(), cache=tmp_path, factors=[3, 1], weights=[0.5, 2.0]).batch(0)
    (path,) = tmp_path.glob("*.faiss")
    header = json.loads(path.read_bytes().split(b"\n")[1])
    assert (header["match"], header["shape"]) == ("hnsw", [120, 4])
    assert (header["columns"], header["weights"]) == ([3, 1], [0.5, 2.0])
    assert header["options"] == {"neighbours": 16, "ef_construction": 40, "ef_search": 64}


@pytest.mark.parametrize("where", ["a file in the folder's place", "a file above it"])
def test_where_nothing_can_be_kept_there_is_a_warning_and_it_works(tmp_path: Path, builds: Builds, where: str) -> None:
    (tmp_path / "taken").write_text("mine")
    cache = tmp_path / "taken" if where.startswith("a file in") else tmp_path / "taken" / "below"
    expected = sampler(uniform()).batch(0)
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=re.escape(f"{cache}: the index cannot be kept there (") + ".*; name another folder"
        ):
            assert sampler(uniform(), cache=cache).batch(0) == expected
    assert len(builds) == 3
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.warns(UserWarning, match="the index cannot be kept there"):
            assert sampler(uniform(), cache=tmp_path).batch(0) == sampler(uniform()).batch(0)
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_is_a_warning_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ident3d.files.os.fsync", full)
    with pytest.warns(UserWarning, match=r"the index cannot be kept there \(No space left on device\)"):
        got = sampler(uniform(), cache=tmp_path).batch(0)
    assert got == sampler(uniform()).batch(0)
    assert kept(tmp_path) == []


def test_a_build_that_fails_keeps_nothing_and_is_not_hidden(tmp_path: Path) -> None:
    def failing() -> Any:
        raise RuntimeError("no memory")

    cache = IndexCache(tmp_path, "array", uniform())
    with pytest.raises(RuntimeError, match="no memory"):
        cache.get("hnsw", {}, failing)
    assert kept(tmp_path) == []


SCRIPT = """
import sys, time, warnings
from pathlib import Path
import numpy as np
from ident3d import PairSampler
from ident3d.datasets import matching

warnings.simplefilter("error")
folder, name = Path(sys.argv[1]), sys.argv[2]
make, made = matching._make_hnsw, []

def counted(*args):
    made.append(1)
    time.sleep(0.5)  # long enough for the other to come
    return make(*args)

matching._make_hnsw = counted
latents = np.random.default_rng(0).random((120, 4), np.float32)
sampler = PairSampler(latents, "normal(scale=0.05)", batch_size=16, match="hnsw", cache=folder / "cache")
(folder / name).touch()
while not (folder / "go").exists():
    time.sleep(0.001)
print(len(made), sampler.batch(0), len(made), sep="\\n")
"""


@pytest.mark.slow
def test_two_processes_at_once_build_one_index(tmp_path: Path) -> None:
    names = ["one", "two"]
    children = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), name], stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    while not all((tmp_path / name).exists() or child.poll() for name, child in zip(names, children, strict=True)):
        time.sleep(0.01)
    (tmp_path / "go").touch()
    told = [child.communicate()[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted((before, after) for before, _, after in told) == [("0", "0"), ("0", "1")]
    assert told[0][1] == told[1][1] == str(sampler(uniform()).batch(0))
    assert len(kept(tmp_path / "cache")) == 1


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(index_cache, "write_atomic", lambda path, data: written.append(path))
    sampler(uniform(), cache=tmp_path).batch(0)
    assert [path.suffix for path in written] == [".faiss"]
    assert kept(tmp_path) == []

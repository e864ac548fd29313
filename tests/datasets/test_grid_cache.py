"""Exact indices of many samples: kept beside the dataset, mapped, and built again where they are of others."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ident3d import Categorical, DatasetError, FactorTable, Ident3D, Normal, PairSampler, SpecError, Sphere
from ident3d.datasets import ident3d, index_cache, matching, pairs
from ident3d.datasets.grid_files import write_grid
from ident3d.datasets.index_cache import IndexCache
from ident3d.factors import FACTORS
from ident3d.shards.verify import verify_dataset

LAW = "normal(scale=0.05)"
Builds = list[str]


def uniform(n: int = 120, dim: int = 4, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((n, dim), np.float32)


def sampler(data: Any, **options: Any) -> PairSampler:
    return PairSampler(data, LAW, batch_size=16, **options)


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Builds:
    """The files that were built, one by one; every array has samples enough for one."""
    made: Builds = []
    write = write_grid

    def counted(path: Path, *args: Any) -> None:
        made.append(path.name)
        write(path, *args)

    monkeypatch.setattr(index_cache, "write_grid", counted)
    monkeypatch.setattr(matching, "ON_DISK", 2)
    return made


def test_the_exact_index_of_many_samples_is_built_once_and_then_mapped(tmp_path: Path, grids: Builds) -> None:
    expected = sampler(uniform()).batch(0)
    assert grids == []  # for there is no folder
    for _ in range(3):
        assert sampler(uniform(), cache=tmp_path / "made").batch(0) == expected
    assert len(grids) == 1
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == sorted([*grids, "lock"])


def test_the_exact_index_of_few_samples_is_kept_nowhere(
    tmp_path: Path, grids: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "ON_DISK", 121)
    sampler(uniform(), cache=tmp_path).batch(0)
    assert not grids
    assert not list(tmp_path.iterdir())


def test_grids_of_other_metrics_are_other_files(tmp_path: Path, grids: Builds) -> None:
    choices: list[dict[str, Any]] = [{}, {"factors": [1, 2]}, {"factors": [2, 1]}, {"weights": [1.0, 1.0, 1.0, 2.0]}]
    for options in [*choices, *choices]:
        got = sampler(uniform(), cache=tmp_path, **options).batch(0)
        assert got == sampler(uniform(), **options).batch(0)
    assert len(set(grids)) == len(grids) == len(choices)


def test_the_grid_of_a_mapped_file_is_known_by_the_manifests_checksum(
    damaged: Path, grids: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: Any) -> str:
        raise AssertionError("all latents were hashed")

    monkeypatch.setattr(ident3d, "MAPPED_BYTES", 0)
    monkeypatch.setattr(index_cache, "array_sha256", never)
    for options in ({}, {"factors": ["object_x", "object_hue", "ground_hue"]}):
        for _ in range(2):
            sampler(Ident3D(damaged), **options).batch(0)
    assert len(grids) == 2
    assert verify_dataset(damaged) == []


def test_the_grid_of_latents_that_were_copied_is_known_by_what_they_hold(damaged: Path, grids: Builds) -> None:
    edited, whole = Ident3D(damaged), Ident3D(damaged)
    edited.latents[:] = edited.latents[::-1].copy()
    expected = sampler(edited.latents).batch(0), sampler(whole.latents).batch(0)
    assert expected[0] != expected[1]
    assert sampler(edited).batch(0) == expected[0]
    with pytest.warns(UserWarning, match=f"{grids[0]}: belongs to other latents than are stored now"):
        assert sampler(whole).batch(0) == expected[1]
    assert len(set(grids)) == 2


def test_one_edited_latent_is_no_longer_that_of_the_file(damaged: Path, grids: Builds) -> None:
    """In a data set of more samples no check at some places would find it."""
    data = Ident3D(damaged)
    sampler(data).batch(0)
    data.latents[7, 3] = np.nextafter(data.latents[7, 3], np.float32(0.5))
    with pytest.warns(UserWarning, match="belongs to other latents than are stored now"):
        sampler(data).batch(0)
    assert len(set(grids)) == 2


def test_a_grid_of_a_mapped_file_that_changed_under_the_same_manifest_is_built_again(
    damaged: Path, grids: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ident3d, "MAPPED_BYTES", 0)
    sampler(Ident3D(damaged)).batch(0)
    np.save(damaged / "train" / "latents.npy", uniform(24, 10, seed=5))
    with pytest.warns(UserWarning, match=f"{grids[0]}: belongs to other latents or settings, or is damaged; built aga"):
        got = sampler(Ident3D(damaged)).batch(0)
    assert got == sampler(uniform(24, 10, seed=5)).batch(0)
    assert len(grids) == 2


def test_a_grid_that_a_dataset_has_outgrown_is_removed(tmp_path: Path, grids: Builds) -> None:
    names = ("a", "b", "c", "d")
    for seed, known in ((0, None), (1, None), (2, "checksum")):
        latents = uniform(seed=seed)
        cache = IndexCache(tmp_path, "train", latents, names, known)
        if seed:
            with pytest.warns(UserWarning, match=f"{grids[-1]}: belongs to other latents than are stored now"):
                index = cache.grid({}, latents.__getitem__, 120)
        else:
            index = cache.grid({}, latents.__getitem__, 120)
        assert index is not None
        np.testing.assert_array_equal(index.search(latents)[1], np.arange(120))
    assert [path.name for path in tmp_path.glob("*.grid")] == grids[-1:]


class Classed:
    """Random latents of two classes."""

    def __init__(self, root: Path) -> None:
        self.root, self.split, self.latents = root, "train", uniform(200, 10)
        self.entry = SimpleNamespace(latents_sha256="of all latents, which is no group's")
        classes = np.arange(200)[:, None] % 3 // 2
        self.factors = FactorTable(FACTORS, self.latents, (Categorical("class", ("hare", "teapot")),), classes)


def test_within_groups_each_has_a_grid_of_its_own(tmp_path: Path, grids: Builds) -> None:
    for _ in range(2):
        pairs = PairSampler(Classed(tmp_path), LAW, batch_size=256).batch(0)
        assert all(anchor % 3 // 2 == positive % 3 // 2 for anchor, positive in pairs)
    assert sorted(name.split("-exact")[0] for name in grids) == ["train-class=0", "train-class=1"]


def test_where_a_grid_cannot_be_kept_there_is_a_warning_and_it_works(tmp_path: Path, grids: Builds) -> None:
    (tmp_path / "taken").write_text("mine")
    words = (
        r"taken: the index cannot be kept there \(.*\), so every process builds it in 0\.014 MB of memory; name another"
    )
    with pytest.warns(UserWarning, match=words):  # 120 x (16 x 4 + 52) bytes
        got = sampler(uniform(), cache=tmp_path / "taken").batch(0)
    assert got == sampler(uniform()).batch(0)
    assert grids == []


@pytest.mark.parametrize("cause", ["a file in its place", "no room", "no lock"])
def test_a_grid_too_large_for_every_process_is_refused_where_it_cannot_be_kept(
    tmp_path: Path, grids: Builds, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    cache = tmp_path / "cache"
    if cause == "a file in its place":
        cache.write_text("mine")
        why = "File exists"
    elif cause == "no room":
        usage = SimpleNamespace(free=0)
        monkeypatch.setattr("ident3d.datasets.grid_files.shutil.disk_usage", lambda _: usage)
        why = "it needs 0.0 GB, and 0.0 GB are free"
    else:
        why = "No locks available"

        def refused(fd: int, operation: int) -> None:
            raise OSError(37, why)

        monkeypatch.setattr("ident3d.datasets.index_cache.fcntl.flock", refused)
    monkeypatch.setattr(index_cache, "MANY_SAMPLES", 120)
    words = (
        f"{cache}: the index of 120 samples cannot be kept there ({why}). Its file takes 0.069 MB; without it every "
        "process would need 0.014 MB of memory. Name another folder with that much room with cache=, or make room"
    )
    with pytest.raises(DatasetError, match="^" + re.escape(words)):
        sampler(uniform(), cache=cache).batch(0)
    monkeypatch.setattr(index_cache, "MANY_SAMPLES", 121)
    with pytest.warns(UserWarning, match=re.escape(f"({why}), so every process builds it in")):
        assert sampler(uniform(), cache=cache).batch(0) == sampler(uniform()).batch(0)


def test_what_a_dataset_has_outgrown_makes_room_first(
    tmp_path: Path, grids: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(folder: Path) -> Any:
        taken = sum(path.stat().st_size for path in folder.iterdir())
        return SimpleNamespace(free=100_000 - taken)  # room for one of 68 kB

    monkeypatch.setattr("ident3d.datasets.grid_files.shutil.disk_usage", free)
    for seed in range(2):
        cache = IndexCache(tmp_path, "train", uniform(seed=seed), ("a", "b", "c", "d"))
        if seed:
            # Left by a build of the outgrown one, which was killed long ago on another host.
            part = tmp_path / f".{grids[0]}.elsewhere.77.part"
            part.write_bytes(bytes(50_000))
            os.utime(part, (0, 0))
            with pytest.warns(UserWarning, match="belongs to other latents than are stored now"):
                assert cache.grid({}, uniform(seed=seed).__getitem__, 120) is not None
        else:
            assert cache.grid({}, uniform(seed=seed).__getitem__, 120) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([grids[1], "lock"])


def mapped(path: Path, latents: NDArray[np.float32]) -> NDArray[np.float32]:
    np.save(path, latents)
    found: NDArray[np.float32] = np.load(path, mmap_mode="r")
    return found


def test_mapped_latents_stay_mapped(tmp_path: Path, grids: Builds) -> None:
    latents = mapped(tmp_path / "latents.npy", uniform())
    expected = sampler(uniform())
    for cache in (None, tmp_path / "cache"):
        got = sampler(latents, cache=cache)
        assert np.shares_memory(got.latents, latents)
        assert type(got.latents) is np.ndarray
        assert [got.batch(k) for k in range(20)] == [expected.batch(k) for k in range(20)]
    assert len(grids) == 1


def test_only_columns_as_they_are_cost_no_copy() -> None:
    latents = uniform()
    latents.setflags(write=False)
    plain = matching.Metric.of(4, None, None, None)
    assert np.shares_memory(plain.coordinates(latents), latents)
    others: list[dict[str, Any]] = [
        {"factors": [0, 1, 2]},
        {"factors": [1, 0, 2, 3]},
        {"weights": [1.0, 1.0, 1.0, 4.0]},
    ]
    for options in others:
        metric = matching.Metric.of(4, None, options.get("factors"), options.get("weights"))
        made = metric.coordinates(latents)
        np.testing.assert_array_equal(made, latents[:, metric.columns] * np.sqrt(np.array(metric.weights, np.float32)))
        assert not np.shares_memory(made, latents)


@pytest.mark.parametrize("value", [np.nan, -0.1, 1.1, np.inf])
@pytest.mark.parametrize("row", [3, 64, 70, 128, 191, 199])
def test_latents_are_checked_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int, value: float
) -> None:
    monkeypatch.setattr(pairs, "PIECE", 64)
    monkeypatch.setattr(pairs, "FOLD", 4)
    latents = uniform(199 + 1)
    assert sampler(latents).batch(0)
    latents[row, 2] = value
    where = f"counted from row {row // 64 * 64}" if row >= 64 else ""
    with pytest.raises(SpecError, match=rf"latents outside .*: row {row % 64} is \(.*\).*{where}$"):
        sampler(mapped(tmp_path / "latents.npy", latents))


def test_points_of_a_sphere_are_checked_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "PIECE", 64)
    latents = uniform(200, 3) - np.float32(0.5)
    latents /= np.linalg.norm(latents, axis=1, keepdims=True)
    law = Normal(Sphere(3), 0.1)
    assert PairSampler(latents, law, batch_size=4).batch(0)
    latents[150] *= 0.5  # within the extremes of the others
    with pytest.raises(SpecError, match=r"row 22 is \(.*\), counted from row 128$"):
        PairSampler(latents, law, batch_size=4)


def test_of_many_samples_more_pairs_are_matched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [sampler(uniform(), batches=100).batch(k) for k in range(12)]
    monkeypatch.setattr(pairs, "QUERIES", 32)
    monkeypatch.setattr(pairs, "MANY_QUERIES", 80)
    asked: dict[int, list[int]] = {}
    for limit in (120, 121):
        monkeypatch.setattr(pairs, "MANY_SAMPLES", limit)
        made, asked[limit] = sampler(uniform(), batches=100), []
        search = made.nearest()

        def counted(queries: Any, exclude: Any, search: Any = search, sizes: list[int] = asked[limit]) -> Any:
            sizes.append(len(queries))
            return search(queries, exclude)

        monkeypatch.setattr(made, "_nearest", counted)
        assert [made.batch(k) for k in range(12)] == expected
    assert asked == {120: [16, 80, 80, 80], 121: [16, 32, 32, 32, 32, 32, 32]}

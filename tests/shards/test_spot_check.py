"""Checking by sampling: what is cheap of all, some shards in full, and how sure one may be."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from fractions import Fraction
from math import comb
from pathlib import Path

import numpy as np
import pytest

from ident3d.cli import main
from ident3d.errors import DatasetError, SpecError
from ident3d.shards.manifest import read_manifest
from ident3d.shards.spot_check import SampleReport, chosen_shards, verify_sample
from ident3d.shards.verify import Problem, verify_dataset

SHARDS = 7
"""Of `fabricated`: 5 of train, 2 of test."""

NAMES = [*(f"train/train-00000{k}.tar" for k in range(5)), *(f"test/test-00000{k}.tar" for k in range(2))]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def seed_that_chooses(shard: int, count: int = 1, total: int = SHARDS) -> int:
    return next(seed for seed in range(1000) if shard in chosen_shards(total, count, seed))


def put_checksum(root: Path, name: str, old: str) -> None:
    """Have the manifest give a file the checksum that it has."""
    new = hashlib.sha256((root / name).read_bytes()).hexdigest()
    path = root / "dataset.json"
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("count", [1, 3, 7, 1000])
@pytest.mark.parametrize("quick", [False, True])
def test_nothing_is_wrong_with_a_good_dataset(fabricated: Path, count: int, quick: bool) -> None:
    report = verify_sample(fabricated, count, quick=quick)
    assert report.problems == []
    assert (report.shards, report.absent, report.chosen, report.damaged) == (SHARDS, 0, min(count, SHARDS), 0)


def test_nor_with_one_of_pairs(fabricated_pairs: Path) -> None:
    assert verify_sample(fabricated_pairs, 100).problems == []


@pytest.mark.parametrize("shard", range(SHARDS))
def test_damage_is_found_where_it_is_looked_for(damaged: Path, shard: int) -> None:
    flip(damaged / NAMES[shard], 700)
    report = verify_sample(damaged, 1, seed_that_chooses(shard))
    assert report.problems == [p for p in verify_dataset(damaged) if p.file == NAMES[shard]]
    assert {p.sample for p in report.problems} == {None, 5 * (shard % 5)}
    assert report.damaged == 1
    other = verify_sample(damaged, 1, seed_that_chooses((shard + 1) % SHARDS))
    assert (other.problems, other.damaged) == ([], 0)


def test_every_shard_is_looked_for_by_name_and_size(damaged: Path) -> None:
    (damaged / NAMES[0]).unlink()
    os.truncate(damaged / NAMES[2], 1000)
    with open(damaged / NAMES[6], "ab") as file:
        file.write(b"x")
    shutil.copy(damaged / NAMES[1], damaged / "train" / "train-000009.tar")
    report = verify_sample(damaged, 1, seed_that_chooses(3))
    sizes = [(damaged / name).stat().st_size for name in (NAMES[2], NAMES[6])]
    assert [str(p) for p in report.problems] == [
        "train/train-000009.tar: left over: the manifest names no such shard",
        f"{NAMES[0]}: missing",
        f"{NAMES[2]}: truncated: 1000 bytes of {read_manifest(damaged).splits['train'].shards[2].bytes}",
        f"{NAMES[6]}: longer than written: {sizes[1]} bytes of {sizes[1] - 1}",
    ]
    assert (report.absent, report.chosen, report.damaged) == (3, 1, 0)


def test_a_chosen_shard_of_a_wrong_size_is_told_once(damaged: Path) -> None:
    os.truncate(damaged / NAMES[2], 1000)
    report = verify_sample(damaged, SHARDS)
    assert report.problems == verify_dataset(damaged)
    assert (report.absent, report.chosen, report.damaged) == (1, 6, 0)


@pytest.mark.parametrize("name", ["latents.npy", "index.npy"])
@pytest.mark.parametrize("quick", [False, True])
def test_rows_that_are_altered_are_found_in_the_shards_that_are_read(damaged: Path, name: str, quick: bool) -> None:
    path = damaged / "train" / name
    array = np.load(path)
    array[12] += 1
    np.save(path, array)
    expected = Problem(f"train/{name}", "altered: rows 10 to 14 differ from what train-000002.tar holds", "train")
    report = verify_sample(damaged, 1, seed_that_chooses(2), quick=quick)
    assert (report.problems, report.damaged) == ([expected], 0)
    # Its checksum, which would tell, is not taken.
    assert verify_sample(damaged, 1, seed_that_chooses(3), quick=quick).problems == []


def test_rows_of_positives_are_compared_too(fabricated_pairs: Path, tmp_path: Path) -> None:
    root = shutil.copytree(fabricated_pairs, tmp_path / "data")
    array = np.load(root / "train" / "pair.latents.npy")
    array[-1, 3] = 0.5
    np.save(root / "train" / "pair.latents.npy", array)
    assert [str(p) for p in verify_sample(root, 100).problems] == [
        "train/pair.latents.npy: altered: rows 20 to 23 differ from what train-000004.tar holds"
    ]


@pytest.mark.parametrize("name", ["latents.npy", "index.npy"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.unlink(), "missing"),
        (lambda p: p.write_bytes(b"text"), "altered: not a .npy file"),
        (lambda p: os.truncate(p, p.stat().st_size - 1), "altered: not a .npy file"),
        (lambda p: np.save(p, np.zeros((24, 3))), r"altered: holds float64 (24, 3), expected"),
    ],
)
def test_arrays_are_looked_at(damaged: Path, name: str, damage: Callable[[Path], object], words: str) -> None:
    damage(damaged / "train" / name)
    (problem,) = verify_sample(damaged, 1).problems
    assert str(problem).startswith(f"train/{name}: {words}")


def test_the_scene_and_the_manifest_are_checked(damaged: Path) -> None:
    (damaged / "scene" / "scene.toml").unlink()
    assert [str(p) for p in verify_sample(damaged, 1).problems] == ["scene/scene.toml: missing"]
    (damaged / "dataset.json").write_text("{}")
    with pytest.raises(DatasetError, match="not a manifest"):
        verify_sample(damaged, 1)


def test_pictures_are_decoded_unless_quick(damaged: Path) -> None:
    # Damaged before the manifest was written: the checksum is right, the picture is not.
    path = damaged / NAMES[4]
    old = read_manifest(damaged).splits["train"].shards[4].sha256
    flip(path, 700)
    put_checksum(damaged, NAMES[4], old)
    (problem,) = verify_sample(damaged, 1, seed_that_chooses(4)).problems
    assert (problem.file, problem.sample) == (NAMES[4], 20)
    assert verify_sample(damaged, 1, seed_that_chooses(4), quick=True).problems == []


@pytest.mark.parametrize(("count", "seed"), [(0, 0), (-1, 0), (1, -1)])
def test_counts_and_seeds_that_cannot_be_are_refused(fabricated: Path, count: int, seed: int) -> None:
    with pytest.raises(SpecError, match=r"(sample|seed) = (0|-1): expected a whole number of at least [01]"):
        verify_sample(fabricated, count, seed)


@pytest.mark.parametrize(("total", "count"), [(1, 1), (10, 3), (10, 10), (10, 30), (100_000, 500), (0, 4)])
def test_a_choice_is_of_different_shards_and_grows(total: int, count: int) -> None:
    chosen = chosen_shards(total, count, 5)
    assert chosen == sorted({*chosen})
    assert len(chosen) == min(total, count)
    assert all(0 <= k < total for k in chosen)
    assert {*chosen} <= {*chosen_shards(total, count + 2, 5)}
    assert chosen == chosen_shards(total, count, 5)


def test_every_shard_is_chosen_as_often_as_any(request: pytest.FixtureRequest) -> None:
    seen = np.zeros(20)
    for seed in range(4000):
        seen[chosen_shards(20, 5, seed)] += 1
    # Binomial, 4000 draws with p = 1/4: a deviation of 5 standard deviations of any of 20 is one in 90,000.
    assert np.abs(seen - 1000).max() < 5 * np.sqrt(4000 * 3 / 16)


def missed(shards: int, chosen: int, damaged: int, bad: int) -> Fraction:
    """The chance of no more than `damaged` of `bad` among the chosen, by counting choices."""
    ways = sum(comb(bad, k) * comb(shards - bad, chosen - k) for k in range(damaged + 1) if chosen >= k)
    return Fraction(ways, comb(shards, chosen))


@pytest.mark.parametrize(
    ("shards", "chosen", "damaged"),
    [(7, 3, 0), (7, 3, 1), (10, 9, 0), (10, 9, 1), (100, 1, 1), (100, 20, 0), (100, 20, 6), (2000, 300, 2), (9, 9, 4)],
)
def test_the_bound_is_the_least_number_that_the_choice_refutes(shards: int, chosen: int, damaged: int) -> None:
    bound = SampleReport([], shards + 5, 5, chosen, damaged, 0, False, ()).fewer_than
    assert damaged < bound <= shards + 1
    if bound <= shards:
        assert missed(shards, chosen, damaged, bound) < Fraction(5, 100)
    assert missed(shards, chosen, damaged, bound - 1) >= Fraction(5, 100)


def test_the_bound_is_not_above_that_for_draws_with_replacement() -> None:
    bound = SampleReport([], 100_000, 0, 1000, 0, 0, False, ()).fewer_than
    assert bound == 298
    assert bound <= 100_000 * (1 - 0.05 ** (1 / 1000)) < 300


def test_a_report_says_how_far_it_goes(fabricated: Path) -> None:
    report = verify_sample(fabricated, 3, 8)
    assert report.lines() == [
        "checked: scene; names and sizes of all 7 shards; of 3 shards, chosen by seed 8, every byte (sha256), every "
        "sample, and their rows of the index and the latents",
        "not checked: what 4 shards hold; sha256 of train/latents.npy, train/index.npy, test/latents.npy, "
        "test/index.npy",
        "with 95% confidence fewer than 4 of 7 shards (57%) are damaged (exact, for a choice without replacement)",
    ]
    assert verify_sample(fabricated, 7).lines()[1].startswith("not checked: sha256 of train/latents.npy")
    assert len(verify_sample(fabricated, 7).lines()) == 2
    assert "every sample" not in verify_sample(fabricated, 3, quick=True).lines()[0]


def test_a_report_of_damage_says_how_much_there_may_be() -> None:
    found = SampleReport([], 1000, 10, 100, 2, 0, False, ("train/latents.npy",)).lines()[2]
    assert found.startswith("2 of the 100 are damaged; with 95% confidence fewer than 59 of 990 shards (6%)")


def test_where_all_shards_are_lost_no_bound_is_given(damaged: Path) -> None:
    for name in NAMES:
        (damaged / name).unlink()
    report = verify_sample(damaged, 2)
    assert {p.file for p in report.problems} == {*NAMES}
    assert len(report.lines()) == 2


def test_the_command(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(damaged), *options])
        return int(ended.value.code or 0), capsys.readouterr().out

    status, said = run("--sample", "2", "--seed", "1")
    assert status == 0
    assert said.splitlines() == [
        *verify_sample(damaged, 2, 1).lines(),
        f"{damaged}: nothing wrong in what was checked",
    ]
    flip(damaged / NAMES[4], 700)
    status, said = run("--sample", "1", "--seed", str(seed_that_chooses(4)))
    assert status == 1
    assert f"{NAMES[4]}, sample 20: picture does not decode" in said
    assert said.endswith(f"{damaged}: 2 problems\n")
    assert run("--sample", "1", "--seed", str(seed_that_chooses(0)))[0] == 0


@pytest.mark.render
def test_what_a_sample_finds_is_repaired(rendered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = shutil.copytree(rendered, tmp_path / "data")
    shard, latents = root / "train" / "train-000001.tar", root / "train" / "latents.npy"
    flip(shard, 800)
    flip(latents, 150)
    seed = next(s for s in range(1000) if chosen_shards(4, 2, s) == [0, 1])
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(root), "--sample", "2", "--seed", str(seed), "--repair", "--quiet"])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "train/train-000001.tar: 1 of 4 samples rendered again" in said
    assert "train/latents.npy: written again" in said
    assert "still" not in said
    for name in ("train-000001.tar", "latents.npy"):
        assert (root / "train" / name).read_bytes() == (rendered / "train" / name).read_bytes()
    assert json.loads((root / "dataset.json").read_text()) == json.loads((rendered / "dataset.json").read_text())

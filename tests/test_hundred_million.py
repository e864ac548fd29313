"""The simulation of a very large dataset, small: what it makes is a dataset, and it measures what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ident3d import Ident3D
from ident3d.shards.spot_check import chosen_shards, verify_sample
from ident3d.shards.verify import verify_dataset

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "hundred_million.py"

pytestmark = pytest.mark.slow


def run(folder: Path, *options: str) -> str:
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_small_simulation(tmp_path: Path) -> None:
    options = ("--samples", "400", "--shards", "40", "--filled", "10", "--sample", "6", "--reads", "20", "--seed", "3")
    said = run(tmp_path / "data", *options)
    assert "10 of 40 shards hold their samples, the others are holes" in said
    assert "opening 400 samples in 40 shards" in said
    assert "verify --sample 6 --seed 3" in said
    assert "nothing wrong in what was checked" in said
    assert "index rebuilt off the headers of 10 shards" in said
    data, filled = Ident3D(tmp_path / "data"), chosen_shards(40, 10, 3)
    assert len(data) == 400
    for shard in filled:
        assert (data[10 * shard + 9][0] == 128).all()
    assert verify_sample(tmp_path / "data", 10, 3).problems == []
    # The empty ones are damaged, as is said; the arrays are whole.
    problems = verify_dataset(tmp_path / "data", quick=True)
    assert {p.shard for p in problems} == {*range(40)} - {*filled}
    again = run(tmp_path / "data", *options)
    assert "made" not in again
    assert "opening 400 samples in 40 shards" in again


def test_a_size_that_is_opened_alone(tmp_path: Path) -> None:
    said = run(tmp_path / "data", "--samples", str(10**9), "--shards", "1000", "--opening-only")
    assert re.search(r"manifest: [\d.]+ MB, 1,000 shards", said)
    assert "opening 1,000,000,000 samples in 1,000 shards" in said
    assert "verify" not in said
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert sum(512 * path.stat().st_blocks for path in files) < 10_000_000

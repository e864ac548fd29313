"""Render plans: limits, the cut into shards, and what differs between two."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ident3d.errors import SpecError
from ident3d.render.plan import RenderPlan, ShardJob, auto_shard_size
from ident3d.render.quality import quality
from ident3d.schema import from_plain, to_plain

PLAN = RenderPlan(
    scene="3dident",
    scene_digest="0" * 64,
    split="train",
    samples=23,
    seed=0,
    latents="drawn",
    resolution=64,
    quality="draft",
    settings=quality("draft"),
    shard_size=5,
    device="CPU",
    blender="4.5.0",
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "samples = 0: expected 1 to 1,000,000,000"),
        ({"samples": -3}, "samples = -3"),
        ({"samples": 10**9 + 1}, "samples = 1000000001"),
        ({"resolution": 0}, "resolution = 0: expected 8 to 4,096"),
        ({"resolution": 7}, "resolution = 7"),
        ({"resolution": 4097}, "resolution = 4097"),
        ({"resolution": -64}, "resolution = -64"),
        ({"shard_size": 0}, "shard size = 0: expected 1 to 100,000"),
        ({"shard_size": -1}, "shard size = -1"),
        ({"shard_size": 100_001}, "shard size = 100001"),
        ({"seed": -1}, "seed = -1: expected 0 or more"),
        ({"split": "training"}, "split 'training': expected one of train, val, test"),
        ({"split": ""}, "split ''"),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        dataclasses.replace(PLAN, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 1},
        {"samples": 10**9, "shard_size": 1},
        {"resolution": 8},
        {"resolution": 4096},
        {"shard_size": 100_000},
        {"seed": 2**80},
        {"split": "val"},
    ],
)
def test_the_limits_themselves_are_allowed(change: dict[str, Any]) -> None:
    dataclasses.replace(PLAN, **change)


@pytest.mark.parametrize(("samples", "shard_size"), [(1, 1), (23, 5), (25, 5), (3, 100), (100, 7), (7, 1)])
def test_shards_cut_the_samples_without_gap_or_overlap(samples: int, shard_size: int) -> None:
    plan = dataclasses.replace(PLAN, samples=samples, shard_size=shard_size)
    bounds = [plan.bounds(k) for k in range(plan.shards)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(samples))
    assert all(stop - start == shard_size for start, stop in bounds[:-1])
    assert bounds[-1][0] < bounds[-1][1]


@pytest.mark.parametrize(
    ("samples", "size"), [(1, 4), (64, 4), (65, 5), (256, 16), (16_000, 1000), (250_000, 1000), (10**9, 1000)]
)
def test_small_splits_get_small_shards(samples: int, size: int) -> None:
    assert auto_shard_size(samples) == size


def test_equal_plans_have_no_differences() -> None:
    assert PLAN.differences(dataclasses.replace(PLAN)) == []


def test_every_difference_is_spelled_out() -> None:
    other = dataclasses.replace(PLAN, seed=1, resolution=224, quality="paper", settings=quality("paper"))
    lines = PLAN.differences(other)
    assert "seed: 0 there, 1 asked" in lines
    assert "resolution: 64 there, 224 asked" in lines
    assert "quality: draft there, paper asked" in lines
    assert [line.split(":")[0] for line in lines] == ["seed", "resolution", "quality", "settings"]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(RenderPlan)])
def test_no_field_is_forgotten_when_plans_are_compared(field: str) -> None:
    other: dict[str, Any] = {"split": "test", "settings": quality("paper")}
    now = getattr(PLAN, field)
    value = other.get(field, now + 3 if isinstance(now, int) else f"{now}x")
    (line,) = PLAN.differences(dataclasses.replace(PLAN, **{field: value}))
    assert line.startswith(f"{field}: ")


def test_differences_can_be_limited_to_some_fields() -> None:
    other = dataclasses.replace(PLAN, seed=1, resolution=224)
    assert PLAN.differences(other, ("resolution", "device")) == ["resolution: 64 there, 224 asked"]


def test_a_plan_survives_json() -> None:
    assert from_plain(RenderPlan, json.loads(json.dumps(to_plain(PLAN)))) == PLAN


def test_a_job_says_all_that_a_worker_needs() -> None:
    job = ShardJob.of(PLAN, 4, Path("/data/train"), Path("/data/.render/train"))
    assert (job.shard, job.start, job.stop) == (4, 20, 23)
    assert job.path == "/data/train/train-000004.tar"
    assert job.sidecar == "/data/.render/train/train-000004.json"
    assert job.latents == "/data/.render/train/latents.npy"
    assert (job.split, job.seed, job.salvage) == ("train", 0, "")
    assert ShardJob(**json.loads(json.dumps(dataclasses.asdict(job)))) == job

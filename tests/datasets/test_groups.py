"""Pairs within categorical factors: the nearest sample of the same class, by brute force."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ident3d import Categorical, FactorTable, SpecError, pair_report
from ident3d.datasets.groups import Groups, groups_of
from ident3d.datasets.pairs import PairSampler
from ident3d.datasets.serving import Array
from ident3d.factors import FACTORS

KINDS = (Categorical("class", ("teapot", "hare", "dragon")), Categorical("material", ("rubber", "metal")))


class Classed:
    """Random latents with a class and a material; item i is a picture of zeros."""

    root = Path("nowhere")
    split = "train"

    def __init__(self, samples: int = 300, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.latents: Array = generator.random((samples, 10), np.float32)
        self.categories: Array = np.stack([generator.integers(0, 3, samples), generator.integers(0, 2, samples)], 1)
        self.derived = None

    @property
    def factors(self) -> FactorTable:
        return FactorTable(FACTORS, self.latents, KINDS, self.categories)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.zeros(3, 2, 2, dtype=torch.uint8), torch.from_numpy(self.latents[index].copy())


def sampler(data: Any, **options: Any) -> PairSampler:
    options.setdefault("cache", None)
    data.derived = options.pop("derived", "unused")
    return PairSampler(data, "normal(scale=0.2)", batch_size=128, seed=3, **options)


def brute_force(data: Classed, made: PairSampler, allowed: Array) -> Array:
    """The nearest allowed sample to every z~; `allowed` is (anchors, samples)."""
    matches = made.match_batches([0, 1])
    square = ((matches.wanted[:, None, :].astype(np.float64) - data.latents[None]) ** 2).sum(-1)
    square[~allowed[matches.anchors]] = np.inf
    if not made.allow_self:
        square[np.arange(len(square)), matches.anchors] = np.inf
    np.testing.assert_array_equal(matches.positives, square.argmin(axis=1))
    np.testing.assert_allclose(matches.distance, np.sqrt(square.min(axis=1)), rtol=1e-3, atol=1e-6)
    return np.asarray(matches.positives)


@pytest.mark.parametrize("match", ["exact", "hnsw"])
@pytest.mark.parametrize("allow_self", [False, True])
def test_the_match_is_the_nearest_of_the_same_group(match: str, allow_self: bool, tmp_path: Path) -> None:
    data = Classed()
    made = sampler(data, match=match, allow_self=allow_self, derived=tmp_path)
    same = (data.categories[:, None] == data.categories[None]).all(-1)
    brute_force(data, made, same)


def test_within_chooses_the_factors_that_are_shared(tmp_path: Path) -> None:
    data = Classed()
    c = data.categories
    brute_force(data, sampler(data, within=["class"]), c[:, None, 0] == c[None, :, 0])
    positives = brute_force(data, sampler(data, within=()), np.ones((300, 300), bool))
    assert (c[positives] != c[sampler(data, within=()).match_batches([0, 1]).anchors]).any()


def test_a_batch_is_the_same_whatever_was_asked_for_before() -> None:
    data = Classed()
    made, other = sampler(data), sampler(data)
    later = [made.batch(k) for k in (5, 6, 7)]
    assert [other.batch(k) for k in (7, 5, 6)] == [later[2], later[0], later[1]]
    assert pickle.loads(pickle.dumps(made)).batch(6) == later[1]


def test_the_kind_tells_pairs_within_from_pairs_across() -> None:
    data = Classed()
    within, across = sampler(data), sampler(data, within=())
    assert within.kind.endswith(" within class, material")
    assert "within" not in across.kind
    with pytest.raises(SpecError, match="state of kind"):
        across.load_state_dict(within.state_dict())


@pytest.mark.parametrize(
    ("within", "message"),
    [("class", "expected a list of names"), (["shape"], "'shape' is no categorical factor; there are class, material")],
)
def test_what_is_no_categorical_factor_is_refused(within: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        sampler(Classed(), within=within)


def test_an_array_has_no_categorical_factors() -> None:
    latents = np.random.default_rng(0).random((20, 3), np.float32)
    assert groups_of(latents, None) is None
    with pytest.raises(SpecError, match="there are none"):
        groups_of(latents, ["class"])


def test_one_class_alone_makes_no_groups() -> None:
    data = Classed()
    data.categories[:] = 1
    assert sampler(data).groups is None


def test_a_sample_without_a_partner_is_named() -> None:
    data = Classed()
    data.categories[:, 1] = 0
    data.categories[:, 0] = 0
    data.categories[7, 0] = 2
    with pytest.raises(SpecError, match="only one sample has class = 2, material = 0: pairs within"):
        sampler(data)
    assert sampler(data, allow_self=True).groups is not None
    assert sampler(data, within=()).groups is None


def test_groups_partition_the_samples() -> None:
    values = np.random.default_rng(1).integers(0, 4, (200, 2))
    groups = Groups(("a", "b"), values)
    rows = [groups.rows(g) for g in range(groups.count)]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(200))
    for mine in rows:
        assert len(np.unique(values[mine], axis=0)) == 1
    assert groups.count == len(np.unique(values, axis=0))


def test_a_report_counts_recall_within_groups(tmp_path: Path) -> None:
    data = Classed(200)
    data.derived = tmp_path  # type: ignore[assignment]
    report = pair_report(data, "normal(scale=0.1)", pairs=1000)
    assert report.recall == 1.0

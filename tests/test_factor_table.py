"""The named table of a dataset's factors: physical values, labels, and what it shares with `Factors`."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from ident3d import FACTORS, Categorical, Factors, FactorTable, Ident3D, SpecError

KINDS = (Categorical("class", ("teapot", "hare"), "the object"), Categorical("size", ("small", "big", "huge")))


def table(samples: int = 50) -> FactorTable:
    generator = np.random.default_rng(0)
    latents = generator.random((samples, 10), np.float32)
    categories = np.stack([generator.integers(0, 2, samples), generator.integers(0, 3, samples)], axis=1)
    return FactorTable(FACTORS, latents, KINDS, categories)


def test_a_name_gives_values_in_the_factors_unit() -> None:
    made = table()
    for factor in FACTORS:
        expected = [factor.value(float(u)) for u in made.latents[:, factor.column]]
        np.testing.assert_allclose(made[factor.name], expected, rtol=1e-12)
    np.testing.assert_array_equal(made["size"], made.categories[:, 1])
    assert made.labels("class").tolist() == [KINDS[0].labels[k] for k in made.categories[:, 0]]


def test_a_selection_keeps_columns_and_values_together() -> None:
    made = table()
    chosen = FACTORS.select(["object_hue", "object_x"])
    part = FactorTable(chosen, made.latents[:, chosen.columns], KINDS, made.categories)
    np.testing.assert_array_equal(part["object_hue"], made["object_hue"])
    np.testing.assert_array_equal(part["object_x"], made["object_x"])


def test_it_is_the_table_of_the_continuous_factors() -> None:
    made = table()
    assert isinstance(made, Factors)
    assert (made.names, len(made)) == (FACTORS.names, 10)
    assert made[0] == FACTORS[0]
    assert made[-1].name == "ground_hue"
    assert made[2:4] == FACTORS[2:4]
    assert tuple(made) == tuple(FACTORS)
    assert made.all_names == (*FACTORS.names, "class", "size")
    assert list(made.to_dict()) == list(made.all_names)
    assert repr(made).endswith("ground_hue, class, size; 50 samples)")


def test_it_survives_pickling() -> None:
    made = table()
    again = pickle.loads(pickle.dumps(made))
    assert again.all_names == made.all_names
    for name in made.all_names:
        np.testing.assert_array_equal(again[name], made[name])


@pytest.mark.parametrize("name", ["hue", "", "Class"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"unknown factor .*expected one of object_x, .*class, size"):
        table()[name]


def test_a_continuous_factor_has_no_labels() -> None:
    with pytest.raises(SpecError, match="unknown factor 'object_x'"):
        table().labels("object_x")


def test_a_rendered_dataset_has_one_too(fabricated: Path) -> None:
    data = Ident3D(fabricated, factors=["object_z", "ground_hue"])
    np.testing.assert_allclose(data.factors["object_z"], data.latents[:, 0] * 6.0 - 3, rtol=1e-6, atol=1e-6)
    assert data.factors.categorical == ()
    assert data.factors.categories.shape == (24, 0)
    assert data.categories.shape == (24, 0)
    with pytest.raises(SpecError, match="unknown factor 'object_x'"):
        data.factors["object_x"]

"""The factor table against the published one, and choosing from it."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from ident3d.errors import SpecError
from ident3d.factors import FACTORS, Factors

QUARTER = math.pi / 2
# Zimmermann et al. 2021, appendix A.4: name, half range, unit, in the order of the released latents.
PUBLISHED = [
    ("object_x", 3.0, "Blender units"),
    ("object_y", 3.0, "Blender units"),
    ("object_z", 3.0, "Blender units"),
    ("object_alpha", QUARTER, "rad"),
    ("object_beta", QUARTER, "rad"),
    ("object_gamma", QUARTER, "rad"),
    ("spotlight_theta", QUARTER, "rad"),
    ("object_hue", QUARTER, "rad"),
    ("spotlight_hue", QUARTER, "rad"),
    ("ground_hue", QUARTER, "rad"),
]


@pytest.mark.parametrize("column", range(10))
def test_the_table_is_the_published_one(column: int) -> None:
    name, half, unit = PUBLISHED[column]
    f = FACTORS[column]
    assert (f.name, f.column, f.low, f.high, f.unit) == (name, column, -half, half, unit)
    assert not f.periodic
    assert f.frozen is None


def test_there_are_ten_that_drive_ten_things() -> None:
    assert len(FACTORS) == 10
    assert len(set(FACTORS.names)) == len({f.target for f in FACTORS}) == 10


@pytest.mark.parametrize("factor", FACTORS, ids=FACTORS.names)
def test_a_value_goes_linearly_from_low_to_high(factor: dataclasses.Field[object]) -> None:
    f = FACTORS.get(factor.name)
    assert f.value(0) == f.low
    assert f.value(1) == f.high
    for raw in (-0.5, 0.0, 0.25):
        assert f.value((raw + 1) / 2) == pytest.approx(raw * f.high)


def test_a_subset_keeps_the_order_asked() -> None:
    chosen = FACTORS.select(["ground_hue", "object_x"])
    assert chosen.names == ("ground_hue", "object_x")
    np.testing.assert_array_equal(chosen.columns, [9, 0])
    assert chosen.columns.dtype == np.intp


def test_a_subset_can_come_from_any_iterable_of_names() -> None:
    assert FACTORS.select(name for name in ("object_z",)).names == ("object_z",)
    assert FACTORS.select(None) is FACTORS


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("object_x", r"expected a list of names, e\.g\. \['object_x'\]"),
        ([], "factors is empty"),
        (["object_x", "object_x"], "twice"),
        (["object_x", "colour"], "unknown factor 'colour'; expected one of object_x, object_y"),
        (["object_X"], "unknown factor 'object_X'"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        FACTORS.select(names)


def test_a_subset_knows_only_its_own() -> None:
    with pytest.raises(SpecError, match=r"expected one of object_x$"):
        FACTORS.select(["object_x"]).get("object_y")


@pytest.mark.parametrize("duplicate", [lambda f: pickle.loads(pickle.dumps(f)), copy.copy, copy.deepcopy])
def test_a_copy_is_the_same_and_of_the_same_kind(duplicate: object) -> None:
    assert callable(duplicate)
    chosen = FACTORS.select(["object_hue", "object_x"])
    again = duplicate(chosen)
    assert again == chosen
    assert isinstance(again, Factors)
    assert again.names == chosen.names


def test_a_factor_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FACTORS[0].low = 0.0  # type: ignore[misc]


def test_repr_names_them() -> None:
    assert repr(FACTORS.select(["object_x", "object_hue"])) == "Factors(object_x, object_hue)"


def test_the_table_in_words_tells_a_held_factor_from_one_that_varies() -> None:
    held = dataclasses.replace(FACTORS[0], frozen=0.75)
    rows = list(Factors([held, FACTORS[7]]).table())
    assert rows[0] == ("0", "object_x", "held at 1.5", "Blender units", "object position, along the view")
    assert rows[1] == ("7", "object_hue", "-1.571 to 1.571", "rad", "hue of the object")

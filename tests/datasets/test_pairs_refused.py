"""What pairs refuse: each bad value is a SpecError that names it, before anything is built."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ident3d import Box, Ident3D, Normal, PairSampler, Real, Share, Sphere, pair_loader
from ident3d.errors import SpecError

GOOD = np.random.default_rng(0).random((30, 3), np.float32)
LAW = "normal(scale=0.05)"


def altered(value: float) -> Any:
    array = GOOD.copy()
    array[17, 1] = value
    return array


LATENTS: list[tuple[Any, str]] = [
    (altered(float("nan")), r"latents outside Box\(3\): row 17 is \(.*, nan, .*\)"),
    (altered(float("inf")), r"latents outside Box\(3\): row 17 is \(.*, inf, .*\)"),
    (altered(1.01), r"latents outside Box\(3\): row 17 is \(.*, 1.01, .*\)"),
    (altered(-0.5), r"latents outside Box\(3\): row 17 is \(.*, -0.5, .*\)"),
    (torch.from_numpy(altered(2.0)), r"row 17 is \(.*, 2, .*\)"),
    (GOOD[:1], "1 sample: pairs need at least 2"),
    (GOOD[:0], "0 samples: pairs need at least 2"),
    (GOOD[0], r"latents are float32 \(3,\): expected numbers \(N, d\)"),
    (GOOD[None], r"latents are float32 \(1, 30, 3\): expected numbers"),
    (GOOD[:, :0], r"latents are float32 \(30, 0\): expected numbers"),
    (np.float32(1) * GOOD[0, 0], "float32: expected a dataset with .latents, or an array"),
    (GOOD.astype(object), r"latents are object \(30, 3\): expected numbers"),
    (GOOD.astype(complex), r"latents are complex128 \(30, 3\): expected numbers"),
    (GOOD > 0.5, r"latents are bool \(30, 3\): expected numbers"),
    (GOOD.astype(str), r"latents are <U\d+ \(30, 3\): expected numbers"),
    (GOOD.tolist(), "list: expected a dataset with .latents, or an array"),
    (None, "NoneType: expected a dataset with .latents"),
    ("teapots", "str: expected a dataset with .latents"),
]


@pytest.mark.parametrize(("data", "message"), LATENTS)
def test_latents_that_cannot_be_are_refused(data: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PairSampler(data, LAW, batch_size=4)
    with pytest.raises(SpecError, match=message):
        pair_loader(data, LAW, batch_size=4)


def test_a_datasets_latents_that_are_nan_or_outside_the_cube_are_refused(damaged: Path) -> None:
    path = damaged / "train" / "latents.npy"
    good = np.load(path)
    for value in (float("nan"), 1.5):
        bad = good.copy()
        bad[11, 4] = value
        np.save(path, bad)
        with pytest.raises(SpecError, match=rf"latents outside Box\(10\): row 11 is .*{value:g}"):
            Ident3D(damaged).pairs(LAW, batch_size=4)


def test_latents_off_the_space_of_the_law_are_refused() -> None:
    with pytest.raises(SpecError, match=r"latents outside Sphere\(3\): row 0"):
        PairSampler(GOOD, Normal(Sphere(3), 0.1), batch_size=4)
    with pytest.raises(SpecError, match=r"latents outside Real\(3\): row 17"):
        PairSampler(altered(float("nan")), Normal(Real(3), 0.1), batch_size=4)
    assert PairSampler(altered(7.0), Normal(Real(3), 0.1), batch_size=4).batch(0)


LAWS: list[tuple[Any, str]] = [
    ("cauchy(scale=1)", "unknown law 'cauchy'"),
    ("normal", "not of the form"),
    ("normal(sigma=1)", "sigma"),
    ("normal(scale=0)", "scale = 0: expected numbers above 0"),
    ("normal(scale=(0.1, 0.2))", "scale has 2 values; expected one, or 3"),
    ("share(object_hue)", "'object_hue' given for an array, whose columns have no names"),
    ("change(k=4)", "change of k = 4 factors: expected 1 to 3"),
    ("vmf(kappa=10)", "expected a Sphere"),
    (Normal(Box(3), 0.1, loc=[0.5, 0.5, 0.5]), "leave out loc"),
    (Normal(Box(2), 0.1), "2"),
]


@pytest.mark.parametrize(("law", "message"), LAWS)
def test_a_conditional_that_cannot_be_is_refused(law: Any, message: str) -> None:
    for make in (PairSampler, pair_loader):
        with pytest.raises(SpecError, match=message):
            make(GOOD, law, batch_size=4)


def test_a_dataset_refuses_a_law_over_another_space(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    for space in (Box(10, -1, 1), Real(10), Box(9), Sphere(10)):
        with pytest.raises(SpecError, match=rf"{re.escape(repr(space))}.* live in Box\(10\)"):
            data.pairs(Normal(space, 0.1), batch_size=4)
    assert data.pairs(Normal(Box(10), 0.1), batch_size=4).stream.batch(0)
    with pytest.raises(SpecError, match=r"live in Box\(2\)"):
        Ident3D(fabricated, factors=["object_x", "object_hue"]).pairs(Normal(Box(10), 0.1), batch_size=4)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size = 0: expected a whole number of at least 1"),
    ({"batch_size": -4}, "batch_size = -4: expected"),
    ({"batch_size": True}, "batch_size = True: expected"),
    ({"seed": -1}, "seed = -1: expected a whole number of at least 0"),
    ({"batches": 0}, "batches = 0: expected"),
    ({"rank": 1}, "rank = 1, world_size = None: expected both"),
    ({"match": "annoy"}, "match='annoy': expected one of exact, hnsw, ivf"),
    ({"match_options": {"probes": 3}}, "'exact' has no 'probes'"),
    ({"factors": []}, "factors is empty"),
    ({"factors": ["colour"]}, "unknown factor 'colour'"),
    ({"factors": ["object_x", "object_x"]}, r"factors=\[0, 0\]: expected different numbers"),
    ({"factors": [10]}, r"factors=\[10\]: expected different numbers from 0 to 9"),
    ({"factors": "object_x"}, "factors='object_x': expected a list"),
    ({"weights": {"colour": 1.0}}, "unknown factor 'colour'"),
    ({"weights": {"object_x": 0.0}}, "expected 1e-9 to 1e9"),
    ({"weights": [1.0]}, "weights has 1 values; expected one, or 10"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_that_cannot_be_are_refused(fabricated: Path, options: dict[str, Any], message: str) -> None:
    data = Ident3D(fabricated)
    with pytest.raises(SpecError, match=message):
        PairSampler(data, LAW, **{"batch_size": 4, **options})
    with pytest.raises(SpecError, match=message):
        data.pairs(LAW, **{"batch_size": 4, **options})
    assert not (fabricated / ".pairs").exists()


def test_a_factor_that_was_not_chosen_is_unknown(fabricated: Path) -> None:
    data = Ident3D(fabricated, factors=["object_x", "object_hue"])
    for options in ({"factors": ["object_y"]}, {"weights": {"object_y": 2.0}}):
        with pytest.raises(SpecError, match="unknown factor 'object_y'; expected one of object_x, object_hue"):
            data.pairs(LAW, batch_size=4, **options)
    for law, short in (("share(object_y)", {}), (None, {"share": ["object_y"]})):
        with pytest.raises(SpecError, match="unknown factor 'object_y'"):
            data.pairs(law, batch_size=4, **short)  # type: ignore[arg-type]


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"conditional": LAW, "share": ["object_x"]}, "conditional and share: expected one kind of pairs"),
    ({"conditional": LAW, "change": 1}, "conditional and change: expected one kind"),
    ({"conditional": LAW, "views": len}, "conditional and views: expected one kind"),
    ({"share": ["object_x"], "change": 1}, "share and change: expected one kind"),
    ({"share": ["object_x"], "change": 1, "views": len}, "share and change and views: expected one kind"),
    ({}, "conditional: missing; these samples hold no positives of their own"),
    ({"match": "exact"}, "match: for matched pairs, but no conditional is given"),
    ({"factors": ["object_x"], "weights": [1.0]}, "factors, weights: for matched pairs, but no conditional"),
    ({"views": len, "allow_self": True}, "allow_self: for matched pairs, but no conditional is given"),
    ({"views": len, "cache": "here"}, "cache: for matched pairs"),
    ({"views": len, "match_options": {}}, "match_options: for matched pairs"),
    ({"share": []}, "share of no factor"),
    ({"share": ["object_x"] * 2}, "named twice"),
    ({"share": "object_x"}, "share='object_x': expected a list of names"),
    ({"share": ["colour"]}, "unknown factor 'colour'"),
    ({"share": list(range(10))}, "share of all 10 factors"),
    ({"change": 0}, "change of k = 0 factors: expected 1 to 10"),
    ({"change": 11}, "change of k = 11 factors: expected 1 to 10"),
    ({"change": True}, "change of k = True factors"),
    ({"conditional": LAW, "shuffle": True}, "shuffle: not an option of pairs, which decide their batches themselves"),
    ({"conditional": LAW, "sampler": None, "drop_last": True}, "drop_last, sampler: not an option of pairs"),
    ({"views": len, "shuffle": False}, "shuffle: not an option of pairs"),
]


@pytest.mark.parametrize(("options", "message"), KINDS)
def test_pairs_that_cannot_be_served_are_refused(fabricated: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Ident3D(fabricated).pairs(batch_size=4, **options)


def test_an_array_has_pictures_for_no_kind_of_pairs_by_itself() -> None:
    with pytest.raises(SpecError, match="conditional: missing"):
        pair_loader(GOOD, batch_size=4)
    with pytest.raises(SpecError, match="share: 'object_x' given for an array"):
        pair_loader(GOOD, share=["object_x"], batch_size=4)
    with pytest.raises(SpecError, match=r"share of columns \[3\]: expected whole numbers from 0 to 2"):
        PairSampler(GOOD, Share(Box(3), [3]), batch_size=4)


# Shapes and types are checked at run time in the tests, so that what has the wrong type is refused there already.
SCRIPT = """
import sys, numpy as np
from ident3d import Ident3D, PairSampler, pair_loader, simclr
from ident3d.errors import SpecError
data, latents = Ident3D(sys.argv[1]), np.random.default_rng(0).random((30, 3), np.float32)
law = "uniform()"
calls = [
    lambda: PairSampler(latents, law, batch_size=4.0),
    lambda: data.pairs(law, batch_size=4.0),
    lambda: data.pairs(law, batch_size="4"),
    lambda: data.pairs(law, batch_size=None),
    lambda: data.pairs(law, batch_size=4, seed=0.5),
    lambda: data.pairs(law, batch_size=4, seed="0"),
    lambda: data.pairs(law, batch_size=4, batches=2.0),
    lambda: data.pairs(law, batch_size=4, match=None),
    lambda: data.pairs(law, batch_size=4, match="hnsw", match_options={"ef_search": 1.5}),
    lambda: data.pairs(law, batch_size=4, match="hnsw", match_options={"ef_search": "64"}),
    lambda: data.pairs(0.05, batch_size=4),
    lambda: data.pairs(views="simclr", batch_size=4),
    lambda: data.pairs(views=64, batch_size=4),
    lambda: data.pairs(change=1.5, batch_size=4),
    lambda: data.pairs(change="1", batch_size=4),
]
for call in calls:
    try:
        call()
        print("nothing was raised")
    except Exception as error:
        print(type(error).__name__, "-", error)
"""
TOLD = [
    "batch_size = 4.0: expected a whole number of at least 1",
    "batch_size = 4.0: expected",
    "batch_size = '4': expected",
    "batch_size = None: expected",
    "seed = 0.5: expected a whole number of at least 0",
    "seed = '0': expected",
    "batches = 2.0: expected",
    "match=None: expected one of",
    "match_options: ef_search = 1.5, expected a whole number",
    "match_options: ef_search = '64', expected",
    "conditional 0.05: expected one of",
    "views='simclr': expected a transform",
    "views=64: expected a transform",
    "conditional 'change(k=1.5)': change of k = 1.5 factors",
    "conditional \"change(k='1')\": change of k = '1' factors",
]


@pytest.mark.slow
def test_values_of_another_type_are_refused(fabricated: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(fabricated)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(told) == len(TOLD)
    for line, message in zip(told, TOLD, strict=True):
        assert line.startswith(f"SpecError - {message}")

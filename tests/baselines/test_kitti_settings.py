"""Settings: section A.3 to the letter, the rows of table 3, and what is refused before anything is trained."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, get_args

import pytest

from ident3d.baselines.kitti_settings import (
    PRESETS,
    KittiSettings,
    Model,
    Preset,
    delta_t_of,
    preset_settings,
    row_settings,
)
from ident3d.baselines.paper import KITTI_ROWS
from ident3d.baselines.training_settings import TrainingSettings
from ident3d.errors import SpecError
from ident3d.schema import from_plain, to_plain

ROWS = [row.row for row in KITTI_ROWS]


def test_paper_is_section_a3_to_the_letter() -> None:
    model = {"model": "contrastive", "conditional": "laplace", "model_space": "unbounded", "dim": 10}
    data = {"max_delta_t": 1, "batch": 32, "samples": 10_000}
    loss = {"tau": 1.0, "include_self": True, "positive_in_denominator": True}
    output = {"magnitude": 1.0, "parametrisation": "linear"}
    slowvae = {"beta": 1.0, "gamma": 10.0, "rate": 6.0}
    training = {"steps": 300_000, "learning_rate": 1e-4, "scale_learning_rate": None, "schedule": "constant"}
    training |= {"warmup": 0.0, "precision": "float32", "patience": None}
    whole = {**model, **data, **loss, **output, **slowvae, "training": training}
    assert to_plain(preset_settings("paper")) == whole


def test_quick_is_the_same_models_and_losses() -> None:
    paper, quick = to_plain(preset_settings("paper")), to_plain(preset_settings("quick"))
    unlike = {key for key, value in quick.items() if value != paper[key]}
    assert unlike == {"magnitude", "parametrisation", "training"}
    assert 10 * quick["training"]["steps"] < paper["training"]["steps"]
    assert tuple(PRESETS) == get_args(Preset)


@pytest.mark.parametrize("row", KITTI_ROWS, ids=lambda row: row.row)
@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_row_has_settings(row: Any, preset: str) -> None:
    settings = row_settings(row.row, preset)
    expected = {"model": "slowvae"} if row.model == "slowvae" else {"model": "contrastive", "conditional": row.model}
    expected |= {"model_space": row.model_space, "max_delta_t": {0.05: 1, 0.15: 5}[row.mean_dt_s]}
    assert settings == dataclasses.replace(preset_settings(preset), **expected)
    assert from_plain(KittiSettings, to_plain(settings)) == settings


def test_rows_differ_from_each_other() -> None:
    assert len({repr(row_settings(row, "paper")) for row in ROWS}) == len(ROWS) == 10


def test_changes_come_before_the_row() -> None:
    training = TrainingSettings(7)
    changed = row_settings("3.10", "quick", dim=4, conditional="gennorm(3)", max_delta_t=2, training=training)
    assert (changed.dim, changed.conditional, changed.max_delta_t, changed.training) == (4, "gennorm(3)", 2, training)
    assert (changed.model_space, changed.magnitude) == ("box", 7.0)


@pytest.mark.parametrize("row", ["2.1", "3.11", "3", "", "3.01", "banana", 3.1, None])
def test_unknown_rows_are_refused(row: Any) -> None:
    with pytest.raises(SpecError, match=rf"row = {re.escape(repr(row))}: expected .*3\.1, .*3\.10"):
        row_settings(row, "quick")


@pytest.mark.parametrize("preset", ["fast", "", "Paper"])
def test_unknown_presets_are_refused(preset: str) -> None:
    words = f"preset = '{preset}': expected one of paper, quick"
    with pytest.raises(SpecError, match=words):
        preset_settings(preset)
    with pytest.raises(SpecError, match=words):
        row_settings("3.1", preset)


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 10, 1000])
def test_a_mean_distance_is_that_of_the_steps_up_to_the_longest(frames: int) -> None:
    mean_frames = sum(range(1, frames + 1)) / frames
    assert delta_t_of(0.05 * mean_frames) == frames


@pytest.mark.parametrize(
    "mean",
    [
        0,
        0.0,
        -0.05,
        0.025,
        0.03,
        0.06,
        0.0501,
        0.1499,
        math.nan,
        math.inf,
        -math.inf,
        1e308,
        True,
        "0.05",
        None,
        [0.05],
    ],
)
def test_other_distances_are_refused(mean: Any) -> None:
    with pytest.raises(SpecError, match=rf"mean_dt = {re.escape(repr(mean))}: expected 0\.05, 0\.075, 0\.1"):
        delta_t_of(mean)


BAD: list[tuple[str, Any]] = [
    *[("model", value) for value in ("banana", "", "SlowVAE", "simclr", None)],
    *[("model_space", value) for value in ("torus", "", "Box", None)],
    *[("parametrisation", value) for value in ("banana", "", None)],
    *[("max_delta_t", value) for value in (0, -1, 1.5, True, "1", None, 1001)],
    *[("dim", value) for value in (2, 0, -10, 10.0, True, None)],  # table 3 has three factors to find
    *[("batch", value) for value in (1, 0, -5, 2.5, True, "64")],
    *[("samples", value) for value in (63, 0, -1, 1e4, True)],
    *[
        (name, value)
        for name in ("tau", "magnitude", "rate")
        for value in (0, 0.0, -1.0, math.inf, math.nan, "1", None, True)
    ],
    *[(name, value) for name in ("beta", "gamma") for value in (-0.1, math.inf, math.nan, "1", None, True)],
]


@pytest.mark.parametrize("model", get_args(Model))
@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_values_are_refused_by_their_names(name: str, value: Any, model: str) -> None:
    wrong: dict[str, Any] = {"model": model, name: value}
    with pytest.raises(SpecError, match=rf"^{name} = {re.escape(repr(value))}: expected "):
        KittiSettings(**wrong)


@pytest.mark.parametrize("name", ["tau", "magnitude", "beta", "gamma", "rate"])
@pytest.mark.parametrize("value", [1, 0.5, 1e-9])
def test_whole_and_broken_numbers_are_taken(name: str, value: float) -> None:
    changes: dict[str, Any] = {name: value}
    assert getattr(KittiSettings(**changes), name) == value


def test_the_least_of_each_is_taken() -> None:
    least = KittiSettings(model="slowvae", beta=0, gamma=0, max_delta_t=1, dim=3, batch=2, samples=64)
    assert (least.beta, least.gamma) == (0, 0)


@pytest.mark.parametrize("conditional", ["gennorm(0.5)", "gennorm", "gennorm()", "Laplace", "laplace(1)", "", "vMF"])
def test_other_conditionals_are_refused(conditional: str) -> None:
    with pytest.raises(
        SpecError, match=re.escape(f"conditional = {conditional!r}: expected vmf, laplace, normal or gennorm")
    ):
        KittiSettings(conditional=conditional)


@pytest.mark.parametrize("space", ["box", "sphere"])
def test_slowvae_has_no_model_space(space: Any) -> None:
    with pytest.raises(SpecError, match=f"model_space = {space} with model = slowvae: .*leave the option out"):
        KittiSettings(model="slowvae", model_space=space)
    with pytest.raises(SpecError, match="model_space = box with model = slowvae"):
        row_settings("3.3", "paper", model="slowvae")


@pytest.mark.parametrize("conditional", ["normal", "vmf", "gennorm(3)", "banana"])
def test_slowvae_has_no_other_law(conditional: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"conditional = {conditional} with model = slowvae: ")):
        KittiSettings(model="slowvae", conditional=conditional)


@pytest.mark.parametrize("space", ["box", "unbounded"])
def test_the_dot_product_needs_a_sphere(space: Any) -> None:
    with pytest.raises(SpecError, match=f"vmf in model_space = {space}: the dot product needs a sphere"):
        KittiSettings(conditional="vmf", model_space=space)
    assert KittiSettings(conditional="vmf", model_space="sphere").conditional == "vmf"


@pytest.mark.parametrize("space", ["sphere", "box", "unbounded"])
@pytest.mark.parametrize("conditional", ["laplace", "normal", "gennorm(3)"])
def test_a_distance_suits_every_space(conditional: str, space: Any) -> None:
    settings = KittiSettings(conditional=conditional, model_space=space)
    assert from_plain(KittiSettings, to_plain(settings)) == settings

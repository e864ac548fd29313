"""Settings of 3DIdent experiments: the paper's to the letter, the rows of table 4, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest

from ident3d import Box, Ident3D, PairSampler, conditional
from ident3d.baselines.model_loss import loss_power
from ident3d.baselines.paper import THREEDIDENT_ROWS, threedident_row
from ident3d.baselines.threedident_settings import (
    PRESETS,
    Encoding,
    Mode,
    Pairs,
    Preset,
    ThreeDIdentSettings,
    preset_settings,
    row_settings,
)
from ident3d.baselines.training import TrainingSettings
from ident3d.errors import SpecError
from ident3d.schema import from_plain, to_plain

ROWS = [row.row for row in THREEDIDENT_ROWS]
# Pairs, conditional, model space, model of table 4.
TABLE_4 = {
    "4.1": ("matched", "normal(0.05)", "box", "normal"),
    "4.2": ("matched", "normal(0.05)", "unbounded", "normal"),
    "4.3": ("matched", "laplace(0.05)", "box", "normal"),
    "4.4": ("matched", "normal(0.05)", "sphere", "vmf"),
    "4.5": ("augmented", None, "sphere", "vmf"),
}


def test_paper_is_section_a3_to_the_letter() -> None:
    training = {"steps": 200_000, "learning_rate": 1e-4, "scale_learning_rate": None, "schedule": "constant"}
    training |= {"warmup": 0.0, "precision": "float32", "patience": None}
    whole = {
        "mode": "unsupervised",
        "pairs": "matched",
        "conditional": "normal(0.05)",
        "match": "exact",
        "allow_self": False,
        "factors": None,
        "encoding": {"network": "resnet18", "space": "box", "magnitude": 1.0, "parametrisation": "linear"},
        "model": "normal",
        "tau": 1.0,
        "include_self": True,
        "positive_in_denominator": True,
        "batch": 512,
        "chunk": None,
        "samples": 25_000,
        "training": training,
    }
    assert to_plain(preset_settings("paper")) == whole


def test_the_other_presets_are_the_same_model_and_loss() -> None:
    paper = to_plain(preset_settings("paper"))
    differ = {
        name: {key for key, value in to_plain(settings).items() if value != paper[key]}
        for name, settings in PRESETS.items()
    }
    assert differ == {"paper": set(), "fast": {"encoding", "training"}, "quick": {"encoding", "training", "batch"}}
    paper_like, fast, quick = PRESETS["paper"], PRESETS["fast"], PRESETS["quick"]
    encoding = dataclasses.replace(fast.encoding, magnitude=1.0, parametrisation="linear")
    assert encoding == paper_like.encoding
    assert fast.encoding.parametrisation == "log"
    assert fast.training.steps == paper_like.training.steps // 10
    assert fast.training.scale_learning_rate is not None
    assert fast.training.scale_learning_rate > fast.training.learning_rate > paper_like.training.learning_rate
    assert (fast.training.schedule, fast.training.precision) == ("cosine", "bf16")
    training = dataclasses.replace(fast.training, steps=quick.training.steps)
    assert quick == dataclasses.replace(fast, batch=quick.batch, training=training)
    assert quick.batch < fast.batch
    assert quick.training.steps < fast.training.steps
    assert tuple(PRESETS) == get_args(Preset)


def test_the_rows_are_those_of_the_table() -> None:
    assert set(TABLE_4) == set(ROWS)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_settings(row: str, preset: str) -> None:
    start, settings = preset_settings(preset), row_settings(row, preset)
    pairs, law, space, model = TABLE_4[row]
    assert (settings.pairs, settings.encoding.space, settings.model) == (pairs, space, model)
    if law is not None:
        assert settings.conditional == law
        made = conditional(settings.conditional, Box(10))
        assert made.text == law.replace("(", "(scale=")
    assert loss_power(settings.model) == {"normal": 2.0, "vmf": None}[model]
    # All else is the preset's.
    encoding = dataclasses.replace(settings.encoding, space=start.encoding.space)
    assert encoding == start.encoding
    row_alone: dict[str, Any] = {"pairs": settings.pairs, "conditional": settings.conditional, "model": settings.model}
    assert dataclasses.replace(start, encoding=settings.encoding, **row_alone) == settings


@pytest.mark.parametrize("row", [row for row in ROWS if TABLE_4[row][1]])
def test_pairs_of_a_row_are_drawn(row: str, fabricated: Path) -> None:
    law = row_settings(row, "paper").conditional
    assert PairSampler(Ident3D(fabricated), law, batch_size=4).law.text == law.replace("(", "(scale=")


def test_changes_come_before_the_row() -> None:
    encoding = Encoding("resnet50", "unbounded")
    changed = row_settings("4.1", "quick", encoding=encoding, batch=32, training=TrainingSettings(7), pairs="exact")
    assert (changed.encoding, changed.batch, changed.training.steps, changed.pairs) == (encoding, 32, 7, "exact")
    assert changed.conditional == "normal(0.05)"
    assert row_settings("4.5", "quick", pairs="matched").pairs == "matched"


@pytest.mark.parametrize("row", ["4.6", "4.0", "5.1", "1.1", "4", "", "banana", 4.1, None])
def test_unknown_rows_are_refused(row: Any) -> None:
    for ask in (threedident_row, lambda row: row_settings(row, "paper")):
        with pytest.raises(SpecError, match=r"row = .*: expected one of 4\.1, 4\.2, 4\.3, 4\.4, 4\.5"):
            ask(row)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_found_by_its_name(row: str) -> None:
    found = threedident_row(row)
    assert found.row == row
    assert found in THREEDIDENT_ROWS


@pytest.mark.parametrize("preset", ["papers", "", "slow", None])
def test_unknown_presets_are_refused(preset: Any) -> None:
    for ask in (preset_settings, lambda preset: row_settings("4.1", preset)):
        with pytest.raises(SpecError, match=r"preset = .*: expected one of paper, fast, quick"):
            ask(preset)


# Values


@pytest.mark.parametrize(
    "wrong",
    [
        *[{"mode": v} for v in ("contrastive", "", None)],
        *[{"pairs": v} for v in ("rendered", "views")],
        *[{"match": v} for v in ("faiss", "")],
        *[{"batch": v} for v in (1, 0, -8, 2.5, True, "512")],
        *[{"samples": v} for v in (63, 0, 100.0, True)],
        *[{"chunk": v} for v in (0, -1, 1.5, True)],
        *[{"tau": v} for v in (0.0, -1.0, math.inf, math.nan, True)],
        *[{"model": v} for v in ("gaussian", "gennorm", "gennorm(0.5)", "vmf(1)", "")],
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(wrong))} = "):
        ThreeDIdentSettings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *[({"space": v}, "model_space = ") for v in ("cube", "", None)],
        *[({"parametrisation": v}, "parametrisation = ") for v in ("exp", "")],
        *[({"magnitude": v}, "magnitude = ") for v in (0.0, -1.0, math.inf, math.nan, True)],
    ],
    ids=str,
)
def test_encodings_out_of_range_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Encoding(**wrong)


@pytest.mark.parametrize("space", ["box", "unbounded"])
def test_the_dot_product_elsewhere_than_on_a_sphere_is_refused(space: Any) -> None:
    words = f"model = vmf in model_space = {space}: the dot product needs a sphere"
    with pytest.raises(SpecError, match=words):
        ThreeDIdentSettings(model="vmf", encoding=Encoding(space=space))
    with pytest.raises(SpecError, match=words):
        row_settings("4.4", "paper", encoding=Encoding(space=space))
    assert ThreeDIdentSettings(model="vmf", encoding=Encoding(space="sphere")).model == "vmf"


@pytest.mark.parametrize("model", ["laplace", "normal", "gennorm(3)"])
@pytest.mark.parametrize("space", ["box", "unbounded", "sphere"])
def test_distances_are_for_every_space(model: str, space: Any) -> None:
    assert ThreeDIdentSettings(model=model, encoding=Encoding(space=space)).model == model


@pytest.mark.parametrize("mode", ["supervised", "identity"])
def test_where_nothing_is_contrasted_the_loss_has_no_say(mode: Any) -> None:
    assert ThreeDIdentSettings(mode=mode, model="vmf").mode == mode


@pytest.mark.parametrize("least", [{"batch": 2}, {"samples": 64}, {"chunk": 1}, {"tau": 1e-6}], ids=str)
def test_the_least_values_will_do(least: dict[str, Any]) -> None:
    assert {name: getattr(ThreeDIdentSettings(**least), name) for name in least} == least


def test_chunks_are_for_pairs() -> None:
    with pytest.raises(SpecError, match="chunk = 64 with mode = supervised: for pairs"):
        ThreeDIdentSettings(mode="supervised", chunk=64)


# As plain data


@pytest.mark.parametrize(
    "settings",
    [
        *PRESETS.values(),
        *(row_settings(row, "fast") for row in ROWS),
        ThreeDIdentSettings(
            mode="supervised",
            pairs="exact",
            match="ivf",
            factors=("object_x", "ground_hue"),
            encoding=Encoding("convnext_tiny", "sphere", 20.0, "log"),
            model="gennorm(1.5)",
            allow_self=True,
            training=TrainingSettings(10, patience=3, scale_learning_rate=0.0),
        ),
        ThreeDIdentSettings(chunk=64),
    ],
)
def test_plain_data_and_back(settings: ThreeDIdentSettings) -> None:
    plain = json.loads(json.dumps(to_plain(settings)))
    assert plain == to_plain(settings)
    assert from_plain(ThreeDIdentSettings, plain) == settings


def test_plain_data_are_checked() -> None:
    plain = to_plain(ThreeDIdentSettings())
    for changes, words in (
        ({"batch": 1}, "batch = 1"),
        ({"encoding": {"space": "cube"}}, "encoding.space: expected one of 'sphere', 'box', 'unbounded', got 'cube'"),
        ({"encoding": {"magnitude": 0}}, "encoding: magnitude = 0"),
        ({"model": "vmf"}, "the dot product needs a sphere"),
        ({"epochs": 3}, "epochs: unknown key"),
        ({"training": {"steps": 5, "patience": 0}}, "training: patience = 0"),
    ):
        with pytest.raises(SpecError, match=words):
            from_plain(ThreeDIdentSettings, {**plain, **changes})


def test_names_of_choices_are_those_of_the_settings() -> None:
    assert get_args(Mode) == ("unsupervised", "supervised", "identity")
    assert get_args(Pairs) == ("matched", "exact", "augmented")

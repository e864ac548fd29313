"""Settings: the paper's to the letter, the rows of its tables, and what is refused before anything is drawn."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from ident3d.baselines.cli import MLP
from ident3d.baselines.encoders import mlp_encoder
from ident3d.baselines.mixing import invertible_mlp
from ident3d.baselines.mlp_settings import PRESETS, MLPSettings, Mode, Preset, preset_settings, row_settings
from ident3d.baselines.paper import MLP_ROWS, mlp_row
from ident3d.baselines.training import TrainingSettings
from ident3d.errors import SpecError
from ident3d.schema import from_plain, to_plain

TABLES = Path(__file__).resolve().parents[3] / "shared" / "reference" / "paper_tables.md"
ROWS = [row.row for row in MLP_ROWS]
PIECES = ("space", "marginal", "conditional", "model_space", "model")


def test_paper_is_section_a3_to_the_letter() -> None:
    paper = preset_settings("paper")
    training = {"steps": 300_000, "learning_rate": 1e-4, "scale_learning_rate": None, "schedule": "constant"}
    data = {"dim": 10, "layers": 3, "candidates": 25_000, "batch": 6144, "samples": 4096}
    encoder = {"widths": [10, 50, 50, 50, 50, 10], "init": "torch", "whiten": False}
    output = {"magnitude": 1.0, "parametrisation": "linear"}
    loss = {"mode": "unsupervised", "tau": 1.0, "include_self": True, "positive_in_denominator": True}
    row = {name: getattr(mlp_row("2.1"), name) for name in PIECES}  # where none is asked for
    whole = {
        **data,
        **encoder,
        **output,
        **loss,
        **row,
        "training": {**training, "warmup": 0.0, "precision": "float32", "patience": None},
    }
    assert to_plain(paper) == whole
    assert inspect.signature(invertible_mlp).parameters["slope"].default == 0.2
    assert inspect.signature(mlp_encoder).parameters["slope"].default == 0.01
    assert MLP().seeds == 5
    space = paper.latent_space()
    assert (space.dim, repr(space)) == (10, "Box(10)")


def test_the_other_presets_are_the_same_model_and_loss() -> None:
    paper = to_plain(preset_settings("paper"))
    differ = {
        name: {key for key, value in to_plain(settings).items() if value != paper[key]}
        for name, settings in PRESETS.items()
    }
    assert differ == {
        "paper": set(),
        "fast": {"init", "whiten", "parametrisation", "training"},
        "quick": {"init", "whiten", "parametrisation", "training", "batch"},
    }
    steps = [PRESETS[name].training.steps for name in ("quick", "fast", "paper")]
    assert steps == sorted(steps)
    assert tuple(PRESETS) == get_args(Preset)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_row_has_settings(row: str, preset: str) -> None:
    published = mlp_row(row)
    settings = row_settings(row, preset)
    pieces = {name: getattr(published, name) for name in PIECES}
    assert {name: getattr(settings, name) for name in PIECES} == pieces
    assert dataclasses.replace(preset_settings(preset), **pieces) == settings
    marginal, conditional = settings.laws()
    assert repr(marginal.space) == repr(conditional.space) == repr(settings.latent_space())
    assert from_plain(MLPSettings, to_plain(settings)) == settings


def tables() -> list[list[str]]:
    """The cells of tables 1 and 2: space, marginal, conditional, model space, model."""
    if not TABLES.is_file():
        pytest.skip("the paper's tables are not beside the project")
    text = TABLES.read_text().split("## Table 1")[1].split("## Table 3")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    return [row[:5] for row in rows if row[0] != "space"]


def law(cell: str) -> str:
    """`GenNorm(3; 0.05)` as ident3d writes it: scale, then power."""
    name, *numbers = re.findall(r"[A-Za-z]+|[0-9.]+", cell)
    parameter = {"vMF": "kappa", "uniform": ""}.get(name, "scale")
    if name == "GenNorm":
        return f"gennorm(scale={numbers[1]}, beta={numbers[0]})"
    return f"{name.lower()}({'='.join(filter(None, (parameter, *numbers)))})"


def test_the_laws_are_those_of_the_tables() -> None:
    cells = tables()
    assert len(cells) == len(ROWS) == 22
    for row, (space, marginal, conditional, model_space, model) in zip(ROWS, cells, strict=True):
        settings = row_settings(row, "paper")
        assert (settings.space, settings.model_space) == (space, model_space)
        assert [one.text for one in settings.laws()] == [law(marginal), law(conditional)], row
        powers = {"vMF(1)": None, "Laplace": 1.0, "Normal": 2.0, "GenNorm(3)": 3.0}
        assert settings.power() == powers[model]


def test_changes_come_before_the_row() -> None:
    changed = row_settings("1.1", "quick", dim=3, model="normal", training=TrainingSettings(7))
    assert (changed.dim, changed.model, changed.training.steps, changed.space) == (3, "normal", 7, "sphere")
    assert changed.laws()[0].space.dim == 3


@pytest.mark.parametrize("row", ["3.1", "1.13", "2.11", "1", "", "2.01", "banana", 2.1])
def test_unknown_rows_are_refused(row: Any) -> None:
    with pytest.raises(SpecError, match=r"row = .*: expected .*1\.1, .*2\.10"):
        row_settings(row, "fast")


@pytest.mark.parametrize("preset", ["slow", "", "Paper"])
def test_unknown_presets_are_refused(preset: str) -> None:
    with pytest.raises(SpecError, match=f"preset = '{preset}': expected paper, fast, quick"):
        preset_settings(preset)
    with pytest.raises(SpecError, match="preset"):
        row_settings("2.1", preset)


@pytest.mark.parametrize(
    ("marginal", "space", "text"),
    [
        ("uniform", "box", "uniform()"),
        ("uniform()", "sphere", "uniform()"),
        ("normal(0.3)", "unbounded", "normal(scale=0.3)"),
        ("gennorm(0.3, 4)", "box", "gennorm(scale=0.3, beta=4)"),
        ("gennorm(scale=0.3)", "sphere", "gennorm(scale=0.3, beta=3)"),
        ("vmf(2)", "sphere", "vmf(kappa=2)"),
    ],
)
def test_marginals(marginal: str, space: Any, text: str) -> None:
    settings = MLPSettings(space=space, marginal=marginal, conditional="normal(0.1)", model="normal")
    assert settings.laws()[0].text == text


@pytest.mark.parametrize(
    ("model", "p"),
    [("vmf", None), ("laplace", 1), ("normal", 2), ("gennorm(1)", 1), ("gennorm(2.5)", 2.5), ("gennorm( 3 )", 3)],
)
def test_powers(model: str, p: float | None) -> None:
    assert MLPSettings(space="sphere", conditional="vmf(1)", model_space="sphere", model=model).power() == p


BAD: list[tuple[dict[str, Any], str]] = [
    *[({"batch": value}, "batch = ") for value in (1, 0, -5, 2.5, True, "64", 2**21)],
    *[({"dim": value}, "dim = ") for value in (0, -1, 1.5, 1001, True)],
    *[({"samples": value}, "samples = ") for value in (0, 63, 1e4)],
    *[({"tau": value}, "tau = ") for value in (0, -1.0, math.inf, math.nan, "1", None)],
    *[({"magnitude": value}, "magnitude = ") for value in (0, -1.0, math.inf, math.nan)],
    *[
        ({"model": value}, "gennorm\\(P\\) with P of at least 1")
        for value in ("gennorm(0.5)", "gennorm(0)", "gennorm(-3)", "gennorm(nan)", "gennorm(inf)", "gennorm()")
    ],
    *[({"model": value}, "model = ") for value in ("gennorm", "gennorm(3", "3", "", "Laplace", "l1", "gennorm(3)x")],
    ({"samples": 80, "dim": 40}, "samples = 80"),  # of which one half fits a map from 40 codes
    ({"model": "vmf"}, "the dot product needs a sphere"),
    ({"model": "vmf", "model_space": "unbounded"}, "the dot product needs a sphere"),
    ({"conditional": "vmf(10)"}, "vmf over Box\\(10\\): expected a Sphere"),
    ({"space": "unbounded", "marginal": "normal(1)", "conditional": "vmf(10)"}, "expected a Sphere"),
    ({"conditional": "laplace(0)"}, "scale = 0"),
    ({"conditional": "laplace(-0.05)"}, "expected numbers above 0"),
    ({"conditional": "banana(1)"}, "unknown law 'banana'"),
    ({"conditional": ""}, "conditional ''"),
    ({"conditional": "gennorm(0.05, 1000)"}, "beta = 1000"),
    ({"space": "sphere", "conditional": "vmf(-1)"}, "kappa"),
    ({"marginal": "vmf(1)"}, "marginal: .*expected a Sphere"),
    ({"marginal": "banana"}, "marginal"),
    ({"marginal": "normal(0)"}, "marginal: .*expected numbers above 0"),
    ({"marginal": "share()"}, "marginal"),
    ({"space": "unbounded"}, "marginal: .*there is no such law"),
    ({"space": "torus"}, "space = 'torus': expected .*sphere, box, unbounded"),
    ({"space": "sphere", "dim": 1}, "[Ss]phere"),
]


@pytest.mark.parametrize(("wrong", "words"), BAD, ids=str)
def test_bad_values_are_refused_when_made(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        MLPSettings(**wrong)


@pytest.mark.parametrize("name", ["mode", "model_space", "init", "parametrisation"])
def test_other_choices_are_refused_when_made(name: str) -> None:
    wrong: dict[str, Any] = {name: "banana"}
    with pytest.raises(SpecError, match=f"{name} = 'banana'"):
        MLPSettings(**wrong)
    assert "supervised" in get_args(Mode)

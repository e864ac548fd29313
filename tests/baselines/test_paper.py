"""The published numbers: as the reference notes have them, and of laws that the library knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ident3d import conditional
from ident3d.baselines.paper import (
    KITTI_ROWS,
    MLP_ROWS,
    SUPERVISED_3DIDENT,
    THREEDIDENT_ROWS,
    MLPRow,
    Published,
    kitti_row,
    mlp_row,
)
from ident3d.errors import SpecError
from ident3d.spaces import Box, Real, Space, Sphere

SPACES: dict[str, Space] = {"sphere": Sphere(10), "box": Box(10), "unbounded": Real(10)}
NOTES = Path(__file__).resolve().parents[3] / "shared" / "reference" / "paper_tables.md"


def notes(table: int) -> list[list[str]]:
    """The cells of a table of the reference notes, below its headings."""
    if not NOTES.is_file():
        pytest.skip(f"{NOTES.name} is not beside the project")
    section = re.split(r"^## ", NOTES.read_text(), flags=re.MULTILINE)
    (text,) = (s for s in section if s.startswith((f"Table {table}", f"Tables {table}")))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(published: Published | None, digits: int = 2) -> str:
    return "" if published is None else f"{published.mean:.{digits}f}±{published.std:.{digits}f}"


def law(text: str) -> str:
    """A law of ours in the paper's notation."""
    names = {"vmf": "vMF", "normal": "Normal", "laplace": "Laplace", "gennorm": "GenNorm", "uniform": "uniform"}
    text = re.sub(r"^gennorm\((.*), 3\)$", r"gennorm(3; \1)", text)
    return re.sub(r"^[a-z]+", lambda match: names[match[0]], text)


@pytest.mark.parametrize("table", [1, 2])
def test_tables_1_and_2_are_those_of_the_notes(table: int) -> None:
    ours = [
        [
            row.space,
            law(row.marginal),
            law(row.conditional),
            row.model_space,
            "vMF(1)" if row.model == "vmf" else law(row.model),
            "yes" if row.matches else "no",
            number(row.identity),
            number(row.supervised),
            number(row.unsupervised),
        ]
        for row in MLP_ROWS
        if row.table == table
    ]
    assert ours == notes(table)


def test_table_3_is_that_of_the_notes() -> None:
    names = {"slowvae": "SlowVAE", "laplace": "Laplace", "normal": "Normal"}
    ours = [[f"{r.mean_dt_s:g} s", names[r.model], r.model_space, number(r.mcc, 1)] for r in KITTI_ROWS]
    assert ours == notes(3)


def test_tables_4_and_5_are_those_of_the_notes() -> None:
    names = {"normal": "Normal", "laplace": "Laplace", "augmentations": "augmentations (SimCLR)", "vmf": "vMF"}

    def both(test: Published | None, train: Published | None) -> str:
        return f"{number(test)} / {number(train) or '-'}" if test else ""

    ours = [
        [
            names[r.conditional],
            r.model_space,
            names[r.model],
            "yes" if r.matches else "no",
            both(r.identity_test, r.identity_train),
            both(r.test.r2, r.train.r2 if r.train else None),
            both(r.test.mcc, r.train.mcc if r.train else None),
        ]
        for r in THREEDIDENT_ROWS
    ]
    assert ours == notes(4)
    text = NOTES.read_text()
    for scores in SUPERVISED_3DIDENT.values():
        assert f"R2 {number(scores.r2)}, MCC {number(scores.mcc)}" in text


def test_rows_are_numbered_as_in_the_paper() -> None:
    assert [row.row for row in MLP_ROWS] == [*(f"1.{i}" for i in range(1, 13)), *(f"2.{i}" for i in range(1, 11))]
    assert [row.row for row in KITTI_ROWS] == [f"3.{i}" for i in range(1, 11)]
    assert [row.row for row in THREEDIDENT_ROWS] == [f"4.{i}" for i in range(1, 6)]
    assert all(row.score == {1: "r2", 2: "mcc"}[row.table] for row in MLP_ROWS)


@pytest.mark.parametrize("row", MLP_ROWS, ids=lambda row: row.row)
def test_laws_exist_over_their_spaces(row: MLPRow) -> None:
    space = SPACES[row.space]
    assert conditional(row.conditional, space).space.dim == 10
    assert conditional("uniform()" if row.marginal == "uniform" else row.marginal, space).space.dim == 10


def test_a_row_by_its_name() -> None:
    assert mlp_row("2.10") is MLP_ROWS[-1]
    assert mlp_row("2.1").row == "2.1"


@pytest.mark.parametrize("row", ["2.11", "0.1", "3.1", "", "2.1 ", "2", 2.1, 2, None, ["2.1"]])
def test_other_rows_are_refused_with_those_that_there_are(row: object) -> None:
    with pytest.raises(SpecError) as caught:
        mlp_row(row)  # type: ignore[arg-type]
    assert all(known.row in str(caught.value) for known in MLP_ROWS)
    assert repr(row) in str(caught.value)


def test_a_row_of_table_3_by_its_name() -> None:
    assert [kitti_row(row.row) for row in KITTI_ROWS] == list(KITTI_ROWS)
    assert kitti_row("3.10") is KITTI_ROWS[-1]
    assert kitti_row("3.1") is KITTI_ROWS[0]


@pytest.mark.parametrize("row", ["3.11", "3.0", "2.1", "", "3.1 ", "3", "3.01", 3.1, 3, None, ["3.1"]])
def test_other_rows_of_table_3_are_refused_with_those_that_there_are(row: object) -> None:
    with pytest.raises(SpecError) as caught:
        kitti_row(row)  # type: ignore[arg-type]
    listed = ", ".join(known.row for known in KITTI_ROWS)
    hint = "" if isinstance(row, str) else "a text, e.g. '3.1': "
    assert str(caught.value) == f"row = {row!r}: expected {hint}one of {listed}"

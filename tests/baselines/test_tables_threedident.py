"""Tables 4 and 5: the paper's numbers stand where they belong, and runs that are not comparable stand apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ident3d.baselines import mlp_settings
from ident3d.baselines.cli import main
from ident3d.baselines.paper import THREEDIDENT_ROWS, Published
from ident3d.baselines.results import Result
from ident3d.baselines.table_formats import to_text
from ident3d.baselines.tables import TableLine, table_rows, table_sheet, write_table
from ident3d.baselines.threedident_settings import Encoding, row_settings
from ident3d.baselines.training_settings import TrainingSettings
from ident3d.errors import SpecError
from ident3d.schema import to_plain

ROWS = ("4.1", "4.2", "4.3", "4.4", "4.5")
PUBLISHED = {
    "name": "3dident-v1",
    "scene": "3dident-v1",
    "resolution": 224,
    "samples": 250_000,
    "test_samples": 25_000,
    "latents": "00",
    "mean": [0.4, 0.4, 0.5],
}
SCORES = {
    "r2": 0.91,
    "mcc": 0.82,
    "mcc_spearman": 0.73,
    "train_r2": 0.64,
    "train_mcc": 0.55,
    "train_mcc_spearman": 0.46,
}
TEST_ONLY = {name: value for name, value in SCORES.items() if not name.startswith("train_")}


def made(
    row: str | None = "4.1",
    preset: str | None = "paper",
    mode: str = "unsupervised",
    *,
    start: str | None = None,
    seeds: Sequence[int] = (0,),
    scores: Mapping[str, float] = SCORES,
    data: Mapping[str, Any] = PUBLISHED,
    **changes: Any,
) -> Result:
    """A result with the settings of its row, or of `start`."""
    settings = row_settings(start or row or "4.1", preset or "paper", mode=mode, **changes)
    return Result(
        experiment="3dident",
        row=row,
        preset=preset,
        settings={**to_plain(settings), "data": dict(data)},
        seeds=tuple(seeds),
        scores={name: (value,) * len(seeds) for name, value in scores.items()},
        steps=settings.training.steps,
        device="Example GPU",
        versions={},
        wall_s=3600.0,
        finished="2026-01-31T12:00:00Z",
    )


def lines_of(table: int, row: str, label: str, results: Sequence[Result]) -> list[TableLine]:
    return [line for line in table_rows(table, results) if (line.row, line.label) == (row, label)]


def line_of(table: int, row: str, label: str, results: Sequence[Result]) -> TableLine:
    (line,) = lines_of(table, row, label, results)
    return line


def differs(table: int, result: Result) -> tuple[str, ...]:
    """What is said to differ, which is the same for all of a result's scores."""
    (found,) = {line.differs for line in table_rows(table, [result]) if line.here is not None}
    return found


@pytest.mark.parametrize("table", [4, 5])
def test_without_results_a_table_is_the_paper_s(table: int) -> None:
    rows = ROWS if table == 4 else ROWS[:4]
    expected = [(row, f"unsupervised {score}") for row in rows for score in ("R2", "MCC")]
    expected = [("4.1", "identity R2"), *expected, ("supervised", "supervised R2"), ("supervised", "supervised MCC")]
    lines = table_rows(table, [])
    assert [(line.row, line.label) for line in lines] == expected
    assert all(line.paper is not None and line.here is None for line in lines)


@pytest.mark.parametrize(
    ("row", "label", "test", "train"),
    [
        ("4.1", "identity R2", (5.25, 1.20), (5.35, 0.72)),
        ("4.1", "unsupervised R2", (96.73, 0.10), (97.83, 0.13)),
        ("4.2", "unsupervised MCC", (54.94, 0.02), (55.90, 2.22)),
        ("4.3", "unsupervised MCC", (98.38, 0.03), (98.94, 0.03)),
        ("4.4", "unsupervised R2", (65.74, 0.01), (66.73, 0.03)),
        ("supervised", "supervised R2", (98.67, 0.03), (99.98, 0.01)),
        ("supervised", "supervised MCC", (99.33, 0.01), (99.99, 0.01)),
    ],
)
def test_numbers_of_the_paper(row: str, label: str, test: tuple[float, float], train: tuple[float, float]) -> None:
    assert line_of(4, row, label, []).paper == Published(*test)
    assert line_of(5, row, label, []).paper == Published(*train)


def test_rows_say_what_they_are() -> None:
    about = {line.row: line.about for line in table_rows(4, [])}
    assert about["4.1"] == ("normal", "box", "normal", "yes")
    assert about["4.5"] == ("augmentations", "sphere", "vmf", "no")
    assert about["supervised"] == ("-", "unbounded", "-", "-")


@pytest.mark.parametrize(("table", "r2", "mcc"), [(4, 91, 82), (5, 64, 55)])
def test_a_line_shows_its_own_score(table: int, r2: float, mcc: float) -> None:
    results = [made("4.2"), made("4.1", mode="identity"), made(None, start="4.2", mode="supervised")]
    shown = {line.label: line.here.mean for line in table_rows(table, results) if line.here is not None}
    expected = {"identity R2": r2, "unsupervised R2": r2, "unsupervised MCC": mcc}
    assert shown == pytest.approx({**expected, "supervised R2": r2, "supervised MCC": mcc})
    line = line_of(table, "4.2", "unsupervised MCC", results)
    assert line.paper is not None
    assert line.difference == pytest.approx(mcc - line.paper.mean)


@pytest.mark.parametrize("table", [4, 5])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mode", ["unsupervised", "identity", "supervised"])
def test_the_paper_s_settings_do_not_differ(table: int, row: str, mode: str) -> None:
    unbounded = "4.2" if mode == "supervised" else None
    assert differs(table, made(row, "paper", mode, start=unbounded)) == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pairs": "exact"}, "pairs exact (matched)"),
        ({"conditional": "normal(0.1)"}, "conditional normal(0.1) (normal(0.05))"),
        ({"allow_self": True}, "allow_self yes (no)"),
        ({"match": "hnsw"}, "match hnsw (exact)"),
        ({"factors": ("hue", "x")}, "factors [hue, x] (none)"),
        ({"encoding": Encoding(network="resnet50")}, "network resnet50 (resnet18)"),
        ({"encoding": Encoding(space="unbounded")}, "space unbounded (box)"),
        ({"tau": 0.5}, "tau 0.5 (1)"),
        ({"batch": 128}, "batch 128 (512)"),
        ({"chunk": 64}, "chunk 64 (none)"),
        ({"training": TrainingSettings(steps=2_000)}, "steps 2,000 (200,000)"),
        ({"training": TrainingSettings(steps=200_000, precision="bf16")}, "precision bf16 (float32)"),
        ({"data": {**PUBLISHED, "resolution": 64}}, "resolution 64 (224)"),
        # Two settings are called samples: those that are scored, and those that there are.
        ({"data": {**PUBLISHED, "samples": 900}}, "data.samples 900 (250,000)"),
        ({"data": {**PUBLISHED, "scene": None}}, "scene none (3dident-v1)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_difference_is_named_with_both_values(changes: dict[str, Any], text: str) -> None:
    assert differs(4, made(**changes)) == differs(5, made(**changes)) == (text,)


def test_settings_of_one_set_are_no_difference_to_the_other() -> None:
    scored, tested = made(samples=1_000), made(data={**PUBLISHED, "test_samples": 900})
    assert (differs(4, scored), differs(5, scored)) == ((), ("samples 1,000 (25,000)",))
    assert (differs(4, tested), differs(5, tested)) == (("test_samples 900 (25,000)",), ())


def test_names_and_hashes_of_data_are_no_difference() -> None:
    assert differs(4, made(data={**PUBLISHED, "name": "copy", "latents": "ff", "mean": [0.1, 0.2, 0.3]})) == ()


LOSS: dict[str, Any] = {"tau": 0.5, "include_self": False, "positive_in_denominator": False}
PAIRS: dict[str, Any] = {"conditional": "laplace(0.1)", "match": "ivf", "allow_self": True, "pairs": "exact"}
DRIVEN: dict[str, Any] = {"batch": 64, "chunk": 8, "training": TrainingSettings(steps=1, learning_rate=1.0)}


def test_a_supervised_encoder_knows_no_pairs_and_no_model() -> None:
    changes = {**LOSS, **PAIRS, "model": "laplace"}
    assert differs(4, made(None, "paper", "supervised", start="4.2", **changes)) == ()
    driven = {name: value for name, value in DRIVEN.items() if name != "chunk"}  # which is for pairs
    seen = differs(4, made(None, "paper", "supervised", start="4.2", **driven))
    assert set(seen) == {"batch 64 (512)", "steps 1 (200,000)", "learning_rate 1 (0.0001)"}
    assert differs(4, made("4.1", "paper", "supervised")) == ("space box (unbounded)",)


def test_an_untrained_encoder_knows_what_it_is_alone() -> None:
    log = Encoding(parametrisation="log", magnitude=3.0)
    changes = {**LOSS, **PAIRS, **DRIVEN, "model": "laplace", "encoding": log}
    assert differs(4, made("4.1", "paper", "identity", **changes)) == ()
    other = Encoding(network="resnet50", space="sphere")
    seen = differs(5, made("4.1", "paper", "identity", encoding=other, samples=99, factors=("x",)))
    assert set(seen) == {
        *("network resnet50 (resnet18)", "space sphere (box)", "samples 99 (25,000)", "factors [x] (none)"),
    }


def test_views_of_a_picture_have_no_conditional() -> None:
    unmatched: dict[str, Any] = {"conditional": "laplace(0.1)", "match": "ivf", "allow_self": True}
    assert differs(4, made("4.5", **unmatched)) == ()
    seen = differs(4, made("4.5", pairs="matched", **unmatched))
    assert {"pairs matched (augmented)", "conditional laplace(0.1) (normal(0.05))", "match ivf (exact)"} <= set(seen)
    # Nothing is matched where pairs were rendered.
    assert differs(4, made("4.1", pairs="exact", match="ivf", allow_self=True)) == ("pairs exact (matched)",)


def test_seeds_of_several_files_are_pooled() -> None:
    turned = dict(reversed(PUBLISHED.items()))
    results = [made(), made(seeds=(1, 2), scores={**SCORES, "r2": 0.61}, data=turned)]
    line = line_of(4, "4.1", "unsupervised R2", results)
    assert line.here is not None
    assert line.here.seeds == 3
    assert line.here.mean == pytest.approx(71)


@pytest.mark.parametrize("key", ["name", "latents", "mean"])
@pytest.mark.parametrize("mode", ["unsupervised", "identity", "supervised"])
def test_runs_on_different_data_stand_apart(mode: str, key: str) -> None:
    other = made("4.1", "paper", mode, seeds=(1,), data={**PUBLISHED, key: "b"})
    lines = [line for line in table_rows(4, [made("4.1", "paper", mode), other]) if line.label == f"{mode} R2"]
    lines = [line for line in lines if line.here is not None]
    assert [line.here.seeds for line in lines if line.here is not None] == [1, 1]
    assert [line.differs[-1] for line in lines] == [
        f"data.{key} {'[0.4, 0.4, 0.5]' if key == 'mean' else PUBLISHED[key]}",
        f"data.{key} b",
    ]


def test_a_note_is_of_one_dataset() -> None:
    """Rows on different data do not share a letter; data are named by what tells them apart, and no more."""
    first, second = {**PUBLISHED, "name": "a", "latents": "1"}, {**PUBLISHED, "name": "b", "latents": "2"}
    third = {**second, "latents": "3"}
    results = [made("4.1", data=first), made("4.2", data=second), made("4.3", data=third), made("4.4", data=first)]
    found = {line.row: line.differs for line in table_rows(4, results) if line.results}
    assert found["4.1"] == found["4.4"] == ("data.name a",)
    assert found["4.2"] == ("data.name b", "data.latents 2")
    assert found["4.3"] == ("data.name b", "data.latents 3")
    assert [mark for mark, _ in table_sheet(4, results).notes] == ["a", "b", "c"]


def test_supervised_runs_are_taken_together_whatever_their_row() -> None:
    runs = [made(row, "fast", "supervised", start="4.2", seeds=(i,)) for i, row in enumerate((None, "4.2", "4.4"))]
    boxed = made("4.1", "fast", "supervised", seeds=(7,))
    lines = lines_of(4, "supervised", "supervised MCC", [*runs, boxed])
    assert [line.here.seeds for line in lines if line.here is not None] == [3, 1]
    assert [any("space box" in text for text in line.differs) for line in lines] == [False, True]
    assert {line.row for line in table_rows(4, runs) if line.here is not None} == {"supervised"}


def test_untrained_encoders_of_no_row_stand_at_the_first() -> None:
    results = [made(None, "paper", "identity"), made("4.1", "paper", "identity", seeds=(1,))]
    line = line_of(4, "4.1", "identity R2", results)
    assert line.here is not None
    assert line.here.seeds == 2
    assert [found.row for found in table_rows(4, results) if found.here is not None] == ["4.1"]
    # The paper leaves the other rows blank; a result of one is shown there.
    other = line_of(4, "4.4", "identity R2", [made("4.4", "paper", "identity")])
    assert other.paper is None
    assert other.here is not None


def test_only_runs_that_stand_nowhere_are_counted_as_left_out() -> None:
    taken = [made(None, "paper", "identity"), made(None, "paper", "supervised"), made("4.3")]
    assert not any("Left out" in text for text in table_sheet(4, taken).remarks)
    sheet = table_sheet(4, [*taken, made(None), made(None, "fast")])
    assert sheet.remarks[-1] == "Left out: 2 results of no row of the paper."
    assert all(line.here is None for line in table_rows(4, [made(None)]))


def test_results_of_other_experiments_are_left_out() -> None:
    settings = to_plain(mlp_settings.row_settings("1.1", "paper", mode="supervised"))
    other = dataclasses.replace(made(None), experiment="mlp", settings=settings)
    assert all(line.here is None for line in table_rows(4, [other]))
    assert table_rows(1, [made()]) == table_rows(1, [])


def test_presets_stand_apart_in_their_order() -> None:
    results = [made(preset=preset) for preset in ("quick", "paper", "fast", None)]
    lines = lines_of(4, "4.1", "unsupervised R2", results)
    assert [line.preset for line in lines] == ["paper", "fast", "quick", None]


def test_without_scores_of_the_training_set_there_is_no_line_in_table_5() -> None:
    tested = made("4.1", scores=TEST_ONLY)
    assert line_of(4, "4.1", "unsupervised R2", [tested]).here is not None
    assert not any("Left out" in text for text in table_sheet(4, [tested]).remarks)
    whole = made("4.2")
    assert [line.row for line in table_rows(5, [tested, whole]) if line.here is not None] == ["4.2", "4.2"]
    remark = table_sheet(5, [tested, whole]).remarks[-1]
    assert remark == "Left out where they lack train_r2 or train_mcc: 1 result."


def test_a_row_that_table_5_leaves_blank_is_shown_with_results() -> None:
    line = line_of(5, "4.5", "unsupervised R2", [made("4.5")])
    assert line.paper is None
    assert line.here is not None


@pytest.mark.parametrize("lacking", ["r2", "mcc"])
def test_a_result_without_scores_of_the_test_set_is_refused(lacking: str) -> None:
    scores = {name: value for name, value in SCORES.items() if name != lacking}
    with pytest.raises(SpecError, match=rf"result of row 4\.1, preset paper.* has no {lacking},"):
        table_rows(4, [made(scores=scores)])


@pytest.mark.parametrize("lacking", ["resolution", "samples", "test_samples", "scene", "name"])
def test_a_result_that_does_not_tell_its_data_is_refused(lacking: str) -> None:
    """It would be taken for one on the paper's."""
    data = {name: value for name, value in PUBLISHED.items() if name != lacking}
    for table in (4, 5):
        with pytest.raises(SpecError, match=rf"row 4\.1.* its settings lack data\.{lacking};"):
            table_rows(table, [made(data=data)])


@pytest.mark.parametrize("mode", ["contrastive", None, ["identity"]])
def test_an_unknown_mode_is_refused(mode: object) -> None:
    result = made()
    with pytest.raises(SpecError, match=r"mode = .*identity, unsupervised, supervised"):
        table_rows(4, [dataclasses.replace(result, settings={**result.settings, "mode": mode})])


@pytest.mark.parametrize("row", ["4.6", "5.1", "2.1", "supervised", ""])
def test_results_of_unknown_rows_are_refused(row: str) -> None:
    with pytest.raises(SpecError, match=r"expected one of 4\.1, 4\.2, 4\.3, 4\.4, 4\.5"):
        dataclasses.replace(made(), row=row)


def test_every_row_of_the_paper_is_tested() -> None:
    assert tuple(row.row for row in THREEDIDENT_ROWS) == ROWS


def many() -> list[Result]:
    small = {**PUBLISHED, "name": "teapots", "scene": None, "resolution": 64, "samples": 20_000, "test_samples": 2_000}
    results = [made(row, preset, data=small, seeds=range(10)) for row in ROWS for preset in ("paper", "fast", "quick")]
    results += [made(row, "quick", mode, data=small) for row in (*ROWS, None) for mode in ("identity", "supervised")]
    return [*results, made("4.1", "quick", data={**small, "name": "cups"}, pairs="exact", chunk=64)]


@pytest.mark.parametrize(("table", "title"), [(4, "Test R2 and MCC on 3DIdent"), (5, "Training R2 and MCC on 3DIdent")])
def test_text_fits_160_columns(table: int, title: str) -> None:
    text = to_text(table_sheet(table, many()))
    assert max(map(len, text.splitlines())) <= 160
    assert all(f"\n{row} " in text for row in (*ROWS, "supervised"))
    assert text.startswith(f"Table {table} of Zimmermann et al. 2021")
    assert title in text.splitlines()[0]
    assert "over 3 seeds" in text


def test_tables_are_written(tmp_path: Path) -> None:
    write_table(4, many(), tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    write_table(5, [made("4.4", scores={**SCORES, "train_mcc": 0.5272})], tmp_path / "table.md")
    row = "|  |  |  |  |  | unsupervised MCC | 42.72±3.20 | paper | 52.72 (1) | +10.00 |  |"
    assert row in (tmp_path / "table.md").read_text().splitlines()


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made("4.3").save(tmp_path)
    for table, cells in ((4, "96.87±0.08 paper 91.00 (1) -5.87"), (5, "97.95±0.05 paper 64.00 (1) -33.95")):
        with pytest.raises(SystemExit) as stop:
            main(["table", str(table), "--results", str(tmp_path)])
        assert stop.value.code == 0
        assert cells in " ".join(capsys.readouterr().out.split())

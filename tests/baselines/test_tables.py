"""Tables: every row of the paper stands once or more, pooled results are those of the seeds, differences are named."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ident3d.baselines.mlp_settings import row_settings
from ident3d.baselines.paper import MLP_ROWS, mlp_row
from ident3d.baselines.results import Result
from ident3d.baselines.table_formats import to_text
from ident3d.baselines.tables import TableLine, caption, table_rows, table_sheet, write_table
from ident3d.errors import DatasetError, SpecError
from ident3d.schema import to_plain


def made(
    row: str | None = "2.1",
    preset: str = "quick",
    mode: str = "unsupervised",
    *,
    seeds: Sequence[int] = (0, 1),
    scores: Sequence[float] = (0.9, 0.8),
    finished: str = "2026-01-31T12:00:00Z",
    **changes: Any,
) -> Result:
    settings = row_settings(row or "2.1", preset, mode=mode, **changes)
    return Result(
        experiment="mlp",
        row=row,
        preset=preset,
        settings=to_plain(settings),
        seeds=tuple(seeds),
        scores={"mcc": tuple(scores), "r2": tuple(s / 2 for s in scores)},
        steps=settings.training.steps,
        device="cpu (Example CPU, 2 threads)",
        versions={},
        wall_s=60.0,
        finished=finished,
    )


def lines_of(row: str, results: Sequence[Result], label: str = "unsupervised") -> list[TableLine]:
    return [line for line in table_rows(mlp_row(row).table, results) if (line.row, line.label) == (row, label)]


def line_of(row: str, results: Sequence[Result], label: str = "unsupervised") -> TableLine:
    (line,) = lines_of(row, results, label)
    return line


@pytest.mark.parametrize("table", [1, 2])
def test_without_results_a_table_is_the_paper_s(table: int) -> None:
    expected = [
        (row.row, mode, getattr(row, mode))
        for row in MLP_ROWS
        if row.table == table
        for mode in ("identity", "supervised", "unsupervised")
        if getattr(row, mode) is not None
    ]
    lines = table_rows(table, [])
    assert [(line.row, line.label, line.paper) for line in lines] == expected
    assert all(line.here is None and line.difference is None for line in lines)


@pytest.mark.parametrize(("row", "share"), [("1.1", 0.5), ("2.1", 1.0)])
def test_a_row_shows_its_own_score(row: str, share: float) -> None:
    line = line_of(row, [made(row, scores=(0.9, 0.8))])
    assert line.here is not None
    assert line.here.mean == pytest.approx(85 * share)
    assert line.here.std == pytest.approx(share * statistics.stdev([90, 80]))
    published = mlp_row(row).unsupervised
    assert published is not None
    assert line.difference == pytest.approx(85 * share - published.mean)


def test_a_score_that_the_paper_leaves_blank_is_shown() -> None:
    assert lines_of("2.3", [], "supervised") == []
    line = line_of("2.3", [made("2.3", mode="supervised")], "supervised")
    assert line.paper is None
    assert line.difference is None
    assert line.here is not None


def test_seeds_of_several_files_are_pooled() -> None:
    line = line_of("2.1", [made(seeds=(0, 1), scores=(0.9, 0.8)), made(seeds=(7,), scores=(0.4,))])
    assert line.here is not None
    assert line.here.seeds == 3
    assert line.here.mean == pytest.approx(70)
    assert len(line.results) == 2


def test_of_a_seed_that_is_there_twice_the_last_run_counts() -> None:
    old = made(seeds=(0, 1), scores=(0.9, 0.8), finished="2026-01-31T12:00:00Z")
    new = made(seeds=(1, 2), scores=(0.6, 0.3), finished="2026-01-31T12:00:00.5+00:00")
    for results in ([old, new], [new, old]):
        line = line_of("2.1", results)
        assert line.here is not None
        assert line.here.seeds == 3
        assert line.here.mean == pytest.approx(60)
    newest = made(seeds=(0, 1, 2), scores=(0.1, 0.1, 0.1), finished="2027-01-01T00:00:00Z")
    # Runs of which no seed is left are no part of the wall time.
    assert line_of("2.1", [old, new, newest]).results == (newest,)


def test_presets_stand_apart_in_their_order() -> None:
    lines = lines_of("2.1", [made(preset="quick"), made(preset="paper"), made(preset="fast")])
    assert [line.preset for line in lines] == ["paper", "fast", "quick"]
    assert [line.here.seeds for line in lines if line.here] == [2, 2, 2]


def test_presets_stand_apart_even_where_their_settings_are_the_same() -> None:
    runs = [
        made(preset="paper"),
        dataclasses.replace(made(preset="paper"), preset=None),
        dataclasses.replace(made(), preset="mine"),
    ]
    assert [line.preset for line in lines_of("2.1", runs)] == ["paper", "mine", None]


def test_other_settings_stand_apart() -> None:
    lines = lines_of("2.1", [made(preset="paper"), made(preset="paper", tau=0.5, seeds=(3,), scores=(0.5,))])
    assert [line.differs for line in lines] == [(), ("tau 0.5 (1)",)]
    assert [line.here.seeds for line in lines if line.here] == [2, 1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"batch": 1024}, "batch 1,024 (6,144)"),
        ({"include_self": False}, "include_self no (yes)"),
        ({"widths": (10, 20)}, "widths [10, 20] ([10, 50, 50, 50, 50, 10])"),
        ({"conditional": "normal(0.1)"}, "conditional normal(0.1) (laplace(0.05))"),
        ({"model_space": "unbounded"}, "model_space unbounded (box)"),
    ],
)
def test_a_difference_is_named_with_both_values(changes: dict[str, Any], text: str) -> None:
    assert line_of("2.1", [made(preset="paper", **changes)]).differs == (text,)


def test_nested_settings_are_named_by_their_last_part() -> None:
    differs = line_of("2.1", [made(preset="quick")]).differs
    assert {"steps 3,500 (300,000)", "learning_rate 0.003 (0.0001)", "schedule cosine (constant)"} <= set(differs)
    assert "warmup 0.03 (0)" in differs
    assert "scale_learning_rate 0.01 (none)" in differs


@pytest.mark.parametrize("row", MLP_ROWS, ids=lambda row: row.row)
@pytest.mark.parametrize("mode", ["identity", "supervised", "unsupervised"])
def test_the_paper_s_settings_do_not_differ(row: Any, mode: str) -> None:
    assert line_of(row.row, [made(row.row, "paper", mode)], mode).differs == ()


def test_settings_that_a_mode_does_not_see_are_no_difference() -> None:
    changes: dict[str, Any] = {"tau": 0.5, "include_self": False, "positive_in_denominator": False}
    assert line_of("2.1", [made(preset="paper", mode="supervised", **changes)], "supervised").differs == ()
    # No encoder, no preset: observations are scored as they are.
    assert line_of("2.1", [made(mode="identity", batch=2)], "identity").differs == ()
    assert line_of("2.1", [made(mode="identity", layers=2)], "identity").differs == ("layers 2 (3)",)
    one = made("1.1", mode="supervised", batch=7)
    assert "batch 7 (6,144)" in line_of("1.1", [one], "supervised").differs


def changed(result: Result, **settings: Any) -> Result:
    """A result with other settings; those that are ... are left out."""
    plain = {name: value for name, value in {**result.settings, **settings}.items() if value is not ...}
    return dataclasses.replace(result, settings=plain)


def test_settings_of_other_versions() -> None:
    now = made(preset="paper")
    # One that came later, and numbers that JSON of another writer has as 1 instead of 1.0.
    older, same = changed(now, whiten=...), changed(now, tau=1)
    line = line_of("2.1", [now, older, same])
    assert line.differs == ()
    newer = line_of("2.1", [changed(now, colour="red\n")])
    assert newer.differs == (r"colour 'red\n' (no such setting)",)
    twice = line_of("2.1", [changed(now, training={**now.settings["training"], "batch": 3})])
    assert twice.differs == ("training.batch 3 (no such setting)",)


@pytest.mark.parametrize("mode", [..., "contrastive", 3, ["identity"], None])
def test_an_unknown_mode_is_refused(mode: object) -> None:
    with pytest.raises(SpecError, match=r"result of row 2\.1, preset quick.* mode = "):
        table_rows(2, [changed(made(), mode=mode)])


def test_a_result_without_the_score_is_refused() -> None:
    with pytest.raises(SpecError, match="has no mcc"):
        table_rows(2, [dataclasses.replace(made(), scores={"r2": (0.1, 0.2)})])


@pytest.mark.parametrize("table", [0, 6, -1, "1", None, True])
def test_other_tables_are_refused(table: Any) -> None:
    with pytest.raises(SpecError, match="expected one of 1, 2, 3, 4, 5"):
        table_rows(table, [])


def test_results_of_other_rows_are_left_out() -> None:
    sheet = table_sheet(1, [made("2.1"), made(None), made(None)])
    assert all(line.here is None for line in table_rows(1, [made("2.1"), made(None)]))
    assert sheet.remarks[-1] == "Left out: 2 results of no row of the paper."
    assert not any("Left out" in text for text in table_sheet(1, [made("2.1")]).remarks)


def test_the_caption_counts_runs_once() -> None:
    results = [made(), made(seeds=(5,), scores=(0.5,)), made("2.3"), made("1.1")]
    text = caption(table_rows(2, results))
    assert text == "Here: 2 to 3 seeds a line; 3.0 minutes of wall time in 3 runs, on cpu (Example CPU, 2 threads)."
    one = caption(table_rows(2, [made(seeds=(5,), scores=(0.5,))]))
    assert one == "Here: 1 seed a line; 60 seconds of wall time in 1 run, on cpu (Example CPU, 2 threads)."
    assert caption(table_rows(2, [])) == "Here: no results yet."


def test_notes_are_shared_and_in_the_order_of_the_lines() -> None:
    sheet = table_sheet(2, [made("2.1", "fast"), made("2.3", "quick"), made("2.5", "fast"), made("2.7", "paper")])
    # Of 2.1, the first lines are identity and supervised, which have no runs.
    marks = {row[0]: row[-1] for row in sheet.rows if row[0]} | {"2.1": sheet.rows[2][-1]}
    assert [marks[row] for row in ("2.1", "2.3", "2.5", "2.7", "2.8")] == ["a", "b", "a", "", ""]
    assert [mark for mark, _ in sheet.notes] == ["a", "b"]
    assert "steps 3,500 (300,000)" in sheet.notes[1][1]


def test_marks_go_on_after_z() -> None:
    results = [made("2.1", "paper", tau=1 + i / 100) for i in range(1, 30)]
    assert [mark for mark, _ in table_sheet(2, results).notes][24:] == ["y", "z", "aa", "ab", "ac"]


@pytest.mark.parametrize("table", [1, 2])
def test_text_fits_160_columns(table: int) -> None:
    rows = [row.row for row in MLP_ROWS if row.table == table]
    results = [made(row, preset, mode) for row in rows for preset in ("paper", "quick") for mode in ("identity",)]
    results += [made(row, preset) for row in rows for preset in ("paper", "fast", "quick")]
    text = to_text(table_sheet(table, results))
    assert max(map(len, text.splitlines())) <= 160
    assert all(f"\n{row} " in text for row in rows)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_figures_are_written(suffix: str, magic: bytes, tmp_path: Path) -> None:
    write_table(2, [made(), made("2.3", "paper")], tmp_path / f"table{suffix}")
    assert (tmp_path / f"table{suffix}").read_bytes().startswith(magic)


def test_texts_are_written(tmp_path: Path) -> None:
    results = [made("2.1", "paper", scores=(0.9862, 0.9872))]
    for suffix in (".md", ".TXT"):
        write_table(2, results, tmp_path / f"table{suffix}")
    for text in ((tmp_path / "table.md").read_text(), (tmp_path / "table.TXT").read_text()):
        assert "98.62±0.05" in text
        assert "98.67±0.07 (2)" in text
        assert "+0.05" in text
        assert "Table 2 of Zimmermann et al. 2021" in text
        assert "the number of seeds" in text
        assert "sample standard deviation (n - 1)" in text


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    # Refused for its name, before results are looked at: these would be refused too.
    with pytest.raises(SpecError, match=r"ends in \.md, \.txt, \.png, \.pdf, \.svg"):
        write_table(9, [], tmp_path / "table.html")
    with pytest.raises(SpecError, match="make it first"):
        write_table(9, [], tmp_path / "absent" / "table.md")
    (tmp_path / "taken.md").mkdir()
    with pytest.raises(DatasetError, match=r"taken\.md"):
        write_table(1, [], tmp_path / "taken.md")

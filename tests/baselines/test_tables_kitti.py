"""Table 3: the paper's numbers, and results on synthetic masks that no table shows without calling them so."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ident3d.baselines import threedident_settings
from ident3d.baselines.cli import main
from ident3d.baselines.kitti_settings import row_settings
from ident3d.baselines.paper import KITTI_ROWS, Published
from ident3d.baselines.results import Result
from ident3d.baselines.table_formats import to_figure, to_text
from ident3d.baselines.tables import TableLine, table_rows, table_sheet, write_table
from ident3d.baselines.training_settings import TrainingSettings
from ident3d.errors import SpecError
from ident3d.schema import to_plain

MASKS = {"name": "kitti-masks", "synthetic": False, "sequences": 99, "frames": 12_000, "seed": None}
SYNTHETIC = {"name": "synthetic-silhouettes", "synthetic": True, "sequences": 500, "frames": 20_000, "seed": 0}
ROWS = [row.row for row in KITTI_ROWS]

PLAIN_TITLE = "Table 3 of Zimmermann et al. 2021, the paper beside ident3d on KITTI Masks: MCC (Spearman), in %"
SYNTHETIC_TITLE = (
    "Table 3 of Zimmermann et al. 2021, the paper on KITTI Masks beside ident3d on SYNTHETIC silhouettes, which are "
    "not KITTI Masks: MCC (Spearman), in %"
)
MIXED_TITLE = (
    "Table 3 of Zimmermann et al. 2021, the paper on KITTI Masks beside ident3d on KITTI Masks and, in the lines that "
    "say so, on SYNTHETIC silhouettes, which are not KITTI Masks: MCC (Spearman), in %"
)


def made(
    row: str | None = "3.2",
    preset: str | None = "paper",
    *,
    start: str | None = None,
    seeds: Sequence[int] = (0, 1),
    scores: Sequence[float] = (0.9, 0.8),
    data: Mapping[str, Any] = MASKS,
    **changes: Any,
) -> Result:
    """A result with the settings of its row, or of `start`."""
    settings = row_settings(start or row or "3.2", preset or "paper", **changes)
    return Result(
        experiment="kitti",
        row=row,
        preset=preset,
        settings={**to_plain(settings), "data": dict(data)},
        seeds=tuple(seeds),
        scores={"mcc_spearman": tuple(scores), "mcc": tuple(s / 2 for s in scores), "r2": tuple(s / 3 for s in scores)},
        steps=settings.training.steps,
        device="Example GPU",
        versions={},
        wall_s=60.0,
        finished="2026-01-31T12:00:00Z",
    )


def changed(result: Result, **settings: Any) -> Result:
    """A result with other settings, even such as KittiSettings refuses."""
    return dataclasses.replace(result, settings=to_plain({**result.settings, **settings}))


def lines_of(row: str, results: Sequence[Result], label: str = "MCC") -> list[TableLine]:
    return [line for line in table_rows(3, results) if (line.row, line.label) == (row, label)]


def line_of(row: str, results: Sequence[Result], label: str = "MCC") -> TableLine:
    (line,) = lines_of(row, results, label)
    return line


def differs(result: Result) -> tuple[str, ...]:
    (line,) = (line for line in table_rows(3, [result]) if line.here is not None)
    return line.differs


def column(results: Sequence[Result], heading: str) -> list[str]:
    sheet = table_sheet(3, results)
    return [row[sheet.headings.index(heading)] for row in sheet.rows]


def test_without_results_a_table_is_the_paper_s() -> None:
    lines = table_rows(3, [])
    assert [(line.row, *line.about, line.paper) for line in lines] == [
        ("3.1", "0.05 s", "SlowVAE", "unbounded", Published(66.1, 4.5)),
        ("3.2", "0.05 s", "contrastive, laplace", "unbounded", Published(77.1, 1.0)),
        ("3.3", "0.05 s", "contrastive, laplace", "box", Published(74.1, 4.4)),
        ("3.4", "0.05 s", "contrastive, normal", "unbounded", Published(58.3, 5.4)),
        ("3.5", "0.05 s", "contrastive, normal", "box", Published(59.9, 5.5)),
        ("3.6", "0.15 s", "SlowVAE", "unbounded", Published(79.6, 5.8)),
        ("3.7", "0.15 s", "contrastive, laplace", "unbounded", Published(79.4, 1.9)),
        ("3.8", "0.15 s", "contrastive, laplace", "box", Published(80.9, 3.8)),
        ("3.9", "0.15 s", "contrastive, normal", "unbounded", Published(60.2, 8.7)),
        ("3.10", "0.15 s", "contrastive, normal", "box", Published(68.4, 6.7)),
    ]
    assert all(line.here is None and line.difference is None and line.label == "MCC" for line in lines)
    assert table_sheet(3, []).title == PLAIN_TITLE
    assert set(column([], "data")) == {"-"}


def test_numbers_have_the_decimals_that_the_paper_prints() -> None:
    assert column([], "paper")[:2] == ["66.1±4.5", "77.1±1.0"]
    assert "over 10 seeds, as published" in table_sheet(3, []).remarks[1]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_shows_its_spearman_mcc(row: str) -> None:
    results = [made(row)]
    line = line_of(row, results)
    assert line.here is not None
    assert line.paper is not None
    assert line.here.mean == pytest.approx(85)
    assert line.here.std == pytest.approx(statistics.stdev([90, 80]))
    assert line.difference == pytest.approx(85 - line.paper.mean)
    assert [found.row for found in table_rows(3, results) if found.here is not None] == [row]


def test_seeds_of_several_files_are_pooled() -> None:
    turned = dict(reversed(MASKS.items()))
    line = line_of("3.2", [made(), made(seeds=(7,), scores=(0.4,), data=turned)])
    assert line.here is not None
    assert line.here.seeds == 3
    assert line.here.mean == pytest.approx(70)


def test_presets_stand_apart_in_their_order() -> None:
    lines = lines_of("3.1", [made("3.1", preset) for preset in ("quick", "paper", None)])
    assert [line.preset for line in lines] == ["paper", "quick", None]


# synthetic data


@pytest.mark.parametrize("preset", ["paper", "quick"])
@pytest.mark.parametrize("row", ROWS)
def test_synthetic_data_stand_in_the_title_and_have_no_difference(row: str, preset: str) -> None:
    results = [made(row, preset, data=SYNTHETIC)]
    line = line_of(row, results)
    assert line.here is not None
    assert line.paper is not None
    assert line.difference is None
    assert not line.comparable
    assert line.differs[-1] == "synthetic yes (no)"
    sheet = table_sheet(3, results)
    assert sheet.title == SYNTHETIC_TITLE
    assert sheet.remarks[0].startswith("Lines on SYNTHETIC silhouettes have no here - paper: the paper's scores are of")
    assert "not comparable" in sheet.remarks[2]
    place = ROWS.index(row)
    assert column(results, "here - paper") == ["-"] * 10
    assert column(results, "paper")[place] == f"{line.paper.mean}±{line.paper.std}"
    assert [cell for cell in column(results, "data") if cell != "-"] == ["SYNTHETIC silhouettes"]


def test_real_masks_have_a_plain_title_and_differences() -> None:
    results = [made(row) for row in ROWS]
    sheet = table_sheet(3, results)
    assert sheet.title == PLAIN_TITLE
    assert column(results, "here - paper")[:2] == ["+18.90", "+7.90"]
    assert set(column(results, "data")) == {"KITTI Masks"}
    assert "SYNTHETIC" not in to_text(sheet)
    assert "comparable" not in to_text(sheet)


def test_a_table_of_both_says_so_and_tells_them_apart() -> None:
    results = [made("3.1"), made("3.1", data=SYNTHETIC), made("3.4", data=SYNTHETIC), made("3.5")]
    sheet = table_sheet(3, results)
    assert sheet.title == MIXED_TITLE
    assert sheet.remarks[0].startswith("Lines on SYNTHETIC silhouettes")
    lines = [line for line in table_rows(3, results) if line.here is not None]
    assert [line.row for line in lines] == ["3.1", "3.1", "3.4", "3.5"]
    assert [line.here.seeds for line in lines if line.here] == [2, 2, 2, 2]  # never one over both
    assert [line.difference is None for line in lines] == [False, True, True, False]
    names = [cell for cell in column(results, "data") if cell != "-"]
    assert names == ["KITTI Masks", "SYNTHETIC silhouettes", "SYNTHETIC silhouettes", "KITTI Masks"]
    assert sheet.notes == (("a", "synthetic yes (no)"),)


def test_only_results_that_are_shown_are_in_the_title() -> None:
    assert table_sheet(3, [made(None, data=SYNTHETIC), made("3.1")]).title == PLAIN_TITLE
    assert table_sheet(3, [made(None), made("3.1", data=SYNTHETIC)]).title == SYNTHETIC_TITLE


@pytest.mark.parametrize("value", [None, 0, 1, "no", "false", [], {"no": False}])
def test_what_does_not_say_that_it_is_real_is_taken_for_synthetic(value: object) -> None:
    data = {**MASKS, "synthetic": value}
    if isinstance(value, dict):
        with pytest.raises(SpecError, match=r"lack data\.synthetic;"):
            table_rows(3, [made(data=data)])
        return
    assert table_sheet(3, [made(data=data)]).title == SYNTHETIC_TITLE
    assert line_of("3.2", [made(data=data)]).difference is None


def test_other_tables_compare_whatever_their_data_say() -> None:
    data = {"name": "a", "scene": None, "resolution": 64, "samples": 1000, "test_samples": 100, "synthetic": True}
    plain = to_plain(threedident_settings.row_settings("4.1", "paper"))
    scores: dict[str, tuple[float, ...]] = {"r2": (0.9, 0.8), "mcc": (0.9, 0.8)}
    result = dataclasses.replace(
        made(None), experiment="3dident", row="4.1", settings={**plain, "data": data}, scores=scores
    )
    lines = [line for line in table_rows(4, [result]) if line.here is not None]
    assert all(line.difference is not None for line in lines)
    sheet = table_sheet(4, [result])
    assert sheet.title.startswith("Table 4 of Zimmermann et al. 2021, the paper beside ident3d: Test R2")
    assert "data" not in sheet.headings


# settings


@pytest.mark.parametrize("row", ROWS)
def test_the_paper_s_settings_do_not_differ(row: str) -> None:
    assert differs(made(row)) == ()
    assert differs(made(row, data={**MASKS, "name": "copy", "sequences": 3, "frames": 9, "seed": 1})) == ()


BOTH = [
    ({"max_delta_t": 5}, "max_delta_t 5 (1)"),
    ({"dim": 3}, "dim 3 (10)"),
    ({"batch": 64}, "batch 64 (32)"),
    ({"samples": 2_000}, "samples 2,000 (10,000)"),
    ({"training": TrainingSettings(steps=2_000)}, "steps 2,000 (300,000)"),
    ({"training": TrainingSettings(steps=300_000, precision="bf16")}, "precision bf16 (float32)"),
]
CONTRASTIVE = [
    ({"conditional": "normal"}, "conditional normal (laplace)"),
    ({"tau": 0.5}, "tau 0.5 (1)"),
    ({"include_self": False}, "include_self no (yes)"),
    ({"positive_in_denominator": False}, "positive_in_denominator no (yes)"),
    ({"magnitude": 7.0}, "magnitude 7 (1)"),
    ({"parametrisation": "log"}, "parametrisation log (linear)"),
    ({"training": TrainingSettings(steps=300_000, scale_learning_rate=0.1)}, "scale_learning_rate 0.1 (none)"),
]
SLOWVAE = [({"beta": 2.0}, "beta 2 (1)"), ({"gamma": 0.0}, "gamma 0 (10)"), ({"rate": 1.0}, "rate 1 (6)")]


@pytest.mark.parametrize(("changes", "text"), [*BOTH, *CONTRASTIVE, *SLOWVAE], ids=lambda value: str(value)[:40])
def test_a_difference_is_named_where_the_model_sees_it(changes: dict[str, Any], text: str) -> None:
    one = (changes, text)
    assert differs(changed(made("3.2"), **changes)) == (() if one in SLOWVAE else (text,))
    assert differs(changed(made("3.1"), **changes)) == (() if one in CONTRASTIVE else (text,))


def test_the_model_space_counts() -> None:
    assert differs(made("3.2", model_space="box")) == ("model_space box (unbounded)",)


def test_what_a_model_does_not_see_does_not_part_its_seeds() -> None:
    unseen = made("3.1", seeds=(5,), scores=(0.1,), tau=0.1, magnitude=7.0, parametrisation="log")
    line = line_of("3.1", [made("3.1"), unseen])
    assert line.here is not None
    assert line.here.seeds == 3


def test_a_row_s_name_does_not_lend_its_number_to_the_other_model() -> None:
    other = made("3.1", model="contrastive", tau=0.5)
    line = line_of("3.1", [other], "MCC, contrastive")
    assert line.here is not None
    assert (line.paper, line.difference, line.differs) == (None, None, ("tau 0.5 (1)",))
    assert line_of("3.1", [other]).here is None
    assert line_of("3.7", [made("3.7", model="slowvae")], "MCC, SlowVAE").paper is None
    lines = [(line.row, line.label) for line in table_rows(3, [other, made("3.2", model="slowvae")])]
    assert lines[:4] == [("3.1", "MCC"), ("3.1", "MCC, contrastive"), ("3.2", "MCC"), ("3.2", "MCC, SlowVAE")]


@pytest.mark.parametrize("key", ["name", "sequences", "frames", "seed"])
@pytest.mark.parametrize("data", [MASKS, SYNTHETIC], ids=["masks", "synthetic"])
def test_runs_on_different_data_stand_apart(data: dict[str, Any], key: str) -> None:
    results = [made(data=data), made(data={**data, key: 77}, seeds=(5,), scores=(0.5,))]
    lines = lines_of("3.2", results)
    assert sorted(line.here.seeds for line in lines if line.here) == [1, 2]
    known = {None: "none", 12_000: "12,000", 20_000: "20,000"}.get(data[key], str(data[key]))
    assert {line.differs[-1] for line in lines} == {f"data.{key} {known}", f"data.{key} 77"}


@pytest.mark.parametrize("lacking", ["name", "synthetic", "sequences", "frames", "seed"])
@pytest.mark.parametrize("row", ["3.1", "3.2"])
def test_a_result_that_does_not_tell_its_data_is_refused(row: str, lacking: str) -> None:
    """It would be taken for one on the paper's."""
    for data in (MASKS, SYNTHETIC):
        known = {name: value for name, value in data.items() if name != lacking}
        with pytest.raises(SpecError, match=rf"result of row {row}.* its settings lack data\.{lacking};"):
            table_rows(3, [made(row, data=known)])


@pytest.mark.parametrize("model", ["unsupervised", "SlowVAE", None, ["slowvae"], ...])
def test_an_unknown_model_is_refused(model: object) -> None:
    result = made()
    plain = {name: value for name, value in result.settings.items() if name != "model"}
    plain |= {"mode": "contrastive"}  # which is no setting of these
    unknown = dataclasses.replace(result, settings=plain if model is ... else {**plain, "model": model})
    with pytest.raises(SpecError, match=r"result of row 3\.2, .* model = .*; expected one of slowvae, contrastive"):
        table_rows(3, [unknown])


def test_a_result_without_the_score_is_refused() -> None:
    with pytest.raises(SpecError, match=r"row 3\.2.* has no mcc_spearman"):
        table_rows(3, [dataclasses.replace(made(), scores={"mcc": (0.1, 0.2)})])


def test_results_of_no_row_are_left_out_with_a_remark() -> None:
    results = [made(None), made(None, data=SYNTHETIC), made("3.10", "quick")]
    sheet = table_sheet(3, results)
    assert sheet.remarks[-1] == "Left out: 2 results of no row of the paper."
    assert [line.row for line in table_rows(3, results) if line.here is not None] == ["3.10"]
    assert not any("Left out" in text for text in table_sheet(3, [made()]).remarks)


def test_results_of_other_experiments_are_left_out() -> None:
    other = dataclasses.replace(made(None), experiment="mlp")
    assert table_rows(3, [other]) == table_rows(3, [])
    assert not any("Left out" in text for text in table_sheet(3, [other]).remarks)
    assert table_rows(1, [made()]) == table_rows(1, [])
    assert table_rows(4, [made()]) == table_rows(4, [])


# formats


def many() -> list[Result]:
    results = [made(row, "quick", data=SYNTHETIC, seeds=range(10), scores=(0.1, 0.9) * 5) for row in ROWS]
    results += [made("3.1", "quick", data=SYNTHETIC, model="contrastive")]
    return [*results, *(made(row, preset) for row in ROWS for preset in ("paper", "quick"))]


def test_text_fits_160_columns() -> None:
    text = to_text(table_sheet(3, many()))
    assert max(map(len, text.splitlines())) <= 160
    assert all(f"\n{row} " in text for row in ROWS)


@pytest.mark.parametrize(("real", "title"), [([], SYNTHETIC_TITLE), ([made("3.2")], MIXED_TITLE)])
def test_the_title_is_in_every_format(real: list[Result], title: str, tmp_path: Path) -> None:
    results = [*real, made("3.1", "quick", data=SYNTHETIC)]
    for suffix in (".md", ".txt"):
        write_table(3, results, tmp_path / f"table{suffix}")
    assert (tmp_path / "table.md").read_text().splitlines()[0] == f"### {title}"
    above, _ = (tmp_path / "table.txt").read_text().split("\n\n", 1)
    assert " ".join(above.splitlines()) == title
    # png, pdf and svg are this figure; its title is all that is set larger than the table.
    texts = to_figure(table_sheet(3, results)).axes[0].texts
    largest = max(text.get_fontsize() for text in texts)
    assert " ".join(text.get_text() for text in texts if text.get_fontsize() == largest) == title
    assert "SYNTHETIC" in title


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_figures_are_written(suffix: str, magic: bytes, tmp_path: Path) -> None:
    write_table(3, [made("3.1", data=SYNTHETIC)], tmp_path / f"table{suffix}")
    assert (tmp_path / f"table{suffix}").read_bytes().startswith(magic)


def test_a_row_in_markdown(tmp_path: Path) -> None:
    write_table(3, [made("3.3", data=SYNTHETIC), made("3.8", scores=(0.8, 0.8))], tmp_path / "table.md")
    lines = (tmp_path / "table.md").read_text().splitlines()
    about = "| 3.3 | 0.05 s | contrastive, laplace | box | MCC | 74.1±4.4 |"
    assert f"{about} paper | SYNTHETIC silhouettes | 85.00±7.07 (2) | - | a |" in lines
    about = "| 3.8 | 0.15 s | contrastive, laplace | box | MCC | 80.9±3.8 |"
    assert f"{about} paper | KITTI Masks | 80.00±0.00 (2) | -0.90 |  |" in lines


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made("3.6", "quick", data=SYNTHETIC).save(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["table", "3", "--results", str(tmp_path)])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(SYNTHETIC_TITLE)
    assert "79.6±5.8 quick SYNTHETIC silhouettes 85.00±7.07 (2) - a" in " ".join(printed.split())

"""Learning curves of presets, and steps to equal score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ident3d.baselines.curves import curve_of, curves_figure, speed_ups, steps_to
from ident3d.baselines.mlp_settings import row_settings
from ident3d.baselines.results import Result
from ident3d.errors import SpecError
from ident3d.figures import save_figure
from ident3d.schema import to_plain


def result(row: str | None, preset: str, points: list[tuple[int, list[float]]], **changes: Any) -> Result:
    settings = to_plain(row_settings(row or "2.1", preset))
    values: dict[str, Any] = {
        "experiment": "mlp",
        "row": row,
        "preset": preset,
        "settings": settings,
        "seeds": (0, 1),
        "scores": dict.fromkeys(("r2", "mcc"), points[-1][1]),
        "curve": [{"step": step, "mcc": scores, "r2": [s / 2 for s in scores]} for step, scores in points],
        "steps": points[-1][0],
        "device": "cpu",
        "versions": {},
        "wall_s": 60.0,
        "finished": "2026-01-01T00:00:00+00:00",
    }
    return Result(**{**values, **changes})


PAPER = result("2.1", "paper", [(100, [0.2, 0.4]), (400, [0.5, 0.7]), (500, [0.4, 0.6])])
FAST = result("2.1", "fast", [(10, [0.3, 0.5]), (30, [0.7, 0.9])])


def test_a_curve_is_the_mean_over_seeds() -> None:
    for score, means in (("mcc", [0.4, 0.8]), ("r2", [0.2, 0.4])):
        steps, values = zip(*curve_of(FAST, score), strict=True)
        assert steps == (10, 30)
        assert list(values) == pytest.approx(means)
    gap = result(
        "2.1", "fast", [(10, [0.3, 0.5])], curve=[{"step": 5, "mcc": [None, 0.1]}, {"step": 6, "loss": [1.0, 2.0]}]
    )
    assert curve_of(gap, "mcc") == ()


@pytest.mark.parametrize(("level", "steps"), [(0.4, 10.0), (0.1, 10.0), (0.6, 20.0), (0.8, 30.0), (0.81, None)])
def test_steps_to_a_level_lie_on_the_lines_between_evaluations(level: float, steps: float | None) -> None:
    assert steps_to(((10, 0.4), (30, 0.8)), level) == (None if steps is None else pytest.approx(steps))
    assert steps_to((), level) is None


def test_the_first_crossing_counts() -> None:
    assert steps_to(((1, 0.2), (2, 0.6), (3, 0.1), (4, 0.9)), 0.5) == pytest.approx(1.75)


def test_presets_are_compared_at_the_best_level_of_paper() -> None:
    (line,) = speed_ups([FAST, PAPER])
    assert (line.row, line.preset, line.score) == ("2.1", "fast", "mcc")
    assert line.level == pytest.approx(0.6)
    assert line.paper_steps == pytest.approx(400)
    assert line.steps == pytest.approx(20)
    assert line.ratio == pytest.approx(20)
    assert not line.at_once
    (bound,) = speed_ups([PAPER, result("2.1", "fast", [(10, [0.7, 0.7]), (30, [0.8, 0.8])])])
    assert bound.at_once
    assert bound.steps == 10


def test_a_preset_that_never_has_the_level_has_no_ratio() -> None:
    slow = result("2.1", "fast", [(10, [0.1, 0.1]), (1000, [0.5, 0.5])])
    (line,) = speed_ups([slow, PAPER])
    assert line.steps is None
    assert line.ratio is None


def test_rows_are_scored_by_their_tables_score_and_sorted() -> None:
    others = [result("1.10", p, [(10, [0.4, 0.4]), (20, [0.5, 0.5])]) for p in ("paper", "fast")]
    more = [result("1.2", p, [(10, [0.4, 0.4]), (20, [0.5, 0.5])]) for p in ("paper", "fast")]
    lines = speed_ups([PAPER, *others, FAST, *more])
    assert [(line.row, line.score) for line in lines] == [("1.2", "r2"), ("1.10", "r2"), ("2.1", "mcc")]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(SpecError, match=r"row 2.1, preset fast: two results"):
        speed_ups([FAST, FAST])
    supervised = result("2.1", "fast", [(10, [0.5, 0.5])], settings={**FAST.settings, "mode": "supervised"})
    with pytest.raises(SpecError, match="no unsupervised result"):
        speed_ups([supervised, result(None, "fast", [(10, [0.5, 0.5])])])
    assert speed_ups([FAST]) == []


def test_the_figure_has_a_panel_a_row_and_the_papers_score(tmp_path: Path) -> None:
    one = result("1.1", "fast", [(10, [0.4, 0.4]), (20, [0.5, 0.5])])
    figure = curves_figure([PAPER, FAST, one])
    first, second = figure.axes
    assert "row 1.1" in first.get_title()
    assert "row 2.1" in second.get_title()
    legend = second.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert [label.split(",")[0] for label in labels] == ["fast", "paper", "the paper"]
    assert any("20 times fewer" in text.get_text() for text in second.texts)
    save_figure(figure, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000

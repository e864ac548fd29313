"""Learning curves on KITTI Masks: every run once, named, on one kind of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ident3d.baselines.kitti_settings import row_settings
from ident3d.baselines.mask_curves import kitti_label, mask_curves_figure
from ident3d.baselines.results import Result
from ident3d.errors import SpecError
from ident3d.figures import save_figure
from ident3d.schema import to_plain

SYNTHETIC = "KITTI Masks (SYNTHETIC silhouettes, seed 0)"


def run(row: str, scores: list[list[float | None]], title: str = SYNTHETIC, **settings: Any) -> Result:
    curve = [{"step": 100 * (k + 1), "mcc_spearman": values, "loss": 1.0} for k, values in enumerate(scores)]
    return Result(
        experiment="kitti",
        row=row,
        preset="quick",
        settings={**to_plain(row_settings(row, "quick", **settings)), "data": {"synthetic": True}},
        seeds=tuple(range(len(scores[0]))),
        scores={"mcc_spearman": (0.5,) * len(scores[0])},
        extra={"title": title},
        curve=tuple(curve),
        steps=100 * len(scores),
        device="cpu",
        versions={},
        wall_s=1.0,
        finished="2026-01-31T12:00:00Z",
    )


def test_a_panel_a_distance_and_a_mean_between_the_seeds() -> None:
    near, far = run("3.2", [[0.2, 0.4], [0.6, 0.8]]), run("3.7", [[0.1, 0.1], [0.9, 0.9]])
    figure = mask_curves_figure([far, near])
    first, second = figure.axes
    assert "0.05 s later" in first.get_title()
    assert "0.15 s later" in second.get_title()
    seeds_and_mean = [line.get_ydata().tolist() for line in first.lines]  # type: ignore[union-attr]
    assert seeds_and_mean == [pytest.approx([20, 60]), pytest.approx([40, 80]), pytest.approx([30, 70])]
    assert [line.get_xdata().tolist() for line in second.lines] == [[100, 200]] * 3  # type: ignore[union-attr]
    assert figure.get_suptitle() == SYNTHETIC


def test_each_model_is_named_once_in_its_own_look() -> None:
    rows = [run(f"3.{k}", [[0.2], [0.6]]) for k in range(1, 11)]
    figure = mask_curves_figure(rows)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert sorted(names) == sorted({kitti_label(row) for row in rows})
    assert len(names) == 5
    assert "SlowVAE" in names
    assert "contrastive, laplace, box" in names
    looks = {(line.get_color(), line.get_linestyle()) for line in legend.get_lines()}
    assert len(looks) == 5


def test_a_beta_vae_is_called_so() -> None:
    assert kitti_label(run("3.1", [[0.1], [0.2]], gamma=0.0)) == "beta-VAE"


def test_a_seed_that_was_not_scored_leaves_a_gap(tmp_path: Path) -> None:
    figure = mask_curves_figure([run("3.2", [[0.2, None], [0.6, 0.8], [0.7, 0.9]])])
    one, other, mean = (line.get_xdata().tolist() for line in figure.axes[0].lines)  # type: ignore[union-attr]
    assert (one, other, mean) == ([100, 200, 300], [200, 300], [200, 300])
    save_figure(figure, tmp_path / "curves.png")


def test_what_has_no_curve_is_refused() -> None:
    with pytest.raises(SpecError, match="no learning curve"):
        mask_curves_figure([run("3.2", [[0.5]])])


def test_synthetic_and_real_data_do_not_share_a_figure() -> None:
    runs = [run("3.2", [[0.2], [0.6]]), run("3.2", [[0.2], [0.6]], title="KITTI Masks")]
    with pytest.raises(SpecError, match=r"SYNTHETIC.* and on KITTI Masks: expected the same data"):
        mask_curves_figure(runs)

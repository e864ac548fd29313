"""Figures hold the data they claim to, and say so before the work when they cannot be saved."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch
from PIL import Image

from ident3d import Ident3D, PairReport, pair_report
from ident3d.errors import DatasetError, SpecError
from ident3d.figures import check_figure_path, contact_sheet, latent_traversal, pair_fidelity, save_figure


def with_pictures(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.images]


def with_bars(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.patches]


@pytest.mark.parametrize(
    ("rows", "columns", "shown", "grid"),
    [(4, 8, 24, 3 * 8), (2, 3, 6, 6), (1, 1, 1, 1), (5, 5, 24, 25), (100, 7, 24, 28)],
)
def test_a_contact_sheet_shows_the_first_pictures_in_order(
    fabricated: Path, rows: int, columns: int, shown: int, grid: int
) -> None:
    data = Ident3D(fabricated)
    figure = contact_sheet(data, rows, columns)
    assert len(figure.axes) == 2 * grid  # a picture and its bars
    pictures = with_pictures(figure)
    assert len(pictures) == shown
    for i, ax in enumerate(pictures):
        np.testing.assert_array_equal(np.asarray(ax.images[0].get_array()), data[i][0].numpy().transpose(1, 2, 0))
        assert ax.get_title() == str(i)


def test_bars_are_the_latents_of_the_picture_above(fabricated: Path) -> None:
    data = Ident3D(fabricated, factors=["object_hue", "object_x", "object_alpha", "spotlight_theta"])
    bars = with_bars(contact_sheet(data, 2, 3))
    assert len(bars) == 6
    for i, ax in enumerate(bars):
        rectangles = [p for p in ax.patches if isinstance(p, Rectangle)]
        np.testing.assert_allclose([r.get_height() for r in rectangles], data.latents[i])
        assert ax.get_ylim() == (0, 1)
        assert len({r.get_facecolor() for r in rectangles}) == 4  # four kinds of factor


def test_the_title_says_what_is_shown(fabricated: Path) -> None:
    figure = contact_sheet(Ident3D(fabricated, factors=["object_x", "object_hue"]), 2, 3)
    title = figure.get_suptitle().replace("\n", " ")
    assert "3dident, split train: 6 of 24 samples, 16 px, rendered: quality draft" in title
    assert "in the order object_x, object_hue" in title


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 0), (-1, 4), (101, 1), (1, 101)])
def test_a_grid_that_cannot_be_is_refused(fabricated: Path, rows: int, columns: int) -> None:
    with pytest.raises(SpecError, match=re.escape(f"rows = {rows}, columns = {columns}: expected 1 to 100")):
        contact_sheet(Ident3D(fabricated), rows, columns)


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg", ".PNG"])
def test_a_figure_is_saved_in_the_format_of_its_name(fabricated: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"sheet{suffix}"
    check_figure_path(path)
    save_figure(contact_sheet(Ident3D(fabricated), 1, 2), path)
    magic = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[suffix.lower()]
    assert path.read_bytes().startswith(magic)


def test_a_saved_figure_has_150_dots_an_inch(fabricated: Path, tmp_path: Path) -> None:
    figure = contact_sheet(Ident3D(fabricated), 1, 2)
    save_figure(figure, tmp_path / "sheet.png")
    width, height = figure.get_size_inches()
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.size == pytest.approx((width * 150, height * 150), abs=1)


@pytest.mark.parametrize("name", ["sheet", "sheet.jpg", "sheet.png.txt", ".png", "png"])
def test_an_unknown_format_is_refused_early(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match=r"expected a name that ends in \.png, \.pdf, \.svg"):
        check_figure_path(tmp_path / name)


def test_a_folder_that_is_not_there_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=re.escape(f"the folder {tmp_path / 'no'} is not there; make it first")):
        check_figure_path(tmp_path / "no" / "sheet.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="is not there"):
        check_figure_path(tmp_path / "file" / "sheet.png")
    monkeypatch.chdir(tmp_path)
    check_figure_path(Path("sheet.png"))


def test_a_failure_to_save_is_told_as_such(fabricated: Path, tmp_path: Path) -> None:
    figure = contact_sheet(Ident3D(fabricated), 1, 1)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DatasetError, match=r"folder\.png: cannot be written: Is a directory"):
        save_figure(figure, tmp_path / "folder.png")
    (tmp_path / "full.png").symlink_to("/dev/full")
    with pytest.raises(DatasetError, match=r"full\.png: cannot be written: No space left"):
        save_figure(figure, tmp_path / "full.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1}, "steps = 1: expected 2 to 50"),
        ({"steps": 51}, "steps = 51: expected 2 to 50"),
        ({"at": -0.1}, "at = -0.1: expected a point of the unit interval"),
        ({"at": float("nan")}, "at = nan: expected a point of the unit interval"),
        ({"scene": "nowhere"}, "scene 'nowhere': unknown scene"),
        ({"quality": "best"}, "quality 'best': expected one of draft, standard, paper"),
        ({"resolution": 0}, "resolution = 0: expected 8 to 4096"),
    ],
)
def test_a_traversal_that_cannot_be_is_refused_before_blender_starts(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        latent_traversal(**options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def report() -> PairReport:
    latents = np.random.default_rng(0).random((500, 7), dtype=np.float32)
    return pair_report(latents, "laplace(scale=0.05)", factors=[0, 1, 2, 3, 4, 6], pairs=2000)


def panels(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.axison]


def steps(ax: Axes) -> list[StepPatch]:
    return [p for p in ax.patches if isinstance(p, StepPatch)]


def test_a_panel_a_factor_compares_what_was_asked_for_with_what_is_served(report: PairReport) -> None:
    shown = panels(pair_fidelity(report))
    assert len(shown) == 7 + 2
    histograms = [*(factor.histogram for factor in report.factors), report.distances]
    for ax, histogram in zip(shown, histograms, strict=False):
        requested, realised = (patch.get_data() for patch in steps(ax))
        np.testing.assert_array_equal(requested[0], histogram.requested)
        np.testing.assert_array_equal(realised[0], histogram.realised)
        np.testing.assert_array_equal(requested[1], histogram.edges)
        assert ax.get_xlim() == (histogram.edges[0], histogram.edges[-1])
        assert ax.get_ylim()[1] > max(*histogram.requested, *histogram.realised)
    for ax, factor in zip(shown, report.factors, strict=False):
        name, numbers = ax.get_title().split("\n")
        assert name == (f"{factor.name} (not matched)" if factor.name == "5" else factor.name)
        assert numbers == f"W {factor.wasserstein:.3g}, KS {factor.ks:.2f}"


def test_the_usage_of_samples_is_drawn_as_shares(report: PairReport) -> None:
    ax = panels(pair_fidelity(report))[-1]
    heights = [p.get_height() for p in ax.patches if isinstance(p, Rectangle)]
    np.testing.assert_allclose(heights, np.array(report.usage.counts) / 500)
    (even,) = ax.lines  # the law of Poisson, which even use has
    np.testing.assert_allclose(np.asarray(even.get_ydata())[0], report.usage.never_if_even)
    assert np.asarray(even.get_ydata()).sum() == pytest.approx(1, abs=1e-3)
    assert ax.get_xticklabels()[-1].get_text() == f"{len(heights) - 1}+"


def test_the_figure_says_what_it_shows_and_warns(report: PairReport) -> None:
    figure = pair_fidelity(report)
    title = f"ndarray: {report.pairs:,} pairs of 500 samples, laplace(scale=0.05), matched (exact)\n"
    assert figure.get_suptitle().startswith(title)
    assert report.warnings
    assert figure.get_supxlabel().replace("\n", " ") == " ".join(report.warnings)
    said = "\n".join(text.get_text() for ax in figure.axes for text in ax.texts)
    for words in (
        f"requested step: median {report.step.median:.3g}",
        f"served step: median {report.realised_step.median:.3g}",
        f"match moves z~ by: median {report.matching.median:.3g}",
        f"nearest is the anchor itself: {report.anchor_share:.1%}",
        "recall against brute force: 1.0000",
        f"0.1 times the step: {report.needed['0.1']:.1e}",
    ):
        assert words in said


def test_a_figure_of_rendered_pairs_speaks_of_no_match(fabricated_pairs: Path, tmp_path: Path) -> None:
    report = pair_report(Ident3D(fabricated_pairs), pairs=2000)
    figure = pair_fidelity(report)
    assert len(panels(figure)) == 10 + 2
    assert "24 samples, laplace(scale=0.05), rendered\n" in figure.get_suptitle()
    said = "\n".join(text.get_text() for ax in figure.axes for text in ax.texts)
    assert "nothing is matched" in said
    assert "recall" not in said
    titles = [ax.get_title() for ax in panels(figure)]
    assert titles[-2] == "length of the step"
    assert not any("not matched" in title for title in titles)
    assert figure.get_supxlabel() == ""
    save_figure(figure, tmp_path / "pairs.pdf")
    assert (tmp_path / "pairs.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("dim", [1, 3, 4, 11])
def test_any_number_of_factors_has_its_panels(dim: int) -> None:
    latents = np.random.default_rng(0).random((200, dim), dtype=np.float32)
    figure = pair_fidelity(pair_report(latents, "uniform()", pairs=1000))
    assert len(panels(figure)) == dim + 2
    titles = [ax.get_title().split("\n")[0] for ax in panels(figure)[:dim]]
    assert titles == [str(c) for c in range(dim)]


@pytest.mark.render
@pytest.mark.slow
def test_a_traversal_has_a_column_a_factor(tmp_path: Path) -> None:
    from ident3d.scenes import scene_text

    spec = tmp_path / "mine.toml"
    spec.write_text(scene_text("3dident").replace("range = [-3.0, 3.0] }", "range = [-3.0, 3.0], frozen = 0.25 }", 1))
    figure = latent_traversal(spec, steps=2, resolution=16, quality="draft")
    axes = with_pictures(figure)
    assert len(axes) == 2 * 9  # the tenth factor is frozen
    pictures = [np.asarray(ax.images[0].get_array()) for ax in axes]
    assert {p.shape for p in pictures} == {(16, 16, 3)}
    for column in range(9):
        assert not np.array_equal(pictures[column], pictures[9 + column]), f"column {column} does not change"
    assert [ax.get_title().split("\n")[0] for ax in axes[:2]] == ["object_y", "object_z"]
    assert [axes[0].get_ylabel(), axes[9].get_ylabel()] == ["u = 0.00", "u = 1.00"]

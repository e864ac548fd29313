"""Figures hold the data they claim to, and say so before the work when they cannot be saved."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from ident3d import Ident3D
from ident3d.errors import DatasetError, SpecError
from ident3d.figures import check_figure_path, contact_sheet, latent_traversal, save_figure


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
    assert "3dident, split train: 6 of 24 samples, 16 px, quality draft" in title
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

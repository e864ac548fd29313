"""The figure of codes: each factor beside its own code, on the diagonal where that is perfect, and all of it said."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray

from ident3d.baselines.code_figure import POINTS, code_figure
from ident3d.baselines.evaluation import evaluate_codes
from ident3d.ceilings import Ceiling
from ident3d.errors import SpecError
from ident3d.factors import FACTORS
from ident3d.figures import save_figure

NAMES = ("object_x", "object_hue", "ground_hue")
CEILINGS = (
    Ceiling("object_x", 1.0, 1.0),
    Ceiling("object_hue", 0.9629630, 0.9813068, ((1 / 6, 1 / 2),)),
    Ceiling("spotlight_hue", 0.5, 0.6, ((0.0, 0.5),)),
)
Array = NDArray[np.float64]


def made(n: int = 300, noise: float = 0.1) -> tuple[Array, Array]:
    generator = np.random.default_rng(0)
    z = generator.random((n, 3))
    return z + noise * generator.standard_normal((n, 3)), z


def drawn(codes: Any, z: Any, names: tuple[str, ...] = NAMES, **options: Any) -> Figure:
    evaluation = evaluate_codes(codes, z, names, with_dci=False)
    return code_figure(codes, z, names, evaluation, **{"title": "an encoder", **options})


def panels(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.get_title()]


def points(ax: Axes) -> Array:
    (found,) = (line for line in ax.lines if line.get_marker() == ".")
    return np.asarray(found.get_xydata(), dtype=np.float64)


def said(figure: Figure) -> str:
    """Title and labels of the whole figure, in one line."""
    return f"{figure.get_suptitle()} {figure.get_supxlabel()} {figure.get_supylabel()}".replace("\n", " ")


def test_perfect_codes_lie_on_the_diagonal_and_all_samples_are_drawn() -> None:
    _, z = made()
    figure = drawn(z[:, [2, 0, 1]] * [-3, 1e-3, 50] + [1, 2, 3], z)
    assert len(panels(figure)) == 3
    for j, ax in enumerate(panels(figure)):
        np.testing.assert_allclose(points(ax)[:, 0], z[:, j])
        np.testing.assert_allclose(points(ax)[:, 1], z[:, j], atol=1e-9)


def test_order_sign_scale_and_offset_of_codes_change_nothing_but_labels() -> None:
    codes, z = made()
    order = [2, 0, 1]
    mapped = (codes * [-1, 2, -100] + [5, 0, 1e6])[:, order]
    before, after = panels(drawn(codes, z)), panels(drawn(mapped, z))
    for j, (one, other) in enumerate(zip(before, after, strict=True)):
        np.testing.assert_allclose(points(other), points(one), atol=1e-6)
        assert other.get_title() == one.get_title()
        assert one.get_ylabel() == f"code {j}"
        assert other.get_ylabel() == f"code {order.index(j)}{', sign flipped' if j != 1 else ''}"


def test_codes_have_the_mean_and_spread_of_their_factor() -> None:
    codes, z = made()
    for j, ax in enumerate(panels(drawn(7 * codes - 3, z))):
        y = points(ax)[:, 1]
        assert y.mean() == pytest.approx(z[:, j].mean())
        assert y.std() == pytest.approx(z[:, j].std())
        assert np.corrcoef(y, codes[:, j])[0, 1] == pytest.approx(1)


def test_titles_hold_the_scores_and_ceilings_below_1() -> None:
    codes, z = made()
    found = evaluate_codes(codes, z, NAMES, with_dci=False)
    figure = drawn(codes, z, ceilings=CEILINGS)
    for j, ax in enumerate(panels(figure)):
        lines = ax.get_title().split("\n")
        assert lines[0] == NAMES[j]
        assert lines[1] == f"|corr| {100 * found.mcc.per_factor[j]:.2f}%, R2 {100 * found.r2.per_factor[j]:.2f}%"
        assert lines[2:] == (["at best 98.13%, 96.30%"] if j == 1 else [])
        extents = [p.get_patch_transform().transform_path(p.get_path()).get_extents() for p in ax.patches]
        edges = [(extent.x0, extent.x1) for extent in extents]
        assert edges == ([pytest.approx((1 / 6, 1 / 2))] if j == 1 else [])
    assert "Shaded: pictures are the same" in said(figure)
    for other in (drawn(codes, z), drawn(codes, z, ceilings=CEILINGS[:1])):
        assert "Shaded" not in said(other)
        assert not any(ax.patches or "at best" in ax.get_title() for ax in panels(other))


def test_the_figure_says_what_it_shows() -> None:
    codes, z = made()
    text = said(drawn(codes, z, title="supervised,\n20 steps"))
    assert "supervised, 20 steps" in text
    assert "true factor" in text
    assert "300 of 300 samples" in text
    assert "Each factor is matched with one code of its own" in text
    assert "matched to none" not in text


def test_at_most_2000_of_all_samples_are_drawn() -> None:
    codes, z = made(n=10 * POINTS + 7)
    figure = drawn(codes, z)
    for j, ax in enumerate(panels(figure)):
        x = points(ax)[:, 0]
        assert len(x) == POINTS
        # From the first row to the last.
        np.testing.assert_array_equal(x[[0, -1]], z[[0, -1], j])
    assert f"{POINTS:,} of 20,007 samples" in said(figure)


@pytest.mark.parametrize(("extra", "text"), [(1, "1 of 4 codes is matched to none"), (3, "3 of 6 codes are matched")])
def test_codes_left_over_are_counted(extra: int, text: str) -> None:
    codes, z = made()
    wide = np.concatenate([np.random.default_rng(3).standard_normal((len(z), extra)), codes], axis=1)
    figure = drawn(wide, z)
    assert text in said(figure)
    assert [ax.get_ylabel() for ax in panels(figure)] == [f"code {extra + j}" for j in range(3)]


def test_a_constant_code_is_a_line_and_says_so() -> None:
    codes, z = made()
    codes[:, 1] = 0.3
    ax = panels(drawn(codes, z))[1]
    assert ax.get_ylabel() == "code 1, constant"
    np.testing.assert_allclose(points(ax)[:, 1], z[:, 1].mean())
    assert "|corr| 0.00%" in ax.get_title()


def test_a_code_without_a_sign_is_drawn_as_it_is() -> None:
    codes, z = made()
    found = evaluate_codes(codes, z, NAMES, with_dci=False)
    unsigned = dataclasses.replace(found, mcc=dataclasses.replace(found.mcc, signs=(0, 1, 1)))
    ax = panels(code_figure(codes, z, NAMES, unsigned, title="a"))[0]
    assert points(ax)[:, 1].std() == pytest.approx(z[:, 0].std())
    assert ax.get_ylabel() == "code 0"


def test_tensors_and_factors_are_taken() -> None:
    codes, z = made()
    table = FACTORS.select(NAMES)
    found = evaluate_codes(torch.tensor(codes), torch.tensor(z), table, with_dci=False)
    figure = code_figure(torch.tensor(codes), torch.tensor(z), table, found, title="a")
    for one, other in zip(panels(figure), panels(drawn(codes, z)), strict=True):
        np.testing.assert_allclose(points(one), points(other))


@pytest.mark.parametrize("width", [1, 3, 7, 10])
def test_every_text_and_point_lies_inside(width: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    z = generator.random((100, width))
    codes = z + 0.1 * generator.standard_cauchy((100, width))
    names = FACTORS.names[-width:]
    limits = [Ceiling(name, 0.96, 0.98, ((0.2, 0.5),)) for name in names]
    figure = drawn(codes, z, names, title="unsupervised, 3DIdent as published in 2021, " * 3, ceilings=limits)
    assert len(panels(figure)) == width
    save_figure(figure, tmp_path / "codes.png")
    assert (tmp_path / "codes.png").stat().st_size > 10_000
    figure.draw_without_rendering()
    whole = figure.bbox
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text() and text.get_visible()]
    boxes = [text.get_window_extent() for text in texts if text.axes is None or text.axes.axison]
    assert len(boxes) > 4 * width
    for box in boxes:
        assert whole.x0 - 1 <= box.x0 < box.x1 <= whole.x1 + 1
        assert whole.y0 - 1 <= box.y0 < box.y1 <= whole.y1 + 1
    titles = [ax.title.get_window_extent() for ax in panels(figure)]
    assert not any(a.overlaps(b) for i, a in enumerate(titles) for b in titles[:i])
    for ax in panels(figure):
        (low, high), y = ax.get_ylim(), points(ax)[:, 1]
        assert low < y.min() <= y.max() < high
        assert min(ax.bbox.width, ax.bbox.height) > 1.4 * figure.dpi  # inches


def test_what_does_not_fit_together_is_refused() -> None:
    codes, z = made()
    found = evaluate_codes(codes, z, NAMES, with_dci=False)
    for given, latents, names, text in (
        (codes, z, NAMES[::-1], "names = ['ground_hue', 'object_hue', 'object_x']: expected those of the evaluation"),
        (codes[:, :2], z, NAMES, "2 codes: expected 3, those of the evaluation"),
        (codes, 2 * z - 1, NAMES, "expected the unit cube, 0 to 1; raw coordinates in [-1, 1] become latents by"),
        (codes, 1.01 * z, NAMES, "expected the unit cube"),
        (codes, z[1:], NAMES, "300 rows of codes, 299 of factors"),
    ):
        with pytest.raises(SpecError, match=re.escape(text)):
            code_figure(given, latents, names, found, title="a")

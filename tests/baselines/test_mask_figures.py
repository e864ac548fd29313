"""The figures of KITTI Masks: what is drawn is the data's, what is said is true, and all of it can be read."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray

from ident3d.baselines.mask_figures import sequence_figure, traversal_figure
from ident3d.baselines.transition_figure import transition_figure
from ident3d.datasets.kitti_masks import KITTI_FACTORS, KittiMasks
from ident3d.errors import SpecError
from ident3d.metrics import MCCScore, mcc

Array = NDArray[np.float64]
DIM = 5
LABELS = [f"code {k}: matched to none, KL {k:.1f} nats" for k in range(DIM)]


def made(**options: Any) -> KittiMasks:
    return KittiMasks(**{"synthetic": True, "sequences": 40, "frames": 40, **options})


@pytest.fixture(scope="module")
def data() -> KittiMasks:
    return made()


def coded(data: KittiMasks, noise: float = 0.0) -> tuple[Array, Array, MCCScore]:
    """Codes 3, 0 and 4 are the latents up to sign, scale, offset and noise of so many stds; and the latents."""
    z = data.latents.astype(np.float64)
    generator = np.random.default_rng(0)
    codes = generator.standard_normal((len(z), DIM))
    mixed = z + noise * z.std(0) * generator.standard_normal(z.shape)
    codes[:, [3, 0, 4]] = mixed * [-2.0, 0.01, -300.0] + [5.0, 0.0, 1e6]
    return codes, z, mcc(codes, z, names=data.factors, correlation="spearman")


def of_sequence(data: KittiMasks, codes: Array, score: MCCScore, z: Array, sequence: int = 3, **options: Any) -> Figure:
    start, stop = data.sequences[sequence : sequence + 2]
    return sequence_figure(data, sequence, codes[start:stop], score, (codes, z), **{"title": "an encoder", **options})


def decode(codes: Array) -> Array:
    """The first code brightens the upper half of a picture, the second the lower."""
    both = 1 / (1 + np.exp(-codes[:, :2]))
    pictures: Array = np.repeat(both, 32, axis=1)[:, :, None] * np.ones(64)
    return pictures


def traversed(dim: int = DIM, **options: Any) -> Figure:
    given = {"start": np.zeros(dim), "spread": np.ones(dim), "labels": LABELS, "title": "SlowVAE", **options}
    return traversal_figure(given.pop("decode", decode), **given)


def said(figure: Figure) -> str:
    return f"{figure.get_suptitle()} {figure.get_supxlabel()}".replace("\n", " ")


def course(ax: Axes, line: int) -> Array:
    """The points of a line, (n, 2)."""
    return np.asarray(ax.lines[line].get_xydata(), dtype=np.float64)


def pictures(axes: Any) -> list[Any]:
    return [np.asarray(ax.images[0].get_array()) for ax in axes]


@pytest.mark.parametrize("frames", [2, 40, 300])
def test_the_strip_is_of_the_sequence(frames: int) -> None:
    data = made(frames=frames, sequences=10)
    codes, z, score = coded(data)
    figure = of_sequence(data, codes, score, z, sequence=9)
    start, stop = data.sequences[9:].tolist()
    strip: list[Any] = list(figure.axes[0].child_axes)
    times = [float(ax.get_title().removesuffix(" s")) for ax in strip]
    assert min(stop - start, 6) <= len(strip) <= 12
    np.testing.assert_allclose(np.diff(times), times[1])
    assert times[0] == 0
    assert times[-1] <= 0.05 * (stop - start - 1) < times[-1] + times[1]
    for found, time in zip(pictures(strip), times, strict=True):
        np.testing.assert_array_equal(found, data.masks[start + round(time / 0.05)])
    # Each mask stands over its time in the panels below.
    figure.draw_without_rendering()
    for ax, time in zip(strip, times, strict=True):
        below = figure.axes[1].transData.transform((time, 0))[0]
        assert (ax.bbox.x0 + ax.bbox.x1) / 2 == pytest.approx(below, abs=0.02 * figure.bbox.width)


def test_perfect_codes_lie_on_their_factors_whatever_their_sign_and_scale(data: KittiMasks) -> None:
    codes, z, score = coded(data)
    start, stop = data.sequences[3:5]
    figure = of_sequence(data, codes, score, z)
    for j, ax in enumerate(figure.axes[1:]):
        truth, code = course(ax, 0), course(ax, 1)
        np.testing.assert_allclose(truth[:, 0], 0.05 * np.arange(stop - start))
        np.testing.assert_array_equal(truth[:, 1], z[start:stop, j])
        np.testing.assert_allclose(code, truth, atol=1e-6)
        flipped = ", sign flipped" if j != 1 else ""
        assert ax.get_title("left").endswith(f"Code {(3, 0, 4)[j]}{flipped}: Spearman's |corr| 100.00%")
        assert ax.get_title("left").startswith(f"{KITTI_FACTORS[j].name}: {KITTI_FACTORS[j].drives}.")
        assert ax.get_ylabel() == f"{KITTI_FACTORS[j].name} in {('px', 'px', 'px²')[j]}"
    texts = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]  # type: ignore[union-attr]
    assert texts == ["true factor", "learned code, mapped by a straight line"]


def test_the_line_is_fitted_over_all_samples_and_not_over_the_sequence(data: KittiMasks) -> None:
    codes, z, score = coded(data, noise=0.5)
    start, stop = data.sequences[3:5]
    figure = of_sequence(data, torch.tensor(codes), score, torch.tensor(z))  # type: ignore[arg-type]
    for j, ax in enumerate(figure.axes[1:]):
        code = codes[:, score.assignment[j]]
        slope, offset = np.polyfit(code, z[:, j], 1)
        np.testing.assert_allclose(course(ax, 1)[:, 1], slope * code[start:stop] + offset)
        assert f"|corr| {100 * score.per_factor[j]:.2f}%" in ax.get_title("left")
    assert f"over all {len(z):,} scored samples, not over this sequence" in said(figure)


def test_a_constant_code_lies_at_the_mean_of_its_factor(data: KittiMasks) -> None:
    codes, z, _ = coded(data)
    codes = codes[:, [3, 0, 4]]
    codes[:, 1] = 0.3
    score = mcc(codes, z, names=data.factors, constant_codes="zero")
    start, stop = data.sequences[3:5]
    # Even where the sequence's own codes vary: no line is fitted to what is constant.
    ax = sequence_figure(data, 3, codes[start:stop] + z[start:stop], score, (codes, z), title="a").axes[2]
    np.testing.assert_allclose(course(ax, 1)[:, 1], z[:, 1].mean())
    assert "Code 1, constant: Pearson's |corr| 0.00%" in ax.get_title("left")


def test_what_is_not_of_the_sequence_or_the_score_is_refused(data: KittiMasks) -> None:
    codes, z, score = coded(data)
    start, stop = data.sequences[3:5]
    own, broken = codes[start:stop], codes[start:stop].copy()
    broken[2, 1] = np.nan
    reverse = mcc(codes, z, names=data.factors.names[::-1])
    for sequence, given, of, scored, text in (
        (40, own, score, (codes, z), "sequence = 40: expected 0 to 39"),
        (-1, own, score, (codes, z), "sequence = -1"),
        (3, own[1:], score, (codes, z), f"{stop - start - 1} rows of codes: expected {stop - start}"),
        (3, broken, score, (codes, z), "1 of"),
        (3, own[:, 1:], score, (codes, z), "4 codes: expected 5, those of the score"),
        (3, own, score, (codes[:, 1:], z), "4 scored codes: expected 5"),
        (3, own, score, (codes[1:], z), f"{len(z) - 1:,} rows of codes, {len(z):,} of factors"),
        (3, own, reverse, (codes, z), "score of ['area', 'centre_x', 'centre_y']: expected"),
    ):
        with pytest.raises(SpecError, match=re.escape(text)):
            sequence_figure(data, sequence, given, of, scored, title="a")


def test_each_row_moves_its_own_code_and_no_other() -> None:
    calls = []

    def recorded(codes: Array) -> Array:
        calls.append(codes)
        return decode(codes)

    mean, spread = np.array([0.5, -2.0, 0.0]), np.array([1.0, 0.25, 0.0])
    figure = traversal_figure(recorded, mean, spread, LABELS[:3], title="SlowVAE", reach=2.0, steps=5)
    (codes,) = calls
    codes = codes.reshape(3, 5, 3)
    for row in range(3):
        for column, offset in enumerate([-2, -1, 0, 1, 2]):
            expected = mean + offset * spread * (np.arange(3) == row)
            np.testing.assert_allclose(codes[row, column], expected)
    axes = np.array(figure.axes).reshape(3, 5)
    np.testing.assert_allclose(pictures(axes.flat), decode(codes.reshape(-1, 3)))
    assert {image.get_clim() for ax in figure.axes for image in ax.images} == {(0, 1)}
    headings = [ax.get_title().replace("\N{MINUS SIGN}", "-") for ax in axes[0]]
    assert headings == ["-2 sd", "-1 sd", "start", "+1 sd", "+2 sd"]
    assert [ax.get_ylabel() for ax in axes[:, 0]] == LABELS[:3]
    assert "from 2 standard deviations (sd) below the start to 2 above" in said(figure)


def test_without_a_middle_no_column_is_the_start() -> None:
    headings = [
        ax.get_title().replace("\N{MINUS SIGN}", "-")
        for ax in traversed(2, labels=LABELS[:2], steps=4, reach=1.5).axes[:4]
    ]
    assert headings == ["-1.5 sd", "-0.5 sd", "+0.5 sd", "+1.5 sd"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"labels": LABELS[1:]}, "labels has 4 entries: expected 5"),
        ({"spread": np.ones(6)}, "spread has 6 entries: expected 5"),
        ({"spread": np.array([1, 1, -0.5, -2, 1])}, "spread of code 3 is -2"),
        ({"start": np.array([0, 0, np.inf, 0, 0])}, "start: entry 2 is inf"),
        ({"spread": np.array([np.nan, 1, 1, 1, 1])}, "spread: entry 0 is nan"),
        ({"start": np.zeros((1, 5))}, "start of shape (1, 5)"),
        ({"reach": 0.0}, "reach = 0.0"),
        ({"reach": np.nan}, "reach = nan"),
        ({"steps": 1}, "steps = 1"),
        (
            {"decode": lambda codes: decode(codes)[:, None]},
            "decode returned shape (45, 1, 64, 64): expected (45, 64, 64)",
        ),
        (
            {"decode": lambda codes: 9 * decode(codes) - 4},
            "expected probabilities, 0 to 1; of logits, take the sigmoid",
        ),
        ({"decode": lambda codes: np.nan * decode(codes)}, "decode returned nan"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_a_traversal_that_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=re.escape(text)):
        traversed(**changes)


def of_kind(kind: str, data: KittiMasks) -> Figure:
    codes, z, score = coded(data, noise=0.3)
    long = "slowvae on KITTI Masks, quick preset, seed 0, " * 4
    if kind == "transitions":
        return transition_figure(data)
    if kind == "sequence":
        return of_sequence(data, codes, score, z, title=long)
    if kind == "brief":
        return sequence_figure(made(frames=2), 0, codes[:2], score, (codes, z), title=long)
    return traversed(title=long, steps={"traversal": 9, "narrow": 2}[kind])


@pytest.mark.parametrize("kind", ["transitions", "sequence", "brief", "traversal", "narrow"])
def test_every_text_lies_inside_and_none_on_another(kind: str, data: KittiMasks) -> None:
    figure = of_kind(kind, data)
    title = "slowvae on KITTI Masks, quick preset" if "tra" not in kind else ""
    assert title in said(figure)
    assert kind in ("traversal", "narrow") or data.title in said(figure)
    figure.draw_without_rendering()
    whole, shown = figure.bbox, drawn_texts(figure)
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    assert len(boxes) > 8
    for _, box in boxes:
        assert whole.x0 - 1 <= box.x0 < box.x1 <= whole.x1 + 1
        assert whole.y0 - 1 <= box.y0 < box.y1 <= whole.y1 + 1
    assert [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)] == []
    assert all(text.get_fontsize() >= 8 for text in shown)
    assert all(min(ax.bbox.width, ax.bbox.height) > 0.6 * figure.dpi for ax in figure.axes)  # inches


def drawn_texts(figure: Figure) -> list[Any]:
    """The texts of a figure that has been drawn, but for axes that are off and ticks beyond an axis's ends."""
    hidden = set()
    for ax in [*figure.axes, *(child for parent in figure.axes for child in parent.child_axes)]:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not (ax.axison and low <= tick.get_loc() <= high):
                    hidden |= {tick.label1, tick.label2}
    texts: list[Any] = figure.findobj(Text)
    return [text for text in texts if text not in hidden and text.get_text() and text.get_visible()]

"""Histograms of transitions: bars are the data's, laws are fitted, the shape that is said is the shape that is."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import StepPatch
from numpy.typing import NDArray
from scipy.stats import gennorm, kurtosis  # type: ignore[import-untyped]

from ident3d.baselines.transition_figure import fitted_shape, transition_figure
from ident3d.datasets.kitti_masks import KittiMasks
from ident3d.errors import SpecError

Array = NDArray[np.float64]


def made(**options: Any) -> KittiMasks:
    return KittiMasks(**{"synthetic": True, "sequences": 40, "frames": 40, **options})


@pytest.fixture(scope="module")
def data() -> KittiMasks:
    return made()


def course(ax: Axes, line: int) -> Array:
    """The points of a line, (n, 2)."""
    return np.asarray(ax.lines[line].get_xydata(), dtype=np.float64)


@pytest.mark.parametrize("shape", [0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_shape_of_a_law_is_found_at_any_scale(shape: float, scale: float) -> None:
    values = gennorm.rvs(shape, size=40_000, random_state=np.random.default_rng(0))
    assert fitted_shape(scale * values) == pytest.approx(shape, rel=0.04)
    # The same as a search over shape and scale at once.
    assert fitted_shape(scale * values) == pytest.approx(gennorm.fit(values, floc=0)[0], rel=1e-3)


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_rounded_values_have_the_shape_of_what_was_rounded(shape: float) -> None:
    values = gennorm.rvs(shape, scale=6.0, size=40_000, random_state=np.random.default_rng(0))
    for unit in (0.5, 1.0, 3.0):
        rounded = unit * np.round(values / unit)
        assert fitted_shape(rounded, rounding=unit) == pytest.approx(shape, rel=0.05)
    assert fitted_shape(values, rounding=1e-300) == fitted_shape(values)


def test_exact_zeros_do_not_make_the_shape_collapse() -> None:
    values = np.random.default_rng(0).laplace(size=20_000)
    values[:400] = 0
    assert fitted_shape(values) == pytest.approx(1, abs=0.1)
    assert fitted_shape(np.concatenate([np.zeros(900), np.ones(100)])) == pytest.approx(0.1)
    assert fitted_shape(np.ones(100)) == pytest.approx(20)


@pytest.mark.parametrize(
    ("values", "rounding", "text"),
    [
        (np.zeros(7), 0.0, "all of 7 values are 0"),
        (np.array([1.0, np.nan]), 0.0, "values: entry 1 is nan"),
        (np.ones((2, 3)), 0.0, "values of shape (2, 3)"),
        (np.ones(0), 0.0, "values of shape (0,)"),
        (np.ones(3), -1.0, "rounding = -1.0"),
        (np.ones(3), np.inf, "rounding = inf"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_values_without_a_shape_are_refused(values: Any, rounding: float, text: str) -> None:
    with pytest.raises(SpecError, match=re.escape(text)):
        fitted_shape(values, rounding=rounding)


@pytest.mark.parametrize("distances", [(1, 5), (3,)])
def test_bars_are_the_density_of_the_steps_but_for_what_is_said_to_lie_beyond(
    data: KittiMasks, distances: tuple[int, ...]
) -> None:
    figure = transition_figure(data, distances)
    for k, ax in enumerate(figure.axes):
        steps = data.transitions(distances[k // 3])[:, k % 3].astype(np.float64)
        (bars,) = (patch for patch in ax.patches if isinstance(patch, StepPatch))
        density, edges, _ = bars.get_data()
        widths = np.diff(edges)
        shares = [np.mean((steps >= low) & (steps < high)) for low, high in pairwise(edges)]
        np.testing.assert_allclose(density * widths, shares, atol=1.01 / len(steps))  # the last bin holds its end
        beyond = float(np.mean(np.abs(steps) > edges[-1]))
        assert (density * widths).sum() == pytest.approx(1 - beyond)
        assert beyond <= 0.002 < np.mean(np.abs(steps) > edges[-1] - 2 * widths[0])
        assert f"({100 * beyond:.2g}% lie beyond)" in ax.get_xlabel()
        np.testing.assert_allclose(edges, -edges[::-1])
        np.testing.assert_allclose(widths, widths[0])
        assert ax.get_yscale() == "log"
        assert ax.get_ylim()[0] < density[density > 0].min() <= density.max() < ax.get_ylim()[1]
        # In the latent of whole pixels, each bin takes in as many of them.
        if k % 3 == 2:
            np.testing.assert_allclose(edges % 1, 0.5)


def test_laws_are_fitted_and_titles_tell_their_shape(data: KittiMasks) -> None:
    figure = transition_figure(data)
    for k, ax in enumerate(figure.axes):
        steps = data.transitions((1, 5)[k // 3])[:, k % 3].astype(np.float64)
        laws = {str(line.get_label()): course(ax, k) for k, line in enumerate(ax.lines)}
        for name, shape, scale in (
            ("Laplace", 1.0, np.abs(steps).mean()),
            ("Normal", 2.0, np.sqrt(2 * np.square(steps).mean())),
        ):
            x, y = laws[name].T
            np.testing.assert_allclose(y, gennorm.pdf(x, shape, scale=scale))
        found = fitted_shape(steps, rounding=1.0 if k % 3 == 2 else 0.0)
        later = "0.05 to 0.25 s later" if k >= 3 else "0.05 s later"
        assert ax.get_title() == (
            f"{data.factors[k % 3].name}, {later}\nβ = {found:.2f}, excess kurtosis {kurtosis(steps):.1f}"
        )
        unit = ("px", "px", "px²")[k % 3]
        assert ax.get_xlabel().startswith(f"step in {unit} (")
        assert ax.get_ylabel() == f"density per {unit}"


def test_distances_that_are_none_are_refused(data: KittiMasks) -> None:
    for distances, text in (((), "max_delta_ts = ()"), ((0,), "max_delta_t = 0"), ((1, 1001), "max_delta_t = 1001")):
        with pytest.raises(SpecError, match=re.escape(text)):
            transition_figure(data, distances)


def test_a_latent_that_never_moves_is_said_not_to() -> None:
    still = made(sequences=3)
    still.latents[:, 0] = 7
    figure = transition_figure(still)
    titles = [ax.get_title() for ax in figure.axes]
    assert [("never moves" in title) for title in titles] == [True, False, False] * 2
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 3

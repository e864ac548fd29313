"""Synthetic silhouettes: seeded, measured as the published masks are, sparse in motion, and people."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage, stats  # type: ignore[import-untyped]

import ident3d.datasets.silhouettes as module
from ident3d.datasets.silhouettes import FRAMES, SEQUENCES, draw, make_silhouettes, make_track, measure
from ident3d.errors import SpecError

Made = tuple[list[NDArray[np.bool_]], list[NDArray[np.float32]]]


@pytest.fixture(scope="module")
def made() -> Made:
    """The default set. Read it, never write into it."""
    return make_silhouettes()


def test_the_structure_is_that_of_the_published_masks(made: Made) -> None:
    masks, latents = made
    assert len(masks) == len(latents) == SEQUENCES
    for mask, latent in zip(masks, latents, strict=True):
        assert mask.dtype == bool
        assert mask.shape == (len(latent), 64, 64)
        assert latent.dtype == np.float32
        assert latent.shape == (len(mask), 3)


def test_lengths_are_spread_from_a_quarter_to_all_of_the_longest(made: Made) -> None:
    lengths = np.array([len(mask) for mask in made[0]])
    assert stats.kstest(lengths, stats.randint(FRAMES // 4, FRAMES + 1).cdf).statistic < 0.06
    assert {len(mask) for mask in make_silhouettes(40, frames=3)[0]} == {2, 3}
    assert {len(mask) for mask in make_silhouettes(5, frames=2)[0]} == {2}


def test_latents_are_centre_of_mass_and_area_of_the_masks(made: Made) -> None:
    for masks, latents in list(zip(*made, strict=True))[:40]:
        for mask, (y, x, area) in zip(masks, latents, strict=True):
            assert (y, x) == pytest.approx(ndimage.center_of_mass(mask), rel=1e-6)
            assert area == np.count_nonzero(mask)


def test_measuring_follows_a_shift_and_a_flip(made: Made) -> None:
    masks, latents = np.zeros((2, 64, 64), bool), made[1][0][:2]
    masks[:, 10:20, 30:33] = True
    assert measure(masks).tolist() == [[14.5, 31.0, 30.0]] * 2
    flipped = measure(np.ascontiguousarray(made[0][0][:2, :, ::-1]))
    np.testing.assert_allclose(flipped[:, 1], 63 - latents[:, 1], rtol=1e-5)
    np.testing.assert_allclose(flipped[:, [0, 2]], latents[:, [0, 2]], rtol=1e-6)


def test_a_sequence_is_a_function_of_seed_and_number() -> None:
    few, many, other = make_silhouettes(3, seed=5), make_silhouettes(6, seed=5), make_silhouettes(6, seed=6)
    for k in range(3):
        np.testing.assert_array_equal(few[0][k], many[0][k])
        np.testing.assert_array_equal(few[1][k], many[1][k])
    drawn = [sequence.tobytes() for made in (many, other) for sequence in made[0]]
    assert len(set(drawn)) == 12
    # A seed of two words and a number of one must not meet a seed of one word and a number of another.
    assert make_silhouettes(2, seed=1)[0][1].tobytes() != make_silhouettes(1, seed=1 + 2**32)[0][0].tobytes()


def test_no_global_generator_is_read_or_seeded() -> None:
    before = np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
    make_silhouettes(2)
    assert np.random.get_state()[1].tobytes() == before  # type: ignore[index]  # noqa: NPY002


def test_no_mask_is_empty_and_none_fills_the_picture(made: Made) -> None:
    areas = np.concatenate(made[1])[:, 2]
    assert areas.min() >= 15
    assert areas.max() < 64 * 64 / 4


def test_people_cross_the_whole_view_and_change_in_size(made: Made) -> None:
    y, x, area = np.concatenate(made[1]).T
    assert x.min() < 6
    assert x.max() > 57
    assert stats.kstest(x, stats.uniform(4, 56).cdf).statistic < 0.05
    assert np.quantile(area, 0.95) > 4 * np.quantile(area, 0.05)
    assert y.std() > 2


def test_a_figure_is_one_upright_piece(made: Made) -> None:
    masks = np.concatenate(made[0])[::97]
    pieces = [ndimage.label(mask, np.ones((3, 3)))[1] for mask in masks]
    assert np.mean(np.array(pieces) == 1) > 0.97
    seen = [mask for mask in masks if not (mask[-1].any() or mask[:, 0].any() or mask[:, -1].any())]
    assert len(seen) > 50
    heights, widths = (np.array([np.ptp(np.flatnonzero(mask.any(axis))) + 1 for mask in seen]) for axis in (1, 0))
    assert np.mean(heights > 1.3 * widths) > 0.95


def test_the_area_falls_with_the_square_of_the_distance() -> None:
    track = make_track(np.random.default_rng(3), 40)
    areas = []
    for metres in (6.0, 9.0, 12.0):
        at = module.Track(
            np.full(40, metres), np.full(40, 32.0), np.zeros(40), track.phase, track.heading, 1.7, track.girth
        )
        areas.append(measure(draw(at))[:, 2].mean())
    assert areas[0] / areas[2] == pytest.approx(4, rel=0.1)
    assert areas[0] / areas[1] == pytest.approx(2.25, rel=0.1)


def test_the_gait_moves_legs_but_not_who_stands() -> None:
    constant = {"depth": np.full(9, 6.0), "column": np.full(9, 32.0), "pitch": np.zeros(9)}
    body = {"heading": 0.0, "height": 1.7, "girth": 1.0}
    standing = draw(module.Track(phase=np.full(9, 1.0), **constant, **body))  # type: ignore[arg-type]
    assert (standing == standing[0]).all()
    walking = draw(module.Track(phase=np.linspace(0, 2 * math.pi, 9), **constant, **body))  # type: ignore[arg-type]
    changed = (walking != walking[0]).sum((0, 2))
    rows = np.flatnonzero(walking.any((0, 2)))
    head, feet = changed[rows[: len(rows) // 8]].sum(), changed[rows[-len(rows) // 4 :]].sum()
    assert feet > 5 * max(head, 1)
    # A whole cycle ends where it began.
    np.testing.assert_array_equal(walking[0], walking[-1])


@pytest.mark.parametrize("delta", [1, 5])
def test_transitions_are_sparse_as_laplace(made: Made, delta: int) -> None:
    moved = np.concatenate([latents[delta:] - latents[:-delta] for latents in made[1]])
    for column in range(3):
        # A normal has an excess kurtosis of 0 and a shape of 2; a Laplace has 3 and 1.
        assert stats.kurtosis(moved[:, column]) > 1.5
        shape, _, _ = stats.gennorm.fit(moved[:, column], floc=0)
        assert 0.6 < shape < 1.3


def test_steps_are_laplace_of_the_scale_and_remember() -> None:
    steps = np.array([module._steps(np.random.default_rng(k), 12, 0.3) for k in range(4000)])
    assert stats.kstest(steps[:, -1], stats.laplace(scale=0.3).cdf).pvalue > 0.001
    assert stats.kstest(steps[:, 0], stats.laplace(scale=0.3).cdf).pvalue > 0.001
    correlation = stats.spearmanr(steps[:, 5], steps[:, 6])[0]
    assert correlation == pytest.approx(6 / math.pi * math.asin(module.MEMORY / 2), abs=0.02)


def test_a_way_is_reflected_at_its_bounds_and_uniform_between() -> None:
    rng = np.random.default_rng(0)
    steps = rng.laplace(scale=0.3, size=(3000, 20))
    ways = np.array([module._walk(rng, row, (-1.0, 2.0)) for row in steps])
    assert ways.min() >= -1
    assert ways.max() <= 2
    assert stats.kstest(ways[:, -1], stats.uniform(-1, 3).cdf).pvalue > 0.001
    # Where no bound was met, a step is as drawn, forwards or backwards alike.
    moved = np.abs(np.diff(ways))
    inside = np.minimum(ways[:, :-1] + 1, 2 - ways[:, :-1]) > np.abs(steps)
    np.testing.assert_allclose(moved[inside], np.abs(steps)[inside], atol=1e-12)
    assert inside.mean() > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequences": 0}, "sequences = 0: expected a whole number of at least 1"),
        ({"seed": -1}, "seed = -1: expected a whole number of at least 0"),
        ({"frames": 1}, "frames = 1: expected a whole number of at least 2"),
        ({"sequences": True}, "sequences = True"),
        ({"sequences": 10**9}, "sequences = 1000000000, frames = 60: expected at most 16 GiB"),
        ({"sequences": 1, "frames": 10**9}, "expected at most 16 GiB"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_silhouettes(**options)

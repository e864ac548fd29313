"""The laws of the random numbers, and their values: a change of either changes every dataset ever made."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.stats import kstest  # type: ignore[import-untyped]

import ident3d.render.draws
from ident3d.render.draws import PAIR_UNIFORMS, cycles_seeds, draw_latents, draw_uniforms

KEYS = [(0, "train"), (0, "test"), (1, "train"), (2**70, "val")]


@pytest.mark.parametrize(("seed", "split"), KEYS)
def test_marginals_are_uniform(seed: int, split: str) -> None:
    u = draw_latents(seed, split, 0, 50_000, {})
    # Forty tests of fixed data: a sound generator passes this bound once and for ever.
    assert min(kstest(u[:, c], "uniform").pvalue for c in range(10)) > 1e-4


@pytest.mark.parametrize(("seed", "split"), KEYS)
def test_columns_and_neighbours_are_independent(seed: int, split: str) -> None:
    n = 50_000
    u = draw_latents(seed, split, 0, n, {}).astype(np.float64)
    beside = np.concatenate([u[:-1], u[1:]], axis=1)
    correlation = np.corrcoef(beside, rowvar=False) - np.eye(20)
    assert np.abs(correlation).max() < 5 / np.sqrt(n)


def test_pairs_of_columns_fill_the_square_evenly() -> None:
    # Correlation misses dependence that is not linear: count a 4 x 4 grid for every pair.
    n = 64_000
    u = draw_latents(3, "train", 0, n, {})
    for a in range(10):
        for b in range(a):
            counts, _, _ = np.histogram2d(u[:, a], u[:, b], bins=4, range=[[0, 1], [0, 1]])
            assert ((counts - n / 16) ** 2 / (n / 16)).sum() < 50  # chi-squared of 15 degrees: p = 1e-5


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 100), (1, 2), (37, 64), (99, 100), (50, 50)])
def test_any_range_is_a_slice_of_a_larger_one(start: int, stop: int) -> None:
    np.testing.assert_array_equal(
        draw_latents(5, "train", start, stop, {}), draw_latents(5, "train", 0, 100, {})[start:stop]
    )
    uniforms = draw_uniforms(5, "train", 0, 100)[start:stop]
    np.testing.assert_array_equal(draw_uniforms(5, "train", start, stop), uniforms)
    for picture in (0, 1):
        seeds = cycles_seeds(5, "train", 0, 100, picture)[start:stop]
        np.testing.assert_array_equal(cycles_seeds(5, "train", start, stop, picture), seeds)


def test_seeds_and_splits_share_nothing() -> None:
    draws = [draw_latents(seed, split, 0, 200, {}) for seed in range(4) for split in ("train", "val", "test")]
    words = np.concatenate([d.ravel() for d in draws])
    # 24 bits: among 24,000 words some coincide, but whole rows never.
    assert len(np.unique(np.concatenate(draws), axis=0)) == 12 * 200
    assert len(np.unique(words)) > 0.99 * len(words)


def test_a_draw_is_below_one_and_exact_in_float32() -> None:
    u = draw_latents(11, "train", 0, 400_000, {})
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    assert u.max() > 1 - 1e-5
    scaled = u.astype(np.float64) * 2**24
    np.testing.assert_array_equal(scaled, np.round(scaled))
    # The lowest bit is used as often as not.
    assert abs((scaled % 2).mean() - 0.5) < 0.002


def test_the_stream_is_this_one() -> None:
    first = [
        [1992682, 15007487, 9424493, 901396, 11899900, 4298192, 12418509, 13366171, 3748702, 12950515],
        [13970423, 9719990, 5876621, 13985510, 8241646, 11124129, 843548, 7902241, 5307257, 11576941],
    ]
    np.testing.assert_array_equal(draw_latents(0, "train", 0, 2, {}) * 2**24, first)
    np.testing.assert_array_equal(cycles_seeds(0, "train", 0, 3), [1998769031, 325397184, 611097994])
    far = [[570159, 2628243, 1027944, 68281, 689251, 6903810, 1372452, 2267468, 6432217, 14025163]]
    np.testing.assert_array_equal(draw_latents(7, "test", 123456789, 123456790, {}) * 2**24, far)
    np.testing.assert_array_equal(cycles_seeds(7, "test", 123456789, 123456790), [1870464700])


def test_frozen_columns_are_held_and_move_no_other() -> None:
    free = draw_latents(0, "train", 0, 50, {})
    held = draw_latents(0, "train", 0, 50, {3: 0.25, 9: 1.0})
    np.testing.assert_array_equal(held[:, 3], 0.25)
    np.testing.assert_array_equal(held[:, 9], 1.0)
    others = [c for c in range(10) if c not in (3, 9)]
    np.testing.assert_array_equal(held[:, others], free[:, others])


def test_cycles_seeds_fit_31_bits_and_rarely_repeat() -> None:
    n = 50_000
    seeds = cycles_seeds(0, "train", 0, n)
    assert seeds.min() >= 0
    assert seeds.max() < 2**31
    assert seeds.max() > 2**30
    # Birthdays: n^2 / 2^32 = 0.6 pairs are expected to coincide.
    assert len(np.unique(seeds)) >= n - 8


def test_cycles_seeds_are_no_function_of_the_latent() -> None:
    u, seeds = draw_latents(0, "train", 0, 50_000, {}), cycles_seeds(0, "train", 0, 50_000)
    correlation = [np.corrcoef(u[:, c], seeds)[0, 1] for c in range(10)]
    assert np.abs(correlation).max() < 5 / np.sqrt(50_000)


def test_global_generators_are_neither_read_nor_moved() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    first = draw_latents(0, "train", 0, 5, {})
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    np.testing.assert_array_equal(draw_latents(0, "train", 0, 5, {}), first)


def test_the_uniforms_of_pairs_are_these() -> None:
    words = draw_uniforms(0, "train", 0, 2) * 2.0**53  # half steps of 2^-52, so whole numbers
    first = [
        [1183456573782379, 5380952531888159, 8521076117384283, 6381158410393075],
        [1302091127430935, 3379378929611007, 3792239226196229, 5051232504999131],
    ]
    np.testing.assert_array_equal(words[:, :4], first)
    np.testing.assert_array_equal(words[:, 23], [8161010716292259, 7168120106699621])
    far = draw_uniforms(7, "test", 123456789, 123456790)[0] * 2.0**53
    np.testing.assert_array_equal(far[:2], [6384232843291255, 5271080445362897])
    np.testing.assert_array_equal(far[22:], [225363296747673, 1427802725197725])
    np.testing.assert_array_equal(cycles_seeds(0, "train", 0, 3, 1), [1203070654, 1464695134, 2021517206])
    np.testing.assert_array_equal(cycles_seeds(7, "test", 123456789, 123456790, 1), [1994065859])


@pytest.mark.parametrize(("seed", "split"), KEYS)
def test_the_uniforms_of_pairs_are_uniform_and_independent(seed: int, split: str) -> None:
    n = 50_000
    u = draw_uniforms(seed, split, 0, n)
    assert u.dtype == np.float64
    assert u.shape == (n, PAIR_UNIFORMS)
    assert min(kstest(u[:, c], "uniform").pvalue for c in range(PAIR_UNIFORMS)) > 1e-4
    beside = np.concatenate([u[:-1], u[1:]], axis=1)
    correlation = np.corrcoef(beside, rowvar=False) - np.eye(2 * PAIR_UNIFORMS)
    assert np.abs(correlation).max() < 5 / np.sqrt(n)


def test_the_uniforms_of_pairs_are_independent_of_latents_splits_and_seeds() -> None:
    n = 50_000
    mine = draw_uniforms(0, "train", 0, n)
    latents = [draw_latents(0, split, 0, n, {}).astype(np.float64) for split in ("train", "test")]
    others = [
        draw_uniforms(0, "test", 0, n),
        draw_uniforms(0, "val", 0, n),
        draw_uniforms(1, "train", 0, n),
    ]
    correlation = np.corrcoef(np.concatenate([mine, *latents, *others], axis=1), rowvar=False)
    assert np.abs(correlation[:PAIR_UNIFORMS, PAIR_UNIFORMS:]).max() < 5 / np.sqrt(n)
    everything = np.concatenate([x.ravel()[: 4 * PAIR_UNIFORMS] for x in (mine, *others)])
    assert len(np.unique(everything)) == len(everything)


@pytest.mark.parametrize(("word", "least"), [(0, 2.0**-53), (2**64 - 1, 1 - 2.0**-53)])
def test_the_uniforms_of_pairs_reach_neither_end(monkeypatch: pytest.MonkeyPatch, word: int, least: float) -> None:
    extreme = np.full((3, PAIR_UNIFORMS), word, np.uint64)
    monkeypatch.setattr(ident3d.render.draws, "_words", lambda *_: extreme)
    u = draw_uniforms(0, "train", 0, 3)
    np.testing.assert_array_equal(u, least)
    assert u.min() > 0
    assert u.max() < 1


def test_the_seeds_of_a_pair_are_no_function_of_each_other() -> None:
    n = 50_000
    own, pair = (cycles_seeds(0, "train", 0, n, picture) for picture in (0, 1))
    assert pair.min() >= 0
    assert pair.max() < 2**31
    assert (own != pair).all()
    for mixed in (pair, (pair - own) % 2**31, pair ^ own):  # neither an offset nor a mask leads from one to the other
        assert len(np.unique(mixed)) >= n - 8
        assert kstest(mixed / 2**31, "uniform").pvalue > 1e-4
    latents, uniforms = draw_latents(0, "train", 0, n, {}), draw_uniforms(0, "train", 0, n)
    correlation = np.corrcoef(np.column_stack([pair, own, latents, uniforms]), rowvar=False)[0, 1:]
    assert np.abs(correlation).max() < 5 / np.sqrt(n)

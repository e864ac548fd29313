"""render_latents: pictures without a dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ident3d import RenderOptions, SpecError, render_latents


@pytest.mark.render
def test_shape_and_repeatability() -> None:
    u = np.random.default_rng(1).random((3, 10))
    first = render_latents(u, resolution=24, quality="draft")
    assert first.shape == (3, 24, 24, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, render_latents(u, resolution=24, quality="draft", threads=1))
    # Picture i depends on its latent and seed + i alone, not on what was rendered before it.
    np.testing.assert_array_equal(first[2:], render_latents(u[2], resolution=24, quality="draft", seed=2))


@pytest.mark.render
def test_every_factor_shows() -> None:
    u = np.full((11, 10), 0.5)
    u[np.arange(10), np.arange(10)] = 0.85
    pictures = render_latents(u, resolution=32, quality="draft", seed=0).astype(int)
    for column in range(10):
        changed = np.abs(pictures[column] - pictures[10]).max()
        assert changed > 20, f"column {column} changes no pixel by more than {changed}"


@pytest.mark.render
def test_directions() -> None:
    """The signs a user relies on: up is up, right is right, hue turns from red to green."""
    u = np.full((4, 10), 0.5)
    u[1, 2], u[2, 1], u[3, 7] = 0.7, 0.8, 0.85
    pictures = render_latents(u, resolution=48, quality="draft").astype(int)

    def centre(picture: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        """Of the teapot: where red is far above blue."""
        where: np.ndarray = np.argwhere(picture[..., 0] - picture[..., 2] > 100)  # type: ignore[type-arg]
        return np.asarray(where.mean(axis=0))

    rest, up, right, green = pictures
    assert centre(up)[0] < centre(rest)[0] - 3
    assert centre(right)[1] > centre(rest)[1] + 3
    assert (green[..., 1] - rest[..., 1]).max() > 80


def test_paths_may_be_texts() -> None:
    options = RenderOptions("teapots", latents="u.npy")  # type: ignore[arg-type]
    assert options.out == Path("teapots")
    assert options.latents == Path("u.npy")


def test_bad_input() -> None:
    with pytest.raises(SpecError, match=r"shape \(N, 10\), got \(2, 3\)"):
        render_latents(np.zeros((2, 3)))
    with pytest.raises(SpecError, match="resolution = 4: expected 8 to 4096"):
        render_latents(np.zeros(10), resolution=4)
    with pytest.raises(SpecError, match="quality 'fine'"):
        render_latents(np.zeros(10), quality="fine")
    with pytest.raises(SpecError, match="unknown scene"):
        render_latents(np.zeros(10), scene="kettle")

"""The z~ of rendered pairs: drawn from the conditional, each a function of its sample alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

import ident3d.render.latents
from ident3d import RenderOptions, SpecError, load_scene, render_dataset
from ident3d.render.draws import PAIR_UNIFORMS, draw_latents, draw_uniforms
from ident3d.render.latents import pair_law, write_latents
from ident3d.render.plan import RenderPlan
from ident3d.render.quality import quality

Array = NDArray[Any]

OCTAHEDRA = Path(__file__).parents[2] / "docs" / "examples" / "octahedra.toml"
FROZEN = [3, 4]


def plan(samples: int, pairs: str, *, seed: int = 9, split: str = "train") -> RenderPlan:
    settings = quality("draft")
    return RenderPlan(
        "3dident", "0" * 64, split, samples, seed, "drawn", 64, "draft", settings, 5, "CPU", "4.5.0", pairs
    )


def draw(folder: Path, asked: RenderPlan, scene: str | Path = "3dident", given: Array | None = None) -> list[Array]:
    """z and z~ of a plan, as a render would write them."""
    folder.mkdir(exist_ok=True)
    return [np.array(array) for array in write_latents(folder, asked, load_scene(scene).spec, given)]


UNTRUNCATED = {
    "laplace(scale=0.05)": stats.laplace(scale=0.05),
    "laplace(scale=2)": stats.laplace(scale=2),
    "normal(scale=0.1)": stats.norm(scale=0.1),
    "gennorm(scale=0.2, beta=3)": stats.gennorm(3, scale=0.2),
    "gennorm(scale=0.05, beta=0.7)": stats.gennorm(0.7, scale=0.05),
}


@pytest.mark.parametrize("text", UNTRUNCATED)
def test_positives_follow_the_conditional_truncated_to_the_cube(tmp_path: Path, text: str) -> None:
    n = 20_000
    z, positives = (array.astype(np.float64) for array in draw(tmp_path, plan(n, text)))
    np.testing.assert_array_equal(z, draw_latents(9, "train", 0, n, {}))
    assert positives.min() >= 0
    assert positives.max() <= 1
    law = UNTRUNCATED[text]
    below, above = law.cdf(-z), law.cdf(1 - z)
    share = (law.cdf(positives - z) - below) / (above - below)  # uniform, and independent of z, if z~ is right
    assert min(stats.kstest(share[:, c], "uniform").pvalue for c in range(10)) > 1e-4
    correlation = np.corrcoef(np.concatenate([share, z], axis=1), rowvar=False) - np.eye(20)
    assert np.abs(correlation).max() < 5 / np.sqrt(n)
    for edge in (z < 0.05, z > 0.95, (z > 0.45) & (z < 0.55)):  # not on average over z alone
        assert stats.kstest(share[edge], "uniform").pvalue > 1e-4


def test_uniform_positives_forget_z(tmp_path: Path) -> None:
    z, positives = draw(tmp_path, plan(20_000, "uniform()"))
    assert min(stats.kstest(positives[:, c], "uniform").pvalue for c in range(10)) > 1e-4
    correlation = np.corrcoef(z, positives, rowvar=False)[:10, 10:]
    assert np.abs(correlation).max() < 5 / np.sqrt(20_000)


LAWS = [*UNTRUNCATED, "share(object_hue, object_x)", "change(k=3)", "uniform()"]


@pytest.mark.parametrize("text", LAWS)
def test_a_positive_depends_on_its_sample_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    _, whole = draw(tmp_path / "whole", plan(5000, text))
    for n, piece in ((1, 50_000), (7, 50_000), (4999, 50_000), (300, 1), (5000, 7), (5000, 1024)):
        monkeypatch.setattr(ident3d.render.latents, "PAIR_PIECE", piece)
        _, some = draw(tmp_path / f"{n} by {piece}", plan(n, text))
        np.testing.assert_array_equal(some, whole[:n])
    monkeypatch.undo()
    for name, other in (("seed", plan(50, text, seed=10)), ("split", plan(50, text, split="val"))):
        assert not (draw(tmp_path / name, other)[1] == whole[:50]).all(axis=1).any()


@pytest.mark.parametrize("own", [False, True], ids=["drawn", "given"])
@pytest.mark.parametrize("text", LAWS)
def test_positives_are_the_law_of_the_keyed_uniforms_around_z(tmp_path: Path, text: str, own: bool) -> None:
    given = draw_latents(9, "train", 0, 40, {})
    if own:
        given = given[::-1].copy()
        given[:2] = [[0.0], [1.0]]  # corners of the cube
    law = pair_law(text, load_scene("3dident").spec)
    assert 0 < law.uniforms <= PAIR_UNIFORMS
    z, positives = draw(tmp_path, plan(40, text), given=given if own else None)
    np.testing.assert_array_equal(z, given)
    u = torch.from_numpy(draw_uniforms(9, "train", 0, 40)[:, : law.uniforms])
    np.testing.assert_array_equal(positives, law.from_uniforms(torch.from_numpy(z), u).numpy())
    assert positives.min() >= 0
    assert positives.max() <= 1


@pytest.mark.parametrize("k", [1, 4, 10])
def test_exactly_k_factors_change_each_as_often_as_another(tmp_path: Path, k: int) -> None:
    n = 20_000
    z, positives = draw(tmp_path, plan(n, f"change(k={k})"))
    changed = z != positives
    assert (changed.sum(axis=1) == k).all()
    assert np.abs(changed.mean(axis=0) - k / 10).max() <= 5 * np.sqrt(k / 10 * (1 - k / 10) / n)
    assert stats.kstest(positives[changed], "uniform").pvalue > 1e-4


def test_shared_factors_are_equal_to_the_bit_and_the_others_are_fresh(tmp_path: Path) -> None:
    z, positives = draw(tmp_path, plan(20_000, "share(object_hue, object_x)"))
    np.testing.assert_array_equal(z[:, [0, 7]], positives[:, [0, 7]])
    for column in (1, 2, 3, 4, 5, 6, 8, 9):
        assert (z[:, column] == positives[:, column]).mean() < 0.001
        assert stats.kstest(positives[:, column], "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(z[:, column], positives[:, column])[0, 1]) < 5 / np.sqrt(20_000)


@pytest.mark.parametrize(
    "text", ["laplace(scale=0.05)", "uniform()", "share(object_x)", "share(object_alpha)", "change(k=8)"]
)
def test_what_a_scene_holds_never_changes(tmp_path: Path, text: str) -> None:
    z, positives = draw(tmp_path, plan(500, text), OCTAHEDRA)
    np.testing.assert_array_equal(z[:, FROZEN], 0.5)
    np.testing.assert_array_equal(positives[:, FROZEN], 0.5)
    free = [c for c in range(10) if c not in (*FROZEN, *([0] if text == "share(object_x)" else []))]
    assert (z[:, free] != positives[:, free]).all()


def test_no_more_factors_can_change_than_the_scene_leaves_free(tmp_path: Path) -> None:
    z, positives = draw(tmp_path, plan(2000, "change(k=2)"), OCTAHEDRA)
    assert ((z != positives).sum(axis=1) == 2).all()
    assert not (z != positives)[:, FROZEN].any()
    with pytest.raises(SpecError, match="change of k = 9 factors: expected 1 to 8"):
        render_dataset(RenderOptions(tmp_path / "d", 4, scene=str(OCTAHEDRA), pairs="change(k=9)"))
    assert not (tmp_path / "d").exists()

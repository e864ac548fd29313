"""Ceilings: the numbers of 3DIdent derived by hand, other scenes by formula, and encoders that try to pass them."""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from ident3d.ceilings import Ceiling, ceilings, scene_of
from ident3d.conversion import ConvertOptions, convert
from ident3d.datasets.ident3d import Ident3D
from ident3d.datasets.kitti_masks import KittiMasks
from ident3d.datasets.published import Causal3DIdent, ThreeDIdent
from ident3d.errors import DatasetError
from ident3d.factors import FACTORS
from ident3d.metrics import mcc, r2
from ident3d.scene import FactorSpec, SceneSpec, scene_params
from ident3d.scenes import load_scene, scene_text

V1, WRAPPED = (load_scene(name).spec for name in ("3dident-v1", "3dident"))
Array = NDArray[np.float64]

# By hand. With hue h in turns from -1/4 to 1/4, h = (u - 1/2) / 2, colorsys gives for -1/6 < h <= 0 the channels
# (1, 1 - s (1 - 6h), 1 - s): green is below 0 where 6h < 1 - 1/s, which is u < 1/2 + (1 - 1/s) / 3. Below h = -1/6, at
# u = 1/6, blue jumps to 1 and grows from there. So the colour is the same from u = 1/6 to 1/2 + (1 - 1/s) / 3.
STRETCHES = {"object_hue": (1.0, 1 / 3), "spotlight_hue": (0.8, 1 / 4), "ground_hue": (0.6, 1 / 9)}


@functools.cache
def published_ceilings() -> dict[str, Ceiling]:
    return by_name(V1)


def by_name(spec: SceneSpec) -> dict[str, Ceiling]:
    return {ceiling.name: ceiling for ceiling in ceilings(spec)}


def driven(spec: SceneSpec, name: str, target: str, low: float, high: float, frozen: float | None = None) -> SceneSpec:
    """A scene in which a factor drives something else, or over another range."""
    return dataclasses.replace(spec, factors={**spec.factors, name: FactorSpec(target, (low, high), frozen)})


@pytest.mark.parametrize("name", STRETCHES)
def test_hues_as_published_by_hand(name: str) -> None:
    saturation, length = STRETCHES[name]
    assert 1 / 2 + (1 - 1 / saturation) / 3 - 1 / 6 == pytest.approx(length)
    found = published_ceilings()[name]
    # A stretch of length L holds L of all samples, with variance L^2 / 12 in place of 1 / 12.
    assert found.r2 == pytest.approx(1 - length**3, abs=1e-6)
    assert found.mcc == pytest.approx(math.sqrt(1 - length**3), abs=1e-6)
    assert found.share == pytest.approx(length)
    np.testing.assert_allclose(found.alike, [(1 / 6, 1 / 6 + length)])


def test_the_object_s_hue_in_numbers() -> None:
    hue = published_ceilings()["object_hue"]
    assert (round(hue.r2, 3), round(hue.mcc, 3)) == (0.963, 0.981)


def test_every_factor_has_one_in_order_and_those_without_colour_have_1() -> None:
    assert tuple(published_ceilings()) == FACTORS.names
    assert {c.name for c in published_ceilings().values() if c != Ceiling(c.name, 1.0, 1.0, ())} == set(STRETCHES)


def test_wrapped_hues_can_be_told_apart() -> None:
    assert ceilings(WRAPPED) == tuple(Ceiling(name, 1.0, 1.0, ()) for name in FACTORS.names)


def colours(spec: SceneSpec, name: str, u: Array) -> Array:
    """The clipped colours of many pictures that differ in this factor."""
    latents = np.full((len(u), 10), 0.5)
    latents[:, FACTORS.get(name).column] = u
    found = [scene_params(spec, row) for row in latents]
    rgb = [(*p.object_rgb, *p.ground_rgb, *p.lights["spotlight"].rgb) for p in found]
    clipped: Array = np.maximum(rgb, 0)
    return clipped


def conditional_mean(u: Array, colour: Array) -> Array:
    """E[u | colour] over these draws; no other function of the colour lies closer to them."""
    group = np.unique(colour.round(12), axis=0, return_inverse=True)[1].reshape(-1)
    mean: Array = (np.bincount(group, u) / np.bincount(group))[group]
    return mean


@pytest.mark.parametrize("name", STRETCHES)
def test_the_best_encoder_reaches_the_ceiling_and_no_other_passes_it(name: str) -> None:
    u = np.random.default_rng(1).random(20_000)
    colour = colours(V1, name, u)
    best, ceiling = conditional_mean(u, colour), published_ceilings()[name]
    reached = mcc(best, u).mean
    assert reached == pytest.approx(ceiling.mcc, abs=2e-3)
    assert r2(best, u).mean == pytest.approx(ceiling.r2, abs=3e-3)
    (low, high) = ceiling.alike[0]
    stretch = np.isin(best, best[(u > low + 0.01) & (u < high - 0.01)][:1])
    assert stretch.mean() == pytest.approx(ceiling.share, abs=0.02)
    others = [np.exp(best), best**3, np.sqrt(best), np.tanh(4 * best - 2), -np.arctan(9 * best - 3)]
    others += [np.where(stretch, value, best) for value in (low, high, 0.5)]
    others += [colour.sum(axis=1), colour @ np.arange(9)]
    for code in others:
        assert mcc(code, u).mean < reached
    # What is no function of the colour does pass it.
    assert mcc(u + 0.001 * np.sin(99 * u), u).mean > ceiling.mcc


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (0.0001, 1.0),
        (1.0, 1.0),  # the ends meet, and nothing else
        # u and u + 1/2: variance 1/16 about their middle, of 1/12.
        (2.0, 1 - 12 / 16),
        # u, u + 1/3 and u + 2/3: variance 2/27.
        (3.0, 1 - 12 * 2 / 27),
        # u and u + 1/t for u below 1 - 1/t, which is no whole number of steps of a grid.
        (1.3, 1 - 12 * 2 * (1 - 1 / 1.3) / 1.3**2 / 4),
    ],
)
def test_colours_that_come_again_need_not_be_neighbours(turns: float, expected: float) -> None:
    spec = driven(WRAPPED, "object_hue", "object.hue", -math.pi * turns, math.pi * turns)
    found = by_name(spec)["object_hue"]
    assert found.r2 == (1 if expected == 1 else pytest.approx(expected, abs=2e-3))
    assert found.mcc == pytest.approx(math.sqrt(expected), abs=2e-3)
    assert found.share == pytest.approx(0 if turns <= 1 else min(1, 2 - 2 / turns), abs=2e-3)
    assert len(found.alike) == (0 if turns <= 1 else 2 if turns == 1.3 else 1)


def test_what_shows_nowhere_has_a_ceiling_of_0() -> None:
    grey = dataclasses.replace(V1, object=dataclasses.replace(V1.object, saturation=0.0))
    assert by_name(grey)["object_hue"] == Ceiling("object_hue", 0.0, 0.0, ((0.0, 1.0),))


def test_a_light_below_0_watts_is_out() -> None:
    """Power is 39.3 (2 u - 1), so that it is 0 over half of the interval: 1 - 1/8."""
    watts = V1.lights["static"].power
    found = by_name(driven(V1, "ground_hue", "lights.static.power", -2 * watts, 0.0))["ground_hue"]
    assert found.r2 == pytest.approx(7 / 8, abs=1e-5)
    np.testing.assert_allclose(found.alike, [(0, 0.5)])


def test_any_range_of_a_length_can_be_told() -> None:
    for low, high in ((-1e-6, 1e-6), (-1e6, 1e6)):
        assert by_name(driven(V1, "object_x", "object.location.x", low, high))["object_x"].r2 == 1


def test_frozen_factors_have_none() -> None:
    held = driven(V1, "object_hue", "object.hue", -math.pi / 2, math.pi / 2, frozen=0.3)
    expected = {name: ceiling for name, ceiling in published_ceilings().items() if name != "object_hue"}
    assert by_name(held) == expected


@pytest.mark.render
@pytest.mark.parametrize(
    ("name", "within", "beyond"),
    [
        ("object_hue", (0.18, 0.33, 0.48), (0.12, 0.58)),
        ("spotlight_hue", (0.18, 0.29, 0.41), (0.12, 0.52)),
        ("ground_hue", (0.17, 0.22, 0.274), (0.12, 0.3)),
    ],
)
def test_blender_loses_what_is_below_0(name: str, within: tuple[float, ...], beyond: tuple[float, ...]) -> None:
    """Mean colours of pictures are the same over the stretch, and others beside it."""
    from ident3d import render_latents

    repeats = 8
    values = [*within, *beyond]
    latents = np.full((len(values) * repeats, 10), 0.5, np.float32)
    latents[:, FACTORS.get(name).column] = np.repeat(values, repeats)
    pictures = np.asarray(render_latents(latents, scene="3dident-v1", resolution=64, quality="draft"), np.float64)
    means = pictures.reshape(len(values), repeats, -1, 3).mean(axis=(1, 2))
    assert np.abs(means[: len(within)] - means[0])[:, 1:].max() < 0.2
    for mean in means[len(within) :]:
        assert np.abs(mean - means[0])[1:].max() > 1


@pytest.fixture(scope="module")
def own_scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scene that is none of the bundled ones."""
    path = tmp_path_factory.mktemp("scene") / "mine.toml"
    path.write_text(scene_text("3dident").replace("power = 3000.0", "power = 2000.0"))
    return path


@pytest.fixture(scope="module")
def published() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "data" / "make_published.py")))


def test_a_rendered_dataset_says_its_scene(
    fabricated: Path, own_scene: Path, make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    data = Ident3D(fabricated)
    assert scene_of(data) == scene_of(data.stream()) == scene_of(pickle.loads(pickle.dumps(data))) == WRAPPED
    assert scene_of(Ident3D(make_dataset(tmp_path / "v1", {"train": 6}, scene="3dident-v1"))) == V1
    mine = Ident3D(make_dataset(tmp_path / "mine", {"train": 6}, scene=own_scene))
    assert scene_of(mine) == load_scene(own_scene).spec != WRAPPED


def test_a_bundled_scene_under_another_name_is_known_by_its_digest(
    make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    renamed = tmp_path / "teapots.toml"
    renamed.write_text(scene_text("3dident-v1").replace('name = "3dident-v1"', 'name = "teapots"'))
    root = make_dataset(tmp_path / "data", {"train": 6}, scene=renamed)
    shutil.rmtree(root / "scene")
    assert scene_of(Ident3D(root)) == dataclasses.replace(V1, name="teapots")


def test_a_scene_of_one_s_own_that_is_gone_or_altered_is_refused(
    own_scene: Path, make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_dataset(tmp_path / "data", {"train": 6}, scene=own_scene)
    spec = root / "scene" / "scene.toml"
    for text in (spec.read_text().replace("2000.0", "2500.0"), "no toml", None):
        spec.unlink() if text is None else spec.write_text(text)
        with pytest.raises(DatasetError, match=r"data/scene: (missing or )?altered.*fetch the folder `scene` again"):
            scene_of(Ident3D(root))


def test_behind_a_url_bundled_scenes_are_known(
    fabricated: Path,
    own_scene: Path,
    make_dataset: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    assert scene_of(Ident3D(fabricated.absolute().as_uri())) == WRAPPED
    root = make_dataset(tmp_path / "mine", {"train": 6}, scene=own_scene)
    assert scene_of(Ident3D(root.as_uri())) is None


def test_the_published_3dident_is_v1_and_so_are_its_conversions(published: SimpleNamespace, tmp_path: Path) -> None:
    root = published.make_threedident(tmp_path / "source")
    assert scene_of(ThreeDIdent(root)) == scene_of(ThreeDIdent(root, "test", factors=["object_hue"])) == V1
    shards = convert(ConvertOptions(root, tmp_path / "shards", quiet=True))
    again = convert(ConvertOptions(shards, tmp_path / "webp", format="webp", quiet=True))
    assert scene_of(Ident3D(shards)) == scene_of(Ident3D(again)) == V1


def test_a_rendered_dataset_that_was_converted_keeps_its_scene(fabricated: Path, tmp_path: Path) -> None:
    out = convert(ConvertOptions(fabricated, tmp_path / "webp", format="webp", quiet=True))
    data = Ident3D(out)
    assert data.manifest.source is not None
    assert scene_of(data) == WRAPPED


def test_other_datasets_have_no_known_scene(published: SimpleNamespace, tmp_path: Path) -> None:
    root = published.make_causal3dident(tmp_path / "source")
    assert scene_of(Causal3DIdent(root)) is None
    assert scene_of(Ident3D(convert(ConvertOptions(root, tmp_path / "shards", quiet=True)))) is None
    assert scene_of(KittiMasks(synthetic=True, sequences=3, frames=4)) is None
    assert scene_of([1, 2]) is None

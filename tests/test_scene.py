"""The map from latents to scene parameters against the published scene in numbers, and the checks of a spec."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import tomllib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ident3d.errors import SpecError
from ident3d.factors import FACTORS
from ident3d.scene import SceneParams, SceneSpec, check_latents, scene_params
from ident3d.scenes import load_scene
from ident3d.schema import from_plain

S = 4.4421167  # the published object's largest dimension
RGB = tuple[float, float, float]


def plain_scene(name: str = "3dident") -> dict[str, Any]:
    return tomllib.loads(load_scene(name).text)


def spec_with(*changes: tuple[str, Any]) -> SceneSpec:
    """The default scene with some keys set, by dotted path."""
    plain = plain_scene()
    for path, value in changes:
        *parents, key = path.split(".")
        table = plain
        for parent in parents:
            table = table.setdefault(parent, {})
        table[key] = value
    return from_plain(SceneSpec, plain)


def points(n: int = 50) -> NDArray[np.float32]:
    u = np.random.default_rng(5).random((n, 10)).astype(np.float32)
    corners = np.stack([np.zeros(10), np.ones(10), np.full(10, 0.5)]).astype(np.float32)
    return np.concatenate([corners, u])


def smooth_hsv(h: float, s: float, v: float) -> RGB:
    """HSV to RGB by the formula without cases, for a hue of any sign."""

    def channel(n: int) -> float:
        k = (n + 6 * h) % 6
        return v - v * s * max(0.0, min(k, 4 - k, 1.0))

    return channel(5), channel(3), channel(1)


def published_hsv(h: float, s: float, v: float) -> RGB:
    """What the 2021 pictures were made with: the sector is rounded towards zero, so negative hues leave [0, 1]."""
    sector = math.trunc(6 * h)
    f = 6 * h - sector
    p, q, t = v * (1 - s), v * (1 - s * f), v * (1 - s * (1 - f))
    return [(v, t, p), (q, v, p), (p, v, t), (p, q, v), (t, p, v), (v, p, q)][sector % 6]


def published_params(u: NDArray[np.float32], hsv: Callable[[float, float, float], RGB]) -> SceneParams:
    """The published scene, written out from its description alone."""
    raw = 2 * u.astype(np.float64) - 1
    x, y, z = raw[:3] * 3
    alpha, beta, gamma, theta, *hues = raw[3:] * math.pi / 2
    here = (x, y, z + S / 2)
    white = (1.0, 1.0, 1.0)
    light = type(scene_params(load_scene("3dident").spec, u).lights["sun"])
    return SceneParams(
        object_location=here,
        object_rotation=(alpha, beta, gamma),
        object_rgb=hsv(hues[0] / (2 * math.pi), 1.0, 1.0),
        ground_rgb=hsv(hues[2] / (2 * math.pi), 0.6, 1.0),
        lights={
            "static": light((0, 0, 7), (0, 0, 0), white, 39.2699),
            "sun": light((0, 0, 10), (0, 0, 0), white, 0.5),
            "spotlight": light(
                (4 * math.sin(theta), 4 * math.cos(theta), 6 + S), here, hsv(hues[1] / (2 * math.pi), 0.8, 1.0), 3000
            ),
        },
    )


def numbers(params: SceneParams) -> NDArray[np.float64]:
    flat = [*params.object_location, *params.object_rotation, *params.object_rgb, *params.ground_rgb]
    for _, light in sorted(params.lights.items()):
        flat += [*light.location, *light.aim, *light.rgb, light.power]
    return np.array(flat, dtype=np.float64)


@pytest.mark.parametrize(("name", "hsv"), [("3dident", smooth_hsv), ("3dident-v1", published_hsv)])
def test_a_latent_becomes_the_published_numbers(name: str, hsv: Callable[[float, float, float], RGB]) -> None:
    spec = load_scene(name).spec
    for u in points():
        params, expected = scene_params(spec, u), published_params(u, hsv)
        assert sorted(params.lights) == sorted(expected.lights)
        np.testing.assert_allclose(numbers(params), numbers(expected), atol=1e-6)


@pytest.mark.parametrize("name", ["3dident", "3dident-v1"])
def test_what_no_latent_moves_is_the_published_scene(name: str) -> None:
    spec = load_scene(name).spec
    assert spec.camera.location == (8, 0, 8)
    assert spec.camera.look_at == (0, 0, 0)
    assert (spec.camera.focal_length_mm, spec.camera.sensor_width_mm, spec.camera.clip) == (35, 50, (0.1, 100))
    assert spec.ground.size == 1500
    assert spec.ground.z == pytest.approx(-S)
    for material in (spec.object, spec.ground):
        assert (material.ior, material.roughness) == (1.2, 0.35)
    static, sun, spot = (spec.lights[k] for k in ("static", "sun", "spotlight"))
    assert (static.type, static.size) == ("area", 1)
    assert (sun.type, sun.angle_rad) == ("sun", 0.199337)
    assert (spot.type, spot.radius, spot.cone_deg, spot.blend, spot.aim) == ("spot", 0.5, 35, 0.1, "object")
    assert spec.mesh.scale == pytest.approx(0.634686 * 1.5)
    assert spec.mesh.rotate_z_deg == -45
    assert spec.mesh.translate == pytest.approx((0, 0, -0.906694 * 1.5))


def test_the_two_bundled_specs_differ_in_name_description_and_hues_alone() -> None:
    first, second = plain_scene("3dident"), plain_scene("3dident-v1")
    assert {key for key in {*first, *second} if first.get(key) != second.get(key)} == {"name", "description", "hues"}


@pytest.mark.parametrize(("turn", "rgb"), [(-0.1, (1, -0.6, 0)), (-0.175, (1, 0, 1.05))])
def test_published_hues_leave_the_unit_interval_where_negative(turn: float, rgb: RGB) -> None:
    u = np.full(10, 0.5)
    u[7] = turn * 2 + 0.5
    assert scene_params(load_scene("3dident-v1").spec, u).object_rgb == pytest.approx(rgb, abs=1e-6)


def object_colours(name: str, u: NDArray[np.float64]) -> NDArray[np.float64]:
    spec = load_scene(name).spec
    latents = np.full((len(u), 10), 0.5)
    latents[:, 7] = u
    return np.clip([scene_params(spec, latent).object_rgb for latent in latents], 0, 1)


def test_published_hues_are_not_injective() -> None:
    # Raw hues in (-2/3, 0) all render as red, black light in the other channels.
    colours = object_colours("3dident-v1", np.linspace(1 / 6, 1 / 2, 12)[1:-1])
    np.testing.assert_allclose(colours, np.tile([1.0, 0.0, 0.0], (10, 1)), atol=1e-6)


@pytest.mark.parametrize("column", [7, 8, 9])
def test_wrapped_hues_are_injective_and_within_the_unit_interval(column: int) -> None:
    spec = load_scene("3dident").spec
    latents = np.full((201, 10), 0.5)
    latents[:, column] = np.linspace(0, 1, 201)
    params = [scene_params(spec, u) for u in latents]
    colours = np.array([(p.object_rgb, p.lights["spotlight"].rgb, p.ground_rgb)[column - 7] for p in params])
    assert colours.min() >= 0
    assert colours.max() <= 1
    apart = np.abs(colours[:, None] - colours[None]).max(axis=-1)
    # A turn runs along six edges of a cube of side `saturation`: a step of 1/400 turn moves one channel by 6/400 of it,
    # or two by that much together.
    saturation = (1.0, 0.8, 0.6)[column - 7]
    assert apart[~np.eye(201, dtype=bool)].min() > 0.5 * saturation * 6 / 400 - 1e-6


@pytest.mark.parametrize("column", range(10))
def test_each_factor_moves_its_own_target_alone(column: int) -> None:
    spec = load_scene("3dident").spec
    low, high = np.full(10, 0.5), np.full(10, 0.5)
    low[column], high[column] = 0.3, 0.9
    before, after = scene_params(spec, low), scene_params(spec, high)
    changed = {f.name for f in dataclasses.fields(SceneParams) if getattr(before, f.name) != getattr(after, f.name)}
    expected = {0: {"object_location", "lights"}, 1: {"object_location", "lights"}, 2: {"object_location", "lights"}}
    rest = {3: {"object_rotation"}, 4: {"object_rotation"}, 5: {"object_rotation"}, 6: {"lights"}, 8: {"lights"}}
    colours = {7: {"object_rgb"}, 9: {"ground_rgb"}}
    assert changed == {**expected, **rest, **colours}[column]


def test_the_spotlight_follows_the_object() -> None:
    u = np.array([0.1, 0.9, 0.3, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    params = scene_params(load_scene("3dident").spec, u)
    assert params.lights["spotlight"].aim == params.object_location
    assert params.lights["static"].aim == (0, 0, 0)


def test_a_factor_adds_to_the_rest_value_of_any_target() -> None:
    spec = spec_with(
        ("object.rotation_rad", [0.25, 0.0, 0.0]),
        ("object.hue_rad", 1.0),
        ("factors.ground_hue", {"target": "lights.sun.power", "range": [-0.25, 1.0]}),
    )
    params = scene_params(spec, np.full(10, 0.5))
    assert params.object_rotation[0] == pytest.approx(0.25)
    assert params.object_rgb == pytest.approx(smooth_hsv(1 / (2 * math.pi), 1, 1))
    assert params.lights["sun"].power == pytest.approx(0.5 + 0.375)
    assert spec.factor_table[9].unit == "W"
    assert spec.factor_table[9].drives == "lights.sun.power"


def test_a_light_driven_below_nothing_is_off() -> None:
    spec = spec_with(("factors.ground_hue", {"target": "lights.sun.power", "range": [-5.0, 0.0]}))
    assert scene_params(spec, np.zeros(10)).lights["sun"].power == 0


def test_frozen_factors_hold_their_column() -> None:
    spec = spec_with(("factors.object_y.frozen", 0.25), ("factors.object_hue.frozen", 1))
    assert spec.frozen == {1: 0.25, 7: 1.0}
    assert spec.factor_table.get("object_y").frozen == 0.25
    u = np.full(10, 0.5)
    u[[1, 7]] = 0.25, 1.0
    assert scene_params(spec, u).object_location[1] == pytest.approx(-1.5)
    with pytest.raises(SpecError, match=r"latents\[0, 1\] \(object_y\) = 0\.5: the scene holds object_y at 0\.25"):
        scene_params(spec, np.full(10, 0.5))


def test_a_frozen_value_that_float32_cannot_hold_still_matches() -> None:
    spec = spec_with(("factors.object_y.frozen", 0.1))
    u = np.full((4, 10), 0.5, np.float32)
    u[:, 1] = 0.1
    assert check_latents(u, spec).shape == (4, 10)


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("format", 2, "format = 2: this version reads format 1"),
    ("name", "  ", "name: expected a text that is not empty"),
    ("name", 3, "name: expected a text, got 3"),
    ("hues", "rainbow", "hues: expected one of 'wrapped', 'as-published', got 'rainbow'"),
    ("camara", {}, "camara: unknown key; expected one of format, name, camera"),
    ("camera.location", [8.0, 0.0], "camera.location: expected a list of 3 values, each a number, got [8.0, 0.0]"),
    ("camera.location", [8.0, 0.0, "8"], "camera.location[2]: expected a number, got '8'"),
    ("camera.location", [0.0, 0.0, 0.0], "camera: location and look_at are the same point"),
    ("camera.focal_length_mm", 0.0, "camera: focal_length_mm = 0.0: expected more than 0"),
    ("camera.sensor_width_mm", -1, "camera: sensor_width_mm = -1.0: expected more than 0"),
    ("camera.focal_length_mm", float("nan"), "camera.focal_length_mm: expected a number, got nan"),
    ("camera.clip", [1.0, 1.0], "camera: clip = [1.0, 1.0]: expected 0 < near < far"),
    ("camera.clip", [0.0, 1.0], "camera: clip = [0.0, 1.0]: expected 0 < near < far"),
    ("camera.lens", 35, "camera.lens: unknown key; expected one of location, look_at"),
    ("mesh.source", "teapot.blend", "mesh: source = 'teapot.blend': expected .obj, .ply or .json"),
    ("mesh.tessellation", 0, "mesh: tessellation = 0: expected 1 to 256"),
    ("mesh.tessellation", 257, "mesh: tessellation = 257: expected 1 to 256"),
    ("mesh.tessellation", 16.0, "mesh.tessellation: expected a whole number, got 16.0"),
    ("mesh.tessellation", True, "mesh.tessellation: expected a whole number, got True"),
    ("mesh.smooth", "yes", "mesh.smooth: expected true or false, got 'yes'"),
    ("mesh.scale", 0, "mesh: scale = 0.0: expected more than 0"),
    ("mesh.size", 4.0, "mesh: size is given, so scale and translate must not be"),
    ("mesh.size", -4.0, "mesh: size = -4.0: expected more than 0"),
    ("object.saturation", 1.5, "object: saturation = 1.5: expected 0 to 1"),
    ("object.value", -0.1, "object: value = -0.1: expected 0 to 1"),
    ("object.ior", 0.9, "object: ior = 0.9: expected at least 1"),
    ("object.roughness", 1.1, "object: roughness = 1.1: expected 0 to 1"),
    ("ground.size", 0.0, "ground: size = 0.0: expected more than 0"),
    ("ground.roughness", -1, "ground: roughness = -1.0: expected 0 to 1"),
    ("lights", {}, "lights: expected at least one light"),
    ("lights.sun.type", "laser", "lights.sun.type: expected one of 'area', 'sun', 'spot', 'point', got 'laser'"),
    ("lights.sun.power", -1.0, "lights.sun: power = -1.0: expected 0 or more"),
    ("lights.sun.power", float("inf"), "lights.sun.power: expected a number, got inf"),
    ("lights.sun.aim", "camera", "lights.sun.aim: expected one of 'object' or a list of 3 values"),
    ("lights.sun.aim", [0.0], "lights.sun.aim: expected one of 'object' or a list of 3 values"),
    ("lights.sun.angle_rad", 3.2, "lights.sun: angle_rad = 3.2: expected 0 to pi"),
    ("lights.static.size", 0.0, "lights.static: size = 0.0: expected more than 0"),
    ("lights.spotlight.radius", -0.5, "lights.spotlight: radius = -0.5: expected 0 or more"),
    ("lights.spotlight.cone_deg", 0.0, "lights.spotlight: cone_deg = 0.0: expected more than 0"),
    ("lights.spotlight.cone_deg", 181.0, "lights.spotlight: cone_deg = 181.0: expected more than 0"),
    ("lights.spotlight.blend", 1.5, "lights.spotlight: blend = 1.5: expected 0 to 1"),
    ("lights.spotlight.saturation", 2.0, "lights.spotlight: saturation = 2.0: expected 0 to 1"),
    ("factors.object_x.range", [3.0, 3.0], "factors.object_x: range = [3.0, 3.0]: expected low < high"),
    ("factors.object_x.range", [3.0, -3.0], "factors.object_x: range = [3.0, -3.0]: expected low < high"),
    ("factors.object_x.range", [float("nan"), 1.0], "factors.object_x.range[0]: expected a number, got nan"),
    ("factors.object_x.range", 3.0, "factors.object_x.range: expected a list of 2 values"),
    ("factors.object_x.frozen", 1.5, "factors.object_x: frozen = 1.5: expected a point of the unit interval"),
    ("factors.object_x.target", "object.scale", "factors.object_x.target = 'object.scale': unknown target; expected"),
    (
        "factors.object_x.target",
        "lights.sun.theta",
        "factors.object_x.target = 'lights.sun.theta': unknown target; expected",
    ),
    ("factors.object_y.target", "object.location.x", "factors.object_x drives it already"),
    (
        "factors.shape",
        {"target": "object.hue", "range": [0.0, 1.0]},
        "factors.shape: unknown factor; expected object_x",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD_VALUES, ids=[f"{p}={v!r:.20}" for p, v, _ in BAD_VALUES])
def test_a_bad_value_is_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        spec_with((path, value))


REQUIRED = [
    "format",
    "name",
    "camera",
    "mesh",
    "ground",
    "lights",
    "factors",
    "camera.location",
    "camera.clip",
    "mesh.source",
    "ground.size",
    "ground.z",
    "lights.sun.type",
    "lights.sun.power",
    "lights.sun.location",
    "factors.object_x",
    "factors.ground_hue",
    "factors.object_x.target",
    "factors.object_x.range",
]


@pytest.mark.parametrize("path", REQUIRED)
def test_a_missing_key_is_refused_by_name(path: str) -> None:
    plain = copy.deepcopy(plain_scene())
    *parents, key = path.split(".")
    table = plain
    for parent in parents:
        table = table[parent]
    del table[key]
    with pytest.raises(SpecError, match=re.escape(f"{path}: missing")):
        from_plain(SceneSpec, plain)


def test_a_number_past_every_float_is_refused() -> None:
    text = load_scene("3dident").text.replace("power = 0.5", "power = 1" + "0" * 400)
    with pytest.raises(SpecError, match=r"lights\.sun\.power"):
        SceneSpec.from_toml(text)


def test_errors_name_the_file() -> None:
    with pytest.raises(SpecError, match=r"^mine\.toml: not valid TOML: "):
        SceneSpec.from_toml("camera = [", where="mine.toml")
    with pytest.raises(SpecError, match=r"^mine\.toml: name: missing"):
        SceneSpec.from_toml("format = 1", where="mine.toml")


BASE = load_scene("3dident")
MESH = BASE.mesh_path.read_bytes()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("format = 1", "# another comment\nformat = 1"),
        ('name = "3dident"', 'name = "mine"'),
        ("ten factors", "as many factors"),
        ("meshes/newell-teapot.json", "elsewhere/pot.json"),
        ("power = 0.5", "power = 0.50"),
        ("size = 1.0", "size = 1"),
        # A default written out is no change.
        ("smooth = true", ""),
    ],
)
def test_the_digest_ignores_what_no_picture_shows(old: str, new: str) -> None:
    assert BASE.text.count(old) >= 1
    assert SceneSpec.from_toml(BASE.text.replace(old, new, 1)).digest(MESH) == BASE.digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("power = 0.5", "power = 0.51"),
        ("tessellation = 10", "tessellation = 11"),
        ("smooth = true", "smooth = false"),
        ('hues = "wrapped"', 'hues = "as-published"'),
        ("[lights.sun]", "[lights.sol]"),
        ("range = [-3.0, 3.0] }", "range = [-3.0, 3.0], frozen = 0.5 }"),
        ("focal_length_mm = 35.0", "focal_length_mm = 35.000001"),
    ],
)
def test_the_digest_tells_scenes_apart(old: str, new: str) -> None:
    assert BASE.text.count(old) >= 1
    assert SceneSpec.from_toml(BASE.text.replace(old, new, 1)).digest(MESH) != BASE.digest


def test_the_digest_covers_the_mesh() -> None:
    assert BASE.spec.digest(MESH + b" ") != BASE.digest


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (np.zeros((3, 9)), "latents: expected shape (N, 10), got (3, 9)"),
        (np.zeros(10), "latents: expected shape (N, 10), got (10,)"),
        (np.zeros((2, 1, 10)), "latents: expected shape (N, 10), got (2, 1, 10)"),
        ([["a"] * 10], "latents: expected numbers, shape (N, 10)"),
        ([[0.0] * 10, [0.0] * 9], "latents: expected numbers, shape (N, 10)"),
        (np.full((1, 10), np.nan), "latents[0, 0] (object_x) = nan: expected a number in [0, 1]"),
        (np.full((1, 10), np.inf), "latents[0, 0] (object_x) = inf: expected a number in [0, 1]"),
        (np.full((1, 10), 1.5), "latents[0, 0] (object_x) = 1.5: expected a number in [0, 1]"),
    ],
)
def test_latents_that_cannot_be_are_refused(latents: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        check_latents(latents)


def test_the_first_bad_latent_is_named_and_raw_coordinates_are_recognised() -> None:
    u = np.full((4, 10), 0.5)
    u[2, 6] = -0.25
    with pytest.raises(SpecError, match=re.escape("latents[2, 6] (spotlight_theta) = -0.25")) as caught:
        check_latents(u)
    assert "(raw + 1) / 2" in str(caught.value)
    u[3, 0] = 7
    with pytest.raises(SpecError) as caught:
        check_latents(u)
    assert "raw" not in str(caught.value)


def test_latents_become_contiguous_float32() -> None:
    u = np.asfortranarray(np.random.default_rng(0).random((6, 10)))
    checked = check_latents(u)
    assert checked.dtype == np.float32
    assert checked.flags.c_contiguous
    np.testing.assert_array_equal(checked, u.astype(np.float32))
    assert check_latents(np.ones((2, 10), dtype=np.int64)).max() == 1


@pytest.mark.parametrize("shape", [(1, 10), (9,), ()])
def test_scene_params_takes_one_point(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="expected shape"):
        scene_params(BASE.spec, np.zeros(shape))


def test_every_factor_of_the_table_is_in_every_spec() -> None:
    assert BASE.spec.factor_table == FACTORS

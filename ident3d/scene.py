"""Scene specs, and the pure map from a latent to what Blender is told to render.

A spec is a TOML file (see `blender_scenes/README.md`). `scene_params(spec, u)` is the first half of the generating
process: unit cube -> positions, angles and colours. It needs numpy alone, so it is tested without Blender. The second
half, parameters -> picture, is `ident3d.render.blender`.
"""

from __future__ import annotations

import colorsys
import dataclasses
import hashlib
import json
import math
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ident3d.errors import SpecError
from ident3d.factors import FACTORS, Factor, Factors
from ident3d.schema import from_plain, to_plain

__all__ = [
    "CameraSpec",
    "FactorSpec",
    "GroundSpec",
    "LightParams",
    "LightSpec",
    "MeshSpec",
    "ObjectSpec",
    "SceneParams",
    "SceneSpec",
    "check_latents",
    "scene_params",
]

Vec3 = tuple[float, float, float]
FORMAT = 1


def _require(good: bool, message: str) -> None:
    if not good:
        raise SpecError(message)


@dataclass(frozen=True)
class CameraSpec:
    """A perspective camera that looks at a point, its up vector in the plane of the world's z."""

    location: Vec3
    look_at: Vec3
    focal_length_mm: float
    sensor_width_mm: float
    clip: tuple[float, float]

    def __post_init__(self) -> None:
        _require(self.focal_length_mm > 0, f"focal_length_mm = {self.focal_length_mm}: expected more than 0")
        _require(self.sensor_width_mm > 0, f"sensor_width_mm = {self.sensor_width_mm}: expected more than 0")
        _require(0 < self.clip[0] < self.clip[1], f"clip = {list(self.clip)}: expected 0 < near < far")
        _require(self.location != self.look_at, "location and look_at are the same point")


@dataclass(frozen=True)
class MeshSpec:
    """The object's geometry.

    `source` is an .obj, a .ply, or a .json of Bezier patches, found beside the spec or else among the bundled scenes.
    Either `size` centres the mesh and scales its largest dimension to that many Blender units, or `scale`,
    `rotate_z_deg` and `translate` are applied in this order.
    """

    source: str
    tessellation: int = 10
    smooth: bool = True
    size: float | None = None
    scale: float = 1.0
    rotate_z_deg: float = 0.0
    translate: Vec3 = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        suffix = Path(self.source).suffix.lower()
        _require(suffix in (".json", ".obj", ".ply"), f"source = {self.source!r}: expected .obj, .ply or .json")
        _require(1 <= self.tessellation <= 256, f"tessellation = {self.tessellation}: expected 1 to 256")
        _require(self.scale > 0, f"scale = {self.scale}: expected more than 0")
        _require(self.size is None or self.size > 0, f"size = {self.size}: expected more than 0")
        plain = self.scale == 1 and not any(self.translate)
        _require(self.size is None or plain, "size is given, so scale and translate must not be")


@dataclass(frozen=True)
class ObjectSpec:
    """Where the object rests when every factor's value is 0, and its material.

    `saturation` and `value` complete the hue to a colour; `hue_rad` is its hue before any factor is added.
    """

    location: Vec3 = (0.0, 0.0, 0.0)
    rotation_rad: Vec3 = (0.0, 0.0, 0.0)
    hue_rad: float = 0.0
    saturation: float = 1.0
    value: float = 1.0
    ior: float = 1.2
    roughness: float = 0.35

    def __post_init__(self) -> None:
        _check_material(self)


@dataclass(frozen=True)
class GroundSpec:
    """A square plane of side `size` at height `z`, and its material."""

    size: float
    z: float
    hue_rad: float = 0.0
    saturation: float = 0.6
    value: float = 1.0
    ior: float = 1.2
    roughness: float = 0.35

    def __post_init__(self) -> None:
        _require(self.size > 0, f"size = {self.size}: expected more than 0")
        _check_material(self)


def _check_material(m: ObjectSpec | GroundSpec) -> None:
    _check_colour(m.saturation, m.value)
    _require(m.ior >= 1, f"ior = {m.ior}: expected at least 1")
    _require(0 <= m.roughness <= 1, f"roughness = {m.roughness}: expected 0 to 1")


def _check_colour(saturation: float, value: float) -> None:
    _require(0 <= saturation <= 1, f"saturation = {saturation}: expected 0 to 1")
    _require(0 <= value <= 1, f"value = {value}: expected 0 to 1")


@dataclass(frozen=True)
class LightSpec:
    """One light.

    Attributes:
        type: `area` (a square of side `size`), `sun` (of angular diameter `angle_rad`), `spot` or `point` (balls of
            radius `radius`; a spot has a cone of `cone_deg` with a soft edge of `blend`, 0 to 1).
        power: watts; W/m2 for a sun.
        location: Blender units. A sun shines from there towards `aim`, from infinitely far.
        aim: a point, or `object` to follow the object.
        orbit_radius: where given, the light stands on the circle location + r (sin theta, cos theta, 0).
    """

    type: Literal["area", "sun", "spot", "point"]
    power: float
    location: Vec3
    aim: Literal["object"] | Vec3 = (0.0, 0.0, 0.0)
    orbit_radius: float | None = None
    theta_rad: float = 0.0
    hue_rad: float = 0.0
    saturation: float = 0.0
    value: float = 1.0
    size: float = 1.0
    angle_rad: float = 0.0
    radius: float = 0.0
    cone_deg: float = 45.0
    blend: float = 0.0

    def __post_init__(self) -> None:
        _check_colour(self.saturation, self.value)
        _require(self.power >= 0, f"power = {self.power}: expected 0 or more")
        _require(self.size > 0, f"size = {self.size}: expected more than 0")
        _require(0 <= self.angle_rad <= math.pi, f"angle_rad = {self.angle_rad}: expected 0 to pi")
        _require(self.radius >= 0, f"radius = {self.radius}: expected 0 or more")
        _require(0 < self.cone_deg <= 180, f"cone_deg = {self.cone_deg}: expected more than 0, at most 180")
        _require(0 <= self.blend <= 1, f"blend = {self.blend}: expected 0 to 1")


@dataclass(frozen=True)
class FactorSpec:
    """What a factor drives: `target` gets the factor's value, low + u (high - low), added to the spec's own value.

    With `frozen = u` the factor is held there, and the column of the latents is constant.
    """

    target: str
    range: tuple[float, float]
    frozen: float | None = None

    def __post_init__(self) -> None:
        low, high = self.range
        _require(low < high, f"range = [{low}, {high}]: expected low < high")
        ok = self.frozen is None or 0 <= self.frozen <= 1
        _require(ok, f"frozen = {self.frozen}: expected a point of the unit interval, 0 to 1")


@dataclass(frozen=True)
class SceneSpec:
    """A whole scene: what stands where, and which factor moves it.

    `hues` tells how a hue angle becomes a colour: `wrapped` takes it modulo a full turn; `as-published` keeps the
    negative angles that the 2021 pictures were made with, for which the map from hue to colour is not injective.
    """

    format: int
    name: str
    camera: CameraSpec
    mesh: MeshSpec
    ground: GroundSpec
    lights: dict[str, LightSpec]
    factors: dict[str, FactorSpec]
    object: ObjectSpec = field(default_factory=ObjectSpec)
    description: str = ""
    hues: Literal["wrapped", "as-published"] = "wrapped"

    def __post_init__(self) -> None:
        _require(self.format == FORMAT, f"format = {self.format}: this version reads format {FORMAT}")
        _require(bool(self.name.strip()), "name: expected a text that is not empty")
        _require(bool(self.lights), "lights: expected at least one light")
        missing = [name for name in FACTORS.names if name not in self.factors]
        _require(not missing, f"factors.{missing[0] if missing else ''}: missing; freeze it to hold it still")
        for name in self.factors:
            _require(name in FACTORS.names, f"factors.{name}: unknown factor; expected {', '.join(FACTORS.names)}")
        targets = self.targets
        seen: dict[str, str] = {}
        for name, f in self.factors.items():
            where = f"factors.{name}.target = {f.target!r}"
            _require(f.target in targets, f"{where}: unknown target; expected one of {', '.join(targets)}")
            _require(f.target not in seen, f"{where}: factors.{seen.get(f.target)} drives it already")
            seen[f.target] = name

    @property
    def targets(self) -> dict[str, float]:
        """All that a factor can drive in this scene, with its value before any factor is added."""
        base: dict[str, float] = {}
        for axis, x, angle in zip("xyz", self.object.location, self.object.rotation_rad, strict=True):
            base[f"object.location.{axis}"] = x
            base[f"object.rotation.{axis}"] = angle
        base["object.hue"] = self.object.hue_rad
        base["ground.hue"] = self.ground.hue_rad
        for name, light in self.lights.items():
            base[f"lights.{name}.power"] = light.power
            base[f"lights.{name}.hue"] = light.hue_rad
            if light.orbit_radius is not None:
                base[f"lights.{name}.theta"] = light.theta_rad
        return base

    @cached_property
    def factor_table(self) -> Factors:
        """The ten factors as this scene drives them: its targets, ranges and frozen values."""
        return Factors(_scene_factor(f, self.factors[f.name]) for f in FACTORS)

    @property
    def frozen(self) -> dict[int, float]:
        """Column -> u, for the factors that this scene holds."""
        return {f.column: f.frozen for f in self.factor_table if f.frozen is not None}

    def digest(self, mesh: bytes) -> str:
        """The sha256 of what the pictures depend on: the parsed spec without its texts, and the mesh file's bytes."""
        plain = to_plain(dataclasses.replace(self, name="x", description=""))
        plain["mesh"].pop("source")
        text = json.dumps(plain, sort_keys=True).encode()
        return hashlib.sha256(text + b"\0" + mesh).hexdigest()

    @classmethod
    def from_toml(cls, text: str, where: str = "") -> SceneSpec:
        """Parse and check a spec.

        Raises:
            SpecError: not TOML, a missing or unknown key, a wrong type or value; the text begins with `where`.
        """
        try:
            return from_plain(cls, tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{where or 'scene'}: not valid TOML: {error}") from None
        except SpecError as error:
            raise SpecError(f"{where or 'scene'}: {error}") from None


def _scene_factor(factor: Factor, spec: FactorSpec) -> Factor:
    drives = factor.drives if spec.target == factor.target else spec.target
    unit = "W" if spec.target.endswith(".power") else "rad"
    if spec.target.startswith("object.location"):
        unit = "Blender units"
    low, high = spec.range
    return dataclasses.replace(
        factor, low=low, high=high, unit=unit, target=spec.target, drives=drives, frozen=spec.frozen
    )


@dataclass(frozen=True)
class LightParams:
    """One light of one picture: where it stands and looks (Blender units), its linear RGB, its power in watts."""

    location: Vec3
    aim: Vec3
    rgb: Vec3
    power: float


@dataclass(frozen=True)
class SceneParams:
    """All that differs from one picture of a scene to the next.

    Locations in Blender units, `object_rotation` in radians (Euler XYZ), colours in linear RGB; with `as-published`
    hues a channel can lie outside [0, 1].
    """

    object_location: Vec3
    object_rotation: Vec3
    object_rgb: Vec3
    ground_rgb: Vec3
    lights: dict[str, LightParams]


def scene_params(spec: SceneSpec, u: ArrayLike) -> SceneParams:
    """The parameters of the picture of one latent.

    Args:
        spec: the scene.
        u: a point of the unit cube, shape (10,).

    Raises:
        SpecError: u has another shape, leaves the cube, or differs from a frozen factor.

    Example:
        >>> from ident3d import load_scene
        >>> params = scene_params(load_scene("3dident").spec, [0.5] * 10)
        >>> params.object_rgb, params.object_rotation
        ((1.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    """
    point = check_latents(np.asarray(u)[None], spec)[0]
    state = spec.targets
    for factor in spec.factor_table:
        state[factor.target] += factor.value(float(point[factor.column]))
    here = (state["object.location.x"], state["object.location.y"], state["object.location.z"])
    angles = (state["object.rotation.x"], state["object.rotation.y"], state["object.rotation.z"])
    return SceneParams(
        object_location=here,
        object_rotation=angles,
        object_rgb=_rgb(spec, state["object.hue"], spec.object.saturation, spec.object.value),
        ground_rgb=_rgb(spec, state["ground.hue"], spec.ground.saturation, spec.ground.value),
        lights={name: _light(spec, name, state, here) for name in spec.lights},
    )


def _light(spec: SceneSpec, name: str, state: dict[str, float], here: Vec3) -> LightParams:
    light = spec.lights[name]
    x, y, z = light.location
    if light.orbit_radius is not None:
        theta = state[f"lights.{name}.theta"]
        x, y = x + light.orbit_radius * math.sin(theta), y + light.orbit_radius * math.cos(theta)
    return LightParams(
        location=(x, y, z),
        aim=here if light.aim == "object" else light.aim,
        rgb=_rgb(spec, state[f"lights.{name}.hue"], light.saturation, light.value),
        power=max(0.0, state[f"lights.{name}.power"]),
    )


def _rgb(spec: SceneSpec, angle_rad: float, saturation: float, value: float) -> Vec3:
    turn = angle_rad / (2 * math.pi)
    # colorsys does not wrap a negative hue: it returns channels outside [0, 1]. The published pictures have them.
    return colorsys.hsv_to_rgb(turn % 1.0 if spec.hues == "wrapped" else turn, saturation, value)


def check_latents(latents: ArrayLike, spec: SceneSpec | None = None) -> NDArray[np.float32]:
    """Latents as float32 (N, 10), checked.

    Raises:
        SpecError: another shape, not numbers, NaN, outside [0, 1], or unequal to a factor that `spec` holds; the text
            names the first bad row and column.
    """
    try:
        u = np.ascontiguousarray(latents, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise SpecError(f"latents: expected numbers, shape (N, {len(FACTORS)}): {error}") from None
    if u.ndim != 2 or u.shape[1] != len(FACTORS):
        raise SpecError(f"latents: expected shape (N, {len(FACTORS)}), got {u.shape}")
    bad = np.argwhere(~((u >= 0) & (u <= 1)))
    if len(bad):
        row, column = (int(i) for i in bad[0])
        hint = "; raw coordinates in [-1, 1] become latents by (raw + 1) / 2" if np.all(np.abs(u) <= 1) else ""
        name = FACTORS[column].name
        raise SpecError(f"latents[{row}, {column}] ({name}) = {u[row, column]}: expected a number in [0, 1]{hint}")
    for column, held in (spec.frozen if spec else {}).items():
        off = np.flatnonzero(np.abs(u[:, column] - held) > 1e-6)
        if len(off):
            name = FACTORS[column].name
            raise SpecError(
                f"latents[{off[0]}, {column}] ({name}) = {u[off[0], column]}: the scene holds {name} at {held}; "
                f"set the column to {held} or take `frozen` out of the spec"
            )
    return u

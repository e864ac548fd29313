"""The scores that a perfect encoder could reach, where a scene's map from latents to pictures is not one to one.

With hues as published (`3dident-v1`), a third of the object's hues give the same red, so that no encoder can tell them
apart: R2 and MCC stay below 1, whatever it learns. How far below follows from the scene alone.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from ident3d.errors import DatasetError, SpecError
from ident3d.factors import Factor
from ident3d.scene import SceneSpec, Vec3, scene_params
from ident3d.scenes import bundled_scenes, load_scene

__all__ = ["Ceiling", "ceilings", "scene_of"]

Array = np.ndarray[Any, np.dtype[Any]]

GRID = 1800
"""Values of u. Of a stretch that ends between two of them, R2 is off by 3 / GRID at most, less where it is short."""
NEAR = 0.49
"""Parameters are alike within so many steps of the grid: below half, the end of a stretch stays apart from the next."""


@dataclass(frozen=True)
class Ceiling:
    """What a perfect encoder reaches for one factor.

    Attributes:
        name: of the factor.
        r2: the greatest R2 of any function of the pictures, 0 to 1; 1 where the factor can be read off them.
        mcc: the greatest |Pearson correlation| of any function of the pictures, the root of `r2`.
        alike: intervals of u whose pictures are those of another u as well; none where `r2` is 1.
    """

    name: str
    r2: float
    mcc: float
    alike: tuple[tuple[float, float], ...] = ()

    @property
    def share(self) -> float:
        """The share of the unit interval that `alike` takes."""
        return math.fsum(high - low for low, high in self.alike)


def ceilings(spec: SceneSpec) -> tuple[Ceiling, ...]:
    """The scores that a perfect encoder could reach in a scene, one for each factor that is not frozen.

    Of all functions of the picture, E[u | picture] predicts a factor u best, and also correlates with it most:
    R2 = 1 - E[Var(u | picture)] / Var(u), |correlation| = sqrt(R2). What stands for the picture here is
    `scene_params(spec, u)` with colours as Blender takes them: a channel below 0 is 0, one above 1 stays. Where several
    u give the same parameters, they are told apart by nothing. Computed over 1800 values of u a factor, the others at
    0.5; in `3dident-v1`, stretches of 1/3, 1/4 and 1/9 of the interval have the same colour of object, spotlight and
    ground, and a stretch of length L leaves R2 = 1 - L^3: 0.963, 0.984 and 0.999.

    What is assumed:

    - u is uniform over its interval and independent of the other factors. A score over few samples, or over another
      marginal, may lie above the ceiling; so may one over pictures that the encoder knows by heart with their factors.
    - All else is visible in the picture, however dark or far out of sight: colours can be told from each other, the
      object is never hidden, no light is out or shines beside the scene. Scores that are reached may lie well below.
    - What is below 0 is lost. Blender 4.5 sets negative channels of lights and materials to 0 before it renders; grey
      highlights tell nothing of them either.
    - Different angles look different: symmetries of the object and full turns of a rotation are not considered.

    Spearman's correlation has no ceiling here: by ranks, E[u | picture] need not be the best function.

    Args:
        spec: the scene.

    Example:
        >>> from ident3d import load_scene
        >>> hue = {c.name: c for c in ceilings(load_scene("3dident-v1").spec)}["object_hue"]
        >>> round(hue.r2, 3), round(hue.mcc, 3), round(hue.share, 3)
        (0.963, 0.981, 0.333)
        >>> {c.r2 for c in ceilings(load_scene("3dident").spec)}
        {1.0}
    """
    return tuple(_ceiling(spec, factor) for factor in spec.factor_table if factor.frozen is None)


def _ceiling(spec: SceneSpec, factor: Factor) -> Ceiling:
    u = (np.arange(GRID) + 0.5) / GRID
    latents = np.full((GRID, len(spec.factor_table)), 0.5)
    for column, held in spec.frozen.items():
        latents[:, column] = held
    latents[:, factor.column] = u
    shown = np.array([_visible(spec, row) for row in latents])
    alike = _alike(shown[:, np.ptp(shown, axis=0) > 0])
    best = alike @ u / alike.sum(axis=1)
    unexplained = float(((u - best) ** 2).sum() / ((u - u.mean()) ** 2).sum())
    r2 = max(0.0, 1 - unexplained)
    return Ceiling(factor.name, r2, math.sqrt(r2), _intervals(alike.sum(axis=1) > 1))


def _visible(spec: SceneSpec, u: Float64[Array, " factors"]) -> list[float]:
    """All that the picture of a latent is made from."""
    params = scene_params(spec, u)
    found = [*params.object_location, *params.object_rotation]
    found += [*_as_rendered(params.object_rgb), *_as_rendered(params.ground_rgb)]
    for light in params.lights.values():
        found += [*light.location, *light.aim, *_as_rendered(light.rgb), light.power]
    return found


def _as_rendered(rgb: Vec3) -> Vec3:
    red, green, blue = (max(0.0, channel) for channel in rgb)
    return red, green, blue


def _alike(shown: Float64[Array, "grid parameters"]) -> Bool[Array, "grid grid"]:
    """Which rows have the same parameters, up to what lies between two neighbours on the grid.

    Args:
        shown: those parameters that vary.
    """
    from scipy.spatial.distance import cdist  # type: ignore[import-untyped]

    if not shown.shape[1]:
        return np.ones((len(shown), len(shown)), dtype=bool)
    steps = np.linalg.norm(np.diff(shown, axis=0), axis=1)
    # Most steps of a scene's maps are equally long, but for those of length 0, or of rounding.
    step = np.median(steps[steps > 1e-6 * steps.max()])
    found: Array = cdist(shown, shown) <= NEAR * step
    return found


def _intervals(cells: Bool[Array, " grid"]) -> tuple[tuple[float, float], ...]:
    """The runs of a grid's cells, as intervals of u."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], cells, [False]]).astype(int)))
    ends = (edges / len(cells)).tolist()
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def scene_of(data: object) -> SceneSpec | None:
    """The scene that a dataset's pictures were made from; None where that is unknown.

    A rendered dataset says it (`Ident3D`, streamed or not, also after a conversion that altered its pictures). The
    published 3DIdent (`ThreeDIdent`, or converted to shards) is `3dident-v1`. Unknown are all other published sets and
    datasets of other packages; and a scene of one's own behind a URL, as the manifest alone does not hold it: pull the
    dataset first.

    Args:
        data: a dataset.

    Raises:
        DatasetError: the files in the dataset's folder `scene/` are absent, or not those that it was rendered from.
    """
    from ident3d.datasets.published import ThreeDIdent
    from ident3d.datasets.split import ShardedSplit

    if isinstance(data, ThreeDIdent):
        return load_scene("3dident-v1").spec
    if not isinstance(data, ShardedSplit):
        return None
    manifest = data.manifest
    if manifest.scene is not None:
        return _rendered_scene(data)
    published = manifest.source is not None and manifest.source.layout == ThreeDIdent.layout.name
    return load_scene("3dident-v1").spec if published else None


def _rendered_scene(data: Any) -> SceneSpec | None:
    """The scene that a manifest names: a bundled one by its digest, or else from the dataset's folder."""
    from ident3d.shards.location import is_url

    record = data.manifest.scene
    for name in bundled_scenes():
        scene = load_scene(name)
        if scene.digest == record.digest:
            return dataclasses.replace(scene.spec, name=record.name)
    if is_url(data.root):
        return None
    folder = data.location.path("scene")
    try:
        spec = SceneSpec.from_toml((folder / "scene.toml").read_text(encoding="utf-8"))
        digest = spec.digest((folder / record.mesh).read_bytes())
    except (OSError, UnicodeDecodeError, SpecError) as error:
        raise DatasetError(f"{folder}: missing or altered ({error}); fetch the folder `scene` again") from None
    if digest != record.digest:
        raise DatasetError(
            f"{folder}: altered: scene.toml and {record.mesh} are not what the pictures were rendered from; "
            "fetch the folder `scene` again"
        )
    return spec

"""Finding a scene: a bundled one by name, the user's own by path, and the mesh that a spec names."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ident3d.errors import SpecError
from ident3d.scene import SceneSpec

__all__ = ["Scene", "bundled_scenes", "load_scene", "scene_text"]


@dataclass(frozen=True)
class Scene:
    """A spec as found: its text, and the file of its mesh.

    Attributes:
        spec: the parsed spec.
        text: the TOML text that it was parsed from.
        mesh_path: the mesh file, which exists.
    """

    spec: SceneSpec
    text: str
    mesh_path: Path

    @property
    def digest(self) -> str:
        """The sha256 of all that the pictures depend on; comments and names do not count."""
        return self.spec.digest(self.mesh_path.read_bytes())


def _bundle() -> Path:
    spec = find_spec("ident3d.blender_scenes")
    if spec is None or spec.origin is None:
        raise SpecError("the bundled scenes are not installed; reinstall ident3d")
    return Path(spec.origin).parent


def bundled_scenes() -> list[str]:
    """The names of the bundled scenes."""
    return sorted(path.stem for path in _bundle().glob("*.toml"))


def _find(name_or_path: str | Path) -> Path:
    bundled = _bundle() / f"{name_or_path}.toml"
    if str(name_or_path) in bundled_scenes():
        return bundled
    path = Path(name_or_path).expanduser()
    if path.suffix == ".toml" and path.is_file():
        return path
    names = ", ".join(bundled_scenes())
    what = "no such file" if path.suffix == ".toml" else "unknown scene"
    raise SpecError(f"scene {str(name_or_path)!r}: {what}; expected one of {names}, or the path of a .toml file")


def scene_text(name_or_path: str | Path) -> str:
    """The TOML text of a scene.

    Raises:
        SpecError: no such scene, or a file that cannot be read as text.
    """
    path = _find(name_or_path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"scene {path}: cannot be read: {error}") from None


def load_scene(name_or_path: str | Path) -> Scene:
    """Read and check a scene by bundled name or by path.

    A relative mesh is looked for beside the spec first, then among the bundled scenes, so that a copied spec finds
    the teapot.

    Raises:
        SpecError: no such scene, a spec that is not valid, or a mesh that is not there.
    """
    path = _find(name_or_path)
    text = scene_text(name_or_path)
    spec = SceneSpec.from_toml(text, where=str(name_or_path))
    # The second is where a dataset keeps it: beside the spec, without the folder that the spec may name.
    beside = path.parent / Path(spec.mesh.source).name
    places = [path.parent / spec.mesh.source, beside, _bundle() / spec.mesh.source]
    for place in places:
        if place.is_file():
            return Scene(spec, text, place.resolve())
    tried = " and ".join(str(p) for p in dict.fromkeys(places))
    raise SpecError(f"{name_or_path}: mesh.source = {spec.mesh.source!r}: no such file; looked for {tried}")

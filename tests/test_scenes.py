"""Finding scenes and their meshes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ident3d.errors import SpecError
from ident3d.render.finish import save_scene
from ident3d.scenes import bundled_scenes, load_scene, scene_text


def test_the_bundled_scenes_are_these_two() -> None:
    assert bundled_scenes() == ["3dident", "3dident-v1"]


@pytest.mark.parametrize("name", bundled_scenes())
def test_a_bundled_scene_is_whole(name: str) -> None:
    scene = load_scene(name)
    assert scene.spec.name == name
    assert scene.spec.description
    assert scene.text == scene_text(name)
    assert scene.mesh_path.is_file()


def test_the_bundled_scenes_render_different_pictures() -> None:
    assert load_scene("3dident").digest != load_scene("3dident-v1").digest


def test_a_copied_spec_still_finds_the_teapot(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(scene_text("3dident"))
    assert load_scene(path) == load_scene("3dident")
    assert load_scene(str(path)).digest == load_scene("3dident").digest


def test_a_mesh_beside_the_spec_goes_before_the_bundled_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(scene_text("3dident"))
    (tmp_path / "meshes").mkdir()
    mine = Path(shutil.copy(load_scene("3dident").mesh_path, tmp_path / "meshes" / "newell-teapot.json"))
    mine.write_bytes(mine.read_bytes() + b"\n")
    assert load_scene(path).mesh_path == mine.resolve()
    assert load_scene(path).digest != load_scene("3dident").digest


def test_a_mesh_can_have_an_absolute_path(tmp_path: Path) -> None:
    mesh = tmp_path / "pot.obj"
    mesh.write_text("v 0 0 0\n")
    spec = tmp_path / "specs" / "mine.toml"
    spec.parent.mkdir()
    spec.write_text(scene_text("3dident").replace("meshes/newell-teapot.json", str(mesh)))
    assert load_scene(spec).mesh_path == mesh.resolve()


def test_a_bundled_name_is_not_shadowed_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "3dident").mkdir()
    (tmp_path / "3dident.toml").write_text("format = 1")
    monkeypatch.chdir(tmp_path)
    assert load_scene("3dident").spec.name == "3dident"
    with pytest.raises(SpecError, match="name: missing"):
        load_scene("3dident.toml")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text(scene_text("3dident-v1"))
    assert load_scene("~/mine.toml").spec.hues == "as-published"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("3dIdent", "scene '3dIdent': unknown scene; expected one of 3dident, 3dident-v1, or the path of a .toml"),
        ("", "scene '': unknown scene"),
        ("../3dident", "scene '../3dident': unknown scene"),
        ("nowhere.toml", "scene 'nowhere.toml': no such file"),
    ],
)
def test_an_unknown_scene_is_refused_with_those_there_are(name: str, words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        load_scene(name)


def test_a_folder_is_no_scene(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").mkdir()
    with pytest.raises(SpecError, match="no such file"):
        load_scene(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"camera = ", "not valid TOML"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"", "format: missing"),
    ],
)
def test_a_file_that_is_no_scene_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=f"{re.escape(str(path))}: {words}"):
        load_scene(path)


def test_a_missing_mesh_is_named_with_the_places_looked_in(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(scene_text("3dident").replace("newell-teapot.json", "coffee-pot.obj"))
    with pytest.raises(SpecError, match=re.escape("mesh.source = 'meshes/coffee-pot.obj': no such file")) as caught:
        load_scene(path)
    assert str(tmp_path / "meshes" / "coffee-pot.obj") in str(caught.value)


def test_the_scene_that_a_dataset_keeps_loads_as_it_was(tmp_path: Path) -> None:
    # A mesh in a folder of its own, of a name that is also bundled: the copy must not find the bundled teapot.
    path = tmp_path / "mine.toml"
    path.write_text(scene_text("3dident"))
    (tmp_path / "meshes").mkdir()
    mesh = tmp_path / "meshes" / "newell-teapot.json"
    mesh.write_bytes(load_scene("3dident").mesh_path.read_bytes() + b"\n")
    scene = load_scene(path)
    (tmp_path / "data").mkdir()
    save_scene(tmp_path / "data", scene)
    assert load_scene(tmp_path / "data" / "scene" / "scene.toml").digest == scene.digest

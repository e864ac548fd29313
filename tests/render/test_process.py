"""Worker processes: which interpreter they run under, and what the user is told when Blender is not there."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ident3d import RenderError, SpecError, load_scene, render_latents
from ident3d.render.process import LIBRARIES, WorkerDied, WorkerProcess, blender_python
from ident3d.render.worker import Setup

POINT = [0.5] * 10
SETTINGS = {"samples": 1, "denoise_prefilter": "FAST"}


def setup(**changes: object) -> Setup:
    scene = load_scene("3dident")
    fields: dict[str, object] = {"scene": scene.text, "mesh": str(scene.mesh_path), "settings": SETTINGS}
    fields |= {"resolution": 16, "device": "cpu", "threads": 1, **changes}
    return Setup(**fields)  # type: ignore[arg-type]


def environment(folder: Path, **modules: str) -> str:
    """The interpreter of a bare environment that holds just these modules."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)
    return str(folder / "bin" / "python")


def test_the_option_goes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_text("")
        path.chmod(0o755)
    monkeypatch.delenv("IDENT3D_BLENDER_PYTHON", raising=False)
    assert blender_python(None) == sys.executable
    monkeypatch.setenv("IDENT3D_BLENDER_PYTHON", str(one))
    assert blender_python(None) == str(one)
    assert blender_python(str(two)) == str(two)


def test_a_missing_interpreter_is_named_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RenderError, match=r"--blender-python = .*none.*no such program"):
        blender_python(str(tmp_path / "none"))
    monkeypatch.setenv("IDENT3D_BLENDER_PYTHON", str(tmp_path))
    with pytest.raises(RenderError, match=r"IDENT3D_BLENDER_PYTHON = .*no such program"):
        blender_python(None)


def test_no_bpy_says_how_to_get_it(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", numpy="", PIL="")
    with pytest.raises(RenderError, match=r"(?s)has no bpy.*pip install 'bpy==4.5.\*' numpy Pillow"):
        render_latents(POINT, resolution=16, blender_python=python)


def test_a_python_without_wheels_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ident3d.render import process

    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    text = process._explain_import(sys.executable, "No module named 'bpy'")
    assert "Python 3.12 has no bpy wheel" in text
    assert "IDENT3D_BLENDER_PYTHON" in text
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    assert "pip install 'ident3d[render]'" in process._explain_import(sys.executable, "No module named 'bpy'")


def test_a_missing_shared_library_names_the_packages(tmp_path: Path) -> None:
    broken = "raise ImportError('libXi.so.6: cannot open shared object file: No such file or directory')"
    python = environment(tmp_path / "env", bpy=broken, numpy="", PIL="")
    with pytest.raises(RenderError, match=r"libXi.so.6 is absent. On Debian or Ubuntu: apt-get install") as told:
        render_latents(POINT, resolution=16, blender_python=python)
    for package in ("libx11", "libxrender", "libxfixes", "libxi", "libxkbcommon", "libsm", "libice", "libgl"):
        assert package in LIBRARIES
        assert package in str(told.value)


def test_a_missing_module_of_the_worker_is_named(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", bpy="", mathutils="Matrix = Vector = None")
    with pytest.raises(RenderError, match=r"has no numpy; a render worker needs: .* -m pip install bpy numpy Pillow"):
        render_latents(POINT, resolution=16, blender_python=python)


def test_something_that_is_no_python(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho no python here >&2\nexit 3\n")
    fake.chmod(0o755)
    with pytest.raises(WorkerDied, match=r"died with status 3; .* says: no python here"):
        render_latents(POINT, resolution=16, blender_python=str(fake))


@pytest.mark.render
def test_the_worker_needs_bpy_numpy_and_pillow_alone(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    python = environment(folder)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    for name in ("bpy", "numpy", "numpy.libs", "PIL", "pillow.libs", "cython", "zstandard", "requests"):
        spec = find_spec("bpy" if "." in name else name)
        origin = Path(spec.origin).parent if spec and spec.origin else None
        source = origin.parent / name if origin else None
        if source and source.is_dir():
            (site / name).symlink_to(source)
    pictures = render_latents([POINT, POINT], resolution=16, quality="draft", blender_python=python)
    assert pictures.shape == (2, 16, 16, 3)
    assert (pictures == render_latents([POINT, POINT], resolution=16, quality="draft")).all()


@pytest.mark.render
def test_a_device_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="device 'hip': Blender finds none on this machine"):
        WorkerProcess(sys.executable, setup(device="hip"), tmp_path / "log")


@pytest.mark.render
def test_a_mesh_that_blender_cannot_use_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "empty.obj").write_text("# nothing\n")
    with pytest.raises(SpecError, match=r"empty.obj: (holds no face|Blender finds no mesh)"):
        WorkerProcess(sys.executable, setup(mesh=str(tmp_path / "empty.obj")), tmp_path / "log")
    (tmp_path / "bad.ply").write_text("this is no ply")
    with pytest.raises(SpecError, match=r"bad.ply: (Blender cannot read it|Blender finds no mesh|holds no face)"):
        WorkerProcess(sys.executable, setup(mesh=str(tmp_path / "bad.ply")), tmp_path / "log")

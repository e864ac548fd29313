"""The package as installed: what importing it costs, what it ships, what it promises."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import ident3d


def test_import_is_light() -> None:
    code = (
        "import sys; import ident3d; "
        "print([m for m in ('torch', 'bpy', 'numpy', 'matplotlib', 'webdataset') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bpy_never_enters_the_users_process() -> None:
    code = "import sys; from ident3d import *; import ident3d.render.process; print('bpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_public_name_loads() -> None:
    for name in ident3d.__all__:
        assert getattr(ident3d, name) is not None
    assert set(ident3d.__all__) <= set(dir(ident3d))
    with pytest.raises(AttributeError, match="no attribute 'Ident4D'"):
        _ = ident3d.Ident4D


def test_data_files_are_shipped() -> None:
    scenes = files("ident3d.blender_scenes")
    for name in ("3dident.toml", "3dident-v1.toml", "README.md", "meshes/newell-teapot.json"):
        assert scenes.joinpath(name).is_file()
    assert files("ident3d").joinpath("py.typed").is_file()


def test_version_and_extras() -> None:
    metadata = importlib.metadata.metadata("ident3d")
    assert metadata["Version"] == ident3d.__version__
    assert set(metadata.get_all("Provides-Extra") or []) == {
        "render",
        "faiss",
        "codecs",
        "hub",
        "baselines",
        "tensorboard",
        "slurm",
        "dev",
        "all",
    }


def test_the_worker_imports_the_standard_library_bpy_numpy_and_pillow_alone() -> None:
    """Whatever else a worker imported would have to be installed beside bpy."""
    code = """
import sys
before = set(sys.modules)
import ident3d.scene, ident3d.mesh, ident3d.render.worker, ident3d.render.draws, ident3d.render.plan
import ident3d.render.quality, ident3d.render.latents
import ident3d.files, ident3d.shards.writer, ident3d.shards.salvage, ident3d.shards.summary
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"ident3d", "numpy", "PIL", "_cython_3_0_8", "cython_runtime"}


def test_files_and_functions_stay_short() -> None:
    root = Path(ident3d.__file__).parent
    for path in [*root.rglob("*.py"), *(root / "baselines").glob("*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path

"""Fixtures that several modules use: the material beside the project, a fabricated dataset, a rendered one."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Shapes in annotations are checked at run time, in the tests only. Before the first import of these modules.
MASKS = ("kitti_task", "mask_figures", "mask_networks", "slowvae", "transition_figure")
NETWORKS = ("encoders", "mixing", "negatives", "outputs", "whitening")
TENSORS = [f"ident3d.baselines.{name}" for name in (*MASKS, *NETWORKS)]
install_import_hook(["ident3d.datasets", "ident3d.figures", *TENSORS], "beartype.beartype")

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("bpy") is None and not os.environ.get("IDENT3D_BLENDER_PYTHON"):
        skip = pytest.mark.skip(reason=f"Blender is absent: {sys.executable} has no bpy")
        for item in items:
            if item.get_closest_marker("render"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def reference_renders() -> Path:
    """Pictures that the released generator made, where they are at hand."""
    folder = SHARED / "reference" / "renders"
    if not folder.is_dir():
        pytest.skip(f"{folder.name}: pictures of the released generator are not beside the project")
    return folder


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real dataset: 12 + 4 pictures of 32 px in shards of 4. Read it, never write into it."""
    from ident3d import RenderOptions, render_dataset

    root = tmp_path_factory.mktemp("rendered") / "data"
    for split, samples in (("train", 12), ("test", 4)):
        render_dataset(
            RenderOptions(root, samples, split=split, seed=7, resolution=32, quality="draft", shard_size=4, quiet=True)
        )
    return root


@pytest.fixture(scope="session")
def rendered_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `rendered`, seed included, but train holds 8 pairs; test holds none. Read it, never write into it."""
    from ident3d import RenderOptions, render_dataset

    root = tmp_path_factory.mktemp("rendered_pairs") / "data"
    for split, samples, pairs in (("train", 8, "laplace(scale=0.05)"), ("test", 4, None)):
        options = RenderOptions(
            root, samples, split=split, seed=7, resolution=32, quality="draft", shard_size=4, pairs=pairs, quiet=True
        )
        render_dataset(options)
    return root


@pytest.fixture(scope="session")
def make_dataset() -> Callable[..., Path]:
    """The function of `tests/data/make_dataset.py`, which fabricates a dataset without Blender."""
    spec = spec_from_file_location("make_dataset", ROOT / "tests" / "data" / "make_dataset.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Callable[..., Path] = module.make_dataset
    return made


@pytest.fixture(scope="session")
def fabricated(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Path]) -> Path:
    """A valid dataset of made-up pictures: 24 + 6 of 16 px in shards of 5. Read it, never write into it."""
    return make_dataset(tmp_path_factory.mktemp("fabricated") / "data")


@pytest.fixture(scope="session")
def fabricated_pairs(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Path]) -> Path:
    """As `fabricated`, but train holds pairs; test holds none. Read it, never write into it."""
    root = tmp_path_factory.mktemp("fabricated_pairs") / "data"
    make_dataset(root, {"train": 24}, pairs="laplace(scale=0.05)")
    return make_dataset(root, {"test": 6})


@pytest.fixture
def open_shards() -> Callable[[], list[str]]:
    """The shards that this process holds open now, once for each descriptor."""

    def find() -> list[str]:
        links = []
        for fd in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the listing's own descriptor is gone
                links.append(str(fd.readlink()))
        return [link for link in links if link.endswith(".tar")]

    gc.collect()  # what earlier tests left behind
    return find


@pytest.fixture(params=("imagecodecs", "pillow"))
def codec(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each codec in turn."""
    from ident3d.codecs import forced_codec

    if request.param == "imagecodecs" and find_spec("imagecodecs") is None:
        pytest.skip("imagecodecs is absent")
    with forced_codec(request.param):
        yield request.param


@pytest.fixture
def damaged(fabricated: Path, tmp_path: Path) -> Path:
    """A copy of `fabricated` to be damaged."""
    return shutil.copytree(fabricated, tmp_path / "damaged")


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For hundreds of shards a test: what fsync is for cannot be tested here anyway."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)

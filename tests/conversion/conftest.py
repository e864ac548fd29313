"""What the tests of conversions share: a folder of each published layout, and how two results are compared."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ident3d.conversion import ConvertOptions, convert

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="session")
def make_published() -> ModuleType:
    """The module `tests/data/make_published.py`, which fabricates folders of every published layout."""
    spec = spec_from_file_location("make_published", DATA / "make_published.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory, make_published: ModuleType) -> dict[str, Path]:
    """A folder of each published layout, by its name. Read them, never write into them."""
    root = tmp_path_factory.mktemp("published")
    return {
        "3dident": make_published.make_threedident(root / "a"),
        "causal3dident": make_published.make_causal3dident(root / "b"),
        "multimodal3dident": make_published.make_multimodal3dident(root / "c", {"train": 20, "val": 7}),
        "temporal-causal3dident": make_published.make_temporal(root / "d", side=16),
    }


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pictures that the released generator made, in its own layout."""
    tar = Path(__file__).resolve().parents[3] / "shared" / "data" / "3dident64_test.tar"
    if not tar.is_file():
        pytest.skip(f"{tar.name}: pictures of the released generator are not beside the project")
    root = tmp_path_factory.mktemp("real")
    with tarfile.open(tar) as archive:
        archive.extractall(root, filter="data")
    whole, part = root / "3dident64" / "test", root / "part" / "test"
    (part / "images").mkdir(parents=True)
    for name in ("raw_latents.npy", "latents.npy"):
        np.save(part / name, np.load(whole / name)[:60])
    for i in range(60):
        shutil.copyfile(whole / "images" / f"{i:03d}.png", part / "images" / f"{i:02d}.png")
    return part.parent


@pytest.fixture
def threedident(make_published: ModuleType, tmp_path: Path) -> Path:
    """A folder in 3DIdent's layout to be damaged: 20 + 12 pictures of 16 px."""
    folder: Path = make_published.make_threedident(tmp_path / "source")
    return folder


@pytest.fixture(scope="session")
def run() -> Callable[..., Path]:
    """`convert` with options given one by one, without a progress bar."""

    def call(src: Any, out: Path, **options: Any) -> Path:
        return convert(ConvertOptions(src, out, **{"quiet": True, **options}))

    return call


@pytest.fixture(scope="session")
def content() -> Callable[[Path], dict[str, bytes]]:
    """All files of a result by name, without what is not part of it."""

    def read(root: Path) -> dict[str, bytes]:
        found = (p for p in sorted(root.rglob("*")) if p.is_file() and ".convert" not in p.parts)
        return {str(p.relative_to(root)): p.read_bytes() for p in found}

    return read


@pytest.fixture(scope="session")
def same_published() -> Callable[[Any, Any], None]:
    """Two readers of a published layout give the same pixels, arrays and texts."""

    def check(a: Any, b: Any) -> None:
        assert type(a) is type(b)
        assert len(a) == len(b)
        for i in range(len(a)):
            np.testing.assert_array_equal(a.pixels(i), b.pixels(i))
            assert not a.has_text or a.text(i) == b.text(i)
        ours, theirs = a.extras(), b.extras()
        assert list(ours) == list(theirs)
        for name in ours:
            assert isinstance(ours[name], bytes) or ours[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(ours[name], theirs[name])

    return check

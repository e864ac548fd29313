"""Fixtures of KITTI Masks: a fabricated pickle, a small synthetic set."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ident3d.datasets.kitti_masks import KittiMasks
from ident3d.datasets.mask_pickle import FILE

SMALL = {"synthetic": True, "sequences": 6, "frames": 12}


@pytest.fixture(scope="session")
def kitti_maker() -> ModuleType:
    """`tests/data/make_kitti.py`."""
    path = Path(__file__).resolve().parents[1] / "data" / "make_kitti.py"
    spec = spec_from_file_location("make_kitti", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def kitti_folder(tmp_path_factory: pytest.TempPathFactory, kitti_maker: ModuleType) -> Path:
    """A kitti_folder with a fabricated pickle of 5 + 1 + 12 + 2 + 3 frames. Read it, never write_kitti into it."""
    root = tmp_path_factory.mktemp("kitti") / "data"
    kitti_maker.make_kitti(root)
    return root


@pytest.fixture
def write_kitti(tmp_path: Path) -> Callable[..., Path]:
    """Write a pickle of these masks and latents."""

    def written(masks: Any, latents: Any, protocol: int = 4, **more: Any) -> Path:
        path = tmp_path / FILE
        path.write_bytes(pickle.dumps({"pedestrians": masks, "pedestrians_latents": latents, **more}, protocol))
        return path

    return written


@pytest.fixture(scope="module")
def kitti_small() -> KittiMasks:
    """Six synthetic sequences of up to 12 frames, d up to 5."""
    return KittiMasks(**SMALL, max_delta_t=5)  # type: ignore[arg-type]

"""KITTI Masks: options, files and pickles that are refused, and what downloading does."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ident3d.datasets.kitti_masks import KittiMasks, MaskPairs
from ident3d.datasets.mask_pickle import FILE
from ident3d.errors import DatasetError, SpecError

SMALL = {"synthetic": True, "sequences": 6, "frames": 12}


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "root=None: expected kitti_peds_v2.pickle or its folder; or synthetic=True"),
        ({"root": "x", "synthetic": True}, "root='x', download=False: expected neither with synthetic=True"),
        ({"synthetic": True, "download": True}, "root=None, download=True: expected neither"),
        ({"root": "x", "sequences": 3}, "sequences=3, frames=None: only with synthetic=True"),
        ({"root": "x", "frames": 3}, "sequences=None, frames=3: only with synthetic=True"),
        ({"synthetic": True, "max_delta_t": 0}, "max_delta_t = 0: expected a whole number of at least 1"),
        ({"synthetic": True, "max_delta_t": True}, "max_delta_t = True"),
        ({"synthetic": True, "max_delta_t": 1001}, "max_delta_t = 1001: expected at most 1000 frames of 0.05 s"),
        ({"synthetic": True, "seed": -1}, "seed = -1"),
        ({"synthetic": True, "sequences": 0}, "sequences = 0"),
        ({"synthetic": True, "frames": 1}, "frames = 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        KittiMasks(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": 10**6}, "batch_size = 1000000: expected at most 19, as many as there are anchors"),
        ({"batch_size": 4, "seed": -1}, "seed = -1"),
        ({"batch_size": 4, "batches": 0}, "batches = 0"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank = 2, world_size = 2"),
    ],
)
def test_batches_that_cannot_be_are_refused(kitti_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        KittiMasks(kitti_folder).pairs(**options)


def test_batches_do_not_pass_by_a_transform_in_silence() -> None:
    for options in ({"transform": abs}, {"target_transform": abs}):
        with pytest.raises(SpecError, match="transform, target_transform: for items"):
            KittiMasks(**SMALL, **options).pairs(4)  # type: ignore[arg-type]


def test_an_epoch_below_0_is_refused(kitti_small: KittiMasks) -> None:
    with pytest.raises(SpecError, match="epoch = -1"):
        kitti_small.set_epoch(-1)


def test_an_absent_file_is_named_with_what_brings_it(tmp_path: Path) -> None:
    for root, kitti_folder in ((tmp_path, tmp_path), (tmp_path / "no", tmp_path / "no"), (tmp_path / FILE, tmp_path)):
        with pytest.raises(DatasetError) as caught:
            KittiMasks(root)
        text = str(caught.value)
        assert text.startswith(
            f"{kitti_folder / FILE}: not there; `ident3d download kitti-masks --root {kitti_folder}`"
        )
        assert "download=True" in text
        assert "synthetic=True" in text


@pytest.fixture
def fetched(kitti_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What was asked of `ident3d.datasets.download.download`, which copies the fabricated pickle."""
    asked: list[tuple[str, Path]] = []

    def download(name: str, root: Path) -> Path:
        asked.append((name, root))
        root.mkdir(parents=True, exist_ok=True)
        (root / FILE).write_bytes((kitti_folder / FILE).read_bytes())
        return root if len(asked) == 1 else root / FILE

    module = ModuleType("ident3d.datasets.download")
    module.download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ident3d.datasets.download", module)
    return asked


def test_download_fetches_into_the_folder_what_is_not_there(tmp_path: Path, fetched: list[tuple[str, Path]]) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    assert KittiMasks(first, download=True).path == first / FILE
    assert KittiMasks(second / FILE, download=True).path == second / FILE
    assert fetched == [("kitti-masks", first), ("kitti-masks", second)]
    # What is there is not fetched again.
    assert len(KittiMasks(first, download=True)) == 19
    assert len(fetched) == 2


def masks(*lengths: int) -> list[Any]:
    return [np.ones((n, 64, 64), bool) for n in lengths]


def latents(*lengths: int) -> list[Any]:
    return [np.ones((n, 3), np.float32) for n in lengths]


def with_value(value: Any, dtype: Any, shape: tuple[int, ...], at: tuple[int, ...]) -> list[Any]:
    array = np.ones(shape, dtype)
    array[at] = value
    return [*masks(2), array] if len(shape) == 3 else [*latents(2), array]


BAD: list[tuple[Any, Any, str]] = [
    ([], [], "pedestrians and pedestrians_latents are 0 in a list and 0 in a list: expected two lists"),
    (masks(2, 3), latents(2), "are 2 in a list and 1 in a list: expected two lists of as many arrays"),
    (tuple(masks(2)), latents(2), "are tuple and 1 in a list"),
    (masks(2), {"a": 1}, "are 1 in a list and dict"),
    (masks(2)[0], latents(2)[0], r"are bool \(2, 64, 64\) and float32 \(2, 3\)"),
    (
        masks(2, 3),
        latents(2, 4),
        r"pedestrians_latents\[1\] is float32 \(4, 3\): expected numbers \(3, 3\), a row a mask",
    ),
    (
        masks(2),
        [np.ones((2, 4), np.float32)],
        r"pedestrians_latents\[0\] is float32 \(2, 4\): expected numbers \(2, 3\)",
    ),
    (masks(2), [np.ones((2, 3), bool)], r"pedestrians_latents\[0\] is bool \(2, 3\): expected numbers"),
    (masks(2), [[[1, 2, 3], [1, 2, 3]]], r"pedestrians_latents\[0\] is list: expected numbers"),
    (masks(2), [None], r"pedestrians_latents\[0\] is NoneType"),
    (
        masks(2, 2),
        with_value(np.nan, "f4", (2, 3), (1, 2)),
        r"pedestrians_latents\[1\], row 1 is \[1.0, 1.0, nan\]: expected",
    ),
    (masks(2, 2), with_value(-np.inf, "f8", (2, 3), (0, 0)), r"pedestrians_latents\[1\], row 0 is \[-inf, 1.0, 1.0\]"),
    (masks(2, 2), with_value(1e300, "f8", (2, 3), (0, 0)), r"pedestrians_latents\[1\], row 0 is \[1e\+300, 1.0, 1.0\]"),
    (
        [np.ones((2, 32, 32), bool)],
        latents(2),
        r"pedestrians\[0\] is bool \(2, 32, 32\): expected booleans \(T, 64, 64\)",
    ),
    ([np.ones((2, 64, 64, 1), bool)], latents(2), r"pedestrians\[0\] is bool \(2, 64, 64, 1\)"),
    ([np.ones((64, 64), bool)], latents(2), r"pedestrians\[0\] is bool \(64, 64\)"),
    ([np.array(True)], latents(2), r"pedestrians\[0\] is bool \(\)"),
    ([*masks(2), "walker"], latents(2, 2), r"pedestrians\[1\] is str"),
    (
        with_value(255, "u1", (2, 64, 64), (1, 9, 9)),
        latents(2, 2),
        r"pedestrians\[1\] is uint8 and holds 255: expected",
    ),
    (with_value(-1, "i4", (2, 64, 64), (1, 9, 9)), latents(2, 2), r"pedestrians\[1\] is int32 and holds -1"),
    (with_value(0.5, "f4", (2, 64, 64), (1, 9, 9)), latents(2, 2), r"pedestrians\[1\] is float32 and holds 0.5"),
    (with_value(np.nan, "f4", (2, 64, 64), (1, 9, 9)), latents(2, 2), r"pedestrians\[1\] is float32 and holds nan"),
    (masks(2, 0), latents(2, 0), r"pedestrians\[1\] has no frames: expected at least 2, the frames of a pair"),
    (masks(2, 3, 1), latents(2, 3, 1), r"pedestrians\[2\] has 1 frame: expected at least 2"),
]


@pytest.mark.parametrize(("pedestrians", "pedestrians_latents", "message"), BAD)
def test_another_structure_is_refused(
    pedestrians: Any, pedestrians_latents: Any, message: str, write_kitti: Callable[..., Path]
) -> None:
    path = write_kitti(pedestrians, pedestrians_latents)
    with pytest.raises(DatasetError, match=re.escape(str(path)) + ".*" + message):
        KittiMasks(path)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([1, 2], "holds a list; expected a dict of 'pedestrians' and 'pedestrians_latents'"),
        ({"pedestrians": []}, r"holds a dict of \['pedestrians'\]; expected"),
        (None, "holds a NoneType; expected"),
        ({"x" * 10_000: 1}, r"holds a dict of \['x{50,200}; expected"),
    ],
)
def test_another_pickle_is_refused(held: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(pickle.dumps(held))
    with pytest.raises(DatasetError, match=message):
        KittiMasks(tmp_path)


def test_one_array_many_times_is_not_unpacked(write_kitti: Callable[..., Path]) -> None:
    # Some kilobytes that stand for 400 MB.
    array, rows = np.ones((2, 64, 64), bool), np.ones((2, 3), np.float32)
    path = write_kitti([array] * 50_000, [rows] * 50_000)
    with pytest.raises(DatasetError, match="its masks have 409,600,000 pixels, more than the file has bytes"):
        KittiMasks(path)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_a_pickle_that_runs_something_is_refused(
    write_kitti: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_kitti([*masks(2), Evil()], latents(2, 2))
    with pytest.raises(DatasetError, match=r"it refers to 'posix\.system'"):
        KittiMasks(path)
    assert not (tmp_path / "evil").exists()


def test_a_file_cut_short_is_refused(kitti_folder: Path, tmp_path: Path) -> None:
    stored = (kitti_folder / FILE).read_bytes()
    for share in (0.0, 0.01, 0.5, 0.99):
        (tmp_path / FILE).write_bytes(stored[: int(share * len(stored))])
        with pytest.raises(DatasetError, match=r"kitti_peds_v2\.pickle: damaged, cut short or no pickle"):
            KittiMasks(tmp_path)


def test_the_fabricating_script_runs_alone(tmp_path: Path, kitti_folder: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "data" / "make_kitti.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    assert (tmp_path / FILE).read_bytes() == (kitti_folder / FILE).read_bytes()


def test_batches_know_their_type(kitti_small: KittiMasks) -> None:
    assert isinstance(kitti_small.pairs(4), MaskPairs)

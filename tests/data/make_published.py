"""Fabricate tiny folders in the layouts of the published datasets: `python tests/data/make_published.py OUT`.

The files are those of the published sets, down to names, shapes and types; only the pictures are made up: noise that
nothing compresses, keyed by its seed. Each function returns the folder that holds the splits.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["make_causal3dident", "make_multimodal3dident", "make_pixels", "make_temporal", "make_threedident"]

SAMPLES = {"train": 20, "test": 12}
CLASSES = {0: 6, 1: 5, 4: 4}
IMAGE_COLUMNS = (
    "object_shape",
    "object_xpos",
    "object_ypos",
    "object_zpos",
    "object_alpharot",
    "object_betarot",
    "object_gammarot",
    "object_color",
    "spotlight_pos",
    "spotlight_color",
    "background_color",
)
SHAPES = ("teapot", "hare", "dragon", "cow", "armadillo", "horse", "head")
COLOURS = ("xkcd:bright aqua", "lawngreen", "tab:blue")


def make_pixels(seed: int, index: int, side: int, channels: int = 3) -> NDArray[np.uint8]:
    """The made-up picture `index` of a seed, uint8 (side, side, channels); a fourth channel is not opaque."""
    rng = np.random.default_rng([seed, index])
    return rng.integers(0, 256, (side, side, channels), dtype=np.uint8)


def _write_pictures(folder: Path, count: int, seed: int, side: int, digits: int | None, channels: int) -> None:
    folder.mkdir(parents=True)
    width = math.ceil(math.log10(count)) if digits is None else digits
    for index in range(count):
        Image.fromarray(make_pixels(seed, index, side, channels)).save(folder / f"{index:0{width}d}.png")


def _write_latents(folder: Path, suffix: str, count: int, seed: int, dtype: Any) -> None:
    raw = np.random.default_rng([seed, 1]).uniform(-1, 1, (count, 10))
    np.save(folder / f"raw_latents{suffix}.npy", raw.astype(dtype))
    scale = np.array([3.0] * 3 + [math.pi / 2] * 7)
    np.save(folder / f"latents{suffix}.npy", (raw * scale).astype(dtype))


def make_threedident(
    root: Path,
    samples: Mapping[str, int] = SAMPLES,
    *,
    side: int = 16,
    dtype: Any = np.float32,
    digits: int | None = None,
    channels: int = 4,
) -> Path:
    """3DIdent: `root/3dident/{train,test}`.

    Args:
        root: made where it is not there.
        samples: how many of which split.
        side: of the pictures in pixels.
        dtype: of the arrays.
        digits: of a picture's name; by default ceil(log10(N)).
        channels: of the pictures; the released generator writes 4.
    """
    for seed, (split, count) in enumerate(samples.items()):
        folder = root / "3dident" / split
        _write_pictures(folder / "images", count, seed, side, digits, channels)
        _write_latents(folder, "", count, seed, dtype)
    return root / "3dident"


def make_causal3dident(
    root: Path,
    splits: Sequence[str] = ("train", "test"),
    classes: Mapping[int, int] = CLASSES,
    *,
    side: int = 16,
    dtype: Any = np.float64,
    digits: int | None = 5,
) -> Path:
    """Causal3DIdent: `root/{trainset,testset}`; of each class so many samples, their pictures keyed by 10 K + split."""
    for number, split in enumerate(splits):
        for k, count in classes.items():
            folder, seed = root / f"{split}set", 10 * k + number
            _write_pictures(folder / f"images_{k}", count, seed, side, digits, 3)
            _write_latents(folder, f"_{k}", count, seed, dtype)
    return root


def make_multimodal3dident(
    root: Path,
    samples: Mapping[str, int] = SAMPLES,
    *,
    side: int = 16,
    prefix: str = "",
    order: Sequence[int] | None = None,
) -> Path:
    """Multimodal3DIdent: `root/m3di/{train,val,test}`.

    Args:
        root: made where it is not there.
        samples: how many of which split.
        side: of the pictures in pixels.
        prefix: before every name of a column of latents_image.csv.
        order: of its columns.
    """
    for seed, (split, count) in enumerate(samples.items()):
        folder, rng = root / "m3di" / split, np.random.default_rng([seed, 2])
        _write_pictures(folder / "images", count, seed, side, None, 3)
        tops = (7, 3, 3, 1)
        numbers = np.stack(
            [np.arange(count) % top if k else np.arange(count) % 2 for k, top in enumerate(tops)], axis=1
        )
        values = [*numbers[:, :3].T.tolist(), numbers[:, 3].astype(float).tolist(), *rng.random((7, count)).tolist()]
        columns = range(len(IMAGE_COLUMNS)) if order is None else order
        header = [prefix + IMAGE_COLUMNS[c] for c in columns]
        _write_csv(folder / "latents_image.csv", header, [values[c] for c in columns])
        colours, phrasing = rng.integers(0, len(COLOURS), count), rng.integers(0, 5, count)
        header = [*IMAGE_COLUMNS[:4], "object_color_name", "object_color_index", "text_phrasing"]
        names = [COLOURS[c] for c in colours]
        _write_csv(folder / "latents_text.csv", header, [*values[:4], names, colours.tolist(), phrasing.tolist()])
        (folder / "text").mkdir()
        lines = [f'A {SHAPES[s]} of "{c}" color is visible.\n' for s, c in zip(numbers[:, 0], names, strict=True)]
        (folder / "text" / "text_raw.txt").write_text("".join(lines))
    return root / "m3di"


def _write_csv(path: Path, header: Sequence[str], columns: Sequence[Sequence[Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(zip(*columns, strict=True))


def make_temporal(
    root: Path,
    samples: Mapping[str, int] = SAMPLES,
    *,
    side: int = 64,
    channels: int = 4,
    compressed: bool = True,
    dtype: Any = np.uint8,
    **changes: Any,
) -> Path:
    """Temporal Causal3DIdent: `root/{train,val,test}.npz`.

    Args:
        root: made where it is not there.
        samples: how many frames of which split.
        side: of the frames in pixels.
        channels: of the frames.
        compressed: whether the arrays are deflated.
        dtype: of the frames; floats lie in [0, 1].
        changes: arrays in place of those made here, by name; None leaves one out.
    """
    root.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(samples.items()):
        rng = np.random.default_rng([seed, 3])
        frames = np.stack([make_pixels(seed, i, side, channels) for i in range(count)])
        raw = np.concatenate([rng.uniform(-2, 2, (count, 3)), rng.uniform(0, 2 * math.pi, (count, 7))], axis=1)
        arrays: dict[str, Any] = {
            "imgs": frames if dtype == np.uint8 else (frames / 255).astype(dtype),
            "raw_latents": raw.astype(np.float32),
            "shape_latents": np.stack([np.arange(count) // 4 % 7, np.zeros(count, int)], axis=1).astype(np.uint8),
            "interventions": rng.integers(0, 2, (count - 1, 12)),
            **changes,
        }
        save = np.savez_compressed if compressed else np.savez
        save(root / f"{split}.npz", **{name: array for name, array in arrays.items() if array is not None})
    return root


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/data/make_published.py OUT")
    for make in (make_threedident, make_causal3dident, make_multimodal3dident, make_temporal):
        print(make(Path(sys.argv[1]) / make.__name__.removeprefix("make_")))

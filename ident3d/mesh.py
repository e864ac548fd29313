"""Bezier patches to triangles' corners: the Utah teapot from Newell's 32 patches (numpy only)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import SpecError

__all__ = ["load_patches", "tessellate"]


def load_patches(path: Path) -> NDArray[np.float64]:
    """The control points of bicubic patches from a .json of `vertices` and `patches`, shape (P, 4, 4, 3).

    `vertices` is a list of points, `patches` a list of 16 zero-based indices each, row-major 4 x 4.

    Raises:
        SpecError: not such a file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        vertices = np.array(data["vertices"], dtype=np.float64)
        patches = np.array(data["patches"])
        whole = vertices.ndim == patches.ndim == 2 and vertices.shape[1] == 3 and patches.shape[1] == 16
        if not whole or patches.dtype.kind != "i" or patches.min() < 0:
            raise ValueError(f"vertices {vertices.shape}, patches {patches.shape} of {patches.dtype}")
        control: NDArray[np.float64] = vertices[patches].reshape(-1, 4, 4, 3)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        expected = "a .json with `vertices` (V, 3) and `patches` (P, 16)"
        raise SpecError(f"mesh {path}: expected {expected}: {type(error).__name__}: {error}") from None
    if not len(control) or not np.isfinite(control).all():
        raise SpecError(f"mesh {path}: expected at least one patch, of finite control points")
    return control


def _bernstein(n: int) -> NDArray[np.float64]:
    t = np.linspace(0.0, 1.0, n + 1)[:, None]
    return np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])


def tessellate(control: NDArray[np.float64], n: int) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Sample each bicubic patch S(s, t) = sum_ij B_i(s) B_j(t) P_ij on an n x n grid of quads.

    Points closer than 1e-6 of the extent are merged, so that shading is smooth across patches, and quads that
    collapse where a patch edge is a point (lid, bottom) become triangles or vanish.

    Args:
        control: control points, shape (P, 4, 4, 3).
        n: quads a side of a patch, at least 1.

    Returns:
        Vertices (V, 3) and faces (F, 4) of vertex indices; a triangle repeats its last index.
    """
    b = _bernstein(n)
    points = np.einsum("ai,bj,pijk->pabk", b, b, control).reshape(-1, 3)
    corner = np.arange(len(points)).reshape(len(control), n + 1, n + 1)
    # Newell's patches have their inside where dS/ds x dS/dt points, so the corners go round the other way.
    quads = np.stack([corner[:, :-1, :-1], corner[:, :-1, 1:], corner[:, 1:, 1:], corner[:, 1:, :-1]], axis=-1)
    tolerance = 1e-6 * float(np.ptp(points, axis=0).max())
    _, first, inverse = np.unique(np.round(points / tolerance), axis=0, return_index=True, return_inverse=True)
    faces = inverse.reshape(-1)[quads.reshape(-1, 4)]
    return points[first], _compact(faces)


def _compact(faces: NDArray[np.intp]) -> NDArray[np.intp]:
    """Drop repeated corners: triangles get their last index repeated, anything thinner goes."""
    rows = []
    for face in faces:
        corners = list(dict.fromkeys(face.tolist()))
        if len(corners) >= 3:
            rows.append(corners + corners[-1:] * (4 - len(corners)))
    return np.array(rows, dtype=np.intp)

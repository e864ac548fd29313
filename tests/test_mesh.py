"""Bezier patches to a mesh: one patch by hand, the teapot's shape, and files that are no patches."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial import cKDTree  # type: ignore[import-untyped]

from ident3d.errors import SpecError
from ident3d.mesh import load_patches, tessellate
from ident3d.scenes import load_scene

SPEC = load_scene("3dident")
TEAPOT = load_patches(SPEC.mesh_path)
DENSITIES = [1, 2, 3, 7, 10, 16, 20]


def flat_patch() -> NDArray[np.float64]:
    """The unit square as a patch: control points on a regular grid make the surface the identity."""
    s, t = np.meshgrid(np.arange(4) / 3, np.arange(4) / 3, indexing="ij")
    control: NDArray[np.float64] = np.stack([s, t, np.zeros_like(s)], axis=-1)[None]
    return control


def corners(face: NDArray[np.intp]) -> list[int]:
    return list(dict.fromkeys(face.tolist()))


def directed_edges(faces: NDArray[np.intp]) -> Counter[tuple[int, int]]:
    edges: Counter[tuple[int, int]] = Counter()
    for face in faces:
        ring = corners(face)
        edges.update(zip(ring, ring[1:] + ring[:1], strict=True))
    return edges


def normals(vertices: NDArray[np.float64], faces: NDArray[np.intp]) -> NDArray[np.float64]:
    a, b, c, d = (vertices[faces[:, k]] for k in range(4))
    normal: NDArray[np.float64] = np.cross(c - a, d - b)
    return normal


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_flat_patch_is_a_regular_grid(n: int) -> None:
    vertices, faces = tessellate(flat_patch(), n)
    assert faces.shape == (n * n, 4)
    assert len(vertices) == (n + 1) ** 2
    expected = {(i, j) for i in range(n + 1) for j in range(n + 1)}
    assert {tuple(p) for p in np.round(vertices[:, :2] * n, 9).astype(int).tolist()} == expected
    np.testing.assert_array_equal(vertices[:, 2], 0)
    area = np.linalg.norm(normals(vertices, faces), axis=1) / 2
    np.testing.assert_allclose(area, 1 / n**2)


def test_a_curved_patch_follows_the_bernstein_polynomials() -> None:
    control = np.random.default_rng(2).normal(size=(1, 4, 4, 3))
    vertices, _ = tessellate(control, 4)
    binomial = [1, 3, 3, 1]
    for s in np.arange(5) / 4:
        for t in np.arange(5) / 4:
            weight = [[binomial[i] * s**i * (1 - s) ** (3 - i) * binomial[j] * t**j * (1 - t) ** (3 - j)
                       for j in range(4)] for i in range(4)]  # fmt: skip
            point = np.einsum("ij,ijk->k", np.array(weight), control[0])
            assert np.abs(vertices - point).sum(axis=1).min() < 1e-12


def test_the_teapot_has_the_published_extents() -> None:
    # s = 4.4421167 is what a tessellation of 10 gives, so the released mesh had that one.
    vertices, _ = tessellate(TEAPOT, 10)
    mesh = SPEC.spec.mesh
    angle = np.deg2rad(mesh.rotate_z_deg)
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    placed = mesh.scale * vertices @ turn.T + mesh.translate
    np.testing.assert_allclose(np.ptp(placed, axis=0), [4.4421167, 4.4421167, 2.9989], atol=1e-5)


def test_a_finer_teapot_keeps_its_extents_and_its_volume() -> None:
    coarse, fine = (tessellate(TEAPOT, n)[0] for n in (16, 32))
    np.testing.assert_allclose(np.ptp(coarse, axis=0), np.ptp(fine, axis=0), rtol=1e-3)


@pytest.mark.parametrize("n", DENSITIES)
def test_no_two_vertices_coincide_and_none_is_unused(n: int) -> None:
    vertices, faces = tessellate(TEAPOT, n)
    distance, _ = cKDTree(vertices).query(vertices, k=2)
    assert distance[:, 1].min() > 1e-6 * np.ptp(vertices, axis=0).max()
    np.testing.assert_array_equal(np.unique(faces), np.arange(len(vertices)))


@pytest.mark.parametrize("n", DENSITIES[1:])  # with n = 1 the handle folds flat
def test_faces_are_quads_or_triangles_with_an_area(n: int) -> None:
    vertices, faces = tessellate(TEAPOT, n)
    assert faces.shape[1] == 4
    triangles = sum(len(corners(face)) == 3 for face in faces)
    assert all(len(corners(face)) >= 3 for face in faces)
    # A patch edge that is a point stands at the lid's knob and at the bottom's middle: four patches each.
    assert triangles == 8 * n
    assert np.linalg.norm(normals(vertices, faces), axis=1).min() > 0


@pytest.mark.parametrize("n", DENSITIES[1:])
def test_patches_are_joined_and_open_at_six_rims_alone(n: int) -> None:
    # Rims of body and lid, both ends of handle and of spout: 16 patch edges. With n = 1 some coincide.
    _, faces = tessellate(TEAPOT, n)
    edges = directed_edges(faces)
    assert max(edges.values()) == 1, "two faces go along an edge in one direction: one of them is turned over"
    rim = [edge for edge in edges if edge[::-1] not in edges]
    assert len(rim) == 16 * n
    successor = dict(rim)
    assert len(successor) == len(rim)
    loops = 0
    while successor:
        start, at = successor.popitem()
        while at != start:
            at = successor.pop(at)
        loops += 1
    assert loops == 6


@pytest.mark.parametrize("n", DENSITIES)
def test_normals_point_outwards(n: int) -> None:
    vertices, faces = tessellate(TEAPOT, n)
    middle = vertices[faces].mean(axis=1)
    # The body is a solid of revolution about z: away from handle and spout, outwards is away from the axis.
    side = (np.abs(middle[:, 1]) > 0.7) & (middle[:, 2] > 0.2) & (middle[:, 2] < 2.2)
    normal = normals(vertices, faces)
    outward = (normal[side, :2] * middle[side, :2]).sum(axis=1)
    assert side.any()
    assert (outward > 0).mean() > 0.99
    bottom = middle[:, 2] < 0.05
    if n > 1:
        assert bottom.any()
        assert (normal[bottom, 2] < 0).all()


def test_patches_are_indexed_row_by_row() -> None:
    data = json.loads(SPEC.mesh_path.read_text())
    assert TEAPOT.shape == (32, 4, 4, 3)
    np.testing.assert_array_equal(TEAPOT[5, 2, 3], data["vertices"][data["patches"][5][2 * 4 + 3]])


def test_the_bundled_patches_are_newells(request: pytest.FixtureRequest) -> None:
    reference = Path(request.config.rootpath).parent / "shared" / "reference" / "newell_teapot.json"
    if not reference.is_file():
        pytest.skip("newell_teapot.json is not beside the project")
    np.testing.assert_array_equal(load_patches(reference), TEAPOT)


SQUARE: dict[str, Any] = {"vertices": flat_patch().reshape(16, 3).tolist(), "patches": [list(range(16))]}


@pytest.mark.parametrize(
    "change",
    [
        {"vertices": None},
        {"patches": []},
        {"patches": [list(range(15))]},
        {"patches": [list(range(8)), list(range(8, 16))]},
        {"patches": [[*range(15), 16]]},
        {"patches": [[*range(15), -1]]},
        {"patches": [[*range(15), 1.5]]},
        {"patches": [[*range(15), "x"]]},
        {"patches": [list(range(16)), [0, 1]]},
        {"vertices": [[float("nan"), 0, 0], *SQUARE["vertices"][1:]]},
        {"vertices": [[1e400, 0, 0], *SQUARE["vertices"][1:]]},
        {"vertices": [p[:2] for p in SQUARE["vertices"]]},
        # Three patches of plane points have as many numbers as two of points in space.
        {"vertices": [p[:2] for p in SQUARE["vertices"]], "patches": [list(range(16))] * 3},
    ],
    ids=[
        "no vertices",
        "no patch",
        "15 indices",
        "8 indices",
        "index past the end",
        "negative index",
        "broken index",
        "text index",
        "ragged",
        "nan",
        "infinite",
        "plane points",
        "plane points that fit",
    ],
)
def test_a_json_that_is_no_patches_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "mesh.json"
    path.write_text(json.dumps({**SQUARE, **change}))
    with pytest.raises(SpecError, match=re.escape(f"mesh {path}: expected")):
        load_patches(path)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{}", b'"text"', b"\xff\xfe", b'{"vertices": [[0, 0, 0]]}'])
def test_a_file_that_is_no_json_of_patches_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mesh.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=re.escape(f"mesh {path}: expected a .json with `vertices`")):
        load_patches(path)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mesh.json"
    path.write_text(json.dumps(SQUARE))
    np.testing.assert_array_equal(load_patches(path), flat_patch())

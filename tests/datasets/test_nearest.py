"""Grids in memory and in files: the nearest point, exactly, whatever the points look like and what else is searched."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ident3d.datasets import grid_search, nearest
from ident3d.datasets.grid_files import GridFile, write_grid
from ident3d.datasets.nearest import GridIndex

Points = NDArray[np.float32]
Numbers = NDArray[np.int64]
Answer = tuple[NDArray[np.float64], Numbers]


def brute_force(points: Points, queries: Points, exclude: Numbers | None = None) -> Answer:
    """By definition, in float64; `argmin` gives the first of those equally far."""
    best, found = np.full(len(queries), np.inf), np.full(len(queries), -1, np.int64)
    for i, query in enumerate(queries):
        gaps = query.astype(np.float64)[None] - points
        distance = np.einsum("ij,ij->i", gaps, gaps)
        if exclude is not None and exclude[i] >= 0:
            distance[exclude[i]] = np.inf
        if np.isfinite(distance).any():
            best[i], found[i] = distance.min(), distance.argmin()
    return best, found


def assert_nearest(points: Points, queries: Points, cell: int = 20, exclude: Numbers | None = None) -> None:
    """The indices over these points answer as brute force does, to the last bit."""
    expected_distance, expected = brute_force(points, queries, exclude)
    for index in (GridIndex(points, cell), grid_file(points, cell)):
        distance, found = index.search(queries, exclude)
        assert [str(a.dtype) for a in (distance, found)] == ["float64", "int64"]
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(distance, expected_distance)


def grid_file(points: Points, cell: int = 20) -> GridFile:
    """The points in a file, which is mapped when this returns and has no name any more."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points.grid"
        write_grid(path, b"{}\n", points.__getitem__, len(points), int, cell)
        return GridFile(path, b"{}\n", points.__getitem__, len(points))


Maker = Callable[[Points, int], GridIndex | GridFile]
both = pytest.mark.parametrize("make_index", [GridIndex, grid_file], ids=["memory", "file"])


def uniform(n: int, dim: int, seed: int = 0) -> Points:
    return np.random.default_rng([n, dim, seed]).random((n, dim), np.float32)


def clumps(n: int, dim: int) -> Points:
    """Five clumps of sizes from 0.1 down to 0.00001, most points in the tightest."""
    rng = np.random.default_rng(1)
    which = np.minimum(rng.geometric(0.3, n) - 1, 4)
    noise = rng.standard_normal((n, dim)) * 10.0 ** (which - 5)[:, None]
    made: Points = (rng.random((5, dim))[which] + noise).astype(np.float32)
    return made


def lattice(n: int, dim: int) -> Points:
    """Values of 0, 1/4, ..., 1: each point many times, and most queries have several points equally far."""
    made: Points = (np.random.default_rng(2).integers(0, 5, (n, dim)) / 4).astype(np.float32)
    return made


def constants(n: int, dim: int) -> Points:
    """All columns but the last two hold one value."""
    made = np.full((n, dim), 0.3, np.float32)
    made[:, -2:] = uniform(n, 2)
    return made


def gaps(n: int, dim: int) -> Points:
    """Two clumps at opposite corners: cells at the other corners are empty."""
    side = np.random.default_rng(3).integers(0, 2, (n, 1))
    return (0.05 * uniform(n, dim) + 0.95 * side).astype(np.float32)


def diagonal(n: int, dim: int) -> Points:
    """All on one line: nearly every cell is empty."""
    return np.repeat(np.sort(uniform(n, 1), axis=0), dim, axis=1)


def equal(n: int, dim: int) -> Points:
    return np.full((n, dim), 0.625, np.float32)


def few_valued(n: int, dim: int) -> Points:
    """Half of the columns hold 0 or 1, rarely 1, and the others lie close together."""
    made = np.float32(0.01) * uniform(n, dim)
    made[:, : dim // 2] = made[:, : dim // 2] > 0.008
    return made


SHAPES = [uniform, clumps, lattice, constants, gaps, diagonal, equal, few_valued]


@pytest.mark.parametrize("dim", range(1, 17))
def test_uniform_points_in_any_dimension(dim: int) -> None:
    assert_nearest(uniform(3000, dim), uniform(100, dim, seed=1))


@pytest.mark.parametrize("make", SHAPES)
@pytest.mark.parametrize("dim", [2, 5, 10])
def test_points_of_any_shape(make: Callable[[int, int], Points], dim: int) -> None:
    points = make(1500, dim)
    around = points[::50] + np.float32(0.01) * (uniform(30, dim, seed=2) - np.float32(0.5))
    on_a_lattice = lattice(30, dim)
    for queries in (uniform(40, dim, seed=1), points[::40].copy(), around, on_a_lattice):
        assert_nearest(points, queries)


@pytest.mark.parametrize("make", SHAPES)
def test_the_excluded_point_does_not_count(make: Callable[[int, int], Points]) -> None:
    points = make(1500, 4)
    chosen = np.arange(0, 1500, 20)
    assert_nearest(points, points[chosen], exclude=chosen)
    some = np.where(chosen % 40 == 0, -1, chosen)
    assert_nearest(points, points[chosen], exclude=some)


@both
def test_excluding_a_point_that_is_far_changes_nothing(make_index: Maker) -> None:
    points, queries = uniform(1500, 3), uniform(100, 3, seed=1)
    _, found = brute_force(points, queries)
    other = (found + 700) % 1500
    np.testing.assert_array_equal(make_index(points, 20).search(queries, other)[1], found)


@both
def test_of_points_equally_far_the_first_is_found(make_index: Maker) -> None:
    points = np.array([[1, 0], [0, 1], [-1, 0], [0, -1], [0, 1], [1, 0]], np.float32)
    index = make_index(points, 1)
    centre = np.zeros((3, 2), np.float32)
    exclude = np.array([-1, 0, 5])
    np.testing.assert_array_equal(index.search(centre, exclude)[1], [0, 1, 0])


@both
def test_of_equal_points_the_first_is_found_and_the_second_where_that_is_excluded(make_index: Maker) -> None:
    index = make_index(equal(300, 3), 20)
    queries = uniform(4, 3)
    np.testing.assert_array_equal(index.search(queries)[1], 0)
    np.testing.assert_array_equal(index.search(queries, np.array([-1, 0, 1, 299]))[1], [0, 1, 0, 0])


@pytest.mark.parametrize("dim", [1, 2, 10])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("cell", [1, 240])
def test_a_few_points(n: int, dim: int, cell: int) -> None:
    points, queries = uniform(n, dim), uniform(20, dim, seed=1)
    assert_nearest(points, queries, cell)
    assert_nearest(points, queries, cell, np.arange(20) % n)


@both
def test_where_there_is_no_point_left_the_answer_is_none(make_index: Maker) -> None:
    distance, found = make_index(uniform(1, 3), 20).search(uniform(2, 3, seed=1), np.array([0, -1]))
    assert (distance[0], found[0]) == (np.inf, -1)
    assert np.isfinite(distance[1])
    assert found[1] == 0


@pytest.mark.parametrize("make", [uniform, clumps, lattice, gaps])
def test_queries_outside_the_datas_range(make: Callable[[int, int], Points]) -> None:
    points = make(1500, 4)
    for factor in (3, 100):
        assert_nearest(points, np.float32(factor) * (uniform(60, 4, seed=1) - np.float32(0.5)))


@pytest.mark.parametrize("make", [uniform, lattice])
def test_scales_that_differ_a_million_times(make: Callable[[int, int], Points]) -> None:
    scale = np.logspace(-3, 3, 6).astype(np.float32)
    for order in (slice(None), slice(None, None, -1)):
        assert_nearest(make(1500, 6) * scale[order], uniform(100, 6, seed=1) * scale[order])


@pytest.mark.parametrize("offset", [1000, -1000])
@pytest.mark.parametrize("make", [uniform, clumps, lattice])
def test_data_far_from_the_origin(make: Callable[[int, int], Points], offset: int) -> None:
    points, queries = make(1500, 4) + np.float32(offset), uniform(100, 4, seed=1) + np.float32(offset)
    assert_nearest(points, queries)
    assert_nearest(points, points[::20], exclude=np.arange(0, 1500, 20))


def test_one_point_far_from_all_others() -> None:
    points = uniform(600, 3)
    points[77] = 1e4
    queries = np.concatenate([uniform(50, 3, seed=1), np.full((1, 3), 8e3, np.float32)])
    assert_nearest(points, queries)


@pytest.mark.parametrize("dim", [2, 3, 10])
def test_points_that_only_float64_tells_apart(dim: int) -> None:
    """All on a sphere, to the rounding of float32, and the queries near its centre."""
    rays = np.random.default_rng(4).standard_normal((1500, dim))
    points = (3 + rays / np.linalg.norm(rays, axis=1, keepdims=True)).astype(np.float32)
    queries = (3 + 1e-7 * np.random.default_rng(5).standard_normal((50, dim))).astype(np.float32)
    assert_nearest(points, queries)


@both
def test_the_answer_to_a_query_does_not_depend_on_what_else_is_searched(make_index: Maker) -> None:
    points, queries = clumps(2000, 5), uniform(60, 5, seed=1)
    index = make_index(points, 20)
    distance, found = index.search(queries)
    for i in range(60):
        alone = index.search(queries[i : i + 1])
        assert (alone[0][0], alone[1][0]) == (distance[i], found[i])
    shuffled = np.random.default_rng(0).permutation(60)
    np.testing.assert_array_equal(index.search(queries[shuffled])[1], found[shuffled])
    beside_far_ones = np.concatenate([queries, np.full((5, 5), -500, np.float32), queries])
    both = index.search(beside_far_ones)
    for part in (slice(60), slice(65, None)):
        np.testing.assert_array_equal(both[0][part], distance)
        np.testing.assert_array_equal(both[1][part], found)


@pytest.mark.parametrize("buffer", [1, 7, 50, 1000])
def test_a_buffer_smaller_than_a_cell_changes_nothing(monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    monkeypatch.setattr(nearest, "BUFFER", buffer)
    monkeypatch.setattr(grid_search, "PRODUCTS", buffer)
    monkeypatch.setattr(grid_search, "PART", max(1, buffer // 10))
    monkeypatch.setattr(grid_search, "BLAS_ALONE", 10 * buffer)
    points = clumps(600, 3)
    assert_nearest(points, uniform(60, 3, seed=1), cell=40)
    assert_nearest(points, points[::10], cell=40, exclude=np.arange(0, 600, 10))
    assert_nearest(lattice(600, 3), lattice(60, 3), cell=600)


@pytest.mark.parametrize("make", [gaps, diagonal])
def test_queries_whose_own_cell_is_empty(make: Callable[[int, int], Points]) -> None:
    points = make(2000, 3)
    for index in (GridIndex(points, 20), grid_file(points, 20)):
        assert (np.diff(index.starts) == 0).any()
    corners = np.array(np.meshgrid(*[[0, 0.5, 1]] * 3), np.float32).reshape(3, -1).T.copy()
    assert_nearest(points, np.concatenate([corners, uniform(60, 3, seed=1)]))


@pytest.mark.parametrize("cell", [1, 2, 240, 10**6])
def test_the_size_of_cells_changes_nothing(cell: int) -> None:
    assert_nearest(uniform(500, 4), uniform(50, 4, seed=1), cell)


@pytest.mark.parametrize("share", [0.5, 0.03])
def test_few_valued_dimensions_leave_the_cuts_to_others(share: float) -> None:
    rng = np.random.default_rng(6)
    points = rng.random((40_000, 3), np.float32)
    points[:, :2] = points[:, :2] < share
    points[:, 2] *= np.float32(0.01)
    index = grid_file(points, 34)
    assert [len(bounds) for bounds in index.cells.low] == [2, 2, 245]  # 980, of 1,176 at most
    assert np.diff(index.starts).max() < 1.5 * len(points) * max(share, 1 - share) ** 2 / 245
    queries = points[::400] + np.float32(0.001)
    assert_nearest(points, queries, 34, np.arange(0, 40_000, 400))


def test_a_value_that_most_points_share_has_a_slab_of_its_own() -> None:
    column = np.concatenate([uniform(100, 1), np.full((900, 1), 0.5, np.float32), np.zeros((100, 1), np.float32)])
    index = grid_file(column, 100)
    low, high = index.cells.low[0], index.cells.high[0]
    assert (low < high).all()
    assert len(low) == 10
    assert np.float32(0.5) in low
    assert_nearest(column, uniform(50, 1, seed=1), 100)


@both
def test_very_many_cells(make_index: Maker) -> None:
    points = uniform(140_000, 2)
    index = make_index(points, 1)
    assert index.cells > 2**16 if isinstance(index, GridIndex) else index.cells.count > 40_000
    queries = np.concatenate([uniform(30, 2, seed=1), points[::7000]])
    np.testing.assert_array_equal(index.search(queries)[1], brute_force(points, queries)[1])


def test_neither_points_nor_queries_are_written_into() -> None:
    points, queries, exclude = uniform(500, 3), uniform(50, 3, seed=1), np.arange(50)
    for array in (points, queries, exclude):
        array.setflags(write=False)
    assert_nearest(points, queries, exclude=exclude)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_small_cases_of_any_kind(data: st.DataObject) -> None:
    n, dim = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    value = data.draw(st.sampled_from([st.integers(-2, 2), st.integers(-64, 64), st.sampled_from([0, 1, 1024])]))
    rows = st.lists(st.lists(value, min_size=dim, max_size=dim), min_size=1, max_size=12)
    points = np.array(data.draw(st.lists(st.lists(value, min_size=dim, max_size=dim), min_size=n, max_size=n)))
    queries = np.array(data.draw(rows))
    exclude = data.draw(st.none() | st.lists(st.integers(-1, n - 1), min_size=len(queries), max_size=len(queries)))
    cell, offset = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([0, 1000]))
    assert_nearest(
        (points / 8 + offset).astype(np.float32),
        (queries / 8 + offset).astype(np.float32),
        cell,
        None if exclude is None else np.array(exclude, np.int64),
    )


@both
def test_thousands_of_equal_points_are_no_burden(make_index: Maker) -> None:
    """All of them are equally near: the least index that is allowed is the answer, and few candidates are held."""
    points = np.random.default_rng(0).integers(3, size=(30_000, 2)).astype(np.float32)
    queries, exclude = points[:5000] + np.float32(0.1), np.arange(5000)
    distance, found = make_index(points, 240).search(queries, exclude)
    first = {tuple(row): np.flatnonzero((points == row).all(axis=1))[:2] for row in np.unique(points, axis=0)}
    expected = [next(i for i in first[tuple(points[k])] if i != k) for k in range(5000)]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(distance, 0.02, rtol=1e-5)


def test_candidates_are_gone_through_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(1).random((3000, 3), np.float32)
    expected = GridIndex(points).search(points, np.arange(3000))
    for module in (nearest, grid_search):
        monkeypatch.setattr(module, "MANY", 10)
    for index in (GridIndex(points), grid_file(points)):
        for got, wanted in zip(index.search(points, np.arange(3000)), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@both
def test_no_queries_have_no_answers(make_index: Maker) -> None:
    distance, found = make_index(np.zeros((2, 2), np.float32), 20).search(np.zeros((0, 2), np.float32))
    assert len(distance) == len(found) == 0

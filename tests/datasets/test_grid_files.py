"""Grids in files: built in pieces, whole or absent, and never trusted where they are damaged or of others.

That they find the nearest point is tested in test_nearest.py, beside the grid in memory.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ident3d.datasets import grid_build, grid_files, grid_search
from ident3d.datasets.cells import Cells
from ident3d.datasets.grid_files import HEAD, GridFile, file_bytes, write_grid
from ident3d.datasets.nearest import GridIndex

Points = NDArray[np.float32]
HEADER = b'{"latents": "of a test"}\n'


def uniform(n: int = 5000, dim: int = 4, seed: int = 0) -> Points:
    return np.random.default_rng([n, dim, seed]).random((n, dim), np.float32)


def lattice(n: int = 5000, dim: int = 3) -> Points:
    """27 points, each some hundred times."""
    made: Points = (np.random.default_rng(2).integers(0, 3, (n, dim)) / 2).astype(np.float32)
    return made


def skewed(n: int = 5000, dim: int = 4) -> Points:
    """Nine points of ten are one and the same: its cell is larger than all others together."""
    made = uniform(n, dim)
    made[np.random.default_rng(3).random(n) < 0.9] = 0.5
    return made


def write(path: Path, points: Points, cell: int = 20, advance: Callable[[int], object] = int) -> None:
    write_grid(path, HEADER, points.__getitem__, len(points), advance, cell)


def read(path: Path, points: Points) -> GridFile:
    return GridFile(path, HEADER, points.__getitem__, len(points))


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def assert_same(index: GridFile, points: Points, threads: int | None = None) -> None:
    """It answers as the grid in memory does, to the last bit."""
    queries, exclude = points[::9] + np.float32(0.01), np.arange(0, len(points), 9)
    expected = GridIndex(points, 20).search(queries, exclude)
    for got, wanted in zip(index.search(queries, exclude, threads), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("make", [uniform, lattice, skewed])
@pytest.mark.parametrize("piece", [1, 97, 1000])
def test_points_in_pieces_make_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Points], piece: int
) -> None:
    points = make(500 if piece == 1 else 5000)
    write(tmp_path / "at once", points)
    monkeypatch.setattr(grid_build, "PIECE_BYTES", piece * 4 * (points.shape[1] + 2))
    write(tmp_path / "in pieces", points)
    once, pieces = (read(tmp_path / name, points) for name in ("at once", "in pieces"))
    np.testing.assert_array_equal(once.points[:, :-2], pieces.points[:, :-2])
    np.testing.assert_allclose(once.points[:, -2], pieces.points[:, -2], rtol=1e-6)
    for name in ("order", "starts", "middle"):
        np.testing.assert_array_equal(getattr(once, name), getattr(pieces, name))
    assert_same(pieces, points)


@pytest.mark.parametrize("make", [uniform, lattice, skewed])
def test_a_file_holds_each_point_in_its_cell_at_most_twice(tmp_path: Path, make: Callable[[], Points]) -> None:
    points = make()
    write(tmp_path / "grid", points)
    index = read(tmp_path / "grid", points)
    np.testing.assert_array_equal(points[index.order], index.points[:, :-2])
    np.testing.assert_array_equal(index.points[:, -1], 1)
    cells = index.cells.of(np.ascontiguousarray(index.points[:, :-2].T))
    np.testing.assert_array_equal(cells, np.repeat(np.arange(index.cells.count), np.diff(index.starts)))
    _, which, times = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    kept = np.bincount(which.reshape(-1)[index.order])
    np.testing.assert_array_equal(kept, np.minimum(times, 2))
    first_two = np.concatenate([np.flatnonzero(which.reshape(-1) == k)[:2] for k in range(len(times))])
    np.testing.assert_array_equal(np.sort(index.order), np.sort(first_two))
    for i in range(index.cells.dim):
        slab = np.digitize(points[:, i], index.cells.low[i][1:])
        assert ((index.cells.low[i][slab] <= points[:, i]) & (points[:, i] <= index.cells.high[i][slab])).all()


def test_cells_hold_about_as_many_points_as_asked_for(tmp_path: Path) -> None:
    points = uniform(60_000, 10)
    write(tmp_path / "grid", points, cell=60)
    sizes = np.diff(read(tmp_path / "grid", points).starts)
    assert 700 <= len(sizes) <= 2000
    assert 0.5 * sizes.mean() < np.percentile(sizes, 1) < np.percentile(sizes, 99) < 2 * sizes.mean()


@pytest.mark.parametrize("samples", [100, 2**31, 10**11])
def test_the_most_cells_keep_to_16_bits(samples: int) -> None:
    points = uniform(5000, 10)
    cells, _ = Cells.over(lambda some: points[: some.stop - some.start], samples, grid_build.MOST_CELLS)
    assert 1 < cells.count < 2**16


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(tmp_path: Path, threads: int) -> None:
    points = uniform(20_000, 6)
    write(tmp_path / "grid", points)
    assert_same(read(tmp_path / "grid", points), points, threads)


@pytest.mark.parametrize("count", [1, 2, 37, 1000])
@pytest.mark.parametrize("alone", [1, 100, 1000])
def test_products_in_runs_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, alone: int
) -> None:
    """Of one cell and of many, also where the runs' points would be more than all there are."""
    monkeypatch.setattr(grid_search, "BLAS_ALONE", alone)
    points = uniform(count, 3)
    for cell in (10, 1000):
        write(tmp_path / "grid", points, cell)
        assert_same(read(tmp_path / "grid", points), points)


def test_an_error_in_a_thread_is_raised_and_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = uniform()
    write(tmp_path / "grid", points)
    index, told = read(tmp_path / "grid", points), []

    def failing(start: int, stop: int) -> None:
        told.append(start)
        raise RuntimeError("no more memory")

    monkeypatch.setattr(index, "expect", failing)
    with pytest.raises(RuntimeError, match="no more memory"):
        index.search(points, threads=2)
    assert len(told) <= 2


def test_the_builder_tells_of_every_point_three_times(tmp_path: Path) -> None:
    told: list[int] = []
    write(tmp_path / "grid", uniform(), advance=told.append)
    assert sum(told) == 3 * 5000


def test_neither_points_nor_a_mapped_file_of_them_are_written_into(tmp_path: Path) -> None:
    for dim in (1, 3):
        np.save(tmp_path / "points.npy", uniform(500, dim))
        mapped = np.load(tmp_path / "points.npy", mmap_mode="r")
        write(tmp_path / "grid", mapped)
        assert_same(read(tmp_path / "grid", mapped), np.asarray(mapped))
        np.testing.assert_array_equal(mapped, uniform(500, dim))


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "not an index that this ident3d wrote"),
    "another format": (lambda w: w.replace(b"grid 1\n", b"grid 2\n", 1), "not an index that this ident3d wrote"),
    "of others": (lambda w: w.replace(b"of a test", b"of others", 1), "belongs to other latents or settings"),
    "head alone": (lambda w: w[:200], "damaged"),
    "without a table": (lambda w: w[: len(w) - 300], "damaged"),
    "longer": (lambda w: w + b"\0", "damaged"),
    "facts": (lambda w: w.replace(b'"order_at": ', b'"order_at": 1', 1), "damaged"),
    "no facts": (lambda w: w.replace(b'"order_at"', b'"order_on"', 1), "damaged"),
    "bad facts": (lambda w: w.replace(b'{"order"', b'{{order"', 1), "damaged"),
    "table": (lambda w: w[:-500] + bytes([w[-500] ^ 1]) + w[-499:], "damaged"),
    "points": (lambda w: w[:HEAD] + bytes(2000) + w[HEAD + 2000 :], "other latents or settings, or is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_refused(tmp_path: Path, kind: str) -> None:
    points, path = uniform(), tmp_path / "grid"
    write(path, points)
    whole = path.read_bytes()
    alter, word = DAMAGE[kind]
    path.write_bytes(alter(whole))
    assert path.read_bytes() != whole
    with pytest.raises(ValueError, match=f"{word}$"):
        read(path, points)


@pytest.mark.parametrize(
    "other", [uniform(seed=1), uniform()[:4000], uniform()[::-1]], ids=["others", "fewer", "order"]
)
def test_a_file_of_other_points_is_refused(tmp_path: Path, other: Points) -> None:
    write(tmp_path / "grid", uniform())
    with pytest.raises(ValueError, match=r"belongs to other latents or settings, or is damaged$"):
        read(tmp_path / "grid", other)


def test_no_file_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "grid", uniform())


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "grid"
    path.write_bytes(b"as it was")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, uniform(), advance=stop)
    assert (path.read_bytes(), names(tmp_path)) == (b"as it was", ["grid"])


def parts_left(folder: Path, parts: dict[str, float]) -> set[str]:
    """Which of some files, last written into so many seconds ago, are there when a grid was built."""
    for name, age in parts.items():
        (folder / name).write_bytes(bytes(100))
        then = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (then, then))
    write(folder / "grid", uniform())
    assert_same(read(folder / "grid", uniform()), uniform())
    return set(names(folder)) - {"grid"}


def test_what_a_killed_build_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node.1")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = [f".grid.node-1.{child.pid}.part", ".grid.elsewhere.1.part", ".grid.part"]
    assert parts_left(tmp_path, {gone[0]: 0, gone[1]: 90_000, gone[2]: 90_000}) == set()


def test_what_others_may_still_be_building_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    kept = {
        f".grid.node.{os.getppid()}.part": 0.0,  # there, and not this one
        ".grid.node.1.part": 0.0,  # of another user, where this one is not root
        f".grid.elsewhere.{child.pid}.part": 80_000.0,
        f".other.node.{child.pid}.part": 90_000.0,  # of another index
        "grid.node.1.part": 90_000.0,  # no such file
    }
    assert parts_left(tmp_path, kept) == set(kept)


def test_builders_on_different_hosts_share_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second starts, ends and is read while the first is half way."""
    path = tmp_path / "grid"
    seen: list[list[str]] = []

    def other(_: int) -> None:
        if len(seen) < 2:
            seen.append(names(tmp_path))
        if len(seen) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(socket, "gethostname", lambda: "elsewhere")
                write(path, uniform())
            seen.append(names(tmp_path))

    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    write(path, uniform(), advance=other)
    part = f".grid.here.{os.getpid()}.part"
    assert [sorted(there) for there in seen] == [[part], [part, "grid"]]
    assert names(tmp_path) == ["grid"]
    assert_same(read(path, uniform()), uniform())


@pytest.mark.parametrize(("samples", "dim"), [(5000, 4), (100, 1)])
def test_the_size_of_a_file_is_told_beforehand(tmp_path: Path, samples: int, dim: int) -> None:
    points = uniform(samples, dim)
    write(tmp_path / "grid", points)
    assert 0 < (tmp_path / "grid").stat().st_size - file_bytes(samples, dim) < 10**4
    assert file_bytes(2**31, 10) - file_bytes(2**31 - 1, 10) > 4 * 2**31  # numbers of 64 bits


@pytest.mark.parametrize("place", ["within", "between"])
def test_of_the_points_256_are_checked(tmp_path: Path, place: str) -> None:
    """As the docstring says: what is damaged between them is not noticed."""
    points, path = uniform(), tmp_path / "grid"
    write(path, points)
    checked = set(np.linspace(0, 4999, grid_files.CHECKED).astype(int).tolist())
    row = next(k for k in range(2000, 5000) if (k in checked) == (place == "within"))
    whole = bytearray(path.read_bytes())
    whole[HEAD + row * 4 * 6] ^= 1
    path.write_bytes(whole)
    if place == "within":
        with pytest.raises(ValueError, match=r"or is damaged$"):
            read(path, points)
    else:
        index = read(path, points)
        assert (index.points[row, :4] != points[index.order[row]]).any()


def test_too_small_a_disk_is_told_of_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ident3d.datasets.grid_files.shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**6})())
    never: list[int] = []
    with pytest.raises(OSError, match=re.escape("it needs 0.0 GB, and 0.0 GB are free")):
        write(tmp_path / "grid", uniform(100_000), advance=never.append)
    assert not never
    assert not names(tmp_path)

"""The latents of a split: drawn piece by piece, or the user's own file with everything that can be wrong with it."""

from __future__ import annotations

import hashlib
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import ident3d.render.latents
from ident3d.errors import SpecError
from ident3d.files import array_sha256
from ident3d.render.draws import draw_latents
from ident3d.render.latents import load_user_latents, write_latents
from ident3d.render.plan import RenderPlan
from ident3d.render.quality import quality
from ident3d.scene import SceneSpec
from ident3d.scenes import load_scene
from ident3d.schema import from_plain

SPEC = load_scene("3dident").spec


def frozen_spec() -> SceneSpec:
    plain = tomllib.loads(load_scene("3dident").text)
    plain["factors"]["object_z"]["frozen"] = 0.5
    return from_plain(SceneSpec, plain)


def plan(samples: int, latents: str = "drawn") -> RenderPlan:
    return RenderPlan("3dident", "0" * 64, "val", samples, 9, latents, 64, "draft", quality("draft"), 5, "CPU", "4.5.0")


def good(n: int = 7) -> NDArray[np.float32]:
    return np.random.default_rng(1).random((n, 10), dtype=np.float32)


@pytest.mark.parametrize("samples", [1, 3, 4, 5, 11])
def test_drawn_latents_are_the_keyed_ones_whatever_the_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    monkeypatch.setattr(ident3d.render.latents, "PIECE", 4)
    written = write_latents(tmp_path, plan(samples), SPEC, None)[0]
    np.testing.assert_array_equal(written, draw_latents(9, "val", 0, samples, {}))


@pytest.mark.parametrize("given", [None, good(7)], ids=["drawn", "given"])
def test_the_file_is_what_numpy_would_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: NDArray[np.float32] | None
) -> None:
    monkeypatch.setattr(ident3d.render.latents, "PIECE", 4)
    written = write_latents(tmp_path, plan(7), SPEC, given)[0]
    expected = io.BytesIO()
    np.save(expected, draw_latents(9, "val", 0, 7, {}) if given is None else given)
    assert (tmp_path / "latents.npy").read_bytes() == expected.getvalue()
    np.testing.assert_array_equal(written, np.load(io.BytesIO(expected.getvalue())))


def test_drawn_latents_hold_what_the_scene_holds(tmp_path: Path) -> None:
    written = write_latents(tmp_path, plan(6), frozen_spec(), None)[0]
    np.testing.assert_array_equal(written[:, 2], 0.5)
    assert len(np.unique(written[:, 0])) == 6


@pytest.mark.parametrize(
    "array",
    [good(), good().astype(np.float64), np.asfortranarray(good()), np.ones((2, 10), np.int64), np.zeros((1, 10), bool)],
    ids=["float32", "float64", "fortran", "int", "bool"],
)
def test_the_users_numbers_become_float32(tmp_path: Path, array: NDArray[Any]) -> None:
    np.save(tmp_path / "mine.npy", array)
    loaded = load_user_latents(tmp_path / "mine.npy", SPEC)
    assert loaded.dtype == np.float32
    assert loaded.flags.c_contiguous
    np.testing.assert_array_equal(loaded, array.astype(np.float32))


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npz(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, array)
    return buffer.getvalue()


BAD_FILES = {
    "empty file": (b"", "not a .npy file of numbers"),
    "text": (b"0.1, 0.2, 0.3\n", "not a .npy file of numbers"),
    "truncated data": (npy(good())[:-5], "not a .npy file of numbers"),
    "truncated header": (npy(good())[:40], "not a .npy file of numbers"),
    "pickled objects": (npy(np.array([[None] * 10])), "not a .npy file of numbers"),
    "archive": (npz(good()), "got an archive of several (.npz)"),
    "broken archive": (npz(good())[:100], "not a .npy file of numbers"),
    "texts": (npy(np.full((2, 10), "x")), "expected numbers"),
    "nine columns": (npy(np.zeros((5, 9))), "expected shape (N, 10), got (5, 9)"),
    "one point": (npy(np.zeros(10)), "expected shape (N, 10), got (10,)"),
    "no sample": (npy(np.zeros((0, 10))), "holds no sample"),
    "raw coordinates": (npy(np.full((3, 10), -0.5)), "(raw + 1) / 2"),
    "past one": (npy(np.full((3, 10), 1.001)), "latents[0, 0] (object_x) = 1.00"),
    "nan": (npy(np.full((3, 10), np.nan)), "latents[0, 0] (object_x) = nan"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    content, message = BAD_FILES[kind]
    path = tmp_path / "mine.npy"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        load_user_latents(path, SPEC)
    assert str(path) in str(caught.value)


# numpy says so itself when a header is odd enough to look like one of Python 2.
@pytest.mark.filterwarnings("ignore:Reading `.npy` or `.npz` file required additional header parsing:UserWarning")
def test_any_flipped_bit_of_the_header_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "mine.npy"
    whole, unnamed = npy(good(3)), 0
    for bit in range(8 * 128):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            loaded = load_user_latents(path, SPEC)
        except SpecError as error:
            unnamed += str(path) not in str(error)
        else:
            assert loaded.shape[1] == 10
    assert unnamed == 0


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()], ids=["absent", "folder"])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "mine.npy")
    with pytest.raises(SpecError, match=r"no such file; expected a \.npy of shape"):
        load_user_latents(tmp_path / "mine.npy", SPEC)


def test_latents_that_contradict_a_frozen_factor_are_refused(tmp_path: Path) -> None:
    u = good()
    np.save(tmp_path / "mine.npy", u)
    with pytest.raises(SpecError, match=r"latents\[0, 2\] \(object_z\).*the scene holds object_z at 0\.5"):
        load_user_latents(tmp_path / "mine.npy", frozen_spec())
    u[:, 2] = 0.5
    np.save(tmp_path / "mine.npy", u)
    assert len(load_user_latents(tmp_path / "mine.npy", frozen_spec())) == 7


def test_the_sha256_is_of_the_elements_in_c_order() -> None:
    u = good()
    expected = hashlib.sha256(u.tobytes()).hexdigest()
    assert array_sha256(u) == array_sha256(np.asfortranarray(u)) == expected
    assert array_sha256(u[::-1]) != expected

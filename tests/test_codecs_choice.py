"""Encoders, the choice of codecs, threads and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL
import pytest
from codec_cases import (
    DAMAGE,
    HAVE_IMAGECODECS,
    by_plain_pillow,
    chunk,
    encoded,
    every_codec,
    header,
    png,
    png_with_text,
    shaded,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ident3d import codecs
from ident3d.codecs import codec_name, decode, encode_png, encode_webp, forced_codec
from ident3d.errors import Ident3DError, SpecError

# Encoders.


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), side=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_encoders_lose_nothing(seed: int, side: tuple[int, int]) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (*side, 3), np.uint8) & np.uint8(seed % 256)
    for encode in (encode_png, encode_webp):
        data = encode(pixels)
        assert data == encode(pixels.copy())
        for name in every_codec():
            with forced_codec(name):
                np.testing.assert_array_equal(decode(data), pixels)


def test_pngs_hold_nothing_but_the_picture() -> None:
    assert encode_png(np.full((1, 1, 3), 7, np.uint8)) == png(
        header(1, 1), chunk(b"IDAT", zlib.compress(b"\1\7\7\7", level=6))
    )


@pytest.mark.parametrize("side", [(1, 5), (5, 1), (64, 64), (224, 200)])
def test_every_row_is_filtered_by_what_leaves_less_of_two(side: tuple[int, int]) -> None:
    pixels = shaded(*side)
    data = encode_png(pixels)
    rows = np.frombuffer(zlib.decompress(data[41:-16]), np.uint8).reshape(side[0], -1)
    wide = pixels.astype(np.int16)
    left, above = (np.diff(wide, axis=axis, prepend=0) for axis in (1, 0))
    for y in range(side[0]):
        sizes = [int(np.abs(d[y].astype(np.int8).astype(np.int16)).sum()) for d in (left, above)]
        assert rows[y, 0] == (1 if sizes[0] <= sizes[1] else 2)
    np.testing.assert_array_equal(by_plain_pillow(data), pixels)


def test_pngs_are_no_larger_than_pillows(reference_renders: Path) -> None:
    pictures = [by_plain_pillow(path.read_bytes()) for path in sorted(reference_renders.glob("*.png"))]
    assert sum(len(encode_png(x)) for x in pictures) <= sum(len(encoded(x, "PNG")) for x in pictures)


def test_webps_are_three_quarters_of_the_best_png(reference_renders: Path) -> None:
    pictures = [by_plain_pillow(path.read_bytes()) for path in sorted(reference_renders.glob("*.png"))]
    webp = sum(len(encode_webp(pixels)) for pixels in pictures)
    best = sum(len(encoded(pixels, "PNG", optimize=True, compress_level=9)) for pixels in pictures)
    assert webp <= 0.72 * best


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3)),
        np.zeros((1, 20_000, 3), np.uint8),
    ],
    ids=["grey", "RGBA", "floats", "too wide"],
)
def test_what_cannot_be_a_webp_is_refused(pixels: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"pixels|encod"):
        encode_webp(pixels)


# The choice of codecs.


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has decoded nothing yet, and whose environment does not say."""
    monkeypatch.delenv(codecs.VARIABLE, raising=False)
    monkeypatch.setattr(codecs, "_backend", None)


def pixels_are_right() -> bool:
    pictures = [shaded(12, 9), shaded(5, 30)]
    return all(np.array_equal(decode(encode(p)), p) for p in pictures for encode in (encode_png, encode_webp))


@pytest.mark.usefixtures("undecided")
@pytest.mark.skipif(not HAVE_IMAGECODECS, reason="imagecodecs is absent")
def test_imagecodecs_is_taken_where_it_is() -> None:
    import imagecodecs

    assert codec_name() == f"imagecodecs {imagecodecs.__version__}"
    assert pixels_are_right()


@pytest.mark.usefixtures("undecided")
def test_pillow_is_taken_where_imagecodecs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    assert codec_name() == f"Pillow {PIL.__version__}"
    assert pixels_are_right()


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", every_codec())
def test_the_variable_forces_a_codec(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(codecs.VARIABLE, name)
    assert codec_name().lower().startswith(name)
    assert pixels_are_right()


@pytest.mark.usefixtures("undecided")
def test_an_empty_variable_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = codec_name()
    monkeypatch.setenv(codecs.VARIABLE, "")
    assert codec_name() == fastest


@pytest.mark.usefixtures("undecided")
def test_a_codec_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"'libpng'.*imagecodecs or pillow"), forced_codec("libpng"):
        pass
    monkeypatch.setenv(codecs.VARIABLE, "Pillow")
    with pytest.raises(SpecError, match=r"IDENT3D_CODEC is 'Pillow'"):
        codec_name()
    with pytest.raises(Ident3DError, match=r"IDENT3D_CODEC is 'Pillow'") as caught:
        decode(encode_png(shaded(4, 4)))
    # Callers take these for a damaged picture.
    assert not isinstance(caught.value, DAMAGE)


@pytest.mark.usefixtures("undecided")
def test_a_forced_codec_that_is_absent_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(SpecError, match=r"ident3d\[codecs\]"), forced_codec("imagecodecs"):
        pass
    assert pixels_are_right()


def test_a_forced_codec_is_so_inside_only() -> None:
    before = codec_name()
    with suppress(KeyError), forced_codec("pillow"):
        assert codec_name() == f"Pillow {PIL.__version__}"
        raise KeyError
    assert codec_name() == before


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("not in this build")


def do_nothing(*_: Any, **__: Any) -> bytes:
    return b""


@pytest.mark.usefixtures("undecided")
@pytest.mark.skipif(not HAVE_IMAGECODECS, reason="imagecodecs is absent")
@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({}, "Pillow {pillow}"),
        ({"webp_decode": "real"}, "Pillow {pillow} (PNG), imagecodecs 1.2 (WebP)"),
        ({"webp_decode": do_nothing, "spng_decode": do_nothing}, "Pillow {pillow}"),
        (
            {"deflate_decode": "real", "deflate_encode": "real", "deflate_crc32": "real", "spng_decode": "real"}
            | {"webp_decode": fail},
            "imagecodecs 1.2 (PNG), Pillow {pillow} (WebP)",
        ),
    ],
)
def test_a_build_that_lacks_parts_is_used_for_the_others(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], name: str
) -> None:
    import imagecodecs

    stub = {part: getattr(imagecodecs, part) if found == "real" else found for part, found in parts.items()}
    monkeypatch.setitem(sys.modules, "imagecodecs", SimpleNamespace(__version__="1.2", **stub))
    assert codec_name() == name.format(pillow=PIL.__version__)
    assert pixels_are_right()


@pytest.mark.skipif(not HAVE_IMAGECODECS, reason="imagecodecs is absent")
def test_pillow_mends_what_a_codec_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    import imagecodecs

    with forced_codec("imagecodecs"):
        for part in ("spng_decode", "webp_decode", "deflate_decode"):
            with monkeypatch.context() as patch:
                patch.setattr(imagecodecs, part, fail)
                assert pixels_are_right()


@pytest.mark.skipif(not HAVE_IMAGECODECS, reason="imagecodecs is absent")
def test_fast_paths_are_taken(monkeypatch: pytest.MonkeyPatch, reference_renders: Path) -> None:
    monkeypatch.setattr(codecs, "_by_pillow", fail)
    real = (reference_renders / "0000.png").read_bytes()
    with forced_codec("imagecodecs"):
        for data in (real, png_with_text(), encode_png(shaded(9, 5)), encode_webp(shaded(9, 5))):
            decode(data)


# Threads and processes.


def test_threads_decode_at_once(codec: str) -> None:
    pictures = [shaded(40, 40, seed) for seed in range(8)]
    data = [encode(pixels) for pixels in pictures for encode in (encode_png, encode_webp)]
    with ThreadPoolExecutor(4) as pool:
        for k, pixels in enumerate(pool.map(decode, data * 8)):
            np.testing.assert_array_equal(pixels, pictures[k % len(data) // 2])


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_nothing_is_imported_before_it_is_needed() -> None:
    script = """
import sys
import ident3d.codecs
print(*(name for name in ("PIL", "imagecodecs", "torch", "torchvision") if name in sys.modules))
"""
    assert run(script) == ""


@pytest.mark.parametrize("name", every_codec())
def test_forked_processes_decode(name: str) -> None:
    script = """
import os, sys
import numpy as np
from ident3d.codecs import codec_name, decode, encode_png, encode_webp
pixels = np.arange(30 * 20 * 3, dtype=np.uint8).reshape(30, 20, 3)
data = [encode_png(pixels), encode_webp(pixels)]
right = lambda: all((decode(x) == pixels).all() for x in data)
assert right()
child = os.fork()
if child == 0:
    os._exit(0 if right() else 1)
assert os.waitpid(child, 0)[1] == 0
print(codec_name().split()[0].lower())
"""
    assert run(script, IDENT3D_CODEC=name) == name

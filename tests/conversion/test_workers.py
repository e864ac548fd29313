"""Encoding without loss, what is refused, and results in order from several threads."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ident3d.codecs import decode
from ident3d.conversion.encoding import BadPicture, encode, stored_format
from ident3d.conversion.workers import Workers

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)


def png(pixels: Any, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["png", "webp", "keep-png"])
def test_pixels_and_their_sums(form: str) -> None:
    for stored in (png(PIXELS), PIXELS):
        here = encode(stored, form, 24)
        assert stored_format(here.data) == form.removeprefix("keep-")
        np.testing.assert_array_equal(decode(here.data), PIXELS)
        assert here.sums == tuple(PIXELS.sum(axis=(0, 1), dtype=np.int64).tolist())
        assert here.squares == tuple((PIXELS.astype(np.int64) ** 2).sum(axis=(0, 1)).tolist())


def test_kept_bytes_are_the_same_object_whatever_is_in_them() -> None:
    rgba = png(np.dstack([PIXELS, np.full((24, 24), 7, np.uint8)]))
    assert encode(rgba, "keep-png", 24).data is rgba
    np.testing.assert_array_equal(decode(encode(rgba, "webp", 24).data), PIXELS)


@pytest.mark.parametrize(
    ("stored", "form", "message"),
    [
        (b"", "keep-png", "does not decode"),
        (png(PIXELS)[:-5], "keep-png", "does not decode"),
        (png(PIXELS), "keep-webp", "is no WEBP, so its bytes cannot be kept"),
        (png(PIXELS, "BMP"), "keep-png", "is no PNG, so its bytes cannot be kept"),
        (png(PIXELS[:20]), "png", "is 24 x 20 px, expected 24 x 24"),
        (PIXELS[:, :8], "webp", "is 8 x 24 px, expected 24 x 24"),
        (png(PIXELS) + b"x", "keep-png", "goes on past its end"),
        (png(PIXELS, "WEBP", lossless=True) + b"xx", "keep-webp", "goes on past its end|does not decode"),
    ],
)
def test_pictures_that_are_refused(stored: Any, form: str, message: str) -> None:
    with pytest.raises(BadPicture, match=message):
        encode(stored, form, 24)


def test_results_come_in_order_and_few_are_read_ahead() -> None:
    running, most, lock = 0, 0, threading.Lock()
    taken = 0

    def make(index: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running - taken)
        time.sleep(0.001 * (index % 3))
        return index * index

    with Workers(3) as workers:
        for index, future in workers.in_order(make, range(50)):
            assert future.result() == index * index
            taken = index + 1
        assert taken == 50
    assert most <= workers.ahead + 1


def test_what_is_not_wanted_any_more_is_not_begun() -> None:
    begun = []

    def make(index: int) -> int:
        begun.append(index)
        time.sleep(0.005)
        return index

    with Workers(1) as workers:
        stream = workers.in_order(make, range(1000))
        next(stream)
        stream.close()
    assert len(begun) < 20


def test_an_error_comes_in_its_turn() -> None:
    def make(index: int) -> int:
        if index == 3:
            raise ValueError("three")
        return index

    with Workers(2) as workers:
        found = [future.exception() or future.result() for _, future in workers.in_order(make, range(5))]
    assert [str(f) for f in found] == ["0", "1", "2", "three", "4"]

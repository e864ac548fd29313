"""Recycled memory, normalisation piece by piece, and work done ahead."""

from __future__ import annotations

import pickle
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch

from ident3d.datasets import blocks
from ident3d.datasets.blocks import Blocks, ahead, normalize_into, pieces


def address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def test_a_block_far_too_large_is_let_go() -> None:
    pool = Blocks(keep=2)
    pool.empty((64, 3, 64, 64), torch.float32)
    assert [block.nbytes for block in pool._free] == [64 * 3 * 64 * 64 * 4]
    pool.empty((2, 3, 8, 8), torch.uint8)
    assert [block.nbytes for block in pool._free] == [2 * 3 * 8 * 8]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_block_keeps_its_address(dtype: torch.dtype) -> None:
    pool = Blocks(keep=2)
    seen = set()
    for n in (16, 16, 12, 16):
        block = pool.empty((n, 3, 64, 64), dtype)
        assert block.shape == (n, 3, 64, 64)
        assert block.dtype == dtype
        assert block.is_contiguous()
        seen.add(address(block))
        del block
    assert len(seen) == 1


@pytest.mark.parametrize(
    "derive",
    [
        lambda x: x[2:3],
        lambda x: x.view(-1)[5:9].reshape(2, 2),
        lambda x: x.numpy(),
        lambda x: x.numpy()[3, 0][2:],
        lambda x: torch.from_numpy(x.numpy()[1:])[0],
        lambda x: x.untyped_storage(),
        lambda x: x.detach(),
        lambda x: memoryview(x.numpy()),
        lambda x: x.unbind()[0],
    ],
)
def test_memory_that_is_in_use_is_left_alone(derive: object) -> None:
    pool = Blocks(keep=2)
    block = pool.empty((16, 3, 64, 64), torch.uint8)
    where = address(block)
    held = derive(block)  # type: ignore[operator]
    del block
    other = pool.empty((16, 3, 64, 64), torch.uint8)
    assert address(other) != where
    del held
    assert address(pool.empty((16, 3, 64, 64), torch.uint8)) == where


def test_no_more_is_kept_than_asked_for() -> None:
    pool = Blocks(keep=2)
    held = [pool.empty((16, 3, 64, 64), torch.uint8) for _ in range(5)]
    held.clear()
    assert len(pool._free) == 2
    assert len(pickle.loads(pickle.dumps(pool))._free) == 0


def test_no_pixels_are_a_block_too() -> None:
    assert Blocks(keep=1).empty((0, 3, 8, 8), torch.float32).shape == (0, 3, 8, 8)


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_pieces_cover_all_pictures_once(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PIECE_BYTES", 1000)
    for size in (1, 300, 1000, 5000, 0):
        covered = [k for piece in pieces(n, size) for k in range(piece.start, piece.stop)]
        assert covered == list(range(n))
    assert [piece.stop - piece.start for piece in pieces(7, 300)] == [3, 3, 1]


def test_normalisation_is_that_of_torch_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (7, 3, 9, 9), generator=generator, dtype=torch.uint8)
    scale, shift = torch.rand(3, 1, 1, generator=generator) / 50, torch.randn(3, 1, 1, generator=generator)
    for size in (1, 3 * 4 * 3 * 81, 1 << 30):
        monkeypatch.setattr(blocks, "PIECE_BYTES", size)
        out = np.empty((7, 3, 9, 9), np.float32)
        normalize_into(out, pictures.numpy(), (scale, shift))
        assert torch.equal(torch.from_numpy(out), torch.mul(pictures, scale).add_(shift))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_results_come_in_order(threads: int) -> None:
    def slow(k: int) -> int:
        time.sleep(0.002 * (k % 3))
        return k * k

    assert list(ahead(slow, range(20), threads, 4)) == [k * k for k in range(20)]
    assert list(ahead(slow, [], threads, 4)) == []


def test_no_more_is_made_ahead_than_asked_for() -> None:
    begun: list[int] = []
    with closing(ahead(begun.append, range(100), 2, 5)) as results:
        next(results)
        next(results)
    assert 2 <= len(begun) <= 6
    assert not any(thread.name.startswith("ident3d") for thread in threading.enumerate())


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_comes_at_its_turn(threads: int) -> None:
    def fail(k: int) -> int:
        if k == 3:
            raise ZeroDivisionError
        return k

    results = ahead(fail, range(10), threads, 8)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(results)

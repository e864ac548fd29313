"""KITTI Masks: the published structure, the law of its pairs, the synthetic stand-in, and what is refused."""

from __future__ import annotations

import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from ident3d.datasets.kitti_masks import KITTI_FACTORS, KittiMasks
from ident3d.datasets.mask_pickle import FILE
from ident3d.datasets.silhouettes import make_silhouettes
from ident3d.errors import SpecError

SMALL = {"synthetic": True, "sequences": 6, "frames": 12}


def sequence_of(data: KittiMasks, frame: int) -> int:
    """Which sequence a frame lies in, by counting."""
    bounds: list[int] = data.sequences.tolist()
    return sum(bound <= frame for bound in bounds) - 1


# What is read.


def test_the_published_structure_is_read_as_it_is(kitti_folder: Path, kitti_maker: ModuleType) -> None:
    data = KittiMasks(kitti_folder)
    masks, latents = kitti_maker.fabricate()
    assert data.masks.dtype == np.uint8
    assert data.masks.flags.c_contiguous
    np.testing.assert_array_equal(data.masks, np.concatenate(masks))
    np.testing.assert_array_equal(data.latents, np.concatenate(latents))
    assert data.latents.dtype == np.float32
    assert data.sequences.tolist() == [0, 5, 7, 19, 21, 24]
    assert data.path == kitti_folder / FILE
    assert (data.synthetic, data.title) == (False, "KITTI Masks")


def test_the_fabricated_pickle_refers_to_the_removed_alias(kitti_folder: Path) -> None:
    stored = (kitti_folder / FILE).read_bytes()
    assert b"cnumpy\nbool\n" in stored
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not hasattr(np, "bool"):  # numpy 1.24 to 1.26; numpy 2 gave the name to its own
            with pytest.raises(AttributeError, match="bool"):
                pickle.loads(stored)


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_and_number_type_gives_the_same(
    protocol: int, kitti_folder: Path, kitti_maker: ModuleType, write_kitti: Callable[..., Path]
) -> None:
    masks, latents = kitti_maker.fabricate()
    kinds = itertools.cycle([bool, np.uint8, np.int64, np.float32])
    path = write_kitti(
        [part.astype(kind) for part, kind in zip(masks, kinds, strict=False)],
        [part.astype(np.float64) for part in latents],
        protocol,
        more={"is": "left aside"},
    )
    got, expected = KittiMasks(path), KittiMasks(kitti_folder)
    for name in ("masks", "latents", "sequences", "anchors"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
        assert getattr(got, name).dtype == getattr(expected, name).dtype


def test_the_root_is_the_pickle_or_its_folder_as_text_or_path(
    kitti_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = tmp_path / "masks.pkl"
    renamed.write_bytes((kitti_folder / FILE).read_bytes())
    for root in (kitti_folder, str(kitti_folder), kitti_folder / FILE, str(kitti_folder / FILE), renamed):
        assert len(KittiMasks(root)) == 19
    monkeypatch.setenv("HOME", str(kitti_folder.parent))
    assert KittiMasks(f"~/{kitti_folder.name}").path == kitti_folder / FILE


# The law of pairs.


def test_anchors_are_all_frames_but_the_last_of_each_sequence(kitti_folder: Path, kitti_small: KittiMasks) -> None:
    for data in (KittiMasks(kitti_folder), kitti_small):
        last = {bound - 1 for bound in data.sequences[1:].tolist()}
        assert data.anchors.tolist() == [k for k in range(len(data.masks)) if k not in last]
        assert len(data) == len(data.anchors)


@pytest.mark.parametrize("max_delta_t", [1, 5, 100])
def test_transitions_of_any_distance_are_those_of_a_dataset_of_it(kitti_folder: Path, max_delta_t: int) -> None:
    expected = KittiMasks(kitti_folder, max_delta_t=max_delta_t).transitions()
    found = KittiMasks(kitti_folder, max_delta_t=2).transitions(max_delta_t)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32
    for bad in (0, 1001):
        with pytest.raises(SpecError, match=f"max_delta_t = {bad}: expected"):
            KittiMasks(kitti_folder).transitions(bad)


@pytest.mark.parametrize("max_delta_t", [1, 2, 5, 1000])
def test_a_positive_is_up_to_max_delta_t_later_or_its_sequences_last(kitti_folder: Path, max_delta_t: int) -> None:
    data = KittiMasks(kitti_folder, max_delta_t=max_delta_t)
    seen: dict[int, set[int]] = {}
    for epoch in range(60):
        data.set_epoch(epoch)
        for i in range(len(data)):
            anchor, positive = data.pair_of(i)
            assert anchor == data.anchors[i]
            seen.setdefault(anchor, set()).add(positive)
    for anchor, positives in seen.items():
        end = int(data.sequences[sequence_of(data, anchor) + 1]) - 1
        possible = {min(anchor + d, end) for d in range(1, max_delta_t + 1)}
        assert positives <= possible
        # Each of up to five comes in 60 epochs; of a thousand, at least that which nearly all are clipped to.
        assert positives == possible if max_delta_t <= 5 else end in positives


def test_steps_are_uniform_but_for_the_clipping(kitti_small: KittiMasks) -> None:
    data = KittiMasks(synthetic=True, max_delta_t=5, sequences=60)
    free = [i for i, k in enumerate(data.anchors) if data._ends[i] - k >= 5]
    steps = []
    for epoch in range(3):
        data.set_epoch(epoch)
        steps += [np.subtract(*data.pair_of(i)[::-1]) for i in free]
    counts = np.bincount(steps, minlength=6)[1:]
    assert counts.sum() > 4000
    assert stats.chisquare(counts).pvalue > 0.001
    assert np.mean(steps) == pytest.approx(3, abs=0.1)  # 0.15 s


def test_an_item_is_a_function_of_seed_epoch_and_number(kitti_small: KittiMasks) -> None:
    def steps(epoch: int, seed: int = 0) -> list[tuple[int, int]]:
        data = KittiMasks(**{**SMALL, "seed": seed}, max_delta_t=5)  # type: ignore[arg-type]
        data.sequences, data.anchors, data._ends = kitti_small.sequences, kitti_small.anchors, kitti_small._ends
        data.set_epoch(epoch)
        return [data.pair_of(i) for i in range(len(data))]

    assert steps(3) == steps(3)
    assert len({str(steps(epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9
    backwards = KittiMasks(**SMALL, max_delta_t=5)  # type: ignore[arg-type]
    assert [backwards.pair_of(i) for i in reversed(range(len(backwards)))][::-1] == steps(0)


def test_an_item_is_the_masks_and_latents_of_its_frames(kitti_small: KittiMasks) -> None:
    for i in (0, 7, len(kitti_small) - 1):
        x, positive, z, z_positive = kitti_small[i]
        anchor, later = kitti_small.pair_of(i)
        for mask, latent, frame in ((x, z, anchor), (positive, z_positive, later)):
            assert (mask.dtype, tuple(mask.shape)) == (torch.uint8, (1, 64, 64))
            assert (latent.dtype, tuple(latent.shape)) == (torch.float32, (3,))
            np.testing.assert_array_equal(mask[0], kitti_small.masks[frame])
            np.testing.assert_array_equal(latent, kitti_small.latents[frame])
        assert set(x.unique().tolist()) == {0, 1}


def test_items_are_found_from_the_end_and_not_past_it(kitti_small: KittiMasks) -> None:
    assert kitti_small.pair_of(-1) == kitti_small.pair_of(len(kitti_small) - 1)
    assert kitti_small.pair_of(np.int64(2)) == kitti_small.pair_of(2)
    for i in (len(kitti_small), -len(kitti_small) - 1):
        with pytest.raises(IndexError, match=rf"item {i} of {len(kitti_small)}"):
            kitti_small[i]
    assert len(list(kitti_small)) == len(kitti_small)  # type: ignore[call-overload]


def test_transforms_see_each_mask_and_each_latent_and_cannot_change_the_store() -> None:
    data = KittiMasks(
        **SMALL,  # type: ignore[arg-type]
        transform=lambda mask: mask.bitwise_xor_(1).float(),
        target_transform=lambda z: z.zero_() + 1,
    )
    masks, latents = data.masks.copy(), data.latents.copy()
    x, positive, z, z_positive = data[4]
    anchor, later = data.pair_of(4)
    np.testing.assert_array_equal(x[0], 1.0 - masks[anchor])
    np.testing.assert_array_equal(positive[0], 1.0 - masks[later])
    assert z.tolist() == z_positive.tolist() == [1, 1, 1]
    np.testing.assert_array_equal(data.masks, masks)
    np.testing.assert_array_equal(data.latents, latents)


def test_a_data_loader_with_workers_serves_the_same_items(kitti_small: KittiMasks) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [list(DataLoader(kitti_small, batch_size=9, num_workers=n, generator=generator)) for n in (0, 2)]
    for first, second in zip(*batches, strict=True):
        assert all(map(torch.equal, first, second))


def test_transitions_are_those_of_all_pairs_equally_often(kitti_folder: Path) -> None:
    data = KittiMasks(kitti_folder, max_delta_t=3)
    expected = []
    for start, stop in itertools.pairwise(data.sequences.tolist()):
        for t in range(start, stop - 1):
            expected += [data.latents[min(t + d, stop - 1)] - data.latents[t] for d in (1, 2, 3)]
    got = data.transitions()
    assert got.dtype == np.float32
    assert sorted(got.tolist()) == sorted(np.array(expected).tolist())


# Batches.


def test_a_pass_of_batches_has_every_anchor_at_most_once(kitti_small: KittiMasks) -> None:
    stream = kitti_small.pairs(7, seed=1)
    per_pass = len(kitti_small) // 7
    assert len(stream) == per_pass
    orders = []
    for number in range(3):
        chosen = torch.cat([stream.frames(k)[0] for k in range(number * per_pass, (number + 1) * per_pass)]).tolist()
        assert len(set(chosen)) == len(chosen) == 7 * per_pass
        assert set(chosen) <= set(kitti_small.anchors.tolist())
        orders.append(tuple(chosen))
    assert len(set(orders)) == 3
    assert any(list(order) != sorted(order) for order in orders)


def test_batches_draw_anchors_and_steps_uniformly(kitti_small: KittiMasks) -> None:
    stream = kitti_small.pairs(16, seed=3)
    drawn = [stream.frames(k) for k in range(1500)]
    anchors, positives = (torch.cat(part).numpy() for part in zip(*drawn, strict=True))
    counts = np.bincount(np.searchsorted(kitti_small.anchors, anchors), minlength=len(kitti_small))
    assert stats.chisquare(counts).pvalue > 0.001
    ends = kitti_small._ends[np.searchsorted(kitti_small.anchors, anchors)]
    free = ends - anchors >= 5
    assert stats.chisquare(np.bincount((positives - anchors)[free], minlength=6)[1:]).pvalue > 0.001
    assert (positives > anchors).all()
    assert (positives <= np.minimum(anchors + 5, ends)).all()


def test_a_batch_holds_the_masks_and_latents_of_its_frames(kitti_small: KittiMasks) -> None:
    stream = kitti_small.pairs(8)
    x, positive, z, z_positive = next(iter(stream))
    for masks, latents, frames in zip((x, positive), (z, z_positive), stream.frames(0), strict=True):
        assert (masks.dtype, tuple(masks.shape)) == (torch.uint8, (8, 1, 64, 64))
        assert (latents.dtype, tuple(latents.shape)) == (torch.float32, (8, 3))
        np.testing.assert_array_equal(masks[:, 0], kitti_small.masks[frames.numpy()])
        np.testing.assert_array_equal(latents, kitti_small.latents[frames.numpy()])
    before = kitti_small.masks.copy()
    x.fill_(9)
    np.testing.assert_array_equal(kitti_small.masks, before)


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b))


def test_a_batch_is_the_same_in_any_order_after_a_restart_and_on_any_rank(kitti_small: KittiMasks) -> None:
    in_order = [kitti_small.pairs(8, 5).batch(k) for k in range(20)]
    stream = kitti_small.pairs(8, 5)
    assert all(same(stream.batch(k), in_order[k]) for k in (19, 3, 3, 0, 11))
    for rank in range(3):
        of_rank = kitti_small.pairs(8, 5, rank=rank, world_size=3, batches=6)
        assert all(map(same, of_rank, in_order[rank::3]))
    assert not same(kitti_small.pairs(8, 6).batch(0), in_order[0])


def test_epochs_follow_each_other_and_can_be_set(kitti_small: KittiMasks) -> None:
    stream = kitti_small.pairs(8)
    epochs = [list(stream) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [len(stream)] * 3
    assert not same(epochs[0][0], epochs[1][0])
    stream.set_epoch(1)
    assert all(map(same, stream, epochs[1]))


def test_a_state_goes_on_where_it_was_taken_and_is_refused_elsewhere(kitti_small: KittiMasks) -> None:
    stream = kitti_small.pairs(8, 2)
    series = iter(stream)
    for _ in range(3):
        next(series)
    state = stream.state_dict()
    other = kitti_small.pairs(8, 2)
    other.load_state_dict(state)
    assert same(next(iter(other)), next(series))
    one_step = KittiMasks(**SMALL, max_delta_t=1)  # type: ignore[arg-type]
    reseeded = KittiMasks(**{**SMALL, "seed": 1}, max_delta_t=5)  # type: ignore[arg-type]
    for refused in (kitti_small.pairs(8, 3), kitti_small.pairs(4, 2), one_step.pairs(8, 2), reseeded.pairs(8, 2)):
        with pytest.raises(SpecError, match="this series has"):
            refused.load_state_dict(state)


def test_the_seeds_of_torch_and_numpy_are_neither_read_nor_set(kitti_small: KittiMasks) -> None:
    def states() -> tuple[bytes, bytes]:
        legacy: Any = np.random.get_state()  # noqa: NPY002
        return torch.get_rng_state().numpy().tobytes(), legacy[1].tobytes()

    before = states()
    KittiMasks(**SMALL)[0]  # type: ignore[arg-type]
    list(kitti_small.pairs(8))
    kitti_small.transitions()
    assert states() == before


def test_a_device_may_hold_the_masks(kitti_small: KittiMasks) -> None:
    assert same(kitti_small.pairs(8, device="cpu").batch(3), kitti_small.pairs(8).batch(3))
    assert same(kitti_small.pairs(8, device=torch.device("cpu")).batch(3), kitti_small.pairs(8).batch(3))
    assert all(part.device.type == "meta" for part in kitti_small.pairs(8, device="meta").batch(3))
    for device in ("teapot", "cuda:99"):
        with pytest.raises(SpecError, match=rf"device='{device}': .*expected e\.g\. cpu"):
            kitti_small.pairs(8, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_cuts_the_same_batches(kitti_small: KittiMasks) -> None:
    for got, expected in zip(kitti_small.pairs(8, device="cuda").batch(3), kitti_small.pairs(8).batch(3), strict=True):
        assert got.is_cuda
        assert torch.equal(got.cpu(), expected)


# Its synthetic stand-in.


def test_synthetic_data_are_the_silhouettes_of_the_seed() -> None:
    data = KittiMasks(**SMALL, seed=4)  # type: ignore[arg-type]
    masks, latents = make_silhouettes(6, 4, 12)
    np.testing.assert_array_equal(data.masks, np.concatenate(masks))
    np.testing.assert_array_equal(data.latents, np.concatenate(latents))
    assert np.diff(data.sequences).tolist() == [len(part) for part in masks]
    assert data.path is None


def test_synthetic_data_say_so_wherever_they_are_shown(kitti_small: KittiMasks, kitti_folder: Path) -> None:
    real = KittiMasks(kitti_folder)

    def shown(data: KittiMasks) -> list[str]:
        title = data.plot(1)._suptitle  # type: ignore[attr-defined]
        return [data.title, repr(data), title.get_text(), data.pairs(2).kind]

    assert all("SYNTHETIC" in text for text in shown(kitti_small))
    assert not any("SYNTHETIC" in text for text in shown(real))
    assert (kitti_small.synthetic, real.synthetic) == (True, False)


def test_a_plot_shows_both_masks_and_what_is_known_of_them(kitti_small: KittiMasks) -> None:
    figure = kitti_small.plot(5)
    anchor, positive = kitti_small.pair_of(5)
    for ax, frame in zip(figure.axes, (anchor, positive), strict=True):
        shown: Any = ax.images[0].get_array()
        np.testing.assert_array_equal(shown, kitti_small.masks[frame])
        line: Any = ax.lines[0]
        (x,), (y,) = line.get_data()
        assert [y, x] == kitti_small.latents[frame, :2].tolist()
    sequence = sequence_of(kitti_small, anchor)
    assert f"sequence {sequence}, frame {anchor - kitti_small.sequences[sequence]}" in figure.axes[0].get_title()
    assert f"{0.05 * (positive - anchor):.2f} s later" in figure.axes[1].get_title()
    stored = io.BytesIO()
    figure.savefig(stored)
    assert stored.getvalue().startswith(b"\x89PNG")
    with pytest.raises(IndexError):
        kitti_small.plot(len(kitti_small))


def test_its_description_says_how_much_there_is(kitti_folder: Path) -> None:
    text = repr(KittiMasks(kitti_folder, max_delta_t=5, transform=abs))
    for part in ("19 pairs", "5 sequences of 2 to 12 frames", "24 frames", "5 x 0.05 s", "centre_y", FILE, "transform"):
        assert part in text


def test_the_factors_are_the_columns_of_the_latents(kitti_small: KittiMasks) -> None:
    assert kitti_small.factors is KITTI_FACTORS
    assert kitti_small.factors.names == ("centre_y", "centre_x", "area")
    assert kitti_small.factors.columns.tolist() == [0, 1, 2]
    for factor, column in zip(kitti_small.factors, kitti_small.latents.T, strict=True):
        assert factor.low <= column.min()
        assert column.max() <= factor.high


def test_a_pickled_dataset_serves_the_same(kitti_small: KittiMasks) -> None:
    again = pickle.loads(pickle.dumps(kitti_small))
    assert all(same(again[i], kitti_small[i]) for i in range(5))

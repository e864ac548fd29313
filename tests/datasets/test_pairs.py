"""Pairs: the law of z~ and its nearest sample, as pictures and latents of the dataset, in any process."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ident3d import Box, GeneralizedNormal, Ident3D, Joint, Laplace, Normal, PairSampler, Real, Sphere, pair_loader
from ident3d.datasets.pairs import RenderedPairs

Latents = NDArray[np.float32]
Delivered = tuple[Tensor, Tensor, Tensor, Tensor]
MATCHES = ["exact", "hnsw", "ivf"]


def uniform(n: int, dim: int, seed: int = 0) -> Latents:
    return np.random.default_rng([n, dim, seed]).random((n, dim), np.float32)


def sampler(data: Any, law: Any = "normal(scale=0.05)", **options: Any) -> PairSampler:
    if options.get("match", "exact") != "exact":
        pytest.importorskip("faiss")
    return PairSampler(data, law, **{"batch_size": 16, "seed": 3, **options})


def drawn(pairs: PairSampler, batches: int) -> tuple[Tensor, Tensor]:
    """Anchors and z~ of the first batches, together."""
    parts = [pairs.draw(k) for k in range(batches)]
    return torch.cat([a for a, _ in parts]), torch.cat([w for _, w in parts])


def nearest(latents: Latents, wanted: Latents, anchors: Any = None) -> NDArray[np.int64]:
    """By definition, in float64."""
    gaps = ((wanted[:, None].astype(np.float64) - latents) ** 2).sum(-1)
    if anchors is not None:
        gaps[np.arange(len(wanted)), anchors] = np.inf
    found: NDArray[np.int64] = gaps.argmin(axis=1)
    return found


def deliver(loader: Any, count: int) -> list[Delivered]:
    return [tuple(batch) for _, batch in zip(range(count), loader, strict=False)]


def assert_same(one: list[Delivered], other: list[Delivered]) -> None:
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["matched", "rendered"])
def test_anchors_are_uniform_over_the_samples(kind: str) -> None:
    options: dict[str, Any] = {"batch_size": 100, "seed": 1}
    pairs = PairSampler(uniform(50, 2), "uniform()", **options) if kind == "matched" else RenderedPairs(50, **options)
    anchors = [anchor for k in range(200) for anchor, _ in pairs.batch(k)]
    times = np.bincount(anchors, minlength=50)
    assert stats.chisquare(times).pvalue > 1e-3
    # Neighbours in the series are independent: so are the pairs of two anchors that follow each other.
    table = np.zeros((5, 5))
    np.add.at(table, (np.array(anchors[:-1]) // 10, np.array(anchors[1:]) // 10), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_rendered_pairs_are_each_sample_with_its_own() -> None:
    pairs = RenderedPairs(30, batch_size=40, seed=2)
    assert len(pairs) == 1
    for k in range(5):
        assert all(anchor == positive and 0 <= anchor < 30 for anchor, positive in pairs.batch(k))


STANDARD = {
    "normal(scale=0.3)": stats.norm(scale=0.3),
    "laplace(scale=0.2)": stats.laplace(scale=0.2),
    "gennorm(scale=0.4, beta=3)": stats.gennorm(3, scale=0.4),
}


@pytest.mark.parametrize("law", STANDARD)
def test_z_follows_the_conditional_cut_to_the_cube(law: str) -> None:
    latents, standard = uniform(200, 4), STANDARD[law]
    anchors, wanted = drawn(sampler(latents, law, batch_size=500), 8)
    z = latents[anchors].astype(np.float64)
    bottom, top = standard.cdf(-z), standard.cdf(1 - z)
    share = (standard.cdf(wanted.numpy() - z) - bottom) / (top - bottom)
    for column in share.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    assert np.abs(np.corrcoef(share.T) - np.eye(4)).max() < 0.06


@pytest.mark.parametrize(
    ("law", "standard"),
    [
        (Normal(Real(2), 0.5), stats.norm(scale=0.5)),
        (Laplace(Real(2), 2.0), stats.laplace(scale=2)),
        (GeneralizedNormal(Real(2), 1.5, 3), stats.gennorm(3, scale=1.5)),
    ],
    ids=["normal", "laplace", "gennorm"],
)
def test_z_minus_its_anchor_follows_a_conditional_without_bounds(law: Any, standard: Any) -> None:
    latents = 5 * uniform(200, 2) - 2
    anchors, wanted = drawn(sampler(latents, law, batch_size=500), 8)
    for column in (wanted.numpy() - latents[anchors]).T:
        assert stats.kstest(column, standard.cdf).pvalue > 1e-3


@pytest.mark.parametrize("match", MATCHES)
def test_the_positive_is_the_nearest_sample_that_is_not_the_anchor(match: str) -> None:
    latents = uniform(2000, 5)
    pairs = sampler(latents, match=match, match_options={} if match == "exact" else {"neighbours": 48})
    for k in range(5):
        anchors, wanted = pairs.draw(k)
        assert [a for a, _ in pairs.batch(k)] == anchors.tolist()
        assert [p for _, p in pairs.batch(k)] == nearest(latents, wanted.numpy(), anchors).tolist()


def test_matches_are_the_batches_with_what_was_drawn() -> None:
    latents = uniform(500, 3)
    pairs = sampler(latents, factors=[2, 0], weights=[4.0, 1.0])
    matches = pairs.match_batches([4, 2])
    assert list(zip(matches.anchors.tolist(), matches.positives.tolist(), strict=True)) == [
        *pairs.batch(4),
        *pairs.batch(2),
    ]
    np.testing.assert_array_equal(matches.wanted, torch.cat([pairs.draw(4)[1], pairs.draw(2)[1]]))
    gaps = (matches.wanted - latents[matches.positives])[:, [2, 0]] * [2, 1]
    np.testing.assert_allclose(matches.distance, np.linalg.norm(gaps, axis=1), rtol=1e-4)


@pytest.mark.parametrize("match", MATCHES)
def test_the_anchor_is_its_own_positive_only_where_that_is_allowed(match: str) -> None:
    latents = uniform(300, 4)
    batch = [pair for k in range(10) for pair in sampler(latents, "normal(scale=0.0001)", match=match).batch(k)]
    assert all(anchor != positive for anchor, positive in batch)
    alone = sampler(latents, "normal(scale=0.0001)", match=match, allow_self=True)
    assert all(anchor == positive for k in range(10) for anchor, positive in alone.batch(k))
    some = sampler(latents, "normal(scale=0.1)", match=match, allow_self=True)
    for k in range(5):
        anchors, wanted = some.draw(k)
        assert some.batch(k) == list(zip(anchors.tolist(), nearest(latents, wanted.numpy()).tolist(), strict=True))


def test_a_metric_over_some_factors_ignores_the_others() -> None:
    latents = uniform(400, 3)
    pairs = sampler(latents, factors=[1])
    for k in range(5):
        anchors, wanted = pairs.draw(k)
        expected = nearest(latents[:, [1]], wanted.numpy()[:, [1]], anchors)
        assert [p for _, p in pairs.batch(k)] == expected.tolist()


def global_states() -> tuple[bytes, bytes]:
    return torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002


def test_global_generators_are_neither_read_nor_advanced(fabricated: Path) -> None:
    def make() -> tuple[list[Any], list[Delivered]]:
        pairs = sampler(uniform(300, 4))
        own = torch.Generator()  # or else torch's loader draws a seed for its workers from the global one
        loader = Ident3D(fabricated).pairs("normal(scale=0.1)", batch_size=4, generator=own)
        batches = [pairs.batch(k) for k in range(4)], list(RenderedPairs(30, batch_size=4, seed=0))
        return [*batches], deliver(loader, 3)

    before = global_states()
    batches, served = make()
    assert global_states() == before
    torch.manual_seed(torch.initial_seed() + 1)
    np.random.random()  # noqa: NPY002
    again, served_again = make()
    assert again == batches
    assert_same(served_again, served)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (2, "spawn")])
def test_pictures_and_latents_are_those_of_the_pair(fabricated: Path, workers: int, context: str | None) -> None:
    data = Ident3D(fabricated)
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context}
    loader = data.pairs("laplace(scale=0.1)", batch_size=6, seed=4, **options)
    series = PairSampler(data, "laplace(scale=0.1)", batch_size=6, seed=4)
    assert len(loader) == len(series) == 4
    got = deliver(loader, 10)
    assert len(got) == 4
    for k, (x, positive, z, z_positive) in enumerate(got):
        assert (x.dtype, x.shape, positive.shape) == (torch.uint8, (6, 3, 16, 16), (6, 3, 16, 16))
        for row, pair in enumerate(series.batch(k)):
            for picture, latents, i in ((x, z, pair[0]), (positive, z_positive, pair[1])):
                assert torch.equal(picture[row], data[i][0])
                assert torch.equal(latents[row], data[i][1])


def test_transforms_and_a_choice_of_factors_apply(fabricated: Path) -> None:
    names = ["object_hue", "object_x", "ground_hue"]
    data = Ident3D(fabricated, transform=lambda p: p.float() / 255, target_transform=lambda u: 2 * u - 1, factors=names)
    loader = data.pairs("normal(scale=0.1)", batch_size=6, factors=["ground_hue", "object_hue"])
    series = PairSampler(data.latents, "normal(scale=0.1)", batch_size=6, factors=[2, 0])
    for k, (x, positive, z, z_positive) in enumerate(deliver(loader, 3)):
        anchors, positives = zip(*series.batch(k), strict=True)
        for picture, latents, chosen in ((x, z, anchors), (positive, z_positive, positives)):
            assert torch.equal(picture, torch.stack([data[i][0] for i in chosen]))
            assert torch.equal(latents, torch.from_numpy(2 * data.latents[list(chosen)] - 1))


class Table(Dataset[tuple[int, Tensor]]):
    """Any object with latents: item i is (i, z)."""

    def __init__(self, latents: Any) -> None:
        self.latents = latents

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.as_tensor(self.latents[index])


def test_arrays_tensors_and_any_object_with_latents_give_the_same_pairs(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    forms = [data.latents, data.latents.astype(np.float64), torch.from_numpy(data.latents), Table(data.latents)]
    forms += [
        Table(torch.from_numpy(data.latents)),
        np.asfortranarray(data.latents),
        np.repeat(data.latents, 2, 0)[::2],
    ]
    expected = [sampler(data).batch(k) for k in range(5)]
    for form in forms:
        assert [sampler(form).batch(k) for k in range(5)] == expected
    tensor = torch.from_numpy(data.latents).requires_grad_()
    assert sampler(tensor).batch(0) == expected[0]


def test_integers_are_latents() -> None:
    pairs = sampler(np.arange(40).reshape(20, 2), Normal(Real(2), 0.01))
    assert all(abs(anchor - positive) == 1 for anchor, positive in pairs.batch(0))


def test_latents_on_a_sphere_are_matched_on_it() -> None:
    points = np.random.default_rng(0).standard_normal((500, 3))
    latents = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    pairs = sampler(latents, Normal(Sphere(3), 0.2))
    anchors, wanted = pairs.draw(0)
    np.testing.assert_allclose(wanted.norm(dim=1), 1, atol=1e-5)
    assert [p for _, p in pairs.batch(0)] == nearest(latents, wanted.numpy(), anchors).tolist()
    both = np.concatenate([latents, uniform(500, 2)], axis=1)
    joint = sampler(both, Joint(Normal(Sphere(3), 0.2), Normal(Box(2), 0.1)))
    anchors, wanted = joint.draw(0)
    assert [p for _, p in joint.batch(0)] == nearest(both, wanted.numpy(), anchors).tolist()


def test_a_loader_over_any_object_serves_its_items() -> None:
    data = Table(uniform(60, 3))
    ((i, j, z, z_positive),) = deliver(pair_loader(data, "normal(scale=0.1)", batch_size=20, seed=1), 1)
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == PairSampler(
        data, "normal(scale=0.1)", batch_size=20, seed=1
    ).batch(0)
    assert torch.equal(z, torch.from_numpy(data.latents[i]))
    assert torch.equal(z_positive, torch.from_numpy(data.latents[j]))


class ByPairs(Dataset[tuple[Tensor, Tensor]]):
    """A user's own dataset, indexed by pairs."""

    def __getitem__(self, pair: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(pair[0]), torch.tensor(pair[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_sampler_serves_a_plain_loader(workers: int) -> None:
    series = sampler(uniform(100, 3), batches=5)
    loader: Any = DataLoader(ByPairs(), batch_sampler=series, num_workers=workers)
    assert len(loader) == 5
    got = [list(zip(a.tolist(), p.tolist(), strict=True)) for epoch in range(2) for a, p in loader]
    other = sampler(uniform(100, 3))
    assert got == [other.batch(k) for k in range(10)]


def test_share_and_change_are_short_for_their_texts(fabricated: Path) -> None:
    data = Ident3D(fabricated)
    forms: list[tuple[dict[str, Any], str]] = [
        ({"share": ["object_hue"]}, "share(object_hue)"),
        ({"share": ["object_hue", "object_x"]}, "share(object_hue, object_x)"),
        ({"share": [7, 0]}, "share(object_hue, object_x)"),
        ({"change": 1}, "change(k=1)"),
        ({"change": 10}, "change(k=10)"),
    ]
    for short, text in forms:
        one, other = data.pairs(batch_size=8, **short), data.pairs(text, batch_size=8)
        assert one.state_dict() == other.state_dict()
        assert one.state_dict()["kind"] == f"{text}, exact of 24 samples"
        assert_same(deliver(one, 3), deliver(other, 3))
    plain = pair_loader(Table(uniform(60, 3)), batch_size=8, share=[2, 0], allow_self=True)
    assert plain.state_dict()["kind"] == "share(2, 0), exact of 60 samples, itself allowed"


def test_share_keeps_and_change_alters_as_many_factors_as_said() -> None:
    latents = uniform(300, 5)
    for law, kept in (("share(1, 4)", 2), ("change(k=2)", 3), ("change(k=5)", 0)):
        anchors, wanted = drawn(sampler(latents, law), 20)
        same = wanted.numpy() == latents[anchors]
        assert (same.sum(axis=1) == kept).all()
    same = drawn(sampler(latents, "share(1, 4)"), 20)[1].numpy() == latents[drawn(sampler(latents), 20)[0]]
    np.testing.assert_array_equal(same.all(axis=0), [False, True, False, False, True])


def test_factors_that_a_scene_holds_do_not_change(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    from ident3d.scenes import scene_text

    spec = tmp_path / "mine.toml"
    spec.write_text(scene_text("3dident").replace("range = [-3.0, 3.0] }", "range = [-3.0, 3.0], frozen = 0.25 }", 1))
    data = Ident3D(make_dataset(tmp_path / "data", {"train": 12}, scene=spec, resolution=8))
    for law in ("normal(scale=0.1)", "uniform()", "share(object_y)"):
        np.testing.assert_array_equal(drawn(sampler(data, law), 10)[1][:, 0], 0.25)
    anchors, wanted = drawn(sampler(data, "change(k=9)"), 10)
    np.testing.assert_array_equal(wanted[:, 0], 0.25)
    assert (wanted.numpy()[:, 1:] != data.latents[anchors][:, 1:]).all()


def flag_worker(worker: int) -> None:
    sys.modules["ident3d_pairs_worker_was_here"] = pytest


def modules(_: Any) -> list[bool]:
    return [name in sys.modules for name in ("ident3d_pairs_worker_was_here", "faiss")]


@pytest.mark.slow
def test_spawned_workers_need_no_index(fabricated: Path) -> None:
    pytest.importorskip("faiss")
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn", "worker_init_fn": flag_worker}
    loader = pair_loader(
        Table(uniform(500, 3)), "normal(scale=0.1)", batch_size=9, match="hnsw", collate_fn=modules, **options
    )
    assert list(zip(range(3), loader, strict=False)) == [(i, [True, False]) for i in range(3)]
    assert "faiss" in sys.modules


def test_options_of_the_loader_pass_through(fabricated: Path) -> None:
    loader = Ident3D(fabricated).pairs(
        "normal(scale=0.1)", batch_size=7, pin_memory=False, num_workers=1, worker_init_fn=flag_worker, collate_fn=len
    )
    assert (loader.num_workers, loader.pin_memory, loader.worker_init_fn) == (1, False, flag_worker)
    assert list(loader) == [7, 7, 7]
    few = Ident3D(fabricated).pairs("uniform()", batch_size=7, batches=2, rank=1, world_size=3)
    assert (len(few), few.stream.rank, few.stream.world_size) == (2, 1, 3)


@pytest.mark.parametrize("match", MATCHES)
def test_what_workers_are_sent_is_small_and_holds_no_index(fabricated: Path, tmp_path: Path, match: str) -> None:
    if match != "exact":
        pytest.importorskip("faiss")
    loader = Ident3D(fabricated).pairs("normal(scale=0.1)", batch_size=7, match=match, cache=tmp_path)
    served = deliver(loader, 2)
    sent = pickle.dumps(loader.dataset)
    assert len(sent) < 12_000
    assert not any(word in sent for word in (b"faiss", b"GridIndex", b"PairSampler", b"_nearest"))
    again = pickle.loads(sent)[loader.stream.batch(0)[0]]
    assert all(torch.equal(one, batch[0]) for one, batch in zip(again, served[0], strict=True))


@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize("duplicate", [lambda s: pickle.loads(pickle.dumps(s)), copy.copy], ids=["pickle", "copy"])
def test_a_sampler_is_copied_without_its_index(match: str, duplicate: Callable[[Any], PairSampler]) -> None:
    pairs = sampler(uniform(500, 3), match=match)
    series = iter(pairs)
    first = [next(series) for _ in range(3)]
    assert not any(word in pickle.dumps(pairs) for word in (b"faiss", b"GridIndex"))
    again = duplicate(pairs)
    assert [again.batch(k) for k in range(3)] == first
    assert next(iter(again)) == next(series)

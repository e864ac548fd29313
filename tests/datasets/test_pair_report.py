"""The pair report: its numbers are those of brute force, and it warns where matching is not what was asked for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial.distance import cdist  # type: ignore[import-untyped]
from scipy.stats import ks_2samp, wasserstein_distance  # type: ignore[import-untyped]

from ident3d import Box, Ident3D, Laplace, PairReport, PairSampler, Uniform, load_scene, pair_report
from ident3d.errors import DatasetError, SpecError
from ident3d.factors import FACTORS
from ident3d.reports import check_report_folder, save_report
from ident3d.schema import from_plain, to_plain

Latents = NDArray[np.float32]

BATCH = 1024  # pairs come in whole batches of so many
OCTAHEDRA = Path(__file__).parents[2] / "docs" / "examples" / "octahedra.toml"


def uniform(samples: int, dim: int) -> Latents:
    return np.random.default_rng(dim).random((samples, dim), dtype=np.float32)


def ratio(report: PairReport) -> float:
    assert report.matching_to_step is not None
    return report.matching_to_step


@pytest.fixture(scope="module")
def crowded() -> PairReport:
    """Small steps among few samples of ten dimensions."""
    return pair_report(uniform(2000, 10), "normal(scale=0.05)", pairs=4 * BATCH)


@pytest.mark.parametrize(("dim", "text"), [(1, "laplace(scale=0.2)"), (1, "uniform()"), (2, "normal(scale=0.3)")])
def test_where_matching_is_exact_in_the_limit_there_is_no_difference(dim: int, text: str) -> None:
    report = pair_report(uniform(40_000, dim), text, pairs=20_000)
    for factor in report.factors:
        assert factor.ks < 0.02
        assert factor.wasserstein < 0.002
        assert factor.realised_std == pytest.approx(factor.requested_std, rel=0.01)
    assert ratio(report) < 0.03
    assert report.needed["1"] < report.needed["0.5"] < report.needed["0.1"] < 40_000
    assert report.recall == 1
    assert report.warnings == ()


def test_small_steps_in_ten_dimensions_are_warned_of(crowded: PairReport) -> None:
    (warning,) = [text for text in crowded.warnings if text.startswith("Matching dominates")]
    assert "the nearest of 2,000 samples" in warning
    assert "that normal(scale=0.05) asks for" in warning
    assert '`ident3d render ... --pairs "normal(scale=0.05)"`' in warning
    assert f"{ratio(crowded):.2g} times the step of {crowded.step.median:.3g}" in warning
    assert ratio(crowded) > 1
    assert crowded.needed["1"] > 2000
    assert all(factor.ks > 0.1 for factor in crowded.factors)
    assert (crowded.samples, crowded.conditional, crowded.match) == (2000, "normal(scale=0.05)", "exact")
    assert crowded.dataset == "ndarray"


def quantiles(values: Any) -> list[float]:
    found: list[float] = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist()
    return found


@pytest.mark.parametrize("allow_self", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"factors": [3, 1]}, {"factors": [0, 2, 3], "weights": [1.0, 4.0, 0.25]}],
    ids=["all", "two", "weighted"],
)
def test_every_number_agrees_with_brute_force(options: dict[str, Any], allow_self: bool) -> None:
    latents, text = uniform(300, 4), "laplace(scale=0.1)"
    report = pair_report(latents, text, pairs=2 * BATCH, seed=5, allow_self=allow_self, **options)
    drawn = [PairSampler(latents, text, batch_size=BATCH, seed=5).draw(k) for k in range(2)]
    anchors = np.concatenate([a.numpy() for a, _ in drawn])
    wanted = np.concatenate([w.numpy() for _, w in drawn]).astype(np.float64)
    z, points = latents[anchors].astype(np.float64), latents.astype(np.float64)
    columns = options.get("factors", [0, 1, 2, 3])
    scale = np.sqrt(options.get("weights", [1.0] * len(columns)))
    distance = cdist(wanted[:, columns] * scale, points[:, columns] * scale)
    everyone = distance.argmin(axis=1)
    if not allow_self:
        distance[np.arange(len(anchors)), anchors] = np.inf
    positives = distance.argmin(axis=1)
    served = points[positives]

    def length(steps: Any) -> Any:
        return np.linalg.norm(steps[:, columns] * scale, axis=1)

    for spread, values in (
        (report.matching, distance.min(axis=1)),
        (report.step, length(wanted - z)),
        (report.realised_step, length(served - z)),
    ):
        np.testing.assert_allclose(list(to_plain(spread).values()), quantiles(values), rtol=1e-4)
    assert report.matching_to_step == pytest.approx(
        np.median(distance.min(axis=1)) / np.median(length(wanted - z)), 1e-4
    )
    assert report.anchor_share == pytest.approx((everyone == anchors).mean(), abs=1e-12)
    for c, factor in enumerate(report.factors):
        asked, got = wanted[:, c] - z[:, c], served[:, c] - z[:, c]
        assert factor.name == str(c)
        assert factor.requested_std == pytest.approx(asked.std())
        assert factor.realised_std == pytest.approx(got.std())
        assert factor.wasserstein == pytest.approx(wasserstein_distance(asked, got))
        assert factor.ks == pytest.approx(ks_2samp(asked, got).statistic)
    times = np.bincount(positives, minlength=300)
    assert report.usage.most == times.max()
    assert report.usage.never == pytest.approx((times == 0).mean())
    assert report.usage.mean == pytest.approx(2 * BATCH / 300)
    last = len(report.usage.counts) - 1
    assert report.usage.counts == tuple(np.bincount(np.minimum(times, last), minlength=last + 1))
    assert report.metric_factors == tuple(map(str, columns))
    assert report.metric_weights == tuple(options.get("weights", [1.0] * len(columns)))


def test_usage_adds_up(crowded: PairReport) -> None:
    usage = crowded.usage
    assert sum(usage.counts) == 2000
    assert usage.counts[0] == pytest.approx(usage.never * 2000)
    assert usage.mean == pytest.approx(crowded.pairs / 2000)
    assert usage.never_if_even == pytest.approx(math.exp(-usage.mean))
    assert sum(k * n for k, n in enumerate(usage.counts)) <= crowded.pairs


def test_samples_that_are_used_unevenly_are_warned_of() -> None:
    # One sample in the middle of the cube's empty half takes half of all z~.
    latents = uniform(3000, 2) * np.array([0.5, 1], np.float32)
    latents[0] = 0.6, 0.5
    report = pair_report(latents, "uniform()", pairs=4 * BATCH)
    (warning,) = [text for text in report.warnings if text.startswith("Samples are used unevenly")]
    assert f"{report.usage.never:.0%} of them are never a positive" in warning
    assert report.usage.most > 500


@pytest.mark.parametrize("match", ["exact", "hnsw", "ivf"])
def test_a_good_index_recalls_what_brute_force_finds(match: str) -> None:
    if match != "exact":
        pytest.importorskip("faiss")
    report = pair_report(uniform(3000, 3), "normal(scale=0.2)", match=match, pairs=2 * BATCH)
    assert report.recall is not None
    assert report.recall >= (1 if match == "exact" else 0.999)
    assert (report.match, report.recall_queries) == (match, 1000)
    assert not any(text.startswith("The index misses") for text in report.warnings)


def test_a_poor_index_is_warned_of() -> None:
    pytest.importorskip("faiss")
    latents, options = uniform(5000, 10), {"ef_search": 1, "neighbours": 2}
    report = pair_report(latents, "normal(scale=0.3)", match="hnsw", match_options=options, pairs=BATCH)
    matches = PairSampler(
        latents, "normal(scale=0.3)", batch_size=BATCH, match="hnsw", match_options=options
    ).match_batches([0])
    distance = cdist(matches.wanted[:1000], latents)
    distance[np.arange(1000), matches.anchors[:1000]] = np.inf
    assert report.recall == (distance.argmin(axis=1) == matches.positives[:1000]).mean()
    assert report.recall is not None
    assert report.recall < 0.5
    (warning,) = [text for text in report.warnings if text.startswith("The index misses")]
    assert warning == (
        f"The index misses: hnsw finds the nearest sample for {report.recall:.2%} of 1,000 z~; use match='exact'."
    )


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_samples_needed_are_those_that_measuring_finds(dim: int) -> None:
    small = {1: 500, 2: 1000, 3: 4000}[dim]
    reports = {
        n: pair_report(uniform(n, dim), "normal(scale=0.02)", pairs=16 * BATCH) for n in (small, 4 * small, 16 * small)
    }
    for n, larger in ((small, 4 * small), (small, 16 * small)):
        predicted = n * (ratio(reports[n]) / ratio(reports[larger])) ** dim
        assert predicted == pytest.approx(larger, rel=0.35)
        for fidelity, needed in reports[n].needed.items():
            assert reports[larger].needed[fidelity] == pytest.approx(needed, rel=0.35)
    for report in reports.values():
        assert list(report.needed) == ["1", "0.5", "0.1"]
        # More than there are just where the fidelity is not reached yet.
        for fidelity, needed in report.needed.items():
            assert needed == pytest.approx(report.samples * (ratio(report) / float(fidelity)) ** dim)
            assert (needed > report.samples) == (ratio(report) > float(fidelity))


def test_a_metric_over_some_factors_serves_these_alone(fabricated: Path) -> None:
    report = pair_report(Ident3D(fabricated), "normal(scale=0.1)", factors=["object_hue", "object_x"], pairs=BATCH)
    assert report.dataset == "3dident, split train"
    assert report.metric_factors == ("object_hue", "object_x")
    assert tuple(factor.name for factor in report.factors) == FACTORS.names
    latents = uniform(20_000, 4)
    some = pair_report(latents, "normal(scale=0.1)", factors=[1, 3], pairs=4 * BATCH)
    matched, others = ([some.factors[c] for c in columns] for columns in ((1, 3), (0, 2)))
    assert max(f.ks for f in matched) < 0.02
    assert min(f.ks for f in others) > 0.2  # as far from z as any two samples are
    for factor in others:
        assert factor.realised_std == pytest.approx(math.sqrt(1 / 6), rel=0.03)


def test_a_distribution_will_do_for_a_text() -> None:
    latents = uniform(500, 3)
    by_text = pair_report(latents, "laplace(scale=0.1)", pairs=BATCH)
    assert pair_report(latents, Laplace(Box(3), 0.1), pairs=BATCH) == by_text
    assert pair_report(torch.from_numpy(latents), "laplace( 0.1 )", pairs=BATCH).factors == by_text.factors
    raw = pair_report(2 * latents - 1, Uniform(Box(3, -1, 1)), pairs=BATCH)
    assert raw.conditional == "uniform()"
    assert raw.step.median == pytest.approx(2 * pair_report(latents, "uniform()", pairs=BATCH).step.median, rel=0.05)


def test_a_report_is_the_same_every_time_and_touches_no_global_generator() -> None:
    latents = uniform(500, 3)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]  # noqa: NPY002
    first = pair_report(latents, "change(k=1)", pairs=2 * BATCH, seed=4)
    assert before == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]  # noqa: NPY002
    torch.manual_seed(99)
    assert pair_report(latents, "change(k=1)", pairs=2 * BATCH, seed=4) == first
    assert pair_report(latents, "change(k=1)", pairs=2 * BATCH, seed=5).factors != first.factors


def test_histograms_are_densities_of_what_they_show(crowded: PairReport) -> None:
    for histogram in (*(f.histogram for f in crowded.factors), crowded.distances):
        width = histogram.edges[1] - histogram.edges[0]
        assert len(histogram.edges) == len(histogram.requested) + 1 == len(histogram.realised) + 1
        assert all(b - a == pytest.approx(width) for a, b in pairwise(histogram.edges))
        for density in (histogram.requested, histogram.realised):
            assert 0.99 < sum(density) * width < 1 + 1e-9
    assert crowded.distances.edges[0] == 0


def test_a_report_survives_json(crowded: PairReport) -> None:
    rendered = from_plain(PairReport, {**to_plain(crowded), "recall": None, "needed": {}})
    for report in (crowded, rendered):
        assert from_plain(PairReport, json.loads(json.dumps(to_plain(report)))) == report


Make = Callable[..., Path]


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory, make_dataset: Make) -> Callable[..., Ident3D]:
    """Made-up datasets of 2,000 pairs, each once."""
    made: dict[tuple[str, ...], Ident3D] = {}

    def get(pairs: str, scene: str | Path = "3dident") -> Ident3D:
        key = (pairs, str(scene))
        if key not in made:
            root = tmp_path_factory.mktemp("paired") / "data"
            make_dataset(root, {"train": 2000}, 1000, 8, scene=scene, pairs=pairs)
            made[key] = Ident3D(root)
        return made[key]

    return get


@pytest.mark.parametrize("text", ["laplace(scale=0.05)", "share(object_hue, object_x)", "change(k=2)"])
def test_rendered_pairs_follow_their_conditional_and_nothing_is_matched(
    paired: Callable[..., Ident3D], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("matched")

    monkeypatch.setattr("ident3d.datasets.pairs.make_index", never)
    data = paired(text)
    report = pair_report(data, pairs=10_000)
    assert (report.conditional, report.match, report.samples, report.pairs) == (text, "rendered", 2000, 10_000)
    assert (report.recall, report.recall_queries, report.needed) == (None, 0, {})
    assert report.anchor_share == report.matching_to_step == report.matching.q95 == 0
    assert report.warnings == ()
    for factor in report.factors:
        assert factor.ks < 0.06  # 2,000 z~ against 10,000 fresh ones
        assert factor.realised_std == pytest.approx(factor.requested_std, rel=0.15)
    assert data.pair_latents is not None
    lengths = np.linalg.norm(data.pair_latents - data.latents, axis=1)
    np.testing.assert_allclose(report.realised_step.median, np.median(lengths), rtol=0.05)
    assert sum(report.usage.counts) == 2000
    assert sum(k * n for k, n in enumerate(report.usage.counts)) == 10_000
    assert pair_report(data, pairs=10_000) == report


def test_shared_factors_do_not_move_at_all(paired: Callable[..., Ident3D]) -> None:
    data = paired("share(object_hue, object_x)")
    for report in (
        pair_report(data, pairs=1000),
        pair_report(data, data.entry.pairs, factors=["object_y"], pairs=1000),
    ):
        for factor in report.factors:
            shared = factor.name in ("object_hue", "object_x")
            assert (factor.requested_std == 0) == shared
            if report.match == "rendered":
                assert (factor.realised_std == 0) == shared


@pytest.mark.parametrize("conditional", [None, "normal(scale=0.1)"])
def test_what_a_scene_holds_is_never_asked_to_move(paired: Callable[..., Ident3D], conditional: str | None) -> None:
    report = pair_report(paired("laplace(scale=0.1)", OCTAHEDRA), conditional, pairs=1000)
    held = [
        name
        for name, factor in zip(FACTORS.names, load_scene(OCTAHEDRA).spec.factor_table, strict=True)
        if factor.frozen
    ]
    assert held == ["object_alpha", "object_beta"]
    for factor in report.factors:
        assert (factor.requested_std == 0) == (factor.realised_std == 0) == (factor.name in held)


@pytest.mark.render
def test_a_really_rendered_dataset_has_a_report(rendered_pairs: Path) -> None:
    report = pair_report(Ident3D(rendered_pairs), pairs=5000)
    assert (report.dataset, report.samples, report.match) == ("3dident, split train", 8, "rendered")
    data = Ident3D(rendered_pairs)
    assert data.pair_latents is not None
    np.testing.assert_allclose(
        [f.realised_std for f in report.factors], (data.pair_latents - data.latents).std(axis=0), rtol=0.1
    )


@pytest.mark.parametrize("pairs", [0, -5, 999, 10**7 + 1, True])
def test_too_few_or_too_many_pairs_are_refused(pairs: Any) -> None:
    expected = "at most 10,000,000" if pairs > 10**7 else "a whole number of at least 1000"
    with pytest.raises(SpecError, match=re.escape(f"pairs = {pairs!r}: expected {expected}")):
        pair_report(uniform(10, 2), "uniform()", pairs=pairs)


def test_no_conditional_is_refused_where_no_pairs_were_rendered(fabricated: Path) -> None:
    for data in (Ident3D(fabricated), uniform(10, 2)):
        with pytest.raises(SpecError, match="conditional: missing; this dataset holds no rendered pairs"):
            pair_report(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conditional": "foo(1)"}, "unknown law 'foo'"),
        ({"match": "best"}, "match='best': expected one of exact, hnsw, ivf"),
        ({"factors": [2]}, "factors=[2]: expected different numbers from 0 to 1"),
        ({"weights": [1.0]}, "weights has 1 values; expected"),
        ({"seed": -1}, "seed = -1: expected a whole number of at least 0"),
        ({"match_options": {"depth": 3}}, "match_options: 'exact' has no 'depth'"),
    ],
)
def test_what_the_sampler_refuses_is_refused(options: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"conditional": "uniform()", "pairs": 1000}
    with pytest.raises(SpecError, match=re.escape(message)):
        pair_report(uniform(10, 2), **asked | options)


def test_a_report_is_saved_for_programs_and_for_people(tmp_path: Path, crowded: PairReport) -> None:
    folder = tmp_path / "new" / "report"
    check_report_folder(folder)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):  # the second takes the place of the first
        save_report(crowded, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["report.json", "report.png"]
    assert from_plain(PairReport, json.loads((folder / "report.json").read_text())) == crowded
    with Image.open(folder / "report.png") as picture:
        assert 1000 < picture.width < 4000
        assert 600 < picture.height < 4000
        pixels = np.asarray(picture.convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    assert 0.02 < (pixels < 250).any(axis=2).mean() < 0.6


@pytest.mark.parametrize("name", ["file", "file/below", "file/below/deeper"])
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, crowded: PairReport, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    for write in (check_report_folder, lambda folder: save_report(crowded, folder)):
        with pytest.raises(DatasetError, match="the report cannot be written there"):
            write(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_choice_of_factors_is_compared_with_the_conditional_over_all(tmp_path: Path, make_dataset: Any) -> None:
    root = make_dataset(tmp_path / "d", {"train": 1500}, shard_size=500, resolution=8, pairs="change(k=1)")
    report = pair_report(Ident3D(root, factors=["object_hue", "object_x"]), pairs=5000)
    assert [f.name for f in report.factors] == ["object_hue", "object_x"]
    for factor in report.factors:
        assert factor.ks < 0.05
        assert factor.realised_std == pytest.approx(factor.requested_std, rel=0.15)


@pytest.mark.parametrize("options", [{"match": "hnsw"}, {"factors": ["object_x"]}, {"weights": [1.0]}, {"cache": "c"}])
def test_options_of_matching_are_refused_without_a_conditional(fabricated_pairs: Path, options: Any) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(options))}: for matched pairs, but no conditional is given"):
        pair_report(Ident3D(fabricated_pairs), **options)


def test_a_step_of_nothing_has_no_ratio() -> None:
    report = pair_report(uniform(2000, 3), "share(0)", factors=[0], pairs=1000)
    assert report.matching_to_step is None
    assert report.needed == {}
    json.loads(json.dumps(to_plain(report), allow_nan=False))

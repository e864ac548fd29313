"""Matching: the metric that users name, and the indices that look for its nearest sample."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ident3d.datasets import matching
from ident3d.datasets.matching import MATCHES, Metric, make_index
from ident3d.errors import SpecError
from ident3d.factors import FACTORS

faiss: Any = pytest.importorskip("faiss")

Latents = NDArray[np.float32]
APPROXIMATE = ["hnsw", "ivf"]


def uniform(n: int, dim: int, seed: int = 0) -> Latents:
    return np.random.default_rng([n, dim, seed]).random((n, dim), np.float32)


def plain(dim: int) -> Metric:
    return Metric.of(dim, None, None, None)


def distances(latents: Latents, queries: Latents, columns: list[int], weights: list[float]) -> NDArray[np.float64]:
    """Squared, of each query to each sample, by definition."""
    gaps = queries[:, None, columns].astype(np.float64) - latents[None, :, columns]
    found: NDArray[np.float64] = (gaps**2 * np.array(weights)).sum(-1)
    return found


@pytest.fixture
def _threads() -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    yield
    faiss.omp_set_num_threads(before)


CHOICES: list[tuple[Any, Any, list[int], list[float]]] = [
    (None, None, list(range(10)), [1.0] * 10),
    (["object_hue", "object_x"], None, [7, 0], [1.0, 1.0]),
    ([7, "object_x", 9], [4.0, 0.25, 1.0], [7, 0, 9], [4.0, 0.25, 1.0]),
    (None, {"object_hue": 16.0, "object_y": 0.0625}, list(range(10)), [1, 0.0625, 1, 1, 1, 1, 1, 16, 1, 1]),
    (("ground_hue", "object_z"), {"object_z": 0.25}, [9, 2], [1.0, 0.25]),
    ([3], {"object_alpha": 100.0}, [3], [100.0]),
    ((5, "object_y"), (1e3, 1e-3), [5, 1], [1e3, 1e-3]),
]


@pytest.mark.parametrize(("factors", "weights", "columns", "values"), CHOICES)
def test_names_and_numbers_choose_columns_and_weights(
    factors: Any, weights: Any, columns: list[int], values: list[float]
) -> None:
    metric = Metric.of(10, FACTORS, factors, weights)
    assert metric.columns == tuple(columns)
    assert metric.weights == tuple(values)
    assert all(type(v) is float for v in metric.weights)


@pytest.mark.parametrize(("factors", "weights", "columns", "values"), CHOICES)
def test_the_exact_match_is_the_nearest_in_that_metric(
    factors: Any, weights: Any, columns: list[int], values: list[float]
) -> None:
    latents, queries = uniform(1500, 10), uniform(100, 10, seed=1)
    metric = Metric.of(10, FACTORS, factors, weights)
    expected = distances(latents, queries, columns, values)
    square, found = make_index(latents, metric, "exact")(metric.coordinates(queries), None)
    least = expected.min(axis=1)
    # Coordinates are scaled and then rounded to float32: the distances of two samples are told apart to within that.
    rounding = 2.0**-22 * np.sqrt(sum(values))
    np.testing.assert_allclose(np.sqrt(expected[np.arange(100), found]), np.sqrt(least), rtol=1e-9, atol=rounding)
    np.testing.assert_allclose(np.sqrt(square), np.sqrt(least), rtol=1e-6, atol=rounding)
    assert (found == expected.argmin(axis=1)).mean() >= 0.98


def test_factors_and_weights_matter() -> None:
    latents = np.array([[0, 0.9], [0.3, 0]], np.float32)
    query = np.zeros((1, 2), np.float32)

    def found(factors: Any, weights: Any) -> int:
        metric = Metric.of(2, None, factors, weights)
        return int(make_index(latents, metric, "exact")(metric.coordinates(query), None)[1][0])

    assert found(None, None) == 1
    assert found([0], None) == 0
    assert found([1], None) == 1
    assert found(None, [100.0, 1.0]) == 0
    assert found([1, 0], [0.01, 1.0]) == 0
    assert found([1, 0], [1.0, 0.01]) == 1


@pytest.mark.parametrize(
    ("factors", "weights", "message"),
    [
        ([], None, "factors is empty"),
        (["colour"], None, "unknown factor 'colour'; expected one of object_x"),
        ("object_x", None, "factors='object_x': expected a list of names"),
        ([0, 10], None, r"factors=\[0, 10\]: expected different numbers from 0 to 9"),
        ([-1], None, r"factors=\[-1\]: expected different numbers from 0 to 9"),
        ([True], None, "factors.*True"),
        ([0, 0], None, r"factors=\[0, 0\]: expected different numbers"),
        ([0, "object_x"], None, r"factors=\[0, 0\]: expected different numbers"),
        (None, [1.0] * 9, "weights has 9 values; expected one, or 10"),
        ([1, 2], [1.0], "weights has 1 values; expected one, or 2"),
        ([1, 2], [1.0, 0.0], r"weights=\[1.0, 0.0\]: expected 1e-9 to 1e9; to ignore a factor, leave it out"),
        ([1, 2], [-1.0, 1.0], r"weights=\[-1.0, 1.0\]: expected 1e-9 to 1e9"),
        ([1, 2], [1.0, float("nan")], r"weights = \[1.0, nan\]: expected finite"),
        ([1, 2], [float("inf"), 1.0], r"weights = \[inf, 1.0\]: expected finite"),
        (None, {"object_x": 0.0}, "expected 1e-9 to 1e9"),
        (None, {"colour": 2.0}, "unknown factor 'colour'"),
        (["object_y"], {"object_x": 2.0}, r"weights=\{'object_x': 2.0\}: column 0 is not among the factors"),
    ],
)
def test_a_metric_that_cannot_be_is_refused(factors: Any, weights: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Metric.of(10, FACTORS, factors, weights)


def test_an_arrays_columns_have_no_names() -> None:
    choices: list[tuple[Any, Any]] = [(["object_x"], None), (None, {"object_x": 2.0})]
    for factors, weights in choices:
        with pytest.raises(SpecError, match="'object_x' given for an array, whose columns have no names"):
            Metric.of(10, None, factors, weights)


@pytest.mark.slow
@pytest.mark.parametrize("match", APPROXIMATE)
def test_approximate_indices_find_the_nearest_of_20000_but_rarely(match: str) -> None:
    latents = uniform(20_000, 10)
    rng = np.random.default_rng(0)
    anchors = rng.integers(0, 20_000, 3000)
    queries = np.clip(latents[anchors] + rng.normal(0, 0.05, (3000, 10)), 0, 1).astype(np.float32)
    square, found = make_index(latents, plain(10), "exact")(queries, anchors)
    near, approximate = make_index(latents, plain(10), match)(queries, anchors)
    same = approximate == found
    assert same.mean() >= 0.99
    np.testing.assert_allclose(near[same], square[same], rtol=1e-4)
    assert (near >= square * (1 - 1e-4)).all()
    assert (approximate != anchors).all()


@pytest.mark.parametrize("match", MATCHES)
def test_distances_are_those_of_the_samples_found(match: str) -> None:
    latents, queries = uniform(500, 4), uniform(50, 4, seed=1)
    metric = Metric.of(4, None, [3, 1], [4.0, 0.25])
    square, found = make_index(latents, metric, match)(metric.coordinates(queries), None)
    expected = distances(latents, queries, [3, 1], [4.0, 0.25])[np.arange(50), found]
    np.testing.assert_allclose(square, expected, rtol=1e-4, atol=1e-9)
    assert [str(a.dtype) for a in (square, found)] == ["float64", "int64"]


@pytest.mark.parametrize("match", MATCHES)
def test_a_sample_is_its_own_nearest_unless_it_is_excluded(match: str) -> None:
    latents, everyone = uniform(400, 5), np.arange(400)
    index = make_index(latents, plain(5), match)
    square, found = index(latents, None)
    np.testing.assert_array_equal(found, everyone)
    np.testing.assert_array_equal(square, 0)
    square, found = index(latents, everyone)
    assert (found != everyone).all()
    assert (square > 0).all()


def faiss_index(match: str, options: dict[str, int], n: int = 4000) -> Any:
    search: Any = make_index(uniform(n, 6), plain(6), match, options)
    return search.index


def test_options_of_hnsw_are_where_faiss_reads_them() -> None:
    index = faiss_index("hnsw", {"neighbours": 12, "ef_construction": 33, "ef_search": 37})
    assert (index.hnsw.efConstruction, index.hnsw.efSearch) == (33, 37)
    assert (index.hnsw.nb_neighbors(0), index.hnsw.nb_neighbors(1)) == (24, 12)
    default = faiss_index("hnsw", {})
    assert (default.hnsw.efConstruction, default.hnsw.efSearch, default.hnsw.nb_neighbors(1)) == (40, 64, 16)


def test_options_of_ivf_are_where_faiss_reads_them() -> None:
    index = faiss_index("ivf", {"lists": 50, "probes": 9, "neighbours": 11})
    quantiser = faiss.downcast_index(index.quantizer)
    assert (index.nlist, index.nprobe) == (50, 9)
    assert (quantiser.hnsw.efSearch, quantiser.hnsw.nb_neighbors(1)) == (18, 11)
    default = faiss_index("ivf", {})
    quantiser = faiss.downcast_index(default.quantizer)
    assert (default.nlist, default.nprobe) == (4000 // 39, 64)
    assert (quantiser.hnsw.efSearch, quantiser.hnsw.nb_neighbors(1)) == (128, 32)


@pytest.mark.parametrize(
    ("match", "least"), [("hnsw", {"ef_search": 1}), ("ivf", {"probes": 1})], ids=["ef_search", "probes"]
)
def test_options_of_the_search_have_an_effect(match: str, least: dict[str, int]) -> None:
    latents, queries = uniform(4000, 8), uniform(500, 8, seed=1)
    _, expected = make_index(latents, plain(8), "exact")(queries, None)
    wanting, complete = (
        (make_index(latents, plain(8), match, options)(queries, None)[1] == expected).mean() for options in (least, {})
    )
    assert wanting < 0.95 < 0.99 <= complete


@pytest.mark.parametrize("match", APPROXIMATE)
@pytest.mark.usefixtures("_threads")
def test_building_twice_gives_the_same_index_whatever_the_threads(match: str) -> None:
    latents, queries = uniform(3000, 8), uniform(300, 8, seed=1)
    built = []
    for threads in (1, 2, 2):
        faiss.omp_set_num_threads(threads)
        search: Any = make_index(latents, plain(8), match)
        built.append((faiss.serialize_index(search.index).tobytes(), *(a.tobytes() for a in search(queries, None))))
    assert built[0] == built[1] == built[2]


@pytest.mark.parametrize("match", APPROXIMATE)
@pytest.mark.usefixtures("_threads")
def test_faiss_has_its_threads_back_after_a_build(match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faiss.omp_set_num_threads(2)
    seen = []
    make = getattr(matching, f"_make_{match}")

    def watched(*args: Any) -> Any:
        seen.append(faiss.omp_get_max_threads())
        return make(*args)

    monkeypatch.setattr(matching, f"_make_{match}", watched)
    make_index(uniform(500, 3), plain(3), match)
    assert seen == [1]
    assert faiss.omp_get_max_threads() == 2

    def failing(*_: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(matching, f"_make_{match}", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        make_index(uniform(500, 3), plain(3), match)
    assert faiss.omp_get_max_threads() == 2


@pytest.mark.parametrize(
    ("match", "options", "message"),
    [
        ("annoy", None, "match='annoy': expected one of exact, hnsw, ivf"),
        ("", None, "match='': expected one of"),
        ("exact", {"probes": 3}, "match_options: 'exact' has no 'probes'; it has none"),
        ("hnsw", {"probes": 3}, "'hnsw' has no 'probes'; it has neighbours, ef_construction, ef_search"),
        ("ivf", {"ef_search": 3}, "'ivf' has no 'ef_search'; it has lists, probes, neighbours"),
        ("hnsw", {"ef_search": 0}, "ef_search = 0, expected a whole number of at least 1"),
        ("ivf", {"lists": -4}, "lists = -4, expected a whole number of at least 1"),
        ("ivf", {"probes": True}, "probes = True, expected a whole number"),
    ],
)
def test_an_unknown_match_or_option_is_refused(match: str, options: dict[str, int] | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_index(uniform(10, 2), plain(2), match, options)


def test_without_faiss_the_approximate_indices_name_the_extra_and_the_exact_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    latents = uniform(100, 3)
    for match in APPROXIMATE:
        with pytest.raises(SpecError, match=re.escape("pip install 'ident3d[faiss]', or use match='exact'")):
            make_index(latents, plain(3), match)
    np.testing.assert_array_equal(make_index(latents, plain(3), "exact")(latents, None)[1], np.arange(100))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("match", MATCHES)
def test_of_two_or_three_samples_each_is_matched_to_another(match: str, n: int) -> None:
    latents = uniform(n, 2)
    anchors = np.repeat(np.arange(n), 10)
    queries = uniform(10 * n, 2, seed=1)
    expected = distances(latents, queries, [0, 1], [1, 1])
    expected[np.arange(10 * n), anchors] = np.inf
    square, found = make_index(latents, plain(2), match)(queries, anchors)
    np.testing.assert_array_equal(found, expected.argmin(axis=1))
    np.testing.assert_allclose(square, expected.min(axis=1), rtol=1e-4)


@pytest.mark.parametrize("match", MATCHES)
def test_among_equal_samples_each_is_matched_to_another(match: str) -> None:
    latents, everyone = np.full((300, 3), 0.5, np.float32), np.arange(300)
    square, found = make_index(latents, plain(3), match, {} if match == "exact" else {"neighbours": 2})(
        latents, everyone
    )
    assert (found != everyone).all()
    assert ((found >= 0) & (found < 300)).all()
    np.testing.assert_array_equal(square, 0)


def test_where_an_index_finds_the_anchor_alone_the_search_is_exact() -> None:
    """Each of the four samples far away has a list of its own, and one list is looked at."""
    latents = uniform(400, 2)
    latents[:4] = 100 * np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    search: Any = make_index(latents, plain(2), "ivf", {"lists": 5, "probes": 1})
    queries, anchors = latents[:4] * np.float32(0.9), np.arange(4)
    _, raw = search.index.search(queries, 2)
    lonely = raw[:, 1] < 0
    assert lonely.any()
    expected = distances(latents, queries, [0, 1], [1, 1])
    expected[anchors, anchors] = np.inf
    square, found = search(queries, anchors)
    np.testing.assert_array_equal(found[lonely], expected.argmin(axis=1)[lonely])
    np.testing.assert_allclose(square[lonely], expected.min(axis=1)[lonely], rtol=1e-4)
    assert ((found >= 0) & (found != anchors)).all()

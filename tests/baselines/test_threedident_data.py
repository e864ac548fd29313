"""The data of 3DIdent experiments: opened wherever they lie, refused before decoding, told apart by their facts."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from file_server import FileServer
from hub_server import Repository, contents, logged_in

from ident3d import Ident3D
from ident3d.baselines.threedident_data import Splits, open_split, open_splits
from ident3d.baselines.threedident_settings import ThreeDIdentSettings, preset_settings
from ident3d.errors import DatasetError, SpecError
from ident3d.factors import FACTORS
from ident3d.scenes import scene_text

ROOT = Path(__file__).resolve().parents[2]
MAKE = runpy.run_path(str(ROOT / "tests" / "data" / "make_published.py"))
MULTIMODAL = (
    *("object_alpha", "object_beta", "object_gamma", "object_hue"),
    *("spotlight_theta", "spotlight_hue", "ground_hue"),
)
LAYOUTS = {
    "threedident": ("3DIdent", 20, FACTORS.names),
    "causal3dident": ("Causal3DIdent", 15, FACTORS.names),
    "multimodal3dident": ("Multimodal3DIdent", 20, MULTIMODAL),
    "temporal": ("Temporal Causal3DIdent", 20, FACTORS.names),
}
Maker = Callable[..., Path]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of its own."""
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("IDENT3D_OFFLINE", raising=False)


@pytest.fixture
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture may be decoded."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a picture was decoded")

    monkeypatch.setattr("ident3d.datasets.pictures.decode", refuse)


def some(**changes: Any) -> ThreeDIdentSettings:
    return dataclasses.replace(preset_settings("quick"), **{"batch": 6, **changes})


def same(one: Any, other: Any) -> bool:
    """Whether samples are the same, pictures and latents."""
    assert len(one) == len(other) > 0
    return all(
        torch.equal(one[i][0], other[i][0]) and torch.equal(one[i][-1], other[i][-1]) for i in range(0, len(one), 7)
    )


def own_scene(folder: Path, frozen: bool = True) -> Path:
    """3dident under another name, object_x held or not."""
    text = scene_text("3dident").replace('name = "3dident"', 'name = "mine"')
    if frozen:
        text = text.replace("range = [-3.0, 3.0] }", "range = [-3.0, 3.0], frozen = 0.25 }", 1)
    folder.mkdir(exist_ok=True)
    (folder / "mine.toml").write_text(text)
    return folder / "mine.toml"


def drawn(n: int, seed: int = 0, held: Mapping[str, float] | None = None) -> Any:
    """Latents; of some factors, all the same."""
    latents = np.random.default_rng(seed).random((n, 10), np.float32)
    for name, value in (held or {}).items():
        latents[:, FACTORS.names.index(name)] = value
    return latents


# Opening


@pytest.mark.parametrize("split", ["train", "test"])
def test_shards_are_opened(fabricated: Path, split: str) -> None:
    for root in (fabricated, str(fabricated)):
        found = open_split(root, split)
        assert isinstance(found, Ident3D)
        assert found.split == split
        assert found.columns.names == FACTORS.names
        assert same(found, Ident3D(fabricated, split))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_published_layout_is_opened(tmp_path: Path, layout: str) -> None:
    name, samples, factors = LAYOUTS[layout]
    splits = open_splits(MAKE[f"make_{layout}"](tmp_path / "made"), some())
    assert (splits.train.name, len(splits.train), splits.names) == (name, samples, factors)
    assert (splits.train.split, splits.test.split) == ("train", "test")
    assert splits.train.latents.shape == (samples, len(factors))
    assert same(splits.train, open_split(tmp_path / "made", "train"))


def test_a_url_is_opened(fabricated: Path) -> None:
    with FileServer(fabricated.parent).running() as server:
        splits = open_splits(f"{server.url}/{fabricated.name}", some())
        assert same(splits.train, Ident3D(fabricated))
        assert same(splits.test, Ident3D(fabricated, "test"))
    assert splits.facts() == open_splits(fabricated, some()).facts()


def test_a_repository_of_the_hub_is_opened(fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with logged_in(monkeypatch) as hub:
        hub.repos["ada/teapots"] = Repository()
        hub.repos["ada/teapots"].commit("main", contents(fabricated), "data")
        assert same(open_split("hf://datasets/ada/teapots", "test"), Ident3D(fabricated, "test"))


def test_factors_are_those_that_are_chosen_in_their_order(fabricated: Path) -> None:
    names = ("ground_hue", "object_x")
    splits = open_splits(fabricated, some(factors=names))
    assert splits.names == names
    for part, split in ((splits.train, "train"), (splits.test, "test")):
        np.testing.assert_array_equal(part.latents, Ident3D(fabricated, split).latents[:, [9, 0]])


def test_factors_that_a_scene_holds_are_left_out(tmp_path: Path, make_dataset: Maker) -> None:
    root = make_dataset(tmp_path / "data", {"train": 12, "test": 6}, scene=own_scene(tmp_path), resolution=8)
    assert open_splits(root, some()).names == FACTORS.names[1:]
    assert open_split(root, "test", ["object_y", "object_x"]).columns.names == ("object_y", "object_x")
    with pytest.raises(SpecError, match="object_x does not vary"):
        open_splits(root, some(factors=("object_x", "object_y")))


def test_the_test_split_may_lie_elsewhere(tmp_path: Path, fabricated: Path, make_dataset: Maker) -> None:
    train, test = make_dataset(tmp_path / "a", {"train": 12}, seed=8), make_dataset(tmp_path / "b", {"test": 4}, seed=9)
    splits = open_splits(train, some(), test_data=test)
    assert (splits.train.root, splits.test.root) == (train, test)
    splits = open_splits(train, some(factors=("object_x",)), test_data=fabricated)
    assert splits.test.latents.shape == (6, 1)


def test_damaged_pictures_are_skipped_where_that_is_asked_for(damaged: Path) -> None:
    (damaged / "train" / "train-000001.tar").unlink()
    splits = open_splits(damaged, some(), on_error="skip")
    assert splits.train.on_error == splits.test.on_error == "skip"
    assert open_splits(damaged, some()).train.on_error == "raise"


# What is refused, before anything is decoded


@pytest.mark.usefixtures("undecoded")
def test_the_fixture_tells_when_a_picture_is_decoded(fabricated: Path) -> None:
    with pytest.raises(AssertionError, match="a picture was decoded"):
        open_splits(fabricated, some()).train[0]


@pytest.mark.usefixtures("undecoded")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factors": ("object_x", "banana")}, "banana"),
        ({"factors": ("object_x", "object_x")}, "object_x"),
        ({"factors": ()}, "factors"),
        ({"batch": 25}, "batch = 25, but .*data has 24 training pictures; take a smaller batch"),
        ({"batch": 1_000, "mode": "supervised"}, "batch = 1,000, but .*data has 24 training pictures"),
        ({"pairs": "exact"}, r"pairs = exact, but .* --pairs 'normal\(0\.05\)'`\), or choose pairs = matched"),
        ({"conditional": "banana(3)"}, "banana"),
        ({"conditional": "vmf(1)"}, "vmf"),
        ({"conditional": "share(object_hat)"}, "object_hat"),
    ],
    ids=str,
)
def test_settings_that_the_data_do_not_admit_are_refused(fabricated: Path, changes: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        open_splits(fabricated, some(**changes))


@pytest.mark.usefixtures("undecoded")
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_factor_that_does_not_vary_is_refused(tmp_path: Path, make_dataset: Maker, split: str) -> None:
    root = tmp_path / "data"
    for part, n in (("train", 12), ("test", 6)):
        held = {"object_hue": 0.5, "object_z": 0.0} if part == split else {}
        make_dataset(root, {part: n}, latents=drawn(n, held=held))
    words = f"data, split {split}: object_z, object_hue does not vary, .* leave it out of factors"
    with pytest.raises(SpecError, match=words):
        open_splits(root, some())
    assert open_splits(root, some(factors=("object_x", "ground_hue"))).names == ("object_x", "ground_hue")


@pytest.mark.usefixtures("undecoded")
def test_splits_of_unequal_size_are_refused(tmp_path: Path, fabricated: Path, make_dataset: Maker) -> None:
    small = make_dataset(tmp_path / "small", {"test": 4}, resolution=8)
    with pytest.raises(SpecError, match="small: test pictures of 8 px, training pictures of 16 px; expected the same"):
        open_splits(fabricated, some(), test_data=small)


@pytest.mark.usefixtures("undecoded")
def test_splits_of_other_factors_are_refused(tmp_path: Path, fabricated: Path) -> None:
    other = MAKE["make_multimodal3dident"](tmp_path)
    with pytest.raises(SpecError, match="object_x"):
        open_splits(fabricated, some(), test_data=other)


@pytest.mark.usefixtures("undecoded")
def test_splits_and_folders_that_are_absent_are_told(tmp_path: Path, make_dataset: Maker) -> None:
    root = make_dataset(tmp_path / "data", {"train": 12})
    with pytest.raises(DatasetError, match="data: no split 'test'; it has train"):
        open_splits(root, some())
    with pytest.raises(DatasetError, match="nothing: no such folder"):
        open_splits(tmp_path / "nothing", some())
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="empty: none of the published layouts"):
        open_splits(root, some(), test_data=tmp_path / "empty")


@pytest.mark.usefixtures("undecoded")
def test_what_a_mode_does_not_need_is_not_asked_for(fabricated: Path) -> None:
    assert open_splits(fabricated, some(mode="identity", batch=512, pairs="exact")).names == FACTORS.names
    assert open_splits(fabricated, some(mode="supervised", batch=24, pairs="exact")).names == FACTORS.names


@pytest.mark.usefixtures("undecoded")
def test_pairs_that_are_there_are_taken(fabricated_pairs: Path, tmp_path: Path) -> None:
    for law in ("laplace(0.05)", "laplace(scale=0.05)"):
        assert open_splits(fabricated_pairs, some(pairs="exact", conditional=law)).train.has_pairs
    for law in ("normal(0.05)", "laplace(0.1)"):
        with pytest.raises(SpecError, match=r"were rendered with laplace\(scale=0.05\): ask for that"):
            open_splits(fabricated_pairs, some(pairs="exact", conditional=law))
    frames = MAKE["make_temporal"](tmp_path)
    assert open_splits(frames, some(pairs="exact")).train.consecutive


# Facts


def facts_of(root: str | Path, **of: Any) -> dict[str, Any]:
    facts = open_splits(root, some(), **of).facts()
    assert json.loads(json.dumps(facts)) == facts
    return facts


def test_facts_are_those_of_the_data(fabricated: Path) -> None:
    facts = open_splits(fabricated, some(factors=("object_y", "object_x"))).facts()
    assert facts.pop("latents") != facts.pop("test_latents")
    plain = {"name": "3dident", "factors": ["object_y", "object_x"], "scene": "3dident"}
    assert {key: facts[key] for key in plain} == plain
    assert (facts["resolution"], facts["samples"], facts["test_samples"]) == (16, 24, 6)


@pytest.mark.parametrize("layout", ["shards", *LAYOUTS])
def test_equal_data_have_equal_facts_wherever_they_lie(tmp_path: Path, make_dataset: Maker, layout: str) -> None:
    make = make_dataset if layout == "shards" else MAKE[f"make_{layout}"]
    one, other = make(tmp_path / "one"), make(tmp_path / "another" / "place")
    assert facts_of(one) == facts_of(other)
    moved = shutil.copytree(one, tmp_path / "moved")
    assert facts_of(moved) == facts_of(one)
    assert facts_of(one, test_data=other) == facts_of(one)


def test_a_scene_of_ones_own_is_the_same_behind_a_url(tmp_path: Path, make_dataset: Maker) -> None:
    root = make_dataset(tmp_path / "data", scene=own_scene(tmp_path))
    with FileServer(root).running() as server:
        assert facts_of(server.url) == facts_of(root)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"resolution": 8},
        {"samples": {"train": 25, "test": 6}},
        {"samples": {"train": 24, "test": 7}},
        {"latents": "others"},
        {"scene": "own"},
        {"scene": "3dident-v1"},
    ],
    ids=str,
)
def test_other_data_have_other_facts(
    tmp_path: Path, fabricated: Path, make_dataset: Maker, changes: dict[str, Any]
) -> None:
    given = dict(changes)
    if given.get("scene") == "own":
        given["scene"] = own_scene(tmp_path, frozen=False)
    if "latents" in given:
        for split, n in (("train", 24), ("test", 6)):  # as many as in `fabricated`, the same for the same split
            make_dataset(tmp_path / "other", {split: n}, latents=drawn(n, seed=n))
    else:
        make_dataset(tmp_path / "other", **given)
    assert facts_of(tmp_path / "other") != facts_of(fabricated)


def test_other_test_data_have_other_facts(tmp_path: Path, fabricated: Path, make_dataset: Maker) -> None:
    test = make_dataset(tmp_path / "test", {"test": 6}, seed=4)
    facts, other = facts_of(fabricated), facts_of(fabricated, test_data=test)
    assert {key for key, value in other.items() if facts[key] != value} == {"test_latents"}


def pairs_of(root: Path, make_dataset: Maker, law: str) -> Splits:
    make_dataset(root, {"train": 24}, pairs=law)
    return open_splits(make_dataset(root, {"test": 6}), some(pairs="exact", conditional=law))


def test_pairs_of_another_law_are_other_facts(tmp_path: Path, make_dataset: Maker) -> None:
    """Anchors have the same latents; what is learned is not the same."""
    one, other = (
        pairs_of(tmp_path / name, make_dataset, law)
        for name, law in (("a", "laplace(scale=0.05)"), ("b", "normal(scale=0.05)"))
    )
    np.testing.assert_array_equal(one.train.latents, other.train.latents)
    assert not np.array_equal(one.train.pair_latents, other.train.pair_latents)  # type: ignore[arg-type]
    assert one.facts() != other.facts()


def test_facts_decode_nothing(fabricated: Path, undecoded: Iterator[None]) -> None:
    assert facts_of(fabricated)

"""Datasets made here: encoded anew with their provenance, and written in 3DIdent's published layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ident3d import DatasetError, Ident3D, SpecError
from ident3d.conversion import ConvertOptions
from ident3d.conversion.to_published import computed_arrays
from ident3d.datasets.published import ThreeDIdent
from ident3d.files import array_sha256
from ident3d.render.folder import RenderFolder, plan_of
from ident3d.render.repair import repair_dataset
from ident3d.scenes import scene_text
from ident3d.shards.info import info_text
from ident3d.shards.manifest import read_manifest, write_manifest
from ident3d.shards.verify import Problem, verify_dataset

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def webp(fabricated: Path, run: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(fabricated, tmp_path_factory.mktemp("webp") / "data", format="webp")


def test_encoded_anew_the_dataset_is_the_same(fabricated: Path, webp: Path) -> None:
    assert verify_dataset(webp) == []
    for split in ("train", "test"):
        a, b = Ident3D(fabricated, split), Ident3D(webp, split)
        np.testing.assert_array_equal(a.latents, b.latents)
        assert (a.mean, a.std) == (b.mean, b.std)
        assert b.entry.members == ("webp", "latents.npy")
        for i in range(len(a)):
            np.testing.assert_array_equal(a.pixels(i), b.pixels(i))
        for field in ("samples", "shard_size", "seed", "latents", "latents_sha256"):
            assert getattr(a.entry, field) == getattr(b.entry, field)


def test_encoded_anew_it_says_what_was_rendered_and_that_it_was_converted(fabricated: Path, webp: Path) -> None:
    a, b = read_manifest(fabricated), read_manifest(webp)
    for field in ("name", "scene", "factors", "versions", "render", "quality", "device"):
        assert getattr(a, field) == getattr(b, field)
    assert (a.source, b.source and b.source.layout) == (None, "shards")
    for name in ("scene.toml", "teapot.obj"):
        if (fabricated / "scene" / name).exists():
            assert (webp / "scene" / name).read_bytes() == (fabricated / "scene" / name).read_bytes()
    assert "converted from 3dident (rendered: quality draft" in b.origin
    assert "converted from" in info_text(webp)
    assert "converted by ident3d" in (webp / "README.md").read_text()


def test_behind_a_url_it_keeps_its_scene(fabricated: Path, run: Make, tmp_path: Path) -> None:
    made = run(f"file://{fabricated}", tmp_path / "data")
    assert verify_dataset(made) == []
    for path in (fabricated / "scene").iterdir():
        assert (made / "scene" / path.name).read_bytes() == path.read_bytes()


def test_encoded_anew_it_is_not_mended_by_rendering(webp: Path, fabricated: Path) -> None:
    # A render would put PNGs in the place of WebPs.
    with pytest.raises(DatasetError, match="was converted, not rendered"):
        repair_dataset(webp, [Problem("train/train-000000.tar", "altered", "train", 0)])
    with pytest.raises(DatasetError, match="holds a converted dataset"):
        RenderFolder(webp).plans()


def test_kept_bytes_are_kept(fabricated: Path, run: Make, tmp_path: Path) -> None:
    out = run(fabricated, tmp_path / "out", shard_size=7)
    a, b = Ident3D(fabricated), Ident3D(out)
    assert [a.read(i) for i in range(len(a))] == [b.read(i) for i in range(len(b))]
    assert [shard.samples for shard in b.entry.shards] == [7, 7, 7, 3]
    # Still what a render makes, so a repair may render it.
    assert dataclasses.replace(a.manifest, splits={}) == dataclasses.replace(b.manifest, splits={})
    assert plan_of(b.manifest, "train") == dataclasses.replace(plan_of(a.manifest, "train"), shard_size=7)
    assert verify_dataset(out) == []


def test_splits_of_two_datasets_do_not_meet(fabricated: Path, make_dataset: Make, run: Make, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other", {"test": 4}, scene="3dident-v1")
    run(fabricated, tmp_path / "out", splits=("train",))
    with pytest.raises(SpecError, match=r"holds its split train.*\n  dataset: 3dident \w+ there, 3dident-v1 \w+ asked"):
        run(other, tmp_path / "out")


def test_pairs_stay_pairs(fabricated_pairs: Path, run: Make, tmp_path: Path) -> None:
    out = run(fabricated_pairs, tmp_path / "out", format="webp")
    assert verify_dataset(out) == []
    a, b = Ident3D(fabricated_pairs), Ident3D(out)
    assert b.entry.members == ("webp", "latents.npy", "pair.webp", "pair.latents.npy")
    assert (a.entry.pairs, a.mean, a.std) == (b.entry.pairs, b.mean, b.std)
    for i in range(len(a)):
        assert all(bool((x == y).all()) for x, y in zip(a.pair(i), b.pair(i), strict=True))
    assert Ident3D(out, "test").pair_latents is None


def test_published_layout_of_pairs_has_the_anchors_alone(fabricated_pairs: Path, run: Make, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"split train: the published layout has no place for positives"):
        out = run(fabricated_pairs, tmp_path / "out", to="published")
    a, b = Ident3D(fabricated_pairs), ThreeDIdent(out)
    assert all(bool((a[i][0] == b[i][0]).all()) for i in range(len(a)))


@pytest.mark.parametrize("form", ["keep", "webp"])
def test_published_layout_and_back(fabricated: Path, run: Make, tmp_path: Path, form: str) -> None:
    shards = run(fabricated, tmp_path / "shards", format=form)
    out = run(shards, tmp_path / "out", to="published")
    again = run(out, tmp_path / "again")
    for split in ("train", "test"):
        a, b, c = Ident3D(fabricated, split), ThreeDIdent(out, split), Ident3D(again, split)
        assert b.raw_latents.dtype == b.published_latents.dtype == np.float32
        np.testing.assert_array_equal(b.raw_latents, 2 * a.latents - 1)
        for data in (b, c):
            np.testing.assert_array_equal(a.latents, data.latents)
            assert all(bool((a[i][0] == data[i][0]).all()) for i in range(len(a)))
    names = sorted(p.name for p in (out / "train").rglob("*") if p.is_file())
    assert names == [*(f"{i:02d}.png" for i in range(24)), "latents.npy", "raw_latents.npy"]


def test_latents_as_rendered_are_those_of_the_released_generator(real: Path) -> None:
    """Its latents.npy is raw_latents.npy times half the factor's range, in float32."""
    raw, latents = (np.load(real / "test" / name) for name in ("raw_latents.npy", "latents.npy"))
    u = ((raw.astype(np.float64) + 1) / 2).astype(np.float32)
    made = computed_arrays(u)
    exact = made["raw_latents.npy"] == raw  # where u holds all bits of it
    assert exact.mean() > 0.3
    np.testing.assert_array_equal(np.asarray(made["latents.npy"])[exact], latents[exact])


def test_latents_that_float32_cannot_hold_as_raw(make_dataset: Make, run: Make, tmp_path: Path) -> None:
    u = np.random.default_rng(0).uniform(size=(6, 10)).astype(np.float32) * np.float32(2.0**-12)
    source = make_dataset(tmp_path / "source", {"train": 6}, latents=u)
    out = run(source, tmp_path / "out", to="published")
    data = ThreeDIdent(out)
    assert data.raw_latents.dtype == np.float64
    assert data.published_latents.dtype == np.float32
    np.testing.assert_array_equal(data.latents, u)


def test_frozen_factors_are_constant_columns(make_dataset: Make, run: Make, tmp_path: Path) -> None:
    spec = tmp_path / "frozen.toml"
    spec.write_text(scene_text("3dident").replace("range = [-3.0, 3.0] }", "range = [-3.0, 3.0], frozen = 0.25 }", 1))
    out = run(make_dataset(tmp_path / "source", {"train": 6}, scene=spec), tmp_path / "out", to="published")
    np.testing.assert_array_equal(ThreeDIdent(out).raw_latents[:, 0], np.full(6, -0.5, np.float32))
    np.testing.assert_array_equal(ThreeDIdent(out).published_latents[:, 0], np.full(6, -1.5, np.float32))


def test_a_damaged_shard_is_named_and_its_sample_left_out(damaged: Path, run: Make, tmp_path: Path) -> None:
    whole = Ident3D(damaged)
    shard = damaged / "train" / "train-000001.tar"
    content = bytearray(shard.read_bytes())
    content[content.index(b"IDAT", content.index(b"000000007.png")) + 40] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DatasetError, match=r"train-000001.tar, sample 000000007: the picture does not decode"):
        run(damaged, tmp_path / "out", format="webp")
    with pytest.warns(UserWarning, match="1 damaged sample was left out"):
        run(damaged, tmp_path / "out", format="webp", on_error="skip")
    assert verify_dataset(tmp_path / "out") == []
    data, kept = Ident3D(tmp_path / "out"), np.delete(np.arange(24), 7)
    np.testing.assert_array_equal(data.latents, whole.latents[kept])
    assert data.entry.skipped == (7,)
    assert data.entry.latents == array_sha256(data.latents)  # not drawn as they are numbered now

    again = run(tmp_path / "out", tmp_path / "again")
    shard = again / "train" / "train-000001.tar"
    content = bytearray(shard.read_bytes())
    at = content.index(b"RIFF", content.index(b"000000008.webp"))  # which was 9
    content[at : at + 4] = b"RIFX"
    shard.write_bytes(content)
    with pytest.warns(UserWarning, match="1 damaged sample was left out"):
        last = run(again, tmp_path / "last", on_error="skip")
    assert Ident3D(last).entry.skipped == (7, 9)


def test_no_published_layout_for_other_factors(damaged: Path, run: Make, tmp_path: Path) -> None:
    manifest = read_manifest(damaged)
    first = dataclasses.replace(manifest.factors[0], high=5.0)
    write_manifest(damaged, dataclasses.replace(manifest, factors=(first, *manifest.factors[1:])))
    with pytest.raises(DatasetError, match=r"has no published layout: 3DIdent's holds its ten factors"):
        run(damaged, tmp_path / "out", to="published")
    assert not (tmp_path / "out").exists()


def test_a_published_layout_is_not_written_from_one(published: dict[str, Path], run: Make, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is in a published layout already"):
        run(published["3dident"], tmp_path / "out", to="published")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "webp"}, "the published layouts hold PNG"),
        ({"shard_size": 5}, "have no shards"),
        ({"on_error": "skip"}, "leave damaged samples out on the way to shards"),
    ],
)
def test_options_that_the_published_layouts_have_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ConvertOptions("a", Path("b"), to="published", **options)


def test_an_extra_that_is_gone_is_named(published: dict[str, Path], run: Make, tmp_path: Path) -> None:
    shards = run(published["causal3dident"], tmp_path / "shards")
    path = shards / "train" / "published_latents_1.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    assert [str(p) for p in verify_dataset(shards)] == [
        "train/published_latents_1.npy: altered: sha256 differs from the manifest's"
    ]
    with pytest.raises(DatasetError, match=r"train/published_latents_1.npy: missing or altered"):
        run(shards, tmp_path / "out", to="published")
    path.write_bytes(content)
    run(shards, tmp_path / "out", to="published")

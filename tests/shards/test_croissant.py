"""Croissant: what mlcroissant validates without a word of complaint, and pictures that it reads by it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ident3d import Ident3D
from ident3d.factors import Categorical
from ident3d.shards.croissant import MAX_SHARDS, croissant
from ident3d.shards.manifest import Manifest, SourceRecord, read_manifest

mlc = pytest.importorskip("mlcroissant")

# mlcroissant's own parser.
pytestmark = pytest.mark.filterwarnings("ignore:.*ConjunctiveGraph:DeprecationWarning")

FULL = {"license": "cc-by-4.0", "published": "2026-11-21"}


def check(description: dict[str, Any], caplog: pytest.LogCaptureFixture) -> Any:
    """What mlcroissant makes of it, if it finds nothing to complain about."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        dataset = mlc.Dataset(jsonld=json.loads(json.dumps(description)))
    assert dataset.metadata.ctx.issues.errors == set()
    assert dataset.metadata.ctx.issues.warnings == set()
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return dataset


def of_everything(manifest: Manifest) -> Manifest:
    """As if it had been converted from a dataset that has all there is."""
    train = dataclasses.replace(
        manifest.splits["train"],
        members=("webp", "latents.npy", "json", "txt"),
        categories_sha256="0" * 64,
        extras={"silhouettes.npy": "0" * 64, "order.csv": "1" * 64},
    )
    return dataclasses.replace(
        manifest,
        name="Frames | and\nwords",
        scene=None,
        splits={"train": train},
        categories=(Categorical("class", ("hare", "tea pot")), Categorical("ground 'kind' / 2", ("a", "b"))),
        source=SourceRecord("frames", "Frames", "As on the page", "A. Author, 2021"),
    )


@pytest.mark.parametrize("repo", ["", "ada/teapots"])
def test_it_is_valid(fabricated: Path, fabricated_pairs: Path, repo: str, caplog: pytest.LogCaptureFixture) -> None:
    for root in (fabricated, fabricated_pairs):
        check(croissant(read_manifest(root), repo=repo, **FULL), caplog)
    check(croissant(of_everything(read_manifest(fabricated)), repo=repo, **FULL), caplog)


def test_it_names_every_file_with_its_checksum(fabricated: Path) -> None:
    manifest = read_manifest(fabricated)
    described = croissant(manifest, repo="ada/teapots", **FULL)
    files = {f["@id"]: f for f in described["distribution"] if f["@type"] == "cr:FileObject"}
    train = manifest.splits["train"]
    for shard in train.shards:
        file = files[f"train/{shard.name}"]
        assert file["sha256"] == shard.sha256
        assert file["contentSize"] == f"{shard.bytes} B"
        assert file["contentUrl"] == f"https://huggingface.co/datasets/ada/teapots/resolve/main/train/{shard.name}"
    assert files["train/latents.npy"]["sha256"] == train.latents_sha256
    assert files["train/index.npy"]["sha256"] == train.index_sha256
    assert described["license"] == "https://spdx.org/licenses/CC-BY-4.0"
    assert described["url"] == "https://huggingface.co/datasets/ada/teapots"
    assert "object_x" in described["keywords"]


def test_what_samples_hold_is_described(fabricated: Path) -> None:
    described = croissant(of_everything(read_manifest(fabricated)))
    records = {r["@id"]: [f["@id"].rpartition("/")[2] for f in r["field"]] for r in described["recordSet"]}
    assert records == {
        "samples/train/webp": ["key", "picture"],
        "samples/train/latents.npy": ["key", "latents"],
        "samples/train/json": ["key", "class", "ground-kind-2"],
        "samples/train/txt": ["key", "text"],
        "class-labels": ["number", "name"],
        "ground-kind-2-labels": ["number", "name"],
    }
    assert described["license"] == "As on the page"
    assert described["citeAs"] == "A. Author, 2021"


# mlcroissant leaves each picture to the garbage collector to close.
@pytest.mark.filterwarnings(r"ignore:unclosed file .*\.png:ResourceWarning")
@pytest.mark.filterwarnings(r"ignore:Exception ignored in.*\.png:pytest.PytestUnraisableExceptionWarning")
def test_mlcroissant_reads_the_pictures_by_it(
    fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pytest.importorskip("etils.epath").Path(tmp_path)
    monkeypatch.setattr("mlcroissant._src.operation_graph.operations.extract.EXTRACT_PATH", folder)
    path = fabricated.parent / "croissant-of-fabricated.json"
    described = croissant(read_manifest(fabricated), **FULL)
    for file in described["distribution"]:
        if "contentUrl" in file:
            file["contentUrl"] = f"{fabricated.name}/{file['contentUrl']}"
    path.write_text(json.dumps(described))
    local, seen = Ident3D(fabricated), set()
    for record in mlc.Dataset(jsonld=str(path)).records("samples/train/png"):
        index = int(record["samples/train/png/key"])
        picture = np.asarray(record["samples/train/png/picture"]).transpose(2, 0, 1)
        np.testing.assert_array_equal(picture, local[index][0].numpy())
        seen.add(index)
    assert seen == set(range(24))


def test_a_pattern_stands_for_very_many_shards(fabricated: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = read_manifest(fabricated)
    train = manifest.splits["train"]
    many = tuple(
        dataclasses.replace(train.shards[0], name=f"train-{k:06d}.tar", samples=5) for k in range(MAX_SHARDS + 1)
    )
    large = dataclasses.replace(manifest, splits={"train": dataclasses.replace(train, shards=many)})
    for repo in ("", "ada/teapots"):
        described = croissant(large, repo=repo, **FULL)
        check(described, caplog)
        assert len(described["distribution"]) < 10


def test_it_is_a_function_of_the_manifest(fabricated: Path) -> None:
    manifest = read_manifest(fabricated)
    assert json.dumps(croissant(manifest)) == json.dumps(croissant(manifest))
    assert str(fabricated) not in json.dumps(croissant(manifest))

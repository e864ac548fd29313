"""The dataset card: front matter that the Hub can parse, and words that are true of the dataset."""

from __future__ import annotations

import dataclasses
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from ident3d.factors import FACTORS
from ident3d.shards.card import card_text
from ident3d.shards.manifest import Manifest, read_manifest


def front_matter(text: str) -> Any:
    _, front, body = text.split("---\n", 2)
    assert body.strip().startswith("#")
    return yaml.safe_load(front)


def with_samples(manifest: Manifest, **samples: int) -> Manifest:
    train = manifest.splits["train"]
    splits = {name: dataclasses.replace(train, samples=n) for name, n in samples.items()}
    return dataclasses.replace(manifest, splits=splits)


def test_the_front_matter_names_every_split_and_its_files(fabricated: Path) -> None:
    front = front_matter((fabricated / "README.md").read_text())
    assert front["pretty_name"] == "3dident"
    (config,) = front["configs"]
    assert config["data_files"] == [
        {"split": "train", "path": "train/*.tar"},
        {"split": "test", "path": "test/*.tar"},
    ]
    for files in config["data_files"]:
        assert list(fabricated.glob(files["path"]))


def test_the_hub_calls_val_validation(fabricated: Path) -> None:
    front = front_matter(card_text(with_samples(read_manifest(fabricated), train=5, val=5)))
    assert front["configs"][0]["data_files"][1] == {"split": "validation", "path": "val/*.tar"}


@pytest.mark.parametrize(
    "name", ["my variant: red", "[teapot]", "a # b", "yes", "12", "- dash", 'quoted "twice"', "{x}", "it's"]
)
def test_any_name_of_a_scene_survives_the_front_matter(fabricated: Path, name: str) -> None:
    manifest = dataclasses.replace(read_manifest(fabricated), name=name)
    assert front_matter(card_text(manifest))["pretty_name"] == name


@pytest.mark.parametrize(
    ("samples", "size"),
    [
        ({"train": 999}, "n<1K"),
        ({"train": 999, "test": 1}, "1K<n<10K"),
        ({"train": 10_000}, "10K<n<100K"),
        ({"train": 250_000, "test": 25_000}, "100K<n<1M"),
        ({"train": 1_000_000}, "1M<n<10M"),
    ],
)
def test_the_size_is_one_that_the_hub_knows(fabricated: Path, samples: dict[str, int], size: str) -> None:
    front = front_matter(card_text(with_samples(read_manifest(fabricated), **samples)))
    assert front["size_categories"] == [size]


def test_the_tables_hold_every_factor_and_split(fabricated: Path) -> None:
    text = (fabricated / "README.md").read_text()
    for row in FACTORS.table():
        assert f"| {' | '.join(row)} |" in text
    manifest = read_manifest(fabricated)
    for name, split in manifest.splits.items():
        size = sum((fabricated / name / s.name).stat().st_size for s in split.shards)
        assert f"| {name} | {split.samples} | {len(split.shards)} | {size:,} |" in text


def test_the_card_is_a_function_of_the_manifest(fabricated: Path) -> None:
    manifest = read_manifest(fabricated)
    assert card_text(manifest) == card_text(manifest) == (fabricated / "README.md").read_text()


# The example takes one sample of a stream, so webdataset's file is left to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_example_of_the_card_runs(fabricated: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (fabricated / "README.md").read_text(), re.DOTALL)
    own, foreign, _ = code.split("\n\n")  # the third is load_dataset, which test_foreign_readers.py runs offline
    names: dict[str, Any] = {}
    exec(own.replace("PATH", str(fabricated)), names)
    assert names["picture"].shape == (3, 16, 16)
    exec(foreign.replace("PATH", str(fabricated)), names)
    assert names["sample"]["png"].size == (16, 16)
    gc.collect()  # here, where the filter is in force

"""The dataset card: front matter that the Hub can parse, and words that are true of the dataset."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from hub_server import FakeHub

from ident3d.factors import FACTORS, Categorical
from ident3d.shards.card import TASKS, card_text, hub_split
from ident3d.shards.manifest import Manifest, SourceRecord, read_manifest


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


def converted(manifest: Manifest, citation: str = "A. Author, A Paper, 2021.") -> Manifest:
    """As if it had been converted from a published dataset that has all there is."""
    train = dataclasses.replace(
        manifest.splits["train"],
        latents="published",
        members=("webp", "latents.npy", "json", "txt"),
        categories_sha256="0" * 64,
        extras={"silhouettes.npy": "0" * 64, "order.csv": "1" * 64},
        consecutive=True,
        skipped=(3, 1007),
    )
    return dataclasses.replace(
        manifest,
        name="Frames | and\nwords",
        factors=manifest.factors[:3],
        scene=None,
        quality="",
        device="",
        versions={"ident3d": "0.2.0"},
        splits={"train": train},
        categories=(Categorical("class", ("hare", "tea|pot"), "the object"), Categorical("ground kind", ("a", "b"))),
        source=SourceRecord("frames", "Frames and Words", "cc-by-nc-4.0", citation),
    )


def test_the_front_matter_says_what_the_hub_filters_by(fabricated: Path) -> None:
    front = front_matter(card_text(read_manifest(fabricated)))
    assert front["license"] == "unknown"
    assert front["task_categories"] == list(TASKS)
    assert {"webdataset", "identifiability"} <= set(front["tags"])
    (info,) = front["dataset_info"]
    assert [split["name"] for split in info["splits"]] == ["train", "test"]
    assert [split["num_examples"] for split in info["splits"]] == [24, 6]
    assert info["dataset_size"] == sum(split["num_bytes"] for split in info["splits"])


@pytest.mark.parametrize(
    ("license", "front"),
    [
        ("mit", {"license": "mit"}),
        ("1.0", {"license": "1.0"}),
        ("As on: the page", {"license": "other", "license_name": "As on: the page"}),
    ],
)
def test_any_licence_survives_the_front_matter(fabricated: Path, license: str, front: dict[str, str]) -> None:
    found = front_matter(card_text(read_manifest(fabricated), license=license))
    assert {key: found[key] for key in front} == front


@pytest.mark.parametrize(
    ("name", "shown"), [("val", "validation"), ("train", "train"), ("no", "no"), ("test-1 b", "test_1_b"), ("ü", "_")]
)
def test_any_split_has_a_name_on_the_hub(fabricated: Path, name: str, shown: str) -> None:
    front = front_matter(card_text(with_samples(read_manifest(fabricated), **{name: 5})))
    assert hub_split(name) == shown
    assert front["configs"][0]["data_files"] == [{"split": shown, "path": f"{name}/*.tar"}]
    assert front["dataset_info"][0]["splits"][0]["name"] == shown


def test_a_card_for_a_repository_names_it(fabricated: Path, fabricated_pairs: Path) -> None:
    manifest = read_manifest(fabricated)
    assert "preview.png" not in card_text(manifest, repo="ada/teapots")
    text = card_text(manifest, repo="ada/teapots", preview=True)
    assert "](preview.png)" in text
    assert 'ident3d.Ident3D("hf://datasets/ada/teapots", split="train")' in text
    assert "https://huggingface.co/datasets/ada/teapots/resolve/main/train/train-000000.tar" in text
    assert 'datasets.load_dataset("ada/teapots", split="train")' in text
    assert "`ident3d pull ada/teapots PATH`" in text
    pairs = card_text(read_manifest(fabricated_pairs), repo="ada/teapots")
    assert 'datasets.load_dataset("ada/teapots", "pairs", split="train")' in pairs
    assert 'ident3d.Ident3D("hf://datasets/ada/teapots", split="train").pairs(' in pairs


def test_a_converted_dataset_names_its_source(fabricated: Path) -> None:
    text = card_text(converted(read_manifest(fabricated)))
    front = front_matter(text)
    assert front["license"] == "cc-by-nc-4.0"
    assert front["pretty_name"] == "Frames | and\nwords"
    for words in (
        "# Frames | and words\n",
        "whose 3 generating factors are known exactly,\nconverted by ident3d 0.2.0 from Frames and Words.",
        "| class | hare, tea\\|pot | the object |",
        "`train/silhouettes.npy`, `train/order.csv`",
        "frames in order of time",
        "Left out of split train, since they were damaged: 2 samples.",
        "has a text about it, `txt`",
        "picture, text, latents = ident3d.Ident3D(",
        "Please cite the source: A. Author, A Paper, 2021.",
    ):
        assert words in text
    assert "with Blender" not in text
    assert "--repair" not in text
    bibtex = card_text(converted(read_manifest(fabricated), "@article{a,\n  title = {B}\n}"))
    assert "```bibtex\n@article{a,\n  title = {B}\n}\n```" in bibtex


def test_the_hubs_library_takes_the_card(fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    manifest = read_manifest(fabricated)
    with FakeHub().running() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        for text in (card_text(manifest), card_text(converted(manifest), repo="ada/x", license="mit", preview=True)):
            card = hub.DatasetCard(text)
            card.validate()
            assert card.text.strip().startswith("# ")
            assert card.data.size_categories == ["n<1K"]
            assert card.data.to_dict()["dataset_info"][0]["features"]
        assert server.count("validate-yaml") == 2


def write_shard(path: Path, members: tuple[str, ...]) -> Path:
    from PIL import Image

    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as archive:
        for key in range(6):
            for member in members:
                data = io.BytesIO()
                kind = member.rpartition(".")[2]
                if kind in ("png", "webp"):
                    Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(data, kind)
                elif kind == "npy":
                    np.save(data, rng.random(3, np.float32))
                else:
                    text = json.dumps({"class": "hare", "ground kind": "b"}) if kind == "json" else "words"
                    data.write(text.encode())
                info = tarfile.TarInfo(f"{key:09d}.{member}")
                info.size = data.tell()
                data.seek(0)
                archive.addfile(info, data)
    return path


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "members",
    [
        ("png", "latents.npy"),
        ("png", "latents.npy", "pair.png", "pair.latents.npy"),
        ("webp", "latents.npy", "json", "txt"),
    ],
)
def test_the_features_are_those_that_datasets_finds(
    fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    shard = write_shard(tmp_path / "x.tar", members)
    options = {"split": "train", "cache_dir": str(tmp_path / "cache")}
    found = datasets.load_dataset("webdataset", data_files={"train": str(shard)}, **options).features
    manifest = converted(read_manifest(fabricated))
    pairs = "normal(scale=0.1)" if "pair.png" in members else ""
    train = dataclasses.replace(
        manifest.splits["train"], members=members, pairs=pairs, pair_latents_sha256="0" * 64 if pairs else ""
    )
    (info,) = front_matter(card_text(dataclasses.replace(manifest, splits={"train": train})))["dataset_info"]
    declared = datasets.Features._from_yaml_list(info["features"])
    assert declared == found
    assert list(declared) == list(found)

"""Croissant, the machine-readable description of a dataset: which files, their checksums, and what a record holds.

Follows Croissant 1.1 (MLCommons, 2026), which is JSON-LD; `mlcroissant` validates it.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from ident3d.shards.card import licence_of
from ident3d.shards.manifest import Manifest, SplitEntry
from ident3d.shards.summary import PICTURES

__all__ = ["croissant"]

PAPER = """@inproceedings{zimmermann2021contrastive,
  title = {Contrastive Learning Inverts the Data Generating Process},
  author = {Zimmermann, Roland S. and Sharma, Yash and Schneider, Steffen and Bethge, Matthias and Brendel, Wieland},
  booktitle = {Proceedings of the 38th International Conference on Machine Learning},
  year = {2021}
}"""
"""The dataset that the scene rebuilds."""

MAX_SHARDS = 1000
"""Up to so many shards each is described by itself, with its checksum; past that a pattern stands for them."""

TERMS = """
    arrayShape citeAs column containedIn equivalentProperty extract field fileProperty fileObject fileSet format
    includes isArray isLiveDataset jsonPath key md5 parentField path recordSet references regex repeated replace
    samplingRate separator source subField transform
"""

CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "name": {"@container": "@language"},
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
    **{term: f"cr:{term}" for term in TERMS.split()},
}
"""The vocabulary, as Croissant 1.1 lays it down."""


def croissant(
    manifest: Manifest, *, repo: str = "", license: str | None = None, endpoint: str = "", published: str = ""
) -> dict[str, Any]:
    """The description of a dataset. A function of its arguments alone.

    Args:
        manifest: of the dataset.
        repo: the repository `user/name` on the Hub that holds it; by default files are named relative to the folder.
        license: in the Hub's words, e.g. `cc-by-4.0`; by default the source's.
        endpoint: the Hub, e.g. `https://huggingface.co`, which is the default.
        published: the day that it was, e.g. `2026-11-21`; a validator recommends it.

    Returns:
        JSON-LD, to be written as `croissant.json`.
    """
    page = f"{endpoint or 'https://huggingface.co'}/datasets/{repo}" if repo else ""
    base = f"{page}/resolve/main/" if repo else ""
    files: list[dict[str, Any]] = [_repository(page)] if page and _many(manifest) else []
    records: list[dict[str, Any]] = []
    for name, split in manifest.splits.items():
        files += _split_files(name, split, base)
        records += [_records(manifest, name, member, split.members[0]) for member in split.members]
    records += [_enumeration(kind.name, kind.labels) for kind in manifest.categories]
    licence = licence_of(manifest, license)
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": _identifier(manifest.name),
        "description": _description(manifest),
        "citeAs": manifest.source.citation if manifest.source else PAPER,
        "license": f"https://spdx.org/licenses/{_spdx(licence)}" if _spdx(licence) else licence,
        **({"url": page} if page else {}),
        **({"datePublished": published} if published else {}),
        "version": f"{manifest.format}.0.0",
        "keywords": ["identifiability", "disentanglement", "synthetic images", *(f.name for f in manifest.factors)],
        "isLiveDataset": False,
        "distribution": files,
        "recordSet": records,
    }


def _identifier(text: str) -> str:
    """A name that is part of an @id: no spaces, quotes or slashes."""
    return re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-") or "dataset"


def _spdx(licence: str) -> str:
    """The licence's name on SPDX's list, where the Hub's differs from it by case alone; else empty."""
    if re.fullmatch(r"cc-by(-nc)?(-sa|-nd)?-[1-4]\.0", licence) or licence == "mit":
        return licence.upper()
    return {"cc0-1.0": "CC0-1.0", "apache-2.0": "Apache-2.0", "odc-by": "ODC-By-1.0"}.get(licence, "")


def _description(manifest: Manifest) -> str:
    names = ", ".join(factor.name for factor in manifest.factors)
    counts = ", ".join(f"{name} {split.samples}" for name, split in manifest.splits.items())
    origin = " ".join(manifest.origin.split())
    return (
        f"Pictures of {manifest.resolution} x {manifest.resolution} pixels whose generating factors are known exactly "
        f"({names}); {origin}. Samples: {counts}. latents.npy holds each sample's point of the unit cube."
    )


def _file(name: str, base: str, sha256: str, size: int | None, kind: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": base + (quote(name) if base else name),
        **({} if size is None else {"contentSize": f"{size} B"}),
        "encodingFormat": kind,
        "sha256": sha256,
    }


def _many(manifest: Manifest) -> bool:
    return any(len(split.shards) > MAX_SHARDS for split in manifest.splits.values())


def _repository(page: str) -> dict[str, Any]:
    """What holds shards that are not described one by one. It has no checksum: what a validator expects in place of
    one is a link to the discussion of that."""
    return {
        "@type": "cr:FileObject",
        "@id": "repository",
        "name": "repository",
        "contentUrl": page,
        "encodingFormat": "git+https",
        "sha256": "https://github.com/mlcommons/croissant/issues/80",
    }


def _split_files(name: str, split: SplitEntry, base: str) -> list[dict[str, Any]]:
    """The shards, what of them are pictures, and the arrays beside them."""
    arrays = {"latents.npy": split.latents_sha256, "index.npy": split.index_sha256}
    arrays |= {"pair.latents.npy": split.pair_latents_sha256} if split.pairs else {}
    arrays |= {"categories.npy": split.categories_sha256} if split.categories_sha256 else {}
    arrays |= split.extras
    files = [_file(f"{name}/{file}", base, sha256, None, _format(file)) for file, sha256 in arrays.items()]
    if len(split.shards) > MAX_SHARDS:
        around = [{"@id": "repository"}] if base else []
        files.append(_pattern(f"{name}/shards", f"{name}/*.tar", "application/x-tar", around))
        inside = [{"@id": f"{name}/shards"}]
    else:
        kind = "application/x-tar"
        files += [_file(f"{name}/{shard.name}", base, shard.sha256, shard.bytes, kind) for shard in split.shards]
        inside = [{"@id": f"{name}/{shard.name}"} for shard in split.shards]
    for member in split.members:
        # `*.png` would match those of the positives too: keys are digits.
        files.append(_pattern(f"files/{name}/{member}", f"[0-9]*[0-9].{member}", _format(member), inside))
    return files


def _pattern(name: str, includes: str, kind: str, inside: list[dict[str, str]]) -> dict[str, Any]:
    held = {"containedIn": inside[0] if len(inside) == 1 else inside} if inside else {}
    return {"@type": "cr:FileSet", "@id": name, "name": name, **held, "encodingFormat": kind, "includes": includes}


def _format(file: str) -> str:
    kinds = {"png": "image/png", "webp": "image/webp", "json": "application/json", "txt": "text/plain"}
    kinds |= {"csv": "text/csv", "tar": "application/x-tar", "npy": "application/x-npy"}
    return kinds.get(file.rpartition(".")[2], "application/octet-stream")


def _records(manifest: Manifest, split: str, member: str, first: str) -> dict[str, Any]:
    """What the samples of a split hold of one kind. Each kind is a record set, since mlcroissant joins two at most; the
    keys of the others refer to those of the first."""
    name = f"samples/{split}/{member}"
    key = _field(name, "key", "sc:Text", "The sample's index in the split.", {"fileProperty": "filename"})
    key["source"]["transform"] = {"regex": "^([0-9]+)\\."}
    if member != first:
        key["references"] = {"field": {"@id": f"samples/{split}/{first}/key"}}
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "description": f"The member {member} of each of the {manifest.splits[split].samples} samples of split {split}.",
        "key": {"@id": f"{name}/key"},
        "field": [key, *_member_fields(manifest, name, member)],
    }


def _member_fields(manifest: Manifest, name: str, member: str) -> list[dict[str, Any]]:
    content, positive = {"fileProperty": "content"}, member.startswith("pair.")
    if member == "json":
        return [_category_field(name, kind.name) for kind in manifest.categories]
    if member.endswith(PICTURES):
        text = "The positive's picture." if positive else "The picture."
        return [_field(name, "picture", "sc:ImageObject", text, content)]
    if member.endswith(".npy"):
        columns = ", ".join(factor.name for factor in manifest.factors)
        text = f"The {'positive' if positive else 'sample'}'s latent in the unit cube, a .npy file of {columns}."
        shape = {"isArray": True, "arrayShape": str(len(manifest.factors))}
        return [_field(name, "latents", "cr:Float32", text, content) | shape]
    return [_field(name, "text", "sc:Text", "A text about the sample.", content)]


def _field(records: str, name: str, kind: str, description: str, extract: dict[str, str]) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": f"{records}/{name}",
        "name": f"{records}/{name}",
        "description": description,
        "dataType": kind,
        "source": {"fileSet": {"@id": f"files/{records.removeprefix('samples/')}"}, "extract": extract},
    }


def _category_field(records: str, name: str) -> dict[str, Any]:
    shown, text = _identifier(name), f"The label of the categorical factor {name}."
    field = _field(records, shown, "sc:Text", text, {"jsonPath": f"$.{json.dumps(name)}"})
    return field | {"references": {"field": {"@id": f"{shown}-labels/name"}}}


def _enumeration(name: str, labels: tuple[str, ...]) -> dict[str, Any]:
    """The labels of a categorical factor, by number."""
    shown = f"{_identifier(name)}-labels"
    fields = [
        {"@type": "cr:Field", "@id": f"{shown}/{part}", "name": f"{shown}/{part}", "dataType": kind}
        for part, kind in (("number", "sc:Integer"), ("name", "sc:Text"))
    ]
    return {
        "@type": "cr:RecordSet",
        "@id": shown,
        "name": shown,
        "description": f"The labels of the categorical factor {name}.",
        "dataType": "sc:Enumeration",
        "key": {"@id": f"{shown}/name"},
        "field": fields,
        "data": [{f"{shown}/number": i, f"{shown}/name": label} for i, label in enumerate(labels)],
    }

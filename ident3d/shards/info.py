"""`ident3d info`: a dataset in words."""

from __future__ import annotations

from pathlib import Path

from ident3d.shards.manifest import Manifest, SplitEntry, read_manifest

__all__ = ["info_text"]


def _split_lines(name: str, split: SplitEntry) -> list[str]:
    size = sum(shard.bytes for shard in split.shards)
    kinds = {"drawn": f"drawn uniformly, seed {split.seed}", "published": "as published"}
    latents = kinds.get(split.latents, f"given by the user, seed {split.seed}")
    pairs = [f"    positive pairs, each sample with its own z~ from {split.pairs}"] if split.pairs else []
    mean, std = (" ".join(f"{x:.4f}" for x in values) for values in (split.mean, split.std))
    return [
        f"split {name}: {split.samples:,} samples in {len(split.shards):,} shards, {size / 1e6:,.1f} MB",
        f"    latents {latents}",
        *pairs,
        *(["    positive pairs: neighbours in time"] if split.consecutive else []),
        *([f"    {len(split.skipped):,} damaged samples of the source were left out"] if split.skipped else []),
        f"    pixels: mean {mean}, std {std}",
    ]


def _origin_lines(m: Manifest) -> list[str]:
    lines = []
    if m.source is not None:
        lines = [m.origin, f"licence {m.source.license}; cite {m.source.citation}"]
    if m.scene is None:
        return lines
    settings = ", ".join(f"{key} {value}" for key, value in m.render.items())
    return [
        *lines,
        f"rendered by ident3d {m.versions['ident3d']}, Blender {m.versions['blender']}, on {m.device}",
        f"quality {m.quality}: {settings}",
        f"scene sha256 {m.scene.digest}",
    ]


def info_text(root: Path) -> str:
    """What a dataset is: pictures, factors, splits, where it came from.

    Raises:
        DatasetError: no dataset there.
    """
    m = read_manifest(root)
    lines = [f"{root}: {m.name}, {m.resolution} x {m.resolution} px", *_origin_lines(m)]
    for name, split in m.splits.items():
        lines += _split_lines(name, split)
    rows = [("column", "factor", "range", "unit", "drives"), *m.factor_table.table()]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"categorical  {kind.name}: {', '.join(kind.labels)}" for kind in m.categories]
    return "\n".join(lines) + "\n"

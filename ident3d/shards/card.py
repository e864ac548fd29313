"""The dataset card: a README.md that tells a stranger what the dataset is and how to load it."""

from __future__ import annotations

import json

from ident3d.shards.manifest import Manifest

__all__ = ["card_text"]

SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
)
"""The Hub's size categories, each with the number of samples that it stays below."""


def _configs(manifest: Manifest) -> str:
    """The splits as the Hub's configurations: all splits of one must have the same columns, so pairs have their own
    where other splits hold single pictures."""
    names = {"val": "validation"}
    single = [s for s, split in manifest.splits.items() if not split.pairs]
    paired = [s for s, split in manifest.splits.items() if split.pairs]
    text = ""
    for config, splits in (("default", single or paired), ("pairs", paired if single else [])):
        files = "".join(f"  - split: {names.get(s, s)}\n    path: {s}/*.tar\n" for s in splits)
        text += f"- config_name: {config}\n  data_files:\n{files}" if splits else ""
    return text


def card_text(manifest: Manifest) -> str:
    """The card's Markdown, with the front matter that the Hugging Face Hub reads. A function of the manifest alone."""
    total = sum(split.samples for split in manifest.splits.values())
    size = next((name for bound, name in SIZES if total < bound), "1B<n<10B")
    front = f"---\npretty_name: {json.dumps(manifest.name)}\nsize_categories:\n- {size}\n"
    front += f"configs:\n{_configs(manifest)}---\n"
    rows = ["| column | factor | range | unit | drives |", "|---|---|---|---|---|"]
    rows += [f"| {' | '.join(row)} |" for row in manifest.factor_table.table()]
    splits = ["| split | samples | shards | bytes |", "|---|---|---|---|"]
    for name, split in manifest.splits.items():
        splits.append(f"| {name} | {split.samples:,} | {len(split.shards)} | {sum(s.bytes for s in split.shards):,} |")
    pairs = "".join(
        f"\nSamples of split {name} are positive pairs: `png` with `latents.npy` (z), and `pair.png` with "
        f"`pair.latents.npy`, a z~ drawn\nfrom p(z~ | z) = `{split.pairs}` truncated to the unit cube. "
        f'`ident3d.Ident3D("PATH", split="{name}").pairs(batch_size=64)` serves them.\n'
        for name, split in manifest.splits.items()
        if split.pairs
    )
    table, counts = "\n".join(rows), "\n".join(splits)
    first = next(iter(manifest.splits))
    return f"""{front}
# {manifest.name}

Pictures of {manifest.resolution} x {manifest.resolution} pixels whose ten generating factors are known exactly,
rendered by ident3d {manifest.versions["ident3d"]} with Blender {manifest.versions["blender"]} (Cycles,
quality `{manifest.quality}`, device {manifest.device}) from the scene in `scene/scene.toml`.

{counts}
{pairs}
## Factors

A latent is a point of the unit cube; column i drives factor i linearly over its range.

{table}

## Loading

```python
import ident3d                                    # random access, pairs, statistics
picture, latents = ident3d.Ident3D("PATH", split="{first}")[0]

import webdataset                                 # no code of ident3d
sample = next(iter(webdataset.WebDataset("PATH/{first}/{first}-000000.tar", shardshuffle=False).decode("pil")))

import datasets                                   # no code of ident3d
rows = datasets.load_dataset("webdataset", data_files={{"{first}": "PATH/{first}/*.tar"}}, split="{first}")
```

`ident3d verify PATH` checks every byte, `ident3d verify PATH --repair` renders what is damaged again.

The scene rebuilds 3DIdent: R. Zimmermann, Y. Sharma, S. Schneider, M. Bethge, W. Brendel, Contrastive Learning
Inverts the Data Generating Process, ICML 2021.
"""

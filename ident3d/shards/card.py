"""The dataset card: a README.md that tells a stranger what the dataset is and how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from ident3d.shards.manifest import Manifest, SplitEntry
from ident3d.shards.summary import PICTURES

__all__ = ["card_text", "hub_split", "licence_of"]

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

TASKS = ("image-feature-extraction", "unconditional-image-generation")
"""What the data serves, by names of the Hub's list."""

TAGS = ("webdataset", "ident3d", "synthetic", "identifiability", "disentanglement", "representation-learning")

PAPER = (
    "The scene rebuilds 3DIdent: R. Zimmermann, Y. Sharma, S. Schneider, M. Bethge, W. Brendel, Contrastive Learning\n"
    "Inverts the Data Generating Process, ICML 2021."
)


def hub_split(name: str) -> str:
    """What the Hub calls a split: `validation` for val, and letters, digits and underscores alone."""
    return "validation" if name == "val" else re.sub(r"\W", "_", name, flags=re.ASCII)


def licence_of(manifest: Manifest, license: str | None = None) -> str:
    """The licence as given, or else the source's, or else `unknown`."""
    return license or (manifest.source.license if manifest.source else "") or "unknown"


def card_text(manifest: Manifest, *, repo: str = "", license: str | None = None, preview: bool = False) -> str:
    """The card's Markdown, with the front matter that the Hugging Face Hub reads. A function of its arguments alone.

    Args:
        manifest: of the dataset.
        repo: the repository `user/name` on the Hub that the card is for; by default the examples load from PATH.
        license: in the Hub's words, e.g. `cc-by-4.0`; by default the source's.
        preview: whether `preview.png` lies beside the card.
    """
    picture = "![The first pictures, each over its latents](preview.png)\n\n" if preview else ""
    return f"""{_front(manifest, licence_of(manifest, license))}
# {_line(manifest.name)}

{_origin(manifest)}

{picture}{_table(("split", "samples", "shards", "bytes"), _split_rows(manifest))}
{_remarks(manifest, repo)}
## Factors

A latent is a point of the unit cube; column i drives factor i linearly over its range.

{_table(("column", "factor", "range", "unit", "drives"), manifest.factor_table.table())}
{_categories(manifest)}
## Loading

```python
{_loading(manifest, repo)}
```

{_care(manifest, repo)}

{_credit(manifest)}
"""


def _front(manifest: Manifest, license: str) -> str:
    total = sum(split.samples for split in manifest.splits.values())
    size = next((name for bound, name in SIZES if total < bound), "1B<n<10B")
    lines = ["---", f"pretty_name: {json.dumps(manifest.name)}", *_licence_lines(license)]
    lines += ["task_categories:", *(f"- {task}" for task in TASKS), "size_categories:", f"- {size}"]
    lines += ["tags:", *(f"- {tag}" for tag in TAGS)]
    configs = _configs(manifest)
    lines.append("configs:")
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for name in splits:
            lines += [f"  - split: {json.dumps(hub_split(name))}", f"    path: {json.dumps(f'{name}/*.tar')}"]
    lines.append("dataset_info:")
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  features:", *_features(manifest, next(iter(splits.values())))]
        lines.append("  splits:")
        for name, split in splits.items():
            count = f"    num_bytes: {_bytes(split)}\n    num_examples: {split.samples}"
            lines.append(f"  - name: {json.dumps(hub_split(name))}\n{count}")
        size_in_all = sum(map(_bytes, splits.values()))
        lines += [f"  download_size: {size_in_all}", f"  dataset_size: {size_in_all}"]
    return "\n".join([*lines, "---"])


def _licence_lines(license: str) -> list[str]:
    if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        return [f"license: {json.dumps(license)}"]
    return ["license: other", f"license_name: {json.dumps(license)}"]


def _bytes(split: SplitEntry) -> int:
    return sum(shard.bytes for shard in split.shards)


def _configs(manifest: Manifest) -> dict[str, dict[str, SplitEntry]]:
    """The splits as the Hub's configurations: all splits of one must have the same columns, so pairs have their own
    where other splits hold single pictures."""
    single = {name: split for name, split in manifest.splits.items() if not split.pairs}
    paired = {name: split for name, split in manifest.splits.items() if split.pairs}
    return {"default": single, "pairs": paired} if single and paired else {"default": single or paired}


def _features(manifest: Manifest, split: SplitEntry) -> list[str]:
    """The columns as `datasets` reads them off the shards, in the same order and of the same types."""
    lines = []
    for member in split.members:
        lines.append(f"  - name: {member}")
        if member.endswith(PICTURES):
            lines.append("    dtype: image")
        elif member.endswith(".npy"):
            lines.append("    sequence: float32")
        elif member == "json" and manifest.categories:
            lines.append("    struct:")
            for kind in manifest.categories:
                lines += [f"    - name: {json.dumps(kind.name)}", "      dtype: string"]
        else:
            lines.append("    dtype: string")
    for key in ("__key__", "__url__"):
        lines += [f"  - name: {key}", "    dtype: string"]
    return lines


def _line(text: str) -> str:
    """A text that stays on its line of Markdown."""
    return " ".join(text.split())


def _table(head: tuple[str, ...], rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_line(str(cell)).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _split_rows(manifest: Manifest) -> Iterable[Iterable[object]]:
    for name, split in manifest.splits.items():
        yield name, f"{split.samples:,}", len(split.shards), f"{_bytes(split):,}"


def _origin(manifest: Manifest) -> str:
    m = manifest
    count = "ten" if len(m.factors) == 10 else str(len(m.factors))
    text = f"Pictures of {m.resolution} x {m.resolution} pixels whose {count} generating factors are known exactly,\n"
    if m.source is not None:
        return f"{text}converted by ident3d {m.versions['ident3d']} from {_line(m.source.title)}."
    return (
        f"{text}rendered by ident3d {m.versions['ident3d']} with Blender {m.versions['blender']} (Cycles,\n"
        f"quality `{m.quality}`, device {m.device}) from the scene in `scene/scene.toml`."
    )


def _remarks(manifest: Manifest, repo: str) -> str:
    """What is particular to some splits."""
    root = f"hf://datasets/{repo}" if repo else "PATH"
    text = ""
    for name, split in manifest.splits.items():
        picture = split.members[0]
        if split.pairs:
            text += (
                f"\nSamples of split {name} are positive pairs: `{picture}` with `latents.npy` (z), and "
                f"`pair.{picture}` with\n`pair.latents.npy`, a z~ drawn from p(z~ | z) = `{split.pairs}` "
                "truncated to the unit cube.\n"
                f'`ident3d.Ident3D("{root}", split="{name}").pairs(batch_size=64)` serves them.\n'
            )
        if split.consecutive:
            text += f"\nSamples of split {name} are frames in order of time: neighbours are positive pairs.\n"
        if "txt" in split.members:
            text += f"\nEach sample of split {name} has a text about it, `txt`.\n"
        if split.extras:
            files = ", ".join(f"`{name}/{extra}`" for extra in split.extras)
            text += f"\nKept from the source besides: {files}.\n"
        if split.skipped:
            text += f"\nLeft out of split {name}, since they were damaged: {len(split.skipped):,} samples.\n"
    return text


def _categories(manifest: Manifest) -> str:
    if not manifest.categories:
        return ""
    rows = [(kind.name, ", ".join(kind.labels), kind.drives) for kind in manifest.categories]
    return (
        "\nCategorical factors, whose values have no order; `categories.npy` of each split holds the number of each\n"
        f"sample's label.\n\n{_table(('factor', 'labels', 'drives'), rows)}\n"
    )


def _loading(manifest: Manifest, repo: str) -> str:
    """Three ways, of which the last two need no code of ident3d."""
    name, split = next(iter(manifest.splits.items()))
    shard, text = split.shards[0].name if split.shards else f"{name}-000000.tar", "txt" in split.members
    own, names = (f"hf://datasets/{repo}" if repo else "PATH"), "picture, text, latents" if text else "picture, latents"
    url = f"https://huggingface.co/datasets/{repo}/resolve/main" if repo else "PATH"
    config = next(config for config, splits in _configs(manifest).items() if name in splits)
    if repo:
        chosen = "" if config == "default" else f'"{config}", '
        rows = f'datasets.load_dataset("{repo}", {chosen}split="{hub_split(name)}")'
    else:
        files = f'{{"{name}": "PATH/{name}/*.tar"}}'
        rows = f'datasets.load_dataset("webdataset", data_files={files}, split="{name}")'
    return f"""import ident3d                                    # random access, pairs, statistics
{names} = ident3d.Ident3D("{own}", split="{name}")[0]

import webdataset                                 # no code of ident3d
sample = next(iter(webdataset.WebDataset("{url}/{name}/{shard}", shardshuffle=False).decode("pil")))

import datasets                                   # no code of ident3d
rows = {rows}"""


def _care(manifest: Manifest, repo: str) -> str:
    got = f"`ident3d pull {repo} PATH` fetches the whole dataset and checks every file.\n" if repo else ""
    verify = "`ident3d verify PATH` checks every byte"
    if manifest.source is not None:
        return f"{got}{verify}."
    return f"{got}{verify}, `ident3d verify PATH --repair` renders what is damaged again."


def _credit(manifest: Manifest) -> str:
    if manifest.source is None:
        return PAPER
    citation = manifest.source.citation.strip()
    if citation.startswith("@"):
        return f"Please cite the source:\n\n```bibtex\n{citation}\n```"
    return f"Please cite the source: {_line(citation)}"

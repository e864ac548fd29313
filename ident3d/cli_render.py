"""`ident3d render` and `ident3d finalize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from ident3d.render.dataset import finalize, render_dataset, render_part
from ident3d.render.options import RenderOptions
from ident3d.render.work import ranges
from ident3d.shards.manifest import Manifest

__all__ = ["Finalize", "Render"]


@dataclass(frozen=True)
class Render(RenderOptions):
    """Render a split of a dataset, or go on where the same command stopped.

    Attributes:
        status: say how far the render in OUT is, here or on a cluster, and nothing else.
    """

    status: FlagCreatePairsOff[bool] = False

    def check_planned(self) -> None:
        """Nothing is asked for but the state."""
        if not self.status:
            super().check_planned()

    def run(self) -> None:
        """Render, and say what is there now."""
        if self.status:
            from ident3d.render.status import status_text

            print(status_text(self.out))
        elif self.shards is not None:
            missing = render_part(self)
            option = "" if self.split == "train" else f" --split {self.split}"
            there = f"all are there: ident3d finalize {self.out}{option}"
            rest = f"shards {ranges(missing)} are missing" if missing else there
            print(f"{self.out}: shards {self.shards} of split {self.split} are finished; {rest}")
        else:
            print(_told(self.out, self.split, render_dataset(self)))


@dataclass(frozen=True)
class Finalize:
    """Make a dataset of the shards that `ident3d render --shards` rendered: index, card and manifest.

    Attributes:
        out: the dataset's folder.
        split: the split.
        quick: do not read every shard again; `ident3d verify` can be asked for that later.
    """

    out: Positional[Annotated[Path, arg(metavar="OUT")]]
    split: str = "train"
    quick: FlagCreatePairsOff[bool] = False

    def run(self) -> None:
        """Write the manifest, and say what is there now."""
        print(_told(self.out, self.split, finalize(self.out, self.split, quick=self.quick)))


def _told(out: Path, split: str, manifest: Manifest) -> str:
    entry = manifest.splits[split]
    what = "pairs" if entry.pairs else "pictures"
    return f"{out}: {entry.samples} {what} of split {split} in {len(entry.shards)} shards"

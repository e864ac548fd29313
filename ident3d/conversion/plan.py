"""A conversion's plan: what is converted, from which state of the source, into what. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ident3d.errors import DatasetError, Ident3DError, SpecError
from ident3d.shards.workfolder import WorkFolder, plan_differences

__all__ = ["PUBLISHED", "SHARDS", "TARGETS", "ConversionFolder", "ConversionPlan"]

SHARDS, PUBLISHED = TARGETS = ("shards", "published")
"""What can be made. The first is also the layout of a source that is a dataset of our own."""

SHARED = ("to", "layout", "dataset", "resolution", "format")
"""The fields in which all splits of one folder agree."""


@dataclass(frozen=True)
class ConversionPlan:
    """All that the bytes of one converted split depend on, but for damaged samples that were left out.

    `on_error` is no part of it: who meets a damaged picture goes on with `skip` from where `raise` stopped.

    Attributes:
        to: `shards` or `published`.
        layout: of what is converted: a published layout's name, or `shards`; of what is written with to = `published`.
        dataset: what all splits of the source have in common: its title, or its name and a checksum of its manifest.
        source: sha256 of the source's arrays, or of its shards' checksums: another state of the source has another.
        split: train, val or test.
        samples: of the source.
        resolution: the pictures' side in pixels.
        format: `keep`, `png` or `webp`.
        shard_size: samples a shard; 0 where none are written.
    """

    to: str
    layout: str
    dataset: str
    source: str
    split: str
    samples: int
    resolution: int
    format: str
    shard_size: int


class ConversionFolder(WorkFolder):
    """The folder that a conversion writes into.

    Everything that is not part of the result lives in `.convert/`: of each split its plan, and while it is in progress
    the summaries of its finished shards and the samples left out, or the files of a published layout.

    Args:
        root: the folder, which need not exist.

    Raises:
        DatasetError: a file, or a folder of something else.
    """

    TASK: ClassVar[str] = "conversion"
    HIDDEN: ClassVar[str] = ".convert"
    FAILURE: ClassVar[type[Ident3DError]] = DatasetError

    def check(self, plan: ConversionPlan) -> None:
        """Refuse a plan that does not go with what is here.

        Raises:
            SpecError: one line a difference.
            DatasetError: a plan found here cannot be read.
        """
        for split, there in self.saved_plans(ConversionPlan).items():
            lines = plan_differences(there, plan, None if split == plan.split else SHARED)
            if lines:
                what = "the same split" if split == plan.split else f"its split {split}"
                hint = "repeat the first command to go on, or choose another folder"
                if [line.split(":")[0] for line in lines] == ["source"]:
                    lines, hint = ["source: has changed since"], "choose another folder, or bring the source back"
                raise SpecError(f"{self.root} holds {what}, converted otherwise; {hint}:\n  " + "\n  ".join(lines))

"""The folder that a render works in: what it may go on from, and the plans found there."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ident3d.errors import DatasetError, Ident3DError, RenderError, SpecError
from ident3d.render.plan import RenderPlan
from ident3d.render.quality import RenderSettings
from ident3d.schema import from_plain
from ident3d.shards.manifest import NAME, Manifest
from ident3d.shards.workfolder import WorkFolder

__all__ = ["RenderFolder", "plan_of"]

SHARED = ("scene_digest", "resolution", "quality", "settings", "device", "blender")
"""The fields in which all splits of one dataset agree."""


def plan_of(manifest: Manifest, split: str) -> RenderPlan:
    """The plan that a finished split was rendered by."""
    entry = manifest.splits[split]
    assert manifest.scene is not None
    return RenderPlan(
        scene=manifest.scene.name,
        scene_digest=manifest.scene.digest,
        split=split,
        samples=entry.samples,
        seed=entry.seed,
        latents=entry.latents,
        resolution=manifest.resolution,
        quality=manifest.quality,
        settings=from_plain(RenderSettings, manifest.render),
        shard_size=entry.shard_size,
        device=manifest.device,
        blender=manifest.versions["blender"],
        pairs=entry.pairs,
    )


class RenderFolder(WorkFolder):
    """A dataset's folder while it is rendered.

    Everything that is not part of the dataset lives in `.render/`: the plan of each split in progress, its latents,
    the summaries of its finished shards, the lock and the logs.

    Args:
        root: the dataset's folder, which need not exist.

    Raises:
        DatasetError: a file, a folder of something else, or one that cannot be made or written.
    """

    TASK: ClassVar[str] = "render"
    HIDDEN: ClassVar[str] = ".render"
    FAILURE: ClassVar[type[Ident3DError]] = RenderError

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.logs = self.inner = self.hidden / "logs"

    def is_ours(self) -> bool:
        """Whether a render has worked in the folder, or a finished dataset is there to add a split to."""
        return (self.root / NAME).exists() or super().is_ours()

    def plans(self) -> dict[str, RenderPlan]:
        """The plan of every split that is finished or in progress here.

        Raises:
            DatasetError: a manifest or plan that cannot be read.
        """
        manifest = self.manifest()
        if manifest is not None and (manifest.scene is None or manifest.source is not None):
            raise DatasetError(f"{self.root}: holds a converted dataset; expected a folder of its own for a render")
        plans = {split: plan_of(manifest, split) for split in manifest.splits} if manifest else {}
        return plans | {split: plan for split, plan in self.saved_plans(RenderPlan).items() if split not in plans}

    def save_plan(self, plan: RenderPlan) -> None:
        """Keep the plan of a split in progress."""
        self.save(plan.split, plan)

    def check(self, plan: RenderPlan, *, ignore: tuple[str, ...] = ()) -> None:
        """Refuse a plan that does not go with what is here.

        Raises:
            SpecError: one line a difference.
        """
        for split, there in self.plans().items():
            lines = there.differences(plan, None if split == plan.split else SHARED)
            lines = [line for line in lines if line.split(":")[0] not in ignore]
            if lines:
                what = "the same split" if split == plan.split else f"its split {split}"
                hint = "repeat the first command to go on, or choose another folder"
                raise SpecError(f"{self.root} holds {what}, rendered otherwise; {hint}:\n  " + "\n  ".join(lines))

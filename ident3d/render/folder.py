"""The folder that a render works in: whether it may, its lock, and the plans found there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ident3d.errors import BusyError, DatasetError, RenderError, SpecError
from ident3d.files import write_json
from ident3d.render.plan import RenderPlan
from ident3d.render.quality import RenderSettings
from ident3d.schema import from_plain, to_plain
from ident3d.shards.manifest import NAME, Manifest, read_manifest

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


class RenderFolder:
    """A dataset's folder while it is rendered.

    Everything that is not part of the dataset lives in `.render/`: the plan of each split in progress, its latents,
    the summaries of its finished shards, the lock and the logs.

    Args:
        root: the dataset's folder, which need not exist.

    Raises:
        DatasetError: a file, a folder of something else, or one that cannot be made or written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hidden = root / ".render"
        self.logs = self.hidden / "logs"
        if root.exists() and not root.is_dir():
            raise DatasetError(f"{root}: is a file; expected a folder for the dataset")
        if root.is_dir() and not (root / NAME).exists() and not self.hidden.is_dir():
            found = sorted(p.name for p in root.iterdir())
            if found:
                raise DatasetError(f"{root}: holds something else ({found[0]}, ...); expected a new or an empty folder")

    def create(self) -> None:
        """Make the folder.

        Raises:
            DatasetError: it cannot be made or written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            probe = self.hidden / f"probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise DatasetError(f"{self.root}: cannot be written: {error.strerror}") from None

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the folder against other renders; gives the descriptor, which workers inherit.

        The lock is the kernel's, so it ends with the last process that holds the descriptor, however it ends.

        Raises:
            BusyError: another render holds it.
        """
        with open(self.hidden / "lock", "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                who = file.read().strip() or "unknown"
                raise BusyError(f"{self.root}: another render (process {who}) is at work in it") from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield file.fileno()

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """A full or failing disk, told as such.

        Raises:
            RenderError: in place of an OSError of the block.
        """
        try:
            yield
        except OSError as error:
            hint = "what is finished stays: mend it, then run the same command to go on"
            raise RenderError(f"{error.filename or self.root}: {error.strerror or error}; {hint}") from None

    def work(self, split: str) -> Path:
        """Where a split in progress keeps its plan, latents and summaries."""
        return self.hidden / split

    def manifest(self) -> Manifest | None:
        """The manifest, or None before the first split is finished."""
        return read_manifest(self.root) if (self.root / NAME).exists() else None

    def plans(self) -> dict[str, RenderPlan]:
        """The plan of every split that is finished or in progress here.

        Raises:
            DatasetError: a manifest or plan that cannot be read.
        """
        manifest = self.manifest()
        if manifest is not None and manifest.scene is None:
            raise DatasetError(f"{self.root}: holds a converted dataset; expected a folder of its own for a render")
        plans = {split: plan_of(manifest, split) for split in manifest.splits} if manifest else {}
        for path in sorted(self.hidden.glob("*/plan.json")):
            try:
                plan = from_plain(RenderPlan, json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, SpecError) as error:
                raise DatasetError(f"{path}: not a plan that this ident3d can read: {error}") from None
            plans.setdefault(plan.split, plan)
        return plans

    def save_plan(self, plan: RenderPlan) -> None:
        """Keep the plan of a split in progress."""
        self.work(plan.split).mkdir(parents=True, exist_ok=True)
        write_json(self.work(plan.split) / "plan.json", to_plain(plan))

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

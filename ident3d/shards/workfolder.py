"""A dataset's folder while a long task builds it: whether it may, its lock, its plans, and what of it is finished."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import DatasetError, Ident3DError, SpecError
from ident3d.files import write_json
from ident3d.locks import file_lock
from ident3d.schema import from_plain, to_plain
from ident3d.shards.manifest import NAME, Manifest, read_manifest
from ident3d.shards.summary import BadSample, ShardSummary, file_sha256, summarise

__all__ = ["WorkFolder", "plan_differences", "trusted_summary"]

P = TypeVar("P")


class WorkFolder:
    """The folder that a task works in. What is not part of the dataset lives in a hidden folder of the task's own.

    A subclass says in its class variables which task it serves.

    Args:
        root: the folder, which need not exist.

    Attributes:
        root: as given.
        hidden: the task's own folder in it: the lock, and a folder for each split in progress.
        inner: the innermost folder that `create` makes.

    Raises:
        DatasetError: a file, or a folder of something else.
    """

    TASK: ClassVar[str]
    """In messages: another TASK is at work."""

    HIDDEN: ClassVar[str]
    """The name of the hidden folder."""

    FAILURE: ClassVar[type[Ident3DError]]
    """What a full or failing disk is raised as."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hidden = self.inner = root / self.HIDDEN
        if root.exists() and not root.is_dir():
            raise DatasetError(f"{root}: is a file; expected a folder for the dataset")
        if root.is_dir() and not self.is_ours():
            found = sorted(p.name for p in root.iterdir())
            if found:
                raise DatasetError(f"{root}: holds something else ({found[0]}, ...); expected a new or an empty folder")

    def is_ours(self) -> bool:
        """Whether the task, or one that it may go on from, has worked in the folder."""
        return self.hidden.is_dir()

    def create(self) -> None:
        """Make the folder.

        Raises:
            DatasetError: it cannot be made or written.
        """
        try:
            self.inner.mkdir(parents=True, exist_ok=True)
            probe = self.hidden / "probe"
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)  # another process may be at it
        except OSError as error:
            raise DatasetError(f"{self.root}: cannot be written: {error.strerror}") from None

    @contextmanager
    def lock(self, *, shared: bool = False, wait: float = 0) -> Iterator[int]:
        """Hold the folder against others at the same task; gives the descriptor, which workers inherit.

        The lock is the kernel's, so it ends with the last process that holds the descriptor, however it ends.

        Args:
            shared: hold it together with others that do a part of the same task.
            wait: seconds to wait for it.

        Raises:
            BusyError: another holds it.
        """
        busy = f"{self.root}: another {self.TASK} (process {{process}}) is at work in it"
        with file_lock(self.hidden / "lock", busy, shared=shared, wait=wait) as descriptor:
            yield descriptor

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """A full or failing disk, told as such.

        Raises:
            Ident3DError: `FAILURE`, in place of an OSError of the block.
        """
        try:
            yield
        except OSError as error:
            hint = "what is finished stays: mend it, then run the same command to go on"
            raise self.FAILURE(f"{error.filename or self.root}: {error.strerror or error}; {hint}") from None

    def work(self, split: str) -> Path:
        """Where a split in progress keeps its plan, latents and summaries."""
        return self.hidden / split

    def manifest(self) -> Manifest | None:
        """The manifest, or None before the first split is finished."""
        return read_manifest(self.root) if (self.root / NAME).exists() else None

    def saved_plans(self, kind: type[P]) -> dict[str, P]:
        """The plans that `save` kept here, by split.

        Args:
            kind: the dataclass of plans.

        Raises:
            DatasetError: a plan that cannot be read.
        """
        plans = {}
        for path in sorted(self.hidden.glob("*/plan.json")):
            try:
                plans[path.parent.name] = from_plain(kind, json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, SpecError) as error:
                raise DatasetError(f"{path}: not a plan that this ident3d can read: {error}") from None
        return plans

    def save(self, split: str, plan: object) -> None:
        """Keep the plan of a split in progress."""
        self.work(split).mkdir(parents=True, exist_ok=True)
        write_json(self.work(split) / "plan.json", to_plain(plan))


def plan_differences(there: Any, asked: Any, only: tuple[str, ...] | None = None) -> list[str]:
    """One line a field in which two plans of a kind differ.

    Args:
        there: the plan of what is in a folder.
        asked: the one that is asked now.
        only: the fields to look at; all by default.
    """
    lines = []
    for field in fields(there):
        old, new = ("none" if v == "" else v for v in (getattr(plan, field.name) for plan in (there, asked)))
        if old != new and (only is None or field.name in only):
            lines.append(f"{field.name}: {old} there, {new} asked")
    return lines


def trusted_summary(
    path: Path,
    sidecar: Path,
    start: int,
    latents: NDArray[np.float32],
    resolution: int,
    members: tuple[str, ...] | None = None,
    *,
    quick: bool = False,
) -> ShardSummary | None:
    """The summary of a shard that is in place, or None where it must be made again.

    A shard is trusted only when its checksum is the one in its sidecar. Without a good sidecar (a kill between the two
    writes) it is read and checked whole.

    Args:
        path: the shard.
        sidecar: where its summary is kept, as JSON.
        start: the index of its first sample in the split.
        latents: of its samples, (n, d), or (n, 2, d) for pairs.
        resolution: the pictures' side in pixels.
        members: the extensions of a sample's members; by default those of rendered samples.
        quick: believe the sidecar of a shard of the right size, whose bytes were read back when it was written.
    """
    if not path.is_file():
        return None
    try:
        summary = from_plain(ShardSummary, json.loads(sidecar.read_text(encoding="utf-8")))
        same_size = path.stat().st_size == summary.bytes and summary.samples == len(latents)
        if same_size and (quick or file_sha256(path) == summary.sha256):
            return summary
    except (OSError, ValueError, SpecError):
        pass
    try:
        summary = summarise(path, start, latents, resolution, members)
    except BadSample:
        return None
    write_json(sidecar, to_plain(summary))
    return summary

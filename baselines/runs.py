"""The folder of a run: its lock, its checkpoint, its log.

RUN/checkpoint.pt   the last good state; written whole or not at all
RUN/log.jsonl       a line each so many steps, and each evaluation
RUN/result.json     the scores, once it is finished
RUN/*.png           figures, once it is finished: codes.png of pictures; transitions.png, sequence.png and traversal.png
                    of KITTI Masks
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ident3d.errors import DatasetError, TrainingError
from ident3d.files import write_atomic
from ident3d.locks import file_lock

__all__ = ["RunFolder", "differences", "flat", "read_checkpoint"]

FORMAT = 1
FIGURES = ("codes.png", "transitions.png", "sequence.png", "traversal.png")
NAMES = ("checkpoint.pt", "log.jsonl", "result.json", ".lock", "tensorboard", *FIGURES)


class RunFolder:
    """A run's folder.

    Args:
        path: new, empty, or one that a run began.

    Raises:
        DatasetError: something else lies there, or it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint, self.log, self.result = (path / name for name in NAMES[:3])
        try:
            path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(p.name for p in path.iterdir() if p.name not in NAMES and not p.name.endswith(".part"))
        except OSError as error:
            raise DatasetError(f"{path}: a run cannot be kept there: {error.strerror}") from None
        if foreign:
            raise DatasetError(f"{path}: holds something else ({foreign[0]}); expected a new or an empty folder")
        if not os.access(path, os.W_OK | os.X_OK):
            raise DatasetError(f"{path}: cannot be written")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder against other runs.

        Raises:
            BusyError: another is at work in it.
        """
        with file_lock(self.path / ".lock", f"{self.path}: another run (process {{process}}) is at work in it"):
            yield

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint by a new one, whole.

        Raises:
            TrainingError: a full or failing disk; the checkpoint before it stays.
        """
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **state}, buffer)
        try:
            write_atomic(self.checkpoint, buffer.getvalue())
        except OSError as error:
            raise TrainingError(f"{self.checkpoint}: not written: {error.strerror}; the one before it stays") from None

    def load_checkpoint(self, device: torch.device | str) -> dict[str, Any] | None:
        """The checkpoint, or None where there is none; raises as `read_checkpoint`."""
        return read_checkpoint(self.checkpoint, device)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line to the log.

        Raises:
            TrainingError: a full or failing disk.
        """
        try:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise TrainingError(f"{self.log}: not written: {error.strerror}") from None

    def cut_log(self, step: int) -> None:
        """Drop lines past a step: those of a run that was stopped after its last checkpoint, which are made again."""
        if self.log.exists():
            kept = [line for line in self.log.read_text("utf-8", "replace").splitlines() if _step_of(line) <= step]
            write_atomic(self.log, "".join(f"{line}\n" for line in kept).encode())


def read_checkpoint(path: Path, device: torch.device | str) -> dict[str, Any] | None:
    """The checkpoint at a path, or None where there is none.

    Raises:
        TrainingError: it is damaged, or of another version of ident3d.
    """
    if not path.exists():
        return None
    try:
        # torch does not look at the checksums in its files.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"its part {damaged} does not agree with its checksum")
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # parsers of damaged files raise whatever they raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainingError(f"{path}: a damaged checkpoint ({why}); remove it to begin again from step 0") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise TrainingError(f"{path}: not of this version of ident3d; choose another folder")
    return state


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line that a kill cut short
        return float("inf")


def flat(settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, such as `training.steps`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{where}{name}.") if isinstance(value, Mapping) else {f"{where}{name}": value}
    return found


def differences(there: Mapping[str, Any], asked: Mapping[str, Any], where: str = "") -> list[str]:
    """One text for each setting in which two runs differ, nested ones by their dotted names."""
    lines: list[str] = []
    for name in dict.fromkeys([*there, *asked]):
        old, new = there.get(name), asked.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{where}{name}.")
        elif old != new:
            lines.append(f"{where}{name}: {old} there, {new} asked")
    return lines

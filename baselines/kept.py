"""A run's result: read where the run's folder has it, made and kept there otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ident3d.baselines.results import Result, stored_result
from ident3d.baselines.runs import RunFolder

__all__ = ["kept_result"]


def kept_result(out: Path | None, asked: Mapping[str, Any], make: Callable[[RunFolder | None], Result]) -> Result:
    """The result in a run's folder, or a new one, which is saved there.

    Args:
        out: the run's folder; nothing is kept if None.
        asked: what the run is to be: row, preset, seeds, and every setting by its name.
        make: runs it in the folder, which is locked meanwhile.

    Raises:
        DatasetError: a folder that holds something else, or the result of another run.
        BusyError: another run is at work in the folder.
    """
    if out is None:
        return make(None)
    folder = RunFolder(out)
    with folder.lock():
        there = stored_result(folder.path, asked)
        if there is not None:
            return there
        result = make(folder)
        result.save(folder.path)
        return result

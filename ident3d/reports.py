"""Reports as files: report.json for programs, report.png for people."""

from __future__ import annotations

import os
from pathlib import Path

from ident3d.datasets.pair_report import PairReport
from ident3d.errors import DatasetError
from ident3d.figures import pair_fidelity, save_figure
from ident3d.files import write_json
from ident3d.schema import to_plain

__all__ = ["check_report_folder", "save_report"]


def check_report_folder(folder: Path) -> None:
    """Refuse a folder that no report can be written to, before the work.

    Raises:
        DatasetError: it is a file, or it cannot be made or written.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise DatasetError(f"{folder}: the report cannot be written there: {there} is no folder that may be written")


def save_report(report: PairReport, folder: Path) -> None:
    """Write a report as report.json and report.png.

    Raises:
        DatasetError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "report.json", to_plain(report))
    except OSError as error:
        raise DatasetError(f"{folder}: the report cannot be written there: {error.strerror}") from None
    save_figure(pair_fidelity(report), folder / "report.png")

"""What a run came to: `result.json`, one file for all seeds that were trained side by side."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ident3d._version import __version__
from ident3d.baselines.paper import kitti_row, mlp_row, threedident_row
from ident3d.baselines.runs import differences
from ident3d.errors import DatasetError, SpecError
from ident3d.files import write_json
from ident3d.schema import from_plain, to_plain

__all__ = ["Result", "Spread", "load_result", "load_results", "spread", "stored_result", "versions"]

FORMAT = 1
NAME = "result.json"
ABOVE_ONE = 1e-6
"""How far rounding may take a perfect score past 1. A score in percent is far past it."""


@dataclass(frozen=True)
class Spread:
    """Scores of several seeds, in percent.

    Attributes:
        mean: over the seeds.
        std: the sample standard deviation (n - 1); None for a single seed, which has none.
        seeds: n.
    """

    mean: float
    std: float | None
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f}±{self.std:.2f}"


def spread(values: Sequence[float]) -> Spread:
    """Mean and deviation of scores.

    Args:
        values: fractions, one a seed, at least one.
    """
    percent = [100 * value for value in values]
    return Spread(statistics.fmean(percent), statistics.stdev(percent) if len(percent) > 1 else None, len(percent))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Settings and scores of a run of one or several seeds. Validated when made.

    Attributes:
        format: of the file, 1.
        experiment: mlp (tables 1 and 2), kitti (table 3) or 3dident (tables 4 and 5).
        row: the row of the paper's tables that the settings are of, or None.
        preset: the preset that the settings started from, or None.
        settings: all that the scores depend on but for seeds and device, as JSON.
        seeds: different whole numbers.
        scores: fractions, one a seed, by the score's name: r2, mcc, mcc_spearman.
        per_factor: by the score's name, for each seed a list of one value a factor.
        extra: other facts, as JSON: the mixing's condition numbers, the bounds at the end.
        curve: evaluations during training: `step`, lists of one value a seed, and single numbers. None stands for what
            was not measured or not finite.
        steps: of training.
        device: processor or GPU.
        versions: of Python and packages.
        wall_s: seconds of wall time for all seeds together.
        finished: when, as date and time in UTC (ISO 8601).

    Raises:
        SpecError: values that do not fit together, numbers that are not finite, scores that are no fractions.
    """

    format: int = FORMAT
    experiment: Literal["mlp", "kitti", "3dident"]
    row: str | None = None
    preset: str | None = None
    settings: dict[str, Any]
    seeds: tuple[int, ...]
    scores: dict[str, tuple[float, ...]]
    per_factor: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    curve: tuple[dict[str, Any], ...] = ()
    steps: int
    device: str
    versions: dict[str, str]
    wall_s: float
    finished: str

    def __post_init__(self) -> None:
        # What is saved and what is read again are the same, whatever kind of sequence was given.
        plain = {"settings": to_plain(self.settings), "extra": to_plain(self.extra)}
        scores = {name: tuple(map(float, values)) for name, values in self.scores.items()}
        factors = {name: tuple(tuple(map(float, row)) for row in rows) for name, rows in self.per_factor.items()}
        curve = tuple(_finite_or_none(to_plain(point)) for point in self.curve)
        values = {**plain, "seeds": tuple(self.seeds), "scores": scores, "per_factor": factors, "curve": curve}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_texts()
        self._check_scores()
        for name in ("settings", "extra", "curve"):
            _check_plain(getattr(self, name), name)
        self._check_curve()

    def _check_texts(self) -> None:
        if self.format != FORMAT:
            raise SpecError(f"format = {self.format!r}: expected {FORMAT}")
        if self.experiment not in ("mlp", "kitti", "3dident"):
            raise SpecError(f"experiment = {self.experiment!r}: expected mlp, kitti or 3dident")
        if self.experiment == "mlp" and self.row is not None:
            mlp_row(self.row)
        if self.experiment == "kitti" and self.row is not None:
            kitti_row(self.row)
        if self.experiment == "3dident" and self.row is not None:
            threedident_row(self.row)
        for name in ("row", "preset", "device"):
            text = getattr(self, name)
            # These stand in tables, a line each.
            if text is not None and not (isinstance(text, str) and text and text.isprintable()):
                raise SpecError(f"{name} = {text!r}: expected a text of one line")
        try:
            offset = datetime.datetime.fromisoformat(self.finished).utcoffset()
        except (TypeError, ValueError):
            offset = None
        if offset != datetime.timedelta(0):
            raise SpecError(f"finished = {self.finished!r}: expected date and time in UTC, e.g. 2026-01-31T12:00:00Z")

    def _check_scores(self) -> None:
        whole = all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in self.seeds)
        if not (self.seeds and whole and len(set(self.seeds)) == len(self.seeds)):
            raise SpecError(f"seeds = {list(self.seeds)}: expected at least one, different whole numbers from 0 up")
        if not self.scores:
            raise SpecError("scores: none; expected r2, mcc or mcc_spearman")
        for name, values in {**self.scores, **{f"per_factor.{k}": v for k, v in self.per_factor.items()}}.items():
            if len(values) != len(self.seeds):
                raise SpecError(f"{name}: {len(values)} values for {len(self.seeds)} seeds; expected one a seed")
        numbers = [(name, v) for name, values in self.scores.items() for v in values]
        numbers += [(f"per_factor.{name}", v) for name, rows in self.per_factor.items() for row in rows for v in row]
        for name, value in numbers:
            if not (math.isfinite(value) and value <= 1 + ABOVE_ONE):
                raise SpecError(f"{name}: {value!r}; expected a finite fraction, at most 1 (not percent)")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise SpecError(f"steps = {self.steps!r}: expected a whole number from 0 up")
        if not 0 <= self.wall_s < math.inf:
            raise SpecError(f"wall_s = {self.wall_s!r}: expected a finite number of seconds from 0 up")

    def _check_curve(self) -> None:
        for i, point in enumerate(self.curve):
            step = point.get("step") if isinstance(point, dict) else None
            if not isinstance(step, int) or isinstance(step, bool):
                raise SpecError(f"curve[{i}]: expected a table with a whole number `step`")
            for name, value in point.items():
                if isinstance(value, list) and len(value) != len(self.seeds):
                    raise SpecError(f"curve[{i}].{name}: {len(value)} values for {len(self.seeds)} seeds")

    @property
    def finished_at(self) -> datetime.datetime:
        """`finished`, to be compared."""
        return datetime.datetime.fromisoformat(self.finished)

    def percent(self, score: str) -> str:
        """Mean and sample standard deviation of a score over the seeds, in percent, such as 99.42±0.05.

        Raises:
            SpecError: an unknown score.
        """
        if score not in self.scores:
            raise SpecError(f"score = {score!r}: expected one of {', '.join(self.scores)}")
        return str(spread(self.scores[score]))

    def save(self, folder: Path) -> Path:
        """Write `result.json`, whole or not at all; one that is there is replaced.

        Args:
            folder: made where it is absent.

        Raises:
            DatasetError: it cannot be made or written.
        """
        path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, to_plain(self))
        except OSError as error:
            raise DatasetError(f"{path}: not written: {error.strerror or error}") from None
        return path


def load_result(path: Path) -> Result:
    """Read a result and check all of it.

    Args:
        path: the file, or the folder that holds it as `result.json`.

    Raises:
        DatasetError: it is absent, damaged, of a newer version of ident3d, or not a result at all.
    """
    path = path / NAME if path.is_dir() else path
    try:
        data = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise DatasetError(f"{path}: damaged or not a result ({why}); remove it and run again") from None
    number = data.get("format") if isinstance(data, dict) else None
    if type(number) is int and number > FORMAT:
        raise DatasetError(f"{path}: of format {number}, which a newer ident3d wrote; update this one, {__version__}")
    try:
        if number is None:
            raise SpecError(f"format: missing; expected {FORMAT}")
        return from_plain(Result, data)
    except (SpecError, RecursionError) as error:
        raise DatasetError(
            f"{path}: not a result of ident3d-baselines, or a changed one: {error}. Move it elsewhere, or run again"
        ) from None


def stored_result(folder: Path, asked: Mapping[str, Any]) -> Result | None:
    """The result that lies in a run's folder, or None where there is none yet.

    Args:
        folder: of the run.
        asked: what the run is to be: row, preset, seeds, and every setting by its name.

    Raises:
        DatasetError: it cannot be read, or is of another run.
    """
    if not (folder / NAME).exists():
        return None
    there = load_result(folder / NAME)
    kept = {"row": there.row, "preset": there.preset, **there.settings, "seeds": list(there.seeds)}
    unlike = "; ".join(differences(kept, asked))
    if unlike:
        raise DatasetError(f"{folder}: holds the result of another run; choose another folder. {unlike}")
    return there


def load_results(folder: Path) -> list[Result]:
    """Every `result.json` of a folder and the folders below it, in the order of their paths.

    Raises:
        DatasetError: no such folder, none in it, or one that cannot be read.
    """
    if not folder.is_dir():
        what = "a file; give the folder" if folder.exists() else "not there; give the folder"
        raise DatasetError(f"{folder}: {what} that the runs were written to")
    paths = sorted(path for path in folder.rglob(NAME) if path.is_file())
    if not paths:
        raise DatasetError(
            f"{folder}: holds no {NAME}; run `ident3d-baselines mlp`, kitti or 3dident first, or give another folder"
        )
    return [load_result(path) for path in paths]


def versions(*packages: str) -> dict[str, str]:
    """Versions of what scores depend on.

    Args:
        packages: besides Python, torch, numpy and ident3d.
    """
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    found["ident3d"] = __version__
    found |= {package: importlib.metadata.version(package) for package in packages}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return {name: str(version) for name, version in found.items()}


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} in place of a finite number")


def _finite_or_none(value: Any) -> Any:
    # A loss that was not measured yet, or has diverged, must not cost the whole result: JSON has no NaN.
    if isinstance(value, dict):
        return {key: _finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_plain(value: object, where: str) -> None:
    """Refuse what JSON cannot hold.

    Raises:
        SpecError: names the place.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise SpecError(f"{where}: the key {key!r}; expected a text")
            _check_plain(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_plain(item, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"{where}: {value!r}; expected a finite number")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise SpecError(f"{where}: {type(value).__name__}; expected numbers, texts, lists and tables of them")

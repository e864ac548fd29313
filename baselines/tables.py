"""The paper's tables beside results: a line for each score, preset and set of settings."""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ident3d.baselines.paper import Published
from ident3d.baselines.published_tables import DATA, PublishedTable, Score, published_table
from ident3d.baselines.results import Result, Spread, spread
from ident3d.baselines.runs import flat
from ident3d.baselines.table_formats import Sheet, to_figure, to_markdown, to_text
from ident3d.errors import DatasetError, SpecError
from ident3d.files import write_atomic

__all__ = ["TableLine", "caption", "table_rows", "table_sheet", "write_table"]

SUFFIXES = (".md", ".txt", ".png", ".pdf", ".svg")


@dataclass(frozen=True)
class TableLine:
    """A score of the paper and what stands beside it.

    Attributes:
        row: the row's name, such as 2.10, or supervised.
        about: what the row is, a text for each of its table's headings.
        label: which of the row's scores, such as unsupervised or identity R2.
        paper: as published; None where the paper is blank.
        preset: of the runs here; None without one, or without runs.
        here: mean and deviation over seeds; None without a run.
        differs: the settings that are not the paper's, such as `batch 1,024 (6,144)`: here, and the paper's. At the
            end, without parentheses, what tells the data from those of other lines with the same differences.
        results: the runs that `here` is of.
        comparable: whether a difference to the paper means something, which it does not where other data stand in for
            the paper's.
    """

    row: str
    about: tuple[str, ...]
    label: str
    paper: Published | None
    preset: str | None = None
    here: Spread | None = None
    differs: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
    comparable: bool = True

    @property
    def difference(self) -> float | None:
        """Here less the paper, in points; None where one of them is absent, or they are not comparable."""
        if self.here is None or self.paper is None or not self.comparable:
            return None
        return self.here.mean - self.paper.mean


def table_rows(table: int, results: Sequence[Result]) -> list[TableLine]:
    """The lines of a table, in the paper's order: rows, and of each its scores.

    A score has a line for each preset, and for each set of settings, that there are results of. Results of the same
    row, mode, preset, settings and data are one line over all of their seeds; of a seed that is there twice, the run
    that finished last counts. A score that the paper has and the results have not stands without them.

    In table 3, results on synthetic silhouettes stand apart from those on KITTI Masks, without a difference to the
    paper. In tables 4 and 5, supervised results of any row, and of none, are of the last row, and identity results of
    no row are of the first. Table 5 leaves out what lacks its score, since an encoder may be scored on the test set
    alone.

    Args:
        table: 1 to 5.
        results: of any rows; those of other tables are left out, and so are those of no row but for the above.

    Raises:
        SpecError: another table; a result of a row that lacks the row's score, does not state its data, or is of an
            unknown mode (of an unknown model in table 3).
    """
    shown = published_table(table)
    rows, ours = shown.rows(), [result for result in results if result.experiment == shown.experiment]
    names, modes = [row.name for row in rows], list(dict.fromkeys(s.mode for row in rows for s in row.scores))
    for result in ours:
        mode = result.settings.get(shown.mode)
        if result.row in names and mode not in modes:
            raise SpecError(f"{_which(result)}: {shown.mode} = {mode!r}; expected one of {', '.join(modes)}")
    lines: list[TableLine] = []
    for row in rows:
        for score in row.scores:
            blank = TableLine(row.name, row.about, score.label, score.paper)
            runs = [result for result in ours if shown.takes(score, result)]
            lines += _score_lines(blank, score, runs, shown)
    return _told_apart(lines)


def _which(result: Result) -> str:
    return f"result of row {result.row}, preset {result.preset}, finished {result.finished}"


def _score_lines(blank: TableLine, score: Score, runs: Sequence[Result], shown: PublishedTable) -> list[TableLine]:
    """The lines of one score of a row: without a run, one that has the paper's number alone, if the paper has one."""
    pools: dict[Any, list[Result]] = {}
    for run in runs:
        if score.score in run.scores:
            pools.setdefault((run.preset, _pool_key(run, score)), []).append(run)
        elif score.required:
            raise SpecError(f"{_which(run)}: has no {score.score}, which the table shows; remove it and run again")
    # Of a pool, all runs are on the same data.
    lines = [
        _pooled(dataclasses.replace(blank, comparable=shown.comparable(pool[0])), score, pool)
        for pool in pools.values()
    ]
    presets = [*shown.presets, *sorted({run.preset for run in runs if run.preset} - set(shown.presets)), None]
    lines.sort(key=lambda line: (presets.index(line.preset), line.differs))
    return lines if lines or blank.paper is None else [blank]


def _pool_key(run: Result, score: Score) -> str:
    """The settings that count and all that is known of the data, as a text."""
    here = flat(run.settings)
    absent = [name for name in score.stated if name not in here]
    if absent:
        raise SpecError(f"{_which(run)}: its settings lack {', '.join(absent)}; remove it and run again")
    # A setting that a result does not name is newer than the result, which ran as its default, the paper's, is.
    complete = {**score.settings, **here}
    of_pool = {k: v for k, v in complete.items() if k.startswith(DATA) or score.counts(k, complete)}
    return repr(sorted(_numbers_as_floats(of_pool).items()))


def _told_apart(lines: Sequence[TableLine]) -> list[TableLine]:
    """Where lines are alike in their differences but not in their data, what tells the data apart is added to them."""
    told = []
    for line in lines:
        others = [_data(twin) for twin in lines if twin.differs == line.differs and twin.results]
        added = []
        for name, value in _data(line).items():
            alike = [data for data in others if data.get(name) == value]
            added += [f"{name} {_shown(value)}"] if len(alike) < len(others) else []
            others = alike
        told.append(dataclasses.replace(line, differs=(*line.differs, *added)))
    return told


def _data(line: TableLine) -> dict[str, Any]:
    settings = flat(line.results[0].settings) if line.results else {}
    return {name: value for name, value in settings.items() if name.startswith(DATA)}


def _pooled(blank: TableLine, score: Score, pool: Sequence[Result]) -> TableLine:
    latest: dict[int, tuple[float, Result]] = {}
    for run in sorted(pool, key=lambda run: run.finished_at):
        latest |= {seed: (value, run) for seed, value in zip(run.seeds, run.scores[score.score], strict=True)}
    used = [run for run in pool if any(run is by for _, by in latest.values())]
    return dataclasses.replace(
        blank,
        preset=pool[0].preset,
        here=spread([latest[seed][0] for seed in sorted(latest)]),
        differs=_differences(pool[0].settings, score),
        results=tuple(used),
    )


def _numbers_as_floats(settings: Mapping[str, Any]) -> dict[str, Any]:
    # 1 and 1.0 are the same setting.
    return {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in settings.items()}


def _differences(settings: Mapping[str, Any], score: Score) -> tuple[str, ...]:
    """The settings that are not the paper's, each as `name here (paper)`."""
    here, paper = flat(settings), score.settings
    complete = {**paper, **here}
    ends = [name.rsplit(".", 1)[-1] for name in complete]
    order = [*(name for name in paper if name in here), *(name for name in here if name not in paper)]
    texts = []
    for name in order:
        if score.counts(name, complete) and not (name in paper and here[name] == paper[name]):
            end = name.rsplit(".", 1)[-1]
            label = end if ends.count(end) == 1 else name
            was = _shown(paper[name]) if name in paper else "no such setting"
            texts.append(f"{label} {_shown(here[name])} ({was})")
    return tuple(texts)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return text if text.isprintable() else repr(text)


def caption(lines: Sequence[TableLine]) -> str:
    """What the numbers here were made on: how many seeds, how long, on which devices.

    Args:
        lines: of `table_rows`.
    """
    runs = list({id(run): run for line in lines for run in line.results}.values())
    if not runs:
        return "Here: no results yet."
    seeds = sorted({line.here.seeds for line in lines if line.here is not None})
    many = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    noun = "seed" if seeds[-1] == 1 else "seeds"
    devices = "; ".join(sorted({run.device for run in runs}))
    counted = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    return (
        f"Here: {many} {noun} a line; {_time(sum(run.wall_s for run in runs))} of wall time in {counted}, on {devices}."
    )


def _time(seconds: float) -> str:
    for size, unit in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"


def _marks(lines: Sequence[TableLine]) -> dict[tuple[str, ...], str]:
    """A letter for each set of settings, in the order in which they appear: a to z, then aa, ab and so on."""
    letters = string.ascii_lowercase
    names = itertools.chain.from_iterable(
        map("".join, itertools.product(letters, repeat=n)) for n in itertools.count(1)
    )
    return dict(zip(dict.fromkeys(line.differs for line in lines if line.differs), names, strict=False))


_LEGEND = (
    "paper: mean ± standard deviation over {seeds} seeds, as published, in %. here: mean ± sample standard deviation "
    "(n - 1) of our runs, in %; the number in parentheses is n, the number of seeds. here - paper: difference of the "
    "means, in percentage points. A dash: not published, or not run{or_not_comparable}.",
    "{about} note: a letter where settings differ from the paper's; above, each is given as ours (the paper's).",
)


def table_sheet(table: int, results: Sequence[Result]) -> Sheet:
    """A table's lines as texts, with its notes and an explanation of its columns.

    Args:
        table: 1 to 5.
        results: as of `table_rows`.

    Raises:
        SpecError: as of `table_rows`.
    """
    shown, lines = published_table(table), table_rows(table, results)
    marks = _marks(lines)
    data = ("data",) if shown.stand_in else ()
    headings = ("row", *shown.headings, shown.label, "paper", "preset", *data, "here (seeds)", "here - paper", "note")
    rows: list[tuple[str, ...]] = []
    for i, line in enumerate(lines):
        again = i > 0 and lines[i - 1].row == line.row
        about = ("",) * (1 + len(line.about)) if again else (line.row, *line.about)
        rows.append((*about, *_cells(line, again and lines[i - 1].label == line.label, marks, shown)))
    right = frozenset(map(headings.index, ("paper", "here (seeds)", "here - paper")))
    apart = ", or not comparable" if _stood_in(lines) else ""
    legend = [text.format(seeds=shown.seeds, about=shown.about, or_not_comparable=apart) for text in _LEGEND]
    return Sheet(
        title=f"Table {table} of Zimmermann et al. 2021, {_beside(shown, lines)}: {shown.title}",
        headings=headings,
        rows=tuple(rows),
        right=right,
        strong=frozenset({headings.index("here (seeds)")}),
        notes=tuple((mark, ", ".join(differs)) for differs, mark in marks.items()),
        remarks=(*_not_comparable(shown, lines), caption(lines), *legend, *_left_out(shown, results)),
    )


def _stood_in(lines: Sequence[TableLine]) -> list[TableLine]:
    return [line for line in lines if not line.comparable]


def _beside(shown: PublishedTable, lines: Sequence[TableLine]) -> str:
    """What is set beside what, and on which data."""
    if shown.stand_in is None:
        return "the paper beside ident3d"
    data, paper = shown.stand_in.name, shown.stand_in.paper
    others = _stood_in(lines)
    if not others:
        return f"the paper beside ident3d on {paper}"
    alone = len(others) == sum(bool(line.results) for line in lines)
    ours = "" if alone else f"{paper} and, in the lines that say so, on "
    return f"the paper on {paper} beside ident3d on {ours}{data}, which are not {paper}"


def _not_comparable(shown: PublishedTable, lines: Sequence[TableLine]) -> list[str]:
    """Why lines have no difference to the paper, where any has none."""
    if shown.stand_in is None or not _stood_in(lines):
        return []
    return [
        f"Lines on {shown.stand_in.name} have no here - paper: the paper's scores are of {shown.stand_in.paper}, and a "
        "difference between scores on different data would mean nothing."
    ]


def _left_out(shown: PublishedTable, results: Sequence[Result]) -> list[str]:
    """What is said of results that stand in no line, or not in all that they are of."""
    scores, remarks = [score for row in shown.rows() for score in row.scores], []
    nameless, lacking, lacked = 0, 0, dict[str, None]()
    for run in (result for result in results if result.experiment == shown.experiment):
        taken = [score.score for score in scores if shown.takes(score, run)]
        without = [name for name in taken if name not in run.scores]
        nameless += run.row is None and not taken
        lacking += bool(without)
        lacked |= dict.fromkeys(without)
    if nameless:
        remarks.append(f"Left out: {nameless} result{'s' if nameless > 1 else ''} of no row of the paper.")
    if lacking:
        remarks.append(f"Left out where they lack {' or '.join(lacked)}: {lacking} result{'s' if lacking > 1 else ''}.")
    return remarks


def _cells(
    line: TableLine, again: bool, marks: Mapping[tuple[str, ...], str], shown: PublishedTable
) -> tuple[str, ...]:
    n = shown.digits
    paper = "-" if line.paper is None else f"{line.paper.mean:.{n}f}±{line.paper.std:.{n}f}"
    here = "-" if line.here is None else f"{line.here} ({line.here.seeds})"
    difference = "-" if line.difference is None else f"{line.difference:+.2f}"
    label, paper = ("", "") if again else (line.label, paper)
    data: tuple[str, ...] = ()
    if shown.stand_in is not None:
        named = shown.stand_in.paper if line.comparable else shown.stand_in.name
        data = (named if line.results else "-",)
    return (label, paper, line.preset or "-", *data, here, difference, marks.get(line.differs, ""))


def write_table(table: int, results: Sequence[Result], out: Path) -> None:
    """Write a table beside results, in the format that the file's name ends in.

    Args:
        table: 1 to 5.
        results: as of `table_rows`.
        out: .md (Markdown), .txt (160 columns), .png, .pdf or .svg.

    Raises:
        SpecError: another ending, a folder that is not there, or as of `table_rows`.
        DatasetError: the file cannot be written.
    """
    suffix = out.suffix.lower()
    if suffix not in SUFFIXES:
        raise SpecError(f"{out}: expected a name that ends in {', '.join(SUFFIXES)}")
    if not out.absolute().parent.is_dir():
        raise SpecError(f"{out}: the folder {out.absolute().parent} is not there; make it first")
    sheet = table_sheet(table, results)
    if suffix in (".md", ".txt"):
        text = to_markdown(sheet) if suffix == ".md" else to_text(sheet)
        try:
            write_atomic(out, text.encode())
        except OSError as error:
            raise DatasetError(f"{out}: cannot be written: {error.strerror or error}") from None
    else:
        # Figures load matplotlib and the renderer's modules, which texts need not wait for.
        from ident3d.figures import save_figure

        save_figure(to_figure(sheet), out)

"""A table of texts as plain text, as Markdown and as a figure. It knows nothing of what the texts say."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Sheet", "to_figure", "to_markdown", "to_text"]

WIDTH = 160
"""Columns that plain text fits, where its cells allow."""
GAP = 2

SIZE, LEADING, MARGIN, COLUMN_GAP = 9.0, 14.0, 14.0, 13.0
"""Of figures, in points: the font, from line to line, around the table, between columns."""
TITLE_SIZE, TITLE_LEADING, TITLE_WIDTH = SIZE + 2, 17.0, 480.0
"""Of figures' titles, in points; a title may be as wide even where the table is narrower."""


@dataclass(frozen=True)
class Sheet:
    """A table of texts.

    Attributes:
        title: what it shows.
        headings: one a column.
        rows: a cell a column. A row whose first cell is empty goes on with the row above it.
        right: columns that are set flush right.
        strong: columns that a figure prints bold.
        notes: mark and text, in the order of the marks.
        remarks: paragraphs below.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    strong: frozenset[int] = frozenset()
    notes: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()


def to_text(sheet: Sheet) -> str:
    """Plain text in columns."""
    columns = list(zip(sheet.headings, *sheet.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        set_cells = [
            cell.rjust(width) if i in sheet.right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return (" " * GAP).join(set_cells).rstrip()

    rule = "-" * (sum(widths) + GAP * (len(widths) - 1))
    lines = [*textwrap.wrap(sheet.title, WIDTH), "", line(sheet.headings), rule, *map(line, sheet.rows), rule]
    for mark, text in sheet.notes:
        lines += textwrap.wrap(f"{mark}: {text}", WIDTH, subsequent_indent="   ")
    for remark in sheet.remarks:
        lines += textwrap.wrap(remark, WIDTH)
    return "\n".join(lines) + "\n"


def to_markdown(sheet: Sheet) -> str:
    """A table in GitHub's Markdown, its notes as a list."""
    rules = ["---:" if i in sheet.right else "---" for i in range(len(sheet.headings))]
    table = [sheet.headings, rules, *sheet.rows]
    lines = [f"### {_escape(sheet.title)}", ""]
    lines += ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in table]
    if sheet.notes:
        lines += ["", *(f"- **{mark}**: {_escape(text)}" for mark, text in sheet.notes)]
    for remark in sheet.remarks:
        lines += ["", _escape(remark)]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    for character in "\\|*<>`":
        text = text.replace(character, "\\" + character)
    return text


def to_figure(sheet: Sheet) -> Figure:
    """A figure just as large as the table needs, at 9 points. A title that is wider goes on in further lines."""
    from matplotlib.figure import Figure

    columns = list(zip(sheet.headings, *sheet.rows, strict=True))
    widths = [max(_width(cell, SIZE, bold=True) for cell in column) for column in columns]
    table = sum(widths) + COLUMN_GAP * (len(widths) - 1)
    title = _title_lines(sheet.title, max(table, TITLE_WIDTH))
    width = max(table, *(_width(line, TITLE_SIZE, bold=True) for line in title)) + 2 * MARGIN
    # A letter of running text is about 0.56 of the font's size wide; a little more keeps lines inside.
    letters = int((width - 2 * MARGIN) / (0.6 * SIZE))
    below = [
        line
        for text in [*(f"{mark}: {text}" for mark, text in sheet.notes), *sheet.remarks]
        for line in textwrap.wrap(text, letters, subsequent_indent="    ")
    ]
    further = TITLE_LEADING * (len(title) - 1)
    height = 2 * MARGIN + further + LEADING * (3.4 + len(sheet.rows) + len(below))
    figure = Figure(figsize=(width / 72, height / 72))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    y = MARGIN + 0.5 * LEADING
    for i, text in enumerate(title):
        _put(ax, MARGIN, y + i * TITLE_LEADING, text, size=TITLE_SIZE, bold=True)
    y = _draw_rows(ax, sheet, widths, y + further + 1.6 * LEADING)
    for i, text in enumerate(below):
        _put(ax, MARGIN, y + (0.6 + i) * LEADING, text, colour="0.25")
    return figure


def _title_lines(title: str, width: float) -> list[str]:
    """A title in lines of about so many points, of whole words; at least one line."""
    whole = _width(title, TITLE_SIZE, bold=True)
    if whole <= width:
        return [title]
    # Letters differ in width; a little fewer of them keep lines inside.
    letters = max(1, int(0.95 * len(title) * width / whole))
    return textwrap.wrap(title, letters, break_long_words=False, break_on_hyphens=False)


def _draw_rows(ax: Axes, sheet: Sheet, widths: Sequence[float], y: float) -> float:
    """Headings, rows and rules from `y` down; the place below the last."""
    right = MARGIN + sum(widths) + COLUMN_GAP * (len(widths) - 1)

    def line(cells: Sequence[str], *, head: bool = False) -> None:
        x = MARGIN
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            align = "right" if i in sheet.right else "left"
            bold = head or (i in sheet.strong)
            _put(ax, x + width if align == "right" else x, y, cell, bold=bold, align=align)
            x += width + COLUMN_GAP

    def rule(weight: float, colour: str) -> None:
        ax.plot([MARGIN, right], [y - LEADING / 2] * 2, color=colour, linewidth=weight)

    rule(1.2, "black")
    line(sheet.headings, head=True)
    for i, row in enumerate(sheet.rows):
        y += LEADING
        if i == 0 or row[0]:
            rule(0.8 if i == 0 else 0.4, "black" if i == 0 else "0.8")
        line(row)
    y += LEADING
    rule(1.2, "black")
    return y


def _put(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    *,
    size: float = SIZE,
    bold: bool = False,
    align: str = "left",
    colour: str = "black",
) -> None:
    weight = "bold" if bold else "normal"
    # A dollar sign is no formula here.
    ax.text(x, y, text, size=size, weight=weight, ha=align, va="center", color=colour, parse_math=False)


def _width(text: str, size: float, *, bold: bool = False) -> float:
    """How wide a text is set, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    font = FontProperties(weight="bold" if bold else "normal")
    # TextPath would read what stands between dollar signs as a formula.
    return float(TextPath((0, 0), text.replace("$", "S"), size=size, prop=font).get_extents().x1)

"""Formats: all cells arrive, Markdown means what the cells say, nothing of a figure is cut off or overlaps."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from ident3d.baselines.table_formats import Sheet, to_figure, to_markdown, to_text

SHEET = Sheet(
    title="A title",
    headings=("name", "a long heading", "n"),
    rows=(("one", "a|b", "1.5"), ("", "x * y <z> $5 to $6", "22.5"), ("two", "", "-3.5")),
    right=frozenset({2}),
    strong=frozenset({1}),
    notes=(("a", "the first note " * 20), ("b", "$\\bad{$")),
    remarks=("A remark.",),
)


def test_text_is_set_in_columns() -> None:
    assert to_text(SHEET).splitlines()[:8] == [
        "A title",
        "",
        "name  a long heading         n",
        "------------------------------",
        "one   a|b                  1.5",
        "      x * y <z> $5 to $6  22.5",
        "two                       -3.5",
        "------------------------------",
    ]


def test_notes_and_remarks_are_wrapped() -> None:
    below = to_text(SHEET).splitlines()[8:]
    assert below[0].startswith("a: the first note")
    assert below[1].startswith("   ")
    assert max(map(len, below)) <= 160
    assert below[-2:] == ["b: $\\bad{$", "A remark."]


def test_markdown_keeps_every_cell() -> None:
    lines = to_markdown(SHEET).splitlines()
    assert lines[0] == "### A title"
    assert lines[3] == "| --- | --- | ---: |"
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]
    plain = [tuple(re.sub(r"\\(.)", r"\1", cell) for cell in row) for row in cells]
    assert plain == [SHEET.headings, ("---", "---", "---:"), *SHEET.rows]
    assert r"- **b**: $\\bad{$" in lines


def test_a_table_without_rows_or_notes() -> None:
    empty = Sheet("Empty", ("a", "b"), ())
    assert to_text(empty) == "Empty\n\na  b\n----\n----\n"
    assert to_markdown(empty) == "### Empty\n\n| a | b |\n| --- | --- |\n"
    to_figure(empty).canvas.draw()


@pytest.mark.parametrize("title", ["A title", "A title far longer than the table is wide " * 3])
def test_nothing_of_a_figure_is_cut_off_or_overlaps(title: str) -> None:
    figure = to_figure(Sheet(**{**SHEET.__dict__, "title": title}))
    figure.canvas.draw()
    (ax,) = figure.axes
    boxes = [(text.get_text(), text.get_window_extent()) for text in ax.texts if text.get_text()]
    shown = [text for text, _ in boxes]
    assert {cell for row in SHEET.rows for cell in row if cell} <= set(shown)
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.width, text
        assert box.y1 <= figure.bbox.height, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), (one, other)


def test_a_long_title_goes_on_below_and_not_past_the_table() -> None:
    wide = dataclasses.replace(SHEET, headings=("name", "a long heading " * 8, "n"))
    short, long = (to_figure(dataclasses.replace(wide, title=title)) for title in ("A title", "word " * 50))
    assert long.get_figwidth() == short.get_figwidth()
    assert long.get_figheight() > short.get_figheight()
    titles = [text for text in long.axes[0].texts if "word" in text.get_text()]
    assert len(titles) > 1
    assert " ".join(text.get_text() for text in titles).split() == ["word"] * 50
    assert {text.get_fontweight() for text in titles} == {"bold"}


def test_a_narrow_table_leaves_its_title_some_width() -> None:
    title = "A title somewhat wider than the table"
    for headings in (("a", "b"), ("a" * 30, "b" * 30)):
        figure = to_figure(Sheet(title, headings, (("1", "2"),)))
        assert title in [text.get_text() for text in figure.axes[0].texts]


def test_a_single_long_word_is_a_title() -> None:
    figure = to_figure(dataclasses.replace(SHEET, title="w" * 150))
    figure.canvas.draw()
    (title,) = (text for text in figure.axes[0].texts if text.get_text() == "w" * 150)
    assert title.get_window_extent().x1 <= figure.bbox.width

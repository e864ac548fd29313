"""Plain data to frozen dataclasses and back: every type that the package stores, and every way to get it wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from ident3d.errors import SpecError
from ident3d.schema import from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    size: float
    label: str = "none"

    def __post_init__(self) -> None:
        if self.size < 0:
            raise SpecError(f"size = {self.size}: expected 0 or more")


@dataclass(frozen=True)
class Outer:
    count: int
    flag: bool
    kind: Literal["a", "b"]
    inner: Inner
    pair: tuple[float, float]
    many: tuple[int, ...] = ()
    table: dict[str, Inner] = field(default_factory=dict)
    maybe: float | None = None
    either: Literal["object"] | tuple[float, float] = "object"
    free: Any = None


GOOD: dict[str, Any] = {"count": 3, "flag": True, "kind": "a", "inner": {"size": 1}, "pair": [1, 2.5]}


def test_defaults_are_filled_in() -> None:
    assert from_plain(Outer, GOOD) == Outer(3, True, "a", Inner(1.0), (1.0, 2.5))


def test_whole_numbers_become_floats_where_floats_are_meant() -> None:
    built = from_plain(Outer, GOOD)
    assert type(built.inner.size) is float
    assert type(built.pair[0]) is float
    assert type(built.count) is int


@pytest.mark.parametrize(
    "value",
    [
        Outer(1, False, "b", Inner(0.0, "x"), (0.0, -1.0)),
        Outer(1, True, "a", Inner(2.0), (0.0, 1.0), (1, 2, 3), {"p": Inner(1.0)}, 0.5, (1.0, 2.0), {"k": [1, None]}),
    ],
)
def test_to_plain_is_the_inverse(value: Outer) -> None:
    assert from_plain(Outer, to_plain(value)) == value


def test_to_plain_gives_what_json_and_toml_can_hold() -> None:
    plain = to_plain(Outer(1, True, "a", Inner(2.0), (0.0, 1.0), (1,), {"p": Inner(1.0)}))
    assert plain["inner"] == {"size": 2.0, "label": "none"}
    assert plain["pair"] == [0.0, 1.0]
    assert plain["table"] == {"p": {"size": 1.0, "label": "none"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": True}, "count: expected a whole number, got True"),
        ({"count": 3.0}, "count: expected a whole number, got 3.0"),
        ({"count": "3"}, "count: expected a whole number, got '3'"),
        ({"flag": 1}, "flag: expected true or false, got 1"),
        ({"kind": "c"}, "kind: expected one of 'a', 'b', got 'c'"),
        ({"kind": ["a"]}, "kind: expected one of 'a', 'b', got ['a']"),
        ({"inner": {}}, "inner.size: missing; expected a number"),
        ({"inner": 3}, "inner: expected a table of keys, got 3"),
        ({"inner": {"size": True}}, "inner.size: expected a number, got True"),
        ({"inner": {"size": "1"}}, "inner.size: expected a number, got '1'"),
        ({"inner": {"size": float("nan")}}, "inner.size: expected a number, got nan"),
        ({"inner": {"size": float("inf")}}, "inner.size: expected a number, got inf"),
        ({"inner": {"size": 1, "label": 2}}, "inner.label: expected a text, got 2"),
        ({"inner": {"size": 1, "sise": 2}}, "inner.sise: unknown key; expected one of size, label"),
        ({"inner": {"size": -1}}, "inner: size = -1.0: expected 0 or more"),
        ({"pair": [1]}, "pair: expected a list of 2 values, each a number, got [1]"),
        ({"pair": [1, 2, 3]}, "pair: expected a list of 2 values, each a number, got [1, 2, 3]"),
        ({"pair": [1, None]}, "pair[1]: expected a number, got None"),
        ({"pair": "12"}, "pair: expected a list of 2 values, each a number, got '12'"),
        ({"many": [1, 2, "3"]}, "many[2]: expected a whole number, got '3'"),
        ({"many": 1}, "many: expected a list, each a whole number, got 1"),
        ({"table": [1]}, "table: expected a table, got [1]"),
        ({"table": {"p": {"size": 1, "x": 0}}}, "table.p.x: unknown key"),
        ({"table": {"p": {"size": -2}}}, "table.p: size = -2.0"),
        ({"maybe": "no"}, "maybe: expected a number, got 'no'"),
        ({"either": [1]}, "either: expected one of 'object' or a list of 2 values, each a number, got [1]"),
        ({"other": 1}, "other: unknown key; expected one of count, flag, kind"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        from_plain(Outer, {**GOOD, **change})


@pytest.mark.parametrize("key", ["count", "flag", "kind", "inner", "pair"])
def test_a_missing_key_is_named(key: str) -> None:
    data = {k: v for k, v in GOOD.items() if k != key}
    with pytest.raises(SpecError, match=f"^here.{key}: missing; expected "):
        from_plain(Outer, data, "here")


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_the_top_must_be_a_table(data: object) -> None:
    with pytest.raises(SpecError, match=r"^the file: expected a table of keys"):
        from_plain(Outer, data)


def test_none_is_allowed_for_an_optional_alone() -> None:
    assert from_plain(Outer, {**GOOD, "maybe": None}).maybe is None
    with pytest.raises(SpecError, match="count"):
        from_plain(Outer, {**GOOD, "count": None})


def test_a_number_past_every_float_is_refused() -> None:
    # TOML and JSON parsers of Python give whole numbers of any length.
    with pytest.raises(SpecError, match=r"inner\.size: expected a number"):
        from_plain(Outer, {**GOOD, "inner": {"size": 10**400}})


@dataclass(frozen=True)
class Flat:
    name: str
    size: int
    good: bool = True

    def __post_init__(self) -> None:
        if self.size < 0:
            raise SpecError(f"size = {self.size}: expected 0 or more")


@dataclass(frozen=True)
class Lists:
    flat: tuple[Flat, ...] = ()
    rows: tuple[tuple[tuple[int, int], ...], ...] = ()
    inner: tuple[Inner, ...] = ()


def test_lists_of_tables_hold_each_of_them() -> None:
    whole = {"name": "a", "size": 1, "good": False}
    built = from_plain(Lists, {"flat": [whole, {"size": 2, "name": "b"}, whole], "inner": [{"size": 1}]})
    assert built == Lists((Flat("a", 1, False), Flat("b", 2), Flat("a", 1, False)), (), (Inner(1.0),))


def test_lists_of_lists_become_tuples_all_the_way() -> None:
    value = Lists(rows=(((0, 1), (2, 3)), (), ((4, 5),)))
    built = from_plain(Lists, to_plain(value))
    assert built == value
    assert isinstance(hash(built), int)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flat": [{"name": "a", "size": True, "good": True}]}, "flat[0].size: expected a whole number, got True"),
        ({"flat": [{"name": "a", "size": 1, "good": 1}]}, "flat[0].good: expected true or false, got 1"),
        ({"flat": [{"name": None, "size": 1, "good": True}]}, "flat[0].name: expected a text, got None"),
        ({"flat": 2 * [{"name": "a", "size": 1, "good": True}] + [{"name": "a"}]}, "flat[2].size: missing"),
        ({"flat": [{"name": "a", "size": 1, "god": True}]}, "flat[0].god: unknown key"),
        ({"flat": [{"name": "a", "size": 1, "good": True, "x": 1}]}, "flat[0].x: unknown key"),
        ({"flat": [{"name": "a", "size": -1, "good": True}]}, "flat[0]: size = -1: expected 0 or more"),
        ({"flat": ["a"]}, "flat[0]: expected a table of keys, got 'a'"),
        ({"flat": {"a": 1}}, "flat: expected a list, each a table, got {'a': 1}"),
        ({"rows": [[[0, 1]], [[2, 3], [4, 5.0]]]}, "rows[1][1][1]: expected a whole number, got 5.0"),
        ({"rows": [[[0, 1, 2]]]}, "rows[0][0]: expected a list of 2 values"),
        ({"rows": [[0]]}, "rows[0][0]: expected a list of 2 values"),
        ({"rows": [0]}, "rows[0]: expected a list, each a list of 2 values"),
    ],
)
def test_what_does_not_fit_in_a_long_list_is_named_by_its_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}"):
        from_plain(Lists, change)

"""Frozen dataclasses from plain data (TOML, JSON), checked key by key.

One reader serves scene specs, render plans and manifests. It is standard library alone because render workers
run it under an interpreter that has nothing but bpy, numpy and Pillow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ident3d.errors import SpecError

__all__ = ["from_plain", "to_plain"]

T = TypeVar("T")

_NAMES: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def from_plain(cls: type[T], data: object, where: str = "") -> T:
    """Build the dataclass `cls` from nested dicts and lists.

    Args:
        cls: a dataclass whose fields are bool, int, float, str, Literal, dataclasses, and tuples, dicts or
            optionals of these.
        data: what a TOML or JSON parser returned.
        where: the dotted path of `data`, which errors name.

    Raises:
        SpecError: a missing key, an unknown key, or a value of the wrong type; the text names its path.
    """
    if not isinstance(data, dict):
        raise SpecError(f"{where or 'the file'}: expected a table of keys, got {data!r}")
    hints, fields = _table(cast(Any, cls))
    for key in data:
        if key not in fields:
            raise SpecError(f"{_join(where, key)}: unknown key; expected one of {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], _join(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SpecError(f"{_join(where, name)}: missing; expected {_describe(hints[name])}")
    try:
        return cls(**values)
    except SpecError as error:
        raise SpecError(f"{where}: {error}" if where else str(error)) from None


def to_plain(value: object) -> Any:
    """The inverse of `from_plain`: dataclasses to dicts, tuples to lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


@cache
def _table(cls: Any) -> tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]:
    """The types of a dataclass's fields, and the fields. Resolving the types takes longer than all else."""
    return get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(a) for a in args if a is not type(None))
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"a list, each {_describe(args[0])}"
        return f"a list of {len(args)} values, each {_describe(args[0])}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a table"
    return _NAMES.get(hint, str(hint))


def _convert(hint: Any, value: object, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_plain(cast(type[Any], hint), value, where)
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, where, hint)
    if origin is tuple and isinstance(value, (list, tuple)):
        if args[-1] is Ellipsis:
            return _convert_all(args[0], value, where)
        if len(value) == len(args):
            pairs = enumerate(zip(args, value, strict=True))
            return tuple(_convert(a, v, f"{where}[{i}]") for i, (a, v) in pairs)
    elif origin is dict and isinstance(value, dict):
        return {str(k): _convert(args[1], v, _join(where, k)) for k, v in value.items()}
    elif origin is Literal:
        if value in args:
            return value
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # a whole number past every float
            if math.isfinite(value):
                return float(value)
    elif hint is Any or type(value) is hint:
        return value
    raise SpecError(f"{where}: expected {_describe(hint)}, got {value!r}")


def _convert_all(hint: Any, values: Sequence[object], where: str) -> tuple[Any, ...]:
    """Convert the values of a list. Those that do not fit at once are taken slowly, for the path and the reason."""
    quick = _quick(hint)
    if quick is None:
        return tuple(_convert(hint, value, f"{where}[{i}]") for i, value in enumerate(values))
    made = []
    for i, value in enumerate(values):
        try:
            made.append(quick(value))
        except SpecError:
            made.append(_convert(hint, value, f"{where}[{i}]"))
    return tuple(made)


@cache
def _quick(hint: Any) -> Callable[[Any], Any] | None:
    """A converter that knows no path and raises `SpecError` for whatever it does not take; None where there is none.

    It takes texts, whole numbers and truths, lists of them, and dataclasses of them with every key given: what
    manifests and summaries hold by the hundred thousand.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint in (bool, int, str):
        return _quick_scalar(hint)
    if origin is tuple and args:
        parts = [_quick(arg) for arg in args if arg is not Ellipsis]
        if None not in parts:
            known = [part for part in parts if part is not None]
            return _quick_list(known[0]) if args[-1] is Ellipsis else _quick_row(known)
    if dataclasses.is_dataclass(hint) and set(_table(cast(Any, hint))[0].values()) <= {bool, int, str}:
        return _quick_record(hint)
    return None


def _quick_scalar(kind: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) is not kind:
            raise SpecError
        return value

    return convert


def _quick_list(part: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) is not list:
            raise SpecError
        return tuple([part(item) for item in value])

    return convert


def _quick_row(parts: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) is not list or len(value) != len(parts):
            raise SpecError
        return tuple([part(item) for part, item in zip(parts, value, strict=True)])

    return convert


def _quick_record(cls: Any) -> Callable[[Any], Any]:
    kinds = tuple(_table(cls)[0].items())

    def convert(value: Any) -> Any:
        if type(value) is not dict or len(value) != len(kinds):
            raise SpecError
        for name, kind in kinds:
            if type(value.get(name)) is not kind:
                raise SpecError
        return cls(**value)

    return convert


def _convert_union(args: tuple[Any, ...], value: object, where: str, hint: Any) -> Any:
    if value is None and type(None) in args:
        return None
    for option in args:
        try:
            return _convert(option, value, where)
        except SpecError:
            continue
    raise SpecError(f"{where}: expected {_describe(hint)}, got {value!r}")

"""Checks of single options, each with a text that names it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from ident3d.errors import SpecError

__all__ = ["one_of", "whole"]


def whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number.

    Raises:
        SpecError: something else, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise SpecError(f"{name} = {value!r}: expected a whole number of at least {least}")
    return int(value)


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse what is not among the choices.

    Raises:
        SpecError: it is not.
    """
    if value not in choices:
        raise SpecError(f"{name} = {value!r}: expected one of {', '.join(choices)}")

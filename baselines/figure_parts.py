"""What figures of masks share: their frame of texts, units, and checks of numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from ident3d.errors import SpecError
from ident3d.factors import Factor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["framed", "unit_of", "vector"]

Array = np.ndarray[Any, np.dtype[Any]]


def framed(width: float, height: float, title: str, texts: Sequence[str], label: str = "") -> Figure:
    """A figure of this size in inches, and besides room for the title above and what a reader must know below."""
    from matplotlib.figure import Figure

    above = "\n".join(textwrap.fill(part, int(9 * width)) for part in title.split("\n"))
    below = "\n".join(textwrap.fill(text, int(14 * width)) for text in texts)
    lines = above.count("\n") + below.count("\n") + (4 if label else 2)
    figure = Figure(figsize=(width, height + 0.17 * lines), layout="constrained")
    figure.suptitle(above, fontsize=11, parse_math=False)
    figure.supxlabel(f"{label}\n\n{below}" if label else below, fontsize=8.5)
    return figure


def unit_of(factor: Factor) -> str:
    """A factor's unit as it is written."""
    return factor.unit.replace("^2", "²")


def vector(name: str, values: Any) -> Float64[Array, " n"]:
    """Finite numbers in a row, at least one.

    Raises:
        SpecError: something else; the text names them.
    """
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not len(found):
        raise SpecError(f"{name} of shape {found.shape}: expected (n,), n at least 1")
    wrong = np.flatnonzero(~np.isfinite(found))
    if len(wrong):
        raise SpecError(f"{name}: entry {wrong[0]} is {found[wrong[0]]}: expected finite numbers")
    return found

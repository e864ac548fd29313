"""How two representations are compared."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Term"]


@dataclass(frozen=True)
class Term:
    """A part of the score: dimensions start to stop, compared by minus |x - y|^p summed, or by x . y.

    Attributes:
        start: the first dimension.
        stop: one past the last.
        p: the power, at least 1; None for the dot product.
    """

    start: int
    stop: int
    p: float | None

"""The ten factors of 3DIdent: one table for sampler, renderer, readers, figures and cards.

A latent is a point u of the unit cube [0, 1]^10; column i of an array of latents is factor i of this table. The
published data's `raw` coordinate in [-1, 1] is 2 u - 1, and a factor's physical value is low + u (high - low)
(Zimmermann et al. 2021, appendix A.4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import SpecError

__all__ = ["FACTORS", "Factor", "Factors"]


@dataclass(frozen=True)
class Factor:
    """One generating factor.

    Attributes:
        name: the name used in options, tables and figures, e.g. `object_x`.
        column: its column in an array of latents, 0 to 9.
        low: the physical value at u = 0.
        high: the physical value at u = 1.
        unit: the unit of low and high: `Blender units` or `rad`.
        target: the part of a scene that it drives, e.g. `object.location.x`.
        drives: the same in words.
        periodic: whether low and high give the same picture. False for all ten as published, since each angle
            spans half a turn.
        frozen: the u at which a scene holds this factor, or None where it varies.
    """

    name: str
    column: int
    low: float
    high: float
    unit: str
    target: str
    drives: str
    periodic: bool = False
    frozen: float | None = None

    def value(self, u: float) -> float:
        """The physical value at u in [0, 1], in `unit`."""
        return self.low + u * (self.high - self.low)


class Factors(tuple[Factor, ...]):
    """An ordered choice of factors, indexed by position or found by name.

    Example:
        >>> FACTORS.select(["object_hue", "object_x"]).columns
        array([7, 0])
        >>> FACTORS.get("object_x").value(1.0)
        3.0
    """

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(f.name for f in self)

    @property
    def columns(self) -> NDArray[np.intp]:
        """Their columns in an array of ten-factor latents, shape (len(self),)."""
        return np.array([f.column for f in self], dtype=np.intp)

    def get(self, name: str) -> Factor:
        """The factor of this name.

        Raises:
            SpecError: no factor is called so.
        """
        for factor in self:
            if factor.name == name:
                return factor
        raise SpecError(f"unknown factor {name!r}; expected one of {', '.join(self.names)}")

    def select(self, names: Iterable[str] | None) -> Factors:
        """The factors of these names, in the order given; all of them for None.

        Raises:
            SpecError: a name that is unknown or given twice, no name at all, or a bare string.
        """
        if names is None:
            return self
        if isinstance(names, str):
            raise SpecError(f"factors={names!r}: expected a list of names, e.g. [{names!r}]")
        chosen = Factors(self.get(name) for name in names)
        if not chosen:
            raise SpecError(f"factors is empty; expected names out of {', '.join(self.names)}")
        if len(set(chosen.names)) < len(chosen):
            raise SpecError(f"factors={list(chosen.names)!r} names a factor twice")
        return chosen

    def __repr__(self) -> str:
        return f"Factors({', '.join(self.names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Factors, (tuple(self),))

    def table(self) -> Iterator[tuple[str, ...]]:
        """Rows of text: column, name, range, unit, what it drives."""
        for f in self:
            span = f"{f.low:.4g} to {f.high:.4g}" if f.frozen is None else f"held at {f.value(f.frozen):.4g}"
            yield str(f.column), f.name, span, f.unit, f.drives


_QUARTER = math.pi / 2
_UNITS = "Blender units"

FACTORS = Factors(
    Factor(name, column, -half, half, unit, target, drives)
    for column, (name, half, unit, target, drives) in enumerate(
        [
            ("object_x", 3.0, _UNITS, "object.location.x", "object position, along the view"),
            ("object_y", 3.0, _UNITS, "object.location.y", "object position, to the right"),
            ("object_z", 3.0, _UNITS, "object.location.z", "object position, upwards"),
            ("object_alpha", _QUARTER, "rad", "object.rotation.x", "object rotation, Euler X"),
            ("object_beta", _QUARTER, "rad", "object.rotation.y", "object rotation, Euler Y"),
            ("object_gamma", _QUARTER, "rad", "object.rotation.z", "object rotation, Euler Z"),
            ("spotlight_theta", _QUARTER, "rad", "lights.spotlight.theta", "spotlight position on its circle"),
            ("object_hue", _QUARTER, "rad", "object.hue", "hue of the object"),
            ("spotlight_hue", _QUARTER, "rad", "lights.spotlight.hue", "hue of the spotlight"),
            ("ground_hue", _QUARTER, "rad", "ground.hue", "hue of the ground"),
        ]
    )
)
"""The ten factors with the published ranges. A scene may drive other targets over other ranges: `SceneSpec.factors`."""

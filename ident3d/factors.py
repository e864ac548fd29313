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

__all__ = ["FACTORS", "Categorical", "Factor", "FactorTable", "Factors"]


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


@dataclass(frozen=True)
class Categorical:
    """A generating factor without an order, such as the object's class. It is no coordinate of a latent.

    Attributes:
        name: as for `Factor`, e.g. `class`.
        labels: the names of its values, by number.
        drives: what it changes in the picture, in words.
    """

    name: str
    labels: tuple[str, ...]
    drives: str = ""


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


class FactorTable(Factors):
    """The factors of a dataset, with every sample's values: by position a `Factor`, by name a column of values.

    It is a `Factors` of the continuous factors, in the order of the columns of `latents`; the categorical ones come
    beside them.

    Args:
        factors: the continuous ones, one a column of `latents`.
        latents: float32 (N, len(factors)) in the unit cube.
        categorical: the categorical ones, one a column of `categories`.
        categories: int64 (N, len(categorical)), each value the number of a label.

    Example:
        >>> kinds = Categorical("class", ("teapot", "hare"))
        >>> latents, categories = np.array([[0.5], [1.0]], np.float32), np.array([[1], [0]])
        >>> table = FactorTable(FACTORS.select(["object_x"]), latents, (kinds,), categories)
        >>> table["object_x"], table["class"], table.labels("class")
        (array([0., 3.]), array([1, 0]), array(['hare', 'teapot'], dtype='<U6'))
    """

    latents: NDArray[np.float32]
    categorical: tuple[Categorical, ...]
    categories: NDArray[np.int64]

    def __new__(
        cls,
        factors: Factors,
        latents: NDArray[np.float32],
        categorical: tuple[Categorical, ...] = (),
        categories: NDArray[np.int64] | None = None,
    ) -> FactorTable:
        """See the class."""
        self = super().__new__(cls, factors)
        self.latents, self.categorical = latents, categorical
        self.categories = np.zeros((len(latents), 0), np.int64) if categories is None else categories
        return self

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all columns, the categorical ones last."""
        return self.names + tuple(c.name for c in self.categorical)

    def __getitem__(self, key: Any) -> Any:
        """A `Factor` by position; by name all samples' values, (N,): in the factor's unit, or numbers of labels.

        Raises:
            SpecError: no factor is called so.
        """
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key in self.names:
            column = self.names.index(key)
            factor: Factor = super().__getitem__(column)
            return factor.low + self.latents[:, column].astype(np.float64) * (factor.high - factor.low)
        return self.categories[:, self._categorical(key)]

    def labels(self, name: str) -> NDArray[np.str_]:
        """All samples' labels of a categorical factor, (N,).

        Raises:
            SpecError: no categorical factor is called so.
        """
        column = self._categorical(name)
        found: NDArray[np.str_] = np.array(self.categorical[column].labels)[self.categories[:, column]]
        return found

    def _categorical(self, name: str) -> int:
        for column, kind in enumerate(self.categorical):
            if kind.name == name:
                return column
        raise SpecError(f"unknown factor {name!r}; expected one of {', '.join(self.all_names)}")

    def to_dict(self) -> dict[str, NDArray[Any]]:
        """All columns by name, values as by `table[name]`; what `pandas.DataFrame` takes."""
        return {name: self[name] for name in self.all_names}

    def __reduce__(self) -> tuple[Any, ...]:
        return (FactorTable, (Factors(self), self.latents, self.categorical, self.categories))

    def __repr__(self) -> str:
        return f"FactorTable({', '.join(self.all_names)}; {len(self.latents):,} samples)"


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

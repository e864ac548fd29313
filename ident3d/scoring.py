"""What every score asks of its inputs: columns of finite numbers that vary, rows enough, and two halves of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64, Real

from ident3d.checks import whole
from ident3d.errors import SpecError
from ident3d.factors import Categorical, Factor, Factors, FactorTable
from ident3d.schema import to_plain

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Columns",
    "Halves",
    "Names",
    "Numbers",
    "Rows",
    "Score",
    "Task",
    "columns_of",
    "explained",
    "from_first",
    "halves_of",
    "need_rows",
]

Array = np.ndarray[Any, np.dtype[Any]]
Numbers: TypeAlias = "Real[Array, 'n columns'] | Real[Tensor, 'n columns']"
Rows = Int64[Array, " rows"]
Names = Sequence[str | Factor | Categorical]

EPS = float(np.finfo(np.float64).eps)
ROUNDING = 4
"""A column is constant where its std is at most so many roundings of its largest magnitude, in the dtype as given."""


class Score(ABC):
    """The result of a score."""

    @abstractmethod
    def headline(self) -> dict[str, float]:
        """The numbers that a table of results shows, by name."""

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain dicts, lists and numbers, for JSON."""
        plain: dict[str, Any] = to_plain(self)
        return plain


S = TypeVar("S", bound=Score)


@dataclass(frozen=True)
class Task(Generic[S]):
    """A score whose inputs have been checked.

    Attributes:
        strata: the numbers of the rows, in groups that a resample keeps apart.
        evaluate: the score over rows, of which it takes one array a stratum.
    """

    strata: tuple[Rows, ...]
    evaluate: Callable[..., S]

    def point(self) -> S:
        """The score over the rows as given."""
        return self.evaluate(*self.strata)


@dataclass(frozen=True)
class Columns:
    """Codes or factors in float64, each column divided by a power of two that leaves its magnitudes below 1.

    No score depends on the scale of a column, and so squares neither overflow nor vanish. Nor are values centred here:
    the order of numbers much smaller than the largest, which ranks need, would be lost.

    Attributes:
        kind: `code` or `factor`, for errors.
        names: of the columns.
        values: the numbers.
        exponent: of two, each column's.
        noise: the std up to which a column of `values` is constant.
    """

    kind: str
    names: tuple[str, ...]
    values: Float64[Array, "n columns"]
    exponent: Int32[Array, " columns"]
    noise: Float64[Array, " columns"]

    @classmethod
    def of(cls, kind: str, numbers: Numbers, names: tuple[str, ...] | None) -> Columns:
        """From what a user gave.

        Raises:
            SpecError: no real numbers, another shape than (n,) or (n, columns), NaN or infinity, or another number of
                names than columns.
        """
        raw, eps = _as_float64(f"{kind}s", numbers)
        if raw.ndim not in (1, 2) or raw.shape[1:] == (0,):
            raise SpecError(f"{kind}s of shape {raw.shape}: expected (n,) or (n, {kind}s)")
        raw = raw[:, None] if raw.ndim == 1 else raw
        names = tuple(map(str, range(raw.shape[1]))) if names is None else names
        if len(names) != raw.shape[1]:
            raise SpecError(f"names has {len(names)} entries for {raw.shape[1]} columns of {kind}s: {', '.join(names)}")
        wrong = np.argwhere(~np.isfinite(raw))
        if len(wrong):
            row, column = wrong[0].tolist()
            raise SpecError(
                f"{kind}s: {len(wrong):,} of {raw.size:,} values are not finite, the first {raw[row, column]} at "
                f"row {row}, column {column} ({kind} {names[column]}); leave such rows out, or mend what made them"
            )
        exponent = np.frexp(np.abs(raw).max(axis=0, initial=0))[1]
        values = np.ldexp(raw, -exponent)
        largest = np.abs(values).max(axis=0, initial=0)
        return cls(kind, names, values, exponent, ROUNDING * max(eps, EPS) * largest)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def width(self) -> int:
        """How many columns."""
        return len(self.names)

    def constant(self, rows: Rows) -> Bool[Array, " columns"]:
        """Which columns do not vary over these rows."""
        found: Array = from_first(self.values[rows])[0].std(axis=0) <= self.noise
        return found

    def require_varying(self, rows: Rows, where: str, hint: str) -> None:
        """Refuse a column that does not vary.

        Raises:
            SpecError: the text names the column, its value, and `where`.
        """
        constant = np.flatnonzero(self.constant(rows))
        if len(constant):
            column = int(constant[0])
            value = np.ldexp(self.values[rows[0], column], self.exponent[column])
            raise SpecError(
                f"{self.kind} {self.names[column]} is constant over {where} ({value:.6g}), where no score is defined; "
                f"{hint}"
            )

    def require_one_varying(self, rows: Rows, where: str) -> None:
        """Refuse columns none of which varies.

        Raises:
            SpecError: so it is.
        """
        if self.constant(rows).all():
            raise SpecError(
                f"every {self.kind} is constant over {where}, where no score is defined; did the encoder collapse?"
            )


@dataclass(frozen=True)
class Halves:
    """Two halves of the rows, both standardised by mean and std of the half that is fitted.

    A code that is constant over that half is 0 in both, so that no model can use it.
    """

    fit_codes: Float64[Array, "fit codes"]
    fit_factors: Float64[Array, "fit factors"]
    scored_codes: Float64[Array, "scored codes"]
    scored_factors: Float64[Array, "scored factors"]

    @classmethod
    def of(cls, codes: Columns, factors: Columns, fit: Rows, scored: Rows) -> Halves:
        """The rows `fit` and `scored`.

        Raises:
            SpecError: a factor that is constant over either, or codes that all are over the first.
        """
        hint = "leave it out, or mix the rows with shuffle=0 if they are sorted"
        factors.require_varying(fit, "the half that is fitted", hint)
        factors.require_varying(scored, "the half that is scored", hint)
        codes.require_one_varying(fit, "the half that is fitted")
        parts = []
        for columns in (codes, factors):
            first, second = from_first(columns.values[fit], columns.values[scored])
            mean, std = first.mean(axis=0), first.std(axis=0)
            weight = np.divide(1, std, out=np.zeros_like(std), where=std > columns.noise)
            parts += [(first - mean) * weight, (second - mean) * weight]
        return cls(parts[0], parts[2], parts[1], parts[3])


def columns_of(codes: Numbers, factors: Numbers | FactorTable, names: Names | None) -> tuple[Columns, Columns]:
    """Codes and factors, checked against each other.

    Args:
        codes: (n,) or (n, codes), float or int.
        factors: (n,) or (n, factors), or a dataset's table of factors with their values.
        names: of the factors' columns, or a `Factors`; with a table, the names of those to score, all by default.

    Raises:
        SpecError: what `Columns.of` refuses, numbers of rows that differ, or a factor that is categorical or periodic.
    """
    if isinstance(names, str) or not (names is None or isinstance(names, Iterable)):
        raise SpecError(f"names = {names!r}: expected a list of names, such as ['object_x']")
    values: Any = factors
    texts = None if names is None or isinstance(factors, Factors) else _texts(names)
    if isinstance(factors, FactorTable):
        texts = _texts(_entries(factors, names))
        values = factors.latents[:, [factors.names.index(text) for text in texts]]
    elif isinstance(factors, Factors):
        raise SpecError(f"factors = {factors!r} holds no values; pass the latents as factors, and this as names")
    made, target = Columns.of("code", codes, None), Columns.of("factor", values, texts)
    if len(made) != len(target):
        raise SpecError(f"{len(made):,} rows of codes, {len(target):,} of factors; expected one row a sample in both")
    return made, target


def _entries(table: FactorTable, names: Names | None) -> list[str | Factor | Categorical]:
    """The entries of a table that these names choose."""
    entries: dict[str, Factor | Categorical] = {kind.name: kind for kind in (*table, *table.categorical)}
    chosen = list(entries) if names is None else [getattr(name, "name", name) for name in names]
    for name in chosen:
        if name not in entries:
            raise SpecError(f"unknown factor {name!r}; expected one of {', '.join(entries)}")
    return [entries[str(name)] for name in chosen]


def _texts(names: Names) -> tuple[str, ...]:
    """The names of factors whose values lie on a line."""
    texts = tuple(_orderly(item) for item in names)
    if not texts or len(set(texts)) < len(texts):
        raise SpecError(f"names = {list(texts)!r}: expected at least one, and none twice")
    if "mean" in texts:
        raise SpecError("a factor is called 'mean', as results call the mean over factors; give it another name")
    return texts


def _orderly(item: str | Factor | Categorical) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Categorical):
        raise SpecError(
            f"factor {item.name} is categorical: its numbers have no order, which every score here asks for; "
            "leave it out, by names where factors is a table"
        )
    if not isinstance(item, Factor):
        raise SpecError(f"names holds {item!r}: expected names, or a table of factors")
    if item.periodic:
        raise SpecError(
            f"factor {item.name} is periodic: its two ends are the same, which no score here knows; "
            "pass cos and sin of its angle as two columns in its place, or leave it out"
        )
    return item.name


def _as_float64(what: str, numbers: Any) -> tuple[Array, float]:
    """Numbers in float64, and the relative rounding of the dtype that they came in."""
    expected = "expected an array or tensor of floats or whole numbers"
    if hasattr(numbers, "detach"):
        import torch

        if numbers.is_complex() or numbers.dtype == torch.bool:
            raise SpecError(f"{what} of {numbers.dtype}: {expected}")
        eps = float(torch.finfo(numbers.dtype).eps) if numbers.is_floating_point() else 0.0
        return numbers.detach().cpu().double().numpy(), eps
    if isinstance(numbers, np.ma.MaskedArray) and np.any(numbers.mask):
        raise SpecError(f"{what}: some values are masked; leave those rows out")
    try:
        array = np.asarray(numbers)
    except ValueError as error:
        raise SpecError(f"{what}: {expected} ({error})") from None
    if array.dtype.kind not in "fiu":
        raise SpecError(f"{what} of dtype {array.dtype}: {expected}")
    with np.errstate(over="ignore"):  # beyond float64 lies infinity, which is refused
        return array.astype(np.float64), float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0


def from_first(*parts: Float64[Array, "n columns"]) -> list[Float64[Array, "n columns"]]:
    """Columns less the first row of the first part, so that no sum along them loses digits to a large offset.

    A mean down the rows of a matrix adds up one by one, and over 60,000 equal numbers is off by thousands of roundings.
    """
    return [part - parts[0][0] for part in parts]


def need_rows(columns: Columns, least: int, why: str) -> None:
    """Refuse too few rows.

    Raises:
        SpecError: fewer than `least`.
    """
    if len(columns) < least:
        raise SpecError(f"{len(columns):,} rows: expected at least {least:,}, {why}")


def halves_of(codes: Columns, shuffle: int | None, least: int) -> tuple[Rows, Rows]:
    """The rows to fit and those to score: the first half and the second, of which one row more where n is odd.

    Args:
        codes: whose rows are halved.
        shuffle: what a permutation of the rows is drawn from before, or None for their order as given.
        least: how many rows there must be in any case.

    Raises:
        SpecError: `shuffle` is no seed, fewer rows than `least`, or no more to fit than a linear map has numbers.
    """
    # A half of codes + 1 rows is fitted exactly, whatever the factor.
    least = max(least, 2 * (codes.width + 2))
    need_rows(codes, least, f"half of them to fit a map from {codes.width} codes, half to score it")
    order = np.arange(len(codes))
    if shuffle is not None:
        order = np.random.default_rng(whole("shuffle", shuffle)).permutation(order)
    return order[: len(codes) // 2], order[len(codes) // 2 :]


def explained(
    target: Float64[Array, "n factors"], predicted: Float64[Array, "n factors"]
) -> Float64[Array, " factors"]:
    """R2 of a prediction per column: 1 - SSE / SST, about the mean of `target`."""
    squares = ((target - target.mean(axis=0)) ** 2).sum(axis=0)
    found: Array = 1 - ((target - predicted) ** 2).sum(axis=0) / squares
    return found

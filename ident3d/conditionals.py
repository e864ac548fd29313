"""Conditionals made of other laws, and conditionals from their text."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ident3d.distributions import (
    Distribution,
    GeneralizedNormal,
    Laplace,
    Normal,
    Uniform,
    exact_uniforms,
)
from ident3d.errors import SpecError
from ident3d.factors import Factors
from ident3d.spaces import Box, Product, Space
from ident3d.von_mises_fisher import VonMisesFisher

__all__ = ["Change", "Joint", "Share", "columns_of", "conditional", "share_of"]


class Joint(Distribution):
    """Independent laws over the parts of a Product.

    Args:
        parts: the law of each part.

    Example:
        >>> law = Joint(Uniform(Box(3)), Normal(Box(2), 0.1))
        >>> law.sample(4, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([4, 5])
    """

    def __init__(self, *parts: Distribution) -> None:
        if not parts or not all(isinstance(part, Distribution) for part in parts):
            raise SpecError(f"Joint of {parts!r}: expected at least one law")
        self.parts = parts
        self.space: Product = Product(*(part.space for part in parts))
        self.centred = any(part.centred for part in parts)
        starts = itertools.accumulate((part.space.dim for part in parts), initial=0)
        self.shared = tuple(s + c for s, part in zip(starts, parts, strict=False) for c in part.shared)

    @property
    def text(self) -> str:
        """The texts of the parts."""
        return f"joint({', '.join(part.text for part in self.parts)})"

    @property
    def loc(self) -> tuple[float, ...]:
        """The centres of the parts, one after the other."""
        return tuple(value for part in self.parts for value in part.loc)

    def sample(
        self, n: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n dim"]:
        """`n` points, part by part."""
        return torch.cat([part.sample(n, generator=generator, dtype=dtype) for part in self.parts], dim=-1)

    def around(
        self, z: Float[Tensor, "n dim"], *, generator: torch.Generator, check: bool = True
    ) -> Float[Tensor, "n dim"]:
        """One z~ for each z, part by part."""
        if check:
            self.check(z)
        pieces = zip(self.parts, self.space.split(z), strict=True)
        return torch.cat([part.around(y, generator=generator, check=False) for part, y in pieces], dim=-1)

    def log_prob(self, x: Float[Tensor, "n dim"], z: Float[Tensor, "*n dim"] | None = None) -> Float[Tensor, " n"]:
        """The sum of the parts' log densities."""
        around: Sequence[Tensor | None] = [None] * len(self.parts) if z is None else self.space.split(z)
        pieces = zip(self.parts, self.space.split(x), around, strict=True)
        return torch.stack([part.log_prob(y, c) for part, y, c in pieces]).sum(0)


class _Resampled(Distribution):
    """z~ keeps some coordinates of z, bit by bit, and draws the others uniformly. Without a density."""

    def __init__(self, space: Box) -> None:
        if not isinstance(space, Box):
            raise SpecError(f"{type(self).__name__.lower()} over {space!r}: expected a Box")
        self.space: Box = space

    def around(
        self, z: Float[Tensor, "n dim"], *, generator: torch.Generator, check: bool = True
    ) -> Float[Tensor, "n dim"]:
        """One z~ for each z."""
        if check:
            self.check(z)
        return self.from_uniforms(z, exact_uniforms(len(z), self.uniforms, generator=generator))

    def _fresh(self, z: Tensor, u: Tensor) -> Tensor:
        return Uniform(self.space).from_uniforms(z, u[:, : self.space.dim])


class Share(_Resampled):
    """z~ shares the chosen factors with z; all others are drawn again from the uniform law.

    Pairs of this kind are those of weakly supervised disentanglement, and of content and style (von Kügelgen et al.
    2021).

    Args:
        space: a Box.
        columns: which coordinates are shared; at least one, and not all.
        names: the factors' names, for the text.

    Raises:
        SpecError: none, all, or unknown columns.

    Example:
        >>> law = Share(Box(3), [0])
        >>> z = torch.tensor([[0.25, 0.5, 0.75]])
        >>> law.around(z, generator=torch.Generator().manual_seed(0))[0, 0]
        tensor(0.2500)
    """

    def __init__(self, space: Box, columns: Sequence[int], names: Sequence[str] | None = None) -> None:
        super().__init__(space)
        self.shared = _checked("share", columns, space.dim)
        if len(self.shared) == space.dim:
            raise SpecError(f"share of all {space.dim} factors: expected fewer, for z~ would be z itself")
        self.names = tuple(names) if names is not None else None
        self.uniforms = space.dim

    @property
    def text(self) -> str:
        """`share(NAME, ...)`."""
        return f"share({', '.join(self.names or map(str, self.shared))})"

    def from_uniforms(self, z: Float[Tensor, "n dim"], u: Float[Tensor, "n uniforms"]) -> Float[Tensor, "n dim"]:
        """Uniform numbers, with the shared columns of z put in."""
        fresh = self._fresh(z, u)
        columns = list(self.shared)
        fresh[:, columns] = z[:, columns]
        return fresh


class Change(_Resampled):
    """z~ differs from z in exactly k factors, chosen anew for each pair; those are drawn from the uniform law.

    Sparse changes are what Locatello et al. 2020 and Klindt et al. 2021 build on.

    Args:
        space: a Box.
        k: how many factors change, at least 1.
        columns: the coordinates that may change; all by default. A factor that a scene holds cannot.

    Raises:
        SpecError: k below 1 or above the number of columns; unknown columns.
    """

    def __init__(self, space: Box, k: int, columns: Sequence[int] | None = None) -> None:
        super().__init__(space)
        self.columns = _checked("change", range(space.dim) if columns is None else columns, space.dim)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(self.columns):
            raise SpecError(f"change of k = {k!r} factors: expected 1 to {len(self.columns)}")
        self.k = k
        # One number a coordinate for its value, another for its lot.
        self.uniforms = 2 * space.dim

    @property
    def text(self) -> str:
        """`change(k=...)`."""
        return f"change(k={self.k})"

    def from_uniforms(self, z: Float[Tensor, "n dim"], u: Float[Tensor, "n uniforms"]) -> Float[Tensor, "n dim"]:
        """The k columns whose lots are least take uniform numbers; the others are those of z."""
        columns = torch.tensor(self.columns, device=z.device)
        lots = u[:, self.space.dim :][:, columns]
        chosen = columns[lots.topk(self.k, dim=-1, largest=False).indices]
        return z.scatter(1, chosen, self._fresh(z, u).gather(1, chosen))


def _checked(what: str, columns: Sequence[int], dim: int) -> tuple[int, ...]:
    chosen = tuple(columns)
    if not chosen:
        raise SpecError(f"{what} of no factor: expected at least one")
    if any(isinstance(c, bool) or not isinstance(c, int) or not 0 <= c < dim for c in chosen):
        raise SpecError(f"{what} of columns {list(chosen)!r}: expected whole numbers from 0 to {dim - 1}")
    if len(set(chosen)) < len(chosen):
        raise SpecError(f"{what} of columns {list(chosen)!r}: one is named twice")
    return chosen


def columns_of(names: Sequence[str | int], factors: Factors | None, what: str = "factors") -> tuple[int, ...]:
    """Positions in a table of factors, by name or by number.

    Args:
        names: of the factors; numbers stand for positions.
        factors: the table, or None for an array whose columns have no names.
        what: the argument's name, for the message.

    Raises:
        SpecError: a text in place of a list, an unknown name.
    """
    if isinstance(names, str):
        raise SpecError(f"{what}={names!r}: expected a list of names, e.g. [{names!r}]")
    columns: list[int] = []
    for name in names:
        if isinstance(name, str) and factors is None:
            raise SpecError(f"{what}: {name!r} given for an array, whose columns have no names; give their numbers")
        if isinstance(name, str) and factors is not None:
            name = factors.names.index(factors.get(name).name)
        if isinstance(name, bool) or not isinstance(name, Integral):
            raise SpecError(f"{what}: {name!r} is neither a name nor a column's number")
        columns.append(int(name))
    return tuple(columns)


def share_of(space: Space, *names: str | int, factors: Factors | None) -> Distribution:
    """`Share` of columns by name or number.

    Raises:
        SpecError: as of `Share`, or an unknown name.
    """
    columns = columns_of(names, factors, "share")
    free = {i for i, f in enumerate(factors or ()) if f.frozen is None}
    if free and free <= set(columns):
        raise SpecError(f"share of all {len(free)} factors that vary: expected fewer, for z~ would be z itself")
    known = factors is not None and all(0 <= c < len(factors) for c in columns)
    labels = [factors.names[c] for c in columns] if factors is not None and known else None
    return Share(space, columns, labels)  # type: ignore[arg-type]


def _change(space: Space, k: int, *, factors: Factors | None) -> Distribution:
    free = None if factors is None else [i for i, f in enumerate(factors) if f.frozen is None]
    return Change(space, k, free)  # type: ignore[arg-type]


def _plain(law: Callable[..., Distribution]) -> Callable[..., Distribution]:
    return lambda space, *args, factors, **kwargs: law(space, *args, **kwargs)


LAWS: dict[str, Callable[..., Distribution]] = {
    "uniform": _plain(Uniform),
    "normal": _plain(Normal),
    "laplace": _plain(Laplace),
    "gennorm": _plain(GeneralizedNormal),
    "vmf": _plain(VonMisesFisher),
    "share": share_of,
    "change": _change,
}
MAX_TEXT = 1000
FORMS = (
    "normal(scale=0.05), laplace(scale=0.05), gennorm(scale=0.05, beta=3), vmf(kappa=10), uniform(), "
    "share(object_hue, ...) or change(k=1)"
)


def conditional(law: str | Distribution, space: Space, factors: Factors | None = None) -> Distribution:
    """A conditional from its text, for latents of a space.

    Args:
        law: `normal(scale=S)`, `laplace(scale=S)`, `gennorm(scale=S, beta=B)`, `vmf(kappa=K)`, `uniform()`,
            `share(NAME, ...)` or `change(k=K)`; a scale is a number or a list, one a factor, in the latents' units.
            Or a law that is made already, which is returned.
        space: where the latents live.
        factors: the names of the latents' columns.

    Raises:
        SpecError: an unknown law or parameter, a value out of range, a law over another space, or one with a centre of
            its own.

    Example:
        >>> conditional("laplace(scale=0.05)", Box(10))
        laplace(scale=0.05) over Box(10)
    """
    made = _parse(law, space, factors) if isinstance(law, str) else law
    if not isinstance(made, Distribution):
        raise SpecError(f"conditional {law!r}: expected one of {FORMS}, or a distribution")
    if repr(made.space) != repr(space):
        raise SpecError(f"conditional {made!r}: the latents live in {space!r}")
    if made.centred:
        raise SpecError(f"conditional {made.text}: it is centred on each z; leave out loc")
    return made


def _parse(text: str, space: Space, factors: Factors | None) -> Distribution:
    if len(text) > MAX_TEXT:
        raise SpecError(f"conditional {text[:50]!r}...: {len(text)} characters; expected one of {FORMS}")
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("not of the form name(parameter=value)")
        name = call.func.id
        args = [_value(node) for node in call.args]
        kwargs = {word.arg or "**": _value(word.value) for word in call.keywords}
        if len(kwargs) < len(call.keywords):
            raise ValueError("a parameter is given twice")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise SpecError(f"conditional {text!r}: {error}; expected one of {FORMS}") from None
    if name not in LAWS:
        raise SpecError(f"conditional {text!r}: unknown law {name!r}; expected one of {FORMS}")
    try:
        return LAWS[name](space, *args, factors=factors, **kwargs)
    except SpecError as error:
        raise SpecError(f"conditional {text!r}: {error}") from None
    except TypeError as error:
        reason = str(error).split("() ")[-1]
        raise SpecError(f"conditional {text!r}: {reason}; expected one of {FORMS}") from None


def _value(node: ast.expr) -> Any:
    """A literal, or a bare name as a text.

    Raises:
        ValueError: anything else.
    """
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        raise ValueError(f"{ast.unparse(node)} is not a number, a list of numbers or a name") from None

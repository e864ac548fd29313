"""Samples that share their categorical factors: pairs stay within them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from ident3d.datasets.matching import Nearest
from ident3d.datasets.serving import Array
from ident3d.errors import SpecError
from ident3d.factors import FactorTable

__all__ = ["GroupedNearest", "Groups", "groups_of"]


class Groups:
    """A partition of samples.

    Args:
        names: the categorical factors that the members of a group share.
        values: of these, by sample, int64 (N, len(names)).

    Attributes:
        names: as given.
        ids: the group of every sample, int64 (N,).
        count: how many groups there are.
    """

    def __init__(self, names: tuple[str, ...], values: Int64[Array, "samples names"]) -> None:
        self.names = names
        self.values, ids = np.unique(values, axis=0, return_inverse=True)
        self.ids: Int64[Array, " samples"] = ids.reshape(-1).astype(np.int64)
        self.count = len(self.values)

    def rows(self, group: int) -> Int64[Array, " members"]:
        """The samples of a group, in order."""
        return np.flatnonzero(self.ids == group)

    def label(self, group: int) -> str:
        """What a group is, in a word that no other partition of the same samples uses: for files."""
        return "-".join(f"{name}={value}" for name, value in zip(self.names, self.values[group], strict=True))

    def check(self) -> None:
        """Refuse a group in which a sample has no other to be paired with.

        Raises:
            SpecError: a group of one.
        """
        alone = np.flatnonzero(np.bincount(self.ids) < 2)
        if len(alone):
            which = ", ".join(f"{n} = {v}" for n, v in zip(self.names, self.values[alone[0]], strict=True))
            raise SpecError(
                f"only one sample has {which}: pairs within {', '.join(self.names)} need at least 2; name fewer "
                "factors by within=[...], or none by within=()"
            )


def groups_of(data: Any, within: Sequence[str] | None) -> Groups | None:
    """The groups that a dataset's pairs stay within.

    Args:
        data: a dataset, or an array, which has no categorical factors.
        within: names of categorical factors; None for all, empty for none.

    Raises:
        SpecError: a bare text, or a name that is no categorical factor of the dataset.
    """
    if isinstance(within, str):
        raise SpecError(f"within={within!r}: expected a list of names, e.g. [{within!r}]")
    table = getattr(data, "factors", None)
    kinds = table.categorical if isinstance(table, FactorTable) else ()
    known = [kind.name for kind in kinds]
    for name in within or ():
        if name not in known:
            raise SpecError(f"within: {name!r} is no categorical factor; there are {', '.join(known) or 'none'}")
    names = tuple(known if within is None else within)
    if not names:
        return None
    assert isinstance(table, FactorTable)
    groups = Groups(names, table.categories[:, [known.index(name) for name in names]])
    return groups if groups.count > 1 else None


class GroupedNearest:
    """Nearest samples out of the anchor's group: one index a group, made when first needed.

    Args:
        groups: of all samples.
        make: an index over some samples, of a group's number and its samples.
    """

    def __init__(self, groups: Groups, make: Callable[[int, Int64[Array, " members"]], Nearest]) -> None:
        self.groups, self.make = groups, make
        self._indices: dict[int, tuple[Nearest, Array]] = {}

    def __call__(
        self, queries: Float32[Array, "n d"], anchors: Int64[Array, " n"], *, allow_self: bool
    ) -> tuple[Float64[Array, " n"], Int64[Array, " n"]]:
        """Squared distance and number of the sample that is nearest to each query, in its anchor's group.

        Args:
            queries: coordinates.
            anchors: the sample that each query was drawn around.
            allow_self: whether that may be the nearest itself.
        """
        square, found = np.empty(len(queries), np.float64), np.empty(len(queries), np.int64)
        wanted = self.groups.ids[anchors]
        for group in np.unique(wanted).tolist():
            if group not in self._indices:
                rows = self.groups.rows(group)
                self._indices[group] = self.make(group, rows), rows
            index, rows = self._indices[group]
            mine = np.flatnonzero(wanted == group)
            exclude = None if allow_self else np.searchsorted(rows, anchors[mine])
            square[mine], place = index(np.ascontiguousarray(queries[mine]), exclude)
            found[mine] = rows[place]
        return square, found

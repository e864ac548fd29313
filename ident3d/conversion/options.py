"""What `ident3d convert` is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from ident3d.conversion.encoding import FORMATS
from ident3d.conversion.plan import PUBLISHED, TARGETS
from ident3d.errors import SpecError
from ident3d.render.plan import MAX_SHARD
from ident3d.shards.location import is_url
from ident3d.workers import cores, count_workers

__all__ = ["ConvertOptions"]

ON_ERROR = ("raise", "skip")


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert, and into what. Checked when made, so that a mistake costs no time.

    Attributes:
        src: a folder of 3DIdent, Causal3DIdent, Multimodal3DIdent or Temporal Causal3DIdent as published, or a dataset
            in shards: its folder or URL.
        out: the folder to write: new, empty, or one that this conversion began.
        to: shards, or published: the layout that the dataset had when it was published, for a rendered one 3DIdent's.
        format: keep the pictures' bytes, or encode them anew, without loss, as png or webp.
        splits: the splits to convert; all by default.
        shard_size: samples a shard; by default 1,000, fewer for small splits, and for shards what they had.
        on_error: raise at a damaged sample, or skip it: leave it out, number those behind it anew, and say so.
        workers: threads that read, check and encode, or `auto`: one a core.
        quiet: no progress bar.
    """

    src: Positional[Annotated[str | Path, arg(metavar="SRC")]]
    out: Positional[Annotated[Path, arg(metavar="OUT")]]
    to: Literal["shards", "published"] = "shards"
    format: Literal["keep", "png", "webp"] = "keep"
    splits: Annotated[tuple[str, ...] | None, arg(metavar="NAME ...")] = None
    shard_size: Annotated[int | None, arg(metavar="N")] = None
    on_error: Literal["raise", "skip"] = "raise"
    workers: Annotated[str | int, arg(metavar="auto|N")] = "auto"
    quiet: FlagCreatePairsOff[bool] = False

    def __post_init__(self) -> None:
        # Texts will do for paths, from Python too.
        object.__setattr__(self, "out", Path(self.out))
        if not is_url(str(self.src)):
            object.__setattr__(self, "src", Path(self.src))
        for name, known in (("to", TARGETS), ("format", FORMATS), ("on_error", ON_ERROR)):
            if getattr(self, name) not in known:
                raise SpecError(f"{name} = {getattr(self, name)!r}: expected {', '.join(known)}")
        if isinstance(self.splits, str) or (self.splits is not None and not self.splits):
            raise SpecError(f"splits = {self.splits!r}: expected names, e.g. ('train',), or None for all")
        if self.shard_size is not None and not 1 <= self.shard_size <= MAX_SHARD:
            raise SpecError(f"shard_size = {self.shard_size}: expected 1 to {MAX_SHARD:,}")
        count_workers(self.workers)
        self._check_published()
        self._check_apart()

    def _check_published(self) -> None:
        if self.to != PUBLISHED:
            return
        if self.format == "webp":
            raise SpecError("format = 'webp': the published layouts hold PNG; leave it out with to='published'")
        if self.shard_size is not None:
            raise SpecError(f"shard_size = {self.shard_size}: the published layouts have no shards; leave it out")
        if self.on_error == "skip":
            raise SpecError("on_error = 'skip': leave damaged samples out on the way to shards, then convert those")

    def _check_apart(self) -> None:
        if not isinstance(self.src, Path):
            return
        a, b = self.src.resolve(), self.out.resolve()
        if a == b or a in b.parents or b in a.parents:
            raise SpecError(f"out = {self.out}: expected a folder apart from src = {self.src}")

    @property
    def count(self) -> int:
        """How many workers."""
        return count_workers(self.workers) or cores()

"""The progress bar of a render: pictures done, pictures a second, time left."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from tqdm import tqdm

__all__ = ["Progress"]


class Progress:
    """Counts pictures as workers report them.

    Args:
        total: pictures of the split.
        stored: pictures that were in place before; they do not count as speed.
        unit: `pictures`, or `pairs` of them.
        quiet: no bar. There is none either where stderr is no terminal.
    """

    def __init__(self, total: int, stored: int, unit: str, *, quiet: bool) -> None:
        self._bar: tqdm[Any] = tqdm(
            total=total, initial=stored, unit=f" {unit}", disable=True if quiet else None, smoothing=0.05
        )
        self._stored = stored
        self._reached: dict[int, int] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    @property
    def done(self) -> int:
        """Pictures in place now."""
        return self._stored + sum(self._reached.values())

    def picture(self, shard: int, place: int, *, kept: bool) -> None:
        """A picture is in place.

        Args:
            shard: its shard.
            place: its place in the shard; a worker that starts a shard again reports from 0.
            kept: it was found there, not rendered.
        """
        before = self._reached.get(shard, 0)
        self._reached[shard] = max(before, place + 1)
        if kept and not self._bar.disable:
            self._bar.initial += 1
        self._bar.update(self._reached[shard] - before)

    def note(self, text: str) -> None:
        """Words behind the bar."""
        self._bar.set_postfix_str(text)

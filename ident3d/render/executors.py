"""What runs the shards of a plan: one protocol, an engine for this machine (`local`), and one for Slurm (`slurm`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ident3d.render.plan import ShardJob

__all__ = ["Executor", "Failure", "OnEvent", "Outcome", "run_shards"]

OnEvent = Callable[[dict[str, Any]], None]
"""Called in the thread that waits for outcomes, with what workers report and the shard's number in it: `picture` with a
sample's `index`, and others; see `render.worker`. A `note` has a `text` for the progress bar instead."""


@dataclass(frozen=True)
class Failure:
    """What of a shard could not be rendered: a sample that Blender failed at twice, or where that is None the whole of
    it; and the news."""

    shard: int
    sample: int | None
    message: str

    def __str__(self) -> str:
        what = f"shard {self.shard}" if self.sample is None else f"sample {self.sample} of shard {self.shard}"
        return f"{what}: {self.message}"


@dataclass(frozen=True)
class Outcome:
    """What became of a shard: it is finished where nothing failed."""

    shard: int
    failures: tuple[Failure, ...] = ()


class Executor(Protocol):
    """Renders shards somewhere. A job is complete in itself, so where and in what order does not matter."""

    def submit(self, job: ShardJob) -> None:
        """Take a shard. Nothing needs to start before `outcomes` is asked for."""

    def outcomes(self, on_event: OnEvent) -> Iterator[Outcome]:
        """The outcome of every shard that was submitted, as they come.

        Raises:
            Ident3DError: what makes all of the work impossible, such as a full disk.
        """

    def close(self) -> None:
        """Let go of what is held. Shards that an engine renders elsewhere may go on."""


def run_shards(
    executor: Executor,
    jobs: Sequence[ShardJob],
    on_event: OnEvent,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Failure]:
    """Run shards to their end; returns what failed. All that did not is finished.

    Raises:
        Ident3DError: what made the executor stop.
        KeyboardInterrupt: Ctrl-C.
    """
    failures: list[Failure] = []
    try:
        for job in jobs:
            executor.submit(job)
        for outcome in executor.outcomes(on_event):
            on_outcome(outcome)
            failures += outcome.failures
    finally:
        executor.close()
    return failures

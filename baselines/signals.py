"""SIGINT and SIGTERM, heeded between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Stop", "stop_signals"]


class Stop:
    """Whether SIGINT or SIGTERM asked to stop. A second one ends the process at once.

    Attributes:
        asked: the signal's name, or None.
    """

    asked: str | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """As a signal handler."""
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Note the two signals in place of what they do otherwise; outside the main thread, which gets them, do nothing."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

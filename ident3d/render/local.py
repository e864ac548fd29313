"""Shards in worker processes on this machine."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from ident3d.render.executors import Failure, OnEvent, Outcome
from ident3d.render.plan import ShardJob
from ident3d.render.process import WorkerDied, WorkerProcess

__all__ = ["LEFT", "NOT_BEGUN", "LocalExecutor"]

MOST_LEFT_OUT = 5
"""Samples of a shard that Blender may fail at before the shard is given up."""

MOST_FAILED = 20
"""Failures in all after which no further shard is begun: then it is not the samples."""

NOT_BEGUN = "not begun, after too many failures"
"""What is said of such a shard."""

LEFT = "the rest of the shard was not tried"
"""What is said of the last failure of a shard that is given up."""


class LocalExecutor:
    """An `Executor`: worker processes, and a thread each that feeds it; all events arrive in one queue.

    A crash costs the sample in flight: the shard goes on in a fresh process. A sample that two processes crash on, or
    hang at, is left out; the others of its shard are stored, and the shard stays unfinished.

    Args:
        workers: how many processes, at least 1.
        spawn: starts the process of a number; called in the thread that feeds it.
        first: the process of number 0, where it has been started already.
    """

    def __init__(self, workers: int, spawn: Callable[[int], WorkerProcess], first: WorkerProcess | None = None) -> None:
        self.count, self.spawn = workers, spawn
        self.jobs: queue.SimpleQueue[ShardJob] = queue.SimpleQueue()
        self.submitted = 0
        self.workers: dict[int, WorkerProcess] = {} if first is None else {0: first}
        self.stopping = False
        self.failed = 0
        self.lock = threading.Lock()
        self.events: queue.SimpleQueue[dict[str, Any] | Outcome | BaseException | None] = queue.SimpleQueue()

    def submit(self, job: ShardJob) -> None:
        """Take a shard; see `Executor`."""
        self.jobs.put(job)
        self.submitted += 1

    def outcomes(self, on_event: OnEvent) -> Iterator[Outcome]:
        """Render what was submitted; see `Executor`.

        Raises:
            Ident3DError: what made a worker stop.
        """
        threads = [
            threading.Thread(target=self._serve, args=(k,), daemon=True) for k in range(min(self.count, self.submitted))
        ]
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            event = self.events.get()
            if event is None:
                running -= 1
            elif isinstance(event, BaseException):
                raise event
            elif isinstance(event, Outcome):
                yield event
            else:
                on_event(event)

    def close(self) -> None:
        """Kill every worker. What they had in flight is lost, what they had written stays."""
        self.stopping = True
        with self.lock:
            workers = list(self.workers.values())
        for worker in workers:
            worker.kill()

    def _serve(self, number: int) -> None:
        """Take jobs until none is left. Ends with None in the queue, after an exception where one stopped it."""
        try:
            while not self.stopping:
                try:
                    job = self.jobs.get_nowait()
                except queue.Empty:
                    break
                failures = self._run(number, job) if self.failed < MOST_FAILED else [_not_begun(job)]
                self.failed += len(failures)
                self.events.put(Outcome(job.shard, tuple(failures)))
        except BaseException as error:
            self.events.put(error)
        finally:
            self.events.put(None)

    def _run(self, number: int, job: ShardJob) -> list[Failure]:
        """One shard, in a fresh process after each crash."""
        crashes: dict[int | None, int] = {}
        failures: list[Failure] = []
        while not self.stopping:
            sample: int | None = None
            try:
                worker = self._worker(number)
                worker.send({"shard": asdict(job)})
                for event in worker.until("shard", "tired"):
                    sample = event.get("index") if event["event"] == "start" else None
                    self.events.put({**event, "shard": job.shard})
                if event["event"] == "shard":
                    return failures
                self._drop(number)
            except WorkerDied as death:
                if self.stopping:
                    break
                self._drop(number)
                crashes[sample] = crashes.get(sample, 0) + 1
                if crashes[sample] > 1:
                    given_up = sample is not None and len(failures) + 1 == MOST_LEFT_OUT
                    words = f"{death}; {LEFT}" if given_up else str(death)
                    failures.append(Failure(job.shard, sample, words))
                    if sample is None or given_up:
                        return failures
                    job = dataclasses.replace(job, skip=(*job.skip, sample))
        return failures

    def _worker(self, number: int) -> WorkerProcess:
        with self.lock:
            worker = self.workers.get(number)
        if worker is None:
            worker = self.spawn(number)
            with self.lock:
                self.workers[number] = worker
            if self.stopping:
                worker.kill()
        return worker

    def _drop(self, number: int) -> None:
        with self.lock:
            worker = self.workers.pop(number, None)
        if worker is not None:
            worker.kill()


def _not_begun(job: ShardJob) -> Failure:
    return Failure(job.shard, None, NOT_BEGUN)

"""Running the shards of a plan in local worker processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ident3d.render.plan import ShardJob
from ident3d.render.process import WorkerDied, WorkerProcess

__all__ = ["Failure", "run_local"]


@dataclass(frozen=True)
class Failure:
    """A shard that could not be finished, the sample that Blender died on twice (None: before any), and the news."""

    shard: int
    sample: int | None
    message: str


class _Pool:
    """Worker processes, one thread each that feeds it; all events arrive in one queue."""

    def __init__(self, jobs: Sequence[ShardJob], first: WorkerProcess, spawn: Callable[[int], WorkerProcess]) -> None:
        self.jobs: queue.SimpleQueue[ShardJob] = queue.SimpleQueue()
        for job in jobs:
            self.jobs.put(job)
        self.spawn = spawn
        self.workers: dict[int, WorkerProcess] = {0: first}
        self.stopping = False
        self.lock = threading.Lock()
        self.events: queue.SimpleQueue[dict[str, Any] | BaseException | Failure | None] = queue.SimpleQueue()

    def serve(self, number: int) -> None:
        """Take jobs until none is left. Ends with None in the queue, after an exception where one stopped it."""
        try:
            while not self.stopping:
                try:
                    job = self.jobs.get_nowait()
                except queue.Empty:
                    break
                failure = self.run(number, job)
                if failure is not None:
                    self.events.put(failure)
        except BaseException as error:
            self.events.put(error)
        finally:
            self.events.put(None)

    def run(self, number: int, job: ShardJob) -> Failure | None:
        """One shard, in a fresh process after each crash; given up when two crash on the same sample."""
        crashes: dict[int | None, int] = {}
        while True:
            sample: int | None = None
            try:
                worker = self.worker(number)
                worker.send({"shard": asdict(job)})
                for event in worker.until("shard"):
                    sample = event.get("index") if event["event"] == "start" else None
                    self.events.put({**event, "shard": job.shard})
                return None
            except WorkerDied as death:
                if self.stopping:
                    return None
                self.drop(number)
                crashes[sample] = crashes.get(sample, 0) + 1
                if crashes[sample] > 1:
                    return Failure(job.shard, sample, str(death))

    def worker(self, number: int) -> WorkerProcess:
        with self.lock:
            worker = self.workers.get(number)
        if worker is None:
            worker = self.spawn(number)
            with self.lock:
                self.workers[number] = worker
            if self.stopping:
                worker.kill()
        return worker

    def drop(self, number: int) -> None:
        with self.lock:
            worker = self.workers.pop(number, None)
        if worker is not None:
            worker.kill()

    def stop(self) -> None:
        """Kill every worker. What they had in flight is lost, what they had written stays."""
        self.stopping = True
        with self.lock:
            workers = list(self.workers.values())
        for worker in workers:
            worker.kill()


def run_local(
    jobs: Sequence[ShardJob],
    workers: int,
    first: WorkerProcess,
    spawn: Callable[[int], WorkerProcess],
    on_event: Callable[[dict[str, Any]], None],
) -> list[Failure]:
    """Render shards in `workers` processes.

    Args:
        jobs: the shards.
        workers: how many processes, at least 1.
        first: the first of them, already started.
        spawn: starts the process of a number; called in the thread that feeds it.
        on_event: called in this thread with every event of every worker, with the shard's number in it.

    Returns:
        The shards that were given up because Blender crashed on a sample twice. All others are finished.

    Raises:
        Ident3DError: what made a worker stop; the other workers are killed.
        KeyboardInterrupt: Ctrl-C; all workers are killed.
    """
    pool = _Pool(jobs, first, spawn)
    threads = [threading.Thread(target=pool.serve, args=(k,), daemon=True) for k in range(min(workers, len(jobs)))]
    failures: list[Failure] = []
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            event = pool.events.get()
            if event is None:
                running -= 1
            elif isinstance(event, BaseException):
                raise event
            elif isinstance(event, Failure):
                failures.append(event)
            else:
                on_event(event)
    finally:
        pool.stop()
    return failures

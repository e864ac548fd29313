"""`ident3d render OUT --status`: how far a render is, from what it left on disk and from Slurm's queue."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from ident3d.errors import DatasetError
from ident3d.render.folder import RenderFolder
from ident3d.render.plan import RenderPlan
from ident3d.render.slurm_queue import Job, Rounds, in_hand, in_words, job_states, own_jobs, read_queue, reasons
from ident3d.render.states import ShardState, read_states
from ident3d.render.work import missing_shards, ranges

__all__ = ["status_text"]

MOST_LINES = 20


def status_text(root: Path) -> str:
    """The state of every split of a folder, in lines.

    Raises:
        DatasetError: no dataset there, finished or in progress.
    """
    folder = RenderFolder(root)
    plans = folder.plans()
    if not plans:
        raise DatasetError(f"{root}: no render there, finished or in progress")
    manifest = folder.manifest()
    lines: list[str] = []
    for split, plan in plans.items():
        if manifest is not None and split in manifest.splits:
            lines.append(f"{root}, split {split}: finished, {plan.samples:,} samples in {plan.shards:,} shards")
        else:
            lines += _in_progress(folder, plan)
    return "\n".join(lines)


def _in_progress(folder: RenderFolder, plan: RenderPlan) -> list[str]:
    work = folder.work(plan.split)
    missing = missing_shards(plan, folder.root)
    unfinished = set(missing)
    states = {shard: state for shard, state in read_states(work).items() if shard in unfinished}
    rounds = Rounds(work, folder.root, plan.split).read()
    queue = read_queue(rounds)
    hands = {shard: place for shard, place in in_hand(rounds, queue or {}).items() if shard in unfinished}
    counts = job_states(queue or {}, hands, states)
    lines = []
    alive = _alive([state for shard, state in states.items() if shard not in hands])
    for shard, state in sorted(states.items()):
        if state.state == "failed":
            counts["failed"] += shard not in hands
            lines += [f"  failed: {failure}" for failure in state.failures]
        elif shard not in hands:
            counts["running" if shard in alive else "stopped"] += 1
        if shard in hands or state.state == "running":
            job = queue[hands[shard]] if queue and shard in hands else None
            lines.append(f"  {_line(state, job, alive=shard in alive)}")
    counts["not begun"] = len(missing) - counts.total()
    whole = sum(stop - start for start, stop in map(plan.bounds, set(range(plan.shards)) - unfinished))
    done = whole + sum(state.done for state in states.values())
    words = [f"{plan.shards - len(missing)} finished", in_words(counts, reasons(queue or {}, hands, states))]
    words += [f"{counts[name]} {name}" for name in ("stopped", "not begun") if counts[name]]
    head = [
        f"{folder.root}, split {plan.split}: {done:,} of {plan.samples:,} samples",
        f"  {plan.shards:,} shards: {', '.join(filter(None, words))}",
    ]
    if queue is None:
        head.append("  Slurm does not answer: what its jobs do is not known")
    return head + lines[:MOST_LINES] + _last_words(folder.root, plan, missing, len(lines) - MOST_LINES)


def _last_words(root: Path, plan: RenderPlan, missing: list[int], more: int) -> list[str]:
    lines = [f"  ... and {more} shards more"] if more > 0 else []
    if not missing:
        option = "" if plan.split == "train" else f" --split {plan.split}"
        lines.append(f"  all shards are there: ident3d finalize {root}{option}")
    elif len(missing) < plan.shards:
        lines.append(f"  missing: shards {ranges(missing)[:200]}")
    return lines


def _alive(states: list[ShardState]) -> set[int]:
    """The shards whose processes, which no job of a round runs, may still be there."""
    jobs = own_jobs() if any(state.job for state in states) else None
    return {state.shard for state in states if (state.job in jobs if jobs is not None and state.job else _there(state))}


def _there(state: ShardState) -> bool:
    """Whether the process that wrote a state is there: one on another machine is believed to be."""
    if state.host != socket.gethostname():
        return True
    try:
        os.kill(state.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _line(state: ShardState, job: Job | None, *, alive: bool) -> str:
    process = f"job {state.job}" if state.job else f"process {state.pid}"
    where = f"running, {process} on {state.host}" if alive else f"stopped, was {process} on {state.host}"
    if job is not None:
        where = f"job {job.id} {job.state}, last on {state.host}"
    age = max(0, time.time() - state.updated)
    heard = f", last heard of {age / 60:,.0f} minutes ago" if age > 120 else ""
    tries = f", attempt {state.attempts}" if state.attempts > 1 else ""
    return f"shard {state.shard}: {state.done} of {state.samples} samples ({where}{tries}{heard})"

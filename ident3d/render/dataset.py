"""`ident3d render` and `ident3d finalize`: from options to a dataset, or to a folder that is finished later."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
from numpy.typing import NDArray

from ident3d.errors import BusyError, DatasetError, RenderError, SpecError
from ident3d.render.crew import CrewOptions
from ident3d.render.disk import check_disk
from ident3d.render.executors import Executor, Failure
from ident3d.render.folder import RenderFolder
from ident3d.render.latents import load_user_latents
from ident3d.render.local import LEFT, NOT_BEGUN
from ident3d.render.options import RenderOptions, parse_shards
from ident3d.render.plan import RenderPlan, ShardJob
from ident3d.render.process import blender_python
from ident3d.render.slurm import SlurmExecutor, check_slurm
from ident3d.render.work import LOCK_SECONDS, SplitWork, make_crew, ranges
from ident3d.scenes import Scene, load_scene
from ident3d.shards.manifest import Manifest

__all__ = ["Interrupted", "finalize", "render_dataset", "render_part", "render_shards", "sigterm_stops"]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during a render; its text says what is stored and how to go on.

    Attributes:
        status: the exit status that tells of it.
    """

    status = 130

    @classmethod
    def by(cls, stop: KeyboardInterrupt, text: str) -> Interrupted:
        """One that tells of an interrupt, and what that one says itself."""
        told = cls(f"{text}; {stop}" if str(stop) else text)
        told.status = getattr(stop, "status", cls.status)
        return told


class _Terminated(KeyboardInterrupt):
    """SIGTERM."""

    status = 143


@contextmanager
def sigterm_stops() -> Iterator[None]:
    """Make SIGTERM end a render as Ctrl-C does; outside the main thread, which gets signals, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _told_how_to_go_on(out: Path) -> Iterator[None]:
    """Give words to an interrupt before the first picture or after the last, which has none."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as stop:
        text = f"interrupted: {out} is not finished; run the same command to go on"
        raise Interrupted.by(stop, text) from None


def render_dataset(options: RenderOptions) -> Manifest:
    """Render one split into a dataset, going on where an earlier call with the same options stopped.

    Returns:
        The dataset's manifest, when every sample of the split is in place.

    Raises:
        SpecError: options that cannot be, or that differ from what the folder was begun with.
        DatasetError: a folder that is something else or cannot be written.
        BusyError: another render is at work there.
        RenderError: Blender is absent or failed, the disk is full, or Slurm refused. What is finished stays.
        Interrupted: Ctrl-C or SIGTERM. What is finished stays.
    """
    if options.shards is not None:
        raise SpecError(f"shards = {options.shards!r}: a part makes no dataset; use render_part, then finalize")
    asked = _Asked(options)
    manifest = _already_done(asked.folder, asked.plan)
    if manifest is not None:
        return manifest
    if options.executor == "slurm":
        check_slurm()
    asked.folder.create()
    with sigterm_stops(), asked.folder.disk_errors(), _told_how_to_go_on(options.out):
        return _on_slurm(asked) if options.executor == "slurm" else _here(asked)


class _Asked:
    """What a call asks for, checked against what its folder holds; nothing is made."""

    def __init__(self, options: RenderOptions) -> None:
        self.options = options
        self.scene: Scene = load_scene(options.scene)
        self.given: NDArray[np.float32] | None = None
        if options.latents is not None:
            self.given = load_user_latents(options.latents, self.scene.spec)
        self.plan = options.plan(self.scene, self.given)
        blender_python(options.blender_python)
        self.folder = RenderFolder(options.out)
        self.folder.check(self.plan, ignore=("device", "blender"))

    def crew(self) -> CrewOptions:
        """What workers are told; of the device that the folder's pictures were rendered by, unless one is named."""
        options, plans = self.options.crew(), self.folder.plans()
        if options.device != "auto" or not plans:
            return options
        return dataclasses.replace(options, device=next(iter(plans.values())).device.lower())

    def check_disk(self) -> None:
        """Refuse what cannot fit; otherwise say what will be needed, where there will be a progress bar too."""
        text = check_disk(self.folder.root, self.plan)
        if not self.options.quiet and sys.stderr.isatty():
            print(text, file=sys.stderr)

    def begin(self, device: str, blender: str) -> SplitWork:
        """Put all on disk that the pictures are rendered from, under the folder's lock."""
        self.plan = dataclasses.replace(self.plan, device=device, blender=blender)
        self.folder.check(self.plan)
        return SplitWork.begin(self.folder, self.scene, self.plan, self.given)


def _here(asked: _Asked) -> Manifest:
    """The whole split by workers of this machine."""
    with asked.folder.lock() as lock:
        if (done := _already_done(asked.folder, asked.plan)) is not None:
            return done
        asked.check_disk()
        crew = make_crew(asked.crew(), asked.plan, asked.scene, asked.folder, (lock,))
        try:
            work = asked.begin(crew.first.device, crew.first.blender)
            work.note_gpu(crew.first.model)
            _render(work, work.unfinished(), work.jobs, crew.executor(), quiet=asked.options.quiet)
        finally:
            crew.close()
        return work.finish()


def _on_slurm(asked: _Asked) -> Manifest:
    """The whole split by Slurm jobs, which this process submits and waits for."""
    options = asked.options
    device = options.device.upper() if options.slurm.gpus else "CPU"
    with SlurmExecutor.hold(asked.folder, asked.plan.split):
        # A call that goes on finds jobs at work, which share the folder.
        try:
            work = SplitWork.open(asked.folder, asked.plan.split)
            asked.folder.check(dataclasses.replace(asked.plan, device=device), ignore=("blender",))
        except DatasetError:
            with asked.folder.lock(wait=LOCK_SECONDS):
                asked.check_disk()
                work = _begin_by_a_look(asked, device)
        executor = SlurmExecutor(work, options.slurm, options.crew())
        _render(work, executor.unfinished(), work.jobs, executor, quiet=options.quiet, record=False)
        with asked.folder.lock(wait=LOCK_SECONDS):
            return _already_done(asked.folder, asked.plan) or work.finish()


def _begin_by_a_look(asked: _Asked, device: str = "") -> SplitWork:
    """Begin a split with what a first worker tells of device and Blender; it holds no lock and is ended."""
    look = dataclasses.replace(asked.options.crew(), device="cpu") if device else asked.crew()
    crew = make_crew(look, asked.plan, asked.scene, asked.folder, ())
    try:
        return asked.begin(device or crew.first.device, crew.first.blender)
    finally:
        crew.close()


def render_part(options: RenderOptions) -> list[int]:
    """Render some shards of a split, and nothing else: what a scheduler of any kind can be given.

    Several calls may work on one folder at a time, from any machine that shares it.

    Returns:
        The shards of the split that are still missing.

    Raises:
        SpecError: options that cannot be, or that differ from what the folder was begun with; another device or version
            of Blender than the other shards'.
        DatasetError: a folder that is something else, cannot be written, or holds no plan where none is asked for.
        BusyError: another process renders one of the shards, or the whole split.
        RenderError: Blender is absent or failed, or the disk is full. What is finished stays.
        Interrupted: Ctrl-C or SIGTERM. What is finished stays.
    """
    if options.shards is None:
        raise SpecError("shards: missing; say which, such as 3-7")
    folder = RenderFolder(options.out)
    asked = _Asked(options) if options.samples is not None or options.latents is not None else None
    plan = folder.plans().get(options.split) if asked is None else asked.plan
    if plan is not None and _already_done(folder, plan) is not None:
        return []
    with sigterm_stops(), folder.disk_errors(), _told_how_to_go_on(options.out):
        if asked is not None:
            folder.create()
            _prepare(asked)
        work = SplitWork.open(folder, options.split)
        shards = parse_shards(options.shards, work.plan.shards)
        failures = render_shards(folder, options.split, shards, options.crew(), quiet=options.quiet)
    if failures:
        raise _failed(failures)
    return work.missing()


def _prepare(asked: _Asked) -> None:
    """Put a split's plan and latents on disk, unless another part has, or does so meanwhile and goes on to render."""
    with asked.folder.disk_errors():
        for left in reversed(range(LOCK_SECONDS)):
            try:
                SplitWork.open(asked.folder, asked.plan.split)
                return
            except DatasetError:
                pass
            try:
                with asked.folder.lock(wait=1):
                    asked.check_disk()
                    _begin_by_a_look(asked)
                    return
            except BusyError:
                if not left:
                    raise


def render_shards(
    folder: RenderFolder, split: str, shards: Sequence[int], options: CrewOptions, *, quiet: bool
) -> list[Failure]:
    """Render the shards of a split in progress that are not in place, by workers of this machine.

    Returns:
        What failed.

    Raises:
        Ident3DError: see `render_part`.
    """
    with folder.lock(shared=True, wait=LOCK_SECONDS) as lock:
        work = SplitWork.open(folder, split)
        with work.hold(shards) as locks:
            among = [work.jobs[k] for k in shards]
            todo = work.unfinished(shards)
            if not todo:
                return []
            name = f"{split}-{todo[0].shard:06d}-worker"
            crew = work.crew(options, (lock, *locks), name)
            try:
                failures = _run(work, todo, among, crew.executor(), quiet=quiet)
            finally:
                crew.close()
            if not failures:
                crew.remove_logs()
            return failures


def _render(
    work: SplitWork,
    todo: Sequence[ShardJob],
    among: Sequence[ShardJob],
    executor: Executor,
    *,
    quiet: bool,
    record: bool = True,
) -> None:
    """Render shards, with a progress bar; what failed is raised."""
    failures = _run(work, todo, among, executor, quiet=quiet, record=record)
    if failures:
        raise _failed(failures)


def _run(
    work: SplitWork,
    todo: Sequence[ShardJob],
    among: Sequence[ShardJob],
    executor: Executor,
    *,
    quiet: bool,
    record: bool = True,
) -> list[Failure]:
    """Render shards, with a progress bar; returns what failed."""
    with work.progress(todo, among, quiet=quiet) as progress:
        try:
            return work.run(todo, executor, progress, record=record)
        except KeyboardInterrupt as stop:
            raise _interrupted(work, progress.done, among, stop) from None


def _interrupted(work: SplitWork, done: int, among: Sequence[ShardJob], stop: KeyboardInterrupt) -> Interrupted:
    unit = "pairs" if work.plan.pairs else "pictures"
    total = sum(job.stop - job.start for job in among)
    text = f"interrupted: {done} of {total} {unit} are stored in {work.folder.root}; run the same command to go on"
    return Interrupted.by(stop, text)


def _failed(failures: Iterable[Failure]) -> RenderError:
    found = sorted(failures, key=lambda f: (f.shard, f.sample or 0))
    lines = [str(failure) for failure in found if failure.message != NOT_BEGUN]
    idle = [failure.shard for failure in found if failure.message == NOT_BEGUN]
    if idle:
        lines.append(f"shards {ranges(idle)}: {NOT_BEGUN}")
    rest = "what else was tried" if idle or any(LEFT in line for line in lines) else "all else"
    return RenderError(f"what could not be rendered, though tried again; {rest} is stored:\n" + "\n".join(lines))


def finalize(root: Path, split: str = "train", *, quick: bool = False) -> Manifest:
    """Make a dataset of shards that were rendered in parts: index, latents, card, and the manifest last.

    Args:
        root: the dataset's folder.
        split: train, val or test.
        quick: believe what was noted of each shard when it was written, if its size is the same, and do not read it
            again; `verify` does so whenever you like.

    Returns:
        The dataset's manifest. A split that is finished already is left as it is.

    Raises:
        DatasetError: no such split is in progress there, or shards are missing or damaged, which are named.
        BusyError: a render is at work there.
        RenderError: the disk is full.
    """
    folder = RenderFolder(root)
    plan = folder.plans().get(split)
    manifest = None if plan is None else _already_done(folder, plan)
    if manifest is not None:
        return manifest
    if plan is not None:
        folder.create()
        # Not beside a process that waits for Slurm's jobs to do the same.
        with folder.disk_errors(), SlurmExecutor.hold(folder, split), folder.lock():
            return _already_done(folder, plan) or SplitWork.open(folder, split).finish(quick=quick)
    return SplitWork.open(folder, split).finish()  # which says that there is none


def _already_done(folder: RenderFolder, plan: RenderPlan) -> Manifest | None:
    manifest = folder.manifest()
    if manifest is None or plan.split not in manifest.splits:
        return None
    # What a kill between the manifest and the end left; a dataset may be read-only.
    shutil.rmtree(folder.work(plan.split), ignore_errors=True)
    for shard in manifest.splits[plan.split].shards:
        path = folder.root / plan.split / shard.name
        if not path.is_file() or path.stat().st_size != shard.bytes:
            raise DatasetError(f"{path}: missing or of another size; run: ident3d verify {folder.root} --repair")
    return manifest

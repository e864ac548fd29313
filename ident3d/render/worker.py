"""One process, one Blender: renders what it is told on stdin, one JSON line a command, and answers on stdout likewise.

Run by path, `python .../ident3d/render/worker.py`, under any interpreter that has bpy, numpy and Pillow: ident3d itself
need not be installed there.

Commands: first a setup (fields of `Setup`), then `{"shard": {fields of ShardJob}}` or `{"picture": {...}}`.
Events: `ready`, `start` before and `picture` after each picture, `shard` after each shard, `tired` in place of one
where the worker is to be replaced, `error` with a kind and a message.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ident3d.render.blender import Renderer
    from ident3d.render.plan import ShardJob
    from ident3d.scene import SceneSpec
    from ident3d.shards.writer import GapWriter

__all__ = ["Setup", "main"]

MAX_LOG_BYTES = 1_000_000


@dataclass(frozen=True)
class Setup:
    """What a worker needs before its first picture.

    Attributes:
        scene: the text of the spec.
        mesh: the path of its mesh.
        settings: fields of RenderSettings.
        resolution: the pictures' side in pixels.
        device: `auto`, `cpu` or a kind of GPU.
        threads: CPU threads.
        gpu: which GPU of several.
        pictures: after so many the worker asks to be replaced; 0 for never.
        memory_mb: likewise when it has come to hold so much memory; 0 for never.
    """

    scene: str
    mesh: str
    settings: dict[str, Any]
    resolution: int
    device: str
    threads: int
    gpu: int = 0
    pictures: int = 0
    memory_mb: int = 0


def _load_package() -> None:
    """Make `import ident3d` find the package that this file belongs to, and nothing else that is installed beside it.

    The user's site-packages must stay out of the path: its numpy may be built for another Python.
    """
    sys.path.pop(0)  # this file's own folder
    folder = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        "ident3d", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ident3d"] = module
    spec.loader.exec_module(module)


def _take_stdout() -> TextIO:
    """Keep stdout for events and let everything else that prints there, Blender's C code included, go to stderr."""
    events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return events


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _ignore_signals() -> None:
    """Leave it to the parent what becomes of its workers: a terminal sends Ctrl-C to the whole group, and Slurm sends
    its signals to every process of a job."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _few_cores(count: int) -> Iterator[None]:
    """Show this process so many cores while Blender starts.

    Blender's and the denoiser's thread pool (TBB) takes its size from the cores that it sees then, whatever the render
    settings say; pools as large as the machine in every worker would spend a third of it on waiting for each other.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _read_commands() -> queue.SimpleQueue[dict[str, Any]]:
    """Commands as they come. When the parent closes its end, or is gone, the process ends at once: a shard in
    progress is left as any kill would leave it."""
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def pump() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=pump, daemon=True).start()
    return commands


class _SampleFailed(Exception):
    """Blender said that it cannot render a sample, such as for want of a GPU's memory."""


class _Session:
    def __init__(self, setup: Setup, events: TextIO) -> None:
        from ident3d.render.blender import Renderer
        from ident3d.render.quality import RenderSettings
        from ident3d.scene import SceneSpec

        self.events = events
        self.resolution = setup.resolution
        self.limits = (setup.pictures, setup.memory_mb)
        self.rendered = 0
        self.path = ""
        self.spec: SceneSpec = SceneSpec.from_toml(setup.scene)
        self.renderer: Renderer = Renderer(
            self.spec,
            Path(setup.mesh),
            RenderSettings(**setup.settings),
            setup.resolution,
            setup.device,
            setup.threads,
            setup.gpu,
        )

    def send(self, event: str, **fields: Any) -> None:
        self.events.write(json.dumps({"event": event, **fields}) + "\n")

    def shard(self, fields: dict[str, Any]) -> None:
        import numpy as np

        from ident3d.files import write_json
        from ident3d.render.latents import stored_rows
        from ident3d.render.plan import ShardJob
        from ident3d.schema import to_plain
        from ident3d.shards.summary import summarise
        from ident3d.shards.workfolder import trusted_summary
        from ident3d.shards.writer import GapWriter

        job = ShardJob(**fields)
        self.path = job.path
        files = [job.latents, job.pair_latents] if job.pair_latents else [job.latents]
        latents = stored_rows([np.load(file, mmap_mode="r") for file in files], job.start, job.stop)
        if trusted_summary(Path(job.path), Path(job.sidecar), job.start, latents, self.resolution) is not None:
            # An earlier worker ended between the shard's last name and the news of it.
            for i in range(len(latents)):
                self.send("picture", index=job.start + i, kept=True)
            self.send("shard", shard=job.shard, whole=True)
            return
        writer = GapWriter(Path(job.path), job.start, latents, self.resolution, job.salvage)
        try:
            for i in range(writer.writer.done):
                self.send("picture", index=job.start + i, kept=True)
            for i in range(writer.writer.done, len(latents)):
                if not self.sample(job, writer, latents, i):
                    return
            whole = writer.finish()
        finally:
            writer.close()
        if whole:
            summary = summarise(Path(job.path), job.start, latents, self.resolution)
            write_json(Path(job.sidecar), to_plain(summary))
        self.send("shard", shard=job.shard, whole=whole)

    def sample(self, job: ShardJob, writer: GapWriter, latents: NDArray[np.float32], i: int) -> bool:
        """Sample `i` of a shard, as it is kept or rendered; False where the worker is to be replaced before it."""
        pictures = writer.kept.get(i)
        kept = pictures is not None
        if pictures is None:
            if job.start + i in job.skip:
                writer.leave_out(i)
                return True
            reason = self.tired()
            if reason:
                self.send("tired", reason=reason)
                return False
            self.send("start", index=job.start + i)
            pictures = self.render(job, latents[i], i)
        writer.append(i, pictures)
        bound_log()
        self.send("picture", index=job.start + i, kept=kept)
        return True

    def render(self, job: ShardJob, latents: NDArray[np.float32], i: int) -> tuple[bytes, ...]:
        """The encoded pictures of one sample: one, or for a pair two."""
        import numpy as np

        from ident3d.codecs import encode_png
        from ident3d.render.draws import cycles_seeds
        from ident3d.scene import scene_params

        encoded = []
        for k, latent in enumerate(np.atleast_2d(latents)):
            seed = int(cycles_seeds(job.seed, job.split, job.start + i, job.start + i + 1, k)[0])
            params = scene_params(self.spec, latent)
            try:
                picture = self.renderer.render(params, seed)
            except (RuntimeError, OSError) as error:
                raise _SampleFailed(f"{type(error).__name__}: {str(error).strip()}") from error
            encoded.append(encode_png(picture))
        self.rendered += 1
        return tuple(encoded)

    def tired(self) -> str:
        """Why another process had better go on, or nothing. A process renders one sample at least."""
        pictures, memory = self.limits
        if pictures and self.rendered >= pictures:
            return f"{self.rendered} pictures"
        held = resident_mb() if memory and self.rendered else 0
        return f"{held} MB of memory" if memory and held > memory else ""

    def picture(self, fields: dict[str, Any]) -> None:
        """Render one latent into row `index` of an array on disk."""
        import numpy as np

        from ident3d.scene import scene_params

        pictures = np.load(fields["out"], mmap_mode="r+")
        params = scene_params(self.spec, fields["latent"])
        self.send("start", index=fields["index"])
        pictures[fields["index"]] = self.renderer.render(params, fields["seed"])
        pictures.flush()
        self.send("picture", index=fields["index"], kept=False)


def bound_log(descriptor: int = 2, limit: int = MAX_LOG_BYTES) -> None:
    """Start the log again when it has grown large: Blender prints kilobytes a picture."""
    if os.fstat(descriptor).st_size > limit:
        os.ftruncate(descriptor, 0)


def resident_mb() -> int:
    """The memory that this process holds, in MB (its peak where the system tells no more)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 10**6
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak // 10**6 if sys.platform == "darwin" else peak // 1000


def _describe(error: BaseException, path: str) -> dict[str, Any]:
    """An error as an event: its kind decides which exception the parent raises; with the file that was in progress."""
    from ident3d.errors import RenderError, SpecError

    kind = "render" if isinstance(error, RenderError) else "defect"
    if isinstance(error, ImportError):
        kind = "import"
    elif isinstance(error, _SampleFailed):
        kind = "sample"
    elif isinstance(error, SpecError):
        kind = "spec"
    elif isinstance(error, OSError):
        kind = "os"
    # A write that fails names no file itself.
    message = f"{path}: {error.strerror}" if isinstance(error, OSError) and path and not error.filename else str(error)
    return {"event": "error", "kind": kind, "message": message, "type": type(error).__name__}


def main() -> None:
    """Serve commands until stdin ends."""
    _ignore_signals()
    events = _take_stdout()
    _die_with_parent()
    commands = _read_commands()
    _load_package()
    session: _Session | None = None
    try:
        setup = Setup(**commands.get())
        with _few_cores(setup.threads):
            import bpy

            session = _Session(setup, events)
        _ignore_signals()
        # Blender's folder for temporary files would outlive a worker that is killed, as they all are at last.
        with contextlib.suppress(OSError):
            Path(bpy.app.tempdir).rmdir()
        renderer = session.renderer
        session.send(
            "ready",
            blender=bpy.app.version_string,
            device=renderer.device,
            gpus=renderer.gpus,
            model=renderer.model,
            warning=renderer.warning,
        )
        while True:
            command = commands.get()
            if "shard" in command:
                session.shard(command["shard"])
            else:
                session.picture(command["picture"])
    except Exception as error:
        events.write(json.dumps(_describe(error, "" if session is None else session.path)) + "\n")
        events.flush()
        with contextlib.suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        # Not sys.exit: Blender can crash while it tears itself down.
        os._exit(1)


if __name__ == "__main__":
    main()

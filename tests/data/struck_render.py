"""A render or a repair that is struck at its first change to the file system, at its second, and so on, until it comes
through; after each, the same is run again to the end: `struck_render.py TASK KIND WHERE FOLDER [FIRST [EVERY]]`.

TASK: `first`, a dataset's first split; `second`, a split of pairs beside a finished one; `parts`, the same shard by
shard, then finalized; `repair`, of damaged shards, index and latents; `elsewhere`, the same on a machine that renders
other bytes; `own`, of damaged shards and latents that were the user's own. KIND: see `strikes.py`. WHERE: `parent` or
`worker`; or `twice`, where the second run's parent is struck too, at a random step. Blender is stood in for, so that a
try takes half a second.

Prints a JSON line a strike: what was struck, how the process ended and what it said, whether a finished split was whole
at that moment, whether the dataset ended as an undisturbed one, what is left besides, pictures rendered in excess.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401  (before the forks: each would take a second for it)
from strikes import Strike  # type: ignore[import-not-found]

from ident3d import RenderOptions, render_dataset
from ident3d.errors import BusyError, Ident3DError
from ident3d.render.dataset import finalize, render_part
from ident3d.render.repair import repair_dataset
from ident3d.shards.verify import verify_dataset

HERE = Path(__file__).resolve().parent
PAIRS = "laplace(scale=0.05)"


class Stage:
    """Where a task is played.

    Args:
        task: its name.
        folder: for all that is written.
    """

    def __init__(self, task: str, folder: Path) -> None:
        self.task = task
        self.before, self.whole, self.root = folder / "before", folder / "whole", folder / "struck"
        self.report, self.log = folder / "report", folder / "pictures"
        self.python = folder / "python"
        self.python.write_text(
            f'#!/bin/sh\n[ "$1" = -E ] && shift\nexec {sys.executable} {HERE / "stand_in_worker.py"} "$@"\n'
        )
        self.python.chmod(0o755)
        os.environ["STAND_IN_LOG"] = str(self.log)
        self.prepare()
        if task == "elsewhere":
            os.environ["STAND_IN_MACHINE"] = "1"
        shutil.copytree(self.before, self.whole)
        self.log.unlink(missing_ok=True)
        self.run(self.whole)
        self.pictures = self.counted()

    def options(self, root: Path, split: str, samples: int, pairs: str | None = None) -> RenderOptions:
        """A small render: shards of 2."""
        return RenderOptions(
            root, samples, split=split, resolution=8, quality="draft", shard_size=2, workers=1, pairs=pairs, quiet=True,
            blender_python=str(self.python),
        )  # fmt: skip

    def prepare(self) -> None:
        """What is there before the task."""
        if self.task == "first":
            self.before.mkdir()
            return
        if self.task == "own":
            latents = self.before.with_name("latents.npy")
            np.save(latents, np.random.default_rng(3).random((5, 10)).astype(np.float32))
            render_dataset(dataclasses.replace(self.options(self.before, "train", 5), latents=latents))
            for name, at in (("latents.npy", 200), ("train-000000.tar", 700), ("train-000002.tar", 3000)):
                alter(self.before / "train" / name, at)
            return
        render_dataset(self.options(self.before, "test", 3))
        if self.task in ("second", "parts"):
            return
        render_dataset(self.options(self.before, "train", 7, PAIRS))
        train, test = self.before / "train", self.before / "test"
        alter(train / "train-000000.tar", 700)
        (train / "train-000001.tar").unlink()
        os.truncate(train / "train-000003.tar", 1000)
        (train / "index.npy").unlink()
        alter(train / "pair.latents.npy", 200)
        alter(test / "latents.npy", 200)
        alter(test / "test-000001.tar", 30)

    def run(self, root: Path) -> None:
        """The task, in this process."""
        if self.task == "first":
            render_dataset(self.options(root, "train", 5))
        elif self.task == "second":
            render_dataset(self.options(root, "train", 5, PAIRS))
        elif self.task == "parts":
            for shards in ("0", "1-2"):
                render_part(dataclasses.replace(self.options(root, "train", 5, PAIRS), shards=shards))
            finalize(root)
        else:
            repair_dataset(root, verify_dataset(root), str(self.python))

    def counted(self) -> int:
        """The pictures rendered since the last call."""
        pictures = len(self.log.read_text().splitlines()) if self.log.exists() else 0
        self.log.unlink(missing_ok=True)
        return pictures

    def state(self) -> str:
        """Whether what claims to be finished at this moment is."""
        if self.task in ("repair", "elsewhere", "own") or not (self.root / "dataset.json").exists():
            return "unfinished"
        return "; ".join(map(str, verify_dataset(self.root))) or "whole"


def alter(path: Path, at: int) -> None:
    """Flip a bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def child(work: Callable[[], Any]) -> tuple[int, str]:
    """Some work in a fork: its exit status as of a command, or minus a signal; what it said."""
    read, write = os.pipe()
    said = os.fdopen(os.dup(write), "w")
    pid = os.fork()
    if not pid:
        status = 0
        try:
            work()
        except BaseException as error:
            status = 2 if isinstance(error, Ident3DError) else 1
            said.write(str(error) if status == 2 else traceback.format_exc())
            said.flush()
        os._exit(status)
    said.close()
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def content(root: Path) -> tuple[dict[str, bytes], list[str]]:
    """The dataset's files, and the names of all others."""
    paths = [p for p in sorted(root.rglob("*")) if p.is_file()]
    mine = {str(p.relative_to(root)): p.read_bytes() for p in paths if not hidden(p, root)}
    return mine, [str(p.relative_to(root)) for p in paths if hidden(p, root)]


def hidden(path: Path, root: Path) -> bool:
    """Whether a file is no part of the dataset."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def again(stage: Stage) -> Iterator[str]:
    """The same command until it is done, three times at most; yields what it says where it is not."""
    for _ in range(3):
        status, said = 2, "at work"
        while status == 2 and "at work" in said:  # the lock ends with the last worker
            status, said = child(lambda: retried(stage))
        if not status:
            return
        yield said


def retried(stage: Stage) -> None:
    """The task, once nobody else is at it."""
    while True:
        try:
            return stage.run(stage.root)
        except BusyError:
            time.sleep(0.01)


def struck(stage: Stage, step: int, kind: str, where: str) -> dict[str, Any] | None:
    """One strike, and what became of it; None where the task is done before."""
    for path in (stage.report, Path(f"{stage.report}.armed")):
        path.unlink(missing_ok=True)
    shutil.rmtree(stage.root, ignore_errors=True)
    shutil.copytree(stage.before, stage.root)

    def work() -> None:
        if where == "worker":
            os.environ["STAND_IN_STRIKE"] = json.dumps([step, kind, str(stage.report)])
        else:
            Strike(step, kind, stage.report).arm()
        stage.run(stage.root)

    def second() -> None:
        Strike(random.Random(step).randint(1, 45), kind, Path(f"{stage.report}.second")).arm()
        retried(stage)

    status, said = child(work)
    if not stage.report.exists():
        return None
    state = stage.state()
    if where == "twice":
        child(second)
    unfinished = list(again(stage))
    files, left = content(stage.root)
    expected, normal = content(stage.whole)
    return {
        "step": step,
        "struck": stage.report.read_text(),
        "status": status,
        "said": said,
        "state": state,
        "again": unfinished,
        "same": files == expected,
        "verified": [str(p) for p in verify_dataset(stage.root)] if not unfinished else ["unfinished"],
        "left": sorted(set(left) - set(normal)),
        "pictures": stage.counted() - stage.pictures,
    }


def main() -> None:
    """Strike at every step, or from FIRST on at each EVERY-th."""
    task, kind, where, folder, *steps = sys.argv[1:]
    first, every = [*map(int, steps), *(1, 1)[len(steps) :]]
    stage = Stage(task, Path(folder))
    for step in count(first, every):
        found = struck(stage, step, kind, where)
        if found is None:
            return
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""Workers that render noise, counted, and can be held up: `data/gated_worker.py` from the side of a test."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ident3d.render.draws import cycles_seeds

__all__ = ["Gated", "Picture", "files"]

WORKER = Path(__file__).parent / "data" / "gated_worker.py"


def files(root: Path) -> dict[str, bytes]:
    """What a dataset consists of."""
    found = (p for p in sorted(root.rglob("*")) if p.is_file() and ".render" not in p.parts)
    return {str(p.relative_to(root)): p.read_bytes() for p in found}


@dataclass(frozen=True)
class Picture:
    """A picture that some worker has begun.

    Attributes:
        sample: its index.
        job: the Slurm job, such as 12_3; `none_none` outside.
        pid: the worker.
    """

    sample: int
    job: str
    pid: int


class Gated:
    """An interpreter whose workers do as the files of a folder say.

    Args:
        control: the folder, made if absent.
        samples: of the split train, seed 0, that it will render.

    Attributes:
        python: for --blender-python.
    """

    def __init__(self, control: Path, samples: int = 64) -> None:
        control.mkdir(exist_ok=True)
        self.control = control
        self.samples = {int(seed): k for k, seed in enumerate(cycles_seeds(0, "train", 0, samples))}
        self.python = str(control / "python")
        text = f'#!/bin/sh\n[ "$1" = -E ] && shift\nexec {sys.executable} {WORKER} {control} "$@"\n'
        (control / "python").write_text(text)
        (control / "python").chmod(0o755)

    def tell(self, name: str, *values: int) -> None:
        """Write one of the files."""
        part = self.control / f"{name}.part"
        part.write_text(" ".join(map(str, values)))
        os.replace(part, self.control / name)

    def hold(self, pictures: int) -> None:
        """Let each process render so many pictures, and wait at the next."""
        self.tell("gate", pictures)

    def go(self) -> None:
        """Let all processes render on."""
        (self.control / "gate").unlink()

    def seed(self, sample: int) -> int:
        """The Cycles seed of a sample."""
        return next(seed for seed, k in self.samples.items() if k == sample)

    def pictures(self) -> list[Picture]:
        """The pictures that were begun, in order."""
        path = self.control / "pictures"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [Picture(self.samples[int(seed)], job.removesuffix("_none"), int(pid)) for seed, job, pid in lines]

    def again(self) -> list[int]:
        """The samples that were begun more than once: one entry each further time."""
        return sorted((Counter(p.sample for p in self.pictures()) - Counter(set(self.samples.values()))).elements())

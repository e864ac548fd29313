"""Two processes that are ranks of torch.distributed, for test files that are run as scripts to be one of them.

Scripts find this module, too.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

RANKS = 2
PATIENCE_S = 300


def outputs_of(commands: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    """What Python prints, with warnings as errors, given one command and environment a rank; none is left running."""
    found = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", *command],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": found, **environment},
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        printed = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * len(started)
    return printed


def launched(script: str) -> list[str]:
    """What a script prints as each rank, in torchrun's environment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    environments = [
        {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(RANKS)
    ]
    return outputs_of([[script]] * RANKS, environments)


def meeting_in(folder: Path, script: str) -> list[str]:
    """What a script prints as each rank, given what `meet` takes: its number, and where in an empty folder."""
    meeting = (folder / "meeting").as_uri()
    return outputs_of([[script, str(rank), meeting] for rank in range(RANKS)], [{}] * RANKS)


def meet(rank: int, meeting: str) -> None:
    """In a script: wait for the other rank, with one thread and Gloo."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timedelta(minutes=2)
    )

"""The folder that a render works in: what it refuses, its lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ident3d import BusyError, DatasetError
from ident3d.render.folder import RenderFolder


def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        # Permissions do not bind root: a read-only mount does.
        mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("no permission to mount a read-only tmpfs")
    else:
        tmp_path.chmod(0o500)
    try:
        with pytest.raises(DatasetError, match=r"cannot be written: (Read-only file system|Permission denied)"):
            RenderFolder(tmp_path / "d").create()
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(tmp_path)], check=True)
        else:
            tmp_path.chmod(0o700)


def test_the_lock_ends_with_the_last_process_that_holds_it(tmp_path: Path) -> None:
    folder = RenderFolder(tmp_path / "d")
    folder.create()
    with folder.lock() as lock:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    with pytest.raises(BusyError, match=f"process {os.getpid()}"), folder.lock():
        pass
    child.communicate(b"\n")
    with folder.lock():
        pass


def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = RenderFolder(tmp_path / "d")
    folder.create()
    folder.work("train").mkdir()
    (folder.work("train") / "plan.json").write_text('{"scene": 3}')
    with pytest.raises(DatasetError, match=r"plan.json: not a plan that this ident3d can read: scene: expected a text"):
        folder.plans()

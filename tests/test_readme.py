"""The README's examples run as written, and what it says of the code is so."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
INSTALLS = ("make ", "pip ", "apt-get ", "python3.11 ", "export ")
NETWORK = ("ident3d download ", "ident3d push ", "ident3d pull ")
"""What tests of those commands run, against local servers."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def shell_commands() -> list[str]:
    lines = [line.split(" #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith((*INSTALLS, *NETWORK, "#"))]


@pytest.mark.render
@pytest.mark.slow
# webdataset leaves its files to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # torch's workers, on Python 3.12 and later
def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    commands = shell_commands()
    assert len(commands) >= 8
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
    for name in ("contact.png", "octahedra.png", "my-scene.toml"):
        assert (tmp_path / name).stat().st_size > 1000
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["pictures"].shape == (2, 64, 64, 3)  # type: ignore[attr-defined]


def test_the_diff_shown_is_the_diff() -> None:
    def spec(path: Path) -> list[str]:
        text = path.read_text()
        return text[text.index("format = 1") :].splitlines()

    old, new = spec(ROOT / "blender_scenes" / "3dident.toml"), spec(ROOT / "docs" / "examples" / "octahedra.toml")
    lines = difflib.unified_diff(old, new, lineterm="", n=0)
    shown = [line for line in lines if not line.startswith(("---", "+++", "@@")) and line not in ("+", "-")]
    assert blocks("diff")[0].splitlines() == shown


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_libraries_are_those_of_the_error() -> None:
    from ident3d.render.process import LIBRARIES

    assert f"apt-get install {LIBRARIES}" in README
    assert LIBRARIES in (ROOT / "Makefile").read_text()

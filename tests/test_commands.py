"""How commands end: exit statuses, errors and warnings as lines, no traceback for a user's mistake."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

from ident3d.commands import run_command
from ident3d.errors import BusyError, DatasetError, Ident3DError, SpecError, TrainingError


def ending(command: Callable[[], int | None], capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        run_command("tool", command)
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def raising(error: BaseException) -> Callable[[], int | None]:
    def command() -> int | None:
        raise error

    return command


@pytest.mark.parametrize(("given", "status"), [(None, 0), (0, 0), (1, 1), (3, 3)])
def test_the_status_of_a_command(given: int | None, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(lambda: given, capsys) == (status, "", "")


@pytest.mark.parametrize("kind", [Ident3DError, SpecError, DatasetError, TrainingError, BusyError])
def test_an_error_of_ours_is_its_text(kind: type[Ident3DError], capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(raising(kind("what to do")), capsys) == (2, "", "tool: what to do\n")


def test_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(raising(KeyboardInterrupt()), capsys) == (130, "", "")
    assert ending(raising(KeyboardInterrupt("all is kept")), capsys) == (130, "", "\ntool: all is kept\n")


def test_a_reader_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(raising(BrokenPipeError()), capsys) == (141, "", "")


@pytest.mark.parametrize("status", [0, 2, 7])
def test_an_exit_of_its_own_stays(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As a parser of arguments ends with 2, or with 0 for --help."""
    assert ending(raising(SystemExit(status)), capsys) == (status, "", "")


@pytest.mark.parametrize("error", [ValueError("defect"), OSError("defect"), AssertionError("defect")])
def test_defects_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error), match="defect"):
        run_command("tool", raising(error))


def test_warnings_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        warnings.simplefilter("always")
        warnings.warn("the disk is slow", UserWarning, stacklevel=1)
        print("done")

    before, filters = warnings.showwarning, list(warnings.filters)
    assert ending(command, capsys) == (0, "done\n", "tool: warning: the disk is slow\n")
    assert warnings.showwarning is before
    assert list(warnings.filters) == filters


@pytest.mark.parametrize(
    ("body", "status", "err"),
    [
        ("print('said')", 0, ""),
        ("raise SpecError('size = 0: expected 1')", 2, "tool: size = 0: expected 1\n"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 130, ""),
        ("warnings.warn('slow')", 0, "tool: warning: slow\n"),
    ],
)
def test_in_a_process_of_its_own(body: str, status: int, err: str) -> None:
    code = (
        "import os, signal, time, warnings\nfrom ident3d.commands import run_command\n"
        # Ignored by a shell's background jobs, and so by what they start.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"from ident3d.errors import SpecError\ndef command():\n    {body}\nrun_command('tool', command)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, err)


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_closed_pipe_says_nothing(lines: int) -> None:
    """Whether it is noticed while much is printed, or little is at the end."""
    code = f"from ident3d.commands import run_command; run_command('tool', lambda: print('line\\n' * {lines}))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")

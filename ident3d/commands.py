"""How a command ends: its errors as texts, its exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from ident3d.errors import Ident3DError

__all__ = ["run_command"]


def run_command(program: str, command: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process.

    Exit status: what the command gives, 0 for None; 2 for an `Ident3DError`, whose text is printed; 130 for Ctrl-C (or
    what the exception's `status` says), with the text of the exception where it has one; 141 where nobody reads the
    output any more.

    Args:
        program: the name that messages begin with.
        command: parses its arguments and does its work.
    """

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"{program}: warning: {message}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            status = command()
            # What is left to print is printed here: at exit, a pipe that is closed would be a traceback.
            sys.stdout.flush()
    except Ident3DError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        if str(stop):
            print(f"\n{program}: {stop}", file=sys.stderr)
        sys.exit(getattr(stop, "status", 130))
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(status or 0)

"""What a worker does besides rendering."""

from __future__ import annotations

import os
from pathlib import Path

from ident3d.render.worker import bound_log


def test_the_log_stays_small_and_keeps_its_end(tmp_path: Path) -> None:
    with open(tmp_path / "log", "ab") as log:  # appending, as the parent opens it
        for line in range(1000):
            os.write(log.fileno(), f"picture {line}\n".encode())
            bound_log(log.fileno(), limit=500)
            assert os.fstat(log.fileno()).st_size <= 500
    assert (tmp_path / "log").read_text().endswith("picture 999\n")

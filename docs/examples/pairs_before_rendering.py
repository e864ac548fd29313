"""What matching would make of a conditional, before anything is rendered.

    python docs/examples/pairs_before_rendering.py 250000 "normal(scale=0.05)" OUT

draws the latents that `ident3d render --samples 250000` would, and writes the same report as `ident3d pairs`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ident3d
from ident3d.render.draws import draw_latents
from ident3d.reports import save_report


class Latents:
    """Latents with their names: all that pairing needs of a dataset."""

    def __init__(self, samples: int) -> None:
        self.latents = draw_latents(0, "train", 0, samples, {})
        self.factors = ident3d.FACTORS


def main(samples: str, conditional: str, out: str) -> None:
    """Write the report and print its warnings."""
    report = ident3d.pair_report(Latents(int(samples)), conditional)
    save_report(report, Path(out))
    print(*report.warnings, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])

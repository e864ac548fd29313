"""How much disk a render will need, told before it starts."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import numpy as np

from ident3d.errors import RenderError
from ident3d.render.plan import RenderPlan

__all__ = ["check_disk", "predicted_bytes"]

RESOLUTIONS = (16, 32, 64, 128, 224, 512, 1024)
PICTURE_BYTES = {
    "draft": (594, 1558, 4229, 12497, 29946, 126789, 429358),
    "standard": (591, 1492, 4038, 11704, 25263, 107000, 362000),
}
"""Bytes of a picture of the scene 3dident as PNG, by its side; `standard` past 224 px is `draft`'s, scaled."""

LEAST = 0.6
"""The part of the prediction that any scene takes: plainer ones compress better."""


def predicted_bytes(plan: RenderPlan) -> int:
    """What a finished split will take on disk: pictures, tar headers, latents and index.

    The pictures' part is measured for the scene 3dident, within a tenth; other scenes may take half or twice as much.
    """
    table = PICTURE_BYTES["draft" if plan.quality == "draft" else "standard"]
    picture = float(np.exp(np.interp(np.log(plan.resolution), np.log(RESOLUTIONS), np.log(table))))
    if plan.resolution > RESOLUTIONS[-1]:
        picture = table[-1] * (plan.resolution / RESOLUTIONS[-1]) ** 2
    # Two members with a header each; data in whole blocks of 512; a row of latents.npy (40) and of index.npy (32).
    one = 512 + 512 * np.ceil(picture / 512) + 512 + 512 + 72
    return int(plan.samples * one * (2 if plan.pairs else 1))


def check_disk(root: Path, plan: RenderPlan) -> str:
    """Refuse what cannot fit, and warn of what may not, rather than find out after days.

    Returns:
        What will be needed and what is free, in words.

    Raises:
        RenderError: too little is free.
    """
    there = sum(p.stat().st_size for p in (root / plan.split).glob("*") if p.is_file())  # parts, which are hidden, too
    need = max(0, predicted_bytes(plan) - there)
    free = shutil.disk_usage(root).free
    text = f"{root}: {plan.samples:,} samples will need about {need / 1e9:,.2f} GB more, {free / 1e9:,.2f} GB are free"
    if LEAST * need > free:
        raise RenderError(f"{text}; make room or render fewer")
    if need > 0.9 * free:
        warnings.warn(f"{text}; make room, or a full disk may stop this render", stacklevel=2)
    return text

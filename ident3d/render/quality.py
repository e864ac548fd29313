"""Render settings by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ident3d.errors import SpecError

__all__ = ["QUALITIES", "RenderSettings", "quality"]


@dataclass(frozen=True)
class RenderSettings:
    """What Cycles is told beyond the scene.

    Attributes:
        samples: paths a pixel.
        light_tree: pick lights by importance rather than evenly.
        denoise_passes: what OpenImageDenoise sees beside the noisy picture. At few samples albedo and normals are
            noisy themselves: cleaning them costs more than more samples do, and they carry no texture here.
        denoise_prefilter: how it cleans those passes first.
        denoise_quality: the size of its network.
        dither: amplitude of the noise added before rounding to 8 bits, 0 to 2.
    """

    samples: int
    light_tree: bool = True
    denoise_passes: Literal["RGB", "RGB_ALBEDO_NORMAL"] = "RGB_ALBEDO_NORMAL"
    denoise_prefilter: Literal["NONE", "FAST", "ACCURATE"] = "ACCURATE"
    denoise_quality: Literal["FAST", "BALANCED", "HIGH"] = "HIGH"
    dither: float = 0.0


QUALITIES: dict[str, RenderSettings] = {
    "draft": RenderSettings(samples=2, denoise_passes="RGB"),
    "standard": RenderSettings(samples=8, denoise_passes="RGB"),
    "paper": RenderSettings(samples=512),
}


def quality(name: str) -> RenderSettings:
    """The settings of a quality.

    Raises:
        SpecError: no such quality.
    """
    if name not in QUALITIES:
        raise SpecError(f"quality {name!r}: expected one of {', '.join(QUALITIES)}")
    return QUALITIES[name]

"""How a stored sample becomes an item: transforms, normalisation, and what happens where a picture is damaged."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from ident3d.errors import DatasetError, SpecError

__all__ = ["ON_ERROR", "Array", "Serving", "Statistics", "Transform", "to_tensor"]

Array = np.ndarray[Any, np.dtype[Any]]
Transform = Callable[[Any], Any]
Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and std per channel, in [0, 1]."""

ON_ERROR = ("raise", "skip")
_counting = threading.Lock()  # += on a tensor is no single step to threads


def to_tensor(pixels: UInt8[Array, "height width 3"]) -> UInt8[Tensor, "3 height width"]:
    """Pixels as a torch picture: channels first, uint8, the same memory."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


def given_statistics(normalize: bool | Sequence[Sequence[float]]) -> Statistics | None:
    """The mean and std that a user gave, or None.

    Raises:
        SpecError: neither true or false nor (mean, std) with three numbers each, the stds above 0.
    """
    if isinstance(normalize, bool):
        return None
    try:
        (a, b, c), (d, e, f) = ([float(x) for x in row] for row in normalize)
    except (TypeError, ValueError):
        raise SpecError(f"normalize = {normalize!r}: expected True, False or (mean, std), three numbers each") from None
    if not (np.isfinite([a, b, c, d, e, f]).all() and min(d, e, f) > 0):
        raise SpecError(f"normalize = {normalize!r}: expected finite numbers, and every std above 0")
    return (a, b, c), (d, e, f)


class Serving:
    """Transforms, normalisation and the care for damaged samples, which all datasets of pictures share.

    Args:
        transform: applied to the picture, a uint8 tensor (3, H, W).
        target_transform: applied to the latents, a float32 tensor (factors,).
        normalize: give pictures as float32, (x / 255 - mean) / std per channel, after the transform: by the statistics
            of the training split where there is one, or by (mean, std) as given, in [0, 1].
        on_error: `raise` at a damaged picture, or `skip` it: count it, warn of it, and leave it out of its batch.

    Attributes:
        transform, target_transform, normalize, on_error: as given.

    Raises:
        SpecError: a normalisation or an `on_error` that is none.
    """

    def __init__(
        self,
        transform: Transform | None,
        target_transform: Transform | None,
        normalize: bool | Sequence[Sequence[float]],
        on_error: str,
    ) -> None:
        if on_error not in ON_ERROR:
            raise SpecError(f"on_error = {on_error!r}: expected {' or '.join(ON_ERROR)}")
        self.transform, self.target_transform = transform, target_transform
        self.normalize, self.on_error = normalize, on_error
        self._statistics = given_statistics(normalize)
        self._affine: tuple[Tensor, Tensor] | None = None
        # In shared memory, so that what workers skip is counted here.
        self._skipped: Tensor | None = None
        if on_error == "skip":
            self._skipped = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def reference_statistics(self) -> Statistics:
        """The mean and std that `normalize=True` stands for; datasets say."""
        raise NotImplementedError

    @property
    def affine(self) -> tuple[Float32[Tensor, "3 1 1"], Float32[Tensor, "3 1 1"]]:
        """Scale and shift of the normalisation: x * scale + shift, of uint8 pictures."""
        if self._affine is None:
            mean, std = (torch.tensor(x, dtype=torch.float64) for x in self._statistics or self.reference_statistics())
            self._affine = (
                (1 / (255 * std)).float().reshape(3, 1, 1),
                (-mean / std).float().reshape(3, 1, 1),
            )
        return self._affine

    def normalized(self, pictures: UInt8[Tensor, "*n 3 height width"]) -> Float32[Tensor, "*n 3 height width"]:
        """Uint8 pictures as normalised float32, on their device."""
        scale, shift = (x.to(pictures.device, non_blocking=True) for x in self.affine)
        return torch.mul(pictures, scale).add_(shift)

    def finish_picture(self, picture: UInt8[Tensor, "3 height width"]) -> Any:
        """A picture transformed, and then normalised where asked.

        Raises:
            SpecError: a transform that leaves nothing to normalise: its result is no uint8 tensor (3, H, W).
        """
        result: Any = picture if self.transform is None else self.transform(picture)
        if self.normalize is False:
            return result
        if not (isinstance(result, Tensor) and result.dtype == torch.uint8 and result.ndim == 3 and len(result) == 3):
            what = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise SpecError(f"transform gives {what}: normalize=True expects uint8 (3, H, W); normalise in one place")
        return self.normalized(result)

    def finish_latents(self, latents: Float[Array, " factors"]) -> Any:
        """Latents as a tensor, transformed."""
        target: Any = torch.from_numpy(latents)
        return target if self.target_transform is None else self.target_transform(target)

    @property
    def skipped(self) -> int:
        """How many times a damaged sample was left out (with `on_error="skip"`), by this process and its workers."""
        return 0 if self._skipped is None else int(self._skipped)

    def skip(self, error: DatasetError) -> None:
        """Count and report a damaged sample.

        Raises:
            DatasetError: the error itself, with `on_error="raise"`.
        """
        if self._skipped is None:
            raise error
        with _counting:
            self._skipped += 1
        warnings.warn(f"left out: {error}", stacklevel=2)

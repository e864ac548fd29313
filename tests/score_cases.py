"""Codes and factors that tests of scores share."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ident3d.errors import SpecError

Array = NDArray[Any]
N = 600


def factors_of(seed: int = 0, n: int = N, dim: int = 3) -> Array:
    return np.random.default_rng(seed).random((n, dim))


def noise(seed: int, n: int = N, dim: int = 3) -> Array:
    return np.random.default_rng(1000 + seed).standard_normal((n, dim))


def noisy(seed: int = 0, n: int = N, dim: int = 3, scale: float = 0.2) -> tuple[Array, Array]:
    """Codes that tell a part of the factors, mixed a little; and the factors."""
    z = factors_of(seed, n, dim)
    return z @ (np.eye(dim) + 0.3 * noise(seed, dim, dim)) + scale * noise(seed + 1, n, dim), z


def rotation(degrees: float) -> Array:
    angle = math.radians(degrees)
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def refused(text: str) -> Any:
    return pytest.raises(SpecError, match=re.escape(text))

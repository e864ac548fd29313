"""What tests of several baselines share."""

from __future__ import annotations

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def unhooked() -> Iterator[None]:
    """Annotations unchecked, as users have them, so that the library's own refusal is what is seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

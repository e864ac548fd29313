"""Render settings by name."""

from __future__ import annotations

import re

import pytest

from ident3d.errors import SpecError
from ident3d.render.quality import QUALITIES, RenderSettings, quality


def test_the_qualities_are_these_three() -> None:
    assert list(QUALITIES) == ["draft", "standard", "paper"]


def test_paper_is_as_published() -> None:
    # 512 samples without a dither: what the released pictures were made with.
    assert quality("paper").samples == 512
    assert quality("paper").dither == 0


def test_each_quality_takes_more_samples_than_the_one_before() -> None:
    assert quality("draft").samples < quality("standard").samples < quality("paper").samples


@pytest.mark.parametrize("name", QUALITIES)
def test_settings_are_what_blender_knows(name: str) -> None:
    settings = quality(name)
    assert isinstance(settings, RenderSettings)
    assert settings.samples >= 1
    assert settings.denoise_prefilter in ("NONE", "FAST", "ACCURATE")
    assert settings.denoise_quality in ("FAST", "BALANCED", "HIGH")
    assert 0 <= settings.dither <= 2


@pytest.mark.parametrize("name", ["", "Paper", "high", "standard "])
def test_an_unknown_quality_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"quality {name!r}: expected one of draft, standard, paper")):
        quality(name)

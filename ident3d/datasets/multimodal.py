"""Multimodal3DIdent as published: pictures, and a line of text about each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ident3d.datasets.layouts import Layout, TextLines, read_named, read_numbers, unit_cube, whole_numbers
from ident3d.datasets.published_base import CLASSES, Normalize, PictureFolders, Published, Root
from ident3d.datasets.records import RECORDS
from ident3d.datasets.serving import Array, Transform
from ident3d.errors import DatasetError
from ident3d.factors import FACTORS, Categorical, Factors

__all__ = ["Multimodal3DIdent"]


class Multimodal3DIdent(PictureFolders):
    """Multimodal3DIdent, one split: item i is (picture, text, latents); pictures of 224 x 224 px.

    Of Daunhawer et al. 2023 (Identifiability Results for Multimodal Contrastive Learning, ICLR): a line of text about
    each picture, which tells the object's shape and place, and its colour in words.

    `root` holds `{train,val,test}/{images/*.png, text/text_raw.txt, latents_image.csv, latents_text.csv}`, or one
    folder that does, e.g. `m3di`. Columns of the tables are found by their names, whatever their order and prefix.
    Positive pairs share all categorical factors unless `within` names fewer.

    Args:
        root, split, transform, target_transform, download, factors, cache, normalize, on_error: as for `Published`.
        text: serve the texts; without them item i is (picture, latents).

    Attributes:
        latents: float32 (N, 7), in the unit cube, as published: the angles of the object, its hue, the spotlight's
            angle and hue, the ground's hue.
        categories: int64 (N, 4): `object_shape` (0 to 6: teapot, hare, dragon, cow, armadillo, horse, head) and the
            object's place on a grid, `object_xpos`, `object_ypos`, `object_zpos` (0 to 2 each).
        raw_latents: float64 (N, 7), as the table has them.
        image_latents, text_latents: all columns of latents_image.csv and latents_text.csv by name, (N,) each: int64,
            else float64, else texts. Read when first asked for.

    Raises:
        DatasetError, DownloadError, SpecError: as for `ThreeDIdent`; a column that is absent or ambiguous; texts that
            are not one line a sample.
    """

    title, url = RECORDS["multimodal3dident"].title, RECORDS["multimodal3dident"].page
    citation = RECORDS["multimodal3dident"].citation
    splits = ("train", "val", "test")
    layout = Layout(
        "multimodal3dident", title, {s: (s,) for s in splits}, ("latents_image.csv", "latents_text.csv", "text")
    )
    names: ClassVar[dict[str, str]] = {
        "object_alpha": "object_alpharot",
        "object_beta": "object_betarot",
        "object_gamma": "object_gammarot",
        "object_hue": "object_color",
        "spotlight_theta": "spotlight_pos",
        "spotlight_hue": "spotlight_color",
        "ground_hue": "background_color",
    }
    table = Factors(
        replace(FACTORS.get(name), column=k, low=0.0, high=1.0, unit="unit interval") for k, name in enumerate(names)
    )
    categorical = (
        Categorical("object_shape", CLASSES, "shape of the object"),
        *(Categorical(f"object_{axis}pos", ("0", "1", "2"), f"object position, {axis}, on a grid") for axis in "xyz"),
    )
    reloaded = (*Published.reloaded, "_lines", "image_latents", "text_latents")

    def __init__(
        self,
        root: Root,
        split: str = "train",
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        download: bool = False,
        *,
        text: bool = True,
        factors: Iterable[str] | None = None,
        cache: str = "none",
        normalize: Normalize = False,
        on_error: str = "raise",
    ) -> None:
        self._with_text = text
        options: dict[str, Any] = {"factors": factors, "cache": cache, "normalize": normalize, "on_error": on_error}
        super().__init__(root, split, transform, target_transform, download, **options)

    def _needed(self, path: Path) -> Sequence[str]:
        return ["images", *self._arrays(), "latents_text.csv", *(["text/text_raw.txt"] if self.has_text else [])]

    def _arrays(self) -> Sequence[str]:
        return ["latents_image.csv"]

    def _load(self) -> None:
        path, columns = self.files.path / "latents_image.csv", list(self.names.values())
        kinds = [kind.name for kind in self.categorical]
        values = read_numbers(path, columns + kinds)
        self._raw = [values[:, : len(columns)]]
        u = unit_cube(self._raw[0], 0.0, 1.0, columns, path)
        self.latents = np.ascontiguousarray(u[:, self.columns.columns])
        counts = [len(kind.labels) for kind in self.categorical]
        self.categories = whole_numbers(values[:, len(columns) :], counts, kinds, path)
        self._lines = TextLines(self.files.path / "text" / "text_raw.txt", len(values)) if self.has_text else None

    def _open_pictures(self) -> None:
        self._number([("images", len(self), "latents_image.csv")])

    @property
    def has_text(self) -> bool:
        """Whether texts are served."""
        return self._with_text

    def text(self, index: int) -> str:
        """The line of text about sample `index`, 0 to N - 1.

        Raises:
            DatasetError: it is not UTF-8, or the dataset was opened with `text=False`.
        """
        if self._lines is None:
            raise DatasetError(f"{self.files.path}: opened with text=False")
        return self._lines[index]

    @cached_property
    def image_latents(self) -> dict[str, Array]:
        """All columns of latents_image.csv by name."""
        return read_named(self.files.path / "latents_image.csv", len(self))

    @cached_property
    def text_latents(self) -> dict[str, Array]:
        """All columns of latents_text.csv by name."""
        return read_named(self.files.path / "latents_text.csv", len(self))

    def extras(self) -> dict[str, Array | bytes]:
        """What a conversion keeps besides: both tables."""
        return {name: (self.files.path / name).read_bytes() for name in ("latents_image.csv", "latents_text.csv")}

    def _sibling(self, split: str) -> Published:
        return type(self)(self.folder, split, text=False, on_error=self.on_error)

    def _describe(self) -> list[str]:
        return ["a text with each sample"] if self.has_text else []

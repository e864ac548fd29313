"""Temporal Causal3DIdent as published: frames in order of time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from ident3d.codecs import encode_png
from ident3d.datasets.frames import Archive, Frames
from ident3d.datasets.layouts import Layout, check_latents, unit_cube, whole_numbers
from ident3d.datasets.published_base import Published
from ident3d.datasets.serving import Array
from ident3d.errors import DatasetError
from ident3d.factors import FACTORS, Categorical, Factors

__all__ = ["TemporalCausal3DIdent"]

FRAME_CLASSES = ("teapot", "armadillo", "hare", "cow", "dragon", "head", "horse")
MAX_MATERIALS = 256


class TemporalCausal3DIdent(Published):
    """Temporal Causal3DIdent, one split: one long sequence of frames of 64 x 64 px; item i is (picture, latents).

    Of Lippe et al. 2022 (CITRIS: Causal Identifiability from Temporal Intervened Sequences, ICML): each latent follows
    from those of the frame before, but for interventions. Neighbours in time are the positive pairs: `data.pair(i)` is
    frame i with frame i + 1, and `data.pairs(batch_size=...)` serves such.

    `root` holds `{train,val,test}.npz`, or one folder that does. The columns of its `raw_latents` are taken to be in
    the order of 3DIdent's factors, as in the released generator; the file itself does not name them. Frames are never
    all in memory: those of a compressed file are unpacked, once, into the cache folder (see `Frames`).

    Args:
        root, split, transform, target_transform, download, factors, cache, normalize, on_error: as for `Published`.

    Attributes:
        latents: float32 (N, 10), in the unit cube: positions u = (raw + 2) / 4 in Blender units, angles and hues
            u = raw / (2 pi). The latter are periodic.
        categories: int64 (N, 2): `shape` (0 to 6: teapot, armadillo, hare, cow, dragon, head, horse) and `material`.
        pair_latents: float32 (N, 10): those of the next frame; the last row stands for none.
        raw_latents: (N, 10) as stored.
        interventions: (N - 1, 12) as stored: row i tells which of the ten latents, shape and material were set anew
            between frames i and i + 1. Read when first asked for.

    Raises:
        DatasetError, SpecError: as for `ThreeDIdent`; no room to unpack the frames.
        DownloadError: `download=True` where the files are absent.
    """

    title = "Temporal Causal3DIdent"
    url = "https://github.com/phlippe/CITRIS"
    citation = (
        "P. Lippe, S. Magliacane, S. Löwe, Y. M. Asano, T. Cohen, E. Gavves: CITRIS: Causal Identifiability from "
        "Temporal Intervened Sequences, ICML 2022"
    )
    splits = ("train", "val", "test")
    layout = Layout("temporal-causal3dident", title, {s: (f"{s}.npz",) for s in splits}, ("imgs",), public=False)
    table = Factors(
        replace(f, low=-2.0, high=2.0) if f.column < 3 else replace(f, low=0.0, high=2 * math.pi, periodic=True)
        for f in FACTORS
    )
    reloaded = (*Published.reloaded, "pair_latents", "interventions")
    consecutive = True
    _frames: Frames

    def _needed(self, path: Path) -> Sequence[str]:
        return []

    def _load(self) -> None:
        path, archive = self.files.path, Archive(self.files.path)
        raw = archive.read("raw_latents", (None, None), "(N, 10)")
        check_latents(raw, len(self.table), f"{path}, raw_latents")
        self._raw, n = [raw], len(raw)
        low, high = [f.low for f in self.table], [f.high for f in self.table]
        u = unit_cube(raw, low, high, self.table.names, f"{path}, raw_latents")
        self.latents = np.ascontiguousarray(u[:, self.columns.columns])
        self.pair_latents = np.concatenate([self.latents[1:], self.latents[-1:]])
        kinds = archive.read("shape_latents", (n, 2), f"({n}, 2), a row for each of raw_latents: shape, material")
        counts = len(FRAME_CLASSES), MAX_MATERIALS
        self.categories = whole_numbers(kinds, counts, ("shape", "material"), f"{path}, shape_latents")
        materials = tuple(str(k) for k in range(int(self.categories[:, 1].max(initial=0)) + 1))
        self.categorical = (
            Categorical("shape", FRAME_CLASSES, "shape of the object"),
            Categorical("material", materials, "material of the object"),
        )
        found = archive.member("interventions").shape
        if found != (n - 1, 12):
            raise DatasetError(f"{path}: interventions is {found}, expected ({n - 1}, 12): a row between two frames")

    def _open_pictures(self) -> None:
        self._frames = Frames(self.files.path)
        if self._frames.count != len(self):
            raise DatasetError(
                f"{self.files.path}: imgs has {self._frames.count:,} frames, but raw_latents {len(self):,} rows"
            )
        self.resolution = self._frames.side

    @cached_property
    def interventions(self) -> Array:
        """What was set anew between frame i and frame i + 1, (N - 1, 12) as stored."""
        return Archive(self.files.path).read("interventions", (len(self) - 1, 12), "(N - 1, 12)")

    def where(self, index: int) -> str:
        """The sample in words, for messages: its file and frame."""
        return f"{self.files.path}, frame {index}"

    def pixels(
        self, index: int, out: UInt8[Array, "height width 3"] | None = None, *, positive: bool = False
    ) -> UInt8[Array, "height width 3"]:
        """Frame `index`, 0 to N - 1, or the next one.

        Raises:
            IndexError: the last frame has no next one.
            DatasetError: the unpacked frames are gone or were cut off.
        """
        return self._frames.read(index + positive, out)

    def read(self, index: int, *, positive: bool = False) -> bytes:
        """Frame `index`, or the next one, encoded as PNG."""
        return encode_png(self.pixels(index, positive=positive))

    def fingerprint(self) -> str:
        """The checksums of the frames and the latents, in one."""
        if not self._fingerprint:
            archive, size = Archive(self.files.path), self.files.path.stat().st_size
            parts = f"{size} {self._frames.checksum} {archive.member('raw_latents').info.CRC}"
            self._fingerprint = hashlib.sha256(parts.encode()).hexdigest()
        return self._fingerprint

    def extras(self) -> dict[str, Array | bytes]:
        """What a conversion keeps besides: raw_latents, shape_latents and interventions, a file each."""
        shapes = Archive(self.files.path).read("shape_latents", (len(self), 2), "(N, 2)")
        kept = {"raw_latents": self.raw_latents, "shape_latents": shapes, "interventions": self.interventions}
        return {f"{name}.npy": array for name, array in kept.items()}

    def _describe(self) -> list[str]:
        return ["positive pairs: neighbours in time"]

"""The data of a 3DIdent experiment: its splits, opened and checked, and the batches of each step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ident3d import Ident3D, simclr
from ident3d.baselines.ranks import world_size
from ident3d.baselines.threedident_settings import ThreeDIdentSettings
from ident3d.ceilings import scene_of
from ident3d.checks import one_of
from ident3d.conditionals import conditional
from ident3d.datasets.dataset import PictureDataset
from ident3d.datasets.device import fits
from ident3d.datasets.published import open_published
from ident3d.errors import SpecError
from ident3d.factors import FACTORS
from ident3d.metrics import LEAST
from ident3d.shards.location import is_url
from ident3d.spaces import Box
from ident3d.workers import cores

__all__ = ["Cache", "Splits", "StepBatches", "check_cache", "open_split", "open_splits", "pairs_of"]

Cache = Literal["auto", "device", "disk"]


@dataclass(frozen=True)
class Splits:
    """Training and test pictures of the same factors and size.

    Attributes:
        train: pictures to train on.
        test: held-out pictures.
        names: of the factors that an encoder is to find, the columns of `.latents` of both.
    """

    train: PictureDataset
    test: PictureDataset
    names: tuple[str, ...]

    def check_scored(self, samples: int) -> None:
        """Refuse splits of too few pictures for a score.

        Args:
            samples: training pictures that are to be scored at most.

        Raises:
            SpecError: there are too few.
        """
        least = max(LEAST, 2 * (len(self.names) + 2))  # what r2 takes
        for data, rows in ((self.train, min(len(self.train), samples)), (self.test, len(self.test))):
            if rows < least:
                raise SpecError(
                    f"{data.root}, split {data.split}: {rows} pictures to score; expected at least {least} for "
                    f"{len(self.names)} factors"
                )

    def facts(self) -> dict[str, Any]:
        """What a result says of the data, as JSON; equal for equal data, wherever they lie."""
        mean, std = self.train.statistics()  # of the pixels: equal latents may be rendered otherwise
        return {
            "name": self.train.name,
            "factors": list(self.names),
            "scene": _scene_name(self.train),
            "resolution": self.train.resolution,
            "samples": len(self.train),
            "test_samples": len(self.test),
            "mean": [round(value, 9) for value in mean],
            "std": [round(value, 9) for value in std],
            "pairs": _rendered_law(self.train),
            "latents": _digest(self.train.latents),
            "pair_latents": None if self.train.pair_latents is None else _digest(self.train.pair_latents),
            "test_latents": _digest(self.test.latents),
        }


def _scene_name(data: PictureDataset) -> str | None:
    # From the manifest where there is one: behind a URL it alone names a scene of the user's own.
    record = getattr(getattr(data, "manifest", None), "scene", None)
    found = scene_of(data) if record is None else record
    return None if found is None else str(found.name)


def _rendered_law(data: PictureDataset) -> str | None:
    """The conditional that the positives were rendered with; None where there are none, or it is not known."""
    law = getattr(getattr(data, "entry", None), "pairs", None)
    return None if law is None else str(law)


def _digest(latents: np.ndarray[Any, np.dtype[Any]]) -> str:
    return hashlib.sha256(np.ascontiguousarray(latents).tobytes()).hexdigest()[:16]


def open_split(root: str | Path, split: str, factors: Sequence[str] | None = None, **options: Any) -> PictureDataset:
    """A split of shards (a folder or a URL), or of a published dataset in its own layout.

    Args:
        root: a folder, or a URL such as hf://datasets/user/name.
        split: train, val or test.
        factors: by name; None for all that are not frozen.
        options: of the dataset's class.

    Raises:
        DatasetError: none is there, or it is damaged.
        SpecError: factors that the data lack.
    """
    sharded = is_url(str(root)) or (Path(root) / "dataset.json").exists()

    def read(names: Sequence[str] | None) -> PictureDataset:
        reader: Any = Ident3D if sharded else open_published
        opened: PictureDataset = reader(root, split, factors=names, **options)
        return opened

    found = read(factors)
    if factors is None and any(factor.frozen is not None for factor in found.columns):
        found = read([factor.name for factor in found.columns if factor.frozen is None])
    return found


def open_splits(
    data: str | Path,
    settings: ThreeDIdentSettings,
    *,
    test_data: str | Path | None = None,
    on_error: str = "raise",
) -> Splits:
    """Open the training and the test split, and refuse what cannot be trained on them.

    Args:
        data: as for `open_split`.
        settings: what is to be trained.
        test_data: where the test split is, if not there.
        on_error: raise at a damaged picture, or skip it.

    Raises:
        DatasetError: no such dataset or split.
        SpecError: factors that the data lack, or that do not vary; splits of other factors or sizes; a batch that is
            larger than the data; no pairs of the kind that is asked for; damaged pictures to be skipped over several
            ranks, whose shares would differ.
    """
    if on_error == "skip" and world_size() > 1:
        raise SpecError(
            "skipping damaged pictures over several ranks: their shares of a batch would differ; repair them"
        )
    train = open_split(data, "train", settings.factors, on_error=on_error)
    names = train.columns.names
    test = open_split(data if test_data is None else test_data, "test", names, on_error=on_error)
    if test.resolution != train.resolution:
        raise SpecError(
            f"{test.root}: test pictures of {test.resolution} px, training pictures of {train.resolution} px; expected "
            "the same size"
        )
    for part in (train, test):
        constant = [name for name, column in zip(names, part.latents.T, strict=True) if np.ptp(column) == 0]
        if constant:
            raise SpecError(
                f"{part.root}, split {part.split}: {', '.join(constant)} does not vary, so that no score tells whether "
                "it is found; leave it out of factors"
            )
    if settings.mode != "identity" and settings.batch > len(train):
        raise SpecError(
            f"batch = {settings.batch:,}, but {train.root} has {len(train):,} training pictures; take a smaller batch"
        )
    if settings.mode == "unsupervised":
        _check_pairs(train, settings)
    return Splits(train, test, names)


def _check_pairs(train: PictureDataset, settings: ThreeDIdentSettings) -> None:
    """Refuse pairs that cannot be, before any picture is decoded.

    Raises:
        SpecError: they cannot.
    """
    if settings.pairs == "augmented":
        simclr(train.resolution)
        return
    if settings.pairs == "matched":
        train.pairs(**pairs_of(settings))
        return
    if not train.has_pairs:
        raise SpecError(
            f"pairs = exact, but {train.root} holds no pairs: render some (`ident3d render --pairs "
            f"'{settings.conditional}'`), or choose pairs = matched"
        )
    rendered = _rendered_law(train)
    if rendered is not None:
        box = Box(len(FACTORS))
        asked, there = (conditional(text, box, FACTORS).text for text in (settings.conditional, rendered))
        if asked != there:
            raise SpecError(
                f"conditional = {settings.conditional}, but the pairs of {train.root} were rendered with {rendered}: "
                "ask for that, so that results name it"
            )


class StepBatches:
    """The batch of a training step, on the device: a function of (seed, step).

    Pictures are decoded before the first step. They are kept on the device where they fit, and otherwise in a file that
    threads read ahead.

    Args:
        data: the training split, without transforms.
        settings: mode, pairs and batch; the batch is cut over the ranks.
        seed: what batches are drawn from.
        device: where they go.
        cache: device, disk, or auto: whichever the device has room for.
        quiet: no progress bar while pictures are decoded.

    Raises:
        SpecError: what `data.pairs` refuses, a batch that does not divide over the ranks, pictures that do not fit.
        DatasetError: a damaged picture, or one of another size.
    """

    def __init__(
        self,
        data: PictureDataset,
        settings: ThreeDIdentSettings,
        *,
        seed: int,
        device: torch.device,
        cache: Cache = "auto",
        quiet: bool = False,
    ) -> None:
        check_cache(settings, cache)
        self.device = device
        self._supervised = settings.mode == "supervised"
        if settings.batch % world_size():
            raise SpecError(f"batch = {settings.batch} over {world_size()} ranks: expected a multiple")
        augmented = not self._supervised and settings.pairs == "augmented"
        held = cache == "device" or (cache == "auto" and not augmented and fits(data, device))
        source: Any = data.to_device(device, quiet=quiet) if held else data
        if not held and data.store is None:
            data.open_cache("disk")
        threads: dict[str, Any] = {} if held else {"pin_memory": device.type == "cuda"}
        if self._supervised:
            share = settings.batch // world_size()
            self._loader = source.loader(share, seed=seed, drop_last=True, **threads)
        elif augmented:
            views = simclr(data.resolution)
            self._loader = data.pairs(
                batch_size=settings.batch, seed=seed, views=views, divide=True, num_workers=cores(), **threads
            )
        else:
            self._loader = source.pairs(**pairs_of(settings), seed=seed, divide=True, **threads)
        self._next = 0
        self._batches: Iterator[Any] = iter(())

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The batch of a step: pictures, their positives (supervised: the same pictures), and the latents z.

        Steps that are asked for in order are made ahead.
        """
        if step != self._next:
            self._go_to(step)
        batch = next(self._batches, None)
        while batch is None:  # the pass is over, and the next one is the next epoch
            self._batches = iter(self._loader)
            batch = next(self._batches, None)
        self._next = step + 1
        needed = (batch[0], batch[-1]) if self._supervised else batch[:3]  # a text may stand between them
        x, *rest = (part.to(self.device, non_blocking=True) for part in needed)
        return (x, x, rest[0]) if self._supervised else (x, rest[0], rest[1])

    def _go_to(self, step: int) -> None:
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
        self._batches = iter(())
        state = self._loader.state_dict()
        if self._supervised:
            epoch, place = divmod(step, len(self._loader))
            size = self._loader.order.batch_size * world_size()
            self._loader.load_state_dict({**state, "epoch": epoch, "seen": place * size})
        else:
            self._loader.load_state_dict({**state, "next": step})


def check_cache(settings: ThreeDIdentSettings, cache: str) -> None:
    """Refuse a cache that cannot be.

    Raises:
        SpecError: another name; a device's for views.
    """
    one_of("cache", cache, ("auto", "device", "disk"))
    if cache == "device" and settings.mode == "unsupervised" and settings.pairs == "augmented":
        raise SpecError("cache = device with pairs = augmented: views are made on the CPU; choose auto or disk")


def pairs_of(settings: ThreeDIdentSettings) -> dict[str, Any]:
    """The arguments of `data.pairs` that settings ask for."""
    if settings.pairs == "exact":
        return {"batch_size": settings.batch}
    return {
        "conditional": settings.conditional,
        "batch_size": settings.batch,
        "match": settings.match,
        "allow_self": settings.allow_self,
    }

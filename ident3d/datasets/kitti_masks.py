"""KITTI Masks: silhouettes of pedestrians whose position and size move sparsely, and a synthetic stand-in for them.

Klindt et al. 2021 (Towards Nonlinear Disentanglement in Natural Data with Temporal Sparse Coding) cut them from the
videos of KITTI MOTS; Zimmermann et al. 2021 train on pairs of their frames (section A.3, table 3). They are one pickle,
`kitti_peds_v2.pickle` of Zenodo record 3931823: a dict of `pedestrians`, a list of boolean arrays (T, 64, 64), and
`pedestrians_latents`, a list of float32 arrays (T, 3). Frames are 0.05 s apart.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from ident3d.checks import whole
from ident3d.datasets.batches import BatchStream, generator_of
from ident3d.datasets.mask_pickle import FILE, read_sequences
from ident3d.datasets.serving import Array, Transform
from ident3d.datasets.silhouettes import FRAMES, SEQUENCES, SIDE, make_silhouettes
from ident3d.errors import DatasetError, SpecError
from ident3d.factors import Factor, Factors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["KITTI_FACTORS", "KittiMasks", "MaskPairs"]

FRAME_SECONDS = 0.05
MAX_DELTA_T = 1000

KITTI_FACTORS = Factors(
    Factor(name, column, 0.0, high, unit, target, drives)
    for column, (name, high, unit, target, drives) in enumerate(
        [
            ("centre_y", SIDE - 1.0, "px", "mask.centre.y", "row of the mask's centre of mass, downwards"),
            ("centre_x", SIDE - 1.0, "px", "mask.centre.x", "column of the mask's centre of mass, to the right"),
            ("area", float(SIDE**2), "px^2", "mask.area", "number of the mask's pixels"),
        ]
    )
)
"""The three latents and the ranges that a mask of 64 x 64 pixels allows; the centre of the first pixel is at 0."""

Device = str | torch.device | None
MaskBatch = tuple[
    UInt8[Tensor, "batch 1 64 64"],
    UInt8[Tensor, "batch 1 64 64"],
    Float32[Tensor, "batch 3"],
    Float32[Tensor, "batch 3"],
]


class KittiMasks(Dataset[tuple[Any, Any, Any, Any]]):
    """Pairs of masks of one pedestrian, shortly after each other; item i is (x, x~, z, z~).

    Masks are uint8 tensors (1, 64, 64) of 0 and 1, latents float32 tensors (3,): row and column of the centre of mass
    in pixels, and area in pixels, as the file has them, never rescaled. Item i is the i-th frame that has a successor,
    with the frame d later, d uniform in 1..max_delta_t, clipped to the end of the sequence: as in the published reader,
    but that there d is drawn anew each time, and here it is a function of (seed, epoch, i): see `set_epoch`. Mean
    distances of 0.05 s and 0.15 s (Zimmermann et al. 2021, table 3) are `max_delta_t` of 1 and 5.

    With `synthetic=True` no file is read, and walking silhouettes are made in the same structure, for when the real
    data is out of reach: results on them are none on KITTI Masks, and title, figures and `repr` say so.

    Args:
        root: the pickle, or a folder that holds it as `kitti_peds_v2.pickle`.
        max_delta_t: how many frames of 0.05 s the positive is at most later, 1 to 1000.
        transform: applied to each of the two masks.
        target_transform: applied to each of the two latents.
        download: fetch the pickle into the folder where it is not there.
        synthetic: make silhouettes in place of reading a file.
        seed: what steps, and the silhouettes, are drawn from; 0 or more.
        sequences: how many sequences of silhouettes, 500 by default.
        frames: of their longest, 60 by default: see `ident3d.datasets.silhouettes.make_silhouettes`.

    Attributes:
        max_delta_t, transform, target_transform, synthetic, seed: as given.
        path: of the pickle; None where the data is synthetic.
        title: what the data is, in some words for figures; says where it is synthetic.
        masks: uint8 (frames, 64, 64) of 0 and 1, all sequences one after the other.
        latents: float32 (frames, 3), likewise.
        sequences: int64 (sequences + 1,): sequence k is the frames sequences[k] up to sequences[k + 1].
        anchors: int64 (len(self),): the frames that have a successor, all but the last of each sequence.
        factors: the latents' names, ranges and units.

    Raises:
        SpecError: an option out of range, or options that exclude each other.
        DatasetError: no pickle there, one that is damaged or not of this structure, or a sequence of less than two
            frames, which the published file has none of.
        DownloadError: the pickle could not be fetched.

    Example:
        >>> data = KittiMasks(synthetic=True, max_delta_t=5, sequences=20)
        >>> x, positive, z, z_positive = data[0]
        >>> x.shape, x.dtype, z.shape, int(x.sum()) == z[2]
        (torch.Size([1, 64, 64]), torch.uint8, torch.Size([3]), tensor(True))
        >>> data.title
        'KITTI Masks (SYNTHETIC silhouettes, seed 0)'
        >>> batch = next(iter(data.pairs(batch_size=32)))
        >>> [tuple(part.shape) for part in batch]
        [(32, 1, 64, 64), (32, 1, 64, 64), (32, 3), (32, 3)]
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        max_delta_t: int = 1,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        download: bool = False,
        synthetic: bool = False,
        seed: int = 0,
        sequences: int | None = None,
        frames: int | None = None,
    ) -> None:
        self.max_delta_t, self.seed = _checked_distance(max_delta_t), whole("seed", seed, 0)
        self.transform, self.target_transform, self.synthetic = transform, target_transform, synthetic
        self.path: Path | None = None
        self.title, self.factors, self._epoch = "KITTI Masks", KITTI_FACTORS, 0
        if synthetic:
            if root is not None or download:
                raise SpecError(f"root={root!r}, download={download}: expected neither with synthetic=True")
            self.title += f" (SYNTHETIC silhouettes, seed {self.seed})"
            sequences, frames = SEQUENCES if sequences is None else sequences, FRAMES if frames is None else frames
            masks, latents = make_silhouettes(sequences, self.seed, frames)
        else:
            if sequences is not None or frames is not None:
                raise SpecError(f"sequences={sequences}, frames={frames}: only with synthetic=True; the file decides")
            self.path = find_pickle(root, download)
            masks, latents = read_sequences(self.path)
        self._join(masks, latents)

    def _join(self, masks: list[Array], latents: list[Array]) -> None:
        lengths = [len(part) for part in masks]
        self.sequences: Int64[Array, " bounds"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.latents: Float32[Array, "frames 3"] = np.concatenate(latents).astype(np.float32, copy=False)
        self.masks: UInt8[Array, "frames 64 64"] = np.empty((len(self.latents), SIDE, SIDE), np.uint8)
        for k, start in enumerate(self.sequences[:-1]):
            self.masks[start : start + lengths[k]] = masks[k]
            masks[k] = np.empty(0)  # what is copied need not be held twice
        ends = np.repeat(self.sequences[1:] - 1, lengths)
        self.anchors: Int64[Array, " anchors"] = np.flatnonzero(np.arange(len(ends)) < ends)
        self._ends: Int64[Array, " anchors"] = ends[self.anchors]

    def set_epoch(self, epoch: int) -> None:
        """Draw the steps of another epoch's items. Workers that persist keep the epoch that they were started in.

        Args:
            epoch: 0 or more.

        Raises:
            SpecError: a negative epoch.
        """
        self._epoch = whole("epoch", epoch, 0)

    def pair_of(self, index: SupportsIndex) -> tuple[int, int]:
        """The frames of an item: the numbers, in `masks` and `latents`, of the anchor and its positive.

        Raises:
            IndexError: no such item.
        """
        i = operator.index(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"item {i} of {len(self)}")
        i %= len(self)
        generator = generator_of("kitti masks, item", self.seed, self._epoch, i)
        step = int(torch.randint(1, self.max_delta_t + 1, (), generator=generator))
        return int(self.anchors[i]), min(int(self.anchors[i]) + step, int(self._ends[i]))

    def __len__(self) -> int:
        return len(self.anchors)

    def __getitem__(self, index: SupportsIndex) -> tuple[Any, Any, Any, Any]:
        frames = self.pair_of(index)
        # Copies, so that a transform that works in place leaves the store as it is.
        x: list[Any] = [torch.from_numpy(self.masks[frame].copy())[None] for frame in frames]
        z: list[Any] = [torch.from_numpy(self.latents[frame].copy()) for frame in frames]
        if self.transform is not None:
            x = [self.transform(mask) for mask in x]
        if self.target_transform is not None:
            z = [self.target_transform(latent) for latent in z]
        return x[0], x[1], z[0], z[1]

    def pairs(
        self,
        batch_size: int,
        seed: int = 0,
        *,
        batches: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: Device = None,
    ) -> MaskPairs:
        """Batches of pairs for training, cut from memory without a DataLoader; arguments, errors: see `MaskPairs`."""
        return MaskPairs(self, batch_size, seed=seed, batches=batches, rank=rank, world_size=world_size, device=device)

    def transitions(self, max_delta_t: int | None = None) -> Float32[Array, "pairs 3"]:
        """z~ - z of all pairs: each anchor with each d of 1..max_delta_t (the dataset's own), which are all as likely.

        Their histograms, in pixels, show how sparse the motion is (Klindt et al. 2021). Raises SpecError for a distance
        that is none.
        """
        steps = np.arange(1, (self.max_delta_t if max_delta_t is None else _checked_distance(max_delta_t)) + 1)
        positives = np.minimum(self.anchors[:, None] + steps, self._ends[:, None])
        moved: Array = self.latents[positives] - self.latents[self.anchors][:, None]
        return moved.reshape(-1, len(self.factors))

    def plot(self, index: SupportsIndex = 0) -> Figure:
        """Item `index` as a figure: both masks, with crosses where the latents say that their centres are.

        Raises:
            IndexError: no such item.
        """
        from matplotlib.figure import Figure

        pair = self.pair_of(index)
        sequence = int(np.searchsorted(self.sequences, pair[0], side="right")) - 1
        later = FRAME_SECONDS * (pair[1] - pair[0])
        names = (f"sequence {sequence}, frame {pair[0] - self.sequences[sequence]}", f"{later:.2f} s later")
        figure = Figure(figsize=(6.0, 3.8), layout="constrained")
        for ax, frame, name in zip(figure.subplots(1, 2), pair, names, strict=True):
            y, x, area = self.latents[frame].tolist()
            ax.imshow(self.masks[frame], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            ax.plot([x], [y], marker="+", color="tab:red")
            ax.set_title(f"{name}\ncentre ({y:.1f}, {x:.1f}) px, area {area:g} px²", fontsize=8)
            ax.set_axis_off()
        figure.suptitle(self.title, fontsize=9)
        return figure

    def __repr__(self) -> str:
        counts = np.diff(self.sequences)
        return "\n".join(
            [
                f"{self.title}: {len(self):,} pairs",
                f"    {len(counts):,} sequences of {counts.min()} to {counts.max()} frames of {SIDE} x {SIDE} px",
                f"    {len(self.masks):,} frames in all ({self.masks.nbytes / 1e6:,.1f} MB)",
                f"    positives: up to {self.max_delta_t} x {FRAME_SECONDS} s later",
                f"    factors: {', '.join(self.factors.names)}",
                *([] if self.path is None else [f"    path: {self.path}"]),
                *(f"    {name}: {t!r}" for name in ("transform", "target_transform") if (t := getattr(self, name))),
            ]
        )


class MaskPairs(BatchStream):
    """Batches (x, x~, z, z~) of `KittiMasks`: uint8 (B, 1, 64, 64) of 0 and 1, twice, and float32 (B, 3), twice.

    The published order: anchors are all frames that have a successor, shuffled anew for each pass, so that no two of a
    batch are the same; what is left of a pass and fills no batch is left out. Uniform over frames, not over sequences:
    one of T frames serves in proportion to T - 1. Batch k of a seed is always the same, on any rank and device.

    Args:
        data: the masks.
        batch_size: pairs a batch, at most as many as there are anchors.
        device: where masks and latents are held and batches are cut, e.g. `cuda`; by default the dataset's own memory.
        series: as for `BatchStream`: seed (0 by default for `pairs`), batches a rank and epoch, rank, world_size.

    Raises:
        SpecError: a value out of range, a device that is not there, or a dataset with transforms, which are for items.
    """

    def __init__(self, data: KittiMasks, batch_size: int, *, device: Device = None, **series: Any) -> None:
        super().__init__(len(data), batch_size=batch_size, **series)
        if self.batch_size > len(data):
            raise SpecError(f"batch_size = {batch_size}: expected at most {len(data)}, as many as there are anchors")
        if data.transform is not None or data.target_transform is not None:
            raise SpecError("transform, target_transform: for items; apply them to the batches of pairs() instead")
        self.kind = f"{data.title}, {len(data.masks)} frames, max_delta_t = {data.max_delta_t}"
        self.max_delta_t = data.max_delta_t
        self._anchors, self._ends = torch.from_numpy(data.anchors), torch.from_numpy(data._ends)
        self._masks, self._latents = (_on(torch.from_numpy(part), device) for part in (data.masks, data.latents))
        self._order: tuple[int, Int64[Tensor, " anchors"]] = (-1, self._anchors)

    def frames(self, number: int) -> tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]]:
        """The frames of a batch's anchors and of their positives, on the CPU."""
        # Passes are counted over all ranks' batches, so that who asks changes nothing.
        count, place = divmod(number, self.samples // self.batch_size)
        if self._order[0] != count:
            generator = generator_of("kitti masks, anchors", self.seed, count)
            self._order = (count, torch.randperm(self.samples, generator=generator))
        chosen = self._order[1][place * self.batch_size : (place + 1) * self.batch_size]
        generator = generator_of("kitti masks, steps", self.seed, number)
        steps = torch.randint(1, self.max_delta_t + 1, (self.batch_size,), generator=generator)
        anchors = self._anchors[chosen]
        return anchors, torch.minimum(anchors + steps, self._ends[chosen])

    def batch(self, number: int) -> MaskBatch:  # type: ignore[override]  # not places to look up, but what is there
        """Batch `number` of the series, of all ranks': a function of the seed and the number alone."""
        pair = self.frames(number)
        (x, positive), (z, z_positive) = ([_cut(held, k) for k in pair] for held in (self._masks, self._latents))
        return x[:, None], positive[:, None], z, z_positive

    def __iter__(self) -> Iterator[MaskBatch]:  # type: ignore[override]
        return cast(Iterator[MaskBatch], super().__iter__())


def _cut(held: Tensor, frames: Int64[Tensor, " batch"]) -> Tensor:
    if held.device.type != "cpu":
        return held[frames.to(held.device)]
    # By numpy: where cores are busy, torch's threads wait for each other far longer than the copy takes.
    return torch.from_numpy(held.numpy().take(frames.numpy(), axis=0))


def _on(part: Tensor, device: Device) -> Tensor:
    if device is None:
        return part
    try:
        return part.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SpecError(f"device={str(device)!r}: {reason}; expected e.g. cpu, cuda or cuda:0") from None


def _checked_distance(max_delta_t: int) -> int:
    if whole("max_delta_t", max_delta_t, 1) > MAX_DELTA_T:
        raise SpecError(f"max_delta_t = {max_delta_t}: expected at most {MAX_DELTA_T} frames of {FRAME_SECONDS} s")
    return int(max_delta_t)


def find_pickle(root: str | os.PathLike[str] | None, download: bool = False) -> Path:
    """The published pickle at `root`, or in that folder; fetched where it is not there and `download` is true.

    Raises:
        SpecError: no root.
        DatasetError: nothing there.
        DownloadError: it could not be fetched.
    """
    if root is None:
        raise SpecError(f"root=None: expected {FILE} or its folder; or synthetic=True, for silhouettes in its place")
    given = Path(root).expanduser()
    is_pickle = given.is_file() or (given.suffix == ".pickle" and not given.is_dir())
    folder, path = (given.parent, given) if is_pickle else (given, given / FILE)
    if download and not path.exists():
        from ident3d.datasets.download import download as fetch

        fetched = Path(fetch("kitti-masks", folder))
        path = fetched / FILE if fetched.is_dir() else fetched
    if not path.is_file():
        raise DatasetError(
            f"{path}: not there; `ident3d download kitti-masks --root {folder}` or download=True brings it, and "
            "synthetic=True makes silhouettes in its place"
        )
    return path

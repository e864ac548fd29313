"""The command of table 3: `ident3d-baselines kitti`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from ident3d.baselines.devices import Precision
from ident3d.baselines.kitti_settings import (
    KittiSettings,
    Model,
    Preset,
    delta_t_of,
    preset_settings,
    row_settings,
    what_of,
)
from ident3d.baselines.paper import KITTI_ROWS, SpaceName
from ident3d.errors import SpecError

if TYPE_CHECKING:
    from ident3d.baselines.results import Result
    from ident3d.datasets.kitti_masks import KittiMasks

__all__ = ["Kitti", "open_masks", "row_of", "settings_of"]

PIECES = ("model", "conditional", "model_space", "mean_dt", "max_delta_t")
"""Options that a row stands for."""


@dataclass(frozen=True)
class Kitti:
    """Train SlowVAE or contrastive encoders on KITTI Masks: a row of table 3, all of them, or pieces of your own.

    The same command goes on where it was stopped. What is not given is as the preset has it. The masks are those of
    --data, fetched with --download where they are not there, or --synthetic silhouettes, which are not KITTI Masks and
    are called synthetic in every output.

    Attributes:
        data: kitti_peds_v2.pickle, or the folder that holds it or gets it.
        download: fetch the pickle where it is not there; without --data, into the cache folder.
        synthetic: walking silhouettes made here, in place of the pickle.
        row: a row of table 3, 3.1 to 3.10, or all; or name the pieces.
        model: contrastive, or slowvae.
        conditional: of contrastive models, the law that the loss assumes: laplace, normal or gennorm(P).
        model_space: where representations live: unbounded or box (or sphere, with --conditional vmf).
        mean_dt: mean time between the frames of a pair in seconds: 0.05 or 0.15 in the paper.
        max_delta_t: the same in frames: a positive is 1 to so many frames later; 1 or 5 in the paper.
        preset: paper: section A.3 to the letter; quick: the same models and losses for minutes on two CPU cores.
        seeds: how many seeds; they train side by side.
        first_seed: the first of them.
        out: the run's folder; by default runs/kitti/NAME, where NAME tells row or pieces and preset. With --row all,
            that of a folder for each row and of table-3.md.
        dim: how many codes.
        steps: training steps.
        batch: pairs a step: 32 are the paper's batch of 64 masks.
        beta: of slowvae, the weight of the KL to the standard normal.
        gamma: of slowvae, the weight of the KL to the transition prior; 0 for a beta-VAE.
        rate: of slowvae's transition prior.
        learning_rate: of Adam.
        scale_learning_rate: of the box's bounds.
        schedule: constant, or a cosine that falls to 0.
        warmup: share of the steps over which learning rates rise from 0.
        tau: the loss's temperature.
        include_self: whether each anchor is among its own negatives, as published.
        positive_in_denominator: whether the positive's term stands in the loss's denominator.
        samples: masks that are scored, 10,000 in the paper.
        precision: of convolutions and products of matrices.
        device: auto, cpu, cuda, cuda:N or mps.
        compile: compile the networks with torch.compile.
        log_every: steps from one line of the log to the next.
        evaluate_every: steps from one evaluation to the next.
        checkpoint_every: steps from one checkpoint to the next.
        tensorboard: write events for TensorBoard as well.
        quiet: no progress bar.
    """

    data: Annotated[Path | None, arg(metavar="PICKLE|DIR")] = None
    download: FlagCreatePairsOff[bool] = False
    synthetic: FlagCreatePairsOff[bool] = False
    row: Annotated[str | None, arg(metavar="3.R|all")] = None
    model: Model | None = None
    conditional: str | None = None
    model_space: SpaceName | None = None
    mean_dt: Annotated[float | None, arg(metavar="SECONDS")] = None
    max_delta_t: int | None = None
    preset: Preset = "quick"
    seeds: int = 10
    first_seed: int = 0
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    dim: int | None = None
    steps: int | None = None
    batch: int | None = None
    beta: float | None = None
    gamma: float | None = None
    rate: float | None = None
    learning_rate: float | None = None
    scale_learning_rate: float | None = None
    schedule: Literal["constant", "cosine"] | None = None
    warmup: float | None = None
    tau: float | None = None
    include_self: bool | None = None
    positive_in_denominator: bool | None = None
    samples: int | None = None
    precision: Precision | None = None
    device: str = "auto"
    compile: FlagCreatePairsOff[bool] = False
    log_every: int = 100
    evaluate_every: int = 1000
    checkpoint_every: int = 1000
    tensorboard: FlagCreatePairsOff[bool] = False
    quiet: FlagCreatePairsOff[bool] = False

    def run(self) -> None:
        """Train, and print the scores."""
        if self.row != "all":
            settings = settings_of(self, self.row)
            row = row_of(settings) if self.row is None else self.row
            out = Path("runs/kitti", self.name()) if self.out is None else self.out
            self.train(settings, row, out, {})
            return
        every = {published.row: settings_of(self, published.row) for published in KITTI_ROWS}
        out = Path("runs/kitti", self.name()) if self.out is None else self.out
        opened: dict[int, KittiMasks] = {}
        results = [self.train(settings, row, out / row, opened) for row, settings in every.items()]
        from ident3d.baselines.table_formats import to_text
        from ident3d.baselines.tables import table_sheet, write_table

        print(to_text(table_sheet(3, results)), end="")
        write_table(3, results, out / "table-3.md")
        print((out / "table-3.md").absolute())

    def train(self, settings: KittiSettings, row: str | None, out: Path, opened: dict[int, KittiMasks]) -> Result:
        """Train one experiment, print its scores, and keep the masks that were opened."""
        from ident3d.baselines.kitti_masks import run_kitti
        from ident3d.baselines.results import spread
        from ident3d.baselines.training_settings import RunOptions, seeds_of

        seeds = seeds_of(self.seeds, self.first_seed)
        options = RunOptions(**{f.name: getattr(self, f.name) for f in dataclasses.fields(RunOptions)})
        data = opened.get(settings.max_delta_t) or open_masks(self, settings.max_delta_t)
        opened[settings.max_delta_t] = data
        result = run_kitti(
            settings, data, seeds, out=out, device=self.device, options=options, row=row, preset=self.preset
        )
        print(f"{what_of(settings)}, on {data.title}{f' (row {row})' if row else ''}")
        for name, label in (("mcc_spearman", "MCC (Spearman)"), ("mcc", "MCC (Pearson)"), ("r2", "R2")):
            values = ", ".join(f"{100 * v:.1f}" for v in result.scores[name])
            which = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
            print(f"  {label:15}{spread(result.scores[name])} %  ({which}: {values})")
        print(f"{out / 'result.json'}: {result.steps:,} steps in {result.wall_s:,.0f} s on {result.device}")
        return result

    def name(self) -> str:
        """The default folder's name."""
        dt = None if self.mean_dt is None else f"{self.mean_dt:g}s"
        frames = None if self.max_delta_t is None else f"{self.max_delta_t}frames"
        pieces = [self.model, self.conditional, self.model_space, dt, frames]
        what = self.row or "-".join(piece for piece in pieces if piece) or "contrastive"
        return f"{what}-{self.preset}{'-synthetic' if self.synthetic else ''}"


def open_masks(command: Kitti, max_delta_t: int) -> KittiMasks:
    """The masks that a command asks for.

    Raises:
        SpecError: it asks for none, or for two kinds.
        DatasetError, DownloadError: as `KittiMasks` does.
    """
    from ident3d.datasets.kitti_masks import KittiMasks
    from ident3d.home import cache_home

    if command.synthetic:
        if command.data is not None or command.download:
            raise SpecError("synthetic = True with data or download: expected either silhouettes or the pickle")
        return KittiMasks(synthetic=True, max_delta_t=max_delta_t)
    if command.data is None and not command.download:
        raise SpecError(
            "data = None: expected --data, kitti_peds_v2.pickle or its folder; --download to fetch it; or --synthetic, "
            "for silhouettes in its place"
        )
    root = cache_home() / "datasets" if command.data is None else command.data
    return KittiMasks(root, max_delta_t=max_delta_t, download=command.download)


def settings_of(command: Kitti, row: str | None) -> KittiSettings:
    """A preset or a row, with what a command's options change of it.

    Raises:
        SpecError: a row with options that it stands for, an unknown row, or a value out of range.
    """
    given: dict[str, Any] = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}
    given = {name: value for name, value in given.items() if value is not None}
    if row is not None:
        for name in PIECES:
            if name in given:
                raise SpecError(f"{name} = {given[name]} with row = {command.row}: a row has its own; leave one out")
    if "mean_dt" in given:
        if "max_delta_t" in given:
            raise SpecError(f"mean_dt = {given['mean_dt']}, max_delta_t = {given['max_delta_t']}: expected one of them")
        given["max_delta_t"] = delta_t_of(given["mean_dt"])
    start = preset_settings(command.preset) if row is None else row_settings(row, command.preset)
    changes = {name: value for name, value in given.items() if hasattr(start, name)}
    if changes.get("conditional") == "gennorm":
        changes["conditional"] = "gennorm(3)"
    of_training = {name: value for name, value in given.items() if hasattr(start.training, name)}
    changes["training"] = dataclasses.replace(start.training, **of_training)
    return dataclasses.replace(start, **changes)


def row_of(settings: KittiSettings) -> str | None:
    """The row of table 3 that settings are of, by model, conditional, model space and time; None for other settings."""
    if settings.model == "slowvae" and settings.gamma == 0:
        return None  # a beta-VAE
    names = ("model", "model_space", "max_delta_t", *(("conditional",) if settings.model == "contrastive" else ()))
    for published in KITTI_ROWS:
        row = row_settings(published.row, "paper")
        if all(getattr(row, name) == getattr(settings, name) for name in names):
            return published.row
    return None

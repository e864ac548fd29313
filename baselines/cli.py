"""The command line: `ident3d-baselines ...`, one dataclass a command; its fields are the options, their docs the
help."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes, Positional, arg, subcommand

from ident3d.baselines.cli_kitti import Kitti
from ident3d.baselines.cli_threedident import Predict, ThreeDIdent
from ident3d.baselines.devices import Precision
from ident3d.baselines.mlp_settings import MLPSettings, Mode, Preset, preset_settings, row_settings
from ident3d.baselines.paper import SpaceName
from ident3d.baselines.results import spread
from ident3d.baselines.training_settings import seeds_of
from ident3d.commands import run_command
from ident3d.errors import SpecError

__all__ = ["main"]


@dataclass(frozen=True)
class MLP:
    """Train the synthetic benchmark: a row of table 1 or 2, or a combination of your own.

    The same command goes on where it was stopped. What is not given is as the preset has it.

    Attributes:
        row: a row of the paper's tables, 1.1 to 1.12 or 2.1 to 2.10; or name the pieces.
        preset: paper: section A.3 to the letter; fast: the same model and loss in far fewer steps; quick: minutes on
            two CPU cores.
        seeds: how many seeds; they train side by side.
        first_seed: the first of them.
        out: the run's folder; by default runs/mlp/NAME, where NAME tells row or pieces, mode and preset.
        mode: what trains the encoder: positive pairs, the true latents, or nothing (the observations are scored).
        space: where latents live.
        marginal: p(z): uniform, normal(SCALE), laplace(SCALE), gennorm(SCALE, BETA) or vmf(KAPPA).
        conditional: p(z~ | z): laplace(0.05), normal(0.05), gennorm(0.05, 3), vmf(10), ...
        model_space: where representations live.
        model: the conditional that the loss assumes: vmf, laplace, normal or gennorm(P).
        dim: N, how many latents.
        steps: training steps.
        batch: B, pairs a step.
        learning_rate: of Adam.
        scale_learning_rate: of the model space's radius or bounds.
        tau: the loss's temperature.
        include_self: whether each anchor is among its own negatives, as published.
        positive_in_denominator: whether the positive's term stands in the loss's denominator.
        precision: of products of matrices.
        device: auto, cpu, cuda, cuda:N or mps.
        compile: compile the encoder with torch.compile.
        log_every: steps from one line of the log to the next.
        evaluate_every: steps from one evaluation to the next.
        checkpoint_every: steps from one checkpoint to the next.
        tensorboard: write events for TensorBoard as well.
        quiet: no progress bar.
    """

    row: Annotated[str | None, arg(metavar="T.R")] = None
    preset: Preset = "fast"
    seeds: int = 5
    first_seed: int = 0
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    mode: Mode = "unsupervised"
    space: SpaceName | None = None
    marginal: str | None = None
    conditional: str | None = None
    model_space: SpaceName | None = None
    model: str | None = None
    dim: int | None = None
    steps: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    scale_learning_rate: float | None = None
    tau: float | None = None
    include_self: bool | None = None
    positive_in_denominator: bool | None = None
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
        from ident3d.baselines.mlp import run_mlp
        from ident3d.baselines.training import RunOptions

        settings = settings_of(self, self.row, self.preset)
        seeds = seeds_of(self.seeds, self.first_seed)
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunOptions)}
        out = Path("runs/mlp", self.name()) if self.out is None else self.out
        result = run_mlp(
            settings,
            seeds,
            out=out,
            device=self.device,
            options=RunOptions(**options),
            row=self.row,
            preset=self.preset,
        )
        for name in ("r2", "mcc"):
            values = ", ".join(f"{100 * v:.2f}" for v in result.scores[name])
            which = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
            print(f"{name.upper():4}{spread(result.scores[name])} %  ({which}: {values})")
        print(f"{out / 'result.json'}: {result.steps:,} steps in {result.wall_s:,.0f} s on {result.device}")

    def name(self) -> str:
        """The default folder's name."""
        pieces = [self.space, self.marginal, self.conditional, self.model_space, self.model]
        what = self.row or "-".join(p for p in pieces if p) or "box"
        return f"{what}-{self.mode}-{self.preset}"


@dataclass(frozen=True)
class Table:
    """Print a table of the paper beside the results of a folder.

    Attributes:
        number: 1, 2, 3 (KITTI Masks), 4 (3DIdent, test set) or 5 (3DIdent, training set).
        results: the folder in which results lie, at any depth.
        out: a file to write as well: .txt, .md, .png, .pdf or .svg.
    """

    number: Positional[Annotated[int, arg(metavar="N")]]
    results: Annotated[Path, arg(metavar="DIR")]
    out: Annotated[Path | None, arg(metavar="FILE")] = None

    def run(self) -> None:
        """Print, and write where asked."""
        from ident3d.baselines.results import load_results
        from ident3d.baselines.table_formats import to_text
        from ident3d.baselines.tables import table_sheet, write_table

        results = load_results(self.results)
        print(to_text(table_sheet(self.number, results)), end="")
        if self.out is not None:
            write_table(self.number, results, self.out)
            print(self.out.absolute())


@dataclass(frozen=True)
class Figure:
    """Sweep the concentration of the marginal for a fixed conditional, and plot R2 (figure 2).

    The same command goes on where it was stopped; points that are finished are read.

    Attributes:
        number: 2.
        out: the folder of the runs, and of figure-2.png.
        preset: paper, fast or quick.
        seeds: how many seeds a point; they train side by side.
        concentrations: kappa of the marginal, 0 for the uniform law.
        held: kappa of the conditional.
        dim: N, how many latents.
        steps: training steps.
        batch: B, pairs a step.
        device: auto, cpu, cuda, cuda:N or mps.
        quiet: no progress bar.
    """

    number: Positional[Annotated[int, arg(metavar="N")]]
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/figure-2")
    preset: Preset = "fast"
    seeds: int = 3
    concentrations: tuple[float, ...] = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    # `conditional` is a law in MLPSettings, which takes what an option of its name says.
    held: Annotated[float, arg(name="conditional")] = 10.0
    dim: int | None = None
    steps: int | None = None
    batch: int | None = None
    device: str = "auto"
    quiet: FlagCreatePairsOff[bool] = False

    def run(self) -> None:
        """Train, plot, and say where the figure is."""
        from ident3d.baselines.figure2 import sweep, sweep_figure, sweep_settings
        from ident3d.baselines.training import RunOptions
        from ident3d.figures import save_figure

        if self.number != 2:
            raise SpecError(f"figure {self.number}: expected 2, the sweep of the marginal's concentration")
        start = settings_of(self, None, self.preset)
        points = sweep_settings(start, self.concentrations, self.held)
        options = RunOptions(quiet=self.quiet)
        seeds = seeds_of(self.seeds)
        results = sweep(points, seeds, self.out, preset=self.preset, device=self.device, options=options)
        for kappa, result in results.items():
            print(f"marginal {kappa:g}: R2 {spread(result.scores['r2'])} %")
        save_figure(sweep_figure(results), self.out / "figure-2.png")
        print((self.out / "figure-2.png").absolute())


@dataclass(frozen=True)
class Curves:
    """Plot the learning curves of a folder's results.

    Of the synthetic benchmark a panel a row, and how many fewer steps than `paper` presets take; of 3dident R2 and MCC,
    a line a run; of kitti MCC, a panel a distance in time.

    Attributes:
        results: the folder in which results lie, at any depth; of mlp at most one of each row and preset.
        out: the file to write: .png, .pdf or .svg.
    """

    results: Positional[Annotated[Path, arg(metavar="DIR")]]
    out: Annotated[Path, arg(metavar="FILE")] = Path("curves.png")

    def run(self) -> None:
        """Plot, and print the comparison."""
        from ident3d.baselines.curves import curves_figure, speed_ups
        from ident3d.baselines.mask_curves import mask_curves_figure
        from ident3d.baselines.picture_curves import picture_curves_figure
        from ident3d.baselines.results import load_results
        from ident3d.figures import check_figure_path, save_figure

        check_figure_path(self.out)
        results = load_results(self.results)
        kinds = {result.experiment for result in results}
        if len(kinds) > 1:
            raise SpecError(f"{self.results}: holds results of {' and '.join(sorted(kinds))}; give a folder of one")
        figures = {"3dident": picture_curves_figure, "kitti": mask_curves_figure}
        if kinds <= set(figures):
            save_figure(figures[kinds.pop()](results), self.out)
            print(self.out.absolute())
            return
        save_figure(curves_figure(results), self.out)
        for line in speed_ups(results):
            level = f"{line.score.upper()} {100 * line.level:.1f} %"
            by, least = ("by its first evaluation, ", "at least ") if line.at_once else ("", "")
            steps = (
                "never"
                if line.ratio is None
                else f"{by}after {line.steps:,.0f} steps, {least}{line.ratio:.1f} times fewer"
            )
            print(f"row {line.row}: paper has {level} after {line.paper_steps:,.0f} steps, {line.preset} {steps}")
        print(self.out.absolute())


def settings_of(command: Any, row: str | None, preset: str) -> MLPSettings:
    """A preset or a row, with what a command's options change of it."""
    given = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}
    given = {name: value for name, value in given.items() if value is not None}
    start = preset_settings(preset)
    changes = {name: value for name, value in given.items() if hasattr(start, name)}
    of_training = {name: value for name, value in given.items() if hasattr(start.training, name)}
    changes["training"] = dataclasses.replace(start.training, **of_training)
    return dataclasses.replace(start, **changes) if row is None else row_settings(row, preset, **changes)


Command = (
    Annotated[MLP, subcommand("mlp")]
    | Annotated[Kitti, subcommand("kitti")]
    | Annotated[ThreeDIdent, subcommand("3dident")]
    | Annotated[Predict, subcommand("predict")]
    | Annotated[Table, subcommand("table")]
    | Annotated[Figure, subcommand("figure")]
    | Annotated[Curves, subcommand("curves")]
)


def main(args: list[str] | None = None) -> None:
    """Run one command; exit status 2 for a user's mistake, 130 for Ctrl-C."""

    def run() -> int | None:
        command: Command = tyro.cli(
            Command,
            prog="ident3d-baselines",
            description="The baselines of Zimmermann et al. 2021, on data whose factors are known.",
            args=args,
            config=(OmitSubcommandPrefixes,),
        )
        command.run()
        return None

    run_command("ident3d-baselines", run)

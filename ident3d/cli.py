"""The command line: `ident3d ...`, one dataclass a command; its fields are the options, their docs the help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes, Positional, UseAppendAction, arg, subcommand

from ident3d.cli_render import Finalize, Render
from ident3d.commands import run_command
from ident3d.conversion.options import ConvertOptions

if TYPE_CHECKING:
    from ident3d.shards.verify import Problem

__all__ = ["main"]


@dataclass(frozen=True)
class Scenes:
    """List the bundled scenes, or print one: `ident3d scenes show NAME`.

    Attributes:
        action: list or show.
        name: for show, a bundled scene or the path of a .toml.
    """

    action: Positional[Literal["list", "show"]] = "list"
    name: Positional[str | None] = None

    def run(self) -> None:
        """Print to stdout."""
        from ident3d.errors import SpecError
        from ident3d.scenes import bundled_scenes, load_scene, scene_text

        if self.action == "show":
            if self.name is None:
                raise SpecError(f"scenes show: expected a name, one of {', '.join(bundled_scenes())}, or a .toml")
            print(scene_text(self.name), end="")
            return
        for name in bundled_scenes():
            print(f"{name:12} {load_scene(name).spec.description}")


@dataclass(frozen=True)
class Verify:
    """Check every byte of a dataset. Exit status 1 where something is wrong.

    Attributes:
        dataset: the dataset's folder.
        quick: checksums only; by default every picture is decoded too.
        sample: check so many shards in full, and of the others name and size; says how sure one may be then.
        seed: with --sample, what chooses the shards; another seed chooses others.
        repair: render again just what is damaged.
        blender_python: with --repair, an interpreter that has bpy, numpy and Pillow, if not this one.
        quiet: no progress bar.
    """

    dataset: Positional[Annotated[Path, arg(metavar="DATASET")]]
    quick: FlagCreatePairsOff[bool] = False
    sample: Annotated[int | None, arg(metavar="SHARDS")] = None
    seed: int = 0
    repair: FlagCreatePairsOff[bool] = False
    blender_python: Annotated[str | None, arg(metavar="PATH")] = None
    quiet: FlagCreatePairsOff[bool] = False

    def run(self) -> int:
        """List what is wrong, mend it where asked; the exit status."""
        from ident3d.render.repair import repair_dataset

        problems = self.check()
        for problem in problems:
            print(problem)
        if self.repair:
            for line in repair_dataset(self.dataset, problems, self.blender_python, quiet=self.quiet):
                print(line)
            problems = self.check()
            for problem in problems:
                print(f"still: {problem}")
        well = "all is well" if self.sample is None else "nothing wrong in what was checked"
        state = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}" if problems else well
        print(f"{self.dataset}: {state}")
        return 1 if problems else 0

    def check(self) -> list[Problem]:
        """All that is wrong; with --sample prints how far the check went."""
        if self.sample is None:
            from ident3d.shards.verify import verify_dataset

            return verify_dataset(self.dataset, quick=self.quick, quiet=self.quiet)
        from ident3d.shards.spot_check import verify_sample

        report = verify_sample(self.dataset, self.sample, self.seed, quick=self.quick, quiet=self.quiet)
        print("\n".join(report.lines()))
        return report.problems


@dataclass(frozen=True)
class Info:
    """Print what a dataset is.

    Attributes:
        dataset: the dataset's folder.
    """

    dataset: Positional[Annotated[Path, arg(metavar="DATASET")]]

    def run(self) -> None:
        """Print to stdout."""
        from ident3d.shards.info import info_text

        print(info_text(self.dataset), end="")


@dataclass(frozen=True)
class Contact:
    """A contact sheet: the first pictures of a split in a grid, with their latents as bars.

    Attributes:
        dataset: the dataset's folder.
        out: the picture to write, .png, .pdf or .svg.
        split: the split.
        rows: rows of the grid.
        columns: columns of the grid.
    """

    dataset: Positional[Annotated[Path, arg(metavar="DATASET")]]
    out: Positional[Annotated[Path, arg(metavar="OUT.png")]]
    split: str = "train"
    rows: int = 4
    columns: int = 8

    def run(self) -> None:
        """Write the figure and say where it is."""
        from ident3d.datasets.ident3d import Ident3D
        from ident3d.figures import check_figure_path, contact_sheet, save_figure

        check_figure_path(self.out)
        save_figure(contact_sheet(Ident3D(self.dataset, self.split), self.rows, self.columns), self.out)
        print(self.out.absolute())


@dataclass(frozen=True)
class Traversal:
    """A latent traversal as in the paper's figure 2: a column a factor, the others held.

    Attributes:
        out: the picture to write, .png, .pdf or .svg.
        scene: a bundled scene or the path of a .toml.
        steps: pictures a factor.
        resolution: side of each in pixels.
        quality: draft, standard or paper.
        at: where the other factors are held, in the unit interval.
        blender_python: an interpreter that has bpy, numpy and Pillow, if not this one.
    """

    out: Positional[Annotated[Path, arg(metavar="OUT.png")]]
    scene: str = "3dident"
    steps: int = 7
    resolution: int = 128
    quality: str = "standard"
    at: float = 0.5
    blender_python: Annotated[str | None, arg(metavar="PATH")] = None

    def run(self) -> None:
        """Render, write the figure and say where it is."""
        from ident3d.figures import check_figure_path, latent_traversal, save_figure

        check_figure_path(self.out)
        figure = latent_traversal(
            self.scene,
            steps=self.steps,
            resolution=self.resolution,
            quality=self.quality,
            at=self.at,
            blender_python=self.blender_python,
        )
        save_figure(figure, self.out)
        print(self.out.absolute())


@dataclass(frozen=True)
class Pairs:
    """Compare positive pairs as served with the conditional that is asked for; writes report.json and report.png.

    Attributes:
        dataset: the dataset's folder.
        conditional: p(z~ | z), e.g. normal(scale=0.05); may be omitted where the dataset was rendered with --pairs.
        match: exact, hnsw or ivf.
        out: the folder of the report; made where it is not there.
        split: the split.
        factors: the factors that are matched; all by default.
        pairs: how many to draw, at least 1,000.
        seed: what they are drawn from.
    """

    dataset: Positional[Annotated[Path, arg(metavar="DATASET")]]
    conditional: Annotated[str | None, arg(metavar="CONDITIONAL")] = None
    match: str = "exact"
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("pair-report")
    split: str = "train"
    factors: Annotated[tuple[str, ...] | None, arg(metavar="NAME ...")] = None
    pairs: Annotated[int, arg(metavar="N")] = 100_000
    seed: int = 0

    def run(self) -> None:
        """Write the report, and print where it is and what it warns of."""
        from ident3d.datasets.ident3d import Ident3D
        from ident3d.datasets.pair_report import pair_report
        from ident3d.reports import check_report_folder, save_report

        data = Ident3D(self.dataset, self.split)
        check_report_folder(self.out)
        report = pair_report(
            data, self.conditional, match=self.match, factors=self.factors, pairs=self.pairs, seed=self.seed
        )
        save_report(report, self.out)
        for name in ("report.json", "report.png"):
            print((self.out / name).absolute())
        for warning in report.warnings:
            print(f"warning: {warning}")


@dataclass(frozen=True)
class Convert(ConvertOptions):
    """Convert a published dataset to shards, shards to others, or shards to a published layout."""

    def run(self) -> None:
        """Convert, and say where the result is."""
        from ident3d.conversion import convert

        print(f"{convert(self)}: converted")


@dataclass(frozen=True)
class Download:
    """Fetch a published dataset, check it and unpack it; go on where the same command stopped.

    Attributes:
        name: 3dident, causal3dident, multimodal3dident or kitti-masks.
        root: the folder it goes into; by default `datasets` in the cache folder (IDENT3D_HOME).
        splits: just the files that bring these; all by default.
        mirror: a base URL that is tried first; may be given several times.
        offline: never use the network, as IDENT3D_OFFLINE=1 does.
        keep: leave the archives in the cache folder once they are unpacked.
        quiet: no progress bar.
    """

    name: Positional[Annotated[str, arg(metavar="NAME")]]
    root: Annotated[Path | None, arg(metavar="DIR")] = None
    splits: Annotated[tuple[str, ...] | None, arg(metavar="NAME ...")] = None
    mirror: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="URL")] = ()
    offline: FlagCreatePairsOff[bool] = False
    keep: FlagCreatePairsOff[bool] = False
    quiet: FlagCreatePairsOff[bool] = False

    def run(self) -> None:
        """Bring it, and say where it is and whom to cite."""
        from ident3d.datasets.download import download
        from ident3d.datasets.records import find_record

        record = find_record(self.name)
        root = download(
            self.name,
            self.root,
            mirrors=self.mirror,
            offline=self.offline or None,
            splits=self.splits,
            keep=self.keep,
            quiet=self.quiet,
        )
        print(f"{root.absolute()}: {record.title}; licence: {record.license} ({record.page})")
        print(f"please cite {record.citation}")


@dataclass(frozen=True)
class Push:
    """Put a dataset on the Hugging Face Hub, or go on where the same command stopped.

    Attributes:
        dataset: the dataset's folder.
        repo: user/name; made where it is not there.
        private: nobody else may see it.
        revision: the branch; the main one by default.
        license: in the Hub's words, e.g. cc-by-4.0.
        message: of the commit.
        quiet: no progress bar.
    """

    dataset: Positional[Annotated[Path, arg(metavar="DATASET")]]
    repo: Positional[Annotated[str, arg(metavar="USER/NAME")]]
    private: FlagCreatePairsOff[bool] = False
    revision: Annotated[str | None, arg(metavar="BRANCH")] = None
    license: Annotated[str | None, arg(metavar="ID")] = None
    message: str = ""
    quiet: FlagCreatePairsOff[bool] = False

    def run(self) -> None:
        """Push, and print the page's URL."""
        from ident3d.hub import push

        options = {name: value for name, value in vars(self).items() if name not in ("dataset", "repo")}
        print(push(self.dataset, self.repo, **options))


@dataclass(frozen=True)
class Pull:
    """Bring a dataset from the Hub or a URL, or go on where the same command stopped.

    Attributes:
        repo: user/name, or a URL.
        out: a new or empty folder, or that of an earlier pull of the same.
        revision: a branch, tag or commit.
        splits: just these; all by default.
        quiet: no progress bar.
    """

    repo: Positional[Annotated[str, arg(metavar="USER/NAME")]]
    out: Positional[Annotated[Path, arg(metavar="OUT")]]
    revision: Annotated[str | None, arg(metavar="REVISION")] = None
    splits: Annotated[tuple[str, ...] | None, arg(metavar="NAME ...")] = None
    quiet: FlagCreatePairsOff[bool] = False

    def run(self) -> None:
        """Pull, and print the folder."""
        from ident3d.hub import pull

        print(pull(self.repo, self.out, revision=self.revision, splits=self.splits, quiet=self.quiet))


@dataclass(frozen=True)
class Figure:
    """Draw a figure."""

    kind: Annotated[Contact, subcommand("contact")] | Annotated[Traversal, subcommand("traversal")]

    def run(self) -> None:
        """Draw it."""
        self.kind.run()


Command = (
    Annotated[Render, subcommand("render")]
    | Annotated[Finalize, subcommand("finalize")]
    | Annotated[Scenes, subcommand("scenes")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[Info, subcommand("info")]
    | Annotated[Pairs, subcommand("pairs")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Download, subcommand("download")]
    | Annotated[Push, subcommand("push")]
    | Annotated[Pull, subcommand("pull")]
    | Annotated[Figure, subcommand("figure")]
)


def main(args: list[str] | None = None) -> None:
    """Run one command; exit status 2 for a user's mistake, 130 for Ctrl-C."""

    def run() -> int | None:
        command: Command = tyro.cli(
            Command,
            prog="ident3d",
            description="Image datasets whose generating factors are known exactly.",
            args=args,
            config=(OmitSubcommandPrefixes,),
        )
        return command.run()

    run_command("ident3d", run)

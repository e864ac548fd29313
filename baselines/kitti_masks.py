"""KITTI Masks: contrastive encoders and SlowVAE on pairs of neighbouring frames (table 3).

Zimmermann et al. 2021, section 4.3 and A.3. Several seeds, each with its own weights and batches, are trained side by
side. Masks stay in memory, or on the GPU, as bytes, and batches are cut there.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ident3d.baselines.devices import check_precision, device_name, resolve_device
from ident3d.baselines.kept import kept_result
from ident3d.baselines.kitti_figures import run_figures
from ident3d.baselines.kitti_settings import KittiSettings
from ident3d.baselines.kitti_task import KittiTask, check_data, settings_and_data
from ident3d.baselines.mixing import check_seeds
from ident3d.baselines.results import Result, versions
from ident3d.baselines.runs import RunFolder
from ident3d.baselines.training import RunOptions, Trained, train
from ident3d.datasets.kitti_masks import KittiMasks
from ident3d.errors import SpecError
from ident3d.figures import save_figure

__all__ = ["run_kitti"]


def run_kitti(
    settings: KittiSettings,
    data: KittiMasks,
    seeds: Sequence[int],
    *,
    out: Path | None = None,
    device: str = "auto",
    options: RunOptions | None = None,
    row: str | None = None,
    preset: str | None = None,
) -> Result:
    """Run an experiment, or go on where the same call stopped; give what it came to.

    Args:
        settings: what is trained.
        data: the masks, with the settings' max_delta_t.
        seeds: one a run; they are trained side by side.
        out: the run's folder, which gets result.json and figures; nothing is kept if None.
        device: auto, cpu, cuda, cuda:N or mps.
        options: what is done beside training.
        row: the row of table 3 that the settings are of, for the result.
        preset: the preset that they are of, for the result.

    Raises:
        SpecError: a value out of range, settings that the data do not fit, a device that is absent.
        DatasetError: a folder that holds something else, or another run.
        TrainingError: numbers that are not finite, a damaged checkpoint, or one of another run.
        BusyError: another run is at work in the folder.
        Stopped: Ctrl-C or SIGTERM; the state is kept.
    """
    options = RunOptions() if options is None else options
    if settings.training.steps < 1:
        raise SpecError(f"steps = {settings.training.steps}: expected at least 1")
    where, seeds = resolve_device(device), check_seeds(seeds)
    check_precision(settings.training.precision, where)
    check_data(settings, data)
    data.pairs(settings.batch)  # a batch that is too large is refused before the folder is made
    about = {"row": row, "preset": preset}
    asked = {**about, **settings_and_data(settings, data), "seeds": list(seeds)}
    return kept_result(out, asked, lambda folder: _run(KittiTask(settings, data, seeds, where), options, folder, about))


def _run(task: KittiTask, options: RunOptions, folder: RunFolder | None, about: dict[str, Any]) -> Result:
    trained: Trained = train(task, task.of.training, options, folder)
    task.model.eval()
    codes = task.codes()
    detailed = task.detailed_scores(codes)
    if folder is not None:
        for name, figure in run_figures(task, codes, trained.curve[-1]["step"]):
            save_figure(figure, folder.path / name)
    return Result(
        experiment="kitti",
        **about,
        settings=settings_and_data(task.of, task.data),
        seeds=task.seeds,
        scores={name: tuple(float(s) for s in per_seed) for name, per_seed in detailed.items()},
        per_factor={name: tuple(tuple(s.per_factor) for s in per_seed) for name, per_seed in detailed.items()},
        extra={
            "factors": list(task.data.factors.names),
            "title": task.data.title,
            "scales": [] if task.output is None else task.output.scales().tolist(),
        },
        curve=tuple(trained.curve),
        steps=trained.curve[-1]["step"],
        device=device_name(task.device),
        versions=versions(),
        wall_s=round(trained.seconds, 3),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )

"""Rendering a dataset: the same bytes however it is done, and refusals before any picture."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ident3d import BusyError, DatasetError, Ident3D, RenderError, RenderOptions, SpecError, render_dataset
from ident3d.render.draws import draw_latents
from ident3d.render.folder import RenderFolder

TINY: dict[str, Any] = {"resolution": 16, "quality": "draft", "quiet": True}


def files(root: Path) -> dict[str, bytes]:
    """All that belongs to a dataset; its working folder does not."""
    found = (p for p in sorted(root.rglob("*")) if p.is_file() and ".render" not in p.parts)
    return {str(p.relative_to(root)): p.read_bytes() for p in found}


@pytest.mark.render
def test_bytes_do_not_depend_on_workers_threads_or_run(tmp_path: Path) -> None:
    options = RenderOptions(tmp_path / "a", 10, shard_size=3, seed=5, workers=1, **TINY)
    render_dataset(options)
    render_dataset(dataclasses.replace(options, out=tmp_path / "b", workers=2))
    render_dataset(dataclasses.replace(options, out=tmp_path / "c", workers=3))
    assert files(tmp_path / "a") == files(tmp_path / "b") == files(tmp_path / "c")


@pytest.mark.render
def test_samples_do_not_depend_on_how_many_or_how_sharded(tmp_path: Path) -> None:
    render_dataset(RenderOptions(tmp_path / "few", 3, shard_size=2, **TINY))
    render_dataset(RenderOptions(tmp_path / "more", 7, shard_size=5, **TINY))
    few, more = Ident3D(tmp_path / "few"), Ident3D(tmp_path / "more")
    for i in range(3):
        assert (few[i][0] == more[i][0]).all()
        assert (few[i][1] == more[i][1]).all()


@pytest.mark.render
def test_splits_share_a_dataset_and_order_of_rendering_does_not_show(tmp_path: Path, rendered: Path) -> None:
    assert list(Ident3D(rendered).manifest.splits) == ["train", "test"]
    for split, samples in (("test", 4), ("train", 12)):
        options = RenderOptions(
            tmp_path / "b", samples, split=split, seed=7, resolution=32, quality="draft", shard_size=4, quiet=True
        )
        render_dataset(options)
    assert files(tmp_path / "b") == files(rendered)
    assert not np.array_equal(Ident3D(rendered, "test").latents, Ident3D(rendered).latents[:4])


@pytest.mark.render
def test_latents_are_the_drawn_ones_and_pictures_show_them(rendered: Path) -> None:
    data = Ident3D(rendered)
    np.testing.assert_array_equal(data.latents, draw_latents(7, "train", 0, 12, {}))
    # A red-channel check that needs no second renderer: two different latents must give different pictures.
    assert len({data[i][0].numpy().tobytes() for i in range(12)}) == 12


@pytest.mark.render
def test_own_latents(tmp_path: Path) -> None:
    u = np.random.default_rng(0).random((4, 10))
    np.save(tmp_path / "u.npy", u)
    options = RenderOptions(tmp_path / "d", latents=tmp_path / "u.npy", **TINY)
    render_dataset(options)
    np.testing.assert_allclose(Ident3D(tmp_path / "d").latents, u, atol=1e-7)
    np.save(tmp_path / "u.npy", 1 - u)
    with pytest.raises(SpecError, match=r"latents: .* there, .* asked"):
        render_dataset(options)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 9)), r"shape \(N, 10\), got \(4, 9\)"),
        (np.full((4, 10), np.nan), r"latents\[0, 0\] \(object_x\) = nan"),
        (np.eye(10) * 2, r"= 2.0: expected a number in \[0, 1\]"),
        (np.eye(10) * -1, r"raw coordinates in \[-1, 1\]"),
        (np.zeros((0, 10)), "holds no sample"),
        (np.array([["a"] * 10]), "expected numbers"),
    ],
)
def test_bad_latents_are_refused(tmp_path: Path, array: np.ndarray, words: str) -> None:  # type: ignore[type-arg]
    np.save(tmp_path / "u.npy", array)
    with pytest.raises(SpecError, match=words):
        render_dataset(RenderOptions(tmp_path / "d", latents=tmp_path / "u.npy", **TINY))
    assert not (tmp_path / "d").exists()


def test_latents_and_samples_must_agree(tmp_path: Path) -> None:
    np.save(tmp_path / "u.npy", np.zeros((4, 10)))
    with pytest.raises(SpecError, match=r"samples = 5, but .* holds 4"):
        render_dataset(RenderOptions(tmp_path / "d", 5, latents=tmp_path / "u.npy"))
    (tmp_path / "text.npy").write_text("no array")
    for name, words in (("text.npy", "not a .npy"), ("none.npy", "no such file")):
        with pytest.raises(SpecError, match=words):
            render_dataset(RenderOptions(tmp_path / "d", latents=tmp_path / name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 0}, "samples = 0: expected 1"),
        ({"samples": -3}, "samples = -3"),
        ({"samples": 10**12}, "samples = 1000000000000"),
        ({"resolution": 0}, "resolution = 0: expected 8 to 4,096"),
        ({"resolution": 100_000}, "resolution = 100000"),
        ({"shard_size": 0}, "shard size = 0"),
        ({"shard_size": -1}, "shard size = -1"),
        ({"shard_size": 10**7}, "shard size = 10000000"),
        ({"seed": -1}, "seed = -1"),
        ({"split": "validation"}, "split 'validation': expected one of train, val, test"),
        ({"quality": "best"}, "quality 'best': expected one of draft, standard, paper"),
        ({"scene": "kettle"}, "unknown scene; expected one of 3dident, 3dident-v1"),
        ({"scene": "kettle.toml"}, "no such file"),
        ({"workers": "many"}, "workers = many: expected auto"),
        ({"workers": 0}, "workers = 0"),
        ({"device": "tpu"}, "device 'tpu': expected one of auto, cpu"),
        ({"samples": None}, "samples: missing"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"out": tmp_path / "d", "samples": 4, **change}
    with pytest.raises(SpecError, match=words):
        render_dataset(RenderOptions(**arguments))
    assert not (tmp_path / "d").exists()


@pytest.mark.render
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 13}, "samples: 12 there, 13 asked"),
        ({"seed": 8}, "seed: 7 there, 8 asked"),
        ({"resolution": 64}, "resolution: 32 there, 64 asked"),
        ({"quality": "standard"}, "quality: draft there, standard asked"),
        ({"scene": "3dident-v1"}, "scene: 3dident there, 3dident-v1 asked"),
        ({"shard_size": 6}, "shard_size: 4 there, 6 asked"),
        ({"split": "val", "resolution": 64}, "its split train.*\n.*resolution: 32 there, 64 asked"),
    ],
)
def test_a_command_that_differs_is_refused(rendered: Path, change: dict[str, Any], words: str) -> None:
    before = files(rendered)
    same: dict[str, Any] = {"out": rendered, "samples": 12, "seed": 7, "shard_size": 4}
    same |= {"resolution": 32, "quality": "draft", "quiet": True}
    with pytest.raises(SpecError, match=words):
        render_dataset(RenderOptions(**{**same, **change}))
    assert files(rendered) == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DatasetError, match="holds something else"):
        render_dataset(RenderOptions(tmp_path, 4, **TINY))
    with pytest.raises(DatasetError, match="is a file"):
        render_dataset(RenderOptions(tmp_path / "notes.txt", 4, **TINY))
    with pytest.raises(DatasetError, match="cannot be written"):
        render_dataset(RenderOptions(tmp_path / "notes.txt" / "d", 4, **TINY))
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_what_cannot_fit_the_disk_is_refused_before_blender_starts(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"1,000,000,000 samples will need about 27,\d+\.\d\d GB more"):
        render_dataset(RenderOptions(tmp_path / "d", 10**9, blender_python="/bin/true"))
    assert not (tmp_path / "d" / "train").exists()


@pytest.mark.render
def test_two_renders_in_one_folder(tmp_path: Path) -> None:
    folder = RenderFolder(tmp_path / "d")
    folder.create()
    with folder.lock(), pytest.raises(BusyError, match=r"another render \(process \d+\)"):
        render_dataset(RenderOptions(tmp_path / "d", 4, **TINY))
    render_dataset(RenderOptions(tmp_path / "d", 4, **TINY))


@pytest.mark.render
def test_works_in_a_thread_and_from_a_script_without_a_guard(tmp_path: Path) -> None:
    thread = threading.Thread(target=render_dataset, args=(RenderOptions(tmp_path / "a", 2, **TINY),))
    thread.start()
    thread.join()
    script = tmp_path / "script.py"
    script.write_text(
        "import ident3d, pathlib\n"
        f"out = pathlib.Path({str(tmp_path)!r}, 'b')\n"
        "ident3d.render_dataset(ident3d.RenderOptions(out, 2, resolution=16, quality='draft', quiet=True))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""  # Blender's chatter goes to the log
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert "Fra:" in (tmp_path / "b" / ".render" / "logs" / "train-worker-0.log").read_text()


@pytest.mark.render
def test_works_from_a_repl(tmp_path: Path) -> None:
    lines = (
        "import ident3d, pathlib\n"
        f"options = ident3d.RenderOptions(pathlib.Path({str(tmp_path)!r}, 'r'), 2, resolution=16, quality='draft')\n"
        "len(ident3d.render_dataset(options).splits['train'].shards)\n"
    )
    done = subprocess.run([sys.executable, "-i", "-q"], input=lines, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"

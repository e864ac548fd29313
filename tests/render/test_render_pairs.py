"""Rendering positive pairs: both pictures are renders of their latents, whatever happens in between."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ident3d.render.latents
from ident3d import Ident3D, RenderError, RenderOptions, SpecError, load_scene, render_dataset
from ident3d.codecs import encode_png
from ident3d.render.draws import cycles_seeds, draw_uniforms
from ident3d.render.folder import RenderFolder
from ident3d.render.latents import pair_law
from ident3d.render.process import WorkerProcess, blender_python
from ident3d.render.quality import quality
from ident3d.render.repair import repair_dataset
from ident3d.render.worker import Setup
from ident3d.schema import to_plain
from ident3d.shards.summary import PAIR_EXTENSIONS, sample_bytes
from ident3d.shards.tar import END, Sample, scan_samples
from ident3d.shards.verify import verify_dataset

pytestmark = pytest.mark.render

LAPLACE = "laplace(scale=0.05)"
OPTIONS: dict[str, Any] = {"seed": 7, "resolution": 32, "quality": "draft", "shard_size": 4, "quiet": True}


def files(root: Path) -> dict[str, bytes]:
    found = (p for p in sorted(root.rglob("*")) if p.is_file() and ".render" not in p.parts)
    return {str(p.relative_to(root)): p.read_bytes() for p in found}


def samples(data: bytes) -> list[Sample]:
    return list(scan_samples(data, PAIR_EXTENSIONS))


def member(data: bytes, sample: Sample, extension: str) -> bytes:
    at = sample.members[extension]
    return data[at.offset : at.offset + at.size]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def test_both_pictures_are_renders_of_their_latents(rendered_pairs: Path, tmp_path: Path) -> None:
    scene, data = load_scene("3dident"), Ident3D(rendered_pairs)
    assert data.pair_latents is not None
    setup = Setup(scene.text, str(scene.mesh_path), to_plain(quality("draft")), 32, "auto", 1)
    worker = WorkerProcess(blender_python(None), setup, tmp_path / "log")
    out = tmp_path / "pictures.npy"
    np.save(out, np.zeros((24, 32, 32, 3), np.uint8))
    own, pair = (cycles_seeds(7, "train", 0, 8, k) for k in (0, 1))
    # The third: z~ under the seed of z, to be told from the second.
    rows = [*zip(data.latents, own, strict=True), *zip(data.pair_latents, pair, strict=True)]
    rows += zip(data.pair_latents, own, strict=True)
    try:
        for i, (latent, seed) in enumerate(rows):
            worker.send({"picture": {"out": str(out), "index": i, "latent": latent.tolist(), "seed": int(seed)}})
            for _ in worker.until("picture"):
                pass
    finally:
        worker.kill()
    pictures = np.load(out)
    for i in range(8):
        shard = (rendered_pairs / "train" / f"train-{i // 4:06d}.tar").read_bytes()
        sample = samples(shard)[i % 4]
        assert member(shard, sample, "png") == encode_png(pictures[i])
        assert member(shard, sample, "pair.png") == encode_png(pictures[8 + i])
        assert member(shard, sample, "pair.png") != encode_png(pictures[16 + i])


def test_a_samples_own_picture_is_that_of_a_dataset_without_pairs(rendered_pairs: Path, rendered: Path) -> None:
    for k in (0, 1):
        paired, single = (root / "train" / f"train-{k:06d}.tar" for root in (rendered_pairs, rendered))
        mine, theirs = paired.read_bytes(), single.read_bytes()
        for a, b in zip(samples(mine), scan_samples(theirs, ("png", "latents.npy")), strict=True):
            assert a.key == b.key
            for extension in ("png", "latents.npy"):
                assert member(mine, a, extension) == member(theirs, b, extension)
            assert member(mine, a, "pair.png") != member(mine, a, "png")
    # And a split without pairs does not notice that another has them.
    for path in sorted((rendered / "test").iterdir()):
        assert (rendered_pairs / "test" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_do_not_depend_on_workers_or_order(rendered_pairs: Path, tmp_path: Path, workers: int) -> None:
    for split, n, pairs in (("test", 4, None), ("train", 8, "laplace(0.05)")):
        render_dataset(RenderOptions(tmp_path / "d", n, split=split, pairs=pairs, workers=workers, **OPTIONS))
    assert files(tmp_path / "d") == files(rendered_pairs)
    assert verify_dataset(tmp_path / "d") == []


@pytest.mark.parametrize("pairs", [None, "laplace(scale=0.06)", "normal(scale=0.05)", "change(k=1)"])
def test_another_conditional_is_refused_with_the_difference(rendered_pairs: Path, pairs: str | None) -> None:
    before = files(rendered_pairs)
    with pytest.raises(SpecError, match="rendered otherwise") as caught:
        render_dataset(RenderOptions(rendered_pairs, 8, pairs=pairs, **OPTIONS))
    difference = f"\n  pairs: {LAPLACE} there, {pairs or 'none'} asked"
    assert str(caught.value).endswith(difference)
    assert files(rendered_pairs) == before


@pytest.mark.parametrize(
    "text", ["laplace(0.05)", " laplace ( scale = 5e-2 ) ", f"laplace(scale={[0.05] * 10})", "laplace(scale=0.0500)"]
)
def test_equal_conditionals_written_otherwise_go_on(rendered_pairs: Path, text: str, tmp_path: Path) -> None:
    options = RenderOptions(rendered_pairs, 8, pairs=text, blender_python="/bin/true", **OPTIONS)
    assert render_dataset(options).splits["train"].pairs == LAPLACE
    # The same where the render was only begun.
    folder = RenderFolder(tmp_path / "begun")
    scene = load_scene("3dident")
    begun = dataclasses.replace(options.plan(scene, None), pairs=LAPLACE, device="CPU", blender="4.5.0")
    folder.save_plan(begun)
    folder.check(options.plan(scene, None), ignore=("device", "blender"))
    with pytest.raises(SpecError, match=r"pairs: laplace\(scale=0\.05\) there, uniform\(\) asked"):
        folder.check(dataclasses.replace(begun, pairs="uniform()"))


@pytest.fixture
def dataset(rendered_pairs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rendered_pairs, tmp_path / "data"))


SHARD = "train/train-000001.tar"
SAMPLE_5: set[tuple[str, int | None]] = {(SHARD, None), (SHARD, 5)}
DAMAGES: dict[str, set[tuple[str, int | None]]] = {
    "png": SAMPLE_5,
    "latents.npy": SAMPLE_5,
    "pair.png": SAMPLE_5,
    "pair.latents.npy": SAMPLE_5,
    "pictures swapped": {(SHARD, None)},
    "shard missing": {(SHARD, None)},
    "all latents missing": {("train/latents.npy", None), ("train/pair.latents.npy", None)},
    "latents of pairs missing": {("train/pair.latents.npy", None)},
    "latents of pairs altered": {("train/pair.latents.npy", None)},
}


def damage(root: Path, kind: str) -> None:
    """Do it to a dataset; a member's name stands for a flipped bit in the middle of that member of sample 5."""
    path, folder = root / SHARD, root / "train"
    data = path.read_bytes()
    if kind in PAIR_EXTENSIONS:
        at = samples(data)[1].members[kind]
        flip(path, at.offset + at.size // 2)
    elif kind == "pictures swapped":  # each sample is sound in itself
        contents = [[member(data, s, e) for e in PAIR_EXTENSIONS] for s in samples(data)]
        contents[1][0], contents[1][2] = contents[1][2], contents[1][0]
        path.write_bytes(b"".join(sample_bytes(4 + i, c) for i, c in enumerate(contents)) + END)
    elif kind == "latents of pairs altered":
        flip(folder / "pair.latents.npy", 300)
    elif kind == "shard missing":
        path.unlink()
    else:
        for file in folder.glob("*latents.npy" if kind == "all latents missing" else "pair.latents.npy"):
            file.unlink()


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_every_byte_comes_back(dataset: Path, rendered_pairs: Path, kind: str) -> None:
    expected = DAMAGES[kind]
    damage(dataset, kind)
    problems = verify_dataset(dataset)
    assert {(p.file, p.sample) for p in problems} == expected
    quick = {(p.file, p.sample) for p in verify_dataset(dataset, quick=True)}
    assert quick == expected
    lines = repair_dataset(dataset, problems)
    if (SHARD, 5) in expected:
        assert lines == [f"{SHARD}: 1 of 4 samples rendered again"]
        logs = (dataset / ".render" / "logs").glob("repair-worker-*.log")
        assert sum(log.read_text().count("Saved: ") for log in logs) == 2  # the two pictures of the sample
    assert files(dataset) == files(rendered_pairs)
    assert verify_dataset(dataset) == []


def test_a_repair_keeps_stored_positives_that_are_good(
    dataset: Path, rendered_pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of torch may round a quantile otherwise; what the pictures show is what is stored."""

    def otherwise(*_: object) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(ident3d.render.latents, "draw_positives", otherwise)
    for name in ("index.npy", "train-000001.tar"):
        (dataset / "train" / name).unlink()
        repair_dataset(dataset, verify_dataset(dataset))
        assert files(dataset) == files(rendered_pairs)


def test_own_latents_get_pairs_and_come_back_from_the_shards(tmp_path: Path) -> None:
    u = np.random.default_rng(3).random((4, 10)).astype(np.float32)
    np.save(tmp_path / "u.npy", u)
    root = tmp_path / "d"
    options = RenderOptions(
        root, latents=tmp_path / "u.npy", pairs="normal(scale=0.1)", **(OPTIONS | {"shard_size": 2})
    )
    render_dataset(options)
    data = Ident3D(root)
    np.testing.assert_array_equal(data.latents, u)
    assert data.pair_latents is not None
    law = pair_law("normal(0.1)", load_scene("3dident").spec)
    uniforms = torch.from_numpy(draw_uniforms(7, "train", 0, 4)[:, :10])
    np.testing.assert_array_equal(data.pair_latents, law.from_uniforms(torch.from_numpy(u), uniforms).numpy())
    assert verify_dataset(root) == []
    before = files(root)
    for name in ("latents.npy", "pair.latents.npy", "index.npy"):
        (root / "train" / name).unlink()
    repair_dataset(root, verify_dataset(root))
    assert files(root) == before


COMMAND = ["--samples", "12", "--resolution", "64", "--quality", "standard", "--shard-size", "4", "--quiet", "--pairs"]


def command(out: Path, pairs: str = "normal(scale=0.1)") -> list[str]:
    return [sys.executable, "-m", "ident3d", "render", str(out), *COMMAND, pairs]


def stored(root: Path) -> int:
    """Whole samples on disk, in finished shards and in parts."""
    count = 0
    for path in [*root.glob("train/*.tar"), *root.glob("train/.*.tar.part")]:
        with contextlib.suppress(FileNotFoundError):  # it has got its final name since it was listed
            count += len(samples(path.read_bytes()))
    return count


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("undisturbed") / "d"
    subprocess.run(command(root), check=True, capture_output=True)
    return files(root)


@pytest.mark.parametrize("at", [1, 7])
def test_a_kill_loses_the_pairs_in_flight_alone(tmp_path: Path, undisturbed: dict[str, bytes], at: int) -> None:
    process = subprocess.Popen(command(tmp_path / "d"), start_new_session=True, text=True)
    while process.poll() is None and stored(tmp_path / "d") < at:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert stored(tmp_path / "d") >= at
    subprocess.run(command(tmp_path / "d", " normal( 0.10 )"), check=True, capture_output=True)
    assert files(tmp_path / "d") == undisturbed
    # A log line a picture tells how many were rendered: the lost are two in flight a worker, and two not yet written.
    logs = (tmp_path / "d" / ".render" / "logs").glob("train-worker-*.log")
    assert sum(log.read_text().count("Saved: ") for log in logs) <= 2 * (12 + 2 + 2)


def test_a_crash_on_the_second_picture_leaves_no_half_of_a_pair(tmp_path: Path) -> None:
    crash = Path(__file__).parents[1] / "data" / "crashing_worker.py"
    python = tmp_path / "python"
    seed = int(cycles_seeds(0, "train", 2, 3, 1)[0])
    python.write_text(f'#!/bin/sh\n[ "$1" = -E ] && shift\nexec {sys.executable} {crash} {seed} "$@"\n')
    python.chmod(0o755)
    options = RenderOptions(tmp_path / "d", 4, pairs=LAPLACE, blender_python=str(python), **(OPTIONS | {"seed": 0}))
    with pytest.raises(RenderError, match=r"(?s)though tried again.*sample 2 of shard 0.*SIGABRT"):
        render_dataset(options)
    part = (tmp_path / "d" / "train" / ".train-000000.tar.part").read_bytes()
    assert samples(part)[-1].end == len(part)
    assert len(samples(part)) == 2
    render_dataset(dataclasses.replace(options, blender_python=None))
    assert verify_dataset(tmp_path / "d") == []

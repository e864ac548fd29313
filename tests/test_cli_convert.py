"""`ident3d convert` as a user types it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ident3d import Ident3D, ThreeDIdent
from ident3d.cli import main


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_there_and_back(fabricated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    released, webp = tmp_path / "released", tmp_path / "webp"
    args = ("convert", fabricated, released, "--to", "published", "--quiet")
    assert run(capsys, *args) == (0, f"{released}: converted\n", "")
    assert run(capsys, *args) == (0, f"{released}: converted\n", "")
    assert run(capsys, "convert", released, webp, "--format", "webp", "--quiet")[0] == 0
    assert run(capsys, "verify", webp) == (0, f"{webp}: all is well\n", "")
    assert "converted from 3DIdent" in run(capsys, "info", webp)[1]
    for split in ("train", "test"):
        first, second, third = Ident3D(fabricated, split), ThreeDIdent(released, split), Ident3D(webp, split)
        for data in (second, third):
            np.testing.assert_array_equal(data.latents, first.latents)
            assert all((data[i][0] == first[i][0]).all() for i in range(len(first)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere", "out"], "nowhere: "),
        (["empty", "out"], "empty: "),
        (["data", "data"], "out = data: expected a folder apart from src = data"),
        (["data", "full"], "full: holds something else"),
        (["data", "out", "--splits", "val"], "val"),
        (["data", "out", "--to", "published", "--format", "webp"], "the published layouts hold PNG"),
        (["data", "out", "--workers", "0"], "workers = 0: expected"),
        (["data", "out", "--shard-size", "0"], "shard_size = 0: expected"),
    ],
)
def test_a_mistake_is_a_line_and_costs_nothing(
    fabricated: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(fabricated)
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full", "thesis.tex").write_text("")
    status, out, err = run(capsys, "convert", *args)
    assert (status, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())  # options are checked by tyro, which draws a box
    assert "Traceback" not in err
    assert sorted(path.name for path in Path().iterdir()) == ["data", "empty", "full"]


@pytest.mark.filterwarnings("default:.*left out")
def test_a_damaged_picture_is_named_or_left_out(
    fabricated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    released, out = tmp_path / "released", tmp_path / "out"
    run(capsys, "convert", fabricated, released, "--to", "published", "--splits", "train", "--quiet")
    victim = sorted(released.rglob("*.png"))[11]
    victim.write_bytes(victim.read_bytes()[:-100])
    status, _, err = run(capsys, "convert", released, out, "--quiet")
    assert status == 2
    assert str(victim) in err
    status, told, err = run(capsys, "convert", released, out, "--on-error", "skip", "--quiet")
    assert (status, told) == (0, f"{out}: converted\n")
    assert "ident3d: warning: " in err
    assert str(victim) in err
    data, whole = Ident3D(out), Ident3D(fabricated)
    assert data.entry.skipped == (11,)
    np.testing.assert_array_equal(data.latents, np.delete(whole.latents, 11, axis=0))
    with Image.open(io.BytesIO(data.read(11))) as picture:
        np.testing.assert_array_equal(np.array(picture), whole[12][0].permute(1, 2, 0).numpy())
    assert "1 damaged samples of the source were left out" in run(capsys, "info", out)[1]

"""Pull: whole or not there, resumed where it stopped, and nothing written over that is somebody's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer
from hub_server import FakeHub, contents, logged_in
from matplotlib.figure import Figure

from ident3d import DatasetError, DownloadError, Ident3D, SpecError
from ident3d.hub import pull, push
from ident3d.network.http import Patience
from ident3d.shards.manifest import read_manifest
from ident3d.shards.verify import verify_dataset

pytest.importorskip("huggingface_hub")

# huggingface_hub's uploads without xet, by its own client.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

NAME = "ada/teapots"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of its own, no pauses, and an empty preview, since drawing one takes longer than all else."""
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("IDENT3D_OFFLINE", raising=False)
    monkeypatch.setattr("ident3d.network.transfer.PATIENCE", Patience(attempts=3, sleep=lambda seconds: None))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr("ident3d.figures.contact_sheet", lambda data, rows, columns: Figure((1, 1)))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty Hub and a user who is logged in."""
    with logged_in(monkeypatch) as running:
        yield running


@pytest.fixture
def pushed(hub: FakeHub, fabricated: Path) -> FakeHub:
    push(fabricated, NAME, license="cc-by-4.0", quiet=True)
    hub.asked.clear()
    hub.served.clear()
    return hub


def test_some_splits_are_pulled_alone(pushed: FakeHub, fabricated: Path, tmp_path: Path) -> None:
    out = pull(NAME, tmp_path / "out", splits=["test"], quiet=True)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "dataset.json", "scene", "test"]
    assert list(read_manifest(out).splits) == ["test"]
    assert verify_dataset(out) == []
    assert len(Ident3D(out, "test")) == 6
    with pytest.raises(SpecError, match="splits is empty"):
        pull(NAME, tmp_path / "other", splits=[], quiet=True)
    for splits in (["val"], ["test", "val"]):
        with pytest.raises(SpecError, match="expected names out of train, test"):
            pull(NAME, tmp_path / "other", splits=splits, quiet=True)
    with pytest.raises(SpecError, match="expected a list of names"):
        pull(NAME, tmp_path / "other", splits="test", quiet=True)


def test_an_interrupted_pull_goes_on_at_its_commit(pushed: FakeHub, fabricated: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sha256 = read_manifest(fabricated).splits["train"].shards[3].sha256
    pushed.breaks[sha256] = [1000, 0, 0]
    with pytest.raises(DownloadError, match=r"train-000003.tar: .*asked 3 times.*1,000 bytes are kept"):
        pull(NAME, out, quiet=True)
    assert not (out / "dataset.json").exists()
    with pytest.raises(DatasetError, match=r"no dataset.json in it"):
        Ident3D(out)
    with pytest.raises(DatasetError, match="holds part of hf://datasets/ada/teapots, splits all: finish that first"):
        pull(NAME, out, splits=["test"], quiet=True)
    had = {path.name for path in out.rglob("*.tar")}
    pushed.repos[NAME].commit("main", {"README.md": b""}, "gone")
    pushed.served.clear()
    assert contents(pull(NAME, out, quiet=True)) == contents(fabricated)
    assert (sha256, 1000) in pushed.served
    shards = {shard.sha256: shard.name for split in read_manifest(out).splits.values() for shard in split.shards}
    assert not had & {shards[name] for name, _ in pushed.served if name in shards}


def test_a_pull_over_a_whole_dataset_mends_it(pushed: FakeHub, damaged: Path, fabricated: Path) -> None:
    pushed.served.clear()
    pull(NAME, damaged, quiet=True)
    assert [name for name, _ in pushed.served] == ["dataset.json"]
    shard = damaged / "train" / "train-000002.tar"
    shard.write_bytes(shard.read_bytes()[:100] + b"?" + shard.read_bytes()[101:])
    (damaged / "test" / "index.npy").unlink()
    pull(NAME, damaged, quiet=True)
    assert contents(damaged) == contents(fabricated)


def test_a_folder_with_something_else_is_left_alone(
    pushed: FakeHub, make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_dataset(tmp_path / "other", {"train": 6}, seed=9)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for folder, words in (
        (other, "holds another dataset"),
        (tmp_path / "mine", "not empty"),
        (tmp_path / "file", "not a"),
    ):
        before = contents(folder) if folder.is_dir() else {}
        with pytest.raises(DatasetError, match=words):
            pull(NAME, folder, quiet=True)
        assert (contents(folder) if folder.is_dir() else {}) == before


def test_altered_files_are_refused(pushed: FakeHub, fabricated: Path, tmp_path: Path) -> None:
    repo = pushed.repos[NAME]
    files = dict(repo.files)
    shard = bytearray(files["train/train-000000.tar"])
    shard[700] ^= 1
    repo.commit("main", {**files, "train/train-000000.tar": bytes(shard)}, "altered shard")
    with pytest.raises(DownloadError, match=r"train-000000.tar: its sha256 is \w+, expected"):
        pull(NAME, tmp_path / "a", quiet=True)
    spec = files["scene/scene.toml"] + b"\n# altered\n[more]\n"
    repo.commit("main", {**files, "scene/scene.toml": spec}, "altered scene")
    with pytest.raises(DatasetError, match="not the scene that the pictures were rendered from"):
        pull(NAME, tmp_path / "b", quiet=True)
    for folder in "ab":
        assert not (tmp_path / folder / "dataset.json").exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("train", "latents_sha256"), "../../evil"),
        (("train", "shards", 0, "sha256"), ""),
        (("train", "shards", 0, "name"), "latents.npy"),
        (("train", "shards", 0, "name"), "../evil.tar"),
        (("train", "extras"), {"../evil": "0" * 64}),
    ],
)
def test_a_strangers_manifest_writes_nothing_elsewhere(
    pushed: FakeHub, tmp_path: Path, path: tuple[Any, ...], value: Any
) -> None:
    repo = pushed.repos[NAME]
    manifest = json.loads(repo.files["dataset.json"])
    place = manifest["splits"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    repo.commit("main", {**repo.files, "dataset.json": json.dumps(manifest).encode()}, "evil")
    with pytest.raises(DatasetError, match=r"dataset.json: "):
        pull(NAME, tmp_path / "out", quiet=True)
    assert not [p for p in tmp_path.rglob("*evil*") if tmp_path / "evil" == p]
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("splits", {}, "it has no split"), ("scene", {"mesh": "scene.toml"}, "not the scene that the pictures")],
)
def test_a_manifest_of_nothing_is_refused(pushed: FakeHub, tmp_path: Path, key: str, value: Any, words: str) -> None:
    repo = pushed.repos[NAME]
    manifest = json.loads(repo.files["dataset.json"])
    manifest[key] = {**manifest[key], **value} if value else value
    repo.commit("main", {**repo.files, "dataset.json": json.dumps(manifest).encode()}, "odd")
    with pytest.raises(DatasetError, match=words):
        pull(NAME, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_full_disk_is_told_before_anything_comes(
    pushed: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(DownloadError, match=r"the disk is full: the dataset \(0.00 GB\) needs"):
        pull(NAME, tmp_path / "out", quiet=True)
    assert not pushed.count(".tar")


def test_any_url_is_pulled_from(fabricated: Path, tmp_path: Path) -> None:
    with FileServer(fabricated).running() as server:
        assert contents(pull(f"{server.url}/", tmp_path / "out", quiet=True)) == contents(fabricated)
        with pytest.raises(SpecError, match="expected none beside a URL"):
            pull(server.url, tmp_path / "other", revision="v1")
    assert contents(pull(f"file://{fabricated}", tmp_path / "third", quiet=True)) == contents(fabricated)


def test_ctrl_c_stops_a_pull_that_goes_on_later(
    pushed: FakeHub, fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Future, "exception", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pull(NAME, tmp_path / "out", quiet=True)
    assert contents(pull(NAME, tmp_path / "out", quiet=True)) == contents(fabricated)

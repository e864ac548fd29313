"""Datasets behind URLs: the same as local ones, each file fetched once and checked, every failure in words."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from file_server import FileServer
from torch.utils.data import DataLoader

from ident3d import DatasetError, DownloadError, Ident3D
from ident3d.network import transfer
from ident3d.network.http import Patience
from ident3d.network.urls import source_of
from ident3d.shards.locate import locate
from ident3d.shards.remote import RemoteLocation

# torch's workers, on Python 3.12 and later.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FIRST = "train/train-000000.tar"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("IDENT3D_OFFLINE", raising=False)
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were asked for; none is made."""
    made: list[float] = []
    monkeypatch.setattr(transfer, "PATIENCE", Patience(attempts=4, sleep=made.append))
    return made


@pytest.fixture
def server(fabricated: Path) -> Iterator[FileServer]:
    with FileServer(fabricated.parent).running() as running:
        yield running


@pytest.fixture
def url(server: FileServer, fabricated: Path) -> str:
    return f"{server.url}/{fabricated.name}"


@pytest.fixture
def altered(damaged: Path) -> Iterator[tuple[FileServer, str, Path]]:
    """A server of a copy that a test may alter."""
    with FileServer(damaged).running() as running:
        yield running, running.url, damaged


def same(left: Ident3D, right: Ident3D) -> bool:
    assert (left.latents == right.latents).all()
    return all(torch.equal(left[i][0], right[i][0]) for i in range(len(right)))


def kept(home: Path) -> list[Path]:
    return sorted(path for path in (home / "shards").rglob("*") if path.is_file())


def test_a_dataset_at_a_url_is_the_dataset(url: str, fabricated: Path) -> None:
    for split in ("train", "test"):
        assert same(Ident3D(url, split), Ident3D(fabricated, split))
    assert f"root: {url}" in repr(Ident3D(url))


def test_files_are_fetched_when_needed_and_once(url: str, server: FileServer, home: Path) -> None:
    data = Ident3D(url)
    fetched = [name.partition("/")[2] for name, _ in server.served]
    assert sorted(fetched) == ["dataset.json", "train/index.npy", "train/latents.npy"]
    data[7]
    assert [name for name, _ in server.served[3:]] == ["data/train/train-000001.tar"]
    assert same(data, Ident3D(url))
    again = Ident3D(url)
    assert same(again, again)
    assert server.count("GET") == 3 + 5 + 2  # the manifest is read anew each time
    assert {path.suffix for path in kept(home)} == {".npy", ".tar"}
    assert not list(home.rglob(".*"))


def test_a_trailing_slash_is_no_other_dataset(url: str) -> None:
    assert locate(f"{url}/").text == locate(url).text == url
    assert locate(f"{url}/").derived == locate(url).derived


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_and_fetch_each_shard_once(url: str, server: FileServer, fabricated: Path, method: str) -> None:
    data, local = Ident3D(url), Ident3D(fabricated)
    loader = DataLoader(data, batch_size=3, num_workers=2, multiprocessing_context=method)
    pictures = torch.cat([batch[0] for batch in loader])
    assert torch.equal(pictures, torch.stack([local[i][0] for i in range(len(local))]))
    for k in range(5):
        assert server.count(f"train-00000{k}.tar") == 1


def wait_and_fetch(location: RemoteLocation, sha256: str, gate: Any) -> None:
    gate.wait()
    location.path(FIRST, sha256)


def test_processes_that_want_the_same_shard_fetch_it_once(url: str, server: FileServer) -> None:
    location = RemoteLocation(url)
    sha256 = location.manifest().splits["train"].shards[0].sha256
    context = get_context("fork")
    gate = context.Barrier(4)
    workers = [context.Process(target=wait_and_fetch, args=(location, sha256, gate)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert server.count(FIRST) == 1


@pytest.mark.filterwarnings(r"ignore:unclosed file .*\.tar:ResourceWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_fetches_shards_in_their_turn(url: str, server: FileServer, fabricated: Path, workers: int) -> None:
    stream = Ident3D(url).stream(shuffle=False)
    batches = list(DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=None))
    local = Ident3D(fabricated)
    found = {tuple(latents.tolist()): picture for picture, latents in batches}
    assert len(batches) == len(found) == len(local)
    assert all(torch.equal(found[tuple(local[i][1].tolist())], local[i][0]) for i in range(len(local)))
    assert server.count(".tar") == 5


def test_a_location_pickles_as_little(url: str) -> None:
    location = RemoteLocation(url)
    location.manifest()
    stored = pickle.dumps(location)
    assert len(stored) < 1000
    assert pickle.loads(stored).manifest() == location.manifest()


def test_a_broken_connection_is_taken_up_where_it_broke(url: str, server: FileServer, pauses: list[float]) -> None:
    server.breaks[f"data/{FIRST}"] = [1000, 5000]
    Ident3D(url)[0]
    assert [start for name, start in server.served if name.endswith(FIRST)] == [0, 1000, 6000]
    assert pauses == [1.0, 2.0]


def test_a_server_without_ranges_is_asked_for_all_of_it(url: str, server: FileServer) -> None:
    server.ranges = False
    server.breaks[f"data/{FIRST}"] = [1000]
    Ident3D(url)[0]
    assert [start for name, start in server.served if name.endswith(FIRST)] == [0, 0]


def test_what_came_is_kept_for_the_next_call(url: str, server: FileServer, home: Path) -> None:
    data = Ident3D(url)
    server.breaks[f"data/{FIRST}"] = [1000, 0, 0, 0]
    with pytest.raises(DownloadError, match=r"train-000000.tar: .*asked 4 times.*1,000 bytes are kept"):
        data[0]
    (part,) = home.rglob("*.part")
    assert part.stat().st_size == 1000
    server.served.clear()
    data[0]
    assert server.served == [(f"data/{FIRST}", 1000)]


def test_a_part_that_is_not_of_the_file_is_thrown_away(url: str, server: FileServer, home: Path) -> None:
    data = Ident3D(url)
    shard = data.entry.shards[0]
    part = home / "shards" / shard.sha256[:2] / f".{shard.sha256}.tar.part"
    for junk in (b"junk", b"x" * shard.bytes, b"x" * (shard.bytes + 1)):
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(junk)
        data.location.path(FIRST, shard.sha256, shard.bytes).unlink()
        assert not part.exists()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(url: str, server: FileServer, status: int, pauses: list[float]) -> None:
    left = [status, status]
    server.fail = lambda method, path: left.pop() if path.endswith(".tar") and left else 0
    Ident3D(url)[0]
    assert pauses == [1.0, 2.0]
    server.fail = lambda method, path: status
    with pytest.raises(DownloadError, match=rf"dataset.json: HTTP {status} .*asked 4 times.*IDENT3D_OFFLINE=1 uses"):
        Ident3D(url)


def test_an_altered_shard_is_refused(altered: tuple[FileServer, str, Path], home: Path) -> None:
    _, url, root = altered
    data = Ident3D(url)
    shard = root / FIRST
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    expected = data.entry.shards[0].sha256
    with pytest.raises(DownloadError, match=rf"{url}/{FIRST}: its sha256 is \w+, expected {expected}"):
        data[0]
    assert not [path for path in kept(home) if path.suffix != ".npy"]
    shard.write_bytes(content + b"more")
    with pytest.raises(DownloadError, match="is 13,828 bytes there, expected 13,824"):
        data[0]


@pytest.mark.parametrize(
    ("status", "words"), [(404, "no such file there"), (401, "nobody read this"), (403, "nobody read this")]
)
def test_what_is_absent_or_forbidden_is_said_at_once(
    url: str, server: FileServer, status: int, words: str, pauses: list[float]
) -> None:
    data = Ident3D(url)
    server.fail = lambda method, path: status
    with pytest.raises(DownloadError, match=rf"{url}/dataset.json: HTTP {status} .*{words}"):
        Ident3D(url)
    with pytest.raises(DownloadError, match=rf"{url}/{FIRST}: HTTP {status} .*{words}"):
        data[0]
    assert not pauses


def test_what_is_cached_needs_no_network(
    url: str, server: FileServer, fabricated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Ident3D(url)
    data[0]
    asked = len(server.asked)
    monkeypatch.setenv("IDENT3D_OFFLINE", "1")
    offline = Ident3D(url)
    assert torch.equal(offline[0][0], Ident3D(fabricated)[0][0])
    with pytest.raises(DownloadError, match=r"train-000001.tar: not among the files.*IDENT3D_OFFLINE forbids"):
        offline[5]
    with pytest.raises(DownloadError, match="IDENT3D_OFFLINE forbids the network, and it was never opened"):
        Ident3D(f"{url}/elsewhere")
    assert len(server.asked) == asked


def test_without_a_server_the_copy_is_offered_where_there_is_one(fabricated: Path, pauses: list[float]) -> None:
    with FileServer(fabricated).running() as server:
        Ident3D(server.url)
    with pytest.raises(DownloadError, match=r"dataset.json: no connection to 127.0.0.1.*IDENT3D_OFFLINE=1 uses"):
        Ident3D(server.url)
    with pytest.raises(DownloadError) as caught:
        Ident3D(f"{server.url}/elsewhere")
    assert "IDENT3D_OFFLINE" not in str(caught.value)
    assert len(pauses) == 6


def test_a_changed_dataset_is_noticed(altered: tuple[FileServer, str, Path], home: Path) -> None:
    _, url, root = altered
    assert list(Ident3D(url).manifest.splits) == ["train", "test"]
    manifest = json.loads((root / "dataset.json").read_text())
    del manifest["splits"]["test"]
    (root / "dataset.json").write_text(json.dumps(manifest))
    assert list(Ident3D(url).manifest.splits) == ["train"]
    (stored,) = home.glob("manifests/*/dataset.json")
    assert json.loads(stored.read_text()) == manifest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<!DOCTYPE html>", "cannot be read"),
        ('{"format": 99}', "this ident3d reads up to"),
        ('{"format": 1}', "not a manifest"),
        ("\udcff", "cannot be read"),
    ],
)
def test_what_is_no_manifest_is_refused(
    altered: tuple[FileServer, str, Path], home: Path, content: str, words: str
) -> None:
    _, url, root = altered
    Ident3D(url)
    (root / "dataset.json").write_text(content, errors="surrogateescape")
    with pytest.raises(DatasetError, match=rf"{url}/dataset.json: .*{words}"):
        Ident3D(url)
    (stored,) = home.glob("manifests/*/dataset.json")
    assert json.loads(stored.read_text())["format"] == 1  # the good copy stays


def test_a_manifest_without_end_is_not_read_to_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ident3d.shards.remote.MANIFEST_BYTES", 1000)
    with pytest.raises(DownloadError, match="larger than 1,000 bytes"):
        Ident3D(url)


@pytest.mark.parametrize("sha256", ["", "../../../evil", "0" * 63, "G" * 64, "A" * 64, "0" * 64 + "\n"])
def test_a_strangers_checksum_is_no_path(url: str, sha256: str, home: Path) -> None:
    with pytest.raises(DatasetError, match="expected 64 digits"):
        RemoteLocation(url).path(FIRST, sha256)
    assert not home.exists()


@pytest.mark.parametrize("name", ["../x.tar", "train/../../x.tar", "/etc/passwd"])
def test_a_strangers_name_stays_within_the_dataset(url: str, name: str) -> None:
    with pytest.raises(DatasetError, match="not a name within"):
        RemoteLocation(url).path(name, "0" * 64)


def test_a_full_disk_is_told_before_and_while_it_fills(
    url: str, monkeypatch: pytest.MonkeyPatch, server: FileServer
) -> None:
    data = Ident3D(url)
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(DownloadError, match=r"the disk is full: train/train-000000.tar needs 0.00 GB more"):
            data[0]

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DownloadError, match="No space left on device; what has arrived is kept"):
            data[0]
    server.served.clear()
    data[0]
    assert not server.served  # the part was whole


def test_a_cache_that_cannot_be_written_is_named(url: str, home: Path) -> None:
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file")
    with pytest.raises(DownloadError, match=r"Not a directory.*IDENT3D_HOME"):
        Ident3D(url)


def test_a_cached_file_that_was_cut_is_fetched_again(url: str, home: Path, fabricated: Path) -> None:
    data = Ident3D(url)
    data[0]
    (shard,) = [path for path in kept(home) if path.suffix == ".tar"]
    shard.write_bytes(b"cut")
    assert torch.equal(Ident3D(url)[0][0], Ident3D(fabricated)[0][0])


def test_patience_is_for_what_may_pass(fabricated: Path) -> None:
    """The pauses double, up to the longest."""
    pauses: list[float] = []
    patience = replace(transfer.PATIENCE, attempts=9, longest_s=20.0, sleep=pauses.append)
    with FileServer(fabricated).running() as server:
        server.fail = lambda method, path: 503
        with pytest.raises(Exception, match="asked 9 times"):
            transfer.read_whole(source_of(server.url), "dataset.json", 10**6, patience)
    assert pauses == [1, 2, 4, 8, 16, 20, 20, 20]

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flaky_server import Reply, Site, serving

from ident3d.datasets.download import download
from ident3d.datasets.records import RECORDS, Record, RemoteFile, find_record
from ident3d.errors import DatasetError, DownloadError, SpecError
from ident3d.network.http import Patience

NAMES = ("3dident", "causal3dident", "multimodal3dident", "kitti-masks")


def content_of(record: Record, file: RemoteFile, top: str | None = None, lack: str = "") -> bytes:
    """A stand-in for a published file: what it should hold, and some pictures; `top` in place of the usual folder."""
    if not file.holds:
        return random.Random(0).randbytes(300_000)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in [*file.holds, "images/0.png", "a/b.png", "c.npy"]:
            if name != lack:
                info = tarfile.TarInfo(f"{file.place if top is None else top}/{name}".lstrip("/"))
                info.type = tarfile.REGTYPE if "." in name else tarfile.DIRTYPE
                data = random.Random(name).randbytes(40_000) if "." in name else b""
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), 1) if file.name.endswith("gz") else buffer.getvalue()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    """The records' server; it serves stand-ins, whose md5s stand in the table where the real ones do."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("IDENT3D_OFFLINE", raising=False)
    with serving() as site:
        for name, record in RECORDS.items():
            files = []
            for file in record.files:
                content = content_of(record, file)
                site.add(f"/records/{record.zenodo}/files/{file.name}", content)
                files.append(replace(file, md5=file.md5 and hashlib.md5(content).hexdigest()))
            monkeypatch.setitem(RECORDS, name, replace(record, host=site.url, files=tuple(files)))
            listing = [
                {"key": f.name, "size": len(c), "checksum": f"md5:{hashlib.md5(c).hexdigest()}"}
                for f, c in ((f, site.files[path_of(record, f)]) for f in files)
            ]
            site.add(f"/api/records/{record.zenodo}", json.dumps({"files": listing}).encode())
        yield site


def path_of(record: Record, file: RemoteFile) -> str:
    return f"/records/{record.zenodo}/files/{file.name}"


def paths(name: str) -> list[str]:
    return [path_of(RECORDS[name], file) for file in RECORDS[name].files]


def left(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


class TestPlaces:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_set_comes_into_its_layout_once(self, site: Site, tmp_path: Path, name: str) -> None:
        root = tmp_path / "data"
        assert download(name.upper(), root) == root
        places = {file.place for file in RECORDS[name].files}
        assert all((root / place).exists() for place in places)
        assert {path.name for path in root.iterdir()} == {place.split("/")[0] for place in places}
        for file in RECORDS[name].files:
            assert all((root / file.place / part).exists() for part in file.holds)
        assert left(tmp_path / "home") == []
        asked = len(site.hits)
        download(name, str(root))
        assert len(site.hits) == asked

    def test_the_cache_is_the_root_where_none_is_given(self, site: Site, tmp_path: Path) -> None:
        assert download("KITTIMasks") == tmp_path / "home" / "datasets"
        assert (tmp_path / "home" / "datasets" / "kitti_peds_v2.pickle").stat().st_size == 300_000

    @pytest.mark.parametrize("top", ["", "train", "some/where/else"])
    def test_whatever_folder_is_around_it(self, site: Site, tmp_path: Path, top: str) -> None:
        record = RECORDS["3dident"]
        content = content_of(record, record.files[0], top=top)
        serve(site, record, content)
        download("3dident", tmp_path, splits=["train"])
        assert sorted(p.name for p in (tmp_path / "3dident" / "train").iterdir()) == [
            "a",
            "c.npy",
            "images",
            "raw_latents.npy",
        ]
        assert [p.name for p in (tmp_path / "3dident").iterdir()] == ["train"]

    @pytest.mark.parametrize("splits", ["test", ["test"], ("test", "test")])
    def test_just_some_splits(self, site: Site, tmp_path: Path, splits: str | list[str]) -> None:
        download("Causal3DIdent", tmp_path, splits=splits)
        assert [hit.path for hit in site.hits] == ["/records/4784282/files/testset.tar.gz"]
        assert sorted(p.name for p in tmp_path.iterdir() if p.name != "home") == ["testset"]

    def test_beside_what_the_root_holds_already(self, site: Site, tmp_path: Path) -> None:
        """The root of a reader may be the folder around train and test itself."""
        download("3dident", tmp_path, splits="train")
        download("3dident", tmp_path / "3dident")
        assert sorted(p.name for p in (tmp_path / "3dident").iterdir()) == ["test", "train"]
        download("3dident", tmp_path / "3dident" / "train", splits="test")  # a mistake, but not to be passed over
        assert (tmp_path / "3dident" / "train" / "3dident" / "test").is_dir()
        download("multimodal3dident", tmp_path)
        asked = len(site.hits)
        download("multimodal3dident", tmp_path / "m3di")
        assert len(site.hits) == asked

    def test_an_empty_folder_is_filled_and_a_strange_one_left(self, site: Site, tmp_path: Path) -> None:
        (tmp_path / "trainset").mkdir()
        download("causal3dident", tmp_path, splits="train")
        (tmp_path / "testset").mkdir()
        (tmp_path / "testset" / "mine.txt").touch()
        with pytest.raises(DatasetError, match="testset: lacks images_0, so it is not Causal3DIdent; move it away"):
            download("causal3dident", tmp_path)

    def test_a_root_that_cannot_be_made(self, site: Site, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DownloadError, match="file: File exists"):
            download("3dident", tmp_path / "file")


def serve(site: Site, record: Record, *contents: bytes) -> None:
    """Other content for a record's first files, with the right md5s in the table."""
    files = list(record.files)
    for k, content in enumerate(contents):
        site.files[path_of(record, files[k])] = content
        files[k] = replace(files[k], md5=hashlib.md5(content).hexdigest())
    RECORDS[record.name] = replace(record, files=tuple(files))  # the fixture puts the true one back


class TestChecked:
    @pytest.mark.parametrize("name", ["multimodal3dident", "kitti-masks"])
    def test_by_the_record_where_the_table_does_not_know(self, site: Site, tmp_path: Path, name: str) -> None:
        (path,) = paths(name)
        site.plans[path].append(Reply(body=b"x" * len(site.files[path])))
        with pytest.raises(DownloadError, match=rf"expected [0-9a-f]{{32}} \(by {site.url}/api/records/\d+\)"):
            download(name, tmp_path)
        download(name, tmp_path)

    @pytest.mark.parametrize(
        "listing", [b"", b"[]", b'{"files": []}', b'{"files": [{"key": "kitti_peds_v2.pickle"}]}', b"<html>", None]
    )
    def test_by_nobody_is_said(self, site: Site, tmp_path: Path, listing: bytes | None) -> None:
        plan = Reply(404) if listing is None else Reply(body=listing)
        site.plans["/api/records/3931823"].append(plan)
        with pytest.warns(UserWarning, match=hashlib.md5(site.files[paths("kitti-masks")[0]]).hexdigest()):
            download("kitti-masks", tmp_path)

    def test_by_the_table(self, site: Site, tmp_path: Path) -> None:
        site.files[paths("3dident")[0]] += b"x"
        with pytest.raises(DownloadError, match=r"by ident3d's table; compare http.*/records/4502485\)"):
            download("3dident", tmp_path)
        assert not (tmp_path / "3dident" / "train").exists()

    def test_mirrors_come_first_and_in_order(self, site: Site, tmp_path: Path) -> None:
        site.add("/b/3dident_test.tar", site.files[paths("3dident")[1]])
        download("3dident", tmp_path, mirrors=[site.url + "/a/", site.url + "/b"], splits=["test"])
        assert [hit.path for hit in site.hits] == ["/a/3dident_test.tar", "/b/3dident_test.tar"]
        download("3dident", tmp_path, mirrors=site.url + "/c", splits=["train"])
        assert [hit.path for hit in site.hits[2:]] == ["/c/3dident_train.tar", paths("3dident")[0]]


class TestArchives:
    def test_a_bad_one_leaves_no_trace_but_itself(self, site: Site, tmp_path: Path) -> None:
        record = RECORDS["3dident"]
        serve(site, record, site.files[paths("3dident")[0]][:-10_000])
        with pytest.raises(DatasetError, match=r"home/downloads/3dident/3dident_train.tar: .*cut off"):
            download("3dident", tmp_path)
        assert list((tmp_path / "3dident").iterdir()) == []

    def test_another_layout(self, site: Site, tmp_path: Path) -> None:
        record = RECORDS["3dident"]
        serve(site, record, content_of(record, record.files[0], lack="raw_latents.npy"))
        with pytest.raises(DatasetError, match=r"holds no folder with images, raw_latents.npy; its top is 3dident"):
            download("3dident", tmp_path)
        assert list((tmp_path / "3dident").iterdir()) == []

    def test_kept_where_asked(self, site: Site, tmp_path: Path) -> None:
        download("3dident", tmp_path / "a", splits="test", keep=True)
        assert left(tmp_path / "home") == ["downloads/3dident/3dident_test.tar"]
        download("3dident", tmp_path / "b", splits="test")
        assert len(site.hits) == 1
        assert left(tmp_path / "home") == ["downloads/3dident/3dident_test.tar"]

    def test_what_a_killed_unpacking_left_goes(self, site: Site, tmp_path: Path) -> None:
        work = tmp_path / "3dident" / ".3dident_test.tar.unpacking" / "3dident" / "test" / "images"
        work.mkdir(parents=True)
        (work / "old.png").touch()
        download("3dident", tmp_path, splits="test")
        assert [p.name for p in (tmp_path / "3dident").iterdir()] == ["test"]
        assert not (tmp_path / "3dident" / "test" / "images" / "old.png").exists()


class TestOffline:
    @pytest.mark.parametrize("by", ["argument", "environment"])
    def test_says_where_it_looked_and_asks_nobody(
        self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
    ) -> None:
        monkeypatch.setenv("IDENT3D_OFFLINE", "1" if by == "environment" else "0")
        for name in NAMES:
            with pytest.raises(DownloadError, match="the network is not used") as caught:
                download(name, tmp_path / "data", offline=True if by == "argument" else None)
            file = RECORDS[name].files[0]
            assert str(tmp_path / "data" / file.place) in str(caught.value)
            assert RECORDS[name].url(file) in str(caught.value)
        assert not site.hits
        assert not (tmp_path / "data").exists()

    def test_uses_what_is_there(self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("IDENT3D_OFFLINE", "yes")
        by_hand = tmp_path / "home" / "downloads" / "causal3dident"
        by_hand.mkdir(parents=True)
        for path in paths("causal3dident"):
            (by_hand / Path(path).name).write_bytes(site.files[path])
        download("causal3dident", tmp_path)
        assert not site.hits
        assert len(left(by_hand)) == 2  # what a user brought stays
        (by_hand / "testset.tar.gz").write_bytes(b"other")
        with pytest.raises(DownloadError, match=r"testset.tar.gz: not the published file: its md5 is"):
            download("causal3dident", tmp_path / "b")
        download("causal3dident", tmp_path)

    def test_false_overrules_the_environment(self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("IDENT3D_OFFLINE", "1")
        download("kitti-masks", tmp_path, offline=False)


class TestMistakes:
    def test_names(self, tmp_path: Path) -> None:
        assert find_record("Kitti_Masks") is find_record("KITTI Masks") is RECORDS["kitti-masks"]
        assert find_record("ThreeDIdent") is RECORDS["3dident"]
        with pytest.raises(SpecError, match=r"'mnist': .* expected one of 3dident, causal3dident, "):
            download("mnist", tmp_path)
        for name in ("temporal-causal3dident", "TemporalCausal3DIdent"):
            with pytest.raises(DownloadError, match=r"knows of no files .* train.npz, val.npz and test.npz"):
                download(name, tmp_path)

    @pytest.mark.parametrize("mirror", ["ftp://a", "mirror.org", "https://a?b=c", "https://a#b", "file:///tmp"])
    def test_mirrors(self, tmp_path: Path, mirror: str) -> None:
        with pytest.raises(SpecError, match="expected a"):
            download("3dident", tmp_path, mirrors=[mirror])

    @pytest.mark.parametrize(
        ("name", "splits"), [("3dident", ["val"]), ("3dident", []), ("kitti-masks", ["train"]), ("3dident", "t")]
    )
    def test_splits(self, tmp_path: Path, name: str, splits: list[str] | str) -> None:
        with pytest.raises(SpecError, match="split"):
            download(name, tmp_path, splits=splits)

    def test_the_table_is_the_published_one(self) -> None:
        files = {file.name: file.md5 for record in RECORDS.values() for file in record.files}
        assert files["3dident_train.tar"] == "df132b4dacf04fa28e1c8ca9d2168634"
        assert RECORDS["kitti-masks"].url(RECORDS["kitti-masks"].files[0]) == (
            "https://zenodo.org/records/3931823/files/kitti_peds_v2.pickle?download=1"
        )


CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have jobs in the background ignore it
from dataclasses import replace
from ident3d.datasets.download import download
from ident3d.datasets.records import RECORDS
record = RECORDS["3dident"]
files = (record.files[0], replace(record.files[1], md5=sys.argv[3]))
RECORDS["3dident"] = replace(record, host=sys.argv[1], files=files)
download("3dident", sys.argv[2], splits="test", quiet=False)
"""


@pytest.fixture
def child(site: Site, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts another process that downloads 3DIdent's test split."""
    md5 = RECORDS["3dident"].files[1].md5
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", CHILD, site.url, str(tmp_path / "data"), str(md5)]
        started.append(subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=os.environ))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestProcesses:
    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_killed_in_the_middle_then_resumed(
        self, site: Site, tmp_path: Path, child: Callable[[], subprocess.Popen[str]], end: signal.Signals
    ) -> None:
        path = paths("3dident")[1]
        gate, whole = threading.Event(), len(site.files[path])
        site.plans[path].append(Reply(stop=2 * 65536, gate=gate))
        process = child()
        part = tmp_path / "home" / "downloads" / "3dident" / ".3dident_test.tar.part"
        wait_for(lambda: part.exists() and part.stat().st_size == 2 * 65536)
        process.send_signal(end)
        assert process.wait(60) == -end
        assert not (tmp_path / "data" / "3dident" / "test").exists()
        gate.set()
        download("3dident", tmp_path / "data", splits="test")
        assert [hit.range for hit in site.hits] == [None, "bytes=131072-"]
        assert site.hits[1].sent == whole - 2 * 65536
        assert left(tmp_path / "home") == []
        assert sorted(p.name for p in (tmp_path / "data").iterdir()) in (["3dident"], [".3dident.lock", "3dident"])

    def test_two_at_once_fetch_it_once(
        self, site: Site, tmp_path: Path, child: Callable[[], subprocess.Popen[str]]
    ) -> None:
        gate = threading.Event()
        site.plans[paths("3dident")[1]].append(Reply(stop=1000, gate=gate))
        first = child()
        assert site.asked.wait(60)
        second = child()
        assert second.stderr is not None
        assert "waiting for another process" in second.stderr.readline()
        gate.set()
        assert first.wait(60) == second.wait(60) == 0
        assert len(site.hits) == 1
        assert [p.name for p in (tmp_path / "data" / "3dident").iterdir()] == ["test"]


def test_patience_is_handed_on(site: Site, tmp_path: Path) -> None:
    site.plans[paths("3dident")[0]] += [Reply(500), Reply(429, {"Retry-After": "9"})]
    pauses: list[float] = []
    download("3dident", tmp_path, splits="train", patience=Patience(sleep=pauses.append))
    assert pauses == [1, 9]


def test_nothing_is_whole_before_the_disk_has_it(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []
    monkeypatch.setattr(os, "sync", lambda: there.append((tmp_path / "3dident" / "test").exists()))
    download("3dident", tmp_path, splits="test")
    assert there == [False]

"""Which URLs are read and how: joined to names, refused with a reason, and through fsspec under fork."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from ident3d import DownloadError, Ident3D, SpecError
from ident3d.network.http import Patience
from ident3d.network.sources import HttpSource
from ident3d.network.urls import source_of
from ident3d.shards.remote import RemoteLocation

# torch's workers, on Python 3.12 and later.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


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
    monkeypatch.setattr("ident3d.network.transfer.PATIENCE", Patience(attempts=4, sleep=made.append))
    return made


def same(left: Ident3D, right: Ident3D) -> bool:
    assert (left.latents == right.latents).all()
    return all(torch.equal(left[i][0], right[i][0]) for i in range(len(right)))


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("https://host/a/b", "https://host/a/b/train/x%20%3F%25.tar"),
        ("https://host/a/b?sig=1%2F2&x", "https://host/a/b/train/x%20%3F%25.tar?sig=1%2F2&x"),
        ("http://host:80#part", "http://host:80/train/x%20%3F%25.tar"),
    ],
)
def test_names_join_the_path_of_a_url(url: str, file: str) -> None:
    assert HttpSource(url).url("train/x ?%.tar") == file


def test_passwords_and_signatures_are_not_shown() -> None:
    assert HttpSource("https://me:secret@host/a?sig=secret").address("x") == "https://host/a/x"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuch://host/path", "unknown protocol 'nosuch'"),
        ("://", "unknown protocol"),
        ("https://", "names a server"),
        ("http://a b/c", "names a server"),
        ("hf://datasets/teapots", "expected hf://datasets/user/name"),
        ("hf://datasets/", "expected hf://datasets/user/name"),
        ("hf://datasets/ada/../x", "expected user/name|not the name"),
        ("hf://datasets/ada/tea--pots", "not the name of a repository"),
    ],
)
def test_urls_that_nothing_reads_are_refused(url: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Ident3D(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(protocol: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", absent)
    with pytest.raises(SpecError, match=r"s3://bucket/data: Install s3fs to access S3: pip install s3fs"):
        source_of("s3://bucket/data")


def test_a_missing_huggingface_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SpecError, match=r"pip install 'ident3d\[hub\]'"):
        Ident3D("hf://datasets/ada/teapots")


def test_fsspec_reads_folders_and_memory(fabricated: Path, home: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(fabricated), "/shelf/data", recursive=True)
    try:
        for url in (f"file://{fabricated}", "memory://shelf/data", f"simplecache::file://{fabricated}"):
            assert same(Ident3D(url), Ident3D(fabricated))
        with pytest.raises(DownloadError, match=r"memory://shelf/none/dataset.json: no such file there. Expected"):
            Ident3D("memory://shelf/none")
    finally:
        memory.rm("/shelf", recursive=True)


class PostFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """Files by the slow post: asynchronous, as those of s3fs are, and so bound to a loop that does not fork."""

    protocol = "post"
    cachable = True

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return Path(path).read_bytes()[start:end]

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": path, "size": Path(path).stat().st_size, "type": "file"}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return Letter(self, path, mode)


class Letter(fsspec.spec.AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


@pytest.mark.parametrize("workers", [0, 2])
def test_forked_workers_read_asynchronous_file_systems(fabricated: Path, workers: int) -> None:
    fsspec.register_implementation("post", PostFileSystem, clobber=True)
    data, local = Ident3D(f"post://{fabricated}"), Ident3D(fabricated)
    assert torch.equal(data[0][0], local[0][0])  # the loop of this process is at work
    loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context="fork" if workers else None)
    pictures = torch.cat([batch[0] for batch in loader])
    assert torch.equal(pictures, torch.stack([local[i][0] for i in range(len(local))]))


class BrokenFile:
    size = None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def seek(self, place: int) -> None: ...

    def close(self) -> None: ...

    def read(self, count: int) -> bytes:
        raise self.error


@pytest.mark.parametrize(
    ("error", "words", "tries"),
    [
        (TimeoutError("no answer"), r"TimeoutError: no answer \(asked 4 times\)", 4),
        (OSError(errno.EIO, "wires"), "wires.*asked 4 times", 4),
        (PermissionError("not yours"), "may not be read .*keys", 1),
        (FileNotFoundError("gone"), "no such file there", 1),
        (NotImplementedError("never"), "NotImplementedError: never", 1),
    ],
)
def test_what_a_file_system_raises_is_told(
    fabricated: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str, tries: int, pauses: list[float]
) -> None:
    monkeypatch.setattr(
        "fsspec.implementations.local.LocalFileSystem._open", lambda *args, **options: BrokenFile(error)
    )
    with pytest.raises(DownloadError, match=words):
        RemoteLocation(f"file://{fabricated}").manifest()
    assert len(pauses) == tries - 1

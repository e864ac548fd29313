"""Datasets on the Hub, read from where they are: pinned to a commit, with every refusal in words."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import FakeHub, Repository, contents, logged_in

from ident3d import DownloadError, Ident3D
from ident3d.network.http import Patience


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


@pytest.fixture
def hub(fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub that has `fabricated` at ada/teapots."""
    with logged_in(monkeypatch) as running:
        running.repos["ada/teapots"] = Repository()
        running.repos["ada/teapots"].commit("main", contents(fabricated), "all")
        yield running


def same(left: Ident3D, right: Ident3D) -> bool:
    assert (left.latents == right.latents).all()
    return all(torch.equal(left[i][0], right[i][0]) for i in range(len(right)))


def test_a_dataset_on_the_hub_is_the_dataset(hub: FakeHub, fabricated: Path) -> None:
    data = Ident3D("hf://datasets/ada/teapots")
    assert same(data, Ident3D(fabricated))
    assert "hf://datasets/ada/teapots" in repr(data)
    assert hub.count("GET /api/datasets") == 1  # the commit, asked for once
    elsewhere = pickle.loads(pickle.dumps(data))
    assert torch.equal(elsewhere[7][0], data[7][0])
    assert hub.count("GET /api/datasets") == 1


def test_one_run_sees_one_commit(hub: FakeHub, fabricated: Path) -> None:
    data = Ident3D("hf://datasets/ada/teapots")
    before = hub.repos["ada/teapots"].branches["main"]
    hub.repos["ada/teapots"].commit("main", {"README.md": b""}, "gone")
    assert same(data, Ident3D(fabricated))
    assert hub.count(f"resolve/{before}/train/") == hub.count("/resolve/") - 1
    with pytest.raises(DownloadError, match="no such file in the repository"):
        Ident3D("hf://datasets/ada/teapots")
    assert same(Ident3D(f"hf://datasets/ada/teapots@{before}"), Ident3D(fabricated))


def test_revisions_and_folders_are_found(hub: FakeHub, fabricated: Path) -> None:
    repo = hub.repos["ada/teapots"]
    repo.commit("refs/pr/1", contents(fabricated, "deep/er/"), "in a folder")
    repo.branches["v1/x"] = repo.branches["refs/pr/1"]
    for revision in ("refs/pr/1", "refs%2Fpr%2F1", "v1%2Fx"):
        assert same(Ident3D(f"hf://datasets/ada/teapots@{revision}/deep/er"), Ident3D(fabricated))
    with pytest.raises(DownloadError, match="no such file in the repository"):
        Ident3D("hf://datasets/ada/teapots/deep")
    with pytest.raises(DownloadError, match="ada/teapots: no such revision"):
        Ident3D("hf://datasets/ada/teapots@v2")


def test_private_absent_and_gated_repositories_are_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    private = r"hf://datasets/ada/\w+/dataset.json: ada/\w+: no such dataset repository, or a private one: log in"
    with pytest.raises(DownloadError, match=private):
        Ident3D("hf://datasets/ada/nothing")
    data = Ident3D("hf://datasets/ada/teapots")
    hub.repos["ada/teapots"].private = True
    assert Ident3D("hf://datasets/ada/teapots")[0][0].shape == (3, 16, 16)
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(DownloadError, match=private):
        Ident3D("hf://datasets/ada/teapots")
    with pytest.raises(DownloadError, match=r"train-000001.tar: absent, private or gated"):
        data[5]
    hub.repos["ada/teapots"].private, hub.repos["ada/teapots"].gated = False, True
    with pytest.raises(DownloadError, match="ada/teapots: gated: ask for leave on its page"):
        Ident3D("hf://datasets/ada/teapots")


def test_the_hubs_own_offline_switch_is_honoured(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    Ident3D("hf://datasets/ada/teapots")[0]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Ident3D("hf://datasets/ada/teapots")[0][0].shape == (3, 16, 16)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids the network"):
        Ident3D("hf://datasets/ada/other")


def test_a_hub_that_does_not_answer_is_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    hub.fail = lambda method, path: 503 if path.startswith("/api") else 0
    with pytest.raises(DownloadError, match=r"ada/teapots: HTTP 503: .*asked 4 times"):
        Ident3D("hf://datasets/ada/teapots")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"no connection to http://127.0.0.1:9 .*is this machine offline"):
        Ident3D("hf://datasets/ada/teapots")
    assert len(pauses) == 6


def test_a_token_stays_with_the_hub(hub: FakeHub) -> None:
    sent: list[tuple[str, str | None]] = []
    answer = hub.answer

    def note(handler: Any, path: str, *rest: Any) -> None:
        sent.append((path, handler.headers.get("Authorization")))
        answer(handler, path, *rest)

    hub.answer = note
    Ident3D("hf://datasets/ada/teapots")[0]
    assert all((token is None) == path.startswith("/cdn") for path, token in sent)
    assert any(path.startswith("/cdn") for path, _ in sent)

"""Push against a Hub on this machine: what was pushed is pulled byte by byte, and nothing is half there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from hub_server import OWNER, FakeHub, Repository, contents, logged_in
from matplotlib.figure import Figure

from ident3d import DatasetError, DownloadError, Ident3D, SpecError
from ident3d.figures import contact_sheet
from ident3d.hub import pull, push
from ident3d.network.http import Patience
from ident3d.shards.card import card_text
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


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_what_is_pushed_is_pulled_byte_by_byte(
    hub: FakeHub, fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ident3d.figures.contact_sheet", contact_sheet)  # this once the real one
    url = push(fabricated, NAME, quiet=True)
    assert url == f"{hub.url}/datasets/{NAME}"
    assert len(hub.repos[NAME].files["preview.png"]) > 10_000
    out = pull(NAME, tmp_path / "deep" / "out", quiet=True)
    assert contents(out) == contents(fabricated)
    assert verify_dataset(out) == []
    remote, local = Ident3D(f"hf://datasets/{NAME}", "test"), Ident3D(out, "test")
    assert all(torch.equal(remote[i][0], local[i][0]) for i in range(6))


def test_the_repository_holds_the_dataset_and_what_shows_it(pushed: FakeHub, fabricated: Path) -> None:
    repo = pushed.repos[NAME]
    shown = {"README.md", "preview.png", "croissant.json"}
    assert set(repo.files) == set(contents(fabricated)) | shown | {".gitattributes"}
    assert {n: d for n, d in repo.files.items() if n not in shown and n[0] != "."} == {
        n: d for n, d in contents(fabricated).items() if n not in shown
    }
    assert repo.messages[1:] == [f"3dident: pushed by ident3d {read_manifest(fabricated).versions['ident3d']}"]
    assert repo.files["preview.png"].startswith(b"\x89PNG")
    front = yaml.safe_load(repo.files["README.md"].decode().split("---\n")[1])
    assert front["license"] == "cc-by-4.0"
    assert "![The first pictures" in repo.files["README.md"].decode()
    assert json.loads(repo.files["croissant.json"])["datePublished"] == "2026-11-20"


def test_hidden_and_foreign_files_stay_at_home(hub: FakeHub, damaged: Path) -> None:
    secret = {".pairs/train.faiss": b"x", ".decoded/train.bin": b"x", ".env": b"TOKEN=1", "notes.txt": b"mine"}
    put(damaged, {**secret, "train/.train-000000.tar.part": b"x"})
    push(damaged, NAME, quiet=True)
    assert not [name for name in hub.repos[NAME].files if name in secret or ".part" in name or ".render" in name]


def test_pairs_are_pushed_and_pulled(hub: FakeHub, fabricated_pairs: Path, tmp_path: Path) -> None:
    push(fabricated_pairs, NAME, quiet=True)
    assert contents(pull(NAME, tmp_path / "out", quiet=True)) == contents(fabricated_pairs)


def test_a_second_push_sends_nothing(pushed: FakeHub, fabricated: Path) -> None:
    push(fabricated, NAME, license="cc-by-4.0", quiet=True)
    assert not [line for line in pushed.asked if line.startswith("PUT") or "commit" in line]
    assert len(pushed.repos[NAME].messages) == 2


def test_an_interrupted_push_goes_on(hub: FakeHub, fabricated: Path, tmp_path: Path) -> None:
    puts = 0

    def fail(method: str, path: str) -> int:
        nonlocal puts
        puts += method == "PUT"
        return 400 if puts > 4 else 0

    hub.fail = fail
    with pytest.raises(DownloadError, match=r"push: ada/teapots: HTTP 400"):
        push(fabricated, NAME, quiet=True)
    assert set(hub.repos[NAME].files) == {".gitattributes"}  # nobody sees a half
    assert hub.blobs
    there, puts = set(hub.blobs), -1000
    hub.asked.clear()
    push(fabricated, NAME, quiet=True)
    again = {line.rpartition("/")[2] for line in hub.asked if line.startswith("PUT")}
    assert again
    assert not again & there
    assert contents(pull(NAME, tmp_path / "out", quiet=True)) == contents(fabricated)


def test_many_files_take_several_commits_the_manifest_last(
    hub: FakeHub, fabricated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ident3d.hub.ATOMIC", 5)
    push(fabricated, NAME, quiet=True)
    repo = hub.repos[NAME]
    assert len(repo.commits) == 5
    assert ["dataset.json" in files for files in repo.commits.values()] == [False] * 4 + [True]


def test_another_dataset_replaces_the_first_whole(
    pushed: FakeHub, make_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ident3d.hub.ATOMIC", 5)
    smaller = make_dataset(tmp_path / "smaller", {"train": 6}, seed=9)
    before = set(pushed.repos[NAME].commits)
    push(smaller, NAME, quiet=True)
    repo = pushed.repos[NAME]
    assert sorted(name for name in repo.files if name.startswith("train/")) == [
        f"train/{name}" for name in ("index.npy", "latents.npy", "train-000000.tar", "train-000001.tar")
    ]
    # In between there is no manifest that other shards belong to.
    between = [files for oid, files in repo.commits.items() if oid not in before]
    assert ["dataset.json" in files for files in between] == [False] * (len(between) - 1) + [True]
    assert contents(pull(NAME, tmp_path / "out", quiet=True)) == contents(smaller)


def test_a_private_push_is_private_and_never_into_a_public_place(pushed: FakeHub, fabricated: Path) -> None:
    push(fabricated, "ada/secret", private=True, quiet=True)
    assert pushed.repos["ada/secret"].private
    files = dict(pushed.repos[NAME].files)
    with pytest.raises(SpecError, match="ada/teapots is there already, and public: nothing was sent"):
        push(fabricated, NAME, private=True, quiet=True)
    assert pushed.repos[NAME].files == files


def test_a_branch_is_pushed_to_and_pulled_from(hub: FakeHub, fabricated: Path, tmp_path: Path) -> None:
    assert push(fabricated, NAME, revision="v1/x", quiet=True).endswith("/tree/v1/x")
    push(fabricated, NAME, revision="v1/x", quiet=True)
    assert set(hub.repos[NAME].files) == {".gitattributes"}
    assert contents(pull(NAME, tmp_path / "out", revision="v1/x", quiet=True)) == contents(fabricated)
    with pytest.raises(DownloadError, match="no such file in the repository"):
        pull(NAME, tmp_path / "main", quiet=True)


def test_other_peoples_work_is_not_pushed_over(hub: FakeHub, fabricated: Path) -> None:
    hub.repos[NAME] = Repository()
    files = {".gitattributes": b"", "README.md": b"my book", "chapter.txt": b"1"}
    hub.repos[NAME].commit("main", files, "mine")
    with pytest.raises(SpecError, match=r"ada/teapots holds other files \(chapter.txt, ...\)"):
        push(fabricated, NAME, quiet=True)
    assert hub.repos[NAME].files == files


def test_what_is_damaged_or_unfinished_is_not_pushed(hub: FakeHub, damaged: Path, tmp_path: Path) -> None:
    shard = damaged / "train" / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=r"not pushed, since not all is well:\n  train/train-000001.tar: truncated"):
        push(damaged, NAME, quiet=True)
    (damaged / "dataset.json").unlink()
    with pytest.raises(DatasetError, match=r"no dataset.json in it"):
        push(damaged, NAME, quiet=True)
    with pytest.raises(DatasetError, match="no such folder"):
        push(tmp_path / "nowhere", NAME, quiet=True)
    assert not hub.asked


@pytest.mark.parametrize(
    "repo",
    ["teapots", "ada/", "/teapots", "ada/tea/pots", "ada/tea pots", "ada/-x", "ada/x--y", "ada/x.git", "", "ä/b"],
)
def test_names_of_repositories_are_checked_first(fabricated: Path, tmp_path: Path, repo: str) -> None:
    with pytest.raises(SpecError, match=r"expected user/name|not the name of a repository"):
        push(fabricated, repo)
    with pytest.raises(SpecError, match=r"expected user/name|not the name of a repository"):
        pull(repo, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_leave_nothing_is_pushed(pushed: FakeHub, fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(DownloadError, match=r"push: bob/teapots: no leave \(HTTP 401: .*log in with `hf auth login`"):
        push(fabricated, "bob/teapots", quiet=True)
    with pytest.raises(DownloadError, match=r"push: ada/teapots: no leave \(HTTP 403: .*a token that may do this"):
        push(fabricated, NAME, license="mit", quiet=True)


def test_no_room_no_network_and_another_push_are_told(
    hub: FakeHub, fabricated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.quota = 10
    with pytest.raises(DownloadError, match=r"push: ada/teapots: .*Storage limit reached$"):
        push(fabricated, NAME, quiet=True)
    hub.quota = None

    def meanwhile(method: str, path: str) -> int:
        if "/commit/" in path and len(hub.repos[NAME].messages) == 1:
            hub.repos[NAME].commit("main", {}, "somebody else's")
        return 0

    hub.fail = meanwhile
    with pytest.raises(DownloadError, match=r"somebody else changed it meanwhile \(HTTP 412"):
        push(fabricated, NAME, quiet=True)
    for status, words in ((413, "has no room"), (503, "try again later"), (500, "try again later")):
        hub.fail = lambda method, path, status=status: status if "/commit/" in path else 0
        with pytest.raises(DownloadError, match=rf"push: .*{words}|HTTP {status}"):
            push(fabricated, NAME, quiet=True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"push: no connection to http://127.0.0.1:9 .*offline"):
        push(fabricated, NAME, quiet=True)


def test_what_the_hub_leaves_out_is_noticed(hub: FakeHub, fabricated: Path) -> None:
    hub.repos[NAME] = Repository()
    hub.repos[NAME].commit("main", {".gitignore": b"train/latents.npy"}, "ignore")
    with pytest.raises(DownloadError, match=r"did not take train/latents.npy \(1 in all\); .*\.gitignore"):
        push(fabricated, NAME, quiet=True)


def test_a_card_that_the_hub_refuses_is_told(hub: FakeHub, fabricated: Path) -> None:
    with pytest.raises(DownloadError, match='"license" must be one of'):
        push(fabricated, NAME, license="nonsense", quiet=True)


@pytest.mark.parametrize("switch", ["IDENT3D_OFFLINE", "HF_HUB_OFFLINE"])
def test_nothing_moves_while_the_network_is_forbidden(
    pushed: FakeHub, fabricated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv(switch, "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", switch == "HF_HUB_OFFLINE")
    with pytest.raises((SpecError, DownloadError), match=f"{switch} forbids the network"):
        push(fabricated, NAME, quiet=True)
    with pytest.raises(SpecError, match=f"{switch} forbids the network"):
        pull(NAME, tmp_path / "out", quiet=True)
    assert not pushed.asked


# The card's three ways to load, as a stranger runs them: in a process that knows the Hub by its environment alone.

LOAD = """
import datasets, torch
from pathlib import Path
from ident3d.hub import pull, push

assert push(Path(ROOT), "ada/teapots", quiet=True).startswith(URL)
datasets.disable_progress_bars()
own, foreign, third = Path(CODE).read_text().split("\\n\\n")
exec(own)
exec(third)
assert rows.num_rows == 24, rows
assert torch.equal(torch.tensor(rows[0]["latents.npy"]), latents)
assert rows.features["png"].dtype == "PIL.Image.Image", rows.features
print("well", rows[0]["png"].size, picture.shape)
"""


def test_the_cards_examples_load_from_the_hub(hub: FakeHub, fabricated: Path, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", card_text(read_manifest(fabricated), repo=NAME), re.DOTALL)
    (tmp_path / "code.py").write_text(code)
    names = {"ROOT": str(fabricated), "URL": hub.url, "CODE": str(tmp_path / "code.py")}
    script = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + LOAD
    switches = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_TOKEN": OWNER, "HF_HUB_DISABLE_XET": "1"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean | switches, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "well (16, 16) torch.Size([3, 16, 16])\n"


def test_the_library_imports_no_torch() -> None:
    code = "import sys, ident3d.hub, ident3d.shards.remote; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "huggingface_hub", "fsspec", "mlcroissant", "requests"} & set(done.stdout.split())

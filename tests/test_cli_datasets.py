"""The commands that bring datasets and take them away: download, push and pull, against servers on this machine."""

from __future__ import annotations

import hashlib
import io
import re
import runpy
import socket
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer
from flaky_server import Site, serving
from hub_server import FakeHub, contents, logged_in
from matplotlib.figure import Figure

from ident3d import ThreeDIdent
from ident3d.cli import main
from ident3d.datasets.records import RECORDS
from ident3d.network.http import Patience
from ident3d.shards.manifest import read_manifest

# huggingface_hub's uploads without xet, by its own client.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

MAKE = runpy.run_path(str(Path(__file__).parent / "data" / "make_published.py"))
NAME = "ada/teapots"
Run = Callable[..., tuple[Any, str, str]]
Refused = Callable[..., str]


@dataclass(frozen=True)
class Hasty(Patience):
    """Asks twice and waits for nobody."""

    attempts: int = 2
    sleep: Callable[[float], None] = lambda seconds: None


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, an empty working folder, no proxies, no pauses, and an empty preview."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("IDENT3D_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("IDENT3D_OFFLINE", raising=False)
    for name, value in {"COLUMNS": "120", "NO_PROXY": "*", "no_proxy": "*"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ident3d.datasets.download.Patience", Hasty)
    monkeypatch.setattr("ident3d.network.transfer.PATIENCE", Hasty())
    monkeypatch.setattr("ident3d.figures.contact_sheet", lambda data, rows, columns: Figure((1, 1)))
    return tmp_path / "home"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; its exit status, stdout and stderr."""

    def command(*args: str | Path) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return command


@pytest.fixture
def refused(run: Run) -> Refused:
    """Runs a command that is a mistake; the one line that is said of it."""

    def command(*args: str | Path) -> str:
        status, out, err = run(*args)
        assert (status, out) == (2, ""), err
        (line,) = err.splitlines()
        assert line.startswith("ident3d: ")
        return str(line)

    return command


@pytest.fixture
def nobody() -> Iterator[str]:
    """The URL of a port of this machine that is taken, but where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def site(tmp_path: Path, nobody: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A mirror of a small 3DIdent, whose md5s stand in the table; nobody answers in the record's own place."""
    made, files = MAKE["make_threedident"](tmp_path / "made"), []
    with serving() as site:
        for file in RECORDS["3dident"].files:
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                tar.add(made / file.splits[0], file.place)
            site.add(f"/{file.name}", buffer.getvalue())
            files.append(replace(file, md5=hashlib.md5(buffer.getvalue()).hexdigest()))
        monkeypatch.setitem(RECORDS, "3dident", replace(RECORDS["3dident"], host=nobody, files=tuple(files)))
        yield site


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty Hub and a user who is logged in; huggingface_hub pauses no more than we do."""
    with logged_in(monkeypatch) as running:
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield running


@pytest.fixture
def web(fabricated: Path) -> Iterator[FileServer]:
    """A web server that has `fabricated` at /data."""
    with FileServer(fabricated.parent).running() as server:
        yield server


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("download", "NAME --root --splits --mirror --offline --keep --quiet kitti-masks IDENT3D_HOME"),
        ("push", "DATASET USER/NAME --private --revision --license --message --quiet cc-by-4.0"),
        ("pull", "USER/NAME OUT --revision --splits --quiet URL"),
        ("", "download push pull"),
    ],
)
def test_help_lists_the_options(run: Run, command: str, told: str) -> None:
    status, out, err = run(*command.split(), "--help")
    assert (status, err) == (0, "")
    assert not [word for word in told.split() if word not in out]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("download", "NAME"),
        ("download 3dident --colour", "--colour"),
        ("push data", "USER/NAME"),
        ("push data ada/teapots --splits train", "--splits"),
        ("pull ada/teapots out --private", "--private"),
    ],
)
def test_commands_that_are_not_whole(run: Run, args: str, words: str) -> None:
    status, out, err = run(*args.split())
    assert status == 2
    assert words in out + err
    assert "Traceback" not in err
    assert names(Path()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("download mnist", "expected one of 3dident, causal3dident, multimodal3dident, kitti-masks"),
        ("download temporal-causal3dident", "knows of no files to download for Temporal Causal3DIdent"),
        ("download 3dident --root d --offline", "3dident_train.tar of 3DIdent is not at d/3dident/train nor, packed,"),
        ("download 3dident --root d --mirror ftp://a", "'ftp://a': expected a URL that begins with https:// or http"),
        ("download 3dident --root d --mirror mirror.org", "'mirror.org': expected a URL"),
        (
            "download 3dident --root d --mirror http://a --mirror https://b?c=d",
            "'https://b?c=d': expected a mirror's base URL",
        ),
        ("download 3dident --root d --splits val", "'val': not a split of 3DIdent; expected some of train, test"),
        ("download 3dident --root d --splits", "no split of 3DIdent is named"),
        ("pull http:///data out", "'http:///data': expected a URL that begins with https:// or http://"),
        ("pull teapot://data out", "unknown protocol 'teapot'"),
        ("pull http://127.0.0.1:1/data out --revision v1", "revision='v1': expected none beside a URL"),
        ("push nowhere ada/teapots", "nowhere: no such folder"),
        ("push nowhere teapots", "'teapots': expected user/name, e.g. ada/teapots"),
        ("pull teapots out", "'teapots': expected user/name"),
        ("pull hf://datasets/ada out", "expected hf://datasets/user/name"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(refused: Refused, home: Path, args: str, words: str) -> None:
    if "ada" in args or "push" in args:
        pytest.importorskip("huggingface_hub")
    assert words in refused(*args.split())
    assert names(Path()) == []
    assert not home.exists()


def test_offline_nothing_is_asked(
    refused: Refused, site: Site, web: FileServer, hub: FakeHub, fabricated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, words in (("1", "IDENT3D_OFFLINE"), ("perhaps", "IDENT3D_OFFLINE='perhaps': expected one of 1, true")):
        monkeypatch.setenv("IDENT3D_OFFLINE", value)
        assert words in refused("download", "3dident", "--root", "data", "--mirror", site.url)
        assert words in refused("push", fabricated, NAME)
        assert words in refused("pull", NAME, "out")
        assert words in refused("pull", f"{web.url}/data", "out")
    assert (site.hits, web.asked, hub.asked, names(Path())) == ([], [], [], [])


def test_without_huggingface_hub(refused: Refused, fabricated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for args in (["push", fabricated, NAME], ["pull", NAME, "out"], ["pull", f"hf://datasets/{NAME}", "out"]):
        line = refused(*args)
        assert line == "ident3d: the Hugging Face Hub needs the package huggingface_hub: pip install 'ident3d[hub]'"
    assert names(Path()) == []


def test_a_folder_that_holds_something_else(refused: Refused, hub: FakeHub, web: FileServer, site: Site) -> None:
    Path("mine").mkdir()
    for name in ("thesis.tex", "mine/chapter.tex"):
        Path(name).write_text("x")
    for url in (NAME, f"{web.url}/data"):
        assert "mine: not empty, and no pull of" in refused("pull", url, "mine")
        assert "thesis.tex: not a folder; name one that is new or empty" in refused("pull", url, "thesis.tex")
    assert "thesis.tex: File exists" in refused("download", "3dident", "--root", "thesis.tex", "--mirror", site.url)
    assert contents(Path()) == {"thesis.tex": b"x", "mine/chapter.tex": b"x"}
    assert (hub.asked, web.asked, site.hits) == ([], [], [])


def test_a_download_without_a_network(run: Run, site: Site, nobody: str, home: Path) -> None:
    status, out, err = run("download", "3dident", "--root", "data", "--mirror", f"{nobody}/a", "--quiet")
    first, mirror, record, last = err.splitlines()
    assert (status, out, first) == (2, "", "ident3d: 3dident_train.tar could not be fetched:")
    assert mirror.startswith(f"  {nobody}/a/3dident_train.tar: no connection to 127.0.0.1 ")
    assert record.startswith(f"  {nobody}/records/4502485/files/3dident_train.tar?download=1: no connection to ")
    assert "is this machine offline? (asked 2 times)" in record
    assert last.endswith(f"put it at {home / 'downloads' / '3dident' / '3dident_train.tar'}")
    assert not (Path("data") / "3dident" / "train").exists()


def test_push_and_pull_without_a_network(
    refused: Refused, hub: FakeHub, fabricated: Path, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = refused("pull", f"{nobody}/data", "out")
    assert line.startswith(f"ident3d: {nobody}/data/dataset.json: no connection to 127.0.0.1 ")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nobody)
    for line in (refused("pull", NAME, "out"), refused("push", fabricated, NAME)):
        assert re.search(rf"no connection to {nobody} .*is this machine offline\?", line)
    assert hub.asked == []


def test_what_a_server_does_not_have(refused: Refused, hub: FakeHub, web: FileServer) -> None:
    assert "no such dataset repository, or a private one: log in" in refused("pull", NAME, "out")
    assert "no such file there. Expected the folder of a dataset" in refused("pull", f"{web.url}/elsewhere", "out")


def test_download_says_where_it_is_and_whom_to_cite(run: Run, site: Site, tmp_path: Path, home: Path) -> None:
    record = RECORDS["3dident"]
    told = f"{Path('data').absolute()}: 3DIdent; licence: {record.license} ({record.page})\n"
    told += f"please cite {record.citation}\n"
    assert run("download", "3dident", "--root", "data", "--mirror", site.url) == (0, told, "")
    assert [hit.path for hit in site.hits] == ["/3dident_train.tar", "/3dident_test.tar"]
    assert contents(Path("data")) == contents(tmp_path / "made")
    assert contents(home) == {}
    assert {split: len(ThreeDIdent("data", split)) for split in ("train", "test")} == MAKE["SAMPLES"]
    assert run("download", "ThreeDIdent", "--root", "data", "--offline") == (0, told, "")
    assert len(site.hits) == 2


def test_download_into_the_cache_from_the_second_mirror(run: Run, site: Site, nobody: str, home: Path) -> None:
    args = ["--mirror", nobody, "--mirror", site.url, "--splits", "test", "--keep", "--quiet"]
    status, out, err = run("download", "3dident", *args)
    assert (status, out.partition(":")[0], err) == (0, str(home / "datasets"), "")
    assert [hit.path for hit in site.hits] == ["/3dident_test.tar"]
    assert names(home / "datasets" / "3dident") == ["test"]
    assert names(home / "downloads" / "3dident") == ["3dident_test.tar"]


def test_what_is_pushed_is_pulled_and_all_is_well(run: Run, hub: FakeHub, fabricated: Path) -> None:
    for _ in range(2):
        assert run("push", fabricated, NAME) == (0, f"{hub.url}/datasets/{NAME}\n", "")
        assert run("pull", NAME, "deep/out") == (0, "deep/out\n", "")
    assert len(hub.repos[NAME].messages) == 2  # the first commit is the Hub's own
    assert contents(Path("deep/out")) == contents(fabricated)
    assert run("verify", "deep/out") == (0, "deep/out: all is well\n", "")


def test_the_options_of_push_and_pull(run: Run, hub: FakeHub, fabricated: Path) -> None:
    args = ["--private", "--revision", "v1/x", "--license", "mit", "--message", "more pots", "--quiet"]
    assert run("push", fabricated, NAME, *args) == (0, f"{hub.url}/datasets/{NAME}/tree/v1/x\n", "")
    repo = hub.repos[NAME]
    assert (repo.private, repo.messages[1:]) == (True, ["more pots"])
    assert list(repo.files) == [".gitattributes"]
    assert b'license: "mit"' in repo.commits[repo.branches["v1/x"]]["README.md"]
    assert run("pull", NAME, "out", "--revision", "v1/x", "--splits", "test", "--quiet") == (0, "out\n", "")
    assert list(read_manifest(Path("out")).splits) == ["test"]
    assert run("verify", "out") == (0, "out: all is well\n", "")


def test_a_pull_from_a_web_server_needs_no_huggingface_hub(
    run: Run, web: FileServer, fabricated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert run("pull", f"{web.url}/data", "out") == (0, "out\n", "")
    assert contents(Path("out")) == contents(fabricated)
    assert run("verify", "out") == (0, "out: all is well\n", "")

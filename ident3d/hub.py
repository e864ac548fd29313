"""Datasets on the Hugging Face Hub: `push` puts one there, `pull` brings one here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from ident3d._version import __version__
from ident3d.errors import DatasetError, DownloadError, SpecError
from ident3d.files import write_json
from ident3d.home import offline
from ident3d.network.hub_source import as_download_errors, check_repo, hub_api, hub_errors, import_hub
from ident3d.shards.card import card_text
from ident3d.shards.croissant import croissant
from ident3d.shards.manifest import Manifest, read_manifest
from ident3d.shards.pull import pull, split_sums
from ident3d.shards.remote import MANIFEST
from ident3d.shards.summary import file_sha256
from ident3d.shards.verify import verify_dataset

__all__ = ["pull", "push"]

ATOMIC = 500
"""Up to so many changes are one commit, so that nobody sees a half. The Hub refuses commits that take it a minute."""

UPLOADS = 16
"""Files that are sent before the bar moves."""

OURS = re.compile(
    r"dataset\.json|README\.md|croissant\.json|preview\.png|scene/[^/]+"
    r"|[^/]+/(?:[^/]+-\d{6}\.tar|(?:pair\.)?latents\.npy|index\.npy|categories\.npy)"
)
"""Files of a dataset that was pushed before."""

COMMON = {".gitattributes", ".gitignore", "LICENSE", "LICENSE.md", "LICENSE.txt"}
"""Files of other people's making that a push leaves as they are."""


@dataclass(frozen=True)
class _File:
    """A file to be in the repository."""

    path: Path
    size: int
    sha256: str

    def is_same(self, there: Any) -> bool:
        """Whether the Hub has it already: large files it knows by sha256, small ones by git's checksum."""
        if there.size != self.size:
            return False
        if there.lfs is not None:
            return bool(there.lfs.sha256 == self.sha256)
        data = self.path.read_bytes()
        return bool(there.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest())


def push(
    dataset: Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "",
    license: str | None = None,
    quiet: bool = False,
) -> str:
    """Put a dataset on the Hugging Face Hub: its shards and arrays, scene, manifest, a card, a preview, Croissant.

    Every file is checked first. What the repository has already is not sent again, so an interrupted push goes on where
    it stopped. All is sent before the first commit, which up to 500 files are; of more, the manifest comes with the
    last, so that a part never looks whole. Shards there that the dataset does not have (any more) are removed. The
    endpoint and token are huggingface_hub's: HF_ENDPOINT, HF_TOKEN or `hf auth login`.

    Args:
        dataset: its folder.
        repo: `user/name` or `organisation/name`; made where it is not there.
        private: nobody else may see it. A repository that is there and public is refused then.
        revision: the branch; made where it is not there. By default the main one.
        message: of the commit.
        license: in the Hub's words, e.g. `cc-by-4.0`; by default that of the source, or `unknown`.
        quiet: no progress bars.

    Returns:
        The URL of its page.

    Raises:
        SpecError: not the name of a repository, one that holds other things, or huggingface_hub is absent.
        DatasetError: no finished dataset there, or files that are not what the manifest says.
        DownloadError: no network, no leave, no room, or another push meanwhile; the text says which.
    """
    check_repo(repo)
    if offline():
        raise SpecError("IDENT3D_OFFLINE forbids the network; unset it to push")
    manifest = _checked(Path(dataset), quiet)
    api = hub_api()
    with TemporaryDirectory(prefix="ident3d-") as made:
        files = _files(Path(dataset), manifest) | _shown(Path(dataset), manifest, Path(made), repo, license)
        with as_download_errors("push"), hub_errors(repo), _no_bars_of_its_own():
            info = _repository(api, repo, private, revision)
            there = _listing(api, repo, info.sha)
            _refuse_foreign(repo, there)
            created = getattr(info, "created_at", None)
            published = created.date().isoformat() if created else ""
            described = croissant(manifest, repo=repo, license=license, endpoint=api.endpoint, published=published)
            write_json(Path(made, "croissant.json"), described)
            files["croissant.json"] = _file(Path(made, "croissant.json"))
            files[MANIFEST] = _file(Path(dataset, MANIFEST))  # the last of all, in any order of commits
            _send(api, repo, files, there, _Commit(info.sha, revision, message or _message(manifest)), quiet)
    page = f"{api.endpoint}/datasets/{repo}"
    return f"{page}/tree/{revision}" if revision else page


def _message(manifest: Manifest) -> str:
    return f"{manifest.name}: pushed by ident3d {__version__}"


def _checked(dataset: Path, quiet: bool) -> Manifest:
    """The manifest of a dataset whose files are what it says."""
    problems = verify_dataset(dataset, quick=True, quiet=quiet)
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems[:5])
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DatasetError(f"{dataset}: not pushed, since not all is well:{listed}{more}\n`ident3d verify` says more")
    return read_manifest(dataset)


def _file(path: Path, sha256: str = "") -> _File:
    return _File(path, path.stat().st_size, sha256 or file_sha256(path))


def _files(dataset: Path, manifest: Manifest) -> dict[str, _File]:
    """What the manifest names, by name; nothing else that lies in the folder."""
    files = {name: _file(dataset / name, sha256) for name, (sha256, _) in split_sums(manifest).items()}
    if manifest.scene is not None:
        for name in ("scene/scene.toml", f"scene/{manifest.scene.mesh}"):
            files[name] = _file(dataset / name)
    return files


def _shown(dataset: Path, manifest: Manifest, folder: Path, repo: str, license: str | None) -> dict[str, _File]:
    """What the repository's page shows: card and preview, made in a folder of their own."""
    from ident3d.datasets.ident3d import Ident3D
    from ident3d.figures import contact_sheet, save_figure

    split = next(iter(manifest.splits))
    save_figure(contact_sheet(Ident3D(dataset, split), 4, 8), folder / "preview.png")
    card = card_text(manifest, repo=repo, license=license, preview=True)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return {name: _file(folder / name) for name in ("preview.png", "README.md")}


def _repository(api: Any, repo: str, private: bool, revision: str | None) -> Any:
    """What the Hub says of the repository, which is made where it is not there."""
    api.create_repo(repo, repo_type="dataset", private=private or None, exist_ok=True)
    if private and not api.dataset_info(repo).private:
        raise SpecError(
            f"{repo} is there already, and public: nothing was sent. Make it private in its settings on the Hub, name "
            "another repository, or push without private"
        )
    if revision and not revision.startswith("refs/"):
        api.create_branch(repo, repo_type="dataset", branch=revision, exist_ok=True)
    return api.dataset_info(repo, revision=revision)


def _listing(api: Any, repo: str, commit: str) -> dict[str, Any]:
    """The repository's files by name, each with its size and checksum."""
    entries = api.list_repo_tree(repo, repo_type="dataset", revision=commit, recursive=True)
    return {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}


def _refuse_foreign(repo: str, there: Mapping[str, Any]) -> None:
    """A push writes the card anew: not over somebody's other work."""
    foreign = [name for name in there if name not in COMMON and not OURS.fullmatch(name)]
    ours = [name for name in there if OURS.fullmatch(name) and name != "README.md"]
    if foreign and not ours:
        raise SpecError(
            f"{repo} holds other files ({', '.join(sorted(foreign)[:3])}, ...): expected an empty repository, or one "
            "that a dataset was pushed to before"
        )


@dataclass
class _Commit:
    """Where the next commit goes."""

    parent: str
    revision: str | None
    message: str


def _send(
    api: Any, repo: str, files: Mapping[str, _File], there: Mapping[str, Any], commit: _Commit, quiet: bool
) -> None:
    """Bring the repository to hold these files, and none of ours besides."""
    hub = import_hub()
    new = {name: file for name, file in files.items() if name not in there or not file.is_same(there[name])}
    folders = {name.partition("/")[0] for name in files if "/" in name}
    gone = [name for name in there if name not in files and OURS.fullmatch(name) and name.partition("/")[0] in folders]
    if not new and not gone:
        return
    additions = [hub.CommitOperationAdd(name, str(file.path)) for name, file in new.items()]
    _upload(api, repo, additions, sum(file.size for file in new.values()), commit.revision, quiet)
    changes = [*(hub.CommitOperationDelete(name) for name in gone), *additions]
    if len(changes) > ATOMIC and MANIFEST in there and MANIFEST in new:
        # Between the commits the old manifest would name shards that are others already.
        changes.insert(0, hub.CommitOperationDelete(MANIFEST))
    for start in range(0, len(changes), ATOMIC):
        done = api.create_commit(
            repo,
            changes[start : start + ATOMIC],
            commit_message=commit.message,
            repo_type="dataset",
            revision=commit.revision,
            parent_commit=commit.parent,
        )
        commit.parent = done.oid
    _compare(repo, files, _listing(api, repo, commit.parent))


def _upload(api: Any, repo: str, additions: Sequence[Any], size: int, revision: str | None, quiet: bool) -> None:
    """Send contents, which the Hub keeps until a commit names them."""
    bar: tqdm[Any]
    with tqdm(total=size, desc=repo, unit="B", unit_scale=True, disable=True if quiet else None) as bar:
        for start in range(0, len(additions), UPLOADS):
            some = additions[start : start + UPLOADS]
            api.preupload_lfs_files(repo, some, repo_type="dataset", revision=revision, free_memory=False)
            bar.update(sum(addition.upload_info.size for addition in some))


def _compare(repo: str, files: Mapping[str, _File], there: Mapping[str, Any]) -> None:
    """The Hub skips in silence what the repository's .gitignore names."""
    wrong = [name for name, file in files.items() if name not in there or not file.is_same(there[name])]
    if wrong:
        raise DownloadError(
            f"push: {repo}: the Hub did not take {', '.join(sorted(wrong)[:3])} ({len(wrong)} in all); does the "
            "repository's .gitignore name such files?"
        )


@contextmanager
def _no_bars_of_its_own() -> Iterator[None]:
    """huggingface_hub draws a bar for every file."""
    utils = import_hub().utils
    shown = not utils.are_progress_bars_disabled()
    if shown:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            utils.enable_progress_bars()

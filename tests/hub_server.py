"""A server on this machine that speaks as much of the Hugging Face Hub's HTTP as push, pull and reading need.

What it says was read off the client library's requests and the Hub's documentation; it keeps the rules that matter
here: large files by sha256 and apart from commits, atomic commits on a parent, 401 and 404 with X-Error-Code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

if TYPE_CHECKING:
    from tests.file_server import Handler, Server
else:
    from file_server import Handler, Server

__all__ = ["OWNER", "FakeHub", "Repository", "contents", "logged_in"]

OWNER = "hf_owner"
"""The token that may do everything."""


@contextmanager
def logged_in(patch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty Hub that huggingface_hub takes for the real one, and a user who may do everything there."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with FakeHub().running() as hub:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", OWNER)
        yield hub


def contents(root: Path, folder: str = "") -> dict[str, bytes]:
    """The files of a dataset by name, below a folder."""
    files = [path for path in root.rglob("*") if path.is_file() and ".render" not in path.parts]
    return {f"{folder}{path.relative_to(root)}": path.read_bytes() for path in files}


@dataclass
class Repository:
    """A dataset repository: commits that map names to contents."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit("main", {".gitattributes": b"*.tar filter=lfs\n"}, "initial commit")

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        self.messages.append(message)
        parent = self.branches.get(branch, "")
        oid = hashlib.sha1(f"{parent}{len(self.messages)}{message}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    @property
    def files(self) -> dict[str, bytes]:
        """Those of the main branch."""
        return self.commits[self.branches["main"]]


class FakeHub(Server):
    """As much of the Hub as push, pull and reading need.

    Attributes:
        repos: by `user/name`.
        blobs: large contents by sha256, whether a commit names them or not.
        quota: bytes of large contents that fit, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repos: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.quota: int | None = None

    def answer(self, handler: Handler, path: str, query: dict[str, list[str]], body: bytes) -> None:
        routes: list[tuple[str, str, Callable[..., None]]] = [
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/validate-yaml", self._validate),
            ("PUT", r"/lfs/(\w{64})", self._take),
            ("POST", r"/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            ("POST", r"/api/datasets/([^/]+/[^/]+)/preupload/(.+)", self._preupload),
            ("POST", r"/api/datasets/([^/]+/[^/]+)/commit/(.+)", self._commit),
            ("POST", r"/api/datasets/([^/]+/[^/]+)/branch/(.+)", self._branch),
            ("GET", r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", self._tree),
            ("POST", r"/api/datasets/([^/]+/[^/]+)/paths-info/(.+)", self._paths),
            ("GET", r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", self._info),
            ("GET HEAD", r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            ("GET HEAD", r"/cdn/(\w{64})", self._cdn),
        ]
        for methods, pattern, route in routes:
            match = re.fullmatch(pattern, path)
            if match and handler.command in methods.split():
                return route(handler, body, *match.groups())
        return handler.reply_json({"error": "no such route"}, 404)

    def _may(self, handler: Handler) -> bool:
        return handler.headers.get("Authorization") == f"Bearer {OWNER}"

    def _repo(self, handler: Handler, name: str, *, write: bool = False) -> Repository | None:
        """The repository, or None after the refusal was sent."""
        repo, may = self.repos.get(name), self._may(handler)
        if repo is None or (repo.private and not may):
            handler.reply_json({"error": "Repository not found"}, 404 if may else 401, X_Error_Code="RepoNotFound")
            return None
        if repo.gated and not may:
            handler.reply_json({"error": "Access is restricted"}, 401, X_Error_Code="GatedRepo")
            return None
        if write and not may:
            handler.reply_json({"error": "You don't have the rights"}, 403)
            return None
        return repo

    def _create(self, handler: Handler, body: bytes) -> None:
        asked = json.loads(body)
        if not self._may(handler):
            return handler.reply_json({"error": "Invalid username or password."}, 401)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repos:
            told = {"error": "You already created this dataset repo", "url": f"{self.url}/datasets/{name}"}
            return handler.reply_json(told, 409)
        self.repos[name] = Repository(private=asked.get("visibility") == "private" or bool(asked.get("private")))
        return handler.reply_json({"url": f"{self.url}/datasets/{name}"})

    def _validate(self, handler: Handler, body: bytes) -> None:
        import yaml  # type: ignore[import-untyped]

        front = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        good = isinstance(front, dict) and front.get("license") != "nonsense"
        errors = [] if good else [{"message": '"license" must be one of ...'}]
        return handler.reply_json({"errors": errors, "warnings": []}, 200 if good else 400)

    def _preupload(self, handler: Handler, body: bytes, name: str, revision: str) -> None:
        repo = self._repo(handler, name, write=True)
        if repo is None:
            return None
        ignored = repo.files.get(".gitignore", b"").decode().split()
        files = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if is_large(f["path"], f["size"]) else "regular",
                "shouldIgnore": f["path"] in ignored,
            }
            for f in json.loads(body)["files"]
        ]
        return handler.reply_json({"files": files})

    def _batch(self, handler: Handler, body: bytes, name: str) -> None:
        if self._repo(handler, name, write=True) is None:
            return None
        objects: list[dict[str, Any]] = []
        for item in json.loads(body)["objects"]:
            oid, size = item["oid"], item["size"]
            objects.append({"oid": oid, "size": size})
            if self.quota is not None and sum(map(len, self.blobs.values())) + size > self.quota:
                objects[-1]["error"] = {"code": 507, "message": "Storage limit reached"}
            elif oid not in self.blobs:
                objects[-1]["actions"] = {"upload": {"href": f"{self.url}/lfs/{oid}"}}
        return handler.reply_json({"transfer": "basic", "objects": objects})

    def _take(self, handler: Handler, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return handler.reply(400)
        self.blobs[oid] = body
        return handler.reply(200)

    def _commit(self, handler: Handler, body: bytes, name: str, revision: str) -> None:
        repo = self._repo(handler, name, write=True)
        if repo is None:
            return None
        header, *changes = [json.loads(line) for line in body.splitlines()]
        parent = repo.branches[revision]
        if header["value"].get("parentCommit", parent) != parent:
            return handler.reply_json({"error": "A commit has happened since"}, 412)
        files = dict(repo.commits[parent])
        for change in changes:
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif change["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            else:
                del files[value["path"]]
        oid = repo.commit(revision, files, header["value"]["summary"])
        return handler.reply_json({"commitUrl": f"{self.url}/datasets/{name}/commit/{oid}", "commitOid": oid})

    def _branch(self, handler: Handler, body: bytes, name: str, branch: str) -> None:
        repo = self._repo(handler, name, write=True)
        if repo is None:
            return None
        if branch in repo.branches:
            return handler.reply_json({"error": "Reference already exists"}, 409)
        repo.branches[branch] = repo.branches["main"]
        return handler.reply_json({})

    def _at(self, handler: Handler, name: str, revision: str | None) -> tuple[Repository, str] | None:
        repo = self._repo(handler, name)
        if repo is None:
            return None
        commit = repo.resolve(revision or "main")
        if commit is None:
            handler.reply_json({"error": f"Invalid rev id: {revision}"}, 404, X_Error_Code="RevisionNotFound")
            return None
        return repo, commit

    def _info(self, handler: Handler, body: bytes, name: str, revision: str | None) -> None:
        found = self._at(handler, name, revision)
        if found is None:
            return None
        repo, commit = found
        data = {"id": name, "sha": commit, "private": repo.private, "gated": repo.gated, "tags": [], "downloads": 0}
        files = [{"rfilename": path} for path in repo.commits[commit]]
        return handler.reply_json({**data, "createdAt": "2026-11-20T10:00:00.000Z", "siblings": files})

    def _tree(self, handler: Handler, body: bytes, name: str, revision: str, folder: str | None) -> None:
        found = self._at(handler, name, revision)
        if found is None:
            return None
        prefix = f"{folder}/" if folder else ""
        files = {path: data for path, data in found[0].commits[found[1]].items() if path.startswith(prefix)}
        if prefix and not files:
            return handler.reply_json({"error": "no such folder"}, 404, X_Error_Code="EntryNotFound")
        folders = sorted({path.rpartition("/")[0] for path in files if "/" in path[len(prefix) :]})
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in folders]
        return handler.reply_json([*entries, *(entry(path, data) for path, data in files.items())])

    def _paths(self, handler: Handler, body: bytes, name: str, revision: str) -> None:
        found = self._at(handler, name, revision)
        if found is None:
            return None
        text = body.decode()
        paths = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text)["paths"]
        files = found[0].commits[found[1]]
        return handler.reply_json([entry(path, files[path]) for path in paths if path in files])

    def _resolve(self, handler: Handler, body: bytes, name: str, revision: str, path: str) -> None:
        found = self._at(handler, name, revision)
        if found is None:
            return None
        repo, commit = found
        data = repo.commits[commit].get(path)
        if data is None:
            return handler.reply_json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        if not is_large(path, len(data)):
            return handler.reply_file(data, path, ETag=f'"{blob_id(data)}"', X_Repo_Commit=commit)
        sha256 = hashlib.sha256(data).hexdigest()
        self.blobs[sha256] = data
        size, etag = str(len(data)), f'"{sha256}"'
        return handler.reply(
            302,
            Location=f"http://localhost:{self.server_port}/cdn/{sha256}",  # another host: tokens do not go there
            X_Repo_Commit=commit,
            X_Linked_Size=size,
            X_Linked_ETag=etag,
            ETag=etag,
        )

    def _cdn(self, handler: Handler, body: bytes, oid: str) -> None:
        return handler.reply_file(self.blobs[oid], oid, ETag=f'"{oid}"')


def is_large(path: str, size: int) -> bool:
    """Whether the Hub keeps a file apart from git."""
    return path.endswith((".tar", ".npy", ".png")) or size > 10 * 2**20


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, Any]:
    """A file in a listing."""
    large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    more = {"lfs": large} if is_large(path, len(data)) else {}
    return {"type": "file", "oid": blob_id(data), "size": len(data), "path": path, **more}

"""A whole dataset from the Hub or another URL to a folder: resumed, checked, the manifest last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ident3d.errors import DatasetError, SpecError
from ident3d.files import write_atomic, write_json
from ident3d.home import offline
from ident3d.network.fetch import disk_errors, locked
from ident3d.network.hub_source import HubSource, check_repo
from ident3d.network.sources import Source
from ident3d.network.transfer import check_room, download, is_sha256
from ident3d.network.urls import source_of
from ident3d.scene import SceneSpec
from ident3d.schema import to_plain
from ident3d.shards.card import card_text
from ident3d.shards.location import is_url
from ident3d.shards.manifest import Manifest, parse_manifest, read_manifest, write_manifest
from ident3d.shards.remote import MANIFEST, fetch_manifest

__all__ = ["fetch_scene", "pull", "split_sums"]

MARK = ".pull.json"
"""What an unfinished pull is of."""

THREADS = 4


class _Stopped(Exception):
    """Another file could not be had, or the user has had enough."""


def split_sums(manifest: Manifest) -> dict[str, tuple[str, int]]:
    """The files of all splits by name, each with its sha256 and its size, which is -1 where the manifest has none.

    Raises:
        DatasetError: no split, two files of one name, or a checksum that is none.
    """
    if not manifest.splits:
        raise DatasetError(f"{MANIFEST}: it has no split")
    sums: dict[str, tuple[str, int]] = {}
    for name, split in manifest.splits.items():
        files = [(shard.name, shard.sha256, shard.bytes) for shard in split.shards]
        files += [("latents.npy", split.latents_sha256, -1), ("index.npy", split.index_sha256, -1)]
        files += [("pair.latents.npy", split.pair_latents_sha256, -1)] if split.pairs else []
        files += [("categories.npy", split.categories_sha256, -1)] if split.categories_sha256 else []
        files += [(extra, sha256, -1) for extra, sha256 in split.extras.items()]
        for file, sha256, size in files:
            if f"{name}/{file}" in sums or not is_sha256(sha256):
                raise DatasetError(f"{MANIFEST}: {name}/{file}: named twice, or without a sha256 ({sha256!r})")
            sums[f"{name}/{file}"] = sha256, size
    return sums


def pull(
    repo: str,
    out: Path,
    *,
    revision: str | None = None,
    splits: Iterable[str] | None = None,
    quiet: bool = False,
) -> Path:
    """Bring a dataset from the Hugging Face Hub, or from another URL, into a folder.

    Each file is checked as it comes, and the manifest is written last. An interrupted pull goes on where it stopped
    when it is run again, at the same commit of the Hub. Run over a dataset that is whole, it fetches again what is
    missing or damaged there.

    Args:
        repo: `user/name`, or any URL that `Ident3D` takes.
        out: a folder that is new or empty, or that an earlier pull of the same made.
        revision: a branch, tag or commit of the Hub; by default what the main branch is at now.
        splits: just these; all by default.
        quiet: no progress bar.

    Returns:
        The folder.

    Raises:
        SpecError: not the name of a repository, or no such split.
        DatasetError: the folder holds something else, or what is there is no dataset.
        DownloadError: a file that cannot be had, is another than the manifest says, or does not fit on the disk.
    """
    source, out = _source(repo, revision), Path(out)
    if source.networked and (offline() or source.forbidden):
        raise SpecError(f"{source.forbidden or 'IDENT3D_OFFLINE'} forbids the network; unset it to pull")
    asked = list(splits) if splits is not None and not isinstance(splits, str) else splits
    if isinstance(asked, str):
        raise SpecError(f"splits={asked!r}: expected a list of names, e.g. [{asked!r}]")
    if asked == []:
        raise SpecError("splits is empty: expected names, or None for all")
    with disk_errors(out):
        _begun(out, source, asked)
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / ".pull.lock", quiet=quiet):
            begun = _begun(out, source, asked)
            if begun.get("commit") and isinstance(source, HubSource):
                source.revision = begun["commit"]
            _pull(source, out, asked, begun, quiet)
    return out


def _source(repo: str, revision: str | None) -> Source:
    if not is_url(repo):
        return source_of(f"hf://datasets/{check_repo(repo)}" + (f"@{revision.replace('/', '%2F')}" if revision else ""))
    if revision is not None:
        raise SpecError(f"revision={revision!r}: expected none beside a URL; write hf://datasets/user/name@{revision}")
    return source_of(repo.rstrip("/"))


def _begun(out: Path, source: Source, splits: list[str] | None) -> dict[str, Any]:
    """What an earlier pull noted of itself; empty where there was none.

    Raises:
        DatasetError: the folder holds something else.
    """
    if out.exists() and not out.is_dir():
        raise DatasetError(f"{out}: not a folder; name one that is new or empty")
    mark = out / MARK
    if mark.is_file():
        try:
            begun = json.loads(mark.read_text(encoding="utf-8"))
            same = (begun["url"], begun["splits"]) == (source.text, splits)
        except (ValueError, LookupError, TypeError) as error:
            raise DatasetError(f"{mark}: damaged ({error}); remove the folder, or name another") from None
        if not same:
            raise DatasetError(
                f"{out}: holds part of {begun['url']}, splits {begun['splits'] or 'all'}: finish that first by the "
                "same pull, or name another folder"
            )
        return dict(begun)
    if out.is_dir() and not (out / MANIFEST).is_file() and any(p.name != ".pull.lock" for p in out.iterdir()):
        raise DatasetError(f"{out}: not empty, and no pull of {source.text} began here; name a new or empty folder")
    return {}


def _pull(source: Source, out: Path, splits: list[str] | None, begun: Mapping[str, Any], quiet: bool) -> None:
    data = fetch_manifest(source)
    manifest = _chosen(parse_manifest(data, source.address(MANIFEST)), splits)
    note = {"url": source.text, "splits": splits, "manifest": hashlib.sha256(data).hexdigest()}
    note |= {"commit": source.commit} if isinstance(source, HubSource) else {}
    if begun and begun.get("manifest") != note["manifest"]:
        raise DatasetError(
            f"{out}: the dataset at {source.text} has changed since this pull began; name another folder"
        )
    if (out / MANIFEST).is_file() and to_plain(read_manifest(out)) != to_plain(manifest):
        raise DatasetError(f"{out}: holds another dataset, or another state of {source.text}; name another folder")
    sums = split_sums(manifest)
    missing = [size for name, (_, size) in sums.items() if size > 0 and not (out / name).exists()]
    check_room(out, sum(missing), f"the dataset ({sum(missing) / 1e9:,.2f} GB)")
    if not (out / MANIFEST).is_file():
        write_json(out / MARK, note)
    _fetch_all(source, out, sums, quiet)
    if manifest.scene is not None:
        fetch_scene(source, out, manifest)
    write_atomic(out / "README.md", card_text(manifest).encode())
    if splits is None:
        write_atomic(out / MANIFEST, data)
    else:
        write_manifest(out, manifest)
    (out / MARK).unlink(missing_ok=True)


def _chosen(manifest: Manifest, splits: list[str] | None) -> Manifest:
    if splits is None:
        return manifest
    unknown = [name for name in splits if name not in manifest.splits]
    if unknown or not splits:
        raise SpecError(f"splits={splits!r}: expected names out of {', '.join(manifest.splits)}")
    return dataclasses.replace(manifest, splits={n: s for n, s in manifest.splits.items() if n in splits})


def _fetch_all(source: Source, out: Path, sums: Mapping[str, tuple[str, int]], quiet: bool) -> None:
    """All files of the splits, some at a time; the first that cannot be had stops the others."""
    total = sum(size for _, size in sums.values() if size > 0)
    stop, guard = threading.Event(), threading.Lock()
    bar: tqdm[Any]
    with tqdm(total=total, desc=out.name, unit="B", unit_scale=True, disable=True if quiet else None) as bar:

        def progress(count: int) -> None:
            if stop.is_set():
                raise _Stopped
            with guard:
                bar.update(count)

        def one(name: str) -> None:
            sha256, size = sums[name]
            try:
                progress(0)
                counts = progress if size >= 0 else (lambda count: progress(0))
                download(source, name, out / name, sha256=sha256, size=size, progress=counts)
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(max_workers=THREADS) as pool:
            futures = [pool.submit(one, name) for name in sums]
            try:
                failures = [error for future in futures if (error := future.exception()) is not None]
            except BaseException:  # Ctrl-C, while files are under way
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        for error in failures:
            if not isinstance(error, _Stopped):
                raise error


def fetch_scene(source: Source, out: Path, manifest: Manifest) -> None:
    """Fetch the scene's files, of which the manifest has one checksum together, into a dataset's folder.

    Args:
        source: where they are.
        out: the folder.
        manifest: of a rendered dataset.

    Raises:
        DownloadError: they cannot be had.
        DatasetError: they are not those of the manifest.
    """
    assert manifest.scene is not None
    spec, mesh = out / "scene" / "scene.toml", out / "scene" / manifest.scene.mesh
    if spec.is_file() and mesh.is_file() and _digest(spec, mesh) == manifest.scene.digest:
        return
    for path in (spec, mesh):
        download(source, f"scene/{path.name}", path)
    found = _digest(spec, mesh)
    if found != manifest.scene.digest:
        spec.unlink(missing_ok=True)
        mesh.unlink(missing_ok=True)  # a stranger may have named it as the spec
        raise DatasetError(
            f"{source.address('scene')}: not the scene that the pictures were rendered from: its digest is {found}, "
            f"expected {manifest.scene.digest}; tell whoever keeps it"
        )


def _digest(spec: Path, mesh: Path) -> str:
    """The digest of a scene, or what stands for none."""
    try:
        return SceneSpec.from_toml(spec.read_text(encoding="utf-8")).digest(mesh.read_bytes())
    except (SpecError, UnicodeDecodeError, FileNotFoundError) as error:
        return f"none ({error})"

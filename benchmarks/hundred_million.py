"""What a dataset of 100 million samples in 100,000 shards costs: python benchmarks/hundred_million.py.

It is a simulation. dataset.json, latents.npy and index.npy are real and whole (20 MB, 4 GB, 3.2 GB), and so are the
names and sizes of all shards. Pictures have one colour and 8 px, and most shards are empty: sparse files of the right
size, for all full would take 205 GB. `--filled` of them hold their samples for real. They are those that
`ident3d verify --sample` chooses by `--seed`, and random pictures are read from them. The manifest has an arbitrary
sha256 for each empty shard, so a check of one of those would find it altered, and rightly.

Opening, reading, checking and parsing are measured in fresh processes, with files that the kernel has cached. With
--opening-only the arrays are holes too and there are no shards: for sizes that fit no disk. --folder keeps the dataset,
and uses the one that it finds there. Pair matching is measured on such a folder:
`PairSampler(Ident3D(FOLDER), "normal(scale=0.05)", batch_size=512)`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ident3d.codecs import encode_png
from ident3d.files import npy_bytes, read_npy
from ident3d.render.draws import draw_latents
from ident3d.render.finish import save_scene
from ident3d.scenes import load_scene
from ident3d.shards.location import Location, SplitFiles
from ident3d.shards.manifest import (
    FORMAT,
    Manifest,
    SceneRecord,
    ShardEntry,
    SplitEntry,
    read_manifest,
    shard_name,
    write_manifest,
)
from ident3d.shards.reader import index_blocks, member_offsets
from ident3d.shards.spot_check import chosen_shards, verify_sample
from ident3d.shards.summary import EXTENSIONS, sample_bytes, write_rows
from ident3d.shards.tar import END, scan_samples

SIDE = 8
VALUE = 128
PIECE = 1_000_000
"""Latents drawn at once."""


def build(root: Path, samples: int, shards: int, filled: int, seed: int) -> None:
    """Make the dataset, the manifest last.

    Args:
        root: its folder, which need not exist.
        samples: how many in all, a multiple of `shards`.
        shards: how many.
        filled: how many of them hold their samples.
        seed: that those are chosen by.
    """
    size, folder = samples // shards, root / "train"
    folder.mkdir(parents=True, exist_ok=True)
    draws = (draw_latents(0, "train", i, min(samples, i + PIECE), {}) for i in range(0, samples, PIECE))
    latents_sha256 = write_rows(folder / "latents.npy", (samples, 10), np.float32, draws)
    latents = read_npy(folder / "latents.npy", mapped=True)
    picture = encode_png(np.full((SIDE, SIDE, 3), VALUE, np.uint8))
    first = shard_bytes(picture, 0, latents[:size])
    # Members are of one size, so they lie alike in every shard.
    places = member_offsets(list(scan_samples(memoryview(first), EXTENSIONS)))
    index_sha256 = write_rows(folder / "index.npy", (samples, 2, 2), np.int64, (places for _ in range(shards)))
    whole, entries = {*chosen_shards(shards, filled, seed)}, []
    for shard in range(shards):
        name = shard_name("train", shard)
        content, digest = b"", hashlib.sha256(name.encode()).hexdigest()
        if shard in whole:
            content = shard_bytes(picture, shard * size, latents[shard * size : (shard + 1) * size])
            digest = hashlib.sha256(content).hexdigest()
        with open(folder / name, "wb") as file:
            file.write(content)
            file.truncate(len(first))
        entries.append(ShardEntry(name, size, len(first), digest))
    finish(root, samples, size, entries, (latents_sha256, index_sha256))


def build_hollow(root: Path, samples: int, shards: int) -> None:
    """Make what opening looks at, all but the manifest of holes."""
    (root / "train").mkdir(parents=True, exist_ok=True)
    for name, shape, dtype in (("latents.npy", (samples, 10), np.float32), ("index.npy", (samples, 2, 2), np.int64)):
        header = io.BytesIO()
        description = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, description)  # type: ignore[no-untyped-call]
        with open(root / "train" / name, "wb") as file:
            file.write(header.getvalue())
            file.truncate(file.tell() + int(np.prod(shape)) * np.dtype(dtype).itemsize)
    names = (shard_name("train", shard) for shard in range(shards))
    entries = [ShardEntry(n, samples // shards, 1, hashlib.sha256(n.encode()).hexdigest()) for n in names]
    finish(root, samples, samples // shards, entries, (64 * "0", 64 * "0"))


def shard_bytes(picture: bytes, start: int, latents: NDArray[np.float32]) -> bytes:
    """A shard of samples that all have one picture."""
    rows = enumerate(latents, start)
    return b"".join(sample_bytes(index, (picture, npy_bytes(row))) for index, row in rows) + END


def finish(root: Path, samples: int, size: int, entries: Sequence[ShardEntry], sums: tuple[str, str]) -> None:
    """Write scene and manifest."""
    scene, mean = load_scene("3dident"), VALUE / 255
    save_scene(root, scene)
    entry = SplitEntry(samples, size, 0, "drawn", *sums, (mean, mean, mean), (0.0, 0.0, 0.0), tuple(entries))
    manifest = Manifest(
        format=FORMAT,
        name=scene.spec.name,
        resolution=SIDE,
        quality="draft",
        device="CPU",
        render={},
        versions={"ident3d": "0.0.0", "blender": "0.0.0 (none)"},
        scene=SceneRecord(scene.spec.name, scene.digest, scene.mesh_path.name),
        factors=tuple(scene.spec.factor_table),
        splits={"train": entry},
    )
    write_manifest(root, manifest)


def memory_mb() -> dict[str, float]:
    """Resident memory of this process, the part of it that is no file's, and the most that it ever was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssAnon", "VmHWM"))}
    keys = {"VmRSS": "resident", "RssAnon": "anonymous", "VmHWM": "peak"}
    return {keys[name]: int(kilobytes) / 1024 for name, kilobytes in found.items()}


def mapped_kb(name: str) -> int:
    """How much of a mapped file this process has touched."""
    touched, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and not line.split()[0].endswith(":"):
            inside = line.endswith(name)
        elif inside and line.startswith("Rss:"):
            touched += int(line.split()[1])
    return touched


@contextmanager
def clocked(found: dict[str, Any], name: str) -> Iterator[None]:
    """Put the seconds that a block takes into `found`."""
    began = time.perf_counter()
    yield
    found[name] = time.perf_counter() - began


def measure_opening(root: Path, reads: int, filled: int, seed: int) -> dict[str, Any]:
    """Opening, and reading random pictures of filled shards; importing torch apart."""
    found: dict[str, Any] = {}
    with clocked(found, "torch_s"):
        import torch.utils.data  # noqa: F401
    found["torch"] = memory_mb()
    with clocked(found, "ident3d_s"):
        from ident3d import Ident3D
    found["ident3d"] = memory_mb()
    with clocked(found, "open_s"):
        data = Ident3D(root)
    found |= {"open": memory_mb(), "samples": len(data), "shards": len(data.entry.shards)}
    found["open_index_kb"], found["open_latents_kb"] = mapped_kb("index.npy"), mapped_kb("latents.npy")
    if not reads:
        return found
    size, generator = data.entry.shard_size, np.random.default_rng(seed)
    shards = generator.choice(chosen_shards(len(data.entry.shards), filled, seed), reads + 1)
    places = [int(k) for k in shards * size + generator.integers(size, size=reads + 1)]
    with clocked(found, "first_s"):
        data[places[0]]
    found["first_index_kb"] = mapped_kb("index.npy")
    with clocked(found, "reads_s"):
        for place in places[1:]:
            picture, latents = data[place]
            assert picture[0, 0, 0] == VALUE
            assert len(latents) == 10
    found |= {"reads_index_kb": mapped_kb("index.npy"), "reads_latents_kb": mapped_kb("latents.npy")}
    found["read"] = memory_mb()
    return found


def measure_manifest(root: Path) -> dict[str, Any]:
    """Parsing the manifest, without torch."""
    found: dict[str, Any] = {"bytes": (root / "dataset.json").stat().st_size, "before": memory_mb()}
    with clocked(found, "seconds"):
        manifest = read_manifest(root)
    return {**found, "after": memory_mb(), "shards": len(manifest.splits["train"].shards)}


def measure_verify(root: Path, count: int, seed: int) -> dict[str, Any]:
    """What `ident3d verify --sample` does."""
    found: dict[str, Any] = {}
    with clocked(found, "seconds"):
        report = verify_sample(root, count, seed)
    return {**found, "memory": memory_mb(), "problems": [str(p) for p in report.problems[:5]], "lines": report.lines()}


def measure_listing(root: Path) -> dict[str, Any]:
    """Names of all shards; their sizes in the same listing; a stat by path for each."""
    found: dict[str, Any] = {}
    with clocked(found, "names_s"), os.scandir(root / "train") as entries:
        names = [entry.name for entry in entries if entry.name.endswith(".tar")]
    with clocked(found, "sizes_s"), os.scandir(root / "train") as entries:
        _ = [entry.stat().st_size for entry in entries if entry.name.endswith(".tar")]
    with clocked(found, "stats_s"):
        for name in names:
            (root / "train" / name).stat()
    return {**found, "files": len(names)}


def measure_rebuild(root: Path, filled: int, seed: int) -> dict[str, Any]:
    """Reading the index off the headers of the filled shards."""
    entry = read_manifest(root).splits["train"]
    chosen = chosen_shards(len(entry.shards), filled, seed)
    part = replace(entry, shards=tuple(entry.shards[k] for k in chosen))
    index = read_npy(root / "train" / "index.npy", mapped=True)
    found: dict[str, Any] = {"shards": len(chosen), "of": len(entry.shards)}
    with clocked(found, "seconds"):
        for shard, block in zip(chosen, index_blocks(SplitFiles(Location(root), "train"), part), strict=True):
            assert np.array_equal(block, index[shard * entry.shard_size : (shard + 1) * entry.shard_size])
    return {**found, "memory": memory_mb()}


def fresh(measure: str, root: Path, *options: int) -> Any:
    """What one of the functions above finds in a process of its own."""
    code = f"import hundred_million as h, json, sys, pathlib; a = sys.argv[1:]\nprint(json.dumps(h.measure_{measure}("
    code += "pathlib.Path(a[0]), *map(int, a[1:]))))"
    command = [sys.executable, "-c", code, str(root.absolute()), *map(str, options)]
    run = subprocess.run(command, cwd=Path(__file__).parent, check=True, stdout=subprocess.PIPE)
    return json.loads(run.stdout)


def show_opening(root: Path, reads: int, filled: int, seed: int) -> None:
    """Print what the manifest, opening and reading take."""
    found = fresh("manifest", root)
    grown = found["after"]["resident"] - found["before"]["resident"]
    peak = found["after"]["peak"] - found["before"]["resident"]
    print(
        f"manifest: {found['bytes'] / 1e6:.1f} MB, {found['shards']:,} shards; parsed in {found['seconds']:.2f} s, "
        f"which takes {grown:.0f} MB, {peak:.0f} MB at its peak"
    )
    found = fresh("opening", root, reads, filled, seed)
    print(
        f"importing torch: {found['torch_s']:.2f} s, {found['torch']['resident']:.0f} MB; ident3d: "
        f"{found['ident3d_s']:.2f} s, {found['ident3d']['resident'] - found['torch']['resident']:.0f} MB"
    )
    print(
        f"opening {found['samples']:,} samples in {found['shards']:,} shards: {found['open_s']:.2f} s; resident "
        f"{found['open']['resident']:.0f} MB, {found['open']['anonymous']:.0f} MB of it no file's, "
        f"{found['open']['peak']:.0f} MB at its peak; touched {found['open_index_kb']} KB of index.npy, "
        f"{found['open_latents_kb']} KB of latents.npy"
    )
    if reads:
        print(
            f"one random picture: {1e3 * found['first_s']:.1f} ms, {found['first_index_kb']} KB of index.npy touched; "
            f"{reads:,} of {min(filled, found['shards']):,} shards: {1e3 * found['reads_s'] / reads:.3f} ms each, "
            f"{found['reads_index_kb'] / 1024:.0f} MB of index.npy and {found['reads_latents_kb'] / 1024:.0f} MB of "
            f"latents.npy mapped; {found['read']['anonymous']:.0f} MB are no file's"
        )


def show_checks(root: Path, count: int, filled: int, seed: int) -> None:
    """Print what listing, checking and rebuilding take."""
    found = fresh("listing", root)
    print(
        f"listing {found['files']:,} shards: {found['names_s']:.2f} s, with sizes {found['sizes_s']:.2f} s, "
        f"a stat by path for each {found['stats_s']:.2f} s"
    )
    found = fresh("verify", root, count, seed)
    memory = found["memory"]
    print(
        f"verify --sample {count} --seed {seed}: {found['seconds']:.1f} s, {memory['peak']:.0f} MB, of which "
        f"{memory['anonymous']:.0f} MB at the end are no file's"
    )
    print("\n".join(f"    {line}" for line in found["lines"] + found["problems"]))
    if not found["problems"]:
        print("    nothing wrong in what was checked")
    found = fresh("rebuild", root, filled, seed)
    each = found["seconds"] / found["shards"]
    print(
        f"index rebuilt off the headers of {found['shards']:,} shards: {1e3 * each:.1f} ms each, "
        f"{found['memory']['peak']:.0f} MB; all {found['of']:,} would take {each * found['of'] / 60:.0f} minutes "
        "(extrapolated)"
    )


def main() -> None:
    """Build the dataset where it is not there, and print what it costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--filled", type=int, default=300, help="shards that hold their samples")
    parser.add_argument("--sample", type=int, help="shards that verify --sample reads; by default all filled ones")
    parser.add_argument("--reads", type=int, default=1000, help="random pictures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the dataset here, or use the one that is here")
    parser.add_argument("--opening-only", action="store_true")
    args = parser.parse_args()
    if args.samples % args.shards:
        parser.error(f"--samples {args.samples} --shards {args.shards}: expected shards of one size")
    sample = args.filled if args.sample is None else args.sample
    if sample > args.filled:
        parser.error(f"--sample {sample}: expected no more than are filled, {args.filled}")
    with tempfile.TemporaryDirectory() as scratch:
        root: Path = args.folder or Path(scratch) / "data"
        if not (root / "dataset.json").is_file():
            began = time.perf_counter()
            if args.opening_only:
                build_hollow(root, args.samples, args.shards)
                print(f"made: arrays are holes, and no shard is there ({time.perf_counter() - began:.0f} s)")
            else:
                build(root, args.samples, args.shards, args.filled, args.seed)
                print(
                    f"made: {args.filled:,} of {args.shards:,} shards hold their samples, the others are holes "
                    f"({time.perf_counter() - began:.0f} s)"
                )
        show_opening(root, 0 if args.opening_only else args.reads, args.filled, args.seed)
        if not args.opening_only:
            show_checks(root, sample, args.filled, args.seed)


if __name__ == "__main__":
    main()

"""Damage to finished shards: python benchmarks/damage.py [--injections 1000] [--rounds 20] [--out FILE.json].

Renders 48 pictures and 24 pairs of 32 px in 8 shards each. Every injection is made alone into the good shards and must
be found by `verify_dataset`, quick and full, which must blame the files that were altered and no other. Those of a
round are then made together, and `repair_dataset` must bring back every byte. Exit status 1 where it does not, or one
is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ident3d.render.repair import repair_dataset
from ident3d.shards.manifest import read_manifest
from ident3d.shards.tar import BLOCK, END, Sample, scan_samples
from ident3d.shards.verify import Problem, verify_dataset

ROOT = Path(__file__).resolve().parents[1]
PAGE = 4096
Files = dict[str, bytes]
Change = Callable[[Files], Files]


@dataclass(frozen=True)
class Injection:
    """Some damage.

    Attributes:
        kind: what was done.
        change: the altered ones of some files; of damaged files too.
        sample: the sample, by its index, that alone is hit; None where it is not one.
    """

    kind: str
    change: Change
    sample: int | None = None


class Dataset:
    """A rendered dataset that is damaged and mended.

    Args:
        root: its folder, which need not exist.
        options: of `ident3d render`.
    """

    def __init__(self, root: Path, options: str) -> None:
        self.root = root
        command = [sys.executable, "-m", "ident3d", "render", str(root), *options.split(), "--quiet"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        self.good = self.files()
        (self.entry,) = read_manifest(root).splits.values()
        self.shards = [f"train/{shard.name}" for shard in self.entry.shards]

    def files(self) -> Files:
        """All files but those in `.render`."""
        paths = [p for p in sorted(self.root.rglob("*")) if p.is_file() and ".render" not in p.parts]
        return {str(p.relative_to(self.root)): p.read_bytes() for p in paths}

    def write(self, files: Files) -> None:
        """Put some files on disk."""
        for name, data in files.items():
            (self.root / name).write_bytes(data)

    def samples(self, file: str) -> list[Sample]:
        """Those of a good shard."""
        return list(scan_samples(self.good[file], self.entry.members))


def patch(file: str, at: int, new: bytes) -> Change:
    """Other bytes at a place."""
    return lambda files: {file: files[file][:at] + new[: len(files[file]) - at] + files[file][at + len(new) :]}


def flip(dataset: Dataset, part: str, chance: random.Random) -> Injection:
    """One flipped bit in a part of a shard."""
    file = chance.choice(dataset.shards)
    data, samples = dataset.good[file], dataset.samples(file)
    place = chance.randrange(len(samples))
    members = samples[place].members
    member = members[chance.choice([e for e in members if e.endswith("npy" if part == "latents" else "png")])]
    if part == "padding":
        member = chance.choice([m for m in members.values() if m.size % BLOCK])
    low, high = {
        "header": (member.offset - BLOCK, member.offset),
        "padding": (member.offset + member.size, member.end),
        "picture": (member.offset, member.offset + member.size),
        "latents": (member.offset, member.offset + member.size),
        "end marker": (len(data) - len(END), len(data)),
    }[part]
    at = chance.randrange(low, high)
    change = patch(file, at, bytes([data[at] ^ 1 << chance.randrange(8)]))
    index = dataset.shards.index(file) * dataset.entry.shard_size + place
    return Injection(f"bit flip, {part}", change, None if part == "end marker" else index)


def truncation(dataset: Dataset, chance: random.Random) -> Injection:
    """A shard that ends early."""
    file = chance.choice(dataset.shards)
    size = chance.randrange(len(dataset.good[file]))
    return Injection("truncation", lambda files: {file: files[file][:size]})


def zeroed_page(dataset: Dataset, chance: random.Random) -> Injection:
    """A page that the disk lost."""
    file = chance.choice(dataset.shards)
    at = chance.randrange(0, len(dataset.good[file]), PAGE)
    return Injection("zeroed page", patch(file, at, bytes(PAGE)))


def exchanged_blocks(dataset: Dataset, chance: random.Random) -> Injection:
    """Two blocks of a shard in each other's place."""
    file = chance.choice(dataset.shards)
    data = dataset.good[file]
    a, b = (BLOCK * k for k in sorted(chance.sample(range(len(data) // BLOCK), 2)))
    first, second = patch(file, a, data[b : b + BLOCK]), patch(file, b, data[a : a + BLOCK])
    return Injection("exchanged blocks", lambda files: first(files | second(files)))


def moved_samples(dataset: Dataset, kind: str, chance: random.Random) -> Injection:
    """Two samples of a shard exchanged, one there twice, or one lost."""
    file = chance.choice(dataset.shards)
    data, samples = dataset.good[file], dataset.samples(file)
    i, j = sorted(chance.sample(range(len(samples)), 2))
    spans = [data[s.start : s.end] for s in samples]
    if kind == "swapped samples":
        spans[i], spans[j] = spans[j], spans[i]
    elif kind == "duplicated sample":
        spans.insert(chance.randrange(len(spans) + 1), spans[i])
    else:
        del spans[i]
    return Injection(kind, lambda files: {file: b"".join(spans) + END})


def exchanged_shards(dataset: Dataset, chance: random.Random) -> Injection:
    """Two shards under each other's names."""
    a, b = chance.sample(dataset.shards, 2)
    return Injection("exchanged shards", lambda files: {a: files[b], b: files[a]})


KINDS: dict[str, Callable[[Dataset, random.Random], Injection]] = {
    **{
        f"bit flip, {part}": lambda dataset, chance, part=part: flip(dataset, part, chance)  # type: ignore[misc]
        for part in ("header", "padding", "picture", "latents", "end marker")
    },
    "truncation": truncation,
    "zeroed page": zeroed_page,
    "exchanged blocks": exchanged_blocks,
    **{
        kind: lambda dataset, chance, kind=kind: moved_samples(dataset, kind, chance)  # type: ignore[misc]
        for kind in ("swapped samples", "duplicated sample", "lost sample")
    },
    "exchanged shards": exchanged_shards,
}


class Tally:
    """What was found of each kind."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.found: dict[str, Counter[str]] = {how: Counter() for how in ("quick", "full")}
        self.hits: Counter[str] = Counter()
        self.named: Counter[str] = Counter()
        self.missed: list[str] = []

    def add(self, injection: Injection, altered: set[str], problems: dict[str, list[Problem]]) -> None:
        """Count one injection: what `verify` said of it, quick and full."""
        kind = injection.kind
        self.injected[kind] += 1
        for how, some in problems.items():
            if some and {p.file for p in some} == altered:
                self.found[how][kind] += 1
            else:
                self.missed.append(f"{how}: {kind} in {sorted(altered)}: {[str(p) for p in some]}")
        if injection.sample is not None:
            self.hits[kind] += 1
            self.named[kind] += {p.sample for p in problems["full"]} - {None} == {injection.sample}

    def show(self) -> None:
        """Print a line a kind."""
        print(f"{'damage':22} {'injected':>8} {'found, quick':>12} {'full':>6} {'sample named':>12}")
        for kind, number in [*self.injected.items(), ("all", 0)]:
            total = number or self.injected.total()
            counts = [self.found[how][kind] if number else self.found[how].total() for how in ("quick", "full")]
            named, hits = (c[kind] if number else c.total() for c in (self.named, self.hits))
            print(f"{kind:22} {total:8} {counts[0]:12} {counts[1]:6} {f'{named} of {hits}' if hits else '':>12}")


def inject(dataset: Dataset, kind: str, chance: random.Random) -> tuple[Injection, Files]:
    """Damage that alters some byte, and the files that it alters."""
    while True:
        injection = KINDS[kind](dataset, chance)
        altered = {n: d for n, d in injection.change(dataset.good).items() if d != dataset.good[n]}
        if altered:
            return injection, altered


def one_round(dataset: Dataset, kinds: list[str], chance: random.Random, tally: Tally) -> tuple[bool, int]:
    """Inject each alone and have it found, then all together and have them mended.

    Returns:
        Whether every byte came back, and how many samples were rendered for it.
    """
    together = dict(dataset.good)
    for kind in kinds:
        injection, altered = inject(dataset, kind, chance)
        dataset.write(altered)
        problems = {how: verify_dataset(dataset.root, quick=how == "quick") for how in ("quick", "full")}
        tally.add(injection, set(altered), problems)
        dataset.write({name: dataset.good[name] for name in altered})
        together |= injection.change(together)
    dataset.write(together)
    lines = repair_dataset(dataset.root, verify_dataset(dataset.root))
    rendered = sum(int(count) for line in lines for count in re.findall(r"(\d+) of \d+ samples rendered", line))
    identical = dataset.files() == dataset.good and not verify_dataset(dataset.root)
    if not identical:
        # The next round is of its own.
        shutil.rmtree(dataset.root / "train")
        (dataset.root / "train").mkdir()
        dataset.write(dataset.good)
    return identical, rendered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20, help="half of them on the dataset of pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    chance, tally, begin = random.Random(args.seed), Tally(), time.monotonic()
    kinds = [list(KINDS)[k % len(KINDS)] for k in range(args.injections)]
    chance.shuffle(kinds)
    common = "--resolution 32 --quality draft"
    with tempfile.TemporaryDirectory(prefix="damage-") as name:
        datasets = [
            Dataset(Path(name) / "pictures", f"--samples 48 --shard-size 6 {common}"),
            Dataset(Path(name) / "pairs", f"--samples 24 --shard-size 3 {common} --pairs laplace(scale=0.05)"),
        ]
        rounds = []
        for k in range(args.rounds):
            mine = kinds[k :: args.rounds]
            rounds.append((len(mine), *one_round(datasets[k % 2], mine, chance, tally)))
            print(f"round {k + 1}: {rounds[-1][0]} injections, {rounds[-1][2]} samples rendered again", flush=True)
    tally.show()
    for line in tally.missed:
        print("missed,", line)
    identical, total = sum(whole for _, whole, _ in rounds), tally.injected.total()
    found = min(counter.total() for counter in tally.found.values())
    print(f"found {found} of {total}; {identical} of {len(rounds)} repairs identical; {time.monotonic() - begin:.0f} s")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {"injections": total, "rounds": args.rounds, "seed": args.seed}
        counts = {how: dict(counter) for how, counter in tally.found.items()}
        of = {"injected": dict(tally.injected), **counts, "named": dict(tally.named), "missed": tally.missed}
        repairs = [{"injections": n, "identical": whole, "rendered": rendered} for n, whole, rendered in rounds]
        args.out.write_text(json.dumps({**settings, **of, "repairs": repairs}, indent=1) + "\n")
    sys.exit(found < total or identical < len(rounds))


if __name__ == "__main__":
    main()

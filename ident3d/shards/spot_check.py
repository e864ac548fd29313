"""`ident3d verify --sample`: what is cheap of a whole dataset, some shards in full, and how sure one may be then."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from ident3d.checks import whole
from ident3d.shards.manifest import read_manifest
from ident3d.shards.verify import Listed, Problem, SplitCheck, other_sums, progress_bar, scene_problems

__all__ = ["SampleReport", "chosen_shards", "verify_sample"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class SampleReport:
    """What checking some shards found, and how far it goes.

    Attributes:
        problems: what is wrong.
        shards: how many the dataset has.
        absent: how many of them are missing or of another size.
        chosen: how many of the others were read in full.
        damaged: how many of those are damaged.
        seed: that they were chosen by.
        quick: whether their pictures were not decoded.
        unread: files whose checksum was not taken.
    """

    problems: list[Problem]
    shards: int
    absent: int
    chosen: int
    damaged: int
    seed: int
    quick: bool
    unread: tuple[str, ...]

    @property
    def fewer_than(self) -> int:
        """With 95% confidence fewer shards than this are damaged, of those that are there in their size.

        The least D for which drawing `chosen` of them without replacement would show no more than `damaged` damaged
        ones with a probability below 5%, were there D (hypergeometric, exact).
        """
        return _least_refuted(self.shards - self.absent, self.chosen, self.damaged)

    def lines(self) -> list[str]:
        """What was checked, what was not, and how sure one may be, in words."""
        there = self.shards - self.absent
        pictures = "" if self.quick else ", every sample"
        lines = [
            f"checked: scene; names and sizes of all {self.shards:,} shards; of {self.chosen:,} shards, chosen by seed "
            f"{self.seed}, every byte (sha256){pictures}, and their rows of the index and the latents"
        ]
        hidden = f"what {there - self.chosen:,} shards hold; " if self.chosen < there else ""
        lines.append(f"not checked: {hidden}sha256 of {', '.join(self.unread)}")
        if 0 < self.chosen < there:
            damaged = f"{self.damaged:,} of the {self.chosen:,} are damaged; " if self.damaged else ""
            most = self.fewer_than
            lines.append(
                f"{damaged}with {CONFIDENCE:.0%} confidence fewer than {most:,} of {there:,} shards "
                f"({100 * most / there:.2g}%) are damaged (exact, for a choice without replacement)"
            )
        return lines


def verify_sample(root: Path, count: int, seed: int = 0, *, quick: bool = False, quiet: bool = True) -> SampleReport:
    """Check what is cheap of a whole dataset, and some shards of it in full.

    All shards are looked up in listings of the folders, by name and size. Those chosen are read: their checksum, every
    sample, and whether latents.npy and index.npy hold of them what they do. The arrays' own checksums are not taken.

    Args:
        root: the dataset's folder.
        count: how many shards to read, 1 or more; all where there are no more.
        seed: that they are chosen by; another one chooses others.
        quick: do not decode their pictures.
        quiet: as for `verify_dataset`.

    Raises:
        SpecError: a count or a seed out of range.
        DatasetError: as for `verify_dataset`.
    """
    count, seed = whole("sample", count, 1), whole("seed", seed, 0)
    manifest = read_manifest(root)
    problems = scene_problems(root, manifest)
    sizes = [len(split.shards) for split in manifest.splits.values()]
    chosen, total = chosen_shards(sum(sizes), count, seed), sum(sizes)
    unread: list[str] = []
    listed, first, absent, read, damaged = Listed(), 0, 0, 0, 0
    with progress_bar(len(chosen), quiet) as bar:
        for (name, split), size in zip(manifest.splits.items(), sizes, strict=True):
            check = SplitCheck(root, manifest, name, quick=quick, sampled=True)
            problems += check.file_problems()
            problems += check.left_over()
            wrong = dict(check.wrong_sizes())
            absent += len(wrong)
            mine = [k - first for k in chosen if first <= k < first + size]
            problems += [wrong[number] for number in sorted(wrong.keys() - mine)]
            for number, found in zip(mine, check.shards(mine), strict=True):
                bar.update()
                problems += listed.shortened(found)
                if number not in wrong:
                    read += 1
                    damaged += any(p.shard == number for p in found)
            first += size
            unread += [f"{name}/{file}" for file in other_sums(split)]
    return SampleReport(problems, total, absent, read, damaged, seed, quick, tuple(unread))


def chosen_shards(total: int, count: int, seed: int) -> list[int]:
    """The shards that `verify_sample` reads, in order, numbered through all splits.

    A greater count adds to those of a smaller one.

    Args:
        total: how many there are.
        count: how many to choose.
        seed: what the choice is made by.
    """
    generator, moved, chosen = random.Random(seed), dict[int, int](), []
    for i in range(min(count, total)):  # the start of a shuffle by Fisher and Yates, which holds what it moved alone
        j = generator.randrange(i, total)
        chosen.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return sorted(chosen)


def _least_refuted(shards: int, chosen: int, damaged: int) -> int:
    """The least number of damaged shards that would show more than `damaged` among the chosen in 95% of all choices."""

    def ways(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    def chance(bad: int) -> float:
        """Of no more than `damaged` among the chosen, were `bad` damaged in all."""
        counts = range(max(0, chosen - (shards - bad)), min(damaged, bad) + 1)
        terms = (ways(bad, k) + ways(shards - bad, chosen - k) - ways(shards, chosen) for k in counts)
        return math.fsum(map(math.exp, terms))

    low, high = damaged, shards - (chosen - damaged) + 1  # at `high` more must show
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if chance(middle) < 1 - CONFIDENCE else (middle, high)
    return high

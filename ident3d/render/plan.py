"""A render plan: which samples, in which shards, drawn how, rendered how. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ident3d.errors import SpecError
from ident3d.render.quality import RenderSettings
from ident3d.shards.manifest import shard_name
from ident3d.shards.workfolder import plan_differences

__all__ = ["MAX_RESOLUTION", "SPLITS", "RenderPlan", "ShardJob", "auto_shard_size", "sidecar_name"]

SPLITS = ("train", "val", "test")
MAX_SAMPLES = 10**9  # a key has nine digits
MIN_RESOLUTION, MAX_RESOLUTION = 8, 4096
MAX_SHARD = 100_000  # a shard's index and latents are held in memory by its worker


def auto_shard_size(samples: int) -> int:
    """Samples a shard where the user names none: 1,000, fewer in a small split so that all workers get some."""
    return min(1000, max(4, -(-samples // 16)))


@dataclass(frozen=True)
class RenderPlan:
    """All that the bytes of one split depend on; two plans that are equal make equal files.

    Attributes:
        scene: the scene's name.
        scene_digest: sha256 of spec and mesh.
        split: train, val or test.
        samples: pictures in all, 1 to 10^9.
        seed: 0 or more.
        latents: `drawn`, or the sha256 of the user's array.
        resolution: the pictures' side in pixels, 8 to 4096.
        quality: the name of the settings.
        settings: what that name stood for.
        shard_size: samples a shard.
        device: what renders: CPU, OPTIX, CUDA, HIP, METAL or ONEAPI.
        blender: Blender's version.
        pairs: the conditional that each sample's z~ is drawn from, or empty for single pictures.
    """

    scene: str
    scene_digest: str
    split: str
    samples: int
    seed: int
    latents: str
    resolution: int
    quality: str
    settings: RenderSettings
    shard_size: int
    device: str
    blender: str
    pairs: str = ""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise SpecError(f"split {self.split!r}: expected one of {', '.join(SPLITS)}")
        if self.seed < 0:
            raise SpecError(f"seed = {self.seed}: expected 0 or more")
        limits = [
            ("samples", self.samples, 1, MAX_SAMPLES),
            ("resolution", self.resolution, MIN_RESOLUTION, MAX_RESOLUTION),
            ("shard size", self.shard_size, 1, MAX_SHARD),
        ]
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise SpecError(f"{name} = {value}: expected {low:,} to {high:,}")

    @property
    def shards(self) -> int:
        """How many shards the split has."""
        return -(-self.samples // self.shard_size)

    def bounds(self, shard: int) -> tuple[int, int]:
        """The first sample of a shard, and one past its last."""
        return shard * self.shard_size, min(self.samples, (shard + 1) * self.shard_size)

    def differences(self, other: RenderPlan, only: tuple[str, ...] | None = None) -> list[str]:
        """One line a field in which `other` (what is asked now) differs from this plan (what is there)."""
        return plan_differences(self, other, only)


def sidecar_name(shard: str) -> str:
    """The file name of the summary of a shard, e.g. `train-000003.json`."""
    return shard.replace(".tar", ".json")


@dataclass(frozen=True)
class ShardJob:
    """What a worker is told to render one shard: plain data, complete in itself.

    Attributes:
        shard: its number.
        path: its final name.
        start: the index of its first sample.
        stop: one past its last.
        latents: a .npy file of the whole split's latents, (N, 10).
        split: the split's name, and
        seed: the seed: what the Cycles seeds are drawn from.
        sidecar: where the finished shard's summary goes, as JSON.
        salvage: a damaged copy of the shard whose good samples are to be kept, or empty.
        pair_latents: the same for the positives, or empty where samples hold no pair.
        skip: indices of samples that Blender crashed on; the others are stored, the shard stays unfinished.
    """

    shard: int
    path: str
    start: int
    stop: int
    latents: str
    split: str
    seed: int
    sidecar: str
    salvage: str = ""
    pair_latents: str = ""
    skip: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", tuple(self.skip))  # JSON has lists

    @classmethod
    def of(cls, plan: RenderPlan, shard: int, folder: Path, work: Path) -> ShardJob:
        """The job of one shard of a plan, written into `folder`, with latents and sidecar in `work`."""
        start, stop = plan.bounds(shard)
        name = shard_name(plan.split, shard)
        sidecar = work / sidecar_name(name)
        return cls(
            shard=shard,
            path=str(folder / name),
            start=start,
            stop=stop,
            latents=str(work / "latents.npy"),
            split=plan.split,
            seed=plan.seed,
            sidecar=str(sidecar),
            pair_latents=str(work / "pair.latents.npy") if plan.pairs else "",
        )

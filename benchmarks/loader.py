"""Batches beside the plain way: python benchmarks/loader.py [DATASET].

The plain way is one PNG file a picture, `PIL.Image.open`, `ToTensor`, `Normalize`, and a DataLoader. The pictures of
DATASET, or 96 of 224 px that are rendered first, are repeated up to `--samples`, in shards and in files alike, so that
all ways read as many different bytes. All have `--workers` workers: processes of DataLoader, threads of `data.loader`.
All give batches in random order, which are dropped. They take turns; ratios are taken round by round. On a machine
that others use too, the processors' time a picture tells more than the pictures a second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

import torch
from fabricated import fabricate
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from ident3d import Ident3D, RenderOptions, render_dataset
from ident3d.codecs import codec_name, decode, encode_webp


class Files(Dataset[tuple[Any, Any]]):
    """A PNG file a picture, as torchvision's ImageFolder reads them."""

    def __init__(self, folder: Path, latents: Any, transform: Callable[[Any], Any]) -> None:
        self.paths, self.latents, self.transform = sorted(folder.glob("*.png")), latents, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        with open(self.paths[index], "rb") as file:
            picture = Image.open(file).convert("RGB")
        return self.transform(picture), self.latents[index]


@dataclass(frozen=True)
class Speed:
    """Of one way in one round: pictures a second, and microseconds of all processors' time a picture."""

    pictures_a_second: float
    processor_us: float


def measure(batches: Iterable[Any], least_s: float) -> Speed:
    """Whole epochs, until so many seconds are over. Starting processes is not timed, starting threads is."""
    used, count = processor_s(), 0
    iterator, began, first = iter(batches), time.perf_counter(), 0
    if isinstance(batches, DataLoader):
        first = len(next(iterator)[0])
        began = time.perf_counter()
    while True:
        count += sum(len(batch[0]) for batch in iterator)
        if (seconds := time.perf_counter() - began) >= least_s or first:
            break
        iterator = iter(batches)
    del iterator  # and with it the processes, whose time is known when they have ended
    return Speed(count / seconds, 1e6 * (processor_s() - used) / (first + count))


def processor_s() -> float:
    """Processors' time that this process has taken, and those that it started and that have ended."""
    return sum(sum(getrusage(who)[:2]) for who in (RUSAGE_SELF, RUSAGE_CHILDREN))


def ways(args: argparse.Namespace, root: Path, webp: Path, folder: Path) -> dict[str, Iterable[Any]]:
    """What is compared, by name; the plain way first."""
    plain = Ident3D(root)
    normalize = transforms.Normalize(plain.mean, plain.std)
    options: dict[str, Any] = {"batch_size": args.batch_size, "num_workers": args.workers, "shuffle": True}
    latents = torch.from_numpy(plain.latents)
    found: dict[str, Iterable[Any]] = {
        "plain: PNG files, ToTensor, Normalize": DataLoader(
            Files(folder, latents, transforms.Compose([transforms.ToTensor(), normalize])), **options
        ),
        "plain, but uint8 (PILToTensor)": DataLoader(Files(folder, latents, transforms.PILToTensor()), **options),
    }
    kinds = [("PNG shards", root, "none"), ("WebP shards", webp, "none")]
    kinds += [("cache on disk", root, "disk"), ("cache in RAM", root, "ram")]
    for name, path, cache in kinds:
        for out, normalized in (("uint8", False), ("float, normalised", True)):
            data = Ident3D(path, cache=cache, normalize=normalized)
            found[f"{name}: {out}"] = data.loader(args.batch_size, threads=args.workers)
    for out, normalized in (("uint8", False), ("float", True)):
        data = Ident3D(root, cache="disk", normalize=normalized)
        found[f"cache on disk, by DataLoader: {out}"] = DataLoader(data, **options)
    return found


def show(rounds: dict[str, list[Speed]]) -> None:
    """Print a table: medians, and ratios to the plain way of the same round."""
    plain = next(iter(rounds.values()))
    print(f"{'':42s} pictures/s   x plain (range)           CPU us   x plain")
    for name, speeds in rounds.items():
        fast = [a.pictures_a_second / b.pictures_a_second for a, b in zip(speeds, plain, strict=True)]
        cheap = [b.processor_us / a.processor_us for a, b in zip(speeds, plain, strict=True)]
        pictures, processor = (median(getattr(s, f.name) for s in speeds) for f in fields(Speed))
        spread = f"({min(fast):.1f} to {max(fast):.1f})"
        print(f"{name:42s} {pictures:10,.0f} {median(fast):9.1f} {spread:16s} {processor:8,.0f} {median(cheap):9.1f}")


def main() -> None:
    """Print pictures a second of each way, and the ratio to the plain way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", nargs="?", type=Path)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way of ours in a round, at least")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if args.dataset is None:
            args.dataset = work / "rendered"
            render_dataset(RenderOptions(args.dataset, 96, resolution=224))
        data = Ident3D(args.dataset)
        pictures = [data.read(i) for i in range(len(data))]
        root = fabricate(work / "data", pictures, args.samples, 256, data.resolution)
        (work / "files").mkdir()
        for i in range(args.samples):
            (work / "files" / f"{i:06d}.png").write_bytes(pictures[i % len(pictures)])
        webps = [encode_webp(decode(picture)) for picture in pictures]
        webp = fabricate(work / "webp", webps, args.samples, 256, data.resolution, "webp")
        compared = ways(args, root, webp, work / "files")
        rounds: dict[str, list[Speed]] = {name: [] for name in compared}
        for _ in range(args.rounds):
            for name, batches in compared.items():
                rounds[name].append(measure(batches, args.seconds))
    print(
        f"{data.resolution} px, {args.samples:,} samples of {len(pictures)} pictures, batches of {args.batch_size}, "
        f"{args.workers} workers, {codec_name()}, medians of {args.rounds} rounds"
    )
    show(rounds)


if __name__ == "__main__":
    main()

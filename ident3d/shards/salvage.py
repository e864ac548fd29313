"""What can be kept of a damaged shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ident3d.shards.summary import EXTENSIONS, BadSample, check_sample, extensions_of, map_file
from ident3d.shards.tar import BLOCK, Sample, key_of, scan_samples

__all__ = ["find_samples", "good_pictures"]


def find_samples(
    data: memoryview, start: int, count: int, extensions: tuple[str, ...] = EXTENSIONS
) -> dict[int, Sample]:
    """The whole samples of an archive by their place (0 is sample `start`), however much lies broken between them.

    Headers stand on block boundaries, so after damage the search goes on at the next block that begins with the name
    of a sample that belongs in the shard.
    """
    names = {f"{key_of(start + i)}.{extensions[0]}\0".encode(): i for i in range(count)}
    width = len(next(iter(names))) if names else 0
    found: dict[int, Sample] = {}
    at = 0
    while at + BLOCK <= len(data):
        place = names.get(bytes(data[at : at + width]))
        sample = next(scan_samples(data[at:], extensions), None) if place is not None else None
        if sample is None or place is None:
            at += BLOCK
            continue
        found.setdefault(place, sample.moved(at))
        at += sample.end
    return found


def good_pictures(
    path: Path, start: int, latents: NDArray[np.float32], resolution: int
) -> dict[int, tuple[bytes, ...]]:
    """The encoded pictures of the samples of a damaged shard that are still what they must be, by their place in it."""
    good: dict[int, tuple[bytes, ...]] = {}
    extensions = extensions_of(latents)
    with map_file(path) as data:
        for place, sample in find_samples(data, start, len(latents), extensions).items():
            try:
                check_sample(data, sample, start + place, latents[place], resolution)
            except BadSample:
                continue
            pictures = [sample.members[extension] for extension in extensions[::2]]
            good[place] = tuple(bytes(data[m.offset : m.offset + m.size]) for m in pictures)
    return good

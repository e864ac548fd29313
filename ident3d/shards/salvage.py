"""What can be kept of a damaged shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ident3d.shards.summary import EXTENSIONS, BadSample, check_sample, map_file
from ident3d.shards.tar import BLOCK, Sample, key_of, scan_samples

__all__ = ["find_samples", "good_pictures"]


def find_samples(data: memoryview, start: int, count: int) -> dict[int, Sample]:
    """The whole samples of an archive by their place (0 is sample `start`), however much lies broken between them.

    Headers stand on block boundaries, so after damage the search goes on at the next block that begins with the name
    of a sample that belongs in the shard.
    """
    names = {f"{key_of(start + i)}.{EXTENSIONS[0]}\0".encode(): i for i in range(count)}
    width = len(next(iter(names))) if names else 0
    found: dict[int, Sample] = {}
    at = 0
    while at + BLOCK <= len(data):
        place = names.get(bytes(data[at : at + width]))
        sample = next(scan_samples(data[at:], EXTENSIONS), None) if place is not None else None
        if sample is None or place is None:
            at += BLOCK
            continue
        found.setdefault(place, sample.moved(at))
        at += sample.end
    return found


def good_pictures(path: Path, start: int, latents: NDArray[np.float32], resolution: int) -> dict[int, bytes]:
    """The encoded pictures of a damaged shard that are still what they must be, by their place in it."""
    good: dict[int, bytes] = {}
    with map_file(path) as data:
        for place, sample in find_samples(data, start, len(latents)).items():
            try:
                check_sample(data, sample, start + place, latents[place], resolution)
            except BadSample:
                continue
            picture = sample.members[EXTENSIONS[0]]
            good[place] = bytes(data[picture.offset : picture.offset + picture.size])
    return good

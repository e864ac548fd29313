"""Writing one shard, sample by sample, so that a kill at any moment costs the sample in flight and no more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ident3d.files import npy_bytes, sync_folder
from ident3d.shards.salvage import good_pictures
from ident3d.shards.summary import BadSample, check_sample, extensions_of, map_file, sample_bytes
from ident3d.shards.tar import BLOCK, END, scan_samples

__all__ = ["GapWriter", "ShardWriter", "part_path", "rest_path", "valid_prefix"]


def part_path(path: Path) -> Path:
    """Where a shard grows until it is whole: hidden, and not named `*.tar`, so no reader takes it for a shard."""
    return path.with_name(f".{path.name}.part")


def rest_path(path: Path) -> Path:
    """Where the samples of a shard wait that come after one which could not be rendered."""
    return path.with_name(f".{path.name}.rest")


def valid_prefix(
    path: Path, start: int, latents: NDArray[np.float32], resolution: int, members: tuple[str, ...] | None = None
) -> tuple[int, int]:
    """How much of a partly written shard can be kept: (samples, bytes). (0, 0) where the file is absent."""
    count = end = 0
    if not path.exists():
        return count, end
    with map_file(path) as data:
        for i, sample in enumerate(scan_samples(data, members or extensions_of(latents))):
            if i >= len(latents):
                break
            try:
                check_sample(data, sample, start + i, latents[i], resolution)
            except BadSample:
                break
            count, end = i + 1, sample.end
    return count, end


class ShardWriter:
    """Appends samples to a shard that appears under its final name only when whole.

    Opening goes on where an earlier writer of the same shard stopped: whole and correct samples are kept, the rest is
    cut off. Each sample is one write to the operating system, so a killed process leaves no more than one torn sample.

    Args:
        path: the final name, `.../train-000000.tar`.
        start: the index of its first sample in the split.
        latents: the latents of its samples, shape (n, d), or (n, 2, d) for pairs.
        resolution: the pictures' side in pixels.
        members: the extensions of a sample's members; by default those of rendered samples.

    Attributes:
        done: how many samples are in place.
    """

    def __init__(
        self,
        path: Path,
        start: int,
        latents: NDArray[np.float32],
        resolution: int,
        members: tuple[str, ...] | None = None,
    ) -> None:
        self.path = path
        self.start = start
        self.latents = latents
        self.members = members or extensions_of(latents)
        self.part = part_path(path)
        self.done, end = valid_prefix(self.part, start, latents, resolution, self.members)
        self._fd = os.open(self.part, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)

    def append(self, *pictures: bytes, extras: Sequence[bytes] = ()) -> None:
        """Append the next sample's encoded picture, or for a pair its two, with their latents, and then its extras."""
        rows = np.atleast_2d(self.latents[self.done])
        contents = [part for picture, row in zip(pictures, rows, strict=True) for part in (picture, npy_bytes(row))]
        _write_all(self._fd, sample_bytes(self.start + self.done, [*contents, *extras], self.members))
        self.done += 1

    def finish(self) -> None:
        """End the archive and give it its final name."""
        if self.done != len(self.latents):
            raise ValueError(f"{self.path.name} holds {self.done} samples of {len(self.latents)}")
        _write_all(self._fd, END)
        os.fsync(self._fd)
        self.close()
        os.replace(self.part, self.path)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Release the file; what is in it stays for the next writer."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class GapWriter:
    """A `ShardWriter` for samples of which some may be missing.

    What follows a missing sample cannot be appended to the shard, whose samples stand in order. It goes into a file
    beside it (`rest_path`), and a later writer takes it from there.

    Args:
        path: the final name.
        start: the index of its first sample in the split.
        latents: the latents of its samples, shape (n, d), or (n, 2, d) for pairs.
        resolution: the pictures' side in pixels.
        salvage: a damaged copy of the shard whose good samples are to be kept, or empty.

    Attributes:
        writer: of the shard.
        kept: encoded pictures that are there, by place, and need not be rendered.
    """

    def __init__(
        self, path: Path, start: int, latents: NDArray[np.float32], resolution: int, salvage: str = ""
    ) -> None:
        self.latents, self.start, self.rest = latents, start, rest_path(path)
        self.waiting = good_pictures(self.rest, start, latents, resolution) if self.rest.is_file() else {}
        self.kept = {**(good_pictures(Path(salvage), start, latents, resolution) if salvage else {}), **self.waiting}
        self.writer = ShardWriter(path, start, latents, resolution)
        self.missing: list[int] = []
        self._fd = -1

    def leave_out(self, place: int) -> None:
        """The sample of this place is missing."""
        self.missing.append(place)

    def append(self, place: int, pictures: Sequence[bytes]) -> None:
        """The next sample that is not missing: its encoded picture, or for a pair its two."""
        if not self.missing:
            self.writer.append(*pictures)
        elif place not in self.waiting:
            self._open()
            rows = np.atleast_2d(self.latents[place])
            contents = [part for picture, row in zip(pictures, rows, strict=True) for part in (picture, npy_bytes(row))]
            _write_all(self._fd, sample_bytes(self.start + place, contents))

    def finish(self) -> bool:
        """End the shard if it is whole. Otherwise what there is of it waits, and the answer is False."""
        if self.missing:
            if self._fd >= 0:
                os.fsync(self._fd)
            return False
        self.writer.finish()
        self.rest.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Release the files; what is in them stays for the next writer."""
        self.writer.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        if self._fd < 0:
            self._fd = os.open(self.rest, os.O_WRONLY | os.O_CREAT, 0o644)
            # Samples are found at whole blocks; a torn one may end between two.
            end = os.fstat(self._fd).st_size // BLOCK * BLOCK
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, end, os.SEEK_SET)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

"""From samples to shards: one split, going on where an earlier call stopped."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ident3d.codecs import decode
from ident3d.conversion.encoding import BadPicture, Encoded, encode
from ident3d.conversion.plan import ConversionPlan
from ident3d.conversion.sources import Source
from ident3d.conversion.workers import Stream, Workers
from ident3d.errors import DatasetError
from ident3d.files import write_atomic, write_json
from ident3d.schema import to_plain
from ident3d.shards.manifest import shard_name
from ident3d.shards.summary import BadSample, ShardSummary, file_sha256, map_file, summarise
from ident3d.shards.tar import BLOCK, Sample, scan_samples
from ident3d.shards.workfolder import trusted_summary
from ident3d.shards.writer import ShardWriter, part_path

__all__ = ["ShardConversion", "Skipped", "converted", "places_before"]


@dataclass(frozen=True)
class Made:
    """A sample's pictures, as they are to be stored, and its members after them."""

    pictures: tuple[Encoded, ...]
    rest: tuple[bytes, ...]


def converted(source: Source, form: str, index: int) -> Made:
    """Sample `index` of a source, checked, in the encoding wanted.

    Raises:
        DatasetError: it cannot be read, or is damaged; the text names its file and number.
    """
    try:
        pictures = tuple(encode(x, form, source.data.resolution) for x in source.stored(index))
        return Made(pictures, tuple(source.rest(index)))
    except BadPicture as error:
        raise DatasetError(f"{source.where(index)}: {error}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"{source.where(index)}: its text is not UTF-8 ({error})") from None


class Skipped:
    """The samples of a source that are left out, on disk as soon as they are known: a line of JSON each.

    Args:
        work: the split's working folder.

    Attributes:
        reasons: what is wrong with each, by its index in the source.
    """

    def __init__(self, work: Path) -> None:
        self.path = path = work / "skipped.jsonl"
        self.reasons: dict[int, str] = {}
        if path.is_file():
            for line in path.read_bytes().splitlines():
                try:
                    index, reason = json.loads(line)
                except ValueError:  # torn by a kill, so the last one
                    break
                self.reasons[index] = reason
            write_atomic(path, b"".join(map(_line, self.reasons.items())))
        self._sorted = sorted(self.reasons)

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, index: int, reason: str) -> None:
        """Leave a sample out."""
        with open(self.path, "ab") as file:
            file.write(_line((index, reason)))
            file.flush()
            os.fsync(file.fileno())
        self.reasons[index] = reason
        bisect.insort(self._sorted, index)

    @property
    def indices(self) -> tuple[int, ...]:
        """Their indices in the source, in order."""
        return tuple(self._sorted)

    def sources(self, start: int, stop: int) -> NDArray[np.int64]:
        """The indices in the source of samples start to stop - 1 of those that are kept."""
        return places_before(self._sorted, np.arange(start, stop, dtype=np.int64))


def places_before(left_out: Sequence[int], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indices that samples had before others were left out.

    Args:
        left_out: those others, by the indices wanted, in order.
        kept: the samples, by their indices now.
    """
    # The m-th one left out, d, stood before the sample that is now d - m.
    before = np.array(left_out, np.int64) - np.arange(len(left_out))
    return kept + np.searchsorted(before, kept, side="right")


def _line(item: tuple[int, str]) -> bytes:
    return json.dumps(item).encode() + b"\n"


class ShardConversion:
    """Converts the samples of one split, a shard after the other.

    A shard is begun only when the one before it is whole, so that a damaged sample can be left out when it is met: it
    moves those behind it, which are not written yet. Pictures are read and encoded ahead, some dozens at most.

    Args:
        source: the split.
        plan: the conversion's.
        target: the split's folder in the result, which is there.
        work: where summaries of finished shards and the list of samples left out are kept.
        workers: threads that read and encode ahead.
        skip: leave damaged samples out, in place of stopping at them.

    Attributes:
        skipped: what was left out.
        done: samples of the source that are dealt with.
    """

    def __init__(
        self,
        source: Source,
        plan: ConversionPlan,
        target: Path,
        work: Path,
        workers: Workers,
        *,
        skip: bool,
    ) -> None:
        self.source, self.plan, self.target, self.work = source, plan, target, work
        self.workers, self.skip = workers, skip
        self.members = source.members(plan.format)
        self.skipped = Skipped(work)
        self.done = 0
        self._made: Stream[Made] | None = None
        self._next = 0

    @property
    def samples(self) -> int:
        """How many samples the result holds, as far as is known."""
        return self.plan.samples - len(self.skipped)

    def path(self, shard: int) -> Path:
        """A shard's final name."""
        return self.target / shard_name(self.plan.split, shard)

    def sidecar(self, shard: int) -> Path:
        """Where its summary is kept."""
        return self.work / self.path(shard).with_suffix(".json").name

    def size(self, index: int) -> int:
        """The bytes that a sample takes.

        Raises:
            DatasetError: it is damaged.
        """
        made = converted(self.source, self.source.form(self.plan.format), index)
        data = sum(len(picture.data) for picture in made.pictures) + sum(map(len, made.rest))
        return data + len(self.members) * 2 * BLOCK

    def run(self, bar: tqdm[Any]) -> None:
        """Convert all that is not there yet.

        Raises:
            DatasetError: a damaged sample (unless they are left out), a source that has changed since.
            OSError: the disk is full.
        """
        if self.skipped.indices and not self.skip:
            first = self.skipped.indices[0]
            raise DatasetError(
                f"{self.target.parent}: an earlier call left damaged samples out ({len(self.skipped):,}), the first: "
                f"{self.skipped.reasons[first]}; go on with on_error='skip', or choose another folder"
            )
        shard = 0
        try:
            while (start := shard * self.plan.shard_size) < self.samples:
                if not self.finished(shard, start):
                    self.convert(shard, start, bar)
                    if start == self.samples:  # all that belonged in it was damaged
                        break
                # The last shard ends where the source does, with what was left out at its end.
                stop = min(self.samples, start + self.plan.shard_size)
                self.done = self.plan.samples if stop == self.samples else int(self.skipped.sources(stop, stop + 1)[0])
                bar.update(self.done - bar.n)
                shard += 1
        finally:
            self.stop_reading()
        if not shard:
            raise DatasetError(f"{self.source.data.root}: every sample of split {self.plan.split} is damaged")
        self.remove_from(shard)

    def finished(self, shard: int, start: int) -> bool:
        """Whether a shard is in place, and of this source.

        Raises:
            DatasetError: it holds other pictures than the source does now.
        """
        places = self.skipped.sources(start, min(self.samples, start + self.plan.shard_size))
        latents = self.source.latents(places)
        path, side = self.path(shard), self.plan.resolution
        found = trusted_summary(path, self.sidecar(shard), start, latents, side, self.members)
        if found is None:
            self.sidecar(shard).unlink(missing_ok=True)
            return False
        offset, size = found.offsets[0][0]
        with map_file(path) as data:
            self.check_same(bytes(data[offset : offset + size]), int(places[0]), path)
        return True

    def check_same(self, stored: bytes, index: int, path: Path) -> None:
        """Refuse to add to what was made of another source: the arrays' checksum tells nothing of the pictures.

        Raises:
            DatasetError: the picture that is stored is not the source's.
        """
        try:
            there = converted(self.source, self.source.form(self.plan.format), index).pictures[0].data
        except DatasetError:
            return  # damaged since; what was made of it stays
        if there != stored and not np.array_equal(decode(there), decode(stored)):
            raise DatasetError(
                f"{path}: holds another picture than {self.source.data.where(index)}, which has changed since; "
                "convert into another folder"
            )

    def convert(self, shard: int, start: int, bar: tqdm[Any]) -> None:
        """Write one shard."""
        stop = min(self.samples, start + self.plan.shard_size)
        places = self.skipped.sources(start, stop)
        path, side = self.path(shard), self.plan.resolution
        writer = ShardWriter(path, start, self.source.latents(places), side, self.members)
        fresh, sums = not writer.done, np.zeros((2, 3), np.int64)
        if not fresh:
            self.check_part(writer, int(places[0]))
        try:
            while writer.done < len(places):
                index, made = self.take(int(places[writer.done]))
                if made is None:
                    self.remove_from(shard + 1)
                    places = self.skipped.sources(start, min(self.samples, start + self.plan.shard_size))
                    writer.latents = self.source.latents(places)
                    continue
                writer.append(*(picture.data for picture in made.pictures), extras=made.rest)
                for picture in made.pictures:
                    sums += np.array([picture.sums, picture.squares])
                self.done = index + 1
                bar.update(self.done - bar.n)
            if writer.done:
                writer.finish()
        finally:
            writer.close()
        if not writer.done:
            writer.part.unlink()
            return
        summary = self.summary(path, start, writer.latents, sums if fresh else None)
        write_json(self.sidecar(shard), to_plain(summary))

    def check_part(self, writer: ShardWriter, index: int) -> None:
        """As `check_same`, of the first sample of a shard in progress."""
        with map_file(writer.part) as data:
            picture = _first(data, self.members).members[self.members[0]]
            content = bytes(data[picture.offset : picture.offset + picture.size])
        try:
            self.check_same(content, index, writer.part)
        except DatasetError:
            writer.close()
            raise

    def summary(
        self, path: Path, start: int, latents: NDArray[np.float32], sums: NDArray[np.int64] | None
    ) -> ShardSummary:
        """What a shard holds: with the sums that were taken on the way, without decoding it once more."""
        if sums is None:
            try:
                return summarise(path, start, latents, self.plan.resolution, self.members)
            except BadSample as error:
                raise DatasetError(f"{path}: {error}; delete it, then run the same command to go on") from None
        with map_file(path) as data:
            samples = list(scan_samples(data, self.members))
            size = len(data)
        if len(samples) != len(latents):
            raise DatasetError(f"{path}: holds {len(samples)} whole samples of {len(latents)}; run the command again")
        offsets = tuple(tuple((m.offset, m.size) for m in s.members.values()) for s in samples)
        (r, g, b), (r2, g2, b2) = sums.tolist()
        return ShardSummary(len(samples), size, file_sha256(path), offsets, (r, g, b), (r2, g2, b2))

    def take(self, index: int) -> tuple[int, Made | None]:
        """The source's sample `index`; None where it is damaged and now left out.

        Raises:
            DatasetError: it is damaged, and none are left out.
        """
        if self._made is None or self._next != index:
            self.stop_reading()
            form, left_out = self.source.form(self.plan.format), frozenset(self.skipped.reasons)
            wanted = (i for i in range(index, self.plan.samples) if i not in left_out)
            self._made = self.workers.in_order(lambda i: converted(self.source, form, i), wanted)
        _, future = next(self._made)
        try:
            made = future.result()
        except DatasetError as error:
            self.leave_out(index, error)
            made = None
        self._next = self.following(index)
        return index, made

    def following(self, index: int) -> int:
        """The next sample of the source that is not left out."""
        index += 1
        while index in self.skipped.reasons:
            index += 1
        return index

    def leave_out(self, index: int, error: DatasetError) -> None:
        """Note a damaged sample.

        Raises:
            DatasetError: the error itself where none are to be left out; another where none can be.
        """
        if not self.skip:
            raise DatasetError(
                f"{error}; {self.done:,} samples are done: mend it and run the same command to go on, or leave such "
                "samples out with --on-error skip"
            ) from None
        if self.source.consecutive:
            raise DatasetError(f"{error}; it cannot be left out: its frames are in order of time, neighbours are pairs")
        self.skipped.add(index, str(error))

    def remove_from(self, shard: int) -> None:
        """Remove later shards that an earlier call made: none are right when a sample before them is left out."""
        while any((self.path(shard).exists(), part_path(self.path(shard)).exists(), self.sidecar(shard).exists())):
            for path in (self.path(shard), part_path(self.path(shard)), self.sidecar(shard)):
                path.unlink(missing_ok=True)
            shard += 1

    def stop_reading(self) -> None:
        """Give up what was read ahead."""
        if self._made is not None:
            self._made.close()
            self._made = None


def _first(data: memoryview, members: tuple[str, ...]) -> Sample:
    return next(scan_samples(data, members))

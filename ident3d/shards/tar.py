"""Tar members as bytes, the same bytes every time, and the way back.

WebDataset shards are plain USTAR archives. The standard library's `tarfile` makes and parses the headers; what is
here fixes every field that could differ between two runs (times, owners, modes) and reads a file that may end
anywhere, which is what a killed render leaves behind.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BLOCK", "END", "Member", "Sample", "key_of", "member_bytes", "scan_members", "scan_samples"]

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
"""What ends an archive: two blocks of zeros."""


@dataclass(frozen=True)
class Member:
    """Where one member's data lie in its archive: byte offset and size."""

    name: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        """The offset of the next member's header."""
        return self.offset + -(-self.size // BLOCK) * BLOCK


@dataclass(frozen=True)
class Sample:
    """The members of one key, in file order, by extension (`png`, `latents.npy`)."""

    key: str
    members: dict[str, Member]

    @property
    def start(self) -> int:
        """The offset of the first member's header."""
        return min(m.offset for m in self.members.values()) - BLOCK

    @property
    def end(self) -> int:
        """The offset where the next sample begins."""
        return max(m.end for m in self.members.values())

    def moved(self, by: int) -> Sample:
        """The same sample with all offsets greater by so many bytes."""
        return Sample(self.key, {e: Member(m.name, m.offset + by, m.size) for e, m in self.members.items()})


def key_of(index: int) -> str:
    """The key of sample `index` of a split: nine digits, no dots."""
    return f"{index:09d}"


def member_bytes(name: str, data: bytes) -> bytes:
    """One member: header, data, padding. Depends on the name and the data alone."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o644, 0
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)


def scan_members(data: bytes | memoryview) -> Iterator[Member]:
    """The whole members of an archive from its start, up to its end marker or its first byte that makes no sense."""
    at = 0
    while at + BLOCK <= len(data):
        try:
            info = tarfile.TarInfo.frombuf(bytes(data[at : at + BLOCK]), "ascii", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError):
            return
        member = Member(info.name, at + BLOCK, info.size)
        if member.end > len(data) or not info.isreg():
            return
        yield member
        at = member.end


def scan_samples(data: bytes | memoryview, extensions: tuple[str, ...]) -> Iterator[Sample]:
    """The whole samples of an archive from its start: consecutive members `KEY.EXT`, one an extension, in order."""
    pending: list[Member] = []
    for member in scan_members(data):
        pending.append(member)
        key = re.split(r"\.", pending[0].name, maxsplit=1)[0]
        if member.name != f"{key}.{extensions[len(pending) - 1]}":
            return
        if len(pending) == len(extensions):
            yield Sample(key, dict(zip(extensions, pending, strict=True)))
            pending = []

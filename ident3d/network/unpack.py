"""Archives unpacked without trust: plain files and folders beneath one folder, whole to the last byte, or an error."""

from __future__ import annotations

import errno
import gzip
import shutil
import tarfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from tqdm import tqdm

from ident3d.errors import DatasetError, DownloadError

__all__ = ["unpack"]

# What lies between two members is headers: a longer stretch is made to fill memory.
HEADERS_AT_MOST = 1 << 16
MEMBERS_AT_MOST = 5_000_000
# A tree that cannot exist: a file where a folder is, a name too long for the disk, ...
IMPOSSIBLE = {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}
REMEDY = "nothing of it is used: remove the archive, then fetch it again, from another mirror if this repeats"


class _Refused(Exception):
    """Why an archive is not unpacked."""


def unpack(archive: Path, folder: Path, *, quiet: bool = True) -> int:
    """Unpack a .tar or .tar.gz; which of them it is, its first bytes say.

    Refused rather than mended are names that are absolute or hold `..`, links of either kind, wherever they lead,
    devices, pipes and sparse files, contents that outgrow the free disk, and archives that are damaged, cut off or
    followed by something: tarfile alone takes a damaged header for the end. Damage within a file of an uncompressed
    archive does not show: a checksum of the archive tells.

    Args:
        archive: the archive.
        folder: there, and empty. After an error it holds what came before; it is the caller's to remove.
        quiet: no progress bar.

    Returns:
        How many files were unpacked.

    Raises:
        DatasetError: an archive that is refused; the text names the member.
        DownloadError: there is no room for it, or it or the folder cannot be read or written.
    """
    if not hasattr(tarfile, "data_filter"):
        raise DownloadError(f"{archive}: unpacking needs Python 3.11.4 or newer, whose tarfile filters what it unpacks")
    job = _Unpacking(archive, folder)
    try:
        return job.run(quiet)
    except _Refused as why:
        raise DatasetError(f"{archive}: {why}; {REMEDY}") from None
    except tarfile.FilterError as error:
        raise DatasetError(f"{archive}: {job.at()}: refused by tarfile: {error}; {REMEDY}") from None
    except (
        tarfile.TarError,
        zlib.error,
        gzip.BadGzipFile,
        EOFError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DatasetError(f"{archive}: {job.at()}: damaged or cut off ({error}); {REMEDY}") from None
    except OSError as error:
        if error.errno in IMPOSSIBLE:
            raise DatasetError(f"{archive}: {job.at()}: {error.strerror} ({error.filename}); {REMEDY}") from None
        where = error.filename or folder
        raise DownloadError(
            f"{where}: {error.strerror or error} while {archive} was unpacked; mend it, then run the same again"
        ) from None


class _Unpacking:
    """One call of `unpack`."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self.archive, self.folder = archive, folder
        self.members = self.files = self.bytes = 0
        self.name = ""

    def at(self) -> str:
        """Where in the archive it is."""
        return f"at member {self.name!r}" if self.name else "at its beginning"

    def run(self, quiet: bool) -> int:
        """Unpack every member, then look at the end."""
        self.free = shutil.disk_usage(self.folder).free
        size = self.archive.stat().st_size
        self.check_room(size)
        bar: tqdm[Any]
        with (
            open(self.archive, "rb") as raw,
            tqdm(
                total=size,
                desc=f"unpacking {self.archive.name}",
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                disable=True if quiet else None,
            ) as bar,
            ExitStack() as stack,
        ):
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = _Forward(stack.enter_context(gzip.GzipFile(fileobj=raw)) if packed else raw)
            end = self.extract(stream, lambda: bar.update(raw.tell() - bar.n))
            self.check_end(stream, end)
        return self.files

    def extract(self, stream: _Forward, tick: Callable[[], object]) -> int:
        """Unpack the members; returns where the last of them ends."""
        end = 0
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:") as tar:
            while (member := tar.next()) is not None:
                cast("Any", tar).members.clear()  # it would keep them all
                self.name = member.name
                self.check(member)
                stream.budget = None
                tar.extract(member, self.folder, filter="data")
                stream.budget = HEADERS_AT_MOST
                end = member.offset_data + (-(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
                self.files += member.isreg()
                tick()
        return end

    def check(self, member: tarfile.TarInfo) -> None:
        """Refuse a member that is no plain file or folder beneath ours, or for which there is no room."""
        self.members += 1
        if self.members > MEMBERS_AT_MOST:
            raise _Refused(f"more than {MEMBERS_AT_MOST:,} members")
        what = f"member {member.name!r} is refused: "
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or "\0" in member.name:
            raise _Refused(f"{what}its name leads out of the folder; expected one beneath it")
        if member.issym() or member.islnk():
            kind = "symbolic" if member.issym() else "hard"
            raise _Refused(f"{what}a {kind} link to {member.linkname!r}; expected plain files and folders")
        if not member.isdir() and (not member.isreg() or member.issparse()):
            kind = "a sparse file" if member.issparse() else "a device" if member.isdev() else "of an unknown kind"
            kind = "a pipe" if member.isfifo() else kind
            raise _Refused(f"{what}{kind}; expected plain files and folders")
        if member.size < 0 or (member.isdir() and member.size) or (member.isreg() and not path.parts):
            raise _Refused(f"{what}{member.size:,} bytes do not fit such a member")
        self.bytes += member.size
        self.check_room(self.bytes)

    def check_room(self, need: int) -> None:
        """Refuse what cannot fit."""
        if need > self.free:
            raise DownloadError(
                f"{self.folder}: {self.archive} unpacks to {need / 1e9:,.2f} GB or more, {self.free / 1e9:,.2f} GB "
                f"were free; make room or name another root"
            )

    def check_end(self, stream: _Forward, end: int) -> None:
        """Refuse an archive that goes on after the last member that tarfile saw, or does not end as archives do."""
        blocks = len(stream.last), stream.at
        if blocks[1] - blocks[0] != end or (stream.last.strip(b"\0") and blocks[0] == tarfile.BLOCKSIZE):
            raise _Refused(f"a damaged header at byte {end:,}, after {self.members:,} members")
        zeros = blocks[0]
        while block := stream.rest():
            if block.strip(b"\0"):
                raise _Refused(f"something follows its end at byte {end:,}, after {self.members:,} members")
            zeros += len(block)
        if zeros < 2 * tarfile.BLOCKSIZE:
            raise _Refused(f"cut off at byte {end + zeros:,}, after {self.members:,} members: it has no end mark")


class _Forward:
    """A stream that tarfile reads forward only, with the last block that it read, and an end to its patience.

    Attributes:
        at: how many bytes have been read.
        last: what the last `read` gave.
        budget: how many bytes may be read before it is set anew; None for any number.
    """

    def __init__(self, source: Any) -> None:
        self.source, self.at, self.last = source, 0, b""
        self.budget: int | None = HEADERS_AT_MOST

    def read(self, size: int) -> bytes:
        """Up to so many bytes."""
        if self.budget is not None:
            if not 0 <= size <= self.budget:
                raise _Refused(f"headers of more than {HEADERS_AT_MOST:,} bytes after byte {self.at:,}")
            self.budget -= size
        return self.rest(size)

    def rest(self, size: int = 1 << 16) -> bytes:
        """`read` without a budget."""
        self.last = self.source.read(size)
        self.at += len(self.last)
        return self.last

    def seek(self, position: int) -> None:
        """Skip to a byte further on."""
        if position < self.at:
            raise _Refused(f"leads back from byte {self.at:,} to byte {position:,}")
        while self.at < position and self.rest(min(position - self.at, 1 << 16)):
            pass

    def tell(self) -> int:
        """`at`."""
        return self.at

from __future__ import annotations

import errno
import gzip
import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ident3d.errors import DatasetError, DownloadError
from ident3d.network import unpack as module
from ident3d.network.unpack import unpack

FILES = {f"set/images/{k}.png": random.Random(k).randbytes(600 * k) for k in range(9)}
Save = Callable[[bytes | bytearray], Path]


def member(name: str, kind: bytes = tarfile.REGTYPE, **more: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    return info


def tar_bytes(*more: tarfile.TarInfo, format: int = tarfile.PAX_FORMAT) -> bytes:
    """FILES, with more members in their middle."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        tar.addfile(member("set", tarfile.DIRTYPE))
        for k, (name, content) in enumerate(FILES.items()):
            if k == 4:
                for info in more:
                    tar.addfile(info, io.BytesIO(bytes(info.size)))
            tar.addfile(member(name, size=len(content)), io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out" / "here").mkdir(parents=True)
    return tmp_path / "out" / "here"


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(content: bytes | bytearray) -> Path:
        (tmp_path / "set.tar").write_bytes(content)
        return tmp_path / "set.tar"

    return write


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("packed", [False, True])
def test_all_comes_out(save: Save, folder: Path, format: int, packed: bool) -> None:
    """Whatever the suffix says. Names over 100 characters and of other letters need a header more."""
    long = "set/" + "ü/" * 10 + "n" * 90 + ".txt"
    plain = tar_bytes(member("./", tarfile.DIRTYPE), member(long, size=3), member("set/odd..name"), format=format)
    assert unpack(save(gzip.compress(plain) if packed else plain), folder) == len(FILES) + 2
    assert tree(folder) == FILES | {long: bytes(3), "set/odd..name": b""}


@pytest.mark.skipif(not shutil.which("tar"), reason="the system has no tar")
@pytest.mark.parametrize("options", [["-cf"], ["-czf"], ["--format=v7", "-cf"], ["--posix", "-cf"], ["-b1", "-cf"]])
def test_what_other_programs_write(tmp_path: Path, folder: Path, options: list[str]) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    subprocess.run(["tar", *options, "a.tar", "./set"], cwd=tmp_path, check=True)
    assert unpack(tmp_path / "a.tar", folder) == len(FILES)
    assert tree(folder) == FILES


def test_modes_and_owners_are_ours(save: Save, folder: Path) -> None:
    unpack(save(tar_bytes(member("run", mode=0o6777, uid=7, gid=7))), folder)
    status = (folder / "run").stat()
    assert status.st_mode & 0o7022 == 0
    assert status.st_uid == os.getuid()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (member("../x"), r"member '../x' is refused: its name leads out"),
        (member("set/../../x"), r"its name leads out"),
        (member("set/images/.."), r"its name leads out"),
        (member("/tmp/ident3d-x"), r"its name leads out"),
        (member("//tmp/ident3d-x"), r"its name leads out"),
        (member("a", tarfile.SYMTYPE, linkname="/etc/passwd"), r"a symbolic link to '/etc/passwd'"),
        (member("a", tarfile.SYMTYPE, linkname=".."), r"a symbolic link to '..'"),
        (member("a", tarfile.SYMTYPE, linkname="set"), r"a symbolic link to 'set'"),
        (member("a", tarfile.LNKTYPE, linkname="/etc/passwd"), r"a hard link to '/etc/passwd'"),
        (member("a", tarfile.LNKTYPE, linkname="set/images/0.png"), r"a hard link to 'set/images/0.png'"),
        (member("a", tarfile.CHRTYPE), r"a device"),
        (member("a", tarfile.BLKTYPE), r"a device"),
        (member("a", tarfile.FIFOTYPE), r"a pipe"),
        (member("a", b"Z"), r"of an unknown kind"),
        (member(""), r"do not fit"),
        (member("."), r"do not fit"),
        (member("set"), r"member 'set': Is a directory"),
        (member("set/images/1.png/x"), r"Not a directory|File exists"),
        (member("n" * 300), r"File name too long"),
        (member("a", mtime=1e300), r"not|range|large|refused|damaged"),
        (
            member("a", pax_headers={"GNU.sparse.major": "0", "GNU.sparse.size": "9", "GNU.sparse.map": "0,1"}),
            r"sparse",
        ),
        (member("a", pax_headers={"comment": "x" * 70_000}), r"headers of more than 65,536 bytes"),
    ],
)
def test_refused(save: Save, folder: Path, bad: tarfile.TarInfo, complaint: str, packed: bool) -> None:
    content = tar_bytes(bad)
    archive = save(gzip.compress(content) if packed else content)
    with pytest.raises(DatasetError, match=complaint) as caught:
        unpack(archive, folder)
    assert str(archive) in str(caught.value)
    assert [path.name for path in folder.parent.iterdir()] == ["here"]
    assert set(tree(folder)) <= set(FILES) | {"a"}


def test_nul_in_a_name(save: Save, folder: Path) -> None:
    bad = member("a", pax_headers={"path": "a\0b"})
    with pytest.raises(DatasetError, match="its name leads out"):
        unpack(save(tar_bytes(bad)), folder)


def test_headers_of_headers_of_headers(save: Save, folder: Path) -> None:
    """tarfile reads them by recursion."""
    name = member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=0).tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(DatasetError, match=r"headers of more than|damaged"):
        unpack(save(name * 2000 + tar_bytes()), folder)


@pytest.mark.parametrize("packed", [False, True])
def test_a_size_below_nothing(save: Save, folder: Path, packed: bool) -> None:
    header = bytearray(member("a").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 11 + b"\x00"  # -256 in base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    content = tar_bytes()[: 2 * 512] + bytes(header) + tar_bytes()
    with pytest.raises(DatasetError):
        unpack(save(gzip.compress(content) if packed else content), folder)


class TestDamaged:
    @pytest.mark.parametrize("packed", [False, True])
    def test_a_header_in_the_middle(self, save: Save, folder: Path, packed: bool) -> None:
        """tarfile takes it for the end, and says nothing."""
        content = bytearray(tar_bytes())
        at = content.index(b"set/images/5.png")
        content[at] ^= 1
        with pytest.raises(DatasetError, match=f"a damaged header at byte {at:,}, after 6 members"):
            unpack(save(gzip.compress(content) if packed else content), folder)

    @pytest.mark.parametrize("packed", [False, True])
    def test_a_header_blanked(self, save: Save, folder: Path, packed: bool) -> None:
        content = bytearray(tar_bytes())
        at = content.index(b"set/images/5.png")
        content[at : at + 512] = bytes(512)
        with pytest.raises(DatasetError, match=f"something follows its end at byte {at:,}, after 6 members"):
            unpack(save(gzip.compress(content) if packed else content), folder)

    def test_cut_off_anywhere(self, tmp_path: Path) -> None:
        content = tar_bytes()
        end = content.index(b"set/images/8.png") + 512 + 4800 + 320
        assert content[end:].strip(b"\0") == b""
        for k, stop in enumerate([*range(0, end, 256), end - 1, end, end + 511, end + 512, end + 1023]):
            (tmp_path / "set.tar").write_bytes(content[:stop])
            (tmp_path / f"{k}").mkdir()
            with pytest.raises(DatasetError, match=r"damaged|cut off"):
                unpack(tmp_path / "set.tar", tmp_path / f"{k}")
        (tmp_path / "set.tar").write_bytes(content[: end + 1024])
        (tmp_path / "whole").mkdir()
        assert unpack(tmp_path / "set.tar", tmp_path / "whole") == len(FILES)

    def test_gzip_cut_off_anywhere(self, tmp_path: Path) -> None:
        packed = gzip.compress(tar_bytes())
        for k, stop in enumerate([2, 5, 10, *range(20, len(packed), 701), len(packed) - 8, len(packed) - 1]):
            (tmp_path / "set.tar").write_bytes(packed[:stop])
            (tmp_path / f"{k}").mkdir()
            with pytest.raises(DatasetError, match="damaged or cut off"):
                unpack(tmp_path / "set.tar", tmp_path / f"{k}")

    @pytest.mark.parametrize("at", [-5, -1, 9000])
    def test_gzip_changed(self, save: Save, folder: Path, at: int) -> None:
        """Its checksum and its length are at its end."""
        packed = bytearray(gzip.compress(tar_bytes()))
        packed[at] ^= 1
        with pytest.raises(DatasetError, match="damaged or cut off"):
            unpack(save(packed), folder)

    @pytest.mark.parametrize("tail", [b"x", b"\0" * 5000 + b"x", tar_bytes()])
    @pytest.mark.parametrize("packed", [False, True])
    def test_followed_by_something(self, save: Save, folder: Path, tail: bytes, packed: bool) -> None:
        content = tar_bytes() + tail
        with pytest.raises(DatasetError, match="something follows its end"):
            unpack(save(gzip.compress(content) if packed else content), folder)

    @pytest.mark.parametrize("content", [b"", b"<html>sorry</html>", b"\x1f\x8bnot", random.Random(9).randbytes(9999)])
    def test_something_else(self, save: Save, folder: Path, content: bytes) -> None:
        with pytest.raises(DatasetError, match="at its beginning: damaged or cut off"):
            unpack(save(content), folder)


class TestRoom:
    def test_a_bomb(self, save: Save, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Some kilobytes that declare to be half a gigabyte: refused before the member is begun."""
        usage = SimpleNamespace(free=1 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda where: usage)
        bomb = gzip.compress(tar_bytes(member("zeros", size=1 << 24)))
        with pytest.raises(DownloadError, match=r"unpacks to 0.02 GB or more, 0.00 GB were free; make room"):
            unpack(save(bomb), folder)
        assert not (folder / "zeros").exists()

    def test_too_many(self, save: Save, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MEMBERS_AT_MOST", 5)
        with pytest.raises(DatasetError, match="more than 5 members"):
            unpack(save(tar_bytes()), folder)

    def test_a_full_disk(self, save: Save, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: object, **more: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(tarfile.TarFile, "extract", full)
        with pytest.raises(DownloadError, match=r"No space left on device while .* was unpacked"):
            unpack(save(tar_bytes()), folder)

    def test_no_archive_or_no_folder(self, save: Save, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(DownloadError, match=r"none.tar: No such file"):
            unpack(tmp_path / "none.tar", folder)
        with pytest.raises(DownloadError, match="none: No such file"):
            unpack(save(tar_bytes()), tmp_path / "none")


def test_an_old_python_is_told_so(save: Save, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(DownloadError, match=r"Python 3.11.4"):
        unpack(save(tar_bytes()), folder)

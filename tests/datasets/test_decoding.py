"""What memory the kernel and control groups leave, and the decoding of all pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ident3d import DatasetError, Ident3D
from ident3d.datasets import decoding
from ident3d.datasets.decoding import available_memory, check_memory, map_decoded

MIB = 1 << 20


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine with 8 GiB available, and no control groups."""
    write(
        tmp_path, **{"proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\nHugePages: 0\n"}
    )
    return tmp_path


def test_the_kernel_says_what_is_available(system: Path) -> None:
    assert available_memory(system) == 8192 * MIB
    assert available_memory(system / "nowhere") is None
    found = available_memory()
    assert found is None or found > 0


def group(usage: int, limit: str, cached: int) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


@pytest.mark.parametrize("mount", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
def test_the_tightest_group_counts(system: Path, mount: str) -> None:
    write(system, **{"proc/self/cgroup": "0::/outer/inner\n"})
    outer = group(usage=3000 * MIB, limit=str(4000 * MIB), cached=500 * MIB)
    write(system / mount / "outer", **outer)
    write(system / mount / "outer/inner", **group(usage=10 * MIB, limit="max", cached=0))
    assert available_memory(system) == 1500 * MIB
    write(system / mount / "outer/inner", **group(usage=10 * MIB, limit=str(50 * MIB), cached=MIB))
    assert available_memory(system) == 41 * MIB


def test_in_a_container_the_top_of_the_mount_is_its_group(system: Path) -> None:
    write(system, **{"proc/self/cgroup": "0::/docker/5a1c\n"})
    write(system / "sys/fs/cgroup", **group(usage=100 * MIB, limit=str(300 * MIB), cached=0))
    assert available_memory(system) == 200 * MIB


def test_groups_of_the_first_kind_are_read_as_well(system: Path) -> None:
    write(system, **{"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n"})
    files = {"memory.limit_in_bytes": f"{64 * MIB}", "memory.usage_in_bytes": f"{60 * MIB}"}
    write(system / "sys/fs/cgroup/memory/job", **files, **{"memory.stat": f"total_inactive_file {2 * MIB}\n"})
    assert available_memory(system) == 6 * MIB
    write(system / "sys/fs/cgroup/memory/job", **{"memory.usage_in_bytes": f"{70 * MIB}"})
    assert available_memory(system) == 0


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "available_memory", lambda: 2 * 10**9)
    check_memory(2 * 10**9, "pictures", "buy more")
    with pytest.raises(DatasetError, match=r"^pictures need 3.00 GB of memory, 2.00 GB are available; buy more$"):
        check_memory(3 * 10**9, "pictures", "buy more")
    monkeypatch.setattr(decoding, "available_memory", lambda: None)
    check_memory(10**18, "pictures", "buy more")


@pytest.mark.parametrize("size", [1, 3 * 768, 1 << 22])
def test_blocks_come_in_order_and_are_whole(fabricated_pairs: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "BLOCK_BYTES", size)
    data = Ident3D(fabricated_pairs)
    blocks = list(map_decoded(data, lambda start, block, bad: (start, block.copy(), bad), doing="test", quiet=True))
    assert [start for start, _, _ in blocks] == list(range(0, 48, max(1, min(48, size // 768))))
    assert not any(bad for _, _, bad in blocks)
    pictures = np.concatenate([block for _, block, _ in blocks])
    np.testing.assert_array_equal(pictures[:24], data.pictures(range(24))[0].numpy())
    np.testing.assert_array_equal(pictures[24:], data.pictures(range(24), positive=True)[0].numpy())

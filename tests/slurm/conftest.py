"""The cluster that these tests share, and when they run: on request, where Slurm and munge are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster, absent_programs
from slurm_renders import SlurmRender


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests of a cluster that is absent, or that nobody asked for: `make test-slurm` runs them after all others.

    What asks for them is the marker's name in `-m`. It needs no variable, and pytest's header shows it.
    """
    if absent := absent_programs():
        reason = f"Slurm is absent: no {', '.join(absent)}; `make test-slurm` installs it"
    elif "slurm" not in config.option.markexpr:
        reason = "on request: `make test-slurm`, or pytest -m slurm"
    else:
        return
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def cluster(running_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """A cluster whose node is up and idle. It is shared; jobs that a test leaves are cancelled."""
    yield running_cluster
    running_cluster.reset()


@pytest.fixture
def new(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., SlurmRender]]:
    """Makes a render of this test's own; see `SlurmRender`."""
    made = []

    def make(*options: Any, **others: Any) -> SlurmRender:
        made.append(SlurmRender(cluster, tmp_path, *options, **others))
        return made[-1]

    yield make
    for render in made:
        render.close()

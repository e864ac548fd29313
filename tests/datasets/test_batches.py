"""Numbered batches: the same whoever asks and whenever, shared out to ranks, and resumed where they stood."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ident3d import PairSampler
from ident3d.datasets.batches import BatchStream, PairLoader, generator_of
from ident3d.datasets.pairs import RenderedPairs
from ident3d.datasets.views import ViewStream
from ident3d.errors import SpecError

Batch = list[tuple[int, int]]
LATENTS = np.random.default_rng(0).random((200, 3), np.float32)


def matched(match: str = "exact", **options: Any) -> PairSampler:
    """12 batches an epoch, of all ranks together."""
    return PairSampler(LATENTS, "normal(scale=0.1)", match=match, **{"batch_size": 16, "seed": 5, **options})


def hnsw(**options: Any) -> PairSampler:
    pytest.importorskip("faiss")
    return matched("hnsw", **options)


def ivf(**options: Any) -> PairSampler:
    pytest.importorskip("faiss")
    return matched("ivf", **options)


def rendered(**options: Any) -> RenderedPairs:
    return RenderedPairs(200, **{"batch_size": 16, "seed": 5, **options})


def viewed(**options: Any) -> ViewStream:
    return ViewStream(200, **{"batch_size": 16, "seed": 5, **options})


Make = Callable[..., BatchStream]
KINDS: list[Make] = [matched, hnsw, ivf, rendered, viewed]


class Numbered(BatchStream):
    """Batch k is [(k, 0), (k, 1)]."""

    kind = "numbered"

    def batch(self, number: int) -> Batch:
        return [(number, i) for i in range(self.batch_size)]


def numbered(samples: int = 20, **options: Any) -> Numbered:
    return Numbered(**{"batch_size": 2, "seed": 0, "samples": samples, **options})


class Echo(Dataset[Tensor]):
    """Items are their keys."""

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        return torch.tensor(key)


def loader(stream: BatchStream | None = None, workers: int = 0, **options: Any) -> PairLoader:
    return PairLoader(Echo(), numbered() if stream is None else stream, num_workers=workers, **options)


def numbers(batches: Any) -> list[int]:
    """Of the batches of a `Numbered`, delivered or not."""
    return [int(batch[0][0]) for batch in batches]


@pytest.mark.parametrize("make", KINDS)
def test_a_batch_is_the_same_in_any_order_and_after_a_restart(make: Make) -> None:
    stream = make()
    in_order = [stream.batch(k) for k in range(40)]
    assert [make().batch(k) for k in (0, 7, 39)] == [in_order[k] for k in (0, 7, 39)]
    asked = list(range(40)) * 2
    random.Random(0).shuffle(asked)
    assert [stream.batch(k) for k in asked] == [in_order[k] for k in asked]
    assert all(len(batch) == 16 for batch in in_order)
    assert len({str(batch) for batch in in_order}) == 40


@pytest.mark.parametrize("make", KINDS)
def test_asking_for_batches_does_not_move_the_series(make: Make) -> None:
    stream, other = make(), make()
    series = iter(stream)
    got = []
    for k in range(12):
        stream.batch(1000 - 37 * k)
        got.append(next(series))
    assert got == list(other)


@pytest.mark.parametrize("make", KINDS)
def test_another_seed_gives_other_batches(make: Make) -> None:
    assert make(seed=1).batch(0) != make(seed=2).batch(0)
    assert make(seed=2**70).batch(0) == make(seed=2**70).batch(0)


@pytest.mark.parametrize("make", KINDS)
def test_the_batches_of_an_epoch_are_numbered_and_epochs_follow_each_other(make: Make) -> None:
    stream = make()
    assert len(stream) == 12
    epochs = [list(stream) for _ in range(3)]
    expected = make()
    assert list(itertools.chain(*epochs)) == [expected.batch(k) for k in range(36)]
    assert [len(epoch) for epoch in epochs] == [12, 12, 12]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_share_out_the_series_of_one(make: Make, world_size: int) -> None:
    alone = make()
    parts = [list(make(batches=4, rank=rank, world_size=world_size)) for rank in range(world_size)]
    in_turn = [batch for step in zip(*parts, strict=True) for batch in step]
    assert in_turn == [alone.batch(k) for k in range(4 * world_size)]
    of_all_ranks = make(batches=4, rank=1, world_size=world_size)
    assert [of_all_ranks.batch(k) for k in range(4 * world_size)] == in_turn


def test_an_epoch_holds_an_anchor_a_sample_over_all_ranks() -> None:
    for samples, batch_size, world_size, expected in (
        (200, 16, 1, 12),
        (200, 16, 3, 4),
        (200, 200, 1, 1),
        (200, 150, 2, 1),
        (5, 16, 1, 1),
    ):
        stream = numbered(samples, batch_size=batch_size, rank=0, world_size=world_size)
        assert len(stream) == stream.batches == expected
    assert len(numbered(batches=7)) == 7


SCRIPT = """
import sys, numpy as np
from ident3d import PairSampler
from ident3d.datasets.pairs import RenderedPairs
from ident3d.datasets.views import ViewStream
latents = np.random.default_rng(0).random((200, 3), np.float32)
series = dict(batch_size=16, seed=5)
streams = [PairSampler(latents, "normal(scale=0.1)", match=m, **series) for m in ("exact", "hnsw")]
streams += [RenderedPairs(200, **series), ViewStream(200, **series)]
print([[s.batch(k) for k in (3, 0, 1, 2)] for s in streams])
"""


@pytest.mark.slow
def test_another_process_makes_the_same_batches() -> None:
    expected = [[make().batch(k) for k in (3, 0, 1, 2)] for make in (matched, hnsw, rendered, viewed)]
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        told = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
        assert told.stdout.strip() == str(expected)


def test_a_generator_is_a_function_of_its_key_alone() -> None:
    def drawn(*key: object) -> list[int]:
        made: list[int] = torch.randint(2**62, (4,), generator=generator_of(*key)).tolist()
        return made

    keys = [("pairs", 0, 1), ("pairs", 1, 0), ("pairs", 0, 10), ("views", 0, 1), ("pairs", 0), ("pairs", 2**80, 1)]
    keys += [("pairs", 1, 11), ("pairs", 11, 1), ("pairs", 111)]
    assert [drawn(*key) for key in keys] == [drawn(*key) for key in keys]
    assert len({str(drawn(*key)) for key in keys}) == len(keys)


def test_set_epoch_goes_to_the_start_of_an_epoch() -> None:
    stream = numbered()
    assert (len(stream), stream.epoch) == (10, 0)
    for epoch in (3, 0, 1):
        stream.set_epoch(epoch)
        assert stream.epoch == epoch
        assert numbers(itertools.islice(stream, 4)) == [10 * epoch + i for i in range(4)]
    stream.set_epoch(2)
    assert numbers(stream) == list(range(20, 30))
    assert stream.epoch == 3
    ranks = [numbered(batches=4, rank=rank, world_size=2) for rank in range(2)]
    for rank, stream in enumerate(ranks):
        stream.set_epoch(3)
        assert numbers(stream) == [24 + 2 * i + rank for i in range(4)]


def test_an_epoch_that_was_left_is_finished_by_the_next_pass() -> None:
    stream = numbered()
    assert numbers(itertools.islice(stream, 3)) == [0, 1, 2]
    assert numbers(stream) == list(range(3, 10))
    assert numbers(stream) == list(range(10, 20))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("taken", [0, 5, 12, 17])
def test_a_state_resumes_mid_epoch(make: Make, taken: int) -> None:
    stream = make()
    for _ in zip(range(taken), itertools.chain(stream, stream), strict=False):
        pass
    state = json.loads(json.dumps(stream.state_dict()))
    again = make()
    again.load_state_dict(state)
    assert (again.epoch, again.state_dict()) == (stream.epoch, state)
    rest = [list(again), list(again)]
    assert rest == [list(stream), list(stream)]
    assert [len(part) for part in rest] == [12 - taken % 12, 12]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 2), (3, 4)])
def test_a_state_resumes_on_another_number_of_ranks(before: int, after: int) -> None:
    """No batch comes twice; where the ranks do not divide what is done, the rest of a round is left out."""
    first = [numbered(600, batch_size=1, rank=rank, world_size=before) for rank in range(before)]
    done = sorted(itertools.chain(*(numbers(itertools.islice(stream, 6)) for stream in first)))
    assert done == list(range(6 * before))
    states = [stream.state_dict() for stream in first]
    assert all(state == states[0] for state in states)
    second = [numbered(600, batch_size=1, rank=rank, world_size=after) for rank in range(after)]
    for stream in second:
        stream.load_state_dict(states[0])
    more = sorted(itertools.chain(*(numbers(itertools.islice(stream, 6)) for stream in second)))
    start = -(-len(done) // after) * after
    assert more == list(range(start, start + 6 * after))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "views"}, "state of kind = 'views'; this series has 'numbered'"),
        ({"seed": 4}, "state of seed = 4; this series has 0"),
        ({"batch_size": 3}, "state of batch_size = 3; this series has 2"),
        ({"next": -1}, "next = -1: expected a whole number of at least 0"),
        ({"next": 1.5}, "next = 1.5: expected a whole number"),
        ({"next": "3"}, "next = '3': expected a whole number"),
        ({"next": None}, "next = None: expected a whole number"),
    ],
)
def test_the_state_of_another_series_is_refused(change: dict[str, Any], message: str) -> None:
    stream = numbered()
    list(stream)
    for target in (stream, loader(stream)):
        with pytest.raises(SpecError, match=message):
            target.load_state_dict({**stream.state_dict(), **change})
    assert stream.step == 10
    with pytest.raises(SpecError, match="state of kind = None"):
        stream.load_state_dict({})


def test_the_state_of_pairs_of_another_law_or_match_is_refused() -> None:
    state = matched().state_dict()
    assert state["kind"] == f"normal(scale=0.1), exact of {len(LATENTS)} samples"
    for other in (hnsw(), PairSampler(LATENTS, "normal(scale=0.2)", batch_size=16, seed=5), rendered(), viewed()):
        with pytest.raises(SpecError, match=r"state of kind = 'normal\(scale=0.1\), exact of \d+ samples'; this"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0: expected a whole number of at least 1"),
        ({"batch_size": -3}, "batch_size = -3: expected a whole number of at least 1"),
        ({"batch_size": True}, "batch_size = True: expected a whole number"),
        ({"batch_size": 10**8}, "batch_size = 100000000: expected at most 10,000,000"),
        ({"seed": -1}, "seed = -1: expected a whole number of at least 0"),
        ({"seed": False}, "seed = False: expected a whole number"),
        ({"batches": 0}, "batches = 0: expected a whole number of at least 1"),
        ({"rank": 0}, "rank = 0, world_size = None: expected both"),
        ({"world_size": 2}, "rank = None, world_size = 2: expected both"),
        ({"rank": 2, "world_size": 2}, "rank = 2, world_size = 2: expected both, with 0 <= rank < world_size"),
        ({"rank": -1, "world_size": 2}, "rank = -1: expected"),
        ({"rank": 0, "world_size": 0}, "world_size = 0: expected"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    for make in (matched, rendered, viewed, numbered):
        with pytest.raises(SpecError, match=message):
            make(**options)


def test_a_negative_epoch_is_refused() -> None:
    for target in (numbered(), loader()):
        with pytest.raises(SpecError, match="epoch = -1: expected a whole number of at least 0"):
            target.set_epoch(-1)


WORKERS: list[dict[str, Any]] = [{}, {"workers": 2}, {"workers": 2, "persistent_workers": True, "prefetch_factor": 3}]


@pytest.mark.parametrize("options", WORKERS, ids=["no worker", "workers", "persistent workers"])
def test_a_loader_goes_on_where_a_loop_was_left(options: dict[str, Any]) -> None:
    batches = loader(**options)
    assert len(batches) == 10
    for taken in (3, 1, 2):
        start = batches.state_dict()["next"]
        got = []
        for batch in batches:
            got.append(int(batch[0][0]))
            if len(got) == taken:
                break
        assert got == list(range(start, start + taken))
        assert batches.state_dict()["next"] == start + taken
    assert numbers(batches) == [6, 7, 8, 9]
    assert numbers(batches) == list(range(10, 20))
    assert batches.state_dict()["next"] == 20


@pytest.mark.parametrize("options", WORKERS, ids=["no worker", "workers", "persistent workers"])
def test_a_loaders_state_counts_what_was_delivered(options: dict[str, Any]) -> None:
    batches = loader(**options)
    for count, _ in enumerate(batches, start=1):
        state = json.loads(json.dumps(batches.state_dict()))
        assert state == {"kind": "numbered", "seed": 0, "batch_size": 2, "next": count}
        if count in (4, 10):
            again = loader(**options)
            again.load_state_dict(state)
            assert again.state_dict() == state
            assert numbers(again) == (list(range(4, 10)) if count == 4 else list(range(10, 20)))
    batches.load_state_dict(state | {"next": 7})
    assert numbers(batches) == [7, 8, 9]
    batches.set_epoch(4)
    assert batches.state_dict()["next"] == 40
    assert numbers(batches) == list(range(40, 50))


def test_a_loader_over_a_stream_that_has_moved_starts_there() -> None:
    stream = numbered()
    list(itertools.islice(stream, 4))
    assert numbers(loader(stream)) == [4, 5, 6, 7, 8, 9]


def test_a_batch_that_failed_is_the_next_one_again() -> None:
    broken = True

    class Failing(Echo):
        def __getitem__(self, key: tuple[int, int]) -> Tensor:
            if broken and key[0] == 3:
                raise OSError("disk away")
            return super().__getitem__(key)

    batches = PairLoader(Failing(), numbered())
    with pytest.raises(OSError, match="disk away"):
        list(batches)
    assert batches.state_dict()["next"] == 3
    broken = False
    assert numbers(batches) == [3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("name", ["shuffle", "sampler", "batch_sampler", "drop_last"])
def test_a_loader_refuses_what_the_stream_decides(name: str) -> None:
    options: dict[str, Any] = {name: True}
    with pytest.raises(SpecError, match=f"^{name}: not an option of pairs"):
        loader(**options)


DISTRIBUTED = """
import sys, datetime, numpy as np, torch.distributed as dist
from ident3d import PairSampler
rank, store = int(sys.argv[1]), sys.argv[2]
latents = np.random.default_rng(0).random((200, 3), np.float32)
minute = datetime.timedelta(minutes=1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=minute)
sampler = PairSampler(latents, "normal(scale=0.1)", batch_size=16, seed=5)
own = PairSampler(latents, "normal(scale=0.1)", batch_size=16, seed=5, rank=0, world_size=1)
print(sampler.rank, sampler.world_size, len(sampler), own.world_size, len(own))
print(list(sampler))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_come_from_torch_distributed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DISTRIBUTED]
    children = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [child.communicate()[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    alone = matched()
    for rank, (series, batches) in enumerate(told):
        assert series == f"{rank} 2 6 1 12"
        assert batches == str([alone.batch(2 * step + rank) for step in range(6)])

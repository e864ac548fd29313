"""Where the time of a training step of 3DIdent's encoder goes, and what the loader costs.

    python benchmarks/threedident_step.py [DATASET]
    python benchmarks/threedident_step.py [DATASET] --device cuda --resolution 224 [--compile]

One training by the library's own trainer and task: matched pairs, ResNet18, bfloat16, Adam. Blocks of steps take turns:
batches from each cache, then one fixed batch of synthetic pictures, so that all meet the same machine. Of each: medians
of the parts of a step, waiting for the batch among them, and of the network's share, forward and backward; pictures/s;
the ratio to the synthetic block of the same round. Pictures are those of DATASET, or fabricated; all are decoded first.
On a GPU, parts are times between events on its stream. Set OMP_NUM_THREADS=1 on cores that others keep busy: there, two
threads, which wait for each other, were seen to take ten times as long as one.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from fabricated import fabricate
from PIL import Image
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ident3d.baselines import threedident
from ident3d.baselines.devices import device_name, resolve_device
from ident3d.baselines.picture_encoder import encode_in_chunks
from ident3d.baselines.threedident import ThreeDIdentTask
from ident3d.baselines.threedident_data import Splits, StepBatches, open_split
from ident3d.baselines.threedident_settings import ThreeDIdentSettings, preset_settings
from ident3d.baselines.training import RunOptions, train
from ident3d.datasets.dataset import PictureDataset

PARTS = ("waiting", "network", "loss", "optimiser", "rest")
SYNTHETIC = "synthetic"
Batch = tuple[Tensor, Tensor, Tensor]
Block = tuple[float, list[dict[str, float]]]
"""Seconds of some steps, and those of each part of each."""


class Clock:
    """When the parts of steps end: by the processor's clock, or by events on a GPU's stream, which wait for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._began = device.type == "cuda", 0.0
        self._steps: list[list[tuple[str, Any]]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wall(self) -> float:
        """Seconds; waits for a GPU."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        """Forget what was; steps are timed from here."""
        self._steps, self._began = [], self.wall()

    def step(self) -> None:
        """A step begins, and the one before it is over."""
        self.mark("rest")
        self._steps.append([("", self._now())])

    def mark(self, part: str) -> None:
        """What was done since the mark before belongs to this part."""
        if self._steps:
            self._steps[-1].append((part, self._now()))

    def finish(self) -> Block:
        """The steps since `begin`."""
        self.mark("rest")
        seconds = self.wall() - self._began
        steps = [dict.fromkeys(PARTS, 0.0) for _ in self._steps]
        for parts, marks in zip(steps, self._steps, strict=True):
            for (_, before), (part, now) in pairwise(marks):
                parts[part] += before.elapsed_time(now) / 1e3 if self._cuda else now - before
        self._steps = []
        return seconds, steps


class Turns:
    """Batches of several sources, a block of steps each in turn.

    Each block begins with steps that are not timed: work ahead for the block before ends in them, and the source's own
    is under way again when time is taken.
    """

    def __init__(self, sources: dict[str, Iterator[Batch]], clock: Clock, warm: int, timed: int) -> None:
        self.sources, self.clock, self.warm, self.length = sources, clock, warm, warm + timed
        self.blocks: dict[str, list[Block]] = {name: [] for name in sources}
        self._name = ""

    def at(self, step: int) -> Batch:
        """The batch of a step, in place of `StepBatches.at`. The first one after a block closes it."""
        block, place = divmod(step, self.length)
        if place == 0 and block:
            self.blocks[self._name].append(self.clock.finish())
        if place == self.warm:
            self.clock.begin()
        if place >= self.warm:
            self.clock.step()
        self._name = list(self.sources)[block % len(self.sources)]
        batch = next(self.sources[self._name])
        self.clock.mark("waiting")
        return batch


@contextmanager
def noted(task: ThreeDIdentTask, clock: Clock) -> Iterator[None]:
    """Let the clock know where the network, the loss and the optimiser end."""

    def encode_noted(*args: Any) -> tuple[Tensor, Tensor]:
        codes = encode_in_chunks(*args)
        clock.mark("network")
        register_multi_grad_hook(codes, lambda _: clock.mark("loss"))  # forward, and backward down to the codes
        return codes

    with ExitStack() as stack:
        vars(threedident)["encode_in_chunks"] = encode_noted
        stack.callback(vars(threedident).__setitem__, "encode_in_chunks", encode_in_chunks)
        for parameter in task.model.parameters():  # the last of them to get its gradient ends the backward pass
            register: Callable[..., Any] = parameter.register_post_accumulate_grad_hook
            stack.callback(register(lambda _: clock.mark("network")).remove)
        stack.callback(register_optimizer_step_pre_hook(lambda *_: clock.mark("rest")).remove)
        stack.callback(register_optimizer_step_post_hook(lambda *_: clock.mark("optimiser")).remove)
        yield


def fabricated_split(root: Path, side: int, samples: int) -> Path:
    """Smooth pictures out of noise: PNG makes them small, and what is timed does not depend on what they show."""
    noise, pictures = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), np.uint8), []
    for small in noise:
        buffer = io.BytesIO()
        Image.fromarray(small).resize((side, side), Image.Resampling.BILINEAR).save(buffer, "PNG")
        pictures.append(buffer.getvalue())
    return Path(fabricate(root, pictures, samples, 2048, side))


def synthetic(settings: ThreeDIdentSettings, data: PictureDataset, device: torch.device) -> Batch:
    """One batch of noise on the device."""
    shape, generator = (settings.batch, 3, data.resolution, data.resolution), torch.Generator().manual_seed(0)
    x, positive = (torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(2))
    return x.to(device), positive.to(device), torch.rand(settings.batch, 10, generator=generator).to(device)


def epoch_start_ms(at: Callable[[int], Batch], steps: int, clock: Clock) -> float:
    """Until the third batch of an epoch of so many steps: by then, a whole block of its pairs has been matched."""
    at(steps - 1)
    began = clock.wall()
    for step in range(steps, steps + 3):
        at(step)
    return 1e3 * (clock.wall() - began)


def show(blocks: dict[str, list[Block]], pictures: int) -> None:
    """Print a table: medians over steps, and ratios to the synthetic block of the same round."""
    heads = "".join(f"{part:>10s}" for part in PARTS)
    print(f"{'ms of a step, medians':22s}    whole{heads}   longest wait   network   pictures/s   x synthetic (range)")
    for name, found in blocks.items():
        steps = [step for _, block in found for step in block]
        whole = [sum(step.values()) for step in steps]
        share = median(step["network"] / total for step, total in zip(steps, whole, strict=True))
        parts = "".join(f"{1e3 * median(step[part] for step in steps):10.1f}" for part in PARTS)
        longest = 1e3 * max(step["waiting"] for step in steps)
        speed = median(pictures * len(block) / seconds for seconds, block in found)
        ratios = [plain / seconds for (plain, _), (seconds, _) in zip(blocks[SYNTHETIC], found, strict=True)]
        print(
            f"{name:22s} {1e3 * median(whole):8.1f}{parts} {longest:14.1f} {share:9.1%} {speed:12,.1f} "
            f"{median(ratios):13.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


def compare(root: Path, args: argparse.Namespace, what: str) -> None:
    """Train on the split at `root` in turns, and print where the time went."""
    device, data = resolve_device(args.device), open_split(root, "train")
    side, cuda = data.resolution, device.type == "cuda"
    caches = args.cache or (["device"] if cuda else ["device", "disk"])
    batch = args.batch or (512 if cuda else 64 if side <= 64 else 16)
    warm, timed, rounds = 5 if cuda else 1, args.steps or (30 if cuda else 5), args.rounds
    start, steps = preset_settings("fast"), rounds * (len(caches) + 1) * (warm + timed) + 1  # the last closes a block
    training = dataclasses.replace(start.training, steps=steps, precision=args.precision)
    settings = dataclasses.replace(start, batch=batch, training=training)
    task = ThreeDIdentTask(settings, Splits(data, data, data.columns.names), 0, device, cache=caches[0], quiet=True)
    assert task._batches is not None
    loaders = {f"{caches[0]} cache": task._batches.at}
    for cache in caches[1:]:
        loaders[f"{cache} cache"] = StepBatches(data, settings, seed=0, device=device, cache=cache, quiet=True).at
    fixed, clock = synthetic(settings, data, device), Clock(device)
    series: dict[str, Iterator[Batch]] = {name: map(at, count()) for name, at in loaders.items()}
    turns = Turns({**series, SYNTHETIC: repeat(fixed)}, clock, warm, timed)
    task._batches = cast(StepBatches, turns)  # nothing but `at` is asked of it
    vars(task)["scores"] = dict  # gives none: the trainer ends with an evaluation
    with noted(task, clock):
        train(task, training, RunOptions(evaluate_every=steps, compile=args.compile, quiet=True))
    kind = f"{settings.encoding.network}, {args.precision}{', compiled' if args.compile else ''}, {device_name(device)}"
    print(
        f"{side} px, {len(data):,} {what} samples, {batch} matched pairs a step, {kind}, {rounds} x {timed} steps of "
        f"each, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    show(turns.blocks, 2 * batch)
    epoch = len(data) // batch
    starts = [(name, epoch_start_ms(at, epoch, clock)) for name, at in loaders.items()]
    texts = [f"{name} {ms:.1f} ms, {ms / epoch:.2f} ms a step" for name, ms in starts]
    print(f"the start of an epoch of {epoch:,} steps, alone: {'; '.join(texts)}\n", flush=True)


def main() -> None:
    """Print the parts of a step, and pictures a second beside those of synthetic tensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", type=Path, help="shards, or a published dataset in its own layout")
    parser.add_argument("--resolution", nargs="+", type=int, default=[64, 224], help="of fabricated pictures")
    parser.add_argument("--samples", type=int, help="fabricated; by default 4,096, and 65,536 for a GPU")
    parser.add_argument("--batch", type=int, help="pairs; by default 64, above 64 px 16, and 512 on a GPU")
    parser.add_argument("--cache", nargs="+", choices=("device", "disk"), help="by default both, on a GPU device")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", default="bf16", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="timed, of each block; by default 5, on a GPU 30")
    args = parser.parse_args()
    if args.dataset is not None:
        compare(args.dataset, args, "stored")
        return
    samples = args.samples or (65_536 if args.device == "cuda" else 4096)
    for side in args.resolution:
        with tempfile.TemporaryDirectory() as folder:
            compare(fabricated_split(Path(folder) / "data", side, samples), args, "fabricated")


if __name__ == "__main__":
    main()

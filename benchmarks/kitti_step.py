"""Steps a second on KITTI Masks, against a plain loop over a DataLoader.

    python benchmarks/kitti_step.py
    python benchmarks/kitti_step.py --device cuda [--compile] [--seeds 1 10]

Both train the same networks on the same kind of pairs, 32 pairs or 64 masks a step, by Adam, in float32; ours in
bfloat16 as well, as the preset `quick` has it (on CUDA in TF32 as well). Ours: the library's own trainer and task, with
all that a run has (log, checks for numbers that are not finite). Plain: torch's layers as they come, the losses as they
are written down, a DataLoader with two workers that collates `KittiMasks` item by item. Each is timed in processes of
its own that take turns, so that neither finds the memory that the other has set up; a block is the median of its steps,
and of the blocks the median counts. On a GPU also what 300,000 steps would take.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ident3d import KittiMasks
from ident3d.baselines.devices import device_name, resolve_device
from ident3d.baselines.kitti_settings import row_settings
from ident3d.baselines.kitti_task import KittiTask
from ident3d.baselines.training import RunOptions, train

ROWS = {"contrastive": "3.2", "slowvae": "3.1"}
PAIRS, DIM = 32, 10


@dataclasses.dataclass(frozen=True)
class Block:
    """What a process is to time: ours in a precision, or the plain loop (precision None)."""

    model: str
    precision: str | None
    device: str
    seeds: int
    compile: bool
    warm: int
    steps: int


class Timed(KittiTask):
    """The library's task, which notes when each of its steps begins, and is not scored."""

    def losses(self, step: int) -> Tensor:
        _wait(self.device)
        self.began.append(time.perf_counter())
        return super().losses(step)

    def scores(self) -> dict[str, list[float]]:
        return {}

    began: list[float]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_block(block: Block) -> float:
    """Median seconds of a step."""
    data = KittiMasks(synthetic=True, sequences=200)
    device = torch.device(block.device)
    began = _ours(block, data, device) if block.precision else list(_plain(block, data, device))
    began = began[block.warm :]
    return median(after - before for before, after in itertools.pairwise(began))


def _ours(block: Block, data: KittiMasks, device: torch.device) -> list[float]:
    settings = row_settings(ROWS[block.model], "quick", samples=64)
    training = dataclasses.replace(
        settings.training,
        steps=block.warm + block.steps,
        precision=block.precision,  # type: ignore[arg-type]
    )
    task = Timed(settings, data, range(block.seeds), device)
    task.began = []
    train(task, training, RunOptions(quiet=True, compile=block.compile))
    return task.began


def _plain(block: Block, data: KittiMasks, device: torch.device) -> Iterator[float]:
    loader = DataLoader(data, batch_size=PAIRS, shuffle=True, drop_last=True, num_workers=2)
    slow = block.model == "slowvae"
    encoder = plain_encoder(2 * DIM if slow else DIM).to(device)
    decoder = plain_decoder().to(device) if slow else nn.Identity()
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-4)
    taken = 0
    while True:
        for x, positive, _, _ in loader:
            _wait(device)
            yield time.perf_counter()
            if taken == block.warm + block.steps:
                return
            masks = torch.cat([x, positive]).float().to(device)
            loss = plain_slowvae(encoder, decoder, masks) if slow else plain_contrastive(encoder, masks)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            taken += 1


def plain_encoder(outputs: int) -> nn.Module:
    """SlowVAE's encoder in torch's own layers."""
    sizes = [(1, 32), (32, 32), (32, 64), (64, 64)]
    layers = [layer for a, b in sizes for layer in (nn.Conv2d(a, b, 4, 2, 1), nn.ReLU())]
    return nn.Sequential(*layers, nn.Conv2d(64, 256, 4), nn.ReLU(), nn.Flatten(), nn.Linear(256, outputs))


def plain_decoder() -> nn.Module:
    """Its mirror."""
    sizes = [(64, 64), (64, 32), (32, 32), (32, 1)]
    layers = [layer for a, b in sizes for layer in (nn.ReLU(), nn.ConvTranspose2d(a, b, 4, 2, 1))]
    first = (nn.Linear(DIM, 256), nn.ReLU(), nn.Unflatten(1, (256, 1, 1)), nn.ConvTranspose2d(256, 64, 4))
    return nn.Sequential(*first, *layers)


def plain_contrastive(encoder: nn.Module, masks: Tensor) -> Tensor:
    """InfoNCE with the L1 distance, every pair of representations beside each other."""
    x, positive = encoder(masks).chunk(2)
    near = -(x - positive).abs().sum(-1, keepdim=True)
    far = -(x[:, None] - x[None]).abs().sum(-1)
    loss: Tensor = (torch.cat([near, far], 1).logsumexp(1) - near[:, 0]).mean()
    return loss


def plain_slowvae(encoder: nn.Module, decoder: nn.Module, masks: Tensor) -> Tensor:
    """SlowVAE's loss, term by term."""
    mean, log_variance = encoder(masks).chunk(2, 1)
    logits = decoder(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))
    reconstruction = functional.binary_cross_entropy_with_logits(logits, masks, reduction="sum") / len(masks)
    normal = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
    other_mean, other_log_variance = (torch.cat(part.chunk(2)[::-1]) for part in (mean, log_variance))
    d, v = mean - other_mean, log_variance.exp() + other_log_variance.exp()
    moved = (2 * v / math.pi).sqrt() * (-d.square() / (2 * v)).exp() + d * torch.erf(d / (2 * v).sqrt())
    entropy = 0.5 * (log_variance + math.log(2 * math.pi * math.e))
    transition = (6 * moved - math.log(3) - entropy).sum(1).mean()
    loss: Tensor = 2 * reconstruction + normal + 10 * transition
    return loss


def in_turns(blocks: list[Block], rounds: int) -> list[float]:
    """Median seconds of a step of each block, over rounds in which all take their turn."""
    times: list[list[float]] = [[] for _ in blocks]
    context = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        for block, own in zip(blocks, times, strict=True):
            pool = context.Pool(1, initializer=_may_have_children)
            own.append(pool.apply(time_block, (block,)))
            pool.close()  # not terminated: its own workers would leave their semaphores behind
            pool.join()
    return [median(own) for own in times]


def _may_have_children() -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def report(options: argparse.Namespace, say: Callable[[str], Any] = print) -> None:
    """Time everything and print it."""
    device = resolve_device(options.device)
    precisions = ["float32", "bf16", *(["tf32"] if device.type == "cuda" else [])]
    common = {"device": str(device), "compile": options.compile, "warm": options.warm, "steps": options.steps}
    say(f"{device_name(device)}; {options.rounds} rounds of {options.steps} steps; 64 masks a step")
    for model in ROWS:
        plain = Block(model=model, precision=None, seeds=1, **common)
        ours = [Block(model=model, precision=p, seeds=s, **common) for s in options.seeds for p in precisions]
        base, *seconds = in_turns([plain, *ours], options.rounds)
        say(f"{model}: plain loop, float32: {1e3 * base:.1f} ms a step, {1 / base:.1f} steps/s")
        for block, each in zip(ours, seconds, strict=True):
            many = "" if block.seeds == 1 else f", {block.seeds} seeds side by side"
            text = f"    ours, {block.precision}{many}: {1e3 * each:.1f} ms a step, {1 / each:.1f} steps/s"
            text += f", {block.seeds * base / each:.2f} times as many as plain"
            if device.type == "cuda":
                text += f"; 300,000 steps in {300_000 * each / 60:.1f} minutes"
            say(text)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=10)
    report(parser.parse_args())


if __name__ == "__main__":
    main()

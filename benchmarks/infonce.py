"""InfoNCE without the B x B x N tensor against the plain form that holds it, one step forward and backward.

    python benchmarks/infonce.py [--batch 6144] [--dim 10] [--rounds 5] [--step]

Prints the medians of alternating rounds, their ratio, and the memory above the inputs. With --step, a whole training
step of row 2.1 at the paper's settings (mixing, encoder, loss, Adam) with either loss. On a machine with a GPU,
--device cuda also reports the peak of CUDA memory, and --batch 65536 leaves the plain form out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ident3d.baselines import mlp
from ident3d.baselines.losses import dot_infonce, lp_infonce
from ident3d.baselines.mlp import MLPTask
from ident3d.baselines.mlp_settings import row_settings

PLAIN_BYTES = 16e9
"""The plain form is left out where its four tensors of B x B x N would not fit."""


def plain_infonce(anchors: Tensor, positives: Tensor, p: float | None) -> Tensor:
    """The formula as it stands, self included, the positive in the denominator."""
    if p is None:
        positive, negatives = (anchors * positives).sum(-1), anchors @ anchors.T
    else:
        positive = -(anchors - positives).abs().pow(p).sum(-1)
        negatives = -(anchors[:, None] - anchors[None]).abs().pow(p).sum(-1)
    return (torch.logsumexp(torch.cat([positive[:, None], negatives], 1), 1) - positive).mean()


def ours(anchors: Tensor, positives: Tensor, p: float | None) -> Tensor:
    return dot_infonce(anchors, positives) if p is None else lp_infonce(anchors, positives, p=p)


def reset_peak(device: str) -> float:
    """Bytes in use now; the peak is counted from here."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device: str) -> float:
    return float(torch.cuda.max_memory_allocated()) if device == "cuda" else resident("VmHWM")


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024.0 * next(float(line.split()[1]) for line in lines if line.startswith(name))


def timed(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds of a step, and bytes above what was in use before it."""
    before = reset_peak(device)
    began = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, peak(device) - before


def compare(name: str, forms: dict[str, Callable[[], object]], rounds: int, device: str) -> None:
    """Alternate between the forms; print medians and the first form's time over the last's."""
    for step in forms.values():
        step()  # what is made once: threads, kernels, pages
    seen: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form, step in forms.items():
            seen[form].append(timed(step, device))
    seconds = {form: statistics.median(t for t, _ in runs) for form, runs in seen.items()}
    memory = {form: max(m for _, m in runs) for form, runs in seen.items()}
    texts = [f"{form} {1e3 * seconds[form]:8.1f} ms, {memory[form] / 1e6:7.1f} MB" for form in forms]
    ratio = f"   {seconds['plain'] / seconds['ours']:5.1f} times faster" if "plain" in forms else ""
    print(f"{name:22} {'   '.join(texts)}{ratio}", flush=True)


def loss_forms(batch: int, dim: int, p: float | None, device: str) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batch, dim, generator=generator).to(device)
    if p is None:
        x = torch.nn.functional.normalize(x - 0.5, dim=-1)
    anchors, positives = x.clone().requires_grad_(), (x + 0.01).requires_grad_()

    def run(loss: Callable[[Tensor, Tensor, float | None], Tensor]) -> None:
        anchors.grad = positives.grad = None
        loss(anchors, positives, p).backward()  # type: ignore[no-untyped-call]

    forms: dict[str, Callable[[], object]] = {"ours": lambda: run(ours)}
    if 4 * 4 * batch * batch * dim < PLAIN_BYTES:
        forms = {"plain": lambda: run(plain_infonce), **forms}
    return forms


def step_forms(device: str) -> dict[str, Callable[[], object]]:
    """A training step of row 2.1, with the loss of the library and with the plain one in its place."""
    task = MLPTask(row_settings("2.1", "paper"), [0], torch.device(device))
    optimizer = torch.optim.Adam(task.model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        task.losses(0).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def plain_step() -> None:
        kept = vars(mlp)["lp_infonce"]
        vars(mlp)["lp_infonce"] = lambda x, y, *, p, **_: plain_infonce(x[0], y[0], p)
        try:
            step()
        finally:
            vars(mlp)["lp_infonce"] = kept

    return {"plain": plain_step, "ours": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=6144)
    parser.add_argument("--dim", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--step", action="store_true")
    options = parser.parse_args()
    print(f"B = {options.batch:,}, N = {options.dim}, float32, {options.device}, {torch.get_num_threads()} threads")
    for p in (1, 2, 3, None):
        name = "dot product" if p is None else f"p = {p}"
        compare(name, loss_forms(options.batch, options.dim, p, options.device), options.rounds, options.device)
    if options.step:
        compare("a step of row 2.1", step_forms(options.device), max(3, options.rounds // 2), options.device)


if __name__ == "__main__":
    main()

"""The fused kernels against a plain form that holds all scores.

Without a GPU, Triton's interpreter runs the kernels' arithmetic: this file, run as a script in a process of its own
with TRITON_INTERPRET=1, does so for every case and prints how far off each was. The compiler runs as well, since it
needs no GPU. The tests marked `gpu` repeat the cases on a real one.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ident3d.baselines import fused
from ident3d.baselines.losses import lp_infonce
from ident3d.baselines.terms import Term

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is absent")
needs_gpu = pytest.mark.skipif(
    find_spec("triton") is None or not torch.cuda.is_available(), reason="no CUDA device, or no Triton"
)


@dataclass(frozen=True)
class Case:
    """Points to compare, and how.

    Attributes:
        terms: dimensions and p of each term.
        rows: anchors.
        columns: what they are compared with; None for the anchors themselves.
        skip: as for `log_sum_exp_scores`.
        seeds: runs side by side.
        double: float64.
        scale: standard deviation of the points.
        least_share: the fewest columns a program; a small one splits them over programs.
    """

    terms: tuple[tuple[int, float | None], ...]
    rows: int = 70
    columns: int | None = None
    skip: int | None = None
    seeds: int = 1
    double: bool = False
    scale: float = 1.0
    least_share: int = fused.LEAST_SHARE


SCORES: dict[str, tuple[tuple[int, float | None], ...]] = {
    "p1": ((3, 1.0),),
    "p1.5": ((2, 1.5),),
    "p2": ((4, 2.0),),
    "p3": ((3, 3.0),),
    "dot": ((5, None),),
    "product": ((3, None), (2, 1.0)),
    "three": ((1, 2.0), (2, None), (1, 3.0)),
}
CASES = {
    **{f"{name}-self": Case(terms) for name, terms in SCORES.items()},
    **{f"{name}-self-skip": Case(terms, rows=45, skip=0, seeds=2) for name, terms in SCORES.items()},
    **{f"{name}-other": Case(terms, rows=65, columns=40) for name, terms in SCORES.items()},
    **{f"{name}-other-skip": Case(terms, rows=40, columns=90, skip=33, seeds=2) for name, terms in SCORES.items()},
    **{f"{name}-double": Case(terms, rows=41, skip=0, double=True) for name, terms in SCORES.items()},
    **{f"{name}-double-other": Case(terms, rows=41, columns=50, skip=0, double=True) for name, terms in SCORES.items()},
    "one dimension": Case(((1, 1.0),), rows=64),
    "blocks": Case(((2, 2.0),), rows=130, skip=0),
    "many dimensions": Case(((18, 1.0), (2, None)), rows=40, skip=0, scale=0.3),
    "skip to the left": Case(((2, 1.0),), rows=40, columns=50, skip=-3),
    "skip beyond": Case(((2, 1.0),), rows=40, columns=50, skip=50),
    "skip to the right, self": Case(((2, 2.0), (1, None)), rows=50, skip=7),
    "shares": Case(((2, 1.0), (2, None)), rows=130, skip=0, seeds=2, least_share=32),
    "shares, other": Case(((3, 3.0),), rows=50, columns=130, skip=9, least_share=32),
    "far apart": Case(((3, 2.0),), rows=70, skip=0, scale=1e3, least_share=32),
    "near": Case(((3, 1.5),), rows=70, scale=1e-4),
    "long": Case(((3, None),), rows=70, skip=0, scale=30.0, least_share=32),
    "one column": Case(((2, 1.0),), rows=40, columns=1, skip=0),
    "no column": Case(((2, 1.0),), rows=40, columns=0),
    "one anchor": Case(((2, 1.0),), rows=1, skip=0),
    "one anchor, dot": Case(((2, None),), rows=1, skip=0, double=True),
    "no anchor": Case(((2, 1.0),), rows=0),
}


def terms_of(case: Case) -> tuple[Term, ...]:
    stops = [sum(dim for dim, _ in case.terms[: i + 1]) for i in range(len(case.terms))]
    return tuple(Term(stop - dim, stop, p) for stop, (dim, p) in zip(stops, case.terms, strict=True))


def plain(x: Tensor, y: Tensor, terms: tuple[Term, ...], skip: int | None) -> Tensor:
    """All scores at once."""
    s = x.new_zeros(x.shape[0], x.shape[1], y.shape[1])
    for term in terms:
        a, b = x[:, :, None, term.start : term.stop], y[:, None, :, term.start : term.stop]
        s = s + ((a * b).sum(-1) if term.p is None else -(a - b).abs().pow(term.p).sum(-1))
    if skip is not None:
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(y.shape[1])
        s = s.masked_fill((j == i + skip).to(x.device), -math.inf)
    return s.logsumexp(2)


def differences(case: Case, device: str) -> dict[str, float]:
    """The greatest relative difference of the value and of each gradient; NaN or infinite where one alone is."""
    generator = torch.Generator().manual_seed(0)
    dtype, terms = torch.float64 if case.double else torch.float32, terms_of(case)
    shapes = [(case.seeds, points, terms[-1].stop) for points in (case.rows, case.columns) if points is not None]
    leaves = [torch.randn(shape, generator=generator, dtype=dtype) * case.scale for shape in shapes]
    if len(leaves) == 2:
        count = min(case.rows, leaves[1].shape[1]) // 2
        leaves[1][:, :count] = leaves[0][:, :count]  # the same points, where slopes of |d|^p are 0
    upstream = torch.randn(shapes[0][:2], generator=generator, dtype=dtype)

    ours = [leaf.to(device, copy=True).requires_grad_() for leaf in leaves]
    with mock.patch.object(fused, "LEAST_SHARE", case.least_share):
        lse = fused.fused_log_sum_exp(ours[0], ours[1] if len(ours) > 1 else None, terms, case.skip)
        gradients = torch.autograd.grad(lse, ours, upstream.to(device))
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    expected = plain(exact[0], exact[-1], terms, case.skip)
    # Where no score counts, the plain form's gradient is NaN; it should be 0.
    finite = torch.where(expected == -math.inf, 0.0, expected)
    exact_gradients = torch.autograd.grad(finite, exact, upstream.double())

    assert lse.dtype == dtype
    sides = zip("xy", gradients, exact_gradients, strict=False)
    return {"value": difference(lse, expected)} | {name: difference(a, b.nan_to_num()) for name, a, b in sides}


def difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach()
    assert found.shape == expected.shape
    off = torch.where(found == expected, 0.0, (found - expected).abs())  # inf - inf is NaN
    scale = expected.abs()[expected.isfinite()]
    greatest = float(scale.max()) if len(scale) else 0.0
    return float(off.max()) / (greatest or 1.0) if off.numel() else 0.0


def assert_close(case: Case, found: dict[str, float]) -> None:
    value, gradient = (1e-12, 1e-11) if case.double else (1e-5, 1e-4)
    assert found["value"] <= value
    assert len(found) == (2 if case.columns is None else 3)
    assert all(found[name] <= gradient for name in found if name != "value"), found


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What Triton's interpreter finds for every case."""
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_plain_form(name: str, interpreted: dict[str, Any]) -> None:
    assert_close(CASES[name], interpreted[name])


@needs_triton
def test_gradients_are_made_where_they_are_asked_for(interpreted: dict[str, Any]) -> None:
    assert interpreted["x alone"] == [True, False]
    assert interpreted["y alone"] == [False, True]


def one_side(asked: tuple[bool, bool]) -> list[bool]:
    x, y = (torch.rand(1, 5, 2).requires_grad_(needed) for needed in asked)
    torch.autograd.backward(fused.fused_log_sum_exp(x, y, (Term(0, 2, 1.0),)).sum())
    return [v.grad is not None for v in (x, y)]


def main() -> None:
    # The interpreter computes with NumPy, which warns of log(0) where a GPU just returns -inf.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        results: dict[str, Any] = {name: differences(case, "cpu") for name, case in CASES.items()}
        results["x alone"], results["y alone"] = one_side((True, False)), one_side((False, True))
    print(json.dumps(results))


@needs_triton
@pytest.mark.parametrize(
    ("capability", "double", "powers"),
    [(75, False, (1.0,)), (80, False, (1.5, 0.0)), (90, False, (2.0,)), (90, True, (3.0, 0.0))],
)
def test_kernels_compile_without_atomics_and_tensor_cores(
    capability: int, double: bool, powers: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ident3d.baselines import fused_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = fused._Launch.of(
        torch.empty(10, 1, 512, dtype=torch.float64 if double else torch.float32), torch.empty(10, 1, 512)
    )
    constants = {
        "starts": (0, 7)[: len(powers)],
        "stops": (10,) if len(powers) == 1 else (7, 10),
        "powers": powers,
        "own_block": launch.own_block,
        "other_block": launch.other_block,
        "skips": True,
    }
    both = {"dim": 10, "as_anchors": True, "as_others": True, "dim_block": 16}
    for kernel, more in ((fused_kernels.lse_kernel, {}), (fused_kernels.flow_kernel, both)):
        known = constants | more
        signature = {
            name: "constexpr"
            if name in known
            else "i32"
            if name in fused_kernels.COUNTS
            else ("*fp64" if double else "*fp32")
            for name in kernel.arg_names
        }
        options = {"num_warps": 1, "enable_fp_fusion": True}
        compiled = triton.compile(
            ASTSource(kernel, signature, known), target=GPUTarget("cuda", capability, 32), options=options
        )
        # Nothing whose order is left to chance, and nothing that rounds to TF32.
        assert not re.search(r"^\s*(@%p\d+ )?(atom|red|mma|wmma|wgmma)\b", compiled.asm["ptx"], re.MULTILINE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 10, 16, 17, 64])
@pytest.mark.parametrize(("seeds", "own", "other"), [(1, 1, 0), (1, 6144, 6144), (3, 70, 100_000), (2, 65_536, 65_536)])
def test_launches_cover_every_point_once(seeds: int, own: int, other: int, dim: int, dtype: torch.dtype) -> None:
    launch = fused._Launch.of(
        torch.empty(dim, seeds, own, dtype=dtype, device="meta"), torch.empty(dim, seeds, other, device="meta")
    )
    blocks, across, splits = launch.grid
    assert across == seeds
    assert (blocks - 1) * launch.own_block < own <= blocks * launch.own_block
    assert launch.share % launch.other_block == 0
    assert max(0, (splits - 1) * launch.share) < max(1, other) <= splits * launch.share
    # Partial results stay small beside the points themselves, or beside what the device holds anyway.
    assert splits == 1 or blocks * seeds * splits <= fused.PROGRAMS


def test_the_cpu_and_unusual_input_are_not_fusible() -> None:
    term = (Term(0, 2, 1.0),)
    assert not fused.is_fusible(torch.zeros(1, 4, 2), term)
    with mock.patch.object(fused, "_runs_on", return_value=True):
        assert not fused.is_fusible(pretend_cuda(1, 4, 2, dtype=torch.float16), term)
        assert not fused.is_fusible(pretend_cuda(1, 4, 65), term)
        assert not fused.is_fusible(pretend_cuda(70_000, 4, 2), term)
        assert not fused.is_fusible(pretend_cuda(1, 4, 1), term)
        assert fused.is_fusible(pretend_cuda(1, 4, 2), term)


def pretend_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return mock.Mock(device=torch.device("cuda:0"), shape=shape, dtype=dtype)


def test_old_devices_and_absent_triton_take_the_tiled_form(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on = fused._runs_on.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert not runs_on(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert not runs_on(torch.device("cuda:0"))


@needs_triton
def test_a_triton_that_does_not_run_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    # On the CPU, without the interpreter, Triton has no driver or refuses the tensors.
    with pytest.warns(RuntimeWarning, match="does not run on cpu .* tiled form"):
        assert not fused._runs_on.__wrapped__(torch.device("cpu"))


def test_importing_the_losses_does_not_import_triton() -> None:
    code = """
import sys
import torch
before = "triton" in sys.modules
import ident3d.baselines.fused, ident3d.baselines.losses
print("triton" in sys.modules and not before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    assert_close(CASES[name], differences(CASES[name], "cuda"))


@pytest.mark.gpu
@needs_gpu
def test_a_batch_of_65536_fits_in_two_gigabytes() -> None:
    x = torch.rand(1, 65_536, 10, device="cuda", requires_grad=True)
    assert fused.is_fusible(x, (Term(0, 10, 1.0),))
    torch.cuda.reset_peak_memory_stats()
    for y in (None, x.detach().requires_grad_()):
        torch.autograd.backward(fused.fused_log_sum_exp(x, y, (Term(0, 10, 1.0),)).sum())
    assert torch.cuda.max_memory_allocated() < 2e9


@pytest.mark.gpu
@needs_gpu
def test_results_repeat_to_the_bit() -> None:
    x = torch.rand(2, 5_000, 10, device="cuda", requires_grad=True)
    runs = []
    for _ in range(2):
        lse = fused.fused_log_sum_exp(x, None, (Term(0, 10, 2.0),), 0)
        runs.append((lse, *torch.autograd.grad(lse.sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_the_losses_take_the_fused_path() -> None:
    x = torch.rand(200, 10, device="cuda", requires_grad=True)
    with mock.patch.object(fused, "fused_log_sum_exp", wraps=fused.fused_log_sum_exp) as spy:
        loss = lp_infonce(x, x.detach() + 0.01, p=1, include_self=False)
        torch.autograd.backward(loss)
    assert spy.call_count == 1
    y = x.detach().cpu().requires_grad_()
    tiled = lp_infonce(y, y.detach() + 0.01, p=1, include_self=False)
    torch.autograd.backward(tiled)
    assert y.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(loss.cpu(), tiled, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.cpu(), y.grad, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()

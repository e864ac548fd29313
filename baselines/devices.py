"""Devices and number formats of a training."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from ident3d.errors import SpecError

__all__ = ["Precision", "check_precision", "device_name", "precision_context", "resolve_device"]

Precision = Literal["float32", "tf32", "bf16"]


def resolve_device(device: str) -> torch.device:
    """A device by name: `auto` is the first GPU where there is one, Apple's (mps) where there is that, else the CPU.

    Raises:
        SpecError: an unknown name, or a device that this machine does not have.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        made = torch.device(device)
    except RuntimeError:
        made = torch.device("meta")
    if made.type not in ("cpu", "cuda", "mps"):
        raise SpecError(f"device = {device!r}: expected auto, cpu, cuda, cuda:N or mps")
    if made.type == "cuda" and not cuda:
        raise SpecError(f"device = {device!r}: this machine has no GPU that torch can use; choose cpu or auto")
    if made.type == "cuda" and made.index is not None and made.index >= torch.cuda.device_count():
        raise SpecError(f"device = {device!r}: this machine has {torch.cuda.device_count()}, cuda:0 onwards")
    if made.type == "mps" and not mps:
        raise SpecError(f"device = {device!r}: this machine has none; choose cpu or auto")
    return made


def device_name(device: torch.device) -> str:
    """What a result says of the machine: the processor or GPU, and threads."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    threads = torch.get_num_threads()
    return f"{device.type} ({name}, {threads} thread{'s' if threads > 1 else ''})"


def check_precision(precision: Precision, device: torch.device) -> None:
    """Refuse a number format that a device does not have.

    Raises:
        SpecError: TF32 elsewhere than on CUDA, bf16 on a GPU without it.
    """
    if precision == "tf32" and device.type != "cuda":
        raise SpecError(f"precision = tf32 on {device}: expected a CUDA device; choose float32 or bf16")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise SpecError(f"precision = bf16: {torch.cuda.get_device_name(device)} has none; choose float32 or tf32")


@contextlib.contextmanager
def precision_context(precision: Precision, device: torch.device) -> Iterator[None]:
    """Products of matrices and convolutions in a number format; torch's settings are put back afterwards.

    torch's own default on CUDA is TF32 for convolutions: here float32 means float32 for them too.

    Autocast keeps no copies of weights: it drops them only where the outermost context ends, and a step that finds
    those of the step before would never see what was learned.
    """
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions

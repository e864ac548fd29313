"""Devices by name, number formats where they exist, torch's settings put back."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from ident3d.baselines.devices import Precision, check_precision, device_name, precision_context, resolve_device
from ident3d.errors import SpecError

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without any, to be given some."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return monkeypatch


def test_auto_takes_the_first_there_is(gpus: pytest.MonkeyPatch) -> None:
    assert resolve_device("auto") == CPU
    gpus.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("mps")
    gpus.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")


def test_a_device_that_is_named_is_taken(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "is_available", lambda: True)
    gpus.setattr(torch.backends.mps, "is_available", lambda: True)
    for name in ("cpu", "cuda", "cuda:1", "mps"):
        assert resolve_device(name) == torch.device(name)
    with pytest.raises(SpecError, match=r"device = 'cuda:2': this machine has 2, cuda:0 onwards"):
        resolve_device("cuda:2")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps"])
def test_a_device_that_is_absent_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"device = '{name}': this machine has .*; choose cpu or auto"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["banana", "", "CPU", "gpu", "cuda:x", "cuda:-1", "meta", "xpu", "cpu cuda"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"device = '{name}': expected auto, cpu, cuda, cuda:N or mps"):
        resolve_device(name)


def test_the_name_of_a_cpu_tells_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert device_name(CPU).startswith("cpu (")
    assert device_name(CPU).endswith(", 1 thread)")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert device_name(CPU).endswith(", 4 threads)")


def test_the_name_of_a_cpu_where_linux_does_not_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: Path, encoding: str) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert device_name(CPU).startswith("cpu (riscv64, ")


def test_tf32_is_for_cuda() -> None:
    for name in ("cpu", "mps"):
        with pytest.raises(SpecError, match=f"precision = tf32 on {name}: expected a CUDA device"):
            check_precision("tf32", torch.device(name))
    check_precision("tf32", torch.device("cuda"))


def test_bf16_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(SpecError, match="precision = bf16: Old GPU has none; choose float32 or tf32"):
        check_precision("bf16", cuda)
    check_precision("float32", cuda)
    check_precision("bf16", CPU)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    check_precision("bf16", cuda)


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize(
    ("precision", "within", "dtype"),
    [("float32", "highest", torch.float32), ("tf32", "high", torch.float32), ("bf16", "highest", torch.bfloat16)],
)
def test_the_number_format_holds_within_and_ends_after(
    precision: Precision, within: str, dtype: torch.dtype, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2, 2)
    here = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    try:
        with precision_context(precision, CPU):
            assert torch.get_float32_matmul_precision() == within
            assert (x @ x).dtype == dtype
            with precision_context("float32", CPU):
                assert (x @ x).dtype == torch.float32
            assert torch.get_float32_matmul_precision() == within
        assert torch.get_float32_matmul_precision() == before
        with pytest.raises(KeyError), precision_context(precision, CPU):
            raise KeyError
        assert torch.get_float32_matmul_precision() == before
        assert (x @ x).dtype == torch.float32
    finally:
        torch.set_float32_matmul_precision(here)


@pytest.mark.parametrize("before", [True, False])
def test_convolutions_are_in_tf32_only_where_it_is_asked_for(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    expected: dict[Precision, bool] = {"float32": False, "tf32": True, "bf16": False}
    for precision, within in expected.items():
        with precision_context(precision, CPU):
            assert torch.backends.cudnn.allow_tf32 == within
        assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_has_a_name_and_its_formats_differ() -> None:
    cuda = resolve_device("cuda:0")
    assert device_name(cuda).startswith("cuda (")
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(cuda)
    exact = (x.double() @ x.double()).float()
    errors = {}
    for precision in ("float32", "tf32", "bf16"):
        with precision_context(precision, cuda):
            errors[precision] = float((x @ x - exact).abs().max())
    assert errors["float32"] < errors["tf32"] / 10 < errors["bf16"] / 20

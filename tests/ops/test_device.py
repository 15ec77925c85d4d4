"""What a device can do: bf16, FlexAttention, compiled blocks."""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

from ops.device import compiles, compute_dtype, use_libdevice_of_triton, uses_flex

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("has, dtype", [
    ("", FP32), ("avx512_bf16", BF16), ("avx512_bf16 avx512_fp16", FP32), ("amx_bf16 avx512_fp16", BF16),
    ("avx512_fp16", FP32)])
def test_auto_is_bf16_where_a_cpu_is_faster_in_it(has, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has.split(), True))
    assert compute_dtype("auto", CPU) == dtype


@pytest.mark.parametrize("capability, dtype, compiled, widest", [
    ((6, 1), FP32, False, 0), ((7, 0), FP32, False, 0), ((7, 5), FP32, True, 64),  # of shared memory, little
    ((8, 0), BF16, True, 128)])
def test_what_gpus_can_do(capability, dtype, compiled, widest, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert compute_dtype("auto", GPU) == dtype and compute_dtype("fp16", GPU) == torch.float16
    assert compiles(None, GPU) == compiled and not compiles(False, GPU)
    assert not compiles(None, CPU) and compiles(True, CPU)
    for head_dim in (8, 15, 16, 64, 65, 128):
        assert uses_flex(head_dim, GPU) == (16 <= head_dim <= widest) and not uses_flex(head_dim, CPU)


def test_compiled_blocks_use_the_libdevice_of_triton(tmp_path, monkeypatch):
    """Otherwise torch warns four times a run, and nodes with a CUDA toolkit may round otherwise."""
    path = tmp_path / "backends/nvidia/lib/libdevice.10.bc"
    path.parent.mkdir(parents=True)
    path.touch()
    for origin, variable, used in ((None, {}, None), (tmp_path / "__init__.py", {}, str(path)),
                                   (tmp_path / "__init__.py", {"TRITON_LIBDEVICE_PATH": "mine"}, "mine")):
        found = origin and SimpleNamespace(origin=str(origin))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        monkeypatch.setattr(os, "environ", variable)
        use_libdevice_of_triton()
        assert os.environ.get("TRITON_LIBDEVICE_PATH") == used

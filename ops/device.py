"""Settings of the process that make steps faster, or the same on all nodes."""

import ctypes
import importlib.util
import os
from pathlib import Path

import torch


def keep_freed_memory():
    """Makes glibc keep freed memory for the next tensors. By default glibc returns large blocks to the
    kernel, and then each page costs a page fault when it is written again.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # only glibc has it
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_MMAP_MAX, 0)


def use_libdevice_of_triton():
    """Makes torch use the libdevice that comes with Triton. Then compiled blocks round the same way on nodes
    with and without a CUDA toolkit, and torch doesn't warn that it found no toolkit.
    """
    if triton := importlib.util.find_spec("triton"):
        path = Path(triton.origin).parent / "backends/nvidia/lib/libdevice.10.bc"
        if path.exists():
            os.environ.setdefault("TRITON_LIBDEVICE_PATH", str(path))


def compiles(choice: bool | None, device: torch.device) -> bool:
    """Whether blocks are compiled: `choice` if given (--compile, --no-compile), otherwise on newer GPUs."""
    if choice is None:  # Triton and CUDA 13 need compute capability 7.5
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 5)
    return choice


def cpu_is_faster_in_bf16() -> bool:
    """Whether matrix products on this CPU take less time in bf16 than in fp32. With AMX they do, and on AMD's
    CPUs with avx512_bf16. Without AMX, which virtual machines can hide, they take twice as long on Intel's
    Xeons. These have avx512_fp16, which AMD's don't have.
    """
    has = torch.cpu.get_capabilities().get
    return has("amx_bf16", False) or has("avx512_bf16", False) and not has("avx512_fp16")


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of --precision. `auto` means bf16 if the hardware is faster in it (CUDA from sm80, most CPUs
    with avx512_bf16), otherwise fp32.
    """
    if precision == "auto":
        fast = (torch.cuda.get_device_capability(device) >= (8, 0) if device.type == "cuda"
                else cpu_is_faster_in_bf16())
        precision = "bf16" if fast else "fp32"
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return getattr(torch, names.get(precision, precision))  # checkpoints store torch's names


def uses_flex(head_dim: int, device: torch.device) -> bool:
    """Whether `device` can run FlexAttention, which skips the blocks that a mask excludes. It needs Triton,
    head_dim ≥ 16 and, for head_dim > 64, more shared memory than GPUs before sm_80 have.
    """
    if device.type != "cuda" or head_dim < 16:
        return False
    return torch.cuda.get_device_capability(device) >= ((7, 5) if head_dim <= 64 else (8, 0))

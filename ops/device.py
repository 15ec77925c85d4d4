"""Settings of a process that make its steps faster, or alike on all nodes."""

import ctypes
import importlib.util
import os
from pathlib import Path


def keep_freed_memory():
    """Makes glibc keep freed memory for the next tensors. By default it returns large blocks to the
    kernel, and each page costs a fault when it is written again.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # no other C library has it
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_MMAP_MAX, 0)


def use_libdevice_of_triton():
    """Makes compiled blocks round alike on nodes with and without a CUDA toolkit, and keeps torch from
    warning that it found none.
    """
    if triton := importlib.util.find_spec("triton"):
        path = Path(triton.origin).parent / "backends/nvidia/lib/libdevice.10.bc"
        if path.exists():
            os.environ.setdefault("TRITON_LIBDEVICE_PATH", str(path))

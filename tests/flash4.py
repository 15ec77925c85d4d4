"""A package that pretends to be FlashAttention 4, and an H100 that is not there. torch switches kernels of
GPUs alone, so here a CPU has these operators, too: they compute by torch's kernel for CPUs or, after the
switch, by the package, which torch's own code calls.
"""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn.attention import _fa4, current_flash_attention_impl

import ddp_utils
from cli.errors import at_end
from ops.flash_attention_4 import take

# the functions of flash-attn-4 4.0.0b18 that torch calls; newer ones return more than two values
PACKAGE = '''
import itertools

import torch

more = ()  # what _flash_attn_fwd returns beside the two
count = itertools.count(1)


def found(name, result):  # (B, H, T, D)
    return result


def noise(result):
    """Changes one number in its last bits, differently in each call."""
    result = result.clone()
    result[0, 0, -1, 0] *= 1 + next(count) / 64
    return result


def scores(q, k, scale, causal):  # (B, H, T, T)
    found = q.transpose(1, 2).float() @ k.transpose(1, 2).float().mT * (scale or q.size(-1) ** -0.5)
    seen = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).tril()
    return found.masked_fill(~seen, -torch.inf) if causal else found


def _flash_attn_fwd(q, k, v, *, softmax_scale, causal, out, return_lse, **rest):  # (B, T, H, D)
    s = scores(q, k, softmax_scale, causal)
    out.copy_(found("y", s.softmax(-1) @ v.transpose(1, 2).float()).transpose(1, 2))
    return out, s.logsumexp(-1), *more


def _flash_attn_bwd(q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic, **rest):
    s = (scores(q, k, softmax_scale, causal) - lse[..., None]).exp()
    g, a, b, c = (t.transpose(1, 2).float() for t in (dout, q, k, v))
    ds = s * (g @ c.mT - (g * out.transpose(1, 2).float()).sum(-1, keepdim=True))
    ds = ds * (softmax_scale or q.size(-1) ** -0.5)
    results = [found(*pair) for pair in (("dq", ds @ b), ("dk", ds.mT @ a), ("dv", s.mT @ g))]
    if not deterministic:
        results[0] = noise(results[0])
    return tuple(t.transpose(1, 2).to(q.dtype) for t in results)
'''


def changed(name: str, text: str) -> str:
    """A package in which one of y, dq, dk and dv is another: a formula of `result`."""
    return PACKAGE + f"\n\ndef found(name, result):\n    return {text} if name == '{name}' else result\n"


def install(directory: Path, text: str = PACKAGE, version: str = "4.0.0b18") -> Path:
    """Writes the package as pip would leave it."""
    info = directory / f"flash_attn_4-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n")
    (directory / "flash_attn" / "cute").mkdir(parents=True)  # flash_attn itself has no __init__.py
    (directory / "flash_attn" / "cute" / "__init__.py").write_text("from . import interface\n")
    (directory / "flash_attn" / "cute" / "interface.py").write_text(text)
    return directory


GPU = torch.device("cuda", 0)
set_modes = ddp_utils.set_modes
randn = torch.randn
aten = torch.ops.aten


def set_modes_as_on_a_gpu(model, run):
    """set_modes of a trainer on a CPU, which takes it for attention as on a GPU."""
    modes = set_modes(model, run)
    torch.use_deterministic_algorithms(not run.args.fast)
    if not run.args.fast:
        seen = SimpleNamespace(**vars(run) | {"world": SimpleNamespace(device=GPU), "say": run.say})
        modes["flash_attention_4"] = take(model, seen, ddp_utils.all_gather, at_end)
    return modes


def randn_here(*shape, device=None, **options):
    """torch.randn of a few numbers on the CPU for many on a GPU."""
    return randn(shape[0], 2, 32, 2, shape[-1], **options) if device == "cuda" else randn(
        *shape, device=device, **options)


def forward(q, k, v, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if active():
        return _fa4._fa4_scaled_dot_product_flash_attention_forward_impl(
            q, k, v, dropout, is_causal, return_debug_mask, scale=scale)
    y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, scale=scale)
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return y, lse, None, None, q.size(2), k.size(2), seed, offset, q.new_empty(0)


def backward(grad, q, k, v, y, lse, *args, scale=None):
    if active():
        return _fa4._fa4_scaled_dot_product_flash_attention_backward_impl(
            grad, q, k, v, y, lse, *args, scale=scale)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, y, lse, *args[4:6], scale=scale)


@contextlib.contextmanager
def gpu(directory: Path | None, capability=(9, 0)):
    """Here there is a GPU of this capability, and the packages of a directory."""
    strict = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("aten", "IMPL") as operators:
        for name, function in (("", forward), ("_backward", backward)):
            operators.impl(f"_scaled_dot_product_flash_attention{name}", function, "CPU")
        if directory:
            patch.syspath_prepend(str(directory))
        patch.setattr(ddp_utils, "set_modes", set_modes_as_on_a_gpu)
        patch.setattr(torch, "randn", randn_here)
        patch.setattr(torch.cuda, "get_device_capability", mock.Mock(return_value=capability))
        # which also asks whether the tensors are on a GPU
        why_not = None if capability[0] in (9, 10) else "FA4 requires compute capability 9.0 or 10.0"
        patch.setattr(_fa4, "_fa4_common_support_error", mock.Mock(return_value=why_not))
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(strict)
            at_end.close()
            for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
                del sys.modules[name]
            _fa4._fa4_import_module.cache_clear()
            _fa4._get_device_major.cache_clear()


def active() -> bool:
    """Whether torch has it in the place of its own kernels for GPUs."""
    now = current_flash_attention_impl()
    table = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_backward")
    assert ("_fa4.py" in table) == (now == "FA4")
    return now == "FA4"

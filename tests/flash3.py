"""A package that pretends to be FlashAttention 3, and an H100 that is not there. torch's switch registers the
package for GPUs, so a CPU never calls it; on a GPU it computes by torch's products.
"""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import ddp_utils
from cli.errors import at_end
from ops.flash_attention_3 import take

# with the operators of flash_attn_3 3.0.0; `calls` has what each call was asked for
PACKAGE = '''
import torch

calls = []
library = torch.library.Library("flash_attn_3", "DEF")
library.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, "
    "Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, float? softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, int attention_chunk, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin) -> "
    "(Tensor, Tensor, Tensor, Tensor)")
library.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, "
    "Tensor(b!)? dk, Tensor(c!)? dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, float? softmax_scale, bool is_causal, "
    "int window_size_left, int window_size_right, float softcap, bool deterministic, int sm_margin) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)")


def scores(q, k, scale, is_causal):  # (B, H, T, T)
    found = q.transpose(1, 2).float() @ k.transpose(1, 2).float().mT * (scale or q.size(-1) ** -0.5)
    seen = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).tril()
    return found.masked_fill(~seen, -torch.inf) if is_causal else found


def fwd(*args):
    q, k, v, out, scale, is_causal, splits = *args[:3], args[6], args[23], args[24], args[31]
    calls.append(("fwd", tuple(q.shape), {"is_causal": is_causal, "num_splits": splits}))
    s = scores(q, k, scale, is_causal)
    out.copy_((s.softmax(-1) @ v.transpose(1, 2).float()).transpose(1, 2))
    return out.clone(), s.logsumexp(-1), q.new_empty(0), q.new_empty(0)


def bwd(*args):
    dout, q, k, v, out, lse, dq, dk, dv = args[:9]
    scale, is_causal, deterministic = *args[15:17], args[20]
    calls.append(("bwd", tuple(q.shape), {"is_causal": is_causal, "deterministic": deterministic}))
    s = (scores(q, k, scale, is_causal) - lse[..., None]).exp()
    g, a, b, c = (t.transpose(1, 2).float() for t in (dout, q, k, v))
    ds = s * (g @ c.mT - (g * out.transpose(1, 2).float()).sum(-1, keepdim=True))
    ds = ds * (scale or q.size(-1) ** -0.5)
    for to, found in ((dq, ds @ b), (dk, ds.mT @ a), (dv, s.mT @ g)):
        to.copy_(found.transpose(1, 2))
    return tuple(q.new_empty(0) for _ in range(5))


for name, function in (("fwd", fwd), ("bwd", bwd)):
    library.impl(name, function, "CUDA")
'''


def install(directory: Path, text: str = PACKAGE, version: str = "3.0.0") -> Path:
    """Writes the package as pip would leave it."""
    info = directory / f"flash_attn_3-{version}.dist-info"
    info.mkdir(parents=True)
    (directory / "flash_attn_3").mkdir()  # which has the compiled code
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash_attn_3\nVersion: {version}\n")
    (directory / "flash_attn_interface.py").write_text(text)
    return directory


GPU = torch.device("cuda", 0)
set_modes = ddp_utils.set_modes


def set_modes_as_on_a_gpu(model, run):
    """set_modes of a trainer on a CPU, which takes it for attention as on a GPU."""
    modes = set_modes(model, run)
    if not run.args.fast:
        seen = SimpleNamespace(**vars(run) | {"world": SimpleNamespace(device=GPU), "say": run.say})
        modes["flash_attention_3"] = take(model, seen, ddp_utils.all_gather, at_end)
    return modes


@contextlib.contextmanager
def gpu(directory: Path | None, capability=(9, 0)):
    """Here there is a GPU of this capability, and the packages of a directory."""
    strict = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        if directory:
            patch.syspath_prepend(str(directory))
        patch.setattr(ddp_utils, "set_modes", set_modes_as_on_a_gpu)
        patch.setattr(torch.cuda, "get_device_capability", mock.Mock(return_value=capability))
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(strict)
            at_end.close()
            if library := getattr(sys.modules.pop("flash_attn_interface", None), "library", None):
                library._destroy()  # the next is to define its operators anew


def active() -> bool:
    """Whether torch has it in the place of its own kernels for GPUs."""
    now = torch.nn.attention.current_flash_attention_impl()
    table = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_backward")
    assert ("_fa3.py" in table) == (now == "FA3")
    return now == "FA3"

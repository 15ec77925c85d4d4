"""Times the pieces of a training step on one GPU: copies, matrix products, attention, the loss.

    python bench/kernels.py                               # all of it
    python bench/kernels.py attention loss --json FILE

Each measurement is printed at once, as JSON on stdout (and appended to FILE) and for people on stderr. Times
are medians between CUDA events. Matrix products have the shapes of GPT-2 124M and HRM 1b. They run with
CUBLAS_WORKSPACE_CONFIG as ddp_utils.py sets it, then without it in another process, because torch reads it
only once. On a CPU the shapes are tiny, to try this out.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import timeit
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PRODUCTS = [  # (name, rows, channels in, channels out)
    ("gpt2 qkv", 65536, 768, 2304), ("gpt2 attn_out", 65536, 768, 768), ("gpt2 up", 65536, 768, 3072),
    ("gpt2 down", 65536, 3072, 768), ("gpt2 head", 16384, 768, 50304), ("hrm gqkv", 24576, 1536, 6144),
    ("hrm attn_out", 24576, 1536, 1536), ("hrm gate_up", 24576, 1536, 8192), ("hrm down", 24576, 4096, 1536)]
ATTENTION = [(64, 12, 1024, 64), (24, 12, 1024, 128)]  # (B, H, T, D) of GPT-2 124M and of HRM 1b
progress = SimpleNamespace(row=0, said=0, command=[])  # in a part; `said` by an earlier process; to go on


def in_home(text: str) -> Path:
    """A type for argparse: a path. A shell leaves the ~ in --json=~/x."""
    return Path(text).expanduser()


def milliseconds(function, device, repeats: int = 10) -> float:
    """The median time of a call, after three warm-up calls."""
    import torch
    for _ in range(3):
        function()
    if device.type == "cpu":
        return 1000 * statistics.median(timeit.repeat(function, number=1, repeat=repeats))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:  # without waiting in between, so the GPU does not wait for Python
        function()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def attempt(say, row: dict, measure) -> None:
    """Prints a row with the result of measure(), or with the reason why it's refused here. After an assertion
    in a kernel this process can't use the GPU any more: another one replaces it and goes on with the next
    row.
    """
    import torch
    progress.row += 1
    if progress.row <= progress.said:
        return
    try:
        say(**row, **measure())
    except Exception as error:  # of a kernel that is not for this shape or GPU
        say(**row, error=(str(error).strip() or type(error).__name__).splitlines()[0][:200])
        if isinstance(error, torch.AcceleratorError):
            os.execv(sys.executable, [*progress.command, "--said", str(progress.row)])


def copy(say, device) -> None:
    import torch
    source = torch.randn(2**30 if device.type == "cuda" else 2**20, device=device, dtype=torch.bfloat16)

    def measure():
        ms = milliseconds(partial(torch.empty_like(source).copy_, source), device)
        return {"ms": ms, "gb_per_sec": 2 * source.nbytes / ms / 1e6}  # read and written

    attempt(say, {"gb": source.nbytes / 1e9}, measure)


def matmul(say, device) -> None:
    import torch
    for name, rows, width, out in PRODUCTS:
        if device.type == "cpu":
            rows, width, out = rows // 256, width // 16, out // 16
        x, w, g = (torch.randn(shape, device=device, dtype=torch.bfloat16)
                   for shape in ((rows, width), (out, width), (rows, out)))
        calls = {"forward": partial(torch.mm, x, w.T), "dgrad": partial(torch.mm, g, w),
                 "wgrad": partial(torch.mm, g.T, x)}
        if "head" in name:  # as the loss adds up its chunks
            total = torch.zeros(out, width, device=device)
            calls["wgrad += float32"] = partial(torch.addmm, total, g.T, x, out_dtype=total.dtype, out=total)
        for what, call in calls.items():
            def measure(call=call, flops=2 * rows * width * out):
                ms = milliseconds(call, device)
                return {"ms": ms, "tflops": flops / ms / 1e9}
            attempt(say, {"name": name, "shape": [rows, width, out], "what": what,
                          "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")}, measure)


def attention(say, device) -> None:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex = torch.compile(flex_attention, dynamic=False)

    def measure(backend, forward, inputs, grad) -> dict:
        def both():
            return torch.autograd.grad(forward(), inputs, grad)

        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            return {"equal": all(map(torch.equal, both(), both())),
                    "forward_ms": milliseconds(forward, device), "both_ms": milliseconds(both, device)}

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    for (B, H, T, D), strict in itertools.product(ATTENTION, (False, True)):
        torch.use_deterministic_algorithms(strict)
        B, T = (B, T) if device.type == "cuda" else (2, 64)
        q, k, v, grad = (torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16).transpose(1, 2)
                         for _ in range(4))  # laid out as in the models
        inputs = [t.requires_grad_() for t in (q, k, v)]
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True))
        for backend in backends:
            attempt(say, {"shape": [B, H, T, D], "strict": strict, "backend": backend.name,
                          "chosen": backend == chosen}, partial(measure, backend, forward, inputs, grad))
        if device.type == "cuda":  # a CPU has no backward pass of it
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=device)
            attempt(say, {"shape": [B, H, T, D], "strict": strict, "backend": "FLEX", "chosen": False},
                    partial(measure, None, partial(flex, *inputs, block_mask=mask), inputs, grad))


def configs_since(known: list) -> dict:
    """The kernels that Inductor has compiled since the last call, and the shape it picked for each."""
    import torch._inductor.runtime.triton_heuristics as heuristics
    tuned = [o for o in gc.get_objects() if heuristics.CachingAutotuner in type(o).__mro__]
    found = [o for o in tuned if len(o.launchers) == 1 and not any(o is other for other in known)]
    known += found  # keeps their addresses from being reused
    return {kernel.fn.__name__: str(kernel.launchers[0].config) for kernel in found}


def loss(say, device, chunks=(4096, 16384, 32768)) -> None:
    import torch

    from model import linear_cross_entropy
    from ops.cross_entropy import LOSS_ROWS
    known = []
    on_gpu = device.type == "cuda"
    rows, width, table, ids, divisor = (65536, 768, 50304, 50257, 1) if on_gpu else (512, 32, 512, 500, 128)
    torch.use_deterministic_algorithms(True)
    hidden = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(table, width, device=device).mul_(0.02).requires_grad_()
    targets = torch.randint(ids, (rows,), device=device)

    def measure(compiled):
        call = partial(linear_cross_entropy, hidden, weight, targets, ids, compiled=compiled)
        begin = time.perf_counter()
        found = {"loss": call()[1].item() / rows, "first_s": time.perf_counter() - begin}
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found["ms"] = milliseconds(call, device)
        if compiled:
            found["configs"] = configs_since(known)
        return found | {"gb": (torch.cuda.max_memory_allocated() - before) / 2**30}

    for compiled, chunk in ((False, 4096), *((True, chunk) for chunk in chunks)):
        LOSS_ROWS[device.type] = chunk // divisor
        torch.compiler.reset()  # else another size makes a kernel for all sizes
        attempt(say, {"compiled": compiled, "rows": chunk // divisor}, partial(measure, compiled))


PARTS = {"copy": copy, "matmul": matmul, "attention": attention, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=in_home, help="also append the lines to this file")
    parser.add_argument("--rows", type=int, help="rows at a time in the compiled loss (three sizes)")
    parser.add_argument("--said", type=int, default=0, help=argparse.SUPPRESS)  # see attempt
    parser.add_argument("--no-workspace", action="store_true", help=argparse.SUPPRESS)  # the second matmul
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if not args.no_workspace:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no GPU here: give --device cpu to try this out.")
    torch.utils.deterministic.fill_uninitialized_memory = False

    def say(**found):
        line = json.dumps({"kind": part} | found)
        print(line, flush=True)
        if args.json:
            with open(args.json, "a") as file:
                file.write(line + "\n")
        print(part, *(f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}"
                      for key, value in found.items()), sep="  ", file=sys.stderr, flush=True)

    parts = args.parts or list(PARTS)
    options = [f"--{name}={value}" for name in ("device", "json", "rows") if (value := getattr(args, name))]
    for i, part in enumerate(parts):
        progress.row, progress.said = 0, args.said if i == 0 else 0
        progress.command = [sys.executable, __file__, *parts[i:], *options,
                            *["--no-workspace"] * args.no_workspace]
        chosen = {"chunks": [args.rows]} if part == "loss" and args.rows else {}
        PARTS[part](say, torch.device(args.device), **chosen)
        if part == "matmul" and not args.no_workspace:
            subprocess.run([sys.executable, __file__, part, "--no-workspace", *options], check=True)


if __name__ == "__main__":
    main()

"""A rehearsal for an H200 on any machine: what torch's compiler makes of the models for sm_90.

    python bench/rehearsal.py               # strict, as the trainers run; minutes on two cores
    python bench/rehearsal.py --fast        # cuDNN's attention, no emulated casts, not deterministic
    python bench/rehearsal.py --self-test   # a graph break, a recompile and the like must be noticed

torch's CUDA build generates kernels without a GPU, once it is told what the GPU would be. Each model trains
for some steps and is evaluated, on tensors that have a shape but no memory, with blocks and loss compiled as
by the trainers. The tables count what a step launches, moves and keeps. Exit code 1: a graph break, a
recompile, or a kernel too many. The figures in the columns called prediction follow from the counts and the
rates below; nothing here is measured.
"""

import argparse
import contextlib
import copy
import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import model as models
import train_gpt2
import train_hrm
import train_mlm
from model import GPT2, HRM, MLM, Block, num_params

# Assumed: what an H200 does at best, times the fraction of it that kernels of this size reach.
PRODUCTS = 0.60 * 989e12  # FLOP/s of matrix products in bfloat16
MEMORY = 0.80 * 4.8e12  # bytes/s of kernels that move data
ATTENTION = {"flash": 350e12, "cudnn": 450e12, "flex": 250e12}  # FLOP/s of what the mask leaves, both passes
OPTIMIZER = 4 + 8 + 28  # bytes a parameter: the norm of the gradients, clipping them, AdamW
LOSS = "_rows_loss"
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
                       max_threads_per_multi_processor=2048, max_threads_per_block=1024,
                       regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448)


@contextlib.contextmanager
def pretend_gpu():
    """Answers for a GPU where Inductor asks for one. Not around Dynamo, which would look for streams."""
    import triton.runtime
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget
    interface = {"current_device": 0, "get_device_properties": H200}
    module = {**interface, "is_available": True, "device_count": 1, "get_device_capability": (9, 0),
              "_exchange_device": 0, "_maybe_exchange_device": 0,
              "get_rng_state": torch.get_rng_state(), "set_rng_state": None}
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32),
                             get_current_device=lambda: 0)
    with (mock.patch.multiple(torch.cuda, **{k: mock.Mock(return_value=v) for k, v in module.items()}),
          mock.patch.multiple(CudaInterface, **{k: mock.Mock(return_value=v) for k, v in interface.items()}),
          mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
          mock.patch.object(fake_tensor, "init_gpu_context"),
          mock.patch.object(triton.runtime.driver, "_active", driver)):
        yield


@dataclass
class Graph:
    """One pass of something compiled: what a single run of it launches and moves."""

    part: str  # block, loss or masks
    way: str  # forward, backward, or no grad
    triton: int = 0  # kernels that Inductor generated
    products: int = 0  # matrix products, by cuBLAS
    attention: int = 0  # forward or backward, one call each
    recomputed: int = 0  # forward passes of attention in a backward pass
    triton_bytes: int = 0
    extern_bytes: int = 0  # of products and attention
    kept: int = 0  # bytes for the backward pass, without parameters
    product_flops: int = 0
    attention_flops: int = 0  # of full T x T
    runs: int = 0  # in the step that is counted
    rows: int = 0  # of its first input
    code: str = ""


class Rehearsal:
    """Has Inductor generate code for sm_90 and counts. What then runs is the graph before."""

    def __init__(self):
        self.graphs: list[Graph] = []
        self.backends, self.compiled = {}, Counter()  # how often Dynamo compiled each part
        self.counting = self.inside = False
        self.eager, self.eager_flops = Counter(), 0  # bytes and FLOPs of what is not compiled

    def backend(self, part: str):
        """A backend of torch.compile; the same one for all blocks, or Dynamo would compile each of them."""
        return self.backends.setdefault(part, functools.partial(self.compile, part))

    def compile(self, part: str, gm, inputs):
        from torch._inductor.compile_fx import compile_fx
        self.compiled[part] += 1
        return compile_fx(gm, inputs, inner_compile=functools.partial(self.lower, part))

    def lower(self, part: str, gm, inputs, **options):
        """Counts a graph of ATen operations. It was traced on the CPU, because autograd on fake CUDA tensors
        needs a driver, so what is lowered is a copy on the GPU.
        """
        from torch._guards import TracingContext, detect_fake_mode
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.graph import GraphLowering
        way = "no grad" if options.get("is_inference") else "forward"
        way = "backward" if options.get("is_backward") else way
        graph = Graph(part, way, rows=next(t.size(0) for t in inputs if isinstance(t, Tensor)))
        self.graphs.append(graph)
        self.count_flops(graph, gm)
        returned = TracingContext.get().fw_metadata.num_forward if way == "forward" else None
        on_gpu = copy.deepcopy(gm)
        for module in on_gpu.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}

        def moved(t):
            with detect_fake_mode(inputs):
                return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cuda")

        def generate(lowering):
            self.count_kernels(graph, lowering)
            return SimpleNamespace(call=lambda args: None)

        with pretend_gpu(), mock.patch.object(GraphLowering, "compile_to_module", generate):
            compile_fx_inner(on_gpu, tree_map_only(Tensor, moved, list(inputs)), **options)

        def run(args: list):
            before, self.inside = self.inside, True
            outputs = gm.forward(*args)
            self.inside = before
            graph.runs += self.counting
            if returned is not None and not graph.kept:
                parameters = [args[i] for i in options["static_input_idxs"]]
                owned = {t.untyped_storage()._cdata for t in parameters}
                kept = [t.untyped_storage() for t in outputs[returned:] if isinstance(t, Tensor)]
                graph.kept = sum({s._cdata: s.nbytes() for s in kept if s._cdata not in owned}.values())
            return outputs

        run._boxed_call = True
        return run

    def count_flops(self, graph: Graph, gm) -> None:
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            args, kwargs = tree_map_only(torch.fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
            # in a block that is computed again, attention is an argument of run_and_save_rng_state
            name = " ".join(str(a) for a in (node.target, *args[:2]) if not isinstance(a, Tensor))
            if "scaled_dot_product" in name or "flex_attention" in name:
                backward = "backward" in name
                graph.attention += 1
                graph.recomputed += graph.way == "backward" and not backward
                q = next(t for t in args if isinstance(t, Tensor) and t.ndim == 4)  # or what has its shape
                graph.attention_flops += (10 if backward else 4) * q.numel() * q.size(2)
            elif formula := flop_registry.get(getattr(node.target, "overloadpacket", None)):
                graph.product_flops += formula(*args, **kwargs, out_val=node.meta["val"])

    def count_kernels(self, graph: Graph, lowering) -> None:
        code = graph.code = lowering.codegen()[0].value
        graph.triton = len(re.findall(r"^ *triton_(?!tem)\w+\.run\(", code, re.MULTILINE))
        graph.products = len(re.findall(r"^ *extern_kernels\.\w+\(", code, re.MULTILINE))
        for node in lowering.scheduler.nodes:
            size = node.get_read_write_buffers_sizes()
            if node.is_extern() or node.is_template():
                graph.extern_bytes += size
            else:
                graph.triton_bytes += size


class EagerBytes(TorchDispatchMode):
    """Counts the bytes that operations outside of compiled graphs read and write."""

    supports_higher_order_operators = True

    def __init__(self, rehearsal: Rehearsal):
        super().__init__()
        self.rehearsal = rehearsal

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # or Dynamo would run what is compiled as it stands

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.rehearsal.inside:
            return out
        name = func.overloadpacket.__name__
        if formula := flop_registry.get(func.overloadpacket):
            self.rehearsal.eager_flops += formula(*args, **(kwargs or {}), out_val=out)
        elif not (func.is_view or "empty" in name or name == "device"):
            sizes = [t.numel() * t.element_size() for t in tree_leaves((args, kwargs, out))
                     if isinstance(t, Tensor)]
            self.rehearsal.eager[name] += sum(sizes)
        return out


@dataclass(frozen=True)
class Case:
    """A model as bench/gpu.sh trains it, on one GPU."""

    name: str
    model_class: type
    size: dict
    batch: int
    seq_len: int
    mode: str
    # What Dynamo should compile: blocks and loss once to train and once to evaluate, and more where said.
    graphs: dict
    modern: bool = False

    def config(self):
        fields = self.model_class.Config.__dataclass_fields__
        chosen = {key: value for key, value in self.size.items() if key in fields}
        return self.model_class.Config(**chosen | {"seq_len": self.seq_len}
                                       | ({"modern": True, "qk_norm": True} if self.modern else {}))


def cases() -> list[Case]:
    gpt2 = Case("GPT-2 124M", GPT2, train_gpt2.SIZES["gpt2"], 64, 1024, "none", {"block": 2, LOSS: 2})
    # blocks without a graph, with one, and with one but no gradient of their input (bp_steps 2)
    hrm = Case("HRM 1b", HRM, train_hrm.SIZES["1b"], 24, 1024, "none", {"block": 4, LOSS: 2})
    # the first block, which has no norm, local blocks, global ones; two masks
    mlm = Case("MLM base", MLM, train_mlm.SIZES["base"], 64, 512, "none",
               {"block": 6, LOSS: 2, "create_block_mask": 4})
    return [gpt2, replace(gpt2, name="GPT-2 124M modern", modern=True),
            *(replace(hrm, mode=mode) for mode in ("none", "selective", "block")),
            *(replace(mlm, mode=mode) for mode in ("none", "selective"))]


def flash(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False)[0]


def cudnn(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout_p, is_causal,
                                                              False)[0]


def rehearse(case: Case, attention) -> tuple[Rehearsal, nn.Module, list[str]]:
    """Trains and evaluates; returns what was counted in one training step, the model, and what is wrong."""
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode
    torch._dynamo.reset()
    counters.clear()
    rehearsal = Rehearsal()

    def compiled_once(function):
        return torch.compile(function, backend=rehearsal.backend(function.__name__))

    with torch.device("meta"):
        model = case.model_class(case.config())
    with (FakeTensorMode(allow_non_fake_inputs=True),
          # without a device torch cannot choose what a GPU would, and FlexAttention takes no CPU
          mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
          mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None),
          mock.patch.object(models.MLMConfig, "uses_flex", lambda self, device: True),
          mock.patch.object(Block, "flex_attention", None),
          mock.patch.dict(models.LOSS_ROWS, cpu=models.LOSS_ROWS["cuda"]),
          mock.patch.object(models, "compiled_once", functools.cache(compiled_once))):
        model.to_empty(device="cpu")
        model.compute_dtype, model.compile_loss = torch.bfloat16, True
        for block in model.modules():
            if isinstance(block, Block):
                block.checkpointing = case.mode
                block.compile(backend=rehearsal.backend("block"))

        def step(**example) -> None:
            model(**model.example(case.batch, "cpu", **example))[0].backward()
            model.zero_grad()

        def evaluate() -> None:
            model.eval()
            with torch.no_grad():
                model(**model.example(case.batch, "cpu"))
            model.train()

        ramp = ({"bp_steps": 2}, {"bp_steps": 5}) if case.model_class is HRM else ({},)
        for example in ramp:
            step(**example)
        evaluate()
        before = rehearsal.compiled.copy()
        rehearsal.counting = True
        with EagerBytes(rehearsal):
            step()
        rehearsal.counting = False
        for example in ramp:
            step(**example)
        evaluate()
    wrong = [f"graph break: {reason.splitlines()[0]}" for reason in counters["graph_break"]]
    if again := rehearsal.compiled - before:
        wrong.append(f"recompiles after the first step and evaluation: {dict(again)}")
    if before != case.graphs:
        wrong.append(f"graphs {dict(before)} instead of {case.graphs}")
    wrong += [f"{g.part}: the backward pass of checkpointing {case.mode} computes attention again"
              for g in rehearsal.graphs if g.recomputed and case.mode != "block"]
    loss = next(g for g in rehearsal.graphs if g.part == LOSS)
    rows, columns = loss.rows, model.config.padded_vocab
    if (loss.triton_bytes > 3.05 * 2 * rows * columns
            or f"empty_strided_cuda(({rows}, {columns})" in loss.code):
        wrong.append("the loss takes more than to read the logits twice and to overwrite them once")
    return rehearsal, model, [f"{case.name}, checkpointing {case.mode}: {text}" for text in wrong]


def attended(model) -> float:
    """The part of T x T that attention computes. The MLM's documents are taken to be longer than its rows."""
    c = model.config
    if not isinstance(model, MLM):
        return 0.5
    blocks = c.seq_len // 128  # FlexAttention skips blocks of 128 x 128 that a mask leaves empty
    local = (3 * blocks - 2) / blocks**2  # with a window of 128, the diagonal and its neighbours remain
    is_local = [block.is_local for block in model.transformer["blocks"]]
    return 1 - (1 - local) * sum(is_local) / len(is_local)


def table(title: str, columns: str, rows: list[list]) -> None:
    names = columns.split(", ")
    print(f"\n{title}\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def report(done: list, attention: str) -> None:
    graphs, steps = [], []
    for case, rehearsal, model in done:
        rows = Counter()  # graphs that differ in nothing but their runs are one row
        for g in rehearsal.graphs:
            part, counts = "loss" if g.part == LOSS else g.part, (g.triton, g.products, g.attention)
            sizes = (g.triton_bytes, g.extern_bytes, g.kept)
            rows[(part, g.way, *map(str, counts), *(f"{n / 1e6:,.0f}" for n in sizes))] += g.runs
        graphs += [[case.name, case.mode, *row[:2], str(runs), *row[2:]] for row, runs in rows.items()]
        total = {name: sum(g.runs * getattr(g, name) for g in rehearsal.graphs) for name in (
            "triton", "triton_bytes", "kept", "product_flops", "attention_flops")}
        products = rehearsal.eager_flops + total["product_flops"]
        scores = attended(model) * total["attention_flops"]
        moved = [total["triton_bytes"], sum(rehearsal.eager.values()), OPTIMIZER * num_params(model)]
        kind = "flex" if isinstance(model, MLM) else attention
        seconds = products / PRODUCTS + scores / ATTENTION[kind] + sum(moved) / MEMORY
        steps.append([case.name, case.mode, f"{case.batch} x {case.seq_len}", f"{total['triton']:,}",
                      f"{products / 1e12:,.1f}", f"{scores / 1e12:,.1f}", *(f"{n / 1e9:,.1f}" for n in moved),
                      f"{total['kept'] / 1e9:,.1f}", f"{1e3 * seconds:,.0f}",
                      f"{case.batch * case.seq_len / seconds / 1e3:,.1f}k"])
    table("One run of what is compiled", "model, checkpointing, what, pass, runs a step, Triton kernels, "
          "products, attention, Triton MB, products and attention MB, kept MB", graphs)
    table("A training step", "model, checkpointing, batch, Triton kernels, products TFLOP, attention TFLOP, "
          "Triton GB, not compiled GB, optimizer GB, kept by blocks GB, prediction: ms a step, "
          "prediction: tokens/s", steps)


def self_test() -> list[str]:
    """What rehearse() should notice, and did not."""
    gpt2, mlm = cases()[0], cases()[-1]
    small = replace(gpt2, size=gpt2.size | {"n_layer": 2}, batch=2)
    attend, loss, missed = Block.attend, models._rows_loss, []

    def broken(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return attend(self, *args, **kwargs)

    def counted(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return attend(self, *args, **kwargs) * self.calls

    @functools.wraps(loss)
    def slow(products, *args):
        found = loss(products, *args)
        products.copy_(products.flip(0))
        return found

    def expect(word: str, case: Case, *patch) -> None:
        with mock.patch.object(*patch) if patch else contextlib.nullcontext():
            wrong = rehearse(case, flash)[2]
        found = any(word in text for text in wrong) if word else not wrong
        print(f"{'noticed' if found else 'MISSED'}: {word or 'nothing is wrong'}")
        if not found:
            missed.append(f"{word or 'nothing'} expected, {wrong or 'nothing'} found")

    expect("", small)
    expect("graph break", small, Block, "attend", broken)
    expect("recompiles", small, Block, "attend", counted)
    kept = [op for op in models._KEPT if "flex" not in str(op)]
    expect("attention again", replace(mlm, size=mlm.size | {"n_layer": 4}, batch=2), models, "_KEPT", kept)
    expect("logits twice", small, models, LOSS, slow)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    if not torch.version.cuda or not importlib.util.find_spec("triton"):
        sys.exit("This needs an environment with torch's CUDA build and its triton, but no GPU: "
                 "pip install -r requirements.txt in an empty one.")
    import torch._inductor.config as inductor
    warnings.filterwarnings("ignore", message="dynamo_pgo")
    inductor.force_disable_caches = True
    inductor.emulate_precision_casts = not args.fast
    torch.use_deterministic_algorithms(not args.fast)
    torch.utils.deterministic.fill_uninitialized_memory = False
    print(f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}, sm_90, "
          f"{'fast' if args.fast else 'strict'}")
    wrong, done = [], []
    if args.self_test:
        wrong = self_test()
    else:
        for case in cases():
            rehearsal, model, found = rehearse(case, cudnn if args.fast else flash)
            wrong += found
            done.append((case, rehearsal, model))
        report(done, "cudnn" if args.fast else "flash")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=scratch, TRITON_CACHE_DIR=scratch)
        main()

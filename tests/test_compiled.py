"""What training on a GPU relies on and a CPU can show: compiled blocks, the compiled loss, deterministic
operations, and the choice of activation checkpointing.
"""

import logging
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, finish, start, torchrun
from runs import Trainer
from states import flags_of, run_of, train_state
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import ddp_utils
import model
import train_hrm
import training.step
from cluster import diagnosis
from model import GPT2, HRM, MLM, Block, GPT2Config, HRMConfig, MLMConfig, linear_cross_entropy
from ops.cross_entropy import LOSS_ROWS, logits_bytes
from startup import dry_run
from training.strategies import set_modes
from weights.sampling import sample_ids

GPU = torch.device("cuda")  # is not touched
SMALL = {"vocab_size": 500, "padded_vocab": 512, "seq_len": 64, "n_layer": 1, "n_head": 4, "d_model": 64}
WHOLE = {"ff": 128, "l_cycles": 1, "bp_cycles": 2, "inject_input": True}
MODELS = {
    "hrm": lambda: HRM(HRMConfig(**SMALL, ff=128)),
    "cycles": lambda: HRM(HRMConfig(**SMALL, **WHOLE, h_cycles=3)),
    "halt": lambda: HRM(HRMConfig(**SMALL, **WHOLE, halt=True)),
    "gpt2": lambda: GPT2(GPT2Config(**SMALL)),
    "modern": lambda: GPT2(GPT2Config(**SMALL, modern=True)),
    "pairs": lambda: HRM(HRMConfig(**SMALL, ff=128, start=499, response=498)),
    "mlm": lambda: MLM(MLMConfig(**SMALL | {"n_layer": 2}, ff=96, eot=499, window=16))}


@pytest.fixture(autouse=True)
def alone():
    """No compiled graph and no setting of one test is left for the next."""
    torch.set_num_threads(1)
    with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=8):
        yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def world():
    yield ddp_utils.init("gloo", "cpu")
    dist.destroy_process_group()


def batch(name):
    x = torch.randint(499, (4, SMALL["seq_len"]), generator=torch.Generator().manual_seed(1))
    x[:, ::30] = 499  # documents begin here
    if name == "mlm":
        positions = torch.arange(3, 63, 3).expand(4, -1)
        return x, positions, x.gather(1, positions)
    if name == "pairs":
        x[:, 10::30] = 498  # their responses
    return x, x.roll(-1, 1)


def gradients(name, world, mode, **flags):
    torch.manual_seed(0)
    state = train_state(MODELS[name](), world, checkpoint_activations=mode, **flags)
    loss = state.model(*batch(name))[0]
    loss.backward()
    return {"loss": loss.detach(), **{key: p.grad for key, p in state.model.named_parameters()}}


# -----------------------------------------------------------------------------------------------------------
# Compiled blocks


@pytest.mark.skipif(torch.__version__ < "2.13", reason="its code for CPUs leaves out roundings even so")
@pytest.mark.full
@pytest.mark.parametrize("name, modes", [("hrm", ["block"]), *(
    pytest.param(name, ["block", "selective"], marks=pytest.mark.long) for name in MODELS)])
def test_compiled_blocks_checkpoint_exactly_in_bfloat16(name, modes, world):
    flags = {"precision": "bf16", "compile": True}
    kept = gradients(name, world, "none", **flags)
    for mode in modes:
        recomputed = gradients(name, world, mode, **flags)
        assert all(torch.equal(recomputed[key], kept[key]) for key in kept), mode


@pytest.mark.long
def test_control_fast_compiled_blocks_do_not(world):
    """On a CPU the bits of an HRM differ in every parameter."""
    flags = {"precision": "bf16", "compile": True, "fast": True}
    kept, recomputed = (gradients("hrm", world, mode, **flags) for mode in ("none", "block"))
    assert not all(torch.equal(recomputed[key], kept[key]) for key in kept)


@pytest.mark.parametrize("cut, graphs", [(None, 1), (True, 2)])
def test_a_block_is_one_graph_under_ddp(world, monkeypatch, cut, graphs):
    """A block of GPT-2 124M, whose parameters are more than a bucket of DDP, in a process group of one. The
    control is torch's default, with which Dynamo cuts it where a bucket of gradients ends.
    """
    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compile_(self, backend="aot_eager"))
    monkeypatch.setattr(training.step, "wrap", lambda model, *_: nn.parallel.DistributedDataParallel(model))
    state = train_state(GPT2(GPT2Config(**SMALL | {"d_model": 768, "n_head": 12})), world, compile=True)
    if cut:
        torch._dynamo.config.optimize_ddp = True
    torch._dynamo.utils.counters.clear()
    state.wrapped(*batch("gpt2"))[0].backward()
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] == graphs


def test_compiling_is_announced_and_does_not_frighten(world, monkeypatch, capsys):
    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compile_(self, backend="aot_eager"))
    small = GPT2(GPT2Config(**SMALL | {"n_layer": 2}))
    state = train_state(small, world, compile=True, checkpoint_activations="selective")
    state.wrapped(*batch("gpt2"))[0].backward()
    assert "compiling: the first step takes minutes" in capsys.readouterr().out
    # torch warns there of in-place operations under selective checkpointing, of which blocks have none
    assert not logging.getLogger("torch._higher_order_ops.wrap").isEnabledFor(logging.WARNING)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing_keeps_flex_attention(monkeypatch, kept):
    """Read off the graphs for forward and backward; the control leaves it out of what is kept."""
    found = []

    def keep(graph, _):
        found.append([str(node.target) for node in graph.graph.nodes].count("flex_attention"))
        return graph

    if not kept:
        monkeypatch.setattr(model, "_KEPT", {op for op in model._KEPT if "flex" not in str(op)})
    monkeypatch.setattr(model, "uses_flex", lambda head_dim, device: True)
    monkeypatch.setattr(Block, "flex_attention", staticmethod(flex_attention.flex_attention))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # no backward on CPUs, it says
    monkeypatch.setattr(model, "compiled_once", lambda function: function)
    mlm = MODELS["mlm"]()
    for block in model.blocks_of(mlm):
        block.checkpointing = "selective"
        block.compile(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep,
                                           partition_fn=min_cut_rematerialization_partition))
    mlm(*batch("mlm"))[0].backward()
    forward, backward = found[:2], found[2:]  # of both blocks
    assert forward == [1, 1] and backward == ([0, 0] if kept else [1, 1])


@pytest.mark.full
def test_the_compiled_block_mask_is_the_same_and_compiled_once():
    x, _, _ = batch("mlm")
    make_mask = model.compiled_once(flex_attention.create_block_mask)
    torch._dynamo.utils.counters.clear()
    for shift in range(3):
        document = (x.roll(shift, 1) == 499).cumsum(1)

        def together(b, h, i, j, document=document):
            return document[b, i] == document[b, j]

        found, expected = (make(together, 4, None, 64, 64, device="cpu")
                           for make in (make_mask, flex_attention.create_block_mask))
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "q_num_blocks", "q_indices"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# -----------------------------------------------------------------------------------------------------------
# The compiled loss


@pytest.mark.full
@pytest.mark.parametrize("bias, z_loss", [(False, 0.0), (True, 0.0), (True, 1e-2)])
def test_the_compiled_loss_equals_the_other(bias, z_loss):
    """Value, gradients and accuracy, with labels below 0, padding columns and two chunks of unequal size. The
    logits have variance 1: on CPUs Inductor adds up one row after another, which is less exact for larger.
    """
    torch.manual_seed(0)
    rows, vocab, padded = LOSS_ROWS["cpu"] + 301, 500, 512
    hidden, weight, offset = torch.randn(rows, 32), torch.randn(padded, 32) / 6, torch.randn(padded) / 6
    targets = torch.randint(-50, vocab, (rows,))
    found = []
    for compiled in (False, True):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, offset)[:2 + bias]]
        loss, plain, correct = linear_cross_entropy(*leaves[:2], targets, vocab, *leaves[2:], z_loss=z_loss,
                                                    hits=True, compiled=compiled)
        loss.backward()
        assert torch.equal(loss, plain) == (z_loss == 0)
        with torch.no_grad():
            alone, *_ = linear_cross_entropy(*leaves[:2], targets, vocab, *leaves[2:], z_loss=z_loss,
                                             compiled=compiled)
        torch.testing.assert_close(alone, loss.detach(), rtol=1e-6, atol=0)
        found.append([loss.detach(), *(leaf.grad for leaf in leaves), correct])
    *expected, correct = found[0]
    assert torch.equal(found[1][-1], correct) and correct.any()
    for one, other in zip(expected, found[1]):
        assert (one - other).norm() <= 1e-6 * one.norm()
    if bias and not z_loss:  # controls: a target or a padding column too many is noticed
        for labels, columns in ((targets.clamp(min=0), vocab), (targets, padded)):
            other, *_ = linear_cross_entropy(hidden, weight, labels, columns, offset, compiled=True)
            assert abs(other - expected[0]) > 1e-4


@pytest.mark.full
def test_without_a_compiler_runs_end_with_a_sentence_and_tests_skip(tmp_path, shards):
    """As in Debian's smallest system. Triton, for GPUs, and the header have words of their own."""
    without = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    trainer = Trainer("train_gpt2.py", compile=True)
    done = finish(start(torchrun(0, trainer.script, *trainer.flags(shards, tmp_path / "run")), **without))
    assert done.code == 2 and "error: blocks are compiled" in done.out, done.out
    assert "apt install g++ python3-dev, or give --no-compile" in done.out and "Traceback" not in done.out
    test = f"{ROOT}/tests/test_compiled.py::test_the_compiled_loss_of_no_target_is_zero"
    done = finish(start([sys.executable, "-m", "pytest", "-n0", "-rs", "--full", test], cwd=ROOT, **without))
    assert "1 skipped" in done.out and "apt install g++ python3-dev" in done.out, done.out
    for text in ("Failed to find C compiler. Please specify via CC environment variable.",
                 "a.cpp:2:10: fatal error: Python.h: No such file or directory",
                 "Command '['/usr/bin/gcc', '/tmp/a.c', '-O3']' returned non-zero exit status 1."):
        assert diagnosis.lacks_compiler(RuntimeError(text))
    assert not diagnosis.lacks_compiler(RuntimeError("shapes (2, 3) and (4,) do not match"))


@pytest.mark.full
def test_the_compiled_loss_of_no_target_is_zero():
    hidden = torch.randn(8, 32, requires_grad=True)
    loss, *_ = linear_cross_entropy(hidden, torch.randn(64, 32), torch.full((8,), -1), 60, compiled=True)
    loss.backward()
    assert loss == 0 and not hidden.grad.any()


# -----------------------------------------------------------------------------------------------------------
# Determinism


class Unordered(TorchDispatchMode):
    """Raises at an operation that has no deterministic kernel on a GPU, where strict mode would raise; see
    the documentation of torch.use_deterministic_algorithms. Counts the keys that others sort for it.
    """

    REFUSED = ("put_", "histc", "bincount", "median", "nll_loss2d_forward", "scatter_reduce", "kthvalue",
               "cumprod", "logcumsumexp")

    def __init__(self):
        super().__init__()
        self.sorted = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in self.REFUSED or name == "cumsum" and args[0].is_floating_point():
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        if name in ("scatter_add", "scatter_add_", "index_add", "index_add_", "index_put", "index_put_"):
            index = args[1] if "index_put" in name else args[2]
            self.sorted = max(self.sorted, *(t.numel() for t in (index if "put" in name else [index])))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_training_and_sampling_need_no_operation_that_strict_mode_refuses(name, world):
    flags = {"ema": 0.9, "optimizer": "adamw" if name == "mlm" else "muon"}
    state = train_state(MODELS[name](), world, **flags)
    with Unordered() as seen:
        state.model(*batch(name))[0].backward()
        state.optimizer_step(1e-3, state.clip_gradients(1.0))
        ddp_utils.assert_in_sync(state.model)
        with torch.no_grad(), state.averaged_weights():
            state.model.eval()(*batch(name))
            sample_ids(torch.randn(2, 60), 0.8, 50, torch.Generator().manual_seed(0))
    assert seen.sorted <= 4 * SMALL["seq_len"]  # rows of the batch, not their channels


def test_control_what_strict_mode_refuses_is_noticed():
    with pytest.raises(RuntimeError, match="deterministic"), Unordered():
        torch.rand(3).cumsum(0)
    with Unordered() as seen:
        x, index = torch.zeros(4, 64, requires_grad=True), torch.zeros(4, 20, dtype=torch.long)
        x.gather(1, index).sum().backward()
    assert seen.sorted == 80


@pytest.mark.parametrize("raised", [True, False])
def test_blocks_stay_compiled_after_many_recompilations(world, raised):
    """An MLM with two kinds of layers needs 6 of the 8 that torch allows; then it warns, and is slow."""
    class Times(Block):
        config = None

        def block(self, x, factor: str):  # compiled once for each text
            return x * len(factor)

    config = torch._dynamo.config
    block = Times()
    set_modes(block, run_of(world, compile=True).args, world)
    block.compile(backend="eager")
    limit = config.recompile_limit if raised else 8
    with config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        for n in range(12):
            if n >= 8 and not raised:
                with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                    block(torch.ones(2), "a" * n)
                break
            assert block(torch.ones(2), "a" * n).tolist() == [n, n]


@pytest.mark.parametrize("fast", [False, True])
def test_gpus_add_up_in_one_order_unless_fast(world, monkeypatch, fast):
    """Strictly: with warn_only torch takes cuDNN's attention, whose backward pass has no fixed order. Not
    with --fast, also if a run before it in the same Python did.
    """
    monkeypatch.setattr(os, "environ", dict(os.environ))
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        gpu = SimpleNamespace(device=torch.device("cuda", 0))
        set_modes(MODELS["gpt2"](), run_of(gpu, fast=fast, compile=False).args, gpu)
        assert torch.are_deterministic_algorithms_enabled() is not fast
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is not fast
    finally:
        torch.use_deterministic_algorithms(False)


# -----------------------------------------------------------------------------------------------------------
# The choice of activation checkpointing


@pytest.mark.full
@pytest.mark.parametrize("mode", ("none", "selective", "block"))
@pytest.mark.parametrize("name", ["hrm", "gpt2", "mlm"])
def test_what_compiled_blocks_keep_is_what_dry_run_counts(world, name, mode):
    """Against what autograd saves in blocks that Inductor has compiled."""
    torch.manual_seed(0)
    state = train_state(MODELS[name](), world, precision="bf16", compile=True, checkpoint_activations=mode)
    inputs = dict(zip(("idx", "positions", "labels") if name == "mlm" else ("idx", "targets"), batch(name)))
    sizes, known = {}, {p.untyped_storage().data_ptr() for p in state.model.parameters()}

    def seen(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        loss = state.model(**inputs)[0]
    torch.compiler.reset()  # Dynamo gives up on a block of which it has compiled many variants
    counted, uncompiled = (dry_run.kept_for_backward(
        type(state.model), state.model.config, world.device, torch.bfloat16, mode, inputs, compiled)
        for compiled in (True, False))
    assert counted == pytest.approx(sum(sizes.values()), rel=0.1) and loss > 0
    assert counted <= 1.05 * uncompiled


@pytest.mark.parametrize("size, chosen, faster", [
    ("25m", "none", None), pytest.param("100m", "none", None, marks=pytest.mark.full),
    pytest.param("350m", "selective", "none", marks=pytest.mark.full),
    pytest.param("1b", "block", "selective", marks=pytest.mark.full)])
def test_the_sizes_have_the_fastest_checkpointing_that_fits_into_80_gb(size, chosen, faster):
    args = flags_of(train_hrm, ["--size", size])
    assert args.checkpoint_activations == chosen
    model = dry_run.empty_model(HRM, args)
    inputs = model.dummy_inputs(train_hrm.SIZES[size]["batch"], "meta")

    def fits(mode: str) -> bool:
        kept = dry_run.kept_for_backward(HRM, model.config, GPU, torch.bfloat16, mode, inputs, compiled=True)
        kept += logits_bytes(inputs["targets"].numel(), model.config.padded_vocab, torch.bfloat16, True)
        torch.compiler.reset()  # Dynamo gives up on a block of which it has compiled many variants
        return dry_run.fits(dry_run.memory_of(model, "ddp", args, 8, kept), 80, GPU)

    assert fits(chosen) and not (faster and fits(faster))


def test_dropout_does_not_count_what_only_a_cpu_keeps():
    inputs = dict(zip(("idx", "targets"), batch("gpt2")))
    counted = [dry_run.kept_for_backward(GPT2, GPT2Config(**SMALL, dropout=dropout), GPU, torch.bfloat16,
                                        "none", inputs, compiled=False) for dropout in (0.0, 0.1)]
    assert counted[0] == counted[1]

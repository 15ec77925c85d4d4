"""What only a GPU can show: `pytest tests/test_cuda.py`. From all other tests GPUs are hidden."""

import contextlib

import pytest
import torch
from runs import Trainer, assert_close_runs
from states import train_state

import ddp_utils
from ddp_utils import StopVote
from model import GPT2, HRM, MLM, GPT2Config, HRMConfig, MLMConfig, linear_cross_entropy
from ops.cross_entropy import LOSS_ROWS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="pytest tests/test_cuda.py, with a GPU")
SMALL = {"vocab_size": 500, "padded_vocab": 512, "seq_len": 256, "n_layer": 2, "n_head": 4, "d_model": 128}
MODELS = {
    "hrm": lambda: HRM(HRMConfig(**SMALL, ff=256)),
    "gpt2": lambda: GPT2(GPT2Config(**SMALL)),
    "modern": lambda: GPT2(GPT2Config(**SMALL, modern=True)),
    "pairs": lambda: HRM(HRMConfig(**SMALL, ff=256, start=499, response=498)),
    "mlm": lambda: MLM(MLMConfig(**SMALL, ff=192, eot=499, window=64)),
}
WIDE = {"wide": lambda: HRM(HRMConfig(**SMALL | {"n_layer": 1, "n_head": 12, "d_model": 1536}, ff=4096))}


@pytest.fixture
def world(monkeypatch):
    """A process group of this process, in which torch is deterministic as in a trainer without --fast."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield ddp_utils.init("nccl", "cuda")
    torch.distributed.destroy_process_group()
    torch.use_deterministic_algorithms(False)


def make(name, device="cuda", dtype=torch.float32):
    torch.manual_seed(0)
    model = (MODELS | WIDE)[name]().to(device)
    model.compute_dtype = dtype
    return model


def batch(name, device="cuda"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(499, (16 if name in WIDE else 4, 256), generator=generator)
    x[:, ::100] = 499  # documents begin here
    if name == "mlm":
        positions = torch.arange(3, 243, 3).expand(4, -1)
        return x.to(device), positions.to(device), x.gather(1, positions).to(device)
    if name == "pairs":
        x[:, 40::100] = 498  # their responses
    return x.to(device), x.roll(-1, 1).to(device)


def step(model, name, device="cuda"):
    model.zero_grad()
    inputs = batch(name, device)
    loss = model(*inputs)[0] / (inputs[-1] >= 0).sum()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_computes_what_a_cpu_computes(name):
    """For the MLM and for pairs also: FlexAttention with block masks equals the dense masks."""
    loss, grads = step(make(name), name)
    cpu_loss, cpu_grads = step(make(name, "cpu"), name, "cpu")
    torch.testing.assert_close(loss.cpu(), cpu_loss, rtol=1e-4, atol=1e-4)
    for key, grad in cpu_grads.items():
        torch.testing.assert_close(grads[key].cpu(), grad, rtol=1e-2, atol=1e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", [*MODELS, *WIDE])
def test_checkpointing_is_exact(name, compiled, world):
    """But for compiled norms of many channels, which selective recomputes within kernels that add up in
    another order.
    """
    found = {}
    for mode in ("none", "block", "selective"):
        state = train_state(make(name), world, precision="bf16", checkpoint_activations=mode,
                            compile=compiled)
        found[mode] = step(state.model, name)
    for mode in ("block",) if name in WIDE and compiled else ("block", "selective"):
        assert torch.equal(found["none"][0], found[mode][0])
        assert all(torch.equal(grad, found[mode][1][key]) for key, grad in found["none"][1].items())


def test_the_compiled_loss_equals_the_other(world, monkeypatch):
    """In float32, with a chunk that is not full, labels below 0 and padding columns."""
    monkeypatch.setitem(LOSS_ROWS, "cuda", 2048)  # float32 sums over more rows are less exact
    rows = 2048 + 301
    tensors = torch.randn(rows, 64), torch.randn(512, 64) / 8, torch.randn(512) / 8
    targets, found = torch.randint(-2, 500, (rows,), device="cuda"), []
    for compiled in (False, True):
        leaves = [t.to("cuda").requires_grad_() for t in tensors]
        loss, _, correct = linear_cross_entropy(*leaves[:2], targets, 500, leaves[2], hits=True,
                                                compiled=compiled)
        loss.backward()
        found.append([loss.detach(), correct.double(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found):
        assert (one - other).norm() <= 1e-6 * one.norm()


@pytest.mark.parametrize("optimizer, waits", [("adamw", False), ("muon", True)])
def test_a_step_of_adamw_does_not_wait_for_the_device(optimizer, waits, world):
    """But for the step before, by an event, which this mode of torch allows. Muon is the control. A gradient
    that is not finite skips the update of both.
    """
    model, vote = make("gpt2"), StopVote(world)
    state = train_state(model, world, optimizer=optimizer, compile=False, ema=0.9)
    inputs = batch("gpt2")

    def step(factor=1.0):
        labels = ddp_utils.async_sum(8, world)
        objective, _ = state.wrapped(*inputs)
        (objective * factor / labels().clamp(min=1)).backward()
        state.optimizer_step(1e-3, state.clip_gradients(1.0, vote))
        vote.vote()

    for factor in (1.0, float("inf")):  # the first makes the state
        before = [p.detach().clone() for p in model.parameters()]
        step(factor)
        assert {*map(torch.equal, before, model.parameters())} == {factor > 1}
    assert vote.agreed == 0 and not state.updated
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="synchronizing") if waits else contextlib.nullcontext():
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits or state.updated and vote.vote() == 0


WIDTH_OF_GPT2 = {"seq_len": 1024, "d_model": 768, "n_head": 12, "n_layer": 2, "global_batch": 16, "batch": 8,
                 "max_new_tokens": 8, "steps": 60}  # its sums are divided among many blocks of a GPU


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks, script, changes", [
    (1, "train_hrm.py", {}), (1, "train_mlm.py", {}), (1, "train_gpt2.py", WIDTH_OF_GPT2),
    (2, "train_gpt2.py", {"strategy": "zero1"}), (2, "train_gpt2.py", {"strategy": "zero3"})])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, shards, ranks, script, changes):
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    trainer = Trainer(script, precision="bf16", compile=True, **{"d_model": 64, "steps": 120} | changes)
    trainer.check_killed_run(tmp_path, ranks, shards)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script, flags", [
    ("train_hrm.py", {"strategy": "zero1"}), ("train_hrm.py", {"strategy": "zero2"}),
    ("train_mlm.py", {"strategy": "zero3"}), ("train_mlm.py", {"comm": "bf16"}),
    ("train_gpt2.py", {"strategy": "zero3-offload"})])
def test_strategies_on_one_gpu(tmp_path, shards, script, flags):
    """With nccl on one rank, evaluation and sample included, they train as without them."""
    trainer = Trainer(script, no_compile=True, steps=20, save_every=10, eval_every=10, ema=0.9)
    for name, changes in (("plain", {}), ("other", flags)):
        done = trainer.train(1, shards, tmp_path / name, **changes)
        assert done.code == 0, done.out
    assert_close_runs(tmp_path / "plain", tmp_path / "other", bound=1e-4)

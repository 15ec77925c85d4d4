"""What training on a GPU relies on and a CPU can show: compiled blocks, and deterministic operations."""

import os
from types import SimpleNamespace

import pytest
import torch
from conftest import run
from runs import Trainer, ended
from states import run_of, train_state, world  # noqa: F401
from tiny_models import BUILDS, each_model, gpt2, largest_error, step, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ddp_utils
import training.step
from model import blocks_of
from training.strategies import set_modes
from weights.sampling import sample_ids


@pytest.fixture(autouse=True)
def alone():
    """No compiled graph and no setting of one test is left for the next."""
    with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=8):
        yield
    torch.compiler.reset()


# -----------------------------------------------------------------------------------------------------------
# Compiled blocks


@pytest.mark.long
@each_model
def test_compiled_blocks_compute_the_same(build):
    expected, model = step(build())[0], build()
    for block in blocks_of(model):
        block.compile()
    for mode in ("none", "block", "selective"):
        for block in blocks_of(model):
            block.checkpointing = mode
        found, _ = step(model)
        assert max(largest_error(found[name], expected[name]) for name in expected) <= 1e-4, mode


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older code for CPUs rounds otherwise")
@pytest.mark.full
@pytest.mark.parametrize("name, fast", [("hrm", False), *(
    pytest.param(*case, marks=pytest.mark.long) for case in (("gpt2", False), ("hrm", True)))])
def test_compiled_blocks_checkpoint_exactly_in_bfloat16(name, fast, world):
    """Unless they are fast."""
    plain, *others = [step(train_state(BUILDS[name](), world, precision="bf16", compile=True, fast=fast,
                                       checkpoint_activations=mode).model)[0]
                      for mode in ("none", "block", "selective")]
    assert all(torch.equal(found[key], plain[key]) for found in others for key in plain) != fast


@pytest.mark.parametrize("cut, graphs", [(False, 1), (True, 2)])
def test_a_block_is_one_graph_under_ddp(world, monkeypatch, capsys, cut, graphs):
    """A block of GPT-2 124M, whose parameters are more than a bucket of DDP, in a process group of one. The
    control is torch's default, with which Dynamo cuts it where a bucket of gradients ends.
    """
    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compile_(self, backend="aot_eager"))
    monkeypatch.setattr(training.step, "wrap", lambda model, *_: nn.parallel.DistributedDataParallel(model))
    state = train_state(gpt2(n_layer=1, d_model=768, n_head=12), world, compile=True)
    assert not torch._dynamo.config.optimize_ddp and torch._dynamo.config.recompile_limit == 64
    torch._dynamo.config.optimize_ddp = cut
    torch._dynamo.utils.counters.clear()
    state.wrapped(tokens(), tokens())[0].backward()
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] == graphs
    assert "compiling" in capsys.readouterr().out


@pytest.mark.full
def test_a_run_without_a_compiler_names_what_to_install(tmp_path, shards):
    """As in Debian's smallest system."""
    trainer = Trainer("train_gpt2.py", compile=True)
    done = run(0, trainer.script, *trainer.flags(shards, tmp_path / "run"), CXX="no-such-compiler",
               TORCHINDUCTOR_CACHE_DIR=tmp_path / "cache")
    assert "Traceback" not in ended(done, "g++ python3-dev", "--no-compile", code=2).out


# -----------------------------------------------------------------------------------------------------------
# Determinism


class Unordered(TorchDispatchMode):
    """Raises at an operation that has no deterministic kernel on a GPU, where strict mode would raise; see
    the documentation of torch.use_deterministic_algorithms. Counts the keys that others sort for it.
    """

    REFUSED = ("put_", "histc", "bincount", "median", "nll_loss2d_forward", "scatter_reduce", "kthvalue",
               "cumprod", "logcumsumexp")
    sorted = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in self.REFUSED or name == "cumsum" and args[0].is_floating_point():
            raise RuntimeError(f"{name} is not deterministic")
        if name.rstrip("_") in ("scatter_add", "index_add", "index_put"):
            index = args[1][-1] if "index_put" in name else args[2]
            self.sorted = max(self.sorted, index.numel())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name, config", [
    ("hrm", {"start": 0, "response": 1, "halt": True}), ("gpt2", {}), ("mlm", {})], ids=str)
def test_training_and_sampling_need_no_operation_that_strict_mode_refuses(name, config, world):
    flags = {"ema": 0.9, "optimizer": "adamw" if name == "mlm" else "muon"}
    state = train_state(BUILDS[name](**config), world, **flags)
    with Unordered() as seen:
        step(state.model)
        state.optimizer_step(1e-3, state.clip_gradients(1.0))
        ddp_utils.assert_in_sync(state.model)
        with state.averaged_weights():
            state.model.eval()
            step(state.model)
            sample_ids(torch.randn(2, 60), 0.8, 50, None)
    assert seen.sorted <= 32 + 2  # rows of the batch, not their channels


def test_control_what_strict_mode_refuses_is_noticed():
    with pytest.raises(RuntimeError, match="cumsum"), Unordered():
        torch.rand(3).cumsum(0)
    with Unordered() as seen:
        x, index = torch.zeros(4, 64, requires_grad=True), torch.zeros(4, 20, dtype=torch.long)
        x.gather(1, index).sum().backward()
    assert seen.sorted == 80


@pytest.mark.parametrize("fast", [False, True])
def test_gpus_add_up_in_one_order_unless_fast(monkeypatch, fast):
    """Strictly: with warn_only torch takes cuDNN's attention, whose backward pass has no fixed order. Not
    with --fast, also if a run before it in the same Python did.
    """
    monkeypatch.setattr(os, "environ", dict(os.environ))
    torch.use_deterministic_algorithms(True)
    try:
        gpu = SimpleNamespace(device=torch.device("cuda", 0))
        set_modes(gpt2(), run_of(gpu, fast=fast, compile=False).args, gpu)
        assert torch.are_deterministic_algorithms_enabled() is not fast
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is not fast
    finally:
        torch.use_deterministic_algorithms(False)

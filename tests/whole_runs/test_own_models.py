"""What a model or an optimizer of your own may do to the state of a run, and what is refused by name."""

import inspect
from functools import partial

import pytest
import torch
from own_optimizers import Lists, Schedule
from runs import Trainer, assert_same_run, copy_of_the_first_half, edited, ended, evaluations_of, steps_of
from states import run_of, world  # noqa: F401
from torch import nn

import model as model_module
from model import GPT2, HRM, MLM
from training.step import TrainState

FULL = pytest.mark.full
FLAGS = {"steps": 8, "save_every": 4, "eval_every": 4, "batch": 3, "max_new_tokens": 3}
TINY = {"vocab_size": 60, "padded_vocab": 64, "seq_len": 16, "n_head": 2, "d_model": 16}
TOP, OPTIMIZERS = "BETAS = ", "optimizers = make_optimizers"


def small(model_class=GPT2, **changes):
    torch.manual_seed(0)
    return model_class(model_class.Config(**TINY | {"n_layer": 1} | changes))


# ------------------------------------------------------------------------------------------------ buffers

class CountingBlock(model_module.GPT2Block):
    """Buffers of several kinds, which each forward pass updates, also in evaluation. It uses a running mean
    after it has updated it, as recomputation must do with the same value.
    """

    def __init__(self, c):
        super().__init__(c)
        self.register_buffer("scale", torch.ones(c.d_model))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("unsaved", torch.zeros(2, dtype=torch.bool), persistent=False)
        self.register_buffer("absent", None)
        self.norm_of_batch = nn.BatchNorm1d(c.d_model)
        self.register_buffer("shared", self.norm_of_batch.running_mean)

    def block(self, x, rope, mask=None, cache=None):
        with torch.no_grad():
            self.scale.lerp_(x.square().mean((0, 1)), 0.1)
            self.calls = self.calls + 1
            self.unsaved |= True
        return super().block(self.norm_of_batch(x.mT).mT / self.scale, rope, mask, cache)


def test_the_warm_up_and_evaluations_leave_all_buffers_as_they_were(world, monkeypatch):
    monkeypatch.setattr(model_module, "GPT2Block", CountingBlock)
    model = small()
    state = TrainState(model, [torch.optim.AdamW(model.parameters())], run_of(world))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    example = model.dummy_inputs(2, world.device)

    def same() -> list[str]:
        return [n for n, buffer in model.named_buffers() if torch.equal(buffer, before[n])]

    state.warm_up(example, example)
    assert same() == list(before)
    model.eval()
    with state.averaged_weights():
        model(**example)
        assert same() != list(before), "evaluation changes none, so this shows nothing"
    assert same() == list(before)
    block, = model_module.blocks_of(model)
    assert block.shared is block.norm_of_batch.running_mean
    model.train()(**example)  # training does change them
    assert not {name.rpartition(".")[2] for name in same()} & {"scale", "calls", "unsaved", "running_mean"}


DRAWS = {GPT2: lambda x: nn.functional.dropout(x, 0.2),
         HRM: lambda x: x * (torch.rand(len(x), 1, 1) < 0.8),  # stochastic depth
         MLM: lambda x: x + 0.1 * torch.randn_like(x)}


@pytest.mark.parametrize("model_class", DRAWS)
def test_recomputation_sees_what_the_first_pass_saw(monkeypatch, model_class):
    """Two passes: buffers, which it doesn't update again, and random numbers."""
    monkeypatch.setattr(model_module, "GPT2Block", CountingBlock)
    block_class, draw = getattr(model_module, f"{model_class.__name__}Block"), DRAWS[model_class]
    plain = block_class.block
    monkeypatch.setattr(block_class, "block", lambda self, x, *args: plain(self, draw(x), *args))
    found = {}
    for mode in ("none", "selective", "block"):
        model = small(model_class, n_layer=2)
        for block in model_module.blocks_of(model):
            block.checkpointing = mode
        for _ in range(2):
            loss = model(**model.dummy_inputs(2, "cpu"))[0]
            loss.backward()
        found[mode] = [loss, *(p.grad for p in model.parameters()), *model.buffers()]
        assert getattr(block, "calls", 2) == 2
    for mode in ("selective", "block"):
        assert all(map(torch.equal, found["none"], found[mode])), mode


# ------------------------------------------------------------------------------------------------ whole runs

# a buffer, and a second network
OWN = '''
class GPT2(GPT2):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean_square", torch.ones(config.d_model))
        self.probe = torch.nn.Linear(config.d_model, 1)

    def hidden(self, idx, cache=None):
        x = super().hidden(idx, cache)
        if self.training:
            new = x.detach().float().square().mean((0, 1))
            SHARE
            self.mean_square.lerp_(new, 0.1)
        return x / self.mean_square.sqrt().to(x.dtype)

    def loss(self, hidden, idx, targets):
        objective, sums = super().loss(hidden, idx, targets)
        error = (self.probe(hidden.detach()).squeeze(-1) - idx).float().square()
        error = (error * (targets >= 0)).sum()
        return objective + 1e-3 * error, sums | {"probe": error.detach()}
'''
SHARE = '''if torch.distributed.is_initialized():
                torch.distributed.all_reduce(new)
                new /= torch.distributed.get_world_size()'''


def own_trainer(directory, share: str = SHARE, optimizer=Schedule) -> Trainer:
    code = f"import torch\n\n{inspect.getsource(optimizer)}\n{OWN.replace('SHARE', share)}"
    own = f"optimizers = [{optimizer.__name__}(model.parameters(), lr=1e-3)]"
    return edited(directory / "train_own.py", ("before", TOP, code), ("instead of", OPTIMIZERS, own), **FLAGS)


def test_a_buffer_of_a_ranks_own_data_is_named_and_no_node_is_blamed(shards, tmp_path):
    done = own_trainer(tmp_path, "pass").fork(2, shards, tmp_path / "run")
    ended(done, "error: mean_square on rank ", code=1)
    assert "check the memory" not in done.out


@pytest.mark.parametrize("ranks, optimizer, changes", [
    (2, Schedule, {"strategy": "zero1", "checkpoint_activations": "block", "ema": 0.9}),
    pytest.param(2, Schedule, {"strategy": "zero3"}, marks=FULL),
    pytest.param(3, Lists, {"comm": "bf16", "batch": 2}, marks=FULL)])
def test_an_own_model_and_an_own_optimizer_resume_bit_for_bit(ranks, optimizer, changes, shards, tmp_path):
    run = partial(own_trainer(tmp_path, optimizer=optimizer).fork, ranks, shards)
    ended(run(tmp_path / "whole", **changes))
    steps = steps_of(tmp_path / "whole")
    assert steps[-1]["probe"] < steps[0]["probe"]
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    ended(run(tmp_path / "resumed", **changes), "resuming after step 4")
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


OBSERVER = """
class GPT2(GPT2):
    def hidden(self, *arguments):
        x = super().hidden(*arguments)
        ddp.dist.all_reduce(x.detach().mean())
        return x
"""


def test_a_model_may_call_collectives_when_it_does_not_train(shards, tmp_path):
    trainer = edited(tmp_path / "train_own.py", ("before", TOP, OBSERVER), **FLAGS)
    ended(trainer.fork(2, shards, tmp_path / "run", sample_every=1, timeout=5), "step 4:", "step 8:")


DISTANCE = """
import torch

class Distance(torch.optim.SGD):
    def step(self):
        super().step()
        for group in self.param_groups:
            seen = sum(p.grad.abs().sum() for p in group["params"] if p.grad is not None)
            group["distance"] = group.get("distance", 0.0) + float(seen)
"""


def test_numbers_that_differ_between_ranks_are_refused(shards, tmp_path):
    """Each rank of zero1 has the gradients of some parameters, so its sum is not that of the others."""
    trainer = edited(tmp_path / "train_distance.py", ("before", TOP, DISTANCE),
                     ("instead of", OPTIMIZERS, "optimizers = [Distance(model.parameters(), lr=1e-3)]"),
                     **FLAGS)
    ended(trainer.fork(2, shards, tmp_path / "run", strategy="zero1", steps=2), "on rank 1", code=2)


# ------------------------------------------------------------------------------------------------ curves

SQUARES = """
class GPT2(GPT2):
    def loss(self, hidden, idx, targets):
        objective, sums = super().loss(hidden, idx, targets)
        extra = (hidden.float().square().mean(-1) * (targets >= 0)).sum()
        return objective + 1e-4 * extra, sums | {"square": extra.detach()}
"""


def test_every_sum_and_every_result_is_a_curve(shards, tmp_path):
    """Unless the record has that name already."""
    for name, number, code in (("mine", "own", 0), ("step", "own", 2), ("other", "square", 2)):
        trainer = edited(tmp_path / f"train_{name}.py", ("before", TOP, SQUARES),
                         ("before", "if log.evaluation(", f"results[{name!r}] = 2.5"),
                         ("instead of", "log.step(",
                          f"log.step(metrics, step, samples, grad_norm, lr=lr, {number}=1.5)"), **FLAGS)
        ended(trainer.train(0, shards, tmp_path / name), code=code)
    train, found = steps_of(tmp_path / "mine")[-1], evaluations_of(tmp_path / "mine")[-1]
    assert train["square"] > 0 and train["own"] == 1.5
    assert found["val_square"] == pytest.approx(train["square"], rel=0.5) and found["mine"] == 2.5

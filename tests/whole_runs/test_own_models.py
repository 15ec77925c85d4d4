"""What a model or an optimizer of your own may do to the state of a run, and what is refused by name."""

import inspect
import math
import re
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from runs import Trainer, assert_same_run, copy_of_the_first_half, edited, ended, evaluations_of, steps_of
from states import META, run_of
from torch import nn

import ddp_utils
import model as model_module
from cli.errors import RunError, UserError
from ddp_utils import Checkpoints, list_checkpoints, load_checkpoint, read_checkpoint
from model import GPT2, HRM, MLM, hidden_matrices
from monitor import refuse_taken
from training.step import TrainState, refuse_unsaved

FULL = pytest.mark.full
FLAGS = {"steps": 8, "save_every": 4, "eval_every": 4, "batch": 3, "max_new_tokens": 3}
TINY = {"vocab_size": 60, "padded_vocab": 64, "seq_len": 16, "n_head": 2, "d_model": 16}
TOP, OPTIMIZERS = "BETAS = ", "optimizers = make_optimizers"


def small(model_class=GPT2, **changes):
    torch.manual_seed(0)
    return model_class(model_class.Config(**TINY | {"n_layer": 1} | changes))


@pytest.fixture
def world():
    world = ddp_utils.init("gloo", "cpu")
    yield world
    torch.distributed.destroy_process_group()


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


# ------------------------------------------------------------------------------------------------ optimizers

class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, keeps):
        super().__init__(inner.param_groups, inner.defaults)
        self.parts = {"inner": [inner]}
        if not keeps:
            self.state = inner.state


def adamw(model) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


# the optimizers, and what the message names; "" where they are right
@pytest.mark.parametrize("optimizers, named", [
    (lambda m: [Lookahead(adamw(m), keeps=True)], "AdamW, which Lookahead"),
    (lambda m: [Lookahead(adamw(m), keeps=False)], ""),
    (lambda m: [torch.optim.Muon(hidden_matrices(m))], r"embed.weight in 0.*requires_grad_\(False\)"),
    (lambda m: [adamw(m), torch.optim.SGD([m.embed.weight])], "embed.weight in 2"),
    (lambda m: [adamw(m), torch.optim.Adam(nn.Linear(300, 200).parameters())], r"\(2,.*\[200, 300\]")])
def test_a_parameter_is_in_one_optimizer_whose_state_is_saved(optimizers, named, world):
    model = small()
    with pytest.raises(UserError, match=named) if named else nullcontext() as refused:
        TrainState(model, optimizers(model), run_of(world))
    assert not named or len(str(refused.value)) < 500  # and no numbers of a tensor


@pytest.mark.parametrize("kind", ["step_pre", "step_post"])
def test_hooks_of_an_optimizer_that_zero1_rebuilds_are_refused(kind, world):
    """Those that are registered later are called, on either list."""
    model, run, calls = small(), run_of(world, strategy="zero1"), []
    optimizers = [adamw(model)]
    removable = getattr(optimizers[0], f"register_{kind}_hook")(calls.append)
    with pytest.raises(UserError, match="state.optimizers"):
        TrainState(model, optimizers, run)
    removable.remove()
    state = TrainState(model, optimizers, run)
    for of in (state.optimizers, optimizers):
        getattr(of[0], f"register_{kind}_hook")(lambda *_: calls.append(1))
    go_on(state, [0])
    assert calls == [1, 1]


class Schedule(torch.optim.Optimizer):
    """Keeps numbers of several kinds in its groups and in its state, as schedulefree and others do."""

    def __init__(self, params, lr=1e-3, odd=None):
        super().__init__(params, {"lr": lr, "odd": odd, "k": 0, "history": (), "mode": "begin"})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["history"] = [*group["history"], 0.1 * group["k"]][-2:]
            group["mode"] = f"step {group['k']}"
            group["total"] = group.get("total", 0) + group["history"][0]
            if group["odd"]:
                group["bad"] = group["odd"]()
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                state["step"] = state.get("step", 0) + 1
                state["nested"] = {"a": [state["step"], [None, True]], "b": 0.5 * state["step"]}
                rate = group["lr"] * group["total"] / (group["k"] + state["nested"]["b"])
                p.add_(state["mean"], alpha=-rate)


class Lists(torch.optim.SGD):
    """Keeps lists in its state, as SOAP does, and a tensor in its group, as Prodigy does, which its first
    group alone makes and a later step replaces.
    """

    def step(self, closure=None):
        first = self.param_groups[0]
        seen = first.setdefault("seen", torch.zeros(2000))  # so many are not printed
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                means, _, norms = state.setdefault("means", [torch.zeros_like(p), [], torch.zeros(3)])
                state["means"] = [means * 0.9 + p.grad, [], norms + p.grad.norm()]
                seen[1000] += p.grad.norm()
                if seen[1000] > 0:
                    group["total"] = seen.sum()
                    p.grad.add_(state["means"][0]).mul_(1 + state["means"][2][0] + group["total"])
        super().step()


def two_groups(params, kind=Lists, **options):
    first, *rest = params
    return kind([{"params": rest}, {"params": [first], "scale": 0.5}], **options)


def begin(world, optimizer=Schedule, strategy: str = "ddp", **options) -> TrainState:
    model = small()
    return TrainState(model, [optimizer(model.parameters(), lr=1e-2, **options)],
                      run_of(world, strategy=strategy))


def go_on(state: TrainState, steps, lr: float = 1e-2) -> None:
    for step in steps:
        idx = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(step))
        state.model(idx, idx)[0].backward()
        state.optimizer_step(lr, state.clip_gradients(1.0))


def saved_as(state: TrainState, world, out):
    checkpoints = Checkpoints(out, world, 9, lambda text: None)
    checkpoints.directory.mkdir(parents=True, exist_ok=True)
    checkpoints.save(3, state, META | {"samples": 7})
    checkpoints.close()
    return load_checkpoint(out, print)


@pytest.mark.parametrize("optimizer", [Schedule, two_groups])
def test_what_an_optimizer_keeps_is_restored_also_the_second_time(optimizer, world, tmp_path):
    whole, state, said = begin(world, optimizer), begin(world, optimizer), []
    go_on(whole, range(9))
    for part in range(3):
        go_on(state, range(3 * part, 3 * part + 3))
        saved = saved_as(state, world, tmp_path / f"{part}")
        before, state = state, begin(world, optimizer)
        state.load_state_dict(saved, said.append)
        assert not said and state.non_tensor_values() == before.non_tensor_values()
    ours, theirs = (dict(of.model.state_dict()) | of.optimizer_tensors() for of in (state, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert state.non_tensor_values() == whole.non_tensor_values()
    kept = "Lists 0.1/total" if optimizer is two_groups else "Schedule 0.0/total"
    assert kept in ours.keys() | saved["plain"].keys()
    assert not any("." in key for values in state.optimizers[0].state.values() for key in values)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_lists_and_tensors_of_groups_are_refused_with_shards(strategy, world):
    """Before the first step."""
    with pytest.raises(UserError, match="Lists/(seen|means) .*--strategy ddp"):
        begin(world, two_groups, strategy)
    begin(world, torch.optim.AdamW, strategy)


def test_a_new_weight_decay_wins_on_a_resume(world, tmp_path):
    state = begin(world, torch.optim.AdamW, weight_decay=0.1)
    go_on(state, range(3))
    saved = saved_as(state, world, tmp_path)
    state = begin(world, torch.optim.AdamW, weight_decay=0.3)
    state.load_state_dict(saved, print)
    go_on(state, range(3, 4), lr=5e-3)
    group = state.optimizers[0].param_groups[0]
    assert group["weight_decay"] == 0.3 and group["lr"] == 5e-3 and saved["plain"] == {}


def test_what_a_checkpoint_cannot_hold_is_refused_after_the_first_step(world):
    for odd in (np.float32(1), object(), [torch.ones(1)], (1, 2), {1: 2}, np.ones(2)):
        with pytest.raises(UserError, match="bad as "):
            refuse_unsaved({"fine": 1, "bad": odd})
    refuse_unsaved(dict(enumerate((1, True, "a", [1, [2.5]], {"a": None}, math.nan, np.float64(0.1)))))
    with pytest.raises(UserError, match="Schedule 0.0/bad as tuple"):
        go_on(begin(world, odd=lambda: (1, 2)), range(1))


def test_what_is_frozen_thawed_or_added_later_is_named_in_its_step(world):
    model = small()
    block = model.transformer["blocks"][0].requires_grad_(False)  # before the optimizer: it rests
    optimizer = adamw(model)
    state = TrainState(model, [optimizer], run_of(world))
    state.warm_up(model.dummy_inputs(2, world.device))
    go_on(state, range(2))
    for changed, name, trains in ((model.embed.weight, "embed.weight", True),
                                  (block.down.weight, "transformer.blocks.0.down.weight", False)):
        changed.requires_grad_(not trains)
        for use in (lambda: go_on(state, [2]), lambda: state.warm_up(model.dummy_inputs(2, world.device))):
            with pytest.raises(UserError, match=name):
                use()
        changed.requires_grad_(trains)
        model.zero_grad()
    go_on(state, [2])  # all is as it began
    other, state = nn.Linear(300, 200), begin(world, torch.optim.AdamW)
    state.optimizers[0].add_param_group({"params": [other.weight]})
    other(torch.ones(300)).sum().backward()
    with pytest.raises(RunError, match=r"AdamW .*\[200, 300\]"):
        go_on(state, range(1))


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


def test_names_that_a_record_has_already():
    for name in "labels bytes tokens mfu time skipped System epoch_loss val_x step own".split():
        with pytest.raises(UserError, match=f" {name} "):
            refuse_taken(["own", name])
    refuse_taken(["own", "square"])


# ------------------------------------------------------------------------------------------------ variants

# with a second head
VARIANT = """
from dataclasses import dataclass
import model

@dataclass
class GPT2Config(model.GPT2Config):
    second: bool = model.flag(False, "a second head")

class Variant(model.GPT2):
    Config = GPT2Config

    def __init__(self, config):
        super().__init__(config)
        if config.second:
            self.second = model.Linear(config.d_model, 8)

    def loss(self, hidden, idx, targets):
        objective, sums = super().loss(hidden, idx, targets)
        if self.config.second:
            objective = objective + 0.0 * self.second(hidden).sum()
        return objective, sums

GPT2 = Variant
"""


@pytest.mark.full
def test_a_variant_starts_from_its_baseline(shards, tmp_path):
    """What the weights lack begins as in a new model. The rest is theirs, bit for bit. It is named."""
    base = Trainer("train_gpt2.py", **FLAGS)
    own, wider = (edited(tmp_path / f"train_{width}.py", ("before", TOP, VARIANT.replace("8", width)),
                         **FLAGS) for width in "89")
    for flags in ({}, {"export": True}):
        ended(base.train(0, shards, tmp_path / "0", steps=4, **flags))
    second, lacks = {"second": True}, "lacks second, second.bias, second.weight"
    for i, (trainer, source, flags, code, named) in enumerate((
            (own, tmp_path / "0", second, 0, lacks), (own, f"hf:{tmp_path}/0/hf", second, 0, lacks),
            (own, tmp_path / "1", {}, 0, ""),  # the shape is that of the weights
            (wider, tmp_path / "1", {}, 2, r"second.\w+ .*\[8.*\] in .*\[9.*\] in Variant"),
            (base, tmp_path / "1", {}, 2, "family Variant, not GPT2")), 1):
        flags = {"steps": 1, "lr": 0.0, "strategy": "zero3", "init_from": source} | flags
        done = trainer.fork(2, shards, tmp_path / f"{i}", **flags)
        assert done.code == code and re.search(named, done.out), done.out
    before, after, again = (read_checkpoint(list_checkpoints(tmp_path / name)[0])["tensors"]["model"]
                            for name in "012")
    assert after.keys() - before.keys() == {"second.weight", "second.bias"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["second.weight"].std() > 0 and torch.equal(after["second.weight"], again["second.weight"])

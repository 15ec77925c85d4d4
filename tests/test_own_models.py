"""What a model or an optimizer of one's own may do to the state of a run, and what is refused."""

import inspect
import json
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, finish, place, start
from runs import Trainer, assert_same_run, copy_of_the_first_half, evaluations_of, steps_of
from states import run_of
from test_monitor import curves
from torch import nn
from train_recurrent import Recurrent

import data
import ddp_utils
import model as model_module
from cli.errors import RunError, UserError
from ddp_utils import Checkpoints, list_checkpoints, load_checkpoint, read_checkpoint
from model import GPT2, HRM, MLM, GPT2Config, hidden_matrices, use_device
from prepare.pipeline import prepare
from startup.directory import commit_of, run_files
from training.step import TrainState
from weights.sampling import KVCache, contradiction
from weights.use import load_run


class Counting(GPT2):
    """Buffers of several kinds, which each forward pass updates, also in evaluation."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.ones(config.d_model))
        self.register_buffer("bound", torch.zeros((), dtype=torch.long))
        self.register_buffer("unsaved", torch.zeros(2, dtype=torch.bool), persistent=False)
        self.register_buffer("absent", None)
        self.norm_of_batch = nn.BatchNorm1d(config.d_model)
        self.register_buffer("shared", self.norm_of_batch.running_mean)

    def hidden(self, idx, cache=None):
        x = super().hidden(idx, cache)
        self.scale.lerp_(x.detach().square().mean((0, 1)), 0.1)
        self.bound = self.bound + 1
        self.unsaved |= True
        return self.norm_of_batch(x.mT).mT


def small(model_class=Counting, **changes):
    torch.manual_seed(0)
    return model_class(GPT2Config(vocab_size=60, padded_vocab=64, seq_len=16, n_layer=1, n_head=2,
                                  d_model=16, **changes))


@pytest.fixture
def world():
    world = ddp_utils.init("gloo", "cpu")
    yield world
    torch.distributed.destroy_process_group()


def test_the_warm_up_and_evaluations_leave_all_buffers_as_they_were(world):
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
    assert model.shared is model.norm_of_batch.running_mean
    model.train()(**example)  # training does change them
    assert not set(same()) & {"scale", "bound", "unsaved", "norm_of_batch.running_mean"}


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, keeps):
        super().__init__(inner.param_groups, inner.defaults)
        self.parts = {"inner": [inner]}
        if not keeps:
            self.state = inner.state


def test_an_optimizer_whose_state_no_checkpoint_holds_is_refused(world):
    model = small(GPT2)
    for keeps in (False, True):
        optimizer = Lookahead(torch.optim.AdamW(model.parameters()), keeps)
        with pytest.raises(UserError, match="of AdamW, which Lookahead wraps") if keeps else nullcontext():
            TrainState(model, [optimizer], run_of(world))


@pytest.mark.parametrize("kind", ["step_pre", "step_post"])
def test_hooks_of_an_optimizer_that_zero1_rebuilds_are_refused(kind, world):
    """The advice: they are called where they are registered later, on either list."""
    model, run, calls = small(GPT2), run_of(world, strategy="zero1"), []
    optimizers = [torch.optim.AdamW(model.parameters())]
    removable = getattr(optimizers[0], f"register_{kind}_hook")(calls.append)
    with pytest.raises(UserError, match="on state.optimizers, after TrainState"):
        TrainState(model, optimizers, run)
    removable.remove()

    class Hooked(torch.optim.AdamW):  # made again with its hook
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            getattr(self, f"register_{kind}_hook")(lambda *_: None)

    assert len(TrainState(model, (Hooked(model.parameters()),), run).optimizers) == 1
    state = TrainState(model, optimizers, run)
    for of in (state.optimizers, optimizers):
        getattr(of[0], f"register_{kind}_hook")(lambda *_: calls.append(1))
    model(**model.dummy_inputs(2, world.device))[0].backward()
    state.optimizer_step(1e-2, state.clip_gradients(1.0))
    assert calls == [1, 1]


def test_a_parameter_in_no_optimizer_is_refused_by_name(world):
    model = small(GPT2)
    matrices = hidden_matrices(model)
    with pytest.raises(UserError, match=r"but embed.weight in 0, .*requires_grad_\(False\)"):
        TrainState(model, [torch.optim.Muon(matrices)], run_of(world))
    ids = {id(p) for p in matrices}
    for p in model.parameters():
        p.requires_grad_(id(p) in ids)
    TrainState(model, [torch.optim.Muon(matrices)], run_of(world))  # the advice: the others are frozen


def test_a_parameter_in_two_optimizers_is_refused(world):
    model = small(GPT2)
    once = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="but embed.weight in 2: "):
        TrainState(model, [once, torch.optim.SGD([model.embed.weight])], run_of(world))
    TrainState(model, [once], run_of(world))


class CountingBlock(model_module.GPT2Block):
    """Uses a running mean after it has updated it, as recomputation must do with the same value."""

    def __init__(self, c):
        super().__init__(c)
        self.register_buffer("scale", torch.ones(c.d_model))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.norm_of_batch = nn.BatchNorm1d(c.d_model)

    def block(self, x, rope, mask=None, cache=None):
        with torch.no_grad():
            self.scale.lerp_(x.square().mean((0, 1)), 0.1)
            self.calls = self.calls + 1
        return super().block(self.norm_of_batch(x.mT).mT / self.scale, rope, mask, cache)


def test_recomputation_updates_no_buffer_and_sees_what_the_first_pass_saw(monkeypatch):
    monkeypatch.setattr(model_module, "GPT2Block", CountingBlock)
    found = {}
    for mode in ("none", "block", "selective"):
        model = small(GPT2)
        idx = torch.arange(32).view(2, 16)
        for block in model_module.blocks_of(model):
            block.checkpointing = mode
        model(idx, idx)[0].backward()
        model(idx + 1, idx)[0].backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found[mode] = gradients | dict(model.named_buffers())
        assert model.transformer["blocks"][0].calls == 2
    for mode in ("block", "selective"):
        assert all(torch.equal(found[mode][name], t) for name, t in found["none"].items()), mode


def dropped(block, x):
    return nn.functional.dropout(x, 0.2, block.training)


def skipped(block, x):
    """Stochastic depth."""
    return x * (torch.rand(len(x), 1, 1) < 0.8)


def noisy(block, x):
    return x + 0.1 * torch.randn_like(x)


@pytest.mark.parametrize("draw", [dropped, skipped, noisy])
@pytest.mark.parametrize("model_class, block_class", [
    (GPT2, model_module.GPT2Block), (HRM, model_module.HRMBlock), (MLM, model_module.MLMBlock)])
def test_recomputation_draws_what_a_block_of_ones_own_drew(monkeypatch, model_class, block_class, draw):
    plain = block_class.block
    monkeypatch.setattr(block_class, "block", lambda self, x, *args: plain(self, draw(self, x), *args))
    torch.manual_seed(0)
    model = model_class(model_class.Config(vocab_size=60, padded_vocab=64, seq_len=16, n_layer=2, n_head=2,
                                           d_model=16))
    found = []
    for mode in ("none", "selective", "block"):
        for block in model_module.blocks_of(model):
            block.checkpointing = mode
        model.zero_grad()
        torch.manual_seed(3)
        loss = model(**model.dummy_inputs(2, "cpu"))[0]
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


@pytest.mark.parametrize("model_class", [GPT2, HRM, MLM])
def test_logits_have_a_column_for_each_id_and_none_for_padding(model_class):
    config = model_class.Config(vocab_size=60, padded_vocab=64, seq_len=16, n_layer=1, n_head=2, d_model=16)
    model = model_class(config).eval()
    idx = torch.arange(32).view(2, 16)
    logits = model(idx)
    assert logits.shape == (2, 16, 60)
    if model_class is MLM:
        place = torch.arange(16).expand(2, -1)
        loss = model(idx, place, idx)[1]["loss"]
    else:
        loss = model(idx, idx)[1]["loss"]
        assert model.decode(idx, KVCache(16)).shape == (2, 60)
    ours = nn.functional.cross_entropy(logits.flatten(0, 1), idx.flatten(), reduction="sum")
    assert abs(ours - loss) <= 1e-5 * loss


# ------------------------------------------------------------------------------- logits of one's own

def own_logits(model_class):
    """Capped, with another best id, and with a parameter of their own, a power of two."""
    class Own(model_class):
        def __init__(self, config):
            super().__init__(config)
            self.gain = nn.Parameter(torch.tensor([2.0]))

        def logits(self, hidden):
            some = super().logits(hidden) * self.gain.to(hidden.dtype)
            return 3 * torch.tanh((some + torch.arange(60) / 30) / 3)

    return Own


PAIRS = {"start": 57, "response": 58}
OWN = {"gpt2": (GPT2, {"n_head": 2, "d_model": 16, **PAIRS}),
       "hrm": (HRM, {"n_head": 2, "d_model": 16, "ff": 48, "halt": True, **PAIRS}),
       "recurrent": (Recurrent, {"width": 16, **PAIRS})}


def built(model_class, **config):
    torch.manual_seed(0)
    shape = {"vocab_size": 60, "padded_vocab": 64, "seq_len": 16} | config
    return model_class(model_class.Config(**shape))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("kind", OWN)
def test_losses_are_of_the_logits_that_write(kind, z_loss, training):
    """Value, gradients, losses of tokens and exact answers, in float32."""
    model_class, config = OWN[kind]
    model = built(own_logits(model_class), **config).train(training)
    model.z_loss = z_loss
    idx = torch.randint(57, (4, 16))
    idx[:, 0], idx[:, 5] = 57, 58
    logits = model(idx)
    assert logits.shape == (4, 16, 60) and logits.abs().max() < 3
    labels = logits.argmax(-1)  # of the first row: the others have a mistake in their response
    labels[1:, 9] = 7
    labels[:, :5] = -1
    tokens = nn.functional.cross_entropy(logits.mT, labels, ignore_index=-1, reduction="none")
    wanted = tokens + z_loss * logits.logsumexp(-1).square() * (labels >= 0)
    objective, sums = model(idx, labels)
    one_by_one, same = model(idx, labels, per_token=True)
    torch.testing.assert_close(one_by_one, wanted)
    torch.testing.assert_close(objective, wanted.sum())
    assert sums["loss"] == pytest.approx(tokens.sum().item()) == same["loss"].item()
    if not training:
        assert (sums["samples"], sums["exact"]) == (4, 1)
    expected = torch.autograd.grad(wanted.sum(), [*model.parameters()], allow_unused=True)
    for found in (objective, one_by_one.sum()):
        for a, b in zip(torch.autograd.grad(found, [*model.parameters()], allow_unused=True), expected):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_only_logits_of_ones_own_are_called_by_the_loss():
    model = small(GPT2)
    assert model.own_logits is None and built(HRM, n_head=2, d_model=16).own_logits is None
    idx = torch.arange(32).view(2, 16)
    plain = model(idx, idx)[1]["loss"]
    model.logits = lambda hidden: GPT2.logits(model, hidden) / 2  # as a trainer may write
    cooler = model(idx, idx)[1]["loss"]
    assert cooler != plain
    assert cooler == pytest.approx(nn.functional.cross_entropy(model(idx).mT, idx, reduction="sum").item())


def test_logits_of_ones_own_take_no_memory_and_draw_the_same_again():
    """As many rows as two chunks have; those that are dropped are the same in the backward pass."""
    class Dropped(GPT2):
        def logits(self, hidden):
            return super().logits(nn.functional.dropout(hidden, 0.5, self.training))

    model = built(Dropped, n_head=2, d_model=16, n_layer=1, seq_len=512)
    idx = torch.randint(60, (2, 512))
    x = model.hidden(idx).detach()
    kept = []
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        objective, _ = model.loss(x, idx, idx)
    assert max(kept, default=0) < 512 * 60
    torch.manual_seed(1)
    logits = torch.stack([model.logits(row) for row in x])
    wanted = nn.functional.cross_entropy(logits.mT, idx, reduction="sum")
    torch.testing.assert_close(objective, wanted)
    a, b = (torch.autograd.grad(loss, model.head_weight)[0] for loss in (objective, wanted))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base, config", [OWN["gpt2"], OWN["hrm"]])
def test_a_loss_of_ones_own_is_that_of_tokens_too(base, config):
    class Half(base):
        def loss(self, hidden, idx, targets, **more):
            return super().loss(0.5 * hidden, idx, targets, **more)

    class Whole(base):
        def loss(self, hidden, idx, targets):
            return super().loss(hidden, idx, targets)

    idx = torch.randint(57, (2, 16))
    half, whole = (built(model_class, **config) for model_class in (Half, Whole))
    tokens, _ = half(idx, idx, per_token=True)
    torch.testing.assert_close(tokens.sum(), half(idx, idx)[0])
    assert tokens.sum() != whole(idx, idx)[0]
    with pytest.raises(TypeError, match="reduction"):
        whole(idx, idx, per_token=True)


# ---------------------------------------------------------------- models that write otherwise than they learn

def windowed(model_class):
    class Windowed(model_class):
        def mask(self, idx, cache, flex=True):
            return model_module.attention_mask(lambda b, h, i, j: (j <= i) & (i - j < 4), idx, False)

    return Windowed


class Cached(GPT2):
    """A window that the cache heeds as well."""

    def mask(self, idx, cache, flex=True):
        i, j = (torch.arange(begin, cache.length + idx.size(1) if cache else idx.size(1))
                for begin in (cache.length if cache else 0, 0))
        return (j <= i[:, None]) & (i[:, None] - j < 4)


class Content(GPT2):
    """Only even tokens are seen."""

    def mask(self, idx, cache, flex=True):
        return model_module.attention_mask(
            lambda b, h, i, j: (j <= i) & ((idx[b, j] % 2 == 0) | (i == j)), idx, False)


class Ahead(GPT2):
    """Half of the next token."""

    def hidden(self, idx, cache=None):
        x = super().hidden(idx, cache)
        return x + 0.5 * nn.functional.pad(x[:, 1:], (0, 0, 0, 1))


class Behind(GPT2):
    def hidden(self, idx, cache=None):
        x = super().hidden(idx, cache)
        return x + 0.5 * nn.functional.pad(x[:, :-1], (0, 0, 1, 0))


class Uncached(GPT2):
    """Caps what it shows when asked for logits, but not what it writes."""

    def forward(self, idx, targets=None, per_token=False):
        found = super().forward(idx, targets, per_token)
        return 0.1 * torch.tanh(10 * found) if targets is None else found


class Alibi(model_module.GPT2Block):
    """Which counts positions from the first token that is new."""

    heeds_cache = False

    def attend(self, q, k, v, mask=None):
        new, old = (torch.arange(t.size(2)) for t in (q, k))
        if self.heeds_cache:
            new = new + k.size(2) - q.size(2)
        ago = (new[:, None] - old).float()
        bias = torch.where(ago >= 0, -0.5 * ago.abs(), -torch.inf) if self.heeds_cache else -0.5 * ago.abs()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Noisy(GPT2):
    def hidden(self, idx, cache=None):
        x = super().hidden(idx, cache)
        return x + 0.1 * torch.randn_like(x)


class Mine(GPT2):
    """A loss of its own."""

    def loss(self, hidden, idx, targets):
        return super().loss(0.5 * hidden, idx, targets)


class AlsoMine(GPT2):
    def forward(self, idx, targets=None, per_token=False):
        found = super().forward(idx, targets, per_token)
        return found if targets is None else (found[0], {"loss": 2 * found[1]["loss"]})


def writes(model) -> str:
    torch.manual_seed(1)
    for p in model.parameters():  # as large as trained ones; --modern begins with zeros
        p.data.add_(0.2 * torch.randn(p.shape))
    return contradiction(model.train(), torch.device("cpu"))


TEXT = {"n_head": 2, "d_model": 16, "n_layer": 2, "seq_len": 32}
RIGHT = [(model_class, TEXT | more) for model_class, more in [
    (GPT2, {}), (GPT2, {"modern": True}), (GPT2, {"dropout": 0.5}), (GPT2, {"seq_len": 1}),
    *((GPT2, PAIRS | {"attention": attention, "modern": modern})
      for attention in ("isolated", "prefix", "causal") for modern in (False, True)),
    (GPT2, {"attention": "isolated", "start": 57}),
    (HRM, {"n_layer": 1}), (HRM, PAIRS | {"n_layer": 1}), (HRM, PAIRS | {"halt": True}),
    (HRM, {"h_cycles": "2:4"}), (HRM, {"halt": True, "dropout": 0.1, "inject_input": True}),
    (own_logits(HRM), {"halt": True}), (own_logits(GPT2), {}), (Cached, {}), (Noisy, {}), (Counting, {}),
    (Mine, {}), (AlsoMine, {})]] + [(Recurrent, {"width": 16, "seq_len": 32})]
WRONG = [(model_class, TEXT | more) for model_class, more in [
    (windowed(GPT2), {}), (windowed(GPT2), {"modern": True}), (windowed(GPT2), PAIRS), (windowed(HRM), {}),
    (windowed(HRM), {"halt": True}), (Content, {}), (Ahead, {}), (Behind, {}), (Uncached, {})]]


@pytest.mark.parametrize("model_class, config", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_write_as_they_learn(model_class, config, dtype):
    model = built(model_class, **config)
    use_device(model, torch.device("cpu"), dtype)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(1)
    random, attributes = torch.get_rng_state(), dict(vars(model))
    assert contradiction(model, torch.device("cpu")) == ""
    assert torch.equal(torch.get_rng_state(), random) and vars(model) == attributes and model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert writes(model) == ""


@pytest.mark.parametrize("model_class, config", WRONG)
def test_models_that_write_otherwise_than_they_learn(model_class, config):
    for dtype in (torch.float32, torch.bfloat16):
        model = built(model_class, **config)
        use_device(model, torch.device("cpu"), dtype)
        assert "in two passes" in writes(model)


@pytest.mark.parametrize("heeds", [True, False])
def test_positions_of_a_bias(monkeypatch, heeds):
    """ALiBi."""
    monkeypatch.setattr(model_module, "GPT2Block", Alibi)
    monkeypatch.setattr(Alibi, "heeds_cache", heeds)
    assert bool(writes(built(GPT2, **TEXT))) is not heeds


@pytest.mark.parametrize("model_class", [GPT2, HRM])
def test_an_edit_of_the_library_is_found_where_the_loss_does_not_see_it(monkeypatch, model_class):
    plain = model_module.CausalLM.logits
    monkeypatch.setattr(model_module.CausalLM, "logits", lambda self, hidden: 0.5 * plain(self, hidden))
    said = writes(built(model_class, **TEXT))
    assert said.startswith(f"{model_class.__name__} would not") and "the loss differs" in said
    assert writes(built(Mine, **TEXT)) == ""


def test_a_mask_of_ones_own_restarts_no_positions():
    """Positions follow --attention."""
    config = TEXT | {"start": 7}
    idx = torch.randint(60, (2, 32))
    idx[:, 9] = 7
    for model_class, wanted in ((windowed(GPT2), False), (GPT2, True)):
        model = built(model_class, **config, attention="isolated" if wanted else "causal").eval()
        exchanged = built(model_class, **config, attention="isolated" if wanted else "causal").eval()
        exchanged.positions.weight.data[23:] = 0  # of positions 23 to 31, which none has after a restart
        assert torch.equal(model(idx), exchanged(idx)) is wanted


WINDOW = """
class Windowed(GPT2):
    def mask(self, idx, cache, flex=True):
        from model import attention_mask
        return attention_mask(lambda b, h, i, j: (j <= i) & (i - j < 4), idx, False)


def parse_args("""


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.full)])
def test_the_sample_is_refused_and_not_the_training(shards, tmp_path, strategy):
    """On two processes."""
    text = (ROOT / "train_gpt2.py").read_text()
    path = tmp_path / "train_windowed.py"
    path.write_text(re.sub(r"(?<=[(])GPT2(?=,)", "Windowed", text).replace("\ndef parse_args(", WINDOW))
    trainer = Trainer(str(path), steps=8, eval_every=4, sample_every=1, max_new_tokens=3, lr=1e-2)
    done = trainer.fork(2, shards, tmp_path / "run", strategy=strategy)
    assert done.code == 0 and "training complete" in done.out, done.out
    refused = r"a sample after step (\d):\n\(none: Windowed would not generate what it learns"
    assert re.findall(refused, done.out) == ["4", "8"], done.out
    for flags in (["--prompt", "def"], ["--chat"]):
        done = trainer.here("--out", tmp_path / "run", *flags)
        assert done.code == 2 and "Windowed would not generate what it learns" in done.out, done.out
    assert trainer.here("--out", tmp_path / "run", "--data", shards, "--eval-only").code == 0


class Schedule(torch.optim.Optimizer):
    """Keeps numbers of several kinds in its groups and in its state, as schedulefree and others do."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0, weight_sum=0.0, history=(), odd=None):
        defaults = {"lr": lr, "weight_decay": weight_decay, "k": 0, "weight_sum": weight_sum, "lr_max": -1.0,
                    "history": history, "mode": "begin", "swapped": None, "odd": odd}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["lr_max"] = max(group["lr_max"], group["lr"])
            group["weight_sum"] += group["k"] * group["lr_max"] ** 2
            group["history"] = [*group["history"], group["k"]][-2:]
            group["mode"], group["swapped"] = f"step {group['k']}", group["k"] % 2 == 0
            group["total"] = group.get("total", 0) + group["k"]
            if group["odd"]:
                group["bad"] = group["odd"]()
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                state["step"] = state.get("step", 0) + 1
                state["nested"] = {"a": [state["step"], [None, True]], "b": 0.5 * state["step"]}
                rate = group["lr"] * group["weight_sum"] / (1 + group["total"]) / state["nested"]["b"]
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(state["mean"], alpha=-float(rate))


def begin(world, optimizer=Schedule, strategy: str = "ddp", **options) -> TrainState:
    model = small(GPT2)
    optimizers = [optimizer(model.parameters(), lr=1e-2, **options)]
    return TrainState(model, optimizers, run_of(world, strategy=strategy))


def go_on(state: TrainState, steps, lr: float = 1e-2) -> None:
    for step in steps:
        idx = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(step))
        state.model(idx, idx)[0].backward()
        state.optimizer_step(lr, state.clip_gradients(1.0))


def saved_as(state: TrainState, world, out):
    checkpoints = Checkpoints(out, world, 9, lambda text: None)
    checkpoints.directory.mkdir(parents=True, exist_ok=True)
    meta = {"samples": 7, "loss": 2.5, "settings": {"steps": 10}}
    checkpoints.save(3, state, meta)
    checkpoints.close()
    return load_checkpoint(out, print)


def test_numbers_of_an_optimizer_are_restored_also_the_second_time(world, tmp_path):
    whole = begin(world)
    go_on(whole, range(9))
    state = begin(world)
    for part in range(3):
        go_on(state, range(3 * part, 3 * part + 3))
        saved = saved_as(state, world, tmp_path / str(part))
        values = state.optimizers[0].param_groups[0]
        state = begin(world)
        state.load_state_dict(saved, print)
        group = state.optimizers[0].param_groups[0]
        assert {k: v for k, v in group.items() if k not in ("params", "lr")} == {
            k: v for k, v in values.items() if k not in ("params", "lr")}
    ours, theirs = state.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert state.non_tensor_values() == whole.non_tensor_values()


def test_a_new_weight_decay_wins_on_a_resume(world, tmp_path):
    for optimizer in (Schedule, torch.optim.AdamW):
        state = begin(world, optimizer, weight_decay=0.1)
        go_on(state, range(3))
        saved = saved_as(state, world, tmp_path / optimizer.__name__)
        state = begin(world, optimizer, weight_decay=0.3)
        state.load_state_dict(saved, print)
        go_on(state, range(3, 4), lr=5e-3)
        group = state.optimizers[0].param_groups[0]
        assert group["weight_decay"] == 0.3 and group["lr"] == 5e-3
    assert saved["plain"] == {}


@pytest.mark.parametrize("odd", [lambda: np.float32(1), lambda: object(), lambda: [torch.ones(1)],
                                 lambda: (1, 2), lambda: {1: 2}, lambda: np.ones(2)])
def test_what_a_checkpoint_cannot_hold_is_refused_after_the_first_step(world, odd):
    with pytest.raises(UserError, match="an optimizer keeps Schedule 0.0/bad as .* cannot hold"):
        go_on(begin(world, odd=odd), range(1))


@pytest.mark.parametrize("fine", [1, True, "a", [1, [2.5]], {"a": None}, math.nan, np.float64(0.1)], ids=str)
def test_what_a_checkpoint_can_hold(world, fine):
    state = begin(world, odd=lambda: fine)
    go_on(state, range(1))
    assert str(state.non_tensor_values()["Schedule 0.0/bad"]) == str(fine)


class Late(torch.optim.SGD):
    """Makes state in its third step."""

    def step(self):
        super().step()
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            state = self.state[p]
            state["t"] = state.get("t", 0) + 1
            if state["t"] == 3:
                state["slow"] = p.detach().clone()


def test_state_that_is_made_late_begins_anew_with_a_warning(world, tmp_path):
    state = begin(world, Late)
    go_on(state, range(2))
    saved, said = saved_as(state, world, tmp_path / "early"), []
    begin(world, Late).load_state_dict(saved, said.append)
    assert not said
    go_on(state, range(2, 4))
    begin(world, Late).load_state_dict(saved_as(state, world, tmp_path / "late"), said.append)
    assert len(said) == 1 and "WARNING: the optimizer starts from scratch with embed.weight, " in said[0]


BUFFERS = '''
class Mine(GPT2):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean_square", torch.ones(config.d_model))

    def hidden(self, idx, cache=None):
        x = super().hidden(idx, cache)
        if self.training:
            new = x.detach().float().square().mean((0, 1))
            SHARE
            self.mean_square.lerp_(new, 0.1)
        return x / self.mean_square.sqrt().to(x.dtype)

'''
SHARE = '''if torch.distributed.is_initialized():
                torch.distributed.all_reduce(new)
                new /= torch.distributed.get_world_size()'''
FLAGS = {"steps": 8, "save_every": 4, "eval_every": 4, "batch": 3, "max_new_tokens": 3}


def own_trainer(directory, share: str) -> Trainer:
    """A copy of the trainer of GPT-2 with a running buffer and with an optimizer that keeps numbers."""
    text = (ROOT / "train_gpt2.py").read_text()
    head, main = text.split("# Only `tiny`", 1)
    main = re.sub(r"\bGPT2\b", "Mine", main)
    main, found = re.subn(r"make_optimizers\(model.*\)", "[Schedule(model.parameters())]", main)
    assert found == 1
    head += "import torch\n" + inspect.getsource(Schedule) + BUFFERS.replace("SHARE", share)
    path = directory / "train_own.py"
    path.write_text(head + "# Only `tiny`" + main)
    return Trainer(str(path), **FLAGS)


def test_a_buffer_of_a_ranks_own_data_is_named_and_no_node_is_blamed(shards, tmp_path):
    done = own_trainer(tmp_path, "pass").fork(2, shards, tmp_path / "run")
    assert done.code == 1 and "error: mean_square on rank " in done.out, done.out
    assert "from the data of its own rank" in done.out and "check the memory" not in done.out


@pytest.mark.parametrize("ranks, changes", [
    (0, {"checkpoint_activations": "block", "ema": 0.9}), (2, {"strategy": "zero1"}),
    *(pytest.param(2, {"strategy": name}, marks=pytest.mark.full) for name in ("ddp", "zero2", "zero3")),
    pytest.param(3, {"comm": "bf16", "batch": 2}, marks=pytest.mark.full)])
def test_buffers_and_numbers_resume_bit_for_bit(ranks, changes, shards, tmp_path):
    trainer = own_trainer(tmp_path, SHARE)
    run = trainer.fork if ranks else trainer.train
    done = run(ranks, shards, tmp_path / "whole", **changes)
    assert done.code == 0, done.out
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    done = run(ranks, shards, tmp_path / "resumed", **changes)
    assert done.code == 0 and "resuming after step 4" in done.out, done.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


# ------------------------------------------------------------------------------ what trains, and what else


def test_what_is_frozen_or_thawed_later_is_named_in_its_step(world):
    model = small(GPT2)
    block = model.transformer["blocks"][0].requires_grad_(False)  # after or before the optimizer: it rests
    state = TrainState(model, [torch.optim.AdamW(model.parameters())], run_of(world))
    state.warm_up(model.dummy_inputs(2, world.device))
    go_on(state, range(2))
    model.embed.requires_grad_(False)
    with pytest.raises(UserError, match="requires_grad of embed.weight has changed since TrainState began"):
        go_on(state, [2])
    model.embed.requires_grad_(True)
    block.down.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"requires_grad of transformer.blocks.0.down.weight has changed"):
        state.warm_up(model.dummy_inputs(2, world.device))
    with pytest.raises(UserError, match=r"requires_grad of transformer.blocks.0.down.weight has changed"):
        go_on(state, [2])
    block.requires_grad_(False)
    model.zero_grad()
    go_on(state, [2])  # all is as it began


IN_LOOP = "        lr = learning_rate("


def edited(directory, name: str, *changes, trainer: str = "train_gpt2.py") -> Trainer:
    """A copy of a trainer with lines put before others, or in their place if these begin with `=`."""
    text = (ROOT / trainer).read_text()
    for anchor, lines in changes:
        assert text.count(anchor) == 1, anchor
        text = text.replace(anchor, lines[1:] if lines[0] == "=" else lines + anchor)
    path = directory / f"train_{name}.py"
    path.write_text(text)
    return Trainer(str(path), **FLAGS)


@pytest.mark.parametrize("ranks, strategy, step", [
    (2, "ddp", 2), pytest.param(0, "ddp", 4, marks=pytest.mark.full),
    *(pytest.param(2, name, 4, marks=pytest.mark.full) for name in ("zero1", "zero2", "zero3"))])
def test_a_run_ends_in_the_step_in_which_a_block_thaws(ranks, strategy, step, shards, tmp_path):
    """Step 4 comes after an evaluation, for which zero2 has gathered the parameters."""
    freeze = '    model.transformer["blocks"][0].requires_grad_(False)\n'
    thaw = f"        model.transformer['blocks'][0].requires_grad_(step >= {step})\n"
    trainer = edited(tmp_path, "thaws", ("    state = TrainState(", freeze), (IN_LOOP, thaw))
    done = trainer.fork(ranks, shards, tmp_path / "run", n_layer=2, strategy=strategy)
    assert done.code == 2 and "error: requires_grad of transformer.blocks.0.attn_norm.weight, " in done.out
    assert "memory" not in done.out.partition("error:")[2] and "find_unused" not in done.out
    assert [record["step"] for record in steps_of(tmp_path / "run")] == [*range(1, step + 1)]


def test_an_optimizer_of_another_network_is_refused_without_its_numbers(world):
    model, other = small(GPT2), nn.Linear(300, 200)
    optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.Adam(other.parameters())]
    with pytest.raises(UserError, match=r"not the model's \(2, one of shape \[200, 300\]\)") as refused:
        TrainState(model, optimizers, run_of(world))
    assert len(str(refused.value)) < 300
    grouped = torch.optim.AdamW(model.parameters())
    grouped.add_param_group({"params": [nn.Parameter(torch.zeros(()))]})  # a learned weight of a loss
    with pytest.raises(UserError, match=r"not the model's \(1, one of shape \[\]\)"):
        TrainState(model, [grouped], run_of(world))
    state = TrainState(model, optimizers[:1], run_of(world))
    optimizers[0].add_param_group({"params": [other.weight]})  # too late for that
    other(torch.ones(300)).sum().backward()
    with pytest.raises(RunError, match=r"AdamW keeps state of .*\[200, 300\].*, which is no param"):
        go_on(state, range(1))


INSIDE = """class Mine(GPT2):
    def __init__(self, config):
        super().__init__(config)
        self.probe = Linear(config.d_model, 1)

    def loss(self, hidden, idx, targets):
        objective, sums = super().loss(hidden, idx, targets)
        error = (self.probe(hidden.detach()).squeeze(-1) - idx).float().square()
        error = (error * (targets >= 0)).sum()
        return objective + 1e-3 * error, sums | {"probe": error.detach()}


"""


@pytest.mark.parametrize("ranks, strategy", [(0, "ddp"), pytest.param(2, "zero3", marks=pytest.mark.full)])
def test_a_network_that_is_part_of_the_model_resumes(ranks, strategy, shards, tmp_path):
    """The way that docs/changing.md names."""
    head, main = (ROOT / "train_gpt2.py").read_text().split("def parse_args(", 1)
    main = re.sub(r"\bGPT2\b", "Mine", "def parse_args(" + main)
    path = tmp_path / "train_inside.py"
    path.write_text(head.replace("import GPT2,", "import GPT2, Linear,") + INSIDE + main)
    trainer = Trainer(str(path), **FLAGS)
    done = trainer.fork(ranks, shards, tmp_path / "whole", strategy=strategy)
    assert done.code == 0 and "that are not the model's" not in done.out, done.out
    assert steps_of(tmp_path / "whole")[-1]["probe"] < steps_of(tmp_path / "whole")[0]["probe"]
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    done = trainer.fork(ranks, shards, tmp_path / "resumed", strategy=strategy)
    assert done.code == 0 and "resuming after step 4" in done.out, done.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


# --------------------------------------------------------------------------------- curves, constants, sets


SQUARES = """
class Mine(GPT2):
    def loss(self, hidden, idx, targets):
        objective, sums = super().loss(hidden, idx, targets)
        extra = (hidden.float().square().mean(-1) * (targets >= 0)).sum()
        return objective + 1e-4 * extra, sums | {"NAME": extra.detach()}

"""


def own_numbers(tmp_path, name="square", result="mine", number="own") -> Trainer:
    """A copy of the trainer of GPT-2 with a sum of the model, a result of an evaluation and a number of a
    step.
    """
    head, main = (ROOT / "train_gpt2.py").read_text().split("# Only `tiny`", 1)
    main = re.sub(r"\bGPT2\b", "Mine", main).replace("grad_norm, lr=lr)", f"grad_norm, lr=lr, {number}=1.5)")
    mark = "            if log.evaluation("
    assert mark in main and f"{number}=1.5" in main
    main = main.replace(mark, f"            results[{result!r}] = 2.5\n{mark}")
    path = tmp_path / f"train_{name}_{result}_{number}.py"
    path.write_text(head + SQUARES.replace("NAME", name) + "# Only `tiny`" + main)
    return Trainer(str(path), **FLAGS)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_every_sum_and_every_result_is_a_curve(ranks, shards, tmp_path):
    done = own_numbers(tmp_path).train(ranks, shards, tmp_path / "run")
    assert done.code == 0, done.out
    train, found = steps_of(tmp_path / "run")[-1], evaluations_of(tmp_path / "run")[-1]
    assert train["square"] > 0 and train["own"] == 1.5
    assert found["val_square"] == pytest.approx(train["square"], rel=0.5) and found["mine"] == 2.5
    assert re.search(r"validation loss .* \| val_square [\d.]+ \| mine 2.5 \|", done.out), done.out
    tags = curves(tmp_path / "run").keys()
    assert {"Train/square", "Train/own", "Val/val_square", "Val/mine"} <= tags, tags


@pytest.mark.parametrize("names", [
    {"name": "labels"}, {"number": "tokens"}, *(pytest.param(names, marks=pytest.mark.full) for names in (
        {"name": "bytes"}, {"name": "val_x"}, {"name": "lr"}, {"number": "mfu"}, {"number": "time"},
        {"number": "square"}, {"number": "skipped"}, {"number": "System"}, {"number": "epoch_loss"},
        {"number": "val_loss"},
        {"result": "step"}, {"result": "loss"}, {"result": "lr"}, {"result": "tokens"}))])
def test_a_name_that_a_record_has_already_is_refused(names, shards, tmp_path):
    done = own_numbers(tmp_path, **names).train(0, shards, tmp_path / "run")
    called = next(iter(names.values()))
    if "result" in names:
        called = called.removeprefix("val_")
    assert done.code == 2, done.out
    sentence = rf"error: a number called {called} cannot be logged, .*another\.$"
    assert re.search(sentence, done.out, re.M), done.out


def test_another_constant_of_the_trainer_is_printed_on_a_resume(shards, tmp_path):
    path = tmp_path / "train_constant.py"
    text = (ROOT / "train_gpt2.py").read_text()
    path.write_text(text)
    trainer = Trainer(str(path), **FLAGS)
    assert trainer.train(0, shards, tmp_path / "run", steps=4).code == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert settings["BETAS"] == [0.9, 0.95] and settings["min_lr"] == 0.1 and "SIZES" not in settings
    same = trainer.train(0, shards, tmp_path / "run", steps=4)
    assert "resuming with" not in same.out, same.out
    path.write_text(text.replace("BETAS = 0.9, 0.95", "BETAS = 0.9, 0.99"))
    other = trainer.fork(0, shards, tmp_path / "run", steps=8)
    assert other.code == 0 and "resuming with BETAS [0.9, 0.99] (was [0.9, 0.95])" in other.out, other.out


def copy_of_the_trainer(path, text: str, *changes: tuple[str, str]) -> Trainer:
    """train_gpt2.py with a text before its sizes and changes after it."""
    head, main = (ROOT / "train_gpt2.py").read_text().split("# Only `tiny`", 1)
    for old, new in changes:
        main = re.sub(old, new, main)
    path.write_text(head + text + "# Only `tiny`" + main)
    return Trainer(str(path), **FLAGS)


SILU = """
from dataclasses import dataclass
import model

@dataclass
class GPT2Config(model.GPT2Config):
    silu: bool = model.flag(False, "SiLU instead of GELU")

class GPT2(model.GPT2):
    Config = GPT2Config

"""


def test_a_flag_added_to_a_model_counts_as_its_default_in_older_runs(shards, tmp_path):
    """The guide's own example: an older run resumes as it was, and with the flag is refused."""
    trainer = Trainer("train_gpt2.py", **FLAGS)
    assert trainer.train(0, shards, tmp_path / "run", steps=4).code == 0
    (tmp_path / "copy").mkdir()
    silu = copy_of_the_trainer(tmp_path / "copy" / "train_gpt2.py", SILU)
    refused = silu.fork(0, shards, tmp_path / "run", silu=True)
    assert refused.code == 2 and "was trained with silu False, not True: leave that" in refused.out
    done = silu.fork(0, shards, tmp_path / "run")
    assert done.code == 0 and "resuming after step 4" in done.out, done.out


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_knows_the_program_that_began_it(ranks, shards, tmp_path):
    """A resumed run whose trainer has changed since says so, once; the text stays that of the beginning."""
    path, out = tmp_path / "train_mine.py", tmp_path / "run"
    mine = copy_of_the_trainer(path, "")
    first = path.read_text()
    assert mine.fork(ranks, shards, out, steps=2).code == 0
    assert (out / "trainer.py").read_text() == first
    same = mine.fork(ranks, shards, out, steps=3)
    assert same.code == 0 and "resuming after step 2" in same.out and "has changed" not in same.out, same.out
    mine = copy_of_the_trainer(path, "", ("= 0.9, 0.95", "= 0.9, 0.99"))
    changed = mine.fork(ranks, shards, out, steps=4)
    now = os.path.relpath(path, ROOT)
    said = f"{now} has changed since: diff {out}/trainer.py {now}\n"
    assert changed.code == 0 and changed.out.count(said) == 1, changed.out
    assert (out / "train.log").read_text().count(said) == 1
    assert (out / "trainer.py").read_text() == first
    assert mine.fork(ranks, shards, tmp_path / "branch", resume=out, steps=6).code == 0
    assert (tmp_path / "branch" / "trainer.py").read_text() == path.read_text()  # which began that one


def imported_by(module: str) -> set[str]:
    """The files of this repository that a new process loads when it imports a module, but for __init__.py."""
    code = f"import sys, {module}; print(*(getattr(m, '__file__', None) for m in [*sys.modules.values()]))"
    done = finish(start([sys.executable, "-c", code], cwd=ROOT))
    paths = [Path(word) for word in done.out.split() if word.startswith(f"{ROOT}/")]
    return {str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"}


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_knows_its_model(ranks, shards, tmp_path):
    """What a run keeps of its model's code is compared at each use. A copy of a trainer in another folder
    keeps as much.
    """
    out = tmp_path / "run"
    trainer = Trainer("train_gpt2.py", **FLAGS) if ranks else copy_of_the_trainer(
        tmp_path / "train_mine.py", "")
    assert trainer.fork(ranks, shards, out, steps=2).code == 0
    kept, text = out / "model" / "model.py", (ROOT / "model.py").read_text()
    copies = {str(path.relative_to(out / "model")) for path in (out / "model").rglob("*.py")}
    assert all((out / "model" / name).read_bytes() == (ROOT / name).read_bytes() for name in copies)
    imported = imported_by("train_gpt2")
    assert {"model.py", "data.py", "ddp_utils.py"} < imported and imported - copies == {"train_gpt2.py"}
    assert {Path(name).parts[0] for name in copies - imported} <= {Path(name).parts[0] for name in imported}
    if ranks:  # nothing that it imports is missing
        done = finish(start([sys.executable, out / "trainer.py", "--help"], cwd=tmp_path,
                            PYTHONPATH=out / "model"))
        assert done.code == 0 and str(ROOT) not in done.out, done.out
    silent = trainer.fork(ranks, shards, out, steps=3)
    assert silent.code == 0 and "has changed" not in silent.out, silent.out
    kept.write_text(text + "# a comment\n")
    said = f"model.py has changed since: diff {kept} model.py\n"
    uses = [{"steps": 4}, {"prompt": "To be", "max_new_tokens": 1}]
    uses += [{"eval_only": True}, {"export": True}] if ranks else []  # in the second tier
    for flags in uses:
        found = trainer.fork(ranks, shards, out, **flags)
        assert found.code == 0 and found.out.count(said) == 1, (flags, found.out)
        assert found.out.count("has changed") == 1, (flags, found.out)  # no other file's
    kept.unlink()
    older = trainer.fork(ranks, shards, out, steps=5)
    assert older.code == 0 and "has changed" not in older.out, older.out
    config = json.loads((out / "config.json").read_text())
    assert len(config["commits"]) == len(config["commands"]) == 4
    assert config["parameters"] == sum(p.numel() for p in load_run(GPT2, out)[0].parameters())
    assert config["training_tokens"] == data.Dataset([shards], 32).train.num_tokens


def test_a_config_that_is_damaged_is_written_anew(tmp_path):
    """A note for people: no shape of it ends a start. The trainer is kept byte for byte."""
    trainer = tmp_path / "train_mine.py"
    trainer.write_bytes(b"\xff = 1\r\n")
    dataset = SimpleNamespace(tokenizer=SimpleNamespace(to_json=str), train=SimpleNamespace(num_tokens=9))
    run = SimpleNamespace(out=tmp_path, saved=None, command="python", given={}, trainer=trainer,
                          dataset=dataset)
    model = torch.nn.Linear(2, 3)
    for text, commands in (("[]", 1), ('{"commands": null}', 1), ('{"commits": null}', 1), ("{", 1),
                           ('{"commands": ["a"]}', 1), ('{"commands": ["a"], "commits": ["b"]}', 2)):
        (tmp_path / "config.json").write_text(text)
        files = run_files(run, model, {})
        config = json.loads(files["config.json"])
        assert files["trainer.py"] == b"\xff = 1\r\n"
        assert len(config["commands"]) == len(config["commits"]) == commands, text
        assert config["parameters"] == 9


def test_a_model_that_cannot_be_asked_is_no_contradiction(capsys):
    """Its table has another name, or its forward wants targets, neither of which writing needs."""
    class Mine(GPT2):
        def forward(self, idx, targets):
            return super().forward(idx, targets)

    config = GPT2Config(300, 320, 16, n_layer=1, n_head=2, d_model=16)
    wants, lacks = Mine(config), GPT2(config)
    lacks.wte = lacks.embed
    del lacks.embed
    for model in (wants, lacks):
        assert contradiction(model, torch.device("cpu")) == "" and model.training
        assert f"{type(model).__name__} is not checked before it writes" in capsys.readouterr().err
        assert model.compute_dtype == torch.float32
    assert contradiction(GPT2(config), torch.device("cpu")) == "" and not capsys.readouterr().out


def test_the_commit_of_a_start(tmp_path, monkeypatch):
    def git(*words):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *author, *words], check=True, capture_output=True)

    assert commit_of(tmp_path) is None
    git("init")
    (tmp_path / "a.py").write_text("")
    git("add", "a.py")
    git("commit", "-m", "a")
    clean = commit_of(tmp_path)
    (tmp_path / "a.py").write_text("1")
    assert re.fullmatch("[0-9a-f]{40}", clean) and commit_of(tmp_path) == f"{clean}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None


def test_a_trainer_without_a_file_has_no_text(tmp_path):
    """As one that was typed into a notebook, or one whose file has been removed since."""
    dataset = SimpleNamespace(tokenizer=SimpleNamespace(to_json=str), train=SimpleNamespace(num_tokens=9))
    run = SimpleNamespace(out=tmp_path, saved=None, command="python", given={}, dataset=dataset,
                          trainer=tmp_path / "gone.py")
    model = torch.nn.Linear(2, 3)
    files = run_files(run, model, {})
    assert {"config.json", "tokenizer.json", "model/model.py"} <= files.keys() and "trainer.py" not in files
    assert json.loads(files["config.json"])["commands"] == json.loads(files["config.json"])["commits"] == []


@pytest.mark.parametrize("joined", ["dataset.val['more'] = other.val['']", "dataset.train = other.train"])
def test_rows_of_another_tokenizer_are_refused(joined, shards, tmp_path):
    (tmp_path / "t.txt").write_text("Once upon a time there was a test. " * 400)
    other = prepare(f"text:{tmp_path}/t.txt", tmp_path / "other", "bpe:300")
    same = prepare(f"text:{tmp_path}/t.txt", tmp_path / "same", "bytes")
    for directory, code in ((other, 2), (same, 0)):
        lines = f"other = data.Dataset([data.Path({str(directory)!r})], args.seq_len)\n    {joined}\n    "
        trainer = edited(tmp_path, f"{directory.name}_{len(joined)}", ("model = new_model", lines))
        done = trainer.train(0, shards, tmp_path / f"run-{directory.name}", steps=4)
        assert done.code == code, done.out
        assert code == 0 or f"{other} has another tokenizer than the data of this run" in done.out, done.out
    data.read_rows(data.Dataset([other], 32).train, np.arange(1))  # after a run any can be read


@pytest.mark.parametrize("ema", [0.9, pytest.param(0.0, marks=pytest.mark.full)])
def test_a_run_is_loaded_for_use_as_it_was_evaluated(ema, shards, tmp_path):
    trainer = Trainer("train_gpt2.py", **FLAGS)
    assert trainer.train(0, shards, tmp_path / "run", ema=ema, eval_batches=0).code == 0
    model, tokenizer = load_run(GPT2, tmp_path / "run")
    loss = labels = 0
    for x, y in data.validation_batches(data.Dataset([shards], 32).val[""], 4, place(0, 1), 0):
        logits = model(x)
        assert logits.shape[-1] == 257
        loss += nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1,
                                            reduction="sum").item()
        labels += (y >= 0).sum().item()
    assert loss / labels == pytest.approx(evaluations_of(tmp_path / "run")[-1]["val_loss"], abs=1e-5)
    assert tokenizer.decode(tokenizer.encode("def").tolist()) == "def"
    with pytest.raises(RunError):
        load_run(GPT2, tmp_path)


HEAD = """
from dataclasses import dataclass
import model
from torch import nn

@dataclass
class GPT2Config(model.GPT2Config):
    second: bool = model.flag(False, "a second head")

class Variant(model.GPT2):
    Config = GPT2Config

    def __init__(self, config):
        super().__init__(config)
        if config.second:
            self.second = model.Linear(config.d_model, WIDTH)

    def loss(self, hidden, idx, targets):
        objective, sums = super().loss(hidden, idx, targets)
        if self.config.second:
            objective = objective + 0.0 * self.second(hidden).sum()
        return objective, sums

"""


def variant(path, width: int = 8) -> Trainer:
    """train_gpt2.py with a model of one's own."""
    return copy_of_the_trainer(path, HEAD.replace("WIDTH", str(width)), (r"\(GPT2,", "(Variant,"))


def weights(run) -> dict:
    return read_checkpoint(list_checkpoints(run)[0])["tensors"]["model"]


@pytest.mark.full
@pytest.mark.parametrize("ranks, strategy", [(0, "ddp"), (2, "ddp"), (2, "zero3")])
def test_a_variant_starts_from_its_baseline(ranks, strategy, shards, tmp_path):
    """What the weights lack begins anew, the rest is theirs, bit for bit, and both are named; the other way
    round, too. A flag that contradicts them is refused, as is a tensor of another shape.
    """
    base = Trainer("train_gpt2.py", **FLAGS)
    assert base.train(0, shards, tmp_path / "base", steps=4).code == 0
    own = variant(tmp_path / "train_variant.py")
    flags = {"init_from": tmp_path / "base", "steps": 1, "lr": 0.0, "strategy": strategy}
    done = own.train(ranks, shards, tmp_path / "own", second=True, **flags)
    assert done.code == 0, done.out
    assert "lacks second, second.bias, second.weight: as in a new model" in done.out, done.out
    before, after = weights(tmp_path / "base"), weights(tmp_path / "own")
    assert after.keys() - before.keys() == {"second.weight", "second.bias"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["second.weight"].std() > 0
    again = own.train(ranks, shards, tmp_path / "again", second=True, **flags)
    assert again.code == 0, again.out
    assert torch.equal(after["second.weight"], weights(tmp_path / "again")["second.weight"])
    assert own.train(ranks, shards, tmp_path / "own", second=True, strategy=strategy, steps=2).code == 0
    back = own.train(ranks, shards, tmp_path / "back", **flags | {"init_from": tmp_path / "own"})
    assert back.code == 0, back.out  # the shape is that of the weights
    contradicts = own.train(ranks, shards, tmp_path / "odd", **flags | {"n_layer": 3})
    assert contradicts.code and "was trained with n_layer" in contradicts.out, contradicts.out
    wider = variant(tmp_path / "train_wider.py", 9)
    refused = wider.train(ranks, shards, tmp_path / "wide", **flags | {"init_from": tmp_path / "own"})
    assert refused.code and re.search(
        r"second.(bias|weight) has the shape \[8.*\] in .*, but \[9.*\] in Variant: give it another name",
        refused.out), refused.out
    plain = base.train(ranks, shards, tmp_path / "plain", **flags | {"init_from": tmp_path / "own"})
    assert plain.code and "holds a model of the family Variant, not GPT2" in plain.out, plain.out


@pytest.mark.full
def test_what_a_variant_does_not_use_is_named(shards, tmp_path):
    own = variant(tmp_path / "train_variant.py")
    assert own.train(0, shards, tmp_path / "own", second=True, steps=2).code == 0
    text = (tmp_path / "train_variant.py").read_text()
    less = text.replace('    second: bool = model.flag(False, "a second head")', "    third: int = 3")
    (tmp_path / "train_less.py").write_text(less.replace("self.config.second", "False").replace(
        "config.second", "False"))
    done = Trainer(str(tmp_path / "train_less.py"), **FLAGS).train(
        0, shards, tmp_path / "less", steps=1, init_from=tmp_path / "own")
    assert done.code == 0 and "lacks third: as in a new model" in done.out, done.out
    assert "has second, second.bias, second.weight, which this model does not use" in done.out, done.out


@pytest.mark.full
def test_a_variant_starts_from_hf_weights(shards, tmp_path):
    base = Trainer("train_gpt2.py", **FLAGS)
    assert base.train(0, shards, tmp_path / "base", steps=2).code == 0
    assert base.train(0, shards, tmp_path / "base", export=True).code == 0
    own = variant(tmp_path / "train_variant.py")
    done = own.train(0, shards, tmp_path / "own", second=True, steps=1,
                     init_from=f"hf:{tmp_path / 'base' / 'hf'}")
    assert done.code == 0 and "lacks second, second.bias, second.weight" in done.out, done.out


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


def test_lists_and_tensors_of_groups_are_restored_also_the_second_time(world, tmp_path):
    whole = begin(world, two_groups)
    go_on(whole, range(9))
    state, said = begin(world, two_groups), []
    for part in range(3):
        go_on(state, range(3 * part, 3 * part + 3))
        saved = saved_as(state, world, tmp_path / str(part))
        state = begin(world, two_groups)
        state.load_state_dict(saved, said.append)
    assert not said and {"Lists 0.0/seen", "Lists 0.1/total"} <= saved["tensors"]["optimizer"].keys()
    ours, theirs = state.optimizer_tensors(), whole.optimizer_tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(p, q) for p, q in zip(state.model.parameters(), whole.model.parameters()))
    assert not any("." in key for values in state.optimizers[0].state.values() for key in values)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_lists_and_tensors_of_groups_are_refused_with_shards(strategy, world):
    """By name, before the first step. What needs more arguments to be made is refused after it."""
    with pytest.raises(UserError, match="Lists/(seen|means) .*--strategy ddp"):
        begin(world, two_groups, strategy)
    begin(world, torch.optim.AdamW, strategy)

    class Needy(Lists):
        def __init__(self, params, lr, needed):
            super().__init__(params, lr=lr)

    go_on(begin(world, Needy, needed=1), range(1))
    if strategy == "zero1":
        return  # torch itself makes it again without that argument
    with pytest.raises(UserError, match="keeps Needy 0.0/seen as Tensor"):
        go_on(begin(world, Needy, strategy, needed=1), range(1))


@pytest.mark.full
def test_lists_and_tensors_of_groups_on_two_processes(shards, tmp_path):
    own = "optimizers = [Lists(model.parameters(), lr=1e-3)]"
    code = f"\nimport torch\n\n{inspect.getsource(Lists)}\n\n"
    trainer = copy_of_the_trainer(tmp_path / "train_lists.py", code,
                                  (r"optimizers = make_optimizers\(.*\)", own))
    for strategy in ("zero1", "zero2"):
        done = trainer.fork(2, shards, tmp_path / strategy, strategy=strategy)
        assert done.code == 2 and "Lists/" in done.out and "step 1/" not in done.out, done.out
    assert trainer.fork(2, shards, tmp_path / "whole").code == 0
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    done = trainer.fork(2, shards, tmp_path / "resumed")
    assert done.code == 0 and "from scratch" not in done.out, done.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


DISTANCE = """
import torch

class Distance(torch.optim.SGD):
    def step(self):
        super().step()
        for group in self.param_groups:
            seen = sum(p.grad.abs().sum() for p in group["params"] if p.grad is not None)
            seen = seen.full_tensor() if hasattr(seen, "full_tensor") else seen
            SUM
            group["distance"] = group.get("distance", 0.0) + float(seen)

"""


@pytest.mark.parametrize("strategy, summed, right", [
    ("zero1", "pass", False),
    pytest.param("zero1", "torch.distributed.all_reduce(seen)", True, marks=pytest.mark.full),
    pytest.param("ddp", "pass", True, marks=pytest.mark.full)])
def test_numbers_that_differ_between_ranks_are_refused(strategy, summed, right, shards, tmp_path):
    """Each rank of zero1 has the gradients of some parameters, so its sum is not that of the others."""
    own = "optimizers = [Distance(model.parameters(), lr=1e-3)]"
    trainer = copy_of_the_trainer(tmp_path / "train_distance.py", DISTANCE.replace("SUM", summed),
                                  (r"optimizers = make_optimizers\(.*\)", own))
    done = trainer.fork(2, shards, tmp_path / "run", strategy=strategy, steps=2)
    assert (done.code == 0) == right, done.out
    assert right or "what an optimizer keeps in numbers on rank 1 differs from the other ranks" in done.out

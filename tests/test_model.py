"""What model.py claims, measured on tiny models on a CPU.

Exactness: activation checkpointing, truncated backpropagation, causality and early halting change no bit,
and each check is shown to fail when the thing is broken on purpose. Then the KV cache and sampling, the files
that Hugging Face transformers reads and writes, the loss, optimizers and schedules, and the counts of
parameters and FLOPs. `--long` adds the full matrices and compiled blocks.
"""

import itertools
import json
import random
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SHARED, finish, start
from runs import Trainer
from states import flags_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import train_gpt2
import train_hrm
from cli.errors import UserError
from cli.flags import flags_of_model
from loggers.mfu import flops_per_token
from model import (
    HRM,
    Block,
    ConfigError,
    HRMBlock,
    HRMConfig,
    Linear,
    Stack,
    learning_rate,
    linear_cross_entropy,
    make_optimizers,
    num_params,
    pad_vocab,
    rms_norm,
)
from ops.adam_atan2 import AdamAtan2
from ops.device import compute_dtype
from ops.ema import EMA
from vocab import bpe
from vocab.tokenizer import load_tokenizer, parse_tokenizer_json
from weights.huggingface import from_hf, to_hf
from weights.sampling import KVCache, generate, sample_ids, samples_of

VOCAB, PADDED, SEQ_LEN = 60, 64, 16  # padded, so that every test has ids that must not matter
MODES = ("block", "selective")
# A halting bias for each number of H-cycles, of at most 4: p is 1.00, 0.73 (twice that is above 1) or 0.00.
HALT_BIAS = {1: 10.0, 2: 1.0, 4: -20.0}
# Which stack calls keep a graph, in the order L L L H L L L H: written out, as model.py computes it.
KEPT = {2: "......LH", 3: "...H..LH", 4: "...H.LLH", 5: "...HLLLH", 6: "..LHLLLH", 7: ".LLHLLLH",
        8: "LLLHLLLH"}


@pytest.fixture(autouse=True)
def few_threads(request):
    """One thread, because two wait for each other on a busy machine; the long matrices use two."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if request.node.get_closest_marker("long") else 1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def hrm(checkpointing: str = "none", dtype=torch.float32, depth: int | None = None, **config) -> HRM:
    """A tiny HRM, always with the same weights. `depth` makes it halt after so many H-cycles."""
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB, "padded_vocab": PADDED, "seq_len": SEQ_LEN, "n_layer": 2, "n_head": 2,
                "d_model": 32, "ff": 48, "halt": depth is not None}
    model = HRM(HRMConfig(**(settings | config)))
    model.compute_dtype = dtype
    if depth is not None:
        nn.init.constant_(model.halt.bias, HALT_BIAS[depth])
        nn.init.normal_(model.halt.weight, std=0.01)  # from its initial 0 no gradient would reach z_H
    for module in model.modules():
        if isinstance(module, Block):
            module.checkpointing = checkpointing
    return model


def tokens(batch: int = 2, length: int = SEQ_LEN, seed: int = 7) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict:
    return {name: p.grad for name, p in model.named_parameters()}


def step(model: HRM, **settings) -> tuple[dict, dict]:
    """One forward and backward pass: the objective and every gradient by name, and means of the sums. There
    are 32 targets, a power of two, so a mean has the digits of its sum.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)  # for dropout
    idx = tokens(length=SEQ_LEN + 1)
    objective, sums = model(idx[:, :-1], idx[:, 1:], ponder_weight=0.01, **settings)
    objective = objective / idx[:, 1:].numel()
    objective.backward()
    means = {name: value / idx[:, 1:].numel() for name, value in sums.items()}
    return {"objective": objective.detach(), **gradients(model)}, means


def differing(a: dict, b: dict) -> list[str]:
    """The names whose tensors differ in any bit, or exist on one side only."""
    assert a.keys() == b.keys()
    return [name for name in a if (a[name] is None) != (b[name] is None)
            or a[name] is not None and not torch.equal(a[name], b[name])]


def largest_error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


# -----------------------------------------------------------------------------------------------------------
# Activation checkpointing is exact


def check_checkpointing(bp_steps, depth, dropout, dtype):
    build = {"depth": depth, "dropout": dropout, "dtype": dtype}
    expected, statistics = step(hrm("none", **build), bp_steps=bp_steps)
    assert statistics["cycles"] == (depth or 2)
    assert expected["objective"].isfinite()
    for mode in MODES:
        assert differing(expected, step(hrm(mode, **build), bp_steps=bp_steps)[0]) == [], mode


@pytest.mark.parametrize("bp_steps, depth, dropout, dtype", [
    (2, None, 0.0, torch.float32), (5, None, 0.1, torch.float32), (8, None, 0.1, torch.bfloat16),
    (5, None, 0.0, torch.bfloat16), (2, 1, 0.1, torch.float32), (5, 2, 0.0, torch.bfloat16),
    (8, 4, 0.1, torch.float32), (5, 4, 0.1, torch.bfloat16)])
def test_checkpointing_changes_no_bit(bp_steps, depth, dropout, dtype):
    check_checkpointing(bp_steps, depth, dropout, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cycles", [1, 2, 4])
def test_checkpointing_changes_no_bit_of_whole_cycles(cycles, dtype):
    """Of a range of cycles: with a graph through fewer, as many and more than there are."""
    build = {"dropout": 0.1, "dtype": dtype, "least_cycles": 1, "h_cycles": 4, "l_cycles": 1, "bp_cycles": 2,
             "inject_input": True}
    expected, statistics = step(hrm("none", **build), cycles=cycles)
    assert statistics["cycles"] == cycles and expected["objective"].isfinite()
    for mode in MODES:
        assert differing(expected, step(hrm(mode, **build), cycles=cycles)[0]) == [], mode


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("depth", [None, *HALT_BIAS])
@pytest.mark.parametrize("bp_steps", [2, 5, 8])
def test_checkpointing_changes_no_bit_in_any_combination(bp_steps, depth, dropout, dtype):
    check_checkpointing(bp_steps, depth, dropout, dtype)


def test_checkpointing_recomputes_what_it_says(monkeypatch):
    """Without this, a mode that is ignored would pass the tests above."""
    runs = []
    plain = HRMBlock.block
    monkeypatch.setattr(HRMBlock, "block", lambda self, *args: runs.append(self) or plain(self, *args))
    flops, calls = {}, {}
    for mode in ("none", *MODES):
        runs.clear()
        with FlopCounterMode(display=False) as counter:
            step(hrm(mode), bp_steps=5)
        flops[mode], calls[mode] = counter.get_total_flops(), len(runs)
    assert calls == {"none": 16, "block": 16 + 10, "selective": 16 + 10}  # 2 blocks in each of 8 and 5 calls
    assert flops["none"] == flops["selective"] < flops["block"]  # selective repeats no matrix product


def test_control_checkpoint_around_a_late_bound_closure(monkeypatch):
    """Recomputed in the backward pass, `block` is the last one for all: no error, and wrong gradients."""
    def late_bound(self, x, rope, mask, cache=None):
        for block in self.blocks:
            x = checkpoint(lambda x: block.block(x, rope), x, use_reentrant=False)  # noqa: B023
        return rms_norm(x, self.eps)

    expected, _ = step(hrm(), bp_steps=5)
    monkeypatch.setattr(Stack, "forward", late_bound)
    wrong = differing(expected, step(hrm(), bp_steps=5)[0])
    assert "objective" not in wrong
    assert any(name.startswith("H.blocks.0.") for name in wrong)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_control_random_state_not_preserved(monkeypatch, dropout):
    """Recomputed with other dropout masks, the gradients are wrong; without dropout nothing is lost."""
    def forgetful(*args, **kwargs):
        return checkpoint(*args, **(kwargs | {"preserve_rng_state": False}))

    expected, _ = step(hrm(dropout=dropout), bp_steps=5)
    monkeypatch.setattr("model.checkpoint", forgetful)
    wrong = differing(expected, step(hrm("block", dropout=dropout), bp_steps=5)[0])
    assert "objective" not in wrong
    assert bool(wrong) == (dropout > 0)


def autocast_step(cache_enabled: bool, mode: str = "none", bp_steps: int = 5) -> dict:
    """A step in bfloat16 by autocast instead of our Linear; the backward pass lies outside, as is usual."""
    model, idx = hrm(mode), tokens(length=SEQ_LEN + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
            objective, _ = model(idx[:, :-1], idx[:, 1:], bp_steps=bp_steps)
        objective.backward()
    return {"objective": objective.detach(), **gradients(model)}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 keeps this right")
def test_control_weight_cache_of_autocast_breaks_checkpointing():
    """The forward pass finds the cast weight in the cache where the recomputation has to cast it again. In
    older releases of torch a copy made under no_grad also has no graph, and later uses lose their gradient.
    """
    def breaks(cache_enabled):
        try:
            plain = autocast_step(cache_enabled)
            lost = [name for name, grad in plain.items() if grad is None]
            return bool(lost or any(differing(plain, autocast_step(cache_enabled, mode)) for mode in MODES))
        except RuntimeError:
            return True

    assert breaks(cache_enabled=True)
    assert not breaks(cache_enabled=False)


def test_gradients_of_a_shared_weight_are_summed_in_float32():
    """And not rounded to bfloat16 again after each of its uses, as behind the weight cache of autocast."""
    def rounded(grads):
        return [torch.equal(grad, grad.bfloat16().float())
                for name, grad in grads.items() if ".blocks." in name]

    assert not any(rounded(step(hrm(dtype=torch.bfloat16), bp_steps=8)[0]))
    assert all(rounded(autocast_step(cache_enabled=True, bp_steps=8)))


# -----------------------------------------------------------------------------------------------------------
# Truncated backpropagation


def reference(model: HRM, kept: str) -> dict:
    """The recurrence of a fixed-depth HRM written out; calls whose letter `kept` leaves out are detached."""
    model.zero_grad(set_to_none=True)
    idx = tokens(length=SEQ_LEN + 1)
    x = model.embed(idx[:, :-1]) * 32**0.5
    rope = model.rope[:, :SEQ_LEN]
    z_h, z_l = x, model.z_l_init.expand_as(x)
    for name, keep in zip("LLLHLLLH", kept, strict=True):
        injected = name == "L" and model.config.inject_input
        z = (model.L if name == "L" else model.H)(z_h + z_l + x if injected else z_h + z_l, rope)
        z = z if keep == name else z.detach()
        z_h, z_l = (z_h, z) if name == "L" else (z, z_l)
    loss = linear_cross_entropy(z_h, model.head_weight, idx[:, 1:], VOCAB)[0] / idx[:, 1:].numel()
    loss.backward()
    found = {"objective": loss.detach(), **gradients(model)}
    return {name: torch.zeros_like(model.embed.weight) if t is None else t for name, t in found.items()}


@pytest.mark.parametrize("config", [{}, {"inject_input": True}], ids=str)
@pytest.mark.parametrize("bp_steps", KEPT)
def test_truncated_backprop_equals_explicit_detach(bp_steps, config):
    expected = reference(hrm(**config), KEPT[bp_steps])
    assert differing(expected, step(hrm(**config), bp_steps=bp_steps)[0]) == []


def test_largest_bp_steps_is_full_backprop():
    model = hrm()
    full = reference(model, "LLLHLLLH")
    for bp_steps in (8, 99, None):
        assert differing(full, step(model, bp_steps=bp_steps)[0]) == []


def test_control_one_call_more_or_less_is_noticed():
    actual, _ = step(hrm(), bp_steps=5)
    assert differing(actual, reference(hrm(), KEPT[8]))
    assert differing(actual, reference(hrm(), KEPT[4]))


def test_whole_cycles_equal_explicit_detach():
    """Whatever bp_steps says."""
    expected = reference(hrm(inject_input=True), "....LLLH")
    assert differing(expected, step(hrm(bp_cycles=1, inject_input=True), bp_steps=2)[0]) == []
    both = reference(hrm(inject_input=True), "LLLHLLLH")
    for cycles in (2, 9):
        assert differing(both, step(hrm(bp_cycles=cycles, inject_input=True))[0]) == []
    # control: H first, which is another graph
    assert differing(expected, step(hrm(inject_input=True), bp_steps=4)[0])


def test_states_are_what_fixed_numbers_of_cycles_give():
    model, x = hrm(inject_input=True), tokens()
    for cycles, state in enumerate(model.high_level_states(x, 4), 1):
        assert torch.equal(model.logits(state), model(x, cycles=cycles))


@pytest.mark.parametrize("bp_steps, cycle", [(2, "..LH"), (3, ".LLH"), (4, "LLLH"), (5, "LLLH"), (8, "LLLH")])
def test_with_halt_every_cycle_keeps_what_a_last_one_would(monkeypatch, bp_steps, cycle):
    model, kept = hrm(depth=4), []
    plain = Stack.forward

    def recorded(self, *args):
        kept.append(("L" if self is model.L else "H") if torch.is_grad_enabled() else ".")
        return plain(self, *args)

    monkeypatch.setattr(Stack, "forward", recorded)
    step(model, bp_steps=bp_steps)
    assert "".join(kept) == 4 * cycle


def without_gradient(grads: dict) -> list[str]:
    return [name for name, grad in grads.items() if grad is None or not grad.any()]


@pytest.mark.parametrize("bp_steps", [3, 4, 5])
@pytest.mark.parametrize("extra", [{}, {"halt": True}, {"depth": 2}, {"inject_input": True}], ids=str)
def test_every_parameter_has_a_gradient_on_the_ramp(bp_steps, extra):
    """With halt as initialized, and stopping at half the cycles."""
    assert without_gradient(step(hrm(**extra), bp_steps=bp_steps)[0]) == []


@pytest.mark.parametrize("bp_steps, extra, untrained", [
    (2, {}, True), (3, {}, False), (4, {"h_cycles": 4}, True), (5, {"h_cycles": 4}, False), (None, {}, False),
    (2, {"inject_input": True}, False), (2, {"halt": True}, False)], ids=str)
def test_an_embedding_that_is_not_reached_has_a_gradient_of_zeros(bp_steps, extra, untrained):
    """One all the same, because DDP waits for it."""
    model = hrm(**extra)
    found, _ = step(model, bp_steps=bp_steps)
    assert without_gradient(found) == ["embed.weight"] * untrained
    assert found["embed.weight"] is not None and model.config.reaches_embedding(bp_steps) != untrained


def test_gradients_of_a_bfloat16_pass_are_float32_and_close():
    exact, rough = step(hrm())[0], step(hrm(dtype=torch.bfloat16))[0]
    for name in exact:
        assert rough[name].dtype == torch.float32
        assert torch.cosine_similarity(exact[name].flatten(), rough[name].flatten(), dim=0) > 0.99, name


# -----------------------------------------------------------------------------------------------------------
# Adaptive depth


def cycles_of(model: HRM, idx: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each cycle the weights (cycles, B, T) and z_H (cycles, B, T, C); what recurrence() is; the cost."""
    weights, states, plain = [], [], model.halting_weight

    def recorded(z_h, *args):
        weight, remaining = plain(z_h, *args)
        weights.append(weight)
        states.append(z_h)
        return weight, remaining

    model.halting_weight = recorded
    z, ponder, _ = model.recurrence(idx)
    return torch.stack(weights), torch.stack(states), z, ponder.mean()


def undecided(**config) -> HRM:
    """A model whose tokens stop at different depths."""
    model = hrm(halt=True, **config)
    nn.init.normal_(model.halt.weight)
    nn.init.zeros_(model.halt.bias)
    return model


@pytest.mark.parametrize("build", [undecided, *(lambda depth=depth: hrm(depth=depth) for depth in HALT_BIAS)])
def test_halting_weights_sum_to_one(build):
    weights, states, z, ponder = cycles_of(build(), tokens())
    assert (weights >= 0).all()
    assert largest_error(weights.sum(0), torch.ones(2, SEQ_LEN)) <= 1e-6
    assert largest_error((weights.unsqueeze(-1) * states).sum(0), z) <= 1e-6
    assert ponder.item() == pytest.approx((1 - weights.cumsum(0)).sum(0).mean().item(), abs=1e-5)


def test_control_weights_without_the_remainder_do_not_sum_to_one():
    weights, _, _, _ = cycles_of(undecided(), tokens())
    assert len((weights > 0).sum(0).unique()) > 1  # several depths in one batch
    assert largest_error(weights[:-1].sum(0), torch.ones(2, SEQ_LEN)) > 1e-2


def test_ponder_cost_moves_the_halting_layer():
    model = undecided()
    weights, _, _, ponder = cycles_of(model, tokens())
    ponder.backward(retain_graph=True)
    assert model.halt.bias.grad.item() < 0  # a larger bias stops sooner and costs less
    assert model.halt.weight.grad.any()
    # control: the sum of the weights is a cost too, but it is always 1 and teaches nothing
    model.zero_grad()
    weights.sum().backward()
    assert model.halt.bias.grad.abs().item() < 1e-6


def test_ponder_cost_counts_cycles_beyond_the_first():
    assert hrm(depth=1).recurrence(tokens())[1].mean().item() == 0
    assert hrm(depth=4).recurrence(tokens())[1].mean().item() == pytest.approx(3, abs=1e-4)


@pytest.mark.parametrize("depth", HALT_BIAS)
def test_bias_sets_the_depth(depth):
    assert hrm(depth=depth).recurrence(tokens())[2] == depth
    assert hrm(depth=depth).recurrence(tokens(), fixed_depth=True)[2] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_cycle_too_many_changes_nothing(monkeypatch, depth, dtype):
    model = hrm(depth=depth, dtype=dtype)
    idx = tokens()
    stopped, all_cycles = model.recurrence(idx), model.recurrence(idx, fixed_depth=True)
    assert (stopped[2], all_cycles[2]) == (depth, 4)
    assert torch.equal(stopped[0], all_cycles[0])
    assert torch.equal(stopped[1], all_cycles[1])
    few, many = step(model)[0], step(model, fixed_depth=True)[0]
    if depth == 1:
        assert differing(few, many) == []
    else:  # of the mass that is left, gradients of later cycles cancel, but for the order of the sums
        assert max(largest_error(few[name], many[name]) for name in few) < 1e-5

    # another rank that wants more cycles gets them, and changes nothing here
    monkeypatch.setattr("model.dist.is_initialized", lambda: True)
    monkeypatch.setattr("model.dist.all_reduce", lambda left, op: left.fill_(1.0))
    agreed = model.recurrence(idx)
    assert agreed[2] == 4 and torch.equal(stopped[0], agreed[0])


def test_control_a_late_cycle_with_some_weight_is_noticed(monkeypatch):
    model, plain = hrm(depth=2), HRM.halting_weight

    def leaking(self, *args):
        weight, remaining = plain(self, *args)
        return weight + 1e-5, remaining

    monkeypatch.setattr(HRM, "halting_weight", leaking)
    assert not torch.equal(model.recurrence(tokens())[0], model.recurrence(tokens(), fixed_depth=True)[0])


# -----------------------------------------------------------------------------------------------------------
# Causality, the KV cache, sampling


def prefixes(model: HRM, fixed_depth: bool = False, cut: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the first `cut` tokens, with two different futures."""
    idx, other = tokens(), tokens()
    other[:, cut:] = (other[:, cut:] + 1) % VOCAB
    with torch.no_grad():
        head = model.head_weight.T.to(model.compute_dtype)
        z, changed = (model.recurrence(i, fixed_depth=fixed_depth)[0] @ head for i in (idx, other))
    assert not torch.equal(z[:, cut:], changed[:, cut:])  # the future itself does change
    return z[:, :cut], changed[:, :cut]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [{}, {"inject_input": True}, {"depth": 4}, {"depth": 2}], ids=str)
def test_the_future_never_changes_the_past(config, dtype):
    assert torch.equal(*prefixes(hrm(dtype=dtype, **config), fixed_depth=True))
    assert torch.equal(*prefixes(hrm(dtype=dtype, **config)))


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [True, False])
def test_normalized_queries_and_keys_have_no_scale(qk_norm):
    model, idx = hrm(qk_norm=qk_norm), tokens()
    before = model(idx)
    for block in [*model.H.blocks, *model.L.blocks]:
        block.gqkv.weight[32:96] *= 4  # queries and keys
    assert (largest_error(model(idx), before) < 1e-4) == qk_norm


def test_control_attention_that_is_not_causal(monkeypatch):
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr("model.F.scaled_dot_product_attention", lambda q, k, v, **_: attention(q, k, v))
    assert not torch.equal(*prefixes(hrm()))


SHAPES = [{}, {"inject_input": True}, {"qk_norm": True}, {"depth": 2}, {"halt": True},
          {"h_cycles": 1, "l_cycles": 2}]


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 6])
@pytest.mark.parametrize("config", SHAPES, ids=str)
def test_decoding_with_the_cache_equals_the_full_pass(config, prompt):
    model, idx = hrm(**config).eval(), tokens(batch=3)
    full, cache = model(idx), KVCache(model.config.seq_len)
    parts = [idx[:, :prompt], *idx[:, prompt:].split(1, dim=1)]
    for end, part in enumerate(parts, prompt):
        logits = model.decode(part, cache)
        assert cache.length == end
        assert largest_error(logits, full[:, end - 1]) <= 1e-5
        assert torch.equal(logits.argmax(-1), full[:, end - 1].argmax(-1))


@torch.no_grad()
def test_control_a_cache_with_two_slots_exchanged_is_noticed():
    model, idx = hrm(), tokens()
    cache = KVCache(model.config.seq_len)
    model.decode(idx[:, :-1], cache)
    cache.memory[0], cache.memory[2] = cache.memory[2], cache.memory[0]
    assert largest_error(model.decode(idx[:, -1:], cache), model(idx)[:, -1]) > 1e-4


@torch.no_grad()
def test_a_filled_cache_refuses_several_tokens():
    """is_causal aligns queries with the first keys, so they would silently see too little."""
    model, idx = hrm(), tokens()
    cache = KVCache(model.config.seq_len)
    model.decode(idx[:, :4], cache)
    with pytest.raises(AssertionError, match="one token at a time"):
        model.decode(idx[:, 4:6], cache)


def ids_of(model: HRM, prompt: torch.Tensor, count: int, **settings) -> torch.Tensor:
    return torch.stack(list(generate(model, prompt, count, **settings)), dim=1)


@torch.no_grad()
@pytest.mark.parametrize("config", SHAPES, ids=str)
def test_greedy_generation_equals_a_loop_over_full_passes(config):
    """Also past the end of the context, where the later half is read again."""
    model = hrm(**config).eval()
    idx = context = tokens(batch=2, length=5)
    for _ in range(2 * SEQ_LEN):
        if context.size(1) > SEQ_LEN:
            context = context[:, -(SEQ_LEN // 2):]
        new = model(context)[:, -1, :VOCAB].argmax(-1, keepdim=True)
        idx, context = torch.cat((idx, new), 1), torch.cat((context, new), 1)
    assert len(idx[:, 5:].unique()) > 5
    assert torch.equal(ids_of(model, tokens(batch=2, length=5), 2 * SEQ_LEN, temperature=0), idx[:, 5:])


def test_generation_continues_after_a_prompt_that_fills_the_context():
    for length in (SEQ_LEN, SEQ_LEN + 3):
        assert ids_of(hrm(), tokens(length=length), 4).shape == (2, 4)


def test_the_seed_decides_what_is_sampled():
    model, prompt = hrm(), tokens(length=3)
    settings = {"temperature": 0.9, "top_k": 20}
    first = ids_of(model, prompt, 12, seed=5, **settings)
    torch.rand(9)  # the global random state plays no part
    assert torch.equal(first, ids_of(model, prompt, 12, seed=5, **settings))
    assert not torch.equal(first, ids_of(model, prompt, 12, seed=6, **settings))


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_ids_that_only_pad_the_table_are_never_sampled(temperature):
    model, prompt = hrm(), tokens(batch=4, length=3)
    direction = 1000 * torch.randn(2, 32)
    model.head.weight[VOCAB:] = torch.cat((direction, -direction))  # whatever z is, one of these wins
    assert ((model.recurrence(prompt)[0] @ model.head.weight.T).argmax(-1) >= VOCAB).all()
    assert (ids_of(model, prompt, 30, temperature=temperature) < VOCAB).all()


def test_the_stop_id_stops_a_single_sequence():
    model, prompt = hrm(), tokens(batch=1, length=3)
    free = ids_of(model, prompt, 10, seed=2)[0].tolist()
    stop = free[4]
    assert ids_of(model, prompt, 10, seed=2, stop=stop)[0].tolist() == free[:free.index(stop) + 1]
    assert ids_of(model, prompt.repeat(2, 1), 10, seed=2, stop=stop).size(1) == 10  # a batch goes on


def test_generation_leaves_the_training_mode_as_it_was():
    model = hrm(dropout=0.5).train()
    greedy = ids_of(model, tokens(length=3), 5, temperature=0)
    assert model.training
    assert torch.equal(greedy, ids_of(model, tokens(length=3), 5, temperature=0))  # no dropout
    stream = generate(model.eval(), tokens(length=3), 5)
    next(stream)
    stream.close()
    assert not model.training


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    generator = torch.Generator().manual_seed(0)

    def frequencies(temperature=1.0, top_k=None):
        ids = sample_ids(logits.expand(50_000, -1), temperature, top_k, generator)
        return ids.bincount(minlength=5) / 50_000

    for settings, expected in [
            ({}, [0.5, 0.2, 0.15, 0.1, 0.05]),
            ({"temperature": 0}, [1, 0, 0, 0, 0]),
            ({"temperature": 0.5}, [0.769, 0.123, 0.069, 0.031, 0.008]),  # p², normalized
            ({"top_k": 1}, [1, 0, 0, 0, 0]),
            ({"top_k": 2}, [5 / 7, 2 / 7, 0, 0, 0]),
            ({"top_k": 99}, [0.5, 0.2, 0.15, 0.1, 0.05])]:
        found = frequencies(**settings)
        assert largest_error(found, torch.tensor(expected)) < 0.01, settings
        assert ((found > 0) == (torch.tensor(expected) > 0)).all(), settings


# -----------------------------------------------------------------------------------------------------------
# Hugging Face


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", minversion="5.23")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bytes")  # 257 ids, in a table of 320 rows


def random_shape(seed: int) -> dict:
    pick = random.Random(seed)
    n_head = pick.choice((1, 2, 3))
    return {"n_head": n_head, "d_model": n_head * pick.choice((4, 8, 16)), "ff": pick.choice((24, 40)),
            "n_layer": pick.choice((1, 2, 3)), "h_cycles": pick.choice((1, 2, 3)),
            "l_cycles": pick.choice((1, 2, 3)), "rope_theta": pick.choice((500.0, 10000.0)),
            "norm_eps": pick.choice((1e-6, 1e-3)), "embed_scale": pick.choice((None, 3.0))}


SEEDS = [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 12))]


def export(model: HRM, tokenizer, directory):
    to_hf(model.eval(), directory, tokenizer)
    return directory


def logits_of(theirs, idx: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return theirs.eval()(idx).logits


@torch.no_grad()
def check_export(shape, transformers, tokenizer, directory):
    ours = hrm(vocab_size=257, padded_vocab=320, **shape)
    export(ours, tokenizer, directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert type(theirs).__name__ == "HrmTextForCausalLM" and theirs.dtype == torch.float32
    idx = torch.randint(257, (2, SEQ_LEN))
    logits = logits_of(theirs, idx)
    assert logits.size(-1) == 257  # the rows that pad the table stay here
    assert largest_error(ours(idx)[..., :257], logits) <= 1e-5
    back = from_hf(HRM, directory)
    assert back.config == ours.config
    state = back.state_dict()
    for name, tensor in ours.state_dict().items():
        rows = 257 if tensor.size(0) == 320 and name in ("embed.weight", "head.weight") else None
        assert torch.equal(tensor[:rows], state[name][:rows]), name
    return ours, theirs, idx


@pytest.mark.parametrize("seed", SEEDS)
def test_transformers_reads_what_we_write(seed, transformers, tokenizer, tmp_path):
    check_export(random_shape(seed), transformers, tokenizer, tmp_path)


def test_padding_is_cut_from_the_vocabulary_alone(transformers, tokenizer, tmp_path):
    """4 · d_model = 320: the matrix of gate, query, key and value is as tall as the padded vocabulary."""
    check_export({"d_model": 80, "n_head": 5}, transformers, tokenizer, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("name", ["H.blocks.0.gqkv.weight", "L.blocks.1.gate_up.weight", "z_l_init"])
def test_control_one_wrong_tensor_is_noticed(name, transformers, tokenizer, tmp_path):
    ours, theirs, idx = check_export({}, transformers, tokenizer, tmp_path)
    tensor = ours.state_dict()[name]
    tensor.copy_(tensor.roll(1, 0))
    assert largest_error(ours(idx)[..., :257], logits_of(theirs, idx)) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_we_read_what_transformers_writes(seed, transformers, tmp_path):
    shape, pick = random_shape(seed), random.Random(seed)
    torch.manual_seed(seed)
    vocab_size = pick.choice((100, 128, 257))
    theirs = transformers.HrmTextForCausalLM(transformers.HrmTextConfig(
        vocab_size=vocab_size, hidden_size=shape["d_model"], num_attention_heads=shape["n_head"],
        head_dim=shape["d_model"] // shape["n_head"], intermediate_size=shape["ff"],
        num_hidden_layers=shape["n_layer"], H_cycles=shape["h_cycles"], L_cycles=shape["l_cycles"],
        rms_norm_eps=shape["norm_eps"], max_position_embeddings=SEQ_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        initializer_range=pick.choice((0.02, 0.1)), embedding_scale=shape["embed_scale"],
        prefix_lm=pick.random() < 0.5))
    nn.init.normal_(theirs.model.z_L_init)  # transformers starts it at 0, which would hide a lost tensor
    theirs.save_pretrained(tmp_path)
    ours, idx = from_hf(HRM, tmp_path), torch.randint(vocab_size, (2, SEQ_LEN))
    assert ours.config.padded_vocab % 64 == 0
    with torch.no_grad():
        assert largest_error(ours(idx)[..., :vocab_size], logits_of(theirs, idx)) <= 1e-5


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_the_exported_directory_generates_the_same_text(name, transformers, tmp_path):
    text = "the cat sat on the mat, and the cat — über alles — sat on 12 mats.\n"
    tokenizer = load_tokenizer("bytes") if name == "bytes" else bpe.train_bpe([text] * 20, 290)
    ours = hrm(vocab_size=tokenizer.vocab_size, padded_vocab=320, seq_len=128).eval()
    with torch.no_grad():
        ours.head.weight[tokenizer.eot] = 0.0  # else chance, not the same in each torch, ends the text early
    export(ours, tokenizer, tmp_path)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(text).astype(int).tolist()
    assert their_tokenizer.encode(text, add_special_tokens=False) == ids
    assert their_tokenizer.eos_token_id == tokenizer.eot
    prompt = torch.tensor([ids[:20]])
    written = torch.stack(list(generate(ours, prompt, 40, temperature=0, stop=tokenizer.eot)), dim=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    generated = theirs.generate(prompt, max_new_tokens=40, do_sample=False)[0, 20:]
    assert len(generated.unique()) > 5
    assert torch.equal(written[0], generated)
    assert their_tokenizer.decode(generated) == tokenizer.decode(written[0])
    check_prompt(ours, theirs, tokenizer, their_tokenizer, text)


def check_prompt(ours, theirs, tokenizer, their_tokenizer, text):
    """What README shows for transformers writes the text of --prompt --temperature 0: it begins with EOT."""
    prompt = text[:20]
    flags = SimpleNamespace(max_new_tokens=40, temperature=0, top_k=None, seed=0)
    wanted = prompt + "".join(samples_of(ours, tokenizer, "cpu", prompt, flags, stop=tokenizer.eot)[0])

    def said(**begin):
        ids = theirs.generate(**their_tokenizer(prompt, return_tensors="pt", **begin), max_new_tokens=40,
                              do_sample=False)[0]
        return their_tokenizer.decode(ids, skip_special_tokens=True)

    assert said() == wanted
    assert said(add_special_tokens=False) != wanted  # the control: a text without its beginning
    pair = [i for part in "ab" for i in (tokenizer.eot, *tokenizer.encode(part))]
    assert their_tokenizer("a", "b")["input_ids"] == pair


@pytest.mark.parametrize("kind", ["bytes", "bpe", pytest.param("gpt2", marks=pytest.mark.full), "other"])
def test_an_exported_tokenizer_read_here_is_the_one_before(kind, transformers, tmp_path, monkeypatch):
    """It adds its first id in transformers alone; what a run and its data keep, and hash, adds none."""
    text = "the cat sat on the mat, and the cat — über alles — sat on 12 mats.\n"
    if kind == "gpt2" and not (SHARED / "tiktoken").is_dir():
        pytest.skip("the vocabulary of gpt2 is not in the cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken"))
    if kind == "other":  # which has its own ends, as BERT's
        import tokenizers
        words = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokenizers.pre_tokenizers.ByteLevel.alphabet()]
        built = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)},
                                                                 unk_token="[UNK]"))
        built.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        built.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
        tokenizer = parse_tokenizer_json(kind, built.to_str())
    else:
        tokenizer = bpe.train_bpe([text] * 20, 290) if kind == "bpe" else load_tokenizer(kind)
    before = tokenizer.to_json()
    export(hrm(vocab_size=tokenizer.vocab_size, padded_vocab=pad_vocab(tokenizer.vocab_size)), tokenizer,
           tmp_path)
    ids = tokenizer.encode(text).tolist()
    again = load_tokenizer(str(tmp_path))
    assert type(again) is type(tokenizer) and again.encode(text).tolist() == ids
    assert tokenizer.to_json() == before
    if kind != "other":
        assert again.to_json() == before  # so its digest is that of the run
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == [tokenizer.eot, *ids]
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"post_processor": None}))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids  # the control


@pytest.mark.parametrize("option", ["halt", "inject_input", "qk_norm"])
def test_models_without_a_counterpart_are_not_exported(option, tokenizer, tmp_path):
    with pytest.raises(UserError, match="--" + option.replace("_", "-")):
        export(hrm(vocab_size=257, padded_vocab=320, **{option: True}), tokenizer, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("change, message", [
    ({"model_type": "gpt2"}, "holds a model of type 'gpt2'"),
    ({"intermediate_size": 64}, r"no tensor model.H_module.*gate_up_proj.weight of shape \(128, 32\)"),
    ({"vocab_size": 300}, r"no tensor model.embed_tokens.weight of shape \(300, 32\)"),
    ({"num_layers_per_stack": 3}, "no tensor model.H_module.layers.2"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings to True, which train_hrm.py"),
    ({"attention_bias": True}, "attention_bias to True"),
    ({"head_dim": 8}, "head_dim to 8"),
    ({"hidden_act": "gelu"}, "hidden_act to gelu"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters")], ids=str)
def test_another_model_is_refused(change, message, tokenizer, tmp_path):
    path = export(hrm(vocab_size=257, padded_vocab=320), tokenizer, tmp_path) / "config.json"
    assert from_hf(HRM, str(tmp_path)).config.ff == 48
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        from_hf(HRM, str(tmp_path))


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_an_incomplete_directory_is_refused(broken, tokenizer, tmp_path):
    (export(hrm(vocab_size=257, padded_vocab=320), tokenizer, tmp_path) / broken).unlink()
    with pytest.raises(UserError, match="no readable config.json with"):
        from_hf(HRM, str(tmp_path))


# -----------------------------------------------------------------------------------------------------------
# The loss


@pytest.mark.parametrize("n", [1, 511, 512, 513, 1300])
def test_linear_cross_entropy_equals_the_plain_one(n):
    """Around the chunk of 512 rows, with ignored targets and rows that pad the table."""
    hidden, weight = torch.randn(n, 24, requires_grad=True), torch.randn(PADDED, 24, requires_grad=True)
    targets = torch.randint(VOCAB, (n,))
    targets[1::3] = -1
    targets[2::7] = -100
    logits = (hidden @ weight.T)[:, :VOCAB]
    expected = F.cross_entropy(logits, targets.clamp(min=-1), ignore_index=-1)
    objective, loss, _ = linear_cross_entropy(hidden, weight, targets, VOCAB)
    assert objective.dtype == torch.float32 and objective.ndim == 0
    assert torch.equal(objective, loss) and not loss.requires_grad
    found = objective / (targets >= 0).sum()
    assert abs(found.item() - expected.item()) <= 1e-5
    # times 3, because an upstream gradient other than 1 has to arrive too
    for a, b in zip(torch.autograd.grad(3 * found, (hidden, weight)),
                    torch.autograd.grad(3 * expected, (hidden, weight)), strict=True):
        assert largest_error(a, b) <= 1e-5


def test_linear_cross_entropy_of_a_batch_in_bfloat16():
    hidden, weight = torch.randn(3, 200, 24, requires_grad=True), torch.randn(PADDED, 24, requires_grad=True)
    targets = torch.randint(VOCAB, (3, 200))
    exact, *_ = linear_cross_entropy(hidden, weight, targets, VOCAB)
    rough, *_ = linear_cross_entropy(hidden.bfloat16(), weight, targets, VOCAB)
    assert rough.dtype == torch.float32 and rough.item() == pytest.approx(exact.item(), rel=1e-2)
    for a, b in zip(torch.autograd.grad(exact, (hidden, weight)),
                    torch.autograd.grad(rough, (hidden, weight)), strict=True):
        assert b.dtype == torch.float32
        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999


def test_linear_cross_entropy_in_float16_sums_over_rows_without_overflow():
    """Activations of 300 in 2,048 rows, of which a third have the same target."""
    h = torch.randn(2048, 8)
    h[:, 0] = 300
    y = torch.where(torch.rand(2048) < 0.3, 3, torch.randint(20, (2048,)))
    weight = (torch.randn(20, 8) * 0.02).requires_grad_()
    linear_cross_entropy(h.half(), weight, y, 20)[0].backward()
    exact = weight.detach().double().requires_grad_()
    F.cross_entropy(h.half().double() @ exact.T, y, reduction="sum").backward()
    assert exact.grad.abs().max() > torch.finfo(torch.float16).max
    assert ((weight.grad.double() - exact.grad).norm() / exact.grad.norm()).item() < 0.01


def test_linear_cross_entropy_without_any_target_is_zero():
    hidden, weight = torch.randn(9, 24, requires_grad=True), torch.randn(PADDED, 24, requires_grad=True)
    loss, *_ = linear_cross_entropy(hidden, weight, torch.full((9,), -1), VOCAB, z_loss=0.1)
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()
    assert F.cross_entropy(hidden @ weight.T, torch.full((9,), -1), ignore_index=-1).isnan()  # the plain one


@pytest.mark.parametrize("with_bias", [False, True])
def test_z_loss_is_differentiated_and_not_reported(with_bias):
    """1e-2 · log² Z of each label, over two chunks, against autograd; the loss is that without it."""
    n, weight = 700, torch.randn(PADDED, 24, requires_grad=True)
    hidden, bias = torch.randn(n, 24, requires_grad=True), torch.randn(PADDED, requires_grad=True)
    targets = torch.randint(-20, VOCAB, (n,))
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    logits = F.linear(*leaves)[:, :VOCAB]
    squares = logits.logsumexp(-1).square()[targets >= 0].sum()
    plain = F.cross_entropy(logits, targets.clamp(min=-1), ignore_index=-1, reduction="sum")
    for z_loss in (0.0, 1e-2):
        found, loss, _ = linear_cross_entropy(hidden, weight, targets, VOCAB, *leaves[2:], z_loss=z_loss)
        expected = plain + z_loss * squares
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
        for a, b in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves,
                                                                                  retain_graph=True)):
            assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_the_losses_of_targets_sum_to_the_loss(dtype, bound, with_bias, z_loss):
    """Values, gradients and hits, in three chunks of targets; a padding column, a target or an upstream
    gradient too many is noticed. Gradients of bfloat16 are rounded before and after the upstream gradient.
    """
    hidden, weight = torch.randn(1300, 24).to(dtype), torch.randn(PADDED, 24) / 5
    targets = torch.randint(-20, VOCAB, (2, 650))

    def found(reduction="none", targets=targets, columns=VOCAB, scale=1 / 900):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, torch.linspace(-1, 1, PADDED))]
        bias = leaves[2] if with_bias else None
        objective, loss, correct = linear_cross_entropy(
            leaves[0].view(2, 650, 24), leaves[1], targets, columns, bias, z_loss, hits=True,
            reduction=reduction)
        assert objective.dtype == loss.dtype == torch.float32 and not loss.requires_grad
        if reduction == "none":
            assert objective.shape == targets.shape and not objective[targets < 0].any()
            objective = objective.sum()
        gradients = torch.autograd.grad(objective * scale, leaves[:2 + with_bias])
        assert [g.dtype for g in gradients] == [dtype, torch.float32, torch.float32][:2 + with_bias]
        return correct, [loss, objective.detach(), *gradients]

    def off(one, other):
        return [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(one, other, strict=True)]

    hits, fused = found("sum")
    again, plain = found()
    assert torch.equal(hits, again) and hits.any() and not hits[targets < 0].any()
    assert max(off(plain[:2], fused[:2])) <= 1e-6 and max(off(plain, fused)) <= bound
    for change in ({"targets": targets.clamp(min=0)}, {"columns": PADDED}, {"scale": 1 / 890}):
        assert max(off(found(**change)[1], fused)) > bound, change


def test_another_reduction_is_refused():
    hidden, weight, targets = torch.randn(9, 24), torch.randn(PADDED, 24), torch.arange(9)
    assert linear_cross_entropy(hidden, weight, targets, VOCAB, reduction="none")[2] is None
    with pytest.raises(ValueError, match="mean"):
        linear_cross_entropy(hidden, weight, targets, VOCAB, reduction="mean")


def test_a_model_has_a_z_loss():
    model, idx = hrm(), tokens(length=SEQ_LEN + 1)
    plain, sums = model(idx[:, :-1], idx[:, 1:])
    model.z_loss = 1e-2
    more, same = model(idx[:, :-1], idx[:, 1:])
    assert more > plain and torch.equal(sums["loss"], same["loss"])


def test_evaluation_does_not_pay_for_gradients():
    hidden, weight = torch.randn(600, 24, requires_grad=True), torch.randn(PADDED, 24, requires_grad=True)
    targets = torch.randint(VOCAB, (600,))

    def flops():
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(hidden, weight, targets, VOCAB)
        return counter.get_total_flops()

    product = 2 * 600 * 24 * PADDED
    assert flops() == 3 * product
    with torch.no_grad():
        assert flops() == product


# -----------------------------------------------------------------------------------------------------------
# Optimizers, schedules, averaging


def adam_in_float64(p, gradients, lr: float, decay: float, direction):
    """AdamW with betas 0.9 and 0.95; direction(mean, square, c1, c2), with what corrects their biases."""
    p, mean, square = p.double(), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        mean, square = 0.9 * mean + 0.1 * g.double(), 0.95 * square + 0.05 * g.double() ** 2
        p = p - lr * decay * p - lr * direction(mean, square, 1 - 0.9 ** t, 1 - 0.95 ** t)
    return p


def test_adam_atan2_is_that_of_hrm_text():
    """And neither AdamW nor the same with both corrections within; and no scale of the gradients matters."""
    gen = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(13, 50, 20, generator=gen).unbind()
    found = {}
    for scale in (1.0, 2.0 ** -20):
        p = torch.nn.Parameter(start.clone())
        optimizer = AdamAtan2([{"params": [p], "weight_decay": 0.1}], lr=0.01)
        for g in gradients:
            p.grad = scale * g
            optimizer.step()
        p.grad = None
        optimizer.step()  # which changes nothing
        found[scale] = p.detach()
    assert torch.equal(*found.values())
    assert {key: t.dtype for key, t in optimizer.state[p].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), torch.float32) and optimizer.state[p]["step"] == 12

    def off(direction):
        return (adam_in_float64(start, gradients, 0.01, 0.1, direction) - found[1.0]).abs().max()
    assert off(lambda m, v, c1, c2: torch.atan2(m, (v / c2).sqrt()) / c1) < 2e-6
    assert off(lambda m, v, c1, c2: torch.atan2(m / c1, (v / c2).sqrt())) > 1e-3
    assert off(lambda m, v, c1, c2: m / c1 / (v / c2).sqrt()) > 1e-3


def test_adam_atan2_without_gradient_and_rate_moves_nothing():
    """As TrainState._create_optimizer_state steps, so that a checkpoint can be copied into its state."""
    p = torch.nn.Parameter(torch.tensor([1.5, -0.0, 0.0, -3e-39]))
    optimizer, before = AdamAtan2([p], lr=0.0), p.detach().clone()
    p.grad = torch.zeros(4)
    optimizer.step()
    assert torch.equal(p, before) and not torch.stack([*optimizer.state[p].values()][1:]).any()


@pytest.mark.parametrize("kind", ["adamw", "muon", "adam-atan2"])
@pytest.mark.parametrize("config", [{}, {"halt": True}], ids=str)
def test_every_parameter_has_one_optimizer(kind, config):
    model = hrm(**config)
    names = {id(p): name for name, p in model.named_parameters()}
    optimizers = make_optimizers(model, kind, 1e-3, (0.9, 0.95), 0.1)
    groups = [(type(o).__name__, group) for o in optimizers for group in o.param_groups]
    placed = [(names[id(p)], kind_, group) for kind_, group in groups for p in group["params"]]
    assert sorted(name for name, _, _ in placed) == sorted(names.values())
    for name, optimizer, group in placed:
        assert group["weight_decay"] == (0.0 if name == "halt.bias" else 0.1), name
        other = "AdamAtan2" if kind == "adam-atan2" else "AdamW"
        assert optimizer == ("Muon" if kind == "muon" and ".blocks." in name else other), name
        assert group["lr"] == 1e-3 and group.get("scale", 1) == 1
        assert group.get("adjust_lr_fn") == ("match_rms_adamw" if optimizer == "Muon" else None)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first, _ = step(model)
    for optimizer in optimizers:
        optimizer.step()
    assert differing(before, dict(model.named_parameters())) == list(before)  # a step moves each of them
    assert step(model)[0]["objective"] < first["objective"]


@pytest.mark.parametrize("kind", ["adamw", "muon", "adam-atan2"])
def test_embedding_and_head_have_a_learning_rate_of_their_own(kind):
    model = hrm(halt=True)
    groups = [g for o in make_optimizers(model, kind, 1e-3, (0.9, 0.95), 0.1, 4.0) for g in o.param_groups]
    scaled = {id(p) for group in groups if group.get("scale", 1) == 4 for p in group["params"]}
    assert scaled == {id(model.embed.weight), id(model.head.weight)}


def test_a_start_as_the_identity():
    """No token sees another, but from the second step on every matrix learns."""
    idx = tokens(length=SEQ_LEN + 1)
    changed = idx.clone()
    changed[:, 0] = (idx[:, 0] + 1) % VOCAB
    for init in ("identity", "published"):
        model = hrm(init=init)
        same = torch.equal(model(idx[:, :-1])[:, 1:], model(changed[:, :-1])[:, 1:])
        assert same == (init == "identity")
    model = hrm(init="identity")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model)
        optimizer.step()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


@torch.no_grad()
def test_more_cycles_in_evaluation_than_in_training():
    x, deep = tokens(), hrm(eval_cycles=5)
    plain, other = hrm(h_cycles=5), hrm()
    for model in (plain, other):
        model.load_state_dict(deep.state_dict())
    assert torch.equal(deep(x), other(x)) and not torch.equal(deep(x), plain(x))
    for model in (deep, plain, other):
        model.eval()
    assert torch.equal(deep(x), plain(x)) and torch.equal(other(x, cycles=5), plain(x))
    cache = KVCache(deep.config.seq_len)
    assert torch.allclose(deep.decode(x, cache), plain(x)[:, -1], atol=1e-5)


def test_a_frozen_parameter_has_no_optimizer():
    model = hrm(halt=True)
    model.embed.weight.requires_grad_(False)
    for kind in ("adamw", "muon", "adam-atan2"):
        placed = [p for o in make_optimizers(model, kind, 1e-3, (0.9, 0.95), 0.1) for g in o.param_groups
                  for p in g["params"]]
        assert len(placed) == len(list(model.parameters())) - 1


def rates(schedule: str, steps: int = 100, warmup: float = 10) -> list[float]:
    return [learning_rate(s, steps, 2.0, warmup, schedule, 0.1) for s in range(steps)]


def test_learning_rate_schedules():
    for schedule in ("cosine", "wsd", "constant"):
        found = rates(schedule)
        assert found[:10] == pytest.approx([0.2 * (s + 1) for s in range(10)])  # never 0, and full at the end
        assert found[10] == pytest.approx(2.0)
        assert all(a >= b for a, b in itertools.pairwise(found[10:]))
        assert learning_rate(0, 100, 2.0, 0, schedule, 0.1) == pytest.approx(2.0)  # no warm-up
        # a pure function: the order of the calls plays no part
        assert [learning_rate(s, 100, 2.0, 10, schedule, 0.1) for s in reversed(range(100))] == found[::-1]
    cosine, wsd, constant = rates("cosine", 101), rates("wsd", 101), rates("constant", 101)
    assert cosine[55] == pytest.approx(1.1)  # half-way between 2.0 and 0.2
    assert cosine[-1] == pytest.approx(0.2)
    assert wsd[10:83] == pytest.approx([2.0] * 73)  # four fifths of the 90 steps after the warm-up: to 82
    assert wsd[91] == pytest.approx(1.1)  # half-way down
    assert wsd[-1] == pytest.approx(0.2)
    assert constant[10:] == [2.0] * 91


def test_a_warm_up_below_1_is_a_fraction_of_the_run():
    whole, part = rates("cosine", 200, 10), rates("cosine", 200, 0.05)
    assert part == whole != rates("cosine", 200, 0.06)
    parsed = [flags_of(train_gpt2, ["--warmup", text]).warmup for text in ("0", "0.05", "1", "30")]
    assert parsed == [0, 0.05, 1, 30] and [type(value) for value in parsed[2:]] == [int, int]
    assert flags_of(train_gpt2, []).warmup == 30
    with pytest.raises(UserError, match="1.5 is neither a whole number nor below 1"):
        flags_of(train_gpt2, ["--warmup", "1.5"])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_learning_rate_at_the_edges(schedule):
    """One step, warm-up to the end, and steps past the end neither fail nor leave the range."""
    for steps, warmup in ((1, 0), (1, 1), (5, 5), (5, 9), (2, 1)):
        for s in range(steps + 3):
            assert 0.2 - 1e-12 <= learning_rate(s, steps, 2.0, warmup, schedule, 0.1) <= 2.0 + 1e-12
    last = {rates(schedule, steps, warmup)[-1] for steps in range(1, 9) for warmup in (0, 1, 4, 7, 9, 0.5)}
    assert schedule == "constant" or last == {2.0 * 0.1}


def test_ema_follows_its_formula():
    model = hrm()
    ema = EMA(model, 0.9)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    for n in range(100):  # from the 81st on it has grown to 0.9
        decay = min(0.9, (1 + n) / (10 + n))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(torch.randn_like(p))
                expected[name] = decay * expected[name] + (1 - decay) * p.double()
        ema.update()
    for name, average in ema.average.items():
        assert largest_error(average.double(), expected[name]) < 1e-5


def test_the_average_of_a_short_run_has_left_the_first_weights():
    """With a constant decay of 0.9999, 99 % of it would be the weights before the first of 100 updates."""
    model = hrm()
    ema = EMA(model, 0.9999)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    for _ in range(100):
        ema.update()
    assert all(((average - 1).abs() < 1e-6).all() for average in ema.average.values())


def test_a_constant_decay_follows_its_formula():
    ema = EMA(nn.Linear(4, 3), 0.9999)
    ema.constant = True
    ema.average["weight"].zero_()
    ema.update()
    torch.testing.assert_close(ema.average["weight"], ema.params["weight"] * 1e-4)


@pytest.mark.full
def test_the_average_of_1b_published_has_a_constant_decay(shards, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(EMA, "update", lambda ema: seen.append(ema.constant))
    trainer = Trainer("train_hrm.py", ff=48, h_cycles=1, l_cycles=1, bp_steps=2, steps=1, max_new_tokens=1,
                      checkpoint_activations="none", ema=0.99)
    for size in ("1b-published", "tiny"):
        assert trainer.train(0, shards, tmp_path / size, size=size).code == 0
    assert seen == [True, False]


def test_ema_swaps_back_bit_for_bit():
    model = hrm()
    ema = EMA(model, 0.9)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    ema.update()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    average = {name: a.clone() for name, a in ema.average.items()}
    ema.swap()
    assert differing(dict(model.named_parameters()), average) == []
    assert differing(dict(model.named_parameters()), weights) == list(weights)  # control: they do differ
    ema.swap()
    assert differing(dict(model.named_parameters()), weights) == []
    assert differing(ema.average, average) == []


# -----------------------------------------------------------------------------------------------------------
# Counts, configuration, compilation

SIZES = {"25m": (320, 5, 3, 1024, 25e6), "100m": (640, 10, 6, 1792, 100e6),
         "350m": (1024, 8, 11, 2816, 350e6), "1b": (1536, 12, 16, 4096, 1e9)}


def full_size(size: str, seq_len: int = 1024) -> HRM:
    d_model, n_head, n_layer, ff, _ = SIZES[size]
    with torch.device("meta"):
        return HRM(HRMConfig(seq_len=seq_len, d_model=d_model, n_head=n_head, n_layer=n_layer, ff=ff))


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_parameters_of_their_names(size):
    model = full_size(size)
    assert (model.config.vocab_size, model.config.padded_vocab) == (50257, 50304)
    tied = num_params(model) - model.head.weight.numel()  # the names count one table
    assert tied == pytest.approx(SIZES[size][-1], rel=0.06)


def config_of(size: str, **changes) -> HRMConfig:
    args = flags_of(train_hrm, ["--size", size])
    return HRMConfig(**flags_of_model(HRMConfig, args) | {"seq_len": args.seq_len} | changes)


@pytest.mark.parametrize("size, example, expected", [
    ("tiny", {"bp_steps": 3}, 55_148_544), ("tiny", {"bp_steps": 5}, 59_867_136),
    ("tiny", {"bp_steps": 8}, 66_945_024),
    # the first call with a graph starts from a constant: its first product needs one gradient less
    ("tiny", {"bp_steps": 2}, 52_789_248 - 2 * 4 * 128**2),
    ("25m", {"bp_steps": 5}, 328_826_880), ("1b", {"bp_steps": 5}, 19_941_949_440),
    ("puzzle", {"cycles": 4}, 48_070_656), ("puzzle", {"cycles": 8}, 52_789_248)], ids=str)
def test_flops_are_those_of_a_formula(size, example, expected):
    """By hand: 2 for each weight and token in each stack call, twice that again in calls with a graph, and
    attention as full T x T."""
    assert flops_per_token(HRM, config_of(size), **example) == expected


@pytest.mark.parametrize("cycles, expected", [(1, 52_789_248), (2, 66_945_024), (4, 95_256_576)])
def test_flops_with_halt_are_those_of_the_cycles_that_run(cycles, expected):
    found = flops_per_token(HRM, config_of("tiny", halt=True), bp_steps=5, cycles=cycles)
    assert found == pytest.approx(expected, rel=1e-4)


def test_flops_are_counted_in_attention_of_any_kind():
    """Full T x T, also where FlexAttention or a kernel for CPUs computes it, which the counter does not
    see.
    """
    c = config_of("tiny")
    half = replace(c, seq_len=c.seq_len // 2)
    attention = flops_per_token(HRM, c) - flops_per_token(HRM, half)
    per_key = 4 * c.d_model * c.n_layer  # two products
    assert attention == c.seq_len // 2 * per_key * (8 + 2 * 5)


@pytest.mark.parametrize("config, message", [
    ({"d_model": 33}, "--d-model 33"), ({"d_model": 30}, "--n-head"),
    ({"vocab_size": 65}, "64 rows .* 65 ids")], ids=str)
def test_impossible_shapes_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        hrm(**config)


@pytest.mark.long
def test_compiled_blocks_compute_the_same():
    """Loss and gradients in each mode of checkpointing; and generation compiles nothing for its lengths."""
    expected = {bp_steps: step(hrm(), bp_steps=bp_steps)[0] for bp_steps in (2, 5)}
    model = hrm()
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.compile()
    for mode, bp_steps in (("none", 2), ("none", 5), ("block", 5), ("selective", 5)):
        for block in blocks:
            block.checkpointing = mode
        found, _ = step(model, bp_steps=bp_steps)
        for name, value in expected[bp_steps].items():
            assert largest_error(found[name], value) <= 1e-4, (mode, name)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled > 0
    greedy = ids_of(hrm(), tokens(length=3), SEQ_LEN, temperature=0)
    assert torch.equal(ids_of(model, tokens(length=3), SEQ_LEN, temperature=0), greedy)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize("has, dtype", [
    ("", torch.float32), ("avx512_bf16", torch.bfloat16), ("avx512_bf16 avx512_fp16", torch.float32),
    ("avx512_bf16 avx512_fp16 amx_bf16", torch.bfloat16)])
def test_auto_is_bf16_where_a_cpu_is_faster_in_it(has, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has.split(), True))
    assert compute_dtype("auto", torch.device("cpu")) == dtype


ALONE = """
from model import GPT2, HRM, MLM, make_optimizers
for family, ff in ((GPT2, {}), (HRM, {"ff": 64}), (MLM, {"ff": 32})):
    shape = dict(seq_len=16, n_layer=2, n_head=2, d_model=32) | ff
    model = family(family.Config(vocab_size=60, padded_vocab=64, **shape))
    optimizer, = make_optimizers(model, "adamw", 1e-3, (0.9, 0.95), 0.1)
    for step in range(2):
        objective, sums = model(**model.dummy_inputs(2, "cpu"))
        objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(sums["loss"].item())
"""


def test_a_copy_trains_with_nothing_but_ops(tmp_path):
    shutil.copy(ROOT / "model.py", tmp_path)
    shutil.copytree(ROOT / "ops", tmp_path / "ops")
    done = finish(start([sys.executable, "-c", ALONE], cwd=tmp_path, PYTHONPATH=None))
    losses = list(map(float, done.out.split()))
    assert done.code == 0 and len(losses) == 6, done.out
    assert all(after < before for before, after in zip(losses[::2], losses[1::2]))
    shutil.rmtree(tmp_path / "ops")  # the control
    assert finish(start([sys.executable, "-c", ALONE], cwd=tmp_path, PYTHONPATH=None)).code

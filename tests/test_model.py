"""model.py on tiny models: recomputation, truncated backpropagation, causality and halting change no bit, and
each check is shown to fail when the thing is broken on purpose. Then decoding, optimizers and schedules.
"""

import shutil
import sys
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, finish, start
from states import flags_of
from tiny_models import (
    BUILDS,
    EOT,
    HALT_BIAS,
    SEQ_LEN,
    SHAPE,
    VOCAB,
    WINDOW,
    differing,
    documents,
    each_model,
    gpt2,
    gradients,
    hrm,
    largest_error,
    mlm,
    positions_and_labels,
    step,
    tokens,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from train_recurrent import Recurrent

import model
import train_gpt2
import train_hrm
import train_mlm
from cli.errors import UserError
from cli.flags import flags_of_model
from model import (
    GPT2,
    HRM,
    MLM,
    ConfigError,
    blocks_of,
    learning_rate,
    linear_cross_entropy,
    make_optimizers,
    num_params,
)
from weights.sampling import KVCache, generate

MODES = ("block", "selective")
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# -----------------------------------------------------------------------------------------------------------
# Activation checkpointing is exact


@pytest.mark.parametrize("name, build, settings", [
    ("hrm", {"dropout": 0.1}, {"bp_steps": 2}),
    ("hrm", {"depth": 2, "dtype": BF16}, {"bp_steps": 5}),
    ("hrm", {"depth": 4, "dtype": BF16, "dropout": 0.1}, {"bp_steps": 5}),
    ("hrm", {"dtype": BF16, "dropout": 0.1, "least_cycles": 1, "h_cycles": 4, "l_cycles": 1, "bp_cycles": 2,
             "inject_input": True}, {"cycles": 4}),
    *((name, {"dropout": dropout, "dtype": dtype}, {}) for name in ("gpt2", "modern", "mlm")
      for dropout, dtype in ((0.1, BF16), (0.0, FP32)))], ids=str)
def test_checkpointing_changes_no_bit(name, build, settings, monkeypatch):
    expected, means = step(BUILDS[name](**build), **settings)
    assert expected["objective"].isfinite()
    assert name != "hrm" or means["cycles"] == (build.get("depth") or settings.get("cycles", 2))
    for mode in MODES:
        assert differing(expected, step(BUILDS[name](mode, **build), **settings)[0]) == [], mode
    if build.get("dropout"):  # control: recomputed with other masks, the gradients are wrong
        monkeypatch.setattr("model.checkpoint", lambda *args, **kwargs: checkpoint(
            *args, **(kwargs | {"preserve_rng_state": False})))
        wrong = differing(expected, step(BUILDS[name]("block", **build), **settings)[0])
        assert wrong and "objective" not in wrong


@each_model
def test_checkpointing_recomputes_what_it_says(build, monkeypatch):
    """Without this, a mode that is ignored would pass the test above."""
    runs, flops, calls = [], {}, {}
    kind = type(blocks_of(build())[0])
    plain = kind.block
    monkeypatch.setattr(kind, "block", lambda self, *args: runs.append(self) or plain(self, *args))
    for mode in ("none", *MODES):
        runs.clear()
        with FlopCounterMode(display=False) as counter:
            step(build(mode), **({"bp_steps": 5} if build is hrm else {}))
        flops[mode], calls[mode] = counter.get_total_flops(), len(runs)
    again = 10 if build is hrm else calls["none"]  # of the HRM, two blocks in 5 of 8 calls
    assert calls["block"] == calls["selective"] == calls["none"] + again
    assert flops["none"] == flops["selective"] < flops["block"]  # selective repeats no matrix product


def test_attention_that_draws_random_numbers_is_not_kept():
    """Only kernels of GPUs draw. Kept, they would leave the random state where the recomputation began."""
    policy = model.checkpoint_policy
    for op, at in model._ATTENTION.items():
        assert op._schema.arguments[at].name == "dropout_p"
        before = [torch.zeros(1)] * at
        answers = [policy(None, op, *before, *rest) for rest in ((), (0.0, True), (0.1, True))]
        assert [answer.name for answer in answers] == ["MUST_SAVE", "MUST_SAVE", "PREFER_RECOMPUTE"]
    kept = {op: policy(None, op).name == "MUST_SAVE" for op in (
        torch.ops.aten.mm.default, torch.ops.higher_order.flex_attention, torch.ops.aten.mul.Tensor)}
    assert [*kept.values()] == [True, True, False]


# -----------------------------------------------------------------------------------------------------------
# Gradients and losses


def without_gradient(grads: dict) -> list[str]:
    return [name for name, grad in grads.items() if grad is None or not grad.any()]


@each_model
def test_gradients_of_a_bfloat16_pass_are_float32_and_close(build):
    """The uses of a shared weight are summed without rounding each sum to bfloat16, as autocast would."""
    exact, rough = step(build())[0], step(build(dtype=BF16))[0]
    assert without_gradient(exact) == without_gradient(rough) == []
    for name, found in rough.items():
        assert found.dtype == FP32
        assert torch.cosine_similarity(exact[name].flatten(), found.flatten(), dim=0) > 0.97, name
        shared = build is hrm and ".blocks." in name
        assert not shared or not torch.equal(found, found.bfloat16().float()), name


def built(model_class, **config):
    """A causal model as it is initialized, of rows of pairs. It has those of the fields that it knows."""
    torch.manual_seed(0)
    config = SHAPE | {"ff": 48, "width": 16, "start": 57, "response": 58} | config
    known = {f.name for f in fields(model_class.Config)} & config.keys()
    return model_class(model_class.Config(**{key: config[key] for key in known}))


def own_logits(model_class):
    """Capped, with another best id, and with a parameter of their own, a power of two."""
    class Own(model_class):
        def __init__(self, config):
            super().__init__(config)
            self.gain = nn.Parameter(torch.tensor([2.0]))

        def logits(self, hidden):
            some = super().logits(hidden) * self.gain.to(hidden.dtype)
            return 3 * torch.tanh((some + torch.arange(VOCAB) / 30) / 3)

    return Own


@pytest.mark.parametrize("model_class, z_loss, training", [
    (GPT2, 0.1, False), (HRM, 0.1, True), (own_logits(GPT2), 0.1, True), (own_logits(GPT2), 0.0, False),
    (own_logits(HRM), 0.1, False), (own_logits(HRM), 0.0, True), (own_logits(Recurrent), 0.1, True)])
def test_losses_are_of_the_logits_that_write(model_class, z_loss, training):
    """Value, gradients, losses of tokens and exact answers, in float32."""
    lm = built(model_class, halt=True, modern=True).train(training)
    lm.z_loss = z_loss
    idx = torch.randint(57, (4, SEQ_LEN))
    idx[:, 0], idx[:, 5] = 57, 58
    logits = lm(idx)
    assert logits.shape == (4, SEQ_LEN, VOCAB)
    labels = logits.argmax(-1)  # of the first row: the others have a mistake in their response
    labels[1:, 9] = 7
    labels[:, :5] = -1
    losses = F.cross_entropy(logits.mT, labels, ignore_index=-1, reduction="none")
    wanted = losses + z_loss * logits.logsumexp(-1).square() * (labels >= 0)
    objective, sums = lm(idx, labels)
    one_by_one, same = lm(idx, labels, per_token=True)
    torch.testing.assert_close(one_by_one, wanted)
    torch.testing.assert_close(objective, wanted.sum())
    assert sums["loss"] == pytest.approx(losses.sum().item()) == same["loss"].item()
    assert training or (sums["samples"], sums["exact"]) == (4, 1)
    expected, *found = (torch.autograd.grad(loss, [*lm.parameters()], retain_graph=True, allow_unused=True)
                        for loss in (wanted.sum(), objective, one_by_one.sum()))
    for some in found:
        torch.testing.assert_close(some, expected, rtol=1e-3, atol=1e-4)


def test_only_own_logits_are_called_by_the_loss():
    lm, idx = gpt2(), tokens()
    assert lm.own_logits is hrm().own_logits is None
    lm.logits = lambda hidden: GPT2.logits(lm, hidden) / 2  # as a trainer may write
    wanted = F.cross_entropy(lm(idx).mT, idx, reduction="sum")
    assert largest_error(lm(idx, idx)[1]["loss"], wanted) < 1e-5 * wanted


def test_own_logits_take_no_memory_and_draw_the_same_again():
    """As many rows as two chunks have; those that are dropped are the same in the backward pass."""
    class Dropped(GPT2):
        def logits(self, hidden):
            return super().logits(F.dropout(hidden, 0.5, self.training))

    lm, idx, kept = built(Dropped, seq_len=512), tokens(length=512), []
    x = lm.hidden(idx).detach()
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        objective, _ = lm.loss(x, idx, idx)
    assert max(kept, default=0) < 512 * VOCAB
    torch.manual_seed(1)
    wanted = F.cross_entropy(torch.stack([lm.logits(row) for row in x]).mT, idx, reduction="sum")
    torch.testing.assert_close(objective, wanted)
    a, b = (torch.autograd.grad(loss, lm.head_weight)[0] for loss in (objective, wanted))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", [GPT2, HRM])
def test_an_own_loss_is_that_of_tokens_too(base):
    class Half(base):
        def loss(self, hidden, *args, **more):
            return super().loss(0.5 * hidden, *args, **more)

    class Whole(base):
        def loss(self, hidden, idx, targets):
            return super().loss(hidden, idx, targets)

    half, whole, idx = built(Half, halt=True), built(Whole, halt=True), tokens()
    losses, _ = half(idx, idx, per_token=True)
    torch.testing.assert_close(losses.sum(), half(idx, idx)[0])
    assert losses.sum() != whole(idx, idx)[0]
    with pytest.raises(TypeError, match="reduction"):
        whole(idx, idx, per_token=True)


@pytest.mark.parametrize("training", [True, False])
def test_an_mlms_loss_is_the_cross_entropy_at_the_masked_positions(training):
    lm, (positions, labels) = mlm().train(training), positions_and_labels()
    logits = lm(documents())
    assert logits.shape == (2, SEQ_LEN, VOCAB)
    picked = logits.gather(1, positions[..., None].expand(-1, -1, VOCAB))
    labels[1, 3:] = picked.argmax(-1)[1, 3:]  # two of eight are right
    right = (picked.argmax(-1) == labels)[labels >= 0].sum()
    expected = F.cross_entropy(picked.mT, labels.clamp(min=-1), ignore_index=-1, reduction="sum")
    loss, sums = lm(documents(), positions, labels)
    assert 2 <= right < 8 and largest_error(loss, expected) <= 1e-5 * loss
    assert sums.keys() == ({"loss"} if training else {"loss", "nats", "correct"})
    assert training or sums["correct"] == right and sums["nats"] == sums["loss"]
    # control: one position further on is noticed
    assert largest_error(lm(documents(), (positions + 1) % SEQ_LEN, labels)[0], loss) > 1e-2


# -----------------------------------------------------------------------------------------------------------
# Truncated backpropagation

# Which stack calls keep a graph, in the order L L L H L L L H: written out, as model.py computes it.
KEPT = {2: "......LH", 3: "...H..LH", 4: "...H.LLH", 5: "...HLLLH", 6: "..LHLLLH", 7: ".LLHLLLH",
        8: "LLLHLLLH", 99: "LLLHLLLH", None: "LLLHLLLH"}


def reference(lm: HRM, kept: str) -> dict:
    """The recurrence of a fixed-depth HRM written out. Calls whose letter `kept` leaves out are detached."""
    lm.zero_grad(set_to_none=True)
    idx = tokens(length=SEQ_LEN + 1)
    x = lm.embed(idx[:, :-1]) * 32**0.5
    rope = lm.rope[:, :SEQ_LEN]
    z_h, z_l = x, lm.z_l_init.expand_as(x)
    for name, keep in zip("LLLHLLLH", kept, strict=True):
        injected = name == "L" and lm.config.inject_input
        z = (lm.L if name == "L" else lm.H)(z_h + z_l + x if injected else z_h + z_l, rope)
        z = z if keep == name else z.detach()
        z_h, z_l = (z_h, z) if name == "L" else (z, z_l)
    loss = linear_cross_entropy(z_h, lm.head_weight, idx[:, 1:], VOCAB)[0] / 32
    loss.backward()
    found = {"objective": loss.detach(), **gradients(lm)}
    return {name: torch.zeros_like(lm.embed.weight) if t is None else t for name, t in found.items()}


@pytest.mark.parametrize("config, kept", [
    ({}, KEPT), ({"inject_input": True}, KEPT), ({"bp_cycles": 1}, {2: "....LLLH", None: "....LLLH"}),
    ({"bp_cycles": 9, "inject_input": True}, {2: "LLLHLLLH"})], ids=["", "inject", "cycle", "cycles"])
def test_truncated_backprop_equals_explicit_detach(config, kept):
    """The controls are the other ways to detach: one call more or less is noticed."""
    ways = {way: reference(hrm(**config), way) for way in {*KEPT.values(), *kept.values()}}
    for bp_steps, expected in kept.items():
        found, _ = step(hrm(**config), bp_steps=bp_steps)
        assert [way for way in ways if not differing(ways[way], found)] == [expected], bp_steps


def test_with_halt_every_cycle_keeps_what_a_last_one_would():
    config = hrm(halt=True).config
    for bp_steps, of_l in ((2, 1), (3, 2), (4, 3), (8, 3), (None, 3)):
        assert config.calls_with_grad(bp_steps, 4) == [(of_l, 1)] * 4


def test_states_are_what_fixed_numbers_of_cycles_give():
    lm, x = hrm(inject_input=True), tokens()
    for cycles, state in enumerate(lm.high_level_states(x, 4), 1):
        assert torch.equal(lm.logits(state), lm(x, cycles=cycles))


@pytest.mark.parametrize("bp_steps, extra, untrained", [
    (2, {}, True), (3, {}, False), (4, {"h_cycles": 4}, True), (5, {"h_cycles": 4}, False), (None, {}, False),
    (4, {"depth": 2}, False), (2, {"inject_input": True}, False), (2, {"halt": True}, False)], ids=str)
def test_every_parameter_has_a_gradient(bp_steps, extra, untrained):
    """It is zero in an embedding that is not reached. DDP waits for it all the same."""
    lm = hrm(**extra)
    found, _ = step(lm, bp_steps=bp_steps)
    assert without_gradient(found) == ["embed.weight"] * untrained
    assert found["embed.weight"] is not None and lm.config.reaches_embedding(bp_steps) != untrained


# -----------------------------------------------------------------------------------------------------------
# Adaptive depth


def undecided() -> HRM:
    """A model whose tokens stop at different depths."""
    lm = hrm(halt=True)
    nn.init.normal_(lm.halt.weight)
    nn.init.zeros_(lm.halt.bias)
    return lm


def test_halting_is_a_mean_over_cycles_and_the_rest_is_the_cost():
    """Written out: a cycle has the weight p, or all that is left if that would be less than 1 % then."""
    for depth in (None, *HALT_BIAS):
        lm, x = hrm(depth=depth) if depth else undecided(), tokens()
        left, out, cost, ran = torch.ones(2, SEQ_LEN), 0.0, 0.0, 0
        for cycle, state in enumerate(lm.high_level_states(x, 4), 1):
            ran += bool(left.any())
            p = torch.sigmoid(state @ lm.halt.weight[0] + lm.halt.bias)
            weight = torch.where((left - p < 0.01) | (torch.tensor(cycle) == 4), left, p)
            out, left = out + weight[..., None] * state, left - weight
            cost = cost + left
        z, ponder, cycles = lm.recurrence(x)
        assert largest_error(z, out) <= 1e-5 and largest_error(ponder, cost) <= 1e-5
        assert cycles == ran == (depth or ran)
        assert depth or 0 < (cost == 0).sum() < cost.numel()  # several depths in one batch


def test_ponder_cost_moves_the_halting_layer():
    lm, idx = undecided(), tokens(length=SEQ_LEN + 1)
    x, targets = idx[:, :-1], idx[:, 1:].clone()
    targets[:, ::3] = -1  # the cost counts where there is a target
    objective, sums = lm(x, targets, ponder_weight=0.5)
    cost = lm.recurrence(x)[1][targets >= 0].sum()
    assert largest_error(sums["ponder"], cost) < 1e-5
    assert largest_error(objective, sums["loss"] + 0.5 * cost) < 1e-4
    cost.backward()
    assert lm.halt.bias.grad.item() < 0  # a larger bias stops sooner and costs less
    assert lm.halt.weight.grad.any()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_cycle_too_many_changes_nothing(monkeypatch, depth, dtype):
    lm, idx = hrm(depth=depth, dtype=dtype), tokens()
    stopped, all_cycles = lm.recurrence(idx), lm.recurrence(idx, fixed_depth=True)
    assert (stopped[2], all_cycles[2]) == (depth, 4)
    assert torch.equal(stopped[0], all_cycles[0]) and torch.equal(stopped[1], all_cycles[1])
    few, many = step(lm)[0], step(lm, fixed_depth=True)[0]
    # of the mass that is left, gradients of later cycles cancel, except for the order of the sums
    assert max(largest_error(few[name], many[name]) for name in few) <= (1e-5 if depth > 1 else 0)
    # another rank that wants more cycles gets them, and changes nothing here
    monkeypatch.setattr("model.dist.is_initialized", lambda: True)
    monkeypatch.setattr("model.dist.all_reduce", lambda left, op: left.fill_(1.0))
    agreed = lm.recurrence(idx)
    assert agreed[2] == 4 and torch.equal(stopped[0], agreed[0])


# -----------------------------------------------------------------------------------------------------------
# What a token may see


@torch.no_grad()
def future_changes_past(lm) -> bool:
    idx, other = tokens(), tokens()
    other[:, 9:] = (other[:, 9:] + 1) % VOCAB
    same = (lm(idx) == lm(other)).all(-1)
    assert not same[:, 9:].any()  # the future itself does change
    return not same[:, :9].all()


@pytest.mark.parametrize("name, config", [
    ("hrm", {"inject_input": True}), ("hrm", {"depth": 4}), ("hrm", {"depth": 2, "dtype": BF16}),
    ("gpt2", {}), ("gpt2", {"dtype": BF16}), ("modern", {"dtype": BF16})], ids=str)
def test_the_future_never_changes_the_past(name, config, monkeypatch):
    assert not future_changes_past(BUILDS[name](**config))
    attention = F.scaled_dot_product_attention  # the control: attention that is not causal
    monkeypatch.setattr("model.F.scaled_dot_product_attention", lambda q, k, v, **_: attention(q, k, v))
    assert future_changes_past(BUILDS[name](**config))


@torch.no_grad()
@pytest.mark.parametrize("build, normalizes", [
    (hrm, False), (lambda: hrm(qk_norm=True), True), (BUILDS["modern"], True)])
def test_normalized_queries_and_keys_have_no_scale(build, normalizes):
    lm, idx = build(), tokens()
    before = lm(idx)
    for block in blocks_of(lm):
        block.gqkv.weight[32:64] *= 3  # queries
        block.gqkv.weight[64:96] *= 5  # keys
    assert (largest_error(lm(idx), before) < 1e-4) == normalizes


@torch.no_grad()
@pytest.mark.parametrize("eot, dtype", [(EOT, FP32), (EOT, BF16), (VOCAB + 1, FP32)])
def test_documents_of_an_mlm_do_not_see_each_other(eot, dtype):
    idx, other = documents(), documents()
    other[:, 6:11] = 1 + other[:, 6:11] % (VOCAB - 1)  # in the middle document
    lm = mlm(dtype=dtype, eot=eot).eval()
    a, b = lm.hidden(idx), lm.hidden(other)
    assert (a != b).any(-1)[:, 5:11].all()  # and its own EOT sees it
    for outside in (slice(0, 5), slice(11, None)):  # the control has no boundaries
        assert torch.equal(a[:, outside], b[:, outside]) == (eot == EOT)


@torch.no_grad()
def test_local_layers_see_half_a_window_to_either_side():
    """One local layer after a global one that is made to pass nothing on."""
    lm = mlm(n_layer=2, eot=VOCAB + 1).eval()
    idx, other = tokens(), tokens()
    other[:, 8] = (other[:, 8] + 1) % VOCAB
    assert (lm.hidden(idx) != lm.hidden(other)).any(-1).all()
    lm.transformer["blocks"][0].attn_out.weight.zero_()
    nearby = (lm.hidden(idx) != lm.hidden(other)).any(-1)
    assert torch.equal(nearby, ((torch.arange(SEQ_LEN) - 8).abs() <= WINDOW // 2).expand(2, -1))


@torch.no_grad()
def test_more_cycles_in_evaluation_than_in_training():
    x, deep = tokens(), hrm(eval_cycles=5)
    plain, other = hrm(h_cycles=5), hrm()
    assert torch.equal(deep(x), other(x)) and not torch.equal(deep(x), plain(x))
    for lm in (deep, plain, other):
        lm.eval()
    assert torch.equal(deep(x), plain(x)) and torch.equal(other(x, cycles=5), plain(x))


# -----------------------------------------------------------------------------------------------------------
# Decoding with a cache

every_kind = pytest.mark.parametrize("name, config", [
    ("hrm", {}), ("hrm", {"inject_input": True, "qk_norm": True}), ("hrm", {"depth": 2}),
    ("hrm", {"halt": True}), ("gpt2", {}), ("modern", {})], ids=str)


def ids_of(lm, prompt: torch.Tensor, count: int, **settings) -> torch.Tensor:
    return torch.stack([*generate(lm, prompt, count, **settings)], dim=1)


@torch.no_grad()
@every_kind
def test_decoding_with_the_cache_equals_the_full_pass(name, config):
    lm, idx = BUILDS[name](**config).eval(), tokens(batch=3)
    full = lm(idx)
    for prompt in (1, 6):
        cache = KVCache(SEQ_LEN)
        for end, part in enumerate([idx[:, :prompt], *idx[:, prompt:].split(1, dim=1)], prompt):
            logits = lm.decode(part, cache)
            assert cache.length == end and largest_error(logits, full[:, end - 1]) <= 1e-5
    # control: slots that are exchanged are noticed
    cache.length -= 1
    cache.memory[0], cache.memory[1] = cache.memory[1], cache.memory[0]
    assert largest_error(lm.decode(idx[:, -1:], cache), full[:, -1]) > 1e-5


@torch.no_grad()
@every_kind
def test_greedy_ids_are_those_of_whole_passes(name, config):
    """Also past the end of the context, where the later half is read again. Dropout plays no part."""
    lm = BUILDS[name](dropout=0.5, **config).eval()
    if name != "hrm":
        lm.head_weight.mul_(5)  # so that it does not only repeat the same token
    if name == "gpt2":
        lm.norm.bias.zero_()
    idx = context = tokens(length=5)
    for _ in range(2 * SEQ_LEN):
        if context.size(1) > SEQ_LEN:
            context = context[:, -(SEQ_LEN // 2):]
        new = lm(context)[:, -1].argmax(-1, keepdim=True)
        idx, context = torch.cat((idx, new), 1), torch.cat((context, new), 1)
    written = ids_of(lm.train(), tokens(length=5), 2 * SEQ_LEN, temperature=0)
    assert len(written.unique()) > 3 and lm.training
    assert torch.equal(written, idx[:, 5:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_a_cache_that_was_rewound_gives_the_same_bits(name):
    """As for drafts, of which a part is not taken."""
    lm, idx, cache = BUILDS[name]().eval(), tokens(), KVCache(SEQ_LEN)

    def decoded(*ends: int) -> list:
        return [lm.decode(idx[:, begin:end], cache) for begin, end in pairwise(ends)]

    first = decoded(0, 4, 5, 6, 7, 8)
    for n, same in ((6, True), (5, False)):  # the control is another place
        cache.rewind(6)
        lm.decode(idx[:, 9:10], cache)  # a draft
        cache.rewind(n)
        assert all(map(torch.equal, decoded(6, 7, 8), first[3:])) == same
    cache.rewind(0)
    assert all(map(torch.equal, decoded(0, 4, 5, 6, 7, 8), first))


@torch.no_grad()
def test_what_a_cache_refuses():
    """Several tokens when it is filled, because is_causal aligns queries with the first keys. To rewind a
    recurrent state.
    """
    idx, cache = tokens(), KVCache(SEQ_LEN)
    gpt2().decode(idx[:, :4], cache)
    with pytest.raises(AssertionError):
        gpt2().decode(idx[:, 4:6], cache)
    lm, cache = built(Recurrent), KVCache(SEQ_LEN)
    first = lm.decode(idx[:, :4], cache)
    with pytest.raises(AssertionError, match="recurrent"):
        cache.rewind(3)
    cache.rewind(0)
    assert torch.equal(lm.decode(idx[:, :4], cache), first)


@torch.no_grad()
def test_the_stop_id_stops_a_single_sequence():
    lm, prompt = hrm(), tokens(batch=1, length=3)
    free = ids_of(lm, prompt, 10)[0].tolist()
    found = ids_of(lm, prompt, 10, stop=free[4])
    assert found[0].tolist() == free[:free.index(free[4]) + 1]
    assert ids_of(lm, prompt.repeat(2, 1), 10, stop=free[4]).size(1) == 10  # a batch goes on


# -----------------------------------------------------------------------------------------------------------
# Starts, optimizers, schedules


def test_a_start_as_the_identity():
    """No token sees another, but from the second step on every matrix learns."""
    idx = tokens()
    changed = idx.clone()
    changed[:, 0] = (idx[:, 0] + 1) % VOCAB
    for lm, identity in ((hrm(init="published"), False), (hrm(init="identity"), True),
                         (built(GPT2, modern=True, response=-1), True)):
        assert torch.equal(lm(idx)[:, 1:], lm(changed)[:, 1:]) == identity
        assert lm.head.weight.std().item() == pytest.approx(0.02 if identity else 32**-0.5, rel=0.1)
        if identity:
            before = {name: p.detach().clone() for name, p in lm.named_parameters()}
            step(lm)
            for _ in range(2):
                for optimizer in make_optimizers(lm, "muon", 1e-2, (0.9, 0.95), 0.0):
                    optimizer.step()
                step(lm)
            assert differing(before, dict(lm.named_parameters())) == list(before)


@pytest.mark.parametrize("kind", ["adamw", "muon", "adam-atan2"])
@pytest.mark.parametrize("name", [*BUILDS, "halt"])
def test_every_parameter_has_one_optimizer(kind, name):
    lm = hrm(halt=True) if name == "halt" else BUILDS[name]()
    names = {p: name for name, p in lm.named_parameters()}
    optimizers = make_optimizers(lm, kind, 1e-3, (0.9, 0.95), 0.1, 4.0)
    placed = [(names[p], p.ndim, type(o).__name__, group) for o in optimizers for group in o.param_groups
              for p in group["params"]]
    assert sorted(name for name, *_ in placed) == sorted(names.values())
    for name, ndim, optimizer, group in placed:
        muon = kind == "muon" and ".blocks." in name and ndim == 2
        assert optimizer == ("Muon" if muon else "AdamAtan2" if kind == "adam-atan2" else "AdamW"), name
        assert group["weight_decay"] == (0.1 if ndim == 2 else 0.0), name
        assert group["lr"] == 1e-3 and group.get("adjust_lr_fn") == ("match_rms_adamw" if muon else None)
        vocab = name in ("embed.weight", "head.weight", "head_bias")
        assert group.get("scale", 1) == (4 if vocab else 1)  # their learning rate

    before = {name: p.detach().clone() for p, name in names.items()}
    step(lm)
    for optimizer in optimizers:
        optimizer.step()
    assert differing(before, dict(lm.named_parameters())) == list(before)  # a step moves each of them

    lm.embed.weight.requires_grad_(False)  # what is frozen has none
    blocks_of(lm)[0].down.weight.requires_grad_(False)
    groups = [g for o in make_optimizers(lm, kind, 1e-3, (0.9, 0.95), 0.1) for g in o.param_groups]
    assert sum(len(group["params"]) for group in groups) == len(placed) - 2


def rates(schedule: str, *ends, steps: int = 110, warmup: float = 10) -> list[float]:
    return [learning_rate(s, steps, 2.0, warmup, schedule, *ends) for s in range(steps)]


def test_rates_are_those_of_their_formulas():
    for schedule in ("cosine", "wsd", "constant"):
        found = rates(schedule, 0.1)
        assert found[:11] == pytest.approx([*(0.2 * s for s in range(1, 11)), 2.0])  # never 0, then all of it
        assert rates(schedule, 0.1, warmup=0)[0] == 2.0
        assert rates(schedule, 0.1, steps=200, warmup=0.05) == rates(schedule, 0.1, steps=200)
        # one step, a warm-up to the end, and steps past the end
        for steps, warmup in ((1, 0), (1, 1), (5, 5), (5, 9), (2, 1), (9, 0.5)):
            found = [learning_rate(s, steps, 2.0, warmup, schedule, 0.1) for s in range(steps + 3)]
            assert all(0.2 <= rate <= 2.0 for rate in found)
            assert schedule == "constant" or {*found[steps - 1:]} == {0.2}
    cosine = rates("cosine", 0.1, steps=111)
    assert cosine[60] == pytest.approx(1.1) and cosine[35] == pytest.approx(1.1 + 0.9 * 0.5**0.5)
    assert rates("constant", 0, 1)[10:] == [2.0] * 100
    wsd = rates("wsd", 0, 0.5)
    assert wsd[10:60] == [2.0] * 50 and wsd[-1] == rates("cosine", 0)[-1] == 0
    assert wsd[60:-1] == pytest.approx([2.0 * (1 - (s - 59.5) / 49.5) for s in range(60, 109)])
    assert rates("wsd", 0.1) == rates("wsd", 0.1, 0.2)


def test_flags_of_the_schedule():
    usual = flags_of(train_gpt2, [])
    assert (usual.warmup, usual.min_lr, usual.decay) == (30, 0.1, 0.2)
    for given in (0, 0, 0.001), (0.05, 0.5, 1):
        flags = flags_of(train_gpt2, "--warmup {} --min-lr {} --decay {}".format(*given).split())
        assert (flags.warmup, flags.min_lr, flags.decay) == given
    for bad in ("--warmup 1.5", "--warmup -1", "--min-lr 1", "--min-lr -0.1", "--min-lr nan", "--min-lr low",
                "--decay 0", "--decay 1.5", "--decay -1"):
        with pytest.raises(UserError, match=bad.split()[0]):
            train_gpt2.parse_args(bad.split())


# -----------------------------------------------------------------------------------------------------------
# Sizes and shapes


@pytest.mark.parametrize("family, trainer, size, rows, millions", [
    (HRM, train_hrm, "25m", 50304, 25), (HRM, train_hrm, "1b", 50304, 1000),
    (GPT2, train_gpt2, "gpt2", 50257, 124.4), (GPT2, train_gpt2, "gpt2-xl", 50257, 1558),
    (MLM, train_mlm, "base", 50368, 150), (MLM, train_mlm, "large", 50368, 396)], ids=str)
def test_sizes_have_the_published_parameters(family, trainer, size, rows, millions):
    """Those of an HRM have the parameters of their names, which count one table."""
    shape = flags_of_model(family.Config, flags_of(trainer, ["--size", size]))
    with torch.device("meta"):
        lm = family(family.Config(padded_vocab=rows, **shape))
    count = num_params(lm) - (lm.head.weight.numel() if family is HRM else 0)
    assert count / 1e6 == pytest.approx(millions, rel=0.06 if family is HRM else 0.003)


@each_model
@pytest.mark.parametrize("config, named", [
    ({"d_model": 33}, "--d-model 33"), ({"d_model": 30}, "--n-head 2"), ({"vocab_size": 65}, "64.* 65"),
    ({"n_layer": 100_001}, "100,000")], ids=str)
def test_impossible_shapes_are_refused(build, config, named):
    with pytest.raises(ConfigError, match=named):
        build(**config)


ALONE = """
import importlib.util
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
assert not importlib.util.find_spec("cli")
"""


def test_a_copy_trains_with_nothing_but_ops(tmp_path):
    shutil.copy(ROOT / "model.py", tmp_path)
    shutil.copytree(ROOT / "ops", tmp_path / "ops")
    done = finish(start([sys.executable, "-c", ALONE], cwd=tmp_path, PYTHONPATH=None))
    losses = list(map(float, done.out.split()))
    assert done.code == 0 and len(losses) == 6, done.out
    assert all(after < before for before, after in zip(losses[::2], losses[1::2]))

"""GPT-2 and the MLM of model.py, measured on tiny models on a CPU as in test_model.py.

Both equal their counterparts in Hugging Face transformers, in both directions; the KV cache, causality and
the boundaries of documents are exact; checkpointing changes no bit. Each check is shown to fail when the
thing is broken on purpose.
"""

import json
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from states import flags_of
from test_model import (
    MODES,
    PADDED,
    SEQ_LEN,
    VOCAB,
    check_prompt,
    differing,
    gradients,
    largest_error,
    logits_of,
    tokens,
    without_gradient,
)
from torch import nn
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from train_recurrent import Recurrent, RecurrentConfig

import model
import train_gpt2
import train_mlm
from cli.errors import UserError
from cli.flags import flags_of_model
from loggers.mfu import flops_per_token
from model import (
    GPT2,
    HRM,
    MLM,
    VOCAB_TENSORS,
    Block,
    ConfigError,
    GPT2Block,
    GPT2Config,
    HRMBlock,
    HRMConfig,
    MLMBlock,
    MLMConfig,
    linear_cross_entropy,
    make_optimizers,
    num_params,
    pad_vocab,
)
from ops import attention
from ops.device import uses_flex
from vocab import bpe
from vocab.tokenizer import load_tokenizer
from weights.huggingface import from_hf, to_hf
from weights.sampling import KVCache, generate

EOT, WINDOW = 0, 6  # three tokens to either side
KINDS = {"gpt2": {}, "modern": {"modern": True}}


@pytest.fixture(autouse=True)
def one_thread():
    """Because two wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", minversion="5.23")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bytes")  # 257 ids and [MASK], in a table of 320 rows


def gpt2(checkpointing: str = "none", dtype=torch.float32, **config) -> GPT2:
    """A tiny GPT-2, always with the same weights, all of them large enough to matter."""
    settings = {"vocab_size": VOCAB, "padded_vocab": PADDED, "seq_len": SEQ_LEN, "n_layer": 2, "n_head": 2,
                "d_model": 32}
    return prepared(GPT2(GPT2Config(**settings | config)), checkpointing, dtype)


def mlm(checkpointing: str = "none", dtype=torch.float32, **config) -> MLM:
    settings = {"vocab_size": VOCAB, "padded_vocab": PADDED, "seq_len": SEQ_LEN, "n_layer": 4, "n_head": 2,
                "d_model": 32, "ff": 24, "window": WINDOW, "eot": EOT}
    return prepared(MLM(MLMConfig(**settings | config)), checkpointing, dtype)


def prepared(model, checkpointing: str, dtype):
    randomize(model)
    model.compute_dtype = dtype
    for module in model.modules():
        if isinstance(module, Block):
            module.checkpointing = checkpointing
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    """Weights that make every tensor count: zeros and ones would hide one that is lost or exchanged."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        p.normal_(std=0.2, generator=generator)
        if name.endswith("weight") and ("norm" in name or ".ln_" in name):
            p.add_(1.0)


@torch.no_grad()
@pytest.mark.parametrize("model", [gpt2(modern=True), HRM(HRMConfig(
    vocab_size=VOCAB, padded_vocab=PADDED, seq_len=SEQ_LEN, n_layer=2, n_head=2, d_model=32, ff=48))],
    ids=["modern", "hrm"])
def test_modern_normalizes_queries_and_keys(model):
    """So their scale does not matter, as it does in an HRM."""
    x = tokens()
    expected = model(x)
    for module in model.modules():
        if isinstance(module, HRMBlock):
            _, query, key, _ = module.gqkv.weight.chunk(4)
            query *= 3
            key *= 5
    assert torch.allclose(model(x), expected, atol=1e-4) == isinstance(model, GPT2)


def documents() -> torch.Tensor:
    """Two rows of three documents, which start with EOT: (2, SEQ_LEN)."""
    idx = tokens().clamp(min=1)
    idx[:, [0, 5, 11]] = EOT
    return idx


def positions_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Five masked positions in each row; two of the labels do not count."""
    positions = torch.tensor([[1, 3, 7, 8, 12], [2, 4, 6, 13, 15]])
    labels = tokens(seed=9).gather(1, positions)
    labels[0, 4], labels[1, 0] = -1, -100
    return positions, labels


def step(model) -> dict:
    """The loss and every gradient by name of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)  # for dropout
    if isinstance(model, MLM):
        loss, sums = model(documents(), *positions_and_labels())
    else:
        idx = tokens(length=SEQ_LEN + 1)
        loss, sums = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    assert torch.equal(sums["loss"], loss) and not sums["loss"].requires_grad
    return {"loss": loss.detach(), **gradients(model)}


BUILDS = {"gpt2": gpt2, "modern": lambda *a, **k: gpt2(*a, **KINDS["modern"], **k), "mlm": mlm}
each_model = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)

# -----------------------------------------------------------------------------------------------------------
# Training: checkpointing, gradients, loss


@each_model
@pytest.mark.parametrize("dropout, dtype", [(0.0, torch.float32), (0.1, torch.float32), (0.1, torch.bfloat16),
                                            (0.0, torch.bfloat16)])
def test_checkpointing_changes_no_bit(build, dropout, dtype):
    expected = step(build(dropout=dropout, dtype=dtype))
    assert expected["loss"].isfinite()
    for mode in MODES:
        assert differing(expected, step(build(mode, dropout=dropout, dtype=dtype))) == [], mode


@each_model
def test_checkpointing_recomputes_what_it_says(build):
    """Without this, a mode that is ignored would pass the test above."""
    runs, flops, calls = [], {}, {}
    kind = MLMBlock if build is mlm else GPT2Block
    plain = kind.block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "block", lambda self, *args: runs.append(self) or plain(self, *args))
        for mode in ("none", *MODES):
            runs.clear()
            with FlopCounterMode(display=False) as counter:
                step(build(mode))
            flops[mode], calls[mode] = counter.get_total_flops(), len(runs)
    assert calls["block"] == calls["selective"] == 2 * calls["none"]
    assert flops["none"] == flops["selective"] < flops["block"]


@each_model
def test_control_random_state_not_preserved(build, monkeypatch):
    expected = step(build(dropout=0.1))
    monkeypatch.setattr("model.checkpoint", lambda *args, **kwargs: checkpoint(
        *args, **(kwargs | {"preserve_rng_state": False})))
    assert differing(expected, step(build("block", dropout=0.1)))


def masks_of(kind: str, T: int):
    """BandMasks of whole masks (2, 1, T, T) as the models make them, or None."""
    idx = torch.randint(1, VOCAB, (2, T), generator=torch.Generator().manual_seed(T))
    idx[:, ::90] = 0  # starts of documents
    idx[:, 40::90] = 1  # responses
    if kind in ("global", "window"):
        return mlm(eot=0, window=64).attention_masks(idx)[kind == "window"]
    return gpt2(attention=kind, start=0, response=1).mask(idx, None)


@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_bf16"), reason="others round elsewhere")
@pytest.mark.parametrize("kind", ["causal", "isolated", "prefix", "global", "window"])
@pytest.mark.parametrize("T", [256, 257, 513, 700, 1024])
def test_attention_in_blocks_has_the_bits_of_whole_products(kind, T, monkeypatch):
    """Also its gradients; with bfloat16 on a CPU."""
    block = gpt2().transformer["blocks"][0]
    block.cpu_attention = attention.cpu_attention
    mask = masks_of(kind, T)
    assert (mask and mask[1:]) == {
        "causal": None, "isolated": (None, 0), "window": (32, 32)}.get(kind, (None, None))
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 2, T, 2 * 16, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(2, 2, T, 16, generator=generator).bfloat16()
    found = []
    for queries in (attention.QUERIES, 10**6):  # the second: all at once
        monkeypatch.setattr(attention, "QUERIES", queries)
        y = block.attend(*qkv.unflatten(-1, (2, 16)).transpose(2, 3).unbind(), mask)
        found.append([y, *torch.autograd.grad(y, qkv, grad)])
    assert all(map(torch.equal, *found))


def test_a_mask_of_floats_is_added_to_the_scores_on_cpus_too():
    block = gpt2().transformer["blocks"][0]
    block.cpu_attention = attention.cpu_attention
    q, k, v = torch.randn(3, 2, 2, 40, 16).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        bias = -torch.rand(40, 40).to(dtype)
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        assert torch.equal(block.attend(q, k, v, bias), wanted)


@each_model
def test_checkpointing_changes_no_bit_of_attention_in_blocks(build, monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", 4)
    calls = []
    plain = attention._BlockAttention.apply
    monkeypatch.setattr(attention._BlockAttention, "apply", lambda *args: calls.append(1) or plain(*args))
    found = []
    for mode in ("none", "selective", "block"):
        each = build(mode, dtype=torch.bfloat16)
        for block in model.blocks_of(each):
            block.cpu_attention = attention.cpu_attention
        found.append(step(each))
    assert calls
    assert differing(found[0], found[1]) == differing(found[0], found[2]) == []


def test_attention_that_draws_random_numbers_is_not_kept():
    """Only kernels of GPUs draw; kept, they would leave the random state where the recomputation began."""
    policy = model.checkpoint_policy
    for op, at in model._ATTENTION.items():
        assert op._schema.arguments[at].name == "dropout_p"
        before = [torch.zeros(1)] * at
        answers = [policy(None, op, *before, *rest) for rest in ((), (0.0, True), (0.1, True))]
        assert [answer.name for answer in answers] == ["MUST_SAVE", "MUST_SAVE", "PREFER_RECOMPUTE"]
    assert policy(None, torch.ops.aten.mm.default).name == "MUST_SAVE"
    assert policy(None, torch.ops.aten.mul.Tensor).name == "PREFER_RECOMPUTE"


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_gets_a_gradient(build, dtype):
    grads = step(build(dtype=dtype))
    assert without_gradient(grads) == []
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads.values())


@each_model
def test_gradients_of_a_bfloat16_pass_are_close(build):
    exact, rough = step(build()), step(build(dtype=torch.bfloat16))
    for name in exact:
        assert torch.cosine_similarity(exact[name].flatten(), rough[name].flatten(), dim=0) > 0.97, name


def test_modern_starts_as_the_identity_and_every_parameter_moves_soon():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(VOCAB, PADDED, SEQ_LEN, n_layer=2, n_head=2, d_model=32, modern=True))
    x = torch.randn(1, 5, 32)
    assert torch.equal(model.transformer["blocks"][0](x, model.rope[:, :5]), x)
    seen = []
    hook = model.transformer["blocks"][0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.arange(VOCAB)[None, :SEQ_LEN])
    hook.remove()
    assert abs(seen[0].std() - 1) < 0.1  # embeddings have variance 1
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = step(model)
    assert all(g is not None for g in grads.values())
    assert len(without_gradient(grads)) == 4  # qkv and up of two blocks, behind projections that are 0
    for _ in range(2):
        for optimizer in make_optimizers(model, "muon", 1e-2, (0.9, 0.95), 0.0):
            optimizer.step()
        step(model)
    assert differing(before, dict(model.named_parameters())) == list(before)


@each_model
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer(build, kind):
    model = build()
    first, names = step(model), {id(p): name for name, p in model.named_parameters()}
    optimizers = make_optimizers(model, kind, 1e-3, (0.9, 0.95), 0.1)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                muon = kind == "muon" and ".blocks." in names[id(p)] and p.ndim == 2
                assert isinstance(optimizer, torch.optim.Muon if muon else torch.optim.AdamW)
                assert group["weight_decay"] == (0.1 if p.ndim == 2 else 0.0)
        optimizer.step()
    assert (len(optimizers) == 2) == (kind == "muon")
    assert step(model)["loss"] < first["loss"]


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_gpt2_loss_is_the_cross_entropy_of_its_logits(config):
    model, idx = gpt2(**config), tokens(length=SEQ_LEN + 1)
    logits = model(idx[:, :-1])
    assert logits.shape == (2, SEQ_LEN, VOCAB)
    expected = F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten())
    assert largest_error(model(idx[:, :-1], idx[:, 1:])[0] / (2 * SEQ_LEN), expected) <= 1e-5


@pytest.mark.parametrize("training", [True, False])
def test_mlm_loss_is_the_cross_entropy_at_the_masked_positions(training):
    model, (positions, labels) = mlm().train(training), positions_and_labels()
    logits = model(documents())
    assert logits.shape == (2, SEQ_LEN, VOCAB)
    picked = logits.gather(1, positions[..., None].expand(-1, -1, VOCAB))
    expected = F.cross_entropy(picked.flatten(0, 1), labels.clamp(min=-1).flatten(), ignore_index=-1)
    best = picked.argmax(-1)
    labels[1, 3:] = best[1, 3:]  # two of eight are right
    right = (best == labels)[labels >= 0].sum()
    assert 2 <= right < 8
    expected = F.cross_entropy(picked.flatten(0, 1), labels.clamp(min=-1).flatten(), ignore_index=-1,
                               reduction="sum")
    loss, sums = model(documents(), positions, labels)
    assert largest_error(loss, expected) <= 1e-5 * expected
    assert sums.keys() == ({"loss"} if training else {"loss", "nats", "correct"})
    assert training or sums["correct"] == right and sums["nats"] == sums["loss"]
    # control: one position further on is noticed
    assert largest_error(model(documents(), (positions + 1) % SEQ_LEN, labels)[0], expected) > 1e-2
    # and only those positions pass the head
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(documents(), positions, labels)
    few = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(documents())
    assert counter.get_total_flops() - few == (2 * SEQ_LEN - 10) * 2 * 32 * (32 + PADDED)


@pytest.mark.parametrize("n", [1, 513, 1300])
def test_linear_cross_entropy_with_a_bias_and_accuracy(n):
    hidden, weight = torch.randn(n, 24, requires_grad=True), torch.randn(PADDED, 24, requires_grad=True)
    bias = torch.randn(PADDED, requires_grad=True)
    targets = torch.randint(VOCAB, (n,))
    targets[1::3] = -1
    logits = F.linear(hidden, weight, bias)[:, :VOCAB]
    expected = F.cross_entropy(logits, targets, ignore_index=-1)
    assert linear_cross_entropy(hidden, weight, targets, VOCAB, bias)[2] is None
    found, _, hits = linear_cross_entropy(hidden, weight, targets, VOCAB, bias, hits=True)
    found = found / (targets >= 0).sum()
    accuracy = hits.sum() / (targets >= 0).sum()
    assert largest_error(found, expected) <= 1e-5
    right = (logits.argmax(-1) == targets)[targets >= 0].float().mean()
    assert largest_error(accuracy, right) <= 1e-6 and not hits.requires_grad
    inputs = (hidden, weight, bias)
    for a, b in zip(torch.autograd.grad(3 * found, inputs), torch.autograd.grad(3 * expected, inputs),
                    strict=True):
        assert largest_error(a, b) <= 1e-5


# -----------------------------------------------------------------------------------------------------------
# What a token may see


def prefixes(model, cut: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the first `cut` tokens, with two different futures."""
    idx, other = tokens(), tokens()
    other[:, cut:] = (other[:, cut:] + 1) % VOCAB
    with torch.no_grad():
        a, b = model(idx), model(other)
    assert not torch.equal(a[:, cut:], b[:, cut:])
    return a[:, :cut], b[:, :cut]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_the_future_never_changes_the_past(config, dtype):
    assert torch.equal(*prefixes(gpt2(dtype=dtype, **config)))


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_control_attention_that_is_not_causal(config, monkeypatch):
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr("model.F.scaled_dot_product_attention", lambda q, k, v, **_: attention(q, k, v))
    assert not torch.equal(*prefixes(gpt2(**config)))


@torch.no_grad()
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_a_cache_that_was_rewound_gives_the_same_bits(config):
    """As for drafts, of which a part is not taken."""
    model, idx = gpt2(**config).eval(), tokens(batch=2)
    cache = KVCache(model.config.seq_len)

    def greedy(new, steps: int) -> list:
        found = []
        for _ in range(steps):
            found.append(model.decode(new, cache))
            new = found[-1].argmax(-1, keepdim=True)
        return found

    first = greedy(idx[:, :4], 5)
    cache.rewind(6)  # the prompt and two more
    model.decode(idx[:, 5:6], cache)  # a draft
    cache.rewind(6)
    again = greedy(first[2].argmax(-1, keepdim=True), 2)
    assert all(map(torch.equal, again, first[3:]))
    cache.rewind(5)  # control: another place
    assert not torch.equal(greedy(first[2].argmax(-1, keepdim=True), 1)[0], first[3])
    cache.rewind(0)
    assert all(map(torch.equal, greedy(idx[:, :4], 5), first))


@torch.no_grad()
def test_a_recurrent_state_is_not_rewound():
    model = Recurrent(RecurrentConfig(vocab_size=VOCAB, padded_vocab=PADDED, seq_len=SEQ_LEN, width=16))
    cache = KVCache(SEQ_LEN)
    first = model.decode(tokens()[:, :4], cache)
    with pytest.raises(AssertionError, match="recurrent"):
        cache.rewind(3)
    cache.rewind(0)
    assert torch.equal(model.decode(tokens()[:, :4], cache), first)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 6])
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_decoding_with_the_cache_equals_the_full_pass(config, prompt):
    model, idx = gpt2(**config).eval(), tokens(batch=3)
    full, cache = model(idx), KVCache(model.config.seq_len)
    for end, part in enumerate([idx[:, :prompt], *idx[:, prompt:].split(1, dim=1)], prompt):
        logits = model.decode(part, cache)
        assert cache.length == end
        assert largest_error(logits, full[:, end - 1]) <= 1e-5
        assert torch.equal(logits.argmax(-1), full[:, end - 1].argmax(-1))
    # control: slots that are exchanged are noticed
    cache.length -= 1
    cache.memory[0], cache.memory[1] = cache.memory[1], cache.memory[0]
    assert largest_error(model.decode(idx[:, -1:], cache), full[:, -1]) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_greedy_generation_equals_a_loop_over_full_passes(config):
    """Also past the end of the context, where the later half is read again; and dropout plays no part."""
    model = gpt2(dropout=0.5, **config).eval()
    model.head_weight.mul_(5)  # so that it does not only repeat the same token
    if not config:
        model.norm.bias.zero_()
    idx = context = tokens(length=5)
    for _ in range(2 * SEQ_LEN):
        if context.size(1) > SEQ_LEN:
            context = context[:, -(SEQ_LEN // 2):]
        new = model(context)[:, -1, :VOCAB].argmax(-1, keepdim=True)
        idx, context = torch.cat((idx, new), 1), torch.cat((context, new), 1)
    written = torch.stack(list(generate(model.train(), tokens(length=5), 2 * SEQ_LEN, temperature=0)), dim=1)
    assert len(written.unique()) > 3 and model.training
    assert torch.equal(written, idx[:, 5:])


def other_document(**config) -> tuple[torch.Tensor, torch.Tensor]:
    """States of all tokens, with two different middle documents."""
    idx, other = documents(), documents()
    other[:, 6:11] = 1 + other[:, 6:11] % (VOCAB - 1)
    model = mlm(**config).eval()
    with torch.no_grad():
        return model.hidden(idx), model.hidden(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_do_not_see_each_other(dtype):
    a, b = other_document(dtype=dtype)
    for outside in (slice(0, 5), slice(11, None)):
        assert torch.equal(a[:, outside], b[:, outside])
    assert (a != b).any(-1)[:, 5:11].all()  # and its own EOT sees it


def test_control_without_boundaries_they_do():
    a, b = other_document(eot=VOCAB + 1)
    assert (a != b).any(-1).all()


def test_local_layers_see_half_a_window_to_either_side():
    """One local layer after a global one that is made to pass nothing on."""
    model = mlm(n_layer=2, eot=VOCAB + 1).eval()
    idx, other = tokens(), tokens()
    other[:, 8] = (other[:, 8] + 1) % VOCAB
    with torch.no_grad():
        everywhere = (model.hidden(idx) != model.hidden(other)).any(-1)
        model.transformer["blocks"][0].attn_out.weight.zero_()
        nearby = (model.hidden(idx) != model.hidden(other)).any(-1)
    assert everywhere.all()
    assert torch.equal(nearby, ((torch.arange(SEQ_LEN) - 8).abs() <= WINDOW // 2).expand(2, -1))


@pytest.mark.full
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("length", [SEQ_LEN, 200])  # one block of a BlockMask, and two of which one is cut
def test_flex_attention_computes_the_same(length, monkeypatch):
    """Forward and uncompiled, which is all that it can do on a CPU."""
    model = mlm(seq_len=length).eval()
    idx = tokens(length=length)
    idx[0, [0, length // 3, length // 2]] = EOT
    dense = model.hidden(idx)
    monkeypatch.setattr("model.uses_flex", lambda head_dim, device: True)
    monkeypatch.setattr(Block, "flex_attention", staticmethod(flex_attention.flex_attention))
    assert largest_error(model.hidden(idx), dense) <= 1e-5
    idx[0, length // 2] = EOT + 1  # control: one boundary less is noticed
    idx[0, length // 2 + 1] = EOT
    assert largest_error(model.hidden(idx), dense) > 1e-3


@pytest.mark.parametrize("device, capability, head_dim, flex", [
    ("cpu", None, 64, False), ("cuda", (6, 1), 64, False), ("cuda", (8, 0), 8, False),
    ("cuda", (7, 0), 64, False), ("cuda", (7, 5), 64, True), ("cuda", (8, 0), 128, True),
    ("cuda", (7, 5), 128, False)])  # for which a T4 has too little shared memory
def test_flex_attention_needs_triton_and_heads_that_fit(monkeypatch, device, capability, head_dim, flex):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert uses_flex(head_dim, torch.device(device)) == flex


# -----------------------------------------------------------------------------------------------------------
# Hugging Face

SEEDS = [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 10))]


def shape_of_gpt2(seed: int) -> dict:
    pick = random.Random(seed)
    n_head = pick.choice((1, 2, 3))
    return {"n_head": n_head, "d_model": n_head * pick.choice((4, 8, 16)), "n_layer": pick.choice((1, 2, 3)),
            "seq_len": pick.choice((16, 24)), "norm_eps": pick.choice((1e-5, 1e-3)),
            "dropout": pick.choice((0.0, 0.1))}


def shape_of_mlm(seed: int) -> dict:
    pick = random.Random(seed)
    shape = shape_of_gpt2(seed) | {"seq_len": 40, "n_layer": pick.choice((1, 3, 4, 5))}
    return shape | {"ff": pick.choice((24, 40)), "window": pick.choice((4, 7, 10)),  # all shorter than a row
                    "global_every": pick.choice((1, 2, 3)), "global_theta": pick.choice((500.0, 160000.0)),
                    "local_theta": pick.choice((100.0, 10000.0))}


def tiny(family: type, seed: int, **changes):
    shape = shape_of_gpt2(seed) if family is GPT2 else shape_of_mlm(seed) | {"eot": 256, "vocab_size": 258}
    return (gpt2 if family is GPT2 else mlm)(**({"vocab_size": 257, "padded_vocab": 320} | shape | changes))


def export(model, tokenizer, directory):
    to_hf(model.eval(), directory, tokenizer)
    return directory


def modern(seed: int, **changes):
    return tiny(GPT2, seed, modern=True, **changes)


each_family = pytest.mark.parametrize("family", [GPT2, MLM])
THEIRS = {GPT2: "GPT2LMHeadModel", MLM: "ModernBertForMaskedLM"}


@torch.no_grad()
def check_export(ours, transformers, tokenizer, directory):
    export(ours, tokenizer, directory)
    c, auto = ours.config, "AutoModelForCausalLM" if isinstance(ours, GPT2) else "AutoModelForMaskedLM"
    theirs = getattr(transformers, auto).from_pretrained(directory)
    assert type(theirs).__name__ == ("Qwen3_5ForCausalLM" if vars(c).get("modern") else THEIRS[type(ours)])
    assert theirs.dtype == torch.float32
    idx = torch.randint(256, (2, c.seq_len))  # without 256, the EOT: transformers knows no documents
    logits = logits_of(theirs, idx)
    assert logits.size(-1) == c.vocab_size
    assert largest_error(ours(idx)[..., :c.vocab_size], logits) <= 1e-5
    back = from_hf(type(ours), directory)
    # only training has dropout, and Qwen3.5 has no field for it
    assert back.config == (replace(c, dropout=0.0) if vars(c).get("modern") else c)
    state = back.state_dict()
    for name, tensor in ours.state_dict().items():
        rows = c.vocab_size if tensor.size(0) == c.padded_vocab and name in VOCAB_TENSORS else None
        if vars(c).get("modern") and name == "embed.weight":  # times and by √C
            assert largest_error(tensor[:rows], state[name][:rows]) <= 1e-6
        else:
            assert torch.equal(tensor[:rows], state[name][:rows]), name
        assert state[name].isfinite().all()
    return theirs, idx


@each_family
@pytest.mark.parametrize("seed", SEEDS)
def test_transformers_reads_what_we_write(family, seed, transformers, tokenizer, tmp_path):
    check_export(tiny(family, seed), transformers, tokenizer, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_modern_model_is_one_of_qwen(seed, transformers, tokenizer, tmp_path):
    theirs, _ = check_export(modern(seed), transformers, tokenizer, tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    assert from_hf(GPT2, tmp_path / "again").config == from_hf(GPT2, tmp_path).config


def test_a_modern_model_writes_the_same_text_in_transformers(transformers, tokenizer, tmp_path):
    ours = modern(0, n_layer=2, n_head=4, d_model=64, seq_len=64, dropout=0.0)
    theirs, _ = check_export(ours, transformers, tokenizer, tmp_path)
    check_prompt(ours, theirs, tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path), "the cat sat")


@torch.no_grad()
@pytest.mark.parametrize("name", ["gqkv", "gate_up", "attn_out", "down", "embed", "head"])
def test_control_one_wrong_tensor_of_a_modern_model_is_noticed(name, transformers, tokenizer, tmp_path):
    ours = modern(0, n_layer=2)
    theirs, idx = check_export(ours, transformers, tokenizer, tmp_path)
    tensor = next(t for key, t in ours.state_dict().items() if name in key)
    tensor.copy_(tensor.roll(1, 0))
    assert largest_error(ours(idx)[..., :257], logits_of(theirs, idx)[..., :257]) > 1e-3


@pytest.mark.parametrize("change, message", [
    ({"num_key_value_heads": 1}, "num_key_value_heads to 1, which train_gpt2.py"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types to "),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
     "rope_parameters to "),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}},
     "rope_parameters to "),
    ({"tie_word_embeddings": True}, "tie_word_embeddings to True"), ({"head_dim": 99}, "head_dim to 99"),
    ({"intermediate_size": 99}, "intermediate_size to 99"), ({"hidden_act": "gelu"}, "hidden_act to gelu"),
    ({"attention_bias": True}, "attention_bias to True"),
    ({"attn_output_gate": False}, "attn_output_gate to False"),
    ({"num_hidden_layers": 9, "layer_types": ["full_attention"] * 9}, "has no tensor '?model.layers.2"),
    ({"layer_types": None}, "makes no model|layer_types to None")], ids=str)
def test_another_qwen_is_refused(change, message, tokenizer, tmp_path):
    path = export(modern(0, n_layer=2, n_head=2, d_model=16), tokenizer, tmp_path) / "config.json"
    assert from_hf(GPT2, str(tmp_path)).config.modern
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message) as error:
        from_hf(GPT2, str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_qwen_with_weights_in_its_norms_is_refused(transformers, tokenizer, tmp_path):
    export(modern(0), tokenizer, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name in ("model.norm", "model.layers.0.self_attn.q_norm", "model.layers.0.input_layernorm"):
        with torch.no_grad():
            theirs.get_submodule(name).weight[0] = 0.1
        theirs.save_pretrained(tmp_path / "trained")
        with pytest.raises(UserError, match=f"this model has weights in {name}.weight, which train_gpt2.py"):
            from_hf(GPT2, tmp_path / "trained")
        theirs.get_submodule(name).weight.data.zero_()


@pytest.mark.parametrize("model", [tiny(GPT2, 0), modern(0)])
def test_a_batch_is_padded_on_the_left(model, transformers, tokenizer, tmp_path):
    """So generate continues each text as it does alone; with the padding on the right, it does not."""
    export(model, tokenizer, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert words.padding_side == "left" and theirs.config.pad_token_id == words.pad_token_id is not None
    texts = ["a", "some more", "the cat sat"]

    def written(batch: list[str]) -> list[list[int]]:
        given = words(batch, return_tensors="pt", padding=True)
        found = theirs.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        return found[:, given["input_ids"].size(1):].tolist()
    alone = [written([text])[0] for text in texts]
    assert written(texts) == alone
    words.padding_side = "right"
    assert written(texts) != alone
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    assert classifier(**words(texts, return_tensors="pt", padding=True)).logits.shape == (3, 2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["transformer.blocks.0.qkv.weight", "transformer.blocks.1.down.weight",
                                  "transformer.blocks.1.attn_norm.weight", "positions.weight",
                                  "embed_norm.weight", "head_bias", "head_dense.weight", "norm.weight"])
def test_control_one_wrong_tensor_is_noticed(name, transformers, tokenizer, tmp_path):
    for family in (GPT2, MLM):
        ours = tiny(family, 0, n_layer=2)
        if name in ours.state_dict():
            theirs, idx = check_export(ours, transformers, tokenizer, tmp_path)
            tensor = ours.state_dict()[name]
            tensor.copy_(tensor.roll(1, 0))
            assert largest_error(ours(idx)[..., :257], logits_of(theirs, idx)[..., :257]) > 1e-3


def test_padding_is_cut_from_the_vocabulary_alone(transformers, tokenizer, tmp_path):
    """Another tensor is as tall as the padded vocabulary here: up with 4 · 80 rows, gate_up with 2 · 160."""
    check_export(tiny(GPT2, 0, d_model=80, n_head=2), transformers, tokenizer, tmp_path / "gpt2")
    check_export(tiny(MLM, 0, ff=160), transformers, tokenizer, tmp_path / "mlm")


@pytest.mark.parametrize("seed", SEEDS)
def test_we_read_gpt2_as_transformers_writes_it(seed, transformers, tmp_path):
    shape, vocab_size = shape_of_gpt2(seed), random.Random(seed).choice((100, 128))
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=vocab_size, n_positions=shape["seq_len"], n_embd=shape["d_model"],
        n_layer=shape["n_layer"], n_head=shape["n_head"], layer_norm_epsilon=shape["norm_eps"],
        resid_pdrop=0.2, bos_token_id=0, eos_token_id=0))
    randomize(theirs, seed)
    theirs.save_pretrained(tmp_path)
    check_import(GPT2, theirs, vocab_size, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_we_read_modernbert_as_transformers_writes_it(seed, transformers, tmp_path):
    shape, vocab_size = shape_of_mlm(seed), random.Random(seed).choice((100, 128))
    theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(
        vocab_size=vocab_size, hidden_size=shape["d_model"], intermediate_size=shape["ff"],
        num_hidden_layers=shape["n_layer"], num_attention_heads=shape["n_head"],
        max_position_embeddings=shape["seq_len"], norm_eps=shape["norm_eps"], local_attention=shape["window"],
        global_attn_every_n_layers=shape["global_every"],
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": shape["global_theta"]},
                         "sliding_attention": {"rope_type": "default", "rope_theta": shape["local_theta"]}},
        pad_token_id=0, bos_token_id=0, eos_token_id=0, cls_token_id=0, sep_token_id=0))
    randomize(theirs, seed)
    theirs.save_pretrained(tmp_path)
    ours = check_import(MLM, theirs, vocab_size, tmp_path)
    assert {k: getattr(ours.config, k) for k in shape if k != "dropout"} == {
        k: v for k, v in shape.items() if k != "dropout"}


def check_import(family, theirs, vocab_size, directory):
    ours = from_hf(family, directory).eval()
    c = ours.config
    assert c.padded_vocab == pad_vocab(vocab_size)
    idx = torch.randint(1, vocab_size, (2, c.seq_len))  # without 0, the EOT
    with torch.no_grad():
        assert largest_error(ours(idx)[..., :vocab_size], logits_of(theirs, idx)) <= 1e-5
    assert all(p.isfinite().all() for p in ours.parameters())
    return ours


def test_the_old_form_of_their_files_is_read(transformers, tokenizer, tmp_path):
    """gpt2 on the hub: no prefix, and buffers. ModernBERT on the hub: another spelling of the layers."""
    import safetensors.torch
    ours = tiny(GPT2, 0)
    file = export(ours, tokenizer, tmp_path / "gpt2") / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in safetensors.torch.load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    safetensors.torch.save_file(tensors, file)
    assert torch.equal(from_hf(GPT2, tmp_path / "gpt2").transformer["blocks"][0].qkv.weight,
                       ours.transformer["blocks"][0].qkv.weight)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")  # and so does transformers
    assert largest_error(logits_of(theirs, tokens()), ours(tokens())[..., :257]) <= 1e-5

    ours = tiny(MLM, 0, n_layer=5, global_every=2)
    path = export(ours, tokenizer, tmp_path / "mlm") / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["rope_parameters"]
    config |= {"global_rope_theta": ours.config.global_theta, "local_rope_theta": ours.config.local_theta}
    path.write_text(json.dumps(config))
    assert from_hf(MLM, tmp_path / "mlm").config == ours.config


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_gpt2_in_transformers_generates_the_same_text(name, transformers, tmp_path):
    text = "the cat sat on the mat, and the cat — über alles — sat on 12 mats.\n"
    tokenizer = load_tokenizer("bytes") if name == "bytes" else bpe.train_bpe([text] * 20, 290)
    ours = gpt2(vocab_size=tokenizer.vocab_size, padded_vocab=320, seq_len=128).eval()
    export(ours, tokenizer, tmp_path)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(text).astype(int).tolist()
    assert their_tokenizer.encode(text, add_special_tokens=False) == ids
    assert their_tokenizer.eos_token_id == tokenizer.eot and their_tokenizer.mask_token is None
    prompt = torch.tensor([ids[:20]])
    written = torch.stack(list(generate(ours, prompt, 40, temperature=0, stop=tokenizer.eot)), dim=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    generated = theirs.generate(prompt, max_new_tokens=40, do_sample=False)[0, 20:]
    assert len(generated.unique()) > 3
    assert torch.equal(written[0], generated)
    check_prompt(ours, theirs, tokenizer, their_tokenizer, text)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_transformers_fills_masks_as_we_do(name, transformers, tmp_path):
    text = "the cat sat on the mat, and the cat — über alles — sat on 12 mats."
    tokenizer = load_tokenizer("bytes") if name == "bytes" else bpe.train_bpe([text] * 20, 290)
    vocab_size = max(tokenizer.vocab_size, tokenizer.mask + 1)
    ours = mlm(vocab_size=vocab_size, padded_vocab=320, seq_len=64, eot=tokenizer.eot)
    export(ours, tokenizer, tmp_path)
    found = transformers.pipeline("fill-mask", model=str(tmp_path), top_k=3)("the cat [MASK] on the mat")
    # a text begins with EOT; the mask takes the blank before it where a token would
    before = tokenizer.encode("the cat " if name == "bytes" else "the cat")
    ids = [tokenizer.eot, *before, tokenizer.mask, *tokenizer.encode(" on the mat")]
    place = 1 + len(before)
    for begin in (0, 1):  # with 1 the control: a text without its beginning
        p = ours(torch.tensor([[int(i) for i in ids[begin:]]]))[0, place - begin, :vocab_size].softmax(-1)
        best = p.topk(3)
        assert ([f["token"] for f in found] == best.indices.tolist()
                and [f["score"] for f in found] == pytest.approx(best.values.tolist(), abs=1e-5)) != begin
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.mask_token, theirs.mask_token_id) == ("[MASK]", tokenizer.mask)
    batch = theirs(["the cat", "the cat sat on the mat"], padding=True, return_tensors="pt")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    short = 1 + len(tokenizer.encode("the cat"))
    assert largest_error(model(**batch).logits[0, :short],
                         ours(batch["input_ids"][:1, :short])[0, :, :vocab_size]) <= 1e-5


@pytest.mark.parametrize("family, change, message", [
    (GPT2, {"model_type": "modernbert"}, "holds a model of type 'modernbert'; GPT2 reads 'gpt2'"),
    (GPT2, {"activation_function": "relu"}, "activation_function to relu, which train_gpt2.py"),
    (GPT2, {"n_inner": 100}, "n_inner to 100"),
    (GPT2, {"scale_attn_weights": False}, "scale_attn_weights to False"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx to True"),
    (GPT2, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn to True"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention to True"),
    (GPT2, {"tie_word_embeddings": False}, "tie_word_embeddings to False"),
    (GPT2, {"n_layer": 9}, r"no tensor transformer.h.\d.ln_1.weight of shape \(\d+,\)"),
    (GPT2, {"n_positions": 99}, "no tensor transformer.wpe.weight of shape"),
    (MLM, {"hidden_activation": "relu"}, "hidden_activation to relu, which train_mlm.py"),
    (MLM, {"classifier_activation": "relu"}, "classifier_activation to relu"),
    (MLM, {"attention_bias": True}, "attention_bias to True"),
    (MLM, {"mlp_bias": True}, "mlp_bias to True"),
    (MLM, {"norm_bias": True}, "norm_bias to True"),
    (MLM, {"decoder_bias": False}, "decoder_bias to False"),
    (MLM, {"classifier_bias": True}, "classifier_bias to True"),
    (MLM, {"tie_word_embeddings": False}, "tie_word_embeddings to False"),
    (MLM, {"layer_types": ["sliding_attention"] * 9}, "layer_types to "),
    (MLM, {"eos_token_id": None}, "eos_token_id to None"),
    (MLM, {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}},
     "rope_parameters to "),
    (MLM, {"vocab_size": 300}, r"no tensor decoder.bias of shape \(300,"),
    (MLM, {"layer_types": [], "global_attn_every_n_layers": 0}, "makes no model: integer modulo by zero")],
    ids=str)
def test_another_model_is_refused(family, change, message, tokenizer, tmp_path):
    path = export(tiny(family, 0), tokenizer, tmp_path) / "config.json"
    assert from_hf(family, str(tmp_path)).config.vocab_size in (257, 258)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message) as error:
        from_hf(family, str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.fixture
def changed(tokenizer, tmp_path):
    """Changes the tensors and config.json of an export; returns its directory."""
    import safetensors.torch

    def change(family, tensors, config=()):
        file = export(tiny(family, 0), tokenizer, tmp_path) / "model.safetensors"
        found = safetensors.torch.load_file(file)
        safetensors.torch.save_file(found | tensors(found), file)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(config)))
        return str(tmp_path)

    return change


@each_family
def test_quantized_weights_are_refused(family, changed):
    table = "model.embeddings.tok_embeddings.weight" if family is MLM else "transformer.wte.weight"
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool):
        source = changed(family, lambda tensors, dtype=dtype: {table: tensors[table].to(dtype)})
        with pytest.raises(UserError, match=f"{table} of .* is stored as {dtype}"):
            from_hf(family, source)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):  # the control
        from_hf(family, changed(family, lambda tensors, dtype=dtype: {table: tensors[table].to(dtype)}))
    with pytest.raises(UserError, match="config.json of .* says that its weights are quantized"):
        from_hf(family, changed(family, lambda tensors: {}, {"quantization_config": {"quant_method": "x"}}))


@each_family
def test_a_head_of_its_own_is_refused_and_what_is_not_used_is_named(family, changed, capsys):
    mlm = family is MLM
    table = "model.embeddings.tok_embeddings.weight" if mlm else "transformer.wte.weight"
    head = "decoder.weight" if mlm else "lm_head.weight"
    buffers = {name: torch.ones(2) for name in (
        "transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias", "position_ids", "rotary.inv_freq")}
    from_hf(family, changed(family, lambda tensors: {head: tensors[table].clone()} | buffers))
    assert not capsys.readouterr().out
    from_hf(family, changed(family, lambda tensors: {"model.layers.7.Wo": torch.ones(2), "z": torch.ones(2)}))
    assert "has model.layers.7.Wo, z, which this model does not use" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"has a head, {head}, that differs"):
        from_hf(family, changed(family, lambda tensors: {head: tensors[table] + 0.01}))


@pytest.mark.parametrize("family, key", [
    (GPT2, "n_embd"), (GPT2, "vocab_size"), (GPT2, "layer_norm_epsilon"),
    (MLM, "hidden_size"), (MLM, "eos_token_id"), (MLM, "local_attention")])
def test_a_config_that_lacks_a_key_is_refused(family, key, tokenizer, tmp_path):
    path = export(tiny(family, 0), tokenizer, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    del config[key]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"config.json of .* lacks '{key}'"):
        from_hf(family, str(tmp_path))


@each_family
@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", None])
def test_a_damaged_safetensors_file_is_refused(family, content, tokenizer, tmp_path):
    path = export(tiny(family, 0), tokenizer, tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9] if content is None else content)
    with pytest.raises(UserError, match="model.safetensors cannot be read as safetensors: "):
        from_hf(family, str(tmp_path))


# -----------------------------------------------------------------------------------------------------------
# Counts and configuration


@pytest.mark.parametrize("n_layer, n_head, d_model, millions", [
    (12, 12, 768, 124.4), (24, 16, 1024, 354.8), (36, 20, 1280, 774.0), (48, 25, 1600, 1557.6)])
def test_gpt2_sizes_have_the_published_parameters(n_layer, n_head, d_model, millions):
    with torch.device("meta"):
        model = GPT2(GPT2Config(padded_vocab=50257, n_layer=n_layer, n_head=n_head, d_model=d_model))
    assert round(num_params(model) / 1e6, 1) == millions


@pytest.mark.parametrize("n_layer, d_model, n_head, ff", [(22, 768, 12, 1152), (28, 1024, 16, 2624)])
def test_mlm_sizes_have_the_parameters_of_modernbert(n_layer, d_model, n_head, ff, transformers):
    with torch.device("meta"):
        ours = MLM(MLMConfig(50368, 50368, n_layer=n_layer, d_model=d_model, n_head=n_head, ff=ff))
        theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(
            num_hidden_layers=n_layer, hidden_size=d_model, num_attention_heads=n_head, intermediate_size=ff))
        assert num_params(ours) == sum(p.numel() for p in theirs.parameters())  # a tied one counts once


@pytest.mark.parametrize("trainer, size, changes, example, expected", [
    (train_gpt2, "tiny", {}, {}, 44_924_928), (train_gpt2, "gpt2", {}, {}, 854_654_976),
    (train_gpt2, "tiny", {"modern": True}, {}, 45_711_360),
    (train_gpt2, "gpt2", {"modern": True}, {}, 897_122_304),
    (train_mlm, "tiny", {}, {"mask_rate": 0.25}, 13_811_712),
    (train_mlm, "base", {}, {"mask_rate": 0.25}, 824_426_496)], ids=str)
def test_flops_are_those_of_a_formula(trainer, size, changes, example, expected):
    """By hand: 6 for each weight and token, and attention as full T x T, in local layers too."""
    args = flags_of(trainer, ["--size", size])
    model_class = GPT2 if trainer is train_gpt2 else MLM
    config = model_class.Config(**flags_of_model(model_class.Config, args) | changes)
    assert flops_per_token(model_class, config, **example) == expected


@pytest.mark.parametrize("build", [gpt2, mlm])
@pytest.mark.parametrize("config, message", [
    ({"d_model": 33}, "--d-model 33"), ({"d_model": 30}, "--n-head"),
    ({"vocab_size": 65}, "64 rows .* 65 ids")], ids=str)
def test_impossible_shapes_are_refused(build, config, message):
    with pytest.raises(ConfigError, match=message):
        build(**config)


@pytest.mark.long
@each_model
def test_compiled_blocks_compute_the_same(build):
    expected, model = step(build()), build()
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.compile()
    for mode in ("none", *MODES):
        for block in blocks:
            block.checkpointing = mode
        found = step(model)
        for name, value in expected.items():
            assert largest_error(found[name], value) <= 1e-4, (mode, name)

"""The KV cache, and ids that are generated with it: those of whole passes."""

import pytest
import torch
from tiny_models import BUILDS, PADDED, SEQ_LEN, VOCAB, gpt2, hrm, largest_error, tokens
from train_recurrent import Recurrent, RecurrentConfig

from weights.sampling import KVCache, generate

MODELS = [("hrm", {}), ("hrm", {"inject_input": True, "qk_norm": True}), ("hrm", {"depth": 2}),
          ("hrm", {"halt": True}), ("hrm", {"h_cycles": 1, "l_cycles": 2}), ("gpt2", {}), ("modern", {})]
every_kind = pytest.mark.parametrize("name, config", MODELS, ids=str)


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def ids_of(model, prompt: torch.Tensor, count: int, **settings) -> torch.Tensor:
    return torch.stack(list(generate(model, prompt, count, **settings)), dim=1)


@every_kind
def test_decoding_with_the_cache_equals_the_full_pass(name, config):
    model, idx = BUILDS[name](**config).eval(), tokens(batch=3)
    full = model(idx)
    for prompt in (1, 6):
        cache = KVCache(model.config.seq_len)
        for end, part in enumerate([idx[:, :prompt], *idx[:, prompt:].split(1, dim=1)], prompt):
            logits = model.decode(part, cache)
            assert cache.length == end
            assert largest_error(logits, full[:, end - 1]) <= 1e-5
            assert torch.equal(logits.argmax(-1), full[:, end - 1].argmax(-1))
    # control: slots that are exchanged are noticed
    cache.length -= 1
    cache.memory[0], cache.memory[1] = cache.memory[1], cache.memory[0]
    assert largest_error(model.decode(idx[:, -1:], cache), full[:, -1]) > 1e-5


@every_kind
def test_greedy_ids_are_those_of_whole_passes(name, config):
    """Also past the end of the context, where the later half is read again. Dropout plays no part."""
    model = BUILDS[name](dropout=0.5, **config).eval()
    if name != "hrm":
        model.head_weight.mul_(5)  # so that it does not only repeat the same token
    if name == "gpt2":
        model.norm.bias.zero_()
    idx = context = tokens(length=5)
    for _ in range(2 * SEQ_LEN):
        if context.size(1) > SEQ_LEN:
            context = context[:, -(SEQ_LEN // 2):]
        new = model(context)[:, -1, :VOCAB].argmax(-1, keepdim=True)
        idx, context = torch.cat((idx, new), 1), torch.cat((context, new), 1)
    written = ids_of(model.train(), tokens(length=5), 2 * SEQ_LEN, temperature=0)
    assert len(written.unique()) > 3 and model.training
    assert torch.equal(written, idx[:, 5:])


@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_a_cache_that_was_rewound_gives_the_same_bits(name):
    """As for drafts, of which a part is not taken."""
    model, idx = BUILDS[name]().eval(), tokens()
    cache = KVCache(model.config.seq_len)

    def greedy(new, steps: int) -> list:
        found = []
        for _ in range(steps):
            found.append(model.decode(new, cache))
            new = found[-1].argmax(-1, keepdim=True)
        return found

    first = greedy(idx[:, :4], 5)
    third = first[2].argmax(-1, keepdim=True)
    for n, same in ((6, True), (5, False)):  # the prompt and two more; the control is another place
        cache.rewind(6)
        model.decode(idx[:, 5:6], cache)  # a draft
        cache.rewind(n)
        assert all(map(torch.equal, greedy(third, 2), first[3:])) == same
    cache.rewind(0)
    assert all(map(torch.equal, greedy(idx[:, :4], 5), first))


def test_what_a_cache_refuses():
    """Several tokens when it is filled, because is_causal aligns queries with the first keys. To rewind a
    recurrent state.
    """
    model, idx = gpt2(), tokens()
    cache = KVCache(SEQ_LEN)
    model.decode(idx[:, :4], cache)
    with pytest.raises(AssertionError):
        model.decode(idx[:, 4:6], cache)
    model = Recurrent(RecurrentConfig(vocab_size=VOCAB, padded_vocab=PADDED, seq_len=SEQ_LEN, width=16))
    cache = KVCache(SEQ_LEN)
    first = model.decode(idx[:, :4], cache)
    with pytest.raises(AssertionError, match="recurrent"):
        cache.rewind(3)
    cache.rewind(0)
    assert torch.equal(model.decode(idx[:, :4], cache), first)


def test_the_seed_decides_what_is_sampled():
    """And not the global random state, which the first of them has moved on."""
    found = [ids_of(hrm(), tokens(length=3), 12, seed=seed, temperature=0.9, top_k=20) for seed in (5, 5, 6)]
    assert torch.equal(*found[:2]) and not torch.equal(*found[1:])


def test_the_stop_id_stops_a_single_sequence():
    model, prompt = hrm(), tokens(batch=1, length=3)
    free = ids_of(model, prompt, 10, seed=2)[0].tolist()
    settings = {"seed": 2, "stop": free[4]}
    assert ids_of(model, prompt, 10, **settings)[0].tolist() == free[:free.index(free[4]) + 1]
    assert ids_of(model, prompt.repeat(2, 1), 10, **settings).size(1) == 10  # a batch goes on

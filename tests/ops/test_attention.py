"""bfloat16 attention on CPUs: the bits of whole products, a block of queries at a time."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, differing, each_model, gpt2, mlm, step

from model import blocks_of
from ops import attention


def mask_of(kind: str, T: int):
    """A BandMask of a mask (2, 1, T, T), as the models make it, or None."""
    idx = torch.randint(1, VOCAB, (2, T), generator=torch.Generator().manual_seed(T))
    idx[:, ::90] = 0  # starts of documents
    idx[:, 40::90] = 1  # responses
    if kind == "window":
        return mlm(eot=0, window=64).attention_masks(idx)[1]
    return gpt2(attention=kind, start=0, response=1).mask(idx, None)


@pytest.fixture
def block():
    block = blocks_of(gpt2())[0]
    block.cpu_attention = attention.cpu_attention
    return block


@pytest.mark.parametrize("T", [256, 257, 513, 700, 1024])
@pytest.mark.parametrize("kind, band", [("causal", None), ("isolated", (None, 0)), ("prefix", (None, None)),
                                        ("window", (32, 32))])
def test_blocks_of_queries_have_the_bits_of_whole_products(kind, band, T, block, monkeypatch):
    """Also their gradients. Both are close to those of torch's kernel in float32."""
    mask = mask_of(kind, T)
    assert (mask and mask[1:]) == band
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 2, 2, T, 16, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(2, 2, T, 16, generator=generator).bfloat16()
    y = F.scaled_dot_product_attention(*qkv.float().unbind(), attn_mask=mask and mask.allowed,
                                       is_causal=mask is None)
    exact, found = [y, *torch.autograd.grad(y, qkv, grad.float())], []
    for queries in (attention.QUERIES, 10**6):  # the second: all at once
        monkeypatch.setattr(attention, "QUERIES", queries)
        y = block.attend(*qkv.unbind(), mask)
        found.append([y, *torch.autograd.grad(y, qkv, grad)])
        assert all((a - b).norm() < 0.02 * b.norm() for a, b in zip(found[-1], exact))
    if torch.cpu.get_capabilities().get("avx512_bf16"):  # other CPUs round elsewhere
        assert all(map(torch.equal, *found))


def test_a_mask_of_floats_is_added_to_the_scores(block):
    q, k, v = torch.randn(3, 2, 2, 40, 16).bfloat16()
    bias = -torch.rand(40, 40)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert torch.equal(block.attend(q, k, v, bias), wanted)


@each_model
def test_checkpointing_changes_no_bit(build, monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", 4)
    calls, found = [], []
    plain = attention._BlockAttention.apply
    monkeypatch.setattr(attention._BlockAttention, "apply", lambda *args: calls.append(1) or plain(*args))
    for mode in ("none", "selective", "block"):
        model = build(mode, dtype=torch.bfloat16)
        for block in blocks_of(model):
            block.cpu_attention = attention.cpu_attention
        found.append(step(model)[0])
    assert calls and differing(found[0], found[1]) == differing(found[0], found[2]) == []

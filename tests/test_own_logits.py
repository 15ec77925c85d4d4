"""Losses of models that override `logits` or `loss` of model.py."""

import pytest
import torch
from torch import nn
from train_recurrent import Recurrent

from model import GPT2, HRM

PAIRS = {"start": 57, "response": 58}
OWN = {"gpt2": (GPT2, {"n_head": 2, "d_model": 16, **PAIRS}),
       "hrm": (HRM, {"n_head": 2, "d_model": 16, "ff": 48, "halt": True, **PAIRS}),
       "recurrent": (Recurrent, {"width": 16, **PAIRS})}
cross_entropy = nn.functional.cross_entropy


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


def built(model_class, **config):
    torch.manual_seed(0)
    return model_class(model_class.Config(**{"vocab_size": 60, "padded_vocab": 64, "seq_len": 16} | config))


@pytest.mark.parametrize("kind, z_loss, training", [
    ("gpt2", 0.1, True), ("gpt2", 0.0, False), ("hrm", 0.1, False), ("hrm", 0.0, True),
    ("recurrent", 0.1, True)])
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
    tokens = cross_entropy(logits.mT, labels, ignore_index=-1, reduction="none")
    wanted = tokens + z_loss * logits.logsumexp(-1).square() * (labels >= 0)
    objective, sums = model(idx, labels)
    one_by_one, same = model(idx, labels, per_token=True)
    torch.testing.assert_close(one_by_one, wanted)
    torch.testing.assert_close(objective, wanted.sum())
    assert sums["loss"] == pytest.approx(tokens.sum().item()) == same["loss"].item()
    if not training:
        assert (sums["samples"], sums["exact"]) == (4, 1)
    expected, *found = (torch.autograd.grad(loss, [*model.parameters()], retain_graph=True, allow_unused=True)
                        for loss in (wanted.sum(), objective, one_by_one.sum()))
    for gradients in found:
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)


def test_only_own_logits_are_called_by_the_loss():
    model = built(GPT2, n_head=2, d_model=16)
    assert model.own_logits is None and built(HRM, n_head=2, d_model=16).own_logits is None
    idx = torch.arange(32).view(2, 16)
    plain = model(idx, idx)[1]["loss"]
    model.logits = lambda hidden: GPT2.logits(model, hidden) / 2  # as a trainer may write
    cooler = model(idx, idx)[1]["loss"]
    assert cooler != plain
    assert cooler == pytest.approx(cross_entropy(model(idx).mT, idx, reduction="sum").item())


def test_own_logits_take_no_memory_and_draw_the_same_again():
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
    wanted = cross_entropy(torch.stack([model.logits(row) for row in x]).mT, idx, reduction="sum")
    torch.testing.assert_close(objective, wanted)
    a, b = (torch.autograd.grad(loss, model.head_weight)[0] for loss in (objective, wanted))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base, config", [OWN["gpt2"], OWN["hrm"]])
def test_an_own_loss_is_that_of_tokens_too(base, config):
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

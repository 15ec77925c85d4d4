"""Averaged weights."""

import pytest
import torch
from runs import Trainer
from tiny_models import differing, hrm, largest_error

from ops.ema import EMA


@torch.no_grad()
def moved(model) -> dict:
    for p in model.parameters():
        p.add_(torch.randn_like(p))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("constant", [False, True])
def test_it_follows_its_formula(constant):
    model = hrm()
    ema = EMA(model, 0.9, constant=constant)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    for n in range(100):  # from the 81st on it has grown to 0.9
        decay = 0.9 if constant else min(0.9, (1 + n) / (10 + n))
        expected = {name: decay * expected[name] + (1 - decay) * p for name, p in moved(model).items()}
        ema.update()
    assert all(largest_error(ema.average[name].double(), expected[name]) < 1e-5 for name in expected)


def test_it_swaps_back_bit_for_bit():
    model = hrm()
    ema, weights = EMA(model, 0.9), moved(model)
    ema.update()
    average = {name: a.clone() for name, a in ema.state_dict()["ema"].items()}
    for held, kept in ((average, weights), (weights, average)):
        ema.swap()
        assert differing(dict(model.named_parameters()), held) == differing(ema.average, kept) == []
    assert differing(average, weights) == list(weights)  # control: they do differ


@pytest.mark.full
def test_the_average_of_1b_published_has_a_constant_decay(shards, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(EMA, "update", lambda ema: seen.append(ema.constant))
    trainer = Trainer("train_hrm.py", ff=48, steps=1, max_new_tokens=1, ema=0.99)
    for size in ("1b-published", "tiny"):
        trainer.train(0, shards, tmp_path / size, size=size)
    assert seen == [True, False]

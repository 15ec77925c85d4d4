"""Models that generate otherwise than they learn (contradiction in weights/sampling.py)."""

import re
from functools import partial

import pytest
import torch
from runs import edited
from torch.nn.functional import pad
from train_recurrent import Recurrent

import model as model_module
from model import GPT2, HRM, use_device
from weights.sampling import contradiction

CPU = torch.device("cpu")
TEXT = {"n_head": 2, "d_model": 16, "n_layer": 2, "seq_len": 32}
PAIRS = {"start": 57, "response": 58}


def built(model_class, **config):
    torch.manual_seed(0)
    return model_class(model_class.Config(**{"vocab_size": 60, "padded_vocab": 64} | config))


def windowed(model_class):
    class Windowed(model_class):
        def mask(self, idx, cache, flex=True):
            return model_module.attention_mask(lambda b, h, i, j: (j <= i) & (i - j < 4), idx, False)

    return Windowed


def changed(change, model_class=GPT2):
    """A model with other hidden states; `change` may also draw random numbers."""
    class Changed(model_class):
        def hidden(self, idx, cache=None):
            x = super().hidden(idx, cache)
            return x + change(x)

    return Changed


class Uncached(GPT2):
    """Caps what it shows when asked for logits, but not what it writes."""

    def forward(self, idx, targets=None, per_token=False):
        found = super().forward(idx, targets, per_token)
        return 0.1 * torch.tanh(10 * found) if targets is None else found


class Counting(GPT2):
    """Its buffer changes in each pass."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def hidden(self, idx, cache=None):
        self.calls = self.calls + 1
        return super().hidden(idx, cache)


class Mine(GPT2):
    """A loss of its own."""

    def loss(self, hidden, idx, targets):
        return super().loss(0.5 * hidden, idx, targets)


class AlsoMine(GPT2):
    def forward(self, idx, targets=None, per_token=False):
        found = super().forward(idx, targets, per_token)
        return found if targets is None else (found[0], {"loss": 2 * found[1]["loss"]})


AHEAD = changed(lambda x: 0.5 * pad(x[:, 1:], (0, 0, 0, 1)))
BEHIND = changed(lambda x: 0.5 * pad(x[:, :-1], (0, 0, 1, 0)))
RIGHT = [
    (GPT2, {"modern": True}), (GPT2, {"dropout": 0.5}), (GPT2, {"seq_len": 1}),
    (GPT2, PAIRS | {"attention": "isolated", "modern": True}), (GPT2, PAIRS | {"attention": "prefix"}),
    (GPT2, PAIRS | {"attention": "causal"}), (GPT2, {"attention": "isolated", "start": 57}),
    (HRM, PAIRS | {"halt": True}), (HRM, {"h_cycles": "2:4"}),
    (HRM, {"halt": True, "dropout": 0.1, "inject_input": True}),
    (changed(lambda x: 0.1 * torch.randn_like(x)), {}), (Counting, {}), (Mine, {}), (AlsoMine, {}),
    (Recurrent, {"width": 16})]
WRONG = [
    (windowed(GPT2), {"modern": True}), (windowed(GPT2), PAIRS), (windowed(HRM), {}),
    (windowed(HRM), {"halt": True}), (AHEAD, {}), (BEHIND, {}), (Uncached, {})]


def shape(model_class, config) -> dict:
    return {"seq_len": 32} | config if model_class is Recurrent else TEXT | config


def writes(model) -> str:
    torch.manual_seed(1)
    for p in model.parameters():  # as large as trained ones; --modern begins with zeros
        p.data.add_(0.2 * torch.randn(p.shape))
    return contradiction(model.train(), CPU)


@pytest.mark.parametrize("model_class, config", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_write_as_they_learn(model_class, config, dtype):
    """The model stays as it was."""
    model = built(model_class, **shape(model_class, config))
    use_device(model, CPU, dtype)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(1)
    random, attributes = torch.get_rng_state(), dict(vars(model))
    assert contradiction(model, CPU) == ""
    assert torch.equal(torch.get_rng_state(), random) and vars(model) == attributes and model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert writes(model) == ""


@pytest.mark.parametrize("model_class, config", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_write_otherwise_than_they_learn(model_class, config, dtype):
    model = built(model_class, **shape(model_class, config))
    use_device(model, CPU, dtype)
    assert "two passes" in writes(model)


@pytest.mark.parametrize("model_class", [GPT2, HRM])
def test_an_edit_of_the_library_is_found_where_the_loss_does_not_see_it(monkeypatch, model_class):
    plain = model_module.CausalLM.logits
    monkeypatch.setattr(model_module.CausalLM, "logits", lambda self, hidden: 0.5 * plain(self, hidden))
    said = writes(built(model_class, **TEXT))
    assert said.startswith(model_class.__name__) and "the loss differs" in said
    assert writes(built(Mine, **TEXT)) == ""


def test_a_model_that_cannot_be_asked_is_no_contradiction(capsys):
    """Its table has another name, or its forward wants targets, neither of which writing needs."""
    class Mine(GPT2):
        def forward(self, idx, targets):
            return super().forward(idx, targets)

    wants, lacks = built(Mine, **TEXT), built(GPT2, **TEXT)
    lacks.wte = lacks.embed
    del lacks.embed
    for model in (wants, lacks):
        assert contradiction(model, CPU) == "" and model.training and model.compute_dtype == torch.float32
        assert f"WARNING: {type(model).__name__} " in capsys.readouterr().err


WINDOW = """
class Windowed(GPT2):
    def mask(self, idx, cache, flex=True):
        from model import attention_mask
        return attention_mask(lambda b, h, i, j: (j <= i) & (i - j < 4), idx, False)

GPT2 = Windowed
"""


def test_the_sample_is_refused_and_not_the_training(shards, tmp_path):
    """On two processes."""
    trainer = edited(tmp_path / "train_windowed.py", ("before", "BETAS = ", WINDOW), steps=8, eval_every=4,
                     sample_every=1, max_new_tokens=3, lr=1e-2)
    done = trainer.fork(2, shards, tmp_path / "run")
    assert done.code == 0 and "training complete" in done.out, done.out
    assert re.findall(r"a sample after step (\d):\n\(none: Windowed ", done.out) == ["4", "8"], done.out
    use = partial(trainer.here, "--out", tmp_path / "run")
    for flags in (["--prompt", "def"], ["--chat"]):
        done = use(*flags)
        assert done.code == 2 and "error: Windowed " in done.out, done.out
    assert use("--data", shards, "--eval-only").code == 0

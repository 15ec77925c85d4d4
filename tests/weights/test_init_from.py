"""weights/init_from.py: weights that start a run, and second models, such as a teacher."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from copies import FLAGS, changed
from pair_data import (
    RESPONSE,
    pairs,  # noqa: F401
)
from runs import Trainer, edited, ended, evaluations_of
from states import run_of, world  # noqa: F401

import data
import ddp_utils
from cli.errors import UserError
from ddp_utils import list_checkpoints, read_checkpoint
from model import GPT2
from ops.device import compute_dtype
from training.strategies import set_modes
from weights.huggingface import config_from_hf
from weights.init_from import enlarged, load_frozen
from weights.use import load_model, load_run

GPT2_TRAINER = Trainer("train_gpt2.py", **FLAGS)
HEAD = "import torch\nfrom weights.init_from import load_frozen\n"
REFERENCE = "reference = load_frozen(model, run, GPT2, args.init_from)"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_second_model_computes_as_the_first_does(precision, world, shards, tmp_path):
    """A run loaded by load_run, and by load_frozen, gives the bits of the model in training."""
    out = tmp_path / "run"
    assert GPT2_TRAINER.fork(0, shards, out, precision=precision, steps=2).code == 0
    run = run_of(world, precision=precision, strategy="ddp", checkpoint_activations="none", seq_len=32)
    run.dataset = data.Dataset([shards], 32)
    loaded, _ = load_run(GPT2, out)
    reference = load_frozen(loaded, run, GPT2, str(out))
    assert reference.loaded_from == {str(out): 2} and not reference.training
    assert not any(p.requires_grad for p in reference.parameters())
    loaded, _ = load_run(GPT2, out)
    trained = load_model(GPT2, ddp_utils.load_checkpoint(out, print), world)
    set_modes(trained, run.args, run.world)
    x = torch.arange(64).view(2, 32)
    found = [m(x, x, per_token=True)[0] for m in (trained, reference, loaded)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert loaded.compute_dtype == reference.compute_dtype == compute_dtype(precision, world.device)
    plain = GPT2(trained.config)  # the control: in fp32
    plain.load_state_dict(trained.state_dict())
    assert torch.equal(plain.eval()(x, x, per_token=True)[0], found[0]) == (precision == "fp32")


def test_a_reference_reads_as_the_model_and_a_teacher_as_it_was_trained(shards, tmp_path):
    """Weights of --init-from that get another --attention. The same weights as a teacher keep theirs."""
    base, other = tmp_path / "base", tmp_path / "other"
    assert GPT2_TRAINER.train(0, shards, base, steps=4).code == 0
    shutil.copytree(base, other)
    code = (f"{REFERENCE}\nteacher = load_frozen(model, run, GPT2, {str(other)!r})\n"
            "z = torch.randint(0, 257, (2, 32), generator=ddp.generator(0, 0))\nz[:, 9] = 256\n"
            "same = [torch.equal(model.eval()(z), m(z)) for m in (reference, teacher)]\n"
            "run.say(f'SAME {same}')\nmodel.train()")
    trainer = changed(tmp_path / "train_reads.py", (HEAD, "import data"), (code, "log, meta, "))
    done = trainer.train(0, shards, tmp_path / "run", init_from=base, attention="isolated", steps=1)
    assert done.code == 0 and "SAME [True, False]" in done.out, done.out


def test_ids_that_weights_lack_begin_as_the_mean():
    """Pairs add some to any tokenizer. Other new ids are those of another tokenizer."""
    known, said = torch.randn(320, 8), []
    weights = {"embed.weight": known, "other": known}
    record = {"path": "somewhere", "weights": weights,
              "model_config": {"vocab_size": 257, "padded_vocab": 320, "seq_len": 32}}
    run = SimpleNamespace(args=SimpleNamespace(seq_len=48), say=said.append)
    assert enlarged(record, run, {"vocab_size": 257}) == ({"seq_len": 48}, weights) and not said
    larger = {"vocab_size": 259, "padded_vocab": 384}
    changes, found = enlarged(record, run, larger | {"response": RESPONSE})
    assert changes == {"seq_len": 48} | larger and len(said) == 1 and found["other"] is known
    assert torch.equal(found["embed.weight"][:257], known[:257])
    assert torch.allclose(found["embed.weight"][257:], known[:257].mean(0).expand(127, -1))
    with pytest.raises(UserError, match="^somewhere .*257 of 259"):
        enlarged(record, run, larger)


def test_started_weights_keep_their_attention(pairs, shards, tmp_path):
    """Unless --attention is given or the text has no prompts. Then a warning says what changes. With a rate
    of 0 the loss is what it was.
    """
    trainer = Trainer("train_gpt2.py", seq_len=128, max_new_tokens=3, steps=1, eval_every=1, size="tiny",
                      global_batch=4)

    def begun(name, weights=None, made_of=pairs, **changes):
        done = trainer.train(0, made_of, tmp_path / name, init_from=weights, **changes)
        assert done.code == 0, done.out
        return (re.search(r"attention (\w+), n_layer", done.out)[1],
                bool(re.search("WARNING: .* attention", done.out)),
                evaluations_of(tmp_path / name)[-1]["val_loss"])

    for name in "prefix", "isolated":
        loss = pytest.approx(begun(name, attention=name)[2], abs=1e-5)
        assert begun(f"from {name}", tmp_path / name, lr=0) == (name, False, loss)
    for name in "prefix", "isolated":  # transformers has no such mask
        exported = trainer.here("--out", tmp_path / name, "--export")
        assert exported.code == 0 and ("no prefix mask" in exported.out) == (name == "prefix"), exported.out
    assert begun("a", f"hf:{tmp_path}/isolated/hf", lr=0) == ("isolated", False, loss)
    assert begun("b", tmp_path / "isolated", attention="prefix")[:2] == ("prefix", True)
    assert begun("c", tmp_path / "prefix", shards)[:2] == ("causal", True)
    # weights of plain text learn to answer, with two more ids
    begun("plain", made_of=shards)
    assert begun("d", tmp_path / "plain")[:2] == ("causal", False)


SHORT = {"steps": 8, "save_every": 4, "eval_every": 4, "batch": 3, "max_new_tokens": 3}


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
    base = Trainer("train_gpt2.py", **SHORT)
    own, wider = (edited(tmp_path / f"train_{width}.py", ("before", "BETAS = ", VARIANT.replace("8", width)),
                         **SHORT) for width in "89")
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


def test_a_file_in_place_of_a_directory_is_named_with_it(tmp_path):
    with pytest.raises(UserError, match=f"hf:{tmp_path}[.]"):
        config_from_hf(GPT2, shutil.copy(__file__, tmp_path))

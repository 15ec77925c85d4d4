"""Second models: a teacher and a reference compute as the model in training does."""

import shutil

import pytest
import torch
from copies import FLAGS, changed
from runs import Trainer
from states import run_of

import data
import ddp_utils
from model import GPT2
from ops.device import compute_dtype
from training.strategies import set_modes
from weights.init_from import load_frozen
from weights.use import load_model, load_run

GPT2_TRAINER = Trainer("train_gpt2.py", **FLAGS)
HEAD = "import torch\nfrom weights.init_from import load_frozen\n"
REFERENCE = "reference = load_frozen(model, run, GPT2, args.init_from)"


@pytest.fixture
def world():
    yield ddp_utils.init("gloo", "cpu")
    torch.distributed.destroy_process_group()


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

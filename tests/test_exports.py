"""What is exported is the model, or nothing is: names without a counterpart, and the logits of what was
written, as transformers and llama.cpp have them. An edit of model.py is a patch here.
"""

import functools
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from processes import fork
from runs import Trainer
from test_model import transformers  # noqa: F401 (a fixture)
from torch import nn

import model as models
from cli.errors import RetryableError, UserError
from model import GPT2, HRM, MLM, LayerNorm
from vocab.tokenizer import load_tokenizer
from weights import use
from weights.huggingface import logits_of_hf, to_hf
from weights.llama_cpp import logits_of_gguf, to_gguf

SHAPE = {"seq_len": 48, "n_layer": 2, "n_head": 2, "d_model": 32, "padded_vocab": 320}
MODELS = {"gpt2": (GPT2, {}), "modern": (GPT2, {"modern": True}),
          "hrm": (HRM, {"ff": 48, "h_cycles": 2, "l_cycles": 2}), "mlm": (MLM, {"ff": 48, "window": 8})}
FORMS = {"hf": (to_hf, logits_of_hf), "gguf": (to_gguf, logits_of_gguf)}
WORDS = load_tokenizer("bytes")
EACH = [(name, form) for name in MODELS for form in FORMS if (name, form) != ("mlm", "gguf")]
each_export = pytest.mark.parametrize("name, form", EACH)


def made(name: str, **changes):
    kind, flags = MODELS[name]
    vocab = {"vocab_size": 258, "eot": 256} if kind is MLM else {"vocab_size": 257}
    torch.manual_seed(0)
    model = kind(kind.Config(**SHAPE | vocab | flags | changes)).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return model


def needs(form: str):
    pytest.importorskip("transformers" if form == "hf" else "xllamacpp")
    pytest.importorskip("gguf")


def export(model, out, form: str, write=None, load=None):
    path = out / ("hf" if form == "hf" else "model.gguf")
    use.export(model, path, WORDS, write or FORMS[form][0], load or FORMS[form][1])


def files_of(out) -> dict:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@each_export
def test_what_is_right_is_exported_and_one_changed_weight_is_not(name, form, tmp_path, capsys):
    """The control of each family: a weight that changes on the way. The earlier export stays as it was."""
    needs(form)
    model = made(name)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model.compute_dtype = torch.bfloat16
    export(model, tmp_path, form)
    assert "WARNING" not in capsys.readouterr().out
    assert model.compute_dtype == torch.bfloat16  # it is left as it was
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    before = files_of(tmp_path)
    assert len(before) == (1 if form == "gguf" else 4 if name == "mlm" else 5)

    def changed(model, path, tokenizer):
        other = made(name)
        [*other.parameters()][-1].data.mul_(1.1)
        FORMS[form][0](other, path, tokenizer)

    with pytest.raises(UserError, match=r"^the export has other logits than the model, by [\d.]+: .*\.$"):
        export(model, tmp_path, form, write=changed)
    assert files_of(tmp_path) == before and not [*tmp_path.glob(".tmp-*")]
    export(made(name), tmp_path, form)  # again, over the earlier one
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("seq_len", [1, 48])
def test_a_tokenizer_without_latin_letters_can_be_exported(seq_len, tmp_path, capsys, monkeypatch):
    needs("hf")
    monkeypatch.setattr(WORDS, "encode", lambda text: np.zeros(0, np.int64))
    export(made("gpt2", seq_len=seq_len), tmp_path, "hf")
    assert files_of(tmp_path) and "WARNING" not in capsys.readouterr().out


def relu_squared(x, approximate="none"):
    return F.relu(x).square()


def functional(**changes):
    """What model.py calls F, and nobody else."""
    return SimpleNamespace(**vars(F) | changes)


def with_rope(self, theta: float = 100.0):
    self.rope = models.rope_table(self.config.seq_len, self.config.head_dim, theta)


def scaled(self, idx):
    return 2 * nn.Embedding.forward(self, idx)


def capped(self, hidden):
    return self.uncapped(hidden).tanh()


EDITS = {
    "relu squared": ("gpt2 mlm", lambda m, patch: patch.setattr(models, "F", functional(
        gelu=relu_squared))),
    "relu": ("hrm modern", lambda m, patch: patch.setattr(models, "F", functional(silu=F.relu))),
    "epsilon": ("gpt2 mlm", lambda m, patch: [setattr(module, "eps", 1e-1) for module in m.modules()
                                              if isinstance(module, LayerNorm)]),
    "epsilon of a block": ("hrm modern", lambda m, patch: [setattr(block, "eps", 1e-1)
                                                           for block in models.blocks_of(m)]),
    "theta": ("hrm modern", lambda m, patch: with_rope(m)),
    "scale": ("hrm modern gpt2", lambda m, patch: setattr(
        m.embed, "forward", functools.partial(scaled, m.embed))),
    "tied": ("modern hrm", lambda m, patch: patch.setattr(type(m), "head_weight", m.embed.weight)),
    "capped": ("gpt2 modern hrm", lambda m, patch: (
        patch.setattr(type(m), "uncapped", type(m).logits, raising=False),
        patch.setattr(type(m), "logits", capped)))}


@pytest.mark.parametrize("edit, name, form", [
    pytest.param(edit, name, form, marks=[] if (edit, name) == ("relu squared", "gpt2") else pytest.mark.full)
    for edit, (names, _) in EDITS.items() for name, form in EACH if name in names.split()])
def test_an_edited_forward_is_refused(edit, name, form, tmp_path, monkeypatch):
    needs(form)
    model = made(name)
    export(model, tmp_path, form)
    before = files_of(tmp_path)
    with monkeypatch.context() as patch:
        EDITS[edit][1](model, patch)
        with pytest.raises(UserError, match="other logits than the model"):
            export(model, tmp_path, form)
    assert files_of(tmp_path) == before and not [*tmp_path.glob(".tmp-*")]


@pytest.mark.parametrize("name, form", [
    pytest.param(name, form, marks=[] if (name, form) == ("gpt2", "hf") else pytest.mark.full)
    for name, form in EACH])
def test_the_precision_of_the_run_is_compared_too(name, form, tmp_path):
    """In bfloat16 a CPU computes attention otherwise, which float32 doesn't enter."""
    needs(form)
    model = made(name)
    models.use_device(model, torch.device("cpu"), torch.bfloat16)
    export(model, tmp_path, form)

    def exchanged(q, k, v, *mask):  # the values of heads
        return models.cpu_attention(q, k, v.flip(1), *mask)

    for block in models.blocks_of(model):
        block.cpu_attention = exchanged
    with pytest.raises(UserError, match="other logits than the model, by .* in torch.bfloat16"):
        export(model, tmp_path, form)
    model.compute_dtype = torch.float32  # the control
    export(model, tmp_path, form)


def test_files_whose_modes_cannot_change(tmp_path, monkeypatch):
    """As in a mounted bucket. An earlier export is replaced there, too."""
    def refused(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    for name in ("chmod", "utime", "setxattr"):
        monkeypatch.setattr(os, name, refused)
    for _ in range(2):
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / "config.json").write_text("earlier")
        export(made("gpt2"), tmp_path, "hf", load=lambda path, row: made("gpt2")(row)[0])
        assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "gpt2"
        assert len(files_of(tmp_path)) == 5


@each_export
def test_another_epsilon_theta_or_scale_of_the_configuration_is_exported(name, form, tmp_path, capsys):
    needs(form)
    changes = {"norm_eps": 1e-2}
    if name == "hrm":
        changes |= {"rope_theta": 100.0, "embed_scale": 2.0}
    export(made(name, **changes), tmp_path, form)
    assert files_of(tmp_path) and "WARNING" not in capsys.readouterr().out


@each_export
@pytest.mark.parametrize("where, parameter", [
    ("gain", torch.ones(32)), ("gain", torch.tensor(1.0)), ("block.gain", torch.ones(32)),
    ("block.norm.weight", torch.ones(32)), ("embed.bias", torch.ones(32)), ("head2", torch.ones(320, 32))])
def test_a_parameter_without_a_counterpart_is_named(name, form, where, parameter, tmp_path):
    """Before anything is written, so without transformers or llama.cpp, too. All parts of some of the names
    are known, in another place.
    """
    pytest.importorskip("gguf")
    model = made(name)
    *parents, last = where.split(".")
    module = model
    for parent in parents:
        if parent == "block":
            module = models.blocks_of(model)[0]
        elif not hasattr(module, parent):
            setattr(module, parent, nn.Module())
            module = getattr(module, parent)
        else:
            module = getattr(module, parent)
    FORMS[form][0](model, tmp_path / "right", WORDS)  # the control
    setattr(module, last, nn.Parameter(parameter))
    named = rf"^the parameter \S*{where.removeprefix('block.')} of {type(model).__name__} has no counterpart"
    with pytest.raises(UserError, match=named) as error:
        FORMS[form][0](model, tmp_path / "new", WORDS)
    assert "\n" not in str(error.value) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name, form", [("gpt2", "hf"), ("gpt2", "gguf"), ("hrm", "hf"), ("hrm", "gguf")])
def test_a_model_of_other_shapes_is_refused(name, form, tmp_path):
    """Which the other program cannot load."""
    needs(form)
    model = made(name)
    for block in models.blocks_of(model):
        inner = block.up if name == "gpt2" else block.gate_up
        inner.weight = nn.Parameter(inner.weight[:-16].clone())
        if name == "gpt2":
            inner.bias = nn.Parameter(inner.bias[:-16].clone())
        block.down.weight = nn.Parameter(block.down.weight[:, :-16 if name == "gpt2" else -8].clone())
    with pytest.raises(UserError, match="^the export cannot be loaded .*undo that change") as error:
        export(model, tmp_path, form)
    assert "\n" not in str(error.value) and not [*tmp_path.iterdir()]


def test_what_cannot_be_compared_is_exported_with_a_line(tmp_path, capsys, monkeypatch):
    """An absent package, one that lacks the family, too little memory, and a file that cannot be mapped."""
    pytest.importorskip("gguf")

    def said(form: str) -> str:
        export(made("gpt2"), tmp_path, form)
        assert files_of(tmp_path) and not [*tmp_path.glob(".tmp-*")]
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and out.startswith("WARNING: the export was not compared"), out
        return out

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        assert "has no GPT2LMHeadModel (ModuleNotFoundError" in said("hf")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", SimpleNamespace())
        assert "has no GPT2LMHeadModel (AttributeError" in said("hf")
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
        assert "0.0 GB of memory are not free" in said("hf")
        assert "0.0 GB of memory are not free" in said("gguf")

    def unmapped(path, row):
        raise RuntimeError(f"unable to mmap 99 bytes from file <{path}>: No such device (19)")

    with monkeypatch.context() as patch:
        patch.setitem(FORMS, "hf", (to_hf, unmapped))
        assert "unable to mmap" in said("hf")
    with monkeypatch.context() as patch:
        patch.setattr("weights.llama_cpp.ASK", "import xllamacpp_that_is_absent")
        assert "No module named 'xllamacpp_that_is_absent'" in said("gguf")
    needs("gguf")
    gguf = sys.modules["gguf"]
    with monkeypatch.context() as patch:
        writer = gguf.GGUFWriter
        patch.setattr(gguf, "GGUFWriter", lambda path, architecture: writer(path, "a family of later"))
        assert "unknown model architecture" in said("gguf")


@pytest.mark.parametrize("name, form", [
    pytest.param(name, form, marks=[] if name == "gpt2" else pytest.mark.full) for name, form in EACH])
def test_an_export_that_is_interrupted_leaves_the_earlier_one(name, form, tmp_path):
    needs(form)
    export(made(name), tmp_path, form)
    before = files_of(tmp_path)

    def interrupted(path, row):
        raise KeyboardInterrupt

    def full(model, path, tokenizer):
        raise OSError(28, "No space left on device")

    with pytest.raises(KeyboardInterrupt):
        export(made(name), tmp_path, form, load=interrupted)
    with pytest.raises(RetryableError, match=r"cannot be written \(No space left on device\)"):
        export(made(name), tmp_path, form, write=full)
    assert files_of(tmp_path) == before
    (tmp_path / ".tmp-model").mkdir()  # of one that was killed
    (tmp_path / ".tmp-hf" / "hf").mkdir(parents=True)
    export(made(name), tmp_path, form)
    assert form in ".tmp-model.gguf" or not (tmp_path / ".tmp-hf").exists()
    assert {key: files_of(tmp_path)[key] for key in before} == before


def test_files_of_others_and_a_link_stay(tmp_path, transformers):
    """An hf/ with a file of its owner, on another disk or not."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "README.md").write_text("mine")
    (tmp_path / "hf").symlink_to(tmp_path / "elsewhere")
    export(made("gpt2"), tmp_path, "hf")
    assert (tmp_path / "elsewhere" / "README.md").read_text() == "mine"
    assert (tmp_path / "elsewhere" / "model.safetensors").exists() and (tmp_path / "hf").is_symlink()
    (tmp_path / "precious").mkdir()
    (tmp_path / ".tmp-hf").symlink_to(tmp_path / "precious")
    with pytest.raises(RetryableError, match="cannot be written"):
        export(made("gpt2"), tmp_path, "hf")
    assert not [*(tmp_path / "precious").iterdir()]


EDITED = """
import sys
sys.path.insert(0, ROOT)
import model
if "--export" in sys.argv:
    gelu = model.F.gelu  # which transformers does not call
    model.F.gelu = lambda x, approximate: gelu(x).square()
import ddp_utils
import train_gpt2

if __name__ == "__main__":
    ddp_utils.launch(train_gpt2.main)
"""


@pytest.mark.full
def test_all_processes_end_alike_with_averaged_weights(shards, tmp_path, transformers):
    """On two processes: what is right is exported, with the averages of --ema, and what is edited is refused
    by one sentence and one exit code.
    """
    trainer = Trainer("train_gpt2.py", ema=0.5, eval_every=99, lr=1e-2)
    done = trainer.fork(2, shards, tmp_path / "run", steps=6)
    assert done.code == 0, done.out
    done = fork(2, "train_gpt2.py", "--out", str(tmp_path / "run"), "--export")
    assert done.code == 0 and done.out.count("is ready for") == 1 and "WARNING" not in done.out, done.out
    before = files_of(tmp_path / "run" / "hf")
    script = tmp_path / "train_gpt2_edited.py"
    script.write_text(EDITED.replace("ROOT", json.dumps(str(ROOT))))
    done = fork(2, str(script), "--out", str(tmp_path / "run"), "--export")
    assert done.code == 2 and "Traceback" not in done.out, done.out
    assert done.out.count("error: the export has other logits than the model") == 2, done.out
    assert files_of(tmp_path / "run" / "hf") == before and not [*(tmp_path / "run").glob(".tmp-*")]

"""weights/use.py: what is exported is the model, or nothing is. An edit of model.py is a patch here."""

import errno
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
from tiny_models import WORDS, made
from torch import nn

import model as models
from cli.errors import RetryableError, UserError
from model import blocks_of
from weights import use
from weights.huggingface import logits_of_hf, to_hf
from weights.llama_cpp import logits_of_gguf, to_gguf

FORMS = {"hf": (to_hf, logits_of_hf), "gguf": (to_gguf, logits_of_gguf)}
EACH = [(name, form) for name in ("gpt2", "modern", "hrm", "mlm") for form in FORMS
        if (name, form) != ("mlm", "gguf")]


def cases(*first):
    """All kinds of exports; those that are not `first` in the tier full."""
    return pytest.mark.parametrize("name, form", [
        pytest.param(*case, marks=[] if case in first else pytest.mark.full) for case in EACH])


def export(model, out, form: str = "hf", write=None, load=None):
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    path = out / ("hf" if form == "hf" else "model.gguf")
    use.export(model, path, WORDS, write or FORMS[form][0], load or FORMS[form][1])


def files_of(out) -> dict:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@cases(("gpt2", "gguf"), ("modern", "hf"), ("hrm", "hf"), ("mlm", "hf"))
def test_what_is_right_is_exported_and_what_is_wrong_is_not(name, form, tmp_path, capsys):
    """A weight or a shape that changes on the way, a full disk, Ctrl-C: the earlier export stays."""
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

    def misshapen(model, path, tokenizer):  # which the other program cannot load
        other = made(name)
        for block in blocks_of(other):
            block.down.weight = nn.Parameter(block.down.weight[:, :-8].clone())
        FORMS[form][0](other, path, tokenizer)

    def full(model, path, tokenizer):
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted(path, row):
        raise KeyboardInterrupt

    for kind, broken in ((UserError, {"write": changed}), (UserError, {"write": misshapen}),
                         (RetryableError, {"write": full}), (KeyboardInterrupt, {"load": interrupted})):
        with pytest.raises(kind):
            export(model, tmp_path, form, **broken)
        assert files_of(tmp_path) == before and not [*tmp_path.glob(".tmp-*")]
    (tmp_path / (".tmp-hf" if form == "hf" else ".tmp-model")).mkdir()  # of one that was killed
    export(made(name), tmp_path, form)  # again, over the earlier one
    assert files_of(tmp_path) == before


def functional(**changes):
    """What model.py calls F, and nobody else."""
    return SimpleNamespace(**vars(F) | changes)


def relu_squared(x, approximate="none"):
    return F.relu(x).square()


def scaled(self, idx):
    return 2 * nn.Embedding.forward(self, idx)


def exchanged(q, k, v, *mask):  # the values of heads
    return models.cpu_attention(q, k, v.flip(1), *mask)


EDITS = {
    "gelu": ("gpt2 mlm", lambda m, patch: patch.setattr(models, "F", functional(gelu=relu_squared))),
    "silu": ("hrm modern", lambda m, patch: patch.setattr(models, "F", functional(silu=F.relu))),
    "epsilon": ("gpt2 mlm hrm modern", lambda m, patch: [
        setattr(module, "eps", 1.0) for module in m.modules() if hasattr(module, "eps")]),
    "scale": ("hrm modern gpt2", lambda m, patch: setattr(
        m.embed, "forward", functools.partial(scaled, m.embed))),
    # which only bfloat16 enters
    "heads": ("gpt2 modern hrm mlm", lambda m, patch: (
        models.use_device(m, torch.device("cpu"), torch.bfloat16),
        [setattr(block, "cpu_attention", exchanged) for block in blocks_of(m)]))}


@pytest.mark.parametrize("edit, name, form", [
    pytest.param(edit, name, form, marks=[] if (edit, name, form) in (
        ("gelu", "gpt2", "gguf"), ("heads", "gpt2", "hf"), ("epsilon", "hrm", "hf")) else pytest.mark.full)
    for edit, (names, _) in EDITS.items() for name, form in EACH if name in names.split()])
def test_an_edited_forward_is_refused(edit, name, form, tmp_path, monkeypatch):
    model = made(name, d_model=32, n_head=2)
    if edit == "heads":  # the control
        models.use_device(model, torch.device("cpu"), torch.bfloat16)
    export(model, tmp_path, form)
    before = files_of(tmp_path)
    EDITS[edit][1](model, monkeypatch)
    with pytest.raises(UserError, match="float"):
        export(model, tmp_path, form)
    assert files_of(tmp_path) == before and not [*tmp_path.glob(".tmp-*")]


def test_what_cannot_be_compared_is_exported_with_a_line(tmp_path, capsys, monkeypatch):
    """An absent package, one that lacks the family, too little memory, and a file that cannot be mapped."""
    def unmapped(path, row):
        raise RuntimeError(f"unable to mmap 99 bytes from file <{path}>: No such device (19)")

    def said(form: str, target, name, value) -> str:
        with monkeypatch.context() as patch:
            setter = patch.setitem if isinstance(target, dict) else patch.setattr
            setter(target, name, value)
            export(made("gpt2"), tmp_path, form)
        assert files_of(tmp_path) and not [*tmp_path.glob(".tmp-*")]
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and out.startswith("WARNING: "), out
        return out

    assert "AttributeError" in said("hf", sys.modules, "transformers", SimpleNamespace())
    for form in FORMS:
        assert "0.0 GB" in said(form, psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    assert "mmap" in said("hf", FORMS, "hf", (to_hf, unmapped))
    llama_cpp, gguf = sys.modules["weights.llama_cpp"], sys.modules["gguf"]
    assert "xllamacpp_absent" in said("gguf", llama_cpp, "ASK", "import xllamacpp_absent")
    writer = gguf.GGUFWriter
    assert "architecture" in said("gguf", gguf, "GGUFWriter", lambda path, _: writer(path, "of later"))


@pytest.mark.parametrize("seq_len", [1, 48])
def test_a_tokenizer_without_latin_letters_can_be_exported(seq_len, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(WORDS, "encode", lambda text: np.zeros(0, np.int64))
    export(made("gpt2", seq_len=seq_len), tmp_path)
    assert files_of(tmp_path) and "WARNING" not in capsys.readouterr().out


def test_files_whose_modes_cannot_change(tmp_path, monkeypatch):
    """As in a mounted bucket. An earlier export is replaced there, too."""
    def refused(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    for name in ("chmod", "utime", "setxattr"):
        monkeypatch.setattr(os, name, refused)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("earlier")
    export(made("gpt2"), tmp_path, load=lambda path, row: made("gpt2")(row)[0])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "gpt2"
    assert len(files_of(tmp_path)) == 5


def test_files_of_others_and_a_link_stay(tmp_path):
    """An hf/ with a file of its owner, on another disk or not."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "README.md").write_text("mine")
    (tmp_path / "hf").symlink_to(tmp_path / "elsewhere")
    export(made("gpt2"), tmp_path)
    assert (tmp_path / "elsewhere" / "README.md").read_text() == "mine"
    assert (tmp_path / "elsewhere" / "model.safetensors").exists() and (tmp_path / "hf").is_symlink()
    (tmp_path / "precious").mkdir()
    (tmp_path / ".tmp-hf").symlink_to(tmp_path / "precious")
    with pytest.raises(RetryableError):
        export(made("gpt2"), tmp_path)
    assert not [*(tmp_path / "precious").iterdir()]

"""--export of weights/use.py: what is exported is the model, or nothing is. A patch stands for an edit."""

import errno
import os
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from tiny_models import WORDS, made
from torch import nn

import model as models
from cli.errors import RetryableError, UserError
from model import blocks_of, use_device
from weights import use
from weights.huggingface import logits_of_hf, to_hf
from weights.llama_cpp import logits_of_gguf, to_gguf

CPU = torch.device("cpu")
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

    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    interrupted = mock.Mock(side_effect=KeyboardInterrupt)
    for kind, broken in ((UserError, {"write": changed}), (UserError, {"write": misshapen}),
                         (RetryableError, {"write": full}), (KeyboardInterrupt, {"load": interrupted})):
        with pytest.raises(kind):
            export(model, tmp_path, form, **broken)
        assert files_of(tmp_path) == before and not [*tmp_path.glob(".tmp-*")]
    (tmp_path / (".tmp-hf" if form == "hf" else ".tmp-model")).mkdir()  # of one that was killed
    export(made(name), tmp_path, form)  # again, over the earlier one
    assert files_of(tmp_path) == before


def relu_squared(x, approximate="none"):
    return F.relu(x).square()


def exchanged(q, k, v, *mask):  # the values of heads
    return models.cpu_attention(q, k, v.flip(1), *mask)


EDITS = {
    "activation": ("gpt2 mlm hrm modern", lambda m, patch: patch.setattr(
        models, "F", SimpleNamespace(**vars(F) | {"gelu": relu_squared, "silu": F.relu}))),
    "epsilon": ("gpt2 mlm hrm modern", lambda m, patch: [
        setattr(module, "eps", 1.0) for module in m.modules() if hasattr(module, "eps")]),
    # which only bfloat16 enters
    "heads": ("gpt2 modern hrm mlm", lambda m, patch: (
        use_device(m, CPU, torch.bfloat16),
        [setattr(block, "cpu_attention", exchanged) for block in blocks_of(m)]))}
FIRST = [("activation", "gpt2", "gguf"), ("heads", "gpt2", "hf"), ("epsilon", "hrm", "hf")]


@pytest.mark.parametrize("edit, name, form", [
    pytest.param(edit, name, form, marks=[] if (edit, name, form) in FIRST else pytest.mark.full)
    for edit, (names, _) in EDITS.items() for name, form in EACH if name in names.split()])
def test_an_edited_forward_is_refused(edit, name, form, tmp_path, monkeypatch):
    model = made(name, d_model=32, n_head=2)
    if edit == "heads":  # the control
        use_device(model, CPU, torch.bfloat16)
    export(model, tmp_path, form)
    before = files_of(tmp_path)
    EDITS[edit][1](model, monkeypatch)
    with pytest.raises(UserError, match="float"):
        export(model, tmp_path, form)
    assert files_of(tmp_path) == before and not [*tmp_path.glob(".tmp-*")]


def test_what_cannot_be_compared_is_exported_with_a_line(tmp_path, capsys, monkeypatch):
    """An absent package, one that lacks the family, too little memory, and a file that cannot be mapped."""
    unmapped = mock.Mock(side_effect=RuntimeError("unable to mmap 99 bytes: No such device (19)"))

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
    assert "xllamacpp_absent" in said("gguf", sys.modules["weights.llama_cpp"], "ASK",
                                      "import xllamacpp_absent")


@pytest.mark.parametrize("seq_len", [1, 48])
def test_a_tokenizer_without_latin_letters_can_be_exported(seq_len, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(WORDS, "encode", lambda text: np.zeros(0, np.int64))
    export(made("gpt2", seq_len=seq_len), tmp_path)
    assert files_of(tmp_path) and "WARNING" not in capsys.readouterr().out


def test_files_of_others_and_a_link_stay(tmp_path, monkeypatch):
    """In an hf/ on another disk, and where modes cannot change, as in a mounted bucket."""
    (tmp_path / "elsewhere").mkdir()
    for name in ("README.md", "config.json"):
        (tmp_path / "elsewhere" / name).write_text("mine")
    (tmp_path / "hf").symlink_to(tmp_path / "elsewhere")
    with monkeypatch.context() as patch:
        for name in ("chmod", "utime", "setxattr"):
            patch.setattr(os, name, mock.Mock(side_effect=PermissionError(1, "")))
        export(made("gpt2"), tmp_path, load=lambda path, row: made("gpt2")(row)[0])
    assert (tmp_path / "elsewhere" / "README.md").read_text() == "mine" and (tmp_path / "hf").is_symlink()
    assert "gpt2" in (tmp_path / "elsewhere" / "config.json").read_text()
    (tmp_path / "precious").mkdir()
    (tmp_path / ".tmp-hf").symlink_to(tmp_path / "precious")
    with pytest.raises(RetryableError):
        export(made("gpt2"), tmp_path)
    assert not [*(tmp_path / "precious").iterdir()]

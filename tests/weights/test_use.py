"""weights/use.py: what is exported is the model, or nothing is (an edit of model.py is a patch here). What
--prompt and --chat do at a keyboard and in pipes, and models that generate otherwise than they learn.
"""

import errno
import io
import os
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from conftest import place
from runs import Trainer, edited, evaluations_of
from tiny_models import WORDS, made
from torch import nn
from train_recurrent import Recurrent

import data
import ddp_utils
import model as models
import train_gpt2
from cli.errors import RetryableError, RunError, UserError
from model import GPT2, HRM, blocks_of, use_device
from weights import use
from weights.huggingface import logits_of_hf, to_hf
from weights.llama_cpp import logits_of_gguf, to_gguf
from weights.sampling import contradiction

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


# ------------------------------------------------------------------------------- --prompt, --chat, load_run


TRAINER = Trainer("train_gpt2.py", steps=4, save_every=4, eval_every=4, max_new_tokens=5)


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    done = TRAINER.train(0, shards, out, eval_batches=0, ema=0.9)
    assert done.code == 0, done.out
    return out


def test_a_run_is_loaded_for_use_as_it_was_evaluated(run, shards, tmp_path):
    model, tokenizer = use.load_run(GPT2, run)
    loss = labels = 0
    for x, y in data.validation_batches(data.Dataset([shards], 32).val[""], 4, place(0, 1), 0):
        loss += F.cross_entropy(model(x).mT, y, ignore_index=-1, reduction="sum").item()
        labels += (y >= 0).sum().item()
    assert loss / labels == pytest.approx(evaluations_of(run)[-1]["val_loss"], abs=1e-5)
    assert tokenizer.decode(tokenizer.encode("def").tolist()) == "def"
    with pytest.raises(RunError):
        use.load_run(GPT2, tmp_path)


@pytest.mark.parametrize("flags, begins", [
    (["--prompt", "a --prompt and --chat"], "a --prompt and --chat"), (["--eval-only"], "step 4 from")])
def test_a_text_of_the_model_is_alone_on_stdout(flags, begins, run, capsys):
    done = TRAINER.here("--out", run, *flags)
    assert done.code == 0 and done.out.startswith(begins) and "reading" not in done.out, done.out
    assert f"step 4 in {run}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["--prompt", "a"], ["--eval-only"], ["--export"]])
def test_a_reader_that_is_gone_is_no_error(command, run, monkeypatch):
    """As after `| head`. An export is made even so."""
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--out", str(run), "--max-new-tokens", "2", *command])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys.stdout, "write", mock.Mock(side_effect=BrokenPipeError), raising=False)
        train_gpt2.main()
    assert command != ["--export"] or (run / "hf" / "config.json").exists()


def test_a_start_that_trains_says_that_it_has_not(monkeypatch):
    """If its output was closed before its log begins, which does without a screen."""
    assert ddp_utils.ending_of(BrokenPipeError())[:2] == (0, "")  # of a help or an estimate
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert ddp_utils.ending_of(BrokenPipeError())[0] == 1


@pytest.mark.parametrize("words, both", [
    (["--prompt", "a", "--prompt=b"], "--prompt and --prompt"),
    (["--export=gguf", "--eval-only"], "--export and --eval-only")])
def test_one_thing_at_a_time(words, both, run):
    done = TRAINER.here("--out", run, *words)
    assert done.code == 2 and both in done.out, done.out


def test_ctrl_c_ends_an_answer_and_then_the_chat(run, monkeypatch):
    asked = []

    def ask(shown):
        asked.append(shown)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return "a question"

    def answer(*_):
        if len(asked) == 1:
            raise KeyboardInterrupt
        return [["answered"]]

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(use, "samples_of", answer)
    monkeypatch.delitem(sys.modules, "readline", raising=False)
    done = TRAINER.here("--out", run, "--chat")
    assert done.code == 0 and done.out == "\nanswered\n" and len(asked) == 3, done.out
    assert "readline" in sys.modules  # input() edits lines, and takes very long ones


# --------------------------------------------------------- models that generate otherwise than they learn


IDS = {"vocab_size": 60, "padded_vocab": 64, "seq_len": 32}
PAIRS = {"start": 57, "response": 58}


def built(model_class, **config):
    torch.manual_seed(0)
    shape = {} if model_class is Recurrent else {"n_head": 2, "d_model": 16, "n_layer": 2}
    return model_class(model_class.Config(**IDS | shape | config))


def windowed(model_class):
    class Windowed(model_class):
        def mask(self, idx, cache, flex=True):
            return models.attention_mask(lambda b, h, i, j: (j <= i) & (i - j < 4), idx, False)

    return Windowed


def changed(change):
    """A model with other hidden states; `change` may also draw random numbers."""
    class Changed(GPT2):
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


RIGHT = [
    (GPT2, {"modern": True}), (GPT2, {"seq_len": 1}),
    (GPT2, PAIRS | {"attention": "isolated", "modern": True}), (GPT2, PAIRS | {"attention": "prefix"}),
    (GPT2, {"attention": "isolated", "start": 57}),
    (HRM, PAIRS | {"h_cycles": "2:4"}), (HRM, {"halt": True, "dropout": 0.1, "inject_input": True}),
    (changed(lambda x: 0.1 * torch.randn_like(x)), {}), (Counting, {}), (Mine, {}),
    (Recurrent, {"width": 16})]
WRONG = [
    (windowed(GPT2), {"modern": True}), (windowed(GPT2), PAIRS), (windowed(HRM), {}),
    (windowed(HRM), {"halt": True}), (changed(lambda x: 0.5 * F.pad(x[:, 1:], (0, 0, 0, 1))), {}),
    (changed(lambda x: 0.5 * F.pad(x[:, :-1], (0, 0, 1, 0))), {}), (Uncached, {})]


def writes(model) -> str:
    torch.manual_seed(1)
    for p in model.parameters():  # as large as trained ones; --modern begins with zeros
        p.data.add_(0.2 * torch.randn(p.shape))
    return contradiction(model.train(), CPU)


@pytest.mark.parametrize("model_class, config", RIGHT + WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_writes_otherwise_than_it_learns_is_named(model_class, config, dtype):
    """The model stays as it was."""
    model = built(model_class, **config)
    use_device(model, CPU, dtype)
    if (model_class, config) in WRONG:
        assert "two passes" in writes(model)
        return
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(1)
    random, attributes = torch.get_rng_state(), dict(vars(model))
    assert contradiction(model, CPU) == ""
    assert torch.equal(torch.get_rng_state(), random) and vars(model) == attributes and model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert writes(model) == ""


def test_an_edit_of_the_library_is_found_where_the_loss_does_not_see_it(monkeypatch):
    plain = models.CausalLM.logits
    monkeypatch.setattr(models.CausalLM, "logits", lambda self, hidden: 0.5 * plain(self, hidden))
    assert "the loss differs" in writes(built(HRM)) and writes(built(Mine)) == ""


def test_a_model_that_cannot_be_asked_is_no_contradiction(capsys):
    """Its forward wants targets, which writing does not need."""
    class Wants(GPT2):
        def forward(self, idx, targets):
            return super().forward(idx, targets)

    model = built(Wants)
    assert contradiction(model, CPU) == "" and model.training and model.compute_dtype == torch.float32
    assert "WARNING: Wants " in capsys.readouterr().err


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
    assert done.code == 0 and done.out.count("(none: Windowed ") == 2, done.out
    for words, code in ((["--prompt", "def"], 2), (["--chat"], 2), (["--data", shards, "--eval-only"], 0)):
        used = trainer.here("--out", tmp_path / "run", *words)
        assert used.code == code and ("error: Windowed " in used.out) == (code == 2), used.out

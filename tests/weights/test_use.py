"""weights/use.py: load_run, and what --prompt and --chat do at a keyboard and in pipes."""

import io
import shutil
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import place
from runs import Trainer, evaluations_of

import data
import ddp_utils
import train_gpt2
from cli.errors import UserError
from ddp_utils import list_checkpoints
from model import GPT2
from weights import use

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
    with pytest.raises(UserError):
        use.load_run(GPT2, tmp_path)


def test_load_run_takes_best_beside_a_damaged_checkpoint(run, tmp_path):
    damaged = shutil.copytree(run, tmp_path / "run")
    list_checkpoints(damaged)[0].write_bytes(b"PK")
    use.load_run(GPT2, damaged)


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

"""--prompt, --chat, --fill and --eval-only at a keyboard, in pipes and in terminals."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT
from runs import Trainer

import ddp_utils
import train_gpt2
from weights import use

GPT2 = Trainer("train_gpt2.py", steps=2, save_every=2, eval_every=2, eval_batches=1, max_new_tokens=5)
MLM = Trainer("train_mlm.py", steps=2, save_every=2, eval_every=2, eval_batches=1, ff=48, window=16)


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for trainer in (GPT2, MLM):
        done = trainer.train(0, shards, folder / trainer.script)
        assert done.code == 0, done.out
    return folder


@pytest.mark.parametrize("trainer, flags, begins", [
    (GPT2, ["--prompt", "a --prompt and --chat"], "a --prompt and --chat"),
    (MLM, ["--fill", "a [MASK]"], "'"), (GPT2, ["--eval-only"], "step 2 from")])
def test_a_text_of_the_model_is_alone_on_stdout(trainer, flags, begins, runs, capsys):
    done = trainer.here("--out", runs / trainer.script, *flags)
    said = capsys.readouterr().err
    assert done.code == 0 and done.out.startswith(begins) and "reading" not in done.out, done.out
    assert f"step 2 in {runs / trainer.script}" in said


@pytest.mark.parametrize("command", [["--prompt", "a"], ["--eval-only"], ["--export"]])
def test_a_reader_that_is_gone_is_no_error(command, runs, monkeypatch):
    """As after `| head`. An export is made even so."""
    def gone(*args, **_):
        raise BrokenPipeError

    out = runs / GPT2.script
    export = out / "hf" / "config.json"
    export.unlink(missing_ok=True)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--out", str(out), "--max-new-tokens", "2", *command])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys.stdout, "write", gone, raising=False)
        train_gpt2.main()
    assert export.exists() == (command == ["--export"])


def test_a_start_that_trains_says_that_it_has_not(monkeypatch):
    """If its output was closed before its log begins, which does without a screen."""
    assert ddp_utils.ending_of(BrokenPipeError())[:2] == (0, "")  # of a help or an estimate
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert ddp_utils.ending_of(BrokenPipeError())[0] == 1


@pytest.mark.parametrize("trainer, words, both", [
    (GPT2, ["--prompt", "a", "--prompt=b"], "--prompt and --prompt"),
    (GPT2, ["--export=gguf", "--export", "hf"], "--export and --export"),
    (MLM, ["--fill", "[MASK]", "--eval-only"], "--fill and --eval-only")])
def test_one_thing_at_a_time(trainer, words, both, runs):
    done = trainer.here("--out", runs / trainer.script, *words)
    assert done.code == 2 and both in done.out, done.out


def typed(*parts: bytes) -> str:
    """What a prompt of --chat makes of keys in a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
        os.environ["TERM"] = "xterm"
        answer = "nothing"
        try:
            answer = repr(use.typed())
        except (EOFError, KeyboardInterrupt) as error:
            answer = type(error).__name__
        finally:
            os.write(1, f"ANSWER {answer} END".encode())
            os._exit(0)
    shown, deadline, keys = b"", time.monotonic() + 120, list(parts)
    while b" END" not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536)
        elif b"> " in shown and keys:  # one after the other, as they are typed
            os.write(terminal, keys.pop(0))
    os.close(terminal)
    os.waitpid(pid, 0)
    return shown.decode().partition("ANSWER ")[2].removesuffix(" END")


def test_lines_are_edited_and_may_be_long():
    pytest.importorskip("readline")
    assert typed(b"abc\x1b[D\x1b[Dx\r") == "'axbc'"
    assert typed(b"a" * 3000, b"b" * 3000, b"\r") == repr("a" * 3000 + "b" * 3000)
    assert typed(b"abc", b"\x03") == "KeyboardInterrupt" and typed(b"\x04") == "EOFError"


def test_ctrl_c_ends_an_answer_and_then_the_chat(runs, monkeypatch):
    asked = []

    def ask(shown):
        asked.append(shown)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return f"question {len(asked)}"

    def answer(*_):
        if len(asked) == 1:
            raise KeyboardInterrupt
        return [["answered"]]

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(use, "samples_of", answer)
    done = GPT2.here("--out", runs / GPT2.script, "--chat")
    assert done.code == 0 and done.out == "\nanswered\n" and len(asked) == 3, done.out


@pytest.mark.full  # a process that imports torch
def test_lines_of_a_file_are_a_prompt_each(runs):
    command = [sys.executable, "train_gpt2.py", "--out", runs / GPT2.script, "--chat", "--max-new-tokens=1"]
    done = subprocess.run(command, cwd=ROOT, input="one\ntwo\n", text=True, capture_output=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("\n") >= 2 and "> " not in done.stdout, done

"""At the keyboard: what is typed in, pasted, piped and closed; what is no number, and broken packages."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import ROOT
from runs import Trainer
from test_own_evaluation import USE, changed

import ddp_utils
import monitor
import train_gpt2
import train_mlm
from cli.errors import UserError, local_rank
from cluster import heartbeat
from training.evaluation import refuse_odd_metric
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


# -------------------------------------------------------------------------------- what the model writes alone

def test_a_text_of_the_model_is_alone_on_stdout(runs, capsys):
    for trainer, flags, lines in ((GPT2, ["--prompt", "the"], 1), (MLM, ["--fill", "a [MASK]"], 1),
                                  (GPT2, ["--eval-only"], 2)):
        out = runs / trainer.script
        done = trainer.here("--out", out, *flags)
        said = capsys.readouterr().err
        assert done.code == 0 and f"reading the checkpoint of step 2 in {out}" in said, done.out + said
        assert done.out.count("\n") >= lines and "reading" not in done.out, done.out
        assert ("step 2 from" in said) == (flags != ["--eval-only"]), said
        assert done.out.startswith({"--prompt": "the", "--fill": "'"}.get(flags[0], "step 2 from")), done.out


@pytest.mark.parametrize("command", [["--prompt", "a"], ["--eval-only"], ["--export"]])
def test_a_reader_that_is_gone_is_no_error(command, runs, monkeypatch):
    """As after `| head`; an export is made even so."""
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
    assert ddp_utils.ending_of(BrokenPipeError())[:2] == (1, "error: standard output is closed.")


def test_one_thing_at_a_time(runs):
    """Two of them are refused."""
    for trainer, flags, words in (
            (GPT2, ["--prompt", "a", "--prompt=b"], "--prompt and --prompt"),
            (GPT2, ["--eval-only", "--prompt", "a"], "--eval-only and --prompt"),
            (GPT2, ["--export", "--eval-only"], "--export and --eval-only"),
            (GPT2, ["--export", "--prompt", "a"], "--export and --prompt"),
            (GPT2, ["--export=gguf", "--export", "hf"], "--export and --export"),
            (MLM, ["--fill", "[MASK]", "--eval-only"], "--fill and --eval-only")):
        done = trainer.here("--out", runs / trainer.script, *flags)
        assert done.code == 2 and f"{words} cannot be used together: give one" in done.out, done.out
    done = GPT2.here("--dry-run", "--prompt", "a")
    assert done.code == 2 and "--dry-run only estimates: leave out --prompt" in done.out, done.out
    done = GPT2.here("--out", runs / GPT2.script, "--prompt", "use --prompt and --chat")
    assert done.code == 0 and done.out.startswith("use --prompt and --chat"), done.out


# --------------------------------------------------------------------------------------------- in a terminal

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


def test_ctrl_c_ends_an_answer_and_then_the_chat(runs, monkeypatch, capsys):
    """At its beginning it says, beside standard output, that it forgets each line."""
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
    assert capsys.readouterr().err.count("not what was said before") == 1


@pytest.mark.full  # a process that imports torch
def test_lines_of_a_file_are_a_prompt_each(runs):
    command = [sys.executable, "train_gpt2.py", "--out", runs / GPT2.script, "--chat", "--max-new-tokens=1"]
    done = subprocess.run(command, cwd=ROOT, input="one\ntwo\n", text=True, capture_output=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("\n") >= 2 and "> " not in done.stdout, done


def test_main_after_a_script_has_read_stdin(monkeypatch):
    for closed in (False, True):
        stdin = io.TextIOWrapper(io.BytesIO(b"one\ntwo\n"))
        assert next(stdin) == "one\n"
        if closed:
            stdin.close()
        monkeypatch.setattr(sys, "stdin", stdin)
        assert train_gpt2.parse_args(["--lr", "1"]).given == {"lr": 1.0}


# ----------------------------------------------------------------------------------------- what is no number

@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "RANK", "WORLD_SIZE"])
def test_what_is_no_number_in_the_environment(name, monkeypatch, capsys):
    """Matters to several processes only; a help, an estimate and one process do without."""
    monkeypatch.setenv(name, "x")
    assert local_rank() == 0
    with pytest.raises(SystemExit):
        train_mlm.parse_args(["--help-all"])
    assert "rarely needed:" in capsys.readouterr().out
    assert GPT2.here("--dry-run").code == 0
    for other in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if other != name:
            monkeypatch.setenv(other, "1")
    with pytest.raises(UserError, match=f"^{name} is not a number: start with torchrun"):
        heartbeat.join(1)


def test_one_process_may_leave_its_port_to_the_system(monkeypatch):
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert heartbeat.join(60)[:2] == (0, 1)


@pytest.mark.parametrize("port", ["0", "65536", "70000"])
def test_a_port_that_there_is_not_is_named_by_each_rank(port, monkeypatch):
    for rank in ("0", "1"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(UserError, match=f"MASTER_PORT={port} is not from 1 to 65535"):
            heartbeat.join(600)


@pytest.mark.parametrize("found", [None, 3.0, "much", {"own": None}, {"own": 3.0}, {"own": "ab"},
                                   {"own": (torch.ones(2), 1)}, {"own": (1, None)}, {"own": (1, 2, 3)}])
def test_a_metric_that_is_no_sum(found):
    def own(model, x, y):
        pass

    with pytest.raises(UserError, match=r"^the metric own is .* return .\"own\": .sum, count"):
        refuse_odd_metric(own, found)
    for right in {"own": (1, 2)}, {"own": (torch.ones((), requires_grad=True), numpy.float32(2))}:
        refuse_odd_metric(own, right)


def test_a_metric_that_returns_nothing(shards, tmp_path):
    nothing = "def metric(model, x, y):\n    pass\nrun.metric = metric"
    trainer = changed(tmp_path / "train_without_return.py", (nothing, USE))
    done = trainer.train(0, shards, tmp_path / "run", steps=2, eval_every=2, save_every=2)
    assert done.code == 2 and 'return {"metric": (sum, count)}' in done.out, done.out


@pytest.mark.parametrize("kind, value", [("text", "'much'"), ("weight", "model.embed.weight")])
def test_what_is_no_number_is_not_logged(kind, value, shards, tmp_path):
    line = f"=log.step(metrics, step, samples, grad_norm, lr=lr, mine={value})"
    trainer = changed(tmp_path / f"train_logs_{kind}.py", (line, "log.step(metrics"))
    done = trainer.train(0, shards, tmp_path / "run", steps=1)
    assert done.code == 2 and "error: mine cannot be logged: it is of type " in done.out, done.out


def test_an_error_of_the_device_stays_what_it_is(tmp_path):
    """A number that is logged is waited for, which is where CUDA and NCCL report what failed before."""
    class Failing:
        shape = ()

        def item(self):
            raise RuntimeError("CUDA error: device-side assert triggered")

    settings = {"log_every": 1, "eval_every": 9, "steps": 9}
    text = monitor.TrainLog("", active=False)
    log = monitor.RunLog(tmp_path, text, settings, [], 0, 1.0, "OK")
    metrics = SimpleNamespace(reduce=dict, machines=dict)
    with pytest.raises(RuntimeError, match="device-side assert"):
        log.step(metrics, 1, 1, 1.0, mine=Failing())


# ------------------------------------------------------------------------------------------- broken packages

def broken(folder, monkeypatch, package: str, error: str) -> None:
    """Puts a package in front of the one that is installed, whose import fails."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(f"raise {error}('it is broken')")
    monkeypatch.syspath_prepend(folder)
    for name in [*sys.modules]:
        if name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError", "SystemExit"])
@pytest.mark.parametrize("package", ["safetensors", "gguf", "pyarrow", "tokenizers"])
def test_a_package_that_is_there_and_broken(package, error, runs, tmp_path, monkeypatch):
    from prepare import sources
    from vocab import bpe, tokenizer
    out = runs / GPT2.script
    nothing = SimpleNamespace(dataset="parquet:x", files=[])
    calls = {"safetensors": [lambda: GPT2.here("--out", out, "--export")],
             "gguf": [lambda: GPT2.here("--out", out, "--export", "gguf")],
             "pyarrow": [lambda: next(sources.read_parquet(nothing, None))],
             "tokenizers": [lambda: bpe.train_bpe(["a"], 300),
                            lambda: tokenizer.parse_tokenizer_json("own", "{}")]}
    (tmp_path / "front").mkdir()
    broken(tmp_path / "front", monkeypatch, package, error)
    for call in calls[package]:
        try:
            text = call().out
        except UserError as problem:
            text = f"error: {problem}"
        last = text.splitlines()[-1]
        assert f"needs the package {package}, which is broken here ({error}: it is broken)" in last, text
        assert last.endswith(f": pip install --force-reinstall {package}.")


@pytest.mark.parametrize("package", ["gguf", "tokenizers", "safetensors"])
def test_a_package_that_is_missing(package, runs, tmp_path, shards, monkeypatch):
    from vocab import bpe
    monkeypatch.setitem(sys.modules, package, None)
    if package == "safetensors":
        done = GPT2.train(0, shards, tmp_path / "run", init_from=f"hf:{tmp_path}")
        assert done.code == 2 and "needs the package safetensors" in done.out, done.out
        assert not (tmp_path / "run").exists()
        return
    if package == "gguf":
        done = GPT2.here("--out", runs / GPT2.script, "--export", "gguf")
        assert done.out.endswith("error: --export gguf needs the package gguf: pip install gguf.\n"), done.out
        return
    with pytest.raises(UserError, match="^bpe:N needs the package tokenizers: pip install tokenizers.$"):
        bpe.train_bpe(["a"], 300)


# ------------------------------------------------------------------------------------ flags of other programs

@pytest.mark.parametrize("word, ours", [
    ("--save-steps=9", "--save-every"), ("--model=gpt2", "--size"), ("--amp", "--precision"),
    ("--save-total-limit=2", "--keep-last"), ("--report-to=wandb", "--wandb"), ("--train-file=a", "--data"),
    ("--save-dir=a", "--out"), ("--min_lr=0", "--min-lr"), ("--lr_min=0", "--min-lr"),
    ("--lora", "the recipe in docs/changing.md"), ("--port=1", "torchrun --master_port=N"),
    ("--fp16", "--precision fp16"), ("--batch_size=2", "--batch or --global-batch"),
    ("--text-field=a", "data.py prepare")])
def test_a_flag_of_another_program_leads_to_ours(word, ours):
    for module in (train_gpt2, train_mlm):
        with pytest.raises(UserError) as problem:
            module.parse_args([word])
        words = f"unrecognized arguments: {word.partition('=')[0]} (use {ours}); --help-all lists all flags."
        assert str(problem.value) == words


def test_flags_that_a_trainer_lacks_and_switches_with_a_value():
    for module, word, sentence in (
            (train_mlm, "--max-new-tokens=5", "arguments: --max-new-tokens (not needed); --help-all"),
            (train_mlm, "--temp=1", "unrecognized arguments: --temp (not needed); --help-all"),
            (train_gpt2, "--temp=1", "--temp (use --temperature); --help-all"),
            (train_gpt2, "--compile=False", "argument --compile/--no-compile: it takes no value, but")):
        with pytest.raises(UserError, match=re.escape(sentence)):
            module.parse_args([word])


def test_prepare_takes_the_flag_of_a_trainer(monkeypatch, tmp_path):
    from prepare import command
    asked = {}
    monkeypatch.setattr(command, "prepare", lambda **options: asked.update(options))
    monkeypatch.setattr(sys, "argv", ["data.py", "prepare", "--data", "text:a.txt"])
    command.main()
    assert asked["dataset"] == "text:a.txt"

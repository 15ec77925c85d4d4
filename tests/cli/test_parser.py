"""Help, types of flags, and hints for unknown flags."""

import argparse
import io
import re
import sys

import pytest

import test_ddp
import train_gpt2
import train_hrm
import train_mlm
from cli.errors import UserError
from cli.flags import flag_fields
from cli.parser import (
    bounded,
    fraction,
    nonnegative_int,
    parse_count,
    positive_int,
    steps_or_fraction,
)
from loggers import command as monitor_command
from prepare import command as prepare_command

TRAINERS = [train_gpt2, train_hrm, train_mlm]


# ----------------------------------------------------------------------------------------- unknown flags

HINTS = {"--gpus": "torchrun --nproc_per_node=N", "--batch-size": "--batch or --global-batch",
         "--zebra": None, "--local_rank": "", "--learning_rate": "--lr", "--save-steps": "--save-every",
         "--model": "--size", "--lora": "the recipe in docs/changing.md", "--fp16": "--precision fp16",
         "--text-field": "data.py prepare", "--step": "--steps", "--min_lr": "--min-lr",
         "--use-custom-model": "the recipe in docs/changing.md", "--prepare": "data.py prepare",
         "--script": "torchrun TRAINER.py"}


def hints(call, *words: str) -> dict:
    """What a command says of each unknown flag: what to use, "" if it's not needed, or nothing."""
    with pytest.raises(UserError) as problem:
        call([*words])
    found = re.findall(r" (--[\w-]+)(?: \((?:use (.*?)|(not needed))\))?(?=[,;])", str(problem.value))
    return {name: use or ("" if no else None) for name, use, no in found}


@pytest.mark.parametrize("module", TRAINERS)
def test_each_unknown_flag_has_a_hint(module):
    """Once, and its value none, also where it looks like a flag. That of another trainer is not needed."""
    causal = module is not train_mlm
    more = {"--max_new_tokens": "--max-new-tokens", "--temp": "--temperature", "--custom-preset": "--size"}
    if not causal:
        more = {"--max-new-tokens": "", "--temp": "", "--custom-preset": "--preset"}
    words = [word for name in HINTS | more for word in (f"{name}=1", name, "--zebra is a text")]
    assert hints(module.parse_args, "--steps", "3", *words) == HINTS | more


def test_other_commands_have_hints(monkeypatch):
    """A command without processes needs no torchrun."""
    assert hints(monitor_command.main, "--gpus=8", "--nnodes=2", "--learning-rate=1") == dict.fromkeys(
        ("--gpus", "--nnodes", "--learning-rate"), "")
    monkeypatch.setattr(sys, "argv", ["test_ddp.py", "--nproc-per-node", "2", "--batch-size", "--time-out"])
    assert hints(lambda _: test_ddp.main()) == {
        "--nproc-per-node": "torchrun --nproc_per_node=N", "--batch-size": "", "--time-out": "--timeout"}
    asked = {}
    monkeypatch.setattr(prepare_command, "prepare", lambda **options: asked.update(options))
    monkeypatch.setattr(sys, "argv", ["data.py", "prepare", "--data", "text:a.txt"])  # as for a trainer
    prepare_command.main()
    assert asked["dataset"] == "text:a.txt"


# ------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("kind, text, value", [
    (parse_count, "1.5B", 1_500_000_000), (parse_count, " 20M ", 20_000_000),
    (parse_count, "5e6", None), (positive_int, "1", 1), (positive_int, "0", None), (nonnegative_int, "0", 0),
    (fraction, "0", 0.0), (fraction, "1", None), (bounded(0, 1), "1", 1.0), (bounded(0), "inf", None),
    (steps_or_fraction, "0.5", 0.5), (steps_or_fraction, "1", 1), (steps_or_fraction, "1.5", None)])
def test_numbers_have_bounds(kind, text, value):
    if value is None:
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            kind(text)
        return
    assert kind(text) == value and type(kind(text)) is type(value)


def test_a_switch_takes_no_value():
    with pytest.raises(UserError, match=r"--compile/--no-compile: .*no value.*'False'"):
        train_gpt2.parse_args(["--compile=False"])


def test_a_script_may_have_read_stdin(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b"one\ntwo\n"))
    assert next(stdin) == "one\n"
    monkeypatch.setattr(sys, "stdin", stdin)
    for _ in range(2):
        assert train_gpt2.parse_args(["--lr", "1"]).given == {"lr": 1.0}
        stdin.close()


# ------------------------------------------------------------------------------------------------- the help


@pytest.mark.parametrize("module", TRAINERS)
def test_the_help_has_the_usual_flags_and_all_of_the_model(module, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    helps = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            module.parse_args([flag])
        text = capsys.readouterr().out.partition("defaults of each size:")[0]
        helps.append(dict(re.findall(r"^  (?:-h, )?(--[\w-]+)(.*(?:\n {6,}.*)*)", text, re.M)))
    few, full = helps
    command = module.parse_args([])
    assert all(action.help for action in command.parser._actions)
    assert {f"--{field.name.replace('_', '-')}" for field in flag_fields(command.config_class)} < few.keys()
    assert "--out" in few and "--schedule" in full.keys() - few.keys()
    for name, text in few.items():  # the first line of what --help-all has
        assert " ".join(full[name].split()).startswith(" ".join(text.split()))


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("call, command", [
    *((module.parse_args, "") for module in TRAINERS), (monitor_command.main, ""), (test_ddp.main, ""),
    *((prepare_command.main, name) for name in ("", "prepare", "info", "verify", "peek"))])
def test_no_line_of_help_is_wider_than_100(call, command, flag, capsys, monkeypatch):
    """However wide the terminal is. A size's vocabulary is the data's, unless its row sets one."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["x.py", *command.split(), flag])
    with pytest.raises(SystemExit):
        call()
    text = capsys.readouterr().out
    assert 0 < max(map(len, text.splitlines())) <= 100 and "50257" not in text

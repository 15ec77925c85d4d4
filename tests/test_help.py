"""--help, --help-all and the hints for unknown flags (cli/parser.py), of all commands."""

import importlib
import re
import sys

import pytest
from conftest import ROOT

import test_ddp
import train_gpt2
import train_hrm
import train_mlm
from cli.errors import UserError
from cli.flags import flag_fields
from cli.parser import ArgumentParser, FullHelp, Help
from loggers import command as monitor_command
from prepare import command as prepare_command

TRAINERS = [train_gpt2, train_hrm, train_mlm]


# ----------------------------------------------------------------------------------------- unknown flags

@pytest.mark.parametrize("module", TRAINERS)
def test_each_unknown_flag_has_a_hint_and_its_value_none(module):
    given = "--gpus 8 --batch-size=4 --gpus 8 --local_rank 0 --zebra --learning_rate 1 --master-port=1"
    with pytest.raises(UserError) as problem:
        module.parse_args(["--steps", "3", *given.split(), "--zebra is a text"])
    assert str(problem.value).partition("; ")[0] == (
        "unrecognized arguments: --gpus (use torchrun --nproc_per_node=N), --batch-size (use --batch or "
        "--global-batch), --local_rank (not needed), --zebra, --learning_rate (use --lr), --master-port (use "
        "torchrun --master_port=N)")


def test_a_flag_with_underscores_is_found_even_if_another_program_has_it_too():
    with pytest.raises(UserError, match=r"--max_new_tokens \(use --max-new-tokens\)"):
        train_gpt2.parse_args(["--max_new_tokens", "3"])


def test_a_command_without_processes_needs_no_torchrun():
    for word in "--gpus=8", "--nnodes=2", "--learning-rate=1":
        with pytest.raises(UserError, match=rf": {word.partition('=')[0]} \(not needed\); "):
            monitor_command.main([word])


def test_the_check_of_a_cluster_has_hints(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["test_ddp.py", "--nproc-per-node", "2", "--batch-size", "--time-out"])
    words = r"--nproc-per-node \(use torchrun --nproc_per_node=N\), --batch-size \(not needed\), "
    with pytest.raises(UserError, match=words + r"--time-out \(use --timeout\)"):
        test_ddp.main()


def test_what_follows_two_hyphens_is_no_flag():
    with pytest.raises(UserError, match="--learning-rate has no metrics.jsonl"):
        monitor_command.main(["--", "--learning-rate"])


# ---------------------------------------------------------------------------------------------- the help

def helped(module, flag: str, capsys) -> dict[str, str]:
    """The flags in a help, each with its text."""
    with pytest.raises(SystemExit):
        module.parse_args([flag])
    text = capsys.readouterr().out.partition("defaults of each size:")[0]
    return dict(re.findall(r"^  (?:-h, )?(--[\w-]+)(.*(?:\n {6,}.*)*)", text, re.M))


@pytest.mark.parametrize("module", TRAINERS)
def test_the_help_has_the_usual_flags_and_all_of_the_model(module, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    few, full = (helped(module, flag, capsys) for flag in ("--help", "--help-all"))
    command = module.parse_args([])
    assert full.keys() == {action.option_strings[-1 if action.dest == "help" else 0]
                           for action in command.parser._actions}
    own = {f"--{field.name.replace('_', '-')}" for field in flag_fields(command.config_class)}
    own |= {"--list-presets", "--preset", "--mask-rate", "--fill", "--bp-steps"} & full.keys()
    usual = few.keys() - own - {"--help", "--help-all"}
    assert own < few.keys() and 20 <= len(usual) <= 27, sorted(usual)
    assert {"--size", "--data", "--steps", "--lr", "--out", "--resume", "--export"} < usual
    rare = {"--compile", "--fast", "--backend", "--timeout", "--schedule", "--comm", "--grad-clip"}
    assert not rare & few.keys() and rare < full.keys()
    assert [*full][-4:] == ["--compile", "--fast", "--backend", "--timeout"]
    assert "(1 + n)" in full["--ema"]
    for name, text in few.items():  # the first line of what --help-all has
        assert " ".join(full[name].split()).startswith(" ".join(text.split()))


def test_the_help_of_a_copy_has_its_flags(tmp_path, monkeypatch, capsys):
    """Those of the trainer and of its own Config, even if other trainers have a rare one of that name."""
    text = (ROOT / "train_mlm.py").read_text().replace("MLMConfig, SIZES", "MyConfig, SIZES").replace(
        "    return parse_flags(", '    flag("--loss", str, "of my own")\n    return parse_flags(').replace(
        "EVAL_RATE = ", "@dataclass\nclass MyConfig(MLMConfig):\n"
        '    window_of_mine: int = a_flag(1, "1 %% more\\nthan before")\n\n\nEVAL_RATE = ').replace(
        "import sys\n", "import sys\nfrom dataclasses import dataclass\n"
        "from model import flag as a_flag\n")
    (tmp_path / "train_my_help.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("train_my_help")
    few = helped(mine, "--help", capsys)
    assert "of my own" in few["--loss"] and "--schedule" not in few
    assert few["--window-of-mine"].split() == "N 1 % more (1)".split()
    full = helped(mine, "--help-all", capsys)
    assert full["--window-of-mine"].split() == "N 1 % more (1) than before".split()


def parsers(monkeypatch) -> list[ArgumentParser]:
    """The parsers of all commands."""
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_args", lambda parser, *given: made.append(parser) or sys.exit())
        for main in monitor_command.main, prepare_command.main, test_ddp.main:
            with pytest.raises(SystemExit):
                main()
    commands = made[1]._subparsers._group_actions[0].choices
    return [*made, *commands.values(), *(module.parse_args([]).parser for module in TRAINERS)]


def test_the_first_line_of_a_flag_has_at_most_100_characters(monkeypatch):
    actions = [action for parser in parsers(monkeypatch) for action in parser._actions if action.help]
    assert len(actions) > 150
    for action in actions:
        assert len(action.help.partition("\n")[0]) <= 100 and action.help.count("\n") <= 1, action.help


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for parser in parsers(monkeypatch):
        for parser.formatter_class in Help, FullHelp:
            text = parser.format_help().partition("options:")[2].partition("defaults of each size:")[0]
            assert max(map(len, text.splitlines())) <= columns and "\n  -h, --help" in text

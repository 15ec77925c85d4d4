"""The flags that all trainers share."""

import re
from pathlib import Path

import pytest

import train_gpt2
import train_hrm
import train_mlm
from cli.errors import UserError
from cli.flags import make_parser, parse_flags
from cli.parser import parse_count
from model import GPT2Config
from startup.run import resolve_flags


def test_defaults_of_a_parser_are_not_given():
    parser = make_parser("", GPT2Config, train_gpt2.SIZES)
    parser.add_argument("--every", type=parse_count, default="2k")
    parser.set_defaults(lr=1.0)
    command = parse_flags(parser, GPT2Config, train_gpt2.SIZES, [])
    args = resolve_flags(command)
    assert command.given == {} and args.every == 2000 and args.lr == train_gpt2.SIZES["tiny"]["lr"]


@pytest.mark.parametrize("module", [train_gpt2, train_hrm, train_mlm])
def test_each_flag_that_is_a_path_knows_the_home_directory(module, tmp_path, monkeypatch):
    """The shell leaves the ~ in --out=~/x, and replaces it in --out ~/x."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    named = [action for action in module.parse_args([]).parser._actions if action.nargs is None
             and not action.choices and re.search(r"director|path|\bfile", action.help or "")]
    flags = [action.option_strings[0] for action in named]
    assert flags == ["--data", "--tokenizer", "--out", "--resume", "--init-from"]
    given = module.parse_args([f"{flag}=~/x y" for flag in flags]).given
    assert {*map(str, given.values())} == {"/home/me/x y"}
    for data_flag, expected in {"~/a,~/b,b": "/home/me/a,/home/me/b,b", "text:~/x.txt": "text:~/x.txt",
                                "a~/b": "a~/b"}.items():
        assert module.parse_args([f"--data={data_flag}"]).given["data"] == expected
    Path("~/run").mkdir(parents=True)  # as an older version made it
    assert module.parse_args(["--out=~/run"]).given["out"] == Path("~/run"), "its run goes on"


@pytest.mark.parametrize("words, named", [
    ("--steps 3 --epochs 1", "--epochs"), ("--dry-run --prompt a", "--prompt"),
    ("--dry-run 8x80 --eval-only", "--dry-run"), ("--dry-run --init-from base", "--size")])
def test_flags_that_exclude_each_other_are_named(words, named):
    with pytest.raises(UserError, match=named):
        train_gpt2.parse_args(words.split())
    given = train_gpt2.parse_args("--dry-run --init-from a --size tiny --steps 3".split()).given
    assert given == {"dry_run": "", "init_from": "a", "size": "tiny", "steps": 3, "epochs": None}


def test_a_key_of_a_size_that_is_no_flag_is_named():
    sizes = {"tiny": train_gpt2.SIZES["tiny"] | {"n_head_typo": 2}}
    with pytest.raises(UserError, match="tiny.*n_head_typo"):
        parse_flags(make_parser("", GPT2Config, sizes), GPT2Config, sizes, [])

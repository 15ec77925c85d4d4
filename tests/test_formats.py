"""Checkpoints of another format: each way to use one is refused in a sentence with the commit that reads it,
and all files stay as they are.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from processes import Group
from runs import Trainer, steps_of

import ddp_utils
from cli.errors import RunError, UserError
from ddp_utils import list_checkpoints, read_checkpoint
from model import GPT2
from weights.use import load_run

GPT = Trainer("train_gpt2.py", steps=8, save_every=4, eval_every=4, max_new_tokens=2)
LONGER = ("--steps", "12")


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory) -> Path:
    """A run with the checkpoints of steps 4 and 8, which began at the commit abc123."""
    out = tmp_path_factory.mktemp("formats") / "run"
    assert GPT.train(0, shards, out).code == 0
    assert len(list_checkpoints(out)) == 2 and (out / "checkpoints" / "best.pt").exists()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"commits": ["abc123"]}))
    return out


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def set_format(number: int, *paths: Path):
    for path in paths:
        torch.save(torch.load(path, weights_only=True) | {"format": number}, path)


def all_of(run: Path) -> list[Path]:
    return [*(run / "checkpoints").iterdir()]


def refused(run: Path, path: Path, *flags, ranks: int = 0, commits=("abc123", "42aa566")):
    """A command ends in one sentence, with the file and the commits, and the directories stay as they are."""
    def files():
        return {path: path.read_bytes() for path in run.parent.rglob("*")
                if path.is_file() and path.name not in (".lock", "train.log")}

    before = files()
    if ranks:
        group = Group(GPT.script, *flags, ranks=ranks)
        done = group.finish()
        assert group.codes == [2] * ranks, done.out
    else:
        done = GPT.here(*flags)
        assert done.code == 2 and done.out.count("error: ") == 1, done.out
    error = next(line for line in done.out.splitlines() if "error: " in line)
    assert str(path) in error and all(commit in error for commit in commits), done.out
    assert "delete" not in done.out and "Traceback" not in done.out, done.out
    assert files() == before, done.out


def ways(run: Path, path: Path) -> list[tuple]:
    """Commands that would read the newest checkpoint `path` of a run."""
    fresh = ("--out", run.with_name("new"), "--steps", "1", "--data", "stdlib", "--init-from")
    return [("--out", run, *LONGER), ("--resume", path, *LONGER), ("--out", run, "--resume", path, *LONGER),
            ("--resume", run, "--out", run.with_name("new"), *LONGER),
            ("--out", run, "--prompt", "a"), ("--out", run, "--export"), ("--out", run, "--eval-only"),
            ("--resume", path, "--eval-only"), (*fresh, run), (*fresh, path)]


@pytest.mark.parametrize("number, commits, alone", [
    (1, ("abc123", "42aa566"), False), *[pytest.param(*case, marks=pytest.mark.full) for case in (
        (1, ("abc123", "42aa566"), True), (3, ("abc123",), False), (3, ("abc123",), True))]])
def test_each_way_to_use_another_format_is_refused(run, number, commits, alone):
    """Of all checkpoints, and of a best.pt that alone is left."""
    if alone:
        for path in list_checkpoints(run):
            path.unlink()
    set_format(number, *all_of(run))
    newest = list_checkpoints(run)[0]
    for flags in ways(run, newest):
        refused(run, newest, *flags, commits=commits)
    for where in (run, newest):
        with pytest.raises(UserError, match="abc123"):
            load_run(GPT2, where)


@pytest.mark.parametrize("flags", [LONGER, pytest.param(("--prompt", "a"), marks=pytest.mark.full),
                                   pytest.param(("--eval-only",), marks=pytest.mark.full)])
@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.full)])
def test_two_processes_agree(run, flags, number, alone):
    if alone:
        for path in list_checkpoints(run):
            path.unlink()
    set_format(number, *all_of(run))
    refused(run, list_checkpoints(run)[0], "--out", run, *flags, ranks=2, commits=("abc123",))


@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.full)])
def test_no_run_writes_where_another_format_lies(run, number):
    """It would rename that as damaged, remove it as the oldest, or replace it as best.pt."""
    newest, first = list_checkpoints(run)
    best = run / "checkpoints" / "best.pt"
    contents = {path: path.read_bytes() for path in (newest, first, best)}
    for path in contents:
        for other, content in contents.items():
            other.write_bytes(content)
        set_format(number, path)
        refused(run, path, "--out", run, "--keep-last", "1", *LONGER, commits=("abc123",))
        refused(run, path, "--out", run, "--resume", first if path != first else newest, *LONGER,
                commits=("abc123",))
        used = GPT.here("--out", run, "--eval-only")
        assert used.code == (2 if path == newest else 0), used.out
    best.unlink()
    first.write_bytes(contents[first])
    set_format(number, first)
    refused(run, first, "--out", run, "--resume", "none", commits=("abc123",))
    newest.write_bytes(contents[newest][:1000])  # the one that is left is of another format
    refused(run, first, "--out", run, *LONGER, commits=("abc123",))


def test_another_format_is_named_where_no_commit_is_recorded(run):
    (run / "config.json").unlink()
    newest = list_checkpoints(run)[0]
    set_format(1, *all_of(run))
    refused(run, newest, "--out", run, *LONGER, commits=("42aa566",))


def test_another_format_that_is_damaged_is_no_damaged_checkpoint(run):
    """And a damaged one is of no other format: the number itself has a checksum."""
    newest = list_checkpoints(run)[0]
    content = newest.read_bytes()
    other = newest.read_bytes().replace(b"format", b"fOrmat")
    assert other != content
    newest.write_bytes(other)
    with pytest.raises(RunError, match="data.pkl"):
        read_checkpoint(newest, checked=False)
    newest.write_bytes(content)
    set_format(1, newest)
    weights = read_of(newest)["tensors"]["model"]["embed.weight"].numpy().tobytes()
    broken = bytearray(newest.read_bytes())
    broken[broken.index(weights) + 5] ^= 1
    newest.write_bytes(broken)
    refused(run, newest, "--out", run, *LONGER)


def read_of(path: Path) -> dict:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("shown", ["as damaged", "not at all"])
def test_without_the_sentence_a_run_would_go_on(run, monkeypatch, shown):
    """The control."""
    newest = list_checkpoints(run)[0]
    set_format(1, newest)

    def refuse(path, number):
        if shown == "as damaged" and number == 1:
            raise ValueError("its tensors are not those that were saved")

    monkeypatch.setattr(ddp_utils, "refuse_other_format", refuse)
    with pytest.raises(AssertionError):
        refused(run, newest, "--out", run, *LONGER)
    assert steps_of(run)[-1]["step"] == 12
    assert os.path.exists(f"{newest}.damaged") == (shown == "as damaged")

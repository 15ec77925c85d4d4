"""Checkpoints of another format: each way to use one is refused with its path and the commit that reads it,
and all files stay as they are.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import fork
from runs import Trainer

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
    assert GPT.train(0, shards, out).code == 0 and (out / "checkpoints" / "best.pt").exists()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"commits": ["abc123"]}))
    return out


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def set_format(number: int, *paths: Path):
    for path in paths:
        torch.save(torch.load(path, weights_only=True) | {"format": number}, path)


def refused(run: Path, path: Path, *flags, ranks: int = 0, commits=("abc123",)):
    """A command ends with code 2 and names the file and the commits, and the directories stay as they are."""
    def files():
        return {path: path.read_bytes() for path in run.parent.rglob("*")
                if path.is_file() and path.name not in (".lock", "train.log")}

    before = files()
    done = fork(ranks, GPT.script, *flags) if ranks else GPT.here(*flags)
    error = done.out.partition("error: ")[2].partition("\n")[0]
    assert done.code == 2 and all(name in error for name in (str(path), *commits)), done.out
    assert "delete" not in done.out and "Traceback" not in done.out and files() == before, done.out


@pytest.mark.parametrize("number, commits", [(1, ("abc123", "42aa566")),
                                             pytest.param(3, ("abc123",), marks=pytest.mark.full)])
def test_each_way_to_use_another_format_is_refused(run, number, commits):
    newest, new = list_checkpoints(run)[0], run.with_name("new")
    set_format(number, *(run / "checkpoints").iterdir())
    for flags in (("--out", run, *LONGER), ("--resume", run, "--out", new, *LONGER),
                  ("--out", run, "--prompt", "a"), ("--out", run, "--export"),
                  ("--resume", newest, "--eval-only"),
                  ("--out", new, "--steps", "1", "--data", "stdlib", "--init-from", newest)):
        refused(run, newest, *flags, commits=commits)
    with pytest.raises(UserError, match="abc123"):
        load_run(GPT2, run)
    (run / "config.json").unlink()
    refused(run, newest, "--out", run, *LONGER, ranks=2, commits=commits[1:])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_run_writes_where_another_format_lies(run, at):
    """It would rename that as damaged, remove it as the oldest, or replace it as best.pt."""
    newest, first = list_checkpoints(run)
    path = (newest, first, run / "checkpoints" / "best.pt")[at]
    set_format(1, path)
    refused(run, path, "--out", run, "--resume", newest if at else first, "--keep-last", "1", *LONGER)
    if path == first:
        newest.write_bytes(newest.read_bytes()[:1000])
        refused(run, path, "--out", run, "--resume", "none")
    refused(run, path, "--out", run, *LONGER)


def test_a_damaged_checkpoint_of_another_format_is_refused_and_the_number_has_a_checksum(run):
    newest = list_checkpoints(run)[0]
    saved = torch.load(newest, weights_only=True)
    content = newest.read_bytes()
    newest.write_bytes(content.replace(b"format", b"fOrmat"))
    with pytest.raises(RunError, match="data.pkl"):
        read_checkpoint(newest, checked=False)
    torch.save(saved | {"format": 1, "sums": {}}, newest)
    with pytest.raises(UserError, match="42aa566"):
        read_checkpoint(newest)

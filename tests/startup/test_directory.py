"""The directory of a run: its name, its lock, a run whose directory is no longer its own, what it keeps."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import ROOT, finish, start
from processes import Group
from runs import Trainer, steps_of
from torch import nn

import data
import model
import train_gpt2
from cli.errors import RetryableError
from ddp_utils import list_checkpoints, step_of
from startup.directory import RunLock, commit_of, run_directory, run_files, say_changes
from weights.use import load_run

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5, batch=2)
ENDLESS = {"steps": 1_000_000, "save_every": 20, "eval_every": 1_000_000}


@pytest.mark.parametrize("trainer, flags, name", [
    ("train_mine", {}, "runs/train_mine-tiny-stdlib-bpe4096"),
    ("train_hrm", {"data": "a/x,b/y", "size": "hrm-1b"}, "runs/hrm-1b-x-y"),
    ("train_gpt2", {"out": Path("mine")}, "mine")])
def test_the_name_says_trainer_size_and_data(trainer, flags, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a/x", "b/y"):
        Path(folder).mkdir(parents=True)
    usual = {"size": "tiny", "data": "stdlib", "tokenizer": None, "out": None}
    assert run_directory(Namespace(**usual | flags), trainer) == Path(name)


@pytest.mark.parametrize("disk", ["usual", "full", "without locks"])
def test_a_lock_is_lost_only_to_another_run(disk, tmp_path, monkeypatch, capsys):
    """Not where a file is numbered differently, nor while a disk is away."""
    def fail(number):
        return mock.Mock(side_effect=OSError(number, os.strerror(number)))

    lock, path = RunLock(tmp_path / "run"), tmp_path / "run" / ".lock"
    assert not lock.lost()  # as on the other ranks
    with monkeypatch.context() as patch:
        if disk == "full":
            patch.setattr(os, "write", fail(errno.ENOSPC))
        if disk == "without locks":
            patch.setattr(fcntl, "flock", fail(errno.ENOLCK))
        lock.acquire()
        other = RunLock(tmp_path / "run")
        if disk == "without locks":  # the first gives way
            patch.setattr(os, "getpid", lambda: 1)
            other.acquire()
            assert lock.lost() and not other.lost()
            assert capsys.readouterr().out.count(f"WARNING: {tmp_path}/run ") == 2
            return
    assert not lock.lost() and bool(path.read_text()) != (disk == "full")
    with pytest.raises(RetryableError, match=f"{tmp_path}/run .*{path.read_text()}"):
        other.acquire()
    (tmp_path / "copy").write_text(path.read_text())
    os.replace(tmp_path / "copy", path)
    assert not lock.lost()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail(errno.EIO))
        assert not lock.lost()
    path.write_text("process 1 on another")
    assert lock.lost()
    path.unlink()
    assert lock.lost()
    lock._file.close()


def files_of(out: Path) -> dict:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", ["moved", *(
    pytest.param(how, marks=pytest.mark.full) for how in ("taken", "made again"))])
def test_a_run_whose_directory_is_not_its_own_ends_without_writing(how, tmp_path, shards):
    """At its next save, on all ranks. A run that was moved resumes where it is now."""
    out, moved = tmp_path / "run", tmp_path / "moved"
    group = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS), ranks=2)
    deadline = time.monotonic() + 60
    while not any(step_of(path) > 20 for path in list_checkpoints(out)):
        assert group.all_alive and time.monotonic() < deadline, group.text
    group.send(signal.SIGSTOP)  # as a slow step would
    if how == "moved":
        out.rename(moved)
    while out.exists():  # the run may write a file into it meanwhile
        shutil.rmtree(out, ignore_errors=True)
    if how == "made again":
        out.mkdir()
    if how == "taken":
        assert GPT2.fork(0, shards, out, steps=8, seed=1).code == 0
    files = files_of(out)
    group.send(signal.SIGCONT)
    done = group.finish(60)
    assert done.code == 2 and done.out.count(f"error: {out} ") == 2, done.out
    assert out.exists() == (how != "moved")
    after = files_of(out)
    assert files.items() <= after.items()
    # TensorBoard's writer opens its file for each point, so until the next save it may make that again
    assert {path.parent.name for path in after.keys() - files.keys()} <= {"tb"}
    if how == "moved":
        step = step_of(list_checkpoints(moved)[0])
        assert GPT2.fork(0, shards, moved, **ENDLESS | {"steps": step + 1}).code == 0
        assert [record["step"] for record in steps_of(moved)[-2:]] == [step, step + 1]


def test_a_run_knows_its_code_and_says_once_what_has_changed(shards, tmp_path, capsys, monkeypatch):
    """The copies stay those of the beginning. A branch has its own."""
    out = tmp_path / "run"

    def said_to_change(**flags) -> list[str]:
        done = GPT2.train(0, shards, out, **flags)
        assert done.code == 0, done.out
        said = done.out + capsys.readouterr().err
        return re.findall(r"(\S+) has changed since: diff (\S+) \S+$", said, re.M)

    assert GPT2.train(0, shards, out, steps=2).code == 0
    trainer, kept = out / "trainer.py", out / "model" / "model.py"
    assert trainer.read_bytes() == (ROOT / "train_gpt2.py").read_bytes()
    copies = {path.relative_to(out / "model") for path in (out / "model").rglob("*.py")}
    assert all((out / "model" / name).read_bytes() == (ROOT / name).read_bytes() for name in copies)
    help_of_the_copy = [sys.executable, trainer, "--help"]  # the copies are a whole program
    done = finish(start(help_of_the_copy, cwd=tmp_path, PYTHONPATH=out / "model"))
    assert done.code == 0 and str(ROOT) not in done.out, done.out
    config = json.loads((out / "config.json").read_text())
    assert config["settings"]["BETAS"] == [0.9, 0.95] and "SIZES" not in config["settings"]
    assert config["parameters"] == sum(p.numel() for p in load_run(model.GPT2, out)[0].parameters())
    assert config["training_tokens"] == data.Dataset([shards], 32).train.num_tokens
    assert not said_to_change(steps=3)
    for path in (trainer, kept):
        path.write_text(path.read_text() + "# a comment\n")
    for flags in ({"steps": 4}, {"prompt": "To be", "max_new_tokens": 1}):
        assert said_to_change(**flags) == [("train_gpt2.py", f"{trainer}"), ("model.py", f"{kept}")]
    assert GPT2.train(0, shards, tmp_path / "branch", resume=out, steps=6).code == 0
    assert (tmp_path / "branch" / "trainer.py").read_bytes() == (ROOT / "train_gpt2.py").read_bytes()
    kept.unlink()
    assert len(said_to_change(steps=5)) == 1
    commits = json.loads((out / "config.json").read_text())["commits"]
    assert len(commits) == 4 and trainer.read_text().endswith("# a comment\n")
    monkeypatch.setattr(train_gpt2, "BETAS", (0.9, 0.99))
    other = GPT2.train(0, shards, out, steps=6)
    assert other.code == 0 and other.out.count("resuming with") == 2, other.out  # --steps
    assert "BETAS [0.9, 0.99] (was [0.9, 0.95])" in other.out, other.out


def test_a_copy_of_a_file_of_the_library_is_named(tmp_path, monkeypatch):
    shutil.copy(ROOT / "data.py", tmp_path / "data_mine.py")
    monkeypatch.setitem(sys.modules, "data_mine", None)
    said = []
    say_changes(SimpleNamespace(trainer=tmp_path / "train_mine.py", saved=None), said.append)
    assert ["data.py and data_mine.py" in text for text in said] == [True]


@pytest.mark.parametrize("text, trainer, starts", [
    ("[]", "mine.py", 1), ('{"commands": null}', "mine.py", 1), ('{"commands": ["a"]}', "mine.py", 1),
    ('{"commands": ["a"], "commits": ["b"]}', "mine.py", 2), ("{}", "gone.py", 0)])
def test_no_shape_of_config_json_ends_a_start(text, trainer, starts, tmp_path):
    """The trainer is kept byte for byte. One without a file, as in a notebook, has no text."""
    (tmp_path / "mine.py").write_bytes(b"\xff = 1\r\n")
    (tmp_path / "config.json").write_text(text)
    dataset = SimpleNamespace(tokenizer=SimpleNamespace(to_json=str), train=SimpleNamespace(num_tokens=9))
    run = SimpleNamespace(out=tmp_path, saved=None, command="python", given={}, trainer=tmp_path / trainer,
                          dataset=dataset)
    files = run_files(run, nn.Linear(2, 3), {})
    config = json.loads(files["config.json"])
    assert files.get("trainer.py") == (b"\xff = 1\r\n" if starts else None)
    assert {"tokenizer.json", "model/model.py"} <= files.keys()
    assert len(config["commands"]) == len(config["commits"]) == starts and config["parameters"] == 9


def test_the_commit_of_a_start(tmp_path, monkeypatch):
    assert commit_of(tmp_path) is None
    (tmp_path / "a.py").write_text("")
    for words in (["init"], ["add", "a.py"], ["commit", "-m", "a"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)
    clean = commit_of(tmp_path)
    (tmp_path / "a.py").write_text("1")
    assert re.fullmatch("[0-9a-f]{40}", clean) and commit_of(tmp_path) == f"{clean}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None

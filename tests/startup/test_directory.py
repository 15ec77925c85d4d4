"""The directory of a run: its name, its lock, and a run whose directory is no longer its own."""

import errno
import fcntl
import os
import shutil
import signal
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from processes import Group
from runs import Trainer, steps_of

import ddp_utils
from ddp_utils import list_checkpoints, step_of
from startup.directory import RunLock, run_directory

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5, batch=2)
ENDLESS = {"steps": 1_000_000, "save_every": 20, "eval_every": 1_000_000}


@pytest.fixture
def world():
    yield ddp_utils.init("gloo", "cpu")
    torch.distributed.destroy_process_group()


def wait_until_saved(out: Path, step: int, group: Group) -> None:
    deadline = time.monotonic() + 60
    while not any(step_of(path) > step for path in list_checkpoints(out)):
        assert group.all_alive and time.monotonic() < deadline, group.text
        time.sleep(0.01)


@pytest.mark.parametrize("trainer, flags, name", [
    ("train_gpt2", {}, "runs/gpt2-tiny-stdlib-bpe4096"),
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
def test_a_lock_is_lost_only_to_another_run(disk, tmp_path, world, monkeypatch):
    """Not where a file is numbered differently, nor while a disk is away."""
    def fail(number):
        def fails(*_):
            raise OSError(number, os.strerror(number))
        return fails

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
            return
    assert not lock.lost() and bool(path.read_text()) != (disk == "full")
    with pytest.raises(ddp_utils.RetryableError, match=f"{tmp_path}/run .*{path.read_text()}"):
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


def remove(path: Path) -> None:
    """In several attempts, because the run may write a file into it meanwhile."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("how", ["moved", *(pytest.param(how, marks=pytest.mark.full)
                                            for how in ("made again", "taken"))])
def test_a_run_whose_directory_is_not_its_own_ends_without_writing(how, tmp_path, shards):
    """At its next save, on all ranks. A run that was moved resumes where it is now."""
    out, moved = tmp_path / "run", tmp_path / "moved"
    group = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS), ranks=2)
    wait_until_saved(out, 20, group)
    group.send(signal.SIGSTOP)  # as a slow step would
    out.rename(moved) if how == "moved" else remove(out)
    if how == "made again":
        out.mkdir()
    if how == "taken":
        assert GPT2.fork(0, shards, out, steps=8, seed=1).code == 0
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    group.send(signal.SIGCONT)
    done = group.finish(60)
    assert done.code == 2 and done.out.count(f"error: {out} ") == 2, done.out
    assert out.exists() == (how in ("made again", "taken"))
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert files.items() <= after.items()
    # TensorBoard's writer opens its file for each point, so until the next save it may make that again
    assert {path.parent.name for path in after.keys() - files.keys()} <= {"tb"}
    if how == "moved":
        step = step_of(list_checkpoints(moved)[0])
        assert GPT2.fork(0, shards, moved, **ENDLESS | {"steps": step + 1}).code == 0
        assert [record["step"] for record in steps_of(moved)[-2:]] == [step, step + 1]

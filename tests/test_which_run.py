"""Which run a directory holds: it is found on every node, is not taken from a run that lives, outlives what
is done to its directory, and goes back. What a resumed run does not say, its checkpoint says.
"""

import argparse
import errno
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from conftest import ROOT, finish, start
from processes import Group, fork
from runs import PUBLISHED, Trainer, assert_same_run, copy_of_the_first_half, evaluations_of, log_of, steps_of

import ddp_utils
import startup.run
import train_gpt2
import train_hrm
import train_mlm
from cli.errors import UserError
from cli.files import lock_file
from cli.flags import flag_fields, make_parser, parse_flags
from cli.parser import parse_count
from ddp_utils import list_checkpoints, read_checkpoint
from loggers import command as monitor_command
from model import GPT2Config, flag
from ops.device import compute_dtype
from prepare import command as prepare_command
from startup.directory import RunLock
from startup.resume import (
    FIXED,
    FREE_FIELDS,
    LIMITS,
    NEW,
    PLANNED,
    RECORDED,
    compare_with_saved,
    shape_from_record,
)

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5, batch=2)
ENDLESS = {"steps": 1_000_000, "save_every": 20, "eval_every": 1_000_000, "log_every": 20}


@pytest.fixture
def world():
    yield ddp_utils.init("gloo", "cpu")
    torch.distributed.destroy_process_group()


def wait_for(condition, group: Group, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert group.all_alive and time.monotonic() < deadline, group.text
        time.sleep(0.01)


def saved_beyond(out: Path, step: int) -> bool:
    return any(ddp_utils.step_of(path) > step for path in list_checkpoints(out))


# --------------------------------------------------------------------------- another node holds a later step


def two_nodes(directories: list[Path], **changes) -> tuple:
    """A run on two nodes, each with a working directory of its own; the first is node 0."""
    flags = GPT2.flags(changes.pop("shards"), "run", **changes)
    there = json.dumps([str(path) for path in directories])
    group = Group("tests/on_node.py", "train_gpt2.py", there, *flags, ranks=2)
    return group.finish(120)


@pytest.mark.full
def test_a_later_checkpoint_on_another_node_is_not_forgotten(tmp_path, shards):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    common = {"shards": shards, "eval_every": 100, "save_every": 4}
    assert two_nodes([a, b], steps=4, **common).code == 0
    assert two_nodes([a, b], steps=8, **common).code == 0  # nothing is newer on node 1
    assert not list_checkpoints(b / "run")
    swapped = two_nodes([b, a], steps=12, **common)
    host = os.uname().nodename
    assert swapped.code == 2 and swapped.out.count(
        f"error: node1 ({host}) holds step 8 of run, but node0 only step 0: start that machine as node 0, or "
        "copy its run to node 0. To go back, delete its later checkpoints.") == 2, swapped.out
    assert not (b / "run").exists()  # nothing was written
    shutil.copytree(a / "run", b / "run")  # as the sentence says
    assert "resuming after step 8" in two_nodes([b, a], steps=12, **common).out
    back = two_nodes([a, b], steps=16, **common)
    assert back.code == 2 and "holds step 12 of run, but node0 only step 8" in back.out, back.out
    for path in list_checkpoints(b / "run"):
        path.unlink()
    assert "resuming after step 8" in two_nodes([a, b], steps=16, **common).out
    assert "resuming after step 16" in two_nodes([a, a], steps=20, **common).out  # a shared disk
    named = two_nodes([b, a], steps=24, resume=list_checkpoints(a / "run")[-1], **common)
    assert "resuming after step" in named.out, named.out  # a file that is named is taken


# ---------------------------------------------------------------------------------- a run that is still alive


@pytest.mark.full
def test_a_run_whose_directory_another_has_taken_ends_without_writing(tmp_path, shards):
    """Removed in another terminal, and begun again there while the old run lives."""
    out = tmp_path / "run"
    old = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS), ranks=2)
    wait_for(lambda: saved_beyond(out, 20), old)
    old.send(signal.SIGSTOP, 0)  # as a slow step would
    shutil.rmtree(out)
    new = GPT2.fork(0, shards, out, steps=8, save_every=4, eval_every=8, seed=1)
    assert new.code == 0, new.out
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    old.send(signal.SIGCONT, 0)
    done = old.finish(60)
    assert done.code == 2 and done.out.count(f"error: {out} was moved, removed or ") == 2, done.out
    assert "Traceback" not in done.out and "give each run its own --out" in done.out
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert files.items() <= after.items()
    # until its next save TensorBoard's writer, which opens its file anew for each point, may make that again
    assert {path.parent.name for path in after.keys() - files.keys()} <= {"tb"}


@pytest.mark.full
def test_runs_in_two_directories_do_not_meet(tmp_path, shards):
    first = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "a", steps=200, save_every=50))
    second = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "b", steps=200, save_every=50))
    assert first.finish().code == second.finish().code == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.full
def test_a_directory_of_checkpoints_that_was_removed_is_made_by_the_next_save(tmp_path, shards):
    out = tmp_path / "run"
    group = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS))
    wait_for(lambda: saved_beyond(out, 20), group)
    remove(out / "checkpoints")
    wait_for(lambda: saved_beyond(out, 0), group)
    group.send(signal.SIGTERM)
    done = group.finish(60)
    assert done.code == 0, done.out
    step = read_checkpoint(list_checkpoints(out)[0])["step"]
    assert f"with a checkpoint of step {step}" in done.out
    again = GPT2.fork(0, shards, out, **ENDLESS | {"steps": step + 1})
    assert again.code == 0 and f"resuming after step {step}" in again.out, again.out
    assert GPT2.here("--out", out, "--prompt", "a").code == 0


def remove(path: Path) -> None:
    """Not by one rmtree: the run may write a file into it meanwhile."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("made", [False, True], ids=["removed", "made again"])
def test_a_directory_that_was_removed_ends_the_run(tmp_path, shards, made):
    """At the next save; a new directory of this name is not that of the run."""
    out = tmp_path / "run"
    group = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS), ranks=2)
    wait_for(lambda: saved_beyond(out, 20), group)
    group.send(signal.SIGSTOP, 0)
    remove(out)
    if made:
        out.mkdir()
    group.send(signal.SIGCONT, 0)
    done = group.finish(60)
    assert done.code == 2 and done.out.count(f"error: {out} was moved, removed or ") == 2, done.out
    assert not made or not any(out.iterdir())
    assert out.exists() == made


def test_a_directory_that_was_moved_ends_the_run(tmp_path, shards):
    out, moved = tmp_path / "run", tmp_path / "moved"
    group = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS), ranks=2)
    wait_for(lambda: saved_beyond(out, 20), group)
    out.rename(moved)
    done = group.finish(60)
    assert done.code == 2 and done.out.count(f"error: {out} was moved, ") == 2 and not out.exists(), done.out
    step = ddp_utils.step_of(list_checkpoints(moved)[0])
    assert f"resuming after step {step}" in GPT2.fork(0, shards, moved, **ENDLESS | {"steps": step + 1}).out


def without_locks() -> None:
    """As NFS without a lock daemon, Lustre without -o flock, and some FUSE."""
    import errno
    import fcntl

    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    fcntl.flock = flock


def test_a_file_system_without_locks_is_said_and_the_first_run_gives_way(tmp_path, shards):
    out = tmp_path / "run"
    first = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS), fault=without_locks)
    warning = f"WARNING: {out} is on a file system without locks (No locks available): make sure that no"
    wait_for(lambda: saved_beyond(out, 20), first)
    assert warning in first.text
    second = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS), fault=without_locks)
    done = first.finish(60)
    assert done.code == 2 and "taken by another run" in done.out, done.out
    assert second.all_alive
    second.kill()


def test_a_lock_that_is_held_is_never_taken(tmp_path):
    """Also not where nobody can be told, as after `| head`: a closed pipe is no file system without locks."""
    with open(tmp_path / "lock", "a") as held, open(tmp_path / "lock", "a") as other:
        assert lock_file(held, pytest.fail) == ""

        def say():
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            lock_file(other, say)


@pytest.mark.parametrize("full", [False, True])
def test_a_lock_of_the_same_run_is_not_lost(tmp_path, world, monkeypatch, full):
    """On a full disk, where nothing names the owner; where a file is numbered anew; while a disk is away."""
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    lock, path = RunLock(tmp_path / "run"), tmp_path / "run" / ".lock"
    assert not lock.lost()  # as on the other ranks
    with monkeypatch.context() as patch:
        if full:
            patch.setattr(os, "write", no_space)
        lock.acquire()
    assert not lock.lost() and bool(path.read_text()) != full
    (tmp_path / "copy").write_text(path.read_text())
    os.replace(tmp_path / "copy", path)
    assert not lock.lost()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: open(tmp_path / "run"))  # raises an OSError
        assert not lock.lost()
    path.write_text("process 1 on another")
    assert lock.lost()
    path.unlink()
    assert lock.lost()
    lock._file.close()


# ------------------------------------------------------------------------------------------------- going back


def best_of(out: Path) -> int:
    return read_checkpoint(out / "checkpoints" / "best.pt")["step"]


@pytest.mark.full
def test_the_best_after_going_back_is_of_the_same_branch(tmp_path, shards):
    """As README says: delete the later checkpoints, resume with another learning rate."""
    out, flags = tmp_path / "run", {"eval_every": 4, "save_every": 4, "keep_last": 5}
    assert GPT2.train(0, shards, out, steps=20, **flags).code == 0 and best_of(out) == 20
    assert GPT2.train(0, shards, out, steps=20, **flags).code == 0 and best_of(out) == 20  # nobody went back
    for path in list_checkpoints(out)[:2]:
        path.unlink()
    assert GPT2.train(0, shards, out, steps=20, **flags | {"lr": 5.0}).code == 0
    losses = {record["step"]: record["val_loss"] for record in evaluations_of(out)}
    assert losses[16] > losses[12] < losses[8] and best_of(out) == 12
    saved = read_checkpoint(out / "checkpoints" / "best.pt")
    assert torch.equal(saved["tensors"]["model"]["embed.weight"],
                       read_checkpoint(list_checkpoints(out)[2])["tensors"]["model"]["embed.weight"])


@pytest.mark.full
def test_what_has_no_file_is_not_the_best(tmp_path, shards):
    """A lower loss whose checkpoint is gone counts no more, one of the new branch does."""
    out, flags = tmp_path / "run", {"eval_every": 4, "save_every": 4, "keep_last": 9}
    assert GPT2.train(0, shards, out, steps=16, **flags).code == 0
    fourth, third, second, _ = list_checkpoints(out)
    for path in (fourth, third, out / "checkpoints" / "best.pt"):
        path.unlink()
    records = log_of(out)
    for record in records:
        if "val_loss" in record:
            record["val_loss"] = {4: 2.0, 8: 1.0, 12: 0.5, 16: 0.5}[record["step"]]
    (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    second.rename(tmp_path / second.name)
    done = GPT2.train(0, shards, out, steps=20, resume=tmp_path / second.name, **flags)
    assert done.code == 0 and "resuming after step 8" in done.out, done.out
    assert best_of(out) == 4  # 8, 12 and 16 were lower
    for path in (*list_checkpoints(out)[-2:], out / "checkpoints" / "best.pt"):
        path.unlink()
    assert GPT2.train(0, shards, out, steps=24, **flags).code == 0
    losses = {record["step"]: record["val_loss"] for record in evaluations_of(out) if record["step"] > 8}
    assert best_of(out) == min(losses, key=losses.get)


@pytest.mark.full
def test_the_file_that_is_resumed_from_stays(tmp_path, shards):
    out, flags = tmp_path / "run", {"eval_every": 4, "save_every": 4, "keep_last": 5}
    assert GPT2.train(0, shards, out, steps=8, **flags).code == 0
    best = out / "checkpoints" / "best.pt"
    for path in list_checkpoints(out):
        path.unlink()
    done = GPT2.train(0, shards, out, steps=12, resume=best, **flags)
    assert done.code == 0 and "resuming after step 8" in done.out, done.out
    assert list_checkpoints(out) and best.exists()


# ------------------------------------------------------- what a resumed run does not say, its checkpoint says


@pytest.mark.parametrize("script, shape", [
    pytest.param("train_gpt2.py", {"modern": True, "max_new_tokens": 5}, marks=pytest.mark.full),
    pytest.param("train_hrm.py", {"ff": 64, "h_cycles": "2:3", "l_cycles": 1, "max_new_tokens": 5},
                 marks=pytest.mark.full),
    pytest.param("train_mlm.py", {"ff": 48, "window": 16}, marks=pytest.mark.full)])
def test_a_fine_tuning_resumes_without_its_base(tmp_path, shards, script, shape):
    """With --init-from, though its weights are gone, and without: both give the bits of an undisturbed run.
    And without any flag of the shape.
    """
    trainer = Trainer(script, batch=2, **shape)
    base = tmp_path / "base"
    assert trainer.train(0, shards, base, steps=2, eval_every=2).code == 0
    plain = dict.fromkeys(("seq_len", "d_model", "n_head", "n_layer", "lr", "warmup", *shape))
    flags = plain | {"steps": 8, "save_every": 4, "eval_every": 4}
    whole = tmp_path / "whole"
    assert trainer.train(0, shards, whole, init_from=base, **flags).code == 0
    assert steps_of(whole)[0]["lr"] == 3e-5 and read_checkpoint(list_checkpoints(whole)[0])["seq_len"] == 32
    base.rename(tmp_path / "elsewhere")
    for name, given in (("with", {"init_from": base}), ("without", {})):
        copy_of_the_first_half(whole, tmp_path / name)
        done = trainer.train(0, shards, tmp_path / name, **flags | given)
        assert done.code == 0 and "resuming after step 4" in done.out, done.out
        assert_same_run(whole, tmp_path / name)
    new = trainer.train(0, shards, tmp_path / "new", **flags | {"init_from": base})
    assert new.code == 2 and f"{base} does not exist: train first, or name another run" in new.out, new.out
    assert not (tmp_path / "new").exists()


@pytest.mark.full
def test_a_run_resumes_with_its_own_shape(tmp_path, shards):
    """Without a flag of it. A flag that says the same is not refused, one that says otherwise is, by name."""
    hrm = Trainer("train_hrm.py", ff=64, h_cycles="2:3", l_cycles=1, batch=2, **PUBLISHED | {"bp_steps": 4})
    out = tmp_path / "run"
    assert hrm.train(0, shards, out, steps=2, eval_every=2).code == 0
    shape = ("seq_len", "d_model", "n_head", "n_layer", "ff", "h_cycles", "l_cycles", "init")
    bare = hrm.train(0, shards, out, steps=4, eval_every=2, **dict.fromkeys(shape))
    assert bare.code == 0 and "cycles: 2 to 3 in training" in bare.out, bare.out
    assert "resuming with steps 4 (was 2)" in bare.out and bare.out.count("resuming with") == 1, bare.out
    same = hrm.train(0, shards, out, steps=6, eval_every=2)
    assert same.code == 0 and same.out.count("resuming with") == 1, same.out
    for name, value in (("d_model", 64), ("h_cycles", "1:3"), ("h_cycles", 3), ("inject_input", True),
                        ("qk_norm", True), ("init", "identity"), ("n_layer", 2)):
        other = hrm.train(0, shards, out, steps=8, **{name: value})
        words = f"was trained with {name} .*, not {value}: leave that flag out, or start a new run"
        assert other.code == 2 and re.search(words, other.out), other.out
    used = hrm.here("--out", out, "--prompt", "a", "--max-new-tokens", "2", "--d-model", "64")
    words = "was trained with d_model 32, not 64: leave that flag out"
    assert used.code == 2 and words in used.out, used.out


# flags of which each differs from its default
OTHERS = {"lr": 2e-3, "schedule": "wsd", "warmup": 2, "weight_decay": 0.2, "grad_clip": 0.5, "ema": 0.9,
          "seed": 3, "dropout": 0.1, "batch": None, "grad_accum": 3, "keep_last": 5, "eval_batches": 1,
          "min_lr": 0, "decay": 0.7, "precision": "bf16", "checkpoint_activations": "block", "steps": 8,
          "eval_every": 4}
RUNS = {"gpt2": Trainer("train_gpt2.py", modern=True, optimizer="muon", max_new_tokens=5, temperature=0,
                        sample_every=1, **OTHERS),
        "hrm": Trainer("train_hrm.py", ff=64, h_cycles="2:3", l_cycles=1, bp_steps="2:4", max_new_tokens=5,
                       optimizer="adam-atan2", **OTHERS),
        "cycles": Trainer("train_hrm.py", ff=64, h_cycles="1:3", l_cycles=1, bp_cycles=2, inject_input=True,
                          max_new_tokens=5, **OTHERS | {"optimizer": "muon"}),
        "mlm": Trainer("train_mlm.py", ff=48, window=16, mask_rate=0.2, **OTHERS)}


@pytest.mark.parametrize("name, ranks, changes", [
    ("gpt2", 0, {}), *[pytest.param(*case, marks=pytest.mark.full) for case in (
        ("hrm", 0, {}), ("cycles", 0, {}), ("mlm", 0, {}), ("gpt2", 2, {"strategy": "zero1"}),
        ("hrm", 2, {"strategy": "zero3"}), ("mlm", 2, {"strategy": "zero3"}),
        ("cycles", 2, {"comm": "bf16"}))]])
def test_a_resumed_run_is_what_it_was(tmp_path, shards, name, ranks, changes):
    """With no flag but --out it has the bits of an undisturbed run. A flag that is given counts and is named.
    """
    trainer = RUNS[name]
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert trainer.fork(ranks, shards, whole, **changes).code == 0
    copy_of_the_first_half(whole, half)
    shutil.copytree(half, tmp_path / "other")
    bare = fork(ranks, trainer.script, "--out", half)
    assert bare.code == 0 and "resuming after step 4" in bare.out, bare.out
    assert "resuming with" not in bare.out, bare.out
    assert_same_run(whole, half)
    other = fork(ranks, trainer.script, "--out", tmp_path / "other", "--lr", "0.1", "--steps", "9")
    assert other.code == 0 and other.out.count("resuming with") == 2, other.out
    assert "resuming with lr 0.1 (was 0.002)" in other.out and "resuming with steps 9 (was 8)" in other.out
    assert steps_of(tmp_path / "other")[5]["lr"] != steps_of(whole)[5]["lr"]  # the control
    again = fork(ranks, trainer.script, "--out", whole)
    assert again.code == 0 and "this run is complete after 8 steps: give more" in again.out, again.out
    assert "--steps 16 doubles them" in again.out
    assert fork(ranks, trainer.script, "--out", whole, "--steps", "16").code == 0  # as it says
    assert steps_of(whole)[-1]["step"] == 16
    evaluated = fork(ranks, trainer.script, "--out", half, "--eval-only")
    found = json.loads([line for line in evaluated.out.splitlines() if line.startswith('{"step"')][-1])
    assert found["val_loss"] == pytest.approx(evaluations_of(half)[-1]["val_loss"], abs=1e-4), evaluated.out


@pytest.mark.parametrize("name, ranks", [
    ("gpt2", 0), *[pytest.param(*case, marks=pytest.mark.full) for case in (
        ("gpt2", 2), ("hrm", 2), ("mlm", 0), ("mlm", 2))]])
def test_a_run_goes_on_from_best_pt_if_nothing_else_is_left(tmp_path, shards, name, ranks):
    """With the bits of an undisturbed run, whose later curves it replaces. It is not taken beside others."""
    trainer = RUNS[name]
    whole, left = tmp_path / "whole", tmp_path / "left"
    assert trainer.fork(ranks, shards, whole).code == 0
    shutil.copytree(whole, left)
    newest, first = list_checkpoints(left)
    files = left / "checkpoints"
    first.replace(files / "best.pt")
    newest.write_bytes(newest.read_bytes()[:1000])
    assert list_checkpoints(left) == [newest]  # a damaged one is left
    done = fork(ranks, trainer.script, "--out", left)
    assert done.code == 2 and f"delete these to go on from {files / 'best.pt'}" in done.out, done.out
    newest.rename(f"{newest}.damaged")
    done = fork(ranks, trainer.script, "--out", left, "--eval-only")  # which only reads
    assert done.code == 0 and f"step 4 from {files / 'best.pt'}" in done.out, done.out
    done = fork(ranks, trainer.script, "--out", tmp_path / "branch", "--resume", left)
    assert done.code == 2 and f"or file, such as {files}/best.pt" in done.out, done.out
    for flags in ((), ("--resume", "none")):
        done = fork(ranks, trainer.script, "--out", left, "--steps", "9", *flags)
        words = ("but holds checkpoints/best.pt, which a new run would overwrite: give another --out, "
                 f"--resume {files}/best.pt to")
        assert done.code == 2 and words in done.out, done.out
    Path(f"{newest}.damaged").unlink()  # as it says
    shutil.copytree(left, tmp_path / "alone")
    (tmp_path / "alone" / "metrics.jsonl").unlink()
    done = fork(ranks, trainer.script, "--out", left)
    said = "only best.pt is left (step 4 of 8): going on from it; for a new run give another --out"
    assert done.code == 0 and said in done.out and said in (left / "train.log").read_text(), done.out
    assert_same_run(whole, left)
    alone = fork(ranks, trainer.script, "--out", tmp_path / "alone")  # its loss is measured again
    assert alone.code == 0 and evaluations_of(tmp_path / "alone") == evaluations_of(whole), alone.out
    best = min(evaluations_of(whole), key=lambda record: record["val_loss"])["step"]
    for run in (left, tmp_path / "alone"):
        assert ddp_utils.step_of(run / "checkpoints" / "best.pt") == best


def test_only_best_pt_is_used_and_never_replaced(tmp_path, shards, capsys):
    run = tmp_path / "run"
    assert GPT2.train(0, shards, run, steps=4, eval_every=4).code == 0
    best = run / "checkpoints" / "best.pt"
    content = best.read_bytes()
    list_checkpoints(run)[0].unlink()
    used = GPT2.here("--out", run, "--prompt", "def")
    assert used.code == 0 and f"step 4 from {best}" in capsys.readouterr().err, used.out
    new = GPT2.train(0, shards, tmp_path / "new", init_from=run, steps=1)
    assert new.code == 0, new.out
    branch = GPT2.train(0, shards, run, resume=list_checkpoints(tmp_path / "new")[0], steps=9)
    assert branch.code == 2 and f"{run} holds a different run than" in branch.out, branch.out
    assert "this run is complete after 4 steps" in GPT2.here("--out", run).out
    none = GPT2.here("--out", run, "--resume", "none")
    assert none.code == 2 and "to resume from, but holds checkpoints/best.pt" in none.out, none.out
    assert best.read_bytes() == content
    best.write_bytes(content[:1000])
    for flags in ((), ("--prompt", "def")):
        damaged = GPT2.here("--out", run, *flags)
        assert damaged.code == 2 and f"only {best} is left, and it is damaged (" in damaged.out, damaged.out
    middle = len(content) // 2
    best.write_bytes(content[:middle] + bytes(64) + content[middle + 64:])
    damaged = GPT2.here("--out", run)
    assert damaged.code == 2 and "restore one from a copy, or start from scratch" in damaged.out, damaged.out
    best.unlink()
    for name in ("hf", "model.gguf"):
        (run / name).mkdir()
        done = GPT2.here("--out", run)
        assert done.code == 2 and f"to resume from, but holds {name}, which" in done.out, done.out
        (run / name).rmdir()
    assert GPT2.train(0, shards, run, steps=4, eval_every=4).code == 0 and best.exists()  # the control


def test_a_start_that_trains_nothing_records_nothing(tmp_path, shards):
    """Other flags, or other code, of a finished run."""
    run = tmp_path / "run"
    flags = {"steps": 4, "eval_every": 4}
    assert GPT2.train(0, shards, run, **flags).code == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.suffix != ".log"
              and path.name != ".lock"}
    done = GPT2.here("--out", run, "--lr", "0.5", "--weight-decay", "0.3")
    assert done.code == 0 and "this run is complete after 4 steps" in done.out, done.out
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(before) == sum(path.is_file() for path in run.rglob("*")) - 2
    assert GPT2.here("--out", run, "--lr", "0.5", "--steps", "5").code == 0  # the control
    assert json.loads((run / "config.json").read_text())["settings"]["lr"] == 0.5


def test_what_a_resumed_run_may_not_change(tmp_path, shards):
    """Each refusal names a way on that works."""
    run, base = tmp_path / "run", tmp_path / "base"
    assert GPT2.train(0, shards, run, optimizer="muon", ema=0.9, steps=4, eval_every=4).code == 0
    files = {path: path.read_bytes() for path in run.glob("*/*.pt")}
    for name, value, was in (("optimizer", "adamw", "muon"), ("ema", "0", "0.9"), ("size", "gpt2", "tiny"),
                             ("init-from", run, "None"), ("seed", "1", "0"), ("seq-len", "16", "32")):
        done = GPT2.here("--out", run, "--steps", "8", f"--{name}", value)
        words = f"was trained with {name.replace('-', '_')} {was}, not "
        assert done.code == 2 and words in done.out, done.out
        assert f"another --out (--init-from {run}/checkpoints/step_" in done.out, done.out
    done = GPT2.here("--out", run, "--strategy", "zero2")
    assert done.code == 2 and "--optimizer muon needs whole matrices: give --strategy" in done.out, done.out
    assert files == {path: path.read_bytes() for path in run.glob("*/*.pt")}
    new = GPT2.here("--init-from", run, "--optimizer", "adamw", "--ema", "0", "--data", shards, "--out", base,
                    "--steps", "1")
    assert new.code == 0 and "WARNING: the optimizer starts from scratch" not in new.out, new.out
    assert GPT2.here("--out", run, "--optimizer", "muon", "--ema", "0.5", "--steps", "5").code == 0


@pytest.mark.full
@pytest.mark.parametrize("script", ["train_gpt2.py", "train_hrm.py", "train_mlm.py"])
def test_a_short_run_has_a_short_warm_up_and_a_run_that_has_begun_its_own(script, tmp_path, shards):
    """That of `tiny` is 30 of 300 steps or 50 of 400. In epochs, too; resumed, it does not shrink again."""
    trainer = Trainer(script, steps=20, warmup=None, global_batch=4, eval_every=50, save_every=50,
                      ff=None if "gpt2" in script else 48)
    short = tmp_path / "short"
    done = trainer.train(0, shards, short)
    size, own = (50, 400) if "mlm" in script else (30, 300)
    warmup = round(size * 20 / own)
    shrunk = f"warm-up takes {warmup} of the 20 steps, in proportion to {size} of {own}: --warmup"
    assert done.code == 0 and shrunk in done.out, done.out
    rates = [record["lr"] for record in steps_of(short)]
    assert rates[:3] == pytest.approx([1e-3 * min((s + 1) / warmup, 1) for s in range(3)], rel=0.01)
    assert rates[-1] == pytest.approx(1e-4)
    assert trainer.here("--out", short, "--steps", "24").code == 0
    assert read_checkpoint(list_checkpoints(short)[0])["settings"]["warmup"] == warmup
    assert "resuming with warmup" not in (short / "train.log").read_text()

    epochs = trainer.train(0, shards, tmp_path / "epochs", steps=None, epochs=0.01)
    assert epochs.code == 0 and f"in proportion to {size} of {own}: --warmup" in epochs.out, epochs.out

    given = trainer.train(0, shards, tmp_path / "given", warmup=30)  # as runs had it before
    assert given.code == 0 and "WARNING: the learning rate rises in 30 of 20 steps" in given.out, given.out
    assert trainer.here("--out", tmp_path / "given", "--steps", "24").code == 0
    rates = [record["lr"] for record in steps_of(tmp_path / "given")]
    assert rates[20:23] == pytest.approx([1e-3 * (s + 1) / 30 for s in (20, 21, 22)], rel=0.01)


@pytest.mark.full
def test_steps_epochs_and_batches_of_a_resumed_run(tmp_path, shards):
    """Of two flags for one thing, that which is given counts; on other processes the batches fit again."""
    run = tmp_path / "run"
    flags = {"steps": None, "batch": 3, "warmup": 0.5}
    assert GPT2.train(0, shards, run, epochs=0.01, **flags).code == 0
    steps = steps_of(run)[-1]["step"]
    assert f"this run is complete after {steps} steps" in GPT2.here("--out", run).out
    more = GPT2.here("--out", run, "--epochs", "0.02")
    assert more.code == 0 and " 3 x accumulation 4" in more.out, more.out
    assert steps_of(run)[-1]["step"] == pytest.approx(2 * steps, abs=1)
    exactly = GPT2.here("--out", run, "--steps", "40")
    assert exactly.code == 0 and steps_of(run)[-1]["step"] == 40, exactly.out
    on_two = fork(2, GPT2.script, "--out", run, "--steps", "42")
    assert on_two.code == 0 and " 3 x accumulation 2 x processes 2 = 12" in on_two.out, on_two.out
    on_three = fork(3, GPT2.script, "--out", run, "--steps", "44", "--batch", "1")
    assert on_three.code == 0 and " 1 x accumulation 4 x processes 3 = 12" in on_three.out, on_three.out
    kept = GPT2.here("--out", run, "--steps", "46", "--lr", "1e-4")
    assert kept.code == 0 and " 1 x accumulation 12 x processes 1 = 12" in kept.out, kept.out
    again = GPT2.here("--out", run)
    assert again.code == 0 and "resuming with" not in again.out, again.out
    commands = json.loads((run / "config.json").read_text())["commands"]
    of_starts = [command.removeprefix(f"python {GPT2.script} --out {run} ") for command in commands]
    assert of_starts[1:3] == ["--epochs 0.02", "--steps 40"], commands
    assert len(commands) == 6, "two starts have trained nothing"


@pytest.mark.full
def test_the_rows_of_sizes_may_have_changed_since(tmp_path, shards, monkeypatch):
    """The run's values count, also where its size is gone. Used, it needs no more than --out either."""
    import train_gpt2
    run = tmp_path / "run"
    row = train_gpt2.SIZES["tiny"] | {"n_layer": 1, "d_model": 64, "steps": 2, "ema": 0.5}
    monkeypatch.setattr(train_gpt2, "SIZES", {"tiny": train_gpt2.SIZES["tiny"], "mini": row})
    assert GPT2.here("--size", "mini", "--data", shards, "--out", run, "--seq-len", "32").code == 0
    changed = {"n_layer": 3, "lr": 1.0, "steps": 9, "global_batch": 8, "batch": 2, "ema": 0.0}
    for sizes in ({"tiny": row, "mini": row | changed}, {"tiny": row}):
        monkeypatch.setattr(train_gpt2, "SIZES", sizes)
        for flags, words in ((["--steps", "4"], "GPT2 mini"), (["--prompt", "a"], "a"), ([], "is complete"),
                             (["--eval-only"], "validation loss"), (["--export"], "is ready for")):
            done = GPT2.here("--out", run, *flags, "--max-new-tokens", "3")
            assert done.code == 0 and words in done.out, done.out
            assert "resuming with lr" not in done.out and "resuming with ema" not in done.out, done.out
    assert steps_of(run)[-1]["step"] == 4


def test_a_flag_that_is_new_to_a_run_is_as_in_the_row_of_its_size(tmp_path, shards):
    """As the trainer, which has got it since, would begin one; so are sizes with a number of ids."""
    path, out = tmp_path / "train_more.py", tmp_path / "run"
    text = (ROOT / "train_gpt2.py").read_text().replace('"tiny": dict(', '"tiny": dict(vocab_size=512, ')
    path.write_text(text)
    trainer = Trainer(str(path), max_new_tokens=3)
    assert trainer.fork(0, shards, out, steps=2).code == 0
    flag = ('    from cli.parser import flag_group\n    flag_group(parser, "mine")("--smooth", float, "")\n'
            '    return parse_flags(')
    text = text.replace("    return parse_flags(", flag)
    path.write_text(text.replace("vocab_size=512", "vocab_size=512, smooth=0.1"))
    done = fork(0, path, "--out", out, "--steps", "3")
    assert done.code == 0 and done.out.count("resuming with") == 1 and "padded to 512" in done.out, done.out
    assert json.loads((out / "config.json").read_text())["settings"]["smooth"] == 0.1


def another_processor() -> None:
    """Rank 0, to which this happens, computes in bf16 if and only if this machine does not."""
    real = compute_dtype("auto", torch.device("cpu")) == torch.bfloat16
    torch.cpu.get_capabilities = lambda: {"avx512_bf16": not real}


@pytest.mark.full
def test_processors_that_differ_resume_with_the_precision_of_the_run(tmp_path, shards):
    """Which a new run has to be given there."""
    out, unlike = tmp_path / "run", {"ranks": 2, "fault": another_processor}
    assert Group(GPT2.script, *GPT2.flags(shards, out, steps=2), **unlike).finish(120).code == 0
    bare = Group(GPT2.script, "--out", out, "--steps", "3", **unlike).finish(120)
    assert bare.code == 0 and "resuming after step 2" in bare.out, bare.out
    new = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "new", precision=None), **unlike).finish(120)
    assert new.code == 2 and new.out.count("the precision on rank 1 differs") == 2, new.out
    assert "give --precision fp32 or bf16" in new.out and not (tmp_path / "new").exists()


def test_a_start_without_a_checkpoint_is_no_resume(tmp_path, shards):
    """It begins again, says so, and both commands are kept as they were typed."""
    out = tmp_path / "run"
    prompt = 'say "\u00e9" or don\'t'
    flags = ENDLESS | {"save_every": 1_000_000, "sample_prompt": prompt}

    def begin_and_kill() -> str:
        group = Group(GPT2.script, *GPT2.flags(shards, out, **flags))
        wait_for(lambda: "step 1/" in group.text, group)
        group.kill()
        assert not list_checkpoints(out)
        return group.text

    said = f"{out} has no checkpoint yet: starting over"
    assert said not in begin_and_kill() and said in begin_and_kill()
    text = (out / "config.json").read_text(encoding="utf-8")
    first, second = json.loads(text)["commands"]
    assert first == second and shlex.split(first)[-2:] == ["--sample-prompt", prompt] and "\u00e9" in text
    assert shlex.split(second)[0] == "python"
    other = GPT2.train(0, shards, out, **flags | {"sample_prompt": "say"})
    assert other.code == 2 and other.out.endswith(f"or that command again: {first}\n"), other.out


def killed_before_a_checkpoint(run, out):
    """As a run that has logged steps, and saved none."""
    shutil.copytree(run, out)
    for path in (out / "checkpoints").iterdir():
        path.unlink()


def command_in(refusal: str) -> list[str]:
    """The words of the command that a refusal names, without python."""
    return shlex.split(re.search("or that command again: python (.*)", refusal)[1])


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_without_a_checkpoint_begins_again_with_its_command(tmp_path, shards, ranks, monkeypatch):
    """With the bits of before. Other flags, or none, are refused, with ways on that work."""
    monkeypatch.chdir(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "run"
    flags = GPT2.flags(shards, out, steps=4, lr=2e-3)
    assert fork(ranks, GPT2.script, *flags).code == 0
    out.rename(whole)
    killed_before_a_checkpoint(whole, out)
    said = (f"{out} was begun by another command and has no checkpoint yet: give another --out, --resume "
            "none to start over, or that command again: ")
    for script, *words in ((GPT2.script,), (GPT2.script, "--steps", "4"), (GPT2.script, *flags, "--lr", "1"),
                           (GPT2.script, *flags, "--tokenizer", "bytes"), ("train_hrm.py", *flags)):
        done = fork(ranks, script, *words, "--out", out)
        assert done.code == 2 and said in done.out, done.out
        command = command_in(done.out)
        assert command == [str(ROOT / GPT2.script), *flags]
        assert not list_checkpoints(out) and log_of(out) == log_of(whole)
    again = fork(ranks, *command, "--device", "cpu", "--timeout", "60")
    assert again.code == 0 and f"{out} has no checkpoint yet: starting over" in again.out, again.out
    assert_same_run(whole, out)
    assert fork(ranks, GPT2.script, "--out", out, "--steps", "5").code == 0  # it has a checkpoint now
    for path in (out / "checkpoints").iterdir():
        path.unlink()
    flags = GPT2.flags(shards, out, steps=1, seed=1)
    assert fork(ranks, GPT2.script, *flags).code == 2
    done = fork(ranks, GPT2.script, *flags, "--resume", "none")
    assert done.code == 0 and "starting over" not in done.out, done.out
    assert json.loads((out / "config.json").read_text())["settings"]["seed"] == 1
    assert fork(ranks, GPT2.script, *flags, "--out", tmp_path / "another").code == 0


def test_a_run_without_a_checkpoint_begins_again_on_other_processes(tmp_path, shards, monkeypatch):
    """Six sequences are three micro-batches of one process; two processes can't have two at a time."""
    monkeypatch.chdir(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert GPT2.train(0, shards, out, steps=2, global_batch=6, batch=2).code == 0
    out.rename(whole)
    killed_before_a_checkpoint(whole, out)
    done = GPT2.fork(2, shards, out, steps=2, global_batch=6, batch=2)
    assert done.code == 2 and "does not fit" in done.out, done.out
    again = GPT2.fork(2, shards, out, steps=2, global_batch=6, batch=3)
    assert again.code == 0 and "starting over" in again.out, again.out
    assert [r["tokens"] for r in steps_of(out)] == [r["tokens"] for r in steps_of(whole)]


@pytest.mark.parametrize("flag", ["resume", "init_from"])
def test_a_branch_without_a_checkpoint_begins_again_from_what_it_left(tmp_path, shards, monkeypatch, flag):
    monkeypatch.chdir(tmp_path)
    base, branch, out = tmp_path / "base", tmp_path / "branch", tmp_path / "run"
    assert GPT2.train(0, shards, base, steps=4).code == 0
    flags = {"steps": 6, flag: base}
    assert GPT2.train(0, shards, out, **flags).code == 0
    out.rename(branch)
    killed_before_a_checkpoint(branch, out)
    alone = GPT2.here("--out", out)
    assert alone.code == 2, alone.out
    assert command_in(alone.out) == [GPT2.script, *GPT2.flags(shards, out, **flags)]
    other = GPT2.train(0, shards, out, **flags, lr=0.5)
    assert other.code == 2 and command_in(other.out) == command_in(alone.out), other.out
    assert "--resume none" not in other.out or flag == "init_from"  # that would not branch off
    again = GPT2.here(*command_in(alone.out)[1:])
    assert again.code == 0 and ("resuming after step 4" in again.out) == (flag == "resume"), again.out
    assert_same_run(branch, out)
    assert GPT2.train(0, shards, out, **flags).code == 0  # it has a checkpoint now


def test_what_is_no_record_of_a_run_is_none(tmp_path, capsys):
    """A damaged config.json names no run; an export or a best.pt that is left has to stay."""
    def begin(given, resume="auto"):
        startup.run.refuse_unlike_begun_run(tmp_path, Namespace(resume=resume), "train_gpt2.py", given)
        return "starting over" in capsys.readouterr().out

    def write(given, commands=("python train_gpt2.py --lr 0.5",), trainer="train_gpt2.py"):
        settings = {"settings": {"trainer": trainer}, "given": given, "commands": commands}
        (tmp_path / "config.json").write_text(json.dumps(settings))

    def refused(given):
        with pytest.raises(UserError, match="begun by another command .* or that command again: ") as error:
            begin(given)
        return str(error.value)

    for text in ("", "{}", "[1]", '{"settings": [], "given": []}', '{"settings": {}, "given": {}}'):
        (tmp_path / "config.json").write_text(text)
        assert not begin({}), text
    lr = {"lr": 0.5, "window": (1, 2), "data": "\udcff"}  # JSON has neither such tuples nor such texts
    write(lr | {"data": "?", "batch": 4, "wanted_batch": 4})  # wanted_batch: as 0.1.0 could write it
    for more in ({}, {"batch": 2}, {"grad_accum": 2}, {"global_batch": 8}, {"device": "cpu"},
                 {"compile": True}, {"resume": "auto"}):
        assert begin(lr | more), more
    for more in ({"lr": 0.4}, {"size": "tiny"}, {"data": "./?"}, {"tokenizer": "bytes"}, {"mine": None}):
        assert refused(lr | more).endswith("again: python train_gpt2.py --lr 0.5"), more
    assert refused({}) and not begin({}, "none")
    write(lr | {"data": "?", "resume": "none"})
    assert begin(lr)
    write(lr | {"data": "?", "resume": "base"})  # a branch
    assert refused(lr)
    write({}, [])  # main() in a notebook
    assert refused({"lr": 1}).endswith("again: see config.json") and begin({})
    write({}, trainer="train_mine.py")
    assert refused({})
    (tmp_path / "hf").mkdir()
    for resume in ("auto", "none"):
        with pytest.raises(UserError, match="to resume from, but holds hf, which .* give another --out"):
            begin({}, resume)
    (tmp_path / "checkpoints").mkdir()  # then Checkpoints.load names what is there
    (tmp_path / "checkpoints" / "step_00000001_loss5.0.pt").touch()
    assert not begin(lr, resume="none")


# ---------------------------------------------------------------------------------------- the table of flags


def test_each_flag_that_has_a_kind_exists_and_has_one():
    """A name that isn't listed has a kind, too, so a misspelt one would go unnoticed."""
    commands = [module.parse_args([]) for module in (train_gpt2, train_hrm, train_mlm)]
    fields = {option.name for command in commands for option in flag_fields(command.config_class)}
    known = {name for command in commands for name in command.defaults}
    listed = [*NEW, *PLANNED, *FIXED, *FREE_FIELDS, *LIMITS]
    assert {*listed} - known == {"wanted_batch", "largest_batch", "loss_on", "trainer"}
    assert len({*listed}) == len(listed) and {*RECORDED} < {*NEW} and {*FREE_FIELDS} < fields
    assert not any(command.given for command in commands)


def test_flags_of_a_copy_are_its_own_whatever_others_call_theirs():
    """A copy of GPT-2 may have a --window that is no shape, and a model a top_k that is one."""
    said, now = [], {"model_config": {}, "tokenizer": "bytes", "data": "d", "loss_on": "all", "seq_len": 8,
                     "torch": "2", "settings": {"window": 5, "ema": 0.0, "init_from": None, "trainer": ""}}
    before = now | {"path": "run", "step": 1, "settings": now["settings"] | {"window": 3}}
    compare_with_saved(before, now, False, said.append)
    assert said == ["resuming with window 5 (was 3)"]

    @dataclass
    class Experts(GPT2Config):
        top_k: int = flag(2, "experts")

    command = Namespace(config_class=Experts, given={"top_k": 3})
    record = {"path": "run", "step": 1, "model_config": asdict(Experts())}
    with pytest.raises(UserError, match="run was trained with top_k 2, not 3: leave that flag out"):
        shape_from_record(command, record, True)
    command.given = {"dropout": 0.5}  # the control
    assert "dropout" not in shape_from_record(command, record, True)


@pytest.mark.parametrize("flags, precision", [
    (("--export",), "float16"), (("--eval-only",), "float16"), (("--prompt", "a"), "auto"),
    (("--export", "--precision", "fp32"), "fp32")])
def test_an_export_and_an_evaluation_have_the_precision_of_the_run(flags, precision):
    saved = {"path": "run", "settings": {"size": "tiny", "data": "stdlib", "precision": "float16"},
             "tokenizer_flag": "bytes", "tokenizer_file": None,
             "model_config": asdict(GPT2Config())}
    assert startup.run.resolve_flags(train_gpt2.parse_args([*flags]), saved).precision == precision


def test_defaults_of_a_parser_are_not_given():
    parser = make_parser("", GPT2Config, train_gpt2.SIZES)
    parser.add_argument("--every", type=parse_count, default="2k")
    parser.set_defaults(lr=1.0)
    command = parse_flags(parser, GPT2Config, train_gpt2.SIZES, [])
    args = startup.run.resolve_flags(command)
    assert command.given == {} and args.every == 2000 and args.lr == train_gpt2.SIZES["tiny"]["lr"]


@pytest.mark.full
def test_a_fine_tuned_run_resumes_without_the_folder_of_its_weights(tmp_path, shards):
    program = tmp_path / "program"
    program.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, program)
    base, out = tmp_path / "base", tmp_path / "run"
    assert GPT2.train(0, shards, base, steps=1, eval_every=1).code == 0
    tuned = {"init_from": base, "seq_len": None, "size": "tiny"}
    assert GPT2.train(0, shards, out, steps=2, **tuned).code == 0
    flags = GPT2.flags(shards, out, steps=3, **tuned)
    done = finish(start([sys.executable, program / "train_gpt2.py", *map(str, flags)], cwd=tmp_path))
    assert done.code == 0 and "resuming after step 2" in done.out, done.out


def test_a_command_line_is_parsed_once(tmp_path, shards, monkeypatch):
    """Of a new run, of one that is resumed, and with weights to start from."""
    passes = []
    parse = argparse.ArgumentParser.parse_known_args

    def counted(parser, words=None, namespace=None):
        passes.append(1)
        return parse(parser, words, namespace)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", counted)
    for flags in ({"out": tmp_path / "run"}, {"out": tmp_path / "run", "steps": 3},
                  {"out": tmp_path / "tuned", "init_from": tmp_path / "run"}):
        assert GPT2.train(0, shards, **{"steps": 2} | flags).code == 0
        assert passes.pop() and not passes


@pytest.mark.full
def test_a_fine_tuned_run_does_not_care_how_its_base_is_written(tmp_path, shards, monkeypatch):
    """Nor whether it is still there; its tokenizer is the same one under another name."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("some notes about nothing at all\n" * 3000)
    assert GPT2.train(0, shards, "base", steps=1, eval_every=1).code == 0
    tuned = {"seq_len": None, "steps": 2, "size": "tiny"}
    assert GPT2.train(0, f"text:{text}", "run", init_from="base", **tuned).code == 0
    done = GPT2.train(0, f"text:{text}", "run", init_from="base/", **tuned | {"steps": 3})
    assert done.code == 0 and "resuming with init_from base/ (was base)" in done.out, done.out
    Path("base").rename("moved")
    done = GPT2.here("--out", "run", "--steps", "4")
    assert done.code == 0 and "resuming after step 3" in done.out, done.out


@pytest.mark.full
def test_limits_of_the_data_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (json.dumps({"text": f"line {n} of many " * 40}) for n in range(300))
    Path("many.jsonl").write_text("\n".join(lines))
    assert GPT2.train(0, "jsonl:many.jsonl", "run", tokenizer="bytes", max_samples=150, steps=2).code == 0
    again = GPT2.here("--out", "run", "--data", "jsonl:many.jsonl", "--steps", "3")
    assert again.code == 0, again.out
    shutil.rmtree("shards")
    bare = GPT2.here("--out", "run", "--steps", "4")
    assert bare.code == 0 and "150 documents" in bare.out, bare.out
    assert bare.out.count("resuming with max_samples 150, as it was begun") == 1, bare.out
    Path("other.txt").write_text("another text " * 3000)
    other = GPT2.here("--out", "run", "--eval-only", "--data", "text:other.txt")
    assert other.code == 0 and "on other-" in other.out, other.out
    refused = GPT2.here("--dry-run", "--out", "run")
    assert refused.code == 2 and "--dry-run does not read the run in run: give its flags" in refused.out


# ---------------------------------------------------------------------------------------- copies of a trainer


@pytest.mark.full
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_copy_has_runs_of_its_own(tmp_path, shards, ranks, monkeypatch):
    """By default, and it is refused in those of the original, with ways on that work."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "train_mine.py"
    mine.write_text((ROOT / "train_gpt2.py").read_text().replace("objective * (", "0.5 * objective * ("))
    flags = ("--data", shards, "--seq-len", "32", "--n-layer", "1", "--d-model", "32", "--global-batch", "4",
             "--device", "cpu", "--max-new-tokens", "3")
    original, copy = Path("runs/gpt2-tiny-bytes"), Path("runs/train_mine-tiny-bytes")

    def run(script, *more):
        return fork(ranks, script, *more, cwd=tmp_path)
    assert run("train_gpt2.py", *flags, "--steps", "2").code == 0
    assert run(mine, *flags, "--steps", "2").code == 0
    assert sorted(Path("runs").iterdir()) == [original, copy]
    before = {path: path.read_bytes() for path in original.glob("*/*") if path.is_file()}
    refused = run(mine, "--out", original, "--steps", "4")
    words = "was trained with trainer train_gpt2.py, not train_mine.py: leave it as it was, or"
    assert refused.code == 2 and words in refused.out, refused.out
    assert re.search(r"\(--init-from (\S+) starts it from these weights\), or branch off with --resume \1\.",
                     refused.out)
    assert before == {path: path.read_bytes() for path in original.glob("*/*") if path.is_file()}
    branch = run(mine, "--resume", original, "--out", "branch", "--steps", "4")
    assert branch.code == 0 and "resuming with trainer train_mine.py (was train_gpt2.py)" in branch.out
    longer = run(mine, "--resume", original, "--out", "branch", "--steps", "6")  # the same command resumes it
    assert longer.code == 0 and "resuming after step 4 from branch" in longer.out, longer.out
    mixed = run(mine, "--resume", original, "--out", copy, "--steps", "9")
    assert mixed.code == 2 and f"{copy} holds a different run than {original}: give" in mixed.out
    started = run(mine, "--init-from", original, "--out", "started", "--data", shards, "--steps", "1")
    assert started.code == 0, started.out
    for script in ("train_gpt2.py", mine):  # to use a model is no change
        used = run(script, "--out", original, "--prompt", "a")
        assert used.code == 0, used.out
    assert run(mine, *flags, "--steps", "3").code == 0  # its own resumes
    renamed = tmp_path / "train_other.py"
    mine.rename(renamed)
    refused = run(renamed, "--out", copy, "--steps", "5")
    assert "was trained with trainer train_mine.py, not train_other.py" in refused.out, refused.out
    elsewhere = run(renamed, "--resume", copy, "--steps", "5")
    assert elsewhere.code == 0 and "the run is in runs/train_other-tiny-bytes" in elsewhere.out, elsewhere.out


def test_a_field_that_the_code_does_not_know_is_refused_before_anything_is_made(tmp_path, shards):
    """In the weights to start from as in the checkpoint to resume."""
    out = tmp_path / "run"
    assert GPT2.train(0, shards, out, steps=1, eval_every=1).code == 0
    path = list_checkpoints(out)[0]
    saved = torch.load(path, weights_only=True)
    saved["model_config"]["sparse"] = True
    torch.save(saved, path)
    for changes in ({"out": out}, {"out": tmp_path / "new", "init_from": out}):
        done = GPT2.train(0, shards, **changes)
        assert done.code == 2 and "sets sparse, which GPT2Config does not know: use the" in done.out, done.out
    assert not (tmp_path / "new").exists()


def test_a_dry_run_needs_the_size_of_the_weights(tmp_path):
    flags = ("--dry-run", "1x8", "--init-from", tmp_path, "--data", "stdlib")
    done = GPT2.here(*flags)
    assert done.code == 2 and "give their --size" in done.out
    assert GPT2.here(*flags, "--size", "tiny").code == 0


# ----------------------------------------------------------------------------------------- the home directory

@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A home, and beside it the directory where all commands run."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path / "here")
    return home


@pytest.mark.parametrize("module", [train_gpt2, train_hrm, train_mlm])
def test_each_flag_that_is_a_path_knows_the_home_directory(at_home, module):
    """The shell leaves the ~ in --out=~/x, and replaces it in --out ~/x."""
    named = [action for action in module.parse_args([]).parser._actions if action.nargs is None
             and not action.choices and re.search(r"director|path|\bfile", action.help or "")]
    flags = [action.option_strings[0] for action in named]
    assert flags == ["--data", "--tokenizer", "--out", "--resume", "--init-from"]
    given = module.parse_args([f"{flag}=~/x y" for flag in flags]).given
    assert {*map(str, given.values())} == {f"{at_home}/x y"}
    for data_flag, expected in {"~/a,~/b,b": f"{at_home}/a,{at_home}/b,b", "text:~/x.txt": "text:~/x.txt",
                                "hf:~/set": "hf:~/set", "stdlib": "stdlib", "a~/b": "a~/b"}.items():
        assert module.parse_args([f"--data={data_flag}"]).given["data"] == expected
    Path("~/run").mkdir(parents=True)  # as an older version made it
    assert module.parse_args(["--out=~/run"]).given["out"] == Path("~/run"), "its run goes on"


def test_commands_find_their_paths_at_home(at_home, corpus, monkeypatch, capsys):
    shutil.copy(corpus, at_home / "book.txt")
    for words in ("prepare --dataset text:~/book.txt --tokenizer bytes --out=~/shards/book",
                  "info ~/shards/book", "verify ~/shards/book", "peek ~/shards/book --rows 1"):
        monkeypatch.setattr("sys.argv", ["data.py", *words.split()])
        prepare_command.main()
    assert "checksum OK" in capsys.readouterr().out
    assert (at_home / "shards" / "book" / "manifest.json").is_file()
    flags = {"steps": 4, "save_every": 2, "eval_every": 4, "max_new_tokens": 3}
    command = ["--data=~/shards/book", "--out=~/run", *GPT2.flags(None, None, **flags)[4:]]
    assert "training complete" in (said := GPT2.here(*command).out), said
    assert f"{at_home}/run" in said and len(list_checkpoints(at_home / "run")) == 2
    resumed = GPT2.here(*command, "--resume=~/run", "--steps", "6").out
    assert "training complete" in resumed and list_checkpoints(at_home / "run")[0].name[5:13] == "00000006"
    new = [word for word in command if not word.startswith("--out")] + ["--out=~/new", "--init-from=~/run"]
    assert GPT2.here(*new, "--tokenizer=~/run/tokenizer.json").code == 0
    assert GPT2.here("--out=~/new", "--prompt", "The", "--max-new-tokens", "3").code == 0
    monitor_command.main(["~/run"])
    assert os.listdir() == [], "nothing is made here"

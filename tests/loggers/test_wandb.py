"""loggers/wandb.py: what a start tells Weights & Biases, and what its offline files hold."""

import contextlib
import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from logs import begun, record, steps_in
from runs import Trainer, log_of

from cli.errors import UserError
from loggers.wandb import WandbRun, require_wandb

TRAINER = Trainer("train_gpt2.py", steps=12, eval_every=6, max_new_tokens=2, wandb=True)


# -------------------------------------------------------------------------------------- with another package


def test_each_start_sends_all_records_to_one_run(tmp_path, monkeypatch):
    told, out = [], tmp_path / "a b"
    out.mkdir()
    run = SimpleNamespace(log=lambda found, step: told.append((step, found)), finish=told.append)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(
        Settings=dict, init=lambda **given: told.append(given) or run))
    monkeypatch.setenv("WANDB_SERVICE", "of a parent")
    begun(out).write(record(1), "")
    settings = {"began": "2026-01-01 0abc", "trainer": "x/train_my.py"}
    with contextlib.ExitStack() as at_end:
        process = SimpleNamespace(at_end=at_end, exit_code=3)
        log = begun(out, 1, lambda log: WandbRun(log, process), **settings)
        log.write(record(2), "")
    log.write(record(3), "")  # it has ended
    given, *rest = told
    assert rest == [(1, record(1)), (2, record(2)), 3] and "WANDB_SERVICE" not in os.environ
    wanted = {"id": "a-b-0abc", "project": "train_my", "name": "a b", "resume": "allow", "dir": out,
              "reinit": "create_new"}
    assert given.items() >= wanted.items() and given["config"].items() >= settings.items()


def test_a_start_that_drops_records_is_another_run_there(tmp_path, monkeypatch):
    """As after going back. What the environment says comes first."""
    init = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=init))
    for step in (0, 1, 1, 2, 1):
        begun(tmp_path, step, lambda log: WandbRun(log, mock.Mock()), trainer="x").write(record(step + 1), "")
        monkeypatch.setenv("WANDB_NAME", "its name")
    ids = [call.kwargs["id"] for call in init.call_args_list]
    assert [*map(ids.index, ids)] == [0, 0, 2, 2, 4]
    assert init.call_args.kwargs["name"] == "its name"


def fail(*_, **__):
    raise OSError("no network")


@pytest.mark.parametrize("package, why", [
    (None, "pip install wandb"),
    (SimpleNamespace(Settings=dict, init=lambda **_: SimpleNamespace(log=fail, finish=fail)), "no network")])
def test_nothing_that_wandb_raises_ends_a_run(package, why, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", package)
    process = SimpleNamespace(at_end=contextlib.ExitStack(), exit_code=0)
    log = begun(tmp_path, 0, lambda log: WandbRun(log, process), trainer="x")
    for step in (1, 2):
        log.write(record(step), "")
    process.at_end.close()
    assert capsys.readouterr().out.count(why) == 1 and steps_in(tmp_path) == [1, 2]


def test_without_the_package_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="--no-wandb"):
        require_wandb()


# ---------------------------------------------------------------------------------------- with the real one


def test_a_killed_run_sends_all_again(shards, tmp_path, monkeypatch):
    """About 10 s: wandb starts a process of its own twice. --wandb is a flag of the run."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "run"
    TRAINER.kill_after(6, 0, shards, out)
    done = TRAINER.fork(2, shards, out, wandb=None)
    assert done.code == 0, done.out
    # by the time of their start; on a busy machine the one that was killed may have left none. It has another
    # id if it had sent a step that was done again.
    *_, path = files = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    assert all(file.name.startswith("run-run-") for file in files)
    content = path.read_bytes()  # each block of 32 KiB begins with 7 bytes about it
    held = b"".join(content[at + 7:at + 32768] for at in range(0, len(content), 32768))
    assert {*steps_in(out)} == {*range(1, 13)}
    for found in log_of(out):
        assert all(json.dumps(value).encode() in held for value in found.values())
    assert json.dumps(found["val_loss"] + 1).encode() not in held  # the control
    done = TRAINER.train(0, shards, out, wandb=None, no_wandb=True, steps=14)
    assert done.code == 0 and sorted(out.glob("wandb/offline-run-*/*.wandb")) == files, done.out

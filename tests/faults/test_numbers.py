"""Numbers that go wrong on one rank, and directories that two runs want."""

import math
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from processes import Group
from runs import Trainer, steps_of, tensors_of

from ddp_utils import list_checkpoints, read_checkpoint

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5, steps=24, save_every=1, eval_every=24, keep_last=30,
               batch=6, schedule="constant", warmup=0)
STRATEGIES = ["ddp", "zero3"]


class Poison:
    """Multiplies the loss of some steps (counted from 1) by NaN or infinity, on the rank that calls this."""

    def __init__(self, steps: set[int], value: float):
        self.steps, self.value = steps, value

    def __call__(self):
        import model
        calls, forward = [0], model.GPT2.forward

        def poisoned(this, *arguments, **keywords):
            loss, stats = forward(this, *arguments, **keywords)
            if torch.is_grad_enabled():
                calls[0] += 1
                if calls[0] - self.warm_up in self.steps:
                    loss = loss * self.value
            return loss, stats

        model.GPT2.forward = poisoned

    warm_up = 3  # backward passes that come before the first step


@pytest.mark.parametrize("strategy, value", [("ddp", math.inf)] + [
    pytest.param(strategy, value, marks=pytest.mark.long) for strategy in STRATEGIES
    for value in (math.inf, math.nan) if (strategy, value) != ("ddp", math.inf)])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path, shards, strategy, value):
    """Three updates in a row on rank 1: no rank applies them, none of them is saved, and the run goes on."""
    out, flags = tmp_path / "run", {} if strategy == "ddp" else {"strategy": strategy}
    done = Group(GPT2.script, *GPT2.flags(shards, out, **flags), ranks=2, fault=Poison({10, 11, 12}, value),
                 fault_rank=1).finish()
    assert done.code == 0 and "training complete" in done.out, done.out
    bad = [record["step"] for record in steps_of(out) if record["grad_norm"] is None]
    assert bad == [10, 11, 12]
    steps = [read_checkpoint(path)["step"] for path in reversed(list_checkpoints(out))]
    assert steps == [step for step in range(1, 25) if step not in bad]
    assert {float(t) for name, t in tensors_of(out).items() if name.endswith("/step")} == {21.0}
    before, after = (read_checkpoint(list_checkpoints(out)[-n])["tensors"]["optimizer"] for n in (9, 10))
    name = next(name for name in before if name.endswith("/step"))
    assert (before[name], after[name]) == (9, 10)  # at steps 9 and 13


@pytest.mark.full
def test_ten_in_a_row_end_the_run_with_the_last_good_checkpoint_intact(tmp_path, shards):
    out = tmp_path / "run"
    done = Group(GPT2.script, *GPT2.flags(shards, out), ranks=2, fault=Poison(set(range(10, 99)), math.nan),
                 fault_rank=1).finish()
    assert done.code == 1 and "not finite 10 times in a row" in done.out, done.out
    assert "Traceback" not in done.out
    assert read_checkpoint(list_checkpoints(out)[0])["step"] == 9
    again = Group(GPT2.script, *GPT2.flags(shards, out), ranks=2).finish()
    assert again.code == 0 and "resuming after step 9" in again.out
    whole = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "whole"), ranks=2).finish()
    assert whole.code == 0
    ours, theirs = tensors_of(out), tensors_of(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def started(shards, out: Path, **flags) -> Group:
    group = Group(GPT2.script, *GPT2.flags(shards, out, **flags))
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        assert group.all_alive, group.text
        time.sleep(0.01)
    return group


def test_two_runs_in_one_directory(tmp_path, shards):
    """The second refuses, says who holds it, and changes nothing. After kill -9 of the first none blocks."""
    out = tmp_path / "run"
    endless = {"steps": 100_000, "save_every": 100_000, "eval_every": 100_000}
    first = started(shards, out, **endless)
    pid = first.processes[0].pid
    config = (out / "config.json").read_bytes()
    for ranks in (0, 2):
        second = Group(GPT2.script, *GPT2.flags(shards, out, **endless), ranks=ranks).finish()
        holder = rf"(?m)^error: .* is in use by process {pid} on \S+ since .*\.$"
        assert second.code == 1 and re.search(holder, second.out), second.out
    assert (out / "config.json").read_bytes() == config and first.all_alive
    first.kill()
    assert f"process {pid}" in (out / ".lock").read_text()  # a stale one
    assert Group(GPT2.script, *GPT2.flags(shards, out, resume="none")).finish().code == 0


def test_a_stopped_process_still_holds_its_directory(tmp_path, shards):
    """SIGSTOP is not the end: it may go on to write."""
    endless = {"steps": 100_000, "save_every": 100_000, "eval_every": 100_000}
    first = started(shards, tmp_path / "run", **endless)
    first.send(signal.SIGSTOP)
    second = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "run", **endless)).finish()
    assert second.code == 1 and "is in use by process" in second.out
    os.kill(first.processes[0].pid, signal.SIGCONT)
    first.send(signal.SIGTERM)
    assert first.finish().code == 0

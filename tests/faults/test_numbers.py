"""Numbers that go wrong on one rank, and directories that two runs want."""

import itertools
import math
import signal
import time
from functools import partial

import pytest
import torch
from processes import Group
from runs import Trainer, steps_of

from ddp_utils import list_checkpoints, read_checkpoint

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5, steps=24, save_every=1, eval_every=24, keep_last=30,
               batch=6, schedule="constant", warmup=0)
WARM_UP = 3  # backward passes that come before the first step


def poison(steps: set[int], value: float):
    """Multiplies the loss of some steps (counted from 1) by NaN or infinity, on the rank that calls this."""
    import model
    calls, forward = itertools.count(1 - WARM_UP), model.GPT2.forward

    def poisoned(self, *arguments, **keywords):
        loss, stats = forward(self, *arguments, **keywords)
        bad = torch.is_grad_enabled() and next(calls) in steps
        return loss * (value if bad else 1.0), stats

    model.GPT2.forward = poisoned


def run(shards, out, ranks=2, fault=None, **flags):
    return Group(GPT2.script, *GPT2.flags(shards, out, **flags), ranks=ranks, fault=fault, fault_rank=1)


@pytest.mark.parametrize("strategy, value", [
    ("ddp", math.inf), pytest.param("zero3", math.nan, marks=pytest.mark.full)])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path, shards, strategy, value):
    """Three updates in a row on rank 1: no rank applies them, none of them is saved, and the run goes on. Ten
    in a row end it, and the last good checkpoint is intact.
    """
    fault = partial(poison, {8, 9, 10, *range(14, 99)}, value)
    done = run(shards, tmp_path, strategy=strategy, fault=fault).finish()
    assert done.code == 1 and "10 times" in done.out and "Traceback" not in done.out, done.out
    steps = {path: read_checkpoint(path)["step"] for path in reversed(list_checkpoints(tmp_path))}
    assert [*steps.values()] == [*range(1, 8), 11, 12, 13]
    for path, step in steps.items():
        optimizer = read_checkpoint(path)["tensors"]["optimizer"]
        updates = {float(t) for name, t in optimizer.items() if name.endswith("/step")}
        assert updates == {step - 3 * (step > 10)}
    again = run(shards, tmp_path, strategy=strategy).finish()
    assert again.code == 0, again.out
    bad = {record["step"] for record in steps_of(tmp_path) if record["grad_norm"] is None}
    assert bad == {8, 9, 10} and read_checkpoint(list_checkpoints(tmp_path)[0])["step"] == 24


def test_two_runs_in_one_directory(tmp_path, shards):
    """The second refuses, says who holds it, and changes nothing, also while the first is stopped: it may go
    on to write. After kill -9 of the first none blocks.
    """
    endless = {"steps": 100_000, "save_every": 100_000, "eval_every": 100_000}
    first = run(shards, tmp_path, 0, **endless)
    while not (tmp_path / "metrics.jsonl").exists():
        assert first.all_alive, first.text
        time.sleep(0.01)
    holder = f"process {first.processes[0].pid}"
    config = (tmp_path / "config.json").read_bytes()
    for ranks in (2, 0):
        second = run(shards, tmp_path, ranks, **endless).finish()
        assert second.code == 1 and holder in second.out, second.out
        first.send(signal.SIGSTOP)
    assert (tmp_path / "config.json").read_bytes() == config and first.kill()
    assert holder in (tmp_path / ".lock").read_text()  # a stale one
    assert run(shards, tmp_path, 0, resume="none").finish().code == 0

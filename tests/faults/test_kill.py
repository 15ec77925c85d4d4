"""kill -9 at any moment: nothing that was saved is lost, and in the end it is as if nothing had happened.

A life of a run is ended by SIGKILL after a random time, or shortly after a random one of its operations on
files, which hits the middle of a save. Then the same command goes on. FAULTS_SEED repeats a choice of moments
(not what the machine does in between).
"""

import contextlib
import json
import os
import random
import re
import signal
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import children, finish, kill
from processes import Group, KillAtOperation, marked
from runs import Trainer, assert_same_run, steps_of

from ddp_utils import CHECKPOINT_NAME, list_checkpoints, read_checkpoint

SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
STEPS, KEEP, OPERATIONS = 40, 3, 120  # on files, in a run without drawings
COMMON = {"steps": STEPS, "save_every": 2, "eval_every": 20, "keep_last": KEEP, "ema": 0.9, "batch": 2}
TRAINERS = {
    "hrm": Trainer("train_hrm.py", ff=64, max_new_tokens=5, h_cycles=1, l_cycles=2, dropout=0.1, **COMMON),
    "gpt2": Trainer("train_gpt2.py", max_new_tokens=5, optimizer="muon", modern=True, **COMMON),
    "mlm": Trainer("train_mlm.py", ff=48, window=16, precision="bf16", **COMMON),
}

STRATEGY_FLAGS = {"ddp": {}, "zero3": {"strategy": "zero3", "optimizer": "adamw"}}


@dataclass
class Witness:
    """Looks at a run directory, while the run lives and after it was killed."""

    out: Path
    seen: set = field(default_factory=set)  # checkpoints that had their names at some time

    def look(self) -> None:
        self.seen |= {path.name for path in list_checkpoints(self.out)}

    def check(self) -> None:
        """Everything that has its name is whole, and nothing that had one is gone without a newer one."""
        now = list_checkpoints(self.out)
        steps = [int(CHECKPOINT_NAME.fullmatch(path.name)[1]) for path in now]
        for path in [*now, *self.out.glob("checkpoints/best.pt")]:
            read_checkpoint(path)  # raises RunError
        for name in self.seen - {path.name for path in now}:
            newer = [step for step in steps if step > int(CHECKPOINT_NAME.fullmatch(name)[1])]
            assert len(newer) >= KEEP, f"{name} was there and is gone; there are {steps}"
        strangers = [name for name in os.listdir(self.out / "checkpoints") if not (
            CHECKPOINT_NAME.fullmatch(name) or name == "best.pt" or name.startswith(".tmp-"))]
        assert not strangers
        if (self.out / "metrics.jsonl").exists():
            *lines, _ = (self.out / "metrics.jsonl").read_text().split("\n")
            logged = [record["step"] for record in map(json.loads, lines) if "loss" in record]
            assert logged == list(range(1, len(logged) + 1)), logged
        for name in ("config.json", "tokenizer.json", "history.json"):
            if (self.out / name).exists():
                json.loads((self.out / name).read_text())


def check_end(out: Path, whole: Path) -> None:
    assert_same_run(out, whole)
    assert [line["step"] for line in steps_of(out)] == list(range(1, STEPS + 1))
    assert not list(out.rglob(".tmp-*"))
    assert len(list_checkpoints(out)) >= KEEP  # more if a kill fell between a rename and an unlink


def forked_life(rng, command, ranks, witness, seconds) -> bool:
    """Runs the command until a random moment. Returns whether it was killed, or had ended before."""
    by_time = rng.random() < 0.4
    done = next((int(CHECKPOINT_NAME.fullmatch(p.name)[1]) for p in list_checkpoints(witness.out)), 0)
    left = 1.1 - done / STEPS
    operation = KillAtOperation(witness.out, rng.randrange(1, 20 + int(OPERATIONS * left)),
                                rng.choice((0, 0.01)) * rng.random())
    deadline = time.monotonic() + (rng.uniform(0.05, 0.2 + left * seconds) if by_time else 60)
    group = Group(*command, ranks=ranks, fault=None if by_time else operation,
                  fault_rank=rng.randrange(ranks or 1) if rng.random() < 0.3 else 0)
    while group.all_alive and time.monotonic() < deadline:
        witness.look()
        time.sleep(0.002)
    if by_time or -signal.SIGKILL in group.codes:  # the other ranks too, as if the machine had failed
        time.sleep(rng.choice((0, 0.1)) * rng.random())
        witness.look()
        group.kill()
        code, text = 0, ""
    else:
        done = group.finish()
        code, text = done.code, done.out
    killed = -signal.SIGKILL in group.codes
    assert killed or code == 0, text
    return killed


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, ranks, strategy, count", [
    ("gpt2", 2, "ddp", 3), pytest.param("hrm", 0, "ddp", 2, marks=pytest.mark.full),
    pytest.param("mlm", 0, "ddp", 2, marks=pytest.mark.full)] + [
    pytest.param(name, ranks, strategy, count, marks=pytest.mark.long) for name in TRAINERS
    for ranks, strategy, count in ((0, "ddp", 53), (2, "ddp", 43), (2, "zero3", 62))])
def test_kill_9(tmp_path, shards, capsys, name, ranks, strategy, count):
    """Forked processes: every life is a run of the script from its first line, but for the imports."""
    rng, kills, runs = random.Random(f"{SEED} {name} {ranks} {strategy}"), 0, 0
    trainer = TRAINERS[name]
    begun = time.monotonic()
    flags = trainer.flags(shards, tmp_path / "whole", **STRATEGY_FLAGS[strategy])
    done = Group(trainer.script, *flags, ranks=ranks).finish()
    seconds = time.monotonic() - begun
    assert done.code == 0, done.out
    resumed = set()
    while kills < count:
        out = tmp_path / f"run{runs}"
        command = trainer.script, *trainer.flags(shards, out, **STRATEGY_FLAGS[strategy])
        witness, runs = Witness(out), runs + 1
        while kills < count and (killed := forked_life(rng, command, ranks, witness, seconds)):
            kills += 1
            if (out / "checkpoints").exists():
                witness.check()
        if kills >= count and killed:
            done = Group(*command, ranks=ranks).finish()
            assert done.code == 0, done.out
        check_end(out, tmp_path / "whole")
        resumed |= set(re.findall(r"resuming after step (\d+)", (out / "train.log").read_text()))
    with capsys.disabled():
        print(f"\n  FAULTS_SEED={SEED}: {name}, {max(ranks, 1)} processes, {strategy}: {kills} kills in "
              f"{runs} runs, resumed from {len(resumed)} different steps, {time.monotonic() - begun:.0f} s ",
              end="")


def torchrun_life(rng, trainer, shards, out, witness, **flags) -> str:
    """Ends one life under torchrun with SIGKILL: of all processes, of a worker, or of torchrun."""
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTS_MARK", mark)
        process = trainer.start(2, shards, out, **flags)
    last = next((int(CHECKPOINT_NAME.fullmatch(p.name)[1]) for p in list_checkpoints(out)), 0)
    until, deadline = last + rng.randrange(1, 9), time.monotonic() + 60
    while process.poll() is None and not any(
            int(CHECKPOINT_NAME.fullmatch(p.name)[1]) >= until for p in list_checkpoints(out)):
        assert time.monotonic() < deadline, kill(process)
        witness.look()
        time.sleep(0.002)
    time.sleep(0.05 * rng.random())
    victim = rng.choice(("all", "worker", "torchrun"))
    workers = children(process.pid)
    if process.poll() is not None or not workers:
        assert finish(process).code == 0
        return "none"
    for pid in {"all": [process.pid, *workers], "worker": [rng.choice(workers)],
                "torchrun": [process.pid]}[victim]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    witness.look()
    code = finish(process).code
    deadline = time.monotonic() + 20
    while left := marked(mark):
        assert time.monotonic() < deadline, f"{len(left)} processes live on after the death of {victim}"
        time.sleep(0.05)
    return victim if code else "none"


@pytest.mark.timeout(3600)
@pytest.mark.long
@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("strategy, count", [("ddp", 5), ("zero3", 4)])
def test_kill_9_under_torchrun(tmp_path, shards, capsys, name, strategy, count):
    """Also of single processes: the others end by themselves, and what they save then counts."""
    rng, kills, runs = random.Random(f"{SEED} {name} {strategy}"), Counter(), 0
    trainer, flags = TRAINERS[name], STRATEGY_FLAGS[strategy]
    assert trainer.train(2, shards, tmp_path / "whole", **flags).code == 0
    while kills.total() < count:
        out, runs = tmp_path / f"run{runs}", runs + 1
        witness = Witness(out)
        while kills.total() < count:
            victim = torchrun_life(rng, trainer, shards, out, witness, **flags)
            if victim == "none":
                break
            kills[victim] += 1
            witness.check()
        done = trainer.train(2, shards, out, **flags)
        assert done.code == 0, done.out
        check_end(out, tmp_path / "whole")
    with capsys.disabled():
        print(f"\n  FAULTS_SEED={SEED}: {name} under torchrun, {strategy}: {dict(kills)} killed ", end="")

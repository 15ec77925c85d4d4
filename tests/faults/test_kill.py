"""kill -9 at any moment: nothing that was saved is lost, and in the end it is as if nothing had happened.

A life of a run is ended by SIGKILL after a random time, or shortly after a random one of its operations on
files, which hits the middle of a save. Then the same command goes on. FAULTS_SEED repeats a choice of moments
(not what the machine does in between).
"""

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from processes import Group, KillAtOperation
from runs import Trainer, assert_same_run, steps_of

from ddp_utils import list_checkpoints, read_checkpoint

SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
STEPS, KEEP, OPERATIONS = 30, 3, 90  # on files, in a run without drawings
COMMON = {"steps": STEPS, "save_every": 2, "eval_every": 10, "keep_last": KEEP, "ema": 0.9, "batch": 2}
TRAINERS = {
    "hrm": Trainer("train_hrm.py", ff=64, max_new_tokens=5, h_cycles=1, l_cycles=2, dropout=0.1, **COMMON),
    "gpt2": Trainer("train_gpt2.py", max_new_tokens=5, optimizer="muon", modern=True, **COMMON),
    "mlm": Trainer("train_mlm.py", ff=48, window=16, precision="bf16", **COMMON),
}
STRATEGIES = {"ddp": {}, "zero3": {"strategy": "zero3", "optimizer": "adamw"}}


def step_of(path: Path) -> int:
    return int(path.name[5:13])


class Witness:
    """Looks at a run directory, while the run lives and after it was killed."""

    def __init__(self, out: Path):
        self.out, self.seen = out, set()  # checkpoints that had their names at some time

    def last(self) -> int:
        """The step of the newest checkpoint."""
        now = list_checkpoints(self.out)
        self.seen |= {*now}
        return step_of(now[0]) if now else 0

    def check(self) -> None:
        """Everything that has its name is whole, and nothing that had one is gone without newer ones."""
        now = list_checkpoints(self.out)
        for path in [*now, *self.out.glob("checkpoints/best.pt")]:
            read_checkpoint(path)  # raises RunError
        for path in self.seen.difference(now):
            newer = [other for other in now if step_of(other) > step_of(path)]
            assert len(newer) >= KEEP, f"{path} was there and is gone; there are {now}"
        others = {*self.out.glob("checkpoints/*")} - {*now, self.out / "checkpoints" / "best.pt"}
        assert all(path.name.startswith(".tmp-") for path in others), others
        if (self.out / "metrics.jsonl").exists():
            *lines, _ = (self.out / "metrics.jsonl").read_text().split("\n")
            logged = [record["step"] for record in map(json.loads, lines) if "loss" in record]
            assert logged == list(range(1, len(logged) + 1)), logged
        for name in ("config.json", "tokenizer.json", "history.json"):
            if (self.out / name).exists():
                json.loads((self.out / name).read_text())


def life(rng, trainer, ranks, flags, witness, seconds) -> bool:
    """Runs the command until a random moment. Returns whether it was killed, or had ended before.

    Forked processes: every life is a run of the script from its first line, without the imports.
    """
    by_time, left = rng.random() < 0.4, 1.1 - witness.last() / STEPS
    operation = KillAtOperation(witness.out, rng.randrange(1, 20 + int(OPERATIONS * left)),
                                rng.choice((0, 0.01)) * rng.random())
    deadline = time.monotonic() + (rng.uniform(0.05, 0.2 + left * seconds) if by_time else 60)
    group = Group(trainer.script, *flags, ranks=ranks, fault=None if by_time else operation,
                  fault_rank=rng.randrange(ranks or 1) if rng.random() < 0.3 else 0)
    while group.all_alive and time.monotonic() < deadline:
        witness.last()
        time.sleep(0.002)
    if by_time or -signal.SIGKILL in group.codes:  # the other ranks too, as if the machine had failed
        time.sleep(rng.choice((0, 0.1)) * rng.random())
        witness.last()
        return group.kill()
    done = group.finish()
    assert done.code == 0 or -signal.SIGKILL in group.codes, done.out
    return -signal.SIGKILL in group.codes


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, ranks, strategy, count", [
    # above 10 s: each kill costs a start, and with fewer hardly any hits a save
    ("gpt2", 2, "ddp", 2),
    *(pytest.param(name, 0, "ddp", 2, marks=pytest.mark.full) for name in ("hrm", "mlm")),
    *(pytest.param(name, ranks, strategy, count, marks=pytest.mark.long) for name in TRAINERS
      for ranks, strategy, count in ((0, "ddp", 53), (2, "ddp", 43), (2, "zero3", 62)))])
def test_kill_9(tmp_path, shards, name, ranks, strategy, count):
    rng, trainer, kills = random.Random(f"{SEED} {name} {ranks} {strategy}"), TRAINERS[name], 0
    print(f"FAULTS_SEED={SEED}")  # pytest shows this if the test fails

    def finish_run(out):
        done = trainer.fork(ranks, shards, out, **STRATEGIES[strategy])
        assert done.code == 0, done.out

    begun = time.monotonic()
    finish_run(tmp_path / "whole")
    seconds = time.monotonic() - begun
    for number in itertools.count():
        witness = Witness(tmp_path / f"run{number}")
        flags = trainer.flags(shards, witness.out, **STRATEGIES[strategy])
        while kills < count and life(rng, trainer, ranks, flags, witness, seconds):
            kills += 1
            if (witness.out / "checkpoints").exists():
                witness.check()
        finish_run(witness.out)
        assert_same_run(witness.out, tmp_path / "whole")
        assert [line["step"] for line in steps_of(witness.out)] == list(range(1, STEPS + 1))
        assert not list(witness.out.rglob(".tmp-*"))
        # more if a kill fell between a rename and an unlink
        assert len(list_checkpoints(witness.out)) >= KEEP
        if kills == count:
            break

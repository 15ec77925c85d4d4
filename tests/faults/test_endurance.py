"""What shows only in a long run: memory, open files and threads stay flat, and a save costs little."""

import contextlib
import itertools
import json
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
from processes import Group
from runs import Trainer

STEPS, SAVE_EVERY, LOG_EVERY = 10_000, 100, 10


def sample(pid: int) -> tuple[int, int, int]:
    """Resident memory in bytes, open files, threads."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    return (int(status["VmRSS"].split()[0]) * 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())),
            int(status["Threads"]))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["train_gpt2.py", "train_mlm.py"])
def test_ten_thousand_steps(tmp_path, shards, capsys, script):
    """The smallest model that is one, so that what a step leaves behind shows."""
    out = tmp_path / "run"
    own = {"ff": 32} if script == "train_mlm.py" else {"max_new_tokens": 5}
    trainer = Trainer(script, steps=STEPS, save_every=SAVE_EVERY, eval_every=1000, log_every=LOG_EVERY,
                      seq_len=16, d_model=16, batch=12, **own)
    group = Group(script, *trainer.flags(shards, out))
    samples, metrics, done = [], out / "metrics.jsonl", 0
    while group.all_alive:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):  # process or line are not whole
            if (now := json.loads(metrics.read_text().splitlines()[-1])["step"]) > done:
                done = now
                samples.append((done, *sample(group.processes[0].pid)))
        time.sleep(0.05)
    finished = group.finish()
    assert finished.code == 0, finished.out[-2000:]
    late = np.array([s for s in samples if STEPS / 5 < s[0] < STEPS])
    assert len(late) > 50
    slope = np.polyfit(late[:, 0], late[:, 1], 1)[0] * 1000 / 1024
    times = [(r["step"], r["time"]) for r in map(json.loads, metrics.read_text().splitlines())]
    seconds = {b[0]: b[1] - a[1] for a, b in itertools.pairwise(times)}  # of LOG_EVERY steps up to this one
    with_save = [s for step, s in seconds.items() if step % SAVE_EVERY == LOG_EVERY != step % 1000]
    without = [s for step, s in seconds.items() if step % SAVE_EVERY not in (0, LOG_EVERY)]
    step_ms = 1000 * statistics.median(without) / LOG_EVERY
    stall_ms = 1000 * (statistics.median(with_save) - statistics.median(without))
    with capsys.disabled():
        print(f"\n  {script}: {STEPS} steps: memory {late[-1, 1] / 1e6:.0f} MB, {slope:+.0f} kB per 1,000 "
              f"steps; open files {late[:, 2].min()} to {late[:, 2].max()}, threads {late[:, 3].min()} to "
              f"{late[:, 3].max()}; a step {step_ms:.2f} ms, a save holds it up by {stall_ms:.2f} ms = "
              f"{stall_ms / step_ms:.1f} steps ", end="")
    assert slope < 500, "memory grows"
    assert late[:, 2].max() - late[:, 2].min() <= 3 and late[:, 3].max() - late[:, 3].min() <= 2
    assert stall_ms < 5 * step_ms + 10

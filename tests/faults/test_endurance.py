"""What shows only in a long run: memory, open files and threads stay flat."""

import contextlib
import json
import time

import numpy as np
import psutil
import pytest
from processes import Group
from runs import Trainer

STEPS, SAVE_EVERY, LOG_EVERY = 10_000, 100, 10


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["train_gpt2.py", "train_mlm.py"])
def test_ten_thousand_steps(tmp_path, shards, script):
    """The model is as small as one can be, so that what a step leaves behind shows."""
    own = {"ff": 32} if script == "train_mlm.py" else {"max_new_tokens": 5}
    trainer = Trainer(script, steps=STEPS, save_every=SAVE_EVERY, eval_every=1000, log_every=LOG_EVERY,
                      seq_len=16, d_model=16, batch=12, **own)
    group = Group(script, *trainer.flags(shards, tmp_path / "run"))
    samples, metrics = {}, tmp_path / "run" / "metrics.jsonl"
    while group.all_alive:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError, psutil.Error):  # not whole
            step = json.loads(metrics.read_text().splitlines()[-1])["step"]
            process = psutil.Process(group.processes[0].pid)
            samples[step] = process.memory_info().rss / 1000, process.num_fds(), process.num_threads()
        time.sleep(0.05)
    finished = group.finish()
    assert finished.code == 0, finished.out[-2000:]
    steps, late = zip(*((step, s) for step, s in samples.items() if STEPS / 5 < step < STEPS))
    assert len(late) > 50
    memory, files, threads = np.array(late).T
    assert np.polyfit(steps, memory, 1)[0] * 1000 < 500, "memory grows"
    assert np.ptp(files) <= 3 and np.ptp(threads) <= 2

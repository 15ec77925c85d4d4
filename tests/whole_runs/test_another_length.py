"""Another length of the same run: a branch of a checkpoint from before the learning rate falls."""

import pytest
import torch
from processes import fork
from runs import Trainer, ended, log_of, steps_of, tensors_of

from ddp_utils import list_checkpoints
from model import learning_rate

FLAGS = {"steps": 16, "save_every": 4, "eval_every": 8, "keep_last": 9, "warmup": 2, "schedule": "wsd",
         "min_lr": 0}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", max_new_tokens=2, **FLAGS),
            "hrm": Trainer("train_hrm.py", max_new_tokens=2, bp_steps=4, **FLAGS),
            "mlm": Trainer("train_mlm.py", **FLAGS)}


@pytest.mark.parametrize("name, ranks, changes", [("gpt2", 0, {}), *(
    pytest.param(*case, marks=pytest.mark.full) for case in (
        ("hrm", 2, {"strategy": "zero1", "ema": 0.9, "decay": 0.3}), ("mlm", 2, {})))])
def test_a_branch_has_the_bits_of_a_run_of_its_length(name, ranks, changes, shards, tmp_path):
    """One of a later checkpoint has others."""
    trainer = TRAINERS[name]

    def train(out: str, *flags, **more):
        if not flags:
            flags = trainer.flags(shards, tmp_path / out, **changes | more)
        ended(fork(ranks, trainer.script, *flags) if ranks else trainer.here(*flags))

    def after(step: int, out: str) -> list[dict]:
        return [record for record in log_of(tmp_path / out) if record["step"] > step]

    train("short")
    train("whole", steps=24)
    decay = changes.get("decay", 0.2)
    assert [record["lr"] for record in steps_of(tmp_path / "whole")] == [
        learning_rate(s, 24, 1e-3, 2, "wsd", 0, decay) for s in range(24)]
    checkpoint = {int(path.name[5:13]): path for path in list_checkpoints(tmp_path / "short")}
    for step in (8, 16):  # before and after the fall
        out = tmp_path / str(step)
        train(out.name, "--resume", checkpoint[step], "--out", out, "--steps", "24")
        ours, theirs = tensors_of(out), tensors_of(tmp_path / "whole")
        same = all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert same == (after(step, out.name) == after(step, "whole")) == (step == 8)

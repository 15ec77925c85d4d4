"""The rates of --schedule with --min-lr and --decay: as said, and in another length of the same run. As flags
of a run that is resumed: tests/test_which_run.py.
"""

import json
import re
import shlex
import shutil

import pytest
import torch
from conftest import ROOT
from processes import fork
from runs import Trainer, assert_same_run, log_of, steps_of, tensors_of
from states import flags_of
from test_own_evaluation import ranks_of

import train_gpt2
from cli.errors import UserError
from ddp_utils import list_checkpoints
from model import learning_rate

FULL = pytest.mark.full
FLAGS = {"steps": 16, "save_every": 4, "eval_every": 8, "keep_last": 9, "warmup": 2}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", max_new_tokens=2, **FLAGS),
            "hrm": Trainer("train_hrm.py", max_new_tokens=2, ff=64, bp_steps=4, **FLAGS),
            "mlm": Trainer("train_mlm.py", ff=48, window=16, **FLAGS)}


def rates(schedule: str, *ends) -> list[float]:
    return [learning_rate(s, 110, 2.0, 10, schedule, *ends) for s in range(110)]


def test_the_rate_falls_in_the_part_and_to_the_fraction_that_are_given():
    found = rates("wsd", 0, 0.5)
    assert found[10:60] == [2.0] * 50 and found[-1] == 0
    assert found[60:-1] == pytest.approx([2.0 * (1 - (s - 59.5) / 49.5) for s in range(60, 109)])
    assert rates("wsd", 0, 1)[10:] == pytest.approx([2.0 * (99 - s) / 99 for s in range(100)])  # one line
    assert rates("cosine", 0)[-1] == 0 and rates("cosine", 0.5)[-1] == 1.0
    assert rates("constant", 0, 1)[10:] == [2.0] * 100  # neither counts
    # as before there was a decay, bit for bit
    fall = [min((1 - s / 99) / 0.2, 1.0) for s in range(100)]
    assert rates("wsd", 0.1)[10:] == [2.0 * (0.1 + 0.9 * part) for part in fall[:-1]] + [2.0 * 0.1]
    assert rates("wsd", 0.1) == rates("wsd", 0.1, 0.2) != rates("wsd", 0.1, 0.21)


@pytest.mark.parametrize("flag, values, words", [
    ("--min-lr", ("1", "-0.1", "nan"), r"is not in \[0, 1\)"), ("--min-lr", ("low",), "invalid number"),
    ("--decay", ("0", "1.5", "-1", "100"), r"is not in \[0.001, 1\]")])
def test_other_numbers_are_refused_in_one_sentence(flag, values, words):
    for value in values:
        with pytest.raises(UserError, match=f"^argument {flag}: .*{words}.*; --help-all lists all flags.$"):
            train_gpt2.parse_args([flag, value])
    fine = flags_of(train_gpt2, ["--min-lr", "0", "--decay", "1"])
    usual = flags_of(train_gpt2, [])
    assert (fine.min_lr, fine.decay, usual.min_lr, usual.decay) == (0, 1, 0.1, 0.2)


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINERS)
def test_a_killed_run_has_the_same_rates(name, shards, tmp_path):
    TRAINERS[name].check_killed_run(tmp_path, 2, shards, schedule="wsd", min_lr=0, decay=0.7, steps=40)
    found = [step["lr"] for step in steps_of(tmp_path / "killed")]
    assert found == [learning_rate(s, 40, 1e-3, 2, "wsd", 0, 0.7) for s in range(40)]


# ----------------------------------------------------------------------------- another length of the same run

BLOCK = re.search(r"\*\*Another length of the same run.*?```bash\n(.*?)```",
                  (ROOT / "docs" / "running.md").read_text(), re.S)[1]


def flags_in(line: str) -> dict[str, str]:
    """The flags of a command of the guide, without those of torchrun."""
    words = shlex.split(line.partition(".py")[2])
    return {name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2])}


def tail(out, step: int) -> list[dict]:
    return [record for record in log_of(out) if record["step"] > step]


@pytest.mark.parametrize("name, ranks, changes", [
    ("gpt2", 0, {}), *[pytest.param(name, ranks, changes, marks=FULL) for name in TRAINERS
                       for ranks, changes in ((0, {}), (2, {}), (2, {"strategy": "zero1", "ema": 0.9}))]])
def test_another_length_of_the_same_run_as_the_guide_has_it(name, ranks, changes, shards, tmp_path):
    """A branch of a checkpoint from before the fall has the bits of a run that had its length from the start;
    one of a later checkpoint has others.
    """
    short, longer = map(flags_in, BLOCK.splitlines())
    assert short.keys() == {"schedule", "warmup", "steps", "keep_last", "out"}
    assert longer.keys() == {"resume", "out", "steps"}
    assert int(longer["steps"]) == 2 * int(short["steps"]) and "_00000200_" in longer["resume"]
    trainer = TRAINERS[name]
    usual = {"schedule": short["schedule"], "keep_last": short["keep_last"], "min_lr": 0} | changes
    train = ranks_of(trainer, ranks)
    assert train(shards, tmp_path / "short", **usual).code == 0
    assert train(shards, tmp_path / "whole", **usual, steps=24).code == 0
    checkpoint = {int(path.name[5:13]): path for path in list_checkpoints(tmp_path / "short")}
    begins = next(s for s in range(3, 16) if learning_rate(s, 16, 1.0, 2, "wsd", 0.1) < 1)
    assert 8 < begins < 15

    def branch(out: str, step: int):
        flags = "--resume", checkpoint[step], "--out", tmp_path / out, "--steps", "24"
        return fork(ranks, trainer.script, *flags) if ranks else trainer.here(*flags)

    done = branch("branch", 8)
    assert done.code == 0 and "resuming with steps 24 (was 16)" in done.out, done.out
    assert done.out.count("resuming with") == 1, done.out
    assert tail(tmp_path / "branch", 8) == tail(tmp_path / "whole", 8)
    ours, theirs = tensors_of(tmp_path / "branch"), tensors_of(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    ours, theirs = (json.loads((tmp_path / out / "config.json").read_text())["settings"]
                    for out in ("branch", "whole"))
    assert all(ours[key] == theirs[key] for key in ("schedule", "min_lr", "decay", "lr", "warmup", "steps"))

    shutil.copytree(tmp_path / "branch", tmp_path / "done")
    for later in list_checkpoints(tmp_path / "branch")[:-2]:  # as after a kill
        later.unlink()
    again = branch("branch", 8)
    assert again.code == 0 and "resuming after step 12" in again.out, again.out
    assert_same_run(tmp_path / "done", tmp_path / "branch")

    assert branch("late", 16).code == 0  # the control: the rate had fallen
    assert tail(tmp_path / "late", 16) != tail(tmp_path / "whole", 16)

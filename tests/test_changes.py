"""The changes of a trainer that docs/changing.md lists: each works, in no more lines than it says, touches no
other file, and a run of it that was killed resumes bit for bit.
"""

import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from runs import Trainer, assert_same_run, copy_of_the_first_half, evaluations_of, log_of, steps_of

from ddp_utils import list_checkpoints

# a heading, or a piece of code with its place and, if a heading has several, a name
PIECE = re.compile(r"^### (.+)$|^(?:\*\*(.+?)\*\*)?.*?([Bb]efore|[Ii]nstead of) `(.+?)`.*\n\n"
                   r"```python\n([\s\S]*?)^```$", re.M)
# the most lines that each may take
BOUNDS = {"an optimizer of your own": 3, "a z-loss": 1, "another schedule": 3, "a second validation set": 4,
          "a curve": 1, "norms of the gradients": 4, "a metric": 5, "the best by another number": 1,
          "early stopping": 3, "noise on the gradient": 3, "a batch that grows": 4,
          "shorter rows at first": 3, "another loss": 3, "a frozen embedding": 2,
          "a block frozen until step 1000": 5, "a loss term from inside the model": 5}
# the tests of own evaluations, own data and LoRA read these; a profile has none
ELSEWHERE = {"weighted losses and policy gradients", "a teacher", "preferences (DPO)", "data of your own",
             "an average of your own", "fine-tune with LoRA", "a profile"}
FIRST_TIER = ("an optimizer of your own", "a second validation set", "a metric", "early stopping",
              "a batch that grows")


def recipes() -> dict[str, tuple[str, str, str]]:
    """How, where and what, by name; of several pieces without a name the last."""
    found, heading = {}, ""
    for title, name, how, anchor, code in PIECE.findall((ROOT / "docs" / "changing.md").read_text()):
        heading, name = title or heading, name or heading
        if code:
            found[name[0].lower() + name[1:]] = how.lower(), anchor, code
    return found


RECIPES = recipes()
FLAGS = {"steps": 16, "save_every": 4, "eval_every": 4, "max_new_tokens": 3, "batch": 3}
PLAIN = Trainer("train_gpt2.py", **FLAGS)


def statement_at(lines: list[str], start: int) -> int:
    """Where the statement that begins at a line has ended."""
    depth = 0
    for end, line in enumerate(lines[start:], start + 1):
        depth += sum(line.count(c) for c in "([{") - sum(line.count(c) for c in ")]}")
        if not depth:
            return end


def changed(name: str, shards: Path, directory: Path, thaw: int = 6) -> Trainer:
    """A copy of the trainer of GPT-2 with this change."""
    how, anchor, code = RECIPES[name]
    lines = (ROOT / "train_gpt2.py").read_text().splitlines()
    at, = [i for i, line in enumerate(lines) if line.strip().startswith(anchor)]
    indent = lines[at][:len(lines[at]) - len(lines[at].lstrip())]
    new = [indent + line for line in code.splitlines()]
    lines[at:statement_at(lines, at) if how == "instead of" else at] = new
    path = directory / f"train_{name.replace(' ', '_').replace('-', '_')}.py"
    text = ("\n".join(lines) + "\n").replace("step < 1000", f"step < {thaw}")
    path.write_text(text.replace("shards/other", str(shards)).replace("best_step + 2000", "best_step + 4"))
    return Trainer(str(path), **FLAGS)


@pytest.fixture(scope="module")
def plain(shards, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    assert PLAIN.train(0, shards, out).code == 0
    return out


def test_the_guide_has_all_of_them():
    assert RECIPES.keys() == BOUNDS.keys() | ELSEWHERE
    for name, bound in BOUNDS.items():
        assert len(RECIPES[name][2].splitlines()) <= bound, name


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in FIRST_TIER else pytest.mark.full) for name in BOUNDS])
def test_a_change_works_and_resumes(name, plain, shards, tmp_path):
    """It has another log than the trainer as it is, and the same if it goes on from its first checkpoint."""
    trainer = changed(name, shards, tmp_path)
    # so that the loss rises from the first evaluation on
    rising = {"lr": 0} if name == "early stopping" else {}
    done = trainer.train(0, shards, tmp_path / "whole", **rising)
    assert done.code == 0, done.out
    assert log_of(tmp_path / "whole") != log_of(plain)
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    resumed = trainer.train(0, shards, tmp_path / "resumed", **rising)
    assert resumed.code == 0 and "resuming after step" in resumed.out, resumed.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    check(name, steps_of(tmp_path / "whole"), evaluations_of(tmp_path / "whole"), done.out)
    before = log_of(tmp_path / "whole")
    again = trainer.train(0, shards, tmp_path / "whole", **rising)
    assert again.code == 0 and log_of(tmp_path / "whole") == before, "it was not at its end"


def check(name: str, steps: list[dict], evaluations: list[dict], said: str) -> None:
    """That it does what it is for, where the log shows that."""
    if name == "early stopping":
        assert len(steps) < 16
    elif name == "a batch that grows":
        tokens = [step["tokens"] for step in steps]
        assert tokens[8] - tokens[7] == 2 * tokens[0] and tokens[7] == 8 * tokens[0]
    elif name == "shorter rows at first":
        assert abs(steps[3]["loss"] - steps[4]["loss"]) < 0.5  # each is the mean over its own labels
    elif name == "a second validation set":
        for e in evaluations:
            assert e["val_loss/other"] == e["val_loss/main"] == pytest.approx(e["val_loss"])
    elif name == "norms of the gradients":
        assert all(step["gradient_0"] > 0 for step in steps) and "| gradient_0 " in said
    elif name == "a metric":
        assert all(0 <= e["val_spaces"] <= 1 for e in evaluations) and "| val_spaces " in said
    elif name == "the best by another number":
        assert all(e["best_metric"] == e["val_bits_per_byte"] for e in evaluations)
        assert "best evaluation " in said
    elif name == "a loss term from inside the model":
        assert all(step["square"] > 0 for step in steps) and all(e["val_square"] > 0 for e in evaluations)
    elif name == "a curve":
        assert all(step["embed_norm"] > 0 for step in steps) and "| embed_norm " in said


@pytest.mark.parametrize("ranks, thaw, flags", [
    (0, 6, {}), (2, 2, {"strategy": "zero2"}),
    *(pytest.param(2, thaw, flags, marks=pytest.mark.full) for thaw in (6, 2) for flags in (
        {}, {"strategy": "zero1"}, {"strategy": "zero3"}, {"strategy": "zero3-offload"}, {"comm": "late"},
        {"optimizer": "muon"}, {"optimizer": "adam-atan2", "strategy": "zero1", "ema": 0.9}))])
def test_a_block_is_frozen_until_a_step_and_resumes_before_and_after_it(ranks, thaw, flags, shards, tmp_path):
    trainer = changed("a block frozen until step 1000", shards, tmp_path, thaw)
    flags |= {"n_layer": 2, "keep_last": 9}
    whole = trainer.fork(ranks, shards, tmp_path / "whole", **flags)
    assert whole.code == 0, whole.out
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    optimized = [torch.load(path, weights_only=True)["tensors"]["optimizer"]
                 for path in list_checkpoints(tmp_path / "whole")[::-1]]
    for step, tensors in zip((4, 8), optimized):
        assert any(".blocks.1." in name for name in tensors)
        assert any(".blocks.0." in name for name in tensors) == (step > thaw), "it was not frozen until then"
    resumed = trainer.fork(ranks, shards, tmp_path / "resumed", **flags)
    assert resumed.code == 0 and "resuming after step 4" in resumed.out, resumed.out
    assert "from scratch with" not in resumed.out, "nothing of the block was lost"
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.long
@pytest.mark.parametrize("name", BOUNDS)
def test_a_change_is_killed_on_two_processes(name, shards, tmp_path):
    trainer = changed(name, shards, tmp_path)
    whole = trainer.train(2, shards, tmp_path / "whole", batch=2, steps=40)
    assert whole.code == 0, whole.out
    trainer.kill_after(8, 2, shards, tmp_path / "killed", batch=2, steps=40)
    resumed = trainer.train(2, shards, tmp_path / "killed", batch=2, steps=40)
    assert resumed.code == 0 and "resuming after step" in resumed.out, resumed.out
    assert_same_run(tmp_path / "whole", tmp_path / "killed")

"""The data and the average that a user's trainer brings, as docs/changing.md says it: `run.change_data`, from
which training and --eval-only get rows, validation sets and masker, and an average instead of `state.ema`.
"""

import contextlib
import functools
import io
import json
import math
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from runs import Trainer, assert_same_run, copy_of_the_first_half, evaluations_of

import data
import ddp_utils
from ddp_utils import list_checkpoints, read_checkpoint
from prepare.pipeline import prepare

GUIDE = (ROOT / "docs" / "changing.md").read_text()
FULL, LONG = pytest.mark.full, pytest.mark.long
TOP, USE, MADE = "BETAS = ", "if uses_model(run.args):", "log, meta, "
ASK = "run.change_data = change_data"
FLAGS = {"steps": 8, "save_every": 4, "eval_every": 8, "max_new_tokens": 2, "batch": 6, "eval_batches": 2}


def code_of(heading: str) -> list[str]:
    """The pieces of code of a section of the guide."""
    section = re.search(rf"^##+ {heading}\n(.*?)(?=^##)", GUIDE, re.M | re.S)[1]
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)


SUMS, ASKED = code_of("Data of your own")
LAWA, = code_of("An average of your own")
NOISE = """import numpy as np


class Noise(data.Masker):
    def __call__(self, x, rows, epochs):
        of_epoch = data.splitmix64(self.seed ^ epochs.astype(np.uint64))
        of_row = data.splitmix64(of_epoch ^ rows.astype(np.uint64))
        t = 0.02 + 0.98 * (data.splitmix64(of_row) >> np.uint64(11)) / 2.0**53
        u = (data.splitmix64(of_row[:, None] ^ self.positions) >> np.uint64(11)) / 2.0**53
        masked = (u < t[:, None]) & ~self.special.take(x)
        labels = np.where(masked, x.astype(np.int64), -1)
        x[masked] = self.mask
        return np.broadcast_to(self.positions.astype(np.int64), x.shape).copy(), labels


def change_data(dataset):
    dataset.masker_class = Noise

"""
CODES = """import numpy as np


class Codes:
    rows, seq_len, num_tokens, dtype, label_mask = 96, 32, 96 * 32, np.dtype(np.uint16), True

    def take(self, rows, x, y):
        for i, row in enumerate(rows):
            x[i] = np.random.default_rng((7, row)).integers(0, 4096, 32)
        y[:] = (x.astype(np.int64) + 1) % 4096


def change_data(dataset):
    dataset.train, dataset.val = Codes(), {"": Codes(), "named": Codes()}
    dataset.vocab_size = 4096

"""


def changed(path, *changes: tuple[str, str], script: str = "train_gpt2.py", **flags) -> Trainer:
    """A copy of a trainer in which a text is put before the line that begins with another."""
    text = (ROOT / script).read_text()
    for new, anchor in changes:
        at, = re.finditer(rf"^( *){re.escape(anchor)}", text, re.M)
        lines = "".join(f"{at[1]}{line}".rstrip() + "\n" for line in new.splitlines())
        text = text[:at.start()] + lines + text[at.start():]
    path.write_text(text)
    return Trainer(str(path), **FLAGS | flags)


def with_data(path, code: str, **flags) -> Trainer:
    return changed(path, (code, TOP), (ASKED, USE), **flags)


def ranks_of(trainer: Trainer, ranks: int):
    """A function that trains: in this process, or in forked ones, which start faster than torchrun's."""
    return functools.partial(trainer.fork if ranks else trainer.train, ranks)


def evaluated(train, shards, out, **flags) -> dict:
    """What --eval-only says, and whether that are the losses of the log."""
    done = train(shards, out, eval_only=True, **flags)
    assert done.code == 0, done.out
    found = json.loads(next(line for line in done.out.splitlines() if line.startswith('{"step"')))
    logged = evaluations_of(out)[-1]
    found["as logged"] = all(found[key] == pytest.approx(logged[key], abs=1e-5)
                             for key in logged if key.startswith("val_"))
    return found


def assert_resumes(train, shards, tmp_path, **flags) -> None:
    """The run `whole` in tmp_path equals one that goes on from its first checkpoint."""
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    done = train(shards, tmp_path / "resumed", **flags)
    assert done.code == 0 and "resuming after step" in done.out, done.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


KINDS = {"sums": {"code": SUMS, "seq_len": 4},
         "noise": {"code": NOISE, "script": "train_mlm.py", "ff": 48, "window": 16, "max_new_tokens": None},
         "codes": {"code": CODES}}


@pytest.mark.parametrize("kind, ranks, strategy", [
    *((kind, 0, "ddp") for kind in KINDS),
    *(pytest.param(*case, marks=FULL) for case in (("sums", 2, "zero3"), ("noise", 2, "ddp")))])
def test_data_of_a_user_are_evaluated_and_resumed(kind, ranks, strategy, shards, tmp_path):
    """Rows, a masker, and ids that are not the tokenizer's."""
    trainer = with_data(tmp_path / f"train_{kind}.py", **KINDS[kind])
    train = functools.partial(ranks_of(trainer, ranks), strategy=strategy)
    done = train(shards, tmp_path / "whole")
    assert done.code == 0, done.out
    assert evaluated(train, shards, tmp_path / "whole")["as logged"]
    assert_resumes(train, shards, tmp_path)
    record = evaluations_of(tmp_path / "whole")[-1]
    if kind == "sums":  # epochs are those of these rows: 3,763 / 100 / 12
        assert "3,763 rows of 4" in done.out
        epoch = train(shards, tmp_path / "epoch", epochs=0.01, steps=None)
        assert "complete: 4 steps" in epoch.out, epoch.out
    elif kind == "codes":  # the model has as many ids, and what is of text stays away
        assert " 4,096, padded to" in done.out and "val_loss/named" in record
        assert not record.keys() & {"val_perplexity", "val_bits_per_byte"}
        assert "--lr" not in done.out and "a sample after" not in done.out, done.out
    elif not ranks:  # the control: without the hook it is another masker
        usual = Trainer("train_mlm.py", **trainer.defaults)
        assert not evaluated(functools.partial(usual.train, 0), shards, tmp_path / "whole")["as logged"]


SECOND = """def change_data(dataset):
    from pathlib import Path
    other = data.Dataset([Path(Path(FILE).read_text())], 32)
    dataset.val = {"main": dataset.val[""], "other": other.val[""]}
    dataset.fingerprint += other.fingerprint
""" + ASK


def test_a_second_validation_set_is_evaluated_and_compared(shards, tmp_path):
    """As the guide has it. Another set in its place is refused, and one of another tokenizer."""
    assert "`dataset.fingerprint += " in GUIDE
    (tmp_path / "t.txt").write_text("Once upon a time there was a test. " * 400)
    other, foreign = (prepare(f"text:{tmp_path}/t.txt", tmp_path / name[:3], name, val_split="tail:0.2")
                      for name in ("bytes", "bpe:300"))
    file, out = tmp_path / "which", tmp_path / "run"
    trainer = changed(tmp_path / "train_second.py", (SECOND.replace("FILE", repr(str(file))), USE))
    train = functools.partial(trainer.train, 0, shards)
    file.write_text(str(other))
    assert train(out).code == 0
    found = evaluated(functools.partial(trainer.train, 0), shards, out)
    assert found["as logged"] and abs(found["val_loss/main"] - found["val_loss/other"]) > 1e-3
    for second, directory, named in (shards, out, "the data"), (foreign, tmp_path / "new", str(foreign)):
        file.write_text(str(second))
        done = train(directory, steps=12)
        assert done.code == 2 and named in done.out, done.out
    assert not (tmp_path / "new").exists()


SPEAKS = """def change_data(dataset):
    nones = [name for name, value in vars(run).items() if value is None]
    run.say(f"these are None: {nones}")
    MORE
""" + ASK


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=FULL)])
def test_a_hook_speaks_before_there_is_a_directory(ranks, shards, tmp_path):
    """What it says is in train.log later. Bad data leave no directory of a run."""
    trainer = changed(tmp_path / "train_says.py", (SPEAKS.replace("MORE", "pass"), USE))
    for steps, nones in ((4, "['saved', 'metric']"), (8, "['metric']")):
        done = ranks_of(trainer, ranks)(shards, tmp_path / "run", steps=steps)
        assert done.code == 0, done.out
        for text in (done.out, (tmp_path / "run" / "train.log").read_text()):
            assert text.count(f" these are None: {nones}\n") == 1, text


@pytest.mark.parametrize("line, ranks, code, named", [
    ("dataset.train.rows = 0", 0, 2, "without rows"), ("dataset.val[''].rows = 0", 0, 2, "without rows"),
    ("run.steps", 1, 1, "'steps'"),  # which is too early
    ("dataset.train.rows -= run.world.rank", 2, 2, "rank 1"),
    pytest.param('dataset.fingerprint += f" {run.world.rank}"', 2, 2, "rank 1", marks=FULL)])
def test_data_that_are_empty_or_differ_between_ranks_are_refused(line, ranks, code, named, shards, tmp_path):
    trainer = changed(tmp_path / f"train_bad_{len(line)}.py", (SPEAKS.replace("MORE", line), USE))
    done = ranks_of(trainer, ranks)(shards, tmp_path / "run")
    assert done.code == code and named in done.out and not (tmp_path / "run").exists(), done.out


class ByEpoch(data.Shards):
    def take(self, rows, x, y, epochs):
        x[:], y[:] = epochs[:, None], rows[:, None]


def test_rows_may_depend_on_the_epoch(shards):
    rows = data.Dataset([shards], 32).train
    rows.__class__ = ByEpoch
    assert data.read_rows(rows, np.arange(2), np.array([3, 5]))[0][:, 0].tolist() == [3, 5]
    assert not data.read_rows(rows, np.arange(2))[0].any()  # an evaluation


LOSSES = """import torch

class Own(GPT2):
    def loss(self, hidden, idx, targets, **more):
        objective, sums = super().loss(hidden, idx, targets, **more)
        OWN
        return objective, sums

GPT2 = Own

"""


@pytest.mark.parametrize("line, of_text, scale", [
    ("sums['loss'] = 0.01 * sums['loss']", 2, 0.01),  # it isn't below the entropy of unigrams
    ("sums = {'loss': 0.01 * sums['loss']}", 0, 0.01)])
def test_perplexity_is_that_of_the_nats_beside_a_loss(line, of_text, scale, shards, tmp_path):
    """So is the warning. What a model says is no cross-entropy of a text has neither."""
    trainer = changed(tmp_path / f"train_loss_{of_text}.py", (LOSSES.replace("OWN", line), TOP))
    done = trainer.train(0, shards, tmp_path / "run", steps=4, eval_every=4)
    assert done.code == 0, done.out
    found = evaluations_of(tmp_path / "run")[-1]
    assert len({"val_perplexity", "val_bits_per_byte"} & found.keys()) == of_text
    assert not of_text or found["val_perplexity"] == pytest.approx(math.exp(found["val_loss"] / scale))
    assert ("--lr" in done.out) == (of_text > 0), done.out


# -------------------------------------------------------------------------------------------------- averages

AVERAGE = {"save_every": 2, "eval_every": 4, "steps": 12, "keep_last": 10, "lr": 1e-2}


@pytest.mark.parametrize("ranks, strategy", [(0, "ddp"), pytest.param(2, "zero3", marks=FULL)])
def test_an_average_of_a_user_is_what_is_evaluated_kept_and_resumed(ranks, strategy, shards, tmp_path):
    flags = AVERAGE | {"strategy": strategy}
    trainer = changed(tmp_path / f"train_lawa_{ranks}.py", (LAWA, MADE))
    train, out = ranks_of(trainer, ranks), tmp_path / "whole"
    done = train(shards, out, **flags)
    assert done.code == 0, done.out
    newest, *before = (read_checkpoint(path)["tensors"] for path in list_checkpoints(out)[:3])
    for name, tensor in newest["ema"].items():
        last = [saved["model"][name] for saved in (*before[::-1], newest)]
        # as shards, or whole, the sum of three may round otherwise
        torch.testing.assert_close(tensor, torch.stack(last).mean(0), rtol=1e-5, atol=1e-7)
        assert torch.equal(newest["kept"][name].mean(0), tensor)
    assert not torch.equal(newest["ema"]["embed.weight"], newest["model"]["embed.weight"])
    best = out / "checkpoints" / "best.pt"
    losses = {record["step"]: record["val_loss"] for record in evaluations_of(out)}
    assert losses[read_checkpoint(best)["step"]] == min(losses.values())
    usual = Trainer("train_gpt2.py", **trainer.defaults)  # --eval-only needs nothing of the average
    only = evaluated(functools.partial(usual.train, 0), shards, out, resume=best)
    assert only["val_loss"] == pytest.approx(min(losses.values()), abs=1e-5)
    assert_resumes(train, shards, tmp_path, **flags)


def test_a_resume_would_show_an_average_that_is_not_restored(shards, tmp_path):
    forgetful = LAWA.replace(', "kept": self.kept', "")
    train = functools.partial(changed(tmp_path / "train_forgetful.py", (forgetful, MADE)).train, 0)
    assert forgetful != LAWA and train(shards, tmp_path / "whole", **AVERAGE).code == 0
    with pytest.raises(AssertionError, match="differ"):
        assert_resumes(train, shards, tmp_path, **AVERAGE)


@LONG
@pytest.mark.parametrize("changes, strategy, seq_len", [
    ([(LAWA, MADE)], "zero3", 32), ([(SUMS, TOP), (ASKED, USE)], "zero1", 4)])
def test_a_trainer_of_a_user_is_killed_on_two_processes(changes, strategy, seq_len, shards, tmp_path):
    trainer = changed(tmp_path / "train_mine.py", *changes, batch=2, steps=40)
    trainer.check_killed_run(tmp_path, 2, shards, strategy=strategy, seq_len=seq_len)


# ------------------------------------------------------------------------------------- sentences of the guide


def test_the_scripts_that_use_a_run_and_what_a_checkpoint_holds(shards, tmp_path):
    losses, greedy, back = code_of("Use a run in a script")
    trainer = Trainer("train_gpt2.py", steps=4, seq_len=64, max_new_tokens=2)
    assert trainer.train(0, shards, tmp_path / "run").code == 0
    code = losses.replace("runs/gpt2-tiny-stdlib-bpe4096", str(tmp_path / "run")) + greedy + back
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    printed = out.getvalue()
    assert "(20) of 20 " in printed and ": True" in printed, printed
    said = trainer.here("--out", tmp_path / "run", "--data", shards, "--prompt", "def main(",
                        "--temperature", 0, "--max-new-tokens", 20).out
    assert said.partition("def main(")[2].strip() in printed, (said, printed)
    saved = read_checkpoint(list_checkpoints(tmp_path / "run")[0])
    table = (ROOT / "docs" / "running.md").read_text().partition("| key | content |\n|---|---|\n")[2]
    rows = dict(re.findall(r"^\| (`.+?`) \| (.+) \|$", table.partition("\n\n")[0], re.M))
    assert sorted(key for keys in rows for key in re.findall(r"`(\w+)`", keys)) == sorted(saved)
    groups = re.findall(r"`(\w+)` \(", rows["`tensors`"])
    assert tuple(groups) == ddp_utils.GROUPS == tuple(saved["tensors"])

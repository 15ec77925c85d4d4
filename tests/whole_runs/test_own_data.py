"""The data and the average that a user's trainer brings: `run.change_data`, from which training and
--eval-only get rows, validation sets and masker, and an average instead of `state.ema`.
"""

import contextlib
import functools
import io
import shlex

import numpy as np
import pytest
import torch
from copies import USE, assert_as_logged, changed, guide_blocks, ranks_of, result
from runs import Trainer, assert_same_run, copy_of_the_first_half, evaluations_of

import data
from ddp_utils import list_checkpoints, read_checkpoint
from prepare.pipeline import prepare

FULL = pytest.mark.full
TOP, MADE = "BETAS = ", "log, meta, "
ASK = "run.change_data = change_data"
SUMS, ASKED = guide_blocks("Data of your own")
# Averages the weights of the last three multiples of --save-every. `update` runs after each step. A resume
# restores `ema`, `kept` (tensors by parameter name, with zero2 and zero3 shards) and `updates`.
LAWA = """import torch
from ops.ema import EMA

class Lawa(EMA):
    def __post_init__(self):
        super().__post_init__()
        self.kept = {name: torch.stack([p.detach()] * 3) for name, p in self.params.items()}

    def state_dict(self):
        return {"ema": self.average, "kept": self.kept}

    @torch.no_grad()
    def update(self):
        self.updates += 1
        n, rest = divmod(self.updates, args.save_every)
        if rest == 0:
            for name, p in self.params.items():
                self.kept[name][(n - 1) % 3].copy_(p)
                self.average[name].copy_(self.kept[name][:n].mean(0))

state.ema = Lawa(model, 0)
"""
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
    rows, seq_len, num_tokens, dtype, label_mask = 96, 32, 96 * 32, np.dtype(np.uint16), None

    def take(self, rows, x, y):
        for i, row in enumerate(rows):
            x[i] = np.random.default_rng((7, row)).integers(0, 4096, 32)
        y[:] = (x.astype(np.int64) + 1) % 4096


def change_data(dataset):
    dataset.train, dataset.val = Codes(), {"": Codes(), "named": Codes()}
    dataset.vocab_size = 4096

"""


def assert_resumes(train, shards, tmp_path) -> None:
    """The run `whole` in tmp_path equals one that goes on from its first checkpoint."""
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    done = train(shards, tmp_path / "resumed")
    assert done.code == 0 and "resuming after step" in done.out, done.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


KINDS = {"sums": (SUMS, "gpt2", {"seq_len": 4}), "codes": (CODES, "gpt2", {}),
         "noise": (NOISE, "mlm", {"ff": 48, "window": 16, "max_new_tokens": None})}


@pytest.mark.parametrize("kind, ranks", [("sums", 0), ("codes", 0), ("noise", 0),
                                         pytest.param("noise", 2, marks=FULL)])
def test_data_of_a_user_are_evaluated_and_resumed(kind, ranks, shards, tmp_path):
    """Rows, a masker, and ids that are not the tokenizer's."""
    code, family, flags = KINDS[kind]
    script, out = f"train_{family}.py", tmp_path / "whole"
    trainer = changed(tmp_path / f"train_{kind}.py", (code, TOP), (ASKED, USE), script=script)
    train = functools.partial(ranks_of(trainer, ranks), strategy="zero3" if ranks else "ddp", **flags)
    done = train(shards, out)
    assert done.code == 0, done.out
    assert_as_logged(result(train(shards, out, eval_only=True)), out)
    assert_resumes(train, shards, tmp_path)
    if kind == "sums":  # epochs are those of these rows: 3,763 / 100 / 12
        epoch = train(shards, tmp_path / "epoch", epochs=0.01, steps=None)
        assert "complete: 4 steps" in epoch.out, epoch.out
    elif kind == "codes":  # the model has as many ids, and what is of text stays away
        record = evaluations_of(out)[-1]
        assert " 4,096, padded to" in done.out and "val_loss/named" in record
        assert not record.keys() & {"val_perplexity", "val_bits_per_byte"}
        assert "--lr" not in done.out and "a sample after" not in done.out, done.out
    elif not ranks:  # the control: without the hook it is another masker
        usual = Trainer(script, **trainer.defaults | flags).train(0, shards, out, eval_only=True)
        with pytest.raises(AssertionError):
            assert_as_logged(result(usual), out)


@pytest.mark.parametrize("family, old, new", [
    ("gpt2", "dataset.vocab_size = 4096", ""), ("mlm", "0, 4096", "0, 4096"), ("gpt2", "uint16", "float32"),
    ("gpt2", "y[:] =", "y[:] = 4096 +")])
def test_values_that_are_no_ids_end_a_run_before_its_first_step(family, old, new, shards, tmp_path):
    trainer = changed(tmp_path / f"train_{family}{len(new)}.py", (CODES.replace(old, new), TOP),
                      (ASKED, USE), script=f"train_{family}.py")
    with pytest.raises(ValueError, match="change_data"):
        trainer.train(0, shards, tmp_path / "run", **KINDS["noise"][2] if family == "mlm" else {})


SECOND = """def change_data(dataset):
    from pathlib import Path
    other = data.Dataset([Path(Path(FILE).read_text())], 32)
    dataset.val = {"main": dataset.val[""], "other": other.val[""]}
    dataset.fingerprint += other.fingerprint
""" + ASK


def test_a_second_validation_set_is_evaluated_and_compared(shards, tmp_path):
    """As the guide has it. Another set in its place is refused, and one of another tokenizer."""
    (tmp_path / "t.txt").write_text("Once upon a time there was a test. " * 400)
    other, foreign = (prepare(f"text:{tmp_path}/t.txt", tmp_path / name[:3], name, val_split="tail:0.2")
                      for name in ("bytes", "bpe:300"))
    file, out = tmp_path / "which", tmp_path / "run"
    trainer = changed(tmp_path / "train_second.py", (SECOND.replace("FILE", repr(str(file))), USE))
    train = functools.partial(trainer.train, 0, shards)
    file.write_text(str(other))
    assert train(out).code == 0
    found = result(train(out, eval_only=True))
    assert_as_logged(found, out)
    assert abs(found["val_loss/main"] - found["val_loss/other"]) > 1e-3
    for second, directory, named in (shards, out, "the data"), (foreign, tmp_path / "new", str(foreign)):
        file.write_text(str(second))
        done = train(directory, steps=12)
        assert done.code == 2 and named in done.out, done.out
    assert not (tmp_path / "new").exists()


SPEAKS = """def change_data(dataset):
    run.say("here I am")
    MORE
""" + ASK


def test_a_hook_speaks_before_there_is_a_directory(shards, tmp_path):
    """What it says is in train.log later. Bad data leave no directory of a run."""
    trainer = changed(tmp_path / "train_says.py", (SPEAKS.replace("MORE", "pass"), USE))
    for steps in 4, 8:
        done = trainer.train(0, shards, tmp_path / "run", steps=steps)
        assert done.code == 0 and done.out.count(" here I am\n") == 1, done.out
    assert (tmp_path / "run" / "train.log").read_text().count(" here I am\n") == 2


@pytest.mark.parametrize("line, ranks, code, named", [
    ("dataset.train.rows = 0", 0, 2, "without rows"), ("dataset.val[''].rows = 0", 0, 2, "without rows"),
    ("run.steps", 1, 1, "'steps'"),  # which is too early
    ("dataset.train.rows -= run.world.rank", 2, 2, "rank 1")])
def test_data_that_are_empty_or_differ_between_ranks_are_refused(line, ranks, code, named, shards, tmp_path):
    trainer = changed(tmp_path / f"train_bad_{len(line)}.py", (SPEAKS.replace("MORE", line), USE))
    done = ranks_of(trainer, ranks)(shards, tmp_path / "run")
    assert done.code == code and named in done.out and not (tmp_path / "run").exists(), done.out


def test_rows_may_depend_on_the_epoch(shards):
    def take(rows, x, y, epochs):
        x[:], y[:] = epochs[:, None], rows[:, None]

    rows = data.Dataset([shards], 32).train
    rows.take = take
    assert data.read_rows(rows, np.arange(2), np.array([3, 5]))[0][:, 0].tolist() == [3, 5]
    assert not data.read_rows(rows, np.arange(2))[0].any()  # an evaluation


# -------------------------------------------------------------------------------------------------- averages

@pytest.mark.parametrize("ranks, strategy", [(0, "ddp"), pytest.param(2, "zero3", marks=FULL)])
def test_an_average_of_a_user_is_what_is_evaluated_kept_and_resumed(ranks, strategy, shards, tmp_path):
    trainer = changed(tmp_path / f"train_lawa_{ranks}.py", (LAWA, MADE))
    train, out = functools.partial(ranks_of(trainer, ranks), strategy=strategy, save_every=2, steps=12,
                                   keep_last=10, lr=1e-2), tmp_path / "whole"
    assert train(shards, out).code == 0
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
    only = result(usual.train(0, shards, out, eval_only=True, resume=best))
    assert only["val_loss"] == pytest.approx(min(losses.values()), abs=1e-5)
    assert_resumes(train, shards, tmp_path)


def test_control_an_average_that_is_not_restored_is_noticed(shards, tmp_path):
    trainer = changed(tmp_path / "train_forgetful.py", (LAWA.replace(', "kept": self.kept', ""), MADE))
    train = functools.partial(trainer.train, 0, save_every=2, steps=12, keep_last=10, lr=1e-2)
    assert train(shards, tmp_path / "whole").code == 0
    with pytest.raises(AssertionError, match="differ"):
        assert_resumes(train, shards, tmp_path)


# ------------------------------------------------------------------------------------- sentences of the guide


def test_the_scripts_that_use_a_run(shards, tmp_path):
    losses, greedy = guide_blocks("Use a run in a script")
    trainer = Trainer("train_gpt2.py", steps=4, seq_len=64, max_new_tokens=2)
    assert trainer.train(0, shards, tmp_path / "run").code == 0
    code = losses.replace("runs/gpt2-tiny-stdlib-bpe4096", str(tmp_path / "run")) + greedy
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    text = out.getvalue().partition("\n")[2]
    flags = "--prompt 'def main(' --temperature 0 --max-new-tokens 20 --precision fp32"
    assert trainer.here("--out", tmp_path / "run", *shlex.split(flags)).out == f"def main({text}"

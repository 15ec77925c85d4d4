"""What a trainer of one's own reads and averages, as docs/changing.md says it: `run.change_data`, through
which training and --eval-only get rows, validation sets and masker; an average in the place of `state.ema`.
"""

import contextlib
import functools
import io
import math
import re
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from conftest import ROOT, place
from runs import Trainer, assert_same_run, copy_of_the_first_half, evaluations_of, steps_of, tensors_of
from test_changes import changed as row_of_the_guide
from test_evaluate import assert_as_logged, result
from test_own_evaluation import USE, changed, ranks_of
from test_pairs import pairs  # noqa: F401 (a fixture)

import data
import ddp_utils
from data import Dataset
from ddp_utils import list_checkpoints, read_checkpoint
from prepare.pipeline import prepare
from weights.sampling import first_pair

GUIDE = (ROOT / "docs" / "changing.md").read_text()
DATA = "dataset = load_data(run)"
TOP = "BETAS = "
ASK = "run.change_data = change_data"
FULL = pytest.mark.full


def code_of(heading: str) -> list[str]:
    """The pieces of code of a section of the guide."""
    section = re.search(rf"^##+ {heading}\n(.*?)(?=^##)", GUIDE, re.M | re.S)[1]
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)


SUMS, ASKED = code_of("Data of your own")
LAWA, = code_of("An average of your own")


def assert_resumes(trainer: Trainer, shards, tmp_path, ranks: int = 0, **flags) -> None:
    """The run `whole` in tmp_path equals one that goes on from its first checkpoint."""
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    done = ranks_of(trainer, ranks)(shards, tmp_path / "resumed", **flags)
    assert done.code == 0 and "resuming after step" in done.out, done.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


# ------------------------------------------------------------------------------------------------ the guide's


SMALL_ROWS = {"seq_len": 4, "eval_batches": 0, "eval_every": 8}


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=FULL)])
def test_rows_of_ones_own_are_evaluated_and_resumed(ranks, shards, tmp_path):
    trainer = changed(tmp_path / "train_sums.py", (SUMS, TOP), (ASKED, USE))
    done = ranks_of(trainer, ranks)(shards, tmp_path / "whole", **SMALL_ROWS)
    assert done.code == 0 and "3,763 rows of 4" in done.out, done.out
    only = ranks_of(trainer, ranks)(shards, tmp_path / "whole", eval_only=True, **SMALL_ROWS)
    assert_as_logged(result(only), tmp_path / "whole")
    assert_resumes(trainer, shards, tmp_path, ranks, **SMALL_ROWS)
    # the epochs are those of these rows
    epoch = trainer.train(0, shards, tmp_path / "epoch", epochs=0.01, steps=None, **SMALL_ROWS)
    assert "training complete: 4 steps" in epoch.out, epoch.out  # 3,763 / 100 / 12


@FULL
def test_what_is_replaced_after_load_data_is_unknown_to_eval_only(shards, tmp_path):
    """Which the test above would notice."""
    trainer = changed(tmp_path / "train_own_late.py", (SUMS, TOP), (f"={DATA}\nchange_data(dataset)", DATA))
    assert trainer.train(0, shards, tmp_path / "run", **SMALL_ROWS).code == 0
    found = result(trainer.train(0, shards, tmp_path / "run", eval_only=True, **SMALL_ROWS))
    with pytest.raises(AssertionError):
        assert_as_logged(found, tmp_path / "run")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=FULL)])
def test_eval_only_has_the_second_validation_set_with_other_data_too(ranks, shards, tmp_path):
    (tmp_path / "t.txt").write_text("Once upon a time there was a test. " * 400)
    other = prepare(f"text:{tmp_path}/t.txt", tmp_path / "other", "bytes", val_split="tail:0.2")
    trainer = row_of_the_guide("a second validation set", other, tmp_path)
    run = functools.partial(trainer.fork, ranks)  # another test has imported a file of this name
    done = run(shards, tmp_path / "run", steps=8)
    assert done.code == 0, done.out
    found = result(run(shards, tmp_path / "run", eval_only=True))
    assert_as_logged(found, tmp_path / "run")
    assert abs(found["val_loss/main"] - found["val_loss/other"]) > 1e-3
    swapped = result(run(other, tmp_path / "run", eval_only=True))
    assert swapped["val_loss/main"] == swapped["val_loss/other"] == pytest.approx(found["val_loss/other"])


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
MLM = {"ff": 48, "window": 16, "max_new_tokens": None}


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=FULL)])
def test_a_masker_is_that_of_eval_only(ranks, shards, tmp_path):
    trainer = changed(tmp_path / "train_noise.py", (NOISE, TOP), (ASKED, USE), script="train_mlm.py")
    done = ranks_of(trainer, ranks)(shards, tmp_path / "whole", **MLM)
    assert done.code == 0, done.out
    only = ranks_of(trainer, ranks)(shards, tmp_path / "whole", eval_only=True, **MLM)
    assert_as_logged(result(only), tmp_path / "whole")
    assert_resumes(trainer, shards, tmp_path, ranks, **MLM)
    usual = Trainer("train_mlm.py", **trainer.defaults)  # without the hook: the usual masker
    found = result(usual.train(0, shards, tmp_path / "whole", eval_only=True, **MLM))
    with pytest.raises(AssertionError):
        assert_as_logged(found, tmp_path / "whole")


# -------------------------------------------------------------------------- what else people do with the hook


KEPT = """import numpy as np


class Kept:
    def __init__(self, rows, kept):
        self.set, self.kept = rows, kept
        self.rows, self.seq_len, self.dtype = len(kept), rows.seq_len, rows.dtype
        self.num_tokens = self.rows * self.seq_len
        self.label_mask = True

    def take(self, rows, x, y):
        self.set.take(self.kept[rows], x, y)


def rows_without(rows, token):
    x = data.read_rows(rows, np.arange(rows.rows))[0]
    return Kept(rows, np.flatnonzero((x != token).all(1)))


def change_data(dataset):
    dataset.train = rows_without(dataset.train, TOKEN)
    for name, rows in dataset.val.items():
        dataset.val[name] = rows_without(rows, TOKEN)

"""


@FULL
@pytest.mark.parametrize("ranks", [0, 2])
def test_rows_are_taken_away(ranks, shards, tmp_path):
    """All but some; all of the training; all of a validation set."""
    some = KEPT.replace("TOKEN", str(ord("q")))
    trainer = changed(tmp_path / "train_some.py", (some, TOP), (ASKED, USE))
    done = ranks_of(trainer, ranks)(shards, tmp_path / "whole")
    assert done.code == 0, done.out
    rows = Dataset([shards], 32).train.rows
    assert 0 < int(re.search(r"([\d,]+) rows of 32", done.out)[1].replace(",", "")) < rows, done.out
    only = ranks_of(trainer, ranks)(shards, tmp_path / "whole", eval_only=True)
    assert_as_logged(result(only), tmp_path / "whole")
    assert_resumes(trainer, shards, tmp_path, ranks)
    everything = KEPT.replace("TOKEN", "0").replace("(x != token)", "(x > 999)")
    for name, text in (("all", everything), ("val", re.sub("    dataset.train = .*\n", "", everything))):
        none = changed(tmp_path / f"train_{name}.py", (text, TOP), (ASKED, USE))
        done = ranks_of(none, ranks)(shards, tmp_path / name)
        assert done.code and "leaves a set without rows" in done.out, done.out
        assert "Traceback" not in done.out and not list_checkpoints(tmp_path / name), done.out


GENERATED = """import numpy as np


class Generated:
    rows, seq_len, num_tokens, dtype, label_mask = 10**6, 32, 32 * 10**6, np.dtype(np.uint16), True

    def take(self, rows, x, y):
        for i, row in enumerate(rows):
            x[i] = np.random.default_rng((7, row)).integers(0, 8, 32)
        y[:] = x.cumsum(1) % 8


def change_data(dataset):
    dataset.train = Generated()
    dataset.val["named"] = Generated()

"""


@FULL
@pytest.mark.parametrize("ranks, strategy", [(0, "ddp"), (2, "zero3")])
def test_synthetic_rows_and_a_named_set(ranks, strategy, shards, tmp_path):
    flags = {"strategy": strategy}
    trainer = changed(tmp_path / "train_generated.py", (GENERATED, TOP), (ASKED, USE))
    done = ranks_of(trainer, ranks)(shards, tmp_path / "whole", **flags)
    assert done.code == 0, done.out
    record = evaluations_of(tmp_path / "whole")[-1]
    assert record["val_loss/named"] != record["val_loss"]
    assert_as_logged(result(ranks_of(trainer, ranks)(shards, tmp_path / "whole", eval_only=True, **flags)),
                     tmp_path / "whole")
    assert_resumes(trainer, shards, tmp_path, ranks, **flags)


@FULL
def test_filtered_pairs_have_a_sample(pairs, tmp_path):
    """The prompt of a sample is the first held-out row, whatever holds it."""
    seq_len = data.read_manifest(pairs)["row"]
    flags = {"seq_len": seq_len, "eval_batches": 1, "attention": "isolated"}
    trainer = changed(tmp_path / "train_own_pairs.py", (KEPT.replace("TOKEN", "999"), TOP), (ASKED, USE))
    usual = Trainer("train_gpt2.py", **trainer.defaults)
    for out, some in (("kept", trainer), ("usual", usual)):
        done = some.train(0, pairs, tmp_path / out, **flags)
        assert done.code == 0, done.out
    assert evaluations_of(tmp_path / "kept") == evaluations_of(tmp_path / "usual")
    kept, whole = Dataset([pairs], seq_len), Dataset([pairs], seq_len)
    scope = {"data": data}
    exec(KEPT.replace("TOKEN", "999"), scope)
    scope["change_data"](kept)
    assert first_pair(kept) == first_pair(whole) != ("", "")


def test_processes_and_resumes_compare_the_fingerprint(shards, tmp_path):
    (tmp_path / "t.txt").write_text("Once upon a time there was a test. " * 400)
    other = prepare(f"text:{tmp_path}/t.txt", tmp_path / "other", "bytes", val_split="tail:0.2")
    line = "dataset.fingerprint += other.fingerprint"
    assert f"`{line}`" in GUIDE

    def compared(directory) -> Trainer:
        trainer = row_of_the_guide("a second validation set", directory, tmp_path)
        path = Path(trainer.script)
        text = re.sub(r"^( +)dataset.val.update.*$", rf"\g<0>\n\1{line}", path.read_text(), flags=re.M)
        path.write_text(text)
        assert line in path.read_text()
        return trainer

    same = compared(shards)
    assert same.fork(1, shards, tmp_path / "run", steps=4).code == 0
    assert compared(other).script == same.script
    done = same.fork(1, shards, tmp_path / "run", steps=8)
    assert done.code == 2 and "was trained with the data " in done.out, done.out


def test_three_fields_of_a_run_may_be_none():
    """None doesn't say that it is too early: such a field is missing."""
    may = {name for name, kind in get_type_hints(ddp_utils.Run).items() if type(None) in get_args(kind)}
    assert may == {"saved", "metric", "change_data"}


SPEAKS = """def change_data(dataset):
    nones = [name for name, value in vars(run).items() if value is None]
    run.say(f"these are None: {nones}")
    MORE
run.change_data = change_data"""


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=FULL)])
def test_a_hook_speaks_before_there_is_a_directory(ranks, shards, tmp_path):
    """What it says is in train.log later. Bad data leave no directory of a run."""
    trainer = changed(tmp_path / "train_says.py", (SPEAKS.replace("MORE", "pass"), USE))
    for steps, nones in ((4, "['saved', 'metric']"), (8, "['metric']")):
        done = ranks_of(trainer, ranks)(shards, tmp_path / "run", steps=steps)
        assert done.code == 0, done.out
        for text in (done.out, (tmp_path / "run" / "train.log").read_text()):
            assert text.count(f" these are None: {nones}\n") == 1, text
    for line, said in (("dataset.train.rows = 0", "leaves a set without rows"),
                       ("run.steps", "no attribute 'steps'")):  # which is too early
        bad = changed(tmp_path / "train_bad.py", (SPEAKS.replace("MORE", line), USE))
        done = bad.fork(ranks, shards, tmp_path / "bad")
        assert done.code and said in done.out and not (tmp_path / "bad").exists(), done.out


@pytest.mark.parametrize("line", [
    pytest.param('dataset.fingerprint += f" {run.world.rank}"', marks=FULL),
    "dataset.train.rows -= run.world.rank"])
def test_data_that_differ_between_ranks_are_refused(line, shards, tmp_path):
    text = f"def change_data(dataset):\n    {line}\n"
    done = changed(tmp_path / "train_ranks.py", (text + ASK, USE)).fork(2, shards, tmp_path / "run")
    assert done.code and "the data on rank 1 differs" in done.out, done.out


@FULL
def test_eval_only_refuses_a_set_of_another_tokenizer(shards, tmp_path):
    (tmp_path / "t.txt").write_text("Once upon a time there was a test. " * 400)
    other = prepare(f"text:{tmp_path}/t.txt", tmp_path / "other", "bpe:300", val_split="tail:0.2")
    run = tmp_path / "run"
    assert Trainer("train_gpt2.py", steps=4, max_new_tokens=2).train(0, shards, run).code == 0
    trainer = row_of_the_guide("a second validation set", other, tmp_path)
    for flags in ({"out": run, "eval_only": True}, {"out": tmp_path / "new"}):
        done = trainer.fork(1, shards, **flags)
        assert done.code == 2 and "other has another tokenizer" in done.out, done.out


class ByEpoch(data.Shards):
    def take(self, rows, x, y, epochs):
        x[:], y[:] = epochs[:, None], rows[:, None]


def test_rows_may_depend_on_the_epoch(shards):
    rows = Dataset([shards], 32).train
    rows.__class__, rows.rows = ByEpoch, 4
    loader = data.Loader(rows, 4, place(0, 1), 0)
    assert [loader.step(1)[1][0][0].unique().tolist() for _ in range(3)] == [[0], [1], [2]]
    loader.close()
    assert not data.read_rows(rows, np.arange(2))[0].any()  # an evaluation


CODES = """import numpy as np


class Codes:
    rows, seq_len, num_tokens, dtype, label_mask = 96, 32, 96 * 32, np.dtype(np.uint16), True

    def take(self, rows, x, y):
        for i, row in enumerate(rows):
            x[i] = np.random.default_rng((7, row)).integers(0, IDS, 32)
        y[:] = (x.astype(np.int64) + 1) % IDS


def change_data(dataset):
    dataset.train, dataset.val = Codes(), {"": Codes()}
    dataset.vocab_size = IDS

"""


@pytest.mark.parametrize("ids", [4096, 5])
def test_ids_that_are_not_the_tokenizers(ids, shards, tmp_path):
    """A model has as many, and what is of text stays away."""
    trainer = changed(tmp_path / f"train_codes_{ids}.py", (CODES.replace("IDS", str(ids)), TOP), (ASKED, USE))
    done = trainer.train(0, shards, tmp_path / "whole")
    assert done.code == 0 and f" {ids:,}, padded to" in done.out, done.out
    assert not evaluations_of(tmp_path / "whole")[-1].keys() & {"val_perplexity", "val_bits_per_byte"}
    assert "try a lower --lr" not in done.out and "a sample after" not in done.out, done.out
    assert_as_logged(result(trainer.train(0, shards, tmp_path / "whole", eval_only=True)), tmp_path / "whole")
    assert_resumes(trainer, shards, tmp_path)


LOSSES = """import torch

class Own(GPT2):
    def loss(self, hidden, idx, targets, **more):
        objective, sums = super().loss(hidden, idx, targets, **more)
        OWN
        return objective, sums

GPT2 = Own

"""


@pytest.mark.parametrize("line, of_text, scale, warned", [
    ("objective = objective + hidden.square().sum()", 2, 1, True),
    ("sums['loss'] = 0.01 * sums['loss']", 2, 0.01, True),  # it isn't below the entropy of unigrams
    ("sums = {'loss': 0.01 * sums['loss']}", 0, 0.01, False)])
def test_perplexity_is_that_of_the_nats_beside_a_loss(line, of_text, scale, warned, shards, tmp_path):
    """Also the warning. What a model says is no cross-entropy of a text has neither."""
    trainer = changed(tmp_path / f"train_loss_{len(line)}.py", (LOSSES.replace("OWN", line), TOP))
    done = trainer.train(0, shards, tmp_path / "run", steps=4, eval_every=4)
    assert done.code == 0, done.out
    found = evaluations_of(tmp_path / "run")[-1]
    assert len({"val_perplexity", "val_bits_per_byte"} & found.keys()) == of_text
    assert not of_text or found["val_perplexity"] == pytest.approx(math.exp(found["val_loss"] / scale))
    assert ("try a lower --lr" in done.out) == warned, done.out


# ------------------------------------------------------------------------------------ an average of one's own


AVERAGE = {"save_every": 2, "eval_every": 4, "steps": 12, "keep_last": 10, "lr": 1e-2}


def mean_of_last_three(out) -> dict[str, torch.Tensor]:
    saved = [read_checkpoint(path)["tensors"]["model"] for path in list_checkpoints(out)[:3]]
    return {name: torch.stack([tensors[name] for tensors in saved[::-1]]).mean(0) for name in saved[0]}


@pytest.mark.parametrize("ranks, strategy", [
    (0, "ddp"), pytest.param(2, "ddp", marks=FULL), pytest.param(2, "zero1", marks=FULL), (2, "zero3")])
def test_an_average_of_ones_own_is_what_is_evaluated_kept_and_resumed(ranks, strategy, shards, tmp_path):
    flags = AVERAGE | {"strategy": strategy}
    trainer = changed(tmp_path / f"train_lawa_{strategy}_{ranks}.py", (LAWA, "log, meta, "))
    train = ranks_of(trainer, ranks)
    done = train(shards, tmp_path / "whole", **flags)
    assert done.code == 0, done.out
    saved = read_checkpoint(list_checkpoints(tmp_path / "whole")[0])["tensors"]
    mean = mean_of_last_three(tmp_path / "whole")
    assert saved["ema"].keys() == saved["kept"].keys() and not torch.equal(
        saved["ema"]["embed.weight"], saved["model"]["embed.weight"])
    for name, tensor in saved["ema"].items():  # as shards, or whole, the sum of three may round otherwise
        torch.testing.assert_close(tensor, mean[name], rtol=1e-5, atol=1e-7)
    # the mean of the kept, bit for bit
    assert all(torch.equal(saved["kept"][name].mean(0), tensor) for name, tensor in saved["ema"].items())
    best = read_checkpoint(tmp_path / "whole" / "checkpoints" / "best.pt")
    losses = {record["step"]: record["val_loss"] for record in evaluations_of(tmp_path / "whole")}
    assert losses[best["step"]] == min(losses.values())
    usual = Trainer("train_gpt2.py", **trainer.defaults)  # --eval-only needs nothing of the average
    only = usual.train(0, shards, tmp_path / "whole", eval_only=True,
                       resume=tmp_path / "whole" / "checkpoints" / "best.pt")
    assert result(only)["val_loss"] == pytest.approx(min(losses.values()), abs=1e-5)
    assert_resumes(trainer, shards, tmp_path, ranks, **flags)


def test_a_resume_would_show_an_average_that_is_not_restored(shards, tmp_path):
    forgetful = LAWA.replace(', "kept": self.kept', "")
    assert forgetful != LAWA
    trainer = changed(tmp_path / "train_forgetful.py", (forgetful, "log, meta, "))
    assert trainer.train(0, shards, tmp_path / "whole", **AVERAGE).code == 0
    with pytest.raises(AssertionError, match="differ"):
        assert_resumes(trainer, shards, tmp_path, **AVERAGE)


@FULL
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_average_begins_with_the_weights_of_a_run_that_had_none(strategy, shards, tmp_path):
    """And with those of a run that kept another number."""
    path, flags = tmp_path / f"train_later_{strategy}.py", AVERAGE | {"strategy": strategy}
    ranks = 2 if strategy == "zero3" else 1
    assert changed(path).fork(ranks, shards, tmp_path / "run", **flags | {"steps": 4}).code == 0
    four = LAWA.replace("* 3", "* 4").replace("% 3", "% 4")
    for steps, code, number in ((6, LAWA, 3), (8, four, 4)):
        before = read_checkpoint(list_checkpoints(tmp_path / "run")[0])["tensors"]["model"]["embed.weight"]
        trainer = changed(path, (code, "log, meta, "))
        done = trainer.fork(ranks, shards, tmp_path / "run", **flags | {"steps": steps})
        assert done.code == 0, done.out
        kept = read_checkpoint(list_checkpoints(tmp_path / "run")[0])["tensors"]["kept"]["embed.weight"]
        assert len(kept) == number
        assert sum(torch.equal(old, before) for old in kept) == number - 1, done.out


@pytest.mark.long
@pytest.mark.parametrize("code, strategy", [
    (LAWA, "ddp"), (LAWA, "zero3"), (SUMS, "ddp"), (GENERATED, "zero1")])
def test_it_is_killed_on_two_processes(code, strategy, shards, tmp_path):
    changes = [(code, "log, meta, ")] if code == LAWA else [(code, TOP), (ASKED, USE)]
    seq_len = 4 if code == SUMS else 32
    trainer = changed(tmp_path / "train_mine.py", *changes)
    trainer.check_killed_run(tmp_path, 2, shards, strategy=strategy, steps=40, batch=2, seq_len=seq_len)


# ------------------------------------------------------------------------------------- sentences of the guide


@FULL
def test_shorter_rows_that_keep_all_labels(shards, tmp_path):
    """The note on them, below their code."""
    parts, batches = re.search(r"^```python\n(parts = .+)\n(batches = .+)\n```", GUIDE, re.M).groups()
    trainer = row_of_the_guide("shorter rows at first", shards, tmp_path)
    text = (tmp_path / "train_shorter_rows_at_first.py").read_text()
    text = re.sub(r"^( +)count = count .*\n", "", text, flags=re.M)
    text = re.sub(r"^( +)batches = \(\(x\[:, :T\].*\n", rf"\1{parts}\n\1{batches}\n", text, flags=re.M)
    assert "[:, :T]" not in text and "count * T" not in text
    (tmp_path / "train_shorter_rows_at_first.py").write_text(text)
    done = trainer.fork(1, shards, tmp_path / "whole")
    assert done.code == 0, done.out
    steps = steps_of(tmp_path / "whole")
    assert abs(steps[3]["loss"] - steps[4]["loss"]) < 0.5
    assert_resumes(trainer, shards, tmp_path, 1)


@FULL
def test_the_own_rate_of_an_optimizer(shards, tmp_path):
    """It is that of a run with this --lr."""
    assert '`group["scale"] = 1e-4 / args.lr`' in GUIDE
    scale = 'for group in optimizers[0].param_groups:\n    group["scale"] = 1e-4 / args.lr'
    own = changed(tmp_path / "train_rate.py", (scale, "state = "))
    usual = Trainer("train_gpt2.py", **own.defaults)
    flags = {"schedule": "constant", "warmup": 0}
    for trainer, out, lr in ((own, "own", 1e-3), (usual, "usual", 1e-4), (usual, "other", 1e-3)):
        assert trainer.train(0, shards, tmp_path / out, lr=lr, **flags).code == 0
    ours, theirs, others = (tensors_of(tmp_path / out)["model/embed.weight"]
                            for out in ("own", "usual", "other"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (ours - others).abs().max() > 1e-4


SAM = """with state.no_sync(False):
    x, y = batches[0]
    state.wrapped(x, y)[0].div(labels().clamp(min=1) / world.world_size).backward()
moved = {p: 1e-4 * p.grad.sign() for p in model.parameters()}
with torch.no_grad():
    torch._foreach_add_([*moved], [*moved.values()])
state.clear_gradients()
"""
BACK = """with torch.no_grad():
    torch._foreach_sub_([*moved], [*moved.values()])
"""


@FULL
@pytest.mark.parametrize("ranks", [0, 2])
def test_gradients_are_cleared_between_two_passes(ranks, shards, tmp_path):
    """SAM, whose norm would otherwise be that of both passes."""
    norms = {}
    for name, first in (("cleared", SAM), ("added", SAM.replace("state.clear_gradients()\n", ""))):
        trainer = changed(tmp_path / f"train_{name}.py", ("import torch", "import data"),
                          (first, "for micro_step, "), (BACK, "grad_norm = "))
        flags = {"global_batch": 4, "batch": 2, "lr": 1e-4}
        done = ranks_of(trainer, ranks)(shards, tmp_path / name / "whole", **flags)
        assert done.code == 0, done.out
        norms[name] = steps_of(tmp_path / name / "whole")[0]["grad_norm"]
        assert_resumes(trainer, shards, tmp_path / name, ranks, **flags)
    assert norms["added"] > 1.3 * norms["cleared"]  # the first pass has half of the rows


def test_the_scripts_that_use_a_run(shards, tmp_path):
    losses, greedy, back = code_of("Use a run in a script")
    trainer = Trainer("train_gpt2.py", steps=4, seq_len=64, max_new_tokens=2)
    assert trainer.train(0, shards, tmp_path / "run").code == 0
    code = losses.replace("runs/gpt2-tiny-stdlib-bpe4096", str(tmp_path / "run")) + greedy + back
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    printed = out.getvalue()
    assert "tensor(20) of 20 agree" in printed, printed
    assert "as before: True" in printed, printed
    said = trainer.here("--out", tmp_path / "run", "--data", shards, "--prompt", "def main(",
                        "--temperature", 0, "--max-new-tokens", 20).out
    text = printed[printed.rindex("])\n") if "])\n" in printed else 0:]
    assert said.partition("def main(")[2].strip() in text, (said, printed)


def test_the_guide_names_what_a_checkpoint_holds(shards, tmp_path):
    trainer = Trainer("train_gpt2.py", steps=4, max_new_tokens=2)
    assert trainer.train(0, shards, tmp_path / "run").code == 0
    saved = read_checkpoint(list_checkpoints(tmp_path / "run")[0])
    table = (ROOT / "docs" / "running.md").read_text().partition("| key | content |\n|---|---|\n")[2]
    rows = dict(re.findall(r"^\| (`.+?`) \| (.+) \|$", table.partition("\n\n")[0], re.M))
    named = [key for keys in rows for key in re.findall(r"`(\w+)`", keys)]
    assert sorted(named) == sorted(saved.keys())
    groups = re.findall(r"`(\w+)` \(", rows["`tensors`"])
    assert tuple(groups) == ddp_utils.GROUPS == tuple(saved["tensors"])

"""Runs of changed trainers: a metric, another best, a model that draws, a teacher, preferences."""

import json
import math

import pytest
import torch
from copies import FLAGS, MARK, USE, changed, guide_blocks, ranks_of, result
from runs import Trainer, assert_same_run, copy_of_the_first_half, evaluations_of, steps_of

import monitor
from ddp_utils import list_checkpoints, read_checkpoint
from model import HRM, HRMConfig

METRIC = """def metric(model, x, y):
    right = model(x).argmax(-1) == y
    return {"spaces": (right[y == 32].sum(), (y == 32).sum())}
run.metric = metric"""
# draws while it is evaluated, as a model with a generator in it does
DRAWS = """class GPT2(GPT2):
    def loss(self, hidden, idx, targets):
        if not self.training:
            hidden = hidden + torch.randn_like(hidden)
        return super().loss(hidden, idx, targets)

"""
RISING = 'results["best_metric"] = -step if step < 8 else 0.0'  # step 4 is the best
TOP, LOAD, LOSS = guide_blocks("A teacher")


@pytest.fixture(scope="module")
def teacher(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("teacher") / "run"
    trainer = Trainer("train_gpt2.py", **FLAGS, ema=0.9)
    assert trainer.train(0, shards, out, n_layer=2, lr=1e-2).code == 0
    return out


def distilling(path, teacher, *more: tuple[str, str]) -> Trainer:
    """As the guide has it, with what `more` changes."""
    top = "import torch\n" + TOP.replace('"runs/teacher"', repr(str(teacher)))
    return changed(path, (top, "BETAS = "), ("=" + LOAD, "log, meta, "), ("=" + LOSS, "objective, sums = "),
                   *more)


@pytest.mark.parametrize("ranks, strategy", [(0, "ddp"), pytest.param(2, "zero3", marks=pytest.mark.full)])
def test_metric_best_draws_and_teacher_resume_bit_for_bit(ranks, strategy, teacher, shards, tmp_path):
    """Killed in the middle of an evaluation, after its checkpoint. --eval-only has the metric, too."""
    trainer = distilling(tmp_path / "train_all.py", teacher, (METRIC, USE), (DRAWS, "WEB = "), (RISING, MARK))
    flags = {"strategy": strategy, "lr": 3e-2, "steps": 12, "keep_last": 9}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done = ranks_of(trainer, ranks)(shards, whole, **flags)
    assert done.code == 0, done.out
    settings = json.loads((whole / "config.json").read_text())["settings"]
    assert settings["frozen"] == {str(teacher): 8}
    assert all(step["kl"] > 0 for step in steps_of(whole))
    copy_of_the_first_half(whole, resumed)
    lines = (resumed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text("".join(line for line in lines if "val_loss" not in line))
    again = ranks_of(trainer, ranks)(shards, resumed, **flags)
    assert again.code == 0 and "resuming with frozen" not in again.out, again.out
    assert_same_run(whole, resumed)
    assert read_checkpoint(resumed / "checkpoints" / "best.pt")["step"] == 4
    last = evaluations_of(whole)[-1]
    only = result(ranks_of(trainer, ranks)(shards, whole, eval_only=True, strategy=strategy))
    assert 0 < only["val_spaces"] == pytest.approx(last["val_spaces"], abs=1e-6) and last["val_loss"] < min(
        record["val_loss"] for record in evaluations_of(whole)[:-1])


def test_numbers_of_two_kinds_are_not_compared():
    records = [{"step": 4, "val_loss": 2.0}, {"step": 8, "val_loss": 1.0, "best_metric": 3.0},
               {"step": 8, "loss": 1.0}, {"step": 12, "val_loss": 0.5, "best_metric": None}]
    assert monitor.evaluations_of(records) == {4: math.inf, 8: 3.0}
    assert monitor.evaluations_of([*records, {"step": 16, "val_loss": 1.5}]) == {4: 2.0, 8: math.inf, 16: 1.5}


@pytest.mark.full
def test_a_teacher_that_has_changed_or_does_not_fit_is_named(shards, tmp_path):
    own = tmp_path / "teacher"
    basic, trainer = Trainer("train_gpt2.py", **FLAGS), distilling(tmp_path / "train_kd.py", own)
    for steps in (4, 8):
        assert basic.train(0, shards, own, steps=steps).code == 0
        done = trainer.train(0, shards, tmp_path / "run", steps=steps)
        assert done.code == 0 and ("resuming with frozen" in done.out) == (steps == 8), done.out
    refused = trainer.train(0, shards, tmp_path / "odd", seq_len=64)
    assert refused.code == 2 and "--seq-len" in refused.out, refused.out


def test_the_losses_of_tokens_sum_to_the_objective():
    """Also their gradients and the other sums, where each token chooses its cycles."""
    torch.manual_seed(0)
    model = HRM(HRMConfig(vocab_size=60, padded_vocab=64, seq_len=16, n_layer=1, n_head=2, d_model=16, ff=24,
                          halt=True, bp_cycles=1, inject_input=True))
    model.z_loss = 1e-2
    idx = torch.arange(32).view(2, 16)
    labels = idx.roll(-1, 1).masked_fill(idx % 5 == 0, -1)
    whole, sums = model(idx, labels, ponder_weight=0.1)
    tokens, same = model(idx, labels, ponder_weight=0.1, per_token=True)
    assert tokens.shape == labels.shape and not tokens[labels < 0].any() and sums.keys() == same.keys()
    found = [(loss, *others.values(), *torch.autograd.grad(
        loss, [*model.parameters()], materialize_grads=True, allow_unused=True))
        for loss, others in ((whole, sums), (tokens.sum(), same))]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_averages_resume_exactly_after_several_updates_in_a_step(ranks, shards, tmp_path):
    again = ("count, batches = loader.step(run.grad_accum)\nfor x, y in batches:\n"
             "    with state.no_sync(False):\n        state.wrapped(x, y)[0].backward()\n"
             "state.optimizer_step(lr, state.clip_gradients(args.grad_clip))\nbatches = [*batches]")
    trainer = changed(tmp_path / "train_twice.py", ("=" + again, "count, batches = "))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert ranks_of(trainer, ranks)(shards, whole, ema=0.99).code == 0
    copy_of_the_first_half(whole, resumed)
    assert ranks_of(trainer, ranks)(shards, resumed, ema=0.99).code == 0
    assert_same_run(whole, resumed)
    newest = read_checkpoint(list_checkpoints(resumed)[0])
    assert newest["ema_updates"] == 2 * newest["step"] == 16

"""Training on prompts and responses: the mean over labels, several directories, conversations."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from copies import changed
from many_runs import TRAINERS, run_all
from pair_data import (
    MESSAGES,
    START,
    pairs,  # noqa: F401
    prepare,
    samples,
    write,
)
from runs import Trainer, evaluations_of, steps_of, tensors_of

import data
from prepare import packing

# ----------------------------------------------------------------------------------- the mean over the labels

FLAGS = {"max_new_tokens": 2, "eval_every": 100, "save_every": 100, "warmup": 0, "grad_clip": 0,
         "schedule": "constant"}


@pytest.fixture(scope="module")
def few_labels(tmp_path_factory):
    """Rows of which the first step reads 8, three of them without labels, and later steps no labels."""
    path = tmp_path_factory.mktemp("few")
    out = prepare(write(path / "x.jsonl", samples(600, longest=4)), path / "out", row=32)
    file, = out.glob("train*.bin")
    tokens = data.open_shard(file).copy()
    rows = tokens[:-1].reshape(-1, 32)
    read = data.shuffled(np.arange(8), len(rows), 0)
    rows[np.setdiff1d(np.arange(len(rows)), read[[0, 1, 3, 6, 7]])] = START
    digest = packing.write_shard(file, [tokens], "uint16")
    manifest = data.read_manifest(out)
    next(s for s in manifest["shards"] if s["file"] == file.name)["sha256"] = digest
    packing.write_manifest(out, manifest)
    return out


def check_no_labels(one: Path, more: Path) -> None:
    """13 more steps without labels move no weight and no moment, and none is counted as skipped."""
    log = steps_of(more)
    assert log[0]["labels"] > 0 and len(log) == 14
    assert all((r["labels"], r["grad_norm"], r["skipped"]) == (0, 0, 0) for r in log[1:])
    before, after = tensors_of(one), tensors_of(more)
    assert before.keys() == after.keys() and any(t.any() for name, t in before.items() if "optimizer" in name)
    assert all(torch.equal(before[name], t) for name, t in after.items())


def test_gradients_do_not_depend_on_how_the_rows_are_spread(tmp_path, few_labels):
    """8 rows of unlike numbers of labels: 1 x 8, 1 x 4 x 2, 2 x 2 x 2. Also steps without labels."""
    # takes more than 10 s on a busy machine: five runs, two of them on two processes that wait for each other
    run_all(2, few_labels, tmp_path, [("gpt2", f"{n}", FLAGS | {"steps": n, "batch": 2}) for n in (1, 14)])
    check_no_labels(tmp_path / "1", tmp_path / "14")
    train = functools.partial(TRAINERS["gpt2"].train, 0, few_labels, **FLAGS)
    for name, batch in ("whole", 8), ("half", 4):
        assert train(tmp_path / name, steps=1, batch=batch).code == 0
    control = changed(tmp_path / "train_means.py", (
        "=loss = objective / (y >= 0).sum().clamp(min=1) / run.grad_accum", "loss = objective"))
    flags = TRAINERS["gpt2"].defaults | FLAGS | {"steps": 1, "batch": 4}
    assert control.train(0, few_labels, tmp_path / "control", **flags).code == 0
    # a tenth of the gradients
    whole, *others, means = ({name: t for name, t in tensors_of(tmp_path / run).items()
                              if name.endswith("exp_avg")} for run in ("whole", "half", "1", "control"))
    assert len(whole) > 5
    for name, moment in whole.items():
        assert all((moment - other[name]).norm() <= 2e-6 * moment.norm() for other in others), name
    assert any((moment - means[name]).norm() > 1e-2 * moment.norm() for name, moment in whole.items())


@pytest.mark.full
def test_steps_without_labels_move_no_weight_and_no_moment(tmp_path, few_labels):
    changes = {"strategy": "zero3"}, {"optimizer": "muon"}, {"strategy": "zero2", "precision": "fp16"}
    run_all(2, few_labels, tmp_path, [("gpt2", f"{i}-{n}", FLAGS | {"steps": n, "batch": 4} | flags)
                                      for i, flags in enumerate(changes) for n in (1, 14)])
    for i in range(3):
        check_no_labels(tmp_path / f"{i}-1", tmp_path / f"{i}-14")


# ------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.full
def test_killed_and_resumed_bit_for_bit_with_several_directories(pairs, tmp_path):
    other = prepare(write(tmp_path / "o.jsonl", samples(300, seed=5)), tmp_path / "other")
    Trainer("train_hrm.py", seq_len=128, max_new_tokens=5).check_killed_run(
        tmp_path, 2, f"{pairs},{other},{other}")


@pytest.mark.parametrize("family, attention, learned", [
    pytest.param("gpt2", "attention isolated", "response", marks=pytest.mark.full),
    ("hrm", "attention prefix", "response"), ("mlm", "", "all")])
def test_train_on_conversations_and_answer(family, attention, learned, tmp_path):
    """The masked model learns what it masks."""
    talks = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
             for n in range(400)]
    shards = prepare(write(tmp_path / "x.jsonl", talks), tmp_path / "shards", row=64, **MESSAGES)
    trainer = Trainer(f"train_{family}.py", seq_len=64, steps=8, eval_every=8, eval_batches=1)
    out = tmp_path / "run"
    done = trainer.train(0, shards, out)
    assert done.code == 0 and f", loss {learned}\n" in done.out, done.out
    assert f"{attention}, n_layer" in done.out, done.out
    if family == "mlm":
        return
    record, steps = evaluations_of(out)[-1], steps_of(out)
    # not the share of right labels: the end of a response is one, and easy
    assert 0 <= record["val_exact"] <= 1 and "val_accuracy" not in record
    assert steps[-1]["labels"] > 0 and steps[-1]["loss"] < steps[0]["loss"]
    used = trainer.here("--out", out, "--condition", "Be brief. ", "--prompt", "7?\nyes\n8?")
    assert used.code == 0 and used.out.startswith("7?\nyes\n8?\n"), used.out

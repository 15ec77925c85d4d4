"""train_mlm.py: what is its own. The loop is that of train_hrm.py, whose tests go further."""

import math
import re
import sys

import numpy as np
import pytest
import torch
from conftest import run
from runs import Trainer, assert_close_runs, evaluations_of

import train_mlm
from ddp_utils import list_checkpoints, read_checkpoint
from prepare import packing

MLM = Trainer("train_mlm.py", ff=48, window=16)


@pytest.mark.long
@pytest.mark.parametrize("ranks", (0, 2, 3))
@pytest.mark.parametrize("changes", ({}, {"dropout": 0.1, "ema": 0.9}, {"checkpoint_activations": "block"}))
def test_a_killed_run_resumes_bit_for_bit(tmp_path, shards, ranks, changes):
    MLM.check_killed_run(tmp_path, ranks, shards, **changes)


@pytest.mark.long
def test_the_number_of_processes_changes_nothing_but_rounding(tmp_path, shards):
    MLM.train(0, shards, tmp_path / "one", steps=20)
    assert MLM.train(3, shards, tmp_path / "three", steps=20, batch=2).code == 0
    assert_close_runs(tmp_path / "one", tmp_path / "three")


def test_a_run_can_be_used(tmp_path, shards):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "run"
    done = MLM.train(0, shards, out, steps=20)
    assert done.code == 0, done.out
    assert re.search(r"accuracy [\d.]+% \| [\d.]+ bits per byte", done.out), done.out
    record = evaluations_of(out)[-1]
    assert 0 <= record["val_accuracy"] <= 1
    # ids are bytes
    assert record["val_bits_per_byte"] == pytest.approx(record["val_loss"] / math.log(2), rel=1e-12)
    assert MLM.here("--out", out, "--export").code == 0
    filled = MLM.here("--out", out, "--fill", "def [MASK]elf(x[MASK]:")
    lines = filled.out.splitlines()[-2:]
    assert filled.code == 0 and all(len(re.findall(r"[\d.]+%", line)) == 5 for line in lines), filled.out
    fill = transformers.pipeline("fill-mask", str(out / "hf"), top_k=5)
    theirs = fill("def [MASK]elf(x[MASK]:")
    for ours, candidates in zip(lines, theirs):
        for probability, candidate in zip(re.findall(r"([\d.]+)%", ours), candidates):
            assert abs(float(probability) / 100 - candidate["score"]) < 1e-3
    tuned = MLM.train(0, shards, tmp_path / "tuned", size="tiny", init_from=f"hf:{out / 'hf'}", lr=0, steps=1,
                      eval_every=1)
    assert tuned.code == 0, tuned.out
    assert abs(evaluations_of(tmp_path / "tuned")[-1]["val_loss"] - record["val_loss"]) < 1e-5


@pytest.mark.full
def test_presets_are_listed_with_commands_that_work(tmp_path, shards):
    listed = MLM.here("--list-presets")
    commands = re.findall(r"^torchrun --nproc_per_node=\d+ train_mlm.py (--preset \S+)", listed.out, re.M)
    assert listed.code == 0 and len(commands) == 9
    done = run(0, "train_mlm.py", *commands[0].split(), "--data", shards, "--batch", "64", "--epochs", "1",
               "--out", tmp_path / "run")
    assert done.code == 0 and "= 512 sequences" in done.out, done.out
    shape = read_checkpoint(list_checkpoints(tmp_path / "run")[0])["model_config"]
    assert (shape["n_layer"], shape["n_head"]) == (4, 4)


def test_a_copy_lists_the_presets_with_its_own_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mine/train_bert.py"])
    train_mlm.list_presets()
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "torchrun --nproc_per_node=8 mine/train_bert.py --preset 8gpu_large"


@pytest.mark.parametrize("flags, sentence", [
    (["--preset", "huge"], "--preset"), (["--preset", "1gpu_17m", "--size", "tiny"], "not allowed with"),
    (["--mask-rate", "1"], "--mask-rate"), (["--out", "/nowhere", "--fill", "x"], "does not exist")])
def test_refusals(flags, sentence):
    done = MLM.here(*flags)
    assert done.code == 2 and sentence in done.out


def test_fill_refuses_a_text_without_a_mask(tmp_path, shards):
    assert MLM.train(0, shards, tmp_path / "run", steps=2, eval_every=2).code == 0
    for text, sentence in (("no mask here", "[MASK]"), ("[MASK]" * 40, "more than the 32")):
        done = MLM.here("--out", tmp_path / "run", "--fill", text)
        assert done.code == 2 and sentence in done.out
    assert torch.distributed.is_initialized() is False


def test_more_masks_than_ids(tmp_path, shards):
    done = MLM.train(0, shards, tmp_path / "run", seq_len=2048, steps=2, global_batch=1, eval_batches=1)
    assert done.code == 0, done.out


@pytest.mark.long
def test_a_second_half_that_repeats_the_first_is_restored(tmp_path):
    """Rows of four letters, each four times, twice over: what is masked stands elsewhere in the row."""
    letters = np.random.default_rng(0).integers(97, 123, (4200, 4))
    rows = np.tile(np.repeat(letters, 4, axis=1), 2).astype(np.uint16)  # (rows, 32)
    packing.write_shard(tmp_path / "train_000000.bin", [rows[:4000].ravel(), rows[0, :1]], "uint16")
    packing.write_shard(tmp_path / "val_000000.bin", [rows[4000:].ravel(), rows[0, :1]], "uint16")
    done = MLM.train(0, tmp_path, tmp_path / "run", tokenizer="bytes", d_model=64, n_head=4, n_layer=2, ff=96,
                     window=64, global_batch=64, batch=64, steps=400, lr=3e-3, warmup=20, mask_rate=0.15,
                     eval_every=400, save_every=400, log_every=400, eval_batches=0)
    assert done.code == 0 and evaluations_of(tmp_path / "run")[-1]["val_accuracy"] > 0.95, done.out

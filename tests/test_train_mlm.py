"""train_mlm.py: what is its own. The loop is that of train_hrm.py, whose tests go further."""

import math
import re
import sys

import pytest
from conftest import run
from runs import Trainer, evaluations_of

import train_mlm
from ddp_utils import list_checkpoints, read_checkpoint

MLM = Trainer("train_mlm.py", ff=48, window=16)


def test_a_run_can_be_used(tmp_path, shards):
    out = tmp_path / "run"
    done = MLM.train(0, shards, out, steps=8, eval_every=8)
    assert re.search(r"accuracy [\d.]+% \| [\d.]+ bits per byte", done.out), done.out
    record = evaluations_of(out)[-1]
    assert 0 <= record["val_accuracy"] <= 1
    # ids are bytes
    assert record["val_bits_per_byte"] == pytest.approx(record["val_loss"] / math.log(2), rel=1e-12)
    filled = MLM.here("--out", out, "--fill", "def [MASK]elf(x[MASK]:")
    lines = filled.out.splitlines()[-2:]
    assert filled.code == 0 and all(len(re.findall(r"[\d.]+%", line)) == 5 for line in lines), filled.out
    for text, named in (("no mask here", "[MASK]"), ("[MASK]" * 40, "the 32")):
        done = MLM.here("--out", out, "--fill", text)
        assert done.code == 2 and named in done.out
    transformers = pytest.importorskip("transformers")
    assert MLM.here("--out", out, "--export").code == 0
    theirs = transformers.pipeline("fill-mask", str(out / "hf"), top_k=5)("def [MASK]elf(x[MASK]:")
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


@pytest.mark.parametrize("flags, named", [
    (["--preset", "huge"], "--preset"), (["--preset", "1gpu_17m", "--size", "tiny"], "--size"),
    (["--mask-rate", "1"], "--mask-rate"), (["--out", "/nowhere", "--fill", "x"], "/nowhere")])
def test_refusals(flags, named):
    done = MLM.here(*flags)
    assert done.code == 2 and named in done.out


def test_more_masks_than_ids(tmp_path, shards):
    done = MLM.train(0, shards, tmp_path / "run", seq_len=2048, steps=2, global_batch=1, eval_batches=1)
    assert done.code == 0, done.out

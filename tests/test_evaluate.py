"""bench/evaluate.py: the losses of a run that is there, as its log has them; nothing in it changes."""

import json
import shutil

import pytest
from conftest import ROOT, finish, run, start
from processes import fork
from runs import Trainer, evaluations_of

import data

TRAINERS = {"gpt2": Trainer("train_gpt2.py", max_new_tokens=2, steps=6, ema=0.9, eval_batches=2),
            "hrm": Trainer("train_hrm.py", max_new_tokens=2, steps=6, ff=64, h_cycles=1, l_cycles=2),
            "mlm": Trainer("train_mlm.py", steps=6, ff=48, window=16)}


def files_of(out) -> dict:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in out.rglob("*")}


def result(done) -> dict:
    assert done.code == 0, done.out
    return json.loads([line for line in done.out.splitlines() if line.startswith('{"run"')][-1])


@pytest.mark.parametrize("name, ranks, flags", [
    ("gpt2", 0, ()), pytest.param("hrm", 2, ("--strategy", "zero3"), marks=pytest.mark.full),
    pytest.param("mlm", 0, (), marks=pytest.mark.full),
    pytest.param("gpt2", 2, (), marks=pytest.mark.full)])
def test_the_losses_are_those_of_the_log(name, ranks, flags, shards, tmp_path):
    out = tmp_path / "run"
    assert TRAINERS[name].train(0, shards, out).code == 0
    before = files_of(out)
    found = result(run(ranks, "bench/evaluate.py", str(out), "--device", "cpu", *flags))
    logged = evaluations_of(out)[-1]
    for key in (key for key in logged if key.startswith("val_")):
        assert found[key] == pytest.approx(logged[key], abs=1e-5), key
    assert found["step"] == 6 and files_of(out) == before


@pytest.mark.full
def test_more_cycles_other_data_and_mistakes(shards, corpus, tmp_path):
    out = tmp_path / "run"
    assert TRAINERS["hrm"].train(0, shards, out).code == 0
    other = data.prepare(f"text:{corpus}", tmp_path / "other", "bytes", val_split="tail:0.2")
    same, more, further = (result(fork(0, "bench/evaluate.py", out, *flags)) for flags in (
        (), ("--eval-cycles", 5), ("--data", other)))
    assert same["val_cycles"] == 1 and more["val_cycles"] == 5 and more["val_loss"] != same["val_loss"]
    assert further["data"] == "other" and further["val_loss"] != same["val_loss"]
    (tmp_path / "bare").mkdir()
    for path in shards.glob("*.bin"):
        shutil.copy(path, tmp_path / "bare")
    bare = result(fork(0, "bench/evaluate.py", out, "--data", tmp_path / "bare"))
    assert bare["val_loss"] == same["val_loss"]
    foreign = data.prepare(f"text:{corpus}", tmp_path / "foreign", "bpe:300")
    refused = fork(0, "bench/evaluate.py", out, "--data", foreign)
    assert refused.code == 2 and "was trained with the tokenizer bytes" in refused.out, refused.out
    missing = fork(0, "bench/evaluate.py", tmp_path / "nothing")
    assert missing.code == 2 and "does not exist: train first" in missing.out, missing.out


@pytest.mark.full
def test_beside_a_training_in_the_same_directory(shards, tmp_path):
    """It takes no lock, and the training goes on as if nothing had happened."""
    import sys
    out = tmp_path / "run"
    trainer = Trainer("train_gpt2.py", max_new_tokens=2, save_every=5, eval_every=5, steps=400)
    living = start([sys.executable, "train_gpt2.py", *trainer.flags(shards, out)], cwd=ROOT)
    while not list(out.glob("checkpoints/step_*.pt")):
        assert living.poll() is None
    found = result(run(0, "bench/evaluate.py", str(out), "--device", "cpu"))
    losses = {record["step"]: record["val_loss"] for record in evaluations_of(out)}
    assert found["step"] in losses and losses[found["step"]] == pytest.approx(found["val_loss"], abs=1e-5)
    assert finish(living, 120).code == 0

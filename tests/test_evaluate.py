"""--eval-only: the losses of a run that is there, as its log has them; nothing in it changes."""

import json
import shutil
import sys

import pytest
from conftest import ROOT, finish, start
from runs import Trainer, evaluations_of
from test_pairs import pairs  # noqa: F401 (a fixture)

from prepare.pipeline import prepare

TRAINERS = {"gpt2": Trainer("train_gpt2.py", max_new_tokens=2, steps=6, ema=0.9, eval_batches=2),
            "hrm": Trainer("train_hrm.py", max_new_tokens=2, steps=6, ff=64, h_cycles=1, l_cycles=2),
            "mlm": Trainer("train_mlm.py", steps=6, ff=48, window=16)}


def files_of(out) -> dict:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in out.rglob("*")}


def result(done) -> dict:
    assert done.code == 0, done.out
    return json.loads([line for line in done.out.splitlines() if line.startswith('{"step"')][-1])


def assert_as_logged(found: dict, out) -> None:
    logged = evaluations_of(out)[-1]
    for key in (key for key in logged if key.startswith("val_")):
        assert found[key] == pytest.approx(logged[key], abs=1e-5), key


@pytest.mark.parametrize("name, ranks, strategy", [
    ("gpt2", 0, "ddp"), pytest.param("hrm", 2, "zero3", marks=pytest.mark.full),
    pytest.param("mlm", 0, "ddp", marks=pytest.mark.full),
    pytest.param("gpt2", 2, "ddp", marks=pytest.mark.full)])
def test_the_losses_are_those_of_the_log(name, ranks, strategy, shards, tmp_path):
    out = tmp_path / "run"
    assert TRAINERS[name].train(0, shards, out).code == 0
    before = files_of(out)
    done = TRAINERS[name].train(ranks, shards, out, strategy=strategy, eval_only=True)
    found = result(done)
    assert_as_logged(found, out)
    assert found["step"] == 6 and files_of(out) == before
    assert f"step 6 from {out}" in done.out and "validation loss" in done.out, done.out


@pytest.mark.full
def test_more_cycles_other_data_and_mistakes(shards, corpus, tmp_path):
    out = tmp_path / "run"
    hrm = TRAINERS["hrm"]
    assert hrm.train(0, shards, out).code == 0

    def found(data=shards, **changes) -> dict:
        return result(hrm.train(0, data, out, eval_only=True, **changes))

    other = prepare(f"text:{corpus}", tmp_path / "other", "bytes", val_split="tail:0.2")
    same = found()
    more = found(eval_cycles=5)
    further = found(other)
    assert same["val_cycles"] == 1 and more["val_cycles"] == 5 and more["val_loss"] != same["val_loss"]
    assert further["data"] == "other" and further["val_loss"] != same["val_loss"]
    best = result(hrm.train(0, shards, None, eval_only=True, resume=out / "checkpoints" / "best.pt"))
    assert best["step"] == 6 and best["val_loss"] == same["val_loss"]
    (tmp_path / "bare").mkdir()
    for path in shards.glob("*.bin"):
        shutil.copy(path, tmp_path / "bare")
    assert found(tmp_path / "bare", tokenizer="bytes")["val_loss"] == same["val_loss"]
    foreign = prepare(f"text:{corpus}", tmp_path / "foreign", "bpe:300")
    refused = hrm.train(0, foreign, out, eval_only=True)
    assert refused.code == 2 and "was trained with the tokenizer bytes" in refused.out, refused.out
    nothing = prepare(f"text:{corpus}", tmp_path / "nothing", "bytes", val_split="hash:0.0001")
    refused = hrm.train(0, nothing, out, eval_only=True)
    assert refused.code == 2 and "nothing has no validation set: prepare it" in refused.out, refused.out
    missing = hrm.train(0, shards, tmp_path / "missing", eval_only=True)
    assert missing.code == 2 and "does not exist: train first" in missing.out, missing.out
    assert not (tmp_path / "missing").exists()


def test_without_data_it_is_evaluated_as_in_the_run(pairs, tmp_path, monkeypatch):
    """Data, loss and number of batches are those of the run, and nothing is prepared."""
    out = tmp_path / "run"
    trainer = Trainer("train_gpt2.py", seq_len=128, max_new_tokens=2, steps=2, attention="isolated",
                      loss="all")
    assert trainer.train(0, pairs, out).code == 0
    monkeypatch.chdir(tmp_path)
    done = trainer.here("--out", out, "--eval-only", "--device", "cpu")
    assert_as_logged(result(done), out)
    whole = trainer.here("--out", out, "--eval-only", "--device", "cpu", "--eval-batches", "0")
    assert result(whole)["val_loss"] != result(done)["val_loss"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.full
def test_beside_a_training_in_the_same_directory(shards, tmp_path):
    """It takes no lock, and the training goes on as if nothing had happened."""
    out = tmp_path / "run"
    trainer = Trainer("train_gpt2.py", max_new_tokens=2, save_every=5, eval_every=5, steps=400)
    living = start([sys.executable, "train_gpt2.py", *trainer.flags(shards, out)], cwd=ROOT)
    while not list(out.glob("checkpoints/step_*.pt")):
        assert living.poll() is None
    found = result(trainer.train(0, shards, out, eval_only=True))
    losses = {record["step"]: record["val_loss"] for record in evaluations_of(out)}
    assert found["step"] in losses and losses[found["step"]] == pytest.approx(found["val_loss"], abs=1e-5)
    assert finish(living, 120).code == 0

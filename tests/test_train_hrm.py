"""train_hrm.py: its recipes and cycles, and what holds for all trainers."""

import json
from types import SimpleNamespace

import pytest
import torch
from runs import PUBLISHED, Trainer, ended, evaluations_of, log_of, tensors_of
from states import flags_of

import ddp_utils
import model
import train_hrm
from cli.errors import RunError
from cli.flags import flags_of_model
from ddp_utils import list_checkpoints, read_checkpoint
from loggers.mfu import examples_of
from prepare.pipeline import prepare
from startup import dry_run
from training.step import TrainState

HRM = Trainer("train_hrm.py", ff=64, max_new_tokens=5)
train, here = HRM.train, HRM.here
ONE = {"steps": 1, "eval_every": 1}


# ------------------------------------------------------------------------------------------------ flags

def parsed(*flags):
    """The flags of a run, with the bp_steps that it begins and goes on with."""
    args = flags_of(train_hrm, [*flags])
    args.bp_steps = train_hrm.truncation(args)
    config = model.HRMConfig(**flags_of_model(model.HRMConfig, args))
    args.h_cycles, args.least_cycles = config.h_cycles, config.least_cycles
    return args


PUBLISHED_SIZE, INIT_FROM = ("--size", "1b-published"), ("--init-from", "hf:somewhere")
PUBLISHED_ROW = {
    "d_model": 1536, "n_head": 12, "n_layer": 16, "ff": 4096, "vocab_size": 65536, "init": "published",
    "h_cycles": 2, "l_cycles": 3, "optimizer": "adam-atan2", "grad_clip": 0, "lr": 2.2e-4, "warmup": 2000,
    "schedule": "constant", "ema": 0.9999, "bp_steps": (2, 5)}
TUNED = {"lr": 3e-5, "warmup": 0, "epochs": 3, "bp_steps": (5, 5)}


@pytest.mark.parametrize("flags, wanted", [
    (PUBLISHED_SIZE, PUBLISHED_ROW),
    ((*PUBLISHED_SIZE, *INIT_FROM), PUBLISHED_ROW | TUNED | {"schedule": "cosine", "ema": 0.999}),
    ((*PUBLISHED_SIZE, "--ema", "0", "--init", "identity"), {"ema": 0, "init": "identity"}),  # as given
    (("--size", "1b"), PUBLISHED_ROW | {
        "init": "identity", "optimizer": "adamw", "schedule": "cosine", "grad_clip": 1, "ema": 0,
        "epochs": None, "vocab_size": None, "warmup": 1000, "min_lr": 0.1}),
    (("--size", "1b", *INIT_FROM), TUNED | {"ema": 0.0, "schedule": "cosine"}),
    (("--size", "1b", *INIT_FROM, "--steps", "7", "--lr", "1"), {"steps": 7, "epochs": None, "lr": 1}),
    (("--halt",), {"bp_steps": (2, 5)}),
    (("--h-cycles", "1:8"), {"bp_steps": (2, 9), "h_cycles": 8, "least_cycles": 1}),
    (("--h-cycles", "8", "--inject-input"), {"bp_steps": (2, 5), "least_cycles": 0}),
    (("--size", "puzzle"), {"bp_steps": (4, 4), "bp_cycles": 2, "h_cycles": 8, "least_cycles": 4,
                            "inject_input": True}),
    (("--size", "puzzle", "--bp-steps", "2:5", "--no-inject-input"),
     {"bp_steps": (2, 5), "bp_cycles": 0, "inject_input": False}),
    (("--size", "puzzle", "--bp-cycles", "0"), {"bp_steps": (2, 5), "bp_cycles": 0})])
def test_recipes(flags, wanted):
    args = vars(parsed(*flags))
    assert {key: args[key] for key in wanted} == wanted


def test_the_published_recipe_has_its_shape_and_its_batch():
    row = train_hrm.SIZES["1b-published"]
    assert row["global_batch"] * row["seq_len"] == 196_608 and train_hrm.BETAS == (0.9, 0.95)
    empty = dry_run.empty_model(model.HRM, flags_of(train_hrm, [*PUBLISHED_SIZE]))
    assert empty.embed.weight.shape == empty.head.weight.shape == (65536, 1536)


# ------------------------------------------------------------------------------------------------ cycles

def test_a_range_of_cycles_counts_in_the_estimates(tmp_path, shards, monkeypatch):
    """Of memory as many as there can be, of FLOPs their mean."""
    flags = ("--dry-run 1x8 --data task:addition --global-batch 8 --batch 8 --d-model 64 --n-head 2 "
             "--n-layer 1 --ff 128 --no-compile ")
    tables = [here(*(flags + cycles).split()).out.splitlines()[-6:] for cycles in (
        "--h-cycles 1:6 --bp-steps 20", "--h-cycles 6 --bp-steps 20", "")]
    assert tables[0] == tables[1] != tables[2], tables
    begun = {}
    monkeypatch.setattr(train_hrm, "start_run", lambda *_, **__: (SimpleNamespace(say=print), {}, 0, 0))
    monkeypatch.setattr(train_hrm, "is_complete", lambda *arguments: False)
    monkeypatch.setattr(TrainState, "warm_up", lambda *arguments: begun.update(warm_up=arguments))
    monkeypatch.setattr(ddp_utils, "StopVote", lambda world: 1 / 0)  # and no more
    with pytest.raises(ZeroDivisionError):
        train(0, shards, tmp_path / "run", h_cycles="1:6")
    state, *examples = begun["warm_up"]
    assert [example["bp_steps"] for example in examples] == [2, 7] and state.model.config.h_cycles == 6
    drawn = [{"bp_steps": 7, "cycles": cycles} for cycles in range(1, 7)]
    assert examples_of(state.model, {"bp_steps": 7, "cycles": 1.0}) == drawn


@pytest.mark.full
def test_cycles_of_evaluation(tmp_path, shards):
    """They count from other weights and after a resume, too."""
    four = {"eval_cycles": 4}
    for name, changes in (("plain", {}), ("all", {"h_cycles": 4}),
                          ("from", four | {"size": "tiny", "init_from": tmp_path / "plain"}),
                          ("plain", four | {"steps": 2})):
        ended(train(0, shards, tmp_path / name, **{"init": "published", "lr": 0, **ONE} | changes))
    two, *deep = [evaluations_of(tmp_path / name)[i]["val_loss"] for name, i in (
        ("plain", 0), ("plain", 1), ("all", 0), ("from", 0))]
    assert two not in deep and len(set(deep)) == 1


@pytest.mark.full
def test_the_embedding_waits_for_its_gradient(tmp_path, shards):
    """Until the ramp reaches it, it has no optimizer state and no weight decay. From there a run also resumes
    bit for bit. One that would wait for ever is refused.
    """
    flags = PUBLISHED | {"steps": 10, "save_every": 1, "eval_every": 10, "keep_last": 10, "ema": 0}
    ended(train(0, shards, tmp_path / "run", **flags))
    paths = list_checkpoints(tmp_path / "run")[::-1]
    saved = [read_checkpoint(path)["tensors"] for path in paths]
    embeddings = [tensors["model"]["embed.weight"] for tensors in saved]
    assert list(map(torch.equal, embeddings, embeddings[1:])) == [True] + [False] * 8
    for step, tensors in enumerate(saved, 1):
        assert ("embed.weight/step" in tensors["optimizer"]) == (step > 2)
    ended(train(0, shards, tmp_path / "resumed", resume=paths[1], **flags))
    ours, theirs = tensors_of(tmp_path / "run"), tensors_of(tmp_path / "resumed")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ended(train(0, shards, tmp_path / "never", **flags | {"bp_steps": 2}), "--inject-input", code=2)


@pytest.mark.parametrize("changes, times", [
    ({}, 4), pytest.param({"init": "published"}, 1, marks=pytest.mark.full)])
def test_the_vocabulary_learns_at_a_rate_of_its_own(tmp_path, shards, changes, times, monkeypatch):
    """Four times that of the rest, where the model starts as the identity and AdamW trains it."""
    found = []
    for lr, vocab_lr in ((0, 4.0), (1e-3, 1.0), (1e-3, 4.0)):
        monkeypatch.setattr(train_hrm, "VOCAB_LR", vocab_lr)
        out = tmp_path / f"{len(found)}"
        ended(train(0, shards, out, lr=lr, bp_steps=4, weight_decay=0, **ONE, **changes))
        found.append({name: t for name, t in tensors_of(out).items() if name.startswith("model/")})
    start, one, four = found
    assert start["model/H.blocks.0.down.weight"].any() == (changes.get("init") == "published")
    for name in start:
        if name in ("model/embed.weight", "model/head.weight"):
            torch.testing.assert_close(four[name] - start[name], times * (one[name] - start[name]), rtol=1e-3,
                                       atol=1e-6)
            assert not torch.equal(one[name], start[name])
        else:
            assert torch.equal(one[name], four[name]), name


# ------------------------------------------------------------------------------------------- all trainers

def test_a_run_is_used_by_its_directory_alone(shards, corpus, tmp_path):
    """Of `init` a size has a value of its own, which asks for nothing. Another shape, tokenizer or family is
    refused.
    """
    existing = tmp_path / "run"
    ended(train(0, shards, existing, steps=8, init="published"))
    ended(here("--out", existing, "--prompt", "a", "--max-new-tokens", "2", "--eval-cycles", "3"))
    prepare(f"text:{corpus}", tmp_path / "other", "bpe:300", workers=1)
    start = {"size": "tiny", "init_from": existing}
    for done, named in (
            (here("--out", existing, "--prompt", "a", "--halt"), "halt False"),
            (train(0, tmp_path / "other", tmp_path / "new", **start), "tokenizer bytes"),
            (Trainer("train_gpt2.py").train(0, shards, tmp_path / "new", **start), "family HRM"),
            (HRM.fork(torch.cuda.device_count() + 1, shards, tmp_path / "new", device="cuda"), "GPU")):
        assert done.code and named in done.out, done.out


def test_weights_that_are_not_finite_are_never_saved(tmp_path, shards):
    """They would push the good checkpoints out."""
    out, flags = tmp_path / "run", {"schedule": "constant"}
    ended(train(0, shards, out, steps=8, **flags))
    with pytest.raises(RunError, match="10 times"):
        train(0, shards, out, steps=40, save_every=1, lr=1e30, **flags)
    steps = [int(p.name[5:13]) for p in list_checkpoints(out)]
    assert steps[:2] in ([8, 4], [9, 8])  # the loss that step 9 began with was fine, its weights are not
    for bad in list_checkpoints(out)[:steps.index(8)]:
        bad.unlink()
    ended(train(0, shards, out, steps=12, **flags), "resuming after step 8")


def test_what_a_run_writes_and_an_evaluation_that_was_cut_off(tmp_path, shards):
    """As after a kill between a save and the record of the evaluation, which can be cut off, too: the log
    then equals that of an undisturbed run. If it is there, nothing is evaluated again.
    """
    out = tmp_path / "run"
    ended(train(0, shards, out, steps=8, eval_every=4, ema=0.9))
    whole, lines = log_of(out), (out / "metrics.jsonl").read_text().splitlines()
    for kept, again in ((lines[:-1], True), ([*lines[:-1], lines[-1][:20]], True), (lines, False)):
        (out / "metrics.jsonl").write_text("\n".join(kept) + "\n")
        done = ended(train(0, shards, out, steps=8, eval_every=4, ema=0.9))
        assert ("validation loss" in done.out) == again and log_of(out) == whole
    assert (out / "train.log").is_file() and (out / "checkpoints" / "best.pt").stat().st_nlink == 2
    trained, evaluated = map(json.loads, lines[-2:])
    assert {key for key in trained if not key.startswith("System/")} == {
        "step", "loss", "lr", "grad_norm", "skipped", "tokens", "tokens_per_sec", "mfu", "mem_gb", "bp_steps",
        "labels", "cycles", "time"}
    assert evaluated.keys() == {"step", "tokens", "val_loss", "val_perplexity", "val_cycles",
                                "val_bits_per_byte", "time"}

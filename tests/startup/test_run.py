"""Which run a command means, and what a resumed run keeps: the bits of an undisturbed one."""

import json
import re
import shlex
import shutil
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from copies import assert_as_logged, result
from processes import fork
from runs import (
    Trainer,
    assert_same_run,
    copy_of_the_first_half,
    edited,
    ended,
    evaluations_of,
    log_of,
    steps_of,
)

import startup.run
import train_gpt2
from cli.errors import UserError
from ddp_utils import list_checkpoints, read_checkpoint
from model import GPT2Config

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5, batch=2)


def last_step(out: Path) -> int:
    return steps_of(out)[-1]["step"]


def best_of(out: Path) -> int:
    return read_checkpoint(out / "checkpoints" / "best.pt")["step"]


def files_of(out: Path, *without: str) -> dict:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name not in without}


# -------------------------------------------------------------------------------------------------- the flags

SAVED = {"path": "run", "tokenizer_flag": "bytes", "model_config": asdict(GPT2Config()), "settings": {
    "size": "tiny", "data": "stdlib", "precision": "float16", "lr": 0.5, "global_batch": 12,
    "largest_batch": 3, "max_samples": 9}}


def resolved(saved, *words, weights=None) -> dict:
    return vars(startup.run.resolve_flags(train_gpt2.parse_args([*words]), saved, weights))


@pytest.mark.parametrize("words, found", [
    ((), {"lr": 0.5, "precision": "float16", "tokenizer": "bytes", "max_samples": 9, "wanted_batch": 12,
          "largest_batch": 3, "global_batch": None, "batch": None, "n_layer": 12}),
    (("--lr", "1", "--batch", "2"), {"lr": 1.0, "batch": 2, "wanted_batch": 12}),
    (("--data", "text:other"), {"max_samples": None, "tokenizer": "bytes", "data": "text:other"}),
    (("--export",), {"precision": "float16"}), (("--prompt", "a"), {"precision": "auto"}),
    (("--prompt", "a", "--precision", "fp32"), {"precision": "fp32"})])
def test_the_flags_of_a_resumed_run_are_its_own_and_those_that_are_given(words, found):
    assert resolved(SAVED, *words).items() >= found.items()


def test_the_rows_of_sizes_may_have_changed_since(monkeypatch):
    """The run's values count, also where its size is gone. Flags that it doesn't know are as in the row."""
    row = train_gpt2.SIZES["tiny"] | {"lr": 1.0, "ema": 0.25, "n_layer": 3, "vocab_size": 512}
    for sizes, ema in (({"mini": {}, "tiny": row}, 0.25), ({"mini": row}, 0.0)):
        monkeypatch.setattr(train_gpt2, "SIZES", sizes)
        found = resolved(SAVED)
        assert [found[name] for name in ("size", "lr", "n_layer", "wanted_batch")] == ["tiny", 0.5, 12, 12]
        assert found["ema"] == ema and found["vocab_size"] == (512 if ema else None)


def test_the_flags_of_a_new_run_are_those_of_its_size_or_of_its_weights(tmp_path):
    row, new = train_gpt2.SIZES["tiny"], resolved(None, "--size", "tiny")
    assert (new["wanted_batch"], new["largest_batch"], new["eval_batch"]) == (
        row["global_batch"], row["batch"], row["global_batch"])
    weights = SAVED | {"seq_len": 64, "size": "tiny", "settings": {}}
    tuned = resolved(None, "--init-from", "base", "--data", "text:x", weights=weights)
    assert (tuned["lr"], tuned["seq_len"], tuned["n_layer"], tuned["tokenizer"]) == (3e-5, 64, 12, "bytes")
    assert resolved(None, "--init-from", "base", "--seq-len", "32", weights=weights)["seq_len"] == 32
    with pytest.raises(UserError, match="n_layer 12.* 3:"):
        resolved(None, "--init-from", "base", "--n-layer", "3", weights=weights)


@pytest.mark.parametrize("resume, theirs, found", [
    ("auto", (True, 4), ["out"]), ("auto", (False, 9), ["out"]), ("none", (True, 4), [None]),
    ("file.pt", (True, 9), ["file.pt"]), ("auto", (True, 5), []), ("none", (True, 5), [])])
def test_a_later_checkpoint_of_another_node_is_not_forgotten(resume, theirs, found, tmp_path, monkeypatch):
    """A best.pt does not count, because a run that went back may leave it."""
    monkeypatch.chdir(tmp_path)
    Path("out/checkpoints").mkdir(parents=True)
    Path("out/checkpoints/step_00000004_loss1.0.pt").touch()
    monkeypatch.setattr(startup.run, "all_gather", lambda ours: [ours, (theirs, "node1 (b)")])
    monkeypatch.setattr(startup.run, "load_checkpoint", lambda path, **_: str(path))
    place = (Path("out"), Namespace(resume=resume), SimpleNamespace(node="node0", is_rank0=True))
    with nullcontext() if found else pytest.raises(UserError, match=r"node1 \(b\).* 5 .*node0 .* 4"):
        assert startup.run.find_checkpoint(*place) == found[0]
    Path("out/checkpoints/step_00000004_loss1.0.pt").unlink()  # node 0 has none, another node has some
    if theirs[0] and resume != "file.pt":
        with pytest.raises(UserError, match=rf"node1 \(b\).* {theirs[1]} .*node0 "):
            startup.run.find_checkpoint(*place)


# ------------------------------------------------------------------------------- runs that have a checkpoint

# flags of which each differs from its default
OTHERS = {"lr": 2e-3, "schedule": "wsd", "warmup": 2, "weight_decay": 0.2, "grad_clip": 0.5, "ema": 0.9,
          "seed": 3, "dropout": 0.1, "batch": None, "grad_accum": 3, "keep_last": 5, "eval_batches": 1,
          "min_lr": 0, "decay": 0.7, "precision": "bf16", "checkpoint_activations": "block", "steps": 8,
          "eval_every": 4}
MODERN = Trainer("train_gpt2.py", modern=True, optimizer="muon", max_new_tokens=5, temperature=0,
                 sample_every=1, **OTHERS)
RECURRENT = Trainer("train_hrm.py", ff=64, h_cycles="2:3", l_cycles=1, bp_steps="2:4", max_new_tokens=5,
                    optimizer="adam-atan2", strategy="zero3", **OTHERS)


def command(ranks: int, trainer: Trainer, *words):
    return fork(ranks, trainer.script, *words) if ranks else trainer.here(*words)


@pytest.mark.parametrize("trainer, ranks", [
    (MODERN, 0), pytest.param(RECURRENT, 2, marks=pytest.mark.full)])
def test_a_resumed_run_is_what_it_was(tmp_path, shards, trainer, ranks):
    """With no flag except --out it has the bits of an undisturbed run. A flag that is given counts."""
    run = partial(command, ranks, trainer)
    whole, half, other = (tmp_path / part for part in ("whole", "half", "other"))
    assert run(*trainer.flags(shards, whole)).code == 0
    copy_of_the_first_half(whole, half)
    shutil.copytree(half, other)
    bare = run("--out", half)
    assert bare.code == 0 and "resuming with" not in bare.out, bare.out
    assert_same_run(whole, half)
    given = run("--out", other, "--lr", "0.1", "--steps", "9")
    assert given.code == 0 and given.out.count("resuming with") == 2, given.out
    assert last_step(other) == 9 and steps_of(other)[5]["lr"] != steps_of(whole)[5]["lr"]  # the control
    before = files_of(half)
    assert_as_logged(result(run("--out", half, "--eval-only")), half)
    assert files_of(half) == before


def test_a_run_goes_on_from_best_pt_if_nothing_else_is_left(tmp_path, shards):
    """With the bits of an undisturbed run, whose later curves it replaces. It is not taken beside others."""
    whole, left = tmp_path / "whole", tmp_path / "left"
    assert MODERN.train(0, shards, whole).code == 0
    shutil.copytree(whole, left)
    newest, first = list_checkpoints(left)
    best = left / "checkpoints" / "best.pt"
    first.replace(best)
    newest.write_bytes(newest.read_bytes()[:1000])
    content = best.read_bytes()

    def refused(*words, out=left) -> bool:
        before = best.read_bytes()
        done = MODERN.here("--out", out, *words)
        return done.code == 2 and str(best) in done.out and best.read_bytes() == before

    assert list_checkpoints(left) == [newest] and refused()  # a damaged one is left
    damaged = newest.rename(f"{newest}.damaged")
    assert result(MODERN.here("--out", left, "--eval-only"))["step"] == 4  # which only reads
    assert refused() and refused("--resume", left, out=tmp_path / "branch")
    damaged.unlink()  # as it says
    assert refused("--resume", "none")
    best.write_bytes(content[:1000])
    assert refused() and refused("--eval-only")
    best.write_bytes(content)
    assert MODERN.here("--out", left).code == 0
    assert_same_run(whole, left)
    lowest = min(evaluations_of(whole), key=lambda record: record["val_loss"])["step"]
    assert best_of(left) == lowest


def test_a_start_that_trains_nothing_records_nothing(tmp_path, shards):
    """A finished run with other flags, with one that is refused, and another run in its directory."""
    run, new = tmp_path / "run", tmp_path / "new"
    assert GPT2.train(0, shards, run, steps=4, eval_every=4, ema=0.9).code == 0
    before = files_of(run, ".lock", "train.log")
    for code, words in ((0, ("--log-every", "3")), (2, ("--lr", "0.5")),
                        (2, ("--steps", "5", "--optimizer", "muon"))):
        assert GPT2.here("--out", run, *words).code == code and files_of(run, ".lock", "train.log") == before
    assert GPT2.train(0, shards, new, init_from=run, optimizer="muon", steps=1).code == 0
    mixed = GPT2.here("--out", run, "--resume", new, "--steps", "9")
    assert mixed.code == 2 and all(f" {path}" in mixed.out for path in (run, new)), mixed.out
    assert GPT2.here("--out", run, "--lr", "0.5", "--steps", "5").code == 0  # the control
    assert json.loads((run / "config.json").read_text())["settings"]["lr"] == 0.5


@pytest.mark.full
def test_a_fine_tuning_resumes_without_its_base(tmp_path, shards):
    """With --init-from and without it, and without any flag of the shape: the bits of an undisturbed run."""
    shape = {"ff": 64, "h_cycles": "2:3", "l_cycles": 1, "max_new_tokens": 5}
    trainer = Trainer("train_hrm.py", batch=2, **shape)
    base, whole = tmp_path / "base", tmp_path / "whole"
    assert trainer.train(0, shards, base, steps=2, eval_every=2).code == 0
    plain = dict.fromkeys(("seq_len", "d_model", "n_head", "n_layer", "lr", "warmup", *shape))
    flags = plain | {"steps": 8, "save_every": 4, "eval_every": 4}
    assert trainer.train(0, shards, whole, init_from=base, **flags).code == 0
    assert read_checkpoint(list_checkpoints(whole)[0])["seq_len"] == 32
    base.rename(tmp_path / "elsewhere")
    for given in (base, None):
        out = tmp_path / str(given is None)
        copy_of_the_first_half(whole, out)
        assert trainer.train(0, shards, out, init_from=given, **flags).code == 0
        assert_same_run(whole, out)


# ------------------------------------------------------------------------------------------------- going back


@pytest.mark.full
def test_the_best_is_of_the_branch_and_has_a_file(tmp_path, shards):
    """After going back to step 12 as README says, and where the files of the lowest losses are gone."""
    out, best = tmp_path / "run", tmp_path / "run" / "checkpoints" / "best.pt"
    train = partial(GPT2.train, 0, shards, out, eval_every=4, save_every=4, keep_last=9)
    assert train(steps=20).code == 0 and best_of(out) == 20
    for path in list_checkpoints(out)[:2]:
        path.unlink()
    assert train(steps=20, lr=5.0).code == 0
    losses = {record["step"]: record["val_loss"] for record in evaluations_of(out)}
    assert losses[16] > losses[12] < losses[8] and best_of(out) == 12
    for path in (best, *list_checkpoints(out)[2:]):
        path.unlink()
    assert train(steps=24, lr=5.0).code == 0
    losses |= {record["step"]: record["val_loss"] for record in evaluations_of(out)}
    assert best_of(out) == min((16, 20, 24), key=losses.get)


# ------------------------------------------------------------------------------------- steps, batches, copies


@pytest.mark.full
def test_a_short_run_has_a_short_warm_up(tmp_path, shards):
    """That of the size is 30 of 300 steps. A resumed run keeps its own."""
    for name, given, peak in (("short", None, 2), ("given", 30, 30)):
        assert GPT2.train(0, shards, tmp_path / name, warmup=given, steps=20).code == 0
        assert GPT2.here("--out", tmp_path / name, "--steps", "24").code == 0
        rates = [record["lr"] for record in steps_of(tmp_path / name)]
        assert rates[:3] == pytest.approx([1e-3 * min((s + 1) / peak, 1) for s in range(3)], rel=0.01)
        assert read_checkpoint(list_checkpoints(tmp_path / name)[0])["settings"]["warmup"] == peak


@pytest.mark.full
def test_steps_epochs_and_batches_of_a_resumed_run(tmp_path, shards):
    """Of two flags for one thing, that which is given counts; on other processes the batches fit again."""
    run = tmp_path / "run"
    assert GPT2.train(0, shards, run, steps=None, batch=3, warmup=0.5, epochs=0.01).code == 0
    for ranks, words, batch, accumulation, last in (
            (0, ("--epochs", "0.02"), 3, 4, 20), (2, ("--steps", "42"), 3, 2, 42),
            (3, ("--steps", "44", "--batch", "1"), 1, 4, 44), (0, ("--steps", "46"), 1, 12, 46)):
        assert command(ranks, GPT2, "--out", run, *words).code == 0
        config = json.loads((run / "config.json").read_text())
        assert [config["settings"][name] for name in ("batch", "grad_accum")] == [batch, accumulation]
        assert last_step(run) == last


# -------------------------------------------------------------------------- runs that have no checkpoint yet


@pytest.mark.parametrize("flag", ["resume", "init_from"])
def test_a_run_without_a_checkpoint_begins_again_with_its_command(flag, tmp_path, shards, monkeypatch):
    """As it was typed, with the bits of before."""
    monkeypatch.chdir(tmp_path)
    base, whole, out = tmp_path / "base", tmp_path / "whole", tmp_path / "run"
    assert GPT2.train(0, shards, base, steps=4).code == 0
    flags = GPT2.flags(shards, out, steps=6, sample_prompt='say "\u00e9" or don\'t', **{flag: base})
    assert GPT2.here(*flags).code == 0
    out.rename(whole)
    shutil.copytree(whole, out)
    for path in (out / "checkpoints").iterdir():
        path.unlink()
    for words in ([], [*flags, "--lr", "1"]):
        done = GPT2.here(*words, "--out", out)
        again = shlex.split(done.out.rpartition(": ")[2])
        assert done.code == 2 and again == ["python", GPT2.script, *flags], done.out
    assert log_of(out) == log_of(whole)
    assert GPT2.here(*again[2:], "--device", "cpu", "--timeout", "60").code == 0
    assert_same_run(whole, out)
    later = GPT2.here(*flags, "--steps", "7")  # it has a checkpoint now, which --resume does not pass over
    assert later.code == 0 and "after step 6 " in later.out and last_step(out) == 7, later.out


def test_what_is_no_record_of_a_run_is_none(tmp_path, capsys):
    """A damaged config.json names no run. An export or a best.pt that is left has to stay."""
    def begins(given, resume="auto") -> bool:
        startup.run.refuse_unlike_begun_run(tmp_path, Namespace(resume=resume), "train_gpt2.py", given)
        return "starting over" in capsys.readouterr().out

    def write(given, commands=("python train_gpt2.py --lr 0.5",), trainer="train_gpt2.py"):
        settings = {"settings": {"trainer": trainer}, "given": given, "commands": commands}
        (tmp_path / "config.json").write_text(json.dumps(settings))

    def refused(given, named: str, resume="auto") -> bool:
        with pytest.raises(UserError, match=re.escape(named)):
            begins(given, resume)
        return True

    for text in ("", "[1]", '{"settings": [], "given": []}', '{"settings": {}, "given": {}}'):
        (tmp_path / "config.json").write_text(text)
        assert not begins({}), text
    lr = {"lr": 0.5, "window": (1, 2), "data": "\udcff"}  # JSON has neither such tuples nor such texts
    write(lr | {"data": "?", "batch": 4, "wanted_batch": 4})  # 0.1.0 could write wanted_batch
    for more in ({}, {"batch": 2}, {"device": "cpu"}, {"resume": "auto"}):
        assert begins(lr | more), more
    for more in ({"lr": 0.4}, {"size": "tiny"}, {"tokenizer": "bytes"}):
        assert refused(lr | more, ": python train_gpt2.py --lr 0.5"), more
    assert refused({}, "--resume none") and not begins({}, "none")
    write(lr | {"data": "?", "resume": "base"})  # a branch
    assert refused(lr, "--out")
    write({}, [])  # main() in a notebook
    assert refused({"lr": 1}, "config.json") and begins({})
    write({}, trainer="train_mine.py")
    assert refused({}, "--out")
    (tmp_path / "checkpoints").mkdir()
    for name in ("hf", "model.gguf", "checkpoints/best.pt"):
        (tmp_path / name).touch()
        assert all(refused({}, name, resume) for resume in ("auto", "none"))
        (tmp_path / name).unlink()
    (tmp_path / "hf").touch()
    (tmp_path / "checkpoints" / "step_00000001_loss5.0.pt").touch()  # Checkpoints.load names what is there
    assert not begins(lr, resume="none")


# ---------------------------------------------------------------------------------------------------- its end

OWN_STOP = "before", "lr = learning_rate(", "if step == 3:\n    break"


@pytest.mark.parametrize("changes, synced", [
    ([OWN_STOP], True),
    pytest.param([OWN_STOP, ("before", "count, batches", "lr *= 1 + world.rank")], False,
                 marks=pytest.mark.full),
    ([OWN_STOP, ("before", "end_run(run", "model.positions.weight.data += world.rank")], False)])
def test_the_end_saves_the_last_step_and_compares_the_parameters(changes, synced, tmp_path, shards):
    """Whatever has ended the loop."""
    trainer = edited(tmp_path / "train_own.py", *changes, max_new_tokens=5)
    done = trainer.fork(2, shards, tmp_path / "run", save_every=50, eval_every=50)
    ended(done, "training complete: 3 steps" if synced else "on rank 1 differs", code=int(not synced))
    saved = list_checkpoints(tmp_path / "run")
    assert not synced or [read_checkpoint(path)["step"] for path in saved] == [3]

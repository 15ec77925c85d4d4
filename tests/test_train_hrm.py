"""train_hrm.py as a user runs it: processes that learn, are killed, resume, stop and refuse."""

import itertools
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SHARED, finish, run
from runs import (
    PUBLISHED,
    Trainer,
    assert_close_runs,
    assert_same_run,
    evaluations_of,
    log_of,
    steps_of,
    tensors_of,
    worker,
)
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
from weights import sampling

HRM = Trainer("train_hrm.py", ff=64, max_new_tokens=5)
train, here = HRM.train, HRM.here

EVERYTHING = {"global_batch": 24, "batch": 2, "ema": 0.9, "halt": True, "dropout": 0.1, "precision": "bf16",
              "optimizer": "adam-atan2"}
WHOLE_CYCLES = {"h_cycles": "1:4", "l_cycles": 1, "bp_cycles": 2, "inject_input": True, "qk_norm": True,
                "eval_cycles": 6}


@pytest.mark.full
def test_a_killed_run_resumes_bit_for_bit(tmp_path, shards):
    """Of one process; of two, test_trainer.py kills them."""
    HRM.check_killed_run(tmp_path, 0, shards, ema=0.9, h_cycles="1:3", eval_cycles=4)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("changes", [
    {}, {"precision": "bf16"}, {"batch": 1}, {"ema": 0.9}, {"halt": True},
    {"halt": True, "precision": "bf16"}, {"dropout": 0.1, "checkpoint_activations": "selective"},
    {"optimizer": "muon"}, WHOLE_CYCLES, WHOLE_CYCLES | {"strategy": "zero3"}, PUBLISHED,
    PUBLISHED | {"strategy": "zero1"},
    PUBLISHED | {"strategy": "zero2"}, EVERYTHING], ids=str)
def test_a_killed_run_resumes_bit_for_bit_in_every_variant(tmp_path, shards, ranks, changes):
    HRM.check_killed_run(tmp_path, ranks, shards, **changes)


@pytest.mark.full
def test_another_seed_is_another_run(tmp_path, shards):
    """Shows that assert_same_run can fail."""
    for seed in (0, 1):
        assert train(0, shards, tmp_path / str(seed), seed=seed, steps=4, eval_every=4).code == 0
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "0", tmp_path / "1")


@pytest.mark.full
def test_the_number_of_processes_changes_nothing_but_rounding(tmp_path, shards):
    common = {"steps": 20, "save_every": 20, "eval_every": 20, "h_cycles": "1:3"}  # alike on all ranks
    train(0, shards, tmp_path / "one", **common)
    for name, ranks, batch in (("two", 2, None), ("accumulated", 2, 2)):
        assert HRM.fork(ranks, shards, tmp_path / name, batch=batch, **common).code == 0
        assert_close_runs(tmp_path / "one", tmp_path / name)


def change_ranks(tmp_path, shards, order) -> None:
    common = {"schedule": "constant", "bp_steps": 4, "save_every": 100, "eval_every": 100}
    HRM.fork(order[0], shards, tmp_path / "same", steps=18, **common)
    for i, ranks in enumerate(order):
        done = HRM.fork(ranks, shards, tmp_path / "changing", steps=6 * (i + 1), **common)
        assert done.code == 0, done.out
    assert_close_runs(tmp_path / "same", tmp_path / "changing")


@pytest.mark.parametrize("order", [(0, 2, 0), pytest.param((2, 1, 2), marks=pytest.mark.full)], ids=str)
def test_a_run_resumes_on_another_number_of_processes(tmp_path, shards, order):
    change_ranks(tmp_path, shards, order)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_four_two_four(tmp_path, shards):
    change_ranks(tmp_path, shards, (4, 2, 4))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2,
                                    signal.SIGXCPU])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path, shards, number):
    out = tmp_path / "run"
    changes = {"steps": 100_000, "schedule": "constant", "save_every": 100_000, "eval_every": 100_000}
    process = HRM.start(2, shards, out, **changes)
    while not (out / "metrics.jsonl").exists() or len(log_of(out)) < 5:
        time.sleep(0.01)
    os.kill(worker(process.pid, 1), number)
    done = finish(process)
    assert done.code == 0, done.out
    step = int(re.search(rf"stopped by {number.name} after step (\d+)", done.out)[1])
    assert int(list_checkpoints(out)[0].name[5:13]) == step == log_of(out)[-1]["step"]


@pytest.mark.full
def test_a_finished_run_says_so_and_its_text_model_and_weights_can_be_used(tmp_path, shards):
    out = tmp_path / "run"
    first = train(2, shards, out, steps=20, ema=0.9)
    assert first.code == 0 and "training complete" in first.out and "a sample after step 20" in first.out
    before = sorted(p.name for p in out.rglob("*"))
    again = HRM.fork(2, shards, out, steps=20, ema=0.9)
    assert again.code == 0 and "is complete after 20 steps" in again.out
    names = {p.name for p in out.iterdir()}
    assert names >= {"config.json", "checkpoints", "metrics.jsonl", "history.json", "tokenizer.json",
                     "train.log"}
    assert {n for n in before if n.endswith(".pt")} == {n.name for n in out.rglob("*.pt")}
    assert len(list_checkpoints(out)) == 3 and (out / "checkpoints" / "best.pt").stat().st_nlink == 2
    *_, trained, evaluated = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    of_run = {key for key in trained if not key.startswith("System/")}
    assert of_run == {"step", "loss", "lr", "grad_norm", "skipped", "tokens", "tokens_per_sec", "mfu",
                      "mem_gb", "bp_steps", "labels", "cycles", "time"}
    assert evaluated.keys() == {"step", "tokens", "val_loss", "val_perplexity", "val_cycles",
                                "val_bits_per_byte", "time"}
    history = json.loads((out / "history.json").read_text())
    assert history["step"][-2:] == [20, 20] and history["val_loss"][-2:] == [None, evaluated["val_loss"]]

    exported = here("--out", out, "--export")
    assert exported.code == 0, exported.out
    used = here("--out", out, "--prompt", "def ", "--max-new-tokens", "20", "--temperature", "0")
    assert used.code == 0, used.out
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "hf")
    ids = model.generate(**tokenizer("def ", return_tensors="pt"), do_sample=False, max_new_tokens=20)[0]
    assert ids[0] == tokenizer.bos_token_id  # as --prompt begins
    assert tokenizer.decode(ids, skip_special_tokens=True) in used.out
    # the export holds the moving average, and a new run starts from it
    average = torch.load(list_checkpoints(out)[0], weights_only=True)["tensors"]["ema"]["embed.weight"]
    exported = model.get_input_embeddings().weight
    assert torch.equal(exported, average[:len(exported)])
    for source in (f"hf:{out / 'hf'}", out):
        new = tmp_path / f"from{str(source)[:2]}"
        begun = train(0, shards, new, steps=1, lr=0, size="tiny", init_from=source, eval_every=1)
        assert begun.code == 0, begun.out
        assert abs(evaluations_of(new)[0]["val_loss"] - evaluations_of(out)[-1]["val_loss"]) < 1e-5


@pytest.mark.full
def test_a_short_name_is_prepared_once_and_learned(tmp_path, corpus):
    """The way of the default command, with a smaller corpus: below the unigram entropy within a minute."""
    done = run(2, "train_hrm.py", "--data", f"text:{corpus}", "--tokenizer", "bpe:512", "--steps", "60",
               "--seq-len", "64", "--eval-every", "60", "--eval-batches", "4", "--max-new-tokens", "20",
               cwd=tmp_path)
    assert done.code == 0, done.out
    losses = re.findall(r"validation loss ([\d.]+) \| .*unigram entropy ([\d.]+)", done.out)
    assert float(losses[-1][0]) < float(losses[-1][1]) - 0.3
    assert done.out.count("is ready:") == 1
    assert (tmp_path / "runs/hrm-tiny-corpus-bpe512/tokenizer.json").exists()


def test_a_directory_of_plain_shards_trains(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(sampling, "samples_of", lambda *_: [["some text"]])
    for shard in shards.glob("*.bin"):
        (tmp_path / shard.name).symlink_to(shard)
    done = train(0, tmp_path, tmp_path / "run", tokenizer="bytes", steps=2, eval_every=2, sample_prompt="def")
    assert done.code == 0 and "after step 2:\ndefsome text\n" in done.out, done.out
    assert len(evaluations_of(tmp_path / "run")) == 1


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.full
def test_a_damaged_checkpoint_is_left_out(tmp_path, shards):
    out, other = tmp_path / "run", tmp_path / "whole"
    for directory in (out, other):
        assert train(0, shards, directory, steps=12, eval_every=4, save_every=4).code == 0
    damage(list_checkpoints(out)[0])
    done = train(0, shards, out, steps=12, eval_every=4, save_every=4)
    assert done.code == 0 and "is damaged" in done.out and "after step 8" in done.out
    assert_same_run(out, other)
    assert [p.name[5:13] for p in list_checkpoints(out)] == ["00000012", "00000008", "00000004"]
    assert len(list(out.rglob("*.damaged"))) == 1  # it does not count as one of the newest three
    for path in list_checkpoints(out):
        path.write_bytes(path.read_bytes()[:-100])
    done = train(0, shards, out, steps=12, eval_every=4, save_every=4)
    assert done.code == 2 and done.out.count("is damaged") == 3 and "error: " in done.out


@pytest.fixture(scope="module")
def existing(shards, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("existing") / "run"
    assert train(0, shards, out, steps=8).code == 0
    return out


@pytest.mark.full
def test_a_run_whose_evaluation_was_cut_off_evaluates_first(tmp_path, shards):
    """As after a kill between a save and the record of the evaluation, which can be cut off, too: the log
    then equals that of an undisturbed run. If it is there, nothing is evaluated again.
    """
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for out in (whole, cut):
        assert train(0, shards, out, steps=8, eval_every=4).code == 0
    lines = (cut / "metrics.jsonl").read_text().splitlines()
    for kept, again in ((lines[:-1], True), ([*lines[:-1], lines[-1][:20]], True), (lines, False)):
        (cut / "metrics.jsonl").write_text("\n".join(kept) + "\n")
        done = train(0, shards, cut, steps=8, eval_every=4)
        assert done.code == 0 and ("validation loss" in done.out) == again, done.out
        assert log_of(cut) == log_of(whole)


def test_another_text_under_the_same_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in "ab":
        Path(folder).mkdir()
        Path(folder, "text.txt").write_text(f"this is {folder} " * 500 * (1 + (folder == "b")))
    common = {"tokenizer": "bytes", "steps": 2, "eval_every": 2}
    assert train(0, "text:a/text.txt", tmp_path / "run", **common).code == 0
    done = train(0, "text:b/text.txt", tmp_path / "other", **common)
    assert done.code == 2 and "was prepared from another text" in done.out
    Path("a/text.txt").unlink()  # once it is prepared, the text may go
    done = train(0, "text:a/text.txt", tmp_path / "run", **common)
    assert done.code == 0 and re.search("note: .*shards/text-bytes, prepared before, is used", done.out)


def parsed(*flags):
    """The flags of a run, with the bp_steps that it begins and goes on with."""
    args = flags_of(train_hrm, [*flags])
    args.bp_steps = train_hrm.truncation(args)
    config = model.HRMConfig(**flags_of_model(model.HRMConfig, args))
    args.h_cycles, args.least_cycles = config.h_cycles, config.least_cycles
    return args


def test_trained_weights_are_trained_further_gently():
    args = parsed("--size", "1b", "--init-from", "hf:somewhere")
    assert (args.lr, args.warmup, args.epochs, args.bp_steps) == (3e-5, 0, 3, (5, 5))
    args = flags_of(train_hrm, ["--size", "1b", "--init-from", "hf:somewhere", "--steps", "7", "--lr", "1"])
    assert (args.steps, args.epochs, args.lr) == (7, None, 1)
    scratch = parsed("--size", "1b")
    assert (scratch.lr, scratch.warmup, scratch.epochs, scratch.bp_steps) == (2.2e-4, 1000, None, (2, 5))


@pytest.mark.full
def test_the_embedding_of_a_published_hrm_waits_for_its_first_gradient(tmp_path, shards):
    """The ramp of bp steps reaches it in step 5 of 20: before that, nothing decays."""
    trainer = Trainer("train_hrm.py", ff=64, max_new_tokens=3, eval_every=20, steps=20, batch=2)
    done = trainer.train(0, shards, tmp_path / "run", init="published", bp_steps="2:3", save_every=1,
                         keep_last=20)
    assert done.code == 0, done.out
    found = [read_checkpoint(path)["tensors"]["model"]["embed.weight"]
             for path in reversed(list_checkpoints(tmp_path / "run"))]
    assert [torch.equal(a, b) for a, b in itertools.pairwise(found)] == [True] * 3 + [False] * 16


@pytest.mark.full
def test_another_number_of_threads_and_a_longer_ramp_are_printed_on_a_resume(shards, tmp_path, monkeypatch):
    """Threads change the order of sums; more steps lower the bp_steps of the next ones."""
    trainer = Trainer("train_hrm.py", ff=48, max_new_tokens=2)
    first = trainer.train(0, shards, tmp_path / "run", steps=4)
    assert first.code == 0 and "the last 2 to 5 stack calls" in first.out, first.out
    assert "stack calls, now" not in first.out
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        longer = trainer.train(0, shards, tmp_path / "run", steps=40)
    assert longer.code == 0 and "resuming with threads 3 (was 1)" in longer.out, longer.out
    assert "stack calls, now 3" in longer.out
    assert [record["bp_steps"] for record in steps_of(tmp_path / "run")][3:6] == [5, 3, 3]


def test_the_published_recipe_is_a_size_and_others_have_none_of_it():
    wanted = {"d_model": 1536, "n_head": 12, "n_layer": 16, "ff": 4096, "vocab_size": 65536,
              "init": "published", "h_cycles": 2, "l_cycles": 3, "optimizer": "adam-atan2", "grad_clip": 0,
              "lr": 2.2e-4, "warmup": 2000, "schedule": "constant", "ema": 0.9999, "bp_steps": (2, 5)}
    tuned = {"lr": 3e-5, "warmup": 0, "schedule": "cosine", "ema": 0.999, "bp_steps": (5, 5)}
    assert (train_hrm.BETAS, parsed().min_lr) == ((0.9, 0.95), 0.1)

    def differ(wanted, *flags):
        args = vars(parsed(*flags))
        return {key for key in wanted if args[key] != wanted[key]}

    published, row = ("--size", "1b-published"), train_hrm.SIZES["1b-published"]
    assert not differ(wanted, *published) and row["global_batch"] * row["seq_len"] == 196_608
    empty = dry_run.empty_model(model.HRM, flags_of(train_hrm, [*published]))
    assert empty.embed.weight.shape == empty.head.weight.shape == (65536, 1536)
    assert not differ(wanted | tuned, *published, "--init-from", "hf:somewhere")
    given = "--init identity --optimizer adamw --schedule cosine --grad-clip 1 --ema 0".split()
    others = {"init", "optimizer", "schedule", "grad_clip", "ema"}
    assert differ(wanted, *published, *given) == others  # what is given counts, also what is usual elsewhere
    assert not differ({"bp_steps": (2, 5)}, "--halt")
    assert not differ({"bp_steps": (2, 9), "h_cycles": 8, "least_cycles": 1}, "--h-cycles", "1:8")
    assert not differ({"bp_steps": (2, 5), "least_cycles": 0}, "--h-cycles", "8", "--inject-input")
    whole = {"bp_steps": (4, 4), "bp_cycles": 2, "h_cycles": 8, "least_cycles": 4, "inject_input": True}
    assert not differ(whole, "--size", "puzzle")
    calls = {"bp_steps": (2, 5), "bp_cycles": 0, "inject_input": False}
    assert not differ(calls, "--size", "puzzle", "--bp-steps", "2:5", "--no-inject-input")
    assert not differ({"bp_steps": (2, 5), "bp_cycles": 0}, "--size", "puzzle", "--bp-cycles", "0")
    assert differ(wanted, "--size", "1b") == others | {"vocab_size", "warmup"}
    assert not differ({"ema": 0.0, "schedule": "cosine"}, "--size", "1b", "--init-from", "hf:somewhere")


def test_the_table_of_sizes_has_the_defaults_of_the_model_too(capsys):
    with pytest.raises(SystemExit):
        train_hrm.parse_args(["--help"])
    assert re.search(r"\n  l_cycles +3 +1 +3 ", capsys.readouterr().out)


@pytest.mark.full
def test_init_says_what_the_weights_start_as(shards, tmp_path):
    for init, zero in (("identity", True), ("published", False)):
        assert train(0, shards, tmp_path / init, init=init, steps=1, eval_every=1, lr=0).code == 0
        found = tensors_of(tmp_path / init)
        assert (not found["model/H.blocks.0.down.weight"].any()) == zero


@pytest.mark.full
@pytest.mark.parametrize("changes, times", [
    ({}, 4), ({"init": "published"}, 1), ({"init": "identity", "optimizer": "muon"}, 1)])
def test_the_vocabulary_learns_at_a_rate_of_its_own(tmp_path, shards, changes, times, monkeypatch):
    """Four times that of the rest, where the model starts as the identity and AdamW trains it."""
    found = []
    for lr, vocab_lr in ((0, 4.0), (1e-3, 1.0), (1e-3, 4.0)):
        monkeypatch.setattr(train_hrm, "VOCAB_LR", vocab_lr)
        out = tmp_path / str(len(found))
        done = train(0, shards, out, steps=1, eval_every=1, lr=lr, bp_steps=4, weight_decay=0, **changes)
        assert done.code == 0, done.out
        found.append({name: t for name, t in tensors_of(out).items() if name.startswith("model/")})
    start, one, four = found
    for name in start:
        if name in ("model/embed.weight", "model/head.weight"):
            torch.testing.assert_close(four[name] - start[name], times * (one[name] - start[name]), rtol=1e-3,
                                       atol=1e-6)
            assert not torch.equal(one[name], start[name])
        else:
            assert torch.equal(one[name], four[name]), name


def test_a_run_of_another_start_is_used_by_its_directory_alone(tmp_path, shards, capsys):
    """Of `init` a size has a value of its own, which asks for nothing."""
    assert train(0, shards, tmp_path / "run", init="published", steps=1, eval_every=1).code == 0
    used = here("--out", tmp_path / "run", "--prompt", "a", "--max-new-tokens", "2", "--eval-cycles", "3")
    assert used.code == 0 and "step 1 from" in capsys.readouterr().err, used.out
    halting = here("--out", tmp_path / "run", "--prompt", "a", "--halt")
    assert halting.code == 2 and "was trained with halt False" in halting.out
    further = train(0, shards, tmp_path / "new", size="tiny", init_from=tmp_path / "run", halt=True)
    assert further.code == 2 and "was trained with halt False" in further.out


def test_a_graph_that_fewer_cycles_do_not_fill_is_at_most_that(tmp_path, shards):
    flags = {"l_cycles": 3, "steps": 1, "eval_every": 1}
    done = train(0, shards, tmp_path, h_cycles="1:3", bp_steps="8", **flags)
    assert done.code == 0 and "backpropagation through at most the last 8 stack calls" in done.out, done.out


def test_a_range_of_cycles_counts_in_the_estimates(tmp_path, shards, monkeypatch):
    """Of memory as many as there can be, of FLOPs their mean."""
    flags = ("--dry-run", "1x8", "--data", "task:addition", "--global-batch", "64", "--batch", "64",
             "--d-model", "64", "--n-head", "2", "--n-layer", "1", "--ff", "128", "--no-compile")
    tables = [here(*flags, *cycles).out.splitlines()[-6:] for cycles in (
        ("--h-cycles", "1:6", "--bp-steps", "20"), ("--h-cycles", "6", "--bp-steps", "20"), ())]
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
    """They count in that of a trainer, from other weights and after a resume, too, in --prompt and --export;
    a run keeps its own.
    """
    flags = {"init": "published", "steps": 1, "eval_every": 1, "lr": 0}
    four = {"eval_cycles": 4}
    for name, changes in (("plain", {}), ("eval", four), ("all", {"h_cycles": 4}),
                          ("from", four | {"size": "tiny", "init_from": tmp_path / "plain"}),
                          ("plain", four | {"steps": 2})):
        assert train(0, shards, tmp_path / name, **flags | changes).code == 0
    two, *deep = [evaluations_of(tmp_path / name)[i]["val_loss"] for name, i in (
        ("plain", 0), ("plain", 1), ("eval", 0), ("all", 0), ("from", 0))]
    assert two not in deep and len(set(deep)) == 1

    def answer(*flags) -> str:
        return here("--out", tmp_path / "eval", "--prompt", "def", "--temperature", "0", *flags).out
    assert answer() == answer("--eval-cycles", "4") != answer("--eval-cycles", "2")
    assert here("--out", tmp_path / "eval", "--export").code == 0
    exported = json.loads((tmp_path / "eval" / "hf" / "config.json").read_text())
    assert (exported["H_cycles"], exported["num_hidden_layers"]) == (4, 16)


@pytest.mark.full
def test_a_run_of_many_cycles_goes_on_from_its_weights(tmp_path, shards):
    """The graph has to reach the embedding through the cycles of the weights, not of the size."""
    first = train(0, shards, tmp_path / "nine", h_cycles=9, l_cycles=1, steps=1)
    line = "cycles: 9 in training, 9 in evaluation; backpropagation through at most the last 2 to 10 stack"
    assert first.code == 0 and line in first.out, first.out
    assert train(0, shards, tmp_path / "tuned", size="tiny", init_from=tmp_path / "nine", steps=1).code == 0
    assert steps_of(tmp_path / "tuned")[-1]["bp_steps"] == 10
    copy = (tmp_path / "nine").rename(tmp_path / "moved")  # then the command line alone cannot know
    assert train(0, shards, tmp_path / "tuned", size="tiny", init_from=tmp_path / "nine", steps=2).code == 0
    assert [record["bp_steps"] for record in steps_of(tmp_path / "tuned")] == [10, 10] and copy.exists()


@pytest.mark.full
def test_the_embedding_waits_for_its_gradient(tmp_path, shards):
    """Until then it has no optimizer state and no weight decay; from there a run also resumes bit for bit.
    One that would wait for ever is refused.
    """
    flags = PUBLISHED | {"steps": 10, "save_every": 1, "eval_every": 10, "keep_last": 10, "ema": 0}
    assert train(0, shards, tmp_path / "run", **flags).code == 0
    tables = {}
    for path in list_checkpoints(tmp_path / "run"):
        saved = torch.load(path, weights_only=True)
        tables[saved["step"]] = saved["tensors"]["model"]["embed.weight"]
        assert ("embed.weight/step" in saved["tensors"]["optimizer"]) == (saved["step"] > 2)
        assert "head.weight/step" in saved["tensors"]["optimizer"]
    assert torch.equal(tables[1], tables[2]) and not torch.equal(tables[2], tables[3])
    second = list_checkpoints(tmp_path / "run")[-2]
    assert train(0, shards, tmp_path / "resumed", resume=second, **flags).code == 0
    ours, theirs = tensors_of(tmp_path / "run"), tensors_of(tmp_path / "resumed")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    done = train(0, shards, tmp_path / "never", **flags | {"bp_steps": 2})
    assert done.code == 2 and "the embedding never learns: add --inject-input" in done.out, done.out
    done = train(0, shards, tmp_path / "never", **flags | {"bp_cycles": 1, "bp_steps": None})
    assert done.code == 2 and "the embedding never learns: add --inject-input" in done.out, done.out
    for name, graph in (("calls", {"bp_steps": 2}), ("cycles", {"bp_cycles": 1, "bp_steps": None})):
        out = tmp_path / name  # the graph reaches the embedding in steps of one cycle
        done = train(0, shards, out, **flags | graph | {"h_cycles": "1:3"})
        assert done.code == 0, done.out
        cycles = [record["cycles"] for record in steps_of(out)]
        assert set(cycles) == {1, 2, 3}
        for path in list_checkpoints(out):
            saved = torch.load(path, weights_only=True)
            reached = cycles[:saved["step"]].count(1)
            assert saved["tensors"]["optimizer"].get("embed.weight/step", 0) == reached


def test_weights_of_another_tokenizer_or_family_are_refused(tmp_path, shards, existing, corpus):
    other = tmp_path / "other"
    prepare(f"text:{corpus}", other, "bpe:300", workers=1)
    done = train(0, other, tmp_path / "run", size="tiny", init_from=existing)
    assert done.code == 2 and "was trained with the tokenizer bytes" in done.out, done.out
    done = Trainer("train_gpt2.py").train(0, shards, tmp_path / "gpt2", size="tiny", init_from=existing)
    assert done.code == 2 and "family HRM" in done.out


def test_weights_that_are_not_finite_are_never_saved(tmp_path, shards):
    """They would push the good checkpoints out."""
    out = tmp_path / "run"
    assert train(0, shards, out, steps=8, schedule="constant").code == 0
    with pytest.raises(RunError, match="10 times in a row"):
        train(0, shards, out, steps=40, schedule="constant", save_every=1, lr=1e30)
    steps = [int(p.name[5:13]) for p in list_checkpoints(out)]
    assert steps[:2] in ([8, 4], [9, 8])  # the loss that step 9 began with was fine, its weights are not
    for bad in list_checkpoints(out)[:steps.index(8)]:
        bad.unlink()
    again = train(0, shards, out, steps=12, schedule="constant")
    assert again.code == 0 and "resuming after step 8" in again.out


def test_a_run_branches_off_another(tmp_path, shards, existing):
    done = train(0, shards, tmp_path / "branch", steps=8, resume=existing)
    assert done.code == 0 and len(list_checkpoints(tmp_path / "branch")) == 1, done.out
    done = train(0, shards, tmp_path / "longer", steps=12, resume=list_checkpoints(existing)[0])
    assert done.code == 0 and [r["step"] for r in steps_of(tmp_path / "longer")] == [9, 10, 11, 12]


def test_more_local_ranks_than_gpus(tmp_path, shards):
    gpus = torch.cuda.device_count()
    done = train(gpus + 1, shards, tmp_path / "run", device="cuda")
    assert done.code != 0 and ("no GPU is visible" if gpus == 0 else f"with {gpus} GPUs") in done.out


@pytest.mark.long
@pytest.mark.timeout(300)
def test_twenty_clean_runs_end_with_exit_code_0(tmp_path, shards):
    codes = [train(2, shards, tmp_path / str(i), steps=3, eval_every=3).code for i in range(20)]
    assert codes == [0] * 20


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("text, tokenizer", [("quijote.txt", "bpe:4096"), ("shakespeare.txt", "gpt2")])
def test_real_texts(tmp_path, text, tokenizer):
    if not (SHARED / text).exists():
        pytest.skip("the texts are not on this machine")
    done = run(2, "train_hrm.py", "--data", f"text:{SHARED / text}", "--tokenizer", tokenizer, cwd=tmp_path,
               timeout=800, TIKTOKEN_CACHE_DIR=SHARED / "tiktoken")
    assert done.code == 0, done.out
    evaluations = re.findall(r"validation loss ([\d.]+) \| .*unigram entropy ([\d.]+)", done.out)
    loss, entropy = map(float, evaluations[-1])
    assert loss < entropy - 0.5

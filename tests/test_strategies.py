"""What is shared out between processes changes where tensors lie and what travels, not what is computed."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import fork
from runs import (
    PUBLISHED,
    Trainer,
    assert_close_runs,
    assert_same_run,
    copy_of_the_first_half,
    evaluations_of,
    first_checkpoint,
    steps_of,
)
from states import flags_of

import startup.run
import train_gpt2
from cli.errors import UserError
from ddp_utils import list_checkpoints
from model import GPT2
from ops.device import compute_dtype
from prepare.pipeline import prepare
from startup import dry_run
from startup.run import resolve_flags
from training.strategies import refuse_together

STRATEGIES = {"ddp": {}, "zero1": {"strategy": "zero1"}, "zero2": {"strategy": "zero2"},
              "zero3": {"strategy": "zero3"}, "offload": {"strategy": "zero3-offload"}}
COMMON = {"n_layer": 2, "global_batch": 8, "steps": 20, "save_every": 10, "eval_every": 10}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", **COMMON), "mlm": Trainer("train_mlm.py", **COMMON),
            "hrm": Trainer("train_hrm.py", **COMMON, sample_prompt="def", max_new_tokens=4)}
RESUMED = re.compile(r"resuming after step (\d+)")


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "zero3-offload"])
def test_gloo_refuses_to_send_shards_of_gpus(strategy):
    """On an H200, zero3 with gloo ended in a segmentation fault of torch."""
    flags = ["--precision", "fp32", "--strategy", strategy]  # so that no GPU is asked
    world = SimpleNamespace(device=SimpleNamespace(type="cuda"), backend="gloo")
    for use in ([], ["--eval-only"]):
        with pytest.raises(UserError, match=f"{strategy} on GPUs needs NCCL.*zero1"):
            refuse_together(flags_of(train_gpt2, [*flags, *use]), world)
    refuse_together(flags_of(train_gpt2, [*flags, "--prompt", "a"]), world)  # which takes ddp
    for whole in ("ddp", "zero1"):
        refuse_together(flags_of(train_gpt2, [*flags, "--strategy", whole]), world)
    for change in ({"backend": "nccl"}, {"device": SimpleNamespace(type="cpu")}):
        refuse_together(flags_of(train_gpt2, flags), SimpleNamespace(**vars(world) | change))


def run_all(ranks, shards, base, wanted, timeout=90):
    """Runs what is wanted, (model, name of the run, changed flags[, sabotage]), in one group of processes."""
    commands = [[*sabotage, *[""] * (not sabotage), TRAINERS[model].script,
                 *TRAINERS[model].flags(shards, base / name, **changes)]
                for model, name, changes, *sabotage in wanted]
    done = fork(ranks, "tests/helpers/many_runs.py", json.dumps(commands), timeout=timeout)
    assert done.code == 0, done.out
    return done


def step_of(path: Path) -> int:
    return int(path.name[5:13])


def val_loss(out: Path) -> float:
    return evaluations_of(out)[-1]["val_loss"]


def assert_resumes_alike(whole: Path, resumed: Path, bound=1e-5) -> None:
    """A run that began at step 10 has the losses of one that began at 0."""
    a, b = ([r for r in steps_of(out) if r["step"] > 10] for out in (whole, resumed))
    assert [r["step"] for r in a] == [r["step"] for r in b]
    assert max(abs(x["loss"] - y["loss"]) for x, y in zip(a, b)) <= bound
    assert abs(val_loss(whole) - val_loss(resumed)) <= bound


def check_strategies(base, shards, ranks, model, strategies, pairs, timeout=90, **changes) -> None:
    """Some strategies against ddp, and checkpoints of one resumed under another."""
    run_all(ranks, shards, base, [(model, name, STRATEGIES[name] | changes) for name in strategies], timeout)
    for name in strategies:
        assert_close_runs(base / "ddp", base / name)
    run_all(ranks, shards, base, [
        (model, f"{a}-{b}", STRATEGIES[b] | changes | {"resume": first_checkpoint(base / a)})
        for a, b in pairs], timeout)
    for a, b in pairs:
        assert_resumes_alike(base / "ddp", base / f"{a}-{b}")


@pytest.mark.parametrize("model, strategies, changes", (
    pytest.param("gpt2", tuple(STRATEGIES), {}, marks=pytest.mark.full),
    pytest.param("mlm", ("ddp", "zero1", "zero3"), {}, marks=pytest.mark.long),
    pytest.param("hrm", ("ddp", "zero1", "zero2"), {"ema": 0.9, "halt": True, "optimizer": "adam-atan2"},
                 marks=pytest.mark.full),
    pytest.param("hrm", tuple(STRATEGIES), PUBLISHED, marks=pytest.mark.long)))
def test_strategies_compute_the_same(tmp_path, shards, model, strategies, changes):
    pairs = list(zip(strategies, strategies[1:] + strategies[:1]))
    check_strategies(tmp_path, shards, 2, model, strategies, pairs, **changes)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("model", TRAINERS)
def test_every_strategy_resumes_every_other(tmp_path, shards, model, ranks):
    pairs = [(a, b) for a in STRATEGIES for b in STRATEGIES]
    check_strategies(tmp_path, shards, ranks, model, tuple(STRATEGIES), pairs, timeout=400)


@pytest.mark.long
def test_a_checkpoint_of_zero3_on_four_ranks_resumes_as_ddp_on_two(tmp_path, shards):
    gpt2 = TRAINERS["gpt2"]
    whole = gpt2.train(2, shards, tmp_path / "ddp")
    four = gpt2.train(4, shards, tmp_path / "four", strategy="zero3")
    assert whole.code == four.code == 0, whole.out + four.out
    two = gpt2.train(2, shards, tmp_path / "two", resume=first_checkpoint(tmp_path / "four"))
    alone = gpt2.train(0, shards, tmp_path / "alone", resume=first_checkpoint(tmp_path / "four"))
    assert two.code == alone.code == 0, two.out + alone.out
    for resumed in ("two", "alone"):
        assert_resumes_alike(tmp_path / "ddp", tmp_path / resumed)


@pytest.mark.full
def test_the_comparison_would_notice(tmp_path, shards):
    """A gradient norm of one's own shards, and averaged weights that zero2 does not gather anew."""
    zero2, clip = {"strategy": "zero2", "steps": 10}, {"grad_clip": 0.1, "steps": 10}
    average = {"ema": 0.9, "steps": 10, "eval_every": 5}
    run_all(2, shards, tmp_path, [
        ("gpt2", "ddp", clip), ("gpt2", "zero2", zero2 | clip), ("gpt2", "norm", zero2 | clip, "norm"),
        ("gpt2", "ddp-ema", average), ("gpt2", "ema", zero2 | average, "ema")])
    assert_close_runs(tmp_path / "ddp", tmp_path / "zero2")
    for good, broken in (("ddp", "norm"), ("ddp-ema", "ema")):
        with pytest.raises(AssertionError):
            assert_close_runs(tmp_path / good, tmp_path / broken)


@pytest.mark.full
def test_adaptive_depth_is_agreed_on_under_fsdp():
    """With zero3, ranks that run different numbers of cycles wait for each other for ever."""
    agreed = fork(2, "tests/helpers/ddp_worker.py", "agree")
    assert agreed.code == 0 and all(f"rank {rank} ran 4 cycles" in agreed.out for rank in (0, 1)), agreed.out
    alone = fork(2, "tests/helpers/ddp_worker.py", "alone")
    assert alone.code == 1 and "rank 0 ran 1 cycles" in alone.out and "rank 1 ran" not in alone.out, alone.out
    assert "Timed out waiting 5000ms" in alone.out, alone.out


# -----------------------------------------------------------------------------------------------------------
# Slow links

BF16 = {"comm": "bf16", "d_model": 160, "n_layer": 3}  # more than fits DDP's first bucket


@pytest.mark.full
def test_gradients_sent_as_bf16_resume_bit_for_bit(tmp_path, shards):
    run_all(2, shards, tmp_path, [("gpt2", "whole", BF16), ("gpt2", "fp32", BF16 | {"comm": "fp32"})])
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "again")
    done = run_all(2, shards, tmp_path, [("gpt2", "again", BF16)])
    assert RESUMED.findall(done.out) == ["10"], done.out
    assert_same_run(tmp_path / "whole", tmp_path / "again")
    with pytest.raises(AssertionError):  # they are rounded
        assert_same_run(tmp_path / "whole", tmp_path / "fp32")


@pytest.mark.full
@pytest.mark.parametrize("model", TRAINERS)
def test_shards_sent_as_bf16(tmp_path, shards, model):
    """They resume bit for bit, from and to any other, and differ from ddp by no more than rounding."""
    sent = {"precision": "bf16", "comm": "bf16", "strategy": "zero3"}
    alone = {"precision": "bf16"}
    run_all(2, shards, tmp_path, [(model, "whole", sent), (model, "ddp", alone),
                                  (model, "fp32", sent | {"comm": "fp32"})], timeout=240)
    assert_close_runs(tmp_path / "ddp", tmp_path / "whole", bound=3e-3)
    with pytest.raises(AssertionError):  # gradients are rounded
        assert_same_run(tmp_path / "fp32", tmp_path / "whole")
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "again")
    first = {name: first_checkpoint(tmp_path / name) for name in ("whole", "ddp")}
    to_ddp = alone | {"resume": first["whole"]}
    to_zero2 = sent | {"strategy": "zero2", "resume": first["ddp"]}
    runs = [(model, "again", sent), (model, "to-ddp", to_ddp), (model, "zero2", to_zero2)]
    run_all(2, shards, tmp_path, runs, timeout=240)
    assert_same_run(tmp_path / "whole", tmp_path / "again")
    assert_resumes_alike(tmp_path / "whole", tmp_path / "to-ddp", bound=3e-3)
    assert_resumes_alike(tmp_path / "ddp", tmp_path / "zero2", bound=3e-3)


@pytest.mark.long
@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("model", TRAINERS)
def test_killed_runs_on_slow_links(tmp_path, shards, model, ranks):
    changes = BF16 | {"steps": 40, "save_every": 4, "global_batch": 12}
    TRAINERS[model].check_killed_run(tmp_path, ranks, shards, **changes)


@pytest.mark.full
def test_skipped_updates(tmp_path, shards):
    """A run with one resumes bit for bit; and a run that ends with one is saved."""
    run_all(2, shards, tmp_path, [("gpt2", "whole", BF16, "inf:15"),
                                  ("gpt2", "last", {"steps": 12}, "inf:12")])
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "again")
    run_all(2, shards, tmp_path, [("gpt2", "again", BF16, "inf:5")])
    assert_same_run(tmp_path / "whole", tmp_path / "again")
    assert [r["step"] for r in steps_of(tmp_path / "again") if r["skipped"]] == [15]
    assert [step_of(path) for path in list_checkpoints(tmp_path / "last")] == [12, 10]


@pytest.mark.full
def test_samples_after_a_resume_under_zero3(tmp_path, shards):
    """All ranks write the sample, though only the first knows how many evaluations there were."""
    flags = {"strategy": "zero3", "eval_every": 5, "sample_every": 2, "save_every": 5, "max_new_tokens": 3}
    run_all(2, shards, tmp_path, [("gpt2", "run", flags | {"steps": 5}), ("gpt2", "run", flags)])
    text = (tmp_path / "run" / "train.log").read_text()
    assert re.findall(r"a sample after step (\d+)", text) == ["5", "10", "20"]


@pytest.mark.parametrize("flags, sentence", (
    ({"strategy": "zero2", "optimizer": "muon"}, "whole matrices"),
    ({"strategy": "zero1", "comm": "bf16"}, "--comm bf16 needs --strategy ddp, zero2 or zero3"),
    ({"strategy": "zero2", "comm": "bf16"}, "--comm bf16 with shards needs --precision bf16"),
    ({"comm": "powersgd:2"}, "invalid choice: 'powersgd:2'")))
@pytest.mark.parametrize("model", TRAINERS)
def test_combinations_that_are_refused(tmp_path, shards, model, flags, sentence):
    done = TRAINERS[model].train(0, shards, tmp_path / "out", **flags)
    assert done.code == 2 and sentence in done.out, done.out
    assert not (tmp_path / "out").exists()


def test_dry_run_says_what_fits():
    of = ("--size", "gpt2", "--n-layer", "2", "--tokenizer", "bpe:4096", "--data", "c4", "--no-compile",
          "--dry-run")
    tiny, small, large = (TRAINERS["gpt2"].here(*of, gpus) for gpus in ("8x0.1", "8x0.7", "8x80"))
    assert tiny.code == small.code == large.code == 0 and "8 processes with 80 GB" in large.out
    assert "--strategy ddp does not fit" in small.out and "--strategy ddp fits." in large.out
    assert "a smaller --batch" in small.out and "a smaller --batch" not in tiny.out
    parameters = int(re.search(r"\n +parameters +([\d,]+)", large.out)[1].replace(",", ""))
    assert f"a checkpoint is {12 * parameters / 1e9:.2f} GB" in large.out
    file = 12 * parameters / 1e9
    on_a_cpu = TRAINERS["gpt2"].here(*of, "--device", "cpu")
    for text in large.out, on_a_cpu.out:  # twice that on GPUs: see test_cuda.py
        assert f"and {file:.2f} GB of rank 0's host memory" in text
    here = str(compute_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    assert f"precision   {here}\n" in on_a_cpu.out and "precision   bfloat16\n" in large.out
    assert "8x141" in TRAINERS["gpt2"].here("--dry-run", "8").out


def test_dry_run_names_each_recomputation_that_fits(monkeypatch, capsys):
    """With 1 GB of activations without any, 0.1 with `selective`; `block` cannot be counted."""
    kept = {"none": 1e9, "selective": 1e8}
    monkeypatch.setattr(dry_run, "kept_for_backward", lambda *given: kept[given[4]])
    args = run_of("--data", "stdlib", "--tokenizer", "bytes", "--checkpoint-activations", "selective").args

    def said(gigabytes: float) -> list[str]:
        monkeypatch.setattr(dry_run, "machine", lambda *_: (1, gigabytes))
        dry_run.dry_run(GPT2, args)
        return capsys.readouterr().out.splitlines()[-2:]

    fit = "with --strategy ddp these --checkpoint-activations fit, the fastest first: "
    assert said(80) == [fit + "none, selective", "--strategy ddp fits."]
    assert said(0.5)[0] == fit + "selective"
    args.checkpoint_activations = "none"
    assert said(0.5)[1].endswith(": use a smaller --batch or --checkpoint-activations selective.")
    assert said(0.01)[1].endswith(": use --strategy zero3 with --checkpoint-activations block, or then with "
                                  "more processes.")


def test_dry_run_leaves_more_room_on_a_cpu():
    """Where fragmentation has taken 13 % of HRM 25m."""
    fit = [dry_run.fits({"together": 0.9e9}, 1.0, torch.device(device)) for device in ("cuda", "cpu")]
    assert fit == [True, False]


def run_of(*flags: str, device: str = "cuda") -> SimpleNamespace:
    world = SimpleNamespace(is_rank0=True, device=torch.device(device))
    return SimpleNamespace(args=resolve_flags(train_gpt2.parse_args([*flags])), model_class=GPT2, world=world)


def test_memory_is_asked_before_data_are_prepared(monkeypatch, tmp_path, corpus, capsys):
    """On GPUs alone. What fits is said; only what is far from it is refused, never if the data are there."""
    monkeypatch.chdir(tmp_path)
    flags = ("--size", "gpt2", "--n-layer", "2", "--no-compile", "--data", f"text:{corpus}", "--tokenizer",
             "bytes")

    def ask(gigabytes: float, device: str = "cuda") -> str:
        monkeypatch.setattr(dry_run, "machine", lambda *_: (1, gigabytes))
        dry_run.before_data(run_of(*flags, device=device), {})
        return capsys.readouterr().out

    monkeypatch.setattr(dry_run, "machine", lambda *_: (1, 100))
    needed = dry_run.dry_run(GPT2, run_of(*flags).args) * 100
    assert capsys.readouterr().out.endswith("fits.\n") and 1 < needed < 80
    assert not ask(2 * needed)
    warned = ask(needed / 1.2)
    assert re.fullmatch(r"WARNING: a process needs 120% of its memory, .* --strategy ddp does not fit: use a "
                        r"smaller --batch or .*\n", warned)
    with pytest.raises(UserError, match="needs 140% of its memory.* does not fit: use a smaller --batch or "):
        ask(needed / 1.4)
    assert not ask(needed / 1.4, device="cpu") and not (tmp_path / "shards").exists()
    whole = flags
    for more in ("--eval-only",), ("--batch", "1"):  # the last is what it has said
        flags = (*whole, *more)
        assert not ask(needed / 1.4)
    flags = whole
    prepare(f"text:{corpus}", None, "bytes")
    capsys.readouterr()
    assert not ask(needed / 9)


def test_a_model_with_an_example_of_its_own_is_not_asked(monkeypatch, tmp_path):
    class Own(GPT2):
        def dummy_inputs(self, batch, device, weights):
            raise AssertionError

    monkeypatch.chdir(tmp_path)
    run = run_of("--data", "text:any", "--tokenizer", "bytes")
    run.model_class = Own
    assert dry_run.before_data(run, {}) > 0


@pytest.mark.parametrize("name", ["gpt2", pytest.param("hrm", marks=pytest.mark.full),
                                  pytest.param("mlm", marks=pytest.mark.full)])
def test_a_trainer_asks_before_it_prepares(name, monkeypatch, tmp_path, corpus):
    def refuse(run, example):
        inputs = dry_run.empty_model(run.model_class, run.args).dummy_inputs(2, "meta", **example)
        raise UserError(f"asked of {len(inputs)} inputs")

    monkeypatch.setattr(startup.run, "before_data", refuse)
    monkeypatch.chdir(tmp_path)
    done = TRAINERS[name].train(0, f"text:{corpus}", "run", tokenizer="bytes")
    assert done.code == 2 and "error: asked of" in done.out and not [*tmp_path.iterdir()], done.out

"""What is shared out between processes changes where tensors lie and what travels, not what is computed."""

import json
import re
import time
from pathlib import Path

import pytest
from conftest import finish, run
from runs import PUBLISHED, Trainer, assert_close_runs, assert_same_run, log_of

from ddp_utils import list_checkpoints

STRATEGIES = {"ddp": {}, "zero1": {"strategy": "zero1"}, "zero2": {"strategy": "zero2"},
              "zero3": {"strategy": "zero3"}, "offload": {"strategy": "zero3", "cpu_offload": True}}
COMMON = {"n_layer": 2, "global_batch": 8, "steps": 20, "save_every": 10, "eval_every": 10}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", **COMMON), "mlm": Trainer("train_mlm.py", **COMMON),
            "hrm": Trainer("train_hrm.py", **COMMON, sample_prompt="def", max_new_tokens=4)}
RESUMED = re.compile(r"resuming after step (\d+)")


def run_all(ranks, shards, base, wanted, timeout=90):
    """Runs what is wanted, (model, name of the run, changed flags[, sabotage]), in one group of processes."""
    commands = [[*sabotage, *[""] * (not sabotage), TRAINERS[model].script,
                 *TRAINERS[model].flags(shards, base / name, **changes)]
                for model, name, changes, *sabotage in wanted]
    done = run(ranks, Path("tests", "many_runs.py"), json.dumps(commands), timeout=timeout)
    assert done.code == 0, done.out
    return done


def step_of(path: Path) -> int:
    return int(path.name[5:13])


def first_checkpoint(run_directory: Path) -> Path:
    return list_checkpoints(run_directory)[-1]


def assert_resumes_alike(whole: Path, resumed: Path, bound=1e-5) -> None:
    """A run that began at step 10 has the losses of one that began at 0."""
    a, b = ([r for r in log_of(out) if r["step"] > 10] for out in (whole, resumed))
    assert [r["step"] for r in a] == [r["step"] for r in b]
    assert max(abs(x["loss"] - y["loss"]) for x, y in zip(a, b)) <= bound
    assert abs(a[-1]["val_loss"] - b[-1]["val_loss"]) <= bound


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
    ("gpt2", tuple(STRATEGIES), {}),
    pytest.param("mlm", ("ddp", "zero1", "zero3"), {}, marks=pytest.mark.long),
    ("hrm", ("ddp", "zero1", "zero2"), {"ema": 0.9, "halt": True, "optimizer": "adam-atan2"}),
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


def test_adaptive_depth_is_agreed_on_under_fsdp():
    """With zero3, ranks that run different numbers of cycles wait for each other for ever."""
    agreed = run(2, "tests/ddp_worker.py", "agree")
    assert agreed.code == 0 and all(f"rank {rank} ran 4 cycles" in agreed.out for rank in (0, 1)), agreed.out
    alone = run(2, "tests/ddp_worker.py", "alone")
    assert alone.code == 1 and "rank 0 ran 1 cycles" in alone.out and "rank 1 ran" not in alone.out, alone.out
    assert "Timed out waiting 5000ms" in alone.out, alone.out


# -----------------------------------------------------------------------------------------------------------
# Slow links

SLOW = {"bf16": {"comm": "bf16", "d_model": 160, "n_layer": 3},  # more than fits DDP's first bucket
        "diloco": {"outer_every": 3, "outer_start": 4, "comm": "bf16"}}


def test_slow_link_modes_resume_bit_for_bit(tmp_path, shards):
    """Including what each rank alone knows; and without that, a resumed run is another one."""
    run_all(2, shards, tmp_path, [("gpt2", name, flags) for name, flags in SLOW.items()])
    alone = [name for name in SLOW if name != "bf16"]
    for name in SLOW:
        copy_of_the_first_half(tmp_path / name, tmp_path / "again" / name)
    for name in alone:
        copy_of_the_first_half(tmp_path / name, tmp_path / "broken" / name)
    done = run_all(2, shards, tmp_path, [
        *(("gpt2", f"again/{name}", flags) for name, flags in SLOW.items()),
        *(("gpt2", f"broken/{name}", SLOW[name], "local") for name in alone)])
    assert RESUMED.findall(done.out) == ["10"] * (len(SLOW) + len(alone)), done.out
    for name in SLOW:
        assert_same_run(tmp_path / name, tmp_path / "again" / name)
    for name in alone:
        with pytest.raises(AssertionError):
            assert_same_run(tmp_path / name, tmp_path / "broken" / name)


def copy_of_the_first_half(source: Path, target: Path) -> None:
    """A copy of a run as it was after its first checkpoint."""
    (target / "checkpoints").mkdir(parents=True)
    first = first_checkpoint(source)
    (target / "checkpoints" / first.name).write_bytes(first.read_bytes())
    lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    (target / "metrics.jsonl").write_text("".join(lines[:10]))


@pytest.mark.long
@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("model", TRAINERS)
def test_killed_runs_on_slow_links(tmp_path, shards, model, name, ranks):
    changes = SLOW[name] | {"steps": 40, "save_every": 4, "global_batch": 12}
    TRAINERS[model].check_killed_run(tmp_path, ranks, shards, **changes)


@pytest.mark.long
def test_others_resume_what_each_rank_had_for_itself(tmp_path, shards):
    """On another number of ranks, later apart, or never apart again."""
    diloco = SLOW["diloco"]
    run_all(2, shards, tmp_path, [("gpt2", "diloco", diloco)])
    first = {"resume": first_checkpoint(tmp_path / "diloco")}
    one = TRAINERS["gpt2"].train(0, shards, tmp_path / "one", **diloco | first)
    done = run_all(2, shards, tmp_path, [
        ("gpt2", "later", diloco | first | {"outer_start": 15}), ("gpt2", "never", first)])
    assert one.code == 0 and one.out.count("cannot be used by this run") == 1, one.out
    assert done.out.count("cannot be used by this run") == 2, done.out
    for name in ("one", "later", "never"):
        assert log_of(tmp_path / name)[-1]["val_loss"] < log_of(tmp_path / "diloco")[9]["val_loss"]


def test_a_bad_gradient_on_one_rank_while_apart(tmp_path, shards):
    """Ranks that train apart see different norms, but save, evaluate and go on together."""
    done = run_all(2, shards, tmp_path, [("gpt2", "run", SLOW["diloco"] | {"outer_every": 30}, "inf:10:1")])
    log = log_of(tmp_path / "run")
    assert [r["step"] for r in log if r["skipped"]] == [10], done.out
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run")] == [20]


def test_skipped_updates(tmp_path, shards):
    """A run with one resumes bit for bit; and a run that ends with one is saved."""
    run_all(2, shards, tmp_path, [("gpt2", "whole", SLOW["bf16"], "inf:15"),
                                  ("gpt2", "last", {"steps": 12}, "inf:12")])
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "again")
    run_all(2, shards, tmp_path, [("gpt2", "again", SLOW["bf16"], "inf:5")])
    assert_same_run(tmp_path / "whole", tmp_path / "again")
    assert [r["step"] for r in log_of(tmp_path / "again") if r["skipped"]] == [15]
    assert [step_of(path) for path in list_checkpoints(tmp_path / "last")] == [12, 10]


def test_a_signal_while_apart_makes_the_processes_meet(tmp_path, shards):
    """So the checkpoint does not wait for the next meeting, here in 10,000 steps."""
    flags = {"steps": 10_000, "save_every": 10_000, "eval_every": 10_000, "outer_every": 10_000}
    process = TRAINERS["gpt2"].start(2, shards, tmp_path / "run", **flags)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len(log_of(tmp_path / "run")) < 10:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.terminate()
    done = finish(process, 60)
    assert "stopped by SIGTERM" in done.out and len(list_checkpoints(tmp_path / "run")) == 1, done.out


def test_samples_after_a_resume_under_zero3(tmp_path, shards):
    """All ranks write the sample, though only the first knows how many evaluations there were."""
    flags = {"strategy": "zero3", "eval_every": 5, "sample_every": 2, "save_every": 5, "max_new_tokens": 3}
    run_all(2, shards, tmp_path, [("gpt2", "run", flags | {"steps": 5}), ("gpt2", "run", flags)])
    text = (tmp_path / "run" / "train.log").read_text()
    assert re.findall(r"a sample after step (\d+)", text) == ["5", "10", "20"]


def test_diloco_with_one_step_apart_changes_nothing(tmp_path, shards):
    """One process that meets itself after every step, with an outer rate of 1 and no momentum, trains as
    without DiLoCo, but for the rounding of its moves to bf16; with another rate it does not."""
    outer = {"outer_every": 1, "outer_lr": 1, "outer_momentum": 0}
    gpt2 = TRAINERS["gpt2"]
    for name, flags in (("plain", {}), ("outer", outer), ("half", outer | {"outer_lr": 0.5})):
        assert gpt2.train(0, shards, tmp_path / name, **flags).code == 0
    assert_close_runs(tmp_path / "plain", tmp_path / "outer", bound=2e-3)
    with pytest.raises(AssertionError):
        assert_close_runs(tmp_path / "plain", tmp_path / "half", bound=2e-3)


@pytest.mark.parametrize("flags, sentence", (
    ({"strategy": "zero2", "optimizer": "muon"}, "full matrices"),
    ({"strategy": "zero3", "precision": "fp16"}, "use bf16"),
    ({"cpu_offload": True}, "--strategy zero3"),
    ({"strategy": "zero1", "comm": "bf16"}, "--comm needs"),
    ({"strategy": "zero2", "outer_every": 5}, "--outer-every needs"),
    ({"outer_every": 5, "ema": 0.9}, "--ema"),
    ({"outer_every": 5, "precision": "fp16"}, "--precision bf16"),
    ({"comm": "powersgd:2"}, "invalid choice: 'powersgd:2'")))
@pytest.mark.parametrize("model", TRAINERS)
def test_combinations_that_are_refused(tmp_path, shards, model, flags, sentence):
    done = TRAINERS[model].train(0, shards, tmp_path / "out", **flags)
    assert done.code == 2 and sentence in done.out, done.out
    assert not (tmp_path / "out").exists()


def test_dry_run_says_what_fits():
    of = ("--size", "gpt2", "--n-layer", "2", "--data", "fineweb-edu", "--no-compile", "--dry-run")
    tiny, small, large = (TRAINERS["gpt2"].here(*of, gpus) for gpus in ("8x0.1", "8x2", "8x80"))
    assert tiny.code == small.code == large.code == 0 and "8 processes with 80 GB" in large.out
    assert "--strategy ddp does not fit" in small.out and "--strategy ddp fits." in large.out
    assert "a smaller --batch" in small.out and "a smaller --batch" not in tiny.out
    parameters = int(re.search(r"GPT2 of ([\d,]+) parameters", large.out)[1].replace(",", ""))
    assert f"a checkpoint is {12 * parameters / 1e9:.2f} GB" in large.out
    assert "is not GPUs" in TRAINERS["gpt2"].here("--dry-run", "8").out

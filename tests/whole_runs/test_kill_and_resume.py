"""A run that is killed and started again equals one that was left alone. On another number of processes it
differs only by rounding.
"""

import itertools

import pytest
from runs import PUBLISHED, Trainer, assert_close_runs, assert_same_run, ended

FULL, LONG = pytest.mark.full, pytest.mark.long
TRAINERS = {"gpt2": Trainer("train_gpt2.py", max_new_tokens=3),
            "hrm": Trainer("train_hrm.py", max_new_tokens=3, ff=64),
            "mlm": Trainer("train_mlm.py", ff=48, window=16)}
EVERYTHING = {"batch": 3, "ema": 0.9, "halt": True, "dropout": 0.1, "precision": "bf16",
              "optimizer": "adam-atan2", "steps": 16}
WHOLE_CYCLES = {"h_cycles": "1:4", "l_cycles": 1, "bp_cycles": 2, "inject_input": True, "qk_norm": True,
                "eval_cycles": 6}
# trainer, processes, flags; each pair of them is in one of these
KILLED = [
    ("hrm", 2, EVERYTHING),
    *(pytest.param(*case, marks=FULL) for case in [
        ("gpt2", 2, {"modern": True, "optimizer": "muon", "ema": 0.9, "batch": 2, "strategy": "zero1"}),
        ("gpt2", 0, {"precision": "fp16", "dropout": 0.1, "checkpoint_activations": "selective"}),
        ("gpt2", 3, {"strategy": "zero3", "precision": "bf16", "batch": 2}),
        ("hrm", 0, WHOLE_CYCLES | {"ema": 0.9}),
        ("hrm", 3, PUBLISHED | {"strategy": "zero2", "batch": 2}),
        ("mlm", 0, {"precision": "bf16", "ema": 0.9}),
        ("mlm", 2, {"strategy": "zero3", "checkpoint_activations": "block", "dropout": 0.1, "batch": 2})]),
    *(pytest.param(name, ranks, {"strategy": strategy, "batch": 3} | flags, marks=LONG)
      for name, variants in {"gpt2": [{}, {"optimizer": "muon", "dropout": 0.1}],
                             "hrm": [EVERYTHING, WHOLE_CYCLES, PUBLISHED],
                             "mlm": [{"dropout": 0.1, "ema": 0.9}]}.items()
      for flags, ranks, strategy in itertools.product(variants, (1, 4), ("ddp", "zero1", "zero2", "zero3"))
      if flags.get("optimizer") != "muon" or strategy in ("ddp", "zero1"))]  # Muon needs whole matrices


# The case of the first tier takes about 10 s on idle cores: three runs of all features on two processes.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, ranks, flags", KILLED, ids=str)
def test_a_killed_run_resumes_bit_for_bit(name, ranks, flags, shards, tmp_path):
    TRAINERS[name].check_killed_run(tmp_path, ranks, shards, **flags)


@pytest.mark.full
def test_the_number_of_processes_changes_nothing_but_rounding(shards, tmp_path):
    """Also if the number of cycles is drawn."""
    for ranks, seed in ((0, 0), (3, 0), (0, 1)):
        ended(TRAINERS["hrm"].fork(ranks, shards, tmp_path / f"{ranks + seed}", batch=2, steps=20,
                                    save_every=20, h_cycles="1:3", seed=seed))
    assert_close_runs(tmp_path / "0", tmp_path / "3")
    with pytest.raises(AssertionError):  # the control
        assert_close_runs(tmp_path / "0", tmp_path / "1")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "0", tmp_path / "3")


@pytest.mark.parametrize("order", [
    (0, 2, 0), pytest.param((4, 1, 2), marks=FULL)], ids=str)
def test_a_run_resumes_on_another_number_of_processes(order, shards, tmp_path):
    flags = {"schedule": "constant", "bp_steps": 4, "save_every": 100, "eval_every": 100}
    ended(TRAINERS["hrm"].fork(order[0], shards, tmp_path / "same", steps=18, **flags))
    for i, ranks in enumerate(order, 1):
        ended(TRAINERS["hrm"].fork(ranks, shards, tmp_path / "changing", steps=6 * i, **flags))
    assert_close_runs(tmp_path / "same", tmp_path / "changing")

"""startup/plan.py: the batches of a run, what it shows at its start and at its end."""

import re
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from states import make_state, world  # noqa: F401

from cli.errors import UserError
from model import HRM
from startup.plan import plan_batch, say_plan, what_next


@pytest.mark.parametrize("given, plan", [
    ((1, None, None, None, 16, 8), (16, 8, 2)), ((2, 12, None, None, 16, 5), (12, 3, 2)),
    ((2, 12, None, 6, 16, 4), (12, 1, 6)), ((3, None, 2, 4, 16, 8), (24, 2, 4)),
    ((3, None, None, None, 1024, 64), (1062, 59, 6)), ((5, None, None, None, 16, 8), (15, 3, 1)),
    ((5, None, 4, None, 48, 8), (40, 4, 2)), ((64, None, None, None, 16, 8), (64, 1, 1))])
def test_batches_divide_a_step(given, plan):
    """Without flags into the largest micro-batches, within 5 % of what is wanted."""
    assert plan_batch(*given) == plan


@pytest.mark.parametrize("given, ways", [
    ((8, None, 32, None, 16, 8), ["2", "1", "256"]), ((4, 3, None, None, 16, 8), ["4"]),
    ((2, 11, None, None, 16, 8), ["10"]), ((1, 12, None, 5, 16, 8), ["2", "6", "5"]),
    ((1, 12, 4, 2, 16, 8), ["4", "3", "8"])])
def test_a_batch_that_does_not_fit_names_one_that_does(given, ways):
    with pytest.raises(UserError) as problem:
        plan_batch(*given)
    assert re.findall(r"--[a-z-]+ (\d+)", str(problem.value))[-len(ways):] == ways


@pytest.mark.parametrize("flags, found", [
    ((None, None, None), 540), ((480, None, None), 480), ((None, 8, None), 480), ((None, None, 3), 540),
    ((500, None, None), "--global-batch 480 or 540"), ((480, 9, None), "--global-batch 540"),
    ((None, 2, 3), "--grad-accum")])
def test_every_number_of_nodes_in_a_range_divides_a_step(monkeypatch, flags, found):
    """So the order of samples doesn't depend on who is here. The later starts of a run want its number."""
    monkeypatch.setenv("NNODES", "2:5")
    if isinstance(found, int):
        plans = [plan_batch(world, *flags, wanted, 32) for world in (2, 3, 4, 5) for wanted in (512, found)]
        assert {plan[0] for plan in plans} == {found}
    else:
        with pytest.raises(UserError, match=found):
            plan_batch(5, *flags, 512, 32)


@pytest.mark.parametrize("loss", ["all", "response"])
def test_the_plan_of_a_run(world, loss):
    """A small text is warned of, but not small pairs: a few learned tokens need many passes."""
    said, state = [], make_state(world)
    unused = "precision checkpoint_activations strategy compile fast backend epochs".split()
    settings = dict.fromkeys(unused) | {"size": "tiny", "seq_len": 8, "eval_batches": 0, "eval_batch": 16,
                                        "warmup": 30}
    dataset = SimpleNamespace(train=SimpleNamespace(rows=60, num_tokens=480), val={}, val_splits=(), short={},
                              name="d" * 90, loss=loss)
    run = SimpleNamespace(world=world, dataset=dataset, say=said.append, size_defaults={},
                          steps=300, global_batch=16, batch=8, grad_accum=2, needs="")
    state.model.__class__ = type("FSDPHRM", (HRM,), {})  # as in shards
    say_plan(run, state, SimpleNamespace(settings=settings, val_tokens=0, entropy=3.0), "run directory",
             Counter(["a GPU"]), True)
    plan, *after = said
    assert any(" 80 times" in text for text in after) == (loss == "all")
    for row in ("size        HRM tiny", "parameters  7,680, 5,632 of them in 2 blocks",
                "batch       8 x accumulation 2 x processes 1 = 16 sequences",
                "steps       300, 3.8 an epoch", "tokens      128 a step, 38,400 in all"):
        assert f"\n  {row}" in plan
    assert [line for line in plan.splitlines() if len(line) > 80] == [14 * " " + "d" * 90]


@pytest.mark.parametrize("trainer, args, pairs, vocab_size, use", [
    ("train_gpt2.py", {}, -1, None, "--prompt The"), ("train_gpt2.py", {}, 0, None, "--chat"),
    ("train_mlm.py", {"fill": None}, -1, None, "--fill 'The [MASK] sat.'"),
    ("mine/train_own.py", {}, -1, 64, "--eval-only")])
def test_the_end_of_a_run_names_what_comes_next(tmp_path, monkeypatch, trainer, args, pairs, vocab_size,
                                                use):
    """Commands for this model that can be pasted into this directory."""
    monkeypatch.chdir(tmp_path)
    run = SimpleNamespace(out=Path("my runs/one"), trainer=tmp_path / trainer, command="torchrun again",
                          dataset=SimpleNamespace(marker_ids={"response": pairs}, vocab_size=vocab_size),
                          args=Namespace(**args))
    for again in ([], ["  torchrun again"]):
        assert what_next(run, bool(again)).splitlines()[1:] == [
            f"  python {trainer} --out 'my runs/one' {use}", *again]

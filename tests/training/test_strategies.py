"""training/strategies.py: what is shared out between processes changes where tensors lie and what travels. It
doesn't change what is computed.
"""

import contextlib
import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from ddp_worker import run_checks
from many_runs import TRAINERS, assert_resumes_alike, run_all
from runs import (
    PUBLISHED,
    assert_close_runs,
    assert_same_run,
    copy_of_the_first_half,
    first_checkpoint,
    steps_of,
)
from states import batch, flags_of, make, placed, train_state
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt2
import train_hrm
from cli.errors import UserError
from cli.flags import SHARDED, STRATEGIES
from ddp_utils import list_checkpoints, step_of
from model import use_device
from ops.ema import local_shard
from training.strategies import memory_of, refuse_together, reshard, wrap


@pytest.mark.parametrize("place, flags, named", [
    ("cpu gloo", "--strategy zero2 --optimizer muon", "--strategy ddp or zero1"),
    ("cpu gloo", "--strategy zero1 --comm bf16", "--strategy ddp, zero2 or zero3"),
    ("cpu gloo", "--strategy zero2 --comm bf16 --precision fp32", "--precision bf16"),
    ("cpu gloo", "--strategy zero2 --comm bf16 --precision bf16", None),
    ("cpu gloo", "--comm bf16 --precision fp32", None),
    ("cpu gloo", "--strategy zero1 --comm late --precision bf16", "--strategy ddp"),
    ("cpu gloo", "--comm late --precision fp16", "--precision bf16 or fp32"),
    ("cpu gloo", "--comm late --precision bf16", None),
    # on an H200, zero3 with gloo ended in a segmentation fault of torch
    *(("cuda gloo", f"--precision fp32 --strategy {strategy}{use}", f"{strategy} .*NCCL.*zero1")
      for strategy in SHARDED for use in ("", " --eval-only")),
    ("cuda gloo", "--precision fp32 --strategy zero3 --prompt a", None),  # which takes ddp
    ("cuda nccl", "--precision fp32 --strategy zero3", None),
    ("cpu gloo", "--precision fp32 --strategy zero3", None)])
def test_combinations_that_are_refused(place, flags, named):
    device, backend = place.split()
    world = SimpleNamespace(device=torch.device(device), backend=backend)
    with pytest.raises(UserError, match=named) if named else contextlib.nullcontext():
        refuse_together(flags_of(train_gpt2, flags.split()), world)


# -------------------------------------------------------------------------------------------- two processes

def test_on_two_processes():
    run_checks(__file__)


def check_gradients(world) -> None:
    """Every parameter has a gradient at each depth that the ramp visits, of zeros if it is not reached, and
    the mean over ranks is that of one process with all samples. With bf16 it is rounded.
    """
    for comm, changes in (("fp32", {}), ("bf16", {}), ("fp32", {"inject_input": True}),
                          ("fp32", {"halt": True})):
        model = make(**changes)
        if changes.get("halt"):
            torch.nn.init.normal_(model.halt.weight, std=0.1)
        alone, wrapped, rounded = copy.deepcopy(model), wrap(model, world, comm), comm == "bf16"
        for bp_steps in range(2, 6):
            model.zero_grad()
            objective = wrapped(*batch(world.rank), bp_steps=bp_steps, ponder_weight=0.1)[0]
            (objective / 32).backward()
            zero = [n for n, p in model.named_parameters() if not p.grad.any()]
            assert zero == ["embed.weight"] * (not model.config.reaches_embedding(bp_steps))
        both = map(torch.cat, zip(batch(0), batch(1)))
        (alone(*both, bp_steps=5, ponder_weight=0.1)[0] / 64).backward()
        for p, q in zip(model.parameters(), alone.parameters()):
            rtol, atol = (0.02, 1e-3) if rounded else (1e-4, 2e-7)
            torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=atol)
            assert torch.equal(p.grad, p.grad.bfloat16().float()) == rounded or not p.grad.any()


def check_depth(world) -> None:
    """Rank 0 wants one cycle, rank 1 all four: both run four. With zero3, ranks that run different numbers of
    cycles would wait for each other for ever.
    """
    for strategy in ("ddp", "zero3"):
        for biases, depth in (((9.0, -9.0), 4), ((9.0, 9.0), 1), ((-9.0, -9.0), 4)):
            model = placed(world, strategy, halt=True)
            decide = model.everyone_halted
            halted = torch.tensor(float(biases[world.rank] < 0))  # what remains
            model.everyone_halted = lambda _, decide=decide, halted=halted: decide(halted)
            with torch.no_grad():
                assert model(*batch(world.rank))[1]["cycles"] == 32 * depth  # summed over labels


def check_memory(world) -> None:
    """Parameters, gradients and optimizer state in bytes after a step, as --dry-run says it, and half of it
    where that is what a strategy promises.
    """
    held = {}
    for strategy in STRATEGIES:
        model = placed(world, strategy, d_model=64, ff=128)
        state = train_state(model, world, strategy=strategy)
        state.wrapped(*batch(world.rank))[0].backward()
        norm = state.clip_gradients(1.0)
        gradients = [p.grad for p in model.parameters()]
        state.optimizer_step(1e-3, norm)
        tensors = {"parameters": model.parameters(), "gradients": gradients, "optimizer": [
            t for name, t in state.optimizer_tensors().items() if not name.endswith("/step")]}
        held[strategy] = {what: sum(local_shard(t).nbytes for t in found) for what, found in tensors.items()}
        # on a CPU nothing is offloaded
        said = memory_of(model, strategy.removesuffix("-offload"), flags_of(train_hrm, []), 2, 0)
        for what, n in held[strategy].items():
            exact = said[what]
            if what == "optimizer" and strategy == "zero1":  # whole tensors are dealt out
                exact = pytest.approx(exact, rel=0.3)
            elif what != "optimizer" and strategy not in ("ddp", "zero1"):
                exact = held["ddp"][what] / 2
                assert n < said[what]  # what is gathered for the time of a step is gone
            elif what == "gradients":
                exact -= max(p.nbytes for p in model.parameters())
            assert n == exact, (strategy, what)


class Calls(TorchDispatchMode):
    """Counts calls by their name, and those that send bfloat16."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[function.name()] += 1
        self.found[function.name(), "bf16"] += any(getattr(t, "dtype", None) == torch.bfloat16 for t in args)
        return function(*args, **(kwargs or {}))


def check_gathering(world) -> None:
    """HRM calls each block several times in a step: zero2 gathers parameters once, zero3 again and again."""
    for strategy in ("zero2", "zero3"):
        model = placed(world, strategy)
        for _ in range(2):  # two steps
            with Calls() as calls:
                for _ in range(3):  # micro-batches
                    model(*batch(world.rank), bp_steps=5)[0].backward()
                reshard(model)
            # a block of H, one of L, and what is outside
            assert (calls.found["c10d::_allgather_base_"] == 3) == (strategy == "zero2"), calls.found


def check_bf16_shards(world) -> None:
    """Blocks travel in bfloat16: the same bits forward, gradients rounded and no more."""
    found = []
    for strategy, comm in (("zero3", "fp32"), ("zero3", "bf16"), ("zero2", "bf16")):
        model = placed(world, strategy, comm, halt=True, bp_cycles=2, inject_input=True)
        use_device(model, world.device, torch.bfloat16)
        with Calls() as calls:
            objective = model(*batch(world.rank), bp_steps=5)[0]
            objective.backward()
        reshard(model)
        found.append((objective.item(), [p.grad.full_tensor() for p in model.parameters()]))
        for name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            sent = calls.found[name, "bf16"]
            assert 0 < sent < calls.found[name] if comm == "bf16" else not sent, calls.found
    (loss, exact), *others = found
    for other, gradients in others:
        off = [(a - b).norm() / b.norm() for a, b in zip(gradients, exact)]
        assert other == loss and 1e-4 < max(off) < 1e-2 and min(off) == 0, off  # 0 outside of blocks


# ----------------------------------------------------------------------------------------------- whole runs

@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model, ranks, strategies, changes", [
    ("gpt2", 2, STRATEGIES, {"grad_clip": 0.1}),  # of the norm of all shards
    ("hrm", 2, ("ddp", "zero1", "zero2"), {"ema": 0.9, "halt": True, "optimizer": "adam-atan2"}),
    *(pytest.param(model, ranks, STRATEGIES, changes, marks=pytest.mark.long)
      for model, ranks, changes in (("gpt2", 4, {}), ("hrm", 2, PUBLISHED), ("mlm", 2, {})))])
def test_strategies_compute_the_same(tmp_path, shards, model, ranks, strategies, changes):
    """And checkpoints of one are resumed under the next, and by one process."""
    def run(wanted: dict):
        runs = [(model, name, changes | flags) for name, flags in wanted.items()]
        run_all(ranks, shards, tmp_path, runs, timeout=400)

    run({name: {"strategy": name} for name in strategies})
    for name in strategies:
        assert_close_runs(tmp_path / "ddp", tmp_path / name)
    if "grad_clip" in changes:  # the control
        run_all(ranks, shards, tmp_path, [(model, "alone", changes | {"strategy": "zero2"}, "norm")])
        with pytest.raises(AssertionError):
            assert_close_runs(tmp_path / "ddp", tmp_path / "alone")
    pairs = {f"{old}-{new}": {"resume": first_checkpoint(tmp_path / old), "strategy": new}
             for old, new in zip(strategies, (*strategies[1:], "ddp"))}
    run(pairs)
    alone = TRAINERS[model].train(0, shards, tmp_path / "one", **changes,
                                  resume=first_checkpoint(tmp_path / name))
    assert alone.code == 0, alone.out
    for name in (*pairs, "one"):
        assert_resumes_alike(tmp_path / "ddp", tmp_path / name)


BF16 = {"comm": "bf16", "d_model": 160, "n_layer": 3}  # more than fits DDP's first bucket


@pytest.mark.full
def test_what_is_rounded_or_skipped_resumes_bit_for_bit(tmp_path, shards):
    """Gradients sent as bf16, with an update that is skipped; shards sent as bf16. A run that ends with a
    skipped update is saved.
    """
    ddp = {"precision": "bf16"}
    runs = {"bf16": BF16, "zero3": ddp | {"strategy": "zero3", "comm": "bf16"}}

    def skipping(step, suffix="", **changes):
        return [("gpt2", f"{name}{suffix}", flags | changes, f"nan:{step}" if name == "bf16" else "")
                for name, flags in runs.items()]

    run_all(2, shards, tmp_path, [
        *skipping(15), *skipping(15, "-fp32", comm="fp32"), ("gpt2", "ddp", ddp),
        ("gpt2", "last", {"steps": 12}, "nan:12")])
    for name in runs:
        copy_of_the_first_half(tmp_path / name, tmp_path / f"{name}-again")
    run_all(2, shards, tmp_path, skipping(5, "-again"))
    for name in runs:
        assert_same_run(tmp_path / name, tmp_path / f"{name}-again")
        with pytest.raises(AssertionError):  # they are rounded
            assert_same_run(tmp_path / name, tmp_path / f"{name}-fp32")
    assert_close_runs(tmp_path / "ddp", tmp_path / "zero3", 3e-3)
    with pytest.raises(AssertionError):
        assert_close_runs(tmp_path / "ddp", tmp_path / "zero3")
    assert [r["step"] for r in steps_of(tmp_path / "bf16-again") if r["skipped"]] == [15]
    assert [step_of(path) for path in list_checkpoints(tmp_path / "last")] == [12, 10]

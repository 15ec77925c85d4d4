"""Checks that need several processes: test_ddp_utils.py runs this file under torchrun, with their names. Each
runs on all ranks, and raises AssertionError there if it fails."""

import argparse
import contextlib
import functools
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from states import flags_of, run_of, train_state
from torch.utils._python_dispatch import TorchDispatchMode

import ddp_utils
import startup.run
import train_hrm
from cli.errors import RetryableError, RunError, UserError
from cli.flags import STRATEGIES
from ddp_utils import StopVote, World
from model import HRM, HRMConfig, use_device
from ops.ema import local_shard
from startup import dry_run
from training.step import DeviceNorm, TrainState, skips_on_device
from training.strategies import build_model, copy_weights, reshard, wrap
from vocab.tokenizer import load_tokenizer, with_markers
from weights import sampling

TINY = dict(vocab_size=60, padded_vocab=64, seq_len=16, n_layer=1, n_head=2, d_model=16, ff=32)


def make(seed=0, **changes) -> HRM:
    torch.manual_seed(seed)
    return HRM(HRMConfig(**TINY | changes))


def batch(seed) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(60, (2, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def raises(kind, function) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def check_agreement(world: World) -> None:
    assert ddp_utils.reduce_sum([world.rank, torch.tensor(0.5)], world) == [1.0, 1.0]
    assert ddp_utils.all_gather(0.1 * world.rank) == [0.0, 0.1]
    assert ddp_utils.on_rank0(lambda: world.rank) == 0

    def fail():
        raise UserError("only rank 0 knows this")
    assert raises(UserError, lambda: ddp_utils.on_rank0(fail)) == "only rank 0 knows this"
    ddp_utils.assert_same("the tokenizer", "ab" * 16, "way out")
    message = raises(UserError, lambda: ddp_utils.assert_same(
        "the tokenizer", ("cd" if world.rank == 0 else "ce") * 16, "way out"))
    assert message.startswith("the tokenizer on rank 1")


def check_failure(world: World) -> None:
    """What fails on one rank fails on all, and nobody waits for the one that failed."""
    assert ddp_utils.run_and_wait(lambda: world.rank) == world.rank

    def fail():
        if world.rank == 1:
            raise UserError("no such file on this node")
    assert raises(UserError, lambda: ddp_utils.run_and_wait(fail)) == "no such file on this node"
    for kind in (UserError, RetryableError):  # with the same exit code on all

        def fail_so(kind=kind):
            if world.rank == 1:
                raise kind("so")
        try:
            ddp_utils.run_and_wait(fail_so)
        except UserError as error:
            assert error.exit_code == kind.exit_code


def check_sync(world: World) -> None:
    model = make()
    ddp_utils.assert_in_sync(model)
    if world.rank == 1:  # one bit of one number
        model.L.blocks[0].down.weight.data.view(-1).view(torch.int32)[3] ^= 1
    message = raises(RunError, lambda: ddp_utils.assert_in_sync(model))
    assert message.startswith("L.blocks.0.down.weight on rank 1"), message
    copy_weights(model, model.state_dict(), world)
    ddp_utils.assert_in_sync(model)


def check_lost_best(world: World) -> None:
    """All ranks forget in the next save each best that rank 0 has not linked: here one whose link failed, and
    two that have no checkpoint."""
    state = train_state(make(), world, optimizer="adamw")
    with tempfile.TemporaryDirectory() as out:
        checkpoints = ddp_utils.Checkpoints(Path(out), world, 3, lambda _: None)
        checkpoints.log = SimpleNamespace(evaluations={1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0})
        checkpoints.save(1, state, {"loss": 2.5, "settings": {"steps": 9}})
        checkpoints.mark_best(1)
        futures.wait(ddp_utils.process.unwritten)
        checkpoints.save(2, state, {"loss": 2.5, "settings": {"steps": 9}})
        futures.wait(ddp_utils.process.unwritten)
        with mock.patch.object(os, "replace", side_effect=OSError("full")):
            checkpoints.mark_best(2)
            futures.wait(ddp_utils.process.unwritten)
        for step in (3, 4):  # their updates were skipped
            checkpoints.mark_best(step)
        checkpoints.save(5, state, {"loss": 2.5, "settings": {"steps": 9}})
        checkpoints.close()
    found = checkpoints.log.evaluations
    assert found == {1: 5.0, 2: math.inf, 3: math.inf, 4: math.inf}, found


def check_gradients(world: World) -> None:
    """Every parameter has a gradient at each depth that the ramp visits, of zeros if it is not reached; the
    mean over ranks is that of one process with all samples; and a parameter without any is refused."""
    for changes in ({}, {"inject_input": True}, {"halt": True}):
        model = make(**changes)
        if changes.get("halt"):
            torch.nn.init.normal_(model.halt.weight, std=0.1)
        wrapped = wrap(model, world)
        x, y = batch(world.rank)
        for bp_steps in range(2, 6):
            model.zero_grad()
            wrapped(x, y, bp_steps=bp_steps, ponder_weight=0.1)[0].backward()
            zero = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
            expected = [] if model.config.reaches_embedding(bp_steps) else ["embed.weight"]
            assert zero == expected and model.embed.weight.grad is not None, (changes, zero)
        alone = make(**changes)
        alone.load_state_dict(model.state_dict())
        xs, ys = zip(batch(0), batch(1))
        (alone(torch.cat(xs), torch.cat(ys), bp_steps=5, ponder_weight=0.1)[0] / 2).backward()
        for p, q in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    model = make()
    model.unused = torch.nn.Parameter(torch.zeros(2))
    idx, targets = batch(0)
    inputs = {"idx": idx, "targets": targets, "bp_steps": 2}
    message = raises(RunError, lambda: train_state(model, world).warm_up(inputs, {}))
    assert message.startswith("unused gets no gradient")


def check_depth(world: World) -> None:
    """Rank 0 wants one cycle, rank 1 all four: both run four; when both want one, both run one."""
    for biases, depth in (((9.0, -9.0), 4), ((9.0, 9.0), 1), ((-9.0, -9.0), 4)):
        model = make(halt=True)
        model.halt.bias.data.fill_(biases[world.rank])
        with torch.no_grad():
            assert model(*batch(world.rank))[1]["cycles"] == 32 * depth  # summed over labels


def check_skipped_updates(world: World) -> None:
    for optimizer in ("adamw", "muon", "adam-atan2"):
        strategy = "zero1" if optimizer == "adam-atan2" else "ddp"
        state = train_state(make(), world, optimizer=optimizer, strategy=strategy)
        model = state.model

        def step(poison, state=state):
            objective, _ = state.wrapped(*batch(world.rank))
            (objective * (float("inf") if poison and world.rank == 1 else 1)).backward()
            norm = state.clip_gradients(1.0)
            state.optimizer_step(1e-2, norm)

        step(False)
        before = {n: p.clone() for n, p in model.state_dict().items()}
        moments = {n: t.clone() for n, t in state.optimizer_tensors().items()}
        for _ in range(state.MAX_SKIPPED - 1):  # not finite on one rank only
            step(True)
        assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
        assert all(torch.equal(t, moments[n]) for n, t in state.optimizer_tensors().items())
        assert "10 times in a row" in raises(RunError, lambda: step(True))
        step(False)
        assert not torch.equal(model.embed.weight, before["embed.weight"]) and state.skipped == 0
        ddp_utils.assert_in_sync(model)


def check_skips_on_device(world: World) -> None:
    """Updates that the device skips leave the same bits as those that the host skips: gradients that are not
    finite on one rank only, in the first step too, and steps without labels. They are counted a step later.
    """
    weights = make().state_dict()
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        found = []
        for on_device in (False, True):
            model = build_model(HRM, HRMConfig(**TINY), world, strategy)
            copy_weights(model, weights, world)
            state = train_state(model, world, strategy=strategy, ema=0.9)
            tensors = []

            def step(factor, state=state, on_device=on_device):
                objective, _ = state.wrapped(*batch(world.rank))
                (objective * (factor if world.rank == 1 or not factor else 1.0)).backward()
                norm = state.clip_gradients(1.0)
                assert isinstance(norm, DeviceNorm) == on_device
                state.optimizer_step(1e-2, norm)

            with mock.patch("training.step.skips_on_device", return_value=on_device):
                for factor in (math.inf, 1.0, 0.0, 1.0, math.nan, -math.inf, 1.0):
                    step(factor)
                    assert state.updated == math.isfinite(factor)
                    held = [local_shard(t).clone() for _, _, t, _ in state.state_dict() if not t.is_meta]
                    tensors += held if factor == 1.0 else []  # the host's first step makes no moments
                for _ in range(state.MAX_SKIPPED - 1):
                    step(math.inf)
                if on_device:
                    step(math.inf)
                last = functools.partial(step, 1.0 if on_device else math.inf)
                assert "10 times in a row" in raises(RunError, last)
            found.append(tensors)
        assert len(found[0]) == len(found[1]) > 7
        assert all(map(torch.equal, *found)), strategy


def check_who_skips_on_device(world: World) -> None:
    """With zero1 a rank without any parameters of an optimizer decides as the one that has them."""
    for fused, on_device in ((True, True), (None, False)):
        model = make()
        model.requires_grad_(False)
        model.embed.weight.requires_grad_()
        optimizer = torch.optim.AdamW([model.embed.weight], lr=1e-2, fused=fused)
        run = run_of(world, strategy="zero1")
        state = TrainState(model, [optimizer], run)
        held = [p for group in state.inner[0].param_groups for p in group["params"]]
        assert ddp_utils.all_gather(len(held)) in ([1, 0], [0, 1])
        model.embed.weight.grad = torch.zeros_like(model.embed.weight)
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            assert skips_on_device(state.inner[0], state.optimizers[0]) == on_device


def check_zero1_buffers(world: World) -> None:
    """One broadcast from each rank for each optimizer, and not one for each parameter."""
    for optimizer in ("adamw", "muon"):
        model = make()
        state = train_state(model, world, optimizer=optimizer, strategy="zero1", ema=0.9)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with mock.patch("torch.distributed.broadcast", wraps=torch.distributed.broadcast) as sent:
            state.optimizer_step(1e-2, 1.0)
        assert sent.call_count == 2 * len(state.optimizers) < len(list(model.parameters()))

        def buffers(model=model) -> set:
            return {p.untyped_storage().data_ptr() for p in model.parameters()}

        assert len(buffers()) == sent.call_count
        ddp_utils.assert_in_sync(model)
        before = buffers()
        with state.averaged_weights():
            assert buffers() == before
        copy_weights(model, make(seed=1).state_dict(), world)
        assert buffers() == before and torch.equal(model.embed.weight, make(seed=1).embed.weight)


def check_fp16_shards(world: World) -> None:
    """An infinite gradient in the shard of one rank is skipped by all, and halves the scale of all."""
    for strategy in ("zero2", "zero3", "zero3-offload"):
        config = HRMConfig(**TINY)
        model = build_model(HRM, config, world, strategy)
        copy_weights(model, make().state_dict(), world)
        model.compute_dtype = torch.float16
        state = train_state(model, world, strategy=strategy, precision="fp16")

        def step(poison: bool, state=state) -> float:
            objective, _ = state.wrapped(*batch(world.rank))
            state.scaler.scale(objective / 32).backward()
            reshard(state.model)
            if poison and world.rank == 1:
                gradient = next(p.grad for p in state.model.parameters() if p.grad is not None)
                local_shard(gradient).view(-1)[0] = float("inf")
            state.optimizer_step(1e-2, state.clip_gradients(1.0))
            scale = state.scaler.get_scale()
            assert ddp_utils.find_mismatch([scale]) is None
            return scale

        scale = step(False)
        before = {name: local_shard(p).clone() for name, p in model.state_dict().items()}
        assert step(True) == scale / 2 > 0
        assert all(torch.equal(local_shard(p), before[name]) for name, p in model.state_dict().items())
        assert step(False) == scale / 2
        assert not torch.equal(local_shard(model.embed.weight), before["embed.weight"])


def check_bf16_gradients(world: World) -> None:
    """They are the mean of what the ranks have computed, to the precision of bfloat16."""
    model = make()
    wrapped = wrap(model, world, "bf16")
    (wrapped(*batch(world.rank))[0] / 32).backward()  # the mean over its labels
    alone = make()
    xs, ys = zip(batch(0), batch(1))
    (alone(torch.cat(xs), torch.cat(ys))[0] / 64).backward()
    for p, q in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=1e-3)


def check_memory(world: World) -> None:
    """Parameters, gradients and optimizer state in bytes after a step, as --dry-run says it, and half of it
    where that is what a strategy promises."""
    held = {}
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        config = HRMConfig(**TINY | {"d_model": 64, "ff": 128})
        model = build_model(HRM, config, world, strategy)
        copy_weights(model, HRM(config).state_dict(), world)
        trained = train_state(model, world, strategy=strategy)
        trained.wrapped(*batch(world.rank))[0].backward()
        norm = trained.clip_gradients(1.0)
        gradients = [local_shard(p.grad).nbytes for p in model.parameters()]
        trained.optimizer_step(1e-3, norm)
        state = trained.optimizer_tensors().items()
        tensors = {"parameters": list(model.parameters()),
                   "optimizer": [t for name, t in state if not name.endswith("/step")]}
        held[strategy] = {what: sum(local_shard(t).nbytes for t in found)
                                   for what, found in tensors.items()}
        held[strategy]["gradients"] = sum(gradients)
        # on a CPU nothing is offloaded
        said = dry_run.memory_of(model, strategy.removesuffix("-offload"), flags_of(train_hrm, []),
                                world.world_size, 0)
        for what, n in held[strategy].items():
            if what == "optimizer" and strategy == "zero1":  # whole tensors are dealt out
                assert 0.7 * said[what] <= n <= 1.3 * said[what], (strategy, what, n, said)
            elif what == "optimizer" or what == "parameters" and strategy in ("ddp", "zero1"):
                assert n == said[what], (strategy, what, n, said)
            elif strategy in ("ddp", "zero1"):
                assert n == said[what] - max(p.nbytes for p in model.parameters()), (strategy, what, n, said)
            else:  # what is gathered for the time of a step is gone
                assert n == held["ddp"][what] / 2 < said[what], (strategy, what, n, said)
        if strategy == "ddp":  # the next step adds to DDP's buckets from its first micro-batch on
            trained.wrapped(*batch(world.rank))[0].backward()  # DDP makes its last buckets
            buckets = [p.grad.data_ptr() for p in model.parameters()]
            trained.clear_gradients()
            assert all(p.grad is None for p in model.parameters())  # nobody takes zeros for gradients
            with trained.no_sync(True):
                trained.wrapped(*batch(world.rank))[0].backward()
            assert buckets == [p.grad.data_ptr() for p in model.parameters()]


def check_gathering(world: World) -> None:
    """HRM calls each block several times in a step: zero2 gathers parameters once, zero3 again and again."""
    found = {}
    for strategy in ("zero2", "zero3"):
        config = HRMConfig(**TINY)
        model = build_model(HRM, config, world, strategy)
        copy_weights(model, HRM(config).state_dict(), world)
        for _ in range(2):  # two steps
            with Sent() as sent:
                for _ in range(3):  # micro-batches
                    model(*batch(world.rank), bp_steps=5)[0].backward()
                reshard(model)
            found[strategy] = sent.calls["c10d::_allgather_base_"]
    assert found["zero2"] == 3 < found["zero3"], found  # a block of H, one of L, and what is outside


class Sent(TorchDispatchMode):
    """Counts calls by their name, and the bytes of whole parameters, gathered or reduced, by their type."""

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.name()] += 1
        if function.name() in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            largest = max((t for t in args if isinstance(t, torch.Tensor)), key=lambda t: t.nbytes)
            self.found[function.name()[6:12], largest.dtype] += largest.nbytes
        return function(*args, **(kwargs or {}))


def check_bf16_shards(world: World) -> None:
    """Blocks travel in bfloat16: the same bits forward, half the bytes, gradients rounded and no more."""
    for changes in ({}, {"halt": True, "bp_cycles": 2, "inject_input": True}):
        found = {}
        for strategy, comm in (("zero3", "fp32"), ("zero3", "bf16"), ("zero2", "bf16")):
            whole = make(**changes)
            model = build_model(HRM, whole.config, world, strategy, comm)
            copy_weights(model, whole.state_dict(), world)
            use_device(model, world.device, torch.bfloat16)
            with Sent() as sent:
                objective = model(*batch(world.rank), bp_steps=5)[0]
                objective.backward()
            reshard(model)
            gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            found[strategy, comm] = objective.item(), gradients, sent.found
        (loss, exact, all_fp32), *others = found.values()
        for other, gradients, _ in others:
            assert other == loss
            off = [(gradients[name] - exact[name]).norm() / exact[name].norm() for name in exact]
            assert 1e-4 < max(off) < 1e-2, off
            assert any(torch.equal(gradients[name], exact[name]) for name in exact)  # outside of blocks
        for kind in ("_allga", "_reduc"):
            sent = found["zero3", "bf16"][2]
            blocks = all_fp32[kind, torch.float32] - sent[kind, torch.float32]
            assert 2 * sent[kind, torch.bfloat16] == blocks > 0, (kind, sent, all_fp32)


def check_owners(world: World) -> None:
    """What only one rank has arrives on rank 0 for a checkpoint, and comes back from there."""
    state = train_state(make(world.rank), world, strategy="zero1")
    torch.nn.functional.mse_loss(state.model(*batch(world.rank))[0], torch.zeros(())).backward()
    state.optimizer_step(1e-2, torch.ones(()))
    entries = [entry[1:] for entry in state.state_dict() if entry[0] == "optimizer"]
    assert {owner for _, _, owner in entries} == {0, 1}
    for name, tensor, owner in entries:
        assert (tensor.device.type == "meta") == (owner != world.rank), name
        there = ddp_utils.transfer(tensor, owner, 0, world)
        assert (there is None) == (world.rank != 0)
        back = ddp_utils.transfer(there if world.rank == 0 else tensor, 0, owner, world)
        assert (back is None) == (world.rank != owner)
        assert back is None or torch.equal(back, tensor)


def check_samples_have_one_prompt(world: World) -> None:
    """With zero3 they would write unlike many tokens, and one would be alone."""
    args, tokenizer = flags_of(train_hrm, []), with_markers(load_tokenizer("bytes"))
    dataset = argparse.Namespace(tokenizer=tokenizer, marker_ids=tokenizer.marker_ids)
    with mock.patch.object(sampling, "first_pair", lambda _: ("why", "so")):
        assert sampling.sample_prompt(args, dataset) == ("why", "so")


def check_who_writes_samples(world: World) -> None:
    """Rank 0 alone, for which the others wait; all of them, if each holds a shard."""
    texts, tokenizer = [], load_tokenizer("bytes")
    dataset = argparse.Namespace(tokenizer=tokenizer, marker_ids={"response": -1}, vocab_size=None)
    state = argparse.Namespace(model=make(), world=world, averaged_weights=contextlib.nullcontext)
    for strategy, writers in (("ddp", {0}), ("zero1", {0}), ("zero3", {0, 1})):
        args = flags_of(train_hrm, ["--strategy", strategy, "--sample-prompt", "a"])
        torch.distributed.barrier()
        written, began = [], time.monotonic()

        def slowly(*_, written=written):
            written.append(world.rank)
            time.sleep(1)
            return [["b"]]

        sampling.samples_of = slowly
        run = argparse.Namespace(args=args, dataset=dataset, world=world, say=texts.append)
        startup.run.sample(state, run, 1)
        assert set(written) == writers & {world.rank} and time.monotonic() - began > 0.5
        assert texts.pop() == f"a sample after step 1:\n{'ab' if world.rank in writers else 'a'}\n"


def check_stop(world: World) -> None:
    vote, state = StopVote(world), train_state(make(), world)
    assert vote.vote() == 0
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.1)
    assert vote.vote() == 0  # sent off before the signal
    state.wrapped(*batch(world.rank))[0].backward()
    assert vote.agreed == 0 and state.clip_gradients(1.0, vote) > 0 and vote.agreed == signal.SIGUSR1
    assert vote.vote() == signal.SIGUSR1
    vote.read()
    assert vote.agreed == vote.vote() == signal.SIGUSR1


def check_machines(world: World) -> None:
    """One collective collects the memory and the use of all GPUs."""
    used = {"System/GPU_percent": 40.0 + 50 * world.rank, "System/GPU_VRAM_MB": 7.0 + world.rank}
    gathered = mock.Mock(wraps=ddp_utils.all_gather)
    with mock.patch.multiple(ddp_utils, all_gather=gathered, machine_curves=lambda host: used,
                             memory_gb=lambda device: 3.0 - world.rank):
        found = ddp_utils.Metrics.machines(SimpleNamespace(world=world))
    assert found == {"mem_gb": 3.0, "System/GPU_percent": 40.0, "System/GPU_VRAM_MB": 7.0,
                     "System/GPU_percent_least": 40.0, "System/GPU_percent_most": 90.0}, found
    assert gathered.call_count == 1


def differing_depth(world: World, agree: bool) -> None:
    """A forward pass with zero3 in which rank 0 wants one cycle and rank 1 wants all. If each goes its own
    way, rank 1 waits for parameters that rank 0 does not send."""
    config = HRMConfig(**TINY | {"halt": True})
    model = build_model(HRM, config, world, "zero3")
    copy_weights(model, HRM(config).state_dict(), world)
    wish, decide = torch.tensor(float(world.rank)), model.everyone_halted
    model.everyone_halted = lambda remaining: decide(wish) if agree else not wish.item()
    with torch.no_grad():
        cycles = model(*batch(world.rank))[1]["cycles"] / 32  # labels
    print(f"rank {world.rank} ran {cycles:.0f} cycles\n", end="", flush=True)
    time.sleep(0 if agree else 8)  # a rank that ends would be noticed at once


def run_checks(names: list[str]) -> None:
    world = ddp_utils.init(timeout=30)
    # not torchrun's 1, with which NCCL ends a process whose peer is lost before it can name the peer
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    for name in names:
        globals()[f"check_{name}"](world)
        torch.distributed.barrier()  # rank 0 may be through with one that fails on rank 1
        if world.is_rank0:
            print(f"check_{name} OK", flush=True)


if __name__ == "__main__":
    wanted = sys.argv[1:]
    if wanted == ["fail"]:
        ddp_utils.launch(lambda: 1 / 0)
    elif wanted in (["agree"], ["alone"]):
        ddp_utils.launch(lambda: differing_depth(ddp_utils.init(timeout=5), wanted == ["agree"]))
    else:
        ddp_utils.launch(lambda: run_checks(wanted))

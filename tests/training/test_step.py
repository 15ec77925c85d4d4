"""training/step.py: updates, those that are skipped, and what is restored of them."""

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ddp_worker import run_checks
from states import (  # noqa: F401
    batch,
    make,
    make_state,
    placed,
    run_of,
    save,
    take_step,
    train_state,
    world,
)
from torch.optim import SGD, Adagrad, Adam, AdamW

import ddp_utils
from cli.errors import RunError
from ddp_utils import load_checkpoint
from ops.ema import local_shard
from training.step import DeviceNorm, TrainState, skips_on_device
from training.strategies import reshard

ON_DEVICE = "training.step.skips_on_device"


def of_rank_1(world, factor: float) -> float:
    """A factor for the gradients of rank 1 alone; 0 is for all."""
    return factor if world.rank == 1 or not factor else 1.0


def copies(tensors: dict) -> dict:
    return {name: local_shard(t).clone() for name, t in tensors.items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_on_two_processes():
    run_checks(__file__)


def check_skipped_updates(world) -> None:
    """What is not finite on one rank is skipped by all. Ten in a row end the run, and nine do not."""
    for optimizer, strategy in (("muon", "ddp"), ("adam-atan2", "zero1")):
        state = train_state(make(), world, optimizer=optimizer, strategy=strategy)
        model = state.model
        take_step(state)
        before, moments = copies(model.state_dict()), copies(state.optimizer_tensors())
        for _ in range(9):
            take_step(state, of_rank_1(world, math.inf))
        assert same(before, model.state_dict()) and same(moments, state.optimizer_tensors())
        assert state.skipped == 9
        take_step(state)
        assert not torch.equal(model.embed.weight, before["embed.weight"]) and state.skipped == 0
        ddp_utils.assert_in_sync(model)
        state.skipped = 9
        with pytest.raises(RunError, match="10"):
            take_step(state, of_rank_1(world, math.nan))


def check_skips_on_device(world) -> None:
    """Updates that the device skips leave the same bits as those that the host skips: gradients that are not
    finite on one rank only, in the first step too, and steps without labels. They are counted a step later.
    """
    for strategy in ("ddp", "zero1", "zero3"):
        found = []
        for on_device in (False, True):
            state = train_state(placed(world, strategy), world, strategy=strategy, ema=0.9)
            tensors = []
            with mock.patch(ON_DEVICE, return_value=on_device), mock.patch.object(state, "MAX_SKIPPED", 3):
                for factor in (math.inf, 1.0, 0.0, 1.0, math.nan, -math.inf, 1.0):
                    norm = take_step(state, of_rank_1(world, factor))
                    assert isinstance(norm, DeviceNorm) == on_device
                    assert state.updated == math.isfinite(factor)
                    held = [local_shard(t).clone() for _, _, t, _ in state.state_dict() if not t.is_meta]
                    tensors += held if factor == 1.0 else []  # the host's first step makes no moments
                for _ in range(2 + on_device):
                    take_step(state, of_rank_1(world, math.inf))
                with pytest.raises(RunError, match="3 times"):
                    take_step(state, of_rank_1(world, 1.0 if on_device else math.inf))
            found.append(tensors)
        assert len(found[0]) == len(found[1]) > 7
        assert all(map(torch.equal, *found)), strategy


def check_who_skips_on_device(world) -> None:
    """With zero1 a rank without any parameters of an optimizer decides as the one that has them."""
    for fused in (True, None):
        model = make()
        model.requires_grad_(False)
        weight = model.embed.weight.requires_grad_()
        state = TrainState(model, [AdamW([weight], fused=fused)], run_of(world, strategy="zero1"))
        held = sum(len(group["params"]) for group in state.inner[0].param_groups)
        assert sorted(ddp_utils.all_gather(held)) == [0, 1]
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            assert skips_on_device(state.inner[0], state.optimizers[0]) == bool(fused)


def check_zero1(world) -> None:
    """Each rank sends its parameters in one buffer for each optimizer. What only one rank has arrives on rank
    0 for a checkpoint, and comes back from there.
    """
    model = make()
    state = train_state(model, world, optimizer="muon", strategy="zero1", ema=0.9)

    def buffers() -> set:
        return {p.untyped_storage().data_ptr() for p in model.parameters()}

    with mock.patch("torch.distributed.broadcast", wraps=torch.distributed.broadcast) as sent:
        take_step(state)
    before = buffers()
    assert sent.call_count == len(before) == 2 * len(state.optimizers) < len(list(model.parameters()))
    ddp_utils.assert_in_sync(model)
    entries = [entry[1:] for entry in state.state_dict() if entry[0] == "optimizer"]
    assert {owner for _, _, owner in entries} == {0, 1}
    for name, tensor, owner in entries:
        assert tensor.is_meta == (owner != world.rank), name
        there = ddp_utils.transfer(tensor, owner, 0, world)
        assert (there is None) == (world.rank != 0)
        back = ddp_utils.transfer(tensor if there is None else there, 0, owner, world)
        assert (back is None) == (owner != world.rank) and (back is None or torch.equal(back, tensor))


def check_fp16_shards(world) -> None:
    """An infinite gradient in the shard of one rank is skipped by all, and halves the scale of all."""
    for strategy in ("zero2", "zero3-offload"):
        model = placed(world, strategy)
        model.compute_dtype = torch.float16
        state, scales = train_state(model, world, strategy=strategy, precision="fp16"), []
        for poison in (0.0, math.inf, 0.0):
            before = copies(model.state_dict())
            state.scaler.scale(state.wrapped(*batch(world.rank))[0] / 32).backward()
            reshard(model)
            if world.rank == 1:
                local_shard(model.embed.weight.grad).view(-1)[0] += poison
            state.optimizer_step(1e-2, state.clip_gradients(1.0))
            assert same(before, copies(model.state_dict())) == (poison > 0) and state.skipped == 0
            scales += ddp_utils.all_gather(state.scaler.get_scale())
        assert scales == [scales[0]] * 2 + [scales[0] / 2] * 4 and scales[0] > 0


def check_warm_up(world) -> None:
    """It leaves no gradient, and refuses a parameter that gets none."""
    model = make()
    inputs = dict(zip(("idx", "targets"), batch(0)), bp_steps=2)
    train_state(model, world).warm_up(inputs)
    assert all(p.grad is None for p in model.parameters())
    model.unused = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(RunError, match="unused"):
        train_state(model, world).warm_up(inputs)


# ----------------------------------------------------------------------------------------- what is restored

@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adam-atan2"])
def test_what_is_saved_is_restored(tmp_path, world, optimizer):
    """The average goes on with the decay of its step, too."""
    def tensors(state) -> dict:
        return {f"{group}/{name}": t.clone() for group, name, t, _ in state.state_dict()}

    state, other = (make_state(world, seed, optimizer, ema=0.999) for seed in (0, 1))
    before = tensors(state)
    save(tmp_path, world, state, (2,))
    assert not torch.equal(other.model.embed.weight, state.model.embed.weight)
    other.ema.updates = 77
    saved = load_checkpoint(tmp_path, print)
    other.load_state_dict(saved, print)
    assert same(before, tensors(other)) and saved["step"] == 2 and saved["samples"] == 7
    for each in (state, other):
        take_step(each)
    assert same(tensors(state), tensors(other)) and other.ema.updates == 3


def test_another_optimizer_starts_afresh_where_it_must(tmp_path, world):
    """From AdamW to Muon and back: a parameter has the whole state that its optimizer saved, or none."""
    for old, new in (("adamw", "muon"), ("muon", "adamw")):
        (tmp_path / old).mkdir()
        save(tmp_path / old, world, make_state(world, 0, old))
        saved, said = load_checkpoint(tmp_path / old, print), []
        state = make_state(world, 1, new)
        state.load_state_dict(saved, said.append)
        restored = state.optimizer_tensors()
        names = {name.rpartition("/")[0] for name in restored}
        assert names == {n for n, _ in state.model.named_parameters() if ".blocks." not in n}
        assert all(torch.equal(t, saved["tensors"]["optimizer"][name]) for name, t in restored.items())
        assert "L.blocks.0.down.weight" in said[0]
        take_step(state)  # the fresh ones work


# ------------------------------------------------------------------------------------------- what waits

@contextlib.contextmanager
def waits():
    """Lists calls that would wait for a GPU. A CPU never waits."""
    found = []

    def counted(name):
        plain = getattr(torch.Tensor, name)

        def method(*args):
            found.append(name)
            return plain(*args)
        return method

    names = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")
    with mock.patch.multiple(torch.Tensor, **{name: counted(name) for name in names}):
        yield found


@pytest.mark.parametrize("optimizer, on_device, of_step", [
    ("muon", False, ["__float__", "item"]),  # for the norm, after the vote of the step before
    ("adam-atan2", False, ["__float__", "item"]),
    ("adamw", True, ["item", "__float__"])])  # for the norm and the vote of the step before
def test_a_step_waits_for_the_device_once(world, optimizer, on_device, of_step):
    state, stop = make_state(world, optimizer=optimizer), ddp_utils.StopVote(world)
    with mock.patch(ON_DEVICE, return_value=on_device):
        for number in range(4):
            with waits() as found:
                labels = ddp_utils.async_sum(8, world)
                norm = take_step(state, 1 / labels().clamp(min=1), stop)
                stop.vote()
            assert not number or found == of_step
            assert isinstance(norm, DeviceNorm) == on_device == (state._norm is not None)
    with waits() as found:
        assert state.updated and state.updated and state._norm is None
    assert found == ["item"] * on_device


# --------------------------------------------------------------------------------- what the device may skip

class Lookahead(torch.optim.Optimizer):
    """Keeps its optimizer where zero1 does."""

    def __init__(self, inner):
        self.optim = inner
        super().__init__(inner.param_groups, {})
        self.state = inner.state

    def step(self, closure=None):
        self.optim.step()
        with torch.no_grad():
            torch._foreach_mul_([p for group in self.param_groups for p in group["params"]], 0.5)


def test_who_may_skip_an_update_on_the_device():
    """torch's own fused classes, and nothing that could do more in a step than their kernels."""
    params = [torch.nn.Parameter(torch.zeros(2))]
    on_gpu = {"params": [SimpleNamespace(is_cuda=True)], "fused": True}

    def may(optimizer, *groups) -> bool:
        optimizer.param_groups = groups or [on_gpu]
        return skips_on_device(optimizer, optimizer)

    fused = [kind(params, fused=True) for kind in (AdamW, Adam, Adagrad)]
    assert all(map(may, fused))
    own = type("Own", (AdamW,), {})  # its step may do more
    others = Lookahead(AdamW(params, fused=True)), own(params, fused=True), SGD(params, fused=True)
    assert not any(map(may, others))
    # the second is on a CPU, or offloaded to it
    for group in (on_gpu | {"fused": None}, {"params": params, "fused": True}):
        assert not may(fused[0], on_gpu, group)
    fused[0].register_step_pre_hook(str)
    fused[1].register_step_post_hook(str)
    assert not any(map(may, fused[:2]))


@pytest.mark.parametrize("kind", [AdamW, Adam, Adagrad])
def test_fused_kernels_skip_where_found_inf_is_1(kind):
    """Parameters and state keep their bits, in a first step as well. SGD keeps a momentum without values."""
    def trained(kind, *gradients, **settings) -> list:
        p = torch.nn.Parameter(torch.ones(300))
        optimizer = kind([p], lr=0.1, fused=True, **settings)
        for gradient in gradients:
            p.grad = torch.full_like(p, gradient)
            optimizer.found_inf = torch.tensor(float(gradient == math.inf))
            with mock.patch("torch.empty_like", torch.ones_like):  # what is in memory by chance
                optimizer.step()
        return [p.detach(), *optimizer.state[p].values()]

    for gradients in ((math.inf, 1.0, 2.0), (1.0, math.inf, 2.0)):
        assert all(map(torch.equal, trained(kind, *gradients), trained(kind, 1.0, 2.0)))
    steps = (math.inf, 1.0), (1.0,)
    assert not torch.equal(*(trained(SGD, *each, momentum=0.9)[0] for each in steps))


def test_what_a_wrapper_does_beside_a_step_is_skipped_too(world):
    """By the host, which asks the wrapper, and not the optimizer inside, whether it can skip."""
    model = make()
    state = TrainState(model, [Lookahead(AdamW(model.parameters(), fused=True))], run_of(world))
    with mock.patch(ON_DEVICE, lambda optimizer, _: type(optimizer) is AdamW):
        for factor in (1.0, math.inf):
            before = copies(model.state_dict())
            assert type(take_step(state, factor)) is float
            assert same(before, model.state_dict()) == (factor > 1)


def test_a_norm_on_the_device_is_used_as_a_number():
    """By whoever copies a trainer: it compares, computes, formats and prints."""
    norm = torch.tensor(0.75).as_subclass(DeviceNorm)
    assert f"{norm:>8.1e} {norm} {[norm]}" == " 7.5e-01 0.75 [0.75]"
    assert 0 < norm < 1 and max(norm, 0.5) == 0.75 and math.log(norm) < 0 and type(2 * norm) is torch.Tensor

"""What training/step.py asks of an optimizer of your own: what it keeps is restored, or refused by name."""

import math
import re
from contextlib import nullcontext

import copies
import numpy as np
import pytest
import torch
from own_optimizers import Lists, Schedule
from states import META, run_of, world  # noqa: F401
from torch import nn

from cli.errors import RunError, UserError
from ddp_utils import Checkpoints, load_checkpoint
from model import GPT2, hidden_matrices
from training.step import TrainState, refuse_unsaved

TINY = {"vocab_size": 60, "padded_vocab": 64, "seq_len": 16, "n_head": 2, "d_model": 16}


def small(model_class=GPT2, **changes):
    torch.manual_seed(0)
    return model_class(model_class.Config(**TINY | {"n_layer": 1} | changes))


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, keeps):
        super().__init__(inner.param_groups, inner.defaults)
        self.parts = {"inner": [inner]}
        if not keeps:
            self.state = inner.state


def adamw(model) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


# the optimizers, and what the message names; "" where they are right
@pytest.mark.parametrize("optimizers, named", [
    (lambda m: [Lookahead(adamw(m), keeps=True)], "AdamW, which Lookahead"),
    (lambda m: [Lookahead(adamw(m), keeps=False)], ""),
    (lambda m: [torch.optim.Muon(hidden_matrices(m))], r"embed.weight in 0.*requires_grad_\(False\)"),
    (lambda m: [adamw(m), torch.optim.SGD([m.embed.weight])], "embed.weight in 2"),
    (lambda m: [adamw(m), torch.optim.Adam(nn.Linear(300, 200).parameters())], r"\(2,.*\[200, 300\]")])
def test_a_parameter_is_in_one_optimizer_whose_state_is_saved(optimizers, named, world):
    model = small()
    with pytest.raises(UserError, match=named) if named else nullcontext() as refused:
        TrainState(model, optimizers(model), run_of(world))
    assert not named or len(str(refused.value)) < 500  # and no numbers of a tensor


@pytest.mark.parametrize("kind", ["step_pre", "step_post"])
def test_hooks_of_an_optimizer_that_zero1_rebuilds_are_refused(kind, world):
    """Those that are registered later are called, on either list."""
    model, run, calls = small(), run_of(world, strategy="zero1"), []
    optimizers = [adamw(model)]
    removable = getattr(optimizers[0], f"register_{kind}_hook")(calls.append)
    with pytest.raises(UserError, match="state.optimizers"):
        TrainState(model, optimizers, run)
    removable.remove()
    state = TrainState(model, optimizers, run)
    for of in (state.optimizers, optimizers):
        getattr(of[0], f"register_{kind}_hook")(lambda *_: calls.append(1))
    go_on(state, [0])
    assert calls == [1, 1]


def two_groups(params, kind=Lists, **options):
    first, *rest = params
    return kind([{"params": rest}, {"params": [first], "scale": 0.5}], **options)


def begin(world, optimizer=Schedule, strategy: str = "ddp", **options) -> TrainState:
    model = small()
    return TrainState(model, [optimizer(model.parameters(), lr=1e-2, **options)],
                      run_of(world, strategy=strategy))


def go_on(state: TrainState, steps, lr: float = 1e-2) -> None:
    for step in steps:
        idx = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(step))
        state.model(idx, idx)[0].backward()
        state.optimizer_step(lr, state.clip_gradients(1.0))


def saved_as(state: TrainState, world, out):
    checkpoints = Checkpoints(out, world, 9, lambda text: None)
    checkpoints.directory.mkdir(parents=True, exist_ok=True)
    checkpoints.save(3, state, META | {"samples": 7})
    checkpoints.close()
    return load_checkpoint(out, print)


@pytest.mark.parametrize("optimizer", [Schedule, two_groups])
def test_what_an_optimizer_keeps_is_restored_also_the_second_time(optimizer, world, tmp_path):
    whole, state, said = begin(world, optimizer), begin(world, optimizer), []
    go_on(whole, range(9))
    for part in range(3):
        go_on(state, range(3 * part, 3 * part + 3))
        saved = saved_as(state, world, tmp_path / f"{part}")
        before, state = state, begin(world, optimizer)
        state.load_state_dict(saved, said.append)
        assert not said and state.non_tensor_values() == before.non_tensor_values()
    ours, theirs = (dict(of.model.state_dict()) | of.optimizer_tensors() for of in (state, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert state.non_tensor_values() == whole.non_tensor_values()
    kept = "Lists 0.1/total" if optimizer is two_groups else "Schedule 0.0/total"
    assert kept in ours.keys() | saved["plain"].keys()
    assert not any("." in key for values in state.optimizers[0].state.values() for key in values)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_lists_and_tensors_of_groups_are_refused_with_shards(strategy, world):
    """Before the first step."""
    with pytest.raises(UserError, match="Lists/(seen|means) .*--strategy ddp"):
        begin(world, two_groups, strategy)
    begin(world, torch.optim.AdamW, strategy)


def test_a_new_weight_decay_wins_on_a_resume(world, tmp_path):
    state = begin(world, torch.optim.AdamW, weight_decay=0.1)
    go_on(state, range(3))
    saved = saved_as(state, world, tmp_path)
    state = begin(world, torch.optim.AdamW, weight_decay=0.3)
    state.load_state_dict(saved, print)
    go_on(state, range(3, 4), lr=5e-3)
    group = state.optimizers[0].param_groups[0]
    assert group["weight_decay"] == 0.3 and group["lr"] == 5e-3 and saved["plain"] == {}


def test_what_a_checkpoint_cannot_hold_is_refused_after_the_first_step(world):
    for odd in (np.float32(1), object(), [torch.ones(1)], (1, 2), {1: 2}, np.ones(2)):
        with pytest.raises(UserError, match="bad as "):
            refuse_unsaved({"fine": 1, "bad": odd})
    refuse_unsaved(dict(enumerate((1, True, "a", [1, [2.5]], {"a": None}, math.nan, np.float64(0.1)))))
    with pytest.raises(UserError, match="Schedule 0.0/bad as tuple"):
        go_on(begin(world, odd=lambda: (1, 2)), range(1))


def test_what_is_frozen_thawed_or_added_later_is_named_in_its_step(world):
    model = small()
    block = model.transformer["blocks"][0].requires_grad_(False)  # before the optimizer: it rests
    optimizer = adamw(model)
    state = TrainState(model, [optimizer], run_of(world))
    state.warm_up(model.dummy_inputs(2, world.device))
    go_on(state, range(2))
    for changed, name, trains in ((model.embed.weight, "embed.weight", True),
                                  (block.down.weight, "transformer.blocks.0.down.weight", False)):
        changed.requires_grad_(not trains)
        for use in (lambda: go_on(state, [2]), lambda: state.warm_up(model.dummy_inputs(2, world.device))):
            with pytest.raises(UserError, match=name):
                use()
        changed.requires_grad_(trains)
        model.zero_grad()
    go_on(state, [2])  # all is as it began
    other, state = nn.Linear(300, 200), begin(world, torch.optim.AdamW)
    state.optimizers[0].add_param_group({"params": [other.weight]})
    other(torch.ones(300)).sum().backward()
    with pytest.raises(RunError, match=r"AdamW .*\[200, 300\]"):
        go_on(state, range(1))


@pytest.mark.parametrize("strategy, named", [("ddp", "/mean"), ("zero1", "Divided")])
def test_state_that_ranks_divide_is_refused_on_each(strategy, named, shards, tmp_path):
    """By name, in the first step. With ddp also if only its values differ."""
    made = f"import own_optimizers as own\nown.Divided.sliced = {strategy == 'ddp'}\n"
    trainer = copies.changed(tmp_path / "train_divided.py", (
        f"={made}optimizers = [own.Divided(model.parameters())]", "optimizers = "))
    done = trainer.fork(2, shards, tmp_path / "run", strategy=strategy)
    assert done.code == 2 and len(re.findall(f"error: .*{named}", done.out)) == 2, done.out


def test_copies_of_the_weights_are_compared_when_they_are_restored(shards, tmp_path):
    """Before, the memory of a model that resumes holds anything, which here is the rank."""
    made = "import own_optimizers as own\noptimizers = [own.Schedule(model.parameters())]\nif run.saved:\n" \
           "    [p.data.fill_(world.rank) for p in model.parameters()]"
    trainer = copies.changed(tmp_path / "train_copies.py", (f"={made}", "optimizers = "))
    for steps in 2, 4:
        done = trainer.fork(2, shards, tmp_path / "run", steps=steps)
        assert done.code == 0 and f"training complete: {steps} steps" in done.out, done.out

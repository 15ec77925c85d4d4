"""--comm late (cluster/late.py): gradients that come a step late move the parameters on all ranks alike, also
after a resume.
"""

import signal
from types import SimpleNamespace

import pytest
import torch
from many_runs import TRAINERS, assert_resumes_alike, run_all
from processes import Group, fork
from runs import assert_same_run, copy_of_the_first_half, first_checkpoint, steps_of, tensors_of
from states import run_of, world  # noqa: F401

import ddp_utils
from cluster.late import dequantise, quantise
from training.step import TrainState

LATE = {"comm": "late", "optimizer": "muon", "global_batch": 12}


def test_int8_in_blocks():
    values = torch.randn(1024) * torch.logspace(-30, 30, 8).repeat_interleave(128)
    values[128:256] = 0.0
    back = dequantise(quantise(values)).view(8, 128)
    steps = values.view(8, 128).abs().amax(1, keepdim=True) / 127
    assert ((back - values.view(8, 128)).abs() <= 0.505 * steps).all()
    assert not back[1].any() and torch.equal(dequantise(quantise(back.view(-1))).view(8, 128), back)
    for odd in (torch.nan, torch.inf, -torch.inf):
        spoiled = values.clone()
        spoiled[5] = odd
        found = dequantise(quantise(spoiled)).view(8, 128)
        assert found[0].isnan().all() and torch.equal(found[1:], back[1:])


# --------------------------------------------------------------------------------------------- one update

class Two(torch.nn.Module):
    """Two parameters of a block each, and one that is frozen."""

    compute_dtype = torch.float32
    config = SimpleNamespace()

    def __init__(self):
        super().__init__()
        self.a, self.b, self.frozen = (torch.nn.Parameter(torch.ones(128)) for _ in range(3))
        self.frozen.requires_grad_(False)


def state_of(world, step: int = 0, steps: int = 20) -> TrainState:
    """A run of 20 steps, of which 2 wait, with plain SGD."""
    run = run_of(world, comm="late")
    run = SimpleNamespace(**vars(run) | {"steps": steps, "saved": {"step": step} if step else None})
    model = Two()
    optimizers = [torch.optim.SGD([p], lr=1.0, weight_decay=0.5) for p in (model.a, model.b)]
    return TrainState(model, optimizers, run)


def step_with(state: TrainState, a: float, b: float | None = 1.0) -> None:
    """A step of a trainer with these gradients, which int8 does not round. If b is None, it takes it away."""
    state.model.a.grad = torch.full((128,), 127 * a)
    state.model.b.grad = torch.full((128,), 127 * (1.0 if b is None else b))
    norm = state.clip_gradients(0.0)
    if b is None:
        state.model.b.grad = None
    state.optimizer_step(2.0 ** -10, norm)


def expected(gradients: list, waits: int) -> torch.Tensor:
    """A parameter after these gradients; in place of None, nothing is to move or decay."""
    p, before = 1.0, 0.0
    late = [*gradients[:waits], None, *gradients[waits:-1]]
    for step, gradient in enumerate(late):
        u = 0.0 if gradient is None else -2.0 ** -10 * (127 * gradient + 0.5 * p)
        if step < waits:
            p += u
        else:
            p, before = p + 2 * u - before, u
    return torch.full((128,), p)


A = [2.0 ** (step % 5) for step in range(12)]
B = [None if step in (0, 1, 4, 5, 8) else 2.0 ** -(step % 3) for step in range(12)]


def test_each_gradient_moves_the_parameters_a_step_late(world):
    """Twice as far, minus the step before, which stood in for it. What a trainer removes after the norm is
    known, such as the gradient of HRM's embedding before it learns, is missing in its own step."""
    state = state_of(world)
    for step, (a, b) in enumerate(zip(A, B), 1):
        step_with(state, a, b)
        for p, gradients in ((state.model.a, A), (state.model.b, B)):
            if step > 3:  # in the third there is nothing yet, so neither moves
                torch.testing.assert_close(p.detach(), expected(gradients[:step], 2))
    assert torch.equal(state.model.frozen, torch.ones(128)) and not state.model.frozen.grad


def test_what_is_not_finite_is_skipped_with_its_update(world):
    """Its move is left out for all parameters, a step late, and the next goes on from the one before."""
    state = state_of(world)
    for step, a in enumerate(A, 1):
        before = state.model.a.detach().clone()
        step_with(state, torch.nan if step == 6 else a)
        assert state.updated == (step != 7) and torch.equal(before, state.model.a) == (step in (3, 7))
    assert state.model.a.isfinite().all()


def resumed(state: TrainState, world, **changes) -> TrainState:
    """What another start of the run restores from a checkpoint."""
    tensors = {group: {} for group in ddp_utils.GROUPS}
    for group, name, tensor, _ in state.state_dict():
        tensors[group][name] = tensor.clone()
    new = state_of(world, **changes)
    new.load_state_dict({"tensors": tensors, "scaler": {}, "plain": {}, "path": ""} | changes, print)
    return new


def test_a_longer_run_does_not_wait_again(world):
    """It would forget the gradient that is still to be applied."""
    for at in (1, 2, 3, 4, 11):
        state = state_of(world)
        for step in range(12):
            if step == at:
                state = resumed(state, world, step=at, steps=40)
            step_with(state, A[step], None if B[step] is None else 1.0)
        torch.testing.assert_close(state.model.a.detach(), expected(A, 2 if at > 2 else 4))


# ---------------------------------------------------------------------------------------------- whole runs

@pytest.mark.full
def test_whole_runs(tmp_path, shards):
    """A run resumes bit for bit, for which each tensor that is saved is needed. Saves and evaluations change
    nothing, though they wait for the exchange. A gradient that is not finite on one rank is skipped late on
    all. Another number of processes, or late from a certain step on, goes on. One process that imitates
    three, as bench/late.py does, has the bits of three (two would hide a rounding).
    """
    late = LATE | {"ema": 0.9, "grad_clip": 0.1, "batch": 2}
    runs = {"run": late, "often": late | {"save_every": 1, "eval_every": 3, "log_every": 4},
            "fp32": late | {"comm": "fp32"}}
    run_all(2, shards, tmp_path, [*(("gpt2", name, flags) for name, flags in runs.items()),
                                  *(("gpt2", f"bad{step}", late, f"nan:{step}:1") for step in (2, 9))])
    broken = {"again": "", "gradient": "forget:gradient", "moved": "forget:moved"}
    for name in broken:
        copy_of_the_first_half(tmp_path / "run", tmp_path / name)
    run_all(2, shards, tmp_path, [("gpt2", name, late, sabotage) for name, sabotage in broken.items()])
    run_all(3, shards, tmp_path, [("gpt2", "three", late), ("gpt2", "to-late", late | {
        "batch": None, "resume": first_checkpoint(tmp_path / "fp32")})])
    trainer = TRAINERS["gpt2"]
    done = fork(0, "bench/late.py", 3, trainer.script, *trainer.flags(shards, tmp_path / "one", **late))
    assert done.code == 0, done.out

    assert_same_run(tmp_path / "run", tmp_path / "again")
    for name in ("gradient", "moved"):
        with pytest.raises(AssertionError):
            assert_same_run(tmp_path / "run", tmp_path / name)
    for ours, theirs in (("run", "often"), ("three", "one")):
        ours, theirs = tensors_of(tmp_path / ours), tensors_of(tmp_path / theirs)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    logs = {out.name: {r["step"]: r for r in steps_of(out)} for out in tmp_path.iterdir()}
    run, fp32, to_late = (logs[name] for name in ("run", "fp32", "to-late"))
    assert all(run[step]["loss"] == r["loss"] for step, r in logs["often"].items())
    # two steps wait, a tenth, and the third has nothing to apply yet; nor has the first after a resume
    assert [[step for step, r in log.items() if r["grad_norm"] == 0] for log in (run, to_late)] == [[3], [11]]
    assert abs(to_late[12]["grad_norm"] / fp32[11]["grad_norm"] - 1) < 1e-2
    for step, skipped in ((2, 2), (9, 10)):  # the second step still waits
        assert [step for step, r in logs[f"bad{step}"].items() if r["skipped"]] == [skipped]
        assert all(t.isfinite().all() for t in tensors_of(tmp_path / f"bad{step}").values())
    assert_resumes_alike(tmp_path / "fp32", tmp_path / "to-late", bound=0.1)


KILLED = """
import itertools, os, signal
import torch.distributed as dist
import ddp_utils, train_gpt2
from cluster.late import Late
calls, moment = itertools.count(1), os.environ["MOMENT"]
def killed(function, after=False):
    def kill(now):
        if now:
            print("killed", flush=True)
            if moment == "raise":
                raise RuntimeError("only this thread knows it")
            number = {"stop": signal.SIGUSR1, "freeze": signal.SIGSTOP}.get(moment, signal.SIGKILL)
            os.kill(os.getpid(), number)
    def call(*arguments, **named):
        last = os.environ["RANK"] == "1" and next(calls) == 10
        kill(last and not after)
        result = function(*arguments, **named)
        kill(last and after)
        return result
    return call
if moment in ("apply", "stop"):
    Late._after_step = killed(Late._after_step)
else:
    dist.all_to_all_single = killed(dist.all_to_all_single, after=moment == "reduce")
ddp_utils.launch(train_gpt2.main)
"""


@pytest.mark.full
def test_killed_before_gradients_are_sent_added_up_or_applied(tmp_path, shards):
    """Or stopped by a signal: the others name the lost rank, and started again the run ends as if nothing had
    happened."""
    changes = LATE | {"steps": 20, "save_every": 4, "timeout": 12}
    gpt2, script = TRAINERS["gpt2"], tmp_path / "killed.py"
    script.write_text(KILLED)
    whole = gpt2.fork(2, shards, tmp_path / "whole", **changes)
    assert whole.code == 0, whole.out
    for moment in ("send", "reduce", "apply", "stop", "raise", "freeze"):
        group = Group(script, *gpt2.flags(shards, tmp_path / moment, **changes), ranks=2, MOMENT=moment)
        group.processes[0].join(60)
        assert group.codes[0] is not None, moment
        group.send(signal.SIGKILL, 1)  # in case it is frozen
        done = group.finish(20)
        assert group.codes[0] == (moment != "stop") and "killed" in done.out, done.out
        assert "rank 1 on node0" in done.out or moment == "stop", done.out
        assert ("only this thread knows it" in done.out) == (moment == "raise"), done.out
        again = gpt2.fork(2, shards, tmp_path / moment, **changes)
        assert again.code == 0, again.out
        assert_same_run(tmp_path / "whole", tmp_path / moment)

"""--comm late (cluster/late.py): gradients that come a step late move the parameters on all ranks alike, also
after a resume."""

import inspect
import itertools
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from processes import Group, fork
from runs import (
    PUBLISHED,
    Trainer,
    assert_same_run,
    copy_of_the_first_half,
    first_checkpoint,
    steps_of,
    tensors_of,
)
from states import run_of
from test_own_evaluation import changed
from test_own_models import Schedule
from test_strategies import RESUMED, TRAINERS, assert_resumes_alike, run_all, val_loss

import ddp_utils
from cluster.late import dequantise, quantise
from ddp_utils import list_checkpoints
from training.step import TrainState

LATE = {"comm": "late", "optimizer": "muon", "global_batch": 12}


def test_int8_in_blocks():
    values = torch.randn(1024) * torch.logspace(-30, 30, 8).repeat_interleave(128)
    values[128:256] = 0.0
    back = dequantise(quantise(values)).view(8, 128)
    steps = values.view(8, 128).abs().amax(1, keepdim=True) / 127
    assert ((back - values.view(8, 128)).abs() <= 0.505 * steps).all() and quantise(values).numel() == 1040
    assert not back[1].any() and torch.equal(dequantise(quantise(back.view(-1))).view(8, 128), back)
    for odd in (torch.nan, torch.inf, -torch.inf):
        spoiled = values.clone()
        spoiled[5] = odd
        found = dequantise(quantise(spoiled)).view(8, 128)
        assert found[0].isnan().all() and torch.equal(found[1:], back[1:])


# ------------------------------------------------------------------------------------------------- one update


@pytest.fixture
def world():
    world = ddp_utils.init("gloo", "cpu", 60)
    yield world
    torch.distributed.destroy_process_group()


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


def step_with(state: TrainState, a: float, b: float, takes_b_away: bool) -> None:
    """A step of a trainer with these gradients, which int8 does not round."""
    state.model.a.grad, state.model.b.grad = torch.full((128,), 127 * a), torch.full((128,), 127 * b)
    norm = state.clip_gradients(0.0)
    if takes_b_away:
        state.model.b.grad = None
    state.optimizer_step(2.0 ** -10, norm)


def expected(gradients: list, waits: int) -> float:
    """A parameter after these gradients; in place of None, nothing is to move or decay."""
    p, before = 1.0, 0.0
    late = [*gradients[:waits], None, *gradients[waits:-1]]
    for step, gradient in enumerate(late):
        finite = gradient is not None and gradient == gradient
        u = -2.0 ** -10 * (127 * gradient + 0.5 * p) if finite else 0.0
        if step < waits:
            p += u
        elif gradient is None or finite:
            p, before = p + 2 * u - before, u
    return p


A = [2.0 ** (step % 5) for step in range(12)]
B = [None if step in (0, 1, 4, 5, 8) else 2.0 ** -(step % 3) for step in range(12)]


def test_each_gradient_moves_the_parameters_a_step_late(world):
    """Twice as far, but for the half that stood in for it. So it is for what a trainer takes away after the
    norm is known, as HRM's embedding before it learns: that is of its own step."""
    state = state_of(world)
    for step, (a, b) in enumerate(zip(A, B), 1):
        step_with(state, a, 1.0 if b is None else b, b is None)
        for p, gradients in ((state.model.a, A), (state.model.b, B)):
            if step > 3:  # in the third there is nothing yet, so neither moves
                torch.testing.assert_close(p.detach(), torch.full((128,), expected(gradients[:step], 2)))
    assert torch.equal(state.model.frozen, torch.ones(128)) and not state.model.frozen.grad


def test_what_is_not_finite_is_skipped_with_its_update(world):
    """Its move is left out for all parameters, a step late, and the next goes on from the one before."""
    state = state_of(world)
    for step, a in enumerate(A, 1):
        before = state.model.a.detach().clone()
        step_with(state, torch.nan if step == 6 else a, 1.0, False)
        assert state.updated == (step != 7) and torch.equal(before, state.model.a) == (step in (3, 7))
    assert state.model.a.isfinite().all()


def resumed(state: TrainState, world, **changes) -> TrainState:
    """What another start of the run restores from a checkpoint."""
    tensors = {group: {} for group in ddp_utils.GROUPS}
    for group, name, tensor, _ in state.state_dict():
        tensors[group][name] = tensor.clone()
    new = state_of(world, **changes)
    new.load_state_dict({"tensors": tensors, "scaler": {}, "plain": {}, "step": changes["step"],
                         "path": ""}, print)
    return new


def test_a_longer_run_does_not_wait_again(world):
    """It would forget the gradient that is still to be applied."""
    for at in range(1, 12):
        state = state_of(world)
        for step in range(at):
            step_with(state, A[step], 1.0, B[step] is None)
        state = resumed(state, world, step=at, steps=40)
        for step in range(at, 12):
            step_with(state, A[step], 1.0, B[step] is None)
        waits = 2 if at > 2 else 4
        torch.testing.assert_close(state.model.a.detach(), torch.full((128,), expected(A, waits)))


def test_what_other_parameters_were_sent_for_begins_anew(world):
    state = state_of(world)
    for step in range(6):
        step_with(state, A[step], 1.0, False)
    saved = resumed(state, world, step=6)
    assert saved.late.gradient.any() and saved.late.moved.any()
    state.late.gradient, state.late.moved = torch.ones(384), torch.ones(384)  # as with nothing frozen
    saved = resumed(state, world, step=6)
    assert not saved.late.gradient.any() and not saved.late.moved.any()


# ----------------------------------------------------------------------------------------------- whole runs


OWN = "\n".join(["import torch", inspect.getsource(Schedule),
                 "optimizers = [Schedule(model.parameters(), weight_decay=args.weight_decay)]"])


def with_own_optimizer(directory) -> Trainer:
    return Trainer(changed(directory / "train_own.py", ("=" + OWN, "optimizers = make_optimizers")).script,
                   **TRAINERS["gpt2"].defaults)


@pytest.mark.full
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_resumes_bit_for_bit(tmp_path, shards, ranks):
    """AdamW, Muon and an optimizer of one's own. Each tensor that is saved is needed for that."""
    TRAINERS["own"] = with_own_optimizer(tmp_path)
    try:
        adamw = LATE | {"optimizer": "adamw"}
        runs = {"muon": ("gpt2", LATE | {"ema": 0.9, "grad_clip": 0.1}), "adamw": ("gpt2", adamw),
                "own": ("own", adamw)}
        run_all(ranks, shards, tmp_path, [(model, name, flags) for name, (model, flags) in runs.items()])
        names = ("gradient", "moved")
        for name in runs:
            copy_of_the_first_half(tmp_path / name, tmp_path / "again" / name)
        for name in names:
            copy_of_the_first_half(tmp_path / "muon", tmp_path / name)
        done = run_all(ranks, shards, tmp_path, [
            *((model, f"again/{name}", flags) for name, (model, flags) in runs.items()),
            *(("gpt2", name, runs["muon"][1], f"forget:{name}") for name in names)])
    finally:
        del TRAINERS["own"]
    assert RESUMED.findall(done.out) == ["10"] * 5, done.out
    for name in runs:
        assert_same_run(tmp_path / name, tmp_path / "again" / name)
    for name in names:
        with pytest.raises(AssertionError):
            assert_same_run(tmp_path / "muon", tmp_path / name)


@pytest.mark.long
@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("model", TRAINERS)
def test_killed_runs(tmp_path, shards, model, ranks):
    TRAINERS[model].check_killed_run(tmp_path, ranks, shards, **LATE | {"steps": 40, "save_every": 4})


KILLED = """
import itertools, os, signal, sys
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
@pytest.mark.parametrize("ranks, moments", [(2, ["send", "reduce", "apply", "stop", "raise", "freeze"]),
                                            pytest.param(3, ["reduce", "raise"], marks=pytest.mark.long)])
def test_killed_before_gradients_are_sent_added_up_or_applied(tmp_path, shards, ranks, moments):
    """Or stopped by a signal: the others name the lost rank, and started again the run ends as if nothing had
    happened."""
    changes = LATE | {"steps": 20, "save_every": 4, "timeout": 12}
    gpt2, script = TRAINERS["gpt2"], tmp_path / "killed.py"
    script.write_text(KILLED)
    whole = gpt2.fork(ranks, shards, tmp_path / "whole", **changes)
    assert whole.code == 0, whole.out
    for moment in moments:
        group = Group(script, *gpt2.flags(shards, tmp_path / moment, **changes), ranks=ranks, MOMENT=moment)
        group.processes[0].join(60)
        group.send(signal.SIGKILL, 1)  # in case it is frozen
        done = group.finish(20)
        assert group.codes[0] == (moment != "stop") and "killed" in done.out, done.out
        if moment == "raise":
            assert "rank 1 on node0" in done.out and "RuntimeError: only this thread knows it" in done.out
        elif moment != "stop":
            assert re.search(r"error: rank 1 on node0 .* stopped responding", done.out), done.out
        again = gpt2.fork(ranks, shards, tmp_path / moment, **changes)
        assert again.code == 0 and "resuming after step" in again.out, again.out
        assert_same_run(tmp_path / "whole", tmp_path / moment)


@pytest.mark.full
def test_saves_and_evaluations_change_nothing(tmp_path, shards):
    """Though they wait for the exchange."""
    flags = LATE | {"steps": 12}
    often = flags | {"save_every": 1, "eval_every": 3, "log_every": 4}
    rarely = flags | {"save_every": 12, "eval_every": 12}
    done = run_all(2, shards, tmp_path, [("gpt2", "rare", rarely), ("gpt2", "often", often),
                                         ("gpt2", "plain", rarely | {"comm": "fp32"})])
    ours, theirs = tensors_of(tmp_path / "rare"), tensors_of(tmp_path / "often")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), done.out
    rare, often, plain = (steps_of(tmp_path / name) for name in ("rare", "often", "plain"))
    losses = {r["step"]: r["loss"] for r in rare}
    assert all(losses[r["step"]] == r["loss"] for r in often), done.out
    # one step waits, a tenth, and the second has nothing to apply yet
    assert [r["step"] for r in rare if r["grad_norm"] == 0] == [2] and not any(r["skipped"] for r in rare)
    gaps = [abs(x["loss"] - y["loss"]) for x, y in zip(rare, plain)]
    assert max(gaps[:2]) < 1e-3 < gaps[2]
    assert abs(val_loss(tmp_path / "rare") - val_loss(tmp_path / "plain")) < 0.1


@pytest.mark.full
def test_a_bad_gradient_on_one_rank_is_skipped_late_on_all(tmp_path, shards):
    done = run_all(2, shards, tmp_path, [("gpt2", f"run{step}", LATE, f"nan:{step}:1") for step in (2, 9)])
    for step, skipped in ((2, 2), (9, 10)):  # the second step still waits
        assert [r["step"] for r in steps_of(tmp_path / f"run{step}") if r["skipped"]] == [skipped], done.out
        assert all(t.isfinite().all() for t in tensors_of(tmp_path / f"run{step}").values())


@pytest.mark.full
def test_the_embedding_of_a_published_hrm_waits_for_its_first_gradient(tmp_path, shards):
    """The ramp of bp steps reaches it in step 5 of 20, so it moves in step 6: before that, nothing decays."""
    flags = PUBLISHED | {"comm": "late", "save_every": 1, "keep_last": 20}
    done = TRAINERS["hrm"].train(0, shards, tmp_path / "run", **flags)
    assert done.code == 0, done.out
    found = [torch.load(path, weights_only=True)["tensors"]["model"]["embed.weight"]
             for path in reversed(list_checkpoints(tmp_path / "run"))]
    assert [torch.equal(a, b) for a, b in itertools.pairwise(found)] == [True] * 4 + [False] * 15


@pytest.mark.full
def test_another_process_count_or_way_to_send_goes_on(tmp_path, shards):
    run_all(2, shards, tmp_path, [("gpt2", "late", LATE), ("gpt2", "plain", LATE | {"comm": "fp32"})])
    late = LATE | {"resume": first_checkpoint(tmp_path / "late")}
    plain = LATE | {"resume": first_checkpoint(tmp_path / "plain")}
    run_all(3, shards, tmp_path, [("gpt2", "three", late), ("gpt2", "to-fp32", late | {"comm": "fp32"}),
                                  ("gpt2", "to-late", plain)])
    assert_resumes_alike(tmp_path / "late", tmp_path / "three", bound=3e-3)  # int8 rounds other sums
    assert_resumes_alike(tmp_path / "late", tmp_path / "to-fp32", bound=0.1)
    assert_resumes_alike(tmp_path / "plain", tmp_path / "to-late", bound=0.1)
    norms = {name: {r["step"]: r["grad_norm"] for r in steps_of(tmp_path / name)}
             for name in ("late", "three", "to-fp32", "plain", "to-late")}
    assert abs(norms["three"][11] / norms["late"][11] - 1) < 1e-2
    # the first step has nothing to apply yet, the next what the first did without a delay
    assert [step for step, norm in norms["to-late"].items() if norm == 0] == [11]
    assert abs(norms["to-late"][12] / norms["plain"][11] - 1) < 1e-2


@pytest.mark.full
@pytest.mark.parametrize("model", TRAINERS)
def test_one_process_imitates_several(tmp_path, shards, model):
    """bench/late.py, in which losses are measured, has the bits of real processes."""
    flags = LATE | {"batch": 2}
    run_all(2, shards, tmp_path, [(model, "two", flags)])
    trainer = TRAINERS[model]
    done = fork(0, "bench/late.py", 2, trainer.script, *trainer.flags(shards, tmp_path / "one", **flags))
    assert done.code == 0, done.out
    ours, theirs = tensors_of(tmp_path / "two"), tensors_of(tmp_path / "one")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("flags, sentence", [
    ({"strategy": "zero1"}, "error: --comm late needs --strategy ddp"),
    ({"strategy": "zero3", "optimizer": "adamw"}, "error: --comm late needs --strategy ddp"),
    ({"precision": "fp16"}, "error: --comm late needs --strategy ddp and --precision bf16 or fp32")])
def test_what_is_refused(tmp_path, shards, flags, sentence):
    done = TRAINERS["gpt2"].train(0, shards, tmp_path / "out", **LATE | flags)
    assert done.code == 2 and sentence in done.out and not (tmp_path / "out").exists(), done.out


def test_a_run_in_fp16_does_not_become_late(tmp_path, shards):
    """Its checkpoint calls that float16."""
    gpt2, short = TRAINERS["gpt2"], {"steps": 2, "global_batch": 4, "precision": None}
    assert gpt2.train(0, shards, tmp_path / "out", **short | {"precision": "fp16"}).code == 0
    late = short | {"comm": "late", "steps": 4}
    done = gpt2.train(0, shards, tmp_path / "out", **late)
    assert done.code == 2 and "error: --comm late needs --strategy ddp and --precision bf16" in done.out
    done = gpt2.train(0, shards, tmp_path / "out", **late | {"precision": "bf16"})
    assert done.code == 0, done.out  # as it says

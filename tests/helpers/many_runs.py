"""Runs many trainer commands in one process group, one after the other, which saves starting each: `run_all`
runs this file on several ranks with a JSON list of command lines. Before each stands the name of a sabotage,
or nothing, so that a test can show that it would notice.
"""

import contextlib
import itertools
import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from processes import fork
from runs import Trainer, evaluations_of, module_of, steps_of

import ddp_utils
import startup.run
from ops.ema import local_shard
from training.step import TrainState

COMMON = {"n_layer": 2, "global_batch": 8, "steps": 20, "save_every": 10, "eval_every": 10}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", **COMMON), "mlm": Trainer("train_mlm.py", **COMMON),
            "hrm": Trainer("train_hrm.py", **COMMON, sample_prompt="def", max_new_tokens=4)}


def run_all(ranks, shards, base, wanted, timeout=240) -> str:
    """Runs what is wanted, (model, name of the run, changed flags[, sabotage]), in one group of processes."""
    commands = [[*sabotage, *[""] * (not sabotage), TRAINERS[model].script,
                 *TRAINERS[model].flags(shards, base / name, **changes)]
                for model, name, changes, *sabotage in wanted]
    done = fork(ranks, "tests/helpers/many_runs.py", json.dumps(commands), timeout=timeout)
    assert done.code == 0, done.out
    return done.out


def assert_resumes_alike(whole: Path, resumed: Path, bound=1e-5) -> None:
    """A run that began at step 10 has the losses of one that began at 0."""
    a, b = ([r for r in steps_of(out) if r["step"] > 10] for out in (whole, resumed))
    assert [r["step"] for r in a] == [r["step"] for r in b]
    assert max(abs(x["loss"] - y["loss"]) for x, y in zip(a, b)) <= bound
    a, b = (evaluations_of(out)[-1]["val_loss"] for out in (whole, resumed))
    assert abs(a - b) <= bound


def forgetful(name, restore=TrainState.load_state_dict):
    """Like TrainState.load_state_dict, but one tensor of --comm late is zero."""
    def forget(self, saved, say):
        of_late = saved["tensors"]["late"]
        of_late = of_late | {name: torch.zeros_like(of_late[name])}
        restore(self, saved | {"tensors": saved["tensors"] | {"late": of_late}}, say)

    return forget


def spoiled(step, rank=None, clip=TrainState.clip_gradients):
    """Like TrainState.clip_gradients, but at one step the gradient of one rank, or of all, is not finite."""
    steps = itertools.count(1)

    def spoil(self, *arguments):
        if next(steps) == int(step) and rank in (None, str(dist.get_rank())):
            [p for p in self.model.parameters() if p.requires_grad][-1].grad.view(-1)[-1] = torch.nan
        return clip(self, *arguments)

    return spoil


def clip_alone(parameters, max_norm):
    """Like training.step.clip_grad_norm, but each rank looks at its own shards only."""
    gradients = [local_shard(p.grad) for p in parameters]
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def sabotaged(name: str, *numbers: str):
    """A context in which something is broken."""
    if not name:
        return contextlib.nullcontext()
    if name == "norm":
        return mock.patch("training.step.clip_grad_norm", clip_alone)
    attribute, broken = {"forget": ("load_state_dict", forgetful), "nan": ("clip_gradients", spoiled)}[name]
    return mock.patch.object(TrainState, attribute, broken(*numbers))


def main() -> None:
    world = ddp_utils.init(timeout=60)
    for sabotage, script, *arguments in json.loads(sys.argv[1]):
        if world.is_rank0:
            print(f"===== {sabotage} {script} {' '.join(arguments)}", flush=True)
        trainer = module_of(script)
        joined = mock.patch.object(startup.run, "init", lambda *_, **__: world)
        with sabotaged(*sabotage.split(":")), joined, mock.patch.object(sys, "argv", [script, *arguments]):
            trainer.main()
        dist.barrier()


if __name__ == "__main__":
    ddp_utils.launch(main)

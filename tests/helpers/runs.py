"""Runs of the three trainers, for the tests: started under torchrun or in this process, killed, compared.

Two runs are the same if their logs agree in every digit and the tensors of their last checkpoints, weights,
averages and optimizer state, are torch.equal.
"""

import contextlib
import gc
import importlib
import io
import itertools
import json
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Finished, children, kill, run, start, torchrun
from processes import Group, fork

from cli.errors import UserError
from ddp_utils import STOP_SIGNALS, list_checkpoints
from model import ConfigError

TIMES = ("time", "tokens_per_sec", "mem_gb", "System")  # what may differ between two runs
# A model so small that starting Python is the longest part of a run.
SMALL = {"seq_len": 32, "d_model": 32, "n_head": 2, "n_layer": 1, "global_batch": 12, "steps": 40,
         "save_every": 4, "eval_every": 20, "log_every": 1, "eval_batches": 2, "lr": 1e-3, "warmup": 5,
         "precision": "fp32"}
# An HRM trained as 1b-published is; until the end of the ramp its embedding has no gradient.
PUBLISHED = {"init": "published", "optimizer": "adam-atan2", "schedule": "constant", "grad_clip": 0,
             "ema": 0.99, "bp_steps": "2:3"}


def log_of(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.partition("/")[0] not in TIMES} for line in lines]


def steps_of(out: Path) -> list[dict]:
    return [record for record in log_of(out) if "loss" in record]


def evaluations_of(out: Path) -> list[dict]:
    return [record for record in log_of(out) if "val_loss" in record]


def tensors_of(out: Path) -> dict[str, torch.Tensor]:
    saved = torch.load(list_checkpoints(out)[0], weights_only=True)
    return {f"{group}/{name}": t for group, named in saved["tensors"].items() for name, t in named.items()}


def assert_same_run(a: Path, b: Path) -> None:
    for records in itertools.zip_longest(log_of(a), log_of(b), fillvalue={}):
        ours, theirs = (record | {"mfu": None} for record in records)  # another time; a CPU has none
        odd = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
        assert not odd, f"the logs of {a} and {b} first differ here, in {odd}:\n{ours}\n{theirs}"
    ours, theirs = tensors_of(a), tensors_of(b)
    assert ours.keys() == theirs.keys()
    differ = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not differ, f"{len(differ)} of {len(ours)} tensors of {b} differ from those of {a}: {differ[:5]}"


def assert_close_runs(a: Path, b: Path, bound: float = 1e-5) -> None:
    """In each logged step, and in all evaluations of a."""
    ours, theirs = steps_of(a), steps_of(b)
    assert [(r["step"], r["tokens"]) for r in ours] == [(r["step"], r["tokens"]) for r in theirs]
    assert max(abs(x["loss"] - y["loss"]) for x, y in zip(ours, theirs, strict=True)) <= bound
    theirs = {r["step"]: r["val_loss"] for r in evaluations_of(b)}
    assert all(abs(r["val_loss"] - theirs[r["step"]]) <= bound for r in evaluations_of(a))


def ended(done: Finished, *named: str, code=0) -> Finished:
    """A run that has ended with this code and has said this."""
    assert done.code == code and all(text in done.out for text in named), done.out
    return done


def first_checkpoint(run_directory: Path) -> Path:
    return list_checkpoints(run_directory)[-1]


def copy_of_the_first_half(source: Path, target: Path) -> None:
    """A copy of a run as it was after its first checkpoint."""
    (target / "checkpoints").mkdir(parents=True)
    first = first_checkpoint(source)
    (target / "checkpoints" / first.name).write_bytes(first.read_bytes())
    step = int(first.name[5:13])
    lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    (target / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def worker(torchrun_pid: int, rank: int) -> int:
    """The process id of one worker of a torchrun."""
    return next(pid for pid in children(torchrun_pid)
                if b"\0RANK=%d\0" % rank in Path(f"/proc/{pid}/environ").read_bytes())


def module_of(script: str):
    """The module of a trainer, which may lie in another directory."""
    path = ROOT / script
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


class Trainer:
    """A trainer, with flags that all its runs have."""

    def __init__(self, script: str, **defaults):
        self.script, self.defaults = script, SMALL | defaults

    def flags(self, shards, out, **changes) -> list[str]:
        listed = []
        for key, value in ({"data": shards, "out": out} | self.defaults | changes).items():
            flag = f"--{key.replace('_', '-')}"
            listed += [flag] if value is True else [] if value is None else [flag, str(value)]
        return listed

    def train(self, ranks, shards, out, **changes) -> Finished:
        """A run under torchrun; with ranks 0 it is in this process, which saves starting Python."""
        if ranks:
            return run(ranks, self.script, *self.flags(shards, out, **changes))
        return self.here(*self.flags(shards, out, **changes))

    def here(self, *arguments) -> Finished:
        """What `python train_….py` does, in this process, without the picture: drawing it takes a third of
        the time. test_picture.py draws, and so do the runs that are started by a command.
        """
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        text, code = io.StringIO(), 0
        gc.freeze()  # all that the tests have imported, which collections in the run would go through
        try:
            with contextlib.redirect_stdout(text), pytest.MonkeyPatch.context() as patch:
                for name in ("freeze", "unfreeze"):  # the end of the run would thaw that, too
                    patch.setattr(gc, name, lambda: None)
                patch.setattr(sys, "argv", [self.script, *map(str, arguments)])
                patch.setitem(sys.modules, "matplotlib.figure", None)  # its import fails
                patch.setenv("OMP_NUM_THREADS", "1")  # as conftest.start does: the number of threads
                torch.set_num_threads(1)  # changes the order of sums
                module_of(self.script).main()
        except (UserError, ConfigError) as error:
            code = error.exit_code
            text.write(f"error: {error}\n")
        finally:
            gc.unfreeze()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Finished(code, text.getvalue())

    def fork(self, ranks, shards, out, **changes) -> Finished:
        """A run on several processes that no torchrun starts, which is faster."""
        return fork(ranks, self.script, *self.flags(shards, out, **changes))

    def start(self, ranks, shards, out, **changes):
        return start(torchrun(ranks, self.script, *self.flags(shards, out, **changes)))

    def kill_after(self, step: int, ranks, shards, out, **changes) -> str:
        """Starts a run under torchrun and kills all its processes with SIGKILL once the checkpoint of a step
        is there.
        """
        process = self.start(ranks, shards, out, **changes)
        self._wait_for(step, out, lambda: process.poll() is None)
        return kill(process)

    def _wait_for(self, step: int, out: Path, is_alive) -> None:
        deadline = time.monotonic() + 200
        while not any(int(p.name[5:13]) >= step for p in list_checkpoints(out)):
            assert is_alive(), f"{out} ended before step {step}"
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def check_killed_run(self, tmp_path, ranks, shards, **changes) -> None:
        """A run that is killed in the middle and started again equals one that was left alone. If it is
        compiled, the second start compiles again, as on a machine that was started again. Its clock runs
        faster, because a trainer whose steps depend on the time can't resume.
        """
        settings = self.defaults | changes
        compiled, cuda = settings.get("compile"), torch.cuda.is_available()
        undisturbed = self.train if cuda else self.fork  # what has loaded CUDA cannot be forked
        ended(undisturbed(ranks, shards, tmp_path / "whole", **changes))
        if compiled or cuda:
            self.kill_after(8, ranks, shards, tmp_path / "killed", **changes)
        else:
            group = Group(self.script, *self.flags(shards, tmp_path / "killed", **changes), ranks=ranks)
            self._wait_for(8, tmp_path / "killed", lambda: group.all_alive)
            group.kill()
        killed_at = log_of(tmp_path / "killed")[-1]["step"]
        assert killed_at < settings["steps"], "the run was over before it could be killed"
        again = self.train if compiled or not ranks else undisturbed
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAST_CLOCK", "1")
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))  # Triton's cache is in it
            ended(again(ranks, shards, tmp_path / "killed", **changes), "resuming after step")
        assert_same_run(tmp_path / "whole", tmp_path / "killed")
        assert [r["step"] for r in steps_of(tmp_path / "killed")] == list(range(1, settings["steps"] + 1))
        assert not compiled or any((tmp_path / "compiled").iterdir()), "it was not compiled again"


def edited(path: Path, *changes: tuple[str, str, str], script: str = "train_gpt2.py", **defaults) -> Trainer:
    """A copy of a trainer with more code, each piece as docs/changing.md puts it: "before" the line that
    begins with a text, or "instead of" the statement that does.
    """
    lines = (ROOT / script).read_text().splitlines()
    for how, anchor, code in changes:
        at, = [i for i, line in enumerate(lines) if line.strip().startswith(anchor)]
        indent = lines[at][:-len(lines[at].lstrip())]
        end = at
        while how == "instead of" and (end == at or _is_open(lines[at:end])):
            end += 1
        lines[at:end] = [f"{indent}{line}".rstrip() for line in code.splitlines()]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return Trainer(str(path), **defaults)


def _is_open(lines: list[str]) -> bool:
    """Whether a statement goes on after these lines."""
    text = "".join(lines)
    return sum(map(text.count, "([{")) > sum(map(text.count, ")]}"))

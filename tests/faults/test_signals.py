"""Signals, to a process or to torchrun, in every phase of a run: it ends soon, with the right exit code, with
a checkpoint where one is promised, and leaves no process behind.

From the first step on a signal means: stop after this step, save, exit with 0. Before, there is nothing to
save: SIGINT exits with 130, any other ends the process as it ends every program.
"""

import itertools
import os
import re
import signal
import time
import uuid
import weakref
from pathlib import Path

import pytest
import tiktoken
import torch
from conftest import ROOT, finish, start, torchrun
from processes import Group, marked
from runs import Trainer, assert_same_run, evaluations_of, log_of, steps_of, worker

import data
import model
import startup.run
import training.evaluation
from cli.files import sha256_of
from ddp_utils import list_checkpoints, read_checkpoint
from prepare import pipeline
from prepare.packing import ShardWriter
from vocab import bpe

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5)
ENDLESS = {"steps": 100_000, "schedule": "constant", "save_every": 100_000, "eval_every": 100_000}
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
GUIDE = (ROOT / "docs" / "running.md").read_text()


def wait_for(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


def lines_of(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def code_of_death(number: int) -> int:
    return 130 if number == signal.SIGINT else -number


class Slow:
    """Makes something take long, and leaves a file `begun` when it begins."""

    def __init__(self, begun: Path, what: str, seconds: float, after: int = 0):
        self.begun, self.what, self.seconds, self.after = begun, what, seconds, after

    def __call__(self):
        where, name = {"saving": (os, "fsync"), "evaluation": (training.evaluation, "validation_batches"),
                       "a step": (data.Loader, "step")}[self.what]
        real, count = getattr(where, name), itertools.count()

        def slow(*arguments):
            due = self.what != "saving" or ".pt" in os.readlink(f"/proc/self/fd/{arguments[0]}")
            if due and next(count) >= self.after:
                self.begun.touch()
                time.sleep(self.seconds)
            return real(*arguments)

        def slow_batches(*arguments):
            for batch in real(*arguments):
                self.begun.touch()
                time.sleep(self.seconds)
                yield batch

        setattr(where, name, slow_batches if self.what == "evaluation" else slow)


# -----------------------------------------------------------------------------------------------------------
# One process


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("workers", [1, 2])
def test_prepare(tmp_path, number, workers):
    """It may be stopped anywhere, and then goes on to the same bytes."""
    text = "".join(f"{n} and {n * n} more words\n" for n in range(60_000))
    goes_on = number == signal.SIGTERM  # the others have more to do, so that none is done before its signal
    (tmp_path / "text.txt").write_text(text if goes_on else 40 * text)
    (tmp_path / "tokenizer.json").write_text(bpe.train_bpe([text[:10_000]], 300).to_json())
    command = ("data.py", "prepare", "--dataset", f"text:{tmp_path}/text.txt", "--shard-tokens", "100k",
               "--tokenizer", tmp_path / "tokenizer.json", "--workers", workers, "--out")
    out = tmp_path / "out"
    group = Group(*command, out)
    wait_for(lambda: lines_of(out / "manifest.json"))
    group.send(number)
    done = group.finish(10)
    assert done.code == code_of_death(number), done.out
    assert ("stopped: finished shards are kept" in done.out) == (number == signal.SIGINT)
    assert "Traceback" not in done.out, done.out
    wait_for(lambda: not marked(group.mark), 10)
    if goes_on:
        assert Group(*command, out).finish().code == 0
        assert Group(*command, tmp_path / "whole").finish().code == 0
        assert ([sha256_of(path) for path in sorted(out.glob("*.*"))]
                == [sha256_of(path) for path in sorted((tmp_path / "whole").glob("*.*"))])


class SlowFromThePiece:
    """Encoding takes a minute from this piece of text on. Leaves a file when that begins."""

    def __init__(self, number: int, begun: Path):
        self.number, self.begun = number, begun

    def __call__(self):
        real, count = tiktoken.Encoding.encode_to_numpy, itertools.count(1)

        def slow(*arguments, **options):
            if next(count) >= self.number:
                self.begun.touch()
                time.sleep(60)
            return real(*arguments, **options)

        tiktoken.Encoding.encode_to_numpy = slow


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_does_not_wait_for_the_threads_of_prepare(tmp_path, workers):
    """In the middle of a long document, with more of it waiting. What is finished is kept."""
    text = "".join(f"{n} and {n * n} more words\n" for n in range(400_000))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "tokenizer.json").write_text(bpe.train_bpe([text[:10_000]], 300).to_json())
    command = ("data.py", "prepare", "--dataset", f"text:{tmp_path}/text.txt", "--shard-tokens", "100k",
               "--val-split", "hash:0.01", "--tokenizer", tmp_path / "tokenizer.json", "--workers", workers,
               "--out")
    out = tmp_path / "out"
    group = Group(*command, out, fault=SlowFromThePiece(4, tmp_path / "begun"))
    wait_for((tmp_path / "begun").exists)
    wait_for(lambda: data.read_manifest(out)["shards"])
    group.send(signal.SIGINT)
    done = group.finish(10)
    assert done.code == 130 and "stopped: finished shards are kept" in done.out, done.out
    assert 1 <= len(data.read_manifest(out)["shards"]) <= 3
    again = Group(*command, out).finish()
    assert again.code == 0 and "resumes after" in again.out, again.out
    assert Group(*command, tmp_path / "whole").finish().code == 0
    assert [path.read_bytes() for path in sorted(out.glob("*.*"))] == [
        path.read_bytes() for path in sorted((tmp_path / "whole").glob("*.*"))]


class InALock:
    """Ctrl-C while this process holds the lock of a result that the writing thread is to fill in. With an
    exception, it stays taken."""

    def __call__(self):
        real, count = ShardWriter.commit, itertools.count(1)

        def commit(*arguments, **options):
            real(*arguments, **options)
            if next(count) == 3:
                arguments[0].writing._condition.acquire()
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)

        ShardWriter.commit = commit


class SmallShards(InALock):
    """The same in a trainer, whose shards would hold the whole text."""

    def __call__(self):
        super().__call__()
        real = pipeline.settings_of
        pipeline.settings_of = lambda *arguments, **options: real(
            *arguments, **options) | {"shard_tokens": 100_000}


def prepare_flags(directory):
    text = "".join(f"{n} and {n * n} more words\n" for n in range(60_000))
    (directory / "text.txt").write_text(text)
    return f"text:{directory}/text.txt"


def test_ctrl_c_while_a_lock_is_held(tmp_path):
    """It must not hang, and the same command goes on."""
    command = ("data.py", "prepare", "--dataset", prepare_flags(tmp_path), "--shard-tokens", "100k",
               "--tokenizer", "bytes", "--out", tmp_path / "out")
    done = Group(*command, fault=InALock()).finish(20)
    assert done.code == 130 and "Traceback" not in done.out, done.out
    assert data.read_manifest(tmp_path / "out")["shards"]
    assert Group(*command).finish().code == 0


def test_ctrl_c_while_a_trainer_that_prepares_holds_a_lock(tmp_path):
    flags = GPT2.flags(prepare_flags(tmp_path), tmp_path / "run", tokenizer="bytes")
    done = Group(GPT2.script, *flags, cwd=tmp_path, fault=SmallShards()).finish(20)
    assert done.code == 130 and "Traceback" not in done.out, done.out


@pytest.mark.parametrize("number", STOPS)
def test_a_trainer_that_prepares(tmp_path, number):
    (tmp_path / "text.txt").write_text("a few words, again and again, which tokenize slowly\n" * 100_000)
    flags = GPT2.flags(f"text:{tmp_path}/text.txt", tmp_path / "run", tokenizer="bpe:300")
    group = Group(GPT2.script, *flags, cwd=tmp_path)
    wait_for(lambda: "training bpe:300" in group.text)
    group.send(number)
    done = group.finish(10)
    assert done.code == code_of_death(number) and "Traceback" not in done.out, done.out
    wait_for(lambda: not marked(group.mark), 10)


@pytest.mark.parametrize("number", [
    signal.SIGINT, *(pytest.param(number, marks=pytest.mark.long) for number in STOPS[::2])])
def test_compile(tmp_path, shards, number):
    group = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "run", compile=True),
                  TORCHINDUCTOR_CACHE_DIR=tmp_path / "cache")
    wait_for(lambda: "run directory" in group.text)
    time.sleep(1)
    assert "step 1/" not in group.text
    group.send(number)
    done = group.finish(20)
    assert done.code == code_of_death(number) and "Traceback (most recent" not in done.out, done.out
    wait_for(lambda: not marked(group.mark), 20)


class InACallback:
    """Ctrl-C in a callback of a weak reference, where Python drops exceptions. torch's compiler has such."""

    def __call__(self):
        real = model.GPT2.hidden

        def hidden(*arguments):
            dying = torch.zeros(1)
            callback = weakref.ref(dying, lambda _: os.kill(os.getpid(), signal.SIGINT))
            del dying
            assert callback() is None
            return real(*arguments)

        model.GPT2.hidden = hidden


def test_ctrl_c_where_exceptions_are_dropped(tmp_path, shards):
    done = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "run"), fault=InACallback()).finish()
    assert done.code == 130 and "step 1/" not in done.out, done.out
    assert done.out.endswith("\nstopped\n") and "Traceback" not in done.out


def ctrl_c_before_the_log():
    def interrupt(*_):
        raise KeyboardInterrupt

    startup.run.start_run = interrupt


def test_ctrl_c_in_one_of_two_processes_is_named_by_the_other(tmp_path, shards):
    """As on one of several nodes; nobody was busy or cut off."""
    group = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "run"), ranks=2, fault=ctrl_c_before_the_log,
                  fault_rank=1)
    done = group.finish()
    assert group.codes == [1, 130] and "failed first: it was stopped by Ctrl-C" in done.out, done.out
    assert "busy" not in done.out and "Traceback" not in done.out, done.out


@pytest.mark.parametrize("number", [*STOPS, signal.SIGHUP])
def test_training(tmp_path, shards, number):
    out = tmp_path / "run"
    group = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS))
    wait_for(lambda: lines_of(out / "metrics.jsonl") > 3)
    group.send(number)
    done = group.finish(10)
    assert done.code == 0, done.out
    step = int(re.search(rf"stopped by {number.name} after step (\d+)", done.out)[1])
    assert read_checkpoint(list_checkpoints(out)[0])["step"] == step == log_of(out)[-1]["step"]


@pytest.mark.parametrize("number", [
    signal.SIGHUP, *(pytest.param(number, marks=pytest.mark.full) for number in STOPS)])
def test_saving(tmp_path, shards, number):
    """The save that is under way is finished, and the newest one is that of the last step."""
    out = tmp_path / "run"
    group = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS | {"save_every": 20}),
                  fault=Slow(tmp_path / "begun", "saving", 0.5))
    wait_for((tmp_path / "begun").exists)
    group.send(number)
    done = group.finish(15)
    assert done.code == 0, done.out
    step = int(re.search(rf"stopped by {number.name} after step (\d+)", done.out)[1])
    steps = [read_checkpoint(path)["step"] for path in list_checkpoints(out)]
    assert steps[-1] == 20 and steps[0] == step


@pytest.mark.parametrize("number", [
    signal.SIGINT,
    *(pytest.param(number, marks=pytest.mark.full) for number in (*STOPS[::2], signal.SIGHUP))])
def test_evaluation(tmp_path, shards, number):
    """It is cut off; the run goes on with this evaluation, and ends like one that was left alone."""
    out, flags = tmp_path / "run", {"steps": 8, "eval_every": 4, "eval_batches": 0, "batch": 4}
    group = Group(GPT2.script, *GPT2.flags(shards, out, **flags),
                  fault=Slow(tmp_path / "begun", "evaluation", 0.5))
    wait_for((tmp_path / "begun").exists)
    group.send(number)
    done = group.finish(10)
    assert done.code == 0 and f"stopped by {number.name} after step 4" in done.out, done.out
    assert [r["step"] for r in steps_of(out)] == [1, 2, 3, 4] and not evaluations_of(out)
    for directory in (out, tmp_path / "whole"):
        assert Group(GPT2.script, *GPT2.flags(shards, directory, **flags)).finish().code == 0
    assert_same_run(out, tmp_path / "whole")


def test_ctrl_c_twice(tmp_path, shards):
    """Twice at once counts once, for torchrun passes on what the terminal sends as well; later it counts."""
    out = tmp_path / "run"
    group = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS),
                  fault=Slow(tmp_path / "begun", "a step", 30, after=5))
    wait_for((tmp_path / "begun").exists)
    group.send(signal.SIGINT)
    group.send(signal.SIGINT)
    time.sleep(2.2)
    assert group.all_alive
    group.send(signal.SIGINT)
    done = group.finish(2)
    assert done.code == 130 and "without another checkpoint" in done.out, done.out
    assert not list_checkpoints(out) and "Traceback" not in done.out


def test_the_second_signal_of_another_kind_changes_nothing(tmp_path, shards):
    """As from torchrun: SIGTERM to all, and again from the system that stops the job."""
    out = tmp_path / "run"
    group = Group(GPT2.script, *GPT2.flags(shards, out, **ENDLESS),
                  fault=Slow(tmp_path / "begun", "saving", 1))
    wait_for(lambda: lines_of(out / "metrics.jsonl") > 3)
    group.send(signal.SIGTERM)
    wait_for((tmp_path / "begun").exists)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        group.send(number)
    done = group.finish(10)
    assert done.code == 0 and "stopped by SIGTERM" in done.out, done.out
    assert read_checkpoint(list_checkpoints(out)[0])["step"] == log_of(out)[-1]["step"]


# -----------------------------------------------------------------------------------------------------------
# torchrun


def run_under_torchrun(shards, out, *more, **env):
    mark = uuid.uuid4().hex
    command = torchrun(2, GPT2.script, *GPT2.flags(shards, out, **ENDLESS))
    command[3:3] = more
    process = start(command, FAULTS_MARK=mark, **env)
    wait_for(lambda: lines_of(out / "metrics.jsonl") > 3)
    return process, mark


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long),
                                    pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
@pytest.mark.full
def test_signal_to_torchrun(tmp_path, shards, number):
    """The workers save and end with 0; torchrun itself returns 1 when it was stopped by a signal."""
    out = tmp_path / "run"
    process, mark = run_under_torchrun(shards, out, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
    process.send_signal(number)
    done = finish(process, 30)
    assert done.code == 1 and f"stopped by {number.name}" in done.out and "Traceback" in done.out, done.out
    assert "When torchrun receives a signal, it prints a traceback and exits with 1" in GUIDE
    assert not marked(mark)
    assert read_checkpoint(list_checkpoints(out)[0])["step"] == log_of(out)[-1]["step"]


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGKILL, marks=pytest.mark.full),
                                    pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
def test_torchrun_is_killed(tmp_path, shards, number):
    """Without --signals-to-handle SIGUSR1 kills torchrun, and SIGHUP with that of the guide but without
    nohup. Its workers notice, save, end and free the lock. Nothing that they say is an error."""
    out = tmp_path / "run"
    more = ["--signals-to-handle", "SIGTERM,SIGINT"] * (number == signal.SIGHUP)
    process, mark = run_under_torchrun(shards, out, *more)
    process.send_signal(number)
    done = finish(process, 15)  # its output ends with the last of the workers
    assert done.code == -number and "error: " not in done.out, done.out
    wait_for(lambda: not marked(mark), 30)
    assert "stopped by SIGHUP" in (out / "train.log").read_text()
    assert read_checkpoint(list_checkpoints(out)[0])["step"] == log_of(out)[-1]["step"]
    again = GPT2.train(0, shards, out, steps=log_of(out)[-1]["step"] + 1)
    assert again.code == 0 and "resuming after step" in again.out, again.out


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_torchrun_while_a_worker_prepares(tmp_path, number):
    (tmp_path / "text.txt").write_text("a few words, again and again, which tokenize slowly\n" * 400_000)
    mark = uuid.uuid4().hex
    process = start(torchrun(2, GPT2.script, *GPT2.flags(
        f"text:{tmp_path}/text.txt", tmp_path / "run", tokenizer="bpe:300")), cwd=tmp_path, FAULTS_MARK=mark)
    wait_for(lambda: (tmp_path / "shards/text-bpe300/manifest.json").exists(), 90)
    process.send_signal(number)
    assert finish(process, 40).code != 0
    wait_for(lambda: not marked(mark), 10)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_torchrun_restarts(tmp_path, shards):
    """With the documented variable a job whose worker is killed twice recovers, and ends like an undisturbed
    one."""
    changes = {"save_every": 2, "steps": 400, "eval_every": 100}
    command = torchrun(2, GPT2.script, *GPT2.flags(shards, tmp_path / "run", **changes))
    command[3:3] = ["--max-restarts", "2"]
    process = start(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    log = tmp_path / "run" / "train.log"
    for step, rank in ((60, 0), (120, 1)):
        wait_for(lambda step=step: log.exists() and f"step {step}/" in log.read_text(), 60)
        os.kill(worker(process.pid, rank), signal.SIGKILL)
    done = finish(process, 120)
    assert done.code == 0, done.out
    assert (tmp_path / "run/train.log").read_text().count("resuming after step") == 2
    assert GPT2.train(2, shards, tmp_path / "whole", **changes).code == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_the_guides_name_what_is_tested_here():
    text = GUIDE + (ROOT / "docs" / "clusters.md").read_text()
    for name in ("--signals-to-handle SIGTERM,SIGINT,SIGUSR1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        assert name in text


@pytest.mark.full
def test_a_snapshot_is_written_though_another_process_dies(tmp_path, shards):
    """The process that writes does not leave before its thread is done, though that takes long."""
    begun, out = tmp_path / "begun", tmp_path / "run"
    # gloo notices the death of a peer at once, but now and then only after the time-out
    flags = ENDLESS | {"save_every": 20, "timeout": 30}
    group = Group(GPT2.script, *GPT2.flags(shards, out, **flags), ranks=2, fault=Slow(begun, "saving", 10))
    wait_for(begun.exists)
    group.send(signal.SIGKILL, rank=1)
    done = group.finish()
    assert done.code == 1 and [p.name[:13] for p in list_checkpoints(out)] == ["step_00000020"], done.out


@pytest.mark.full
@pytest.mark.parametrize("ranks", [0, 2])
def test_nohup(tmp_path, shards, ranks):
    """A run that was started with SIGHUP ignored, as nohup does, outlives its terminal; torchrun needs a
    flag, which the guide has."""
    command = ["nohup", *torchrun(ranks, GPT2.script, *GPT2.flags(shards, tmp_path / "run", **ENDLESS))]
    if ranks:
        command[4:4] = ["--signals-to-handle", "SIGTERM,SIGINT"]
        assert "nohup torchrun --signals-to-handle SIGTERM,SIGINT" in GUIDE
    process = start(command)
    wait_for(lambda: lines_of(tmp_path / "run" / "metrics.jsonl") > 3)
    process.send_signal(signal.SIGHUP)
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    wait_for(lambda: lines_of(tmp_path / "run" / "metrics.jsonl") > lines + 10)
    process.send_signal(signal.SIGTERM)
    done = finish(process, 30)
    assert done.code == (1 if ranks else 0) and "stopped by SIGTERM" in done.out, done.out

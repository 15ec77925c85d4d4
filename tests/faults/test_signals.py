"""Signals, to a process or to torchrun, in every phase of a run: it ends soon, with the right exit code, with
a checkpoint where one is promised, and leaves no process behind.

From the first step on a signal means: stop after this step, save, exit with 0. Before, there is nothing to
save: SIGINT exits with 130, any other ends the process as it ends every program.
"""

import itertools
import os
import pkgutil
import re
import resource
import signal
import time
import uuid
import weakref
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1
from unittest import mock

import pytest
import torch
from conftest import finish, start, torchrun
from processes import Group, marked
from runs import Trainer, assert_same_run, evaluations_of, log_of, worker
from waiting import wait_for

import data
import model
import startup.run
from ddp_utils import list_checkpoints, read_checkpoint
from prepare.packing import ShardWriter
from vocab import bpe

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5)
ENDLESS = {"steps": 100_000, "schedule": "constant", "save_every": 100_000, "eval_every": 100_000}
TEXT = "".join(f"{n} and {n * n} more words\n" for n in range(200_000))


def in_full(first, *others) -> list:
    """The first value in the first tier, the others with --full."""
    return [first, *(pytest.param(*other, marks=pytest.mark.full) for other in others)]


def trains(out) -> bool:
    metrics = out / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") > 3


def train(shards, out, fault=None, ranks=0, fault_rank=0, **changes) -> Group:
    return Group(GPT2.script, *GPT2.flags(shards, out, **changes), ranks=ranks, fault=fault,
                 fault_rank=fault_rank, cwd=out.parent)


def check_death(group: Group, number: int) -> str:
    """There is nothing to save."""
    done = group.finish(20)
    assert done.code == (130 if number == SIGINT else -number) and "Traceback" not in done.out, done.out
    wait_for(lambda: not marked(group.mark), 20)
    return done.out


def check_stop(done, out, number: int) -> int:
    """The newest checkpoint is that of the last step."""
    step = int(re.search(rf"stopped by {signal.Signals(number).name} after step (\d+)", done.out)[1])
    assert read_checkpoint(list_checkpoints(out)[0])["step"] == log_of(out)[-1]["step"] == step
    return step


class Slow:
    """Makes calls of a function take long from one on, and leaves a file when that begins."""

    def __init__(self, begun, name, seconds, first=1):
        self.begun, self.name, self.seconds, self.first = begun, name, seconds, first

    def __call__(self):
        real, count = pkgutil.resolve_name(self.name), itertools.count(1)

        def slow(*arguments, **options):
            saves = self.name != "os.fsync" or ".pt" in os.readlink(f"/proc/self/fd/{arguments[0]}")
            if saves and next(count) >= self.first:
                self.begun.touch()
                time.sleep(self.seconds)
            return real(*arguments, **options)

        mock.patch(self.name, slow).start()


def prepare(directory, out, fault=None, workers=1) -> Group:
    if not (directory / "text.txt").exists():
        (directory / "text.txt").write_text(TEXT)
        (directory / "tokenizer.json").write_text(bpe.train_bpe([TEXT[:10_000]], 300).to_json())
    return Group("data.py", "prepare", "--dataset", f"text:{directory}/text.txt", "--shard-tokens", "100k",
                 "--val-split", "hash:0.01", "--tokenizer", directory / "tokenizer.json",
                 "--workers", workers, "--out", out, fault=fault)


@pytest.mark.parametrize("number, workers", in_full((SIGINT, 2), (SIGINT, 1), (SIGTERM, 1), (SIGUSR1, 2)))
def test_prepare_ends_at_once_and_goes_on_to_the_same_bytes(tmp_path, number, workers):
    """It is in the middle of a long document. Ctrl-C does not wait for the threads."""
    out = tmp_path / "out"
    slow = Slow(tmp_path / "begun", "tiktoken.Encoding.encode_to_numpy", 60, first=4)
    group = prepare(tmp_path, out, slow, workers)
    wait_for((tmp_path / "begun").exists)
    wait_for(lambda: data.read_manifest(out)["shards"])
    time.sleep(0.2)  # Python may overlook a signal for as long as it waits, if it comes just before
    group.send(number)
    check_death(group, number)
    assert 1 <= len(data.read_manifest(out)["shards"]) <= 3
    for directory in (out, tmp_path / "whole"):
        done = prepare(tmp_path, directory, workers=workers).finish()
        assert done.code == 0 and ("resumes after" in done.out) == (directory == out), done.out
    for path in (tmp_path / "whole").glob("*.*"):
        assert path.read_bytes() == (out / path.name).read_bytes()
    assert not list(out.glob(".tmp-*"))


class InALock:
    """Ctrl-C while this process holds the lock of a result that the writing thread is to fill in. With an
    exception, it stays taken.
    """

    def __call__(self):
        real, count = ShardWriter.commit, itertools.count(1)

        def commit(*arguments, **options):
            real(*arguments, **options)
            if next(count) == 3:
                arguments[0].writing._condition.acquire()
                os.kill(os.getpid(), SIGINT)
                time.sleep(1)

        ShardWriter.commit = commit


def test_ctrl_c_while_a_lock_is_held(tmp_path):
    """It must not hang."""
    check_death(prepare(tmp_path, tmp_path / "out", InALock()), SIGINT)
    assert data.read_manifest(tmp_path / "out")["shards"]


@pytest.mark.parametrize("flags, shown, number", [
    ({"tokenizer": "bytes", "compile": True}, "run directory", SIGINT),
    *in_full(({"tokenizer": "bpe:300"}, "bpe:300", SIGINT), ({"tokenizer": "bpe:300"}, "bpe:300", SIGTERM))])
def test_a_trainer_that_prepares_or_compiles_ends_at_once(tmp_path, monkeypatch, flags, shown, number):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    group = train(f"text:{tmp_path}/text.txt", tmp_path / "run", **flags)
    wait_for(lambda: shown in group.text)
    time.sleep(0.5)
    group.send(number)
    assert "step 1/" not in check_death(group, number)


class InACallback:
    """Ctrl-C in a callback of a weak reference, where Python drops exceptions. torch's compiler has such."""

    def __call__(self):
        real = model.GPT2.hidden

        def hidden(*arguments):
            dying = torch.zeros(1)
            callback = weakref.ref(dying, lambda _: os.kill(os.getpid(), SIGINT))
            del dying
            assert callback() is None
            return real(*arguments)

        model.GPT2.hidden = hidden


def test_ctrl_c_where_exceptions_are_dropped(tmp_path, shards):
    assert "step 1/" not in check_death(train(shards, tmp_path / "run", InACallback()), SIGINT)


def ctrl_c_before_the_log():
    startup.run.start_run = mock.Mock(side_effect=KeyboardInterrupt)


def test_ctrl_c_in_one_of_two_processes_is_named_by_the_other(tmp_path, shards):
    """As on one of several nodes. Nobody was busy or cut off."""
    group = train(shards, tmp_path / "run", ctrl_c_before_the_log, ranks=2, fault_rank=1)
    done = group.finish()
    assert group.codes == [1, 130] and "Ctrl-C" in done.out and "busy" not in done.out, done.out
    assert "Traceback" not in done.out, done.out


def nohup():
    signal.signal(SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize("ranks, number", in_full(
    (2, SIGTERM), (0, SIGINT), (0, SIGUSR1), (0, signal.SIGUSR2)))
def test_training_stops_after_the_step_of_a_signal(tmp_path, shards, ranks, number):
    """On all ranks, though only the last one has got it. SIGHUP may be ignored, as nohup does."""
    last = max(ranks, 1) - 1
    group = train(shards, tmp_path / "run", nohup, ranks=ranks, fault_rank=last, **ENDLESS)
    wait_for(lambda: trains(tmp_path / "run"))
    group.send(SIGHUP, rank=last)
    group.send(number, rank=last)
    done = group.finish(20)
    assert not any(group.codes), done.out
    check_stop(done, tmp_path / "run", number)


def limit_of_cpu_time():
    resource.setrlimit(resource.RLIMIT_CPU, (2, resource.RLIM_INFINITY))


@pytest.mark.full
def test_a_limit_of_cpu_time_is_heard_whenever_it_comes(tmp_path, shards):
    """The kernel sends SIGXCPU each second from the limit on, here before the first step or after it."""
    done = train(shards, tmp_path / "run", limit_of_cpu_time, **ENDLESS).finish(60)
    assert done.code == 0, done.out
    check_stop(done, tmp_path / "run", signal.SIGXCPU)


@pytest.mark.parametrize("number", in_full(SIGHUP, [SIGINT]))
def test_a_save_that_is_under_way_is_finished(tmp_path, shards, number):
    """More signals, as torchrun sends them and the system that stops the job, change nothing."""
    out = tmp_path / "run"
    group = train(shards, out, Slow(tmp_path / "begun", "os.fsync", 0.5), **ENDLESS | {"save_every": 20})
    wait_for((tmp_path / "begun").exists)
    for sent in (number, SIGUSR1, SIGTERM):
        group.send(sent)
    done = group.finish(20)
    assert done.code == 0 and check_stop(done, out, number) >= 20, done.out
    assert read_checkpoint(list_checkpoints(out)[-1])["step"] == 20


@pytest.mark.parametrize("number", in_full(SIGINT, [SIGTERM]))
def test_an_evaluation_is_cut_off_and_done_again(tmp_path, shards, number):
    """The run goes on with this evaluation, and ends like one that was left alone."""
    out, begun = tmp_path / "run", tmp_path / "begun"
    flags = {"steps": 8, "eval_every": 4, "eval_batches": 0, "batch": 4}
    group = train(shards, out, Slow(begun, "training.evaluation.validation_batches", 3), **flags)
    wait_for(begun.exists)
    group.send(number)
    done = group.finish(10)
    assert done.code == 0 and check_stop(done, out, number) == 4 and not evaluations_of(out), done.out
    for directory in (out, tmp_path / "whole"):
        assert GPT2.train(0, shards, directory, **flags).code == 0
    assert_same_run(out, tmp_path / "whole")


@pytest.mark.parametrize("ranks", in_full(0, [2]))
def test_a_signal_cuts_the_last_sample_short(tmp_path, shards, ranks):
    """All is done and saved by then, so the run is complete, and nothing is left to resume."""
    slow = Slow(tmp_path / "begun", "weights.sampling.sample_ids", 0.5)  # 100 s in all
    group = train(shards, tmp_path / "run", slow, ranks=ranks, steps=2, max_new_tokens=200)
    wait_for((tmp_path / "begun").exists)
    group.send(SIGINT)
    done = group.finish(20)
    assert not any(group.codes) and "training complete: 2 steps" in done.out, done.out


def test_another_ctrl_c_ends_a_run_at_once(tmp_path, shards):
    """Twice at once counts once, because torchrun passes on what the terminal sends as well."""
    begun = tmp_path / "begun"
    group = train(shards, tmp_path / "run", Slow(begun, "data.Loader.step", 30, first=6), **ENDLESS)
    wait_for(begun.exists)
    group.send(SIGINT)
    group.send(SIGINT)
    time.sleep(3)
    assert group.all_alive
    group.send(SIGINT)
    check_death(group, SIGINT)
    assert not list_checkpoints(tmp_path / "run")


def under_torchrun(shards, out, *more, **changes):
    mark = uuid.uuid4().hex
    command = torchrun(2, GPT2.script, *GPT2.flags(shards, out, **ENDLESS | changes))
    command[3:3] = more
    process = start(command, FAULTS_MARK=mark, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    wait_for(lambda: trains(out))
    return process, mark


@pytest.mark.parametrize("number, code, said", in_full(
    (SIGKILL, -SIGKILL, SIGHUP), (SIGHUP, -SIGHUP, SIGHUP), (SIGTERM, 1, SIGTERM)))
def test_the_workers_of_a_torchrun_that_gets_a_signal_save(tmp_path, shards, number, code, said):
    """SIGHUP kills it, as it is none of the signals to handle. Its workers notice, save, end and free the
    lock. Nothing that they say is an error.
    """
    out = tmp_path / "run"
    process, mark = under_torchrun(shards, out, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
    process.send_signal(number)
    done = finish(process, 30)  # its output ends with the last of the workers
    assert done.code == code and "error: " not in done.out, done.out
    wait_for(lambda: not marked(mark))
    done.out = (out / "train.log").read_text()
    step = check_stop(done, out, said)
    again = GPT2.train(0, shards, out, steps=step + 1)
    assert again.code == 0 and "resuming after" in again.out, again.out
    assert log_of(out)[-1]["step"] == step + 1


@pytest.mark.full
def test_a_killed_worker_ends_its_torchrun_and_the_others(tmp_path, shards):
    changes = {"save_every": 2, "steps": 200, "eval_every": 100, "timeout": 30}
    process, mark = under_torchrun(shards, tmp_path / "run", **changes)
    os.kill(worker(process.pid, 1), SIGKILL)
    done = finish(process, 60)
    assert done.code == 1, done.out
    wait_for(lambda: not marked(mark))
    for out in ("run", "whole"):
        assert GPT2.fork(2, shards, tmp_path / out, **ENDLESS | changes).code == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_torchrun_restarts(tmp_path, shards):
    """With the documented variable a job whose workers are killed ends like an undisturbed one."""
    changes = {"save_every": 2, "steps": 400, "eval_every": 100}
    process, _ = under_torchrun(shards, tmp_path / "run", "--max-restarts", "2", **changes)
    log = tmp_path / "run" / "train.log"
    for step, rank in ((60, 0), (120, 1)):
        wait_for(lambda step=step: f"step {step}/" in log.read_text())
        os.kill(worker(process.pid, rank), SIGKILL)
    done = finish(process, 120)
    assert done.code == 0, done.out
    assert log.read_text().count("resuming after step") == 2
    assert GPT2.fork(2, shards, tmp_path / "whole", **ENDLESS | changes).code == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.full
def test_a_snapshot_is_written_though_another_process_dies(tmp_path, shards):
    """The process that writes does not leave before its thread is done, though that takes long."""
    begun, out = tmp_path / "begun", tmp_path / "run"
    # gloo notices the death of a peer at once, but now and then only after the time-out
    flags = ENDLESS | {"save_every": 20, "timeout": 30}
    group = train(shards, out, Slow(begun, "os.fsync", 10), ranks=2, **flags)
    wait_for(begun.exists)
    group.send(SIGKILL, rank=1)
    done = group.finish()
    assert done.code == 1 and re.search("^error: rank 1 on node0 .* stopped", done.out, re.M), done.out
    assert [path.name[:13] for path in list_checkpoints(out)] == ["step_00000020"]

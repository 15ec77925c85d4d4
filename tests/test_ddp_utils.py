"""ddp_utils.py: agreement of several processes, endings, devices, and checkpoints on disk."""

import ctypes
import errno
import gc
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ddp_worker import run_checks
from many_runs import TRAINERS
from processes import fork
from runs import assert_same_run, steps_of
from states import META, flags_of, make, make_state, save, take_step, train_state, world  # noqa: F401

import data
import ddp_utils
import startup.run
import train_gpt2
from cli.errors import RetryableError, RunError, UserError
from ddp_utils import STOP_SIGNALS, Checkpoints, StopVote, list_checkpoints, load_checkpoint, read_checkpoint
from model import GPT2, GPT2Config
from startup.directory import RunLock
from training.strategies import copy_weights


def test_on_two_processes():
    run_checks(__file__)


def check_agreement(world) -> None:
    assert ddp_utils.reduce_sum([world.rank, torch.tensor(0.5)], world) == [1.0, 1.0]
    assert ddp_utils.async_sum(world.rank + 1, world)() == 3
    assert ddp_utils.all_gather(0.1 * world.rank) == [0.0, 0.1]
    assert ddp_utils.on_rank0(lambda: world.rank) == 0
    assert ddp_utils.find_mismatch([5, 6]) is None
    assert ddp_utils.find_mismatch([5, world.rank]) == (1, 1)
    ddp_utils.assert_same("the tokenizer", "ab" * 16, "way out")
    with pytest.raises(UserError, match="rank 1"):
        ddp_utils.assert_same("the tokenizer", "ab" if world.rank == 0 else "ac", "way out")
    assert signal.getsignal(signal.SIGXCPU) == signal.SIG_IGN  # until StopVote hears it
    # not torchrun's 1, with which NCCL ends a process whose peer is lost before it can name the peer
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    # NCCL's watchdog waits four times as long
    assert int(os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) <= 2000


def check_failure(world) -> None:
    """What fails on one rank fails on all, with the same exit code, and nobody waits for the one that failed.
    """
    assert ddp_utils.run_and_wait(lambda: world.rank) == world.rank
    for rank, run in ((1, ddp_utils.run_and_wait), (0, ddp_utils.on_rank0)):
        for kind in (UserError, RetryableError):
            def fail(kind=kind, rank=rank):
                if world.rank == rank:
                    raise kind("only here")
            with pytest.raises(UserError, match="only here") as error:
                run(fail)
            assert error.value.exit_code == kind.exit_code


def check_sync(world) -> None:
    model = make()
    ddp_utils.assert_in_sync(model, 3)
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        model.to(dtype)
        if world.rank == 1:  # one bit of one number
            model.L.blocks[0].down.weight.data.view(-1).view(bits)[3] ^= 1
        with pytest.raises(RunError, match="L.blocks.0.down.weight on rank 1"):
            ddp_utils.assert_in_sync(model)
        assert ddp_utils.sync_of(model, 5, world) == "OK@3"
        on_gpus = SimpleNamespace(device=torch.device("cuda"), world_size=2)
        with pytest.raises(RunError, match="Sync=FAILED"):
            ddp_utils.sync_of(model, 5, on_gpus)
        copy_weights(model, model.state_dict(), world)
        assert ddp_utils.sync_of(model, 5, on_gpus) == "OK"
        ddp_utils.assert_in_sync(model, 3)


def check_lost_best(world) -> None:
    """All ranks forget in the next save each best that rank 0 has not linked: here one whose link failed, and
    one that has no checkpoint."""
    state = train_state(make(), world)
    with tempfile.TemporaryDirectory() as out:
        checkpoints = Checkpoints(Path(out), world, 3, lambda _: None)
        checkpoints.log = SimpleNamespace(evaluations={1: 5.0, 2: 4.0, 3: 3.0})
        for step, broken in ((1, None), (2, OSError("full"))):
            checkpoints.save(step, state, META)
            wait(ddp_utils.process.unwritten)
            with mock.patch.object(os, "replace", wraps=os.replace, side_effect=broken):
                checkpoints.mark_best(step)
                wait(ddp_utils.process.unwritten)
        checkpoints.mark_best(3)  # its update was skipped
        checkpoints.save(5, state, META)
        checkpoints.close()
    assert checkpoints.log.evaluations == {1: 5.0, 2: math.inf, 3: math.inf}


def check_stop(world) -> None:
    """All agree on the signal of one rank, a vote later. Batch systems send this one and SIGUSR2."""
    vote, state = StopVote(world), train_state(make(), world)
    assert vote.vote() == 0
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGXCPU)
    assert vote.vote() == 0  # sent off before the signal
    assert take_step(state, stop=vote) > 0 and vote.agreed == signal.SIGXCPU
    vote.signal = vote.signal and signal.SIGTERM  # the first counts
    assert vote.vote() == signal.SIGXCPU
    vote.read()
    assert vote.agreed == vote.vote() == STOP_SIGNALS[-1]  # `launch` ignores it
    assert signal.SIGUSR2 in STOP_SIGNALS


# ------------------------------------------------------------------------------------------ start and end

SCRIPT = """
import sys
import torch
import train_gpt2
from cli.errors import UserError
*flags, first, second = sys.argv[1:]
for out in (first, second, first):
    try:
        train_gpt2.main(["--no-such-flag"])
    except UserError:
        train_gpt2.main([*flags, "--out", out])  # while sys.exc_info() still has the mistake
    assert not torch.distributed.is_initialized()
print("the script goes on")
"""


def test_a_script_calls_main_on_several_processes(tmp_path, shards):
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = TRAINERS["gpt2"].flags(shards, "unused", steps=2)
    done = fork(2, tmp_path / "script.py", *flags, tmp_path / "a", tmp_path / "b")
    assert done.code == 0 and done.out.count("goes on") == 2 and "is complete" in done.out, done.out
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_main_can_be_called_again(tmp_path, shards, monkeypatch):
    """In a notebook with a list of flags, after a mistake, after an interrupt in the middle of a step, to use
    the run.
    """
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel-1.json"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # drawing would take half of the time
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # a test before may have set it
    flags = TRAINERS["gpt2"].flags(shards, tmp_path / "run", steps=4)

    def state() -> list:
        return [*map(signal.getsignal, STOP_SIGNALS), sys.excepthook, gc.get_freeze_count(),
                torch.distributed.is_initialized(), os.environ.get("GLOO_SOCKET_IFNAME")]

    before, step = state(), ddp_utils.seed_step
    held = []  # its traceback keeps the frames, as a notebook does

    def interrupted(seed, number, rank):
        if number == 6 and len(held) == 2:
            assert not any(a == b for a, b in zip(state()[-4:], before[-4:]))  # the control
            raise KeyboardInterrupt
        step(seed, number, rank)

    monkeypatch.setattr(ddp_utils, "seed_step", interrupted)
    for added in ("", "--n-layer x", "--seq-len 16", "--steps 8", "--steps 8", "--eval-only"):
        try:
            train_gpt2.main([*flags, *added.split()])
        except (UserError, KeyboardInterrupt) as found:
            held.append(found)
        assert state() == before
    assert [*map(type, held)] == [UserError, UserError, KeyboardInterrupt]
    assert steps_of(tmp_path / "run")[-1]["step"] == 8


FAULTS = """
import resource
import torch
import ddp_utils
for kept in (False, True):
    if kept:
        ddp_utils.init(device="cpu")
    for i in range(60):
        if i == 50:  # until then small blocks can take what a tensor has freed
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10**7)  # 40 MB, freed at once; glibc itself keeps blocks up to 32 MiB
    print("faults:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_kept_for_the_next_tensors(tmp_path):
    script = tmp_path / "faults.py"
    script.write_text(FAULTS)
    without, kept = map(int, re.findall(r"faults: (\d+)", fork(0, script).out))
    assert 10 * kept < without


@pytest.mark.parametrize("error, code, named", [
    (SystemExit(0), 0, ""), (KeyboardInterrupt(), 130, ""), (BrokenPipeError(), 0, ""),
    (UserError("so"), 2, "so"), (RetryableError("so"), 1, "so"), (RunError("so"), 1, "so"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 …"), 1, "2.00 GiB"),
    (RuntimeError("CUDA error: out of memory"), 1, "--dry-run"), (MemoryError(), 1, "--dry-run"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4503599627370496 bytes. "
                  "Error code 12 (Cannot allocate memory)"), 1, "4194304.00 GiB"),
    (RuntimeError("cannot allocate 8 bytes"), 1, None)])
def test_exit_codes(monkeypatch, capsys, error, code, named):
    """With a sentence; only what is not foreseen has a traceback."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    found, text, reason = ddp_utils.ending_of(error)
    assert found == code and (named or "") in text
    assert bool(capsys.readouterr().err) == (named is None)
    assert text == f"error: {reason}" or not named


@pytest.mark.parametrize("error, kind", [
    (UserError("so"), SystemExit), (ZeroDivisionError(), ZeroDivisionError)])
def test_what_runs_a_trainer_goes_on_after_it(error, kind):
    """As pytest does here, and a console, a profiler or a debugger elsewhere; also in a thread."""
    def main():
        StopVote(ddp_utils.init("gloo", "cpu"))
        raise error

    before = [*map(signal.getsignal, STOP_SIGNALS)]
    for run in (ThreadPoolExecutor(1).map, map):
        with pytest.raises(kind):
            next(run(ddp_utils.launch, [main]))
        assert not torch.distributed.is_initialized()
        assert [*map(signal.getsignal, STOP_SIGNALS)] == before


def test_a_lost_peer_of_nccl_is_asked_after(monkeypatch):
    """As torch 2.15 says it: the error is no DistError there."""
    lost = SimpleNamespace(find_cause=lambda: "rank 1 is gone.")
    monkeypatch.setattr(ddp_utils.process, "heartbeat", lost)
    assert ddp_utils.ending_of(RuntimeError("NCCL operation timed out")) == (1, "error: rank 1 is gone.", "")


def test_strict_runs_do_not_add_up_in_nvswitches(world, monkeypatch):
    """Their order can change from start to start. What the user has set stays."""
    found, name = [], "NCCL_NVLS_ENABLE"
    monkeypatch.setattr(torch.distributed, "init_process_group",
                        lambda *_, **__: found.append(os.environ.get(name)))
    for flag, before in (("--no-compile", {}), ("--fast", {}), ("--no-compile", {name: "1"})):
        monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "1"} | before)
        startup.run.start(flags_of(train_gpt2, ["--device", "cpu", flag]))
    assert found == ["0", None, "1"]


@pytest.mark.parametrize("value", ["", "0", "auto", "1", "2,1"])
def test_what_is_no_number_of_threads_is_not_set(value, request, monkeypatch):
    known = "1" in value
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(torch, "set_num_threads", pytest.fail if known else mock.Mock())
    request.getfixturevalue("world")
    assert known or torch.set_num_threads.called


@pytest.mark.parametrize("capability, ask, named", [
    ((7, 0), ("gloo", "auto", 1), "a card"), ((7, 5), ("gloo", "auto", 1), None),
    ((12, 1), ("auto", "cuda", 2), None), ((12, 1), ("gloo", "auto", 3), "--nproc_per_node=2"),
    ((12, 1), ("nccl", "cpu", 1), "--backend nccl"), (None, ("auto", "cuda", 1), "--device cpu")])
def test_which_gpus_are_taken(monkeypatch, capability, ask, named):
    """None that torch has no kernels for, as a GTX 1080 with a CUDA 13 build, whose oldest are for Turing."""
    cuda = {"device_count": 2 * bool(capability), "get_device_capability": capability,
            "get_arch_list": ["sm_75", "sm_80", "sm_90a", "sm_120", "compute_120"],
            "get_device_name": "a card"}
    monkeypatch.setattr(torch, "cuda", mock.Mock(**{f"{name}.return_value": cuda[name] for name in cuda}))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ddp_utils.choose_device("auto", "cpu", 8) == (torch.device("cpu"), "gloo")
    if named:
        with pytest.raises(UserError, match=named):
            ddp_utils.choose_device(*ask)
    else:
        backend = "nccl" if ask[0] == "auto" else "gloo"
        assert ddp_utils.choose_device(*ask) == (torch.device("cuda", 1), backend)


# ------------------------------------------------------------------------------------- seeds and sums of bits

def test_seeds_of_steps_and_ranks_differ():
    drawn = set()
    for place in itertools.product(range(3), range(20), range(4)):
        ddp_utils.seed_step(*place)
        for source in (None, ddp_utils.generator(*place)):
            drawn.add(torch.rand(4, generator=source).sum().item())
    assert len(drawn) == 2 * 3 * 20 * 4
    assert ddp_utils.mixed(3, 20, 1) == 5859809183963233909  # so that a resumed run draws what it drew


# --------------------------------------------------------------------------------------- reading checkpoints

def test_what_is_damaged(tmp_path, world):
    """What torch.load takes: a flipped bit, another step in the name. And code, which is not run."""
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    state = make_state(world)
    save(tmp_path, world, state, (1, 2))
    newest, path = list_checkpoints(tmp_path)
    saved, content = torch.load(path, weights_only=True), path.read_bytes()
    at = content.index(state.model.embed.weight.detach().numpy().tobytes()) + 5
    flipped = bytearray(content)
    flipped[at] ^= 1
    for new in (newest.read_bytes(), {"x": Malicious()}, flipped):
        if isinstance(new, dict):
            torch.save(saved | new, path)
        else:
            path.write_bytes(new)
        with pytest.raises(RunError):
            read_checkpoint(path)
    torch.load(path, weights_only=True)  # takes the last one
    assert not (tmp_path / "owned").exists()
    path.write_bytes(content)
    assert read_checkpoint(path)["step"] == 1


def test_verify_names_the_tensor_that_is_not_sound(tmp_path, world, monkeypatch, capsys):
    """In one checkpoint, or after the others of a run. What is neither is refused."""
    def verify(path) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["data.py", "verify", str(path)])
        data.main()
        out = capsys.readouterr().out
        return re.findall(r"(\w+)_loss\S+: step (\d), loss \d\.\d{4}, (best, )?sound", out)

    state = make_state(world)
    save(tmp_path, world, state, (1, 2))
    newest, path = list_checkpoints(tmp_path)
    path.with_name("best.pt").hardlink_to(newest)  # as a run does
    assert verify(tmp_path) == [("step_00000001", "1", ""), ("step_00000002", "2", "best, ")]
    assert verify(path) == [("step_00000001", "1", "")]
    content = bytearray(path.read_bytes())
    with monkeypatch.context() as patch:  # a training deletes it after or before it is read
        patch.setattr(ddp_utils, "read_checkpoint", lambda at: (read_checkpoint(at), at.unlink())[0])
        assert verify(path) == [("step_00000001", "1", "")]
        patch.setattr(ddp_utils, "read_checkpoint",
                      lambda at: (at == path and at.unlink(), read_checkpoint(at))[1])
        path.write_bytes(content)
        with pytest.raises(UserError, match=path.name):
            verify(path)
        path.write_bytes(content)
        assert verify(tmp_path) == [("step_00000002", "2", "best, ")]
    content[content.index(state.model.embed.weight.detach().numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    for where, others in (tmp_path, 2), (path, 0):
        with pytest.raises(UserError, match=f"{path.name}: .* model/embed.weight "):
            verify(where)
        assert capsys.readouterr().out.count("sound") == others  # best.pt is one of them
    saved = torch.load(newest, weights_only=True)
    saved["tensors"]["model"]["embed.weight"] += 1
    torch.save(saved, newest)
    with pytest.raises(UserError, match=rf"{path.name}: (.*\n)+.*{newest.name} .*embed\.weight"):  # edited
        verify(tmp_path)
    (tmp_path / "text").write_text("no checkpoint")
    for other in "text", "nowhere", ".":
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        with pytest.raises(UserError, match=(tmp_path / other).name):
            verify(tmp_path / other)


def test_the_newest_whole_checkpoint_is_taken(tmp_path, world):
    """Only what reads takes best.pt beside damaged ones."""
    save(tmp_path, world, make_state(world), steps=(1, 2, 3))
    newest, second, first = list_checkpoints(tmp_path)
    newest.write_bytes(newest.read_bytes()[:1000])
    said = []
    found = load_checkpoint(tmp_path, said.append)
    assert (found["step"], found["damaged"]) == (2, [str(newest)])
    assert len(said) == 1 and newest.name in said[0]
    best = first.rename(first.with_name("best.pt"))
    second.unlink()
    for name in (newest.name, f"{newest.name}.damaged"):
        newest = newest.rename(newest.with_name(name))
        with pytest.raises(UserError, match=str(best)):  # in the advice
            load_checkpoint(tmp_path, print)
        found = load_checkpoint(tmp_path, print, or_best=True)
        assert (found["step"], found["path"]) == (1, str(best))
    newest.unlink()
    assert list_checkpoints(tmp_path) == [best]
    best.write_bytes(b"PK")
    with pytest.raises(UserError, match="best.pt"):
        load_checkpoint(tmp_path, print, or_best=True)


def test_files_of_other_programs_are_not_damaged(world, tmp_path):
    tensors = {"transformer.wte.weight": torch.ones(2, 2)}
    torch.save({"model": tensors, "model_args": {"n_layer": 2}}, tmp_path / "ckpt.pt")
    for name in ("legacy.bin", "legacy.pt"):
        torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in tmp_path.iterdir():
        with pytest.raises(UserError, match=f"{path.name} .* hf:{tmp_path}"):
            load_checkpoint(path, pytest.fail)


def test_fields_of_a_model(tmp_path):
    """One that a checkpoint lacks has its default. One that the code lacks is refused, with the commit."""
    saved = asdict(GPT2Config())
    for field in ("modern", "attention"):
        del saved[field]
    assert ddp_utils.config_of(GPT2Config, saved, "old.pt") == GPT2Config()
    (tmp_path / "config.json").write_text('{"commits": ["abc", "def-dirty"]}')
    path = tmp_path / "checkpoints" / "step_00000004_loss1.pt"
    with pytest.raises(UserError, match=r"sparse.*GPT2Config.*commit def-dirty"):
        ddp_utils.config_of(GPT2Config, saved | {"sparse": True}, path)
    ddp_utils.assert_family({"family": "GPT2"}, GPT2)
    with pytest.raises(UserError, match="MLM.*GPT2"):
        ddp_utils.assert_family({"family": "MLM", "path": path}, GPT2)


# --------------------------------------------------------------------------------------- writing checkpoints

def test_only_files_of_a_run_are_deleted(tmp_path, world):
    """A copy that somebody made is found, but neither deleted nor counted among those to keep."""
    state, directory = make_state(world), tmp_path / "checkpoints"
    save(tmp_path, world, state, steps=(1, 2))
    second, first = (path.name for path in list_checkpoints(tmp_path))
    kept = [first.replace(".pt", " (copy).pt"), second.replace(".pt", "_best so far.pt"),
            "step_00000001_loss2.5.pt", ".tmp-mine", f"{first}.bak", ".tmp-step_notes.txt", ".tmp-folder"]
    for name in kept[:-1]:
        shutil.copy(directory / first, directory / name)
    (directory / kept[-1]).mkdir()
    assert {path.name for path in list_checkpoints(tmp_path)} == {first, second, *kept[:3]}
    # of a trainer's own loss, of steps that were skipped, and what a kill leaves
    losses = (f"step_00000003_loss{loss}_20261120_143022.pt" for loss in ("-0.5000", "inf", "nan"))
    for name in (*losses, f".tmp-{first}", ".tmp-best.pt"):
        (directory / name).touch()
    lock = RunLock(tmp_path)
    lock.acquire()
    lock._file.close()
    save(tmp_path, world, state, steps=(123456789,), keep_last=1)
    assert {*os.listdir(directory)} == {list_checkpoints(tmp_path)[0].name, *kept}


def test_old_checkpoints_go_and_the_best_stays(tmp_path, world):
    """Training goes on while they are written, and a file holds the state at the time of its call."""
    state, step_of_weight = make_state(world), {}
    checkpoints = Checkpoints(tmp_path, world, 2, print)
    for step in range(1, 6):
        step_of_weight[step] = state.model.embed.weight.detach().clone()
        checkpoints.save(step, state, META)
        if step <= 2:
            checkpoints.mark_best(step)
        take_step(state)
    checkpoints.close()
    paths = list_checkpoints(tmp_path)
    assert [ddp_utils.step_of(path) for path in paths] == [5, 4]
    for path, step in ((paths[0], 5), (paths[0].with_name("best.pt"), 2)):
        saved = read_checkpoint(path)
        assert saved["step"] == step
        assert torch.equal(saved["tensors"]["model"]["embed.weight"], step_of_weight[step])
    assert not [*paths[0].parent.glob(".tmp*")]
    # as after a kill between the mark and its line in the log; rename does nothing between two links
    for _ in range(2):
        checkpoints._link(paths[0].with_name("best.pt"), paths[0])
    assert {*os.listdir(checkpoints.directory)} == {"best.pt", *(path.name for path in paths)}
    with pytest.raises(TypeError):  # only plain data get into a checkpoint
        Checkpoints(tmp_path, world, 3, print).save(1, state, META | {"path": tmp_path})


def test_an_error_right_after_a_save_leaves_the_checkpoint(tmp_path, world, monkeypatch):
    """The lock is given back only when what it guards is written, so no other run can come between."""
    lock, locked, plain = RunLock(tmp_path), [], Checkpoints._write

    def write(self, *args):
        threading.Event().wait(0.5)
        locked.append(not lock._file.closed)
        plain(self, *args)

    @ddp_utils.cleanup_on_exit
    def main(argv):
        lock.acquire()
        checkpoints = Checkpoints(tmp_path, world, 3, print, lock.lost)
        checkpoints.save(1, make_state(world), META)
        checkpoints.mark_best(1)
        raise ZeroDivisionError

    monkeypatch.setattr(Checkpoints, "_write", write)
    with pytest.raises(ZeroDivisionError):
        main()
    assert locked == [True] and lock._file.closed
    for path in (list_checkpoints(tmp_path)[0], tmp_path / "checkpoints" / "best.pt"):
        assert read_checkpoint(path)["step"] == 1


def test_a_full_disk_is_reported_and_training_goes_on(tmp_path, world, monkeypatch):
    """What has no file is not the best, so the next evaluation can be. A last save must not get lost."""
    state, said, real = make_state(world), [], torch.save

    def fail(content, file):
        try:
            file.write(b"half of it")
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 64 vs 0")

    checkpoints = Checkpoints(tmp_path, world, 3, said.append)
    checkpoints.log = SimpleNamespace(evaluations={2: 1.0})
    for step, save_with in ((1, real), (2, fail), (3, real), (4, fail)):
        monkeypatch.setattr(torch, "save", save_with)
        checkpoints.save(step, state, META)
        if step > 1:
            checkpoints.mark_best(step)
        wait(ddp_utils.process.unwritten)
        assert not [*checkpoints.directory.glob(".tmp*")]
        assert (checkpoints.directory / "best.pt").exists() == (step > 2)
    assert os.strerror(errno.EDQUOT) in said[1]
    assert checkpoints.log.evaluations == {2: math.inf}
    assert [ddp_utils.step_of(path) for path in list_checkpoints(tmp_path)] == [3, 1]
    assert read_checkpoint(checkpoints.directory / "best.pt")["step"] == 3
    with pytest.raises(RunError, match="step 4"):
        checkpoints.close()


@pytest.mark.parametrize("saved, linked, log, marked, best", [
    # the newest is damaged, so the first evaluation of the resumed run is of the one before
    ((1, 2), None, {}, 1, 1),
    # after going back to step 1, the new step 2 is the best, though the log has one without a file
    ((1,), None, {1: 0.5, 2: 0.5}, 2, 2),
    # a kill between the rename of a checkpoint and its mark
    ((1, 2), 1, {1: 0.5, 2: 0.4}, None, 2),
    # the log has lost the loss of best.pt, which may be the only file of that step
    ((1, 2), 1, {2: 0.4}, None, 1),
    # the save of step 3 failed, and that of step 2 was not linked
    ((1, 2, 4), None, {1: 4.0, 2: 3.0, 3: 2.0}, None, 2)])
def test_the_best_of_a_resumed_run(tmp_path, world, saved, linked, log, marked, best):
    state = make_state(world)
    save(tmp_path, world, state, saved)
    files = {ddp_utils.step_of(path): path for path in list_checkpoints(tmp_path)}
    link = tmp_path / "checkpoints" / "best.pt"
    if linked:
        os.link(files[linked], link)
    if not log:
        files.pop(2).write_bytes(b"damaged")
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "val_loss": loss}) + "\n" for step, loss in log.items()))
    checkpoints = Checkpoints(tmp_path, world, 9, print)
    assert checkpoints.resume(checkpoints.load("auto"), state) == (max(files), 7)
    assert checkpoints.files.keys() == files.keys()  # so the log does not compare with others
    if marked:
        checkpoints.save(marked, state, META | {"samples": 9})
        checkpoints.mark_best(marked)
    checkpoints.close()
    assert read_checkpoint(link)["step"] == best

"""ddp_utils.py: agreement of several processes, and checkpoints on disk."""

import argparse
import contextlib
import fcntl
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections import Counter
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import ddp_worker
import numpy as np
import pytest
import torch
from conftest import ROOT, Finished, finish, run, start
from processes import fork
from states import run_of, train_state

import ddp_utils
import startup.run
import train_gpt2
from cli.errors import RunError, UserError
from cluster import diagnosis
from ddp_utils import Checkpoints, World, list_checkpoints, load_checkpoint, read_checkpoint
from model import GPT2, HRM, MLM, GPT2Config, HRMConfig, use_device
from ops import attention, device
from ops.device import compute_dtype
from startup import dry_run
from startup.directory import RunLock
from startup.plan import say_plan, what_next
from startup.resume import compare_with_saved
from training.step import DeviceNorm, TrainState, skips_on_device
from weights.use import load_model

CHECKS = ["agreement", "failure", "sync", "lost_best", "gradients", "depth", "skipped_updates",
          "skips_on_device", "who_skips_on_device", "zero1_buffers", "fp16_shards", "bf16_gradients",
          "memory", "gathering", "bf16_shards", "owners",
          "samples_have_one_prompt",
          "who_writes_samples", "stop", "machines"]


def run_checks() -> dict[str, str]:
    """The checks that fail in two processes, and what was printed. One start is for all; after a check that
    fails, another is for those that are left."""
    failed, left = {}, CHECKS
    while left:
        try:
            done = fork(2, "tests/helpers/ddp_worker.py", *left, timeout=180)
        except pytest.fail.Exception as hung:
            done = Finished(1, str(hung))
        passed = sum(f"check_{name} OK" in done.out for name in left)
        if done.code == 0 and passed == len(left):
            break
        failed[left[min(passed, len(left) - 1)]] = done.out  # the last, if the processes failed after it
        left = left[passed + 1:]
    return failed


@pytest.fixture(scope="module")
def failed(tmp_path_factory, worker_id) -> dict[str, str]:
    """The result of run_checks, which the workers of pytest-xdist share: the first that comes runs them."""
    base = tmp_path_factory.getbasetemp()
    with open((base if worker_id == "master" else base.parent) / "failed-checks.json", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        file.seek(0)
        if not file.read():
            json.dump(run_checks(), file)
            file.flush()
        file.seek(0)
        return json.load(file)


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(failed, check):
    assert check not in failed, failed[check]


def test_all_checks_are_run():
    assert [name.removeprefix("check_") for name in vars(ddp_worker) if name.startswith("check_")] == CHECKS


@pytest.mark.full
def test_a_failing_check_fails_the_process():
    done = run(2, "tests/helpers/ddp_worker.py", "fail")
    assert done.code == 1 and "ZeroDivisionError" in done.out


@pytest.fixture(scope="module")
def world():
    world = ddp_utils.init("gloo", "cpu")
    yield world
    torch.distributed.destroy_process_group()


META = {"loss": 2.5, "settings": {"steps": 10}}  # what each checkpoint has


def make_state(world, seed=0, optimizer="adamw", **changes):
    torch.manual_seed(seed)
    model = HRM(HRMConfig(vocab_size=60, padded_vocab=64, seq_len=16, n_layer=1, n_head=2, d_model=16, ff=32))
    state = train_state(model, world, optimizer=optimizer, **{"ema": 0.9} | changes)
    x = torch.randint(60, (2, 16))
    for _ in range(2):
        model(x, x)[0].backward()
        state.optimizer_step(1e-2, state.clip_gradients(1.0))
    return state


def all_tensors(state):
    return {f"{group}/{name}": t.clone() for group, name, t, _ in state.state_dict()}


def test_only_files_of_a_run_are_deleted(tmp_path, world):
    """A copy that somebody made is found, but neither deleted nor counted among those to keep."""
    state = make_state(world)
    save(tmp_path, world, state, steps=(1, 2))
    first, second = (path.name for path in ddp_utils.list_checkpoints(tmp_path)[::-1])
    kept = [first.replace(".pt", " (copy).pt"), second.replace(".pt", "_best so far.pt"), ".tmp-mine",
            f"{first}.bak", "step_00000001_loss2.5.pt", ".tmp-step_notes.txt"]
    for name in kept:
        shutil.copy(tmp_path / "checkpoints" / first, tmp_path / "checkpoints" / name)
    (tmp_path / "checkpoints" / ".tmp-folder").mkdir()
    found = {path.name for path in ddp_utils.list_checkpoints(tmp_path)}
    assert found == {first, second, kept[0], kept[1], kept[4]}
    for loss in ("-0.5000", "inf", "nan"):  # of a task of one's own, and of a step that was skipped
        (tmp_path / "checkpoints" / f"step_00000003_loss{loss}_20261120_143022.pt").touch()
    for killed in (f".tmp-{first}", ".tmp-best.pt"):
        (tmp_path / "checkpoints" / killed).touch()
    lock = RunLock(tmp_path)
    lock.acquire()
    lock._file.close()
    save(tmp_path, world, state, steps=(123456789,), keep_last=1)
    newest = ddp_utils.list_checkpoints(tmp_path)[0].name
    assert {*os.listdir(tmp_path / "checkpoints")} == {newest, ".tmp-folder", *kept}


def save(out, world, state, steps=(1,), said=None, keep_last=3):
    (out / "checkpoints").mkdir(exist_ok=True)
    checkpoints = Checkpoints(out, world, keep_last, (said if said is not None else []).append)
    meta = {"samples": 7, "family": "HRM", "model_config": asdict(state.model.config)}
    for step in steps:
        checkpoints.save(step, state, meta | META)
    checkpoints.close()


@pytest.mark.parametrize("installed", [True, False])
def test_compiled_blocks_use_the_libdevice_of_triton(tmp_path, monkeypatch, installed):
    """Else torch warns four times a run, and nodes with a CUDA toolkit may round otherwise."""
    path = tmp_path / "backends/nvidia/lib/libdevice.10.bc"
    path.parent.mkdir(parents=True)
    path.touch()
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py")) if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(os, "environ", {})
    device.use_libdevice_of_triton()
    assert os.environ.get("TRITON_LIBDEVICE_PATH") == (str(path) if installed else None)
    os.environ["TRITON_LIBDEVICE_PATH"] = "of the user"
    device.use_libdevice_of_triton()
    assert os.environ["TRITON_LIBDEVICE_PATH"] == "of the user"


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adam-atan2"])
def test_what_is_saved_is_restored(tmp_path, world, optimizer):
    state = make_state(world, 0, optimizer)
    before = all_tensors(state)
    save(tmp_path, world, state)
    other = make_state(world, 1, optimizer)
    assert not torch.equal(other.model.embed.weight, state.model.embed.weight)
    saved = load_checkpoint(tmp_path, print)
    assert saved["step"] == 1 and saved["samples"] == 7
    other.load_state_dict(saved, print)
    after = all_tensors(other)
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    model = load_model(HRM, load_checkpoint(tmp_path, print), world)
    assert torch.equal(model.embed.weight, before["ema/embed.weight"])
    assert not torch.equal(before["ema/embed.weight"], before["model/embed.weight"])


def test_a_restored_average_goes_on_with_the_decay_of_its_step(tmp_path, world):
    state = make_state(world, ema=0.999)  # after two steps
    save(tmp_path, world, state, steps=(2,))
    other = make_state(world, seed=1, ema=0.999)
    other.ema.updates = 77
    other.load_state_dict(load_checkpoint(tmp_path, print), print)
    for each in (state, other):
        with torch.no_grad():
            each.model.head.weight.fill_(3.0)
        each.ema.update()
    assert state.ema.updates == other.ema.updates == 3
    assert torch.equal(state.ema.average["head.weight"], other.ema.average["head.weight"])


def test_another_optimizer_starts_afresh_where_it_must(tmp_path, world):
    """From AdamW to Muon and back: a parameter has the whole state that its optimizer saved, or none."""
    for old, new in (("adamw", "muon"), ("muon", "adamw")):
        (tmp_path / old).mkdir()
        save(tmp_path / old, world, make_state(world, 0, old))
        saved = load_checkpoint(tmp_path / old, print)
        state = make_state(world, 1, new)
        state.load_state_dict(saved, print)
        restored = state.optimizer_tensors()
        names = {name.rpartition("/")[0] for name in restored}
        assert names == {n for n, _ in state.model.named_parameters() if ".blocks." not in n}
        assert all(torch.equal(t, saved["tensors"]["optimizer"][name]) for name, t in restored.items())
        x = torch.randint(60, (2, 16))
        state.model(x, x)[0].backward()
        state.optimizer_step(1e-2, state.clip_gradients(1.0))  # the fresh ones work
        assert len(state.optimizer_tensors()) > len(restored)

    # NAdam has what AdamW has, and one more
    saved["tensors"]["optimizer"]["embed.weight/mu_product"] = torch.ones(())
    state = make_state(world, 1, "muon")
    state.load_state_dict(saved, print)
    assert not [name for name in state.optimizer_tensors() if name.startswith("embed.weight/")]


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path, world):
    """The file holds the state at the time of the call."""
    state = make_state(world)
    before = all_tensors(state)
    (tmp_path / "checkpoints").mkdir()
    checkpoints = Checkpoints(tmp_path, world, 3, print)
    checkpoints.save(1, state, META)
    with torch.no_grad():
        for p in state.model.parameters():
            p.add_(1)
    checkpoints.close()
    tensors = read_checkpoint(list_checkpoints(tmp_path)[0])["tensors"]
    assert all(torch.equal(before[f"model/{name}"], t) for name, t in tensors["model"].items())


def test_an_error_right_after_a_save_leaves_the_checkpoint(tmp_path, world, monkeypatch):
    """The lock is given back only when what it guards is written, so no other run can come between."""
    said, locks, locked = [], [], []
    slow = threading.Event()
    plain = Checkpoints._write

    def write(self, *args):
        slow.wait(0.5)
        locked.append(not locks[0]._file.closed)
        plain(self, *args)

    @ddp_utils.cleanup_on_exit
    def main(argv):
        locks.append(RunLock(tmp_path))
        locks[0].acquire()
        checkpoints = Checkpoints(tmp_path, world, 3, said.append, locks[0].lost)
        checkpoints.save(1, make_state(world), META)
        checkpoints.mark_best(1)
        raise ZeroDivisionError

    monkeypatch.setattr(Checkpoints, "_write", write)
    with pytest.raises(ZeroDivisionError):
        main()
    assert locked == [True] and locks[0]._file.closed
    assert [path.name for path in (tmp_path / "checkpoints").glob("best.pt")] == ["best.pt"]
    assert read_checkpoint(list_checkpoints(tmp_path)[0])["step"] == 1
    assert not [text for text in said if "WARNING" in text]


def test_old_checkpoints_go_and_the_best_stays(tmp_path, world):
    (tmp_path / "checkpoints").mkdir()
    checkpoints = Checkpoints(tmp_path, world, 2, print)
    for step in range(1, 6):
        checkpoints.save(step, make_state(world), META)
        if step <= 2:
            checkpoints.mark_best(step)
    checkpoints.close()
    assert [int(p.name[5:13]) for p in list_checkpoints(tmp_path)] == [5, 4]
    assert read_checkpoint(tmp_path / "checkpoints" / "best.pt")["step"] == 2
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


def test_torch_load_alone_would_not_find_a_flipped_bit(tmp_path, world):
    """Why read_checkpoint does more than torch.load."""
    state = make_state(world)
    model = state.model
    save(tmp_path, world, state)
    path = list_checkpoints(tmp_path)[0]
    content = bytearray(path.read_bytes())
    at = content.index(model.embed.weight.detach().numpy().tobytes())
    content[at + 5] ^= 1
    path.write_bytes(content)
    loaded = torch.load(path, weights_only=True)["tensors"]["model"]["embed.weight"]
    assert not torch.equal(loaded, model.embed.weight)
    with pytest.raises(RunError):
        read_checkpoint(path)


def test_the_newest_whole_checkpoint_is_taken(tmp_path, world):
    save(tmp_path, world, make_state(world), steps=(1, 2, 3))
    newest = list_checkpoints(tmp_path)[0]
    newest.write_bytes(newest.read_bytes()[:1000])
    said = []
    assert load_checkpoint(tmp_path, said.append)["step"] == 2
    assert len(said) == 1 and newest.name in said[0]
    for path in list_checkpoints(tmp_path):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=f"{newest.name} .* another --out"):
        load_checkpoint(tmp_path, said.append)


def test_only_what_reads_takes_best_pt_beside_damaged_ones(tmp_path, world):
    save(tmp_path, world, make_state(world), steps=(1, 2))
    newest, first = list_checkpoints(tmp_path)
    best = first.replace(first.with_name("best.pt"))
    for path in (newest, newest.rename(f"{newest}.damaged")):
        path.write_bytes(b"PK")
        with pytest.raises(UserError, match=str(best)):  # in the advice
            load_checkpoint(tmp_path, print)
        found = load_checkpoint(tmp_path, print, or_best=True)
        assert (found["step"], found["path"]) == (1, str(best))
        newest.unlink(missing_ok=True)
    newest.write_bytes(b"PK")
    best.write_bytes(b"PK")
    with pytest.raises(UserError, match="restore one from a copy, or start"):
        load_checkpoint(tmp_path, print, or_best=True)


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)
    torch.save({"format": ddp_utils.FORMAT, "tensors": {}, "sums": {}, "x": Malicious()}, tmp_path / "bad.pt")
    with pytest.raises(RunError):
        read_checkpoint(tmp_path / "bad.pt")
    assert not (tmp_path / "owned").exists()


def test_files_of_other_programs_are_not_damaged(tmp_path, world):
    tensors = {"transformer.wte.weight": torch.ones(2, 2)}
    torch.save({"model": tensors, "model_args": {"n_layer": 2}, "config": {}}, tmp_path / "ckpt.pt")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    torch.save(tensors, tmp_path / "legacy.bin", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    for name in ("model.safetensors", "model.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    for path in tmp_path.iterdir():
        said = []
        program = "nanoGPT" if path.name == "ckpt.pt" else "another program"
        with pytest.raises(UserError, match=f"{path.name} is a file of {program}, .* hf:{tmp_path} if"):
            load_checkpoint(path, said.append)
        assert not said
    save(tmp_path, world, make_state(world))
    own = list_checkpoints(tmp_path)[0]
    assert read_checkpoint(own.rename(tmp_path / "own.bin"))["step"] == 1  # the control


def test_a_full_disk_is_reported_and_training_goes_on(tmp_path, world, monkeypatch):
    state, said = make_state(world), []
    (tmp_path / "checkpoints").mkdir()
    checkpoints = Checkpoints(tmp_path, world, 3, said.append)
    checkpoints.save(1, state, META)
    wait(ddp_utils.process.unwritten)
    real = torch.save

    def fail(content, file):
        file.write(b"half of it")
        raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 64 vs 0")
    monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=370e9))
    checkpoints.save(2, state, META)
    checkpoints.mark_best(2)
    wait(ddp_utils.process.unwritten)
    assert len(said) == 2 and said[0].startswith("saved step 1 (")
    assert "with 370.00 GB free on the disk" in said[1]  # not 3.7e+02
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))
    assert not (tmp_path / "checkpoints" / "best.pt").exists()
    monkeypatch.setattr(torch, "save", real)
    checkpoints.log = SimpleNamespace(evaluations={2: 1.0})
    checkpoints.save(3, state, META)
    assert checkpoints.log.evaluations == {2: math.inf}  # so that the next evaluation can be the best
    wait(ddp_utils.process.unwritten)
    assert [int(p.name[5:13]) for p in list_checkpoints(tmp_path)] == [3, 1]
    checkpoints.mark_best(3)
    wait(ddp_utils.process.unwritten)
    assert read_checkpoint(tmp_path / "checkpoints" / "best.pt")["step"] == 3
    monkeypatch.setattr(torch, "save", fail)
    checkpoints.save(4, state, META)
    with pytest.raises(RunError, match="step 4 could not be written"):  # the last one must not get lost
        checkpoints.close()


def test_the_best_after_a_damaged_checkpoint_is_that_which_was_taken(tmp_path, world):
    """A resumed run whose first evaluation is due marks what it has read, not the newest that there was."""
    state = make_state(world)
    save(tmp_path, world, state, (1, 2))
    list_checkpoints(tmp_path)[0].write_bytes(b"damaged")
    checkpoints = Checkpoints(tmp_path, world, 3, print)
    saved = checkpoints.load("auto")
    assert checkpoints.resume(saved, state) == (1, 7)
    checkpoints.mark_best(1)
    checkpoints.close()
    assert read_checkpoint(tmp_path / "checkpoints" / "best.pt")["step"] == 1


def test_marking_the_same_best_again_leaves_nothing_behind(tmp_path, world):
    """As after a kill between the mark and its line in the log: rename does nothing between two links of one
    file.
    """
    save(tmp_path, world, make_state(world), (1,))
    checkpoints = Checkpoints(tmp_path, world, 3, print)
    for _ in range(2):
        checkpoints._link(checkpoints.directory / "best.pt", list_checkpoints(tmp_path)[0])
        names = {path.name for path in checkpoints.directory.iterdir()}
        assert names == {"best.pt", list_checkpoints(tmp_path)[0].name}


def test_no_rank_waits_in_a_collective_for_the_last_write(world, monkeypatch):
    """Rank 0 may write for longer than --timeout."""
    order = []
    monkeypatch.setattr(startup.run, "all_gather", lambda value: order.append("all_gather") or [value])
    stop = SimpleNamespace(agreed=0, read=lambda: order.append("read"))
    checkpoints = SimpleNamespace(world=world, close=lambda: order.append("close"))
    run = SimpleNamespace(world=world, checkpoints=checkpoints, steps=1,
                          args=SimpleNamespace(strategy="ddp", seq_len=8))
    log = SimpleNamespace(out="", finish=lambda *_: None, say=lambda text: None)
    monkeypatch.setattr(startup.run, "what_next", lambda *_: "")
    startup.run.end_run(run, log, stop, 1, 1)
    assert sorted(order[:-1]) == ["all_gather", "read"] and order[-1] == "close"


def test_only_plain_data_gets_into_a_checkpoint(tmp_path, world):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(TypeError):
        Checkpoints(tmp_path, world, 3, print).save(1, make_state(world), META | {"path": tmp_path})


def test_seeds_of_steps_and_ranks_differ():
    drawn = set()
    for seed in range(3):
        for step in range(20):
            for rank in range(4):
                ddp_utils.seed_step(seed, step, rank)
                drawn.add(torch.rand(4).sum().item())
    assert len(drawn) == 3 * 20 * 4
    of_all_ranks = {torch.rand(4, generator=ddp_utils.generator(seed, step, number)).sum().item()
                    for seed in range(3) for step in range(20) for number in range(4)}
    assert len(of_all_ranks) == 3 * 20 * 4 and not of_all_ranks & drawn


def test_a_bit_sum_sees_every_single_bit():
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        t = torch.arange(6).to(dtype)
        before = ddp_utils.bit_sum(t)
        for bit in range(8):
            changed = t.clone()
            changed.view(torch.uint8)[9] ^= 1 << bit
            assert ddp_utils.bit_sum(changed) != before


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision(precision, dtype):
    assert compute_dtype(precision, torch.device("cpu")) == dtype


def test_world_describes_a_single_process(world):
    assert isinstance(world, World) and world.is_rank0 and world.world_size == 1
    assert world.prefix == "[Rank 0/1 | Node node0 | Device cpu]"


@pytest.mark.parametrize("model_class, example", ((HRM, {"bp_steps": 3}), (GPT2, {}), (MLM, {})))
@pytest.mark.parametrize("mode", ("none", "block", "selective"))
@pytest.mark.parametrize("queries", (32, 256))  # attention in blocks, and at once
def test_dry_run_counts_what_autograd_really_keeps(model_class, example, mode, queries, monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", queries)
    config = model_class.Config(vocab_size=500, padded_vocab=512, seq_len=64, n_layer=3, n_head=2, d_model=32)
    model = model_class(config)
    inputs = model.dummy_inputs(4, "cpu", **example)
    cpu = torch.device("cpu")
    counted = dry_run.kept_for_backward(model_class, config, cpu, torch.bfloat16, mode, inputs,
                                       compiled=False)
    use_device(model, cpu, torch.bfloat16, mode)
    kept = dry_run.activation_bytes(lambda: model(**inputs)[0], [*model.parameters(), *model.buffers()])
    assert counted == kept > 4 * 64 * 32 * 2


@pytest.mark.full
@pytest.mark.parametrize("command, code, sentence", [
    (["-c", "import os, torch, ddp_utils\n"
            "unlike = lambda *_: (torch.device('cpu'), ('gloo', 'nccl')[int(os.environ['RANK'])])\n"
            "ddp_utils.choose_device = unlike\nddp_utils.launch(lambda: ddp_utils.init(timeout=20))"], 2,
     "error: rank {rank} is one of 1 among 2 that use"),
    (["train_gpt2.py", "--data", "text:/nonexistent/*.txt", "--timeout", "20"], None, "error: ")])
def test_ranks_started_by_hand_do_not_wait_for_ever(command, code, sentence):
    """For a rank with another backend, or for the one that was to prepare the data."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [start([sys.executable, *command], cwd=ROOT, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2,
                     LOCAL_WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in (0, 1)]
    for rank, process in enumerate(started):
        done = finish(process, 60)
        assert done.code == code or code is None and done.code, done.out
        assert sentence.format(rank=rank) in done.out, done.out


@pytest.mark.parametrize("capability, too_old", [((6, 1), True), ((7, 0), True), ((7, 5), False),
                                                 ((8, 6), False), ((12, 1), False)])
def test_a_gpu_that_this_torch_has_no_kernels_for_is_refused(monkeypatch, capability, too_old):
    """A GTX 1080 with a CUDA 13 build, whose oldest kernels are for Turing."""
    cuda = {"device_count": 1, "get_arch_list": ["sm_75", "sm_80", "sm_90a", "sm_120", "compute_120"],
            "get_device_capability": capability, "get_device_name": "a card"}
    for name, found in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    if too_old:
        with pytest.raises(UserError, match="a card on .* is too old for this build of torch: install"):
            ddp_utils.choose_device("gloo", "auto", 1)
    else:
        assert ddp_utils.choose_device("gloo", "auto", 1)[0] == torch.device("cuda", 0)


def test_a_run_that_is_not_there_is_told_which_are(tmp_path, world):
    for name in ("a", "b", "empty"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        if name != "empty":
            (tmp_path / name / "checkpoints" / "step_00000001_loss5.0.pt").touch()
    for name, fault in (("c", "does not exist"), ("empty", "holds no checkpoint")):
        others = f"such as {tmp_path}/a, {tmp_path}/b"
        with pytest.raises(UserError, match=f"{tmp_path / name} {fault}: .* {others}; .*--init-from hf:"):
            load_checkpoint(tmp_path / name, print)


def test_a_model_that_does_not_fit_is_one_sentence(tmp_path, shards):
    """2**50 bytes, for which no machine has addresses."""
    command = [sys.executable, ROOT / "train_gpt2.py", "--data", shards, "--out", tmp_path, "--n-layer", 1]
    done = finish(start([*command, "--n-head", 10**6, "--d-model", 10**7]))
    assert done.code == 1 and "Traceback" not in done.out
    sentence = r"error: out of memory \(asked for \d+\.\d\d GiB more\): .* --dry-run says"
    assert re.search(sentence, done.out), done.out
    # what a GPU's allocator and NumPy say
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"),
                  RuntimeError("CUDA error: out of memory"), MemoryError()):
        code, text, reason = ddp_utils.ending_of(error)
        assert code == 1 and text == f"error: {reason}"
        asked = " (asked for 2.00 GiB more)" if "2.00" in str(error) else ""
        assert reason.startswith(f"out of memory{asked}: the same command with --dry-run")
    assert diagnosis.memory_asked_for(RuntimeError("cannot allocate 8 bytes more in a queue")) is None


def test_a_lost_peer_of_nccl_is_asked_after(monkeypatch):
    """As torch 2.15 says it: the error is no DistError there."""
    lost = SimpleNamespace(find_cause=lambda: "rank 1 stopped responding.")
    monkeypatch.setattr(ddp_utils.process, "heartbeat", lost)
    error = RuntimeError("NCCL operation timed out")
    assert ddp_utils.ending_of(error) == (1, "error: rank 1 stopped responding.", "")
    monkeypatch.setattr(ddp_utils.process, "heartbeat", None)
    assert ddp_utils.ending_of(error) == (1, "", "RuntimeError: NCCL operation timed out")


@pytest.mark.parametrize("flags, before, after", [
    ([], None, "0"), (["--fast"], None, None), ([], "1", "1"), (["--fast"], "0", "0")])
def test_strict_runs_do_not_add_up_in_nvswitches(world, monkeypatch, flags, before, after):
    """Their order can change from start to start. What the user has set stays."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", before or "")
    if before is None:
        monkeypatch.delenv("NCCL_NVLS_ENABLE")
    set_when_it_joined = []
    monkeypatch.setattr(torch.distributed, "init_process_group",
                        lambda *_, **__: set_when_it_joined.append(os.environ.get("NCCL_NVLS_ENABLE")))
    startup.run.start(startup.run.resolve_flags(train_gpt2.parse_args(["--device", "cpu", *flags])))
    assert set_when_it_joined == [after]


def test_the_watchdog_of_nccl_does_not_wait_a_minute(world):
    """It waits four times as long, 15 s each by default, before it gives up a collective that timed out."""
    assert int(os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) <= 2000


@pytest.fixture
def waits():
    """Returns a context in which calls are listed that would wait for a GPU. A CPU never waits."""
    @contextlib.contextmanager
    def counting():
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
    return counting


def train_a_step(state, stop, world, step: int) -> float:
    labels = ddp_utils.async_sum(8, world)
    objective, _ = state.wrapped(*ddp_worker.batch(step))
    (objective / labels().clamp(min=1)).backward()
    norm = state.clip_gradients(1.0, stop)
    state.optimizer_step(1e-3, norm)
    stop.vote()
    return norm


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adam-atan2"])
def test_a_step_waits_for_the_device_once(world, optimizer, waits):
    """For the norm of the gradient, in clip_gradients, which also reads the vote of the step before."""
    state, stop = make_state(world, optimizer=optimizer, ema=0.9), ddp_utils.StopVote(world)
    for step in range(3):
        with waits() as found:
            train_a_step(state, stop, world, step)
        assert found == ["__float__"] * (step > 0) + ["item"]
    with waits() as found:  # the control
        stop.vote()
        state.optimizer_step(1e-3, torch.ones(()))
    assert found[:2] == ["__float__", "__bool__"]  # the vote, and whether this norm is finite


def test_a_step_that_the_device_may_skip_waits_for_the_step_before(world, waits):
    """In clip_gradients: it reads the norm and the vote of that step, and nothing of its own."""
    state, stop = make_state(world, ema=0.9), ddp_utils.StopVote(world)
    with mock.patch("training.step.skips_on_device", return_value=True):
        train_a_step(state, stop, world, 0)
        for step in range(1, 4):
            with waits() as found:
                norm = train_a_step(state, stop, world, step)
            assert found == ["item", "__float__"]  # the norm and the vote of the step before
            assert state._norm is not None and isinstance(norm, DeviceNorm)
        with waits() as found:
            assert state.updated and state.updated and state._norm is None
        assert found == ["item"]


class Passes:
    """Passes all attributes on to the optimizer inside, as wrappers of SAM and Lookahead do."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class OfMyOwn(torch.optim.AdamW):
    """Its step does more."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.5)


def test_who_may_skip_an_update_on_the_device():
    """torch's own fused classes, and nothing that could do more in a step than their kernels."""
    params = [torch.nn.Parameter(torch.zeros(2))]
    on_gpu = {"params": [SimpleNamespace(is_cuda=True)], "fused": True}

    def may(optimizer, *groups) -> bool:
        hooks = {name: getattr(optimizer, name, {}) for name in (
            "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")}
        return skips_on_device(optimizer, SimpleNamespace(param_groups=groups or [on_gpu], **hooks))

    fused = [kind(params, fused=True) for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad)]
    assert all(map(may, fused))
    assert not may(Passes(fused[0])) and fused[0]._step_supports_amp_scaling  # it says that it can
    assert not may(OfMyOwn(params, fused=True))
    assert not may(torch.optim.SGD(params, momentum=0.9, fused=True))
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        hooked = torch.optim.AdamW(params, fused=True)
        handle = getattr(hooked, register)(lambda *_: None)
        assert not may(hooked)
        handle.remove()
        assert may(hooked)
    assert not may(fused[0], on_gpu, on_gpu | {"fused": None})
    assert not may(fused[0], *fused[0].param_groups)  # on a CPU, or offloaded to it


class Lookahead(torch.optim.Optimizer):
    """Keeps its optimizer where zero1 does."""

    def __init__(self, inner):
        self.optim = inner
        super().__init__(inner.param_groups, {})
        self.state = inner.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.optim.step()
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            torch._foreach_lerp_(params, self.slow, 0.5)


def test_what_a_wrapper_does_beside_a_step_is_skipped_too(world):
    """By the host, which asks the wrapper, and not the optimizer inside, whether it can skip."""
    model = ddp_worker.make()
    fused = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    state = TrainState(model, [Lookahead(fused)], run_of(world))
    fused_only = lambda optimizer, _: type(optimizer) is torch.optim.AdamW  # noqa: E731
    with mock.patch("training.step.skips_on_device", fused_only):
        for factor in (1.0, math.inf):
            before = [p.detach().clone() for p in model.parameters()]
            (state.wrapped(*ddp_worker.batch(0))[0] * factor).backward()
            norm = state.clip_gradients(1.0)
            assert type(norm) is float
            state.optimizer_step(0.1, norm)
            assert all(map(torch.equal, before, model.parameters())) == (factor > 1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad])
def test_fused_optimizers_skip_where_found_inf_is_1(kind):
    """Parameters and state keep their bits, in a first step as well. SGD keeps a momentum without values."""
    def trained(kind, gradients, **settings):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(300))
        optimizer = kind([p], lr=0.1, fused=True, **settings)
        for gradient in gradients:
            p.grad = torch.full_like(p, gradient)
            optimizer.found_inf = torch.tensor(float(not math.isfinite(gradient)))
            with mock.patch("torch.empty_like", torch.ones_like):  # what is in memory by chance
                optimizer.step()
        return [p.detach(), *optimizer.state[p].values()]

    inf = math.inf
    for with_inf, without in (([inf, 1.0, 2.0], [1.0, 2.0]), ([1.0, inf, -inf, 2.0], [1.0, 2.0])):
        assert all(map(torch.equal, trained(kind, with_inf), trained(kind, without)))
    assert not all(map(torch.equal, trained(kind, [1.0, 2.0]), trained(kind, [1.0, 1.0])))  # the control
    sgd = [trained(torch.optim.SGD, steps, momentum=0.9) for steps in ([inf, 1.0], [1.0])]
    assert not torch.equal(sgd[0][0], sgd[1][0])


def test_an_update_is_skipped_the_right_way_round(world):
    """On the device: for a norm that is 0 or not finite, and for no other."""
    state = make_state(world)
    for factor, moves in ((1.0, True), (0.0, False), (math.inf, False), (math.nan, False)):
        before = [p.detach().clone() for p in state.model.parameters()]
        for p in state.model.parameters():
            p.grad = torch.ones_like(p)
        state.optimizer_step(1e-2, torch.tensor(factor).as_subclass(DeviceNorm))
        assert all(map(torch.equal, before, state.model.parameters())) == (not moves)
        assert state.updated == math.isfinite(factor)


def test_a_norm_on_the_device_is_used_as_a_number():
    """By whoever copies a trainer: it compares, computes, formats and prints. float() makes it one for json
    and numpy.
    """
    norm = torch.tensor(0.75).as_subclass(DeviceNorm)
    assert f"{norm:.2f} {norm:>8.1e} {norm}" == f"{0.75:.2f} {0.75:>8.1e} {0.75}" == "0.75  7.5e-01 0.75"
    assert str(norm) == repr(norm) == "0.75" and f"{[norm]}" == "[0.75]"
    assert 0 < norm < 1 and norm == 0.75 and norm != 1 and not norm > 2 and norm and norm > norm - 1
    assert max(norm, 0.5) == 0.75 and min(0.5, norm) == 0.5 and sorted([1.0, norm])[0] == 0.75
    assert 2 * norm + 1 == 2.5 and norm / 3 == 0.25 and sum([norm, norm]) / 2 == 0.75
    assert math.isfinite(norm) and math.log(norm) < 0 and float(norm) == 0.75 and int(norm) == 0
    assert json.dumps(float(norm)) == "0.75" and np.mean([float(norm)]) == 0.75
    assert type(2 * norm) is torch.Tensor and norm.item() == 0.75  # as a logged number


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGXCPU])
def test_what_batch_systems_send_stops_a_run(world, number):
    handlers = {one: signal.getsignal(one) for one in ddp_utils.STOP_SIGNALS}
    try:
        stop = ddp_utils.StopVote(world)
        for _ in range(2):
            os.kill(os.getpid(), number)
            stop.vote()
        assert stop.vote() == number
        stop.read()
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


@pytest.mark.full
def test_a_limit_of_cpu_time_is_heard_whenever_it_comes(tmp_path, shards):
    """The kernel sends SIGXCPU each second from the limit on, here before the first step."""
    limit = ("import os, sys; from resource import RLIMIT_CPU, RLIM_INFINITY, setrlimit; "
             "setrlimit(RLIMIT_CPU, (8, RLIM_INFINITY)); "
             "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    flags = ["--data", shards, "--out", tmp_path / "run", "--steps", "100000", "--device", "cpu"]
    done = finish(start([sys.executable, "-c", limit, ROOT / "train_gpt2.py", *flags]))
    assert done.code == 0 and "stopped by SIGXCPU after step" in done.out, done.out
    assert list_checkpoints(tmp_path / "run")


@pytest.mark.parametrize("loss, warned", [("all", True), ("response", False)])
def test_a_small_text_is_warned_of_but_not_small_pairs(world, loss, warned):
    """Pairs, of which only a few tokens are learned, need many passes."""
    said, train = [], SimpleNamespace(rows=60, num_tokens=480)
    settings = {"size": "tiny", "precision": "float32", "checkpoint_activations": "none", "strategy": "ddp",
                "compile": None, "fast": None, "epochs": None, "seq_len": 8, "backend": "auto",
                "eval_batches": 0, "eval_batch": 16, "warmup": 30}
    dataset = SimpleNamespace(train=train, val={}, val_splits=set(), short={}, manifest={}, name="mine",
                              loss=loss)
    log = SimpleNamespace(settings=settings, val_tokens=0, entropy=3.0)
    run = SimpleNamespace(world=world, dataset=dataset, say=said.append, size_defaults={},
                          steps=300, global_batch=16, batch=8, grad_accum=2)
    say_plan(run, make_state(world), log, "run directory", Counter(["a GPU"]), True)
    plan, *after = said
    assert any("WARNING: the run reads this text 80 times" in text for text in after) == warned
    assert "WARNING" not in plan
    for label, value in {
            "world size": "1, nodes 1", "hardware": "1 x a GPU",
            "parameters": "7,680, 5,632 of them in 2 blocks",
            "model": "layers 1, heads 2, width 16, context 16, parameters 7.68k",
            "batch": "8 x accumulation 2 x processes 1 = 16 sequences", "steps": "300, 3.8 an epoch",
            "tokens": "128 a step, 38,400 in all"}.items():
        assert f"\n  {label:12}{value}\n" in plan + "\n"
    titles = [line for line in plan.splitlines() if not line.startswith(" ")]
    assert titles == ["run directory", "machine", "model and data", "steps and batches"]
    assert plan.partition("model and data\n")[2].startswith("  model  ")
    sharded = make_state(world, strategy="zero2")
    sharded.model.__class__ = type("FSDPHRM", (HRM,), {})
    said.clear()
    dataset.name = "+".join(["a-directory-with-a-long-name", "d" * 70])
    say_plan(run, sharded, log, "run directory", Counter(["NVIDIA H200, 150 GB", "g" * 40, "h" * 40]), True)
    assert "  size        HRM tiny" in said[0]
    assert f"  hardware    1 x NVIDIA H200, 150 GB\n{'':14}1 x {'g' * 40}\n{'':14}1 x {'h' * 40}\n" in said[0]
    long = [line for line in said[0].splitlines() if len(line) > 80]
    assert long == [14 * " " + dataset.name]  # whole, on a line of its own


@pytest.mark.parametrize("trainer, args, pairs, vocab_size, stopped, use", [
    ("train_gpt2.py", {}, -1, None, False, "--prompt The"),
    ("train_gpt2.py", {}, 256, None, False, "--chat"),
    ("train_mlm.py", {"fill": None}, -1, None, False, "--fill 'The [MASK] sat.'"),
    ("mine/train_own.py", {}, -1, 64, False, "--eval-only"),
    ("train_gpt2.py", {}, -1, None, True, "--prompt The")])
def test_the_end_of_a_run_names_what_comes_next(tmp_path, monkeypatch, trainer, args, pairs, vocab_size,
                                                stopped, use):
    """Commands for this model that can be pasted into this directory."""
    monkeypatch.chdir(tmp_path)
    run = SimpleNamespace(
        out=Path("my runs/one"), trainer=tmp_path / trainer, command="torchrun train_gpt2.py",
        dataset=SimpleNamespace(marker_ids={"response": pairs}, vocab_size=vocab_size),
        args=argparse.Namespace(**args))
    again = ["  torchrun train_gpt2.py"] if stopped else []
    assert what_next(run, stopped).splitlines() == [
        "next:", f"  python {trainer} --out 'my runs/one' {use}", *again]


def test_an_evaluation_of_another_branch_is_not_one_without_a_file(tmp_path, world):
    """After going back to step 1, the new step 2 is the best, though the log has one without a file."""
    state = make_state(world)
    save(tmp_path, world, state, (1,))
    old = [{"step": step, "val_loss": 0.5} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    checkpoints = Checkpoints(tmp_path, world, 9, print)
    checkpoints.resume(checkpoints.load("auto"), state)
    assert checkpoints.files.keys() == {1}  # so the log does not compare with 0.5
    for step in (2, 3):
        checkpoints.save(step, state, META | {"samples": step})
        if step == 2:
            checkpoints.mark_best(step)
    checkpoints.close()
    assert read_checkpoint(tmp_path / "checkpoints" / "best.pt")["step"] == 2


@pytest.mark.parametrize("logged", [(1, 2), (2,)])
def test_a_best_that_was_not_linked_is_linked_on_a_resume(tmp_path, world, logged):
    """As after a kill between the rename of a checkpoint and its mark, whose loss is in the log. A best.pt of
    which the log has lost the loss is kept: it may be the only file of that step.
    """
    state = make_state(world)
    save(tmp_path, world, state, (1, 2))
    first, second = sorted(list_checkpoints(tmp_path))
    os.link(first, tmp_path / "checkpoints" / "best.pt")
    log = [{"step": 1, "val_loss": 0.5}, {"step": 2, "val_loss": 0.4}]
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps(record) + "\n" for record in log if record["step"] in logged))
    checkpoints = Checkpoints(tmp_path, world, 9, print)
    checkpoints.resume(checkpoints.load("auto"), state)
    checkpoints.close()
    assert os.path.samefile(tmp_path / "checkpoints" / "best.pt", second if 1 in logged else first)


def test_a_resume_links_the_best_whose_file_exists(tmp_path, world):
    """The save of step 3 failed, and that of step 2 was not linked."""
    state = make_state(world)
    save(tmp_path, world, state, (1, 2, 4))
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "val_loss": loss}) + "\n" for step, loss in ((1, 4.0), (2, 3.0), (3, 2.0))))
    checkpoints = Checkpoints(tmp_path, world, 9, print)
    assert checkpoints.resume(checkpoints.load("auto"), state)[0] == 4
    checkpoints.close()
    assert read_checkpoint(tmp_path / "checkpoints" / "best.pt")["step"] == 2
    assert checkpoints.files.keys() == {1, 2, 4}


def identity(**config) -> dict:
    return {"family": "GPT2", "tokenizer": "bytes", "seq_len": 8, "data": "d", "seed": 0, "loss_on": "all",
            "model_config": asdict(GPT2Config(**config)), "path": "old.pt", "torch": str(torch.__version__),
            "settings": {"lr": 1.0, "size": "tiny", "optimizer": "adamw", "init_from": None, "ema": 0.0,
                         "trainer": "train_gpt2.py"}}


def test_a_field_that_a_checkpoint_lacks_counts_as_its_default():
    """So a flag that was added to a model since changes nothing, unless it is given."""
    saved = identity()["model_config"]
    for field in ("modern", "attention"):
        del saved[field]
    assert ddp_utils.config_of(GPT2Config, saved, "old.pt") == GPT2Config()


def test_a_field_that_the_code_does_not_know_is_refused_by_name():
    with pytest.raises(UserError, match="^old.pt sets sparse, which GPT2Config does not know: use the code "):
        ddp_utils.config_of(GPT2Config, identity()["model_config"] | {"sparse": True}, "old.pt")
    with pytest.raises(UserError, match="holds a model of the family MLM, not GPT2: use its own trainer"):
        ddp_utils.assert_family(identity() | {"family": "MLM"}, GPT2)


def test_the_commit_that_knows_a_field_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"commits": ["abc", "def-dirty"]}')
    with pytest.raises(UserError, match=r"use the code that trained it \(commit def-dirty\), or"):
        ddp_utils.config_of(GPT2Config, {"sparse": True}, tmp_path / "checkpoints" / "step_00000004_loss1.pt")


def test_changed_flags_are_named_on_resume():
    said = []
    saved = identity()
    saved["settings"] |= {"lr": 2.0}
    compare_with_saved(saved, identity(), False, said.append)
    assert said == ["resuming with lr 1.0 (was 2.0)"]
    compare_with_saved(identity() | {"torch": "2.9.1"}, identity(), False, said.append)
    assert said.pop() == f"resuming with torch {torch.__version__} (was 2.9.1)"
    compare_with_saved(identity(), identity(), False, said.append)
    assert len(said) == 1

"""cluster/diagnosis.py: what an unforeseen error means, and processes that would train alone."""

import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from runs import Trainer, edited, ended

import ddp_utils
import test_ddp
from cli.errors import UserError
from cluster.diagnosis import STARTERS, diagnose, memory_asked_for, refuse_lone_tasks

GPT2 = Trainer("train_gpt2.py", steps=1)
GLOO = RuntimeError("[../gloo/pair.cc:1] Connection closed by peer\nmore")


@pytest.mark.parametrize("error, asked", [
    (RuntimeError("[enforce fail] DefaultCPUAllocator: you tried to allocate 3221225472 bytes"), "3.00 GiB"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0"), "20.50 MiB"),
    (RuntimeError("CUDA error: Out of Memory"), ""), (MemoryError(), ""), (GLOO, None)])
def test_memory_that_was_asked_for(error, asked):
    assert memory_asked_for(error) == (f" (asked for {asked} more)" if asked else asked)


@pytest.mark.parametrize("error, cause, code, named, traceback", [
    (MemoryError(), "lost", 1, "--dry-run", False),
    (RuntimeError("Failed to find C compiler. Please"), None, 2, "--no-compile", False),
    (RuntimeError("x.c:1: fatal error: Python.h: No such file"), "lost", 2, "python3-dev", False),
    (RuntimeError("Command '['/usr/bin/gcc', 'a.c']' returned"), None, 2, "g++", False),
    (GLOO, "rank 1 is lost", 1, "rank 1 is lost", False), (GLOO, "", 1, "RuntimeError: [../gloo", True),
    (RuntimeError("NCCL error"), "lost", 1, "lost", False), (dist.DistError("a"), "lost", 1, "lost", False),
    (RuntimeError("inconsistent tensor size"), "lost", None, "", False),
    (ValueError("gloo"), "lost", None, "", False), (GLOO, None, None, "", False)])
def test_what_an_error_means(error, cause, code, named, traceback):
    """Without a heartbeat (None) no other process can be the cause. One that is lost has said why itself."""
    shown = []
    heartbeat = None if cause is None else SimpleNamespace(find_cause=lambda: cause, places="")
    found = diagnose(error, heartbeat, shown.append)
    assert shown == [error] * traceback
    if code is None:
        assert found is None
    else:
        assert found[0] == code and found[1].startswith("error: ") and named in found[1]
        assert (found[2] == "") is (named == cause) and found[2] in found[1] and "\n" not in found[1]


def test_ranks_that_take_different_branches_are_named_with_their_lines(tmp_path, shards):
    trainer = edited(tmp_path / "train_own.py", ("instead of", "checkpoints.save(", "if world.is_rank0:\n"
                     "    checkpoints.save(step, state, meta | metrics.state_dict())"), **GPT2.defaults)
    done = ended(trainer.fork(2, shards, tmp_path / "run", steps=9, save_every=1, timeout=3), code=1)
    lines = dict(re.findall(rf"rank (\d) on node0 \S+ at line (\d+) of {trainer.script}", done.out))
    text = (tmp_path / "train_own.py").read_text().splitlines()
    assert lines.keys() == {"0", "1"} and lines["0"] != lines["1"], done.out
    assert "checkpoints.save(" in text[int(lines["0"]) - 1]


@pytest.mark.parametrize("env, named", [
    *(({name: "12"}, f"^{starter} .* 12 .*nproc_per_node=12") for name, starter in STARTERS.items()),
    ({"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "0", "FLUX_JOB_SIZE": "1", "MV2_COMM_WORLD_SIZE": "x"}, None),
    ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, None),  # as in a batch script
    ({"SLURM_STEP_NUM_TASKS": "2", "RANK": "0"}, None)])
def test_tasks_that_would_train_alone_are_refused(env, named, monkeypatch):
    monkeypatch.setattr(os, "environ", env)
    if not named:
        return refuse_lone_tasks()
    with pytest.raises(UserError, match=named):
        refuse_lone_tasks()


def test_each_command_that_joins_others_refuses_lone_tasks(tmp_path, shards, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    done = GPT2.train(0, shards, tmp_path / "run")
    assert done.code == 2 and "srun" in done.out and not (tmp_path / "run").exists(), done.out
    monkeypatch.setattr(sys, "argv", ["test_ddp.py", "--device", "cpu"])
    with pytest.raises(UserError, match="srun"):
        test_ddp.main()
    assert GPT2.here("--dry-run", "1x8", "--data", shards).code == 0
    assert "srun" not in GPT2.here("--out", tmp_path, "--prompt", "a").out


def test_an_outdated_driver_is_one_sentence(monkeypatch):
    def old(*arguments):
        raise RuntimeError("The NVIDIA driver is too old (found 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", old)
    with pytest.raises(UserError) as found:
        ddp_utils.choose_device("auto", "auto", 1)
    words = "found 11040", "580", "wsl --update", "cu126", "docs/clusters.md", "--device cpu"
    assert all(word in str(found.value) for word in words) and "\n" not in str(found.value)
    assert ddp_utils.choose_device("auto", "cpu", 1)[0].type == "cpu"

"""Starting on several machines: what has to be the same on all, and how they leave."""

import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, children, finish
from conftest import start as start_command
from processes import Group
from runs import Trainer, assert_same_run
from waiting import wait_for

import ddp_utils
import startup.run
from cluster.heartbeat import Heartbeat
from ddp_utils import list_checkpoints
from prepare.pipeline import prepare

GPT2 = Trainer("train_gpt2.py", timeout=2, max_new_tokens=5, global_batch=16, batch=None, steps=2)


def start(*nodes, fault=None) -> list[Group]:
    """One process for each node, in a folder and with flags of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        env = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1],
               "GROUP_WORLD_SIZE": 2}
    return [Group(GPT2.script, *flags, cwd=home, RANK=rank, GROUP_RANK=rank, fault=None if rank else fault,
                  **env) for rank, (home, *flags) in enumerate(nodes)]


@pytest.mark.full
def test_exchanged_nodes_write_nothing(shards, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()

    def train(*homes, steps) -> list:
        flags = GPT2.flags(shards, "run", steps=steps, timeout=60)
        return [group.finish() for group in start(*((home, *flags) for home in homes))]

    assert not any(done.code for done in train(a, b, steps=4))
    assert all(done.code == 2 and "node1 (" in done.out for done in train(b, a, steps=8))
    assert not (b / "run").exists()
    shutil.copytree(a / "run", b / "run")  # as the sentence says
    assert not any(done.code for done in train(b, a, steps=8))


@pytest.mark.parametrize("flag, value", [("--out", "other"), ("--global-batch", "4"), ("the data", None)])
def test_what_differs_between_nodes_is_named(shards, tmp_path, flag, value):
    (tmp_path / "text.txt").write_text("another text\n" * 1000)
    other = prepare(f"text:{tmp_path}/text.txt", tmp_path / "other", "bytes", workers=1)
    first, second = (tmp_path / name for name in "01")
    shutil.copytree(shards, first / "shards")
    shutil.copytree(shards if value else other, second / "shards")
    flags = GPT2.flags("shards", "run", timeout=20)
    for group in start((first, *flags), (second, *flags, *([flag, value] if value else []))):
        done = group.finish(60)
        assert done.code and f"error: {flag} on rank 1 differs" in done.out, done.out


def on_a_gpu():
    """The first node has a GPU, which is never reached."""
    init = startup.run.init
    startup.run.init = lambda *args, **flags: replace(init(*args, **flags), device=torch.device("cuda"))


def test_nodes_with_and_without_gpus_are_refused(shards, tmp_path):
    """By all, also with --backend gloo: GPUs compare parameters at other steps."""
    flags = GPT2.flags(shards, tmp_path / "run", timeout=20, backend="gloo", checkpoint_activations="none")
    for group in start((tmp_path, *flags), (tmp_path, *flags), fault=on_a_gpu):
        done = group.finish(60)
        assert done.code == 2 and "error: --device on rank 1 differs" in done.out, done.out


def slow_save():
    """The last checkpoint takes some seconds longer than the rest of the run."""
    write = ddp_utils.Checkpoints._write

    def slow(self, path, content, begun):
        time.sleep(4 * (content["step"] == 2))
        write(self, path, content, begun)
    ddp_utils.Checkpoints._write = slow


@pytest.mark.full
def test_other_nodes_wait_for_the_last_checkpoint(tmp_path, shards):
    """Longer than --timeout, too; so no torchrun waits at its exit barrier."""
    groups = start(*[(tmp_path, *GPT2.flags(shards, tmp_path / "run"))] * 2, fault=slow_save)
    wait_for(lambda: "sample after step 2" in groups[0].text)
    time.sleep(2)
    assert "saved step 2" not in groups[0].text and groups[1].all_alive, groups[0].text
    for group in groups:
        done = group.finish(60)
        assert done.code == 0 and "training complete: 2 steps" in done.out, done.out


def slow_save_beside_a_lost_rank():
    """It takes longer than noticing that a rank is silent."""
    Heartbeat.LOST, Heartbeat.PATIENCE = 2, 1
    write = ddp_utils.Checkpoints._write

    def slow(self, path, content, begun):
        print("a slow save begins")
        time.sleep(15)
        write(self, path, content, begun)
    ddp_utils.Checkpoints._write = slow


@pytest.mark.full
def test_a_lost_rank_interrupts_no_checkpoint(tmp_path, shards):
    """The main thread waits in a collective, so the heartbeat ends the process, after the file is whole."""
    flags = GPT2.flags(shards, tmp_path / "run", steps=1000, save_every=4, timeout=100)
    first, second = start((tmp_path, *flags), (tmp_path, *flags), fault=slow_save_beside_a_lost_rank)
    wait_for(lambda: "a slow save begins" in first.text)
    second.send(signal.SIGSTOP)
    done = first.finish(90)
    second.kill()
    assert done.code == 1 and "rank 1 on node1" in done.out and "stopped responding" in done.out, done.out
    assert "saved step 4" in done.out and list_checkpoints(tmp_path / "run"), done.out


@pytest.mark.full
@pytest.mark.parametrize("node", [0, 1])
def test_torchrun_restarts_on_several_nodes(shards, tmp_path, node):
    """A worker is killed on one of two nodes. torch counts the restart only there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    changes = {"save_every": 2, "steps": 100, "eval_every": 100, "timeout": 60}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
               "--max-restarts=3", "--rdzv-backend=c10d",
               f"--rdzv-endpoint={where}", "--rdzv-id=a", ROOT / GPT2.script,
               *GPT2.flags(shards, tmp_path / "run", **changes)]
    agents = [start_command(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") for _ in range(2)]
    wait_for(lambda: list_checkpoints(tmp_path / "run"))
    victim, = (pid for pid in children(agents[node].pid)
               if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    for agent in agents:
        done = finish(agent, 120)
        assert done.code == 0, done.out
    assert (tmp_path / "run" / "train.log").read_text().count("resuming after step") == 1
    assert GPT2.fork(2, shards, tmp_path / "whole", **changes).code == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")

"""What fails while several machines train: a rank, a node, a link. Nobody waits for ever, all say who it was,
and the same command goes on. The nodes need root and iproute2 (see helpers/lab.py).
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from lab import MASTER, PORT, Lab, Unavailable, ip
from runs import Trainer, assert_same_run, log_of, steps_of, tensors_of
from waiting import wait_for

from cluster.heartbeat import Heartbeat
from ddp_utils import list_checkpoints, step_of

TIMEOUT = 15  # of the trainers' collectives, in seconds
SPARE = Heartbeat.PATIENCE + 5 * Heartbeat.BEAT + 10  # to find out who it was, on a busy machine
GPT2 = Trainer("train_gpt2.py", timeout=TIMEOUT, max_new_tokens=5, global_batch=15, steps=60)
LATE = {"comm": "late", "optimizer": "muon"}
RANGE = {"d_model": 64, "seq_len": 64, "global_batch": 96, "steps": 2000, "save_every": 20,
         "eval_every": 10_000, "keep_last": 1000, "timeout": 60,
         "schedule": "constant"}
NO_NODE0 = "node0 can no longer be reached at 192.168.50.20:"


def sentence(text: str) -> str:
    """The one line that begins with `error: `."""
    found, = re.findall("^error: .*", text, re.M)
    return found


@pytest.fixture
def lab():
    try:
        with Lab(5) as lab:
            yield lab
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("flags, how", [
    pytest.param({"timeout": 600}, "power 3", marks=pytest.mark.full),  # nothing resets a connection
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ({}, "kill 3"), ({}, "cable 0"), (LATE, "cable 3"), (LATE, "kill 0")))])
def test_a_lost_node_is_named_and_the_same_command_goes_on(lab, shards, tmp_path, flags, how):
    """All that live end in time. However the node is lost, the run ends as if nothing had happened. The run
    directory is on node 0 only, as with real PCs, and has curves of every node.
    """
    what, lost = how.split()[0], int(how[-1])
    command = GPT2.script, *GPT2.flags(shards, "run", **flags)
    out, processes = lab.home(0) / "run", lab.by_hand(5, *command)
    wait_for(lambda: any(path.name >= "step_00000012" for path in list_checkpoints(out)), 90,
             lambda: all(process.poll() is None for process in processes), processes[0].text.read_text)
    if what != "kill":
        lab.plug(lost, False)
    if what != "cable":
        lab.kill(lost)
    begun = time.monotonic()
    done = [lab.wait(process, Heartbeat.LOST + SPARE) for process in processes]
    assert time.monotonic() - begun < Heartbeat.LOST + SPARE
    said = [f"rank {lost} on node{lost} .* stopped" if lost else NO_NODE0] * 5
    # without its cable node 0 hears of none, and names those whose silence it notices first
    said[lost] = NO_NODE0 if lost else r"rank [1-4] on node[1-4] .* stopped"
    for node, (code, text) in enumerate(done):
        if node == lost and what != "cable":
            assert code == -signal.SIGKILL and "error: " not in text, text
        else:
            assert code == 1 and re.search(said[node], sentence(text)), text
            assert len(text.splitlines()) < 100
    assert 12 <= log_of(out)[-1]["step"] < 60, "the run was over before the node was lost"
    lab.plug(lost, True)
    done = [lab.wait(process, 90) for process in lab.by_hand(5, *command)]
    assert all(code == 0 for code, _ in done) and "resuming after step" in done[0][1], done
    assert not any((lab.home(node) / "run").exists() for node in range(1, 5))
    tags = {tag for line in (out / "metrics.jsonl").read_text().splitlines() for tag in json.loads(line)}
    hosts = {tag.split("/")[2].partition("-")[0] for tag in tags if tag.startswith("System/CPU_percent/")}
    assert hosts == {f"node{node}" for node in range(5)}
    whole = GPT2.fork(5, shards, tmp_path / "whole", **flags)
    assert whole.code == 0, whole.out
    assert_same_run(tmp_path / "whole", out)


class Nodes:
    """Three nodes with launchers for two to three. The first `count` of them begin to train."""

    def __init__(self, lab, shards, count):
        self.lab, self.out, self.started = lab, lab.home(0) / "run", {}
        for node in range(3):
            shutil.copytree(shards, lab.home(node) / "shards")
        for node in range(count):
            self.up(node)
        wait_for(lambda: self.last_step() > 30, 120, text=self.texts)

    def up(self, node, **env):
        self.lab.plug(node, True)
        self.started[node] = self.lab.start(
            node, [ROOT / "cluster" / "ddp_launch.sh", ROOT / GPT2.script,
                   *GPT2.flags("shards", "run", **RANGE)],
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", MASTER_ADDR=MASTER, MASTER_PORT=PORT,
            NNODES="2:3", NODE_RANK=node, GPUS_PER_NODE=1, MEET_SECONDS=4, ADMIT_SECONDS=4, **env)

    def off(self, *nodes):
        for node in nodes:
            self.lab.plug(node, False)
            self.lab.kill(node)

    def texts(self) -> str:
        return "\n".join(process.text.read_text() for process in self.started.values())

    def read(self, name: str, pattern: str) -> list:
        path = self.out / name
        return re.findall(pattern, path.read_text(), re.S) if path.exists() else []

    def last_step(self) -> int:
        return int([0, *self.read("metrics.jsonl", r'"step": (\d+), "loss"')][-1])

    def resumed(self) -> list[tuple[int, int]]:
        """The step and the number of nodes of each start but the first."""
        starts = self.read("train.log", r"resuming after step (\d+).*?, nodes (\d+)")
        return [(int(step), int(nodes)) for step, nodes in starts]

    def event(self, nodes: int, happens, *args, lost: int = 20) -> int:
        """Returns the step from which `nodes` nodes went on after an event. At most `lost` steps are lost."""
        count, before = len(self.resumed()), self.last_step()
        happens(*args)
        wait_for(lambda: len(self.resumed()) > count and self.last_step() > self.resumed()[-1][0] + 10, 200,
                 text=self.texts)
        step, found = self.resumed()[-1]
        assert found == nodes and before - lost <= step, (before, self.resumed(), self.texts())
        wait_for(lambda: self.last_step() > step + 30, 60, text=self.texts)
        return step

    def end(self) -> None:
        """Ctrl-C on node 0 ends all nodes. Each step was done once."""
        self.started[0].send_signal(signal.SIGINT)
        assert [self.lab.wait(process, 60)[0] for process in self.started.values()] == [1] * len(self.started)
        steps = [record["step"] for record in steps_of(self.out)]
        assert steps == [*range(1, self.last_step() + 1)]


@pytest.mark.full
def test_nodes_die_and_the_others_go_on(lab, shards, tmp_path):
    """From a save on, two nodes started by hand compute the same tensors as the two that were left; from the
    save before, with three nodes, they don't.
    """
    nodes = Nodes(lab, shards, 3)
    worker, = (pid for pid in map(int, ip("netns", "pids", lab.nodes[1]).split())
               if b"\0-u\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    nodes.event(3, os.kill, worker, signal.SIGKILL)
    begun = nodes.event(2, nodes.off, 2)
    del nodes.started[2]
    nodes.end()
    saved = {step_of(path): path for path in list_checkpoints(nodes.out)}

    def by_hand(first: int) -> dict:
        """The state at the first save with two nodes."""
        shutil.rmtree(nodes.out)
        (nodes.out / "checkpoints").mkdir(parents=True)
        shutil.copy(kept / saved[first].name, saved[first])
        flags = GPT2.flags("shards", "run", **RANGE | {"steps": begun + 20})
        for code, text in [lab.wait(each, 90) for each in lab.by_hand(2, GPT2.script, *flags)]:
            assert code == 0, text
        return tensors_of(nodes.out)

    kept = tmp_path / "kept"
    shutil.copytree(nodes.out / "checkpoints", kept)
    wanted = torch.load(kept / saved[begun + 20].name, weights_only=True)["tensors"]["model"]
    states = [by_hand(first) for first in (begun, begun - 20)]
    same = [all(torch.equal(state[f"model/{name}"], tensor) for name, tensor in wanted.items())
            for state in states]
    assert same == [True, False]


@pytest.mark.full
def test_a_node_comes_and_is_stopped(lab, shards, tmp_path):
    """No step is lost. A node that has made a mistake ends with 2 and the others go on."""
    nodes = Nodes(lab, shards, 2)
    nodes.event(3, nodes.up, 2, lost=0)
    nodes.event(2, nodes.started[2].terminate, lost=0)
    fake = tmp_path / "sitecustomize.py"
    fake.write_text("import sys\nif '-u' in sys.orig_argv:\n    import torch; torch.__version__ = '2.0'\n")
    nodes.event(2, lambda: nodes.up(2, PYTHONPATH=f"{tmp_path}:{ROOT}"), lost=0)
    assert lab.wait(nodes.started[2], 5)[0] == 2
    (lab.home(2) / "shards").rename(tmp_path / "away")
    nodes.event(2, nodes.up, 2, lost=0)
    code, text = lab.wait(nodes.started.pop(2), 5)
    assert code == 2 and "unknown data set" in text, text
    nodes.end()


@pytest.mark.full
def test_a_node_that_all_others_need_comes_back(lab, shards):
    """Such as node 0, or one of the least number. The others wait, and a third may join later."""
    nodes = Nodes(lab, shards, 2)
    nodes.off(1)
    wait_for(lambda: "waiting for 1 more" in nodes.started[0].text.read_text().rpartition("error: ")[2], 60)
    nodes.event(2, nodes.up, 1)
    nodes.off(0)
    wait_for(lambda: "does not answer" in nodes.started[1].text.read_text(), 90)
    nodes.event(2, nodes.up, 0)
    nodes.event(3, nodes.up, 2, lost=0)
    nodes.end()


@pytest.mark.full
def test_bare_torchrun_where_the_own_name_is_127_0_1_1(lab, shards):
    """As on Debian and Ubuntu. MASTER_ADDR is node 0's name, which node 0 itself takes for 127.0.1.1."""
    processes = []
    for node in range(2):
        hosts = lab.directory / f"hosts{node}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 pc{node}\n192.168.50.{21 - node} pc{1 - node}\n")
        script = f'hostname pc{node}; mount --bind {hosts} /etc/hosts; unset GLOO_SOCKET_IFNAME; exec "$@"'
        processes.append(lab.start(node, [
            "unshare", "-um", "bash", "-c", script, "bash", sys.executable, "-m", "torch.distributed.run",
            "--nnodes=2", f"--node-rank={node}", "--master-addr=pc0", f"--master-port={PORT}",
            ROOT / GPT2.script, *GPT2.flags(shards, "run", global_batch=16, steps=2)]))
    for code, text in [lab.wait(process, 200) for process in processes]:
        assert code == 0 and "training complete: 2 steps" in text, text

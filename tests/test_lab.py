"""What fails while several machines train: a rank, a node, a link, a start. Nobody waits for ever, everybody
says who it was, and the same command goes on. Needs root and iproute2 for the nodes (see lab.py)."""

import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, children, run, start
from lab import MASTER, PORT, Lab, Unavailable, ip
from processes import Group, fork
from runs import Trainer, assert_same_run, log_of, steps_of, tensors_of
from test_monitor import curves

import data
from cluster.heartbeat import Heartbeat
from ddp_utils import list_checkpoints
from prepare.pipeline import prepare

TIMEOUT = 15  # of the trainers' collectives, in seconds
SPARE = Heartbeat.PATIENCE + 5 * Heartbeat.BEAT + 10  # to find out who it was, on a busy machine
GPT2 = Trainer("train_gpt2.py", timeout=TIMEOUT, max_new_tokens=5, global_batch=15, steps=60)
LATE = {"comm": "late", "optimizer": "muon"}
NO_NODE0 = "node0 can no longer be reached at 192.168.50.20:"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def sentence(text: str) -> str:
    """The one line that begins with `error: `."""
    found = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(found) == 1, text
    return found[0]


@pytest.fixture
def lab():
    try:
        with Lab(5) as lab:
            yield lab
    except Unavailable as reason:
        pytest.skip(str(reason))


# --------------------------------------------------------------------------------- two ranks on this machine


def pair(what: str, victim: int, timeout: float) -> list:
    """Two processes of lab.py, without torchrun, which would end the second when the first has failed."""
    port = free_port()
    return [Group("tests/helpers/lab.py", what, victim, timeout, RANK=rank, WORLD_SIZE=2, GROUP_RANK=rank,
                  MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)]


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.full),
                                    pytest.param(0, marks=pytest.mark.long)])
def test_the_rank_that_failed_is_named(victim):
    """It raises, is killed, or stops: the other ends in time and names it. Rank 0 takes the store along."""
    timeout = 4
    pairs = {what: pair(what, victim, timeout) for what in ("raise", "SIGKILL", "SIGSTOP", "run_and_wait")}
    begun = time.monotonic()
    for what, processes in pairs.items():
        other = processes[1 - victim].finish(30 + timeout + SPARE)
        assert other.code == 1, other.out
        name = f"rank {victim} on node{victim}"
        if what == "raise":
            assert f"{name} (" in sentence(other.out), other.out
            assert "failed first: RuntimeError: inconsistent tensor size" in sentence(other.out)
        elif victim == 0:
            assert "node0 can no longer be reached at 127.0.0.1:" in sentence(other.out), other.out
        else:
            said = sentence(other.out)
            assert f"{name} (" in said and "stopped responding" in said, other.out
        assert len(other.out.splitlines()) < 60
        processes[victim].send(signal.SIGCONT if what == "raise" else signal.SIGKILL)
        own = processes[victim].finish()
        assert own.code == (1 if what == "raise" else -signal.SIGKILL), own.out
        said = re.sub(r"^\[W.*\n", "", own.out)  # gloo, where this machine's name does not resolve
        assert said.startswith("now it happens") and ("Traceback" in said) == (what == "raise"), own.out
    assert time.monotonic() - begun < 30 + timeout + SPARE


def test_a_start_that_fails_says_why():
    """Nobody at MASTER_ADDR, its port in use, ranks that do not come: a sentence within the timeout."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        cases = {(1, free_port()): "rank 1 found no rank 0 at 127.0.0.1:",
                 (0, port): f"the port of 127.0.0.1:{port} is in use here",
                 (0, free_port()): "rank 1, rank 2 of 3 did not come to 127.0.0.1:"}
        processes = [Group("tests/helpers/lab.py", "none", 0, 2, RANK=rank, WORLD_SIZE=3,
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank, port in cases]
        for process, expected in zip(processes, cases.values()):
            done = process.finish()
            assert done.code == 1 and sentence(done.out).startswith(f"error: {expected}"), done.out
            assert "Traceback" not in done.out


# --------------------------------------------------------------------------------------------- nodes in a lab


def train(lab, ranks, shards, **changes) -> list:
    """Starts the trainer on these nodes; the run directory is on node 0 only, as with real PCs."""
    return lab.torchrun(ranks, "train_gpt2.py", *GPT2.flags(shards, "run", **changes))


train_late = functools.partial(train, **LATE)
LAUNCHER = ROOT / "cluster" / "ddp_launch.sh"


def launch(lab, node: int, shards, nodes: int = 3, steps: int = 60, **env):
    """Starts the trainer on one node as the README says for five PCs."""
    env = {"MASTER_ADDR": MASTER, "MASTER_PORT": PORT, "NNODES": nodes, "NODE_RANK": node, "GPUS_PER_NODE": 1,
           "PREFLIGHT_TIMEOUT": 10, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | env
    flags = GPT2.flags(shards, "run", steps=steps)
    return lab.start(node, ["bash", LAUNCHER, ROOT / "train_gpt2.py", *flags], **env)


def launch_all(lab, ranks, shards, steps: int = 60) -> list:
    return [launch(lab, node, shards, len(ranks), steps) for node in range(len(ranks))]


def wait_for_step(lab, step: int, processes) -> None:
    deadline = time.monotonic() + 90
    while not any(int(path.name[5:13]) >= step for path in list_checkpoints(lab.home(0) / "run")):
        assert all(process.poll() is None for process in processes), lab.wait(processes[0], 1)[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def check_lost(lab, nodes: int, shards, lose, expected: str, lost: int, lost_says: str | None = None,
               mend=lambda: None, train=train) -> Path:
    """lose() takes the node `lost` away from a run; the others say what is expected, all end in time, and the
    same command goes on. The lost node lives on alone and says lost_says, or is killed (None). Returns the
    run directory."""
    processes = train(lab, [1] * nodes, shards)
    wait_for_step(lab, 12, processes)
    lose()
    begun = time.monotonic()
    done = [lab.wait(process, TIMEOUT + SPARE) for process in processes]
    assert time.monotonic() - begun < TIMEOUT + SPARE
    for node, (code, text) in enumerate(done):
        if node == lost and lost_says is None:
            assert code == -signal.SIGKILL and "error: " not in text, text
            continue
        assert code == 1 and re.search(lost_says if node == lost else expected, sentence(text)), text
        assert len(text.splitlines()) < 100
    out = lab.home(0) / "run"
    assert 12 <= log_of(out)[-1]["step"] < 60, "the run was over before the node was lost"
    mend()
    again = train(lab, [1] * nodes, shards)
    done = [lab.wait(process, 90) for process in again]
    assert all(code == 0 for code, _ in done) and "resuming after step" in done[0][1], done
    assert not any((lab.home(node) / "run").exists() for node in range(1, nodes))
    assert [line["step"] for line in steps_of(out)] == list(range(1, 61))
    return out


def curves_of_nodes(out: Path, nodes: int) -> None:
    """TensorBoard has curves of every node."""
    hosts = {tag.partition("System/CPU_percent/")[2] for tag in curves(out)} - {""}
    assert {host.partition("-")[0] for host in hosts} == {f"node{i}" for i in range(nodes)}


@pytest.mark.full
def test_a_killed_node_is_named_and_the_same_command_goes_on(lab, shards):
    out = check_lost(lab, 3, shards, lambda: lab.kill(2), r"rank 2 on node2 .* stopped responding", 2)
    curves_of_nodes(out, 3)


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory) -> Path:
    """The run of five ranks that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    done = fork(5, "train_gpt2.py", *GPT2.flags(shards, out))
    assert done.code == 0, done.out
    return out


@pytest.fixture(scope="module")
def whole_late(shards, tmp_path_factory) -> Path:
    """The same with --comm late; it has the bits of the one process in which losses are measured."""
    out, one = tmp_path_factory.mktemp("late"), tmp_path_factory.mktemp("one")
    done = fork(5, "train_gpt2.py", *GPT2.flags(shards, out, **LATE))
    assert done.code == 0, done.out
    done = fork(0, "bench/late.py", 5, "train_gpt2.py", *GPT2.flags(shards, one, batch=3, **LATE))
    assert done.code == 0, done.out
    ours, theirs = tensors_of(out), tensors_of(one)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    return out


@pytest.mark.long
@pytest.mark.parametrize("comm, how", [
    *itertools.product(["fp32"], ["kill", "power", "cable", "kill node0", "cable of node0"]),
    *itertools.product(["late"], ["kill", "cable", "kill node0"])])
def test_five_nodes_and_one_is_lost(lab, shards, whole, whole_late, comm, how):
    """However it is lost, the run ends as if nothing had happened."""
    def power_off():
        lab.plug(3, False)
        lab.kill(3)

    node = 0 if "node0" in how else 3
    lose = {"kill": lambda: lab.kill(node), "power": power_off,
            "cable": lambda: lab.plug(node, False)}[how.split()[0]]
    expected = NO_NODE0 if node == 0 else r"rank 3 on node3 .* stopped responding"
    lost_says = None
    if how == "cable":
        lost_says = NO_NODE0
    elif how == "cable of node0":  # it hears of none any more, and names those whose silence it notices first
        lost_says = r"rank [1-4] on node[1-4] .* stopped responding"
    out = check_lost(lab, 5, shards, lose, expected, node, lost_says, lambda: lab.plug(node, True),
                     train=train_late if comm == "late" else train)
    assert_same_run(whole_late if comm == "late" else whole, out)


@pytest.mark.full
def test_a_slow_link_and_a_slow_node_change_nothing_that_comes_late(lab, shards, whole_late):
    processes = train_late(lab, [1] * 5, shards)
    wait_for_step(lab, 12, processes)
    lab.limit(3, "100mbit")
    wait_for_step(lab, 24, processes)
    [slow] = children(processes[2].pid)
    os.kill(slow, signal.SIGSTOP)
    time.sleep(3)
    at = log_of(lab.home(0) / "run")[-1]["step"]
    time.sleep(1)
    assert log_of(lab.home(0) / "run")[-1]["step"] == at < 60, "nobody waited"
    os.kill(slow, signal.SIGCONT)
    for process in processes:
        code, text = lab.wait(process, 90)
        assert code == 0, text
    assert_same_run(whole_late, lab.home(0) / "run")


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 2])
def test_a_node_is_lost_that_ddp_launch_started(lab, shards, node):
    expected = NO_NODE0 if node == 0 else r"rank 2 on node2 .* stopped responding"
    check_lost(lab, 3, shards, lambda: lab.kill(node), expected, node, train=launch_all)


RECORDING = """
import json, os, sys, time
import data, train_gpt2
from ddp_utils import launch
of_text = {}
class Loader(data.Loader):
    def __init__(self, shards, batch, world, seed, samples):
        super().__init__(shards, batch, world, seed, samples)
        self.begin, self.at = samples, samples + world.rank * batch
        self.file = open(f"rows-{time.time()}.jsonl", "w", buffering=1)
        (_, rows, _), = self.shards.grids  # of the only shard
        of_text.update((row.tobytes(), i) for i, row in enumerate(rows))
    def step(self, micro_batches):
        count, batches = super().step(micro_batches)
        for x, y in batches:
            rows = [of_text[row.numpy().astype(self.shards.dtype).tobytes()] for row in x]
            print(json.dumps([self.begin, self.at, rows]), file=self.file)
            self.at += self.stride
        return count, batches
data.Loader = Loader
launch(train_gpt2.main)
"""


@pytest.mark.long
def test_five_nodes_four_and_five_again(lab, tmp_path):
    """With no --global-batch: a node is lost, four go on, and then five again. Every row of the text comes
    once in each pass. TensorBoard has curves of every node.
    """
    script, text = tmp_path / "recording.py", tmp_path / "text.txt"
    script.write_text(RECORDING)
    text.write_text("".join(f"{i} is not {i * i}. " for i in range(1500)))
    shards = prepare(f"text:{text}", tmp_path / "shards", "bytes", workers=1)

    def train(nodes: int, steps: int) -> list:
        flags = GPT2.flags(shards, "run", global_batch=None, steps=steps, save_every=5, eval_every=10)
        return [lab.start(node, ["bash", LAUNCHER, script, *flags], **{
            "MASTER_ADDR": MASTER, "MASTER_PORT": PORT, "NNODES": nodes, "NODE_RANK": node,
            "GPUS_PER_NODE": 1, "PREFLIGHT_TIMEOUT": 10, "PYTHONPATH": ROOT,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}) for node in range(nodes)]

    processes = train(5, 400)
    wait_for_step(lab, 20, processes)
    lab.kill(3)
    done = [lab.wait(process, TIMEOUT + SPARE) for process in processes]
    assert [code for code, _ in done] == [1, 1, 1, -signal.SIGKILL, 1], done
    for node in (0, 1, 2, 4):
        assert re.search(r"rank 3 on node3 .* stopped responding", sentence(done[node][1])), done[node][1]
    starts, out = [0], lab.home(0) / "run"
    for nodes, more, batch in ((4, 30, 16), (5, 30, 15)):
        step = int(list_checkpoints(out)[0].name[5:13])
        starts.append(torch.load(list_checkpoints(out)[0], weights_only=True)["samples"])
        done = [lab.wait(process, 90) for process in train(nodes, step + more)]
        assert [code for code, _ in done] == [0] * nodes, done
        assert f"x processes {nodes} = {batch} sequences" in done[0][1], done[0][1]
    starts.append(torch.load(list_checkpoints(out)[0], weights_only=True)["samples"])

    rows, reader = {}, data.Dataset([shards], 32).train
    for node in range(5):
        for file in sorted(lab.home(node).glob("rows-*.jsonl"), key=lambda path: path.name):
            taken = [json.loads(line) for line in file.read_text().splitlines()]
            attempt = starts.index(taken[0][0])  # each began where the one before had its last checkpoint
            for _, at, found in taken:
                if starts[attempt] <= at < starts[attempt + 1]:
                    rows |= {at + i: row for i, row in enumerate(found)}
    assert sorted(rows) == list(range(starts[-1])) and len(rows) > reader.rows
    in_order = [rows[position] for position in range(len(rows))]
    assert sorted(in_order[:reader.rows]) == list(range(reader.rows))
    later = in_order[reader.rows:]
    assert len(set(later)) == len(later) < reader.rows
    expected = data.shuffled(np.arange(len(rows)), reader.rows, 0)
    assert np.array_equal(np.sort(expected[:15]), np.sort(in_order[:15]))
    curves_of_nodes(out, 5)


@pytest.mark.long
def test_a_signal_to_the_launcher_of_one_node_ends_all_nodes_soon(lab, shards):
    """torchrun would keep the others at its exit barrier for five minutes."""
    processes = launch_all(lab, [1] * 3, shards, steps=100000)
    wait_for_step(lab, 12, processes)
    for pid in ip("netns", "pids", lab.nodes[1]).split():
        if b"train_gpt2.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGUSR1)
    done = [lab.wait(process, 90) for process in processes]
    # torchrun ends with 1 after a signal to itself, whatever its workers end with
    assert [code for code, _ in done] == [0, 1, 0], done
    step = int(list_checkpoints(lab.home(0) / "run")[0].name[5:13])
    assert 12 <= step == log_of(lab.home(0) / "run")[-1]["step"] < 100000
    for _, text in done:
        assert re.search(rf"SIGUSR1 .*step {step}\b", text) and "error: " not in text, text


@pytest.mark.long
@pytest.mark.parametrize("wrong, expected", [
    ({"MASTER_ADDR": "192.168.50.99"}, [
        "node 1 has not come within 10 s", "node 0 at 192.168.50.99:29500 did not answer within 10 s",
        "node 1 has not come within 10 s"]),
    ({"NODE_RANK": 2}, ["NODE_RANK=2 was given to both "] * 3),
    ({"NNODES": 4}, ["NNODES is 3 on node 0 and 4 on node 1"] * 2 + ["ddp_launch.sh: "])])
def test_a_wrong_variable_on_one_node_is_a_sentence_on_all(lab, shards, wrong, expected):
    processes = [launch(lab, node, shards, **wrong if node == 1 else {}) for node in range(3)]
    for process, words in zip(processes, expected):
        code, text = lab.wait(process, 40)
        assert code == 1 and words in text.splitlines()[-1], text


@pytest.mark.long
def test_a_busy_port_is_a_sentence_on_all(lab, shards):
    listener = f"import socket, time; s = socket.create_server(('', {PORT})); time.sleep(600)"
    lab.start(0, [sys.executable, "-c", listener])
    time.sleep(1)
    for node, process in enumerate([launch(lab, node, shards) for node in range(3)]):
        code, text = lab.wait(process, 60)
        assert code == 1 and len(text.splitlines()) < 5, text
        words = f"MASTER_PORT {PORT} cannot be used on node 0" if node == 0 else "did not answer"
        assert words in text, text


@pytest.mark.long
def test_a_node_that_is_cut_off_ends_too(lab, shards):
    processes = train(lab, [1, 1, 1], shards)
    wait_for_step(lab, 12, processes)
    lab.plug(1, False)
    code, text = lab.wait(processes[1], TIMEOUT + SPARE)
    assert code == 1 and NO_NODE0 in sentence(text), text


@pytest.mark.long
def test_different_data_on_one_node_is_one_sentence_on_all(lab, shards, tmp_path):
    (tmp_path / "other.txt").write_text("a different text\n" * 20000)
    other = prepare(f"text:{tmp_path / 'other.txt'}", tmp_path / "other", "bytes", workers=1)
    for node in range(5):
        shutil.copytree(other if node == 3 else shards, lab.home(node) / "shards")
    for process in train(lab, [1] * 5, "shards"):
        code, text = lab.wait(process, 60)
        assert code == 1 and "the data on rank 3 differs" in sentence(text), text
    assert not (lab.home(0) / "run").exists()


@pytest.mark.long
def test_a_node_without_data_is_one_sentence_on_all(lab, shards):
    for node in (0, 1):
        shutil.copytree(shards, lab.home(node) / "shards")
    for process in train(lab, [1] * 3, "shards"):
        code, text = lab.wait(process, 60)
        assert code == 1 and "shards" in sentence(text), text


@pytest.mark.long
def test_nodes_with_different_numbers_of_processes(lab, shards, tmp_path):
    for process in train(lab, [2, 1], shards):
        code, text = lab.wait(process, 90)
        assert code == 0, text
    whole = run(3, "train_gpt2.py", *GPT2.flags(shards, tmp_path / "whole"))
    assert whole.code == 0, whole.out
    assert_same_run(tmp_path / "whole", lab.home(0) / "run")


def test_leftovers_of_a_killed_run_are_removed(lab):
    """The test process that built a lab is killed; the next lab removes what it has left, and no other's."""
    code = "import time; from lab import Lab; lab = Lab(1).__enter__()\n" \
           "lab.start(0, ['sleep', 600]); print(*lab.nodes, flush=True); time.sleep(600)"
    process = start([sys.executable, "-c", code], cwd=ROOT / "tests" / "helpers")
    namespace = process.stdout.readline().strip()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert Path("/run/netns", namespace).exists()
    with Lab(1):
        assert not Path("/run/netns", namespace).exists()
        assert all(Path("/run/netns", node).exists() for node in lab.nodes)

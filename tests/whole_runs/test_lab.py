"""What fails while several machines train: a rank, a node, a link. Nobody waits for ever, all say who it was,
and the same command goes on. The nodes need root and iproute2 (see helpers/lab.py).
"""

import functools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from lab import MASTER, PORT, Lab, Unavailable, ip
from processes import Group
from runs import Trainer, assert_same_run, log_of, steps_of

from cluster.heartbeat import Heartbeat
from ddp_utils import list_checkpoints

TIMEOUT = 15  # of the trainers' collectives, in seconds
SPARE = Heartbeat.PATIENCE + 5 * Heartbeat.BEAT + 10  # to find out who it was, on a busy machine
GPT2 = Trainer("train_gpt2.py", timeout=TIMEOUT, max_new_tokens=5, global_batch=15, steps=60)
LATE = {"comm": "late", "optimizer": "muon"}
NO_NODE0 = "node0 can no longer be reached at 192.168.50.20:"


def sentence(text: str) -> str:
    """The one line that begins with `error: `."""
    found, = [line for line in text.splitlines() if line.startswith("error: ")]
    return found


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_is_named(tmp_path, shards, number):
    group = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "run", timeout=4, global_batch=2, steps=10**6),
                  ranks=2)
    deadline = time.monotonic() + 60
    while not list_checkpoints(tmp_path / "run"):
        assert time.monotonic() < deadline and group.all_alive, group.text
        time.sleep(0.02)
    group.send(number, 1)
    group.processes[0].join(4 + SPARE)
    assert group.codes[0] == 1 and re.search("rank 1 on node0 .* stopped", sentence(group.text)), group.text


@pytest.fixture
def lab():
    try:
        with Lab(5) as lab:
            yield lab
    except Unavailable as reason:
        pytest.skip(str(reason))


def train(lab, nodes: int, shards, **changes) -> list:
    """Starts the trainer on these nodes; the run directory is on node 0 only, as with real PCs."""
    return lab.by_hand(nodes, GPT2.script, *GPT2.flags(shards, "run", **changes))


def newest(lab) -> int:
    """The step of the newest checkpoint."""
    return max([int(path.name[5:13]) for path in list_checkpoints(lab.home(0) / "run")], default=0)


def wait_for_step(lab, step: int, processes) -> None:
    deadline = time.monotonic() + 90
    while newest(lab) < step:
        assert all(process.poll() is None for process in processes), lab.wait(processes[0], 1)[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def check_lost(lab, nodes: int, shards, lose, expected: str, lost: int, lost_says: str | None = None,
               mend=lambda: None, **flags) -> Path:
    """lose() takes the node `lost` away from a run; the others say what is expected, all end in time, and the
    same command goes on. The lost node lives on alone and says lost_says, or is killed (None). Returns the
    run directory.
    """
    processes = train(lab, nodes, shards, **flags)
    wait_for_step(lab, 12, processes)
    lose()
    begun = time.monotonic()
    done = [lab.wait(process, TIMEOUT + SPARE) for process in processes]
    assert time.monotonic() - begun < TIMEOUT + SPARE
    for node, (code, text) in enumerate(done):
        if node == lost and lost_says is None:
            assert code == -signal.SIGKILL and "error: " not in text, text
        else:
            assert code == 1 and re.search(lost_says if node == lost else expected, sentence(text)), text
            assert len(text.splitlines()) < 100
    out = lab.home(0) / "run"
    assert 12 <= log_of(out)[-1]["step"] < 60, "the run was over before the node was lost"
    mend()
    done = [lab.wait(process, 90) for process in train(lab, nodes, shards, **flags)]
    assert all(code == 0 for code, _ in done) and "resuming after step" in done[0][1], done
    assert not any((lab.home(node) / "run").exists() for node in range(1, nodes))
    assert [line["step"] for line in steps_of(out)] == list(range(1, 61))
    return out


@pytest.mark.full
def test_a_killed_node_is_named_and_the_same_command_goes_on(lab, shards):
    out = check_lost(lab, 3, shards, lambda: lab.kill(2), r"rank 2 on node2 .* stopped", 2)
    # the log has curves of every node
    tags = {tag for line in (out / "metrics.jsonl").read_text().splitlines() for tag in json.loads(line)}
    hosts = {tag.split("/")[2].partition("-")[0] for tag in tags if tag.startswith("System/CPU_percent/")}
    assert hosts == {"node0", "node1", "node2"}


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """Runs of five ranks that nothing disturbs."""
    @functools.cache
    def run_of(**changes) -> Path:
        out = tmp_path_factory.mktemp("whole")
        done = GPT2.fork(5, shards, out, **changes)
        assert done.code == 0, done.out
        return out

    return run_of


@pytest.mark.long
@pytest.mark.parametrize("flags, how", [
    *(({}, how) for how in ("kill 3", "power 3", "cable 3", "kill 0", "cable 0")),
    *((LATE, how) for how in ("kill 3", "cable 3", "kill 0"))])
def test_five_nodes_and_one_is_lost(lab, shards, whole, flags, how):
    """However it is lost, the run ends as if nothing had happened."""
    what, node = how.split()[0], int(how[-1])

    def lose():
        if what != "kill":
            lab.plug(node, False)
        if what != "cable":
            lab.kill(node)

    # without its cable node 0 hears of none, and names those whose silence it notices first
    alone = NO_NODE0 if node else r"rank [1-4] on node[1-4] .* stopped"
    expected = f"rank {node} on node{node} .* stopped" if node else NO_NODE0
    out = check_lost(lab, 5, shards, lose, expected, node, alone if what == "cable" else None,
                     lambda: lab.plug(node, True), **flags)
    assert_same_run(whole(**flags), out)


@pytest.mark.full
def test_a_slow_link_and_a_slow_node_change_nothing_that_comes_late(lab, shards, whole):
    processes = train(lab, 5, shards, **LATE)
    wait_for_step(lab, 12, processes)
    lab.limit(3, "100mbit")
    wait_for_step(lab, 24, processes)
    processes[2].send_signal(signal.SIGSTOP)
    time.sleep(3)
    at = log_of(lab.home(0) / "run")[-1]["step"]
    time.sleep(1)
    assert log_of(lab.home(0) / "run")[-1]["step"] == at < 60, "nobody waited"
    processes[2].send_signal(signal.SIGCONT)
    assert all(lab.wait(process, 90)[0] == 0 for process in processes), lab.wait(processes[0], 1)
    assert_same_run(whole(**LATE), lab.home(0) / "run")


@pytest.mark.long
def test_a_signal_to_the_launcher_of_one_node_ends_all_nodes_soon(lab, shards):
    """torchrun would keep the others at its exit barrier for five minutes."""
    env = {"MASTER_ADDR": MASTER, "MASTER_PORT": PORT, "NNODES": 3, "GPUS_PER_NODE": 1,
           "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    processes = [lab.start(node, [ROOT / "cluster/ddp_launch.sh", ROOT / GPT2.script,
                                  *GPT2.flags(shards, "run", steps=100000)], NODE_RANK=node, **env)
                 for node in range(3)]
    wait_for_step(lab, 12, processes)
    for pid in ip("netns", "pids", lab.nodes[1]).split():
        if b"train_gpt2.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGUSR1)
    done = [lab.wait(process, 90) for process in processes]
    # torchrun ends with 1 after a signal to itself, whatever its workers end with
    assert [code for code, _ in done] == [0, 1, 0], done
    step = newest(lab)
    assert 12 <= step == log_of(lab.home(0) / "run")[-1]["step"] < 100000
    assert all(re.search(rf"SIGUSR1 .*step {step}\b", text) for _, text in done), done

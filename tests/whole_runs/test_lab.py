"""What fails while several machines train: a rank, a node, a link. Nobody waits for ever, all say who it was,
and the same command goes on. The nodes need root and iproute2 (see helpers/lab.py).
"""

import json
import re
import signal
import sys
import time

import pytest
from conftest import ROOT
from lab import PORT, Lab, Unavailable
from runs import Trainer, assert_same_run, log_of
from waiting import wait_for

from cluster.heartbeat import Heartbeat
from ddp_utils import list_checkpoints

TIMEOUT = 15  # of the trainers' collectives, in seconds
SPARE = Heartbeat.PATIENCE + 5 * Heartbeat.BEAT + 10  # to find out who it was, on a busy machine
GPT2 = Trainer("train_gpt2.py", timeout=TIMEOUT, max_new_tokens=5, global_batch=15, steps=60)
LATE = {"comm": "late", "optimizer": "muon"}
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

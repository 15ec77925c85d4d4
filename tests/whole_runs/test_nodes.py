"""Starting on several machines: what has to be the same on all, over which network, and how they leave.
Namespaces need root and iproute2 (see helpers/lab.py).
"""

import shutil
import socket
import sys
import time

import pytest
from conftest import ROOT, finish, start
from lab import MASTER, PORT, Lab, Unavailable
from processes import Group
from runs import Trainer

import ddp_utils
from prepare.pipeline import prepare

GPT2 = Trainer("train_gpt2.py", timeout=20, max_new_tokens=5, global_batch=16, batch=None, steps=2)


@pytest.fixture
def lab(request):
    try:
        with Lab(request.param) as lab:
            yield lab
    except Unavailable as reason:
        pytest.skip(str(reason))


# ------------------------------------------------------------------------------------ two on this machine

@pytest.mark.parametrize("flag, value", [("--out", "other"), ("--global-batch", "4"), ("the data", None)])
def test_what_differs_between_nodes_is_named(shards, tmp_path, flag, value):
    """Each node has its own folder."""
    (tmp_path / "text.txt").write_text("another text\n" * 1000)
    other = prepare(f"text:{tmp_path}/text.txt", tmp_path / "other", "bytes", workers=1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        env = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    groups = []
    for rank, more in enumerate(([], [flag, value] if value else [])):
        home = tmp_path / f"{rank}"
        shutil.copytree(shards if rank == 0 or value else other, home / "shards")
        groups.append(Group(GPT2.script, *GPT2.flags("shards", "run"), *more, cwd=home, RANK=rank, **env))
    for done in [group.finish(60) for group in groups]:
        assert done.code and f"error: {flag} on rank 1 differs" in done.out, done.out


@pytest.mark.full
def test_the_folder_cluster_comes_before_a_package_of_that_name(tmp_path, shards):
    """PyPI has one."""
    (tmp_path / "cluster.py").write_text("raise RuntimeError('the wrong package')\n")
    done = finish(start([sys.executable, ROOT / GPT2.script, *GPT2.flags(shards, tmp_path / "run")],
                        PYTHONPATH=tmp_path))
    assert done.code == 0 and "training complete" in done.out, done.out


class SlowSave:
    """The last checkpoint takes some seconds longer than the rest of the run."""

    def __call__(self):
        write = ddp_utils.Checkpoints._write

        def slow(self, path, content, begun):
            time.sleep(4 * (content["step"] == 2))
            write(self, path, content, begun)
        ddp_utils.Checkpoints._write = slow


@pytest.mark.full
def test_other_nodes_wait_for_the_last_checkpoint(tmp_path, shards):
    """Longer than --timeout, too; so no torchrun waits at its exit barrier."""
    group = Group("tests/helpers/on_node.py", GPT2.script, f'["{tmp_path}", "{tmp_path}"]',
                  *GPT2.flags(shards, tmp_path / "run", timeout=2), ranks=2, fault=SlowSave())
    deadline = time.monotonic() + 60
    while "sample after step 2" not in group.text:
        assert time.monotonic() < deadline and group.all_alive, group.text
        time.sleep(0.02)
    time.sleep(2)
    assert group.all_alive and "training complete" not in group.text, group.text
    done = group.finish(60)
    assert done.code == 0 and done.out.count("training complete: 2 steps") == 2, done.out
    assert done.out.index("saved step 2") < done.out.index("Node node1 | Device cpu] training complete")


# ------------------------------------------------------------------------------------------------- namespaces

@pytest.mark.parametrize("lab", [2], indirect=True)
@pytest.mark.parametrize("master", [pytest.param(MASTER, marks=pytest.mark.long),
                                    pytest.param("pc0", marks=pytest.mark.full)])
def test_bare_torchrun_where_the_own_name_is_127_0_1_1(lab, shards, master):
    """As on Debian and Ubuntu. Where MASTER_ADDR is node 0's name, node 0 itself takes it for 127.0.1.1."""
    processes = []
    for node in range(2):
        hosts = lab.directory / f"hosts{node}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 pc{node}\n192.168.50.{21 - node} pc{1 - node}\n")
        script = f'hostname pc{node}; mount --bind {hosts} /etc/hosts; unset GLOO_SOCKET_IFNAME; exec "$@"'
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                    f"--master-addr={master}", f"--master-port={PORT}"]
        processes.append(lab.start(node, ["unshare", "-um", "bash", "-c", script, "bash", *torchrun,
                                          ROOT / GPT2.script, *GPT2.flags(shards, "run")]))
    for code, text in [lab.wait(process, 200) for process in processes]:
        assert code == 0 and "training complete: 2 steps" in text, text


@pytest.mark.full
@pytest.mark.parametrize("lab", [2], indirect=True)
def test_a_loopback_as_the_address_of_node_0_is_named_on_all_nodes(lab):
    """On node 0, while the other node has the right one."""
    env = {"MASTER_PORT": PORT, "NNODES": 2, "GPUS_PER_NODE": 1, "PREFLIGHT_TIMEOUT": 15}
    processes = [lab.start(node, [ROOT / "cluster/ddp_launch.sh", ROOT / GPT2.script], NODE_RANK=node,
                           MASTER_ADDR=address, **env) for node, address in enumerate(("localhost", MASTER))]
    for code, text in [lab.wait(process, 60) for process in processes]:
        assert code == 1 and "MASTER_ADDR is localhost on node 0" in text, text

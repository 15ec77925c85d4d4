"""Starting on several machines: who starts the processes, over which network, in which order nodes are
numbered, and how they leave. Needs root and iproute2 where there are namespaces (see lab.py).
"""

import itertools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT, Finished, finish, start
from lab import MASTER, PORT, Lab, Unavailable
from processes import Group, fork
from runs import Trainer, log_of
from test_monitor import curves

import ddp_utils
import startup.run
import test_ddp
import train_gpt2
from cli.errors import RunError, UserError
from cluster import diagnosis, heartbeat
from ddp_utils import list_checkpoints

GPT2 = Trainer("train_gpt2.py", timeout=20, max_new_tokens=5, global_batch=15, batch=None, steps=60)


@pytest.fixture
def lab(request):
    try:
        with Lab(request.param) as lab:
            yield lab
    except Unavailable as reason:
        pytest.skip(str(reason))


# ------------------------------------------------------------------------------------- what lies in cluster/


def two_machines(directory, *flags, **env) -> Finished:
    """Two processes that believe to be on two machines, with the program in a directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": port, "GROUP_WORLD_SIZE": 2, "PYTHONPATH": None,
              "GLOO_SOCKET_IFNAME": None} | env  # which an earlier test may have set
    processes = [start([sys.executable, directory / "train_gpt2.py", *flags], cwd=directory,
                       **common | {"RANK": rank, "GROUP_RANK": rank}) for rank in (0, 1)]
    found = [finish(process) for process in processes]
    return Finished(max(done.code for done in found), "".join(done.out for done in found))


def forked_machines(script, cwd, each, **env) -> list[Finished]:
    """The same, forked, which starts faster; `each` has the flags of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    groups = []
    for rank, flags in enumerate(each):
        common = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | env
        common |= {"GROUP_RANK": rank} if "GROUP_WORLD_SIZE" in env else {}
        groups.append(Group(script, *flags, cwd=cwd, **common))
    return [group.finish(60) for group in groups]


@pytest.mark.full
def test_the_folder_cluster_comes_before_a_package_of_that_name(tmp_path, shards):
    """PyPI has one."""
    (tmp_path / "cluster.py").write_text("raise RuntimeError('the wrong package')\n")
    flags = GPT2.flags(shards, tmp_path / "run", steps=1, global_batch=2)
    done = two_machines(ROOT, *flags, PYTHONPATH=tmp_path)
    assert done.code == 0 and "training complete" in done.out, done.out


# ----------------------------------------------------------------------------------- who starts the processes

@pytest.mark.parametrize("env, refused", [
    ({"SLURM_STEP_NUM_TASKS": "2"}, "srun has started 2 processes"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun has started 4 processes"),
    ({"PMI_SIZE": "2"}, "mpiexec has started 2 processes"),
    ({"MV2_COMM_WORLD_SIZE": "2"}, "mpirun_rsh has started 2 processes"),  # MVAPICH
    ({"PALS_LOCAL_SIZE": "12"}, "mpiexec has started 12 processes"),  # of HPE
    ({"JSM_NAMESPACE_SIZE": "6"}, "jsrun has started 6 processes"),
    ({"FLUX_JOB_SIZE": "2"}, "flux run has started 2 processes"),
    ({"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "0", "FLUX_JOB_SIZE": "1", "MV2_COMM_WORLD_SIZE": "x"}, None),
    ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, None),  # as in a batch script
    ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"}, None), ({"OMPI_COMM_WORLD_SIZE": "1"}, None)])
def test_tasks_that_would_train_alone_are_refused(env, refused, tmp_path, shards, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = GPT2.train(0, shards, tmp_path / "run", steps=1)
    if not refused:
        assert done.code == 0, done.out
        return
    assert done.code == 2 and refused in done.out and "torchrun --nproc_per_node=" in done.out, done.out
    assert "cluster/slurm.sbatch" in done.out and not (tmp_path / "run").exists()
    assert GPT2.here("--dry-run", "1x8", "--data", shards).code == 0  # nothing else trains
    assert "holds no checkpoint" in GPT2.here("--out", tmp_path, "--prompt", "a").out
    monkeypatch.setattr(sys, "argv", ["test_ddp.py", "--device", "cpu"])
    with pytest.raises(UserError, match=refused):
        test_ddp.main()


def test_the_launcher_under_srun_is_not_refused(tmp_path, shards):
    flags = GPT2.flags(shards, tmp_path / "run", steps=1, batch=1, global_batch=16)
    group = Group("train_gpt2.py", *flags, ranks=2, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0")
    done = group.finish()
    assert done.code == 0 and "processes 2" in done.out, done.out


# ------------------------------------------------------------------------------------------- devices, drivers

def test_an_outdated_driver_is_one_sentence(monkeypatch):
    def old(*arguments):
        raise RuntimeError("The NVIDIA driver on your system is too old (found 11040).\nPlease update")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", old)
    with pytest.raises(UserError) as found:
        ddp_utils.choose_device("auto", "auto", 1)
    assert "driver on your system is too old" in str(found.value) and "\n" not in str(found.value)
    for word in ("580", "wsl --update", "cu126", "docs/clusters.md", "--device cpu"):
        assert word in str(found.value)
    assert ddp_utils.choose_device("auto", "cpu", 1)[0].type == "cpu"


def test_a_backend_that_fails_in_its_first_collective_names_the_ways_on(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("NCCL error: unhandled system error, details")
    monkeypatch.setattr(torch.distributed, "all_gather_object", fail)
    try:
        words = "gloo fails in its first collective .RuntimeError: NCCL error: unhandled"
        with pytest.raises(RunError, match=words):
            startup.run.start(startup.run.resolve_flags(train_gpt2.parse_args(["--device", "cpu"])))
    finally:
        torch.distributed.destroy_process_group()
    assert "--backend gloo" in diagnosis.WHEN_CUT_OFF["nccl"]


def test_one_process_whose_interface_is_down_is_not_sent_to_other_nodes(shards, tmp_path):
    flags = GPT2.flags(shards, tmp_path / "run", steps=1)
    done = fork(0, GPT2.script, *flags, GLOO_SOCKET_IFNAME="gone0")
    assert done.code == 1 and "Unable to find address for: gone0" in done.out, done.out
    assert "sudo ip link set lo up" in done.out and "unset GLOO_SOCKET_IFNAME" in done.out
    assert "other nodes" not in done.out


@pytest.mark.full
def test_torchrun_where_the_own_name_leads_nowhere(shards, tmp_path):
    """With what README says; without it torchrun of some versions hangs."""
    if subprocess.run(["unshare", "-ru", "true"], capture_output=True).returncode:
        pytest.skip("needs unshare -ru")
    assert "Give torchrun `--local-addr 127.0.0.1`" in (ROOT / "docs" / "running.md").read_text()
    command = shlex.join([sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1",
                          "--nproc_per_node=2", str(ROOT / GPT2.script),
                          *GPT2.flags(shards, tmp_path / "run", steps=1, global_batch=2)])
    done = finish(start(["unshare", "-ru", "sh", "-c", f"hostname mypc42x && {command}"]), 90)
    assert done.code == 0 and "training complete" in done.out, done.out


@pytest.mark.parametrize("flag, values", [("--out", ("run", "other")), ("--global-batch", ("2", "4"))])
def test_a_flag_that_differs_between_nodes_is_named(shards, tmp_path, flag, values):
    each = [[*GPT2.flags(shards, tmp_path / "run", steps=1, global_batch=2), flag, value] for value in values]
    for done in forked_machines(GPT2.script, tmp_path, each):
        sentence = f"error: {flag} on rank 1 differs from the other ranks"
        assert done.code == 2 and sentence in done.out, done.out


def test_a_lasting_world_size_says_unset(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "5")
    done = GPT2.here(*GPT2.flags(shards, tmp_path / "run", steps=1))
    assert done.code == 2 and "RANK is not set" in done.out, done.out
    assert "`unset RANK WORLD_SIZE`" in done.out


@pytest.mark.parametrize("launched", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}])
def test_empty_variables_of_a_launcher_are_none(launched):
    """As a .env file of Docker passes them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    env = dict.fromkeys(names, "") | launched | ({"MASTER_PORT": port} if launched else {})
    done = fork(0, "test_ddp.py", "--device", "cpu", "--timeout", 20, **env)
    assert done.code == 0 and "rank 0 on" in done.out, done.out
    empty = dict.fromkeys((*names, "RANK", "WORLD_SIZE"), "")
    done = fork(0, "train_gpt2.py", "--device", "cpu", "--data", "stdlib", "--dry-run", **empty)
    assert done.code == 0 and "1 processes" in done.out, done.out


def test_processes_with_another_world_size_are_named_by_all():
    """One of them ends, and the others, who wait for ranks that never come, say why."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    first, second = (heartbeat.Heartbeat(store, rank, size, "here", 20, False, None)
                     for rank, size in ((0, 3), (1, 2)))
    waiting = ThreadPoolExecutor(1).submit(first.wait_for_all)
    while not first.store.check(["world size"]):
        time.sleep(0.01)
    with pytest.raises(UserError, match="WORLD_SIZE is 2 here and 3 on another rank: give all") as refused:
        second.wait_for_all()
    second.stop(str(refused.value))
    with pytest.raises(RunError, match="rank 1 on node0 .* failed first: WORLD_SIZE is 2 here"):
        waiting.result(10)
    first.stop("")


def test_a_port_that_no_machine_has():
    env = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 295_000}
    done = fork(0, "test_ddp.py", "--device", "cpu", "--timeout", 20, **env)
    assert done.code == 2 and "MASTER_PORT=295000 is not from 1 to 65535: choose one" in done.out, done.out


def test_ranks_of_before_in_the_store_of_torchrun(monkeypatch):
    """Elastic torchrun with the store that it shares; by hand two processes with one RANK look the same."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
           "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    torch.distributed.PrefixStore("attempt 0, 0", store).add("rank 0", 1)
    for more, words in (({"TORCHELASTIC_RUN_ID": "r1"}, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on"),
                        ({}, "RANK=0 was given to two processes: give each its own")):
        monkeypatch.setattr(heartbeat, "_joins", itertools.count())
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        for name, value in more.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=words):
            heartbeat.join(5)


# --------------------------------------------------------------------------------------------- how they leave

class SlowSave:
    """The last checkpoint takes some seconds longer than the rest of the run."""

    def __call__(self):
        write = ddp_utils.Checkpoints._write

        def slow(self, path, content, begun):
            time.sleep(4 * (content["step"] == 2))
            write(self, path, content, begun)
        ddp_utils.Checkpoints._write = slow


class SlowToHear:
    """A process that asks late whether all have come to the end."""

    def __call__(self):
        add = heartbeat.Heartbeat.add

        def slow(self, key, amount):
            time.sleep(3 * (key.startswith("end") and amount == 0))
            return add(self, key, amount)
        heartbeat.Heartbeat.add = slow


@pytest.mark.full
def test_the_process_that_hosts_the_store_leaves_last(tmp_path, shards):
    flags = GPT2.flags(shards, tmp_path / "run", steps=2, global_batch=16, batch=8)
    done = Group("train_gpt2.py", *flags, ranks=2, fault=SlowToHear(), fault_rank=1).finish(60)
    assert done.code == 0 and "can no longer be reached" not in done.out, done.out


@pytest.mark.full
def test_other_nodes_wait_for_the_last_checkpoint(tmp_path, shards):
    """Longer than --timeout, too; so no torchrun waits at its exit barrier."""
    group = Group("tests/helpers/on_node.py", "train_gpt2.py", f'["{tmp_path}", "{tmp_path}"]', *GPT2.flags(
        shards, tmp_path / "run", steps=2, global_batch=16, batch=8, timeout=2), ranks=2, fault=SlowSave())
    deadline = time.monotonic() + 60
    while "sample after step 2" not in group.text:
        assert time.monotonic() < deadline and group.all_alive, group.text
        time.sleep(0.02)
    time.sleep(2)
    assert group.all_alive and "training complete" not in group.text, group.text
    done = group.finish(60)
    assert done.code == 0 and done.out.count("training complete: 2 steps") == 2, done.out
    last = done.out.index("[Rank 1/2 | Node node1 | Device cpu] training complete")
    assert done.out.index("saved step 2") < last


# ------------------------------------------------------------------------------------------------- namespaces

def torchrun(rank: int, master: str, count: int = 2) -> list:
    return [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--node-rank={rank}",
            "--nproc-per-node=1", f"--master-addr={master}", f"--master-port={PORT}", ROOT / "train_gpt2.py"]


def named(host: str, hosts: str, command: list) -> list:
    """A command on a machine of that name with that /etc/hosts."""
    script = f'hostname {host}; mount --bind {hosts} /etc/hosts; unset GLOO_SOCKET_IFNAME; exec "$@"'
    return ["unshare", "-um", "bash", "-c", script, "bash", *command]


@pytest.mark.full
@pytest.mark.parametrize("lab", [2], indirect=True)
@pytest.mark.parametrize("master", [MASTER, "pc0"])
def test_bare_torchrun_where_the_own_name_is_127_0_1_1(lab, shards, master):
    """As on Debian and Ubuntu. Where MASTER_ADDR is node 0's name, node 0 itself takes it for 127.0.1.1."""
    files = []
    for node in range(2):
        file = lab.directory / f"hosts{node}"
        others = f"192.168.50.{21 - node} pc{1 - node}\n"
        file.write_text(f"127.0.0.1 localhost\n127.0.1.1 pc{node}\n{others}")
        files.append(file)
    flags = GPT2.flags(shards, "run", steps=4, global_batch=16)
    processes = [lab.start(node, named(f"pc{node}", files[node], [*torchrun(node, master), *flags]))
                 for node in range(2)]
    for code, text in [lab.wait(process, 90) for process in processes]:
        assert code == 0 and "training complete: 4 steps" in text, text


@pytest.mark.full
@pytest.mark.parametrize("lab", [2], indirect=True)
@pytest.mark.parametrize("address, code, sentence", [
    ("0.0.0.0", 2, "MASTER_ADDR 0.0.0.0 leads to no machine: give the address of node 0's network card"),
    ("localhost", 1, "MASTER_ADDR is localhost on node 0, which only that machine itself can reach"),
    ("127.0.0.1", 1, "MASTER_ADDR is 127.0.0.1 on node 0, which only that machine itself can reach")])
def test_the_launcher_refuses_an_address_that_leads_nowhere(lab, shards, address, code, sentence):
    """On node 0, while the other node has the right one."""
    flags = GPT2.flags(shards, "run", steps=1)
    launcher = [ROOT / "cluster" / "ddp_launch.sh", ROOT / "train_gpt2.py", *flags]
    env = {"MASTER_PORT": PORT, "NNODES": 2, "GPUS_PER_NODE": 1, "PREFLIGHT_TIMEOUT": 15}
    first = lab.start(0, launcher, **env, NODE_RANK=0, MASTER_ADDR=address)
    second = lab.start(1, launcher, **env, NODE_RANK=1, MASTER_ADDR=MASTER)
    (found, text), (_, other) = (lab.wait(process, 60) for process in (first, second))
    assert found == code and sentence in text, text
    assert code == 2 or sentence in other, other


@pytest.mark.long
@pytest.mark.parametrize("lab", [5], indirect=True)
def test_five_nodes_renumbered_emptied_and_with_a_clock_set_back(lab, shards):
    flags = {"save_every": 4, "eval_every": 100}

    def run(order: list[int], steps: int, **env) -> list[tuple[int, str]]:
        """On these machines; the first is node 0."""
        processes = [lab.start(machine, [sys.executable, ROOT / "train_gpt2.py",
                                         *GPT2.flags(shards, "run", **flags, steps=steps)], **{
            "RANK": rank, "WORLD_SIZE": 5, "MASTER_ADDR": f"192.168.50.{20 + order[0]}",
            "MASTER_PORT": PORT + steps, "GROUP_RANK": rank,
            "GROUP_WORLD_SIZE": 5} | env) for rank, machine in enumerate(order)]
        return [lab.wait(process, 120) for process in processes]

    assert all(code == 0 for code, _ in run([0, 1, 2, 3, 4], 8))
    for code, text in run([3, 1, 2, 0, 4], 12):
        words = f"node3 ({os.uname().nodename}) holds step 8 of run, but node0 only step 0"
        assert code == 2 and words in text, text
    assert not (lab.home(3) / "run").exists()
    shutil.copytree(lab.home(0) / "run", lab.home(3) / "run")
    done = run([3, 1, 2, 0, 4], 12)
    assert all(code == 0 for code, _ in done) and "resuming after step 8" in done[0][1], done
    shutil.rmtree(lab.home(0) / "run")  # the machine that was node 0 before is emptied
    shutil.copytree(lab.home(3) / "run", lab.home(0) / "run")
    site = lab.directory / "site"
    site.mkdir()
    yesterday = "import time\nnow = time.time\ntime.time = lambda: now() - 86400\n"
    (site / "sitecustomize.py").write_text(yesterday)
    done = run([0, 1, 2, 3, 4], 16, PYTHONPATH=f"{site}:{ROOT}")
    assert all(code == 0 for code, _ in done) and "resuming after step 12" in done[0][1], done
    assert list_checkpoints(lab.home(0) / "run")[0].name.startswith("step_00000016")
    steps = [step for step, _ in curves(lab.home(0) / "run")["Loss/train_step"]]
    assert steps == [record["step"] for record in log_of(lab.home(0) / "run") if "loss" in record]

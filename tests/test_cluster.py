"""The check of a cluster, and what starts one: test_ddp.py and cluster/, on this machine over loopback."""

import configparser
import fcntl
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, finish, run, start
from processes import Group, fork

import test_ddp
from cli.errors import UserError
from cli.files import cpu_count
from cluster import heartbeat
from prepare.pipeline import prepare

CHECK, LAUNCH = ROOT / "test_ddp.py", ROOT / "cluster" / "ddp_launch.sh"
# test_ddp.py in which rank 1 has a fault
FAULTY = """
import os, sys, time
import ddp_utils, test_ddp
if os.environ["RANK"] == "1":
    if sys.argv[1] == "hangs":
        test_ddp.check_collectives = lambda world: time.sleep(60)
    elif sys.argv[1] == "wrong":
        check = test_ddp.check_collectives
        test_ddp.check_collectives = lambda world: check(world) or "all_reduce"
del sys.argv[1]
ddp_utils.launch(test_ddp.main)
"""


def free_port() -> int:
    """Below the ports that the system hands out to connections, so that nobody takes it in the meantime."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                pass


def ranks(script, *args, count=2, started=None, each=None) -> list:
    """Starts ranks without torchrun; `each` gives further arguments of single ranks."""
    port = free_port()
    return [Group(script, *args, *(each or {}).get(rank, ()), RANK=rank, WORLD_SIZE=count,
                  MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            for rank in (range(count) if started is None else started)]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("faulty") / "faulty.py"
    path.write_text(FAULTY)
    return path


# -----------------------------------------------------------------------------------------------------------
# test_ddp.py


def test_check_says_ok(shards):
    ended = fork(2, "test_ddp.py", "--device", "cpu", "--data", shards, timeout=60)
    assert ended.code == 0 and ended.out.splitlines()[-1] == "OK", ended.out
    for line in (r"^rank 1: \S+, cpu ; backend gloo, python 3\.",
                 r"^collectives are right$",
                 r"^all_reduce of +100 MB: +[\d.]+ ms",
                 r" 100 M parameters take [\d.e-]+ s .* --comm bf16.* --comm late.* --global-batch"):
        assert re.search(line, ended.out, re.M), (line, ended.out)


@pytest.mark.full
def test_check_of_one_process():
    """It says OK in each of several containers that nobody joined, so it says that it was alone."""
    ended = run(0, "test_ddp.py", "--device", "cpu", timeout=60)
    assert ended.code == 0 and ended.out.splitlines()[-1] == "OK", ended.out
    assert "this process is alone, so no network was checked" in ended.out


def test_different_data_are_found(shards, tmp_path):
    other = tmp_path / "text.txt"
    other.write_text("another text. " * 1000)
    other = prepare(f"text:{other}", tmp_path / "other", "bytes", workers=1)
    flags = {0: ["--data", shards], 1: ["--data", other]}
    sentence = r"error: data is \w+ on rank 1 \(.*\), but \w+ on rank 0 .*: copy the same files to every"
    for ended in [p.finish(60) for p in ranks(CHECK, "--device", "cpu", each=flags)]:
        assert ended.code == 2 and re.search(sentence, ended.out), ended.out


@pytest.mark.full
def test_missing_ranks_are_named():
    begun = time.monotonic()
    first, = ranks(CHECK, "--device", "cpu", "--timeout", "4", count=3, started=[0])
    second, = ranks(CHECK, "--device", "cpu", "--timeout", "4", count=3, started=[1])
    first, second = first.finish(40), second.finish(40)
    assert first.code == 1, first.out
    missing = r"error: .*rank 1, rank 2 of 3 did not come to 127.0.0.1:\d+ within 4 s"
    assert re.search(missing, first.out), first.out
    assert second.code == 1, second.out
    assert re.search(r"error: .*rank 1 found no rank 0 at 127.0.0.1:\d+ within 4 s", second.out), second.out
    assert time.monotonic() - begun < 25


@pytest.mark.full
@pytest.mark.parametrize("fault, code, sentence", [
    ("hangs", 1, "all_reduce, broadcast and all_gather failed: rank 1 on node0 (HOST) did not take part"),
    pytest.param("wrong", 1, "all_reduce gave wrong numbers on rank 1 (HOST)", marks=pytest.mark.long)])
def test_faults_are_found(faulty, fault, code, sentence):
    processes = ranks(faulty, fault, "--device", "cpu", "--timeout", "12")
    ended = processes[0].finish(40)
    assert ended.code == code and sentence.replace("HOST", socket.gethostname()) in ended.out, ended.out
    if fault == "hangs":
        processes[1].kill()
    else:
        assert processes[1].finish(40).code == code


def test_environment_by_hand():
    for env, sentence in (({"RANK": 0}, "WORLD_SIZE is not set"),
                          ({"RANK": "a", "WORLD_SIZE": 2}, "RANK is not a number"),
                          ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 is not below WORLD_SIZE=2")):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | env).items():
                patch.setenv(name, str(value))
            with pytest.raises(UserError, match=sentence):
                heartbeat.join(1)


def test_reports_are_compared():
    report = {"host": "pc1", "world size": "3", "device": "cuda", "backend": "nccl",
              "python": "3.11.2", "torch": "2.13.0", "nccl": "2.27.7", "code": "a", "data": "b", "gpu": "RTX",
              "wrong": ""}
    reports = [report | {"host": f"pc{rank}", "uuid": f"GPU-{rank}"} for rank in range(3)]
    assert test_ddp.problem_in(reports) == ""
    assert test_ddp.problem_in([*reports[:2], reports[2] | {"python": "3.11.9"}]) == ""
    for what in ("world size", "device", "backend", "torch", "nccl", "code", "data"):
        sentence = test_ddp.problem_in([reports[0], reports[1] | {what: "x"}, reports[2]])
        assert sentence.startswith(f"{what} is x on rank 1 (pc1), but {report[what]} on rank 0 (pc0): ")
    sentence = test_ddp.problem_in([*reports[:2], reports[2] | {"python": "3.12.9"}])
    assert sentence.startswith("python is 3.12 on rank 2")
    same = test_ddp.problem_in([reports[0], reports[1], reports[2] | {"uuid": "GPU-1"}])
    assert same.startswith("rank 1 (pc1) and rank 2 (pc2) use the same GPU")
    assert test_ddp.problem_in([*reports[:2], reports[2] | {"wrong": "no."}]) == "rank 2 (pc2): no."


def test_no_function_that_pytest_collects():
    assert not [name for name in vars(test_ddp) if name.startswith("test") or name.startswith("Test")]


# -----------------------------------------------------------------------------------------------------------
# cluster/ddp_launch.sh


class Nodes:
    """Launchers on this machine, each as a node of its own."""

    def __init__(self, nodes: int, **env):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {"PATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NNODES": nodes,
                    "NODE_RANK": None, "GPUS_PER_NODE": 1, "PREFLIGHT_TIMEOUT": 20} | env

    def start(self, rank: int, *command, **env):
        return start([LAUNCH, *(command or ["monitor.py"])], cwd=ROOT, **self.env | {"NODE_RANK": rank} | env)

    def listening(self) -> "Nodes":
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.env["MASTER_PORT"])) == 0:
                    return self
            time.sleep(0.05)


def test_launcher_names_wrong_variables():
    for env, sentence in (
            *(({name: None}, f"{name} is not set") for name in (
                "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GPUS_PER_NODE")),
            ({"NODE_RANK": 2}, "NODE_RANK=2 is not a whole number from 0 to 1."),
            ({"MASTER_PORT": "x"}, "MASTER_PORT=x is not a whole number from 1 to 65535."),
            ({"NNODES": 0}, "NNODES=0 is not"), ({"GPUS_PER_NODE": "-1"}, "GPUS_PER_NODE=-1 is not")):
        ended = finish(Nodes(2).start(0, **env))
        assert ended.code == 2 and sentence in ended.out and len(ended.out.splitlines()) == 1, ended.out
    ended = finish(Nodes(2).start(0, "no_such.py"))
    assert ended.code == 2 and "no_such.py does not exist" in ended.out, ended.out
    ended = finish(Nodes(2).start(0, "bash", "-lc", "echo a 'b c'"))
    command = "docker compose run --rm --entrypoint bash trainer "
    assert ended.code == 2 and command in ended.out, ended.out
    words = f"bash {ended.out.partition(command)[2]}"
    again = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert again.stdout == "a b c\n", again


def test_launcher_names_what_is_wrong_with_node_0():
    nodes = Nodes(2, PREFLIGHT_TIMEOUT=1)
    for rank, env, sentence in (
            (0, {"MASTER_ADDR": "192.0.2.1"}, "MASTER_ADDR 192.0.2.1 is not an address of this machine"),
            (0, {}, "node 1 has not come within 1 s"),
            (1, {}, f"node 0 at 127.0.0.1:{nodes.env['MASTER_PORT']} did not answer within 1 s (Connection")):
        ended = finish(nodes.start(rank, **env), 20)
        assert ended.code == 1 and sentence in ended.out, ended.out
    with socket.create_server(("", nodes.env["MASTER_PORT"])):
        ended = finish(nodes.start(0), 20)
        assert ended.code == 1 and "cannot be used on node 0 (Address already in use)" in ended.out, ended.out


def test_launcher_is_started_by_sh_or_through_a_link(tmp_path):
    (tmp_path / "launch").symlink_to(ROOT / "cluster" / "ddp_launch.sh")
    env = os.environ | {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "NNODES": "2", "NODE_RANK": "0",
                        "GPUS_PER_NODE": "1"}
    link = tmp_path / "launch"
    for command in (["sh", ROOT / "cluster" / "ddp_launch.sh"], [link], ["sh", link]):
        done = subprocess.run([*command, "test_ddp.py"], cwd=ROOT, env=env, timeout=60, capture_output=True,
                              text=True)
        assert done.returncode == 1 and "192.0.2.1 is not an address of this machine" in done.stderr, done


def test_a_name_that_means_this_machine_only(monkeypatch):
    """Debian's /etc/hosts gives a machine's own name the address 127.0.1.1."""
    roll_call = runpy.run_path(str(ROOT / "cluster" / "roll_call.py"))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(sys, "argv", ["roll_call.py", "pc1", "29500", "2", "0", "1", "1"])
    with pytest.raises(roll_call["Problem"], match="pc1 is 127.0.1.1 on this machine, which no other can"):
        roll_call["main"]()


def test_launcher_notices_a_repeated_node_rank():
    nodes = Nodes(3)
    ended = [finish(p, 15) for p in [nodes.start(0), nodes.listening().start(1), nodes.start(1)]]
    assert all(e.code == 1 and "NODE_RANK=1 was given to both" in e.out for e in ended), ended


def test_launcher_notices_another_number_of_nodes():
    nodes = Nodes(3)
    ended = [finish(p, 15) for p in [nodes.start(0), nodes.listening().start(1, NNODES=2)]]
    assert all(e.code == 1 and "NNODES is 3 on node 0 and 2 on node 1" in e.out for e in ended), ended


@pytest.mark.full
def test_nodes_with_different_numbers_of_processes():
    nodes = Nodes(2, GLOO_SOCKET_IFNAME=None)
    second = nodes.start(1, "test_ddp.py", "--device", "cpu", "--timeout", "30")
    time.sleep(0.5)  # it knocks until node 0 opens
    first = nodes.start(0, "test_ddp.py", "--device", "cpu", "--timeout", "30", GPUS_PER_NODE=2)
    first, second = finish(first, 60), finish(second, 60)
    assert first.code == 0 and "OK" in first.out.splitlines() and "rank 2: " in first.out, first.out
    assert re.search(r"node 0 \S+: 2 processes; node 1 \S+ \(127.0.0.1\): 1 processes", first.out), first.out
    assert second.code == 0 and "rank 2 on " in second.out and ": all right, on CPU" in second.out, second.out


@pytest.mark.full
def test_every_node_says_how_it_goes(tmp_path, shards):
    nodes = Nodes(2, GLOO_SOCKET_IFNAME=None, PREFLIGHT_TIMEOUT=120)
    command = ["train_gpt2.py", "--data", shards, "--out", tmp_path / "run", "--device", "cpu", "--steps", 4,
               "--seq-len", 32, "--d-model", 32, "--n-layer", 1, "--save-every", 2, "--eval-every", 4,
               "--eval-batches", 1, "--max-new-tokens", 5]
    second = nodes.start(1, *command)
    time.sleep(0.5)
    first, second = finish(nodes.start(0, *command)), finish(second)
    assert first.code == second.code == 0, first.out + second.out
    assert "2 x CPU" in first.out and first.out.count("saved step ") == 2
    assert re.search(r"Rank 1/2 \| Node node1 .*CPU, gloo, torch ", second.out), second.out
    assert [f"step {step}/4 |" in second.out for step in (2, 4)] == [True, True]
    assert "training complete: 4 steps" in second.out and "in sync" in second.out


@pytest.mark.parametrize("held, code, sentence", [
    (False, 2, "error: argument --lr"),
    pytest.param(True, 1, "is in use by process", marks=pytest.mark.full)])
def test_the_launcher_tells_a_mistake_from_what_may_go_well_later(tmp_path, shards, held, code, sentence):
    """systemd stops at 2 and tries again at 1, which torchrun would make of both."""
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as lock:
        if held:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write("process 7\n")
            lock.flush()
        ended = finish(Nodes(1).start(0, "train_gpt2.py", "--data", shards, "--out", tmp_path / "run",
                                      "--lr", "0.001" if held else "much", "--device", "cpu", "--seq-len", 32,
                                      GPUS_PER_NODE=1 + held))
    assert ended.code == code and sentence in ended.out, ended.out


@pytest.mark.full
def test_a_node_that_comes_again_is_not_repeated():
    nodes = Nodes(3, PREFLIGHT_TIMEOUT=3)
    first, early = nodes.start(0), nodes.listening().start(1)
    time.sleep(0.7)
    os.killpg(early.pid, signal.SIGKILL)
    early.communicate()
    again = nodes.start(1)
    first, again = finish(first, 20), finish(again, 20)
    for ended in (first, again):
        assert ended.code == 1 and "node 2 has not come within 3 s" in ended.out, ended.out
    assert "node 1 has gone again" in first.out, first.out


# -----------------------------------------------------------------------------------------------------------
# The other files


def test_shell_scripts():
    scripts = [LAUNCH, ROOT / "cluster" / "slurm.sbatch"]
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True, timeout=10)
        assert "set -euo pipefail" in script.read_text()
    if not (shellcheck := shutil.which("shellcheck")):
        pytest.skip("shellcheck is not installed; bash -n found nothing")
    ended = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stdout


def test_slurm_job_queues_itself_again(tmp_path):
    """With stand-ins for SLURM: at SIGUSR1 the step is told, and the job asks to be run again."""
    for name, text in {
            "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "scontrol $*"; fi',
            "srun": 'trap "echo saved; exit 1" USR1; echo "step $MASTER_PORT $NNODES $*"; '
                    "while :; do sleep 0.1; done"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = start(["bash", ROOT / "cluster" / "slurm.sbatch", "train_gpt2.py"], cwd=ROOT, SLURM_NNODES=2,
                PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID=7, SLURM_JOB_NODELIST="n[1-2]")
    assert re.match("step 20007 2 .*launcher train_gpt2.py", job.stdout.readline())
    job.send_signal(signal.SIGUSR1)
    ended = finish(job, 10)
    assert ended.code == 0 and ended.out == "saved\nscontrol requeue 7\n", ended.out


@pytest.mark.skipif(not shutil.which("taskset") or cpu_count() < 2, reason="needs taskset and two cores")
def test_slurm_gives_the_step_the_cpus_of_the_job(tmp_path):
    """With a stand-in for srun of 22.05 to 23.02: one CPU for each task, unless srun itself is told."""
    for name, text in {
            "scontrol": "echo localhost",
            "srun": 'cpus=1\nfor word; do\ncase $word in --cpus-per-task=*) cpus=${word#*=};; esac\ndone\n'
                    'exec taskset -c "0-$((cpus - 1))" nproc'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for given, cpus in (("2", 2), (None, 1)):
        job = start(["bash", ROOT / "cluster" / "slurm.sbatch", "train_gpt2.py"], cwd=ROOT, SLURM_NNODES=1,
                    PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID=7, SLURM_JOB_NODELIST="n1",
                    SLURM_CPUS_PER_TASK=given, OMP_NUM_THREADS=None)
        assert finish(job, 10).out == f"{cpus}\n"


def test_systemd_unit():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(ROOT / "cluster" / "trainer@.service")
    assert unit["Service"]["Restart"] == "always" and unit["Service"]["RestartSec"]
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"  # it never gives up
    assert "cluster/ddp_launch.sh" in unit["Service"]["ExecStart"]


def test_compose_file():
    """What the compose specification asks of the keys that are used, and what training needs of them."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "cluster" / "compose.yaml").read_text()
    compose = yaml.safe_load(text)
    assert compose.keys() == {"x-trainer", "services"} and list(compose["services"]) == ["trainer", "cpu"]
    service = compose["services"]["trainer"]
    without = compose["services"]["cpu"]  # a GPU; in a profile, so `up` does not start both
    assert without.pop("profiles") == ["cpu"]
    assert without == {key: value for key, value in service.items() if key != "deploy"}
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= {*service["environment"]}  # if the host has them
    kinds = {"image": str, "build": dict, "command": (str, list), "entrypoint": (str, list), "user": str,
             "network_mode": str, "ipc": str, "shm_size": (int, str), "ulimits": dict, "init": (bool, str),
             "restart": str, "stop_grace_period": str, "working_dir": str, "volumes": list, "deploy": dict,
             "environment": (dict, list), "devices": list}
    assert service.keys() <= kinds.keys()
    assert all(isinstance(value, kinds[key]) for key, value in service.items())
    assert service["build"].keys() <= {"context", "dockerfile", "args", "target"}
    assert all(isinstance(value, int) for value in service["ulimits"].values())
    assert service["restart"] in ("no", "always", "on-failure", "unless-stopped")
    assert re.fullmatch(r"\d+s", service["stop_grace_period"])
    assert len(set(service["environment"])) == len(service["environment"])
    lists = [*service["environment"], *service["volumes"], *service["devices"]]
    assert all(isinstance(item, str) for item in lists)
    assert service["devices"] == ["${INFINIBAND:-/dev/null}"]  # a missing one keeps it from starting
    device, = service["deploy"]["resources"]["reservations"]["devices"]
    assert device.keys() <= {"capabilities", "count", "device_ids", "driver", "options"}
    assert device["capabilities"] == ["gpu"] and not {"count", "device_ids"} <= device.keys()

    assert service["network_mode"] == "host" and service["ipc"] == "host"
    source, target = service["volumes"][0].split(":")
    assert (ROOT / "cluster" / source).resolve() == ROOT and target == service["working_dir"]
    assert (ROOT / "cluster" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    for name in ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GPUS_PER_NODE"):
        assert any(item.startswith(f"{name}=${{{name}:-") for item in service["environment"])
    plugin = shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True)
    if plugin and plugin.returncode == 0:
        subprocess.run(["docker", "compose", "-f", ROOT / "cluster" / "compose.yaml", "config", "-q"],
                       check=True, timeout=30)


def test_dockerfile_leaves_torch_alone():
    text = (ROOT / "cluster" / "Dockerfile").read_text()
    torch, = re.findall(r"^torch==(.*)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.M)
    assert f"ARG TORCH={torch}\n" in text
    assert "FROM pytorch/pytorch:${TORCH}-cuda${CUDA}-cudnn9-runtime\n" in text
    assert "grep -v '^torch[=<>]'" in text and "-c /tmp/constraints.txt" in text
    assert re.search(r"^torch[=<>]", (ROOT / "requirements.txt").read_text(), re.M)

"""What starts a run on several machines: cluster/ddp_launch.sh, SLURM, systemd, Docker."""

import configparser
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, finish, start
from runs import Trainer, assert_same_run, steps_of
from waiting import wait_for

CLUSTER = ROOT / "cluster"
LAUNCH = CLUSTER / "ddp_launch.sh"
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GPUS_PER_NODE")
GPT2 = Trainer("train_gpt2.py", steps=4, save_every=2, global_batch=3)


def launch(*command, given="", cwd=ROOT):
    """Starts a command with these variables."""
    variables = ("MASTER_ADDR=127.0.0.1 MASTER_PORT=29591 NNODES=1 NODE_RANK=0 GPUS_PER_NODE=1 "
                 f"PREFLIGHT_TIMEOUT=60 GLOO_SOCKET_IFNAME= {given}")
    env = dict(variable.split("=") for variable in variables.split())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return start([LAUNCH, *command], cwd=cwd, PATH=path, **env)


@pytest.mark.parametrize("given, named", [
    *((f"{name}=", f"{name} is") for name in VARIABLES), ("NODE_RANK=2", "0 to 1"), ("NNODES=3:2", "1 to 2"),
    ("NNODES=2:", ""), ("MEET_SECONDS=x", ""),
    ("MASTER_PORT=x", "1 to 65535"), ("NNODES=0", ""), ("GPUS_PER_NODE=-1", "")])
def test_wrong_variables_are_named(given, named):
    ended = finish(launch("monitor.py", given=f"NNODES=2 {given}"), 30)
    assert ended.code == 2 and ended.out.count("\n") == 1 and named in ended.out, ended.out
    assert given in ended.out or given[-1] == "=", ended.out


def test_a_command_that_is_no_trainer_is_named():
    for word, named in (("no_such.py", str(ROOT)), ("no_such", "container"), ("--size", "train_gpt2.py")):
        ended = finish(launch(word), 30)
        assert ended.code == 2 and word in ended.out and named in ended.out, ended.out
    ended = finish(launch("bash", "-lc", "echo a 'b c'"), 30)
    command = ended.out.partition("docker compose run --rm --entrypoint bash trainer ")[2]
    assert ended.code == 2 and command, ended.out
    again = subprocess.run(["bash", "-c", f"bash {command}"], capture_output=True, text=True, timeout=30)
    assert again.stdout == "a b c\n"


@pytest.mark.parametrize("code, found", [(2, 2), pytest.param(3, 1, marks=pytest.mark.full)])
def test_a_mistake_ends_with_2_and_what_may_go_well_later_with_1(tmp_path, code, found):
    """systemd tries again at 1, which torchrun makes of both. Each restart has its own store."""
    (tmp_path / "script.py").write_text(
        "import os, sys; print(*sys.argv[1:], os.environ['TORCH_DISABLE_SHARE_RDZV_TCP_STORE'],"
        " os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT']); sys.exit(int(sys.argv[1]))")
    ended = finish(launch("script.py", code, "--b c", cwd=tmp_path))
    assert ended.code == found and f"{code} --b c 1 50\n" in ended.out, ended.out


@pytest.mark.full
def test_nodes_with_different_numbers_of_processes(tmp_path, shards):
    """Each says how it goes, and the run has the bits of a single node. The second is there first."""
    command = [GPT2.script, *GPT2.flags(shards, tmp_path / "run")]
    second = launch(*command, given="NNODES=2 NODE_RANK=1")
    first = finish(launch(*command, given="NNODES=2 GPUS_PER_NODE=2"))
    second = finish(second)
    assert first.code == second.code == 0, first.out + second.out
    assert "3 x CPU" in first.out and first.out.count("saved step ") == 2
    assert re.search(r"Rank 2/3 \| Node node1 .*CPU, gloo, torch ", second.out), second.out
    assert all(f"step {step}/4 |" in second.out for step in (2, 4)) and "in sync" in second.out, second.out
    whole = GPT2.fork(3, shards, tmp_path / "whole")
    assert whole.code == 0, whole.out
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_node_leaves_a_range_and_the_other_goes_on(tmp_path, shards):
    """No step is lost or computed twice."""
    out = tmp_path / "run"
    flags = GPT2.flags(shards, out, steps=60, global_batch=2, save_every=100, eval_every=100, log_every=1)
    given = "NNODES=1:2 MEET_SECONDS=1"
    first, second = (launch(GPT2.script, *flags, given=f"{given} NODE_RANK={node}") for node in range(2))
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(steps_of(out)) > 4, 90)
    second.terminate()
    assert finish(second).code == 1  # as torchrun ends
    ended = finish(first)
    assert ended.code == 0 and "training complete: 60 steps" in ended.out, ended.out
    assert "node 1 is not here" in ended.out and "resuming with world_size 1 (was 2)" in ended.out
    stopped, = re.findall(r"stopped by SIGTERM after step (\d+)", ended.out)
    assert f"resuming after step {stopped}" in ended.out
    assert [record["step"] for record in steps_of(out)] == [*range(1, 61)]


@pytest.mark.parametrize("script", [LAUNCH, CLUSTER / "slurm.sbatch"])
def test_shell_scripts(script):
    assert "set -euo pipefail" in script.read_text()
    program = ["shellcheck"] if shutil.which("shellcheck") else ["bash", "-n"]
    subprocess.run([*program, script], check=True, timeout=30)


def test_a_slurm_job_queues_itself_again(tmp_path):
    """At SIGUSR1 the step is told, and the job asks to be run again. With stand-ins for SLURM."""
    for name, text in (
            ("scontrol", 'if [ "$1" = show ]; then echo localhost; else echo "scontrol $*"; fi'),
            ("srun", 'trap "echo saved; exit 1" USR1; echo "step $MASTER_PORT $NNODES $*"; '
                     "while :; do sleep 0.1; done")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = start(["bash", CLUSTER / "slurm.sbatch", "train_gpt2.py"], cwd=ROOT, SLURM_NNODES=2,
                SLURM_JOB_ID=7, SLURM_JOB_NODELIST="n[1-2]", SLURM_CPUS_PER_TASK=2,
                PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert re.match("step 20007 2 .*--cpus-per-task=2 .*launcher train_gpt2.py", job.stdout.readline())
    job.send_signal(signal.SIGUSR1)
    ended = finish(job, 30)
    assert ended.code == 0 and ended.out == "saved\nscontrol requeue 7\n", ended.out


def test_systemd_starts_again_unless_a_flag_is_wrong():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(CLUSTER / "trainer@.service")
    service = unit["Service"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("always", "2")
    assert unit["Unit"]["StartLimitIntervalSec"] == "0" and "cluster/ddp_launch.sh" in service["ExecStart"]


@pytest.mark.parametrize("name, variables", [
    ("skypilot.yaml", "SKYPILOT_NODE_IPS=192.0.2.1\n192.0.2.2 SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=1 "
                      "SKYPILOT_NUM_GPUS_PER_NODE=8 COMMAND=train_gpt2.py"),
    ("trainjob.yaml", "PET_MASTER_ADDR=192.0.2.1 PET_MASTER_PORT=29500 PET_NNODES=2 PET_NODE_RANK=1 "
                      "PET_NPROC_PER_NODE=8")])
def test_clouds_start_the_launcher(tmp_path, name, variables):
    """With what SkyPilot and Kubeflow set."""
    text = (CLUSTER / name).read_text()
    assert len(text.splitlines()) <= 50
    task = pytest.importorskip("yaml").safe_load(text)
    script = task["run"] if "run" in task else task["spec"]["trainer"]["command"][2]
    (tmp_path / "cluster").mkdir()
    stub = tmp_path / "cluster" / "ddp_launch.sh"
    stub.write_text(f"#!/bin/sh\necho {' '.join(f'${name}' for name in VARIABLES)} $1\n")
    stub.chmod(0o755)
    script = script.replace("cd /work", "").replace("getent", ": getent")
    env = dict(variable.split("=", 1) for variable in variables.split(" "))
    done = finish(start(["bash", "-euc", script], cwd=tmp_path, **env), 30)
    assert done.out == "192.0.2.1 29500 2 1 8 train_gpt2.py\n" and done.code == 0, done.out


def test_docker():
    """What training needs of it. The service `cpu` is the same without GPUs, and `up` doesn't start it."""
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    service, cpu = services["trainer"], services["cpu"]
    device, = service.pop("deploy")["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"] and cpu == service | {"profiles": ["cpu"]}
    assert service["network_mode"] == service["ipc"] == "host" and service["restart"] == "unless-stopped"
    assert service["devices"] == ["${INFINIBAND:-/dev/null}"]  # a missing one keeps it from starting
    assert service["volumes"] == [f"..:{service['working_dir']}"]
    passed = {item.partition("=")[0] for item in service["environment"]}
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", *VARIABLES} <= passed

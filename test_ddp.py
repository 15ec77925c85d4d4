"""Checks a cluster before a long run, and measures its network. Ends with OK, or with an error.

    torchrun --nproc_per_node=8 test_ddp.py                                        # on one machine
    cluster/ddp_launch.sh test_ddp.py --data shards/stdlib-bpe4096                 # on each machine
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python test_ddp.py  # no torchrun

First all ranks compare software, devices and data, because a difference could make a run hang.
Then they join one process group, check three collectives, and measure how long this network takes
for gradients.
"""

import hashlib
import json
import os
import platform
import statistics
import timeit
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist

import ddp_utils
from cli.errors import HOST, RunError, UserError, first_line, say
from cli.parser import ArgumentParser, bounded, expanded, flag_group
from cluster.diagnosis import refuse_lone_tasks
from data import Dataset
from ddp_utils import World, all_gather, init, launch, run_and_wait
from loggers.machine import hardware

SHOWN = ("backend", "python", "torch", "nccl", "code", "data")

# -----------------------------------------------------------------------------------------------------------
# Before the process group exists


def report_of(args: Namespace, device: torch.device, backend: str) -> dict:
    """Returns this rank's software, device and data. `wrong` is a sentence on the data, or empty."""
    beside = Path(__file__).resolve().parent
    packages = [path.parent for path in beside.glob("*/__init__.py")]
    files = [path for folder in (beside, *packages) for path in folder.glob("*.py")]
    code = b"".join(path.read_bytes() for path in sorted(files))
    report = {"host": HOST, "world size": os.environ.get("WORLD_SIZE", "1"), "device": device.type,
              "backend": backend, "python": platform.python_version(), "torch": torch.__version__}
    report |= {"code": hashlib.sha256(code).hexdigest()[:12]}
    report |= {"nccl": "none", "data": "not compared", "gpu": "", "uuid": "", "wrong": ""}
    if device.type == "cuda":
        report |= {"gpu": hardware(device), "uuid": str(torch.cuda.get_device_properties(device).uuid)}
        if dist.is_nccl_available():
            report["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        if args.data:
            dataset = Dataset([Path(args.data)], 1, args.tokenizer)
            report["data"] = dataset.fingerprint[:12]
    except UserError as error:
        report["wrong"] = str(error)
    return report


def problem_in(reports: list[dict]) -> str:
    """Returns the first problem in the reports of all ranks and how to fix it, or "" if there is none."""
    names = [f"rank {rank} ({report['host']})" for rank, report in enumerate(reports)]
    for name, report in zip(names, reports):
        if report["wrong"]:
            return f"{name}: {report['wrong']}"
    for what, way_out in {
            "world size": "give all processes the same WORLD_SIZE",
            "device": "check nvidia-smi there, or give all processes the same --device",
            "backend": "give all processes the same --backend",
            "python": "install the same version everywhere",
            "torch": "install the same torch everywhere, such as with -c .ci/constraints.txt",
            "nccl": "install the same build of torch everywhere",
            "code": "copy the same version of the trainers to every machine",
            "data": "copy the same files to every machine, or prepare them there in the same way"}.items():
        values = [report[what] for report in reports]
        if what == "python":
            values = [value.rpartition(".")[0] for value in values]  # 3.11.2 and 3.11.9 count as equal
        usual = statistics.mode(values)  # in a tie, the value of the lower rank
        for name, value in zip(names, values):
            if value != usual:
                other = names[values.index(usual)]
                return f"{what} is {value} on {name}, but {usual} on {other}: {way_out}."
    owner = {}
    for name, uuid in zip(names, (report["uuid"] for report in reports)):
        if uuid and owner.setdefault(uuid, name) != name:
            return (f"{owner[uuid]} and {name} use the same GPU: start with torchrun, or set LOCAL_RANK on "
                    "each machine to 0, 1 and so on.")
    return ""


def compare(report: dict):
    """Prints and compares the reports of all ranks. Raises UserError on all ranks if there is a problem."""
    heartbeat = ddp_utils.process.heartbeat
    reports = [report]
    if heartbeat:
        keys = [f"report {rank}" for rank in range(heartbeat.world_size)]
        run_and_wait(heartbeat.call, heartbeat.store.set, keys[heartbeat.rank], json.dumps(report))
        reports = [json.loads(text) for text in heartbeat.call(heartbeat.store.multi_get, keys)]
    if not heartbeat or heartbeat.rank == 0:
        for rank, facts in enumerate(reports):
            versions = ", ".join(f"{what} {facts[what]}" for what in SHOWN)
            say(f"rank {rank}: {facts['host']}, {facts['device']} {facts['gpu']}; {versions}")
    verdict = problem_in(reports)
    if heartbeat:  # rank 0 decides, because a rank with another WORLD_SIZE reads another number of reports
        if heartbeat.rank == 0:
            heartbeat.call(heartbeat.store.set, "verdict", verdict)
        verdict = heartbeat.call(heartbeat.store.get, "verdict").decode()
    if verdict:
        raise UserError(verdict)


# -----------------------------------------------------------------------------------------------------------
# In the process group


def step(what: str, function, *args):
    """Returns function(*args); all ranks call it. If it fails, raises RunError with `what` and the cause."""
    try:
        return function(*args)
    except RuntimeError as error:
        if not ddp_utils.process.heartbeat:
            raise
        raise RunError(f"{what} failed: " + (ddp_utils.process.heartbeat.find_cause() or (
            f"{first_line(error)}, but all ranks are alive: machines must reach each other at every port, so "
            "open the firewall between them, and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the card "
            "that connects them (`ip -4 addr` lists network cards)."))) from None


def check_collectives(world: World) -> str:
    """Tries three collectives. Returns the names of those with wrong numbers on this rank, or ""."""
    size = world.world_size
    base = torch.arange(100_000, dtype=torch.float64, device=world.device)
    reduced = base + world.rank
    sent = base if world.rank == size - 1 else torch.zeros_like(base)
    gathered = [torch.empty_like(base) for _ in range(size)]
    dist.all_gather(gathered, reduced)
    dist.all_reduce(reduced)
    dist.broadcast(sent, src=size - 1)
    right = {"all_reduce": torch.equal(reduced, size * base + size * (size - 1) // 2)}
    right["broadcast"] = torch.equal(sent, base)
    right["all_gather"] = all(torch.equal(part, base + rank) for rank, part in enumerate(gathered))
    return " and ".join(name for name, fine in right.items() if not fine)


def all_reduce_seconds(nbytes: int, repetitions: int, world: World) -> float:
    """Seconds that an all-reduce takes: the median over the repetitions, on the slowest rank. A first call
    isn't counted, because it connects and allocates.
    """
    buffer = torch.zeros(nbytes // 4, device=world.device)

    def until_done():
        dist.all_reduce(buffer)
        torch.get_device_module(world.device).synchronize()

    until_done()
    return max(all_gather(statistics.median(timeit.repeat(until_done, number=1, repeat=repetitions))))


def measure_network(world: World, limit: float):
    """Prints how long all-reduces take, and what that means for a model's gradients. Sends 100 MB at a time
    if that takes less than half of `limit`, in seconds; otherwise 10 MB.
    """
    times = {1_000: all_reduce_seconds(1_000, 21, world), 1_000_000: all_reduce_seconds(1_000_000, 7, world)}
    expected = 100 * times[1_000_000]  # seconds for 100 MB, the same on all ranks
    large = 100_000_000 if expected < limit / 2 else 10_000_000
    times[large] = all_reduce_seconds(large, max(1, min(5, int(5 * 1e8 / large / expected))), world)
    if world.is_rank0:
        for nbytes, seconds in times.items():
            wire = 2 * (world.world_size - 1) / world.world_size * nbytes * 8 / seconds / 1e9
            say(f"all_reduce of {nbytes / 1e6:5g} MB: {seconds * 1e3:9.2f} ms, {wire:7.3f} Gbit/s out of "
                "each rank")
        say(f"so gradients of 100 M parameters take {4e8 * times[large] / large:.3g} s in each step; half of "
            "that with --comm bf16; a quarter with --comm late, while the next step runs; a larger "
            "--global-batch sends them less often")


# -----------------------------------------------------------------------------------------------------------
# The commands


def main():
    parser = ArgumentParser(description=__doc__, usage="%(prog)s [FLAGS]")
    flag = flag_group(parser, "the check")
    flag("--backend", ("auto", "nccl", "gloo"), "auto: nccl on GPUs", "auto")
    flag("--device", ("auto", "cuda", "cpu"), "auto: a GPU if there is one", "auto")
    flag("--timeout", bounded(4), "seconds to wait for missing ranks before naming them", 60)
    flag("--data", expanded, "a prepared directory that has to be the same on all machines")
    flag("--tokenizer", expanded, "the tokenizer of --data, if it has no manifest")
    args = parser.parse_args()

    refuse_lone_tasks()
    world = step("the start of the process group", init, args.backend, args.device, args.timeout,
                 lambda *device: compare(report_of(args, *device)))

    wrong = step("all_reduce, broadcast and all_gather", check_collectives, world)

    def judge():
        if wrong:
            raise RunError(f"{wrong} gave wrong numbers on rank {world.rank} ({HOST}): check its memory and "
                           "its network card, or turn off direct access between GPUs with "
                           "NCCL_P2P_DISABLE=1.")

    run_and_wait(judge)
    if world.is_rank0:
        say("collectives are right")
    step("the measurement of the network", measure_network, world, args.timeout / 2)
    say(f"rank {world.rank} on {HOST}: all right, on {hardware(world.device)}")
    for _ in range(2):  # if an NCCL collective times out, only the next one raises
        step("the end", dist.barrier)
    if world.world_size == 1:
        say("this process is alone, so no network was checked: start it on each machine with "
            "cluster/ddp_launch.sh, or on one machine with torchrun")
    if world.is_rank0:
        say("OK")


if __name__ == "__main__":
    launch(main)

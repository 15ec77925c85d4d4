"""Checks a cluster before a long run, and predicts how fast it will be. Ends with OK, or with what is wrong.

    torchrun --nproc_per_node=8 test_ddp.py                                    # one machine
    cluster/ddp_launch.sh test_ddp.py --data shards/stdlib-bpe4096 --size gpt2        # on each of several
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python test_ddp.py     # without torchrun

All ranks first meet in a TCPStore and compare what they have, because a process group of unequal members only
hangs. Then they join one, and take every step together. The predictions assume that nothing is sent while
something is computed; backpropagation does overlap with sending, so a step may take less.
"""

import hashlib
import importlib
import json
import os
import platform
import re
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from data import Dataset, UserError
from ddp_utils import ArgumentParser, RunError, World, compute_dtype, init, local_rank, number, run
from model import GPT2, HRM, MLM, Block, num_params, pad_vocab

KINDS = {"gpt2": GPT2, "hrm": HRM, "mlm": MLM}
SHOWN = ("backend", "python", "torch", "nccl", "code", "data")
BUCKET = 25 * 2**20  # bytes in which DDP sends gradients
MASK_RATE, BP_STEPS = 0.3, 5  # the defaults of train_mlm.py, and of train_hrm.py after its ramp

# -----------------------------------------------------------------------------------------------------------
# Before there is a process group


def report_of(args) -> dict:
    """What this rank has, as plain data. `wrong` is a sentence, or empty."""
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    nccl = device == "cuda" and dist.is_nccl_available()
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).resolve().parent.glob("*.py")))
    report = {"host": platform.node(), "world size": os.environ.get("WORLD_SIZE", "1"), "device": device,
              "backend": args.backend if args.backend != "auto" else "nccl" if nccl else "gloo",
              "python": platform.python_version(), "torch": torch.__version__,
              "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "none",
              "code": hashlib.sha256(code).hexdigest()[:12], "size": f"{args.model} {args.size}",
              "data": "not compared", "gpu": "", "uuid": "", "wrong": ""}
    try:
        if device == "cuda":
            gpus = torch.cuda.device_count()
            if local_rank() >= gpus:
                raise UserError(f"this is process {local_rank()}, counted from 0, on a machine with {gpus} "
                                "GPUs: start as many as there are, and see whether nvidia-smi works there.")
            gpu = torch.cuda.get_device_properties(local_rank())
            report |= {"gpu": f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB", "uuid": str(gpu.uuid)}
        if args.data:
            report["data"] = Dataset(args.data, 1, args.tokenizer).fingerprint[:12]
    except UserError as error:
        report["wrong"] = str(error)
    return report


def problem_in(reports: list[dict]) -> str:
    """The first thing that is wrong in the reports of all ranks, and how to mend it; empty if nothing is."""
    names = [f"rank {rank} ({report['host']})" for rank, report in enumerate(reports)]
    for name, report in zip(names, reports):
        if report["wrong"]:
            return f"{name}: {report['wrong']}"
    for what, way_out in {
            "world size": "give all the same WORLD_SIZE",
            "device": "see whether nvidia-smi works there, or give all the same --device",
            "backend": "give all the same --backend",
            "size": "start all with the same flags",
            "python": "install the same version everywhere",
            "torch": "install the same requirements.txt everywhere",
            "nccl": "install the same build of torch everywhere",
            "code": "copy the same version of the trainers to every machine",
            "data": "copy the same files to every machine, or prepare them there as on the others"}.items():
        values = [report[what] for report in reports]
        if what == "python":
            values = [value.rpartition(".")[0] for value in values]  # 3.11.2 and 3.11.9 are the same
        usual = max(values, key=values.count)  # the first of the most frequent
        for name, value in zip(names, values):
            if value != usual:
                other = names[values.index(usual)]
                return f"{what} is {value} on {name}, but {usual} on {other}: {way_out}."
    owner = {}
    for name, uuid in zip(names, (report["uuid"] for report in reports)):
        if uuid and owner.setdefault(uuid, name) != name:
            return (f"{owner[uuid]} and {name} use the same GPU: start with torchrun, or set LOCAL_RANK to "
                    "0, 1 and so on, on each machine anew.")
    return ""


def tell(store: dist.Store, rank: int, key: str, text: str, listeners: int, timeout: float) -> str:
    """What rank 0 says, on all ranks. It stays until they have heard, because the store goes with it."""
    if rank > 0:
        store.wait([key], timedelta(seconds=timeout))
        text = store.get(key).decode()
        store.add(f"{key} heard", 1)
        return text
    store.set(key, text)
    deadline = time.monotonic() + 2
    while store.add(f"{key} heard", 0) < listeners and time.monotonic() < deadline:
        time.sleep(0.02)
    return text


def meet(report: dict, timeout: float) -> tuple[dist.Store, list[dict]]:
    """Waits for all ranks at MASTER_ADDR, prints and compares their reports. UserError on all ranks alike."""
    env, world_size, rank, store = os.environ, 1, 0, dist.HashStore()
    if {"RANK", "WORLD_SIZE"} & env.keys():
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name) or name != "MASTER_ADDR" and not env[name].isdecimal():
                raise UserError(f"{name} is {'no number' if env.get(name) else 'not set'}: start with "
                                "torchrun, or give each process RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.")
        rank, world_size, port = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if rank >= world_size:
            raise UserError(f"RANK={rank} is not below WORLD_SIZE={world_size}: count ranks from 0.")
        serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = dist.TCPStore(env["MASTER_ADDR"], port, None, serves, timedelta(seconds=timeout),
                                  wait_for_workers=False, multi_tenant=True)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"MASTER_PORT {port} is in use on this machine: choose another one."
                            if "EADDRINUSE" in str(error) else
                            f"rank 0 at {env['MASTER_ADDR']}:{port} did not answer within {timeout:g} s: "
                            "wrong MASTER_ADDR or MASTER_PORT, a firewall, or it was not started.") from None
        store = dist.PrefixStore(f"test_ddp {env.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    try:
        if store.add(f"{rank} is here", 1) > 1:
            first = json.loads(store.get(f"{rank}"))["host"]
            raise UserError(f"RANK={rank} was given to two processes, on {first} and on {report['host']}: "
                            "give each its own.")
        store.set(f"{rank}", json.dumps(report))
        everyone, verdict = [f"{r}" for r in range(world_size)], ""
        if rank == 0:
            deadline = time.monotonic() + timeout
            while (missing := [r for r in everyone if not store.check([r])]) and time.monotonic() < deadline:
                time.sleep(0.05)
            reports = {r: json.loads(store.get(r)) for r in everyone if r not in missing}
            for r, found in reports.items():
                print(f"rank {r}: {found['host']}, {found['device']} {found['gpu']}; " + ", ".join(
                    f"{what} {found[what]}" for what in SHOWN), flush=True)
            verdict = problem_in([*reports.values()]) if not missing else (
                f"of {world_size} ranks there did not come within {timeout:g} s: {', '.join(missing)}; start "
                "them, and see whether they reach MASTER_ADDR.")
        present = len(reports) if rank == 0 else 0
        if verdict := tell(store, rank, "verdict", verdict, present - 1, timeout + 5):
            raise UserError(verdict)
        return store, [json.loads(store.get(r)) for r in everyone]
    except RuntimeError:
        raise UserError(f"rank 0 at {env['MASTER_ADDR']} has gone, or waits no longer: see what it says, and "
                        "start all ranks at about the same time.") from None


# -----------------------------------------------------------------------------------------------------------
# Together


class Together:
    """Runs one step after the other on all ranks; where one does not get through, all learn which rank."""

    def __init__(self, store: dist.Store, hosts: list[str], rank: int, limit: float):
        self.store, self.hosts, self.rank, self.limit, self.group = store, hosts, rank, limit, None

    def __call__(self, what: str, step, *args):
        try:
            if self.group:  # a barrier that says who is missing, which only gloo has
                dist.monitored_barrier(self.group, timedelta(seconds=self.limit), wait_all_ranks=True)
            return step(*args)
        except RuntimeError as error:
            # on its own thread, because a TCPStore that has lost its host can block for ever
            found = [f"rank 0 ({self.hosts[0]}) is silent since {what}: look at it and at the network."]
            thread = threading.Thread(target=self.blame, args=(what, str(error), found), daemon=True)
            thread.start()
            thread.join(self.limit + 2)
            raise RunError(found[-1]) from None

    def blame(self, what: str, error: str, found: list[str]) -> None:
        """Appends who did not even fail in this step: the same sentence on all ranks that did."""
        here, text = 1, ""
        try:
            self.store.set(f"failed {self.rank}", "")
            if self.rank == 0:
                named = re.search(r"[Rr]anks? ([\d, ]+) failed to pass", error)
                silent = [int(r) for r in re.findall(r"\d+", named[1])] if named else []
                deadline = time.monotonic() + min(5, self.limit / 2)
                while not silent or time.monotonic() < deadline and not named:
                    silent = [r for r in range(len(self.hosts)) if not self.store.check([f"failed {r}"])]
                    if not silent:
                        break
                    time.sleep(0.1)
                here = len(self.hosts) - len(silent)
                who = ", ".join(f"rank {r} ({self.hosts[r]})" for r in silent)
                text = (f"{who} did not get through {what}: look at that machine, its network card and cable."
                        if who else f"{what} failed ({error.splitlines()[0][:150]}): all machines must reach "
                        "each other at every port, so open the firewall between them, and set "
                        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network card that leads there "
                        "(`ip -4 addr`).")
            found.append(tell(self.store, self.rank, "failure", text, here - 1, self.limit))
        except RuntimeError:
            pass  # rank 0 has gone


def check_collectives(world: World) -> str:
    """Names those of three collectives that give wrong numbers on this rank."""
    size, base = world.world_size, torch.arange(100_000, dtype=torch.float64, device=world.device)
    reduced, sent = base + world.rank, base * (world.rank == size - 1)
    gathered = [torch.empty_like(base) for _ in range(size)]
    dist.all_gather(gathered, reduced)
    dist.all_reduce(reduced)
    dist.broadcast(sent, src=size - 1)
    right = {"all_reduce": torch.equal(reduced, size * base + size * (size - 1) // 2),
             "broadcast": torch.equal(sent, base),
             "all_gather": all(torch.equal(part, base + rank) for rank, part in enumerate(gathered))}
    return " and ".join(name for name, fine in right.items() if not fine)


def clock_offset(world: World, group) -> float:
    """Seconds that this rank's clock is ahead of rank 0's: of five round trips, the middle of the fastest."""
    offset, fastest = 0.0, float("inf")
    for rank in range(1, world.world_size):
        for _ in range(5 if world.rank in (0, rank) else 0):
            theirs = torch.zeros(1, dtype=torch.float64)
            if world.rank == 0:
                dist.recv(theirs, rank, group)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), rank, group)
                continue
            begun, wall = time.perf_counter(), time.time()
            dist.send(theirs, 0, group)
            dist.recv(theirs, 0, group)
            if (took := time.perf_counter() - begun) < fastest:
                fastest, offset = took, wall + took / 2 - theirs.item()
    return offset


def on_all_ranks(value: float, world: World) -> list[float]:
    values = torch.zeros(world.world_size, dtype=torch.float64, device=world.device)
    values[world.rank] = value
    dist.all_reduce(values)
    return values.tolist()


def all_reduce_seconds(nbytes: int, repetitions: int, world: World) -> float:
    """Median over the repetitions, of the slowest rank."""
    buffer, times = torch.zeros(nbytes // 4, device=world.device), []
    for _ in range(repetitions):
        world.synchronize()
        begun = time.perf_counter()
        dist.all_reduce(buffer)
        world.synchronize()
        times.append(time.perf_counter() - begun)
    return max(on_all_ranks(statistics.median(times), world))


def measure_network(world: World, limit: float) -> tuple[float, float]:
    """Latency in seconds, and seconds for each further byte, of an all-reduce. Prints what it finds."""
    for nbytes in (1_000, 1_000_000):
        all_reduce_seconds(nbytes, 2, world)  # connects
    found = {1_000: all_reduce_seconds(1_000, 21, world), 1_000_000: all_reduce_seconds(1_000_000, 7, world)}
    expected = 100 * found[1_000_000]  # of 100 MB; the same number on all ranks
    large = 100_000_000 if expected < limit / 2 else 10_000_000
    found[large] = all_reduce_seconds(large, max(1, min(5, int(5 * 1e8 / large / expected))), world)
    if world.main:
        for nbytes, seconds in found.items():
            wire = 2 * (world.world_size - 1) / world.world_size * nbytes * 8 / seconds / 1e9
            print(f"all_reduce of {nbytes / 1e6:5g} MB: {seconds * 1e3:9.2f} ms, {wire:7.3f} Gbit/s out of "
                  "each rank", flush=True)
        if large < 100_000_000:
            print("the network is too slow to send 100 MB in time, so 10 MB were sent")
    latency = found[1_000]
    return latency, max(found[large] - latency, 0) / large


# -----------------------------------------------------------------------------------------------------------
# Predictions


def build(kind: str, preset: dict, flags: tuple, device, **changes) -> tuple[torch.nn.Module, float]:
    """A model of this preset, or of one with changes, and its FLOPs for a token."""
    flags = {flag: preset[flag] for flag in flags if flag in preset} | changes
    if preset["data"] == "stdlib":  # bpe:4096, and [MASK]
        ids = 4097 if kind == "mlm" else 4096
        flags |= {"vocab_size": ids, "padded_vocab": pad_vocab(ids)}
    with torch.device(device):
        model = KINDS[kind](KINDS[kind].Config(**flags))
    return model, model.flops_per_token(*{"gpt2": (), "hrm": (BP_STEPS,), "mlm": (MASK_RATE,)}[kind])


def seconds_of_micro_batch(model, kind: str, batch: int, world: World, checkpointing: str) -> float:
    """Forward and backward, the median of three."""
    c = model.config
    for block in (m for m in model.modules() if isinstance(m, Block)):
        block.checkpointing = checkpointing
    model.compute_dtype = compute_dtype("auto", world.device)
    x = torch.randint(c.vocab_size - 1, (batch, c.seq_len), device=world.device)
    picked = torch.arange(max(1, round(MASK_RATE * c.seq_len)), device=world.device).expand(batch, -1)
    inputs = (x, picked, x.gather(1, picked)) if kind == "mlm" else (x, x)
    times = []
    for _ in range(4):
        world.synchronize()
        begun = time.perf_counter()
        model(*inputs, **{"bp_steps": BP_STEPS} if kind == "hrm" else {})[0].backward()
        world.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def measure_compute(kind: str, preset: dict, flags: tuple, world: World) -> tuple[float, str]:
    """FLOP/s that this rank reaches with this preset, and a note on how that was measured."""
    batch, changes = preset["batch"], {}
    if world.device.type == "cpu":  # one sequence in a few seconds, or a part of one in fewer layers
        a = torch.randn(1024, 1024)
        a @ a
        begun = time.perf_counter()
        a @ a
        budget = 3 * 2 * 1024**3 / (time.perf_counter() - begun)  # FLOPs of three seconds of matrix products
        for changes in ({}, *({"n_layer": 2, "seq_len": part} for part in (preset["seq_len"], 256, 64))):
            model, per_token = build(kind, preset, flags, "meta", **changes)
            if per_token * model.config.seq_len <= budget:
                break
        batch = max(1, min(batch, int(budget / (per_token * model.config.seq_len))))
    while True:
        try:
            model, per_token = build(kind, preset, flags, world.device, **changes)
            seconds = seconds_of_micro_batch(model, kind, batch, world, preset["checkpoint_activations"])
            break
        except torch.cuda.OutOfMemoryError:
            if batch == 1 and changes:
                raise
            batch, changes = max(1, batch // 2), {"n_layer": 2} if batch == 1 else {}
    c = model.config
    note = f"measured here: {batch} x {c.seq_len} tokens in {str(model.compute_dtype)[6:]}, not compiled"
    if changes:
        note += f", in a model of {c.n_layer} layers and scaled by FLOPs"
    return per_token * batch * c.seq_len / seconds, note


def predict(args, preset: dict, flags: tuple, world: World, latency: float, per_byte: float,
            flops: list[float], note: str) -> None:
    """Prints what a step of this preset takes in each way to communicate. flops: FLOP/s of all ranks."""
    model, per_token = build(args.model, preset, flags, "meta")
    tokens, parameters, low_rank = preset["global_batch"] * preset["seq_len"], num_params(model), 0
    for p in model.parameters():  # PowerSGD sends a matrix (n, m) as (n + m) * rank numbers if that is less
        n, m = p.shape[0], p[0].numel()  # than half
        low_rank += (n + m) * 4 if p.dim() > 1 and 2 * (n + m) * 4 < n * m else p.numel()
    compute = tokens / world.world_size * per_token / min(flops)
    buckets = 4 * parameters // BUCKET + 1
    print(f"train_{args.model}.py --size {args.size}: {parameters:,} parameters, {preset['global_batch']} "
          f"sequences of {preset['seq_len']} tokens a step\n{note}: {min(flops) / 1e9:,.1f} GFLOP/s on the "
          f"slowest rank, {max(flops) / 1e9:,.1f} on the fastest; compute {compute:.3f} s a step")
    for way, nbytes, messages, every in (
            ("--comm fp32", 4 * parameters, buckets, 1), ("--comm bf16", 2 * parameters, buckets, 1),
            ("--comm powersgd:4", 4 * low_rank, 3, 1), ("--outer-every 50", 2 * parameters, 1, 50)):
        network = (messages * latency + nbytes * per_byte) / every if world.world_size > 1 else 0
        step = compute + network
        print(f"{way:17} | {nbytes / 1e6:8,.1f} MB every {every:2} steps | network {network:8.3f} s | step "
              f"{step:8.3f} s | {tokens / step:9,.0f} tokens/s | efficiency {compute / step:6.1%}")
    print("assumed: nothing is sent while something is computed, so these are the slowest steps; left out: "
          "the optimizer, the arithmetic of PowerSGD, loading", flush=True)


# -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    flag = parser.add_argument
    flag("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="(auto: nccl on GPUs)")
    flag("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(auto: a GPU if any)")
    flag("--timeout", type=number(4), default=60, help="seconds until who is missing is named (60)")
    flag("--data", help="a prepared directory, which has to be the same on all machines")
    flag("--tokenizer", help="of --data, if that has no manifest")
    flag("--model", choices=KINDS, default="gpt2", help="whose --size (gpt2)")
    flag("--size", help="predict the speed of this preset of the trainer")
    args = parser.parse_args()
    trainer = importlib.import_module(f"train_{args.model}")
    if args.size and args.size not in trainer.SIZES:
        raise UserError(f"train_{args.model}.py has no --size {args.size}, but {', '.join(trainer.SIZES)}.")

    store, reports = meet(report_of(args), args.timeout)
    hosts, rank = [report["host"] for report in reports], int(os.environ.get("RANK", 0))
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a time-out then is an exception, not an abort
    limit = args.timeout / 2  # of each wait: one for the step, and one until the others have heard of it
    together = Together(store, hosts, rank, limit)
    world = together("the start of the process group", init, args.backend, args.device, limit)
    together.group = together("the start of a group for the CPUs", dist.new_group, None,
                              timedelta(seconds=limit), "gloo")

    wrong = together("all_reduce, broadcast and all_gather", check_collectives, world)
    answers = [""] * len(hosts)
    together("the comparison of results", dist.all_gather_object, answers, wrong, together.group)
    for rank, wrong in enumerate(answers):
        if wrong:
            raise RunError(f"{wrong} gave wrong numbers on rank {rank} ({hosts[rank]}): suspect its memory, "
                           "its network card, or peer-to-peer access of GPUs (try NCCL_P2P_DISABLE=1).")
    offset = together("the comparison of clocks", clock_offset, world, together.group)
    offsets = together("the comparison of clocks", on_all_ranks, offset, world)
    for rank, offset in enumerate(offsets):
        if abs(offset) > 1:
            raise UserError(f"the clock of rank {rank} ({hosts[rank]}) is {abs(offset):.1f} s "
                            f"{'ahead of' if offset > 0 else 'behind'} that of rank 0 ({hosts[0]}): let all "
                            "machines keep time, `sudo timedatectl set-ntp true`.")
    if world.main:
        print(f"collectives are right, clocks within {max(offsets) - min(offsets):.3f} s", flush=True)
    network = together("the measurement of the network", measure_network, world, limit)
    if args.size:
        preset, flags = trainer.SIZES[args.size], trainer.MODEL_FLAGS
        flops, note = measure_compute(args.model, preset, flags, world)
        flops = together("the comparison of speeds", on_all_ranks, flops, world)
        if world.main:
            predict(args, preset, flags, world, *network, flops, note)
    together("the end", lambda: None)
    if world.main:
        print("OK", flush=True)


if __name__ == "__main__":
    run(main)

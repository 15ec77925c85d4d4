"""Checks a cluster before a long run, and measures its network. Ends with OK, or with an error.

    torchrun --nproc_per_node=8 test_ddp.py                                    # one machine
    cluster/ddp_launch.sh test_ddp.py --data shards/stdlib-bpe4096                    # on each of several
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python test_ddp.py     # without torchrun

All ranks first compare software, devices and data, because unequal ranks would only hang. Then they join one
process group, take every step together, and measure how long gradients take on this network. The trainers'
--dry-run is here, too.
"""

import hashlib
import json
import os
import platform
import re
import statistics
import timeit
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ddp_utils
from data import (
    ROOMS,
    ArgumentParser,
    Dataset,
    UserError,
    expected_ids,
    first_line,
    flag_group,
    room,
    say,
    sources_of,
)
from ddp_utils import (
    HOST,
    SHARDED,
    STRATEGIES,
    RunError,
    World,
    compute_dtype,
    flags_of_model,
    from_all,
    hardware,
    init,
    launch,
    number,
    on_all,
    plan_batch,
    refuse_lone_tasks,
    use_device,
)
from model import LOSS_ROWS, blocks_of, hidden_matrices, num_params, pad_vocab

SHOWN = ("backend", "python", "torch", "nccl", "code", "data")

# -----------------------------------------------------------------------------------------------------------
# Before there is a process group


def report_of(args: Namespace, device: torch.device, backend: str) -> dict:
    """This rank's software, device and data. `wrong` is a sentence, or empty."""
    beside = Path(__file__).resolve().parent
    files = [*beside.glob("*.py"), *(path for room in ROOMS for path in beside.glob(f"{room}/*.py"))]
    code = b"".join(path.read_bytes() for path in sorted(files))
    report = {"host": HOST, "world size": os.environ.get("WORLD_SIZE", "1"), "device": device.type,
              "backend": backend, "python": platform.python_version(), "torch": torch.__version__}
    report |= {"code": hashlib.sha256(code).hexdigest()[:12]}
    report |= {"nccl": "none", "data": "not compared", "gpu": "", "uuid": "", "wrong": ""}
    if device.type == "cuda":
        report |= {"gpu": hardware(device), "uuid": str(torch.cuda.get_device_properties(device).uuid)}
        if dist.is_nccl_available():
            report["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    plain = None
    with room("prepare"):
        from prepare.llm_c import manifest_of_plain_shards as plain
    try:
        if args.data:
            report["data"] = Dataset([Path(args.data)], 1, args.tokenizer, plain=plain).fingerprint[:12]
    except UserError as error:
        report["wrong"] = str(error)
    return report


def problem_in(reports: list[dict]) -> str:
    """The first problem in the reports of all ranks, and how to fix it; empty if there is none."""
    names = [f"rank {rank} ({report['host']})" for rank, report in enumerate(reports)]
    for name, report in zip(names, reports):
        if report["wrong"]:
            return f"{name}: {report['wrong']}"
    for what, way_out in {
            "world size": "give all the same WORLD_SIZE",
            "device": "see whether nvidia-smi works there, or give all the same --device",
            "backend": "give all the same --backend",
            "python": "install the same version everywhere",
            "torch": "install the same torch everywhere, such as -c .ci/constraints.txt",
            "nccl": "install the same build of torch everywhere",
            "code": "copy the same version of the trainers to every machine",
            "data": "copy the same files to every machine, or prepare them there as on the others"}.items():
        values = [report[what] for report in reports]
        if what == "python":
            values = [value.rpartition(".")[0] for value in values]  # 3.11.2 and 3.11.9 count as equal
        usual = statistics.mode(values)  # the first of the most frequent
        for name, value in zip(names, values):
            if value != usual:
                other = names[values.index(usual)]
                return f"{what} is {value} on {name}, but {usual} on {other}: {way_out}."
    owner = {}
    for name, uuid in zip(names, (report["uuid"] for report in reports)):
        if uuid and owner.setdefault(uuid, name) != name:
            return (f"{owner[uuid]} and {name} use the same GPU: start with torchrun, or set LOCAL_RANK to "
                    "0, 1 and so on, on each machine.")
    return ""


def compare(report: dict):
    """Prints and compares the reports of all ranks. A problem raises UserError on all ranks."""
    heartbeat = ddp_utils.heartbeat
    reports = [report]
    if heartbeat:
        keys = [f"report {rank}" for rank in range(heartbeat.world_size)]
        on_all(heartbeat.call, heartbeat.store.set, keys[heartbeat.rank], json.dumps(report))
        reports = [json.loads(text) for text in heartbeat.call(heartbeat.store.multi_get, keys)]
    if not heartbeat or heartbeat.rank == 0:
        for rank, found in enumerate(reports):
            versions = ", ".join(f"{what} {found[what]}" for what in SHOWN)
            say(f"rank {rank}: {found['host']}, {found['device']} {found['gpu']}; {versions}")
    verdict = problem_in(reports)
    if heartbeat:  # rank 0 decides, because a rank with another WORLD_SIZE has seen other reports
        if heartbeat.rank == 0:
            heartbeat.call(heartbeat.store.set, "verdict", verdict)
        verdict = heartbeat.call(heartbeat.store.get, "verdict").decode()
    if verdict:
        raise UserError(verdict)


# -----------------------------------------------------------------------------------------------------------
# Together


def step(what: str, function, *args):
    """Returns function(*args), which all ranks call. RunError names the failed step and the cause."""
    try:
        return function(*args)
    except RuntimeError as error:
        if not ddp_utils.heartbeat:
            raise
        raise RunError(f"{what} failed: " + (ddp_utils.heartbeat.ask() or (
            f"{first_line(error)}, though all ranks are alive: all machines must reach each other at every "
            "port, so open the firewall between them, and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to "
            "the network card that leads there (`ip -4 addr`)."))) from None


def check_collectives(world: World) -> str:
    """The names of the collectives, of three, that give wrong numbers on this rank."""
    size = world.world_size
    base = torch.arange(100_000, dtype=torch.float64, device=world.device)
    reduced = base + world.rank
    sent = base * (world.rank == size - 1)
    gathered = [torch.empty_like(base) for _ in range(size)]
    dist.all_gather(gathered, reduced)
    dist.all_reduce(reduced)
    dist.broadcast(sent, src=size - 1)
    right = {"all_reduce": torch.equal(reduced, size * base + size * (size - 1) // 2)}
    right["broadcast"] = torch.equal(sent, base)
    right["all_gather"] = all(torch.equal(part, base + rank) for rank, part in enumerate(gathered))
    return " and ".join(name for name, fine in right.items() if not fine)


def all_reduce_seconds(nbytes: int, repetitions: int, world: World) -> float:
    """The slowest rank's median over the repetitions, after a first call, which connects or allocates."""
    buffer = torch.zeros(nbytes // 4, device=world.device)

    def until_done():
        dist.all_reduce(buffer)
        world.synchronize()

    until_done()
    return max(from_all(statistics.median(timeit.repeat(until_done, number=1, repeat=repetitions))))


def measure_network(world: World, limit: float):
    """Prints how long all-reduces take, and so the gradients of a model in each step."""
    found = {1_000: all_reduce_seconds(1_000, 21, world), 1_000_000: all_reduce_seconds(1_000_000, 7, world)}
    expected = 100 * found[1_000_000]  # for 100 MB; the same on all ranks
    large = 100_000_000 if expected < limit / 2 else 10_000_000
    found[large] = all_reduce_seconds(large, max(1, min(5, int(5 * 1e8 / large / expected))), world)
    if world.is_rank0:
        for nbytes, seconds in found.items():
            wire = 2 * (world.world_size - 1) / world.world_size * nbytes * 8 / seconds / 1e9
            say(f"all_reduce of {nbytes / 1e6:5g} MB: {seconds * 1e3:9.2f} ms, {wire:7.3f} Gbit/s out of "
                "each rank")
        if large < 100_000_000:
            print("the network is too slow to send 100 MB in time, so 10 MB were sent")
        say(f"so the gradients of each 100 M parameters take {4e8 * found[large] / large:.3g} s of a step, "
            "with --comm bf16 half of that, and with --comm late a quarter, during the next step; a larger "
            "--global-batch sends them less often")


# -----------------------------------------------------------------------------------------------------------
# --dry-run of the trainers: how much memory each process would need


class _Alive(TorchDispatchMode):
    """Records the storage of each computed tensor, in compiled blocks too, without keeping it alive."""

    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)  # otherwise Dynamo compiles nothing in a mode

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return result


def activation_bytes(loss, others) -> int:
    """Bytes that stay in memory for the backward pass of loss(), not counting the tensors `others`."""
    known = {StorageWeakRef(t.untyped_storage()) for t in others}
    with _Alive() as alive:
        kept = loss()
    found = sum(n for storage, n in alive.sizes.items() if storage not in known and not storage.expired())
    del kept
    return found


def kept_for_backward(model_class: type, config, device: torch.device, dtype: torch.dtype,
                      checkpointing: str, inputs: dict, compiled: bool) -> int:
    """Bytes of activations that the backward pass of a model needs, counted on tensors that have a shape but
    no memory. `inputs` are the arguments of forward; only their types and shapes matter. With `compiled`,
    counts what compiled blocks keep; they recompute cheap operations in any mode.
    """
    if hasattr(config, "dropout"):  # attention with dropout keeps T x T probabilities, but only on CPUs
        config = replace(config, dropout=0.0)
    with torch.device("meta"):
        model = model_class(config)
    # nothing is computed, so the loss need not be split into rows that fit a cache
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch("model.LOSS_CACHE", 2**40):
        model.to_empty(device="cpu")
        # splits forward and backward as Inductor does, but without its kernels
        compiling = {"backend": "aot_eager_decomp_partition"} if compiled else {}
        use_device(model, device, dtype, checkpointing, **compiling)
        model.compile_loss = False
        inputs = {name: torch.zeros_like(value, device="cpu") if isinstance(value, Tensor) else value
                  for name, value in inputs.items()}
        return activation_bytes(lambda: model(**inputs)[0], [*model.parameters(), *model.buffers()])


def memory_of(model: nn.Module, strategy: str, args: Namespace, processes: int,
              activations: int) -> dict[str, float]:
    """Peak bytes in each process, by type, with `strategy` instead of --strategy. zero2 and zero3 hold their
    shards, gathered parameters, and the gradients of one block and of parameters outside blocks. zero2
    gathers all parameters, zero3 those of two blocks (one is prefetched) and those outside blocks. With the
    other strategies, the largest gradient exists twice for a while, as parts from embedding and head, and
    before there is optimizer state, `warm_up` holds each gradient twice.
    """
    largest_one = 4 * max(p.numel() for p in model.parameters())
    blocks = [4 * num_params(block) for block in blocks_of(model)]
    everything = 4 * num_params(model)
    outside = everything - sum(blocks)
    block = max(blocks, default=0)
    state = 2 * everything  # AdamW keeps two numbers per parameter, Muon one
    if args.optimizer == "muon":
        state -= 4 * sum(p.numel() for p in hidden_matrices(model))
    sharded = strategy in SHARDED
    offload = strategy == "zero3-offload"
    held = 0 if offload else everything / (processes if sharded else 1)
    gathered = (everything if strategy == "zero2" else outside + 2 * block) if sharded else 0
    optimizer = 0 if offload else state if strategy == "ddp" else state / processes
    again = max(largest_one, everything - optimizer)
    gradients = held + (outside + block if sharded else again)
    averaged = (args.ema > 0) * held
    late = 2 * everything * (strategy == "ddp" and args.comm == "late")  # the next gradient, the last move
    return {"parameters": held + gathered, "gradients": gradients + late, "optimizer": optimizer,
            "other": averaged + late, "activations": activations}  # the first late: copies


def pinned_bytes(model: nn.Module, args: Namespace) -> int:
    """Bytes of host memory that rank 0 pins for its copies of what a checkpoint holds, if that lies on a GPU.
    torch rounds each up to a power of two.
    """
    def rounded(numbers: int) -> int:
        return 1 << (4 * numbers - 1).bit_length()

    muon = {*hidden_matrices(model)} if args.optimizer == "muon" else ()
    each = {p: 2 + (p not in muon) + (args.ema > 0) for p in model.parameters()}
    late = 2 * rounded(num_params(model)) if args.comm == "late" else 0
    return late + sum(count * rounded(p.numel()) for p, count in each.items())


def logits_bytes(inputs: dict, padded_vocab: int, dtype: torch.dtype, compiled: bool) -> int:
    """Bytes of logits that the loss of model(**inputs) holds at a time on a GPU."""
    rows = inputs["labels" if "labels" in inputs else "targets"].numel()
    logits = min(rows, LOSS_ROWS["cuda"]) * padded_vocab * dtype.itemsize
    return logits if compiled else logits + 12 * min(rows, 4096) * padded_vocab  # some of them in float32


USABLE = {"cuda": 0.92, "cpu": 0.85}  # of a process's memory; the rest: libraries, fragmentation


def fits(held: dict[str, float], gigabytes: float, device: torch.device) -> bool:
    return sum(held.values()) / 1e9 <= USABLE[device.type] * gigabytes


def empty_model(model_class: type, args: Namespace) -> nn.Module:
    """The model that the flags of a trainer ask for, on the meta device."""
    ids = args.vocab_size or pad_vocab(expected_ids(sources_of(args.data)[0], args.tokenizer))
    flags = flags_of_model(model_class.Config, args)
    with torch.device("meta"):
        return model_class(model_class.Config(vocab_size=ids, padded_vocab=ids, **flags))


def dry_run(model_class: type, args: Namespace, **example):
    """--dry-run: prints the memory that each process would need with each strategy, and whether it fits."""
    if int(os.environ.get("RANK") or 0) > 0:
        return
    processes, gigabytes = machine(args.dry_run, args.device)
    _, batch, _ = plan_batch(processes, args.global_batch, args.batch, args.grad_accum, args.wanted_batch,
                             args.largest_batch)
    model = empty_model(model_class, args)
    precision = "bf16" if args.precision == "auto" else args.precision
    dtype = compute_dtype(precision, torch.device("cpu"))
    gpus = bool(args.dry_run) or args.device != "cpu" and torch.cuda.is_available()
    compiled = gpus if args.compile is None else args.compile
    inputs = model.example(batch, "meta", **example)
    mode = args.checkpoint_activations
    device = torch.device("cuda" if gpus else "cpu")
    activations = logits_bytes(inputs, model.config.padded_vocab, dtype, compiled)
    without = ""
    try:
        activations += kept_for_backward(model_class, model.config, device, dtype, mode, inputs, compiled)
    except Exception as error:  # such as shapes that depend on the data
        without = " without the activations of blocks"
        print(f"WARNING: activations of blocks are not counted ({first_line(error)}), so leave room for them")
    what = f"{model_class.__name__} of {num_params(model):,} parameters"
    how = f"{precision}, compile {'on' if compiled else 'off'}, activation checkpointing {mode}"
    print(f"{what}, {processes} processes with {gigabytes:.0f} GB each, micro-batches of {batch} x "
          f"{args.seq_len}, {how}; in GB:")
    table = {strategy: memory_of(model, strategy, args, processes, activations)
             for strategy in STRATEGIES}
    fitting = [strategy for strategy, held in table.items() if fits(held, gigabytes, device)]
    print(f"{'--strategy':20}" + "".join(f"{part:>13}" for part in (*table["ddp"], "together")))
    for strategy, held in table.items():
        numbers = "".join(f"{n / 1e9:13.2f}" for n in (*held.values(), sum(held.values())))
        print(f"{strategy:20}{numbers}  {'fits' if strategy in fitting else 'does not fit'}")
    file = sum(table["ddp"][part] for part in ("parameters", "optimizer", "other")) / 1e9
    copies = pinned_bytes(model, args) / 1e9 if gpus else file
    print(f"a checkpoint is {file:.2f} GB: {(args.keep_last + 2) * file:.1f} GB of disk for --keep-last "
          f"{args.keep_last}, the best and the one being written, and {copies:.2f} GB of rank 0's host "
          "memory")
    chosen = args.strategy
    one = table[chosen] | {"activations": activations // batch}
    ways = ["a smaller --batch"] * (batch > 1 and fits(one, gigabytes, device))
    ways += [f"--strategy {strategy}" for strategy in fitting] or ["more processes"]
    ways += ["--checkpoint-activations block"] * (mode != "block")
    print(f"--strategy {chosen} "
          + (f"fits{without}." if chosen in fitting else f"does not fit: use {' or '.join(ways)}."))


def machine(text: str, device: str) -> tuple[int, float]:
    """Processes and GB of memory for each: '8x141' → (8, 141.0), '' → those that torchrun started here."""
    if text:
        match = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", text)
        if not match:
            raise UserError(f"--dry-run {text} is not GPUs and the GB of each, such as 8x141.")
        return int(match[1]), float(match[2])
    if device != "cpu" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        total /= int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return int(os.environ.get("WORLD_SIZE") or 1), total / 1e9


# -----------------------------------------------------------------------------------------------------------


def main():
    parser = ArgumentParser(description=__doc__)
    flag = flag_group(parser, "the check")
    flag("--backend", ("auto", "nccl", "gloo"), "auto: nccl on GPUs", "auto")
    flag("--device", ("auto", "cuda", "cpu"), "auto: a GPU if there is one", "auto")
    flag("--timeout", number(4), "seconds until who is missing is named", 60)
    flag("--data", str, "a prepared directory, which has to be the same on all machines")
    flag("--tokenizer", str, "of --data, if that has no manifest")
    args = parser.parse_args()

    refuse_lone_tasks()
    world = step("the start of the process group", init, args.backend, args.device, args.timeout,
                 lambda *device: compare(report_of(args, *device)))

    wrong = step("all_reduce, broadcast and all_gather", check_collectives, world)

    def judge():
        if wrong:
            raise RunError(f"{wrong} gave wrong numbers on rank {world.rank} ({HOST}): suspect "
                           "its memory, its network card, or peer-to-peer access of GPUs (try "
                           "NCCL_P2P_DISABLE=1).")

    on_all(judge)
    if world.is_rank0:
        say("collectives are right")
    step("the measurement of the network", measure_network, world, args.timeout / 2)
    say(f"rank {world.rank} on {HOST}: all right, on {hardware(world.device)}")
    for _ in range(2):  # an NCCL collective that times out returns, and the next one raises
        step("the end", dist.barrier)
    if world.world_size == 1:
        say("this process is alone, so no network was checked: start this on all machines with "
            "cluster/ddp_launch.sh, or on one with torchrun")
    if world.is_rank0:
        say("OK")


if __name__ == "__main__":
    launch(main)

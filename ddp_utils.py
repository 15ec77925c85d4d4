"""Distributed training: how processes start, agree, train, save, resume and end. In the order of a run:

    start and end       launch(main), init: join the process group, end without hanging
    devices             choose_device: a GPU for each process, and the backend
    agreement           run_and_wait, on_rank0, sums over ranks, comparisons of ranks
    the record of a run Run, which startup/run.py fills
    models on ranks     build_model: replicated or sharded; set_modes: precision, recomputing, compiling
    training state      TrainState: clips gradients, steps the optimizer, yields the tensors of a checkpoint
    checkpoints         Checkpoints writes and restores them, find_checkpoint in startup/run.py chooses one;
                        RunLock keeps other runs out of the directory
    around a step       start_run, due_after, StopVote (Ctrl-C, signals), Metrics, evaluate, sample, end_run

Loader and plan_batch in data.py decide which rank gets which samples.

The trainers call them in this order: see main() in train_gpt2.py. One rule holds everywhere: all ranks call
the same collectives in the same order.
"""

import contextlib
import errno
import functools
import gc
import inspect
import json
import logging
import math
import operator
import os
import re
import shutil
import signal
import statistics
import sys
import time
import warnings
import zipfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad, Adam, AdamW
from torch.optim.optimizer import Optimizer

import monitor
from cli.errors import (
    HOST,
    RetryableError,
    RunError,
    UserError,
    access,
    at_end,
    first_line,
    from_launcher,
    listed,
    local_rank,
    names_in,
    say,
)
from cli.flags import SHARDED
from cluster.diagnosis import WHEN_CUT_OFF, explain
from cluster.heartbeat import join
from cluster.late import Late
from data import (
    Dataset,
    cpu_count,
    fsync_directory,
    lock_file,
    replacing,
    validation_batches,
    why_not_made,
)
from loggers.machine import combined, machine_curves, memory_gb
from model import blocks_of, compute_dtype, copied_buffers, first_values, use_device
from ops.device import compiles, keep_freed_memory, use_libdevice_of_triton
from ops.ema import EMA, local_shard
from vocab.vocabulary import tokenizer_of_run

SYNC_EVERY = 200  # steps between comparisons of the parameters across ranks; each save compares them, too
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU)
# Silence its warning about in-place operations in selectively checkpointed code: our blocks have none.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


# -----------------------------------------------------------------------------------------------------------
# Start and end


def ending_of(error: BaseException) -> tuple[int, str, str]:
    """For the error that ended main(), returns the exit code, the text that this process prints, and the
    reason that the other ranks print. Prints the traceback of an unforeseen error, unless `explain` knows
    its cause.
    """
    if isinstance(error, SystemExit):  # from --help
        return error.code or 0, "", ""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped", "it was stopped by Ctrl-C."
    if isinstance(error, BrokenPipeError):  # fine for `--dry-run | head`, a failure for a run
        running = dist.is_initialized()
        return int(running), "error: standard output is closed." * running, "its standard output was closed."
    if isinstance(error, UserError | RunError):
        return error.exit_code, f"error: {error}", str(error)
    if ending := explain(error, heartbeat, show_traceback):
        return ending
    show_traceback(error)
    return 1, "", first_line(error)


def show_traceback(error: BaseException):
    sys.excepthook(type(error), error, error.__traceback__)
    get_error_handler().record_exception(error)  # for torchrun's own report


launched = None  # the main() that `launch` runs; the process ends after it


def launch(main):
    """Runs main() and ends the process with one of these exit codes:

        0      success
        1      a failure, or a RetryableError
        2      any other UserError, or a missing compiler
        130    Ctrl-C

    It calls os._exit, because torch's C++ threads can abort a process while Python tears it down.
    """
    global launched
    launched = main
    get_error_handler().initialize()
    # After the soft CPU limit the kernel sends SIGXCPU every second, so StopVote will see a later one.
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    try:
        with access():
            main()
        code, text, reason = 0, "", ""
    except BaseException as error:
        code, text, reason = ending_of(error)
    at_end.exit_code = code
    unwritten = one_has_failed() and Checkpoints.unwritten
    # When one process fails, torchrun sends signals to the others. While a checkpoint is being written, they
    # must not end this one. SIGXCPU, the last in the list, never does.
    for signum in STOP_SIGNALS[:-1]:
        signal.signal(signum, signal.SIG_IGN if unwritten else signal.SIG_DFL)
    if text and (code != 130 or local_rank() == 0):
        time.sleep(1.0 * (local_rank() > 0))  # if local rank 0 fails too, torchrun ends this process here
        print(text, file=sys.stderr, flush=True)
    if heartbeat:  # first, because at_end.close() may wait for a checkpoint
        heartbeat.stop(reason)
    at_end.close()
    if code == 0:  # this can hang after a failure
        leave_group(sys.excepthook)
    with suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()  # stderr is line-buffered
    os._exit(code)


def cleanup_on_exit(main):
    """Lets a notebook call main() more than once. When main() ends, everything that it started ends, and the
    previous signal handlers return.

    If one of several processes has failed, the process group stays, because destroying it can hang. The
    signal handlers stay, too, because torchrun then sends signals.
    """
    @functools.wraps(main)
    def run(argv: list[str] | None = None):
        if launched is run:  # `launch` cleans up
            return main(argv)
        handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        if not dist.is_initialized():  # a group that the caller has created stays
            at_end.callback(leave_group, sys.excepthook)
        at_end.exit_code = 0
        try:
            main(argv)
        except BaseException:
            at_end.exit_code = 1
            raise
        finally:
            if not one_has_failed():
                for signum, handler in handlers.items():
                    signal.signal(signum, handler)
            at_end.close()

    return run


def one_has_failed() -> bool:
    """Whether this process ends with an error, and isn't the only process of the run."""
    return at_end.exit_code > 0 and dist.is_initialized() and dist.get_world_size() > 1


def leave_group(excepthook):
    """Destroys the process group, unless that can hang, and restores `excepthook`, which init_process_group
    has replaced.
    """
    if dist.is_initialized() and not one_has_failed():
        if heartbeat:
            heartbeat.stop("")
        gc.collect()  # models and optimizers left over from main() keep the process group alive
        dist.destroy_process_group()
        sys.excepthook = excepthook


def leave_at_once(number, frame):
    """The handler of Ctrl-C while torch compiles or counts FLOPs. It ends the process, because torch can lose
    an exception there.
    """
    if local_rank() == 0:
        os.write(2, b"\nstopped\n")
    os._exit(130)


@dataclass(frozen=True)
class World:
    """This process's place among all processes, as torchrun numbers them."""

    rank: int
    world_size: int
    local_rank: int
    node: str
    nodes: int
    device: torch.device
    backend: str

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def prefix(self) -> str:
        return f"[Rank {self.rank}/{self.world_size} | Node {self.node} | Device {self.device}]"

    def synchronize(self):
        """Waits until the device has finished its work."""
        torch.get_device_module(self.device).synchronize()


def init(backend: str = "auto", device: str = "auto", timeout: float = 600, compare=None,
         fast: bool | None = False) -> World:
    """Joins the process group that torchrun describes, or creates one with a single process.

    A collective fails after `timeout` seconds. With `fast`, sums may round differently after a new start.
    compare(device, backend) runs before the process group is created; use it to find differences that would
    make the group hang. Raises UserError on all ranks if one of them lacks the device.
    """
    global heartbeat
    env = os.environ
    by_torchrun = {"RANK", "WORLD_SIZE"} & env.keys()
    if "GLOO_SOCKET_IFNAME" not in env:  # the next run in a notebook may need another network card
        at_end.callback(env.pop, "GLOO_SOCKET_IFNAME", None)
    rank, world_size, store = 0, 1, dist.HashStore()
    if by_torchrun:
        rank, world_size, store, heartbeat = join(timeout)
        if heartbeat:
            heartbeat.wait_for_all()
    local_world_size = from_launcher("LOCAL_WORLD_SIZE", 1)
    where, backend = run_and_wait(choose_device, backend, device, local_world_size)
    if compare:
        compare(where, backend)
    if heartbeat:
        heartbeat.refuse_other_backends(backend)
    gpu = None
    if where.type == "cuda":
        gpu = where
        torch.cuda.set_device(gpu)
        use_libdevice_of_triton()
    else:
        keep_freed_memory()
        if "OMP_NUM_THREADS" not in env or env["OMP_NUM_THREADS"] == "1" and local_world_size > 1:
            # torchrun's default of OMP_NUM_THREADS=1 leaves most cores idle
            torch.set_num_threads(max(1, cpu_count() // local_world_size))
    if not by_torchrun:  # gloo opens a port even for one process; keep it local
        env.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # By default (3; torchrun sets 1) a collective that times out aborts the process before Python can say
    # why. With 2 it aborts only the communicator: the collective returns garbage, and the next one raises.
    # There is always a next one before a checkpoint is written.
    env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    # After a new start NVSwitches may add up in another order (NCCL issues 1497 and 2360), so a resumed run
    # on eight GPUs would differ from an uninterrupted one. NCCL reads this variable once per process.
    if not fast:
        env.setdefault("NCCL_NVLS_ENABLE", "0")
    # In ms. Before it aborts, NCCL's watchdog waits four times this long for debug reports that we don't use.
    env.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    connect(backend, lambda: dist.init_process_group(
        backend, store=dist.PrefixStore("process group", store), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=timeout), device_id=gpu))
    return World(rank, world_size, local_rank(), f"node{env.get('GROUP_RANK') or 0}",
                 from_launcher("GROUP_WORLD_SIZE", 1), where, backend)


def connect(backend: str, function):
    """Returns function(), which connects the ranks for the first time. Raises RunError if that fails, on this
    rank or another.
    """
    try:
        if backend == "gloo" and heartbeat:  # NCCL has to stay in the thread that has chosen the GPU
            return heartbeat.watch(function)
        return function()
    except RuntimeError as error:
        if heartbeat and heartbeat.ask():  # a rank was lost: ending_of will say which
            raise
        way = WHEN_CUT_OFF["alone" if backend == "gloo" and not heartbeat else backend]
        raise RunError(f"{backend} fails in its first collective ({first_line(error)}): {way}") from None


# -----------------------------------------------------------------------------------------------------------
# Devices


def choose_device(backend: str, device: str, local_world_size: int) -> tuple[torch.device, str]:
    """Returns this process's device and the backend. Raises UserError if the machine lacks either."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise UserError(f"no GPU is visible on {HOST}: leave --device out, or use --device cpu.")
    chosen = torch.device("cpu")
    if gpus and device != "cpu":
        if local_world_size > gpus:
            raise UserError(f"{local_world_size} processes on {HOST} with {gpus} GPUs: start torchrun with "
                            f"--nproc_per_node={gpus}, or use --device cpu.")
        chosen = torch.device("cuda", local_rank())  # each node numbers its GPUs from 0
        try:  # the first use of a GPU
            major, minor = torch.cuda.get_device_capability(chosen)
        except Exception as error:  # torch raises several types for a driver
            raise UserError(
                f"torch cannot use the GPU of {HOST} ({first_line(error)}): update its driver to 580 or "
                "newer and reboot (under WSL2 run `wsl --update` in Windows); to keep a driver from 525 to "
                "579 with a GPU up to RTX 40, run `pip uninstall torch` and then `pip install torch==2.13.0 "
                "--index-url https://download.pytorch.org/whl/cu126` (docs/clusters.md has a table of "
                "drivers); or use --device cpu.") from None
        built_for = re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))
        if built_for and 10 * major + minor < min(map(int, built_for)):
            raise UserError(f"{torch.cuda.get_device_name(chosen)} on {HOST} is too old for this build "
                            "of torch: install the build in the table of drivers in docs/clusters.md, or use "
                            "--device cpu.")
    has_nccl = chosen.type == "cuda" and dist.is_nccl_available()
    if backend == "nccl" and not has_nccl:
        raise UserError("--backend nccl needs GPUs and a torch with NCCL: use --backend auto.")
    if backend == "auto":  # don't just try nccl first: if it failed, its keys in the store would break gloo
        backend = "nccl" if has_nccl else "gloo"
    return chosen, backend


# -----------------------------------------------------------------------------------------------------------
# Agreement


heartbeat = None  # a Heartbeat (cluster/heartbeat.py) if there are several processes


def run_and_wait(function, *args):
    """Returns function(*args) on every rank, however long it takes, once it has ended on all of them. If it
    raises on one rank, the others raise a UserError with the same exit code, so no rank waits for the failed
    one.
    """
    return heartbeat.run_and_wait(function, *args) if heartbeat else function(*args)


def on_rank0(function, *args):
    """Runs function(*args) on rank 0 only, and returns the result on all ranks. If it raises there, the
    others raise a UserError.
    """
    answer = [run_and_wait(lambda: function(*args) if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def all_gather(value) -> list:
    """Returns the value of each rank, on all ranks. The values get pickled, so keep them small and plain."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def reduce_sum(values: list, world: World) -> list[float]:
    """Sums each of a few numbers (floats or scalar tensors) over all ranks, in one float64 all-reduce."""
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in values])
    dist.all_reduce(packed)
    return packed.tolist()


def async_sum(value: float, world: World):
    """Starts summing a number over all ranks. Returns a function that waits for the sum and returns it as a
    float64 scalar on the device. On a GPU only the device waits, not the host.
    """
    # torch.tensor would copy the value to the GPU, and wait for it
    total = torch.full((), value, dtype=torch.float64, device=world.device)
    under_way = dist.all_reduce(total, async_op=True)

    def wait() -> Tensor:
        under_way.wait()
        return total

    return wait


def find_mismatch(values: list) -> tuple[int, int] | None:
    """Compares each of these plain values across ranks. Returns the index of the first one that differs, and
    the first rank whose value isn't the most common one; None if all are equal.
    """
    for index, of_ranks in enumerate(zip(*all_gather(values))):
        if len(set(of_ranks)) > 1:
            usual = statistics.mode(of_ranks)  # in a tie, the value of the lower rank
            return index, next(rank for rank, value in enumerate(of_ranks) if value != usual)
    return None


def assert_same(what: str, text: str, way_out: str):
    """Raises UserError if `text` isn't the same on all ranks, and names the first rank that differs."""
    if odd := find_mismatch([text]):
        raise UserError(f"{what} on rank {odd[1]} differs from the other ranks: {way_out}.")


def bit_sum(tensor: Tensor) -> Tensor:
    """Sums the bits of a tensor, read as integers, to an int64 scalar. One flipped bit changes the sum."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(integers)
    if bits.device.type == "cpu":  # numpy is ten times faster than torch, even if torch uses all cores
        return torch.tensor(bits.numpy().sum(dtype=np.int64))
    return bits.sum(dtype=torch.int64)


def assert_in_sync(model: nn.Module, begun: bool = True):
    """Compares unsharded parameters and persistent buffers across ranks, bit for bit. Raises RunError if they
    differ. `begun` says whether training has begun; before that, only the trainer can have changed them.
    """
    tensors = {name: t for name, t in model.state_dict().items() if not isinstance(t, DTensor)}
    buffers = dict(model.named_buffers())
    names = sorted(tensors, key=lambda name: name in buffers)  # parameters first
    if names and (odd := find_mismatch(torch.stack([bit_sum(tensors[name]) for name in names]).tolist())):
        name = names[odd[0]]
        cause = ("check the memory and the libraries of that node (different processors round differently: "
                 "with --optimizer muon they need --strategy zero1); the last checkpoint was in sync.")
        if name in buffers:  # all parameters are the same, so this buffer was the first to differ
            cause = ("forward updates this buffer from the data of its own rank: sum the update over all "
                     "ranks with torch.distributed.all_reduce.")
        if not begun:
            cause = ("this is before the first step, so the trainer changed it after new_model, and not in "
                     "the same way on all ranks: draw random numbers with torch's own generator, which "
                     "new_model leaves in the same state on all ranks, or with ddp_utils.generator.")
        raise RunError(f"{name} on rank {odd[1]} differs from the other ranks (Sync=FAILED): {cause}")


def say_elsewhere(world: World, text: str):
    """Prints `text` once on each node except rank 0's. Otherwise those nodes would print nothing."""
    if world.local_rank == 0 and not world.is_rank0:
        say(f"{world.prefix} {text}")


# -----------------------------------------------------------------------------------------------------------
# The record of a run


@dataclass
class Run:
    """A run that starts, resumes, or is only used (--eval-only, --prompt, …). find_run in startup/run.py
    creates it; load_data and open_run complete it. A trainer may set `metric` and `change_data`.
    """

    model_class: type
    world: World
    trainer: Path  # the file of the trainer
    command: str  # the command that started it
    constants: dict  # the trainer's constants, by name
    args: Namespace  # all flags, and the batch sizes from `settle`
    row: dict  # the row of SIZES for --size
    given: dict  # flags in this command and, until there is a checkpoint, in the run's earlier commands
    out: Path
    saved: dict | None  # the checkpoint to resume or use
    began: str  # when it began, and a random number: an id that branches of the run share
    metric: Callable | None = None  # computes other numbers than the loss, see evaluate
    change_data: Callable | None = None  # changes the Dataset, see load_data
    flops_factor: float = 1.0  # FLOPs of a step / FLOPs of a training pass of the model alone
    dataset: Dataset | None = None  # load_data sets it
    steps: int = 0  # open_run sets this and the following ones
    global_batch: int = 0  # sequences per step, over all processes
    batch: int = 0  # sequences per micro-batch
    grad_accum: int = 0  # micro-batches per step, on each process
    checkpoints: "Checkpoints | None" = None
    text: monitor.TrainLog | None = None  # train.log and the screen

    def say(self, text: str):
        """Prints `text` and appends it to train.log, on rank 0."""
        self.text.say(text)


# -----------------------------------------------------------------------------------------------------------
# Models on ranks: replicated or sharded


def build_model(model_class: type, config, world: World, strategy: str = "ddp",
                comm: str = "fp32") -> nn.Module:
    """Builds a model on this process's device, sharded if `strategy` says so. Parameters are uninitialized;
    buffers keep their initial values. Raises UserError if the model can't be built this way.

    Parameters are created on the meta device, without memory. So only rank 0, which has the weights, ever
    holds all of them in host memory.

    With `comm` bf16, FSDP gathers the parameters of blocks in bfloat16, to which the layers would cast them
    anyway, and sums their gradients in bfloat16, over the uses of a weight and over ranks. Some parameters
    outside of blocks are used in float32, so all of those are sent in float32.
    """
    def on_meta(module: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter:
        return p if p.is_meta else nn.Parameter(p.to("meta"), p.requires_grad)

    torch.manual_seed(0)  # so that random buffers are the same on all ranks, and in a resumed run
    with register_module_parameter_registration_hook(on_meta):
        model = model_class(config)
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(p, name)) != name:
            raise UserError(f"{first} and {name} of {model_class.__name__} are one parameter, which training "
                            "would split in two: register it once, and use it twice in forward.")
    buffers = {(module, name): buffer for module in model.modules()
               for name, buffer in module.named_buffers(recurse=False)}
    offload = strategy == "zero3-offload"
    if strategy in SHARDED:
        options = {"mesh": init_device_mesh(world.device.type, (world.world_size,)),
                   "reshard_after_forward": strategy != "zero2"}  # zero2 keeps parameters gathered
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        sent = {}
        if comm == "bf16":
            sent["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        for block in blocks_of(model):
            fully_shard(block, **options, **sent)
        fully_shard(model, **options)
        if strategy == "zero2":  # HRM calls its blocks several times; reshard() frees them once a step
            model.set_reshard_after_backward(False)
        if hasattr(model, "decode"):
            register_fsdp_forward_method(model, "decode")
    model.to_empty(device="cpu" if offload else world.device)
    for (module, name), buffer in buffers.items():
        if buffer.is_meta:
            raise UserError(f"the buffer {name} of {type(module).__name__.removeprefix('FSDP')} is made from "
                            "a parameter, which has no values while the model is being built: compute it in "
                            "forward.")
        setattr(module, name, buffer.to(world.device))
    return model


def reshard(model: nn.Module):
    """Frees the parameters that zero2 and zero3 have gathered. After an update they are stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def copy_from_rank0(tensor: Tensor, source: Tensor | None, world: World):
    """Copies `source`, which rank 0 has unsharded, into `tensor` on all ranks, sharded or not."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
    if world.is_rank0:
        full.copy_(source)
    dist.broadcast(full, src=0)
    if isinstance(tensor, DTensor):
        full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local_shard(tensor).copy_(local_shard(full))


def transfer(tensor: Tensor, source: int, target: int, world: World) -> Tensor | None:
    """Sends `tensor` from rank `source` to rank `target`. Returns it on `target`, and None elsewhere. On
    `target`, pass any tensor of the same shape and dtype.
    """
    device = "cpu" if world.backend == "gloo" else world.device  # gloo cannot send from a GPU
    if world.rank == source != target:
        dist.send(tensor.to(device), target)
    if world.rank == target != source:
        tensor = torch.empty_like(tensor, device=device)
        dist.recv(tensor, source)
    return tensor if world.rank == target else None


def copy_weights(model: nn.Module, weights: dict[str, Tensor], world: World):
    """Copies `weights` into the model on all ranks. Rank 0 has them, unsharded and by name."""
    for name, tensor in model.state_dict().items():
        copy_from_rank0(tensor, weights.get(name), world)


def assert_same_parameters(model: nn.Module, saved: dict):
    """Raises UserError on all ranks if the checkpoint and the model don't have the same parameter names."""
    if odd := model.state_dict().keys() ^ saved["tensors"]["model"].keys():
        raise UserError(f"{saved['path']} is from another version of this model (only one of them has "
                        f"{min(odd)}): use {code_trained_with(saved['path'])}, or train again in "
                        "another --out.")


def config_of(config_class: type, saved: dict, where):
    """Makes a config_class from the fields `saved` in the checkpoint `where`. Fields that it lacks get their
    defaults. Raises UserError for fields that the class no longer has.
    """
    known = {field.name for field in fields(config_class)}
    config = config_class(**{name: value for name, value in saved.items() if name in known})
    if unknown := sorted(saved.keys() - known):
        raise UserError(f"{where} sets {listed(unknown)}, which {config_class.__name__} does not know: use "
                        f"{code_trained_with(where)}, or train again in another --out.")
    return config


def code_trained_with(checkpoint) -> str:
    """Names the code that trained a checkpoint, with the commit of the run's last start if it is recorded."""
    with suppress(TypeError, KeyError, IndexError):
        if commit := monitor.read_config(Path(checkpoint).parents[1])["commits"][-1]:
            return f"the code that trained it (commit {commit})"
    return "the code that trained it"


def assert_family(saved: dict, model_class: type):
    if saved["family"] == model_class.__name__:
        return
    raise UserError(f"{saved['path']} holds a model of the family {saved['family']}, not "
                    f"{model_class.__name__}: use its own trainer.")


def apply_modes(model: nn.Module, args: Namespace, world: World):
    """Applies the same flags to any model, such as one that is only evaluated."""
    if world.device.type == "cuda":
        # By default, attention's backward pass on a GPU adds up gradients in no fixed order, so a resumed run
        # would differ from an uninterrupted one. warn_only isn't enough, because torch would still pick such
        # kernels. The setting also fixes the block sizes of Inductor's kernels that add up. Inductor still
        # tunes elementwise kernels, which changes no bits.
        if not args.fast:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(not args.fast)  # an earlier run in this process may have set it
        torch.utils.deterministic.fill_uninitialized_memory = False  # filling each torch.empty takes time
    compiling = {}
    torch._dynamo.config.optimize_ddp = False  # it would split a block where a gradient bucket ends
    # above this limit a block would run uncompiled, with other bits
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if compiles(args.compile, world.device):
        # round where eager code does, so that recomputing gives the same bits
        compiling["options"] = {"emulate_precision_casts": not args.fast,
                                # again, because the thread of the backward pass may compile, too
                                "deterministic": torch.are_deterministic_algorithms_enabled()}
    use_device(model, world.device, compute_dtype(args.precision, world.device), args.checkpoint_activations,
               **compiling)


# -----------------------------------------------------------------------------------------------------------
# Training state


def wrap(model: nn.Module, world: World, comm: str = "fp32") -> nn.Module:
    """Wraps the model in DistributedDataParallel. Returns it unwrapped if there is one process, if it is
    sharded, or if `comm` is late. Parameters must be the same on all ranks before the first step.
    """
    if world.world_size == 1 or comm == "late" or isinstance(model, FSDPModule):
        return model
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # torch 2.11 has only this name
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True,
                                      init_sync=False)
    if comm == "bf16":  # a lambda, because DDP refuses this hook by name without NCCL
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped


def assert_all_train(model: nn.Module, optimizers: list):
    """Raises UserError unless each parameter that trains is in exactly one optimizer, and is sharded if the
    model is. The optimizers must have no other parameters, no state outside of their own, and a step that
    needs no closure.
    """
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure and closure.default is closure.empty:
            raise UserError(f"{type(optimizer).__name__} computes the loss again in its step, but a trainer "
                            "computes it once: use an optimizer with a step that needs no closure.")
        if inside := [type(value).__name__ for value in torch.utils._pytree.tree_leaves(vars(optimizer))
                      if isinstance(value, Optimizer) and value.state is not optimizer.state]:
            raise UserError(f"no checkpoint would hold the state of {listed(inside)}, which "
                            f"{type(optimizer).__name__} wraps: use an optimizer that keeps all of its state "
                            "in its own state[p].")
    whole = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if whole and isinstance(model, FSDPModule):
        raise UserError(f"{listed(whole)} was added to the model after new_model, so it is not sharded and "
                        "its gradient would never be averaged: create it in the model's constructor, or use "
                        "--strategy ddp or zero1.")
    count = Counter(p for o in optimizers for group in o.param_groups for p in group["params"])
    if foreign := [list(p.shape) for p in count.keys() - {*model.parameters()}]:
        raise UserError(f"the optimizers have parameters that are not the model's ({len(foreign)}, one of "
                        f"shape {max(foreign)}), so no checkpoint would hold them, and each process would "
                        "train its own: create them in the model's constructor, see docs/changing.md.")
    odd = [f"{name} in {count[p]}" for name, p in model.named_parameters()
           if p.requires_grad and count[p] != 1]
    if odd:
        raise UserError(f"each parameter has to be in one optimizer, but {listed(odd)}: if it is in 2, take "
                        "it out of one; if it is in 0, add it, or freeze it with requires_grad_(False).")


def clip_grad_norm(parameters, max_norm: float) -> Tensor:
    """Scales gradients down to a total norm of at most max_norm (0: no limit). Returns the norm before that,
    a scalar, which is the same on all ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]  # frozen parameters have none
    shards = [local_shard(g) for g in gradients]
    norm = nn.utils.get_total_norm(shards)
    if isinstance(gradients[0], DTensor):
        squared = norm.to(gradients[0].device_mesh.device_type) ** 2
        dist.all_reduce(squared)
        norm = squared.sqrt()
    if max_norm > 0:
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(shards, clip.to(shards[0].device))
    return norm


class HostCopy:
    """Copies a scalar from the device to the host in the background. float() waits for the copy, but not for
    later work of the device.
    """

    def __init__(self, scalar: Tensor):
        self._scalar = scalar.to("cpu", non_blocking=True)
        self._arrived = torch.get_device_module(scalar.device).Event()
        self._arrived.record()

    def __float__(self) -> float:
        self._arrived.synchronize()
        return self._scalar.item()


class Norm(Tensor):
    """A scalar on the device that prints like a number. Only printing makes the host wait for it. What you
    compute from it is a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # as in nn.Parameter

    def __format__(self, spec: str = "", **_) -> str:
        return format(self.item(), spec)

    __repr__ = __format__


def count_hooks(optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks | optimizer._optimizer_step_post_hooks)


def skips_on_device(optimizer, whole) -> bool:
    """Whether the device can skip an update of `optimizer`: torch's fused kernels do if `found_inf` is 1.

    With zero1, `whole` has the parameters of all ranks, so that all ranks give the same answer. Subclasses
    and wrappers don't count, because they may do more in a step. SGD doesn't either: if it skipped the first
    update, its momentum would have no values.
    """
    return type(optimizer) in (AdamW, Adam, Adagrad) and not count_hooks(whole) and all(
        group["fused"] and p.is_cuda for group in whole.param_groups for p in group["params"])


def refuse_unsaved(values: dict):
    """Raises UserError for what JSON cannot hold of an optimizer's values."""
    for name, value in values.items():
        kept = None
        with suppress(TypeError, ValueError):
            kept = json.loads(json.dumps(value))
        if str(kept) != str(value):  # JSON makes a list of a tuple, and text of a number that is a key
            raise UserError(f"an optimizer keeps {name} as {type(value).__name__}, which a checkpoint cannot "
                            "hold: make it a number, a text, a list of these, or a tensor in self.state[p]; "
                            "with --strategy ddp, also a list of tensors there or a tensor in the group.")


class TrainState:
    """A model in training: `model`, `wrapped` (the model in DDP), optimizers, loss scaler, averaged weights.
    `state_dict` yields the tensors of a checkpoint; saving and `load_state_dict` both iterate over them.
    """

    MAX_SKIPPED = 10  # skipped updates in a row after which the run ends

    def __init__(self, model: nn.Module, optimizers: list, run: Run):
        assert_all_train(model, optimizers)
        args, world = run.args, run.world
        if compiles(args.compile, world.device):
            run.say("compiling: the first step takes minutes")
        apply_modes(model, args, world)
        self.model = model
        self._trained = {p: p.requires_grad for p in model.parameters()}
        self._views = {}  # by parameter: its view of DDP's bucket
        self.world = world
        self.say = functools.cache(run.say)  # each text once
        self.optimizers = optimizers
        self.zero1 = args.strategy == "zero1"
        self.ddp = args.strategy == "ddp"
        if not self.ddp:
            for optimizer in optimizers:
                refuse_unsaved(first_values(optimizer))
        if self.zero1:  # each process updates its part of the parameters and sends it in one buffer
            from torch.distributed.optim import ZeroRedundancyOptimizer
            self.optimizers = [ZeroRedundancyOptimizer(o.param_groups, type(o), lr=o.defaults["lr"],
                                                       parameters_as_bucket_view=True)
                               for o in optimizers]
            for old, new in zip(optimizers, self.optimizers):
                if count_hooks(old) > count_hooks(new.optim):  # its constructor may register some itself
                    raise UserError("--strategy zero1 creates the optimizers again, without these hooks: "
                                    "register them on state.optimizers, after TrainState.")
            with suppress(TypeError):  # the trainer may register hooks later, so its list gets the new ones
                optimizers[:] = self.optimizers
        # the optimizers that hold the state; with zero1, only the state of this process's parameters
        self.inner = [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers]
        self.groups = {}  # the parameter groups by name, such as "AdamW 0.1"
        for i, (inner, optimizer) in enumerate(zip(self.inner, self.optimizers)):
            for j, group in enumerate(optimizer.param_groups):
                self.groups[f"{type(inner).__name__} {i}.{j}"] = group
        self._made = {name: repr(value) for name, value in self._group_values().items()}
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=model.compute_dtype == torch.float16)
        self.ema = None
        if args.ema:
            self.ema = EMA(model, args.ema)
        self.wrapped = wrap(model, world, args.comm)
        self.late = None
        if args.comm == "late":
            self.late = Late(model, self.inner, run)
        self.skipped = 0  # updates in a row that were skipped, because the gradient was not finite
        self._checked = False  # whether it is known that checkpoints can hold the optimizers' state
        self._updated = True
        self._norm = None  # the gradient norm of the last step, until the host has read it

    def no_sync(self, accumulating: bool):
        """A context for one micro-batch. With `accumulating` DDP keeps gradients local: pass True for all
        micro-batches of a step except the last.

        Gradients that are None become zeros in DDP's buckets. Otherwise a backward pass without communication
        would allocate them a second time.
        """
        if empty := {p: view for p, view in self._views.items() if p.grad is None}:
            torch._foreach_zero_(list(empty.values()))
            for p, view in empty.items():
                p.grad = view
        ddp = isinstance(self.wrapped, DistributedDataParallel)
        return self.wrapped.no_sync() if ddp and accumulating else contextlib.nullcontext()

    def warm_up(self, example: dict, after_ramp: dict | None = None):
        """Runs three backward passes and throws their gradients away. The first is of model(**example). The
        other two are of model(**after_ramp), if the steps compute something else after a ramp.

        The first one, without communication, checks that every parameter gets a gradient when training
        starts; if not, it raises RunError. The other two settle DDP's buckets: DDP rearranges them after its
        first step, which changes the order of sums. Otherwise a resumed run would drift from an uninterrupted
        one.
        """
        if launched:  # in a notebook it would end the kernel
            signal.signal(signal.SIGINT, leave_at_once)
        self._refuse_thawed()
        for _, held in getattr(self.wrapped, "_comm_hooks", []):
            if not isinstance(held, dist.ProcessGroup | None):
                self.say(f"WARNING: no checkpoint holds the {type(held).__name__} of the communication hook: "
                         "if it changes during training, a resumed run differs from an uninterrupted one")
        later = after_ramp or example
        for i, inputs in enumerate((example, later, later)):
            self.wrapped.zero_grad()
            with copied_buffers(self.model), self.no_sync(i == 0):
                self.wrapped(**inputs)[0].backward()
            reshard(self.model)
            for name, p in self.model.named_parameters():
                if p.requires_grad and p.grad is None:
                    raise RunError(f"{name} gets no gradient: use it in each forward pass, or freeze it with "
                                   "requires_grad_(False); to skip a layer at random, multiply what it adds "
                                   "by 0.")
        self.clear_gradients()
        assert_in_sync(self.model, begun=False)
        # From now on garbage collection leaves out all objects that exist: scanning them takes half a second.
        gc.collect()
        gc.freeze()
        at_end.callback(gc.unfreeze)

    def clip_gradients(self, max_norm: float, stop: "StopVote | None" = None) -> "float | Norm":
        """Clips the gradients. Returns their norm before clipping, exactly 0 for a step without labels.

        With --comm late, the gradients of the previous step first replace those of this one. Also reads the
        previous step's vote from `stop`. Here the host waits for the device, once a step: for the end of the
        previous step if the device can skip an update, otherwise for the norm.
        """
        reshard(self.model)
        self._refuse_thawed()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if self.late:
            self.late.exchange()
        norm = clip_grad_norm(self.model.parameters(), max_norm)
        self._count_skipped()
        if stop:
            stop.read()
        steppers = self.inner if self.zero1 else self.optimizers  # a wrapper may do more than its .optim
        if self.scaler.is_enabled() or not all(map(skips_on_device, steppers, self.optimizers)):
            return norm.item()
        return norm.as_subclass(Norm)

    def _refuse_thawed(self):
        """Raises UserError if parameters were frozen or unfrozen after the constructor ran."""
        if odd := {p for p, trained in self._trained.items() if p.requires_grad != trained}:
            names = [name for name, p in self.model.named_parameters() if p in odd]
            raise UserError(f"requires_grad of {listed(names)} has changed since TrainState began, and "
                            "neither the optimizers nor the other processes would follow: set it before "
                            "make_optimizers, and don't change it later. To freeze parameters for some "
                            "steps, set p.grad = None in those steps, see docs/changing.md.")

    def optimizer_step(self, lr: float, grad_norm: "float | Norm"):
        """Steps the optimizers, unless the gradient norm is 0 or not finite; it must be the same on all
        ranks. Then clears the gradients and updates the average. Raises RunError if the gradient was not
        finite MAX_SKIPPED times in a row; if the norm is still on the device, the next clip_gradients does.
        """
        if self.late:
            self.late.leave_out()
        on_device = isinstance(grad_norm, Norm)
        steps = (grad_norm > 0) & (grad_norm < math.inf)
        for optimizer, inner in zip(self.optimizers, self.inner):
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("scale", 1.0)
            if on_device:
                inner.found_inf = 1.0 - steps.float()  # GradScaler sets it the same way
                optimizer.step()
                del inner.found_inf
            elif steps:
                optimizer.step()
        self.clear_gradients()
        self.scaler.update()  # unscale_ has looked for inf and NaN
        if self.ema:
            self.ema.update()
        self._norm = HostCopy(grad_norm) if on_device else grad_norm
        if not on_device:
            self._count_skipped()
        if not self._checked:  # if a checkpoint can't hold the state, fail now, not hours later
            self.plain_values()
            self._checked = True

    @property
    def updated(self) -> bool:
        """Whether the gradient of the last step was finite. The host waits for it."""
        self._count_skipped()
        return self._updated

    def _count_skipped(self):
        if self._norm is None:
            return
        self._updated = math.isfinite(self._norm)
        self._norm = None
        if not self.scaler.is_enabled() or self.scaler.get_scale() < 1:  # fp16 tries smaller scales first
            self.skipped = 0 if self._updated else self.skipped + 1
        if self.skipped >= self.MAX_SKIPPED:
            raise RunError(f"the gradient was not finite {self.MAX_SKIPPED} times in a row: lower --lr, or "
                           "use --precision bf16 or fp32, and start again; the run resumes from the newest "
                           "checkpoint, or from the one before if you delete that.")

    def clear_gradients(self):
        """Sets all gradients to None. Zeros could be mistaken for the gradients of a step."""
        params = [p for p in self.model.parameters() if p.grad is not None]  # one pass: the GPU is idle here
        if isinstance(self.wrapped, DistributedDataParallel):
            self._views |= {p: p.grad for p in params}
        for p in params:
            p.grad = None

    @contextlib.contextmanager
    def averaged_weights(self):
        """A context in which the model has the averaged weights, if the run keeps any. Afterwards its buffers
        are restored, too.
        """
        with copied_buffers(self.model):
            if self.ema:
                self.ema.swap()
                reshard(self.model)
            try:
                yield
            finally:
                if self.ema:
                    self.ema.swap()
                reshard(self.model)  # without an average, too: requires_grad is set on shards

    def state_dict(self):
        """Yields (group, name, tensor, owner) for each tensor of a checkpoint, in the same order on all
        ranks. If `owner` is None, all ranks have the tensor or a shard of it (DTensor). Otherwise only rank
        `owner` has it, and the other ranks yield a meta tensor of its shape.
        """
        held = self.optimizer_tensors()
        groups = {"model": self.model.state_dict()}
        if self.ema:
            groups |= self.ema.state_dict()
        if self.late:
            groups["late"] = self.late.state_dict()
        if not self.zero1:
            groups["optimizer"] = held
        for group, named in groups.items():
            yield from ((group, name, tensor, None) for name, tensor in named.items())
        if self.zero1:
            of_ranks = all_gather({name: tensor.to("meta") for name, tensor in held.items()})
            for owner, shapes in enumerate(of_ranks):
                for name, shape in shapes.items():
                    yield "optimizer", name, held.get(name, shape), owner

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This process's optimizer state by parameter and key, such as `embed.weight/exp_avg`; with ddp also
        `embed.weight/Q.0` of a list, and the tensors in parameter groups.
        """
        values = self._state()
        if self.ddp:
            values |= self._group_values()
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _state(self) -> dict:
        """This process's optimizer state by parameter and key. Raises RunError for state of anything else."""
        names = {p: name for name, p in self.model.named_parameters()}
        states = {}
        for optimizer in self.inner:
            for p, state in optimizer.state.items():
                if p not in names:  # of a tensor the shape, not its numbers
                    raise RunError(f"{type(optimizer).__name__} keeps state of {getattr(p, 'shape', p)}, "
                                   "which is no parameter, so no checkpoint can hold it: keep it in "
                                   "self.state[p] or the group.")
                for key, value in state.items():
                    name = f"{names[p]}/{key}"
                    if isinstance(value, list) and value and all(
                            isinstance(part, Tensor) or part == [] for part in value):
                        states |= {f"{name}.{i}": part for i, part in enumerate(value)
                                   if isinstance(part, Tensor)}
                    else:
                        states[name] = value
        return states

    def _group_values(self) -> dict:
        """What the optimizers keep in their groups beside what the trainer sets, by group and key."""
        of_trainer = {"params", "lr", "weight_decay", "scale", "betas", "fused", "foreach"}
        return {f"{name}/{key}": value for name, group in self.groups.items()
                for key, value in group.items() if key not in of_trainer}

    def plain_values(self) -> dict:
        """What a checkpoint holds of the optimizers beside tensors: values in their state, and those in their
        groups that they have changed. Every rank calls this. Raises UserError for what JSON cannot hold.
        """
        values = {name: value for name, value in self._state().items() if not isinstance(value, Tensor)}
        if self.zero1:
            values = functools.reduce(operator.or_, all_gather(values))
        values |= {name: value for name, value in self._group_values().items()
                   if repr(value) != self._made.get(name) and not (self.ddp and isinstance(value, Tensor))}
        refuse_unsaved(values)
        assert_same("what an optimizer keeps in numbers", json.dumps(values),
                    "let it sum over all ranks what it computes from gradients or parameters, with "
                    "torch.distributed.all_reduce, or use --strategy ddp")
        return values

    @torch.no_grad()
    def load_state_dict(self, saved: dict, say):
        """Copies the tensors of a checkpoint, which rank 0 has read, to all ranks, one by one, so no other
        rank holds a second copy. A new --ema starts from the weights. A parameter whose saved optimizer state
        has other names or shapes starts without optimizer state.
        """
        assert_same_parameters(self.model, saved)
        tensors = saved["tensors"]
        parameters = dict(self.model.named_parameters())
        self._create_optimizer_state()
        for name, tensor in tensors["optimizer"].items():
            owner, _, key = name.rpartition("/")
            if owner in self.groups:  # a later step than the first may make it
                self.groups[owner][key] = torch.empty_like(tensor, device=self.world.device)
        ours = {name: t.shape for group, name, t, _ in self.state_dict() if group == "optimizer"}
        theirs = {name: t.shape for name, t in tensors["optimizer"].items()}
        plain = saved["plain"]
        ours |= dict.fromkeys(self.plain_values())
        theirs |= dict.fromkeys(plain)
        changed = {name.rpartition("/")[0] for name, _ in ours.items() ^ theirs.items()}
        changed -= self.groups.keys()  # their values always come from the checkpoint
        if begun := changed & {name.rpartition("/")[0] for name in theirs}:  # others have had no step yet
            say(f"WARNING: the optimizer starts from scratch with {listed(sorted(begun))}, because "
                "what it had saved there is not what it makes in a first step")
        for group, name, tensor, owner in self.state_dict():
            source = tensors.get(group, {}).get(name)
            unlike = source is None or source.shape != tensor.shape
            if group in ("ema", "kept") and unlike:
                tensor.copy_(parameters[name])
            elif name.rpartition("/")[0] in changed or unlike and group != "model":
                pass  # saved with another --comm or other frozen parameters: it starts from scratch
            elif owner is None:
                copy_from_rank0(tensor, source, self.world)
            elif (received := transfer(source, 0, owner, self.world)) is not None:
                tensor.copy_(received)
        for optimizer in self.inner:
            for name in changed:
                optimizer.state.pop(parameters.get(name), None)
        for name, value in plain.items():
            owner, _, key = name.rpartition("/")
            if owner in self.groups:
                self.groups[owner][key] = value
            for optimizer in self.inner:
                if (p := parameters.get(owner)) in optimizer.state:
                    optimizer.state[p][key] = value
        if self.ema:
            self.ema.updates = saved["ema_updates"] or saved["step"]  # the run may have had no average
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])

    def _create_optimizer_state(self):
        """Steps with gradient and learning rate 0, one parameter at a time, to hold only one gradient. The
        parameter groups stay as they are.
        """
        for optimizer in self.inner:
            before = [dict(group) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
                for p in group["params"]:
                    if p.requires_grad:
                        p.grad = torch.zeros_like(p)
                        optimizer.step()
                        p.grad = None
            for group, values in zip(optimizer.param_groups, before):
                group.clear()
                group.update(values)


# -----------------------------------------------------------------------------------------------------------
# Checkpoints. One file holds the unsharded state; rank 0 writes and reads it.

# The names of the checkpoints that a run writes. It deletes only files that match: a renamed copy stays.
CHECKPOINT = re.compile(r"step_\d{8,}_loss-?(\d+\.\d{4}|inf|nan)_\d{8}_\d{6}\.pt")
NAME = re.compile(r"step_(\d+)_loss.*\.pt")
GROUPS = ("model", "ema", "kept", "late", "optimizer")  # in a checkpoint's `tensors`, each a dict by name
FORMAT = 2  # of the checkpoints that this code writes and reads


def read_checkpoint(path: Path, checked: bool = True) -> dict:
    """Reads a checkpoint and checks every byte. With `checked` False, trust only its plain values.
    Raises UserError if it has another FORMAT, RunError if it is damaged, RetryableError if it can't be read.

    torch.load ignores the checksums in the file, so zipfile checks them. mmap makes torch use the same zip
    directory as zipfile. Finally the bit sums of the tensors are compared with the saved ones.
    """
    pickled = b"format"
    try:
        with access(path):
            load = functools.partial(torch.load, path, map_location="cpu", weights_only=True)
            with zipfile.ZipFile(path) as file:
                plain, = (name for name in file.namelist() if name.endswith("/data.pkl"))
                pickled = file.read(plain)  # raises if the plain values, and so the format, are damaged
                try:
                    saved = load(mmap=True)
                except RuntimeError as error:
                    if "unable to" not in str(error):  # some file systems can't mmap
                        raise
                    saved = load()
                refuse_other_format(path, saved["format"])
                if broken := checked and file.testzip():
                    raise ValueError(f"{broken} has a wrong checksum")
        if checked and bit_sums(saved["tensors"]) != saved["sums"]:
            raise ValueError("its tensors are not those that were saved")
        if NAME.fullmatch(path.name) and step_of(path) != saved["step"]:
            raise ValueError(f"it holds step {saved['step']}")
        return saved
    except UserError:
        raise
    except FileNotFoundError:
        raise RetryableError(f"{path} is not there: restore it, or the file that it links to, and run the "
                             "same command again.") from None
    except Exception as error:  # zipfile, pickle and torch raise nearly anything for a damaged file
        if b"format" not in pickled or path.suffix in (".bin", ".safetensors", ".gguf"):
            raise UserError(f"{path} is a file of "
                            f"{'nanoGPT' if b'model_args' in pickled else 'another program'}, not a "
                            f"checkpoint of a run: give --init-from hf:{path.parent} if config.json and "
                            "model.safetensors are there; otherwise write them with save_pretrained of "
                            "transformers (load a pytorch_model.bin with from_pretrained; copy nanoGPT's "
                            "tensors to a GPT2LMHeadModel, without _orig_mod. in their names, and with the "
                            "matrices of c_attn, c_proj and c_fc transposed).")
        raise RunError(first_line(error)) from None


def refuse_other_format(path: Path, version: int):
    """Raises UserError if the checkpoint has another format. It may be intact, so it isn't treated as damaged
    (see load_checkpoint).
    """
    if version != FORMAT:
        other = "commit 42aa566, the last that reads it" if version < FORMAT else "a newer one"
        raise UserError(f"{path} is a checkpoint of format {version}, and this code reads format {FORMAT}: "
                        f"use {code_trained_with(path)}, or {other}.")


def bit_sums(tensors: dict[str, dict[str, Tensor]]) -> dict[str, int]:
    return {f"{group}/{name}": int(bit_sum(t)) for group in tensors for name, t in tensors[group].items()}


def step_of(path: str | Path) -> int:
    """The step of a checkpoint, from its name, or from the content of a best.pt. Raises UserError if that is
    damaged.
    """
    if name := NAME.fullmatch(Path(path).name):
        return int(name[1])
    try:
        return read_checkpoint(Path(path), checked=False)["step"]
    except RunError as error:
        raise UserError(f"only {path} is left, and it is damaged ({error}): restore a checkpoint from a "
                        "copy, or give another --out.") from None


def list_checkpoints(run_directory: Path) -> list[Path]:
    """The finished checkpoints of a run, newest first. If there are none, not even damaged ones: its best.pt.
    Raises RetryableError if the directory can't be listed.
    """
    directory = Path(run_directory, "checkpoints")
    names = names_in(directory)
    if "best.pt" in names and not any(name.startswith("step_") for name in names):
        return [directory / "best.pt"]
    checkpoints = [directory / name for name in names if NAME.fullmatch(name)]
    return sorted(checkpoints, key=lambda path: (step_of(path), path), reverse=True)


def load_checkpoint(where: str | Path, say, checked: bool = True, or_best: bool = False) -> dict:
    """Loads a checkpoint file, or the newest intact checkpoint of a run directory. With `or_best` it takes
    best.pt if all others are damaged; only pass it if you don't write to the run. Adds `path`, `damaged` (the
    paths of damaged newer ones), and the tokenizer.json of the run.

    All ranks get the plain values. Only rank 0, which reads the file, gets the tensors; the others get meta
    tensors of the same shapes. Raises UserError on all ranks if no checkpoint can be read.
    """
    saved = None

    def choose():
        nonlocal saved
        there = Path(where)
        candidates = [there] if there.is_file() else list_checkpoints(there)
        best = there / "checkpoints" / "best.pt"
        if or_best and best not in candidates and best.exists():
            candidates.append(best)
        if not candidates:
            fault = "holds no checkpoint" if there.exists() else "does not exist"
            # best.pt isn't a candidate if the others were renamed as damaged
            runs = [best] if best.exists() else {p.parents[1] for p in there.parent.glob("*/checkpoints/*")}
            such_as = f", such as {listed(sorted(map(str, runs)))}" if runs else ""
            raise UserError(f"{where} {fault}: train first, or name another run directory or file{such_as}; "
                            f"for a model from Hugging Face use --init-from hf:{where}.")
        damaged = []
        for path in candidates:
            try:
                saved = read_checkpoint(path, checked)
                break
            except RunError as error:
                say(f"WARNING: the checkpoint {path} is damaged and skipped ({error})")
                damaged.append(str(path))
        if saved is None:
            other = ""
            if best.exists() and str(best) not in damaged:
                other = f", delete these to go on from {best}"
            raise UserError(f"the checkpoint {candidates[0]} and all older ones are damaged: restore one "
                            f"from a copy{other}, or start from scratch in another --out.")
        shapes = {group: {name: tensor.to("meta") for name, tensor in named.items()}
                  for group, named in saved["tensors"].items()}
        of_run = tokenizer_of_run(path.parent.parent, saved["settings"])
        return saved | {"path": str(path), "damaged": damaged, "tensors": shapes} | of_run

    answer = on_rank0(choose)
    return answer | {"tensors": saved["tensors"]} if saved else answer


def is_in(saved: dict, run_directory: Path) -> bool:
    """Whether a checkpoint belongs to a run directory on this machine."""
    return Path(saved["path"]).resolve().parent.parent == run_directory.resolve()


class RunLock:
    """Keeps other runs out of a run directory. Rank 0 holds the lock, until it ends in any way."""

    def __init__(self, out: Path):
        self.out = out
        self._owner = None

    def acquire(self):
        """Creates the directory and locks it. Raises UserError if that fails or another run has the lock."""
        path = self.out / ".lock"  # O_NOFOLLOW: it must not be a link, because its content gets replaced
        try:
            (self.out / "checkpoints").mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise (RetryableError if error.errno == errno.ENOSPC else UserError)(
                f"{self.out} cannot be written ({why_not_made(self.out, error)}): choose another --out.")
        file = self._file = os.fdopen(descriptor, "r+")

        def refuse():
            with file:
                raise RetryableError(f"{self.out} is in use by {file.read()}: wait, or choose another --out.")

        if why_not := lock_file(file, refuse):
            say(f"WARNING: {self.out} is on a file system without locks ({why_not}): make sure that no other "
                "run writes there")
        at_end.callback(file.close)  # by then Checkpoints has written everything
        with suppress(OSError):  # on a full disk the lock works without its owner's name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {HOST} since {time.strftime('%F %T')}".encode())
        self._owner = path.read_bytes()
        for leftover in (self.out / "checkpoints").glob(".tmp-*"):
            name = leftover.name.removeprefix(".tmp-")
            if name == "best.pt" or CHECKPOINT.fullmatch(name):
                leftover.unlink()

    def lost(self) -> bool:
        """Whether the directory was moved, removed or taken by another run after this process locked it."""
        if self._owner is None:  # only rank 0 has the lock
            return False
        try:
            return (self.out / ".lock").read_bytes() != self._owner
        except FileNotFoundError:
            return True
        except OSError:  # the disk is unreachable: the save will fail, too, and the next one tries again
            return False


class Checkpoints:
    """Writes a run's checkpoints, such as `step_00001000_loss2.3456_20261120_143022.pt`, and links best.pt.

    `save` copies the state and returns. A thread then writes it to a temporary file, syncs the file and
    renames it, so every file with such a name is complete. Only rank 0 writes, but all ranks call `save`.

    A checkpoint holds `tensors` (see TrainState.state_dict) and plain values: `plain` (of the optimizers),
    `scaler`, `step`, `samples`, `loss`, and what `metadata` in startup/run.py adds.
    """

    unwritten: ClassVar[list[futures.Future]] = []  # the last job of this process, in a list

    def __init__(self, run_directory: Path, world: World, keep_last: int, say, lost=lambda: False):
        self.lost = lost  # RunLock.lost
        self.run_directory = run_directory
        self.directory = run_directory / "checkpoints"
        self.world = world
        self.keep_last = keep_last
        self.say = say
        self._copies = {group: {} for group in GROUPS}  # tensors by group and name, on the CPU
        self._thread = futures.ThreadPoolExecutor(1, "checkpoints")
        at_end.callback(wait_for_writing)  # runs before the RunLock is released
        self.saved_step: int | None = None  # the newest step that has been saved, or is being saved
        self._newest: Path | None = None  # its file
        self.files: dict[int, Path] = {}  # the checkpoints at the start, by step
        self.log: monitor.RunLog | None = None  # it decides which is the best; start_run sets it
        self._unlinked = set()  # steps that were the best but are not in best.pt; only rank 0 knows

    def load(self, resume: str, saved: dict | None = None) -> dict | None:
        """Returns the checkpoint that --resume asks for, or None to start from scratch.

        `saved` is the one that find_run has found. It is read again only if there is a newer one by now.
        Damaged checkpoints are renamed, because otherwise they'd count among the newest that a run keeps.
        Raises UserError on all ranks if --resume doesn't fit, or if any checkpoint has another format: the
        run would delete it as one of the oldest.
        """
        directory = self.run_directory

        def find_newest() -> str | None:
            there = list_checkpoints(directory)
            for path in [*there, self.directory / "best.pt"]:
                with suppress(RunError, RetryableError):
                    read_checkpoint(path, checked=False)
            return next(map(str, there), None)

        newest = on_rank0(find_newest)
        if not newest:
            return saved
        if resume == "none":
            raise UserError(f"{directory} holds checkpoints: leave out --resume none, or give another --out.")
        if resume != "auto" and on_rank0(step_of, newest) > saved["step"]:
            raise UserError(f"{directory} has a later checkpoint ({newest}) than {resume}: give another "
                            "--out to branch off, or delete the later ones to go back.")
        if resume == "auto" and not (saved and newest in (saved["path"], *saved["damaged"])):
            saved = load_checkpoint(directory, self.say)
        if resume == "auto" and Path(newest).name == "best.pt":
            self.say(f"only best.pt is left (step {saved['step']} of {saved['settings']['steps']}): going on "
                     "from it; for a new run give another --out")
        if self.world.is_rank0:
            for damaged in saved["damaged"]:
                os.rename(damaged, f"{damaged}.damaged")
        return saved

    def resume(self, saved: dict | None, state: TrainState) -> tuple[int, int]:
        """Restores the checkpoint `saved` into `state`, if there is one. Returns the number of steps and of
        samples that are done.
        """
        if not saved:
            return 0, 0
        continues = on_rank0(is_in, saved, self.run_directory)
        state.load_state_dict(saved, self.say)
        del saved["tensors"]
        if continues:
            self.saved_step = saved["step"]
            self._newest = Path(saved["path"])
        on_rank0(self._go_back, saved["step"])
        return saved["step"], saved["samples"]

    def _go_back(self, step: int):
        """Links best.pt to the best remaining checkpoint up to `step`. A later one may have been deleted."""
        best = self.directory / "best.pt"
        files = self.files = {step_of(path): path for path in list_checkpoints(self.run_directory)}
        marked = None
        with suppress(RetryableError, RunError):
            marked = read_checkpoint(best, checked=False)["step"]
            files.setdefault(marked, best)
            if marked > step:
                best.unlink()
        with suppress(FileNotFoundError):
            losses = monitor.evaluations_of(monitor.read_metrics(self.run_directory))
            left = {at: loss for at, loss in losses.items() if at <= step and at in files and loss < math.inf}
            lowest = min(left, key=left.get, default=marked)
            if lowest != marked and (marked in left or not best.exists()):
                self._link(best, files[lowest])

    def save(self, step: int, state: TrainState, meta: dict):
        """Checks that parameters are in sync, copies the state tensor by tensor, and lets a thread write it
        with `meta`: plain values, the step's loss among them. Does nothing if the step is already saved.
        """
        if step == self.saved_step:
            return
        assert_in_sync(state.model)
        world = self.world
        self.saved_step = step
        say_elsewhere(world, f"step {step}/{meta['settings']['steps']} | in sync, node 0 saves a checkpoint")
        # Until the last checkpoint is written, its copies are in use. That may take longer than --timeout, so
        # all ranks wait in many short collectives.
        while any(reduce_sum([not all(job.done() for job in self.unwritten)], world)):
            time.sleep(0.02)
        of_rank0 = [self.lost(), self._unlinked]
        dist.broadcast_object_list(of_rank0, src=0)  # not on_rank0: its store is gone if torchrun was killed
        lost, unlinked = of_rank0
        if self.log:
            self.log.evaluations |= dict.fromkeys(unlinked, math.inf)
        if lost:  # check before writing anything there
            raise UserError(f"{self.run_directory} was moved, removed or taken by another run, so this one "
                            "ends without a checkpoint: give each run its own --out; if you moved this one, "
                            "resume it with its new path as --out.")
        for group, name, tensor, owner in state.state_dict():
            if owner is not None:
                tensor = transfer(tensor, owner, 0, world)
            elif isinstance(tensor, DTensor):
                tensor = tensor.to(world.device).full_tensor()
            if world.is_rank0:
                copies = self._copies[group]  # allocated once, because shapes don't change
                if name not in copies:
                    copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                copies[name].copy_(tensor.detach(), non_blocking=True)
        plain = state.plain_values()
        reduce_sum([0], world)  # raises if a collective above has failed: NCCL reports that in the next one
        if not world.is_rank0:
            return
        world.synchronize()  # copies to pinned memory may still be under way
        content = {"format": FORMAT, "step": step, "scaler": state.scaler.state_dict(), "plain": plain,
                   "ema_updates": state.ema.updates if state.ema else 0}
        content = json.loads(json.dumps(content | meta))  # weights_only=True can read only plain types
        name = f"step_{step:08d}_loss{meta['loss']:.4f}_{time.strftime('%Y%m%d_%H%M%S')}.pt"
        self._newest = self.directory / name
        self._submit(self._write, self._newest, content, time.perf_counter())

    def mark_best(self, step: int):
        """Links best.pt to the checkpoint of `step` once it is written.

        That can fail, and there's no checkpoint if its save failed or the update was skipped. In these cases
        the next save makes the log forget that the step was the best.
        """
        self._unlinked.add(step)
        if self.world.is_rank0 and self.saved_step == step:
            self._submit(self._link, self.directory / "best.pt", self._newest)

    def close(self):
        """Waits until everything is written. Raises RunError if writing the last checkpoint failed."""
        self._thread.shutdown()
        if self.world.is_rank0 and self._newest and not self._newest.exists():
            raise RunError(f"the checkpoint of step {self.saved_step} could not be written, see above: the "
                           "same command resumes from the one before.")

    def _submit(self, function, path: Path, *args):
        def job():
            try:
                self.directory.mkdir(exist_ok=True)
                function(path, *args)
            except Exception as error:  # mostly a full disk, but torch.save doesn't say so
                reason = first_line(error)
                with suppress(OSError):  # the directory may be gone
                    reason += f", with {shutil.disk_usage(self.directory).free / 1e9:.2f} GB free on the disk"
                self.say(f"WARNING: {path.name} was not written: {reason}; training continues, and tries "
                         "again at the next save")

        Checkpoints.unwritten = [self._thread.submit(job)]

    def _write(self, path: Path, content: dict, begun: float):
        for key, tensor in self._copies["model"].items():
            if not tensor.sum(dtype=torch.float32).isfinite():  # inf and NaN survive in a sum
                raise RuntimeError(f"{key} is not finite")
        with replacing(path) as file:
            torch.save({**content, "tensors": self._copies, "sums": bit_sums(self._copies)}, file)
        text = (f"saved step {content['step']} ({path}, {path.stat().st_size / 1e9:.3g} GB in "
                f"{time.perf_counter() - begun:.1f} s)")
        its_own = [p for p in list_checkpoints(self.run_directory) if CHECKPOINT.fullmatch(p.name)]
        for old in its_own[self.keep_last:]:
            old.unlink()
            text += f"; removed {old.name}"
        self.say(text)

    def _link(self, best: Path, source: Path):
        if not source.exists():  # its save failed, and has said so
            return
        temporary = self.directory / ".tmp-best.pt"
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:  # the file system has no hard links
            shutil.copyfile(source, temporary)
        os.replace(temporary, best)
        self._unlinked.discard(step_of(source))
        temporary.unlink(missing_ok=True)  # os.replace leaves it if both are links to the same file
        fsync_directory(self.directory)


def wait_for_writing():
    """Waits until the last checkpoint is written; after a failure at most 15 s, because torchrun kills the
    process after 30 s.
    """
    waiting_is_short = one_has_failed() or launched and at_end.exit_code
    futures.wait(Checkpoints.unwritten, timeout=15 if waiting_is_short else None)


# -----------------------------------------------------------------------------------------------------------
# Around a step


@dataclass
class Due:
    """What is due after a step. It is the same on all ranks."""

    stopping: bool  # a rank got a signal
    done: bool  # all steps are done
    evaluating: bool
    saving: bool


def due_after(step: int, run: Run, log: monitor.RunLog, stop: "StopVote") -> Due:
    """What is due after `step` steps. The run saves before each evaluation, because an evaluation can take
    long. It evaluates no step twice.
    """
    stopping = stop.agreed > 0
    done = step >= run.steps
    in_turn = step % run.args.eval_every == 0 or done
    evaluating = step > 0 and bool(run.dataset.val) and step not in log.evaluations and in_turn
    saving = step > 0 and (step % run.args.save_every == 0 or evaluating or stopping or done)
    return Due(stopping, done, evaluating, saving)


def mixed(seed: int, step: int, stream: int) -> int:
    """Hashes its arguments to a seed below 2^63."""
    number = ((seed * 0x9E3779B97F4A7C15 + step) * 0xBF58476D1CE4E5B9 + stream) * 0x94D049BB133111EB
    return (number ^ number >> 31) % 2**63


def seed_step(seed: int, step: int, rank: int):
    """Seeds torch for one step of one rank, so that checkpoints don't have to hold generator states."""
    torch.manual_seed(mixed(seed, step, rank))


def generator(seed: int, step: int, number: int = 0, device="cpu") -> torch.Generator:
    """A random generator in the same state on all ranks. Each `number` gives another one for the step."""
    return torch.Generator(device).manual_seed(mixed(seed, step, -1 - number))


class StopVote:
    """Stops all ranks after the same step when any of them gets a signal.

    STOP_SIGNALS and the death of torchrun set a flag. Call `vote` after each step and each evaluation batch:
    it starts a small all-reduce of the flag. The result is read one step or batch later, so no rank waits
    for another.
    """

    def __init__(self, world: World):
        self.signal = 0  # the first signal that this rank got
        self._since = 0.0  # when it came
        self.agreed = 0  # the signal for which all ranks have agreed to stop
        self._vote = torch.zeros((), device=world.device)  # the newest vote
        self._under_way = None  # its all-reduce, until it is read
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        for signum in STOP_SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(signum, self._on_signal)

    def _on_signal(self, number, frame):
        # One Ctrl-C arrives twice, from the terminal and from torchrun. A second press comes later.
        if number == signal.SIGINT and self.signal and time.monotonic() - self._since > 2:
            os.write(2, b"\nstopped at once, without another checkpoint\n")
            os._exit(130)
        if not self.signal:
            self._since = time.monotonic()  # set it first, because a signal may come between these two lines
            self.signal = number

    def is_orphan(self) -> bool:
        """Whether torchrun was killed: then this process has another parent."""
        return self._torchrun not in (None, os.getppid())

    def vote(self) -> int:
        """Starts a vote. Returns the result of the previous one: a signal that some rank got, or 0."""
        self.read()
        if self.is_orphan():  # nothing else would stop this process
            self._on_signal(signal.SIGHUP, None)
        self._vote.fill_(self.signal)
        self._under_way = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, async_op=True)
        self._result = self._vote
        if dist.get_backend() == "nccl":
            self._under_way.wait()  # here the device waits, not the host
            self._result = HostCopy(self._vote)
        return self.agreed

    def read(self):
        """Reads the newest vote, unless it has been read."""
        if self._under_way:
            self._under_way.wait()
            self._under_way = None
            self.agreed = self.agreed or int(float(self._result))


class Metrics:
    """Adds up what a model returns for the labels of a step. Each rank keeps its own part of the sums on the
    device, until `reduce`.
    """

    def __init__(self, run: Run):
        world = run.world
        saved = run.saved or {"samples": 0, "loss": math.nan}
        self.world = world
        self._samples = saved["samples"]
        self._sums: dict[str, Tensor] = {}
        self.labels = torch.zeros(())  # labels in the last step, over all ranks
        # This rank's part of each mean: the parts of all ranks add up to the mean.
        share = float(world.is_rank0)
        self._means = {"loss": torch.tensor(saved["loss"] * share, dtype=torch.float64, device=world.device)}

    def add(self, sums: dict[str, Tensor]):
        """Adds scalar sums of a micro-batch, by name."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0) + value

    def end_step(self, samples: int, labels: Tensor):
        """Ends a step. `labels` is its number of labels over all ranks, `samples` the number of samples that
        the run has consumed so far.
        """
        self.labels = labels
        self._samples = samples
        self._means = {name: total / labels.clamp(min=1) for name, total in self._sums.items()}
        self._sums = {}

    def reduce(self) -> dict[str, float]:
        """Returns the means of the last step over all labels of all ranks. All ranks call this."""
        return dict(zip(self._means, reduce_sum([*self._means.values()], self.world)))

    def machines(self) -> dict:
        """What all processes say of their machines; the curves have a machine's name if there are several."""
        world = self.world
        host = f"/{world.node}-{HOST}" if world.nodes > 1 else ""
        return combined(*zip(*all_gather((memory_gb(world.device), machine_curves(host)))))

    def state_dict(self) -> dict:
        """The plain values for a checkpoint. All ranks call this."""
        return {"loss": self.reduce()["loss"], "samples": self._samples}


def refuse_odd_metric(metric: Callable, values):
    """Raises UserError unless `values`, which the trainer's `metric` returned, is {name: (sum, count)}."""
    if not isinstance(values, dict):  # such as None, if it has no `return`
        values = {getattr(metric, "__name__", "NAME"): values}
    for name, value in values.items():
        dimensions = []
        with suppress(TypeError, ValueError, RuntimeError):
            dimensions = [torch.as_tensor(part).ndim for part in value]
        if dimensions != [0, 0]:
            raise UserError(f"the metric {name} is not a pair of a sum and its count: return "
                            f'{{"{name}": (sum, count)}}.')
        if "/" in name or name.endswith(" (count)"):
            raise UserError(f"a metric cannot be called {name}: choose a name without / and (count).")


@torch.no_grad()
def evaluate(state: TrainState, run: Run, stop: StopVote, masker=None) -> dict[str, float] | None:
    """Evaluates the first --eval-batches (0: all) of each validation set, with the averaged weights if the
    run keeps any. All ranks call this. Returns means, such as `val_loss` over all sets together and
    `val_loss/NAME` over each named set; None if a stop signal cut it short.

    `run.metric` is the trainer's own function: metric(model, *micro_batch) returns {name: (sum, count)},
    numbers or scalar tensors. Both are summed over batches and ranks, and `val_NAME` is sum / count. Raises
    UserError if a name is taken.

    Each evaluation starts with the same random state, so that a model that draws random numbers gets the same
    results after a resume.
    """
    args, model, world = run.args, state.model.eval(), state.world
    reserved = {"samples", "exact", "correct", "best_metric"}  # a metric can't have these names
    token_bytes = torch.from_numpy(run.dataset.tokenizer.token_bytes).to(world.device)
    seed_step(args.seed, 0, world.rank)
    totals = Counter()
    of_names = {}
    with state.averaged_weights():
        for name, shards in run.dataset.val.items():
            sums = Counter()
            limit = args.eval_batches * args.eval_batch  # rows
            for micro_batch in validation_batches(shards, run.batch, world, limit, masker):
                _, batch_sums = model(*micro_batch)
                # not if the trainer's own model has another loss, or if its rows aren't text
                in_nats = hasattr(batch_sums["loss"], "in_nats") and not run.dataset.vocab_size
                own = run.metric(model, *micro_batch) if run.metric else {}
                refuse_odd_metric(run.metric, own)
                monitor.refuse_taken([*batch_sums, *own, *reserved - batch_sums.keys()])
                for key, value in own.items():
                    batch_sums |= {key: value[0], f"{key} (count)": value[1]}
                labels = micro_batch[-1]
                learned = labels >= 0
                batch_sums["labels"] = learned.sum()
                known = labels.clamp(0, len(token_bytes) - 1)  # `dataset.vocab_size` may be larger
                batch_sums["bytes"] = (token_bytes[known] * learned).sum()
                sums.update({key: torch.as_tensor(value, dtype=torch.float64, device=world.device)
                             for key, value in batch_sums.items()})
                if stop.vote():
                    break
            assert_same("the list of results", json.dumps([*sums]),
                        "return the same names for every batch")
            sums["bytes"] *= getattr(shards, "byte_ratio", 1)
            sums = dict(zip(sums, reduce_sum([*sums.values()], world)))  # waits for the device
            totals.update(sums)
            if name:
                of_names |= {f"{key}/{name}": value
                             for key, value in monitor.results_of(sums, in_nats).items()}
            if stop.agreed:
                break
    model.train()
    return None if stop.agreed else monitor.results_of(totals, in_nats) | of_names

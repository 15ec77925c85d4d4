"""Distributed runs: how processes start, agree, save, stop and end. In the order of a run:

    start and end       launch(main), init: join the process group, end without hanging
    devices             choose_device: a GPU for each process, and the backend
    agreement           run_and_wait, on_rank0, sums over ranks, comparisons of ranks
    the record of a run Run, which startup/run.py fills
    checkpoints         Checkpoints writes and restores them, load_checkpoint reads one, whole or not at all
    around a step       due_after, seeds, StopVote (Ctrl-C, signals), Metrics

The model on ranks and what trains it are in training/. Loader in data.py decides which rank gets which
samples. One rule holds everywhere: all ranks call the same collectives in the same order.
"""

import functools
import gc
import json
import logging
import math
import os
import re
import shutil
import signal
import statistics
import sys
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.tensor import DTensor

import monitor
from cli.errors import (
    HOST,
    RetryableError,
    RunError,
    UserError,
    end_python,
    first_line,
    from_launcher,
    joined,
    local_rank,
    names_in,
    oserror_as_retryable,
    owns_python,
    say,
    set_handler,
)
from cli.files import cpu_count, fsync_directory, replacing
from cluster.diagnosis import WHEN_CUT_OFF, diagnose
from cluster.heartbeat import Heartbeat, join
from data import Dataset
from loggers.machine import combined, machine_curves, memory_gb
from model import ConfigError
from ops.device import keep_freed_memory, use_libdevice_of_triton
from vocab.vocabulary import tokenizer_of_run

SYNC_EVERY = 200  # steps between comparisons of the parameters across ranks; each save compares them, too
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU)
# Silence its warning about in-place operations in selectively checkpointed code: our blocks have none.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


# -----------------------------------------------------------------------------------------------------------
# Start and end


class Process:
    """Owns how this process ends: whether it failed, and what to close first."""

    def __init__(self):
        self.launched: Callable | None = None  # the main() that `launch` runs, if the process ends after it
        self.heartbeat: Heartbeat | None = None  # if there are several processes
        self.exit_code = 0  # of the run
        self.at_end = ExitStack()  # what to close when a run ends, the newest first
        self.unwritten: list[futures.Future] = []  # the last checkpoint that is being written, if any

    def one_has_failed(self) -> bool:
        """Whether this process ends with an error, and isn't the only process of the run."""
        return self.exit_code > 0 and dist.is_initialized() and dist.get_world_size() > 1

    def leave_group(self, excepthook: Callable):
        """Destroys the process group, unless that can hang, and restores `excepthook`, which
        init_process_group has replaced.
        """
        if dist.is_initialized() and not self.one_has_failed():
            if self.heartbeat:
                self.heartbeat.stop("")
            gc.collect()  # models and optimizers left over from main() keep the process group alive
            dist.destroy_process_group()
            sys.excepthook = excepthook


process = Process()


def ending_of(error: BaseException) -> tuple[int, str, str]:
    """For the error that ended main(), returns the exit code, the text that this process prints, and the
    reason that the other ranks print. Prints the traceback of an unforeseen error, unless `diagnose` knows
    its cause.
    """
    if isinstance(error, SystemExit):  # from --help, or sys.exit("a text") in a trainer
        code = error.code or 0
        return (1, code, code) if isinstance(code, str) else (code, "", "")
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped", "it was stopped by Ctrl-C."
    if isinstance(error, BrokenPipeError):  # fine for `--dry-run | head`, a failure for a run
        if not dist.is_initialized():
            return 0, "", ""
        return 1, "error: standard output is closed.", "its standard output was closed."
    if isinstance(error, UserError | RunError | ConfigError):
        return error.exit_code, f"error: {error}", str(error)
    if ending := diagnose(error, process.heartbeat, show_traceback):
        return ending
    show_traceback(error)
    return 1, "", first_line(error)


def show_traceback(error: BaseException):
    sys.excepthook(type(error), error, error.__traceback__)
    get_error_handler().record_exception(error)  # for torchrun's own report


def launch(main):
    """Runs main() and ends the process with one of these exit codes:

        0      success
        1      a failure, or a RetryableError
        2      any other UserError, or a missing compiler
        130    Ctrl-C

    If something else runs the script, such as a console or a profiler, it cleans up as in a notebook, and
    raises SystemExit with that code, or the unforeseen error. Of several processes, one that fails still ends
    here.
    """
    owner = owns_python(main.__module__)
    if owner:
        process.launched = main
        # After the soft CPU limit the kernel sends SIGXCPU every second, so StopVote will see a later one.
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    get_error_handler().initialize()
    try:
        with oserror_as_retryable():
            main() if owner else cleanup_on_exit(lambda _: main())()
        code, text, reason = 0, "", ""
    except BaseException as error:
        failure = error
        code, text, reason = ending_of(error)
    process.exit_code = code
    unwritten = process.one_has_failed() and process.unwritten
    # When one process fails, torchrun sends signals to the others. While a checkpoint is being written, they
    # must not end this one. SIGXCPU, the last in the list, never does.
    for signum in STOP_SIGNALS[:-1] if owner else ():
        signal.signal(signum, signal.SIG_IGN if unwritten else signal.SIG_DFL)
    if text and (code != 130 or local_rank() == 0):
        if local_rank() > 0:
            time.sleep(1.0)  # if local rank 0 fails too, torchrun ends this process here
        print(text, file=sys.stderr, flush=True)
    if process.heartbeat:  # first, because at_end.close() may wait for a checkpoint
        process.heartbeat.stop(reason)
    process.at_end.close()
    if code == 0:  # this can hang after a failure
        process.leave_group(sys.excepthook)
    if owner or process.one_has_failed():  # after a failure Python's teardown can hang
        end_python(code)
    raise failure if reason and not text else SystemExit(code)


def end_lost(cause: str):
    """Ends this process from another thread, because the main thread waits for a rank that is lost."""
    time.sleep(1.0 if local_rank() > 0 else 0.0)  # if local rank 0 ends too, torchrun ends this process here
    print(f"error: {cause}", file=sys.stderr, flush=True)
    wait_for_writing()
    os._exit(1)


def cleanup_on_exit(main):
    """Lets a notebook call main() more than once. When main() ends, everything that it started ends, and the
    previous signal handlers return.

    If one of several processes has failed, the process group stays, because destroying it can hang. The
    signal handlers stay, too, because torchrun then sends signals.
    """
    @functools.wraps(main)
    def run(argv: list[str] | None = None):
        if process.launched is run:  # `launch` cleans up
            return main(argv)
        handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        if not dist.is_initialized():  # a group that the caller has created stays
            process.at_end.callback(process.leave_group, sys.excepthook)
        process.exit_code = 0
        try:
            main(argv)
        except BaseException:
            process.exit_code = 1
            raise
        finally:
            if not process.one_has_failed():
                for signum, handler in handlers.items():
                    set_handler(signum, handler)
            process.at_end.close()

    return run


def leave_at_once(number, frame):
    """The handler of Ctrl-C while torch compiles or counts FLOPs. It ends the process, because torch can lose
    an exception there; but not a notebook's or another process that goes on.
    """
    if not process.launched:
        raise KeyboardInterrupt
    if local_rank() == 0:
        os.write(2, b"\nstopped at once, without another checkpoint\n")
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


def init(backend: str = "auto", device: str = "auto", timeout: float = 600, compare=None,
         fast: bool | None = False) -> World:
    """Joins the process group that torchrun describes, or creates one with a single process.

    A collective fails after `timeout` seconds. With `fast`, sums may round differently after a new start.
    compare(device, backend) runs before the process group is created; use it to find differences that would
    make the group hang. Raises UserError on all ranks if one of them lacks the device.
    """
    env = os.environ
    by_torchrun = {"RANK", "WORLD_SIZE"} & env.keys()
    if "GLOO_SOCKET_IFNAME" not in env:  # the next run in a notebook may need another network card
        process.at_end.callback(env.pop, "GLOO_SOCKET_IFNAME", None)
    rank, world_size, store = 0, 1, dist.HashStore()
    if by_torchrun:
        rank, world_size, store, process.heartbeat = join(timeout)
        if process.heartbeat:
            process.heartbeat.on_lost = end_lost
            process.heartbeat.wait_for_all()
    local_world_size = from_launcher("LOCAL_WORLD_SIZE", 1)
    where, backend = run_and_wait(choose_device, backend, device, local_world_size)
    if compare:
        compare(where, backend)
    if process.heartbeat:
        process.heartbeat.refuse_other_backends(backend)
    gpu = None
    if where.type == "cuda":
        gpu = where
        torch.cuda.set_device(gpu)
        use_libdevice_of_triton()
    else:
        keep_freed_memory()
        threads = from_launcher("OMP_NUM_THREADS")
        if threads < 1 or threads == 1 and local_world_size > 1:
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
        if backend == "gloo" and process.heartbeat:  # NCCL has to stay in the thread that chose the GPU
            return process.heartbeat.watch(function)
        return function()
    except RuntimeError as error:
        if process.heartbeat and process.heartbeat.find_cause():  # a rank was lost: ending_of will say which
            raise
        way = WHEN_CUT_OFF["alone" if backend == "gloo" and not process.heartbeat else backend]
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


def run_and_wait(function, *args):
    """Returns function(*args) on every rank, however long it takes, once it has ended on all of them. If it
    raises on one rank, the others raise a UserError with the same exit code, so no rank waits for the failed
    one.
    """
    return process.heartbeat.run_and_wait(function, *args) if process.heartbeat else function(*args)


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


def assert_in_sync(model: nn.Module, step: int | None = None, training: bool = True) -> str:
    """Compares unsharded parameters and persistent buffers across ranks, bit for bit. Raises RunError if they
    differ. The log shows `step`, the number of steps that are done. `training` says whether it has begun;
    before that, only the trainer can have changed them. Returns "in shards" if parameters were not compared
    because they are, otherwise "in sync".
    """
    state = model.state_dict()
    tensors = {name: t for name, t in state.items() if not isinstance(t, DTensor)}
    buffers = dict(model.named_buffers())
    names = sorted(tensors, key=lambda name: name in buffers)  # parameters first
    if names and (odd := find_mismatch(torch.stack([bit_sum(tensors[name]) for name in names]).tolist())):
        name = names[odd[0]]
        cause = ("if the trainer was edited, a rank may use a value of its own, such as the time: let all "
                 "take rank 0's, ddp_utils.all_gather(value)[0]. Otherwise check the memory and the "
                 "libraries of that node (different processors round differently: with --optimizer muon they "
                 "need --strategy zero1). Each checkpoint was in sync when it was saved.")
        if name in buffers:  # all parameters are the same, so this buffer was the first to differ
            cause = ("forward updates this buffer from the data of its own rank: sum the update over all "
                     "ranks with torch.distributed.all_reduce.")
        if not training:
            cause = ("this is before the first step, so the trainer changed it after new_model, and not in "
                     "the same way on all ranks: draw random numbers with torch's own generator, which "
                     "new_model leaves in the same state on all ranks, or with ddp_utils.generator.")
        raise RunError(f"{name} on rank {odd[1]} differs from the other ranks (Sync=FAILED): {cause}")
    if step is not None:
        model.in_sync_at = step
    return "in sync" if len(tensors) == len(state) else "in shards"


def sync_of(model: nn.Module, step: int, world: World) -> str:
    """What a logged line says of the parameters after `step` steps. GPUs compare them now, which takes
    milliseconds. CPUs name the step of the last comparison.
    """
    if world.device.type == "cuda":
        assert_in_sync(model, step)
    return "OK" if model.in_sync_at == step or world.world_size == 1 else f"OK@{model.in_sync_at}"


def say_elsewhere(world: World, text: str):
    """Prints `text` once on each node except rank 0's. Otherwise those nodes would print nothing."""
    if world.local_rank == 0 and not world.is_rank0:
        say(f"{world.prefix} {text}")


# -----------------------------------------------------------------------------------------------------------
# The record of a run


@dataclass(repr=False)  # which would fail until all fields are set
class Run:
    """A run that starts, resumes, or is only used (--eval-only, --prompt, …). find_run in startup/run.py
    creates it; load_data and open_run add the last fields. A trainer may set `metric` and `change_data`.
    """

    model_class: type
    world: World
    trainer: Path  # the file of the trainer
    command: str  # the command that started it
    constants: dict  # the trainer's constants, by name
    args: Namespace  # all flags, and the batch sizes from `resolve_flags`
    size_defaults: dict  # the row of SIZES for --size
    given: dict  # flags in this command, as config.json records them
    out: Path
    saved: dict | None  # the checkpoint to resume or use
    began: str  # when it began, and a random number: an id that branches of the run share
    text: monitor.TrainLog  # train.log and the screen
    metric: Callable | None = None  # computes other numbers than the loss, see evaluate
    change_data: Callable | None = None  # changes the Dataset, see load_data
    needs: str = ""  # on GPUs, the memory that each mode of --checkpoint-activations needs
    flops_factor: float = 1.0  # FLOPs of a step / FLOPs of a training pass of the model alone
    dataset: Dataset = field(init=False)  # load_data sets it
    steps: int = field(init=False)  # open_run sets this and the following ones
    global_batch: int = field(init=False)  # sequences per step, over all processes
    batch: int = field(init=False)  # sequences per micro-batch
    grad_accum: int = field(init=False)  # micro-batches per step, on each process
    checkpoints: "Checkpoints" = field(init=False)
    # what end_run saves: start_run sets the first two, Metrics itself
    state: "TrainState" = field(init=False)  # noqa: F821, from training/step.py, on a floor above
    meta: dict = field(init=False)
    metrics: "Metrics" = field(init=False)

    def say(self, text: str):
        """Prints `text` and appends it to train.log, on rank 0."""
        self.text.say(text)


# -----------------------------------------------------------------------------------------------------------
# Checkpoints. One file holds the unsharded state; rank 0 writes and reads it.

# The names of the checkpoints that a run writes. It deletes only files that match: a renamed copy stays.
OWN_CHECKPOINT_NAME = re.compile(r"step_\d{8,}_loss-?(\d+\.\d{4}|inf|nan)_\d{8}_\d{6}\.pt")
CHECKPOINT_NAME = re.compile(r"step_(\d+)_loss.*\.pt")
GROUPS = ("model", "ema", "kept", "late", "optimizer")  # in a checkpoint's `tensors`, each a dict by name
FORMAT = 2  # of the checkpoints that this code writes and reads


def read_checkpoint(path: Path, checked: bool = True) -> dict:
    """Reads a checkpoint and checks every byte. With `checked` False, trust only its plain values.
    Raises UserError if it has another FORMAT or was edited, RunError if it is damaged, RetryableError if it
    can't be read.

    torch.load ignores the checksums in the file, so zipfile checks them. mmap makes torch use the same zip
    directory as zipfile. Finally the bit sums of the tensors are compared with the saved ones.
    """
    pickled = b"format"
    try:
        with oserror_as_retryable(path):
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
                odd = checked and bit_sums(saved["tensors"]).items() ^ saved.get("sums", {}).items()
                if broken := checked and file.testzip():
                    raise ValueError(f"{min(odd)[0] if odd else broken} has a wrong checksum")
        if odd:
            raise UserError(f"{path} was edited or is damaged, because {min(odd)[0]} is not as it was saved: "
                            'after an edit, set saved["sums"] = ddp_utils.bit_sums(saved["tensors"]) '
                            "and save it again; otherwise delete it, or restore it from a copy.")
        if CHECKPOINT_NAME.fullmatch(path.name) and step_of(path) != saved["step"]:
            raise ValueError(f"it holds step {saved['step']}")
        return saved
    except UserError:
        raise
    except FileNotFoundError:
        raise RetryableError(f"{path} is not there: restore it, or the file that it links to, and run the "
                             "same command again.") from None
    except Exception as error:  # zipfile, pickle and torch raise nearly anything for a damaged file
        old = path.open("rb").read(1) == b"\x80"  # a pickle, such as torch's old format
        if old or b"format" not in pickled or path.suffix in (".bin", ".safetensors", ".gguf"):
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


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its name or a best.pt's content. Raises UserError if that is damaged."""
    if name := CHECKPOINT_NAME.fullmatch(path.name):
        return int(name[1])
    try:
        return read_checkpoint(path, checked=False)["step"]
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
    checkpoints = [directory / name for name in names if CHECKPOINT_NAME.fullmatch(name)]
    return sorted(checkpoints, key=lambda path: (step_of(path), path), reverse=True)


def load_checkpoint(where: str | Path, say, checked: bool = True, or_best: bool = False,
                    share=on_rank0) -> dict:
    """Loads a checkpoint file, or the newest intact checkpoint of a run directory. With `or_best` it takes
    best.pt if all others are damaged; only pass it if you don't write to the run. Adds `path`, `damaged` (the
    paths of damaged newer ones), and the tokenizer.json of the run.

    All ranks get the plain values. Only rank 0, which reads the file, gets the tensors; the others get meta
    tensors of the same shapes. `share` calls a function on rank 0 and returns its result on all ranks. Raises
    UserError on all ranks if no checkpoint can be read.
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
            such_as = f", such as {joined(sorted(map(str, runs)))}" if runs else ""
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

    answer = share(choose)
    return answer | {"tensors": saved["tensors"]} if saved else answer


def verify_checkpoints(where: Path):
    """Checks every byte of a checkpoint, or of all in a run directory, and prints what each holds. Raises
    UserError if there is none, or after all of them if any is damaged, edited or unreadable.
    """
    paths = sorted(filter(Path.is_file, {where, *list_checkpoints(where), where / "checkpoints/best.pt"}))
    if not paths:
        raise UserError(f"{where} is no prepared directory (it has no manifest.json), no run with a "
                        "checkpoint and no file.")
    damaged = ""
    for path in paths:
        try:
            saved = read_checkpoint(path)
            best = ""
            with suppress(FileNotFoundError):  # there's no best.pt, or a training deleted the checkpoint
                best = "best, " * path.samefile(path.with_name("best.pt"))
            say(f"{path}: step {saved['step']}, loss {saved['loss']:.4f}, {best}sound")
        except UserError as error:  # names the path, which a training may have deleted
            damaged += f"\n{error}" * (path == where or path.exists())
        except RunError as error:
            damaged += f"\n{path}: {error}"
    if damaged:
        raise UserError(f"not verified:{damaged}")


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
        raise UserError(f"{where} sets {joined(unknown)}, which {config_class.__name__} does not know: use "
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


def is_in(saved: dict, run_directory: Path) -> bool:
    """Whether a checkpoint belongs to a run directory on this machine."""
    return Path(saved["path"]).resolve().parent.parent == run_directory.resolve()


class Checkpoints:
    """Writes a run's checkpoints, such as `step_00001000_loss2.3456_20261120_143022.pt`, and links best.pt.

    `save` copies the state and returns. A thread then writes it to a temporary file, syncs the file and
    renames it, so every file with such a name is complete. Only rank 0 writes, but all ranks call `save`.

    A checkpoint holds `tensors` (see TrainState.state_dict) and plain values: `plain` (of the optimizers),
    `scaler`, `step`, `samples`, `loss`, and what `metadata` in startup/run.py adds.
    """

    def __init__(self, run_directory: Path, world: World, keep_last: int, say, lost=lambda: False):
        self.lost = lost  # RunLock.lost
        self.run_directory = run_directory
        self.directory = run_directory / "checkpoints"
        self.world = world
        self.keep_last = keep_last
        self.say = say
        self._copies = {group: {} for group in GROUPS}  # tensors by group and name, on the CPU
        self._thread = futures.ThreadPoolExecutor(1, "checkpoints")
        process.at_end.callback(wait_for_writing)  # runs before the RunLock is released
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
        if resume != "auto" and on_rank0(step_of, Path(newest)) > saved["step"]:
            raise UserError(f"{directory} has a later checkpoint ({newest}) than {resume}: give another "
                            "--out to branch off, or delete the later ones to go back.")
        if resume == "auto":
            if not (saved and newest in (saved["path"], *saved["damaged"])):
                saved = load_checkpoint(directory, self.say)
            if Path(newest).name == "best.pt":
                self.say(f"only best.pt is left (step {saved['step']} of {saved['settings']['steps']}): "
                         "going on from it; for a new run give another --out")
        if self.world.is_rank0:
            for damaged in saved["damaged"]:
                os.rename(damaged, f"{damaged}.damaged")
        return saved

    def resume(self, saved: dict | None, state) -> tuple[int, int]:
        """Restores the checkpoint `saved` into `state`, a TrainState (training/step.py), if there is one.
        Returns the number of steps and of samples that are done.
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

    def save(self, step: int, state, meta: dict):
        """Checks that parameters are in sync, copies `state`, a TrainState, tensor by tensor, and lets a
        thread write it with `meta`: plain values, the step's loss among them. Does nothing if the step is
        already saved.
        """
        if step == self.saved_step:
            return
        found = assert_in_sync(state.model, step)
        world = self.world
        self.saved_step = step
        say_elsewhere(world, f"step {step}/{meta['settings']['steps']} | {found}, node 0 saves a checkpoint")
        # Until the last checkpoint is written, its copies are in use. That may take longer than --timeout, so
        # all ranks wait in many short collectives.
        while any(reduce_sum([not all(job.done() for job in process.unwritten)], world)):
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
        plain = state.non_tensor_values()
        reduce_sum([0], world)  # raises if a collective above has failed: NCCL reports that in the next one
        if not world.is_rank0:
            return
        torch.get_device_module(world.device).synchronize()  # copies to pinned memory may be under way
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
            except Exception as error:  # mostly a full disk, which torch.save hides behind a RuntimeError
                cause = error if isinstance(error, OSError) else error.__context__ or error
                self.say(f"WARNING: {path.name} was not written: {first_line(cause)}; training continues, "
                         "and tries again at the next save")

        process.unwritten = [self._thread.submit(job)]

    def _write(self, path: Path, content: dict, started: float):
        for key, tensor in self._copies["model"].items():
            if not tensor.sum(dtype=torch.float32).isfinite():  # inf and NaN survive in a sum
                raise RuntimeError(f"{key} is not finite")
        with replacing(path) as file:
            torch.save({**content, "tensors": self._copies, "sums": bit_sums(self._copies)}, file)
        text = (f"saved step {content['step']} ({path}, {path.stat().st_size / 1e9:.3g} GB in "
                f"{time.perf_counter() - started:.1f} s)")
        its_own = [p for p in list_checkpoints(self.run_directory) if OWN_CHECKPOINT_NAME.fullmatch(p.name)]
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
    waiting_is_short = process.one_has_failed() or process.launched and process.exit_code
    futures.wait(process.unwritten, timeout=15 if waiting_is_short else None)


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
                set_handler(signum, self._on_signal)

    def _on_signal(self, number, frame):
        # One Ctrl-C arrives twice, from the terminal and from torchrun. A second press comes later.
        if number == signal.SIGINT and self.signal and time.monotonic() - self._since > 2:
            leave_at_once(number, frame)
        if not self.signal:
            self._since = time.monotonic()  # set it first, because a signal may come between these two lines
            self.signal = number

    def is_orphan(self) -> bool:
        """Whether torchrun was killed: then this process has another parent."""
        return self._torchrun not in (None, os.getppid())

    def _tell_launcher(self, what: str, ask: str = "") -> bool | None:
        """Tells cluster/ddp_launch.sh with a range of nodes how far this start came. Returns whether it asks
        for something: it stops a run that other nodes wait for.
        """
        directory = Path(os.environ.get("LAUNCHER_DIR") or os.devnull)
        with suppress(OSError):
            (directory / what).touch()
            return (directory / ask).is_file()

    def vote(self) -> int:
        """Starts a vote. Returns the result of the previous one: a signal that some rank got, or 0."""
        self.read()
        if self.is_orphan():  # nothing else would stop this process
            self._on_signal(signal.SIGHUP, None)
        if self._tell_launcher("trained", ask="stop"):
            self._on_signal(signal.SIGUSR1, None)
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
            if self.agreed:
                self._tell_launcher("stopped")


class Metrics:
    """Adds up what a model returns for the labels of a step. Each rank keeps its own part of the sums on the
    device, until `reduce`.
    """

    def __init__(self, run: Run):
        world = run.world
        saved = run.saved or {"samples": 0, "loss": math.nan}
        run.metrics = self
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

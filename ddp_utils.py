"""Distributed training: how processes start, agree, train, save, resume and end. In the order of a run:

    start and end       launch(main), start: join the process group, end without hanging
    agreement           with_barrier, on_rank0, sums over ranks, comparisons of ranks
    flags               make_parser, parse_flags: the command line; FLAGS: what each flag is to a run
    which run           find_run: what is asked for (Asked); load_data, open_run: what is trained (Run)
    models on ranks     build_model: replicated or sharded; set_modes: precision, recomputing, compiling
    training state      TrainState: the model in training and the other tensors of a checkpoint
    checkpoints         Checkpoints writes and restores them; monitor.RunLock keeps a directory to one run
    around a step       begin_log, due_after, StopVote, Metrics, evaluate, sample, end_run

The trainers call them in this order: see main() of train_gpt2.py. One rule holds everywhere: all ranks call
the same collectives in the same order.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import json
import logging
import math
import operator
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import time
import warnings
import zipfile
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
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

import monitor
from data import (
    HOST,
    ROOMS,
    ArgumentParser,
    Dataset,
    NotNow,
    RunError,
    UserError,
    access,
    cpu_count,
    directory_of,
    expanded,
    first_line,
    flag_group,
    fraction,
    from_launcher,
    fsync_directory,
    listed,
    local_rank,
    names_in,
    nonnegative_int,
    number,
    parse_count,
    plan_batch,
    positive_int,
    read_manifest,
    refuse_moved,
    refuse_without,
    replacing,
    room,
    rooms_here,
    row_of,
    say,
    sources_of,
    steps_or_fraction,
    tokenizer_id,
    tokenizer_of_run,
    unigram_entropy,
    utf8_path,
    validation_batches,
    without_surrogates,
)
from model import (
    SHARDED,
    STRATEGIES,
    CausalConfig,
    ModelConfig,
    blocks_of,
    choose_device,
    compiles,
    compute_dtype,
    copied_buffers,
    flag_fields,
    flags_of_model,
    hardware,
    num_params,
    pad_vocab,
    use_device,
)
from monitor import at_end

TRAINERS = ("train_hrm", "train_mlm", "train_gpt2")
SYNC_EVERY = 200  # steps between comparisons of all ranks' parameters; each save also compares them
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# what a run does without where a folder is not there
WITHOUT = {"cluster": "a process that is lost is not named",
           "loggers": "no plan and no warning of an edit is printed, trainer.py is not kept, and the curves "
                      "are in metrics.jsonl alone",
           "ops": "loss and attention take longer, and their last bits are others",
           "prepare": "only prepared data are read, and no samples are written",
           "weights": "no samples are written"}
# it warns against in-place operations in selectively checkpointed code; blocks have none
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


# -----------------------------------------------------------------------------------------------------------
# Start and end


def ending_of(error: BaseException, explain=None) -> tuple[int, str, str]:
    """For the error that ended main(): the exit code, the text for this process to print, and the reason for
    the other ranks to print. Prints an unforeseen error itself, with its traceback, unless `explain`, that of
    cluster/diagnosis.py, knows better.
    """
    if isinstance(error, SystemExit):  # from --help
        return error.code or 0, "", ""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped", "it was stopped by Ctrl-C."
    if isinstance(error, BrokenPipeError):  # as after `--dry-run | head`, or before the first step of a run
        late = dist.is_initialized()
        return int(late), "error: standard output is closed." * late, "its standard output was closed."
    if isinstance(error, UserError | RunError):
        return error.exit_code, f"error: {error}", str(error)
    if explain and (found := explain(error, heartbeat, show_traceback)):
        return found
    show_traceback(error)
    return 1, "", first_line(error)


def show_traceback(error: BaseException):
    sys.excepthook(type(error), error, error.__traceback__)
    get_error_handler().record_exception(error)  # for torchrun's own report


launched = None  # the main() that `launch` runs, and after which it ends the process


def launch(main):
    """Runs main() and ends the process. Exit codes: 0, 1 for a failure or NotNow, 2 for any other UserError
    or a missing compiler, 130 for Ctrl-C.

    Ends with os._exit, because torch's C++ threads can abort a process that Python is tearing down.
    """
    global launched
    launched = main
    get_error_handler().initialize()
    explain = None
    with room("cluster"):
        from cluster.diagnosis import explain
    try:
        with access():
            main()
        code, text, reason = 0, "", ""
    except BaseException as error:
        code, text, reason = ending_of(error, explain)
    at_end.exit_code = code
    unwritten = one_has_failed() and Checkpoints.unwritten
    for signum in STOP_SIGNALS:  # when the first process fails, torchrun sends signals to the others
        signal.signal(signum, signal.SIG_IGN if unwritten else signal.SIG_DFL)
    if text and (code != 130 or local_rank() == 0):
        time.sleep(1.0 * (local_rank() > 0))  # meanwhile torchrun stops this process if local rank 0 failed
        print(text, file=sys.stderr, flush=True)
    if heartbeat:  # before this process waits for files
        heartbeat.stop(reason)
    at_end.close()
    if code == 0:  # after a failure this can hang
        leave_group(sys.excepthook)
    with suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()  # stderr is line-buffered
    os._exit(code)


def with_cleanup(main):
    """Makes a main() that can be called again, as in a notebook. At its end all that it has begun is wound
    up, and signals are handled as before; but where one of several processes has failed the process group
    stays, because destroying it can hang, and so do the handlers of the signals that torchrun then sends.
    """
    @functools.wraps(main)
    def run(argv: list[str] | None = None):
        if launched is run:  # `launch` winds up
            return main(argv)
        handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        if not dist.is_initialized():  # by the caller, who then keeps the group
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
    """Whether this is one of several processes, and ends with an error."""
    return at_end.exit_code > 0 and dist.is_initialized() and dist.get_world_size() > 1


def leave_group(excepthook):
    """Undoes init_process_group, which has replaced that sys.excepthook, unless this can hang."""
    if dist.is_initialized() and not one_has_failed():
        if heartbeat:
            heartbeat.stop("")
        gc.collect()  # models and optimizers that main() left behind keep the process group alive
        dist.destroy_process_group()
        sys.excepthook = excepthook


def leave_at_once(number, frame):
    """Ends the process on Ctrl-C while it compiles or counts FLOPs, where torch can lose an exception."""
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


def start(command: "Command") -> World:
    """Joins the process group of a trainer. Raises UserError on all ranks if their flags differ."""
    args = settle(command).args
    world = init(args.backend, args.device, args.timeout, fast=args.fast)
    flags = [*vars(args).items()]

    def compare():
        assert_same("which of the folders beside data.py are there", " ".join(rooms_here()),
                    f"copy the same of {', '.join(ROOMS)} to every node")
        if odd := find_mismatch([*map(str, flags)]):
            name = flags[odd[0]][0].replace("_", "-")
            raise UserError(f"--{name} on rank {odd[1]} differs from the other ranks: start every node with "
                            "the same flags; prepared pairs need the same files everywhere.")

    connect(world.backend, compare)
    return world


def init(backend: str = "auto", device: str = "auto", timeout: float = 600, compare=None,
         fast: bool | None = False) -> World:
    """Joins the process group that torchrun describes, or creates one with a single process.

    `timeout`, in seconds, bounds every collective. `fast` gives up sums that are the same in each start.
    compare(device, backend) can look for differences between ranks that would make the process group hang.
    Raises UserError on all ranks if one lacks the device.
    """
    global heartbeat
    env = os.environ
    by_torchrun = {"RANK", "WORLD_SIZE"} & env.keys()
    if "GLOO_SOCKET_IFNAME" not in env:  # what a notebook starts next may want another network card
        at_end.callback(env.pop, "GLOO_SOCKET_IFNAME", None)
    rank, world_size, store = 0, 1, dist.HashStore()
    if by_torchrun and "cluster" in rooms_here():
        with room("cluster"):
            from cluster.heartbeat import join
        rank, world_size, store, heartbeat = join(timeout)
        if heartbeat:
            heartbeat.wait_for_all()
    elif by_torchrun:
        rank, world_size, store = int(env["RANK"]), int(env["WORLD_SIZE"]), None
    local_world_size = from_launcher("LOCAL_WORLD_SIZE", 1)
    where, backend = with_barrier(choose_device, backend, device, local_world_size)
    if compare:
        compare(where, backend)
    if heartbeat:
        heartbeat.refuse_other_backends(backend)
    # cluster/heartbeat.py chooses it
    chosen = backend != "gloo" or "cluster" in rooms_here() or "GLOO_SOCKET_IFNAME" in env
    if world_size > local_world_size and not chosen and local_rank() == 0:
        say("WARNING: there is no folder cluster/ beside ddp_utils.py, so gloo takes the network card of "
            "this machine's name: copy the folder, too, or set GLOO_SOCKET_IFNAME")
    gpu = None
    if where.type == "cuda":
        gpu = where
        torch.cuda.set_device(gpu)
        with room("ops"):
            from ops.device import use_libdevice_of_triton
            use_libdevice_of_triton()
    else:
        with room("ops"):
            from ops.device import keep_freed_memory
            keep_freed_memory()
        if "OMP_NUM_THREADS" not in env or env["OMP_NUM_THREADS"] == "1" and local_world_size > 1:
            # torchrun's default, OMP_NUM_THREADS=1, leaves most cores idle
            torch.set_num_threads(max(1, cpu_count() // local_world_size))
    if not by_torchrun:  # gloo opens a port even for one process; keep it local
        env.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # By default (3; torchrun sets 1) NCCL aborts the process when a collective times out, before Python can
    # say why. With 2 it aborts only the communicator. The collective then returns garbage, and the next one
    # raises. There is always a next one before a checkpoint is written.
    env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    # NVSwitches may add up in another order after a new start (issues 1497 and 2360 of NCCL), so a resumed
    # run on eight GPUs would differ from an uninterrupted one. NCCL keeps the first value that a process has.
    if not fast:
        env.setdefault("NCCL_NVLS_ENABLE", "0")
    # in ms; before aborting, NCCL's watchdog waits four times this long for reports that nobody asked for
    env.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    store = store and dist.PrefixStore("process group", store)  # without cluster/ that of MASTER_ADDR
    connect(backend, lambda: dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout),
        device_id=gpu))
    return World(rank, world_size, local_rank(), f"node{env.get('GROUP_RANK') or 0}",
                 from_launcher("GROUP_WORLD_SIZE", 1), where, backend)


def connect(backend: str, function):
    """Calls function(), in which the ranks first reach each other. RunError if that fails on this rank, or as
    soon as it has failed on another.
    """
    try:
        if backend == "gloo" and heartbeat:  # NCCL needs the thread that has chosen the GPU
            return heartbeat.watch(function)
        return function()
    except RuntimeError as error:
        if heartbeat and heartbeat.ask():  # a rank was lost, see cluster/diagnosis.py
            raise
        advice = "its processes cannot reach each other."
        with room("cluster"):
            from cluster.diagnosis import when_cut_off
            advice = when_cut_off(backend, heartbeat)
        raise RunError(f"{backend} fails in its first collective ({first_line(error)}): {advice}") from None


# -----------------------------------------------------------------------------------------------------------
# Agreement


heartbeat = None  # a Heartbeat of cluster/heartbeat.py, if there are several processes


def with_barrier(function, *args):
    """Runs function(*args) on every rank, however long it takes, and waits for all. If it raises on one rank,
    with_barrier raises a UserError with the same exit code on the others, so that none waits for the failed
    rank. Without cluster/ the others wait for --timeout, and then fail.
    """
    if heartbeat:
        return heartbeat.with_barrier(function, *args)
    result = function(*args)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    return result


def on_rank0(function, *args):
    """Returns function(*args) of rank 0 on all ranks. Its error there is a UserError on the others."""
    answer = [with_barrier(lambda: function(*args) if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def all_gather(value) -> list:
    """The values of all ranks, small and plain, on each."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def reduce_sum(values: list, world: World) -> list[float]:
    """Sums a few numbers, floats or scalar tensors, over all ranks in one float64 all-reduce."""
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in values])
    dist.all_reduce(packed)
    return packed.tolist()


def async_sum(value: float, world: World):
    """Starts summing a number over all ranks. Returns a function that waits for the sum and returns it as a
    float64 scalar on the device. On a GPU the host does not wait.
    """
    total = torch.full((), value, dtype=torch.float64, device=world.device)  # a copy would wait for the GPU
    under_way = dist.all_reduce(total, async_op=True)

    def wait() -> Tensor:
        under_way.wait()
        return total

    return wait


def find_mismatch(values: list) -> tuple[int, int] | None:
    """(index, odd rank) of the first of these plain values that differs between ranks, or None."""
    for index, of_ranks in enumerate(zip(*all_gather(values))):
        if len(set(of_ranks)) > 1:
            usual = statistics.mode(of_ranks)  # the first of the most frequent
            return index, next(rank for rank, value in enumerate(of_ranks) if value != usual)
    return None


def assert_same(what: str, text: str, way_out: str):
    """Raises UserError naming the first rank whose text differs from the other ranks'."""
    if odd := find_mismatch([text]):
        raise UserError(f"{what} on rank {odd[1]} differs from the other ranks: {way_out}.")


def bit_sum(tensor: Tensor) -> Tensor:
    """The bits of a tensor, summed as integers to an int64 scalar. One flipped bit changes the sum."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(integers)
    if bits.device.type == "cpu":  # torch takes ten times as long as numpy, on all cores
        return torch.tensor(bits.numpy().sum(dtype=np.int64))
    return bits.sum(dtype=torch.int64)


def assert_in_sync(model: nn.Module, begun: bool = True):
    """Compares unsharded parameters and saved buffers across ranks, bit for bit. RunError if they differ.
    Until training has `begun` they do so because of what a trainer did to the model.
    """
    tensors = {name: t for name, t in model.state_dict().items() if not isinstance(t, DTensor)}
    buffers = dict(model.named_buffers())
    names = sorted(tensors, key=lambda name: name in buffers)  # last, see below
    if names and (odd := find_mismatch(torch.stack([bit_sum(tensors[name]) for name in names]).tolist())):
        name = names[odd[0]]
        cause = ("check the memory and the libraries of that node (processors of unlike types round "
                 "differently: there --optimizer muon needs --strategy zero1); the last checkpoint was in "
                 "sync.")
        if name in buffers:  # and all parameters are alike
            cause = ("forward updates this buffer from the data of its own rank: let it sum over all ranks "
                     "what it adds, with torch.distributed.all_reduce.")
        if not begun:
            cause = ("this is before the first step, so what was drawn or changed after new_model is not "
                     "alike: draw it with torch's own generator, which new_model leaves in the same state on "
                     "all ranks, or with ddp_utils.generator.")
        raise RunError(f"{name} on rank {odd[1]} differs from the other ranks (Sync=FAILED): {cause}")


def say_on_other_nodes(world: World, text: str):
    """Prints on the first process of a node without rank 0, which would otherwise print nothing."""
    if world.local_rank == 0 and not world.is_rank0:
        say(f"{world.prefix} {text}")


# -----------------------------------------------------------------------------------------------------------
# Flags

# What a flag is to a run that is resumed:
ANEW = "of one command or machine, or computed at each start: not kept, and a change is not said"
PLANNED = "planned anew for the number of processes, unless it is given; a change is said"
MAY_CHANGE = "as it was, unless it is given; a change is said"
OF_DATA = "as it was, for the same --data"
OF_MODEL = "as MAY_CHANGE: a flag of the model that its parameters do not know"
CHOSEN = "as SHAPE, but a run that starts from trained weights chooses"
SHAPE = "as it was, or as in the weights to start from; another value is refused, see shape_of"
MUST_NOT = "as it was; another value is refused, see check_resumable"
KINDS = {
    ANEW: "out resume tokenizer device backend timeout compile dry_run eval_only export prompt chat fill "
          "prompt_file num_samples stop list_presets wanted_batch largest_batch usual_steps usual_warmup ops",
    PLANNED: "global_batch batch grad_accum",
    MAY_CHANGE: "steps epochs lr schedule warmup weight_decay grad_clip ema precision checkpoint_activations "
                "min_lr decay strategy comm fast wandb log_every eval_every eval_batches save_every "
                "keep_last init_from loss condition sample_prompt sample_every max_new_tokens temperature "
                "top_k top_p bp_steps mask_rate",
    OF_DATA: "max_tokens max_samples min_words",
    OF_MODEL: "dropout eval_cycles bp_cycles",
    CHOSEN: "attention init",
    SHAPE: "n_layer n_head d_model vocab_size modern ff h_cycles l_cycles inject_input halt window "
           "global_every",
    MUST_NOT: "seq_len data loss_on seed size optimizer trainer",
}
FLAGS = {name: kind for kind, names in KINDS.items() for name in names.split()}
# of a run that was killed before its first checkpoint
BEGUN = "which has no checkpoint yet, was begun with"
ANOTHER_OUT = "give another --out, or begin anew there with --resume none"


def make_parser(description: str, config_class: type, sizes: dict[str, dict], presets=()) -> ArgumentParser:
    """The parser of a trainer: --size or --preset, its model's flags, and those that all trainers share."""
    keys = dict.fromkeys(itertools.chain(*sizes.values()))
    parser = ArgumentParser(description=description, usage="%(prog)s [FLAGS]")
    with room("loggers"):
        from loggers.hints import table_of_sizes
        parser.epilog = table_of_sizes(keys, config_class, sizes)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--size", choices=sizes, help="a row of the defaults below (tiny)")
    if presets:
        choice.add_argument("--preset", dest="size", choices=presets, help="a recipe instead of a --size")
    flag = flag_group(parser, "model")
    for option in flag_fields(config_class):
        kinds = {bool: BooleanOptionalAction, int: positive_int if option.default != 0 else nonnegative_int}
        text = option.metadata["help"]
        if option.name not in keys and option.default is not None and option.type is not bool:
            text += f" ({option.default})"  # `parse_flags` sets it, because sizes have their own
        kind = option.metadata["type"] or kinds.get(option.type, fraction)
        flag(f"--{option.name.replace('_', '-')}", kind, text)
    add_training_flags(parser)
    if issubclass(config_class, CausalConfig):  # the model writes text
        add_text_flags(parser)
    return parser


def add_training_flags(parser: ArgumentParser):
    flag = flag_group(parser, "data")
    flag("--data", expanded, "a prepared directory, or a source such as stdlib, text:GLOB or fineweb-edu, "
         "which is prepared if needed (from the hub 20 tokens per parameter); A,B,B reads two directories, "
         "and B twice in each epoch")
    flag("--tokenizer", expanded, "gpt2, cl100k_base, o200k_base, bytes, bpe:N or the path of a "
         "tokenizer.json (default: that of the prepared data; bpe:4096 for stdlib, bytes for task:addition, "
         "else gpt2)")
    flag("--max-tokens", parse_count, "prepare at most this many training tokens, of pairs before they are "
         "packed: 500k, 20M, 1.5B")
    flag("--max-samples", parse_count, "prepare at most this many documents")
    flag("--min-words", positive_int, "prepare only documents with at least this many words")
    flag("--seed", number(0, 2**31, int),
         "seed of weights, sample order, dropout and samples of text", 0)
    flag = flag_group(parser, "steps and batches")
    flag("--steps", positive_int, "optimizer steps of the run")
    flag("--epochs", number(1e-9), "passes over the data, instead of --steps")
    flag("--global-batch", positive_int, "sequences in a step, summed over all processes")
    flag("--batch", positive_int, "sequences in a micro-batch (default: the largest divisor up to the "
         "table's)")
    flag("--grad-accum", positive_int, "micro-batches in a step, instead of --batch")
    flag = flag_group(parser, "optimization")
    flag("--optimizer", ("adamw", "muon", "adam-atan2"), "muon: for matrices in blocks, AdamW for "
         "the rest; adam-atan2: AdamW without an epsilon, as HRM-Text has it", "adamw")
    flag("--lr", number(0), "peak learning rate")
    flag("--schedule", ("cosine", "wsd", "constant"), "wsd: constant, then falling (--decay)", "cosine")
    flag("--min-lr", fraction, "rate of the last step of cosine and wsd, as a fraction of --lr", 0.1)
    flag("--decay", number(0.001, 1), "last part of the steps of wsd in which the rate falls", 0.2)
    flag("--warmup", steps_or_fraction, "steps of linear warm-up; below 1 a fraction of the run "
         "(default: see below; in proportion where a run has fewer steps than its size)")
    flag("--weight-decay", number(0), "weight decay of matrices", 0.1)
    flag("--grad-clip", number(0), "clip the gradient norm to this; 0: no clipping", 1.0)
    flag("--ema", fraction, "decay of averaged weights for evaluation, --prompt and --export, after n steps "
         "at most (1 + n) / (10 + n); 0: off", 0.0)
    flag = flag_group(parser, "running")
    flag("--precision", ("auto", "fp32", "bf16", "fp16"), "type of activations (parameters: fp32); "
         "auto: bf16 where the hardware has it", "auto")
    flag("--checkpoint-activations", ("none", "selective", "block"), "recompute in the backward "
         "pass, exactly: block keeps only the input of a block, selective the matrix products too (compiled "
         "on GPUs, some sums are then rounded otherwise); large sizes of the HRM have a default, for 80 GB",
         "none")
    flag("--strategy", STRATEGIES, "what is sharded across processes: nothing, the optimizer state, "
         "also gradients, also parameters, also into host memory; each resumes from any other", "ddp")
    flag("--device", ("auto", "cuda", "cpu"), "auto: a GPU if there is one", "auto")
    parser.add_argument("--dry-run", nargs="?", const="", metavar="GPUSxGB",
                        help="only estimate the memory of each process: here, or on 8x141 (8 GPUs of 141 GB)")
    flag("--comm", ("fp32", "bf16", "late"), "type of what is sent: with --strategy ddp gradients, with "
         "shards and bf16 activations the parameters and gradients of blocks; late, for slow links: int8 "
         "gradients, sent during the next step and applied one step late, best with --optimizer muon", "fp32")
    flag = flag_group(parser, "output")
    flag("--out", utf8_path, "directory of the run (default: runs/MODEL-SIZE-DATA); if it holds one, that is "
         "resumed or used as it was, but for the flags that are given")
    flag("--log-every", positive_int, "steps between log lines", 10)
    flag("--eval-every", positive_int, "steps between evaluations; a longer epoch also ends with one")
    flag("--eval-batches", nonnegative_int, "batches of a validation set to evaluate, each with the table's "
         "global_batch sequences, whatever --global-batch is; 0: all")
    flag("--save-every", positive_int, "steps between checkpoints")
    flag("--keep-last", positive_int, "checkpoints to keep, beside the best", 3)
    flag("--resume", expanded, "auto: from the newest checkpoint in --out; none: start from scratch, in "
         "an --out without checkpoints; or the path of a checkpoint or of a run directory", "auto")
    flag("--init-from", expanded, "start from the weights of hf:DIR_OR_ID, a checkpoint or a run directory, "
         "by default for 3 epochs of 32 sequences a step, with a learning rate of 3e-5 and no warm-up")
    flag("--wandb", BooleanOptionalAction, "also log to Weights & Biases (pip install wandb); with "
         "WANDB_MODE=offline into wandb/ of the run, for wandb sync")
    flag("--eval-only", bool, "evaluate the newest checkpoint, or that of --resume, on the validation "
         "sets of --data (default: of the run), and do nothing else: prints a line and a JSON object, and "
         "leaves the run as it is")
    parser.add_argument("--export", nargs="?", const="hf", default=False, choices=("hf", "gguf"),
                        help="write hf/ for transformers, or with gguf model.gguf for llama.cpp, from the "
                        "newest checkpoint, without training")


def add_rare_flags(parser: ArgumentParser):
    flag = flag_group(parser, "rarely needed")
    flag("--compile", BooleanOptionalAction, "compile each block (default: on GPUs)")
    flag("--fast", BooleanOptionalAction, "on GPUs, allow non-deterministic kernels: the last bits then "
         "change when a run resumes, and in compiled blocks with --checkpoint-activations block")
    flag("--backend", ("auto", "nccl", "gloo"), "auto: nccl on GPUs", "auto")
    flag("--timeout", positive_int, "seconds to wait for a lost process", 600)


def add_text_flags(parser: ArgumentParser):
    flag = flag_group(parser, "prompts and responses")
    flag("--loss", ("response", "all"), "tokens to learn (default: response with pairs, else all)")
    text = without_surrogates
    flag("--prompt", text, "continue or answer a text with the newest checkpoint, without training")
    flag("--prompt-file", expanded, "the same with each line of a file, or of standard input (-)")
    flag("--chat", bool, "answer prompts that are typed in, one after another")
    flag("--condition", text, "text, or name of a special token, to put in front of a prompt", "")
    flag("--sample-prompt", text, "prompt of the samples (default with pairs: a held-out one)", "")
    flag("--sample-every", nonnegative_int, "evaluations between samples; 0: only at the end", 0)
    flag = flag_group(parser, "sampling")
    flag("--num-samples", positive_int, "texts for each --prompt, written at once", 1)
    flag("--max-new-tokens", positive_int, "length of a sample (200; an answer's: to the end of the context)")
    flag("--temperature", number(0), "0: always the likeliest token", 0.8)
    flag("--top-k", nonnegative_int, "likeliest ids to keep; 0: all", 50)
    flag("--top-p", number(0, 1), "then the likeliest ids whose probabilities reach this sum", 1.0)
    flag("--stop", text, "a text at which an answer ends, without it", "")


def uses_model(args: Namespace) -> bool:
    """Whether the flags ask for use_model instead of training."""
    return any(vars(args).get(name) not in (None, False)
               for name in ("eval_only", "export", "prompt", "prompt_file", "chat", "fill"))


@dataclass
class Command:
    """A command line, parsed once."""

    parser: ArgumentParser
    config_class: type
    rows: dict[str, dict]  # the sizes
    argv: list[str] | None
    given: dict  # the flags that it gives
    defaults: dict  # of all flags, for what neither it nor a row says


def parse_flags(parser: ArgumentParser, config_class: type, sizes: dict[str, dict],
                argv: list[str] | None) -> Command:
    """Parses the command line of a trainer. Raises UserError for flags that exclude each other."""
    add_rare_flags(parser)  # after those of the trainer, so that --help ends with them
    defaults = dict(parser._defaults)  # of set_defaults
    for action in parser._actions:
        if isinstance(action.default, str) and action.default != SUPPRESS:  # as argparse does
            action.default = parser._get_value(action, action.default)
        if action.default is not SUPPRESS:
            defaults[action.dest] = action.default
        action.default = SUPPRESS  # what is not given is absent
    parser._defaults.clear()
    defaults |= {"vocab_size": None} | {option.name: option.default for option in flag_fields(config_class)}
    given = vars(parser.parse_args(argv))
    if "steps" in given:
        if "epochs" in given:
            raise UserError("--epochs is not allowed with --steps: leave one of them out.")
        given["epochs"] = None
    if "dry_run" in given:
        if uses_model(Namespace(**given)):
            raise UserError("--dry-run is alone: leave out --prompt, --export and the like.")
        if "init_from" in given and "size" not in given:
            raise UserError("--dry-run does not read the weights of --init-from: give their --size as well.")
        if "out" in given and list_checkpoints(given["out"]):
            raise UserError(f"--dry-run does not read the run in {given['out']}: give its flags, without "
                            "--out.")
    return Command(parser, config_class, sizes, argv, given, defaults)


# -----------------------------------------------------------------------------------------------------------
# Which run: its flags, directory, data, batches and model, and whether it may resume


def settled(given: dict, saved: dict, weights: dict, row: dict, defaults: dict) -> dict:
    """The flags of a run. What the command gives wins over what the resumed run had, that over what the
    weights of --init-from say, that over the row of the size, and that over the defaults.
    """
    return defaults | row | weights | saved | given


@dataclass
class Settled:
    """All flags of a run, and what stands behind its batches."""

    args: Namespace
    row: dict  # of its size
    wanted_batch: int  # sequences in a step, where the command does not say
    largest_batch: int  # sequences in a micro-batch at most, where the command does not say
    eval_batch: int  # sequences in one of --eval-batches
    usual_steps: int | None  # for which the row's --warmup is meant, if that is taken
    usual_warmup: float | None  # that --warmup


def settle(command: Command, saved: dict | None = None, weights: dict | None = None) -> Settled:
    """The flags of the run that a command begins or, if `saved` is its checkpoint or what its config.json
    says, goes on with. `weights` is what is known of those of --init-from. Raises UserError for flags that
    contradict either.
    """
    given, rows = command.given, command.rows
    record = saved or weights or {"model_config": {}, "settings": {}}
    size = saved["settings"]["size"] if saved else given.get("size") or record.get("size") or next(iter(rows))
    row = rows.get(size, {})  # a run goes on where its size is gone
    command.parser.check_row(size, row)
    shape = shape_of(command, record, bool(saved)) if record["model_config"] else {}
    kept = flags_of_run(saved, command) | shape if saved else {}
    tuned = {}
    if "init_from" in given and not saved:
        with room("weights"):  # find_run says where it is missing, once all processes are there
            from weights.init_from import gentler
            tuned = gentler(row) | shape
    flags = settled(given, kept, tuned, row | {"size": size}, command.defaults)
    for action in command.parser._actions:
        value = (kept | given).get(action.dest)
        named = action.choices and action.dest not in ("size", "precision")  # which have names beside these
        if named and value not in (None, *action.choices):
            raise UserError(f"{saved['path']} says {action.dest} {value}, which is gone: use "
                            f"{code_trained_with(saved['path'])}, or train again in another --out.")
    recipe = row | tuned | kept
    flags |= {name: given.get(name) for name, kind in FLAGS.items() if kind == PLANNED}
    sources = sources_of(flags["data"])
    own_data = saved and flags["data"] == saved["settings"]["data"]  # what the run was trained on
    length = None if own_data else row_of(directory_of(sources[0], flags["tokenizer"]))
    flags["seq_len"] = given.get("seq_len") or length or record.get("seq_len") or flags["seq_len"]
    if own_data:
        flags["tokenizer"] = flags["tokenizer"] or saved["tokenizer_flag"]
    elif not any(Path(source).is_dir() for source in sources):  # whose ids the weights know
        flags["tokenizer"] = (flags["tokenizer"] or record.get("tokenizer_flag")
                              or record.get("tokenizer_file"))
    wanted = recipe["global_batch"]
    usual_batch = wanted if saved else row["global_batch"]
    of_size = {"usual_steps": recipe.get("steps"), "usual_warmup": flags["warmup"]}
    before = saved["settings"] if saved else of_size
    usual_steps = None if "warmup" in given else before.get("usual_steps")
    if saved and saved.get("begun") and usual_steps:  # the run begins again, perhaps with other steps
        flags["warmup"] = before["usual_warmup"]
    return Settled(Namespace(**flags), row, wanted, recipe.get("largest_batch", recipe["batch"]),
                   recipe.get("eval_batch", usual_batch), usual_steps, before.get("usual_warmup"))


def flags_of_run(saved: dict, command: Command) -> dict:
    """What a resumed run keeps of its settings."""
    given, settings = command.given, saved["settings"]
    if "MIN_LR_RATIO" in settings:  # a constant of the trainers until 2026-11-27
        settings["min_lr"] = settings["MIN_LR_RATIO"]
    names = command.defaults.keys() | {"largest_batch", "eval_batch"}
    kept = {name: value for name, value in settings.items()
            if name in names and (name == "largest_batch" or FLAGS.get(name) != ANEW)}
    if given.get("data", settings["data"]) != settings["data"]:
        kept |= {name: None for name, kind in FLAGS.items() if kind == OF_DATA}
    if uses_model(Namespace(**given)) and not given.get("eval_only"):
        kept["precision"] = "auto"  # whatever this machine computes fast
    return kept


def shape_of(command: Command, record: dict, resumed: bool) -> dict:
    """The model's flags as in a record of a run, or of weights to start from, but for those that may change.
    Raises UserError for a flag that is given and contradicts.
    """
    known = config_of(command.config_class, record["model_config"], record["path"])
    names = [option.name for option in flag_fields(command.config_class)]
    free = {name for name in names if FLAGS.get(name) == OF_MODEL}
    free.add("seq_len")  # rows may be shorter, see check_resumable and find_run
    if not resumed:
        free |= {name for name in names if FLAGS.get(name) == CHOSEN or name not in record["model_config"]}
    shape = {name: getattr(known, name) for name in names if name not in free}
    for name, value in shape.items():
        asked = command.given.get(name)
        if asked is None or replace(known, **{name: asked}) == known:
            continue
        flag = f"--{'no-' * (asked is False)}{name.replace('_', '-')}"
        if record.get("begun"):
            raise UserError(f"{record['path']}, {BEGUN} {name} {value}, but the flags say {name} {asked}: "
                            f"leave out {flag}, {ANOTHER_OUT}.")
        raise UserError(f"{record['path']} was trained with {name} {value}, but the flags say {name} "
                        f"{asked}: leave out {flag}, or start a new run with another --out and without "
                        "--init-from.")
    return shape


def find_checkpoint(out: Path, args: Namespace, world: World, family: str) -> dict | None:
    """The checkpoint that --resume names, or with `auto` the newest of a run directory; None if a run begins.
    Raises UserError on all ranks if another node holds a later one than rank 0 does, which happens where the
    nodes are numbered anew.
    """
    tell = functools.partial(say, file=sys.stderr if uses_model(args) else None)  # apart from a model's text
    if args.resume not in ("auto", "none"):
        return load_checkpoint(args.resume, tell, family=family)
    # a best.pt that alone is left of a run that went back is no reason to refuse the others
    newest = with_barrier(lambda: max(
        ((path.name != "best.pt", step_of(path)) for path in list_checkpoints(out)), default=(False, 0)))
    found = all_gather((newest, f"{world.node} ({HOST})"))
    ours, _ = found[0]
    theirs, where = max(found)
    first = ours[1]
    if theirs > ours:
        raise UserError(f"{where} holds step {theirs[1]} of {out}, node0 only step {first}: start that "
                        f"machine as node 0, copy its {out} to node 0, or, to go back, delete its later "
                        "checkpoints.")
    if not uses_model(args) and (args.resume == "none" or not first):
        return None
    if world.is_rank0 and first:
        tell(f"reading the checkpoint of step {first} in {out}")  # which can take a while
    return load_checkpoint(out, tell, family=family)


def run_directory(args: Namespace, trainer: str) -> Path:
    """--out, or a name such as runs/hrm-tiny-stdlib-bpe4096. A copy of a trainer has runs of its own, such as
    runs/train_mine-tiny-stdlib-bpe4096 of train_mine.py.
    """
    family = trainer.removeprefix("train_") if trainer in TRAINERS else trainer
    names = [args.size if args.size.startswith(family) else f"{family}-{args.size}"]
    names += [directory_of(source, args.tokenizer).name for source in sources_of(args.data)]
    return args.out or Path("runs", "-".join(names))


@dataclass
class Asked:
    """What a command asks for: a run to begin, to resume or to use."""

    model_class: type
    args: Namespace  # all flags
    settled: Settled
    world: World
    constants: dict  # of the trainer, by name
    trainer: Path  # its file
    command: str  # of this start
    out: Path
    saved: dict | None  # the checkpoint to resume from or to use
    begun: dict | None  # what config.json says of a run that was killed before its first checkpoint
    began: str | None  # what a run and its branches are known by; older ones have none
    metric: Callable | None = None  # what a trainer measures beside the loss, see evaluate
    change_data: Callable | None = None  # what a trainer changes in its Dataset, see load_data


@dataclass(kw_only=True)
class Run(Asked):
    """What will be trained."""

    dataset: Dataset
    steps: int
    global_batch: int  # sequences in a step, over all processes
    batch: int  # sequences in a micro-batch
    grad_accum: int  # micro-batches in a step
    checkpoints: "Checkpoints"
    text: monitor.TrainLog  # train.log and the screen
    sinks: list  # of the records, see monitor.RunLog
    lost: Callable  # a RunLock's
    flops_factor: float = 1.0  # FLOPs of a step, in those of one training pass of the model

    def say(self, text: str):
        """Prints a text and appends it to train.log, on rank 0."""
        self.text.say(text)


def command_line(trainer: Path, world: World, argv: list[str] | None) -> str:
    """This start's command, to be pasted into a shell in the same directory (on several nodes: of node 0)."""
    env = os.environ
    words = sys.argv if argv is None else [trainer, *argv]
    launcher = "python"
    if "TORCHELASTIC_RUN_ID" in env:
        launcher = f"torchrun --nproc_per_node={env['LOCAL_WORLD_SIZE']}"
        if world.nodes > 1:
            launcher += (f" --nnodes={world.nodes} --node_rank={env['GROUP_RANK']} "
                         f"--master_addr={env['MASTER_ADDR']} --master_port={env['MASTER_PORT']}")
    return f"{launcher} {shlex.join(map(str, words))}"


def find_run(model_class: type, command: Command, world: World, constants: dict) -> Asked:
    """Finds the run directory and the checkpoint to resume from or to use. All ranks call this.

    A resumed run is what it was: see `settled`. So is one that was killed before its first checkpoint, which
    begins again. `constants` is the trainer's globals(), of which names in capitals that are numbers, texts
    or tuples are recorded. Nothing is written or locked. Raises UserError on all ranks.
    """
    trainer = Path(constants.get("__file__", "notebook"))
    weights = missing = None
    if "init_from" in command.given:
        try:
            with room("weights", "--init-from"):
                from weights.init_from import assert_context, nearest_size, weights_of
            weights = weights_of(model_class, command.given["init_from"], complete=False)
            weights["size"] = nearest_size(command.rows, weights)
        except UserError as error:  # does not matter to a run that has begun
            missing = error
    flags = settle(command, weights=weights)
    out = run_directory(flags.args, trainer.stem)
    saved = find_checkpoint(out, flags.args, world, model_class.__name__)
    begun = None if saved else on_rank0(run_without_checkpoint, out, flags.args)
    record = saved or begun
    if record:
        assert_family(record, model_class)
        flags = settle(command, record)
    elif missing:
        raise missing
    elif command.given.keys() == {"out"} and world.is_rank0 and (out / "checkpoints").is_dir():
        say(f"WARNING: {out} does not say how its run was begun, so this one has the default flags")
    if flags.args.resume != "auto":  # the checkpoint says what it is of
        out = run_directory(flags.args, trainer.stem)
        if saved and (later := later_of_branch(out, saved, flags.args)):
            saved = later
            flags = settle(command, saved)
    args = flags.args
    assert_same("the precision", str(compute_dtype(args.precision, world.device)),
                "give --precision fp32 or bf16, because auto depends on the processor")
    refuse_gloo(args, world)
    if not uses_model(args):
        refuse_together(args, world, saved)
    if weights and not record:
        assert_context(model_class, weights, args.seq_len)
    began = f"{time.strftime('%F %T')} {os.urandom(4).hex()}"
    constants = {name: value for name, value in constants.items()
                 if name.isupper() and isinstance(value, int | float | str | tuple)}
    return Asked(model_class, args, flags, world, constants, trainer,
                 command_line(trainer, world, command.argv), out, saved, begun,
                 record["settings"].get("began") if record else began)


def run_without_checkpoint(out: Path, args: Namespace) -> dict | None:
    """What config.json says of a run that was killed before its first checkpoint, as a checkpoint would, if
    there is one. Raises UserError if it branched off, or if something of an earlier run should stay.
    """
    for name in ("checkpoints/best.pt", "hf", "model.gguf"):
        if (out / name).exists():
            way = f", --resume {out / name} to go on from it" if name.endswith(".pt") else ""
            raise UserError(f"{out} has no checkpoint to go on from, but {name}, which should stay: give "
                            f"another --out{way}, or move it away.")
    if args.resume != "auto":
        return None
    config = monitor.read_config(out)
    settings = config.get("settings")
    if not isinstance(settings, dict) or not {"size", "data", "global_batch", "batch"} <= settings.keys():
        return None
    if not {"family", "model_config", "seq_len", "tokenizer"} <= config.keys():
        return None
    if (branch := settings.get("resume", "auto")) not in ("auto", "none"):
        raise UserError(f"{out} branches off from {branch}, and has no checkpoint yet: give --resume "
                        f"{branch} again, or begin anew there with --resume none.")
    return config | {"path": str(out), "begun": True} | tokenizer_of_run(out, settings)


def refuse_gloo(args: Namespace, world: World):
    """Raises UserError where the process would crash: gloo cannot exchange shards that are on GPUs."""
    shards = args.strategy in SHARDED and (args.eval_only or not uses_model(args))
    if shards and world.backend == "gloo" and world.device.type == "cuda":
        raise UserError(f"--strategy {args.strategy} on GPUs needs NCCL, and the backend is gloo: give "
                        "--strategy ddp or zero1, or --backend nccl.")


def later_of_branch(out: Path, saved: dict, args: Namespace) -> dict | None:
    """The checkpoint to go on with where --resume branches off from `saved` into a directory that holds later
    ones of that branch: the same command resumes. Raises UserError if they are of another run.
    """
    if uses_model(args) or on_rank0(lambda: is_in(saved, out) or not list_checkpoints(out)):
        return None
    newest = load_checkpoint(out, print)
    settings = newest["settings"]
    if settings.get("began") != saved["settings"].get("began"):
        raise UserError(f"{out} holds another run than {args.resume}: give another --out, or leave out "
                        "--resume to go on with that.")
    return newest if settings.get("resume") == args.resume and newest["step"] > saved["step"] else None


def refuse_together(args: Namespace, world: World, saved: dict | None):
    """Raises UserError for flags that cannot train together, or not without a folder that is gone."""
    if args.strategy in SHARDED and args.optimizer == "muon":
        raise UserError("--optimizer muon needs full matrices: use --strategy ddp or zero1, or start a new "
                        "run with --optimizer adamw.")
    dtype = compute_dtype(args.precision, world.device)
    if args.comm == "bf16" and args.strategy == "zero1":
        raise UserError("--comm bf16 is for --strategy ddp, zero2 and zero3: give one of them, or --comm "
                        "fp32.")
    if args.comm == "bf16" and args.strategy != "ddp" and dtype != torch.bfloat16:
        raise UserError("--comm bf16 with shards needs bfloat16 activations: give --precision bf16, or "
                        "--comm fp32.")
    if args.comm == "late":
        refuse_without("cluster", "--comm late")
        if args.strategy != "ddp" or dtype == torch.float16:
            raise UserError("--comm late needs --strategy ddp, and --precision bf16 or fp32: give those, or "
                            "--comm fp32.")
    if args.ema:
        refuse_without("ops", "--ema")
    if args.optimizer == "adam-atan2":
        refuse_without("ops", "--optimizer adam-atan2")
    if args.wandb and not saved:  # its state does not need it
        refuse_without("loggers", "--wandb")


def located(source: str, args: Namespace, useful: int, local_rank: int) -> Path:
    """The directory of a source of --data, prepared if necessary, see locate in prepare/pipeline.py."""
    limits = {name: getattr(args, name) for name in ("max_tokens", "max_samples", "min_words")}
    directory = directory_of(source, args.tokenizer)
    if directory == Path(source) and not any(limits.values()):
        return directory
    watch = heartbeat.raise_if_lost if heartbeat else lambda: None
    with room("prepare"):
        from prepare.pipeline import locate
        return locate(source, args.tokenizer, useful, local_rank, watch, args.seq_len, **limits)
    manifest = read_manifest(directory)
    if not manifest or any(limits[name] not in (None, manifest["settings"].get(name)) for name in limits):
        refuse_without("prepare", f"--data {source}")
    return directory


def load_data(asked: Asked, **example) -> Dataset:
    """The data set of --data, prepared first if necessary. From the hub it takes 20 tokens per parameter, or
    --max-tokens. `asked.change_data`, a trainer's own function, may then replace its `train`, `val` and
    `masker_class`, for training and --eval-only alike. `example` has what the model's `example` takes more.
    """
    args, config_class = asked.args, asked.model_class.Config
    with torch.device("meta"):
        model = asked.model_class(config_class(**flags_of_model(config_class, args)))
    useful = 20 * num_params(model)
    with room("cluster"):
        from cluster.diagnosis import refuse_lone_tasks
        from cluster.memory import before_data
        refuse_lone_tasks()
        useful = with_barrier(before_data, asked, example)  # with the vocabulary that --tokenizer will have

    def read():
        directories = [located(source, args, useful, asked.world.local_rank)
                       for source in sources_of(args.data)]
        plain = None
        for directory in directories:
            if not (directory / "manifest.json").is_file():
                with room("prepare", f"{directory}, which has no manifest.json,"):
                    from prepare.llm_c import manifest_of_plain_shards as plain
        dataset = Dataset(directories, args.seq_len, args.tokenizer, vars(args).get("loss", "all"), plain)
        if asked.change_data:
            asked.change_data(dataset)
            dataset.check_sets()
        return dataset

    dataset = with_barrier(read)
    sizes = [shards.rows for shards in (dataset.train, *dataset.val.values())]  # which change_data may change
    assert_same("the data", f"{dataset.fingerprint} {sizes}",
                "copy the same files to every node, or prepare them there with the same command")
    return dataset


def open_run(asked: Asked, dataset: Dataset) -> Run:
    """Locks the run directory, opens its train.log and sets the steps and batches. If a newer checkpoint was
    written before the directory was locked, that is taken. Raises UserError on all ranks.
    """
    args, world, out, flags = Namespace(**vars(asked.args)), asked.world, asked.out, asked.settled
    lock = monitor.RunLock(out)
    on_rank0(lock.acquire)
    text = monitor.TrainLog(out / "train.log", world.prefix, world.is_rank0)
    checkpoints = Checkpoints(out, world, args.keep_last, text.say, lock.lost)
    saved = checkpoints.load(args.resume, asked.saved)
    wanted = flags.wanted_batch
    global_batch, batch, grad_accum = plan_batch(world.world_size, args.global_batch, args.batch,
                                                 args.grad_accum, wanted, flags.largest_batch)
    if args.batch or args.grad_accum:
        flags = replace(flags, largest_batch=batch)  # also when the run is resumed
    if global_batch * args.seq_len > 1e9:
        raise UserError(f"a step of {global_batch:,} sequences of {args.seq_len} tokens takes hours: lower "
                        "--global-batch, or --batch and --grad-accum.")
    if not (args.global_batch or args.batch and args.grad_accum) and global_batch != wanted:
        text.say(f"{wanted} sequences a step do not divide among {world.world_size} processes: taking "
                 f"{global_batch}")
        if abs(global_batch / wanted - 1) > 0.05:
            text.say(f"WARNING: {global_batch} sequences a step, not {wanted}, may need another --lr: "
                     "--global-batch chooses another number")
    steps = args.steps
    if args.epochs:  # a resumed run has done some of them
        done, samples = (saved["step"], saved["samples"]) if saved else (0, 0)
        left = math.ceil(args.epochs * dataset.train.rows) - samples
        steps = done + max(0, math.ceil(left / global_batch))
    usual = flags.usual_steps
    if usual and steps < usual and args.warmup >= 1 and not saved:
        of_size, args.warmup = args.warmup, round(args.warmup * steps / usual)
        text.say(f"warm-up over {args.warmup} of {steps} steps, as over {of_size} of {usual}: --warmup "
                 "chooses another number")
    asked = replace(asked, args=args, settled=flags, saved=saved, begun=None if saved else asked.begun)
    sinks = [monitor.MetricsFile(out / "metrics.jsonl")]
    with room("loggers"):
        from loggers.start import sinks_of
        sinks += sinks_of(args, out, text.say, lock.lost)
    return Run(**vars(asked), dataset=dataset, steps=steps, global_batch=global_batch, batch=batch,
               grad_accum=grad_accum, checkpoints=checkpoints, text=text, sinks=sinks, lost=lock.lost)


def new_model(run: Run, **config) -> nn.Module:
    """The model to train: random or from --init-from, or uninitialized if a checkpoint will be restored into
    it. `config` has the fields of its configuration that come from the data.
    """
    model_class, args, dataset, world = run.model_class, run.args, run.dataset, run.world
    saved = run.saved
    padded_vocab = args.vocab_size or pad_vocab(config["vocab_size"])
    config = model_class.Config(padded_vocab=padded_vocab, **flags_of_model(model_class.Config, args),
                                **config)
    if vars(config).get("attention") == "prefix" and dataset.loss == "all":
        raise UserError("--attention prefix needs pairs and --loss response, else tokens would see what "
                        "they are to learn: use isolated or causal, or prepare the data with "
                        "--prompt-field and --response-field.")
    if vars(config).get("response", -1) >= 0:
        with room("weights"):
            from weights.sampling import sample_prompt
            sample_prompt(args, dataset)  # raises UserError now, and not after hours
    # the rest of the configuration is that of the checkpoint or of the weights
    changes = {name: value for name, value in vars(config).items()
               if name in reading_of(config) or FLAGS.get(name) == OF_MODEL}
    if saved:
        config = config_of(model_class.Config, saved["model_config"] | changes, saved["path"])
        model = build_model(model_class, config, world, args.strategy, args.comm)
    elif args.init_from:
        with room("weights", "--init-from"):
            from weights.init_from import trained_model
        model = trained_model(run, asdict(config), changes)
    else:
        model = build_model(model_class, config, world, args.strategy, args.comm)
        run.say(f"initializing {num_params(model):,} parameters")
        torch.manual_seed(args.seed)
        copy_weights(model, model_class(config).state_dict() if world.is_rank0 else {}, world)
    if args.strategy in SHARDED:  # for begin_log
        model.initial_sums = {name: int(bit_sum(local_shard(p))) for name, p in model.named_parameters()}
    torch.manual_seed(args.seed)  # alike on all ranks, for what a trainer adds to the model or draws again
    return model


def reading_of(config: ModelConfig) -> dict:
    """The fields of a configuration that say which tokens see which."""
    return {name: vars(config)[name] for name in ("attention", "eot", "start", "response", "end")
            if name in vars(config)}


def identity_of(model: nn.Module, run: Run, **settings) -> dict:
    """The description of a run in a checkpoint and config.json: values that must not change on a resume, and
    its settings: the flags, the plan, the trainer's constants, and `settings`, with what set_modes returns.
    """
    args, dataset, flags = run.args, run.dataset, run.settled
    plan = {"steps": run.steps, "global_batch": run.global_batch, "batch": run.batch,
            "grad_accum": run.grad_accum, "wanted_batch": flags.wanted_batch,
            "largest_batch": flags.largest_batch, "eval_batch": flags.eval_batch,
            "usual_steps": flags.usual_steps, "usual_warmup": flags.usual_warmup,
            "world_size": run.world.world_size, "threads": torch.get_num_threads(),
            "ops": "ops" in rooms_here(), "trainer": run.trainer.name, "began": run.began}
    shape = flags_of_model(run.model_class.Config, model.config)
    settings = vars(args) | run.constants | shape | plan | settings
    text = without_surrogates(json.dumps(settings, default=str, ensure_ascii=False))
    return {"family": run.model_class.__name__, "model_config": asdict(model.config), "seq_len": args.seq_len,
            "tokenizer": tokenizer_id(dataset.tokenizer), "data": dataset.fingerprint,
            "loss_on": dataset.loss, "seed": args.seed, "settings": json.loads(text)}


def check_resumable(saved: dict, now: dict, branch: bool, say):
    """Raises UserError if what may not change has changed (for the model's shape, shape_of has done so);
    prints other changes. A `branch` goes on in another directory, where it may have another
    trainer. `saved` may be a run that has no checkpoint yet.
    """
    path = saved["path"]
    before, after = saved["settings"] | saved, now["settings"] | now
    fixed = [name for name, kind in FLAGS.items() if kind == MUST_NOT and name in after]
    fixed += ["ema"] * (not after["ema"]) + ["init_from"] * (not before.get("init_from"))
    if before["tokenizer"].split()[-1] != after["tokenizer"].split()[-1]:  # the digests, whatever the names
        fixed = ["tokenizer"]
    for what in fixed:
        if what == "trainer" and branch:
            continue
        if before.get(what, after[what]) == after[what]:
            continue
        if what == "data":  # by their names, and the beginning of a digest
            before, after = ({what: f"{run['settings'][what]} ({run[what][:12]})"} for run in (saved, now))
        if saved.get("begun"):
            raise UserError(f"{path}, {BEGUN} {what} {before[what]}, now {after[what]}: leave it as it was, "
                            f"{ANOTHER_OUT}.")
        way = f"; --resume {path} branches off" if what == "trainer" else ""
        way = f" (--init-from {path} starts it from these weights{way})" * (what != "tokenizer")
        raise UserError(f"{path} cannot be resumed: {what} was {before[what]}, now {after[what]}. Leave "
                        f"it as it was, or start a new run with another --out{way}.")
    if (ops := after.get("ops", True)) != before.get("ops", True):
        say(f"resuming {'with' if ops else 'without'} the folder ops/, unlike before: from here on the last "
            "bits differ")
    for flag, value in now["settings"].items():
        if (was := saved["settings"].get(flag, value)) != value and FLAGS.get(flag) != ANEW:
            say(f"{'beginning again' if saved.get('begun') else 'resuming'} with {flag} {value} (was {was})")


# -----------------------------------------------------------------------------------------------------------
# Models on ranks, replicated or sharded


def build_model(model_class: type, config, world: World, strategy: str = "ddp",
                comm: str = "fp32") -> nn.Module:
    """Builds a model on this process's device, sharded if `strategy` says so, with uninitialized parameters.
    Parameters are created without memory, so that only rank 0, which has the weights, ever holds all of them
    in host memory. Buffers keep their initial values. Raises UserError if a model cannot be built this way.

    With `comm` bf16, shards of blocks are gathered in bfloat16, to which their layers would cast them anyway,
    and their gradients are summed in it, over the uses of a weight and over ranks. What is outside of blocks
    is used in float32, too, and sent so.
    """
    def on_meta(module: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter:
        return p if p.is_meta else nn.Parameter(p.to("meta"), p.requires_grad)

    torch.manual_seed(0)  # so that random buffers are the same on all ranks, and in a resumed run
    with register_module_parameter_registration_hook(on_meta):
        model = model_class(config)
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(p, name)) != name:
            raise UserError(f"{first} and {name} of {model_class.__name__} are one parameter, which would "
                            "become two: register it once, and use it twice in forward.")
    buffers = {(module, name): buffer for module in model.modules()
               for name, buffer in module.named_buffers(recurse=False)}
    offload = strategy == "zero3-offload"
    if strategy in SHARDED:
        options = {"mesh": init_device_mesh(world.device.type, (world.world_size,)),
                   "reshard_after_forward": strategy != "zero2"}  # zero2 keeps gathered parameters
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        sent = {}
        if comm == "bf16":
            sent["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        for block in blocks_of(model):
            fully_shard(block, **options, **sent)
        fully_shard(model, **options)
        if strategy == "zero2":  # HRM calls blocks repeatedly; free_gathered_params reshards once a step
            model.set_reshard_after_backward(False)
        if hasattr(model, "decode"):
            register_fsdp_forward_method(model, "decode")
    model.to_empty(device="cpu" if offload else world.device)
    for (module, name), buffer in buffers.items():
        if buffer.is_meta:
            raise UserError(f"the buffer {name} of {type(module).__name__} is made from a parameter, which "
                            "has no values yet when the model is built: make it in forward.")
        setattr(module, name, buffer.to(world.device))
    return model


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, in the same memory; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def free_gathered_params(model: nn.Module):
    """Frees all-gathered parameters of zero2 and zero3, which would be stale after an update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def copy_from_rank0(tensor: Tensor, source: Tensor | None, world: World):
    """Copies `source`, an unsharded tensor on rank 0, into `tensor`, sharded or not, on all ranks."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
    if world.is_rank0:
        full.copy_(source)
    dist.broadcast(full, src=0)
    if isinstance(tensor, DTensor):
        full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local_shard(tensor).copy_(local_shard(full))


def transfer(tensor: Tensor, source: int, target: int, world: World) -> Tensor | None:
    """Returns the tensor of rank `source` on rank `target`, which passes one of its shape; None elsewhere."""
    device = "cpu" if world.backend == "gloo" else world.device  # gloo cannot send from a GPU
    if world.rank == source != target:
        dist.send(tensor.to(device), target)
    if world.rank == target != source:
        tensor = torch.empty_like(tensor, device=device)
        dist.recv(tensor, source)
    return tensor if world.rank == target else None


def copy_weights(model: nn.Module, weights: dict[str, Tensor], world: World):
    """Copies unsharded tensors, given by name on rank 0, into the model on all ranks."""
    for name, tensor in model.state_dict().items():
        copy_from_rank0(tensor, weights.get(name), world)


def assert_same_parameters(model: nn.Module, saved: dict):
    """Raises UserError, on all ranks, if the parameters in a checkpoint have other names than the model's."""
    if odd := model.state_dict().keys() ^ saved["tensors"]["model"].keys():
        raise UserError(f"{saved['path']} is from another version of this model (only one of them has "
                        f"{min(odd)}): use {code_trained_with(saved['path'])}, or train again in "
                        "another --out.")


def config_of(config_class: type, saved: dict, where):
    """The configuration in the checkpoint `where`, with defaults for fields that it lacks. Raises UserError
    for a field that is gone, unless it has the value of an attribute with which `config_class` replaces it.
    """
    known = {field.name for field in fields(config_class)}
    config = config_class(**{name: value for name, value in saved.items() if name in known})
    unknown = [name for name in sorted(saved.keys() - known)
               if getattr(config, name, "no such attribute") != saved[name]]
    if unknown:
        raise UserError(f"{where} sets {listed(unknown)}, which {config_class.__name__} does not know: use "
                        f"{code_trained_with(where)}, or train again in another --out.")
    return config


def code_trained_with(where) -> str:
    """The code that trained the run of a checkpoint, by its commit where that is recorded."""
    with room("loggers"):
        from loggers.source import last_commit
        if commit := last_commit(Path(where)):
            return f"the code that trained it (commit {commit})"
    return "the code that trained it"


def assert_family(saved: dict, model_class: type):
    if saved["family"] == model_class.__name__:
        return
    if saved.get("begun"):
        raise UserError(f"{saved['path']}, {BEGUN} a model of the family {saved['family']}, not "
                        f"{model_class.__name__}: use its own trainer, {ANOTHER_OUT}.")
    raise UserError(f"{saved['path']} holds a model of the family {saved['family']}, not "
                    f"{model_class.__name__}: use its own trainer.")


def set_modes(model: nn.Module, run: Run) -> dict:
    """Applies --precision, --checkpoint-activations, --compile and --fast to the model in training. Returns
    what became of them, for identity_of.
    """
    if compiles(run.args.compile, run.world.device):
        run.say("compiling: the first step takes minutes")
    apply_modes(model, run.args, run.world)
    taken = False
    if not run.args.fast:
        with room("ops"):
            from ops.flash_attention_4 import take
            taken = take(model, run, all_gather, at_end)
    return {"precision": str(model.compute_dtype).removeprefix("torch."), "flash_attention_4": taken}


def apply_modes(model: nn.Module, args: Namespace, world: World):
    """Applies the flags of set_modes to any model."""
    if world.device.type == "cuda":
        # By default attention's backward pass on a GPU sums gradients in no fixed order, so a resumed run
        # would differ from an uninterrupted one. warn_only is not enough: with it torch still takes such
        # attention kernels. With this setting Inductor has one shape for each kernel that sums. It still
        # tries shapes of elementwise kernels, which changes no bits.
        if not args.fast:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(not args.fast)  # which an earlier run of this process may have set
        torch.utils.deterministic.fill_uninitialized_memory = False  # saves a fill of each torch.empty
    compiling = {}
    torch._dynamo.config.optimize_ddp = False  # it would split a block where a gradient bucket ends
    # beyond it a block would run uncompiled, with other bits
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if compiles(args.compile, world.device):
        # rounds where eager code does, so that recomputing gives the same bits
        compiling["options"] = {"emulate_precision_casts": not args.fast,
                                # said again for the thread of the backward pass, which may compile, too
                                "deterministic": torch.are_deterministic_algorithms_enabled()}
    use_device(model, world.device, compute_dtype(args.precision, world.device), args.checkpoint_activations,
               **compiling)


# -----------------------------------------------------------------------------------------------------------
# Training state


def wrap(model: nn.Module, world: World, comm: str = "fp32") -> nn.Module:
    """Wraps the model in DistributedDataParallel, unless there is one process, the model is sharded or `comm`
    is late. Parameters must agree before the first step.
    """
    if world.world_size == 1 or comm == "late" or isinstance(model, FSDPModule):
        return model
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # torch 2.11 knows no other name
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True,
                                      init_sync=False)
    if comm == "bf16":  # a lambda, because DDP refuses this hook by name without NCCL
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped


def assert_all_train(model: nn.Module, optimizers: list):
    """Raises UserError unless each parameter that is not frozen is in exactly one optimizer, and in a shard
    if others are, and unless the optimizers have only these and can step without a closure.
    """
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure and closure.default is closure.empty:
            raise UserError(f"{type(optimizer).__name__} evaluates the loss again in its step, and a trainer "
                            "has one loss for each step: use an optimizer whose step needs no closure.")
    whole = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if whole and isinstance(model, FSDPModule):
        raise UserError(f"{listed(whole)} came into the model after new_model, so it is in no shard and its "
                        "gradient would never be averaged: let the model's constructor make it, or use "
                        "--strategy ddp or zero1.")
    count = Counter(p for o in optimizers for group in o.param_groups for p in group["params"])
    if foreign := [list(p.shape) for p in count.keys() - {*model.parameters()}]:
        raise UserError(f"the optimizers have parameters that are not the model's ({len(foreign)}, one of "
                        f"shape {max(foreign)}), so no checkpoint would hold them, and each process would "
                        "train its own: let the model's constructor make them, see docs/changing.md.")
    odd = [f"{name} in {count[p]}" for name, p in model.named_parameters()
           if p.requires_grad and count[p] != 1]
    if odd:
        raise UserError(f"each parameter has to be in one optimizer, but {listed(odd)}: name one "
                        "that is in 2 only once. One in 0 would never train, so freeze it with "
                        "requires_grad_(False) if you mean that.")


def clip_grad_norm(parameters, max_norm: float) -> Tensor:
    """Scales gradients down to a total norm of max_norm (0: no limit). Returns the norm before that."""
    gradients = [p.grad for p in parameters if p.grad is not None]  # frozen parameters have none
    here = [local_shard(g) for g in gradients]
    norm = nn.utils.get_total_norm(here)
    if isinstance(gradients[0], DTensor):
        squared = norm.to(gradients[0].device_mesh.device_type) ** 2
        dist.all_reduce(squared)
        norm = squared.sqrt()
    if max_norm > 0:
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(here, clip.to(here[0].device))
    return norm


class HostCopy:
    """A copy of a scalar on its way from the device to the host. float() waits until it is there, and not for
    what the device does later.
    """

    def __init__(self, scalar: Tensor):
        self._scalar = scalar.to("cpu", non_blocking=True)
        self._arrived = torch.get_device_module(scalar.device).Event()
        self._arrived.record()

    def __float__(self) -> float:
        self._arrived.synchronize()
        return self._scalar.item()


class Norm(Tensor):
    """A scalar on the device that prints as a number, for which the host then waits. What is computed from it
    is a tensor like any other.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # as nn.Parameter has it

    def __format__(self, spec: str = "", **_) -> str:
        return format(self.item(), spec)

    __repr__ = __format__


def skips_on_device(optimizer, whole) -> bool:
    """Whether the device can skip an update of `optimizer`, as torch's fused kernels do if `found_inf` is 1.
    With zero1, `whole` has the parameters of all ranks, so that they agree. What wraps or extends these
    classes may do more in a step. SGD would keep a first momentum without values.
    """
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    known = type(optimizer) in (AdamW, Adam, Adagrad) and not hooks
    return known and all(group["fused"] and p.is_cuda
                         for group in whole.param_groups for p in group["params"])


class TrainState:
    """A model in training: `model`, `wrapped` (in DDP), optimizers, loss scaler, averaged weights.
    `tensors` yields the tensors of a checkpoint; saving and `restore` both iterate over them.
    """

    MAX_SKIPPED = 10  # updates in a row

    def __init__(self, model: nn.Module, optimizers: list, run: Run):
        assert_all_train(model, optimizers)
        args, world = run.args, run.world
        self.model = model
        self._trained = {p: p.requires_grad for p in model.parameters()}
        self._views = {}  # of DDP's buckets, by parameter
        self.world = world
        self.optimizers = optimizers
        self.zero1 = args.strategy == "zero1"
        if self.zero1:  # each process updates some of the parameters and sends those in one buffer
            from torch.distributed.optim import ZeroRedundancyOptimizer
            self.optimizers = [ZeroRedundancyOptimizer(o.param_groups, type(o), lr=o.defaults["lr"],
                                                       parameters_as_bucket_view=True)
                               for o in optimizers]
        # those that hold the state, with zero1 of a part of the parameters
        self.inner = [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers]
        self.groups = {}  # the parameter groups by name, such as "AdamW 0.1"
        for i, (inner, optimizer) in enumerate(zip(self.inner, self.optimizers)):
            for j, group in enumerate(optimizer.param_groups):
                self.groups[f"{type(inner).__name__} {i}.{j}"] = group
        self._made = {name: repr(value) for name, value in self._group_values().items()}
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=model.compute_dtype == torch.float16)
        self.ema = None
        if args.ema:
            with room("ops", "--ema"):
                from ops.ema import EMA
            self.ema = EMA(model, args.ema)
        self.wrapped = wrap(model, world, args.comm)
        self.late = None
        if args.comm == "late":
            with room("cluster", "--comm late"):
                from cluster.late import Late
            self.late = Late(model, self.inner, run)
        self.skipped = 0  # updates in a row whose gradient was not finite
        self._checked = False  # whether checkpoints can hold the optimizers' state
        self._updated = True
        self._norm = None  # of the last step, until the host has read it

    def no_sync(self, accumulating: bool):
        """A context in which DDP keeps gradients local, for all micro-batches of a step but the last. A
        gradient that is None becomes the view of DDP's bucket, as zeros: otherwise a backward pass without
        communication would hold it a second time.
        """
        if empty := {p: view for p, view in self._views.items() if p.grad is None}:
            torch._foreach_zero_(list(empty.values()))
            for p, view in empty.items():
                p.grad = view
        ddp = isinstance(self.wrapped, DistributedDataParallel)
        return self.wrapped.no_sync() if ddp and accumulating else contextlib.nullcontext()

    def warm_up(self, example: dict, after_ramp: dict | None = None):
        """Throw-away backward passes: one of model(**example), then two of what the steps have after a ramp,
        model(**after_ramp), if they have one.

        The first, without communication, checks that every parameter gets a gradient when training starts
        (RunError if not). The others settle DDP's buckets. DDP rearranges them after its first step, which
        changes the order of sums, so a resumed run would drift from an uninterrupted one.
        """
        if launched:  # elsewhere it would end a notebook's kernel
            signal.signal(signal.SIGINT, leave_at_once)
        self._refuse_thawed()
        later = after_ramp or example
        for i, inputs in enumerate((example, later, later)):
            self.wrapped.zero_grad()
            with copied_buffers(self.model), self.no_sync(i == 0):
                self.wrapped(**inputs)[0].backward()
            free_gathered_params(self.model)
            for name, p in self.model.named_parameters():
                if p.requires_grad and p.grad is None:
                    raise RunError(f"{name} gets no gradient, so it would never train.")
        self.clear_gradients()
        assert_in_sync(self.model, begun=False)
        # from here on the garbage collector skips all existing objects, a scan of which takes half a second
        gc.collect()
        gc.freeze()
        at_end.callback(gc.unfreeze)

    def clip_gradients(self, max_norm: float, stop: "StopVote | None" = None) -> "float | Norm":
        """Clips the gradients. Returns their norm before clipping, exactly 0 for a step without labels. With
        --comm late they are first replaced by those of the step before. Reads the vote `stop` of the step
        before. This is where the host waits for the device, once a step: for all of the step before, if the
        device can skip an update, otherwise for the norm.
        """
        free_gathered_params(self.model)
        self._refuse_thawed()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if self.late:
            self.late.exchange()
        norm = clip_grad_norm(self.model.parameters(), max_norm)
        self._count_skipped()
        if stop:
            stop.read()
        steppers = self.inner if self.zero1 else self.optimizers  # a wrapper, not what it has inside
        if self.scaler.is_enabled() or not all(map(skips_on_device, steppers, self.optimizers)):
            return norm.item()
        return norm.as_subclass(Norm)

    def _refuse_thawed(self):
        """Raises UserError if other parameters are frozen than when this began."""
        if odd := {p for p, trained in self._trained.items() if p.requires_grad != trained}:
            names = [name for name, p in self.model.named_parameters() if p in odd]
            raise UserError(f"requires_grad of {listed(names)} has changed since TrainState began, "
                            "which neither the optimizers nor the other processes would follow: set it "
                            "before make_optimizers and leave it. What is frozen for some steps gets "
                            "p.grad = None in them, see docs/changing.md.")

    def optimizer_step(self, lr: float, grad_norm: "float | Norm"):
        """Steps the optimizers, unless the gradient norm, the same on all ranks, is 0 or not finite. Clears
        the gradients and updates the average. Raises RunError after MAX_SKIPPED updates in a row whose
        gradient was not finite; if the norm is still on the device, clip_gradients does so in the next step.
        """
        if self.late:
            self.late.leave_out()
        on_device = isinstance(grad_norm, Norm)
        steps = (grad_norm > 0) & (grad_norm < math.inf)
        for optimizer, inner in zip(self.optimizers, self.inner):
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("scale", 1.0)
            if on_device:
                inner.found_inf = 1.0 - steps.float()  # as GradScaler sets it
                optimizer.step()
                del inner.found_inf
            elif steps:
                optimizer.step()
        self.clear_gradients()
        self.scaler.update()  # from what unscale_ has found
        if self.ema:
            self.ema.update()
        self._norm = HostCopy(grad_norm) if on_device else grad_norm
        if not on_device:
            self._count_skipped()
        if not self._checked:  # what no checkpoint can hold is known now, not hours later
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
        if not self.scaler.is_enabled() or self.scaler.get_scale() < 1:  # fp16 first tries smaller scales
            self.skipped = 0 if self._updated else self.skipped + 1
        if self.skipped >= self.MAX_SKIPPED:
            raise RunError(f"the gradient was not finite {self.MAX_SKIPPED} times in a row: lower --lr, or "
                           "use --precision bf16 or fp32; the same command then resumes from the newest "
                           "checkpoint, or from the one before if you delete that.")

    def clear_gradients(self):
        """Gradients become None, so that nobody takes zeros for the norms of a step."""
        params = [p for p in self.model.parameters() if p.grad is not None]  # once: a GPU idles meanwhile
        if isinstance(self.wrapped, DistributedDataParallel):
            self._views |= {p: p.grad for p in params}
        for p in params:
            p.grad = None

    @contextlib.contextmanager
    def averaged_weights(self):
        """A context in which the model has the averaged weights, if the run keeps any. Afterwards its buffers
        are what they were before.
        """
        with copied_buffers(self.model):
            if self.ema:
                self.ema.swap()
                free_gathered_params(self.model)
            try:
                yield
            finally:
                if self.ema:
                    self.ema.swap()
                free_gathered_params(self.model)  # also without an average: requires_grad is set on shards

    def tensors(self):
        """Yields (group, name, tensor, owner) for each tensor of a checkpoint, in the same order on all
        ranks. If `owner` is None, all ranks have the tensor or a shard of it (DTensor). Otherwise only rank
        `owner` has it, and the other ranks yield a meta tensor of its shape.
        """
        held = self.optimizer_tensors()
        groups = {"model": self.model.state_dict()}
        if self.ema:
            groups |= self.ema.tensors()
        if self.late:
            groups["late"] = self.late.tensors()
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
        """This process's optimizer state by parameter and key, such as `embed.weight/exp_avg`."""
        return {name: value for name, value in self._state().items() if isinstance(value, Tensor)}

    def _state(self) -> dict:
        """This process's optimizer state by parameter and key. Raises RunError for state of anything else."""
        names = {p: name for name, p in self.model.named_parameters()}
        found = {}
        for optimizer in self.inner:
            for p, state in optimizer.state.items():
                if p not in names:
                    key = f"a tensor {list(p.shape)}" if isinstance(p, Tensor) else p  # not its numbers
                    raise RunError(f"{type(optimizer).__name__} keeps state of {key}, which is no parameter, "
                                   "so no checkpoint can hold it: keep it in self.state[p] or the group.")
                found |= {f"{names[p]}/{key}": value for key, value in state.items()}
        return found

    def _group_values(self) -> dict:
        """What the optimizers keep in their groups beside what the trainer sets, by group and key."""
        of_trainer = {"params", "lr", "weight_decay", "scale", "betas", "fused", "foreach"}
        return {f"{name}/{key}": value for name, group in self.groups.items()
                for key, value in group.items() if key not in of_trainer}

    def plain_values(self) -> dict:
        """What a checkpoint holds of the optimizers beside tensors: values in their state, and those in their
        groups that they have changed. Every rank calls this. Raises RunError for what JSON cannot hold.
        """
        found = {name: value for name, value in self._state().items() if not isinstance(value, Tensor)}
        if self.zero1:
            found = functools.reduce(operator.or_, all_gather(found))
        found |= {name: value for name, value in self._group_values().items()
                  if repr(value) != self._made.get(name)}
        for name, value in found.items():
            kept = None
            with suppress(TypeError, ValueError):
                kept = json.loads(json.dumps(value))
            if str(kept) != str(value):  # JSON makes a list of a tuple, and text of a number that is a key
                raise RunError(f"an optimizer keeps {name} as {type(value).__name__}, which a checkpoint "
                               "cannot hold as it is: let it be a number, a text or a list of them, or a "
                               "tensor in self.state[p].")
        assert_same("what an optimizer keeps in numbers", json.dumps(found),
                    "let it sum over all ranks what it computes from gradients or parameters, with "
                    "torch.distributed.all_reduce, or use --strategy ddp")
        return found

    @torch.no_grad()
    def restore(self, saved: dict, say):
        """Copies the tensors of a checkpoint, which rank 0 has read, to all ranks, one by one, so no other
        rank holds a second copy. A new --ema starts from the weights. A parameter whose saved optimizer state
        has other names or shapes starts without optimizer state.
        """
        assert_same_parameters(self.model, saved)
        tensors = saved["tensors"]
        parameters = dict(self.model.named_parameters())
        self._create_optimizer_state()
        ours = {name: t.shape for group, name, t, _ in self.tensors() if group == "optimizer"}
        theirs = {name: t.shape for name, t in tensors["optimizer"].items()}
        plain = saved.get("plain", {})  # older ones have none
        ours |= dict.fromkeys(self.plain_values())
        theirs |= dict.fromkeys(plain)
        changed = {name.rpartition("/")[0] for name, _ in ours.items() ^ theirs.items()}
        changed -= self.groups.keys()  # whose values come from the checkpoint in any case
        if begun := changed & {name.rpartition("/")[0] for name in theirs}:  # others have had no step yet
            say(f"WARNING: the optimizer starts from scratch with {listed(sorted(begun))}, because "
                "what it had saved there is not what it makes in a first step")
        for group, name, tensor, owner in self.tensors():
            source = tensors.get(group, {}).get(name)
            unlike = source is None or source.shape != tensor.shape
            if group in ("ema", "kept") and unlike:
                tensor.copy_(parameters[name])
            elif group == "late" and unlike:
                pass  # saved with another --comm, or with other parameters frozen: it begins anew
            elif name.rpartition("/")[0] in changed:
                pass
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
            # of older runs, and of those that had none, one in each step
            self.ema.updates = saved.get("ema_updates") or saved["step"]
            if tensors["ema"] and "ema_updates" not in saved:
                say("averaged weights: from here on their decay grows with the steps, see --ema in --help")
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


NAME = re.compile(r"step_(\d+)_loss.*\.pt")
GROUPS = ("model", "ema", "kept", "late", "optimizer")  # of tensors in a checkpoint, each a dict by name


def read_checkpoint(path: Path, checked: bool = True) -> dict:
    """Reads a checkpoint and checks every byte, unless only its plain data are wanted. Raises RunError if it
    is not what was written, NotNow if it cannot be read.

    torch.load ignores the checksums in the file, so zipfile checks them. mmap makes torch use the same zip
    directory as zipfile. The bit sums then show that the tensors that were read are those that were saved.
    """
    try:
        with access(path):
            with zipfile.ZipFile(path) as file:
                broken = checked and file.testzip()
            if broken:
                raise ValueError(f"{broken} has a wrong checksum")
            load = functools.partial(torch.load, path, map_location="cpu", weights_only=True)
            try:
                saved = load(mmap=True)
            except RuntimeError as error:
                if "unable to" not in str(error):  # mmap or open the file, which some file systems cannot
                    raise
                saved = load()
        if saved["format"] != 1 or checked and bit_sums(saved["tensors"]) != saved["sums"]:
            raise ValueError("its tensors are not those that were saved")
        if NAME.fullmatch(path.name) and step_of(path) != saved["step"]:
            raise ValueError(f"it is that of step {saved['step']}")
        return saved
    except NotNow:
        raise
    except FileNotFoundError:
        raise NotNow(f"{path} is not there: bring it back, or what it is a link to, and run the same command "
                     "again.") from None
    except Exception as error:  # a damaged file makes zipfile, pickle and torch raise nearly anything
        raise RunError(first_line(error)) from None


def bit_sums(tensors: dict[str, dict[str, Tensor]]) -> dict[str, int]:
    return {f"{group}/{name}": int(bit_sum(t)) for group in tensors for name, t in tensors[group].items()}


def step_of(path: str | Path) -> int:
    """The step of a checkpoint, which a best.pt says inside. Raises UserError if that cannot be read."""
    if name := NAME.fullmatch(Path(path).name):
        return int(name[1])
    try:
        return read_checkpoint(Path(path), checked=False)["step"]
    except RunError as error:
        raise UserError(f"only {path} is left, and it is damaged ({error}): restore a checkpoint from a "
                        "copy, or give another --out.") from None


def list_checkpoints(run_directory: Path) -> list[Path]:
    """The finished checkpoints of a run, newest first; if none is left, not even a damaged one, its best.pt.
    Raises NotNow if they cannot be listed.
    """
    directory = Path(run_directory, "checkpoints")
    names = names_in(directory)
    if "best.pt" in names and not any(name.startswith("step_") for name in names):
        return [directory / "best.pt"]
    found = [directory / name for name in names if NAME.fullmatch(name)]
    return sorted(found, key=lambda path: (step_of(path), path), reverse=True)


def load_checkpoint(where: str | Path, say, checked: bool = True, family: str = "") -> dict:
    """Loads a checkpoint file, or the newest intact one of a run directory. Adds its path, the paths of newer
    ones that are damaged, and the tokenizer.json of its run.

    All ranks get the plain data. Only rank 0, which reads the file, gets the tensors; the others get meta
    tensors of the same shapes. Raises UserError on all ranks if no checkpoint can be read.
    """
    saved = None

    def choose():
        nonlocal saved
        there = Path(where)
        candidates = [there] if there.is_file() else list_checkpoints(there)
        if not candidates:
            fault = "holds no checkpoint" if there.exists() else "does not exist"
            runs = []
            with room("loggers"):
                from loggers.hints import runs_beside
                runs = runs_beside(there, family)
            such_as = f", such as {listed(runs)}" if runs else ""
            if (best := there / "checkpoints" / "best.pt").exists():  # beside damaged ones
                such_as = f", such as {best}"
            raise UserError(f"{where} {fault}: train first, or name another run directory or file{such_as}; "
                            f"a model of Hugging Face is trained with --init-from hf:{where}.")
        damaged = []
        for path in candidates:
            try:
                saved = read_checkpoint(path, checked)
                break
            except RunError as error:
                say(f"WARNING: the checkpoint {path} is damaged and left out ({error})")
                damaged.append(str(path))
        if saved is None:
            best = candidates[0].with_name("best.pt")
            others = candidates[0] != best and best.exists()
            other = f", delete these to go on from {best}" if others else ""
            raise UserError(f"{candidates[0]} cannot be read, nor any older checkpoint there: restore one "
                            f"from a copy{other}, or start from scratch in another --out.")
        shapes = {group: {name: tensor.to("meta") for name, tensor in named.items()}
                  for group, named in saved["tensors"].items()}
        of_run = tokenizer_of_run(path.parent.parent, saved["settings"])
        return saved | {"path": str(path), "damaged": damaged, "tensors": shapes} | of_run

    answer = on_rank0(choose)
    return answer | {"tensors": saved["tensors"]} if saved else answer


def is_in(saved: dict, run_directory: Path) -> bool:
    """Whether a checkpoint is one of a run directory on this machine."""
    return Path(saved["path"]).resolve().parent.parent == run_directory.resolve()


class Checkpoints:
    """Writes the checkpoints of a run, `step_00001000_loss2.3456_20261120_143022.pt`, and best.pt, a link.

    `save` copies the state and returns; a thread writes it to a temporary file, syncs it and renames it, so
    every file with such a name is complete. Only rank 0 writes, but `save` has collectives for all ranks.
    """

    unwritten: ClassVar[list[futures.Future]] = []  # the last job of this process

    def __init__(self, run_directory: Path, world: World, keep_last: int, say, lost=lambda: ""):
        self.lost = lost  # a RunLock's
        self.run_directory = run_directory
        self.directory = run_directory / "checkpoints"
        self.world = world
        self.keep_last = keep_last
        self.say = say
        self._copies = {group: {} for group in GROUPS}  # tensors by group and name, on the CPU
        self._thread = futures.ThreadPoolExecutor(1, "checkpoints")
        at_end.callback(wait_for_writing)  # and only then the RunLock's end
        self._best = math.inf  # the criterion of best.pt
        self._own_criterion = False  # whether a trainer has set that
        self.saved_step: int | None = None  # the newest step that is in a checkpoint, or about to be
        self._newest: Path | None = None  # its file

    def load(self, resume: str, saved: dict | None = None) -> dict | None:
        """The checkpoint of --resume, or None to start from scratch. `saved` is what find_run has found; it
        is read again only if there is a newer one. Renames damaged ones, which would otherwise count among
        the newest to keep. Raises UserError on all ranks.
        """
        directory = self.run_directory
        newest = on_rank0(lambda: next(map(str, list_checkpoints(directory)), None))
        if not newest:
            return saved
        if resume == "none":
            raise UserError(f"{directory} holds checkpoints ({newest}): choose another --out, or delete it.")
        if resume != "auto" and on_rank0(step_of, newest) > saved["step"]:
            raise UserError(f"{directory} has a later checkpoint ({newest}) than {resume}: give another "
                            "--out to branch off there, or delete the later ones.")
        if resume == "auto" and not (saved and newest in (saved["path"], *saved["damaged"])):
            saved = load_checkpoint(directory, self.say)
        if resume == "auto" and Path(newest).name == "best.pt":
            self.say(f"only best.pt is left (step {saved['step']} of {saved['settings']['steps']}): going on "
                     "from it; for a new run give another --out")
        if self.world.is_rank0:
            for damaged in saved["damaged"]:
                os.rename(damaged, f"{damaged}.damaged")
        return saved

    def resume(self, saved: dict | None, state: TrainState, identity: dict) -> tuple[int, int]:
        """Restores a checkpoint, if there is one. Returns how many steps and samples are done."""
        if not saved:
            return 0, 0
        branch = not on_rank0(is_in, saved, self.run_directory)
        check_resumable(saved, identity, branch, self.say)
        state.restore(saved, self.say)
        del saved["tensors"]
        if not branch:
            self.saved_step = saved["step"]
            self._newest = Path(saved["path"])
        on_rank0(self._go_back, saved["step"])
        return saved["step"], saved["samples"]

    def _go_back(self, step: int):
        """Replaces a best.pt of a later step by the best of the checkpoints that there are."""
        files = {step_of(path): path for path in list_checkpoints(self.run_directory)}
        best = self.directory / "best.pt"
        marked = None
        if best.exists():
            with suppress(RunError):
                marked = read_checkpoint(best, checked=False)["step"]
                files.setdefault(marked, best)
                if marked > step:
                    best.unlink()
        with suppress(FileNotFoundError):
            records = monitor.read_metrics(self.run_directory)
            self._own_criterion = monitor.has_own_criterion(records)
            losses = monitor.evaluations_of(records)
            left = {at: loss for at, loss in losses.items() if at <= step and at in files and loss < math.inf}
            self._best = min(left.values(), default=math.inf)
            lowest = min(left, key=left.get, default=marked)
            if lowest != marked and (marked in left or not best.exists()):
                self._link(files[lowest])

    def save(self, step: int, state: TrainState, meta: dict):
        """Compares the parameters of all ranks, copies the state tensor by tensor, and has a thread write it
        with `meta`, plain data that includes the step's loss. Does nothing if the step is already saved.
        """
        if step == self.saved_step:
            return
        assert_in_sync(state.model)
        world = self.world
        self.saved_step = step
        say_on_other_nodes(world, f"step {step}/{meta['settings']['steps']} | in sync, node 0 saves a "
                                  "checkpoint")
        lost = self.lost()
        # The copies are in use until the last checkpoint is written, which may take longer than --timeout.
        while (sums := reduce_sum([not all(job.done() for job in self.unwritten), bool(lost)], world))[0]:
            time.sleep(0.02)
        if sums[1]:
            raise UserError(on_rank0(lambda: lost))
        for group, name, tensor, owner in state.tensors():
            if owner is not None:
                tensor = transfer(tensor, owner, 0, world)
            elif isinstance(tensor, DTensor):
                tensor = tensor.to(world.device).full_tensor()
            if world.is_rank0:
                copies = self._copies[group]  # allocated once, because the shapes do not change
                if name not in copies:
                    copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                copies[name].copy_(tensor.detach(), non_blocking=True)
        plain = state.plain_values()
        reduce_sum([0], world)  # raises if one of these collectives has failed, which NCCL reports late
        if not world.is_rank0:
            return
        world.synchronize()  # copies to pinned memory may still be under way
        content = {"format": 1, "step": step, "torch": str(torch.__version__),
                   "scaler": state.scaler.state_dict(), "plain": plain,
                   "ema_updates": state.ema.updates if state.ema else 0}
        content = json.loads(json.dumps(content | meta))  # weights_only=True reads plain types only
        name = f"step_{step:08d}_loss{meta['loss']:.4f}_{time.strftime('%Y%m%d_%H%M%S')}.pt"
        self._newest = self.directory / name
        self._submit(self._write, self._newest, content, time.perf_counter())

    def mark_best(self, step: int, found: dict[str, float]):
        """Links best.pt to the checkpoint of `step`, once it is written, if there is one and the evaluation
        `found` is the best: the lowest `criterion`, where a trainer has set one, else `val_loss`.
        """
        if self.world.is_rank0 and self.saved_step == step:  # not if the update was skipped
            self._submit(self._link_best, self.directory / "best.pt", self._newest,
                         monitor.criterion_of(found), "criterion" in found)

    def close(self):
        """Waits until everything is written. Raises RunError if the last checkpoint was not."""
        self._thread.shutdown()
        if self.world.is_rank0 and self._newest and not self._newest.exists():
            raise RunError(f"the checkpoint of step {self.saved_step} could not be written, see above: the "
                           "same command resumes from the one before.")

    def _submit(self, function, path: Path, *args):
        def job():
            try:
                if lost := self.lost():
                    raise RuntimeError(lost)
                self.directory.mkdir(exist_ok=True)
                function(path, *args)
            except Exception as error:  # mostly a full disk, which torch.save does not name
                reason = first_line(error)
                with suppress(OSError):  # the directory may be gone
                    free = shutil.disk_usage(self.directory).free
                    reason += f", with {free / 1e9:.2f} GB free on the disk"
                self.say(f"WARNING: {path.name} was not written: {reason}; training continues, and tries "
                         "again at the next save")

        Checkpoints.unwritten = [self._thread.submit(job)]

    def _write(self, path: Path, content: dict, begun: float):
        for key, tensor in self._copies["model"].items():
            if not tensor.sum(dtype=torch.float32).isfinite():  # a sum keeps inf and NaN
                raise RuntimeError(f"{key} is not finite")
        with replacing(path) as file:
            torch.save({**content, "tensors": self._copies, "sums": bit_sums(self._copies)}, file)
        text = (f"saved step {content['step']} ({path}, {path.stat().st_size / 1e9:.3g} GB in "
                f"{time.perf_counter() - begun:.1f} s)")
        its_own = [p for p in list_checkpoints(self.run_directory) if monitor.CHECKPOINT.fullmatch(p.name)]
        for old in its_own[self.keep_last:]:
            old.unlink()
            text += f"; removed {old.name}"
        self.say(text)

    def _link_best(self, path: Path, newest: Path, criterion: float, own: bool):
        if own != self._own_criterion:  # numbers of two kinds cannot be compared
            self._best, self._own_criterion = math.inf, own
        if criterion < self._best and newest.exists():  # else its save failed, and said so
            self._link(newest)
            self._best = criterion

    def _link(self, source: Path):
        """Makes best.pt a link to a checkpoint."""
        temporary = self.directory / ".tmp-best.pt"
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)
        os.replace(temporary, self.directory / "best.pt")
        temporary.unlink(missing_ok=True)  # which is left where both are links to the same file
        fsync_directory(self.directory)


def wait_for_writing():
    """A checkpoint from before a failure is worth waiting for, too, but torchrun kills after 30 s."""
    waiting_is_short = one_has_failed() or launched and at_end.exit_code
    futures.wait(Checkpoints.unwritten, timeout=15 if waiting_is_short else None)


# -----------------------------------------------------------------------------------------------------------
# Around a step


def begin_log(run: Run, state: TrainState, identity: dict, step: int) -> monitor.RunLog:
    """Opens the log after `step` steps, writes the files of the run directory and prints the plan. Raises
    UserError where the run began otherwise.
    """
    if launched:  # until StopVote, see warm_up
        signal.signal(signal.SIGINT, leave_at_once)
    world, dataset, model = run.world, run.dataset, state.model
    settings = identity["settings"]
    if run.begun:
        check_resumable(run.begun, identity, False, run.say)
    dataset.check_sets()  # a trainer may have added some without change_data
    val = [*dataset.val.values()]
    facts = monitor.Facts(
        settings, rows=dataset.train.rows, val_tokens=sum(shards.num_tokens for shards in val),
        entropy=unigram_entropy(val or [dataset.train]),
        sync="shards" if settings["strategy"] in SHARDED else "OK")
    records = with_barrier(lambda: monitor.records_until(run.out, step, run.say) if world.is_rank0 else [])
    evaluated = on_rank0(lambda: [record for record in records if "val_loss" in record])
    # other ranks have no records, and need only the evaluations
    log = monitor.RunLog(run.out, run.text, facts, records or evaluated, run.sinks, run.lost)

    def begin():
        if all_done(run, log, step):  # the files would name flags of no step
            return
        files = {}
        more = {}
        with room("loggers"):
            from loggers.checks import begin_checks
            from loggers.mfu import MFU
            from loggers.source import commits_and_counts, files_to_keep, say_changes
            begin_checks(run, model, log)
            facts.mfu = MFU(run, model, settings)
            if run.saved:
                say_changes(run, functools.partial(run.text.say, on_screen=False))
            files = files_to_keep(run)
            more = commits_and_counts(run, facts.mfu)
        log.begin(step, files | run_files(run, identity | more))

    on_rank0(begin)
    machines = Counter(all_gather(hardware(world.device)))
    with room("loggers"):
        from loggers.start import say_plan
        say_plan(run, state, facts, machines, compiles(settings["compile"], world.device))
    for folder, loss in WITHOUT.items():
        if folder not in rooms_here():
            log.say(f"there is no folder {folder}/ beside ddp_utils.py, so {loss}")
    resuming = f", resuming after step {step} from {run.saved['path']}" if run.saved else ""
    log.say(f"run directory {log.out}{resuming}")
    warn_of_changes(run, model)
    say_on_other_nodes(world, f"{HOST}, {hardware(world.device)}, {world.backend}, "
                       f"torch {torch.__version__}")
    return log


def warn_of_changes(run: Run, model: nn.Module):
    """Says where a model's shards have changed since new_model. All ranks."""
    if run.saved or run.args.strategy not in SHARDED:
        return
    changed = [name for name, p in model.named_parameters()
               if int(bit_sum(local_shard(p))) != model.initial_sums.get(name)]
    if changed := sorted({*itertools.chain(*all_gather(changed))}):  # each rank sees its own shards
        run.say(f"WARNING: {listed(changed)} changed after new_model: numbers drawn there for shards "
                "are not those of --strategy ddp and may repeat, so draw them in the model's constructor")


def all_done(run: Run, log: monitor.RunLog, step: int) -> bool:
    return step >= run.steps and (step in log.evaluations or not run.dataset.val)


def is_complete(run: Run, log: monitor.RunLog, step: int) -> bool:
    """Whether nothing is left to do after `step` steps; if so, says it."""
    complete = all_done(run, log, step)
    if complete:
        log.say(f"this run is complete after {step} steps: give more to continue (--steps {2 * step} doubles "
                "them), another --out to start from scratch, or use it, for instance with --eval-only")
    return complete


def run_files(run: Run, identity: dict) -> dict[str, str]:
    """What rank 0 writes into the run directory: config.json, with the commands of all starts so far, and
    tokenizer.json.
    """
    commands = monitor.read_config(run.out).get("commands")
    commands = [*commands] if isinstance(commands, list) else []
    if run.trainer.is_file():  # otherwise it was typed into a notebook
        commands.append(run.command)
    if commands[:-1] and not run.saved and commands[-2] != run.command:
        how = "as it was begun" if run.begun else "with the flags of this command and not of the last one"
        run.say(f"WARNING: there is no checkpoint here, so the run starts from scratch, {how}: "
                f"{commands[-2]}")
    config = json.dumps(identity | {"commands": commands}, indent=2, ensure_ascii=False)
    return {"config.json": without_surrogates(config), "tokenizer.json": run.dataset.tokenizer.to_json()}


@dataclass
class Due:
    """What is due after a step. All ranks decide alike."""

    stopping: bool  # a signal has come
    done: bool  # all steps of the run are
    evaluating: bool
    saving: bool


def due_after(step: int, run: Run, metrics: "Metrics", stop: "StopVote") -> Due:
    """What is due after `step` steps. A save precedes each evaluation, which can take long. A step that the
    log has evaluated is not evaluated again.
    """
    stopping = stop.agreed > 0
    done = step >= run.steps
    in_turn = step % run.args.eval_every == 0 or metrics.ends_epoch or done
    evaluating = step > 0 and bool(run.dataset.val) and step not in metrics.log.evaluations and in_turn
    saving = step > 0 and (step % run.args.save_every == 0 or evaluating or stopping or done)
    return Due(stopping, done, evaluating, saving)


def mixed(seed: int, step: int, stream: int) -> int:
    number = ((seed * 0x9E3779B97F4A7C15 + step) * 0xBF58476D1CE4E5B9 + stream) * 0x94D049BB133111EB
    return (number ^ number >> 31) % 2**63


def seed_step(seed: int, step: int, rank: int):
    """Seeds torch for one step of one rank, so that a checkpoint need not hold generator states."""
    torch.manual_seed(mixed(seed, step, rank))


def generator(seed: int, step: int, number: int = 0, device="cpu") -> torch.Generator:
    """A random generator, the same on all ranks; each `number` gives another one for the same step."""
    return torch.Generator(device).manual_seed(mixed(seed, step, -1 - number))


class StopVote:
    """Stops all ranks after the same step, when any of them gets a signal.

    SIGTERM, SIGINT, SIGUSR1, SIGHUP and the death of torchrun set a flag. `vote`, called after each step and
    each evaluation batch, starts a small all-reduce of it. Its result is read a step or batch later, so no
    rank waits for another.
    """

    def __init__(self, world: World):
        self.signal = 0  # received by this rank
        self._since = 0.0  # when it came
        self.agreed = 0  # the signal at which all ranks have agreed to stop
        self._vote = torch.zeros((), device=world.device)  # the newest
        self._under_way = None  # waits for it, until it is read
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        for signum in STOP_SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # as nohup sets it
                signal.signal(signum, self._on_signal)

    def _on_signal(self, number, frame):
        # Ctrl-C comes twice at once, from the terminal and from torchrun; a second press comes later
        if number == signal.SIGINT and self.signal and time.monotonic() - self._since > 2:
            os.write(2, b"\nleaving at once, without a checkpoint\n")
            os._exit(130)
        if not self.signal:
            self._since = time.monotonic()  # set first: a signal may come between these two lines
            self.signal = number

    def is_orphan(self) -> bool:
        """Whether torchrun was killed."""
        return self._torchrun not in (None, os.getppid())

    def vote(self) -> int:
        """Starts a vote. Returns the result of the previous one: the signal that any rank got, or 0."""
        self.read()
        if self.is_orphan():  # so nothing else will stop us
            self._on_signal(signal.SIGHUP, None)
        self._vote.fill_(self.signal)
        self._under_way = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, async_op=True)
        self._result = self._vote
        if dist.get_backend() == "nccl":
            self._under_way.wait()  # the device does, not the host
            self._result = HostCopy(self._vote)
        return self.agreed

    def read(self):
        """Reads the newest vote, unless that is done."""
        if self._under_way:
            self._under_way.wait()
            self._under_way = None
            self.agreed = self.agreed or int(float(self._result))


class Metrics:
    """A model's sums over the labels of a step, and its loss over an epoch. Each rank keeps its part on the
    device until `reduce`.
    """

    def __init__(self, run: Run, log: monitor.RunLog):
        """Epochs that are not longer than the steps between two evaluations are not tracked."""
        world, rows = run.world, run.dataset.train.rows
        saved = run.saved or {"samples": 0, "loss": math.nan, "ends_epoch": False,
                          "epoch": {"loss": 0.0, "steps": 0, "seconds": 0.0}}
        epoch = saved["epoch"]
        self.world = world
        self.log = log
        self._rows = rows if rows > run.args.eval_every * run.global_batch else math.inf
        self.ends_epoch = saved["ends_epoch"]  # whether the last step reached into the next epoch
        self._samples = saved["samples"]
        self._steps = epoch["steps"]
        self._begun = time.perf_counter() - epoch["seconds"]
        self._sums: dict[str, Tensor] = {}
        self.labels = torch.zeros(())  # of the last step, over all ranks
        # this rank's part of each mean; the parts of all ranks add up to the mean
        share = float(world.is_rank0)
        self._means = {"loss": torch.tensor(saved["loss"] * share, dtype=torch.float64, device=world.device)}
        self._epoch_loss = torch.tensor(epoch["loss"] * share, dtype=torch.float64, device=world.device)
        self._machine_curves = lambda suffix: {}
        with room("loggers"):
            from loggers.machine import machine_curves
            self._machine_curves = machine_curves

    def add(self, sums: dict[str, Tensor]):
        """Adds the sums of a micro-batch."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0) + value

    def end_step(self, samples: int, labels: Tensor):
        """Ends a step with `labels` over all ranks, after which the run has consumed `samples`."""
        self.labels = labels
        before = self._samples
        self._samples = samples
        self.ends_epoch = samples // self._rows > before // self._rows
        self._means = {name: total / labels.clamp(min=1) for name, total in self._sums.items()}
        self._sums = {}
        # float32 values sum exactly in float64, so a resumed run gets the same sum
        self._epoch_loss += self._means["loss"].float()
        self._steps += 1

    def begin_epoch(self):
        """Sets the sums over an epoch to 0."""
        self._epoch_loss.zero_()
        self.ends_epoch = False
        self._steps = 0
        self._begun = time.perf_counter()

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """The means of the last step, and the loss, steps and seconds of its epoch, over all ranks."""
        *means, loss = reduce_sum([*self._means.values(), self._epoch_loss], self.world)
        seconds = time.perf_counter() - self._begun
        return dict(zip(self._means, means)), {"loss": loss, "steps": self._steps, "seconds": seconds}

    def machines(self) -> dict:
        """The most memory of any process, and the curves of each machine, with its name if there are several,
        from its first process.
        """
        world = self.world
        host = f"/{world.node}-{HOST}" if world.nodes > 1 else ""
        own = self._machine_curves(host) if world.local_rank == 0 else {}
        memory, curves = zip(*all_gather((monitor.memory_gb(world.device), own)))
        return functools.reduce(operator.or_, reversed(curves), {"mem_gb": round(max(memory), 3)})

    def position(self) -> dict:
        """The state for a checkpoint."""
        means, epoch = self.reduce()
        return {"loss": means["loss"], "samples": self._samples, "epoch": epoch,
                "ends_epoch": self.ends_epoch}


def refuse_odd_metric(metric: Callable, found):
    """Raises UserError unless `found`, what a trainer's metric has returned, has for each name a sum and its
    count.
    """
    if not isinstance(found, dict):  # as without `return`
        found = {getattr(metric, "__name__", "NAME"): found}
    for name, value in found.items():
        dimensions = []
        with suppress(TypeError, ValueError, RuntimeError):
            dimensions = [torch.as_tensor(part).ndim for part in value]
        if dimensions != [0, 0]:
            raise UserError(f"the metric {name} is no sum with the count that divides it: return "
                            f'{{"{name}": (sum, count)}}.')
        if "/" in name or name.endswith(" (count)"):
            raise UserError(f"a metric cannot be called {name}: choose a name without / and (count).")


@torch.no_grad()
def evaluate(state: TrainState, run: Run, stop: StopVote, masker=None) -> dict[str, float] | None:
    """Evaluates the first --eval-batches (0: all) of each validation set, with the averaged weights if the
    run keeps any. Every rank calls this. Returns the means over all sets together and over each named set,
    such as `val_loss/NAME`, or None if a stop signal cut it short.

    `run.metric`, a trainer's own function, is called as metric(model, *micro_batch) and returns for each name
    a sum and the count to divide it by, numbers or scalar tensors, which are summed over batches and ranks:
    `val_NAME` is their quotient. Each evaluation begins with the same random state, so that a model that
    draws gets the same results after a resume. Raises UserError for a name that results have already.
    """
    args, model, world = run.args, state.model.eval(), state.world
    reserved = {"samples", "exact", "correct", "criterion"}  # no names for a metric
    token_bytes = torch.from_numpy(run.dataset.tokenizer.token_bytes).to(world.device)
    seed_step(args.seed, 0, world.rank)
    totals = Counter()
    of_names = {}
    with state.averaged_weights():
        for name, shards in run.dataset.val.items():
            sums = Counter()
            limit = args.eval_batches * run.settled.eval_batch  # rows
            for micro_batch in validation_batches(shards, run.batch, world, limit, masker):
                _, found = model(*micro_batch)
                own = run.metric(model, *micro_batch) if run.metric else {}
                refuse_odd_metric(run.metric, own)
                monitor.refuse_taken([*found, *own, *reserved - found.keys()])
                for key, value in own.items():
                    found |= {key: value[0], f"{key} (count)": value[1]}
                labels = micro_batch[-1]
                learned = labels >= 0
                found["labels"] = learned.sum()
                found["bytes"] = (token_bytes[labels.clamp(min=0)] * learned).sum()
                sums.update({key: torch.as_tensor(value, dtype=torch.float64, device=world.device)
                             for key, value in found.items()})
                if stop.vote():
                    break
            assert_same("the names of what is evaluated", json.dumps([*sums]),
                        "return the same names for every batch")
            sums["bytes"] *= getattr(shards, "byte_ratio", 1)
            sums = dict(zip(sums, reduce_sum([*sums.values()], world)))  # waits for the device
            totals.update(sums)
            if name:
                of_names |= {f"{key}/{name}": value for key, value in monitor.results_of(sums).items()}
            if stop.agreed:
                break
    model.train()
    return None if stop.agreed else monitor.results_of(totals) | of_names


def sample(state: TrainState, run: Run, step: int):
    """Logs a text that the model writes, if weights/ is there. All ranks call this."""
    with room("weights"):
        from weights.sampling import write_sample
        with state.averaged_weights():
            write_sample(state.model, run, step, with_barrier)


def end_run(run: Run, log: monitor.RunLog, stop: StopVote, step: int, samples: int):
    """Waits for the last checkpoint and says how the run has ended."""
    world, checkpoints = run.world, run.checkpoints
    stopping = stop.agreed
    memory = max(all_gather(monitor.memory_gb(world.device)))
    stop.read()  # leaves no vote under way; a signal after the last step changes nothing
    in_sync = "are in shards" if run.args.strategy in SHARDED else "of all ranks were in sync"
    ending = (f"training complete: {step} steps, {samples * run.args.seq_len:,} tokens, the parameters "
              f"{in_sync}; the run is in {log.out}")
    if stopping:
        ending = (f"stopped by {signal.Signals(stopping).name} after step {step}, with a checkpoint of "
                  f"step {checkpoints.saved_step}: the same command resumes it")

    def finish():
        checkpoints.close()
        log.finish(step, samples, memory, ending)

    # After all collectives, because rank 0 may write for longer than --timeout. The others wait, because a
    # torchrun whose processes have ended waits for the others only for a while.
    try:
        with_barrier(finish)
    except RunError:  # without torchrun there may be no store in which to wait, and all has been said
        if not stop.is_orphan():
            raise
        checkpoints.close()  # raises if that is the error
    say_on_other_nodes(world, f"{ending} on node 0")


MOVED = {"monitor": "RunLock results_of", "ops.ema": "EMA", "weights.init_from": "load_frozen",
         "weights.sampling": "sample_prompt", "weights.use": "load_model load_run use_model evaluate_only"}


def __getattr__(name: str):
    if name in ("parse", "begin_sum", "on_all", "from_all", "clip_gradients"):  # names of 2026-11-26
        raise UserError("this trainer is a copy of an older one: change the lines that docs/changing.md "
                        'names under "From an older copy".')
    refuse_moved(__name__, name, MOVED)

"""Processes that train together: how they start, agree, save, resume and end.

Every trainer calls these in this order:

    world = init(...)                          # process group, device, threads
    wrapped = wrap(model, world)               # DistributedDataParallel
    warm_up(wrapped, ...)                      # settles DDP's buckets, finds parameters without a gradient
    checkpoints = Checkpoints(directory, ...)  # written behind the training, verified when read
    vote = StopVote(world)                     # signals, agreed across ranks

and is itself called by `run(main)`, which ends the process so that it never hangs and never aborts.

A rule for everything here: which collectives a rank calls never depends on what only that rank knows.
"""

import argparse
import contextlib
import fcntl
import gc
import hashlib
import itertools
import json
import math
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
import warnings
import zipfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data import (Dataset, UserError, cpu_count, expected_ids, fsync_directory, load_tokenizer, locate,
                  plan_batch)
from model import Block, continue_text, from_hf, local, pad_vocab, reshard, to_hf

# -----------------------------------------------------------------------------------------------------------
# Start and end


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class RunError(Exception):
    """The run cannot go on, and no traceback would say why better than one sentence: exit code 1."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse for many processes: a mistake is one sentence; the first process of a node prints help."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        raise UserError(f"{message}; --help lists all flags.")

    def print_help(self, file=None):
        if local_rank() == 0:
            super().print_help(file)


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def run(main) -> None:
    """Runs main() and ends the process. Exit codes: 0, 1 for a failure, 2 for a UserError, 130 for Ctrl-C.

    torch's C++ threads can abort a finished process while Python tears down, so it leaves by os._exit once
    everything is flushed. After a failure the process group is not destroyed, because that can hang.
    """
    code, text, own = 0, "", ""

    def guarded():  # `record` writes what goes wrong to the file from which torchrun reports it
        nonlocal code, text, own
        try:
            main()
        except UserError as error:
            code, text, own = 2, f"error: {error}", str(error)
        except RunError as error:
            code, text, own = 1, f"error: {error}", str(error)
        except KeyboardInterrupt:
            code, text = 130, "stopped"
        except Exception as error:
            own = first_line(error)
            if not (heartbeat and lost_connection(error)):
                raise
            if cause := heartbeat.ask():
                code, text, own = 1, f"error: {cause}", ""
            else:
                text = (f"error: {own}: all processes are alive, so one was busy for longer than --timeout, "
                        "or cannot reach another.")
                raise

    try:
        record(guarded)()
    except SystemExit as error:  # of --help
        code = error.code or 0
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    unwritten = Checkpoints.unwritten if code == 1 else None
    for number in STOP_SIGNALS:  # torchrun, once the first process has failed, ends the others by signal
        signal.signal(number, signal.SIG_IGN if unwritten else signal.SIG_DFL)
    if text and (code != 130 or local_rank() == 0):
        time.sleep(1.0 * (local_rank() > 0))  # torchrun stops this process once the first one has spoken
        print(text, file=sys.stderr, flush=True)
    if heartbeat:
        heartbeat.stop(own)
    deadline = time.monotonic() + 15  # torchrun kills after 30, of which finding the cause takes some
    while unwritten and unwritten.unfinished_tasks and time.monotonic() < deadline:
        time.sleep(0.05)  # a checkpoint of the time before the failure is worth waiting for
    if code == 0 and dist.is_initialized():
        gc.collect()  # the models and optimizers that main() left behind hold on to the process group
        dist.destroy_process_group()
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True)
class World:
    """This process among all, as torchrun numbers them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    nodes: int
    device: torch.device
    backend: str
    backend_reason: str

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def prefix(self) -> str:
        return f"[Rank {self.rank}/{self.world_size} | Node {self.node} | Device {self.device}]"

    def synchronize(self) -> None:
        """Waits until the device has done what it was given; then a clock tells the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def init(backend: str = "auto", device: str = "auto", timeout: float = 600) -> World:
    """Joins the process group that torchrun describes, or makes one of a single process.

    backend is auto, nccl or gloo; device is auto, cuda or cpu; timeout, in seconds, bounds every collective.
    Raises UserError if they do not fit the machine.
    """
    env = os.environ
    try:
        rank, world_size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
    except ValueError as error:
        raise UserError(f"RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are numbers ({error}): start with torchrun.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if local_world_size > gpus:
            raise UserError(f"{local_world_size} processes on a machine with {gpus} GPUs: start torchrun "
                            f"with --nproc_per_node={gpus}, or use --device cpu." if gpus else
                            "no GPU is visible here: leave --device out, or use --device cpu.")
        where = torch.device("cuda", local_rank())  # never the global rank: GPUs are numbered on each node
        torch.cuda.set_device(where)
        # Attention's backward adds gradients on a GPU in any order, unless told not to: then a resumed run
        # would not equal an undisturbed one. What has no such mode warns.
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a fill for each torch.empty
    else:
        where = torch.device("cpu")
        # torchrun sets OMP_NUM_THREADS=1 where nobody has chosen, which leaves most cores idle
        if "OMP_NUM_THREADS" not in env or env["OMP_NUM_THREADS"] == "1" and local_world_size > 1:
            torch.set_num_threads(max(1, cpu_count() // local_world_size))
    if backend == "auto":  # chosen before init: a failed init leaves keys in the store that spoil the next
        nccl = device == "cuda" and dist.is_nccl_available()
        backend = "nccl" if nccl else "gloo"
        reason = "GPUs" if nccl else "no GPU is used" if device == "cpu" else "this torch has no NCCL"
    else:
        reason = "as asked"
    if backend == "nccl" and (device == "cpu" or not dist.is_nccl_available()):
        raise UserError("--backend nccl needs GPUs and a torch with NCCL: use --backend auto.")
    store = dist.HashStore() if "RANK" not in env else join(rank, world_size, timeout, backend)
    if "RANK" not in env:  # gloo opens a port even for one process: none that others can reach
        env.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # With its default, 3, a collective of NCCL that waits too long aborts the process from a thread of its
    # own, and Python cannot say a word. 2 aborts the communicator only: the collective that hangs returns,
    # with garbage, and the next one raises; a checkpoint is never written without one in between.
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=timeout), device_id=where if device == "cuda" else None)
    return World(rank, world_size, local_rank(), local_world_size, f"node{env.get('GROUP_RANK', 0)}",
                 int(env.get("GROUP_WORLD_SIZE", 1)), where, backend, reason)


# -----------------------------------------------------------------------------------------------------------
# Signs of life: who has failed, when a collective has


heartbeat: "Heartbeat | None" = None  # of this process, if it is one of several


def join(rank: int, world_size: int, timeout: float, backend: str):
    """The store at MASTER_ADDR, once all ranks are there. Raises UserError, or RunError naming the absent."""
    global heartbeat
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    limit = timedelta(seconds=timeout)
    try:
        store = next(dist.rendezvous("env://", timeout=limit))[0]
    except ValueError as error:
        raise UserError(f"{first_line(error)}: start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
                        "MASTER_PORT.")
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise RunError(f"the port of {where} is in use here: give all nodes another MASTER_PORT, or end "
                           "what uses it.")
        came = re.search(r"(\d+/\d+) clients joined", str(error))
        what = f"only {came[1]} ranks came to {where}" if came else f"rank {rank} found no rank 0 at {where}"
        raise RunError(f"{what} within {timeout:g} s: see what the other nodes say; if nothing, check their "
                       "MASTER_ADDR and MASTER_PORT, and the firewall of node 0.")
    if world_size > 1:
        store.add(backend, 1)
        heartbeat = Heartbeat(store, rank, world_size, where, timeout)
        heartbeat.wait_for_all()
        if (same := store.add(backend, 0)) < world_size:  # they would wait for each other in vain
            raise UserError(f"rank {rank} is one of {same} among {world_size} that use {backend}: see with "
                            "nvidia-smi which nodes have no GPU, or give all of them --device cpu.")
    return dist.PrefixStore("process group", store)


def first_line(error: BaseException) -> str:
    """An exception as one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split("\n", 1)[0].split())[:300]


def lost_connection(error: BaseException) -> bool:
    """Whether this error tells that another process is gone or late, rather than of a mistake in this one."""
    return isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and "gloo" in str(error)


GONE = object()  # the answer of a Heartbeat that has ended
WAY_BACK = ("mend that and start the same command again on every node; it goes on from the newest "
            "checkpoint")


def listed(names: list[str]) -> str:
    """A list for a sentence, of bounded length."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def lost(values: list[bytes]) -> str:
    """The sentence about ranks that have written these values last."""
    names = [value.decode().partition("|")[0] for value in values]
    return (f"{listed(names)} gave no sign of life any more (the process or its machine has stopped, or the "
            f"network to it is down): {WAY_BACK}.")


class Heartbeat:
    """Shows the other ranks that this one lives, and finds out, after a collective has failed, who does not.

    A thread with a connection of its own writes a counter to the store every BEAT seconds. A rank that fails
    leaves its reason there; a rank whose collective fails looks for that, then for counters that stand still.
    Whoever finds the cause publishes it, so all ranks say the same sentence.
    """

    BEAT = 1.0  # seconds
    PATIENCE = 5.0  # seconds for which a counter stands still until its rank counts as lost

    def __init__(self, store, rank: int, world_size: int, where: str, timeout: float):
        self.rank, self.where, self.timeout = rank, where, timeout
        self.store = dist.PrefixStore("signs of life", store.clone())
        self.name = f"rank {rank} on node{os.environ.get('GROUP_RANK', 0)} ({os.uname().nodename})"
        self.keys = [str(r) for r in range(world_size)]
        self.cause = self._own_cause = ""  # the sentence in the store, and what this rank would put there
        self._beats, self._seen, self._next_look = 0, {}, 0.0
        self._orders, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
        self._beat()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def wait_for_all(self) -> None:
        """Raises RunError if a rank does not show up within the timeout."""
        try:
            self.store.wait(self.keys, timedelta(seconds=self.timeout))
        except dist.DistError:
            absent = [f"rank {key}" for key in self.keys if not self.store.check([key])]
            raise RunError(f"{listed(absent)} of {len(self.keys)} did not come to {self.where} within "
                           f"{self.timeout:g} s: see what the other nodes say, and start all with the same "
                           "command but for the node's own rank.") from None

    def raise_if_lost(self) -> None:
        """For loops that wait long without a collective. Raises RunError if a rank is lost for `timeout`."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self.PATIENCE
        for key, value in self.call(self._read).items():
            if self._seen.get(key, ("", 0))[0] != value:
                self._seen[key] = value, now
        silent = [value for value, since in self._seen.values() if now - since > self.timeout]
        if silent:
            raise RunError(lost(silent))

    def ask(self) -> str:
        """Why a collective failed, in one sentence, or "" if all ranks are alive. Takes some seconds."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when a process beside this one has failed
        try:
            self.call(self._find_cause, self.PATIENCE + 3 * self.BEAT)
            return self.cause
        except RunError as error:
            return str(error)

    def call(self, function, timeout: float = 0):
        """What function(), which uses a store, returns. Raises RunError if the store does not answer: its own
        calls would wait for ever, so the thread makes them.
        """
        self._orders.put(function)
        with contextlib.suppress(queue.Empty):
            if (answer := self._answers.get(timeout=timeout or self.timeout)) is not GONE:
                return answer
        raise RunError(self.cause or (
            f"node0 can no longer be reached at {self.where} (a process there has failed or ended, its "
            f"machine has stopped, or the network to it is down): {WAY_BACK}."))

    def stop(self, reason: str) -> None:
        """Says good-bye, with the reason if this rank has failed. Node 0, where the store is, leaves last."""
        if reason:
            self._own_cause = f"{self.name} failed first: {reason}"
        self._orders.put(None)
        self._thread.join(timeout=2 * self.BEAT)
        if self.cause and len(self.keys) > int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
            time.sleep(2 * self.BEAT * (os.environ.get("GROUP_RANK", "0") == "0"))

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone; if it does not answer at all, this hangs
            while not self.cause:
                try:
                    function = self._orders.get(timeout=self.BEAT)
                except queue.Empty:
                    self._beat()
                    continue
                self._beat("" if function else "ended")
                if not function:
                    break
                self._answers.put(function())
        self._answers.put(GONE)

    def _beat(self, last: str = "") -> None:
        self._beats += 1
        self.store.set(self.keys[self.rank], f"{self.name}|{last or self._beats}")
        if self._own_cause:
            self.store.compare_set("cause", "", self._own_cause)
        if self.store.check(["cause"]):
            self.cause = self.store.get("cause").decode()

    def _read(self) -> dict[str, bytes]:
        return dict(zip(self.keys, self.store.multi_get(self.keys)))

    def _find_cause(self) -> None:
        before, deadline = self._read(), time.monotonic() + self.PATIENCE
        while not self.cause:
            time.sleep(self.BEAT / 4)
            self._beat()
            silent = [v for key, v in self._read().items() if v == before[key] and not v.endswith(b"|ended")]
            if not silent:
                return
            if time.monotonic() > deadline:
                self._own_cause = lost(silent)  # which the next beat publishes


def compiles(device: torch.device) -> bool:
    """Whether blocks are compiled by default: on GPUs that Triton knows, of compute capability 7.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """auto is bf16 where the hardware computes in it (CUDA from sm80, a CPU with avx512_bf16), else fp32."""
    if precision == "auto":
        if device.type == "cuda":
            fast = torch.cuda.get_device_capability(device) >= (8, 0)
        else:
            fast = torch.cpu.get_capabilities().get("avx512_bf16", False)
        precision = "bf16" if fast else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


# -----------------------------------------------------------------------------------------------------------
# The flags that all trainers share. Those without a default here take it from the table of sizes.


def number(low: float, high: float = float("inf"), kind=float, open_end: bool = False):
    """A type for argparse: a number in [low, high], or in [low, high) with `open_end`."""
    def parse(text: str):
        value = kind(text)
        if not math.isfinite(value) or not low <= value <= high or open_end and value == high:
            limit = f"in [{low:g}, {high:g}{')' if open_end else ']'}"
            limit = f"at least {low:g}" if high == float("inf") else limit
            raise argparse.ArgumentTypeError(f"{text} is not {limit}")
        return value
    parse.__name__ = "whole number" if kind is int else "number"
    return parse


positive = number(1, kind=int)
share = number(0, 1, open_end=True)


def machine(text: str) -> tuple[int, float]:
    """A type for argparse: '8x141' → (8, 141.0)."""
    match = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not GPUs and the GB of each, such as 8x141")
    return int(match[1]), float(match[2])


def comm(text: str) -> str:
    """A type for argparse: fp32, bf16 or powersgd:RANK."""
    if not re.fullmatch(r"fp32|bf16|powersgd:[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of fp32, bf16 and powersgd:RANK")
    return text


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for data, batch, optimizer, run and checkpoints to a trainer's parser."""
    g = parser.add_argument_group("data")
    g.add_argument("--data", help="a prepared directory, or a source for `data.py prepare` such as stdlib, "
                   "text:GLOB or fineweb-edu, which is prepared first if need be")
    g.add_argument("--tokenizer", help="gpt2, cl100k_base, o200k_base, bytes, bpe:N or the path of a "
                   "tokenizer.json (default: that of the prepared data; bpe:4096 for stdlib, else gpt2)")
    g.add_argument("--seq-len", type=positive, help="tokens in a row, the context of the model")
    g.add_argument("--seed", type=number(0, 2**31, int), default=0, help="of weights, order and dropout (0)")

    g = parser.add_argument_group("steps and batches")
    length = g.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, help="optimizer steps of the whole run")
    length.add_argument("--epochs", type=number(1e-9), help="passes over the data, instead of --steps")
    g.add_argument("--global-batch", type=positive, help="sequences in a step, over all processes")
    g.add_argument("--batch", type=positive, help="sequences in a micro-batch of one process; how many a "
                   "step accumulates follows (default: the largest that divides, up to the table's)")
    g.add_argument("--grad-accum", type=positive, help="micro-batches in a step, instead of --batch")

    g = parser.add_argument_group("optimization")
    g.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw",
                   help="muon: for the matrices of the blocks, with AdamW for the rest (adamw)")
    g.add_argument("--lr", type=number(0), help="peak learning rate")
    g.add_argument("--schedule", choices=("cosine", "wsd", "constant"), default="cosine",
                   help="after the warm-up; wsd stays constant and falls over the last fifth (cosine)")
    g.add_argument("--warmup", type=number(0, kind=int), help="steps of linear warm-up")
    g.add_argument("--min-lr-ratio", type=number(0, 1), default=0.1, help="last learning rate / peak (0.1)")
    g.add_argument("--weight-decay", type=number(0), default=0.1, help="of matrices (0.1)")
    g.add_argument("--beta1", type=share, default=0.9, help="of AdamW (0.9)")
    g.add_argument("--beta2", type=share, default=0.95, help="of AdamW (0.95)")
    g.add_argument("--grad-clip", type=number(0), default=1.0, help="largest gradient norm; 0: any (1.0)")
    g.add_argument("--ema", type=share, default=0.0, help="decay of a moving average of the weights, which "
                   "evaluation, --prompt and --export then use; 0 keeps none (0)")

    g = parser.add_argument_group("running")
    g.add_argument("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
                   help="of activations; auto is bf16 where the hardware has it, else fp32; parameters are "
                   "always fp32 (auto)")
    g.add_argument("--compile", action=argparse.BooleanOptionalAction,
                   help="compile each block (default: on GPUs)")
    g.add_argument("--checkpoint-activations", choices=("none", "block", "selective"),
                   help="recompute in the backward pass, exactly: block keeps only the input of a block, "
                   "selective the matrix products too")
    g.add_argument("--strategy", choices=("ddp", "zero1", "zero2", "zero3"), default="ddp",
                   help="what processes share out instead of each holding all of it: nothing, the optimizer "
                   "state, also gradients, also parameters; any strategy resumes from any other's checkpoint "
                   "(ddp)")
    g.add_argument("--cpu-offload", action="store_true",
                   help="with zero3: parameters, gradients and optimizer state live in host memory")
    g.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(auto: a GPU if any)")
    g.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="(auto: nccl on GPUs)")
    g.add_argument("--timeout", type=positive, default=600, help="seconds to wait for a lost process (600)")
    g.add_argument("--dry-run", nargs="?", const=(0, 0.0), type=machine, metavar="GPUSxGB",
                   help="only estimate the memory that each process needs: here, or for example on 8x141")

    g = parser.add_argument_group("slow links between nodes, with --strategy ddp")
    g.add_argument("--comm", type=comm, default="fp32", metavar="fp32|bf16|powersgd:RANK",
                   help="what gradients travel as; powersgd: low-rank factors, once --warmup is over (fp32)")
    g.add_argument("--outer-every", type=positive, metavar="H", help="DiLoCo: average the parameters every H "
                   "steps instead of the gradients in every step")
    g.add_argument("--outer-start", type=number(0, kind=int), default=0, metavar="N",
                   help="first train N steps as without --outer-every (0)")
    g.add_argument("--outer-lr", type=number(0), default=0.7, help="step size of the outer update (0.7)")
    g.add_argument("--outer-momentum", type=share, default=0.5, help="its Nesterov momentum (0.5)")

    g = parser.add_argument_group("output")
    g.add_argument("--out", type=Path, help="directory of the run (default: runs/<model>-<size>-<data>)")
    g.add_argument("--log-every", type=positive, default=10, help="steps between log lines (10)")
    g.add_argument("--wandb", action="store_true", help="send the curves to Weights & Biases as well")
    g.add_argument("--profile", type=number(0, kind=int), default=0, metavar="N", help="print where the time "
                   "of N steps goes, and write trace.json.gz for a browser; 0: do not (0)")
    g.add_argument("--eval-every", type=positive, help="steps between evaluations; epochs end with one too")
    g.add_argument("--eval-batches", type=number(0, kind=int), help="global batches in an evaluation; "
                   "0 is the whole validation split")
    g.add_argument("--save-every", type=positive, help="steps between checkpoints")
    g.add_argument("--keep-last", type=positive, default=3, help="checkpoints to keep, beside the best (3)")
    g.add_argument("--resume", default="auto", metavar="auto|none|PATH", help="auto: from the newest whole "
                   "checkpoint in --out; none: start anew, which needs an --out without checkpoints (auto)")
    g.add_argument("--init-from", metavar="PATH", help="start from the weights of hf:DIR_OR_ID, of a "
                   "checkpoint file, or of a run directory")

    g = parser.add_argument_group("using a run: acts on the newest checkpoint in --out, without training")
    g.add_argument("--export", action="store_true", help="write hf/ for transformers")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of text generation."""
    g = parser.add_argument_group("sampling")
    g.add_argument("--prompt", help="continue this text with the newest checkpoint, without training")
    g.add_argument("--sample-prompt", default="", help="the sample at the end of training continues this")
    g.add_argument("--sample-every", type=number(0, kind=int), default=0, metavar="N", help="write a sample "
                   "after every N-th evaluation too; 0: only at the end (0)")
    g.add_argument("--max-new-tokens", type=positive, default=200, help="(200)")
    g.add_argument("--temperature", type=number(0), default=0.8, help="0: always the likeliest token (0.8)")
    g.add_argument("--top-k", type=number(0, kind=int), default=50, help="likeliest ids to keep; 0: all (50)")
    g.add_argument("--top-p", type=number(0, 1), default=1.0,
                   help="sample from the smallest set with this mass (1.0)")


def table_of(sizes: dict[str, dict]) -> str:
    """The defaults of each size as a text for --help, one line for each flag."""
    columns = [["--size", *next(iter(sizes.values()))]]
    columns += [[name, *map(str, defaults.values())] for name, defaults in sizes.items()]
    columns = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return "defaults of each size:\n" + "\n".join("  " + "  ".join(row).rstrip() for row in zip(*columns))


def settings_of(args: argparse.Namespace) -> dict:
    """The flags that shape a run, as plain data."""
    others = {"out", "resume", "prompt", "export", "sample_prompt", "sample_every", "max_new_tokens",
              "temperature", "top_k", "top_p", "epochs", "timeout", "dry_run", "fill", "probe",
              "list_presets", "wandb", "profile"}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(args).items() if k not in others}


def use_defaults(args: argparse.Namespace, defaults: dict) -> None:
    """Fills in the flags that were not given. Raises UserError for combinations that exclude each other."""
    for key, value in defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    sharded = args.strategy in ("zero2", "zero3")
    for wrong, sentence in (
            (sharded and args.optimizer == "muon", "--optimizer muon needs whole matrices: use ddp or zero1"),
            (sharded and args.precision == "fp16", "--precision fp16 needs ddp or zero1: use bf16"),
            (args.cpu_offload and args.strategy != "zero3", "--cpu-offload needs --strategy zero3"),
            (args.comm != "fp32" and args.strategy != "ddp", "--comm needs --strategy ddp"),
            (args.outer_start and not args.outer_every, "--outer-start needs --outer-every"),
            (args.outer_every and args.strategy != "ddp", "--outer-every needs --strategy ddp"),
            (args.outer_every and "powersgd" in args.comm, "--outer-every needs --comm fp32 or bf16"),
            (args.outer_every and args.precision == "fp16", "--outer-every needs --precision bf16 or fp32"),
            (args.outer_every and args.ema, "--ema averages weights that all processes share, which they do "
                                            "not with --outer-every: leave one of them out")):
        if wrong:
            raise UserError(f"{sentence}.")


# -----------------------------------------------------------------------------------------------------------
# Agreement


def on_main(world: World, function):
    """What function() returns on rank 0, on every rank; a UserError there is raised on every rank."""
    answer = [None, None]
    if world.main:
        try:
            answer[0] = function()
        except UserError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0, device=world.device)
    if answer[1] is not None:
        raise UserError(answer[1])
    return answer[0]


def reduce_sum(values: list, world: World) -> list[float]:
    """Sums a few numbers, floats or scalar tensors, over all ranks in one all-reduce of float64."""
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in values])
    dist.all_reduce(packed)
    return packed.tolist()


def differing_rank(numbers: Tensor) -> tuple[int, int] | None:
    """(index, rank) of the first of these int64 numbers (n,) that is not the same on all ranks, else None.

    Two all-reduces decide; only if something differs are all numbers gathered, to name the odd one out.
    """
    low, high = numbers.clone(), numbers.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    different = (low != high).nonzero()
    if not len(different):
        return None
    index = int(different[0])
    gathered = [torch.empty_like(numbers[index:index + 1]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, numbers[index:index + 1].contiguous())
    values = torch.cat(gathered).tolist()
    usual = max(values, key=values.count)  # the first of the most frequent
    return index, next(rank for rank, value in enumerate(values) if value != usual)


def assert_same(world: World, what: dict[str, str], way_out: str) -> None:
    """Raises UserError naming the first of these hexadecimal digests on which a rank differs from others."""
    numbers = torch.tensor([int(digest[:15], 16) for digest in what.values()], device=world.device)
    if odd := differing_rank(numbers):
        raise UserError(f"{list(what)[odd[0]]} on rank {odd[1]} differs from the other ranks: {way_out}.")


def bit_sum(tensor: Tensor) -> Tensor:
    """int64 scalar: the sum of the bits of a tensor read as integers. One flipped bit changes it."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(integers)
    if bits.device.type == "cpu":  # torch takes ten times as long as numpy, and all cores
        return torch.tensor(bits.numpy().sum(dtype=np.int64))
    return bits.sum(dtype=torch.int64)


def assert_in_sync(tensors: dict[str, Tensor]) -> None:
    """Compares tensors that all ranks hold whole, bit for bit. Raises RunError at a difference."""
    tensors = {name: t for name, t in tensors.items() if not isinstance(t, DTensor)}
    if tensors and (odd := differing_rank(torch.stack([bit_sum(t) for t in tensors.values()]))):
        raise RunError(f"{list(tensors)[odd[0]]} on rank {odd[1]} differs from the other ranks, so the run "
                       "stops (Sync=FAILED): check the memory and the libraries of that node (unlike GPUs or "
                       "CPUs round differently, so there --optimizer muon needs --strategy zero1, and --comm "
                       "cannot be powersgd); the last checkpoint was compared before it was written.")


_waits = itertools.count()  # all ranks come to the same ones in the same order


def on_all(world: World, what: str, function):
    """function() on every rank, for days if need be, where a collective would time out; returns its result.

    If it raises on one rank, it raises UserError on all, so that none waits for the one that failed.
    """
    store = dist.distributed_c10d._get_default_store()
    what = f"{what} {next(_waits)}"
    try:
        result = function()
    except BaseException as error:
        store.set(f"{what} failed", str(error) or type(error).__name__)
        raise
    call = heartbeat.call if heartbeat else lambda function: function()
    call(lambda: store.add(what, 1))
    pause = 0.001
    while call(lambda: store.add(what, 0)) < world.world_size:
        if call(lambda: store.check([f"{what} failed"])):
            raise UserError(store.get(f"{what} failed").decode())
        heartbeat.raise_if_lost()
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return result


def load_data(args, world: World, directory: Path, parameters: int) -> Dataset:
    """The data set of --data, prepared first if need be, 20 tokens for each parameter where it is endless."""
    def read():
        locate(args.data, args.tokenizer, 20 * parameters, world.local_rank,
               heartbeat.raise_if_lost if heartbeat else lambda: None)
        return Dataset(directory, args.seq_len, args.tokenizer)

    dataset = on_all(world, "data", read)
    assert_same(world, {"the data": dataset.fingerprint},
                "copy the same files to every node, or prepare them there with the same command")
    return dataset


def assert_same_flags(world: World, flags: dict) -> None:
    """Raises UserError if the processes were started with different flags, which would part their ways."""
    digest = hashlib.sha256(json.dumps(flags, default=str).encode()).hexdigest()
    assert_same(world, {"the command line": digest}, "start every node with the same flags; --precision auto "
                "and --device auto need the same kind of processors")


# -----------------------------------------------------------------------------------------------------------
# Models on all ranks, whole or in shards


def build(kind: type, config, world: World, strategy: str = "ddp", cpu_offload: bool = False) -> nn.Module:
    """A model without weights, in shards with zero2 and zero3, on this process's device.

    It is laid out on the meta device first, so only rank 0, which has the weights, ever holds all of them in
    host memory.
    """
    with torch.device("meta"):
        model = kind(config)
    buffers = dict(model.named_buffers())
    for block in (m for m in model.modules() if isinstance(m, Block)):
        block.plain_attention = world.device.type == "cpu"
    if strategy in ("zero2", "zero3"):
        options = {"mesh": init_device_mesh(world.device.type, (world.world_size,)),
                   "reshard_after_forward": strategy == "zero3"}  # zero2 keeps what a step has gathered
        if cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        for block in (m for m in model.modules() if isinstance(m, Block)):
            fully_shard(block, **options)
        fully_shard(model, **options)
        if strategy == "zero2":  # HRM calls its blocks again and again; `reshard` ends a step
            model.set_reshard_after_backward(False)
        if hasattr(model, "decode"):
            register_fsdp_forward_method(model, "decode")
    model.to_empty(device="cpu" if cpu_offload else world.device)
    for name, buffer in buffers.items():  # tables are real already; others come with the weights
        setattr(model, name, torch.empty_like(buffer, device=world.device) if buffer.is_meta
                else buffer.to(world.device))
    return model


def whole(tensor: Tensor, world: World) -> Tensor:
    """All of a sharded tensor, on every rank; other tensors themselves."""
    return tensor.to(world.device).full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_from_main(tensor: Tensor, source: Tensor | None, world: World) -> None:
    """Copies `source`, a whole tensor on rank 0, into a tensor, or the shards of one, on all ranks."""
    everything = tensor
    if isinstance(tensor, DTensor) or tensor.device != world.device:
        everything = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
    if world.main:
        everything.copy_(source)
    dist.broadcast(everything.detach(), src=0)
    if isinstance(tensor, DTensor):
        everything = distribute_tensor(everything, tensor.device_mesh, tensor.placements, src_data_rank=None)
    if everything is not tensor:
        local(tensor).copy_(local(everything))


def load_model(kind: type, source: str | Path, world: World, say, seq_len: int = 0, strategy: str = "ddp",
               cpu_offload: bool = False, **changes) -> tuple[nn.Module, dict | None]:
    """A trained model of class `kind` and its checkpoint, from hf:DIR_OR_ID, a run directory or a file.

    `changes` replaces fields of its configuration that do not change its parameters; a context shorter than
    `seq_len` is made as long, if its kind of positions allows that.
    """
    saved = read = None

    def read_hf():
        nonlocal read
        read = from_hf(kind, str(source)[3:])
        return asdict(read.config)

    if str(source).startswith("hf:"):  # a download can take longer than a collective may
        config = on_all(world, "weights", lambda: read_hf() if world.main else None)
        config = on_main(world, lambda: config)
    else:
        saved = load_checkpoint(source, world, say)
        if saved is None:
            raise UserError(f"{source} holds no checkpoint: train first, or name another run.")
        if saved["family"] != kind.__name__:
            raise UserError(f"{saved['path']} holds a model of the family {saved['family']}, not "
                            f"{kind.__name__}: use its own trainer.")
        config = saved["model_config"]
    changes["seq_len"] = max(seq_len, config["seq_len"])
    model = build(kind, kind.Config(**config | changes), world, strategy, cpu_offload)
    if seq_len > config["seq_len"] and "positions.weight" in model.state_dict():
        raise UserError(f"{source} has learned positions for {config['seq_len']} tokens: lower --seq-len.")
    if saved:
        restore(saved, world, model, averaged=True)
    else:
        copy_model(model, read, world)
    return model, saved


def copy_model(model: nn.Module, source: nn.Module | None, world: World) -> None:
    """Copies the weights of `source`, a whole model on rank 0, to all ranks."""
    weights = source.state_dict() if world.main else {}
    for name, tensor in model.state_dict().items():
        copy_from_main(tensor, weights.get(name), world)


def tokenizer_id(tokenizer) -> str:
    """Name and digest: two bpe:4096 of different texts are different tokenizers."""
    return f"{tokenizer.name} ({hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:12]})"


def start_model(kind: type, config, args, tokenizer, world: World, saved: dict | None, say) -> nn.Module:
    """The model to train: random of this configuration, or from --init-from; for `restore` still empty."""
    sharding = args.strategy, args.cpu_offload
    changes = {key: getattr(config, key) for key in ("dropout", "eot") if hasattr(config, key)}
    if args.init_from and not saved:
        model, source = load_model(kind, args.init_from, world, say, args.seq_len, *sharding, **changes)
        if source and source["tokenizer"] != tokenizer_id(tokenizer):
            raise UserError(f"{args.init_from} was trained with the tokenizer {source['tokenizer']}, the "
                            f"data have {tokenizer_id(tokenizer)}: prepare them with its tokenizer.json.")
        if model.config.vocab_size > config.vocab_size:
            say(f"WARNING: {args.init_from} knows {model.config.vocab_size} ids, {tokenizer.name} only "
                f"{config.vocab_size}: its weights are of use only if these ids mean the same")
        if model.config.vocab_size < config.vocab_size:
            raise UserError(f"{args.init_from} knows {model.config.vocab_size} ids, but {tokenizer.name} has "
                            f"{config.vocab_size}: prepare the data with the tokenizer of that model.")
        return model
    if args.init_from and saved["family"] == kind.__name__:  # that decided the shape when the run began
        config = kind.Config(**saved["model_config"] | changes)
    model = build(kind, config, world, *sharding)
    if not saved:
        torch.manual_seed(args.seed)
        copy_model(model, kind(config) if world.main else None, world)
    return model


def run_of(saved: dict, args, out: Path) -> tuple:
    """The run directory of a checkpoint that --prompt or --export uses (`out` if it lies elsewhere), and its
    tokenizer. Raises UserError if that directory has none, or that of another run.
    """
    home = Path(saved["path"]).parent.parent
    out = home if args.out is None and (home / "tokenizer.json").exists() else out
    if not (out / "tokenizer.json").exists():
        raise UserError(f"{out} holds no tokenizer.json: name the directory of that run with --out.")
    tokenizer = load_tokenizer(str(out))
    if tokenizer_id(tokenizer).split()[-1] != saved["tokenizer"].split()[-1]:  # only the digests
        raise UserError(f"{saved['path']} was trained with the tokenizer {saved['tokenizer']}, which is not "
                        f"that of {out}: name the directory of that run with --out.")
    return out, tokenizer


def use_text_model(kind: type, args, world: World, out: Path) -> None:
    """--prompt and --export: acts on the newest checkpoint of a run."""
    model, saved = load_model(kind, out if args.resume == "auto" else args.resume, world, print)
    model.compute_dtype = compute_dtype(args.precision, world.device)
    if not world.main:
        return
    out, tokenizer = run_of(saved, args, out)
    print(f"step {saved['step']} from {saved['path']}", flush=True)
    if args.export:
        to_hf(model, out / "hf", tokenizer)
        print(f"{out / 'hf'} is ready for AutoModelForCausalLM.from_pretrained", flush=True)
    if args.prompt is not None:
        print(args.prompt, end="")
        for piece in continue_text(model, tokenizer, world.device, args.prompt, args.max_new_tokens,
                                   args.temperature, args.top_k, args.top_p, args.seed, stop=tokenizer.eot):
            print(piece, end="", flush=True)
        print()


def check_resumable(saved: dict, now: dict, say) -> None:
    """Raises UserError if the checkpoint has another model, tokenizer, data or seed; prints other changes."""
    def fixed(run: dict) -> dict:
        model = {k: v for k, v in run["model_config"].items() if k != "dropout"}
        return {k: run[k] for k in ("family", "tokenizer", "seq_len", "data", "seed")} | model

    was, is_ = fixed(saved), fixed(now)
    for what in is_:
        if was.get(what) != is_[what]:
            raise UserError(f"{saved['path']} belongs to a run with another {what} ({was.get(what)}, now "
                            f"{is_[what]}): give that run's flags, or start a new one with another --out.")
    for flag, value in now["settings"].items():
        if saved["settings"].get(flag) != value:
            say(f"resuming with {flag} {value} (was {saved['settings'].get(flag)})")


@torch.no_grad()
def evaluate(model: nn.Module, ema, batches, world: World, vote) -> tuple[dict | None, int]:
    """Means of a model's statistics over batches (inputs …, labels), each weighted by its labels from 0 on.

    Computed by all ranks, of which each has as many batches. (None, signal) if a stop signal came in between.
    """
    if ema:
        ema.swap()
    model.eval()
    names, sums, stopping = [], 0, 0
    for batch in batches:
        _, stats = model(*batch)
        names, count = list(stats), (batch[-1] >= 0).sum()
        sums = sums + torch.stack([*stats.values(), torch.ones_like(stats["loss"])]).double() * count
        if stopping := vote.read():
            break
        vote.start()
    model.train()
    *totals, count = reduce_sum([*sums], world)  # waits for the device, which may still read the parameters
    if ema:
        ema.swap()
    return (None, stopping) if stopping else ({n: total / count for n, total in zip(names, totals)}, 0)


# -----------------------------------------------------------------------------------------------------------
# Memory, before anything is run


class _Alive(TorchDispatchMode):
    """Remembers the storage of every tensor that is computed, without keeping it alive."""

    def __init__(self, known):
        super().__init__()
        self.known, self.sizes = {StorageWeakRef(t.untyped_storage()) for t in known}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def bytes(self) -> int:
        """What is still there of what was computed."""
        return sum(n for storage, n in self.sizes.items()
                   if storage not in self.known and not storage.expired())


def activation_bytes(loss, others) -> int:
    """Bytes that stay in memory for the backward pass of loss(), without the tensors `others`."""
    with _Alive(others) as alive:
        kept = loss()
        found = alive.bytes()
    del kept
    return found


def fake_model(kind: type, config) -> nn.Module:
    """A model of tensors on the CPU without memory. To be called in a FakeTensorMode."""
    with torch.device("meta"):
        model = kind(config)
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(p.shape)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape))
    return model


def memory_of(model: nn.Module, strategy: str, cpu_offload: bool, processes: int, optimizer: str = "adamw",
              ema: bool = False, twice: bool = False) -> dict[str, float]:
    """Bytes for parameters, gradients and optimizer state in each process, by kind, at the fullest moment.

    zero2 and zero3 hold, beside their shards, what is gathered: zero2 all parameters, zero3 those of two
    blocks, of which one is fetched ahead, and those outside of blocks; and the gradients of a block and of
    what is outside. With the others, the largest gradient comes in two parts, of embedding and head.
    `twice` counts two more copies of the parameters, as DiLoCo and PowerSGD have them.
    """
    sizes = {name: 4 * p.numel() for name, p in model.named_parameters()}
    blocks = [sum(4 * p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, Block)]
    everything, outside = sum(sizes.values()), sum(sizes.values()) - sum(blocks)
    hidden = sum(n for name, n in sizes.items() if optimizer == "muon" and ".blocks." in name)
    state = 2 * everything - hidden  # Muon keeps one number for each, AdamW two
    sharded = strategy in ("zero2", "zero3")
    share = 1 / processes if sharded else 1
    gathered = {"zero2": everything, "zero3": outside + 2 * max(blocks)}.get(strategy, 0)
    return {"parameters": (0 if cpu_offload else everything * share) + gathered,
            "gradients": (0 if cpu_offload else everything * share)
            + (outside + max(blocks) if sharded else max(sizes.values())),
            "optimizer": 0 if cpu_offload else state if strategy == "ddp" else state / processes,
            "other": (ema and not cpu_offload) * everything * share + twice * 2 * everything}


def dry_run(kind: type, args, flags, preset: dict, loss) -> None:
    """--dry-run: prints what each process would hold, with every strategy, and whether that fits.

    loss(model, ids (B, T)) is run on tensors that have a shape but no memory, so what autograd keeps is
    counted rather than guessed; a compiled model keeps less. `flags` are those that configure the model.
    """
    if int(os.environ.get("RANK", 0)) > 0:
        return
    processes, gigabytes = args.dry_run if args.dry_run[0] else this_machine(args.device)
    _, batch, _ = plan_batch(processes, args.global_batch, args.batch, args.grad_accum,
                             preset["global_batch"], preset["batch"])
    ids = args.vocab_size or pad_vocab(expected_ids(args.data, args.tokenizer))
    config = kind.Config(vocab_size=ids, padded_vocab=ids, **{flag: getattr(args, flag) for flag in flags})
    precision = "bf16" if args.precision == "auto" else args.precision
    with FakeTensorMode():
        model = fake_model(kind, config)
        model.compute_dtype = compute_dtype(precision, torch.device("cpu"))
        for block in (m for m in model.modules() if isinstance(m, Block)):
            block.checkpointing = args.checkpoint_activations
        x = torch.zeros((batch, args.seq_len), dtype=torch.long)
        activations = activation_bytes(lambda: loss(model, x), [*model.parameters(), *model.buffers()])
    print(f"{kind.__name__} of {sum(p.numel() for p in model.parameters()):,} parameters, {processes} "
          f"processes with {gigabytes:.0f} GB each, micro-batches of {batch} x {args.seq_len}, "
          f"{precision}, activation checkpointing "
          f"{args.checkpoint_activations}; in GB:")
    fits = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3", "zero3 --cpu-offload"):
        name, _, offload = strategy.partition(" ")
        twice = name == "ddp" and bool(args.outer_every or "powersgd" in args.comm)
        held = memory_of(model, name, bool(offload), processes, args.optimizer, args.ema > 0, twice)
        held["activations"] = activations
        if not fits:
            print("  ".join([f"{'--strategy':20}", *(f"{part:>11}" for part in held), "   together"]))
        together = sum(held.values()) / 1e9
        fits[strategy] = together <= 0.92 * gigabytes  # the rest goes to CUDA, its libraries and fragments
        print("  ".join([f"{strategy:20}", *(f"{n / 1e9:11.2f}" for n in held.values()), f"{together:11.2f}",
                         "fits" if fits[strategy] else "does not fit"]))
    chosen = args.strategy + " --cpu-offload" * args.cpu_offload
    others = " or ".join(f"--strategy {strategy}" for strategy, does in fits.items() if does)
    ways = ["a smaller --batch"] * (batch > 1) + [others or "more processes"]
    ways += ["--checkpoint-activations block"] * (args.checkpoint_activations == "none")
    print(f"--strategy {chosen} " + ("fits." if fits[chosen] else f"does not fit: use {' or '.join(ways)}."))


def this_machine(device: str) -> tuple[int, float]:
    """(processes that torchrun has started, GB of memory for each)."""
    if device != "cpu" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        total /= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return int(os.environ.get("WORLD_SIZE", 1)), total / 1e9


# -----------------------------------------------------------------------------------------------------------
# Training steps


def wrap(model: nn.Module, world: World, comm: str = "fp32", exact_steps: int = 0) -> nn.Module:
    """DistributedDataParallel around the model if there are more processes and it is not sharded itself.

    Parameters must agree already. `comm` says what gradients travel as, see --comm; powersgd sends them as
    they are in the first `exact_steps` (Vogels et al., 2019, arXiv 1905.13727), and its state becomes the
    attribute `powersgd` of the result.
    """
    if world.world_size == 1 or any(isinstance(p, DTensor) for p in model.parameters()):
        return model
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # torch 2.11 knows no other name
    # PowerSGD's all-reduces follow one another from callbacks: with several buckets, gloo mixes them up
    wrapped = DistributedDataParallel(
        model, device_ids=[world.device] if world.device.type == "cuda" else None, broadcast_buffers=False,
        gradient_as_bucket_view=True, init_sync=False, bucket_cap_mb=1e6 if "powersgd" in comm else None)
    if comm == "bf16":
        wrapped.register_comm_hook(None, send_bf16)
    elif comm != "fp32":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
        wrapped.powersgd = powersgd.PowerSGDState(  # warm_up's two steps come first
            None, int(comm.partition(":")[2]), start_powerSGD_iter=max(exact_steps, 2))
        wrapped.register_comm_hook(wrapped.powersgd, powersgd.powerSGD_hook)
    return wrapped


def send_bf16(state, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for DDP: the mean of the gradients, computed in bfloat16."""
    halved = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(halved, async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def shard_optimizers(optimizers: list, strategy: str) -> list:
    """With zero1, each process updates a share of the parameters only, and sends the result to the others."""
    if strategy != "zero1":
        return optimizers
    from torch.distributed.optim import ZeroRedundancyOptimizer
    return [ZeroRedundancyOptimizer(o.param_groups, type(o), lr=o.defaults["lr"],
                                    **{"fused": True} if o.defaults.get("fused") else {}) for o in optimizers]


def shard_of(optimizer):
    """The optimizer that holds this process's share of the state."""
    return getattr(optimizer, "optim", optimizer)


def no_sync(wrapped: nn.Module, really: bool):
    """A context in which DDP keeps gradients local, for every micro-batch but the last of a step."""
    ddp = isinstance(wrapped, DistributedDataParallel)
    return wrapped.no_sync() if really and ddp else contextlib.nullcontext()


def warm_up(wrapped: nn.Module, first, settled) -> None:
    """Throw-away backward passes: one of first(), then two of settled(), functions that return a scalar.

    The first, without communication, shows that every parameter gets a gradient when training starts;
    RunError if not. The others settle DDP's buckets, which it rearranges after its first step: that changes
    the order of sums, and without them a resumed run would drift from an uninterrupted one.
    """
    with no_sync(wrapped, True):
        first().backward()
    reshard(wrapped)
    missing = [name for name, p in wrapped.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        raise RunError(f"{missing[0].removeprefix('module.')} gets no gradient, so it would never train: "
                       "with the HRM raise --bp-steps.")
    for _ in range(2):
        wrapped.zero_grad(set_to_none=True)
        settled().backward()
        reshard(wrapped)
    wrapped.zero_grad(set_to_none=True)


def clip_gradients(parameters, max_norm: float) -> Tensor:
    """Scales gradients down to a total norm of max_norm (0: leaves them). Returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]  # others may be frozen
    here = [local(g) for g in gradients]
    norm = nn.utils.get_total_norm(here)
    if isinstance(gradients[0], DTensor):
        squared = norm.to(gradients[0].device_mesh.device_type) ** 2
        dist.all_reduce(squared)
        norm = squared.sqrt()
    if max_norm > 0:
        torch._foreach_mul_(here, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(here[0].device))
    return norm


def optimizer_step(optimizers, scaler, norm: Tensor, powersgd=None) -> None:
    """Steps the optimizers unless the gradient norm is not finite, which every rank sees alike.

    Fused optimizers skip on the device, so the host never waits for the norm; Muon has no such switch.
    PowerSGD would carry such a gradient on, so it starts afresh.
    """
    if powersgd and not norm.isfinite():
        for kind in POWERSGD:
            getattr(powersgd, kind).clear()
        powersgd.rng = np.random.RandomState(powersgd.iter)  # it draws anew, in a resumed run the same
    skip = 1.0 - norm.isfinite().float()
    for optimizer in optimizers:
        inner = shard_of(optimizer)
        if inner.defaults.get("fused"):
            device = optimizer.param_groups[0]["params"][0].device  # the host's with --cpu-offload
            inner.grad_scale, inner.found_inf = None, skip.to(device)
            optimizer.step()
        elif not skip.item():
            optimizer.step()
    scaler.update()  # by what unscale_ has found


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch for one step of one rank. So the generators have no state that a checkpoint must keep, and
    a resumed run draws the same dropout masks.
    """
    mixed = ((seed * 0x9E3779B97F4A7C15 + step) * 0xBF58476D1CE4E5B9 + rank) * 0x94D049BB133111EB
    torch.manual_seed((mixed ^ mixed >> 31) % 2**63)


class Outer:
    """DiLoCo (Douillard et al., 2023, arXiv 2311.08105): processes train apart, and every H steps meet.

    There the mean of what each has moved, sent in bfloat16, makes one step of SGD with Nesterov momentum from
    where they last met.
    """

    def __init__(self, model: nn.Module, every: int, start: int, lr: float, momentum: float):
        self.params = dict(model.named_parameters())
        self.every, self.start, self.lr, self.momentum = every, start, lr, momentum
        self.velocity = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.params.items()}
        self._origin: list[Tensor] | None = None  # where they last met

    def apart(self, step: int) -> bool:
        """Whether step `step`, counted from 0, is made without the others. To be asked before the step."""
        if step >= self.start and self._origin is None:
            self._origin = [p.detach().clone() for p in self.params.values()]
        return step >= self.start

    @property
    def parted(self) -> bool:
        """Whether the processes have ever trained apart, so that their optimizers differ."""
        return self._origin is not None

    def meets(self, step: int) -> bool:
        """Whether the processes meet after `step` steps, without anything else that makes them."""
        return (step - self.start) % self.every == 0

    @torch.no_grad()
    def meet(self) -> None:
        """Gives all processes the same parameters again."""
        moves = [(origin - p).to(torch.bfloat16).view(-1)
                 for origin, p in zip(self._origin, self.params.values())]
        together = torch.cat(moves).div_(dist.get_world_size())
        dist.all_reduce(together)
        moves = together.split([p.numel() for p in self.params.values()])
        for origin, move, (name, p) in zip(self._origin, moves, self.params.items()):
            move = move.float().view_as(p)
            velocity = self.velocity[name].mul_(self.momentum).add_(move)
            origin.sub_(move.add_(velocity, alpha=self.momentum), alpha=self.lr)
            p.copy_(origin)


class StopVote:
    """Lets all ranks stop after the same step: at a signal to any of them, or when training has failed.

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag, and so does the death of torchrun. At the end of a step
    `start` sends it off in a small all-reduce, which `read` collects a step later, when it has long arrived.
    """

    PATIENCE = 10  # updates skipped in a row

    def __init__(self, world: World):
        self.device, self.signal, self._since, self._work = world.device, 0, 0.0, None
        on_cuda = self.device.type == "cuda"
        self.skipped = torch.zeros((), device=self.device)  # updates in a row whose gradient was not finite
        self._host = torch.zeros(2, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        for number in STOP_SIGNALS:
            ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN  # by nohup
            if not ignored:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number, frame):
        # Ctrl-C comes twice at once, from the terminal and from torchrun; a second press comes later
        if number == signal.SIGINT and self.signal and time.monotonic() - self._since > 2:
            os.write(2, b"\nleaving at once, without a checkpoint\n")
            os._exit(130)
        if not self.signal:
            self.signal, self._since = number, time.monotonic()

    def count(self, norm: Tensor, scaler) -> None:
        """Counts updates skipped in a row, on the device. fp16 first tries smaller and smaller scales."""
        if not scaler.is_enabled() or scaler.get_scale() < 1:
            self.skipped = (self.skipped + 1) * (1 - norm.isfinite().float())

    def start(self) -> None:
        if self._torchrun not in (None, os.getppid()):  # it was killed; nobody would know that we live on
            self._on_signal(signal.SIGHUP, None)
        flag = torch.full((), float(self.signal), device=self.device)
        self._vote = torch.stack((flag, self.skipped))
        self._work = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, async_op=True)
        if self._copied:
            self._work.wait()  # orders the streams; the host goes on
            self._host.copy_(self._vote, non_blocking=True)
            self._copied.record()

    def read(self) -> int:
        """The signal some rank got before the last `start`, or 0. Raises RunError if training has failed."""
        if self._work is None:
            return 0
        if self._copied:
            self._copied.synchronize()
            number, skipped = self._host.tolist()
        else:
            self._work.wait()
            number, skipped = self._vote.tolist()
        self._work = None
        if skipped >= self.PATIENCE:
            raise RunError(f"the gradient was not finite {self.PATIENCE} times in a row, so the run stops: "
                           "lower --lr, or use --precision bf16 or fp32; the same command then goes on from "
                           "the newest checkpoint, or from the one before if you delete that.")
        return int(number)

    def close(self) -> None:
        """Ends what is under way; from here on signals do what they do to any Python program."""
        self.read()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


# -----------------------------------------------------------------------------------------------------------
# Checkpoints. One file holds the whole, unsharded state; rank 0 writes and reads it.

NAME = re.compile(r"step_(\d+)_loss.*\.pt")
# Groups of tensors in a checkpoint, each a dict by name: `outer` is DiLoCo's momentum, `local` what differs
# between ranks, as `3/optimizer/embed.weight/exp_avg`.
GROUPS = ("model", "ema", "optimizer", "outer", "local")
POWERSGD = ("error_dict", "p_memory_dict", "q_memory_dict")  # of torch's PowerSGDState: tensors by bucket
OPTIMIZER_STATE = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}
SCALARS = ("/step", "/mu_product")  # the others have the shape of their parameter


def optimizer_tensors(model: nn.Module, optimizers) -> dict[str, Tensor]:
    """The optimizer state that this process holds, by parameter name, such as `embed.weight/exp_avg`."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {f"{names[id(p)]}/{key}": value for optimizer in optimizers
            for p, state in shard_of(optimizer).state.items() for key, value in state.items()}


def whole_optimizer_tensors(model: nn.Module, optimizers, world: World):
    """Yields (name, whole tensor) of the optimizer state on all ranks, one at a time."""
    held = optimizer_tensors(model, optimizers)
    if all(shard_of(optimizer) is optimizer for optimizer in optimizers):
        yield from ((name, whole(tensor, world)) for name, tensor in held.items())
        return
    names = {id(p): name for name, p in model.named_parameters()}
    like = {f"{names[id(p)]}/{key}": p for optimizer in optimizers for group in optimizer.param_groups
            for p in group["params"] for key in sorted(OPTIMIZER_STATE[type(shard_of(optimizer)).__name__])}
    owners = torch.tensor([world.rank if name in held else -1 for name in like], device=world.device)
    dist.all_reduce(owners, op=dist.ReduceOp.MAX)
    for (name, p), owner in zip(like.items(), owners.tolist()):
        if owner >= 0:  # else no step has been made yet
            tensor = held.get(name)
            if tensor is None:
                tensor = p.new_empty(() if name.endswith(SCALARS) else p.shape)
            dist.broadcast(tensor, src=owner)
            yield name, tensor


def local_tensors(model: nn.Module, optimizers, outer, powersgd) -> dict[str, Tensor]:
    """The state that differs between ranks: the optimizer's with DiLoCo, what PowerSGD has not sent yet."""
    held = {}
    if outer:
        held |= {f"optimizer/{name}": t for name, t in optimizer_tensors(model, optimizers).items()}
    if powersgd:
        held |= {f"{kind}/{bucket}": t for kind in POWERSGD for bucket, t in getattr(powersgd, kind).items()}
    return held


def restore_local(saved: dict, world: World, model: nn.Module, optimizers, outer, powersgd, comm: str,
                  say) -> None:
    """Gives each rank its own state back, if as many ranks go on in the same way; says so if not."""
    layout, was = saved["layout"]["local"], saved["settings"]
    parted = outer and saved["step"] >= outer.start
    if layout and (was["world_size"] != world.world_size or was["comm"] != comm
                   or was["outer_every"] and not parted):
        say("what each process had for itself is of no use to this run: all begin with the optimizer state "
            "of the first, and what PowerSGD had not sent yet is lost")
        return
    held = local_tensors(model, optimizers, outer, powersgd)
    for name, (shape, dtype) in layout.items():
        name = name.partition("/")[2]
        kind, _, bucket = name.partition("/")
        if kind in POWERSGD and powersgd and int(bucket) not in getattr(powersgd, kind):
            held[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
            getattr(powersgd, kind)[int(bucket)] = held[name]
    for name, tensor in held.items():
        if f"0/{name}" in layout:
            parts = [saved["tensors"]["local"][f"{rank}/{name}"].to(world.device)
                     for rank in range(world.world_size)] if world.main else None
            dist.scatter(tensor, parts, src=0)


@torch.no_grad()
def restore(saved: dict, world: World, model: nn.Module, optimizers=(), ema=None, scaler=None, outer=None,
            averaged: bool = False) -> None:
    """Copies what rank 0 has read with load_checkpoint into the training state of all ranks.

    Tensors travel one at a time, so no other rank reads a file or holds a second copy. `averaged` puts the
    moving average, if the run has one, into the model. State of another kind of optimizer is left out.
    """
    layout, parameters = saved["layout"], dict(model.named_parameters())

    def receive(group: str, name: str, tensor: Tensor) -> None:
        copy_from_main(tensor, saved["tensors"][group][name] if world.main else None, world)

    for name, tensor in model.state_dict().items():
        receive("ema" if averaged and name in layout["ema"] else "model", name, tensor)
    for name, average in ema.average.items() if ema else ():
        if layout["ema"]:
            receive("ema", name, average)
        else:  # switched on at this resume: the average begins here
            average.copy_(parameters[name])
    for name, velocity in outer.velocity.items() if outer else ():
        if layout["outer"]:
            receive("outer", name, velocity)
    owners = {id(p): shard_of(o) for o in optimizers for group in o.param_groups for p in group["params"]}
    mine = {id(p) for o in optimizers for group in shard_of(o).param_groups for p in group["params"]}
    for name, (shape, dtype) in layout["optimizer"].items() if optimizers else ():
        parameter, key = name.rsplit("/", 1)
        p = parameters[parameter]
        if key in OPTIMIZER_STATE[type(owners[id(p)]).__name__]:
            dtype = getattr(torch, dtype)
            tensor = torch.empty_like(p, dtype=dtype) if shape else p.new_empty((), dtype=dtype)
            receive("optimizer", name, tensor)
            if id(p) in mine:
                owners[id(p)].state[p][key] = tensor
    if scaler is not None and scaler.is_enabled() and saved["scaler"]:
        scaler.load_state_dict(saved["scaler"])


class Damaged(Exception):
    """A checkpoint file that is not what was written."""


def read_checkpoint(path: Path) -> dict:
    """A checkpoint whose every byte has been checked. Raises Damaged.

    torch.load does not look at the checksums in the file, so zipfile does; and mmap makes torch read by the
    same directory of the file as zipfile. The bit sums then show that what was read is what was saved.
    """
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()
        if broken:
            raise Damaged(f"{broken} has a wrong checksum")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        sums = {f"{group}/{name}": int(bit_sum(tensor)) for group, tensors in saved["tensors"].items()
                for name, tensor in tensors.items()}
        if saved["format"] != 1 or sums != saved["sums"]:
            raise Damaged("its tensors are not those that were saved")
        if (name := NAME.fullmatch(path.name)) and int(name[1]) != saved["step"]:
            raise Damaged(f"it is that of step {saved['step']}")
        return saved
    except Damaged:
        raise
    except Exception as error:  # a damaged file makes zipfile, pickle and torch raise nearly anything
        raise Damaged(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None


def finished(run_directory: Path) -> list[Path]:
    """The finished checkpoints of a run, newest first."""
    found = [(int(match[1]), p) for p in Path(run_directory, "checkpoints").glob("step_*.pt")
             if (match := NAME.fullmatch(p.name))]
    return [p for _, p in sorted(found, reverse=True)]


def load_checkpoint(where: str | Path, world: World, say, set_aside: bool = False) -> dict | None:
    """A checkpoint file, or the newest of a run directory that is whole; None if that has no checkpoint.

    Rank 0 reads. Every rank gets step, samples and whatever else `save` was given, and `layout`, the shapes
    of all tensors; rank 0 also the tensors, for `restore`. Raises UserError on all ranks if none can be read.
    """
    saved = None

    def choose():
        nonlocal saved
        if not Path(where).exists():
            raise UserError(f"{where} does not exist: train first, or name another run directory or file.")
        candidates, damaged = finished(where) if Path(where).is_dir() else [Path(where)], []
        for path in candidates:
            try:
                saved = read_checkpoint(path)
                break
            except Damaged as error:
                say(f"WARNING: the checkpoint {path} is damaged and left out ({error})")
                damaged.append(path)
        if saved is None:
            if candidates:
                raise UserError(f"{candidates[0]} cannot be read, nor any older checkpoint there: restore "
                                "one from a copy, or start anew in another --out.")
            return None
        for bad in damaged:  # out of the way: else it would count as one of the newest to keep
            if set_aside:
                bad.rename(bad.with_suffix(".damaged"))
        layout = {group: {name: (tuple(t.shape), str(t.dtype).removeprefix("torch."))
                          for name, t in saved["tensors"].get(group, {}).items()} for group in GROUPS}
        return {k: v for k, v in saved.items() if k not in ("tensors", "sums")} | {
            "path": str(path), "layout": layout}

    # reading can take longer than a collective may
    answer = on_all(world, "reading", lambda: choose() if world.main else None)
    answer = on_main(world, lambda: answer)
    return answer and answer | {"tensors": saved and saved["tensors"]}


class Checkpoints:
    """Writes the checkpoints of a run, `step_00001000_loss2.3456_20261120_143022.pt`, and best.pt, a link.

    `save` copies the state and returns; a thread writes it to a temporary file, syncs it and renames it, so a
    file that has its name is whole. Only rank 0 writes; other ranks may call everything.
    """

    unwritten: queue.Queue | None = None  # the jobs of this process, for `run` to wait for

    def __init__(self, run_directory: Path, world: World, keep_last: int, say, saved_step: int | None = None,
                 best: float = math.inf):
        self.run_directory, self.directory = Path(run_directory), Path(run_directory, "checkpoints")
        self.world, self.keep_last, self.say = world, keep_last, say
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._jobs: queue.Queue = queue.Queue()
        Checkpoints.unwritten = self._jobs
        self._best, self._thread = best, None  # best: the validation loss of what best.pt is a link to
        self.saved_step = saved_step  # the newest step that is, or will be, in a checkpoint

    def save(self, step: int, loss: float, meta: dict, model: nn.Module, optimizers, ema=None, scaler=None,
             outer=None, powersgd=None) -> None:
        """Copies the state and has it written. `meta` is plain data (numbers, strings, lists, dicts).

        All ranks send what they alone hold, one tensor at a time.
        """
        self.saved_step = step
        pause = 0.001
        while reduce_sum([self._jobs.unfinished_tasks], self.world)[0]:  # until then the buffers are in use;
            time.sleep(pause)  # that may take longer than a collective, and torchrun's store may be gone
            pause = min(2 * pause, 0.5)
        copies: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}

        def keep(group: str, name: str, tensor: Tensor) -> None:
            if self.world.main:
                copies[group][name] = self._copy(group, name, tensor)

        replicated = {"model": model.state_dict(), "ema": ema.average if ema else {},
                      "outer": outer.velocity if outer else {}}
        for group, named in replicated.items():
            for name, tensor in named.items():
                keep(group, name, whole(tensor, self.world))
        for name, tensor in whole_optimizer_tensors(model, optimizers, self.world):
            keep("optimizer", name, tensor)
        outer = outer if outer and outer.parted else None
        for name, tensor in local_tensors(model, optimizers, outer, powersgd).items():
            parts = [torch.empty_like(tensor) for _ in range(self.world.world_size * self.world.main)]
            dist.gather(tensor, parts or None, dst=0)
            for rank, part in enumerate(parts):
                keep("local", f"{rank}/{name}", part)
        reduce_sum([0], self.world)  # raises if one of these collectives has failed, which NCCL tells late
        if not self.world.main:
            return
        self.world.synchronize()  # copies to pinned memory may still be under way
        state = {"format": 1, "step": step, "loss": loss, "torch": str(torch.__version__),
                 "scaler": scaler.state_dict() if scaler is not None and scaler.is_enabled() else {}, **meta}
        state = json.loads(json.dumps(state))  # plain types only: weights_only=True reads no others
        name = f"step_{step:08d}_loss{loss:.4f}_{time.strftime('%Y%m%d_%H%M%S')}.pt"
        self._submit(self._write, name, state, copies)

    def _copy(self, group: str, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get((group, name))
        if buffer is None or buffer.shape != tensor.shape:
            on_cuda = self.world.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
            self._buffers[group, name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def mark_best(self, loss: float) -> None:
        """Makes best.pt a link to the newest checkpoint, once that is written, if no other was better."""
        if self.world.main:
            self._submit(self._link_best, "best.pt", self.saved_step, loss)

    def close(self) -> None:
        """Waits until everything is written. Raises RunError if the last checkpoint was not."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        if self.world.main and self.saved_step is not None and self._newest_step() != self.saved_step:
            raise RunError(f"the checkpoint of step {self.saved_step} could not be written, see above: the "
                           "same command goes on from the one before.")

    def _newest_step(self) -> int | None:
        newest = next(iter(finished(self.run_directory)), None)
        return newest and int(NAME.fullmatch(newest.name)[1])

    def _submit(self, *job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job[0](*job[1:])
            except Exception as error:  # above all a full disk, for which torch.save raises RuntimeError
                reason = str(error).partition("\n")[0]
                self.say(f"WARNING: {job[1]} was not written: {reason}; training goes on, and tries again at "
                         "the next save")
            finally:
                self._jobs.task_done()

    def _write(self, name: str, state: dict, copies: dict) -> None:
        totals = {key: t.sum(dtype=torch.float32) for key, t in copies["model"].items()}
        bad = next((key for key, total in totals.items() if not total.isfinite()), None)  # inf and NaN add up
        if bad:
            raise RuntimeError(f"{bad} is not finite")
        temporary = self.directory / f".tmp-{name}"
        sums = {f"{group}/{key}": int(bit_sum(t)) for group, named in copies.items()
                for key, t in named.items()}
        try:
            with open(temporary, "wb") as file:
                torch.save({**state, "tensors": copies, "sums": sums}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.directory / name)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(self.directory)
        for old in finished(self.run_directory)[self.keep_last:]:
            old.unlink()

    def _link_best(self, name: str, step: int, loss: float) -> None:
        if not loss < self._best or self._newest_step() != step:
            return  # or that save has failed, and said so
        newest, temporary = finished(self.run_directory)[0], self.directory / f".tmp-{name}"
        temporary.unlink(missing_ok=True)
        try:
            os.link(newest, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(newest, temporary)
        os.replace(temporary, self.directory / name)
        fsync_directory(self.directory)
        self._best = loss


def claim(run_directory: Path, world: World) -> contextlib.ExitStack:
    """Makes a run directory and locks it until the result is closed or rank 0 ends, however it ends.

    Raises UserError on all ranks.
    """
    held = contextlib.ExitStack()

    def lock():
        try:
            (run_directory / "checkpoints").mkdir(parents=True, exist_ok=True)
            path = run_directory / ".lock"  # never a link, for its content gets replaced
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            file = held.enter_context(open(descriptor, "r+"))
        except OSError as error:
            raise UserError(f"{run_directory} cannot be written ({error.strerror}): choose another --out.")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"{run_directory} is in use by {file.read()}: wait for it, or choose another "
                            "--out.")
        except OSError:
            pass  # a file system without locks
        with contextlib.suppress(OSError):  # on a full disk the lock holds without its owner's name
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {os.uname().nodename} since "
                                    f"{time.strftime('%F %T')}".encode())
        for leftover in (run_directory / "checkpoints").glob(".tmp-*"):
            leftover.unlink()

    on_main(world, lock)
    return held


def load_to_resume(run_directory: Path, resume: str, world: World, say) -> dict | None:
    """The checkpoint that --resume means, None to start anew. Raises UserError on all ranks."""
    newest = on_main(world, lambda: next((str(path) for path in finished(run_directory)), None))
    if resume == "none":
        if newest:
            raise UserError(f"{run_directory} holds checkpoints ({Path(newest).name}), which a new run would "
                            "mix with its own: choose another --out, or delete it.")
        return None
    saved = load_checkpoint(run_directory if resume == "auto" else resume, world, say, resume == "auto")
    if resume != "auto" and saved is None:
        raise UserError(f"{resume} holds no checkpoint: name a run directory that has one, or its file.")
    if resume != "auto" and newest and int(NAME.fullmatch(Path(newest).name)[1]) > saved["step"]:
        raise UserError(f"{run_directory} has a later checkpoint ({Path(newest).name}) than {resume}: give "
                        "another --out to branch off there, or delete the later ones.")
    return saved

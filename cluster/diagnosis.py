"""Explains unforeseen errors, and refuses processes that were started without knowing of each other."""

import os
import re
import sys
import traceback

import torch
import torch.distributed as dist

from cli.errors import UserError, first_line, from_launcher
from cluster.heartbeat import SAME_COLLECTIVES, line_of

# Programs that start several processes, by the variable with the number of processes
STARTERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec",
            "MV2_COMM_WORLD_SIZE": "mpirun_rsh", "PALS_LOCAL_SIZE": "mpiexec", "JSM_NAMESPACE_SIZE": "jsrun",
            "FLUX_JOB_SIZE": "flux run"}


def diagnose(error: BaseException, heartbeat, show_traceback) -> tuple[int, str, str] | None:
    """Returns what ddp_utils.ending_of returns if the cause of an unforeseen error is known, else None. Shows
    the traceback, too, if the cause is a guess.
    """
    code = 1
    # whether a lost or late process may have caused it
    from_backend = isinstance(error, RuntimeError) and re.search("gloo|pair closure|NCCL", str(error))
    if (asked := memory_asked_for(error)) is not None:
        reason = (f"out of memory{asked}: the same command with --dry-run says what fits, "
                  "for example a smaller --batch or --checkpoint-activations block.")
    elif lacks_compiler(error):
        code = 2
        reason = ("blocks are compiled, which needs a compiler and Python's headers: "
                  "sudo apt install g++ python3-dev, or give --no-compile.")
    elif not heartbeat or not (from_backend or isinstance(error, dist.DistError)):
        return None
    else:
        heartbeat.line = line_of(reversed([*traceback.walk_tb(error.__traceback__)]))
        if cause := heartbeat.find_cause():
            return code, f"error: {cause}", ""
        show_traceback(error)
        reason = (f"all processes are alive ({heartbeat.places}): {SAME_COLLECTIVES} The error: "
                  f"{first_line(error)}")
    return code, f"error: {reason}", reason


def lacks_compiler(error: BaseException) -> bool:
    """Whether Inductor or Triton found no compiler, or the compiler found no Python.h."""
    return bool(re.search(r"InvalidCxxCompiler|Failed to find C compiler|Python\.h: No such|"
                          r"Command '\['[^']*(gcc|clang|cc)'", str(error)))


def memory_asked_for(error: BaseException) -> str | None:
    """The size of a failed allocation, "" if the error doesn't give it. None for other errors."""
    text = str(error)
    lacked = "out of memory" in text.lower() or "DefaultCPUAllocator" in text
    if not lacked and not isinstance(error, MemoryError | torch.OutOfMemoryError):
        return None
    if match := re.search(r"allocate (\d+) bytes", text):  # on a CPU
        return f" (asked for {int(match[1]) / 2**30:.2f} GiB more)"
    match = re.search(r"allocate ([\d.]+ [KMGT]iB)", text)
    return f" (asked for {match[1]} more)" if match else ""


def refuse_lone_tasks():
    """Raises UserError in a process that was started beside others without torchrun's variables."""
    for name, starter in STARTERS.items():
        tasks = from_launcher(name)
        if "RANK" not in os.environ and tasks > 1:
            raise UserError(
                f"{starter} has started {tasks} processes ({name}), and each would train alone: start "
                "them with torchrun instead. On one machine: "
                f"`torchrun --nproc_per_node={tasks} {sys.argv[0]} …`. On several: "
                f"`sbatch cluster/slurm.sbatch {sys.argv[0]} …`, or on each "
                "cluster/ddp_launch.sh.")


CARD = "the network card that leads to the other nodes (`ip -4 addr`), and open the firewall between them"
# What to do if the first collective of a backend fails
WHEN_CUT_OFF = {
    "alone": "turn its network interface on (`sudo ip link set lo up`), and unset GLOO_SOCKET_IFNAME if "
             "it's set.",
    "gloo": f"set GLOO_SOCKET_IFNAME on each node to {CARD}.",
    "nccl": "NCCL_DEBUG=INFO says more. Give each process its own GPU, set NCCL_SOCKET_IFNAME on each "
            f"node to {CARD}. Or use --backend gloo with --strategy ddp or zero1: it's slower, but doesn't "
            "need NCCL."}

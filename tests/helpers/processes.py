"""Processes that start at once. Starting Python and torch takes seconds, so a server imports them once and
forks a process for each run, which executes the script as `python train_gpt2.py …` would. What these
processes do is real: they are killed by real signals, and their locks, files and sockets are the script's.
"""

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from multiprocessing import forkserver
from pathlib import Path

import pytest
from conftest import ROOT, Finished, at_end

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "processes", "torch", "torch._dynamo", "torch.utils.tensorboard", "torch.utils.flop_counter", "numpy.ma",
    "ddp_utils", "monitor", "tokenizers", "safetensors.torch", "tiktoken"])


def start_server() -> None:
    """Starts the process that forks the others, in the directory whose modules it is to import."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "helpers")))
    with contextlib.chdir(ROOT), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # of a run in this process
        forkserver.ensure_running()


def _import_from(directory: str) -> None:
    """Forgets the program's modules, which the server has imported, for those of a copy in a directory."""
    for name, module in [*sys.modules.items()]:
        folder = Path(getattr(module, "__file__", None) or "/").parent
        if folder == ROOT or folder.parent == ROOT and (folder / "__init__.py").is_file():
            del sys.modules[name]
    sys.path[:] = [directory, *(path for path in sys.path if path != str(ROOT))]


def _run(script: str, arguments: list[str], output: str, cwd: str | None, env: dict, fault) -> None:
    """The child: becomes what the command line would have made of it."""
    os.setsid()
    gc.freeze()  # what the server has imported: to go through that at each collection takes half of the time
    gc.freeze = gc.unfreeze = lambda: None  # at the end of the run, too
    os.environ.update(env)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.argv = [script, *arguments]
    if cwd:
        os.chdir(cwd)
    sys.modules["matplotlib.figure"] = None  # drawing would take half of the time
    if fault:
        fault()
    if "FAST_CLOCK" in env:
        began, real = time.time(), time.time
        time.time = lambda: began + 1e6 * (real() - began)
    import torch
    torch.set_num_threads(1)
    if (ROOT / script).parent != ROOT and (ROOT / script).with_name("ddp_utils.py").exists():
        _import_from(str((ROOT / script).parent))
    import cli.errors
    import ddp_utils
    ddp_utils.owns_python = cli.errors.owns_python = lambda *_: True  # though forkserver and runpy run it
    runpy.run_path(str(ROOT / script), run_name="__main__")


class KillAtOperation:
    """Kills this process with SIGKILL `delay` seconds after its n-th operation on a file below a directory.

    What is counted is opening, renaming, linking and removing. Half of these belong to saving a checkpoint,
    so short delays hit the writing, the moment before the rename and the moments after it.
    """

    def __init__(self, directory: Path, number: int, delay: float):
        self.directory, self.left, self.delay = str(directory), number, delay

    def __call__(self):
        sys.addaudithook(self._count)

    def _count(self, event, arguments):
        files = event in ("open", "os.rename", "os.link", "os.remove")
        if files and str(arguments[0]).startswith(self.directory):
            self.left -= 1
            if self.left == 0:
                threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self):
        time.sleep(self.delay)
        os.kill(os.getpid(), signal.SIGKILL)


class Group:
    """One run on `ranks` processes (0: one, without the variables of torchrun), forked from the server."""

    def __init__(self, script, *arguments, ranks: int = 0, cwd=None, fault=None, fault_rank: int = 0,
                 **env):
        self.output = tempfile.NamedTemporaryFile("r", prefix="faults-")
        self.mark = uuid.uuid4().hex
        # also what the test has set since the server started
        common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                  "FAULTS_MARK": self.mark} | env
        if ranks:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            common |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": port}
        start_server()
        self.processes = []
        at_end.append(self.kill)
        for rank in range(ranks or 1):
            env = common | ({"RANK": rank, "LOCAL_RANK": rank} if ranks else {})
            env = {k: str(v) for k, v in env.items()}
            process = CONTEXT.Process(target=_run, args=(
                str(script), [str(a) for a in arguments], self.output.name, cwd and str(cwd), env,
                fault if rank == fault_rank else None))
            process.start()
            self.processes.append(process)

    @property
    def all_alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    @property
    def codes(self) -> list[int | None]:
        return [p.exitcode for p in self.processes]

    @property
    def text(self) -> str:
        return Path(self.output.name).read_text(errors="replace")

    def send(self, number: int, rank: int = 0) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, number)

    def kill(self) -> bool:
        """Ends all with SIGKILL; whether one of them was still alive."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        return -signal.SIGKILL in self.codes

    def finish(self, timeout: float = 100) -> Finished:
        """Waits for the end of all. The code is the first that is not 0; a signal has a negative one."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        if None in self.codes:
            self.kill()
            pytest.fail(f"still running after {timeout} s:\n{self.text}")
        return Finished(next((p.exitcode for p in self.processes if p.exitcode), 0), self.text)


def fork(ranks: int, script: str, *arguments, timeout: float = 240, **env) -> Finished:
    """What conftest.run does, in a Group."""
    return Group(script, *arguments, ranks=ranks, **env).finish(timeout)


def marked(mark: str) -> list[int]:
    """The processes that a Group, or a command started with FAULTS_MARK, has left behind."""
    found = []
    for task in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"FAULTS_MARK={mark}".encode() in (task / "environ").read_bytes():
                found.append(int(task.name))
    return found

"""PCs on a gigabit switch, as network namespaces of this machine: for tests/whole_runs and bench/lab.py.

    with Lab(5) as lab:
        processes = lab.by_hand(5, "train_gpt2.py", "--steps", 20)
        lab.plug(3, False)
        done = [lab.wait(process, 60) for process in processes]

Node i has the address 192.168.50.(20+i) on its eth0 and a directory of its own, in which its commands run. A
namespace more holds the switch, so nothing of the machine's own network is touched, and labs that run at the
same time do not see each other. Needs root and iproute2, else Unavailable says what is missing.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MASTER, PORT = "192.168.50.20", 29500


class Unavailable(Exception):
    """This machine cannot have a lab."""


def ip(*arguments, program: str = "ip") -> str:
    """What an ip command prints. Raises Unavailable with what it says if it fails."""
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Lab:
    """`count` nodes joined by a switch. `rate`, in tc's words, limits what each sends and receives."""

    serial = itertools.count()

    def __init__(self, count: int = 5, rate: str | None = "1gbit"):
        self.count, self.rate = count, rate
        name = f"lab-{os.getpid()}-{next(Lab.serial)}"
        self.switch, self.nodes = f"{name}-switch", [f"{name}-{i}" for i in range(count)]
        self.processes: list[subprocess.Popen] = []

    def __enter__(self):
        if os.geteuid() != 0:
            raise Unavailable("network namespaces need root")
        if missing := [program for program in ("ip", "tc") if not shutil.which(program)]:
            raise Unavailable(f"{' and '.join(missing)} of iproute2 missing")
        self.directory = Path(tempfile.mkdtemp(prefix="lab-"))
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
            ip("-n", self.switch, "link", "set", "switch", "up")
            for i, node in enumerate(self.nodes):
                ip("netns", "add", node)
                ip("link", "add", "eth0", "netns", node, "type", "veth", "peer", "name", f"port{i}", "netns",
                   self.switch)
                ip("-n", self.switch, "link", "set", f"port{i}", "up", "master", "switch")
                ip("-n", node, "address", "add", f"192.168.50.{20 + i}/24", "dev", "eth0")
                ip("-n", node, "link", "set", "eth0", "up")
                ip("-n", node, "link", "set", "lo", "up")
                for space, device in [(node, "eth0"), (self.switch, f"port{i}")] if self.rate else []:
                    ip("-n", space, "qdisc", "replace", "dev", device, "root", "tbf", "rate", self.rate,
                       "burst", "256kb", "latency", "50ms", program="tc")
                self.home(i).mkdir()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for namespace in (*self.nodes, self.switch):
            if Path("/run/netns", namespace).exists():
                kill_all(namespace)
                ip("netns", "delete", namespace)
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def home(self, node: int) -> Path:
        """The directory in which the commands of a node run."""
        return self.directory / f"node{node}"

    def start(self, node: int, command, **env) -> subprocess.Popen:
        """Starts a command on a node; `text` of the result is the file with all that it prints."""
        text = self.directory / f"output-{len(self.processes)}"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                                    "GLOO_SOCKET_IFNAME": "eth0"} | env
        with open(text, "w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.nodes[node], *map(str, command)], cwd=self.home(node),
                env={k: str(v) for k, v in environment.items()}, start_new_session=True, stdout=file,
                stderr=subprocess.STDOUT)
        process.text = text
        self.processes.append(process)
        return process

    def by_hand(self, count: int, script, *arguments, **env) -> list[subprocess.Popen]:
        """Starts a script once on each of the first nodes without torchrun, which is faster."""
        return [self.start(node, [sys.executable, ROOT / script, *arguments], **{
            "RANK": node, "WORLD_SIZE": count, "MASTER_ADDR": MASTER, "MASTER_PORT": PORT,
            "GROUP_RANK": node, "GROUP_WORLD_SIZE": count} | env) for node in range(count)]

    def wait(self, process: subprocess.Popen, timeout: float) -> tuple[int, str]:
        """Exit code and text of a process; after `timeout` seconds TimeoutError with all that was printed."""
        try:
            return process.wait(timeout), process.text.read_text()
        except subprocess.TimeoutExpired:
            everything = "\n".join(each.text.read_text() for each in self.processes)
            raise TimeoutError(everything) from None

    def kill(self, node: int) -> None:
        """Kills all processes of a node. The kernel closes their connections; pull the plug first if not."""
        kill_all(self.nodes[node])

    def plug(self, node: int, in_: bool) -> None:
        """Plugs the cable of a node into the switch, or pulls it out."""
        ip("-n", self.switch, "link", "set", f"port{node}", "up" if in_ else "down")


def kill_all(namespace: str) -> None:
    """SIGKILL to every process in a namespace, whatever session it is in, until there is none."""
    deadline = time.monotonic() + 10
    while pids := ip("netns", "pids", namespace).split():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of {namespace} survive SIGKILL: {pids}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)

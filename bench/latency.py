"""A training step on nodes that are far apart: five network namespaces whose frames take --delay to arrive.

Needs root and /dev/net/tun, but no netem, which some kernels lack: the nodes have TAP devices, and this
process hands each frame on when its time has come. Links have no other limit, so a step of a small model
takes as long as the messages that it waits for, one after another. Two checkouts can be compared:

    python bench/latency.py . ../before -- train_gpt2.py --data text:book.txt --tokenizer bytes --steps 31 \\
        --global-batch 20 --batch 2 --seq-len 32 --d-model 32 --n-head 2 --n-layer 2 --log-every 10
"""

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

NODES, MASTER = 5, "192.168.50.20"
CLONE_NEWNET, TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0002, 0x1000
libc = ctypes.CDLL(None, use_errno=True)


def ip(*arguments) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True)


def open_tap(namespace: str, taps: list[int]) -> None:
    """Makes eth0 of a namespace. To be run in a thread of its own, because it stays in the namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    taps.append(tap)


def make_nodes(namespaces: list[str]) -> list[int]:
    taps: list[int] = []
    for i, namespace in enumerate(namespaces):
        ip("netns", "add", namespace)
        thread = threading.Thread(target=open_tap, args=(namespace, taps))
        thread.start()
        thread.join()
        ip("-n", namespace, "link", "set", "eth0", "mtu", 9000, "address", f"02:00:00:00:00:{i:02x}")
        ip("-n", namespace, "address", "add", f"192.168.50.{20 + i}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
    return taps


def forward(taps: list[int], delay: float, stop: threading.Event) -> None:
    """Hands on each frame `delay` seconds after it came, to the node of its address or to all."""
    waiting, number = [], 0
    while not stop.is_set():
        until = max(0, waiting[0][0] - time.monotonic()) if waiting else 0.2
        for tap in select.select(taps, [], [], until)[0]:
            frame, number = os.read(tap, 65536), number + 1
            heapq.heappush(waiting, (time.monotonic() + delay, number, taps.index(tap), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, source, frame = heapq.heappop(waiting)
            to_one = frame[:5] == b"\x02\0\0\0\0"
            for node in [frame[5]] if to_one else {*range(NODES)} - {source}:
                os.write(taps[node], frame)


def step_seconds(checkout: Path, command: list[str], namespaces: list[str], root: Path) -> list[float]:
    """Seconds of a step between the logged ones, without the first, of a run on all nodes."""
    script, *flags = command
    processes = []
    for rank, namespace in enumerate(namespaces):
        home = root / f"node{rank}"
        home.mkdir(parents=True)
        env = os.environ | {"RANK": rank, "WORLD_SIZE": NODES, "MASTER_ADDR": MASTER, "MASTER_PORT": 29500,
                            "GROUP_RANK": rank, "GROUP_WORLD_SIZE": NODES, "OMP_NUM_THREADS": 1,
                            "GLOO_SOCKET_IFNAME": "eth0"}
        processes.append(subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, checkout / script, *flags, "--out", "run"],
            cwd=home, env={key: str(value) for key, value in env.items()}, stdout=open(home / "log", "w"),
            stderr=subprocess.STDOUT))
    if any([process.wait() for process in processes]):
        raise SystemExit((root / "node0/log").read_text())
    lines = (root / "node0/run/metrics.jsonl").read_text().splitlines()
    times = [(r["step"], r["time"]) for r in map(json.loads, lines) if "loss" in r][1:]
    return [(b - a) / (to - step) for (step, a), (to, b) in zip(times, times[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds from one node to another (0.05)")
    middle = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, command = parser.parse_args(sys.argv[1:middle]), sys.argv[middle + 1:]
    if not command:
        parser.error("name a trainer and its flags after --")
    namespaces = [f"far-{os.getpid()}-{i}" for i in range(NODES)]
    stop = threading.Event()
    try:
        taps = make_nodes(namespaces)
        threading.Thread(target=forward, args=(taps, args.delay, stop), daemon=True).start()
        for _ in range(2):
            for checkout in args.checkouts:
                with tempfile.TemporaryDirectory() as root:
                    found = step_seconds(checkout.resolve(), command, namespaces, Path(root))
                print(f"{checkout}: " + " ".join(f"{1000 * s:.0f}" for s in found) + " ms a step", flush=True)
    finally:
        stop.set()
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False)


if __name__ == "__main__":
    main()

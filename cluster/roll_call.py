"""Gathers all nodes before torchrun starts, to name a problem in one sentence, not after ten silent minutes.

    python3 roll_call.py ADDR PORT NNODES NODE_RANK GPUS_PER_NODE SECONDS

Node 0 listens at ADDR:PORT until every NODE_RANK has connected once. The other nodes connect to it.
torchrun's own rendezvous doesn't notice a missing or repeated node: it times out and names nobody.

Prints the network interface that leads to the other nodes, for gloo and NCCL. They guess wrong if /etc/hosts
gives this machine the address 127.0.1.1. If something is wrong, prints one sentence and exits with code 1, or
with 2 if trying again cannot help. Ends within SECONDS on node 0, and within about twice that elsewhere.
Needs only Python. ddp_utils.py uses it too, for torchrun without the launcher.
"""

import contextlib
import errno
import fcntl
import json
import os
import select
import socket
import struct
import sys
import time


class Problem(Exception):
    """One sentence that says what is wrong and how to fix it."""


def say(text: str) -> None:
    print(f"ddp_launch.sh: {text}", file=sys.stderr, flush=True)


def is_ours(address: str) -> bool:
    """Whether this machine has this IPv4 address."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(address: str) -> str:
    """This machine's IPv4 address for packets to another address or name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError as error:
            raise Problem(f"this machine cannot reach MASTER_ADDR {address} ({error.strerror}): give it an "
                          "address in the same network, see `ip addr`.") from None
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The interface with this IPv4 address, '' if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def keep_alive(connection: socket.socket) -> None:
    """Makes a connection fail within 20 s if the other machine dies without closing it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    for option, value in options.items():
        if hasattr(socket, option):  # macOS calls the first one like the second
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def call_roll(name: str, address: str, port: int, nodes: int, gpus: int, seconds: float) -> None:
    """On node 0: waits until every NODE_RANK has connected, then sends all nodes "go" or the problem. `name`
    is MASTER_ADDR as given.
    """
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        way_out = (f"end what listens there (`ss -ltnp | grep {port}`), maybe an earlier run, or choose "
                   "another one on all nodes" if error.errno == errno.EADDRINUSE else "choose another one")
        raise Problem(f"MASTER_PORT {port} cannot be used on node 0 ({os.strerror(error.errno)}): "
                      f"{way_out}.") from None
    here = {0: (socket.gethostname(), gpus, None)}  # rank: host, GPUs, connection
    deadline = time.monotonic() + seconds

    def receive() -> None:
        connection, peer = server.accept()
        try:
            connection.settimeout(5)
            hello = json.loads(connection.makefile().readline(1000))
            rank, host = hello["node_rank"], f"{hello['host']} ({peer[0]})"
        except (OSError, ValueError, KeyError, TypeError):  # not one of our nodes
            return connection.close()
        if rank in here:
            bad = f"NODE_RANK={rank} was given to both {here[rank][0]} and {host}: give each node its own."
        elif hello["nodes"] != nodes:
            bad = f"NNODES is {nodes} on node 0 and {hello['nodes']} on node {rank}, {host}: make them equal."
        elif address.startswith("127.") and not peer[0].startswith("127."):
            bad = (f"MASTER_ADDR is {name} on node 0, which only that machine itself can reach, not node "
                   f"{rank}, {host}: set it to the address of node 0's network card there, too, see "
                   "`ip -4 addr`.")
        else:
            keep_alive(connection)
            here[rank] = (host, hello["gpus"], connection)
            return say(f"node {rank} has come: {host}; {len(here)} of {nodes} are here")
        here[f"refused {rank}"] = (host, 0, connection)
        raise Problem(bad)

    def connections() -> dict:
        return {connection: rank for rank, (*_, connection) in here.items() if connection}

    try:
        say(f"node 0 waits at port {port} for {nodes - 1} others")
        while len(here) < nodes:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [f"node {rank}" for rank in range(nodes) if rank not in here]
                raise Problem(f"{', '.join(missing)} {'have' if len(missing) > 1 else 'has'} not come within "
                              f"{seconds:g} s: start ddp_launch.sh there, too, with node 0's MASTER_ADDR "
                              "and MASTER_PORT, and check the firewall.")
            readable = select.select([server, *connections()], [], [], left)[0]
            for connection in readable:
                if connection is not server:  # nodes send nothing more, so this one has gone
                    rank = connections()[connection]
                    say(f"node {rank} has gone again: {here.pop(rank)[0]}")
                    connection.close()
            if server in readable:
                receive()
        verdict = {"go": True}
    except Problem as problem:
        verdict = {"wrong": str(problem)}
        raise
    finally:
        for connection in connections():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(verdict).encode() + b"\n")
        for connection in connections():
            with contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.recv(1)  # the other end closes first, which frees the port for torchrun
            connection.close()
        server.close()
    say("; ".join(f"node {rank} {here[rank][0]}: {here[rank][1]} processes" for rank in range(nodes)))


def answer(address: str, port: int, hello: dict, seconds: float) -> None:
    """On other nodes: connects to node 0, retries until it listens, and waits for its answer."""
    deadline, why = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), timeout=min(5, seconds)) as connection:
                keep_alive(connection)
                connection.sendall(json.dumps(hello).encode() + b"\n")
                connection.settimeout(seconds + 10)
                verdict = json.loads(connection.makefile().readline(10_000))
            if verdict.get("go"):
                return
            raise Problem(verdict["wrong"])
        except (ValueError, KeyError, AttributeError):
            why = "something else answers at that port"
        except OSError as error:
            why = str(error.strerror or error)
        time.sleep(0.5)
    own = "; it is this machine's own address" if is_ours(address) else ""
    raise Problem(f"node 0 at {address}:{port} did not answer within {seconds:g} s ({why}{own}): check "
                  "MASTER_ADDR, MASTER_PORT and the firewall, and whether node 0 is still running.")


def main() -> None:
    name, port, nodes, rank, gpus, seconds = sys.argv[1], *map(int, sys.argv[2:7])
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise Problem(f"MASTER_ADDR {name} is not known here ({error.strerror}): give the IPv4 address of "
                      "node 0.") from None
    if nodes > 1 and address == "0.0.0.0":
        say(f"MASTER_ADDR {name} leads to no machine: give the address of node 0's network card "
            "(`ip -4 addr` there), the same on all nodes.")
        sys.exit(2)  # trying again cannot help
    if rank == 0 and not is_ours(address):
        raise Problem(f"MASTER_ADDR {address} is not an address of this machine, but NODE_RANK=0 makes it "
                      "node 0: correct one of them, see `ip -4 addr`.")
    interface = interface_of(address_towards(address))
    if nodes > 1 and address.startswith("127.") and name not in (address, "localhost"):
        raise Problem(f"MASTER_ADDR {name} is {address} on this machine, which no other can reach: give the "
                      "address of its network card, see `ip -4 addr`.")
    if rank == 0:
        call_roll(name, address, port, nodes, gpus, seconds)
    else:
        hello = {"node_rank": rank, "nodes": nodes, "gpus": gpus, "host": socket.gethostname()}
        answer(address, port, hello, seconds)
    print(interface)


if __name__ == "__main__":
    try:
        main()
    except Problem as problem:
        say(problem)
        sys.exit(1)

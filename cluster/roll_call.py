"""Gathers all nodes before torchrun starts, to name a problem in one sentence, not after ten silent minutes.

    python3 roll_call.py ADDR PORT NNODES NODE_RANK GPUS_PER_NODE SECONDS TRAINED TRAINING

Node 0 listens at ADDR:PORT until every NODE_RANK has connected once. The other nodes connect to it.
torchrun's own rendezvous doesn't notice a missing or repeated node: it times out and names nobody. With a
range such as NNODES=2:5, node 0 starts with those that are here, see call_roll.

TRAINED is "yes" if this launcher has trained before. TRAINING is empty, or on node 0 the LAUNCHER_DIR of the
run that is under way.

Prints this node's rank and the number of nodes in this start. Then "self" if this node is new, while others
have trained before, "others" if another node is, or "nobody". Last the network interface that leads to the
other nodes, for gloo and NCCL. They guess wrong if /etc/hosts gives this machine the address 127.0.1.1.

If something is wrong, prints one sentence and exits with code 1, or with 2 if trying again cannot help. Ends
within SECONDS on node 0, and within about twice that elsewhere. Needs only Python. ddp_utils.py uses it too,
for torchrun without the launcher.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import select
import socket
import struct
import sys
import time
from pathlib import Path


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
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3,
               "TCP_USER_TIMEOUT": 20_000}
    for option, value in options.items():
        if hasattr(socket, option):  # macOS calls the first one like the second
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def send(connections, message: dict) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # it has gone, which reading it will show
            connection.sendall(json.dumps(message).encode() + b"\n")


def call_roll(name: str, address: str, port: int, own: dict, seconds: float, training: str = "") -> dict:
    """On node 0: waits until every NODE_RANK has connected, then sends all nodes "go" or the problem. `name`
    is MASTER_ADDR as given, `own` is node 0's hello.

    Of a range of nodes, enough have to be here, and none may have come for MEET_SECONDS. If `training` is the
    LAUNCHER_DIR of a run, it waits for the end of the run first, and makes the trainer stop for those that
    have come, ADMIT_SECONDS after the start. Returns what it has sent: "go" lists the NODE_RANK of those that
    start, "new" those of them that haven't trained yet, if others have.
    """
    fewest, most = (int(number) for number in (own["nodes"].split(":") * 2)[:2])
    varies = fewest < most
    quiet, admit = (float(os.environ.get(f"{which}_SECONDS") or 0) for which in ("MEET", "ADMIT"))
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        way_out = (f"end what listens there (`ss -ltnp | grep {port}`), maybe an earlier run, or choose "
                   "another one on all nodes" if error.errno == errno.EADDRINUSE else "choose another one")
        raise Problem(f"MASTER_PORT {port} cannot be used on node 0 ({os.strerror(error.errno)}): "
                      f"{way_out}.") from None
    here = {0: own}
    connections = {}  # to NODE_RANK
    began = came = next_word = time.monotonic()
    verdict = {"wrong": "node 0 has ended."}

    def receive() -> None:
        nonlocal came
        connection, peer = server.accept()
        try:
            connection.settimeout(5)
            hello = json.loads(connection.makefile().readline(1000))
            rank, gpus, host = int(hello["node_rank"]), hello["gpus"], f"{hello['host']} ({peer[0]})"
        except (OSError, ValueError, KeyError, TypeError):  # not one of our nodes
            return connection.close()
        repeated = rank in here
        if repeated:
            bad = (f"NODE_RANK={rank} was given to both {here[rank]['host']} and {host}: give each node its "
                   "own.")
        elif hello.get("nodes") != own["nodes"]:
            bad = (f"NNODES is {own['nodes']} on node 0 and {hello.get('nodes')} on node {rank}, {host}: "
                   "make them equal.")
        elif varies and gpus != own["gpus"]:
            bad = (f"GPUS_PER_NODE is {own['gpus']} on node 0 and {gpus} on node {rank}, {host}: a range of "
                   "nodes needs the same on all.")
        elif address.startswith("127.") and not peer[0].startswith("127."):
            bad = (f"MASTER_ADDR is {name} on node 0, which only that machine itself can reach, not node "
                   f"{rank}, {host}: set it to the address of node 0's network card there, too, see "
                   "`ip -4 addr`.")
        else:
            keep_alive(connection)
            connections[connection] = rank
            here[rank] = hello | {"host": host}
            came = time.monotonic()
            say(f"node {rank} has come: {host}; {len(here)} of {own['nodes']} are here")
            if training:
                left = max(0, began + admit - came)
                clock = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
                send([connection], {"say": f"node 0 is training: you join at {clock}, or earlier if the run "
                                              "stops"})
            return
        if not varies:
            connections[connection] = rank
            raise Problem(bad)
        with connection:  # a cut cable: a node may come again before node 0 has missed it
            send([connection], {"say" if repeated else "wrong": bad})

    try:
        say(f"node 0 waits at port {port} for {most - 1} others")
        while training or len(here) < most:
            now = time.monotonic()
            if training:
                came, run = now, Path(training)
                own["trained"] |= (run / "trained").exists()
                if own["trained"] and connections and now > began + admit:
                    (run / "stop").touch()
                if (run / "ended").exists():
                    training = ""
            elif varies and len(here) >= fewest:
                if now > came + quiet:
                    break
            elif varies and now > next_word:
                next_word = now + 60
                say(word := f"waiting for {fewest - len(here)} more of at least {fewest} nodes")
                send(connections, {"say": word})
            if now > began + seconds:
                missing = [f"node {rank}" for rank in range(most) if rank not in here]
                raise Problem(f"{', '.join(missing)} {'have' if len(missing) > 1 else 'has'} not come within "
                              f"{seconds:g} s: start ddp_launch.sh there, too, with node 0's MASTER_ADDR "
                              "and MASTER_PORT, and check the firewall.")
            readable = select.select([server, *connections], [], [], 0.2)[0]
            for connection in readable:
                if connection is not server:  # nodes send nothing more, so this one has gone
                    rank = connections.pop(connection)
                    say(f"node {rank} has gone again: {here.pop(rank)['host']}")
                    connection.close()
            if server in readable:
                receive()
        order = sorted(here)
        trained = {rank for rank in order if here[rank].get("trained")}
        verdict = {"go": order, "new": [rank for rank in order if rank and trained and rank not in trained]}
    except Problem as problem:
        verdict = {"wrong": str(problem)}
        raise
    finally:
        send(connections, verdict)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.recv(1)  # the other end closes first, which frees the port for torchrun
            connection.close()
        server.close()
    say("; ".join(f"node {rank} {here[rank]['host']}: {here[rank]['gpus']} processes" if rank in here else
                  f"node {rank} is not here" for rank in range(most)))
    return verdict


def answer(address: str, port: int, hello: dict, seconds: float) -> dict:
    """On other nodes: connects to node 0, retries until it listens, and returns its answer."""
    began = next_word = time.monotonic()
    why = said = ""
    while time.monotonic() < began + seconds:
        try:
            with socket.create_connection((address, port), timeout=min(5, seconds)) as connection:
                keep_alive(connection)
                send([connection], hello)
                connection.settimeout(None if seconds == math.inf else seconds + 10)
                lines = connection.makefile()
                while "say" in (verdict := json.loads(lines.readline(10_000))):
                    next_word = time.monotonic()
                    if verdict["say"] != said:
                        say(said := verdict["say"])
            if "go" in verdict:
                return verdict
            raise Problem(verdict["wrong"])
        except (ValueError, KeyError, TypeError):
            why = "something else answers at that port"
        except OSError as error:
            why = str(error.strerror or error)
        time.sleep(0.5)
        if time.monotonic() > next_word + 5:
            next_word = time.monotonic() + 55
            say(f"node 0 at {address}:{port} does not answer ({why}): waiting for it")
    own = "; it is this machine's own address" if is_ours(address) else ""
    raise Problem(f"node 0 at {address}:{port} did not answer within {seconds:g} s ({why}{own}): check "
                  "MASTER_ADDR, MASTER_PORT and the firewall, and whether node 0 is still running.")


def main() -> None:
    name, port, nodes, rank, gpus, seconds, trained, training = sys.argv[1:]
    port, rank, seconds = int(port), int(rank), float(seconds)
    several = nodes != "1"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise Problem(f"MASTER_ADDR {name} is not known here ({error.strerror}): give the IPv4 address of "
                      "node 0.") from None
    if several and address == "0.0.0.0":
        say(f"MASTER_ADDR {name} leads to no machine: give the address of node 0's network card "
            "(`ip -4 addr` there), the same on all nodes.")
        sys.exit(2)  # trying again cannot help
    if rank == 0 and not is_ours(address):
        raise Problem(f"MASTER_ADDR {address} is not an address of this machine, but NODE_RANK=0 makes it "
                      "node 0: correct one of them, see `ip -4 addr`.")
    if seconds < math.inf:  # else it waits for the network, as for node 0
        address_towards(address)
    if several and address.startswith("127.") and name not in (address, "localhost"):
        raise Problem(f"MASTER_ADDR {name} is {address} on this machine, which no other can reach: give the "
                      "address of its network card, see `ip -4 addr`.")
    hello = {"node_rank": rank, "nodes": nodes, "gpus": int(gpus), "host": socket.gethostname(),
             "trained": trained == "yes"}
    verdict = (answer(address, port, hello, seconds) if rank else
               call_roll(name, address, port, hello, seconds, training))
    place, new = verdict["go"].index(rank), verdict["new"]
    print(place, len(verdict["go"]), "self" if rank in new else "others" if new else "nobody",
          interface_of(address_towards(address)))


if __name__ == "__main__":
    try:
        main()
    except Problem as problem:
        say(problem)
        sys.exit(1)
    except KeyboardInterrupt:  # also from ddp_launch.sh, when a signal stops it
        sys.exit(130)

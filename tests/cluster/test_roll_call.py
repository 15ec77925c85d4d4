"""cluster/roll_call.py: all nodes meet, or all say what is wrong. The nodes are threads of this process."""

import json
import runpy
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT

from cluster import roll_call
from cluster.roll_call import Problem, answer, call_roll

in_background = ThreadPoolExecutor().submit


@pytest.fixture
def port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


def hello(rank, nodes=3, host="pc"):
    return {"node_rank": rank, "nodes": nodes, "gpus": 10 + rank, "host": host}


def meet(port, *hellos, nodes=3, seconds=10.0) -> list[str]:
    """What node 0 and the others say, in the order in which they come: a problem, or None. A text comes from
    a stranger, or from a node that goes again.
    """
    def outcome(function, *args):
        try:
            function(*args)
        except Problem as problem:
            return str(problem)

    ended = [in_background(outcome, call_roll, "pc0", "127.0.0.1", port, nodes, 4, seconds)]
    for each in hellos:
        time.sleep(0.1)
        if isinstance(each, str):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(f"{each}\n".encode())
                time.sleep(0.1)
        else:
            ended.append(in_background(outcome, answer, "127.0.0.1", port, each, seconds))
    return [future.result(30) for future in ended]


def test_all_come(port, capsys):
    """One was there before node 0, one comes twice, and strangers at the port aren't counted."""
    early = in_background(answer, "127.0.0.1", port, hello(2, 4, "early"), 10)
    strangers = "GET /", "[]", '{"node_rank": 1}'
    comes = json.dumps(hello(1, 4)), hello(3, 4), hello(1, 4, "again")
    assert meet(port, *strangers, *comes, nodes=4) == [None] * 3
    early.result(10)
    said = capsys.readouterr().err
    assert "node 1 has gone again: pc" in said
    words = ("node 0", ": 4 ", "node 1 again (127.0.0.1): 11 ", "node 2 early (127.0.0.1): 12 ")
    assert all(word in said.splitlines()[-1] for word in words), said
    socket.create_server(("", port)).close()  # torchrun can have it now


@pytest.mark.parametrize("hellos, named", [
    ([hello(1, host="a"), hello(1, host="b")], ["NODE_RANK=1", "a (127.0.0.1)", "b (127.0.0.1)"]),
    ([hello(1), hello(2, nodes=4)], ["NNODES is 3 on node 0 and 4 on node 2"]),
    ([], ["node 1, node 2 have", " 0.5 s"]), ([hello(2)], ["node 1 has", " 0.5 s"])])
def test_what_is_wrong_is_named_on_all_that_have_come(port, hellos, named):
    said = meet(port, *hellos, seconds=0.5)
    assert said == [said[0]] * (1 + len(hellos)) and all(word in said[0] for word in named), said


def test_only_that_machine_reaches_a_loopback(port, monkeypatch):
    accept = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", lambda self: (accept(self)[0], ("192.0.2.7", 1)))
    said = meet(port, hello(1))
    assert "MASTER_ADDR is pc0 on node 0" in said[0] and "192.0.2.7" in said[0] and said[0] == said[1]


def test_a_port_that_something_else_has_is_named(port):
    with pytest.raises(Problem, match=rf"127.0.0.1:{port} .* 0.2 s \(Connection refused; .* own add"):
        answer("127.0.0.1", port, hello(1), 0.2)
    with socket.create_server(("", port)) as server:
        with pytest.raises(Problem, match=rf"MASTER_PORT {port} .*ss -ltnp"):
            call_roll("pc0", "127.0.0.1", port, 2, 1, 0.2)
        in_background(lambda: server.accept()[0].sendall(b"220 mail\n"))
        with pytest.raises(Problem, match="something else"):
            answer("127.0.0.1", port, hello(1), 0.4)


@pytest.mark.parametrize("name, address, rank, ended", [
    ("no.such.invalid", OSError(0, ""), 0, "MASTER_ADDR no.such.invalid"), ("0.0.0.0", "0.0.0.0", 0, 2),
    ("192.0.2.1", "192.0.2.1", 0, "192.0.2.1 is not"), ("pc1", "127.0.1.1", 0, "pc1 is 127.0.1.1"),
    ("localhost", "127.0.0.1", 1, "127.0.0.1:")])
def test_addresses_that_lead_nowhere(port, monkeypatch, capsys, name, address, rank, ended):
    """Debian's /etc/hosts gives a machine's own name the address 127.0.1.1."""
    def lookup(asked):
        if isinstance(address, OSError):
            raise address
        return address

    monkeypatch.setattr(socket, "gethostbyname", lookup)
    monkeypatch.setattr(sys, "argv", ["roll_call.py", name, str(port), "2", str(rank), "1", "1"])
    with pytest.raises(SystemExit) as found:
        runpy.run_path(str(ROOT / "cluster" / "roll_call.py"), run_name="__main__")
    said = capsys.readouterr().err.splitlines()[-1]
    assert found.value.code == (2 if ended == 2 else 1) and said.startswith("ddp_launch.sh: ")
    assert (name if ended == 2 else ended) in said


def test_a_single_node_meets_nobody_and_prints_its_interface(port, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["roll_call.py", "127.0.0.1", str(port), "1", "0", "1", "5"])
    roll_call.main()
    assert capsys.readouterr().out == "lo\n"
    assert roll_call.interface_of("192.0.2.1") == ""

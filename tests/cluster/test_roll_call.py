"""cluster/roll_call.py: all nodes meet, or all say what is wrong. The nodes are threads of this process."""

import json
import runpy
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT
from waiting import wait_for

from cluster import roll_call
from cluster.roll_call import Problem, answer, call_roll

in_background = ThreadPoolExecutor().submit


@pytest.fixture
def port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


def hello(rank, nodes="3", host="pc", trained=False, gpus=4):
    return {"node_rank": rank, "nodes": nodes, "gpus": gpus, "host": host, "trained": trained}


def meet(port, *hellos, own=None, seconds=10.0, training="") -> list:
    """What node 0 and the others get, in the order in which they come: a problem, or who starts. A text comes
    from a stranger, or from a node that goes again.
    """
    def outcome(function, *args):
        try:
            return function(*args)
        except Problem as problem:
            return str(problem)

    ended = [in_background(outcome, call_roll, "pc0", "127.0.0.1", port, own or hello(0), seconds, training)]
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
    early = in_background(answer, "127.0.0.1", port, hello(2, "4", "early"), 10)
    strangers = "GET /", "[]", '{"node_rank": 1}'
    comes = json.dumps(hello(1, "4")), hello(3, "4"), hello(1, "4", "again", gpus=11)
    assert meet(port, *strangers, *comes, own=hello(0, "4")) == [{"go": [0, 1, 2, 3], "new": []}] * 3
    early.result(10)
    said = capsys.readouterr().err
    assert "node 1 has gone again: pc" in said
    words = ("node 0", ": 4 ", "node 1 again (127.0.0.1): 11 ", "node 2 early (127.0.0.1): 4 ")
    assert all(word in said.splitlines()[-1] for word in words), said
    socket.create_server(("", port)).close()  # torchrun can have it now


@pytest.mark.parametrize("hellos, named", [
    ([hello(1, host="a"), hello(1, host="b")], ["NODE_RANK=1", "a (127.0.0.1)", "b (127.0.0.1)"]),
    ([hello(1), hello(2, "4")], ["NNODES is 3 on node 0 and 4 on node 2"]),
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
            call_roll("pc0", "127.0.0.1", port, hello(0), 0.2)
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
    monkeypatch.setattr(sys, "argv", ["roll_call.py", name, str(port), "2", str(rank), "1", "1", "no", ""])
    with pytest.raises(SystemExit) as found:
        runpy.run_path(str(ROOT / "cluster" / "roll_call.py"), run_name="__main__")
    said = capsys.readouterr().err.splitlines()[-1]
    assert found.value.code == (2 if ended == 2 else 1) and said.startswith("ddp_launch.sh: ")
    assert (name if ended == 2 else ended) in said


def test_a_single_node_meets_nobody_and_prints_its_interface(port, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["roll_call.py", "127.0.0.1", str(port), "1", "0", "1", "5", "no", ""])
    roll_call.main()
    assert capsys.readouterr().out == "0 1 nobody lo\n"
    assert roll_call.interface_of("192.0.2.1") == ""


@pytest.mark.parametrize("trained, new", [(set(), []), ({0}, [2]), ({2}, [])])
def test_enough_of_a_range_start_without_those_that_do_not_come(port, monkeypatch, trained, new):
    """Node 0 is never new. A node with other numbers hears why and doesn't stop the others."""
    monkeypatch.setenv("MEET_SECONDS", "0.5")
    own, good = (hello(rank, "2:4", trained=rank in trained) for rank in (0, 2))
    found = meet(port, hello(1, "2:3"), hello(3, "2:4", gpus=2), good, own=own)
    assert "NNODES is 2:4" in found[1] and "GPUS_PER_NODE is 4" in found[2]
    assert found[0] == found[3] == {"go": [0, 2], "new": new}


def test_a_node_that_is_still_counted_tries_again_until_it_is_missed(port, monkeypatch, capsys):
    """Its cable was out. A real second node of that NODE_RANK reads the reason and waits."""
    monkeypatch.setenv("MEET_SECONDS", "1")
    with ThreadPoolExecutor() as threads:
        node0 = threads.submit(call_roll, "pc0", "127.0.0.1", port, hello(0, "2:3"), 60)
        wait_for(lambda: "node 0 waits" in capsys.readouterr().err)
        with socket.create_connection(("127.0.0.1", port)) as old:
            old.sendall(json.dumps(hello(1, "2:3")).encode() + b"\n")
            wait_for(lambda: "has come" in capsys.readouterr().err)
            again = threads.submit(answer, "127.0.0.1", port, hello(1, "2:3"), 60)
            wait_for(lambda: "was given to both" in capsys.readouterr().err)
        assert again.result(30) == node0.result(30) == {"go": [0, 1], "new": []}


def test_a_run_stops_for_a_newcomer_but_not_too_often(port, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("ADMIT_SECONDS", "2")
    monkeypatch.setenv("MEET_SECONDS", "0")
    node0 = in_background(meet, port, hello(1, "1:2"), own=hello(0, "1:2"), seconds=60,
                          training=str(tmp_path))
    begun = time.monotonic()
    wait_for(lambda: "you join at" in capsys.readouterr().err)
    (tmp_path / "trained").touch()
    wait_for((tmp_path / "stop").exists)
    assert time.monotonic() - begun > 1.5 and not node0.done()
    (tmp_path / "ended").touch()
    assert node0.result(30) == [{"go": [0, 1], "new": [1]}] * 2

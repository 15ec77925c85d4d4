"""Processes find each other, and name the one that is missing, lost or late. All in this process, with short
beats; tests/whole_runs/test_lab.py loses real processes and machines.
"""

import contextlib
import itertools
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from waiting import wait_for

from cli.errors import RetryableError, RunError, UserError
from cluster import heartbeat
from cluster.heartbeat import Heartbeat

in_background = ThreadPoolExecutor().submit


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(Heartbeat, "BEAT", 0.05)
    monkeypatch.setattr(Heartbeat, "PATIENCE", 0.5)
    for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # torchrun sets this where its own store is at MASTER_ADDR
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=True)


@pytest.fixture
def beating(store):
    """Makes ranks in this process, and ends them."""
    made = []

    def make(rank, size, timeout=20.0, leaves_last=False, address=None):
        made.append(Heartbeat(store, rank, size, "here", timeout, leaves_last, address))
        return made[-1]

    yield make
    for each in made:
        each.leaves_last = False
        each.stop("")


# ------------------------------------------------------------------------------------------------------ join

def join(monkeypatch, given: str, port=1, timeout=10):
    """A process of a new run, with these variables."""
    monkeypatch.setattr(heartbeat, "_joins", itertools.count())
    for variable in f"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} {given}".split():
        monkeypatch.setenv(*variable.split("="))
    return heartbeat.join(timeout)


@pytest.mark.parametrize("given, named", [
    ("WORLD_SIZE=", "WORLD_SIZE"), ("RANK=", "`unset RANK WORLD_SIZE`"), ("RANK=a", "RANK is not a"),
    ("LOCAL_WORLD_SIZE=x", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK=x", "LOCAL_RANK"),
    ("MASTER_ADDR=", "MASTER_ADDR"), ("RANK=2", "RANK=2"),
    ("WORLD_SIZE=1 MASTER_PORT=65536", "=65536"), ("MASTER_PORT=0", "MASTER_PORT=0")])
def test_variables_that_join_no_run_are_refused(monkeypatch, given, named):
    with pytest.raises(UserError, match=named):
        join(monkeypatch, given)


def test_a_single_process_has_no_heartbeat(monkeypatch):
    """Any free port will do. Empty variables, as a .env file of Docker passes them, count as absent."""
    given = "WORLD_SIZE=1 MASTER_PORT=0 LOCAL_RANK= LOCAL_WORLD_SIZE= GROUP_WORLD_SIZE="
    rank, size, store, beat = join(monkeypatch, given)
    assert (rank, size, beat) == (0, 1, None) and store.add("a", 2) == 2


def test_a_store_that_cannot_be_reached_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(RunError, match=f"127.0.0.1:{port} is in use"):
            join(monkeypatch, "", port, 0.3)
    with pytest.raises(RunError, match=f"rank 1 .* 127.0.0.1:{port} within 0.3 s"):
        join(monkeypatch, "RANK=1", port, 0.3)


@pytest.mark.parametrize("given, last, address", [
    ("", True, ""), ("GROUP_RANK=0", True, ""), ("GROUP_RANK=1", False, ""),
    ("LOCAL_WORLD_SIZE=2 GROUP_RANK=0", False, None),
    ("LOCAL_WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=", True, None)])
def test_the_process_or_machine_that_hosts_the_store_leaves_last(monkeypatch, store, given, last, address):
    """An address that is a loopback leads to no other machine."""
    beat = join(monkeypatch, given, store.port)[3]
    assert (beat.leaves_last, beat.address) == (last, address)
    beat.leaves_last = False
    beat.stop("")


@pytest.mark.parametrize("given, named", [
    ("", "RANK=0"), ("TORCHELASTIC_RUN_ID=r", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")])
def test_a_rank_is_given_once(monkeypatch, store, given, named):
    """With elastic torchrun it may be a rank of before, in the store that it shares."""
    dist.PrefixStore("attempt 0, 0", store).add("rank 0", 1)
    with pytest.raises(UserError, match=named):
        join(monkeypatch, given, store.port)
    join(monkeypatch, f"LOCAL_WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=1 {given}", store.port)[3].stop("")
    with pytest.raises(UserError, match=named):  # on several nodes the counts differ
        join(monkeypatch, f"LOCAL_WORLD_SIZE=1 {given}", store.port)
    with pytest.raises(UserError, match="--max-restarts .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        join(monkeypatch, "TORCHELASTIC_MAX_RESTARTS=3", store.port)


# -------------------------------------------------------------------------------------------------- together

def test_missing_ranks_are_named(beating):
    first, _ = beating(0, 3, timeout=0.3), beating(2, 3)
    with pytest.raises(RunError, match=r"^rank 1 of 3 did not .* here within 0.3 s"):
        first.wait_for_all()


def test_another_world_size_is_named_by_all(beating):
    """The one that has it ends; the others, who wait for ranks that never come, say why."""
    first, second = beating(0, 3), beating(1, 2)
    waiting = in_background(first.wait_for_all)
    wait_for(lambda: first.store.check(["world size"]))
    with pytest.raises(UserError, match="WORLD_SIZE is 2 here and 3") as refused:
        second.wait_for_all()
    second.stop(str(refused.value))
    with pytest.raises(RunError, match=r"^rank 1 on node0 .*: WORLD_SIZE is 2 here"):
        waiting.result(10)


@pytest.mark.parametrize("address, chosen, interface", [
    (None, None, None), ("127.0.0.1", None, "lo"), ("", None, "eth9"), ("127.0.0.1", "eth5", "eth5")])
def test_gloo_takes_the_card_towards_other_nodes(beating, store, monkeypatch, address, chosen, interface):
    monkeypatch.setattr(heartbeat.roll_call, "address_towards", {"192.0.2.1": "10.9.9.9"}.get)
    monkeypatch.setattr(heartbeat.roll_call, "interface_of", {"127.0.0.1": "lo", "10.9.9.9": "eth9"}.get)
    monkeypatch.setattr(heartbeat.os, "environ", {"GLOO_SOCKET_IFNAME": chosen} if chosen else {})
    store.set("a node's address", "192.0.2.1")
    beating(0, 1, address=address).wait_for_all()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


@pytest.mark.parametrize("backends, named", [
    ("aba", ["^rank 0 is one of 2 among 3", "^rank 1 is one of 1 among", "^rank 2 is one of 2"]), ("aa", [])])
def test_ranks_that_chose_different_backends_are_refused(beating, backends, named):
    waiting = [in_background(beating(rank, len(backends)).refuse_other_backends, backend)
               for rank, backend in enumerate(backends)]
    for future, words in itertools.zip_longest(waiting, named):
        with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
            future.result(10)


@pytest.mark.parametrize("error, kind", [
    (UserError("a"), UserError), (ValueError("a"), RetryableError), (OSError(28, "a", "f"), RetryableError)])
def test_all_wait_for_all_and_fail_with_its_code(beating, error, kind):
    def fail():
        time.sleep(0.2)
        assert not waiting.done()
        raise error

    first, second = beating(0, 2), beating(1, 2)
    waiting = in_background(first.run_and_wait, int)
    assert (second.run_and_wait(lambda: 7), waiting.result(10)) == (7, 0)
    waiting = in_background(first.run_and_wait, int)
    with pytest.raises((UserError, ValueError)):
        second.run_and_wait(fail)
    with pytest.raises(UserError, match="a") as found:
        waiting.result(10)
    assert type(found.value) is kind


# ----------------------------------------------------------------------------------------------- who is lost

def be_lost(beat):
    """It is silent from now on."""
    beat._stopped.set()


def fail(beat):
    """It has failed, too, and looks for the cause."""
    beat._state = "failed"


def end(beat):
    beat.stop("")


@pytest.mark.parametrize("one, two, cause", [
    (be_lost, end, r"^rank 1 on node0 \(\S+ stopped"),
    (be_lost, be_lost, r"^rank 1 on node0 \(\S+, rank 2 on node0 \(\S+ stopped"),
    (be_lost, id, r"^rank 1 on node0 \(\S+ stopped"),  # and 2 is busy
    (fail, id, r"^rank 2 on .* --timeout \(20 s\)"), (fail, end, "^$"),
    (lambda beat: beat.stop("boom: 7"), be_lost, r"^rank 1 on node0 \(\S+ failed first: boom: 7$")])
def test_the_cause_of_a_failed_collective(beating, monkeypatch, one, two, cause):
    """What is lost comes before what is busy. What has ended is neither. The first reason stays."""
    ignored = []
    monkeypatch.setattr(signal, "signal", lambda *what: ignored.append(what))
    ranks = [beating(rank, 3) for rank in range(3)]
    one(ranks[1])
    two(ranks[2])
    time.sleep(0.2)
    found = ranks[0].find_cause()
    assert pytest.raises(RunError, match=cause).matches(RunError(found)), found
    assert ignored == [(signal.SIGTERM, signal.SIG_IGN)]  # torchrun sends it meanwhile
    if found and two is not be_lost:
        wait_for(lambda: two is end or ranks[2].cause)
        assert two is end or ranks[2].find_cause() == found


def test_a_loop_without_collectives_notices_a_silent_rank(beating):
    first, second = beating(0, 2, timeout=0.4), beating(1, 2)
    Heartbeat.PATIENCE = 0.1  # seconds between looks; the fixture restores it
    assert first.watch(lambda: time.sleep(0.8) or 7) == 7
    be_lost(second)
    for wait in lambda: first.watch(lambda: time.sleep(3)), lambda: first.run_and_wait(int):
        with pytest.raises(RunError, match="^rank 1 on node0 .*stopped"):
            wait()
    first.cause = "boom"
    with pytest.raises(RunError, match="^boom$"):
        first.raise_if_lost()


@pytest.mark.parametrize("function, timeout", [(lambda: time.sleep(2), 0.1), (lambda: 1 / 0, 0)])
def test_a_store_that_does_not_answer_is_named(beating, function, timeout):
    first = beating(0, 2, timeout=0.2)
    assert first.call(lambda x: x + 1, 2) == 3
    with pytest.raises(RunError, match="^node0 .* at here"):
        first.call(function, timeout=timeout)


@pytest.mark.parametrize("change, said", [
    (be_lost, "rank 1 on node0"), (end, ""), (lambda beat: None, ""),
    (lambda beat: setattr(beat, "_state", "slow"), "")])
def test_a_rank_that_is_silent_ends_those_that_wait_in_a_collective(beating, monkeypatch, change, said):
    """Whoever doesn't, ends by itself. The rank before the silent one finds out and tells the others."""
    monkeypatch.setattr(Heartbeat, "LOST", 0.5)
    monkeypatch.setattr(Heartbeat, "PATIENCE", 0.1)
    ranks, lost = [beating(rank, 3) for rank in range(3)], []
    for beat in ranks:
        beat.on_lost = lost.append
    change(ranks[1])
    time.sleep(1.5)
    assert [cause.startswith(f"{said} (") for cause in lost] == [True, True] * bool(said), lost


# --------------------------------------------------------------------------------------------- how they leave

def test_the_host_of_the_store_waits_for_the_others(beating):
    host, other = beating(0, 2, leaves_last=True), beating(1, 2)
    leaving = in_background(host.stop, "")
    time.sleep(0.4)
    assert not leaving.done()
    other.stop("")
    leaving.result(10)
    host.stop("too late")
    assert host._own_cause == ""


def test_the_host_of_a_run_that_failed_waits_for_two_beats(beating):
    host, _ = beating(0, 2, leaves_last=True), beating(1, 2)
    begun = time.monotonic()
    host.stop("boom")
    assert 0.1 <= time.monotonic() - begun < 10

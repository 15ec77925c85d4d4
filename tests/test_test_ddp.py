"""test_ddp.py: a check of a cluster that finds what would make a run hang or go wrong."""

import re
import socket
from types import SimpleNamespace

import pytest
import torch
from processes import Group, fork

import test_ddp

# test_ddp.py in which rank 1 has a fault, or the network is measured with fewer bytes, which is faster
FAULTY = """
import os, sys, time
import ddp_utils, test_ddp
fault = sys.argv.pop(1)
measure = test_ddp.all_reduce_seconds
test_ddp.all_reduce_seconds = lambda nbytes, *more: measure(min(nbytes, 10**6), *more)
check, report_of = test_ddp.check_collectives, test_ddp.report_of
if os.environ["RANK"] == "1" and fault == "differs":
    test_ddp.report_of = lambda *of: report_of(*of) | {"data": "other"}
if os.environ["RANK"] == "1" and fault == "hangs":
    test_ddp.check_collectives = lambda world: time.sleep(60)
if os.environ["RANK"] == "1" and fault == "wrong":
    test_ddp.check_collectives = lambda world: check(world) or "all_reduce"
ddp_utils.launch(test_ddp.main)
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    path = tmp_path_factory.mktemp("faulty") / "faulty.py"
    path.write_text(FAULTY)
    return path


def test_it_says_ok(faulty, shards):
    ended = fork(2, faulty, "none", "--device", "cpu", "--data", shards, timeout=60)
    assert ended.code == 0 and ended.out.splitlines()[-1] == "OK", ended.out
    for line in (r"^rank 1: \S+, cpu ; backend gloo, python 3\..* data [0-9a-f]{12}$",
                 r"^all_reduce of +100 MB: +[\d.]+ ms",
                 r" 100 M parameters take [\d.e-]+ s .* --comm bf16.* --comm late"):
        assert re.search(line, ended.out, re.M), (line, ended.out)


def test_one_process_says_that_it_was_alone():
    """As in each of several containers that nobody joined."""
    ended = fork(0, "test_ddp.py", "--device", "cpu", timeout=60, LOCAL_RANK="", LOCAL_WORLD_SIZE="")
    said = ended.out.splitlines()
    assert ended.code == 0 and said[-1] == "OK" and "cluster/ddp_launch.sh" in said[-2], ended.out


@pytest.mark.parametrize("fault, code, named", [
    pytest.param("hangs", 1, "all_reduce.* rank 1 on node0 .HOST.", marks=pytest.mark.full),
    ("wrong", 1, "all_reduce .* rank 1 .HOST."), ("differs", 2, "data .* rank 1 .HOST.*rank 0 .HOST.")])
def test_a_rank_that_differs_is_named(faulty, fault, code, named):
    group = Group(faulty, fault, "--device", "cpu", "--timeout", 12, ranks=2)
    group.processes[0].join(60)
    sentence = f"^error: {named.replace('HOST', socket.gethostname())}"
    assert group.codes[0] == code and re.search(sentence, group.text, re.M), group.text


def test_reports_are_compared():
    report = {"host": "pc", "world size": "3", "device": "cuda", "backend": "nccl", "python": "3.11.2",
              "torch": "2.13.0", "nccl": "2.27.7", "code": "a", "data": "b", "uuid": "", "wrong": ""}

    def problem(rank=2, **changes):
        reports = [report | {"host": f"pc{i}", "uuid": f"GPU-{i}"} for i in range(3)]
        reports[rank] |= changes
        return test_ddp.problem_in(reports)

    assert problem() == problem(python="3.11.9") == ""
    for what in ("world size", "device", "backend", "torch", "nccl", "code", "data"):
        said = problem(1, **{what: "x"})
        assert said.startswith(f"{what} is x on rank 1 (pc1), but {report[what]} on rank 0 (pc0): ")
    assert "x on rank 0 (pc0), but" in problem(0, code="x")  # what most have counts
    assert problem(python="3.12.9").startswith("python is 3.12 on rank 2")
    assert problem(uuid="GPU-1").startswith("rank 1 (pc1) and rank 2 (pc2)")
    assert problem(wrong="no.", code="x") == "rank 2 (pc2): no."


@pytest.mark.parametrize("broken", ["", "all_reduce", "broadcast", "all_gather"])
def test_wrong_collectives_are_named(monkeypatch, broken):
    """Three ranks whose collectives do what they should, except for one number of one of them."""
    base = torch.arange(100_000, dtype=torch.float64)

    def fill(name, tensor, values):
        tensor.copy_(values)
        tensor[-1] += name == broken

    monkeypatch.setattr(test_ddp, "dist", SimpleNamespace(
        all_gather=lambda parts, own: [fill("all_gather", part, base + i) for i, part in enumerate(parts)],
        all_reduce=lambda tensor: fill("all_reduce", tensor, 3 * base + 3),
        broadcast=lambda tensor, src: fill("broadcast", tensor, base if src == 2 else -base)))
    world = SimpleNamespace(rank=1, world_size=3, device=torch.device("cpu"))
    assert test_ddp.check_collectives(world) == broken


@pytest.mark.parametrize("ms, limit, large, repetitions", [
    (1, 30, 100, 5), (100, 30, 100, 1), (20, 30, 100, 2), (100, 20, 10, 5), (1000, 30, 10, 1)])
def test_a_slow_network_is_measured_with_less(monkeypatch, capsys, ms, limit, large, repetitions):
    """`ms` for each MB."""
    calls = []

    def measure(nbytes, repeat, world):
        calls.append((nbytes, repeat))
        return ms * nbytes / 1e9

    monkeypatch.setattr(test_ddp, "all_reduce_seconds", measure)
    test_ddp.measure_network(SimpleNamespace(world_size=4, is_rank0=True), limit)
    assert calls == [(1000, 21), (10**6, 7), (large * 10**6, repetitions)]
    said = capsys.readouterr().out
    assert f"{large * ms:9.2f} ms, {12 / ms:7.3f} Gbit/s" in said and f" {0.4 * ms:.3g} s " in said

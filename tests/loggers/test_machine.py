"""loggers/machine.py: what is read of the machine, against /proc, free and nvidia-smi."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from logs import block, command, record

import monitor
from loggers import machine
from loggers.machine import GB, MB, read_machine

psutil = pytest.importorskip("psutil")

GPU = ("index", "name", "utilization_percent", "memory_used", "memory_total", "power_watts",
       "temperature_celsius")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_a_reading_agrees_with_proc():
    reading = read_machine(0.1)
    meminfo = dict(row.split()[:2] for row in Path("/proc/meminfo").read_text().splitlines())
    total, available = (1024 * int(meminfo[name]) for name in ("MemTotal:", "MemAvailable:"))
    assert reading["ram_used"] == pytest.approx(total - available, abs=0.05 * total)
    assert reading["ram_total"] == total and 10 * MB < reading["process_ram"] < total
    rows = [line.replace(":", " ").split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    for column, so_far in zip((1, 9), machine.network_traffic()):
        expected = sum(int(row[column]) for row in rows if not row[0].startswith("lo"))
        assert so_far == pytest.approx(expected, rel=0.05, abs=MB)


def test_a_reading_is_lines_or_json(capsys, monkeypatch):
    traffic = iter([(0, 0), (3 * MB, MB)])
    monkeypatch.setattr(machine, "network_traffic", lambda: next(traffic))
    reading = json.loads(command(capsys, "--once", "--json", "--interval", "0.5")[1])
    assert (reading["received_per_sec"], reading["sent_per_sec"]) == (6 * MB, 2 * MB)
    gpu = dict(zip(GPU, (0, "X", None, GB, 2 * GB, 1.0, None)))
    lines = machine.format_reading(reading | {"gpus": [gpu]})
    assert [re.findall(r"\d+\.\d|\d+", line)[-2:] for line in lines[1:]] == [["6.0", "2.0"], ["2.0", "1"]]


def refuse(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_gpus_by_nvml(monkeypatch):
    """Each has what it reports; one that has fallen off the bus has its number."""
    stub = SimpleNamespace(
        NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=["a"].__getitem__, nvmlDeviceGetName={"a": "A"}.get,
        nvmlDeviceGetUtilizationRates={"a": SimpleNamespace(gpu=89)}.get,
        nvmlDeviceGetMemoryInfo={"a": SimpleNamespace(used=12 * GB, total=24 * GB)}.get,
        nvmlDeviceGetPowerUsage={"a": 350_400}.get,  # milliwatts
        nvmlDeviceGetTemperature=refuse)
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    assert machine.read_gpus() == [dict(zip(GPU, row)) for row in (
        (0, "A", 89, 12 * GB, 24 * GB, 350.4, None), (1, *[None] * 6))]
    stub.nvmlInit = lambda: 1 / 0  # no driver
    assert machine.read_gpus() == []
    block(monkeypatch, "pynvml")
    assert machine.read_gpus() == []


def test_the_curves_of_a_machine(monkeypatch):
    """Without nvidia-ml-py or psutil, what they would say is left out."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 * GB)
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 89)
    monkeypatch.setattr(machine, "cpu_and_ram", lambda: {"cpu_percent": 5.0, "ram_percent": 25.0})
    wanted = {"System/CPU_percent/a": 5.0, "System/RAM_percent/a": 25.0, "System/GPU_VRAM_MB/a": 3072.0,
              "System/GPU_percent/a": 89}
    assert machine.machine_curves("/a") == wanted
    monkeypatch.setattr(machine, "cpu_and_ram", lambda: 1 / 0)
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 1 / 0)
    assert machine.machine_curves("/a") == {"System/GPU_VRAM_MB/a": 3072.0}


def test_a_log_line_has_the_least_and_the_most_used_gpu():
    """Or the use of the only one, and the largest peak of memory; the other curves are those of each first
    process.
    """
    def curves(used, host=""):
        return {f"System/RAM_percent{host}": used / 2, f"System/GPU_percent{host}": used}

    alone = machine.combined([1.5], [curves(97)])
    assert alone == {"mem_gb": 1.5} | curves(97)
    found = machine.combined([1, 9, 3, 2], [curves(80, "/a"), curves(31, "/a"), curves(98, "/b"),
                                           curves(90, "/b")])
    assert found == {"mem_gb": 9, "System/GPU_percent_least": 31, "System/GPU_percent_most": 98} | curves(
        80, "/a") | curves(98, "/b")
    here = machine.combined([1, 9], [curves(80), curves(31)])
    uses = [re.findall(r"GPU ([\d-]+)%", monitor.step_line(record(1) | numbers, 9.0, "OK", {}))
            for numbers in (alone, found, here, {})]
    assert uses == [["97"], ["31-98"], ["31-80"], []]


def test_trainers_are_told_from_their_launcher():
    assert machine.is_trainer("python -u /x/train_hrm.py --size tiny".split())
    for other in ("python -m torch.distributed.run train_hrm.py", "vim train_hrm.py", "", "python",
                  "/venv/python /venv/bin/torchrun --nproc_per_node=2 train_hrm.py"):
        assert not machine.is_trainer(other.split())


@pytest.mark.parametrize("why", ["PermissionError", "pip install psutil"])
def test_what_psutil_may_not_read_is_one_sentence(monkeypatch, capsys, why):
    """Such as /proc/stat, as on Android. A run goes on, and is told once."""
    monkeypatch.setattr(psutil, "cpu_percent", refuse)
    if why != "PermissionError":
        block(monkeypatch, "psutil")
    code, out, errors = command(capsys, "--once", "--interval", "0.1")
    assert (code, out, errors.count("\n")) == (2, "", 1) and errors.startswith("error: ") and why in errors
    said = []
    machine.begin_curves(said.append)
    assert [why in text for text in said] == [True]


def test_ctrl_c_while_a_package_is_imported_ends_the_run(tmp_path, monkeypatch):
    block(monkeypatch, "psutil", tmp_path, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        machine.begin_curves(print)

"""monitor.py: readings against what the system says, the command, RunLog's curves, the picture and the
summary of a run.
"""

import base64
import contextlib
import errno
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, finish, kill, start

import monitor
from cli.errors import UserError, run_command
from cli.files import write_atomically
from loggers import machine, picture
from loggers.command import main, summarize
from loggers.machine import GB, MB, read_machine
from loggers.mfu import peak_flops
from loggers.picture import History
from loggers.tensorboard import EventFile
from monitor import RunLog

COMMAND = [sys.executable, ROOT / "monitor.py"]
needs_psutil = pytest.mark.skipif(not importlib.util.find_spec("psutil"), reason="pip install psutil")


def block(monkeypatch, *names: str) -> None:
    """Makes the import of these packages fail as if they were not installed."""
    for name in [*sys.modules]:
        if name.split(".")[0] in names:
            monkeypatch.delitem(sys.modules, name)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    if "tensorboard" in names:
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)


def command(capsys, *arguments) -> tuple[int, str, str]:
    """Exit code, output and errors of `python monitor.py …`, run in this process."""
    with pytest.raises(SystemExit) as end:
        run_command(lambda: main([str(a) for a in arguments]))
    return end.value.code or 0, *capsys.readouterr()


def record(step: int, **changes) -> dict:
    return {"step": step, "loss": 5.0 - step / 10, "lr": 1e-3, "grad_norm": 1.0,
            "tokens": step * 100, "tokens_per_sec": 50.0, "mfu": 0.25, "mem_gb": 1.0,
            "time": 1.7e9 + step} | machine.machine_curves() | changes


# -----------------------------------------------------------------------------------------------------------
# The machine


def ticks() -> list[int]:
    return [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


@needs_psutil
def test_a_reading_agrees_with_proc_stat_and_free(capsys):
    if not Path("/proc/stat").exists() or not shutil.which("free"):
        pytest.skip("needs /proc and free")
    before = ticks()
    code, out, _ = command(capsys, "--once", "--json", "--interval", "0.6")
    after = ticks()
    reading = json.loads(out)
    spent = [b - a for a, b in zip(before[:8], after)]
    busy = 100 * (1 - (spent[3] + spent[4]) / sum(spent))
    assert code == 0 and abs(reading["cpu_percent"] - busy) < 12, (reading["cpu_percent"], busy)
    row = subprocess.run(["free", "-b"], capture_output=True, text=True).stdout.splitlines()[1].split()
    total, available = int(row[1]), int(row[-1])
    assert reading["ram_total"] == total
    assert abs(reading["ram_used"] - (total - available)) < 0.03 * total
    assert abs(reading["ram_percent"] - 100 * reading["ram_used"] / reading["ram_total"]) < 0.1
    assert 10 * MB < reading["process_ram"] < reading["ram_total"]


def proc_reading() -> dict:
    """What /proc says of what a reading has too."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    interfaces = [numbers.split() for name, numbers in rows if not name.strip().startswith("lo")]
    memory = {row[0]: int(row[1]) * 1024
              for row in map(str.split, Path("/proc/meminfo").read_text().splitlines())}
    pages = 0
    for task in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended by now
            if machine.is_trainer((task / "cmdline").read_bytes().decode(errors="replace").split("\0")):
                pages += int((task / "statm").read_text().split()[1])
    pages = pages or int(Path("/proc/self/statm").read_text().split()[1])
    return {"received": sum(int(i[0]) for i in interfaces), "sent": sum(int(i[8]) for i in interfaces),
            "ram_used": memory["MemTotal:"] - memory["MemAvailable:"], "ram_total": memory["MemTotal:"],
            "process_ram": pages * os.sysconf("SC_PAGE_SIZE")}


@needs_psutil
def test_a_reading_agrees_with_proc():
    if not Path("/proc/stat").exists():
        pytest.skip("needs /proc")
    for _ in range(5):  # processes may come and go between the two
        reading = read_machine(0.1) | dict(zip(("received", "sent"), machine.network_traffic()))
        expected = proc_reading()
        if {key: reading[key] for key in expected} == pytest.approx(expected, rel=0.05, abs=MB):
            break
    assert {key: reading[key] for key in expected} == pytest.approx(expected, rel=0.05, abs=MB)


def test_without_psutil_one_sentence_says_so(tmp_path, monkeypatch, capsys):
    block(monkeypatch, "psutil")
    code, out, errors = command(capsys, "--once", "--json")
    assert (code, out) == (2, "") and errors.startswith("error: ") and errors.count("\n") == 1
    assert "pip install psutil" in errors
    pytest.importorskip("tensorboard")
    log = begun(tmp_path)
    log.write(record(1), "")
    log.close()
    assert capsys.readouterr().out.count("pip install psutil") == 1
    found = curves(tmp_path)
    assert found["Loss/train_step"] and not any("CPU" in tag or "RAM" in tag for tag in found)


@needs_psutil
def test_lines_are_those_of_the_issue(capsys):
    code, out, _ = command(capsys, "--once", "--interval", "0.1")
    first, second = out.splitlines()[:2]
    assert code == 0 and re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] CPU: \d+\.\d% \| RAM: \d+\.\d% \(\d+\.\d GB / \d+\.\d GB\) \| "
        r"process RAM: \d+\.\d GB", first), first
    assert re.match(r"  - Disk: \d+\.\d% .* \| Network: \d+\.\d MB/s in, \d+\.\d MB/s out$", second), second


GPU_LINE = "  - GPU 0 (NVIDIA RTX 4090) | Util: 89% | Memory: 12.1 GB / 24.0 GB | Power: 350 W | Temp: 65 C"


def gpu_lines() -> list[str]:
    return machine.format_reading(read_machine(0.1))[2:]


@needs_psutil
def test_gpus_by_nvml(monkeypatch):
    class NVMLError(Exception):
        pass

    def supported(value, *gpus):
        def query(gpu, *_):
            if gpu not in gpus:
                raise NVMLError
            return value
        return query

    stub = SimpleNamespace(
        NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetName=lambda gpu: "NVIDIA RTX 4090",
        nvmlDeviceGetUtilizationRates=supported(SimpleNamespace(gpu=89), 0, 1),
        nvmlDeviceGetMemoryInfo=supported(SimpleNamespace(used=12.1 * GB, total=24 * GB), 0, 1),
        nvmlDeviceGetPowerUsage=supported(350_400, 0),  # milliwatts
        nvmlDeviceGetTemperature=supported(65, 0, 1, 2))
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    assert gpu_lines() == [GPU_LINE, GPU_LINE.replace("GPU 0", "GPU 1").replace(" | Power: 350 W", ""),
                           "  - GPU 2 (NVIDIA RTX 4090) | Temp: 65 C"]
    stub.nvmlDeviceGetHandleByIndex = [0].__getitem__  # the others have fallen off the bus
    stub.nvmlDeviceGetName = ["NVIDIA RTX 4090"].__getitem__
    assert gpu_lines() == [GPU_LINE, "  - GPU 1 (None)", "  - GPU 2 (None)"]


@needs_psutil
def test_without_nvidia_ml_py_or_driver_there_are_no_gpus(monkeypatch):
    block(monkeypatch, "pynvml")
    assert gpu_lines() == []

    def no_driver():
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=no_driver))
    assert gpu_lines() == []


@pytest.mark.parametrize("installed", [True, False])
def test_curves_of_a_gpu(monkeypatch, installed):
    """Its use in percent is left out without nvidia-ml-py."""
    def utilization():
        if not installed:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported.")
        return 89

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 * GB)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    found = {tag: value for tag, value in machine.machine_curves().items() if "GPU" in tag}
    assert found == {"System/GPU_VRAM_MB": 3072.0} | ({"System/GPU_percent": 89} if installed else {})


def test_a_log_line_has_the_least_and_the_most_used_gpu(capsys):
    """Of several GPUs, and the largest peak of memory; the other curves are those of each first process."""
    def curves(used, host=""):
        return {f"System/RAM_percent{host}": used / 2} | ({f"System/GPU_percent{host}": used} if used else {})

    assert machine.combined([1.5], [curves(97)]) == {"mem_gb": 1.5} | curves(97)  # it is alone
    assert machine.combined([1, 2], [curves(0), curves(0)]) == {"mem_gb": 2} | curves(0)  # they don't say
    on = "/node0-a", "/node1-b"
    found = machine.combined([1, 9, 3, 2], [curves(80, on[0]), curves(31, on[0]), curves(98, on[1]),
                                           curves(90, on[1])])
    both = {"System/GPU_percent_least": 31, "System/GPU_percent_most": 98}
    assert found == {"mem_gb": 9} | both | curves(80, on[0]) | curves(98, on[1])
    line = monitor.step_line(record(1) | found, 9.0, "OK")
    assert " | GPU 31-98% | 9.0 GB | " in line and "GPU " not in monitor.step_line(record(1), 9.0, "OK")


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs a GPU")
def test_gpus_agree_with_nvidia_smi():
    pytest.importorskip("pynvml")
    out = subprocess.run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
                         capture_output=True, text=True).stdout
    expected = [(name, int(total)) for name, total in (line.split(", ") for line in out.splitlines())]
    assert [(g["name"], round(g["memory_total"] / MB)) for g in machine.read_gpus()] == expected


def test_trainers_are_told_from_their_launcher():
    assert machine.is_trainer(["python", "-u", "/x/train_hrm.py", "--size", "tiny"])
    for other in (["python", "-m", "torch.distributed.run", "train_hrm.py"], ["vim", "train_hrm.py"],
                  [], ["python"],
                  ["/venv/python", "/venv/bin/torchrun", "--nproc_per_node=2", "train_hrm.py"]):
        assert not machine.is_trainer(other)


# -----------------------------------------------------------------------------------------------------------
# The command


def test_starting_needs_no_torch():
    done = finish(start([sys.executable, "-c", "import sys, monitor; assert 'torch' not in sys.modules"]))
    assert done.code == 0, done.out


@needs_psutil
def test_ctrl_c_ends_it_quietly():
    process = start([*COMMAND, "--interval", "0.2"])
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    done = finish(process, 20)
    assert done.code == 0 and "Traceback" not in done.out and "Interrupt" not in done.out, done.out


@needs_psutil
def test_a_reader_that_goes_away_is_no_error():
    done = finish(start(["bash", "-c", f"{sys.executable} {ROOT / 'monitor.py'} --interval 0.1 | head -n 1; "
                         "echo code ${PIPESTATUS[0]}"]), 20)
    assert done.out.splitlines()[1:] == ["code 0"], done.out


@pytest.mark.parametrize("arguments, message", [
    (["nowhere"], "nowhere has no metrics.jsonl"), (["file"], "file has no metrics.jsonl"),
    (["broken"], "does not begin with the record of a step"),
    (["--interval", "0"], "--interval: 0 is not in"),
    (["--interval", "x"], "--interval: invalid number value"), (["good", "two"], "two has no metrics.jsonl"),
    (["--frequency", "1"], "unrecognized")], ids=str)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for name, text in (("broken", "no json\n"), ("good", json.dumps(record(1)) + "\n")):
        Path(name).mkdir()
        Path(name, "metrics.jsonl").write_text(text)
    code, _, errors = command(capsys, *arguments)
    assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1, errors
    assert message in errors


# -----------------------------------------------------------------------------------------------------------
# RunLog


STAMP = re.compile(r"^(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d ", re.M)  # of a line of train.log
OF_RUN = {"sync": "OK", "val_tokens": 8, "entropy": 2.89861}


def log_with(out: Path, step: int, settings: dict, *sinks, active: bool = True, **changes) -> RunLog:
    """A log that is open after `step` steps. `sinks` are made of it."""
    text = monitor.TrainLog("[Rank 0/1]", active)
    text.open(out / "train.log")
    log = RunLog(out, text, settings, monitor.records_until(out, step, text.say), **OF_RUN | changes)
    log.begin(step, {})
    log.loggers += [make(log) for make in sinks]
    return log


def begun(out: Path, step: int = 0, val_tokens: int = 8, **settings) -> RunLog:
    """A log as that of startup.run.start_run, after `step` steps."""
    settings = {"lr": 1e-3, "bp_steps": [2, 5], "tokenizer": None, "steps": 10} | settings
    log = log_with(out, step, settings, events, History, val_tokens=val_tokens)
    machine.begin_curves(log.say)
    return log


def events(log: RunLog) -> EventFile:
    if (log.out / "tb").exists():
        time.sleep(1 - time.time() % 1)  # names of files have seconds, by which TensorBoard orders them
    return EventFile(log, 400)


def reader(out: Path, kind: str = "event_accumulator"):
    """TensorBoard's own, of which `curves` uses the one and the command `tensorboard` the one of plugins."""
    module = pytest.importorskip(f"tensorboard.backend.event_processing.{kind}")
    return module.EventAccumulator(str(out / "tb"), {"scalars": 0, "tensors": 0})


def curves(out: Path) -> dict[str, list[tuple[int, float]]]:
    """All points of each curve as TensorBoard reads them."""
    events = reader(out)
    events.Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return found | {tag: len(events.Tensors(tag)) for tag in events.Tags()["tensors"]}


@needs_psutil
def test_tags(tmp_path):
    log = begun(tmp_path)
    log.write(record(1, val_loss=4.5, bp_steps=2, cycles=2.0, ponder=0.1,
                     val_exact=0.6, **{"val_exact/easy": 0.7}), "")
    log.write(record(2, loss=float("nan"), mfu=None, val_accuracy=0.5, val_bits_per_byte=1.0), "")
    log.close()
    found = curves(tmp_path)
    assert found.pop("settings/text_summary") == 1
    for tag in ("System/CPU_percent", "System/RAM_percent", "System/peak_memory_GB"):
        assert [step for step, _ in found.pop(tag)] == [1, 2]
    one = {"Loss/train_step": 4.9, "Loss/val_epoch": 4.5, "LR": 1e-3, "GradNorm": 1.0,
           "Throughput/tokens_per_sec": 50.0, "Throughput/mfu": 0.25, "HRM/bp_steps": 2, "HRM/cycles": 2,
           "HRM/ponder": 0.1, "Pairs/val_exact": 0.6, "Pairs/val_exact/easy": 0.7}
    assert {t: v for t, ((s, v), *_) in found.items() if s == 1} == pytest.approx(one)
    assert [t for t, points in found.items() if len(points) == 2] == [
        "LR", "GradNorm", "Throughput/tokens_per_sec"]  # not the loss, which was NaN
    assert found["MLM/val_accuracy"] == [(2, 0.5)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["loss"] is None


@pytest.mark.parametrize("killed_at", [None, 3, 7, 9])
def test_the_curves_of_epochs_are_of_their_logged_steps(tmp_path, killed_at):
    """An epoch has 400 tokens, a step 100. The last step ends the last one. Neither evaluations nor the time
    between two starts are in the seconds.
    """
    log = begun(tmp_path)
    for step in range(1, 11):
        log.write(record(step, loss=step, tokens_per_sec=50.0 if step < 9 else 25.0), "")
        log.write({"step": step, "tokens": 100 * step, "val_loss": 1.0, "time": 1.8e9}, "")
        if step == killed_at:
            log = begun(tmp_path, step - 1)
            log.write(record(step, loss=step, tokens_per_sec=50.0 if step < 9 else 25.0, time=1.9e9), "")
    log.close()
    found = curves(tmp_path)
    assert found["Loss/train_epoch"] == [(4, 2.5), (8, 6.5), (10, 9.5)]
    assert found["Time/epoch_seconds"] == [(4, 8.0), (8, 8.0), (10, 8.0)]


@needs_psutil
@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("evaluates", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_resumed_run_has_one_point_for_each_step(tmp_path, evaluates, evaluated):
    """Stopped after step 8 without a word, as by kill -9, and again from the checkpoint of step 5, of which
    the evaluation is in TensorBoard already, but perhaps not in the log.
    """
    log = begun(tmp_path)
    for step in range(1, 9):
        log.write(record(step), "")
        if step == 5 and evaluates:
            log.write({"step": 5, "val_loss": 4.25}, "")
    path = tmp_path / "metrics.jsonl"
    if not evaluated:
        path.write_text("".join(line for line in path.open() if "val_loss" not in line))
    with open(path, "a") as file:
        file.write('{"step": 9, "lo')
    log = begun(tmp_path, 5)
    assert log.evaluations == ({5: 4.25} if evaluates and evaluated else {})
    if evaluates and not evaluated:
        log.write({"step": 5, "val_loss": 4.25}, "")
    for step in range(6, 11):
        log.write(record(step, loss=step), "")
    log.close()
    expected = [(s, 5 - s / 10) for s in range(1, 6)] + [(s, s) for s in range(6, 11)]
    history = json.loads((tmp_path / "history.json").read_text())
    steps = [(r["step"], r["loss"]) for r in monitor.read_metrics(tmp_path) if "loss" in r]
    assert steps == expected
    assert expected == [pair for pair in zip(history["step"], history["loss"]) if pair[1] is not None]
    found = curves(tmp_path)
    for tag, values in (("Loss/train_step", expected), ("Loss/val_epoch", [(5, 4.25)] * evaluates)):
        assert [s for s, _ in found.get(tag, [])] == [s for s, _ in values]
        assert [v for _, v in found.get(tag, [])] == pytest.approx([v for _, v in values])
    assert [s for s, _ in found["System/CPU_percent"]] == [*range(1, 11)]


def test_tensorboard_that_is_installed_later_has_the_whole_curve(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        block(patch, "tensorboard", "matplotlib", "psutil")
        log = begun(tmp_path)
        log.write(record(1, val_loss=4.0), "")
        log.write(record(2), "")
        log.close()
        said = capsys.readouterr().out
        for package in ("tensorboard", "matplotlib"):
            assert len(re.findall(f"pip install {package}", said)) == 1, said
        assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "history.json", "train.log"}
        code, out, errors = command(capsys, tmp_path)
        assert code == 0 and "pip install matplotlib" in errors and json.loads(out)["loss"] == 4.8
    log = begun(tmp_path, 2)
    log.write(record(3), "")
    log.close()
    assert [step for step, _ in curves(tmp_path)["Loss/train_step"]] == [1, 2, 3]


ERRORS = ["TypeError", "AttributeError", "OSError", "ImportError", "SystemExit"]


@pytest.mark.parametrize("error, package", [
    *zip(ERRORS, ["tensorboard"] * 5), *zip(ERRORS, ["matplotlib"] * 5), *zip(ERRORS, ["psutil"] * 5)])
def test_a_package_that_is_broken_ends_no_run(tmp_path, monkeypatch, capsys, package, error):
    block(monkeypatch, package)
    monkeypatch.delitem(sys.modules, package)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {error}('made up')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run").mkdir()
    log = begun(tmp_path / "run")
    log.write(record(1, val_loss=4.0), "")
    log.close()
    line, = (line for line in capsys.readouterr().out.splitlines() if "made up" in line)
    assert re.fullmatch(f".* (is not drawn|are not written): {error}: made up", line), line
    assert monitor.read_metrics(tmp_path / "run")[0]["val_loss"] == 4.0
    assert (tmp_path / "run" / "history.json").exists()
    code, out, errors = command(capsys, tmp_path / "run")
    assert code == 0 and json.loads(out)["step"] == 1
    assert ("the curves are not drawn: " + error in errors) == (package == "matplotlib"), errors
    if package == "psutil":
        code, _, errors = command(capsys, "--once")
        assert code == 2 and errors.startswith("error: ") and f"{error}: made up." in errors


def test_ctrl_c_while_a_package_is_imported_ends_the_run(tmp_path, monkeypatch):
    block(monkeypatch, "psutil")
    monkeypatch.delitem(sys.modules, "psutil")
    (tmp_path / "psutil.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        begun(tmp_path)


@needs_psutil
@pytest.mark.parametrize("call", ["cpu_percent", "net_io_counters", "disk_usage", "process_iter"])
def test_what_psutil_may_not_read_is_one_sentence(monkeypatch, capsys, call):
    """Such as /proc/net/dev, as on Android."""
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(f"psutil.{call}", refuse)
    code, out, errors = command(capsys, "--once", "--interval", "0.1")
    assert (code, out) == (2, "") and errors.count("\n") == 1
    assert errors.startswith("error: ") and "Permission denied" in errors


def test_a_package_that_fails_later_ends_no_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboard")
    log = begun(tmp_path)

    def fail(event):
        raise TypeError("made up")

    monkeypatch.setattr(log.loggers[0], "_add", fail)
    for step in (1, 2, 3):
        log.write(record(step), "")
    log.close()
    assert capsys.readouterr().out.count("EventFile fails (TypeError: made up)") == 1
    assert [r["step"] for r in monitor.read_metrics(tmp_path)] == [1, 2, 3]


def test_the_backend_of_a_notebook_ends_no_run(tmp_path):
    """In a process of its own, as with !torchrun, where matplotlib is not imported yet."""
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    backend = "module://matplotlib_inline.backend_inline"
    code = ("import os, sys; from loggers.command import main; main(sys.argv[1:]); "
            "print(os.environ['MPLBACKEND'], 'matplotlib' in sys.modules)")
    done = finish(start([sys.executable, "-c", code, tmp_path], MPLBACKEND=backend))
    assert done.code == 0 and f"the curves are in {tmp_path}" in done.out, done.out
    assert f"{backend} True" in done.out


def test_a_run_that_may_only_be_read_prints_its_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    (tmp_path / "training_history.png").mkdir()  # so no picture can take this name, not even for root
    code, out, errors = command(capsys, tmp_path)
    assert code == 0 and json.loads(out)["step"] == 1
    assert errors.startswith("the curves are not drawn: ") and "cannot be written" in errors


def test_a_disk_that_is_away_for_a_while_costs_nothing(tmp_path, monkeypatch, capsys):
    """Such as one of another machine: all that is asked of it fails, and later nothing does."""
    log = begun(tmp_path)
    log.write(record(1), "")
    real = os.stat

    def away(path, *_, **__):
        if str(path).startswith(str(tmp_path)):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *_, **__)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", away)
        log.write(record(2), "")
    log.write(record(3), "")
    log.close()
    assert [r["step"] for r in monitor.read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["writer", "thread"])
def test_a_disk_that_fills_up_costs_the_curves_and_not_the_run(tmp_path, monkeypatch, capsys, where):
    log = begun(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    writer = log.loggers[0]._writer
    if where == "thread":  # what it calls for each record
        monkeypatch.setattr(writer.file_writer.event_writer._async_writer._writer, "write", full)
    else:
        monkeypatch.setattr(writer, "flush", full)
    log.write(record(1), "")
    log.write(record(2), "")
    said = capsys.readouterr().out
    assert said.count("No space left on device") == said.count("EventFile fails") == 1
    assert [r["step"] for r in monitor.read_metrics(tmp_path)] == [1, 2]
    monkeypatch.undo()
    begun(tmp_path, 2)  # the next start has all
    assert [step for step, _ in curves(tmp_path)["Loss/train_step"]] == [1, 2]


def test_a_disk_that_is_full_for_a_while_costs_no_record(tmp_path, monkeypatch, capsys):
    """Also not the last one, and not where half a line was written."""
    log = begun(tmp_path)
    real = write_atomically

    class Full:
        def write(self, text):
            with open(tmp_path / "metrics.jsonl", "a") as file:
                file.write(text[:9])
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(*_):
        raise UserError("this cannot be written: free some space.")

    for first in (1, 4):
        log.write(record(first), "")
        log._metrics = Full()
        log.write(record(first + 1), "")
        monkeypatch.setattr(monitor, "write_atomically", full)
        log.write(record(first + 2), "")
        monkeypatch.setattr(monitor, "write_atomically", real)
    assert [r["step"] for r in monitor.read_metrics(tmp_path)] == [1, 2, 3, 4]
    log.close()
    assert [r["step"] for r in monitor.read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().out.count("WARNING: metrics.jsonl lacks a record (") == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["metrics.jsonl", "tb"])
def test_a_disk_that_is_full_at_a_start_loses_no_old_curve(tmp_path, monkeypatch, capsys, name):
    """The log is written anew beside the old one, which stays until then, and the old curves stay."""
    log = begun(tmp_path)
    for step in range(1, 4):
        log.write(record(step), "")
    log.close()
    capsys.readouterr()

    def full(*_):
        raise UserError("this cannot be written: free some space.")

    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    if name == "tb":
        monkeypatch.setattr(record_writer.RecordWriter, "write", full)
    else:
        monkeypatch.setattr(monitor, "write_atomically", full)
    with contextlib.suppress(UserError):  # of metrics.jsonl, without which no run begins
        begun(tmp_path, 3)
        assert "curves for TensorBoard are not written: this cannot" in capsys.readouterr().out
    assert [r["step"] for r in monitor.read_metrics(tmp_path)] == [1, 2, 3]
    assert [step for step, _ in curves(tmp_path)["Loss/train_step"]] == [1, 2, 3]


@needs_psutil
def test_each_record_goes_to_all_sinks_by_one_call(tmp_path, capsys):
    got = []
    own = SimpleNamespace(log=lambda record: got.append(record["step"]), close=lambda: got.append("closed"))
    for first in (1, 2):
        log = log_with(tmp_path, first - 1, {"lr": 1e-3, "steps": 10}, events, lambda log: own)
        got.append(len(log.records))
        log.write(record(first), "loss 4.9")
        log.write({"step": first, "val_loss": 4.0}, "validation loss 4.0")
        log.close()
    assert got == [0, 1, 1, "closed", 2, 2, 2, "closed"]
    said = ["[Rank 0/1] step 1/10 | loss 4.9", "step 1 | validation loss 4.0",
            "[Rank 0/1] step 2/10 | loss 4.9", "step 2 | validation loss 4.0"]
    texts = (tmp_path / "train.log").read_text(), capsys.readouterr().out
    assert [STAMP.sub("", text).splitlines() for text in texts] == [said, said]
    assert len(monitor.read_metrics(tmp_path)) == 4
    assert curves(tmp_path)["Loss/val_epoch"] == [(1, 4.0), (2, 4.0)]


@pytest.mark.parametrize("found, line", [
    ({"val_accuracy": None}, "step 9 | validation loss 2.6251 | unigram entropy 2.8986\n"),
    ({"val_accuracy": 0.1234, "val_bits_per_byte": 1.5}, "step 9 | validation loss 2.6251 | accuracy 12.3% | "
     "1.5000 bits per byte | unigram entropy 2.8986\n")], ids=["GPT2", "MLM"])
def test_an_evaluation_is_one_line(tmp_path, capsys, found, line):
    log = begun(tmp_path, seq_len=8)
    capsys.readouterr()
    log.evaluation(9, 1, {"val_loss": 2.62509, **found})
    assert STAMP.sub("", capsys.readouterr().out) == line
    assert (tmp_path / "train.log").read_text().endswith(line)


@pytest.mark.parametrize("loss, best", [(1.9, True), (2.1, False)])
def test_an_evaluation_says_whether_it_is_the_best(tmp_path, capsys, loss, best):
    log = begun(tmp_path, seq_len=8)
    log.evaluation(1, 1, {"val_loss": 2.0})
    assert log.evaluation(3, 1, {"val_loss": loss}) == best
    assert capsys.readouterr().out.endswith("| best so far\n") == best


@pytest.mark.parametrize("active", [True, False])
def test_all_ranks_agree_on_the_best(tmp_path, active):
    """The first of equal ones; none without a number; and the first of another best_metric."""
    log = log_with(tmp_path, 0, {"steps": 10, "seq_len": 8}, active=active)
    found = [{"val_loss": math.nan}, {"val_loss": 3.0}, {"val_loss": 3.0}, {"val_loss": math.inf},
             {"val_loss": 2.0}, {"val_loss": 1.0, "best_metric": 9.0}, {"val_loss": 0.5, "best_metric": 9.5}]
    best = [log.evaluation(step, 8, result) for step, result in enumerate(found, 1)]
    assert best == [False, True, False, False, True, True, False]
    assert log.evaluations == {2: math.inf, 3: math.inf, 5: math.inf, 6: 9.0, 7: 9.5}


def terminal() -> SimpleNamespace:
    return SimpleNamespace(isatty=lambda: True, fileno=lambda: 1, write=len, flush=lambda: None,
                           encoding="utf-8")


@pytest.mark.parametrize("columns, rows", [(0, 0), (80, 0), (80, 24)])
def test_a_terminal_without_a_size_gets_lines(tmp_path, monkeypatch, columns, rows):
    """The progress bar would be nothing there."""
    monkeypatch.setattr(sys, "stdout", terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda fd=1: os.terminal_size((columns, rows)))
    log = begun(tmp_path)
    assert log._text._bar.disable == (rows == 0)
    log.close()


def test_a_bar_of_120_columns_has_a_bar_one_eta_and_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda fd=1: os.terminal_size((120, 40)))
    log = begun(tmp_path)
    bar = log._text._bar
    bar.n, bar.total = 150, 300
    bar.set_description_str("loss 4.7627 | lr 4.1e-03 | grad 0.46 | 8.02k tok/s | 35.1% MFU | 0.9 GB | "
                                 "eta 01:23 | Sync=OK", refresh=False)
    text = bar.format_meter(**bar.format_dict | {"ncols": 120})
    log.close()
    assert text.startswith("|█████     | 150/300 | loss 4.7627") and text.endswith("eta 01:23 | Sync=OK")


def test_a_bar_is_drawn_on_the_stream_that_is_a_terminal(tmp_path, monkeypatch, capsys):
    screen = terminal()
    drawn = []
    screen.write = drawn.append
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd=1: os.terminal_size((80, 24)))
    log = begun(tmp_path)
    log._text.tick(10)
    log.close()
    assert "10/10" in "".join(drawn) and capsys.readouterr().err == ""


def test_lines_where_tqdm_is_disabled():
    """Its variable is read when it is imported."""
    code = ("import os, pty, sys, tqdm, monitor; os.get_terminal_size = lambda fd: (80, 24); "
            "log = monitor.TrainLog('rank 0'); log.begin(0, 9); "
            "log.write({'step': 1, 'loss': 2.0}, 'loss 2')")
    command = f"import pty; pty.spawn([{sys.executable!r}, '-c', {code!r}])"
    done = finish(start([sys.executable, "-c", command], TQDM_DISABLE=1))
    assert done.code == 0 and done.out.strip().endswith(" rank 0 step 1/9 | loss 2"), done.out


def test_closed_streams_are_no_traceback(tmp_path, corpus):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    prepare = f"data.py prepare --dataset text:{corpus} --tokenizer bytes --out {tmp_path}/sh"
    for command in (f"monitor.py {tmp_path}/one", prepare, f"data.py info {tmp_path}/sh",
                    "train_gpt2.py --dry-run"):
        done = finish(start(["bash", "-c", f"{sys.executable} {command} >&-"], cwd=ROOT))
        assert done.code == 0 and "Error" not in done.out, done.out
    done = finish(start(["bash", "-c", f"{sys.executable} {prepare}-2 <&- >&- 2>&-"], cwd=ROOT))
    assert done.code == 0 and (tmp_path / "sh-2" / "manifest.json").exists()


@pytest.mark.parametrize("bar", [False, True], ids=["lines", "progress bar"])
def test_a_terminal_that_is_gone_does_not_end_the_run(tmp_path, monkeypatch, bar):
    def gone(*_, **__):
        raise OSError(5, "Input/output error")

    log = log_with(tmp_path, 0, {"steps": 10})
    log._text._bar = SimpleNamespace(write=gone, disable=not bar)
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", gone)
        log.say("still here")
    assert STAMP.sub("", (tmp_path / "train.log").read_text()) == "still here\n"


@pytest.mark.parametrize("bar", [False, True], ids=["lines", "progress bar"])
def test_each_entry_has_the_time_and_the_first_of_a_day_the_date(tmp_path, monkeypatch, capsys, bar):
    """On the screen and in the file, though the screen does not show each line. A table follows its title."""
    screen = []
    log = log_with(tmp_path, 0, {"steps": 10})
    if bar:
        log._text._bar = SimpleNamespace(write=screen.append, disable=False, close=len,
                                         set_description_str=lambda *_, **__: None)
    for now, text in (("2026-12-31 23:59:58", "one"), ("2026-12-31 23:59:59", "a plan\n  rows  1"),
                      ("2027-01-01 00:00:00", None), ("2027-01-01 00:00:01", "two")):
        monkeypatch.setattr(time, "strftime", lambda form, now=now: now)
        log.say(text) if text else log.write(record(1), "loss 4.9")
    lines = ["2026-12-31 23:59:58 one", "23:59:59 a plan", "  rows  1",
             "2027-01-01 00:00:00 [Rank 0/1] step 1/10 | loss 4.9", "00:00:01 two"]
    assert (tmp_path / "train.log").read_text().splitlines() == lines
    if bar:  # which shows the step
        lines[3:] = ["2027-01-01 00:00:01 two"]
    assert ("\n".join(screen) or capsys.readouterr().out.strip()).splitlines() == lines


def metrics_of(means: dict) -> SimpleNamespace:
    """What Metrics says of a step."""
    return SimpleNamespace(reduce=lambda: means, machines=lambda: {"mem_gb": 0.1}, labels=8)


def test_ranks_that_are_not_active_write_nothing(tmp_path):
    log = log_with(tmp_path, 0, {"log_every": 1, "eval_every": 5, "steps": 10, "seq_len": 8}, active=False)
    log.say("x")
    log.write(record(1), "")
    log.step(metrics_of({"loss": 1.0}), 1, 8, 1.0, lr=1e-3)
    log.evaluation(1, 8, {"val_loss": 1.0})
    log.finish(1, 8, 0.0, "")
    assert log.evaluations == {1: 1.0}  # which all ranks have
    log.say("x")
    log.close()
    assert not any(tmp_path.iterdir())


# -----------------------------------------------------------------------------------------------------------
# Peaks


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA B200", 2250),
    ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 3090", 71),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 3090 Ti", None),
    ("NVIDIA RTX A1000", None), ("NVIDIA GH200 480GB", None), ("Tesla T4", None)])
def test_peaks(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    said = []
    peak = peak_flops(torch.device("cuda", 0), said.append)
    assert peak == (tflops and pytest.approx(tflops * 1e12))
    assert bool(said) == (tflops is None) and all(f"the peak of {name}" in text for text in said)


# -----------------------------------------------------------------------------------------------------------
# A run as a picture and as a line


def test_a_value_that_is_no_number_ends_no_start(tmp_path):
    """As a changed byte can leave: the record is kept, its other curves too."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1, lr="0.1", grad_norm=[1])) + "\n")
    log = begun(tmp_path, 1)
    log.close()
    assert curves(tmp_path)["Loss/train_step"] == [(1, pytest.approx(4.9))] and "LR" not in curves(tmp_path)


def test_a_sink_that_fails_is_left_out_alone(tmp_path, capsys):
    """It is said once, also of its end, and the others have each record."""
    def fail(*_):
        raise ConnectionError("gone")

    log, got = begun(tmp_path), []
    log.loggers += [SimpleNamespace(log=fail, close=len), SimpleNamespace(log=got.append, close=fail)]
    for step in range(1, 4):
        log.write(record(step), "")
    assert capsys.readouterr().out.count("SimpleNamespace fails (ConnectionError: gone)") == 1
    log.close()
    assert capsys.readouterr().out.count("SimpleNamespace fails (ConnectionError: gone)") == 1
    assert [r["step"] for r in got] == [r["step"] for r in monitor.read_metrics(tmp_path)] == [1, 2, 3]
    assert json.loads((tmp_path / "history.json").read_text())["step"] == [1, 2, 3]


def without_purge_step(monkeypatch):
    """A negative control: TensorBoard is not told what to forget."""
    made = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter",
                        lambda directory, purge_step, **named: made(directory, **named))


@pytest.mark.parametrize("kind", ["event_accumulator", "plugin_event_accumulator"])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("times", [1, 3])
def test_an_open_tensorboard_forgets_what_is_made_again(tmp_path, monkeypatch, kind, told, times):
    """Also what was evaluated and is not any more. No file is removed or cut, and each has all points, so
    that TensorBoard's faster reader, which a program cannot ask, shows the same.
    """
    if not told:
        without_purge_step(monkeypatch)
    log = begun(tmp_path)
    for step in range(1, 9):
        log.write(record(step), "")
    log.write({"step": 8, "val_loss": 4.0}, "")
    events = reader(tmp_path, kind)

    def seen(tag: str) -> list[int]:
        points = events.Reload().Scalars if kind == "event_accumulator" else events.Reload().Tensors
        return [event.step for event in points(tag)]

    assert seen("Loss/train_step") == [*range(1, 9)] and seen("Loss/val_epoch") == [8]
    sizes = {path: path.stat().st_size for path in (tmp_path / "tb").iterdir()}
    for _ in range(times):  # killed each time
        log = begun(tmp_path, 5)
        log.write(record(6), "")
    assert (seen("Loss/train_step") == [*range(1, 7)]) == told
    assert seen("Loss/val_epoch") == [8] * (not told)
    for path in (tmp_path / "tb").iterdir():
        if path in sizes:
            assert path.stat().st_size == sizes[path]
        else:
            (tmp_path / "one" / "tb").mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / "one" / "tb")
            assert [step for step, _ in curves(tmp_path / "one")["Loss/train_step"]] == [1, 2, 3, 4, 5, 6]
            shutil.rmtree(tmp_path / "one")


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 30, 100])
def test_a_kill_in_the_middle_of_a_record_costs_no_point(tmp_path, monkeypatch, told, cut):
    """Of which a part is in the file. An open TensorBoard waits for the rest in vain."""
    if not told:
        without_purge_step(monkeypatch)
    log = begun(tmp_path)
    for step in range(1, 6):
        log.write(record(step), "")
    path, = (tmp_path / "tb").iterdir()
    os.truncate(path, path.stat().st_size - cut)
    events = reader(tmp_path)
    assert len(events.Reload().Scalars("Loss/train_step")) == 5 - bool(cut)
    log = begun(tmp_path, 5)
    log.write(record(6), "")
    found = [event.step for event in events.Reload().Scalars("Loss/train_step")]
    assert found == [step for step, _ in curves(tmp_path)["Loss/train_step"]]
    assert (found == [1, 2, 3, 4, 5, 6]) == told


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_directory_of_curves_that_was_removed_has_all_again(tmp_path, capsys):
    """The next record notices, and the next start writes all."""
    log = begun(tmp_path)
    log.write(record(1), "")
    shutil.rmtree(tmp_path / "tb")
    for step in (2, 3, 4):
        log.write(record(step), "")
    assert capsys.readouterr().out.count("EventFile fails") == 1
    begun(tmp_path, 4)
    assert [step for step, _ in curves(tmp_path)["Loss/train_step"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("broken", [
    b'{"step": 3, "lo', b"\0" * 40, b"[1]", b"5", b'"step"', b"{}", b'{"step": "x"}', b'{"step": 3.0}',
    b'{"step": true}'])
@pytest.mark.parametrize("place", [0, 4, 10])
def test_a_broken_line_loses_no_other(tmp_path, capsys, broken, place):
    lines = [json.dumps(record(step)).encode() for step in range(1, 11)]
    lines.insert(place, broken)
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b""]))
    log = begun(tmp_path, 10)
    assert [r["step"] for r in log.records] == list(range(1, 11))
    warning = f"WARNING: 1 of 11 lines of {tmp_path}/metrics.jsonl are broken and left out"
    assert warning in capsys.readouterr().out
    log.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 10
    assert begun(tmp_path, 10).records == log.records and "WARNING" not in capsys.readouterr().out


def test_a_log_of_broken_lines_alone_is_said(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(b"\0" * 40 + b"\nxx\n")
    assert begun(tmp_path, 10).records == []
    assert "WARNING: 2 of 2 lines of" in capsys.readouterr().out


def test_the_summary_of_a_run_says_how_many_lines_are_broken(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\nxx\n")
    main([str(tmp_path)])
    assert "WARNING: 1 of 2 lines of" in capsys.readouterr().err


def test_a_copied_file_among_the_curves_does_not_end_a_run(tmp_path):
    begun(tmp_path, 0).close()
    for name in ("copy", "12.backup"):
        (tmp_path / "tb" / f"events.out.tfevents.{name}").write_bytes(b"")
    log = begun(tmp_path, 5)
    log.write(record(6), "")
    log.close()
    assert 6 in [step for step, _ in curves(tmp_path)["Loss/train_step"]]


def test_files_that_vanish_do_not_end_a_finished_run(tmp_path, monkeypatch):
    """Such as those of another service, while the size of the run is added up."""
    log = begun(tmp_path, seq_len=8)
    log.start_clock(0, 0)
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: [*walk(top), (str(tmp_path), [], ["gone"])])
    log.finish(1, 1, 0.1, "training complete")


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_a_number_of_a_trainer_of_ones_own_is_a_curve_everywhere(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    log = begun(tmp_path, log_every=1, eval_every=5, seq_len=8, world_size=1)
    log.start_clock(0, 0)
    log.step(metrics_of({"loss": 1.5}), 1, 4, 1.0, lr=1e-3, mine=2.5)
    log.close()
    assert "| mine 2.5 |" in capsys.readouterr().out
    assert monitor.read_metrics(tmp_path)[0]["mine"] == 2.5
    assert curves(tmp_path)["Train/mine"] == [(1, 2.5)]
    assert png_size(tmp_path / "training_history.png") == (800, 960)  # a picture below the three others


def test_the_picture_has_the_exact_matches(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *given, **named: (
        drawn.append(self.axes[-1]), save(self, *given, **named)))
    found = {"val_loss": 1.0, "val_exact": 0.5, "val_exact/easy": 0.75, "val_exact/hard": 0.25}
    records = [record(1), {"step": 1, "tokens": 32, **found}]
    picture.draw_curves("run", records, tmp_path / "run.png")
    axes, = drawn
    line, = axes.lines
    assert axes.get_ylabel() == "val_exact" and [*line.get_ydata()] == [0.5]


def test_the_picture_is_drawn_at_each_evaluation(tmp_path, monkeypatch):
    """Unless these come so fast that it would take more than 5 % of the time."""
    log, now, drawn = begun(tmp_path), [0.0], []

    def draw(name, records, path):
        assert name == tmp_path.name
        drawn.append(records[-1]["step"])
        now[0] += 1.0

    monkeypatch.setattr(picture, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(picture, "draw_curves", draw)
    for step in range(100, 700, 100):
        log.write(record(step), "")
        log.write({"step": step, "val_loss": 1.0}, "")
        now[0] += 40.0 if step < 400 else 9.0
    assert drawn == [100, 200, 300, 400]
    log.close()
    assert drawn[-1] == 600


@pytest.mark.parametrize("val_tokens, logged", [(8, [1, 3, 4, 6, 8, 9, 10]), (0, [1, 4, 8, 10])])
def test_which_steps_are_logged(tmp_path, val_tokens, logged):
    """Those with an evaluation, too, if there is anything to evaluate."""
    log = begun(tmp_path, 0, val_tokens, log_every=4, eval_every=3)
    assert [step for step in range(1, 11) if log.wants(step)] == logged


def test_of_equal_losses_the_first_is_the_best(tmp_path, capsys):
    log = begun(tmp_path, seq_len=8)
    log.evaluations = {2: 4.0, 4: 3.0, 9: 3.0}
    log.start_clock(0, 0)
    log.finish(10, 80, 0.1, "the end")
    assert "best evaluation 3.0000 at step 4;" in capsys.readouterr().out


def test_an_evaluation_that_found_no_number_is_made_again(tmp_path):
    """So after each start the log has one record of it, as of all others."""
    for _ in range(3):
        log = begun(tmp_path, 1 if (tmp_path / "metrics.jsonl").exists() else 0)
        assert log.evaluations == {}
        if not log.records:
            log.write(record(1), "")
        log.write({"step": 1, "val_loss": math.nan}, "")
        log.close()
    assert [("loss" in r, r.get("val_loss")) for r in monitor.read_metrics(tmp_path)] == [
        (True, None), (False, None)]


def test_a_run_that_diverged_does_not_look_as_if_it_had_not():
    records = [{"step": 10, "loss": 2.0, "tokens": 10}, {"step": 20, "loss": None, "tokens": 20},
               {"step": 20, "val_loss": None, "tokens": 20}]
    found = summarize(records)
    assert (found["step"], found["loss"], found["val_loss"]) == (20, None, None)


def test_a_run_as_a_line_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = tmp_path / "one"
    run.mkdir()
    records = [record(step, val_loss=None if step % 5 else 3.5 + (step - 15) ** 2 / 100)
               for step in range(1, 21)]
    text = "".join(json.dumps(r) + "\n" for r in records)
    (run / "metrics.jsonl").write_text(text + '{"step": 21, "loss": 9')  # it is being written
    code, out, errors = command(capsys, run)
    assert code == 0 and f"the curves are in {run / 'training_history.png'}" in errors
    line, = out.splitlines()
    assert json.loads(line) == {"run": "one", "step": 20, "loss": 3.0, "tokens": 2000, "tokens_per_sec": 50.0,
                                "val_loss": 3.75, "best_val_loss": 3.5, "best_step": 15,
                                "tokens_per_sec_per_process": None, "efficiency": None}
    assert png_size(run / "training_history.png") == (800, 800)


def test_a_run_that_draws_its_picture_while_the_command_does(tmp_path, capsys, monkeypatch):
    """Neither takes the other's file."""
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in (1, 2)))
    real = os.fsync

    def fsync(descriptor):
        monkeypatch.setattr(os, "fsync", real)
        write_atomically(tmp_path / "training_history.png", b"of the run")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    code, _, errors = command(capsys, tmp_path)
    assert code == 0 and "the curves are in" in errors, errors
    assert png_size(tmp_path / "training_history.png")[0] == 800
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "training_history.png"}


def test_a_run_that_has_just_begun_can_be_looked_at(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").touch()
    code, out, _ = command(capsys, tmp_path)
    assert code == 0 and (found := json.loads(out))["step"] == 0 and found["loss"] is None


# -----------------------------------------------------------------------------------------------------------
# With the trainers


# Ends itself by kill -9 at one of the two records of step 8. A save begins between the two, in a thread.
KILLED = """
import os, signal, sys, time
from pathlib import Path
import monitor, train_gpt2
from ddp_utils import launch
kind, where = sys.argv.pop(1), sys.argv.pop(1)
write_all, tell = monitor.RunLog.write, monitor.RunLog._tell
def here(record):
    return record["step"] == 8 and ("val_loss" if kind == "evaluation" else "loss") in record
def die(file):
    out = Path(file.name).parent
    while kind == "evaluation" and not list((out / "checkpoints").glob("step_00000008*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
def write(log, record, line):
    if where == "before" and here(record): die(log._metrics)
    write_all(log, record, line)
    if where == "after" and here(record): die(log._metrics)
def tell_sinks(log, call):
    if where == "between" and here(log.records[-1]): die(log._metrics)
    tell(log, call)
monitor.RunLog.write, monitor.RunLog._tell = write, tell_sinks
launch(train_gpt2.main)
"""


@pytest.mark.full
@needs_psutil
@pytest.mark.parametrize("where", ["between", *(
    pytest.param(where, marks=pytest.mark.long) for where in ("before", "after"))])
@pytest.mark.parametrize("kind, step", [("training", 4), ("evaluation", 8)])
def test_kill_9_at_a_record(tmp_path, shards, kind, step, where):
    """Before the record, between metrics.jsonl and TensorBoard, or after them: always one point a step. A
    step is saved after its training record and before its evaluation.
    """
    from runs import Trainer
    gpt2, out = Trainer("train_gpt2.py", max_new_tokens=5), tmp_path / "run"
    changes = {"steps": 16, "eval_every": 4, "save_every": 4}
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    died = finish(start([sys.executable, script, kind, where, *gpt2.flags(shards, out, **changes)]))
    assert died.code == -signal.SIGKILL, died.out
    done = gpt2.train(0, shards, out, **changes)
    assert done.code == 0 and f"resuming after step {step} " in done.out, done.out
    records = monitor.read_metrics(out)
    history = json.loads((out / "history.json").read_text())
    assert [r["step"] for r in records if "loss" in r] == [*range(1, 17)]
    assert [r["step"] for r in records] == history["step"]
    found = curves(out)
    for tag, key in ("Loss/train_step", "loss"), ("Loss/val_epoch", "val_loss"), ("LR", "lr"):
        expected = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        assert [step for step, _ in found[tag]] == [step for step, _ in expected], tag
        assert [v for _, v in found[tag]] == pytest.approx([v for _, v in expected]), tag
        assert history[key] == [r.get(key) for r in records]
    assert [s for s, _ in found["Loss/val_epoch"]] == [4, 8, 12, 16]
    assert [s for s, _ in found["System/CPU_percent"]] == [*range(1, 17)]


# -----------------------------------------------------------------------------------------------------------
# In a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """Headless Chromium over a pair of pipes, in the DevTools protocol."""

    def __init__(self, profile: Path):
        theirs, self.write = os.pipe()
        self.read, answers = os.pipe()
        self.process = subprocess.Popen([
            "bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "-", CHROMIUM, "--headless", "--no-sandbox",
            "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--window-size=1400,2600",
            f"--user-data-dir={profile}", "--remote-debugging-pipe"], pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(answers)
        self.count, self.rest, self.session = 0, b"", {}
        page = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]}

    def __call__(self, method: str, **params) -> dict:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                piece = os.read(self.read, 2**20)
                assert piece, "the browser is gone"
                self.rest += piece
            answer, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(answer)
            if answer.get("id") == self.count:
                return answer["result"]

    def wait_for(self, script: str, *wanted: str, timeout: float = 30) -> None:
        """Runs a script again and again until the page has all that is wanted."""
        deadline = time.monotonic() + timeout
        while True:
            self("Runtime.evaluate", expression=script)
            text = self("Runtime.evaluate", expression="document.body.innerText")["result"].get("value", "")
            flat = text.replace("\n", "")
            if all(w in flat for w in wanted):
                return
            assert time.monotonic() < deadline, flat
            time.sleep(0.5)


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_tensorboard_shows_the_curves_in_a_browser(tmp_path, shards):
    """The picture is $SCREENSHOT, if that is set, to be looked at."""
    pytest.importorskip("tensorboard")
    imread = pytest.importorskip("matplotlib.image").imread
    from runs import Trainer
    Trainer("train_gpt2.py", max_new_tokens=5).train(0, shards, tmp_path / "run", eval_every=10)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    board = start([sys.executable, "-m", "tensorboard.main", "--logdir", tmp_path, "--port", port])
    browser = Browser(tmp_path / "profile")
    try:
        while "Press CTRL+C" not in board.stdout.readline():
            assert board.poll() is None
        browser("Page.navigate", url=f"http://localhost:{port}/#timeseries")
        opens = "document.querySelectorAll('[aria-label=\"Expand group\"]').forEach(b => b.click())"
        browser.wait_for(opens, "Loss/train_step", "Loss/val_epoch", "LR", "TEXT", "HPARAMS")
        blue, deadline = [66, 80, 102], time.monotonic() + 60  # the first run's color
        while True:  # the lines come after the axes: before, this color is in some dots only
            picture = base64.b64decode(browser("Page.captureScreenshot")["data"])
            pixels = imread(io.BytesIO(picture))[:, 280:1130, :3] * 255
            if (abs(pixels - blue).max(axis=2) < 12).any(axis=0).sum() > 200:
                break
            assert time.monotonic() < deadline
            time.sleep(1)
        if "SCREENSHOT" in os.environ:
            Path(os.environ["SCREENSHOT"]).write_bytes(picture)
    finally:
        browser.process.kill()
        kill(board)


def test_a_step_with_a_criterion_is_no_evaluation():
    """Which other ranks than the first, that has all records, would not know of."""
    records = [{"step": 1, "loss": 2.0, "best_metric": 1.0}, {"step": 2, "val_loss": 2.0}]
    assert monitor.evaluations_of(records) == {2: 2.0}

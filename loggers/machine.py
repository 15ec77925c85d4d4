"""Reads the machine: CPU, RAM, disk, network and GPUs. GB and MB are 2^30 and 2^20 bytes, as in nvidia-smi,
htop and torch's messages.
"""

import functools
import operator
import re
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

from cli.errors import PACKAGE_ERRORS, first_line
from monitor import format_known

GB = 2**30
MB = 2**20


def why_not(package: str, error: BaseException) -> str:
    """Why an optional package failed, as one line. An installed package can raise anything, also on import.
    """
    missing = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == package
    return f"pip install {package}" if missing else first_line(error)


def cpu_and_ram() -> dict:
    """CPU use since the last call, RAM in bytes. Raises whatever psutil raises."""
    import psutil
    memory = psutil.virtual_memory()
    return {"cpu_percent": psutil.cpu_percent(), "ram_percent": memory.percent,
            "ram_used": memory.total - memory.available, "ram_total": memory.total}


def begin_curves(say):
    """Says why there won't be curves of CPU and RAM, if psutil fails."""
    try:
        cpu_and_ram()  # the first record has the mean since this call
    except PACKAGE_ERRORS as error:
        say(f"curves of CPU and RAM are not written: {why_not('psutil', error)}")


def machine_curves(suffix: str = "") -> dict[str, float]:
    """CPU use since the last call and RAM, in percent. For the current GPU also the MB that torch has
    reserved and, with nvidia-ml-py, the use in percent. `suffix` ends the name of each curve.
    """
    import torch
    values = {}
    with suppress(*PACKAGE_ERRORS):  # begin_curves says what's missing
        now = cpu_and_ram()
        values = {f"System/CPU_percent{suffix}": now["cpu_percent"],
                  f"System/RAM_percent{suffix}": now["ram_percent"]}
    if torch.cuda.is_initialized():
        values[f"System/GPU_VRAM_MB{suffix}"] = torch.cuda.memory_reserved() / MB
        with suppress(*PACKAGE_ERRORS):  # no nvidia-ml-py, or an NVMLError: some GPUs don't report it
            values[f"System/GPU_percent{suffix}"] = torch.cuda.utilization()
    return values


def combined(memory: list[float], curves: list[dict]) -> dict[str, float]:
    """The record of all processes, given the peak memory and the machine_curves of each: the largest peak,
    the curves of each machine's first process, and with several GPUs the use of the least and the most used.
    """
    record = functools.reduce(operator.or_, reversed(curves), {"mem_gb": round(max(memory), 3)})
    used = [values[key] for values in curves for key in values if "GPU_percent" in key]
    if len(used) > 1:
        record |= {"System/GPU_percent_least": min(used), "System/GPU_percent_most": max(used)}
    return record


def hardware(device) -> str:
    """The name and size of a GPU, a torch device, or "CPU"."""
    import torch
    gpu = device.type == "cuda" and torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" if gpu else "CPU"


def memory_gb(device) -> float:
    """Peak memory so far in GB: tensors on a GPU, the whole process on a CPU."""
    import torch
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, in kB elsewhere
    return peak / (GB if sys.platform == "darwin" else MB)


def network_traffic() -> tuple[int, int]:
    """Bytes (received, sent) so far on all interfaces except loopback."""
    import psutil
    counters = [c for name, c in psutil.net_io_counters(pernic=True).items() if not name.startswith("lo")]
    return sum(c.bytes_recv for c in counters), sum(c.bytes_sent for c in counters)


def is_trainer(command: list[str]) -> bool:
    """Whether a command line is Python running a trainer, not torchrun starting one."""
    script = next((part for part in command[1:] if part and not part.startswith("-")), "")
    # the program is called Python on macOS
    return bool(re.fullmatch(r"train_\w+\.py", Path(script).name)) and "ython" in Path(command[0]).name


def read_gpus() -> list[dict]:
    """A dict for each GPU, with None for values it doesn't report. Empty without nvidia-ml-py or a driver."""
    try:
        import pynvml
        pynvml.nvmlInit()  # repeated calls cost nothing
        count = pynvml.nvmlDeviceGetCount()
    except PACKAGE_ERRORS:  # not installed, or an NVMLError: no driver, or another version
        return []

    def query(name, *args):
        try:
            return getattr(pynvml, f"nvmlDeviceGet{name}")(*args)
        except PACKAGE_ERRORS:
            return None

    gpus = []
    for i in range(count):
        gpu = query("HandleByIndex", i)  # None if the GPU is lost
        load, memory, power = (query(name, gpu) for name in ("UtilizationRates", "MemoryInfo", "PowerUsage"))
        values = {"index": i, "name": query("Name", gpu), "utilization_percent": load and load.gpu,
                  "memory_used": memory and memory.used, "memory_total": memory and memory.total}
        values["power_watts"] = power and power / 1000
        values["temperature_celsius"] = query("Temperature", gpu, pynvml.NVML_TEMPERATURE_GPU)
        gpus.append(values)
    return gpus


def read_machine(seconds: float) -> dict:
    """Watches the machine for `seconds`; CPU and network are means over that time. Sizes are in bytes.
    `process_ram` is the RAM of all trainers, or of this process if none runs. Raises whatever psutil raises.
    """
    import psutil
    psutil.cpu_percent()  # the next call returns the mean since this one
    before = network_traffic()
    time.sleep(seconds)
    received, sent = (round((b - a) / seconds) for a, b in zip(before, network_traffic()))
    trainers = [p.info["memory_info"].rss for p in psutil.process_iter(["cmdline", "memory_info"])
                if is_trainer(p.info["cmdline"] or []) and p.info["memory_info"]]
    process_ram = sum(trainers) or psutil.Process().memory_info().rss
    disk = psutil.disk_usage(".")
    return {"time": time.strftime("%Y-%m-%d %H:%M:%S"), **cpu_and_ram(), "process_ram": process_ram,
            "disk_percent": disk.percent, "disk_used": disk.used, "disk_total": disk.total,
            "received_per_sec": received, "sent_per_sec": sent, "gpus": read_gpus()}


def format_reading(r: dict) -> list[str]:
    """The result of read_machine as lines of text."""
    def gigabytes(used: int, total: int) -> str:
        return f"{used / GB:.1f} GB / {total / GB:.1f} GB"

    gpu_formats = {"utilization_percent": "Util: {:.0f}%", "memory": "Memory: {}",
                   "power_watts": "Power: {:.0f} W", "temperature_celsius": "Temp: {:.0f} C"}
    ram = gigabytes(r["ram_used"], r["ram_total"])
    disk = gigabytes(r["disk_used"], r["disk_total"])
    network = f"{r['received_per_sec'] / MB:.1f} MB/s in, {r['sent_per_sec'] / MB:.1f} MB/s out"
    own = f"process RAM: {r['process_ram'] / GB:.1f} GB"
    lines = [f"[{r['time']}] CPU: {r['cpu_percent']:.1f}% | RAM: {r['ram_percent']:.1f}% ({ram}) | {own}"]
    lines.append(f"  - Disk: {r['disk_percent']:.1f}% ({disk}) | Network: {network}")
    for gpu in r["gpus"]:
        if gpu["memory_total"] is not None:
            gpu = gpu | {"memory": gigabytes(gpu["memory_used"], gpu["memory_total"])}
        lines.append(" | ".join([f"  - GPU {gpu['index']} ({gpu['name']})", *format_known(gpu, gpu_formats)]))
    return lines

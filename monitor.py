"""Watches a machine; writes and draws the log of a run.

    python monitor.py                                    # CPU, RAM, disk, network and GPUs, every 4 seconds
    python monitor.py --once --json                      # one reading, for a script
    python monitor.py runs/hrm-tiny-stdlib-bpe4096       # a summary of the run, and its curves as a PNG
    watch -n 4 python monitor.py runs/one                # again and again, in a remote terminal
    tensorboard --logdir runs                            # compares runs

A trainer reports to a RunLog, which writes to the run directory: all printed text (train.log), a JSON object
for each logged step and each evaluation (metrics.jsonl), the same data as lists (history.json), and, if
matplotlib and tensorboard are installed, the curves as a picture and for TensorBoard. A logged step has one
line and one point in each curve, even after a kill. GB and MB are 2^30 and 2^20 bytes, as in nvidia-smi,
htop and torch's messages. Only functions for trainers import torch, so the commands start at once.
"""

import io
import json
import math
import os
import re
import resource
import sys
import threading
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tqdm import tqdm  # comes with datasets

from data import ArgumentParser, UserError, access, first_line, say, write_atomically

GB = 2**30
MB = 2**20
FAULTS = (Exception, SystemExit)  # what an optional package may raise; Ctrl-C is none of them

# Dense bf16 tensor-core peaks in TFLOP/s, with float32 accumulation, by the names that the driver gives; the
# first match counts. From NVIDIA's data sheets for A100, H100, H200 and HGX B200 (where the figures with
# sparsity are twice as high), and its white papers on Ada (RTX 4090) and GA102 (RTX 3090).
PEAK_TFLOPS = {r"\bA100\b": 312, r"\bH100 PCIe": 756, r"\bH100 NVL": 835, r"\bH100\b": 989,
               r"\bH200 NVL": 835, r"\bH200\b": 989, r"\bB200\b": 2250,
               r"RTX 4090$": 165.2, r"RTX 3090$": 71}


def peak_flops(device, say=print) -> float | None:
    """Peak bf16 FLOP/s of a GPU, a torch device. If it is unknown, says so and returns None, as for a CPU."""
    import torch
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(pattern, name):
            return tflops * 1e12
    say(f"MFU is not shown, unknown peak of this {name}: add it to PEAK_TFLOPS in monitor.py")
    return None


def memory_gb(device) -> float:
    """Peak memory so far in GB: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        import torch
        return torch.cuda.max_memory_allocated(device) / GB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, in kB elsewhere
    return peak / (GB if sys.platform == "darwin" else MB)


# -----------------------------------------------------------------------------------------------------------
# The machine


def why_not(package: str, error: BaseException) -> str:
    """Why an optional package did not do its part, as one line. One that is there may raise anything, when it
    is imported or later.
    """
    missing = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == package
    return f"pip install {package}" if missing else first_line(error)


def cpu_and_ram() -> dict:
    """CPU use since the last call, RAM in bytes. Raises whatever psutil does."""
    import psutil
    memory = psutil.virtual_memory()
    return {"cpu_percent": psutil.cpu_percent(), "ram_percent": memory.percent,
            "ram_used": memory.total - memory.available, "ram_total": memory.total}


def machine_curves(suffix: str = "") -> dict[str, float]:
    """CPU use since the last call and RAM, in percent; for this thread's GPU, the memory reserved by torch in
    MB, and the use in percent, which needs nvidia-ml-py. `suffix` ends the name of each curve.
    """
    import torch
    values = {}
    with suppress(*FAULTS):  # RunLog.begin says what is missing
        now = cpu_and_ram()
        values = {f"System/CPU_percent{suffix}": now["cpu_percent"],
                  f"System/RAM_percent{suffix}": now["ram_percent"]}
    if torch.cuda.is_initialized():
        values[f"System/GPU_VRAM_MB{suffix}"] = torch.cuda.memory_reserved() / MB
        with suppress(*FAULTS):  # no nvidia-ml-py, or an NVMLError: not every GPU reports it
            values[f"System/GPU_percent{suffix}"] = torch.cuda.utilization()
    return values


def network_traffic() -> tuple[int, int]:
    """Bytes (received, sent) so far on all interfaces except loopback."""
    import psutil
    counters = [c for name, c in psutil.net_io_counters(pernic=True).items() if not name.startswith("lo")]
    return sum(c.bytes_recv for c in counters), sum(c.bytes_sent for c in counters)


def is_trainer(command: list[str]) -> bool:
    """Whether a command line is Python running a trainer (not torchrun, which only starts trainers)."""
    script = next((part for part in command[1:] if part and not part.startswith("-")), "")
    return bool(re.fullmatch(r"train_\w+\.py", Path(script).name)) and "python" in Path(command[0]).name


def read_gpus() -> list[dict]:
    """A dict for each GPU, with None for unreported values. Empty without nvidia-ml-py or a driver."""
    try:
        import pynvml
        pynvml.nvmlInit()  # repeated calls cost nothing
        count = pynvml.nvmlDeviceGetCount()
    except FAULTS:  # not installed, or an NVMLError: no driver, or one of another version
        return []

    def query(name, *args):
        try:
            return getattr(pynvml, f"nvmlDeviceGet{name}")(*args)
        except FAULTS:
            return None

    found = []
    for i in range(count):
        gpu = query("HandleByIndex", i)  # None if it is lost
        load, memory, power = (query(name, gpu) for name in ("UtilizationRates", "MemoryInfo", "PowerUsage"))
        values = {"index": i, "name": query("Name", gpu), "utilization_percent": load and load.gpu,
                  "memory_used": memory and memory.used, "memory_total": memory and memory.total}
        values["power_watts"] = power and power / 1000
        values["temperature_celsius"] = query("Temperature", gpu, pynvml.NVML_TEMPERATURE_GPU)
        found.append(values)
    return found


def read_machine(seconds: float) -> dict:
    """Watches the machine for `seconds`; CPU and network are means over that time. Sizes are in bytes.
    `process_ram` is the RAM of all trainers, or else of this process. Raises whatever psutil does.
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


def format_known(values: dict, formats: dict[str, str]) -> list[str]:
    """Formats the values that are present and not None, in the order of `formats`."""
    return [text.format(values[key]) for key, text in formats.items() if values.get(key) is not None]


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


# -----------------------------------------------------------------------------------------------------------
# What a trainer reports

# Tags of the curves in TensorBoard, by the keys of a record
TAGS = {"loss": "Loss/train_step", "epoch_loss": "Loss/train_epoch", "val_loss": "Loss/val_epoch",
        "epoch_seconds": "Time/epoch_seconds", "lr": "LR", "grad_norm": "GradNorm",
        "tokens_per_sec": "Throughput/tokens_per_sec", "mfu": "Throughput/mfu",
        "bp_steps": "HRM/bp_steps", "cycles": "HRM/cycles", "ponder": "HRM/ponder",
        "val_cycles": "HRM/val_cycles", "val_ponder": "HRM/val_ponder",
        "val_exact": "Pairs/val_exact", "val_accuracy": "MLM/val_accuracy",
        "val_bits_per_byte": "Loss/val_bits_per_byte", "System": "System"}

# Other keys of the record of a training step. A key that is in neither was named by a trainer.
OTHER_KEYS = {"step", "skipped", "tokens", "labels", "mem_gb", "time"}

# What a trainer or a model of one's own cannot call its numbers
TAKEN = OTHER_KEYS | {"grad_norm", "mfu", "tokens_per_sec", "epoch_loss", "epoch_seconds", "bytes", "System",
                      "accuracy", "bits_per_byte"}

# Formats for the results of an evaluation, by the keys of a record, in the order of printing
EVALUATION = {"val_loss": "validation loss {:.4f}", "val_accuracy": "accuracy {:.1%}",
              "val_exact": "exact match {:.1%}",
              "val_bits_per_byte": "{:.4f} bits per byte"}


def read_metrics(run_directory: Path, say=lambda text: None) -> list[dict]:
    """The records of a run. Says how many lines are broken, as a kill or a crash can leave them. Raises
    NotNow if the file cannot be read, and FileNotFoundError.
    """
    records = []
    path = Path(run_directory, "metrics.jsonl")
    with access(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            if type(record["step"]) is int:  # neither 1.0 nor true, as a changed byte can leave
                records.append(record)
    if broken := len(lines) - len(records):
        say(f"WARNING: {broken} of {len(lines)} lines of {run_directory}/metrics.jsonl are broken and left "
            "out")
    return records


def criterion_of(record: dict) -> float | None:
    """The number by which an evaluation is the best if it is the lowest: `criterion`, which a trainer can
    set, else `val_loss`. None in other records.
    """
    return record.get("criterion", record.get("val_loss"))


def has_own_criterion(records: list[dict]) -> bool:
    """Whether a trainer has set the criterion of the last evaluation."""
    return "criterion" in ([{}] + [r for r in records if "val_loss" in r])[-1]


def evaluations_of(records: list[dict]) -> dict[int, float]:
    """The criteria of evaluations by step; infinite where it is another number than that of the last one."""
    own = has_own_criterion(records)
    return {r["step"]: criterion_of(r) if ("criterion" in r) == own else math.inf
            for r in records if criterion_of(r) is not None}


def without_nan(record: dict) -> dict:
    """NaN and infinity, which JSON lacks, become None."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()}


def own_keys(record: dict) -> list[str]:
    """The keys of a record that are in neither TAGS nor OTHER_KEYS, nor of a single validation set."""
    known = TAGS.keys() | OTHER_KEYS
    return [key for key in record if key.partition("/")[0] not in known]


def refuse_taken(names: list[str]):
    """Raises UserError if a number of a step has a name that means something else in its record."""
    taken = [name for name in names if name in TAKEN or name.startswith("val_") or names.count(name) > 1]
    if taken:
        raise UserError(f"a number called {taken[0]} cannot be logged, because a record has another of that "
                        "name: choose another.")


def step_line(record: dict, eta: float, sync: str) -> str:
    """The record of a training step for people. `eta` is in seconds."""
    parts = [f"loss {record['loss']:.4f}", f"eta {tqdm.format_interval(eta)}"]  # first, in a narrow bar
    parts += [f"lr {record['lr']:.1e}", f"grad {record['grad_norm']:.2f}"]
    parts += [f"{key} {record[key]:.4g}" for key in own_keys(record) if record[key] is not None]
    parts.append(f"{tqdm.format_sizeof(record['tokens_per_sec'])} tok/s")
    if record["mfu"] is not None:
        parts.append(f"{record['mfu']:.1%} MFU")
    return " | ".join([*parts, f"{record['mem_gb']:.1f} GB", f"Sync={sync}"])


def results(found: dict) -> list[str]:
    """The result of an evaluation as texts; on each named set, exact matches for pairs, losses otherwise."""
    prefix, form = ("val_exact/", "{} {:.1%}") if "val_exact" in found else ("val_loss/", "{} {:.4f}")
    sets = [form.format(key.removeprefix(prefix), value) for key, value in found.items()
            if key.startswith(prefix)]
    own = [f"{key} {found[key]:.4g}" for key in own_keys(found) if "/" not in key]
    return format_known(found, EVALUATION) + own + [", ".join(sets)] * bool(sets)


@dataclass
class Clock:
    """Step, samples and time when training began here; samples and time after the last pause."""

    step: int
    samples: int
    began: float
    lap_samples: int
    lap_began: float


class TrainLog:
    """train.log and the screen: all that a run says, and a line for each record."""

    def __init__(self, path: Path, prefix: str, lost=lambda: ""):
        self._lost = lost  # see RunLog
        self._path = path
        self._prefix = prefix
        self._steps = 0  # of the run, see begin
        self._bar = tqdm(disable=True)  # until `begin`
        self._lock = threading.Lock()  # the thread that writes checkpoints also calls say
        self.open()

    def open(self):
        with access(self._path):
            self._file = open(self._path, "a", buffering=1, encoding="utf-8", errors="replace")

    def begin(self, step: int, steps: int):
        """Shows a progress bar after `step` of `steps`, if the screen is a terminal."""
        self._steps = steps
        if sys.stdout.isatty() and all(os.get_terminal_size(sys.stdout.fileno())):
            self._bar = tqdm(total=steps, initial=step, dynamic_ncols=True, file=sys.stdout,
                             bar_format="|{bar:10}| {n_fmt}/{total_fmt} | {desc}")

    def say(self, text: str, on_screen: bool = True):
        with self._lock:
            with suppress(OSError):  # the terminal may be gone
                if on_screen and self._bar.disable:  # as with TQDM_DISABLE
                    say(text)
                elif on_screen:
                    self._bar.write(text)
            with suppress(OSError, UserError):  # a full disk must not stop the training
                if not self._path.exists() and not self._lost():
                    self.open()
                    self._file.write("WARNING: train.log was removed, and begins anew here\n")
                self._file.write(text + "\n")

    def tick(self, step: int):
        """Advances the progress bar."""
        self._bar.update(step - self._bar.n)

    def write(self, record: dict, line: str):
        """Prints the line of an evaluation. That of a step appears in the progress bar, if there is one."""
        if "loss" not in record:
            return self.say(f"step {record['step']} | {line}")
        self._bar.set_description_str(line, refresh=False)
        head = f"{self._prefix} step {record['step']}/{self._steps}"
        self.say(f"{head} | {line}", on_screen=self._bar.disable)

    def close(self):
        self._bar.close()


class MetricsFile:
    """metrics.jsonl: a JSON object for each record."""

    def __init__(self, path: Path):
        self._path = path
        self._file = None

    def open(self, records: list[dict], settings: dict):
        """Replaces the file by one with these records, if there is space for it."""
        write_atomically(self._path, *(json.dumps(r).encode() + b"\n" for r in records))
        self._file = open(self._path, "a", buffering=1, encoding="utf-8")  # writes each line at once

    def write(self, record: dict):
        self._file.write(json.dumps(record) + "\n")

    def close(self):
        self._file.close()


class EventFile:
    """Curves for TensorBoard, and the settings as a text."""

    SUFFIX = "run"  # of the names of the files that are written here

    def __init__(self, directory: Path, say):
        self._directory = directory
        self._say = say
        self._writer = None  # none if nothing can be written

    def open(self, records: list[dict], settings: dict):
        """Writes these records into a new file, then empties that of the start before, which may hold points
        after the resumed step, and removes older ones.
        """
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.record_writer import RecordWriter
            self._directory.mkdir(exist_ok=True)
            # TensorBoard reads files in the order of their names, so a clock that goes back must not matter
            made = self._directory.glob("events.out.tfevents.[0-9]*.*")
            stamp = max([int(time.time()), *(int(path.name.split(".")[3]) + 1 for path in made)])
            path = self._directory / f"events.out.tfevents.{stamp}.{self.SUFFIX}"
            content = io.BytesIO()
            began = records[0].get("time") if records else time.time()
            text = "\n".join(f"    {name}: {value}" for name, value in settings.items())
            self._writer = RecordWriter(content)
            self._add(Event(wall_time=began, file_version="brain.Event:2"))
            # a TensorBoard that has read older files forgets their points
            self._add(Event(wall_time=began, session_log=SessionLog(status=SessionLog.START)))
            self._add(Event(wall_time=began, summary=text_pb("settings", text)))
            for record in records:
                self.write(record)
            found = self._directory.glob(f"events.out.tfevents.*.{self.SUFFIX}")
            earlier = sorted(path for path in found if not path.is_symlink())  # a link may lead anywhere
            write_atomically(path, content.getvalue())
            for old in (*earlier[:-1], *self._directory.glob(".tmp-*")):  # the latter after a kill
                old.unlink()
            for last in earlier[-1:]:
                os.truncate(last, 0)  # a TensorBoard that has it open would stay there if it were removed
            self._writer = RecordWriter(open(path, "ab"))
        except FAULTS as error:
            self._writer = None
            self._say(f"curves for TensorBoard are not written: {why_not('tensorboard', error)}")

    def _add(self, event):
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def write(self, record: dict):
        """Writes all points of a record as one event, so that a kill leaves all of them or none."""
        if not self._writer:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        own = "Train" if "loss" in record else "Val"
        points = []
        for key, value in record.items():
            base, slash, name = key.partition("/")  # the name of a validation set
            if isinstance(value, int | float) and base not in OTHER_KEYS:
                tag = TAGS.get(base, f"{own}/{base}") + slash + name
                points.append(Summary.Value(tag=tag, simple_value=value))
        self._add(Event(wall_time=record.get("time"), step=record["step"], summary=Summary(value=points)))

    def close(self):
        if self._writer:
            self._writer.close()


class WandbRun:
    """A run of Weights & Biases for each run directory, online or, as WANDB_MODE says, offline. Each start
    sends all records, because the one before may have been killed before it had sent its own; the server
    leaves out steps that it has.
    """

    living: ClassVar[list] = []  # what wandb.init returned, for finish_all

    def __init__(self, out: Path, say):
        self._out = out
        self._say = say
        self._run = None  # none if nothing can be sent

    def open(self, records: list[dict], settings: dict):
        self.close()
        began = str(settings.get("began")).split()[-1]  # tells apart two directories of one name
        # a service that a parent process started may still hold this run, of a start that was killed
        os.environ.pop("WANDB_SERVICE", None)
        try:
            import wandb
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", Path(settings["trainer"]).stem), dir=self._out,
                id=re.sub(r"[^\w.-]", "-", f"{self._out.name}-{began}"), name=self._out.name, resume="allow",
                reinit="create_new", config=settings, settings=wandb.Settings(console="off"))
            self.living.append(self._run)
            for record in records:
                self.write(record)
        except FAULTS as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "wandb":
                raise UserError("--wandb needs the package wandb: pip install wandb, or give --no-wandb.")
            self._run = None
            self._say(f"nothing is sent to Weights & Biases: {why_not('wandb', error)}")

    def write(self, record: dict):
        if self._run:
            self._run.log(record, step=record["step"])

    def close(self):
        if self._run in self.living:
            self.living.remove(self._run)
            with suppress(*FAULTS):
                self._run.finish()

    @classmethod
    def finish_all(cls, exit_code: int):
        """Ends what an error has left open; without this, wandb's own process drops what it has not sent."""
        while cls.living:
            with suppress(*FAULTS):
                cls.living.pop().finish(exit_code)


class RunLog:
    """The log of a run in directory `out`: a record for each logged step and each evaluation, which `write`
    passes to all `sinks`. A sink has open(records, settings), which gets all records so far, write(record)
    and close(); one of your own is added before `begin`. After an error of write, a sink is opened again for
    the next record. Every rank has a RunLog, but only that of rank 0 (`active`) prints and writes.
    """

    def __init__(self, out: Path, active: bool, prefix: str, lost=lambda: ""):
        """`lost()` says why nothing may be written any more, see ddp_utils.RunLock."""
        self.out = Path(out)
        self.active = active
        self.lost = lost
        self.records: list[dict] = []
        self.evaluations: dict[int, float] = {}  # their criteria by step, on all ranks
        self.clock: Clock | None = None  # see start_clock
        self.sinks = [MetricsFile(self.out / "metrics.jsonl"), EventFile(self.out / "tb", self.say)]
        self._behind = []  # the sinks that lack records, because a write has failed
        self._next_drawing = 0.0
        self._text = TrainLog(self.out / "train.log", prefix, lost) if active else None

    def say(self, text: str = ""):
        """Prints a text and appends it to train.log."""
        if self.active:
            self._text.say(text)

    def read_back(self, step: int) -> dict[int, float]:
        """Reads the records up to `step`, that of the checkpoint. Returns the criteria of its evaluations by
        step. That of `step` may be missing if the run was killed before its evaluation.
        """
        with suppress(FileNotFoundError):
            for record in read_metrics(self.out, self.say):
                # an evaluation of this step without a finite criterion is repeated
                failed = "loss" not in record and criterion_of(record) is None
                if record["step"] < step or record["step"] == step and not failed:
                    self.records.append(record)
        return evaluations_of(self.records)

    def begin(self, step: int, settings: dict, facts: dict, files: dict[str, str],
              evaluations: dict[int, float]):
        """Opens the files of a run that has done `step` steps. `settings` are its flags, `facts` what
        ddp_utils.begin_log knows of data and device, `files` texts that belong into the directory, by name,
        and `evaluations` what read_back returned on rank 0. Raises UserError if nothing can be written.
        """
        self.settings = settings
        self.facts = facts
        self.files = files
        self.evaluations = evaluations
        if not self.active:
            return
        self._write_files()
        for sink in self.sinks:
            sink.open(self.records, settings)
        try:
            cpu_and_ram()  # the first record has the mean from now on
        except FAULTS as error:
            self.say(f"curves of CPU and RAM are not written: {why_not('psutil', error)}")
        self._text.begin(step, settings["steps"])

    def _write_files(self):
        for name, text in self.files.items():
            write_atomically(self.out / name, text.encode())

    def start_clock(self, step: int, samples: int):
        """Starts the clock when the run has done `step` steps and `samples` samples."""
        now = time.perf_counter()
        self.clock = Clock(step, samples, now, samples, now)

    def restart_clock(self, samples: int):
        """Excludes a pause that ends now, such as an evaluation, from tokens per second."""
        self.clock.lap_samples = samples
        self.clock.lap_began = time.perf_counter()

    def wants(self, step: int, ends_epoch: bool) -> bool:
        """Whether a step is logged."""
        run = self.settings
        evaluated = step % run["eval_every"] == 0 and self.facts["val_tokens"] > 0
        return step % run["log_every"] == 0 or evaluated or ends_epoch or step in (1, run["steps"])

    def step(self, metrics, step: int, samples: int, grad_norm: float, /, **numbers):
        """Records and prints a training step, after which the run has consumed `samples`, if it is due, with
        the means over all ranks of `metrics`, a ddp_utils.Metrics. Every rank calls this after each step.
        `numbers`, the same on all ranks, become curves.
        """
        if self.active:
            self._text.tick(step)
        if not self.wants(step, metrics.ends_epoch):  # the same on all ranks
            return
        means, epoch = metrics.reduce()
        grad_norm = float(grad_norm)
        machines = metrics.machines()
        refuse_taken([*numbers, *means])
        for name, value in numbers.items():
            if hasattr(value, "full_tensor"):  # it is sharded
                value = value.full_tensor()
            numbers[name] = value.item() if hasattr(value, "item") else value
        if not self.active:
            return
        run = self.settings
        clock = self.clock
        now = time.perf_counter()
        seq_len = run["seq_len"]
        tokens_per_sec = (samples - clock.lap_samples) * seq_len / (now - clock.lap_began)
        record = {"step": step, "loss": means["loss"]} | numbers
        record |= {"grad_norm": grad_norm, "labels": int(metrics.labels)} | machines | means
        record |= {"skipped": int(not math.isfinite(grad_norm)), "tokens": samples * seq_len, "mfu": None,
                   "tokens_per_sec": round(tokens_per_sec, 1), "time": round(time.time(), 3)}
        if self.facts["peak_flops"]:
            try:
                flops = tokens_per_sec * self.facts["flops_per_token"](record)
                record["mfu"] = flops / (self.facts["peak_flops"] * run["world_size"])
            except Exception as error:  # such as shapes that depend on the data
                self.facts["peak_flops"] = None
                self.say(f"MFU is not shown ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
        self.restart_clock(samples)  # after counting, which is not part of the next steps
        if metrics.ends_epoch or step == run["steps"]:
            record |= {"epoch_loss": epoch["loss"] / epoch["steps"], "epoch_seconds": epoch["seconds"]}
        eta = max(run["steps"] - step, 0) * (now - clock.began) / (step - clock.step)
        self.write(record, step_line(record, eta, self.facts["sync"]))
        if metrics.ends_epoch and not self.facts["val_tokens"]:
            self._epoch_line(record, math.nan)

    def evaluation(self, step: int, samples: int, found: dict, ends_epoch: bool):
        """Records and prints the results of an evaluation."""
        ours = ("val_accuracy", "val_bits_per_byte")
        refuse_taken([name.removeprefix("val_") for name in found if name not in ours] + ["lr", "bp_steps"])
        criterion, own = criterion_of(found), "criterion" in found
        if own != self.facts.get("own_criterion", own):  # numbers of two kinds cannot be compared
            self.evaluations = dict.fromkeys(self.evaluations, math.inf)
        self.facts["own_criterion"] = own
        best = criterion < min(self.evaluations.values(), default=-math.inf)
        if math.isfinite(criterion):  # otherwise it is repeated on resume
            self.evaluations[step] = criterion
        if not self.active:
            return
        record = {"step": step, "tokens": samples * self.settings["seq_len"], **found,
                  "time": round(time.time(), 3)}
        parts = [*results(found), f"unigram entropy {self.facts['entropy']:.4f}"]
        self.write(record, " | ".join(parts + ["best so far"] * best))
        self._warn_of_loss(step, found["val_loss"])
        self.save_history()
        trained = [r for r in self.records[-2:] if r["step"] == step and r.get("epoch_loss") is not None]
        if ends_epoch and trained:
            self._epoch_line(trained[0], found["val_loss"])

    def _warn_of_loss(self, step: int, loss: float | None):
        entropy = self.facts["entropy"]
        if 10 * step > self.settings["steps"] and (loss is None or not loss <= entropy):
            self.say(f"WARNING: after {step} steps the loss is above {entropy:.4f}, which a model without "
                     "any context would reach: try a lower --lr or more steps")

    def _epoch_line(self, record: dict, val_loss: float):
        number = record["tokens"] // (self.facts["rows"] * self.settings["seq_len"])
        of = f"/{self.settings['epochs']:g}" if self.settings.get("epochs") else ""
        self.say(f"epoch {number}{of} | training loss {record['epoch_loss']:.4f} | validation loss "
                 f"{val_loss:.4f} | {tqdm.format_interval(record['epoch_seconds'])}")

    def write(self, record: dict, line: str):
        """Passes a record to all sinks, and its line for people to train.log."""
        if not self.active:
            return
        if not self.lost():
            self._pass_on(without_nan(record))
        self._text.write(record, line)

    def _pass_on(self, record: dict):
        self.records.append(record)
        # and the directory was made again, by `lost`
        removed = not all(os.path.exists(self.out / name) for name in ("metrics.jsonl", *self.files))
        if removed:
            with suppress(OSError, UserError):  # which a sink says below
                self._write_files()
        behind = self.sinks if removed else self._behind
        self._behind = []
        for sink in self.sinks:
            try:
                if sink in behind:
                    sink.open(self.records, self.settings)
                else:
                    sink.write(record)
            except FAULTS as error:  # of a package behind the sink, too
                self._behind.append(sink)
                self.say(f"WARNING: {type(sink).__name__} lacks a record ({first_line(error)}); the next one "
                         "tries again")

    def save_history(self, last: bool = False):
        """Writes history.json and training_history.png, using at most 5 % of the time unless `last`."""
        start = time.perf_counter()
        if not self.records or not last and start < self._next_drawing or self.lost():
            return
        keys = dict.fromkeys(key for record in self.records for key in record)
        history = {key: [record.get(key) for record in self.records] for key in keys}
        try:
            write_atomically(self.out / "history.json", json.dumps(history).encode())
            draw_curves(self.out.name, self.records, self.out / "training_history.png")
        except UserError as error:
            self.say(f"WARNING: the history was not written ({error})")
        except FAULTS as error:
            if last:
                self.say(f"training_history.png is not drawn: {why_not('matplotlib', error)}")
        self._next_drawing = time.perf_counter() + 20 * (time.perf_counter() - start)

    def finish(self, step: int, samples: int, peak_memory: float, ending: str):
        """Says how fast the run was, and how it has ended."""
        if not self.active:
            return
        clock = self.clock
        seconds = time.perf_counter() - clock.began
        speed = (samples - clock.samples) * self.settings["seq_len"] / seconds
        took = f"{step - clock.step} steps in {tqdm.format_interval(seconds)}, evaluations and saves included"
        best = ""
        if self.evaluations:
            at = min(self.evaluations, key=self.evaluations.get)
            kind = "criterion" if self.facts.get("own_criterion") else "validation loss"
            best = f"; best {kind} {self.evaluations[at]:.4f} at step {at}"
        if self.records and not self.facts["val_tokens"]:
            self._warn_of_loss(step, self.records[-1].get("loss"))
        self.say(f"{took}: {tqdm.format_sizeof(speed)} tok/s{best}; peak memory {peak_memory:.1f} GB")
        self.close()
        self.say(ending)

    def close(self):
        if not self.active:
            return
        self.save_history(last=True)
        for sink in (self._text, *self.sinks):
            with suppress(OSError):
                sink.close()


# -----------------------------------------------------------------------------------------------------------
# A run as a picture and as a line


def draw_curves(name: str, records: list[dict], path: Path):
    """Draws loss, learning rate, throughput, a trainer's own numbers and exact matches over steps into a PNG
    800 pixels wide. Raises whatever matplotlib does, and UserError.
    """
    backend = os.environ.pop("MPLBACKEND", None)  # that of a notebook, with which the import fails
    try:
        from matplotlib.figure import Figure  # not pyplot, which needs a display
    finally:
        if backend:
            os.environ["MPLBACKEND"] = backend
    keys = dict.fromkeys(key for record in records for key in record)
    own = [key for key in own_keys(keys) if "/" not in key]
    rows = ["lr", "tokens_per_sec", *own, *keys.keys() & {"val_exact"}]
    figure = Figure(figsize=(8, 4.8 + 1.6 * len(rows)), layout="constrained")
    loss, *others = figure.subplots(1 + len(rows), 1, sharex=True, height_ratios=(3, *[1] * len(rows)))

    def curve(axes, key: str, **style):
        points = [r for r in records if r.get(key) is not None]
        axes.plot([r["step"] for r in points], [r[key] for r in points], **style)

    curve(loss, "loss", label="training loss", linewidth=1, alpha=0.6)
    curve(loss, "val_loss", label="validation loss", marker="o", markersize=5)
    loss.set(title=name, ylabel="loss (nats per token)")
    loss.legend()
    labels = {"lr": "learning rate", "tokens_per_sec": "tokens/s"}
    for key, axes in zip(rows, others):
        curve(axes, key)
        axes.set(ylabel=labels.get(key, key))
    others[1].set(ylim=(0, None))
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.axes[-1].set(xlabel="step")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    write_atomically(path, picture.getvalue())


def summarize(records: list[dict]) -> dict:
    """The last logged step of a run, its last validation loss, and that of its best evaluation."""
    last = ([record for record in records if "loss" in record] or [{"step": 0}])[-1]
    losses = {r["step"]: r["val_loss"] for r in records if r.get("val_loss") is not None}
    criteria = evaluations_of(records)
    best = min(criteria, key=criteria.get, default=None)
    found = {key: last.get(key) for key in ("step", "loss", "tokens", "tokens_per_sec")}
    return found | {"val_loss": losses.get(max(losses, default=None)),
                    "best_val_loss": losses.get(best), "best_step": best}


# -----------------------------------------------------------------------------------------------------------
# Command line


def watch_machine(args: Namespace):
    while True:
        try:
            reading = read_machine(args.interval)
        except FAULTS as error:
            raise UserError("CPU, memory and network are read with psutil: "
                            f"{why_not('psutil', error)}.") from None
        say(json.dumps(reading) if args.json else "\n".join(format_reading(reading)))
        if args.once:
            return


def show_run(run: Path):
    warnings = []
    try:
        records = read_metrics(run, warnings.append)
    except OSError as error:
        raise UserError(f"{run} has no metrics.jsonl that can be read ({error.strerror}): name the "
                        "directory of a run, such as runs/hrm-tiny-stdlib-bpe4096.") from None
    if not records and (run / "metrics.jsonl").stat().st_size > 0:
        raise UserError(f"not a run: {run}/metrics.jsonl does not begin with the record of a step.")
    for warning in warnings:
        print(warning, file=sys.stderr)
    name = run.resolve().name
    say(json.dumps({"run": name} | summarize(records)))
    path = run / "training_history.png"
    try:
        draw_curves(name, records, path)
        print(f"the curves are in {path}", file=sys.stderr)
    except FAULTS as error:  # a run may be there for reading only
        print(f"the curves are not drawn: {why_not('matplotlib', error)}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit code of a UserError, otherwise 0, even after Ctrl-C or a broken pipe."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN_DIR",
                        help="a run: prints a summary as JSON and draws its curves (without it, readings of "
                        "this machine)")
    parser.add_argument("--interval", type=float, default=4.0, help="seconds between two readings (4)")
    parser.add_argument("--once", action="store_true", help="stop after the first reading")
    parser.add_argument("--json", action="store_true", help="readings as JSON, one a line, sizes in bytes")
    try:
        args = parser.parse_args(argv)
        if not 0.1 <= args.interval <= 1e6:
            parser.error(f"argument --interval: {args.interval:g} is not between 0.1 and a million seconds")
        with access():
            show_run(args.run) if args.run else watch_machine(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # as in `python monitor.py | head`; at exit Python would flush into it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())

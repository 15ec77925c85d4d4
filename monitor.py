"""Looking at a run. RunLog writes what a trainer reports:

    train.log             everything that was printed
    metrics.jsonl         one JSON object for each logged step
    history.json          the same as lists, for plotting
    training_history.png  loss, learning rate and throughput, if matplotlib is installed
    tb/                   the same curves for TensorBoard, if that is installed

A step has one line in metrics.jsonl, whatever happens: a resumed run cuts off what is past its checkpoint.
"""

import contextlib
import json
import math
import os
import resource
import sys
import threading
import time
from pathlib import Path

import torch

from data import UserError, write_atomically

# Dense bf16 tensor-core peaks of the vendor's data sheets in TFLOP/s, by what the device name contains.
PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250, "RTX 4090": 165, "RTX 3090": 71}


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of this GPU, None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def memory_gb(device: torch.device) -> float:
    """The most memory so far in GB (10^9 bytes): of tensors on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def human_count(n: float) -> str:
    """512345 → '512k'; three digits at most."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.{2 if n < 10 * size else 1 if n < 100 * size else 0}f}{unit}"
    return f"{n:.0f}"


def human_time(seconds: float) -> str:
    """11520 → '3h12m'."""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class RunLog:
    """The log of a run in directory `out`. Only rank 0 (`active`) writes; others may call everything."""

    def __init__(self, out: Path, active: bool, prefix: str, total_steps: int):
        self.out, self.active, self.prefix, self.total_steps = Path(out), active, prefix, total_steps
        self.records: list[dict] = []
        self._bar = self._tensorboard = self._metrics = None
        self._next_drawing = 0.0
        self._lock = threading.Lock()  # the thread that writes checkpoints speaks too
        if active:
            self._text = open(self.out / "train.log", "a", encoding="utf-8")

    def say(self, text: str = "") -> None:
        """Prints a text, and appends it to train.log."""
        if not self.active:
            return
        with self._lock:
            if self._bar is not None:
                self._bar.write(text)
            else:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    print(text, flush=True)
            self._note(text)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # on a full disk the training is worth more than its log
            self._text.write(text + "\n")
            self._text.flush()

    def begin(self, step: int, settings: dict, complete) -> bool:
        """Opens the files at a step, 0 or that of the checkpoint, and forgets what was logged after it.

        The record of this very step is kept if complete(record). Returns, on rank 0, whether there is one.
        """
        if not self.active:
            return False
        path = self.out / "metrics.jsonl"
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    kept.append(json.loads(line))
                except ValueError:
                    break  # the run was killed while it wrote this line
        self.records = [r for r in kept if r["step"] < step or r["step"] == step and complete(r)]
        self._rewrite_metrics()
        try:
            from torch.utils.tensorboard import SummaryWriter
            self._tensorboard = SummaryWriter(self.out / "tb", purge_step=step + 1)
            self._tensorboard.add_text("settings", "\n".join(f"    {k}: {v}" for k, v in settings.items()), 0)
        except ImportError:
            self.say("curves for TensorBoard are not written: pip install tensorboard")
        if sys.stdout.isatty():
            from tqdm import tqdm  # comes with datasets
            self._bar = tqdm(total=self.total_steps, initial=step, unit="step", dynamic_ncols=True,
                             smoothing=0.1)
        return bool(self.records) and self.records[-1]["step"] == step

    def _rewrite_metrics(self) -> None:
        path = self.out / "metrics.jsonl"
        write_atomically(path, *(json.dumps(r).encode() + b"\n" for r in self.records))
        self._metrics = open(path, "a", encoding="utf-8")

    def tick(self, step: int) -> None:
        """Moves the progress bar on."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def step_line(self, r: dict, eta: float) -> None:
        """Prints a record as a line or beside the progress bar. Sync=OK: a failed comparison ends the run."""
        if not self.active:
            return
        mfu = f"{r['mfu']:.1%} MFU | " if r["mfu"] is not None else ""
        line = (f"step {r['step']}/{self.total_steps} | loss {r['loss']:.4f} | lr {r['lr']:.1e} | "
                f"grad {r['grad_norm']:.2f} | {human_count(r['tokens_per_sec'])} tok/s | "
                f"{mfu}{r['mem_gb']:.1f} GB | eta {human_time(eta)} | Sync=OK")
        if self._bar is not None:
            self._bar.set_postfix_str(line.partition(" | ")[2], refresh=False)
            with self._lock:
                self._note(f"{self.prefix} {line}")
        else:
            self.say(f"{self.prefix} {line}")

    def write(self, record: dict) -> None:
        """Adds the record of a step to all curves. JSON knows no NaN and no infinity, they become null."""
        if not self.active:
            return
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.records.append(record)
        try:
            if self._metrics is None:
                self._rewrite_metrics()
            else:
                self._metrics.write(json.dumps(record) + "\n")
                self._metrics.flush()
        except (OSError, UserError) as error:  # the next record tries again with all of them
            self._metrics = None
            self.say(f"WARNING: metrics.jsonl was not written ({error})")
        if self._tensorboard:
            names = {"loss": "Loss/train_step", "val_loss": "Loss/val_epoch", "lr": "LR",
                     "grad_norm": "GradNorm", "tokens_per_sec": "Throughput/tokens_per_sec",
                     "mfu": "Throughput/mfu", "mem_gb": "System/mem_gb",
                     "bp_steps": "HRM/bp_steps", "cycles": "HRM/cycles", "ponder": "HRM/ponder"}
            for key, name in names.items():
                if record.get(key) is not None:
                    self._tensorboard.add_scalar(name, record[key], record["step"])

    def sample(self, text: str, step: int) -> None:
        """Prints a text that the model has written, and shows it in TensorBoard."""
        self.say(f"a sample after step {step}:\n{text}\n")
        if self._tensorboard:
            self._tensorboard.add_text("sample", "    " + text.replace("\n", "\n    "), step)

    def save_history(self, last: bool = False) -> None:
        """Writes history.json and draws training_history.png, unless that would take over 1 % of the time."""
        if not self.active or not self.records or not last and time.perf_counter() < self._next_drawing:
            return
        begun = time.perf_counter()
        keys = list(self.records[-1])
        history = {key: [r.get(key) for r in self.records] for key in keys}
        try:
            write_atomically(self.out / "history.json", json.dumps(history).encode())
            draw_history(history, self.out / "training_history.png", self.out.name)
        except ImportError:
            pass  # said once, at the end
        except (OSError, UserError) as error:
            self.say(f"WARNING: the history was not written ({error})")
        self._next_drawing = time.perf_counter() + 100 * (time.perf_counter() - begun)

    def close(self) -> None:
        if not self.active:
            return
        self.save_history(last=True)
        if "matplotlib" not in sys.modules:
            self.say("training_history.png is not drawn: pip install matplotlib")
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._tensorboard:
            self._tensorboard.close()


def draw_history(history: dict, path: Path, title: str) -> None:
    """Draws loss, learning rate and throughput over the steps into a PNG."""
    from matplotlib.figure import Figure  # without pyplot, which would want a display
    figure = Figure(figsize=(8, 8))
    figure.subplots_adjust(0.11, 0.07, 0.97, 0.95, hspace=0.08)
    loss, lr, speed = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    steps = history["step"]
    loss.plot(steps, history["loss"], label="training", color="0.6", linewidth=1)
    evaluated = [(s, v) for s, v in zip(steps, history["val_loss"]) if v is not None]
    if evaluated:
        loss.plot(*zip(*evaluated), label="validation", color="tab:blue", marker="o", markersize=4)
    loss.set(ylabel="loss (nats per token)", title=title)
    loss.legend()
    lr.plot(steps, history["lr"], color="tab:green")
    lr.set_ylabel("learning rate")
    speed.plot(steps, history["tokens_per_sec"], color="tab:orange")
    speed.set(ylabel="tokens/s", xlabel="step", ylim=(0, None))
    for axes in (loss, lr, speed):
        axes.grid(alpha=0.3)
    temporary = path.with_name(".tmp-" + path.name)
    figure.savefig(temporary, format="png", dpi=100)
    os.replace(temporary, path)


"""The log of a run. The command `python monitor.py`, which watches a machine and draws runs, is in loggers/.

A trainer reports to a RunLog, which writes to the run directory: everything printed (train.log) and a JSON
object for each logged step and each evaluation (metrics.jsonl). Through loggers/ it also writes the same data
as lists (history.json), as a picture if matplotlib is installed, and for TensorBoard if that is. A logged
step has one line and one point in each curve, even after a kill. Nothing here imports torch, so the commands
start quickly.

In this file, and who calls it:

    what a trainer reports   read_metrics and the names of numbers: evaluations, the log and loggers/
    the log                  RunLog, and step_line, the line of a step: the trainers
"""

import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm  # comes with datasets

from cli.errors import PACKAGE_ERRORS, UserError, first_line, oserror_as_retryable, run_command, say
from cli.files import read_json, write_atomically


def format_known(values: dict, formats: dict[str, str]) -> list[str]:
    """Formats the values that are present and not None, in the order of `formats`."""
    return [text.format(values[key]) for key, text in formats.items() if values.get(key) is not None]


# -----------------------------------------------------------------------------------------------------------
# What a trainer reports

# Tags of the curves in TensorBoard, by the keys of a record
TAGS = {"loss": "Loss/train_step", "epoch_loss": "Loss/train_epoch", "val_loss": "Loss/val_epoch",
        "epoch_seconds": "Time/epoch_seconds", "lr": "LR", "grad_norm": "GradNorm",
        "tokens_per_sec": "Throughput/tokens_per_sec", "mfu": "Throughput/mfu",
        "bp_steps": "HRM/bp_steps", "cycles": "HRM/cycles", "ponder": "HRM/ponder",
        "val_cycles": "HRM/val_cycles", "val_ponder": "HRM/val_ponder",
        "val_exact": "Pairs/val_exact", "val_accuracy": "MLM/val_accuracy",
        "val_bits_per_byte": "Loss/val_bits_per_byte", "val_perplexity": "Loss/val_perplexity",
        "mem_gb": "System/peak_memory_GB", "System": "System"}

# Other keys in the record of a training step. Keys in neither set come from a trainer.
OTHER_KEYS = {"step", "skipped", "tokens", "labels", "time"}

# Names that a trainer or a model can't give to its own numbers
TAKEN = OTHER_KEYS | {"grad_norm", "mem_gb", "mfu", "tokens_per_sec", "epoch_loss", "epoch_seconds", "bytes",
                      "System", "accuracy", "bits_per_byte"}

# How the results of an evaluation are printed, by key, in this order
EVALUATION = {"val_loss": "validation loss {:.4f}", "val_perplexity": "perplexity {:.4g}",
              "val_accuracy": "accuracy {:.1%}", "val_exact": "exact match {:.1%}",
              "val_bits_per_byte": "{:.4f} bits per byte"}


def read_metrics(run_directory: Path, say=lambda text: None) -> list[dict]:
    """The records of a run. Says how many lines a kill or a crash has left broken. Raises RetryableError if
    the file can't be read, and FileNotFoundError.
    """
    records = []
    path = Path(run_directory, "metrics.jsonl")
    with oserror_as_retryable(path):
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


def read_config(run_directory: Path) -> dict:
    """config.json of a run, or {} if it's missing or damaged. Raises RetryableError if it can't be read."""
    with suppress(FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return dict(read_json(Path(run_directory, "config.json")))
    return {}


def best_metric_of(record: dict) -> float | None:
    """The number that decides which evaluation is the best (the lowest): `best_metric` if the trainer sets
    it, else `val_loss`. None for the record of a step.
    """
    return record.get("best_metric", record.get("val_loss"))


def evaluations_of(records: list[dict]) -> dict[int, float]:
    """The best_metric of each evaluation by step. It counts as infinite if the last evaluation uses another
    metric (best_metric instead of val_loss, or the other way round).
    """
    evaluated = [record for record in records if "val_loss" in record]
    return {r["step"]: best_metric_of(r) if ("best_metric" in r) == ("best_metric" in evaluated[-1])
            else math.inf for r in evaluated if best_metric_of(r) is not None}


def without_nan(record: dict) -> dict:
    """Replaces NaN and infinity, which JSON doesn't have, by None."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()}


def own_keys(record: dict) -> list[str]:
    """The keys of a record that come from a trainer, without those of single validation sets."""
    return [key for key in record if key.partition("/")[0] not in {*TAGS, *OTHER_KEYS}]


def refuse_taken(names: list[str]):
    """Raises UserError if a number's name already has another meaning in the record."""
    taken = [name for name in names if name in TAKEN or name.startswith("val_") or names.count(name) > 1]
    if taken:
        raise UserError(f"a number called {taken[0]} cannot be logged, because the log uses that name for "
                        "something else: choose another.")


def step_line(record: dict, eta: float, sync: str, settings: dict) -> str:
    """The record of a training step as a line of text. `eta` is in seconds. With --epochs the line also says
    how long an epoch takes at this speed.
    """
    # these two first, so that a narrow progress bar shows them
    parts = [f"loss {record['loss']:.4f}", f"eta {tqdm.format_interval(eta)}"]
    if epochs := settings.get("epochs"):
        tokens = settings["epoch_tokens"]
        parts.append(f"epoch {record['tokens'] / tokens:.1f}/{epochs:g} "
                     f"({tqdm.format_interval(tokens / record['tokens_per_sec'])} each)")
    parts += [f"lr {record['lr']:.1e}", f"grad {record['grad_norm']:.2f}"]
    parts += [f"{key} {record[key]:.4g}" for key in own_keys(record) if record[key] is not None]
    parts.append(f"{tqdm.format_sizeof(record['tokens_per_sec'])} tok/s")
    parts += format_known(record, {"mfu": "{:.1%} MFU"})
    gpus = ("{System/GPU_percent_least:.0f}-{System/GPU_percent_most:.0f}"
            if "System/GPU_percent_most" in record else "{System/GPU_percent:.0f}")
    with suppress(KeyError):  # no GPU, or it doesn't report it
        parts.append(f"GPU {gpus}%".format_map(record))
    return " | ".join([*parts, f"{record['mem_gb']:.1f} GB", f"Sync={sync}"])


def format_results(metrics: dict) -> list[str]:
    """The results of an evaluation as texts. For each named set: exact matches with pairs, else losses."""
    prefix, form = ("val_exact/", "{} {:.1%}") if "val_exact" in metrics else ("val_loss/", "{} {:.4f}")
    sets = [form.format(key.removeprefix(prefix), value) for key, value in metrics.items()
            if key.startswith(prefix)]
    own = [f"{key} {metrics[key]:.4g}" for key in own_keys(metrics) if "/" not in key]
    return format_known(metrics, EVALUATION) + own + ([", ".join(sets)] if sets else [])


def means_of_sums(sums: dict[str, float]) -> dict[str, float]:
    """The means to report, from the sums over a validation set. `nats`, the cross-entropy of a text, becomes
    perplexity and bits per byte.
    """
    means = {}
    for name, total in sums.items():
        count = sums.get(f"{name} (count)", max(sums["labels"], 1))
        if name not in ("samples", "exact", "nats", "labels", "bytes") and not name.endswith(" (count)"):
            means[f"val_{name}"] = total / count if count else math.nan
    if "correct" in sums:
        means["val_accuracy"] = means.pop("val_correct")
    if "exact" in sums:
        means["val_exact"] = sums["exact"] / max(sums["samples"], 1)
    elif "nats" in sums and sums["bytes"] >= 0:  # not NaN; comparable across tokenizers
        means["val_bits_per_byte"] = sums["nats"] / math.log(2) / max(sums["bytes"], 1)
    if "nats" in sums:  # unless a metric has that name
        loss = sums["nats"] / max(sums["labels"], 1)
        means.setdefault("val_perplexity", math.inf if loss > 709 else math.exp(loss))
    return means


def records_until(run_directory: Path, step: int, say) -> list[dict]:
    """The records of a run up to `step`, the step of its checkpoint. If the run was killed before it had
    evaluated that step, its evaluation is missing.
    """
    records = []
    with suppress(FileNotFoundError):
        for record in read_metrics(run_directory, say):
            # drop an evaluation of this step without a finite best_metric: it's repeated
            failed = "loss" not in record and best_metric_of(record) is None
            if record["step"] < step or record["step"] == step and not failed:
                records.append(record)
    return records


# -----------------------------------------------------------------------------------------------------------
# The log


class TrainLog:
    """Writes what a run says, and a line for each record, to train.log and the screen. Every rank has one,
    but only rank 0's (`active`) prints and writes.
    """

    def __init__(self, prefix: str, active: bool = True):
        self.active = active
        self._file = io.StringIO()  # keeps the text until `open`
        self._prefix = prefix
        self._days = {}  # the date of the last entry on the screen and in the file
        self._steps = 0  # steps of the run, see begin
        self.bar = tqdm(disable=True)  # until `begin`
        self._lock = threading.Lock()  # the thread that writes checkpoints calls say, too

    def open(self, path: Path):
        """Appends what has been said so far to the file, and from now on everything."""
        if self.active:
            with oserror_as_retryable(path):
                early, self._file = self._file, open(path, "a", buffering=1, encoding="utf-8",
                                                     errors="replace")
            with suppress(OSError):  # a full disk must not stop training
                self._file.write(early.getvalue())

    def begin(self, step: int, steps: int):
        """Shows a progress bar at `step` of `steps`, if the screen is a terminal."""
        self._steps = steps
        if sys.stdout.isatty() and all(os.get_terminal_size(sys.stdout.fileno())):
            self.bar = tqdm(total=steps, initial=step, dynamic_ncols=True, file=sys.stdout,
                             bar_format="|{bar:10}| {n_fmt}/{total_fmt}{postfix} | {desc}")

    def say(self, text: str, on_screen: bool = True):
        if not self.active:
            return
        with self._lock:
            now = time.strftime("%F %T")
            with suppress(OSError):  # the terminal may be gone
                if on_screen:
                    line = self._stamped(text, now, "screen")
                    say(line) if self.bar.disable else self.bar.write(line)  # as with TQDM_DISABLE
            with suppress(OSError, UserError):  # a full disk must not stop training
                self._file.write(self._stamped(text, now, "file") + "\n")

    def _stamped(self, text: str, now: str, where: str) -> str:
        """Puts the time in front of a text, and on its first entry of a day also the date. A text of several
        lines is one entry.
        """
        before, self._days[where] = self._days.get(where), now[:10]
        return f"{now[11:] if before == now[:10] else now} {text}"

    def tick(self, step: int):
        """Advances the progress bar."""
        self.bar.update(step - self.bar.n)

    def write(self, record: dict, line: str):
        """Prints the line of an evaluation. A step's line goes into the progress bar, if there is one."""
        if "loss" not in record:
            return self.say(f"step {record['step']} | {line}")
        self.bar.set_description_str(line, refresh=False)
        head = f"{self._prefix} step {record['step']}/{self._steps}"
        self.say(f"{head} | {line}", on_screen=self.bar.disable)

    def close(self):
        self.bar.close()


class RunLog:
    """The log of a run in directory `out`. `write` adds the record of a logged step or an evaluation to
    metrics.jsonl and train.log, and passes it to all `loggers`. A logger has log(record) and close(), and
    finds earlier records in `records`. Every rank has a RunLog, but only rank 0's prints and writes.
    """

    def __init__(self, out: Path, text: TrainLog, settings: dict, records: list[dict], val_tokens: int,
                 entropy: float, sync: Callable[[int], str]):
        """`records` are the records so far, on all ranks. `sync`, which all ranks call, says after a step how
        the ranks' parameters relate.
        """
        self.out = Path(out)
        self.settings = settings  # flags, plan and constants of the run
        self.val_tokens = val_tokens  # in all validation sets
        self.entropy = entropy  # of their unigrams, in nats
        self.mfu: Callable[[dict], float | None] = lambda record: None  # MFU of a record's steps
        self.records = records
        self.evaluations = evaluations_of(records)  # best_metric by step, on all ranks
        self.loggers = []
        self._sync = sync
        self._metrics = None  # metrics.jsonl
        self._behind = False  # whether metrics.jsonl lacks a record
        self._text = text
        self.active = text.active

    def say(self, text: str):
        """Prints a text and appends it to train.log."""
        self._text.say(text)

    def begin(self, step: int, files: dict[str, bytes]):
        """Opens the files of a run that has done `step` steps, and writes `files` (contents by name) to its
        directory. Raises UserError if nothing can be written.
        """
        if not self.active:
            return
        for name, content in files.items():
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.out / name, content)
        self._write_metrics()
        self._text.begin(step, self.settings["steps"])

    def start_clock(self, step: int, samples: int):
        """Starts the clock of a run that has done `step` steps and `samples` samples."""
        self._first_step, self._first_samples = step, samples
        self._began = time.perf_counter()
        self.restart_clock(samples)

    def restart_clock(self, samples: int):
        """Call after a pause, such as an evaluation, so that tokens per second leave it out."""
        self._lap_samples, self._lap_began = samples, time.perf_counter()

    def wants(self, step: int) -> bool:
        """Whether a step is logged."""
        run = self.settings
        evaluated = step % run["eval_every"] == 0 and self.val_tokens > 0
        return step % run["log_every"] == 0 or evaluated or step in (1, run["steps"])

    def step(self, metrics, step: int, samples: int, grad_norm: float, /, **numbers):
        """Records and prints a training step, if it's due. `samples` is how many samples the run has
        consumed, and `metrics`, a ddp_utils.Metrics, yields the means over all ranks. `numbers`, the same on
        all ranks, become curves. Every rank calls this after each step.
        """
        if self.active:
            self._text.tick(step)
        if not self.wants(step):  # the same on all ranks
            return
        means = metrics.reduce()
        grad_norm = float(grad_norm)
        machines, sync = metrics.machines(), self._sync(step)
        refuse_taken([*numbers, *means])
        for name, value in numbers.items():
            if hasattr(value, "full_tensor"):  # it's sharded
                value = value.full_tensor()
            if hasattr(value, "item") and math.prod(value.shape) == 1:  # from torch or numpy
                value = value.item()
            if not isinstance(value, int | float | None):
                raise UserError(f"{name} cannot be logged: it is of type {type(value).__name__}, so make it "
                                "a number.")
            numbers[name] = value
        if not self.active:
            return
        run = self.settings
        now = time.perf_counter()
        seq_len = run["seq_len"]
        tokens_per_sec = (samples - self._lap_samples) * seq_len / (now - self._lap_began)
        record = {"step": step, "loss": means["loss"]} | numbers
        record |= {"grad_norm": grad_norm, "labels": int(metrics.labels)} | machines | means
        record |= {"skipped": int(not math.isfinite(grad_norm)), "tokens": samples * seq_len, "mfu": None,
                   "tokens_per_sec": round(tokens_per_sec, 1), "time": round(time.time(), 3)}
        record["mfu"] = self.mfu(record)
        self.restart_clock(samples)  # after counting FLOPs, which isn't part of the next steps
        eta = max(run["steps"] - step, 0) * (now - self._began) / (step - self._first_step)
        self.write(record, step_line(record, eta, sync, run))

    def evaluation(self, step: int, samples: int, metrics: dict) -> bool:
        """Records and prints the results of an evaluation. Returns whether it's the best, on all ranks."""
        ours = ("val_accuracy", "val_bits_per_byte")
        refuse_taken([name.removeprefix("val_") for name in metrics if name not in ours] + ["lr", "bp_steps"])
        record = {"step": step, "tokens": samples * self.settings["seq_len"], **metrics,
                  "time": round(time.time(), 3)}
        evaluations = evaluations_of([*self.records, without_nan(record)])
        # an evaluation without a checkpoint no longer counts, and that stays so
        self.evaluations = {at: max(c, self.evaluations.get(at, c)) for at, c in evaluations.items()}
        best = min(self.evaluations, key=self.evaluations.get, default=None) == step
        parts = [*format_results(metrics), f"unigram entropy {self.entropy:.4f}"]
        if best and len(self.evaluations) > 1:
            parts.append("best so far")
        self.write(record, " | ".join(parts))
        nats = math.log(max(metrics.get("val_perplexity", 0), 1e-9))  # per token
        if 10 * step > self.settings["steps"] and not nats <= self.entropy:  # also if it's NaN
            self.say(f"WARNING: after {step} steps the loss is above the unigram entropy {self.entropy:.4f}, "
                     "which a model without context can reach: try a lower --lr or more steps")
        return best

    def write(self, record: dict, line: str):
        """Adds a record to metrics.jsonl and its line to train.log, and passes it to all loggers."""
        self.records.append(without_nan(record))
        if not self.active:
            return
        try:
            if self._behind:
                self._write_metrics()
            else:
                self._metrics.write(json.dumps(self.records[-1]) + "\n")
        except PACKAGE_ERRORS as error:  # mostly a full disk
            self._behind = True
            self.say(f"WARNING: metrics.jsonl lacks a record ({first_line(error)}); the next one tries again")
        self._tell(lambda logger: logger.log(self.records[-1]))
        self._text.write(record, line)

    def _write_metrics(self):
        """Replaces metrics.jsonl by a file with all records, if there's space for it."""
        path = self.out / "metrics.jsonl"
        write_atomically(path, *(json.dumps(record).encode() + b"\n" for record in self.records))
        self._metrics = open(path, "a", buffering=1, encoding="utf-8")  # line by line
        self._behind = False

    def _tell(self, call: Callable):
        """Calls `call` with each logger. A logger that raises is reported and dropped."""
        for logger in [*self.loggers]:
            try:
                call(logger)
            except PACKAGE_ERRORS as error:  # also from a package that it uses
                self.loggers.remove(logger)
                self.say(f"WARNING: {type(logger).__name__} fails ({first_line(error)}), so it gets no more "
                         "records until the next start")

    def finish(self, step: int, samples: int, peak_memory: float, ending: str):
        """Says how fast the run was and how it ended."""
        if not self.active:
            return
        seconds = time.perf_counter() - self._began
        speed = (samples - self._first_samples) * self.settings["seq_len"] / seconds
        best = ""
        if min(self.evaluations.values(), default=math.inf) < math.inf:
            at = min(self.evaluations, key=self.evaluations.get)
            best = f"; best evaluation {self.evaluations[at]:.4f} at step {at}"
        self.say(f"{step - self._first_step} steps in {tqdm.format_interval(seconds)}, evaluations and saves "
                 f"included: {tqdm.format_sizeof(speed)} tok/s{best}; peak memory {peak_memory:.1f} GB")
        self.close()
        self.say(ending)

    def close(self):
        if not self.active:
            return
        with suppress(*PACKAGE_ERRORS):
            if self._behind:
                self._write_metrics()
            self._metrics.close()
        self._text.close()
        self._tell(lambda logger: logger.close())


def main():
    """Runs `python monitor.py`."""
    from loggers.command import main as command
    command()


if __name__ == "__main__":
    run_command(main)

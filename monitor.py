"""The log of a run. What watches a machine and draws a run, `python monitor.py`, is in loggers/.

A trainer reports to a RunLog, which writes to the run directory: all printed text (train.log), a JSON object
for each logged step and each evaluation (metrics.jsonl), and through loggers/ the same data as lists
(history.json) and, if matplotlib and tensorboard are installed, the curves as a picture and for TensorBoard.
A logged step has one line and one point in each curve, even after a kill. The commands start at once, because
nothing here imports torch.
In this file, and who calls it:

    what a trainer reports   read_metrics and the names of numbers: ddp_utils, the log and loggers/
    the code of a run        its copies in the run directory, its changes, its commit: ddp_utils and weights/
    the log                  RunLog, and step_line, the line of a step: the trainers, through ddp_utils
"""

import filecmp
import json
import math
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm  # comes with datasets

from cli.errors import FAULTS, UserError, access, first_line, run_command, say
from data import read_json, write_atomically


def format_known(values: dict, formats: dict[str, str]) -> list[str]:
    """Formats the values that are present and not None, in the order of `formats`."""
    return [text.format(values[key]) for key, text in formats.items() if values.get(key) is not None]


# -----------------------------------------------------------------------------------------------------------
# What a trainer reports

NO_BYTES = ("note: evaluations give no bits per byte, because the tokens do not spell each byte of the text, "
            "and its bytes were not counted, as they are where text, but not pairs, is prepared now")

# Tags of the curves in TensorBoard, by the keys of a record
TAGS = {"loss": "Loss/train_step", "epoch_loss": "Loss/train_epoch", "val_loss": "Loss/val_epoch",
        "epoch_seconds": "Time/epoch_seconds", "lr": "LR", "grad_norm": "GradNorm",
        "tokens_per_sec": "Throughput/tokens_per_sec", "mfu": "Throughput/mfu",
        "bp_steps": "HRM/bp_steps", "cycles": "HRM/cycles", "ponder": "HRM/ponder",
        "val_cycles": "HRM/val_cycles", "val_ponder": "HRM/val_ponder",
        "val_exact": "Pairs/val_exact", "val_accuracy": "MLM/val_accuracy",
        "val_bits_per_byte": "Loss/val_bits_per_byte", "val_perplexity": "Loss/val_perplexity",
        "mem_gb": "System/peak_memory_GB", "System": "System"}

# Other keys of the record of a training step. A key that is in neither was named by a trainer.
OTHER_KEYS = {"step", "skipped", "tokens", "labels", "time"}

# What a trainer or a model of one's own cannot call its numbers
TAKEN = OTHER_KEYS | {"grad_norm", "mem_gb", "mfu", "tokens_per_sec", "epoch_loss", "epoch_seconds", "bytes",
                      "System", "accuracy", "bits_per_byte"}

# Formats for the results of an evaluation, by the keys of a record, in the order of printing
EVALUATION = {"val_loss": "validation loss {:.4f}", "val_perplexity": "perplexity {:.4g}",
              "val_accuracy": "accuracy {:.1%}", "val_exact": "exact match {:.1%}",
              "val_bits_per_byte": "{:.4f} bits per byte"}


def read_metrics(run_directory: Path, say=lambda text: None) -> list[dict]:
    """The records of a run. Says how many lines are broken, as a kill or a crash can leave them. Raises
    RetryableError if the file cannot be read, and FileNotFoundError.
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


def read_config(run_directory: Path) -> dict:
    """config.json of a run, empty if there is none or it is damaged. Raises RetryableError if it cannot be
    read.
    """
    with suppress(FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return dict(read_json(Path(run_directory, "config.json")))
    return {}


def best_metric_of(record: dict) -> float | None:
    """The number by which an evaluation is the best if it is the lowest: `best_metric`, which a trainer can
    set, else `val_loss`. None in other records.
    """
    return record.get("best_metric", record.get("val_loss"))


def evaluations_of(records: list[dict]) -> dict[int, float]:
    """The best_metric of evaluations by step; infinite where its name isn't that of the last one."""
    evaluated = [record for record in records if "val_loss" in record]
    return {r["step"]: best_metric_of(r) if ("best_metric" in r) == ("best_metric" in evaluated[-1])
            else math.inf for r in evaluated if best_metric_of(r) is not None}


def without_nan(record: dict) -> dict:
    """NaN and infinity, which JSON lacks, become None."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()}


def own_keys(record: dict) -> list[str]:
    """The keys of a record that are in neither TAGS nor OTHER_KEYS, nor of a single validation set."""
    return [key for key in record if key.partition("/")[0] not in {*TAGS, *OTHER_KEYS}]


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
    if "System/GPU_percent_most" in record:
        parts.append("GPU {System/GPU_percent_least:.0f}-{System/GPU_percent_most:.0f}%".format_map(record))
    return " | ".join([*parts, f"{record['mem_gb']:.1f} GB", f"Sync={sync}"])


def results(metrics: dict) -> list[str]:
    """The result of an evaluation as texts; on each named set, exact matches for pairs, losses otherwise."""
    prefix, form = ("val_exact/", "{} {:.1%}") if "val_exact" in metrics else ("val_loss/", "{} {:.4f}")
    sets = [form.format(key.removeprefix(prefix), value) for key, value in metrics.items()
            if key.startswith(prefix)]
    own = [f"{key} {metrics[key]:.4g}" for key in own_keys(metrics) if "/" not in key]
    return format_known(metrics, EVALUATION) + own + [", ".join(sets)] * bool(sets)


def results_of(sums: dict[str, float], in_nats: bool = True) -> dict[str, float]:
    """The means to report, from the sums over a validation set. Only a loss that is `in_nats` per
    token has a perplexity and bits per byte.
    """
    means = {}
    for name, total in sums.items():
        count = sums.get(f"{name} (count)", max(sums["labels"], 1))
        if name not in ("samples", "exact", "labels", "bytes") and not name.endswith(" (count)"):
            means[f"val_{name}"] = total / count if count else math.nan
    if "correct" in sums:
        means["val_accuracy"] = means.pop("val_correct")
    if "exact" in sums:
        means["val_exact"] = sums["exact"] / max(sums["samples"], 1)
    elif in_nats and sums["bytes"] >= 0:  # not NaN; so that tokenizers can be compared
        means["val_bits_per_byte"] = sums["loss"] / math.log(2) / max(sums["bytes"], 1)
    if in_nats:  # unless a metric has that name
        loss = means["val_loss"]
        means.setdefault("val_perplexity", math.inf if loss > 709 else math.exp(loss))
    return means


def records_until(run_directory: Path, step: int, say) -> list[dict]:
    """The records of a run up to `step`, that of its checkpoint; that of the evaluation after it may be
    missing if the run was killed before.
    """
    records = []
    with suppress(FileNotFoundError):
        for record in read_metrics(run_directory, say):
            # an evaluation of this step without a finite best_metric is repeated
            failed = "loss" not in record and best_metric_of(record) is None
            if record["step"] < step or record["step"] == step and not failed:
                records.append(record)
    return records


# -----------------------------------------------------------------------------------------------------------
# The code of a run


def project_files(trainer: Path) -> dict[str, Path]:
    """The files of the project that are imported, by the names with which a run directory keeps them:
    trainer.py for `trainer`, unless that was typed into a notebook, and model/NAME for each other one.
    """
    trainer = trainer.resolve()
    files = {"trainer.py": trainer} if trainer.is_file() else {}
    for folder in (Path(__file__).resolve().parent, trainer.parent):
        ours = {path.stem for path in folder.glob("*")}
        for module in sorted(sys.modules):
            path = folder / f"{module.replace('.', '/')}.py"
            # its name is asked first: there are thousands of modules
            if module.partition(".")[0] in ours and path.is_file() and path != trainer:
                files[f"model/{path.relative_to(folder)}"] = path
    return files


def say_changes(run, say: Callable[[str], None]):
    """Says which of project_files differ from the copies that the run of `run.saved` keeps, if it does."""
    directory = Path(run.saved["path"]).parent.parent
    for name, path in project_files(run.trainer).items():
        kept = directory / name
        others = name == "trainer.py" and path.name != run.saved["settings"]["trainer"]
        if others or not kept.is_file():
            continue
        with suppress(OSError):  # it is only a note, and diff says why
            if filecmp.cmp(kept, path, shallow=False):
                continue
        now = os.path.relpath(path)
        say(f"{now} has changed since: {shlex.join(['diff', str(kept), now])}")


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in a folder, with -dirty if files differ from it; None if git does not
    say so within a second.
    """
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40",
             "--exclude=*"], capture_output=True, text=True, timeout=1, check=True).stdout.strip()


# -----------------------------------------------------------------------------------------------------------
# The log


class TrainLog:
    """train.log and the screen: all that a run says, and a line for each record. Every rank has one, but only
    that of rank 0 (`active`) prints and writes.
    """

    def __init__(self, path: Path, prefix: str, active: bool = True):
        self.active = active
        self._prefix = prefix
        self._days = {}  # of the last line on the screen and in the file
        self._steps = 0  # of the run, see begin
        self._bar = tqdm(disable=True)  # until `begin`
        self._lock = threading.Lock()  # the thread that writes checkpoints also calls say
        if active:
            with access(path):
                self._file = open(path, "a", buffering=1, encoding="utf-8", errors="replace")

    def begin(self, step: int, steps: int):
        """Shows a progress bar after `step` of `steps`, if the screen is a terminal."""
        self._steps = steps
        if sys.stdout.isatty() and all(os.get_terminal_size(sys.stdout.fileno())):
            self._bar = tqdm(total=steps, initial=step, dynamic_ncols=True, file=sys.stdout,
                             bar_format="|{bar:10}| {n_fmt}/{total_fmt} | {desc}")

    def say(self, text: str, on_screen: bool = True):
        if not self.active:
            return
        with self._lock:
            now = time.strftime("%F %T")
            with suppress(OSError):  # the terminal may be gone
                if on_screen:
                    line = self._stamped(text, now, "screen")
                    say(line) if self._bar.disable else self._bar.write(line)  # as with TQDM_DISABLE
            with suppress(OSError, UserError):  # a full disk must not stop the training
                self._file.write(self._stamped(text, now, "file") + "\n")

    def _stamped(self, text: str, now: str, where: str) -> str:
        """The text after the time, and after the date if it is the first of its day on the screen or in the
        file. Of several lines only the first has them.
        """
        before, self._days[where] = self._days.get(where), now[:10]
        return f"{now[11:] if before == now[:10] else now} {text}"

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


class RunLog:
    """The log of a run in directory `out`: a record for each logged step and each evaluation, which `write`
    adds to metrics.jsonl and train.log, and passes to all `loggers`. A logger has log(record) and close();
    one that needs the records before it is made finds them in `records`. Every rank has a RunLog, but only
    that of rank 0 prints and writes.
    """

    def __init__(self, out: Path, text: TrainLog, settings: dict, records: list[dict], val_tokens: int,
                 entropy: float, sync: str):
        """`records` are those so far, on all ranks; `sync` is what a line says of the parameters of all."""
        self.out = Path(out)
        self.settings = settings  # flags, plan and constants of the run
        self.val_tokens = val_tokens  # of all validation sets
        self.entropy = entropy  # of their unigrams, in nats
        self.mfu: Callable[[dict], float | None] = lambda record: None  # of the steps of a record
        self.records = records
        self.evaluations = evaluations_of(records)  # their best_metric by step, on all ranks
        self.loggers = []
        self._sync = sync
        self._metrics = None  # metrics.jsonl
        self._behind = False  # whether that lacks a record
        self._text = text
        self.active = text.active

    def say(self, text: str):
        """Prints a text and appends it to train.log."""
        self._text.say(text)

    def begin(self, step: int, files: dict[str, bytes]):
        """Opens the files of a run that has done `step` steps, and writes `files`, by name, into its
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
        """Starts the clock when the run has done `step` steps and `samples` samples."""
        self._first_step, self._first_samples = step, samples
        self._began = time.perf_counter()
        self.restart_clock(samples)

    def restart_clock(self, samples: int):
        """Excludes a pause that ends now, such as an evaluation, from tokens per second."""
        self._lap_samples, self._lap_began = samples, time.perf_counter()

    def wants(self, step: int) -> bool:
        """Whether a step is logged."""
        run = self.settings
        evaluated = step % run["eval_every"] == 0 and self.val_tokens > 0
        return step % run["log_every"] == 0 or evaluated or step in (1, run["steps"])

    def step(self, metrics, step: int, samples: int, grad_norm: float, /, **numbers):
        """Records and prints a training step, after which the run has consumed `samples`, if it is due, with
        the means over all ranks of `metrics`, a ddp_utils.Metrics. Every rank calls this after each step.
        `numbers`, the same on all ranks, become curves.
        """
        if self.active:
            self._text.tick(step)
        if not self.wants(step):  # the same on all ranks
            return
        means = metrics.reduce()
        grad_norm = float(grad_norm)
        machines = metrics.machines()
        refuse_taken([*numbers, *means])
        for name, value in numbers.items():
            if hasattr(value, "full_tensor"):  # it is sharded
                value = value.full_tensor()
            if hasattr(value, "item") and math.prod(value.shape) == 1:  # of torch or numpy
                value = value.item()
            if not isinstance(value, int | float | None):
                raise UserError(f"{name} cannot be logged: it is no number but {type(value).__name__}.")
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
        self.restart_clock(samples)  # after counting, which is not part of the next steps
        eta = max(run["steps"] - step, 0) * (now - self._began) / (step - self._first_step)
        self.write(record, step_line(record, eta, self._sync))

    def evaluation(self, step: int, samples: int, metrics: dict) -> bool:
        """Records and prints the results of an evaluation. Returns, on all ranks, whether it is the best."""
        ours = ("val_accuracy", "val_bits_per_byte")
        refuse_taken([name.removeprefix("val_") for name in metrics if name not in ours] + ["lr", "bp_steps"])
        record = {"step": step, "tokens": samples * self.settings["seq_len"], **metrics,
                  "time": round(time.time(), 3)}
        evaluations = evaluations_of([*self.records, without_nan(record)])
        # what counts no more, as it has no checkpoint, stays so
        self.evaluations = {at: max(c, self.evaluations.get(at, c)) for at, c in evaluations.items()}
        best = min(self.evaluations, key=self.evaluations.get, default=None) == step
        parts = [*results(metrics), f"unigram entropy {self.entropy:.4f}"]
        self.write(record, " | ".join(parts + ["best so far"] * (best and len(self.evaluations) > 1)))
        if "val_perplexity" in metrics:  # the loss is the model's own
            self._warn_of_loss(step, metrics["val_loss"])
        return best

    def _warn_of_loss(self, step: int, loss: float | None):
        entropy = self.entropy
        if 10 * step > self.settings["steps"] and (loss is None or not loss <= entropy):
            self.say(f"WARNING: after {step} steps the loss is above {entropy:.4f}, which a model without "
                     "any context would reach: try a lower --lr or more steps")

    def write(self, record: dict, line: str):
        """Adds a record to metrics.jsonl and its line for people to train.log; passes it to all loggers."""
        self.records.append(without_nan(record))
        if not self.active:
            return
        try:
            if self._behind:
                self._write_metrics()
            else:
                self._metrics.write(json.dumps(self.records[-1]) + "\n")
        except FAULTS as error:  # mostly a full disk
            self._behind = True
            self.say(f"WARNING: metrics.jsonl lacks a record ({first_line(error)}); the next one tries again")
        self._tell(lambda logger: logger.log(self.records[-1]))
        self._text.write(record, line)

    def _write_metrics(self):
        """Replaces metrics.jsonl by one with all records, if there is space for it."""
        path = self.out / "metrics.jsonl"
        write_atomically(path, *(json.dumps(record).encode() + b"\n" for record in self.records))
        self._metrics = open(path, "a", buffering=1, encoding="utf-8")  # writes each line at once
        self._behind = False

    def _tell(self, call: Callable):
        """Calls `call` with each logger. An error is said, and that one is called no more."""
        for logger in [*self.loggers]:
            try:
                call(logger)
            except FAULTS as error:  # of a package behind it, too
                self.loggers.remove(logger)
                self.say(f"WARNING: {type(logger).__name__} fails ({first_line(error)}), so it gets no more "
                         "records until the next start")

    def finish(self, step: int, samples: int, peak_memory: float, ending: str):
        """Says how fast the run was, and how it has ended."""
        if not self.active:
            return
        seconds = time.perf_counter() - self._began
        speed = (samples - self._first_samples) * self.settings["seq_len"] / seconds
        took = (f"{step - self._first_step} steps in {tqdm.format_interval(seconds)}, evaluations and saves "
                "included")
        best = ""
        if min(self.evaluations.values(), default=math.inf) < math.inf:
            at = min(self.evaluations, key=self.evaluations.get)
            best = f"; best evaluation {self.evaluations[at]:.4f} at step {at}"
        if self.records and not self.val_tokens:
            self._warn_of_loss(step, self.records[-1].get("loss"))
        self.say(f"{took}: {tqdm.format_sizeof(speed)} tok/s{best}; peak memory {peak_memory:.1f} GB")
        self.close()
        self.say(ending)

    def close(self):
        if not self.active:
            return
        with suppress(*FAULTS):
            if self._behind:
                self._write_metrics()
            self._metrics.close()
        self._text.close()
        self._tell(lambda logger: logger.close())


class MeanLoss:
    """Whether a loss is the mean over a micro-batch, as F.cross_entropy returns by default. The loop divides
    it by the labels of the step, and the log again, so that all losses of a start are that much too small.
    A logger of the log, up to the first evaluation of this start: later a small loss may be one of texts
    that were learned by heart.
    """

    def __init__(self, run, log, hook):
        self._run, self._log, self._hook = run, log, hook
        self._first = None  # the first loss since this start
        # a loss that the first one cannot be far below; with --init-from only the evaluation tells
        self._usual = log.entropy
        if run.saved:
            self._usual = run.saved["loss"]
        elif run.args.init_from:
            self._usual = None
        self._done = False

    def log(self, record: dict):
        if self._done:
            return
        if record.get("loss") is not None:
            self._labels = record["labels"] / (self._run.grad_accum * self._run.world.world_size)
            self._loss = record["loss"]
            norm = record.get("grad_norm") or 0
            # usual norms are 5 to 40 times as large, those of a mean half of it; few labels don't show it
            if not self._first and 0 < norm * self._labels ** 0.75 < self._loss < 50 < self._labels:
                self._log.say(
                    f"WARNING: the gradient norm {norm:.2g} is far too small for this loss: the objective "
                    "seems to be a mean, but has to be a sum over labels")
            self._first = self._first or self._loss
            self._judge(self._usual)
        elif "val_loss" in record and self._first:
            if not self._run.saved:
                self._judge(record["val_loss"])
            self._done = True

    def _judge(self, usual: float | None):
        if usual and self._first < usual / 10 and usual / 2 < self._loss * self._labels < usual * 2:
            self._done = True
            self._log.say(f"WARNING: the loss is {self._loss:.4g}, but times the {self._labels:,.0f} labels "
                          f"of a micro-batch it is {self._loss * self._labels:.4g}, as large as usual, so "
                          "it seems to be a mean that is divided by them once more. The objective and the "
                          "sums of a trainer are sums over labels: with F.cross_entropy write "
                          "reduction='sum'")

    def close(self):
        self._hook.remove()  # what is trained after the run is not of it


if __name__ == "__main__":
    from loggers.command import main
    run_command(main)

"""Watches a machine, and draws the log of a run.

    python monitor.py                               # CPU, RAM, disk, network, GPUs, every 4 seconds
    python monitor.py --once --json                 # one reading, for a script
    python monitor.py runs/hrm-tiny-stdlib-bpe4096  # a summary of the run, and its curves as a PNG
    python monitor.py runs/one runs/two             # a line for each: loss, speed, efficiency
    watch -n 4 python monitor.py runs/one           # every 4 seconds, in a remote terminal
    tensorboard --logdir runs                       # compares runs

A trainer's RunLog writes to the run directory: train.log has all printed text, metrics.jsonl a
JSON object for each logged step and each evaluation, and history.json the same data as lists. If
matplotlib and tensorboard are installed, it also draws the curves as a picture and logs them for
TensorBoard. Each logged step has one line and one point in each curve, even after a kill. GB and
MB are 2^30 and 2^20 bytes, as in nvidia-smi, htop and torch's messages.
"""

import json
import math
import os
import statistics
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from cli.errors import PACKAGE_ERRORS, UserError, say
from cli.parser import ArgumentParser, bounded, local_path
from loggers.machine import format_reading, read_machine, why_not
from loggers.picture import draw_curves
from monitor import evaluations_of, read_config, read_metrics, without_nan


def summarize(records: list[dict]) -> dict:
    """The last logged step of a run, its last validation loss, and that of its best evaluation."""
    last = ([record for record in records if "loss" in record] or [{"step": 0}])[-1]
    losses = {r["step"]: r["val_loss"] for r in records if r.get("val_loss") is not None}
    metrics = evaluations_of(records)
    best = min(metrics, key=metrics.get, default=None)
    summary = {key: last.get(key) for key in ("step", "loss", "tokens")}
    return summary | {"val_loss": losses.get(max(losses, default=None)),
                      "best_val_loss": losses.get(best), "best_step": best}


def watch_machine(args: Namespace):
    while True:
        try:
            reading = read_machine(args.interval)
        except PACKAGE_ERRORS as error:
            raise UserError("CPU, memory and network are read with psutil: "
                            f"{why_not('psutil', error)}.") from None
        say(json.dumps(reading) if args.json else "\n".join(format_reading(reading)))
        if args.once:
            return


def records_of(run: Path) -> list[dict]:
    """The records of a run. Raises UserError where there is none."""
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
    return records


def show_runs(runs: list[Path]):
    """Prints a JSON object for each run. `tokens_per_sec` is the median of its logged steps, and `efficiency`
    compares the tokens per second of a process with the first run's. The number of processes is that of a
    run's last start. Of several runs, those without records are left out.
    """
    first = None
    for run in runs:
        try:
            records = records_of(run)
        except UserError as error:  # such as a file in runs/*
            if len(runs) == 1 or not run.exists():
                raise
            print(f"left out: {error}", file=sys.stderr)
            continue
        speeds = [record["tokens_per_sec"] for record in records if record.get("tokens_per_sec")]
        speed = statistics.median(speeds or [math.nan])
        per_process = speed / read_config(run).get("settings", {}).get("world_size", math.nan)
        first = first or per_process
        say(json.dumps({"run": run.resolve().name} | without_nan(summarize(records) | {
            "tokens_per_sec": speed, "tokens_per_sec_per_process": per_process,
            "efficiency": per_process / first})))
        if len(runs) == 1:
            show_picture(run / "training_history.png", draw_curves, run.resolve().name, records)
    if first is None:
        raise UserError("none of these is the directory of a run.")


def show_picture(path: Path, draw, *what):
    try:
        own = path.with_name(f".tmp-{os.getpid()}.png")  # the run or another command may draw it, too
        draw(*what, own)
        if path.is_dir():
            own.unlink()
            raise UserError(f"{path} cannot be written: it is a directory")
        os.replace(own, path)
        print(f"the curves are in {path}", file=sys.stderr)
    except PACKAGE_ERRORS as error:  # a run may be there for reading only
        print(f"the curves are not drawn: {why_not('matplotlib', error)}", file=sys.stderr)


def main(argv: list[str] | None = None):
    """The command. Ctrl-C ends it without an error."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=local_path, metavar="RUN_DIR",
                        help="one run: print a summary, draw its curves; several: print a line for each; "
                        "none: watch this machine\nThe efficiency of a run is the speed of a process, "
                        "relative to the first run's.")
    parser.add_argument("--interval", type=bounded(0.1, 1e6), default=4.0,
                        help="seconds between readings (4)")
    parser.add_argument("--once", action="store_true", help="stop after the first reading")
    parser.add_argument("--json", action="store_true", help="print readings as JSON, one per line, in "
                        "bytes")
    with suppress(KeyboardInterrupt):
        args = parser.parse_args(argv)
        show_runs(args.runs) if args.runs else watch_machine(args)

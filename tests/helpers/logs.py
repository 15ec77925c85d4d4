"""Logs of runs, and packages that are missing, for the tests of monitor.py and loggers/."""

import json
import sys
import time
from pathlib import Path

import pytest

import monitor
from cli.errors import run_command
from loggers.command import main


def block(monkeypatch, name: str, directory: Path | None = None, code: str = "") -> None:
    """Makes the import of a package fail as if it were not installed, or run `code` from a directory."""
    for module in [*sys.modules]:
        if module.split(".")[0] == name or module == f"torch.utils.{name}":
            monkeypatch.delitem(sys.modules, module)
    if directory:
        (directory / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(directory)
    else:
        monkeypatch.setitem(sys.modules, name, None)


def clock(monkeypatch) -> list[float]:
    """The time, which stands still."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def command(capsys, *arguments) -> tuple[int, str, str]:
    """Exit code, output and errors of `python monitor.py …`, run in this process."""
    with pytest.raises(SystemExit) as end:
        run_command(lambda: main([str(a) for a in arguments]))
    return end.value.code or 0, *capsys.readouterr()


def record(step: int, **changes) -> dict:
    return {"step": step, "loss": 5.0 - step / 10, "lr": 1e-3, "grad_norm": 1.0, "tokens": step * 100,
            "tokens_per_sec": 50.0, "mfu": 0.25, "mem_gb": 1.0, "time": 1.7e9 + step,
            "System/CPU_percent": 5.0} | changes


def write_records(out: Path, *records: dict) -> None:
    (out / "metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in records))


def begun(out: Path, step: int = 0, *loggers, active=True, val_tokens=8, **settings) -> monitor.RunLog:
    """The log of a run after `step` steps of one row of 8 tokens. `loggers` are made of it."""
    settings = {"steps": 10, "seq_len": 8, "log_every": 1, "eval_every": 5, "epoch_tokens": 400} | settings
    text = monitor.TrainLog("[Rank 0/1]", active)
    text.open(out / "train.log")
    records = monitor.records_until(out, step, text.say)
    log = monitor.RunLog(out, text, settings, records, val_tokens, 2.89861, lambda step: "OK")
    log.loggers += [make(log) for make in loggers]
    log.begin(step, {"of/a.start": b"x"})
    log.start_clock(step, step)
    return log


def steps_in(out: Path) -> list[int]:
    return [found["step"] for found in monitor.read_metrics(out)]

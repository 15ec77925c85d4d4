"""Runs beside each other: `python monitor.py A B …`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_monitor import command, record

import monitor


def make(directory: Path, name: str, losses: dict[int, float], config: dict, **changes) -> Path:
    """A run with a record for each of 20 steps and an evaluation for each of `losses`."""
    run = directory / name
    run.mkdir()
    records = []
    for step in range(1, 21):
        records.append(record(step, **changes))
        if step in losses:
            records.append({"step": step, "tokens": 100 * step, "val_loss": losses[step]})
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (run / "config.json").write_text(json.dumps(config))
    return run


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list[Path]:
    """The last one is older than the number of processes in config.json."""
    monkeypatch.chdir(tmp_path)
    return [make(tmp_path, "one", {10: 3.0, 20: 3.5}, {"settings": {"world_size": 1}}),
            make(tmp_path, "two", {20: 2.5}, {"settings": {"world_size": 2}}),
            make(tmp_path, "old", {}, {}, tokens_per_sec=1000.0)]


def compared(capsys, *runs) -> dict[str, dict]:
    """What is printed, by run."""
    code, out, errors = command(capsys, *runs)
    assert code == 0, errors
    return {found["run"]: found for found in map(json.loads, out.splitlines())}


def test_each_run_is_a_line(runs, capsys):
    """A summary as that of one run, but with the median of tokens per second, which a pause leaves alone."""
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    lines[-2]["tokens_per_sec"] = 1.0
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, two, old = compared(capsys, *runs).values()
    assert one == {"run": "one", "step": 20, "loss": 3.0, "tokens": 2000, "tokens_per_sec": 50.0,
                   "val_loss": 3.5, "best_val_loss": 3.0, "best_step": 10, "tokens_per_sec_per_process": 50.0,
                   "efficiency": 1.0}
    assert two["efficiency"] == 0.5 and old["efficiency"] is old["best_val_loss"] is None


def test_efficiency_needs_a_speed_of_the_first_run(runs, tmp_path, capsys):
    """It needs neither equal sizes nor an end: a killed run counts as far as it got."""
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines()
    (runs[1] / "metrics.jsonl").write_text("\n".join([*lines[:3], lines[4][:20]]))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").touch()
    (tmp_path / "begun" / "config.json").write_text('{"settings": {"world_size": 4}}')
    for first, second, wanted in ((runs[0], runs[1], 0.5), (runs[1], runs[0], 2.0),
                                  (runs[0], "begun", None), ("begun", runs[0], None)):
        found = compared(capsys, first, second)
        assert found[Path(second).name]["efficiency"] == wanted
    assert found["begun"]["tokens_per_sec_per_process"] is None


def test_what_cannot_be_compared_is_one_sentence(runs, tmp_path, capsys):
    code, out, errors = command(capsys, runs[0], "nowhere")
    assert code == 2 and errors.startswith("error: nowhere has no metrics.jsonl"), errors
    assert errors.count("\n") == 1
    # as in runs/*; the others are compared
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.txt").touch()
    code, out, errors = command(capsys, *runs, "other", "notes.txt")
    assert code == 0 and out.count("\n") == 3, errors
    assert "left out: other has no" in errors and "left out: notes.txt has no" in errors, errors
    assert command(capsys, "other", "notes.txt")[0] == 2
    (runs[1] / "config.json").write_text("{")
    assert compared(capsys, *runs)["two"]["tokens_per_sec"] == 50.0


@pytest.mark.full
def test_comparing_needs_no_torch(runs):
    code = ("import sys; from loggers.command import main; main(sys.argv[1:]); "
            "sys.exit('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, *runs], cwd=Path(monitor.__file__).parent)
    assert done.returncode == 0

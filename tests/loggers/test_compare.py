"""loggers/command.py, show_runs: runs beside each other, `python monitor.py A B …`."""

import json
from pathlib import Path

import pytest

from cli.errors import UserError
from loggers.command import main


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list[str]:
    """Of 20 steps. The last one is older than the number of processes in config.json."""
    monkeypatch.chdir(tmp_path)
    for name, losses, config, speed in (
            ("one", {10: 3.0, 20: 3.5}, {"settings": {"world_size": 1}}, 50.0),
            ("two", {20: 2.5}, {"settings": {"world_size": 2}}, 50.0), ("old", {}, {}, 1000.0)):
        (tmp_path / name).mkdir()
        records = [{"step": step, "loss": 5.0 - step / 10, "tokens": 100 * step, "tokens_per_sec": speed}
                   for step in range(1, 21)]
        records[18]["tokens_per_sec"] = 1.0  # a pause, which a median leaves alone
        records += [{"step": step, "tokens": 100 * step, "val_loss": loss} for step, loss in losses.items()]
        Path(name, "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        Path(name, "config.json").write_text(json.dumps(config))
    return ["one", "two", "old"]


@pytest.fixture
def compared(capsys):
    """Compares runs: what is printed, by run."""
    def compare(*names) -> dict[str, dict]:
        main(names)
        return {found["run"]: found for found in map(json.loads, capsys.readouterr().out.splitlines())}

    return compare


def test_each_run_is_a_line(runs, compared):
    one, two, old = compared(*runs).values()
    assert one == {"run": "one", "step": 20, "loss": 3.0, "tokens": 2000, "tokens_per_sec": 50.0,
                   "val_loss": 3.5, "best_val_loss": 3.0, "best_step": 10, "tokens_per_sec_per_process": 50.0,
                   "efficiency": 1.0}
    assert two["efficiency"] == 0.5 and old["efficiency"] is old["best_val_loss"] is None


@pytest.mark.parametrize("first, second, wanted", [
    ("one", "two", 0.5), ("two", "one", 2.0), ("one", "begun", None), ("begun", "one", None)])
def test_efficiency_needs_a_speed_of_both(runs, compared, first, second, wanted):
    """It needs neither equal sizes nor an end: a killed run counts as far as it got."""
    lines = Path("two/metrics.jsonl").read_text().splitlines()
    Path("two/metrics.jsonl").write_text("\n".join([*lines[:3], lines[4][:20]]))
    Path("begun").mkdir()
    Path("begun/metrics.jsonl").touch()
    Path("begun/config.json").write_text('{"settings": {"world_size": 4}}')
    assert compared(first, second)[second]["efficiency"] == wanted


def test_what_cannot_be_compared_is_left_out(runs, compared, capsys):
    """As in runs/*; but what isn't there is a mistake."""
    Path("other").mkdir()
    Path("notes.txt").touch()
    Path("two/config.json").write_text("{")
    main([*runs, "other", "notes.txt"])
    out, errors = capsys.readouterr()
    assert [json.loads(line)["run"] for line in out.splitlines()] == runs and '"tokens_per_sec": 50.0' in out
    assert "left out: other has" in errors and "left out: notes.txt has" in errors
    for names in (("one", "nowhere"), ("other", "notes.txt"), ("other",)):
        with pytest.raises(UserError, match="nowhere|none|other"):
            main(names)

"""Runs beside each other: `python monitor.py A B …`, and losses over tokens in TensorBoard."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_monitor import begun, command, curves, png_size, record

import monitor

SETTINGS = {"lr": 3e-3, "optimizer": "adamw", "init_from": None, "BETAS": [0.9, 0.95], "batch": 8}


def make(directory: Path, name: str, losses: dict[int, float], config: dict | None, **changes) -> Path:
    """A run with a record for each of 20 steps and an evaluation for each of `losses`."""
    run = directory / name
    run.mkdir()
    records = []
    for step in range(1, 21):
        records.append(record(step, **changes))
        if step in losses:
            records.append({"step": step, "tokens": 100 * step, "val_loss": losses[step],
                            "val_bits_per_byte": losses[step] / 2})
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if config is not None:
        (run / "config.json").write_text(json.dumps(config))
    return run


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    older = {"settings": {**SETTINGS, "lr": 1e-2, "MIN_LR_RATIO": 0.1, "world_size": 1,
                          "wanted_batch": 8, "eval_batch": 8, "largest_batch": 8}}
    newer = {"parameters": 868352, "settings": {
        **SETTINGS, "min_lr": 0.1, "BETAS": [0.9, 0.99], "world_size": 2,
        "wanted_batch": 9, "eval_batch": 9, "largest_batch": 9}}
    tuned = {"parameters": 868352, "settings": {**SETTINGS, "min_lr": 0.1, "init_from": "hf:gpt2"}}
    return [make(tmp_path, "older", {10: 3.0, 20: 3.5}, older), make(tmp_path, "newer", {20: 2.5}, newer),
            make(tmp_path, "tuned", {}, tuned, tokens_per_sec=100.0)]


def test_a_table_says_what_runs_reached_and_which_flags_differ(runs, capsys):
    code, out, errors = command(capsys, *[run.name for run in runs])
    assert code == 0 and errors.endswith("the curves are in comparison.png\n"), errors
    header, *lines = [line.split() for line in out.splitlines()]
    assert header == ["older", "newer", "tuned"]
    assert {line[0]: line[1:] for line in lines[:8]} == {
        "parameters": ["None", "868352", "868352"], "tokens": ["2000"] * 3, "val_loss": ["3", "2.5", "-"],
        "val_bits_per_byte": ["1.5", "1.25", "-"], "tokens_per_sec": ["50", "50", "100"],
        "hours": [f"{1900 / speed / 3600:.8g}" for speed in (50, 50, 100)],
        "tokens_per_sec_per_process": ["50", "25", "-"], "efficiency": ["1", "0.5", "-"]}
    # a flag that a run lacks is compared among the others; a None is a value
    assert [line[0] for line in lines[8:]] == ["lr", "init_from", "BETAS", "world_size"]
    assert lines[8] == ["lr", "0.01", "0.003", "0.003"]
    assert lines[9] == ["init_from", "None", "None", "hf:gpt2"]


def test_for_scripts_it_is_one_object(runs, capsys):
    code, out, _ = command(capsys, *runs, "--json")
    line, = out.splitlines()
    found = json.loads(line)
    assert code == 0 and [*found] == [*map(str, runs)]
    older, newer, tuned = found.values()
    assert older["val_loss"] == 3.0 and older["parameters"] is tuned["val_loss"] is None
    assert newer["BETAS"] == [0.9, 0.99] and "batch" not in newer and "min_lr" not in newer
    assert newer["hours"] == pytest.approx(1900 / 50 / 3600)


def test_efficiency_needs_a_speed_of_the_first_run(runs, tmp_path, capsys):
    """It needs neither equal sizes nor an end: a killed run counts as far as it got."""
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines()
    (runs[1] / "metrics.jsonl").write_text("\n".join([*lines[:3], lines[4][:20]]))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").touch()
    (tmp_path / "begun" / "config.json").write_text('{"settings": {"world_size": 4}}')
    for first, second, wanted in ((runs[0], runs[1], 0.5), (runs[1], runs[0], 2.0),
                                  (runs[0], "begun", None), ("begun", runs[0], None)):
        code, out, errors = command(capsys, first, second, "--json")
        assert code == 0 and json.loads(out)[str(second)]["efficiency"] == wanted, errors
    assert json.loads(out)["begun"]["tokens_per_sec_per_process"] is None


def test_a_pause_is_no_training(tmp_path, runs, capsys):
    """Not as in the times of the records; a run that goes on at twice the speed takes half of the time."""
    path = runs[0] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] > 10:
            line["time"] = 2e9
        if line["step"] > 10 and "loss" in line:
            line["tokens_per_sec"] *= 2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, out, _ = command(capsys, *runs, "--json")
    older, newer, _ = json.loads(out).values()
    assert older["hours"] == pytest.approx((900 / 50 + 1000 / 100) / 3600) != newer["hours"]


def test_the_picture_has_each_run_over_steps_tokens_and_hours(runs, capsys, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *given, **named: (
        drawn.extend([*self.axes, *self.legends]), save(self, *given, **named)))
    command(capsys, *runs)
    assert png_size(Path("comparison.png")) == (1600, 600)
    *drawn, legend = drawn
    assert [axes.get_xlabel() for axes in drawn] == ["step", "tokens", "hours"]
    assert [text.get_text() for text in legend.get_texts()] == [*map(str, runs)]
    for axes, last in zip(drawn, (20, 2000, 1900 / 50 / 3600)):
        assert axes.get_yscale() == "log" and len(axes.lines) == 6
        training, validation = axes.lines[:2]
        assert training.get_xdata()[-1] == pytest.approx(last)
        assert [*training.get_ydata()] == [5 - step / 10 for step in range(1, 21)]
        assert [y for y in validation.get_ydata() if y == y] == [3.0, 3.5]


def test_what_cannot_be_compared_is_one_sentence(runs, tmp_path, capsys, monkeypatch):
    code, out, errors = command(capsys, runs[0], "nowhere")
    assert code == 2 and not out and errors.startswith("error: nowhere has no metrics.jsonl"), errors
    assert errors.count("\n") == 1
    # as in runs/*; the table has the others
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.txt").touch()
    code, out, errors = command(capsys, *runs, "other", "notes.txt", "--json")
    assert code == 0 and [*json.loads(out)] == [*map(str, runs)], errors
    assert "left out: other has no" in errors and "left out: notes.txt has no" in errors, errors
    assert command(capsys, "other", "notes.txt")[0] == 2
    # one that has just begun, and one whose config.json is damaged, have less to say
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").touch()
    (runs[1] / "config.json").write_text("{")
    code, out, _ = command(capsys, *runs, "begun", "--json")
    assert code == 0 and json.loads(out)["begun"]["tokens"] is None
    assert json.loads(out)[str(runs[1])]["lr"] is None
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, errors = command(capsys, *runs)
    assert code == 0 and out and "the curves are not drawn: pip install matplotlib" in errors


def test_tensorboard_has_the_losses_over_tokens(tmp_path):
    log = begun(tmp_path)
    log.write(record(1), "")
    log.write(record(2, loss=float("nan")), "")
    found = {"val_loss": 4.0, "val_loss/other": 5.0, "val_bits_per_byte": 2.0}
    log.write({"step": 2, "tokens": 200, **found}, "")
    log.write({"step": 3, "val_loss": 9.0}, "")  # of an older run
    log.close()
    log = begun(tmp_path, 2)  # a resumed run has the points once
    log.write(record(3), "")
    log.close()
    found = curves(tmp_path)
    over_tokens = {tag: points for tag, points in found.items() if tag.startswith("Tokens/")}
    assert over_tokens == {
        "Tokens/Loss/train_step": [(100, pytest.approx(4.9)), (300, pytest.approx(4.7))],
        "Tokens/Loss/val_epoch": [(200, 4.0)], "Tokens/Loss/val_epoch/other": [(200, 5.0)],
        "Tokens/Loss/val_bits_per_byte": [(200, 2.0)]}
    assert found["Loss/train_step"] == [(1, pytest.approx(4.9)), (3, pytest.approx(4.7))]


@pytest.mark.full
def test_comparing_needs_no_torch(runs):
    code = ("import sys; from loggers.command import main; main(sys.argv[1:]); "
            "sys.exit('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, *runs], cwd=Path(monitor.__file__).parent)
    assert done.returncode == 0

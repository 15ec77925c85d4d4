"""monitor.py: what a run's log keeps, says and hands on, and the command `python monitor.py`."""

import errno
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, finish, start
from logs import begun, clock, command, record, steps_in, write_records

import monitor
from cli.errors import UserError
from monitor import refuse_taken

# ------------------------------------------------------------------------------------------------ the records

BROKEN = [b'{"step": 3, "lo', b"\0" * 40, b"[1]", b"5", b'"step"', b"{}", b'{"step": "x"}', b'{"step": 3.0}',
          b'{"step": true}']


def test_broken_lines_are_counted_and_lose_no_other(tmp_path, capsys):
    lines = [json.dumps(record(step)).encode() for step in range(1, 11)]
    mixed = [BROKEN[0], *lines[:4], *BROKEN[1:], *lines[4:], b""]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(mixed))
    assert "9 of 19" in command(capsys, tmp_path)[2]
    log = begun(tmp_path, 10)
    assert [r["step"] for r in log.records] == [*range(1, 11)] and "9 of 19" in capsys.readouterr().out
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines() == lines
    assert begun(tmp_path, 10).records == log.records and not capsys.readouterr().out


def test_a_run_goes_on_with_the_records_of_its_checkpoint(tmp_path):
    """Without what was logged later, and an evaluation of this step that has found no number."""
    log = begun(tmp_path)
    for step in range(1, 9):
        log.write(record(step), "")
        log.write({"step": step, "val_loss": math.nan if step == 5 else 4.0}, "")
    for step, evaluated in (6, [1, 2, 3, 4, 6]), (5, [1, 2, 3, 4]):
        log = begun(tmp_path, step)
        assert [r["step"] for r in log.records if "loss" in r] == [*range(1, step + 1)]
        assert [*log.evaluations] == evaluated
        assert (step == 6) == ({"step": 5, "val_loss": None} in log.records)


@pytest.mark.parametrize("active", [True, False])
def test_all_ranks_agree_on_the_best_evaluation(tmp_path, active):
    """The first of equal ones; none without a number; and the first of another best_metric."""
    log = begun(tmp_path, active=active)
    found = [{"val_loss": math.nan}, {"val_loss": 3.0}, {"val_loss": 3.0}, {"val_loss": math.inf},
             {"val_loss": 2.0}, {"val_loss": 1.0, "best_metric": 9.0}, {"val_loss": 0.5, "best_metric": 9.5}]
    best = [log.evaluation(step, 8, result) for step, result in enumerate(found, 1)]
    assert best == [False, True, False, False, True, True, False]
    assert log.evaluations == {2: math.inf, 3: math.inf, 5: math.inf, 6: 9.0, 7: 9.5}
    # a step with a best_metric is no evaluation
    assert monitor.evaluations_of([record(1, best_metric=1.0), {"step": 2, "val_loss": 2.0}]) == {2: 2.0}


def test_sums_become_means():
    sums = {"loss": 6.0, "nats": 6.0, "labels": 2, "samples": 1, "bytes": 4}
    assert monitor.means_of_sums(sums) == {"val_loss": 3, "val_bits_per_byte": 1.5 / math.log(2),
                                           "val_perplexity": math.exp(3)}
    assert monitor.means_of_sums(sums | {"bytes": 0})["val_bits_per_byte"] == 6 / math.log(2)
    assert "val_bits_per_byte" not in monitor.means_of_sums(sums | {"bytes": math.nan})
    found = monitor.means_of_sums(sums | {"exact": 3, "samples": 4, "correct": 1, "perplexity": 10.0,
                                          "perplexity (count)": 4, "mine": 5.0, "mine (count)": 0})
    assert math.isnan(found.pop("val_mine"))
    assert found == {"val_loss": 3, "val_exact": 0.75, "val_accuracy": 0.5, "val_perplexity": 2.5}
    assert [monitor.means_of_sums(sums | {"nats": nats})["val_perplexity"] for nats in (1e9, 2 * 709)] == [
        math.inf, math.exp(709)]  # no float64 is larger
    del sums["nats"]  # another loss than the cross-entropy of a text
    assert monitor.means_of_sums(sums | {"labels": 0}) == {"val_loss": 6.0}


@pytest.mark.parametrize("val_tokens, logged", [(8, [1, 3, 4, 6, 8, 9, 10]), (0, [1, 4, 8, 10])])
def test_which_steps_are_logged(tmp_path, val_tokens, logged):
    """Those with an evaluation, too, if there is anything to evaluate."""
    log = begun(tmp_path, val_tokens=val_tokens, log_every=4, eval_every=3)
    assert (tmp_path / "of" / "a.start").read_bytes() == b"x"
    assert [step for step in range(1, 11) if log.wants(step)] == logged


def metrics_of(**means) -> SimpleNamespace:
    """What Metrics says of a step."""
    return SimpleNamespace(reduce=lambda: means, machines=lambda: {"mem_gb": 0.1}, labels=8)


def numbers_in(text: str) -> list[str]:
    return re.findall(r"(?<!\d)[\d.]*\d%?(?=\b|\s|$)", text)


def test_a_step_is_a_record_and_a_line(tmp_path, monkeypatch, capsys):
    """With a number of the trainer's own. The clock has begun after step 2."""
    now = clock(monkeypatch)
    log = begun(tmp_path, 2, log_every=2, eval_every=9)
    log.mfu = lambda found: found["tokens_per_sec"] / 100
    now[0] = 4.0
    log.step(metrics_of(loss=1.5), 4, 6, math.inf, lr=1e-3, mine=torch.tensor([2.5]))
    wanted = {"step": 4, "loss": 1.5, "lr": 1e-3, "mine": 2.5, "grad_norm": None, "labels": 8, "mem_gb": 0.1,
              "skipped": 1, "tokens": 48, "mfu": 0.08, "tokens_per_sec": 8.0}
    found, = monitor.read_metrics(tmp_path)
    assert found.pop("time") > 1.7e9 and found == wanted
    line = capsys.readouterr().out.partition("step ")[2]
    for text in "4/10 ", " 1.5000 ", " 00:12 ", " 1.0e-03 ", "mine 2.5 ", " 8.0% ":
        assert text in line
    assert "epoch" not in line
    log.settings |= {"epochs": 3.0, "epoch_tokens": 48}
    now[0] = 5.0
    for step in 5, 6:  # of which one is not logged
        log.step(metrics_of(loss=1.5), step, step + 2, 1.0, lr=1e-3)
    assert " epoch 1.3/3 (00:03 each) " in capsys.readouterr().out  # 48 tokens at 16 per second
    found = log.records[1:]
    assert [(r["step"], r["skipped"], r["tokens_per_sec"]) for r in found] == [(6, 0, 16.0)]
    for name, value in {"mfu": 1, "val_x": 1, "loss": 1, "mine": [1, 2]}.items():
        with pytest.raises(UserError, match=name):
            log.step(metrics_of(loss=1.5), 8, 9, 1.0, **{name: value})


def test_an_evaluation_has_its_numbers_and_warns_above_the_entropy(tmp_path, capsys):
    log = begun(tmp_path)
    found = {"val_loss": 2.62509, "val_accuracy": 0.1234, "val_bits_per_byte": 1.5, "val_mine": 7.0,
             "val_loss/a": 1.0, "val_loss/b": 2.0}
    capsys.readouterr()
    log.evaluation(9, 1, found)
    line = capsys.readouterr().out.partition("step ")[2]
    assert numbers_in(line) == ["9", "2.6251", "12.3%", "1.5000", "7", "1.0000", "2.0000", "2.8986"]
    numbers = numbers_in(" | ".join(monitor.format_results({"val_exact": 0.5, "val_exact/a": 0.25})))
    assert numbers == ["50.0%", "25.0%"]
    for step, perplexity, warns in (1, 99.0, False), (2, 99.0, True), (2, 2.0, False), (2, math.nan, True):
        log.evaluation(step, 1, {"val_loss": 1.0, "val_perplexity": perplexity})
        assert ("WARNING" in capsys.readouterr().out) == warns
    with pytest.raises(UserError, match="tokens"):
        log.evaluation(1, 1, {"val_tokens": 1.0})


def test_a_finished_run_says_how_fast_it_was(tmp_path, monkeypatch, capsys):
    """And which of equal evaluations is the best, the first."""
    now = clock(monkeypatch)
    log = begun(tmp_path, 2)
    log.evaluations = {2: 4.0, 4: 3.0, 9: 3.0}
    now[0] = 16.0
    log.finish(10, 12, 0.16, "the end")
    assert numbers_in(capsys.readouterr().out.splitlines()[0])[-7:] == [
        "8", "00", "16", "5.00", "3.0000", "4", "0.2"]


# --------------------------------------------------------------------------------- what fails and ends no run


def test_a_disk_that_is_full_for_a_while_costs_no_record(tmp_path, monkeypatch, capsys):
    """Also not the last one, and not where half a line was written."""
    log = begun(tmp_path)
    class Full:
        def write(self, text):
            with open(tmp_path / "metrics.jsonl", "a") as file:
                file.write(text[:9])
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(*_):
        raise UserError("this cannot be written: free some space.")

    for first in (1, 4):
        log.write(record(first), "")
        log._metrics = Full()
        log.write(record(first + 1), "")
        with monkeypatch.context() as patch:
            patch.setattr(monitor, "write_atomically", full)
            log.write(record(first + 2), "")
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    log.close()
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().out.count("WARNING: metrics.jsonl") == 4
    monkeypatch.setattr(monitor, "write_atomically", full)
    with pytest.raises(UserError):  # no run begins then, and the old log stays
        begun(tmp_path, 3)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_logger_that_fails_is_left_out_alone(tmp_path, capsys):
    """It is said once, also of its end, and the others have each record."""
    def fail(*_):
        raise ConnectionError("gone")

    got = []
    log = begun(tmp_path, 0, lambda log: SimpleNamespace(log=fail, close=len),
                lambda log: SimpleNamespace(log=got.append, close=fail))
    for step in range(1, 4):
        log.write(record(step), "")
    assert capsys.readouterr().out.count("ConnectionError: gone") == 1
    log.close()
    assert capsys.readouterr().out.count("ConnectionError: gone") == 1
    assert [r["step"] for r in got] == steps_in(tmp_path) == [1, 2, 3]


# -------------------------------------------------------------------------------------- train.log, the screen


def test_a_terminal_with_a_size_gets_a_bar(tmp_path, monkeypatch, capsys):
    """On standard output. Without a size it would be nothing."""
    drawn = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(
        isatty=lambda: True, fileno=lambda: 1, write=drawn.append, flush=lambda: None, encoding="utf-8"))
    for size in (80, 0), (120, 24):
        monkeypatch.setattr(os, "get_terminal_size", lambda fd=1, size=size: os.terminal_size(size))
        log = begun(tmp_path)
        assert log._text.bar.disable == (size[1] == 0)
    log._text.tick(10)
    log._text.bar.set_postfix_str("a sample")
    log.close()
    assert "10/10, a sample |" in "".join(drawn) and not capsys.readouterr().err


def test_a_terminal_that_is_gone_does_not_end_the_run(tmp_path, monkeypatch):
    def gone(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    log = begun(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", gone)
        log.say("one")
        log._text.bar = SimpleNamespace(write=gone, disable=False)
        log.say("two")
    assert [line.split()[-1] for line in (tmp_path / "train.log").read_text().splitlines()] == ["one", "two"]


def test_each_entry_has_the_time_and_the_first_of_a_day_the_date(tmp_path, monkeypatch):
    """On the screen and in the file, though the screen does not show each line. A table follows its title."""
    screen = []
    log = begun(tmp_path)
    log._text.bar = SimpleNamespace(write=screen.append, disable=False,
                                     set_description_str=lambda *_, **__: None)
    for now, text in (("2026-12-31 23:59:58", "one"), ("2026-12-31 23:59:59", "a plan\n  rows  1"),
                      ("2027-01-01 00:00:00", None), ("2027-01-01 00:00:01", "two")):
        monkeypatch.setattr(time, "strftime", lambda form, now=now: now)
        log.say(text) if text else log.write(record(1), "loss 4.9")
    lines = ["2026-12-31 23:59:58 one", "23:59:59 a plan", "  rows  1"]
    assert (tmp_path / "train.log").read_text().splitlines() == [
        *lines, "2027-01-01 00:00:00 [Rank 0/1] step 1/10 | loss 4.9", "00:00:01 two"]
    assert "\n".join(screen).splitlines() == [*lines, "2027-01-01 00:00:01 two"]  # the bar shows the step


def test_ranks_that_are_not_active_write_nothing(tmp_path, capsys):
    log = begun(tmp_path, active=False)
    log.say("x")
    log.write(record(1), "")
    log.step(metrics_of(loss=1.0), 1, 8, 1.0, lr=1e-3)
    log.evaluation(1, 8, {"val_loss": 1.0})
    log.finish(1, 8, 0.0, "")
    log.close()
    assert not any(tmp_path.iterdir()) and not capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list[str]:
    """One that has just begun, one that diverged, and one whose config.json is half a file."""
    monkeypatch.chdir(tmp_path)
    one = [record(10), {"step": 10, "val_loss": 3.0}, record(20, tokens_per_sec=1.0),  # a pause
           {"step": 20, "val_loss": 3.5}, record(25, tokens_per_sec=60.0)]
    diverged = [record(10), record(20, loss=None), {"step": 20, "val_loss": None}]
    names = ["one", "two", "begun", "old"]
    for ranks, (name, records) in enumerate(zip(names, (one, diverged, [], one)), 1):
        Path(name).mkdir()
        write_records(Path(name), *records)
        config = json.dumps({"settings": {"world_size": ranks}})
        Path(name, "config.json").write_text(config[:-(ranks == 4) or None])
    with open("two/metrics.jsonl", "a") as file:
        file.write('{"step": 21, "lo')
    Path("broken").mkdir()
    Path("broken", "metrics.jsonl").write_text("no json\n")
    Path("file").touch()
    return names


def test_each_run_is_a_line_of_json(runs, capsys):
    """Also while it is written, and before its first record. What is no run is left out, as in runs/*."""
    _, out, errors = command(capsys, *runs, "broken", "file")
    found = [json.loads(line) for line in out.splitlines()]
    assert found[0] == {
        "run": "one", "step": 25, "loss": 2.5, "tokens": 2500, "tokens_per_sec": 50.0, "val_loss": 3.5,
        "best_val_loss": 3.0, "best_step": 10, "tokens_per_sec_per_process": 50.0, "efficiency": 1.0}
    assert [(line["run"], line["step"], line["efficiency"]) for line in found[1:]] == [
        ("two", 20, 0.5), ("begun", 0, None), ("old", 25, None)]
    assert found[1]["loss"] is found[1]["val_loss"] is None and errors.count("left out: ") == 2
    for first, efficiency in ("two", 2.0), ("begun", None), ("old", None):
        line = command(capsys, first, "one")[1].splitlines()[1]
        assert json.loads(line) == found[0] | {"efficiency": efficiency}
    assert json.loads(command(capsys, "begun")[1])["step"] == 0


@pytest.mark.parametrize("arguments, named", [
    ("file", "file"), ("broken", "broken/metrics.jsonl"), ("one nowhere", "nowhere"),
    ("--interval 0", "--interval"), ("file broken", "none")])
def test_bad_input_is_one_sentence(runs, capsys, arguments, named):
    code, _, errors = command(capsys, *arguments.split())
    assert code == 2 and re.fullmatch(f"(left out: .*\n)*error: .*{named}.*\n", errors), errors


def test_the_command_ends_quietly(tmp_path):
    """At Ctrl-C, without its reader, and without a standard output. It imports no torch, to start quickly."""
    pytest.importorskip("psutil")
    code = ("import sys, monitor; sys.argv[1:] = ['--interval', '0.1']; monitor.main(); "
            "print('torch' in sys.modules)")
    process = start([sys.executable, "-c", code])
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    done = finish(process, 20)
    assert done.code == 0 and done.out.splitlines()[-1] == "False" and "Traceback" not in done.out, done.out
    write_records(tmp_path, record(1))
    for rest in "--interval 0.1 | head -n 0", f"{tmp_path} {tmp_path} >&-":
        done = finish(start(["bash", "-c", f"python {ROOT}/monitor.py {rest}; echo ${{PIPESTATUS[0]}}"]), 20)
        assert done.out == "0\n"


def test_names_that_a_record_has_already():
    for name in "labels bytes tokens mfu time skipped System epoch_loss val_x step own".split():
        with pytest.raises(UserError, match=f" {name} "):
            refuse_taken(["own", name])
    refuse_taken(["own", "square"])
